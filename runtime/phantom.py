"""Phantom runs: a policy on shapes, on the virtual clock, at sizes that no host has to hold.

The same policy code, decoder and engine as for real bytes; what has no bytes are the model (`Stages.begin` answers
None), the prompt (zero-stride arrays of the right shape, of which nothing is written) and the regions. Every command is
submitted and takes its time. What depends on data is answered by `decisions`: a recorded selection, with which the
times are those of the recorded run exactly, a locality model, or a score trace.

Times are `simulated` where everything that they rest on is known, and `extrapolated` with the reasons where not:
constants of the platform that are assumed or unknown, contexts beyond what the model was made for, and what the caller
adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tierloop.devices.clocks import WallClock
from tierloop.devices.errors import ConfigurationError, DeviceError, OutOfMemory
from tierloop.devices.platform import Platform
from tierloop.runtime.blocks import KVShape, TierTooSmall
from tierloop.runtime.compare import PolicyRequest, find_policy
from tierloop.runtime.decisions import Decisions
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.drawn_selection import DrawnSelection
from tierloop.runtime.engine import Engine
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.policy import Policy, Request, check_options, make
from tierloop.runtime.results import PolicyResult
from tierloop.runtime.selection import ReplayedSelection
from tierloop.runtime.stages import Stages, phantom_prefill

LARGEST_CONTEXT = 1 << 24
"""Tokens of a prompt: 16 times a million."""
LARGEST_BATCH = 4096
LARGEST_STEPS = 1 << 20


@dataclass(frozen=True)
class PhantomLoad:
    """The requests of a phantom run: a prompt length each, and how many tokens are decoded.

    `warmup_steps` are decoded before `steps` and not reported: caches fill, and the first selections are made.
    """

    prompt_tokens: tuple[int, ...]
    steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompt_tokens) <= LARGEST_BATCH:
            raise ConfigurationError(f"the batch is {len(self.prompt_tokens)}; it must be from 1 to {LARGEST_BATCH}")
        for tokens in self.prompt_tokens:
            if not 1 <= tokens <= LARGEST_CONTEXT:
                raise ConfigurationError(f"the context is {tokens}; it must be from 1 to {LARGEST_CONTEXT:,}")
        if self.steps < 1 or self.warmup_steps < 0 or self.all_steps > LARGEST_STEPS:
            raise ConfigurationError(
                f"steps are {self.steps} and warm-up steps {self.warmup_steps}; they must be at least 1 and 0, and "
                f"together at most {LARGEST_STEPS:,}"
            )

    @property
    def all_steps(self) -> int:
        """Steps that are decoded, reported or not."""
        return self.steps + self.warmup_steps


def run_phantom(
    stages: Stages,
    kv_shape: KVShape,
    platform: Platform,
    policy: PolicyRequest,
    *,
    context: int | Sequence[int],
    batch: int = 1,
    steps: int = 1,
    decisions: Decisions | None = None,
    warmup_steps: int = 0,
    model: str | None = None,
    context_limit: int | None = None,
    extrapolations: Sequence[str] = (),
    weight_nbytes: int = 0,
    observer: Callable[[Policy], None] | None = None,
) -> PolicyResult:
    """Decode `steps` tokens of each of `batch` requests with prompts of `context` tokens (or one length each).

    `platform` is open, virtual and emulated; it is the caller's, and everything taken there is given back. `model` is
    the name that a replayed selection has to be of, and a locality model should be; `context_limit` is what the model
    was made for, in tokens; `extrapolations` are further reasons; `weight_nbytes` is the room that weights take where
    the modules run. `observer` is called with the policy after the last step, to look at its state. A memory that is
    too small gives a result with `refused`. Raises ConfigurationError for anything else that is wrong.
    """
    load = PhantomLoad(tuple(context) if isinstance(context, Sequence) else (context,) * batch, steps, warmup_steps)
    if not platform.clock.virtual:
        raise ConfigurationError(f"platform {platform.name} runs on the wall clock; a phantom run takes virtual time")
    kind = find_policy(policy.name)
    check_options(kind, policy.options)
    if isinstance(decisions, ReplayedSelection):
        decisions.check(kv_shape, policy.name, policy.options, load.prompt_tokens, load.all_steps, model)
    watch = WallClock()
    reasons = [*extrapolations, *_beyond(load, context_limit)]
    engine = Engine(platform, kv_shape, phantom=True, decisions=decisions)
    observers = platform.site.observers
    before = list(observers)
    try:
        if weight_nbytes:
            _hold_weights(engine, weight_nbytes)
        made = make(kind, engine, policy.options)
        result = _Run(platform, engine, stages, made, load).decode(policy.title, observer)
        engine.close()
    except (TierTooSmall, OutOfMemory) as error:
        with suppress(DeviceError):  # commands may be under way
            engine.close()
        result = PolicyResult(policy.title, platform.name, refused=str(error))
    except BaseException:
        with suppress(DeviceError):  # commands are under way; what went wrong is said, and not that
            engine.close()
        raise
    finally:
        observers[:] = [each for each in observers if each in before]
    if isinstance(decisions, DrawnSelection):
        reasons += decisions.beyond(model, max(load.prompt_tokens))
    return replace(
        result,
        provenance="" if result.refused else "extrapolated" if reasons else platform.provenance,
        notes=(*platform.notes, *reasons),
        wall_s=watch.now() / 1e9,
    )


class _Run:
    """One policy on one platform, with the requests of a load."""

    def __init__(self, platform: Platform, engine: Engine, stages: Stages, policy: Policy, load: PhantomLoad) -> None:
        self._platform = platform
        self._engine = engine
        self._policy = policy
        self._load = load
        platform.site.observers.append(policy.observe)
        self._decoder = Decoder(stages, engine, policy, len(load.prompt_tokens))
        self._ledger = Ledger(platform)
        platform.site.observers.append(self._ledger)
        self._requests = [
            Request(f"request{number}", [0] * (tokens + 1), tokens + load.all_steps + 1, tokens)
            for number, tokens in enumerate(load.prompt_tokens)
        ]

    def decode(self, title: str, observer: Callable[[Policy], None] | None) -> PolicyResult:
        """Place the prompts, decode, and release; what is reported is of the steps after the warm-up."""
        loop, clock = self._engine.loop, self._platform.clock
        for request in self._requests:
            loop.run(self._decoder.adopt(request, phantom_prefill(self._engine.shape, request.prompt_tokens)))
        placement: Counter[str] = Counter()
        for request in self._requests:
            placement.update(self._policy.placement(request))
        loop.run(self._steps(self._load.warmup_steps))
        self._ledger.reset()
        self._engine.stages.reset()
        begun = clock.now()
        step_ns = loop.run(self._steps(self._load.steps))
        devices, links = self._ledger.snapshot()
        decoding_ns = clock.now() - begun
        details = self._policy.report()
        if observer is not None:
            observer(self._policy)
        for request in self._requests:
            loop.run(self._policy.release(request))
        return PolicyResult(
            policy=title,
            platform=self._platform.name,
            tokens_per_s=len(self._requests) * len(step_ns) * 1e9 / decoding_ns if decoding_ns else 0.0,
            step_ns=tuple(step_ns),
            elapsed_ns=decoding_ns,
            dilation=self._platform.dilation,
            exact=type(self._policy).exact,
            devices=devices,
            links=links,
            details=details,
            stages=dict(sorted(self._engine.stages.ns.items())),
            placement=dict(placement),
            guesses=tuple(self._platform.guesses),
        )

    async def _steps(self, count: int) -> list[int]:
        """ns of the clock for each of `count` steps."""
        clock, steps = self._platform.clock, []
        for _ in range(count):
            begun = clock.now()
            await self._decoder.step(self._requests)
            steps.append(clock.now() - begun)
        return steps


def _hold_weights(engine: Engine, nbytes: int) -> None:
    try:
        engine.scratch(engine.dense.memory, nbytes)
    except OutOfMemory as error:
        raise TierTooSmall(
            f"{engine.dense.memory} is too small: {nbytes:,} bytes of weights are needed there"
        ) from error


def _beyond(load: PhantomLoad, limit: int | None) -> list[str]:
    longest = max(load.prompt_tokens) + load.all_steps + 1
    if limit is None or longest <= limit:
        return []
    return [f"{longest:,} tokens are more than the {limit:,} that the model was made for"]
