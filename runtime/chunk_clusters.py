"""Grouping chunks where the modules run: from keys to chunk means, centroids and labels, as launches.

A chunk mean is a float64 sum over the keys of an entry, rounded once to float32, whether the host makes it (of the
prompt's keys, which come from there) or a `dense` launch (of rows that the device has). The `cluster` kernel counts
centroids over all KV heads; a second `dense` launch makes that labels of each head from 0. All of it is marked as the
stage "index".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Cluster, Dense
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K
from tierloop.runtime.chunking import Cut
from tierloop.runtime.dtypes import from_bytes
from tierloop.runtime.engine import Engine

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass
class Started:
    """Chunks that are being grouped: labels, int64 (heads, n), valid when `done` has ended; scratch to give back."""

    labels: Segment
    done: Completion
    scratch: list[Region]


def check_device(engine: Engine) -> None:
    """Raise ConfigurationError unless the device that runs the modules can group and rank float32 rows."""
    executor = engine.dense.executor
    for kernel in ("cluster", "score", "topk"):
        if kernel not in executor.kernels or (executor.dtypes and "float32" not in executor.dtypes):
            raise ConfigurationError(
                f"{engine.dense.device.info.name} runs the modules, so it has to keep the index, but it does not offer "
                f"{kernel} for float32"
            )


class ChunkClusters:
    """Scratch and launches for the chunks of one request. Raises TierTooSmall, ConfigurationError.

    What updates need is taken at once; what the prompt needs, for one layer at a time, when it is grouped.
    """

    def __init__(self, engine: Engine, cut: Cut, request_name: str, iterations: int) -> None:
        check_device(engine)
        self._engine, self._cut, self._name, self._iterations = engine, cut, request_name, iterations
        shape = engine.shape
        rows = shape.num_kv_heads * min(cut.update, cut.most_chunks)
        self._labels_nbytes = rows * 8
        self._scratch: list[Region] = []
        try:
            self._means = self._claim(self._scratch, rows * shape.head_dim * 4, "chunk means")
            self._labels = self._claim(self._scratch, shape.num_layers * self._labels_nbytes, "labels")
        except BaseException:
            self.close()
            raise
        self._means_free: list[Completion] = []

    def of_prompt(
        self, first: int, chunks: int, keys: Float32 | None, centroids: Segment, after: Sequence[Completion]
    ) -> Started:
        """Group chunks [first, first + chunks) of keys as stored, float32 (heads, tokens, head_dim), or None."""
        shape, c = self._engine.shape, self._cut.how.chunk_tokens
        heads, rows = shape.num_kv_heads, shape.num_kv_heads * chunks
        scratch: list[Region] = []
        try:
            means = self._claim(scratch, rows * shape.head_dim * 4, "chunk means").at(0, rows * shape.head_dim * 4)
            labels = self._claim(scratch, rows * 8, "labels").at(0, rows * 8)
            if keys is None:
                stored = np.zeros(means.spans.nbytes, dtype=np.uint8)
            else:
                entries = keys[:, first * c : (first + chunks) * c].reshape(heads, chunks, c, -1)
                stored = means_of(entries).view(np.uint8).reshape(-1)
            written = self._engine.write(means, stored, after)
            return Started(labels, self._group(first, chunks, means, labels, centroids, [written]), scratch)
        except BaseException:
            self.drop(scratch)
            raise

    def of_update(
        self, layer: int, first: int, chunks: int, keys: Operand, centroids: Segment, after: Sequence[Completion]
    ) -> Started:
        """Group chunks [first, first + chunks), at most an update, of K rows where the modules run, head by head."""
        engine, shape, c = self._engine, self._engine.shape, self._cut.how.chunk_tokens
        heads, rows = shape.num_kv_heads, shape.num_kv_heads * chunks
        nbytes, need = sum(s.spans.nbytes for s in keys), rows * c * shape.row_nbytes(K)
        if nbytes != need:
            raise ValueError(f"keys of {chunks} entries of {self._name} have {nbytes} bytes; needed is {need}")

        def average(reads: list[Bytes], writes: list[Bytes]) -> None:
            stored = from_bytes(reads[0], shape.dtype).reshape(heads, chunks, c, -1)
            writes[0][:] = means_of(stored).view(np.uint8).reshape(-1)

        means = self._means.at(0, rows * shape.head_dim * 4)
        labels = self._labels.at(layer * self._labels_nbytes, rows * 8)
        args = Dense("index", rows * c * shape.head_dim, 0, nbytes + means.spans.nbytes, average)
        made = engine.launch(engine.dense, args, (keys,), ((means,),), [*after, *self._means_free])
        done = self._group(first, chunks, means, labels, centroids, [made])
        self._means_free = [done]
        return Started(labels, done, [])

    def drop(self, scratch: list[Region]) -> None:
        """Give scratch back."""
        while scratch:
            self._engine.drop(scratch.pop())

    def close(self) -> None:
        """Give everything back that updates use; nothing may be under way."""
        self.drop(self._scratch)

    def _group(
        self, first: int, chunks: int, means: Segment, labels: Segment, centroids: Segment, after: list[Completion]
    ) -> Completion:
        engine, shape, cut = self._engine, self._engine.shape, self._cut
        heads, row = shape.num_kv_heads, chunks * shape.head_dim * 4
        count = cut.clusters(chunks)
        begins = int(means.spans.array[0, 0]) + np.arange(heads, dtype=np.int64) * row
        runs = np.array([(0, head, first) for head in range(heads)], dtype=np.int64)
        sizes = cut.segment_chunks, cut.cluster_chunks
        args = Cluster("float32", 1, heads, shape.head_dim, runs, *sizes, self._iterations)
        keys, writes = (Segment(means.region, Spans.equal(begins, row)),), ((centroids,), (labels,))
        done = engine.stages.mark(engine.launch(engine.dense, args, (keys,), writes, after), "index")

        def count_by_head(reads: list[Bytes], writes: list[Bytes]) -> None:
            over_all = np.ascontiguousarray(reads[0]).view(np.int64).reshape(heads, chunks)
            of_head = over_all - np.arange(heads, dtype=np.int64)[:, None] * count
            writes[0][:] = of_head.view(np.uint8).reshape(-1)

        relabel = Dense("index", heads * chunks, 0, 2 * labels.spans.nbytes, count_by_head)
        return engine.launch(engine.dense, relabel, ((labels,),), ((labels,),), [done])

    def _claim(self, scratch: list[Region], nbytes: int, what: str) -> Region:
        scratch.append(self._engine.claim(self._engine.dense.memory, nbytes, f"{what} of {self._name}"))
        return scratch[-1]


def means_of(chunks: Float32) -> Float32:
    """float32 (heads, chunks, tokens, head_dim) → means over the tokens, float64 sums rounded once."""
    return np.ascontiguousarray(chunks.mean(axis=2, dtype=np.float64), dtype=np.float32)
