"""Loaded latency: curves as data, caps for streams, the fixed point of accesses that wait; what limits commands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import DEFINED, PROFILES, duration, executor, finish, number, open_machine
from tierloop.devices.commands import Copy, Launch, Read, Write
from tierloop.devices.errors import ConfigurationError, Gone
from tierloop.devices.kernels.contract import Chase, Gather
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.emulators.loaded import Curves, LoadedMedium, fraction_of
from tierloop.emulators.parts import lines_of
from tierloop.emulators.timing import FAR, NS, WINDOW, Flow, Flows, Route, dependent_rates

MB = 1_000_000
GB = 1_000_000_000
READS = ((1 * GB, 100), (6 * GB, 150), (9 * GB, 300), (10 * GB, 800))
WRITES = ((1 * GB, 120), (5 * GB, 600))
CURVES = Curves(((0, WRITES), (1000, READS)))


def curve(fraction: float, points: object) -> str:
    return f"[[memory.curves]]\nread_fraction = {fraction}\npoints = {points}\n{DEFINED}\n"


def loaded_profile(more: str = "", curves: str = "") -> str:
    """A memory with cores: reads up to 10 bytes/ns, writes 5, 100 ns when idle; `more` is the executor's."""
    table = curves or curve(0, [list(p) for p in WRITES]) + curve(1, [list(p) for p in READS])
    return (
        'kind = "cpu"\nsummary = "loaded"\n[memory]\n'
        + number("capacity", 1 << 24)
        + table
        + executor("cores", "cores", 4, 0, 1_000_000_000, more)
    )


def machine_with(folder: Path, more: str = "", curves: str = "") -> Platform:
    return open_machine(folder, profiles={"dram": loaded_profile(more, curves)})


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Platform]:
    with machine_with(tmp_path) as platform:
        yield platform


def lines_in(region: Region, count: int, size: int = 64, first: int = 0, step: int = 4096) -> Segment:
    return Segment(region, Spans([(first + i * step, size) for i in range(count)]))


# -- curves -------------------------------------------------------------------------------------------------------


def test_a_curve_is_read_linearly_between_its_points() -> None:
    assert [CURVES.latency_ns(rate * GB // 2, 1000) for rate in (0, 2, 7, 12, 15, 20)] == [100, 100, 125, 150, 225, 800]
    assert (CURVES.cap(1000), CURVES.cap(0), CURVES.cap(500), CURVES.idle_ns) == (10 * GB, 5 * GB, 7_500_000_000, 100)


def test_between_two_read_fractions_the_same_share_of_the_cap_counts() -> None:
    # at their caps 600 and 800 ns
    assert CURVES.latency_ns(7_500_000_000, 500) == 700
    assert CURVES.latency_ns(0, 250) == 115


def test_the_nearest_curve_counts_outside_of_what_was_measured() -> None:
    alone = Curves(((750, READS),))
    assert (alone.cap(0), alone.cap(1000)) == (10 * GB, 10 * GB)


@pytest.mark.parametrize(
    ("curves", "problem"),
    [
        ((), "at least one read fraction"),
        (((500, READS), (500, READS)), "ascend"),
        (((500, ()),), "at least one point"),
        (((500, ((2, 1), (2, 2))),), "rates have to rise"),
        (((500, ((2, 5), (3, 4))),), "latencies may not fall"),
        (((1001, READS),), "between 0 and 1"),
    ],
)
def test_curves_that_are_none_are_refused(
    curves: tuple[tuple[int, tuple[tuple[int, int], ...]], ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        Curves(curves)


POINTS = st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**4)), min_size=1, max_size=5).map(
    lambda steps: tuple(
        zip(np.cumsum([s[0] for s in steps]).tolist(), np.cumsum([s[1] for s in steps]).tolist(), strict=True)
    )
)


@given(st.dictionaries(st.integers(0, 1000), POINTS, min_size=1, max_size=4), st.integers(0, 1000), st.data())
def test_latency_never_falls_with_the_rate(
    by_fraction: dict[int, tuple[tuple[int, int], ...]], fraction: int, data: st.DataObject
) -> None:
    curves = Curves(tuple(sorted(by_fraction.items())))
    cap = curves.cap(fraction)
    low, high = sorted(data.draw(st.tuples(st.integers(0, cap), st.integers(0, cap))))
    assert curves.latency_ns(low, fraction) <= curves.latency_ns(high, fraction)


# -- streams take the cap -----------------------------------------------------------------------------------------


def test_a_stream_takes_the_cap_of_its_direction_and_the_idle_latency(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, card = dram.alloc(4 * MB, phantom=True), machine.devices["emu:cxl"].alloc(4 * MB, phantom=True)
    assert duration(machine, dram, Copy(card.at(0, MB), near.at(0, MB))) == 250_000 + 340 + 100
    gather = Launch(Gather(), ((near.at(0, MB),),), ((card.at(0, MB),),))
    # the card is written at 2 bytes/ns; reading 10 bytes/ns is over long before
    assert duration(machine, dram, gather) == 500_000 + 340


def test_a_copy_inside_the_memory_has_the_mix_of_its_reads_and_writes(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near = dram.alloc(4 * MB, phantom=True)
    # half reads, half writes: 7.5 bytes/ns over both
    assert duration(machine, dram, Copy(near.at(0, 3 * MB // 2), near.at(2 * MB, 3 * MB // 2))) == 400_000 + 200


def test_streams_in_both_directions_share_the_cap_of_their_mix(tmp_path: Path) -> None:
    # a link of two directions behind one port: mixed traffic is faster than either alone
    best = curve(0, [[4 * GB, 100]]) + curve(0.5, [[8 * GB, 100]]) + curve(1, [[4 * GB, 100]])
    with machine_with(tmp_path, curves=best) as machine:
        gpu, dram = machine.devices["emu:gpu"], machine.devices["emu:dram"]
        near, far = dram.alloc(8 * MB, phantom=True), gpu.alloc(2 * MB, phantom=True)
        alone = duration(machine, gpu, Copy(near.at(0, MB), far.at(0, MB)), 2)
        assert alone == 250_000 + 800
        start = machine.clock.now()
        there = gpu.submit(Copy(near.at(0, MB), far.at(0, MB)), 2)
        back = gpu.submit(Copy(far.at(MB, MB), near.at(MB, MB)), 4)
        assert [end - start for end in finish(machine, there, back)] == [250_000 + 800, 250_000 + 800]


# -- accesses that wait -------------------------------------------------------------------------------------------


def test_chasing_costs_the_idle_latency_for_each_line(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, out = dram.alloc(1 << 20, phantom=True), machine.devices["emu:cxl"].alloc(8, phantom=True)
    command = Launch(Chase(), ((lines_in(near, 50),),), ((out.all(),),))
    # 640 MB/s at 100 ns a line is below the first point of the curve; the result is written meanwhile, to the card
    assert duration(machine, dram, command) == 50 * 100


def test_chasing_over_a_link_costs_the_link_as_well(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    far, out = machine.devices["emu:cxl"].alloc(1 << 20, phantom=True), dram.alloc(8, phantom=True)
    assert duration(machine, dram, Launch(Chase(), ((lines_in(far, 50),),), ((out.all(),),))) == 50 * 340


def test_random_reads_move_what_is_under_way_per_latency(tmp_path: Path) -> None:
    with machine_with(tmp_path, number("mlp_lines", 8)) as machine:
        dram = machine.devices["emu:dram"]
        far, near = machine.devices["emu:cxl"].alloc(1 << 20, phantom=True), dram.alloc(1 << 20, phantom=True)
        # 8 lines of 64 B in 340 ns
        scattered = Copy(lines_in(far, 200), near.at(0, 200 * 64))
        assert duration(machine, dram, scattered) == 200 * 340 // 8
        # fewer lines than could be under way: one latency
        assert duration(machine, dram, Copy(lines_in(far, 3), near.at(0, 3 * 64))) == 340


def test_spans_of_a_page_are_a_stream(tmp_path: Path) -> None:
    with machine_with(tmp_path, number("mlp_lines", 1)) as machine:
        dram = machine.devices["emu:dram"]
        far, near = machine.devices["emu:cxl"].alloc(1 << 20, phantom=True), dram.alloc(1 << 20, phantom=True)
        pages = Copy(lines_in(far, 100, size=4096), near.at(0, 100 * 4096))
        assert duration(machine, dram, pages) == 102_400 + 440


def test_lines_under_way_follow_the_size_of_the_spans() -> None:
    lines = ((64, 4 * WINDOW), (256, 8 * WINDOW))
    assert [lines_of(lines, size) for size in (1, 64, 160, 256, 2048)] == [4000, 4000, 6000, 8000, 8000]


def test_a_load_makes_dependent_accesses_slower_and_they_settle_at_one_rate(machine: Platform) -> None:
    dram, gpu = machine.devices["emu:dram"], machine.devices["emu:gpu"]
    near, out = dram.alloc(8 << 20, phantom=True), dram.alloc(8, phantom=True)
    far = gpu.alloc(4 << 20, phantom=True)
    streams = [gpu.submit(Copy(near.at(0, MB), far.at(i * MB, MB)), 2 + i) for i in range(2)]
    start = machine.clock.now()
    chased = dram.submit(Launch(Chase(), ((lines_in(near, 400),),), ((out.all(),),)))
    finish(machine, chased, *streams)
    # 5 bytes/ns over the link and 64 bytes per latency: at 5.4 bytes/ns the curve says 144 ns
    assert 400 * 140 < chased.ended_ns - start < 400 * 146
    rate = 5 * GB + 64 * NS // 144
    assert abs(CURVES.latency_ns(rate, 1000) - (chased.ended_ns - start) / 400) < 1


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), min_size=1, max_size=5), st.integers(0, 500))
def test_the_fixed_point_keeps_every_bound(members: list[tuple[int, bool]], away_ns: int) -> None:
    flows = Flows()
    resource = flows.add(10 * GB)
    medium = LoadedMedium(CURVES, 10 * GB, 1, 2)
    made = []
    for lines, is_read in members:
        read, written = int(is_read), int(not is_read)
        route = Route(
            [(resource, 1 if is_read else 2)], flows.capacity, 1, (), ((resource, medium, read, written),),
            lines * 64 * WINDOW, away_ns, (resource,),
        )  # fmt: skip
        made.append(Flow(route, 1, 1, FAR, 0))
    dependent_rates(made, flows.capacity)
    reads = sum(is_read for _, is_read in members)
    fraction = fraction_of(reads, len(members) - reads)
    total = sum(flow.rate / flow.rate_per for flow in made)
    units = sum(flow.rate / flow.rate_per * flow.route.demands[0][1] for flow in made)
    assert units <= medium.shared(reads, len(members) - reads) * (1 + 1e-9)
    latency = away_ns + CURVES.latency_ns(int(total), fraction)
    for flow, (lines, _) in zip(made, members, strict=True):
        assert flow.rate / flow.rate_per <= lines * 64 * NS / latency * (1 + 1e-6) + 1


@given(st.integers(1, 4), st.integers(1, 200))
def test_added_load_never_speeds_a_reader_up(others: int, lines: int) -> None:
    flows = Flows()
    resource = flows.add(10 * GB)
    medium = LoadedMedium(CURVES, 10 * GB, 1, 2)
    mixes = ((resource, medium, 1, 0),)
    waiting = Route([(resource, 1)], flows.capacity, 1, (), mixes, lines * 64 * WINDOW, 0, (resource,))
    stream = Route([(resource, 1)], flows.capacity, 1, (), mixes)
    rates = []
    for count in range(others + 1):
        made = [Flow(waiting, 1, 1, FAR, 0), *(Flow(stream, 1, 1, FAR, 0) for _ in range(count))]
        dependent_rates(made, flows.capacity)
        rates.append(made[0].rate / made[0].rate_per)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(rates))


# -- commands -----------------------------------------------------------------------------------------------------


def test_one_command_moves_no_more_than_its_limit_and_two_move_twice_that(tmp_path: Path) -> None:
    with machine_with(tmp_path, number("command_bytes_per_s", GB)) as machine:
        dram = machine.devices["emu:dram"]
        near, card = dram.alloc(4 * MB, phantom=True), machine.devices["emu:cxl"].alloc(4 * MB, phantom=True)
        both = [dram.submit(Copy(card.at(i * MB, MB), near.at(i * MB, MB)), i) for i in range(2)]
        assert finish(machine, *both) == [MB + 440, MB + 440]


def test_the_command_processor_takes_one_command_after_the_other(tmp_path: Path) -> None:
    with machine_with(tmp_path, number("issue_ns", 3_000)) as machine:
        dram = machine.devices["emu:dram"]
        near, card = dram.alloc(MB, phantom=True), machine.devices["emu:cxl"].alloc(MB, phantom=True)
        tiny = [Copy(card.at(0, 4), near.at(4 * i, 4)) for i in range(4)]
        assert duration(machine, dram, tiny[0]) == 3_000 + 1 + 440
        assert duration(machine, dram, Copy(card.at(0, 40_000), near.at(0, 40_000))) == 3_000 + 10_440
        start = machine.clock.now()
        made = [dram.submit(tiny[queue], queue) for queue in range(3)]
        expected = dram.estimate(tiny[3], 3)
        made.append(dram.submit(tiny[3], 3))
        assert [end - start for end in finish(machine, *made)] == [3_441, 6_441, 9_441, 12_441]
        assert expected.duration_ns == 12_441


def test_a_device_may_be_closed_while_its_command_processor_is_busy(tmp_path: Path) -> None:
    with machine_with(tmp_path, number("issue_ns", 3_000)) as machine:
        dram = machine.devices["emu:dram"]
        card = machine.devices["emu:cxl"].alloc(MB, phantom=True)
        flush = dram.submit(Copy(card.at(0, 4), card.at(8, 4)))
        dram.close()
        machine.clock.wait_until(10_000)
        assert flush.done
        assert isinstance(flush.error, Gone)


def test_small_requests_have_the_efficiency_that_their_cost_leaves(tmp_path: Path) -> None:
    cores = executor("h2d", "dma", 2, 0, more=number("span_ns", 200))
    gpu = PROFILES["gpu"].replace(executor("h2d", "dma", 2, 0), cores)
    with open_machine(tmp_path, profiles={"gpu": gpu}) as machine:
        device = machine.devices["emu:gpu"]
        near, far = machine.devices["emu:dram"].alloc(4 * MB, phantom=True), device.alloc(2 * MB, phantom=True)
        for size in (1000, 10_000, 100_000):
            count = MB // size
            took = duration(machine, device, Copy(lines_in(near, count, size, step=size), far.at(0, MB)), 2) - 800
            # size / (size + rate · overhead), the rate being 5 bytes/ns
            assert MB / took == pytest.approx(5 * size / (size + 5 * 200), rel=1e-9)


def test_each_queue_may_have_a_weight_of_its_own(tmp_path: Path) -> None:
    gpu = PROFILES["gpu"].replace("[executors.h2d]\n", "[executors.h2d]\nweights = [1, 3]\n")
    with open_machine(tmp_path, profiles={"gpu": gpu}) as machine:
        device = machine.devices["emu:gpu"]
        near, far = machine.devices["emu:dram"].alloc(4 * MB, phantom=True), device.alloc(2 * MB, phantom=True)
        light = device.submit(Copy(near.at(0, MB), far.at(0, MB)), 2)
        heavy = device.submit(Copy(near.at(MB, 750_000), far.at(MB, 750_000)), 3)
        assert finish(machine, heavy, light) == [200_000 + 800, 350_000 + 800]


def test_a_small_read_beside_a_large_copy_is_delayed_by_its_own_time_once_more(machine: Platform) -> None:
    gpu = machine.devices["emu:gpu"]
    near, far = machine.devices["emu:dram"].alloc(8 << 20, phantom=True), gpu.alloc(4 << 20, phantom=True)
    buffer = np.empty(4096, dtype=np.uint8)
    small = Read(far.at(0, 4096), buffer)
    alone = duration(machine, gpu, small, 4)
    large = gpu.submit(Copy(far.at(0, 4 << 20), near.at(0, 4 << 20)), 2)
    machine.clock.wait_until(machine.clock.now() + 1000)
    start = machine.clock.now()
    read = gpu.submit(small, 4)
    finish(machine, large, read)
    assert read.ended_ns - start - alone == -(-2 * 4096 // 5) - -(-4096 // 5)


# -- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        (loaded_profile(curves=curve(1.5, [[GB, 1]])), r"read_fraction: 1.5 given; allowed: 0 to 1"),
        (loaded_profile(curves=curve(1, [[0, 1]])), r"points: 0 given; allowed: 1000 to"),
        (loaded_profile(curves=curve(1, [[GB, -1]])), r"points: -1 given; allowed: 0 to"),
        (loaded_profile(curves=curve(1, "[[nan, 1]]")), r"points: nan given; allowed: a whole number"),
        (loaded_profile(curves=curve(1, [[GB, 5], [2 * GB, 4]])), r"latencies may not fall: 4 ns"),
        (loaded_profile(curves=curve(1, [GB, 5])), r"allowed: a list of \[bytes/s, ns\]"),
        (loaded_profile(curves=curve(1, [[GB, 5]]) + "colour = 3\n"), r"unknown key"),
        (loaded_profile('mlp_lines = { value = [[64, 0]], source = "x" }\n'), r"0 lines given; allowed: 0.001"),
        (loaded_profile('mlp_lines = { value = [[64, 2], [64, 3]], source = "x" }\n'), r"spans have to ascend"),
        (loaded_profile('mlp_lines = { value = [], source = "x" }\n'), r"an empty list"),
        (loaded_profile("weights = [1, 2]\n"), r"allowed: 4 numbers, one for each queue"),
        (loaded_profile("weights = [1, 2, 3, 0]\n"), r"0 given; allowed: 1 to 1024"),
        (loaded_profile(number("issue_ns", -1)), r"issue_ns.value: -1 given"),
        (loaded_profile(number("command_bytes_per_s", 0)), r"command_bytes_per_s.value: 0 given"),
        (
            loaded_profile(curves=number("read_bytes_per_s", GB) + curve(1, [[GB, 5]])),
            r"read_bytes_per_s: unknown key",
        ),
    ],
)
def test_a_profile_that_says_nonsense_is_refused(tmp_path: Path, profile: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        open_machine(tmp_path, profiles={"dram": profile})


def test_what_was_measured_may_stand_in_a_profile(tmp_path: Path) -> None:
    with open_machine(tmp_path, profiles={"dram": loaded_profile() + '[calibration]\ndevice = "x"\n'}) as machine:
        info = machine.devices["emu:dram"].info
        path = info.executors[0].path("emu:dram")
        assert path is not None
        assert (path.read_bytes_per_s, path.write_bytes_per_s, path.latency_ns) == (10 * GB, 5 * GB, 100)


def test_writes_and_reads_of_host_buffers_have_the_mix_of_both(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near = dram.alloc(2 * MB, phantom=True)
    buffer = np.zeros(3 * MB // 2, dtype=np.uint8)
    assert duration(machine, dram, Write(near.at(0, buffer.nbytes), buffer)) == 400_000 + 200


def test_a_refusal_points_at_the_line(tmp_path: Path) -> None:
    profile = loaded_profile(curves=curve(0.5, [[GB, 5]]) + curve(1, [[GB, -5]]))
    line = 1 + profile[: profile.index("-5")].count("\n")
    with pytest.raises(ConfigurationError, match=rf"dram\.toml, line {line}: memory\.curves\[1\]\.points: -5 given"):
        open_machine(tmp_path, profiles={"dram": profile})


@given(st.integers(0, 12_000), st.integers(1, 100_000), st.integers(1, 100_000))
def test_an_estimate_counts_what_is_still_in_a_command_processor(wait_ns: int, first: int, second: int) -> None:
    with TemporaryDirectory() as folder, machine_with(Path(folder), number("issue_ns", 5_000)) as machine:
        dram = machine.devices["emu:dram"]
        near, card = dram.alloc(MB, phantom=True), machine.devices["emu:cxl"].alloc(MB, phantom=True)
        earlier = dram.submit(Copy(card.at(0, first), near.at(0, first)), 0)
        machine.clock.wait_until(wait_ns)
        command, start = Copy(card.at(first, second), near.at(first, second)), machine.clock.now()
        expected = dram.estimate(command, 1).duration_ns
        later = dram.submit(command, 1)
        assert finish(machine, earlier, later)[1] - start == expected
