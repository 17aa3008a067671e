"""The hierarchical index of KVDrive: which entries of a request are alike, and which of them a query wants first.

An entry (runtime/entries.py) is represented by the mean of its keys, its *chunk mean*; chunk means are grouped by
spherical k-means, and the device that runs the modules keeps the centroids. The prompt's entries are grouped at once,
by segments of `segment_chunks`; entries that fill up later are grouped on their own, `update_tokens` at a time, and
join as further clusters. What is grouped never changes, and where the borders of groups lie depends on the prompt's
length alone: so an index that has grown step by step is the one that had been built of the same groups.

The first `sink_tokens` positions and those that came last, at least `local_tokens` of them, are in no cluster: they are
always attended. Where keys are codes, means are means of codes: queries have the scales in them.

Who calls this: a policy calls `build` for a layer's prompt; then, step by step, `due`, `extend` and `settle`; `rank`
for each step's ranking and `importance` for that of the prompt's last queries. Labels of clusters are decisions
(`Engine.group`) as the order of clusters is (`Engine.decide`), so phantom and replayed runs have an index as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense, Score, Topk
from tierloop.devices.regions import Segment
from tierloop.runtime.attention_mass import AttentionMass
from tierloop.runtime.blocks import K
from tierloop.runtime.centroids import Centroids, Members
from tierloop.runtime.chunk_clusters import ChunkClusters, Started
from tierloop.runtime.chunking import Chunking, Cut
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Work = Callable[[int, int], tuple[Segment, Segment]]
"""Working space where the modules run, for scores and for indices of so many bytes, free until a ranking is over."""


class Group(NamedTuple):
    """Entries that were grouped together: from the end of the group before to below `last`."""

    last: int
    clusters: int


@dataclass
class _Pending:
    """A group under way, of a layer that holds `step` tokens."""

    group: Group
    step: int
    started: Started


class ChunkIndex:
    """Mean keys of a request's entries, grouped by k-means: which entries belong to which centroid.

    Centroids of all layers and the scratch of updates are taken at once where the modules run. Raises TierTooSmall;
    ConfigurationError where the chunks do not fit the request, or the device cannot group them.
    """

    def __init__(self, engine: Engine, how: Chunking, request_name: str, prompt_tokens: int, max_tokens: int) -> None:
        shape = engine.shape
        self.cut = Cut(how, request_name, prompt_tokens, max_tokens)
        self.how = how
        self.request_name = request_name
        self.prompt_tokens = prompt_tokens
        self.first = self.cut.first
        """The first indexed entry, after the sinks."""
        self.engine = engine
        self._clusters = ChunkClusters(engine, self.cut, request_name, how.iterations)
        try:
            self._held = Centroids(engine, self.cut.width, self.first, f"centroids of {request_name}")
        except BaseException:
            self._clusters.close()
            raise
        self._groups: list[list[Group]] = [[] for _ in range(shape.num_layers)]
        self._pending: list[_Pending | None] = [None] * shape.num_layers

    # -- what is indexed ----------------------------------------------------------------------------------------------

    def end(self, layer: int) -> int:
        """The entry after the last indexed one; positions from there on are local."""
        return self._held.end(layer)

    def known(self, layer: int) -> int:
        """Clusters of each KV head."""
        return self._held.known(layer)

    def members(self, layer: int) -> list[Members]:
        """The entries of the clusters, for each KV head: `positions` are numbers of entries."""
        return self._held.members(layer)

    @property
    def placing_nbytes(self) -> int:
        """Bytes that `build` takes for a moment where the modules run: chunk means and labels of a layer."""
        return self.engine.shape.num_kv_heads * self.cut.chunks * (self.engine.shape.head_dim * 4 + 8)

    @property
    def most_clusters(self) -> int:
        """Clusters of a layer and KV head at the end of the request's life."""
        return self.cut.width

    def groups(self, layer: int) -> list[Group]:
        """How the layer's index has grown, in order."""
        return self._groups[layer]

    def centroids(self, layer: int, first: int = 0, count: int | None = None) -> Segment:
        """Centroids [first, first + count) of a layer (default: all), float32, one span for each KV head."""
        return self._held.segment(layer, first, count)

    def order(self, layer: int, first: int, last: int) -> Int64:
        """Indexed entries [first, last) of each KV head, cluster by cluster: int64 (heads, last − first)."""
        end, of_heads = self.end(layer), self.members(layer)
        if not self.first <= first <= last <= end:
            raise ValueError(f"entries [{first}, {last}) of layer {layer}: indexed are [{self.first}, {end})")
        found = np.empty((len(of_heads), last - first), dtype=np.int64)
        for head, members in enumerate(of_heads):
            mine = members.positions
            found[head] = mine[(mine >= first) & (mine < last)]
        return found

    # -- growing ------------------------------------------------------------------------------------------------------

    def due(self, layer: int, length: int) -> int:
        """The entry up to which `extend` could index now that the layer holds `length` tokens.

        Whole entries with `local_tokens` behind them, one update at a time; `end` where less than one is due.
        """
        end = self.end(layer)
        full = self.cut.last(length) - end >= self.cut.update
        return end + self.cut.update if full and self._pending[layer] is None else end

    async def build(self, layer: int, keys: Float32 | None, after: Sequence[Completion] = ()) -> None:
        """Index the prompt's entries: keys as stored, float32 (heads, tokens, head_dim), codes as codes.

        None in a phantom run. Raises TierTooSmall where there is no room for the prompt's chunk means.
        """
        shape = self.engine.shape
        assert not self._groups[layer], "a layer is built once, and first"
        needed = shape.num_kv_heads, self.prompt_tokens, shape.head_dim
        if keys is not None and keys.shape != needed:
            raise ValueError(f"keys of {self.request_name} have shape {keys.shape}; needed is {needed}")
        group = Group(self.first + self.cut.chunks, self.cut.clusters(self.cut.chunks))
        if self.cut.chunks:
            centroids = self.centroids(layer, 0, group.clusters)
            started = self._clusters.of_prompt(self.first, self.cut.chunks, keys, centroids, after)
            self._pending[layer] = _Pending(group, self.prompt_tokens, started)
            await self.settle(layer)

    def extend(self, layer: int, last: int, keys: Operand, after: Sequence[Completion]) -> None:
        """Start to index entries [end, last): `keys` are their K rows where the modules run, head by head.

        At most one update. Raises ValueError for entries or keys that are not the next ones.
        """
        end, known, pending = self.end(layer), self.known(layer), self._pending[layer]
        chunks = last - end
        if pending is not None or not 0 < chunks <= self.cut.update:
            raise ValueError(
                f"{self.request_name}: entries up to {last} of layer {layer} cannot be indexed: {end} are, and "
                f"{'some are under way' if pending else f'at most {self.cut.update} at a time'}"
            )
        group = Group(last, self.cut.clusters(chunks))
        if known + group.clusters > self.cut.width:
            raise ValueError(f"{self.request_name}: there is room for {self.cut.width} clusters of layer {layer}")
        centroids = self.centroids(layer, known, group.clusters)
        started = self._clusters.of_update(layer, end, chunks, keys, centroids, after)
        self._pending[layer] = _Pending(group, last * self.how.chunk_tokens + self.how.local_tokens, started)

    async def settle(self, layer: int) -> tuple[int, int]:
        """Wait for what `extend` has started; the entries [first, last) that are indexed by it."""
        pending, self._pending[layer] = self._pending[layer], None
        first, name = self.end(layer), self.request_name
        if pending is None:
            return first, first
        last, clusters = pending.group
        grouping = Grouping(
            f"clusters {name}", layer, name, pending.step, self.engine.shape.num_kv_heads, last - first, clusters
        )  # fmt: skip
        try:
            labels = await self.engine.group(pending.started.labels, grouping, [pending.started.done])
        finally:
            self._clusters.drop(pending.started.scratch)
        self.add(layer, pending.group, labels)
        return first, last

    def add(self, layer: int, group: Group, labels: Int64) -> None:
        """The next entries of a layer are in these clusters: labels (heads, entries) of each head from 0."""
        self._held.add(layer, labels, group.clusters, group.last)
        self._groups[layer].append(group)

    async def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        try:
            for layer, pending in enumerate(self._pending):
                self._pending[layer] = None
                if pending is not None:
                    try:
                        await pending.started.done
                    finally:
                        self._clusters.drop(pending.started.scratch)
        finally:
            self._clusters.close()
            self._held.close()


async def rank(
    engine: Engine,
    layer: int,
    indexes: Sequence[ChunkIndex],
    queries: Segment,
    ready: Completion,
    wanted: Sequence[int],
    work: Work,
    requests: tuple[str, ...],
    step: int,
    label: str = "select",
) -> list[Int64]:
    """The entries of each request that its queries want first: int64 (heads, wanted), best first, padded with −1.

    Clusters by the product of centroid and query, the largest of the group; their entries in ascending order. `queries`
    float32 (requests, q heads, head_dim) are valid when `ready` has ended. Each KV head has exactly as many entries as
    are wanted, or all that are indexed.

    All requests are one question, named after the first. All lists of a question have one length; where requests differ
    so much that this would take more room than the clusters of all of them together, each is a question of its own. So
    `work` is asked for no more than `most_clusters` of each request and KV head, 4 and 8 bytes each.
    """
    shape = engine.shape
    heads, n = shape.num_kv_heads, len(indexes)
    if len(wanted) != n or len(requests) != n or any(count < 0 for count in wanted):
        raise ValueError(f"{n} indexes of {len(requests)} requests cannot give {list(wanted)} entries")
    needed = [_clusters_needed(layer, [x], [count]) for x, count in zip(indexes, wanted, strict=True)]
    known = [index.known(layer) for index in indexes]
    if not any(needed):
        return [np.full((heads, count), -1, dtype=np.int64) for count in wanted]
    together = n * max(needed) <= sum(known)
    parts = [slice(0, n)] if together else [slice(i, i + 1) for i in range(n) if needed[i]]
    sizes = [(part.stop - part.start) * heads * max(needed[part]) * 8 for part in parts]
    lengths = np.repeat(np.array(known, dtype=np.int64), heads)
    runs = np.array([(i, h, 0) for i in range(n) for h in range(heads)], dtype=np.int64)
    scores, indices = work(int(lengths.sum()) * 4, sum(sizes))
    score = Score(n, heads, shape.group, shape.head_dim, "mean", "max", runs)
    centroids = tuple(index.centroids(layer) for index in indexes)
    scored = engine.stages.mark(
        engine.launch(engine.dense, score, ((queries,), centroids), ((scores,),), [ready]), "select"
    )
    asked = []
    for part, first, nbytes in zip(parts, np.cumsum(sizes) - sizes, sizes, strict=True):
        mine, before = lengths[part.start * heads : part.stop * heads], sum(known[: part.start]) * heads * 4
        question = _question(
            f"{label} {requests[part][0]}", layer, indexes[part], requests[part], step, mine, max(needed[part])
        )
        places = _within(scores, before, int(mine.sum()) * 4), _within(indices, int(first), nbytes)
        asked.append((question, places[1], _sorted(engine, question, *places, scored)))
    orders = [np.empty((heads, 0), dtype=np.int64)] * n
    for part, (question, place, sorted_) in zip(parts, asked, strict=True):
        answer = await engine.decide(place, question, [sorted_])
        orders[part] = list(answer.reshape(-1, heads, question.k))
    return [expand(x.members(layer), order, count) for x, order, count in zip(indexes, orders, wanted, strict=True)]


async def importance(
    engine: Engine,
    layer: int,
    index: ChunkIndex,
    queries: Float32,
    keys: Float32 | None,
    scale: float,
    wanted: int,
    work: Work,
) -> Int64:
    """The entries that the prompt's last queries attend most: int64 (heads, wanted) like `rank`'s.

    `queries` float32 (n, q heads, head_dim), of the last n positions; `keys` as `ChunkIndex.build` takes them. What a
    KV head's queries give to the positions of an entry is summed (softmax over all that they see), and clusters are
    sorted by the mean of their entries. It is a `dense` launch where the modules run: in float64, delivered as float32.
    It is for an index of the prompt alone. Raises ValueError for queries that are not the prompt's.
    """
    heads, tokens = engine.shape.num_kv_heads, index.prompt_tokens
    n, q_heads, head_dim = queries.shape
    if not 0 < n <= tokens or q_heads != heads * engine.shape.group or head_dim != engine.shape.head_dim:
        raise ValueError(
            f"queries of {index.request_name} have shape {queries.shape}; needed is (1 to {tokens}, "
            f"{heads * engine.shape.group}, {engine.shape.head_dim})"
        )
    if keys is not None and keys.shape != (heads, tokens, head_dim):
        raise ValueError(f"keys of {index.request_name} have shape {keys.shape}; needed is {(heads, tokens, head_dim)}")
    if index.end(layer) > index.first + index.cut.chunks:
        raise ValueError(f"layer {layer} of {index.request_name} has entries after the prompt's")
    k = _clusters_needed(layer, [index], [wanted])
    if not k:
        return np.full((heads, wanted), -1, dtype=np.int64)
    lengths = np.full(heads, index.known(layer), dtype=np.int64)
    scores, indices = work(int(lengths.sum()) * 4, heads * k * 8)
    function = None
    if keys is not None:
        mass = AttentionMass(index.how.chunk_tokens, index.members(layer), queries, keys, scale)
        function = mass.store
    products = n * q_heads * tokens
    nbytes = heads * tokens * engine.shape.row_nbytes(K) + queries.size * 4 + scores.spans.nbytes
    args = Dense("warm-up", 2 * products * (head_dim + 1), 0, nbytes, function)
    scored = engine.launch(engine.dense, args, (), ((scores,),), [])
    names = (index.request_name,)
    question = _question(f"warm-up {index.request_name}", layer, [index], names, tokens, lengths, k)
    done = _sorted(engine, question, scores, indices, scored, "warm-up")
    order = await engine.decide(indices, question, [done])
    return expand(index.members(layer), order, wanted)


def expand(members: Sequence[Members], order: Int64, wanted: int) -> Int64:
    """The first `wanted` entries of clusters in the given order, int64 (heads, k): int64 (heads, wanted), −1 padded."""
    found = np.full((len(members), wanted), -1, dtype=np.int64)
    for head, held in enumerate(members):
        best = order[head][order[head] >= 0]
        ends = np.cumsum(held.sizes[best])
        best = best[: int(np.searchsorted(ends, wanted)) + 1]
        sizes, ends = held.sizes[best], ends[: len(best)]
        places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(held.starts[best] - (ends - sizes), sizes)
        mine = held.positions[places[:wanted]]
        found[head, : len(mine)] = mine
    return found


def _clusters_needed(layer: int, indexes: Sequence[ChunkIndex], wanted: Sequence[int]) -> int:
    """How many clusters hold the wanted entries of every request and KV head, whichever they are."""
    return max(
        members.surely(count) for index, count in zip(indexes, wanted, strict=True) for members in index.members(layer)
    )


def _question(
    label: str,
    layer: int,
    indexes: Sequence[ChunkIndex],
    requests: tuple[str, ...],
    step: int,
    lengths: Int64,
    k: int,
) -> Question:
    """A question over clusters: candidates are no places in the context, `unit` is how many tokens one stands for."""
    starts = np.array([index.first * index.how.chunk_tokens for index in indexes], dtype=np.int64)
    unit = max(index.cut.cluster_chunks * index.how.chunk_tokens for index in indexes)
    return Question(label, layer, requests, step, lengths, np.repeat(starts, len(lengths) // len(indexes)), unit, k)


def _sorted(
    engine: Engine, question: Question, scores: Segment, indices: Segment, scored: Completion, stage: str = "select"
) -> Completion:
    """Start to sort the clusters of each list by score, into `indices`: int64 (lists, k)."""
    args = Topk(question.k, question.lengths)
    return engine.stages.mark(engine.launch(engine.dense, args, ((scores,),), ((indices,),), [scored]), stage)


def _within(segment: Segment, offset: int, nbytes: int) -> Segment:
    """Bytes of a segment of one span."""
    return segment.region.at(int(segment.spans.array[0, 0]) + offset, nbytes)
