"""Arenas: which regions of one memory are allocated, and how much of its capacity they take."""

from __future__ import annotations

import operator
import os
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import Busy, Gone, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region


def whole(device: str, op: str, given: SupportsIndex) -> int:
    """A number of bytes that somebody handed in, as the integer that it is (NumPy's are). Raises OutOfRange."""
    if isinstance(given, (bool, np.bool_)) or not hasattr(given, "__index__"):
        raise OutOfRange(device, op, f"{given!r} is no whole number of bytes")
    return operator.index(given)


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

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that may use it."""
        return self._process not in (None, os.getpid())

    def alive(self, op: str) -> None:
        """Raises Gone once the arena is closed, and in another process than its own."""
        if self._closed:
            raise Gone(self._device, op, "the device is closed")
        if self.forked:
            whose = f"process {self._process} opened it, and process {os.getpid()} is a fork, without its threads"
            raise Gone(self._device, op, f"{whose}; open a device in the process that uses it")

    def reserve(self, nbytes: int, memory: str | None) -> int:
        """What a region of `nbytes` takes, if it fits. Raises Gone, OutOfRange or OutOfMemory; changes nothing."""
        self.alive("alloc")
        name, capacity = self._memory.name, self._memory.capacity
        if memory not in (None, name):
            raise OutOfRange(self._device, "alloc", f"there is no memory {memory!r} here, only {name!r}")
        nbytes = whole(self._device, "alloc", nbytes)
        if nbytes < 1:
            raise OutOfRange(self._device, "alloc", f"{nbytes} bytes; a region has at least 1")
        taken = self._rounded(nbytes)
        if taken > capacity - self.used:
            raise OutOfMemory(
                self._device, "alloc", f"{nbytes} bytes; {capacity - self.used} of {capacity} are free in {name}"
            )
        return taken

    def grant(self, nbytes: int, memory: str | None, phantom: bool) -> int:
        """As `reserve`, of a real device, which has no phantom regions. Raises Unsupported, too."""
        self.alive("alloc")
        if phantom:
            raise Unsupported(self._device, "alloc", "a real device has no phantom regions")
        return self.reserve(nbytes, memory)

    def add(self, nbytes: int, phantom: bool = False, view: NDArray[np.uint8] | None = None) -> Region:
        """Record a region whose bytes were reserved or granted."""
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
