"""A CXL type 3 card behind its registers: its mailbox, what it did, and what it says of itself."""

from __future__ import annotations

import struct
import uuid

import pytest

from tests.cxl_card_rig import (
    ALERTS,
    CLEAR_EVENTS,
    CM,
    DYNAMIC,
    EVENTS,
    GET_LSA,
    HEALTH,
    IDENTIFY,
    INJECT,
    LINE,
    MAILBOX,
    POISON,
    SANITIZE,
    SET_ALERTS,
    SET_LSA,
    SET_PARTITIONS,
    SHUTDOWN,
    ask,
    card,
    decoding,
    told,
)
from tierloop.firmware_models.cxl_card import Commanded
from tierloop.firmware_models.cxl_cells import MediaOperation
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart

EFFECTS_LOG = uuid.UUID("0da9c0b5-bf41-4b78-8f79-96b1623b3f17")


# -- the mailbox


def test_a_host_finds_the_register_groups() -> None:
    device = card(payload_nbytes=1024)
    array = device.read_device(0, 8)
    assert (array & 0xFFFF, array >> 32 & 0xFFFF) == (0, 3)
    found = {}
    for at in range(0x10, 0x40, 0x10):
        found[device.read_device(at, 8) & 0xFFFF] = (device.read_device(at + 4), device.read_device(at + 8))
    assert found == {1: (0x80, 8), 2: (MAILBOX, 0x20 + 1024), 0x4000: (0x90, 8)}
    assert 1 << (device.read_device(MAILBOX) & 31) == 1024
    assert device.read_device(0x90) >> 4 & 1 == 1  # the mailbox is ready


def test_a_card_identifies_itself() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=3 * GRAIN, partitionable_nbytes=2 * GRAIN, lsa_nbytes=4096)
    answer = told(device, IDENTIFY)
    assert len(answer) == 0x43
    assert struct.unpack_from("<4Q4HI", answer, 16) == (6, 1, 3, 1, 16, 16, 16, 16, 4096)
    assert int.from_bytes(answer[60:63], "little") == 256


def test_a_command_takes_its_time_and_its_registers_are_closed_meanwhile() -> None:
    device = card(mailbox_ns=500)
    device.advance(100)
    device.write_device(MAILBOX + 8, IDENTIFY, 8)
    device.write_device(MAILBOX + 4, 1)
    device.write_device(MAILBOX + 0x20, 0xDEAD)
    device.write_device(MAILBOX + 8, SET_LSA, 8)
    device.advance(599)
    assert device.read_device(MAILBOX + 4) == 1
    assert device.read_device(MAILBOX + 0x20) == 0
    device.advance(600)
    assert device.read_device(MAILBOX + 4) == 0
    assert device.read_device(MAILBOX + 8, 8) == IDENTIFY | 0x43 << 16
    assert list(device.history) == [Commanded(IDENTIFY, 0, Code.SUCCESS)]


@pytest.mark.parametrize(
    ("opcode", "payload", "code"),
    [
        (0x9999, b"", Code.UNSUPPORTED),
        (IDENTIFY, b"1234", Code.INVALID_LENGTH),
        (SET_PARTITIONS, bytes(9), Code.UNSUPPORTED),
        (SHUTDOWN, b"", Code.UNSUPPORTED),
        (DYNAMIC, bytes(2), Code.UNSUPPORTED),
        (GET_LSA, struct.pack("<II", 65530, 16), Code.INVALID_INPUT),
        (GET_LSA, struct.pack("<II", 0, 4096), Code.INVALID_INPUT),
        (SET_LSA, struct.pack("<II", 65534, 0) + b"abcd", Code.INVALID_INPUT),
        (0x0401, bytes(24), Code.INVALID_LOG),
        (0x0401, EFFECTS_LOG.bytes + struct.pack("<II", 0, 2000), Code.INVALID_INPUT),
        (0x0103, b"\3\0\0\0", Code.INVALID_INPUT),
        (INJECT, struct.pack("<Q", 32), Code.INVALID_ADDRESS),
        (INJECT, struct.pack("<Q", 2 * GRAIN), Code.INVALID_ADDRESS),
        (POISON, struct.pack("<QQ", 2 * GRAIN - 64, 2), Code.INVALID_ADDRESS),
        (POISON, struct.pack("<QQ", 0, 0), Code.INVALID_INPUT),
        (POISON, struct.pack("<QQ", 0, 1 << 63), Code.INVALID_ADDRESS),
        (EVENTS, b"\4", Code.INVALID_INPUT),
        (CLEAR_EVENTS, struct.pack("<BBB3xH", 0, 0, 2, 1), Code.INVALID_LENGTH),
        (SET_ALERTS, struct.pack("<BBBxhhHH", 1, 1, 99, 0, 0, 0, 0), Code.INVALID_INPUT),
    ],
)
def test_what_is_wrong_is_answered_with_its_code(opcode: int, payload: bytes, code: Code) -> None:
    assert ask(card(), opcode, payload) == (code, b"")


def test_a_payload_that_is_longer_than_the_mailbox_is_none() -> None:
    device = card(payload_nbytes=256)
    device.write_device(MAILBOX + 8, SET_LSA | 300 << 16, 8)
    device.write_device(MAILBOX + 4, 1)
    assert device.read_device(MAILBOX + 0x14) == Code.INVALID_LENGTH


def test_the_next_command_fails_as_the_back_door_wants() -> None:
    device = card()
    device.answer_next(Code.INTERNAL)
    assert [ask(device, SET_LSA, bytes(8) + b"label")[0] for _ in range(2)] == [Code.INTERNAL, Code.SUCCESS]


def test_labels_read_back() -> None:
    device = card()
    told(device, SET_LSA, struct.pack("<II", 100, 0) + b"a label")
    assert told(device, GET_LSA, struct.pack("<II", 98, 11)) == b"\0\0a label\0\0"


def test_the_effects_log_names_exactly_what_the_card_has() -> None:
    device = card(partitionable_nbytes=GRAIN)
    logs = told(device, 0x0400)
    assert (struct.unpack_from("<H", logs)[0], uuid.UUID(bytes=logs[8:24])) == (1, EFFECTS_LOG)
    size = struct.unpack_from("<I", logs, 24)[0]
    log = told(device, 0x0401, EFFECTS_LOG.bytes + struct.pack("<II", 0, size))
    effects = dict(struct.iter_unpack("<HH", log))
    assert SET_PARTITIONS in effects
    assert DYNAMIC not in effects
    assert effects[SANITIZE] & 1 << 6  # it runs in the background
    assert effects[IDENTIFY] == 0
    for opcode in (0x0200, 0x0300, DYNAMIC, 0x4304):
        assert (ask(device, opcode)[0] == Code.UNSUPPORTED) == (opcode not in effects)


def test_the_time_is_what_the_host_said_and_goes_on() -> None:
    device = card()
    assert told(device, 0x0300) == bytes(8)
    told(device, 0x0301, struct.pack("<Q", 10**18))
    device.advance(7)
    assert told(device, 0x0300) == struct.pack("<Q", 10**18 + 7)


def test_health_and_alerts_say_what_is_near_its_limit() -> None:
    device = card()
    device.state.health.temperature = 90
    assert told(device, HEALTH)[2] == 0
    told(device, SET_ALERTS, struct.pack("<BBBxhhHH", 2, 2, 0, 88, 0, 0, 0))
    assert told(device, ALERTS)[:2] == b"\x02\x1f"
    assert told(device, HEALTH)[2] == 1 << 2
    device.state.health.temperature = 120
    device.state.health.life_used = 100
    assert told(device, HEALTH)[2] == 2 << 2 | 2


def test_dynamic_capacity_lies_behind_the_static_one() -> None:
    device = card(dynamic_nbytes=(GRAIN, 2 * GRAIN))
    answer = told(device, DYNAMIC, bytes([2, 1]))
    assert answer[:2] == bytes([2, 1])
    assert struct.unpack_from("<3Q", answer, 8) == (3 * GRAIN, 2, 2 * GRAIN)
    assert ask(device, DYNAMIC, bytes([1, 2]))[0] == Code.INVALID_INPUT


# -- history, attributes, removal


def test_the_medium_tells_what_was_done_to_it() -> None:
    device = decoding()
    device.store(GRAIN + 64, bytes(LINE))
    device.poison(64)
    device.load(GRAIN + 64)
    device.store(GRAIN + 64, bytes(LINE))
    device.load(GRAIN)
    told_of = [
        MediaOperation("write", 64, LINE),
        MediaOperation("poison", 64, LINE),
        MediaOperation("read", 64, LINE),
        MediaOperation("write", 64, LINE),
        MediaOperation("clear", 64, LINE),
        MediaOperation("read", 0, LINE),
    ]
    assert list(device.state.cells.history) == told_of


def test_a_load_that_says_when_it_came_is_told_when_it_is_there() -> None:
    device = decoding()
    idle_ps = device.part.link.idle_ps(False)
    carried = device.load(GRAIN, at_ns=50).carried
    assert carried is not None
    assert carried.done_ps == 50_000 + idle_ps
    written = device.store(GRAIN, b"x", at_ns=1000)
    assert written is not None
    assert written.done_ps == 1_000_000 + device.part.link.idle_ps(True)


def cdat_entries(table: bytes) -> list[tuple[int, bytes]]:
    """(type, whole entry) of each."""
    at, found = 16, []
    while at < len(table):
        length = struct.unpack_from("<H", table, at + 2)[0]
        found.append((table[at], table[at : at + length]))
        at += length
    assert at == len(table)
    return found


@pytest.mark.parametrize("persistent", [0, GRAIN])
def test_the_table_of_attributes_adds_up_and_says_how_fast_the_card_is(persistent: int) -> None:
    device = card(persistent_nbytes=persistent)
    table = device.cdat()
    assert sum(table) % 256 == 0
    assert struct.unpack_from("<I", table)[0] == len(table)
    ranges = [struct.unpack_from("<BBxxQQ", entry, 4) for kind, entry in cdat_entries(table) if kind == 0]
    assert ranges == [(0, 0, 0, 2 * GRAIN), (1, 4, 2 * GRAIN, GRAIN)][: 1 + bool(persistent)]
    speed = {}
    for kind, entry in cdat_entries(table):
        if kind == 1 and entry[4] == 0:
            unit, value = struct.unpack_from("<QH", entry, 8)
            speed[entry[6]] = unit * value
    link = device.part.link
    assert 0 <= speed[1] - link.idle_ps(False) < 1000
    assert speed[4] == link.ceiling(False) // 10**6
    assert set(speed) == {1, 2, 4, 5}


def test_a_card_that_was_pulled_out_reads_as_ones() -> None:
    device = decoding()
    device.remove()
    device.write_device(MAILBOX + 4, 1)
    device.write_component(hdm_at := CM + 0x104, 0)
    assert (device.read_device(MAILBOX + 4), device.read_device(0, 8)) == (0xFFFFFFFF, (1 << 64) - 1)
    assert device.read_component(hdm_at) == 0xFFFFFFFF
    assert (device.load(GRAIN).data, device.cdat()) == (b"\xff" * LINE, b"")


@pytest.mark.parametrize(
    "wrong",
    [
        {"volatile_nbytes": 1 << 20},
        {"volatile_nbytes": 0},
        {"decoders": 3},
        {"payload_nbytes": 100},
        {"serial": -1},
        {"firmware": "a name that is too long"},
        {"poison_limit": 0},
        {"dynamic_nbytes": (5,)},
        {"mailbox_ns": -1},
    ],
)
def test_a_card_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"allowed|serial"):
        CxlPart(**wrong)  # type: ignore[arg-type]
