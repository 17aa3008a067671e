"""KVDrive: a KV cache over GPU, DRAM and SSD that knows what attention will ask for (arXiv 2605.18071, SIGMOD 2026).

The cache is cut into entries of a few consecutive tokens (runtime/entries.py). All are persisted to the SSD, some are
in DRAM, and each layer and KV head has a window of entries on the GPU. In every step the GPU scores the centroids of an
index of mean keys (runtime/chunk_index.py), the host expands the best clusters to the K entries that are attended,
those that the window lacks are fetched (runtime/synchronisation.py), and the GPU attends over them, the first tokens
and the newest (runtime/entry_stages.py). Afterwards, off the critical path, each window gives up what this step's
ranking likes least: the present score is taken for the next step's (runtime/windows.py).

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
- The paper scores every entry of a window. Here the ranking that is read is `rank_depth` times as deep as the largest
  window of a layer, and eviction goes by last use beyond it: deeper, there is little to gain and more to read.
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
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, DeviceError, Unsupported, nearest
from tierloop.devices.regions import Segment
from tierloop.runtime.archive import Archive
from tierloop.runtime.blocks import K, V
from tierloop.runtime.chunk_index import ChunkIndex, importance
from tierloop.runtime.chunking import Chunking
from tierloop.runtime.dtypes import from_bytes
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.entries import EntryShape
from tierloop.runtime.entry_cache import EntryCache, Held, Plan, fingerprint, held_by
from tierloop.runtime.entry_stages import PIPELINES, Counts, EntryStages, Pipeline
from tierloop.runtime.kept_requests import Kept, check, commit, notes_nbytes, resume_request
from tierloop.runtime.policy import (
    Batch,
    Int64,
    Policy,
    Request,
    number,
    share_above_zero,
    switched_off,
    whole_numbers,
)
from tierloop.runtime.stages import LAST_QUERIES
from tierloop.runtime.synchronisation import LAYERS_UNDER_WAY, SYNCHRONISATIONS, Synchroniser
from tierloop.runtime.window_sizes import WindowSizes
from tierloop.runtime.windows import EVICTIONS, Eviction
from tierloop.runtime.workspace import Workspace

MOST_ITERATIONS, MOST_TOKENS = 1000, 1 << 24
"""More rounds of k-means, and more tokens to keep, are taken for a mistake."""


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
        rank_depth: float = 2.0,
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
                "iterations": (iterations, 0, MOST_ITERATIONS),
                "micro_batch": (micro_batch, 1),
                "waves": (waves, 1),
                "predict_from": (predict_from, 0),
                "warm_up_queries": (warm_up_queries, 0, LAST_QUERIES),
                "keep_tokens": (keep_tokens, 0, MOST_TOKENS),
                "seed": (seed, 0),
            },
        )
        number("kvdrive: window", window, 0, 1000)
        number("kvdrive: rank_depth", rank_depth, 1, 1000)
        for option, share in (("pinned_share", pinned_share), ("dram_share", dram_share), ("noise", noise)):
            number(f"kvdrive: {option}", share, 0, 1)
        for option, time in (("lookup_ns", lookup_ns), ("deadline_ms", deadline_ms)):
            number(f"kvdrive: {option}", time, 0, 1e6)
        for option, name in (("persistent", persistent), ("sizes", sizes or "")):
            if not isinstance(name, str):
                raise ConfigurationError(f"kvdrive: {option} is {name!r}; it must be a name")
        if sizes == "":
            raise ConfigurationError("kvdrive: sizes is empty; it must be the name of a file")
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
        self._pipeline: Pipeline = "sequential" if "pipeline" in off else pipeline  # type: ignore[assignment]  # checked above
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
        self._entries = EntryShape(self.shape, self._how.chunk_tokens)
        mode = "block-sparse" if "synchronisation" in off else synchronisation
        self._synchroniser = Synchroniser(engine, self._entries, mode, float(pinned_share))  # type: ignore[arg-type]  # checked above
        if self._persistent is not None:
            self._synchroniser.check(self._persistent)
        self._cache = EntryCache(engine, self._entries, self._synchroniser)
        self._work = Workspace(engine, LAYERS_UNDER_WAY)
        self._stages = EntryStages(
            engine,
            self._runs("attend", "merge", "score", "topk", "cluster"),
            self._cache,
            self._synchroniser,
            self._work,
            self._pipeline,
            int(micro_batch) if self._pipeline == "disaggregated" else 0,
            int(predict_from),
            float(rank_depth),
            float(lookup_ns),
            round(deadline_ms * 1e6),
        )

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
        index = ChunkIndex(self.engine, self._how, request.name, request.prompt_tokens, request.max_tokens)
        request.state["index"] = index
        archive, kept = await self._kept(request) if self._resume else (None, None)
        try:
            plan = self._plan(request, kept)
            wants = self._stages.wants(index.most_clusters)
            self._work.reserve(wants)
            request.state["wants"] = wants
        except BaseException:
            if archive is not None:
                archive.close(keep=True)
            raise
        most = self._entries.count(max(request.max_tokens, plan.keep_tokens))
        notes = notes_nbytes(self._entries, index, most, self._cache.always(index)) if plan.keep_tokens else 0
        request.state["held"] = held = self._cache.admit(request, plan, index, notes, archive)
        self._stages.counts[request.name] = Counts()
        if archive is not None:
            held.resumed = True
            request.tokens[:] = archive.tokens
            await resume_request(self.engine, self._cache, request, held)

    async def _kept(self, request: Request) -> tuple[Archive, Kept]:
        """What an earlier run has kept of a request. Raises ConfigurationError."""
        assert self._persistent is not None, "checked when the policy was made"
        of = fingerprint(request, self._entries, self._how)
        archive = await Archive.adopt(self.engine, self._persistent, request.name, of)
        try:
            return archive, await check(archive, request, self._entries.count(request.max_tokens), self._budget)
        except BaseException:
            archive.close(keep=True)
            raise

    def _plan(self, request: Request, kept: Kept | None) -> Plan:
        shape, entries = self.shape, self._entries
        most = entries.count(request.max_tokens)
        k = min(max(ceil(self._budget * request.max_tokens / entries.tokens), 1), most)
        if self._budget == 1:
            k = most
        elif kept is not None:
            k = kept.k  # what is attended stays what it was, also where the request may become longer than it was to
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
            k,
            self._budget,
            windows,
            cached,
            moving,
            self._persistent,
            self._packing,
            self._eviction,
            self._noise,
            self._seed,
            keep,
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
        table, held, dtype = request.blocks, held_by(request), self.shape.dtype
        if held.resumed:
            return
        table.length[layer] = keys.shape[1]
        for completion in self.measure(request, layer, keys):
            await completion
        if self.engine.phantom:
            held.prompt[layer] = None
            await held.index.build(layer, None)
            return
        heads, count, _ = keys.shape
        of_keys, of_values = (self.stored_rows(request, layer, *side) for side in ((K, keys), (V, values)))
        held.prompt[layer] = self._cache.pack(of_keys, of_values)
        await held.index.build(layer, from_bytes(of_keys, dtype).reshape(heads, count, -1))

    async def prefilled(self, request: Request, layer: int, queries: NDArray[np.float32]) -> None:
        held = held_by(request)
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
        self._stages.prefetch(layer, batch)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        if batch.q_len > 1:
            raise Unsupported("kvdrive", "attend", f"{batch.q_len} tokens of a request in one step; it takes 1")
        targets: tuple[list[Segment], list[Segment]] = ([], [])
        persisting: list[list[Completion]] = []
        for request, (position,) in zip(batch.requests, batch.positions.tolist(), strict=True):
            held, copies = held_by(request), list[Completion]()
            try:
                if layer == 0 and held.plan.keep_tokens and held.index.end(0) > held.committed:
                    await commit(self.engine, self._cache, request, held)
                copies = await self._cache.settle(held, layer, position)
            except DeviceError as error:
                request.fail(error)
            persisting.append(copies)
            for side, segment in zip(targets, await self._cache.open(held, layer, position), strict=True):
                side.append(segment)
            request.blocks.length[layer] = position + 1
        appended = self.store_rows(layer, batch, tuple(targets[K]), tuple(targets[V]))
        self.engine.stages.mark(appended, "append")
        return await self._stages.attend(layer, batch, appended, persisting)

    async def _by_importance(self, request: Request, layer: int, queries: NDArray[np.float32], wanted: int) -> Int64:
        """Entries that the prompt's last queries attend most, best first."""
        held = held_by(request)
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
            return self._stages.space("scores", layer, (), scores), self._stages.space("indices", layer, (), indices)

        return await importance(self.engine, layer, held.index, last, rows, scale, wanted, work)

    # -- space, reports -------------------------------------------------------------------------------------------

    def placement(self, request: Request) -> dict[str, int]:
        return held_by(request).placement()

    def tiers(self) -> list[str]:
        """The SSD, if it is to hold rows that DRAM does not; one that is resumed from holds them already."""
        if self._persistent is None or self._dram_share >= 1 or self._resume:
            return []
        return [self._persistent]

    def report(self) -> dict[str, Any]:
        """For each request: where chosen entries were found, evictions, bytes read from the SSD, hit rate by step."""
        return {name: asdict(counts) for name, counts in self._stages.counts.items()}


def _is_whole(request: Request, held: Held) -> bool:
    """Whether a request stands between two steps: the prompt has been placed, and every layer is as long."""
    length = request.blocks.length
    whole = held.committed >= 0 and request.failure is None and bool((length == length[0]).all())
    return whole and len(request.tokens) > int(length[0])
