"""What a real kernel showed of the guest, replayed: the drivers read from it what the guest's description says.

The trees come from `tierloop guest capture --out tests/sysfs`. Where the kernel and a model of ours differ, it is said
here, one difference per test.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierloop.devices.drivers.cxl_cdat import parse
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.drivers.nvme_drives import nvme_drives
from tierloop.devices.drivers.nvme_identity import Health, identity_of
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.tools.guest.capturing import NAMES
from tierloop.tools.guest.machine import DEFAULT, Machine, load

TREES = Path(__file__).resolve().parent / "sysfs"


@pytest.fixture(scope="module")
def machine() -> Machine:
    """What was captured."""
    return load(DEFAULT)


def kernel(name: str) -> ModelKernel:
    """A kernel that shows what was captured."""
    return ModelKernel(Tree.read(TREES / f"{name}.tree"))


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_is_written_as_it_is_read(name: str) -> None:
    text = (TREES / f"{name}.tree").read_text()
    assert Tree.of(text).text() == text


def test_nodes_are_those_of_the_description(machine: Machine) -> None:
    topology = numa_topology(kernel("guest-numa"))
    for node in machine.nodes:
        shown = topology.nodes[node.id]
        assert len(shown.cpus) == node.cpus
        assert node.mib << 19 < shown.nbytes <= node.mib << 20
        assert shown.tier
        best = next(way for way in machine.paths if (way.source, way.target) == (machine.initiator(node), node.id))
        access = next(one for one in shown.access if one.level == 0)
        assert (access.read_latency_ns, access.read_bytes_per_s) == (best.latency_ns, best.mb_per_s * 1_000_000)
    for a, b, value in machine.distances:
        if max(a, b) < len(machine.nodes):
            assert topology.nodes[a].distances[b] == value


@pytest.mark.parametrize("table", ["SRAT", "SLIT", "HMAT", "CEDT"])
def test_tables_of_the_firmware_are_whole(table: str) -> None:
    """Signature, length, and a sum of all bytes that is zero (ACPI 6.5, 5.2.6)."""
    data = kernel("guest-numa").read_bytes(f"/sys/firmware/acpi/tables/{table}")
    assert data[:4] == table.encode()
    assert int.from_bytes(data[4:8], "little") == len(data)
    assert sum(data) % 256 == 0


def test_drives_are_those_of_the_description(machine: Machine) -> None:
    shown = {drive.serial: drive for drive in nvme_drives(kernel("guest-nvme"))}
    assert shown.keys() == {drive.serial for drive in machine.drives}
    for drive in machine.drives:
        assert shown[drive.serial].state == "live"
        assert [one.nbytes for one in shown[drive.serial].namespaces] == [drive.mib << 20]


def test_identify_pages_and_logs_are_understood(machine: Machine) -> None:
    captured = kernel("guest-nvme")
    for drive in machine.drives:
        pages = {
            name: captured.read_bytes(f"/capture/{drive.serial}/{name}")
            for name in ("identify-controller", "identify-namespace", "log-health", "log-errors")
        }
        identity = identity_of("nvme0", 1, pages["identify-controller"], pages["identify-namespace"])
        assert (identity.serial, identity.capacity, identity.lba_nbytes) == (drive.serial, drive.mib << 20, 512)
        assert not Health.of(pages["log-health"]).warnings


def test_memories_are_those_of_the_description(machine: Machine) -> None:
    for name in ("guest-cxl", "guest-cxl-devdax"):
        topology = cxl_topology(kernel(name))
        assert topology.complaints == ()
        assert {(one.serial, one.ram_nbytes, one.pmem_nbytes) for one in topology.memdevs} == {
            (one.serial, 0 if one.persistent else one.mib << 20, one.mib << 20 if one.persistent else 0)
            for one in machine.cxl
        }
        assert all(one.enabled and one.endpoint for one in topology.memdevs)


def test_a_memory_without_a_region_has_no_dax_device_and_one_with_it_has() -> None:
    assert cxl_topology(kernel("guest-cxl")).daxes == ()
    topology = cxl_topology(kernel("guest-cxl-devdax"))
    (dax,) = topology.daxes
    (region,) = topology.regions
    assert (dax.mode, dax.region, region.mode, region.committed) == ("devdax", region.name, "ram", True)


def test_a_memory_that_is_a_node_has_its_blocks_there(machine: Machine) -> None:
    topology = cxl_topology(kernel("guest-cxl-node"))
    dax = next(dax for dax in topology.daxes if dax.mode == "system-ram")
    node = topology.node(dax.target_node)
    assert node is not None
    assert node.block_nbytes is not None
    assert node.state == "online"
    assert node.online * node.block_nbytes == dax.nbytes
    shown = numa_topology(kernel("guest-cxl-node")).nodes[node.number]
    assert (shown.nbytes, shown.has_cpu) == (dax.nbytes, False)
    assert any(access.read_latency_ns for access in shown.access)


def test_a_persistent_region_is_known_as_one(machine: Machine) -> None:
    topology = cxl_topology(kernel("guest-cxl-node"))
    [dax] = [dax for dax in topology.daxes if dax.persistent]
    memory = next(memory for memory in machine.cxl if memory.persistent)
    region = topology.region(dax.region)
    assert region is not None
    assert (region.mode, region.committed, region.nbytes) == ("pmem", True, memory.mib << 20)
    assert region.uuid


def test_each_memory_is_told_the_window_that_leads_to_it(machine: Machine) -> None:
    """Every window of the guest takes both kinds; which bridge it leads to makes the difference."""
    topology = cxl_topology(kernel("guest-cxl"))
    windows = {f"decoder0.{at}": memories for at, memories in enumerate(machine.bridges.values())}
    for window, memories in windows.items():
        for memory in memories:
            memdev = next(one for one in topology.memdevs if one.serial == memory.serial)
            [problem] = [one for one in topology.problems if one.subject == memdev.name]
            named = set(re.findall(r"decoder0\.\d+", problem.command))
            assert named == {window}, f"{memory.name}: {problem}"
            decoder = next(port for port in topology.ports if port.name == memdev.endpoint).decoders[0].name
            assert (f"echo {decoder} >$r/target0" in problem.command) != memory.persistent


def test_the_table_of_a_memory_speaks_of_all_of_it(machine: Machine) -> None:
    captured = kernel("guest-cxl")
    topology = cxl_topology(captured)
    for memdev in topology.memdevs:
        table = parse("cxl0", captured.read_bytes(f"/sys/bus/cxl/devices/{memdev.endpoint}/CDAT"))
        assert sum(one.nbytes for one in table.ranges) == memdev.ram_nbytes + memdev.pmem_nbytes
