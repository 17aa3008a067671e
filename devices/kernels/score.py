"""score: queries × block summaries → one score per block (contract.py).

A mean summary is a key like any other: its score has the bits of an unscaled logit. The group is reduced in ascending
order of its query heads.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.blocks import BLOCK, bounds_of_block, collect_queries, dots_of_block, padded
from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, address_of, kernel, store_float, take_next
from tierloop.devices.kernels.contract import Score
from tierloop.devices.kernels.lanes import FLOAT32
from tierloop.devices.kernels.merging import larger
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import BOUNDS, DOTS

_CHUNK = 64
"""Summaries at a time."""


@kernel(types.void, *(INT64, INT64, TABLE, INTS, INT64, TABLE), *(INT64,) * 6, *(INTS, INTS, INT64))
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
    has_bounds: int,
    takes_sum: int,
    dots: NDArray[np.int64],
    bounds: NDArray[np.int64],
    out: int,
) -> None:
    """Take shares of the summaries until none is left; scores go to `out`, float32 (rows,)."""
    total = first_row[-1]
    query_rows = np.zeros((min(BLOCK, group), padded(head_dim)), np.float32)
    block, best = np.empty((query_rows.shape[0], _CHUNK), np.float32), np.empty(_CHUNK, np.float32)
    places = np.empty(_CHUNK, np.int64)
    nbytes = head_dim * 4 * (1 + has_bounds)
    while True:
        row = take_next(counter) * share_rows
        if row >= total:
            break
        high = min(row + share_rows, total)
        run = how_many_up_to(first_row, first_row.shape[0], row) - 1
        while row < high:
            while first_row[run + 1] <= row:
                run += 1
            n = min(min(first_row[run + 1], high) - row, _CHUNK)
            for j in range(n):
                places[j] = base + spans[run, 0] + (row - first_row[run] + j) * nbytes
            for q in range(0, group, BLOCK):
                num_queries = min(BLOCK, group - q)
                collect_queries(queries, runs[run, 0], runs[run, 1], q, num_kv_heads, group, 1, head_dim, query_rows)
                if has_bounds:
                    bounds_of_block(
                        bounds, query_rows.ctypes.data, 4 * query_rows.shape[1], num_queries, places.ctypes.data, n,
                        head_dim, block.ctypes.data, 4 * _CHUNK,
                    )  # fmt: skip
                else:
                    dots_of_block(
                        dots, FLOAT32, query_rows.ctypes.data, 4 * query_rows.shape[1], num_queries,
                        places.ctypes.data, n, head_dim, 1.0, block.ctypes.data, 4 * _CHUNK, 0, 0, 0, 0,
                    )  # fmt: skip
                for i in range(num_queries):
                    for j in range(n):
                        if q + i == 0:
                            best[j] = block[i, j]
                        elif takes_sum:
                            best[j] += block[i, j]
                        else:
                            best[j] = larger(best[j], block[i, j])
            for j in range(n):
                store_float(out + 4 * (row + j), best[j])
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
            args.group, args.head_dim, args.summary == "minmax", args.reduce == "sum", DOTS, BOUNDS, out,
        )  # fmt: skip

    share(threads, work)
    operands.finish()
