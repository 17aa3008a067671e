"""Registered buffers: whose memory a ring knows, for how long, how much of it, and what a refusal says."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_system import FakeSystem
from tests.nvme_rig import Rig, host_memory, on_drive
from tests.seeded import bytes_of
from tierloop.devices.commands import Copy, Read
from tierloop.devices.drivers.engines import Target
from tierloop.devices.drivers.registered import Registrations
from tierloop.devices.placement import Placement, Placements
from tierloop.devices.regions import Region

KIB = 1024
MOST = 64 * KIB


@dataclass
class Table:
    """The kernel's side: what is registered, and the errnos that the next calls fail with."""

    buffers: list[tuple[int, int]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    calls: int = 0

    def register(self, buffers: list[tuple[int, int]]) -> None:
        self.calls += 1
        self.buffers = []
        if buffers and self.failures and (number := self.failures.pop(0)):
            raise OSError(number, os.strerror(number))
        self.buffers = list(buffers)


@pytest.fixture
def table() -> Table:
    return Table()


def registrations(table: Table, seen: list[Region] | None = None) -> Registrations:
    """What a ring on this table would use; at most 64 KiB."""
    system = FakeSystem()
    system.texts["/proc/self/limits"] = "Max locked memory         65536                65536                bytes"
    target = Target("nvme0", system, 3, 512, 512, 1.0, 8, threading.Event())
    return Registrations(target, table, MOST, seen.append if seen is not None else None)


def address(region: Region) -> int:
    assert region.view is not None
    return int(region.view.__array_interface__["data"][0])


def regions(count: int, nbytes: int = 16 * KIB) -> list[Region]:
    return [Region("dram", "dram", i, nbytes, view=np.zeros(nbytes, dtype=np.uint8)) for i in range(count)]


def test_a_region_is_registered_when_it_is_first_named_and_told_of_once(table: Table) -> None:
    seen: list[Region] = []
    known = registrations(table, seen)
    region = host_memory(16 * KIB)
    assert known.of(region) == known.of(region) == 0
    assert table.buffers == [(address(region), 16 * KIB)]
    assert table.calls == 1
    assert seen == [region]


def test_what_was_used_longest_ago_makes_room(table: Table) -> None:
    known = registrations(table)
    first, second, third, fourth, fifth = regions(5)
    for region in (first, second, third, fourth, first, fifth):
        assert known.of(region) >= 0
    assert {a for a, _ in table.buffers} == {address(r) for r in (first, third, fourth, fifth)}
    assert known.pinned_nbytes == MOST


def test_a_region_larger_than_all_room_is_never_registered(table: Table) -> None:
    known = registrations(table)
    assert known.of(host_memory(MOST + 1)) < 0
    assert table.calls == 0
    assert known.refused == 0


class Stubborn(Table):
    """A kernel that does not let go of what was registered."""

    def register(self, buffers: list[tuple[int, int]]) -> None:
        if not buffers:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        super().register(buffers)


def test_the_last_registration_that_cannot_be_undone_is_a_refusal_and_no_crash() -> None:
    known = registrations(Stubborn())
    first, second = regions(2)
    assert known.of(first) == 0
    first.freed, first.view = True, None
    assert known.of(second) == 0
    assert known.refused == 1
    assert "ENXIO" in known.refusals[0]


def test_a_freed_region_is_forgotten_before_anything_else_is_used(table: Table) -> None:
    known = registrations(table)
    first, second = regions(2)
    known.of(first)
    first.freed, first.view = True, None
    assert known.of(second) == 0
    assert table.buffers == [(address(second), 16 * KIB)]
    assert known.of(first) < 0


def test_memory_stays_alive_while_it_is_registered_and_no_longer(table: Table) -> None:
    known = registrations(table)
    first, second = regions(2)
    known.of(first)
    assert first.view is not None
    memory = weakref.ref(first.view)
    first.freed, first.view = True, None
    gc.collect()
    assert memory() is not None
    known.of(second)
    gc.collect()
    assert memory() is None


def test_the_bounce_buffer_stands_beside_regions(table: Table) -> None:
    known = registrations(table)
    (region,) = regions(1)
    known.of(region)
    at = known.bounce(0x10000, 16 * KIB)
    assert table.buffers[at] == (0x10000, 16 * KIB)
    assert table.buffers[known.of(region)] == (address(region), 16 * KIB)


def test_a_refused_registration_is_no_error_and_says_what_would_help(table: Table) -> None:  # E1
    known = registrations(table)
    (region,) = regions(1)
    table.failures = [errno.ENOMEM]
    assert known.of(region) < 0
    assert known.refused == 1
    (said,) = known.refusals
    for part in ("nvme0", "ENOMEM", f"{address(region):#x}", "16384 bytes", "RLIMIT_MEMLOCK is 65536", "ulimit -l"):
        assert part in said


def test_what_was_refused_is_not_asked_for_again(table: Table) -> None:
    known = registrations(table)
    (region,) = regions(1)
    table.failures = [errno.EFAULT]
    known.of(region)
    calls = table.calls
    assert known.of(region) < 0
    assert table.calls == calls


def test_a_refusal_leaves_what_was_registered_before(table: Table) -> None:
    known = registrations(table)
    first, second = regions(2)
    known.of(first)
    table.failures = [errno.ENOMEM]
    assert known.of(second) < 0
    assert table.buffers == [(address(first), 16 * KIB)]
    assert known.of(first) == 0


def test_a_table_that_cannot_be_restored_is_empty_and_used_by_nobody(table: Table) -> None:
    known = registrations(table)
    first, second = regions(2)
    known.of(first)
    table.failures = [errno.ENOMEM, errno.ENOMEM]
    assert known.of(second) < 0
    assert known.pinned_nbytes == 0
    assert table.buffers == []


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["use", "free", "refuse", "bounce"])), max_size=40))
def test_an_index_always_names_the_memory_it_was_given_for(steps: list[tuple[int, str]]) -> None:
    table = Table()
    known = registrations(table)
    held = regions(8, 12 * KIB)
    for number, what in steps:
        region = held[number]
        if what == "free":
            region.freed, region.view = True, None
            continue
        if what == "refuse":
            table.failures.append(errno.ENOMEM)
        expected = (1 << 20, 8 * KIB) if what == "bounce" or region.freed else (address(region), 12 * KIB)
        index = known.bounce(*expected) if what == "bounce" else known.of(region)
        if index >= 0:
            assert table.buffers[index] == expected
        assert sum(nbytes for _, nbytes in table.buffers) == known.pinned_nbytes <= MOST
        freed = {id(r) for r in held if r.freed}
        assert not freed or len(table.buffers) <= 1 + sum(not r.freed for r in held)


# Through the driver, on the block device of a modelled drive


def mapped(nbytes: int) -> Region:
    """A region of host memory that begins with a page, so that nothing is bounced."""
    return Region("dram", "dram", 0, nbytes, view=np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = on_drive(path="/dev/nvme0n1", io="io_uring", register=True, reaches=["dram"], queues=1)
    yield made
    made.close()


def test_copies_to_host_mapped_memory_go_through_registered_buffers(rig: Rig) -> None:
    dram = mapped(256 * KIB)
    assert dram.view is not None
    region = rig.device.alloc(256 * KIB)
    dram.view[:] = bytes_of(1, 256 * KIB)
    rig.run(Copy(dram.all(), region.all()))
    assert rig.device.counts.fixed == rig.device.counts.transfers == 2
    assert rig.device.counts.bounced_nbytes == 0
    dram.view[:] = 0
    rig.run(Copy(region.all(), dram.all()))
    assert np.array_equal(dram.view, bytes_of(1, 256 * KIB))
    assert rig.device.counts.fixed == 4


def test_the_bounce_buffer_is_registered(rig: Rig) -> None:
    region = rig.device.alloc(256 * KIB)
    into = np.zeros(256 * KIB + 4097, dtype=np.uint8)
    start = -into.__array_interface__["data"][0] % 4096 + 1
    rig.run(Read(region.all(), into[start : start + 256 * KIB]))
    assert rig.device.counts.fixed == 2
    assert rig.device.counts.bounced_nbytes == 256 * KIB


def test_buffers_of_reads_and_writes_are_not_registered(rig: Rig) -> None:
    region = rig.device.alloc(4096)
    room = np.zeros(8192, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % 4096
    rig.run(Read(region.all(), room[start : start + 4096]))
    assert rig.device.counts.fixed == 0


def test_a_refused_registration_is_counted_and_noted_and_the_copy_ends_well(rig: Rig) -> None:
    dram = mapped(4096)
    region = rig.device.alloc(4096)
    rig.machine.fail_next("syscall", errno.ENOMEM)
    rig.run(Copy(region.all(), dram.all()))
    assert rig.device.counts.unregistered == 1
    assert rig.device.counts.fixed == 0
    assert "could not be registered with io_uring (ENOMEM" in rig.device.info.notes["why"]


def test_a_registered_region_is_looked_at_where_its_pages_lie(rig: Rig) -> None:
    dram = mapped(4096)
    places = Placements.of(rig.site)
    places.offer("dram", lambda region: Placement(region, frozenset({0}), {1: 1}))
    rig.run(Copy(rig.device.alloc(4096).all(), dram.all()))
    (moved,) = places.moved
    assert moved.occasion == "registration"
    assert moved.placement.region is dram


def test_nothing_is_registered_unless_that_was_asked_for(rig: Rig) -> None:
    rig.open(register=False)
    rig.run(Copy(rig.device.alloc(4096).all(), mapped(4096).all()))
    assert rig.device.counts.fixed == 0


@pytest.mark.parametrize(
    ("path", "io"), [("/dev/ng0n1", "io_uring"), ("/dev/ng0n1", "ioctl"), ("/dev/nvme0n1", "posix")]
)
def test_where_nothing_is_registered_the_notes_say_so(path: str, io: str) -> None:
    rig = on_drive(path=path, io=io, register=True)
    assert "register = true registers nothing" in rig.device.info.notes["why"]
    rig.close()


def test_memory_that_was_freed_and_made_again_is_not_taken_for_the_old_one(rig: Rig) -> None:
    region = rig.device.alloc(64 * KIB)
    for seed in range(5):
        dram = mapped(64 * KIB)
        assert dram.view is not None
        dram.view[:] = bytes_of(seed, 64 * KIB)
        rig.run(Copy(dram.all(), region.all()))
        assert np.array_equal(rig.read(region.all()), bytes_of(seed, 64 * KIB))
        dram.freed, dram.view = True, None
