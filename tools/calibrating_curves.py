"""Loaded latency: from the loaded points to curves of a memory, latency against the bytes/s that it moves.

The benchmark says what a chase found while streams moved so many bytes/s. A curve is over the traffic of the memory
itself: what the streams read and wrote there, and the lines of the chase. It begins at the idle latency, never falls,
and ends at the memory's cap for that mix of reads and writes, which the streams of the other points gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tierloop.tools.calibrating_profile import Curve
from tierloop.tools.measuring import LINE_NBYTES
from tierloop.tools.measuring_passes import Measured

_FLAT = 1.02
"""Latencies that rise by no more than this are those of a memory whose latency does not depend on its load."""
_APART = 1.02
"""Rates of neighbouring points of a curve differ by at least this factor."""


def curves(
    measured: Sequence[Measured], constants: Mapping[str, float | None], self_hosted: bool = True
) -> list[Curve]:
    """A curve for each read fraction at which there are loaded points; none if load changes no latency.

    `self_hosted` says that host buffers of transfers lie in the memory itself: half of what it moves is then written.
    """
    idle = next((one.value for one in measured if one.valid and one.point.verb == "chase" and not one.point.load), None)
    reads, writes = constants.get("read_bytes_per_s"), constants.get("write_bytes_per_s")
    if idle is None or not reads or not writes:
        return []
    groups: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for one in measured:
        if one.valid and one.point.pattern == "loaded":
            twice = self_hosted and one.point.load == "transfer"
            fraction = 1.0 if one.point.load == "score" else 0.5 if twice else one.point.read_fraction
            rate = one.load * (2 if twice else 1) + LINE_NBYTES * 1e9 / one.value
            groups[fraction].append((rate, one.value))
    if all(latency <= _FLAT * idle for points in groups.values() for _, latency in points):
        return []
    # Without a curve at either end the memory would have no rate of its own for pure reads.
    groups.setdefault(1.0, [])
    found = []
    for fraction, points in sorted(groups.items()):
        cap = 1 / (fraction / reads + (1 - fraction) / writes)
        count = f"{len(points)} points beside streams" if points else "the idle latency alone, for want of such streams"
        found.append(Curve(fraction, curve(idle, points, cap), f"measured: {count}"))
    return found


def curve(idle: float, points: Sequence[tuple[float, float]], cap: float) -> tuple[tuple[float, float], ...]:
    """(rate, latency) from the idle latency to the cap: rates strictly ascending, latencies never falling.

    Latencies that fall are pooled with those before them until they do not (isotonic regression): their mean is what
    the curve says in their place.
    """
    lowest = LINE_NBYTES * 1e9 / idle
    below = sorted((rate, latency) for rate, latency in points if lowest * _APART < rate < cap / _APART)
    rising = pooled([idle, *(latency for _, latency in below)])
    rising = [max(latency, idle) for latency in rising]
    found = [(min(lowest, cap / _APART**2), rising[0])]
    for (rate, _), latency in zip(below, rising[1:], strict=True):
        if rate >= found[-1][0] * _APART:
            found.append((rate, latency))
    beyond = [latency for rate, latency in points if rate >= cap / _APART]
    last = max([found[-1][1], *beyond[:1], float(np.median(beyond)) if beyond else 0.0])
    return (*found, (cap, last))


def pooled(values: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to `values` in squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            other, others = blocks.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
