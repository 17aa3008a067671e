"""The timing transition and the fabric: closed forms, conservation, contention, meters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import PROFILES, duration, finish, open_machine
from tierloop.devices.commands import Copy, Launch, Read, Write
from tierloop.devices.kernels.contract import Dense, Gather
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region
from tierloop.devices.site import Occupancy
from tierloop.emulators.timing import FAR, Flow, Flows, Route, fair_rates

MB = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Platform]:
    with open_machine(tmp_path) as platform:
        yield platform


def region(platform: Platform, name: str, nbytes: int = 2 * MB) -> Region:
    return platform.devices[f"emu:{name}"].alloc(nbytes, phantom=True)


# -- one flow -----------------------------------------------------------------------------------------------------


def test_one_copy_takes_its_bytes_over_the_slowest_rate_and_then_the_latency(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    # 1 MB at 5 bytes/ns; then 100 ns of DRAM, 500 of the link, 200 of the GPU's memory
    assert duration(machine, gpu, Copy(source.at(0, MB), target.at(0, MB)), 2) == 200_000 + 800


def test_a_route_over_two_links_is_as_fast_as_the_slower_and_as_far_as_both(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "cxl"), region(machine, "gpu")
    # the card reads at 4 bytes/ns, slower than pcie (5) and its link (8); latencies 300 + 40 + 500 + 200
    assert duration(machine, gpu, Copy(source.at(0, MB), target.at(0, MB)), 2) == 250_000 + 1_040


def test_reads_and_writes_of_one_memory_have_their_own_rates(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, card = region(machine, "dram"), region(machine, "cxl")
    assert duration(machine, dram, Copy(card.at(0, MB), near.at(0, MB))) == 250_000 + 440 + 1_000
    assert duration(machine, dram, Copy(near.at(0, MB), card.at(0, MB))) == 500_000 + 440 + 1_000


def test_a_copy_inside_one_memory_moves_every_byte_twice(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near = region(machine, "dram")
    assert duration(machine, dram, Copy(near.at(0, MB), near.at(MB, MB))) == 200_000 + 200 + 1_000


def test_durations_are_rounded_up(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    assert duration(machine, gpu, Copy(source.at(0, 1), target.at(0, 1)), 2) == 1 + 800
    assert duration(machine, gpu, Copy(source.at(0, 11), target.at(0, 11)), 2) == 3 + 800


def test_a_command_without_bytes_costs_its_latency_only(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    assert duration(machine, gpu, Copy(source.at(0, 0), target.at(0, 0)), 2) == 0


def test_host_buffers_lie_in_the_host_memory(machine: Platform) -> None:
    gpu, dram = machine.devices["emu:gpu"], machine.devices["emu:dram"]
    target, near = region(machine, "gpu"), region(machine, "dram")
    buffer = np.zeros(MB, dtype=np.uint8)
    assert duration(machine, gpu, Write(target.at(0, MB), buffer), 2) == 200_000 + 800
    assert duration(machine, dram, Read(near.at(0, MB), buffer)) == 200_000 + 200 + 1_000


@pytest.mark.parametrize(
    ("flops", "nbytes", "expected"),
    [(4_000, 0, 1_000), (0, 20_000, 1_000), (40_000, 20_000, 10_000), (4_000, 200_000, 10_000)],
)
def test_dense_costs_the_larger_of_arithmetic_and_bytes(
    machine: Platform, flops: int, nbytes: int, expected: int
) -> None:
    gpu = machine.devices["emu:gpu"]
    latency = 200 if nbytes * 4 >= flops * 20 else 0
    command = Launch(Dense("mlp", flops, nbytes, 0), (), ())
    assert duration(machine, gpu, command) == 5_000 + expected + latency


def test_a_kernel_reads_its_memories_at_the_same_time(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, card = region(machine, "dram"), region(machine, "cxl")
    rows = ((near.at(0, MB), card.at(0, MB // 2)),)
    command = Launch(Gather(), rows, ((near.at(0, 3 * MB // 2),),))
    # DRAM: 1 MB read and 1.5 MB written at 10 bytes/ns; the card: 0.5 MB at 4 bytes/ns, ends first
    assert duration(machine, dram, command) == 1_000 + 250_000 + 100


# -- sharing ------------------------------------------------------------------------------------------------------


def test_two_equal_copies_share_a_link_equally(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    both = [gpu.submit(Copy(source.at(i * MB, MB), target.at(i * MB, MB)), 2 + i) for i in (0, 1)]
    assert finish(machine, *both) == [400_800, 400_800]


def test_two_directions_of_a_full_duplex_link_do_not_share(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    there = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
    back = gpu.submit(Copy(target.at(MB, MB), source.at(MB, MB)), 4)
    assert finish(machine, there, back) == [200_800, 200_800]


def test_two_directions_of_a_half_duplex_link_share(machine: Platform) -> None:
    pnm = machine.devices["emu:pnm"]
    dram = region(machine, "dram")
    mine = [region(machine, "pnm", MB) for _ in range(2)]
    to = pnm.submit(Copy(dram.at(0, MB), mine[0].at(0, MB)), 0)
    back = pnm.submit(Copy(mine[1].at(0, MB), dram.at(MB, MB)), 2)
    ends = finish(machine, to, back)
    assert ends == [400_000 + 270 + 3_000, 400_000 + 270 + 1_000]


def test_a_late_small_copy_does_not_wait_for_the_large_one(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    large = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
    machine.clock.wait_until(100_000)
    small = gpu.submit(Copy(source.at(MB, 4_000), target.at(MB, 4_000)), 3)
    # the small one gets half the link: 1,600 ns; the large one loses just those 4,000 bytes: 800 ns
    assert finish(machine, small, large) == [100_000 + 1_600 + 800, 200_000 + 800 + 800]


def test_a_flow_that_is_limited_elsewhere_leaves_the_rest_to_others(machine: Platform) -> None:
    gpu, dram = machine.devices["emu:gpu"], machine.devices["emu:dram"]
    near, card, far = region(machine, "dram"), region(machine, "cxl"), region(machine, "gpu")
    # the copy through pcie takes 5 bytes/ns of DRAM's 10; the one to the card could take 2 and does
    slow = dram.submit(Copy(near.at(0, MB), card.at(0, MB)))
    fast = gpu.submit(Copy(near.at(MB, MB), far.at(0, MB)), 2)
    assert finish(machine, slow, fast) == [500_000 + 440 + 1_000, 200_000 + 800]


def test_kernels_share_the_engine_and_the_memory(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    work = Launch(Dense("mlp", 40_000, 0, 0), (), ())
    first, second = gpu.submit(work, 0), gpu.submit(work, 1)
    assert finish(machine, first, second) == [25_000, 25_000]


def test_a_weight_is_the_share_of_what_is_competed_for(tmp_path: Path) -> None:
    heavy = PROFILES["gpu"].replace("[executors.d2h]\n", "[executors.d2h]\nweight = 3\n")
    with open_machine(tmp_path, profiles={"gpu": heavy}) as machine:
        gpu = machine.devices["emu:gpu"]
        source, target = region(machine, "dram"), region(machine, "gpu")
        light = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
        favoured = gpu.submit(Copy(source.at(MB, 750_000), target.at(MB, 750_000)), 4)
        # 3.75 and 1.25 bytes/ns for 200,000 ns, then the other 750,000 bytes at 5 bytes/ns
        assert finish(machine, favoured, light) == [200_000 + 800, 350_000 + 800]


def test_estimates_are_what_happens_if_nothing_else_comes(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    command = Copy(source.at(0, MB), target.at(0, MB))
    alone = gpu.estimate(command, 2)
    assert (alone.duration_ns, alone.margin_ns) == (200_800, 0)
    first = gpu.submit(Copy(source.at(MB, MB), target.at(MB, MB)), 3)
    beside = gpu.estimate(command, 2)
    second = gpu.submit(command, 2)
    start = machine.clock.now()
    assert finish(machine, first, second)[1] - start == beside.duration_ns == 400_800
    assert gpu.estimate(command, 2) == alone


def test_an_estimate_changes_nothing(machine: Platform) -> None:
    gpu, nvme = machine.devices["emu:gpu"], machine.devices["emu:nvme"]
    source, target, disk = region(machine, "dram"), region(machine, "gpu"), region(machine, "nvme")
    first = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
    for _ in range(3):
        gpu.estimate(Copy(source.at(MB, MB), target.at(MB, MB)), 3)
        nvme.estimate(Write(disk.at(0, 1 << 20), np.zeros(1 << 20, np.uint8)))
    assert finish(machine, first) == [200_800]
    assert (machine.site.links["pcie"].busy_ns, machine.site.links["half"].busy_ns) == (200_000, 0)


# -- meters -------------------------------------------------------------------------------------------------------


def test_links_count_bytes_by_direction_and_busy_time_once(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    seen: list[Occupancy] = []
    machine.site.link_observers.append(seen.append)
    source, target = region(machine, "dram"), region(machine, "gpu")
    there = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
    machine.clock.wait_until(50_000)
    back = gpu.submit(Copy(target.at(MB, MB), source.at(MB, MB)), 4)
    finish(machine, there, back)
    meter = machine.site.links["pcie"]
    assert (meter.bytes_forward, meter.bytes_back, meter.busy_ns) == (MB, MB, 250_000)
    assert seen == [
        Occupancy("pcie", "forward", 0, 200_000, MB, "emu:gpu copy"),
        Occupancy("pcie", "back", 50_000, 250_000, MB, "emu:gpu copy"),
    ]


def test_busy_time_is_counted_until_now(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    copy = gpu.submit(Copy(source.at(0, MB), target.at(0, MB)), 2)
    meter = machine.site.links["pcie"]
    seen = [meter.busy_ns]
    for until in (1_000, 150_000, 200_000, 200_500):
        machine.clock.wait_until(until)
        seen.append(meter.busy_ns)
    assert seen == [0, 1_000, 150_000, 200_000, 200_000]
    finish(machine, copy)


def test_idle_time_between_two_copies_is_not_busy(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    source, target = region(machine, "dram"), region(machine, "gpu")
    for _ in range(2):
        duration(machine, gpu, Copy(source.at(0, MB), target.at(0, MB)), 2)
        machine.clock.wait_until(machine.clock.now() + 1_000_000)
    assert machine.site.links["pcie"].busy_ns == 400_000


def test_closing_a_device_gives_back_what_its_commands_held(machine: Platform) -> None:
    gpu, dram = machine.devices["emu:gpu"], machine.devices["emu:dram"]
    source, target, card = region(machine, "dram"), region(machine, "gpu"), region(machine, "cxl")
    abandoned = gpu.submit(Copy(card.at(0, MB), target.at(0, MB)), 2)
    other = dram.submit(Copy(card.at(MB, MB), source.at(0, MB)))
    machine.clock.wait_until(100_000)
    gpu.close()
    # 200,000 bytes at half the card's rate, the rest alone
    assert finish(machine, other) == [100_000 + 200_000 + 440 + 1_000]
    assert abandoned.done
    assert machine.site.links["pcie"].busy_ns == 100_000


# -- properties ---------------------------------------------------------------------------------------------------

PLACES = ("dram", "cxl", "gpu")
LANES = {"gpu": (2, 3, 4), "dram": (0, 1, 2, 3)}

moves = st.lists(
    st.tuples(
        st.sampled_from(["gpu", "dram"]),
        st.integers(0, 3),
        st.sampled_from(PLACES),
        st.sampled_from(PLACES),
        st.integers(0, 300_000),
        st.integers(0, 60_000),
    ),
    min_size=1,
    max_size=12,
)


def play(platform: Platform, script: list[tuple[str, int, str, str, int, int]]) -> list[tuple[int, int, int]]:
    """Run a script of copies; returns (submitted, started, ended) of each."""
    platform.site.checker = None  # the copies race on purpose, and phantom bytes have nothing to lose
    regions = {place: region(platform, place, 300_000) for place in PLACES}
    done = []
    for device, lane, source, target, nbytes, pause in script:
        if device == "dram" and "gpu" in (source, target):
            device = "gpu"
        lanes = LANES[device]
        platform.clock.wait_until(platform.clock.now() + pause)
        command = Copy(regions[source].at(0, nbytes), regions[target].at(0, nbytes))
        done.append(platform.devices[f"emu:{device}"].submit(command, lanes[lane % len(lanes)]))
    finish(platform, *done)
    return [(c.submitted_ns, c.started_ns, c.ended_ns) for c in done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


@given(moves)
def test_nothing_is_faster_than_its_slowest_part_and_links_never_above_their_rate(
    folder: Path, script: list[tuple[str, int, str, str, int, int]]
) -> None:
    with open_machine(folder) as platform:
        stretches: list[Occupancy] = []
        platform.site.link_observers.append(stretches.append)
        times = play(platform, script)
        reads = {"dram": 10, "cxl": 4, "gpu": 20}
        writes = {"dram": 10, "cxl": 2, "gpu": 20}
        for (_, _, source, target, nbytes, _), (_, started, ended) in zip(script, times, strict=True):
            slowest = max(nbytes / reads[source], nbytes / writes[target])
            assert ended - started >= slowest
        end = platform.clock.now()
        for name, rate in (("pcie", 5), ("cxl", 8)):
            meter = platform.site.links[name]
            assert meter.busy_ns <= end
            assert meter.bytes_forward <= rate * meter.busy_ns
            assert meter.bytes_back <= rate * meter.busy_ns
            mine = [s for s in stretches if s.link == name]
            assert meter.busy_ns == union([(s.start_ns, s.end_ns) for s in mine])
            assert meter.bytes_forward == sum(s.nbytes for s in mine if s.direction == "forward")


@given(moves)
def test_a_memory_never_serves_more_than_its_rate(
    folder: Path, script: list[tuple[str, int, str, str, int, int]]
) -> None:
    with open_machine(folder) as platform:
        times = play(platform, script)
        last = max(ended for _, _, ended in times)
        reads = {"dram": 10, "cxl": 4, "gpu": 20}
        writes = {"dram": 10, "cxl": 2, "gpu": 20}
        for place in PLACES:
            busy = sum(n / reads[place] for _, _, s, _, n, _ in script if s == place)
            busy += sum(n / writes[place] for _, _, _, t, n, _ in script if t == place)
            assert last - times[0][1] >= busy


@given(moves, st.permutations(["dram", "cxl", "gpu", "nvme", "pnm"]))
def test_times_do_not_depend_on_the_order_of_devices_in_the_file(
    folder: Path, script: list[tuple[str, int, str, str, int, int]], order: list[str]
) -> None:
    with open_machine(folder) as platform:
        expected = play(platform, script)
    with open_machine(folder, order) as platform:
        assert play(platform, script) == expected


@given(moves)
def test_the_same_script_gives_the_same_trace(folder: Path, script: list[tuple[str, int, str, str, int, int]]) -> None:
    traces = []
    for _ in range(2):
        with open_machine(folder) as platform:
            log: list[object] = []
            platform.site.observers.append(lambda c, log=log: log.append((c.device, c.queue, c.started_ns, c.ended_ns)))  # type: ignore[misc]
            platform.site.link_observers.append(log.append)
            play(platform, script)
            traces.append(json.dumps(log))
    assert traces[0] == traces[1]


@given(moves)
def test_every_estimate_comes_true_when_nothing_else_arrives(
    folder: Path, script: list[tuple[str, int, str, str, int, int]]
) -> None:
    with open_machine(folder) as platform:
        play(platform, script)
        near, far = region(platform, "dram", 300_000), region(platform, "gpu", 300_000)
        gpu = platform.devices["emu:gpu"]
        others = [
            gpu.submit(Copy(near.at(0, n), far.at(0, n)), lane) for lane, n in ((2, script[0][4]), (4, script[-1][4]))
        ]
        command = Copy(near.at(0, 123_456), far.at(0, 123_456))
        foreseen = gpu.estimate(command, 3).duration_ns
        start = platform.clock.now()
        ends = finish(platform, *others, gpu.submit(command, 3))
        assert ends[-1] - start == foreseen


def union(stretches: list[tuple[int, int]]) -> int:
    total, reach = 0, 0
    for start, end in sorted(stretches):
        total += max(end - max(start, reach), 0)
        reach = max(reach, end)
    return total


# -- the transition itself ----------------------------------------------------------------------------------------

flows_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        st.integers(1, 3),
        st.integers(1, 4),
        st.one_of(st.just(FAR), st.integers(1, 2_000)),
    ),
    min_size=1,
    max_size=7,
)


@given(flows_of, st.lists(st.integers(100, 1_000_000), min_size=4, max_size=4))
def test_shares_are_within_capacity_and_max_min_fair(
    wanted: list[tuple[list[int], int, int, int]], capacity: list[int]
) -> None:
    flows = [
        Flow(Route([(r, units) for r in resources], capacity, weight), 1, 1, cap, 0)
        for resources, units, weight, cap in wanted
    ]
    fair_rates(flows, capacity)
    rates = {flow: Fraction(flow.rate, flow.rate_per) for flow in flows}
    load = [sum(rates[f] * dict(f.route.demands).get(r, 0) for f in flows) for r in range(4)]
    assert all(used <= room for used, room in zip(load, capacity, strict=True))
    for flow in flows:
        assert rates[flow] <= flow.cap
        # a flow below its cap has a resource that is full and on which nobody gets more for its weight
        assert rates[flow] == flow.cap or any(
            load[r] == capacity[r]
            and all(
                rates[other] * flow.route.weight <= rates[flow] * other.route.weight
                for other in flows
                if r in other.route.resources
            )
            for r in flow.route.resources
        )


@given(flows_of, st.lists(st.integers(100, 1_000_000), min_size=4, max_size=4), st.randoms())
def test_shares_do_not_depend_on_the_order_of_the_flows(
    wanted: list[tuple[list[int], int, int, int]], capacity: list[int], random: object
) -> None:
    def rates(order: list[int]) -> list[Fraction]:
        flows = [
            Flow(Route([(r, wanted[i][1]) for r in wanted[i][0]], capacity, wanted[i][2]), 1, 1, wanted[i][3], 0)
            for i in order
        ]
        fair_rates(flows, capacity)
        by_number = sorted(zip(order, flows, strict=True), key=lambda pair: pair[0])
        return [Fraction(flow.rate, flow.rate_per) for _, flow in by_number]

    order = list(range(len(wanted)))
    shuffled = list(order)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rates(order) == rates(shuffled)


def test_departures_happen_at_their_time_however_late_they_are_noticed() -> None:
    def ends(notice: list[int]) -> list[int]:
        flows = Flows()
        wire = Route([(flows.add(1_000_000_000), 1)], flows.capacity)
        started = [flows.arrive(0, work, wire) for work in (100, 200, 300)]
        for now in notice:
            flows.advance(now)
        return [flow.finish for flow in started]

    assert ends([10_000]) == ends([300, 400, 500, 600, 700]) == [300, 500, 600]


def test_a_copy_of_the_state_lives_its_own_life() -> None:
    flows = Flows()
    wire = Route([(flows.add(1_000_000_000), 1)], flows.capacity)
    first = flows.arrive(0, 100, wire)
    twin = flows.copy()
    twin.arrive(0, 100, wire)
    twin.advance(FAR)
    assert first.finish == 100
    assert flows.next_departure() == FAR


def test_dilation_stretches_every_duration() -> None:
    plain, slow = Flows(), Flows(dilation=7)
    for flows in (plain, slow):
        wire = Route([(flows.add(3_000_000_000), 1)], flows.capacity)
        flows.arrive(0, 999, wire)
    (one,), (seven,) = plain.users[0], slow.users[0]
    assert (one.finish, seven.finish) == (333, 2331)
