"""Rows of near memories that are streamed to where the modules run, for steps of many tokens.

A *slice* is some whole segments of a request, and a whole subtree of the merge tree where segments are one: so one node
for each KV head is returned for it. There is room for two: one is copied while another is attended over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.batch_parts import part_of
from tierloop.runtime.blocks import K, Rows, V
from tierloop.runtime.engine import Engine
from tierloop.runtime.near_request import NearRequest, nodes_above, roots_of
from tierloop.runtime.near_rows import pick_all
from tierloop.runtime.policy import Batch
from tierloop.runtime.scratch import Scratch

Int64 = NDArray[np.int64]
STREAMED = 1 << 16
"""Rows of each KV head of a slice, at most."""
STREAM_SHARE = 16
"""The part of the memory that room for one of them may take: a sixteenth."""


class Slice(NamedTuple):
    """Rows [low, high) of a request, and the roots that are returned for them: int64 (r, 4)."""

    low: int
    high: int
    roots: Int64


class NearStream:
    """Streams slices for all requests of a policy."""

    def __init__(self, engine: Engine, segment_tokens: int, scratch: Scratch) -> None:
        self._engine = engine
        self._scratch = scratch
        shape = engine.shape
        capacity = engine.info(engine.dense.memory).capacity
        row = shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))
        segments = min(STREAMED, capacity // STREAM_SHARE // row) // segment_tokens
        self._streamed = (1 << max(segments.bit_length() - 1, 0)) * segment_tokens
        self._readers: dict[int, Completion] = {}
        """Who reads each half of the room last."""

    def estimate_ns(self, layer: int, near: NearRequest) -> int:
        """What copying all rows of a layer would take, as the devices estimate it."""
        first, ns = near.pieces.first, 0
        some = min(near.end, first + self._streamed) - first
        for source, target in self.copies(layer, near, first, first + some):
            lane = self._engine.mover(source.region.memory, target.region.memory)
            if lane is not None:
                ns += lane.device.estimate(Copy(source, target), lane.queue).duration_ns
        return ns * (near.end - first) // some

    def slices(self, batch: Batch, i: int, near: NearRequest) -> list[Slice]:
        """Rows [low, high) that are streamed together, whole segments, and the roots of each."""
        shape, piece = self._engine.shape, near.pieces
        step, last, found = self._streamed, int(batch.positions[i, -1]) // shape.split_tokens, []
        for start in range(0, near.end, step):
            low, high = max(start, piece.first), min(start + step, near.end)
            splits = [row // shape.split_tokens for row in (low, high)]
            others = np.concatenate((np.arange(splits[0]), np.arange(splits[1], last + 1)))
            nodes = nodes_above(np.arange(*splits), others)
            found.append(Slice(low, high, roots_of(i, np.arange(shape.num_kv_heads), nodes)))
        return found

    def attend(
        self, layer: int, batch: Batch, i: int, near: NearRequest, part: Slice, states: Segment, begun: list[Completion]
    ) -> Completion:
        """Copy a slice of request i to where the modules run, and attend over it there; copies go to `begun`, too."""
        low, high, roots = part
        engine, shape = self._engine, self._engine.shape
        half = low // self._streamed % 2
        reader = self._readers.get(half)
        before = [] if reader is None or (reader.done and reader.error is not None) else [reader]
        copies = []
        for source, target in self.copies(layer, near, low, high):
            copies.append(engine.stages.mark(engine.copy(source, target, before), "stream"))
            begun.append(copies[-1])
        members = near.centroids.members(layer)
        first, segment = near.pieces.first, near.pieces.segment_tokens
        rows = [pick_all(m, low, high, first, segment, engine.phantom) for m in members]
        heads = np.repeat(np.arange(shape.num_kv_heads, dtype=np.int64), [len(mine.rows) for mine in rows])
        positions, row, count = (np.concatenate([mine[k] for mine in rows]) for k in range(3))
        runs = np.stack((np.zeros_like(heads), heads, positions), axis=1)
        space, sides = self._space(half), list[Segment]()
        for side in (K, V):
            size = shape.row_nbytes(side)
            start = side * shape.num_kv_heads * (high - low) * shape.row_nbytes(K)
            offsets = start + (heads * (high - low) + row - low) * size
            sides.append(Segment(space.region, Spans(np.stack((offsets, count * size), axis=1))))
        mine = roots.copy()
        mine[:, 0] = 0
        queries = part_of(batch, [i]).queries
        done = engine.attend(
            engine.dense,
            queries,
            Rows(runs, (sides[0],), (sides[1],)),
            batch.positions[i : i + 1],
            batch.scale,
            mine,
            states,
            [batch.ready, *copies],
        )
        self._readers[half] = done
        return done

    def _space(self, half: int) -> Segment:
        shape = self._engine.shape
        nbytes = self._streamed * shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))
        return self._scratch.at("streamed", self._engine.dense.memory, half, nbytes)

    def copies(self, layer: int, near: NearRequest, low: int, high: int) -> list[tuple[Segment, Segment]]:
        """What is copied for rows [low, high): from each share, to their places by side, head and row."""
        shape, segment = self._engine.shape, near.pieces.segment_tokens
        space, found = self._space(low // self._streamed % 2), []
        for share in near.rows.shares:
            sources, targets = [], []
            for side in (K, V):
                size = shape.row_nbytes(side)
                start = side * shape.num_kv_heads * (high - low) * shape.row_nbytes(K)
                for number in range(low // segment, -(-high // segment)):
                    a, b = max(number * segment, low), min((number + 1) * segment, high)
                    source = near.rows.stretch(share, layer, side, a, b)
                    if source is not None:
                        sources.append(source.spans.array)
                        offsets = start + (share.share.heads * (high - low) + a - low) * size
                        targets.append(np.stack((offsets, np.full_like(offsets, (b - a) * size)), axis=1))
            if sources:
                there, here = Spans(np.concatenate(sources)), Spans(np.concatenate(targets))
                found.append((Segment(share.region, there), Segment(space.region, here)))
        return found
