"""Attention where the rows lie: every device that can attend takes the rows that it reaches, and the states are merged.

Rows on a memory that nobody attends over (a drive) are staged first, in the host's memory, one layer ahead. Queries go
to each executor's own memory, states come back to where the modules run, and the merge kernel joins them there. All of
it is ordered by completions alone, so every device works at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, K, Places, Pool, Rows, V, join
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.policy import Batch, Request
from tierloop.runtime.scratch import Scratch

Int64 = NDArray[np.int64]
Chosen = tuple[Int64, Int64]
"""(heads, blocks), sorted by head, then block; int64 (n,) each."""


class ChosenRows(NamedTuple):
    """Single rows, sorted by head, then position; int64 (n,) each."""

    heads: Int64
    positions: Int64

    def blocks(self, block_tokens: int) -> Chosen:
        """The blocks that the rows lie in."""
        block = self.positions // block_tokens
        first = np.ones(len(block), dtype=bool)
        first[1:] = (self.heads[1:] != self.heads[:-1]) | (block[1:] != block[:-1])
        return self.heads[first], block[first]


@dataclass(frozen=True, eq=False)
class _Growing:
    """A request's rows up to the end of its newest block, `num_tokens` of them, and the last run of each KV head."""

    rows: Rows
    last: Int64
    num_tokens: int

    def up_to(self, num_tokens: int, row_nbytes: tuple[int, int]) -> Rows:
        """Without the rows that are not there yet."""
        missing = self.num_tokens - num_tokens
        if not missing:
            return self.rows
        sides = []
        for (segment,), size in zip((self.rows.keys, self.rows.values), row_nbytes, strict=True):
            spans = segment.spans.array.copy()
            spans[self.last, 1] -= missing * size
            sides.append((Segment(segment.region, Spans(spans)),))
        return Rows(self.rows.runs, sides[0], sides[1])


@dataclass
class _Share:
    """What one lane attends in one layer: per request of the batch its blocks, and the roots that it returns.

    `picked` holds the rows of requests of which single rows are attended, `kept` the operands of requests whose rows
    here do not change from step to step.
    """

    lane: Lane
    chosen: dict[int, Chosen] = field(default_factory=dict)
    picked: dict[int, ChosenRows] = field(default_factory=dict)
    roots: Int64 = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))
    kept: dict[int, Rows] = field(default_factory=dict)
    growing: dict[int, _Growing] = field(default_factory=dict)


@dataclass
class _Far:
    """Blocks of a request and layer that nobody attends over: where they go in its staging half, and the copies.

    Sorted by head, then block; `offsets` are int64 [side, n].
    """

    heads: Int64
    blocks: Int64
    offsets: Int64
    copies: list[tuple[Lane, Copy]]


class InPlaceAttention:
    """Attends over the chosen blocks or rows of each request of a batch, wherever they lie.

    What is staged is staged by block, whichever rows of it are attended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[str, Lane | None] = {}
        self._scratch = Scratch(engine)
        self._plans: dict[tuple[int, int], tuple[object, list[_Share]]] = {}
        self._fars: dict[tuple[str, int], tuple[object, _Far | None]] = {}
        self._staged: dict[tuple[str, int], tuple[_Far, list[Completion]]] = {}
        self._readers: dict[tuple[str, int], list[Completion]] = {}
        """Who reads each half of a request's staging last: a new copy comes after it."""

    def check(self, memories: list[str]) -> None:
        """Raise ConfigurationError unless rows on each memory can be attended over, in place or staged."""
        host, dtype = self._engine.host, self._engine.shape.dtype
        for memory in memories:
            if self.lane(memory) is not None:
                continue
            if self.lane(host) is None:
                staged = "" if memory == host else f", nor over {host}, where its rows would be staged"
                raise ConfigurationError(f"nobody attends over {dtype} rows on {memory}{staged}")
            if self._engine.mover(memory, host) is None:
                raise ConfigurationError(f"nobody attends over {memory}, and nobody copies it to {host}")

    def lane(self, memory: str) -> Lane | None:
        """Who attends over rows of a memory; None where they have to be staged."""
        if memory not in self._lanes:
            self._lanes[memory] = self._engine.runner("attend", memory)
        return self._lanes[memory]

    def staging(self, num_blocks: int, memories: list[str]) -> Pool:
        """Host memory for two layers of `num_blocks` staged blocks (K and V, all heads), in slots for these memories.

        Whoever asks keeps it in `request.state["staging"]` and gives it back. Raises TierTooSmall.
        """
        grid = 1
        for memory in memories:
            info = self._engine.platform.memory_owner(memory).info.memory(memory)
            grid = max(grid, info.alignment if info else 1)
        shape = self._engine.shape
        slots = 2 * 2 * shape.num_kv_heads * num_blocks
        return self._engine.pool(self._engine.host, slots, -(-shape.block_nbytes // grid) * grid)

    def stage(self, request: Request, layer: int, chosen: Chosen | None = None) -> None:
        """Start copying the chosen blocks that nobody attends over to the host; does nothing for the others."""
        if (request.name, layer) in self._staged:
            return
        far = self._far(request, layer, chosen)
        if far is not None:
            readers = self._readers.get((request.name, layer % 2), [])
            done = [lane.submit(copy, readers) for lane, copy in far.copies]
            self._staged[request.name, layer] = (far, done)

    def attend(
        self,
        layer: int,
        batch: Batch,
        appended: Completion,
        chosen: Sequence[Chosen | ChosenRows] | None = None,
    ) -> list[Completion]:
        """Attend over the chosen blocks or rows of each request (default: all), the newest rows after `appended`.

        Returns what comes after the output.
        """
        engine, shape = self._engine, self._engine.shape
        blocks, picked = None, {}
        if chosen is not None:
            picked = {i: each for i, each in enumerate(chosen) if isinstance(each, ChosenRows)}
            blocks = [each.blocks(shape.block_tokens) if isinstance(each, ChosenRows) else each for each in chosen]
        for i, request in enumerate(batch.requests):
            self.stage(request, layer, blocks[i] if blocks is not None else None)
        shares = self._plan(layer, batch, blocks, picked)
        roots = shares[0].roots if len(shares) == 1 else np.concatenate([s.roots for s in shares])
        slot = layer, batch.part
        state_nbytes = engine.state_nbytes(len(roots), batch.q_len)
        at_home = self._scratch.at("all states", engine.dense.memory, slot, state_nbytes).region
        first_new = (batch.positions[:, 0] // shape.block_tokens).tolist()
        queries: dict[str, tuple[Segment, list[Completion]]] = {}
        ended: list[Completion] = []
        offset = 0
        for share in shares:
            lane, nbytes = share.lane, engine.state_nbytes(len(share.roots), batch.q_len)
            home = at_home.at(offset, nbytes)
            offset += nbytes
            if lane.memory not in queries:
                queries[lane.memory] = self._queries(lane, layer, batch)
            query, ready = queries[lane.memory]
            parts, after, staged = [], list(ready), []
            for i in sorted(share.chosen):
                rows, copies, newest = self._rows(share, i, batch.requests[i], layer, first_new[i])
                parts.append(rows)
                after.extend(copies)
                if newest:
                    after.append(appended)
                if copies:
                    staged.append(batch.requests[i].name)
            here = lane.device is engine.dense.device
            states = home if here else self._scratch.at("states", lane.memory, slot, nbytes)
            done = engine.attend(lane, query, join(parts), batch.positions, batch.scale, share.roots, states, after)
            for name in staged:
                self._readers[name, layer % 2] = [done]
            ended.append(done if here else engine.copy(states, home, [done]))
        for request in batch.requests:
            self._staged.pop((request.name, layer), None)
        return [engine.merge([at_home.at(0, offset)], roots, batch.positions, batch.output, ended)]

    # -- plans ----------------------------------------------------------------------------------------------------

    def _plan(
        self, layer: int, batch: Batch, chosen: list[Chosen] | None, picked: dict[int, ChosenRows]
    ) -> list[_Share]:
        """Divide the blocks over lanes; where all are attended, the plan is kept until a block moves or comes."""
        key = tuple((r.blocks, r.blocks.version, r.blocks.num_blocks(layer)) for r in batch.requests)
        slot = layer, batch.part
        if chosen is None and slot in self._plans and self._plans[slot][0] == key:
            return self._plans[slot][1]
        shares: dict[str, _Share] = {}
        for i, request in enumerate(batch.requests):
            heads, blocks = chosen[i] if chosen is not None else request.blocks.all_blocks(layer)
            lanes, which = self._lanes_of(request.blocks, request.blocks.places(layer, heads, blocks))
            for lane in dict.fromkeys(lanes):
                mine = np.isin(which, [number for number, each in enumerate(lanes) if each is lane])
                share = shares.setdefault(lane.memory, _Share(lane))
                share.chosen[i] = (heads[mine], blocks[mine])
                if i in picked:
                    share.picked[i] = self._of_blocks(request, picked[i], share.chosen[i])
        planned = list(shares.values())
        splits = [self._splits(share, batch, layer) for share in planned]
        for share, held in zip(planned, splits, strict=True):
            others: dict[tuple[int, int], Int64] = {}
            for theirs in splits:
                if theirs is not held:
                    for where, ids in theirs.items():
                        others[where] = np.sort(np.concatenate((others[where], ids))) if where in others else ids
            share.roots = self._engine.roots(held, others)
        if chosen is None:
            self._plans[slot] = (key, planned)
        return planned

    def _of_blocks(self, request: Request, picked: ChosenRows, chosen: Chosen) -> ChosenRows:
        """The rows that lie in the chosen blocks."""
        width, block_tokens = request.blocks.pool.shape[3], self._engine.shape.block_tokens
        wanted = chosen[0] * width + chosen[1]
        mine = np.isin(picked.heads * width + picked.positions // block_tokens, wanted)
        return ChosenRows(picked.heads[mine], picked.positions[mine])

    def _splits(self, share: _Share, batch: Batch, layer: int) -> dict[tuple[int, int], Int64]:
        shape = self._engine.shape
        per_block = np.arange(shape.block_tokens // shape.split_tokens)
        found: dict[tuple[int, int], Int64] = {}
        for i, (heads, blocks) in share.chosen.items():
            if i in share.picked:
                of_row = share.picked[i]
                for head in np.unique(heads).tolist():
                    found[i, head] = np.unique(of_row.positions[of_row.heads == head] // shape.split_tokens)
                continue
            length = int(batch.requests[i].blocks.length[layer])
            for head in np.unique(heads).tolist():
                ids = (blocks[heads == head][:, None] * len(per_block) + per_block).ravel()
                found[i, head] = ids[ids * shape.split_tokens < length]
        return found

    def _lanes_of(self, table: BlockTable, places: Places) -> tuple[list[Lane], Int64]:
        """Lanes, and the number of each block's: its keys' runner, or the host's where keys or values are staged."""
        many = len(table.pools)
        pairs, first, which = np.unique(
            places.pools[0].astype(np.int64) * many + places.pools[1], return_index=True, return_inverse=True
        )
        order = np.argsort(first)  # lanes come in the order of the blocks
        lanes: list[Lane] = []
        for k, v in [divmod(pair, many) for pair in pairs[order].tolist()]:
            near = self.lane(table.pools[k].memory), self.lane(table.pools[v].memory)
            lane = near[0] if None not in near else self.lane(self._engine.host)
            if lane is None:
                raise ConfigurationError(f"nobody attends over {self._engine.host}, where far rows are staged")
            if None not in near and not lane.reaches(table.pools[v].memory):
                raise ConfigurationError(
                    f"{lane.device.info.name} attends over keys on {table.pools[k].memory}, "
                    f"but does not reach their values on {table.pools[v].memory}"
                )
            lanes.append(lane)
        return lanes, np.argsort(order)[which]

    # -- rows -----------------------------------------------------------------------------------------------------

    def _rows(
        self, share: _Share, i: int, request: Request, layer: int, first_new: int
    ) -> tuple[Rows, list[Completion], bool]:
        """A request's rows for a lane, the copies that bring them, and whether the newest rows are among them."""
        heads, blocks = share.chosen[i]
        far, copies = self._staged.get((request.name, layer), (None, []))
        if share.lane is not self.lane(self._engine.host):
            far, copies = None, []
        newest = bool((blocks >= first_new).any())
        if i in share.kept:
            return share.kept[i], copies, False
        if i in share.picked:
            heads, positions = share.picked[i]
            places = self._places(request, layer, heads, positions // self._engine.shape.block_tokens, far)
            return request.blocks.single_rows(layer, heads, positions, i, places), copies, newest
        if newest and far is None:
            growing = share.growing.get(i) or self._growing(share, i, request, layer)
            if growing is not None:
                length, shape = int(request.blocks.length[layer]), self._engine.shape
                return growing.up_to(length, (shape.row_nbytes(K), shape.row_nbytes(V))), copies, True
        rows = request.blocks.rows(layer, heads, blocks, i, self._places(request, layer, heads, blocks, far))
        if not newest:
            share.kept[i] = rows
        return rows, copies, newest

    def _growing(self, share: _Share, i: int, request: Request, layer: int) -> _Growing | None:
        """The rows as they will be when the newest block is full; None where they are not all in one place."""
        heads, blocks = share.chosen[i]
        last_block = request.blocks.num_blocks(layer) - 1
        if int((blocks == last_block).sum()) != len(np.unique(heads)):
            return None
        num_tokens = (last_block + 1) * self._engine.shape.block_tokens
        rows = request.blocks.rows(layer, heads, blocks, i, num_tokens=num_tokens)
        if len(rows.keys) != 1 or len(rows.values) != 1:
            return None
        last = np.flatnonzero(np.append(rows.runs[1:, 1] != rows.runs[:-1, 1], True))
        growing = share.growing[i] = _Growing(rows, last, num_tokens)
        return growing

    def _places(self, request: Request, layer: int, heads: Int64, blocks: Int64, far: _Far | None) -> Places | None:
        """Places of blocks with the staged ones replaced by their copies; None where nothing is staged."""
        if far is None:
            return None
        table, width = request.blocks, request.blocks.pool.shape[3]
        places = table.places(layer, heads, blocks)
        held, wanted = far.heads * width + far.blocks, heads * width + blocks
        at = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
        mine = held[at] == wanted
        places.pools[:, mine] = table.number(request.state["staging"])
        places.offsets[:, mine] = far.offsets[:, at[mine]]
        return places

    def _far(self, request: Request, layer: int, chosen: Chosen | None) -> _Far | None:
        """What has to be staged; kept like a plan where all blocks are attended."""
        table = request.blocks
        numbers = [number for number, pool in enumerate(table.pools) if self.lane(pool.memory) is None]
        if not numbers:
            return None
        key, slot = (table, table.version, table.num_blocks(layer)), (request.name, layer)
        if chosen is None and slot in self._fars and self._fars[slot][0] == key:
            return self._fars[slot][1]
        heads, blocks = chosen if chosen is not None else table.all_blocks(layer)
        places = table.places(layer, heads, blocks)
        mine: NDArray[np.bool_] = np.isin(places.pools, numbers).any(axis=0)  # type: ignore[assignment]  # an array
        far = self._far_copies(request, layer, heads[mine], blocks[mine], places, mine) if mine.any() else None
        if chosen is None:
            self._fars[slot] = (key, far)
        return far

    def _far_copies(
        self, request: Request, layer: int, heads: Int64, blocks: Int64, places: Places, mine: NDArray[np.bool_]
    ) -> _Far:
        staging: Pool = request.state["staging"]
        pools, sources = places.pools[:, mine].reshape(-1), places.offsets[:, mine].reshape(-1)
        half = staging.num_slots // 2
        assert len(sources) <= half, "a half holds every far block of a layer"
        targets = (layer % 2 * half + np.arange(len(sources), dtype=np.int64)) * staging.slot_nbytes
        copies = []
        for number in np.unique(pools).tolist():
            pool, of_pool = request.blocks.pools[number], pools == number
            assert pool.slot_nbytes <= staging.slot_nbytes, "a staging slot holds a slot of any memory"
            lane = self._engine.mover(pool.memory, staging.memory)
            if lane is None:
                raise ConfigurationError(f"nobody copies from {pool.memory} to {staging.memory}")
            source = Segment(pool.region, _runs(sources[of_pool], pool.slot_nbytes))
            target = Segment(staging.region, _runs(targets[of_pool], pool.slot_nbytes))
            copies.append((lane, Copy(source, target)))
        return _Far(heads, blocks, targets.reshape(2, -1), copies)

    # -- queries --------------------------------------------------------------------------------------------------

    def _queries(self, lane: Lane, layer: int, batch: Batch) -> tuple[Segment, list[Completion]]:
        if lane.device is self._engine.dense.device:
            return batch.queries, [batch.ready]
        nbytes = batch.queries.spans.nbytes
        there = self._scratch.at("queries", lane.memory, (layer, batch.part), nbytes)
        return there, [self._engine.copy(batch.queries, there, [batch.ready])]


def _runs(offsets: Int64, nbytes: int) -> Spans:
    """Equal pieces, neighbours joined."""
    if len(offsets) < 2:
        return Spans.equal(offsets, nbytes)
    starts = np.flatnonzero(np.concatenate(([True], offsets[1:] != offsets[:-1] + nbytes)))
    counts = np.diff(np.append(starts, len(offsets)))
    return Spans(np.stack((offsets[starts], counts * nbytes), axis=1))
