"""Where regions lie against where they were wanted: looked at, never trusted.

A driver whose memory has places (NUMA nodes) offers a look at it. Everybody who may have changed where pages lie says
so: the driver itself after it has allocated a region, and whoever registers memory for DMA after *every* registration,
since pinning moves pages out of movable zones, which is where CXL memory stands that was brought online as system RAM.
What is found elsewhere than wanted is kept with the occasion, and stands in the run's report beside what was asked for.

A look may fail (a container that forbids asking); then the report says why, and nothing is claimed about that region.
`Placements.of(site)` is the one of a platform. Calls may come from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from tierloop.devices.clocks import Clock
from tierloop.devices.regions import Region
from tierloop.devices.site import Site

Occasion = Literal["allocation", "registration", "look"]


@dataclass(frozen=True)
class Placement:
    """One region as it was found: pages of `page_nbytes` per node, and pages that lie nowhere (`absent`).

    `wanted` are the nodes that the region may lie on. `strict` says that it must: under a preference a page elsewhere
    is reported and no error. `unknown` says why nothing could be found out.
    """

    region: Region
    wanted: frozenset[int]
    found: Mapping[int, int] = field(default_factory=dict, hash=False)
    absent: int = 0
    page_nbytes: int = 4096
    strict: bool = True
    unknown: str = ""

    @property
    def elsewhere(self) -> int:
        """Pages on nodes where they were not wanted."""
        return sum(pages for node, pages in self.found.items() if node not in self.wanted)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "region": self.region.id,
            "memory": self.region.memory,
            "nbytes": self.region.nbytes,
            "wanted_nodes": sorted(self.wanted),
            "strict": self.strict,
            "page_nbytes": self.page_nbytes,
            "pages_per_node": {str(node): pages for node, pages in sorted(self.found.items())},
            "pages_absent": self.absent,
            "pages_elsewhere": self.elsewhere,
            "unknown": self.unknown,
        }


@dataclass(frozen=True)
class Moved:
    """A region that was found elsewhere than wanted, when, and after what."""

    placement: Placement
    occasion: Occasion
    when_ns: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.placement.to_json(), "found_after": self.occasion, "when_ns": self.when_ns}


def memory_nodes(site: Site) -> dict[str, int]:
    """The node of each memory of a platform that lies on one node: drivers enter theirs when they are opened.

    Whoever describes a path to such a memory looks it up when its `info` is asked for first, and not before.
    """
    nodes: dict[str, int] = site.shared.setdefault("memory_nodes", {})
    return nodes


Look = Callable[[Region], Placement]


class Placements:
    """What is known about the places of all memories of a platform; see the top of the file."""

    def __init__(self, clock: Clock) -> None:
        self.moved: list[Moved] = []
        self._clock = clock
        self._looks: dict[str, Look] = {}
        self._last: dict[tuple[str, int], Placement] = {}
        self._past: dict[str, dict[str, Any]] = {}
        self._guard = threading.RLock()

    @classmethod
    def of(cls, site: Site) -> Placements:
        """The placements of a site; made at first use."""
        made: Placements = site.shared.setdefault("placements", cls(site.clock))
        return made

    def offer(self, memory: str, look: Look) -> None:
        """From now on, regions of this memory are looked at with `look`, which raises nothing."""
        with self._guard:
            self._looks[memory] = look

    def withdraw(self, memory: str) -> None:
        """The memory is closed: what was found last stays in the report."""
        with self._guard:
            self._looks.pop(memory, None)

    def allocated(self, region: Region) -> Placement | None:
        """A region was made; returns how it lies, None for a memory without places."""
        return self._looked(region, "allocation")

    def registered(self, region: Region) -> Placement | None:
        """A region was registered for DMA; returns how it lies now, None for a memory without places."""
        return self._looked(region, "registration")

    def freed(self, region: Region) -> None:
        """A region is gone; as it was found last, it stays in the report."""
        with self._guard:
            placement = self._last.pop((region.memory, region.id), None)
            if placement is not None:
                _add(self._past.setdefault(region.memory, _row()), placement)

    def refused(self, region: Region) -> None:
        """A region lay wrong and was given back before anybody saw it: of it only stands that it lay elsewhere."""
        with self._guard:
            self._last.pop((region.memory, region.id), None)

    def again(self) -> list[Placement]:
        """Look at every live region once more: the kernel may have moved pages behind us."""
        with self._guard:
            regions = [placement.region for placement in self._last.values() if not placement.region.freed]
        return [found for region in regions if (found := self._looked(region, "look")) is not None]

    def report(self) -> dict[str, Any]:
        """Plain data: for each memory what was asked for and found, of regions that are gone too; and what moved."""
        with self._guard:
            memories = deepcopy(self._past)
            placements = list(self._last.values())
            moved = list(self.moved)
        for placement in placements:
            row = memories.setdefault(placement.region.memory, _row())
            _add(row, placement)
            row["regions_live"] += not placement.region.freed
        return {"memories": dict(sorted(memories.items())), "moved": [one.to_json() for one in moved]}

    def _looked(self, region: Region, occasion: Occasion) -> Placement | None:
        with self._guard:
            look = self._looks.get(region.memory)
        if look is None:
            return None
        placement = look(region)
        key = (region.memory, region.id)
        with self._guard:
            if region.freed:  # meanwhile: it stands in the report already, as it was found last
                return placement
            before = self._last.get(key)
            self._last[key] = placement
            if placement.elsewhere and (before is None or before.found != placement.found):
                self.moved.append(Moved(placement, occasion, self._clock.now()))
        return placement


def _row() -> dict[str, Any]:
    return {
        "wanted_nodes": [],
        "regions": 0,
        "regions_live": 0,
        "nbytes": 0,
        "pages_per_node": {},
        "pages_absent": 0,
        "pages_elsewhere": 0,
        "unknown": [],
    }


def _add(row: dict[str, Any], placement: Placement) -> None:
    row["wanted_nodes"] = sorted({*row["wanted_nodes"], *placement.wanted})
    row["regions"] += 1
    row["nbytes"] += placement.region.nbytes
    for node, pages in sorted(placement.found.items()):
        row["pages_per_node"][str(node)] = row["pages_per_node"].get(str(node), 0) + pages
    row["pages_absent"] += placement.absent
    row["pages_elsewhere"] += placement.elsewhere
    if placement.unknown and placement.unknown not in row["unknown"]:
        row["unknown"].append(placement.unknown)
