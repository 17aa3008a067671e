"""The inner loop of the PNM model: what each request costs its channels and banks (pnm.py), 30 ns a request."""

from __future__ import annotations

import numpy as np
from numba import types

from tierloop.devices.kernels.compiled import INT64, TABLE, kernel
from tierloop.firmware_models.media import Ranges


@kernel(INT64, TABLE, INT64, INT64, INT64, INT64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C"))
def serve(
    ranges: Ranges,
    burst: int,
    granule: int,
    stripe: int,
    tile: int,
    channel_bytes: Ranges,
    bank_opens: Ranges,
) -> int:
    """Add up bytes per channel, int64 (channels,), and rows opened, int64 (channels, banks); returns the tiles.

    `burst`, `granule`, `stripe` and `tile` are the powers of two that their sizes in bytes are: as divisions they would
    take three times as long as all the rest.
    """
    channels, banks = bank_opens.shape
    tiles = 0
    row_open = np.full(channels, np.int64(-1))
    for i in range(ranges.shape[0]):
        if ranges[i, 1] == 0:
            continue
        start = ranges[i, 0] >> burst << burst
        end = (ranges[i, 0] + ranges[i, 1] + (1 << burst) - 1) >> burst << burst
        tiles += (end - start + (1 << tile) - 1) >> tile
        at = start
        while at < end:
            low = at >> stripe
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
    return tiles
