"""CXL memories of a guest as devices: which there are, and one devdax per boot for whoever asks first."""

from __future__ import annotations

import pytest

from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.machine import Cxl, Machine


def two_nodes(machine: Machine) -> list[int]:
    """The first node and the last one; skips the test where they are one."""
    if len(machine.nodes) < 2:
        pytest.skip("this machine has one node")
    return [machine.nodes[0].id, machine.nodes[-1].id]


def volatile_of(machine: Machine, count: int) -> tuple[Cxl, ...]:
    """The volatile memories of a bridge that has so many; skips the test where there is none."""
    for memories in machine.bridges.values():
        if len(memories) == count and not memories[0].persistent:
            return memories
    pytest.skip(f"this machine has no bridge with {count} volatile CXL memories")


def dax_of(machine: Machine, memories: tuple[Cxl, ...]) -> str:
    """The devdax over these memories: one that another test has set up, or a new one."""
    topology = cxl_topology()
    names = {cxl_regions.memdev_of(topology, memory) for memory in memories}
    for region in topology.regions:
        for dax in topology.daxes:
            if dax.region == region.name and set(region.memdevs) == names:
                if dax.mode != "devdax":
                    cxl_regions.devdax(dax.name)
                return dax.name
    return cxl_regions.volatile_region(memories).name
