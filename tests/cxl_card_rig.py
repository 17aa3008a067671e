"""A host's end of a CXL card, for tests: registers written by hand, from the tables of the specification."""

from __future__ import annotations

import struct

from tierloop.firmware_models.cxl_card import CxlCard
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart

MAILBOX = 0x100
CM = 0x1000
MIB = 1 << 20
LINE = 64
IDENTIFY, PARTITIONS, SET_PARTITIONS, GET_LSA, SET_LSA, HEALTH = 0x4000, 0x4100, 0x4101, 0x4102, 0x4103, 0x4200
ALERTS, SET_ALERTS, SHUTDOWN, SET_SHUTDOWN = 0x4201, 0x4202, 0x4203, 0x4204
POISON, INJECT, CLEAR, SANITIZE, DYNAMIC = 0x4300, 0x4301, 0x4302, 0x4400, 0x4800
EVENTS, CLEAR_EVENTS = 0x0100, 0x0101
"""Opcodes of the mailbox."""


def card(**part: object) -> CxlCard:
    """A card that answers its mailbox at once, unless told otherwise."""
    return CxlCard(CxlPart(**{"mailbox_ns": 0, **part}))  # type: ignore[arg-type]


def ask(device: CxlCard, opcode: int, payload: bytes = b"") -> tuple[int, bytes]:
    """Send a command through the registers: return code and output payload."""
    for at in range(0, len(payload), 4):
        device.write_device(MAILBOX + 0x20 + at, int.from_bytes(payload[at : at + 4], "little"))
    device.write_device(MAILBOX + 0x08, opcode | len(payload) << 16, 8)
    device.write_device(MAILBOX + 0x04, 1)
    assert device.read_device(MAILBOX + 0x04) & 1 == 0
    length = device.read_device(MAILBOX + 0x08, 8) >> 16 & 0x1FFFFF
    words = [device.read_device(MAILBOX + 0x20 + at) for at in range(0, length, 4)]
    return device.read_device(MAILBOX + 0x14) & 0xFFFF, struct.pack(f"<{len(words)}I", *words)[:length]


def told(device: CxlCard, opcode: int, payload: bytes = b"") -> bytes:
    """The answer of a command that succeeds."""
    code, answer = ask(device, opcode, payload)
    assert code == Code.SUCCESS
    return answer


def hdm(device: CxlCard) -> int:
    """Where the HDM decoder capability is, found as a host finds it."""
    assert device.read_component(CM) & 0xFFFF == 1
    header = device.read_component(CM + 4)
    assert header & 0xFFFF == 5
    return CM + (header >> 20)


def commit(
    device: CxlCard,
    number: int,
    base: int,
    nbytes: int,
    skip: int = 0,
    ways: int = 0,
    granule: int = 0,
    bits: int = 1 << 12,
) -> bool:
    """Program a decoder (ways and granule as their fields) and commit it: whether it is."""
    at = hdm(device) + 0x20 * number
    for offset, value in ((0x10, base), (0x18, nbytes), (0x24, skip)):
        device.write_component(at + offset, value & 0xFFFFFFFF)
        device.write_component(at + offset + 4, value >> 32)
    device.write_component(at + 0x20, granule | ways << 4 | bits | 1 << 9)
    device.write_component(hdm(device) + 4, 2)
    control = device.read_component(at + 0x20)
    assert bool(control >> 10 & 1) != bool(control >> 11 & 1)
    return bool(control >> 10 & 1)


def decoding(nbytes: int = 2 * GRAIN, base: int = GRAIN, **part: object) -> CxlCard:
    """A card whose first bytes answer from `base` on."""
    device = card(**part)
    assert commit(device, 0, base, nbytes)
    return device
