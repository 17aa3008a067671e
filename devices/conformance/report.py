"""What the suite found out about a device: one line per check, and a reason for everything that did not pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check; `reason` is empty for what passed, and for a failure it says what the device did."""

    level: str
    check: str
    outcome: Outcome
    reason: str = ""
    number: str = "L0"


@dataclass(frozen=True)
class Comparison:
    """A declared number and what was seen; rates in bytes/s, times in ns, 0 where nothing is declared."""

    executor: str
    memory: str
    quantity: str
    declared: int
    measured: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `ratio` is measured / declared; it and `declared` are None where nothing is declared."""
        return {
            "executor": self.executor,
            "memory": self.memory,
            "quantity": self.quantity,
            "declared": self.declared or None,
            "measured": self.measured,
            "ratio": round(self.measured / self.declared, 4) if self.declared else None,
        }


@dataclass(frozen=True)
class Report:
    """All outcomes, in the order of the levels. `device` is its name; empty where it could not even be opened.

    `provenance` is emulated as well where a real driver ran on a model; `model` then says on which.
    """

    device: str
    kind: str
    provenance: str
    results: tuple[Result, ...]
    comparisons: tuple[Comparison, ...] = ()
    model: str = ""

    @property
    def passed(self) -> bool:
        """Nothing failed and something passed: a device that skips everything has shown nothing."""
        return not self.failed and any(r.outcome == "passed" for r in self.results)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The checks that the device failed."""
        return tuple(r for r in self.results if r.outcome == "failed")

    def outcome(self, check: str) -> Outcome:
        """The outcome of the check of that name. Raises KeyError."""
        for result in self.results:
            if result.check == check:
                return result.outcome
        raise KeyError(check)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: who it is, whether it `conforms`, counts, and per level L0 to L6 what failed or was skipped."""
        levels: dict[str, list[Result]] = {}
        for result in self.results:
            levels.setdefault(result.number, []).append(result)
        return {
            "device": self.device,
            "kind": self.kind,
            "provenance": self.provenance,
            "model": self.model,
            "conforms": self.passed,
            **_counts(self.results),
            "levels": {number: _level(results) for number, results in sorted(levels.items())},
            "declared_vs_measured": [comparison.to_dict() for comparison in self.comparisons],
        }

    def __str__(self) -> str:
        lines = [f"{self.device or 'the device'} ({self.kind or 'not opened'}, {self.provenance or 'unknown'})"]
        level = ""
        for result in self.results:
            if result.level != level:
                level = result.level
                lines.append(f"  {level}")
            reason = f": {result.reason}" if result.reason else ""
            lines.append(f"    {result.outcome:7} {result.check.replace('_', ' ')}{reason}")
        return "\n".join(lines)


def _counts(results: Iterable[Result]) -> dict[str, int]:
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for result in results:
        counts[result.outcome] += 1
    return counts


def _level(results: list[Result]) -> dict[str, Any]:
    """One level: how many passed and failed, and the reason for each check that did not pass."""
    told = {
        outcome: [{"test": r.check, "reason": r.reason} for r in results if r.outcome == outcome]
        for outcome in ("failed", "skipped")
    }
    names = list(dict.fromkeys(r.level for r in results))
    counts = _counts(results)
    return {
        "names": names,
        "passed": counts["passed"],
        "failed": counts["failed"],
        "failures": told["failed"],
        "skipped": told["skipped"],
    }
