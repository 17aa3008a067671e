"""score: queries × block summaries → one score per block (contract.py).

A mean summary is a key like any other: its score has the bits of an unscaled logit. Within a tile of queries the group
is reduced by halving, then tile after tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import (
    INT64,
    INTS,
    TABLE,
    address_of,
    caller,
    entry,
    inline,
    kernel,
    load,
    move_bytes,
    store,
    take_next,
)
from tierloop.devices.kernels.contract import Score
from tierloop.devices.kernels.entries import ENTRIES
from tierloop.devices.kernels.lanes import (
    FLOAT,
    FLOAT32,
    LANES,
    at,
    counting,
    fill_table,
    floats,
    halve_groups,
    int64,
    maximum,
    spread,
)
from tierloop.devices.kernels.lanes import INT64 as LANE
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.pace import keep_pace, new_counter
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import NUMBER_OF_WIDTH, TILE, WIDTHS
from tierloop.devices.kernels.tiles import (
    BLOCK,
    NEAR,
    dots_of_tiles,
    pack_queries,
    padded,
    size_of,
    tiles_of,
    wide_nbytes,
)

_REDUCE = (INT64, INT64, INT64, INT64, INT64)


@inline(types.void, *_REDUCE, literals=2)
def _reduce(builder: Any, width: int, is_sum: int, found: Any, n: Any, size: Any, best: Any, is_first: Any) -> None:
    kind = ir.VectorType(FLOAT, LANES)
    # The lane of a query that does not exist has products of 0, which would win over negative ones.
    lane = ir.Constant(ir.VectorType(LANE, LANES), [i % width for i in range(LANES)])
    exists = builder.icmp_signed("<", lane, spread(builder, size))
    nothing = floats(0.0 if is_sum else float("-inf"))

    def combine(a: Any, b: Any) -> Any:
        return builder.fadd(a, b) if is_sum else maximum(builder, a, b)

    with counting(builder, int64(0), n, LANES) as j:
        rows = at(builder, found, j, 4 * width)
        vectors = [load(builder, builder.add(rows, int64(4 * LANES * i)), kind) for i in range(width)]
        each = halve_groups([builder.select(exists, v, nothing) for v in vectors], width, builder, combine)
        place = at(builder, best, j, 4)
        with builder.if_else(builder.icmp_signed("!=", is_first, int64(0))) as (first, later):
            with first:
                store(builder, each, place)
            with later:
                store(builder, combine(load(builder, place, kind), each), place)


def _make_reduce(width: int, is_sum: int) -> int:
    @entry(*_REDUCE)
    def reduce(found: int, n: int, size: int, best: int, is_first: int) -> None:
        _reduce(width, is_sum, found, n, size, best, is_first)

    return reduce


_call_reduce = caller(*_REDUCE)
"""(address, found, n, size, best, is first): n rows of products, float32 (n, width) of which `size` count, with room up
to the next 16 rows, are reduced into float32 (n,), room likewise."""
_REDUCERS = np.array([_make_reduce(width, is_sum) for is_sum in (0, 1) for width in WIDTHS], dtype=np.int64)
"""Addresses, at 3 · is sum + log2 of the width."""

_CHUNK = 64
"""Summaries at a time."""


@kernel(types.void, *(INT64, INT64, TABLE, INTS, INT64, TABLE), *(INT64,) * 6, INTS, INTS, INT64)
def _work_on_rows(
    counter: int,
    share_rows: int,
    runs: NDArray[np.int64],
    first_row: NDArray[np.int64],
    base: int,
    spans: NDArray[np.int64],
    queries: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    is_minmax: int,
    takes_sum: int,
    entries: NDArray[np.int64],
    reducers: NDArray[np.int64],
    out: int,
) -> None:
    """Take shares of the summaries until none is left; scores go to `out`, float32 (rows,)."""
    total, all_tiles = first_row[-1], tiles_of(group)
    dim = head_dim * (1 + is_minmax)
    most = min(BLOCK, all_tiles)
    packed = np.empty((most, TILE * padded(dim)), np.float32)
    found, best = np.empty((most, TILE * _CHUNK), np.float32), np.empty(_CHUNK, np.float32)
    wide, wide_rows = np.empty(wide_nbytes(dim), np.uint8), np.empty(NEAR, np.int64)
    places = np.empty(2 * _CHUNK, np.int64)
    nbytes = dim * 4
    packed_for = -1
    while True:
        row = take_next(counter) * share_rows
        if row >= total:
            break
        high = min(row + share_rows, total)
        run = how_many_up_to(first_row, first_row.shape[0], row) - 1
        while row < high:
            while first_row[run + 1] <= row:
                run += 1
            keep_pace(counter, row, total)
            left = min(first_row[run + 1], high) - row
            n = min(left, _CHUNK)
            first = base + spans[run, 0] + (row - first_row[run]) * nbytes
            fill_table(places.ctypes.data, first, nbytes, min(left, 2 * _CHUNK))
            # The next chunk is asked for meanwhile, where there is a whole one.
            ahead, ahead_nbytes = (
                (places[_CHUNK:].ctypes.data, nbytes) if left >= 2 * _CHUNK else (places.ctypes.data, 0)
            )
            for tile in range(0, all_tiles, most):
                num_tiles = min(most, all_tiles - tile)
                wanted = (runs[run, 0] * num_kv_heads + runs[run, 1]) * all_tiles + tile
                if wanted != packed_for:
                    pack_queries(
                        queries, runs[run, 0], runs[run, 1], tile, num_tiles, num_kv_heads, group, 1, head_dim,
                        is_minmax, packed,
                    )  # fmt: skip
                    packed_for = wanted
                dots_of_tiles(
                    entries, FLOAT32, group, tile, num_tiles, places.ctypes.data, n, packed.ctypes.data, dim,
                    found.ctypes.data, 4 * TILE * _CHUNK, 0, 1.0, ahead, ahead_nbytes if tile == 0 else 0,
                    wide.ctypes.data, wide_rows.ctypes.data,
                )  # fmt: skip
                for t in range(num_tiles):
                    size = size_of(tile + t, group)
                    _call_reduce(
                        reducers[3 * takes_sum + NUMBER_OF_WIDTH[size]], found[t].ctypes.data, n, size,
                        best.ctypes.data, tile + t == 0,
                    )  # fmt: skip
            move_bytes(out + 4 * row, best.ctypes.data, 4 * n)
            row += n


def score(
    args: Score, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs and spans do not fit each other."""
    if args.summary not in ("mean", "minmax") or args.reduce not in ("max", "sum"):
        raise ValueError(f"summary {args.summary!r}, reduce {args.reduce!r}: known are mean, minmax and max, sum")
    check_sizes(group=args.group, head_dim=args.head_dim)
    operands = Operands(bytes_of)
    base, spans = operands.rows(reads[1])
    nbytes = args.head_dim * 4 * (2 if args.summary == "minmax" else 1)
    rows = Rows(args.runs, spans, nbytes, args.num_sequences, args.num_kv_heads)
    queries, out = operands.source(reads[0]), operands.target(writes[0])
    threads = worthwhile(threads, rows.total * nbytes)
    share_rows = max(_CHUNK, rows.total // (4 * threads)) if threads > 1 else max(1, rows.total)
    counter = new_counter()

    def work() -> None:
        _work_on_rows(
            address_of(counter), share_rows, rows.runs, rows.first_row, base, spans, queries, args.num_kv_heads,
            args.group, args.head_dim, args.summary == "minmax", args.reduce == "sum", ENTRIES, _REDUCERS, out,
        )  # fmt: skip

    share(threads, work)
    operands.finish()
