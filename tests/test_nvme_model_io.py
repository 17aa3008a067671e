"""The NVMe controller model, input and output: what is read after what was written, and what a power failure leaves."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nvme_bus import DATA, FLUSH, READ, WRITE, Bus, code, io_entry, ready
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_wire import DO_NOT_RETRY, Admin, Entry, Io, Status, pointers
from tierloop.firmware_models.passthrough import Passthrough

A, B, ZERO = b"a" * 512, b"b" * 512, bytes(512)


def write(bus: Bus, lba: int, data: bytes, fua: int = 0) -> None:
    bus.put(data)
    assert bus.io(WRITE, lba, len(data) // 512, fua=fua).status == 0


def trim(bus: Bus, *spans: tuple[int, int], deallocate: int = 4) -> int:
    bus.put(b"".join(struct.pack("<IIQ", 0, count, lba) for lba, count in spans), DATA + 0x8000)
    cdw = (len(spans) - 1, deallocate, 0, 0, 0, 0)
    entry = Entry(Io.DATASET_MANAGEMENT, nsid=1, data=pointers(DATA + 0x8000), cdw=cdw)
    return bus.run(entry, 1).status


def test_what_was_written_is_read() -> None:
    bus = ready()
    write(bus, 5, A + B)
    bus.put(bytes(2048))
    assert bus.io(READ, 4, 4).status == 0
    assert bus.got(2048) == ZERO + A + B + ZERO


def test_data_moves_when_a_command_ends_and_not_before() -> None:
    bus = ready()
    bus.controller.poke(1, 0, A)
    bus.start(io_entry(READ), 1)
    bus.controller.advance(bus.controller.now_ns + 511)
    assert bus.got(512) == ZERO
    bus.controller.advance(bus.controller.now_ns + 1)
    assert bus.got(512) == A


def test_a_buffer_that_changes_under_a_write_is_written_as_it_is_at_the_end() -> None:
    bus = ready()
    bus.put(A)
    bus.start(io_entry(WRITE), 1)
    bus.put(B)
    bus.settle()
    assert bus.controller.peek(1, 0) == B


def test_memory_that_cannot_be_reached_leaves_the_blocks_as_they_were() -> None:
    bus = ready()
    bus.controller.poke(1, 0, A)
    answer = bus.io(WRITE, 0, 1, 1 << 40)
    assert code(answer.status) == Status.DATA_TRANSFER_ERROR
    assert not answer.status & DO_NOT_RETRY
    assert bus.controller.peek(1, 0) == A


def test_namespaces_do_not_touch_each_other() -> None:
    bus = ready(namespaces=2)
    write(bus, 0, A)
    bus.put(B)
    assert bus.io(WRITE, 0, nsid=2).status == 0
    assert (bus.controller.peek(1, 0), bus.controller.peek(2, 0)) == (A, B)


def test_compare_says_whether_the_bytes_are_the_same() -> None:
    bus = ready()
    write(bus, 3, A)
    assert bus.io(Io.COMPARE, 3).status == 0
    bus.put(A[:-1] + b"x")
    assert code(bus.io(Io.COMPARE, 3).status) == Status.COMPARE_FAILURE


def test_zeroes_are_written_with_and_without_giving_blocks_back() -> None:
    bus = ready()
    write(bus, 0, A * 4)
    assert bus.io(Io.WRITE_ZEROES, 1).status == 0
    entry = io_entry(Io.WRITE_ZEROES, 2)
    assert bus.run(entry._replace(cdw=(2, 0, 1 << 25, 0, 0, 0)), 1).status == 0
    assert bus.controller.peek(1, 0, 4) == A + ZERO + ZERO + A
    assert bus.controller.namespaces[0].used_blocks == 3


def test_deallocated_blocks_read_as_zeros() -> None:
    bus = ready()
    write(bus, 0, A * 8)
    assert trim(bus, (1, 2), (6, 1), (3, 0)) == 0
    assert bus.controller.peek(1, 0, 8) == A + ZERO * 2 + A * 3 + ZERO + A
    assert trim(bus, (0, 8), deallocate=0) == 0
    assert bus.controller.peek(1, 0) == A


def test_a_range_behind_the_end_deallocates_nothing() -> None:
    bus = ready()
    write(bus, 0, A)
    assert code(trim(bus, (0, 1), (2048, 1))) == Status.LBA_OUT_OF_RANGE
    assert bus.controller.peek(1, 0) == A


def test_deallocated_blocks_are_errors_where_that_was_asked_for() -> None:
    bus = ready()
    write(bus, 0, A)
    bus.admin(Admin.SET_FEATURES, 0, 1, [Feature.ERROR_RECOVERY, 1 << 16])
    assert bus.io(READ, 0, 1).status == 0
    assert code(bus.io(READ, 0, 2).status) == Status.DEALLOCATED


def test_uncorrectable_blocks_are_errors_until_they_are_written() -> None:
    bus = ready()
    assert bus.io(Io.WRITE_UNCORRECTABLE, 4, 2).status == 0
    assert code(bus.io(READ, 0, 8).status) == Status.UNRECOVERED_READ
    assert code(bus.io(Io.COMPARE, 5).status) == Status.UNRECOVERED_READ
    assert bus.io(READ, 0, 4).status == 0
    write(bus, 4, A + B)
    assert bus.io(READ, 0, 8).status == 0


def test_a_bad_block_moves_nothing() -> None:
    bus = ready()
    bus.controller.poke(1, 0, A * 4)
    bus.controller.inject_read_error(1, 3)
    assert code(bus.io(READ, 0, 4).status) == Status.UNRECOVERED_READ
    assert bus.got(2048) == bytes(2048)


def test_limited_retry_gives_up_sooner() -> None:
    took = []
    for retry in (0, 1 << 31):
        bus = ready(NvmeFigures(recovery=5, command_ns=0, admin_ns=0))
        bus.controller.inject_read_error(1, 0)
        before = bus.controller.now_ns
        entry = io_entry(READ)
        assert code(bus.run(entry._replace(cdw=(0, 0, retry, 0, 0, 0)), 1).status) == Status.UNRECOVERED_READ
        took.append(bus.controller.now_ns - before)
    assert took == [5 * 512, 512]


def test_a_write_fault_writes_nothing() -> None:
    bus = ready()
    bus.controller.poke(1, 0, A * 2)
    bus.controller.inject_write_fault(1, 1)
    bus.put(B * 2)
    assert code(bus.io(WRITE, 0, 2).status) == Status.WRITE_FAULT
    assert bus.controller.peek(1, 0, 2) == A * 2
    bus.controller.heal()
    write(bus, 0, B * 2)


def test_a_medium_that_only_reads_refuses_writes() -> None:
    bus = ready()
    bus.controller.warn(1 << 3)
    assert code(bus.io(WRITE).status) == Status.WRITE_FAULT
    assert bus.io(READ).status == 0
    assert bus.log(2)[0] == 1 << 3


def test_a_status_can_be_put_upon_the_next_commands_of_an_opcode() -> None:
    bus = ready()
    bus.controller.inject_status(READ, Status.INTERNAL_ERROR, times=2)
    statuses = [bus.io(op).status & ~0x2000 for op in (READ, WRITE, READ, READ)]
    assert statuses == [Status.INTERNAL_ERROR, 0, Status.INTERNAL_ERROR, 0]


def test_held_completions_come_back_and_dropped_ones_do_not() -> None:
    bus = ready()
    bus.controller.hold()
    cid = bus.start(io_entry(READ), 1)
    bus.settle()
    assert bus.reap(1) == []
    bus.controller.release()
    assert [answer.cid for answer in bus.reap(1)] == [cid]
    bus.controller.drop()
    bus.put(A)
    bus.start(io_entry(WRITE), 1)
    bus.settle()
    assert bus.reap(1) == []
    assert bus.controller.peek(1, 0) == A


# the write cache


def after_power_failure(bus: Bus, unsafe: bool = True) -> bytes:
    bus.controller.power_off(unsafe)
    bus.controller.power_on()
    return bus.controller.peek(1, 0, 2)


@pytest.mark.parametrize("unsafe", [True, False])
def test_what_was_not_flushed_is_lost_unless_the_shutdown_was_orderly(unsafe: bool) -> None:
    bus = ready()
    bus.controller.poke(1, 0, A * 2)
    write(bus, 0, B)
    assert after_power_failure(bus, unsafe) == (A * 2 if unsafe else B + A)


@pytest.mark.parametrize("nsid", [1, 0xFFFFFFFF])
def test_what_was_flushed_is_kept(nsid: int) -> None:
    bus = ready()
    write(bus, 0, A)
    assert bus.io(FLUSH, nsid=nsid).status == 0
    write(bus, 1, B)
    assert after_power_failure(bus) == A + ZERO


def test_forced_unit_access_is_durable_by_itself() -> None:
    bus = ready()
    write(bus, 0, A)
    write(bus, 1, B, fua=1)
    assert after_power_failure(bus) == ZERO + B


def test_without_the_cache_every_write_is_durable() -> None:
    bus = ready()
    write(bus, 0, A)
    bus.admin(Admin.SET_FEATURES, cdw=[Feature.WRITE_CACHE, 0])
    write(bus, 1, B)
    assert after_power_failure(bus) == A + B


def test_a_shutdown_that_the_host_asks_for_empties_the_cache() -> None:
    bus = ready()
    write(bus, 0, A)
    bus.controller.write(0x14, 4, bus.register(0x14) | 1 << 14)
    bus.settle()
    assert after_power_failure(bus) == A + ZERO
    assert bus.controller.health.unsafe_shutdowns == 0


def test_a_reset_keeps_the_cache_and_ends_nothing() -> None:
    bus = ready()
    write(bus, 0, A)
    bus.put(B)
    bus.start(io_entry(WRITE, 1), 1)
    bus.controller.reset()
    bus.enable().with_queue()
    assert bus.reap(1) == []
    assert bus.controller.peek(1, 0, 2) == A + ZERO
    assert bus.io(READ).status == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "durable", "trim", "zero", "flush", "crash"]), st.integers(0, 15), st.integers(1, 4)
    ),
    max_size=40,
)


@given(steps)
def test_a_namespace_holds_what_a_dict_of_blocks_would(script: list[tuple[str, int, int]]) -> None:
    ns = Namespace(16 * 512, Passthrough(1, 1))
    seen, safe = [ZERO] * 16, [ZERO] * 16
    for number, (op, lba, count) in enumerate(script, 1):
        count = min(count, 16 - lba)
        data = bytes([number]) * 512
        if op in ("put", "durable"):
            ns.put(lba, data * count, durable=op == "durable")
        elif op in ("trim", "zero"):
            (ns.deallocate if op == "trim" else ns.zero)(lba, count, durable=False)
            data = ZERO
        elif op == "flush":
            ns.flush()
            safe = list(seen)
            continue
        else:
            ns.lose_power()
            seen = list(safe)
            continue
        seen[lba : lba + count] = [data] * count
        if op == "durable":
            safe[lba : lba + count] = [data] * count
        assert ns.load(0, 16) == b"".join(seen)
    assert ns.load(0, 16) == b"".join(seen)
