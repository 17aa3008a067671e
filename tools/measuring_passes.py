"""Passes over the points of a plan, and the journal that lets an interrupted measurement go on.

Every pass visits all points in an order of its own, so that a machine that becomes slower meanwhile does so for all of
them alike. What is reported is the median over the passes, with a 95 % confidence interval from the bootstrap.

The journal is a file of JSON lines beside the output: a header that says what is measured, then one line per point and
pass, synced when it is written. A process that is killed loses the point under way; a last line that was cut off does
not count. What is there is never discarded: it is gone on with, or refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tierloop.devices.errors import ConfigurationError, Unsupported
from tierloop.tools.measuring import Point, Reading, Rig
from tierloop.tools.measuring_plan import Plan
from tierloop.tools.output import OutputError

VERSION = 1
"""Of the benchmark: points of another version are not comparable."""
LATE_LIMIT = 0.01
"""Which part of a window may have passed because the host was late."""
TRIES = 3
"""How often a window is measured that must not be believed, before its pass goes without."""
ROUNDS = 3
"""Every window has at least so many rounds of commands, however short it is."""
_RESAMPLES = 2000
_LARGEST_JOURNAL = 64 << 20
_KEYS = ("pass", "point", "value", "load", "host_ns")
_SMALLEST_VALUE, _LARGEST_VALUE, _LONGEST_HOST_NS = 1e-3, 1e15, 10**9
"""What a line may hold: ns or bytes per second, and ns that the benchmark takes for itself; as a profile allows."""


@dataclass
class Measured:
    """A point and what its passes gave.

    `rejected` are values of runs that were invalid, `refused` why the device cannot do it at all, `reason` why the last
    of these happened.
    """

    point: Point
    tries: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    refused: str = ""
    reason: str = ""

    @property
    def valid(self) -> bool:
        """Whether there is a value."""
        return bool(self.tries)

    @property
    def value(self) -> float:
        """The median of the passes."""
        return float(np.median(self.tries))

    @property
    def load(self) -> float:
        """Median bytes/s of the streams beside a loaded chase."""
        return float(np.median(self.loads)) if self.loads else 0.0

    @property
    def host_ns(self) -> int:
        """What the benchmark took for itself per command: the median of the passes."""
        return round(float(np.median(self.hosts))) if self.hosts else 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the median."""
        return confidence_interval(self.tries)

    @property
    def spread(self) -> float:
        """Half the width of the interval as a part of the value."""
        low, high = self.interval
        return (high - low) / 2 / self.value if self.value else 0.0


def confidence_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % confidence interval of the median of independent values: bootstrap, percentiles, seeded."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2 or np.all(given == given[0]):
        return float(given[0]), float(given[-1])
    picks = np.random.default_rng(seed).integers(0, len(given), (_RESAMPLES, len(given)))
    low, high = np.percentile(np.median(given[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


class Journal:
    """What has been measured already, in a file; `done` maps (pass, point) to the reading.

    Raises OutputError if a journal is there and `resume` does not say to go on with it, or if it cannot be written, and
    ConfigurationError, with the line, if it is none of this measurement.
    """

    def __init__(self, file: Path, header: dict[str, Any], resume: bool) -> None:
        self.file = file
        self.done: dict[tuple[int, int], Reading] = {}
        self._wanted = json.loads(json.dumps({"tierloop_journal": VERSION, **header}))
        there = os.path.lexists(file)
        if there and not resume:
            raise OutputError(
                f"{file}: is left from an interrupted calibration; go on with it (--resume), or remove it to start over"
            )
        if there and not file.is_file():
            raise OutputError(f"{file}: is no file, so it is no journal")
        self._end = self._read() if there else 0
        try:
            self._out = file.open("r+b" if there else "xb", buffering=0)
            self._out.truncate(self._end)
            self._out.seek(self._end)
        except OSError as error:
            raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from error
        if not self._end:
            try:
                self._write(self._wanted)
            except OutputError:
                self.remove()
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and not self.done:  # nothing to go on with
            self.remove()
        with suppress(OSError):  # every line was synced when it was written
            self._out.close()

    def add(self, pass_number: int, point_number: int, reading: Reading) -> None:
        """Remember a reading, on the medium when this returns. Raises OutputError."""
        value, load, host = reading.value, reading.load_bytes_per_s, reading.host_ns
        self._write({"pass": pass_number, "point": point_number, "value": value, "load": load, "host_ns": host})
        self.done[pass_number, point_number] = reading

    def remove(self) -> None:
        """The output is written: the journal is not needed any more."""
        with suppress(OSError):
            self._out.close()
        self.file.unlink(missing_ok=True)

    def _write(self, row: dict[str, Any]) -> None:
        """Append a line, or leave the file as it was: a disk that is full may take half of it."""
        rest = json.dumps(row).encode() + b"\n"
        size = len(rest)
        try:
            while rest:
                rest = rest[self._out.write(rest) or 0 :]
            os.fsync(self._out.fileno())
        except OSError as error:
            with suppress(OSError):
                self._out.truncate(self._end)
            raise OutputError(f"{self.file}: cannot be written: {error.strerror or error}") from error
        self._end += size

    def _read(self) -> int:
        """Take what is there; returns how many bytes of it count. Raises ConfigurationError."""
        try:
            raw = self.file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{self.file}: {error.strerror or error}") from error
        if len(raw) > _LARGEST_JOURNAL:
            raise ConfigurationError(f"{self.file}: larger than {_LARGEST_JOURNAL} bytes, so it is no journal")
        *lines, rest = raw.split(b"\n")
        if not lines:  # killed before the first line was whole, or no journal at all
            if not json.dumps(self._wanted).encode().startswith(rest):
                raise ConfigurationError(f"{self.file}: line 1: no journal; remove the file to start over")
            return 0
        header = self._row(lines[0], 1)
        for key in (*self._wanted, *header):
            if _canonical(header.get(key)) != _canonical(self._wanted.get(key)):
                raise ConfigurationError(
                    f"{self.file}: line 1: {key}: the journal is of another measurement ({_short(header.get(key))}, "
                    f"now {_short(self._wanted.get(key))}); remove it to start over"
                )
        for number, line in enumerate(lines[1:], 2):
            row = self._row(line, number)
            place = (
                self._number(row, "pass", number, 0, self._wanted["plan"]["passes"] - 1, True),
                self._number(row, "point", number, 0, len(self._wanted["plan"]["points"]) - 1, True),
            )
            value = self._number(row, "value", number, _SMALLEST_VALUE, _LARGEST_VALUE)
            load = self._number(row, "load", number, 0, _LARGEST_VALUE)
            host_ns = self._number(row, "host_ns", number, 0, _LONGEST_HOST_NS, True)
            for key in row:
                if key not in _KEYS:
                    raise self._refused(number, f"unknown key {_short(key)}; allowed: {', '.join(_KEYS)}")
            if place in self.done:
                raise self._refused(number, f"pass {place[0]}, point {place[1]} stands in an earlier line already")
            self.done[int(place[0]), int(place[1])] = Reading(float(value), float(load), 0.0, int(host_ns))
        return sum(len(line) + 1 for line in lines)

    def _refused(self, number: int, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.file}: line {number}: {problem}; remove the journal to start over")

    def _number(
        self, row: dict[str, Any], key: str, number: int, low: float, high: float, whole: bool = False
    ) -> int | float:
        """A number of a line, checked: `whole` ones are integers, and true and false are none."""
        if key not in row:
            raise self._refused(number, f"{key}: missing")
        value = row[key]
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise self._refused(number, f"{key}: {_short(value)} given; allowed: {kind} from {low:g} to {high:g}")
        return value

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise self._refused(number, "no JSON") from None
        if not isinstance(row, dict):
            raise self._refused(number, "no JSON object")
        return row


def _canonical(value: object) -> str:
    """A JSON value as text in which true is not 1."""
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def measure(
    rig: Rig,
    plan: Plan,
    advance: Callable[[str, int, int], None] = lambda stage, done, total: None,
    journal: Journal | None = None,
    late_limit: float = LATE_LIMIT,
    host_ns: Sequence[int] = (),
) -> list[Measured]:
    """Measure all points of a plan; what the journal has is not measured again.

    A window is left out if the site says that it must not be believed, or if the host was late for more than
    `late_limit` of it; the point then rests on its other passes, or has no value. `host_ns` is what the benchmark takes
    for itself at each point.
    """
    measured = [Measured(point) for point in plan.points]
    known = dict(journal.done) if journal is not None else {}
    count = len(plan.points)
    for pass_number in range(plan.passes):
        for done, number in enumerate(_order(plan, pass_number), 1):
            one = measured[number]
            reading = known.get((pass_number, number))
            if reading is None:
                if one.refused:
                    continue
                for _ in range(TRIES):
                    reading = _reading(rig, plan, one, late_limit, host_ns[number] if host_ns else 0)
                    if reading is not None or one.refused:
                        break
                if reading is not None and journal is not None:
                    journal.add(pass_number, number, reading)
            if reading is not None:
                one.tries.append(reading.value)
                one.loads.append(reading.load_bytes_per_s)
                one.hosts.append(reading.host_ns)
            advance(f"pass {pass_number + 1} of {plan.passes}", done, count)
    return measured


def _reading(rig: Rig, plan: Plan, one: Measured, late_limit: float, host_ns: int) -> Reading | None:
    """Measure a point once; None, with the reason, if that means nothing or the device refuses it."""
    site = rig.subject.site
    for restart in site.restarts:
        restart()
    try:
        tries = [rig.measure(one.point, plan.window_ns, ROUNDS, host_ns) for _ in range(plan.windows)]
    except Unsupported as error:
        one.refused = one.reason = str(error)
        return None
    best = min if one.point.unit == "latency_ns" else max
    reading = best(tries, key=lambda reading: reading.value)
    if site.invalid or reading.late > late_limit:
        one.reason = "; ".join(site.invalid) or f"the host was late for {reading.late:.1%} of the time"
        one.rejected.append(reading.value)
        return None
    return reading


def _order(plan: Plan, pass_number: int) -> list[int]:
    return [int(n) for n in np.random.default_rng([plan.seed, pass_number]).permutation(len(plan.points))]
