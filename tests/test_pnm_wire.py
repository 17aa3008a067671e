"""The wire format: what is packed comes back, and what is damaged, cut off or out of range is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launches import every_kernel
from tierloop.devices.commands import Launch
from tierloop.devices.drivers.pnm_arguments import (
    DTYPE_NUMBERS,
    KERNELS,
    launch_nbytes,
    pack_launch,
    pack_segment,
    segment_nbytes,
    unpack_launch,
    unpack_segment,
)
from tierloop.devices.drivers.pnm_wire import (
    ENTRY_NBYTES,
    LIMITS_NBYTES,
    Answer,
    Entry,
    Layout,
    Limits,
    Opcode,
    Place,
    WireError,
    pack_drop,
    pack_hello,
    slot_of,
    unpack_drop,
    unpack_hello,
)
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import DTYPES, Attend
from tierloop.devices.regions import Region
from tierloop.devices.spans import Spans
from tierloop.firmware_models.pnm_card import PnmParts

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
ENTRIES = st.builds(Entry, U16, U16, U32, U32, U64, U64, U64, U64, U32, U32, U32)
ANSWERS = st.builds(Answer, U16, U16, U32, U32, U64, U64, U64, U64, U32, U32, U64)
LAYOUT = PnmParts().layout()
LIMITS = PnmParts().limits()


def region_of(number: int) -> Region:
    """Any region that is asked for."""
    return Region("pnm", "pnm", number, 1 << 40)


def changed(**numbers: Any) -> Limits:
    """The limits with other numbers."""
    return replace(LIMITS, **numbers)


def arguments_of(launch: Launch) -> bytes:
    """Packed, with small region numbers."""
    return pack_launch(launch, lambda region: region.id % 1000)


@given(st.one_of(ENTRIES, ANSWERS))
def test_a_frame_comes_back(frame: Entry | Answer) -> None:
    packed = frame.pack()
    assert len(packed) == ENTRY_NBYTES
    assert type(frame).unpack(packed) == frame


@given(ENTRIES, st.integers(0, 8 * ENTRY_NBYTES - 1))
def test_a_frame_with_any_bit_flipped_is_refused(entry: Entry, bit: int) -> None:
    damaged = bytearray(entry.pack())
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        Entry.unpack(bytes(damaged))


@given(ANSWERS, st.integers(0, ENTRY_NBYTES - 1))
def test_a_frame_that_is_cut_off_is_refused(answer: Answer, length: int) -> None:
    with pytest.raises(WireError, match="64 bytes"):
        Answer.unpack(answer.pack()[:length])


def test_slots_go_round_with_the_phase() -> None:
    assert [slot_of(n, 4) for n in (1, 4, 5, 8, 9)] == [(0, 1), (3, 1), (0, 0), (3, 0), (0, 1)]


def test_a_layout_comes_back() -> None:
    assert Layout.unpack(LAYOUT.pack()) == LAYOUT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"submission_entries": 24}, "submission_entries is 24"),
        ({"completion_entries": 1}, "completion_entries is 1"),
        ({"submission_entries": 64}, "32 completion entries for 64 commands"),
        ({"completion_offset": LAYOUT.submission_offset}, "inside the"),
        ({"arena_offset": LAYOUT.arena_offset + 8}, "grid of 64"),
        ({"arena_nbytes": 64}, "arena has 64 bytes"),
        ({"memory_nbytes": 1 << 40}, "outside the window"),
        ({"memory_nbytes": 0}, "memory has 0 bytes"),
        ({"doorbell_offset": 0}, "inside the"),
        ({"window_nbytes": 4096}, "outside the window of 4096 bytes"),
        ({"memory_offset": 2**64 - 64}, "outside the window"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(change: dict[str, int], says: str) -> None:
    with pytest.raises(WireError, match=says):
        Layout.unpack(replace(LAYOUT, **change).pack())


@given(st.binary(max_size=200))
def test_bytes_of_chance_are_no_layout(data: bytes) -> None:
    with pytest.raises(WireError):
        Layout.unpack(data)


def test_limits_come_back() -> None:
    limits = replace(LIMITS, arithmetic=Arithmetic("vendor-7", "float64", "float16", "float16"))
    assert Limits.unpack(limits.pack(), LAYOUT) == limits


@pytest.mark.parametrize("name", ["engines", "sram_nbytes", "capacity", "largest_arguments", "most_spans"])
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(WireError, match=f"{name} is 0"):
        Limits.unpack(changed(**{name: 0}).pack(), LAYOUT)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capacity": LAYOUT.memory_nbytes + 1}, "capacity is"),
        ({"largest_arguments": LAYOUT.arena_nbytes + 1}, "largest_arguments is"),
        ({"grid": 48}, "grid of regions is 48"),
        ({"version": 2}, "version 2"),
    ],
)
def test_limits_that_the_window_does_not_have_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(WireError, match=says):
        Limits.unpack(changed(**change).pack(), LAYOUT)


@given(st.binary(min_size=LIMITS_NBYTES, max_size=LIMITS_NBYTES))
def test_limits_of_chance_are_refused_or_within_the_window(data: bytes) -> None:
    try:
        limits = Limits.unpack(data, LAYOUT)
    except WireError:
        return
    assert limits.capacity <= LAYOUT.memory_nbytes
    assert limits.largest_arguments <= LAYOUT.arena_nbytes


@given(U64, st.integers(0, 1 << 62), st.integers(1, 1 << 62), U32, U32)
def test_the_place_of_a_region_comes_back(region: int, offset: int, nbytes: int, ways: int, granule: int) -> None:
    place = Place(region, offset, nbytes, ways, granule)
    assert Place.unpack(place.pack()) == place
    assert unpack_drop(pack_drop(region)) == region


def test_versions_come_back_and_must_be_in_order() -> None:
    assert unpack_hello(pack_hello(1, 3)) == (1, 3)
    with pytest.raises(WireError, match="versions 3 to 1"):
        unpack_hello(pack_hello(3, 1))


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 20)), max_size=20))
def test_spans_come_back(pairs: list[tuple[int, int]]) -> None:
    spans = Spans(pairs)
    packed = pack_segment(7, spans)
    assert len(packed) == segment_nbytes(len(pairs))
    region, found = unpack_segment(packed, region_of)
    assert (region.id, found) == (7, spans)


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_launch_of_every_kernel_comes_back(kernel: str) -> None:
    launch = every_kernel("float16")[kernel]
    packed = arguments_of(launch)
    assert len(packed) == launch_nbytes(launch)
    found = unpack_launch(packed, region_of)
    assert type(found.args) is type(launch.args)
    for one in fields(launch.args):
        was, now = getattr(launch.args, one.name), getattr(found.args, one.name)
        assert np.array_equal(was, now), f"{one.name}: {was} became {now}"
    for before, after in zip((*launch.reads, *launch.writes), (*found.reads, *found.writes), strict=True):
        assert [(r.id % 1000, s) for r, s in before] == [(r.id, s) for r, s in after]


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_launch_that_is_cut_off_or_longer_is_refused(kernel: str) -> None:
    packed = arguments_of(every_kernel()[kernel])
    for length in range(0, len(packed), max(1, len(packed) // 60)):
        with pytest.raises(WireError):
            unpack_launch(packed[:length], region_of)
    with pytest.raises(WireError, match="left over"):
        unpack_launch(packed + b"\0", region_of)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_launch_is_refused_or_read(data: st.DataObject) -> None:
    packed = bytearray(arguments_of(every_kernel()[data.draw(st.sampled_from(sorted(KERNELS)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed) - 1))
        packed[at] = data.draw(st.integers(0, 255))
    try:
        launch = unpack_launch(bytes(packed), region_of)
    except WireError:
        return
    assert isinstance(launch, Launch)


@given(st.binary(max_size=400))
def test_bytes_of_chance_are_refused_as_arguments(data: bytes) -> None:
    for unpack in (unpack_segment, unpack_launch):
        try:
            unpack(data, region_of)
        except WireError:
            continue


def test_arrays_of_another_shape_are_refused_by_name() -> None:
    launch = every_kernel()["attend"]
    assert isinstance(launch.args, Attend)
    values: dict[str, Any] = {one.name: getattr(launch.args, one.name) for one in fields(launch.args)}
    bent = Launch(Attend(**{**values, "runs": launch.args.runs[:, :2]}), launch.reads, launch.writes)
    with pytest.raises(WireError, match=r"runs needs shape \(n, 3\)"):
        arguments_of(bent)


def test_host_code_has_no_place_on_the_wire() -> None:
    with pytest.raises(WireError, match="kernel dense has no number"):
        arguments_of(every_kernel()["dense"])


def test_numbers_on_the_wire_never_change() -> None:
    """Firmware of years ago still means the same by them."""
    assert KERNELS == {
        "attend": 0, "logits": 1, "combine": 2, "merge": 3, "score": 4, "topk": 5, "gather": 6, "append": 7,
        "quantize": 8, "dequantize": 9, "chase": 10, "cluster": 11,
    }  # fmt: skip
    assert DTYPE_NUMBERS == ("float32", "float16", "bfloat16", "int8", "fp8_e4m3")
    assert set(DTYPE_NUMBERS) == DTYPES
    assert [(one.name, one.value) for one in Opcode] == [
        ("HELLO", 1), ("REGION_ADD", 2), ("REGION_DROP", 3), ("ADD", 4), ("OP", 5), ("READ", 6), ("GOODBYE", 7),
    ]  # fmt: skip
    golden = Entry(5, 1, 2, 256, 3, 4, 64, 128, 0xAABBCCDD, 0x11223344, 9).pack()
    assert golden.hex() == (
        "1030313905000100020000000001000003000000000000000400000000000000"
        "40000000000000008000000000000000ddccbbaa443322110900000000000000"
    )
