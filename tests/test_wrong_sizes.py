"""Sizes that are none: an error that says what is allowed, and a memory that is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cxl_rig import file_of, opened
from tierloop.devices.clocks import WallClock
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import ConfigurationError, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.site import Site
from tierloop.devices.system import HOST


def memory(kind: str, folder: Path) -> Device:
    """A memory of that kind with 1 MiB."""
    if kind == "cxl":
        return opened({"path": str(file_of(folder, 1 << 20))})
    if kind == "cpu":
        return open_cpu("dram", Site(WallClock()), {"capacity": 1 << 20})
    return open_nvme("drive", Site(WallClock()), {"path": str(folder / "drive"), "capacity": 1 << 20, "create": True})


@pytest.mark.parametrize("kind", ["cpu", "cxl", "nvme"])
def test_a_size_that_is_no_whole_number_is_refused_and_takes_nothing(kind: str, tmp_path: Path) -> None:
    device = memory(kind, tmp_path)
    wrong: list[Any] = [1.5, np.float64(4096), "8", None, True, float("nan"), float("inf")]
    for size in wrong:
        with pytest.raises(OutOfRange, match=r"alloc: .* is no whole number of bytes"):
            device.alloc(size)
    whole = device.alloc(1 << 20)
    device.free(whole)
    device.close()


@pytest.mark.parametrize("kind", ["cpu", "cxl", "nvme"])
def test_a_size_may_come_from_an_array(kind: str, tmp_path: Path) -> None:
    device = memory(kind, tmp_path)
    size: Any = np.array([4096, 5], dtype=np.int64)[1]
    region = device.alloc(size)
    assert type(region.nbytes) is int
    device.free(region)
    device.close()


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 63, 1 << 65])
def test_more_than_addresses_reach_is_out_of_memory(nbytes: int) -> None:
    device = open_cpu("dram", Site(WallClock()), {"capacity": 1 << 70})
    with pytest.raises(OutOfMemory, match=f"dram: alloc: {nbytes} bytes"):
        device.alloc(nbytes)
    device.close()


def test_a_memory_that_is_named_twice_is_reached_by_one_path() -> None:
    device = open_cpu("dram", Site(WallClock()), {"capacity": 4096, "reaches": ["card", "dram", "card"]})
    assert [path.memory for path in device.info.executors[0].paths] == ["dram", "card"]
    device.close()


@pytest.mark.parametrize(
    ("options", "allowed"), [({"node": 1024}, 1023), ({"serial": 1 << 64}, (1 << 64) - 1), ({"node": 10**30}, 1023)]
)
def test_a_number_that_is_too_large_is_refused_with_the_largest(options: dict[str, int], allowed: int) -> None:
    with pytest.raises(ConfigurationError, match=f"allowed: an integer from 0 to {allowed}$"):
        opened(options)


def test_a_file_that_cannot_be_mapped_is_unsupported_and_not_gone() -> None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    try:
        HOST.read_text(path)
    except OSError:
        pytest.skip(f"this kernel shows no {path}")
    with pytest.raises((Unsupported, PermissionError), match=r"cxl0: open: "):
        opened({"path": path})
