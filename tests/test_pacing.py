"""Pacing of emulated devices: who keeps a pace, what moves its end, and what is promised of lateness and traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machines import finish, open_machine
from tierloop.devices.commands import Command, Copy, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Chase, Gather
from tierloop.devices.kernels.pace import SPINS, Pace
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.emulators import device as emulated
from tierloop.emulators.numerics import ASIDE_NBYTES, COPY_EARLY_NS, COPY_MARGIN
from tierloop.emulators.pacing import late_start, measure_latency, measure_rate, pace_of
from tierloop.emulators.promises import BUCKETS, Promises
from tierloop.emulators.store import Store

LARGE = 2 * ASIDE_NBYTES


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that were given a pace."""
    seen: list[Command] = []

    def spy(length_ns: int, command: Command, dilation: int) -> Pace:
        seen.append(command)
        return pace_of(length_ns, command, dilation)

    monkeypatch.setattr(emulated, "pace_of", spy)
    return seen


def test_on_the_wall_clock_cores_keep_a_pace_and_engines_do_not(tmp_path: Path, paced: list[Command]) -> None:
    data = np.random.default_rng(0).integers(0, 256, LARGE, dtype=np.uint8)
    with open_machine(tmp_path, clock="wall", dilation=50) as machine:
        dram, gpu = machine.devices["emu:dram"], machine.devices["emu:gpu"]
        near, card, far = (machine.devices[f"emu:{name}"].alloc(2 * LARGE) for name in ("dram", "cxl", "gpu"))
        write_bytes(machine.clock, dram, near.at(0, LARGE), data)
        by_cores: list[Command] = [
            Copy(near.at(0, LARGE), card.at(0, LARGE)),
            Launch(Gather(), ((card.at(0, LARGE),),), ((card.at(LARGE, LARGE),),)),
        ]
        for command in by_cores:
            finish(machine, dram.submit(command))
        by_engine = gpu.submit(Copy(near.at(0, LARGE), far.at(0, LARGE)), 2)
        on_gpu = gpu.submit(Launch(Gather(), ((far.at(0, LARGE),),), ((far.at(LARGE, LARGE),),)), 0, [by_engine])
        finish(machine, by_engine, on_gpu)
        assert paced[1:] == by_cores  # the first was the write
        assert isinstance(paced[0], Write)
        assert np.array_equal(read_bytes(machine.clock, dram, card.at(LARGE, LARGE)), data)
        assert np.array_equal(read_bytes(machine.clock, gpu, far.at(LARGE, LARGE), 4), data)


def test_small_transfers_and_the_virtual_clock_need_no_pace(tmp_path: Path, paced: list[Command]) -> None:
    with open_machine(tmp_path, clock="wall", dilation=50) as machine:
        near = machine.devices["emu:dram"].alloc(64)
        write_bytes(machine.clock, machine.devices["emu:dram"], near.all(), bytes(64))
    with open_machine(tmp_path) as machine:
        near = machine.devices["emu:dram"].alloc(LARGE)
        write_bytes(machine.clock, machine.devices["emu:dram"], near.all(), bytes(LARGE))
    assert paced == []


def test_only_accesses_that_wait_for_each_other_are_timed_one_by_one() -> None:
    chase, gather = Launch(Chase(), (), ()), Launch(Gather(), (), ())
    assert [int(pace_of(1000, command, 7).places[SPINS]) for command in (chase, gather)] == [1, 0]


def test_a_pace_is_told_when_somebody_else_takes_a_share(tmp_path: Path) -> None:
    class Told:
        def __init__(self) -> None:
            self.ends: list[int] = []

        def end_in(self, ns: int) -> None:
            self.ends.append(ns)

    with open_machine(tmp_path) as machine:
        gpu, told = machine.devices["emu:gpu"], Told()
        near, far = machine.devices["emu:dram"].alloc(2_000_000, phantom=True), gpu.alloc(2_000_000, phantom=True)
        first = gpu.submit(Copy(near.at(0, 1_000_000), far.at(0, 1_000_000)), 2)
        (job,) = gpu._jobs.values()  # type: ignore[attr-defined]  # where the pace of a command is kept
        job.pace = told
        machine.clock.wait_until(100_000)
        second = gpu.submit(Copy(near.at(1_000_000, 50_000), far.at(1_000_000, 50_000)), 3)
        finish(machine, first, second)
        # half of it was done; beside the second it goes at half the speed for 20 µs, then the rest is 10 µs late
        assert told.ends == [200_000 + 800, 90_000 + 800]


def ended(site: Site, started_ns: int, overrun_ns: int, nbytes: int = 0) -> Completion:
    """A completion of an emulated read of `nbytes`, which is all that promises look at."""
    from tierloop.devices.queues import QueueSet

    store = Store("emu:x", 1 << 30, 1, False)
    command = Read(store.alloc(max(nbytes, 1), False).at(0, nbytes), np.empty(nbytes, dtype=np.uint8))
    done = QueueSet("emu:x", 1, 4, site, lambda _: None).submit(command, 0, (), _traffic(command))
    done.started_ns, done.overrun_ns = started_ns, overrun_ns
    return done


def _traffic(command: Command) -> Any:
    from tierloop.devices.commands import Traffic

    return Traffic(command)


def test_lateness_is_counted_per_queue_in_powers_of_two() -> None:
    site = Site()
    promises = Promises(site)
    for overrun in (0, 1, 2, 3, 1000, 1024, 1025, 1 << 60):
        promises.ended(ended(site, 0, overrun), 1 << 62)
    counts = site.lateness["emu:x", 0]
    assert {k: count for k, count in enumerate(counts) if count} == {0: 2, 1: 1, 2: 1, 10: 2, 11: 1, BUCKETS - 1: 1}
    assert [site.late_ns(share) for share in (0.25, 0.5, 0.75, 0.8)] == [1, 4, 1024, 2048]


def test_emulators_that_move_more_than_the_host_leaves_them_make_a_run_invalid() -> None:
    site = Site(shared={"host_bytes_per_s": 3_000_000_000})
    promises = Promises(site)
    promises.ended(ended(site, 0, 0, 200_000_000), 100_000_000)
    assert site.interference == pytest.approx(2 / 3)
    assert site.invalid == []
    promises.ended(ended(site, 0, 0, 2_000_000), 100_000_000)
    (reason,) = site.invalid
    assert "moved 2.0 of the 3.0 GB/s" in reason
    promises.ended(ended(site, 0, 0, 1), 200_000_000)
    assert site.invalid == []
    promises.restart()
    assert (site.interference, site.lateness) == (0.0, {})


def test_a_burst_that_caches_take_is_no_reason() -> None:
    site = Site(shared={"host_bytes_per_s": 1_000_000_000})
    Promises(site).ended(ended(site, 0, 0, 100_000_000), 50_000_000)
    assert site.invalid == []


def test_a_paced_read_is_never_faster_than_its_rate() -> None:
    buffer = np.ones(1 << 20, dtype=np.uint8)
    for tile_nbytes in (1 << 10, 1 << 16, 1 << 20):
        achieved, worst_ns = measure_rate(1 << 21, tile_nbytes, 1_000_000_000, buffer)
        assert 0 < achieved <= 1_000_010_000
        assert worst_ns >= 0


def test_an_injected_latency_never_ends_before_its_time() -> None:
    errors = measure_latency(1_000, 200)
    assert errors.shape == (200,)
    assert errors.min() >= 0


def test_what_a_kernel_writes_is_in_its_place_when_its_time_has_come(tmp_path: Path) -> None:
    with open_machine(tmp_path, clock="wall", dilation=50) as machine:
        dram = machine.devices["emu:dram"]
        numerics = dram._numerics  # type: ignore[attr-defined]  # shared by the devices of a site
        region = dram.alloc(128)
        write_bytes(machine.clock, dram, region.at(0, 64), bytes(range(64)))
        gather = Launch(Gather(), ((region.at(0, 64),),), ((region.at(96, 32), region.at(64, 32)),))
        aside: list[Any] = []
        outcomes: list[Any] = []
        numerics.begin("emu:dram", gather, aside, outcomes.append).result(60)
        assert read_bytes(machine.clock, dram, region.at(64, 64)).tolist() == [0] * 64
        assert numerics.settle("emu:dram", gather, aside, outcomes[0]) == (0, None)
        expected = [*range(32, 64), *range(32)]
        assert read_bytes(machine.clock, dram, region.at(64, 64)).tolist() == expected


def test_a_large_transfer_of_an_engine_begins_late_however_its_end_moves(tmp_path: Path) -> None:
    with open_machine(tmp_path, clock="wall", dilation=50) as machine:
        dram = machine.devices["emu:dram"]
        numerics = dram._numerics  # type: ignore[attr-defined]  # shared by the devices of a site
        region = dram.alloc(LARGE)
        write = Write(region.all(), np.ones(LARGE, dtype=np.uint8))
        numerics._host_bytes_per_s = 10_000_000_000
        lead_ns = numerics.lead_ns(write)
        assert lead_ns == COPY_EARLY_NS + COPY_MARGIN * 2 * LARGE // 10
        pace = late_start(1 << 60, lead_ns)
        future = numerics.begin("emu:dram", write, [], lambda _: None, pace)
        assert not read_bytes(machine.clock, dram, region.all()).any()
        pace.end_in(lead_ns)
        future.result(60)
        assert read_bytes(machine.clock, dram, region.all()).all()
