"""What a CXL memory card is made of: capacities, registers, link and media. A value; `CxlPart()` is a small card.

Capacities are multiples of 256 MiB: what is always volatile, what is always persistent, and what can be divided between
the two. A line is 64 bytes. On the link, lines travel in *slots* of 16 bytes: 4 slots in a flit of 68 bytes, 15 in a
flit of 256 bytes. A request takes one slot, the header of data one and the data of a line four, and two completions
without data share one; so a stream of reads fills 64 of 85 bytes of the way back, with either flit.

Nothing says how fast the card is: `idle_ns` and `ceiling` follow from link, credits and media, and are what the card's
own CDAT says of it.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64
GRAIN = 256 << 20
"""Capacities, decoder bases and decoder sizes per way are multiples of this."""
SLOT = 16
SLOTS_PER_FLIT = {68: 4, 256: 15}
DECODERS = (1, 2, 4, 6, 8, 10)
PAYLOADS = tuple(1 << shift for shift in range(8, 21))


@dataclass(frozen=True)
class CxlLinkPart:
    """The link and what is behind it. `bytes_per_s` per direction, before flits; times in ns.

    Credits bound the lines that are under way: one request credit for each read, one data credit for each write, held
    until the answer is back. `channels` of the medium take a line each `channel_ns`; a read is there after `media_ns`.
    Of the lines that credits allow, so many eighths may be in the card before its load is no longer light, moderate
    overload, severe overload.
    """

    bytes_per_s: int = 32_000_000_000
    flit_nbytes: int = 68
    flight_ns: int = 25
    request_credits: int = 64
    data_credits: int = 64
    channels: int = 2
    channel_ns: int = 4
    media_ns: int = 90
    light: int = 2
    moderate: int = 4
    severe: int = 6

    def __post_init__(self) -> None:
        if self.flit_nbytes not in SLOTS_PER_FLIT:
            raise ValueError(f"flits of {self.flit_nbytes} bytes; allowed: {', '.join(map(str, SLOTS_PER_FLIT))}")
        if min(getattr(self, name) for name in self.__dataclass_fields__) < 1:
            raise ValueError(f"every number of a link is at least 1: {self}")
        if not self.light < self.moderate < self.severe <= 8:
            raise ValueError(f"eighths of a queue rise from light over moderate to severe, at most 8: {self}")

    def slots_ps(self, half_slots: int) -> int:
        """How long so many halves of a slot keep one direction busy."""
        wire = self.flit_nbytes * half_slots * 1_000_000_000_000
        return -(-wire // (2 * SLOTS_PER_FLIT[self.flit_nbytes] * self.bytes_per_s))

    def idle_ps(self, write: bool) -> int:
        """One line on an idle card, there and back."""
        return sum(map(self.slots_ps, HALF_SLOTS[write])) + 2000 * self.flight_ns + 1000 * self.media_ns

    def ceiling(self, write: bool) -> int:
        """Bytes/s of an endless stream: what is scarcest of wire, medium and credits."""
        busy_ps = max(
            *map(self.slots_ps, HALF_SLOTS[write]),
            -(-1000 * self.channel_ns // self.channels),
            -(-self.idle_ps(write) // (self.data_credits if write else self.request_credits)),
        )
        return LINE * 1_000_000_000_000 // busy_ps


HALF_SLOTS = {False: (2, 10), True: (10, 1)}
"""Halves of a slot that a line takes, (host to card, card to host), by whether it is written."""


@dataclass(frozen=True)
class CxlPart:
    """A memory card. Sizes in bytes; raises ValueError for what no card can be.

    `dynamic_nbytes` are the lengths of its dynamic capacity regions; they lie behind the static capacity.
    """

    volatile_nbytes: int = 2 * GRAIN
    persistent_nbytes: int = 0
    partitionable_nbytes: int = 0
    serial: int = 0x11
    firmware: str = "TL 1.0.0"
    lsa_nbytes: int = 64 << 10
    payload_nbytes: int = 2048
    decoders: int = 4
    poison_limit: int = 256
    event_records: int = 16
    mailbox_ns: int = 1000
    sanitize_ns: int = 4_000_000_000
    ways_3_6_12: bool = True
    ways_16: bool = True
    dynamic_nbytes: tuple[int, ...] = ()
    link: CxlLinkPart = CxlLinkPart()

    def __post_init__(self) -> None:
        sizes = (self.volatile_nbytes, self.persistent_nbytes, self.partitionable_nbytes, *self.dynamic_nbytes)
        if any(size < 0 or size % GRAIN for size in sizes):
            raise ValueError(f"capacities {sizes}; allowed: multiples of {GRAIN} bytes")
        if not 0 < self.capacity <= 1 << 48:
            raise ValueError(f"a capacity of {self.capacity} bytes; allowed: {GRAIN} to 2**48")
        if self.decoders not in DECODERS:
            raise ValueError(f"{self.decoders} decoders; allowed: {', '.join(map(str, DECODERS))}")
        if self.payload_nbytes not in PAYLOADS:
            raise ValueError(f"a mailbox of {self.payload_nbytes} bytes; allowed: a power of two, 256 to 2**20")
        if not 0 <= self.lsa_nbytes < 1 << 32 or not 0 <= self.serial < 1 << 64:
            raise ValueError(f"a label area of {self.lsa_nbytes} bytes, serial number {self.serial:#x}")
        if not 1 <= self.poison_limit < 1 << 16 or not 1 <= self.event_records < 1 << 16:
            raise ValueError("poison_limit and event_records; allowed: 1 to 65535")
        if min(self.mailbox_ns, self.sanitize_ns) < 0:
            raise ValueError("mailbox_ns and sanitize_ns; allowed: 0 or more")
        if len(self.firmware.encode()) > 16 or not self.firmware.isascii():
            raise ValueError(f"firmware {self.firmware!r}; allowed: up to 16 ASCII characters")
        if len(self.dynamic_nbytes) > 8:
            raise ValueError(f"{len(self.dynamic_nbytes)} dynamic capacity regions; allowed: at most 8")

    @property
    def capacity(self) -> int:
        """Static bytes, volatile and persistent."""
        return self.volatile_nbytes + self.persistent_nbytes + self.partitionable_nbytes
