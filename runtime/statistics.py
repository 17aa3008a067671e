"""Means with intervals: how far repeats of a run, or shares of answered questions, can be trusted.

Student's t for a mean of few values, Wilson's interval for a share, which stays within 0 and 1 and says something even
where all or none succeeded. Neither needs scipy: the quantile of t is found by bisection of its distribution function,
which for whole degrees of freedom is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NORMAL_975 = 1.959963984540054
"""The quantile of the normal distribution that leaves 2.5 % on each side."""


def mean_ci95(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % confidence interval by Student's t.

    One value says nothing of how far others would lie: its half width is infinite (null in JSON). Equal values have the
    half width 0, as a deterministic run has. Raises ValueError where there is no value, or one is not finite.
    """
    if not values or not all(math.isfinite(x) for x in values):
        raise ValueError(f"{len(values)} values, all of them finite: at least 1 is needed")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.inf
    if min(values) == max(values):
        return float(values[0]), 0.0
    variance = math.fsum((x - mean) ** 2 for x in values) / (n - 1)
    return mean, t_quantile_975(n - 1) * math.sqrt(variance / n)


def wilson_ci95(successes: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's score: (low, high); (0, 1) where nothing was tried.

    Raises ValueError unless 0 ≤ successes ≤ n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n}: successes from 0 to n are needed")
    if n == 0:
        return 0.0, 1.0
    z2 = NORMAL_975**2
    share = successes / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_975 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and n the limits are exact, and would be off by a rounding.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product, for ratios. Raises ValueError where there is no value, or one is not above 0."""
    if not values or not all(0 < x < math.inf for x in values):
        raise ValueError(f"{len(values)} values, all of them finite and above 0: at least 1 is needed")
    return math.exp(math.fsum(math.log(x) for x in values) / len(values))


def t_quantile_975(degrees: int) -> float:
    """The quantile of Student's t that leaves 2.5 % above it, for whole degrees of freedom, at least 1."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom is {degrees}; allowed: at least 1")
    low, high = NORMAL_975, 13.0  # with one degree it is 12.7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """The probability of |T| < t."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    if degrees % 2 == 0:
        term, total = 1.0, 1.0
        for i in range(2, degrees, 2):
            term *= square * (i - 1) / i
            total += term
        return math.sin(angle) * total
    term, total = math.cos(angle), 0.0
    for i in range(1, degrees, 2):
        term *= 1.0 if i == 1 else square * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total)
