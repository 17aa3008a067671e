"""What policies lose against dense attention: one prefill per case, shared by every policy and budget.

For each task and context length, each case is prefilled densely and decoded by each policy with each budget. Decoding
begins with the prompt's last token, so that every token of an answer comes from the policy. After each step the token
that should have come is fed, whatever was said: so all policies see the same inputs, and their numbers can be compared.

`score` of a task that asks is the share of answers that are right in every token; of perplexity it is the mean over
cases of (perplexity of dense attention) / (that of the policy). `dense_score` is the same of dense attention. A task
counts where dense attention has at least `COUNTS`; what does not count is left out of averages.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierloop.devices.errors import ConfigurationError, OutOfMemory, nearest
from tierloop.devices.kernels import warm_up
from tierloop.devices.kernels.contract import DTYPES
from tierloop.devices.platform import Platform
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.bounds import log_probabilities
from tierloop.runtime.compare import find_policy
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.model_shapes import cache_shape
from tierloop.runtime.oracle import Recall, Recorder, Verdict, rounded_to
from tierloop.runtime.policy import Policy, Request, check_options, make
from tierloop.runtime.stages import Prefill
from tierloop.runtime.statistics import mean_ci95, wilson_ci95
from tierloop.runtime.subjects import Cell, Subject, attend_densely, check_context, check_task
from tierloop.runtime.tasks import Case

Progress = Callable[[str, int, int], None]
COUNTS = 0.8
"""What dense attention has to score for a task to count."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured. Options are those of each policy by name; `budgets` go to policies that have one."""

    policies: tuple[str, ...]
    budgets: tuple[float, ...] = (0.05, 0.1, 0.25)
    contexts: tuple[int, ...] = (1024,)
    tasks: tuple[str, ...] = ()
    """Empty: all that the model has."""
    prompts: int = 8
    seed: int = 0
    kv_dtype: str = "float32"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """What is wrong with any model. Raises ConfigurationError."""
        if not self.policies:
            raise ConfigurationError("no policy was named; at least one is needed")
        if not self.contexts:
            raise ConfigurationError("no context length was named; at least one is needed")
        if self.prompts < 1:
            raise ConfigurationError(f"--prompts {self.prompts}: at least 1 is needed")
        if not self.budgets:
            raise ConfigurationError("no budget was named; at least one is needed")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise ConfigurationError(f"--budget {budget}: it must be above 0 and at most 1")
        if self.kv_dtype not in DTYPES:
            raise ConfigurationError(f"--kv-dtype {self.kv_dtype!r}: {nearest(self.kv_dtype, sorted(DTYPES))}")
        for policy in self.policies:
            kind, options = find_policy(policy), self.options.get(policy, {})
            check_options(kind, options)
            if "budget" in options:
                raise ConfigurationError(f"--option {policy}.budget: name budgets by --budget")

    def check_for(self, subject: Subject) -> None:
        """What is wrong with this model. Raises ConfigurationError."""
        for task in self.tasks:
            check_task(subject, task)
        for context in self.contexts:
            check_context(subject, context)


@dataclass(frozen=True)
class Row:
    """One policy with one budget on one task at one context length, over `cases` answers or stretches of text.

    `budget` is 1 for exact policies and None for others that have no such option. `ci95` is the interval of 95 %
    confidence of `score`: Wilson's for shares, Student's t for means. The five means after it are `oracle.Recall`'s,
    `layers` has them for each layer that was checked, by its number. `ppl` and `dense_ppl` are geometric means, of text
    alone. `refused` says why a policy did not run; then numbers are those of nothing.
    """

    policy: str
    budget: float | None
    context: int
    task: str
    cases: int = 0
    score: float = math.nan
    ci95: tuple[float, float] = (math.nan, math.nan)
    dense_score: float = math.nan
    counts: bool = False
    topk_recall: float = math.nan
    mass_recall: float = math.nan
    attended_share: float = math.nan
    output_error: float = math.nan
    error_vs_dense: float = math.nan
    worst_ratio: float = math.nan
    checked: int = 0
    layers: dict[int, Recall] = field(default_factory=dict)
    ppl: float | None = None
    dense_ppl: float | None = None
    refused: str | None = None
    exact: bool = False


@dataclass(frozen=True)
class Accuracy:
    """All rows of a measurement."""

    model: str
    kv_dtype: str
    platform: str
    rows: tuple[Row, ...]
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def averages(self) -> list[dict[str, Any]]:
        """Of each policy, budget and context the mean score over the tasks that count."""
        found: dict[tuple[str, float | None, int], list[Row]] = {}
        for row in self.rows:
            if row.counts and row.refused is None:
                found.setdefault((row.policy, row.budget, row.context), []).append(row)
        return [
            {
                "policy": policy,
                "budget": budget,
                "context": context,
                "score": sum(row.score for row in rows) / len(rows),
                "tasks": [row.task for row in rows],
            }
            for (policy, budget, context), rows in found.items()
        ]

    @property
    def failures(self) -> list[str]:
        """Checks that failed: an error beyond its bound; an exact policy on float32 rows that answers otherwise."""
        failed = []
        for row in self.rows:
            where = f"{row.policy}, budget {row.budget}, {row.task} at {row.context}"
            if row.refused is not None:
                continue
            if not row.worst_ratio <= 1:  # also where it is NaN
                failed.append(f"{where}: an output is {row.worst_ratio:.3g} times its bound off the float64 oracle")
            if row.exact and self.kv_dtype == "float32" and not math.isclose(row.score, row.dense_score, rel_tol=1e-3):
                failed.append(f"{where}: an exact policy scores {row.score:.4g}, dense attention {row.dense_score:.4g}")
        return failed

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {**asdict(self), "averages": self.averages}


@dataclass(frozen=True)
class _Heard:
    """What a case gave: whether each turn was answered rightly, and the mean log probability of what should come."""

    right: tuple[bool, ...]
    log_probability: float
    verdict: Verdict = Verdict()  # noqa: RUF009  (frozen)


@dataclass(frozen=True)
class _Variant:
    policy: str
    kind: type[Policy]
    budget: float | None
    options: dict[str, Any]

    @property
    def title(self) -> str:
        return self.policy if self.kind.exact or self.budget is None else f"{self.policy} {self.budget:g}"


def measure(
    subject: Subject, asked: Asked, open_platform: Callable[[], Platform], progress: Progress | None = None
) -> Accuracy:
    """Run every policy with every budget on every task and context length, each on fresh platforms.

    A policy that does not fit is reported as refused. Raises ConfigurationError, WorkloadError or a DeviceError.
    """
    asked.check()
    asked.check_for(subject)
    report = progress or (lambda *_: None)
    variants = _variants(asked)
    tasks = asked.tasks or subject.tasks
    cells = [subject.cell(t, c, asked.prompts, asked.seed) for c in asked.contexts for t in tasks]
    report("kernels (compiled at first use)", 0, 1)
    warm_up()
    report("kernels (compiled at first use)", 1, 1)
    rows: list[Row] = []
    names: dict[str, None] = {}
    for cell in cells:
        shape = cache_shape(cell.shape, asked.kv_dtype)  # type: ignore[arg-type]  # `check` has
        dense: list[_Heard] = []
        heard: list[list[_Heard]] = [[] for _ in variants]
        refused: dict[int, str] = {}
        stage, total = f"{cell.task} at {cell.context}", len(cell.cases) * (1 + len(variants))
        for number, case in enumerate(cell.cases):
            report(stage, number * (1 + len(variants)), total)
            prefill = cell.prefill(case)
            dense.append(_hear_dense(cell, prefill, case))
            for which, variant in enumerate(variants):
                report(stage, number * (1 + len(variants)) + 1 + which, total)
                if which in refused:
                    continue
                with open_platform() as platform:
                    names[platform.name] = None
                    try:
                        heard[which].append(_hear(cell, shape, variant, platform, prefill, case))
                    except (ConfigurationError, OutOfMemory) as error:
                        refused[which] = str(error)
        report(stage, total, total)
        for which, variant in enumerate(variants):
            rows.append(_row(cell, variant, dense, heard[which], refused.get(which)))
    return Accuracy(subject.name, asked.kv_dtype, ", ".join(names), tuple(rows))


def _variants(asked: Asked) -> list[_Variant]:
    found = []
    for policy in dict.fromkeys(asked.policies):
        kind, options = find_policy(policy), asked.options.get(policy, {})
        takes = not kind.exact and "budget" in inspect.signature(kind.__init__).parameters
        if takes and "k" not in options:  # rows instead of a share: the budget says nothing then
            budgets = dict.fromkeys(asked.budgets)
            found += [_Variant(policy, kind, budget, {**options, "budget": budget}) for budget in budgets]
        else:
            found.append(_Variant(policy, kind, 1.0 if kind.exact else None, options))
    return found


def _hear_dense(cell: Cell, prefill: Prefill, case: Case) -> _Heard:
    said, scores = [], []
    expected = [token for turn in case.turns for token in turn.expected]
    for logits, wanted in zip(attend_densely(cell, prefill, case), expected, strict=True):
        said.append(int(logits.argmax()))
        scores.append(float(log_probabilities(logits[None], [wanted])[0]))
    return _Heard(_right(case, said), sum(scores) / len(scores))


def _hear(cell: Cell, shape: KVShape, variant: _Variant, platform: Platform, prefill: Prefill, case: Case) -> _Heard:
    engine = Engine(platform, shape)
    policy = make(variant.kind, engine, variant.options)
    platform.site.observers.append(policy.observe)
    recorder = Recorder(shape, cell.stages.scale, cell.layers, rounded_to(platform, shape))
    decoder = Decoder(cell.stages, engine, policy, recorder=recorder)
    first = len(prefill.tokens)
    request = Request("request", [*prefill.tokens, prefill.first_token], first + case.num_steps + 1)
    request.prompt_tokens = first
    loop = engine.loop
    loop.run(decoder.adopt(request, prefill))
    said: list[int] = []
    scores: list[float] = []

    async def decode() -> None:
        for turn in case.turns:
            for fed, expected in zip(turn.fed, turn.expected, strict=True):
                request.tokens[-1] = fed
                if cell.is_text:
                    scores.extend(await decoder.score([request], [expected]))
                else:
                    said.extend(await decoder.step([request]))

    loop.run(decode())
    loop.run(policy.release(request))
    engine.close()
    right = () if cell.is_text else _right(case, said)
    return _Heard(right, sum(scores) / len(scores) if scores else 0.0, recorder.verdict())


def _right(case: Case, said: Sequence[int]) -> tuple[bool, ...]:
    """Whether each turn was answered as expected, in every token."""
    right, first = [], 0
    for turn in case.turns:
        right.append(tuple(said[first : first + len(turn.expected)]) == turn.expected)
        first += len(turn.expected)
    return tuple(right)


def _row(cell: Cell, variant: _Variant, dense: list[_Heard], heard: list[_Heard], refused: str | None) -> Row:
    row = Row(variant.policy, variant.budget, cell.context, cell.task, refused=refused, exact=variant.kind.exact)
    if refused is not None:
        return row
    verdicts = [one.verdict for one in heard]
    layers = [Recall.mean(of_layer) for of_layer in zip(*(v.layers for v in verdicts), strict=True)]
    recall = Recall.mean(layers)
    row = replace(
        row,
        topk_recall=recall.topk_recall,
        mass_recall=recall.mass_recall,
        attended_share=recall.attended_share,
        output_error=recall.output_error,
        error_vs_dense=max(v.error_vs_dense for v in verdicts),
        worst_ratio=max(v.worst_ratio for v in verdicts),
        checked=recall.checked,
        layers={number: layer for number, layer in enumerate(layers) if layer.checked},
    )
    if cell.is_text:
        ratios = [math.exp(ours.log_probability - d.log_probability) for ours, d in zip(heard, dense, strict=True)]
        mean, half = mean_ci95(ratios) if all(map(math.isfinite, ratios)) else (math.nan, math.nan)
        return replace(
            row,
            cases=len(ratios),
            score=mean,
            ci95=(mean - half, mean + half),
            dense_score=1.0,
            counts=True,
            ppl=_perplexity(heard),
            dense_ppl=_perplexity(dense),
        )
    right, of_dense = ([answer for one in found for answer in one.right] for found in (heard, dense))
    dense_score = sum(of_dense) / len(of_dense)
    return replace(
        row,
        cases=len(right),
        score=sum(right) / len(right),
        ci95=wilson_ci95(sum(right), len(right)),
        dense_score=dense_score,
        counts=dense_score >= COUNTS,
    )


def _perplexity(heard: Iterable[_Heard]) -> float:
    scores = [one.log_probability for one in heard]
    return math.exp(-sum(scores) / len(scores))
