"""Faulty: fails when asked to or by its seed, and what it fails by its seed goes through at the next try."""

from __future__ import annotations

import numpy as np
import pytest

from tests.wrapping import FAR, ended, failed, reference, site
from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.conformance import run
from tierloop.devices.device import Device
from tierloop.devices.errors import Cancelled, ConfigurationError, Gone, MediaError, Timeout
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.devices.wrappers import Faulty


def faulty(on: Site, **options: int) -> Faulty:
    """The reference device inside a Faulty."""
    device = reference(on, [lambda device, inside: Faulty(device, inside, **options)])
    assert isinstance(device, Faulty)
    return device


def opened(on: Site) -> Device:
    device = faulty(on)
    assert device.info  # the back door is offered when the device is first looked at
    return device


@pytest.mark.parametrize("level", ["envelope", "faults"])
def test_any_device_inside_can_be_put_through_the_fault_level(level: str) -> None:
    report = run(opened, [level], virtual=True)
    assert report.passed, str(report)
    assert level == "envelope" or all(r.outcome == "passed" for r in report.results), str(report)


def test_lost_bytes_fail_whatever_reads_them_and_nothing_else() -> None:
    on = site()
    device = faulty(on)
    region, other = device.alloc(4096), device.alloc(4096)
    write_bytes(on.clock, device, region.all(), bytes([7]) * 4096)
    device.unreadable(region, 1000, 10)
    reading = device.submit(Read(region.at(0, 1001), np.zeros(1001, dtype=np.uint8)))
    copying = device.submit(Copy(region.all(), other.all()))
    for completion in (reading, copying):
        error = failed(on.clock, completion)
        assert isinstance(error, MediaError)
        assert "[1000, 1010)" in str(error)
    assert read_bytes(on.clock, device, other.all()).tolist() == [0] * 4096
    for offset, nbytes in ((0, 1000), (1010, 3086)):
        assert read_bytes(on.clock, device, region.at(offset, nbytes)).tolist() == [7] * nbytes
    device.close()


def test_a_region_that_is_freed_takes_its_lost_bytes_with_it() -> None:
    on = site()
    device = faulty(on)
    region = device.alloc(64)
    device.unreadable(region, 0, 64)
    device.free(region)
    assert read_bytes(on.clock, device, device.alloc(64).all()).tolist() == [0] * 64
    device.close()


def test_a_command_that_hangs_is_given_up_at_its_deadline_and_the_device_with_it() -> None:
    on = site()
    device = faulty(on, deadline_ns=5_000)
    region = device.alloc(64)
    device.hang()
    hanging = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)))
    after = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), after=[hanging])
    assert isinstance(failed(on.clock, hanging), Timeout)
    assert hanging.ended_ns == 5_000
    assert isinstance(failed(on.clock, after), Cancelled)
    with pytest.raises(Gone, match="did not come back"):
        device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)))
    device.close()


def test_what_the_seed_fails_goes_through_at_the_next_try() -> None:
    on = site()
    device = faulty(on, read_per_million=300_000, write_per_million=300_000, seed=5)
    region, wrong = device.alloc(64), 0
    for value in range(100):
        data = np.full(64, value, dtype=np.uint8)
        for command in (Write(region.all(), data), Read(region.all(), into := np.zeros(64, dtype=np.uint8))):
            if isinstance(failed(on.clock, device.submit(command)), MediaError):
                wrong += 1
                ended(on.clock, device.submit(command))
        assert into.tolist() == data.tolist()
    assert wrong == device.failed
    assert 20 < wrong < 100
    device.close()


def test_a_command_that_fails_when_one_before_it_ends_is_ended_once() -> None:
    on = site()
    device, other = faulty(on, read_per_million=1_000_000), reference(on, [], name="emu:other")
    region, first = device.alloc(64), other.alloc(64)
    written = other.submit(Write(first.all(), np.zeros(64, dtype=np.uint8)))
    reading = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), after=[written])
    behind = device.submit(Write(region.all(), np.zeros(64, dtype=np.uint8)))
    error = failed(on.clock, reading)
    assert isinstance(error, MediaError)
    assert f"a read of [0, 64) of {region} failed" in str(error)
    ended(on.clock, written, behind)
    device.free(region)
    device.close()


def test_a_region_that_takes_the_place_of_a_freed_one_is_failed_like_any_other() -> None:
    on = site()
    device = faulty(on, read_per_million=1_000_000)
    for _ in range(3):
        region = device.alloc(64)
        assert isinstance(failed(on.clock, device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)))), MediaError)
        device.free(region)
    assert device.failed == 3
    assert not device._failed_before, "what is freed is forgotten"
    device.close()


def test_the_same_seed_fails_the_same_commands() -> None:
    def story(seed: int) -> list[bool]:
        on = site()
        device = faulty(on, read_per_million=200_000, seed=seed)
        region = device.alloc(640)
        commands = [Read(region.at(10 * i, 10), np.zeros(10, dtype=np.uint8)) for i in range(64)]
        told = [failed(on.clock, device.submit(command)) is not None for command in commands]
        device.close()
        return told

    assert story(1) == story(1)
    assert story(1) != story(2)
    assert any(story(1))


def test_a_device_that_is_pulled_out_answers_nothing() -> None:
    on = site()
    device = faulty(on)
    region = device.alloc(64)
    under_way = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)))
    device.unplug()
    assert isinstance(failed(on.clock, under_way), Gone)
    for call in (lambda: device.alloc(1), lambda: device.free(region)):
        with pytest.raises(Gone, match="pulled out"):
            call()
    assert on.clock.run_until(lambda: under_way.done, FAR)
    device.close()


@pytest.mark.parametrize(
    "options",
    [{"read_per_million": 1_000_001}, {"write_per_million": -1}, {"seed": -1}, {"deadline_ns": 0}, {"seed": True}],
)
def test_options_outside_their_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        faulty(site(), **options)
