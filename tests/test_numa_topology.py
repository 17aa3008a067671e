"""What a machine's nodes are, what this process may use of them, and which tiering goes on behind us."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numa_rig import TREES, machine
from tierloop.devices.drivers.gpu_probe import gpu_slots
from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.drivers.numa import kernel_weights
from tierloop.devices.drivers.numa_mapping import free_pages
from tierloop.devices.drivers.numa_tiering import BALANCING, DAMON, DEMOTION, tiering
from tierloop.devices.drivers.numa_topology import (
    NODES,
    Node,
    NumaTopology,
    free_nbytes,
    numa_topology,
    numbers_of,
    shown,
)
from tierloop.devices.system import HOST
from tierloop.emulators.kernel import ModelKernel, Tree

GIB = 1 << 30


def topology(name: str) -> NumaTopology:
    return numa_topology(machine(name).kernel)


def test_a_laptop_has_one_node_with_everything() -> None:
    laptop = topology("laptop")
    assert (laptop.with_memory, laptop.with_cpus) == ((0,), (0,))
    assert laptop.allowed_cpus == laptop.nodes[0].cpus == set(range(8))
    assert laptop.nodes[0].access == ()


def test_numbers_of_nodes_have_gaps_and_cards_have_no_cores() -> None:
    two = topology("two-sockets-cxl")
    assert list(two.nodes) == [0, 1, 2, 4]
    assert [node.has_cpu for node in two.nodes.values()] == [True, True, False, False]
    assert two.with_memory == (0, 1, 2, 4)
    assert two.nodes[4].distances == {0: 24, 1: 14, 2: 26, 4: 10}
    assert two.nodes[2].nbytes == 32 * GIB
    assert [node.movable_nbytes // GIB for node in two.nodes.values()] == [0, 0, 32, 16]
    assert {n: node.tier for n, node in two.nodes.items()} == {
        0: "memory_tier4",
        1: "memory_tier4",
        2: "memory_tier87",
        4: "memory_tier95",
    }


def test_free_memory_counts_files_that_can_be_dropped() -> None:
    two = machine("two-sockets-cxl").kernel
    assert numa_topology(two).nodes[0].free_nbytes == free_nbytes(two, 0) == (56 + 4) * GIB
    two.tree.put(f"{NODES}/node0/meminfo", "Node 0 MemTotal: 90 kB\nNode 0 MemFree: 10 kB\nNode 0 Active(file): 8 kB")
    assert free_nbytes(two, 0) == (10 + 4) * 1024


def test_a_container_sees_the_machine_and_may_use_a_part_of_it() -> None:
    container = topology("restricted-cpuset")
    assert list(container.nodes) == [0, 1]
    assert (container.with_memory, container.with_cpus) == ((1,), (1,))
    assert container.allowed_cpus == {8, 9, 10}


def test_the_table_of_the_firmware_describes_paths_from_its_best_initiators_only() -> None:
    two = topology("two-sockets-cxl")
    here = two.path({0, 3}, "cxl", 2)
    assert (here.memory, here.latency_ns) == ("cxl", 250)
    assert (here.read_bytes_per_s, here.write_bytes_per_s) == (32_768_000_000, 30_720_000_000)
    for cores, node in (({8}, 2), ({0, 8}, 2), (set(), 2), ({0}, None), ({0}, 3)):
        there = two.path(cores, "cxl", node)
        assert (there.latency_ns, there.read_bytes_per_s, there.write_bytes_per_s) == (0, 0, 0)


def test_cores_of_a_node_without_any_are_those_of_the_nearest() -> None:
    two = topology("two-sockets-cxl")
    assert two.cpus_near([2]) == set(range(8))
    assert two.cpus_near([4]) == set(range(8, 16))
    assert two.cpus_near([1]) == set(range(8, 16))
    assert two.cpus_near([]) == set(range(16))


def test_cores_outside_the_cpuset_are_not_offered() -> None:
    assert topology("restricted-cpuset").cpus_near([0]) == {8, 9, 10}
    assert topology("restricted-cpuset").cpus_near([1]) == {8, 9, 10}


def test_a_recorded_kernel_is_read_as_it_was_set_up() -> None:
    three = topology("three-nodes")
    assert [(node.has_cpu, node.has_memory, node.tier) for node in three.nodes.values()] == [
        (True, True, "memory_tier4"),
        (True, True, "memory_tier4"),
        (False, True, "memory_tier87"),
    ]
    assert three.nodes[2].distances == {0: 31, 1: 41, 2: 10}
    assert three.path({0}, "cxl", 2).latency_ns == 250
    assert three.path({1}, "cxl", 2).latency_ns == 0
    assert three.cpus_near([2]) == {0}


def test_a_node_with_cores_and_no_memory_is_a_node() -> None:
    tree = Tree.read(TREES / "laptop.tree")
    tree.put(f"{NODES}/node3/cpulist", "8-9")
    tree.put(f"{NODES}/node3/meminfo", "Node 3 MemTotal: 0 kB\nNode 3 MemFree: 0 kB")
    bare = numa_topology(ModelKernel(tree)).nodes[3]
    assert (bare.has_cpu, bare.has_memory) == (True, False)


def test_a_kernel_without_nodes_has_none() -> None:
    nothing = numa_topology(ModelKernel())
    assert (nothing.nodes, nothing.with_memory, nothing.allowed_cpus) == ({}, (), frozenset())


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.integers(0, 200))
def test_files_that_make_no_sense_count_as_not_there(garbage: str, which: int) -> None:
    tree = Tree.read(TREES / "two-sockets-cxl.tree")
    path = sorted(tree.files)[which % len(tree.files)]
    tree.put(path, garbage)
    kernel = ModelKernel(tree)
    found = numa_topology(kernel)
    assert set(found.nodes) == {0, 1, 2, 4}
    tiering(kernel)
    found.cpus_near([2])
    found.path({0}, "x", 2)


@given(st.sets(st.integers(0, 300)))
def test_lists_are_written_as_they_are_read(numbers: set[int]) -> None:
    assert numbers_of(shown(numbers)) == numbers


@pytest.mark.parametrize("text", ["3-1", "x", "0-99999999999", "-1", "1--2"])
def test_lists_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        numbers_of(text)


def test_this_machine_is_described_as_the_scheduler_sees_it() -> None:
    here = numa_topology(HOST)
    assert here.allowed_cpus == os.sched_getaffinity(0)
    assert here.nodes_of_cpus(here.allowed_cpus) <= set(here.nodes)


# -- tiering --------------------------------------------------------------------------------------------------------


def test_tiering_that_is_on_says_what_it_does_and_how_to_end_it() -> None:
    found = tiering(machine("two-sockets-cxl").kernel)
    assert [one.name for one in found] == ["numa_balancing = 2", "demotion"]
    assert "promotes hot pages" in found[0].means
    assert found[0].off == f"echo 0 > {BALANCING}"
    assert found[1].off == f"echo false > {DEMOTION}"
    assert "bound ones too" in str(found[1])


def test_a_machine_without_tiering_has_nothing_to_say() -> None:
    assert tiering(machine("laptop").kernel) == ()


def test_damon_is_named_with_what_its_schemes_do() -> None:
    kernel = machine("laptop").kernel
    kernel.tree.put(f"{DAMON}/1/state", "on")
    for number, action in enumerate(("migrate_cold", "stat", "migrate_cold")):
        kernel.tree.put(f"{DAMON}/1/contexts/0/schemes/{number}/action", action)
    kernel.tree.put(f"{DAMON}/2/state", "on")
    kernel.tree.put("/sys/module/damon_reclaim/parameters/enabled", "Y")
    found = {one.name: one for one in tiering(kernel)}
    assert found["DAMON kdamond 1"].means == "its schemes do: migrate_cold, stat"
    assert "no schemes" in found["DAMON kdamond 2"].means
    assert found["damon_reclaim"].off == "echo N > /sys/module/damon_reclaim/parameters/enabled"
    assert found["damon_reclaim"].to_json()["name"] == "damon_reclaim"


@pytest.mark.parametrize(("bits", "words"), [("1", ["touch them"]), ("3", ["touch them", "promotes"]), ("0", [])])
def test_balancing_is_a_mask(bits: str, words: list[str]) -> None:
    kernel = machine("laptop").kernel
    kernel.tree.put(BALANCING, bits)
    said = " ".join(map(str, tiering(kernel)))
    assert all(word in said for word in words)
    assert bool(said) == bool(words)


NO_NUMBERS = [
    "\u00b2",
    "9" * 5000,
    "-1",
    "0",
    "x kB",
    "1_000",
    ":",
    "0::",
    "MemAvailable:",
    "inactive_file x",
    "0-\u00b2",
]
"""Among them what Python takes for digits and what it does not turn into numbers."""


@pytest.mark.parametrize("text", [*NO_NUMBERS, *(f"Node 0, zone Movable\n managed {n}" for n in NO_NUMBERS)])
def test_no_file_of_a_kernel_makes_looking_at_memory_fail(text: str) -> None:
    tree = Tree.read(TREES / "two-sockets-cxl.tree")
    kernel = ModelKernel(tree)
    for path in [path for path in tree.files if not path.startswith("/sys/devices/system/cpu")]:
        before, tree.files[path] = tree.files[path], f"{text}\n".encode()
        found = numa_topology(kernel)
        assert (
            min([free_pages(kernel, 2 << 20, [0]), available_nbytes(kernel), *map(_least, found.nodes.values())]) >= 0
        )
        assert all(weight > 0 for weight in kernel_weights(kernel, [0, 1]))
        tiering(kernel)
        gpu_slots(kernel)
        tree.files[path] = before


def _least(node: Node) -> int:
    return min(node.nbytes, node.free_nbytes, node.movable_nbytes, *node.distances.values())


def test_weights_of_nothing_are_no_weights() -> None:
    folder = "/sys/kernel/mm/mempolicy/weighted_interleave"
    kernel = ModelKernel(Tree({f"{folder}/node0": "0", f"{folder}/node1": "0"}))
    assert kernel_weights(kernel, [0, 1]) == ()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/proc/meminfo", "MemAvailable: x kB"),
        ("/proc/meminfo", "MemAvailable:"),
        ("/proc/meminfo", "\u00ff\u00b2"),
        ("/proc/self/cgroup", "nonsense"),
        ("/proc/self/cgroup", ":"),
        ("/sys/fs/cgroup/memory.max", "\u00b2"),
        ("/sys/fs/cgroup/memory.current", "9" * 5000),
        ("/sys/fs/cgroup/memory.stat", "inactive_file many"),
    ],
)
def test_what_is_left_is_known_as_far_as_files_make_sense(path: str, text: str) -> None:
    root = "/sys/fs/cgroup"
    texts = {"/proc/meminfo": "MemAvailable:  4000 kB", "/proc/self/cgroup": "0::/", f"{root}/memory.max": "3072000",
             f"{root}/memory.current": "0", f"{root}/memory.stat": "inactive_file 0"}  # fmt: skip
    group = 4096000 if path in ("/proc/self/cgroup", f"{root}/memory.max", f"{root}/memory.current") else 3072000
    assert available_nbytes(ModelKernel(Tree({**texts, path: text}))) == group
