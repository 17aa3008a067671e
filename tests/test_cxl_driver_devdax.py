"""The cxl driver on a dax device: what it rests on, what is refused with which advice, and the way by serial."""

from __future__ import annotations

import errno
import mmap
from typing import Any, cast

import numpy as np
import pytest

from tests.cxl_rig import MIB, PAGE, DaxNode, a_site, both, devdax, pair, tree
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Flush
from tierloop.devices.drivers import cache_lines
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Misaligned,
    NoPermission,
    NotPresent,
    OutOfMemory,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.system import address_of
from tierloop.devices.waiting import wait, write_bytes
from tierloop.emulators.kernel import ModelKernel

site = a_site


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
