"""What `doctor` says about the nodes of a machine: this one and recorded ones."""

from __future__ import annotations

import pytest

from tests.numa_rig import a_node_of_this_machine, machine
from tierloop.devices.system import HOST
from tierloop.tools.found import Found
from tierloop.tools.inventory_hardware import cpus_on_nodes


def on(tree: str) -> dict[str, Found]:
    return {found.name: found for found in cpus_on_nodes(machine(tree).kernel)}


def test_every_node_with_memory_is_a_device() -> None:
    assert list(on("two-sockets-cxl")) == [f"cpu with node = {node}" for node in (0, 1, 2, 4)]
    assert all(found.usable for found in on("two-sockets-cxl").values())


def test_a_card_says_what_is_special_about_it() -> None:
    remarks = " | ".join(on("two-sockets-cxl")["cpu with node = 2"].reasons)
    for said in ("no cores", "(0-7)", "movable", "250 ns and 33 GB/s", "the kernel may move its pages: demotion"):
        assert said in remarks, said


def test_a_laptop_has_nothing_to_remark_but_that_the_firmware_is_silent() -> None:
    (found,) = on("laptop").values()
    assert found.reasons == ("the firmware says nothing of its latency and rates (no HMAT)",)


def test_a_container_is_told_what_it_may_not_use() -> None:
    found = on("restricted-cpuset")
    assert not found["cpu with node = 0"].usable
    assert "its cpuset" in found["cpu with node = 0"].reasons[0]
    assert "this process may use cores 8-10 of 8-15" in found["cpu with node = 1"].reasons


@pytest.mark.parametrize("tree", ["two-sockets-cxl", "restricted-cpuset"])
def test_where_binding_is_forbidden_no_node_is_usable(tree: str) -> None:
    container = machine(tree)
    container.memory.forbid("mbind")
    assert not any(found.usable for found in cpus_on_nodes(container.kernel))


def test_nodes_without_memory_are_named() -> None:
    two = machine("two-sockets-cxl")
    two.kernel.tree.put("/sys/devices/system/node/node6/cpulist", "16-17")
    found = cpus_on_nodes(two.kernel)[-1]
    assert (found.name, found.usable, found.reasons) == ("cpu with node = 6", False, ("the node has no memory",))


def test_this_machine_has_a_device_on_each_node() -> None:
    node = a_node_of_this_machine()
    assert {found.name: found.usable for found in cpus_on_nodes(HOST)}[f"cpu with node = {node}"]
