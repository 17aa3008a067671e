"""A namespace: real bytes in blocks, the medium beneath them, and a write cache that can be lost.

The store holds what a reader sees. What was written into the volatile cache and is not yet durable is remembered by the
bytes that lie beneath it, in a second store: `flush` forgets those, `lose_power` puts them back. Blocks that were never
written or were deallocated read as zeros. A block may be spoilt: its read ends with an error until it is written again,
as after Write Uncorrectable or by `spoil`, or its writes fail (`wear_out`) until it is `heal`ed.

The medium's time comes from a `Firmware` (media.py); ranges that are no whole units of it are rounded outwards.
"""

from __future__ import annotations

import hashlib
import mmap

import numpy as np
from numpy.typing import NDArray

from tierloop.firmware_models.media import NOTHING, Firmware, MediaWork, Ranges, Timed, Wearing


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
        self._store, self._allocated = _blocks(capacity, lba_nbytes), _flags(self.blocks)
        self._cached = _flags(self.blocks)
        """Which blocks the cache holds; all lie in `_dirty`, so that a large namespace is not searched for a few."""
        self._dirty = range(0)
        self._beneath, self._held_beneath = _blocks(capacity, lba_nbytes), _flags(self.blocks)
        self._spoilt_beneath: set[int] = set()
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
        return int(np.count_nonzero(self._cached[self._dirty.start : self._dirty.stop]))

    def load(self, lba: int, count: int) -> bytes:
        """The bytes of some blocks."""
        return self._store[lba : lba + count].tobytes()

    def put(self, lba: int, data: bytes, durable: bool) -> None:
        """Write whole blocks; if they are not durable, they are in the cache."""
        count = len(data) // self.lba_nbytes
        self._settle(lba, count, durable)
        self._store[lba : lba + count] = np.frombuffer(data, dtype=np.uint8).reshape(count, self.lba_nbytes)
        self._allocated[lba : lba + count] = True
        self._mend(lba, count)

    def deallocate(self, lba: int, count: int, durable: bool) -> None:
        """Give blocks back; they read as zeros."""
        self._clear(lba, count, durable)
        self._allocated[lba : lba + count] = False

    def zero(self, lba: int, count: int, durable: bool) -> None:
        """Write zeros; the blocks stay allocated."""
        self._clear(lba, count, durable)
        self._allocated[lba : lba + count] = True

    def commit(self, lba: int, count: int) -> None:
        """Make what the cache holds of some blocks durable."""
        self._settle(lba, count, durable=True)

    def hole(self, lba: int, count: int) -> int | None:
        """The first block of a range that was never written or is deallocated."""
        holes = np.flatnonzero(~self._allocated[lba : lba + count])
        return lba + int(holes[0]) if len(holes) else None

    def spoil(self, lba: int, count: int) -> None:
        """Reading these blocks fails until they are written, whatever becomes of the cache."""
        self._settle(lba, count, durable=True)
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
        self._cached[self._dirty.start : self._dirty.stop] = False
        self._spoilt_beneath.clear()
        self._dirty = range(0)

    def lose_power(self) -> None:
        """The cache is lost: blocks hold again what lay beneath it."""
        lost = np.flatnonzero(self._cached[self._dirty.start : self._dirty.stop]) + self._dirty.start
        held = self._held_beneath[lost]
        self._store[lost[held]] = self._beneath[lost[held]]
        self._store[lost[~held & self._allocated[lost]]] = 0
        self._allocated[lost] = held
        if self._unreadable:
            self._unreadable.difference_update(lost.tolist())
        self._unreadable |= self._spoilt_beneath
        self.flush()

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

    def _clear(self, lba: int, count: int, durable: bool) -> None:
        self._settle(lba, count, durable)
        self._store[np.flatnonzero(self._allocated[lba : lba + count]) + lba] = 0
        self._mend(lba, count)

    def _settle(self, lba: int, count: int, durable: bool) -> None:
        """Make durable what the cache holds of some blocks, or remember what lies beneath them before they change.

        Blocks that hold no data have nothing beneath that is worth a copy.
        """
        if durable:
            self._cached[lba : lba + count] = False
            self._spoilt_beneath.difference_update(range(lba, lba + count) if self._spoilt_beneath else ())
            return
        new = ~self._cached[lba : lba + count]
        held = new & self._allocated[lba : lba + count]
        self._held_beneath[lba : lba + count][new] = held[new]
        copied = np.flatnonzero(held) + lba
        self._beneath[copied] = self._store[copied]
        self._cached[lba : lba + count] = True
        if self._unreadable:
            self._spoilt_beneath |= self._unreadable.intersection((np.flatnonzero(new) + lba).tolist())
        first, end = self._dirty.start, self._dirty.stop
        self._dirty = range(min(first, lba), max(end, lba + count)) if self._dirty else range(lba, lba + count)

    def _mend(self, lba: int, count: int) -> None:
        if self._unreadable:
            self._unreadable.difference_update(range(lba, lba + count))


def _blocks(nbytes: int, lba_nbytes: int) -> NDArray[np.uint8]:
    """Zeros of shape (blocks, lba_nbytes) that take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8).reshape(-1, lba_nbytes)


def _flags(blocks: int) -> NDArray[np.bool_]:
    return _blocks(blocks, 1).view(np.bool_).reshape(-1)
