"""The stages of a step over entries: select (GPU), evaluate (CPU), fetch (links), attend (GPU), and what follows.

Who calls this: policies that keep entries in windows, once a layer's new rows have their places. A batch goes through
the stages whole, or in micro-batches, each of which is a task of its own: while one waits for its entries, the next one
is selected, and nobody orders them but the queues of devices. Metadata are brought up to date after the attention,
beside whatever comes next (`sequential` waits for that as well).

A read that fails, or comes too late, ends its request and no other: what is left of the step attends without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, get_args

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError, Timeout
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.regions import Segment
from tierloop.runtime.blocks import join
from tierloop.runtime.chunk_index import rank
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.entry_cache import EntryCache, held_by
from tierloop.runtime.loop import Alarm, Task
from tierloop.runtime.policy import Batch, Int64, Prediction, Request
from tierloop.runtime.synchronisation import Fetch, Synchroniser, Traffic
from tierloop.runtime.workspace import Workspace

Pipeline = Literal["sequential", "prefetch", "disaggregated"]
PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)
EVALUATE, ATTEND, EVICT = "evaluate", "attend", "evict"


@dataclass(frozen=True)
class _Choice:
    """What a request attends in a layer: entries (heads, k), and all that were ranked (heads, m), best first."""

    chosen: Int64
    ranked: Int64


@dataclass
class Counts:
    """Of one request: entries by where they were found, evicted ones, bytes read from the SSD, hit rate by step."""

    hits: int = 0
    from_dram: int = 0
    from_ssd: int = 0
    prefetched: int = 0
    evicted: int = 0
    not_persisted: int = 0
    useful_nbytes: int = 0
    media_nbytes: int = 0
    hit_rate: list[float] = field(default_factory=list)

    def step(self, traffic: Traffic, prefetched: Traffic) -> None:
        """A step is over: add what it did."""
        self.prefetched += prefetched.from_dram + prefetched.from_ssd
        self.hits += traffic.hits
        self.from_dram += traffic.from_dram
        self.from_ssd += traffic.from_ssd
        self.useful_nbytes += traffic.useful_nbytes
        self.media_nbytes += traffic.media_nbytes
        self.hit_rate.append(traffic.hit_rate)


class EntryStages:
    """Takes batches of one policy through the stages. `lane` attends; `micro_batch` 0: batches stay whole."""

    def __init__(
        self,
        engine: Engine,
        lane: Lane,
        cache: EntryCache,
        synchroniser: Synchroniser,
        work: Workspace,
        pipeline: Pipeline,
        micro_batch: int,
        predict_from: int,
        rank_depth: float,
        lookup_ns: float,
        deadline_ns: int,
    ) -> None:
        self.engine = engine
        self.shape = engine.shape
        self.counts: dict[str, Counts] = {}
        """By request."""
        self._attends = lane
        self._cache = cache
        self._synchroniser = synchroniser
        self._work = work
        self._pipeline = pipeline
        self._micro_batch = micro_batch
        self._predict_from = predict_from
        self._rank_depth = rank_depth
        self._deadline_ns = deadline_ns
        self._lookup = _Lookup(engine, lookup_ns)
        self._ahead: dict[tuple[int, tuple[str, ...]], Task[None]] = {}

    def wants(self, clusters: int) -> dict[str, tuple[str, int]]:
        """Bytes of working space of a request for each layer under way, with at most so many clusters of each head."""
        shape, memory = self.shape, self.engine.dense.memory
        heads = shape.num_kv_heads
        wants = {
            "scores": (memory, clusters * heads * 4),
            "indices": (memory, clusters * heads * 8),
            "states": (memory, self.engine.state_nbytes(heads)),
        }
        if self._pipeline == "prefetch":
            wants |= {"predicted": (memory, heads * shape.group * shape.head_dim * 4)}
            wants |= {f"{name} ahead": wants[name] for name in ("scores", "indices")}
        return wants

    async def attend(
        self, layer: int, batch: Batch, appended: Completion, persisting: list[list[Completion]]
    ) -> list[Completion]:
        """Attend over chosen entries and those that are always there; returns what the next stage comes after.

        `persisting` are copies of each request that read slots of a window, which gives up none before they have ended.
        """
        ahead = self._ahead.pop((layer, tuple(r.name for r in batch.requests)), None)
        if ahead is not None:
            await ahead
        size = self._micro_batch or len(batch.requests)
        spawn = self.engine.loop.spawn
        parts = [
            spawn(self._attend(layer, batch, first, min(first + size, len(batch.requests)), appended, persisting))
            for first in range(0, len(batch.requests), size)
        ]
        done: list[Completion] = []
        for part in parts:
            done += await part
        return done

    def prefetch(self, layer: int, batch: Batch) -> None:
        """A layer's input is known: fetch what the next one may choose, where the pipeline is to."""
        following = layer + 1
        if self._pipeline != "prefetch" or not self._predict_from <= layer < self.shape.num_layers - 1:
            return
        assert batch.predict is not None, "a decoder that calls layer_input predicts"
        target = self.space("predicted", following, batch.before, batch.queries.spans.nbytes)
        prediction = batch.predict(following, target)
        names = tuple(r.name for r in batch.requests)
        self._ahead[following, names] = self.engine.loop.spawn(self._prefetch(following, batch, target, prediction))

    def space(self, use: str, layer: int, before: Sequence[Request], nbytes: int) -> Segment:
        """Working space of a micro-batch behind these requests of its batch."""
        return self._work.at(use, layer, nbytes, sum(r.state["wants"][use][1] for r in before))

    async def _attend(
        self, layer: int, batch: Batch, first: int, last: int, appended: Completion, persisting: list[list[Completion]]
    ) -> list[Completion]:
        """One micro-batch, requests [first, last) of the batch, through all four stages."""
        engine, mark = self.engine, self.engine.stages.mark
        part = _part(batch, first, last)
        before = [*batch.before, *batch.requests[:first]]
        choices = await self._select(layer, part, before)
        looked_up = sum(
            c.chosen.size + int(held_by(r).tiers.window.held(layer).sum())
            for r, c in zip(part.requests, choices, strict=True)
        )
        await self._lookup.take(looked_up, EVALUATE)
        fetches = []
        for request, choice in zip(part.requests, choices, strict=True):
            fetches.append(await self._fetch(request, layer, int(request.blocks.length[layer]) - 1, choice.chosen))
        arrived: list[Completion] = []
        deadline_ns = engine.platform.clock.now() + self._deadline_ns
        for request, fetch in zip(part.requests, fetches, strict=True):
            early = held_by(request).early.pop(layer, Fetch())
            fetch.arriving[:0], fetch.promoted[:0] = early.arriving, early.promoted
            arrived += await self._arrive(request, fetch.arriving, deadline_ns)
        rows = []
        for i, (request, choice) in enumerate(zip(part.requests, choices, strict=True)):
            held, length = held_by(request), int(request.blocks.length[layer])
            # What was to come for a request that has failed may still be written to: it is left out.
            chosen = choice.chosen if request.failure is None else choice.chosen[:, :0]
            attended = self._cache.attended(held, layer, length, chosen)
            rows.append(self._cache.rows(held, layer, i, length, attended))
            if not engine.phantom and attended.shape[1] < self._cache.entries.count(length):
                batch.attended_rows[first + i] = _positions(attended, self._cache.entries.tokens, length)
        roots = engine.roots_of_all(part.positions)
        states = self.space("states", layer, before, engine.state_nbytes(len(roots)))
        after = [appended, *arrived]
        done = engine.attend(self._attends, part.queries, join(rows), part.positions, part.scale, roots, states, after)
        merged = engine.merge([states], roots, part.positions, part.output, [mark(done, ATTEND)])
        mark(merged, ATTEND)
        for i, request in enumerate(part.requests):
            held = held_by(request)
            step = int(part.positions[i, 0])
            tail = self._after(request, layer, step, choices[i], fetches[i], done, appended, persisting[first + i])
            task = engine.loop.spawn(tail)
            if self._pipeline == "sequential":
                await task
            else:
                held.after = [*(t for t in held.after if not t.done), task]
        return [merged]

    async def _select(self, layer: int, part: Batch, before: Sequence[Request], ahead: bool = False) -> list[_Choice]:
        """Rank the entries of each request by its query, the batch's or a predicted one's."""
        requests = part.requests
        indexes = [held_by(r).index for r in requests]
        known = [index.end(layer) - index.first for index in indexes]
        plans = [held_by(r).plan for r in requests]
        if all(n <= plan.k for n, plan in zip(known, plans, strict=True)) and not ahead:
            choices = []
            for index in indexes:
                everything = np.arange(index.first, index.end(layer))
                everything = np.broadcast_to(everything, (self.shape.num_kv_heads, len(everything)))
                choices.append(_Choice(everything, everything))
            return choices
        wanted = [
            min(n, max(plan.k, ceil(self._rank_depth * int(plan.windows[layer].max(initial=0)))))
            for n, plan in zip(known, plans, strict=True)
        ]
        suffix = " ahead" if ahead else ""

        def work(scores: int, indices: int) -> tuple[Segment, Segment]:
            return (
                self.space(f"scores{suffix}", layer, before, scores),
                self.space(f"indices{suffix}", layer, before, indices),
            )

        names, step = tuple(r.name for r in requests), int(part.positions[0, 0])
        label = "prefetch" if ahead else "select"
        ranked = await rank(self.engine, layer, indexes, part.queries, part.ready, wanted, work, names, step, label)
        return [_Choice(each[:, : plan.k], each) for each, plan in zip(ranked, plans, strict=True)]

    async def _fetch(self, request: Request, layer: int, step: int, chosen: Int64, ahead: bool = False) -> Fetch:
        """Start to bring what a layer lacks of its chosen entries; they are in its window from now on."""
        held = held_by(request)
        tiers = held.tiers
        traffic = tiers.prefetched if ahead else tiers.traffic
        heads, entries = tiers.window.missing(layer, chosen)
        traffic.hits += chosen.size - len(entries)
        if request.failure is not None:
            return Fetch()
        slots = await self._cache.room(held, len(entries))
        tiers.window.admit(layer, heads, entries, slots, step)
        try:
            return self._synchroniser.fetch(tiers, layer, heads, entries, slots, held.plan.k, traffic)
        except DeviceError as error:
            request.fail(error)
            return Fetch()

    async def _arrive(self, request: Request, arriving: list[Completion], deadline_ns: int) -> list[Completion]:
        """Wait for what was fetched. A failure, or a deadline that passes, ends this request and no other."""
        for completion in arriving:
            try:
                await (self._within(completion, deadline_ns) if self._deadline_ns else completion)
            except DeviceError as error:
                request.fail(error)
        if request.failure is not None:
            held_by(request).tiers.late += arriving
            return []
        return arriving

    async def _unless_failed(self, request: Request, completion: Completion) -> None:
        """Wait; what fails ends this request and no other."""
        try:
            await completion
        except DeviceError as error:
            request.fail(error)

    async def _within(self, completion: Completion, deadline_ns: int) -> None:
        """Wait until a time of the clock. Raises Timeout, or what the completion failed with."""
        clock = self.engine.platform.clock
        alarm = Alarm()
        completion.on_done(lambda _: alarm.ring())
        clock.call_at(deadline_ns, alarm.ring)
        await alarm
        if not completion.done:
            raise Timeout("kvdrive", "fetch", f"entries did not arrive within {self._deadline_ns / 1e6:g} ms")
        await completion

    async def _after(
        self,
        request: Request,
        layer: int,
        step: int,
        choice: _Choice,
        fetch: Fetch,
        attended: Completion,
        appended: Completion,
        persisting: list[Completion],
    ) -> None:
        """Once a layer is attended: evict, let DRAM keep what came from the SSD, index what is no longer new."""
        held = held_by(request)
        tiers, index, plan = held.tiers, held.index, held.plan
        await attended
        for completion in persisting:
            await self._unless_failed(request, completion)
        if request.failure is not None:
            return  # its slots go when it is released, and nobody writes to them any more
        await self._lookup.take(choice.ranked.size, EVICT)
        slots = tiers.window.evict(layer, choice.ranked, plan.k, step)
        tiers.gpu.give(slots)
        self.counts[request.name].evicted += len(slots)
        for done, heads, entries, numbers in fetch.promoted:
            await self._unless_failed(request, done)
            if tiers.dram is not None and tiers.cache is not None:
                tiers.cache.admit(layer, heads, entries, numbers, step)
        if tiers.dram is not None and tiers.cache is not None:
            tiers.dram.give(tiers.cache.evict(layer, choice.ranked, plan.k, step))
        last = index.due(layer, int(request.blocks.length[layer]))
        if last > index.end(layer):
            keys = self._cache.keys(held, layer, index.end(layer), last)
            index.extend(layer, last, (keys,), [appended])
        if layer == self.shape.num_layers - 1:
            self._synchroniser.balance(tiers, plan.k)
            self.counts[request.name].step(tiers.traffic, tiers.prefetched)
            self.counts[request.name].not_persisted = held.not_persisted
            tiers.traffic, tiers.prefetched = Traffic(), Traffic()

    async def _prefetch(self, layer: int, batch: Batch, target: Segment, prediction: Prediction) -> None:
        """Fetch what a predicted query would choose of a layer that comes next."""
        predicted = replace(batch, queries=target, ready=prediction.ready)
        choices = await self._select(layer, predicted, batch.before, ahead=True)
        for request, choice, position in zip(batch.requests, choices, batch.positions[:, 0].tolist(), strict=True):
            held_by(request).early[layer] = await self._fetch(request, layer, position, choice.chosen, ahead=True)


@dataclass
class _Lookup:
    """Looking up entries on the CPU, as a command of the cores: `lookup_ns` for each where time is modelled."""

    engine: Engine
    lookup_ns: float

    def __post_init__(self) -> None:
        self._lane = self.engine.runner("dense", self.engine.host)
        self._nbytes_per_ns = 0.0
        if self._lane is not None:
            times = [
                self._lane.device.estimate(self._command(n), self._lane.queue).duration_ns for n in (1 << 20, 1 << 24)
            ]
            if times[1] > times[0]:
                self._nbytes_per_ns = ((1 << 24) - (1 << 20)) / (times[1] - times[0])

    async def take(self, count: int, stage: str) -> None:
        """Let the cores look up `count` entries."""
        if self._lane is None or not count or not self.lookup_ns:
            return
        dilation = self._lane.device.info.dilation
        command = self._command(round(count * self.lookup_ns * dilation * self._nbytes_per_ns), stage)
        await self.engine.stages.mark(self._lane.submit(command), stage)

    @staticmethod
    def _command(nbytes: int, stage: str = "") -> Launch:
        return Launch(Dense(stage, 0, 0, nbytes), (), ())


def _part(batch: Batch, first: int, last: int) -> Batch:
    """Requests [first, last) of a batch as a batch of their own; what is told of their rows has to be copied back."""
    count = len(batch.requests)

    def cut(segment: Segment) -> Segment:
        ((offset, nbytes),) = segment.spans.array.tolist()
        each = nbytes // count
        return segment.region.at(offset + first * each, (last - first) * each)

    return replace(
        batch,
        requests=batch.requests[first:last],
        positions=batch.positions[first:last],
        queries=cut(batch.queries),
        output=cut(batch.output),
    )


def _positions(attended: Int64, tokens: int, length: int) -> list[Int64]:
    """Positions of the entries (heads, n) of each head, below the length."""
    rows = (attended[:, :, None] * tokens + np.arange(tokens)).reshape(len(attended), -1)
    return [mine[mine < length] for mine in rows]
