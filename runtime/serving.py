"""The serving loop: continuous batching of requests that come at any time and have any length, under any policy.

Before each step the loop decides what the step is of (`Server._schedule`), in this order:

1. Every request that decodes gets one token. Where the policy has no room for it (`Policy.grow`), the request that was
   admitted last is preempted: recomputed later, or swapped to the host's memory.
2. What is left of `step_tokens` goes to prompts, in chunks, first come first served: those of requests that are there,
   then those of requests that are admitted now (`Policy.admit`), swapped ones first. Whoever does not fit waits, and
   everybody behind it; nobody is admitted in a step in which somebody was preempted.

The step is one of the decoder, with a part for what decodes and one for each chunk. A request's first token counts when
its prompt is where it belongs (`Policy.prompt_is_stored`), so writing the KV cache out is part of the time to the first
token. A request with several turns keeps its rows between them, and may be preempted then before anybody else.

A request that can never be served (it alone does not fit, a device that it needs was lost) fails alone. One whose rows
were lost in the middle (their device is gone, or cannot read them any more) is recomputed, `recomputes` times at most,
and fails then: a failure that stays does not keep it coming back for ever.

The loop knows nothing of devices and time but the clock: the same code serves a real model and phantom requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tierloop.devices.errors import ConfigurationError, DeviceError, Unsupported
from tierloop.runtime.arrivals import Arrival, check
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.decoder import Decoder, Part
from tierloop.runtime.engine import Engine
from tierloop.runtime.loop import Alarm, let_pass, yield_to_others
from tierloop.runtime.policy import Policy, Request
from tierloop.runtime.prefill_workers import PrefillWorkers
from tierloop.runtime.serving_log import Log
from tierloop.runtime.stages import phantom_prefill

PREEMPTIONS = ("recompute", "swap")
LARGEST_STEP = 1 << 20
MOST_RECOMPUTES = 1000
PromptOf = Callable[[Arrival, int], Sequence[int]]
"""The prompt tokens of a turn of an arrival."""


@dataclass(frozen=True)
class ServingRules:
    """Limits of a step, and what happens to whom there is no room for. Raises ConfigurationError.

    `max_batch` requests at most hold space at a time, `step_tokens` new tokens at most are in a step. With
    `prefill_workers` prompts are prefilled elsewhere (prefill_workers.py); later turns are not. A request that loses
    its rows is recomputed `recomputes` times in its life, and fails at the next loss.
    """

    max_batch: int = 256
    step_tokens: int = 2048
    preemption: Literal["recompute", "swap"] = "recompute"
    prefill_workers: int = 0
    recomputes: int = 1

    def __post_init__(self) -> None:
        for name, most in (("max_batch", LARGEST_STEP), ("step_tokens", LARGEST_STEP)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number from 1 to {most:,}")
        for name, most in (("prefill_workers", LARGEST_STEP), ("recomputes", MOST_RECOMPUTES)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number from 0 to {most:,}")
        if self.step_tokens < self.max_batch:
            raise ConfigurationError(
                f"step_tokens is {self.step_tokens}; it must be at least max_batch, which is {self.max_batch}: every "
                "request that decodes has a token in each step"
            )
        if self.preemption not in PREEMPTIONS:
            raise ConfigurationError(f"preemption is {self.preemption!r}; it must be one of {', '.join(PREEMPTIONS)}")


Stage = Literal["elsewhere", "waiting", "prompt", "storing", "decoding", "between turns", "swapped", "ending"]


@dataclass(eq=False)
class _Served:
    """A request that is not over: where it stands. `stored` of its tokens have rows in the cache."""

    arrival: Arrival
    request: Request
    stage: Stage = "waiting"
    turn: int = 0
    generated: int = 0
    stored: int = 0
    order: int = 0
    losses: int = 0

    @property
    def name(self) -> str:
        """The request's name."""
        return self.request.name

    @property
    def holds(self) -> bool:
        """Whether it holds space of the policy's."""
        return self.stage not in ("elsewhere", "waiting", "swapped")


@dataclass
class Server:
    """Serves arrivals with one decoder and policy, and writes down what happens to them in a log of its own.

    `ends` are tokens that end a turn early. `stretch` is called with when a step began and says how much longer it
    would have taken, in ns: in a run with some of a model's layers, which holds 1 / `whole` of the bytes.
    """

    decoder: Decoder
    engine: Engine
    policy: Policy
    rules: ServingRules
    prompt_of: PromptOf
    ends: Collection[int] = ()
    stretch: Callable[[int], int] = lambda _: 0
    whole: float = 1.0
    progress: Callable[[int, int], None] = lambda *_: None
    workers: PrefillWorkers | None = None
    steps: int = 0
    """Steps so far."""
    log: Log = field(default_factory=Log)
    _live: list[_Served] = field(default_factory=list)
    _waiting: deque[_Served] = field(default_factory=deque)
    _admitted: int = 0
    _bell: Alarm = field(default_factory=Alarm)
    _preempted: bool = False

    def __post_init__(self) -> None:
        if not self.policy.serves:
            raise ConfigurationError(f"policy {self.policy.name} cannot serve: it takes no prompts in steps of tokens")

    async def serve(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of them to their end. Raises ConfigurationError for arrivals that are wrong."""
        check(arrivals)
        clock, coming, total = self.engine.loop.clock, deque(arrivals), len(arrivals)
        start, sigma = clock.now(), self.engine.platform.dilation
        self.log = Log(start, sigma)
        while coming or self._live:
            while coming and start + sigma * coming[0].at_ns <= clock.now():
                self._arrive(coming[0], start + sigma * coming.popleft().at_ns)
            parts = await self._schedule()
            self.progress(total - len(coming) - len(self._live), total)
            if parts:
                await self._step(parts)
            elif any(x.stage == "prompt" and not self.policy.is_ready(x.request) for x in self._live):
                await self.policy.something_moved()
            elif self._preempted:
                continue  # there is room now for whoever waits
            elif coming or self._live:
                self._sample()
                await self._until(start + sigma * coming[0].at_ns if coming else None)
        self._sample()

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, due_ns: int) -> None:
        tokens = list(self.prompt_of(arrival, 0))
        request = Request(
            arrival.name, tokens, arrival.total_tokens, len(tokens), is_served=True, in_steps=self.workers is None
        )
        served = _Served(arrival, request)
        self.log.arrived(arrival.name, due_ns, arrival.kind, arrival.prompt_tokens)
        self._live.append(served)
        self._wait(served, self._waiting.append)

    def _wait(self, served: _Served, queue: Callable[[_Served], None]) -> None:
        """Put a request without rows where requests wait for room; its prompt may be prefilled first."""
        served.stage = "waiting" if self.workers is None else "elsewhere"
        if self.workers is None:
            queue(served)
        else:
            self.engine.loop.spawn(self._prefill_elsewhere(served, self.workers, queue))

    async def _prefill_elsewhere(
        self, served: _Served, workers: PrefillWorkers, queue: Callable[[_Served], None]
    ) -> None:
        await workers.prefill(len(served.request.tokens))
        served.stage = "waiting"
        queue(served)
        self._bell.ring()

    async def _bring(self, served: _Served, workers: PrefillWorkers) -> None:
        """The prompt's rows come from where it was prefilled; then its first token counts."""
        request = served.request
        try:
            await workers.bring(self.policy.placement(request))
        except DeviceError as error:
            request.fail(error)
            await self._lost(served)
        else:
            served.stored = len(request.tokens)
            served.stage = "decoding"
            request.tokens.append(0)
            await self._said(served, 0, self.engine.loop.clock.now())
        self._bell.ring()

    async def _until(self, at_ns: int | None) -> None:
        """Wait for the next arrival, or for somebody who rings the bell."""
        if at_ns is not None:
            self.engine.loop.clock.call_at(at_ns, self._bell.ring)
        await self._bell
        self._bell = Alarm()

    async def _end(self, served: _Served) -> None:
        self._tell_migrations(served)
        self.log.ended(served.name, self.engine.loop.clock.now())
        served.stage = "ending"  # giving back may take time
        await self.policy.release(served.request)
        self._live.remove(served)

    async def _fail(self, served: _Served, error: Exception) -> None:
        self._tell_migrations(served)
        self.log.failed(served.name, str(error), self.engine.loop.clock.now())
        if served in self._waiting:
            self._waiting.remove(served)
        held = served.stage != "waiting"
        served.stage = "ending"
        if held:
            await self.policy.release(served.request)
        self._live.remove(served)

    def _tell_migrations(self, served: _Served) -> None:
        for _ in range(served.request.migrations):
            self.log.migrated(served.name)

    def _sample(self) -> None:
        running = sum(x.holds and x.stage != "between turns" for x in self._live)
        free = {memory: int(nbytes * self.whole) for memory, nbytes in self.policy.free_nbytes().items()}
        self.log.sample(self.engine.loop.clock.now(), running, len(self._waiting), free)

    # -- space --------------------------------------------------------------------------------------------------------

    async def _admit(self, served: _Served) -> bool:
        """Give a waiting request its place; False where it has to wait, or has failed."""
        request = served.request
        try:
            if served.stage == "swapped":
                await self._in_full(self.policy.swap_in(request))
                answering = served.generated > 0 and served.stored == len(request.tokens) - 1
                served.stage = "decoding" if answering else "prompt"
            else:
                await self._let_in(served)
        except TierTooSmall as error:
            if served.stage == "waiting":
                await self.policy.release(request)
            idle = [each for each in self._live if each.stage == "between turns"]
            if not self.policy.could_hold(len(request.tokens)):
                await self._fail(served, error)
            elif idle:
                await self._preempt(max(idle, key=lambda x: x.order))
            elif not any(each.holds for each in self._live):
                await self._fail(served, error)
            return False
        except DeviceError as error:
            self._waiting.remove(served)
            request.fail(error)
            await self._lost(served)
            return False
        self._waiting.remove(served)
        self._admitted += 1
        served.order = self._admitted
        return True

    async def _let_in(self, served: _Served) -> None:
        """Admit a request to the policy. Raises TierTooSmall."""
        request = served.request
        if self.workers is None:
            request.table = self.engine.table(request.max_tokens)
            await self.policy.admit(request)
            served.stage = "prompt"
        else:
            await self.decoder.adopt(request, phantom_prefill(self.engine.shape, len(request.tokens)))
            served.stage = "storing"
            self.engine.loop.spawn(self._bring(served, self.workers))

    async def _make_room(self, served: _Served, num_tokens: int) -> bool:
        """Let a request grow, preempting others where that is needed; False where it was preempted, or failed."""
        while True:
            try:
                self.policy.grow(served.request, num_tokens)
            except TierTooSmall as error:
                others = [x for x in self._live if x.holds and x is not served]
                idle = [x for x in others if x.stage == "between turns"]
                running = [x for x in others if x.stage in ("prompt", "decoding")]
                if idle:
                    await self._preempt(max(idle, key=lambda x: x.order))
                    continue
                if not running:
                    if not any(x.stage in ("storing", "ending") for x in others):
                        await self._fail(served, error)
                    return False
                freeing = [x for x in running if self.policy.frees(x.request)]
                last = max(freeing or running, key=lambda x: x.order)
                if last.order < served.order and (not freeing or self.policy.frees(served.request)):
                    await self._preempt(served)
                    return False
                await self._preempt(last)
            else:
                return True

    async def _preempt(self, served: _Served) -> None:
        """Take a request's space away. What it has said stays, and it comes back before those that wait."""
        self._preempted = True
        before = served.stage
        if self.rules.preemption == "swap":
            served.stage = "swapped"  # its next turn may be asked while it is moved
            try:
                await self._in_full(self.policy.swap_out(served.request))
            except (TierTooSmall, Unsupported):  # the host's memory is full as well, or the policy cannot: recompute
                served.stage = before
                if served in self._waiting:
                    self._waiting.remove(served)
                    served.stage = "prompt"
            else:
                self.log.preempted(served.name, 0)
                if before != "between turns":
                    self._waiting.appendleft(served)
                return
        self.log.preempted(served.name, served.stored)
        await self._start_again(served)

    async def _start_again(self, served: _Served) -> None:
        await self.policy.release(served.request)
        served.request.failure = None
        served.stored = 0
        if served.stage == "between turns":
            served.stage = "waiting"
        else:
            self._wait(served, self._waiting.appendleft)

    async def _in_full(self, moving: Coroutine[Any, Any, None]) -> None:
        """Move a request's rows; what layers that were left out would have taken passes as well."""
        begun = self.engine.loop.clock.now()
        await moving
        await let_pass(self.engine.loop, round((self.engine.loop.clock.now() - begun) * (self.whole - 1)))

    # -- a step -------------------------------------------------------------------------------------------------------

    async def _schedule(self) -> list[tuple[list[_Served], Part]]:
        """The parts of the next step with whom they are of; empty where there is nothing to do yet."""
        self._preempted = False
        for served in [x for x in self._live if x.stage in ("prompt", "decoding") and x.request.failure is not None]:
            await self._lost(served)
        decoding = []
        for served in sorted((x for x in self._live if x.stage == "decoding"), key=lambda x: x.order):
            if served.stage == "decoding" and await self._make_room(served, served.stored + 1):
                decoding.append(served)
        left = self.rules.step_tokens - len(decoding)
        chunks: list[tuple[_Served, int]] = []
        for served in sorted((x for x in self._live if x.stage == "prompt"), key=lambda x: x.order):
            if left > 0 and served.stage == "prompt" and self.policy.is_ready(served.request):
                left -= await self._chunk(served, left, chunks)
        while self._waiting and left > 0 and not self._preempted and self._has_place():
            served = self._waiting[0]
            if await self._admit(served):
                if served.stage == "prompt":
                    left -= await self._chunk(served, left, chunks)
                elif served.stage == "decoding" and await self._make_room(served, served.stored + 1):
                    decoding.append(served)
                    left -= 1
            elif self._waiting and self._waiting[0] is served:
                break
        # Growing may have preempted somebody who was in the step already.
        decoding = [x for x in decoding if x.stage == "decoding"]
        parts = [([x], self._part_of_chunk(x, chunk)) for x, chunk in chunks if x.stage == "prompt"]
        if decoding:
            parts.insert(0, (decoding, Part([x.request for x in decoding])))
        return parts

    def _has_place(self) -> bool:
        return sum(x.holds for x in self._live) < self.rules.max_batch

    async def _chunk(self, served: _Served, most: int, chunks: list[tuple[_Served, int]]) -> int:
        """Put the next chunk of a prompt on the list; its tokens, 0 where there is no room."""
        chunk = min(most, len(served.request.tokens) - served.stored)
        if not await self._make_room(served, served.stored + chunk):
            return 0
        chunks.append((served, chunk))
        return chunk

    def _part_of_chunk(self, served: _Served, chunk: int) -> Part:
        end = served.stored + chunk
        return Part([served.request], chunk, [end], end == len(served.request.tokens))

    async def _step(self, parts: list[tuple[list[_Served], Part]]) -> None:
        loop, clock = self.engine.loop, self.engine.loop.clock
        begun = clock.now()
        try:
            said = await self.decoder.advance([part for _, part in parts])
        except DeviceError:
            if not all(x.request.failure for served, _ in parts for x in served):
                raise
            said = [[] for _ in parts]
        self.steps += 1
        await let_pass(loop, self.stretch(begun))
        now = clock.now()
        for (served, part), tokens in zip(parts, said, strict=True):
            for number, each in enumerate(served):
                if each.request.failure is not None:
                    await self._lost(each)
                    continue
                each.stored += part.q_len
                if each.stage == "prompt" and part.next_token:
                    each.stage = "storing"
                    loop.spawn(self._store(each, tokens[number]))
                elif part.next_token:
                    await self._said(each, tokens[number], now)
        self._sample()
        await yield_to_others(loop)  # whose prompt is stored already goes on in the next step

    async def _store(self, served: _Served, token: int) -> None:
        """The prompt went through the model; its first token counts when its rows are where they belong."""
        try:
            await self.policy.prompt_is_stored(served.request)
        except DeviceError as error:
            served.request.tokens.pop()  # it was not said, and is not part of the prompt that is computed again
            served.request.fail(error)
            await self._lost(served)
        else:
            served.stage = "decoding"
            await self._said(served, token, self.engine.loop.clock.now())
        self._bell.ring()

    async def _said(self, served: _Served, token: int, now: int) -> None:
        """A request has another token, in its list already."""
        self.log.token(served.name, now, token)
        served.generated += 1
        turns = served.arrival.turns
        if served.generated < turns[served.turn].output_tokens and token not in self.ends:
            return
        if served.turn + 1 == len(turns):
            await self._end(served)
            return
        served.turn += 1
        served.generated = 0
        served.stage = "between turns"
        due = now + self.engine.platform.dilation * turns[served.turn].after_ns
        self.engine.loop.clock.call_at(due, self._next_turn, served, due)

    def _next_turn(self, served: _Served, due_ns: int) -> None:
        if served not in self._live:
            return
        self.log.turn_asked(served.name, due_ns)
        served.request.tokens.extend(self.prompt_of(served.arrival, served.turn))
        if served.stage == "between turns":
            served.stage = "prompt"
        elif served.stage == "swapped":
            self._waiting.append(served)
        else:
            self._wait(served, self._waiting.append)
        self._bell.ring()

    async def _lost(self, served: _Served) -> None:
        """A request failed in a step: recompute it where it still fits, unless that was done often enough."""
        error = served.request.failure
        assert error is not None, "it failed"
        if served.losses == self.rules.recomputes:
            await self._fail(served, error)
            return
        served.losses += 1
        self._preempted = True
        self.log.lost(served.name)
        self.log.preempted(served.name, served.stored)
        await self._start_again(served)
