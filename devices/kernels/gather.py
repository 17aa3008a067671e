"""gather: scattered rows → one dense run (contract.py).

The lines of a row are asked for some rows before it is copied, because which row comes next is nothing that a
processor can guess. Threads take pieces of the dense run in turn, whatever the spans on either side.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, address_of, kernel, move_bytes, take_next
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.pace import TILE_NBYTES, is_paced, keep_pace, new_counter
from tierloop.devices.kernels.plan import how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import ask_for

_AHEAD = 32
"""Rows between asking and copying. Zen 3, 16 MiB of rows out of 256 MiB: 64 B 5.6 → 4.2 ms, 2 KiB 4.1 → 3.5 ms; at
256 B (2.5 ms) the loop without it already has as many lines under way as a core can have."""
_AHEAD_NBYTES = 1024
"""Of a longer row, the processor finds the rest by itself."""
_PIECE = 1 << 18
"""Bytes that a thread takes at a time, at least."""


@kernel(INT64, TABLE, types.Array(types.int64, 1, "C"))
def _put_ends(spans: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """The byte at which each span ends, counted end to end; returns the last."""
    total = 0
    for i in range(spans.shape[0]):
        total += spans[i, 1]
        ends[i] = total
    return total


@kernel(types.void, INT64, INT64, INT64, *(INT64, TABLE, INTS), *(INT64, TABLE, INTS))
def _work_on_bytes(
    counter: int,
    total: int,
    share_nbytes: int,
    target_base: int,
    target_spans: NDArray[np.int64],
    target_ends: NDArray[np.int64],
    source_base: int,
    source_spans: NDArray[np.int64],
    source_ends: NDArray[np.int64],
) -> None:
    """Take shares of the `total` bytes until none is left, and copy them between the two lists of spans."""
    while True:
        low = take_next(counter) * share_nbytes
        if low >= total:
            break
        keep_pace(counter, low, total)
        high = min(low + share_nbytes, total)
        i = how_many_up_to(target_ends, target_ends.shape[0], low)
        j = how_many_up_to(source_ends, source_ends.shape[0], low)
        for k in range(j, min(j + _AHEAD, source_spans.shape[0])):
            ask_for(source_base + source_spans[k, 0], min(source_spans[k, 1], _AHEAD_NBYTES))
        taken = low - (source_ends[j] - source_spans[j, 1])
        while low < high:
            while target_ends[i] <= low:
                i += 1
            room = min(target_ends[i], high) - low
            to = target_base + target_spans[i, 0] + target_spans[i, 1] - (target_ends[i] - low)
            low += room
            while room:
                # Whole rows by a loop in which no row waits for the one before: 1.5 times as fast as one for all cases.
                while taken == 0 and source_spans[j, 1] <= room:
                    k = min(j + _AHEAD, source_spans.shape[0] - 1)
                    ask_for(source_base + source_spans[k, 0], min(source_spans[k, 1], _AHEAD_NBYTES))
                    move_bytes(to, source_base + source_spans[j, 0], source_spans[j, 1])
                    to += source_spans[j, 1]
                    room -= source_spans[j, 1]
                    j += 1
                    if room == 0:
                        break
                if room:
                    count = min(room, source_spans[j, 1] - taken)
                    move_bytes(to, source_base + source_spans[j, 0] + taken, count)
                    to += count
                    room -= count
                    taken += count
                    if taken == source_spans[j, 1]:
                        j, taken = j + 1, 0


def gather(
    args: object, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel: bytes end to end, whatever the spans."""
    operands = Operands(bytes_of)
    move_in_tiles(*operands.rows(writes[0]), *operands.rows(reads[0]), threads)


def move_in_tiles(
    target_base: int,
    target_spans: NDArray[np.int64],
    source_base: int,
    source_spans: NDArray[np.int64],
    threads: int = 1,
) -> None:
    """Copy bytes between two lists of spans, as long as both last; threads share them, and a pace is kept."""
    target_ends, source_ends = np.empty(len(target_spans), dtype=np.int64), np.empty(len(source_spans), dtype=np.int64)
    total = min(_put_ends(target_spans, target_ends), _put_ends(source_spans, source_ends))
    threads = worthwhile(threads, total)
    share_nbytes = max(_PIECE, total // (4 * threads)) if threads > 1 else max(1, total)
    if is_paced():
        share_nbytes = TILE_NBYTES
    counter = new_counter()
    target, source = (target_base, target_spans, target_ends), (source_base, source_spans, source_ends)
    share(threads, partial(_work_on_bytes, address_of(counter), total, share_nbytes, *target, *source))
