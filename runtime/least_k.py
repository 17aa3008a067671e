"""The offline search for K_min: the smallest K with which a policy scores within a tolerance of dense attention.

The score of a K is the mean over the tasks that count, each as `accuracy` measures it, with K fixed. Prefills and dense
answers are made once and shared by every K that is tried. What K is best depends on model, context and task: a K_min is
found for one of each and used for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.runtime.accuracy import Accuracy, Asked, Progress, measure
from tierloop.runtime.compare import find_policy
from tierloop.runtime.feedback import find_k_min
from tierloop.runtime.policy import check_options
from tierloop.runtime.subjects import Cell, Subject


@dataclass(frozen=True)
class Tried:
    """A K that was tried: rows of each KV head, the mean score, and what the rows hold of dense attention."""

    k: int
    score: float
    mass_recall: float


@dataclass(frozen=True)
class LeastK:
    """What a search found; `k_min` is None where not even the largest K is within the tolerance."""

    k_min: int | None
    dense_score: float
    tolerance: float
    tried: tuple[Tried, ...]
    reason: str = ""


def search_k_min(
    subject: Subject,
    asked: Asked,
    open_platform: Callable[[], Platform],
    low: int,
    high: int,
    tolerance: float,
    progress: Progress | None = None,
) -> LeastK:
    """Search K from `low` to `high` for the one policy that is asked for. Its options must not set K.

    Raises ConfigurationError for a policy without K, for a range or tolerance that cannot be, and where no task counts.
    """
    (policy,) = asked.policies
    for option in ("k", "k_min", "scheduler"):
        check_options(find_policy(policy), {option: 0})
        if option in asked.options.get(policy, {}):
            raise ConfigurationError(f"--option {policy}.{option}: the search sets it")
    if not 1 <= low <= high:
        raise ConfigurationError(f"K from {low} to {high}: whole numbers from 1 on are needed, the smaller one first")
    if high > min(asked.contexts):
        raise ConfigurationError(f"--high {high}: more than the context, which is {min(asked.contexts)}")
    if not 0 <= tolerance <= 1:
        raise ConfigurationError(f"--tolerance {tolerance}: it must be from 0 to 1")
    kept = _Kept(subject)
    tried: dict[int, Tried] = {}
    dense: list[float] = []

    def score(k: int) -> float:
        options = {**asked.options.get(policy, {}), "k": k, "k_min": 1, "scheduler": "fixed"}
        measured = measure(kept, replace(asked, budgets=(0.5,), options={policy: options}), open_platform, progress)
        tried[k] = _tried(k, measured)
        dense[:] = [_mean([row.dense_score for row in measured.rows if row.counts])]
        return tried[k].score

    score(high)
    try:
        found = find_k_min(lambda k: tried[k].score if k in tried else score(k), dense[0], tolerance, low, high)
    except LookupError as error:
        return LeastK(None, dense[0], tolerance, _in_order(tried), str(error))
    return LeastK(found, dense[0], tolerance, _in_order(tried))


def _tried(k: int, measured: Accuracy) -> Tried:
    for row in measured.rows:
        if row.refused is not None:
            raise ConfigurationError(f"{row.policy} with k {k}: {row.refused}")
    rows = [row for row in measured.rows if row.counts]
    if not rows:
        raise ConfigurationError("no task counts: dense attention scores below 0.8 in all of them")
    return Tried(k, _mean([row.score for row in rows]), _mean([row.mass_recall for row in rows]))


def _in_order(tried: dict[int, Tried]) -> tuple[Tried, ...]:
    return tuple(tried[k] for k in sorted(tried))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class _Kept:
    """A subject whose cells and prefills are made once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.name, self.tasks, self.longest = subject.name, subject.tasks, subject.longest
        self._cells: dict[Any, Cell] = {}

    def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
        """The subject's cell."""
        key = (task, context, prompts, seed)
        if key not in self._cells:
            cell = self._subject.cell(task, context, prompts, seed)
            prefill = cell.prefill
            numbers = {id(case): number for number, case in enumerate(cell.cases)}
            made = cache(lambda number: prefill(cell.cases[number]))
            self._cells[key] = replace(cell, prefill=lambda case: made(numbers[id(case)]))
        return self._cells[key]
