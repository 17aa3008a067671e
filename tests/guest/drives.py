"""NVMe drives of a guest, looked up by serial number: their numbers change from boot to boot, and after a plug."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tierloop.devices.drivers.nvme_drives import NvmeNamespace, nvme_drives
from tierloop.devices.errors import NotPresent
from tierloop.devices.system import HOST
from tierloop.tools.guest.machine import Drive, Machine

APPEARS_S = 30.0


def drive_of(machine: Machine, what: str, fits: Callable[[Drive], bool] = lambda _: True) -> Drive:
    """The first drive of a machine that fits; skips the test where there is none, saying what it would be."""
    for drive in machine.drives:
        if fits(drive):
            return drive
    pytest.skip(f"this machine has no {what}")


def sound(machine: Machine) -> Drive:
    """A drive of which every sector can be read."""
    return drive_of(machine, "drive without lost sectors", lambda drive: not drive.error_sectors)


def namespace(serial: str, wait_s: float = 0.0) -> NvmeNamespace:
    """The first namespace of a drive; raises NotPresent where it does not appear in time."""
    deadline = time.monotonic() + wait_s
    while True:
        for drive in nvme_drives(HOST):
            if drive.serial == serial and drive.state == "live" and drive.namespaces:
                found = drive.namespaces[0]
                if found.block and found.generic:
                    return found
        if time.monotonic() >= deadline:
            raise NotPresent("guest", "nvme", f"no live drive {serial}; there are {nvme_drives(HOST)}")
        time.sleep(0.05)


def block_path(serial: str, wait_s: float = 0.0) -> str:
    """Its block device."""
    found = namespace(serial, wait_s).block
    assert found is not None
    return found


def generic_path(serial: str, wait_s: float = 0.0) -> str:
    """Its generic character device, for passthrough."""
    found = namespace(serial, wait_s).generic
    assert found is not None
    return found
