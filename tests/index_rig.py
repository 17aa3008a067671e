"""An index of chunks on a small emulated machine: keys for it, and what it says about them."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.decoding import SMALL, assert_nothing_is_left
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import DType
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.waiting import wait
from tierloop.runtime.blocks import K, KVShape
from tierloop.runtime.chunk_index import ChunkIndex, rank
from tierloop.runtime.chunking import Chunking
from tierloop.runtime.decisions import Decisions, Grouping, Question
from tierloop.runtime.dtypes import from_bytes, keys_to_bytes, scales_of
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
T = TypeVar("T")


@dataclass
class Kept:
    """Decisions of the devices, kept in the order in which they were made; without devices, those that were kept."""

    decided: list[Int64] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    groupings: list[Grouping] = field(default_factory=list)
    again: int = 0

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        self.questions.append(question)
        return self._next(read)

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        self.groupings.append(grouping)
        return self._next(read)

    def _next(self, read: Int64 | None) -> Int64:
        if read is not None:
            self.decided.append(read.copy())
            return read
        self.again += 1
        return self.decided[self.again - 1]


class Strided:
    """Decisions for what has no numbers: equal groups, and candidates in their order."""

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        candidates = np.arange(question.k)[None]
        return np.where(candidates < question.lengths[:, None], candidates, -1)

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        labels = np.arange(grouping.candidates) % grouping.groups
        return np.broadcast_to(labels, (grouping.lists, grouping.candidates))


class Rig:
    """An engine, and places for keys, queries and working space where the modules run."""

    def __init__(self, platform: Platform, engine: Engine) -> None:
        self.platform, self.engine = platform, engine
        self._work: dict[str, Region] = {}

    def index(
        self, prompt_tokens: int, max_tokens: int = 0, name: str = "r", how: Chunking | None = None, **options: Any
    ) -> ChunkIndex:
        how = how or Chunking(**options)
        return ChunkIndex(self.engine, how, name, prompt_tokens, max(max_tokens, prompt_tokens))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.engine.loop.run(coroutine)

    def build(self, index: ChunkIndex, keys: Float32 | None) -> None:
        """Every layer has the same keys, as they are stored."""
        for layer in range(self.engine.shape.num_layers):
            self.run(index.build(layer, keys))

    def extend(self, index: ChunkIndex, layer: int, last: int, keys: Float32) -> None:
        """`keys` float32 (heads, tokens, head_dim) of the whole request, as they are stored."""
        c = index.how.chunk_tokens
        rows = np.ascontiguousarray(keys[:, index.end(layer) * c : last * c])
        index.extend(layer, last, *self.stored(f"keys {layer}", rows))

    def stored(self, use: str, rows: Float32) -> tuple[tuple[Segment, ...], list[Completion]]:
        """Rows in the cache's type, where the modules run: codes are given as codes."""
        shape = self.engine.shape
        ones = np.ones((len(rows), shape.head_dim), dtype=np.float32) if shape.has_codes else None
        data = keys_to_bytes(rows, shape.dtype, ones).reshape(-1)
        place = self.space(use, len(data))
        return (place,), [self.engine.write(place, data)]

    def space(self, use: str, nbytes: int) -> Segment:
        held = self._work.get(use)
        if held is None or held.nbytes < nbytes:
            held = self._work[use] = self.engine.scratch(self.engine.dense.memory, nbytes)
        return held.at(0, nbytes)

    def work(self, scores: int, indices: int) -> tuple[Segment, Segment]:
        return self.space("scores", scores), self.space("indices", indices)

    def rank(
        self, indexes: list[ChunkIndex], queries: Float32, wanted: list[int], layer: int = 0, step: int = 0
    ) -> list[Int64]:
        """`queries` float32 (requests, q heads, head_dim)."""
        target = self.space("queries", queries.nbytes)
        ready = self.engine.write(target, np.ascontiguousarray(queries).view(np.uint8).reshape(-1))
        names = tuple(index.request_name for index in indexes)
        try:
            return self.run(rank(self.engine, layer, indexes, target, ready, wanted, self.work, names, step))
        finally:
            wait(self.platform.clock, ready)

    def centroids(self, index: ChunkIndex, layer: int = 0) -> Float32:
        """float32 (heads, clusters, head_dim)."""
        place = index.centroids(layer)
        into = np.zeros(place.spans.nbytes, dtype=np.uint8)

        async def read() -> None:
            await self.engine.read(place, into)

        self.run(read())
        return into.view(np.float32).reshape(self.engine.shape.num_kv_heads, -1, self.engine.shape.head_dim)


@contextmanager
def rig(
    dtype: DType = "float32",
    phantom: bool = False,
    decisions: Decisions | None = None,
    shape: KVShape | None = None,
    overrides: dict[str, Any] | None = None,
) -> Iterator[Rig]:
    """Two layers, two KV heads of three query heads, 16 channels; the hazard checker is on, and nothing may leak."""
    with open_platform(SMALL, overrides=overrides or {}, check_hazards=True) as platform:
        engine = Engine(
            platform, shape or KVShape(2, 2, 3, 16, 16, dtype, 16, 16), phantom=phantom, decisions=decisions
        )
        yield Rig(platform, engine)
        engine.close()
        assert_nothing_is_left(platform)


def random_keys(tokens: int, dtype: DType = "float32", seed: int = 0, heads: int = 2, dim: int = 16) -> Float32:
    """Keys as they are stored in a cache of this type: float32 (heads, tokens, head_dim), codes as codes."""
    rows = np.random.default_rng(seed).normal(size=(heads, tokens, dim)).astype(np.float32)
    scales = scales_of(np.abs(rows).max(axis=1), dtype) if KVShape(1, 1, 1, 16, 16, dtype).has_codes else None
    return from_bytes(keys_to_bytes(rows, dtype, scales), dtype).reshape(rows.shape)


def random_queries(count: int, seed: int = 1, q_heads: int = 6, dim: int = 16) -> Float32:
    return np.random.default_rng(seed).normal(size=(count, q_heads, dim)).astype(np.float32)


def labels_of(index: ChunkIndex, layer: int = 0) -> Int64:
    """The cluster of every indexed entry: int64 (heads, entries)."""
    found = np.full((len(index.members(layer)), index.end(layer) - index.first), -1, dtype=np.int64)
    for head, members in enumerate(index.members(layer)):
        for cluster, (start, size) in enumerate(zip(members.starts, members.sizes, strict=True)):
            found[head, members.positions[start : start + size] - index.first] = cluster
    return found


def key_nbytes(shape: KVShape, tokens: int) -> int:
    return shape.num_kv_heads * tokens * shape.row_nbytes(K)
