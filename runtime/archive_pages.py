"""What an archive writes beside rows: sealed pages, and the blocks that they and its notes lie in.

A *sealed page* is a short head (magic, version, sequence number, size), its text, and a checksum over both; what was
torn or changed does not open. Two pages at two fixed places, written in turn, are a record that changes whole or not at
all: the one with the higher number counts. Everything else is written to blocks that nothing committed lies in.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import TierTooSmall

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

_HEAD = struct.Struct("<8sIQQ")
_SUM = struct.Struct("<I")
_VERSION = 1
SMALLEST_BLOCK = 4096
"""Bytes of a block at least: what file systems and drives write in one piece, or tear at its borders only."""


def block_nbytes(grid: int) -> int:
    """Bytes of a block on a memory with that grid."""
    return -(-SMALLEST_BLOCK // grid) * grid


def seal(magic: bytes, sequence: int, content: Any, grid: int) -> Bytes:
    """A page that holds `content` (what JSON can), uint8 (n,), n a multiple of the grid."""
    text = json.dumps(content, separators=(",", ":")).encode()
    head = _HEAD.pack(magic, _VERSION, sequence, len(text))
    whole = head + text
    whole += _SUM.pack(zlib.crc32(whole))
    page = np.zeros(-(-len(whole) // grid) * grid, dtype=np.uint8)
    page[: len(whole)] = np.frombuffer(whole, dtype=np.uint8)
    return page


def unseal(magic: bytes, page: Bytes) -> tuple[int, Any] | None:
    """(sequence, content) of a page, or None if it is none, was torn or has changed."""
    raw = page.tobytes()
    if len(raw) < _HEAD.size:
        return None
    given, version, sequence, nbytes = _HEAD.unpack_from(raw)
    end = _HEAD.size + nbytes
    if given != magic or version != _VERSION or end + _SUM.size > len(raw):
        return None
    if _SUM.unpack_from(raw, end) != (zlib.crc32(raw[:end]),):
        return None
    try:
        return sequence, json.loads(raw[_HEAD.size : end])
    except (ValueError, RecursionError):
        return None


class Stored(NamedTuple):
    """Bytes in blocks: `blocks` int64 (n,), and the checksum of the first `nbytes` of what lies in them end to end."""

    nbytes: int
    checksum: int
    blocks: Int64


def runs_of(blocks: Int64) -> list[list[int]]:
    """Blocks as [first, count] of neighbours, in order."""
    if not len(blocks):
        return []
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    return [[int(part[0]), len(part)] for part in np.split(blocks, cuts)]


class BlockMap:
    """Which blocks of a region are taken; those below `first` belong to somebody else."""

    def __init__(self, region: Region, first: int, end: int, nbytes: int) -> None:
        self.region = region
        self.nbytes = nbytes
        """Bytes of a block."""
        self.first = first
        self._taken = np.zeros(end, dtype=bool)
        self._taken[:first] = True

    @property
    def end(self) -> int:
        """The block after the last one."""
        return len(self._taken)

    def take(self, nbytes: int) -> Int64:
        """Blocks for that many bytes, neighbours where there are enough. Raises TierTooSmall and takes nothing."""
        count = -(-nbytes // self.nbytes)
        free = np.flatnonzero(~self._taken)
        if count > len(free):
            raise TierTooSmall(
                f"{self.region.memory}: an archive's notes are full: {nbytes:,} bytes are to come, "
                f"{len(free) * self.nbytes:,} are free"
            )
        ends = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1) if count else free[:0]
        at = int(ends[0]) if len(ends) else 0
        blocks = free[at : at + count].astype(np.int64)
        self._taken[blocks] = True
        return blocks

    def claim(self, blocks: Int64) -> bool:
        """Take given blocks; False, and nothing is taken, if one of them is taken, named twice or outside."""
        if len(blocks) and (int(blocks.min()) < self.first or int(blocks.max()) >= self.end):
            return False
        if self._taken[blocks].any() or len(np.unique(blocks)) != len(blocks):
            return False
        self._taken[blocks] = True
        return True

    def give(self, blocks: Int64) -> None:
        """Return blocks."""
        assert self._taken[blocks].all(), "a block was returned twice"
        self._taken[blocks] = False

    def segment(self, blocks: Int64) -> Segment:
        """The blocks end to end."""
        runs = np.array(runs_of(blocks), dtype=np.int64).reshape(-1, 2)
        return Segment(self.region, Spans(runs * self.nbytes))
