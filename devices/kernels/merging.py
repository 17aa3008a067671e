"""Merging states in the fixed tree: the arithmetic of two states, and the order for any number of nodes.

Nodes come in ascending order of the splits they cover. Two neighbours meet at the lowest tree node that covers both:
its level is the number of bits by which their split ids differ. A new node first lets everything on the stack merge
that meets below its own level, so that a state is merged exactly where the tree says, with at most one state per level
held. Splits without rows never appear: merging with an identity changes nothing.
"""

from __future__ import annotations

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
    load_float,
    move_bytes,
    store_float,
)
from tierloop.devices.kernels.lanes import INT32, exponential, maximum, spread

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


@entry(*_MERGE)
def _merge(first: int, second: int, rows: int, dim: int) -> None:
    nbytes = 4 * (dim + 2)
    nothing = np.float32(-np.inf)
    for row in range(rows):
        a, b = first + row * nbytes, second + row * nbytes
        m_a, m_b = load_float(a), load_float(b)
        if m_b == nothing:
            continue
        if m_a == nothing:
            move_bytes(a, b, nbytes)
            continue
        m = larger(m_a, m_b)
        scale_a, scale_b = exp_one(m_a - m), exp_one(m_b - m)
        store_float(a, m)
        for i in range(1, dim + 2):
            store_float(a + 4 * i, load_float(a + 4 * i) * scale_a + load_float(b + 4 * i) * scale_b)


call_merge = caller(*_MERGE)
"""(address, first, second, rows, dim): the merged states of `rows` state rows each, into the first."""


def merge_address() -> int:
    """Compiled `merge`."""
    return _merge


@kernel(WORD, WORD, INTS, INTS, WORD, WORD, WORD, WORD)
def fold(
    merge: int,
    addresses: NDArray[np.int64],
    splits: NDArray[np.int64],
    first: int,
    last: int,
    rows: int,
    dim: int,
) -> int:
    """Merge the states of nodes first … last, in place; returns the address of the result.

    `splits` are the first splits of the nodes, ascending; first < last.
    """
    stack = np.empty(MAX_LEVELS + 2, np.int64)
    levels = np.empty(MAX_LEVELS + 2, np.int64)
    depth = 0
    for node in range(first, last):
        level = 0
        if depth:
            level = meeting_level(splits[node - 1], splits[node])
            while depth > 1 and levels[depth - 1] < level:
                call_merge(merge, stack[depth - 2], stack[depth - 1], rows, dim)
                depth -= 1
        stack[depth], levels[depth] = addresses[node], level
        depth += 1
    while depth > 1:
        call_merge(merge, stack[depth - 2], stack[depth - 1], rows, dim)
        depth -= 1
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
