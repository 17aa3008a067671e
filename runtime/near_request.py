"""What a request has in near memories: clusters that grow a piece at a time, and how far they have come.

Positions below `first` (attention sinks) and the newest ones stay where the modules run; those between are clustered,
`piece` by `piece`, and their rows written to near memories. Where pieces end depends on the prompt's length and on
positions alone, never on when they were written: segments, which end at multiples of `segment_tokens`, the last one of
the prompt as long as it happens to be, then updates of `update_tokens` that stop at the borders of segments. So a
request that moved there while it was decoded has the index of one that was there from the beginning.

A piece is `started` (being written), then written in all layers, then published, between two steps: only then is it
read, and only then are the rows where the modules run given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import DeviceError
from tierloop.devices.states import cover
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.centroids import Centroids
from tierloop.runtime.loop import Task
from tierloop.runtime.near_rows import NearRows

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """In what pieces the keys of a request are clustered; all numbers are of tokens, and multiples of a block.

    `first` is the first position that is clustered; `local_tokens` (not rounded) stay behind the last one.
    """

    first: int
    local_tokens: int
    segment_tokens: int
    update_tokens: int
    block_tokens: int
    cluster_tokens: int

    @classmethod
    def rounded(
        cls, shape: KVShape, sink_tokens: int, local_tokens: int, segment_tokens: int, update_tokens: int, cluster: int
    ) -> Pieces:
        """Sinks, segments and updates rounded up to whole blocks, as placements are cut between blocks only."""
        block = shape.block_tokens
        up = [-(-tokens // block) * block for tokens in (sink_tokens, segment_tokens, update_tokens)]
        return cls(up[0], local_tokens, up[1], up[2], block, cluster)

    def room(self, num_tokens: int) -> int:
        """Up to which position the rows of so many tokens may be clustered; at least `first`."""
        return max((num_tokens - self.local_tokens) // self.block_tokens * self.block_tokens, self.first)

    def next(self, end: int, num_tokens: int, prompt_tokens: int) -> int | None:
        """Where the piece ends that begins at `end`; None where there are not yet enough rows for it."""
        border = (end // self.segment_tokens + 1) * self.segment_tokens
        prompt = self.room(prompt_tokens)
        high = min(border, prompt if end < prompt else end + self.update_tokens)
        return high if high <= self.room(num_tokens) and high > end else None

    def reach(self, num_tokens: int, prompt_tokens: int) -> int:
        """How far pieces come with so many tokens."""
        end = self.first
        while (high := self.next(end, num_tokens, prompt_tokens)) is not None:
            end = high
        return end

    def most_clusters(self, num_tokens: int) -> int:
        """Clusters of a KV head of a request of so many tokens, at most."""
        rows = self.room(num_tokens) - self.first
        pieces = rows // min(self.update_tokens, self.segment_tokens) + rows // self.segment_tokens + 3
        return rows // self.cluster_tokens + pieces

    def most_rows(self, num_tokens: int) -> int:
        """Rows of a KV head that are clustered, at most."""
        return self.room(num_tokens) - self.first


@dataclass(eq=False)
class Piece:
    """Rows of positions [low, high): clusters of each KV head, and the labels of each layer that was written."""

    low: int
    high: int
    clusters: int
    labels: dict[int, Int64] = field(default_factory=dict)
    tasks: list[Task[None]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Layers that nobody has begun to write."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Nodes of the merge tree, int64 (n, 2), that each side returns for every KV head it has: here, and near."""

    here: Int64
    shares: list[Int64]


@dataclass(eq=False)
class NearRequest:
    """A request's clusters. `attends` says whether it is attended near the memory, or still where the modules run."""

    name: str
    prompt_tokens: int
    max_tokens: int
    pieces: Pieces
    centroids: Centroids
    rows: NearRows
    attends: bool
    forced: bool = False
    """Whether it moves because there is no room for it, however short it is."""
    is_migration: bool = False
    """Whether it was decoded on the GPU before."""
    at_once: bool = False
    """Whether what can be written is written at once, and not a little in each step: its prompt is still coming."""
    started: int = 0
    under_way: list[Piece] = field(default_factory=list)
    error: DeviceError | None = None
    closing: bool = False
    streams: tuple[tuple[int, int], bool] | None = None
    """Whether its rows are streamed, for an end and a number of new tokens."""
    _cut: tuple[tuple[int, int], Cut] | None = None

    def __post_init__(self) -> None:
        self.started = self.pieces.first

    @property
    def end(self) -> int:
        """The position after the last one that is published."""
        return self.centroids.end(0)

    def publish(self, piece: Piece) -> None:
        """The piece is written in all layers: from now on it is read."""
        for layer, labels in sorted(piece.labels.items()):
            self.centroids.add(layer, labels, piece.clusters, piece.high)
        self.under_way.remove(piece)

    def cut(self, num_tokens: int, split_tokens: int) -> Cut:
        """Who returns which nodes while the request has so many tokens."""
        key = self.end, (num_tokens - 1) // split_tokens
        if self._cut is None or self._cut[0] != key:
            self._cut = key, self._make_cut(*key, split_tokens)
        return self._cut[1]

    def _make_cut(self, end: int, last: int, split_tokens: int) -> Cut:
        first, segment = self.pieces.first, self.pieces.segment_tokens
        here = np.concatenate((np.arange(first // split_tokens), np.arange(end // split_tokens, last + 1)))
        if end == first:
            here = np.arange(last + 1)
        splits = np.arange(first // split_tokens, end // split_tokens)
        of_segment = splits * split_tokens // segment
        shares = []
        everything = np.arange(last + 1)
        for near in self.rows.shares:
            mine = splits[np.isin(of_segment, near.share.segments)]
            others = here if len(mine) == len(splits) else np.setdiff1d(everything, mine, assume_unique=True)
            shares.append(nodes_above(mine, others))
        return Cut(nodes_above(here, splits), shares)


def roots_of(number: int, heads: Int64, nodes: Int64) -> Int64:
    """All nodes, int64 (n, 2), for each KV head: int64 (r, 4) of (number in the batch, KV head, level, index)."""
    roots = np.empty((len(heads) * len(nodes), 4), dtype=np.int64)
    roots[:, 0], roots[:, 1] = number, np.repeat(heads, len(nodes))
    roots[:, 2:] = np.tile(nodes, (len(heads), 1))
    return roots


def nodes_above(mine: Int64, others: Int64) -> Int64:
    """The fewest nodes that hold all splits of `mine` and none of `others` (states.py): int64 (n, 2)."""
    return np.array(cover(mine.tolist(), others.tolist()), dtype=np.int64).reshape(-1, 2)
