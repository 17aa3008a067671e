"""HDM decoders: the arithmetic worked out a second time, bit by bit and granule by granule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.firmware_models.hdm import ADDRESS_BITS, GRANULES, WAYS, Interleave

interleaves = st.builds(
    Interleave, st.sampled_from(WAYS), st.sampled_from(GRANULES), st.sampled_from(["modulo", "xor"])
)


def bits_of(number: int) -> list[int]:
    """The bits of an address, lowest first."""
    return [number >> i & 1 for i in range(ADDRESS_BITS)]


def by_bits(offset: int, ways: int, granule: int, maps: tuple[int, ...] = ()) -> tuple[int, int]:
    """(way, device offset) from the bits of the address: low way bits, then thirds of what is above them."""
    bits = bits_of(offset)
    low = {1: 0, 2: 1, 3: 0, 4: 2, 6: 1, 8: 3, 12: 2, 16: 4}[ways]
    first = granule.bit_length() - 1
    way = 0
    for i in range(low):
        bit = bits[first + i]
        if maps:
            bit = sum(b for b, m in zip(bits, bits_of(maps[i]), strict=True) if m) % 2
        way += bit << i
    above = sum(b << i for i, b in enumerate(bits[first + low :]))
    inside = sum(b << i for i, b in enumerate(bits[:first]))
    if ways % 3 == 0:
        way += above % 3 << low
        above //= 3
    return way, above * granule + inside


def counted(interleave: Interleave, spans: np.ndarray) -> list[int]:
    """Bytes per way, one granule after the other."""
    counts = [0] * interleave.ways
    for offset, nbytes in spans.tolist():
        at = offset
        while at < offset + nbytes:
            upto = min((at // interleave.granule_nbytes + 1) * interleave.granule_nbytes, offset + nbytes)
            counts[interleave.decode(at)[0]] += upto - at
            at = upto
    return counts


# -- one address --------------------------------------------------------------------------------------------------


@given(interleaves, st.integers(0, (1 << ADDRESS_BITS) - 1))
def test_an_address_decodes_as_its_bits_say(interleave: Interleave, offset: int) -> None:
    expected = by_bits(offset, interleave.ways, interleave.granule_nbytes, interleave.xormaps)
    assert interleave.decode(offset) == expected


@given(interleaves, st.integers(0, (1 << ADDRESS_BITS) - 1))
def test_encoding_what_was_decoded_gives_the_address(interleave: Interleave, offset: int) -> None:
    way, device_offset = interleave.decode(offset)
    if offset < (1 << ADDRESS_BITS) // interleave.stripe_nbytes * interleave.stripe_nbytes:  # in a whole stripe
        assert interleave.encode(way, device_offset) == offset


@given(interleaves, st.data())
def test_decoding_what_was_encoded_gives_way_and_offset(interleave: Interleave, data: st.DataObject) -> None:
    way = data.draw(st.integers(0, interleave.ways - 1))
    device_offset = data.draw(st.integers(0, (1 << ADDRESS_BITS) // 16 - 1))
    assert interleave.decode(interleave.encode(way, device_offset)) == (way, device_offset)


def test_a_platforms_own_xormaps_are_used() -> None:
    # way bit 0 is bit 8 ⊕ bit 11, way bit 1 is bit 9 ⊕ bit 12
    four = Interleave(4, 256, "xor", [0x900, 0x1200])
    assert [four.decode(i * 256)[0] for i in range(16)] == [0, 1, 2, 3] * 2 + [1, 0, 3, 2] * 2
    assert [four.decode(i * 256)[0] for i in range(16, 20)] == [2, 3, 0, 1]
    assert [four.encode(*four.decode(i * 256)) for i in range(64)] == [i * 256 for i in range(64)]


def test_a_map_may_name_the_way_bits_above_its_own() -> None:
    sixteen = Interleave(16, 256, "xor", [0x2020900, 0x4041200, 0x1010400, 0x800])
    decoded = [sixteen.decode(i * 256) for i in range(16 * 8)]
    assert sorted(decoded) == sorted((way, i * 256) for i in range(8) for way in range(16))
    assert [sixteen.encode(*each) for each in decoded] == [i * 256 for i in range(16 * 8)]


def test_without_maps_the_way_is_the_index_folded() -> None:
    eight = Interleave(8, 4096, "xor")
    index = 0o1234567
    assert eight.decode(index * 4096)[0] == 1 ^ 2 ^ 3 ^ 4 ^ 5 ^ 6 ^ 7


def test_xor_spreads_strides_that_modulo_puts_on_one_device() -> None:
    stride = 4 * 256
    offsets = range(0, stride * 64, stride)
    assert {Interleave(4).decode(offset)[0] for offset in offsets} == {0}
    assert {Interleave(4, arithmetic="xor").decode(offset)[0] for offset in offsets} == {0, 1, 2, 3}


# -- a stripe -----------------------------------------------------------------------------------------------------


@given(interleaves, st.integers(0, 1 << 30))
def test_a_stripe_lies_on_every_device_once_at_one_offset(interleave: Interleave, number: int) -> None:
    start = number * interleave.stripe_nbytes
    granules = [interleave.decode(start + i * interleave.granule_nbytes) for i in range(interleave.ways)]
    assert sorted(granules) == [(way, number * interleave.granule_nbytes) for way in range(interleave.ways)]


# -- bytes per way ------------------------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 300_000)), max_size=6)


@given(interleaves, pieces)
def test_bytes_per_way_are_those_of_every_granule(interleave: Interleave, spans: list[tuple[int, int]]) -> None:
    array = np.array(spans, dtype=np.int64).reshape(-1, 2)
    per_way = interleave.bytes_per_way(array)
    assert per_way.tolist() == counted(interleave, array)
    assert per_way.sum() == array[:, 1].sum()


@given(interleaves, st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_no_device_holds_more_than_a_granule_or_two_more_than_its_part(
    interleave: Interleave, offset: int, nbytes: int
) -> None:
    per_way = interleave.bytes_per_way(np.array([[offset, nbytes]], dtype=np.int64))
    assert per_way.sum() == nbytes
    assert per_way.max() - per_way.min() <= 2 * interleave.granule_nbytes


@given(interleaves, st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 20))
def test_a_span_cut_in_two_holds_the_same_bytes(interleave: Interleave, offset: int, one: int, other: int) -> None:
    whole = interleave.bytes_per_way(np.array([[offset, one + other]], dtype=np.int64))
    parts = interleave.bytes_per_way(np.array([[offset, one], [offset + one, other]], dtype=np.int64))
    assert whole.tolist() == parts.tolist()


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "5 ways; an HDM decoder has 1, 2, 3, 4, 6, 8, 12, 16"),
        ((0,), "0 ways"),
        ((True,), "True ways"),
        ((2.0,), "2.0 ways"),
        ((2, 256.0), "a granule of 256.0 bytes"),
        ((2, 128), "a granule of 128 bytes; allowed: 256, 512, 1024, 2048, 4096, 8192, 16384"),
        ((2, 300), "a granule of 300 bytes"),
        ((2, 32_768), "a granule of 32768 bytes"),
        ((2, 256, "sum"), "arithmetic 'sum'; allowed: modulo or xor"),
        ((2, 256, "modulo", [0x100]), "xormaps were given, but the arithmetic is modulo"),
        ((4, 256, "xor", [0x100]), "1 xormaps; 4 ways need 2"),
        ((3, 256, "xor", [0x100]), "1 xormaps; 3 ways need 0"),
        ((2, 256, "xor", [0x200]), "the lowest bit of xormap 0 is 0x200; it has to be 0x100"),
        ((2, 512, "xor", [0]), "xormap 0 is 0; allowed: a mask of bits below 52"),
        ((2, 256, "xor", [1 << 52]), "allowed: a mask of bits below 52"),
    ],
)
def test_what_no_decoder_can_do_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Interleave(*arguments)  # type: ignore[arg-type]  # on purpose


def test_addresses_outside_the_decoder_are_refused() -> None:
    three = Interleave(3)
    with pytest.raises(ValueError, match=r"offset -1; allowed: 0 to below 2\*\*52"):
        three.decode(-1)
    with pytest.raises(ValueError, match=r"allowed: 0 to below 2\*\*52"):
        three.decode(1 << 52)
    with pytest.raises(ValueError, match="way 3; allowed: 0 to 2"):
        three.encode(3, 0)
    with pytest.raises(ValueError, match=f"allowed: 0 to below {(1 << 52) // 768 * 256}"):
        three.encode(0, 1 << 52)


@pytest.mark.parametrize(
    "spans",
    [
        np.zeros((2, 3), dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.zeros((2, 2), dtype=np.int32),
        np.array([[-1, 5]], dtype=np.int64),
        np.array([[0, -5]], dtype=np.int64),
        np.array([[1 << 61, 1 << 61]], dtype=np.int64),
        np.array([[0, 1 << 61]] * 2, dtype=np.int64),
        np.array([[(1 << 63) - 1, (1 << 63) - 1]], dtype=np.int64),
        [(0, 5)],
    ],
)
def test_spans_that_are_none_are_refused(spans: np.ndarray) -> None:
    with pytest.raises(ValueError, match="spans need"):
        Interleave(2).bytes_per_way(spans)
