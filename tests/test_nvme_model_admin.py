"""The NVMe controller model, admin commands: what it says of itself, its features, its logs, and what it reports."""

from __future__ import annotations

import struct

import pytest

from tests.nvme_bus import DATA, MIB, READ, WRITE, Bus, code, io_entry, ready
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import MORE, Admin, Entry, Io, Status

ALL = 0xFFFFFFFF


def identify(bus: Bus, cns: int, nsid: int = 0) -> bytes:
    assert bus.admin(Admin.IDENTIFY, DATA, nsid, [cns]).status == 0
    return bus.got(4096)


# identify


def test_the_controller_says_who_it_is_and_what_it_can_do() -> None:
    bus = Bus(NvmeFigures(serial="S1", model="M", firmware="F", mdts=3, error_entries=7, event_requests=2)).enable()
    page = identify(bus, 1)
    assert (page[4:24], page[24:64], page[64:72]) == (b"S1".ljust(20), b"M".ljust(40), b"F".ljust(8))
    assert page[77] == 3
    assert int.from_bytes(page[80:84], "little") == 0x00020000
    assert (page[259], page[262]) == (1, 6)
    assert (page[512], page[513]) == (0x66, 0x44)
    assert int.from_bytes(page[516:520], "little") == 1
    assert int.from_bytes(page[520:522], "little") & 0b11111 == 0b11111
    assert page[525] & 1 == 1
    assert page[768:].startswith(b"nqn.")


@pytest.mark.parametrize("lba_nbytes", [512, 4096])
def test_a_namespace_says_how_large_it_is_and_what_is_used(lba_nbytes: int) -> None:
    bus = ready(lba_nbytes=lba_nbytes)
    bus.controller.poke(1, 3, bytes(2 * lba_nbytes))
    page = identify(bus, 0, 1)
    blocks = MIB // lba_nbytes
    assert struct.unpack_from("<QQQ", page) == (blocks, blocks, 2)
    assert 1 << page[128 + 4 * (page[26] & 15) + 2] == lba_nbytes
    assert page[33] & 7 == 1


def test_active_namespaces_are_listed_above_the_one_that_is_named() -> None:
    bus = Bus(namespaces=3).enable()
    assert struct.unpack_from("<4I", identify(bus, 2)) == (1, 2, 3, 0)
    assert struct.unpack_from("<4I", identify(bus, 2, 2)) == (3, 0, 0, 0)
    assert code(bus.admin(Admin.IDENTIFY, DATA, ALL, [2]).status) == Status.INVALID_NAMESPACE


def test_namespaces_have_identifiers_of_their_own() -> None:
    bus = Bus(namespaces=2).enable()
    first, second = identify(bus, 3, 1), identify(bus, 3, 2)
    assert first[:2] == b"\x01\x08"
    assert first != second
    assert first[4:12] == identify(bus, 0, 1)[120:128]


@pytest.mark.parametrize(("cns", "nsid"), [(0, 0), (0, 2), (0, ALL), (3, 2)])
def test_a_namespace_that_is_not_there_cannot_be_identified(cns: int, nsid: int) -> None:
    bus = Bus().enable()
    assert code(bus.admin(Admin.IDENTIFY, DATA, nsid, [cns]).status) == Status.INVALID_NAMESPACE


def test_an_unknown_structure_is_refused() -> None:
    assert code(Bus().enable().admin(Admin.IDENTIFY, DATA, cdw=[0x55]).status) == Status.INVALID_FIELD


# features

CURRENT, DEFAULT, SAVED, CAPABILITIES = (select << 8 for select in range(4))


def test_a_saved_value_survives_a_reset_and_a_current_one_does_not() -> None:
    bus = Bus().enable()
    bus.admin(Admin.SET_FEATURES, cdw=[Feature.ARBITRATION | 1 << 31, 0x01020305])
    bus.admin(Admin.SET_FEATURES, cdw=[Feature.ARBITRATION, 7])
    values = [bus.admin(Admin.GET_FEATURES, cdw=[Feature.ARBITRATION | s]).result for s in (CURRENT, DEFAULT, SAVED)]
    assert values == [7, 3, 0x01020305]
    bus.controller.reset()
    bus.enable()
    assert bus.admin(Admin.GET_FEATURES, cdw=[Feature.ARBITRATION]).result == 0x01020305


@pytest.mark.parametrize(
    ("feature", "capabilities"),
    [(Feature.ARBITRATION, 5), (Feature.ERROR_RECOVERY, 7), (Feature.NUMBER_OF_QUEUES, 4), (Feature.WRITE_CACHE, 5)],
)
def test_a_feature_says_what_it_allows(feature: int, capabilities: int) -> None:
    bus = Bus().enable()
    assert bus.admin(Admin.GET_FEATURES, cdw=[feature | CAPABILITIES]).result == capabilities


@pytest.mark.parametrize(
    ("cdw", "nsid", "status"),
    [
        ((0x00,), 0, Status.INVALID_FIELD),
        ((0x7F, 1), 0, Status.INVALID_FIELD),
        ((Feature.NUMBER_OF_QUEUES | 1 << 31, 0), 0, Status.FEATURE_NOT_SAVEABLE),
        ((Feature.ARBITRATION, 3), 1, Status.FEATURE_NOT_PER_NAMESPACE),
        ((Feature.ARBITRATION, 3), 9, Status.INVALID_NAMESPACE),
        ((Feature.ARBITRATION, 8), 0, Status.INVALID_FIELD),
        ((Feature.POWER_MANAGEMENT, 2), 0, Status.INVALID_FIELD),
        ((Feature.ERROR_RECOVERY, 1), 0, Status.INVALID_NAMESPACE),
        ((Feature.INTERRUPT_VECTOR, 9), 0, Status.INVALID_FIELD),
        ((Feature.TEMPERATURE_THRESHOLD, 2 << 20 | 300), 0, Status.INVALID_FIELD),
        ((Feature.ASYNC_EVENTS, 1 << 12), 0, Status.INVALID_FIELD),
    ],
)
def test_a_feature_that_cannot_be_set_is_refused(cdw: tuple[int, ...], nsid: int, status: int) -> None:
    assert code(Bus().enable().admin(Admin.SET_FEATURES, 0, nsid, cdw).status) == status


def test_without_a_write_cache_there_is_no_such_feature() -> None:
    bus = Bus(NvmeFigures(volatile_cache=False)).enable()
    assert code(bus.admin(Admin.GET_FEATURES, cdw=[Feature.WRITE_CACHE]).status) == Status.INVALID_FIELD
    assert identify(bus, 1)[525] & 1 == 0


def test_error_recovery_is_a_feature_of_each_namespace() -> None:
    bus = Bus(namespaces=2).enable()
    bus.admin(Admin.SET_FEATURES, 0, 2, [Feature.ERROR_RECOVERY, 0x10005])
    assert bus.admin(Admin.GET_FEATURES, 0, 1, [Feature.ERROR_RECOVERY]).result == 0
    assert bus.admin(Admin.GET_FEATURES, 0, 2, [Feature.ERROR_RECOVERY]).result == 0x10005
    bus.admin(Admin.SET_FEATURES, 0, ALL, [Feature.ERROR_RECOVERY, 1])
    assert [bus.admin(Admin.GET_FEATURES, 0, n, [Feature.ERROR_RECOVERY]).result for n in (1, 2)] == [1, 1]


# health


def number(page: bytes, at: int) -> int:
    return int.from_bytes(page[at : at + 16], "little")


def test_health_counters_add_up() -> None:
    bus = ready(capacity=4 * MIB)
    for lba in range(0, 1024, 64):
        assert bus.io(WRITE, lba, 8).status == 0
        assert bus.io(READ, lba, 16, DATA, DATA + 4096).status == 0
    bus.controller.inject_read_error(1, 0)
    bus.io(READ, 0)
    bus.io(READ, 9999999)
    page = bus.log(2)
    assert number(page, 32) == 1  # 256 units of 512 bytes, in thousands, rounded up
    assert number(page, 48) == 1
    assert (number(page, 64), number(page, 80)) == (16, 16)
    assert (number(page, 112), number(page, 144)) == (1, 0)
    assert (number(page, 160), number(page, 176)) == (1, 2)


def test_data_units_are_rounded_up_when_they_are_reported() -> None:
    bus = ready(NvmeFigures(mdts=8), capacity=2 * MIB)
    lists = DATA + 0x100000
    bus.put(struct.pack("<256Q", *(DATA + 4096 * i for i in range(1, 257))), lists)
    assert bus.io(READ, 0, 1000, DATA, lists).status == 0
    assert number(bus.log(2), 32) == 1
    assert bus.io(READ, 0, 1).status == 0
    assert number(bus.log(2), 32) == 2


def test_power_cycles_and_unsafe_shutdowns_are_counted() -> None:
    bus = ready()
    for unsafe in (True, False, True):
        bus.controller.power_off(unsafe)
        assert bus.register(0x1C) == 0xFFFFFFFF
        bus.controller.power_on()
    page = bus.enable().log(2)
    assert (number(page, 112), number(page, 144)) == (4, 2)


def test_age_spare_and_temperature_stand_in_the_log_with_their_warnings() -> None:
    bus = Bus().enable()
    bus.controller.age(120, spare_percent=5)
    bus.controller.set_temperature(400)
    page = bus.log(2)
    assert (page[0], int.from_bytes(page[1:3], "little"), page[3], page[5]) == (0b11, 400, 5, 120)
    bus.controller.age(20)
    bus.controller.set_temperature(300)
    assert bus.log(2)[0] == 0


def test_the_error_log_tells_of_the_newest_failure_first() -> None:
    bus = ready(NvmeFigures(error_entries=2, command_ns=0, admin_ns=0))
    for lba in (5000, 6000, 7000):
        answer = bus.io(READ, lba)
        assert answer.status & MORE
    entries = bus.log(1, 128)
    fields = [struct.unpack_from("<QHHHHQI", entries, at) for at in (0, 64)]
    assert [(f[0], f[1], f[3] >> 1 & 0x7FF, f[5], f[6]) for f in fields] == [
        (3, 1, Status.LBA_OUT_OF_RANGE, 7000, 1),
        (2, 1, Status.LBA_OUT_OF_RANGE, 6000, 1),
    ]


def test_logs_can_be_read_in_parts() -> None:
    bus = Bus().enable()
    whole = bus.log(5, 4096)
    assert bus.log(5, 2048, offset=2048) == whole[2048:]
    assert struct.unpack_from("<I", whole, 1024 + 4 * Io.WRITE) == (3,)
    assert struct.unpack_from("<I", whole, 4 * 0x7F) == (0,)
    assert bus.log(3)[8:16] == b"1.0".ljust(8)


@pytest.mark.parametrize(
    ("cdw", "nsid", "status"),
    [
        ((0x70 | 127 << 16,), 0, Status.LOG_PAGE_INVALID),
        ((2 | 127 << 16,), 1, Status.INVALID_FIELD),
        ((2 | 127 << 16, 0, 2), 0, Status.INVALID_FIELD),
        ((2 | 127 << 16, 0, 512), 0, Status.INVALID_FIELD),
        ((2 | 0xFFFF << 16, 7), 0, Status.INVALID_FIELD),
    ],
)
def test_a_log_that_cannot_be_read_is_refused(cdw: tuple[int, ...], nsid: int, status: int) -> None:
    assert code(Bus().enable().admin(Admin.GET_LOG_PAGE, DATA, nsid, cdw).status) == status


# events


def test_a_warning_is_reported_once_until_its_log_is_read() -> None:
    bus = Bus().enable()
    bus.admin(Admin.SET_FEATURES, cdw=[Feature.ASYNC_EVENTS, 0xFF])
    for _ in range(2):
        bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    assert bus.reap() == []
    bus.controller.set_temperature(400)
    (event,) = bus.reap()
    assert event.result == 0x020101
    bus.controller.age(1, spare_percent=1)
    assert bus.reap() == []
    bus.start(Entry(Admin.GET_LOG_PAGE, nsid=ALL, data=DATA.to_bytes(16, "little"), cdw=(2 | 127 << 16, 0, 0, 0, 0, 0)))
    bus.settle()
    assert [answer.result for answer in bus.reap()][:1] == [0x020201]


def test_a_warning_that_nobody_asked_for_is_not_reported() -> None:
    bus = Bus().enable()
    bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    bus.controller.set_temperature(400)
    assert bus.reap() == []


def test_an_event_waits_for_a_command_to_report_it_with() -> None:
    bus = Bus().enable()
    bus.doorbell(40, 1)
    assert bus.admin(Admin.ASYNC_EVENT).result == 0x010000


def test_reading_a_log_may_leave_its_event_masked() -> None:
    bus = Bus().enable()
    bus.doorbell(40, 1)
    assert bus.admin(Admin.ASYNC_EVENT).result == 0x010000
    bus.doorbell(0, 99)
    bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    bus.log(1, 64, keep_event=True)
    assert len(bus.pairs[0].answers) == 2
    bus.start(Entry(Admin.GET_LOG_PAGE, nsid=ALL, data=DATA.to_bytes(16, "little"), cdw=(1 | 15 << 16, 0, 0, 0, 0, 0)))
    bus.settle()
    assert 0x010100 in [answer.result for answer in bus.reap()]


def test_more_event_requests_than_the_controller_holds_are_refused() -> None:
    bus = Bus(NvmeFigures(event_requests=2, admin_ns=0)).enable()
    for _ in range(3):
        bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    (answer,) = bus.reap()
    assert code(answer.status) == Status.ASYNC_EVENT_LIMIT


# abort


def test_a_command_in_flight_can_be_aborted() -> None:
    bus = ready()
    bus.controller.hold()
    cid = bus.start(io_entry(READ), 1)
    bus.settle()
    assert bus.admin(Admin.ABORT, cdw=[1 | cid << 16]).result == 0
    assert [(a.cid, code(a.status)) for a in bus.reap(1)] == [(cid, Status.ABORT_REQUESTED)]
    bus.controller.release()
    assert bus.reap(1) == []


def test_what_is_not_in_flight_cannot_be_aborted() -> None:
    bus = ready()
    cid = bus.io(READ).cid
    assert bus.admin(Admin.ABORT, cdw=[1 | cid << 16]).result == 1


def test_an_event_request_can_be_aborted() -> None:
    bus = Bus().enable()
    cid = bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    bus.start(Entry(Admin.ABORT, cdw=(cid << 16, 0, 0, 0, 0, 0)))
    bus.settle()
    answers = {answer.cid: answer for answer in bus.reap()}
    assert code(answers[cid].status) == Status.ABORT_REQUESTED
    assert len(answers) == 2
