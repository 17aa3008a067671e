"""Flash of every kind: no operation that a real die would refuse, no unit lost, and every byte accounted for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.flash_reference import Chip, SlowDie, Slowly
from tests.test_flash import SMALL, UNIT, units
from tierloop.firmware_models.flash import FlashGeometry, FlashModel, Operation
from tierloop.firmware_models.media import NOTHING

REMEMBERED = 1 << 12
CACHED = replace(SMALL, slc_percent=50, slc_program_ns=100_000, slc_read_ns=20_000, idle_ns=1_000_000)
"""A stripe of 4 units takes a quarter of the time in the cache, whose blocks hold 2 stripes of 8."""
BUFFERED = replace(SMALL, buffer_nbytes=8 * 4 * UNIT)
WORN = replace(SMALL, rated_cycles=6, life_spread_percent=100, reserve_blocks=2, seed=3)
LEVELLED = replace(SMALL, wear_spread=2)
EVERYTHING = replace(
    CACHED,
    buffer_nbytes=6 * 4 * UNIT,
    suspends=3,
    suspend_ns=10_000,
    rated_cycles=8,
    life_spread_percent=50,
    reserve_blocks=1,
    wear_spread=2,
    retry_ppm=300_000,
    retries=4,
    retention_ns=10**10,
)
KINDS = {"plain": SMALL, "cached": CACHED, "buffered": BUFFERED, "worn": WORN, "levelled": LEVELLED, "all": EVERYTHING}


class Drive:
    """A model with its operations carried out on a chip, and what the host expects to find."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self.model = FlashModel(geometry, remembered=REMEMBERED)
        self.chip = Chip(geometry)
        self.expected: dict[int, int] = {}
        self.written = self.read = self.now = self.logged = 0

    def carry_out(self) -> tuple[Operation, ...]:
        """Give the chip what is new in the history."""
        count = self.model.operations - self.logged
        assert count <= REMEMBERED, "remember more"
        new = self.model.history(latest=count)
        self.logged += count
        self.chip.carry_out(new)
        self.chip.settled()
        return new

    def write(self, *pairs: tuple[int, int]) -> tuple[Operation, ...]:
        was_read_only = self.model.read_only
        work = self.model.access(NOTHING, units(*pairs))
        assert bool(work.fault) == was_read_only
        for first, count in pairs if not was_read_only else ():
            for unit in range(first, first + count):
                self.written += 1
                self.expected[unit] = self.written
        return self.carry_out()

    def read_back(self, *pairs: tuple[int, int]) -> tuple[Operation, ...]:
        assert not self.model.access(units(*pairs), NOTHING).fault
        self.read += sum(count for _, count in pairs)
        return self.carry_out()

    def trim(self, first: int, count: int) -> None:
        self.model.trim(first * UNIT, count * UNIT)
        for unit in range(first, first + count):
            self.expected.pop(unit, None)

    def wait(self, ns: int) -> tuple[Operation, ...]:
        self.now += ns
        self.model.advance(self.now)
        return self.carry_out()

    def check(self) -> None:
        self.check_places()
        self.check_health()

    def check_places(self) -> None:
        """Every unit is where it was programmed last, or in the open stripe."""
        g, model = self.model.geometry, self.model
        found = {unit: slot for unit in range(g.units) if (slot := model.peek(unit)) is not None}
        assert {unit: slot.tag for unit, slot in found.items()} == self.expected
        assert len({slot.slot for slot in found.values()}) == len(found)
        is_open = model.health.buffered > 0
        for slot in found.values():
            assert slot.block not in self.chip.bad
            stripe = slot.slot // g.slots % g.stripes_per_block
            assert stripe < self.chip.programmed[slot.block] + is_open

    def check_health(self) -> None:
        g, health, chip = self.model.geometry, self.model.health, self.chip
        assert health.host_written == self.written * UNIT
        assert health.host_read == self.read * UNIT
        assert health.programmed == chip.stripes * g.slots * UNIT
        assert health.sensed == chip.pages * g.page_nbytes
        moved = health.collected + health.folded + health.levelled
        assert health.programmed == health.host_written + moved + health.padded - health.buffered
        assert moved == UNIT * sum(chip.programmed_units[cause] for cause in ("collect", "fold", "level"))
        assert health.erases == sum(chip.erases)
        assert self.model.erases == chip.erases
        assert health.bad_blocks == len(chip.bad)
        assert health.write_amplification >= 1
        reserve = g.dies * g.reserve_blocks
        assert health.spare_percent == (100 * (reserve - len(chip.bad)) // reserve if reserve else 100)
        assert health.read_only == (0 < reserve == len(chip.bad))


first_unit, count = st.integers(0, 95), st.integers(1, 20)


class AnyDrive(RuleBasedStateMachine):
    """Any kind of drive against a dict and a chip."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), is_full=st.booleans())
    def begin(self, kind: str, is_full: bool) -> None:
        self.drive = Drive(KINDS[kind])
        if is_full:
            self.drive.write((0, 96))

    @rule(pairs=st.lists(st.tuples(first_unit, count), min_size=1, max_size=4))
    def write(self, pairs: list[tuple[int, int]]) -> None:
        self.drive.write(*((first, min(n, 96 - first)) for first, n in pairs))

    @rule(seed=st.integers(0, 1000), often=st.integers(1, 40))
    def overwrite(self, seed: int, often: int) -> None:
        for unit in np.random.default_rng(seed).integers(0, 96, often).tolist():
            self.drive.write((unit, 1))

    @rule(first=first_unit, n=count)
    def read(self, first: int, n: int) -> None:
        self.drive.read_back((first, min(n, 96 - first)))

    @rule(first=first_unit, n=count)
    def trim(self, first: int, n: int) -> None:
        self.drive.trim(first, min(n, 96 - first))

    @rule(ns=st.sampled_from([0, 1_000, 300_000, 5_000_000, 1_000_000_000]))
    def wait(self, ns: int) -> None:
        self.drive.wait(ns)

    @precondition(lambda self: not self.drive.model.read_only)
    @rule(first=first_unit, n=count, is_write=st.booleans())
    def plan(self, first: int, n: int, is_write: bool) -> None:
        model, ranges = self.drive.model, units((first, min(n, 96 - first)))
        asked = (NOTHING, ranges) if is_write else (ranges, NOTHING)
        before = model.health
        planned = model.plan(*asked)
        assert planned == model.plan(*asked)
        assert model.health == before
        self.drive.check()
        if is_write:
            return
        assert model.access(*asked) == planned
        self.drive.read += int(ranges[0, 1]) // UNIT
        self.drive.carry_out()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "drive"):
            self.drive.check()


TestAnyDrive = AnyDrive.TestCase
TestAnyDrive.settings = settings(max_examples=30, stateful_step_count=25)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_full_drive_of_any_kind_takes_random_writes_and_keeps_what_it_promised(kind: str) -> None:
    drive = Drive(KINDS[kind])
    drive.write((0, 96))
    order = np.random.default_rng(7)
    for step in range(1_000):
        drive.write((int(order.integers(96)), 1))
        if step % 50 == 0:
            drive.wait(int(order.integers(10_000_000)))
            drive.check()
    drive.check()
    assert len(drive.expected) == 96


# -- the queue of a die -------------------------------------------------------------------------------------------

ONE_DIE = replace(SMALL, planes=1, channels=1, dies_per_channel=1, channel_bytes_per_s=1 << 60)
steps = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read"]), st.integers(0, 95), st.integers(0, 200_000)), max_size=45
)


@pytest.mark.parametrize(("buffered", "suspends"), [(0, 2), (1, 0), (4, 0), (4, 1), (4, 3), (30, 2)])
@given(script=steps)
def test_a_die_does_what_the_slow_one_does(buffered: int, suspends: int, script: list[tuple[str, int, int]]) -> None:
    geometry = replace(ONE_DIE, buffer_nbytes=buffered * 2 * UNIT, suspends=suspends, suspend_ns=9_000)
    model, die = FlashModel(geometry), SlowDie(suspends, 9_000)
    now = bus_until = room = next_unit = 0
    stripes: list[Slowly] = []
    programs: dict[int, Slowly] = {}
    for action, unit, gap in script:
        now += gap
        model.advance(now)
        if action == "write":
            work = model.access(NOTHING, units((next_unit, 1)))
            if next_unit % 2 == 0 and buffered and len(stripes) >= buffered:
                room = max(room, stripes[len(stripes) - buffered].end)
            at, bus_until = max(now, room), max(bus_until, now) + 1
            end = at if buffered else max(at, bus_until)
            slot = model.peek(next_unit)
            assert slot is not None
            if next_unit % 2:
                stripes.append(die.program(at, 400_000, slot.block))
                programs[slot.slot // 2] = stripes[-1]
                end = at if buffered else max(end, stripes[-1].end + 1)
            next_unit += 1
        elif next_unit:
            unit %= next_unit
            work = model.access(units((unit, 1)), NOTHING)
            slot = model.peek(unit)
            bus_until = max(bus_until, now) + 1
            assert slot is not None
            pending = programs.get(slot.slot // 2)
            held = stripes[max(len(stripes) - buffered, 0) :]
            from_buffer = pending is None or (pending.end > now and any(pending is one for one in held))
            end = bus_until if from_buffer else max(die.read(now, 50_000, slot.block) + 1, bus_until + 50_000)
        else:
            continue
        assert now + work.alone_ns == end
    assert model.health.suspends == die.suspended
    for before, after in pairwise(die.operations):
        assert after.start >= before.end


# -- history ------------------------------------------------------------------------------------------------------


def op(kind: str, cause: str, die: int, block: int, first: int, times: int, units: int) -> Operation:
    return Operation(kind, cause, die, block, first, times, units)  # type: ignore[arg-type]  # literals of tests


def test_stripes_are_programmed_on_the_dies_in_turn() -> None:
    drive = Drive(SMALL)
    per_die = SMALL.blocks_per_die
    programs = [op("program", "host", die % 4, die % 4 * per_die, die // 4, 1, 4) for die in range(6)]
    assert list(drive.write((0, 26))) == programs
    assert drive.read_back((0, 1), (24, 2)) == (op("read", "host", 0, 0, 0, 1, 0),)  # 24 and 25 lie in the open stripe


def test_the_cache_is_folded_when_the_drive_is_idle() -> None:
    drive = Drive(CACHED)
    per_die, first = CACHED.blocks_per_die, CACHED.main_blocks
    wrote = drive.write((0, 32))  # two stripes on each of four dies: a block of each cache
    assert [(o.kind, o.cause, o.block) for o in wrote] == [
        ("program", "host", die * per_die + first) for _ in range(2) for die in range(4)
    ]
    assert drive.wait(900_000) == ()
    folded = drive.wait(10_000_000)
    assert list(folded[:4]) == [
        op("read", "fold", 0, first, 0, 4, 8),
        op("program", "fold", 0, 0, 0, 1, 4),
        op("program", "fold", 0, 0, 1, 1, 4),
        op("erase", "fold", 0, first, 0, 1, 0),
    ]
    assert len(folded) == 16
    assert drive.model.health.folded == 32 * UNIT


def test_a_full_cache_is_folded_block_by_block_before_the_write_goes_on() -> None:
    drive = Drive(CACHED)
    holds = CACHED.slc_nbytes // UNIT
    assert {o.cause for o in drive.write((0, holds // 2), (0, holds - holds // 2))} == {"host"}
    after = drive.write((90, 4))
    assert [(o.kind, o.cause) for o in after][-2:] == [("erase", "fold"), ("program", "host")]
    assert {o.die for o in after} == {0}


def test_what_was_overwritten_in_the_cache_is_not_folded() -> None:
    drive = Drive(CACHED)
    drive.write((0, 16), (0, 16))
    drive.wait(1_000_000_000)
    assert drive.model.health.folded == 16 * UNIT


def test_the_oldest_operations_are_forgotten_first() -> None:
    model = FlashModel(SMALL, remembered=3)
    model.access(NOTHING, units((0, 28)))
    assert [o.die for o in model.history()] == [0, 1, 2]
    assert [o.die for o in model.history(latest=2)] == [1, 2]
    assert model.operations == 7
    assert FlashModel(SMALL).history() == ()


# -- ranges -------------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(-4, 100), st.integers(-(1 << 62), 1 << 62))


@given(
    kind=st.sampled_from(sorted(KINDS)), ranges=st.lists(st.tuples(numbers, numbers), max_size=4), write=st.booleans()
)
def test_any_range_is_served_or_refused_and_nothing_else_changes(
    kind: str, ranges: list[tuple[int, int]], write: bool
) -> None:
    drive = Drive(KINDS[kind])
    drive.write((0, 10))
    drawn = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    scaled = drawn * UNIT if (np.abs(drawn) < 1 << 40).all() else drawn // UNIT * UNIT
    inside = all(min(first, n) >= 0 and first + n <= SMALL.capacity for first, n in scaled.tolist())
    asked = (NOTHING, scaled) if write else (scaled, NOTHING)
    if inside:
        assert not drive.model.access(*asked).fault
        return
    with pytest.raises(ValueError, match="outside a drive of 393216 bytes"):
        drive.model.access(*asked)
    drive.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_nbytes": 4 * UNIT - 1}, "less than a stripe of 16384 bytes"),
        ({"slc_percent": 10}, "needs slc_program_ns and slc_read_ns"),
        ({"slc_percent": 101, "slc_program_ns": 1, "slc_read_ns": 1}, "at most as many blocks"),
        ({"slc_percent": 5, "slc_program_ns": 1, "slc_read_ns": 1, "bits_per_cell": 1}, "2 to 5"),
        ({"suspends": 1}, "needs suspend_ns"),
        ({"retry_ppm": 5}, "needs rated_cycles and retries"),
        ({"retry_ppm": 1_000_001, "rated_cycles": 1, "retries": 1}, "more than a million"),
        ({"reserve_blocks": 1}, "no block would ever fail"),
        ({"idle_ns": -1}, "idle_ns = -1"),
        ({"seed": 1 << 61}, "seed = "),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
