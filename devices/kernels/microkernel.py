"""The inner loops: the one core that dense, paged and sparse rows share, in `attend`, `logits`, `combine` and `score`.

Each is a C function, compiled once, and called by its address in `ENTRIES`. Rows come as a table of addresses, so that
it does not matter how they lie. A *tile* of up to four query rows is worked on together, so that a K or V row is loaded
and widened once for all of them; which tile a query row is in never changes its bits, nor do the shapes of
`_registers`.

- dots: logit = (q·k over 16 lanes) · scale, for a tile of queries and n key rows
- bounds: Σ_c max(q_c·min_c, q_c·max_c), the same with minimum-maximum summaries
- softmax: in place exp(s − m), and the pair (m, l) with l summed over 16 lanes of consecutive rows
- weigh: acc += p · v, row after row in ascending order, for a tile of weights and n value rows
- merge_rows: the state of two disjoint sets of rows, into the first
- divide: acc / l, zeros where l is 0

Numbers that are not finite: a NaN or +∞ logit makes its whole state NaN; −∞ is a row that does not count. A value row
that is not finite spoils the output even where its weight is 0, unless the row is masked for the query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from tierloop.devices.kernels.compiled import FLOAT as SCALAR
from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    FLOAT32,
    INT32,
    INT64,
    ITEM,
    LANES,
    at,
    counting,
    exponential,
    floats,
    int64,
    load_lanes,
    load_one,
    max_lanes,
    maximum,
    shuffle,
    spread,
    sum_lanes,
    whole,
)

TILE = 4
"""Query rows that are worked on together, at most."""
_LINE = 64


def _registers() -> dict[int, tuple[int, int]]:
    """Key rows at a time, and passes over their lanes, for each number of query rows: what the registers hold.

    With 16 registers of 8 floats a second pass takes the upper 8 lanes. Measured on Zen 3, head_dim 64, float32, three
    query rows: two key rows in two passes 11.2 ns per row, two in one pass 13.2, four in two passes 15.5.
    """
    if llvm.get_host_cpu_features().get("avx512f"):
        return {1: (4, 1), 2: (4, 1), 3: (4, 1), 4: (4, 1)}
    return {1: (4, 2), 2: (4, 2), 3: (2, 2), 4: (2, 2)}


_Parts = list[Any]
"""Addresses or vectors of what one row consists of: a key, or a minimum and a maximum."""


def _sums(
    context: Any,
    builder: Any,
    dtype: int,
    passes: int,
    queries: list[Any],
    rows: list[_Parts],
    dim: Any,
    term: Callable[[Any, _Parts], Any],
) -> list[Any]:
    """Σ term(query, row) over `dim` elements in the order of lanes.py: for each query a vector with one sum per row.

    `queries` are addresses of float32 that is filled up with zeros to a multiple of 16; `rows` those of stored
    elements, of which nothing beyond `dim` is read.
    """
    width = LANES // passes
    kind = ir.VectorType(FLOAT, width)
    full = whole(builder, dim, LANES)
    rest = builder.sub(dim, full)
    has_rest = builder.icmp_signed("!=", rest, int64(0))
    places = [[cgutils.alloca_once(builder, FLOAT, size=int64(LANES)) for _ in parts] for parts in rows]
    tails = [[builder.ptrtoint(place, INT64) for place in line] for line in places]
    with builder.if_then(has_rest, likely=False):
        for parts, line in zip(rows, tails, strict=True):
            for part, tail in zip(parts, line, strict=True):
                store(builder, floats(0.0), tail)
                with counting(builder, int64(0), rest) as i:
                    element = at(builder, part, builder.add(full, i), ITEM[dtype])
                    store(builder, load_one(context, builder, dtype, element), at(builder, tail, i, 4))

    def one_pass(lane: int) -> list[list[Any]]:
        sums = [[cgutils.alloca_once(builder, kind) for _ in rows] for _ in queries]
        for place in (place for line in sums for place in line):
            builder.store(floats(0.0, width), place)

        def step(i: Any, vectors: list[_Parts]) -> None:
            for query, line in zip(queries, sums, strict=True):
                q = load(builder, at(builder, query, i, 4), kind)
                for parts, place in zip(vectors, line, strict=True):
                    builder.store(builder.fadd(builder.load(place), term(q, parts)), place)

        with counting(builder, int64(0), full, LANES) as start:
            i = builder.add(start, int64(lane))
            step(i, [[load_lanes(context, builder, dtype, at(builder, part, i, ITEM[dtype]), width) for part in parts]
                     for parts in rows])  # fmt: skip
        with builder.if_then(has_rest, likely=False):
            i = builder.add(full, int64(lane))
            step(i, [[load(builder, at(builder, tail, int64(lane), 4), kind) for tail in line] for line in tails])
        return [[builder.load(place) for place in line] for line in sums]

    parts_of_lanes = [one_pass(lane) for lane in range(0, LANES, width)]
    sums = parts_of_lanes[0]
    for more in parts_of_lanes[1:]:
        sums = [[builder.fadd(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(sums, more, strict=True)]
    return [sum_lanes(builder, line) for line in sums]


def _over_rows(builder: Any, n: Any, step: int, tile: Callable[[Any, int], None]) -> None:
    """Call `tile(first, count)` for rows 0 … n: `step` at a time, then one at a time."""
    steady = whole(builder, n, step)
    with counting(builder, int64(0), steady, step) as j:
        tile(j, step)
    if step > 1:
        with counting(builder, steady, n) as j:
            tile(j, 1)


def _row(builder: Any, rows: Any, j: Any) -> Any:
    return load(builder, at(builder, rows, j, 8), INT64)


def _prefetch(builder: Any, row: Any, nbytes: Any) -> None:
    """Ask for the lines of a row."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    with counting(builder, int64(0), nbytes, _LINE) as i:
        builder.call(ask, [builder.inttoptr(at(builder, row, i), byte), *(ir.Constant(INT32, x) for x in (0, 2, 1))])


@inline(types.void, *_DOTS, literals=2)
def _dots(
    context: Any, builder: Any, dtype: int, group: int, queries: Any, query_stride: Any, rows: Any, n: Any, dim: Any,
    out: Any, out_stride: Any, scale: Any, ahead: Any, ahead_nbytes: Any,
) -> None:  # fmt: skip
    steps, passes = _registers()[group]
    q = [at(builder, queries, builder.mul(query_stride, int64(g))) for g in range(group)]

    def tile(j: Any, count: int) -> None:
        keys = [[_row(builder, rows, builder.add(j, int64(t)))] for t in range(count)]
        with builder.if_then(builder.icmp_signed("!=", ahead_nbytes, int64(0))):
            for t in range(count):
                _prefetch(builder, _row(builder, ahead, builder.add(j, int64(t))), ahead_nbytes)
        sums = _sums(context, builder, dtype, passes, q, keys, dim, lambda x, parts: builder.fmul(x, parts[0]))
        for g, line in enumerate(sums):
            logits = builder.fmul(line, spread(builder, scale, count))
            store(builder, logits, at(builder, at(builder, out, builder.mul(out_stride, int64(g))), j, 4))

    _over_rows(builder, n, steps, tile)


@inline(types.void, *_BOUNDS, literals=1)
def _bounds(
    context: Any, builder: Any, group: int, queries: Any, query_stride: Any, rows: Any, n: Any, dim: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    q = [at(builder, queries, builder.mul(query_stride, int64(g))) for g in range(group)]

    def term(x: Any, parts: _Parts) -> Any:
        low, high = (builder.fmul(x, part) for part in parts)
        return maximum(builder, low, high)

    def tile(j: Any, _: int) -> None:
        low = _row(builder, rows, j)
        high = at(builder, low, dim, 4)
        for g, line in enumerate(_sums(context, builder, FLOAT32, 2, q, [[low, high]], dim, term)):
            store(builder, line, at(builder, at(builder, out, builder.mul(out_stride, int64(g))), j, 4))

    _over_rows(builder, n, 1, tile)


@inline(types.void, *_SOFTMAX)
def _softmax(builder: Any, logits: Any, n: Any, state: Any) -> None:
    end = whole(builder, builder.add(n, int64(LANES - 1)), LANES)
    with counting(builder, n, end) as j:
        store(builder, ir.Constant(FLOAT, float("-inf")), at(builder, logits, j, 4))
    lanes = floats(0.0).type
    top = cgutils.alloca_once(builder, lanes)
    builder.store(floats(float("-inf")), top)
    with counting(builder, int64(0), end, LANES) as j:
        builder.store(maximum(builder, builder.load(top), load(builder, at(builder, logits, j, 4), lanes)), top)
    m = max_lanes(builder, builder.load(top))
    shift = spread(builder, m)
    total = cgutils.alloca_once(builder, lanes)
    builder.store(floats(0.0), total)
    with counting(builder, int64(0), end, LANES) as j:
        place = at(builder, logits, j, 4)
        p = exponential(builder, builder.fsub(load(builder, place, lanes), shift))
        store(builder, p, place)
        builder.store(builder.fadd(builder.load(total), p), total)
    store(builder, m, state)
    total_of_lanes = sum_lanes(builder, [builder.load(total)])
    store(builder, builder.extract_element(total_of_lanes, ir.Constant(INT32, 0)), at(builder, state, int64(4)))


@inline(types.void, *_WEIGH, literals=2)
def _weigh(
    context: Any, builder: Any, dtype: int, group: int, weights: Any, weight_stride: Any, rows: Any, n: Any, dim: Any,
    acc: Any, acc_stride: Any,
) -> None:  # fmt: skip
    p = [at(builder, weights, builder.mul(weight_stride, int64(g))) for g in range(group)]
    sums = [at(builder, acc, builder.mul(acc_stride, int64(g))) for g in range(group)]

    def columns(first: Any, count: int, width: int) -> None:
        """`count` vectors of `width` columns from `first` on, for all rows."""
        starts = [builder.add(first, int64(width * k)) for k in range(count)]
        kind = ir.VectorType(FLOAT, width) if width > 1 else FLOAT
        places = [[cgutils.alloca_once(builder, kind) for _ in starts] for _ in sums]
        for base, line in zip(sums, places, strict=True):
            for start, place in zip(starts, line, strict=True):
                builder.store(load(builder, at(builder, base, start, 4), kind), place)
        with counting(builder, int64(0), n) as j:
            row = _row(builder, rows, j)
            factors = [load(builder, at(builder, one, j, 4), FLOAT) for one in p]
            if width > 1:
                factors = [spread(builder, x, width) for x in factors]
            for k, start in enumerate(starts):
                element = at(builder, row, start, ITEM[dtype])
                v = (
                    load_lanes(context, builder, dtype, element, width)
                    if width > 1
                    else load_one(context, builder, dtype, element)
                )
                for line, factor in zip(places, factors, strict=True):
                    builder.store(builder.fadd(builder.load(line[k]), builder.fmul(factor, v)), line[k])
        for base, line in zip(sums, places, strict=True):
            for start, place in zip(starts, line, strict=True):
                store(builder, builder.load(place), at(builder, base, start, 4))

    wide = {1: 4, 2: 2, 3: 1, 4: 1}[group]
    steady, vectors = whole(builder, dim, wide * LANES), whole(builder, dim, LANES)
    with counting(builder, int64(0), steady, wide * LANES) as i:
        columns(i, wide, LANES)
    if wide > 1:
        with counting(builder, steady, vectors, LANES) as i:
            columns(i, 1, LANES)
    with counting(builder, vectors, dim) as i:
        columns(i, 1, 1)


@inline(types.void, *_MERGE)
def _merge_rows(builder: Any, first: Any, second: Any, rows: Any, dim: Any) -> None:
    nbytes = builder.mul(builder.add(dim, int64(2)), int64(4))
    nothing = ir.Constant(FLOAT, float("-inf"))
    with counting(builder, int64(0), rows) as j:
        a, b = (at(builder, base, builder.mul(nbytes, j)) for base in (first, second))
        m_a, m_b = load(builder, a, FLOAT), load(builder, b, FLOAT)
        with builder.if_then(builder.icmp_signed("==", *(builder.zext(builder.fcmp_ordered("==", m_b, nothing), INT64), int64(0)))):
            with builder.if_else(builder.fcmp_ordered("==", m_a, nothing)) as (empty, both):
                pass
