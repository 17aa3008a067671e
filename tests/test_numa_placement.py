"""What is known about where regions lie: looked at after allocation and after every registration, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tierloop.devices.clocks import VirtualClock
from tierloop.devices.placement import Placement, Placements
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


@pytest.fixture
def site() -> Site:
    return Site(VirtualClock())


def lying(*found: dict[int, int]) -> Callable[[Region], Placement]:
    """A look that finds these pages per node, one after the other; node 2 is wanted."""
    answers: Iterator[dict[int, int]] = iter(found)
    return lambda region: Placement(region, frozenset({2}), next(answers), page_nbytes=4096)


def region(number: int = 0) -> Region:
    return Region("dram", "dram", number, 8 * 4096)


def test_a_platform_has_one(site: Site) -> None:
    assert Placements.of(site) is Placements.of(site)
    assert Placements.of(site.inside()) is Placements.of(site)


def test_a_memory_that_offers_nothing_is_not_looked_at(site: Site) -> None:
    placements = Placements.of(site)
    assert placements.allocated(region()) is None
    assert placements.report() == {"memories": {}, "moved": []}


def test_pages_that_a_registration_moved_stand_in_the_report(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lying({2: 8}, {2: 5, 0: 3}))
    one = region()
    at_first = placements.allocated(one)
    site.clock.wait_until(70)
    after = placements.registered(one)
    assert at_first is not None
    assert after is not None
    assert (at_first.elsewhere, after.elsewhere) == (0, 3)
    report = placements.report()
    assert report["memories"]["dram"]["pages_per_node"] == {"0": 3, "2": 5}
    assert [(m["region"], m["found_after"], m["when_ns"]) for m in report["moved"]] == [(0, "registration", 70)]


def test_what_was_found_before_is_not_reported_twice(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lying({0: 8}, {0: 8}, {0: 7, 2: 1}))
    one = region()
    placements.allocated(one)
    placements.registered(one)
    placements.registered(one)
    assert [moved.occasion for moved in placements.moved] == ["allocation", "registration"]


def test_a_second_look_sees_what_the_kernel_moved_since(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lying({2: 8}, {2: 8}, {1: 8}))
    placements.allocated(region(0))
    placements.allocated(region(1))
    freed = region(1)
    placements.freed(freed)
    assert [placement.elsewhere for placement in placements.again()] == [8]
    assert placements.moved[0].occasion == "look"


def test_what_was_found_stays_known_after_the_memory_is_closed(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lying({2: 8}))
    placements.allocated(region())
    placements.withdraw("dram")
    assert placements.registered(region()) is None
    assert placements.report()["memories"]["dram"]["nbytes"] == 8 * 4096


def test_a_look_that_was_refused_claims_nothing(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lambda one: Placement(one, frozenset({2}), unknown="EPERM"))
    found = placements.allocated(region())
    assert found is not None
    assert found.elsewhere == 0
    row = placements.report()["memories"]["dram"]
    assert (row["pages_per_node"], row["unknown"]) == ({}, ["EPERM"])


def test_regions_that_are_gone_stay_in_the_report(site: Site) -> None:
    placements = Placements.of(site)
    placements.offer("dram", lying({2: 8}, {0: 2, 2: 6}, {2: 8}))
    gone, refused, live = region(0), region(1), region(2)
    for one in (gone, refused, live):
        placements.allocated(one)
    placements.freed(gone)
    placements.refused(refused)
    row = placements.report()["memories"]["dram"]
    assert (row["regions"], row["regions_live"], row["nbytes"]) == (2, 1, 16 * 4096)
    assert (row["pages_per_node"], row["pages_elsewhere"]) == ({"2": 16}, 0)
    assert [moved.placement.region for moved in placements.moved] == [refused]
    assert placements.report() == placements.report()
