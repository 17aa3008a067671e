"""Where the entries of an archive lie: in what order each segment was filled, and which media blocks hold what."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.archive_geometry import Geometry
from tierloop.runtime.archive_loops import joined, starts
from tierloop.runtime.archive_record import Append
from tierloop.runtime.blocks import TierTooSmall

Int32 = NDArray[np.int32]
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


class Layout:
    """The segments of an archive in its region; `what` names it in errors."""

    def __init__(self, region: Region, geometry: Geometry, what: str) -> None:
        layers, heads = geometry.layers, geometry.heads
        self.region = region
        self.geometry = geometry
        self.used = np.zeros(layers, dtype=np.int64)
        """Bytes of each segment of a layer that are taken."""
        self.count = np.zeros(layers, dtype=np.int64)
        """Entries of each segment of a layer."""
        self.begin = geometry.data_offset + geometry.segment_nbytes * np.arange(layers * heads, dtype=np.int64).reshape(
            layers, heads
        )
        """Where segments begin in the region."""
        self._what = what
        self._places = np.zeros((layers, heads, geometry.most_entries), dtype=np.int32)
        self._all: dict[int, Media] = {}

    def stride(self, n: int) -> int:
        """Bytes of n entries, rounded up to the medium's grid."""
        grid = self.geometry.grid
        return -(-n * self.geometry.entries.nbytes // grid) * grid

    def check_layer(self, layer: int) -> None:
        """Raises ValueError."""
        if not 0 <= layer < self.geometry.layers:
            raise ValueError(f"layer {layer} of {self.geometry.layers}")

    def lay(self, layer: int, order: Int64 | Int32) -> tuple[Append, Segment]:
        """Give entries (heads, n) their places at the ends of a layer's segments.

        Raises ValueError for what is no entry, is there already or comes twice, TierTooSmall; then nothing has changed.
        """
        self.check_layer(layer)
        geometry = self.geometry
        most = geometry.most_entries
        if order.ndim != 2 or order.shape[0] != geometry.heads or order.dtype.kind not in "iu" or not order.size:
            raise ValueError(f"an order is int64 ({geometry.heads}, n), n at least 1, got {order.dtype} {order.shape}")
        if not 0 <= int(order.min()) <= int(order.max()) < most:
            raise ValueError(f"entries are 0 to {most - 1}, got {order.min()} to {order.max()}")
        n = order.shape[1]
        used, stride = int(self.used[layer]), self.stride(n)
        if used + stride > geometry.segment_nbytes:
            raise TierTooSmall(
                f"{self._what} is full: {n} entries take {stride:,} bytes of each segment, "
                f"{geometry.segment_nbytes - used:,} of {geometry.segment_nbytes:,} are left"
            )
        rows, head = self._places[layer], np.arange(geometry.heads)[:, None]
        there = rows[head, order] != 0
        if there.any():
            raise ValueError(f"entry {order[there][0]} of layer {layer} is in the archive already")
        step = geometry.entries.nbytes // geometry.granule
        places = (used // geometry.granule + 1 + step * np.arange(n, dtype=np.int64)).astype(np.int32)
        rows[head, order] = places
        twice = rows[head, order] != places
        if twice.any():
            rows[head, order] = 0
            raise ValueError(f"entry {order[twice][0]} of layer {layer} comes twice")
        self.used[layer] += stride
        self.count[layer] += n
        self._all.pop(layer, None)
        append = Append(layer, order.astype(np.int32), np.zeros(geometry.heads, dtype=np.uint32))
        return append, Segment(self.region, Spans.equal(self.begin[layer] + used, stride))

    def undo(self, append: Append) -> None:
        """Take back what `lay` did last."""
        layer, order, n = append.layer, append.order, append.order.shape[1]
        self._places[layer][np.arange(len(order))[:, None], order] = 0
        self.used[layer] -= self.stride(n)
        self.count[layer] -= n
        self._all.pop(layer, None)

    def media(self, layer: int, heads: Int64, entries: Int64) -> Media:
        """What must be read for entries `entries[i]` of heads `heads[i]` of a layer. Raises ValueError."""
        self.check_layer(layer)
        heads, entries = np.ascontiguousarray(heads, np.int64), np.ascontiguousarray(entries, np.int64)
        n = len(entries)
        if heads.shape != (n,) or entries.shape != (n,):
            raise ValueError(f"heads {heads.shape} for entries {entries.shape}; both are int64 (n,)")
        found = starts(self._places[layer], self.begin[layer], heads, entries, self.geometry.granule)
        missing = int(found[n])
        if missing < n:
            raise ValueError(f"{self._what} has no entry {entries[missing]} of layer {layer}, head {heads[missing]}")
        nbytes = self.geometry.entries.nbytes
        pairs, offset = joined(found[:n], np.argsort(found[:n]), nbytes, self.geometry.grid)
        spans = Spans(pairs)
        return Media(self.region, spans, offset, n * nbytes, spans.nbytes)

    def everything(self, layer: int) -> Media:
        """`media` of all entries of a layer, by head, then by entry."""
        self.check_layer(layer)
        if layer not in self._all:
            self._all[layer] = self.media(layer, *np.nonzero(self._places[layer]))
        return self._all[layer]
