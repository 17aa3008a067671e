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
from copy import copy
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Cluster, Dense, KernelArgs, Score, Topk, num_clusters
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K
from tierloop.runtime.clusters import Members
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.dtypes import from_bytes
from tierloop.runtime.engine import Engine

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Work = Callable[[int, int], tuple[Segment, Segment]]
"""Working space where the modules run, for scores and for indices of so many bytes, free until a ranking is over."""

CHUNKS_PER_CENTROID = 4
"""Where `centroids` is 0: 120K tokens in chunks of 4 have 8,192 centroids in the paper, 60K have 4,096 (§1.2.7)."""
MOST_CENTROIDS = 8192
"""Where `centroids` is 0: the largest index that the paper tries."""


@dataclass(frozen=True)
class Chunking:
    """How a request's keys are cut into chunks and grouped.

    `centroids` are those of each KV head for the prompt, at most; 0 stands for a quarter of the prompt's chunks, and no
    more than `MOST_CENTROIDS`. Later chunks have as many for their number. Raises ConfigurationError.
    """

    chunk_tokens: int = 4
    sink_tokens: int = 4
    local_tokens: int = 64
    update_tokens: int = 256
    centroids: int = 0
    segment_chunks: int = 8192
    iterations: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = int(field.name in ("chunk_tokens", "update_tokens", "segment_chunks"))
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
                raise ConfigurationError(f"{field.name} is {value!r}; it must be a whole number of at least {least}")


@dataclass
class _Pending:
    """Entries that are being grouped: their labels, when `done` has ended; `scratch` is given back then."""

    labels: Segment
    done: Completion
    last: int
    clusters: int
    step: int
    scratch: list[Region]


@dataclass
class _Layer:
    """One layer's index: entries up to `end` are in `known` clusters of each KV head."""

    end: int
    members: list[Members]
    known: int = 0
    pending: _Pending | None = None


class ChunkIndex:
    """Mean keys of a request's entries, grouped by k-means: which entries belong to which centroid.

    Centroids of all layers and the scratch of updates are taken at once where the modules run. Raises TierTooSmall;
    ConfigurationError where the chunks do not fit the request, or the device cannot group them.
    """

    def __init__(self, engine: Engine, how: Chunking, request_name: str, prompt_tokens: int, max_tokens: int) -> None:
        _check_device(engine)
        shape = engine.shape
        if how.chunk_tokens > max_tokens:
            raise ConfigurationError(
                f"{request_name}: chunk_tokens is {how.chunk_tokens}, but the context has no more than {max_tokens} "
                f"tokens"
            )
        self.how = how
        self.request_name = request_name
        self.prompt_tokens = prompt_tokens
        self.first = -(-how.sink_tokens // how.chunk_tokens)
        """The first indexed entry, after the sinks."""
        self._engine = engine
        chunks = max(self._last_of(prompt_tokens) - self.first, 0)
        if how.centroids > chunks:
            raise ConfigurationError(
                f"{request_name}: centroids is {how.centroids}, but the prompt of {prompt_tokens} tokens has only "
                f"{chunks} chunks of {how.chunk_tokens} tokens between its sinks and its local tokens"
            )
        wanted = how.centroids or min(-(-chunks // CHUNKS_PER_CENTROID), MOST_CENTROIDS)
        self._chunks_of_prompt = chunks
        self.cluster_chunks = -(-chunks // wanted) if wanted else CHUNKS_PER_CENTROID
        """Chunks of a cluster, on average: so many for each centroid that there are no more of these than asked for."""
        self._update = -(-how.update_tokens // how.chunk_tokens)
        heads, row = shape.num_kv_heads, shape.head_dim * 4
        updates = max(self._last_of(max_tokens) - self.first - chunks, 0) // self._update
        self._width = self._clusters_of(chunks) + updates * self._clusters_of(self._update)
        update = heads * min(self._update, max_tokens // how.chunk_tokens)
        self._regions: list[Region] = []
        try:
            what = f"centroids of {request_name}"
            self._centroids = self._claim(shape.num_layers * heads * self._width * row, what)
            self._means = self._claim(update * row, f"chunk means of {request_name}")
            self._labels = self._claim(shape.num_layers * update * 8, f"labels of {request_name}")
        except BaseException:
            self._drop(self._regions)
            raise
        self._labels_nbytes = update * 8
        self._means_free: list[Completion] = []
        nobody = Members()
        self._layers = [_Layer(self.first, [nobody] * heads) for _ in range(shape.num_layers)]
        self._same: tuple[Members, Int64, int, int, Members] | None = None

    # -- what is indexed ----------------------------------------------------------------------------------------------

    def end(self, layer: int) -> int:
        """The entry after the last indexed one; positions from there on are local."""
        return self._layers[layer].end

    def known(self, layer: int) -> int:
        """Clusters of each KV head."""
        return self._layers[layer].known

    def members(self, layer: int) -> list[Members]:
        """The entries of the clusters, for each KV head: `positions` are numbers of entries."""
        return self._layers[layer].members

    @property
    def most_clusters(self) -> int:
        """Clusters of a layer and KV head at the end of the request's life."""
        return self._width

    def centroids(self, layer: int, first: int = 0, count: int | None = None) -> Segment:
        """Centroids [first, first + count) of a layer (default: all), float32, one span for each KV head."""
        row, heads = self._engine.shape.head_dim * 4, self._engine.shape.num_kv_heads
        count = self._layers[layer].known - first if count is None else count
        offsets = ((layer * heads + np.arange(heads, dtype=np.int64)) * self._width + first) * row
        return Segment(self._centroids, Spans.equal(offsets, count * row))

    def order(self, layer: int, first: int, last: int) -> Int64:
        """Indexed entries [first, last) of each KV head, cluster by cluster: int64 (heads, last − first)."""
        held = self._layers[layer]
        if not self.first <= first <= last <= held.end:
            raise ValueError(f"entries [{first}, {last}) of layer {layer}: indexed are [{self.first}, {held.end})")
        rows = [m.positions[(m.positions >= first) & (m.positions < last)] for m in held.members]
        return np.stack(rows)

    # -- growing ------------------------------------------------------------------------------------------------------

    def due(self, layer: int, length: int) -> int:
        """The entry up to which `extend` could index now that the layer holds `length` tokens.

        Whole entries with `local_tokens` behind them, one update at a time; `end` where less than one is due.
        """
        held = self._layers[layer]
        full = self._last_of(length) - held.end >= self._update
        return held.end + self._update if full and held.pending is None else held.end

    async def build(self, layer: int, keys: Float32 | None, after: Sequence[Completion] = ()) -> None:
        """Index the prompt's entries: keys as stored, float32 (heads, tokens, head_dim), codes as codes.

        None in a phantom run. Raises TierTooSmall where there is no room for the prompt's chunk means.
        """
        engine, shape, held = self._engine, self._engine.shape, self._layers[layer]
        assert held.pending is None, "a layer is built once"
        assert held.end == self.first, "a layer is built once"
        chunks, c = self._chunks_of_prompt, self.how.chunk_tokens
        if keys is not None and keys.shape != (shape.num_kv_heads, self.prompt_tokens, shape.head_dim):
            raise ValueError(
                f"keys of {self.request_name} have shape {keys.shape}; needed is "
                f"{(shape.num_kv_heads, self.prompt_tokens, shape.head_dim)}"
            )
        if not chunks:
            return
        rows = shape.num_kv_heads * chunks
        scratch: list[Region] = []
        try:
            for nbytes, what in ((rows * shape.head_dim * 4, "chunk means"), (rows * 8, "labels")):
                scratch.append(engine.claim(engine.dense.memory, nbytes, f"{what} of {self.request_name}"))
            means = scratch[0].at(0, rows * shape.head_dim * 4)
            if keys is None:
                stored = np.zeros(means.spans.nbytes, dtype=np.uint8)
            else:
                entries = keys[:, self.first * c : (self.first + chunks) * c]
                stored = _means(entries.reshape(shape.num_kv_heads, chunks, c, -1)).view(np.uint8).reshape(-1)
            written = engine.write(means, stored, after)
        except BaseException:
            self._drop(scratch)
            raise
        self._group(layer, self.first + chunks, means, scratch[1].at(0, rows * 8), [written], scratch)
        await self.settle(layer)

    def extend(self, layer: int, last: int, keys: Operand, after: Sequence[Completion]) -> None:
        """Start to index entries [end, last): `keys` are their K rows where the modules run, head by head.

        At most one update. Raises ValueError for entries or keys that are not the next ones.
        """
        engine, shape, held = self._engine, self._engine.shape, self._layers[layer]
        n, heads, c = last - held.end, shape.num_kv_heads, self.how.chunk_tokens
        if held.pending is not None or not 0 < n <= self._update:
            raise ValueError(
                f"{self.request_name}: entries up to {last} of layer {layer} cannot be indexed: {held.end} are, and "
                f"{'some are under way' if held.pending else f'at most {self._update} at a time'}"
            )
        if held.known + self._clusters_of(n) > self._width:
            raise ValueError(f"{self.request_name}: there is room for {self._width} clusters of layer {layer}")
        nbytes, rows = sum(s.spans.nbytes for s in keys), heads * n
        if nbytes != rows * c * shape.row_nbytes(K):
            raise ValueError(f"keys have {nbytes} bytes; {n} entries have {rows * c * shape.row_nbytes(K)}")

        def average(reads: list[Bytes], writes: list[Bytes]) -> None:
            stored = from_bytes(reads[0], shape.dtype).reshape(heads, n, c, -1)
            writes[0][:] = _means(stored).view(np.uint8).reshape(-1)

        means = self._means.at(0, rows * shape.head_dim * 4)
        args = Dense("chunk means", rows * c * shape.head_dim, 0, nbytes + means.spans.nbytes, average)
        made = engine.launch(engine.dense, args, (keys,), ((means,),), [*after, *self._means_free])
        labels = self._labels.at(layer * self._labels_nbytes, rows * 8)
        self._means_free = [self._group(layer, last, means, labels, [made], [])]

    async def settle(self, layer: int) -> tuple[int, int]:
        """Wait for what `extend` has started; the entries [first, last) that are indexed by it."""
        held = self._layers[layer]
        pending, held.pending = held.pending, None
        if pending is None:
            return held.end, held.end
        first, heads = held.end, len(held.members)
        name = self.request_name
        grouping = Grouping(
            f"clusters {name}", layer, name, pending.step, heads, pending.last - first, pending.clusters
        )  # fmt: skip
        try:
            labels = await self._engine.group(pending.labels, grouping, [pending.done])
        finally:
            self._drop(pending.scratch)
        held.members = [self._grown(m, labels[h], first, pending.clusters) for h, m in enumerate(held.members)]
        held.end, held.known = pending.last, held.known + pending.clusters
        return first, held.end

    async def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        try:
            for held in self._layers:
                if held.pending is not None:
                    pending, held.pending = held.pending, None
                    try:
                        await pending.done
                    finally:
                        self._drop(pending.scratch)
        finally:
            self._drop(self._regions)

    def _group(
        self, layer: int, last: int, means: Segment, labels: Segment, after: list[Completion], scratch: list[Region]
    ) -> Completion:
        """Start k-means over chunk means of entries [end, last), one span of all heads; `scratch` goes when it ends.

        The kernel counts centroids over the whole launch; labels count those of their head.
        """
        engine, shape, held = self._engine, self._engine.shape, self._layers[layer]
        heads, n = shape.num_kv_heads, last - held.end
        count = self._clusters_of(n)
        row = n * shape.head_dim * 4
        start = int(means.spans.array[0, 0])
        keys = Segment(means.region, Spans.equal(start + np.arange(heads, dtype=np.int64) * row, row))
        runs = np.array([(0, head, held.end) for head in range(heads)], dtype=np.int64)
        args = Cluster(
            "float32", 1, heads, shape.head_dim, runs, self._segment, self.cluster_chunks, self.how.iterations
        )  # fmt: skip
        writes = ((self.centroids(layer, held.known, count),), (labels,))
        done = engine.stages.mark(engine.launch(engine.dense, args, ((keys,),), writes, after), "index")

        def of_heads(reads: list[Bytes], writes: list[Bytes]) -> None:
            of_launch = np.ascontiguousarray(reads[0]).view(np.int64).reshape(heads, n)
            mine = of_launch - np.arange(heads, dtype=np.int64)[:, None] * count
            writes[0][:] = mine.view(np.uint8).reshape(-1)

        relabel = Dense("index", heads * n, 0, 2 * labels.spans.nbytes, of_heads)
        done = engine.launch(engine.dense, relabel, ((labels,),), ((labels,),), [done])
        step = max(self.prompt_tokens, last * self.how.chunk_tokens + self.how.local_tokens)
        held.pending = _Pending(labels, done, last, count, step, scratch)
        return done

    def _grown(self, members: Members, labels: Int64, first: int, count: int) -> Members:
        """Members with `count` more clusters. Lists that are the same (in phantom runs) are one object."""
        same = self._same
        if same is not None and same[0] is members and same[2:4] == (first, count) and np.array_equal(same[1], labels):
            return same[4]
        grown = copy(members)
        grown.add(labels, first, count)
        self._same = members, labels.copy(), first, count, grown
        return grown

    @property
    def _segment(self) -> int:
        return max(self.how.segment_chunks, self.cluster_chunks)

    def _clusters_of(self, chunks: int) -> int:
        return num_clusters(chunks, self._segment, self.cluster_chunks)

    def _last_of(self, length: int) -> int:
        """The entry after the last one that is full and has `local_tokens` behind it."""
        return max(length - self.how.local_tokens, 0) // self.how.chunk_tokens

    def _claim(self, nbytes: int, what: str) -> Region:
        region = self._engine.claim(self._engine.dense.memory, max(nbytes, 1), what)
        self._regions.append(region)
        return region

    def _drop(self, regions: list[Region]) -> None:
        while regions:
            self._engine.drop(regions.pop())


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
    """
    shape = engine.shape
    heads, n = shape.num_kv_heads, len(indexes)
    k = _clusters_needed(layer, indexes, wanted)
    if not k:
        return [np.full((heads, count), -1, dtype=np.int64) for count in wanted]
    lengths = np.repeat(np.array([index.known(layer) for index in indexes], dtype=np.int64), heads)
    runs = np.array([(i, h, 0) for i in range(n) for h in range(heads)], dtype=np.int64)
    scores, indices = work(int(lengths.sum()) * 4, len(lengths) * k * 8)
    score = Score(n, heads, shape.group, shape.head_dim, "mean", "max", runs)
    centroids = tuple(index.centroids(layer) for index in indexes)
    scored = engine.stages.mark(
        engine.launch(engine.dense, score, ((queries,), centroids), ((scores,),), [ready]), "select"
    )
    question = _question(f"{label} {requests[0]}", layer, indexes, requests, step, lengths, k)
    order = (await _sorted(engine, question, scores, indices, scored)).reshape(n, heads, k)
    return [expand(x.members(layer), order[i], wanted[i]) for i, x in enumerate(indexes)]


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
    """
    k = _clusters_needed(layer, [index], [wanted])
    heads, tokens = engine.shape.num_kv_heads, index.prompt_tokens
    if not k:
        return np.full((heads, wanted), -1, dtype=np.int64)
    lengths = np.full(heads, index.known(layer), dtype=np.int64)
    scores, indices = work(int(lengths.sum()) * 4, heads * k * 8)
    function = None
    if keys is not None:
        mass = _Mass(index.how.chunk_tokens, index.members(layer), queries, keys, scale)
        function = mass.store
    n, q_heads, head_dim = queries.shape
    products = n * q_heads * tokens
    nbytes = heads * tokens * engine.shape.row_nbytes(K) + queries.size * 4 + scores.spans.nbytes
    args: KernelArgs = Dense("warm-up", 2 * products * (head_dim + 1), 0, nbytes, function)
    scored = engine.launch(engine.dense, args, (), ((scores,),), [])
    names = (index.request_name,)
    question = _question(f"warm-up {index.request_name}", layer, [index], names, tokens, lengths, k)
    order = await _sorted(engine, question, scores, indices, scored, "warm-up")
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


class _Mass:
    """The attention that a prompt's last queries give to each cluster: its function, with what it needs."""

    def __init__(
        self, chunk_tokens: int, members: Sequence[Members], queries: Float32, keys: Float32, scale: float
    ) -> None:
        self._chunk, self._members = chunk_tokens, members
        self._queries, self._keys, self._scale = queries, keys, scale

    def store(self, _: list[Bytes], writes: list[Bytes]) -> None:
        """float32 (heads, clusters): the mean of a cluster's entries, 0 where it has none."""
        means = []
        for head, held in enumerate(self._members):
            of_entry = self._of_entries(head)
            labels = np.repeat(np.arange(len(held.sizes)), held.sizes)
            sums = np.bincount(labels, of_entry[held.positions], minlength=len(held.sizes))
            means.append(sums / np.maximum(held.sizes, 1))
        writes[0][:] = np.concatenate(means).astype(np.float32).view(np.uint8)

    def _of_entries(self, head: int) -> NDArray[np.float64]:
        """What the queries of one KV head give to each entry, summed over queries and group."""
        tokens, group = self._keys.shape[1], self._queries.shape[1] // len(self._keys)
        keys = self._keys[head].astype(np.float64)
        total = np.zeros(tokens)
        first = tokens - len(self._queries)
        for number, query in enumerate(self._queries):
            seen = first + number + 1
            mine = query[head * group : (head + 1) * group].astype(np.float64)
            logits = self._scale * (mine @ keys[:seen].T)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            total[:seen] += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
        return np.add.reduceat(total, np.arange(0, tokens, self._chunk))


def _check_device(engine: Engine) -> None:
    executor = engine.dense.executor
    for kernel in ("cluster", "score", "topk"):
        if kernel not in executor.kernels or (executor.dtypes and "float32" not in executor.dtypes):
            raise ConfigurationError(
                f"{engine.dense.device.info.name} runs the modules, so it has to keep the index, but it does not offer "
                f"{kernel} for float32"
            )


def _means(chunks: Float32) -> Float32:
    """float32 (heads, chunks, tokens, head_dim) → means over the tokens, float64 sums rounded once."""
    return np.ascontiguousarray(chunks.mean(axis=2, dtype=np.float64), dtype=np.float32)


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
    unit = max(index.cluster_chunks * index.how.chunk_tokens for index in indexes)
    return Question(label, layer, requests, step, lengths, np.repeat(starts, len(lengths) // len(indexes)), unit, k)


async def _sorted(
    engine: Engine, question: Question, scores: Segment, indices: Segment, scored: Completion, stage: str = "select"
) -> Int64:
    """The clusters of each list by score: int64 (lists, k)."""
    args = Topk(question.k, question.lengths)
    done = engine.launch(engine.dense, args, ((scores,),), ((indices,),), [scored])
    return await engine.decide(indices, question, [engine.stages.mark(done, stage)])
