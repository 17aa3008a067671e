"""Delayed: latency for every command kind, drawn from the seed, occupying nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machines import write_machine
from tests.wrapping import ended, every_command, filled, reference, site
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy, Flush, Launch, Read, Write
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.wrappers import Delayed, Latency, wrapped

EACH = {Read: 1_000, Write: 2_000, Copy: 3_000, Launch: 5_000, Flush: 7_000}


def delayed(on: Site, duration_ns: int = 10, seed: int = 0, **latencies: Latency) -> Device:
    given: dict[str, Any] = {"read": Latency(), "write": Latency()} | latencies
    return reference(on, [lambda device, inside: Delayed(device, inside, seed=seed, **given)], duration_ns)


def test_every_command_and_kernel_is_delayed() -> None:
    on = site()
    latencies: dict[str, Any] = {kind.__name__.lower(): Latency(ns) for kind, ns in EACH.items()}
    device = delayed(on, **latencies)
    for name, command in every_command(on.clock, device).items():
        begun = on.clock.now()
        assert device.estimate(command).duration_ns == EACH[type(command)] + 10, name
        assert ended(on.clock, device.submit(command)) == [begun + EACH[type(command)] + 10], name


def test_kinds_that_are_not_named_are_delayed_like_the_slower_of_read_and_write() -> None:
    on = site()
    device = delayed(on, read=Latency(1_000), write=Latency(2_000))
    expected = {Read: 1_000, Write: 2_000, Copy: 2_000, Launch: 2_000, Flush: 2_000}
    for name, command in every_command(on.clock, device).items():
        begun = on.clock.now()
        assert ended(on.clock, device.submit(command)) == [begun + expected[type(command)] + 10], name


def test_commands_of_different_queues_wait_at_the_same_time_and_those_of_one_queue_in_turn() -> None:
    on = site()
    device = delayed(on, read=Latency(1_000))
    region = device.alloc(64)
    reads = [device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)), queue) for queue in (0, 1, 2, 0)]
    assert ended(on.clock, *reads) == [1_010, 1_010, 1_010, 2_020]


def test_effects_appear_at_the_end() -> None:
    on = site()
    device = delayed(on, read=Latency(1_000))
    region, into = filled(on.clock, device, 64), np.zeros(64, dtype=np.uint8)
    begun = on.clock.now()
    read = device.submit(Read(region.all(), into))
    on.clock.wait_until(begun + 1_009)
    assert not into.any()
    assert ended(on.clock, read) == [begun + 1_010]
    assert into.all()


def tails(seed: int, count: int = 3_000) -> list[bool]:
    """Which of many reads take the longer latency."""
    on = Site()
    device = delayed(on, read=Latency(100, 100_000), seed=seed)
    region = device.alloc(1)
    begun = [on.clock.now()]
    for _ in range(count):
        begun += ended(on.clock, device.submit(Read(region.all(), np.empty(1, dtype=np.uint8))))
    took = np.diff(begun)
    assert set(took.tolist()) == {110, 100_010}
    return [bool(ns == 100_010) for ns in took]


def test_one_command_in_a_hundred_takes_the_longer_latency_and_the_seed_says_which() -> None:
    first = tails(1)
    assert 10 <= sum(first) <= 60  # 30 expected, standard deviation 5.4
    assert tails(1) == first
    assert tails(2) != first


def test_the_margin_of_an_estimate_covers_the_longer_latency() -> None:
    on = site()
    device = delayed(on, read=Latency(100, 100_000))
    estimate = device.estimate(Read(device.alloc(1).all(), np.empty(1, dtype=np.uint8)))
    assert (estimate.duration_ns, estimate.margin_ns) == (110, 99_900)


def test_latencies_are_multiplied_by_the_dilation(tmp_path: Path) -> None:
    path = write_machine(tmp_path, ["dram"])
    text = path.read_text().partition("\n[links.pcie]")[0].replace('reaches.cxl = ["cxl"]', "")
    path.write_text(text + 'wrap = [{ kind = "delayed", read_ns = 10_000, write_ns = 0 }]\n')
    with open_platform(path, clock="wall", dilation=100) as platform:
        device = platform.device("emu:dram")
        assert device.info.executors[0].paths[0].latency_ns == (100 + 10_000) * 100
        completion = device.submit(Read(device.alloc(8).all(), np.empty(8, dtype=np.uint8)))
        ended(platform.clock, completion)
        assert completion.ended_ns - completion.started_ns >= (10_000 + 1_100) * 100


def test_a_real_device_is_delayed_on_the_wall_clock() -> None:
    on = Site(clock=WallClock())
    device = wrapped(
        on,
        lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}),
        [lambda device, inside: Delayed(device, inside, Latency(300_000), Latency(200_000))],
    )
    region, into = device.alloc(64), np.zeros(64, dtype=np.uint8)
    write = device.submit(Write(region.all(), np.full(64, 5, dtype=np.uint8)))
    read = device.submit(Read(region.all(), into))
    ended(on.clock, write, read)
    assert write.ended_ns - write.started_ns >= 200_000
    assert read.ended_ns - read.started_ns >= 300_000
    assert (into == 5).all()
    device.close()


@pytest.mark.parametrize("numbers", [(-1, None), (10**10 + 1, None), (1.5, None), (True, None), (100, 99), (0, -1)])
def test_latencies_that_make_no_sense_are_refused(numbers: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigurationError, match="latency"):
        Latency(*numbers)


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_a_seed_that_is_none_is_refused(seed: int) -> None:
    with pytest.raises(ConfigurationError, match="seed"):
        delayed(site(), seed=seed)
