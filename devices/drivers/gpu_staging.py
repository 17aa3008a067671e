"""Staging: page-locked buffers between host memory and a GPU, and host memory that is page-locked where it lies.

A buffer belongs to whoever took it until the event that it was given back with is done. The pool is bounded: a command
that finds it empty goes on when another one is through. Nobody keeps a buffer while waiting for a second one, so the
pool cannot run dry for good.

Scratch is room in the GPU's own memory for operands of kernels that lie on the host, borrowed likewise.

Host memory is registered when a copy first touches it, region by region; where the system refuses, the reason is kept
and copies go through buffers. A region that was freed is unregistered at the next chance, and all of them at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.gpu_runtime import Accelerator, Event
from tierloop.devices.regions import Region

if TYPE_CHECKING:
    from torch import Tensor


class Staging:
    """`count` page-locked buffers of `nbytes` each, made when they are first needed."""

    def __init__(self, accelerator: Accelerator, count: int, nbytes: int) -> None:
        self._accelerator = accelerator
        self._left = count
        self._free: list[Tensor] = []
        self._lent: list[tuple[Event, Tensor]] = []
        self.nbytes = nbytes

    def take(self) -> Tensor | None:
        """A buffer, or None while all are in use."""
        if not self._free:
            self._collect()
        if self._free:
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        try:
            return self._accelerator.pinned(self.nbytes)
        except BaseException:
            self._left += 1
            raise

    def give(self, buffer: Tensor, event: Event = None) -> None:
        """Give a buffer back; it is free when the event is done."""
        if event is None:
            self._free.append(buffer)
        else:
            self._lent.append((event, buffer))

    def _collect(self) -> None:
        still = []
        for event, buffer in self._lent:
            if self._accelerator.done(event):
                self._free.append(buffer)
            else:
                still.append((event, buffer))
        self._lent = still


class Scratch:
    """Room in the slab, taken from the same extents as regions."""

    def __init__(self, accelerator: Accelerator, extents: Extents) -> None:
        self._accelerator = accelerator
        self._extents = extents
        self._lent: list[tuple[Event, int, int]] = []

    def take(self, nbytes: int) -> int:
        """The offset of so many bytes. Raises MemoryError."""
        self.collect()
        offset = self._extents.take(max(nbytes, 1))
        if offset is None:
            raise MemoryError(
                f"{nbytes} bytes for operands that lie on the host; the largest piece that is free has "
                f"{self._extents.largest_hole}"
            )
        return offset

    def give(self, offset: int, nbytes: int, event: Event) -> None:
        """Give it back; it is free when the event is done."""
        self._lent.append((event, offset, max(nbytes, 1)))

    def collect(self) -> None:
        """Give what is free by now back to the extents."""
        still = []
        for event, offset, nbytes in self._lent:
            if self._accelerator.done(event):
                self._extents.give(offset, nbytes)
            else:
                still.append((event, offset, nbytes))
        self._lent = still


class Registered:
    """Which regions of host memory are page-locked for this GPU."""

    def __init__(self, accelerator: Accelerator, wanted: bool, told: Callable[[Region], object]) -> None:
        self._accelerator = accelerator
        self._wanted = wanted
        self._told = told
        self._views: dict[Region, NDArray[np.uint8]] = {}
        self._refused: set[Region] = set()
        self.nbytes = 0
        self.why = ""
        """Why a region could not be registered, the last time that one could not."""

    def has(self, region: Region) -> bool:
        """Whether copy engines may reach the region where it lies; tries to make it so."""
        self._drop_freed()
        if region in self._views:
            return True
        view = region.view
        if not self._wanted or region in self._refused or view is None:
            return False
        try:
            self._accelerator.register(view)
        except RuntimeError as error:
            self.why = f"{region}: {error}"
            self._refused.add(region)
            return False
        self._views[region] = view
        self.nbytes += view.nbytes
        self._told(region)
        return True

    def close(self) -> None:
        """Unregister everything."""
        for region in list(self._views):
            self._drop(region)

    def _drop_freed(self) -> None:
        for region in [region for region in self._views if region.freed]:
            self._drop(region)
        self._refused = {region for region in self._refused if not region.freed}

    def _drop(self, region: Region) -> None:
        view = self._views.pop(region)
        self.nbytes -= view.nbytes
        self._accelerator.unregister(view)
