"""Formats of a namespace's blocks as drives of silicon say them, odd ones included."""

from __future__ import annotations

import pytest

from tests.nvme_tables import controller_table, namespace_table
from tierloop.devices.drivers.nvme_identity import identity_of
from tierloop.devices.errors import ProtocolError


def test_where_metadata_would_lie_means_nothing_without_metadata() -> None:
    assert identity_of("nvme0", 1, controller_table(), namespace_table(layout=0x10)).lba_nbytes == 512


@pytest.mark.parametrize("layout", [0x20, 0x40, 0x60, 0x70])
def test_upper_bits_of_a_format_mean_nothing_where_the_lower_ones_name_them_all(layout: int) -> None:
    table = bytearray(namespace_table(blocks=10, shift=9))
    table[25], table[26] = 15, layout | 0x05
    table[128 + 4 * 5 : 128 + 4 * 6] = bytes([0, 0, 12, 0])
    assert identity_of("nvme0", 1, controller_table(), bytes(table)).lba_nbytes == 4096


def test_a_format_behind_the_last_is_refused_with_both() -> None:
    table = bytearray(namespace_table(blocks=10, shift=9))
    table[25], table[26] = 17, 0x20 | 0x02
    with pytest.raises(ProtocolError, match="block format 18 is in use, and the last one is 17"):
        identity_of("nvme0", 1, controller_table(), bytes(table))
