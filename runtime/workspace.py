"""Working space of a policy for the requests that it has admitted: it grows when one arrives, never during a step.

Who calls this: a policy reserves bytes per use when it admits a request, and asks for places in every layer. A use has
as many slots as layers may be under way at once; slot `layer % slots` belongs to a layer until all that read it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierloop.devices.regions import Region, Segment
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine

GRID = 64
"""Bytes between the starts of two places: a cache line."""


@dataclass
class _Use:
    memory: str
    wanted: int = 0
    each: int = 0
    region: Region | None = None


@dataclass
class Workspace:
    """`slots` places for every use, each as large as the admitted requests want together."""

    engine: Engine
    slots: int
    _uses: dict[str, _Use] = field(default_factory=dict)

    def reserve(self, wants: dict[str, tuple[str, int]]) -> None:
        """Add to each use (memory, bytes). Raises TierTooSmall; then nothing has changed."""
        grown: list[tuple[_Use, Region, int]] = []
        try:
            for name, (memory, nbytes) in wants.items():
                use = self._uses.setdefault(name, _Use(memory))
                assert use.memory == memory, f"{name} lies in one memory"
                need = -(-(use.wanted + nbytes) // GRID) * GRID
                if need > use.each:
                    grown.append((use, self._take(name, memory, need), need))
        except TierTooSmall:
            for _, region, _ in grown:
                self.engine.drop(region)
            raise
        for use, region, need in grown:
            if use.region is not None:
                self.engine.drop(use.region)
            use.region, use.each = region, need
        for name, (_, nbytes) in wants.items():
            self._uses[name].wanted += nbytes

    def give_back(self, wants: dict[str, tuple[str, int]]) -> None:
        """What a request had reserved; the space itself stays for the next one, until nobody is left."""
        for name, (_, nbytes) in wants.items():
            use = self._uses[name]
            use.wanted -= nbytes
            if not use.wanted and use.region is not None:
                self.engine.drop(use.region)
                use.region, use.each = None, 0

    def close(self) -> None:
        """Give all space back, whoever has reserved it."""
        for use in self._uses.values():
            if use.region is not None:
                self.engine.drop(use.region)
        self._uses.clear()

    def at(self, name: str, layer: int, nbytes: int, offset: int = 0) -> Segment:
        """The first bytes of a layer's place, from `offset` on."""
        region, start = self.place(name, layer)
        assert offset + nbytes <= self._uses[name].each, f"{name}: {offset + nbytes} bytes were not reserved"
        return region.at(start + offset, nbytes)

    def place(self, name: str, layer: int) -> tuple[Region, int]:
        """A layer's place: its region and where it starts there."""
        use = self._uses[name]
        assert use.region is not None, f"{name} was reserved"
        return use.region, layer % self.slots * use.each

    def _take(self, name: str, memory: str, nbytes: int) -> Region:
        return self.engine.claim(memory, nbytes * self.slots, name)
