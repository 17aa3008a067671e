"""Ablation: a system with each of its mechanisms switched off alone and together, as a full factorial table.

2ⁿ combinations of n mechanisms (`Policy.mechanisms`, switched off through the policy's option `without`), each on every
workload: the workloads are the repeats. A workload is prefilled once, and its prefill is shared by all combinations; so
they differ in nothing but the mechanisms, and effects are taken within a workload before they are averaged over them.

Of a mechanism A, for speed: tokens/s with A over tokens/s without it, the geometric mean over what else is on or off;
for mass recall, which can be 0, the difference. The interaction of A and B is what A's effect is with B over (less)
what it is without B: 1 (0) where the two have nothing to do with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from tierloop.devices.errors import ConfigurationError, OutOfMemory, nearest
from tierloop.devices.platform import Platform
from tierloop.devices.registry import discover
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.compare import PolicyRequest, Progress, compare, find_policy, kv_shape
from tierloop.runtime.engine import Engine
from tierloop.runtime.models import Model
from tierloop.runtime.policy import Policy, check_options, make
from tierloop.runtime.results import Comparison, PolicyResult
from tierloop.runtime.statistics import mean_ci95, wilson_ci95
from tierloop.runtime.workloads import Workload

Interval = tuple[float, float]


@dataclass(frozen=True)
class Combination:
    """One row of the table: means over the workloads, with 95 % intervals (low, high); None where there is none.

    `enabled` are the mechanisms that are on. `accuracy` is the share of answered workloads, of those that have an
    answer. `speeds` and `mass_recalls` have a value for each workload. `refused` says why it did not run; then the
    numbers are None.
    """

    enabled: tuple[str, ...]
    tokens_per_s: float | None = None
    ci95: Interval | None = None
    accuracy: float | None = None
    accuracy_ci95: Interval | None = None
    mass_recall: float | None = None
    mass_recall_ci95: Interval | None = None
    topk_recall: float | None = None
    equal_to_dense: int = 0
    """Workloads whose tokens were those of dense attention."""
    speeds: tuple[float, ...] = ()
    mass_recalls: tuple[float, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Effect:
    """What a mechanism, or the interaction of two, does: a factor of tokens/s, and a difference of mass recall."""

    mechanisms: tuple[str, ...]
    speed: float
    speed_ci95: Interval | None
    mass_recall: float
    mass_recall_ci95: Interval | None


@dataclass(frozen=True)
class Ablation:
    """The table of a system, all mechanisms first, and its effects; without effects where a combination was refused."""

    system: str
    mechanisms: tuple[str, ...]
    rows: tuple[Combination, ...]
    effects: tuple[Effect, ...]
    model: str
    platform: str
    clock: str
    provenance: str
    prompt_tokens: tuple[int, ...]
    """Of each workload."""
    num_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    dense_accuracy: float | None = None
    guesses: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """Checks that failed: errors above their bound, tokens that differ from dense where they must not."""
    invalid: tuple[str, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return asdict(self)


def find_system(name: str) -> type[Policy]:
    """The policy of that name. Raises ConfigurationError where it has no mechanisms, with the list of those that do."""
    kind = find_policy(name)
    if kind.mechanisms:
        return kind
    offered = [found.name for found in discover("policies") if found.usable]
    others = [other for other in offered if find_policy(other).mechanisms]
    raise ConfigurationError(
        f"{name} has no mechanisms that can be switched off; systems that have some: {', '.join(others) or 'none'}"
    )


def chosen_mechanisms(kind: type[Policy], names: Sequence[str]) -> tuple[str, ...]:
    """The mechanisms of these names in the order of the system, all if there are none. Raises ConfigurationError."""
    for name in names:
        if name not in kind.mechanisms:
            raise ConfigurationError(f"{kind.name} has no mechanism {name!r}: {nearest(name, list(kind.mechanisms))}")
    return tuple(name for name in kind.mechanisms if not names or name in names)


def every_combination(mechanisms: Sequence[str]) -> list[tuple[str, ...]]:
    """The 2ⁿ sets of mechanisms that are on: all of them first, none last, in the order of `mechanisms`."""
    return [on for count in range(len(mechanisms), -1, -1) for on in combinations(mechanisms, count)]


def ablate(
    system: str,
    model: Model,
    workloads: Sequence[Workload],
    open_platform: Callable[[PolicyRequest], Platform],
    *,
    num_tokens: int,
    options: Mapping[str, Any] | None = None,
    kv_dtype: str = "float32",
    progress: Progress | None = None,
    mechanisms: Sequence[str] = (),
) -> Ablation:
    """Run every combination of a system's mechanisms on every workload, or of those that are named: the rest stays on.

    `options` are those of the policy, without `without`. Every output is checked by the float64 oracle. Raises
    ConfigurationError before any work for a system without mechanisms or an option that it does not have, and where
    no combination fits the platform; otherwise what `compare` raises.
    """
    kind, options = find_system(system), dict(options or {})
    if "without" in options:
        raise ConfigurationError(f"{system}: `without` is what an ablation sets itself")
    check_options(kind, {**options, "without": ()})
    if not workloads:
        raise ConfigurationError("no workload was given; at least one is needed")
    mechanisms = chosen_mechanisms(kind, mechanisms)
    sets = every_combination(mechanisms)
    requests = [
        PolicyRequest(system, {**options, "without": [m for m in mechanisms if m not in on]}, label=_label(on))
        for on in sets
    ]
    _build_each(kind, requests, open_platform, kv_shape(model, kv_dtype))
    done = []
    for number, workload in enumerate(workloads):
        told = None if progress is None else _numbered(progress, number, len(workloads))
        done.append(
            compare(model, workload, open_platform, requests, num_tokens=num_tokens, kv_dtype=kv_dtype, progress=told)
        )
    rows = tuple(
        _row(on, [(w, c.policies[i]) for w, c in zip(workloads, done, strict=True)]) for i, on in enumerate(sets)
    )
    if all(row.refused is not None for row in rows):
        raise ConfigurationError(f"no combination fits platform {done[0].platform}: {rows[0].refused}")
    ran = [r for c in done for r in c.policies if r.refused is None]
    asked = [(w, c) for w, c in zip(workloads, done, strict=True) if w.answer]
    return Ablation(
        system,
        mechanisms,
        rows,
        effects(mechanisms, rows),
        model.name,
        done[0].platform,
        done[0].clock,
        ran[0].provenance,
        tuple(w.num_tokens for w in workloads),
        num_tokens,
        options,
        _share([w.is_answered_by(c.dense_text) for w, c in asked]),
        tuple(dict.fromkeys(guess for r in ran for guess in r.guesses)),
        tuple(f"{_prompt(i, done)}{failure}" for i, c in enumerate(done) for failure in c.failures),
        tuple(
            f"{_prompt(i, done)}{r.policy}: {r.invalid[0]}" for i, c in enumerate(done) for r in c.policies if r.invalid
        ),
    )


def effects(mechanisms: Sequence[str], rows: Sequence[Combination]) -> tuple[Effect, ...]:
    """Main effects in the order of the mechanisms, then those of pairs; none where a row has no numbers."""
    if any(row.refused is not None or not all(s > 0 for s in row.speeds) for row in rows):
        return ()
    repeats = len(rows[0].speeds)
    found = []
    for of in (*combinations(mechanisms, 1), *combinations(mechanisms, 2)):
        # The contrast: + where an even number of them is off; over pairs of rows for one, over fours for two.
        share = 2 ** len(of) / len(rows)
        speed, recall = [0.0] * repeats, [0.0] * repeats
        for row in rows:
            sign = -1 if sum(m not in row.enabled for m in of) % 2 else 1
            for i in range(repeats):
                speed[i] += sign * share * math.log(row.speeds[i])
                recall[i] += sign * share * row.mass_recalls[i]
        mean, interval = _mean(speed)
        factors = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
        found.append(Effect(of, math.exp(mean), factors, *_mean(recall)))
    return tuple(found)


def _build_each(
    kind: type[Policy],
    requests: Sequence[PolicyRequest],
    open_platform: Callable[[PolicyRequest], Platform],
    shape: KVShape,
) -> None:
    """Build every combination, before minutes of work. Raises ConfigurationError where the platform takes none."""
    refused: list[str] = []
    for request in requests:
        with open_platform(request) as platform:
            try:
                engine = Engine(platform, shape)
                make(kind, engine, request.options)
                engine.close()
            except (ConfigurationError, OutOfMemory) as error:
                refused.append(str(error))
    if len(refused) == len(requests):
        raise ConfigurationError(refused[0])


def _row(on: tuple[str, ...], results: list[tuple[Workload, PolicyResult]]) -> Combination:
    refused = next((r.refused for _, r in results if r.refused is not None), None)
    if refused is not None:
        return Combination(on, refused=refused)
    speeds = tuple(r.tokens_per_s for _, r in results)
    recalls = tuple(r.mass_recall for _, r in results)
    answers = [r.answered for w, r in results if w.answer]
    return Combination(
        on,
        *_mean(speeds),
        _share(answers),
        wilson_ci95(sum(answers), len(answers)) if answers else None,
        *_mean(recalls),
        mean_ci95([r.topk_recall for _, r in results])[0],
        sum(r.equal_to_dense for _, r in results),
        speeds,
        recalls,
    )


def _mean(values: Sequence[float]) -> tuple[float, Interval | None]:
    mean, half = mean_ci95(values)
    return mean, None if math.isinf(half) else (mean - half, mean + half)


def _share(answers: Sequence[bool]) -> float | None:
    return sum(answers) / len(answers) if answers else None


def _label(on: tuple[str, ...]) -> str:
    return " + ".join(on) or "none"


def _prompt(number: int, done: Sequence[Comparison]) -> str:
    return f"prompt {number + 1}: " if len(done) > 1 else ""


def _numbered(progress: Progress, number: int, total: int) -> Progress:
    if total == 1:
        return progress
    return lambda stage, done, of: progress(f"prompt {number + 1} of {total}: {stage}", done, of)
