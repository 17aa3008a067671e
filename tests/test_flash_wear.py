"""Flash that wears: levelling, bad blocks, the end of its life, and what it reports about itself."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from tests.test_flash import SMALL, UNIT, units
from tests.test_flash_legality import CACHED, EVERYTHING, LEVELLED, WORN, Drive
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING

HOT = 8
"""Units that are written over and over, on a drive whose other units are written once."""
HALF_COLD = replace(SMALL, capacity=512 * UNIT)
"""Five blocks of each die are full of units."""


def heat(geometry: FlashGeometry, writes: int) -> Drive:
    """A full drive of which a few units were written so often, four in a command."""
    drive = Drive(geometry)
    drive.write((0, geometry.units))
    for hot in np.random.default_rng(1).integers(0, HOT, (writes // 4, 4)).tolist():
        drive.write(*((unit, 1) for unit in hot))
    drive.check()
    return drive


def spread(drive: Drive) -> int:
    """The most by which erasures differ within a die."""
    g = drive.model.geometry
    dies = np.array(drive.model.erases).reshape(g.dies, -1)[:, : g.main_blocks]
    return int((dies.max(axis=1) - dies.min(axis=1)).max())


def test_without_levelling_cold_blocks_are_never_erased() -> None:
    drive = heat(HALF_COLD, 6_000)
    assert min(drive.model.erases) == 0
    assert spread(drive) > 20
    assert drive.model.health.levelled == 0


@pytest.mark.parametrize("bound", [1, 2, 5, 10])
def test_levelling_keeps_the_erasures_of_a_die_within_the_bound(bound: int) -> None:
    drive = heat(replace(HALF_COLD, wear_spread=bound), 6_000)
    assert spread(drive) <= bound + 1
    assert drive.model.health.levelled > 0


def test_a_wider_bound_moves_less() -> None:
    moved = [heat(replace(HALF_COLD, wear_spread=bound), 6_000).model.health.levelled for bound in (1, 2, 5, 10, 1_000)]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 0


def test_levelling_reads_and_erases_two_blocks_and_puts_the_cold_units_into_the_worn_one() -> None:
    drive = Drive(replace(HALF_COLD, wear_spread=LEVELLED.wear_spread))
    drive.write((0, 512))
    order = np.random.default_rng(1)
    operations = drive.write((0, 1))
    while not any(op.cause == "level" for op in operations):
        operations = drive.write((int(order.integers(HOT)), 1))
    kinds = [(op.kind, op.cause) for op in operations]
    at = kinds.index(("read", "level"))
    worn, cold = operations[at + 1].block, operations[at].block
    assert kinds[at + 1 : at + 4] == [("erase", "collect"), ("erase", "level"), ("program", "level")]
    assert (operations[at + 2].block, operations[at + 3].block) == (cold, worn)
    erases = drive.model.erases
    assert erases[worn] - erases[cold] == LEVELLED.wear_spread


# -- the end ------------------------------------------------------------------------------------------------------


def wear_out(geometry: FlashGeometry) -> Drive:
    """A drive that was written in random order until it was read-only."""
    drive = Drive(geometry)
    drive.write((0, 96))
    order = np.random.default_rng(2)
    for _ in range(50_000):
        drive.write(*((unit, 1) for unit in order.integers(0, 96, 4).tolist()))
        if drive.model.read_only:
            drive.check()
            return drive
    raise AssertionError("it lasts for ever")


@pytest.mark.parametrize("geometry", [WORN, replace(EVERYTHING, rated_cycles=5)])
def test_a_drive_at_its_end_refuses_writes_and_keeps_every_unit(geometry: FlashGeometry) -> None:
    drive = wear_out(geometry)
    health = drive.model.health
    assert (health.spare_percent, health.bad_blocks) == (0, geometry.dies * geometry.reserve_blocks)
    work = drive.model.access(NOTHING, units((3, 2)))
    assert (work.fault, work.alone_ns) == ("read-only: the last spare block is used up", 0)
    drive.read_back((0, 96))
    drive.check()
    assert len(drive.expected) == 96


def test_blocks_fail_after_their_rated_cycles_and_within_the_spread_of_lives() -> None:
    drive = wear_out(WORN)
    lives = [drive.chip.erases[block] for block in drive.chip.bad]
    assert min(lives) >= WORN.rated_cycles
    assert max(lives) <= 2 * WORN.rated_cycles
    assert len(set(lives)) > 1


def test_the_larger_the_reserve_the_longer_it_lasts() -> None:
    lasted = [wear_out(replace(WORN, reserve_blocks=n)).written for n in (1, 2, 4)]
    assert lasted == sorted(set(lasted))


def test_levelling_makes_a_drive_with_hot_units_last_longer() -> None:
    lasted = []
    for bound in (0, 2):
        drive = Drive(replace(WORN, capacity=HALF_COLD.capacity, wear_spread=bound))
        drive.write((0, 512))
        order = np.random.default_rng(3)
        while not drive.model.read_only:
            drive.write(*((unit, 1) for unit in order.integers(0, HOT, 4).tolist()))
        lasted.append(drive.written)
    assert lasted[1] > 1.2 * lasted[0]


def test_the_spare_shrinks_with_every_bad_block() -> None:
    drive = Drive(WORN)
    seen = {drive.model.health.spare_percent}
    order = np.random.default_rng(2)
    while not drive.model.read_only:
        drive.write((int(order.integers(96)), 1))
        seen.add(drive.model.health.spare_percent)
    assert seen == {100 * left // 8 for left in range(9)}


def test_without_a_reserve_blocks_wear_and_never_fail() -> None:
    drive = Drive(replace(SMALL, rated_cycles=2))
    for _ in range(60):
        drive.write((0, 96))
    drive.check()
    assert drive.model.health.percentage_used == 255
    assert not drive.model.read_only


# -- health -------------------------------------------------------------------------------------------------------


def test_the_percentage_used_is_the_mean_of_erasures_over_the_rated_cycles() -> None:
    model = FlashModel(replace(SMALL, rated_cycles=1_000))
    assert model.health.percentage_used == 0
    model.wear(370)
    assert model.health.percentage_used == 37
    model.wear(5_000)
    assert model.health.percentage_used == 255
    assert FlashModel(SMALL).health.percentage_used == 0


def test_nothing_makes_a_block_younger() -> None:
    with pytest.raises(ValueError, match="younger"):
        FlashModel(SMALL).wear(-1)


def test_a_reset_gives_back_the_drive_of_the_factory() -> None:
    model = FlashModel(EVERYTHING, remembered=10)
    new = model.health
    for _ in range(30):
        model.access(NOTHING, units((0, 96)))
    model.advance(10**10)
    assert model.health != new
    model.reset()
    assert (model.health, model.history(), max(model.erases)) == (new, (), 0)
    assert model.access(NOTHING, units((0, 4))) == FlashModel(EVERYTHING).access(NOTHING, units((0, 4)))


def test_writing_in_order_amplifies_nothing_and_through_a_cache_everything_is_written_twice() -> None:
    plain, cached = FlashModel(SMALL), FlashModel(CACHED)
    for model in (plain, cached):
        model.access(NOTHING, units((0, 64)))
        model.advance(10**9)
    assert plain.health.write_amplification == 1
    assert cached.health.write_amplification == 2
    assert cached.health.programmed == 2 * 64 * UNIT


def test_what_a_drive_reports_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FlashModel(SMALL).health.erases = 3  # type: ignore[misc]  # that it fails is the test
