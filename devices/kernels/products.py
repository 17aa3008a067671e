"""Query times rows: the inner loops that read keys and block summaries.

- dots: logit = (q·k over 16 lanes) · scale, for a tile of queries and n key rows
- bounds: Σ_c max(q_c·min_c, q_c·max_c), the same with minimum-maximum summaries (Quest's upper bound)

Each is a C function, compiled once and called by its address. Rows come as a table of addresses, so that it does not
matter how they lie. A *tile* of up to four query rows is worked on together, so that a row is loaded and widened once
for all of them; neither the tile that a query row is in nor the shapes of `_registers` change a bit. Queries are
float32, filled up with zeros to a multiple of 16; of a row nothing beyond `dim` elements is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    FLOAT32,
    INT32,
    INT64,
    ITEM,
    LANES,
    alloca_once,
    at,
    counting,
    floats,
    int64,
    load_lanes,
    load_one,
    maximum,
    spread,
    sum_lanes,
    whole,
)

TILE = 4
"""Query rows that are worked on together, at most."""


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
    """Σ term(query, row) over `dim` elements in the order of lanes.py: for each query a vector with one sum per row."""
    width = LANES // passes
    kind = ir.VectorType(FLOAT, width)
    full = whole(builder, dim, LANES)
    rest = builder.sub(dim, full)
    has_rest = builder.icmp_signed("!=", rest, int64(0))
    tails = _tails(context, builder, dtype, rows, full, rest)

    def one_pass(lane: int) -> list[list[Any]]:
        sums = [[alloca_once(builder, kind) for _ in rows] for _ in queries]
        for place in (place for line in sums for place in line):
            builder.store(floats(0.0, width), place)

        def step(i: Any, vectors: list[_Parts]) -> None:
            for query, line in zip(queries, sums, strict=True):
                q = load(builder, at(builder, query, i, 4), kind)
                for parts, place in zip(vectors, line, strict=True):
                    builder.store(builder.fadd(builder.load(place), term(q, parts)), place)

        with counting(builder, int64(0), full, LANES) as start:
            i = builder.add(start, int64(lane))
            offset = builder.mul(i, int64(ITEM[dtype]))
            step(i, [[load_lanes(context, builder, dtype, builder.add(p, offset), width) for p in row] for row in rows])
        with builder.if_then(has_rest, likely=False):
            i = builder.add(full, int64(lane))
            step(i, [[load(builder, at(builder, p, int64(lane), 4), kind) for p in row] for row in tails])
        return [[builder.load(place) for place in line] for line in sums]

    sums, *more = [one_pass(lane) for lane in range(0, LANES, width)]
    for upper in more:
        sums = [[builder.fadd(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(sums, upper, strict=True)]
    return [sum_lanes(builder, line) for line in sums]


def _tails(context: Any, builder: Any, dtype: int, rows: list[_Parts], full: Any, rest: Any) -> list[_Parts]:
    """Addresses of copies of the last `rest` < 16 elements of every part: float32, filled up with zeros."""
    places = [[alloca_once(builder, FLOAT, size=int64(LANES)) for _ in row] for row in rows]
    tails = [[builder.ptrtoint(place, INT64) for place in line] for line in places]
    with builder.if_then(builder.icmp_signed("!=", rest, int64(0)), likely=False):
        for row, line in zip(rows, tails, strict=True):
            for part, tail in zip(row, line, strict=True):
                store(builder, floats(0.0), tail)
                with counting(builder, int64(0), rest) as i:
                    element = load_one(context, builder, dtype, at(builder, part, builder.add(full, i), ITEM[dtype]))
                    store(builder, element, at(builder, tail, i, 4))
    return tails


def _over_rows(builder: Any, n: Any, step: int, tile: Callable[[Any, int], None]) -> None:
    """Call `tile(first, count)` for the rows 0 … n: `step` at a time, then one at a time."""
    steady = whole(builder, n, step)
    with counting(builder, int64(0), steady, step) as j:
        tile(j, step)
    if step > 1:
        with counting(builder, steady, n) as j:
            tile(j, 1)


def _prefetch(builder: Any, row: Any, nbytes: Any) -> None:
    """Ask for the lines of a row."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    with counting(builder, int64(0), nbytes, 64) as i:
        builder.call(ask, [builder.inttoptr(at(builder, row, i), byte), *(ir.Constant(INT32, x) for x in (0, 2, 1))])


_DOTS = (WORD, WORD, WORD, WORD, WORD, WORD, WORD, REAL, WORD, WORD, WORD, WORD)
_BOUNDS = (WORD, WORD, WORD, WORD, WORD, WORD, WORD)


@inline(types.void, *_DOTS, literals=4)
def _dots(
    context: Any,
    builder: Any,
    dtype: int,
    group: int,
    steps: int,
    passes: int,
    queries: Any,
    query_stride: Any,
    rows: Any,
    n: Any,
    dim: Any,
    out: Any,
    out_stride: Any,
    scale: Any,
    ahead: Any,
    ahead_nbytes: Any,
    later: Any,
    num_later: Any,
) -> None:
    q = [at(builder, queries, builder.mul(query_stride, int64(g))) for g in range(group)]
    outs = [at(builder, out, builder.mul(out_stride, int64(g))) for g in range(group)]
    row_nbytes = builder.mul(dim, int64(ITEM[dtype]))

    def tile(first: Any, count: int) -> None:
        which = [builder.add(first, int64(t)) for t in range(count)]
        keys = [[load(builder, at(builder, rows, j, 8), INT64)] for j in which]
        with builder.if_then(builder.icmp_signed("!=", ahead_nbytes, int64(0))):
            for j in which:
                _prefetch(builder, load(builder, at(builder, ahead, j, 8), INT64), ahead_nbytes)
        with builder.if_then(builder.icmp_signed("<", which[-1], num_later)):
            for j in which:
                _prefetch(builder, load(builder, at(builder, later, j, 8), INT64), row_nbytes)
        sums = _sums(context, builder, dtype, passes, q, keys, dim, lambda x, parts: builder.fmul(x, parts[0]))
        for line, place in zip(sums, outs, strict=True):
            store(builder, builder.fmul(line, spread(builder, scale, count)), at(builder, place, first, 4))

    _over_rows(builder, n, steps, tile)


@inline(types.void, *_BOUNDS, literals=1)
def _bounds(
    context: Any, builder: Any, group: int, queries: Any, query_stride: Any, rows: Any, n: Any, dim: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    q = [at(builder, queries, builder.mul(query_stride, int64(g))) for g in range(group)]
    outs = [at(builder, out, builder.mul(out_stride, int64(g))) for g in range(group)]

    def term(x: Any, parts: _Parts) -> Any:
        low, high = parts
        return maximum(builder, builder.fmul(x, low), builder.fmul(x, high))

    def tile(j: Any, _: int) -> None:
        low = load(builder, at(builder, rows, j, 8), INT64)
        sums = _sums(context, builder, FLOAT32, 2, q, [[low, at(builder, low, dim, 4)]], dim, term)
        for line, place in zip(sums, outs, strict=True):
            store(builder, line, at(builder, place, j, 4))

    _over_rows(builder, n, 1, tile)


def make_dots(dtype: int, group: int, steps: int, passes: int) -> int:
    """Compile `dots` for a stored type and a number of query rows; `steps` and `passes` as in `_registers`."""

    @entry(*_DOTS)
    def dots(
        queries: int, query_stride: int, rows: int, n: int, dim: int, out: int, out_stride: int, scale: float,
        ahead: int, ahead_nbytes: int, later: int, num_later: int,
    ) -> None:  # fmt: skip
        _dots(
            dtype, group, steps, passes, queries, query_stride, rows, n, dim, out, out_stride, scale, ahead,
            ahead_nbytes, later, num_later,
        )  # fmt: skip

    return dots


@inline(types.void, WORD, WORD)
def ask_for(builder: Any, row: Any, nbytes: Any) -> None:
    """Ask for the lines of a row, which will be needed soon."""
    _prefetch(builder, row, nbytes)


def _make_bounds(group: int) -> int:
    @entry(*_BOUNDS)
    def bounds(queries: int, query_stride: int, rows: int, n: int, dim: int, out: int, out_stride: int) -> None:
        _bounds(group, queries, query_stride, rows, n, dim, out, out_stride)

    return bounds


call_dots = caller(*_DOTS)
"""(address, queries, query stride, rows, n, dim, out, out stride, scale, ahead, ahead nbytes, later, num later).

Strides are in bytes. What will be needed next is asked for meanwhile: `ahead` are the same n rows of another operand,
of `ahead nbytes` each (0: none), and `later` the next `num later` rows of this one. Measured with 64 Ki tokens of
float32 and three query rows: 7 GB/s without, 12 GB/s with `ahead`.
"""
call_bounds = caller(*_BOUNDS)
"""(address, queries, query stride, rows, n, dim, out, out stride), strides in bytes."""

DOTS = np.array(
    [make_dots(dtype, group, *_registers()[group]) for dtype in range(3) for group in range(1, TILE + 1)],
    dtype=np.int64,
)
"""Addresses, at dtype · TILE + number of query rows − 1."""
BOUNDS = np.array([_make_bounds(group) for group in range(1, TILE + 1)], dtype=np.int64)
"""Addresses, at the number of query rows − 1."""
