"""A CXL type 3 card behind its registers: what is allowed when, what it did, and what it keeps."""

from __future__ import annotations

import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cxl_card_rig import CM, MAILBOX, ask, card, commit, decoding, hdm, told
from tierloop.firmware_models.cxl_card import Commanded
from tierloop.firmware_models.cxl_cells import MediaOperation
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_events import FAILURE, FATAL, INFORMATIONAL
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart
from tierloop.firmware_models.hdm import WAYS, Interleave

LINE = 64
EFFECTS_LOG = uuid.UUID("0da9c0b5-bf41-4b78-8f79-96b1623b3f17")
ENCODED = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 3: 8, 6: 9, 12: 10}
IDENTIFY, PARTITIONS, SET_PARTITIONS, GET_LSA, SET_LSA, HEALTH = 0x4000, 0x4100, 0x4101, 0x4102, 0x4103, 0x4200
ALERTS, SET_ALERTS, SHUTDOWN, SET_SHUTDOWN = 0x4201, 0x4202, 0x4203, 0x4204
POISON, INJECT, CLEAR, SANITIZE, DYNAMIC = 0x4300, 0x4301, 0x4302, 0x4400, 0x4800
EVENTS, CLEAR_EVENTS = 0x0100, 0x0101


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


# -- partitions and power


def test_a_partition_changes_with_the_next_reset() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN, partitionable_nbytes=2 * GRAIN)
    assert struct.unpack("<4Q", told(device, PARTITIONS)) == (1, 3, 0, 0)
    told(device, SET_PARTITIONS, struct.pack("<QB", 3, 0))
    assert struct.unpack("<4Q", told(device, PARTITIONS)) == (1, 3, 3, 1)
    device.reset()
    assert struct.unpack("<4Q", told(device, PARTITIONS)) == (3, 1, 0, 0)


def test_what_changes_sides_is_erased_and_nothing_else() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN, partitionable_nbytes=GRAIN)
    for place in range(3):
        device.poke(place * GRAIN, b"mark")
    told(device, SET_PARTITIONS, struct.pack("<QB", 2, 0))
    device.reset()
    assert [device.peek(place * GRAIN, 4) for place in range(3)] == [b"mark", bytes(4), b"mark"]


@pytest.mark.parametrize("volatile", [0, 4, 1 << 60])
def test_a_partition_stays_within_what_can_be_divided(volatile: int) -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN, partitionable_nbytes=2 * GRAIN)
    assert ask(device, SET_PARTITIONS, struct.pack("<QB", volatile, 0))[0] == Code.INVALID_INPUT
    assert device.state.next_volatile is None


def test_a_partition_changes_at_once_only_while_nothing_is_decoded() -> None:
    device = card(volatile_nbytes=GRAIN, partitionable_nbytes=GRAIN)
    assert commit(device, 0, GRAIN, GRAIN)
    assert ask(device, SET_PARTITIONS, struct.pack("<QB", 2, 1))[0] == Code.INVALID_INPUT
    device.reset()
    told(device, SET_PARTITIONS, struct.pack("<QB", 2, 1))
    assert struct.unpack("<4Q", told(device, PARTITIONS)) == (2, 0, 0, 0)


def test_power_takes_volatile_bytes_and_leaves_the_others() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)
    told(device, SET_LSA, bytes(8) + b"kept")
    device.poke(100, b"gone")
    device.poke(GRAIN + 100, b"kept")
    device.poison(64)
    device.poison(GRAIN)
    assert commit(device, 0, GRAIN, GRAIN)
    device.power_off()
    assert device.peek(100, 4) == bytes(4)
    assert device.peek(GRAIN + 100, 4) == b"kept"
    assert told(device, GET_LSA, struct.pack("<II", 0, 4)) == b"kept"
    assert device.state.cells.poison_in(0, 2 * GRAIN) == [GRAIN]
    assert device.state.decoders.committed == []


def test_a_shutdown_that_nobody_announced_is_counted() -> None:
    device = card(volatile_nbytes=0, persistent_nbytes=GRAIN)
    count = []
    for state in (1, 0, 1):
        told(device, SET_SHUTDOWN, bytes([state]))
        assert told(device, SHUTDOWN) == bytes([state])
        device.power_off()
        count.append(struct.unpack_from("<I", told(device, HEALTH), 6)[0])
    assert count == [1, 1, 2]


def test_a_store_to_persistent_bytes_makes_a_shutdown_dirty() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)
    assert commit(device, 0, GRAIN, GRAIN)
    assert commit(device, 1, 2 * GRAIN, GRAIN)
    device.store(GRAIN, b"x")
    assert told(device, SHUTDOWN) == b"\0"
    device.store(2 * GRAIN, b"x")
    assert told(device, SHUTDOWN) == b"\1"


# -- poison


def poison_list(device_answer: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """Flags, and (address, bytes, source) of each record."""
    count = struct.unpack_from("<H", device_answer, 10)[0]
    assert len(device_answer) == 32 + 16 * count
    records = [struct.unpack_from("<QI", device_answer, 32 + 16 * i) for i in range(count)]
    return device_answer[0], [(word & ~63, lines * LINE, word & 7) for word, lines in records]


def test_poison_is_of_the_line_and_not_of_its_neighbours() -> None:
    device = decoding()
    for line in (0, 64, 128):
        device.store(GRAIN + line, bytes([line + 1]) * LINE)
    told(device, INJECT, struct.pack("<Q", 64))
    assert [device.load(GRAIN + line).poisoned for line in (0, 64, 128)] == [False, True, False]
    assert device.load(GRAIN + 128).data == bytes([129]) * LINE
    assert device.load(GRAIN + 64).data == b"\xff" * LINE


def test_a_poisoned_line_is_good_again_when_it_is_written_whole() -> None:
    device = decoding()
    device.poison(0)
    device.store(GRAIN, b"part", 8)
    assert device.load(GRAIN).poisoned
    device.store(GRAIN, bytes(range(64)))
    assert device.load(GRAIN) == (bytes(range(64)), False, None)
    device.poison(0)
    told(device, CLEAR, struct.pack("<Q", 0) + b"w" * 64)
    assert device.load(GRAIN).data == b"w" * 64


def test_neighbouring_poison_of_one_source_is_one_record() -> None:
    device = card()
    for line in (0, 64, 128, 4096):
        device.poison(line)
    told(device, INJECT, struct.pack("<Q", 192))
    flags, records = poison_list(told(device, POISON, struct.pack("<QQ", 0, 1024)))
    assert (flags, records) == (0, [(0, 192, 2), (192, 64, 3), (4096, 64, 2)])
    assert poison_list(told(device, POISON, struct.pack("<QQ", 64, 1)))[1] == [(64, 64, 2)]


def test_a_long_poison_list_comes_in_pieces() -> None:
    device = card(payload_nbytes=256)
    lines = [128 * i for i in range(40)]
    for line in lines:
        device.poison(line)
    pieces = [poison_list(told(device, POISON, struct.pack("<QQ", 0, 4096))) for _ in range(3)]  # 14 records each
    assert [(flags, len(records)) for flags, records in pieces] == [(1, 14), (1, 14), (0, 12)]
    assert [record[0] for _, records in pieces for record in records] == lines
    assert poison_list(told(device, POISON, struct.pack("<QQ", 0, 4096)))[1][0][0] == 0


def test_no_more_poison_is_injected_than_the_limit() -> None:
    device = card(poison_limit=2)
    codes = [ask(device, INJECT, struct.pack("<Q", line * 64))[0] for line in (0, 1, 1, 2)]
    assert codes == [Code.SUCCESS, Code.SUCCESS, Code.SUCCESS, Code.POISON_LIMIT]
    told(device, 0x0301, struct.pack("<Q", 77))
    device.poison(2 * 64)
    answer = told(device, POISON, struct.pack("<QQ", 0, 64))
    assert (answer[0], struct.unpack_from("<Q", answer, 2)[0]) == (2, 77)
    told(device, CLEAR, struct.pack("<Q", 0) + bytes(64))
    assert told(device, POISON, struct.pack("<QQ", 0, 64))[0] == 0


# -- events


def handles(answer: bytes) -> list[int]:
    """Handles of the records of an answer."""
    count = struct.unpack_from("<H", answer, 20)[0]
    return [struct.unpack_from("<H", answer, 32 + 128 * i + 20)[0] for i in range(count)]


def clear(log: int, *given_handles: int, everything: bool = False) -> bytes:
    """The payload that clears these."""
    return struct.pack(f"<BBB3x{len(given_handles)}H", log, everything, len(given_handles), *given_handles)


def test_an_event_says_what_where_and_when() -> None:
    device = card()
    told(device, 0x0301, struct.pack("<Q", 5_000))
    device.media_event(4096)
    device.dram_event(8192, bank=3, row=70_000, column=9, log=FATAL)
    device.module_event(3, log=INFORMATIONAL)
    assert device.read_device(0x80) == 1 << FAILURE | 1 << FATAL | 1 << INFORMATIONAL
    answer = told(device, EVENTS, bytes([FAILURE]))
    assert uuid.UUID(bytes=answer[32:48]) == uuid.UUID("fbcd0a77-c260-417f-85a9-088b1621eba6")
    assert (answer[48], struct.unpack_from("<Q", answer, 32 + 24)[0]) == (128, 5_000)
    assert struct.unpack_from("<QB", answer, 32 + 48) == (4096, 1)
    dram = told(device, EVENTS, bytes([FATAL]))[32 + 48 :]
    assert (dram[19], int.from_bytes(dram[20:23], "little"), int.from_bytes(dram[23:25], "little")) == (3, 70_000, 9)
    module = told(device, EVENTS, bytes([INFORMATIONAL]))[32 + 48 :]
    assert module[:19] == b"\3" + told(device, HEALTH)


def test_a_load_of_poison_is_an_event() -> None:
    device = decoding()
    device.poison(640)
    device.load(GRAIN + 640)
    assert struct.unpack_from("<Q", told(device, EVENTS, bytes([FAILURE])), 80)[0] == 640


def test_events_are_cleared_in_order_and_only_when_they_were_read() -> None:
    device = card()
    for dpa in (0, 64, 128):
        device.media_event(dpa)
    assert ask(device, CLEAR_EVENTS, clear(FAILURE, 1))[0] == Code.INVALID_HANDLE  # not read yet
    assert handles(told(device, EVENTS, bytes([FAILURE]))) == [1, 2, 3]
    for wrong in ((2,), (1, 3), (2, 1), (1, 2, 3, 4), (0,)):
        assert ask(device, CLEAR_EVENTS, clear(FAILURE, *wrong))[0] == Code.INVALID_HANDLE
    told(device, CLEAR_EVENTS, clear(FAILURE, 1, 2))
    assert handles(told(device, EVENTS, bytes([FAILURE]))) == [3]
    assert ask(device, CLEAR_EVENTS, clear(FAILURE, everything=True))[0] == Code.INVALID_INPUT
    assert ask(device, CLEAR_EVENTS, clear(FAILURE))[0] == Code.INVALID_INPUT


def test_a_full_log_counts_what_it_lost() -> None:
    device = card(event_records=2)
    told(device, 0x0301, struct.pack("<Q", 100))
    for _ in range(5):
        device.media_event(0)
        device.advance(device.state.now_ns + 10)
    answer = told(device, EVENTS, bytes([FAILURE]))
    assert (answer[0] & 1, *struct.unpack_from("<HQQ", answer, 2)) == (1, 3, 120, 140)
    told(device, CLEAR_EVENTS, clear(FAILURE, everything=True))
    assert told(device, EVENTS, bytes([FAILURE]))[:32] == bytes(32)
    assert device.read_device(0x80) == 0


def test_a_long_log_says_that_there_is_more() -> None:
    device = card(payload_nbytes=512)
    for _ in range(5):
        device.media_event(0)
    answer = told(device, EVENTS, bytes([FAILURE]))
    assert (answer[0], handles(answer)) == (2, [1, 2, 3])
    assert ask(device, CLEAR_EVENTS, clear(FAILURE, 1, 2, 3, 4))[0] == Code.INVALID_HANDLE
    told(device, CLEAR_EVENTS, clear(FAILURE, 1, 2, 3))
    assert handles(told(device, EVENTS, bytes([FAILURE]))) == [4, 5]


# -- work in the background


def test_sanitizing_goes_on_in_the_background_and_leaves_nothing() -> None:
    device = card(sanitize_ns=1000)
    device.poke(5, b"secret")
    told(device, SET_LSA, bytes(8) + b"secret")
    assert ask(device, SANITIZE)[0] == Code.BACKGROUND
    device.advance(600)
    word = device.read_device(MAILBOX + 0x18, 8)
    assert (word & 0xFFFF, word >> 16 & 127) == (SANITIZE, 60)
    assert device.read_device(MAILBOX + 0x10) & 1 == 1
    assert device.read_device(0x90) >> 2 & 3 == 3  # the medium is disabled
    assert ask(device, SANITIZE)[0] == Code.BUSY
    assert ask(device, INJECT, bytes(8))[0] == Code.MEDIA_DISABLED
    assert ask(device, HEALTH)[0] == Code.SUCCESS
    device.advance(1000)
    word = device.read_device(MAILBOX + 0x18, 8)
    assert (word & 0xFFFF, word >> 16 & 127, word >> 32) == (SANITIZE, 100, 0)
    assert device.peek(5, 6) == bytes(6)
    assert told(device, GET_LSA, struct.pack("<II", 0, 6)) == bytes(6)


def test_a_medium_that_is_being_erased_gives_no_bytes_and_takes_none() -> None:
    device = card(sanitize_ns=1000)
    device.poke(0, b"secret")
    ask(device, SANITIZE)
    assert commit(device, 0, GRAIN, GRAIN)
    assert device.load(GRAIN) == (b"\xff" * LINE, True, None)
    device.store(GRAIN, b"x")
    assert device.peek(0, 6) == b"secret"


def test_a_card_that_is_decoding_is_not_sanitized() -> None:
    device = decoding()
    assert ask(device, SANITIZE)[0] == Code.INVALID_INPUT


def test_work_in_the_background_can_be_held() -> None:
    device = card(sanitize_ns=10)
    device.hold_background()
    ask(device, SANITIZE)
    device.advance(10**9)
    assert device.read_device(MAILBOX + 0x18, 8) >> 16 & 127 == 99
    device.hold_background(False)
    device.advance(10**9)
    assert device.read_device(MAILBOX + 0x10) & 1 == 0


# -- decoders


def test_the_capability_says_how_many_decoders_there_are() -> None:
    assert [card(decoders=count).read_component(CM + 0x100) & 15 for count in (1, 2, 4, 10)] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"number": 1}, "the one below is not committed"),
        ({"nbytes": 0}, "nothing"),
        ({"nbytes": 3 * GRAIN}, "more than the card has"),
        ({"skip": GRAIN, "nbytes": 2 * GRAIN}, "beyond the end"),
        ({"ways": 1, "nbytes": 3 * GRAIN}, "no whole number per way"),
        ({"ways": 5}, "ways that there are not"),
        ({"granule": 7}, "a granule that there is not"),
        ({"bits": 0}, "memory of an accelerator"),
        ({"base": 1 << 52}, "beyond the addresses of a host"),
    ],
)
def test_a_decoder_that_may_not_be_is_not_committed(wrong: dict[str, int], why: str) -> None:
    settings = {"number": 0, "base": GRAIN, "nbytes": GRAIN, **wrong}
    device = card()
    assert not commit(device, **settings), why
    assert device.load(GRAIN).data == b"\xff" * LINE


def test_decoders_rise_and_do_not_overlap() -> None:
    device = card(volatile_nbytes=4 * GRAIN)
    assert commit(device, 0, 4 * GRAIN, 2 * GRAIN)
    assert not commit(device, 1, 5 * GRAIN, GRAIN)
    assert not commit(device, 1, 2 * GRAIN, GRAIN)
    assert not commit(device, 2, 8 * GRAIN, GRAIN)
    assert commit(device, 1, 6 * GRAIN, GRAIN, skip=GRAIN)
    device.store(6 * GRAIN, b"second")
    assert device.peek(3 * GRAIN, 6) == b"second"


def test_a_decoder_does_not_reach_over_the_edge_of_a_partition() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)
    assert not commit(device, 0, GRAIN, 2 * GRAIN)
    assert commit(device, 0, GRAIN, GRAIN, skip=GRAIN)


def test_sizes_and_bases_are_multiples_of_256_mib() -> None:
    device = card()
    at = hdm(device)
    device.write_component(at + 0x10, 0x1FFFFFFF)
    device.write_component(at + 0x18, 0xFFFFFFFF)
    assert (device.read_component(at + 0x10), device.read_component(at + 0x18)) == (0x10000000, 0xF0000000)


def test_a_committed_decoder_stands() -> None:
    device = decoding()
    at = hdm(device)
    before = [device.read_component(at + offset) for offset in range(0x10, 0x30, 4)]
    for offset in (0x10, 0x14, 0x18, 0x1C, 0x24, 0x28):
        device.write_component(at + offset, 0x70000000)
    assert [device.read_component(at + offset) for offset in range(0x10, 0x30, 4)] == before


def test_decoders_are_given_up_from_the_top_and_not_when_locked() -> None:
    device = card()
    at = hdm(device)
    assert commit(device, 0, GRAIN, GRAIN, bits=1 << 12 | 1 << 8)
    assert commit(device, 1, 2 * GRAIN, GRAIN)
    for number in (0, 1, 0):
        device.write_component(at + 0x20 + 0x20 * number, 0)
    assert [decoder.number for decoder in device.state.decoders.committed] == [0]
    device.reset()
    assert device.state.decoders.committed == []


def test_a_decoder_below_another_is_not_given_up() -> None:
    device = card()
    assert commit(device, 0, GRAIN, GRAIN)
    assert commit(device, 1, 2 * GRAIN, GRAIN)
    device.write_component(hdm(device) + 0x20, 0)
    assert [decoder.number for decoder in device.state.decoders.committed] == [0, 1]
    device.write_component(hdm(device) + 0x40, 0)
    device.write_component(hdm(device) + 0x20, 0)
    assert device.state.decoders.committed == []


def test_nothing_is_decoded_until_decoding_is_on() -> None:
    device = decoding()
    device.poke(0, b"x" * LINE)
    device.write_component(hdm(device) + 4, 0)
    assert device.load(GRAIN).data == b"\xff" * LINE
    device.write_component(hdm(device) + 4, 2)
    assert device.load(GRAIN).data == b"x" * LINE


@given(st.sampled_from(WAYS), st.integers(0, 6), st.data())
def test_a_way_of_a_set_keeps_its_granules_in_a_row(ways: int, granule: int, data: st.DataObject) -> None:
    device = card(volatile_nbytes=GRAIN)
    base = 48 * GRAIN
    assert commit(device, 0, base, ways * GRAIN, ways=ENCODED[ways], granule=granule)
    way = data.draw(st.integers(0, ways - 1))
    dpa = data.draw(st.integers(0, GRAIN // LINE - 1)) * LINE
    size = 256 << granule
    turn, rest = divmod(dpa, size)
    if ways % 3:
        assert base + Interleave(ways, size).encode(way, dpa) == base + (turn * ways + way) * size + rest
    device.store(base + (turn * ways + way) * size + rest, b"here")
    assert device.peek(dpa, 4) == b"here"


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
