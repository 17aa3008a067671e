"""The multiple-choice knapsack against trying everything."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.runtime import knapsack
from tierloop.runtime.knapsack import Choice, best, greedy, optimum, uniform

Int64 = NDArray[np.int64]


def table(rows: list[list[int]]) -> Int64:
    return np.array(rows, dtype=np.int64)


def by_trying(costs: Int64, benefits: Int64, budget: int) -> tuple[int, int]:
    """(benefit, −cost) of the best of all choices."""
    items, sizes = costs.shape
    every = itertools.product(range(sizes), repeat=items)
    pairs = ((sum(costs[i, s] for i, s in enumerate(c)), sum(benefits[i, s] for i, s in enumerate(c))) for c in every)
    return max((int(benefit), -int(cost)) for cost, benefit in pairs if cost <= budget)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Int64, Int64, int]:
    """Few items; a common factor in the costs, costs that are equal, benefits that are not concave nor rising."""
    items, sizes, unit = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 7, 512]))
    numbers = st.lists(st.integers(0, 12), min_size=items * sizes, max_size=items * sizes)
    costs = np.array(draw(numbers), dtype=np.int64).reshape(items, sizes) * unit
    benefits = np.array(draw(numbers), dtype=np.int64).reshape(items, sizes) - draw(st.integers(0, 5))
    least = int(costs.min(axis=1).sum())
    return costs, benefits, draw(st.integers(least, int(costs.max(axis=1).sum()) + 1))


def is_sound(answer: Choice, costs: Int64, benefits: Int64, budget: int) -> bool:
    each = np.arange(len(costs)), answer.sizes
    return bool(answer.cost == costs[each].sum() <= budget and answer.benefit == benefits[each].sum())


@settings(max_examples=200)
@given(instances())
@example((table([[0, 0], [3, 3]]), table([[1, 2], [1, 1]]), 3))
def test_the_optimum_is_the_best_of_all_choices_and_the_cheapest_of_equal_ones(case: tuple[Int64, Int64, int]) -> None:
    answer = optimum(*case)
    assert is_sound(answer, *case)
    assert (answer.benefit, -answer.cost) == by_trying(*case)


@settings(max_examples=300)
@given(instances())
def test_optimum_is_at_least_greedy_and_greedy_at_least_uniform(case: tuple[Int64, Int64, int]) -> None:
    costs, _, budget = case
    filled = greedy(*case)
    assert is_sound(filled, *case)
    assert filled.benefit <= optimum(*case).benefit
    if (costs.sum(axis=0) <= budget).any():
        same = uniform(*case)
        assert is_sound(same, *case)
        assert same.benefit <= filled.benefit


@settings(max_examples=200)
@given(instances())
def test_nothing_that_greedy_left_out_would_still_fit(case: tuple[Int64, Int64, int]) -> None:
    costs, benefits, budget = case
    answer = greedy(*case)
    for item, size in itertools.product(range(costs.shape[0]), range(costs.shape[1])):
        changed = answer.sizes.copy()
        changed[item] = size
        each = np.arange(len(costs)), changed
        assert costs[each].sum() > budget or benefits[each].sum() <= answer.benefit


def test_uniform_takes_the_largest_size_that_all_can_have() -> None:
    costs = table([[0, 4, 8], [0, 4, 8], [0, 4, 8]])
    benefits = table([[0, 3, 9], [0, 3, 3], [0, 3, 4]])
    assert uniform(costs, benefits, 23).sizes.tolist() == [1, 1, 1]
    assert uniform(costs, benefits, 24).sizes.tolist() == [2, 2, 2]
    assert uniform(costs, benefits, 3).sizes.tolist() == [0, 0, 0]


def test_greedy_steps_over_a_dip_in_the_benefit() -> None:
    """The first size of item 0 is worth little by itself; its second is the best buy of all."""
    costs, benefits = table([[0, 1, 2], [0, 1, 2]]), table([[0, 1, 10], [0, 4, 5]])
    assert greedy(costs, benefits, 2).sizes.tolist() == [2, 0]
    assert greedy(costs, benefits, 3).sizes.tolist() == [2, 1]


def test_greedy_goes_on_after_a_step_that_does_not_fit() -> None:
    costs, benefits = table([[0, 10], [0, 2]]), table([[0, 100], [0, 1]])
    assert greedy(costs, benefits, 9).sizes.tolist() == [0, 1]


def test_greedy_fills_up_with_sizes_that_are_on_no_hull() -> None:
    costs, benefits = table([[0, 3, 4]]), table([[0, 1, 8]])
    assert greedy(costs, benefits, 3).sizes.tolist() == [1]


def test_greedy_is_as_good_as_uniform_where_its_own_steps_lead_astray() -> None:
    """The step of most benefit per cost goes to the largest size, and what is left is enough for nothing."""
    costs, benefits = table([[0, 5, 6], [0, 5, 6]]), table([[0, 5, 9], [0, 5, 9]])
    assert greedy(costs, benefits, 10).sizes.tolist() == uniform(costs, benefits, 10).sizes.tolist() == [1, 1]


def test_sizes_of_many_heads_have_an_exact_answer_where_costs_share_a_factor() -> None:
    """32 layers of 8 heads, windows of 0 to 4 times 512 entries: the table counts in units of 512."""
    random = np.random.default_rng(1)
    costs = np.tile(np.arange(5) * 512, (256, 1))
    benefits = np.cumsum(random.integers(0, 1000, (256, 5)), axis=1)
    budget = 256 * 512 * 2
    exact = best(costs, benefits, budget)
    assert exact.cost <= budget
    assert exact.benefit == optimum(costs, benefits, budget).benefit
    assert exact.benefit >= greedy(costs, benefits, budget).benefit > uniform(costs, benefits, budget).benefit


def test_greedy_reaches_the_optimum_of_concave_curves_when_nothing_is_left() -> None:
    random = np.random.default_rng(2)
    benefits = np.cumsum(-np.sort(-random.integers(1, 1000, (20, 5)), axis=1), axis=1)
    costs = np.tile(np.arange(5), (20, 1))
    for budget in (0, 7, 33, 80):
        assert greedy(costs, benefits, budget).benefit == optimum(costs, benefits, budget).benefit


def test_large_instances_are_refused_or_answered_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, benefits = table([[0, 7], [0, 5]]), table([[0, 3], [0, 4]])
    monkeypatch.setattr(knapsack, "LARGEST_TABLE", 16)
    assert best(costs, benefits, 7).benefit == optimum(costs, benefits, 7).benefit == 4
    monkeypatch.setattr(knapsack, "LARGEST_TABLE", 15)
    with pytest.raises(ValueError, match=r"2 items and a budget of 7: .* a table of 16 cells, at most 15 are allowed"):
        optimum(costs, benefits, 7)
    assert best(costs, benefits, 7).sizes.tolist() == greedy(costs, benefits, 7).sizes.tolist()


@pytest.mark.parametrize("solve", [best, optimum, greedy, uniform])
@pytest.mark.parametrize(
    ("costs", "benefits", "budget", "message"),
    [
        (table([[1, -2]]), table([[0, 1]]), 5, "item 0 costs -2 in size 1; a cost is at least 0"),
        (table([[3, 4], [5, 6]]), table([[0, 1], [0, 1]]), 7, "nothing fits: 2 items cost at least 8, the budget is 7"),
        (table([[1, 2]]), table([[0]]), 5, r"shape \(1, 2\) and benefits \(1, 1\)"),
        (table([]).reshape(0, 2), table([]).reshape(0, 2), 5, "at least one"),
        (table([[1]]), np.array([[0.5]]), 5, "benefits is float64 of 2 dimensions"),
        (np.array([1]), table([[1]]), 5, "costs is int64 of 1 dimensions"),
        (table([[1 << 62]]), table([[1]]), 1 << 62, "costs has numbers whose sum may be beyond"),
        (table([[1]]), table([[-1 << 63]]), 5, "benefits has numbers whose sum may be beyond"),
    ],
)
def test_bad_input_is_refused(solve: Any, costs: Any, benefits: Any, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(costs, benefits, budget)


def test_uniform_says_when_only_different_sizes_would_fit() -> None:
    costs, benefits = table([[0, 9], [9, 0]]), table([[1, 1], [1, 1]])
    assert greedy(costs, benefits, 3).cost == 0
    with pytest.raises(ValueError, match="no size fits all 2 items: the cheapest costs 9, the budget is 3"):
        uniform(costs, benefits, 3)
