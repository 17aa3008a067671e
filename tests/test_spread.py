"""Percentiles, against definitions that share no code with them, and against what must hold of any."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.runtime.spread import nothing, percentile, spread, spread_over_time

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)
held = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=12)


@given(values, st.integers(0, 100))
def test_a_percentile_lies_on_the_line_between_its_two_ranks(given_values: list[float], percent: int) -> None:
    ordered = [Fraction(value) for value in sorted(given_values)]
    rank = Fraction(percent * (len(ordered) - 1), 100)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    wanted = ordered[below] + (rank - below) * (ordered[above] - ordered[below])
    assert percentile(given_values, percent) == pytest.approx(float(wanted), rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_percentiles_are_the_inclusive_quantiles_of_the_standard_library(given_values: list[float]) -> None:
    cuts = statistics.quantiles(given_values, n=100, method="inclusive")
    found = spread(given_values)
    assert [found[f"p{p}"] for p in (50, 95, 99)] == pytest.approx([cuts[p - 1] for p in (50, 95, 99)], abs=1e-6)


@given(values, st.randoms())
def test_percentiles_rise_within_the_values_in_any_order(given_values: list[float], chance: object) -> None:
    shuffled = given_values.copy()
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    found = [percentile(shuffled, percent) for percent in (0, 25, 50, 95, 99, 100)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (min(given_values), max(given_values))
    assert found[2] == percentile(given_values, 50)


def test_a_spread_has_the_numbers_of_a_hand_calculation() -> None:
    assert spread([30.0, None, 10.0, 20.0]) == {"p50": 20, "p95": 29, "p99": pytest.approx(29.8), "mean": 20, "max": 30}


def test_one_value_is_all_of_its_spread() -> None:
    assert spread([7.5]) == dict.fromkeys(("p50", "p95", "p99", "mean", "max"), 7.5)


@pytest.mark.parametrize("empty", [[], [None, None]])
def test_nothing_measured_is_none_and_not_a_number_that_is_none(empty: list[None]) -> None:
    assert spread(empty) == nothing() == dict.fromkeys(("p50", "p95", "p99", "mean", "max"))


@pytest.mark.parametrize(("wrong", "percent"), [([], 50), ([1.0, math.nan], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_of_nothing_or_of_no_number_is_refused(wrong: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="at least 1, all finite"):
        percentile(wrong, percent)


def test_what_held_for_a_while_is_weighted_by_time() -> None:
    # 94 ns of 0, 5 ns of 8, 1 ns of 100
    assert spread_over_time([8, 0, 100], [5, 94, 1]) == {"p50": 0, "p95": 8, "p99": 8, "mean": 1.4, "max": 100}


@given(held)
def test_weighting_by_time_is_counting_every_nanosecond(given_held: list[tuple[int, int]]) -> None:
    every = sorted(value for value, ns in given_held for _ in range(ns))
    found = spread_over_time(*zip(*given_held, strict=True))
    if not every:
        assert found == nothing()
        return
    nearest = {f"p{p}": every[math.ceil(p * len(every) / 100) - 1] for p in (50, 95, 99)}
    assert found == nearest | {"mean": pytest.approx(statistics.fmean(every)), "max": max(every)}
