"""What the suite found out about a device: one line per check, and a reason for everything that did not pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check. `reason` is empty for what passed; for a failure it says what the device did."""

    level: str
    check: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """All outcomes, in the order of the levels. `device` is its name; empty where it could not even be opened."""

    device: str
    kind: str
    provenance: str
    results: tuple[Result, ...]

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
        """For JSON: device, kind, provenance, passed, counts per outcome, and the results as objects."""
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for result in self.results:
            counts[result.outcome] += 1
        return {
            "device": self.device,
            "kind": self.kind,
            "provenance": self.provenance,
            "passed": self.passed,
            "counts": counts,
            "results": [
                {"level": r.level, "check": r.check, "outcome": r.outcome, "reason": r.reason} for r in self.results
            ],
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
