"""Stores: the bytes of an emulated memory, and how many of them there are.

A region is an anonymous mapping of its own, zeroed and backed by the host only where it is touched; with `backing` it
is a sparse file in that folder instead, unlinked at once, so that a large drive does not have to fit the host's
memory; with `kept` it is a part of a file that outlives the store (kept.py). A phantom region counts against the
capacity and has no bytes. `Region.view` stays None: the host reaches the bytes through commands only, as it would with
a device.

Where the medium needs addresses (flash, PNM, a kept file), regions lie in one piece each on the medium, first fit.
"""

from __future__ import annotations

import mmap
import tempfile
from math import lcm
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.extents import Extents
from tierloop.devices.errors import Busy, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.regions import Region
from tierloop.devices.spans import Spans
from tierloop.devices.system import from_os
from tierloop.emulators.kept import PAGE, KeptFile

Bytes = NDArray[np.uint8]
_HUGE = 1 << 21
_SHORT, _REMEMBERED = 64, 8
"""Lists of at most so many spans are remembered, so many for each region: 8 KiB."""


class Store:
    """The regions of one memory. `used` counts bytes of live regions, rounded up to the grid.

    `live` maps the live regions of several stores to their bytes, uint8 (nbytes,), or None where they are phantom.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        grid: int,
        addressed: bool,
        backing: Path | None = None,
        live: dict[Region, Bytes | None] | None = None,
        kept: KeptFile | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        self._grid = grid if kept is None else lcm(grid, PAGE)
        self._extents = Extents(capacity, self._grid) if addressed or kept is not None else None
        self._backing = backing
        self._kept = kept
        self._live = {} if live is None else live
        self._next_id = 0
        self._mine: dict[Region, int] = {}
        self._placed: dict[Region, dict[int, tuple[Spans, NDArray[np.int64]]]] = {}

    def alloc(self, nbytes: int, phantom: bool) -> Region:
        """Allocate zeroed bytes. Raises OutOfRange or OutOfMemory."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 1:
            raise OutOfRange(self.name, "alloc", f"{nbytes!r} bytes; at least 1")
        nbytes = int(nbytes)
        size = self._size(nbytes)
        address = 0
        if self._extents is not None and size <= self.capacity - self.used:
            taken = self._extents.take(nbytes)
            if taken is None:
                raise OutOfMemory(
                    self.name,
                    "alloc",
                    f"{nbytes} bytes: {self.capacity - self.used} of {self.capacity} are free, but the largest piece "
                    f"has {self._extents.largest_hole}",
                )
            address = taken
        elif size > self.capacity - self.used:
            raise OutOfMemory(
                self.name, "alloc", f"{nbytes} bytes: {self.capacity - self.used} of {self.capacity} are free"
            )
        region = Region(self.name, self.name, self._next_id, nbytes, phantom)
        try:
            self._live[region] = None if phantom else self._map(nbytes, address)
        except (OSError, MemoryError, ValueError) as error:
            if self._extents is not None:
                self._extents.give(address, nbytes)
            raise OutOfMemory(
                self.name, "alloc", f"{nbytes} bytes: the host has nothing to back them with: {error}"
            ) from error
        self._mine[region] = address
        self._next_id += 1
        self.used += size
        return region

    def adopt(self, offset: int, nbytes: int) -> Region:
        """The region that was at `offset` of a kept file, with its bytes. Raises Unsupported, OutOfRange, Busy."""
        if self._kept is None or self._extents is None:
            raise Unsupported(self.name, "adopt", "the memory does not keep its bytes: no file was named (`keep`)")
        if nbytes < 1 or offset < 0 or offset % self._grid or offset + nbytes > self._extents.capacity:
            raise OutOfRange(
                self.name,
                "adopt",
                f"[{offset}, {offset + nbytes}) of {self._extents.capacity} bytes; it starts on a multiple of "
                f"{self._grid}",
            )
        if not self._extents.take_at(offset, nbytes):
            raise Busy(self.name, "adopt", f"[{offset}, {offset + nbytes}) belongs to another region")
        region = Region(self.name, self.name, self._next_id, nbytes)
        try:
            self._live[region] = self._kept.map(offset, nbytes)
        except (OSError, MemoryError, ValueError) as error:
            self._extents.give(offset, nbytes)
            raise OutOfMemory(self.name, "adopt", f"{nbytes} bytes: the host cannot map them: {error}") from error
        self._mine[region] = offset
        self._next_id += 1
        self.used += self._size(nbytes)
        return region

    def offset_of(self, region: Region) -> int:
        """Where a region lies on the medium. Raises OutOfRange."""
        if region not in self._mine:
            raise OutOfRange(self.name, "offset_of", f"{region} is not allocated here")
        return self._mine[region]

    def free(self, region: Region) -> int:
        """Give a region back; returns where it began. Raises OutOfRange if it is not of this store or freed already."""
        if region not in self._mine:
            raise OutOfRange(self.name, "free", f"{region} is not a region of this device, or is freed")
        address = self._drop(region)
        if self._kept is not None and not region.phantom:
            try:
                self._kept.clear(address, self._size(region.nbytes))
            except OSError as error:
                raise from_os(self.name, "free", error, f"{region}") from error
        return address

    def disown(self, region: Region) -> None:
        """Let go of an adopted region; what it named stays in the kept file. Raises OutOfRange."""
        if region not in self._mine:
            raise OutOfRange(self.name, "disown", f"{region} is not a region of this device, or is freed")
        self._drop(region)

    def _drop(self, region: Region) -> int:
        address = self._mine.pop(region)
        self._placed.pop(region, None)
        del self._live[region]
        region.freed = True
        self.used -= self._size(region.nbytes)
        if self._extents is not None:
            self._extents.give(address, region.nbytes)
        return address

    def address(self, region: Region) -> int:
        """Where a live region of this store begins on the medium; 0 where addresses mean nothing."""
        return self._mine[region]

    def ranges(self, region: Region, spans: Spans) -> NDArray[np.int64]:
        """Spans of a live region as ranges on the medium: int64 (n, 2) of (address, nbytes), not to be written to.

        A few short lists are remembered for each region: policies name the same rows step after step.
        """
        placed = self._placed.get(region)
        if placed is None:
            placed = self._placed[region] = {}
        found = placed.get(id(spans))
        if found is not None and found[0] is spans:
            return found[1]
        made = spans.array + np.array([self._mine[region], 0], dtype=np.int64)
        if len(made) <= _SHORT:
            if len(placed) >= _REMEMBERED:
                placed.clear()
            placed[id(spans)] = (spans, made)
        return made

    def close(self) -> None:
        """Free everything; what is in a kept file stays there. Raises MediaError."""
        for region in list(self._mine):
            self._drop(region)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept.close()

    def _size(self, nbytes: int) -> int:
        return -(-nbytes // self._grid) * self._grid

    def _map(self, nbytes: int, address: int) -> Bytes:
        if self._kept is not None:
            return self._kept.renew(address, nbytes)
        if self._backing is None:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are never huge
            if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            with tempfile.TemporaryFile(dir=self._backing) as file:
                file.truncate(nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
        return np.frombuffer(memory, dtype=np.uint8)
