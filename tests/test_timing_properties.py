"""What always holds of the timing transition, and what does not: the known anomaly documents itself."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.machines import finish, open_machine
from tierloop.devices.commands import Copy
from tierloop.emulators.timing import NS, Flow, Flows, Route

GB = 1_000_000_000
Arrivals = list[tuple[int, int]]
"""(ns at which a flow arrives, bytes)."""
ARRIVALS = st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 20_000)), min_size=1, max_size=6)


def ends(arrivals: list[tuple[int, int, tuple[int, ...]]], rates: tuple[int, ...]) -> list[int]:
    """When flows end that arrive at a time with so many bytes, each over the resources that it names."""
    flows = Flows()
    for rate in rates:
        flows.add(rate)
    made: list[Flow | None] = [None] * len(arrivals)
    for at, i in sorted((arrival[0], i) for i, arrival in enumerate(arrivals)):
        flows.advance(at)
        route = Route([(resource, 1) for resource in arrivals[i][2]], flows.capacity)
        made[i] = flows.arrive(at, arrivals[i][1], route)
    while flows.shared:
        flows.advance(flows.next_departure())
    return [flow.finish for flow in made if flow is not None]


def on_one(arrivals: Arrivals) -> list[int]:
    return ends([(at, nbytes, (0,)) for at, nbytes in arrivals], (GB,))


@given(ARRIVALS, st.data())
def test_on_one_resource_larger_is_never_sooner(arrivals: Arrivals, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(arrivals) - 1))
    larger = list(arrivals)
    larger[which] = (arrivals[which][0], arrivals[which][1] + data.draw(st.integers(1, 5_000)))
    for before, after in zip(on_one(arrivals), on_one(larger), strict=True):
        assert after >= before


@given(ARRIVALS, st.tuples(st.integers(0, 5_000), st.integers(1, 20_000)))
def test_on_one_resource_added_load_never_speeds_anything_up(arrivals: Arrivals, added: tuple[int, int]) -> None:
    for before, after in zip(on_one(arrivals), on_one([*arrivals, added])[:-1], strict=True):
        assert after >= before


@given(ARRIVALS)
def test_one_resource_serves_everything_in_the_least_time_that_its_rate_allows(arrivals: Arrivals) -> None:
    """Work-conserving: busy without a break while there is anything to do, so the last end is that of one queue.

    A flow leaves at the next whole ns, so each can cost the others less than one.
    """
    free = 0
    for at, nbytes in sorted(arrivals):
        free = max(free, at) + nbytes
    assert free <= max(on_one(arrivals)) <= free + len(arrivals)


WAYS = st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2)])


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 20_000), WAYS), min_size=1, max_size=6))
def test_on_routes_every_lower_bound_holds(arrivals: list[tuple[int, int, tuple[int, ...]]]) -> None:
    rates = (GB, 2 * GB, 500_000_000)
    finished = ends(arrivals, rates)
    for (at, nbytes, way), end in zip(arrivals, finished, strict=True):
        assert (end - at) * min(rates[r] for r in way) >= nbytes * NS
    for resource, rate in enumerate(rates):
        users = [i for i, arrival in enumerate(arrivals) if resource in arrival[2]]
        for first in users:  # conservation: what comes from then on does not pass faster than the rate
            late = [i for i in users if arrivals[i][0] >= arrivals[first][0]]
            spent = max(finished[i] for i in late) - arrivals[first][0]
            assert Fraction(sum(arrivals[i][1] for i in late) * NS, rate) <= spent


def test_on_a_route_of_two_links_an_added_job_can_make_another_one_end_sooner() -> None:
    """Not a bug. `through` needs both links; what it loses on the first to the added job, `other` gains on the second.

    Max-min fairness knows no way around this; Graham's anomalies on graphs of commands are of the same kind.
    """
    through, other, added = (0, 10_000, (0, 1)), (0, 10_000, (1,)), (0, 10_000, (0,))
    before = ends([through, other], (GB, GB))
    after = ends([through, other, added, added], (GB, GB))
    assert before == [20_000, 20_000]
    assert after[1] == 15_000 < before[1]
    assert after[0] == 30_000 > before[0]


def test_idle_costs_nothing(tmp_path: Path) -> None:
    with open_machine(tmp_path) as machine:
        gpu = machine.devices["emu:gpu"]
        near, far = machine.devices["emu:dram"].alloc(1 << 20, phantom=True), gpu.alloc(1 << 20, phantom=True)
        finish(machine, gpu.submit(Copy(near.at(0, 1 << 20), far.at(0, 1 << 20)), 2))
        events = machine.clock.events  # type: ignore[attr-defined]  # of the virtual clock
        machine.clock.wait_until(machine.clock.now() + 10**15)
        assert machine.clock.events == events  # type: ignore[attr-defined]  # likewise
        start = machine.clock.now()
        assert finish(machine, gpu.submit(Copy(near.at(0, 5_000), far.at(0, 5_000)), 2)) == [start + 1_000 + 800]
