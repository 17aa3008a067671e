"""Throttled: never above the rate, no time lost, every command kind, exact on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import write_machine
from tests.wrapping import Layer, ended, every_command, failed, filled, reference, site
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Command, Copy, Launch, Read, Traffic, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.gate import Gate
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import ConfigurationError, MediaError
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.wrappers import Delayed, Latency, Throttled, wrapped
from tierloop.devices.wrappers.throttled import CATCH_UP_NS
from tierloop.emulators.device import open_emulated


def throttled(on: Site, read: int, write: int, duration_ns: int = 1) -> Device:
    return reference(on, [lambda device, inside: Throttled(device, inside, read, write)], duration_ns)


def dram(on: Site, folder: Path, rate: int) -> Device:
    """The emulated memory of tests/machines.py: 10 bytes/ns, 100 ns of latency, 1,000 ns of overhead."""
    write_machine(folder)
    options = {"profile": "dram.toml", "folder": str(folder)}
    return wrapped(
        on,
        lambda inside: open_emulated("emu:dram", inside, options),
        [lambda device, inside: Throttled(device, inside, rate)],
    )


def test_every_command_and_kernel_is_held_for_its_bytes() -> None:
    on = site()
    device = throttled(on, 1_000_000_000, 500_000_000)
    commands = every_command(on.clock, device)
    for name, command in commands.items():
        traffic = Traffic(command)
        need = sum(traffic.read.values()) + 2 * sum(traffic.written.values())
        if isinstance(command, Launch) and isinstance(command.args, Dense):
            need = command.args.weight_nbytes + command.args.activation_nbytes
        begun = on.clock.now()
        estimate = device.estimate(command)
        (end,) = ended(on.clock, device.submit(command))
        assert end - begun == max(need, 1), name
        assert (estimate.duration_ns, estimate.margin_ns) == (end - begun, 0), name
        assert (need > 1) == (name != "flush"), name


def test_the_device_inside_is_not_hurried_when_the_share_is_short(tmp_path: Path) -> None:
    on = Site()
    device = dram(on, tmp_path, 10**15)
    region = device.alloc(4096)
    command = Read(region.all(), np.empty(4096, dtype=np.uint8))
    assert device.estimate(command).duration_ns == 1_000 + 100 + 410
    assert ended(on.clock, device.submit(command)) == [1_000 + 100 + 410]


def test_effects_of_an_emulated_device_appear_when_the_share_ends(tmp_path: Path) -> None:
    on = Site()
    device = dram(on, tmp_path, 10**9)
    region = filled(on.clock, device, 4096)
    begun, into = on.clock.now(), np.zeros(4096, dtype=np.uint8)
    completion = device.submit(Read(region.all(), into))
    on.clock.wait_until(begun + 4095)
    assert not into.any()
    assert ended(on.clock, completion) == [begun + 4096]
    assert into.all()


def test_queues_share_one_resource_in_the_order_of_their_turns() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    regions = [device.alloc(1000) for _ in range(4)]
    reads = [device.submit(Read(r.at(0, n), np.empty(n, dtype=np.uint8)), q) for q, (r, n) in enumerate(
        zip(regions, (1000, 10, 500, 1), strict=True)
    )]  # fmt: skip
    assert ended(on.clock, *reads) == [1000, 1010, 1510, 1511]


def test_an_estimate_counts_the_shares_that_are_under_way() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    one, other = device.alloc(1000), device.alloc(1000)
    device.submit(Read(one.all(), np.empty(1000, dtype=np.uint8)), 0)
    second = Read(other.all(), np.empty(1000, dtype=np.uint8))
    assert device.estimate(second, 1).duration_ns == 2000
    assert ended(on.clock, device.submit(second, 1)) == [2000]


def test_idle_time_is_not_saved_up() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    region = device.alloc(1000)
    on.clock.wait_until(1_000_000)
    read = Read(region.all(), np.empty(1000, dtype=np.uint8))
    assert ended(on.clock, device.submit(read)) == [1_001_000]


def test_a_stream_of_small_commands_has_the_whole_rate() -> None:
    on = site()
    device = throttled(on, 3_000_000_000, 3_000_000_000)
    region = device.alloc(64)
    reads = [device.submit(Read(region.all(), np.empty(64, dtype=np.uint8))) for _ in range(300)]
    assert ended(on.clock, *reads)[-1] == 64 * 300 // 3


class Late(VirtualClock):
    """Wakes up later than it was asked to, like a busy host."""

    def __init__(self, clock: VirtualClock, late_ns: int) -> None:
        self._clock, self._late_ns = clock, late_ns

    def now(self) -> int:
        return self._clock.now()

    def call_at(self, t_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._clock.call_at(t_ns + self._late_ns, call, *args)


@pytest.mark.parametrize("emulated", [True, False])
def test_lateness_of_the_host_does_not_add_up(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    inner = reference(Site(clock=clock).inside(), [])
    device = Throttled(inner, Site(clock=Late(clock, 30)), 10**9)
    assert device.info.provenance == "emulated"
    monkeypatch.setattr(device, "_emulated", emulated)
    region = device.alloc(100)
    reads = [device.submit(Read(region.all(), np.empty(100, dtype=np.uint8))) for _ in range(50)]
    ends = ended(clock, *reads)
    assert ends == [100 * (i + 1) + 30 for i in range(50)]


def test_a_host_that_is_far_too_late_does_not_catch_up() -> None:
    clock = VirtualClock()
    device = Throttled(reference(Site(clock=clock).inside(), []), Site(clock=Late(clock, CATCH_UP_NS + 1)), 10**9)
    region = device.alloc(100)
    reads = [device.submit(Read(region.all(), np.empty(100, dtype=np.uint8))) for _ in range(3)]
    assert np.diff(ended(clock, *reads)).tolist() == [100 + CATCH_UP_NS + 1] * 2


def test_a_command_behind_one_that_was_cancelled_has_nothing_to_catch_up() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    region, gate = device.alloc(100), Gate(on)
    read = Read(region.all(), np.empty(100, dtype=np.uint8))
    first, second, third = device.submit(read), device.submit(read, 0, [gate.completion]), device.submit(read)
    on.clock.wait_until(150)
    gate.open(MediaError("gate", "flush", "on purpose"))
    assert ended(on.clock, first, third) == [100, 250]
    assert failed(on.clock, second) is not None


def test_a_device_that_is_slower_than_its_share_has_nothing_to_catch_up() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9, duration_ns=500)
    region, other = device.alloc(100), device.alloc(100)
    slow = [device.submit(Read(region.all(), np.empty(100, dtype=np.uint8))) for _ in range(4)]
    assert ended(on.clock, *slow) == [500, 1000, 1500, 2000]
    both = [device.submit(Read(other.all(), np.empty(100, dtype=np.uint8)), queue) for queue in (1, 2)]
    assert ended(on.clock, *both) == [2500, 2600]


def test_a_phantom_command_takes_its_share_too() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    region = device.alloc(1 << 20, phantom=True)
    assert ended(on.clock, device.submit(Read(region.all(), np.empty(1 << 20, dtype=np.uint8)))) == [1 << 20]


def test_a_failed_command_has_had_its_share() -> None:
    on = site()
    device = throttled(on, 10**9, 10**9)
    region = device.alloc(8)

    def broken(reads: list[object], writes: list[object]) -> None:
        raise ValueError("broken")

    launch = Launch(Dense("x", 0, 500, 0, broken), ((region.all(),),), ())  # type: ignore[arg-type]  # never returns
    completion = device.submit(launch)
    assert "broken" in str(failed(on.clock, completion))
    assert completion.ended_ns == 500


def test_paths_say_the_lower_rate_and_the_device_says_what_slows_it(tmp_path: Path) -> None:
    device = dram(Site(), tmp_path, 4_000_000_000)
    (path,) = device.info.executors[0].paths
    assert (path.read_bytes_per_s, path.write_bytes_per_s) == (4_000_000_000, 4_000_000_000)
    assert device.info.slowed == ("throttled to 4 GB/s read and 4 GB/s written",)
    assert "throttled" in device.info.notes["wrappers"]
    faster = dram(Site(), tmp_path, 40_000_000_000)
    assert faster.info.executors[0].paths[0].read_bytes_per_s == 10_000_000_000


def test_rates_are_divided_by_the_dilation(tmp_path: Path) -> None:
    path = write_machine(tmp_path, ["dram"])
    text = path.read_text().partition("\n[links.pcie]")[0].replace('reaches.cxl = ["cxl"]', "")
    path.write_text(text + 'wrap = [{ kind = "throttled", bytes_per_s = 4e9 }]\n')
    with open_platform(path, clock="wall", dilation=400) as platform:
        device = platform.device("emu:dram")
        assert device.info.executors[0].paths[0].read_bytes_per_s == 10_000_000
        region = device.alloc(10_000)
        completion = device.submit(Read(region.all(), np.empty(10_000, dtype=np.uint8)))
        ended(platform.clock, completion)
        assert completion.ended_ns - completion.started_ns >= 1_000_000


def test_a_real_device_is_held_on_the_wall_clock() -> None:
    on = Site(clock=WallClock())
    device = wrapped(
        on,
        lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}),
        [lambda device, inside: Throttled(device, inside, 1_000_000_000, 500_000_000)],
    )
    one, other = device.alloc(1 << 16), device.alloc(1 << 16)
    made: list[Completion] = [
        device.submit(Write(one.all(), np.full(1 << 16, 5, dtype=np.uint8)), 0),
    ]
    made.append(device.submit(Copy(one.all(), other.all()), 0))
    ended(on.clock, *made)
    into = np.zeros(1 << 16, dtype=np.uint8)
    made.append(device.submit(Read(other.all(), into), 0))
    ended(on.clock, *made)
    # one that ends late is made up for by the next, so only what they take together is certain
    for completion, need in zip(made, (2, 5, 6), strict=True):
        assert completion.ended_ns - made[0].started_ns >= need << 16
        assert completion.overrun_ns >= 0
    assert (into == 5).all()
    device.close()


@given(
    rates=st.tuples(st.integers(1_000_000, 10**10), st.integers(1_000_000, 10**10)),
    duration_ns=st.integers(1, 500),
    work=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["read", "write", "copy"]), st.integers(0, 200), st.integers(0, 99)
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_it_is_never_above_its_rate_in_any_window_and_wastes_nothing(
    rates: tuple[int, int], duration_ns: int, work: list[tuple[int, str, int, int]]
) -> None:
    on = Site()
    device = throttled(on, *rates, duration_ns)
    source, target = device.alloc(200), device.alloc(200)
    made: list[tuple[Completion, Fraction]] = []
    for queue, kind, nbytes, gap in work:
        on.clock.wait_until(on.clock.now() + gap)
        command: Command
        if kind == "read":
            command = Read(source.at(0, nbytes), np.empty(nbytes, dtype=np.uint8))
        elif kind == "write":
            command = Write(target.at(0, nbytes), np.empty(nbytes, dtype=np.uint8))
        else:
            command = Copy(source.at(0, nbytes), target.at(0, nbytes))
        cost = Fraction(0)
        if kind != "write":
            cost += Fraction(nbytes * 10**9, rates[0])
        if kind != "read":
            cost += Fraction(nbytes * 10**9, rates[1])
        made.append((device.submit(command, queue), cost))
    ended(on.clock, *(c for c, _ in made))
    for first, _ in made:
        for last, _ in made:
            inside = [cost for c, cost in made if c.started_ns >= first.started_ns and c.ended_ns <= last.ended_ns]
            assert not inside or sum(inside) <= last.ended_ns - first.started_ns + 1
    # Work conserving: whenever something waits for the resource, the resource is at work.
    total = sum(cost for _, cost in made)
    span = max(c.ended_ns for c, _ in made)
    assert span <= sum(gap for *_, gap in work) + total + (duration_ns + 1) * len(work)


@pytest.mark.parametrize("rate", [0, -1, 999, 10**15 + 1, 1.5e9, True, "1e9"])
def test_a_rate_that_makes_no_sense_is_refused(rate: object) -> None:
    with pytest.raises(ConfigurationError, match="allowed: a whole number from 1000"):
        throttled(site(), rate, 10**9)  # type: ignore[arg-type]  # on purpose


def test_copies_of_other_devices_into_its_memory_do_not_pass_through(tmp_path: Path) -> None:
    """What the documentation says of the memory's owner: the GPU's copy engine is not slowed by DRAM's wrapper."""
    ends: list[list[int]] = []
    for wrap in ("", 'wrap = [{ kind = "throttled", bytes_per_s = 1e6 }]\n'):
        folder = tmp_path / str(len(ends))
        folder.mkdir()
        path = write_machine(folder)
        path.write_text(path.read_text().replace('profile = "dram.toml"\n', f'profile = "dram.toml"\n{wrap}'))
        with open_platform(path) as platform:
            gpu, host = platform.device("emu:gpu"), platform.device("emu:dram")
            copy = Copy(host.alloc(4096).all(), gpu.alloc(4096).all())
            ends.append(ended(platform.clock, gpu.submit(copy, 2)))
    assert ends[0] == ends[1]


def test_in_a_stack_the_margin_of_an_estimate_says_what_is_not_known() -> None:
    on = site()
    layers: list[Layer] = [
        lambda device, inside: Delayed(device, inside, Latency(700), Latency(300)),
        lambda device, inside: Throttled(device, inside, 1_000_000_000),
    ]
    device = reference(on, layers)
    estimate = device.estimate(Read(device.alloc(1000).all(), np.empty(1000, dtype=np.uint8)))
    assert estimate.margin_ns >= estimate.duration_ns
