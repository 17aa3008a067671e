"""A device belongs to the process that opened it: a forked child has neither its threads nor a claim of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cxl_rig import file_of
from tests.pnm_rig import TRANSFERS, served
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Write
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.errors import Gone
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.firmware_models.pnm_card import PnmCard, PnmParts


def in_a_child(do: Callable[[], object]) -> str:
    """What a forked child says of it: the error, or ""."""
    said, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are threads, that is the point
        child = os.fork()
    if child == 0:
        try:
            do()
            os.write(tell, b"")
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(said, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def opened(kind: str, site: Site, folder: Path) -> Device:
    """A device of that kind."""
    if kind == "cpu":
        return open_cpu("dev", site, {"capacity": 1 << 20, "queues": 1})
    if kind == "cxl":
        return open_cxl("dev", site, {"path": str(file_of(folder, 1 << 20))})
    return open_nvme("dev", site, {"path": str(folder / "drive"), "capacity": 1 << 20, "create": True})


@pytest.mark.parametrize("kind", ["cpu", "cxl", "nvme"])
def test_a_forked_child_takes_no_memory_of_its_parents_device(kind: str, tmp_path: Path) -> None:
    site = Site(WallClock())
    device = opened(kind, site, tmp_path)
    region = device.alloc(4096)
    for do in (lambda: device.alloc(4096), lambda: device.free(region)):
        said = in_a_child(do)
        assert said.startswith(f"{Gone.__name__}: dev: ")
        assert f"process {os.getpid()} opened it" in said
    if kind != "nvme":  # whose close waits for its threads
        assert in_a_child(device.close) == ""
    device.free(region)
    device.close()


def test_a_forked_child_does_not_end_the_session_of_its_parents_device(tmp_path: Path) -> None:
    parts, path, site = PnmParts(capacity=1 << 20), tmp_path / "window", Site(WallClock())
    path.write_bytes(PnmCard(parts).window.tobytes())
    data = bytes_of(1, 4096)
    with served(path, parts):
        device = open_pnm("dev", site, {"path": str(path)})
        region = device.alloc(4096)
        assert in_a_child(lambda: device.alloc(4096)).startswith(f"{Gone.__name__}: dev: ")
        assert in_a_child(device.close) == ""
        write_bytes(site.clock, device, region.all(), data, TRANSFERS)
        assert np.array_equal(read_bytes(site.clock, device, region.all(), TRANSFERS), data)
        device.close()


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_a_command_in_a_forked_child_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    site = Site(WallClock())
    device = opened(kind, site, tmp_path)
    region = device.alloc(4096)
    data = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096]
    write_bytes(site.clock, device, region.all(), data)
    said = in_a_child(lambda: device.submit(Write(region.all(), data)))
    assert said.startswith(f"{Gone.__name__}: dev: write: process {os.getpid()} opened it")
    assert read_bytes(site.clock, device, region.all()).tolist() == data.tolist()
    device.close()
