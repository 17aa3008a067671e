"""What is found out about CXL hardware from recorded trees, whole and damaged."""

from __future__ import annotations

import errno
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cxl_rig import MIB, tree
from tierloop.devices.drivers.cxl_parts import Topology
from tierloop.devices.drivers.cxl_steps import region_command, region_steps
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.emulators.kernel import ModelKernel, Tree

TREES = ("volatile-devdax", "pmem", "system-ram", "broken-region")


def found(name: str) -> Topology:
    return cxl_topology(ModelKernel(tree(name)))


def problems(topology: Topology, subject: str) -> list[tuple[str, str]]:
    return [(one.reason, one.command) for one in topology.problems if one.subject == subject]


def test_memdevs_have_their_serials_sizes_and_places() -> None:
    topology = found("volatile-devdax")
    assert [(m.name, m.serial, m.ram_nbytes, m.pmem_nbytes, m.numa_node, m.state) for m in topology.memdevs] == [
        ("mem0", 0x11, 512 * MIB, 0, 0, "enabled"),
        ("mem1", 0x12, 512 * MIB, 0, 1, "enabled"),
    ]
    assert [m.bus_address for m in topology.memdevs] == ["0000:0d:00.0", "0000:df:00.0"]
    assert (topology.memdevs[0].firmware, topology.memdevs[0].payload_nbytes) == ("BWFW VERSION 00", 2048)
    assert topology.complaints == ()
    assert topology.problems == ()


def test_an_interleave_set_has_its_targets_in_order() -> None:
    region = found("volatile-devdax").region("region0")
    assert region is not None
    assert (region.ways, region.granule_nbytes, region.nbytes, region.state) == (2, 256, 1024 * MIB, "enabled")
    assert (region.targets, region.memdevs) == (("decoder3.0", "decoder4.0"), ("mem0", "mem1"))
    assert region.interleave == "2 ways of 256 B over mem0, mem1"


def test_decoders_say_where_they_stand_and_what_they_map() -> None:
    topology = found("volatile-devdax")
    kinds = {port.name: (port.kind, port.device) for port in topology.ports}
    assert kinds["root0"] == ("root", "ACPI0017:00")
    assert kinds["endpoint3"] == ("endpoint", "mem0")
    root, end = topology.decoder("decoder0.1"), topology.decoder("decoder3.0")
    assert root is not None
    assert end is not None
    assert (root.kind, root.ways, root.targets, root.locked) == ("root", 2, ("12", "222"), True)
    assert root.takes >= {"ram", "pmem"}
    assert (end.kind, end.mode, end.dpa, end.dpa_nbytes, end.region) == ("endpoint", "ram", 0, 512 * MIB, "region0")
    assert (end.target_type, end.locked, end.start) == ("expander", False, 0x390000000)


def test_a_dax_device_is_found_below_its_region() -> None:
    topology = found("volatile-devdax")
    (dax,) = topology.daxes
    assert (dax.name, dax.mode, dax.nbytes, dax.align) == ("dax0.0", "devdax", 1024 * MIB, 2 * MIB)
    assert (dax.target_node, dax.numa_node, dax.persistent, dax.path) == (3, 0, False, "/dev/dax0.0")
    assert topology.chain(dax) == ("dax0.0", "region0", "decoder3.0", "decoder4.0", "mem0", "mem1")


def test_a_namespace_on_persistent_memory_is_found_by_its_address() -> None:
    topology = found("pmem")
    (dax,) = topology.daxes
    assert (dax.name, dax.region, dax.persistent, dax.mode) == ("dax1.0", "region1", True, "devdax")
    region = topology.region("region1")
    assert region is not None
    assert region.uuid == "6f8cf7d8-3c42-41e6-a5f4-33f2f8a3b4a9"
    assert topology.memdevs[0].pmem_nbytes == 512 * MIB


def test_a_node_is_known_by_its_blocks() -> None:
    topology = found("system-ram")
    (node,) = topology.nodes
    assert (node.number, node.daxes, node.state) == (4, ("dax0.0",), "online")
    assert (node.online, node.offline, node.movable, node.block_nbytes) == (4, 0, 4, 128 * MIB)
    assert problems(topology, "node4") == [
        (
            "4 of its memory blocks are movable: pages that are pinned for DMA are moved off the node",
            "daxctl offline-memory dax0.0 && daxctl online-memory --no-movable dax0.0",
        )
    ]
    dax = topology.dax_of_node(4)
    assert dax is not None
    assert dax.mode == "system-ram"


@pytest.mark.parametrize(
    ("subject", "reason", "command"),
    [
        ("mem0", "disabled: no driver is bound", "cxl enable-memdev mem0"),
        ("mem1", "no window of the platform takes pmem", ""),
        ("decoder3.0", "locked by firmware", ""),
        (
            "region0",
            "not complete: 0 bytes, 1 targets for 2 ways",
            "cxl destroy-region region0, then cxl create-region",
        ),
        ("region1", "committed, but its driver is not bound", "cxl enable-region region1"),
        ("region2", "its decoders are not programmed", "echo 1 > /sys/bus/cxl/devices/region2/commit"),
        ("dax2.0", "disabled: no driver", "daxctl reconfigure-device --mode=devdax dax2.0"),
        ("node5", "1 of its memory blocks are offline", "daxctl online-memory dax3.0"),
        ("memory", "auto_online_blocks = online", "echo offline > /sys/devices/system/memory/auto_online_blocks"),
    ],
)
def test_what_is_not_usable_has_a_reason_and_the_command_that_changes_it(
    subject: str, reason: str, command: str
) -> None:
    there = problems(found("broken-region"), subject)
    assert len(there) == 1
    assert reason in there[0][0]
    assert there[0][1] == command


def test_garbage_is_a_complaint_and_not_a_number() -> None:
    topology = found("broken-region")
    memdev = topology.memdev("mem2")
    assert memdev is not None
    assert (memdev.serial, memdev.payload_nbytes, memdev.pmem_nbytes, memdev.numa_node) == (None, None, 0, None)
    assert memdev.dynamic == (("dynamic_ram_a", 256 * MIB),)
    assert [line for line in topology.complaints if "serial" in line] == [
        "/sys/devices/pci0000:0c/0000:0c:01.0/0000:0e:00.0/mem2/serial: 'unlikely' is no size or number"
    ]


def test_a_card_without_a_region_says_how_to_make_one() -> None:
    texts = tree("volatile-devdax")
    for name in ("region0", "dax_region0"):
        texts.remove(texts.real(f"/sys/bus/cxl/devices/{name}"))
        texts.remove(f"/sys/bus/cxl/devices/{name}")
    texts.remove("/sys/bus/dax/devices/dax0.0")
    for name in ("decoder3.0", "decoder4.0"):
        texts.put(f"{texts.real(f'/sys/bus/cxl/devices/{name}')}/region", "")
    topology = cxl_topology(ModelKernel(texts))
    [(reason, command)] = problems(topology, "mem0")
    assert reason == "no region maps its ram"
    assert command.startswith("cd /sys/bus/cxl/devices && r=$(cat decoder0.0/create_ram_region) && ")
    assert command.endswith(
        " && echo decoder3.0 >$r/target0 && echo 1 >$r/commit && echo $r >../drivers/cxl_region/bind"
    )


def test_the_command_for_a_volatile_region_writes_what_the_kernel_wants_in_its_order(tmp_path: Path) -> None:
    """A shell runs it on plain files, where the next region is called region7."""
    bus = tmp_path / "bus/cxl"
    for folder in ("devices/decoder0.1", "devices/decoder4.0", "devices/decoder5.0", "devices/region7"):
        (bus / folder).mkdir(parents=True)
    (bus / "drivers/cxl_region").mkdir(parents=True)
    (bus / "devices/decoder0.1/create_ram_region").write_text("region7\n")
    command = region_command("decoder0.1", [("decoder4.0", 1 << 28), ("decoder5.0", 1 << 28)], 512)
    subprocess.run(["sh", "-ec", command.replace("/sys/bus/cxl", str(bus), 1)], check=True)
    written = {str(path.relative_to(bus)): path.read_text().strip() for path in bus.rglob("*") if path.is_file()}
    assert written == {
        "devices/decoder0.1/create_ram_region": "region7",
        "devices/decoder4.0/mode": "ram",
        "devices/decoder4.0/dpa_size": "0x10000000",
        "devices/decoder5.0/mode": "ram",
        "devices/decoder5.0/dpa_size": "0x10000000",
        "devices/region7/interleave_granularity": "512",
        "devices/region7/interleave_ways": "2",
        "devices/region7/size": "0x20000000",
        "devices/region7/target0": "decoder4.0",
        "devices/region7/target1": "decoder5.0",
        "devices/region7/commit": "1",
        "drivers/cxl_region/bind": "region7",
    }
    order = [step.path for step in region_steps("decoder0.1", "region7", [("decoder4.0", 1 << 28)])]
    assert order.index("decoder4.0/dpa_size") < order.index("region7/size") < order.index("region7/target0")
    assert order[-2:] == ["region7/commit", "../drivers/cxl_region/bind"]


def test_a_region_whose_card_was_disabled_says_which() -> None:
    texts = tree("volatile-devdax")
    texts.remove(f"{texts.real('/sys/bus/cxl/devices/mem1')}/driver")
    topology = cxl_topology(ModelKernel(texts))
    assert problems(topology, "region0") == [("of its interleave set mem1 is not enabled", "cxl enable-memdev mem1")]


def test_a_region_that_nothing_shows_needs_its_driver() -> None:
    texts = tree("volatile-devdax")
    texts.remove("/sys/bus/dax/devices/dax0.0")
    assert problems(cxl_topology(ModelKernel(texts)), "region0") == [
        ("enabled, but no dax device shows its memory", "modprobe dax_cxl")
    ]


def test_a_card_that_no_port_leads_to_says_what_is_missing() -> None:
    texts = tree("system-ram")
    texts.remove("/sys/bus/cxl/devices/endpoint2")
    (problem,) = problems(cxl_topology(ModelKernel(texts)), "mem0")
    assert problem[1] == "cxl disable-memdev mem0 && cxl enable-memdev mem0"
    texts.remove("/sys/bus/cxl/devices/root0")
    (problem,) = problems(cxl_topology(ModelKernel(texts)), "mem0")
    assert problem[1] == "modprobe cxl_acpi"


def test_a_port_without_a_driver_is_a_problem() -> None:
    texts = tree("volatile-devdax")
    for name in ("endpoint3", "port2"):
        texts.remove(f"{texts.real(f'/sys/bus/cxl/devices/{name}')}/driver")
    topology = cxl_topology(ModelKernel(texts))
    assert problems(topology, "endpoint3") == [("the endpoint port has no driver", "cxl enable-port -e endpoint3")]
    assert problems(topology, "port2") == [("the switch port has no driver", "cxl enable-port port2")]


def test_a_machine_without_cxl_has_nothing_and_nothing_to_complain_about() -> None:
    assert cxl_topology(ModelKernel(Tree())) == Topology()


def test_attributes_that_may_not_be_read_are_complaints() -> None:
    kernel = ModelKernel(tree("volatile-devdax"))
    for _ in range(40):
        kernel.fail_next("read", errno.EACCES)
    topology = cxl_topology(kernel)
    assert any("Permission denied" in line for line in topology.complaints)
    assert [memdev.name for memdev in topology.memdevs] == ["mem0", "mem1"]


def test_numbers_are_in_their_order() -> None:
    texts = tree("volatile-devdax")
    for n in (10, 9, 2):
        texts.put(f"/sys/bus/cxl/devices/mem{n}/serial", str(n))
    names = [memdev.name for memdev in cxl_topology(ModelKernel(texts)).memdevs]
    assert names == ["mem0", "mem1", "mem2", "mem9", "mem10"]


GARBAGE = st.sampled_from([b"", b"\n", b"-1\n", b"0x\n", b"1e9\n", b"\xff\xfe\n", b"18446744073709551616\n", b"none\n"])


@settings(max_examples=60)
@given(name=st.sampled_from(TREES), data=st.data())
def test_no_damage_to_sysfs_makes_it_fail(name: str, data: st.DataObject) -> None:
    texts = tree(name)
    paths = sorted({*texts.files, *texts.links})
    for path in data.draw(st.lists(st.sampled_from(paths), max_size=12)):
        if data.draw(st.booleans()):
            texts.remove(path)
        elif path in texts.files:
            texts.files[path] = data.draw(GARBAGE)
        else:
            texts.links[path] = data.draw(st.sampled_from(["../nowhere", path, "/", ""]))
    topology = cxl_topology(ModelKernel(texts))
    for problem in topology.problems:
        assert str(problem)
    for part in (*topology.memdevs, *topology.decoders, *topology.regions, *topology.daxes, *topology.nodes):
        assert is_dataclass(part)
        numbers = [getattr(part, field.name) for field in fields(part) if field.name.endswith("nbytes")]
        assert all(number is None or 0 <= number < 1 << 64 for number in numbers)
