"""Tuning an index, a window, micro-batches and waves together, by a short calibration: KVDrive §6.2.

One after the other, each with what was chosen before:

1. the size of the index (`centroids`): the largest that is as fast as the fastest, since a larger one ranks more
   finely. Candidates are all of an accuracy that will do: time alone cannot tell which is not;
2. the `window`: it grows while the cores take less time to find out what is missing than it takes to fetch that (a
   larger window misses less, but there is more to look up). The fastest of those that were tried is chosen;
3. the `micro_batch`: the fastest;
4. the `waves`: the fastest. They are not in the paper, whose micro-batches have the MLP in them.

The paper gives the order and the rule of the window, not by how much times may differ to count as the same:
`TOLERANCE` is assumed. Times come from a function that runs the policy, so they are measured, emulated or simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.synchronisation import GATHER, SSD, TRANSFER, UNPACK

EVALUATING = ("evaluate",)
"""Stages in which a policy finds out what is missing."""
FETCHING = (SSD, GATHER, TRANSFER, UNPACK)
"""Stages in which it is fetched; they overlap, so the longest counts."""
TOLERANCE = 0.02
"""Times that differ by less than this share count as the same."""


@dataclass(frozen=True)
class Measured:
    """What a short run took: ns for each token of the batch, busy ns of each stage in a step. Or why it did not run."""

    ns_per_token: float = 0.0
    stages: Mapping[str, int] = field(default_factory=dict)
    provenance: str = ""
    refused: str | None = None


@dataclass(frozen=True)
class Trial:
    """One run: what it was to find out, the options it ran with, and what it took."""

    purpose: str
    options: dict[str, Any]
    measured: Measured


@dataclass(frozen=True)
class Tuned:
    """The options that were chosen, what they took, why each was chosen, and all that was tried."""

    options: dict[str, Any]
    measured: Measured
    reasons: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def gain(self) -> float | None:
        """The time of the given options over that of the chosen ones; None where the given ones could not run."""
        given = self.trials[0].measured
        return None if given.refused is not None else given.ns_per_token / self.measured.ns_per_token


@dataclass(frozen=True)
class Candidates:
    """What is tried. Raises ConfigurationError where one of them is empty."""

    centroids: Sequence[int] = (2048, 4096, 8192)
    windows: Sequence[float] = (1, 1.5, 2, 3, 4, 6, 8)
    micro_batches: Sequence[int] = (1, 2, 4)
    waves: Sequence[int] = (1, 2)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not values:
                raise ConfigurationError(f"tuning: there are no {name} to try")


def tune(
    measure: Callable[[dict[str, Any]], Measured], candidates: Candidates, options: Mapping[str, Any] | None = None
) -> Tuned:
    """Choose `centroids`, `window`, `micro_batch` and `waves` for a policy that `measure` runs with given options.

    `options` are those that the policy has anyway, and what the four begin as. They are kept if nothing that was
    tried is faster. Raises ConfigurationError where nothing can run.
    """
    tuning = _Tuning(measure)
    given = dict(options or {})
    as_given = tuning.run("as given", given)
    smallest = {
        "window": min(candidates.windows),
        "micro_batch": min(candidates.micro_batches),
        "waves": min(candidates.waves),
    }
    centroids = tuning.index({**given, **smallest}, sorted(candidates.centroids))
    chosen = {**given, **smallest, "centroids": centroids}
    chosen["window"] = tuning.window(chosen, sorted(candidates.windows))
    chosen["micro_batch"] = tuning.fastest("micro_batch", chosen, sorted(candidates.micro_batches))
    chosen["waves"] = tuning.fastest("waves", chosen, sorted(candidates.waves))
    measured = tuning.run("", chosen)
    if as_given.refused is None and as_given.ns_per_token < measured.ns_per_token:
        tuning.reasons.append("the given options are kept: nothing that was tried is faster")
        chosen, measured = given, as_given
    return Tuned(chosen, measured, tuple(tuning.reasons), tuple(tuning.trials))


def fetching_ns(stages: Mapping[str, int]) -> int:
    """Busy ns of the longest stage of fetching."""
    return max(stages.get(stage, 0) for stage in FETCHING)


def evaluating_ns(stages: Mapping[str, int]) -> int:
    """Busy ns of finding out what is missing."""
    return sum(stages.get(stage, 0) for stage in EVALUATING)


class _Tuning:
    """Trials and reasons so far; what was run is not run again."""

    def __init__(self, measure: Callable[[dict[str, Any]], Measured]) -> None:
        self._measure = measure
        self.trials: list[Trial] = []
        self.reasons: list[str] = []

    def run(self, purpose: str, options: dict[str, Any]) -> Measured:
        """What the options take."""
        for trial in self.trials:
            if trial.options == options:
                return trial.measured
        self.trials.append(Trial(purpose, dict(options), self._measure(dict(options))))
        return self.trials[-1].measured

    def index(self, options: dict[str, Any], sizes: Sequence[int]) -> int:
        """The largest index that is as fast as the fastest."""
        times = self._times("centroids", options, sizes)
        fastest = min(times.values())
        chosen = max(size for size, ns in times.items() if ns <= fastest * (1 + TOLERANCE))
        self._because("centroids", chosen, f"the largest within {TOLERANCE:.0%} of the fastest", times)
        return chosen

    def window(self, options: dict[str, Any], sizes: Sequence[float]) -> float:
        """The fastest window of those up to the first with which evaluating takes as long as fetching."""
        times: dict[float, float] = {}
        end = "all were tried"
        for size in sizes:
            measured = self.run("window", {**options, "window": size})
            if measured.refused is not None:
                end = f"{size:g} cannot run: {measured.refused}"
                break
            times[size] = measured.ns_per_token
            evaluating, fetching = evaluating_ns(measured.stages), fetching_ns(measured.stages)
            if evaluating >= fetching:
                end = f"with {size:g}, evaluating ({evaluating / 1e6:,.3f} ms) takes as long as fetching "
                end += f"({fetching / 1e6:,.3f} ms)"
                break
        chosen = min(times, key=lambda size: (times[size], size))
        self._because("window", chosen, f"the fastest; {end}", times)
        return chosen

    def fastest(self, option: str, options: dict[str, Any], values: Sequence[int]) -> int:
        """The value of an option that is fastest, the smallest of those that are equally fast."""
        times = self._times(option, options, values)
        chosen = min(times, key=lambda value: (times[value], value))
        self._because(option, chosen, "the fastest", times)
        return chosen

    def _times(self, option: str, options: dict[str, Any], values: Sequence[int]) -> dict[int, float]:
        """ns per token of those that can run. Raises ConfigurationError if none can."""
        found = {value: self.run(option, {**options, option: value}) for value in values}
        times = {value: measured.ns_per_token for value, measured in found.items() if measured.refused is None}
        if not times:
            raise ConfigurationError(f"tuning: no {option} can run; {values[0]}: {found[values[0]].refused}")
        return times

    def _because(self, option: str, chosen: float, why: str, times: Mapping[Any, float]) -> None:
        shown = ", ".join(f"{value:g}: {ns / 1e6:,.3f} ms" for value, ns in times.items())
        self.reasons.append(f"{option} {chosen:g}: {why} ({shown} per token)")
