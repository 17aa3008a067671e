"""This kernel and the model of one answer alike, and this machine's memory lies where it was wanted.

On a machine with one node most of it is about nodes that are not there. With several (a guest will do) it is about all
of them: these tests import no compiled kernels, so that they run on a slow guest, too.
"""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numa_rig import PAGE, a_node_of_this_machine
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu_options import read_options
from tierloop.devices.drivers.cpu_pages import Pages
from tierloop.devices.drivers.numa_mapping import advise, free_pages, mapped, run_on
from tierloop.devices.drivers.numa_topology import NODES, numa_topology
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.placement import Placement
from tierloop.devices.regions import Region
from tierloop.devices.system import HOST, System
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_numa import NumaMemory

PAGES = 24
RECORDED = ("cpulist", "distance", "meminfo")
MPOLS = [numa.MPOL_BIND, numa.MPOL_PREFERRED, numa.MPOL_INTERLEAVE, numa.MPOL_PREFERRED_MANY]


def this_machine() -> ModelKernel:
    """A model of this machine, by what its kernel shows."""
    tree = Tree()
    topology = numa_topology(HOST)
    paths = [f"{NODES}/online", "/proc/self/status", "/proc/zoneinfo"]
    paths += [f"{NODES}/node{node}/{name}" for node in topology.nodes for name in RECORDED]
    for path in paths:
        tree.put(path, Path(path).read_bytes())
    kernel = ModelKernel(tree)
    NumaMemory.of(kernel)
    return kernel


def several_nodes() -> tuple[int, ...]:
    a_node_of_this_machine()
    nodes = numa_topology(HOST).with_memory
    if len(nodes) < 2:
        pytest.skip("this machine has one node with memory")
    return nodes


def from_home(call: Callable[[], None]) -> None:
    """Call on a thread that runs on one core of the first node, which is home for pages without a policy."""
    topology = numa_topology(HOST)
    home = topology.nodes[topology.with_cpus[0]].cpus & topology.allowed_cpus
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            run_on(HOST, [min(home)])
            call()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if wrong:
        raise wrong[0]


class Scratch:
    """A few pages on one kernel, and what it answers to calls on them: a result, or an errno."""

    def __init__(self, system: System, pages: int) -> None:
        self.system = system
        self.memory = mapped(system, "dram", 2 * pages * PAGE)
        advise(system, self.memory, huge=False)
        whole = self.memory.ctypes.data // PAGE
        self.first = (whole + -whole % pages) * PAGE  # pages take turns by their numbers: alike on both kernels

    def bind(self, at: int, pages: int, mode: int, mask: int, maxnode: int) -> int:
        words = np.array([mask], dtype=np.uint64)
        return self._answer(numa.SYS_MBIND, self.first + at, pages * PAGE, mode, words.ctypes.data, maxnode, 0)

    def touch(self, at: int, pages: int) -> int:
        return self._answer(numa.SYS_MADVISE, self.first + at, pages * PAGE, numa.MADV_POPULATE_WRITE)

    def move(self, at: int, pages: int, node: int) -> list[int] | int:
        try:
            return list(map(int, numa.move(self.system, self.first + at // PAGE * PAGE, pages * PAGE, node)))
        except OSError as error:
            return error.errno or 0

    def seen(self) -> list[Any]:
        nodes = numa.nodes_of(self.system, self.first, PAGES * PAGE).tolist()
        return [(node, numa.policy_of(self.system, self.first + n * PAGE)) for n, node in enumerate(nodes)]

    def _answer(self, number: int, *arguments: int) -> int:
        try:
            return self.system.syscall(number, *arguments)
        except OSError as error:
            return -(error.errno or 0)


PLACES = st.tuples(st.sampled_from([0, 0, 0, 8]), st.integers(0, PAGES - 1), st.integers(0, PAGES)).map(
    lambda at: (at[0] + at[1] * PAGE, min(at[2], PAGES - at[1]))
)
CALLS = st.one_of(
    st.tuples(
        st.just("bind"),
        PLACES,
        st.sampled_from([*MPOLS, 77]),
        st.integers(0, 15) | st.sampled_from([1 << 7, 1 << 7 | 1]),
        st.sampled_from([65, 65, 65, 1, 2, 3, 5]),
    ),
    st.tuples(st.just("touch"), PLACES),
    st.tuples(st.just("move"), PLACES, st.integers(0, 4)),
)


@settings(max_examples=40)
@given(st.lists(CALLS, max_size=10))
def test_this_kernel_and_the_model_answer_alike(calls: list[Any]) -> None:
    a_node_of_this_machine()

    def compare() -> None:
        here, there = Scratch(HOST, 24), Scratch(this_machine(), 24)
        if here.touch(0, 0) != 0:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        for name, place, *rest in calls:
            answers = [getattr(scratch, name)(*place, *rest) for scratch in (here, there)]
            assert answers[0] == answers[1], (name, place, rest)
            assert here.seen() == there.seen(), (name, place, rest)

    from_home(compare)


def test_the_kernel_drops_nodes_that_are_not_there_without_a_word() -> None:
    """Why nodes are checked before, and pages looked at after."""
    node = a_node_of_this_machine()
    scratch = Scratch(HOST, PAGES)
    absent = max(numa_topology(HOST).nodes) + 1
    numa.bind(HOST, "dram", scratch.first, PAGE, "bind", [node, absent])
    assert numa.policy_of(HOST, scratch.first) == (numa.MPOL_BIND, frozenset({node}))


# -- where the driver's memory lies -----------------------------------------------------------------------------------


def made(nbytes: int, **options: Any) -> tuple[Pages, Placement]:
    """Memory as the cpu driver makes it, and where it lies."""
    pages = Pages("dram", HOST, read_options("dram", {"capacity": nbytes, **options}, HOST))
    region = Region("dram", "dram", 0, nbytes, view=pages.make(nbytes))
    placement = pages.look(region)
    pages.judge(placement)
    return pages, placement


def test_each_node_of_this_machine_holds_what_is_put_there() -> None:
    a_node_of_this_machine()
    for node in numa_topology(HOST).with_memory:
        for placement in ("bind", "preferred"):
            _, found = made(64 * PAGE, node=node, placement=placement)
            assert (found.found, found.absent) == ({node: 64}, 0)


def test_pages_of_this_machine_take_turns_by_weight() -> None:
    first, second, *_ = several_nodes()
    _, found = made(64 * PAGE, nodes=[first, second], placement="interleave", huge_pages="none")
    assert found.found == {first: 32, second: 32}
    weights = {"placement": "weighted-interleave", "weights": [3, 1], "huge_pages": "none"}
    _, found = made(64 * PAGE, nodes=[first, second], **weights)
    assert found.found == {first: 48, second: 16}


def test_pages_that_this_kernel_moved_are_found_by_the_next_look() -> None:
    first, second, *_ = several_nodes()
    pages, before = made(8 * PAGE, node=second, huge_pages="none")
    view = before.region.view
    assert view is not None
    numa.move(HOST, view.ctypes.data, 3 * PAGE, first)
    after = pages.look(before.region)
    assert (after.elsewhere, after.found) == (3, {first: 3, second: 5})


@pytest.mark.parametrize("name", ["2MiB", "1GiB"])
def test_pools_of_this_machine_are_used_where_root_has_filled_them(name: str) -> None:
    node = a_node_of_this_machine()
    nbytes = {"2MiB": 2 << 20, "1GiB": 1 << 30}[name]
    if not free_pages(HOST, nbytes, [node]):
        with pytest.raises(OutOfMemory, match=posixpath.join(f"node{node}", "hugepages")):
            made(nbytes, node=node, huge_pages=name)
        return
    _, found = made(nbytes, node=node, huge_pages=name)
    assert found.found == {node: nbytes // PAGE}


def test_a_pool_that_is_empty_on_one_node_is_no_signal() -> None:
    nodes = several_nodes()
    empty = [node for node in nodes if not free_pages(HOST, 2 << 20, [node])]
    if not empty or not free_pages(HOST, 2 << 20):
        pytest.skip("needs huge pages of 2 MiB on some nodes and none on another")
    memory = mapped(HOST, "dram", 2 << 20, page=2 << 20)
    numa.bind(HOST, "dram", memory.ctypes.data, 2 << 20, "bind", [empty[0]], page=2 << 20)
    with pytest.raises(OutOfMemory):
        numa.touch(HOST, "dram", memory.ctypes.data, 2 << 20)


def test_the_affinity_of_the_process_is_as_it_was() -> None:
    a_node_of_this_machine()
    before = os.sched_getaffinity(0)
    from_home(lambda: None)
    assert os.sched_getaffinity(0) == before
