"""How far values are spread: percentiles, mean and largest, of values and of what held for a while.

Percentiles of values interpolate linearly between the two nearest ranks, as NumPy and the benchmarks of serving systems
do. Of what held for a while they are weighted by time and not interpolated: a queue has no 2.5 requests in it. Where
there is nothing to measure, each is None, which JSON can say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Spread = dict[str, float | None]
"""p50, p95, p99, mean and max; all None where nothing was measured."""

PERCENTS = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at rank percent / 100 · (n − 1) of n sorted values, linear between neighbours.

    Raises ValueError without values, for one that is not finite, and for a percentage outside 0 to 100.
    """
    if not values or not all(map(math.isfinite, values)) or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values: 0 to 100 of at least 1, all finite, is needed")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def spread(values: Iterable[float | None]) -> Spread:
    """Percentiles, mean and largest of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return nothing()
    found: Spread = {f"p{percent}": percentile(known, percent) for percent in PERCENTS}
    return found | {"mean": math.fsum(known) / len(known), "max": float(max(known))}


def spread_over_time(values: Sequence[int], held_ns: Sequence[int]) -> Spread:
    """The same of values that each held for some ns; percentile p is the least value not exceeded for p % of the time.

    All None where no time passed.
    """
    total = sum(held_ns)
    if not total:
        return nothing()
    held = sorted((value, ns) for value, ns in zip(values, held_ns, strict=True) if ns > 0)
    found: Spread = {}
    for percent in PERCENTS:
        passed = 0
        for value, ns in held:
            passed += ns
            if 100 * passed >= percent * total:
                found[f"p{percent}"] = float(value)
                break
    mean = sum(value * ns for value, ns in held) / total
    return found | {"mean": mean, "max": float(held[-1][0])}


def nothing() -> Spread:
    """The spread of no values."""
    return dict.fromkeys((*(f"p{percent}" for percent in PERCENTS), "mean", "max"))
