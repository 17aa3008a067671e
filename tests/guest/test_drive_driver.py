"""The nvme driver on a real kernel: the conformance suite through io_uring, NVMe passthrough and plain calls.

The level `faults` has a back door: QEMU makes sectors unreadable, keeps commands from coming back, pulls the drive out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.guest.drives import APPEARS_S, block_path, drive_of, generic_path
from tierloop.devices import faulty_host
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Flush, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance import faults
from tierloop.devices.conformance.runner import Check, carry_out, carry_out_machine, checks_of
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.errors import DeviceError, Gone, MediaError
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.site import Site
from tierloop.tools.guest.hardware import DriveDoor, Hardware
from tierloop.tools.guest.machine import Drive, Machine

MIB = 1 << 20
LEVELS = ("identity", "memory", "ordering", "errors")
WAYS = {
    "block device, io_uring": (block_path, "io_uring", LEVELS),
    "passthrough, io_uring": (generic_path, "io_uring", LEVELS),
    "block device, plain calls": (block_path, "posix", ("memory",)),
    "passthrough, ioctl": (generic_path, "ioctl", ("memory",)),
}
CASES = [
    pytest.param(way, check, id=f"{way}: {level}: {name}")
    for way, (_, _, levels) in WAYS.items()
    for level in levels
    for name, check in checks_of(level)
]
FAULTS = [
    pytest.param(way, check, id=f"{way}: {name}") for way in list(WAYS)[:2] for name, check in checks_of("faults")
]
EXAMPLES = 3
"""Sequences of commands of the level `stateful`."""
ROUNDS = 20
"""Of the soak: emulated processors are slow."""
DEADLINE_S = 3.0


def fast(machine: Machine) -> Drive:
    """A drive that loses nothing and stays in its slot."""
    return drive_of(machine, "plain drive", lambda drive: not drive.error_sectors and not drive.hotplug)


def ended(site: Site, *completions: Completion) -> None:
    """Wait until all have ended, well or not."""
    site.clock.run_until(lambda: all(one.done for one in completions), site.clock.now() + 30_000_000_000)
    assert all(one.done for one in completions)


def new_site() -> Site:
    return Site(clock=WallClock(), checker=HazardChecker())


def open_on(site: Site, way: str, serial: str, **options: object) -> NvmeDevice:
    path, io, _ = WAYS[way]
    told = {"path": path(serial, APPEARS_S), "capacity": 8 * MIB, "queues": 2, "io": io, **options}
    return open_nvme("nvme0", site, told)


@pytest.fixture
def breaking(machine: Machine, hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """A drive that can be pulled out and has lost nothing yet; it is mended and plugged in anew behind each test.

    Anew, because a driver that gave a hung drive up keeps its descriptor, and with it its claim, until it exits.
    """
    monkeypatch.setattr(faults, "ROUNDS", ROUNDS)
    drive = drive_of(machine, "drive that can be pulled out", lambda drive: drive.hotplug)
    hardware.lose(drive.serial, ())
    yield drive
    hardware.restore(drive.serial)
    hardware.unplug(drive.serial)
    hardware.restore(drive.serial)
    block_path(drive.serial, APPEARS_S)


@pytest.mark.parametrize(("way", "check"), CASES)
def test_the_suite_holds(machine: Machine, way: str, check: Check) -> None:
    serial = fast(machine).serial
    carry_out(check, lambda site: open_on(site, way, serial), False, None, 0)


@pytest.mark.parametrize("way", list(WAYS)[:2])
def test_any_sequence_of_commands_agrees_with_a_dict(machine: Machine, way: str) -> None:
    serial = fast(machine).serial
    carry_out_machine(lambda site: open_on(site, way, serial), False, None, EXAMPLES, shrink=False)


@pytest.mark.parametrize(("way", "check"), FAULTS)
def test_the_suite_holds_while_the_hardware_fails(breaking: Drive, hardware: Hardware, way: str, check: Check) -> None:
    def opened(site: Site) -> NvmeDevice:
        device = open_on(site, way, breaking.serial, deadline_s=DEADLINE_S)
        faulty_host.offer(site, "nvme0", DriveDoor(hardware, breaking.serial, device.offset_of))
        return device

    carry_out(check, opened, False, None, 0)


def test_a_medium_error_names_the_device_and_the_rest_can_be_read(machine: Machine) -> None:
    drive = drive_of(machine, "drive with lost sectors", lambda drive: bool(drive.error_sectors))
    start = drive.error_sectors[0] * 512
    for way in list(WAYS)[:2]:
        site = new_site()
        device = open_on(site, way, drive.serial)
        region = device.adopt(0, 4 * MIB)
        into = np.empty(4096, dtype=np.uint8)
        refused = device.submit(Read(region.at(start, 4096), into))
        beside = device.submit(Read(region.at(start + 4096, 4096), into))
        ended(site, refused, beside)
        with pytest.raises(MediaError, match="nvme0"):
            refused.result()
        beside.result()
        device.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("passthrough")])
def test_a_flush_that_the_drive_refuses_is_no_success(breaking: Drive, hardware: Hardware, way: str) -> None:
    """By passthrough: behind a block device the kernel tries again, and the next one is good."""
    site = new_site()
    device = open_on(site, way, breaking.serial, deadline_s=DEADLINE_S)
    region = device.alloc(4096)
    hardware.refuse_a_flush(breaking.serial)
    written = device.submit(Write(region.all(), np.ones(4096, dtype=np.uint8)))
    flushed = device.submit(Flush(region.all()), after=[written])
    ended(site, written, flushed)
    written.result()
    with pytest.raises(DeviceError, match="nvme0"):
        flushed.result()
    device.close()


def test_what_was_flushed_is_there_when_a_drive_that_was_pulled_out_is_back(
    breaking: Drive, hardware: Hardware
) -> None:
    data = np.random.default_rng(5).integers(0, 256, 64 << 10, dtype=np.uint8)
    site = new_site()
    device = open_on(site, "block device, io_uring", breaking.serial, deadline_s=DEADLINE_S)
    region = device.alloc(data.nbytes)
    offset = device.offset_of(region)
    written = device.submit(Write(region.all(), data))
    flushed = device.submit(Flush(region.all()), after=[written])
    ended(site, written, flushed)
    flushed.result()
    hardware.unplug(breaking.serial)
    lost = device.submit(Read(region.all(), np.empty_like(data)))
    ended(site, lost)
    with pytest.raises(Gone):
        lost.result()
    device.close()
    hardware.restore(breaking.serial)
    site, into = new_site(), np.empty_like(data)
    device = open_on(site, "block device, io_uring", breaking.serial)
    read = device.submit(Read(device.adopt(offset, data.nbytes).all(), into))
    ended(site, read)
    read.result()
    assert np.array_equal(into, data)
    device.close()
