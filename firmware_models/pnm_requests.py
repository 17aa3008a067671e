"""The inner loops of the PNM model: requests out of ranges, and what each costs its channels and banks (pnm.py).

Ranges become requests by a sweep over where they begin and where they end: how often a byte is asked for is all that
matters, not by which ranges. 170,000 rows in no order take 4 ms, in order 1 ms. A long one costs little more than a
short one: stripes that go round all banks are counted at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, PAIR, TABLE, kernel
from tierloop.firmware_models.media import Ranges

_tuple_of: Any = types.UniTuple


_POSITIONS = types.Array(types.int64, 1, "C")
_REQUESTS = types.Array(types.int64, 2, "C")


def requests_of(ranges: Ranges) -> tuple[Ranges, Ranges]:
    """The requests for the bytes of ranges, in the order of their addresses, and those that ask for some again."""
    starts, ends = np.empty(len(ranges), dtype=np.int64), np.empty(len(ranges), dtype=np.int64)
    count, is_sorted = _take_apart(ranges, starts, ends)
    starts, ends = starts[:count], ends[:count]
    if not is_sorted:
        starts.sort()
        ends.sort()
    first, again = np.empty((count, 2), dtype=np.int64), np.empty((count, 2), dtype=np.int64)
    num_first, num_again = _join(starts, ends, first, again)
    return first[:num_first], again[:num_again]


@kernel(PAIR, TABLE, _POSITIONS, _POSITIONS)
def _take_apart(ranges: Ranges, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[int, int]:
    """Where ranges begin and end; how many are not empty, and whether both are ascending."""
    count, is_sorted = 0, True
    start = end = 0
    for i in range(ranges.shape[0]):
        if ranges[i, 1] == 0:
            continue
        is_sorted &= start <= ranges[i, 0] and end <= ranges[i, 0] + ranges[i, 1]
        start, end = ranges[i, 0], ranges[i, 0] + ranges[i, 1]
        starts[count], ends[count] = start, end
        count += 1
    return count, is_sorted


@kernel(types.boolean, TABLE)
def _are_requests(ranges: Ranges) -> bool:
    """Whether each range, but for empty ones, begins behind the end of the one before."""
    end = -1
    for i in range(ranges.shape[0]):
        if ranges[i, 1] > 0:
            if ranges[i, 0] <= end:
                return False
            end = ranges[i, 0] + ranges[i, 1]
    return True


@kernel(PAIR, _POSITIONS, _POSITIONS, _REQUESTS, _REQUESTS)
def _join(starts: NDArray[np.int64], ends: NDArray[np.int64], first: Ranges, again: Ranges) -> tuple[int, int]:
    """Where ranges begin and end, each ascending → longest requests; how many ask for the first time, and again."""
    opened = np.empty(starts.shape[0], np.int64)
    num_first, num_again, depth, i = 0, 0, 0, 0
    for j in range(ends.shape[0]):
        while i < starts.shape[0] and starts[i] < ends[j]:
            opened[depth] = starts[i]
            depth += 1
            i += 1
        if i < starts.shape[0] and starts[i] == ends[j]:  # one goes on where another ends
            i += 1
            continue
        depth -= 1
        if depth:
            again[num_again, 0], again[num_again, 1] = opened[depth], ends[j] - opened[depth]
            num_again += 1
        else:
            first[num_first, 0], first[num_first, 1] = opened[0], ends[j] - opened[0]
            num_first += 1
    return num_first, num_again


@kernel(_tuple_of(INT64, 6), TABLE, TABLE, TABLE, TABLE, INT64, INT64, INT64, INT64, INT64, INT64)
def serve(
    reads: Ranges,
    writes: Ranges,
    reads_again: Ranges,
    writes_again: Ranges,
    channels: int,
    banks: int,
    burst: int,
    granule: int,
    stripe: int,
    tile: int,
) -> tuple[int, int, int, int, int, int]:
    """Requests, tiles, bytes on the busiest channel and on all, rows opened in the busiest bank of any channel and in
    all; what is asked for again opens none. −1 and nothing else where reads or writes are no requests yet.

    `burst`, `granule`, `stripe` and `tile` are the powers of two that their sizes in bytes are: as divisions they would
    take three times as long as all the rest.
    """
    if not (_are_requests(reads) and _are_requests(writes)):
        return -1, 0, 0, 0, 0, 0
    channel_bytes = np.zeros(channels, dtype=np.int64)
    bank_opens = np.zeros((channels, banks), dtype=np.int64)
    row_open = np.full(channels, np.int64(-1))
    requests = tiles = all_rounds = rounds_again = 0
    for turn, ranges in enumerate((reads, writes, reads_again, writes_again)):
        opens_rows = turn < 2
        for i in range(ranges.shape[0]):
            if ranges[i, 1] == 0:
                continue
            start = ranges[i, 0] >> burst << burst
            end = (ranges[i, 0] + ranges[i, 1] + (1 << burst) - 1) >> burst << burst
            requests += 1
            tiles += (end - start + (1 << tile) - 1) >> tile
            at = start
            while at < end:
                low = at >> stripe
                rounds = ((end >> stripe) - low) // banks
                if rounds > 0 and at == low << stripe:
                    if opens_rows:
                        all_rounds += rounds
                        for channel in range(channels):
                            bank_opens[channel, low & (banks - 1)] -= row_open[channel] == low
                            row_open[channel] = low + rounds * banks - 1
                    else:
                        rounds_again += rounds
                    at = (low + rounds * banks) << stripe
                    continue
                stop = min(end, (low + 1) << stripe)
                first, last = at >> granule, (stop - 1) >> granule
                for g in range(first, min(last, first + channels - 1) + 1):
                    channel = g & (channels - 1)
                    count = (last - g) // channels + 1 if last > g else 1
                    channel_bytes[channel] += count << granule
                    if opens_rows and row_open[channel] != low:
                        row_open[channel] = low
                        bank_opens[channel, low & (banks - 1)] += 1
                channel_bytes[first & (channels - 1)] -= at - (first << granule)
                channel_bytes[last & (channels - 1)] -= ((last + 1) << granule) - stop
                at = stop
    each = (all_rounds + rounds_again) * banks << stripe
    most_bytes, opens = channel_bytes.max() + each // channels, bank_opens.sum() + all_rounds * channels * banks
    return requests, tiles, most_bytes, channel_bytes.sum() + each, bank_opens.max() + all_rounds, opens
