"""From rows to states: the walk over the splits of a piece of work, which `attend` and `combine` share.

Per split: the addresses of its rows, their logits (computed from queries and keys, or read), then weights, sums and
weighted values per query row, then the merge into the stack of the tree. Nothing in here depends on how the rows are
divided into runs, on threads, or on which roots were asked for.

A query row is one of the q_len · group queries of a KV head. A trailing stretch of rows that do not count for it
(masked, or with logit −∞) is not touched at all, so that anything may lie there.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.blocks import BLOCK, collect_queries, dots_of_block, padded, tile_size
from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import (
    INT64,
    INTS,
    TABLE,
    kernel,
    load_float,
    move_bytes,
    store_float,
    take_next,
)
from tierloop.devices.kernels.lanes import ITEM
from tierloop.devices.kernels.merging import call_merge, meeting_level, put_identity
from tierloop.devices.kernels.plan import HIGH, KV_HEAD, LOW, SEQUENCE, SLOT, how_many_up_to
from tierloop.devices.kernels.products import TILE, ask_for
from tierloop.devices.kernels.softmax import call_softmax, call_weigh

Int64 = NDArray[np.int64]

_MUTABLE = types.Array(types.int64, 1, "C")


@kernel(INT64, INTS, INT64, INT64)
def run_of(first_row: Int64, run: int, row: int) -> int:
    """The run that holds a row, given one at or before it."""
    while first_row[run + 1] <= row:
        run += 1
    return run


@kernel(
    INT64,
    *(TABLE, INTS, INT64, INT64, INT64, INT64),
    *(INT64, TABLE, INT64, INT64, TABLE, INT64, _MUTABLE, _MUTABLE, _MUTABLE),
)
def _find_rows(
    runs: Int64,
    first_row: Int64,
    run: int,
    row: int,
    high: int,
    split_tokens: int,
    key_base: int,
    key_spans: Int64,
    key_nbytes: int,
    value_base: int,
    value_spans: Int64,
    value_nbytes: int,
    keys: Int64,
    values: Int64,
    positions: Int64,
) -> int:
    """Addresses and positions of the rows from `row` on, below `high`, that lie in one split; returns their number."""
    end = (runs[run, 2] + row - first_row[run]) // split_tokens * split_tokens + split_tokens
    n = 0
    while row < high:
        skipped = row - first_row[run]
        position = runs[run, 2] + skipped
        count = min(first_row[run + 1], high) - row
        if count > 0:
            count = min(count, end - position)
            if count <= 0:
                break
            key = key_base + key_spans[run, 0] + skipped * key_nbytes
            value = value_base + value_spans[run, 0] + skipped * value_nbytes
            for i in range(count):
                keys[n + i] = key + i * key_nbytes
                values[n + i] = value + i * value_nbytes
                positions[n + i] = position + i
            n += count
            row += count
        if row < first_row[run + 1]:
            break
        run += 1
    return n


@kernel(INT64, INTS, INT64, INTS, INT64, INT64, _MUTABLE)
def _count_visible(positions: Int64, n: int, q_positions: Int64, group: int, first: int, visible: Int64) -> int:
    """How many of the split's rows count for each query row from `first` on; returns the most."""
    most = 0
    for i in range(visible.shape[0]):
        query = (first + i) // group
        if query >= q_positions.shape[0]:
            break
        visible[i] = n
        if positions[n - 1] > q_positions[query]:
            visible[i] = how_many_up_to(positions, n, q_positions[query])
        most = max(most, visible[i])
    return most


@kernel(types.void, INT64, INTS, INT64, INT64, INT64, INT64, _MUTABLE, INT64, INT64, INT64, INT64)
def _states_of_split(
    softmax: int,
    weigh: Int64,
    dtype: int,
    num_queries: int,
    logits: int,
    logit_stride: int,
    visible: Int64,
    values: int,
    head_dim_v: int,
    state: int,
    state_stride: int,
) -> None:
    """State rows of one split; the first `visible[q]` logits of query row q count, and become weights in place."""
    for q in range(num_queries):
        row, place = logits + q * logit_stride, state + q * state_stride
        while visible[q] and load_float(row + 4 * visible[q] - 4) == -np.inf:
            visible[q] -= 1
        if visible[q]:
            for i in range(1, head_dim_v + 2):
                store_float(place + 4 * i, 0.0)
            call_softmax(softmax, row, visible[q], place)
        else:
            put_identity(place, 1, head_dim_v)
    q = 0
    while q < num_queries:
        size = tile_size(num_queries - q)
        weights, acc = logits + q * logit_stride, state + q * state_stride + 8
        together = visible[q]
        for i in range(q + 1, q + size):
            together = min(together, visible[i])
        if together:
            call_weigh(
                weigh[dtype * TILE + size - 1], weights, logit_stride, values, together, head_dim_v, acc, state_stride
            )
        for i in range(size):
            alone = visible[q + i] - together
            if alone:
                call_weigh(
                    weigh[dtype * TILE],
                    weights + i * logit_stride + 4 * together,
                    logit_stride,
                    values + 8 * together,
                    alone,
                    head_dim_v,
                    acc + i * state_stride,
                    state_stride,
                )
        q += size


@kernel(
    types.void,
    *(INT64, TABLE, TABLE, INTS),
    *(INT64, TABLE, INT64, TABLE, INT64, INT64, TABLE),
    *(INT64, INT64, INT64, INT64, INT64, INT64, INT64, REAL),
    *(INTS, INTS, INT64, INT64, INT64, INT64),
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
    split_tokens: int,
    scale: float,
    dots: Int64,
    weigh: Int64,
    softmax: int,
    merge: int,
    states: int,
    partials: int,
) -> None:
    """Take pieces until none is left, and put their states where they belong.

    Where `given_logits` is 0, logits are computed from queries and keys; otherwise they are read there, float32
    (rows, q_len · group), and `queries`, keys and `q_positions` are not used.
    """
    all_queries = q_len * group
    key_nbytes, value_nbytes = head_dim * ITEM[dtype], head_dim_v * ITEM[dtype]
    state_stride = 4 * (head_dim_v + 2)
    most_rows = 0
    for i in range(pieces.shape[0]):
        most_rows = max(most_rows, min(pieces[i, HIGH] - pieces[i, LOW], split_tokens))
    block = min(BLOCK, all_queries)
    width = padded(most_rows)
    logit_rows = np.empty((block, width), np.float32)
    query_rows = np.zeros((block, padded(head_dim)), np.float32)
    # One table for the split at hand and one for the next, whose keys are asked for meanwhile.
    keys, values = np.empty((2, most_rows), np.int64), np.empty((2, most_rows), np.int64)
    positions = np.empty((2, most_rows), np.int64)
    visible = np.empty(block, np.int64)
    levels = np.empty(66, np.int64)
    stack = np.empty(0, np.float32)
    logits, logit_stride = logit_rows.ctypes.data, 4 * width
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
        needed = (meeting_level(first_split, last_split) + 1) * block * (head_dim_v + 2)
        if stack.size < needed:
            stack = np.empty(needed, np.float32)
        bottom = stack.ctypes.data
        for q in range(0, all_queries, block):
            num_queries = min(block, all_queries - q)
            slot = num_queries * state_stride
            if given_logits == 0:
                collect_queries(queries, sequence, kv_head, q, num_kv_heads, group, q_len, head_dim, query_rows)
            depth, previous, run, row, now = 0, 0, first_run, low, 0
            n = _find_rows(
                runs, first_row, run, row, high, split_tokens, key_base, key_spans, key_nbytes, value_base, value_spans,
                value_nbytes, keys[0], values[0], positions[0],
            )  # fmt: skip
            while n:
                split = positions[now, 0] // split_tokens
                later, num_later = 1 - now, 0
                if row + n < high:
                    run = run_of(first_row, run, row + n)
                    num_later = _find_rows(
                        runs, first_row, run, row + n, high, split_tokens, key_base, key_spans, key_nbytes, value_base,
                        value_spans, value_nbytes, keys[later], values[later], positions[later],
                    )  # fmt: skip
                # The processor finds the next keys of a dense run by itself; scattered ones are asked for.
                reach = keys[later, num_later - 1] - keys[later, 0] if num_later else 0
                num_asked = 0 if reach == (num_later - 1) * key_nbytes else num_later
                any_visible = n
                visible[:] = n
                if given_logits == 0:
                    any_visible = _count_visible(positions[now], n, q_positions[sequence], group, q, visible)
                if any_visible:
                    if given_logits == 0:
                        dots_of_block(
                            dots, dtype, query_rows.ctypes.data, 4 * query_rows.shape[1], num_queries,
                            keys[now].ctypes.data, any_visible, head_dim, scale, logits, logit_stride,
                            values[now].ctypes.data, value_nbytes, keys[later].ctypes.data, num_asked,
                        )  # fmt: skip
                    else:
                        source = given_logits + 4 * (row * all_queries + q)
                        for j in range(n):
                            ask_for(values[now, j], value_nbytes)
                            for i in range(num_queries):
                                logit_rows[i, j] = load_float(source + 4 * (j * all_queries + i))
                    level = 0
                    if depth:
                        level = meeting_level(previous, split)
                        while depth > 1 and levels[depth - 1] < level:
                            depth -= 1
                            under, over = bottom + (depth - 1) * slot, bottom + depth * slot
                            call_merge(merge, under, over, num_queries, head_dim_v)
                    levels[depth] = level
                    _states_of_split(
                        softmax, weigh, dtype, num_queries, logits, logit_stride, visible, values[now].ctypes.data,
                        head_dim_v, bottom + depth * slot, state_stride,
                    )  # fmt: skip
                    depth, previous = depth + 1, split
                row, n, now = row + n, num_later, later
            while depth > 1:
                depth -= 1
                call_merge(merge, bottom + (depth - 1) * slot, bottom + depth * slot, num_queries, head_dim_v)
            if depth:
                move_bytes(out + q * state_stride, bottom, slot)
            else:
                put_identity(out + q * state_stride, num_queries, head_dim_v)
