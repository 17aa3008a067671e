"""The NVMe controller model, legality: what is allowed when, and what a host is told that does something else."""

from __future__ import annotations

import struct

import pytest

from tests.nvme_bus import DATA, MIB, READ, WRITE, Bus, Pair, code, io_entry, ready, words
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import DO_NOT_RETRY, Admin, Entry, Io, Status, pointers

FATAL, READY = 2, 1


# registers and states


def test_capabilities_say_what_the_queues_may_be() -> None:
    bus = Bus(NvmeFigures(queue_entries=256, doorbell_stride=2))
    cap = bus.register(regs.CAP, 8)
    assert cap & 0xFFFF == 255
    assert cap >> 16 & 1 == 1
    assert cap >> 32 & 15 == 2
    assert cap >> 37 & 1 == 1
    assert bus.register(regs.CAP) | bus.register(regs.CAP + 4) << 32 == cap
    assert bus.register(regs.VS) == 0x00020000


def test_it_is_ready_some_time_after_it_was_enabled() -> None:
    bus = Bus(NvmeFigures(ready_ns=500))
    bus.controller.write(regs.AQA, 4, 0xF000F)
    bus.controller.write(regs.ASQ, 8, 0x1000)
    bus.controller.write(regs.ACQ, 8, 0x2000)
    bus.controller.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20)
    bus.controller.advance(499)
    assert not bus.register(regs.CSTS) & READY
    bus.controller.advance(500)
    assert bus.register(regs.CSTS) == READY
    bus.controller.write(regs.CC, 4, 0)
    assert bus.register(regs.CSTS) == 0


@pytest.mark.parametrize(
    ("cc", "aqa", "asq"),
    [
        (1 << 4, 0xF000F, 0x1000),  # a command set that is not there
        (2 << 11, 0xF000F, 0x1000),  # an arbitration that is reserved
        (9 << 7, 0xF000F, 0x1000),  # pages larger than MPSMAX
        (1 << 7, 0xF000F, 0x1000),  # queues that are not on an 8 KiB page
        (0, 0, 0x1000),  # queues of one entry
    ],
)
def test_a_configuration_that_cannot_be_is_fatal(cc: int, aqa: int, asq: int) -> None:
    bus = Bus()
    bus.controller.write(regs.AQA, 4, aqa)
    bus.controller.write(regs.ASQ, 8, asq)
    bus.controller.write(regs.ACQ, 8, 0x2000)
    bus.controller.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20 | cc)
    bus.settle()
    assert bus.register(regs.CSTS) == FATAL
    bus.enable()
    assert bus.register(regs.CSTS) & FATAL
    bus.controller.write(regs.CC, 4, 0)
    bus.enable()
    assert bus.register(regs.CSTS) == READY


def test_admin_queue_registers_stay_while_it_is_enabled() -> None:
    bus = Bus().enable()
    bus.controller.write(regs.ASQ, 8, 0x7000)
    bus.controller.write(regs.AQA, 4, 0)
    assert bus.register(regs.ASQ, 8) == 0x1000
    assert bus.register(regs.AQA) == 0xF000F


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 2), (1, 4), (4, 8), (regs.CC, 8), (regs.CC, 1), (-8, 8)])
def test_an_access_of_the_wrong_width_reads_as_ones_and_changes_nothing(offset: int, nbytes: int) -> None:
    bus = Bus().enable()
    assert bus.register(offset, nbytes) == (1 << 8 * nbytes) - 1
    bus.controller.write(offset, nbytes, 0)
    assert bus.register(regs.CC) & regs.ENABLE


def test_a_shutdown_occurs_and_then_is_complete() -> None:
    bus = Bus(NvmeFigures(shutdown_ns=100)).enable()
    started = bus.controller.now_ns
    bus.controller.write(regs.CC, 4, bus.register(regs.CC) | 1 << 14)
    assert bus.register(regs.CSTS) >> 2 & 3 == 1
    bus.controller.advance(started + 100)
    assert bus.register(regs.CSTS) >> 2 & 3 == 2


def test_after_a_shutdown_no_command_is_fetched_until_a_reset() -> None:
    bus = Bus().enable()
    bus.controller.write(regs.CC, 4, bus.register(regs.CC) | 1 << 14)
    bus.settle()
    bus.start(Entry(Admin.IDENTIFY, data=pointers(DATA), cdw=words([1])))
    bus.settle()
    assert bus.reap() == []
    bus.controller.write(regs.CC, 4, 0)
    bus.enable()
    assert bus.admin(Admin.IDENTIFY, DATA, cdw=[1]).status == 0


def test_interrupts_can_be_masked() -> None:
    bus = Bus().enable()
    bus.start(Entry(Admin.IDENTIFY, data=pointers(DATA), cdw=words([1])))
    bus.settle()
    assert bus.controller.interrupts() == {0}
    bus.controller.write(regs.INTMS, 4, 1)
    assert bus.controller.interrupts() == frozenset()
    bus.controller.write(regs.INTMC, 4, 1)
    assert bus.controller.interrupts() == {0}
    bus.reap()
    assert bus.controller.interrupts() == frozenset()


def test_a_controller_that_was_removed_reads_as_ones() -> None:
    bus = ready()
    bus.start(io_entry(READ), 1)
    bus.controller.remove()
    assert bus.register(regs.CSTS) == 0xFFFFFFFF
    assert bus.register(regs.CAP, 8) == (1 << 64) - 1
    bus.settle()
    assert bus.reap(1) == []


def test_time_does_not_go_back() -> None:
    bus = Bus()
    bus.controller.advance(5)
    with pytest.raises(ValueError, match="time goes back"):
        bus.controller.advance(4)


# doorbells


@pytest.mark.parametrize(
    ("number", "value", "event"),
    [
        (2 * 5, 1, 0x010000),  # no such queue
        (0, 16, 0x010100),  # outside the queue
        (0, 2, 0x010100),  # the same again
        (1, 5, 0x010100),  # more completions taken than were posted
    ],
)
def test_a_bad_doorbell_is_ignored_and_reported(number: int, value: int, event: int) -> None:
    bus = Bus().enable()
    bus.admin(Admin.IDENTIFY, DATA, cdw=[1])
    bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    bus.doorbell(number, value)
    (answer,) = bus.reap()
    assert (answer.result, answer.status) == (event, 0)
    assert bus.admin(Admin.IDENTIFY, DATA, cdw=[1]).status == 0


def test_a_queue_that_cannot_be_reached_is_fatal() -> None:
    bus = Bus().enable()
    bus.admin(Admin.CREATE_CQ, 0x8000, cdw=[15 << 16 | 1, 3])
    bus.admin(Admin.CREATE_SQ, 0x10000000, cdw=[15 << 16 | 1, 1 << 16 | 1])
    bus.doorbell(2, 1)
    assert bus.register(regs.CSTS) & FATAL


# queues


CQ, SQ = (15 << 16 | 1, 3), (15 << 16 | 1, 1 << 16 | 1)


@pytest.mark.parametrize(
    ("opcode", "prp1", "cdw", "status"),
    [
        (Admin.CREATE_CQ, 0x8000, (15 << 16, 3), Status.QUEUE_ID_INVALID),
        (Admin.CREATE_CQ, 0x8000, (15 << 16 | 9, 3), Status.QUEUE_ID_INVALID),
        (Admin.CREATE_CQ, 0x8000, (1, 3), Status.QUEUE_SIZE_INVALID),
        (Admin.CREATE_CQ, 0x8000, (1024 << 16 | 1, 3), Status.QUEUE_SIZE_INVALID),
        (Admin.CREATE_CQ, 0x8000, (15 << 16 | 1, 2), Status.INVALID_FIELD),
        (Admin.CREATE_CQ, 0x8004, (15 << 16 | 1, 3), Status.PRP_OFFSET_INVALID),
        (Admin.CREATE_CQ, 0x8000, (15 << 16 | 1, 9 << 16 | 3), Status.INTERRUPT_VECTOR_INVALID),
        (Admin.CREATE_SQ, 0x8000, (15 << 16 | 1, 2 << 16 | 1), Status.COMPLETION_QUEUE_INVALID),
        (Admin.CREATE_SQ, 0x8000, (15 << 16 | 1, 0 << 16 | 1), Status.QUEUE_ID_INVALID),
        (Admin.CREATE_SQ, 0x8000, (15 << 16 | 1, 99 << 16 | 1), Status.QUEUE_ID_INVALID),
        (Admin.DELETE_SQ, 0, (1,), Status.QUEUE_ID_INVALID),
        (Admin.DELETE_SQ, 0, (0,), Status.QUEUE_ID_INVALID),
        (Admin.DELETE_CQ, 0, (0,), Status.QUEUE_ID_INVALID),
    ],
)
def test_a_queue_that_cannot_be_is_refused(opcode: int, prp1: int, cdw: tuple[int, ...], status: int) -> None:
    bus = Bus().enable()
    answer = bus.admin(opcode, prp1, cdw=cdw)
    assert code(answer.status) == status
    assert answer.status & DO_NOT_RETRY


def test_a_queue_is_made_once() -> None:
    bus = ready()
    assert code(bus.admin(Admin.CREATE_CQ, 0x30000, cdw=CQ).status) == Status.QUEUE_ID_INVALID
    assert code(bus.admin(Admin.CREATE_SQ, 0x30000, cdw=SQ).status) == Status.QUEUE_ID_INVALID


def test_a_completion_queue_in_use_is_not_deleted() -> None:
    bus = ready()
    assert code(bus.admin(Admin.DELETE_CQ, cdw=[1]).status) == Status.QUEUE_DELETION_INVALID
    assert bus.admin(Admin.DELETE_SQ, cdw=[1]).status == 0
    assert bus.admin(Admin.DELETE_CQ, cdw=[1]).status == 0


def test_deleting_a_queue_ends_what_is_in_flight() -> None:
    bus = ready()
    cids = {bus.start(io_entry(READ, lba), 1) for lba in range(3)}
    assert bus.admin(Admin.DELETE_SQ, cdw=[1]).status == 0
    answers = bus.reap(1)
    assert {answer.cid for answer in answers} == cids
    assert {code(answer.status) for answer in answers} <= {0, Status.QUEUE_DELETED}


def test_two_commands_in_flight_have_two_identifiers() -> None:
    bus = ready()
    first = bus.push(io_entry(READ), 1)
    bus.cid = first - 1
    bus.push(io_entry(READ, 1), 1)
    bus.ring(1)
    bus.settle()
    assert sorted((a.cid, code(a.status)) for a in bus.reap(1)) == [(first, 0), (first, Status.ID_CONFLICT)]


def test_the_phase_turns_over_and_the_head_follows() -> None:
    bus = Bus().enable(entries=4)
    for i in range(10):
        answer = bus.admin(Admin.IDENTIFY, DATA, cdw=[1])
        assert answer.sq_head == (i + 1) % 4
        assert answer.phase == 1 - (i // 4) % 2


def test_a_full_completion_queue_holds_completions_back() -> None:
    bus = Bus().enable()
    assert bus.admin(Admin.CREATE_CQ, 0x18000, cdw=[1 << 16 | 1, 1 << 16 | 3]).status == 0
    assert bus.admin(Admin.CREATE_SQ, 0x10000, cdw=[15 << 16 | 1, 1 << 16 | 1]).status == 0
    bus.pairs[1] = Pair(1, 16, 0x10000, 0x18000)
    for lba in range(3):
        bus.push(io_entry(READ, lba), 1)
    bus.ring(1)
    bus.settle()
    assert len([at for at in (0x18000, 0x18010) if any(bus.got(16, at))]) == 1
    bus.pairs[1].entries = 2
    seen = []
    for _ in range(3):
        (answer,) = bus.reap(1)
        seen.append(answer.cid)
    assert len(set(seen)) == 3


def test_the_number_of_queues_is_set_before_there_are_any() -> None:
    bus = Bus(NvmeFigures(io_queues=4, command_ns=0, admin_ns=0)).enable()
    assert bus.admin(Admin.SET_FEATURES, cdw=[7, 0x630001]).result == 0x30001
    assert code(bus.admin(Admin.SET_FEATURES, cdw=[7, 0xFFFF0000]).status) == Status.INVALID_FIELD
    assert code(bus.admin(Admin.CREATE_SQ, 0x10000, cdw=[15 << 16 | 3, 1 << 16 | 1]).status) == Status.QUEUE_ID_INVALID
    bus.with_queue()
    assert code(bus.admin(Admin.SET_FEATURES, cdw=[7, 0x10001]).status) == Status.SEQUENCE_ERROR


# input and output


@pytest.mark.parametrize("opcode", [0x03, 0x7F, 0xC0])
def test_an_unknown_opcode_is_refused(opcode: int) -> None:
    bus = ready()
    assert code(bus.io(opcode).status) == Status.INVALID_OPCODE
    assert code(bus.admin(opcode).status) == Status.INVALID_OPCODE


@pytest.mark.parametrize("nsid", [0, 2, 0xFFFFFFFF])
@pytest.mark.parametrize("opcode", [READ, WRITE, Io.WRITE_ZEROES, Io.DATASET_MANAGEMENT])
def test_a_namespace_that_is_not_there_is_refused(opcode: int, nsid: int) -> None:
    bus = ready()
    assert code(bus.io(opcode, nsid=nsid).status) == Status.INVALID_NAMESPACE


@pytest.mark.parametrize(("lba", "blocks"), [(2048, 1), (2047, 2), (1 << 63, 1), ((1 << 64) - 1, 1)])
@pytest.mark.parametrize("opcode", [READ, WRITE, Io.WRITE_ZEROES, Io.WRITE_UNCORRECTABLE, Io.COMPARE])
def test_blocks_behind_the_end_are_refused(opcode: int, lba: int, blocks: int) -> None:
    bus = ready()
    answer = bus.io(opcode, lba, blocks)
    assert code(answer.status) == Status.LBA_OUT_OF_RANGE
    assert answer.status & DO_NOT_RETRY


def test_more_than_a_command_may_move_is_refused() -> None:
    bus = ready(NvmeFigures(mdts=1))
    assert bus.io(READ, 0, 16, DATA, DATA + 4096).status == 0
    assert code(bus.io(READ, 0, 17, DATA, DATA + 4096).status) == Status.INVALID_FIELD
    assert bus.io(Io.WRITE_ZEROES, 0, 2048).status == 0


@pytest.mark.parametrize("flags", [1, 2, 4, 0x20, 3 << 6])
def test_reserved_and_fused_flags_are_refused(flags: int) -> None:
    bus = ready()
    assert code(bus.io(READ, flags=flags).status) == Status.INVALID_FIELD


def test_directives_are_refused() -> None:
    bus = ready()
    entry = io_entry(WRITE)
    entry = entry._replace(cdw=(0, 0, 1 << 20, 0, 0, 0))
    assert code(bus.run(entry, 1).status) == Status.INVALID_FIELD


# where data lies


@pytest.mark.parametrize(
    ("prp1", "prp2", "blocks", "status"),
    [
        (DATA + 1, 0, 1, Status.PRP_OFFSET_INVALID),
        (DATA + 4, 0, 1, Status.SUCCESS),
        (DATA + 3584, 0, 1, Status.SUCCESS),
        (DATA + 3584, DATA + 8192, 2, Status.SUCCESS),
        (DATA + 3584, DATA + 8196, 2, Status.PRP_OFFSET_INVALID),
        (DATA, DATA + 4, 24, Status.PRP_OFFSET_INVALID),  # a list that is not on a multiple of eight
        (1 << 40, 0, 1, Status.DATA_TRANSFER_ERROR),
        (DATA, 1 << 40, 24, Status.DATA_TRANSFER_ERROR),
    ],
)
def test_pages_begin_where_they_may(prp1: int, prp2: int, blocks: int, status: int) -> None:
    bus = ready()
    assert code(bus.io(READ, 0, blocks, prp1, prp2).status) == status


def test_a_list_of_pages_that_is_off_its_grid_is_refused() -> None:
    bus = ready()
    bus.put(struct.pack("<QQ", DATA + 0x10000, DATA + 0x12008), DATA + 0x4000)
    assert code(bus.io(READ, 0, 24, DATA, DATA + 0x4000).status) == Status.PRP_OFFSET_INVALID


def test_lists_of_pages_lead_to_further_lists() -> None:
    bus = ready(capacity=2 * MIB)
    bus.put(bytes(i % 251 for i in range(40 * 512)), DATA)
    pages = [DATA + 0x10000 + 0x2000 * i for i in range(5)]
    here, there = DATA + 0x8000 + 4096 - 16, DATA + 0x9000
    bus.put(struct.pack("<QQ", pages[1], there), here)
    bus.put(struct.pack("<3Q", *pages[2:]), there)
    bus.controller.poke(1, 0, bus.got(40 * 512))
    assert bus.io(READ, 0, 40, pages[0], here).status == 0
    assert b"".join(bus.got(4096, page) for page in pages) == bus.controller.peek(1, 0, 40)


def test_the_last_place_of_a_list_is_a_page_where_no_more_are_to_come() -> None:
    bus = ready()
    bus.controller.poke(1, 0, bytes(i % 249 for i in range(24 * 512)))
    bus.put(struct.pack("<QQ", DATA + 0x12000, DATA + 0x14000), DATA + 0x8000 + 4096 - 16)
    assert bus.io(READ, 0, 24, DATA + 0x10000, DATA + 0x8000 + 4096 - 16).status == 0
    assert b"".join(bus.got(4096, DATA + 0x10000 + 0x2000 * i) for i in range(3)) == bus.controller.peek(1, 0, 24)


def descriptor(kind: int, address: int, nbytes: int) -> bytes:
    return struct.pack("<QI3xB", address, nbytes, kind << 4)


BLOCK, BUCKET, SEGMENT, LAST = range(4)


@pytest.mark.parametrize(
    ("first", "rest", "status"),
    [
        (descriptor(BLOCK, DATA, 1024), b"", 0),
        (descriptor(BLOCK, DATA, 512), b"", Status.SGL_LENGTH_INVALID),
        (descriptor(BLOCK, DATA, 2048), b"", Status.SGL_LENGTH_INVALID),
        (descriptor(4, DATA, 1024), b"", Status.SGL_TYPE_INVALID),
        (descriptor(BLOCK, 1 << 40, 1024), b"", Status.DATA_TRANSFER_ERROR),
        (descriptor(LAST, DATA + 0x8000, 32), descriptor(BLOCK, DATA, 512) + descriptor(BLOCK, DATA + 8000, 512), 0),
        (descriptor(LAST, DATA + 0x8000, 32), descriptor(BUCKET, 0, 512) + descriptor(BLOCK, DATA + 8001, 512), 0),
        (descriptor(LAST, DATA + 0x8000, 24), b"", Status.SGL_SEGMENT_INVALID),
        (descriptor(LAST, DATA + 0x8000, 0), b"", Status.SGL_SEGMENT_INVALID),
        (descriptor(SEGMENT, DATA + 0x8000, 16), descriptor(BLOCK, DATA, 1024), Status.SGL_SEGMENT_INVALID),
        (descriptor(LAST, DATA + 0x8000, 16), descriptor(LAST, DATA, 16), Status.SGL_SEGMENT_INVALID),
        (descriptor(SEGMENT, DATA + 0x8000, 16), descriptor(SEGMENT, DATA + 0x8000, 16), Status.SGL_COUNT_INVALID),
    ],
)
def test_scatter_gather_lists_are_followed_as_far_as_they_are_right(first: bytes, rest: bytes, status: int) -> None:
    bus = ready()
    bus.controller.poke(1, 0, bytes(range(256)) * 4)
    bus.put(rest, DATA + 0x8000)
    entry = io_entry(READ, 0, 2, flags=0x40)._replace(data=first)
    assert code(bus.run(entry, 1).status) == status


def test_a_bit_bucket_swallows_what_is_read() -> None:
    bus = ready()
    bus.controller.poke(1, 0, b"a" * 512 + b"b" * 512)
    bus.put(descriptor(BUCKET, 0, 512) + descriptor(BLOCK, DATA, 512), DATA + 0x8000)
    entry = io_entry(READ, 0, 2, flags=0x40)._replace(data=descriptor(LAST, DATA + 0x8000, 32))
    assert bus.run(entry, 1).status == 0
    assert bus.got(512) == b"b" * 512


def test_a_controller_without_scatter_gather_refuses_it() -> None:
    bus = ready(NvmeFigures(sgl=False))
    entry = io_entry(READ, flags=0x40)._replace(data=descriptor(BLOCK, DATA, 512))
    assert code(bus.run(entry, 1).status) == Status.INVALID_FIELD


def test_admin_commands_describe_memory_with_pages_only() -> None:
    bus = Bus().enable()
    entry = Entry(Admin.IDENTIFY, 0x40, data=descriptor(BLOCK, DATA, 4096), cdw=words([1]))
    assert code(bus.run(entry).status) == Status.INVALID_FIELD
