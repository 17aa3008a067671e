"""CDAT: what a CXL memory device says about its own speed (Coherent Device Attribute Table 1.03 and 1.04).

The kernel reads the table over DOE and shows it as `/sys/bus/cxl/devices/endpointN/CDAT`. `parse` checks length and
checksum and gives the structures as frozen data; kinds that it does not know are stepped over by their length, and
counted. `Table.rates` says how fast the range at a device address is. These are the device's own numbers: links and
switches above it come on top.

Latencies stand in units of `base` picoseconds, bandwidths in units of `base` MB/s (10⁶ bytes). An entry of 0 or 0xFFFF
says nothing, and neither does a product that no 64-bit number holds: 0 here, which means unknown.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tierloop.devices.errors import ProtocolError

LARGEST = 1 << 20
"""Bytes of the largest table that is read: a device with thousands of ranges would fit."""
_HEADER = struct.Struct("<IBB6xI")
_ENTRY = struct.Struct("<BxH")
_NOTHING_SAID = (0, 0xFFFF)
_NON_VOLATILE, _SHAREABLE, _READ_ONLY = 1 << 2, 1 << 3, 1 << 6

_LATENCY, _READ_LATENCY, _WRITE_LATENCY, _BANDWIDTH, _READ_BANDWIDTH, _WRITE_BANDWIDTH = range(6)
"""What a latency and bandwidth structure tells; the plain ones count for reads and for writes."""
_T = TypeVar("_T")


class Rates(NamedTuple):
    """Latencies in ns and rates in bytes/s; 0 = unknown."""

    read_latency_ns: int = 0
    write_latency_ns: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0


@dataclass(frozen=True)
class Range:
    """DSMAS: one range of device addresses with one set of properties; others refer to it by `handle`."""

    handle: int
    dpa: int
    nbytes: int
    non_volatile: bool
    shareable: bool
    read_only: bool


@dataclass(frozen=True)
class Speed:
    """DSLBIS: a latency (ps) or a bandwidth (MB/s) of a range; `hierarchy` 0 is the memory, 1 to 3 caches before it."""

    handle: int
    hierarchy: int
    kind: int
    value: int


@dataclass(frozen=True)
class SideCache:
    """DSMSCIS: a cache on the device before a range."""

    handle: int
    nbytes: int
    attributes: int


@dataclass(frozen=True)
class Initiator:
    """DSIS: the device can itself begin accesses; `handle` of the memory it comes with, None for none."""

    handle: int | None


@dataclass(frozen=True)
class Use:
    """DSEMTS: what firmware is to use a part of a range for (0 conventional memory, 1 special purpose, 2 reserved)."""

    handle: int
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SwitchSpeed:
    """SSLBIS: a latency (ps) or bandwidth (MB/s) between two ports of a switch."""

    kind: int
    port: int
    other_port: int
    value: int


@dataclass(frozen=True)
class Table:
    """A table that was checked. `unknown` lists the numbers of structures that were stepped over."""

    revision: int
    sequence: int
    ranges: tuple[Range, ...] = ()
    speeds: tuple[Speed, ...] = ()
    side_caches: tuple[SideCache, ...] = ()
    initiators: tuple[Initiator, ...] = ()
    uses: tuple[Use, ...] = ()
    switch_speeds: tuple[SwitchSpeed, ...] = ()
    unknown: tuple[int, ...] = ()

    def range_at(self, dpa: int) -> Range | None:
        """The range that holds a device address."""
        return next((r for r in self.ranges if r.dpa <= dpa < r.dpa + r.nbytes), None)

    def rates(self, dpa: int) -> Rates:
        """How fast the memory at a device address is, caches before it left out."""
        found = self.range_at(dpa)
        if found is None:
            return Rates()
        said = {s.kind: s.value for s in reversed(self.speeds) if s.handle == found.handle and s.hierarchy == 0}
        return Rates(
            -(-said.get(_READ_LATENCY, said.get(_LATENCY, 0)) // 1000),
            -(-said.get(_WRITE_LATENCY, said.get(_LATENCY, 0)) // 1000),
            said.get(_READ_BANDWIDTH, said.get(_BANDWIDTH, 0)) * 1_000_000,
            said.get(_WRITE_BANDWIDTH, said.get(_BANDWIDTH, 0)) * 1_000_000,
        )


def parse(device: str, data: bytes) -> Table:
    """The table in these bytes, which may go on after it. Raises ProtocolError naming the offset that is wrong."""
    if len(data) < _HEADER.size:
        raise _wrong(device, 0, f"{len(data)} bytes; a table has at least {_HEADER.size}")
    length, revision, _, sequence = _HEADER.unpack_from(data)
    if not _HEADER.size <= length <= min(len(data), LARGEST):
        raise _wrong(device, 0, f"the table says that it has {length} bytes; {len(data)} are there")
    if left := sum(data[:length]) % 256:
        raise _wrong(device, 5, f"all bytes add up to {left} and not to 0 (modulo 256)")
    found: list[object] = []
    unknown: list[int] = []
    at = _HEADER.size
    while at < length:
        if length - at < _ENTRY.size:
            raise _wrong(device, at, f"{length - at} bytes are left; a structure begins with {_ENTRY.size}")
        kind, nbytes = _ENTRY.unpack_from(data, at)
        if not _ENTRY.size <= nbytes <= length - at:
            raise _wrong(device, at, f"a structure of {nbytes} bytes where {length - at} are left")
        known = _READERS.get(kind)
        if known is None:
            unknown.append(kind)
        else:
            name, least, read = known
            if nbytes < least:
                raise _wrong(device, at, f"{name} of {nbytes} bytes; it has {least}")
            found += read(data[at : at + nbytes])
        at += nbytes
    return Table(
        revision,
        sequence,
        ranges=_all(Range, found),
        speeds=_all(Speed, found),
        side_caches=_all(SideCache, found),
        initiators=_all(Initiator, found),
        uses=_all(Use, found),
        switch_speeds=_all(SwitchSpeed, found),
        unknown=tuple(unknown),
    )


def _all(kind: type[_T], found: list[object]) -> tuple[_T, ...]:
    return tuple(one for one in found if isinstance(one, kind))


def _wrong(device: str, offset: int, what: str) -> ProtocolError:
    return ProtocolError(device, "cdat", f"at byte {offset}: {what}")


def _range(entry: bytes) -> list[object]:
    handle, flags, dpa, nbytes = struct.unpack_from("<BB2xQQ", entry, 4)
    return [Range(handle, dpa, nbytes, bool(flags & _NON_VOLATILE), bool(flags & _SHAREABLE), bool(flags & _READ_ONLY))]


def _speed(entry: bytes) -> list[object]:
    handle, flags, kind, base, first = struct.unpack_from("<BBBxQH", entry, 4)
    return [Speed(handle, flags & 0xF, kind, _product(first, base))]


def _side_cache(entry: bytes) -> list[object]:
    return [SideCache(*struct.unpack_from("<B3xQI", entry, 4))]


def _initiator(entry: bytes) -> list[object]:
    flags, handle = struct.unpack_from("<BB", entry, 4)
    return [Initiator(handle if flags & 1 else None)]


def _use(entry: bytes) -> list[object]:
    return [Use(*struct.unpack_from("<BB2xQQ", entry, 4))]


def _switch(entry: bytes) -> list[object]:
    kind, base = struct.unpack_from("<B3xQ", entry, 4)
    pairs = struct.iter_unpack("<HHH2x", entry[16 : 16 + (len(entry) - 16) // 8 * 8])
    return [SwitchSpeed(kind, port, other, _product(value, base)) for port, other, value in pairs]


def _product(value: int, base: int) -> int:
    product = value * base
    return 0 if value in _NOTHING_SAID or product >= 1 << 63 else product


_READERS = {
    0: ("DSMAS", 24, _range),
    1: ("DSLBIS", 24, _speed),
    2: ("DSMSCIS", 20, _side_cache),
    3: ("DSIS", 8, _initiator),
    4: ("DSEMTS", 24, _use),
    5: ("SSLBIS", 16, _switch),
}
