"""logits: queries × K rows → logits, for a softmax that somebody else does (contract.py)."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, address_of, kernel, store_float, take_next
from tierloop.devices.kernels.contract import ITEMSIZE, Logits
from tierloop.devices.kernels.entries import CAP, ENTRIES
from tierloop.devices.kernels.lanes import CODES, ITEM
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.pace import keep_pace, new_counter
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to, positions_of
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import TILE, WIDTH_OF
from tierloop.devices.kernels.softmax import call_cap
from tierloop.devices.kernels.tiles import (
    BLOCK,
    NEAR,
    dots_of_tiles,
    first_of,
    pack_queries,
    padded,
    size_of,
    tiles_of,
    wide_nbytes,
)

_CHUNK = 64
"""Key rows at a time."""


@kernel(
    types.void,
    *(INT64, INT64, TABLE, INTS, INT64, TABLE, INT64, TABLE),
    *(INT64, INT64, INT64, INT64, INT64, REAL, INT64, INT64, REAL, INTS, INT64),
)
def _work_on_rows(
    counter: int,
    share_rows: int,
    runs: NDArray[np.int64],
    first_row: NDArray[np.int64],
    key_base: int,
    key_spans: NDArray[np.int64],
    queries: int,
    q_positions: NDArray[np.int64],
    dtype: int,
    num_kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    scale: float,
    window: int,
    sink_tokens: int,
    softcap: float,
    entries: NDArray[np.int64],
    out: int,
) -> None:
    """Take shares of the rows until none is left; logits go to `out`, float32 (rows, q_len · group)."""
    all_queries, all_tiles, total = q_len * group, q_len * tiles_of(group), first_row[-1]
    most = min(BLOCK, all_tiles)
    packed = np.empty((most, TILE * padded(head_dim)), np.float32)
    found = np.empty((most, TILE * _CHUNK), np.float32)
    wide, wide_rows = np.empty(wide_nbytes(head_dim), np.uint8), np.empty(NEAR, np.int64)
    keys = np.empty(_CHUNK, np.int64)
    nbytes = head_dim * ITEM[dtype]
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
            end = min(first_row[run + 1], high)
            sequence, kv_head = runs[run, 0], runs[run, 1]
            for tile in range(0, all_tiles, most):
                num_tiles = min(most, all_tiles - tile)
                wanted = (sequence * num_kv_heads + kv_head) * all_tiles + tile
                if wanted != packed_for:
                    pack_queries(
                        queries, sequence, kv_head, tile, num_tiles, num_kv_heads, group, q_len, head_dim, 0, packed
                    )
                    packed_for = wanted
                for start in range(row, end, _CHUNK):
                    if tile == 0:
                        keep_pace(counter, start, total)
                    n = min(_CHUNK, end - start)
                    skipped = start - first_row[run]
                    for j in range(n):
                        keys[j] = key_base + key_spans[run, 0] + (skipped + j) * nbytes
                    dots_of_tiles(
                        entries, dtype, group, tile, num_tiles, keys.ctypes.data, n, packed.ctypes.data, head_dim,
                        found.ctypes.data, 4 * TILE * _CHUNK, 0, scale, keys.ctypes.data, 0, wide.ctypes.data,
                    wide_rows.ctypes.data,
                    )  # fmt: skip
                    for t in range(num_tiles):
                        size, first = size_of(tile + t, group), first_of(tile + t, group)
                        width = WIDTH_OF[size]
                        if softcap > 0:
                            call_cap(entries[CAP], found[t].ctypes.data, n * width, softcap)
                        query = q_positions[sequence, first // group]
                        for j in range(n):
                            position = runs[run, 2] + skipped + j
                            counts = position <= query
                            if window:
                                counts = counts and (query - position < window or position < sink_tokens)
                            place = out + 4 * ((start + j) * all_queries + first)
                            for g in range(size):
                                store_float(place + 4 * g, found[t, j * width + g] if counts else np.float32(-np.inf))
            row = end


def logits(
    args: Logits, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs, spans or positions do not fit each other."""
    check_sizes(group=args.group, q_len=args.q_len, head_dim=args.head_dim)
    operands = Operands(bytes_of)
    key_base, key_spans = operands.rows(reads[1])
    rows = Rows(args.runs, key_spans, args.head_dim * ITEMSIZE[args.dtype], args.num_sequences, args.num_kv_heads)
    positions = positions_of(args)
    queries, out = operands.source(reads[0]), operands.target(writes[0])
    threads = worthwhile(threads, rows.total * args.head_dim * ITEMSIZE[args.dtype] * args.q_len)
    share_rows = max(_CHUNK, rows.total // (4 * threads)) if threads > 1 else max(1, rows.total)
    counter = new_counter()

    def work() -> None:
        _work_on_rows(
            address_of(counter), share_rows, rows.runs, rows.first_row, key_base, key_spans, queries, positions,
            CODES[args.dtype], args.num_kv_heads, args.group, args.q_len, args.head_dim, args.scale, args.window,
            args.sink_tokens, args.softcap, ENTRIES, out,
        )  # fmt: skip

    share(threads, work)
    operands.finish()
