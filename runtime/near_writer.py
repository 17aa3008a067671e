"""Clustering a piece of a request's keys where the modules run, and writing its rows to near memories.

For each layer: `cluster`, labels to the host, the centroids into their store, rows gathered in the order of their
clusters, copies to the devices that have them. Two layers are under way at a time, whoever they are of; who comes later
waits for a place. Everything is ordered by completions, beside the steps that are decoded meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
from tierloop.devices.kernels.contract import CODE_RANGE, Append, Cluster, DType, Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, K, V
from tierloop.runtime.clusters import keys_of, label_by_head
from tierloop.runtime.decisions import Grouping
from tierloop.runtime.engine import Engine
from tierloop.runtime.loop import Alarm
from tierloop.runtime.near_request import NearRequest, Piece

Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]
PLACES = 2
"""Layers that are written at a time: one is clustered while the rows of another are copied."""


def centroid_dtype(dtype: DType) -> DType:
    """The type that centroids of such keys are kept in."""
    return "float16" if dtype in CODE_RANGE else dtype


@dataclass
class _Place:
    """Working space for one layer of a piece: labels, centroids in float32, gathered rows."""

    labels: Region
    centroids: Region
    rows: Region
    raw: Region | None = None
    """Rows that came from the host, as they came."""


@dataclass(frozen=True, eq=False)
class _Source:
    """Where a layer's rows of a piece lie, K and V: offsets int64 (heads · rows,), head by head; the keys as runs."""

    regions: tuple[Region, Region]
    offsets: tuple[Int64, Int64]
    runs: Int64
    keys: Operand


@dataclass
class NearWriter:
    """Writes pieces; `most_rows` is the longest, `iterations` those of k-means."""

    engine: Engine
    most_rows: int
    cluster_tokens: int
    iterations: int
    written: Alarm = field(default_factory=Alarm)
    """Rung whenever a layer of a piece is over, and made anew."""
    _free: list[_Place] | None = None
    _queue: deque[Alarm] = field(default_factory=deque)

    def start(self, near: NearRequest, low: int, high: int) -> Piece:
        """A piece of which nothing is written yet; `begin` has its layers written."""
        piece = Piece(low, high, max(1, (high - low) // self.cluster_tokens))
        piece.waiting = list(range(self.engine.shape.num_layers))
        near.under_way.append(piece)
        near.started = high
        return piece

    def begin(self, near: NearRequest, table: BlockTable, piece: Piece, num_layers: int) -> None:
        """Let so many more layers of a piece be written, beside what else goes on."""
        for layer in piece.waiting[:num_layers]:
            piece.tasks.append(self.engine.loop.spawn(self._write(near, table, piece, layer)))
        del piece.waiting[:num_layers]

    async def write_rows(self, near: NearRequest, piece: Piece, layer: int, keys: Bytes, values: Bytes) -> None:
        """Write a layer of a piece from the host: uint8 (heads, rows, bytes of a row) each. Raises a DeviceError."""
        engine, shape = self.engine, self.engine.shape
        place = await self._take()
        try:
            if place.raw is None:
                place.raw = engine.scratch(engine.dense.memory, place.rows.nbytes)
            rows = keys.shape[1]
            start = keys.size
            arrived = [
                engine.write(place.raw.at(0, keys.size), np.ascontiguousarray(keys).reshape(-1)),
                engine.write(place.raw.at(start, values.size), np.ascontiguousarray(values).reshape(-1)),
            ]
            held = np.arange(shape.num_kv_heads * rows, dtype=np.int64)
            offsets = held * shape.row_nbytes(K), start + held * shape.row_nbytes(V)
            runs = np.array([(0, h, piece.low) for h in range(shape.num_kv_heads)], dtype=np.int64)
            by_head = Segment(place.raw, Spans.equal(offsets[K][::rows], rows * shape.row_nbytes(K)))
            source = _Source((place.raw, place.raw), offsets, runs, (by_head,))
            await self._carry_out(near, piece, layer, place, source, arrived)
        finally:
            self._give(place)

    async def _write(self, near: NearRequest, table: BlockTable, piece: Piece, layer: int) -> None:
        place = await self._take()
        try:
            if not near.closing and near.error is None:
                source = self._in_blocks(table, piece, layer)
                await self._carry_out(near, piece, layer, place, source, [])
        except DeviceError as error:
            near.error = near.error or error
        finally:
            self._give(place)
            bell, self.written = self.written, Alarm()
            bell.ring()

    def _in_blocks(self, table: BlockTable, piece: Piece, layer: int) -> _Source:
        """The rows of a piece in the request's blocks."""
        shape = self.engine.shape
        runs, keys, copies, scratch = keys_of(self.engine, table, layer, piece.low, piece.high, [])
        assert len(copies) + len(scratch) == 0, "rows that are clustered lie where the modules run"
        positions = np.tile(np.arange(piece.low, piece.high, dtype=np.int64), shape.num_kv_heads)
        heads = np.repeat(np.arange(shape.num_kv_heads, dtype=np.int64), piece.high - piece.low)
        held = table.places(layer, heads, positions // shape.block_tokens)
        pools = [np.unique(held.pools[side]).tolist() for side in (K, V)]
        assert pools[K] == pools[V], "they have one pool"
        region = table.pools[pools[K][0]].region
        within = positions % shape.block_tokens
        offsets = [held.offsets[side] + within * shape.row_nbytes(side) for side in (K, V)]
        return _Source((region, region), (offsets[K], offsets[V]), runs, keys)

    async def _carry_out(
        self,
        near: NearRequest,
        piece: Piece,
        layer: int,
        place: _Place,
        source: _Source,
        after: list[Completion],
    ) -> None:
        engine, shape = self.engine, self.engine.shape
        rows, heads, count = piece.high - piece.low, shape.num_kv_heads, piece.clusters
        labels = place.labels.at(0, 8 * heads * rows)
        known = near.centroids.known(layer) + sum(p.clusters for p in near.under_way[: near.under_way.index(piece)])
        fresh = place.centroids.at(0, heads * count * shape.head_dim * 4)
        store = near.centroids.segment(layer, known, count)
        args = Cluster(shape.dtype, 1, heads, shape.head_dim, source.runs, rows, self.cluster_tokens, self.iterations)
        into = store if near.centroids.dtype == "float32" else fresh
        kept = done = engine.launch(engine.dense, args, (source.keys,), ((into,), (labels,)), after)
        if into is fresh:
            dtype = near.centroids.dtype
            kept = engine.launch(engine.dense, Append(dtype), ((fresh,),), ((store,),), [done])
        done = label_by_head(engine, labels, heads, count, done)
        grouping = Grouping(f"clusters {near.name}", layer, near.name, piece.high, heads, rows, count)
        found = await engine.group(labels, grouping, [done])
        begun = [kept]
        error: DeviceError | None = None
        try:
            self._scatter(near, piece, layer, found, place.rows, source, after, begun)
        except DeviceError as refused:
            error = refused
        for completion in begun:  # all of them: whoever hears of the error gives back what they read and write
            try:
                await completion
            except DeviceError as failure:
                error = error or failure
        if error is not None:
            raise error
        piece.labels[layer] = found

    def _scatter(
        self,
        near: NearRequest,
        piece: Piece,
        layer: int,
        labels: Int64,
        space: Region,
        source: _Source,
        after: list[Completion],
        begun: list[Completion],
    ) -> None:
        """Gather a layer's rows of a piece in the order of their clusters, and copy them to who has them.

        What is submitted joins `begun`.
        """
        engine, shape = self.engine, self.engine.shape
        rows, heads = piece.high - piece.low, shape.num_kv_heads
        order = (_orders(labels) + np.arange(heads, dtype=np.int64)[:, None] * rows).reshape(-1)
        sources = tuple(
            Segment(source.regions[side], Spans.equal(source.offsets[side][order], shape.row_nbytes(side)))
            for side in (K, V)
        )
        sizes = [rows * shape.row_nbytes(side) for side in (K, V)]
        gathered = space.at(0, heads * sum(sizes))
        done = engine.launch(engine.dense, Gather(), (sources,), ((gathered,),), after)
        begun.append(done)
        for share in near.rows.shares:
            targets = [near.rows.stretch(share, layer, side, piece.low, piece.high) for side in (K, V)]
            spans, joined = [], []
            for side, target in zip((K, V), targets, strict=True):
                if target is not None:
                    starts = side * heads * sizes[K] + share.share.heads * sizes[side]
                    spans.append(np.stack((starts, np.full_like(starts, sizes[side])), axis=1))
                    joined.append(target.spans.array)
            if joined:
                there = Segment(share.region, Spans(np.concatenate(joined)))
                begun.append(engine.copy(Segment(space, Spans(np.concatenate(spans))), there, [done]))

    async def _take(self) -> _Place:
        if self._free is None:
            self._free = [self._make() for _ in range(PLACES)]
        while not self._free:
            turn = Alarm()
            self._queue.append(turn)
            await turn
        return self._free.pop()

    def _give(self, place: _Place) -> None:
        assert self._free is not None, "it was taken"
        self._free.append(place)
        if self._queue:
            self._queue.popleft().ring()

    def _make(self) -> _Place:
        shape, memory = self.engine.shape, self.engine.dense.memory
        heads, clusters = shape.num_kv_heads, max(1, self.most_rows // self.cluster_tokens)
        return _Place(
            self.engine.scratch(memory, 8 * heads * self.most_rows),
            self.engine.scratch(memory, 4 * heads * clusters * shape.head_dim),
            self.engine.scratch(memory, heads * self.most_rows * (shape.row_nbytes(K) + shape.row_nbytes(V))),
        )


def _orders(labels: Int64) -> Int64:
    """Rows of each head in the order of their clusters, ascending within one: int64 (heads, rows)."""
    if labels.strides[0] == 0:  # all heads alike, as in phantom runs
        return np.broadcast_to(np.argsort(labels[0], kind="stable"), labels.shape)
    return np.argsort(labels, axis=1, kind="stable")
