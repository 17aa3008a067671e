"""The catalogue of a memory: which archives lie on it, and where.

It is the first thing on the medium: a record of all archives that were committed (archive_twin.py). What it
does not list is free, so an archive that was never committed leaves nothing behind. One catalogue serves all engines
of a platform; when it is opened, the places of all archives that it lists are taken, so that nothing is allocated
over them.

On a memory that keeps its bytes (devices/persistent.py) the catalogue lies at offset 0 and outlives the process. On any
other one, and in phantom runs, it does and costs the same as long as the platform is open.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierloop.devices.completion import Completion
from tierloop.devices.errors import Busy, ConfigurationError, DeviceError, OutOfMemory, Unsupported
from tierloop.devices.persistent import Keeper, keeper
from tierloop.devices.regions import Region
from tierloop.devices.tables import Table
from tierloop.devices.waiting import DEADLINE_NS, wait
from tierloop.runtime.archive_pages import block_nbytes
from tierloop.runtime.archive_twin import Change, Twin, settle
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine

MAGIC = b"tl-list\0"
"""Of the sealed pages of a list."""
_PLACE_BLOCKS = 16
"""Blocks of one of the two places: 64 KiB, some hundred archives."""
_FARTHEST = 1 << 60
LONGEST_NAME = 256
"""Characters of a name or a fingerprint."""

Key = tuple[str, str]
"""Name of the request and fingerprint of what its rows belong to."""


@dataclass(frozen=True)
class Listed:
    """An archive that is there: its region, and where that lies on the medium (0 where this means nothing)."""

    region: Region
    offset: int


class Catalogue:
    """All archives of one memory; `of` finds it. Raises TierTooSmall, ConfigurationError."""

    def __init__(self, engine: Engine, memory: str) -> None:
        device = engine.platform.memory_owner(memory)
        info = device.info.memory(memory)
        assert info is not None
        self.memory = memory
        self.listed: dict[Key, Listed] = {}
        self.opened: set[Key] = set()
        """Archives that somebody works with."""
        self.keeper: Keeper | None = None if engine.phantom else keeper(device)
        self._engine = engine
        self._device = device
        self._change: Change | None = None
        self._certain = True
        """Whether the medium lists what `listed` says."""
        self._block = block_nbytes(info.alignment)
        place_nbytes = _PLACE_BLOCKS * self._block
        self._region = self._find(2 * place_nbytes)
        self._twin = Twin(engine, self._region, place_nbytes, info.alignment, MAGIC)
        if self.keeper is not None:
            self._load()

    @classmethod
    def of(cls, engine: Engine, memory: str) -> Catalogue:
        """The catalogue of a memory of the engine's platform, opened if it is not."""
        shared, key = engine.platform.site.shared, cls._key(engine, memory)
        if key not in shared:
            shared[key] = cls(engine, memory)
        found: Catalogue = shared[key]
        found._engine = engine
        return found

    @staticmethod
    def _key(engine: Engine, memory: str) -> str:
        return f"archives on {memory}{' (phantom)' if engine.phantom else ''}"

    @property
    def kept(self) -> bool:
        """Whether the catalogue outlives the process."""
        return self.keeper is not None

    def region(self, key: Key) -> Region | None:
        """Where an archive lies that is listed."""
        listed = self.listed.get(key)
        return None if listed is None else listed.region

    def open(self, key: Key) -> None:
        """Somebody begins to work with an archive. Raises ConfigurationError if another does."""
        if key in self.opened:
            raise ConfigurationError(f"{self.memory}: somebody works with archive {key[0]!r} already")
        self.opened.add(key)

    def alloc(self, nbytes: int, what: str) -> Region:
        """Space for an archive. Raises TierTooSmall that says what was to come and what is in the way."""
        try:
            return self._device.alloc(nbytes, self.memory, self._engine.phantom)
        except OutOfMemory as error:
            why = error.detail.partition(": ")[2] or error.detail
            held = sum(listed.region.nbytes for listed in self.listed.values())
            older = f"; {len(self.listed)} archives that are kept hold {held:,} bytes" if held else ""
            raise TierTooSmall(
                f"{self.memory} is too small: {nbytes:,} bytes are needed there for {what} ({why}{older})"
            ) from error

    async def add(self, key: Key, region: Region) -> None:
        """List an archive instead of an older one of that key, durably, and give the space of that back."""
        older = self.listed.get(key)
        await self._write({key: Listed(region, self._offset(region))})
        if older is not None:
            self._device.free(older.region)

    async def remove(self, key: Key) -> None:
        """Take an archive off the list, durably, and give its space back."""
        older = self.listed[key]
        await self._write({key: None})
        self._device.free(older.region)

    def remove_now(self, key: Key) -> None:
        """`remove` for who cannot await: time passes until it is done."""
        older = self.listed[key]
        clock, change = self._engine.platform.clock, self._change
        if change is not None:
            clock.run_until(lambda: change.done, clock.now() + DEADLINE_NS)
        wait(clock, self._begin({key: None}).commands)
        self._device.free(older.region)

    def leave(self, key: Key) -> None:
        """Somebody has finished with an archive; the last one leaves no catalogue where it keeps nothing."""
        self.opened.discard(key)
        if not self.opened and not self.listed and not self.kept:
            del self._engine.platform.site.shared[self._key(self._engine, self.memory)]
            self._device.free(self._region)

    def give(self, region: Region) -> None:
        """Give the space of an archive that is not listed back.

        It stays taken where a change of the list has failed: the medium may list it all the same.
        """
        if self._certain:
            self._device.free(region)

    def collect(self) -> None:
        """Give the space between archives back that no region lies in; where another one does, nothing is changed."""
        if self.keeper is None:
            return
        info = self._device.info.memory(self.memory)
        assert info is not None
        taken = [(0, self._region.nbytes), *((each.offset, each.region.nbytes) for each in self.listed.values())]
        ends = [-(-(offset + nbytes) // self._block) * self._block for offset, nbytes in sorted(taken)]
        begins = [offset for offset, _ in sorted(taken)[1:]]
        for begin, end in zip(ends, [*begins, info.capacity // self._block * self._block], strict=True):
            if end > begin:
                with suppress(Busy, OutOfMemory):
                    self._device.free(self.keeper.adopt(begin, end - begin))

    # -- on the medium --------------------------------------------------------------------------------------------

    def _find(self, nbytes: int) -> Region:
        if self.keeper is not None:
            try:
                return self.keeper.adopt(0, nbytes)
            except Unsupported:
                self.keeper = None
            except Busy as error:
                raise ConfigurationError(
                    f"{self.memory}: archives are listed at the beginning of the medium, and another region lies "
                    "there: open archives before anything else is put on it"
                ) from error
            except DeviceError as error:
                raise TierTooSmall(f"{self.memory} is too small for the list of archives: {nbytes:,} bytes") from error
        return self.alloc(nbytes, "the list of archives")

    def _load(self) -> None:
        """Read the list and take the space of what it names. A first write that was torn has listed nothing."""
        assert self.keeper is not None
        raw = np.zeros(self._region.nbytes, dtype=np.uint8)
        wait(self._engine.platform.clock, self._engine.read(self._region.all(), raw))
        content = self._twin.read(raw)
        first_write = not raw[self._block :].any()
        if content is None and raw.any() and not first_write:
            places = raw[: len(MAGIC)], raw[self._twin.nbytes // 2 :][: len(MAGIC)]
            if any(place.tobytes() == MAGIC for place in places):
                raise ConfigurationError(f"{self.memory}: the list of archives is damaged: neither copy is whole")
            raise ConfigurationError(
                f"{self.memory}: the medium begins with something that is no list of archives; clear its first "
                f"{len(raw)} bytes if nobody needs them"
            )
        for key, offset, size in self._checked(content) if content is not None else ():
            try:
                self.listed[key] = Listed(self.keeper.adopt(offset, size), offset)
            except DeviceError as error:
                raise ConfigurationError(f"{self.memory}: the list of archives is damaged: {error}") from error

    def _checked(self, content: Any) -> list[tuple[Key, int, int]]:
        """Keys, offsets and sizes of a list that came from outside."""
        place = f"{self.memory}: the list of archives"
        if not isinstance(content, dict):
            raise ConfigurationError(f"{place}: a table was expected")
        table = Table(content, place)
        made: dict[Key, tuple[int, int]] = {}
        for row in table.rows("archives"):
            key = row.text("name"), row.text("fingerprint")
            if key in made:
                raise row.error("", "an archive is listed twice")
            made[key] = row.integer("offset", 0, _FARTHEST), row.integer("nbytes", 1, _FARTHEST)
            row.finish()
        table.finish()
        return [(key, *where) for key, where in made.items()]

    def _offset(self, region: Region) -> int:
        return self.keeper.offset_of(region) if self.keeper is not None else 0

    async def _write(self, change: dict[Key, Listed | None]) -> None:
        while self._change is not None and not self._change.done:
            with suppress(DeviceError):  # whoever began that change is told
                await settle(self._change.commands)
        await settle(self._begin(change).commands)

    def _begin(self, change: dict[Key, Listed | None]) -> Change:
        listed: dict[Key, Listed] = {}
        for key, each in (self.listed | change).items():
            if each is not None:
                listed[key] = each
        rows = [
            {"name": key[0], "fingerprint": key[1], "offset": each.offset, "nbytes": each.region.nbytes}
            for key, each in listed.items()
        ]
        certain, self._certain = self._certain, False
        try:
            self._change = self._twin.write({"archives": rows})
        except TierTooSmall:  # nothing was submitted
            self._certain = certain
            raise
        self._change.counts.on_done(partial(self._changed, listed))
        return self._change

    def _changed(self, listed: dict[Key, Listed], flushed: Completion) -> None:
        if flushed.error is None:
            self.listed, self._certain = listed, True
