"""The cache of a request in entries: space in all tiers for its whole life, the prompt's entries, and new rows.

Who calls this: policies that keep entries in windows. A request has slots on the GPU for the windows of all layers and
heads together, for entries that are always there (the first and the newest ones), and for what is on its way in
`LAYERS_UNDER_WAY` layers; slots belong to no layer, only windows have a capacity each. DRAM has slots for its share of
each layer-head's entries. The SSD has room for all of them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from functools import partial
from math import floor

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.archive import Archive
from tierloop.runtime.blocks import K, Rows, TierTooSmall, V
from tierloop.runtime.chunk_index import ChunkIndex
from tierloop.runtime.chunking import Chunking
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape, Slots
from tierloop.runtime.loop import Task
from tierloop.runtime.policy import Int64, Request
from tierloop.runtime.synchronisation import LAYERS_UNDER_WAY, Fetch, Synchroniser, Tiers, places
from tierloop.runtime.windows import Eviction, Windows
from tierloop.runtime.workspace import Workspace

Bytes = NDArray[np.uint8]
PERSIST = "persist"


@dataclass(frozen=True)
class Plan:
    """How a request's entries are divided: all numbers are entries.

    `k` are chosen in each layer and head, `windows` int64 (layers, heads) the GPU's capacities, `cached` DRAM's of
    each layer-head; `moving` is how many of a layer may be on their way to the GPU at once.
    """

    k: int
    budget: float
    """The share of the tokens that `k` was made of."""
    windows: Int64
    cached: int
    moving: int
    persistent: str | None
    packed: bool
    """Whether entries of one cluster lie side by side on the SSD; otherwise by position."""
    eviction: Eviction
    noise: float
    seed: int
    keep_tokens: int
    """Tokens that what is kept of the request has room for; 0: nothing is kept."""


@dataclass(eq=False)
class Held:
    """A request while it is served."""

    plan: Plan
    index: ChunkIndex
    tiers: Tiers
    prompt: dict[int, Bytes | None] = field(default_factory=dict)
    """Entries of layers that are being placed: uint8 (heads, entries, nbytes)."""
    after: list[Task[None]] = field(default_factory=list)
    """What goes on after the attention of layers."""
    early: dict[int, Fetch] = field(default_factory=dict)
    """What has been prefetched for a layer and may still be on its way."""
    not_persisted: int = 0
    """Entries whose write to the SSD has failed; DRAM has them, or whoever reads them fails."""
    committed: int = -1
    """Up to which entry the index was when the request was made durable last; −1: it was not."""
    resumed: bool = False
    """The prompt is in its place already."""
    persisting: dict[int, Completion] = field(default_factory=dict)
    """Who reads the staging space of a layer last."""

    def always(self, layer: int, length: int) -> Int64:
        """Entries that are always on the GPU, of a layer with that many tokens: int64 (n,), ascending."""
        count = -(-length // self.index.how.chunk_tokens)
        return np.concatenate((np.arange(min(self.index.first, count)), np.arange(self.index.end(layer), count)))

    def written(self, count: int, completion: Completion) -> None:
        """A write of so many entries to the SSD has ended."""
        if completion.error is not None:
            self.not_persisted += count

    def placement(self) -> dict[str, int]:
        """Bytes of entries by memory; an entry counts wherever it lies."""
        tiers, index = self.tiers, self.index
        layers, heads, _ = tiers.window.slots.shape
        indexed = sum(index.end(layer) - index.first for layer in range(layers)) * heads
        nbytes = tiers.gpu.nbytes
        found = {tiers.gpu.memory: (tiers.gpu.count - tiers.gpu.free) * nbytes}
        if tiers.dram is not None:
            held = indexed if tiers.cache is None else tiers.dram.count - tiers.dram.free
            found[tiers.dram.memory] = found.get(tiers.dram.memory, 0) + held * nbytes
        if tiers.archive is not None:
            found[tiers.archive.memory] = found.get(tiers.archive.memory, 0) + indexed * nbytes
        return found


def held_by(request: Request) -> Held:
    """An admitted request's entries."""
    held: Held = request.state["held"]
    return held


class EntryCache:
    """Entries of all requests of one policy. `Synchroniser` brings back what is missing on the GPU."""

    def __init__(self, engine: Engine, entries: EntryShape, synchroniser: Synchroniser) -> None:
        self._engine = engine
        self._synchroniser = synchroniser
        self.entries = entries
        self._heads = np.arange(entries.shape.num_kv_heads, dtype=np.int64)

    # -- space ----------------------------------------------------------------------------------------------------

    def admit(
        self, request: Request, plan: Plan, index: ChunkIndex, notes_nbytes: int = 0, archive: Archive | None = None
    ) -> Held:
        """Take a request's space in all tiers, and its archive, unless there is one already.

        Raises TierTooSmall; what was taken is then given back, and the archive with it.
        """
        engine, shape, how = self._engine, self.entries.shape, index.how
        lists = shape.num_layers * shape.num_kv_heads
        most = self.entries.count(request.max_tokens)
        kept = self.always(index)
        work = Workspace(engine, LAYERS_UNDER_WAY)
        taken: list[Slots] = []
        held: Held | None = None
        try:
            dram = cache = None
            if plan.persistent is not None:
                room = max(request.max_tokens, plan.keep_tokens)
                appends = (room - request.prompt_tokens) // how.update_tokens + 2
                if archive is None:
                    of = fingerprint(request, self.entries, how)
                    room = self.entries.count(room)
                    place = plan.persistent, request.name, of, self.entries, room
                    archive = Archive(engine, *place, notes_nbytes, appends)
                work.reserve(self._synchroniser.wants(plan.k, archive, shape.num_layers))
                update = min(self.entries.count(how.update_tokens + how.local_tokens) + 2, most)
                work.reserve({"persisting": (engine.host, shape.num_kv_heads * archive.stride(update))})
            if plan.cached:
                moving = LAYERS_UNDER_WAY * shape.num_kv_heads * plan.k if plan.cached < most else 0
                dram = Slots(engine, engine.host, lists * plan.cached + moving, self.entries.nbytes, "DRAM's share")
                taken.append(dram)
                if plan.cached < most:
                    cache = self._windows(plan, most, np.full((shape.num_layers, shape.num_kv_heads), plan.cached))
            fixed = lists * kept + LAYERS_UNDER_WAY * shape.num_kv_heads * plan.moving
            count = min(int(plan.windows.sum()) + fixed, lists * most)
            gpu = self._gpu_slots(plan, fixed, count, index.placing_nbytes)
            taken.append(gpu)
            tiers = Tiers(gpu, self._windows(plan, most, plan.windows), dram, cache, archive, index.first, work)
            self._synchroniser.grant(tiers, plan.k, shape.num_layers)
            held = Held(plan, index, tiers)
        finally:
            if held is None:
                work.close()
                for each in taken:
                    each.close()
                if archive is not None:
                    archive.close(keep=archive.length > 0)
        return held

    def always(self, index: ChunkIndex) -> int:
        """The most entries of a layer-head that are always on the GPU."""
        most = index.cut.most_chunks + 1
        return min(index.first + self.entries.count(index.how.local_tokens + index.how.update_tokens) + 3, most)

    def _windows(self, plan: Plan, most: int, capacity: Int64) -> Windows:
        shape = self.entries.shape
        return Windows(
            shape.num_layers, shape.num_kv_heads, most, capacity.astype(np.int64), plan.eviction, plan.noise, plan.seed
        )

    def _gpu_slots(self, plan: Plan, fixed: int, count: int, placing: int) -> Slots:
        """Slots on the GPU, with room left for the `placing` bytes that the prompt's index takes for a moment."""
        engine, memory, nbytes = self._engine, self._engine.dense.memory, self.entries.nbytes
        left = engine.claim(memory, placing, "the prompt's index") if placing else None
        try:
            return Slots(engine, memory, count, nbytes, "GPU windows")
        except TierTooSmall as error:
            room = largest(engine, memory, count * nbytes) // nbytes - fixed
            if room < 0:
                would = f"not even a window of 0 fits: {-room * nbytes:,} bytes are missing for what is always there"
            else:
                # Rounded down twice: what is said has to fit.
                window = floor(100 * (room // plan.windows.size) / plan.k) / 100
                would = f"windows of {window:.2f} × {plan.k} entries would fit"
            raise TierTooSmall(f"{error}; {would}") from error
        finally:
            if left is not None:
                engine.drop(left)

    async def release(self, held: Held) -> None:
        """Wait for what is under way and give everything back."""
        tiers = held.tiers
        under_way = [*held.persisting.values(), *(c for fetch in held.early.values() for c in fetch.arriving)]
        under_way += tiers.late
        under_way += [c for readers in tiers.readers.values() for c in readers]
        for task in held.after:
            await _ended(task)
        for completion in under_way:
            await _ended(completion)
        tiers.work.close()
        tiers.gpu.close()
        if tiers.dram is not None:
            tiers.dram.close()
        if tiers.grants is not None:
            self._engine.drop(tiers.grants)
        if tiers.archive is not None:
            tiers.archive.close(keep=held.plan.keep_tokens > 0)

    # -- the prompt -----------------------------------------------------------------------------------------------

    def pack(self, keys: Bytes, values: Bytes) -> Bytes:
        """Stored rows uint8 (heads, tokens, row bytes) of both sides as entries (heads, entries, nbytes), 0 padded."""
        heads, count, _ = keys.shape
        full = self.entries.count(count) * self.entries.tokens
        sides = []
        for rows in (keys, values):
            padded = rows if full == count else np.zeros((heads, full, rows.shape[2]), dtype=np.uint8)
            if full != count:
                padded[:, :count] = rows
            sides.append(padded.reshape(heads, -1, self.entries.tokens * rows.shape[2]))
        return np.concatenate(sides, axis=2)

    async def place(self, request: Request, held: Held, layer: int, ranked: Int64) -> None:
        """Put a layer's packed prompt into all tiers: `ranked` (heads, m) indexed entries, the best first."""
        packed, tiers, index, plan = held.prompt.pop(layer), held.tiers, held.index, held.plan
        length = int(request.blocks.length[layer])
        first, end = index.first, index.end(layer)
        writes: list[Completion] = []
        if tiers.archive is not None and end > first:
            order = self._order(held, layer, first, end)
            data = None if packed is None else packed[self._heads[:, None], order]
            writes += tiers.archive.put(layer, order, data)
        always = held.always(layer, length)
        entries = np.tile(always, len(self._heads))
        of = np.repeat(self._heads, len(always))
        slots = tiers.gpu.take(len(of))
        tiers.window.keep(layer, of, entries, slots)
        writes += self._write(tiers.gpu, slots, packed, of, entries)
        best = ranked[:, : int(plan.windows[layer].max(initial=0))]
        of, at = np.nonzero((best >= 0) & (np.arange(best.shape[1]) < plan.windows[layer][:, None]))
        entries = best[of, at]
        slots = tiers.gpu.take(len(of))
        tiers.window.admit(layer, of, entries, slots, length)
        writes += self._write(tiers.gpu, slots, packed, of, entries)
        if tiers.dram is not None:
            if plan.cached >= end - first:
                of = np.repeat(self._heads, end - first)
                entries = np.tile(np.arange(first, end), len(self._heads))
            else:
                # The next best after the window's; where the ranking ends, nothing.
                rest = (np.arange(ranked.shape[1]) >= plan.windows[layer][:, None]) & (ranked >= 0)
                rest &= np.cumsum(rest, axis=1) <= plan.cached
                of, at = np.nonzero(rest)
                entries = ranked[of, at]
            writes += self._write(tiers.dram, self._into_dram(tiers, layer, of, entries, length), packed, of, entries)
        for completion in writes:
            await completion

    @staticmethod
    def _into_dram(tiers: Tiers, layer: int, heads: Int64, entries: Int64, step: int) -> Int64:
        """Slots of DRAM for entries that it does not hold yet."""
        assert tiers.dram is not None, "there is a share for DRAM"
        if tiers.cache is None:
            return tiers.in_dram(layer, heads, entries)
        slots = tiers.dram.take(len(entries))
        tiers.cache.admit(layer, heads, entries, slots, step)
        return slots

    def _order(self, held: Held, layer: int, first: int, last: int) -> Int64:
        """Entries [first, last) as they are to lie on the SSD: int64 (heads, n)."""
        if held.plan.packed:
            return held.index.order(layer, first, last)
        return np.broadcast_to(np.arange(first, last), (len(self._heads), last - first))

    def _write(
        self, slots: Slots, numbers: Int64, packed: Bytes | None, heads: Int64, entries: Int64
    ) -> list[Completion]:
        if packed is None or not len(numbers):
            return []  # memories do not remember where a phantom run has written
        return [self._engine.write(places(slots, numbers), packed[heads, entries].reshape(-1))]

    # -- a step ---------------------------------------------------------------------------------------------------

    async def room(self, held: Held, count: int) -> Int64:
        """Free slots on the GPU, once layers before have given up theirs. Raises TierTooSmall where nothing will."""
        while held.tiers.gpu.free < count and held.after:
            await held.after.pop(0)
        return held.tiers.gpu.take(count)

    async def open(self, held: Held, layer: int, position: int) -> tuple[Segment, Segment]:
        """Where the K and V rows of a new position go, one span for each head; a new entry is given its slots."""
        entry, within = divmod(position, self.entries.tokens)
        window = held.tiers.window
        if window.slots[layer, 0, entry] < 0:
            slots = await self.room(held, len(self._heads))
            window.keep(layer, self._heads, np.full_like(self._heads, entry), slots)
        numbers = window.slots[layer, :, entry].astype(np.int64)
        sides = []
        for side in (K, V):
            row = self.entries.shape.row_nbytes(side)
            sides.append(places(held.tiers.gpu, numbers, self.entries.offset(side) + within * row, row))
        return sides[K], sides[V]

    def attended(self, held: Held, layer: int, length: int, chosen: Int64) -> Int64:
        """Entries (heads, n), ascending, that a step attends: the chosen ones (heads, k) and those that always are."""
        first, end, count = held.index.first, held.index.end(layer), self.entries.count(length)
        heads = len(self._heads)
        before = np.broadcast_to(np.arange(min(first, count)), (heads, min(first, count)))
        newest = np.broadcast_to(np.arange(end, count), (heads, count - end))
        return np.concatenate((before, np.sort(chosen, axis=1), newest), axis=1)

    def rows(self, held: Held, layer: int, sequence: int, length: int, attended: Int64) -> Rows:
        """Operands of entries (heads, n) that are on the GPU, ascending."""
        tokens, region = self.entries.tokens, held.tiers.gpu.region
        heads = np.repeat(self._heads, attended.shape[1])
        entries = attended.reshape(-1)
        slots = held.tiers.window.slots[layer, heads, entries].astype(np.int64)
        assert len(slots) == 0 or int(slots.min()) >= 0, "what is attended is on the GPU"
        runs = np.empty((len(entries), 3), dtype=np.int64)
        runs[:, 0], runs[:, 1], runs[:, 2] = sequence, heads, entries * tokens
        counts = np.minimum(length - runs[:, 2], tokens)
        sides = []
        for side in (K, V):
            spans = np.empty((len(entries), 2), dtype=np.int64)
            spans[:, 0] = slots * held.tiers.gpu.nbytes + self.entries.offset(side)
            spans[:, 1] = counts * self.entries.shape.row_nbytes(side)
            sides.append((Segment(region, Spans(spans)),))
        return Rows(runs, sides[K], sides[V])

    def keys(self, held: Held, layer: int, first: int, last: int) -> Segment:
        """K rows of entries [first, last) that are on the GPU, head by head."""
        numbers = held.tiers.window.slots[layer, :, first:last].astype(np.int64).reshape(-1)
        return places(held.tiers.gpu, numbers, 0, self.entries.offset(V))

    async def settle(self, held: Held, layer: int, step: int) -> list[Completion]:
        """Take entries that were indexed meanwhile among those that windows may evict, and persist them.

        Returns the copies that read their slots: no window may give up any of them before those have ended.
        """
        first, last = await held.index.settle(layer)
        if last == first:
            return []
        tiers, engine = held.tiers, self._engine
        tiers.window.loosen(layer, first, last, step)
        copies: list[Completion] = []
        order = self._order(held, layer, first, last)
        if tiers.archive is not None:
            stride = tiers.archive.stride(last - first)
            staged = tiers.work.at("persisting", layer, stride * len(self._heads))
            base = int(staged.spans.array[0, 0])
            numbers = tiers.window.slots[layer, self._heads[:, None], order].astype(np.int64).reshape(-1)
            offsets = (self._heads[:, None] * stride + np.arange(last - first) * self.entries.nbytes).reshape(-1) + base
            before = [c for c in (held.persisting.get(layer % LAYERS_UNDER_WAY),) if c is not None]
            target = Segment(staged.region, Spans.equal(offsets, self.entries.nbytes))
            copied = engine.stages.mark(engine.copy(places(tiers.gpu, numbers), target, before), PERSIST)
            held.persisting[layer % LAYERS_UNDER_WAY] = copied
            done = tiers.archive.take(layer, order, staged, [copied])
            held.persisting[layer % LAYERS_UNDER_WAY] = tiers.writing[layer] = engine.stages.mark(done, PERSIST)
            done.on_done(partial(held.written, order.size))
            copies.append(copied)
        if tiers.dram is not None and tiers.cache is None:
            heads, entries = np.repeat(self._heads, last - first), order.reshape(-1)
            numbers = tiers.window.slots[layer, heads, entries].astype(np.int64)
            slots = self._into_dram(tiers, layer, heads, entries, step)
            copied = engine.copy(places(tiers.gpu, numbers), places(tiers.dram, slots))
            copies.append(engine.stages.mark(copied, PERSIST))
            tiers.late = [c for c in tiers.late if not c.done] + copies
        return copies


def fingerprint(request: Request, entries: EntryShape, how: Chunking) -> str:
    """What kept entries are of: the weights, the cache's shape and the index. At most 256 characters."""
    shape = entries.shape
    sizes = (shape.num_layers, shape.num_kv_heads, shape.group, shape.head_dim, shape.head_dim_v)
    return f"{request.model[:16] or 'unnamed'} {shape.dtype} {sizes} {astuple(how)}".replace(" ", "")


def largest(engine: Engine, memory: str, most: int) -> int:
    """The most bytes, up to `most`, that a memory gives in one piece now; found by asking, to one part in 1,000."""
    low, high = 0, most
    while high - low > max(most // 1000, 1):
        middle = (low + high) // 2
        try:
            engine.drop(engine.scratch(memory, middle))
            low = middle
        except OutOfMemory:
            high = middle
    return low


async def _ended(waiting: Completion | Task[None]) -> None:
    """Wait for the end of something whose failure somebody else has told."""
    try:
        await waiting
    except Exception as error:  # whatever it was, the bytes are not touched any more
        del error
