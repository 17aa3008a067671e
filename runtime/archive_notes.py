"""Notes of an archive: bytes of any kind in blocks, written beside what is there and never over what is committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region
from tierloop.runtime.archive_geometry import COMMITS
from tierloop.runtime.archive_pages import BlockMap, Bytes, Stored
from tierloop.runtime.archive_record import LONGEST_KIND, NoteKey, checksum
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]

NOTHING = Stored(0, 0, np.empty(0, dtype=np.int64))
"""What takes no blocks."""


class Notebook:
    """Blocks up to `end` of an archive's region and what is in them; `what` names the archive in errors."""

    def __init__(self, engine: Engine, region: Region, end: int, block: int, what: str) -> None:
        self.notes: dict[NoteKey, Stored] = {}
        self.stale: list[Int64] = []
        """Blocks that nobody needs once the next commit is durable."""
        self.pending: list[Completion] = []
        """What was submitted and may not have ended."""
        self._engine = engine
        self._blocks = BlockMap(region, COMMITS, end, block)
        self._what = what

    def write(self, kind: str, layer: int, data: NDArray[np.uint8]) -> Completion:
        """Put a note in the place of the one of that kind and layer. Raises ValueError, TierTooSmall."""
        if not 0 < len(kind) <= LONGEST_KIND:
            raise ValueError(f"the kind of a note has 1 to {LONGEST_KIND} characters, not {len(kind)}")
        if data.dtype != np.uint8 or data.ndim != 1 or not len(data):
            raise ValueError(f"a note is uint8 (n,), n at least 1, got {data.dtype} {data.shape}")
        stored, written = self.store(data)
        if (kind, layer) in self.notes:
            self.stale.append(self.notes[kind, layer].blocks)
        self.notes[kind, layer] = stored
        return written

    async def read(self, kind: str, layer: int) -> Bytes:
        """The bytes of a note. Raises ConfigurationError if there is none or it is damaged."""
        stored = self.notes.get((kind, layer))
        if stored is None:
            raise ConfigurationError(f"{self._what}: layer {layer} has no note {kind!r}")
        return await self.load(stored, f"note {kind!r} of layer {layer}")

    def store(self, data: NDArray[np.uint8]) -> tuple[Stored, Completion]:
        """Bytes → free blocks. Raises TierTooSmall."""
        stored = Stored(len(data), 0 if self._engine.phantom else checksum(data), self._blocks.take(len(data)))
        padded = np.zeros(len(stored.blocks) * self._blocks.nbytes, dtype=np.uint8)
        padded[: len(data)] = data
        try:
            written = self._engine.write(self._blocks.segment(stored.blocks), padded)
        except Exception:
            self._blocks.give(stored.blocks)
            raise
        return stored, self._begun(written)

    async def settled(self, data: NDArray[Any], made: list[Int64]) -> Stored:
        """`store`, and wait; the blocks are added to `made`."""
        if not data.size:
            return NOTHING
        stored, written = self.store(data.view(np.uint8))
        made.append(stored.blocks)
        await written
        return stored

    async def load(self, stored: Stored, what: str) -> Bytes:
        """The bytes that were stored. Raises ConfigurationError naming `what` if they are others."""
        raw = np.zeros(len(stored.blocks) * self._blocks.nbytes, dtype=np.uint8)
        if len(raw):
            await self._begun(self._engine.read(self._blocks.segment(stored.blocks), raw))
        if not self._engine.phantom and checksum(raw[: stored.nbytes]) != stored.checksum:
            raise ConfigurationError(f"{self._what} is damaged: {what} has another checksum")
        return raw[: stored.nbytes]

    def claim(self, parts: Iterable[Stored]) -> None:
        """Take the blocks of what an earlier process stored. Raises ConfigurationError where two of them overlap."""
        for stored in parts:
            if not self._blocks.claim(stored.blocks):
                raise ConfigurationError(f"{self._what} is damaged: two of its parts lie in one place")

    def give(self, parts: Iterable[Int64]) -> None:
        """Return blocks that nobody needs."""
        for blocks in parts:
            self._blocks.give(blocks)

    def _begun(self, command: Completion) -> Completion:
        self.pending = [other for other in self.pending if not other.done]
        self.pending.append(command)
        return command
