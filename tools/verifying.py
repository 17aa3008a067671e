"""Verification: a profile's emulation under the benchmark that measured the real thing, point by point.

What is expected stands in the profile (`[[calibration.points]]`: it was measured on the real device); a profile without
points is compared with its own model on the virtual clock, which leaves the error of the emulator's pacing alone.
Nothing is hidden: a point whose emulation was invalid, whose device refuses it, or whose calibration is less sure than
the tolerance is no error and no success; it lowers the coverage and is listed with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.host_speed import HEADROOM, host_speed, smallest_dilation
from tierloop.devices.registry import ClockKind
from tierloop.devices.tables import Table, read_toml
from tierloop.emulators.parts import Profile
from tierloop.emulators.profile import read_profile
from tierloop.tools.calibrating_model import emulate, predict
from tierloop.tools.calibration import most_streams
from tierloop.tools.measuring import Point, Rig, Subject
from tierloop.tools.measuring_passes import VERSION, measure
from tierloop.tools.measuring_plan import Plan, check_points, plan, pool_nbytes, room_for
from tierloop.tools.measuring_subjects import open_subject

Advance = Callable[[str, int, int], None]
COVERAGE = 0.8
"""Share of the points that has to be compared; below, a verification says nothing (exit code 3)."""
_LARGEST = 1 << 40
_HOST_PERCENT = 0.3
"""How much of the shortest command the host may take to carry it out, where times are stretched."""


@dataclass(frozen=True)
class Bounds:
    """Errors that are still good, as parts: the mean and the worst of latencies, and of rates."""

    mean: float
    latency: float
    rate: float

    @classmethod
    def of(cls, profile: Profile) -> Bounds:
        """Memories: mean 3 %, worst 5 %. Drives: latency 10 %, bandwidth 5 %, and so the mean."""
        drive = profile.memory is not None and not profile.memory.byte_addressable
        return cls(0.05, 0.10, 0.05) if drive else cls(0.03, 0.05, 0.05)

    def worst(self, point: Point) -> float:
        """The bound of one point."""
        return self.latency if point.unit == "latency_ns" else self.rate


@dataclass(frozen=True)
class Expected:
    """A point of a profile: what was measured, its 95 % interval, and what the benchmark took for itself."""

    point: Point
    value: float
    low: float
    high: float
    host_ns: int = 0

    @property
    def spread(self) -> float:
        """Half the width of the interval as a part of the value."""
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True)
class Compared:
    """One point: expected, what the model says, what the emulation gave (0: nothing), and why it does not count."""

    expected: Expected
    model: float
    got: float
    reason: str = ""
    got_low: float = 0.0
    got_high: float = 0.0
    real: float = 0.0

    @property
    def error(self) -> float:
        """(got − expected) / expected."""
        return (self.got - self.expected.value) / self.expected.value

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **self.expected.point.to_json(),
            "unit": self.expected.point.unit,
            "expected": self.expected.value,
            "expected_ci95": [self.expected.low, self.expected.high],
            "model": self.model or None,
            "got": self.got or None,
            "got_ci95": [self.got_low, self.got_high] if self.got else None,
            "real_now": self.real or None,
            "error_pct": 100 * self.error if self.got else None,
            "valid": not self.reason,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Verification:
    """The result of a verification."""

    profile: str
    clock: str
    dilation: int
    bounds: Bounds
    points: tuple[Compared, ...]
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Compared]:
        """The points that count."""
        return [one for one in self.points if not one.reason]

    @property
    def coverage(self) -> float:
        """Share of the points that count."""
        return len(self.counted) / len(self.points) if self.points else 0.0

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors of points that count."""
        return sum(abs(one.error) for one in self.counted) / max(len(self.counted), 1)

    @property
    def max_error(self) -> float:
        """The largest absolute error of a point that counts."""
        return max((abs(one.error) for one in self.counted), default=0.0)

    @property
    def failures(self) -> list[str]:
        """Bounds that were not kept."""
        found = []
        if self.mean_error > self.bounds.mean:
            found.append(f"mean error {self.mean_error:.2%} is above {self.bounds.mean:.2%}")
        found += [
            f"{one.expected.point}: {one.error:+.2%} is beyond {self.bounds.worst(one.expected.point):.2%}"
            for one in self.counted
            if abs(one.error) > self.bounds.worst(one.expected.point)
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "profile": self.profile,
            "clock": self.clock,
            "dilation": self.dilation,
            "mean_error_pct": 100 * self.mean_error,
            "max_error_pct": 100 * self.max_error,
            "coverage": self.coverage,
            "bounds_pct": {
                "mean": 100 * self.bounds.mean,
                "latency": 100 * self.bounds.latency,
                "rate": 100 * self.bounds.rate,
            },
            "invalid_points": [one.to_json() for one in self.points if one.reason],
            "failures": self.failures,
            "notes": list(self.notes),
            "points": [one.to_json() for one in self.points],
        }


def verify(
    path: Path,
    clock: ClockKind = "wall",
    dilation: int | None = None,
    device: str | None = None,
    scratch: bool = False,
    quick: bool = False,
    bounds: Bounds | None = None,
    seed: int = 0,
    advance: Advance = lambda stage, done, total: None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Verification:
    """Emulate a profile, measure it again, and compare with what it holds; with `device`, measure that again as well.

    Raises ConfigurationError (the file and key that are wrong), and what a device raises.
    """
    profile = read_profile(path)
    text = path.read_text(encoding="utf-8")
    memory = profile.memory
    if memory is None:
        raise ConfigurationError(f"{path}: the device has no memory, so there is nothing to measure")
    rate = max(memory.read_bytes_per_s, memory.write_bytes_per_s)
    if memory.flash is not None:
        rate = memory.flash.channels * memory.flash.channel_bytes_per_s
    if memory.pnm is not None:
        rate = memory.pnm.channels * memory.pnm.channel_bytes_per_s
    expected = read_points(path)
    place = (text, _host_apart(path, memory.byte_addressable), max(rate, 1_000_000))
    notes = []
    with emulate(*place, "virtual") as emulation:
        if not expected:
            chosen = plan(emulation.subject, quick, most_streams(emulation.subject))
            points = chosen.points
            notes.append("the profile holds no measured points: expected is what its model says on the virtual clock")
        else:
            points = tuple(one.point for one in expected)
        infos = [device_.info for device_ in emulation.devices]
        _fits(emulation.subject, points, quick, memory.byte_addressable, str(path))
    if device is not None:  # before anything is measured
        with open_subject(device, scratch=scratch) as subject:
            _fits(subject, points, quick, memory.byte_addressable, f"--device {device}")
    readings = predict(text, points, *place[1:], [one.host_ns for one in expected])
    if not expected:
        expected = [
            Expected(point, reading.value, reading.value, reading.value)
            for point, reading in zip(points, readings, strict=True)
            if reading is not None
        ]
        readings = [reading for reading in readings if reading is not None]
        if not expected:
            raise ConfigurationError(f"{path}: no point of the benchmark can be measured on such a device")
    chosen_bounds = bounds or Bounds.of(profile)
    sigma = dilation
    if clock == "wall" and sigma is None:
        sigma = automatic(infos, list(expected))
    late = max(chosen_bounds.latency, chosen_bounds.rate)
    if sigma != 1:  # without dilation the host's share cannot be made smaller, so only what breaks the bound is invalid
        late /= 4
    with emulate(*place, clock, sigma) as emulation:
        subject = emulation.subject
        chosen = change(_plan(subject, [one.point for one in expected], quick, seed))
        rig = Rig(subject, chosen.pool_nbytes, seed)
        got = measure(rig, chosen, advance, None, late, [one.host_ns for one in expected])
        rig.close()
        sigma = subject.dilation
    real = _again(device, scratch, expected, quick, seed, advance, change) if device is not None else None
    compared = []
    for number, (one, reading, now) in enumerate(zip(expected, readings, got, strict=True)):
        tolerance = chosen_bounds.worst(one.point)
        again = real[number] if real is not None else None
        target = one
        if again is not None and again.valid:
            target = replace(one, value=again.value, low=again.interval[0], high=again.interval[1])
        reason = ""
        if not now.valid:
            reason = f"invalid: {now.reason}" if not now.refused else now.refused
        elif target.spread > tolerance:
            reason = f"measured to ± {target.spread:.1%} only, which is wider than {tolerance:.1%}"
        low, high = now.interval if now.valid else (0.0, 0.0)
        value = now.value if now.valid else (now.rejected[-1] if now.rejected else 0.0)
        model = reading.value if reading is not None else 0.0
        compared.append(
            Compared(target, model, value, reason, low, high, again.value if again and again.valid else 0.0)
        )
    return Verification(str(path), clock, sigma or 1, chosen_bounds, tuple(compared), tuple(notes))


def _plan(subject: Subject, points: Sequence[Point], quick: bool, seed: int) -> Plan:
    chosen = plan(subject, quick)
    pool = max(chosen.pool_nbytes, room_for(points, subject.memory.alignment))
    passes = 1 if subject.clock.virtual else 2 if quick else 3
    window_ns = chosen.window_ns if subject.clock.virtual else 3_000_000
    return Plan(tuple(points), pool, passes, window_ns, 1, seed)


def _fits(subject: Subject, points: Sequence[Point], quick: bool, bytes_: bool, whose: str) -> None:
    """See that the points of a profile can be measured on a subject. Raises ConfigurationError."""
    if subject.memory.byte_addressable != bytes_:
        kinds = ("bytes", "blocks") if bytes_ else ("blocks", "bytes")
        raise ConfigurationError(f"{whose}: a memory of {kinds[1]}, but the profile is that of a memory of {kinds[0]}")
    pool = max(pool_nbytes(subject, quick), room_for(points, subject.memory.alignment))
    check_points(subject, points, pool, whose)


def _again(
    device: str,
    scratch: bool,
    expected: Sequence[Expected],
    quick: bool,
    seed: int,
    advance: Advance,
    change: Callable[[Plan], Plan],
) -> list[Any]:
    """The real device, measured once more at the same points."""
    with open_subject(device, scratch=scratch) as subject:
        chosen = plan(subject, quick, most_streams(subject))
        points = tuple(one.point for one in expected)
        pool = max(chosen.pool_nbytes, room_for(points, subject.memory.alignment))
        chosen = change(replace(chosen, points=points, pool_nbytes=pool, seed=seed))
        rig = Rig(subject, chosen.pool_nbytes, seed)
        measured = measure(rig, chosen, lambda stage, done, total: advance(f"{device}, {stage}", done, total))
        rig.close()
        return measured


def automatic(infos: Sequence[Any], expected: Sequence[Expected]) -> int:
    """The σ of a verification: 1 where the real thing is slower than this host, otherwise what its promises need.

    The host has to move the bytes (with headroom), and what a command costs it must not show in the shortest one.
    """
    speed = host_speed()
    need = smallest_dilation(infos, speed)
    if need == 1:
        return 1
    shortest = min(
        (one.point.nbytes * 1e9 / one.value for one in expected if one.point.unit == "bytes_per_s"),
        default=1_000_000.0,
    )
    for_commands = speed.command_ns / (shortest * _HOST_PERCENT / 100)
    return max(round(need * HEADROOM), min(round(for_commands), _MOST_FOR_COMMANDS), 2)


_MOST_FOR_COMMANDS = 100


# -- points of a profile ------------------------------------------------------------------------------------------


def read_points(path: Path) -> list[Expected]:
    """The measured points of a profile, checked; none if it holds none. Raises ConfigurationError."""
    values = read_toml(path)
    if "calibration" not in values:
        return []
    table = Table(values, str(path)).table("calibration")
    table.integer("version", VERSION, VERSION)
    given = table.get("points")
    if not isinstance(given, list) or not given or not all(isinstance(values, dict) for values in given):
        raise table.error("points", "allowed: tables [[calibration.points]], at least one")
    for key in ("machine", "date", "device"):
        table.text(key, default="")
    table.flag("host_apart", default=False)
    for key in ("mean_residual_pct", "max_residual_pct"):
        if table.has(key):
            _number(table, key, 0.0, 1e15)
    table.names("unknown", default=())
    table.finish()
    found = [_point(Table(values, str(path), f"calibration.points[{number}]")) for number, values in enumerate(given)]
    first: dict[Point, int] = {}
    for number, one in enumerate(found):
        if first.setdefault(one.point, number) != number:
            raise table.error(f"points[{number}]", f"{one.point} stands at points[{first[one.point]}] already")
    return found


def _host_apart(path: Path, byte_addressable: bool) -> bool:
    """Whether the profile was measured with its host buffers in another memory; drives always are."""
    values = read_toml(path)
    if not byte_addressable or "calibration" not in values:
        return not byte_addressable
    return Table(values, str(path)).table("calibration").flag("host_apart", default=False)


def _point(table: Table) -> Expected:
    pattern = table.text("pattern", ("idle", "loaded", "sequential", "random"))
    verb = table.text("verb", ("transfer", "chase", "score", "gather"))
    load = table.text("load", ("", "transfer", "score"), default="")
    if (pattern == "loaded") != bool(load) or (pattern == "loaded" and verb != "chase"):
        raise table.error(
            "load", f"{load!r} given for a point that is {pattern} {verb}; only a loaded chase has a load"
        )
    nbytes = table.integer("nbytes", 1, _LARGEST)
    point = Point(
        pattern,  # type: ignore[arg-type]  # checked
        verb,  # type: ignore[arg-type]  # checked
        table.integer("span_nbytes", 1, nbytes),
        nbytes,
        table.integer("depth", 1, 1024),
        _number(table, "read_fraction", 0.0, 1.0),
        load,
        _number(table, "duty", 0.01, 1.0) if pattern == "loaded" else 1.0,
    )
    if nbytes % point.span_nbytes:
        raise table.error("nbytes", f"{nbytes} given; allowed: a multiple of span_nbytes = {point.span_nbytes}")
    value = _number(table, point.unit, 1e-3, 1e15)
    low, high = _number(table, "ci95_low", 0.0, 1e15), _number(table, "ci95_high", 0.0, 1e15)
    if not low <= value <= high:
        raise table.error("ci95_low", f"[{low}, {high}] does not hold the value {value}")
    table.integer("tries", 1, 1_000_000)
    if table.has("load_bytes_per_s"):
        _number(table, "load_bytes_per_s", 0.0, 1e15)
    host_ns = table.integer("host_ns", 0, 10**9, default=0)
    table.finish()
    return Expected(point, value, low, high, host_ns)


def _number(table: Table, key: str, low: float, high: float) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise table.error(key, f"{value!r} given; allowed: a number from {low:g} to {high:g}")
    return float(value)
