"""The event logs of a CXL card: what happened to it, kept until the host says that it has seen it.

Four logs (informational, warning, failure, fatal) of records of 128 bytes, oldest first. What must hold:

- A record has a handle, unique in its log and never 0.
- A full log takes no more: it counts what it lost, with the times of the first and the last, until it is cleared.
- Only records that the host was given may be cleared, and only oldest first. That is stricter than CXL 3.x, which
  advises it: a host that clears what it did not read loses what it was never told.
- Clearing everything at once is for logs that overflowed.
"""

from __future__ import annotations

import struct
import uuid
from typing import NamedTuple

from tierloop.firmware_models.cxl_codes import Code, Refused

INFORMATIONAL, WARNING, FAILURE, FATAL = range(4)
LOGS = 4
RECORD_NBYTES = 128
HEADER_NBYTES = 32
GENERAL_MEDIA = uuid.UUID("fbcd0a77-c260-417f-85a9-088b1621eba6")
DRAM = uuid.UUID("601dcbb3-9c06-4eab-b8af-4e9bfb5c9624")
MEMORY_MODULE = uuid.UUID("fe927475-dd59-4339-a586-79bab113b774")
UNCORRECTABLE, THRESHOLD, POISON_OVERFLOW = 1, 2, 4
"""Bits of a descriptor."""


class Event(NamedTuple):
    """One record: kind, when, and the bytes that belong to its kind (at most 80)."""

    kind: uuid.UUID
    at_ns: int
    detail: bytes


def general_media(dpa: int, descriptor: int = UNCORRECTABLE, kind: int = 0, transaction: int = 1) -> bytes:
    """What a general media event says: an address, how bad, what it was (0: ECC), and whose access (1: host read)."""
    return struct.pack("<QBBBHBB3s16s", dpa, descriptor, kind, transaction, 0, 0, 0, b"", b"")


def dram(dpa: int, descriptor: int, bank: int, row: int, column: int) -> bytes:
    """What a DRAM event says: as general media, and the bank, row and column (marked as known)."""
    known = 1 << 4 | 1 << 5 | 1 << 6
    place = struct.pack("<BB3sBB", 0, 0, b"", 0, bank) + row.to_bytes(3, "little") + column.to_bytes(2, "little")
    return struct.pack("<QBBBH", dpa, descriptor, 0, 1, known) + place + bytes(32)


def memory_module(what: int, health: bytes) -> bytes:
    """What a memory module event says: a change (0: health, 1: media, 2: life, 3: temperature) and the health now."""
    return bytes([what]) + health


class EventLogs:
    """The logs of one card, each of `size` records."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        """All logs are empty."""
        self._records: list[list[tuple[int, Event]]] = [[] for _ in range(LOGS)]
        self._given: list[set[int]] = [set() for _ in range(LOGS)]
        self._lost = [(0, 0, 0)] * LOGS
        self._next = [1] * LOGS

    @property
    def status(self) -> int:
        """A bit for each log that holds something, as in the event status register."""
        return sum(bool(records) << log for log, records in enumerate(self._records))

    def add(self, log: int, event: Event) -> None:
        """Something happened. Raises ValueError for a log that is not there."""
        if log not in range(LOGS):
            raise ValueError(f"event log {log}; allowed: 0 to {LOGS - 1}")
        if len(self._records[log]) == self._size:
            count, first, _ = self._lost[log]
            self._lost[log] = (min(count + 1, 0xFFFF), first if count else event.at_ns, event.at_ns)
            return
        self._records[log].append((self._next[log], event))
        self._next[log] = self._next[log] % 0xFFFF + 1

    def records(self, log: int, payload_nbytes: int) -> bytes:
        """What Get Event Records answers: as many as fit, oldest first. Raises Refused."""
        if log not in range(LOGS):
            raise Refused(Code.INVALID_INPUT)
        fitting = self._records[log][: (payload_nbytes - HEADER_NBYTES) // RECORD_NBYTES]
        self._given[log] |= {handle for handle, _ in fitting}
        lost, first, last = self._lost[log]
        flags = (lost > 0) | (len(fitting) < len(self._records[log])) << 1
        header = struct.pack("<BxHQQH10x", flags, lost, first, last, len(fitting))
        return header + b"".join(_packed(handle, event) for handle, event in fitting)

    def clear(self, log: int, everything: bool, handles: tuple[int, ...]) -> None:
        """Forget records. Raises Refused, and then nothing was forgotten."""
        if log not in range(LOGS) or everything == bool(handles):
            raise Refused(Code.INVALID_INPUT)
        if everything and not self._lost[log][0]:
            raise Refused(Code.INVALID_INPUT)
        oldest = tuple(handle for handle, _ in self._records[log][: len(handles)])
        if not everything and (handles != oldest or not self._given[log].issuperset(handles)):
            raise Refused(Code.INVALID_HANDLE)
        del self._records[log][: len(self._records[log]) if everything else len(handles)]
        self._given[log] &= {handle for handle, _ in self._records[log]}
        self._lost[log] = (0, 0, 0)


def _packed(handle: int, event: Event) -> bytes:
    head = event.kind.bytes + struct.pack("<B3sHHQBB14x", RECORD_NBYTES, b"", handle, 0, event.at_ns, 0, 0)
    return (head + event.detail).ljust(RECORD_NBYTES, b"\0")
