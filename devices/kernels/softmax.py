"""Logits times values: the inner loops that turn a split's logits and value rows into its state.

- softmax: in place exp(s − m), and the pair (m, l) with l summed over 16 lanes of consecutive rows
- weigh: acc += p · v, row after row in ascending order, for a tile of weights and n value rows

`exp` is our own (lanes.py): a library's would differ between machines. Products and sums round separately.
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
    INT32,
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
    sum_lanes,
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
    top, total = alloca_once(builder, lanes), alloca_once(builder, lanes)
    builder.store(floats(float("-inf")), top)
    builder.store(floats(0.0), total)
    with counting(builder, int64(0), end, LANES) as j:
        builder.store(maximum(builder, builder.load(top), load(builder, at(builder, logits, j, 4), lanes)), top)
    m = max_lanes(builder, builder.load(top))
    shift = spread(builder, m)
    with counting(builder, int64(0), end, LANES) as j:
        place = at(builder, logits, j, 4)
        p = exponential(builder, builder.fsub(load(builder, place, lanes), shift))
        store(builder, p, place)
        builder.store(builder.fadd(builder.load(total), p), total)
    store(builder, m, state)
    whole_sum = sum_lanes(builder, [builder.load(total)])
    store(builder, builder.extract_element(whole_sum, ir.Constant(INT32, 0)), at(builder, state, int64(4)))


@inline(types.void, *_WEIGH, literals=2)
def _weigh(
    context: Any, builder: Any, dtype: int, group: int, weights: Any, weight_stride: Any, rows: Any, n: Any, dim: Any,
    acc: Any, acc_stride: Any,
) -> None:  # fmt: skip
    p = [at(builder, weights, builder.mul(weight_stride, int64(g))) for g in range(group)]
    accs = [at(builder, acc, builder.mul(acc_stride, int64(g))) for g in range(group)]

    def columns(first: Any, count: int) -> None:
        """`count` vectors of 16 columns from `first` on (0: one single column), over all rows."""
        kind = ir.VectorType(FLOAT, LANES) if count else FLOAT
        fetch = load_lanes if count else load_one
        starts = [builder.add(first, int64(LANES * k)) for k in range(max(count, 1))]
        targets = [(g, k, at(builder, accs[g], start, 4)) for k, start in enumerate(starts) for g in range(group)]
        places = {(g, k): alloca_once(builder, kind) for g, k, _ in targets}
        for g, k, target in targets:
            builder.store(load(builder, target, kind), places[g, k])
        with counting(builder, int64(0), n) as j:
            row = load(builder, at(builder, rows, j, 8), INT64)
            factors = [load(builder, at(builder, one, j, 4), FLOAT) for one in p]
            if count:
                factors = [spread(builder, x) for x in factors]
            for k, start in enumerate(starts):
                v = fetch(context, builder, dtype, at(builder, row, start, ITEM[dtype]))
                for g, factor in enumerate(factors):
                    place = places[g, k]
                    builder.store(builder.fadd(builder.load(place), builder.fmul(factor, v)), place)
        for g, k, target in targets:
            store(builder, builder.load(places[g, k]), target)

    count = _VECTORS[group]
    steady, vectors = whole(builder, dim, count * LANES), whole(builder, dim, LANES)
    with counting(builder, int64(0), steady, count * LANES) as i:
        columns(i, count)
    if count > 1:
        with counting(builder, steady, vectors, LANES) as i:
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
