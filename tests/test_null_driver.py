"""The null device: every command takes the same time and does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tierloop.devices.clocks import Clock, VirtualClock, WallClock
from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write
from tierloop.devices.drivers.null import Null, open_null
from tierloop.devices.errors import ConfigurationError, Gone, OutOfMemory, Unsupported
from tierloop.devices.kernels.contract import Dense, Gather
from tierloop.devices.site import Site
from tierloop.devices.waiting import wait


def opened(clock: Clock | None = None, **options: Any) -> tuple[Clock, Null]:
    clock = clock or VirtualClock()
    return clock, open_null("emu:null", Site(clock), options)


def test_every_command_takes_the_same_time() -> None:
    clock, device = opened(duration_ns=100)
    small, large = device.alloc(8), device.alloc(1 << 30)
    commands: list[Command] = [
        Read(small.all(), np.zeros(8, dtype=np.uint8)),
        Write(small.all(), np.zeros(8, dtype=np.uint8)),
        Copy(large.at(0, 1 << 29), large.at(1 << 29, 1 << 29)),
        Launch(Gather(), ((small.all(),),), ((large.at(0, 8),),)),
        Flush(large.all()),
    ]
    ended = []
    for command in commands:
        completion = device.submit(command)
        assert device.estimate(command).duration_ns == 100
        wait(clock, completion)
        ended.append(completion.ended_ns)
    assert ended == [100, 200, 300, 400, 500]


def test_queues_run_beside_each_other_and_after_orders_them() -> None:
    clock, device = opened(duration_ns=10)
    region = device.alloc(8)
    first = device.submit(Flush(region.all()))
    beside = device.submit(Flush(region.all()), queue=1)
    behind = device.submit(Flush(region.all()), queue=2, after=[first, beside])
    wait(clock, [first, beside, behind])
    assert [c.ended_ns for c in (first, beside, behind)] == [10, 10, 20]


def test_it_moves_nothing_and_computes_nothing() -> None:
    clock, device = opened()
    into = np.full(8, 3, dtype=np.uint8)
    calls: list[object] = []
    wait(clock, device.submit(Read(device.alloc(8).all(), into)))
    dense = device.submit(Launch(Dense("x", 5, 0, 0, lambda reads, writes: calls.append(reads)), (), ()))
    wait(clock, dense)
    assert into.tolist() == [3] * 8
    assert calls == []
    assert dense.flops == 0


def test_it_allocates_more_than_any_host_has_but_not_more_than_its_capacity() -> None:
    _, device = opened(capacity=1 << 50)
    device.alloc(1 << 49, phantom=True)
    with pytest.raises(OutOfMemory):
        device.alloc((1 << 49) + 1)


def test_it_runs_on_a_wall_clock_too() -> None:
    clock, device = opened(WallClock(), duration_ns=1000)
    completion = device.submit(Flush(device.alloc(8).all()))
    wait(clock, completion)
    assert completion.ended_ns - completion.started_ns >= 1000


def test_memories_that_it_was_not_told_of_are_not_reached() -> None:
    site = Site(VirtualClock())
    near, far = open_null("emu:near", site, {"reaches": {"emu:far": []}}), open_null("emu:far", site, {})
    command = Copy(far.alloc(8).all(), near.alloc(8).all())
    wait(site.clock, near.submit(command))
    with pytest.raises(Unsupported):
        far.submit(command)


def test_closing_ends_what_is_running() -> None:
    clock, device = opened()
    completion = device.submit(Flush(device.alloc(8).all()))
    device.close()
    clock.wait_until(10_000)
    assert isinstance(completion.error, Gone)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigurationError, match="emu:null: option 'latency' is unknown"):
        opened(latency=5)
