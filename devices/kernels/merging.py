"""Merging states in the fixed tree: the arithmetic of two states, and the order for any number of nodes.

Nodes come in ascending order of the splits they cover. Two neighbours meet at the lowest tree node that covers both:
its level is the number of bits by which their split ids differ. A new node first lets everything on the stack merge
that meets below its own level, so that a state is merged exactly where the tree says, with at most one state per level
held. Splits without rows never appear: merging with an identity changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import (
    INTS,
    caller,
    entry,
    inline,
    kernel,
    load,
    load_float,
    move_bytes,
    store,
    store_float,
)
from tierloop.devices.kernels.lanes import (
    FLOAT,
    INT32,
    LANES,
    at,
    counting,
    exponential,
    int64,
    maximum,
    shuffle,
    spread,
    whole,
)

MAX_LEVELS = 63
"""More levels than split ids have bits."""


@inline(REAL, REAL)
def exp_one(builder: Any, x: Any) -> Any:
    """The kernels' own exp of one number ≤ 0."""
    return builder.extract_element(exponential(builder, spread(builder, x, 4)), ir.Constant(INT32, 0))


@inline(REAL, REAL, REAL)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger number, NaN if either is."""
    return maximum(builder, a, b)


@inline(WORD, WORD, WORD)
def meeting_level(builder: Any, a: Any, b: Any) -> Any:
    """The level of the lowest node that covers splits a and b: the number of bits of a xor b."""
    zeros = builder.ctlz(builder.xor(a, b), ir.Constant(ir.IntType(1), 0))
    return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)


_MERGE = (WORD, WORD, WORD, WORD)


@inline(types.void, *_MERGE)
def _merge_rows(builder: Any, first: Any, second: Any, rows: Any, dim: Any) -> None:
    n = builder.add(dim, int64(2))
    nbytes = builder.mul(n, int64(4))
    nothing = ir.Constant(FLOAT, float("-inf"))
    with counting(builder, int64(0), rows) as row:
        offset = builder.mul(row, nbytes)
        a, b = builder.add(first, offset), builder.add(second, offset)
        m_a, m_b = load(builder, a, FLOAT), load(builder, b, FLOAT)
        both = builder.fcmp_unordered("!=", m_b, nothing)
        with builder.if_then(both), builder.if_else(builder.fcmp_ordered("==", m_a, nothing)) as (empty, full):
            with empty:
                _each(builder, n, a, lambda x, at_b: at_b, b)
            with full:
                m = maximum(builder, m_a, m_b)
                pair = shuffle(
                    builder,
                    spread(builder, builder.fsub(m_a, m), 4),
                    spread(builder, builder.fsub(m_b, m), 4),
                    [0, 4, 0, 4],
                )
                scales = exponential(builder, pair)
                one, other = (builder.extract_element(scales, ir.Constant(INT32, i)) for i in (0, 1))

                def merged(x: Any, y: Any) -> Any:
                    wide = isinstance(x.type, ir.VectorType)
                    s, t = (spread(builder, z) if wide else z for z in (one, other))
                    return builder.fadd(builder.fmul(x, s), builder.fmul(y, t))

                _each(builder, n, a, merged, b)
                store(builder, m, a)


def _each(builder: Any, n: Any, target: Any, combine: Callable[[Any, Any], Any], other: Any) -> None:
    """target[i] = combine(target[i], other[i]) for n floats."""
    lanes = ir.VectorType(FLOAT, LANES)
    end = whole(builder, n, LANES)
    for start, stop, step, kind in ((int64(0), end, LANES, lanes), (end, n, 1, FLOAT)):
        with counting(builder, start, stop, step) as i:
            place = at(builder, target, i, 4)
            both = load(builder, place, kind), load(builder, at(builder, other, i, 4), kind)
            store(builder, combine(*both), place)


@entry(*_MERGE)
def _merge(first: int, second: int, rows: int, dim: int) -> None:
    _merge_rows(first, second, rows, dim)


call_merge = caller(*_MERGE)
"""(address, first, second, rows, dim): the merged states of `rows` state rows each, into the first."""


def merge_address() -> int:
    """Compiled `merge`."""
    return _merge


@kernel(types.void, WORD, types.Array(types.int64, 1, "C"), WORD, WORD, WORD, WORD, WORD)
def _merge_top(
    merge: int, stack: NDArray[np.int64], depth: int, rows: int, dim: int, scratch: int, nbytes: int
) -> None:
    """Merge entry `depth` of the stack into the one below, which is first copied to its place in scratch."""
    below = stack[depth - 1]
    if scratch:
        place = scratch + (depth - 1) * nbytes
        if below != place:
            move_bytes(place, below, nbytes)
            stack[depth - 1] = below = place
    call_merge(merge, below, stack[depth], rows, dim)


@kernel(WORD, WORD, WORD)
def fold_nbytes(rows: int, dim: int) -> int:
    """Bytes of scratch that `fold` needs for states of `rows` rows."""
    return (MAX_LEVELS + 2) * rows * (dim + 2) * 4


@kernel(WORD, WORD, INTS, INTS, WORD, WORD, WORD, WORD, WORD)
def fold(
    merge: int,
    addresses: NDArray[np.int64],
    splits: NDArray[np.int64],
    first: int,
    last: int,
    rows: int,
    dim: int,
    scratch: int,
) -> int:
    """Merge the states of nodes first … last; returns the address of the result.

    `splits` are the first splits of the nodes, ascending; first < last. The states stay as they are: what is merged is
    at `scratch`, which has room for `fold_nbytes`. With scratch 0 they are merged in place.
    """
    nbytes = rows * (dim + 2) * 4
    stack = np.empty(MAX_LEVELS + 2, np.int64)
    levels = np.empty(MAX_LEVELS + 2, np.int64)
    depth = 0
    for node in range(first, last):
        level = 0
        if depth:
            level = meeting_level(splits[node - 1], splits[node])
            while depth > 1 and levels[depth - 1] < level:
                depth -= 1
                _merge_top(merge, stack, depth, rows, dim, scratch, nbytes)
        stack[depth], levels[depth] = addresses[node], level
        depth += 1
    while depth > 1:
        depth -= 1
        _merge_top(merge, stack, depth, rows, dim, scratch, nbytes)
    result: int = stack[0]
    return result


@kernel(types.void, WORD, WORD, WORD)
def put_identity(state: int, rows: int, dim: int) -> None:
    """Make `rows` state rows at an address the identity: (−inf, 0, 0)."""
    for row in range(rows):
        place = state + row * 4 * (dim + 2)
        store_float(place, -np.inf)
        for i in range(1, dim + 2):
            store_float(place + 4 * i, 0.0)


@kernel(types.void, WORD, WORD, WORD, WORD, WORD)
def put_output(output: int, state: int, rows: int, dim: int, sinks: int) -> None:
    """acc / l of `rows` state rows, float32 (rows, dim) at `output`; zeros where l is 0.

    `sinks` is the address of a learned sink logit s for each row, or 0: the state (s, 1, 0) is merged in first.
    """
    nothing = np.float32(-np.inf)
    for row in range(rows):
        place, target = state + row * 4 * (dim + 2), output + row * 4 * dim
        total, scale = load_float(place + 4), np.float32(1)
        if sinks:
            m, sink = load_float(place), load_float(sinks + 4 * row)
            if sink != nothing:
                top = larger(m, sink)
                scale = exp_one(m - top) if m != nothing else np.float32(0)
                total = total * scale + exp_one(sink - top)
        if total == 0:
            total = np.float32(1)
        for i in range(dim):
            store_float(target + 4 * i, load_float(place + 8 + 4 * i) * scale / total)
