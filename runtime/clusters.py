"""Clusters of a request's keys: centroids on the device that runs the modules, and which rows belong to each.

RetroInfer's index, as NELSSA keeps it up: a layer's prompt keys are clustered once, by segments, when the prompt has
been stored; rows that came later are clustered on their own, `update_tokens` of them at a time, and join the index as
further clusters. What is clustered never changes. Only sealed rows are clustered: from `first` (the rows before that
are attention sinks) to the last block border that leaves `recent_tokens` rows behind it.

The keys are read where they lie if the dense device reaches that memory, and are copied to it otherwise, by block.

Which cluster a row belongs to is learnt through `Engine.group`, so runs without bytes have clusters as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Cluster, Dense, num_clusters
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, K
from tierloop.runtime.centroids import Centroids, Members
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
        shape = engine.shape
        # Only the last segment of a launch can have more than rows / cluster_tokens clusters: one.
        width = max_tokens // how.cluster_tokens + max_tokens // how.update_tokens + 2
        self._held = Centroids(engine, width, how.first, f"centroids of {request_name}")
        self._most_rows = (shape.num_blocks(min(how.update_tokens, max_tokens)) + 1) * shape.block_tokens
        try:
            nbytes = shape.num_layers * shape.num_kv_heads * self._most_rows * 8
            self._labels = engine.claim(engine.dense.memory, nbytes, f"labels of {request_name}")
        except BaseException:
            self._held.close()
            raise
        self._pending: list[_Pending | None] = [None] * shape.num_layers

    def end(self, layer: int) -> int:
        """The position after the last one that belongs to a cluster."""
        return self._held.end(layer)

    def known(self, layer: int) -> int:
        """Clusters of each KV head."""
        return self._held.known(layer)

    def members(self, layer: int) -> list[Members]:
        """The rows of the clusters, for each KV head."""
        return self._held.members(layer)

    def centroids(self, layer: int) -> Segment:
        """Centroids of a layer, float32, one span for each KV head."""
        return self._held.segment(layer)

    def due(self, layer: int, length: int, least: int) -> int:
        """Up to which position the layer's rows can be clustered, given its length; `end` if fewer than `least` can."""
        end, block_tokens = self._held.end(layer), self._engine.shape.block_tokens
        high = (length - self.how.recent_tokens) // block_tokens * block_tokens
        return high if self._pending[layer] is None and high - end >= least else end

    def extend(self, table: BlockTable, layer: int, high: int, after: list[Completion]) -> None:
        """Start to cluster the layer's rows from `end` up to position `high`; `settle` takes them into the index.

        Once it has clusters, no more rows at a time than `update_tokens`, and up to two blocks more.
        """
        engine, shape, end = self._engine, self._engine.shape, self._held.end(layer)
        known = self._held.known(layer)
        if known:
            high = min(high, end // shape.block_tokens * shape.block_tokens + self._most_rows)
        rows = high - end
        if rows <= 0:
            return
        assert self._pending[layer] is None, "a layer is extended once at a time"
        heads = shape.num_kv_heads
        count = num_clusters(rows, self.how.segment_tokens, self.how.cluster_tokens)
        runs, keys, copies, scratch = keys_of(engine, table, layer, end, high, after)
        nbytes = 8 * heads * rows
        if rows <= self._most_rows:
            labels = self._labels.at(8 * heads * self._most_rows * layer, nbytes)
        else:
            scratch.append(engine.claim(engine.dense.memory, nbytes, f"labels of {self._name}"))
            labels = scratch[-1].at(0, nbytes)
        args = Cluster(
            shape.dtype, 1, heads, shape.head_dim, runs, self.how.segment_tokens, self.how.cluster_tokens,
            self.how.iterations,
        )  # fmt: skip
        writes = ((self._held.segment(layer, known, count),), (labels,))
        done = engine.launch(engine.dense, args, (keys,), writes, [*after, *copies])
        done = label_by_head(engine, labels, heads, count, done)
        self._pending[layer] = _Pending(done, labels, high, count, int(table.length[layer]), scratch)

    async def settle(self, layer: int) -> None:
        """Take what `extend` has started into the index."""
        pending, self._pending[layer] = self._pending[layer], None
        if pending is None:
            return
        grouping = Grouping(
            f"clusters {self._name}", layer, self._name, pending.step, self._engine.shape.num_kv_heads,
            pending.high - self._held.end(layer), pending.clusters,
        )  # fmt: skip
        try:
            labels = await self._engine.group(pending.labels, grouping, [pending.done])
        finally:
            for region in pending.scratch:
                self._engine.drop(region)
        self._held.add(layer, labels, pending.clusters, pending.high)

    async def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        try:
            for layer, pending in enumerate(self._pending):
                self._pending[layer] = None
                if pending is not None:
                    try:
                        await pending.done
                    finally:
                        for region in pending.scratch:
                            self._engine.drop(region)
        finally:
            self._held.close()
            self._engine.drop(self._labels)


def keys_of(
    engine: Engine, table: BlockTable, layer: int, low: int, high: int, after: list[Completion]
) -> tuple[Int64, Operand, list[Completion], list[Region]]:
    """Keys [low, high) of all heads for the dense device: runs, operand, copies to wait for, scratch to drop."""
    shape = engine.shape
    block = np.arange(low // shape.block_tokens, -(-high // shape.block_tokens), dtype=np.int64)
    heads = np.repeat(np.arange(shape.num_kv_heads, dtype=np.int64), len(block))
    blocks = np.tile(block, shape.num_kv_heads)
    pools, offsets = (side[K].copy() for side in table.places(layer, heads, blocks))
    regions, copies, scratch = [pool.region for pool in table.pools], list[Completion](), list[Region]()
    for number in np.unique(pools).tolist():
        pool, mine = table.pools[number], pools == number
        if engine.dense.reaches(pool.memory):
            continue
        there = engine.claim(engine.dense.memory, int(mine.sum()) * pool.slot_nbytes, "keys to be clustered")
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
