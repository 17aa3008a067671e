"""Centroids of one request, where the modules run, and which rows each of them stands for.

Both indexes of keys grow alike: a layer's rows are clustered a stretch at a time, and each stretch adds its clusters
behind those that are there. What is clustered never changes. Centroids are float32 or a 16-bit float type.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.contract import ITEMSIZE, DType
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]


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

    @property
    def num_empty(self) -> int:
        """Clusters without rows."""
        return int(np.count_nonzero(self.sizes == 0))

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
        return np.sort(self.positions[self.places(taken)])

    def places(self, clusters: Int64) -> Int64:
        """Where in `positions` the rows of these clusters stand, cluster after cluster."""
        sizes = self.sizes[clusters]
        from_cluster = self.starts[clusters] - (np.cumsum(sizes) - sizes)
        places: Int64 = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(from_cluster, sizes)
        return places


@dataclass
class _Layer:
    """One layer: positions [first, end) are in `known` clusters per KV head."""

    end: int
    members: list[Members]
    known: int = 0


class Centroids:
    """`width` centroids of every layer and KV head. Raises TierTooSmall; `close` gives the memory back."""

    def __init__(self, engine: Engine, width: int, first: int, what: str, dtype: DType = "float32") -> None:
        self.engine = engine
        self.dtype = dtype
        self.width = width
        shape = engine.shape
        self._row = shape.head_dim * ITEMSIZE[dtype]
        nbytes = shape.num_layers * shape.num_kv_heads * width * self._row
        self._region = engine.claim(engine.dense.memory, max(nbytes, 1), what)
        nobody = Members()
        self._layers = [_Layer(first, [nobody] * shape.num_kv_heads) for _ in range(shape.num_layers)]
        self._same: tuple[Members, Int64, int, int, Members] | None = None

    def end(self, layer: int) -> int:
        """The position after the last one that belongs to a cluster."""
        return self._layers[layer].end

    def known(self, layer: int) -> int:
        """Clusters of each KV head."""
        return self._layers[layer].known

    def members(self, layer: int) -> list[Members]:
        """The rows of the clusters, for each KV head."""
        return self._layers[layer].members

    def segment(self, layer: int, first: int = 0, count: int | None = None) -> Segment:
        """Centroids [first, first + count) of a layer (default: all), one span for each KV head."""
        heads = self.engine.shape.num_kv_heads
        count = self._layers[layer].known - first if count is None else count
        assert first + count <= self.width, "there is room for every cluster that there can be"
        offsets = ((layer * heads + np.arange(heads, dtype=np.int64)) * self.width + first) * self._row
        return Segment(self._region, Spans.equal(offsets, count * self._row))

    def add(self, layer: int, labels: Int64, count: int, end: int) -> None:
        """The rows from the last end up to `end` are in `count` further clusters: labels (heads, rows) from 0."""
        held = self._layers[layer]
        held.members = [self._grown(m, labels[h], held.end, count) for h, m in enumerate(held.members)]
        held.end, held.known = end, held.known + count

    def close(self) -> None:
        """Give the memory back."""
        self.engine.drop(self._region)

    def _grown(self, members: Members, labels: Int64, first: int, count: int) -> Members:
        """Members with further clusters; where lists are grouped alike, as in phantom runs, they are one object."""
        same = self._same
        if same is not None and same[0] is members and same[2:4] == (first, count) and np.array_equal(same[1], labels):
            return same[4]
        grown = copy(members)
        grown.add(labels, first, count)
        self._same = members, labels.copy(), first, count, grown
        return grown
