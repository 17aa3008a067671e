"""Loaded latency: from the points beside streams to curves of a memory, latency against the bytes/s that it moves.

A stream is busy for a part of its time and waits for the rest, so a chase beside it meets two memories in turn, a
loaded and an idle one. A curve therefore has a point at the rate at which k streams move while they move, and its
latency is what makes the model's chase take as long as the measured one, over all duties. A curve begins at the idle
latency, never falls, and ends at the memory's cap for that mix of reads and writes; beyond its last measured rate it is
flat, because nothing is known there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierloop.tools.calibrating import misses
from tierloop.tools.calibrating_model import Model
from tierloop.tools.calibrating_profile import Curve, Shape
from tierloop.tools.calibrating_squares import STEPS, Vector, minimise
from tierloop.tools.measuring import LINE_NBYTES, Point
from tierloop.tools.measuring_passes import Measured

_FLAT = 1.02
"""Latencies that rise by no more than this are those of a memory whose latency does not depend on its load."""
_LINE_STEPS = 4
_APART = 1.02
"""Rates of neighbouring points of a curve differ by at least this factor."""


@dataclass(frozen=True)
class _Knot:
    """A point of a curve: the latency at `rate` is to be found."""

    read_fraction: float
    rate: float


def fit_curves(
    shape: Shape,
    measured: Sequence[Measured],
    constants: Mapping[str, float | None],
    advance: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[tuple[Curve, ...], dict[Point, float]]:
    """A curve for each read fraction at which there are loaded points, and model / measured − 1 at each of them.

    No curve if load changes no latency. Transfers read and write the memory where host buffers lie in it too, and only
    read it where those lie apart.
    """
    used = [one for one in measured if one.valid and one.point.pattern == "loaded"]
    idle = constants.get("latency_ns")
    reads, writes = constants.get("read_bytes_per_s"), constants.get("write_bytes_per_s")
    walked = next((one for one in measured if one.valid and one.point.verb == "chase" and not one.point.load), None)
    if not used or walked is None or not idle or not reads or not writes:
        return (), {}
    wanted = np.array([one.value for one in used])
    model = Model(shape, [one.point for one in used])
    if wanted.max() <= _FLAT * walked.value:
        return (), _misfit(model(constants, ()), used, wanted)
    each = constants.get(f"{shape.mover}.command_bytes_per_s") or float("inf")
    fractions = (0.0, 0.5, 1.0) if shape.apart else (0.5, 1.0)
    caps = {fraction: 1 / (fraction / reads + (1 - fraction) / writes) for fraction in fractions}
    knots = _knots(used, each, caps, shape.apart)

    def curves(x: Vector) -> tuple[Curve, ...]:
        return _curves(knots, idle * np.exp(x), idle, caps)

    def residuals(x: Vector) -> Vector:
        return misses(model(constants, curves(x)), wanted)

    start = np.array([_start(knot, used, walked.value, each, caps, shape.apart) for knot in knots])
    x, _, _ = minimise(residuals, start, lambda done: advance("loaded latency", done, STEPS))
    found = curves(x)
    return found, _misfit(model(constants, found), used, wanted)


def refit_lines(
    shape: Shape, measured: Sequence[Measured], constants: Mapping[str, float | None], curves: Sequence[Curve]
) -> tuple[dict[str, float | None], dict[Point, float]]:
    """The constants with lines under way that give the measured rates under these curves, and what is left over.

    Scattered rows load the memory themselves, so they meet the latency of the curve, not that of an idle memory.
    """
    found = dict(constants)
    names = {
        one.point: f"{shape.kernels if one.point.verb == 'gather' else shape.mover}.mlp_lines.{one.point.span_nbytes}"
        for one in measured
        if one.valid and one.point.pattern == "random" and one.point.depth == 1
    }
    used = [one for one in measured if one.valid and found.get(names.get(one.point, ""))]
    if not used or not curves:
        return found, {}
    model = Model(shape, [one.point for one in used], [one.host_ns for one in used])
    wanted = np.array([one.value for one in used])
    for _ in range(_LINE_STEPS):
        off = misses(model(found, curves), wanted)
        for one, part in zip(used, off, strict=True):
            found[names[one.point]] = (found[names[one.point]] or 1.0) / float(np.exp(part))
    return found, _misfit(model(found, curves), used, wanted)


def _misfit(readings: Sequence[object], used: Sequence[Measured], wanted: Vector) -> dict[Point, float]:
    off = np.expm1(misses(readings, wanted))  # type: ignore[arg-type]  # readings of a model
    return {one.point: float(part) for one, part in zip(used, off, strict=True)}


def _fraction(point: Point, apart: bool) -> float:
    """The share of reads in what the streams of a point make the memory move."""
    return 1.0 if apart or point.load == "score" else 0.5


def _rate(point: Point, each: float, caps: Mapping[float, float], apart: bool) -> float:
    """Bytes/s that the memory moves while all streams of a point do."""
    cap = caps[_fraction(point, apart)]
    if point.load == "score":  # a kernel takes all that there is
        return cap
    rate = (1 if apart else 2) * point.depth * each
    return cap if rate * _APART >= cap else rate


def _knots(used: Sequence[Measured], each: float, caps: Mapping[float, float], apart: bool) -> list[_Knot]:
    found = {(_fraction(one.point, apart), _rate(one.point, each, caps, apart)) for one in used}
    return [_Knot(*pair) for pair in sorted(found)]


def _start(
    knot: _Knot, used: Sequence[Measured], idle: float, each: float, caps: Mapping[float, float], apart: bool
) -> float:
    """The logarithm of latency / idle latency at the busiest point of a knot."""
    here = [
        one
        for one in used
        if _fraction(one.point, apart) == knot.read_fraction and _rate(one.point, each, caps, apart) == knot.rate
    ]
    busiest = max(here, key=lambda one: one.point.duty)
    return float(np.log(max(busiest.value / idle, 1.0)))


def _curves(knots: Sequence[_Knot], latencies: Vector, idle: float, caps: Mapping[float, float]) -> tuple[Curve, ...]:
    found = []
    for fraction, cap in caps.items():
        points = [(min(LINE_NBYTES * 1e9 / idle, cap / _APART**2), idle)]
        mine = [
            (knot.rate, value) for knot, value in zip(knots, latencies, strict=True) if knot.read_fraction == fraction
        ]
        for (rate, _), latency in zip(mine, pooled([latency for _, latency in mine]), strict=True):
            if rate >= points[-1][0] * _APART:
                points.append((rate, max(latency, points[-1][1])))
        if points[-1][0] < cap:
            points.append((cap, points[-1][1]))
        count = f"at {len(mine)} rates of streams" if mine else "the idle latency alone, for want of such streams"
        found.append(Curve(fraction, tuple(points), f"measured: {count}"))
    return tuple(found)


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
