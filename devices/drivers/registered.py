"""Registered buffers: host memory that one io_uring knows by an index, so that its pages stay pinned.

Regions of host-mapped memories are registered when a command first names them, the bounce buffer when it is first
used. What must hold:

- A registration belongs to one region and ends with it: the array is held as long as its pages are pinned, a freed
  region is dropped before the next transfer, and its number is never used for another region.
- The bytes that are pinned are bounded; what was used longest ago goes first. What does not fit is not registered.
- A refusal is no error. It is counted, and said with errno, address, size, device, the limit and what would raise it.

The kernel's oldest form is used: the whole table at once, while nothing is in flight. Changing it pins every buffer
anew, so it pays where few regions are used over and over.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.engines import Target
from tierloop.devices.drivers.ring import locked_limit
from tierloop.devices.regions import Region

_MOST_BUFFERS = 64
_LARGEST_BUFFER = 1 << 30
"""What the kernel takes as one buffer."""
_MOST_REFUSALS = 4
NO_BUFFER = -1


class Registrar(Protocol):
    """Whoever keeps the table: a ring."""

    def register(self, buffers: list[tuple[int, int]]) -> None:
        """Put these in the place of what was registered. Raises OSError; then nothing is registered."""


class _Entry(NamedTuple):
    address: int
    nbytes: int
    region: Region | None
    view: NDArray[np.uint8] | None


class Registrations:
    """The table of one ring; used by the ring's thread, while nothing is in flight."""

    def __init__(
        self, target: Target, ring: Registrar, most_nbytes: int, registered: Callable[[Region], None] | None = None
    ) -> None:
        self.refusals: list[str] = []
        self.refused = 0
        self._target = target
        self._ring = ring
        self._most_nbytes = most_nbytes
        self._registered = registered
        self._table: list[_Entry] = []
        self._used: dict[tuple[str, int], int] = {}
        self._turn = 0
        self._never: set[tuple[str, int]] = set()
        self._bounce_refused = False

    def of(self, region: Region) -> int:
        """The index of a region's memory, registered now if it can be; negative if it is not."""
        key = _key(region)
        self._turn += 1
        self._forget_freed()
        index = self._index(region)
        if index < 0 and key not in self._never and region.view is not None and not region.freed:
            entry = _Entry(_address(region.view), region.nbytes, region, region.view)
            if not 0 < entry.nbytes <= min(self._most_nbytes, _LARGEST_BUFFER) or not self._add(entry):
                self._never.add(key)
            index = self._index(region)
        if index >= 0:
            self._used[key] = self._turn
        return index

    def bounce(self, address: int, nbytes: int) -> int:
        """The index of the bounce buffer."""
        self._forget_freed()
        index = self._index(None)
        if index < 0 and not self._bounce_refused:
            self._bounce_refused = not self._add(_Entry(address, nbytes, None, None))
            index = self._index(None)
        return index

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of all that is registered."""
        return sum(entry.nbytes for entry in self._table)

    def _index(self, region: Region | None) -> int:
        return next((i for i, entry in enumerate(self._table) if entry.region is region), NO_BUFFER)

    def _forget_freed(self) -> None:
        left = [entry for entry in self._table if entry.region is None or not entry.region.freed]
        if len(left) < len(self._table):
            self._put(left)

    def _add(self, entry: _Entry) -> bool:
        kept = list(self._table)
        while kept and (
            sum(each.nbytes for each in kept) + entry.nbytes > self._most_nbytes or len(kept) >= _MOST_BUFFERS
        ):
            oldest = min(kept, key=lambda each: self._used.get(_key(each.region), 0) if each.region else self._turn)
            kept.remove(oldest)
        if self._put([*kept, entry], entry):
            return True
        self._put(kept)
        return False

    def _put(self, table: list[_Entry], asked: _Entry | None = None) -> bool:
        """Register a table in place of the one before; False, and nothing is registered, if the kernel refuses."""
        try:
            self._ring.register([(entry.address, entry.nbytes) for entry in table])
        except OSError as error:
            entry = asked or (table or self._table)[0]
            self._table = []
            self._refuse(error, entry)
            return False
        self._table = table
        for entry in table:  # all are pinned anew, and pages of any may have moved
            if entry.region is not None and self._registered is not None:
                self._registered(entry.region)
        self._used = {key: turn for key, turn in self._used.items() if any(_key(e.region) == key for e in table)}
        return True

    def _refuse(self, error: OSError, entry: _Entry) -> None:
        self.refused += 1
        if len(self.refusals) >= _MOST_REFUSALS:
            return
        number = error.errno or 0
        what = repr(entry.region) if entry.region is not None else "the bounce buffer"
        advice = ""
        if number == errno.ENOMEM:
            limit = locked_limit(self._target.system)
            advice = (
                f"; RLIMIT_MEMLOCK is {limit} bytes, `ulimit -l` or LimitMEMLOCK= raises it, and so does CAP_IPC_LOCK"
            )
        self.refusals.append(
            f"{self._target.device}: {what}, {entry.nbytes} bytes at {entry.address:#x}, could not be registered with "
            f"io_uring ({errno.errorcode.get(number, number)}: {os.strerror(number)}){advice}"
        )


def _key(region: Region | None) -> tuple[str, int]:
    return (region.memory, region.id) if region is not None else ("", -1)


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
