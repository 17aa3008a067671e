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

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Flush
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.waiting import DEADLINE_NS
from tierloop.runtime.archive_catalogue import LONGEST_NAME, Catalogue, Key
from tierloop.runtime.archive_geometry import Geometry, default_appends
from tierloop.runtime.archive_layout import Layout, Media
from tierloop.runtime.archive_notes import NOTHING, Notebook
from tierloop.runtime.archive_pages import Bytes, Stored
from tierloop.runtime.archive_reading import read_commit, verify_entries
from tierloop.runtime.archive_record import (
    MAGIC,
    Append,
    Commit,
    checksum,
    pack_appends,
    pack_table,
    place_of,
    unpack_appends,
)
from tierloop.runtime.archive_twin import Twin, settle
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape

Int64 = NDArray[np.int64]


class Archive:
    """A request's entries on a persistent memory: a segment for each layer and head.

    Takes all its space at once: for `most_entries` entries of each layer and head, appended to at most `appends` times,
    and for `notes_nbytes` of all notes together. Raises TierTooSmall, and ConfigurationError (no persistent memory;
    somebody works with an archive of that name; the memory begins with something else).
    """

    tokens: tuple[int, ...]
    """Tokens of the request as of the last commit."""
    length: int
    """Rows of each layer as of the last commit."""

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
        many = default_appends(most_entries) if appends is None else appends
        geometry = Geometry(entries, most_entries, notes_nbytes, many, info.alignment)
        catalogue = Catalogue.of(engine, memory)
        catalogue.open(key)
        try:
            region = catalogue.alloc(geometry.nbytes, f"{most_entries:,} entries of {request_name}")
        except BaseException:
            catalogue.leave(key)
            raise
        self._build(engine, catalogue, key, region, geometry)

    def _build(self, engine: Engine, catalogue: Catalogue, key: Key, region: Region, geometry: Geometry) -> None:
        self.memory = region.memory
        self.region = region
        self.geometry = geometry
        self.tokens, self.length = (), 0
        self._engine = engine
        self._catalogue = catalogue
        self._key = key
        self._what = f"{region.memory}: archive {key[0]!r}"
        self._twin = Twin(engine, region, geometry.block, geometry.grid, MAGIC)
        self._notes = Notebook(engine, region, geometry.blocks, geometry.block, self._what)
        self._layout = Layout(region, geometry, self._what)
        self._orders: tuple[Stored, ...] = ()
        self._tokens = self._table = NOTHING
        self._fresh: list[Append] = []
        """Appends since the last commit."""
        self._open: list[Completion] = []
        """What was submitted since the last commit."""
        self._blank = np.empty(0, dtype=np.uint8)
        self._committing = self._closed = False

    # -- entries --------------------------------------------------------------------------------------------------

    def count(self, layer: int) -> int:
        """Entries that each segment of a layer holds."""
        return int(self._layout.count[layer])

    def stride(self, n: int) -> int:
        """Bytes of n entries, rounded up to the medium's grid."""
        return self._layout.stride(n)

    def put(self, layer: int, order: Int64, data: NDArray[np.uint8] | None) -> list[Completion]:
        """Lay entries down from the host: `order` (heads, n) are their numbers as they are to lie.

        `data` (heads, n, bytes of an entry) must stay unchanged until the commands have ended; None in phantom runs.
        Raises ValueError for what is no entry, is there already or comes twice, TierTooSmall where a segment is full.
        No entries take no command.
        """
        if data is None:
            if not self._engine.phantom:
                raise ValueError("entries without bytes can be put in phantom runs only")
        elif data.shape != (*order.shape, self.geometry.entries.nbytes) or data.dtype != np.uint8:
            raise ValueError(
                f"bytes of entries are uint8 {(*order.shape, self.geometry.entries.nbytes)}, "
                f"got {data.dtype} {data.shape}"
            )
        if order.ndim == 2 and not order.shape[1]:
            return []
        append, target = self._layout.lay(layer, order)
        if data is None or self._engine.phantom:
            buffer = self._room(target.spans.nbytes)
        else:
            rows = np.ascontiguousarray(data).reshape(len(data), -1)
            _sum(append, rows)
            if self.stride(order.shape[1]) != rows.shape[1]:
                padded = np.zeros((len(rows), self.stride(order.shape[1])), dtype=np.uint8)
                padded[:, : rows.shape[1]] = rows
                rows = padded
            buffer = rows.reshape(-1)
        try:
            written = self._engine.write(target, buffer)
        except Exception:
            self._layout.undo(append)
            raise
        self._open.append(written)
        self._fresh.append(append)
        self._engine.count_placed(self.memory, order.size)
        return [written]

    def take(self, layer: int, order: Int64, source: Segment, after: Sequence[Completion] = ()) -> Completion:
        """`put` from a segment that holds each head's n entries end to end, each head padded to `stride(n)` bytes.

        The segment must stay unchanged until the completion has ended.
        """
        append, target = self._layout.lay(layer, order)
        nbytes, stride = target.spans.nbytes, self.stride(order.shape[1])
        try:
            if source.spans.nbytes != nbytes:
                raise ValueError(
                    f"{order.shape[1]} entries of {order.shape[0]} heads take {nbytes} bytes, the segment has "
                    f"{source.spans.nbytes}"
                )
            buffer = self._room(nbytes) if self._engine.phantom else np.empty(nbytes, dtype=np.uint8)
            seen = self._engine.read(source, buffer, after)
            self._open.append(seen)
            done = self._engine.copy(source, target, [seen])
        except Exception:
            self._layout.undo(append)
            raise
        if not self._engine.phantom:
            rows = buffer.reshape(-1, stride)[:, : order.shape[1] * self.geometry.entries.nbytes]
            seen.on_done(partial(_summed, append, rows))
        self._open.append(done)
        self._fresh.append(append)
        self._engine.count_placed(self.memory, order.size)
        return done

    def media(self, layer: int, heads: Int64, entries: Int64) -> Media:
        """What must be read for entries `entries[i]` of heads `heads[i]` of a layer. Raises ValueError."""
        return self._layout.media(layer, heads, entries)

    def segment_of(self, layer: int) -> Media:
        """Everything of a layer, sequentially; `offset` goes by head, then by entry."""
        return self._layout.everything(layer)

    # -- notes ----------------------------------------------------------------------------------------------------

    def note(self, kind: str, layer: int, data: NDArray[np.uint8]) -> Completion:
        """Write other state, which replaces the note of that kind and layer with the next commit.

        `data` is uint8 (n,) and is copied; its values mean nothing in phantom runs. Raises ValueError, TierTooSmall.
        """
        self._layout.check_layer(layer)
        written = self._notes.write(kind, layer, data)
        self._open.append(written)
        return written

    def kinds(self, layer: int) -> list[str]:
        """Kinds of notes that a layer has."""
        return [kind for kind, of in self._notes.notes if of == layer]

    async def read_note(self, kind: str, layer: int) -> Bytes:
        """The bytes of a note, uint8 (n,). Raises ConfigurationError if there is none or it is damaged."""
        return await self._notes.read(kind, layer)

    # -- commits --------------------------------------------------------------------------------------------------

    async def commit(self, tokens: Sequence[int], length: int) -> None:
        """Make everything so far durable and visible, with the request's tokens and the rows of each layer.

        Raises ValueError, TierTooSmall, and what a write has failed with.
        """
        numbers = np.array(tokens, dtype=np.int64).reshape(-1)
        most = self.geometry.most_tokens
        if not 0 <= length <= len(numbers) <= most or (len(numbers) and numbers.min() < 0):
            raise ValueError(
                f"{length} rows of {len(numbers)} tokens: a commit has at most {most} tokens, none of them negative, "
                "and no more rows than tokens"
            )
        assert not self._committing, "one commit at a time"
        assert not self._closed, "the archive is closed"
        self._committing = True
        book, notes, opened = self._notes, dict(self._notes.notes), len(self._open)
        (fresh, self._fresh), (stale, book.stale) = (self._fresh, []), (book.stale, [])
        made: list[Int64] = []
        try:
            await settle(self._open[:opened])
            orders = self._orders
            if fresh:
                orders = (*orders, await book.settled(pack_appends(fresh), made))
            spoken = await book.settled(numbers, made)
            table = await book.settled(
                pack_table(Commit(*self._key, self.geometry, length, spoken, orders, notes)), made
            )
            flushed = self._engine.port("flush", self.memory).submit(Flush(self.region.all()))
            self._open.append(flushed)
            await flushed
            await settle(self._twin.write({"table": place_of(table)}).commands)
            if self._catalogue.region(self._key) is not self.region:
                await self._catalogue.add(self._key, self.region)
        except BaseException:
            self._fresh = fresh + self._fresh
            book.stale = [*stale, *made, *book.stale]
            raise
        finally:
            self._committing = False
        del self._open[:opened]
        book.give([*stale, self._tokens.blocks, self._table.blocks])
        self._orders, self._tokens, self._table = orders, spoken, table
        self.tokens, self.length = tuple(numbers.tolist()), length

    def close(self, keep: bool) -> None:
        """Finish with the archive: what was committed stays if `keep`, everything else is given back.

        Waits for what was submitted and not committed.
        """
        if self._closed:
            return
        self._closed = True
        clock, pending = self._engine.platform.clock, [*self._open, *self._notes.pending, *self._twin.pending]
        clock.run_until(lambda: all(command.done for command in pending), clock.now() + DEADLINE_NS)
        if self._catalogue.region(self._key) is not self.region:
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
            others = [given for name, given in catalogue.listed if name == request_name]
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
        """An archive of a listed region, and the appends that it holds. Raises ConfigurationError (damaged)."""
        twin, commit, table = await read_commit(engine, key, region)
        archive = cls.__new__(cls)
        archive._build(engine, catalogue, key, region, commit.geometry)
        archive._twin = twin
        return archive, await archive._restore(commit, table)

    async def _restore(self, commit: Commit, table: Stored) -> list[Append]:
        """Take over what a commit says; returns its appends."""
        book = self._notes
        book.claim((table, commit.tokens, *commit.orders, *commit.notes.values()))
        numbers = await book.load(commit.tokens, "the list of its tokens")
        tokens = numbers[: len(numbers) // 8 * 8].view(np.int64)
        if len(numbers) % 8 or len(tokens) < commit.length or (len(tokens) and tokens.min() < 0):
            raise ConfigurationError(f"{self._what} is damaged: {len(numbers)} bytes of tokens, {commit.length} rows")
        appends: list[Append] = []
        for stored in commit.orders:
            raw = await book.load(stored, "the list of its entries")
            try:
                appends += unpack_appends(raw, self.geometry)
            except ValueError as error:
                raise ConfigurationError(f"{self._what} is damaged: {error}") from error
        for append in appends:
            try:
                self._layout.lay(append.layer, append.order)
            except (ValueError, TierTooSmall) as error:
                raise ConfigurationError(f"{self._what} is damaged: {error}") from error
        self._orders, book.notes = commit.orders, dict(commit.notes)
        self._tokens, self._table = commit.tokens, table
        self.tokens, self.length = tuple(tokens.tolist()), commit.length
        return appends

    async def verify(self, appends: Sequence[Append]) -> None:
        """Read all entries and notes and compare them with their checksums. Raises ConfigurationError."""
        for kind, layer in self._notes.notes:
            await self.read_note(kind, layer)
        await verify_entries(self._engine, self._layout, appends, self._what)

    def _belongs(self, engine: Engine) -> None:
        """Raises ConfigurationError if the entries are not of the engine's model."""
        mine, given = self.geometry.entries.shape, engine.shape
        for name in ("num_layers", "num_kv_heads", "head_dim", "head_dim_v", "dtype"):
            if getattr(mine, name) != getattr(given, name):
                raise ConfigurationError(
                    f"{self._what} is of another model: {name} is {getattr(mine, name)}, not {getattr(given, name)}"
                )
        self.geometry = replace(self.geometry, entries=EntryShape(given, self.geometry.entries.tokens))

    def _room(self, nbytes: int) -> Bytes:
        """Bytes that mean nothing, for phantom runs; never touched."""
        if len(self._blank) < nbytes:
            self._blank = np.empty(nbytes, dtype=np.uint8)
        return self._blank[:nbytes]


def _sum(append: Append, rows: Bytes) -> None:
    """Note the checksums of entries (heads, bytes)."""
    for head, each in enumerate(rows):
        append.checksums[head] = checksum(each)


def _summed(append: Append, rows: Bytes, seen: Completion) -> None:
    if seen.error is None:
        _sum(append, rows)


def _key(name: str, fingerprint: str) -> Key:
    for what, text in (("name", name), ("fingerprint", fingerprint)):
        if not 0 < len(text) <= LONGEST_NAME:
            raise ValueError(f"the {what} of an archive has 1 to {LONGEST_NAME} characters, not {len(text)}")
    return name, fingerprint
