"""The cells of a CXL card: its bytes, which of them are poisoned, and what was done to the medium.

The bytes lie in an anonymous file, sparse, so that a card may be larger than the host's memory and a model of a kernel
can map them: then stores of a process are in the card at once, and the card does not see them one by one. Poison is
kept by line.

An interleave set deals granules of 256 bytes to several cards, and pages of 4 KiB cannot be mapped that way: a range
may be *lent* to a file that holds the bytes of all its cards in the host's order. Then the card reads and writes there,
until it is taken back.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tierloop.devices.system import HOST, PUNCH_HOLE
from tierloop.firmware_models.cxl_part import LINE
from tierloop.firmware_models.hdm import Interleave

PAGE = 4096
_REMEMBERED = 1 << 14


class MediaOperation(NamedTuple):
    """What was done to the medium, in device addresses."""

    what: Literal["read", "write", "poison", "clear", "erase", "lost"]
    dpa: int
    nbytes: int


class Lent(NamedTuple):
    """A range whose bytes lie in another file, in the host's order: the card is that way of the interleave set."""

    dpa: int
    nbytes: int
    fd: int
    interleave: Interleave
    way: int


class CxlCells:
    """The medium of one card. Addresses were checked by whoever calls."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.poisoned: dict[int, int] = {}
        """Poisoned lines (device address) and their source, as a poison list has it."""
        self.history: deque[MediaOperation] = deque(maxlen=_REMEMBERED)
        self.watchers: list[Callable[[int, int], None]] = []
        """Called with (address, bytes) when poison there came or went."""
        self.fd = anonymous_file(capacity)
        self._lent: list[Lent] = []
        weakref.finalize(self, os.close, self.fd)

    def read(self, dpa: int, nbytes: int) -> bytes:
        """The bytes, whether or not they are poisoned."""
        return b"".join(os.pread(fd, length, at) for fd, at, length in self._pieces(dpa, nbytes))

    def write(self, dpa: int, data: bytes) -> None:
        """Write; poison stays as it is."""
        done = 0
        for fd, at, length in self._pieces(dpa, len(data)):
            os.pwrite(fd, data[done : done + length], at)
            done += length

    def erase(self, dpa: int, nbytes: int) -> None:
        """Zeros; poison goes."""
        for lent in self._lent:
            first, last = max(dpa, lent.dpa), min(dpa + nbytes, lent.dpa + lent.nbytes)
            for at in range(first, last, PAGE):
                self.write(at, bytes(min(PAGE, last - at)))
        if nbytes:
            HOST.fallocate(self.fd, PUNCH_HOLE, dpa, nbytes)
        gone = [line for line in self.poisoned if dpa <= line < dpa + nbytes]
        for line in gone:
            del self.poisoned[line]
        self.note("erase", dpa, nbytes)
        if gone:
            self._changed(dpa, nbytes)

    def poison(self, dpa: int, source: int) -> None:
        """A line is lost."""
        self.poisoned[dpa] = source
        self.note("poison", dpa, LINE)
        self._changed(dpa, LINE)

    def heal(self, dpa: int, data: bytes) -> None:
        """A line is written whole."""
        self.write(dpa, data)
        if self.poisoned.pop(dpa, None) is not None:
            self.note("clear", dpa, LINE)
            self._changed(dpa, LINE)

    def poison_in(self, dpa: int, nbytes: int) -> list[int]:
        """Poisoned lines in a range, ascending."""
        return sorted(line for line in self.poisoned if dpa <= line < dpa + nbytes)

    def lend(self, lent: Lent) -> None:
        """Move the bytes of a range to where they lie in the host's order."""
        held = [(at, self.read(at, min(PAGE, lent.dpa + lent.nbytes - at))) for at in _pages(self.fd, *lent[:2])]
        HOST.fallocate(self.fd, PUNCH_HOLE, lent.dpa, lent.nbytes)
        self._lent.append(lent)
        for at, data in held:
            self.write(at, data)

    def take_back(self, dpa: int) -> None:
        """Bytes that were lent lie here again."""
        lent = next(other for other in self._lent if other.dpa == dpa)
        granule, stripe = lent.interleave.granule_nbytes, lent.interleave.stripe_nbytes
        rows = sorted(
            {
                row
                for at in _pages(lent.fd, 0, lent.nbytes * lent.interleave.ways)
                for row in range(at // stripe, -(-(at + PAGE) // stripe))
            }
        )
        held = [(lent.dpa + row * granule, self.read(lent.dpa + row * granule, granule)) for row in rows]
        self._lent.remove(lent)
        for at, data in held:
            self.write(at, data)

    def note(self, what: Literal["read", "write", "poison", "clear", "erase", "lost"], dpa: int, nbytes: int) -> None:
        """Put it into the history."""
        self.history.append(MediaOperation(what, dpa, nbytes))

    def _changed(self, dpa: int, nbytes: int) -> None:
        for watcher in list(self.watchers):
            watcher(dpa, nbytes)

    def _pieces(self, dpa: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(file, offset, bytes) that make up a range."""
        end = dpa + nbytes
        while dpa < end:
            lent = next((lent for lent in self._lent if lent.dpa <= dpa < lent.dpa + lent.nbytes), None)
            if lent is None:
                upto = min([end, *(lent.dpa for lent in self._lent if lent.dpa > dpa)])
                yield self.fd, dpa, upto - dpa
            else:
                offset = dpa - lent.dpa
                granule = lent.interleave.granule_nbytes
                upto = min(end, dpa - offset % granule + granule)
                yield lent.fd, lent.interleave.encode(lent.way, offset), upto - dpa
            dpa = upto


def anonymous_file(nbytes: int) -> int:
    """A sparse file without a name, of zeros; the descriptor is the caller's."""
    fd = os.memfd_create("cxl", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _pages(fd: int, first: int, nbytes: int) -> Iterator[int]:
    """Pages of a sparse file that hold something."""
    at, end = first, first + nbytes
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole from here on
            return
        upto = min(os.lseek(fd, at, os.SEEK_HOLE), end)
        yield from range(at, upto, PAGE)
        at = max(upto, at + 1)
