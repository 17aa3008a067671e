"""The cxl driver on a memory node: pages that really lie there, and what is refused with which advice."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.cxl_rig import MIB, PAGE, a_site, tree
from tests.numa_rig import a_node_of_this_machine
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.numa import SYS_MOVE_PAGES
from tierloop.devices.errors import DeviceError, NoPermission, NotPresent, OutOfMemory, ProtocolError
from tierloop.devices.placement import Placements, memory_nodes
from tierloop.devices.site import Site
from tierloop.emulators.kernel import ModelKernel
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.emulators.numa_pages import Memory

site = a_site


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
