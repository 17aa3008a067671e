"""One workload under several policies: prefill once, decode under each, check every answer.

Each policy gets a fresh platform and the shared prefill. Placement of the prompt is not part of the decode time.
Device and link use, busy and stall time count the decode alone. After the run the float64 oracle judges every
attention output, outside of any time that is reported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierloop.devices.clocks import WallClock
from tierloop.devices.errors import ConfigurationError, OutOfMemory
from tierloop.devices.kernels import warm_up
from tierloop.devices.placement import Placements
from tierloop.devices.platform import Platform
from tierloop.devices.registry import entry
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.model_shapes import ShapeStages, cache_shape
from tierloop.runtime.models import Model
from tierloop.runtime.modules import Modules
from tierloop.runtime.oracle import Recorder, Verdict, rounded_to
from tierloop.runtime.policy import Policy, Request, make
from tierloop.runtime.prefill import Dense, end_tokens, generate_dense, text_of
from tierloop.runtime.results import Comparison, PolicyResult
from tierloop.runtime.selection import Origin, RecordedSelection, SelectionRecord
from tierloop.runtime.tier_writes import TierWrites, left_empty
from tierloop.runtime.trace import TraceRecorder
from tierloop.runtime.workloads import Workload

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): `dense`, then `kernels` (compiled at first use), then the labels of the policies."""


@dataclass(frozen=True)
class PolicyRequest:
    """A policy to run: its registered name, options, and what the report calls it.

    `platform` tells `open_platform` that this policy runs on something else than the others.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    platform: str | None = None
    label: str | None = None

    @property
    def title(self) -> str:
        """The label, or the name."""
        return self.label or self.name


def kv_shape(model: Model, dtype: str = "float32", block_tokens: int = 64, split_tokens: int = 64) -> KVShape:
    """The cache's shape for a model. Raises ValueError for an unknown dtype."""
    return cache_shape(model.shape, dtype, block_tokens, split_tokens)  # type: ignore[arg-type]  # it checks dtype


def _elsewhere(placements: Placements) -> list[str]:
    """Memories whose pages did not lie where they were wanted when they were looked at last."""
    return [
        f"{memory}: {row['pages_elsewhere']} pages lie on other nodes than {row['wanted_nodes']}"
        for memory, row in placements.report()["memories"].items()
        if row["pages_elsewhere"]
    ]


def _nothing_done(steps: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What a reader must know of a run that had nothing left to do."""
    if steps:
        return []
    return [f"no step was decoded, and nothing was checked: all {len(tokens)} tokens were there already"]


def find_policy(name: str) -> type[Policy]:
    """The registered policy of that name. Raises ConfigurationError with the near names."""
    kind = entry("policies", name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigurationError(f"policy {name!r}: {kind!r} is not a Policy")
    return kind


def compare(
    model: Model,
    workload: Workload,
    open_platform: Callable[[PolicyRequest], Platform],
    policies: Sequence[PolicyRequest],
    *,
    num_tokens: int,
    kv_dtype: str = "float32",
    oracle: bool = True,
    dense: Dense | None = None,
    progress: Progress | None = None,
    trace: TraceRecorder | None = None,
    selections: list[SelectionRecord] | None = None,
) -> Comparison:
    """Run every policy on the workload; a policy that does not fit is reported as refused, not raised.

    `selections`, where given, gets what each policy decided by the bytes, to be replayed by a phantom run.

    `dense` is the shared prefill and reference of an earlier call with the same model and prompt and at least as many
    tokens. Raises ConfigurationError, WorkloadError or a DeviceError.
    """
    if not policies:
        raise ConfigurationError("no policy was named; at least one is needed")
    kinds = [find_policy(p.name) for p in policies]
    shape = kv_shape(model, kv_dtype)
    modules = Modules(model.module)
    report = progress or (lambda *_: None)
    if dense is None:
        dense = generate_dense(model, workload.token_ids, num_tokens, lambda n: report("dense", n, num_tokens))
    reference = dense.tokens[:num_tokens]
    report("kernels (compiled at first use)", 0, 1)
    warm_up()
    report("kernels (compiled at first use)", 1, 1)
    results: list[PolicyResult] = []
    platform_name = clock = ""
    for wanted, kind in zip(policies, kinds, strict=True):
        with open_platform(wanted) as platform:
            if not platform_name or wanted.platform is None:
                platform_name, clock = platform.name, "virtual" if platform.clock.virtual else "wall"
            watch = WallClock()
            try:
                run = _Run(model, modules, platform, shape, kind, wanted, oracle, trace, selections is not None)
                result = run.decode(dense, num_tokens, report)
                if selections is not None and run.selection is not None:
                    selections.append(run.selection)
            except (ConfigurationError, OutOfMemory) as error:
                result = PolicyResult(wanted.title, platform.name, refused=str(error), notes=tuple(platform.notes))
            answered = workload.is_answered_by(result.text)
            results.append(
                replace(
                    result,
                    equal_to_dense=result.refused is None and result.tokens == reference,
                    answered=answered,
                    wall_s=watch.now() / 1e9,
                )
            )
    return Comparison(
        platform_name,
        clock,
        model.name,
        len(workload.token_ids),
        tuple(results),
        kv_dtype,
        text_of(model, reference),
        reference,
        workload.question,
        workload.answer,
    )


class _Run:
    """One policy on one platform."""

    def __init__(
        self,
        model: Model,
        modules: Modules,
        platform: Platform,
        shape: KVShape,
        kind: type[Policy],
        wanted: PolicyRequest,
        oracle: bool,
        trace: TraceRecorder | None,
        recording: bool,
    ) -> None:
        self._model = model
        self._platform = platform
        self._wanted = wanted
        self._trace = trace
        decisions = None
        if recording:
            stages = ShapeStages.of(modules)
            origin = Origin(model.name, model.fingerprint, shape, wanted.name, wanted.options, stages=stages)
            decisions = RecordedSelection(origin)
        self.selection = None if decisions is None else decisions.record
        """What the policy decided by, where it was to be recorded; complete after `decode`."""
        self._engine = Engine(platform, shape, decisions=decisions)
        self._policy = make(kind, self._engine, wanted.options)
        platform.site.observers.append(self._policy.observe)
        self._recorder = Recorder(shape, modules.scale, rounded=rounded_to(platform, shape)) if oracle else None
        self._decoder = Decoder(modules, self._engine, self._policy, recorder=self._recorder)
        self._ledger, self._writes = Ledger(platform), TierWrites()
        platform.site.observers += [self._ledger, self._writes]

    def decode(self, dense: Dense, num_tokens: int, report: Progress) -> PolicyResult:
        """Place the prompt and decode; afterwards everything that was taken on the platform is given back."""
        prompt = dense.prefill
        request = Request("request", [*prompt.tokens, prompt.first_token], len(prompt.tokens) + num_tokens)
        request.prompt_tokens = len(prompt.tokens)
        request.model = self._model.fingerprint
        loop, title = self._engine.loop, self._wanted.title
        report(title, 0, num_tokens)
        loop.run(self._decoder.adopt(request, prompt))
        placement, scales = self._policy.placement(request), request.blocks.scales
        self._ledger.reset()
        self._engine.stages.reset()
        if self._trace is not None:
            self._trace.begin(self._platform, title)
        gc.collect()
        gc.freeze()  # or the collector walks the whole model in the middle of a step: 270 ms
        try:
            steps = loop.run(self._steps(request, num_tokens, report))
        finally:
            gc.unfreeze()
            if self._trace is not None:
                self._trace.end()
        if self.selection is not None:
            self.selection.origin = replace(
                self.selection.origin, prompt_tokens=(request.prompt_tokens,), steps=len(steps)
            )
        devices, links = self._ledger.snapshot()
        elapsed_ns = self._ledger.elapsed_ns
        placements = Placements.of(self._platform.site)
        placements.again()
        tiers = self._writes.use(self._engine.blocks_placed)
        loop.run(self._policy.release(request))
        self._engine.close()
        tokens = tuple(request.tokens[request.prompt_tokens :])
        verdict = self._recorder.verdict() if self._recorder is not None else Verdict()
        sigma, site = self._platform.dilation, self._platform.site
        decoding_ns = sum(steps) / sigma
        return PolicyResult(
            policy=title,
            platform=self._platform.name,
            text=text_of(self._model, tokens),
            tokens=tokens,
            max_error=verdict.max_error,
            error_bound=verdict.error_bound,
            error_vs_dense=verdict.error_vs_dense,
            worst_ratio=verdict.worst_ratio,
            checked=verdict.checked,
            mass_recall=verdict.mass_recall,
            topk_recall=verdict.topk_recall,
            attended_share=verdict.attended_share,
            clipped_keys=0 if scales is None else scales.clipped,
            tokens_per_s=len(steps) * 1e9 / decoding_ns if decoding_ns else 0.0,
            step_ns=tuple(round(s / sigma) for s in steps),
            provenance=self._platform.provenance,
            dilation=sigma,
            exact=type(self._policy).exact,
            devices=devices,
            links=links,
            details=self._policy.report(),
            stages={stage: -(-ns // sigma) for stage, ns in sorted(self._engine.stages.ns.items())},
            elapsed_ns=elapsed_ns,
            tiers=tiers,
            placement=placement,
            nodes=placements.report(),
            guesses=tuple(self._platform.guesses),
            notes=(
                *self._platform.notes,
                *self._notes(steps, tokens, placements),
                *left_empty(tiers, self._policy.tiers()),
            ),
            lateness={
                f"{device} queue {queue}": tuple(counts) for (device, queue), counts in sorted(site.lateness.items())
            },
            interference=site.interference,
            invalid=tuple(self._platform.site.invalid),
        )

    def _notes(self, steps: list[int], tokens: tuple[int, ...], placements: Placements) -> list[str]:
        return [*self._emulation_error(), *_nothing_done(steps, tokens), *_elsewhere(placements)]

    def _emulation_error(self) -> list[str]:
        """How well the wall clock's emulation was kept, for whoever reads the numbers."""
        site = self._platform.site
        if not site.lateness:
            return []
        late_us, worst_us = (site.late_ns(share) / 1000 / self._platform.dilation for share in (0.99, 1))
        return [
            f"emulation: 99 of 100 commands ended at most {late_us:.1f} µs late, all of them {worst_us:.1f} µs (scaled "
            f"back); the emulators' own traffic took {site.interference:.1%} of this host's memory bandwidth"
        ]

    async def _steps(self, request: Request, num_tokens: int, report: Progress) -> list[int]:
        """Decode until `num_tokens` are there or the sequence ends; ns of the clock per step."""
        clock, ends = self._platform.clock, end_tokens(self._model)
        steps = []
        while len(request.tokens) - request.prompt_tokens < num_tokens and request.tokens[-1] not in ends:
            begun = clock.now()
            await self._decoder.step([request])
            steps.append(clock.now() - begun)
            if self._trace is not None:
                self._trace.span("steps", f"step {len(steps)}", begun, clock.now())
            report(self._wanted.title, len(request.tokens) - request.prompt_tokens, num_tokens)
        report(self._wanted.title, num_tokens, num_tokens)
        return steps
