"""The coherent device attribute table of a CXL card: what it tells the host of its ranges, their speed and their use.

A header of 16 bytes, whose bytes and those of all entries add up to 0 modulo 256, and for each range a DSMAS (which
addresses, persistent or not), DSLBIS entries (latency in ps, bandwidth in MB/s), a DSEMTS (what firmware may make of
it), and one DSIS for the card. Handles count from 0. Numbers too large for the 16 bits of an entry get a larger unit.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tierloop.firmware_models.cxl_part import CxlLinkPart

DSMAS, DSLBIS, DSMSCIS, DSIS, DSEMTS = range(5)
READ_LATENCY, WRITE_LATENCY, READ_BANDWIDTH, WRITE_BANDWIDTH = 1, 2, 4, 5
NON_VOLATILE = 1 << 2
DYNAMIC = 1 << 5
SPECIFIC_PURPOSE, RESERVED = 1, 2
"""Memory types of a DSEMTS: conventional memory set aside for a driver, and reserved memory."""


class CdatRange(NamedTuple):
    """A range of device addresses."""

    dpa: int
    nbytes: int
    persistent: bool
    dynamic: bool = False


def cdat(ranges: tuple[CdatRange, ...], link: CxlLinkPart, sequence: int = 0) -> bytes:
    """The table."""
    entries = []
    for handle, part in enumerate(ranges):
        flags = NON_VOLATILE * part.persistent | DYNAMIC * part.dynamic
        entries.append(struct.pack("<BxHBBxxQQ", DSMAS, 24, handle, flags, part.dpa, part.nbytes))
        for kind, number in (
            (READ_LATENCY, link.idle_ps(False)),
            (WRITE_LATENCY, link.idle_ps(True)),
            (READ_BANDWIDTH, link.ceiling(False) // 1_000_000),
            (WRITE_BANDWIDTH, link.ceiling(True) // 1_000_000),
        ):
            entries.append(_speed(handle, kind, number))
        use = RESERVED if part.persistent else SPECIFIC_PURPOSE
        entries.append(struct.pack("<BxHBBxxQQ", DSEMTS, 24, handle, use, 0, part.nbytes))
    entries.append(struct.pack("<BxHBBxx", DSIS, 8, 1, 0))
    body = b"".join(entries)
    header = struct.pack("<IBB6xI", 16 + len(body), 1, 0, sequence)
    checksum = -sum(header + body) % 256
    return header[:5] + bytes([checksum]) + header[6:] + body


def _speed(handle: int, kind: int, number: int) -> bytes:
    unit = 1000 if kind in (READ_LATENCY, WRITE_LATENCY) else 1
    while number // unit >= 0xFFFF:
        unit *= 10
    value = max(1, -(-number // unit) if kind in (READ_LATENCY, WRITE_LATENCY) else number // unit)
    return struct.pack("<BxHBBBxQHHHxx", DSLBIS, 24, handle, 0, kind, unit, value, 0, 0)
