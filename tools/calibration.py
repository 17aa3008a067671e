"""A calibration from the device to the profile's text: measure, fit, write down. No terminal, no exit codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import ClockKind
from tierloop.tools.calibrating import Fit, fit
from tierloop.tools.calibrating_curves import fit_curves, refit_lines
from tierloop.tools.calibrating_profile import Shape, point_json, profile_text
from tierloop.tools.measuring import Rig, Subject, usable_cores
from tierloop.tools.measuring_passes import Journal, Measured, measure
from tierloop.tools.measuring_plan import Plan, plan
from tierloop.tools.measuring_subjects import open_subject

Advance = Callable[[str, int, int], None]
MODEL_LIMIT = 0.10
"""A model whose mean error is larger does not describe the device: the calibration ends with exit code 1."""
ENOUGH = 0.8
"""Share of the points that need a value; with fewer, the calibration says so and ends with exit code 3."""
_MOST_STREAMS = 3


@dataclass(frozen=True)
class Calibration:
    """What a calibration found. `text` is the profile, `journal` what can be removed once that is written."""

    device: str
    text: str
    fit: Fit
    measured: list[Measured]
    journal: Journal
    dilation: int

    @property
    def enough(self) -> bool:
        """Whether enough of the points have a value."""
        return sum(one.valid for one in self.measured) >= ENOUGH * len(self.measured)

    @property
    def described(self) -> bool:
        """Whether the model stands for the device at all."""
        return self.fit.mean_error <= MODEL_LIMIT

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and interval of every constant, as text."""
        found = []
        for name, value in sorted(self.fit.constants.items()):
            low, high = self.fit.intervals.get(name, (0.0, 0.0))
            shown = "unknown" if value is None else f"{value:,.4g}"
            found.append((name, shown, "" if value is None else f"{low:,.4g} … {high:,.4g}"))
        return found

    def remarks(self) -> list[str]:
        """How well the constants stand for what was measured, and what could not be."""
        lines = [
            f"the model is off by {self.fit.mean_error:.2%} in the mean and {self.fit.worst_error:.2%} at worst, over "
            f"{len(self.fit.residuals)} points"
        ]
        lines += [f"not measured: {one.point}: {one.reason}" for one in self.measured if not one.valid]
        return [*lines, *self.fit.notes]

    def to_json(self, output: str) -> dict[str, Any]:
        """Plain data."""
        residuals = dict(zip(self.fit.points, self.fit.residuals.tolist(), strict=True))
        return {
            "device": self.device,
            "profile": output,
            "dilation": self.dilation,
            "constants": {
                name: {
                    "value": "unknown" if value is None else value,
                    "ci95_low": self.fit.intervals[name][0] if name in self.fit.intervals else None,
                    "ci95_high": self.fit.intervals[name][1] if name in self.fit.intervals else None,
                }
                for name, value in self.fit.constants.items()
            },
            "unknown": sorted(name for name, value in self.fit.constants.items() if value is None),
            "mean_residual_pct": 100 * self.fit.mean_error,
            "max_residual_pct": 100 * self.fit.worst_error,
            "points": [
                {**point_json(one), "residual_pct": _percent(residuals.get(one.point))}
                for one in self.measured
                if one.valid
            ],
            "invalid_points": [{**one.point.to_json(), "reason": one.reason} for one in self.measured if not one.valid],
            "notes": self.fit.notes,
        }


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def run_calibration(
    device: str,
    journal: Path,
    machine: str,
    date: str,
    quick: bool = False,
    resume: bool = False,
    scratch: bool = False,
    passes: int | None = None,
    seed: int = 0,
    clock: ClockKind | None = None,
    dilation: int | None = None,
    advance: Advance = lambda stage, done, total: None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Calibration:
    """Calibrate a device by its name on the command line; `change` may make the plan smaller.

    Raises ConfigurationError, OutputError, and what the device raises.
    """
    with open_subject(device, clock, dilation, scratch) as subject:
        chosen = change(plan(subject, quick, most_streams(subject)))
        chosen = replace(chosen, seed=seed, passes=passes or chosen.passes)
        header = {"device": device, "clock": clock or "", "dilation": subject.dilation, "plan": chosen.to_json()}
        kept = Journal(journal, {**header, "info": subject.memory.name, "machine": machine}, resume)
        with kept:
            rig = Rig(subject, chosen.pool_nbytes, seed)
            measured = measure(rig, chosen, advance, kept)
            rig.close()
        shape = Shape.of(subject)
        sigma = subject.dilation
    text, found = profile_of(shape, measured, machine, date, device, advance)
    return Calibration(device, text, found, measured, kept, sigma)


def most_streams(subject: Subject) -> int:
    """Streams beside a chase: each needs a core of its own, or what is measured is the system's scheduler."""
    return _MOST_STREAMS if subject.clock.virtual else min(_MOST_STREAMS, usable_cores() - 1)


def profile_of(
    shape: Shape, measured: list[Measured], machine: str, date: str, device: str, advance: Advance
) -> tuple[str, Fit]:
    """The profile's text and the fit behind it. Raises ConfigurationError if there is nothing to fit."""
    if not any(one.valid and one.point.unit == "bytes_per_s" for one in measured):
        reasons = sorted({one.reason for one in measured if one.reason})
        raise ConfigurationError(f"{device}: no point could be measured: {'; '.join(reasons[:3])}")
    found = fit(shape, measured, advance)
    where = f"on {machine}, {date}"
    curves, misfit = fit_curves(shape, measured, found.constants, advance)
    found.curves = tuple(replace(one, source=f"{one.source}, {where}") for one in curves)
    lines, changed = refit_lines(shape, measured, found.constants, curves)
    for name, (low, high) in found.intervals.items():
        scale = (lines[name] or 1.0) / (found.constants[name] or 1.0)
        found.intervals[name] = (low * scale, high * scale)
    found.constants = lines
    found.residuals = np.array(
        [changed.get(point, off) for point, off in zip(found.points, found.residuals, strict=True)]
    )
    found.points += tuple(misfit)
    found.residuals = np.append(found.residuals, list(misfit.values()))
    sources = {"capacity": f"measured: as the device says, {where}"}
    for name, value in found.constants.items():
        if value is None:
            sources[name] = f"measured: no such limit in the range of the points, {where}"
        else:
            low, high = found.intervals.get(name, (value, value))
            sources[name] = f"measured: 95 % CI [{low:.4g}, {high:.4g}], {where}"
    if f"{shape.mover}.bytes_per_s" in found.constants and not shape.byte_addressable:
        sources[f"{shape.mover}.bytes_per_s"] = f"measured: the larger of both directions, {where}"
    for executor in shape.executors:
        table = f"{executor.name}.mlp_lines"
        parts = [name for name in found.constants if name.startswith(f"{table}.")]
        if parts:
            text = "; ".join(
                f"{name.rpartition('.')[2]} B: [{found.intervals[name][0]:.3g}, {found.intervals[name][1]:.3g}]"
                for name in parts
                if name in found.intervals
            )
            sources[table] = f"measured: 95 % CI {text or 'none'}, {where}"
        sources.setdefault(f"{executor.name}.overhead_ns", f"measured: not apart from the latency, {where}")
    unknown = sorted(name for name, value in found.constants.items() if value is None)
    calibration: dict[str, str | int | float | Sequence[str]] = {
        "machine": machine,
        "date": date,
        "device": device,
        "host_apart": shape.apart,
        "mean_residual_pct": float(f"{100 * found.mean_error:.4g}"),
        "max_residual_pct": float(f"{100 * found.worst_error:.4g}"),
        "unknown": unknown,
    }
    return profile_text(
        shape, found.constants, found.curves, sources, calibration, [one for one in measured if one.valid]
    ), found
