"""What a CXL card answers fits its mailbox, and agrees with what it says elsewhere."""

from __future__ import annotations

import struct

import pytest

from tests.cxl_card_rig import ask, card, told
from tierloop.devices.drivers.cxl_cdat import parse
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.firmware_models.cxl_codes import Code, Op
from tierloop.firmware_models.cxl_part import GRAIN, CxlLinkPart, CxlPart

INFORMATIONAL = 0


def dynamic_regions(answer: bytes) -> list[tuple[int, int, int]]:
    """(device address, bytes, handle) of each region of an answer."""
    fields = [struct.unpack_from("<QQQQI", answer, 8 + 40 * i) for i in range(answer[1])]
    return [(base, length, handle) for base, _, length, _, handle in fields]


@pytest.mark.parametrize("persistent", [0, GRAIN])
def test_a_dynamic_region_has_the_handle_that_the_table_of_attributes_gives_it(persistent: int) -> None:
    device = card(persistent_nbytes=persistent, dynamic_nbytes=(GRAIN, 2 * GRAIN))
    ranges = parse("card", device.cdat()).ranges
    known = [(one.dpa, one.nbytes, one.handle) for one in ranges]
    assert dynamic_regions(told(device, Op.GET_DYNAMIC, bytes([8, 0]))) == known[-2:]
    assert dynamic_regions(told(device, Op.GET_DYNAMIC, bytes([1, 1]))) == known[-1:]


def test_as_many_dynamic_regions_are_told_at_once_as_the_mailbox_holds() -> None:
    device = card(payload_nbytes=256, dynamic_nbytes=(GRAIN,) * 8)
    answer = told(device, Op.GET_DYNAMIC, bytes([8, 0]))
    assert (answer[0], answer[1]) == (8, 5)
    assert len(answer) <= 256
    rest = told(device, Op.GET_DYNAMIC, bytes([8, 5]))
    assert len({base for base, _, _ in dynamic_regions(answer) + dynamic_regions(rest)}) == 8


@pytest.mark.parametrize("op", list(Op))
def test_no_answer_is_longer_than_the_mailbox(op: Op) -> None:
    device = card(payload_nbytes=256, partitionable_nbytes=GRAIN, event_records=64, dynamic_nbytes=(GRAIN,) * 8)
    for line in range(0, 4096, 128):
        device.poison(line)
        device.media_event(line)
    inputs = {
        Op.GET_EVENTS: b"\2",
        Op.GET_LOG: told(device, Op.GET_SUPPORTED_LOGS)[8:24] + struct.pack("<II", 0, 64),
        Op.GET_LSA: struct.pack("<II", 0, 256),
        Op.GET_POISON: struct.pack("<QQ", 0, 1024),
        Op.GET_SCAN_CAPABILITIES: struct.pack("<QQ", 0, 1024),
        Op.GET_DYNAMIC: bytes([255, 0]),
    }
    _, answer = ask(device, op, inputs.get(op, b""))
    assert len(answer) <= 256
    assert device.read_device(0x100 + 0x20 + 256) == 0


def test_a_partition_that_changes_at_once_makes_a_new_table_of_attributes() -> None:
    device = card(volatile_nbytes=0, partitionable_nbytes=2 * GRAIN)
    before = parse("card", device.cdat())
    told(device, Op.SET_PARTITIONS, struct.pack("<QB", 1, 1))
    after = parse("card", device.cdat())
    assert after.ranges != before.ranges
    assert after.sequence == before.sequence + 1


def test_poison_that_is_injected_stands_in_the_informational_log() -> None:
    device = card()
    told(device, Op.SET_TIMESTAMP, struct.pack("<Q", 5_000))
    told(device, Op.INJECT_POISON, struct.pack("<Q", 640))
    assert device.read_device(0x80) == 1 << INFORMATIONAL
    answer = told(device, Op.GET_EVENTS, bytes([INFORMATIONAL]))
    assert struct.unpack_from("<Q", answer, 32 + 24)[0] == 5_000
    dpa, descriptor, _, transaction = struct.unpack_from("<QBBB", answer, 32 + 48)
    assert (dpa & ~63, descriptor & 1, transaction) == (640, 0, 4)


def test_poison_that_is_not_injected_is_no_event() -> None:
    device = card(poison_limit=1)
    told(device, Op.INJECT_POISON, struct.pack("<Q", 640))
    told(device, Op.INJECT_POISON, struct.pack("<Q", 640))
    assert ask(device, Op.INJECT_POISON, struct.pack("<Q", 704))[0] == Code.POISON_LIMIT
    assert struct.unpack_from("<H", told(device, Op.GET_EVENTS, bytes([INFORMATIONAL])), 20)[0] == 1


def test_a_card_behind_a_very_slow_link_can_be_memory_of_a_node() -> None:
    slow = CxlPart(link=CxlLinkPart(bytes_per_s=1000))
    tree = cxl_machine([slow], mode="system-ram").tree
    assert any(path.startswith("/sys/devices/virtual/memory_tiering/") for path in tree.files)
