"""The cpu driver on NUMA nodes: what it takes, where its regions lie, and what it says when they do not.

Machines are models of recorded ones, and this one where it lets memory be bound.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.numa_rig import PAGE, Machine, a_node_of_this_machine, machine, small
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu import Cpu, open_cpu
from tierloop.devices.drivers.cpu_options import read_options
from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.errors import (
    ConfigurationError,
    DeviceError,
    NoPermission,
    OutOfMemory,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.placement import Placements, memory_nodes
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.numa_pages import Memory

GIB = 1 << 30
SMALL: dict[str, Any] = {"capacity": 16 * PAGE, "queues": 1, "threads": 1}


@pytest.fixture
def site() -> Site:
    return Site(WallClock())


@pytest.fixture
def two() -> Machine:
    return machine("two-sockets-cxl")


@pytest.fixture
def cxl(site: Site, two: Machine) -> Iterator[Cpu]:
    opened = open_cpu("cxl", site, {**SMALL, "node": 2}, two.kernel)
    yield opened
    opened.close()


def pages_of(two: Machine, region: Region) -> list[int | None]:
    assert region.view is not None
    return two.memory.pages_at(region.view.ctypes.data, region.nbytes)


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"node": 3}, "dram: node 3 is not there; allowed: 0-2,4"),
        ({"node": "0"}, "dram: nodes = "),
        ({"node": True}, "dram: nodes = "),
        ({"node": 0, "nodes": [0]}, "node and nodes are both given"),
        ({"nodes": 0}, "allowed: a list of numbers of nodes"),
        ({"nodes": []}, "at least one"),
        ({"nodes": [0, 0]}, "named twice"),
        ({"placement": "bind"}, "placement needs node or nodes"),
        ({"weights": [1]}, "weights needs node or nodes"),
        ({"node": 0, "placement": "near"}, "placement = 'near'; allowed: bind, preferred, interleave"),
        ({"nodes": [0, 1], "placement": "weighted-interleave"}, "needs weights"),
        ({"nodes": [0, 1], "placement": "weighted-interleave", "weights": 3}, "weights = 3"),
        ({"nodes": [0, 1], "placement": "weighted-interleave", "weights": [3]}, "one integer from 1 to 255"),
        ({"huge_pages": "4MiB"}, "huge_pages = '4MiB'; allowed: transparent, none, 2MiB, 1GiB"),
        ({"huge_pages": ["none"]}, "huge_pages = "),
        ({"node": 4, "capacity": 17 * GIB}, "nodes 4 have 17179869184 bytes in all"),
        ({"nodez": 1}, "did you mean 'node' or 'nodes'"),
        ({"cores": [16]}, "may not use core 16"),
    ],
)
def test_wrong_options_are_named_with_what_is_allowed(
    site: Site, two: Machine, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_cpu("dram", site, options, two.kernel)


def test_a_node_outside_the_cpuset_is_refused_with_those_inside(site: Site) -> None:
    container = machine("restricted-cpuset")
    with pytest.raises(ConfigurationError, match=r"no memory of node 0 \(its cpuset\); allowed: 1"):
        open_cpu("dram", site, {"node": 0}, container.kernel)
    with pytest.raises(ConfigurationError, match=r"may not use core 0; allowed: \[8, 9, 10\]"):
        open_cpu("dram", site, {"cores": [0]}, container.kernel)


def test_a_node_without_memory_is_refused(site: Site, two: Machine) -> None:
    two.kernel.tree.put("/sys/devices/system/node/node6/cpulist", "16-17")
    with pytest.raises(ConfigurationError, match="node 6 has no memory; allowed: 0-2,4"):
        open_cpu("dram", site, {"node": 6}, two.kernel)


def test_cores_are_those_of_the_node_that_the_process_may_use(two: Machine) -> None:
    assert read_options("dram", {"node": 1}, two.kernel).cores == set(range(8, 16))
    assert read_options("dram", {"node": 4}, two.kernel).cores == set(range(8, 16))
    assert read_options("dram", {"nodes": [0, 2]}, two.kernel).cores == set(range(8))
    assert read_options("dram", {}, two.kernel).cores == set(range(16))
    container = read_options("dram", {"node": 1}, machine("restricted-cpuset").kernel)
    assert (sorted(container.cores), container.threads) == ([8, 9, 10], 3)


def test_half_of_what_the_node_has_left_is_the_default_capacity(two: Machine) -> None:
    assert read_options("dram", {"node": 0}, two.kernel).capacity == 30 * GIB
    assert read_options("dram", {"nodes": [0, 1]}, two.kernel).capacity == 61 * GIB
    assert read_options("dram", {}, two.kernel).capacity == 84 * GIB


def test_groups_and_cpusets_limit_the_default_capacity_too() -> None:
    container = machine("restricted-cpuset").kernel
    free_in_the_group = 8 * GIB - (GIB - (256 << 20))
    assert read_options("dram", {"node": 1}, container).capacity == free_in_the_group // 2
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"):
        container.tree.remove(limit)
    assert available_nbytes(container) == 54 * GIB
    assert read_options("dram", {}, container).capacity == 14 * GIB


# -- where regions lie ------------------------------------------------------------------------------------------------


def test_a_region_lies_on_its_node_before_anybody_sees_it(two: Machine, cxl: Cpu) -> None:
    region = cxl.alloc(3 * PAGE + 1)
    assert two.memory.used[2] == 4 * PAGE
    assert region.view is not None
    assert region.view.nbytes == 3 * PAGE + 1
    assert not region.view.any()
    cxl.free(region)
    assert two.memory.used[2] == 0


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"nodes": [0, 2], "placement": "interleave"}, {0: 4, 2: 4}),
        ({"nodes": [0, 2], "placement": "weighted-interleave", "weights": [3, 1]}, {0: 6, 2: 2}),
        ({"nodes": [0, 2], "placement": "weighted-interleave", "weights": [1, 1]}, {0: 4, 2: 4}),
        ({"nodes": [4, 2]}, {2: 8}),
        ({"nodes": [4, 1], "placement": "preferred"}, {1: 8}),
    ],
)
def test_each_placement_puts_pages_where_it_says(
    site: Site, two: Machine, options: dict[str, Any], shares: dict[int, int]
) -> None:
    device = open_cpu("dram", site, {**SMALL, **options}, two.kernel)
    region = device.alloc(8 * PAGE)
    assert {node: nbytes // PAGE for node, nbytes in two.memory.used.items() if nbytes} == shares
    row = Placements.of(site).report()["memories"]["dram"]
    assert row["pages_per_node"] == {str(node): pages for node, pages in shares.items()}
    assert row["pages_elsewhere"] == 0
    device.free(region)
    device.close()


def test_a_node_that_is_full_is_out_of_memory_and_nothing_is_kept(site: Site) -> None:
    two = small(n2=5)
    device = open_cpu("cxl", site, {**SMALL, "node": 2}, two.kernel)
    kept = device.alloc(3 * PAGE)
    with pytest.raises(OutOfMemory, match="cxl: alloc: 12288 bytes cannot all be had"):
        device.alloc(3 * PAGE)
    assert two.memory.used[2] == 3 * PAGE
    device.free(kept)
    device.alloc(5 * PAGE)
    device.close()


def test_bind_asks_for_room_before_it_touches_anything(
    site: Site, two: Machine
) -> None:  # B10: whoever else has taken some
    device = open_cpu("cxl", site, {**SMALL, "node": 4}, two.kernel)
    two.kernel.tree.put("/sys/devices/system/node/node4/meminfo", "Node 4 MemTotal: 16777216 kB\nNode 4 MemFree: 8 kB")
    before = two.kernel.calls.count("syscall")
    with pytest.raises(OutOfMemory, match="12288 bytes; 8192 are free on nodes 4"):
        device.alloc(3 * PAGE)
    assert two.kernel.calls.count("syscall") == before
    device.close()


def test_what_a_control_group_would_not_survive_is_refused_before_anything_is_touched(site: Site) -> None:
    container = machine("restricted-cpuset")
    device = open_cpu("dram", site, {**SMALL, "node": 1, "placement": "preferred"}, container.kernel)
    used = GIB - (256 << 20)
    container.kernel.tree.put("/sys/fs/cgroup/memory.max", str(used + 2 * PAGE))
    device.alloc(2 * PAGE)
    with pytest.raises(
        OutOfMemory, match=rf"{3 * PAGE} bytes; {2 * PAGE} are free in what the machine and this process"
    ):
        device.alloc(3 * PAGE)
    assert container.memory.used[1] == 2 * PAGE
    device.close()


def test_a_wish_that_is_not_met_is_reported_and_no_error(site: Site) -> None:
    two = small(n2=2)
    device = open_cpu("cxl", site, {**SMALL, "node": 2, "placement": "preferred"}, two.kernel)
    region = device.alloc(5 * PAGE)
    assert pages_of(two, region) == [2, 2, 0, 0, 0]
    (moved,) = Placements.of(site).moved
    assert (moved.occasion, moved.placement.elsewhere, moved.placement.found) == ("allocation", 3, {2: 2, 0: 3})
    device.close()


def test_interleaving_that_overflows_is_out_of_memory_with_the_counts(site: Site) -> None:
    two = small(n2=1, n4=1)
    device = open_cpu("cxl", site, {**SMALL, "nodes": [2, 4], "placement": "interleave"}, two.kernel)
    with pytest.raises(OutOfMemory, match=r"on nodes 2,4: .* lie 2 on node 0, 2 on node 1, 1 on node 2, 1 on node 4"):
        device.alloc(6 * PAGE)
    assert sum(two.memory.used.values()) == 0
    device.close()


def test_a_kernel_that_breaks_its_promise_is_found_out(
    site: Site, two: Machine, cxl: Cpu, monkeypatch: pytest.MonkeyPatch
) -> None:  # C1
    monkeypatch.setattr(two.memory, "_choose", lambda page, home: 1)
    with pytest.raises(ProtocolError, match=r"placement = 'bind' on nodes 2: .* lie 2 on node 1"):
        cxl.alloc(2 * PAGE)
    assert two.memory.used[1] == 0
    assert Placements.of(site).report()["memories"] == {}
    monkeypatch.undo()
    cxl.alloc(2 * PAGE)


def test_pages_that_a_pin_or_the_kernel_moved_are_found_by_the_next_look(site: Site, two: Machine, cxl: Cpu) -> None:
    region, other = cxl.alloc(4 * PAGE), cxl.alloc(2 * PAGE)
    assert region.view is not None
    assert other.view is not None
    two.memory.pin(region.view.ctypes.data, 2 * PAGE)
    found = Placements.of(site).registered(region)
    assert found is not None
    assert found.found == {0: 2, 2: 2}
    two.memory.relocate(other.view.ctypes.data, 2 * PAGE, 1)
    Placements.of(site).again()
    assert [(m.placement.region, m.occasion) for m in Placements.of(site).moved] == [
        (region, "registration"),
        (other, "look"),
    ]


def test_without_nodes_nothing_is_bound_or_looked_at(site: Site, two: Machine) -> None:
    device = open_cpu("dram", site, SMALL, two.kernel)
    device.alloc(4 * PAGE)
    assert "syscall" not in two.kernel.calls
    assert Placements.of(site).report() == {"memories": {}, "moved": []}
    device.close()


def test_only_worker_threads_get_an_affinity(site: Site, two: Machine, cxl: Cpu) -> None:
    region = cxl.alloc(PAGE)
    assert two.memory.bound_to == []
    write_bytes(site.clock, cxl, region.all(), np.zeros(PAGE, dtype=np.uint8))
    assert two.memory.bound_to == [set(range(8))]


def test_the_policy_of_the_process_is_left_alone(site: Site) -> None:
    node = a_node_of_this_machine()
    device = open_cpu("dram", site, {"capacity": 1 << 20, "node": node, "threads": 1})
    before = os.sched_getaffinity(0)
    device.alloc(PAGE)
    mode = np.full(1, -1, dtype=np.int32)
    HOST.syscall(numa.SYS_GET_MEMPOLICY, mode.ctypes.data, 0, 0, 0, 0)
    assert mode[0] == numa.MPOL_DEFAULT
    assert os.sched_getaffinity(0) == before
    device.close()


def test_an_error_keeps_no_memory(site: Site) -> None:
    two = small(n2=2)
    device = open_cpu("cxl", site, {**SMALL, "node": 2}, two.kernel)
    with pytest.raises(OutOfMemory) as caught:
        device.alloc(3 * PAGE)
    assert caught.value.__traceback__ is not None
    assert two.memory.used[2] == 0
    device.close()


# -- what containers and old kernels refuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["bind", "interleave"])
def test_a_promise_that_the_process_may_not_make_is_refused_at_open(site: Site, placement: str) -> None:  # C3
    container = machine("restricted-cpuset")
    container.memory.forbid("mbind")
    with pytest.raises(NoPermission, match=r"dram: bind: .*CAP_SYS_NICE"):
        open_cpu("dram", site, {"node": 1, "placement": placement}, container.kernel)


def test_a_wish_is_carried_out_by_touching_where_binding_is_forbidden(site: Site) -> None:
    container = machine("restricted-cpuset", populates=False)
    container.memory.home = 1
    container.memory.forbid("mbind")
    device = open_cpu("dram", site, {**SMALL, "node": 1, "placement": "preferred"}, container.kernel)
    region = device.alloc(4 * PAGE)
    assert pages_of(container, region) == [1] * 4
    assert {8, 9, 10} in container.memory.bound_to
    assert "placed by who touches them first" in device.info.notes["not bound"]
    device.close()


def test_where_looking_is_forbidden_nothing_is_claimed(site: Site, two: Machine, cxl: Cpu) -> None:
    two.memory.forbid("move_pages")
    cxl.alloc(PAGE)
    row = Placements.of(site).report()["memories"]["cxl"]
    assert (row["pages_per_node"], row["unknown"]) == ({}, ["move_pages: Operation not permitted"])


def test_an_old_kernel_has_its_pages_touched_by_a_thread(site: Site) -> None:
    two = machine("two-sockets-cxl", populates=False)
    device = open_cpu("cxl", site, {**SMALL, "node": 4}, two.kernel)
    assert pages_of(two, device.alloc(3 * PAGE)) == [4] * 3
    assert two.memory.bound_to == [set(range(8, 16))]
    device.close()


# -- huge pages -----------------------------------------------------------------------------------------------------


def test_pages_of_a_pool_are_taken_and_given_back(site: Site, two: Machine) -> None:
    pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    device = open_cpu("dram", site, {"node": 0, "huge_pages": "2MiB", "queues": 1, "threads": 1}, two.kernel)
    assert device.info.memories[0].capacity == 512 * (2 << 20)
    region = device.alloc(3 << 20)
    assert region.view is not None
    assert region.view.ctypes.data % (2 << 20) == 0
    assert two.kernel.read_text(pool) == "510"
    device.free(region)
    assert two.kernel.read_text(pool) == "512"
    device.close()


def test_a_pool_that_the_kernel_does_not_have_is_unsupported(site: Site) -> None:
    with pytest.raises(Unsupported, match="this kernel has no huge pages of 1024 MiB"):
        open_cpu("dram", site, {"huge_pages": "1GiB"}, machine("laptop").kernel)


def test_a_node_that_leaves_the_cpuset_at_run_time_is_named_with_those_that_are_left(
    site: Site, two: Machine, cxl: Cpu
) -> None:
    kept, tree = cxl.alloc(PAGE), two.kernel.tree
    write_bytes(site.clock, cxl, kept.all(), np.full(PAGE, 7, dtype=np.uint8))
    for path, data in list(tree.files.items()):
        if path == "/proc/self/status" or path.endswith("cpuset.mems.effective"):
            tree.files[path] = data.replace(b"0-2,4", b"0-1,4")
    two.memory.nodes[2] = Memory(two.memory.nodes[2].nbytes, allowed=False)
    with pytest.raises(NoPermission, match=r"bind: nodes 2 are outside the process's cpuset now; allowed: 0-1,4"):
        cxl.alloc(PAGE)
    assert (read_bytes(site.clock, cxl, kept.all()) == 7).all()


def test_an_empty_pool_says_which_number_root_has_to_raise(site: Site, two: Machine) -> None:
    with pytest.raises(OutOfMemory, match=r"2 MiB are free; 4 more are needed: root raises .*/node1/.*/nr_hugepages"):
        open_cpu("dram", site, {"node": 1, "huge_pages": "2MiB", "capacity": 8 << 20}, two.kernel)


def test_a_pool_that_runs_dry_is_out_of_memory(site: Site, two: Machine) -> None:
    device = open_cpu("dram", site, {"node": 0, "huge_pages": "2MiB", "capacity": 8 << 20}, two.kernel)
    two.kernel.tree.put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "1")
    with pytest.raises(OutOfMemory, match="1 more are needed"):
        device.alloc(4 << 20)
    device.close()


def test_a_pool_on_a_kernel_that_cannot_touch_it_safely_is_unsupported(site: Site) -> None:
    two = machine("two-sockets-cxl", populates=False)
    device = open_cpu("dram", site, {"huge_pages": "2MiB", "capacity": 4 << 20}, two.kernel)
    with pytest.raises(Unsupported, match=r"needs Linux 5\.14"):
        device.alloc(2 << 20)
    device.close()


# -- what it says of itself -------------------------------------------------------------------------------------------


def test_paths_are_what_the_firmware_says_whatever_is_opened_first(site: Site, two: Machine) -> None:
    near = open_cpu("near", site, {**SMALL, "node": 0, "reaches": ["far", "card"]}, two.kernel)
    far = open_cpu("far", site, {**SMALL, "node": 1, "reaches": ["near", "card"]}, two.kernel)
    card = open_cpu("card", site, {**SMALL, "node": 2}, two.kernel)
    assert memory_nodes(site) == {"near": 0, "far": 1, "card": 2}
    seen = {path.memory: (path.latency_ns, path.read_bytes_per_s) for path in near.info.executors[0].paths}
    assert seen == {"near": (80, 204_800_000_000), "far": (0, 0), "card": (250, 32_768_000_000)}
    seen = {path.memory: (path.latency_ns, path.read_bytes_per_s) for path in far.info.executors[0].paths}
    assert seen == {"far": (80, 204_800_000_000), "near": (0, 0), "card": (0, 0)}
    for device in (near, far, card):
        device.close()


def test_info_does_not_change_while_a_device_is_open(site: Site, two: Machine, cxl: Cpu) -> None:
    before = cxl.info
    memory_nodes(site)["cxl"] = 4
    assert cxl.info is before


def test_numbers_of_a_model_are_not_taken_for_this_machines(cxl: Cpu) -> None:
    assert cxl.info.model == "a model of a machine"
    assert cxl.info.numa_node == 2


def test_notes_say_what_may_move_pages(cxl: Cpu) -> None:
    notes = cxl.info.notes
    assert notes["cores"] == "0-7"
    assert notes["placement"] == "bind on nodes 2, looked at after allocation"
    assert "pinned for DMA leave them" in notes["movable"]
    assert "echo 0 > /proc/sys/kernel/numa_balancing" in notes["tiering"]


def test_a_memory_on_several_nodes_has_no_node(site: Site, two: Machine) -> None:
    device = open_cpu("dram", site, {**SMALL, "nodes": [0, 1], "placement": "interleave"}, two.kernel)
    assert device.info.numa_node is None
    assert device.info.executors[0].paths[0].latency_ns == 0
    assert memory_nodes(site) == {}
    device.close()


@pytest.mark.parametrize("tree", ["laptop", "two-sockets-cxl", "restricted-cpuset", "three-nodes"])
def test_recorded_machines_run_the_driver_without_options(site: Site, tree: str) -> None:
    device = open_cpu("cpu", site, {}, machine(tree).kernel)
    region = device.alloc(10)
    write_bytes(site.clock, device, region.all(), np.arange(10, dtype=np.uint8))
    assert read_bytes(site.clock, device, region.all()).tolist() == list(range(10))
    device.close()


@pytest.mark.parametrize(("call", "number"), [("mbind", errno.ENOMEM), ("madvise", errno.EIO), ("mmap", 0)])
def test_a_call_that_fails_leaves_nothing_allocated(site: Site, two: Machine, cxl: Cpu, call: str, number: int) -> None:
    if call == "mmap":
        two.kernel.fail_next("syscall", errno.ENOMEM)
    else:
        two.memory.forbid(call, number)
    with pytest.raises(DeviceError):
        cxl.alloc(16 * PAGE)
    two.memory.permit(call)
    assert sum(two.memory.used.values()) == 0
    cxl.alloc(16 * PAGE)


# -- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["bind", "preferred", "interleave", "weighted-interleave"])
def test_this_machine_puts_pages_where_it_is_told(site: Site, placement: str) -> None:
    node = a_node_of_this_machine()
    options: dict[str, Any] = {"nodes": [node], "placement": placement, "capacity": 8 << 20, "threads": 1}
    if placement == "weighted-interleave":
        options["weights"] = [2]
    device = open_cpu("dram", site, options, HOST)
    region = device.alloc((4 << 20) + 5)
    report = Placements.of(site).report()["memories"]["dram"]
    assert report["pages_per_node"] == {str(node): (4 << 20) // PAGE + 1}
    assert (report["pages_absent"], report["pages_elsewhere"]) == (0, 0)
    write_bytes(site.clock, device, region.at(4 << 20, 5), np.full(5, 3, dtype=np.uint8))
    assert read_bytes(site.clock, device, region.at(4 << 20, 5)).tolist() == [3] * 5
    device.close()


def test_two_devices_on_nodes_of_this_machine_reach_each_other(site: Site) -> None:
    node = a_node_of_this_machine()
    one = open_cpu("one", site, {"capacity": 1 << 20, "node": node, "threads": 1})
    other = open_cpu("other", site, {"capacity": 1 << 20, "node": node, "threads": 1, "reaches": ["one"]})
    there, here = one.alloc(8), other.alloc(8)
    write_bytes(site.clock, one, there.all(), np.arange(8, dtype=np.uint8))
    wait(site.clock, other.submit(Copy(there.all(), here.all())))
    assert read_bytes(site.clock, other, here.all()).tolist() == list(range(8))
    assert other.info.model == ""
    one.close()
    other.close()
