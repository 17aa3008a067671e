"""Loops that do nothing but keep a pace: to find out how well this host can."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, PAIR, address_of, kernel, load_int, store_int
from tierloop.devices.kernels.pace import CYCLES, LENGTH, START, ticks, wait_for

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@kernel(PAIR, _BYTES, INT64, INT64, INT64)
def read_in_tiles(data: NDArray[np.uint8], nbytes: int, tile_nbytes: int, pace: int) -> tuple[int, int]:
    """Read `nbytes` of `data`, from the start again where it ends, tile by tile, and wait for the end of the last one;
    returns the ticks that passed since the first wait, and a sum of what was read."""
    base, size = address_of(data), data.shape[0] // tile_nbytes * tile_nbytes
    total, place, done = 0, 0, 0
    start = ticks(load_int(pace + 8 * CYCLES))
    store_int(pace + 8 * START, start)  # now, not when the pace was made; a debt that is dropped moves it
    while done < nbytes:
        wait_for(pace, done, nbytes)
        count = min(tile_nbytes, nbytes - done)
        for i in range(count // 64):
            total += load_int(base + place + 64 * i)
        done += count
        place += tile_nbytes
        if place >= size:
            place = 0
    wait_for(pace, nbytes, nbytes)
    return ticks(load_int(pace + 8 * CYCLES)) - start, total


@kernel(types.void, types.Array(types.int64, 1, "C"), INT64)
def wait_again_and_again(late: NDArray[np.int64], pace: int) -> None:
    """Wait for each part of the time; by how many ticks each wait ended after its deadline goes to `late`."""
    count = late.shape[0]
    store_int(pace + 8 * START, ticks(load_int(pace + 8 * CYCLES)))
    for i in range(1, count + 1):
        due = load_int(pace + 8 * START) + np.int64(load_int(pace + 8 * LENGTH) * (i / count))
        wait_for(pace, i, count)
        late[i - 1] = ticks(load_int(pace + 8 * CYCLES)) - due
