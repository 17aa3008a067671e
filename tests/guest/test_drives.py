"""NVMe drives of a real kernel: what the kernel and the drives say of themselves, and what a limit and an error do."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.guest.drives import block_path, drive_of, generic_path, sound
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.drivers.nvme_drives import nvme_drives
from tierloop.devices.drivers.nvme_probe import probe
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.tools.guest.hardware import Hardware
from tierloop.tools.guest.machine import Machine

SECTOR = 512
MIB = 1 << 20


@contextmanager
def raw(path: str) -> Iterator[tuple[int, mmap.mmap]]:
    """A descriptor past the page cache, and 64 KiB of memory on pages."""
    fd, memory = os.open(path, os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, 1 << 16)
    try:
        yield fd, memory
    finally:
        os.close(fd)


@contextmanager
def opened(path: str) -> Iterator[NvmeDevice]:
    device = open_nvme("nvme0", Site(clock=WallClock(), checker=HazardChecker()), {"path": path, "capacity": 8 * MIB})
    try:
        yield device
    finally:
        device.close()


def test_discovery_finds_the_drives_that_were_described(machine: Machine) -> None:
    found = {drive.serial: drive for drive in nvme_drives(HOST)}
    assert found.keys() >= {drive.serial for drive in machine.drives}
    for drive in machine.drives:
        shown = found[drive.serial]
        assert (shown.state, shown.transport) == ("live", "pcie")
        assert [namespace.nbytes for namespace in shown.namespaces] == [drive.mib << 20]
        assert [namespace.in_use for namespace in shown.namespaces] == [""]


def test_identify_says_what_was_described(machine: Machine) -> None:
    for drive in machine.drives:
        with opened(generic_path(drive.serial)) as device:
            identity = device.identity
            assert identity is not None
            assert identity.serial == drive.serial
            assert identity.capacity == drive.mib << 20


def test_a_probe_has_nothing_against_a_free_drive(machine: Machine) -> None:
    for drive in machine.drives:
        for path in (block_path(drive.serial), generic_path(drive.serial)):
            assert not [reason for reason in probe(path) if reason.fatal]


def test_smart_shows_a_warning_that_the_drive_gives(machine: Machine, hardware: Hardware) -> None:
    serial = sound(machine).serial
    with opened(generic_path(serial)) as device:
        hardware.warn(serial, 1 << 2)
        try:
            health = device.health()
            assert health is not None
            assert [warning for warning in health.warnings if "reliability" in warning]
        finally:
            hardware.restore(serial)
        health = device.health()
        assert health is not None
        assert not health.warnings


@pytest.mark.parametrize("nbytes", [512, 4096, 65536])
@pytest.mark.parametrize("offset", [0, 4096, 8 * MIB])
def test_what_was_written_past_the_page_cache_is_read(machine: Machine, nbytes: int, offset: int) -> None:
    with raw(block_path(sound(machine).serial)) as (fd, memory):
        wanted = os.urandom(nbytes)
        memory[:nbytes] = wanted
        assert os.pwritev(fd, [memoryview(memory)[:nbytes]], offset) == nbytes
        memory[:nbytes] = bytes(nbytes)
        assert os.preadv(fd, [memoryview(memory)[:nbytes]], offset) == nbytes
        assert memory[:nbytes] == wanted


def test_a_transfer_off_the_grid_is_refused(machine: Machine) -> None:
    with (
        raw(block_path(sound(machine).serial)) as (fd, memory),
        pytest.raises(OSError, match="Invalid argument") as refused,
    ):
        os.preadv(fd, [memoryview(memory)[:100]], 0)
    assert refused.value.errno == errno.EINVAL


def test_a_sector_that_cannot_be_read_is_enodata_and_its_neighbours_are_not(machine: Machine) -> None:
    for drive in machine.drives:
        for sector in drive.error_sectors:
            with raw(block_path(drive.serial)) as (fd, memory):
                view = memoryview(memory)[:4096]
                with pytest.raises(OSError, match="No data available") as refused:
                    os.preadv(fd, [view], sector * SECTOR)
                assert refused.value.errno == errno.ENODATA
                assert os.preadv(fd, [view], sector * SECTOR - 4096) == 4096
                assert os.preadv(fd, [view], sector * SECTOR + 4096) == 4096


def test_a_limit_of_requests_is_kept(machine: Machine, hardware: Hardware) -> None:
    serial, per_s, count = sound(machine).serial, 50, 60
    hardware.limit(serial, iops=per_s)
    try:
        with raw(block_path(serial)) as (fd, memory):
            began = time.monotonic()
            for at in range(count):
                os.preadv(fd, [memoryview(memory)[:4096]], at * 4096)
            assert time.monotonic() - began >= 0.8 * (count - per_s / 10) / per_s
    finally:
        hardware.restore(serial)


@pytest.mark.parametrize("slow", [False, True], ids=["as fast as it can", "slow"])
def test_sectors_are_lost_and_mended_while_a_drive_is_busy(machine: Machine, hardware: Hardware, slow: bool) -> None:
    """QEMU drains a drive to change what lies in its way, and lets go for that what a limit holds back."""
    drive = drive_of(machine, "drive that can be pulled out", lambda drive: drive.hotplug)
    over, errors = threading.Event(), list[int]()

    def read() -> None:
        with raw(block_path(drive.serial)) as (fd, memory):
            while not over.is_set():
                try:
                    os.preadv(fd, [memory], 8 * MIB)
                except OSError as error:
                    errors.append(error.errno or 0)

    if slow:
        hardware.limit(drive.serial, bytes_per_s=1 << 18)
    readers = [threading.Thread(target=read) for _ in range(4)]
    try:
        for reader in readers:
            reader.start()
        for _ in range(5):
            hardware.lose(drive.serial, [8 * MIB // SECTOR])
            hardware.lose(drive.serial, ())
    finally:
        over.set()
        hardware.restore(drive.serial)
        for reader in readers:
            reader.join(30)
    assert not any(reader.is_alive() for reader in readers)
    assert set(errors) <= {errno.ENODATA}
