"""The HDM decoders of a CXL card: which may be committed, which stand, and where a way's bytes lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cxl_card_rig import CM, LINE, card, commit, decoding, hdm
from tierloop.firmware_models.cxl_part import GRAIN
from tierloop.firmware_models.hdm import WAYS, Interleave

ENCODED = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 3: 8, 6: 9, 12: 10}


def test_the_capability_says_how_many_decoders_there_are() -> None:
    assert [card(decoders=count).read_component(CM + 0x100) & 15 for count in (1, 2, 4, 10)] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"number": 1}, "the one below is not committed"),
        ({"nbytes": 0}, "nothing"),
        ({"nbytes": 3 * GRAIN}, "more than the card has"),
        ({"skip": GRAIN, "nbytes": 2 * GRAIN}, "beyond the end"),
        ({"ways": 1, "nbytes": 3 * GRAIN}, "no whole number per way"),
        ({"ways": 5}, "ways that there are not"),
        ({"granule": 7}, "a granule that there is not"),
        ({"bits": 0}, "memory of an accelerator"),
        ({"base": 1 << 52}, "beyond the addresses of a host"),
    ],
)
def test_a_decoder_that_may_not_be_is_not_committed(wrong: dict[str, int], why: str) -> None:
    settings = {"number": 0, "base": GRAIN, "nbytes": GRAIN, **wrong}
    device = card()
    assert not commit(device, **settings), why
    assert device.load(GRAIN).data == b"\xff" * LINE


def test_decoders_rise_and_do_not_overlap() -> None:
    device = card(volatile_nbytes=4 * GRAIN)
    assert commit(device, 0, 4 * GRAIN, 2 * GRAIN)
    assert not commit(device, 1, 5 * GRAIN, GRAIN)
    assert not commit(device, 1, 2 * GRAIN, GRAIN)
    assert not commit(device, 2, 8 * GRAIN, GRAIN)
    assert commit(device, 1, 6 * GRAIN, GRAIN, skip=GRAIN)
    device.store(6 * GRAIN, b"second")
    assert device.peek(3 * GRAIN, 6) == b"second"


def test_a_decoder_does_not_reach_over_the_edge_of_a_partition() -> None:
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)
    assert not commit(device, 0, GRAIN, 2 * GRAIN)
    assert commit(device, 0, GRAIN, GRAIN, skip=GRAIN)


def test_sizes_and_bases_are_multiples_of_256_mib() -> None:
    device = card()
    at = hdm(device)
    device.write_component(at + 0x10, 0x1FFFFFFF)
    device.write_component(at + 0x18, 0xFFFFFFFF)
    assert (device.read_component(at + 0x10), device.read_component(at + 0x18)) == (0x10000000, 0xF0000000)


def test_a_committed_decoder_stands() -> None:
    device = decoding()
    at = hdm(device)
    before = [device.read_component(at + offset) for offset in range(0x10, 0x30, 4)]
    for offset in (0x10, 0x14, 0x18, 0x1C, 0x24, 0x28):
        device.write_component(at + offset, 0x70000000)
    assert [device.read_component(at + offset) for offset in range(0x10, 0x30, 4)] == before


def test_decoders_are_given_up_from_the_top_and_not_when_locked() -> None:
    device = card()
    at = hdm(device)
    assert commit(device, 0, GRAIN, GRAIN, bits=1 << 12 | 1 << 8)
    assert commit(device, 1, 2 * GRAIN, GRAIN)
    for number in (0, 1, 0):
        device.write_component(at + 0x20 + 0x20 * number, 0)
    assert [decoder.number for decoder in device.state.decoders.committed] == [0]
    device.reset()
    assert device.state.decoders.committed == []


def test_a_decoder_below_another_is_not_given_up() -> None:
    device = card()
    assert commit(device, 0, GRAIN, GRAIN)
    assert commit(device, 1, 2 * GRAIN, GRAIN)
    device.write_component(hdm(device) + 0x20, 0)
    assert [decoder.number for decoder in device.state.decoders.committed] == [0, 1]
    device.write_component(hdm(device) + 0x40, 0)
    device.write_component(hdm(device) + 0x20, 0)
    assert device.state.decoders.committed == []


def test_nothing_is_decoded_until_decoding_is_on() -> None:
    device = decoding()
    device.poke(0, b"x" * LINE)
    device.write_component(hdm(device) + 4, 0)
    assert device.load(GRAIN).data == b"\xff" * LINE
    device.write_component(hdm(device) + 4, 2)
    assert device.load(GRAIN).data == b"x" * LINE


@given(st.sampled_from(WAYS), st.integers(0, 6), st.data())
def test_a_way_of_a_set_keeps_its_granules_in_a_row(ways: int, granule: int, data: st.DataObject) -> None:
    device = card(volatile_nbytes=GRAIN)
    base = 48 * GRAIN
    assert commit(device, 0, base, ways * GRAIN, ways=ENCODED[ways], granule=granule)
    way = data.draw(st.integers(0, ways - 1))
    dpa = data.draw(st.integers(0, GRAIN // LINE - 1)) * LINE
    size = 256 << granule
    turn, rest = divmod(dpa, size)
    if ways % 3:
        assert base + Interleave(ways, size).encode(way, dpa) == base + (turn * ways + way) * size + rest
    device.store(base + (turn * ways + way) * size + rest, b"here")
    assert device.peek(dpa, 4) == b"here"
