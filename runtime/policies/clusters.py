"""Top-k over clusters: sparse attention over the rows whose centroid scores highest, wherever they lie.

The retrieval zone of RetroInfer's index, as NELSSA uses it: keys are clustered by segmented spherical k-means when the
prompt has been stored, and again for every `update_tokens` rows that came since (runtime/clusters.py). Per layer the
device that runs the modules scores all centroids with the current query (reduced over the query group by max) and sorts
them; each KV head takes clusters in that order until `budget` of its rows are attended. The first `sink_tokens` rows,
the last `recent_tokens`, and rows that are not clustered yet are always attended and count for the budget. With
`budget` 1 every row is attended, and nothing is clustered. Steps of more than one token per request are dense.

Where it deviates: no estimation zone (RetroInfer approximates a further 23.2 % of the clusters by their centroids),
keys are not centred on their mean before they are clustered, and scores are products, not softmax probabilities summed
over the group. The systems attend 1.8 % (RetroInfer) and 4 % (NELSSA) of contexts of 100,000 tokens and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Score, Topk
from tierloop.devices.regions import Region
from tierloop.runtime.clusters import ClusterIndex, Clustering, check_clusters
from tierloop.runtime.decisions import Question
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import ChosenRows
from tierloop.runtime.policies.split_all import SplitAll
from tierloop.runtime.policy import Batch, Int64, Request, share_above_zero, whole_numbers


class ClusterTopk(SplitAll):
    """Attends about `budget` (0 to 1) of the rows of each KV head; rows are placed like those of split-all."""

    name: ClassVar[str] = "cluster-topk"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        engine: Engine,
        budget: float = 0.1,
        sink_tokens: int = 4,
        recent_tokens: int = 64,
        cluster_tokens: int = 16,
        segment_tokens: int = 8192,
        iterations: int = 10,
        update_tokens: int = 1024,
        dense_layers: int = 0,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(engine, shares)
        share_above_zero(self.name, budget)
        whole_numbers(
            self.name,
            {
                "sink_tokens": (sink_tokens, 0),
                "recent_tokens": (recent_tokens, 1),
                "cluster_tokens": (cluster_tokens, 1),
                "segment_tokens": (segment_tokens, 1),
                "iterations": (iterations, 0),
                "update_tokens": (update_tokens, 1),
                "dense_layers": (dense_layers, 0),
            },
        )
        if segment_tokens < cluster_tokens:
            raise ConfigurationError(
                f"cluster-topk: segment_tokens is {segment_tokens}; "
                f"it must be at least cluster_tokens, which is {cluster_tokens}"
            )
        if budget < 1:
            check_clusters(engine)
        self.budget = budget
        self.dense_layers = int(dense_layers)
        self._how = Clustering(
            *(int(x) for x in (sink_tokens, recent_tokens, segment_tokens, cluster_tokens, iterations, update_tokens))
        )
        self._work: dict[int, Region] = {}

    async def admit(self, request: Request) -> None:
        await super().admit(request)
        if self.budget < 1:
            request.state["clusters"] = ClusterIndex(self.engine, self._how, request.max_tokens, request.name)

    async def prefilled(self, request: Request, layer: int, queries: NDArray[np.float32]) -> None:
        if not self._is_dense(layer):
            index = _index(request)
            index.extend(request.blocks, layer, index.due(layer, int(request.blocks.length[layer]), 1), [])
            await index.settle(layer)

    async def layer_input(self, layer: int, batch: Batch) -> None:
        for ahead in (layer, layer + 1):
            if ahead < self.shape.num_layers and self._is_dense(ahead):
                for request in batch.requests:
                    self._attention.stage(request, ahead)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        appended = self.append(layer, batch)
        if self._is_dense(layer):
            return self._attention.attend(layer, batch, appended)
        for request in batch.requests:
            await _index(request).settle(layer)
        chosen = await self._select(layer, batch) if batch.q_len == 1 else None
        if chosen is not None:
            batch.attended_rows = [_per_head(c, self.shape.num_kv_heads) for c in chosen]
        done = self._attention.attend(layer, batch, appended, chosen)
        for request in batch.requests:
            # Other layers and the next step go on while new rows are clustered.
            index, length = _index(request), int(request.blocks.length[layer])
            index.extend(request.blocks, layer, index.due(layer, length, self._how.update_tokens), [appended])
        return done

    async def release(self, request: Request) -> None:
        index = request.state.get("clusters")
        try:
            if index is not None:
                await index.close()
        finally:
            await super().release(request)

    def _is_dense(self, layer: int) -> bool:
        return self.budget == 1 or layer < self.dense_layers

    async def _select(self, layer: int, batch: Batch) -> list[ChosenRows]:
        """The rows of each request: those that are always attended, and the best clusters of each KV head."""
        shape, dense = self.shape, self.engine.dense
        heads = shape.num_kv_heads
        indexes = [_index(r) for r in batch.requests]
        wanted = [self._wanted(r, layer) for r in batch.requests]
        k = max(
            members.surely(tokens)
            for index, tokens in zip(indexes, wanted, strict=True)
            for members in index.members(layer)
        )
        order = np.empty((len(indexes), heads, 0), dtype=np.int64)
        if k:
            runs = np.array([(i, h, 0) for i in range(len(indexes)) for h in range(heads)], dtype=np.int64)
            lengths = np.repeat(np.array([index.known(layer) for index in indexes], dtype=np.int64), heads)
            centroids = tuple(index.centroids(layer) for index in indexes)
            nbytes = int(lengths.sum()) * 4
            work = self._working_space(layer, nbytes, len(lengths) * k * 8)
            scores, indices = work.at(0, nbytes), work.at(-(-nbytes // 64) * 64, len(lengths) * k * 8)
            score = Score(len(indexes), heads, shape.group, shape.head_dim, "mean", "max", runs)
            done = self.engine.launch(dense, score, ((batch.queries,), centroids), ((scores,),), [batch.ready])
            done = self.engine.launch(dense, Topk(k, lengths), ((scores,),), ((indices,),), [done])
            order = (await self.engine.decide(indices, self._question(layer, batch, lengths, k), [done])).reshape(
                len(indexes), heads, k
            )
        return [self._chosen(r, layer, wanted[i], order[i]) for i, r in enumerate(batch.requests)]

    def _question(self, layer: int, batch: Batch, lengths: Int64, k: int) -> Question:
        """Which clusters? They are no places in the context; `unit` is how many tokens one stands for on average."""
        names, first = tuple(request.name for request in batch.requests), np.full_like(lengths, self._how.first)
        step = int(batch.positions[0, 0])
        return Question("select", layer, names, step, lengths, first, self._how.cluster_tokens, k)

    def _wanted(self, request: Request, layer: int) -> int:
        """Rows that each KV head attends besides those that are always attended."""
        index, length = _index(request), int(request.blocks.length[layer])
        clustered = max(index.end(layer) - self._how.first, 0)
        always = length - clustered
        return min(max(int(np.ceil(self.budget * length)) - always, 0), clustered)

    def _chosen(self, request: Request, layer: int, wanted: int, order: Int64) -> ChosenRows:
        index, length = _index(request), int(request.blocks.length[layer])
        sinks, rest = np.arange(min(self._how.first, length)), np.arange(index.end(layer), length)
        heads, positions = [], []
        for head, members in enumerate(index.members(layer)):
            best = order[head]
            mine = np.concatenate((sinks, members.pick(best[best >= 0], wanted), rest))
            heads.append(np.full(len(mine), head, dtype=np.int64))
            positions.append(mine)
        return ChosenRows(np.concatenate(heads), np.concatenate(positions))

    def _working_space(self, layer: int, scores: int, indices: int) -> Region:
        need = -(-scores // 64) * 64 + indices
        region = self._work.get(layer)
        if region is None or region.nbytes < need:
            if region is not None:
                self.engine.drop(region)
            region = self._work[layer] = self.engine.scratch(self.engine.dense.memory, need * 2)
        return region


def _index(request: Request) -> ClusterIndex:
    index: ClusterIndex = request.state["clusters"]
    return index


def _per_head(chosen: ChosenRows, num_heads: int) -> list[Int64]:
    return [chosen.positions[chosen.heads == head] for head in range(num_heads)]
