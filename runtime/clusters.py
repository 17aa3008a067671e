"""Clusters of a request's keys: centroids on the device that runs the modules, and which rows belong to each.

RetroInfer's index, as NELSSA keeps it up: a layer's prompt keys are clustered once, by segments, when the prompt has
been stored; rows that came later are clustered on their own, `update_tokens` of them at a time, and join the index as
further clusters. What is clustered never changes. Only sealed rows are clustered: from `first` (the rows before that
are attention sinks) to the last block border that leaves `recent_tokens` rows behind it.

The keys are read where they lie if the dense device reaches that memory, and are copied to it otherwise, by block.

Which cluster a row belongs to is learnt through `Engine.group`, so runs without bytes have clusters as well.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, OutOfMemory
from tierloop.devices.kernels.contract import Cluster, Dense, num_clusters
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, K, TierTooSmall
from tierloop.runtime.decisions import Grouping
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Clustering:
    """How keys are clustered; RetroInfer's parameters. `first` is the first position that is."""

    first: int = 4
    recent_tokens: int = 64
    segment_tokens: int = 8192
    cluster_tokens: int = 16
    iterations: int = 10
    update_tokens: int = 1024


class Members:
    """The rows of each cluster of one layer and KV head.

    `positions` lists the rows, cluster after cluster; cluster i has `sizes`[i] of them, from `starts`[i] on.
    """

    def __init__(self) -> None:
        self.sizes, self.starts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.positions = np.empty(0, dtype=np.int64)
        self._smallest_first = np.empty(0, dtype=np.int64)

    def add(self, labels: Int64, first: int, count: int) -> None:
        """`count` further clusters of the rows from position `first` on, labels 0 … count - 1."""
        self.positions = np.concatenate((self.positions, np.argsort(labels, kind="stable") + first))
        self.sizes = np.concatenate((self.sizes, np.bincount(labels, minlength=count)))
        self.starts = np.cumsum(self.sizes) - self.sizes
        self._smallest_first = np.cumsum(np.sort(self.sizes))

    def surely(self, num_tokens: int) -> int:
        """How many clusters hold `num_tokens` rows whichever they are (all of them if there are not so many rows)."""
        if num_tokens <= 0:
            return 0
        return min(int(np.searchsorted(self._smallest_first, num_tokens)) + 1, len(self.sizes))

    def pick(self, order: Int64, num_tokens: int) -> Int64:
        """Positions, ascending, of the first clusters of `order` that together hold at least `num_tokens` rows."""
        if num_tokens <= 0:
            return np.empty(0, dtype=np.int64)
        taken = order[: int(np.searchsorted(np.cumsum(self.sizes[order]), num_tokens)) + 1]
        sizes = self.sizes[taken]
        places = np.arange(int(sizes.sum())) + np.repeat(self.starts[taken] - (np.cumsum(sizes) - sizes), sizes)
        return np.sort(self.positions[places])


@dataclass
class _Pending:
    """A clustering under way: its labels, valid once `done` has ended, and scratch that is given back then.

    `step` is what the layer held when it began, in tokens.
    """

    done: Completion
    labels: Segment
    high: int
    clusters: int
    step: int
    scratch: list[Region]


@dataclass
class _Layer:
    """One layer's index: positions [first, end) are in `known` clusters per KV head."""

    end: int
    members: list[Members]
    known: int = 0
    pending: _Pending | None = None


def check_clusters(engine: Engine) -> None:
    """Raise ConfigurationError unless the device that runs the modules can cluster keys."""
    executor = engine.dense.executor
    for kernel in ("cluster", "score", "topk"):
        if kernel not in executor.kernels or (executor.dtypes and engine.shape.dtype not in executor.dtypes):
            raise ConfigurationError(
                f"{engine.dense.device.info.name} runs the modules, so it has to keep the clusters, "
                f"but it does not offer {kernel} for keys of {engine.shape.dtype}"
            )


def label_by_head(engine: Engine, labels: Segment, heads: int, clusters: int, after: Completion) -> Completion:
    """Let labels, int64 (heads, rows), count the clusters of their head instead of those of a `Cluster` launch."""
    rows = labels.spans.nbytes // 8 // heads

    def count(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        of_launch = np.ascontiguousarray(reads[0]).view(np.int64).reshape(heads, rows)
        of_head = of_launch - np.arange(heads, dtype=np.int64)[:, None] * clusters
        writes[0][:] = of_head.view(np.uint8).reshape(-1)

    args = Dense("index", heads * rows, 0, 2 * labels.spans.nbytes, count)
    return engine.launch(engine.dense, args, ((labels,),), ((labels,),), [after])


class ClusterIndex:
    """The clusters of all layers of one request; raises TierTooSmall where the dense device has no room for them.

    `close` gives the memory back. What decode steps need is taken at once, so that they do not fail for lack of space.
    """

    def __init__(self, engine: Engine, how: Clustering, max_tokens: int, request_name: str) -> None:
        self.how = how
        self._engine = engine
        self._name = request_name
        self._same: tuple[Members, Int64, int, int, Members] | None = None
        shape = engine.shape
        # Only the last segment of a launch can have more than rows / cluster_tokens clusters: one.
        self._width = max_tokens // how.cluster_tokens + max_tokens // how.update_tokens + 2
        heads, row = shape.num_kv_heads, shape.head_dim * 4
        self._centroids = self._scratch(shape.num_layers * heads * self._width * row)
        self._most_rows = (shape.num_blocks(min(how.update_tokens, max_tokens)) + 1) * shape.block_tokens
        self._labels = self._scratch(shape.num_layers * heads * self._most_rows * 8)
        nothing = Members()
        self._layers = [_Layer(how.first, [nothing] * heads) for _ in range(shape.num_layers)]

    def end(self, layer: int) -> int:
        """The position after the last one that belongs to a cluster."""
        return self._layers[layer].end

    def known(self, layer: int) -> int:
        """Clusters of each KV head."""
        return self._layers[layer].known

    def members(self, layer: int) -> list[Members]:
        """The rows of the clusters, for each KV head."""
        return self._layers[layer].members

    def centroids(self, layer: int, first: int = 0, count: int | None = None) -> Segment:
        """Centroids [first, first + count) of a layer (default: all), float32, one span for each KV head."""
        row, heads = self._engine.shape.head_dim * 4, self._engine.shape.num_kv_heads
        count = self._layers[layer].known - first if count is None else count
        assert first + count <= self._width, "there is room for every cluster that there can be"
        offsets = ((layer * heads + np.arange(heads, dtype=np.int64)) * self._width + first) * row
        return Segment(self._centroids, Spans.equal(offsets, count * row))

    def due(self, layer: int, length: int, least: int) -> int:
        """Up to which position the layer's rows can be clustered, given its length; `end` if fewer than `least` can."""
        held, block_tokens = self._layers[layer], self._engine.shape.block_tokens
        high = (length - self.how.recent_tokens) // block_tokens * block_tokens
        return high if held.pending is None and high - held.end >= least else held.end

    def extend(self, table: BlockTable, layer: int, high: int, after: list[Completion]) -> None:
        """Start to cluster the layer's rows from `end` up to position `high`; `settle` takes them into the index.

        Once it has clusters, no more rows at a time than `update_tokens`, and up to two blocks more.
        """
        engine, held, shape = self._engine, self._layers[layer], self._engine.shape
        if held.known:
            high = min(high, held.end // shape.block_tokens * shape.block_tokens + self._most_rows)
        rows = high - held.end
        if rows <= 0:
            return
        assert held.pending is None, "a layer is extended once at a time"
        heads = shape.num_kv_heads
        count = num_clusters(rows, self.how.segment_tokens, self.how.cluster_tokens)
        runs, keys, copies, scratch = self._keys(table, layer, held.end, high, after)
        nbytes = 8 * heads * rows
        if rows <= self._most_rows:
            labels = self._labels.at(8 * heads * self._most_rows * layer, nbytes)
        else:
            scratch.append(self._scratch(nbytes))
            labels = scratch[-1].at(0, nbytes)
        args = Cluster(
            shape.dtype, 1, heads, shape.head_dim, runs, self.how.segment_tokens, self.how.cluster_tokens,
            self.how.iterations,
        )  # fmt: skip
        writes = ((self.centroids(layer, held.known, count),), (labels,))
        done = engine.launch(engine.dense, args, (keys,), writes, [*after, *copies])
        done = label_by_head(engine, labels, heads, count, done)
        held.pending = _Pending(done, labels, high, count, int(table.length[layer]), scratch)

    async def settle(self, layer: int) -> None:
        """Take what `extend` has started into the index."""
        held = self._layers[layer]
        pending, held.pending = held.pending, None
        if pending is None:
            return
        grouping = Grouping(
            f"clusters {self._name}", layer, self._name, pending.step, len(held.members), pending.high - held.end,
            pending.clusters,
        )  # fmt: skip
        try:
            labels = await self._engine.group(pending.labels, grouping, [pending.done])
        finally:
            for region in pending.scratch:
                self._engine.drop(region)
        held.members = [self._grown(m, labels[h], held.end, pending.clusters) for h, m in enumerate(held.members)]
        held.end, held.known = pending.high, held.known + pending.clusters

    async def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        try:
            for held in self._layers:
                pending, held.pending = held.pending, None
                if pending is not None:
                    try:
                        await pending.done
                    finally:
                        for region in pending.scratch:
                            self._engine.drop(region)
        finally:
            self._engine.drop(self._centroids)
            self._engine.drop(self._labels)

    def _grown(self, members: Members, labels: Int64, first: int, count: int) -> Members:
        """Members with further clusters; where lists are grouped alike, as in phantom runs, they are one object."""
        same = self._same
        if same is not None and same[0] is members and same[2:4] == (first, count) and np.array_equal(same[1], labels):
            return same[4]
        grown = copy(members)
        grown.add(labels, first, count)
        self._same = members, labels, first, count, grown
        return grown

    def _keys(
        self, table: BlockTable, layer: int, low: int, high: int, after: list[Completion]
    ) -> tuple[Int64, Operand, list[Completion], list[Region]]:
        """Keys [low, high) of all heads for the dense device: runs, operand, copies to wait for, scratch to drop."""
        engine, shape = self._engine, self._engine.shape
        block = np.arange(low // shape.block_tokens, -(-high // shape.block_tokens), dtype=np.int64)
        heads = np.repeat(np.arange(shape.num_kv_heads, dtype=np.int64), len(block))
        blocks = np.tile(block, shape.num_kv_heads)
        pools, offsets = (side[K].copy() for side in table.places(layer, heads, blocks))
        regions, copies, scratch = [pool.region for pool in table.pools], list[Completion](), list[Region]()
        for number in np.unique(pools).tolist():
            pool, mine = table.pools[number], pools == number
            if engine.dense.reaches(pool.memory):
                continue
            there = self._scratch(int(mine.sum()) * pool.slot_nbytes)
            staged = np.arange(int(mine.sum()), dtype=np.int64) * pool.slot_nbytes
            source = Segment(pool.region, Spans.equal(offsets[mine], pool.slot_nbytes))
            copies.append(engine.copy(source, Segment(there, Spans.equal(staged, pool.slot_nbytes)), after))
            scratch.append(there)
            offsets[mine], pools[mine] = staged, len(regions)
            regions.append(there)
        first = np.maximum(blocks * shape.block_tokens, low)
        counts = np.minimum((blocks + 1) * shape.block_tokens, high) - first
        offsets += (first - blocks * shape.block_tokens) * shape.row_nbytes(K)
        spans = np.stack((offsets, counts * shape.row_nbytes(K)), axis=1)
        borders = np.concatenate(([0], np.flatnonzero(pools[1:] != pools[:-1]) + 1, [len(pools)]))
        keys = tuple(Segment(regions[int(pools[a])], Spans(spans[a:b])) for a, b in pairwise(borders.tolist()))
        runs = np.stack((np.zeros_like(heads), heads, first), axis=1)
        return runs, keys, copies, scratch

    def _scratch(self, nbytes: int) -> Region:
        memory = self._engine.dense.memory
        try:
            return self._engine.scratch(memory, nbytes)
        except OutOfMemory as error:
            raise TierTooSmall(f"{memory} is too small: {nbytes} bytes are needed there for clusters") from error
