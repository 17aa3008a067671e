"""Estimates: a line that is fitted to what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.estimates import Costs, Line

sizes = st.integers(0, 1 << 40)
durations = st.integers(0, 1 << 40)


def fitted(points: list[tuple[int, int]]) -> Line:
    line = Line()
    for nbytes, duration_ns in points:
        line.observe(nbytes, duration_ns)
    return line


def test_a_true_line_is_found_exactly() -> None:
    line = fitted([(n, 80_000 + n // 2) for n in (4096, 65536, 1 << 20, 8192, 1 << 18)])
    for nbytes in (0, 4096, 1 << 19, 1 << 24):
        duration, margin = line.predict(nbytes)
        assert duration == pytest.approx(80_000 + nbytes / 2, rel=1e-6)
        assert margin == pytest.approx(0, abs=5)


def test_one_size_says_nothing_of_the_latency_but_larger_ones_cost_more() -> None:
    line = fitted([(4096, 100_000), (4096, 120_000), (4096, 110_000)])
    assert line.predict(4096)[0] == pytest.approx(110_000, rel=0.01)
    assert line.predict(512)[0] == line.predict(4096)[0]
    assert line.predict(8192)[0] == pytest.approx(2 * line.predict(4096)[0], rel=0.01)


def test_a_drive_that_slows_down_is_believed() -> None:
    line = fitted([(4096, 100_000)] * 200 + [(4096, 400_000)] * 100)
    assert line.predict(4096)[0] > 380_000


@given(st.lists(st.tuples(sizes, durations), min_size=1, max_size=40), sizes)
def test_an_estimate_is_never_negative_and_grows_with_the_size(points: list[tuple[int, int]], nbytes: int) -> None:
    line = fitted(points)
    duration, margin = line.predict(nbytes)
    assert duration >= 0
    assert margin >= 0
    assert line.predict(2 * nbytes + 1)[0] >= duration


def test_nothing_measured_is_declared_or_assumed_and_says_so() -> None:
    costs = Costs({"read": (50_000, 1 << 30)})
    assert costs.estimate("read", 1 << 30).duration_ns == 50_000 + 1_000_000_000
    assert costs.estimate("read", 0).source.startswith("options")
    assert costs.estimate("write", 0).source.startswith("assumed")
    costs.observe("read", 0, 7)
    assert costs.estimate("read", 0).source.startswith("options")
    costs.observe("flush", 0, 7)
    assert costs.estimate("flush", 0).duration_ns == 7
