"""score: queries × block summaries → one score per block (contract.py).

A mean summary is a key like any other: its product has the bits of a logit. For a maximum or a sum, the group is
reduced within a tile of queries by halving, then tile after tile. For a softmax, the products of all rows are kept,
head after head of each list, and shared out when there is no row left (shares.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import FLOAT as REAL
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
    store_float,
    take_next,
)
from tierloop.devices.kernels.contract import Score, summary_nbytes, wrong_score
from tierloop.devices.kernels.entries import ENTRIES
from tierloop.devices.kernels.lanes import (
    CODES,
    FLOAT,
    ITEM,
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
from tierloop.devices.kernels.products import NUMBER_OF_WIDTH, TILE, WIDTH_OF, WIDTHS
from tierloop.devices.kernels.shares import ADD_SHARES, HIGH, LOW, NUM_COLUMNS, PLACE, find_lists, share_out
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


@kernel(
    types.void,
    *(INT64, INT64, TABLE, INTS, INT64, TABLE, INT64, INT64, INT64, INT64, INT64, INT64, REAL, INT64),
    *(INTS, INTS, INTS, TABLE, INT64, INT64),
)
def _work_on_rows(
    counter: int,
    share_rows: int,
    runs: NDArray[np.int64],
    first_row: NDArray[np.int64],
    base: int,
    spans: NDArray[np.int64],
    queries: int,
    dtype: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    is_minmax: int,
    scale: float,
    takes_sum: int,
    entries: NDArray[np.int64],
    reducers: NDArray[np.int64],
    list_of: NDArray[np.int64],
    lists: NDArray[np.int64],
    logits: int,
    out: int,
) -> None:
    """Take shares of the summaries until none is left; scores go to `out`, float32 (rows,), or, where `logits` is not
    0, logits go there, head after head of each list."""
    total, all_tiles = first_row[-1], tiles_of(group)
    dim = head_dim * (1 + is_minmax)
    most = min(BLOCK, all_tiles)
    packed = np.empty((most, TILE * padded(dim)), np.float32)
    found, best = np.empty((most, TILE * _CHUNK), np.float32), np.empty(_CHUNK, np.float32)
    wide, wide_rows = np.empty(wide_nbytes(dim), np.uint8), np.empty(NEAR, np.int64)
    places = np.empty(2 * _CHUNK, np.int64)
    nbytes = dim * ITEM[dtype]
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
                    entries, dtype, group, tile, num_tiles, places.ctypes.data, n, packed.ctypes.data, dim,
                    found.ctypes.data, 4 * TILE * _CHUNK, 0, scale, ahead, ahead_nbytes if tile == 0 else 0,
                    wide.ctypes.data, wide_rows.ctypes.data,
                )  # fmt: skip
                for t in range(num_tiles):
                    size = size_of(tile + t, group)
                    if logits:
                        mine = lists[list_of[run]]
                        stride = padded(mine[HIGH] - mine[LOW])
                        for g in range(size):
                            place = mine[PLACE] + (first_of(tile + t, group) + g) * stride + row - mine[LOW]
                            for j in range(n):
                                store_float(logits + 4 * (place + j), found[t, j * WIDTH_OF[size] + g])
                    else:
                        _call_reduce(
                            reducers[3 * takes_sum + NUMBER_OF_WIDTH[size]], found[t].ctypes.data, n, size,
                            best.ctypes.data, tile + t == 0,
                        )  # fmt: skip
            if not logits:
                move_bytes(out + 4 * row, best.ctypes.data, 4 * n)
            row += n


def score(
    args: Score, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs and spans do not fit each other."""
    wrong = wrong_score(args)
    if wrong is not None:
        raise ValueError(wrong)
    check_sizes(group=args.group, head_dim=args.head_dim)
    operands = Operands(bytes_of)
    base, spans = operands.rows(reads[1])
    nbytes = summary_nbytes(args)
    rows = Rows(args.runs, spans, nbytes, args.num_sequences, args.num_kv_heads)
    queries, out = operands.source(reads[0]), operands.target(writes[0])
    threads = worthwhile(threads, rows.total * nbytes)
    share_rows = max(_CHUNK, rows.total // (4 * threads)) if threads > 1 else max(1, rows.total)
    keeps = args.reduce == "softmax"
    list_of = np.empty(len(rows.runs) if keeps else 0, dtype=np.int64)
    lists = np.empty((len(list_of), NUM_COLUMNS), dtype=np.int64)
    count, room = find_lists(rows.runs, rows.first_row, args.group, list_of, lists) if keeps else (0, 0)
    lists, kept = lists[:count], np.empty(4 * room, dtype=np.uint8)
    logits = address_of(kept) if room else 0
    counter = new_counter()

    def work() -> None:
        _work_on_rows(
            address_of(counter), share_rows, rows.runs, rows.first_row, base, spans, queries, CODES[args.dtype],
            args.num_kv_heads, args.group, args.head_dim, args.summary == "minmax", args.scale, args.reduce == "sum",
            ENTRIES, _REDUCERS, list_of, lists, logits, out,
        )  # fmt: skip

    share(threads, work)
    if logits:
        turn = np.zeros(8, dtype=np.uint8)
        share(
            min(threads, count),
            lambda: share_out(address_of(turn), lists, args.group, logits, ENTRIES, ADD_SHARES, out),
        )
    operands.finish()
