"""How much of what is read lies in the page cache already: Linux's `cachestat`, from 6.5 on.

Asked just before a read that goes through the cache. What it answers holds for that moment: somebody else's reads may
bring pages in before ours arrives, and memory that runs short may take them away. What read-ahead fetches beyond what
was asked for is not in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from tierloop.devices.drivers.pieces import Pieces
from tierloop.devices.system import System

SYS_CACHESTAT = 451
"""The same on all architectures that Python runs on except alpha."""
PAGE = mmap.PAGESIZE
_PAGES_PER_PIECE = 64
"""Pages that the kernel looks through in less time than it takes to ask it about one more piece (2 µs)."""


class PageCache:
    """What the cache holds of one descriptor, as long as the kernel says so; belongs to one thread."""

    def __init__(self, system: System, fd: int) -> None:
        self._system, self._fd = system, fd
        self._range = (ctypes.c_uint64 * 2)()
        self._found = (ctypes.c_uint64 * 5)()
        self._addresses = ctypes.addressof(self._range), ctypes.addressof(self._found)

    def of(self, pieces: Pieces) -> int:
        """How many bytes of these lie in the cache. Raises OSError where the kernel does not say.

        Where they lie close together it is asked about all at once: if everything is there, or nothing, that is all.
        """
        if len(pieces) > 1:
            first, last = int(pieces[:, 0].min()) // PAGE, -(-int((pieces[:, 0] + pieces[:, 2]).max()) // PAGE)
            if last - first <= _PAGES_PER_PIECE * len(pieces):
                pages = self._pages(first, last)
                if pages in (0, last - first):
                    return int(pieces[:, 2].sum()) if pages else 0
        return sum(self._piece(offset, nbytes) for offset, _, nbytes in pieces.tolist())

    def _piece(self, offset: int, nbytes: int) -> int:
        end = offset + nbytes
        first, last = offset // PAGE, -(-end // PAGE)
        pages = self._pages(first, last)
        if not 0 < pages < last - first:
            return nbytes if pages else 0
        held = pages * PAGE
        if offset % PAGE and self._pages(first, first + 1):
            held -= offset - first * PAGE
        if end % PAGE and self._pages(last - 1, last):
            held -= last * PAGE - end
        return held

    def _pages(self, first: int, last: int) -> int:
        asked = self._range
        asked[0], asked[1] = first * PAGE, (last - first) * PAGE
        self._system.syscall(SYS_CACHESTAT, self._fd, *self._addresses, 0)
        return min(self._found[0], last - first)


def why_not_known(system: System, fd: int) -> str:
    """Why the kernel does not say what its cache holds of a descriptor; empty if it does."""
    try:
        PageCache(system, fd)._pages(0, 1)
    except OSError as error:
        return f"cachestat: {os.strerror(error.errno or 0)}; Linux has it from 6.5 on"
    return ""
