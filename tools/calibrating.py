"""From measured points to the constants of a profile: least squares on relative residuals, with the model itself.

The model is the emulator on the virtual clock under the same benchmark (calibrating_model.py). Constants are varied in
their logarithms by damped Gauss-Newton steps, so that every point counts by its relative error, whatever its unit. The
95 % intervals are those of the linearised fit at its end. A limit that changes nothing where it was measured is not
known: it is dropped, and the profile spells it `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierloop.tools.calibrating_model import Model
from tierloop.tools.calibrating_profile import Curve, Shape
from tierloop.tools.calibrating_squares import STEPS, Vector, cost, intervals, minimise
from tierloop.tools.measuring import LINE_NBYTES, Point, Reading
from tierloop.tools.measuring_passes import Measured

_UNNEEDED = 1.02
"""A limit is dropped if the squared residuals grow by no more than this factor without it."""
_UNSEEN = 1e-7
"""Nor is it known if they grow by less than this for each point: 0.03 % of a value."""
_ROUNDS = 2
_OUTLIER = 0.05
"""A point that the first fit misses by this much counts 0.7 in the second, one that it misses by far hardly at all."""
_SURE = 0.02
STREAM_NBYTES = 4096
"""Spans of this size on are streams to the timing model; for smaller ones memory-level parallelism limits the rate."""
_OPTIONAL = ("span_ns", "issue_ns", "command_bytes_per_s", "bytes_per_s", "mlp_lines")


@dataclass
class Fit:
    """Constants by name (None: could not be determined), their 95 % intervals, and what is left over.

    `residuals` are model / measured − 1 for the points that were used.
    """

    constants: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    points: tuple[Point, ...]
    residuals: Vector
    curves: tuple[Curve, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        """Mean of the absolute relative residuals."""
        return float(np.abs(self.residuals).mean()) if len(self.residuals) else 0.0

    @property
    def worst_error(self) -> float:
        """The largest absolute relative residual."""
        return float(np.abs(self.residuals).max()) if len(self.residuals) else 0.0


Advance = Callable[[str, int, int], None]


def fit(shape: Shape, measured: Sequence[Measured], advance: Advance = lambda stage, done, total: None) -> Fit:
    """Fit the constants of a device to its points; loaded points come later (calibrating_curves.py)."""
    used = [one for one in measured if one.valid and one.point.pattern != "loaded"]
    model = Model(shape, [one.point for one in used], [one.host_ns for one in used])
    constants = _start(shape, used)
    names = [name for name, value in constants.items() if value is not None]
    problem = _Problem(model, used, constants)
    x = np.log([problem.constants[name] or 1.0 for name in names])
    x, residuals, slopes = minimise(problem.of(names), x, lambda done: advance("fit", done, STEPS))
    for number in range(
        _ROUNDS if np.abs(residuals).max() > _OUTLIER else 0
    ):  # what the model has no constant for must not pull at those that it has
        problem.doubt(residuals / problem.weights)
        x, residuals, slopes = minimise(problem.of(names), x)
        advance("fit, outliers apart", number + 1, _ROUNDS)
    for number in range(_ROUNDS + 1):
        fewer, x, residuals = _without_idle(problem, names, x, residuals)
        if fewer == names:
            break
        names = fewer
        x, residuals, slopes = minimise(problem.of(names), x)
        advance("fit without idle limits", number + 1, _ROUNDS + 1)
    found = {**problem.constants, **problem.values(names, x)}
    if not shape.byte_addressable:  # both directions share what moves them, so neither is limited by it
        found[f"{shape.mover}.bytes_per_s"] = max(found["read_bytes_per_s"] or 1.0, found["write_bytes_per_s"] or 1.0)
    sure = dict(zip(names, intervals(x, residuals, slopes), strict=True))
    off, kept, notes = np.expm1(residuals / problem.weights), model.points, []
    said = np.array([reading is not None for reading in model(found)])
    if not said.all():  # what it refuses is no error of 0
        notes.append(f"the model refuses {np.count_nonzero(~said)} of the points; its error says nothing about these")
        kept, off = tuple(point for point, there in zip(kept, said, strict=True) if there), off[said]
    if len(names) >= len(used):
        notes.append(f"{len(names)} constants from {len(used)} points: a model that fits them says little")
    return Fit(found, sure, kept, off, notes=notes)


def _without_idle(
    problem: _Problem, names: list[str], x: Vector, residuals: Vector
) -> tuple[list[str], Vector, Vector]:
    """(names, x, residuals) without the limits that limit nothing where it was measured, one after the other."""
    for name in [name for name in names if _is_optional(name)]:
        fewer = [other for other in names if other != name]
        before = {**problem.constants, **problem.values(names, x)}
        problem.constants = {**before, name: None}
        start = np.array([x[names.index(other)] for other in fewer])
        without = problem.of(fewer)(start)
        if cost(without) > _UNNEEDED * cost(residuals) + _UNSEEN * len(residuals):
            problem.constants = before
        else:
            names, x, residuals = fewer, start, without
    return names, x, residuals


def _is_optional(name: str) -> bool:
    return any(f".{key}" in name for key in _OPTIONAL)


class _Problem:
    """Residuals log(model / measured) as a function of the logarithms of named constants; the others stay.

    A point that was measured with an interval of ± `_SURE` has a weight of 0.7, a surer one up to 1.
    """

    def __init__(self, model: Model, used: Sequence[Measured], constants: dict[str, float | None]) -> None:
        self.model = model
        self.constants = constants
        self.wanted = np.array([one.value for one in used])
        self.weights = self.sure = np.array([1 / math.hypot(one.spread / _SURE, 1.0) for one in used])

    def doubt(self, off: Vector) -> None:
        """Let points count the less the more they are off (Cauchy's weights)."""
        self.weights = self.sure / np.sqrt(1 + (off / _OUTLIER) ** 2)

    def values(self, names: Sequence[str], x: Vector) -> dict[str, float]:
        """The constants that x stands for."""
        return dict(zip(names, np.exp(x).tolist(), strict=True))

    def of(self, names: Sequence[str]) -> Callable[[Vector], Vector]:
        """The weighted residuals as a function of these constants."""
        return lambda x: self.weights * misses(self.model({**self.constants, **self.values(names, x)}), self.wanted)


def misses(readings: Sequence[Reading | None], wanted: Vector) -> Vector:
    """log(model / measured); 0 where the model's device refuses what the real one did."""
    got = [value if reading is None else reading.value for reading, value in zip(readings, wanted, strict=True)]
    return np.log(np.maximum(got, 1e-9) / wanted)


# -- where the fit begins -----------------------------------------------------------------------------------------


def _start(shape: Shape, used: Sequence[Measured]) -> dict[str, float | None]:
    """Constants read off the points one at a time, as if nothing else were there."""
    mover, kernels = shape.mover, shape.kernels
    transfers = [one for one in used if one.point.verb == "transfer" and one.point.pattern == "sequential"]
    idle = {one.point.read_fraction: one.value for one in used if one.point.pattern == "idle"}
    walked = any(one.point.verb == "chase" for one in used)
    latency = max(idle.get(1.0, 1.0), 1.0)
    alone = sorted(
        (one.point.nbytes, one.point.nbytes / one.value * 1e9)
        for one in transfers
        if one.point.depth == 1 and one.point.read_fraction == 1.0
    )
    smallest = min((one.point.nbytes for one in transfers), default=1)
    fastest = max((one.value for one in transfers), default=1e9)
    reads = max((one.value for one in transfers if one.point.read_fraction == 1.0), default=fastest)
    writes = max((one.value for one in transfers if one.point.read_fraction == 0.0), default=fastest)
    constants: dict[str, float | None] = {"latency_ns": latency}
    if not shape.apart:
        # A transfer within one memory is read and written there: the rates add up as times.
        reads = max((one.value for one in used if one.point.verb == "score"), default=2 * fastest)
        left = 1 / fastest - 1 / reads
        writes = 1 / left if left > 0.2 / reads else reads
    constants["read_bytes_per_s"], constants["write_bytes_per_s"] = reads, writes
    if walked:
        first = alone[0][1] if alone else 0.0
        constants[f"{mover}.overhead_ns"] = max(first - 2 * latency - smallest / fastest * 1e9, 10.0)
        if kernels != mover:
            constants[f"{kernels}.overhead_ns"] = constants[f"{mover}.overhead_ns"]
    elif not shape.apart:
        constants["latency_ns"] = latency / 2
    each = min((one.point.nbytes / one.value * 1e9 for one in transfers if one.point.nbytes == smallest), default=0.0)
    if each > 1:
        constants[f"{mover}.issue_ns"] = each
    if len(alone) > 1 and alone[-1][1] > alone[-2][1]:
        slope = (alone[-1][0] - alone[-2][0]) / (alone[-1][1] - alone[-2][1]) * 1e9
        constants[f"{mover}.command_bytes_per_s"] = slope
    scattered = [
        one
        for one in used
        if one.point.verb == "transfer" and STREAM_NBYTES <= one.point.span_nbytes < one.point.nbytes
    ]
    if scattered:
        first_one = min(scattered, key=lambda one: (one.point.depth, one.point.span_nbytes))
        spans = first_one.point.nbytes // first_one.point.span_nbytes
        share = 0.5 if shape.apart else 0.2
        constants[f"{mover}.span_ns"] = max(first_one.point.nbytes / first_one.value * 1e9 / spans * share, 1.0)
    for one in used:
        if one.point.pattern == "random" and one.point.depth == 1 and one.point.span_nbytes < STREAM_NBYTES and walked:
            name = kernels if one.point.verb == "gather" else mover
            constants[f"{name}.mlp_lines.{one.point.span_nbytes}"] = max(one.value * latency / 1e9 / LINE_NBYTES, 0.1)
    return constants
