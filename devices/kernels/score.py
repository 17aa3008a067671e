"""score: queries × block summaries → one score per block (contract.py).

A mean summary is a key like any other: its score has the bits of an unscaled logit. The group is reduced in ascending
order of its query heads.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, address_of, kernel, move_bytes, take_next
from tierloop.devices.kernels.contract import Score
from tierloop.devices.kernels.entries import ENTRIES
from tierloop.devices.kernels.lanes import FLOAT32
from tierloop.devices.kernels.merging import larger
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import TILE, WIDTH_OF
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

_CHUNK = 64
"""Summaries at a time."""


@kernel(types.void, *(INT64, INT64, TABLE, INTS, INT64, TABLE), *(INT64,) * 6, INTS, INT64)
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
            left = min(first_row[run + 1], high) - row
            n = min(left, _CHUNK)
            for j in range(min(left, 2 * _CHUNK)):
                places[j] = base + spans[run, 0] + (row - first_row[run] + j) * nbytes
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
                    width = WIDTH_OF[size]
                    for g in range(size):
                        if tile + t + g == 0:
                            for j in range(n):
                                best[j] = found[t, j * width]
                        elif takes_sum:
                            for j in range(n):
                                best[j] += found[t, j * width + g]
                        else:
                            for j in range(n):
                                best[j] = larger(best[j], found[t, j * width + g])
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
    counter = np.zeros(8, dtype=np.uint8)

    def work() -> None:
        _work_on_rows(
            address_of(counter), share_rows, rows.runs, rows.first_row, base, spans, queries, args.num_kv_heads,
            args.group, args.head_dim, args.summary == "minmax", args.reduce == "sum", ENTRIES, out,
        )  # fmt: skip

    share(threads, work)
    operands.finish()
