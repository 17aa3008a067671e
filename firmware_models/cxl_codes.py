"""Return codes and opcodes of a CXL mailbox, by their numbers in CXL 3.x."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """What a command answers."""

    SUCCESS = 0
    BACKGROUND = 1
    INVALID_INPUT = 2
    UNSUPPORTED = 3
    INTERNAL = 4
    RETRY = 5
    BUSY = 6
    MEDIA_DISABLED = 7
    INVALID_HANDLE = 0xE
    INVALID_ADDRESS = 0xF
    POISON_LIMIT = 0x10
    MEDIA_FAILURE = 0x11
    ABORTED = 0x12
    INVALID_LENGTH = 0x16
    INVALID_LOG = 0x17


class Op(IntEnum):
    """What may be asked."""

    GET_EVENTS = 0x0100
    CLEAR_EVENTS = 0x0101
    GET_EVENT_INTERRUPTS = 0x0102
    SET_EVENT_INTERRUPTS = 0x0103
    GET_FIRMWARE = 0x0200
    GET_TIMESTAMP = 0x0300
    SET_TIMESTAMP = 0x0301
    GET_SUPPORTED_LOGS = 0x0400
    GET_LOG = 0x0401
    IDENTIFY = 0x4000
    GET_PARTITIONS = 0x4100
    SET_PARTITIONS = 0x4101
    GET_LSA = 0x4102
    SET_LSA = 0x4103
    GET_HEALTH = 0x4200
    GET_ALERTS = 0x4201
    SET_ALERTS = 0x4202
    GET_SHUTDOWN = 0x4203
    SET_SHUTDOWN = 0x4204
    GET_POISON = 0x4300
    INJECT_POISON = 0x4301
    CLEAR_POISON = 0x4302
    GET_SCAN_CAPABILITIES = 0x4303
    SANITIZE = 0x4400
    GET_DYNAMIC = 0x4800


class Refused(Exception):
    """A command that a card does not carry out; it changed nothing."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code
