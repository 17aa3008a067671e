"""Attention where the rows lie: every device that can attend takes the rows that it reaches, and the states are merged.

Rows on a memory that nobody attends over (a drive) are staged first, in the host's memory, one layer ahead. Queries go
to each executor's own memory, states come back to where the modules run, and the merge kernel joins them there. All of
it is ordered by completions alone, so every device works at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, Places, Pool, Rows, join
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.policy import Batch, Request

Int64 = NDArray[np.int64]
Chosen = tuple[Int64, Int64]
"""(heads, blocks), sorted by head, then block; int64 (n,) each."""


@dataclass
class _Share:
    """What one lane attends in one layer: per sequence its blocks, and the roots that it returns."""

    lane: Lane
    chosen: dict[int, Chosen] = field(default_factory=dict)
    roots: Int64 = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))


@dataclass
class _Staged:
    """Blocks of one request and layer that were copied to the host: which, where, and the copies."""

    heads: Int64
    blocks: Int64
    offsets: Int64
    done: list[Completion]


class InPlaceAttention:
    """Attends over the chosen blocks of each request of a batch, wherever they lie."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[str, Lane | None] = {}
        self._scratch: dict[tuple[str, int], Region] = {}
        self._plans: dict[tuple[object, ...], list[_Share]] = {}
        self._staged: dict[tuple[str, int], _Staged] = {}
        self._readers: list[Completion] = []
        """The newest launch that reads staged blocks: their slots are free again after it."""

    def check(self, memories: list[str]) -> None:
        """Raise ConfigurationError unless rows on each memory can be attended over, in place or staged."""
        for memory in memories:
            if self.lane(memory) is None and self._engine.mover(memory, self._engine.host) is None:
                raise ConfigurationError(f"nobody attends over {memory}, and nobody copies it to {self._engine.host}")

    def lane(self, memory: str) -> Lane | None:
        """Who attends over rows of a memory; None where they have to be staged."""
        if memory not in self._lanes:
            self._lanes[memory] = self._engine.runner("attend", memory)
        return self._lanes[memory]

    def staging(self, num_slots: int, memories: list[str]) -> Pool:
        """Host memory for staged blocks of a request, in slots of the size that these memories use.

        Whoever asks keeps it in `request.state["staging"]` and gives it back. Raises TierTooSmall.
        """
        grid = 1
        for memory in memories:
            info = self._engine.platform.memory_owner(memory).info.memory(memory)
            grid = max(grid, info.alignment if info else 1)
        return self._engine.pool(self._engine.host, num_slots, -(-self._engine.shape.block_nbytes // grid) * grid)

    def stage(self, request: Request, layer: int, chosen: Chosen | None = None) -> None:
        """Start copying the chosen blocks that nobody attends over to the host; does nothing for the others."""
        table = request.blocks
        heads, blocks = chosen if chosen is not None else table.all_blocks(layer)
        places = table.places(layer, heads, blocks)
        far = np.isin(places.pools, self._far(table)).any(axis=0)
        if not far.any() or (request.name, layer) in self._staged:
            return
        staging: Pool = request.state["staging"]
        heads, blocks = heads[far], blocks[far]
        pools, sources = places.pools[:, far].reshape(-1), places.offsets[:, far].reshape(-1)
        targets = staging.take(len(sources))
        done = []
        for number in np.unique(pools).tolist():
            pool, of_pool = table.pools[number], pools == number
            nbytes = pool.slot_nbytes
            assert nbytes <= staging.slot_nbytes, "a staging slot holds a slot of any drive"
            lane = self._engine.mover(pool.memory, staging.memory)
            assert lane is not None, "checked when the policy was made"
            source = Segment(pool.region, _runs(sources[of_pool], nbytes))
            target = Segment(staging.region, Spans.equal(targets[of_pool], nbytes))
            done.append(lane.submit(Copy(source, target), self._readers))
        self._staged[request.name, layer] = _Staged(heads, blocks, targets.reshape(2, -1), done)

    def attend(
        self, layer: int, batch: Batch, appended: Completion, chosen: list[Chosen] | None = None
    ) -> list[Completion]:
        """Attend over the chosen blocks of each request (default: all), the newest rows after `appended`.

        Returns what comes after the output.
        """
        engine, shape = self._engine, self._engine.shape
        picked = chosen or [r.blocks.all_blocks(layer) for r in batch.requests]
        shares = self._plan(layer, batch, picked, cached=chosen is None)
        roots = np.concatenate([s.roots for s in shares])
        at_home = self._region(engine.dense.memory, layer, engine.state_nbytes(len(roots), batch.q_len))
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
            query, after = queries[lane.memory]
            after = list(after)
            if any(blocks.size and int(blocks.max()) >= first_new[i] for i, (_, blocks) in share.chosen.items()):
                after.append(appended)
            parts: list[Rows] = []
            staged: list[Completion] = []
            for i, (heads, blocks) in sorted(share.chosen.items()):
                places, copies = self._places(batch.requests[i], layer, heads, blocks)
                staged.extend(copies)
                parts.append(batch.requests[i].blocks.rows(layer, heads, blocks, i, places))
            if lane.device is engine.dense.device:
                states = home
            else:
                states = self._region(lane.memory, layer, nbytes, "states").at(0, nbytes)
            done = engine.attend(
                lane, query, join(parts), batch.positions, batch.scale, share.roots, states, after + staged
            )
            if states is not home:
                done = engine.copy(states, home, [done])
            ended.append(done)
            if staged:
                self._readers = [done]
        self._release_staged(layer, batch)
        return [engine.merge([at_home.at(0, offset)], roots, batch.positions, batch.output, ended)]

    # -- plans ----------------------------------------------------------------------------------------------------

    def _plan(self, layer: int, batch: Batch, picked: list[Chosen], cached: bool) -> list[_Share]:
        """Divide the chosen blocks over lanes; kept while no block has moved or come."""
        key = (layer, *((r.name, r.blocks.version, r.blocks.num_blocks(layer)) for r in batch.requests))
        if cached and key in self._plans:
            return self._plans[key]
        shares: dict[str, _Share] = {}
        for i, (request, (heads, blocks)) in enumerate(zip(batch.requests, picked, strict=True)):
            table = request.blocks
            lanes = self._lanes_of(table, table.places(layer, heads, blocks))
            for lane in dict.fromkeys(lanes):
                mine = np.array([x is lane for x in lanes])
                shares.setdefault(lane.memory, _Share(lane)).chosen[i] = (heads[mine], blocks[mine])
        planned = list(shares.values())
        splits = [self._splits(share, batch, layer) for share in planned]
        for share, held in zip(planned, splits, strict=True):
            others: dict[tuple[int, int], Int64] = {}
            for theirs in splits:
                if theirs is not held:
                    for where, ids in theirs.items():
                        others[where] = np.sort(np.concatenate((others[where], ids))) if where in others else ids
            share.roots = self._engine.roots(held, others)
        if cached:
            for old in [k for k in self._plans if k[0] == layer]:
                del self._plans[old]
            self._plans[key] = planned
        return planned

    def _splits(self, share: _Share, batch: Batch, layer: int) -> dict[tuple[int, int], Int64]:
        shape = self._engine.shape
        per_block = np.arange(shape.block_tokens // shape.split_tokens)
        found = {}
        for i, (heads, blocks) in share.chosen.items():
            length = int(batch.requests[i].blocks.length[layer])
            for head in np.unique(heads).tolist():
                ids = (blocks[heads == head][:, None] * len(per_block) + per_block).ravel()
                found[i, head] = ids[ids * shape.split_tokens < length]
        return found

    def _lanes_of(self, table: BlockTable, places: Places) -> list[Lane]:
        """The lane of each block: its keys' runner, or the host's where keys or values are staged."""
        lanes: dict[tuple[int, int], Lane] = {}
        pairs = list(zip(places.pools[0].tolist(), places.pools[1].tolist(), strict=True))
        for k, v in dict.fromkeys(pairs):
            near = self.lane(table.pools[k].memory), self.lane(table.pools[v].memory)
            lane = near[0] if None not in near else self.lane(self._engine.host)
            if lane is None:
                raise ConfigurationError(f"nobody attends over {self._engine.host}, where far rows are staged")
            if None not in near and not lane.reaches(table.pools[v].memory):
                raise ConfigurationError(
                    f"{lane.device.info.name} attends over keys on {table.pools[k].memory}, "
                    f"but does not reach their values on {table.pools[v].memory}"
                )
            lanes[k, v] = lane
        return [lanes[pair] for pair in pairs]

    # -- places ---------------------------------------------------------------------------------------------------

    def _far(self, table: BlockTable) -> list[int]:
        return [number for number, pool in enumerate(table.pools) if self.lane(pool.memory) is None]

    def _places(
        self, request: Request, layer: int, heads: Int64, blocks: Int64
    ) -> tuple[Places | None, list[Completion]]:
        """Places with staged blocks replaced by their copies, and the copies to wait for."""
        table = request.blocks
        far = self._far(table)
        if not far:
            return None, []
        places = table.places(layer, heads, blocks)
        mine = np.isin(places.pools, far).any(axis=0)
        if not mine.any():
            return None, []
        if (request.name, layer) not in self._staged:
            self.stage(request, layer, (heads, blocks))
        staged = self._staged[request.name, layer]
        number = table.number(request.state["staging"])
        width = table.pool.shape[3]
        held = staged.heads * width + staged.blocks
        at = np.searchsorted(held, heads[mine] * width + blocks[mine])
        assert np.array_equal(held[at], heads[mine] * width + blocks[mine]), "every far block was staged"
        places.pools[:, mine] = number
        places.offsets[:, mine] = staged.offsets[:, at]
        return places, staged.done

    def _release_staged(self, layer: int, batch: Batch) -> None:
        for request in batch.requests:
            staged = self._staged.pop((request.name, layer), None)
            if staged is not None:
                request.state["staging"].give(staged.offsets.reshape(-1))

    def _queries(self, lane: Lane, layer: int, batch: Batch) -> tuple[Segment, list[Completion]]:
        if lane.device is self._engine.dense.device:
            return batch.queries, [batch.ready]
        nbytes = batch.queries.spans.nbytes
        there = self._region(lane.memory, layer, nbytes, "queries").at(0, nbytes)
        return there, [self._engine.copy(batch.queries, there, [batch.ready])]

    def _region(self, memory: str, layer: int, nbytes: int, use: str = "all states") -> Region:
        """Scratch for one use, memory and layer; grows by powers of two, between steps only."""
        key = (f"{use} {memory}", layer)
        region = self._scratch.get(key)
        if region is None or region.nbytes < nbytes:
            if region is not None:
                self._engine.drop(region)
            region = self._engine.scratch(memory, 1 << max(nbytes - 1, 63).bit_length())
            self._scratch[key] = region
        return region


def _runs(offsets: Int64, nbytes: int) -> Spans:
    """Equal pieces, neighbours joined."""
    if len(offsets) < 2:
        return Spans.equal(offsets, nbytes)
    starts = np.flatnonzero(np.concatenate(([True], offsets[1:] != offsets[:-1] + nbytes)))
    counts = np.diff(np.append(starts, len(offsets)))
    return Spans(np.stack((offsets[starts], counts * nbytes), axis=1))
