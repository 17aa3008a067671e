"""CDAT: tables that are made here byte by byte, and any bytes at all."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.cxl_cdat import Initiator, Range, Rates, SideCache, SwitchSpeed, Table, Use, parse
from tierloop.devices.errors import ProtocolError

GIB = 1 << 30


def table(*entries: bytes, revision: int = 1, sequence: int = 7) -> bytes:
    """A table with these structures and a checksum that holds."""
    raw = bytearray(struct.pack("<IBB6xI", 16 + sum(map(len, entries)), revision, 0, sequence) + b"".join(entries))
    raw[5] = -sum(raw) % 256
    return bytes(raw)


def entry(kind: int, body: bytes) -> bytes:
    return struct.pack("<BxH", kind, 4 + len(body)) + body


def dsmas(handle: int, dpa: int, nbytes: int, flags: int = 0) -> bytes:
    return entry(0, struct.pack("<BBHQQ", handle, flags, 0, dpa, nbytes))


def dslbis(handle: int, kind: int, base: int, value: int, hierarchy: int = 0) -> bytes:
    return entry(1, struct.pack("<BBBBQHHHH", handle, hierarchy, kind, 0, base, value, 0, 0, 0))


def test_a_table_gives_its_ranges_and_how_fast_they_are() -> None:
    speeds = [dslbis(3, 1, 1000, 150), dslbis(3, 2, 100, 1201), dslbis(3, 4, 1000, 16), dslbis(3, 5, 1, 12_000)]
    read = parse("cxl0", table(dsmas(3, GIB, 2 * GIB, 4), *speeds))
    assert read.ranges == (Range(3, GIB, 2 * GIB, non_volatile=True, shareable=False, read_only=False),)
    assert read.rates(GIB) == Rates(150, 121, 16_000_000_000, 12_000_000_000)
    assert read.rates(3 * GIB - 1) == read.rates(GIB)
    assert (read.rates(GIB - 1), read.rates(3 * GIB)) == (Rates(), Rates())


def test_a_plain_access_counts_for_both_directions_and_is_overruled() -> None:
    read = parse("cxl0", table(dsmas(0, 0, GIB), dslbis(0, 0, 1000, 100), dslbis(0, 3, 1, 5), dslbis(0, 5, 1, 4)))
    assert read.rates(0) == Rates(100, 100, 5_000_000, 4_000_000)


@pytest.mark.parametrize("silent", [dslbis(0, 0, 1000, 0xFFFF), dslbis(0, 0, 1000, 0), dslbis(0, 0, 1 << 62, 9)])
def test_entries_that_say_nothing_are_unknown(silent: bytes) -> None:
    assert parse("cxl0", table(dsmas(0, 0, GIB), silent)).rates(0) == Rates()


def test_a_cache_before_the_memory_is_not_the_memory() -> None:
    read = parse("cxl0", table(dsmas(0, 0, GIB), dslbis(0, 0, 1000, 30, hierarchy=1), dslbis(0, 0, 1000, 100)))
    assert read.rates(0).read_latency_ns == 100


def test_every_kind_of_structure_is_read() -> None:
    read = parse(
        "cxl0",
        table(
            entry(2, struct.pack("<BBBBQI", 1, 0, 0, 0, 4096, 0x123)),
            entry(3, struct.pack("<BBH", 1, 9, 0)),
            entry(3, struct.pack("<BBH", 0, 9, 0)),
            entry(4, struct.pack("<BBHQQ", 1, 2, 0, 8192, 4096)),
            entry(5, struct.pack("<BBBBQ", 0, 0, 0, 0, 10) + struct.pack("<HHHH", 1, 0x100, 25, 0)),
            entry(77, b"whatever"),
        ),
    )
    assert read == Table(
        1,
        7,
        side_caches=(SideCache(1, 4096, 0x123),),
        initiators=(Initiator(9), Initiator(None)),
        uses=(Use(1, 2, 8192, 4096),),
        switch_speeds=(SwitchSpeed(0, 1, 0x100, 250),),
        unknown=(77,),
    )


def test_bytes_after_the_table_are_not_part_of_it() -> None:
    assert parse("cxl0", table(dsmas(0, 0, GIB)) + b"\n").ranges[0].nbytes == GIB


def damaged(raw: bytes, at: int, value: int) -> bytes:
    changed = bytearray(raw)
    changed[at] = value
    changed[5] = (changed[5] - sum(changed)) % 256
    return bytes(changed)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", r"cxl0: cdat: at byte 0: 0 bytes; a table has at least 16"),
        (table()[:-1], r"at byte 0: 15 bytes"),
        (table(dsmas(0, 0, GIB))[:-1], r"at byte 0: the table says that it has 40 bytes; 39 are there"),
        (damaged(table(), 0, 3), r"at byte 0: the table says that it has 3 bytes"),
        (table()[:-1] + b"\x01", r"at byte 5: all bytes add up to 1 and not to 0"),
        (table(b"\0\0"), r"at byte 16: 2 bytes are left"),
        (table(struct.pack("<BxH", 0, 3)), r"at byte 16: a structure of 3 bytes"),
        (table(struct.pack("<BxH", 9, 400)), r"at byte 16: a structure of 400 bytes where 4 are left"),
        (table(entry(0, bytes(8))), r"at byte 16: DSMAS of 12 bytes; it has 24"),
    ],
)
def test_what_is_wrong_is_named_with_its_offset(raw: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse("cxl0", raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_a_protocol_error(raw: bytes) -> None:
    for data in (raw, table(raw)):
        try:
            read = parse("cxl0", data)
        except ProtocolError:
            continue
        assert all(rate >= 0 for rate in read.rates(0))


@given(
    st.lists(
        st.builds(
            entry, st.integers(0, 5), st.binary(min_size=4, max_size=28).map(lambda body: body[: len(body) // 4 * 4])
        ),
        max_size=6,
    )
)
def test_any_structures_are_a_table_or_a_protocol_error(entries: list[bytes]) -> None:
    try:
        read = parse("cxl0", table(*entries))
    except ProtocolError:
        return
    assert len(read.ranges) <= len(entries)
    assert hash(read) == hash(parse("cxl0", table(*entries)))
