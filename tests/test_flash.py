"""Firmware models: the page-mapped flash layer against a dict, its timing, and the PNM's banks and engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING, WHOLE, Ranges
from tierloop.firmware_models.passthrough import Passthrough
from tierloop.firmware_models.pnm import PnmGeometry, PnmModel

UNIT = 4096
SMALL = FlashGeometry(
    capacity=96 * UNIT,
    unit_nbytes=UNIT,
    page_nbytes=2 * UNIT,
    planes=2,
    channels=2,
    dies_per_channel=2,
    stripes_per_block=8,
    read_ns=50_000,
    program_ns=400_000,
    erase_ns=2_000_000,
    channel_bytes_per_s=1_024_000_000,
    spare_percent=20,
)
"""96 units of 4 KiB; a stripe holds 4, a block 32; a unit takes 4,000 ns on its channel."""


def units(*pairs: tuple[int, int]) -> Ranges:
    """Ranges of (first unit, number of units)."""
    return np.array([(first * UNIT, count * UNIT) for first, count in pairs], dtype=np.int64).reshape(-1, 2)


# -- data ---------------------------------------------------------------------------------------------------------

writes = st.tuples(st.just("write"), st.integers(0, 95), st.integers(1, 20))
trims = st.tuples(st.just("trim"), st.integers(0, 95), st.integers(1, 20))
resets = st.tuples(st.just("reset"), st.just(0), st.just(1))


@given(st.lists(st.one_of(writes, writes, writes, trims, resets), max_size=120))
def test_whatever_is_written_is_what_is_found(script: list[tuple[str, int, int]]) -> None:
    model, expected, written = FlashModel(SMALL), dict[int, int](), 0
    for action, first, count in script:
        count = min(count, 96 - first)
        if action == "write":
            model.access(NOTHING, units((first, count)))
            for unit in range(first, first + count):
                written += 1
                expected[unit] = written
        elif action == "trim":
            model.trim(first * UNIT, count * UNIT)
            for unit in range(first, first + count):
                expected.pop(unit, None)
        else:
            model.reset()
            expected, written = {}, 0
        assert_holds(model, expected)
        assert model.write_amplification >= 1


def assert_holds(model: FlashModel, expected: dict[int, int]) -> None:
    found = {unit: model.peek(unit) for unit in range(SMALL.units)}
    assert {unit: slot.tag for unit, slot in found.items() if slot} == expected
    slots = [slot.slot for slot in found.values() if slot]
    assert len(set(slots)) == len(slots), "two units share a slot"
    assert int(model._valid.sum()) == len(slots)
    assert int((model._owner > 0).sum()) == len(slots)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_random_overwriting_for_ever_loses_nothing(seed: int, rounds: int) -> None:
    model = FlashModel(SMALL)
    model.age(rounds, seed)
    tags = [slot.tag for slot in (model.peek(u) for u in range(SMALL.units)) if slot]
    assert sorted(tags) == list(range((rounds - 1) * 96 + 1, rounds * 96 + 1))


def test_a_full_drive_that_is_overwritten_in_place_collects_garbage() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 96)))
    order = np.random.default_rng(0)
    expected = {u: u + 1 for u in range(96)}
    for written in range(97, 2_000):
        unit = int(order.integers(96))
        model.access(NOTHING, units((unit, 1)))
        expected[unit] = written
    assert_holds(model, expected)
    assert model.erased_blocks > 20
    assert model.write_amplification > 1.02


def test_a_unit_that_is_written_twice_in_one_command_keeps_the_last() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((5, 1), (6, 1), (5, 1), (5, 1), (5, 1), (5, 1)))
    assert_holds(model, {5: 6, 6: 2})


def test_a_drive_that_never_wrote_has_nothing_and_amplifies_nothing() -> None:
    model = FlashModel(SMALL)
    model.trim(0, SMALL.capacity)
    assert model.peek(0) is None
    assert model.write_amplification == 1


# -- time ---------------------------------------------------------------------------------------------------------


def test_reading_a_page_takes_sensing_and_bus() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 96)))
    work = model.access(units((0, 1)), NOTHING)
    assert (work.alone_ns, work.nbytes) == (50_000 + 4_000, UNIT)
    assert model.access(units((0, 2)), NOTHING).alone_ns == 50_000 + 8_000  # one page, two units over the bus


def test_reading_what_was_never_written_costs_the_same() -> None:
    fresh, full = FlashModel(SMALL), FlashModel(SMALL)
    full.access(NOTHING, units((0, 96)))
    for ranges in (units((0, 1)), units((7, 30)), units((3, 1), (90, 2), (41, 9)), units((0, 96))):
        assert fresh.access(ranges, NOTHING) == full.access(ranges, NOTHING)


def test_dies_work_side_by_side() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 96)))
    four = model.access(units((0, 1), (4, 1), (8, 1), (12, 1)), NOTHING)  # a stripe on each of the four dies
    same = model.access(units((0, 1), (16, 1), (32, 1), (48, 1)), NOTHING)  # four stripes on one die
    assert four.alone_ns == 50_000 + 2 * 4_000
    assert same.alone_ns == 4 * 50_000 + 4_000
    assert four.share > 3.4 * same.share


def test_a_write_costs_bus_time_until_its_stripe_is_full() -> None:
    model = FlashModel(SMALL)
    costs = [model.access(NOTHING, units((u, 1))).alone_ns for u in range(8)]
    assert costs == [4_000, 4_000, 4_000, 404_000] * 2


def test_what_is_still_in_the_stripe_buffer_is_not_sensed() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 3)))
    assert model.access(units((0, 3)), NOTHING).alone_ns == 3 * 4_000


def test_sequential_writes_use_all_dies() -> None:
    model = FlashModel(SMALL)
    work = model.access(NOTHING, units((0, 64)))  # 16 stripes over 4 dies
    assert work.alone_ns == 4 * 400_000 + 4_000
    assert work.share == -(-4 * 4 * 400_000 * WHOLE // (4 * work.alone_ns))


@given(st.lists(st.tuples(st.integers(0, 95), st.integers(1, 30)), min_size=1, max_size=8), st.booleans())
def test_a_plan_is_what_happens_and_changes_nothing(pairs: list[tuple[int, int]], write: bool) -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 50)))
    ranges = units(*((first, min(count, 96 - first)) for first, count in pairs))
    reads, written = (NOTHING, ranges) if write else (ranges, NOTHING)
    if write:
        ranges = written = ranges[:1]
    planned = model.plan(reads, written)
    assert model.plan(reads, written) == planned
    assert model.access(reads, written) == planned


@given(st.lists(st.tuples(st.integers(0, 95), st.integers(1, 30)), min_size=1, max_size=20))
def test_no_access_is_faster_than_the_ceiling(pairs: list[tuple[int, int]]) -> None:
    model = FlashModel(SMALL)
    ranges = units(*((first, min(count, 96 - first)) for first, count in pairs))
    nbytes = int(ranges[:, 1].sum())
    read = model.access(ranges, NOTHING)
    assert nbytes * 10**9 <= model.ceiling(write=False) * read.alone_ns * (SMALL.page_nbytes // UNIT)
    assert 1 <= read.share <= WHOLE


def test_a_fault_happens_as_often_as_it_was_injected() -> None:
    model = FlashModel(SMALL)
    model.inject(7, times=2)
    faults = [model.access(units((first, 4)), NOTHING).fault for first in (0, 4, 5, 6)]
    assert [bool(f) for f in faults] == [False, True, True, False]
    assert "unit 7 (byte 28672)" in faults[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "at least 1"),
        ({"page_nbytes": 5000}, "no whole number of 4096 B units"),
        ({"stripes_per_block": 1}, "collecting garbage"),
        ({"spare_percent": 10}, "collecting garbage"),
    ],
)
def test_geometries_that_cannot_work_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlashGeometry(**{**{f: getattr(SMALL, f) for f in SMALL.__dataclass_fields__}, **change})


def test_the_tables_of_a_large_drive_cost_nothing_until_they_are_used() -> None:
    large = {f: getattr(SMALL, f) for f in SMALL.__dataclass_fields__} | {"capacity": 1 << 40}
    model = FlashModel(FlashGeometry(**large | {"dies_per_channel": 32, "stripes_per_block": 256}))
    model.access(NOTHING, np.array([[(1 << 40) - UNIT, UNIT]]))
    found = model.peek((1 << 28) - 1)
    assert found is not None
    assert found.tag == 1


# -- pass-through and PNM -----------------------------------------------------------------------------------------


def test_the_pass_through_model_is_bytes_over_rate() -> None:
    model = Passthrough(4_000_000_000, 2_000_000_000)
    assert model.access(units((0, 1)), units((1, 1))) == (1_024 + 2_048, WHOLE, 2 * UNIT, "")
    assert (model.ceiling(write=False), model.ceiling(write=True)) == (4_000_000_000, 2_000_000_000)


BANKS = PnmGeometry(
    channels=4,
    banks=8,
    row_nbytes=1024,
    granule_nbytes=256,
    burst_nbytes=64,
    channel_bytes_per_s=1_000_000_000,
    row_cycle_ns=50,
    engines=4,
    engine_bytes_per_s=1_000_000_000,
    request_ns=10,
    tile_nbytes=1024,
)


def stretches(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(n, first, end): the longest stretches of bytes that are asked for at least n times, byte by byte."""
    asked = np.zeros(max((start + nbytes for start, nbytes in ranges), default=0) + 2, dtype=np.int64)
    for start, nbytes in ranges:
        asked[1 + start : 1 + start + nbytes] += 1
    found = []
    for n in range(1, int(asked.max()) + 1):
        edges = np.flatnonzero(np.diff((asked >= n).astype(np.int8)))
        found += [(n, int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]
    return found


def served(ranges: list[tuple[int, int]]) -> tuple[list[int], NDArray[np.int64], int]:
    """Bytes per channel, rows opened per channel and bank, and tiles: burst by burst."""
    channel_bytes, opens, tiles = [0] * 4, np.zeros((4, 8), dtype=np.int64), 0
    row_open: dict[int, int] = {}
    for n, first, end in stretches(ranges):
        bursts = range(first // 64, (end - 1) // 64 + 1)
        tiles += -(-len(bursts) * 64 // 1024)
        for burst in bursts:
            channel, row = burst * 64 // 256 % 4, burst * 64 // 4096
            channel_bytes[channel] += 64
            if n == 1 and row_open.get(channel) != row:
                row_open[channel] = row
                opens[channel, row % 8] += 1
    return channel_bytes, opens, tiles


sizes = st.one_of(
    st.integers(0, 20_000), st.sampled_from([4096 * n for n in (8, 9, 16, 17, 30)]), st.integers(0, 200_000)
)


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 1 << 18), st.integers(0, 64).map(lambda n: n * 4096)), sizes), max_size=12
    )
)
def test_a_pnm_takes_as_long_as_its_busiest_channel_bank_or_engine(ranges: list[tuple[int, int]]) -> None:
    channel_bytes, opens, tiles = served(ranges)
    moved = sum(channel_bytes)
    work = PnmModel(BANKS).access(np.array(ranges, dtype=np.int64).reshape(-1, 2), NOTHING)
    at_work = max(min(tiles, 4), 1)
    engine = -(-tiles // 4) * 10 + -(-moved // at_work)
    assert (work.alone_ns, work.nbytes) == (max(max(channel_bytes), int(opens.max()) * 50, engine), moved)
    assert 1 <= work.share <= WHOLE


def effective(nbytes: int) -> float:
    starts = np.random.default_rng(0).permutation(1 << 14)[:4000] * 1024
    ranges = np.stack([starts, np.full(len(starts), nbytes)], axis=1)
    return len(starts) * nbytes / PnmModel(BANKS).plan(ranges, NOTHING).alone_ns


def test_larger_requests_get_more_bandwidth_up_to_the_channels() -> None:
    rates = [effective(n) for n in (8, 32, 64, 256, 1024)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(rates[2] / 8, rel=0.01)  # an eighth of each burst is used
    assert rates[-1] <= 4


def test_plans_are_not_counted() -> None:
    counted = PnmModel(BANKS)
    ranges = np.array([[0, 4096]])
    assert counted.plan(ranges, NOTHING) == counted.access(ranges, NOTHING)
    assert (counted.requests, counted.activations) == (1, 4)
    counted.reset()
    assert (counted.requests, counted.activations) == (0, 0)


@pytest.mark.parametrize("change", [{"channels": 3}, {"granule_nbytes": 96}, {"burst_nbytes": 512}, {"request_ns": -1}])
def test_pnm_geometries_that_cannot_work_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"PNM geometry|whole"):
        PnmGeometry(**{**{f: getattr(BANKS, f) for f in BANKS.__dataclass_fields__}, **change})
