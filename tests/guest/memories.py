"""CXL memories of a guest as devices: which there are, and one devdax per boot for whoever asks first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.machine import Cxl, Machine


def two_nodes(machine: Machine) -> list[int]:
    """The first node and the last one; skips the test where they are one."""
    if len(machine.nodes) < 2:
        pytest.skip("this machine has one node")
    return [machine.nodes[0].id, machine.nodes[-1].id]


def lone(machine: Machine) -> tuple[Cxl, ...]:
    """A volatile memory that has a bridge for itself; skips the test where there is none."""
    return _bridge(machine, "with one volatile CXL memory", lambda count: count == 1)


def interleavable(machine: Machine) -> tuple[Cxl, ...]:
    """The volatile memories of a bridge that has several; skips the test where there is none."""
    return _bridge(machine, "with several volatile CXL memories", lambda count: count > 1)


def _bridge(machine: Machine, what: str, fits: Callable[[int], bool]) -> tuple[Cxl, ...]:
    for memories in machine.bridges.values():
        if fits(len(memories)) and not memories[0].persistent:
            return memories
    pytest.skip(f"this machine has no bridge {what}")


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
