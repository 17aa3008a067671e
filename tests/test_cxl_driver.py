"""The cxl driver: memory that the cores reach in place, how fast it is said to be, and options that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attention_case import bytes_of
from tests.cxl_rig import MIB, PAGE, a_site, both, devdax, file_of, opened, pair, pair_with_file
from tests.launches import carry_out, every_kernel
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Read
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.cxl_cdat import Rates
from tierloop.devices.errors import ConfigurationError, Gone, NotPresent, OutOfRange, Unsupported
from tierloop.devices.kernels import run
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.devices.system import System
from tierloop.devices.waiting import read_bytes

site = a_site
file_pair = pair_with_file


# -- memory that the cores reach in place ----------------------------------------------------------------------------


def test_every_kernel_runs_on_it_in_place_with_the_bits_of_the_kernels_package(file_pair: Platform) -> None:  # D1
    cpu, memory = both(file_pair)
    for kernel, launch in every_kernel("float32").items():
        results = carry_out(file_pair.site.clock, cpu, launch, memory)
        run(launch, bytes_of)
        for there, operand in zip(results, launch.writes, strict=True):
            here = np.concatenate([bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()])
            assert (there == here).all(), kernel


def test_a_region_is_the_mapping_itself(file_pair: Platform) -> None:
    cpu, memory = both(file_pair)
    region = memory.alloc(3 * PAGE)
    assert region.view is not None
    assert region.view.ctypes.data % PAGE == 0
    region.view[17] = 5
    assert read_bytes(file_pair.site.clock, cpu, region.at(17, 1))[0] == 5


def test_what_an_earlier_owner_left_is_zeroed(file_pair: Platform) -> None:
    region = file_pair.device("cxl0").alloc(8 * MIB)
    assert region.view is not None
    assert not region.view.any()


def test_freed_bytes_are_zeroed_and_used_again(file_pair: Platform) -> None:
    memory = file_pair.device("cxl0")
    for value in (1, 2, 3):
        region = memory.alloc(6 * MIB)
        assert region.view is not None
        assert not region.view.any()
        region.view[:] = value
        memory.free(region)
        assert region.view is None


def test_it_has_no_executors_and_says_who_has(file_pair: Platform) -> None:
    memory = file_pair.device("cxl0")
    region = memory.alloc(PAGE)
    for attempt in (memory.submit, memory.estimate):
        with pytest.raises(OutOfRange, match="a cpu device whose `reaches` names it"):
            attempt(Read(region.at(0, 8), np.zeros(8, dtype=np.uint8)))


def test_a_closed_memory_is_gone_and_its_views_stay_harmless(site: Site, tmp_path: Path) -> None:
    memory = open_cxl("cxl0", site, {"path": str(file_of(tmp_path))})
    view = memory.alloc(PAGE).view
    assert view is not None
    memory.close()
    memory.close()
    view[:] = 1
    with pytest.raises(Gone):
        memory.alloc(1)
    watching = len(site.arrivals), len(site.observers)
    open_cxl("cxl0", site, {"path": str(file_of(tmp_path))}).close()
    assert (len(site.arrivals), len(site.observers)) == watching, "nobody is left behind"


# -- rates -----------------------------------------------------------------------------------------------------------


def rates(options: dict[str, Any], system: System) -> tuple[Rates, str, str]:
    memory = open_cxl("cxl0", Site(WallClock()), options, system)
    memory.close()
    return memory.rates, memory.info.notes["rates"], memory.info.notes["why"]


def test_the_rates_of_an_interleave_set_are_those_of_its_devices_together() -> None:
    found, source, _ = rates({"path": "/dev/dax0.0"}, devdax()[0])
    assert found == Rates(150, 120, 32_000_000_000, 24_000_000_000)
    assert source == "said by the CDAT of the memory devices, without links and switches"


def test_what_the_kernel_says_of_the_whole_path_comes_first() -> None:
    found, source, _ = rates({"path": "/dev/dax1.0"}, devdax("pmem", "dax1.0")[0])
    assert found == Rates(17350, 17350, 16_000_000_000, 16_000_000_000)
    assert source == "said by the kernel (/sys/bus/cxl/devices/region1/access0), for the whole path"


def test_options_overrule_what_the_machine_says() -> None:
    found, source, _ = rates({"path": "/dev/dax0.0", "read_latency_ns": 99}, devdax()[0])
    assert (found, source) == (Rates(99), "said by the options")


def test_a_cpu_device_takes_the_path_to_a_devdax_from_its_driver(site: Site) -> None:
    platform = pair(site, {"path": "/dev/dax0.0"}, devdax()[0])
    path = platform.device("cpu0").info.executors[0].path("cxl0")
    assert path is not None
    assert (path.latency_ns, path.read_bytes_per_s, path.write_bytes_per_s) == (150, 32_000_000_000, 24_000_000_000)
    platform.close()


@pytest.mark.parametrize(
    ("data", "why"), [(b"garbage that is no table", "at byte 0"), (None, "No such file")], ids=["garbage", "none"]
)
def test_a_cdat_that_cannot_be_used_is_a_reason_and_rates_are_unknown(data: bytes | None, why: str) -> None:
    kernel, _ = devdax()
    path = f"{kernel.tree.real('/sys/bus/cxl/devices/endpoint4')}/CDAT"
    kernel.tree.remove(path)
    if data is not None:
        kernel.tree.put(path, data)
    found, source, reasons = rates({"path": "/dev/dax0.0"}, kernel)
    assert (found, source) == (Rates(), "nobody says")
    assert why in reasons


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing given; allowed: one of path"),
        ({"path": "/x", "node": 1}, "path and node given; allowed: one of path"),
        ({"path": ""}, "path = '': a path is a string that is not empty"),
        ({"path": 3}, "path = 3"),
        ({"node": -1}, "node = -1; allowed: an integer of at least 0"),
        ({"node": 5000}, "node = 5000; allowed: an integer from 0 to 1023"),
        ({"node": True}, "node = True"),
        ({"serial": "0x11"}, "serial = '0x11'"),
        ({"path": "/x", "capacity": 5}, "capacity = 5; allowed: an integer of at least 4096"),
        ({"path": "/x", "capacity": 4097}, "capacity = 4097; allowed: a multiple of 4096"),
        ({"path": "/x", "read_latency_ns": -1}, "read_latency_ns = -1"),
        ({"pathh": "/x"}, "option 'pathh' is unknown: did you mean 'path'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(options)


def test_it_refuses_a_virtual_clock(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot run on the virtual clock"):
        open_cxl("cxl0", Site(VirtualClock()), {"path": str(file_of(tmp_path))})


def test_phantom_regions_are_refused(file_pair: Platform) -> None:
    with pytest.raises(Unsupported, match="no phantom regions"):
        file_pair.device("cxl0").alloc(8, phantom=True)


@pytest.mark.parametrize(
    ("made", "message"), [("folder", "is a directory; a dax device or a file"), ("small", "allowed: 4096 to 100")]
)
def test_paths_that_are_no_memory_are_refused(tmp_path: Path, made: str, message: str) -> None:
    path = tmp_path / made
    if made == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(100))
    with pytest.raises((Unsupported, ConfigurationError), match=message):
        opened({"path": made, "folder": str(tmp_path)})


def test_a_file_that_is_not_there_is_not_present(tmp_path: Path) -> None:
    with pytest.raises(NotPresent, match=r"cxl0: open: .*nothing"):
        opened({"path": str(tmp_path / "nothing")})
