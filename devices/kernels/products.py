"""Query times rows: the inner loops that read keys and block summaries.

- widen: rows of any stored type → float32 rows, filled up with zeros to a multiple of 16 elements
- dots: logit = (q·k) · scale, for a tile of queries and n key rows

Each is a C function, compiled once and called by its address. Rows come as a table of addresses, so that it does not
matter how they lie.

A *tile* is 1 to 4 query heads of one KV head and position (tiles.py). The 16 lanes of a vector are shared among them:
a tile of w queries (3 count as 4, the last all zeros) gives each L = 16 / w lanes, lane i of a query sums the elements
i, i + L, i + 2L, … in that order, and the L sums are added by halving. So a key element is loaded once for all queries
of the tile, and the more queries there are, the less there is to add across lanes. The order depends on the group
alone.

Packed queries: for each L elements the w queries one after the other, float32, 16 to a vector.
Measured on Zen 3, head_dim 128, float32, four queries: 12.1 ns per row, against 17.3 with 16 lanes to each query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, has_wide_registers, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    FLOAT32,
    INT64,
    ITEM,
    LANES,
    LINE,
    NUM_TYPES,
    alloca_once,
    at,
    counting,
    floats,
    fused,
    int64,
    load_lanes,
    load_one,
    prefetch,
    prefetch_row,
    shuffle,
    spread,
    sum_groups,
    whole,
)

TILE = 4
"""Query rows that are worked on together, at most."""
WIDTHS = (1, 2, 4)
"""Queries that share a vector."""
WIDTH_OF = np.array([0, 1, 2, 4, 4], dtype=np.int64)
"""The width of a tile, by its number of queries."""
NUMBER_OF_WIDTH = np.array([0, 0, 1, 2, 2], dtype=np.int64)
"""log2 of that width: its place among WIDTHS, and in tables of compiled loops."""


def _rows_at_a_time() -> int:
    """Key rows whose sums the registers hold: 4 × 16 lanes in 16 registers of 8, 8 × 16 lanes in 32 of 16."""
    return 8 if has_wide_registers() else 4


class Asked:
    """Rows of a table, asked for in order while a loop does something else.

    In order, because then the processor's own prefetcher runs ahead of it; evenly, because a burst would fill the
    buffers that loads wait in as well. Place x is byte (x mod 65,536) / 65,536 of row x / 65,536; each step moves on by
    `pace` places.
    """

    def __init__(self, builder: Any, table: Any, pace: Any, nbytes: Any) -> None:
        self._builder, self._table, self._nbytes, self._pace = builder, table, nbytes, pace
        self._place = alloca_once(builder, INT64)
        builder.store(int64(0), self._place)

    def step(self, lines: int) -> None:
        """Ask for the next `lines` lines."""
        builder = self._builder
        place = builder.load(self._place)
        row = load(builder, at(builder, self._table, builder.lshr(place, int64(16)), 8), INT64)
        part = builder.lshr(builder.mul(builder.and_(place, int64(0xFFFF)), self._nbytes), int64(16))
        for line in range(lines):
            prefetch(builder, builder.add(row, builder.add(part, int64(LINE * line))))
        builder.store(builder.add(place, self._pace), self._place)


_DOTS = (WORD, WORD, WORD, WORD, WORD, REAL, WORD, WORD)


@inline(types.void, *_DOTS, literals=4)
def _dots(
    context: Any,
    builder: Any,
    dtype: int,
    width: int,
    steps: int,
    lines: int,
    queries: Any,
    rows: Any,
    n: Any,
    dim: Any,
    out: Any,
    scale: Any,
    ahead: Any,
    ahead_nbytes: Any,
) -> None:
    lanes = LANES // width
    pace = builder.udiv(int64(1 << 16), builder.lshr(dim, int64(4)))
    kind = ir.VectorType(FLOAT, LANES)
    each_lane = [i % lanes for i in range(LANES)]

    def tile(first: Any, count: int) -> None:
        which = [builder.add(first, int64(t)) for t in range(count)]
        keys = [load(builder, at(builder, rows, j, 8), INT64) for j in which]
        sums = [alloca_once(builder, kind) for _ in keys]
        for place in sums:
            builder.store(floats(0.0), place)

        def add(chunk: Any, some: list[tuple[Any, Any]]) -> None:
            for part in range(0, LANES, lanes):
                i = builder.add(chunk, int64(part))
                q = load(builder, at(builder, queries, i, 4 * width), kind)
                offset = builder.mul(i, int64(ITEM[dtype]))
                for key, place in some:
                    k = load_lanes(context, builder, dtype, builder.add(key, offset), lanes)
                    k = k if width == 1 else shuffle(builder, k, k, each_lane)
                    builder.store(fused(builder, q, k, builder.load(place)), place)

        pairs = list(zip(keys, sums, strict=True))
        if width < TILE:
            # Row after row, as memory likes it; the processor works on several of them by itself.
            for number, pair in enumerate(pairs):
                other = load(builder, at(builder, ahead, builder.add(first, int64(number)), 8), INT64)
                prefetch_row(builder, other, ahead_nbytes)
                with counting(builder, int64(0), dim, LANES) as chunk:
                    add(chunk, [pair])
        else:
            # All rows together, so that a query is loaded once for all of them.
            asked = Asked(builder, at(builder, ahead, first, 8), builder.mul(pace, int64(count)), ahead_nbytes)
            with counting(builder, int64(0), dim, LANES) as chunk:
                asked.step(max(1, lines * count // 4))
                add(chunk, pairs)
        together = min(count, lanes)
        for start in range(0, count, together):
            vectors = [builder.load(place) for place in sums[start : start + together]]
            total = sum_groups(builder, vectors, lanes)
            total = builder.fmul(total, spread(builder, scale, together * width))
            store(builder, total, at(builder, out, builder.add(first, int64(start)), 4 * width))

    steady = whole(builder, n, steps)
    with counting(builder, int64(0), steady, steps) as j:
        tile(j, steps)
    with counting(builder, steady, n) as j:
        tile(j, 1)


def make_dots(dtype: int, width: int, steps: int, lines: int = 1) -> int:
    """Compile `dots` for a stored type, a width, and key rows at a time."""

    @entry(*_DOTS)
    def dots(
        queries: int, rows: int, n: int, dim: int, out: int, scale: float, ahead: int, ahead_nbytes: int
    ) -> None:  # fmt: skip
        _dots(dtype, width, steps, lines, queries, rows, n, dim, out, scale, ahead, ahead_nbytes)

    return dots


_WIDEN = (WORD, WORD, WORD, WORD, WORD)


@inline(types.void, *_WIDEN, literals=1)
def _widen_rows(context: Any, builder: Any, dtype: int, rows: Any, n: Any, dim: Any, out: Any, out_stride: Any) -> None:
    full = whole(builder, dim, LANES)
    with counting(builder, int64(0), n) as j:
        row = load(builder, at(builder, rows, j, 8), INT64)
        target = builder.add(out, builder.mul(j, out_stride))
        with counting(builder, int64(0), full, LANES) as i:
            numbers = load_lanes(context, builder, dtype, at(builder, row, i, ITEM[dtype]))
            store(builder, numbers, at(builder, target, i, 4))
        with builder.if_then(builder.icmp_signed("!=", full, dim), likely=False):
            store(builder, floats(0.0), at(builder, target, full, 4))
            with counting(builder, full, dim) as i:
                number = load_one(context, builder, dtype, at(builder, row, i, ITEM[dtype]))
                store(builder, number, at(builder, target, i, 4))


def _make_widen(dtype: int) -> int:
    @entry(*_WIDEN)
    def widen_rows(rows: int, n: int, dim: int, out: int, out_stride: int) -> None:
        _widen_rows(dtype, rows, n, dim, out, out_stride)

    return widen_rows


@inline(types.void, WORD, WORD)
def ask_for(builder: Any, row: Any, nbytes: Any) -> None:
    """Ask for the lines of a row, which will be needed soon."""
    prefetch_row(builder, row, nbytes)


call_dots = caller(*_DOTS)
"""(address, packed queries, rows, n, dim, out, scale, ahead, ahead nbytes): float32 (n, width) at `out`.

`dim` is a multiple of 16. `ahead` is a table of n other rows of `ahead nbytes` each that are asked for meanwhile.
"""
call_widen = caller(*_WIDEN)
"""(address, rows, n, dim, out, out stride in bytes): float32 rows with room for `dim` rounded up to 16."""


def dots_addresses() -> list[int]:
    """Compiled `dots`, by dtype, then width; only float32 has width 4: others are widened first, once for all tiles."""
    steps, addresses = _rows_at_a_time(), []
    for dtype in range(NUM_TYPES):
        for width in WIDTHS:
            direct = dtype == FLOAT32 or width < TILE
            addresses.append(make_dots(dtype, width, steps, ITEM[dtype]) if direct else 0)
    return addresses


def widen_addresses() -> list[int]:
    """Compiled `widen`, by dtype."""
    return [_make_widen(dtype) for dtype in range(NUM_TYPES)]
