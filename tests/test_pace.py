"""Pace: which kernels keep it, what they look at, and what a wait that is late does. No test looks at the time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attention_case import bytes_of, region
from tests.launches import every_kernel
from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.kernels import copy_bytes, run
from tierloop.devices.kernels.pace import DEBT, LENGTH, START, TILE_NBYTES, Pace, keeping, ticks_per_ns

PACED = ("attend", "combine", "logits", "score", "gather", "chase")
FAR_NS = 10**15


@pytest.mark.parametrize("kernel", PACED)
def test_a_paced_kernel_looks_at_the_time_and_gives_the_same_bits(kernel: str) -> None:
    launch, paced = every_kernel()[kernel], every_kernel()[kernel]
    run(launch, bytes_of)
    pace = Pace(0)
    with keeping(pace):
        run(paced, bytes_of)
    assert pace.waits > 0
    for one, other in zip(launch.writes[0], paced.writes[0], strict=True):
        assert np.array_equal(bytes_of(one.region), bytes_of(other.region))


@pytest.mark.parametrize("verb", ["read", "write", "copy"])
def test_a_paced_transfer_looks_at_the_time_before_each_tile(verb: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 * TILE_NBYTES + 1, dtype=np.uint8)
    source, target, buffer = region(data), region(np.zeros_like(data)), np.zeros_like(data)
    pace = Pace(0)
    with keeping(pace):
        if verb == "read":
            copy_bytes(Read(source.all(), buffer), bytes_of)
        elif verb == "write":
            copy_bytes(Write(target.all(), data), bytes_of)
        else:
            copy_bytes(Copy(source.all(), target.all()), bytes_of)
    assert pace.waits == 6
    assert np.array_equal(buffer if verb == "read" else bytes_of(target), data)


def test_a_thread_keeps_no_pace_after_its_block() -> None:
    pace = Pace(0)
    with keeping(pace):
        pass
    run(every_kernel()["gather"], bytes_of)
    assert pace.waits == 0


def test_a_debt_above_its_bound_moves_the_start_and_is_counted() -> None:
    pace = Pace(1_000, debt_ns=500, start_in_ns=-FAR_NS)
    start = int(pace.places[START])
    pace.wait(1, 1)
    moved = int(pace.places[START]) - start
    assert 0 < moved / ticks_per_ns() <= pace.dropped_ns + 1
    assert pace.worst_ns - 500 <= pace.dropped_ns + 2
    assert pace.worst_ns >= FAR_NS - 1_000


def test_a_debt_within_its_bound_is_made_up_for() -> None:
    pace = Pace(1_000, debt_ns=2 * FAR_NS, start_in_ns=-1_000_000)
    start = int(pace.places[START])
    pace.wait(1, 2)
    assert (pace.dropped_ns, int(pace.places[START])) == (0, start)


def test_an_end_that_moves_moves_every_deadline_that_is_to_come() -> None:
    pace = Pace(1_000)
    pace.end_in(FAR_NS)
    assert int(pace.places[LENGTH]) >= round((FAR_NS - 1) * ticks_per_ns())
    pace.end_in(-FAR_NS)
    assert int(pace.places[LENGTH]) == 0
    pace.wait(1, 1)


def test_every_wait_is_counted() -> None:
    pace = Pace(0, debt_ns=FAR_NS)
    for _ in range(7):
        pace.wait(0, 1)
    assert pace.waits == 7
    assert int(pace.places[DEBT]) > 0
