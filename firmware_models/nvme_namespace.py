"""A namespace: real bytes in blocks, the medium beneath them, and a write cache that can be lost.

The store holds what a reader sees. What was written into the volatile cache and is not yet durable is remembered by the
bytes that lie beneath it: `flush` forgets those, `lose_power` puts them back. Blocks that were never written or were
deallocated read as zeros. A block may be spoilt: its read ends with an error until it is written again, as after Write
Uncorrectable or by `spoil`, or its writes fail (`wear_out`) until it is `heal`ed.

The medium's time comes from a `Firmware` (media.py); ranges that are no whole units of it are rounded outwards.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.firmware_models.media import NOTHING, Firmware, MediaWork, Ranges, Timed, Wearing


class _Beneath(NamedTuple):
    """What a block holds beneath the write cache."""

    data: bytes
    allocated: bool
    spoilt: bool


class Namespace:
    """`capacity` bytes in blocks of 512 or 4096 bytes.

    `unit_nbytes` is the grid of the medium's ranges: what the medium says (`unit_nbytes`), else a block.
    """

    def __init__(self, capacity: int, media: Firmware, lba_nbytes: int = 512, unit_nbytes: int | None = None) -> None:
        grain = getattr(media, "unit_nbytes", 1)
        unit = max(lba_nbytes, grain) if unit_nbytes is None else unit_nbytes
        if lba_nbytes not in (512, 4096):
            raise ValueError(f"blocks of {lba_nbytes} bytes; a namespace here has 512 or 4096")
        if capacity < lba_nbytes or capacity % lba_nbytes:
            raise ValueError(f"a capacity of {capacity} bytes is no whole number of {lba_nbytes}-byte blocks")
        if unit < 1 or capacity % unit:
            raise ValueError(f"a capacity of {capacity} bytes is no whole number of units of {unit!r} bytes")
        if unit % grain:
            raise ValueError(f"units of {unit} bytes; those of the medium have {grain}, and none can be parted")
        self.capacity, self.lba_nbytes, self.unit_nbytes = capacity, lba_nbytes, unit
        self.blocks = capacity // lba_nbytes
        self.media = media
        self._timed = media if isinstance(media, Timed) and media.timed else None
        self._wearing = media if isinstance(media, Wearing) else None
        self._store = memoryview(_zeroed(capacity))
        self._allocated: NDArray[np.bool_] = np.frombuffer(_zeroed(self.blocks), dtype=np.bool_)[: self.blocks]
        self._beneath: dict[int, _Beneath] = {}
        self._unreadable: set[int] = set()
        self._unwritable: set[int] = set()

    def identity(self, serial: str, nsid: int) -> bytes:
        """16 bytes that no other namespace of any controller has (its NGUID; the last eight are its EUI64)."""
        return hashlib.sha256(f"{serial}/{nsid}".encode()).digest()[:16]

    # what commands do

    @property
    def used_blocks(self) -> int:
        """Blocks that hold data."""
        return int(np.count_nonzero(self._allocated))

    @property
    def dirty_blocks(self) -> int:
        """Blocks in the cache that a power failure would lose."""
        return len(self._beneath)

    def load(self, lba: int, count: int) -> bytes:
        """The bytes of some blocks."""
        return bytes(self._store[lba * self.lba_nbytes : (lba + count) * self.lba_nbytes])

    def put(self, lba: int, data: bytes, durable: bool) -> None:
        """Write whole blocks; if they are not durable, they are in the cache."""
        count = len(data) // self.lba_nbytes
        self._remember(lba, count, durable)
        self._store[lba * self.lba_nbytes : lba * self.lba_nbytes + len(data)] = data
        self._allocated[lba : lba + count] = True
        self._mend(lba, count)

    def deallocate(self, lba: int, count: int, durable: bool) -> None:
        """Give blocks back; they read as zeros."""
        used = (np.flatnonzero(self._allocated[lba : lba + count]) + lba).tolist()
        for block in used:
            self._remember(block, 1, durable)
            self._store[block * self.lba_nbytes : (block + 1) * self.lba_nbytes] = bytes(self.lba_nbytes)
        self._mend(lba, count)
        self._allocated[lba : lba + count] = False

    def zero(self, lba: int, count: int, durable: bool) -> None:
        """Write zeros; the blocks stay allocated."""
        self.deallocate(lba, count, durable)
        self._allocated[lba : lba + count] = True

    def commit(self, lba: int, count: int) -> None:
        """Make what the cache holds of some blocks durable."""
        self._remember(lba, count, durable=True)

    def hole(self, lba: int, count: int) -> int | None:
        """The first block of a range that was never written or is deallocated."""
        holes = np.flatnonzero(~self._allocated[lba : lba + count])
        return lba + int(holes[0]) if len(holes) else None

    def spoil(self, lba: int, count: int) -> None:
        """Reading these blocks fails until they are written, whatever becomes of the cache."""
        self._remember(lba, count, durable=True)
        self._unreadable.update(range(lba, lba + count))

    def wear_out(self, lba: int, count: int) -> None:
        """Writing these blocks fails until they are healed."""
        self._unwritable.update(range(lba, lba + count))

    def heal(self) -> None:
        """All blocks can be read and written again."""
        self._unreadable.clear()
        self._unwritable.clear()

    def bad_block(self, lba: int, count: int, write: bool) -> int | None:
        """The first block of a range that cannot be read (or written)."""
        bad = self._unwritable if write else self._unreadable
        if not bad:
            return None
        return min((block for block in bad if lba <= block < lba + count), default=None)

    def flush(self) -> None:
        """Make the cache durable."""
        self._beneath.clear()

    def lose_power(self) -> None:
        """The cache is lost: blocks hold again what lay beneath it."""
        for block, beneath in self._beneath.items():
            self._store[block * self.lba_nbytes : (block + 1) * self.lba_nbytes] = beneath.data
            self._allocated[block] = beneath.allocated
            (self._unreadable.add if beneath.spoilt else self._unreadable.discard)(block)
        self._beneath.clear()

    # the medium

    @property
    def worn_out(self) -> bool:
        """The medium takes no more writes."""
        return self._wearing is not None and self._wearing.read_only

    def work(self, op: str, lba: int, count: int, at_ns: int) -> MediaWork:
        """What the medium does for a read, write or trim of some blocks that it is given then; its state changes."""
        if not count:
            return MediaWork(0, 1, 0)
        if self._timed is not None:
            self._timed.advance(at_ns)
        if op == "trim":
            self.media.trim(lba * self.lba_nbytes, count * self.lba_nbytes)
            return MediaWork(0, 1, 0)
        ranges = self._ranges(lba, count)
        return self.media.access(NOTHING, ranges) if op == "write" else self.media.access(ranges, NOTHING)

    def _ranges(self, lba: int, count: int) -> Ranges:
        unit = self.unit_nbytes
        first = lba * self.lba_nbytes // unit * unit
        end = -(-(lba + count) * self.lba_nbytes // unit) * unit
        return np.array([[first, end - first]], dtype=np.int64)

    # inside

    def _remember(self, lba: int, count: int, durable: bool) -> None:
        size = self.lba_nbytes
        if durable and not self._beneath:
            return
        for block in range(lba, lba + count):
            if durable:
                self._beneath.pop(block, None)
            elif block not in self._beneath:
                data = bytes(self._store[block * size : (block + 1) * size])
                self._beneath[block] = _Beneath(data, bool(self._allocated[block]), block in self._unreadable)

    def _mend(self, lba: int, count: int) -> None:
        if self._unreadable:
            self._unreadable.difference_update(range(lba, lba + count))


def _zeroed(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, nbytes, flags=flags)
