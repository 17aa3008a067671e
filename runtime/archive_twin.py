"""A record that changes whole or not at all: the same sealed page in two places, written one after the other.

A change goes to the place that does not hold the newest whole page, is made durable, and then goes to the other one.
So at any moment one place is whole, and while nothing changes both are: one that is torn or damaged is made up for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from tierloop.devices.commands import Flush
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
from tierloop.devices.regions import Region
from tierloop.runtime.archive_pages import Bytes, seal, unseal
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine


class Change(NamedTuple):
    """A change that has been submitted: it counts when `counts` has ended, and is in both places when all have."""

    counts: Completion
    commands: tuple[Completion, ...]

    @property
    def done(self) -> bool:
        """Whether all commands have ended, well or not."""
        return all(command.done for command in self.commands)


async def settle(commands: Iterable[Completion]) -> None:
    """Wait for all to end and look at each; raises the first error."""
    failed: DeviceError | None = None
    for command in commands:
        try:
            await command
        except DeviceError as error:
            failed = failed or error
    if failed is not None:
        raise failed


class Twin:
    """Two places of `place_nbytes` each at the beginning of a region."""

    def __init__(self, engine: Engine, region: Region, place_nbytes: int, grid: int, magic: bytes) -> None:
        self._engine = engine
        self._region = region
        self._place_nbytes = place_nbytes
        self._grid = grid
        self._magic = magic
        self._sequence = 0
        self._whole = 1
        """The place that holds the newest page."""
        self.pending: list[Completion] = []
        """What was submitted for the last change, even if the rest could not be."""

    @property
    def nbytes(self) -> int:
        """Bytes of both places."""
        return 2 * self._place_nbytes

    def read(self, raw: Bytes) -> Any:
        """The content of the newest whole page of both places' bytes, None if there is none."""
        halves = raw[: self._place_nbytes], raw[self._place_nbytes : self.nbytes]
        pages = [unseal(self._magic, half) for half in halves]
        found = [(page[0], place) for place, page in enumerate(pages) if page is not None]
        if not found:
            return None
        self._sequence, self._whole = max(found)
        newest = pages[self._whole]
        assert newest is not None
        return newest[1]

    def write(self, content: Any) -> Change:
        """Submit a change; everything that it rests on is durable. Raises TierTooSmall if it does not fit a place."""
        page = seal(self._magic, self._sequence + 1, content, self._grid)
        if len(page) > self._place_nbytes:
            raise TierTooSmall(
                f"{self._region.memory}: a record of {len(page)} bytes does not fit its {self._place_nbytes}"
            )
        self._sequence += 1
        first, second = 1 - self._whole, self._whole
        self.pending = []
        counts = self._put(page, first, ())
        counts.on_done(partial(self._counts, first))
        self._put(page, second, (counts,))
        return Change(counts, tuple(self.pending))

    def _put(self, page: Bytes, place: int, after: tuple[Completion, ...]) -> Completion:
        target = self._region.at(place * self._place_nbytes, len(page))
        self.pending.append(self._engine.write(target, page, after))
        port = self._engine.port("flush", self._region.memory)
        self.pending.append(port.submit(Flush(target), self.pending[-1:]))
        return self.pending[-1]

    def _counts(self, place: int, flushed: Completion) -> None:
        if flushed.error is None:
            self._whole = place
