"""Synchronisation: how entries that a step needs, and the GPU does not hold, come there from DRAM and the SSD.

What DRAM holds in slots is pinned: one copy takes it to the GPU. What only the SSD holds is read in whole blocks of its
grid, and goes on in one of four ways (KVDrive §7.3):

    naive         the whole segment of the layer, every hop of it, as an offloaded cache is read layer by layer; the
                  GPU picks the entries
    block-sparse  only the blocks of the medium that hold a missing entry, whole on every hop; the GPU picks
    hierarchical  those blocks to pageable memory; the cores gather the entries into a pinned buffer, which crosses the
                  link; DRAM keeps them
    balanced      as hierarchical, but the layer-heads that have missed most on the SSD read into pinned buffers of
                  their own, from which the link takes the entries without the cores

Pageable memory cannot be read by a copy engine: that is why the cores move it first. Where the paper is silent: pinned
buffers are granted after every step, by an average of what each layer-head read from the SSD in the last steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.archive import Archive
from tierloop.runtime.archive_layout import Media
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.entries import EntryShape, Slots
from tierloop.runtime.windows import Windows
from tierloop.runtime.workspace import Workspace

Int64 = NDArray[np.int64]
Synchronisation = Literal["naive", "block-sparse", "hierarchical", "balanced"]
SYNCHRONISATIONS: tuple[Synchronisation, ...] = get_args(Synchronisation)

SSD, GATHER, TRANSFER, UNPACK, PROMOTE = "ssd", "gather", "transfer", "unpack", "promote"
"""Stages: reading the drive, cores to a pinned buffer, over the link, out of blocks on the GPU, into DRAM's slots."""
LAYERS_UNDER_WAY = 3
MEMORY_OF_MISSES = 0.8
"""How much of the average of a layer-head's SSD misses a step keeps: assumed."""


@dataclass
class Traffic:
    """Entries by where they were found, and bytes read from the SSD: useful, and what the medium moved for them."""

    hits: int = 0
    from_dram: int = 0
    from_ssd: int = 0
    useful_nbytes: int = 0
    media_nbytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the chosen entries that the GPU held; 1 where none was chosen."""
        asked = self.hits + self.from_dram + self.from_ssd
        return self.hits / asked if asked else 1.0


@dataclass(eq=False)
class Tiers:
    """Where a request's entries lie: slots and windows of the GPU and DRAM, and the archive on the SSD."""

    gpu: Slots
    window: Windows
    dram: Slots | None
    cache: Windows | None
    """Who is in DRAM; None where it has a slot for every entry, or none at all."""
    archive: Archive | None
    first: int
    """The first entry that the archive has."""
    work: Workspace
    traffic: Traffic = field(default_factory=Traffic)
    """Of this step."""
    prefetched: Traffic = field(default_factory=Traffic)
    """Of this step, for layers whose query was only predicted."""
    missed: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """Average of the entries that each (layer, head) read from the SSD in a step."""
    granted: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """Number of the pinned buffer that each (layer, head) has; −1: none."""
    grants: Region | None = None
    writing: dict[int, Completion] = field(default_factory=dict)
    """By layer: the last write of entries to the SSD."""
    late: list[Completion] = field(default_factory=list)
    """What nobody waits for any more: of a request that has failed."""
    readers: dict[tuple[str, int], list[Completion]] = field(default_factory=dict)
    """Who reads the bytes of each buffer last: whatever is written there comes after it."""

    def in_dram(self, layer: int, heads: Int64, entries: Int64) -> Int64:
        """DRAM's slots of entries, −1 where it does not hold them. All int64 (n,)."""
        if self.dram is None:
            return np.full(len(entries), -1, dtype=np.int64)
        if self.cache is not None:
            return np.asarray(self.cache.slots[layer, heads, entries], dtype=np.int64)
        _, num_heads, most = self.window.slots.shape
        return np.asarray((layer * num_heads + heads) * most + entries, dtype=np.int64)


@dataclass
class Fetch:
    """What is on its way: the completions after which the entries are on the GPU, and what DRAM is given meanwhile."""

    arriving: list[Completion] = field(default_factory=list)
    promoted: list[tuple[Completion, Int64, Int64, Int64]] = field(default_factory=list)
    """A copy into DRAM with the heads, entries and slots that it fills."""


def places(slots: Slots, numbers: Int64, offset: int = 0, nbytes: int | None = None) -> Segment:
    """`nbytes` (default: all) of the entries in these slots, from `offset` within each."""
    return Segment(
        slots.region, Spans.equal(numbers * slots.nbytes + offset, slots.nbytes if nbytes is None else nbytes)
    )


class Synchroniser:
    """Fetches missing entries for one policy in one of the four ways."""

    def __init__(self, engine: Engine, entries: EntryShape, mode: Synchronisation, pinned_share: float) -> None:
        self.mode = mode
        self._engine = engine
        self._entries = entries
        self._pinned_share = pinned_share
        self._lane = engine.runner("gather", engine.host)
        dense = engine.dense
        self._turn = 0
        self._submitted: list[Completion] = []
        """Commands of the fetch that is being started."""
        self._unpacker = Lane(dense.device, dense.executor, dense.executor.queues[-1])

    def check(self, persistent: str) -> None:
        """Raise ConfigurationError unless the platform can move entries from this memory in this way."""
        if self._engine.mover(persistent, self._engine.host) is None:
            raise ConfigurationError(f"nobody copies from {persistent} to {self._engine.host}")
        if self._lane is None:
            raise ConfigurationError(f"nobody gathers entries in {self._engine.host}")
        if self.mode in ("naive", "block-sparse") and "gather" not in self._engine.dense.executor.kernels:
            raise ConfigurationError(f"{self._engine.dense.device.info.name} does not gather entries out of blocks")

    def wants(self, k: int, archive: Archive, num_layers: int) -> dict[str, tuple[str, int]]:
        """Bytes of working space for each layer under way, `k` chosen entries of each KV head."""
        host, gpu, heads = self._engine.host, self._engine.dense.memory, self._entries.shape.num_kv_heads
        blocks = heads * self.most_media(k, archive)
        if self.mode == "naive":
            blocks = heads * archive.geometry.segment_nbytes
        wants = {"pageable": (host, blocks), "pinned": (host, heads * k * self._entries.nbytes)}
        if self.mode in ("naive", "block-sparse"):
            wants |= {"pinned": (host, blocks), "blocks": (gpu, blocks)}
        return wants

    def most_media(self, k: int, archive: Archive) -> int:
        """The most bytes of the medium that hold `k` entries of a layer-head."""
        return k * (-(-(self._entries.nbytes - 1) // archive.geometry.grid) + 1) * archive.geometry.grid

    def grant(self, tiers: Tiers, k: int, num_layers: int) -> None:
        """Take a request's pinned buffers; nobody has one before `balance`. Raises TierTooSmall."""
        heads = self._entries.shape.num_kv_heads
        tiers.missed = np.zeros((num_layers, heads))
        tiers.granted = np.full((num_layers, heads), -1, dtype=np.int64)
        count = int(num_layers * heads * self._pinned_share)
        if self.mode != "balanced" or tiers.archive is None or not count:
            return
        nbytes = count * self.most_media(k, tiers.archive)
        tiers.grants = self._engine.claim(self._engine.host, nbytes, f"{count} pinned buffers")

    def balance(self, tiers: Tiers, k: int) -> None:
        """After a step: pinned buffers go to the layer-heads that missed most on the SSD; who has one keeps it."""
        if tiers.grants is None or tiers.archive is None:
            return
        count = tiers.grants.nbytes // self.most_media(k, tiers.archive)
        order = np.argsort(-tiers.missed, axis=None, kind="stable")[:count]
        wanted = np.zeros(tiers.granted.size, dtype=bool)
        wanted[order[tiers.missed.reshape(-1)[order] > 0]] = True
        held = tiers.granted.reshape(-1)
        held[~wanted] = -1
        free = np.setdiff1d(np.arange(count), held[held >= 0])
        fresh = np.flatnonzero(wanted & (held < 0))
        held[fresh] = free[: len(fresh)]

    # -- fetching -------------------------------------------------------------------------------------------------

    def fetch(
        self, tiers: Tiers, layer: int, heads: Int64, entries: Int64, slots: Int64, k: int, traffic: Traffic
    ) -> Fetch:
        """Start to bring entries into free slots of the GPU. All int64 (n,), sorted by head, then entry.

        Raises a DeviceError where a device takes no command; what it took before is in `tiers.late` then.
        """
        fetch, self._submitted = Fetch(), []
        try:
            self._fetch(fetch, tiers, layer, heads, entries, slots, k, traffic)
        except DeviceError:
            tiers.late += self._submitted
            raise
        return fetch

    def _fetch(
        self,
        fetch: Fetch,
        tiers: Tiers,
        layer: int,
        heads: Int64,
        entries: Int64,
        slots: Int64,
        k: int,
        traffic: Traffic,
    ) -> None:
        if tiers.missed.size:
            tiers.missed[layer] *= MEMORY_OF_MISSES
        if not len(entries):
            return
        held = tiers.in_dram(layer, heads, entries)
        near = held >= 0
        if tiers.dram is not None and near.any():
            source, target = places(tiers.dram, held[near]), places(tiers.gpu, slots[near])
            fetch.arriving.append(self._mark(self._engine.copy(source, target), TRANSFER))
        traffic.from_dram += int(near.sum())
        far = ~near
        if far.any():
            traffic.from_ssd += int(far.sum())
            self._from_ssd(fetch, tiers, layer, heads[far], entries[far], slots[far], k)

    def _from_ssd(
        self, fetch: Fetch, tiers: Tiers, layer: int, heads: Int64, entries: Int64, slots: Int64, k: int
    ) -> None:
        assert tiers.archive is not None, "without an SSD, DRAM holds every entry"
        tiers.missed[layer] += (1 - MEMORY_OF_MISSES) * np.bincount(heads, minlength=tiers.missed.shape[1])
        if self.mode in ("naive", "block-sparse"):
            self._in_blocks(fetch, tiers, layer, heads, entries, slots)
            return
        pinned = tiers.granted[layer][heads] >= 0
        if pinned.any():
            self._by_grant(fetch, tiers, layer, heads[pinned], entries[pinned], slots[pinned], k)
        if not pinned.all():
            rest = ~pinned
            self._gathered(fetch, tiers, layer, heads[rest], entries[rest], slots[rest])

    def _in_blocks(self, fetch: Fetch, tiers: Tiers, layer: int, heads: Int64, entries: Int64, slots: Int64) -> None:
        """Whole blocks on every hop, and the GPU takes the entries out of them."""
        engine, archive = self._engine, tiers.archive
        assert archive is not None
        media = archive.media(layer, heads, entries)
        if self.mode == "naive":
            everything = archive.segment_of(layer)
            at = everything.offset[heads * archive.count(layer) + entries - tiers.first]
            media = everything._replace(offset=at, useful=media.useful)
        read, pageable = self._read(tiers, layer, media)
        pinned = tiers.work.at("pinned", layer, media.media)
        moved = self._gather(pageable, pinned, [read, *self._readers(tiers, "pinned", layer)])
        self._reads(tiers, "pageable", layer, [moved])
        blocks = tiers.work.at("blocks", layer, media.media)
        sent = self._mark(engine.copy(pinned, blocks, [moved, *self._readers(tiers, "blocks", layer)]), TRANSFER)
        self._reads(tiers, "pinned", layer, [sent])
        source, target = self._within(blocks, media.offset), places(tiers.gpu, slots)
        unpacked = engine.launch(self._unpacker, Gather(), ((source,),), ((target,),), [sent])
        self._reads(tiers, "blocks", layer, [self._mark(unpacked, UNPACK)])
        fetch.arriving.append(unpacked)

    def _gathered(self, fetch: Fetch, tiers: Tiers, layer: int, heads: Int64, entries: Int64, slots: Int64) -> None:
        """SSD → pageable memory → pinned buffer → GPU; DRAM keeps what fits."""
        archive = tiers.archive
        assert archive is not None
        media = archive.media(layer, heads, entries)
        read, pageable = self._read(tiers, layer, media)
        source = self._within(pageable, media.offset)
        pinned = tiers.work.at("pinned", layer, len(entries) * self._entries.nbytes)
        moved = self._gather(source, pinned, [read, *self._readers(tiers, "pinned", layer)])
        sent = self._mark(self._engine.copy(pinned, places(tiers.gpu, slots), [moved]), TRANSFER)
        fetch.arriving.append(sent)
        kept = self._promote(fetch, tiers, heads, entries, source, [read])
        self._reads(tiers, "pageable", layer, [moved, *kept])
        self._reads(tiers, "pinned", layer, [sent])

    def _by_grant(
        self, fetch: Fetch, tiers: Tiers, layer: int, heads: Int64, entries: Int64, slots: Int64, k: int
    ) -> None:
        """SSD → pinned buffers, one for each of these layer-heads → GPU."""
        archive = tiers.archive
        assert archive is not None
        assert tiers.grants is not None
        each = self.most_media(k, archive)
        spans, offsets, buffers, keys = [], [], [], []
        for head in np.unique(heads).tolist():
            mine = heads == head
            media = archive.media(layer, heads[mine], entries[mine])
            self._account(tiers, media)
            number = int(tiers.granted[layer, head])
            spans.append(media.spans.array)
            offsets.append(number * each + media.offset)
            buffers.append((number * each, media.media))
            keys.append(("grant", number))
        source = Segment(archive.region, Spans(np.concatenate(spans)))
        target = Segment(tiers.grants, Spans(np.array(buffers, dtype=np.int64)))
        read = self._submit_read(tiers, layer, source, target, [c for key in keys for c in tiers.readers.get(key, [])])
        held = Segment(tiers.grants, Spans.equal(np.concatenate(offsets), self._entries.nbytes))
        sent = self._mark(self._engine.copy(held, places(tiers.gpu, slots), [read]), TRANSFER)
        fetch.arriving.append(sent)
        readers = [sent, *self._promote(fetch, tiers, heads, entries, held, [read])]
        tiers.readers.update(dict.fromkeys(keys, readers))

    def _promote(
        self, fetch: Fetch, tiers: Tiers, heads: Int64, entries: Int64, source: Segment, after: list[Completion]
    ) -> list[Completion]:
        """Let DRAM keep what was read, as far as it has free slots; nobody waits for it."""
        if tiers.dram is None or tiers.cache is None or not tiers.dram.free:
            return []
        count = min(len(entries), tiers.dram.free)
        slots = tiers.dram.take(count)
        taken = Segment(source.region, Spans(source.spans.array[:count]))
        done = self._gather(taken, places(tiers.dram, slots), after, PROMOTE)
        fetch.promoted.append((done, heads[:count], entries[:count], slots))
        return [done]

    def _read(self, tiers: Tiers, layer: int, media: Media) -> tuple[Completion, Segment]:
        """Blocks of the SSD into pageable memory: the completion, and where they come to lie."""
        pageable = tiers.work.at("pageable", layer, media.media)
        self._account(tiers, media)
        source = Segment(media.region, media.spans)
        return self._submit_read(tiers, layer, source, pageable, self._readers(tiers, "pageable", layer)), pageable

    def _submit_read(
        self, tiers: Tiers, layer: int, source: Segment, target: Segment, readers: Sequence[Completion]
    ) -> Completion:
        """Read from the SSD; its queues take turns, since one queue has one command under way."""
        written = tiers.writing.get(layer)
        after = readers if written is None else [*readers, written]
        lane = self._engine.mover(source.region.memory, target.region.memory)
        assert lane is not None, "checked when the policy was made"
        self._turn += 1
        queue = lane.executor.queues[self._turn % len(lane.executor.queues)]
        return self._mark(lane.device.submit(Copy(source, target), queue, after), SSD)

    @staticmethod
    def _account(tiers: Tiers, media: Media) -> None:
        tiers.traffic.useful_nbytes += media.useful
        tiers.traffic.media_nbytes += media.media

    def _gather(self, source: Segment, target: Segment, after: Sequence[Completion], stage: str = GATHER) -> Completion:
        assert self._lane is not None, "checked when the policy was made"
        return self._mark(self._engine.launch(self._lane, Gather(), ((source,),), ((target,),), after), stage)

    def _within(self, buffer: Segment, offsets: Int64) -> Segment:
        """Entries at these offsets of a buffer."""
        base = int(buffer.spans.array[0, 0])
        return Segment(buffer.region, Spans.equal(base + offsets, self._entries.nbytes))

    def _readers(self, tiers: Tiers, use: str, layer: int) -> list[Completion]:
        return tiers.readers.get((use, layer % LAYERS_UNDER_WAY), [])

    def _reads(self, tiers: Tiers, use: str, layer: int, readers: Iterable[Completion]) -> None:
        tiers.readers[use, layer % LAYERS_UNDER_WAY] = list(readers)

    def _mark(self, completion: Completion, stage: str) -> Completion:
        self._submitted.append(completion)
        return self._engine.stages.mark(completion, stage)
