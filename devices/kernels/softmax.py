"""Logits times values: the inner loops that turn a split's logits and value rows into its state.

- cap: c · tanh(x / c) in place
- softmax: in place exp(s − m), and m, for a tile of queries
- rescale: weights times the scales of value rows that are codes
- weigh: l = Σ p and acc = Σ p · v, row after row in ascending order, for a tile of weights and n value rows

Logits and weights of a tile are float32 (n, width). `exp` and `tanh` are our own (lanes.py): a library's would differ
between machines. l is summed like a column of ones, so that a column of V which is everywhere the same power of two
comes out exactly.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    INT64,
    ITEM,
    LANES,
    NUM_TYPES,
    alloca_once,
    at,
    counting,
    exponential,
    floats,
    fused,
    hyperbolic_tangent,
    int64,
    load_lanes,
    load_one,
    shuffle,
    spread,
    whole,
)
from tierloop.devices.kernels.products import TILE, WIDTH_OF, WIDTHS, Asked

_VECTORS = {1: 4, 2: 2, 3: 1, 4: 1}
"""Vectors of 16 columns at a time for each number of queries: what 16 registers of 8 floats hold."""

_CAP = (WORD, WORD, REAL)
_SOFTMAX = (WORD, WORD, WORD)
_RESCALE = (WORD, WORD, WORD, WORD, WORD)
_WEIGH = (WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD)


@inline(types.void, *_CAP)
def _cap(builder: Any, logits: Any, n: Any, cap: Any) -> None:
    lanes = ir.VectorType(FLOAT, LANES)
    limit = spread(builder, cap)
    with counting(builder, int64(0), n, LANES) as j:
        place = at(builder, logits, j, 4)
        ratio = builder.fdiv(load(builder, place, lanes), limit)
        store(builder, builder.fmul(hyperbolic_tangent(builder, ratio), limit), place)


@inline(types.boolean, WORD, WORD)
def any_nothing(builder: Any, logits: Any, n: Any) -> Any:
    """Whether one of n logits is −∞."""
    lanes = ir.VectorType(FLOAT, LANES)
    nothing = float("-inf")
    found = alloca_once(builder, ir.IntType(1))
    builder.store(ir.Constant(ir.IntType(1), 0), found)
    end = whole(builder, n, LANES)
    marks = alloca_once(builder, ir.IntType(LANES))
    builder.store(ir.Constant(ir.IntType(LANES), 0), marks)
    with counting(builder, int64(0), end, LANES) as j:
        here = builder.fcmp_ordered("==", load(builder, at(builder, logits, j, 4), lanes), floats(nothing))
        builder.store(builder.or_(builder.load(marks), builder.bitcast(here, ir.IntType(LANES))), marks)
    with counting(builder, end, n) as j:
        one = builder.fcmp_ordered("==", load(builder, at(builder, logits, j, 4), FLOAT), ir.Constant(FLOAT, nothing))
        builder.store(builder.or_(builder.load(found), one), found)
    some = builder.icmp_unsigned("!=", builder.load(marks), ir.Constant(ir.IntType(LANES), 0))
    return builder.or_(builder.load(found), some)


@inline(types.void, *_SOFTMAX, literals=1)
def _softmax(builder: Any, width: int, logits: Any, n: Any, top: Any) -> None:
    n = builder.mul(n, int64(width))
    end = whole(builder, builder.add(n, int64(LANES - 1)), LANES)
    nothing = float("-inf")

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    with counting(builder, n, end) as j:
        store(builder, ir.Constant(FLOAT, nothing), at(builder, logits, j, 4))
    lanes = ir.VectorType(FLOAT, LANES)
    held = alloca_once(builder, lanes)
    builder.store(floats(nothing), held)
    with counting(builder, int64(0), end, LANES) as j:
        builder.store(larger(load(builder, at(builder, logits, j, 4), lanes), builder.load(held)), held)
    m, size = builder.load(held), LANES
    while size > width:
        size //= 2
        low, high = list(range(size)), list(range(size, 2 * size))
        m = larger(shuffle(builder, m, m, low), shuffle(builder, m, m, high))
    store(builder, m, top)
    # A query for which no row counts: any finite shift gives weights of 0.
    shift = builder.select(builder.fcmp_ordered("==", m, floats(nothing, width)), floats(0.0, width), m)
    shift = shuffle(builder, shift, shift, [i % width for i in range(LANES)])
    with counting(builder, int64(0), end, LANES) as j:
        place = at(builder, logits, j, 4)
        store(builder, exponential(builder, builder.fsub(load(builder, place, lanes), shift)), place)


@inline(types.void, *_RESCALE, literals=1)
def _rescale(builder: Any, width: int, weights: Any, rows: Any, n: Any, offset: Any, out: Any) -> None:
    kind = ir.VectorType(FLOAT, width)
    with counting(builder, int64(0), n) as j:
        row = load(builder, at(builder, rows, j, 8), INT64)
        scale = spread(builder, load(builder, builder.add(row, offset), FLOAT), width)
        weight = load(builder, at(builder, weights, j, 4 * width), kind)
        store(builder, builder.fmul(weight, scale), at(builder, out, j, 4 * width))


@inline(types.void, *_WEIGH, literals=2)
def _weigh(
    context: Any, builder: Any, dtype: int, count: int, weights: Any, sums: Any, rows: Any, n: Any, dim: Any,
    acc: Any, acc_stride: Any, later: Any, later_nbytes: Any, num_later: Any,
) -> None:  # fmt: skip
    width = int(WIDTH_OF[count])
    accs = [at(builder, acc, builder.mul(acc_stride, int64(g))) for g in range(count)]

    def columns(first: Any, vectors: int, is_first: bool = False) -> None:
        """`vectors` of 16 columns from `first` on (0: one single column), or none; over all rows."""
        kind = ir.VectorType(FLOAT, LANES) if vectors else FLOAT
        fetch = load_lanes if vectors else load_one
        starts = [] if first is None else [builder.add(first, int64(LANES * k)) for k in range(max(vectors, 1))]
        targets = {(g, k): at(builder, accs[g], start, 4) for k, start in enumerate(starts) for g in range(count)}
        places = {key: alloca_once(builder, kind) for key in targets}
        for place in places.values():
            builder.store(floats(0.0) if vectors else ir.Constant(FLOAT, 0.0), place)
        sum_kind = ir.VectorType(FLOAT, width)
        total = alloca_once(builder, sum_kind)
        if is_first:
            builder.store(floats(0.0, width), total)
        with counting(builder, int64(0), n) as j:
            row = load(builder, at(builder, rows, j, 8), INT64)
            if is_first:
                p = load(builder, at(builder, sums, j, 4 * width), sum_kind)
                builder.store(builder.fadd(builder.load(total), p), total)
            if vectors == _VECTORS[count]:
                asked.step(max(1, vectors * ITEM[dtype] // 4))
            weight = at(builder, weights, j, 4 * width)
            factors = [load(builder, builder.add(weight, int64(4 * g)), FLOAT) for g in range(count)]
            if vectors:
                factors = [spread(builder, x) for x in factors]
            for k, start in enumerate(starts):
                v = fetch(context, builder, dtype, at(builder, row, start, ITEM[dtype]))
                for g, factor in enumerate(factors):
                    builder.store(fused(builder, factor, v, builder.load(places[g, k])), places[g, k])
        for key, target in targets.items():
            store(builder, builder.load(places[key]), target)
        if is_first:
            for g in range(count):
                one = builder.extract_element(builder.load(total), ir.Constant(ir.IntType(32), g))
                store(builder, one, builder.add(accs[g], int64(-4)))

    vectors = _VECTORS[count]
    # One round for each row and block of columns, of which the last may be narrow.
    passes = builder.udiv(builder.add(dim, int64(vectors * LANES - 1)), int64(vectors * LANES))
    pace = builder.udiv(builder.shl(num_later, int64(16)), builder.mul(n, passes))
    asked = Asked(builder, later, pace, later_nbytes)
    wide, narrow = whole(builder, dim, vectors * LANES), whole(builder, dim, LANES)
    # l goes along with the first columns, where its chain of additions costs nothing.
    with builder.if_else(builder.icmp_signed(">", wide, int64(0))) as (some, none):
        with some:
            columns(int64(0), vectors, is_first=True)
            with counting(builder, int64(vectors * LANES), wide, vectors * LANES) as i:
                columns(i, vectors)
        with none:
            columns(None, 0, is_first=True)
    if vectors > 1:
        with counting(builder, wide, narrow, LANES) as i:
            columns(i, 1)
    with counting(builder, narrow, dim) as i:
        columns(i, 0)


@entry(*_CAP)
def _compiled_cap(logits: int, n: int, cap: float) -> None:
    _cap(logits, n, cap)


def _make_softmax(width: int) -> int:
    @entry(*_SOFTMAX)
    def softmax(logits: int, n: int, top: int) -> None:
        _softmax(width, logits, n, top)

    return softmax


def _make_rescale(width: int) -> int:
    @entry(*_RESCALE)
    def rescale(weights: int, rows: int, n: int, offset: int, out: int) -> None:
        _rescale(width, weights, rows, n, offset, out)

    return rescale


def _make_weigh(dtype: int, count: int) -> int:
    @entry(*_WEIGH)
    def weigh(
        weights: int, sums: int, rows: int, n: int, dim: int, acc: int, acc_stride: int, later: int, later_nbytes: int,
        num_later: int,
    ) -> None:  # fmt: skip
        _weigh(dtype, count, weights, sums, rows, n, dim, acc, acc_stride, later, later_nbytes, num_later)

    return weigh


call_cap = caller(*_CAP)
"""(address, logits, n, cap): n logits in place, with room up to the next multiple of 16."""
call_softmax = caller(*_SOFTMAX)
"""(address, logits, n, m): n > 0 rows of logits, with room up to the next multiple of 16 floats, become weights; the
largest logits that are numbers, float32 (width,), go to `m`. The weight of a NaN is NaN."""
call_rescale = caller(*_RESCALE)
"""(address, weights, rows, n, offset, out): weights times the float32 at `offset` bytes into each row."""
call_weigh = caller(*_WEIGH)
"""(address, weights, sums, rows, n, dim, acc, acc stride, later, later nbytes, num later).

l, the float32 before each acc, is the sum of `sums`, float32 (n, width), which are the weights without the scales
of rows. `later` is a table of `num later` rows of `later nbytes` each that are asked for meanwhile.
"""


def cap_address() -> int:
    """Compiled `cap`."""
    return _compiled_cap


def softmax_addresses() -> list[int]:
    """Compiled `softmax`, by width."""
    return [_make_softmax(width) for width in WIDTHS]


def rescale_addresses() -> list[int]:
    """Compiled `rescale`, by width."""
    return [_make_rescale(width) for width in WIDTHS]


def weigh_addresses() -> list[int]:
    """Compiled `weigh`, by dtype, then number of queries."""
    return [_make_weigh(dtype, count) for dtype in range(NUM_TYPES) for count in range(1, TILE + 1)]
