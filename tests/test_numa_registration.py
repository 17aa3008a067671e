"""Pinning moves pages off movable nodes: the drivers that register memory find out, and the report says where it lies.

Whole ways on models: the cpu driver on a machine whose CXL node is movable, and a drive or a GPU that registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.numa_rig import PAGE, TREES
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy
from tierloop.devices.drivers.cpu import Cpu, open_cpu
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.placement import Placements
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.waiting import wait
from tierloop.emulators.host_accelerator import HostAccelerator
from tierloop.emulators.kernel import Tree
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine

CARD = 2
"""The node of a CXL card that is movable: what daxctl makes by default."""
HOME = 0
NBYTES = 16 * PAGE


class Machine:
    """A drive and NUMA nodes with a movable CXL node; a cpu device whose memory is that node."""

    def __init__(self) -> None:
        self.kernel: NvmeMachine = nvme_machine()
        nodes = Tree.read(TREES / "two-sockets-cxl.tree")
        for path, data in nodes.files.items():
            self.kernel.tree.put(path, data)
        for path, target in nodes.links.items():
            self.kernel.tree.link(path, target)
        self.memory = NumaMemory.of(self.kernel)
        self.kernel.pin_on(self.memory)
        self.site = Site(WallClock())
        self.card: Cpu = open_cpu("card", self.site, {"node": CARD, "capacity": 1 << 20}, self.kernel)
        self.places = Placements.of(self.site)

    def drive(self, **options: Any) -> NvmeDevice:
        """A drive that registers memory of the card."""
        chosen = {"path": "/dev/nvme0n1", "io": "io_uring", "register": True, "reaches": ["card"], "queues": 1}
        return open_nvme("nvme0", self.site, chosen | options, self.kernel)

    def nodes_of(self, region: Region) -> set[int | None]:
        assert region.view is not None
        return set(self.memory.pages_at(region.view.ctypes.data, region.nbytes))

    def moved(self) -> list[tuple[int, str, dict[str, int]]]:
        """Of everything that was found elsewhere: region, after what, pages per node."""
        return [(one["region"], one["found_after"], one["pages_per_node"]) for one in self.places.report()["moved"]]


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.card.close()


def test_a_buffer_on_a_movable_card_is_reported_where_the_registration_of_a_drive_put_it(
    machine: Machine,
) -> None:  # C4
    drive, host = machine.drive(), machine.card.alloc(NBYTES)
    assert (machine.nodes_of(host), machine.moved()) == ({CARD}, [])
    wait(machine.site.clock, drive.submit(Copy(host.all(), drive.alloc(NBYTES).all())))
    assert drive.counts.fixed
    assert machine.nodes_of(host) == {HOME}
    assert machine.moved() == [(host.id, "registration", {str(HOME): NBYTES // PAGE})]
    row = machine.places.report()["memories"]["card"]
    assert (row["wanted_nodes"], row["pages_per_node"], row["pages_elsewhere"]) == ([CARD], {str(HOME): 16}, 16)
    drive.close()
    assert "pages that are pinned for DMA leave them" in machine.card.info.notes["movable"]


def test_what_lies_on_a_node_that_is_not_movable_stays(machine: Machine) -> None:
    near = open_cpu("near", machine.site, {"node": 1, "capacity": 1 << 20}, machine.kernel)
    drive, host = machine.drive(reaches=["near"]), near.alloc(NBYTES)
    wait(machine.site.clock, drive.submit(Copy(host.all(), drive.alloc(NBYTES).all())))
    assert drive.counts.fixed
    assert (machine.nodes_of(host), machine.moved()) == ({1}, [])
    drive.close()
    near.close()


def test_registering_one_region_pins_the_others_anew_and_they_are_looked_at_too(machine: Machine) -> None:
    drive, first, second = machine.drive(), machine.card.alloc(NBYTES), machine.card.alloc(NBYTES)
    there = drive.alloc(NBYTES)
    wait(machine.site.clock, drive.submit(Copy(first.all(), there.all())))
    assert first.view is not None
    address = first.view.ctypes.data
    machine.memory.unpin(address, NBYTES)  # as between two tables: promoted back by tiering, and pinned again
    machine.memory.relocate(address, NBYTES, 1)
    wait(machine.site.clock, drive.submit(Copy(second.all(), there.all())))
    assert machine.moved() == [
        (first.id, "registration", {str(HOME): 16}),
        (first.id, "registration", {"1": 16}),
        (second.id, "registration", {str(HOME): 16}),
    ]
    drive.close()


def test_a_buffer_on_a_movable_card_is_reported_where_the_registration_of_a_gpu_put_it(machine: Machine) -> None:
    class Pinning(HostAccelerator):
        """A GPU of that machine."""

        def register(self, array: NDArray[np.uint8]) -> None:
            super().register(array)
            machine.memory.pin(array.ctypes.data, array.nbytes)

        def unregister(self, array: NDArray[np.uint8]) -> None:
            super().unregister(array)
            machine.memory.unpin(array.ctypes.data, array.nbytes)

    gpu = open_gpu("gpu0", machine.site, {"capacity": 1 << 20, "reaches": ["card"]}, machine.kernel, Pinning())
    host = machine.card.alloc(32 * PAGE)
    to = next(executor.queues[0] for executor in gpu.info.executors if executor.name == "h2d")
    wait(machine.site.clock, gpu.submit(Copy(host.all(), gpu.alloc(32 * PAGE).all()), to))
    assert machine.moved() == [(host.id, "registration", {str(HOME): 32})]
    gpu.close()


def test_memory_is_let_go_when_the_ring_is_closed(machine: Machine) -> None:
    drive, host = machine.drive(), machine.card.alloc(NBYTES)
    wait(machine.site.clock, drive.submit(Copy(host.all(), drive.alloc(NBYTES).all())))
    drive.close()
    assert host.view is not None
    machine.memory.relocate(host.view.ctypes.data, NBYTES, 1)
    assert machine.nodes_of(host) == {1}


def test_a_registration_without_room_for_pinned_pages_is_refused_and_the_copy_ends_well(machine: Machine) -> None:
    drive, host = machine.drive(), machine.card.alloc(NBYTES)
    for node, memory in machine.memory.nodes.items():
        machine.memory.used[node] = memory.nbytes if not memory.movable else machine.memory.used[node]
    there = drive.alloc(NBYTES)
    wait(machine.site.clock, drive.submit(Copy(host.all(), there.all())))
    assert drive.counts.fixed == 0
    assert "could not be registered with io_uring (ENOMEM" in drive.info.notes["why"]
    assert machine.nodes_of(host) == {CARD}
    drive.close()


def test_a_region_that_is_freed_while_it_is_looked_at_is_counted_once(machine: Machine) -> None:
    host = machine.card.alloc(PAGE)
    machine.card.free(host)
    machine.places.registered(host)
    row = machine.places.report()["memories"]["card"]
    assert (row["regions"], row["nbytes"], row["regions_live"], row["unknown"]) == (1, PAGE, 0, [])
