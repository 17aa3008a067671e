"""Where an NVMe controller model must be no milder than a drive: room for commands, identifiers, aborts, FUA, power."""

from __future__ import annotations

import struct

import pytest

from tests.nvme_bus import DATA, FLUSH, READ, WRITE, Bus, code, io_entry, ready
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Entry, Io, Status

QUICK = NvmeFigures(command_ns=0, admin_ns=0, flush_ns=0)


def test_admin_commands_are_carried_out_while_the_window_is_full_of_commands_that_hang() -> None:
    bus = ready(NvmeFigures(command_ns=0, admin_ns=0, window=4))
    bus.controller.hold()
    cids = [bus.push(io_entry(READ, i), 1) for i in range(6)]
    bus.ring(1)
    bus.settle()
    assert bus.admin(Admin.ABORT, cdw=[1 | cids[0] << 16]).result == 0
    assert [(answer.cid, code(answer.status)) for answer in bus.reap(1)] == [(cids[0], Status.ABORT_REQUESTED)]


def test_the_time_of_admin_commands_is_not_busy_time() -> None:
    bus = ready(NvmeFigures(command_ns=0, admin_ns=120_000_000_000))
    for _ in range(3):
        bus.admin(Admin.IDENTIFY, DATA, cdw=[1])
    assert bus.controller.health.busy_ns == 0


def test_an_identifier_is_taken_until_its_completion_has_found_room() -> None:
    bus = Bus(QUICK).enable().with_queue(1, entries=4)
    for cid in (1, 2, 3, 4):
        bus.cid = cid - 1
        bus.push(io_entry(READ, prp1=DATA + 4096 * cid), 1)
        bus.ring(1)
        bus.settle()
    bus.cid = 3
    bus.push(io_entry(READ), 1)
    bus.ring(1)
    bus.settle()
    answers = [*bus.reap(1), *bus.reap(1)]
    assert sorted((answer.cid, code(answer.status)) for answer in answers) == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
        (4, Status.ID_CONFLICT),
    ]


def test_a_completion_that_waited_for_room_says_how_far_the_queue_was_fetched_when_it_is_posted() -> None:
    bus = Bus(QUICK).enable().with_queue(1, entries=4)
    for _ in range(5):
        bus.start(io_entry(READ), 1)
        bus.settle()
    bus.reap(1)
    assert [answer.sq_head for answer in bus.reap(1)] == [1, 1]


def test_more_aborts_at_a_time_than_the_controller_says_are_refused() -> None:
    bus = ready(NvmeFigures(command_ns=0, admin_ns=1_000, aborts=2))
    for _ in range(3):
        bus.push(Entry(Admin.ABORT, cdw=(1 | 77 << 16, 0, 0, 0, 0, 0)))
    bus.ring(0)
    bus.settle()
    assert sorted(code(answer.status) for answer in bus.reap(0)) == [0, 0, Status.ABORT_LIMIT]


def test_the_most_entries_that_a_queue_can_have_fit_into_what_the_controller_says_of_itself() -> None:
    bus = Bus(NvmeFigures(queue_entries=65536)).enable()
    assert bus.admin(Admin.IDENTIFY, DATA, cdw=[1]).status == 0
    assert struct.unpack_from("<H", bus.got(4096), 514) == (0xFFFF,)


def test_sizes_of_entries_may_be_set_while_there_are_no_queues_of_them() -> None:
    bus = Bus(QUICK)
    bus.enable()
    c = bus.controller
    c.write(regs.CC, 4, regs.ENABLE)
    cdw = (15 << 16 | 1, 1 << 16 | 3)
    assert code(bus.admin(Admin.CREATE_CQ, 0x10000, cdw=cdw).status) == Status.QUEUE_SIZE_INVALID
    c.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20)
    assert bus.admin(Admin.CREATE_CQ, 0x10000, cdw=cdw).status == 0


def test_a_read_with_forced_access_makes_what_it_reads_durable_first() -> None:
    bus = ready(QUICK)
    for lba in range(4):
        bus.put(bytes([lba + 1]) * 512)
        assert bus.io(WRITE, lba).status == 0
    assert bus.io(READ, 1, 2, fua=1).status == 0
    bus.controller.power_off()
    assert [bus.controller.peek(1, lba)[0] for lba in range(4)] == [0, 2, 3, 0]


@pytest.mark.parametrize("opcode", [Io.WRITE_ZEROES, Io.WRITE_UNCORRECTABLE, Io.DATASET_MANAGEMENT, WRITE])
def test_nothing_changes_a_drive_whose_media_are_read_only(opcode: int) -> None:
    bus = ready(QUICK)
    bus.controller.poke(1, 0, b"k" * 512)
    bus.controller.warn(1 << 3)
    bus.put(struct.pack("<IIQ", 0, 1, 0))
    entry = io_entry(opcode, 0)
    if opcode == Io.DATASET_MANAGEMENT:
        entry = entry._replace(cdw=(0, 4, 0, 0, 0, 0))
    assert code(bus.run(entry, 1).status) == Status.WRITE_FAULT
    assert bus.io(READ).status == 0
    assert bus.got(512) == b"k" * 512


def test_a_drive_that_was_told_of_the_shutdown_and_then_disabled_lost_its_power_safely() -> None:
    bus = ready(QUICK)
    c = bus.controller
    c.write(regs.CC, 4, bus.register(regs.CC) | regs.SHUTDOWN_NORMAL << 14)
    bus.settle()
    c.write(regs.CC, 4, 0)
    c.power_off()
    assert c.health.unsafe_shutdowns == 0
    c.power_on()
    bus.enable()
    c.power_off()
    assert c.health.unsafe_shutdowns == 1


def test_queues_of_two_entries_carry_on_over_many_rounds() -> None:
    bus = Bus(QUICK).enable(entries=2).with_queue(1, entries=2)
    for lap in range(300):
        lba = lap * 7 % 2048
        bus.put(bytes([lap % 251]) * 512)
        assert bus.io(WRITE, lba).status == 0
        assert bus.io(READ, lba, prp1=DATA + 8192).status == 0
        assert bus.got(512, DATA + 8192) == bytes([lap % 251]) * 512
    assert bus.io(FLUSH).status == 0
    assert bus.admin(Admin.GET_FEATURES, cdw=[Feature.WRITE_CACHE]).result == 1
