"""Room is asked for before pages are touched, at every allocation: a kernel that finds none then ends the process."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.cxl_rig import MIB, PAGE
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cxl import CxlDevice, open_cxl
from tierloop.devices.drivers.host_memory import require_room
from tierloop.devices.drivers.numa_topology import NODES, numa_topology
from tierloop.devices.errors import DeviceError, MediaError, NoPermission, OutOfMemory
from tierloop.devices.site import Site
from tierloop.devices.system import HostSystem
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_cxl import CxlKernel, cxl_machine
from tierloop.emulators.kernel_numa import NumaMemory

TREES = Path(__file__).resolve().parent / "sysfs"


def node_of_a_card() -> tuple[CxlKernel, NumaMemory, CxlDevice]:
    """A card's memory as node 1, opened."""
    kernel = cxl_machine(mode="system-ram")
    memory = NumaMemory.of(kernel)
    return kernel, memory, open_cxl("cxl0", Site(WallClock()), {"node": 1, "capacity": 8 * MIB}, kernel)


def test_a_node_that_others_have_filled_since_it_was_opened_is_not_touched() -> None:
    kernel, _, device = node_of_a_card()
    first = device.alloc(MIB)
    text = f"Node 1 MemTotal: {512 << 10} kB\nNode 1 MemFree: 40 kB"
    kernel.tree.put(f"{NODES}/node1/meminfo", text)
    with pytest.raises(OutOfMemory, match=rf"cxl0: alloc: {MIB} bytes; 40960 are free on nodes 1"):
        device.alloc(MIB)
    assert device.alloc(4 * PAGE).view is not None
    kernel.tree.put(f"{NODES}/node1/meminfo", text.replace("40 kB", "4096 kB"))
    device.free(first)
    assert device.alloc(MIB).nbytes == MIB
    device.close()


def test_a_control_group_that_is_full_refuses_memory_of_a_node() -> None:
    kernel, _, device = node_of_a_card()
    group = "/sys/fs/cgroup/job"
    for path, text in {
        "/proc/self/cgroup": "0::/job",
        f"{group}/memory.max": "1000000",
        f"{group}/memory.current": "990000",
    }.items():
        kernel.tree.put(path, text)
    with pytest.raises(OutOfMemory, match="10000 are free in what the machine and this process's control groups"):
        device.alloc(4 * PAGE)
    assert device.alloc(2 * PAGE).nbytes == 2 * PAGE
    device.close()


@pytest.mark.parametrize(("number", "kind"), [(133, MediaError), (errno.EPERM, NoPermission), (errno.EIO, MediaError)])
def test_pages_that_cannot_be_touched_are_an_error_and_stay_free(number: int, kind: type[DeviceError]) -> None:
    _, memory, device = node_of_a_card()
    memory.forbid("madvise", number)
    for _ in range(3):
        with pytest.raises(kind, match="cxl0: alloc: "):
            device.alloc(8 * MIB)
    memory.permit("madvise")
    assert device.alloc(8 * MIB).nbytes == 8 * MIB
    device.close()


def test_where_nothing_is_known_of_limits_nothing_is_refused(tmp_path: Path) -> None:
    require_room(HostSystem(tmp_path), "dram", 1 << 60)


def test_a_node_of_which_nothing_is_known_has_no_room(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="1 bytes; 0 are free on nodes 3"):
        require_room(HostSystem(tmp_path), "dram", 1, [3])


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("0::/job", "/sys/fs/cgroup/job", ("cpuset.cpus.effective", "cpuset.mems.effective")),
        ("3:cpuset:/job", "/sys/fs/cgroup/cpuset/job", ("cpuset.effective_cpus", "cpuset.effective_mems")),
        ("3:cpu,cpuset:/job", "/sys/fs/cgroup/cpuset/job", ("cpuset.effective_cpus", "cpuset.effective_mems")),
    ],
)
def test_a_cpuset_of_either_version_says_what_may_be_used(group: str, folder: str, names: tuple[str, str]) -> None:
    tree = Tree.read(TREES / "two-sockets-cxl.tree")
    tree.put("/proc/self/cgroup", group)
    tree.put(f"{folder}/{names[0]}", "8-9")
    tree.put(f"{folder}/{names[1]}", "1")
    found = numa_topology(ModelKernel(tree))
    assert found.allowed_cpus == {8, 9}
    assert (found.with_memory, found.with_cpus) == ((1,), (1,))
