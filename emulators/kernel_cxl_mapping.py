"""Shared mappings of a card's bytes, and pages of them that are lost.

A mapping is a real one of the file in which the card's bytes lie: a store is in the card at once. A page that holds a
poisoned line is replaced, in every living mapping, by one of an empty file. So a load from it raises SIGBUS in the
process, as a machine check does, with two differences: the code says BUS_ADRERR where a machine check says
BUS_MCEERR_AR, and the whole page is lost to stores, too. When the poison goes, the page is mapped again.

Devdax mappings begin on a multiple of their alignment, which an ordinary mapping of a file does not: the room for one
is found by trial.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from tierloop.emulators.kernel import failure
from tierloop.firmware_models.cxl_cells import PAGE, anonymous_file

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: nobody unmaps meanwhile
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _FIXED_IF_FREE = 0x10, 0x100000
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_TRIES = 16


Runs = tuple[tuple[int, int], ...]
"""Pages as [first, end) offsets, ascending, apart from each other."""


class SharedPages:
    """The living mappings of [base, base + nbytes) of a file. Offsets count from `base`."""

    def __init__(self, fd: int, base: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lost: Runs = ()
        """The pages that are lost."""
        self._fd = fd
        self._base = base
        self._empty = anonymous_file(0)
        self._living: list[tuple[weakref.ref[mmap.mmap], int, int, int]] = []
        weakref.finalize(self, os.close, self._empty)

    def map(self, nbytes: int, offset: int, align: int) -> mmap.mmap:
        """A mapping whose address is a multiple of `align`. Raises OSError."""
        made = _aligned(self._fd, nbytes, self._base + offset, align)
        address = address_of(made)
        self._living.append((weakref.ref(made), address, offset, nbytes))
        for run in self.lost:
            self._place(address, offset, nbytes, run, lost=True)
        return made

    def lose(self, runs: Runs) -> None:
        """From now on these pages are lost, and no others; what stays lost is not touched."""
        self._living = [entry for entry in self._living if (held := entry[0]()) is not None and not held.closed]
        gone, back = _without(runs, self.lost), _without(self.lost, runs)
        self.lost = runs
        for alive, address, offset, nbytes in self._living:
            if alive() is None:
                continue
            for run in gone:
                self._place(address, offset, nbytes, run, lost=True)
            for run in back:
                self._place(address, offset, nbytes, run, lost=False)

    def cut(self) -> None:
        """Whoever has it mapped has lost all of it; new mappings are as before."""
        lost = self.lost
        self.lose(((0, self.nbytes),))
        self._living.clear()
        self.lost = lost

    def _place(self, address: int, offset: int, nbytes: int, run: tuple[int, int], lost: bool) -> None:
        first, last = max(run[0], offset), min(run[1], offset + nbytes)
        if first >= last:
            return
        fd = self._empty if lost else self._fd
        shared = mmap.MAP_SHARED | _FIXED
        placed = _libc.mmap(address + first - offset, last - first, _READ_WRITE, shared, fd, self._base + first)
        if placed == _FAILED:
            raise failure(ctypes.get_errno())


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins; nothing keeps it from being closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def runs_of(pages: set[int]) -> Runs:
    """Offsets of pages as runs."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + PAGE)
        else:
            runs.append((page, page + PAGE))
    return tuple(runs)


def _without(runs: Runs, others: Runs) -> Runs:
    """What of the runs is in none of the others."""
    left = list(runs)
    for first, last in others:
        cut = [((a, min(b, first)), (max(a, last), b)) for a, b in left]
        left = [piece for pieces in cut for piece in pieces if piece[0] < piece[1]]
    return tuple(left)


def _aligned(fd: int, nbytes: int, offset: int, align: int) -> mmap.mmap:
    """A mapping at a multiple of `align`: what is in the way above it is filled, and tried again."""
    fillers: list[tuple[int, int]] = []
    try:
        for _ in range(_TRIES):
            made = mmap.mmap(fd, nbytes, offset=offset)
            address = address_of(made)
            if address % align == 0:
                return made
            made.close()
            first = (address // align * align) + nbytes
            size = address + nbytes - first
            placed = _libc.mmap(first, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_IF_FREE, -1, 0)
            if placed not in (_FAILED, None):
                fillers.append((placed, size))
    finally:
        for filler in fillers:
            _libc.munmap(*filler)
    raise failure(errno.ENOMEM)
