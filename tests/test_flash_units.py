"""The compiled flash model does to every unit what the slow one does, and refuses what lies outside the drive."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.flash_reference import SlowFlash
from tests.test_flash import SMALL, UNIT, units
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING

UNEVEN = FlashGeometry(
    capacity=75 * UNIT,
    unit_nbytes=UNIT,
    page_nbytes=3 * UNIT,
    planes=1,
    channels=3,
    dies_per_channel=1,
    stripes_per_block=5,
    read_ns=7,
    program_ns=90,
    erase_ns=1_000,
    channel_bytes_per_s=1_000_000_000_000,
    spare_percent=30,
)
"""Nothing is a power of two."""

pairs = st.lists(st.tuples(st.integers(0, 74), st.integers(0, 30)), max_size=6)
moves = st.tuples(st.sampled_from(["access", "access", "access", "trim", "inject"]), pairs, pairs)


def agree(model: FlashModel, slow: SlowFlash) -> None:
    g = model.geometry
    per_block = g.slots * g.stripes_per_block
    for unit in range(g.units):
        found, where = model.peek(unit), slow.where.get(unit)
        assert (None if found is None else found.slot) == where
        if found is not None and where is not None:
            assert slow.blocks[where // per_block].slots[where % per_block] == (unit, found.tag)
    assert [block.valid for block in slow.blocks] == model._valid.tolist()
    assert (model.host_units, model.collected_units, model.erased_blocks) == (
        slow.host_units,
        slow.collected_units,
        slow.erased_blocks,
    )


@pytest.mark.parametrize("remembered", [0, 5])
@pytest.mark.parametrize("geometry", [SMALL, UNEVEN])
@settings(max_examples=40)
@given(script=st.lists(moves, max_size=40))
def test_any_script_gives_the_same_work_map_and_garbage(
    geometry: FlashGeometry, remembered: int, script: list[tuple[str, list[tuple[int, int]], list[tuple[int, int]]]]
) -> None:
    model, slow = FlashModel(geometry, remembered), SlowFlash(geometry)
    for action, first, second in script:
        reads, writes = (units(*((a, min(n, 75 - a)) for a, n in side)) for side in (first, second))
        if action == "access":
            assert model.access(reads, writes) == slow.access(reads, writes)
        for unit, count in first if action == "trim" else ():
            model.trim(unit * UNIT, min(count, 75 - unit) * UNIT)
            for gone in range(unit, min(unit + count, 75)):
                slow.forget(gone)
        for unit, times in first if action == "inject" else ():
            if times and slow.faults.get(unit) is None:
                model.inject(unit, times)
                slow.faults[unit] = times
        agree(model, slow)


@pytest.mark.parametrize("geometry", [SMALL, UNEVEN])
def test_a_drive_in_use_for_long_collects_the_same_garbage(geometry: FlashGeometry) -> None:
    model, slow = FlashModel(geometry), SlowFlash(geometry)
    order = np.random.default_rng(1)
    for _ in range(300):
        first = order.integers(0, 70, size=7)
        writes = units(*((int(u), int(n)) for u, n in zip(first, order.integers(1, 6, size=7), strict=True)))
        assert model.access(NOTHING, writes) == slow.access(NOTHING, writes)
    agree(model, slow)
    assert model.collected_units > 100


def test_ageing_writes_every_unit_in_the_order_of_the_seed() -> None:
    model, slow = FlashModel(SMALL), SlowFlash(SMALL)
    model.age(2, seed=5)
    order = np.random.default_rng(5)
    for _ in range(2):
        slow.access(NOTHING, units(*((int(u), 1) for u in order.permutation(SMALL.units))))
    agree(model, slow)


@pytest.mark.parametrize("wrong", [(-1, 1), (95, 2), (96, 1), (0, 97), (1 << 50, 1)])
@pytest.mark.parametrize("side", ["reads", "writes"])
def test_a_range_outside_the_drive_is_refused_before_anything_is_written(wrong: tuple[int, int], side: str) -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 10)))
    bad, good = units((3, 1), wrong), units((0, 20))
    for access in (model.access, model.plan):
        with pytest.raises(ValueError, match=r"outside a drive of 393216 bytes"):
            access(*((bad, good) if side == "reads" else (good, bad)))
    assert (model.host_units, model.peek(15)) == (10, None)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        FlashModel(SMALL).access(NOTHING, np.array([[8 * UNIT, -UNIT]]))


def test_a_trim_outside_the_drive_is_refused() -> None:
    model = FlashModel(SMALL)
    model.access(NOTHING, units((0, 10)))
    with pytest.raises(ValueError, match="trim"):
        model.trim(90 * UNIT, 7 * UNIT)


def test_of_many_faults_the_one_injected_first_is_reported() -> None:
    model = FlashModel(SMALL)
    for unit in (60, 20, 40):
        model.inject(unit)
    faults = [model.access(units((10, 20), (35, 30)), NOTHING).fault for _ in range(4)]
    assert [f.split(" ")[1] if f else "" for f in faults] == ["60", "20", "40", ""]


def test_the_model_is_imported_without_the_compiler() -> None:
    text = "import sys, tierloop.firmware_models.flash; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
