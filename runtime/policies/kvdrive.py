"""KVDrive: a KV cache over GPU, DRAM and SSD that knows what attention will ask for (arXiv 2605.18071, SIGMOD 2026).

The cache is cut into entries of a few consecutive tokens (runtime/entries.py). All are persisted to the SSD, some are
in DRAM, and each layer and KV head has a window of entries on the GPU. In every step the GPU scores the centroids of an
index of mean keys (runtime/chunk_index.py), the host expands the best clusters to the K entries that are attended,
those that the window lacks are fetched (runtime/synchronisation.py), and the GPU attends over them, the first tokens
and the newest. Afterwards, off the critical path, each window gives up what this step's ranking likes least: the
present score is taken for the next step's (runtime/windows.py).

Pipelines. `sequential`: select, evaluate, fetch, attend and evict one after the other, for the whole batch. `prefetch`:
the next layer's entries are fetched by a query that is predicted from this layer's input; what is attended is still
chosen by the true query. `disaggregated`: micro-batches of `micro_batch` requests go through select (GPU), evaluate
(CPU), fetch (link) and attend (GPU) on their own; metadata is brought up to date meanwhile. With `waves`, projections
and MLP are divided as well, so that fetching has them to hide behind; each wave reads the weights.

What is attended depends on the index and the query alone: not on windows, eviction, tiers, pipeline or synchronisation.
With `budget` 1 every entry is attended, and the result is that of dense attention.

Where the paper is silent, or this deviates:

- An entry's score is that of its centroid; entries of the cluster that exceeds K are taken in ascending position.
- K is fixed for a request's life: `budget` of the tokens that it may come to have. Sinks and local tokens come on top.
- A query group scores a centroid by its largest product.
- The paper's computation stage has the MLP in it. Here a micro-batch ends before it, unless there are `waves`: running
  it for each micro-batch reads the weights as often.
- The InfiniGen-style prefetch only prefetches. With InfiniGen what is predicted is what is attended.
- Warm-up ranks clusters, by the mean attention of their entries, not entries.
- DRAM keeps entries that were read from the SSD, and evicts by the same rule as the windows.
- Evaluating costs `lookup_ns` for each entry that is asked for or held, evicting for each that is ranked; the paper
  gives no figure.
- Steps of more than one token per request are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, DeviceError, Timeout, Unsupported, nearest
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.regions import Segment
from tierloop.runtime.archive import Archive
from tierloop.runtime.blocks import K, V, join
from tierloop.runtime.chunk_index import ChunkIndex, Chunking, importance, rank
from tierloop.runtime.dtypes import from_bytes, keys_to_bytes, values_to_bytes
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.entries import EntryShape
from tierloop.runtime.entry_cache import EntryCache, Held, Plan, fingerprint
from tierloop.runtime.kept_requests import check, commit, notes_nbytes, resume_request
from tierloop.runtime.loop import Alarm, Task
from tierloop.runtime.policy import (
    Batch,
    Int64,
    Policy,
    Prediction,
    Request,
    number,
    share_above_zero,
    switched_off,
    whole_numbers,
)
from tierloop.runtime.synchronisation import LAYERS_UNDER_WAY, SYNCHRONISATIONS, Fetch, Synchroniser, Traffic
from tierloop.runtime.window_sizes import WindowSizes
from tierloop.runtime.windows import EVICTIONS, Eviction
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
class _Counts:
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


class KVDrive(Policy):
    """Attends `budget` (0 to 1) of a request's tokens in each KV head, besides the first and the newest ones."""

    name: ClassVar[str] = "kvdrive"
    exact: ClassVar[bool] = False
    mechanisms: ClassVar[tuple[str, ...]] = (
        "window", "lookahead", "sizing", "pipeline", "warm_up", "packing", "synchronisation",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        budget: float = 0.0625,
        chunk_tokens: int = 4,
        centroids: int = 0,
        sink_tokens: int = 4,
        local_tokens: int = 64,
        update_tokens: int = 256,
        segment_chunks: int = 8192,
        iterations: int = 10,
        window: float = 2.0,
        sizes: str | None = None,
        eviction: str = "la",
        pipeline: str = "disaggregated",
        micro_batch: int = 1,
        waves: int = 1,
        predict_from: int = 3,
        synchronisation: str = "balanced",
        pinned_share: float = 0.25,
        persistent: str = "auto",
        dram_share: float = 1.0,
        warm_up_queries: int = 32,
        lookup_ns: float = 2.0,
        deadline_ms: float = 0.0,
        keep_tokens: int = 0,
        resume: bool = False,
        noise: float = 0.0,
        seed: int = 0,
        without: Sequence[str] = (),
    ) -> None:
        super().__init__(engine)
        self.without = off = switched_off(type(self), without)
        for option, value, allowed in (
            ("eviction", eviction, EVICTIONS),
            ("pipeline", pipeline, PIPELINES),
            ("synchronisation", synchronisation, SYNCHRONISATIONS),
        ):
            if value not in allowed:
                raise ConfigurationError(f"kvdrive: {option} {value!r}: {nearest(str(value), list(allowed))}")
        share_above_zero(self.name, budget)
        whole_numbers(
            self.name,
            {
                "chunk_tokens": (chunk_tokens, 1),
                "centroids": (centroids, 0),
                "sink_tokens": (sink_tokens, 0),
                "local_tokens": (local_tokens, 1),
                "update_tokens": (update_tokens, 1),
                "segment_chunks": (segment_chunks, 1),
                "iterations": (iterations, 0),
                "micro_batch": (micro_batch, 1),
                "waves": (waves, 1),
                "predict_from": (predict_from, 0),
                "warm_up_queries": (warm_up_queries, 0),
                "keep_tokens": (keep_tokens, 0),
                "seed": (seed, 0),
            },
        )
        number("kvdrive: window", window, 0, 1000)
        for option, share in (("pinned_share", pinned_share), ("dram_share", dram_share), ("noise", noise)):
            number(f"kvdrive: {option}", share, 0, 1)
        for option, time in (("lookup_ns", lookup_ns), ("deadline_ms", deadline_ms)):
            number(f"kvdrive: {option}", time, 0)
        self._how = Chunking(
            int(chunk_tokens),
            int(sink_tokens),
            int(local_tokens),
            int(update_tokens),
            int(centroids),
            int(segment_chunks),
            int(iterations),
        )
        self._budget = budget
        self._window = 0.0 if "window" in off else window
        self._sizes = None if sizes is None or {"sizing", "window"} & off else WindowSizes.load(Path(sizes))
        self._eviction: Eviction = "lru" if "lookahead" in off else eviction  # type: ignore[assignment]  # checked above
        self._pipeline = "sequential" if "pipeline" in off else pipeline
        self._micro_batch, self._predict_from = int(micro_batch), int(predict_from)
        self.waves = int(waves) if self._pipeline == "disaggregated" else 1
        self._warm_up = 0 if "warm_up" in off else int(warm_up_queries)
        self._packing = "packing" not in off
        self._persistent = self._ssd(persistent)
        self._dram_share = float(dram_share)
        if self._persistent is None and dram_share < 1:
            raise ConfigurationError(
                f"kvdrive: dram_share is {dram_share}, but without an SSD all entries have to be in DRAM (dram_share 1)"
            )
        if not isinstance(resume, bool):
            raise ConfigurationError(f"kvdrive: resume is {resume!r}; it must be true or false")
        self._keep_tokens, self._resume = int(keep_tokens), resume
        if (keep_tokens or resume) and self._persistent is None:
            raise ConfigurationError("kvdrive: nothing is kept without a persistent memory")
        self._noise, self._seed = float(noise), int(seed)
        self._deadline_ns = round(deadline_ms * 1e6)
        self._entries = EntryShape(self.shape, self._how.chunk_tokens)
        mode = "block-sparse" if "synchronisation" in off else synchronisation
        self._synchroniser = Synchroniser(engine, self._entries, mode, float(pinned_share))  # type: ignore[arg-type]  # checked above
        if self._persistent is not None:
            self._synchroniser.check(self._persistent)
        self._cache = EntryCache(engine, self._entries, self._synchroniser)
        self._attends = self._runs("attend", "merge", "score", "topk", "cluster")
        self._work = Workspace(engine, LAYERS_UNDER_WAY)
        self._lookup = _Lookup(engine, float(lookup_ns))
        self._ahead: dict[tuple[int, tuple[str, ...]], Task[None]] = {}
        self._counts: dict[str, _Counts] = {}

    # -- what the platform has ------------------------------------------------------------------------------------

    def _ssd(self, wanted: str) -> str | None:
        """The persistent memory to use: `none`, a memory's name, or the first one there is."""
        memories = [m for m in self.engine.memories() if m.persistent]
        if wanted == "none":
            return None
        if wanted == "auto":
            return memories[0].name if memories else None
        known = [m.name for m in memories]
        if wanted not in known:
            raise ConfigurationError(f"kvdrive: persistent {wanted!r}: {nearest(wanted, ['auto', 'none', *known])}")
        return wanted

    def _runs(self, *kernels: str) -> Lane:
        """The lane that attends where the modules run. Raises ConfigurationError."""
        lane = self.engine.runner("attend", self.engine.dense.memory)
        missing = [k for k in kernels if k not in self.engine.dense.executor.kernels]
        if lane is None or missing:
            gpu, lacks = self.engine.dense.device.info.name, ", ".join(missing) or "attend"
            raise ConfigurationError(f"kvdrive: {gpu} runs the modules, but not {lacks} over {self.shape.dtype} rows")
        return lane

    # -- a request's life -----------------------------------------------------------------------------------------

    async def admit(self, request: Request) -> None:
        shape = self.shape
        index = ChunkIndex(self.engine, self._how, request.name, request.prompt_tokens, request.max_tokens)
        request.state["index"] = index
        plan = self._plan(request)
        wants = {
            "scores": (self.engine.dense.memory, index.most_clusters * shape.num_kv_heads * 4),
            "indices": (self.engine.dense.memory, index.most_clusters * shape.num_kv_heads * 8),
            "states": (self.engine.dense.memory, self.engine.state_nbytes(shape.num_kv_heads)),
        }
        if self._pipeline == "prefetch":
            queries = shape.num_kv_heads * shape.group * shape.head_dim * 4
            wants |= {"predicted": (self.engine.dense.memory, queries)}
            wants |= {f"{name} ahead": wants[name] for name in ("scores", "indices")}
        self._work.reserve(wants)
        request.state["wants"] = wants
        most, archive = self._entries.count(max(request.max_tokens, plan.keep_tokens)), None
        notes = notes_nbytes(self._entries, index, most, self._cache.always(index)) if plan.keep_tokens else 0
        if self._resume and plan.persistent is not None:
            of = fingerprint(request, self._entries, self._how)
            archive = await Archive.adopt(self.engine, plan.persistent, request.name, of)
            try:
                check(archive, request, self._entries.count(request.max_tokens))
            except ConfigurationError:
                archive.close(keep=True)
                raise
        request.state["held"] = held = self._cache.admit(request, plan, index, notes, archive)
        self._counts[request.name] = _Counts()
        if archive is not None:
            held.resumed = True
            request.tokens[:] = archive.tokens
            await resume_request(self.engine, self._cache, request, held)

    def _plan(self, request: Request) -> Plan:
        shape, entries = self.shape, self._entries
        most = entries.count(request.max_tokens)
        k = most if self._budget == 1 else min(max(ceil(self._budget * request.max_tokens / entries.tokens), 1), most)
        each = shape.num_layers, shape.num_kv_heads
        if self._sizes is None:
            windows = np.full(each, min(round(self._window * k), most), dtype=np.int64)
        else:
            self._sizes.check(*each)
            windows = np.minimum(self._sizes.capacity(k), most)
        cached = most if self._dram_share == 1 else ceil(self._dram_share * most)
        keep = max(self._keep_tokens, request.max_tokens) if self._keep_tokens or self._resume else 0
        moving = k * (2 if self._pipeline == "prefetch" else 1)
        return Plan(
            k, windows, cached, moving, self._persistent, self._packing, self._eviction, self._noise, self._seed, keep
        )

    async def release(self, request: Request) -> None:
        held: Held | None = request.state.get("held")
        try:
            if held is not None and held.plan.keep_tokens and _is_whole(request, held):
                await commit(self.engine, self._cache, request, held)
        finally:
            await self._give_back(request)

    async def _give_back(self, request: Request) -> None:
        held: Held | None = request.state.get("held")
        wants = request.state.get("wants")
        index: ChunkIndex | None = request.state.get("index")
        if held is not None:
            await self._cache.release(held)
        if index is not None:
            await index.close()
        if wants is not None:
            self._work.give_back(wants)
        await super().release(request)

    async def place(self, request: Request, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        table, held, dtype = request.blocks, _held(request), self.shape.dtype
        if held.resumed:
            return
        table.length[layer] = keys.shape[1]
        for completion in self.measure(request, layer, keys):
            await completion
        if self.engine.phantom:
            held.prompt[layer] = None
            await held.index.build(layer, None)
            return
        scales = None if table.scales is None else table.scales.values[layer]
        heads, count, _ = keys.shape
        of_keys = keys_to_bytes(keys, dtype, scales).reshape(heads, count, -1)
        of_values = values_to_bytes(values, dtype).reshape(heads, count, -1)
        held.prompt[layer] = self._cache.pack(of_keys, of_values)
        await held.index.build(layer, from_bytes(of_keys, dtype).reshape(heads, count, -1))

    async def prefilled(self, request: Request, layer: int, queries: NDArray[np.float32]) -> None:
        held = _held(request)
        index, plan = held.index, held.plan
        if held.resumed:
            return
        indexed = index.end(layer) - index.first
        wanted = int(plan.windows[layer].max(initial=0))
        if plan.cached < indexed:
            wanted += plan.cached
        wanted = min(wanted, indexed)
        if self._warm_up and 0 < wanted < indexed:
            ranked = await self._by_importance(request, layer, queries, wanted)
        else:
            newest = np.arange(index.end(layer) - 1, index.end(layer) - 1 - wanted, -1)
            ranked = np.broadcast_to(newest, (self.shape.num_kv_heads, wanted))
        await self._cache.place(request, held, layer, ranked)
        if plan.keep_tokens and layer == self.shape.num_layers - 1:
            await commit(self.engine, self._cache, request, held)

    # -- a step ---------------------------------------------------------------------------------------------------

    async def layer_input(self, layer: int, batch: Batch) -> None:
        following = layer + 1
        if self._pipeline != "prefetch" or not self._predict_from <= layer < self.shape.num_layers - 1:
            return
        assert batch.predict is not None, "a decoder that calls layer_input predicts"
        target = self._space("predicted", following, batch.before, batch.queries.spans.nbytes)
        prediction = batch.predict(following, target)
        names = tuple(r.name for r in batch.requests)
        self._ahead[following, names] = self.engine.loop.spawn(self._prefetch(following, batch, target, prediction))

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        if batch.q_len > 1:
            raise Unsupported("kvdrive", "attend", f"{batch.q_len} tokens of a request in one step; it takes 1")
        ahead = self._ahead.pop((layer, tuple(r.name for r in batch.requests)), None)
        targets: tuple[list[Segment], list[Segment]] = ([], [])
        persisting: list[list[Completion]] = []
        for request, (position,) in zip(batch.requests, batch.positions.tolist(), strict=True):
            held, copies = _held(request), list[Completion]()
            try:
                if layer == 0 and held.plan.keep_tokens and held.index.end(0) > held.committed:
                    await commit(self.engine, self._cache, request, held)
                copies = await self._cache.settle(held, layer, position)
            except DeviceError as error:
                request.failure = request.failure or error
            persisting.append(copies)
            for side, segment in zip(targets, await self._cache.open(held, layer, position), strict=True):
                side.append(segment)
            request.blocks.length[layer] = position + 1
        appended = self.store_rows(layer, batch, tuple(targets[K]), tuple(targets[V]))
        self.engine.stages.mark(appended, "append")
        if ahead is not None:
            await ahead
        size = self._micro_batch if self._pipeline == "disaggregated" else len(batch.requests)
        spawn = self.engine.loop.spawn
        parts = [
            spawn(self._attend(layer, batch, first, min(first + size, len(batch.requests)), appended, persisting))
            for first in range(0, len(batch.requests), size)
        ]
        done: list[Completion] = []
        for part in parts:
            done += await part
        return done

    async def _attend(
        self, layer: int, batch: Batch, first: int, last: int, appended: Completion, persisting: list[list[Completion]]
    ) -> list[Completion]:
        """One micro-batch, requests [first, last) of the batch, through all four stages."""
        engine, mark = self.engine, self.engine.stages.mark
        part = _part(batch, first, last)
        before = [*batch.before, *batch.requests[:first]]
        choices = await self._select(layer, part, before)
        looked_up = sum(
            c.chosen.size + int(_held(r).tiers.window.held(layer).sum())
            for r, c in zip(part.requests, choices, strict=True)
        )
        await self._lookup.take(looked_up, EVALUATE)
        fetches = []
        for request, choice in zip(part.requests, choices, strict=True):
            fetches.append(await self._fetch(request, layer, int(request.blocks.length[layer]) - 1, choice.chosen))
        arrived: list[Completion] = []
        for request, fetch in zip(part.requests, fetches, strict=True):
            early = _held(request).early.pop(layer, Fetch())
            fetch.arriving[:0], fetch.promoted[:0] = early.arriving, early.promoted
            arrived += await self._arrive(request, fetch.arriving)
        rows = []
        for i, (request, choice) in enumerate(zip(part.requests, choices, strict=True)):
            held, length = _held(request), int(request.blocks.length[layer])
            # What was to come for a request that has failed may still be written to: it is left out.
            chosen = choice.chosen if request.failure is None else choice.chosen[:, :0]
            attended = self._cache.attended(held, layer, length, chosen)
            rows.append(self._cache.rows(held, layer, i, length, attended))
            if attended.shape[1] < self._entries.count(length):
                batch.attended_rows[first + i] = _positions(attended, self._entries.tokens, length)
        roots = _roots(part, self.shape.num_kv_heads, self.shape.split_tokens)
        states = self._space("states", layer, before, engine.state_nbytes(len(roots)))
        after = [appended, *arrived]
        done = engine.attend(self._attends, part.queries, join(rows), part.positions, part.scale, roots, states, after)
        merged = engine.merge([states], roots, part.positions, part.output, [mark(done, ATTEND)])
        mark(merged, ATTEND)
        for i, request in enumerate(part.requests):
            held = _held(request)
            step = int(part.positions[i, 0])
            tail = self._after(request, layer, step, choices[i], fetches[i], done, appended, persisting[first + i])
            task = engine.loop.spawn(tail)
            if self._pipeline == "sequential":
                await task
            else:
                held.after.append(task)
        return [merged]

    async def _select(self, layer: int, part: Batch, before: Sequence[Request], ahead: bool = False) -> list[_Choice]:
        """Rank the entries of each request by its query, the batch's or a predicted one's."""
        requests = part.requests
        indexes = [_held(r).index for r in requests]
        known = [index.end(layer) - index.first for index in indexes]
        plans = [_held(r).plan for r in requests]
        if all(n <= plan.k for n, plan in zip(known, plans, strict=True)) and not ahead:
            choices = []
            for index in indexes:
                everything = np.arange(index.first, index.end(layer))
                everything = np.broadcast_to(everything, (self.shape.num_kv_heads, len(everything)))
                choices.append(_Choice(everything, everything))
            return choices
        wanted = [
            min(n, max(plan.k, int(plan.windows[layer].max(initial=0)))) for n, plan in zip(known, plans, strict=True)
        ]
        suffix = " ahead" if ahead else ""

        def work(scores: int, indices: int) -> tuple[Segment, Segment]:
            return (
                self._space(f"scores{suffix}", layer, before, scores),
                self._space(f"indices{suffix}", layer, before, indices),
            )

        names, step = tuple(r.name for r in requests), int(part.positions[0, 0])
        label = "prefetch" if ahead else "select"
        ranked = await rank(self.engine, layer, indexes, part.queries, part.ready, wanted, work, names, step, label)
        return [_Choice(each[:, : plan.k], each) for each, plan in zip(ranked, plans, strict=True)]

    async def _fetch(self, request: Request, layer: int, step: int, chosen: Int64, ahead: bool = False) -> Fetch:
        """Start to bring what a layer lacks of its chosen entries; they are in its window from now on."""
        held = _held(request)
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
            request.failure = error
            return Fetch()

    async def _arrive(self, request: Request, arriving: list[Completion]) -> list[Completion]:
        """Wait for what was fetched. A failure, or a deadline that passes, ends this request and no other."""
        clock = self.engine.platform.clock
        begun = clock.now()
        for completion in arriving:
            try:
                await (self._within(completion, begun + self._deadline_ns) if self._deadline_ns else completion)
            except DeviceError as error:
                request.failure = request.failure or error
        if request.failure is not None:
            _held(request).late += arriving
            return []
        return arriving

    async def _unless_failed(self, request: Request, completion: Completion) -> None:
        """Wait; what fails ends this request and no other."""
        try:
            await completion
        except DeviceError as error:
            request.failure = request.failure or error

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
        held = _held(request)
        tiers, index, plan = held.tiers, held.index, held.plan
        await attended
        for completion in persisting:
            await self._unless_failed(request, completion)
        if request.failure is not None:
            return  # its slots go when it is released, and nobody writes to them any more
        await self._lookup.take(choice.ranked.size, EVICT)
        slots = tiers.window.evict(layer, choice.ranked, plan.k, step)
        tiers.gpu.give(slots)
        self._counts[request.name].evicted += len(slots)
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
            self._counts[request.name].step(tiers.traffic, tiers.prefetched)
            self._counts[request.name].not_persisted = held.not_persisted
            tiers.traffic, tiers.prefetched = Traffic(), Traffic()

    async def _prefetch(self, layer: int, batch: Batch, target: Segment, prediction: Prediction) -> None:
        """Fetch what a predicted query would choose of a layer that comes next."""
        predicted = replace(batch, queries=target, ready=prediction.ready)
        choices = await self._select(layer, predicted, batch.before, ahead=True)
        for request, choice, position in zip(batch.requests, choices, batch.positions[:, 0].tolist(), strict=True):
            _held(request).early[layer] = await self._fetch(request, layer, position, choice.chosen, ahead=True)

    async def _by_importance(self, request: Request, layer: int, queries: NDArray[np.float32], wanted: int) -> Int64:
        """Entries that the prompt's last queries attend most, best first."""
        held = _held(request)
        keys = held.prompt[layer]
        rows: NDArray[np.float32] | None = None
        if keys is not None:
            heads, count, _ = keys.shape
            rows = from_bytes(np.ascontiguousarray(keys[:, :, : self._entries.offset(V)]), self.shape.dtype).reshape(
                heads, count * self._entries.tokens, -1
            )[:, : int(request.blocks.length[layer])]
        last = queries[-self._warm_up :]
        scale = self.shape.head_dim**-0.5

        def work(scores: int, indices: int) -> tuple[Segment, Segment]:
            return self._space("scores", layer, (), scores), self._space("indices", layer, (), indices)

        return await importance(self.engine, layer, held.index, last, rows, scale, wanted, work)

    # -- space, reports -------------------------------------------------------------------------------------------

    def _space(self, use: str, layer: int, before: Sequence[Request], nbytes: int) -> Segment:
        """Working space of a micro-batch behind these requests of its batch."""
        return self._work.at(use, layer, nbytes, sum(r.state["wants"][use][1] for r in before))

    def placement(self, request: Request) -> dict[str, int]:
        return _held(request).placement()

    def report(self) -> dict[str, Any]:
        """For each request: where chosen entries were found, evictions, bytes read from the SSD, hit rate by step."""
        return {name: asdict(counts) for name, counts in self._counts.items()}


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


def _held(request: Request) -> Held:
    held: Held = request.state["held"]
    return held


def _is_whole(request: Request, held: Held) -> bool:
    """Whether a request stands between two steps: the prompt has been placed, and every layer is as long."""
    length = request.blocks.length
    whole = held.committed >= 0 and request.failure is None and bool((length == length[0]).all())
    return whole and len(request.tokens) > int(length[0])


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


def _roots(part: Batch, num_heads: int, split_tokens: int) -> Int64:
    """One root for each request and head: the node above all of its splits. int64 (n, 4)."""
    last = (part.positions[:, -1] // split_tokens).tolist()
    return np.array([(i, h, s.bit_length(), 0) for i, s in enumerate(last) for h in range(num_heads)], dtype=np.int64)
