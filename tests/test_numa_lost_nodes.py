"""Nodes that lose their memory after they were opened, and pages that are given back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numa_rig import PAGE, Machine, machine
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu import Cpu, open_cpu
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.numa_topology import NODES
from tierloop.devices.errors import NotPresent
from tierloop.devices.site import Site
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.emulators.numa_pages import Memory


def offline(two: Machine, node: int) -> None:
    """All of a node's memory is taken offline, as daxctl does it."""
    two.memory.nodes[node] = Memory(0)
    two.kernel.tree.put(f"{NODES}/node{node}/meminfo", f"Node {node} MemTotal: 0 kB\nNode {node} MemFree: 0 kB")


def opened(two: Machine, options: dict[str, Any]) -> Cpu:
    return open_cpu("dram", Site(WallClock()), {"capacity": 1 << 20, "cores": [0], **options}, two.kernel)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": [0, 2], "placement": "interleave"},
        {"nodes": [0, 2]},
        {"nodes": [0, 2], "placement": "weighted-interleave", "weights": [1, 3]},
    ],
    ids=["interleave", "bind", "weighted"],
)
def test_a_node_that_lost_its_memory_is_named_and_not_left_out(options: dict[str, Any]) -> None:
    two = machine("two-sockets-cxl")
    device = opened(two, options)
    assert device.alloc(8 * PAGE).nbytes == 8 * PAGE
    offline(two, 2)
    used = dict(two.memory.used)
    with pytest.raises(NotPresent, match=r"dram: alloc: nodes 2 have no memory any more .*; allowed: 0-1,4"):
        device.alloc(8 * PAGE)
    assert two.memory.used == used
    device.close()


def test_a_container_that_forbids_asking_for_policies_still_binds() -> None:
    two = machine("two-sockets-cxl")
    two.memory.forbid("get_mempolicy")
    device = opened(two, {"nodes": [0, 2], "placement": "interleave"})
    region = device.alloc(8 * PAGE)
    assert region.view is not None
    assert set(two.memory.pages_at(region.view.ctypes.data, 8 * PAGE)) == {0, 2}
    device.close()


@given(
    nbytes=st.integers(1, 1 << 34).map(lambda pages: pages // PAGE * PAGE + PAGE),
    weights=st.lists(st.integers(1, 255), min_size=1, max_size=300),
    page=st.sampled_from([PAGE, 2 << 20]),
)
def test_runs_of_any_number_of_nodes_make_up_the_range(nbytes: int, weights: list[int], page: int) -> None:
    nbytes = -(-nbytes // page) * page
    cut = numa.runs(nbytes, range(len(weights)), weights, page)
    ends = [offset + length for offset, length, _ in cut]
    assert [offset for offset, _, _ in cut] == [0, *ends[:-1]]
    assert ends[-1] == nbytes
    assert all(length > 0 and length % page == 0 for _, length, _ in cut)
    assert len(cut) <= max(numa.MOST_RUNS, len(weights))


def test_memory_of_a_node_that_is_freed_lies_nowhere_and_comes_back_as_zeros() -> None:
    kernel = cxl_machine(mode="system-ram")
    memory = NumaMemory.of(kernel)
    device = open_cxl("cxl0", Site(WallClock()), {"node": 1, "capacity": 64 * PAGE}, kernel)
    region = device.alloc(8 * PAGE)
    view = region.view
    assert view is not None
    view[:] = 7
    device.free(region)
    assert memory.used[1] == 0
    again = device.alloc(8 * PAGE)
    assert again.view is not None
    assert again.view.ctypes.data == view.ctypes.data
    assert not again.view.any()
    assert memory.used[1] == 8 * PAGE
    device.close()
