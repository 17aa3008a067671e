"""What a CXL card tells of its medium: poisoned lines, and the logs of events."""

from __future__ import annotations

import struct
import uuid

from tests.cxl_card_rig import CLEAR, CLEAR_EVENTS, EVENTS, HEALTH, INJECT, LINE, POISON, ask, card, decoding, told
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_events import FAILURE, FATAL, INFORMATIONAL
from tierloop.firmware_models.cxl_part import GRAIN

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
    assert struct.unpack_from("<QB", answer, 32 + 48) == (4096 | 1, 1)  # bit 0: volatile
    dram = told(device, EVENTS, bytes([FATAL]))[32 + 48 :]
    assert (dram[19], int.from_bytes(dram[20:23], "little"), int.from_bytes(dram[23:25], "little")) == (3, 70_000, 9)
    module = told(device, EVENTS, bytes([INFORMATIONAL]))[32 + 48 :]
    assert module[:19] == b"\3" + told(device, HEALTH)


def test_an_event_of_persistent_bytes_is_not_called_volatile() -> None:
    device = card()
    device.media_event(device.state.volatile_nbytes + 70)
    address = struct.unpack_from("<Q", told(device, EVENTS, bytes([FAILURE])), 80)[0]
    assert address == device.state.volatile_nbytes + 64


def test_a_load_of_poison_is_an_event() -> None:
    device = decoding()
    device.poison(640)
    device.load(GRAIN + 640)
    assert struct.unpack_from("<Q", told(device, EVENTS, bytes([FAILURE])), 80)[0] == 640 | 1


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
