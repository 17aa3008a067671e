"""Clustering a piece of a request's keys where the modules run, and writing its rows to near memories.

For each layer: `cluster`, labels to the host, the centroids into their store, rows gathered in the order of their
clusters, copies to the devices that have them. Two layers are under way at a time, whoever they are of; who comes later
waits for a place. Everything is ordered by completions, beside the steps that are decoded meanwhile.
"""

from __future__ import annotations

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
from tierloop.runtime.loop import Alarm, Places
from tierloop.runtime.near_request import NearRequest, Piece
from tierloop.runtime.scratch import Scratch

Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]
PLACES = 2
"""Layers that are written at a time: one is clustered while the rows of another are copied."""


def centroid_dtype(dtype: DType) -> DType:
    """The type that centroids of such keys are kept in."""
    return "float16" if dtype in CODE_RANGE else dtype


@dataclass(frozen=True, eq=False)
class _Source:
    """Where a layer's rows of a piece lie, K and V: offsets int64 (heads · rows,), head by head; the keys as runs."""

    regions: tuple[Region, Region]
    offsets: tuple[Int64, Int64]
    runs: Int64
    keys: Operand


@dataclass
class NearWriter:
    """Writes pieces of clusters of about `cluster_tokens` rows; `iterations` are those of k-means."""

    engine: Engine
    cluster_tokens: int
    iterations: int
    written: Alarm = field(default_factory=Alarm)
    """Rung whenever a layer of a piece is over, and made anew."""
    _places: Places = field(default_factory=lambda: Places(PLACES))
    """The lowest is taken first, and only what is taken has working space."""
    _scratch: Scratch = field(init=False)

    def __post_init__(self) -> None:
        self._scratch = Scratch(self.engine)

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
        place = await self._places.take()
        try:
            rows, start = keys.shape[1], keys.size
            raw = self._space("rows from the host", place, start + values.size)
            arrived = [
                engine.write(raw.at(0, keys.size), np.ascontiguousarray(keys).reshape(-1)),
                engine.write(raw.at(start, values.size), np.ascontiguousarray(values).reshape(-1)),
            ]
            held = np.arange(shape.num_kv_heads * rows, dtype=np.int64)
            offsets = held * shape.row_nbytes(K), start + held * shape.row_nbytes(V)
            runs = np.array([(0, h, piece.low) for h in range(shape.num_kv_heads)], dtype=np.int64)
            by_head = Segment(raw, Spans.equal(offsets[K][::rows], rows * shape.row_nbytes(K)))
            source = _Source((raw, raw), offsets, runs, (by_head,))
            await self._carry_out(near, piece, layer, place, source, arrived)
        finally:
            self._places.give(place)

    async def _write(self, near: NearRequest, table: BlockTable, piece: Piece, layer: int) -> None:
        place = await self._places.take()
        try:
            if not near.closing and near.error is None:
                source = self._in_blocks(table, piece, layer)
                await self._carry_out(near, piece, layer, place, source, [])
        except DeviceError as error:
            near.error = near.error or error
        finally:
            self._places.give(place)
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
        place: int,
        source: _Source,
        after: list[Completion],
    ) -> None:
        engine, shape = self.engine, self.engine.shape
        rows, heads, count = piece.high - piece.low, shape.num_kv_heads, piece.clusters
        space = self._space("rows", place, heads * rows * (shape.row_nbytes(K) + shape.row_nbytes(V)))
        labels = self._space("labels", place, 8 * heads * rows).at(0, 8 * heads * rows)
        known = near.centroids.known(layer) + sum(p.clusters for p in near.under_way[: near.under_way.index(piece)])
        nbytes = heads * count * shape.head_dim * 4
        fresh = self._space("centroids", place, nbytes).at(0, nbytes)
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
            self._scatter(near, piece, layer, found, space, source, after, begun)
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

    def _space(self, use: str, place: int, nbytes: int) -> Region:
        """Working space of a place. Raises OutOfMemory."""
        return self._scratch.at(use, self.engine.dense.memory, place, nbytes).region


def _orders(labels: Int64) -> Int64:
    """Rows of each head in the order of their clusters, ascending within one: int64 (heads, rows)."""
    if labels.strides[0] == 0:  # all heads alike, as in phantom runs
        return np.broadcast_to(np.argsort(labels[0], kind="stable"), labels.shape)
    return np.argsort(labels, axis=1, kind="stable")
