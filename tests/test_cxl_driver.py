"""The cxl driver: three forms of memory, what each refuses and with which advice, and kernels that run in place."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.attention_case import bytes_of
from tests.cxl_rig import MIB, PAGE, DaxNode, devdax, file_of, opened, pair, tree
from tests.launches import carry_out, every_kernel
from tests.numa_rig import a_node_of_this_machine
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Flush, Launch, Read
from tierloop.devices.device import Device
from tierloop.devices.drivers import cache_lines
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.cxl_cdat import Rates
from tierloop.devices.drivers.numa import SYS_MOVE_PAGES
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Gone,
    MediaError,
    Misaligned,
    NoPermission,
    NotPresent,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.kernels import run
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.persistent import keeper
from tierloop.devices.placement import Placements, memory_nodes
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.system import HOST, HostSystem, System, address_of
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.kernel import ModelKernel
from tierloop.emulators.kernel_numa import Memory, NumaMemory


@pytest.fixture
def site() -> Site:
    return Site(WallClock())


@pytest.fixture
def file_pair(site: Site, tmp_path: Path) -> Iterator[Platform]:
    platform = pair(site, {"path": str(file_of(tmp_path))})
    yield platform
    platform.close()


def both(platform: Platform) -> tuple[Device, Device]:
    return platform.device("cpu0"), platform.device("cxl0")


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


# -- a file --------------------------------------------------------------------------------------------------------


def test_a_file_is_never_called_cxl_memory(file_pair: Platform) -> None:  # D2: a file
    info = file_pair.device("cxl0").info
    assert (info.kind, info.provenance, info.model) == ("cxl", "real", "a file in place of CXL memory")
    assert info.notes["mode"] == "file"
    assert "a file stands in place of CXL memory" in info.notes["why"]
    assert info.executors == ()


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    path = str(file_of(tmp_path))
    first = opened({"path": path})
    with pytest.raises(Busy, match="belongs to another owner"):
        opened({"path": path})
    first.close()
    opened({"path": path}).close()


def test_bytes_of_a_file_are_found_again(site: Site, tmp_path: Path) -> None:
    path = str(file_of(tmp_path))
    platform = pair(site, {"path": path})
    cpu, memory = both(platform)
    keeping = keeper(memory)
    assert keeping is not None
    assert memory.info.memories[0].persistent
    memory.alloc(PAGE)
    region = memory.alloc(2 * PAGE)
    write_bytes(site.clock, cpu, region.all(), np.full(2 * PAGE, 9, dtype=np.uint8))
    wait(site.clock, cpu.submit(Flush(region.all())))
    offset = keeping.offset_of(region)
    platform.close()
    again = opened({"path": path})
    found = again.adopt(offset, 2 * PAGE)
    assert found.view is not None
    assert (found.view == 9).all()
    with pytest.raises(Busy, match="belongs to another region"):
        again.adopt(offset, PAGE)
    again.free(found)
    again.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-PAGE, PAGE), (1, PAGE), (0, 0), (8 * MIB, 1), (0, 8 * MIB + 1)])
def test_only_what_was_there_is_adopted(tmp_path: Path, offset: int, nbytes: int) -> None:
    memory = opened({"path": str(file_of(tmp_path))})
    with pytest.raises(OutOfRange, match=r"cxl0: adopt: \["):
        memory.adopt(offset, nbytes)
    memory.close()


def test_what_is_lost_is_not_adopted(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    memory = opened({"path": str(path)})
    region = memory.adopt(0, 2 * PAGE)
    os.truncate(path, PAGE)
    assert region.view is not None
    assert region.view[PAGE] == 0
    memory.free(region)
    with pytest.raises(MediaError, match="has lost bytes"):
        memory.adopt(0, 2 * PAGE)
    assert memory.adopt(0, PAGE).view is not None
    memory.close()


class Synced(HostSystem):
    """This host, and how often a file was made durable."""

    count = 0

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.count += 1


def test_a_flush_of_a_file_is_carried_out_by_the_cores(site: Site, tmp_path: Path) -> None:
    system = Synced()
    platform = pair(site, {"path": str(file_of(tmp_path))}, system)
    cpu, memory = both(platform)
    wait(site.clock, cpu.submit(Flush(memory.alloc(PAGE).all())))
    assert system.count == 1
    wait(site.clock, cpu.submit(Flush(cpu.alloc(PAGE).all())))
    assert system.count == 1
    platform.close()


def _wait(go_on: threading.Event) -> None:
    assert go_on.wait(30)


@pytest.mark.parametrize("form", ["file", "devdax"])
def test_a_flush_that_comes_after_the_close_made_nothing_durable_and_says_so(
    site: Site, tmp_path: Path, form: str
) -> None:
    options, system = ({"path": "/dev/dax1.0"}, devdax("pmem", "dax1.0")[0]) if form == "devdax" else ({}, HOST)
    platform = pair(site, options or {"path": str(file_of(tmp_path))}, system)
    cpu, memory = both(platform)
    if not memory.info.memories[0].persistent:
        pytest.skip(memory.info.notes["why"])
    region, go_on = memory.alloc(PAGE), threading.Event()
    held = cpu.submit(Launch(Dense("held", 0, 0, 0, lambda reads, writes: _wait(go_on)), (), ()))
    flushed = cpu.submit(Flush(region.all()))
    memory.close()
    go_on.set()
    wait(site.clock, held)
    with pytest.raises(Gone, match="was closed before its bytes were made durable"):
        wait(site.clock, flushed)
    cpu.close()


def test_a_memory_that_keeps_nothing_is_flushed_after_one_of_its_name_that_did(site: Site, tmp_path: Path) -> None:
    kept = pair(site, {"path": str(file_of(tmp_path))})
    kept.close()
    platform = pair(site, {"path": "/dev/dax0.0"}, devdax()[0])
    cpu, memory = both(platform)
    wait(site.clock, cpu.submit(Flush(memory.alloc(PAGE).all())))
    platform.close()


@pytest.mark.parametrize("instruction", ["clflush", cache_lines.instruction()])
def test_lines_that_are_written_back_keep_their_bytes(instruction: str | None) -> None:
    if instruction is None or cache_lines.instruction() is None:
        pytest.skip("no instruction that writes cache lines back is known on this processor")
    array = np.arange(1000, dtype=np.uint8)
    spans = np.array([[3, 0], [60, 900], [999, 1]], dtype=np.int64)
    cache_lines.loop(instruction)(array.ctypes.data, spans)
    assert (array == np.arange(1000, dtype=np.uint8)).all()


# -- a devdax --------------------------------------------------------------------------------------------------------


def test_a_devdax_says_what_it_rests_on(site: Site) -> None:  # D2: a dax device
    kernel, _ = devdax()
    memory = open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)
    info = memory.info
    assert (info.model, info.bus_address, info.numa_node) == ("a model of CXL memory", "0000:0d:00.0", 0)
    assert info.memories[0].capacity == 8 * MIB
    assert not info.memories[0].persistent
    assert info.notes["mode"] == "devdax"
    assert info.notes["interleave"] == "2 ways of 256 B over mem0, mem1"
    assert info.notes["serials"] == "0x11, 0x12"
    assert info.notes["decoders"] == "decoder3.0 (ram, expander); decoder4.0 (ram, expander)"
    assert info.notes["why"] == "it is as it should be"
    memory.close()
    assert kernel.open_fds == 0


def test_size_and_alignment_come_from_sysfs_and_the_device_is_never_asked(site: Site) -> None:
    kernel, _ = devdax()
    open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel).close()
    assert "size" not in kernel.calls


def test_volatile_memory_keeps_nothing_to_adopt(site: Site) -> None:
    kernel, _ = devdax()
    memory = open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)
    with pytest.raises(Unsupported, match="its bytes end with their owner"):
        memory.adopt(0, PAGE)
    memory.close()


def test_a_persistent_devdax_keeps_its_bytes_and_flushes_lines(site: Site) -> None:
    kernel, _ = devdax("pmem", "dax1.0")
    platform = pair(site, {"path": "/dev/dax1.0"}, kernel)
    cpu, memory = both(platform)
    if cache_lines.instruction() is None:
        assert not memory.info.memories[0].persistent
        assert "is not known on this processor" in memory.info.notes["why"]
        platform.close()
        return
    region = memory.alloc(PAGE)
    write_bytes(site.clock, cpu, region.all(), np.full(PAGE, 6, dtype=np.uint8))
    wait(site.clock, cpu.submit(Flush(Segment(region, Spans([(0, 100), (4000, 96)])))))
    assert "cache lines are written back" in memory.info.notes["durable"]
    platform.close()
    del region
    again = open_cxl("cxl0", Site(WallClock()), {"path": "/dev/dax1.0"}, kernel)
    found = again.adopt(0, PAGE)
    assert found.view is not None
    assert (found.view == 6).all()
    again.close()


def test_a_devdax_has_one_owner(site: Site) -> None:  # B18
    kernel, _ = devdax()
    first = open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)
    with pytest.raises(Busy, match=r"/dev/dax0\.0 belongs to another owner"):
        open_cxl("cxl1", site, {"path": "/dev/dax0.0"}, kernel)
    first.close()
    assert kernel.open_fds == 0


class OffTheGrid(DaxNode):
    """A kernel that never puts a mapping on a multiple of `grid`."""

    grid = 1 << 30

    def mmap(self, nbytes: int, offset: int) -> mmap.mmap:
        wider = mmap.mmap(-1, nbytes + PAGE)
        first = 0 if address_of(wider) % self.grid else PAGE
        return cast(mmap.mmap, memoryview(wider)[first : first + nbytes])  # all that is asked of it is a buffer


def test_a_mapping_that_the_kernel_puts_off_the_alignment_is_refused(site: Site) -> None:
    kernel, _ = devdax(align=1 << 30, size=1 << 30)
    node = OffTheGrid(1 << 30, PAGE)
    kernel.add("/dev/dax0.0", node)
    with pytest.raises(Misaligned, match="whole pieces of 1073741824 bytes"):
        open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)
    assert kernel.open_fds == 0
    assert node.nbytes == 1 << 30


@pytest.mark.parametrize("capacity", [2 * MIB + PAGE, 1026 * MIB])
def test_a_capacity_that_a_devdax_cannot_have_is_refused(site: Site, capacity: int) -> None:
    with pytest.raises(
        ConfigurationError, match=r"allowed: a multiple of 2097152 up to 1073741824, the size of /dev/dax"
    ):
        open_cxl("cxl0", site, {"path": "/dev/dax0.0", "capacity": capacity}, ModelKernel(tree("volatile-devdax")))


@pytest.mark.parametrize("changed", [{"align": "none"}, {"align": 3000}, {"size": 0}, {"size": "x"}])
def test_sysfs_that_makes_no_sense_is_a_protocol_error(site: Site, changed: dict[str, Any]) -> None:
    kernel, _ = devdax()
    folder = kernel.tree.real("/sys/bus/dax/devices/dax0.0")
    kernel.tree.remove(f"{folder.rsplit('/', 1)[0]}/dax_region/align")
    for key, value in changed.items():
        kernel.tree.put(f"{folder}/{key}", str(value))
    with pytest.raises(ProtocolError, match="sysfs gives the size"):
        open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)


@pytest.mark.parametrize(
    ("name", "path", "kind", "message"),
    [
        ("system-ram", "/dev/dax0.0", Unsupported, r"in mode system-ram: it is node 4 now; option node = 4 uses it, or "
         r"daxctl reconfigure-device --mode=devdax -f dax0\.0 changes it"),
        ("broken-region", "/dev/dax2.0", Unsupported, r"in mode disabled: dax2\.0: .*--mode=devdax dax2\.0"),
        ("volatile-devdax", "/dev/dax7.0", NotPresent, r"no such dax device; there are: dax0\.0"),
        ("broken-region", "/dev/dax0.0", NotPresent, r"there are: dax2\.0, .*mem0: disabled.*cxl enable-memdev mem0"),
        ("volatile-devdax", "/dev/dax0.0", NotPresent, "No such file"),
    ],
)  # fmt: skip
def test_a_devdax_that_is_not_ready_is_refused_with_its_state_and_the_command(
    site: Site, name: str, path: str, kind: type[DeviceError], message: str
) -> None:
    kernel = ModelKernel(tree(name))
    with pytest.raises(kind, match=message):
        open_cxl("cxl0", site, {"path": path}, kernel)
    assert kernel.open_fds == 0


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("open", errno.EACCES, NoPermission),
        ("open", errno.ENXIO, NotPresent),
        ("lock", errno.EWOULDBLOCK, Busy),
        ("mmap", errno.ENOMEM, OutOfMemory),
        ("mmap", errno.EINVAL, ProtocolError),
        ("fstat", errno.ENODEV, NotPresent),
    ],
)
def test_what_the_kernel_refuses_is_named_and_nothing_stays_open(
    site: Site, call: str, number: int, kind: type[DeviceError]
) -> None:
    kernel, _ = devdax()
    kernel.fail_next(call, number)
    with pytest.raises(kind, match=r"cxl0: open: .*/dev/dax0\.0"):
        open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel)
    assert kernel.open_fds == 0
    open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, kernel).close()


# -- by serial -------------------------------------------------------------------------------------------------------


def test_a_serial_finds_the_devdax_above_it(site: Site) -> None:
    kernel, _ = devdax()
    memory = open_cxl("cxl0", site, {"serial": 0x12}, kernel)
    assert memory.info.notes["dax"].startswith("dax0.0, mode devdax")
    memory.close()


@pytest.mark.parametrize(
    ("name", "serial", "message"),
    [
        ("volatile-devdax", 0x99, "no memory device has the serial 0x99; there are: 0x11, 0x12"),
        ("broken-region", 0x11, "mem0 has the serial 0x11, but: mem0: disabled.*cxl enable-memdev mem0"),
    ],
)
def test_a_serial_without_memory_says_why(site: Site, name: str, serial: int, message: str) -> None:
    with pytest.raises(NotPresent, match=message):
        open_cxl("cxl0", site, {"serial": serial}, ModelKernel(tree(name)))


# -- a node ----------------------------------------------------------------------------------------------------------


def test_pages_really_lie_on_the_node_and_that_is_reported(site: Site) -> None:  # C4
    node = a_node_of_this_machine()
    memory = open_cxl("cxl0", site, {"node": node, "capacity": 4 * MIB})
    region = memory.alloc(MIB)
    assert region.view is not None
    assert not region.view.any()
    row = Placements.of(site).report()["memories"]["cxl0"]
    assert (row["pages_per_node"], row["pages_absent"]) == ({str(node): MIB // PAGE}, 0)
    assert memory_nodes(site)["cxl0"] == node
    region.view[:] = 4
    memory.free(region)
    again = memory.alloc(MIB)
    assert again.view is not None
    assert not again.view.any()
    memory.close()


def test_a_node_with_cores_is_never_called_cxl_memory(site: Site) -> None:
    node = a_node_of_this_machine()
    memory = open_cxl("cxl0", site, {"node": node, "capacity": MIB})
    assert memory.info.model == f"this host's own memory (node {node}) in place of CXL memory"
    assert "it is no CXL memory" in memory.info.notes["why"]
    memory.close()


def system_ram(pages: int = 64, populates: bool = True) -> tuple[ModelKernel, NumaMemory]:
    """The recorded machine whose node 4 is CXL memory, with room for so many pages there."""
    kernel = ModelKernel(tree("system-ram"), model="a model of CXL memory")
    memory = NumaMemory.of(kernel, populates)
    memory.nodes[4] = Memory(pages * PAGE, movable=True)
    return kernel, memory


def test_a_node_that_cxl_memory_became_says_what_it_rests_on(site: Site) -> None:  # D2: a node
    kernel, _ = system_ram()
    memory = open_cxl("cxl0", site, {"node": 4, "capacity": MIB}, kernel)
    info = memory.info
    assert (info.numa_node, info.model, info.bus_address) == (4, "a model of CXL memory", "0000:0d:00.0")
    assert info.notes["dax"].startswith("dax0.0, mode system-ram")
    assert "pages that are pinned for DMA are moved off the node" in info.notes["why"]
    memory.close()


def test_a_serial_finds_the_node_above_it(site: Site) -> None:
    kernel, _ = system_ram()
    memory = open_cxl("cxl0", site, {"serial": 0x11, "capacity": MIB}, kernel)
    assert memory.info.notes["mode"] == "node"
    memory.close()


@pytest.mark.parametrize("populates", [True, False])
def test_pages_that_lie_elsewhere_are_an_error_with_the_counts(site: Site, populates: bool) -> None:
    kernel, numa = system_ram(populates=populates)
    memory = open_cxl("cxl0", site, {"node": 4, "capacity": MIB}, kernel)

    def behind_us(pid: int, count: int, pages: int, *rest: int) -> int:
        first = ctypes.c_uint64.from_address(pages).value
        numa.touch(first, count * PAGE)
        numa.relocate(first, 3 * PAGE, 0)
        return numa._move_pages(pid, count, pages, *rest)

    kernel.answer(SYS_MOVE_PAGES, behind_us)
    with pytest.raises(ProtocolError, match=r"bound to node 4 lie elsewhere: 3 on node 0, 5 on node 4"):
        memory.alloc(8 * PAGE)
    memory.close()


def test_pages_that_a_pin_moves_away_are_seen(site: Site) -> None:
    kernel, numa = system_ram()
    memory = open_cxl("cxl0", site, {"node": 4, "capacity": MIB}, kernel)
    region = memory.alloc(8 * PAGE)
    assert region.view is not None
    numa.pin(region.view.ctypes.data, 2 * PAGE)
    placement = Placements.of(site).registered(region)
    assert placement is not None
    assert dict(placement.found) == {0: 2, 4: 6}
    assert [moved.occasion for moved in Placements.of(site).moved] == ["registration"]
    memory.close()


def test_a_full_node_is_out_of_memory_and_the_device_goes_on(site: Site) -> None:
    kernel, _ = system_ram(pages=16)
    memory = open_cxl("cxl0", site, {"node": 4, "capacity": MIB}, kernel)
    with pytest.raises(OutOfMemory, match="cannot all be had"):
        memory.alloc(17 * PAGE)
    assert memory.alloc(8 * PAGE).view is not None
    memory.close()


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("volatile-devdax", {"node": 3}, NotPresent, r"node 3 has no memory; dax0\.0 is in mode devdax and would become"
         r" it: daxctl reconfigure-device --mode=system-ram --no-movable dax0\.0"),
        ("broken-region", {"node": 9}, NotPresent, "node 9 has no memory; no dax device has it"),
        ("system-ram", {"node": 4, "capacity": 1 << 40}, OutOfMemory, "of node 4, which has 536870912 free"),
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_had_is_refused_with_advice(
    site: Site, name: str, options: dict[str, Any], kind: type[DeviceError], message: str
) -> None:
    kernel = ModelKernel(tree(name))
    NumaMemory.of(kernel)
    with pytest.raises(kind, match=message):
        open_cxl("cxl0", site, options, kernel)


def test_where_binding_is_forbidden_a_node_is_refused(site: Site) -> None:
    kernel, numa = system_ram()
    numa.forbid("mbind")
    with pytest.raises(NoPermission, match="node 4 cannot be bound to: the process may not call mbind"):
        open_cxl("cxl0", site, {"node": 4}, kernel)


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
        ({"path": ""}, "path = ''; allowed: a path"),
        ({"path": 3}, "path = 3"),
        ({"node": -1}, "node = -1; allowed: an integer of at least 0"),
        ({"node": 5000}, "node = 5000; it is too large"),
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
