"""Shares: the logits of whole lists → each row's softmax, summed over the query group (`Score` in contract.py).

A *list* is the rows of one sequence and KV head of a launch. Its logits lie head after head, each with room up to whole
vectors: those of q head g of a list of n rows that begins at `place` are n floats at place + g · padded(n).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import (
    INT64,
    INTS,
    PAIR,
    TABLE,
    caller,
    entry,
    inline,
    kernel,
    load,
    move_bytes,
    store,
    take_next,
)
from tierloop.devices.kernels.entries import SOFTMAX
from tierloop.devices.kernels.lanes import (
    FLOAT,
    LANES,
    alloca_once,
    at,
    counting,
    halve_groups,
    int64,
    spread,
    whole,
)
from tierloop.devices.kernels.softmax import call_softmax
from tierloop.devices.kernels.tiles import padded

Int64 = NDArray[np.int64]

LOW, HIGH, PLACE, NUM_COLUMNS = range(4)
"""Columns of a list: its rows [LOW, HIGH) of the launch, and where its logits begin, in floats."""

_ADD_SHARES = (INT64, INT64, INT64, INT64)
_MUTABLE = types.Array(types.int64, 1, "C")
_MUTABLE_TABLE = types.Array(types.int64, 2, "C")


@inline(types.void, *_ADD_SHARES)
def _add_shares(builder: Any, weights: Any, n: Any, shares: Any, is_first: Any) -> None:
    end = whole(builder, builder.add(n, int64(LANES - 1)), LANES)
    single, double = ir.VectorType(FLOAT, LANES), ir.VectorType(ir.DoubleType(), LANES)
    sums = alloca_once(builder, double)
    builder.store(ir.Constant(double, [0.0] * LANES), sums)
    with counting(builder, int64(0), end, LANES) as i:
        wide = builder.fpext(load(builder, at(builder, weights, i, 4), single), double)
        builder.store(builder.fadd(builder.load(sums), wide), sums)
    total = halve_groups([builder.load(sums)], LANES, builder, builder.fadd)
    total = builder.fptrunc(builder.extract_element(total, ir.Constant(ir.IntType(32), 0)), FLOAT)
    # Where every logit is −∞ the weights are 0, and so are the shares.
    nothing = builder.fcmp_ordered("==", total, ir.Constant(FLOAT, 0.0))
    total = spread(builder, builder.select(nothing, ir.Constant(FLOAT, 1.0), total))
    anew = builder.icmp_signed("!=", is_first, int64(0))
    with counting(builder, int64(0), end, LANES) as i:
        place = at(builder, shares, i, 4)
        share = builder.fdiv(load(builder, at(builder, weights, i, 4), single), total)
        added = builder.fadd(load(builder, place, single), share)
        store(builder, builder.select(anew, share, added), place)


@entry(*_ADD_SHARES)
def _compiled_add_shares(weights: int, n: int, shares: int, is_first: int) -> None:
    _add_shares(weights, n, shares, is_first)


_call_add_shares = caller(*_ADD_SHARES)
"""(address, weights, n, shares, is first): n weights over their sum are added to n shares, or are the first of them;
both have room up to whole vectors, the weights there are 0."""
ADD_SHARES = np.array([_compiled_add_shares], dtype=np.int64)


@kernel(PAIR, TABLE, INTS, INT64, _MUTABLE, _MUTABLE_TABLE)
def find_lists(runs: Int64, first_row: Int64, group: int, list_of: Int64, lists: Int64) -> tuple[int, int]:
    """Put the list of each run into `list_of`; returns how many lists there are, and the floats of their logits."""
    count, floats_so_far = 0, 0
    for run in range(runs.shape[0]):
        if run == 0 or runs[run, 0] != runs[run - 1, 0] or runs[run, 1] != runs[run - 1, 1]:
            if count:
                floats_so_far += group * padded(lists[count - 1, HIGH] - lists[count - 1, LOW])
            lists[count, LOW], lists[count, PLACE] = first_row[run], floats_so_far
            count += 1
        lists[count - 1, HIGH] = first_row[run + 1]
        list_of[run] = count - 1
    if count:
        floats_so_far += group * padded(lists[count - 1, HIGH] - lists[count - 1, LOW])
    return count, floats_so_far


@kernel(types.void, INT64, TABLE, INT64, INT64, INTS, INTS, INT64)
def share_out(counter: int, lists: Int64, group: int, logits: int, entries: Int64, add_shares: Int64, out: int) -> None:
    """Take lists until none is left; scores go to `out`, float32 (rows,). The logits are overwritten."""
    top = np.empty(1, np.float32)
    while True:
        which = take_next(counter)
        if which >= lists.shape[0]:
            break
        n = lists[which, HIGH] - lists[which, LOW]
        if n == 0:
            continue
        shares, stride = logits + 4 * lists[which, PLACE], 4 * padded(n)
        for member in range(group):
            weights = shares + member * stride
            call_softmax(entries[SOFTMAX], weights, n, top.ctypes.data)
            _call_add_shares(add_shares[0], weights, n, shares, member == 0)
        move_bytes(out + 4 * lists[which, LOW], shares, 4 * n)
