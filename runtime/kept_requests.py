"""Requests that outlive a run: what an archive has to hold beside the entries, and a request from an archive.

Entries are in the archive as soon as they are indexed. A commit adds what is on the GPU alone: the index, the entries
that are always there, and the scales of keys. It is made when the prompt has been placed and whenever the index has
grown, between two steps; so after a crash a request goes on from the last of these, and what it answers is what it
would have answered without the crash. What windows held is not kept: they fill again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.archive import Archive
from tierloop.runtime.chunk_index import ChunkIndex
from tierloop.runtime.chunk_snapshots import restore, snapshot
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape
from tierloop.runtime.entry_cache import EntryCache, Held
from tierloop.runtime.policy import Int64, Request
from tierloop.runtime.synchronisation import places

PROMPT, LATER, NEWEST, SCALES, CHOICE = "prompt index", "later index", "always there", "scales", "choice"
"""Kinds of notes: the index of the prompt, what has joined it, entries that are always on the GPU, scales of keys, and
(of layer 0) how much is chosen."""
_HEADERS = 4096
"""Bytes for the headers of a layer's notes: more than two snapshots of some hundred updates take."""


@dataclass(frozen=True)
class Kept:
    """How much of a kept request is attended: K entries, which were made of this budget."""

    k: int
    budget: float

    def to_bytes(self) -> NDArray[np.uint8]:
        """uint8 (16,)."""
        return np.frombuffer(struct.pack("<qd", self.k, self.budget), dtype=np.uint8)

    @classmethod
    def from_bytes(cls, stored: NDArray[np.uint8]) -> Kept:
        """Raises ConfigurationError."""
        if len(stored) != 16:
            raise ConfigurationError(f"the note of what is chosen has {len(stored)} bytes; it must have 16")
        k, budget = struct.unpack("<qd", stored.tobytes())
        if not (0 < k < 1 << 40 and 0 < budget <= 1):
            raise ConfigurationError(f"the note of what is chosen says {k} entries of a budget of {budget}")
        return cls(k, budget)


def notes_nbytes(entries: EntryShape, index: ChunkIndex, most: int, kept: int) -> int:
    """The most bytes of all notes, for `most` entries of a layer-head of which `kept` are always on the GPU."""
    shape = entries.shape
    labels, centroids = 4 * most, 4 * shape.head_dim * index.most_clusters
    each = labels + centroids + kept * entries.nbytes + 4 * shape.head_dim
    return shape.num_layers * (shape.num_kv_heads * each + _HEADERS)


async def commit(engine: Engine, cache: EntryCache, request: Request, held: Held) -> None:
    """Make a request durable as it is between two steps. Raises what a write has failed with."""
    archive, index = held.tiers.archive, held.index
    assert archive is not None, "there is a persistent tier"
    length = int(request.blocks.length[0])
    while held.after:
        await held.after.pop(0)
    for layer in range(engine.shape.num_layers):
        for copied in await cache.settle(held, layer, length):
            await copied
    fresh = PROMPT not in archive.kinds(0)
    if fresh:
        archive.note(CHOICE, 0, Kept(held.plan.k, held.plan.budget).to_bytes())
    for layer in range(engine.shape.num_layers):
        if fresh:
            archive.note(PROMPT, layer, await snapshot(index, layer, 0))
            scales = request.blocks.scales
            if scales is not None:
                archive.note(SCALES, layer, np.ascontiguousarray(scales.values[layer]).view(np.uint8).reshape(-1))
        elif len(index.groups(layer)) > _of_prompt(index, layer):
            archive.note(LATER, layer, await snapshot(index, layer, _of_prompt(index, layer)))
        slots = _always(held, layer, length)
        into = np.zeros(slots.size * held.tiers.gpu.nbytes, dtype=np.uint8)
        await engine.read(places(held.tiers.gpu, slots), into)
        archive.note(NEWEST, layer, into)
    await archive.commit(request.tokens[: length + 1], length)
    held.committed = index.end(0)


async def resume_request(engine: Engine, cache: EntryCache, request: Request, held: Held) -> None:
    """Give a request that was just admitted what its adopted archive holds. Raises ConfigurationError."""
    archive, index, tiers = held.tiers.archive, held.index, held.tiers
    assert archive is not None, "there is a persistent tier"
    length = archive.length
    for layer in range(engine.shape.num_layers):
        later = [LATER] if LATER in archive.kinds(layer) else []
        await restore(index, layer, [await archive.read_note(kind, layer) for kind in (PROMPT, *later)])
        if archive.count(layer) != index.end(layer) - index.first:
            raise ConfigurationError(
                f"archive {request.name!r} has {archive.count(layer)} entries of layer {layer}, "
                f"and its index {index.end(layer) - index.first}"
            )
        scales = request.blocks.scales
        if scales is not None:
            stored = await archive.read_note(SCALES, layer)
            scales.values[layer] = stored.view(np.float32).reshape(scales.values[layer].shape)
            await engine.write(scales.place(layer), stored)
        request.blocks.length[layer] = length
        await _always_there(engine, cache, held, layer, length, await archive.read_note(NEWEST, layer))
        if tiers.dram is not None and tiers.cache is None:
            await _all_in_dram(engine, cache, held, layer)
    held.committed = index.end(0)


async def check(archive: Archive, request: Request, most: int, budget: float) -> Kept:
    """How much was attended, of an archive of this prompt and budget with room for the request.

    Raises ConfigurationError for any other.
    """
    mine = request.tokens[: request.prompt_tokens]
    if list(archive.tokens[: request.prompt_tokens]) != mine or archive.length < request.prompt_tokens:
        raise ConfigurationError(f"archive {request.name!r} on {archive.memory} is of another prompt")
    if len(archive.tokens) > request.max_tokens:
        raise ConfigurationError(
            f"archive {request.name!r} on {archive.memory} has {len(archive.tokens):,} tokens already; "
            f"the request may come to have {request.max_tokens:,}"
        )
    room = archive.geometry.most_entries
    if room < most:
        tokens = archive.geometry.entries.tokens
        raise ConfigurationError(
            f"archive {request.name!r} on {archive.memory} has room for {room * tokens:,} tokens; "
            f"the request may come to have {request.max_tokens:,}"
        )
    kept = Kept.from_bytes(await archive.read_note(CHOICE, 0))
    if kept.budget != budget:
        raise ConfigurationError(
            f"archive {request.name!r} on {archive.memory} was made with a budget of {kept.budget:g}, not {budget:g}"
        )
    return kept


def _of_prompt(index: ChunkIndex, layer: int) -> int:
    """How many groups the prompt's index has: one, unless the prompt was too short for any."""
    groups = index.groups(layer)
    return 1 if groups and index.cut.chunks else 0


def _always(held: Held, layer: int, length: int) -> Int64:
    """Slots of the entries that are always on the GPU, by head, then entry: int64 (n,)."""
    return np.asarray(held.tiers.window.slots[layer][:, held.always(layer, length)], dtype=np.int64).reshape(-1)


async def _always_there(
    engine: Engine, cache: EntryCache, held: Held, layer: int, length: int, stored: NDArray[np.uint8]
) -> None:
    index, gpu, heads = held.index, held.tiers.gpu, engine.shape.num_kv_heads
    entries = held.always(layer, length)
    if len(stored) != heads * len(entries) * gpu.nbytes:
        raise ConfigurationError(f"{index.request_name}: note of layer {layer} has {len(stored)} bytes")
    slots = gpu.take(heads * len(entries))
    held.tiers.window.keep(layer, np.repeat(np.arange(heads), len(entries)), np.tile(entries, heads), slots)
    if len(slots):
        await engine.write(places(gpu, slots), stored)


async def _all_in_dram(engine: Engine, cache: EntryCache, held: Held, layer: int) -> None:
    """Read a whole layer from the SSD into DRAM's slots."""
    tiers, index, heads = held.tiers, held.index, engine.shape.num_kv_heads
    assert tiers.archive is not None
    assert tiers.dram is not None
    count = index.end(layer) - index.first
    if not count:
        return
    everything = tiers.archive.segment_of(layer)
    there = engine.claim(engine.host, everything.media, f"a layer of {index.request_name}")
    try:
        read = engine.copy(Segment(everything.region, everything.spans), there.at(0, everything.media))
        of = np.repeat(np.arange(heads), count)
        slots = tiers.in_dram(layer, of, np.tile(np.arange(index.first, index.end(layer)), heads))
        source = Segment(there, Spans.equal(everything.offset, cache.entries.nbytes))
        await engine.copy(source, places(tiers.dram, slots), [read])
    finally:
        engine.drop(there)
