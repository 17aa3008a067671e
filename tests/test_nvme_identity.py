"""What a drive says of itself is read as the specification lays it out, and checked before it is used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nvme_tables import controller_table, health_log, namespace_table
from tierloop.devices.drivers.nvme_identity import Health, identity_of
from tierloop.devices.errors import DeviceError, ProtocolError, Unsupported


def test_the_tables_become_an_identity() -> None:
    who = identity_of(
        "nvme0",
        3,
        controller_table(model="A drive", serial="S1", firmware="1.0", mdts=5, optional=1 << 2 | 1 << 3, cache=True),
        namespace_table(blocks=1000, shift=12, features=1 << 4, deallocated=1 | 1 << 3, write_unit=8),
    )
    assert (who.model, who.serial, who.firmware, who.nsid) == ("A drive", "S1", "1.0", 3)
    assert (who.lba_nbytes, who.capacity, who.mdts_nbytes) == (4096, 4_096_000, 128 * 1024)
    assert who.volatile_write_cache
    assert who.write_zeroes
    assert who.deallocate
    assert who.deallocated_reads_zeros
    assert who.zeroes_may_deallocate
    assert who.write_unit_nbytes == 8 * 4096
    assert not who.thin
    assert not who.write_protected


def test_a_drive_that_offers_nothing_says_so() -> None:
    who = identity_of("nvme0", 1, controller_table(), namespace_table())
    assert who.mdts_nbytes == 0
    assert [who.volatile_write_cache, who.write_zeroes, who.deallocate] == [False] * 3
    assert [who.deallocated_reads_zeros, who.zeroes_may_deallocate] == [False] * 2
    assert who.write_unit_nbytes == 0


def test_a_format_above_the_sixteenth_is_found_by_its_upper_bits() -> None:
    table = bytearray(namespace_table(blocks=10, shift=9))
    table[25], table[26] = 40, 0x20 | 0x03
    table[128 + 4 * 19 : 128 + 4 * 20] = bytes([0, 0, 12, 0])
    assert identity_of("nvme0", 1, controller_table(), bytes(table)).lba_nbytes == 4096


@pytest.mark.parametrize(
    ("controller", "namespace", "kind", "text"),
    [
        ({}, {"blocks": 0}, ProtocolError, "0 blocks"),
        ({}, {"shift": 0}, ProtocolError, r"blocks of 2\^0 bytes"),
        ({}, {"shift": 8}, ProtocolError, r"blocks of 2\^8 bytes"),
        ({}, {"shift": 17}, Unsupported, r"blocks of 2\^17 bytes"),
        ({}, {"shift": 255}, Unsupported, r"blocks of 2\^255 bytes"),
        ({}, {"metadata": 8}, Unsupported, "8 bytes of metadata"),
        ({}, {"layout": 0x10, "metadata": 8}, Unsupported, "8 bytes of metadata per block, at the end of each"),
        ({}, {"layout": 0x05}, ProtocolError, "block format 5 is in use, and the last one is 0"),
        ({}, {"blocks": 1 << 60, "shift": 12}, ProtocolError, r"more than 2\^62 bytes"),
        ({"mdts": 19}, {}, ProtocolError, r"2\^19 pages"),
        ({"mdts": 255}, {}, ProtocolError, r"2\^255 pages"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_what_was_found(
    controller: dict[str, Any], namespace: dict[str, Any], kind: type[DeviceError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        identity_of("nvme0", 1, controller_table(**controller), namespace_table(**namespace))


PATCHES = st.lists(st.tuples(st.sampled_from([*range(136), 520, 525]), st.integers(0, 255)), max_size=8)


@given(PATCHES, PATCHES)
def test_no_table_gets_past_the_checks_with_a_size_that_cannot_be(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    controller, namespace = bytearray(controller_table()), bytearray(namespace_table())
    for table, patches in ((controller, first), (namespace, second)):
        for at, value in patches:
            table[at] = value
    try:
        who = identity_of("nvme0", 1, bytes(controller), bytes(namespace))
    except (ProtocolError, Unsupported):
        return
    assert 512 <= who.lba_nbytes <= 65536
    assert who.lba_nbytes & (who.lba_nbytes - 1) == 0
    assert 0 < who.capacity <= 1 << 62
    assert who.mdts_nbytes <= 1 << 30


def test_the_log_becomes_a_health() -> None:
    health = Health.of(
        health_log(
            warning=0b1001, kelvin=310, spare=97, threshold=10, used=3, read_units=5, written_units=7, media_errors=2
        )
    )
    assert (health.temperature_k, health.spare_percent, health.spare_threshold_percent) == (310, 97, 10)
    assert health.used_percent == 3
    assert (health.read_nbytes, health.written_nbytes) == (5 * 512_000, 7 * 512_000)
    assert health.media_errors == 2
    assert health.read_only
    assert health.warnings == ("the spare capacity has fallen below its threshold", "the media are read-only")


def test_counters_of_128_bits_are_read_whole() -> None:
    log = bytearray(health_log())
    log[144:160] = (1 << 100).to_bytes(16, "little")
    assert Health.of(bytes(log)).unsafe_shutdowns == 1 << 100


def test_a_healthy_drive_warns_of_nothing() -> None:
    assert Health.of(health_log()).warnings == ()
    assert not Health.of(health_log()).read_only
