"""The inner loops of an archive's `media`: a decode step asks for hundreds of entries in every layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, INTS, kernel

Int64 = NDArray[np.int64]

_PLACES = types.Array(types.int32, 2, "C", readonly=True)
_tuple: Any = types.Tuple
_BOTH = _tuple((INT64[:, ::1], INT64[::1]))


@kernel(INT64[::1], _PLACES, INTS, INTS, INTS, INT64)
def starts(places: NDArray[np.int32], segments: Int64, heads: Int64, entries: Int64, granule: int) -> Int64:
    """Where entries begin in the region: int64 (n + 1,), the last one the index of an entry that is not there, or n.

    `places` (heads, most) are granules within a segment plus one, 0 for no entry; `segments` (heads,) is where those
    begin.
    """
    n = len(entries)
    made = np.empty(n + 1, dtype=np.int64)
    made[n] = n
    for i in range(n):
        head, entry = heads[i], entries[i]
        if head < 0 or head >= places.shape[0] or entry < 0 or entry >= places.shape[1] or places[head, entry] == 0:
            made[n] = i
            return made
        made[i] = segments[head] + (np.int64(places[head, entry]) - 1) * granule
    return made


@kernel(_BOTH, INTS, INTS, INT64, INT64)
def joined(start: Int64, order: Int64, nbytes: int, grid: int) -> tuple[Int64, Int64]:
    """Media blocks of pieces of `nbytes` from `start` on, as spans (m, 2), and where each piece begins in these.

    `order` sorts the pieces. Blocks are whole multiples of the grid, each once; neighbours are joined.
    """
    n = len(order)
    pairs = np.empty((n, 2), dtype=np.int64)
    offset = np.empty(n, dtype=np.int64)
    m, end, before = 0, np.int64(-1), np.int64(0)
    for i in range(n):
        piece = order[i]
        first = start[piece] // grid * grid
        last = (start[piece] + nbytes + grid - 1) // grid * grid
        if first > end or m == 0:
            if m > 0:
                before += pairs[m - 1, 1]
            pairs[m, 0] = first
            m += 1
            end = last
        elif last > end:
            end = last
        pairs[m - 1, 1] = end - pairs[m - 1, 0]
        offset[piece] = before + start[piece] - pairs[m - 1, 0]
    return pairs[:m].copy(), offset
