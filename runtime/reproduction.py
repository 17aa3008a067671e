"""Reproduction: what a paper says against what is found here, with the interval that unknown inputs leave.

A *claim* is one statement of a paper as a range: a number with its rounding, a band, or one side. Papers leave inputs
out (the CPU's rate, the selector, the host's memory), so what is found is a range as well: the values at both ends of
what the inputs may be. A claim passes where the two ranges meet; nothing else is asked of it, and nothing is tuned. A
*check* is a named experiment with its claims, and passes where all of them do; one that needs what is not here is
skipped, and says what is missing. A *table* answers a question that reviewers asked and passes nothing.

Everything that a result depends on, but the code, stands in constants that are frozen before the first comparison;
`constants_hash` is in every output, so that a change is seen.

A system is a module that gives a `System`; its checks and questions are functions of a `Study` (study.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.runtime.study import Study

Range = tuple[float, float]
"""Lowest and highest; −∞ and ∞ where there is no end."""
PROVENANCES = ("measured", "emulated", "simulated", "extrapolated")


# -- what is found ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One statement: in words, as a range, what was found, and its range over the unknown inputs.

    `inputs` says which inputs made the interval, empty where none is unknown.
    """

    paper: str
    claimed: Range
    got: float
    interval: Range
    inputs: str = ""

    def __post_init__(self) -> None:
        for low, high in (self.claimed, self.interval):
            assert low <= high, f"{self.paper}: a range from {low} to {high}"

    @property
    def passed(self) -> bool:
        """Whether the two ranges meet. A number that is none meets nothing."""
        (low, high), (least, most) = self.claimed, self.interval
        return least <= high and low <= most


@dataclass(frozen=True)
class Check:
    """One experiment. `reason` says why it failed or was skipped, or what a reader must know of how it passed.

    `claims` is empty where it was skipped. `details` are further numbers behind it, as plain data.
    """

    id: str
    title: str
    claims: tuple[Claim, ...]
    provenance: str
    seed: int
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.provenance in (PROVENANCES if self.claims else ("",)), f"{self.id}: {self.provenance!r}"
        assert self.claims or self.reason, f"{self.id}: a check that was skipped says why"

    @property
    def passed(self) -> bool | None:
        """None where it was skipped."""
        return all(claim.passed for claim in self.claims) if self.claims else None

    @property
    def shown(self) -> Claim | None:
        """The claim that stands for the check: the first that failed, or the first."""
        failed = [claim for claim in self.claims if not claim.passed]
        return next(iter((*failed, *self.claims)), None)

    def to_json(self) -> dict[str, Any]:
        """The JSON contract's fields, of `shown`, and all claims under `claims`. Infinite ends are None."""
        shown = self.shown
        return {
            "id": self.id,
            "paper": None if shown is None else shown.paper,
            "got": None if shown is None else shown.got,
            "interval": None if shown is None else _ends(shown.interval),
            "passed": self.passed,
            "provenance": self.provenance or None,
            "seed": self.seed,
            "reason": self.reason,
            "title": self.title,
            "claims": [
                {**asdict(c), "claimed": _ends(c.claimed), "interval": _ends(c.interval), "passed": c.passed}
                for c in self.claims
            ],
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class Table:
    """Answers to one question. Rows are flat and all have the same keys, `provenance` and `reason` among them."""

    id: str
    question: str
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            assert row.keys() == self.rows[0].keys(), f"{self.id}: rows with {set(row) ^ set(self.rows[0])} or without"
            assert row["provenance"] in (*PROVENANCES, ""), f"{self.id}: provenance {row['provenance']!r}"
            assert row["reason"] or row["provenance"] != "extrapolated", f"{self.id}: extrapolated, and not why"


def over(*values: float) -> Range:
    """The range of what was found at the ends of the unknown inputs."""
    return min(values), max(values)


def at_least(low: float) -> Range:
    """A claim of one side."""
    return low, math.inf


def at_most(high: float) -> Range:
    """A claim of one side."""
    return -math.inf, high


def near(value: float, share: float) -> Range:
    """A number with its tolerance."""
    return value * (1 - share), value * (1 + share)


def _ends(found: Range) -> list[float | None]:
    return [end if math.isfinite(end) else None for end in found]


# -- constants ----------------------------------------------------------------------------------------------------


def constants_hash(constants: Mapping[str, Any]) -> str:
    """SHA-256 of plain data, whatever the order of its keys. Raises ValueError for what JSON cannot say."""
    text = json.dumps(constants, sort_keys=True, allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file under its folder's name and its own."""
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


# -- systems ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A system whose paper is reproduced: constants as plain data, checks and questions by name, in order.

    A check and a question are functions of a study; each gives one `Check`, or tables.
    """

    name: str
    constants: Mapping[str, Any]
    checks: Mapping[str, Callable[[Study], Check]]
    questions: Mapping[str, Callable[[Study], Sequence[Table]]]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The checks of these names, all if there are none. Raises ConfigurationError for one that does not exist."""
        for name in names:
            if name not in self.checks:
                raise ConfigurationError(f"{self.name} has no check {name!r}; {nearest(name, list(self.checks))}")
        return [name for name in self.checks if not names or name in names]
