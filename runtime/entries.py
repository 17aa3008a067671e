"""Entries: a cache cut into short runs of tokens, each a piece of its own that may lie in several tiers at once.

An entry is `tokens` consecutive positions of one layer and KV head: its K rows, then its V rows. Entry e holds the
positions from e · tokens on. A slot is a place for one entry in a region; where an entry lies, slot by slot, is known
by `Windows` (windows.py) for memories and by `Archive` (archive.py) for a persistent tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region
from tierloop.runtime.blocks import K, KVShape, TierTooSmall, V
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class EntryShape:
    """Entries of a cache of this shape, `tokens` positions each."""

    shape: KVShape
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of an entry."""
        return self.tokens * (self.shape.row_nbytes(K) + self.shape.row_nbytes(V))

    def offset(self, side: int) -> int:
        """Where the K (0) or V (1) rows begin within an entry."""
        return 0 if side == K else self.tokens * self.shape.row_nbytes(K)

    def count(self, num_tokens: int) -> int:
        """Entries of a layer and head for that many tokens, the last one perhaps not full."""
        return -(-num_tokens // self.tokens)


class Slots:
    """Equal places for entries in one region of a memory, numbered from 0. Raises TierTooSmall."""

    def __init__(self, engine: Engine, memory: str, count: int, nbytes: int, what: str) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.count = count
        self._engine = engine
        self.region: Region = engine.claim(memory, max(count, 1) * nbytes, f"{count:,} entries of {what}")
        self._free = np.arange(count - 1, -1, -1, dtype=np.int64)
        self.free = count
        """How many are not taken."""

    def take(self, count: int) -> Int64:
        """Numbers of `count` slots. Raises TierTooSmall and takes nothing if there are fewer."""
        if count > self.free:
            raise TierTooSmall(f"{self.memory} is full: {count} entries are to come, {self.free} of {self.count} fit")
        self.free -= count
        self._engine.count_placed(self.memory, count)
        return self._free[self.free : self.free + count].copy()

    def give(self, slots: Int64) -> None:
        """Return slots."""
        assert self.free + len(slots) <= self.count, "a slot was returned twice"
        self._free[self.free : self.free + len(slots)] = slots
        self.free += len(slots)

    def close(self) -> None:
        """Give the region back."""
        self._engine.drop(self.region)
