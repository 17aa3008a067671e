"""Attention of requests whose older rows lie in near memories: clusters there, the rest where the modules run.

For a step of one token the modules' device scores the centroids (softmax over the clusters of a KV head, summed over
the query group), each KV head takes its best `budget` of the clusters, each near device gathers and attends over the
rows that it has of them, while the modules' device attends over sinks, newest rows and rows that are not clustered yet.
States are merged there. With `budget` 1 all clusters are taken and nothing is scored.

Steps of more tokens, chunks of prompts and of later turns, are dense: near devices attend over all of their rows, or
the rows are streamed to where the modules run, a part at a time, whichever the devices estimate to be faster.

A device that fails ends the requests that have rows there (`Request.fail`), and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate
from tierloop.devices.errors import DeviceError, OutOfMemory, Unsupported
from tierloop.devices.kernels.contract import Attend, Score, Topk
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.batch_parts import offset_of, part_of
from tierloop.runtime.blocks import Rows, join
from tierloop.runtime.decisions import Question
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.near_request import NearRequest, roots_of
from tierloop.runtime.near_rows import NearShare, Picked, pick, pick_all
from tierloop.runtime.near_stream import NearStream
from tierloop.runtime.policy import Batch
from tierloop.runtime.scratch import Scratch

Int64 = NDArray[np.int64]
LAYERS_UNDER_WAY = 2


@dataclass
class _Group:
    """Requests that one device attends for, with the same KV heads: numbers in the batch, shares, rows."""

    lane: Lane
    memory: str
    heads: Int64
    members: list[tuple[int, NearShare, Rows, Int64]] = field(default_factory=list)
    """The roots of each are int64 (r, 4) of (number in the batch, KV head, level, index)."""

    @property
    def roots(self) -> Int64:
        """All of them, one request after the other."""
        return np.concatenate([roots for *_, roots in self.members])


@dataclass(frozen=True)
class _Awaited:
    """What was begun for requests, by their numbers, the last of it last; and why it went no further."""

    members: list[int]
    begun: list[Completion]
    error: DeviceError | None


class NearAttention:
    """Attends for requests with rows in near memories; `budget` (0 to 1) of the clusters are taken."""

    def __init__(self, engine: Engine, budget: float, segment_tokens: int) -> None:
        self._engine = engine
        self._budget = budget
        self._scratch = Scratch(engine)
        self._stream = NearStream(engine, segment_tokens, self._scratch)
        self.selected = 0
        """Rows that were taken by their clusters, of all KV heads."""

    async def attend(
        self, layer: int, batch: Batch, appended: Completion, nears: Sequence[NearRequest]
    ) -> list[Completion]:
        """Leave the output of requests with these rows near; returns what comes after it.

        Requests whose devices failed have `failure` set, and no output.
        """
        engine, slot = self._engine, (layer % LAYERS_UNDER_WAY, batch.part)
        streamed = [batch.q_len > 1 and self._is_streamed(layer, batch, i, near) for i, near in enumerate(nears)]
        picked = await self._picked(layer, batch, nears, streamed)
        groups = self._groups(layer, batch, nears, picked)
        here = self._roots_here(batch, nears)
        slices = [(i, part) for i, s in enumerate(streamed) if s for part in self._stream.slices(batch, i, nears[i])]
        tables = [here, *(group.roots for group in groups), *(part.roots for _, part in slices)]
        offsets = np.cumsum([0, *(engine.state_nbytes(len(roots), batch.q_len) for roots in tables)]).tolist()
        home = self._scratch.at("all states", engine.dense.memory, slot, offsets[-1])
        places = [home.region.at(a, b - a) for a, b in pairwise(offsets)]
        done = [self._attend_here(layer, batch, nears, here, places[0], appended)]
        awaited: list[_Awaited] = []
        for group, place in zip(groups, places[1:], strict=False):
            members = [i for i, *_ in group.members]
            awaited.append(self._or_error(self._attend_near, members, batch, group, place, slot))
        for (i, part), place in zip(slices, places[1 + len(groups) :], strict=True):
            awaited.append(self._or_error(self._stream.attend, [i], layer, batch, i, nears[i], part, place))
        lost = await self._settle(batch, awaited)
        if lost:
            tables, places = self._without(lost, tables, places, batch.q_len)
        states = [place for place in places if place.spans.nbytes]
        everything = np.concatenate(tables)
        # What near devices do has ended: what is merged with the modules' own states is there.
        return [engine.merge(states, everything, batch.positions, batch.output, done)] if len(everything) else done

    # -- which rows ---------------------------------------------------------------------------------------------------

    async def _picked(
        self, layer: int, batch: Batch, nears: Sequence[NearRequest], streamed: Sequence[bool]
    ) -> list[list[Picked] | None]:
        """The rows of each request and KV head that near devices attend; None where none are."""
        phantom, found = self._engine.phantom, list[list[Picked] | None]()
        sparse = batch.q_len == 1 and self._budget < 1
        orders = await self._select(layer, batch, nears) if sparse else {}
        for i, near in enumerate(nears):
            members = near.centroids.members(layer)
            first = near.pieces.first
            if streamed[i] or near.end == first:
                found.append(None)
            elif i in orders:
                mine = [pick(m, order, first, phantom) for m, order in zip(members, orders[i], strict=True)]
                self.selected += sum(int(each.counts.sum()) for each in mine)
                if not phantom:
                    batch.attended_rows[i] = self._positions(batch, i, near, mine)
                found.append(mine)
            else:
                segment = near.pieces.segment_tokens
                found.append([pick_all(m, first, near.end, first, segment, phantom) for m in members])
        return found

    async def _select(self, layer: int, batch: Batch, nears: Sequence[NearRequest]) -> dict[int, list[Int64]]:
        """The best clusters of each KV head, best first, of each request that has any."""
        engine, shape = self._engine, self._engine.shape
        heads, slot = shape.num_kv_heads, (layer % LAYERS_UNDER_WAY, batch.part)
        which = [i for i, near in enumerate(nears) if near.centroids.known(layer)]
        if not which:
            return {}
        known = [nears[i].centroids.known(layer) for i in which]
        wanted = [max(round(self._budget * count), 1) for count in known]
        empty = [max(m.num_empty for m in nears[i].centroids.members(layer)) for i in which]
        each = [min(w + e, n) for w, e, n in zip(wanted, empty, known, strict=True)]
        most, lengths = max(each), np.repeat(np.array(known, dtype=np.int64), heads)
        scores = self._scratch.at("scores", engine.dense.memory, slot, int(lengths.sum()) * 4)
        indices = self._scratch.at("indices", engine.dense.memory, slot, len(lengths) * most * 8)
        runs = np.array([(i, h, 0) for i in range(len(which)) for h in range(heads)], dtype=np.int64)
        stores = [nears[i].centroids for i in which]
        args = Score(
            len(which), heads, shape.group, shape.head_dim, "mean", "softmax", runs,
            stores[0].dtype, batch.scale,  # type: ignore[arg-type]  # centroids are of float types
        )  # fmt: skip
        queries = part_of(batch, which).queries
        summaries = tuple(store.segment(layer) for store in stores)
        done = engine.launch(engine.dense, args, ((queries,), summaries), ((scores,),), [batch.ready])
        engine.stages.mark(done, "select")
        done = engine.launch(engine.dense, Topk(most, lengths), ((scores,),), ((indices,),), [done])
        asked = []
        for number, i in enumerate(which):
            name, near = batch.requests[i].name, nears[i]
            first = np.full(heads, near.pieces.first, dtype=np.int64)
            step, mine = int(batch.positions[i, 0]), lengths[number * heads : (number + 1) * heads]
            question = Question(
                f"select {name}", layer, (name,), step, mine, first, near.pieces.cluster_tokens, each[number]
            )
            starts = (number * heads + np.arange(heads, dtype=np.int64)) * most * 8
            asked.append((Segment(indices.region, Spans.equal(starts, each[number] * 8)), question))
        answers = await engine.decide_each(asked, [done])
        orders = {}
        for i, answer, count in zip(which, answers, wanted, strict=True):
            members = nears[i].centroids.members(layer)
            orders[i] = [_some(m.sizes, order[order >= 0], count) for m, order in zip(members, answer, strict=True)]
        return orders

    def _positions(self, batch: Batch, i: int, near: NearRequest, picked: Sequence[Picked]) -> list[Int64]:
        """The positions that each KV head attends, for the oracle."""
        sinks = np.arange(near.pieces.first)
        rest = np.arange(near.end, int(batch.positions[i, -1]) + 1)
        return [np.concatenate((sinks, mine.positions, rest)) for mine in picked]

    # -- here ---------------------------------------------------------------------------------------------------------

    def _roots_here(self, batch: Batch, nears: Sequence[NearRequest]) -> Int64:
        shape = self._engine.shape
        heads, lengths = np.arange(shape.num_kv_heads), (batch.positions[:, -1] + 1).tolist()
        cuts = [near.cut(length, shape.split_tokens) for near, length in zip(nears, lengths, strict=True)]
        return np.concatenate([roots_of(i, heads, cut.here) for i, cut in enumerate(cuts)])

    def _attend_here(
        self,
        layer: int,
        batch: Batch,
        nears: Sequence[NearRequest],
        roots: Int64,
        states: Segment,
        appended: Completion,
    ) -> Completion:
        """Sinks, newest rows, and what is not published yet."""
        engine, shape = self._engine, self._engine.shape
        parts = []
        for i, (request, near) in enumerate(zip(batch.requests, nears, strict=True)):
            count = request.blocks.num_blocks(layer)
            first, end = near.pieces.first // shape.block_tokens, near.end // shape.block_tokens
            blocks = np.concatenate((np.arange(min(first, count)), np.arange(end, count)))
            heads = np.repeat(np.arange(shape.num_kv_heads, dtype=np.int64), len(blocks))
            parts.append(request.blocks.rows(layer, heads, np.tile(blocks, shape.num_kv_heads), i))
        after = [batch.ready, appended]
        return engine.attend(
            engine.dense, batch.queries, join(parts), batch.positions, batch.scale, roots, states, after
        )

    # -- near ---------------------------------------------------------------------------------------------------------

    def _groups(
        self, layer: int, batch: Batch, nears: Sequence[NearRequest], picked: Sequence[list[Picked] | None]
    ) -> list[_Group]:
        groups: dict[tuple[str, bytes], _Group] = {}
        for i, (near, mine) in enumerate(zip(nears, picked, strict=True)):
            if mine is None:
                continue
            cut = near.cut(int(batch.positions[i, -1]) + 1, self._engine.shape.split_tokens)
            for share, nodes in zip(near.rows.shares, cut.shares, strict=True):
                key = (share.near.memory, share.share.heads.tobytes())
                group = groups.setdefault(key, _Group(share.near.lane, share.near.memory, share.share.heads))
                rows = near.rows.operands(share, layer, len(group.members), mine)
                if len(rows.runs):
                    group.members.append((i, share, rows, roots_of(i, share.share.heads, nodes)))
        return [group for group in groups.values() if group.members]

    def _attend_near(
        self, batch: Batch, group: _Group, home: Segment, slot: tuple[int, int], begun: list[Completion]
    ) -> Completion:
        """Queries of the group's heads there, its states back; what comes before that goes to `begun`, too."""
        engine, lane = self._engine, group.lane
        queries = self._queries_of(batch, [i for i, *_ in group.members], group.heads)
        use = f"{group.memory} {int(group.heads[0])}"
        there = self._scratch.at(f"queries {use}", lane.memory, slot, queries.spans.nbytes)
        copied = engine.stages.mark(engine.copy(queries, there, [batch.ready]), "queries")
        begun.append(copied)
        states = self._scratch.at(f"states {use}", lane.memory, slot, home.spans.nbytes)
        launch = self._launch(batch, group, there, states)
        done = engine.stages.mark(lane.submit(launch, [copied]), "near")
        begun.append(done)
        return engine.stages.mark(engine.copy(states, home, [done]), "states")

    def _launch(self, batch: Batch, group: _Group, queries: Segment, states: Segment) -> Launch:
        shape = self._engine.shape
        rows = join([rows for _, _, rows, _ in group.members])
        roots = group.roots.copy()
        numbers = np.repeat(np.arange(len(group.members)), [len(roots) for *_, roots in group.members])
        roots[:, 0], roots[:, 1] = numbers, roots[:, 1] - group.heads[0]
        args = Attend(
            shape.dtype,
            len(group.members),
            len(group.heads),
            shape.group,
            batch.q_len,
            shape.head_dim,
            shape.head_dim_v,
            batch.scale,
            shape.split_tokens,
            rows.runs,
            batch.positions[[i for i, *_ in group.members]],
            roots,
        )
        return Launch(args, ((queries,), rows.keys, rows.values), ((states,),))

    def _queries_of(self, batch: Batch, which: Sequence[int], heads: Int64) -> Segment:
        """The queries of these requests and KV heads, which are neighbours: a span for each new token."""
        shape = self._engine.shape
        row = shape.group * shape.head_dim * 4
        width = shape.num_kv_heads * row * batch.q_len
        offsets = np.concatenate(
            [offset_of(batch.queries, i, width) + np.arange(batch.q_len) * (width // batch.q_len) for i in which]
        )
        return Segment(batch.queries.region, Spans.equal(offsets + int(heads[0]) * row, len(heads) * row))

    def _or_error(self, submit: Callable[..., Completion], members: list[int], *args: Any) -> _Awaited:
        """What is submitted, or why it was not: a device that is gone says so at once."""
        begun: list[Completion] = []
        error = None
        try:
            begun.append(submit(*args, begun))
        except DeviceError as refused:
            error = refused
        return _Awaited(members, begun, error)

    async def _settle(self, batch: Batch, awaited: Sequence[_Awaited]) -> set[int]:
        """Wait for what near devices do; the numbers of requests whose devices failed, which have been told."""
        lost: set[int] = set()
        for each in awaited:
            error = each.error
            if error is None:
                try:
                    await each.begun[-1]
                except DeviceError as failure:
                    error = failure
            if error is not None:
                for completion in each.begun:  # all are looked at: the first to fail is not always the last to tell
                    with suppress(DeviceError):
                        await completion
                for i in each.members:
                    batch.requests[i].fail(error)
                    lost.add(i)
        return lost

    def _without(
        self, lost: set[int], tables: list[Int64], places: list[Segment], q_len: int
    ) -> tuple[list[Int64], list[Segment]]:
        """The states of requests that are left: their roots, and where they lie."""
        size = self._engine.state_nbytes(1, q_len)
        kept, where = [], []
        for roots, place in zip(tables, places, strict=True):
            left = np.flatnonzero(~np.isin(roots[:, 0], list(lost)))
            kept.append(roots[left])
            start = int(place.spans.array[0, 0]) if len(place.spans.array) else 0
            where.append(Segment(place.region, Spans.equal(start + left * size, size)))
        return kept, where

    # -- streamed -----------------------------------------------------------------------------------------------------

    def _is_streamed(self, layer: int, batch: Batch, i: int, near: NearRequest) -> bool:
        """Whether copying all rows is faster than attending to them near the memory, as the devices estimate it."""
        if near.end == near.pieces.first:
            return False
        key = (near.end, batch.q_len)
        if near.streams is None or near.streams[0] != key:
            near.streams = key, self._estimate(layer, batch, i, near)
        return near.streams[1]

    def _estimate(self, layer: int, batch: Batch, i: int, near: NearRequest) -> bool:
        members, first, segment = near.centroids.members(layer), near.pieces.first, near.pieces.segment_tokens
        everything = [pick_all(m, first, near.end, first, segment, True) for m in members]
        one = replace(batch, requests=[batch.requests[i]], positions=batch.positions[i : i + 1])
        near_ns = 0
        for group in self._groups(layer, one, [near], [everything]):
            try:
                estimate = self._estimate_near(one, group)
            except (Unsupported, OutOfMemory):
                return True
            except DeviceError:
                return False  # whoever attends will hear of it
            near_ns = max(near_ns, estimate.duration_ns)
        return self._stream.estimate_ns(layer, near) < near_ns

    def _estimate_near(self, one: Batch, group: _Group) -> Estimate:
        """What attending over the rows of one request near the memory would take. Raises a DeviceError."""
        memory, needed = group.lane.memory, self._queries_of(one, [0], group.heads).spans.nbytes
        queries = self._scratch.at("queries", memory, "estimate", needed)
        nbytes = self._engine.state_nbytes(len(group.roots), one.q_len)
        states = self._scratch.at("states", memory, "estimate", nbytes)
        return group.lane.device.estimate(self._launch(one, group, queries, states), group.lane.queue)


def _some(sizes: Int64, order: Int64, count: int) -> Int64:
    """The first `count` clusters that have rows."""
    return order[sizes[order] > 0][:count]
