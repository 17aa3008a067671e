"""CXL memories of a real kernel: topology, mailbox, poison, regions by sysfs, the cxl driver on devdax and on a node.

Only a few MB are touched: each access to emulated CXL memory leaves the emulated processor (2 ms for a page).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.guest.memories import interleavable
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.cxl_mailbox import Mailbox
from tierloop.devices.drivers.cxl_parts import Dax
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.numa_mapping import mapped
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.errors import Unsupported
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.hardware import Hardware
from tierloop.tools.guest.machine import Cxl, Machine

MIB = 1 << 20
CAPACITY = 4 * MIB
TRACING = Path("/sys/kernel/tracing")


def alone(machine: Machine, persistent: bool) -> Cxl:
    """A memory that has a bridge for itself."""
    for memory in machine.cxl:
        if memory.persistent == persistent and len(machine.bridges[memory.bridge]) == 1:
            return memory
    pytest.skip("this machine has no such CXL memory")


def new_site() -> Site:
    return Site(clock=WallClock(), checker=HazardChecker())


@pytest.fixture(scope="module")
def volatile(machine: Machine) -> Dax:
    """The volatile memory as a dax device, by the command that the driver names for a memory without a region."""
    topology = cxl_topology()
    name = cxl_regions.memdev_of(topology, alone(machine, persistent=False))
    [problem] = [problem for problem in topology.problems if problem.subject == name]
    before = {dax.name for dax in topology.daxes}
    cxl_regions.call("sh", "-ec", problem.command)
    dax = cxl_regions.new_dax(before)
    cxl_regions.devdax(dax.name)
    return next(one for one in cxl_topology().daxes if one.name == dax.name)


@pytest.fixture(scope="module")
def persistent(machine: Machine) -> Dax:
    """The persistent memory as a dax device."""
    return cxl_regions.persistent_region(alone(machine, persistent=True))


@pytest.fixture(scope="module")
def interleaved(machine: Machine) -> Dax:
    """A region over the memories of a bridge."""
    return cxl_regions.volatile_region(interleavable(machine))


def test_topology_shows_the_memories_that_were_described(machine: Machine) -> None:
    shown = {memdev.serial: memdev for memdev in cxl_topology().memdevs}
    assert shown.keys() == {memory.serial for memory in machine.cxl}
    for memory in machine.cxl:
        memdev = shown[memory.serial]
        assert memdev.enabled
        assert (memdev.pmem_nbytes, memdev.ram_nbytes) == (
            (memory.mib * MIB, 0) if memory.persistent else (0, memory.mib * MIB)
        )


def test_the_mailbox_says_what_a_memory_is(machine: Machine) -> None:
    topology = cxl_topology()
    for memory in machine.cxl:
        name = cxl_regions.memdev_of(topology, memory)
        identity = Mailbox("cxl0", f"/dev/cxl/{name}").identity()
        assert identity.capacity == memory.mib * MIB
        assert identity.persistent_nbytes == (memory.mib * MIB if memory.persistent else 0)
        assert identity.volatile_nbytes == (0 if memory.persistent else memory.mib * MIB)
        assert identity.firmware


def test_the_mailbox_says_how_a_memory_is(machine: Machine) -> None:
    topology = cxl_topology()
    for memory in machine.cxl:
        try:
            health = Mailbox("cxl0", f"/dev/cxl/{cxl_regions.memdev_of(topology, memory)}").health()
        except Unsupported as error:
            pytest.skip(f"this QEMU's memories do not say how they are: {error}")
        assert health.media_status == "normal"


def test_injected_poison_stands_in_the_kernels_list(machine: Machine, hardware: Hardware) -> None:
    memory = alone(machine, persistent=True)
    name = cxl_regions.memdev_of(cxl_topology(), memory)
    with events("cxl_poison"):
        hardware.poison(memory.name, 0x1000, 64)
        Path(f"/sys/bus/cxl/devices/{name}/trigger_poison_list").write_text("1")
        lines = traced("cxl_poison", f"memdev={name}")
    assert any("dpa=0x1000" in line and "dpa_length=0x40" in line for line in lines), lines


def test_a_media_event_is_traced(machine: Machine, hardware: Hardware) -> None:
    memory = alone(machine, persistent=True)
    name = cxl_regions.memdev_of(cxl_topology(), memory)
    with events("cxl_general_media"):
        hardware.media_event(memory.name, 0x2000)
        assert traced("cxl_general_media", f"memdev={name}")


def test_a_volatile_memory_becomes_a_dax_device(machine: Machine, volatile: Dax) -> None:
    memory = alone(machine, persistent=False)
    assert volatile.mode == "devdax"
    assert volatile.nbytes == memory.mib * MIB
    region = next(region for region in cxl_topology().regions if region.name == volatile.region)
    assert (region.mode, region.committed, region.ways) == ("ram", True, 1)
    assert region.memdevs == (cxl_regions.memdev_of(cxl_topology(), memory),)


def test_the_driver_keeps_bytes_on_a_devdax(volatile: Dax) -> None:
    keeps_bytes({"path": f"/dev/{volatile.name}", "capacity": CAPACITY}, "devdax")


def test_the_driver_finds_a_memory_by_its_serial_number(machine: Machine, volatile: Dax) -> None:
    serial = alone(machine, persistent=False).serial
    assert volatile.mode == "devdax"
    keeps_bytes({"serial": serial, "capacity": CAPACITY}, "devdax")


def test_a_region_over_several_memories_keeps_bytes(machine: Machine, interleaved: Dax) -> None:
    region = next(region for region in cxl_topology().regions if region.name == interleaved.region)
    assert (region.ways, region.granule_nbytes) == (len(interleavable(machine)), 256)
    keeps_bytes({"path": f"/dev/{interleaved.name}", "capacity": CAPACITY}, "devdax")


def test_what_was_flushed_to_a_persistent_memory_is_found_again(persistent: Dax) -> None:
    assert persistent.persistent
    data = np.random.default_rng(9).integers(0, 256, 8192, dtype=np.uint8)
    site = new_site()
    device = open_cxl("cxl0", site, {"path": f"/dev/{persistent.name}", "capacity": CAPACITY})
    region = device.alloc(data.nbytes)
    offset = device.offset_of(region)
    assert region.view is not None
    region.view[:] = data
    assert device.info.memories[0].persistent
    device.close()
    again = open_cxl("cxl1", new_site(), {"path": f"/dev/{persistent.name}", "capacity": CAPACITY})
    found = again.adopt(offset, data.nbytes)
    assert found.view is not None
    assert np.array_equal(found.view, data)
    again.close()


def test_a_volatile_memory_becomes_a_node_and_comes_back(machine: Machine, volatile: Dax) -> None:
    node = cxl_regions.system_ram(volatile.name)
    try:
        shown = numa_topology(HOST).nodes[node]
        assert not shown.cpus
        assert shown.movable_nbytes > 0
        memory = mapped(HOST, "dram", 16 * numa.PAGE)
        numa.bind(HOST, "dram", memory.ctypes.data, memory.nbytes, "bind", [node])
        memory[:] = 7
        assert set(numa.nodes_of(HOST, memory.ctypes.data, memory.nbytes)) == {node}
        assert set(numa.move(HOST, memory.ctypes.data, memory.nbytes, 0)) == {0}
        assert (memory == 7).all()
        keeps_bytes({"node": node, "capacity": CAPACITY}, "node")
    finally:
        path = cxl_regions.devdax(volatile.name)
    keeps_bytes({"path": path, "capacity": CAPACITY}, "devdax")


def keeps_bytes(options: dict[str, object], mode: str) -> None:
    """What is stored in a region is there; a fresh region has zeros; the driver says what it rests on."""
    device = open_cxl("cxl0", new_site(), dict(options))
    assert device.info.notes["mode"] == mode
    for seed in range(2):
        region = device.alloc(16384)
        assert region.view is not None
        assert not region.view.any()
        data = np.random.default_rng(seed).integers(0, 256, region.nbytes, dtype=np.uint8)
        region.view[:] = data
        assert np.array_equal(region.view, data)
        device.free(region)
    device.close()


class events:  # noqa: N801  # used like a function
    """Events of the kernel's trace, one kind, while the body runs."""

    def __init__(self, name: str) -> None:
        self._switch = TRACING / "events/cxl" / name / "enable"

    def __enter__(self) -> None:
        if not self._switch.exists():
            pytest.skip(f"this kernel has no {self._switch}")
        (TRACING / "trace").write_text("")
        self._switch.write_text("1")

    def __exit__(self, *_: object) -> None:
        self._switch.write_text("0")


def traced(name: str, word: str, wait_s: float = 30.0) -> list[str]:
    """Lines of the trace with this event and word, as soon as there are some."""
    deadline = time.monotonic() + wait_s
    while True:
        lines = [line for line in (TRACING / "trace").read_text().splitlines() if f"{name}:" in line and word in line]
        if lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)
