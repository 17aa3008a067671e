"""The state of a CXL card behind its mailbox: partitions, labels, health, alerts, time, work in the background.

The card has no clock; it is told the time (`advance`). Times are in ns from an arbitrary beginning that the host sets
with a timestamp; a card whose timestamp was never set says 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tierloop.firmware_models.cxl_cdat import CdatRange
from tierloop.firmware_models.cxl_cells import CxlCells
from tierloop.firmware_models.cxl_codes import Code, Op, Refused
from tierloop.firmware_models.cxl_decoders import CxlDecoders
from tierloop.firmware_models.cxl_events import EventLogs
from tierloop.firmware_models.cxl_part import LINE, CxlPart


@dataclass(frozen=True)
class Alerts:
    """Thresholds: life used in percent, temperatures in °C, counts of corrected errors."""

    life_critical: int = 95
    hottest: int = 95
    coldest: int = 0
    enabled: int = 0
    life: int = 75
    hot: int = 85
    cold: int = 5
    corrected_volatile: int = 0
    corrected_persistent: int = 0

    def packed(self) -> bytes:
        """As Get Alert Configuration has it."""
        numbers = (self.enabled, 0x1F, self.life_critical, self.life, self.hottest, self.coldest, self.hot, self.cold)
        return struct.pack("<4B4h2H", *numbers, self.corrected_volatile, self.corrected_persistent)

    def changed(self, payload: bytes) -> Alerts:
        """As Set Alert Configuration wants it: only the settings whose bit is set. Raises Refused."""
        valid, enable, life, hot, cold, volatile, persistent = struct.unpack("<BBBxhhHH", payload)
        if (valid | enable) & ~0x1F:
            raise Refused(Code.INVALID_INPUT)
        new = replace(self, enabled=self.enabled & ~valid | enable & valid)
        settings = {
            "life": life,
            "hot": hot,
            "cold": cold,
            "corrected_volatile": volatile,
            "corrected_persistent": persistent,
        }
        new = replace(new, **{name: value for bit, (name, value) in enumerate(settings.items()) if valid >> bit & 1})
        if new.life > new.life_critical or not new.coldest <= new.cold <= new.hot <= new.hottest:
            raise Refused(Code.INVALID_INPUT)
        return new


@dataclass
class Health:
    """How the card is. `media` as in Get Health Info: 0 normal, 1 not ready, 2 lost persistence, 3 all data lost, …"""

    maintenance_needed: bool = False
    degraded: bool = False
    replacement_needed: bool = False
    media: int = 0
    life_used: int = 1
    temperature: int = 40
    dirty_shutdowns: int = 0
    corrected_volatile: int = 0
    corrected_persistent: int = 0

    def packed(self, alerts: Alerts) -> bytes:
        """As Get Health Info has it; the additional status follows from the alerts."""
        status = self.maintenance_needed | self.degraded << 1 | self.replacement_needed << 2
        on = alerts.enabled
        life = 2 if self.life_used >= alerts.life_critical else bool(on & 1) and self.life_used >= alerts.life
        heat = 0
        if not alerts.coldest <= self.temperature <= alerts.hottest:
            heat = 2
        elif (on & 2 and self.temperature >= alerts.hot) or (on & 4 and self.temperature <= alerts.cold):
            heat = 1
        volatile = bool(on & 8) and self.corrected_volatile >= alerts.corrected_volatile
        persistent = bool(on & 16) and self.corrected_persistent >= alerts.corrected_persistent
        additional = int(life) | heat << 2 | volatile << 4 | persistent << 5
        counts = (self.dirty_shutdowns, self.corrected_volatile, self.corrected_persistent)
        numbers = (status & 255, self.media & 255, additional, max(0, min(self.life_used, 255)))
        temperature = max(-(1 << 15), min(self.temperature, (1 << 15) - 1))
        return struct.pack("<4Bh3I", *numbers, temperature, *(count & 0xFFFFFFFF for count in counts))


class Background(NamedTuple):
    """Work that goes on after its command was answered."""

    op: Op
    began_ns: int
    takes_ns: int


@dataclass
class CxlState:
    """All of one card but its registers."""

    part: CxlPart
    cells: CxlCells = field(init=False)
    decoders: CxlDecoders = field(init=False)
    events: EventLogs = field(init=False)
    labels: bytearray = field(init=False)
    volatile_nbytes: int = field(init=False)
    next_volatile: int | None = None
    event_interrupts: bytes = bytes(4)
    alerts: Alerts = Alerts()
    health: Health = field(default_factory=Health)
    dirty: bool = False
    now_ns: int = 0
    epoch_ns: int | None = None
    background: Background | None = None
    finished: tuple[Op, Code] | None = None
    hold_background: bool = False
    poison_seen: tuple[tuple[int, int], int] = ((-1, -1), 0)
    poison_overflow_ns: int | None = None
    tables: int = 0
    """How often what the table of attributes says has changed: its sequence number."""

    def __post_init__(self) -> None:
        self.cells = CxlCells(self.part.capacity)
        self.volatile_nbytes = self.part.volatile_nbytes
        self.decoders = CxlDecoders(self.part, lambda: (self.volatile_nbytes, self.part.capacity))
        self.events = EventLogs(self.part.event_records)
        self.labels = bytearray(self.part.lsa_nbytes)

    @property
    def partitions(self) -> tuple[int, int]:
        """Bytes that are (volatile, persistent) now; the volatile ones come first."""
        return self.volatile_nbytes, self.part.capacity - self.volatile_nbytes

    def event_address(self, dpa: int) -> int:
        """A device address as event records give it: of its line, with bit 0 set if the byte is volatile."""
        return dpa // LINE * LINE | (dpa < self.volatile_nbytes)

    @property
    def dynamic(self) -> list[tuple[int, int]]:
        """Dynamic capacity regions, (device address, bytes): behind the static capacity."""
        base, found = self.part.capacity, []
        for nbytes in self.part.dynamic_nbytes:
            found.append((base, nbytes))
            base += nbytes
        return found

    @property
    def ranges(self) -> tuple[CdatRange, ...]:
        """What the card tells the host of in its table of attributes."""
        volatile, persistent = self.partitions
        static = (CdatRange(0, volatile, False), CdatRange(volatile, persistent, True))
        return tuple(part for part in static if part.nbytes) + tuple(
            CdatRange(*region, False, True) for region in self.dynamic
        )

    @property
    def timestamp(self) -> int:
        """What the card takes for the time, 0 if nobody told it."""
        return 0 if self.epoch_ns is None else self.now_ns + self.epoch_ns & (1 << 64) - 1

    @property
    def erasing(self) -> bool:
        """Whether the medium is being erased."""
        return self.background is not None and self.background.op is Op.SANITIZE

    @property
    def percent(self) -> int:
        """How far the background work is."""
        if self.background is None:
            return 0 if self.finished is None else 100
        gone = self.now_ns - self.background.began_ns
        return min(99, gone * 100 // max(1, self.background.takes_ns))

    def set_timestamp(self, timestamp: int) -> None:
        """The host says what time it is."""
        self.epoch_ns = timestamp - self.now_ns

    def partition(self, volatile_nbytes: int) -> None:
        """So many bytes are volatile from now on; what changes sides is erased."""
        first, last = sorted((self.volatile_nbytes, volatile_nbytes))
        self.volatile_nbytes = volatile_nbytes
        self.next_volatile = None
        self.tables += 1
        if last > first:
            self.cells.erase(first, last - first)

    def start(self, op: Op, takes_ns: int) -> None:
        """Begin work in the background."""
        self.background = Background(op, self.now_ns, takes_ns)
        self.finished = None

    def advance(self, now_ns: int) -> None:
        """It is that late; time does not go back."""
        self.now_ns = max(self.now_ns, now_ns)
        work = self.background
        if work is None or self.hold_background or self.now_ns < work.began_ns + work.takes_ns:
            return
        self.cells.erase(0, self.part.capacity)
        self.labels[:] = bytes(len(self.labels))
        self.poison_overflow_ns = None
        self.background, self.finished = None, (work.op, Code.SUCCESS)
