"""From rows to states: the walk over the splits of a piece of work, which `attend` and `combine` share.

Per split: the addresses of its rows, their logits (computed from queries and keys, or read), then weights, sums and
weighted values per tile of queries, then the merge into the stack of the tree. Nothing in here depends on how the rows
are divided into runs, on threads, or on which roots were asked for.

Memory is kept busy meanwhile: while the keys of a split are multiplied its values are asked for, and while its values
are weighed the keys of the next one; where splits hold few rows, those some way ahead.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import (
    INT64,
    INTS,
    TABLE,
    TRIPLE,
    kernel,
    load_float,
    load_int,
    move_bytes,
    store_float,
    store_int,
    take_next,
)
from tierloop.devices.kernels.entries import CAP, MERGE, RESCALE, SOFTMAX, WEIGH
from tierloop.devices.kernels.lanes import INT8, ITEM, LANES, fill_table
from tierloop.devices.kernels.merging import call_merge, meeting_level, put_identity
from tierloop.devices.kernels.pace import keep_pace
from tierloop.devices.kernels.plan import HIGH, KV_HEAD, LOW, SEQUENCE, SLOT, how_many_up_to
from tierloop.devices.kernels.products import NUMBER_OF_WIDTH, TILE, WIDTH_OF, ask_for
from tierloop.devices.kernels.softmax import (
    any_nothing,
    call_cap,
    call_rescale,
    call_softmax,
    call_weigh,
)
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

Int64 = NDArray[np.int64]

_ROWS_AHEAD = 32
"""How far ahead rows are asked for, at least; memory answers before 32 of them are worked on."""
FIRST, END, HOLE, HOLE_END = range(4)
"""Columns of what a tile sees of a split: rows FIRST … END without HOLE … HOLE_END."""


@kernel(INT64, INTS, INT64, INT64)
def run_of(first_row: Int64, run: int, row: int) -> int:
    """The run that holds a row, given one at or before it."""
    while first_row[run + 1] <= row:
        run += 1
    return run


@kernel(
    TRIPLE,
    *(TABLE, INTS, INT64, INT64, INT64),
    *(INT64, TABLE, INT64, INT64, TABLE, INT64, INT64, INT64, INT64, INT64),
)
def _fill_tables(
    runs: Int64,
    first_row: Int64,
    run: int,
    row: int,
    high: int,
    key_base: int,
    key_spans: Int64,
    key_nbytes: int,
    value_base: int,
    value_spans: Int64,
    value_nbytes: int,
    keys: int,
    values: int,
    positions: int,
    room: int,
) -> tuple[int, int, int]:
    """Addresses and positions of up to `room` rows from `row` on, below `high`, to int64 tables at three addresses.

    Returns the run and row to go on with, and how many rows there are.
    """
    n = 0
    while row < high and n < room:
        run = run_of(first_row, run, row)
        skipped = row - first_row[run]
        count = min(min(first_row[run + 1], high) - row, room - n)
        key = key_base + key_spans[run, 0] + skipped * key_nbytes
        value = value_base + value_spans[run, 0] + skipped * value_nbytes
        position = runs[run, 2] + skipped
        if count == 1:
            store_int(keys + 8 * n, key)
            store_int(values + 8 * n, value)
            store_int(positions + 8 * n, position)
        else:
            fill_table(keys + 8 * n, key, key_nbytes, count)
            fill_table(values + 8 * n, value, value_nbytes, count)
            fill_table(positions + 8 * n, position, 1, count)
        n += count
        row += count
    return run, row, n


@kernel(INT64, INT64, INT64, INT64)
def _places_up_to(table: int, n: int, x: int) -> int:
    """How many of the n ascending numbers of an int64 table are at most x."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if load_int(table + 8 * middle) <= x:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(types.void, INT64, INT64, INT64, INT64, INT64, INT64)
def _look(positions: int, n: int, query: int, window: int, sink_tokens: int, seen: int) -> None:
    """Which of the split's rows, at a table of ascending positions, count for a query position: 4 places at `seen`."""
    end = n if load_int(positions + 8 * (n - 1)) <= query else _places_up_to(positions, n, query)
    first, hole, hole_end = 0, 0, 0
    if window and load_int(positions) <= query - window:
        recent = min(_places_up_to(positions, n, query - window), end)
        sinks = min(_places_up_to(positions, n, sink_tokens - 1), end)
        if sinks < recent:
            if sinks == 0:
                first = recent
            elif recent == end:
                end = sinks
            else:
                hole, hole_end = sinks, recent
    store_int(seen + 8 * FIRST, first)
    store_int(seen + 8 * END, end)
    store_int(seen + 8 * HOLE, hole)
    store_int(seen + 8 * HOLE_END, hole_end)


@kernel(types.void, *(INT64,) * 5)
def _copy_logits(source: int, source_stride: int, n: int, size: int, target: int) -> None:
    """Logits of a tile, from where all queries of a row lie together, to float32 (n, width)."""
    stride = 4 * WIDTH_OF[size]
    for j in range(n):
        for g in range(size):
            store_float(target + j * stride + 4 * g, load_float(source + j * source_stride + 4 * g))
        for g in range(size, WIDTH_OF[size]):
            store_float(target + j * stride + 4 * g, 0.0)


@kernel(types.void, INT64, REAL)
def _put_top(state: int, m: float) -> None:
    """Put m into a state row whose l is there: NaN for a logit that is no number, which the maximum passes over."""
    total = load_float(state + 4)
    if total != total:
        m = total
    store_float(state, m)


@kernel(types.void, INTS, *(INT64,) * 13)
def _state_of_few(
    entries: Int64,
    dtype: int,
    size: int,
    logits: int,
    width: int,
    n: int,
    scaled: int,
    alone: int,
    tops: int,
    values: int,
    head_dim_v: int,
    state: int,
    state_stride: int,
    value_nbytes: int,
) -> None:
    """State rows of a tile, query by query over the rows that count for it: those whose logit is not −∞.

    `alone` has room for n logits, padded, and then for n addresses.
    """
    table = alone + 4 * (padded(n) + LANES)
    for g in range(size):
        count = 0
        for j in range(n):
            logit = load_float(logits + 4 * (j * width + g))
            if logit != -np.inf:
                store_float(alone + 4 * count, logit)
                store_int(table + 8 * count, load_int(values + 8 * j))
                count += 1
        place = state + g * state_stride
        if count == 0:
            put_identity(place, 1, head_dim_v)
            continue
        call_softmax(entries[SOFTMAX], alone, count, tops)
        weights = alone
        if dtype >= INT8:
            call_rescale(entries[RESCALE], alone, table, count, value_nbytes - 4, scaled)
            weights = scaled
        call_weigh(
            entries[WEIGH + dtype * TILE], weights, alone, table, count, head_dim_v, place + 8, state_stride, table, 0,
            0,
        )  # fmt: skip
        _put_top(place, load_float(tops))


@kernel(types.void, INTS, *(INT64,) * 6, REAL, *(INT64,) * 10)
def _state_of_tile(
    entries: Int64,
    dtype: int,
    size: int,
    logits: int,
    scaled: int,
    tops: int,
    values: int,
    softcap: float,
    seen: int,
    head_dim_v: int,
    state: int,
    state_stride: int,
    later: int,
    later_nbytes: int,
    num_later: int,
    is_given: int,
    value_nbytes: int,
    alone: int,
) -> None:
    """State rows of one tile in one split from its logits, float32 (n, width), which become weights in place."""
    width = WIDTH_OF[size]
    number, stride = NUMBER_OF_WIDTH[size], 4 * width
    first, end = load_int(seen + 8 * FIRST), load_int(seen + 8 * END)
    if not is_given:
        if softcap > 0 and end > first:
            call_cap(entries[CAP], logits + first * stride, (end - first) * width, softcap)
        for i in range(load_int(seen + 8 * HOLE) * width, load_int(seen + 8 * HOLE_END) * width):
            store_float(logits + 4 * i, -np.inf)
    weights, n = logits + first * stride, max(end - first, 0)
    if n == 0 or any_nothing(weights, n * width):
        _state_of_few(
            entries, dtype, size, weights, width, n, scaled, alone, tops, values + 8 * first, head_dim_v, state,
            state_stride, value_nbytes,
        )  # fmt: skip
        for j in range(num_later):
            ask_for(load_int(later + 8 * j), later_nbytes)
        return
    sums = weights
    call_softmax(entries[SOFTMAX + number], weights, n, tops)
    if dtype >= INT8:
        call_rescale(entries[RESCALE + number], weights, values + 8 * first, n, value_nbytes - 4, scaled)
        weights = scaled
    call_weigh(
        entries[WEIGH + dtype * TILE + size - 1], weights, sums, values + 8 * first, n, head_dim_v, state + 8,
        state_stride, later, later_nbytes, num_later,
    )  # fmt: skip
    for g in range(size):
        _put_top(state + g * state_stride, load_float(tops + 4 * g))


@kernel(
    types.void,
    *(INT64, TABLE, TABLE, INTS),
    *(INT64, TABLE, INT64, TABLE, INT64, INT64, TABLE),
    *(INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT64, REAL, INT64, INT64, REAL),
    *(INTS, INT64, INT64),
)
def work_on_pieces(
    counter: int,
    pieces: Int64,
    runs: Int64,
    first_row: Int64,
    key_base: int,
    key_spans: Int64,
    value_base: int,
    value_spans: Int64,
    queries: int,
    given_logits: int,
    q_positions: Int64,
    dtype: int,
    num_kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    head_dim_v: int,
    value_nbytes: int,
    split_tokens: int,
    scale: float,
    window: int,
    sink_tokens: int,
    softcap: float,
    entries: Int64,
    states: int,
    partials: int,
) -> None:
    """Take pieces until none is left, and put their states where they belong.

    Where `given_logits` is 0, logits are computed from queries and keys; otherwise they are read there, float32
    (rows, q_len · group), and `queries`, keys, `q_positions` and masks are not used.
    """
    all_queries, all_tiles = q_len * group, q_len * tiles_of(group)
    key_nbytes = head_dim * ITEM[dtype]
    state_stride = 4 * (head_dim_v + 2)
    most_rows = 0
    for i in range(pieces.shape[0]):
        most_rows = max(most_rows, min(pieces[i, HIGH] - pieces[i, LOW], split_tokens))
    block = min(BLOCK, all_tiles)
    width = padded(TILE * most_rows) + LANES
    # One row of logits for each tile; one for scaled weights, two for queries for which few rows count.
    logit_rows = np.empty((block + 3, width), np.float32)
    packed = np.empty((block, TILE * padded(head_dim)), np.float32)
    wide, wide_rows = np.empty(wide_nbytes(head_dim), np.uint8), np.empty(NEAR, np.int64)
    # Tables of rows: a whole split and those that are asked for ahead, twice, so that they are moved up rarely.
    look = most_rows + _ROWS_AHEAD
    all_work = first_row[-1] * all_tiles
    room = 2 * (most_rows + look)
    tables = np.zeros((3, room + look), np.int64)
    all_seen = np.empty((block, 4), np.int64)
    tops = np.empty(TILE, np.float32)
    levels = np.empty(66, np.int64)
    stack = np.empty(0, np.float32)
    logit_stride = 4 * width
    while True:
        turn = take_next(counter)
        if turn >= pieces.shape[0]:
            break
        sequence, kv_head, low, high = (
            pieces[turn, SEQUENCE],
            pieces[turn, KV_HEAD],
            pieces[turn, LOW],
            pieces[turn, HIGH],
        )
        out = states + pieces[turn, SLOT] * all_queries * state_stride
        if pieces[turn, SLOT] < 0:
            out = partials - (1 + pieces[turn, SLOT]) * all_queries * state_stride
        if low == high:
            put_identity(out, all_queries, head_dim_v)
            continue
        first_run = how_many_up_to(first_row, first_row.shape[0], low) - 1
        last_run = how_many_up_to(first_row, first_row.shape[0], high - 1) - 1
        first_split = (runs[first_run, 2] + low - first_row[first_run]) // split_tokens
        last_split = (runs[last_run, 2] + high - 1 - first_row[last_run]) // split_tokens
        needed = (meeting_level(first_split, last_split) + 1) * block * TILE * (head_dim_v + 2)
        if stack.size < needed:
            stack = np.empty(needed, np.float32)
        # Addresses are taken in here: an array lives as long as something later names it.
        bottom, logits, seen = stack.ctypes.data, logit_rows.ctypes.data, all_seen.ctypes.data
        scaled, top = logits + block * logit_stride, tops.ctypes.data
        keys, wide_base, wide_table = tables.ctypes.data, wide.ctypes.data, wide_rows.ctypes.data
        values, packed_base = keys + 8 * (room + look), packed.ctypes.data
        positions = values + 8 * (room + look)
        for tile in range(0, all_tiles, block):
            num_tiles = min(block, all_tiles - tile)
            q = first_of(tile, group)
            num_queries = first_of(tile + num_tiles, group) - q
            slot = num_queries * state_stride
            if given_logits == 0:
                pack_queries(
                    queries, sequence, kv_head, tile, num_tiles, num_kv_heads, group, q_len, head_dim, 0, packed
                )
            depth, previous, run, row = 0, 0, first_run, low
            i, filled, here = 0, 0, low
            while True:
                if filled - i < most_rows + look and row < high:
                    filled -= i
                    move_bytes(keys, keys + 8 * i, 8 * filled)
                    move_bytes(values, values + 8 * i, 8 * filled)
                    move_bytes(positions, positions + 8 * i, 8 * filled)
                    i = 0
                    run, row, n = _fill_tables(
                        runs, first_row, run, row, high, key_base, key_spans, key_nbytes, value_base, value_spans,
                        value_nbytes, keys + 8 * filled, values + 8 * filled, positions + 8 * filled, room - filled,
                    )  # fmt: skip
                    filled += n
                if i == filled:
                    break
                keep_pace(counter, low * all_tiles + tile * (high - low) + (here - low) * num_tiles, all_work)
                keys_now, values_now, positions_now = keys + 8 * i, values + 8 * i, positions + 8 * i
                split = load_int(positions_now) // split_tokens
                n, border = min(filled - i, most_rows), (split + 1) * split_tokens
                if load_int(positions_now + 8 * (n - 1)) >= border:
                    n = 1  # few rows: going through them is faster than searching
                    while load_int(positions_now + 8 * n) < border:
                        n += 1
                # Rows that are asked for: the values of this split and the keys of the next, or further ahead.
                skip = max(_ROWS_AHEAD - n, 0)
                num_later = min(n, max(filled - i - n - skip, 0))
                keys_later, values_later = keys_now + 8 * (n + skip), values_now + 8 * (n + skip)
                first, end = 0, n
                if given_logits == 0:
                    first, end = n, 0
                    for t in range(num_tiles):
                        query = q_positions[sequence, (tile + t) // tiles_of(group)]
                        mine = seen + 32 * t
                        _look(positions_now, n, query, window, sink_tokens, mine)
                        if load_int(mine + 8 * FIRST) < load_int(mine + 8 * END):
                            first, end = min(first, load_int(mine + 8 * FIRST)), max(end, load_int(mine + 8 * END))
                    asked, asked_nbytes = keys_later, key_nbytes
                else:
                    for t in range(num_tiles):
                        store_int(seen + 32 * t + 8 * FIRST, 0)
                        store_int(seen + 32 * t + 8 * END, n)
                    asked, asked_nbytes = values_later, value_nbytes
                if first < end:
                    if given_logits == 0:
                        dots_of_tiles(
                            entries, dtype, group, tile, num_tiles, keys_now + 8 * first, end - first,
                            packed_base, head_dim, logits, logit_stride, first, scale, values_now + 8 * (first + skip),
                            value_nbytes, wide_base, wide_table,
                        )  # fmt: skip
                    else:
                        for t in range(num_tiles):
                            size, query = size_of(tile + t, group), first_of(tile + t, group)
                            _copy_logits(
                                given_logits + 4 * (here * all_queries + query), 4 * all_queries, n, size,
                                logits + t * logit_stride,
                            )  # fmt: skip
                    level = 0
                    if depth:
                        level = meeting_level(previous, split)
                        while depth > 1 and levels[depth - 1] < level:
                            depth -= 1
                            under, over = bottom + (depth - 1) * slot, bottom + depth * slot
                            call_merge(entries[MERGE], under, over, num_queries, head_dim_v)
                    levels[depth] = level
                    for t in range(num_tiles):
                        place = bottom + depth * slot + (first_of(tile + t, group) - q) * state_stride
                        _state_of_tile(
                            entries, dtype, size_of(tile + t, group), logits + t * logit_stride, scaled,
                            top, values_now, softcap, seen + 32 * t, head_dim_v, place,
                            state_stride, asked, asked_nbytes, num_later if t == 0 else 0, given_logits != 0,
                            value_nbytes, scaled + logit_stride,
                        )  # fmt: skip
                    depth, previous = depth + 1, split
                i, here = i + n, here + n
            while depth > 1:
                depth -= 1
                call_merge(entries[MERGE], bottom + (depth - 1) * slot, bottom + depth * slot, num_queries, head_dim_v)
            if depth:
                move_bytes(out + q * state_stride, bottom, slot)
            else:
                put_identity(out + q * state_stride, num_queries, head_dim_v)
