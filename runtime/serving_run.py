"""Serving runs: a policy, a platform, requests that arrive, and what came of them.

`serve_phantom` serves shapes on the virtual clock, with all layers of a model or some that stand for all
(layer_sample.py); `serve_model` serves a real model with real bytes, on any platform. Both use the same loop
(serving.py) and give the same result.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.errors import ConfigurationError, DeviceError, OutOfMemory, nearest
from tierloop.devices.kernels import warm_up
from tierloop.devices.kernels.contract import DTYPES, DType
from tierloop.devices.platform import Platform
from tierloop.runtime.arrivals import Arrival
from tierloop.runtime.arrivals import check as check_arrivals
from tierloop.runtime.blocks import K, KVShape, TierTooSmall, V
from tierloop.runtime.compare import PolicyRequest, find_policy, kv_shape
from tierloop.runtime.decisions import Decisions
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.drawn_selection import DrawnSelection
from tierloop.runtime.dtypes import itemsize
from tierloop.runtime.engine import Engine
from tierloop.runtime.layer_sample import LayerSample
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.model_shapes import KnownShape, ShapeStages, cache_shape
from tierloop.runtime.models import Model
from tierloop.runtime.modules import Modules
from tierloop.runtime.oracle import Recorder
from tierloop.runtime.policy import Policy, check_options, make
from tierloop.runtime.prefill import end_tokens
from tierloop.runtime.prefill_workers import PrefillWorkers
from tierloop.runtime.served import ServingResult
from tierloop.runtime.serving import PromptOf, Server, ServingRules
from tierloop.runtime.stages import Stages
from tierloop.runtime.tier_writes import TierWrites, left_empty

Progress = Callable[[int, int], None]
"""progress(requests that are over, all requests)."""
LONGEST_RUN_NS = 1 << 60
UTILISATION = 0.9
"""The share of the GPU's memory that weights and KV cache may have; the rest is working space. vLLM's default."""


@dataclass(frozen=True)
class Serving:
    """How requests are served: the rules of the loop, and what the KV cache may have of memories.

    `utilisation` is the share of the memory where the modules run that weights and KV cache may take together.
    `block_tokens` are those of a KV block; a phantom run has `layers` of the model's (0: all of them), with weights of
    `weight_dtype`. Raises ConfigurationError.
    """

    rules: ServingRules = field(default_factory=ServingRules)
    kv_dtype: DType = "float16"
    block_tokens: int = 256
    split_tokens: int = 64
    utilisation: float = UTILISATION
    layers: int = 2
    weight_dtype: DType = "bfloat16"

    def __post_init__(self) -> None:
        for what, dtype in (("kv_dtype", self.kv_dtype), ("weight_dtype", self.weight_dtype)):
            if dtype not in DTYPES:
                raise ConfigurationError(f"{what} {dtype!r}: {nearest(str(dtype), sorted(DTYPES))}")
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 0:
            raise ConfigurationError(f"layers are {self.layers!r}; they must be a whole number, at least 0")
        if not 0 < self.utilisation <= 1:
            raise ConfigurationError(f"utilisation is {self.utilisation}; it must be above 0 and at most 1")


def serve_phantom(
    model: KnownShape,
    platform: Platform,
    policy: PolicyRequest,
    arrivals: Sequence[Arrival],
    how: Serving,
    decisions: Decisions | None = None,
    *,
    progress: Progress | None = None,
    observer: Callable[[Policy], None] | None = None,
) -> ServingResult:
    """Serve shapes of requests, on the virtual clock. A policy that does not fit at all gives a result with `refused`.

    Raises ConfigurationError for arrivals, options or a platform that are wrong.
    """
    if not platform.clock.virtual:
        raise ConfigurationError(f"platform {platform.name} runs on the wall clock; a phantom run takes virtual time")
    sample = LayerSample(model.num_layers, min(how.layers, model.num_layers) or model.num_layers)
    some = replace(model, num_layers=sample.simulated)
    engine = Engine(
        platform, cache_shape(some, how.kv_dtype, how.block_tokens, how.split_tokens), phantom=True, decisions=decisions
    )
    weight_item = itemsize(how.weight_dtype)
    limits = {m.name: m.capacity for m in engine.memories()}
    limits[engine.dense.memory] = int(limits[engine.dense.memory] * how.utilisation) - model.weight_nbytes(weight_item)
    run = _Run(platform, engine, ShapeStages.of_shape(some, weight_item), policy, how, arrivals, sample)
    result = run.serve({m: int(n / sample.whole) for m, n in limits.items()}, _zeros, frozenset(), progress, observer)
    reasons = _beyond(arrivals, model)
    if sample.whole > 1:
        reasons.append(f"{sample.simulated} layers stand for {model.num_layers}")
    if isinstance(decisions, DrawnSelection):
        reasons += decisions.beyond(model.name, max(a.total_tokens for a in arrivals))
    provenance = "" if result.refused else "extrapolated" if reasons else platform.provenance
    return replace(result, provenance=provenance, notes=(*result.notes, *reasons))


def serve_model(
    model: Model,
    platform: Platform,
    policy: PolicyRequest,
    arrivals: Sequence[Arrival],
    how: Serving,
    *,
    seed: int = 0,
    stop_at_end: bool = False,
    recorder: Callable[[KVShape, float], Recorder] | None = None,
    progress: Progress | None = None,
    observer: Callable[[Policy], None] | None = None,
) -> ServingResult:
    """Serve a real model. Prompts that the arrivals do not give are random tokens, drawn by seed and request.

    `stop_at_end` ends a turn where the model says so; otherwise each turn has the tokens that were asked for. Raises
    ConfigurationError also for prompts that are longer than the model's context.
    """
    longest = max((a.total_tokens for a in arrivals), default=0)
    if longest > model.shape.context_length:
        raise ConfigurationError(
            f"a request of {longest:,} tokens does not fit {model.name}'s context of {model.shape.context_length:,}"
        )
    warm_up()
    shape = kv_shape(model, how.kv_dtype, how.block_tokens, how.split_tokens)
    engine = Engine(platform, shape)
    memory = engine.dense.memory
    limits = {memory: min(int(engine.info(memory).capacity * how.utilisation), _everything(arrivals, shape))}
    modules = Modules(model.module)
    sample = LayerSample(shape.num_layers, shape.num_layers)
    made = None if recorder is None else recorder(shape, modules.scale)
    run = _Run(platform, engine, modules, policy, how, arrivals, sample, made)
    ends = end_tokens(model) if stop_at_end else frozenset[int]()
    result = run.serve(limits, random_prompts(model.shape.vocab, seed), ends, progress, observer)
    return replace(result, provenance="" if result.refused else platform.provenance)


def random_prompts(vocabulary: int, seed: int) -> PromptOf:
    """Prompts of the arrivals where they have tokens, otherwise random ones by seed and request."""

    def prompt_of(arrival: Arrival, turn: int) -> Sequence[int]:
        if turn == 0 and arrival.tokens is not None:
            return arrival.tokens
        name = np.frombuffer(arrival.name.encode(), dtype=np.uint8)
        random = np.random.default_rng([seed, turn, *name.tolist()])
        return list(map(int, random.integers(0, vocabulary, arrival.turns[turn].prompt_tokens)))

    return prompt_of


def _zeros(arrival: Arrival, turn: int) -> Sequence[int]:
    return [0] * arrival.turns[turn].prompt_tokens


@dataclass
class _Run:
    """One policy on one platform, with requests to serve."""

    platform: Platform
    engine: Engine
    stages: Stages
    wanted: PolicyRequest
    how: Serving
    arrivals: Sequence[Arrival]
    sample: LayerSample
    recorder: Recorder | None = None

    def serve(
        self,
        limits: Mapping[str, int],
        prompt_of: PromptOf,
        ends: frozenset[int],
        progress: Progress | None,
        observer: Callable[[Policy], None] | None,
    ) -> ServingResult:
        """Serve everything; afterwards what was taken on the platform is given back."""
        kind, watch, observers = find_policy(self.wanted.name), WallClock(), self.platform.site.observers
        before = list(observers)
        try:
            check_options(kind, self.wanted.options)
            check_arrivals(self.arrivals)
            if not self.arrivals:
                raise ConfigurationError("there are no requests to serve")
            for memory, nbytes in limits.items():
                self.engine.limit(memory, nbytes)
            result = self._served(make(kind, self.engine, self.wanted.options), prompt_of, ends, progress, observer)
            self.engine.close()
        except (TierTooSmall, OutOfMemory) as error:
            with suppress(DeviceError):  # commands may be under way
                self.engine.close()
            result = ServingResult(self.wanted.title, self.platform.name, refused=str(error))
        except BaseException:
            with suppress(DeviceError):  # commands are under way; what went wrong is said, and not that
                self.engine.close()
            raise
        finally:
            observers[:] = [each for each in observers if each in before]
        return replace(result, wall_s=watch.now() / 1e9, notes=(*self.platform.notes, *result.notes))

    def _workers(self) -> PrefillWorkers | None:
        count = self.how.rules.prefill_workers
        if not count:
            return None
        if not self.engine.phantom:
            raise ConfigurationError(
                "prefill_workers: a real model's prompts are prefilled where they are decoded; "
                "workers are for phantom runs"
            )
        return PrefillWorkers(self.engine, self.stages, count, self.sample.whole)

    def _served(
        self,
        policy: Policy,
        prompt_of: PromptOf,
        ends: frozenset[int],
        progress: Progress | None,
        observer: Callable[[Policy], None] | None,
    ) -> ServingResult:
        platform, observers = self.platform, self.platform.site.observers
        observers += [policy.observe, self.sample]
        rules = self.how.rules
        decoder = Decoder(self.stages, self.engine, policy, rules.step_tokens, self.recorder)
        server = Server(
            decoder,
            self.engine,
            policy,
            rules,
            prompt_of,
            ends,
            self.sample.left_out_ns,
            self.sample.whole,
            progress or (lambda *_: None),
            self._workers(),
        )
        ledger, writes = Ledger(platform), TierWrites()
        observers += [ledger, writes]
        gc.collect()
        gc.freeze()  # or the collector walks the whole model in the middle of a step
        try:
            self.engine.loop.run(server.serve(self.arrivals), LONGEST_RUN_NS)
        finally:
            gc.unfreeze()
        devices, links = ledger.snapshot()
        tiers = writes.use(self.engine.blocks_placed)
        if observer is not None:
            observer(policy)
        return ServingResult(
            self.wanted.title,
            platform.name,
            "virtual" if platform.clock.virtual else "wall",
            requests=server.log.served(),
            samples=server.log.samples,
            steps=server.steps,
            elapsed_ns=ledger.elapsed_ns,
            dilation=platform.dilation,
            devices=devices,
            links=links,
            tiers=tiers,
            notes=tuple(left_empty(tiers, policy.tiers())),
            details=policy.report(),
            guesses=tuple(platform.guesses),
            invalid=tuple(platform.site.invalid),
        )


def _everything(arrivals: Sequence[Arrival], shape: KVShape) -> int:
    """Bytes that are enough for all requests at once: with numbers, a larger pool would only need a larger host."""
    tokens = sum(shape.num_blocks(a.total_tokens) + 1 for a in arrivals) * shape.block_tokens
    return 2 * tokens * shape.num_layers * shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))


def _beyond(arrivals: Sequence[Arrival], model: KnownShape) -> list[str]:
    """Contexts beyond what the model was made for, by kind of request."""
    longest = max((a.total_tokens for a in arrivals), default=0)
    if longest <= model.context_length:
        return []
    many = Counter(a.total_tokens > model.context_length for a in arrivals)[True]
    return [
        f"{many} requests of up to {longest:,} tokens are longer than the {model.context_length:,} that "
        f"{model.name} was made for"
    ]
