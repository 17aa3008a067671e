"""What a CXL card keeps: over a new partition, a reset, a power failure and a sanitizing."""

from __future__ import annotations

import struct

import pytest

from tests.cxl_card_rig import (
    GET_LSA,
    HEALTH,
    INJECT,
    LINE,
    MAILBOX,
    PARTITIONS,
    SANITIZE,
    SET_LSA,
    SET_PARTITIONS,
    SET_SHUTDOWN,
    SHUTDOWN,
    ask,
    card,
    commit,
    decoding,
    told,
)
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_part import GRAIN

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
