"""The inner loop of the PNM model: what each request costs its channels and banks (pnm.py), 30 ns a request.

A long request costs little more than a short one: stripes that go round all banks are counted at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from tierloop.devices.kernels.compiled import INT64, TABLE, kernel
from tierloop.firmware_models.media import Ranges

_tuple_of: Any = types.UniTuple


@kernel(_tuple_of(INT64, 5), TABLE, TABLE, INT64, INT64, INT64, INT64, INT64, INT64)
def serve(
    reads: Ranges, writes: Ranges, channels: int, banks: int, burst: int, granule: int, stripe: int, tile: int
) -> tuple[int, int, int, int, int]:
    """Tiles, bytes on the busiest channel and on all, rows opened in the busiest bank of any channel and in all.

    `burst`, `granule`, `stripe` and `tile` are the powers of two that their sizes in bytes are: as divisions they would
    take three times as long as all the rest.
    """
    channel_bytes = np.zeros(channels, dtype=np.int64)
    bank_opens = np.zeros((channels, banks), dtype=np.int64)
    row_open = np.full(channels, np.int64(-1))
    tiles = all_rounds = 0
    for ranges in (reads, writes):
        for i in range(ranges.shape[0]):
            if ranges[i, 1] == 0:
                continue
            start = ranges[i, 0] >> burst << burst
            end = (ranges[i, 0] + ranges[i, 1] + (1 << burst) - 1) >> burst << burst
            tiles += (end - start + (1 << tile) - 1) >> tile
            at = start
            while at < end:
                low = at >> stripe
                rounds = ((end >> stripe) - low) // banks
                if rounds > 0 and at == low << stripe:
                    all_rounds += rounds
                    for channel in range(channels):
                        bank_opens[channel, low & (banks - 1)] -= row_open[channel] == low
                        row_open[channel] = low + rounds * banks - 1
                    at = (low + rounds * banks) << stripe
                    continue
                stop = min(end, (low + 1) << stripe)
                first, last = at >> granule, (stop - 1) >> granule
                for g in range(first, min(last, first + channels - 1) + 1):
                    channel = g & (channels - 1)
                    count = (last - g) // channels + 1 if last > g else 1
                    channel_bytes[channel] += count << granule
                    if row_open[channel] != low:
                        row_open[channel] = low
                        bank_opens[channel, low & (banks - 1)] += 1
                channel_bytes[first & (channels - 1)] -= at - (first << granule)
                channel_bytes[last & (channels - 1)] -= ((last + 1) << granule) - stop
                at = stop
    each = all_rounds * banks << stripe
    most_bytes, opens = channel_bytes.max() + each // channels, bank_opens.sum() + all_rounds * channels * banks
    return tiles, most_bytes, channel_bytes.sum() + each, bank_opens.max() + all_rounds, opens
