"""Multiple-choice knapsack: one size for each item, so that the benefit is large and the cost within a budget.

`costs` and `benefits` are int64 (items, sizes): number j of row i is what item i costs and brings in size j, in any
order. Whole numbers, so that sums are exact and one answer is better than another or it is not. Three ways:

    optimum   the largest benefit; of equal ones the cheapest. By dynamic programming over the budget, in units of the
              largest number that divides all differences of costs; refused where that table would be too large
    greedy    the steps of the items' concave hulls by benefit per cost, then filled up with what still fits, hull or
              not; never worse than `uniform`
    uniform   the same size for all items: the most expensive one that fits

Always optimum ≥ greedy ≥ uniform, where there is a uniform answer. `best` is the optimum of a small instance and
the greedy answer of a large one.

The problem is that of KVDrive's window sizes (reference: systems.md §1.2.3: exhaustive for tiny instances, greedy by
marginal benefit per cost for real ones). The paper does not say what its greedy does with curves that are not concave,
nor with what is left; hulls and filling up are ours, and so is the exact table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

LARGEST_TABLE = 1 << 25
"""Cells of the table of `optimum`: about a second and as many bytes."""
_LARGEST_SUM = 1 << 62


@dataclass(frozen=True, eq=False)
class Choice:
    """A size for each item: `sizes` int64 (items,), what they cost together and what they bring."""

    sizes: Int64
    cost: int
    benefit: int


def best(costs: Int64, benefits: Int64, budget: int) -> Choice:
    """The optimum where it can be found, else the greedy answer. Raises ValueError."""
    _check(costs, benefits, budget)
    if _table(costs, budget)[2] <= LARGEST_TABLE:
        return optimum(costs, benefits, budget)
    return greedy(costs, benefits, budget)


def optimum(costs: Int64, benefits: Int64, budget: int) -> Choice:
    """The largest benefit there is. Raises ValueError for what cannot be, for what does not fit, and if it is large."""
    _check(costs, benefits, budget)
    unit, width, cells = _table(costs, budget)
    if cells > LARGEST_TABLE:
        raise ValueError(
            f"{len(costs)} items and a budget of {budget:,}: the exact answer needs a table of {cells:,} cells, at "
            f"most {LARGEST_TABLE:,} are allowed; greedy does without"
        )
    base = _cheapest(costs, benefits)
    extra = (costs - _of(costs, base)[:, None]) // unit
    gains = benefits - _of(benefits, base)[:, None]
    order = np.argsort(costs, axis=1, kind="stable")
    total = np.zeros(width, dtype=np.int64)
    """The largest gain of the items so far within each extra cost."""
    chosen = np.repeat(base[:, None], width, axis=1).astype(np.min_scalar_type(costs.shape[1] - 1))
    for item in range(len(costs)):
        before = total.copy()
        for size in order[item].tolist():
            more, gain = int(extra[item, size]), int(gains[item, size])
            if gain <= 0 or more >= width:
                continue
            candidates = before[: width - more] + gain
            better = candidates > total[more:]
            total[more:][better] = candidates[better]
            chosen[item, more:][better] = size
    left = int(np.argmax(total))
    sizes = np.empty(len(costs), dtype=np.int64)
    for item in reversed(range(len(costs))):
        sizes[item] = chosen[item, left]
        left -= int(extra[item, sizes[item]])
    return _choice(costs, benefits, sizes)


def greedy(costs: Int64, benefits: Int64, budget: int) -> Choice:
    """A good answer in little time, at least that of `uniform`. Raises ValueError."""
    _check(costs, benefits, budget)
    sizes = _cheapest(costs, benefits)
    steps = [step for item in range(len(costs)) for step in _hull_steps(item, costs[item], benefits[item], sizes[item])]
    steps.sort(key=lambda step: -step[0])  # stable: steps of one item stay in order
    left = budget - int(_of(costs, sizes).sum())
    for _, item, size in steps:
        more = int(costs[item, size] - costs[item, sizes[item]])
        if more <= left:
            sizes[item] = size
            left -= more
    answers = [_filled(costs, benefits, sizes, budget)]
    same = _largest_for_all(costs, budget)
    if same is not None:
        answers.append(_filled(costs, benefits, np.full(len(costs), same, dtype=np.int64), budget))
    return max(answers, key=lambda answer: (answer.benefit, -answer.cost))


def uniform(costs: Int64, benefits: Int64, budget: int) -> Choice:
    """The most expensive size that all items can have within the budget. Raises ValueError, also if none fits."""
    _check(costs, benefits, budget)
    same = _largest_for_all(costs, budget)
    if same is None:
        raise ValueError(
            f"no size fits all {len(costs)} items: the cheapest costs {int(costs.sum(axis=0).min()):,}, the budget is "
            f"{budget:,}"
        )
    return _choice(costs, benefits, np.full(len(costs), same, dtype=np.int64))


def _check(costs: Int64, benefits: Int64, budget: int) -> None:
    for name, array in (("costs", costs), ("benefits", benefits)):
        if array.dtype != np.int64 or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} of {array.ndim} dimensions; it must be int64 (items, sizes)")
        if max(int(array.max(initial=0)), -int(array.min(initial=0))) * len(array) >= _LARGEST_SUM:
            raise ValueError(f"{name} has numbers whose sum may be beyond {_LARGEST_SUM:,}")
    if costs.shape != benefits.shape or not costs.size:
        raise ValueError(
            f"costs has shape {costs.shape} and benefits {benefits.shape}; both must be (items, sizes), at least one "
            "of each"
        )
    if (costs < 0).any():
        item, size = np.argwhere(costs < 0)[0].tolist()
        raise ValueError(f"item {item} costs {costs[item, size]:,} in size {size}; a cost is at least 0")
    least = int(costs.min(axis=1).sum())
    if least > budget:
        raise ValueError(f"nothing fits: {len(costs)} items cost at least {least:,}, the budget is {budget:,}")


def _table(costs: Int64, budget: int) -> tuple[int, int, int]:
    """Unit, width and cells of the table of `optimum`."""
    extra = costs - costs.min(axis=1, keepdims=True)
    unit = int(np.gcd.reduce(extra, axis=None)) or 1
    most = min(budget - int(costs.min(axis=1).sum()), int(extra.max(axis=1).sum()))
    width = most // unit + 1
    return unit, width, width * len(costs)


def _of(table: Int64, sizes: Int64) -> Int64:
    """The number of each item's size."""
    each: Int64 = table[np.arange(len(table)), sizes]
    return each


def _cheapest(costs: Int64, benefits: Int64) -> Int64:
    """Each item's cheapest size; of several the one that brings most."""
    cheap = costs == costs.min(axis=1, keepdims=True)
    sizes: Int64 = np.where(cheap, benefits, benefits.min() - 1).argmax(axis=1)
    return sizes


def _hull_steps(item: int, costs: Int64, benefits: Int64, base: int) -> list[tuple[float, int, int]]:
    """From size to size along the concave hull, up from `base`: (benefit per cost, item, size that is reached)."""
    points = [(int(costs[base]), int(benefits[base]), int(base))]
    for size in np.lexsort((-benefits, costs)).tolist():
        cost, benefit = int(costs[size]), int(benefits[size])
        if benefit <= points[-1][1] or cost == points[-1][0]:
            continue
        while len(points) > 1 and _rises_faster(points[-2], points[-1], cost, benefit):
            points.pop()
        points.append((cost, benefit, size))
    return [((after[1] - before[1]) / (after[0] - before[0]), item, after[2]) for before, after in pairwise(points)]


def _rises_faster(first: tuple[int, int, int], second: tuple[int, int, int], cost: int, benefit: int) -> bool:
    """Whether the way from `second` to the new point is at least as steep as that from `first` to `second`."""
    return (benefit - second[1]) * (second[0] - first[0]) >= (second[1] - first[1]) * (cost - second[0])


def _filled(costs: Int64, benefits: Int64, sizes: Int64, budget: int) -> Choice:
    """Change one item after another, the most benefit per cost first, while there is anything to gain that fits."""
    sizes = sizes.copy()
    left = budget - int(_of(costs, sizes).sum())
    while True:
        more = costs - _of(costs, sizes)[:, None]
        gains = benefits - _of(benefits, sizes)[:, None]
        useful = (gains > 0) & (more <= left)
        if not useful.any():
            return _choice(costs, benefits, sizes)
        value = np.where(more > 0, gains / np.maximum(more, 1), np.inf)
        item, size = divmod(int(np.where(useful, value, -1.0).argmax()), costs.shape[1])
        left -= int(more[item, size])
        sizes[item] = size


def _largest_for_all(costs: Int64, budget: int) -> int | None:
    sums = costs.sum(axis=0)
    return int(np.where(sums <= budget, sums, -1).argmax()) if (sums <= budget).any() else None


def _choice(costs: Int64, benefits: Int64, sizes: Int64) -> Choice:
    return Choice(sizes, int(_of(costs, sizes).sum()), int(_of(benefits, sizes).sum()))
