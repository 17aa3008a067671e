"""A request's clustered rows in near memories: cluster after cluster, so that a cluster is read in one piece.

The i-th of a KV head's `Members.positions` has the row number `first` + i, where `first` is the first position that is
clustered: so the clusters of a piece have as row numbers the positions of the piece. Rows of a segment (row number //
`segment_tokens`) lie together, on the device that has the segment of that head (near_partition.py). A device has one
region for the request, of layers × sides × heads × rows, taken for the request's whole life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K, Rows, V
from tierloop.runtime.centroids import Members
from tierloop.runtime.engine import Engine
from tierloop.runtime.near_partition import NearDevice, Share

Int64 = NDArray[np.int64]


class Picked(NamedTuple):
    """Rows of one KV head: stretches of `counts` rows that begin at a position and at a row number; int64 (n,) each.

    With numbers each is one row, in ascending position. A phantom run has a stretch for each cluster: a device that
    reads the rows of a command in the order of their addresses takes as long for them.
    """

    positions: Int64
    rows: Int64
    counts: Int64


@dataclass(frozen=True, eq=False)
class NearShare:
    """A share of a request, its region and the device; `first_row[s]` is where segment s begins, or −1."""

    share: Share
    near: NearDevice
    region: Region
    num_rows: int
    first_row: Int64


class NearRows:
    """Room for rows number [first, last) of each KV head. Raises TierTooSmall, with nothing kept."""

    def __init__(
        self,
        engine: Engine,
        devices: Sequence[NearDevice],
        shares: Sequence[Share],
        segment_tokens: int,
        first: int,
        last: int,
        request_name: str,
    ) -> None:
        self.engine = engine
        self.segment_tokens = segment_tokens
        self.first = first
        shape = engine.shape
        self._row_nbytes = shape.row_nbytes(K), shape.row_nbytes(V)
        self.shares: list[NearShare] = []
        borders = np.arange(num_segments(last, segment_tokens) + 1, dtype=np.int64) * segment_tokens
        borders = np.clip(borders, first, last)
        self._begins = borders[:-1]
        try:
            for share in shares:
                sizes = np.diff(borders)[share.segments]
                first_row = np.full(len(borders) - 1, -1, dtype=np.int64)
                first_row[share.segments] = np.cumsum(sizes) - sizes
                rows, near = int(sizes.sum()), devices[share.device]
                nbytes = shape.num_layers * len(share.heads) * rows * sum(self._row_nbytes)
                region = engine.claim(near.memory, nbytes, f"clusters of {request_name}")
                self.shares.append(NearShare(share, near, region, rows, first_row))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back."""
        for each in self.shares:
            self.engine.drop(each.region)
        self.shares = []

    def nbytes(self) -> dict[str, int]:
        """Bytes by memory."""
        found: dict[str, int] = {}
        for each in self.shares:
            found[each.near.memory] = found.get(each.near.memory, 0) + each.region.nbytes
        return found

    def at(self, near: NearShare, layer: int, side: int, heads: Int64, rows: Int64, counts: Int64) -> Segment:
        """Stretches of rows of a layer's K or V: `heads` are numbers within the share."""
        size, num_heads = self._row_nbytes[side], len(near.share.heads)
        before = side * self.engine.shape.num_layers * num_heads * near.num_rows * self._row_nbytes[K]
        segment = rows // self.segment_tokens
        local = near.first_row[segment] + rows - self._begins[segment]
        offsets = before + ((layer * num_heads + heads) * near.num_rows + local) * size
        return Segment(near.region, Spans(np.stack((offsets, counts * size), axis=1)))

    def stretch(self, near: NearShare, layer: int, side: int, low: int, high: int) -> Segment | None:
        """Rows [low, high) of one segment, all heads of the share: a span for each; None where it has them not."""
        if near.first_row[low // self.segment_tokens] < 0:
            return None
        heads = np.arange(len(near.share.heads), dtype=np.int64)
        return self.at(near, layer, side, heads, np.full_like(heads, low), np.full_like(heads, high - low))

    def operands(self, near: NearShare, layer: int, sequence: int, picked: Sequence[Picked]) -> Rows:
        """What a share has of the picked rows of each KV head; heads are numbered within the share."""
        heads, positions, rows, counts = [], [], [], []
        for local, head in enumerate(near.share.heads.tolist()):
            mine = picked[head]
            if len(near.share.segments) < len(near.first_row):
                here = near.first_row[mine.rows // self.segment_tokens] >= 0
                mine = Picked(mine.positions[here], mine.rows[here], mine.counts[here])
            heads.append(np.full(len(mine.rows), local, dtype=np.int64))
            positions.append(mine.positions)
            rows.append(mine.rows)
            counts.append(mine.counts)
        of_head, row, count = np.concatenate(heads), np.concatenate(rows), np.concatenate(counts)
        runs = np.stack((np.full_like(of_head, sequence), of_head, np.concatenate(positions)), axis=1)
        if not len(of_head):
            return Rows(runs, (), ())
        keys, values = (self.at(near, layer, side, of_head, row, count) for side in (K, V))
        return Rows(runs, (keys,), (values,))


def num_segments(last: int, segment_tokens: int) -> int:
    """Segments of rows below `last`."""
    return -(-last // segment_tokens)


def pick(members: Members, clusters: Int64, first: int, phantom: bool) -> Picked:
    """The rows of these clusters; `first` is the first position that is clustered."""
    if phantom:
        clusters = clusters[members.sizes[clusters] > 0]
        starts = members.starts[clusters]
        return Picked(members.positions[starts], first + starts, members.sizes[clusters])
    places = members.places(clusters)
    positions = members.positions[places]
    order = np.argsort(positions)
    return Picked(positions[order], first + places[order], np.ones_like(order))


def pick_all(members: Members, low: int, high: int, first: int, segment_tokens: int, phantom: bool) -> Picked:
    """Rows number [low, high), which are whole pieces, so they are of the positions [low, high)."""
    if phantom:
        inner = np.arange(low // segment_tokens + 1, -(-high // segment_tokens), dtype=np.int64) * segment_tokens
        borders = np.concatenate(([low], inner, [high]))
        return Picked(borders[:-1], borders[:-1], np.diff(borders))
    order = np.argsort(members.positions[low - first : high - first])
    return Picked(np.arange(low, high, dtype=np.int64), low + order, np.ones_like(order))
