"""The archive: a request's entries on a persistent memory, where they outlive the run.

A region holds a segment for each layer and KV head; what `put` and `take` lay down at once (an *append*) lies side by
side in the segment, in the order that the caller gives: entries of one cluster next to each other. Every append begins
on the grid of the memory; within it entries follow each other without gaps, so an entry may begin anywhere in a media
block and end in the next. `media` says which blocks must be read for some entries. Beside entries an archive keeps
*notes*: centroids, labels, rows that are no full entries, scales.

What must hold:

- `commit` is whole or not at all. Whatever kills the process, `adopt` finds the state of the last commit that ended, or
  of the one that was under way; what came later is invisible. Nothing that a commit names is written over before the
  next one is durable.
- An entry is put once; an archive is never changed by two at a time; one of the same name and fingerprint as an older
  one replaces it when it is first committed, not before.
- A write that failed makes every later commit fail.
- What `adopt` finds on the medium is checked before it is used: names, sizes, places, and the checksum of every append
  and note. Damage is a ConfigurationError of one line.

On a memory that does not keep its bytes, and in phantom runs, all of this takes its time and ends with the platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Flush
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.tables import Table
from tierloop.devices.waiting import DEADLINE_NS
from tierloop.runtime.archive_catalogue import LONGEST_NAME, Catalogue, Key
from tierloop.runtime.archive_geometry import COMMITS, Geometry, default_appends
from tierloop.runtime.archive_pages import BlockMap, Bytes, Stored, block_nbytes
from tierloop.runtime.archive_record import (
    LONGEST_KIND,
    MAGIC,
    Append,
    Commit,
    NoteKey,
    checksum,
    pack_appends,
    pack_table,
    place_of,
    stored_at,
    unpack_appends,
    unpack_table,
)
from tierloop.runtime.archive_twin import Twin
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape
from tierloop.runtime.loop import all_of

Int64 = NDArray[np.int64]


class Media(NamedTuple):
    """What must be read for some entries: whole media blocks, each once, ascending, neighbours joined.

    `offset` int64 (n,) says where each entry begins in the bytes of `spans` end to end. `useful` are the bytes of the
    entries, `media` those that are read for them.
    """

    region: Region
    spans: Spans
    offset: Int64
    useful: int
    media: int


class Archive:
    """A request's entries on a persistent memory: a segment for each layer and head.

    Takes all its space at once: for `most_entries` entries of each layer and head, appended to at most `appends` times,
    and for `notes_nbytes` of all notes together. Raises TierTooSmall, and ConfigurationError (no persistent memory;
    somebody works with an archive of that name; the memory begins with something else).
    """

    def __init__(
        self,
        engine: Engine,
        memory: str,
        request_name: str,
        fingerprint: str,
        entries: EntryShape,
        most_entries: int,
        notes_nbytes: int,
        appends: int | None = None,
    ) -> None:
        key = _key(request_name, fingerprint)
        info = engine.platform.memory_owner(memory).info.memory(memory)
        assert info is not None
        if not info.persistent:
            raise ConfigurationError(f"{memory} is no persistent memory: an archive cannot lie there")
        geometry = Geometry(
            entries,
            most_entries,
            notes_nbytes,
            default_appends(most_entries) if appends is None else appends,
            info.alignment,
        )
        catalogue = Catalogue.of(engine, memory)
        catalogue.open(key)
        try:
            region = catalogue.alloc(geometry.nbytes, f"{most_entries:,} entries of {request_name}")
        except TierTooSmall:
            catalogue.leave(key)
            raise
        self._build(engine, catalogue, key, region, geometry)

    def _build(self, engine: Engine, catalogue: Catalogue, key: Key, region: Region, geometry: Geometry) -> None:
        self.memory = region.memory
        self.region = region
        self.geometry = geometry
        self.tokens: tuple[int, ...] = ()
        """Tokens of the request as of the last commit."""
        self.length = 0
        """Rows of each layer as of the last commit."""
        self._engine = engine
        self._catalogue = catalogue
        self._key = key
        self._twin = Twin(engine, region, geometry.block, geometry.grid, MAGIC)
        self._blocks = BlockMap(region, COMMITS, geometry.blocks, geometry.block)
        layers, heads = geometry.layers, geometry.heads
        units = geometry.segment_nbytes // geometry.granule
        self._place = np.zeros(
            (layers, heads, geometry.most_entries), dtype=np.int32 if units < (1 << 31) - 1 else np.int64
        )
        """Where each entry begins in its segment, in granules, plus one; 0 where it is not there."""
        self._used = np.zeros(layers, dtype=np.int64)
        """Bytes of each segment of a layer that are taken."""
        self._count = np.zeros(layers, dtype=np.int64)
        self._segment = geometry.data_offset + geometry.segment_nbytes * np.arange(
            layers * heads, dtype=np.int64
        ).reshape(layers, heads)
        self._whole: dict[int, Media] = {}
        self._notes: dict[NoteKey, Stored] = {}
        self._orders: list[Stored] = []
        self._tokens = Stored(0, 0, np.empty(0, dtype=np.int64))
        self._table = self._tokens
        self._fresh: list[Append] = []
        """Appends since the last commit."""
        self._open: list[Completion] = []
        """What was submitted since the last commit."""
        self._stale: list[Int64] = []
        """Blocks that the next commit frees."""
        self._blank = np.empty(0, dtype=np.uint8)
        self._committing = False
        self._closed = False

    # -- entries --------------------------------------------------------------------------------------------------

    def count(self, layer: int) -> int:
        """Entries that each segment of a layer holds."""
        return int(self._count[layer])

    def stride(self, n: int) -> int:
        """Bytes of n entries, rounded up to the medium's grid."""
        grid = self.geometry.grid
        return -(-n * self.geometry.entries.nbytes // grid) * grid

    def put(self, layer: int, order: Int64, data: NDArray[np.uint8] | None) -> list[Completion]:
        """Lay entries down from the host: `order` (heads, n) are their numbers as they are to lie.

        `data` (heads, n, bytes of an entry) must stay unchanged until the commands have ended; None in phantom runs.
        Raises ValueError for what is no entry, is there already or comes twice, TierTooSmall where a segment is full.
        """
        n = self._checked_order(layer, order)
        nbytes, stride = self.geometry.entries.nbytes, self.stride(n)
        shape = (self.geometry.heads, n, nbytes)
        if data is None:
            if not self._engine.phantom:
                raise ValueError("entries without bytes can be put in phantom runs only")
        elif data.shape != shape or data.dtype != np.uint8:
            raise ValueError(f"bytes of entries are uint8 {shape}, got {data.dtype} {data.shape}")
        if n == 0:
            return []
        append, target = self._lay(layer, order, n)
        if data is None or self._engine.phantom:
            buffer = self._room(target.spans.nbytes)
        else:
            flat = np.ascontiguousarray(data).reshape(len(data), -1)
            for head, rows in enumerate(flat):
                append.checksums[head] = checksum(rows)
            if stride == flat.shape[1]:
                buffer = flat.reshape(-1)
            else:
                padded = np.zeros((len(data), stride), dtype=np.uint8)
                padded[:, : flat.shape[1]] = flat
                buffer = padded.reshape(-1)
        try:
            written = self._engine.write(target, buffer)
        except DeviceError:
            self._undo(append, target)
            raise
        self._open.append(written)
        return [written]

    def take(self, layer: int, order: Int64, source: Segment, after: Sequence[Completion] = ()) -> Completion:
        """`put` from a segment that holds each head's n entries end to end, each head padded to `stride(n)` bytes.

        The segment must stay unchanged until the completion has ended.
        """
        n = self._checked_order(layer, order)
        if n == 0:
            raise ValueError("no entries to take")
        stride = self.stride(n)
        nbytes = self.geometry.heads * stride
        if source.spans.nbytes != nbytes:
            raise ValueError(
                f"{n} entries of {self.geometry.heads} heads take {nbytes} bytes, the segment has {source.spans.nbytes}"
            )
        append, target = self._lay(layer, order, n)
        buffer = self._room(nbytes) if self._engine.phantom else np.empty(nbytes, dtype=np.uint8)
        try:
            seen = self._engine.read(source, buffer, after)
            self._open.append(seen)
            done = self._engine.copy(source, target, [seen])
        except DeviceError:
            self._undo(append, target)
            raise
        if not self._engine.phantom:
            rows = buffer.reshape(-1, stride)[:, : n * self.geometry.entries.nbytes]
            seen.on_done(partial(_sum, append, rows))
        self._open.append(done)
        return done

    def media(self, layer: int, heads: Int64, entries: Int64) -> Media:
        """What must be read for entries `entries[i]` of heads `heads[i]` of a layer. Raises ValueError."""
        geometry = self.geometry
        self._checked_layer(layer)
        if len(heads) != len(entries):
            raise ValueError(f"{len(heads)} heads for {len(entries)} entries")
        if not len(heads):
            return Media(self.region, Spans(np.empty((0, 2), dtype=np.int64)), np.empty(0, dtype=np.int64), 0, 0)
        try:
            place = self._place[layer, heads, entries]
        except IndexError as error:
            raise ValueError(
                f"heads are 0 to {geometry.heads - 1}, entries 0 to {geometry.most_entries - 1}: {error}"
            ) from error
        if not place.all() or heads.min() < 0 or entries.min() < 0:
            at = int(np.argmax((place == 0) | (heads < 0) | (entries < 0)))
            raise ValueError(f"entry {entries[at]} of layer {layer}, head {heads[at]} is not in the archive")
        grid, nbytes = geometry.grid, geometry.entries.nbytes
        start = place.astype(np.int64)
        start -= 1
        start *= geometry.granule
        start += self._segment[layer, heads]
        order = np.argsort(start)
        first = start[order]
        last = first + (nbytes - 1)
        first //= grid
        last //= grid
        begins = np.empty(len(first), dtype=bool)
        begins[0] = True
        np.greater(first[1:], last[:-1] + 1, out=begins[1:])
        runs = np.flatnonzero(begins)
        pairs = np.empty((len(runs), 2), dtype=np.int64)
        pairs[:, 0] = first[runs]
        pairs[:-1, 1] = last[runs[1:] - 1]
        pairs[-1, 1] = last[-1]
        pairs[:, 1] += 1 - pairs[:, 0]
        pairs *= grid
        before = np.cumsum(pairs[:, 1])
        total = int(before[-1])
        before -= pairs[:, 1]
        before -= pairs[:, 0]
        offset = np.empty_like(start)
        offset[order] = before[np.cumsum(begins) - 1]
        offset += start
        return Media(self.region, Spans(pairs), offset, len(start) * nbytes, total)

    def segment_of(self, layer: int) -> Media:
        """Everything of a layer, sequentially; `offset` goes by head, then by entry."""
        self._checked_layer(layer)
        if layer not in self._whole:
            self._whole[layer] = self.media(layer, *np.nonzero(self._place[layer]))
        return self._whole[layer]

    # -- notes ----------------------------------------------------------------------------------------------------

    def note(self, kind: str, layer: int, data: NDArray[np.uint8]) -> Completion:
        """Write other state, which replaces the note of that kind and layer with the next commit.

        `data` is C-contiguous uint8 (n,); its values mean nothing in phantom runs. Raises ValueError, TierTooSmall.
        """
        self._checked_layer(layer)
        if not 0 < len(kind) <= LONGEST_KIND:
            raise ValueError(f"the kind of a note has 1 to {LONGEST_KIND} characters, not {len(kind)}")
        if data.dtype != np.uint8 or data.ndim != 1 or not len(data):
            raise ValueError(f"a note is uint8 (n,), n at least 1, got {data.dtype} {data.shape}")
        stored, written = self._store(data)
        older = self._notes.get((kind, layer))
        if older is not None:
            self._stale.append(older.blocks)
        self._notes[kind, layer] = stored
        self._open.append(written)
        return written

    def kinds(self, layer: int) -> list[str]:
        """Kinds of notes that a layer has."""
        return [kind for kind, of in self._notes if of == layer]

    async def read_note(self, kind: str, layer: int) -> Bytes:
        """The bytes of a note, uint8 (n,). Raises ConfigurationError if there is none or it is damaged."""
        stored = self._notes.get((kind, layer))
        if stored is None:
            raise ConfigurationError(f"{self._what}: layer {layer} has no note {kind!r}")
        return await self._load(stored, f"note {kind!r} of layer {layer}")

    # -- commits --------------------------------------------------------------------------------------------------

    async def commit(self, tokens: Sequence[int], length: int) -> None:
        """Make everything so far durable and visible, with the request's tokens and the rows of each layer.

        Raises ValueError, TierTooSmall, and what a write has failed with.
        """
        numbers = np.array(tokens, dtype=np.int64).reshape(-1)
        if not 0 <= length <= len(numbers) <= self.geometry.most_tokens or (len(numbers) and numbers.min() < 0):
            raise ValueError(
                f"{length} rows of {len(numbers)} tokens: a commit holds 0 to {self.geometry.most_tokens} tokens, none "
                "of them negative, and no more rows than tokens"
            )
        assert not self._committing, "one commit at a time"
        assert not self._closed, "the archive is closed"
        self._committing = True
        fresh, stale, notes, opened = self._fresh, self._stale, dict(self._notes), len(self._open)
        self._fresh, self._stale = [], []
        made: list[Int64] = []
        try:
            await all_of(self._open[:opened])
            orders = list(self._orders)
            if fresh:
                orders.append(await self._settled(pack_appends(fresh), made))
            spoken = await self._settled(numbers.view(np.uint8), made)
            table = pack_table(Commit(*self._key, self.geometry, length, spoken, tuple(orders), notes))
            where = await self._settled(table, made)
            await self._engine.port("flush", self.memory).submit(Flush(self.region.all()))
            change = self._twin.write({"table": place_of(where)})
            await change.counts
            await change.done
            if self._catalogue.region(self._key) is not self.region:
                await self._catalogue.add(self._key, self.region)
        except BaseException:
            self._fresh = fresh + self._fresh
            self._stale += [*stale, *made]
            raise
        finally:
            self._committing = False
        del self._open[:opened]
        for blocks in (*stale, self._tokens.blocks, self._table.blocks):
            self._blocks.give(blocks)
        self._orders, self._tokens, self._table = orders, spoken, where
        self.tokens, self.length = tuple(numbers.tolist()), length

    def close(self, keep: bool) -> None:
        """Finish with the archive: what was committed stays if `keep`, everything else is given back.

        Waits for what was submitted and not committed.
        """
        if self._closed:
            return
        self._closed = True
        clock = self._engine.platform.clock
        clock.run_until(lambda: all(c.done for c in self._open), clock.now() + DEADLINE_NS)
        listed = self._catalogue.region(self._key) is self.region
        if not listed:
            self._catalogue.give(self.region)
        elif not keep:
            self._catalogue.remove_now(self._key)
        self._catalogue.leave(self._key)

    # -- after a restart ------------------------------------------------------------------------------------------

    @classmethod
    async def adopt(
        cls, engine: Engine, memory: str, request_name: str, fingerprint: str, verify: bool = True
    ) -> Archive:
        """The archive that was committed under that name, as of its last commit.

        With `verify` every entry and note is read and compared with its checksum. Raises ConfigurationError for what is
        not there, damaged, of another model, or in somebody's hands.
        """
        key = _key(request_name, fingerprint)
        if engine.phantom:
            raise ConfigurationError(f"{memory}: a phantom run keeps no bytes, so there is nothing to adopt")
        catalogue = Catalogue.of(engine, memory)
        region = catalogue.region(key)
        if region is None:
            others = [print_ for name, print_ in catalogue.listed if name == request_name]
            why = f"it is of {others[0]!r}, not of {fingerprint!r}" if others else "there is none of that name"
            raise ConfigurationError(f"{memory}: archive {request_name!r} cannot be adopted: {why}")
        catalogue.open(key)
        try:
            archive, appends = await cls.read(engine, catalogue, key, region)
            archive._belongs(engine)
            if verify:
                await archive.verify(appends)
        except BaseException:
            catalogue.leave(key)
            raise
        return archive

    @classmethod
    async def read(cls, engine: Engine, catalogue: Catalogue, key: Key, region: Region) -> tuple[Archive, list[Append]]:
        """An archive of a listed region with the appends that it holds. Raises ConfigurationError (damaged)."""
        what = f"{region.memory}: archive {key[0]!r}"
        info = engine.platform.memory_owner(region.memory).info.memory(region.memory)
        assert info is not None
        block = block_nbytes(info.alignment)
        twin = Twin(engine, region, block, info.alignment, MAGIC)
        if region.nbytes < twin.nbytes:
            raise ConfigurationError(f"{what} is damaged: a region of {region.nbytes} bytes is none")
        raw = np.zeros(twin.nbytes, dtype=np.uint8)
        await engine.read(region.at(0, twin.nbytes), raw)
        content = twin.read(raw)
        if content is None:
            raise ConfigurationError(f"{what} is damaged: there is no commit that is whole")
        table = Table(content if isinstance(content, dict) else {}, what)
        where = stored_at(table.get("table"), block, region.nbytes // block, table, "table")
        blocks = BlockMap(region, COMMITS, region.nbytes // block, block)
        commit = unpack_table(await load(engine, blocks, where, f"{what}: its table"), what, region.nbytes)
        if (commit.name, commit.fingerprint) != key or commit.geometry.grid != info.alignment:
            raise ConfigurationError(f"{what} is damaged: what lies there is {commit.name!r} of {commit.fingerprint!r}")
        archive = cls.__new__(cls)
        archive._build(engine, catalogue, key, region, commit.geometry)
        archive._twin = twin
        return archive, await archive._restore(commit, where)

    async def _restore(self, commit: Commit, table: Stored) -> list[Append]:
        """Take over what a commit says; returns its appends."""
        for stored in (table, commit.tokens, *commit.orders, *commit.notes.values()):
            if not self._blocks.claim(stored.blocks):
                raise ConfigurationError(f"{self._what} is damaged: two of its parts lie in one place")
        if commit.tokens.nbytes % 8:
            raise ConfigurationError(f"{self._what} is damaged: its tokens are {commit.tokens.nbytes} bytes")
        tokens = (await self._load(commit.tokens, "its tokens")).view(np.int64)
        if len(tokens) < commit.length or (len(tokens) and tokens.min() < 0):
            raise ConfigurationError(f"{self._what} is damaged: {len(tokens)} tokens for {commit.length} rows")
        appends: list[Append] = []
        try:
            for stored in commit.orders:
                appends += unpack_appends(await self._load(stored, "its entries"), self.geometry)
            for append in appends:
                order = append.order.astype(np.int64)
                self._lay(append.layer, order, self._checked_order(append.layer, order))
        except (ValueError, TierTooSmall) as error:
            if isinstance(error, ConfigurationError) and not isinstance(error, TierTooSmall):
                raise
            raise ConfigurationError(f"{self._what} is damaged: {error}") from error
        self._fresh.clear()
        self._orders, self._notes = list(commit.orders), dict(commit.notes)
        self._tokens, self._table = commit.tokens, table
        self.tokens, self.length = tuple(tokens.tolist()), commit.length
        return appends

    async def verify(self, appends: Sequence[Append]) -> None:
        """Read all entries and notes and compare them with their checksums. Raises ConfigurationError."""
        nbytes = self.geometry.entries.nbytes
        for kind, layer in self._notes:
            await self.read_note(kind, layer)
        for layer in range(self.geometry.layers):
            used, mine = int(self._used[layer]), [a for a in appends if a.layer == layer]
            for head in range(self.geometry.heads if used else 0):
                raw = np.zeros(used, dtype=np.uint8)
                await self._engine.read(self.region.at(int(self._segment[layer, head]), used), raw)
                at = 0
                for append in mine:
                    n = append.order.shape[1]
                    if checksum(raw[at : at + n * nbytes]) != append.checksums[head]:
                        raise ConfigurationError(f"{self._what} is damaged: entries of layer {layer}, head {head}")
                    at += self.stride(n)

    def _belongs(self, engine: Engine) -> None:
        """Raises ConfigurationError if the entries are not of the engine's model."""
        mine, given = self.geometry.entries.shape, engine.shape
        for name in ("num_layers", "num_kv_heads", "head_dim", "head_dim_v", "dtype"):
            if getattr(mine, name) != getattr(given, name):
                raise ConfigurationError(
                    f"{self._what} is of another model: {name} is {getattr(mine, name)}, not {getattr(given, name)}"
                )
        self.geometry = replace(self.geometry, entries=EntryShape(given, self.geometry.entries.tokens))

    # -- parts ----------------------------------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        return f"{self.memory}: archive {self._key[0]!r}"

    def _checked_layer(self, layer: int) -> None:
        if not 0 <= layer < self.geometry.layers:
            raise ValueError(f"layer {layer} of {self.geometry.layers}")

    def _checked_order(self, layer: int, order: Int64) -> int:
        """Entries per head. Raises ValueError for what is no order of entries."""
        self._checked_layer(layer)
        heads, most = self.geometry.heads, self.geometry.most_entries
        if order.ndim != 2 or order.shape[0] != heads or order.dtype.kind not in "iu":
            raise ValueError(f"an order is int64 ({heads}, n), got {order.dtype} {order.shape}")
        if order.size and not 0 <= int(order.min()) <= int(order.max()) < most:
            raise ValueError(f"entries are 0 to {most - 1}, got {order.min()} to {order.max()}")
        return int(order.shape[1])

    def _lay(self, layer: int, order: Int64, n: int) -> tuple[Append, Segment]:
        """Give entries their places at the ends of a layer's segments."""
        geometry, used, stride = self.geometry, int(self._used[layer]), self.stride(n)
        if used + stride > geometry.segment_nbytes:
            raise TierTooSmall(
                f"{self._what} is full: {n} entries take {stride:,} bytes of each segment, "
                f"{geometry.segment_nbytes - used:,} of {geometry.segment_nbytes:,} are left"
            )
        rows, head = self._place[layer], np.arange(geometry.heads)[:, None]
        there = rows[head, order] != 0
        if there.any():
            raise ValueError(f"entry {order[there][0]} of layer {layer} is in the archive already")
        step = geometry.entries.nbytes // geometry.granule
        places = (used // geometry.granule + 1 + step * np.arange(n, dtype=np.int64)).astype(rows.dtype)
        rows[head, order] = places
        twice = rows[head, order] != places
        if twice.any():
            rows[head, order] = 0
            raise ValueError(f"entry {order[twice][0]} of layer {layer} comes twice")
        append = Append(layer, order.astype(np.int32), np.zeros(geometry.heads, dtype=np.uint32))
        self._used[layer] += stride
        self._count[layer] += n
        self._whole.pop(layer, None)
        self._fresh.append(append)
        return append, Segment(self.region, Spans.equal(self._segment[layer] + used, stride))

    def _undo(self, append: Append, target: Segment) -> None:
        """Take back what `_lay` did last, because nothing was submitted for it."""
        assert self._fresh.pop() is append
        layer, order = append.layer, append.order
        self._place[layer][np.arange(len(order))[:, None], order] = 0
        self._used[layer] -= target.spans.nbytes // len(order)
        self._count[layer] -= order.shape[1]

    def _room(self, nbytes: int) -> Bytes:
        """Bytes that mean nothing, for phantom runs; never touched."""
        if len(self._blank) < nbytes:
            self._blank = np.empty(nbytes, dtype=np.uint8)
        return self._blank[:nbytes]

    def _store(self, data: Bytes) -> tuple[Stored, Completion]:
        """Bytes → free blocks."""
        stored = Stored(len(data), 0 if self._engine.phantom else checksum(data), self._blocks.take(len(data)))
        padded = np.zeros(len(stored.blocks) * self._blocks.nbytes, dtype=np.uint8)
        padded[: len(data)] = data
        try:
            return stored, self._engine.write(self._blocks.segment(stored.blocks), padded)
        except DeviceError:
            self._blocks.give(stored.blocks)
            raise

    async def _settled(self, data: Bytes, made: list[Int64]) -> Stored:
        """Bytes → free blocks, which are added to `made`."""
        if not len(data):
            return Stored(0, 0, np.empty(0, dtype=np.int64))
        stored, written = self._store(data)
        made.append(stored.blocks)
        await written
        return stored

    async def _load(self, stored: Stored, what: str) -> Bytes:
        return await load(self._engine, self._blocks, stored, f"{self._what}: {what}")


async def load(engine: Engine, blocks: BlockMap, stored: Stored, what: str) -> Bytes:
    """The bytes that were stored, uint8 (n,). Raises ConfigurationError naming `what` if they are others."""
    raw = np.zeros(len(stored.blocks) * blocks.nbytes, dtype=np.uint8)
    if len(raw):
        await engine.read(blocks.segment(stored.blocks), raw)
    if not engine.phantom and checksum(raw[: stored.nbytes]) != stored.checksum:
        raise ConfigurationError(f"{what} is damaged: its checksum is another")
    return raw[: stored.nbytes]


def _sum(append: Append, rows: Bytes, seen: Completion) -> None:
    """Note the checksums of entries (heads, bytes) that have been read on their way."""
    if seen.error is None:
        for head, each in enumerate(rows):
            append.checksums[head] = checksum(each)


def _key(name: str, fingerprint: str) -> Key:
    for what, text in (("name", name), ("fingerprint", fingerprint)):
        if not 0 < len(text) <= LONGEST_NAME:
            raise ValueError(f"the {what} of an archive has 1 to {LONGEST_NAME} characters, not {len(text)}")
    return name, fingerprint
