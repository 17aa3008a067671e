"""NUMA nodes of a real kernel: what it shows of them, and that pages lie where our binding puts them."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tests.guest.memories import two_nodes
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.numa_mapping import mapped
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.system import HOST
from tierloop.tools.guest.machine import Machine

PAGES = 32
SHARE_THAT_IS_SEEN = 0.75
"""The kernel keeps some of a node's memory for itself; node 0 loses most."""


def pages_of(count: int = PAGES) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
    memory = mapped(HOST, "dram", count * numa.PAGE)
    return memory, memory.ctypes.data


def test_the_kernel_shows_the_nodes_that_were_described(machine: Machine) -> None:
    nodes = numa_topology(HOST).nodes
    for node in machine.nodes:
        assert len(nodes[node.id].cpus) == node.cpus
        assert SHARE_THAT_IS_SEEN * (node.mib << 20) <= nodes[node.id].nbytes <= node.mib << 20


def test_distances_are_those_that_were_described(machine: Machine) -> None:
    nodes = numa_topology(HOST).nodes
    for a, b, value in machine.distances:
        if max(a, b) < len(machine.nodes):
            assert nodes[a].distances[b] == nodes[b].distances[a] == value
    assert all(nodes[node.id].distances[node.id] == 10 for node in machine.nodes)


def test_hmat_says_of_each_node_what_its_best_initiator_was_described_to_see(machine: Machine) -> None:
    nodes = numa_topology(HOST).nodes
    checked = 0
    for node in machine.nodes:
        best = [way for way in machine.paths if way.target == node.id and way.source == machine.initiator(node)]
        for way in best:
            access = next(one for one in nodes[node.id].access if one.level == 0)
            assert way.source in access.initiators
            assert access.read_latency_ns == way.latency_ns
            assert access.read_bytes_per_s == way.mb_per_s * 1_000_000
            checked += 1
    assert checked == len({way.target for way in machine.paths if way.target < len(machine.nodes)})


def test_slower_nodes_stand_in_a_lower_tier(machine: Machine) -> None:
    nodes = numa_topology(HOST).nodes
    tiers = {node.id: nodes[node.id].tier for node in machine.nodes}
    with_cpus = {tiers[node.id] for node in machine.nodes if node.cpus}
    without = {tiers[node.id] for node in machine.nodes if not node.cpus}
    assert all(tiers.values())
    assert not with_cpus & without


@pytest.mark.parametrize("count", [1, 7, 256])
def test_bound_pages_lie_on_their_node(machine: Machine, count: int) -> None:
    for node in machine.nodes:
        memory, address = pages_of(count)
        numa.bind(HOST, "dram", address, memory.nbytes, "bind", [node.id])
        assert numa.touch(HOST, "dram", address, memory.nbytes)
        assert set(numa.nodes_of(HOST, address, memory.nbytes)) == {node.id}


def test_pages_that_nobody_touched_lie_nowhere() -> None:
    memory, address = pages_of()
    assert set(numa.nodes_of(HOST, address, memory.nbytes)) <= {-errno.ENOENT, -errno.EFAULT}


def test_moved_pages_lie_on_the_other_node_and_keep_their_bytes(machine: Machine) -> None:
    for source in machine.nodes:
        for target in machine.nodes:
            memory, address = pages_of()
            numa.bind(HOST, "dram", address, memory.nbytes, "bind", [source.id])
            memory[:] = np.random.default_rng(source.id).integers(0, 256, memory.nbytes, dtype=np.uint8)
            before = memory.copy()
            assert set(numa.move(HOST, address, memory.nbytes, target.id)) == {target.id}
            assert set(numa.nodes_of(HOST, address, memory.nbytes)) == {target.id}
            assert np.array_equal(memory, before)


def test_interleaved_pages_lie_on_all_nodes_alike(machine: Machine) -> None:
    nodes = [node.id for node in machine.nodes]
    memory, address = pages_of(PAGES * len(nodes))
    numa.bind(HOST, "dram", address, memory.nbytes, "interleave", nodes)
    memory[:] = 1
    found = numa.nodes_of(HOST, address, memory.nbytes)
    assert {node: int((found == node).sum()) for node in nodes} == dict.fromkeys(nodes, PAGES)


def test_weights_are_kept(machine: Machine) -> None:
    nodes = two_nodes(machine)
    memory, address = pages_of(4 * PAGES)
    numa.bind(HOST, "dram", address, memory.nbytes, "weighted-interleave", nodes, [3, 1])
    memory[:] = 1
    found = numa.nodes_of(HOST, address, memory.nbytes)
    assert (int((found == nodes[0]).sum()), int((found == nodes[1]).sum())) == (3 * PAGES, PAGES)


def test_the_kernels_own_weights_can_be_read(machine: Machine) -> None:
    assert len(numa.kernel_weights(HOST, [node.id for node in machine.nodes])) == len(machine.nodes)


def test_a_node_that_is_not_there_is_refused() -> None:
    memory, address = pages_of(1)
    memory[:] = 1
    with pytest.raises(OSError, match=r"No such device|Invalid argument") as refused:
        numa.move(HOST, address, memory.nbytes, numa.HIGHEST_NODE)
    assert refused.value.errno in (errno.ENODEV, errno.EINVAL)
