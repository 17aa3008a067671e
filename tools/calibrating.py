"""From measured points to the constants of a profile: least squares on relative residuals, with the model itself.

The model is the emulator on the virtual clock under the same benchmark (calibrating_model.py). Constants are varied in
their logarithms by damped Gauss-Newton steps, so that every point counts by its relative error, whatever its unit. The
95 % intervals are those of the linearised fit at its end. A limit that changes nothing where it was measured is not
known: it is dropped, and the profile spells it `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.tools.calibrating_model import Model
from tierloop.tools.calibrating_profile import Curve, Shape
from tierloop.tools.measuring import LINE_NBYTES, Point
from tierloop.tools.measuring_passes import Measured

_STEPS = 12
_DIFFERENCE = 0.01
_LARGEST_STEP = 0.7
_UNNEEDED = 1.02
"""A limit is dropped if the squared residuals grow by no more than this factor without it."""
_EXACT = 1e-10
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
    residuals: NDArray[np.float64]
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
    wanted = np.array([one.value for one in used])
    constants = _start(shape, used)
    names = [name for name, value in constants.items() if value is not None]
    problem = _Problem(model, wanted, constants)
    x, residuals, jacobian = problem.solve(names, lambda done: advance("fit", done, _STEPS))
    for name in [n for n in names if _is_optional(n)]:
        fewer = [n for n in names if n != name]
        problem.constants = {**problem.constants, **problem.values(names, x)}
        kept = problem.constants[name]
        problem.constants[name] = None
        start = np.array([x[names.index(n)] for n in fewer])
        other = problem.residuals(fewer, start)
        if _cost(other) > _UNNEEDED * _cost(residuals) + _EXACT * len(wanted):
            problem.constants[name] = kept
            continue
        names, x, residuals = fewer, start, other
    if len(names) < len(constants):
        x, residuals, jacobian = problem.solve(names, lambda done: advance("fit without idle limits", done, _STEPS), x)
    found = {**problem.constants, **problem.values(names, x)}
    intervals = _intervals(names, x, residuals, jacobian)
    return Fit(found, intervals, model.points, np.expm1(residuals))


def _is_optional(name: str) -> bool:
    return any(f".{key}" in name for key in _OPTIONAL)


class _Problem:
    """Residuals log(model / measured) as a function of the logarithms of named constants; the others stay."""

    def __init__(self, model: Model, wanted: NDArray[np.float64], constants: dict[str, float | None]) -> None:
        self.model = model
        self.wanted = wanted
        self.constants = constants

    def values(self, names: Sequence[str], x: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(names, np.exp(x).tolist(), strict=True))

    def residuals(self, names: Sequence[str], x: NDArray[np.float64]) -> NDArray[np.float64]:
        readings = self.model({**self.constants, **self.values(names, x)})
        got = [wanted if r is None else r.value for r, wanted in zip(readings, self.wanted, strict=True)]
        return np.log(np.maximum(got, 1e-9) / self.wanted)

    def jacobian(
        self, names: Sequence[str], x: NDArray[np.float64], residuals: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        columns = []
        for index in range(len(names)):
            moved = x.copy()
            moved[index] += _DIFFERENCE
            columns.append((self.residuals(names, moved) - residuals) / _DIFFERENCE)
        return np.stack(columns, axis=1) if columns else np.zeros((len(residuals), 0))

    def solve(
        self, names: Sequence[str], advance: Callable[[int], None], x: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """(logarithms, residuals, Jacobian) at a minimum of the squared residuals."""
        if x is None:
            x = np.log([self.constants[name] or 1.0 for name in names])
        residuals = self.residuals(names, x)
        damping = 1e-3
        jacobian = self.jacobian(names, x, residuals)
        for step in range(_STEPS):
            advance(step + 1)
            normal, slope = jacobian.T @ jacobian, jacobian.T @ residuals
            better = False
            for _ in range(6):
                damped = normal + np.diag(damping * np.diag(normal) + 1e-9)
                move = np.clip(-np.linalg.solve(damped, slope), -_LARGEST_STEP, _LARGEST_STEP)
                there = self.residuals(names, x + move)
                if _cost(there) < _cost(residuals):
                    better = True
                    break
                damping *= 5
            if not better:
                break
            gain = 1 - _cost(there) / _cost(residuals)
            x, residuals, damping = x + move, there, max(damping / 5, 1e-9)
            jacobian = self.jacobian(names, x, residuals)
            if gain < 1e-4 or _cost(residuals) < _EXACT * len(residuals):
                break
        advance(_STEPS)
        return x, residuals, jacobian


def _cost(residuals: NDArray[np.float64]) -> float:
    return float(residuals @ residuals)


def _intervals(
    names: Sequence[str], x: NDArray[np.float64], residuals: NDArray[np.float64], jacobian: NDArray[np.float64]
) -> dict[str, tuple[float, float]]:
    free = max(len(residuals) - len(names), 1)
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * _cost(residuals) / free
    widths = 1.96 * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return {
        name: (float(np.exp(at - width)), float(np.exp(at + width)))
        for name, at, width in zip(names, x, np.minimum(widths, 20.0), strict=True)
    }


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
    if shape.byte_addressable:
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
    elif shape.byte_addressable:
        constants["latency_ns"] = latency / 2
    each = min((one.point.nbytes / one.value * 1e9 for one in transfers if one.point.nbytes == smallest), default=0.0)
    if each > 1:
        constants[f"{mover}.issue_ns"] = each
    if len(alone) > 1 and alone[-1][1] > alone[-2][1]:
        slope = (alone[-1][0] - alone[-2][0]) / (alone[-1][1] - alone[-2][1]) * 1e9
        constants[f"{mover}.command_bytes_per_s"] = slope
    if not shape.byte_addressable:
        constants[f"{mover}.bytes_per_s"] = None
        scattered = [one for one in used if one.point.pattern == "random" and one.point.nbytes > one.point.span_nbytes]
        if scattered:
            first_one = min(scattered, key=lambda one: one.point.depth)
            spans = first_one.point.nbytes // first_one.point.span_nbytes
            constants[f"{mover}.span_ns"] = max(first_one.point.nbytes / first_one.value * 1e9 / spans / 2, 1.0)
    for one in used:
        if one.point.pattern == "random" and one.point.depth == 1 and one.point.span_nbytes < STREAM_NBYTES and walked:
            name = kernels if one.point.verb == "gather" else mover
            constants[f"{name}.mlp_lines.{one.point.span_nbytes}"] = max(one.value * latency / 1e9 / LINE_NBYTES, 0.1)
    return constants


def apply(constants: Mapping[str, float | None], name: str, value: float) -> dict[str, float | None]:
    """The constants with one of them changed."""
    return {**constants, name: value}
