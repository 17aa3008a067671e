"""Curves of timed flash: latency against load, size of buffer and cache, suspends; all on given times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.machines import PROFILES, duration, number, open_machine
from tests.test_flash import SMALL, UNIT, units
from tests.test_flash_legality import BUFFERED
from tierloop.devices.commands import Read, Write
from tierloop.devices.errors import ConfigurationError, MediaError
from tierloop.devices.platform import Platform
from tierloop.emulators.device import EmulatedDevice
from tierloop.emulators.profile import find_profile, read_profile
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING

STRIPE = 4
LARGE = replace(SMALL, capacity=4096 * UNIT, stripes_per_block=24)


def arrivals(geometry: FlashGeometry, every_ns: int, count: int) -> list[int]:
    """The latency of writes of a stripe each that come every so many ns, to units one after the other."""
    model, latencies = FlashModel(geometry), []
    for i in range(count):
        model.advance(i * every_ns)
        latencies.append(model.access(NOTHING, units((i * STRIPE % geometry.units, STRIPE))).alone_ns)
    return latencies


def one_by_one(model: FlashModel, first: int, count: int, now: int = 0) -> list[int]:
    """The latency of writes of a stripe each from `now` on, each begun when the one before has ended."""
    latencies = []
    for i in range(count):
        model.advance(now)
        ranges = units(((first + i) * STRIPE % model.geometry.units, STRIPE))
        latencies.append(model.access(NOTHING, ranges).alone_ns)
        now += latencies[-1]
    return latencies


# -- the write buffer ---------------------------------------------------------------------------------------------


def test_a_burst_is_taken_in_at_once_until_the_buffer_is_full_and_then_at_the_rate_of_the_dies() -> None:
    assert arrivals(BUFFERED, 0, 20) == [0] * 8 + [400_000] * 4 + [800_000] * 4 + [1_200_000] * 4


@pytest.mark.parametrize("stripes", [1, 2, 4, 8, 13])
def test_a_larger_buffer_takes_in_a_larger_burst(stripes: int) -> None:
    latencies = arrivals(replace(LARGE, buffer_nbytes=stripes * STRIPE * UNIT), 0, 30)
    assert latencies.index(400_000) == stripes
    assert latencies == sorted(latencies)


def test_under_a_load_that_the_dies_can_bear_no_write_waits_and_above_it_waiting_grows() -> None:
    geometry = replace(LARGE, buffer_nbytes=BUFFERED.buffer_nbytes)
    assert set(arrivals(geometry, 100_000, 200)) == {0}  # four dies at 400,000 ns: a stripe each 100,000 ns
    above = [arrivals(geometry, every, 200)[-1] for every in (90_000, 60_000, 30_000, 0)]
    assert above == sorted(above)
    assert above[-1] == (200 - 8) // 4 * 400_000


def test_a_drive_with_a_buffer_keeps_the_rate_of_one_without() -> None:
    count = 400
    with_buffer = FlashModel(replace(LARGE, buffer_nbytes=BUFFERED.buffer_nbytes))
    assert sum(one_by_one(with_buffer, 0, count)) == (count - 8) * 400_000 // 4


def test_what_lies_in_the_buffer_is_read_without_sensing() -> None:
    model = FlashModel(BUFFERED)
    model.access(NOTHING, units((0, 4)))
    model.advance(399_999)
    assert model.plan(units((0, 1)), NOTHING).alone_ns == 4_000
    model.advance(400_000)
    assert model.plan(units((0, 1)), NOTHING).alone_ns == 54_000


# -- the cache ----------------------------------------------------------------------------------------------------


CLIFF = replace(LARGE, slc_percent=20, slc_program_ns=100_000, slc_read_ns=20_000, idle_ns=2_000_000)


def test_writes_fall_off_a_cliff_when_as_much_was_written_as_the_cache_holds() -> None:
    model = FlashModel(CLIFF)
    stripes = CLIFF.slc_nbytes // (STRIPE * UNIT)
    latencies = one_by_one(model, 0, stripes + 8)
    assert set(latencies[:stripes]) == {104_000}
    assert min(latencies[stripes : stripes + 4]) > 20 * 104_000
    assert model.health.folded > 0


def test_the_cliff_comes_later_in_proportion_to_the_cache() -> None:
    cliffs = []
    for percent in (5, 10, 20, 40):
        geometry = replace(CLIFF, slc_percent=percent)
        latencies = one_by_one(FlashModel(geometry), 0, 600)
        cliffs.append(next(i for i, ns in enumerate(latencies) if ns > 104_000) * STRIPE * UNIT)
        assert cliffs[-1] == geometry.slc_nbytes
    assert cliffs == sorted(set(cliffs))


def test_behind_the_cliff_the_drive_is_slower_than_without_a_cache() -> None:
    plain = replace(LARGE, buffer_nbytes=STRIPE * UNIT)
    cached = replace(CLIFF, buffer_nbytes=STRIPE * UNIT)
    stripes = CLIFF.slc_nbytes // (STRIPE * UNIT)
    steady = []
    for geometry in (plain, cached):
        model = FlashModel(geometry)
        one_by_one(model, 0, stripes)
        steady.append(sum(one_by_one(model, stripes, 4 * stripes)))
    assert steady[1] > steady[0]


@pytest.mark.parametrize(("idle_ns", "recovers"), [(0, 0), (2_000_000, 0), (30_000_000, 1)])
def test_a_cache_that_had_time_to_fold_takes_in_as_much_again(idle_ns: int, recovers: int) -> None:
    model = FlashModel(CLIFF)
    stripes = CLIFF.slc_nbytes // (STRIPE * UNIT)
    took = sum(one_by_one(model, 0, stripes))
    after = one_by_one(model, stripes, stripes + 1, took + idle_ns)
    assert next(i for i, ns in enumerate(after) if ns > 1_000_000) == recovers * stripes


def test_the_longer_the_drive_was_idle_the_more_it_folded() -> None:
    folded = []
    for idle_ns in range(0, 24_000_000, 2_000_000):
        model = FlashModel(CLIFF)
        took = sum(one_by_one(model, 0, CLIFF.slc_nbytes // (STRIPE * UNIT)))
        model.advance(took + idle_ns)
        folded.append(model.health.folded)
    assert folded == sorted(folded)
    assert len(set(folded)) == 1 + CLIFF.slc_blocks
    assert folded[-1] == CLIFF.slc_nbytes


def test_a_read_that_comes_while_the_drive_folds_waits_for_its_die() -> None:
    model = FlashModel(CLIFF)
    took = sum(one_by_one(model, 0, CLIFF.slc_nbytes // (STRIPE * UNIT)))
    idle = model.plan(units((0, 1)), NOTHING).alone_ns
    model.advance(took + CLIFF.idle_ns + 100_000)
    assert idle == 20_000 + 4_000
    assert model.access(units((0, 1)), NOTHING).alone_ns > 1_000_000


def test_the_client_drive_falls_from_the_rate_of_its_cache_to_that_of_folding() -> None:
    memory = read_profile(find_profile("nvme-client"), capacity=1 << 33).memory
    assert memory is not None
    assert memory.flash is not None
    model, chunk = FlashModel(memory.flash), 1 << 25
    times, now = [], 0
    for start in range(0, 2 * memory.flash.slc_nbytes, chunk):
        model.advance(now)
        times.append(model.access(NOTHING, np.array([[start, chunk]])).alone_ns)
        now += times[-1]
    fast = memory.flash.slc_nbytes // chunk
    assert fast * chunk / sum(times[:fast]) > 7  # bytes/ns: more than its link takes
    assert fast * chunk / sum(times[fast:]) < 1.7  # less than programming several bits per cell


# -- suspended programs -------------------------------------------------------------------------------------------


def read_latencies(suspends: int, every_ns: int) -> list[int]:
    """Latencies of reads from full blocks, one every 70,000 ns, while a stripe is written every so many ns."""
    geometry = replace(LARGE, buffer_nbytes=64 * STRIPE * UNIT, suspends=suspends, suspend_ns=10_000 * bool(suspends))
    model, order = FlashModel(geometry), np.random.default_rng(0)
    model.access(NOTHING, units((0, 2048)))
    model.advance(now := 10**9)
    latencies = []
    next_write, stripe = now, 512
    for _ in range(300):
        now += 70_000
        while every_ns and next_write <= now:
            model.advance(next_write)
            model.access(NOTHING, units((stripe * STRIPE, STRIPE)))
            next_write, stripe = next_write + every_ns, stripe + 1
        model.advance(now)
        latencies.append(model.access(units((int(order.integers(1920)), 1)), NOTHING).alone_ns)
    return latencies


def test_suspending_bounds_how_long_a_read_waits_for_programs() -> None:
    alone, waiting, suspending = read_latencies(0, 0), read_latencies(0, 110_000), read_latencies(8, 110_000)
    assert max(alone) < 54_000 + 54_000
    assert max(waiting) > 400_000
    assert np.mean(waiting) > 2 * np.mean(suspending)
    assert sorted(suspending)[-3] <= 10_000 + 2 * 54_000


def test_reads_wait_longer_the_more_is_written() -> None:
    means = [float(np.mean(read_latencies(0, every))) for every in (0, 800_000, 400_000, 200_000, 110_000)]
    assert means == sorted(means)
    assert means[-1] > 3 * means[0]


def test_one_program_lets_only_so_many_reads_go_first() -> None:
    ends = {}
    for suspends in (1, 2, 3):
        geometry = replace(LARGE, buffer_nbytes=4 * STRIPE * UNIT, suspends=suspends, suspend_ns=10_000)
        model = FlashModel(geometry)
        model.access(NOTHING, units((0, 24 * 4 * STRIPE)))  # a block of each die
        model.advance(10**9)
        model.access(NOTHING, units((24 * 4 * STRIPE, STRIPE)))
        model.advance(10**9 + 100_000)
        ends[suspends] = [model.access(units((3, 1)), NOTHING).alone_ns for _ in range(5)]
    first = 10_000 + 54_000
    assert ends[3][:3] == [first, first + 50_000, first + 100_000]
    assert ends[3][3] > 400_000
    assert [sum(ns < 300_000 for ns in found) for found in ends.values()] == [1, 2, 3]


def test_two_small_reads_meet_on_a_die_and_do_not_on_two() -> None:
    model = FlashModel(BUFFERED)
    model.access(NOTHING, units((0, 96)))
    model.advance(10**9)
    assert model.access(units((0, 1)), NOTHING).alone_ns == 54_000
    assert model.access(units((16, 1)), NOTHING).alone_ns == 104_000  # the same die
    assert model.access(units((8, 1)), NOTHING).alone_ns == 54_000  # a die behind the other channel


def test_on_an_idle_drive_a_timed_read_takes_as_long_as_a_plain_one() -> None:
    for ranges in (units((0, 1)), units((7, 30)), units((3, 1), (90, 2), (41, 9)), units((0, 96))):
        works = []
        for geometry in (SMALL, BUFFERED):
            model = FlashModel(geometry)
            model.access(NOTHING, units((0, 96)))
            if model.timed:
                model.advance(10**9)
            works.append(model.access(ranges, NOTHING).alone_ns)
        assert works[0] == works[1]


# -- retries ------------------------------------------------------------------------------------------------------

TIRED = replace(SMALL, rated_cycles=1_000, retry_ppm=200_000, retries=5, retention_ns=10**12, seed=11)


def retries(geometry: FlashGeometry, cycles: int, age_ns: int = 0) -> int:
    """Extra sensing rounds of 2,000 reads of a drive so worn, of data so old."""
    model = FlashModel(geometry)
    model.access(NOTHING, units((0, 96)))
    model.wear(cycles)
    model.advance(age_ns)
    for unit in np.random.default_rng(0).integers(0, 96, 2_000).tolist():
        model.access(units((unit, 1)), NOTHING)
    return model.health.retries


def test_a_new_drive_needs_no_retries_and_a_worn_one_as_many_as_it_says() -> None:
    found = [retries(TIRED, cycles) for cycles in (0, 250, 500, 1_000, 2_000)]
    assert found[0] == 0
    for n, chance in zip(found[1:], (0.05, 0.1, 0.2, 0.4), strict=True):
        rounds = sum(chance**k for k in range(1, 6))
        assert n == pytest.approx(2_000 * rounds, rel=0.25)


def test_old_data_needs_retries_as_if_its_block_were_worn() -> None:
    assert retries(TIRED, 0, age_ns=10**12) == pytest.approx(retries(TIRED, 1_000), rel=0.2)


def test_the_seed_alone_decides_which_reads_are_tried_again() -> None:
    def latencies(seed: int) -> list[int]:
        model = FlashModel(replace(TIRED, seed=seed))
        model.access(NOTHING, units((0, 96)))
        model.wear(1_000)
        return [model.access(units((unit, 1)), NOTHING).alone_ns for unit in range(96)]

    assert latencies(1) == latencies(1) != latencies(2)
    assert set(latencies(1)) <= {54_000 + 50_000 * rounds for rounds in range(6)}
    assert len(set(latencies(1))) > 1


# -- the emulated drive -------------------------------------------------------------------------------------------

PAGES = 32_768
"""Bytes of a stripe of the drive in machines.py."""


def drive_with(**options: int) -> dict[str, str]:
    """That drive with more to it."""
    more = "".join(number(key, value) for key, value in options.items())
    return {"nvme": PROFILES["nvme"].replace("[memory.flash]\n", "[memory.flash]\n" + more)}


def emulated(machine: Platform) -> EmulatedDevice:
    nvme = machine.devices["emu:nvme"]
    assert isinstance(nvme, EmulatedDevice)
    return nvme


def test_an_emulated_drive_with_a_buffer_takes_a_burst_at_the_rate_of_its_link(tmp_path: Path) -> None:
    took = {}
    for name, profiles in (("plain", {}), ("buffered", drive_with(buffer_nbytes=16 * PAGES))):
        (tmp_path / name).mkdir()
        with open_machine(tmp_path / name, profiles=profiles) as machine:
            nvme = emulated(machine)
            disk = nvme.alloc(1 << 20)
            command = Write(disk.at(0, 8 * PAGES), np.zeros(8 * PAGES, np.uint8))
            expected = nvme.estimate(command).duration_ns
            took[name] = duration(machine, nvme, command)
            assert took[name] == expected
    assert took["buffered"] < 8 * PAGES // 5 + 10_000 < took["plain"]


def test_reads_of_an_emulated_drive_meet_programs_on_their_die(tmp_path: Path) -> None:
    with open_machine(tmp_path, profiles=drive_with(buffer_nbytes=64 * PAGES)) as machine:
        nvme = emulated(machine)
        disk = nvme.alloc(1 << 21)
        duration(machine, nvme, Write(disk.at(0, 8 * PAGES), np.zeros(8 * PAGES, np.uint8)))
        machine.clock.wait_until(10**9)
        read = Read(disk.at(0, 4096), np.zeros(4096, np.uint8))
        idle = duration(machine, nvme, read)
        duration(machine, nvme, Write(disk.at(1 << 20, 8 * PAGES), np.zeros(8 * PAGES, np.uint8)))
        assert duration(machine, nvme, read) > idle + 300_000


def test_an_emulated_drive_whose_reserve_is_used_up_refuses_writes_and_still_reads(tmp_path: Path) -> None:
    with open_machine(tmp_path, profiles=drive_with(rated_cycles=1, reserve_blocks=1)) as machine:
        nvme = emulated(machine)
        disk = nvme.alloc(1 << 23)
        assert isinstance(nvme.firmware, FlashModel)
        nvme.firmware.wear(1)
        nvme.firmware.age(4)
        assert nvme.firmware.read_only
        failed = nvme.submit(Write(disk.at(0, 4096), np.zeros(4096, np.uint8)))
        machine.clock.run_until(lambda: failed.done, 1 << 60)
        with pytest.raises(MediaError, match="read-only: the last spare block is used up"):
            failed.result()
        assert duration(machine, nvme, Read(disk.at(0, 4096), np.zeros(4096, np.uint8))) > 50_000


def test_an_option_out_of_range_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"memory\.flash: buffer_nbytes 5 is less than a stripe"):
        open_machine(tmp_path, profiles=drive_with(buffer_nbytes=5))
    with pytest.raises(ConfigurationError, match="bits_per_cell"):
        open_machine(tmp_path, profiles=drive_with(bits_per_cell=9))
