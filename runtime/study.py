"""The study that checks of a reproduction are given: its seed, and phantom runs, each made once and shared.

A phantom run is decoded as `tierloop phantom` does, and watched: what each kernel did on which device, and for how long
one of them alone was at work.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense, DType
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.drawn_selection import DrawnSelection, draw, load_selection_model
from tierloop.runtime.locality import find_locality
from tierloop.runtime.model_shapes import ShapeStages, block_tokens_for, cache_shape, find_model
from tierloop.runtime.phantom import run_phantom
from tierloop.runtime.policy import Policy
from tierloop.runtime.results import PolicyResult

Int64 = NDArray[np.int64]
Progress = Callable[[str, int, int], None]
Seen = tuple[str, str, int, int, int]
"""Device, kernel (a stage's label for `dense`, "" for a transfer), FLOPs, start and end of a command."""


@dataclass(frozen=True)
class PhantomRun:
    """A phantom run: what is decoded, where, by what policy, and how far. Options and overrides are plain data."""

    model: str
    platform: str
    policy: str
    context: int
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1
    warmup_steps: int = 0
    batch: int = 1
    layers: int = 0
    """How many of the model's layers there are, 0 for all: what is of a layer needs no more of them."""
    locality: str = ""
    """What selections are drawn from; the study's own if it is empty."""
    predicted: float = 1.0
    """The share of what is best that a query predicted a layer ahead finds, in questions labelled `prefetch`."""
    contexts: tuple[int, ...] = ()
    """A length for each request of the batch, in place of `context`, which then says how long blocks are."""

    @property
    def key(self) -> str:
        """The same for equal runs."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass
class Work:
    """What one kernel did on one device: launches, FLOPs, and busy ns, sums of commands."""

    launches: int = 0
    flops: int = 0
    ns: int = 0


GPU, CPU, COPIES, NOBODY = "GPU", "CPU", "copies", "nobody"


@dataclass(frozen=True)
class Observed:
    """A run's result, what each kernel did in its steps, and how long who was alone at work.

    `work` is by (device, kernel), a stage's label for `dense`. `exposed` are ns of the steps in which the GPU's
    kernels, the CPU, copies or nobody alone was at work: no more of the steps would go if the others were free.
    """

    result: PolicyResult
    work: Mapping[tuple[str, str], Work]
    exposed: Mapping[str, int]

    @property
    def step_ns(self) -> float:
        """Mean time of a step; NaN where the run was refused."""
        steps = self.result.step_ns
        return sum(steps) / len(steps) if steps else math.nan

    @property
    def reason(self) -> str:
        """Why its numbers are extrapolated, in one line."""
        notes = [n for n in self.result.notes if not n.startswith(("changed:", "load "))]
        if self.result.guesses:
            notes.append(f"{len(self.result.guesses)} constants of {self.result.platform} are assumed or unknown")
        return "; ".join(notes)

    def flops(self, *kernels: str) -> int:
        """FLOPs of these kernels on all devices."""
        return sum(work.flops for (_, kernel), work in self.work.items() if kernel in kernels)


class Study:
    """What checks are given. Runs are made once; the weights' bytes are taken from the GPU's capacity before KV comes.

    `locality` names the locality model or score trace that selections are drawn from, `kv_dtype` the type of stored
    rows, `table` the blocks per head to aim at, at most 1,024. `model` and `cache` are those of the command line, for
    checks on real bytes.
    """

    def __init__(
        self,
        seed: int,
        locality: str,
        kv_dtype: DType = "float16",
        table: int = 1024,
        *,
        model: str = "",
        cache: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.seed = seed
        self.model, self.cache = model, cache
        self.doing = ""
        """What the runs are made for: the check or question that is under way."""
        self._progress: Progress = progress or (lambda *_: None)
        self._locality = load_selection_model(find_locality(locality))
        self._kv_dtype = kv_dtype
        self._coarser = 1024 // table
        self._runs: dict[str, Observed] = {}
        self._answers: dict[tuple[str, int, int, str], dict[str, Int64]] = {}
        self._made: dict[str, Any] = {}

    def tell(self) -> None:
        """Say that there is progress: how many runs and other things have been made."""
        made = len(self._runs) + len(self._made)
        self._progress(self.doing, made, made + 1)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made at the first call with this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def run(self, run: PhantomRun) -> Observed:
        """The run's numbers. A policy that does not fit is refused in its result. Raises ConfigurationError."""
        if run.key not in self._runs:
            self.tell()
            self._runs[run.key] = self._observe(run)
        return self._runs[run.key]

    def _observe(self, run: PhantomRun) -> Observed:
        known = find_model(run.model)
        if run.layers:
            known = replace(known, num_layers=run.layers)
        shape = cache_shape(known, self._kv_dtype, block_tokens_for(self._coarser * run.context))
        locality = load_selection_model(find_locality(run.locality)) if run.locality else self._locality
        selection = draw(locality, known.num_layers, self.seed)
        if run.steps == 1 and not run.warmup_steps:
            drawn = run.model, run.context, run.layers, f"{run.locality} {run.contexts}"
            selection = _Remembered(selection, self._answers.setdefault(drawn, {}))
        if run.predicted < 1:
            selection = _Mistaken(selection, run.predicted, self.seed)
        ended: list[Seen] = []
        with open_platform(run.platform, clock="virtual", overrides=run.overrides) as platform:
            kinds = {device.info.name: device.info.kind for device in platform.devices.values()}
            now: list[int] = []

            def watch(completion: Completion) -> None:
                if not now:
                    ended.append(_seen(completion))

            def finished(_: Policy) -> None:
                now.append(platform.clock.now())  # what comes after is no part of the steps

            platform.site.observers.append(watch)

            result = run_phantom(
                ShapeStages.of_shape(known),
                shape,
                platform,
                PolicyRequest(run.policy, dict(run.options)),
                context=run.contexts or run.context,
                batch=run.batch,
                steps=run.steps,
                warmup_steps=run.warmup_steps,
                decisions=selection,
                model=known.name,
                context_limit=known.context_length,
                weight_nbytes=known.weight_nbytes(),
                observer=finished,
            )
        begun = now[0] - result.elapsed_ns if now else 0
        inside = [each for each in ended if each[3] >= begun]
        return Observed(result, _work(inside), _exposed(inside, kinds, begun, now[0] if now else 0))


class _Remembered:
    """Drawn once for runs of one step that differ in time alone: without a step before, equal questions are answered
    alike."""

    def __init__(self, drawn: DrawnSelection, known: dict[str, Int64]) -> None:
        self._drawn = drawn
        self._known = known
        self.asked = False

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """k candidates of each list, best first. int64 (lists, k)."""
        self.asked = self._drawn.asked = True
        lengths, first = question.lengths.tolist(), question.first.tolist()
        key = repr((question.label, question.layer, question.requests, question.step, lengths, first, question.k))
        if key not in self._known:
            self._known[key] = self._drawn.answer(question, read)
        return self._known[key]

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """The group of each candidate. int64 (lists, candidates)."""
        return self._drawn.group(grouping, read)

    def beyond(self, model: str | None, longest: int) -> list[str]:
        """Why answers are extrapolated."""
        return self._drawn.beyond(model, longest)


class _Mistaken:
    """Drawn selections of which predictions, questions labelled `prefetch …`, are right with a probability only.

    Each candidate that is wrong is replaced by one that is not among the best, drawn by seed and question.
    """

    def __init__(self, drawn: DrawnSelection, right: float, seed: int) -> None:
        self._drawn = drawn
        self._right = right
        self._seed = seed
        self.asked = False

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """k candidates of each list, best first. int64 (lists, k)."""
        self.asked = True
        answer = self._drawn.answer(question, read)
        if not question.label.startswith("prefetch"):
            return answer
        label = zlib.crc32("\0".join((question.label, *question.requests)).encode())
        random = np.random.default_rng((self._seed, label, question.layer, question.step))
        for row, length in zip(answer, question.lengths.tolist(), strict=True):
            others = np.ones(length, dtype=bool)
            others[row[row >= 0]] = False
            others = random.permutation(np.flatnonzero(others))
            wrong = np.flatnonzero((row >= 0) & (random.random(len(row)) >= self._right))[: len(others)]
            row[wrong] = others[: len(wrong)]
        return answer

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """The group of each candidate. int64 (lists, candidates)."""
        return self._drawn.group(grouping, read)

    def beyond(self, model: str | None, longest: int) -> list[str]:
        """Why answers are extrapolated."""
        assumed = [f"predictions find {self._right:.0%} of what is best"] if self.asked else []
        return [*self._drawn.beyond(model, longest), *assumed]


def _seen(completion: Completion) -> Seen:
    command, kernel = completion.command, ""
    if isinstance(command, Launch):
        kernel = command.args.label if isinstance(command.args, Dense) else command.args.kernel
    return completion.device, kernel, completion.flops, completion.started_ns, completion.ended_ns


def _work(ended: Sequence[Seen]) -> dict[tuple[str, str], Work]:
    done: dict[tuple[str, str], Work] = {}
    for device, kernel, flops, start, end in ended:
        work = done.setdefault((device, kernel), Work())
        work.launches, work.flops, work.ns = work.launches + 1, work.flops + flops, work.ns + end - start
    return done


def _exposed(ended: Sequence[Seen], kinds: Mapping[str, str], begun: int, over_ns: int) -> dict[str, int]:
    """ns in which one of them alone was at work, or nobody; those in which several were are in none."""
    edges: list[tuple[int, int, str]] = []
    for device, kernel, _, start, end in ended:
        who = (GPU if kinds[device] == "gpu" else CPU) if kernel else COPIES if kinds[device] == "gpu" else CPU
        edges += [(start, 1, who), (end, -1, who)]
    alone = dict.fromkeys((GPU, CPU, COPIES, NOBODY), 0)
    active = dict.fromkeys((GPU, CPU, COPIES), 0)
    last = begun
    for time, change, who in sorted(edges):
        at_work = [name for name, count in active.items() if count]
        if len(at_work) <= 1:
            alone[at_work[0] if at_work else NOBODY] += time - last
        active[who] += change
        last = time
    alone[NOBODY] += over_ns - last
    return alone
