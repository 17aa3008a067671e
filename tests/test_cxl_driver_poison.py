"""Any sequence of allocations, commands and poisoned lines against a dict of bytes: nothing lost is ever read as good.

A command that names a poisoned page ends with a MediaError, also after the page was freed and its neighbours allocated
again; every other page has the bytes that were written last; and what is allocated is zeroed and whole.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cxl_rig import PAGE, pair
from tierloop.devices.clocks import WallClock
from tierloop.devices.errors import MediaError, OutOfMemory
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.emulators.kernel_cxl import RegionPlan, cxl_machine

PAGES = 24
ROOM = st.integers(0, PAGES - 1)


class Poisoned(RuleBasedStateMachine):
    """A small memory on a card, and what every live region must hold."""

    @initialize()
    def open(self) -> None:
        self.kernel = cxl_machine(regions=[RegionPlan((0,), align=PAGE)])
        self.site = Site(WallClock())
        self.platform = pair(self.site, {"path": "/dev/dax0.0", "capacity": PAGES * PAGE}, self.kernel)
        self.cpu, self.memory = self.platform.device("cpu0"), self.platform.device("cxl0")
        self.held: dict[Region, tuple[int, list[int]]] = {}
        self.bad: set[int] = set()

    @rule(pages=st.integers(1, 9))
    def alloc(self, pages: int) -> None:
        taken = {page for first, values in self.held.values() for page in range(first, first + len(values))}
        try:
            region = self.memory.alloc(pages * PAGE)
        except OutOfMemory:
            free = "".join(".#"[page in taken or page in self.bad] for page in range(PAGES))
            assert "." * pages not in free
            return
        first = self.memory.offset_of(region) // PAGE  # type: ignore[attr-defined]  # of the driver
        mine = set(range(first, first + pages))
        assert not mine & (taken | self.bad)
        self.held[region] = first, [0] * pages

    @precondition(lambda self: self.held)
    @rule(which=ROOM)
    def free(self, which: int) -> None:
        region = list(self.held)[which % len(self.held)]
        del self.held[region]
        self.memory.free(region)

    @rule(page=ROOM, line=st.integers(0, 63))
    def poison(self, page: int, line: int) -> None:
        self.kernel.cards[0].poison(page * PAGE + line * 64)
        self.bad.add(page)

    @precondition(lambda self: self.held)
    @rule(which=ROOM, first=ROOM, pages=st.integers(1, 9), value=st.integers(1, 255))
    def write(self, which: int, first: int, pages: int, value: int) -> None:
        region = list(self.held)[which % len(self.held)]
        start, values = self.held[region]
        first %= len(values)
        pages = min(pages, len(values) - first)
        data = np.full(pages * PAGE, value, dtype=np.uint8)
        touched = set(range(start + first, start + first + pages))
        try:
            write_bytes(self.site.clock, self.cpu, region.at(first * PAGE, pages * PAGE), data)
        except MediaError:
            assert touched & self.bad
        else:
            assert not touched & self.bad
        values[first : first + pages] = [value] * pages

    @precondition(lambda self: self.held)
    @rule(which=ROOM)
    def read(self, which: int) -> None:
        region = list(self.held)[which % len(self.held)]
        start, values = self.held[region]
        for page, value in enumerate(values):
            try:
                found = read_bytes(self.site.clock, self.cpu, region.at(page * PAGE, PAGE))
            except MediaError:
                assert start + page in self.bad
            else:
                assert start + page not in self.bad
                assert (found == value).all()

    @invariant()
    def live_regions_lie_apart(self) -> None:
        pages = [page for first, values in self.held.values() for page in range(first, first + len(values))]
        assert len(pages) == len(set(pages))

    def teardown(self) -> None:
        self.platform.close()


TestPoisoned = Poisoned.TestCase
TestPoisoned.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
