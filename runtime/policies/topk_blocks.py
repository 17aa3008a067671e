"""Top-k over block summaries: sparse attention over the blocks whose mean key scores highest, wherever they lie.

Each sealed block has its mean key (float32) on the device that runs the modules. Per layer that device scores all
summaries with the current query, reduced over the query group by max, and picks the k best per KV head (score
descending, index ascending). Sink and recent blocks are always attended. The first layers are dense, as in Quest
(layers 0 and 1). With `budget` 1 every block is attended and the tokens are those of dense attention. Steps of more
than one token per request are dense. Where keys are codes, a summary is the mean of the codes: the queries have the
scales in them, so the scores are those of the mean key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense, Score, Topk
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K
from tierloop.runtime.decisions import Question
from tierloop.runtime.dtypes import from_bytes
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import Chosen
from tierloop.runtime.policies.split_all import SplitAll
from tierloop.runtime.policy import Batch, Int64, Request, share_above_zero, whole_numbers


class TopkBlocks(SplitAll):
    """Attends `budget` (0 to 1) of the blocks of each KV head; rows are placed like those of split-all."""

    name: ClassVar[str] = "topk-blocks"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        engine: Engine,
        budget: float = 0.25,
        sink_blocks: int = 1,
        recent_blocks: int = 2,
        dense_layers: int = 2,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(engine, shares)
        share_above_zero(self.name, budget)
        whole_numbers(
            self.name,
            {
                "sink_blocks": (sink_blocks, 0),
                "recent_blocks": (recent_blocks, 1),
                "dense_layers": (dense_layers, 0),
            },
        )
        self.budget = budget
        self.sink_blocks = sink_blocks
        self.recent_blocks = recent_blocks
        self.dense_layers = dense_layers
        self._work: dict[int, Region] = {}

    async def admit(self, request: Request) -> None:
        await super().admit(request)
        shape = self.shape
        width = request.state["width"] = shape.num_blocks(request.max_tokens)
        nbytes = shape.num_layers * shape.num_kv_heads * width * shape.head_dim * 4
        request.state["summaries"] = self.engine.scratch(self.engine.dense.memory, nbytes)

    async def place(self, request: Request, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        await super().place(request, layer, keys, values)
        full = keys.shape[1] // self.shape.block_tokens
        if full and not self.engine.phantom:
            rows = keys[:, : full * self.shape.block_tokens]
            stored = from_bytes(self.stored_rows(request, layer, K, rows), self.shape.dtype)
            means = stored.reshape(keys.shape[0], full, self.shape.block_tokens, -1).mean(axis=2, dtype=np.float64)
            target = self._summaries(request, layer, 0, full)
            await self.engine.write(target, np.ascontiguousarray(means, dtype=np.float32).view(np.uint8).reshape(-1))

    async def layer_input(self, layer: int, batch: Batch) -> None:
        for ahead in (layer, layer + 1):
            if ahead < self.dense_layers:
                for request in batch.requests:
                    self._attention.stage(request, ahead)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        before = [r.blocks.num_blocks(layer) for r in batch.requests]
        self.open_blocks(layer, batch)
        appended = self.append(layer, batch)
        summed = self._summarise(layer, batch, before, appended)
        if layer < self.dense_layers or batch.q_len > 1 or self.budget == 1:
            return [*self._attention.attend(layer, batch, appended), *summed]
        chosen = await self._select(layer, batch)
        batch.attended = [_per_head(c, self.shape.num_kv_heads) for c in chosen]
        return [*self._attention.attend(layer, batch, appended, chosen), *summed]

    async def release(self, request: Request) -> None:
        summaries = request.state.get("summaries")
        await super().release(request)
        if summaries is not None:
            self.engine.drop(summaries)

    def candidates(self, request: Request, layer: int) -> tuple[int, int, int]:
        """(first, last, k): blocks [first, last) compete for k places; the rest is attended anyway."""
        blocks = request.blocks.num_blocks(layer)
        first = min(self.sink_blocks, blocks)
        last = max(blocks - self.recent_blocks, first)
        wanted = int(np.ceil(self.budget * blocks)) - first - (blocks - last)
        return first, last, min(max(wanted, 0), last - first)

    async def _select(self, layer: int, batch: Batch) -> list[Chosen]:
        """The blocks of each request: its sink and recent blocks, and the best of the others."""
        shape, dense = self.shape, self.engine.dense
        ranges = [self.candidates(r, layer) for r in batch.requests]
        k = max(r[2] for r in ranges)
        picked = np.empty((len(ranges), shape.num_kv_heads, 0), dtype=np.int64)
        if k:
            heads = range(shape.num_kv_heads)
            runs = [(i, h, first) for i, (first, _, _) in enumerate(ranges) for h in heads]
            lengths = np.array([last - first for first, last, _ in ranges for _ in heads], dtype=np.int64)
            summaries = tuple(
                self._summaries(r, layer, first, last - first)
                for r, (first, last, _) in zip(batch.requests, ranges, strict=True)
            )
            work = self._working_space(layer, int(lengths.sum()) * 4, len(lengths) * k * 8)
            scores = work.at(0, int(lengths.sum()) * 4)
            indices = work.at(-(-scores.spans.nbytes // 64) * 64, len(lengths) * k * 8)
            score = Score(
                len(ranges),
                shape.num_kv_heads,
                shape.group,
                shape.head_dim,
                "mean",
                "max",
                np.array(runs, dtype=np.int64),
            )
            done = self.engine.launch(dense, score, ((batch.queries,), summaries), ((scores,),), [batch.ready])
            done = self.engine.launch(dense, Topk(k, lengths), ((scores,),), ((indices,),), [done])
            starts = np.array([first * shape.block_tokens for _, _, first in runs], dtype=np.int64)
            names = tuple(r.name for r in batch.requests)
            step = int(batch.positions[0, 0])
            question = Question("topk", layer, names, step, lengths, starts, shape.block_tokens, k)
            picked = (await self.engine.decide(indices, question, [done])).reshape(len(ranges), shape.num_kv_heads, k)
        return [self._chosen(r, layer, ranges[i], picked[i]) for i, r in enumerate(batch.requests)]

    def _chosen(self, request: Request, layer: int, competing: tuple[int, int, int], picked: Int64) -> Chosen:
        first, last, k = competing
        blocks = request.blocks.num_blocks(layer)
        always = np.concatenate((np.arange(first), np.arange(last, blocks)))
        heads, chosen = [], []
        for head in range(self.shape.num_kv_heads):
            best = picked[head, :k]
            mine = np.sort(np.concatenate((always, best[best >= 0] + first)))
            heads.append(np.full(len(mine), head, dtype=np.int64))
            chosen.append(mine)
        return np.concatenate(heads), np.concatenate(chosen)

    def _summarise(self, layer: int, batch: Batch, before: list[int], appended: Completion) -> list[Completion]:
        """Mean keys of the blocks that the new rows have filled."""
        done = []
        for request, first in zip(batch.requests, before, strict=True):
            full = int(request.blocks.length[layer]) // self.shape.block_tokens
            for block in range(max(first - 1, 0), full):
                done.append(self._summarise_block(request, layer, block, appended))
        return done

    def _summarise_block(self, request: Request, layer: int, block: int, appended: Completion) -> Completion:
        shape, table = self.shape, request.blocks
        nbytes = shape.block_tokens * shape.row_nbytes(K)
        heads = np.arange(shape.num_kv_heads)
        pools, offsets = table.pool[layer, K, heads, block], table.offset[layer, K, heads, block]
        keys = tuple(
            table.pools[pool].region.at(offset, nbytes)
            for pool, offset in zip(pools.tolist(), offsets.tolist(), strict=True)
        )

        def mean(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
            rows = from_bytes(reads[0], shape.dtype).reshape(shape.num_kv_heads, shape.block_tokens, -1)
            writes[0][:] = rows.mean(axis=1, dtype=np.float64).astype(np.float32).view(np.uint8).reshape(-1)

        elements = shape.num_kv_heads * shape.block_tokens * shape.head_dim
        args = Dense("summarise", elements, 0, nbytes * shape.num_kv_heads, mean)
        target = self._summaries(request, layer, block, 1)
        return self.engine.launch(self.engine.dense, args, (keys,), ((target,),), [appended])

    def _summaries(self, request: Request, layer: int, first: int, count: int) -> Segment:
        """Summary rows [first, first + count) of a layer, one span per KV head."""
        row, width, heads = self.shape.head_dim * 4, request.state["width"], self.shape.num_kv_heads
        offsets = ((layer * heads + np.arange(heads, dtype=np.int64)) * width + first) * row
        return Segment(request.state["summaries"], Spans.equal(offsets, count * row))

    def _working_space(self, layer: int, scores: int, indices: int) -> Region:
        need = -(-scores // 64) * 64 + indices
        region = self._work.get(layer)
        if region is None or region.nbytes < need:
            if region is not None:
                self.engine.drop(region)
            region = self._work[layer] = self.engine.scratch(self.engine.dense.memory, need * 2)
        return region


def _per_head(chosen: Chosen, num_heads: int) -> list[Int64]:
    heads, blocks = chosen
    return [blocks[heads == head] for head in range(num_heads)]
