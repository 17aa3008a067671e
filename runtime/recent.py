"""Policies that keep the newest rows on the GPU and the older ones in host memories, K and V each where it belongs.

New rows are appended on the GPU. Each request has room for `resident` blocks of each layer, side and KV head there, and
for one that is being written; when a block too many is there the oldest is copied to its home on the host while the
rest of the step goes on. Its new place is published, and the old slot given back, when the next step comes to that
layer: so the border between GPU and host moves between steps only, and by the count of tokens alone.

A request's pools are sized for its whole life when it is admitted, so no tier fills up later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierloop.devices.completion import Completion
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import EVICTING, K, Pool, TierTooSmall, V
from tierloop.runtime.engine import Engine
from tierloop.runtime.kv_mapping import Homes
from tierloop.runtime.loop import all_of
from tierloop.runtime.policy import Int64, Policy, Request, number


@dataclass
class _Demotion:
    """A block of all heads on its way to the host: per side the pool, its slots, and the copy."""

    block: int
    moves: list[tuple[int, Pool, Int64, Completion]]


class RecentOnGpu(Policy):
    """Base: `share` of a request's prompt, in whole blocks and at least one, stays on the GPU; `homes` are the host's.

    The GPU's memory is that of the device which runs the modules.
    """

    def __init__(self, engine: Engine, share: float, homes: Homes) -> None:
        super().__init__(engine)
        self._share = number(f"{self.name}: gpu_share", share, 0, 1)
        self._homes = homes

    # -- placement ------------------------------------------------------------------------------------------------

    def resident(self, request: Request) -> int:
        """Full blocks of each layer, side and head that stay on the GPU."""
        return max(1, self.shape.num_blocks(int(request.prompt_tokens * self._share)))

    def border(self, request: Request, layer: int) -> int:
        """The first block that is on the GPU in this step."""
        borders: Int64 = request.state["border"]
        return int(borders[layer])

    def next_border(self, request: Request, layer: int) -> int:
        """What `border` will be once this step has settled the layer."""
        return self.border(request, layer) + (layer in request.state["demotions"])

    def most_host_rows(self, request: Request) -> int:
        """Rows of a layer and head that the host will hold at the end of the request's life."""
        return self._host_blocks(request) * self.shape.block_tokens

    def _host_blocks(self, request: Request) -> int:
        return max(self.shape.num_blocks(request.max_tokens) - self.resident(request), 0)

    def home(self, side: int, block: int) -> str:
        """The host memory that a block goes to."""
        turn = self._homes[side]
        return turn[block % len(turn)]

    async def admit(self, request: Request) -> None:
        shape, engine = self.shape, self.engine
        each = shape.num_layers * shape.num_kv_heads
        total, host = shape.num_blocks(request.max_tokens), self._host_blocks(request)
        pools: dict[str, Pool] = {}
        request.state["pools"] = pools
        request.state["demotions"] = {}
        sealed = request.prompt_tokens // shape.block_tokens
        first = min(max(shape.num_blocks(request.prompt_tokens) - self.resident(request), 0), sealed)
        request.state["border"] = np.full(shape.num_layers, first, dtype=np.int64)
        pools["gpu"] = engine.pool(engine.dense.memory, 2 * each * min(total, self.resident(request) + 1))
        counts: dict[str, int] = {}
        for side in (K, V):
            for block in range(host):
                memory = self.home(side, block)
                counts[memory] = counts.get(memory, 0) + each
        for memory, count in counts.items():
            pools[memory] = engine.pool(memory, count)

    def layout(self, request: Request, layer: int, side: int, head: int, blocks: Int64) -> list[tuple[Pool, Int64]]:
        pools, border = request.state["pools"], self.border(request, layer)
        found = [(pools["gpu"], blocks[blocks >= border])]
        turn, old = self._homes[side], blocks[blocks < border]
        for memory in dict.fromkeys(turn):
            mine = np.isin(old % len(turn), [i for i, name in enumerate(turn) if name == memory])
            if mine.any():
                found.append((pools[memory], old[mine]))
        return found

    async def release(self, request: Request) -> None:
        moves = [move for demotion in request.state.get("demotions", {}).values() for move in demotion.moves]
        pools = list(request.state.get("pools", {}).values())
        try:
            await all_of(done for _, _, _, done in moves)
        finally:
            await super().release(request)
            for pool in pools:
                self.engine.drop_pool(pool)

    # -- demotion -------------------------------------------------------------------------------------------------

    async def settle(self, request: Request, layer: int) -> None:
        """Publish what was demoted in the step before; called once per step and layer, before rows are chosen."""
        demotion: _Demotion | None = request.state["demotions"].get(layer)
        if demotion is None:
            return
        await all_of(done for _, _, _, done in demotion.moves)
        if request.state["demotions"].pop(layer, None) is not demotion:
            return  # whoever waited beside us has published it
        heads = np.arange(self.shape.num_kv_heads)
        for side, pool, offsets, _ in demotion.moves:
            request.blocks.move(layer, side, heads, demotion.block, pool, offsets)
        request.state["border"][layer] = demotion.block + 1

    def demote(self, request: Request, layer: int, after: list[Completion]) -> None:
        """Start to copy the oldest block of a layer to the host, where one too many is on the GPU; after `after`."""
        over = request.blocks.num_blocks(layer) - self.border(request, layer) > self.resident(request)
        if over and layer not in request.state["demotions"]:
            self._start(request, layer, after)

    def _start(self, request: Request, layer: int, after: list[Completion]) -> None:
        border = self.border(request, layer)
        heads = np.arange(self.shape.num_kv_heads)
        moves = []
        for side in (K, V):
            pool: Pool = request.state["pools"][self.home(side, border)]
            nbytes = self.shape.block_tokens * self.shape.row_nbytes(side)
            held = Segment(
                request.state["pools"]["gpu"].region,
                Spans.equal(request.blocks.offset[layer, side, heads, border], nbytes),
            )
            offsets = pool.take(len(heads))
            done = self.engine.copy(held, Segment(pool.region, Spans.equal(offsets, nbytes)), after)
            moves.append((side, pool, offsets, self.engine.stages.mark(done, "demote")))
            request.blocks.state[layer, side, heads, border] = EVICTING
        request.state["demotions"][layer] = _Demotion(border, moves)

    async def make_room(self, request: Request, layer: int, new_tokens: int) -> None:
        """Demote, and wait for it, until the GPU has room for the blocks that new rows reach: for long appends.

        Raises TierTooSmall where the GPU never has.
        """
        held = request.blocks.num_blocks(layer)
        need = self.shape.num_blocks(int(request.blocks.length[layer]) + new_tokens) - held
        room = self.resident(request) + 1
        while held - self.border(request, layer) + need > room:
            await self.settle(request, layer)
            if self.border(request, layer) >= int(request.blocks.length[layer]) // self.shape.block_tokens:
                raise TierTooSmall(
                    f"{self.engine.dense.memory} is too small: {new_tokens} new tokens reach {need} blocks, and "
                    f"{self.name} keeps {room} there; raise gpu_share or append fewer at once"
                )
            self._start(request, layer, [])
            await self.settle(request, layer)
