"""Arenas: which regions of one memory are allocated, and how much of its capacity they take."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import Busy, Gone, OutOfMemory, OutOfRange
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region


class Arena:
    """The regions of one memory. `page` is what allocations are rounded up to, in bytes; `used` what they take.

    `process` is the one that alone may use them, where their bytes or threads are not those of a forked child.
    """

    def __init__(self, device: str, memory: MemoryInfo, page: int = 1, process: int | None = None) -> None:
        self._device = device
        self._memory = memory
        self._page = page
        self._process = process
        self._regions: dict[int, Region] = {}
        self._next_id = 0
        self._closed = False
        self.used = 0

    def alive(self, op: str) -> None:
        """Raises Gone once the arena is closed, and in another process than its own."""
        if self._closed:
            raise Gone(self._device, op, "the device is closed")
        if self._process not in (None, os.getpid()):
            detail = f"process {self._process} opened it, and process {os.getpid()} is a fork of that: open it here"
            raise Gone(self._device, op, detail)

    def reserve(self, nbytes: int, memory: str | None) -> int:
        """What a region of `nbytes` takes, if it fits. Raises Gone, OutOfRange or OutOfMemory; changes nothing."""
        self.alive("alloc")
        name, capacity = self._memory.name, self._memory.capacity
        if memory not in (None, name):
            raise OutOfRange(self._device, "alloc", f"there is no memory {memory!r} here, only {name!r}")
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 1:
            raise OutOfRange(
                self._device, "alloc", f"{nbytes!r} bytes; a region has at least 1, and a whole number of them"
            )
        taken = self._rounded(int(nbytes))
        if taken > capacity - self.used:
            raise OutOfMemory(
                self._device, "alloc", f"{nbytes} bytes; {capacity - self.used} of {capacity} are free in {name}"
            )
        return taken

    def add(self, nbytes: int, phantom: bool = False, view: NDArray[np.uint8] | None = None) -> Region:
        """Record a region whose bytes `reserve` has granted."""
        region = Region(self._device, self._memory.name, self._next_id, int(nbytes), phantom, view)
        self._next_id += 1
        self._regions[region.id] = region
        self.used += self._rounded(region.nbytes)
        return region

    def remove(self, region: Region, in_use: bool) -> None:
        """Forget a region. Raises Gone, OutOfRange if it is not allocated here, Busy if a command still uses it."""
        self.alive("free")
        if self._regions.get(region.id) is not region:
            raise OutOfRange(self._device, "free", f"{region} is not allocated here")
        if in_use:
            raise Busy(self._device, "free", f"{region} is used by a command that has not ended")
        del self._regions[region.id]
        region.freed = True
        self.used -= self._rounded(region.nbytes)

    def close(self) -> None:
        """Forget every region, and allow no more."""
        self._closed = True
        for region in self._regions.values():
            region.freed = True
        self._regions.clear()
        self.used = 0

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._page) * self._page
