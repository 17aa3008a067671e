"""What an NVMe controller tells about itself: health counters, the error log, and events that it reports unasked.

Counters only grow; data units are thousands of 512-byte units, rounded up when they are reported. An asynchronous event
is of one of two types here, error and health. Once reported, its type is masked until the host reads the log page that
goes with it; events of a type that was not reported yet wait, one of each kind, for a command to report them with.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tierloop.firmware_models.media import Wearing

SPARE, TEMPERATURE, RELIABILITY, READ_ONLY, BACKUP = (1 << bit for bit in range(5))
"""Bits of the critical warning."""

ERROR_LOG, HEALTH_LOG = 0x01, 0x02


class Event(NamedTuple):
    """An asynchronous event: its type, what happened, and the log page to read."""

    kind: int
    information: int
    log: int

    @property
    def word(self) -> int:
        """What the command that reports it ends with."""
        return self.kind | self.information << 8 | self.log << 16


BAD_DOORBELL_REGISTER = Event(0, 0, ERROR_LOG)
BAD_DOORBELL_VALUE = Event(0, 1, ERROR_LOG)
WORN = Event(1, 0, HEALTH_LOG)
HOT = Event(1, 1, HEALTH_LOG)
SPARE_LOW = Event(1, 2, HEALTH_LOG)


class Failure(NamedTuple):
    """An entry of the error log."""

    number: int
    sqid: int
    cid: int
    status: int
    byte: int
    lba: int
    nsid: int

    def pack(self) -> bytes:
        """Its 64 bytes."""
        head = struct.pack("<QHHHHQI", *self[:3], self.status << 1, self.byte, self.lba, self.nsid)
        return head.ljust(64, b"\0")


class Events:
    """Events that wait, and types that are masked."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._masked: set[int] = set()

    def add(self, event: Event) -> None:
        """Something happened."""
        if event not in self._waiting:
            self._waiting.append(event)

    def take(self) -> Event | None:
        """The event that is reported now; its type is masked from then on."""
        for event in self._waiting:
            if event.kind not in self._masked:
                self._waiting.remove(event)
                self._masked.add(event.kind)
                return event
        return None

    def read(self, log: int) -> None:
        """The host has read a log page: events of its type may be reported again."""
        kind = {ERROR_LOG: 0, HEALTH_LOG: 1}.get(log)
        if kind is not None:
            self._masked.discard(kind)

    def clear(self) -> None:
        """A reset forgets them."""
        self._waiting.clear()
        self._masked.clear()


@dataclass
class Health:
    """The counters; temperatures in kelvin.

    What is used and what is spare is what the worst of the media say that wear, or what a back door has said
    (`aged_percent`, `aged_spare_percent`) where that is worse.
    """

    media: tuple[Wearing, ...] = ()
    temperature_k: int = 310
    aged_spare_percent: int = 100
    spare_threshold: int = 10
    aged_percent: int = 0
    forced_warnings: int = 0
    read_units: int = 0
    written_units: int = 0
    reads: int = 0
    writes: int = 0
    busy_ns: int = 0
    power_cycles: int = 1
    on_ns: int = 0
    unsafe_shutdowns: int = 0
    media_errors: int = 0
    failures: int = 0
    log: deque[Failure] = field(default_factory=deque)

    @property
    def used_percent(self) -> int:
        """How much of its rated life the drive has had; more than 100 is possible."""
        return max([self.aged_percent, *(medium.percentage_used for medium in self.media)])

    @property
    def spare_percent(self) -> int:
        """What is left of the reserve."""
        return min([self.aged_spare_percent, *(medium.spare_percent for medium in self.media)])

    @property
    def read_only(self) -> bool:
        """A back door has said that nothing takes writes any more."""
        return bool(self.forced_warnings & READ_ONLY)

    def warnings(self, over_k: int, under_k: int) -> int:
        """The critical warning bits that hold now."""
        bits = self.forced_warnings
        bits |= READ_ONLY if self.media and all(medium.read_only for medium in self.media) else 0
        bits |= SPARE if self.spare_percent < self.spare_threshold else 0
        bits |= TEMPERATURE if self.temperature_k >= over_k or self.temperature_k <= under_k else 0
        return bits

    def fail(self, room: int, sqid: int, cid: int, status: int, byte: int, lba: int, nsid: int) -> None:
        """A command failed: into the error log, newest first, `room` entries of it."""
        self.failures += 1
        self.log.appendleft(Failure(self.failures, sqid, cid, status, byte, lba, nsid))
        while len(self.log) > room:
            self.log.pop()

    def page(self, warnings: int) -> bytes:
        """The health log page, 512 bytes."""
        head = struct.pack(
            "<BHBBB",
            warnings,
            self.temperature_k,
            self.spare_percent,
            self.spare_threshold,
            min(self.used_percent, 255),
        )
        counters = (
            -(-self.read_units // 1000),
            -(-self.written_units // 1000),
            self.reads,
            self.writes,
            self.busy_ns // 60_000_000_000,
            self.power_cycles,
            self.on_ns // 3_600_000_000_000,
            self.unsafe_shutdowns,
            self.media_errors,
            self.failures,
        )
        body = b"".join(number.to_bytes(16, "little") for number in counters)
        sensors = struct.pack("<IIH", 0, 0, self.temperature_k)
        return (head.ljust(32, b"\0") + body + sensors).ljust(512, b"\0")

    def errors(self, room: int) -> bytes:
        """The error log page."""
        return b"".join(failure.pack() for failure in self.log).ljust(64 * room, b"\0")
