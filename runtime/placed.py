"""Policies that leave rows where they were put: a prompt's blocks are divided over memories once, the newest stay open.

The sealed blocks of the prompt go to memories by weight, oldest first in the order given; the open block and everything
that grows after it go to the tail memory. Each request owns its pools, sized for its longest length, so a request
either fits for its whole life or is refused when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.runtime.blocks import Pool
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import InPlaceAttention
from tierloop.runtime.policy import Batch, Int64, Policy, Request, number

LARGEST_WEIGHT = 1e12


class Placed(Policy):
    """Base: `shares` maps memories to weights, `tail` takes the open block. Both by full memory name."""

    def __init__(self, engine: Engine, shares: Mapping[str, float], tail: str) -> None:
        super().__init__(engine)
        known = [m.name for m in engine.memories()]
        if not isinstance(shares, Mapping):
            raise ConfigurationError(f"policy {self.name}: shares are a table of memories and weights, not {shares!r}")
        for memory, weight in shares.items():
            if memory not in known:
                raise ConfigurationError(f"policy {self.name}: no memory {memory!r}: {nearest(memory, known)}")
            number(f"policy {self.name}: the share of {memory}", weight, 0, LARGEST_WEIGHT)
        if not sum(shares.values()) > 0:
            raise ConfigurationError(f"policy {self.name}: the shares of all memories are 0")
        self.shares = dict(shares)
        self.tail = tail

    def tiers(self) -> list[str]:
        return [memory for memory, weight in self.shares.items() if weight]

    def homes(self, request: Request) -> list[str]:
        """The memory of each block that the request will ever have, by block number."""
        sealed = request.prompt_tokens // self.shape.block_tokens
        total = self.shape.num_blocks(request.max_tokens)
        weights = np.array(list(self.shares.values()), dtype=np.float64)
        borders = np.floor(np.cumsum(weights) / weights.sum() * sealed + 1e-9).astype(int)
        names = list(self.shares)
        homes = [names[int(np.searchsorted(borders, block, side="right"))] for block in range(sealed)]
        return homes + [self.tail] * (total - sealed)

    async def admit(self, request: Request) -> None:
        homes = self.homes(request)
        per_block = self.shape.num_layers * 2 * self.shape.num_kv_heads
        pools: dict[str, Pool] = {}
        request.state["pools"] = pools
        for memory in dict.fromkeys(homes):
            pools[memory] = self.engine.pool(memory, homes.count(memory) * per_block)
        request.state["homes"] = np.array([list(pools).index(m) for m in homes], dtype=np.int64)

    def layout(self, request: Request, layer: int, side: int, head: int, blocks: Int64) -> list[tuple[Pool, Int64]]:
        homes = request.state["homes"][blocks]
        return [(pool, blocks[homes == i]) for i, pool in enumerate(request.state["pools"].values())]

    async def release(self, request: Request) -> None:
        pools = list(request.state.get("pools", {}).values())
        await super().release(request)
        for pool in pools:
            self.engine.drop_pool(pool)


class InPlace(Placed):
    """Base: rows are attended where they lie, and what nobody attends over is staged in host memory."""

    def __init__(self, engine: Engine, shares: Mapping[str, float], tail: str) -> None:
        super().__init__(engine, shares, tail)
        self._attention = InPlaceAttention(engine)
        self._attention.check([*shares, tail])

    async def admit(self, request: Request) -> None:
        await super().admit(request)
        homes = self.homes(request)
        far = [m for m in dict.fromkeys(homes) if self._attention.lane(m) is None]
        if far:
            request.state["staging"] = self._attention.staging(sum(homes.count(m) for m in far), far)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        return self._attention.attend(layer, batch, self.append(layer, batch))

    async def release(self, request: Request) -> None:
        staging = request.state.get("staging")
        await super().release(request)
        if staging is not None:
            self.engine.drop_pool(staging)
