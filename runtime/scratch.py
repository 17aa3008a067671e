"""Working space that grows with what is asked of it: a region for each use, memory and slot.

Who calls this: attention that needs room for queries, scores and states of a layer. A slot is free again when all that
read and wrote it has ended, which whoever asks knows: the last region of a slot is given back where a larger one is
needed.
"""

from __future__ import annotations

from collections.abc import Hashable

from tierloop.devices.regions import Region, Segment
from tierloop.runtime.engine import Engine

LEAST_NBYTES = 64


class Scratch:
    """Regions by (use, memory, slot); they grow by powers of two and go with the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._regions: dict[tuple[str, str, Hashable], Region] = {}

    def at(self, use: str, memory: str, slot: Hashable, nbytes: int) -> Segment:
        """The first `nbytes` of a use's slot."""
        key = (use, memory, slot)
        region = self._regions.get(key)
        if region is None or region.nbytes < nbytes:
            if region is not None:
                self._engine.drop(self._regions.pop(key))
            region = self._engine.scratch(memory, 1 << max(nbytes - 1, LEAST_NBYTES - 1).bit_length())
            self._regions[key] = region
        return region.at(0, nbytes)
