"""The cpu and cxl drivers on the memories of a guest: the suite, pinned pages, and what the kernel does by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.guest.drives import APPEARS_S, generic_path, sound
from tests.guest.memories import dax_of, interleavable, lone, two_nodes
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy
from tierloop.devices.conformance.runner import Check, carry_out, carry_out_machine, checks_of
from tierloop.devices.device import Device
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.numa_mapping import mapped
from tierloop.devices.drivers.numa_tiering import tiering
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.placement import Placements
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.machine import Machine

MIB = 1 << 20
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
ON_NODES = [
    pytest.param(check, id=f"{level}: {name}")
    for level in ("identity", "memory", "ordering")
    for name, check in checks_of(level)
]
COMPUTING = (
    "one_token_gives_its_value",
    "operands_may_lie_in_several_memories",
    "topk_breaks_ties_by_index",
    "gather_keeps_every_byte",
    "append_rounds_to_nearest_even",
)
"""Of the level `compute`: what takes seconds on an emulated processor. With all its shapes, `attend_is_attention` takes
minutes; attention over all memories of the guest has a test of its own (test_split_attention.py)."""
KERNELS = [pytest.param(check, id=f"compute: {name}") for name, check in checks_of("compute") if name in COMPUTING]
EXAMPLES = 3
"""Sequences of commands of the level `stateful`."""
ON_CXL = [
    pytest.param(check, id=f"{level}: {name}") for level in ("identity", "memory") for name, check in checks_of(level)
]


@pytest.fixture(scope="module")
def devdax(machine: Machine) -> str:
    """A volatile memory as a devdax."""
    return dax_of(machine, lone(machine))


@pytest.fixture(scope="module")
def cxl_node(machine: Machine) -> Iterator[int]:
    """Memories, interleaved, as a node."""
    dax = dax_of(machine, interleavable(machine))
    yield cxl_regions.system_ram(dax)
    cxl_regions.devdax(dax)


@pytest.fixture(scope="module")
def memory_only(machine: Machine) -> Callable[[Site], Device]:
    """Opens the node without processors."""
    without = [node.id for node in machine.nodes if not node.cpus]
    if not without:
        pytest.skip("this machine has no node without processors")
    return lambda site: open_cpu("cpu0", site, {"capacity": 8 * MIB, "node": without[0], "threads": 1})


@pytest.mark.parametrize("check", [*ON_NODES, *KERNELS])
def test_the_suite_holds_on_the_node_without_processors(memory_only: Callable[[Site], Device], check: Check) -> None:
    carry_out(check, memory_only, False, None, 0)


def test_any_sequence_agrees_with_a_dict_on_the_node_without_processors(
    memory_only: Callable[[Site], Device],
) -> None:
    carry_out_machine(memory_only, False, None, EXAMPLES, shrink=False)


def beside_a_cpu(options: dict[str, object]) -> Callable[[Site], Platform]:
    def opened(site: Site) -> Platform:
        devices: dict[str, Device] = {
            "cpu0": open_cpu("cpu0", site, {"capacity": 8 * MIB, "threads": 1, "reaches": ["cxl0"]}),
            "cxl0": open_cxl("cxl0", site, {"capacity": 2 * MIB, **options}),
        }
        return Platform("pair", site, devices, "cpu0")

    return opened


@pytest.mark.parametrize("check", ON_CXL)
def test_the_suite_holds_on_a_devdax(devdax: str, check: Check) -> None:
    carry_out(check, beside_a_cpu({"path": f"/dev/{devdax}"}), False, "cxl0", 0)


@pytest.mark.parametrize("check", [one for one in KERNELS if "several" in str(one.id)])
def test_kernels_compute_in_place_on_a_devdax(devdax: str, check: Check) -> None:
    carry_out(check, beside_a_cpu({"path": f"/dev/{devdax}"}), False, "cxl0", 0)


def test_any_sequence_agrees_with_a_dict_on_a_devdax(devdax: str) -> None:
    carry_out_machine(beside_a_cpu({"path": f"/dev/{devdax}"}), False, "cxl0", EXAMPLES, shrink=False)


@pytest.mark.parametrize("check", ON_CXL)
def test_the_suite_holds_on_a_node_of_cxl_memory(cxl_node: int, check: Check) -> None:
    carry_out(check, beside_a_cpu({"node": cxl_node}), False, "cxl0", 0)


def test_a_region_that_was_registered_is_reported_where_it_is(machine: Machine, cxl_node: int) -> None:
    """Pinning moves pages out of a movable zone, and that of CXL memory is one."""
    site = Site(clock=WallClock(), checker=HazardChecker())
    serial = sound(machine).serial
    devices: dict[str, Device] = {
        "cpu0": open_cpu("cpu0", site, {"capacity": 8 * MIB, "threads": 1, "reaches": ["cxl0"]}),
        "cxl0": open_cxl("cxl0", site, {"node": cxl_node, "capacity": 2 * MIB}),
        "nvme0": open_nvme(
            "nvme0",
            site,
            {"path": generic_path(serial, APPEARS_S), "capacity": MIB, "reaches": ["cxl0"], "register": True},
        ),
    }
    platform = Platform("guest", site, devices, "cpu0")
    near, far = devices["cxl0"].alloc(64 << 10), devices["nvme0"].alloc(64 << 10)
    assert near.view is not None
    near.view[:] = 9
    address = near.view.ctypes.data
    assert set(numa.nodes_of(HOST, address, near.nbytes)) == {cxl_node}
    copied = devices["nvme0"].submit(Copy(near.all(), far.all()))
    site.clock.run_until(lambda: copied.done, site.clock.now() + 60_000_000_000)
    copied.result()
    truly = {int(node) for node in numa.nodes_of(HOST, address, near.nbytes)}
    told = Placements.of(site).report()["memories"]["cxl0"]
    assert {int(node) for node in told["pages_per_node"]} == truly
    assert (told["pages_elsewhere"] > 0) == (truly != {cxl_node})
    assert (near.view == 9).all()
    platform.close()


@contextmanager
def setting(path: Path, value: str) -> Iterator[None]:
    """A setting of the kernel, for a while."""
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def test_the_kernels_own_weights_are_used_where_they_are_the_wanted_ones(machine: Machine) -> None:
    nodes = two_nodes(machine)
    if not (WEIGHTS / f"node{nodes[0]}").exists():
        pytest.skip("this kernel has no weights (6.9)")
    with setting(WEIGHTS / f"node{nodes[0]}", "3"), setting(WEIGHTS / f"node{nodes[1]}", "1"):
        memory = mapped(HOST, "dram", 64 * numa.PAGE)
        address = memory.ctypes.data
        numa.bind(HOST, "dram", address, memory.nbytes, "weighted-interleave", nodes, [3, 1])
        assert numa.policy_of(HOST, address) == (numa.MPOL_WEIGHTED_INTERLEAVE, frozenset(nodes))
        memory[:] = 1
        found = numa.nodes_of(HOST, address, memory.nbytes)
    assert abs(int(np.sum(found == nodes[0])) - 48) <= 3
    assert set(found) == set(nodes)


def test_tiering_behind_us_is_seen_when_it_is_switched_on() -> None:
    with (
        setting(Path("/proc/sys/kernel/numa_balancing"), "0"),
        setting(Path("/sys/kernel/mm/numa/demotion_enabled"), "0"),
    ):
        quiet = tiering(HOST)
    with (
        setting(Path("/proc/sys/kernel/numa_balancing"), "2"),
        setting(Path("/sys/kernel/mm/numa/demotion_enabled"), "1"),
    ):
        busy = tiering(HOST)
    assert len(set(busy) - set(quiet)) >= 2
    assert not set(quiet) - set(busy)
    assert all(one.off for one in busy)
