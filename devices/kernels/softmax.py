"""Logits times values: the inner loops that turn a split's logits and value rows into its state.

- softmax: in place exp(s − m), and m
- weigh: l += p and acc += p · v, row after row in ascending order, for a tile of weights and n value rows

`exp` is our own (lanes.py): a library's would differ between machines. Products and sums round separately. l is summed
like a column of ones, so that a column of V which is everywhere the same power of two comes out exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    INT64,
    ITEM,
    LANES,
    alloca_once,
    at,
    counting,
    exponential,
    floats,
    int64,
    load_lanes,
    load_one,
    max_lanes,
    maximum,
    spread,
    whole,
)
from tierloop.devices.kernels.products import TILE

_VECTORS = {1: 4, 2: 2, 3: 1, 4: 1}
"""Vectors of 16 columns at a time for each number of query rows: what 16 registers of 8 floats hold."""

_SOFTMAX = (WORD, WORD, WORD)
_WEIGH = (WORD, WORD, WORD, WORD, WORD, WORD, WORD)


@inline(types.void, *_SOFTMAX)
def _softmax(builder: Any, logits: Any, n: Any, state: Any) -> None:
    end = whole(builder, builder.add(n, int64(LANES - 1)), LANES)
    with counting(builder, n, end) as j:
        store(builder, ir.Constant(FLOAT, float("-inf")), at(builder, logits, j, 4))
    lanes = ir.VectorType(FLOAT, LANES)
    top = alloca_once(builder, lanes)
    builder.store(floats(float("-inf")), top)
    with counting(builder, int64(0), end, LANES) as j:
        builder.store(maximum(builder, builder.load(top), load(builder, at(builder, logits, j, 4), lanes)), top)
    m = max_lanes(builder, builder.load(top))
    shift = spread(builder, m)
    with counting(builder, int64(0), end, LANES) as j:
        place = at(builder, logits, j, 4)
        store(builder, exponential(builder, builder.fsub(load(builder, place, lanes), shift)), place)
    store(builder, m, state)


@inline(types.void, *_WEIGH, literals=2)
def _weigh(
    context: Any, builder: Any, dtype: int, group: int, weights: Any, weight_stride: Any, rows: Any, n: Any, dim: Any,
    acc: Any, acc_stride: Any,
) -> None:  # fmt: skip
    p = [at(builder, weights, builder.mul(weight_stride, int64(g))) for g in range(group)]
    accs = [at(builder, acc, builder.mul(acc_stride, int64(g))) for g in range(group)]

    def columns(first: Any, count: int, with_sum: bool = False) -> None:
        """`count` vectors of 16 columns from `first` on (0: one single column), or none; and l; over all rows."""
        kind = ir.VectorType(FLOAT, LANES) if count else FLOAT
        fetch = load_lanes if count else load_one
        starts = [] if first is None else [builder.add(first, int64(LANES * k)) for k in range(max(count, 1))]
        targets = {(g, k): at(builder, accs[g], start, 4) for k, start in enumerate(starts) for g in range(group)}
        if with_sum:
            targets |= {(g, -1): at(builder, accs[g], int64(-4)) for g in range(group)}
        kinds = {key: kind if key[1] >= 0 else FLOAT for key in targets}
        places = {key: alloca_once(builder, kinds[key]) for key in targets}
        for key, target in targets.items():
            builder.store(load(builder, target, kinds[key]), places[key])

        def add(key: tuple[int, int], x: Any) -> None:
            builder.store(builder.fadd(builder.load(places[key]), x), places[key])

        with counting(builder, int64(0), n) as j:
            row = load(builder, at(builder, rows, j, 8), INT64)
            factors = [load(builder, at(builder, one, j, 4), FLOAT) for one in p]
            if with_sum:
                for g, factor in enumerate(factors):
                    add((g, -1), factor)
            if count:
                factors = [spread(builder, x) for x in factors]
            for k, start in enumerate(starts):
                v = fetch(context, builder, dtype, at(builder, row, start, ITEM[dtype]))
                for g, factor in enumerate(factors):
                    add((g, k), builder.fmul(factor, v))
        for key, target in targets.items():
            store(builder, builder.load(places[key]), target)

    count = _VECTORS[group]
    wide, vectors = whole(builder, dim, count * LANES), whole(builder, dim, LANES)
    # l goes along with the first columns, where its chain of additions costs nothing.
    with builder.if_else(builder.icmp_signed(">", wide, int64(0))) as (some, none):
        with some:
            columns(int64(0), count, with_sum=True)
            with counting(builder, int64(count * LANES), wide, count * LANES) as i:
                columns(i, count)
        with none:
            columns(None, 0, with_sum=True)
    if count > 1:
        with counting(builder, wide, vectors, LANES) as i:
            columns(i, 1)
    with counting(builder, vectors, dim) as i:
        columns(i, 0)


@entry(*_SOFTMAX)
def _compiled_softmax(logits: int, n: int, state: int) -> None:
    _softmax(logits, n, state)


def _make_weigh(dtype: int, group: int) -> int:
    @entry(*_WEIGH)
    def weigh(weights: int, weight_stride: int, rows: int, n: int, dim: int, acc: int, acc_stride: int) -> None:
        _weigh(dtype, group, weights, weight_stride, rows, n, dim, acc, acc_stride)

    return weigh


call_softmax = caller(*_SOFTMAX)
"""(address, logits, n, state): n > 0 logits, with room up to the next multiple of 16, become weights; writes m, l."""
call_weigh = caller(*_WEIGH)
"""(address, weights, weight stride, rows, n, dim, acc, acc stride), strides in bytes."""

SOFTMAX: int = _compiled_softmax
WEIGH = np.array([_make_weigh(dtype, group) for dtype in range(3) for group in range(1, TILE + 1)], dtype=np.int64)
"""Addresses, at dtype · TILE + number of query rows − 1."""
