"""Means with intervals, against published tables and against what the words promise."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.runtime.statistics import geometric_mean, mean_ci95, t_quantile_975, wilson_ci95

# Any printed table of Student's t, two-sided 95 %.
T_TABLE = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131,
    20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980, 1000: 1.962,
}  # fmt: skip


@pytest.mark.parametrize("degrees", T_TABLE)
def test_quantiles_of_t_are_those_of_the_tables(degrees: int) -> None:
    assert round(t_quantile_975(degrees), 3) == T_TABLE[degrees]


def test_the_first_two_quantiles_of_t_are_those_of_their_closed_forms() -> None:
    assert t_quantile_975(1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-12)
    assert t_quantile_975(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)


def test_a_mean_of_three_has_the_half_width_of_the_textbook() -> None:
    mean, half = mean_ci95([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_the_half_width_is_t_times_the_standard_error(values: list[float]) -> None:
    mean, half = mean_ci95(values)
    assert mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert half == pytest.approx(t_quantile_975(len(values) - 1) * error, rel=1e-6, abs=1e-9)


def test_of_repeated_experiments_95_in_100_hold_the_true_mean() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(4000):
        mean, half = mean_ci95([chance.gauss(7, 3) for _ in range(4)])
        held += abs(mean - 7) <= half
    assert held / 4000 == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_finite_width_and_equal_ones_have_none() -> None:
    assert mean_ci95([5.0]) == (5.0, math.inf)
    assert mean_ci95([0.1, 0.1, 0.1]) == (0.1, 0.0)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_a_mean_of_nothing_or_of_no_numbers_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 1 is needed"):
        mean_ci95(values)


# Newcombe (1998), Statistics in Medicine 17, table I, method 3.
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_of_shares_are_those_that_were_published(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_ci95(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(0, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_of_a_share_lies_within_0_and_1_around_it(tried: tuple[int, int]) -> None:
    successes, n = tried
    low, high = wilson_ci95(successes, n)
    assert 0 <= low <= (successes / n if n else 0.5) <= high <= 1
    mirrored = wilson_ci95(n - successes, n)
    assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]), abs=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5), (0, -1)])
def test_a_share_that_cannot_be_is_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes from 0 to n"):
        wilson_ci95(successes, n)


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1)
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0], [math.inf]])
def test_a_geometric_mean_of_what_is_not_above_0_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        geometric_mean(values)
