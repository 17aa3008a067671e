"""Checksums of a region's blocks, and how the spans of a command lie in blocks.

A block is `block_nbytes` long, the last one of a region as long as what is left. Its checksum is a CRC-32 (any damage
within 32 bits in a row is found for certain, other damage but for one in four thousand million). Each block is known,
or unknown: then whatever is read next is taken for what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region
from tierloop.devices.spans import Spans

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Pieces(NamedTuple):
    """Spans cut at the borders of blocks, int64 (n,) each: block, offset in it, bytes, and where in the operand."""

    block: Numbers
    offset: Numbers
    nbytes: Numbers
    at: Numbers


class Damage(NamedTuple):
    """A block that is not what it should be: its number, the checksum that was expected and that which was got."""

    block: int
    expected: int
    got: int


class Blocks:
    """The blocks of one region. `flux` counts, per block, commands of other devices under way that write to it."""

    def __init__(self, region: Region, block_nbytes: int, grid: int, zeroed: bool) -> None:
        self.region = region
        self.block_nbytes = block_nbytes
        self.nbytes = region.nbytes // grid * grid  # what is beyond the last grid point cannot be read or written
        self.count = -(-self.nbytes // block_nbytes)
        self.known = np.full(self.count, zeroed)
        self.flux = np.zeros(self.count, dtype=np.int64)
        self._sums = np.full(self.count, crc32(bytes(block_nbytes)), dtype=np.uint32)
        if self.count:
            self._sums[-1] = crc32(bytes(self.size(self.count - 1)))

    def size(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_nbytes, self.nbytes - block * self.block_nbytes)

    def pieces(self, spans: Spans, at: int = 0) -> Pieces:
        """The spans in pieces; `at` is where the first of them begins in the operand."""
        offset, nbytes = spans.array[:, 0], spans.array[:, 1]
        start = at + np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.int64)[: len(nbytes)]
        some = nbytes > 0
        offset, nbytes, start = offset[some], nbytes[some], start[some]
        first, last = offset // self.block_nbytes, (offset + nbytes - 1) // self.block_nbytes
        count = last - first + 1
        row = np.repeat(np.arange(len(count)), count)
        block = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        low = np.maximum(block * self.block_nbytes, offset[row])
        high = np.minimum((block + 1) * self.block_nbytes, (offset + nbytes)[row])
        return Pieces(block, low - block * self.block_nbytes, high - low, start[row] + low - offset[row])

    def whole(self, pieces: Pieces) -> NDArray[np.bool_]:
        """Which pieces are whole blocks: bool (n,)."""
        size = np.minimum(self.block_nbytes, self.nbytes - pieces.block * self.block_nbytes)
        covered: NDArray[np.bool_] = pieces.nbytes == size
        return covered

    def partial(self, pieces: Pieces) -> Numbers:
        """Blocks that pieces touch and that no piece is the whole of, ascending."""
        return np.setdiff1d(pieces.block, pieces.block[self.whole(pieces)])

    def spans(self, blocks: Numbers) -> Spans:
        """Where ascending blocks lie, neighbours in one span: block after block, in their order."""
        if not len(blocks):
            return Spans([])
        cut = np.flatnonzero(np.diff(blocks) != 1) + 1
        first, last = blocks[np.concatenate([[0], cut])], blocks[np.concatenate([cut - 1, [len(blocks) - 1]])]
        low, high = first * self.block_nbytes, np.minimum((last + 1) * self.block_nbytes, self.nbytes)
        return Spans(np.stack([low, high - low], axis=1))

    def verify(self, block: int, data: Bytes) -> Damage | None:
        """Compare a block's bytes with what is known of it, or take them for it; in flux anything may be right."""
        if self.flux[block]:
            return None
        got = crc32(data.data)
        if not self.known[block]:
            self._sums[block], self.known[block] = got, True
        elif self._sums[block] != got:
            return Damage(block, int(self._sums[block]), got)
        return None

    def record(self, block: int, data: Bytes) -> None:
        """The block now holds these bytes."""
        self.known[block] = not self.flux[block]
        self._sums[block] = crc32(data.data)

    def forget(self, blocks: Numbers) -> None:
        """Nothing is known of these blocks any more."""
        self.known[blocks] = False


def overlay(pieces: Pieces, blocks: dict[int, Bytes], data: Bytes) -> None:
    """Put the pieces' bytes of an operand into the blocks that are there."""
    _walk(pieces, blocks, lambda inside, at: inside.__setitem__(slice(None), data[at : at + len(inside)]))


def collect(pieces: Pieces, blocks: dict[int, Bytes], into: Bytes) -> None:
    """Put the blocks' bytes of the pieces into an operand; every block has to be there."""
    _walk(pieces, blocks, lambda inside, at: into.__setitem__(slice(at, at + len(inside)), inside))


def differs(pieces: Pieces, blocks: dict[int, Bytes], data: Bytes) -> int | None:
    """The first block of which an operand has other bytes than the blocks that are there."""
    for block, offset, nbytes, at in zip(*(column.tolist() for column in pieces), strict=True):
        if block in blocks and not np.array_equal(blocks[block][offset : offset + nbytes], data[at : at + nbytes]):
            found: int = block
            return found
    return None


def overlapping(spans: Spans) -> bool:
    """Whether a byte lies in two of the spans."""
    array = spans.array[spans.array[:, 1] > 0]
    array = array[np.argsort(array[:, 0], kind="stable")]
    return bool((array[1:, 0] < (array[:, 0] + array[:, 1])[:-1]).any())


def _walk(pieces: Pieces, blocks: dict[int, Bytes], call: Callable[[Bytes, int], None]) -> None:
    for block, offset, nbytes, at in zip(*(column.tolist() for column in pieces), strict=True):
        if block in blocks:
            call(blocks[block][offset : offset + nbytes], at)
