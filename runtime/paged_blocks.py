"""Paged KV blocks where the modules run: taken as requests grow, swapped to the host's memory and back.

vLLM's block manager, as far as memory is concerned: one pool that all requests share, a block of every layer, side and
head at a time, no place for tokens that are not there yet. Who preempts whom when the pool is empty is for the serving
loop to say (runtime/serving.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import OPEN, Int64, Pool, TierTooSmall
from tierloop.runtime.engine import Engine
from tierloop.runtime.policy import Request


@dataclass
class _Swapped:
    """A request's blocks in the host's memory: which they are, in the order of their slots."""

    region: Region
    blocks: Int64
    lengths: Int64


class PagedBlocks:
    """One pool of blocks; `watermark` (0 to 1) of it is kept back when requests are admitted.

    The pool has the room that the memory has (`Engine.room`) but for `reserved` bytes; where nobody has set a limit, a
    tenth is left for working space. It is made when the first request is served. A request that nobody serves has a
    pool of its own, for its whole life. Raises ConfigurationError where not even one block fits.
    """

    def __init__(self, engine: Engine, watermark: float = 0.01) -> None:
        self.engine = engine
        shape = engine.shape
        self.memory = engine.dense.memory
        self.per_block = shape.num_layers * 2 * shape.num_kv_heads
        """Slots of one block of all layers, sides and heads."""
        self.reserved: Callable[[], int] = lambda: 0
        """Bytes of the room that the pool leaves, when it is made."""
        self._watermark = watermark
        self._shared: Pool | None = None
        self._kept_back = 0
        self._promises: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    @property
    def is_shared(self) -> bool:
        """Whether there is a pool that requests share."""
        return self._shared is not None

    @property
    def pool(self) -> Pool:
        """The shared pool, made when it is first needed: by then everybody else has taken what they need."""
        if self._shared is None:
            self._shared = self._make()
        return self._shared

    def _make(self) -> Pool:
        engine, shape = self.engine, self.engine.shape
        grid = engine.info(self.memory).alignment
        slot = -(-shape.block_nbytes // grid) * grid
        room = engine.room(self.memory) - self.reserved()
        if not engine.is_limited(self.memory):
            room -= room // 10
        blocks = max(room, 0) // (slot * self.per_block)
        if blocks < 1:
            raise ConfigurationError(
                f"{self.memory} has {max(room, 0):,} bytes for the KV cache; "
                f"a block of {shape.block_tokens} tokens has {slot * self.per_block:,}"
            )
        self._kept_back = int(self._watermark * blocks) * self.per_block
        return engine.pool(self.memory, blocks * self.per_block)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self.pool.num_slots - self.pool.taken

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pool.num_slots // self.per_block * self.engine.shape.block_tokens

    def slots(self, num_tokens: int) -> int:
        """Slots of so many tokens, all layers, sides and heads."""
        return self.engine.shape.num_blocks(num_tokens) * self.per_block

    def could_hold(self, num_tokens: int) -> bool:
        """Whether so many tokens could be admitted to an empty pool."""
        return self.slots(num_tokens) <= self.pool.num_slots - self._kept_back

    def own(self, request: Request, num_blocks: int) -> None:
        """Give a request that nobody serves a pool of its own. Raises TierTooSmall."""
        request.state["own blocks"] = self.engine.pool(self.memory, num_blocks * self.per_block)

    def admit_whole(self, request: Request) -> None:
        """Room for all the request has said, or for its whole life where nobody serves it. Raises TierTooSmall."""
        if request.is_served:
            self.admit(request, len(request.tokens))
        else:
            self.own(request, self.engine.shape.num_blocks(request.max_tokens))

    def grow_whole(self, request: Request) -> None:
        """Take the room that `admit_whole` is about. Raises TierTooSmall."""
        self.grow(request, len(request.tokens) if request.is_served else request.max_tokens)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Promise the request room for `num_tokens`; nothing is taken yet.

        Raises TierTooSmall unless they would fit beside what others were promised, and leave what is kept back.
        """
        needed, promised = self.slots(num_tokens), self._promised()
        if needed > self.free - promised - self._kept_back:
            raise TierTooSmall(
                f"{self.memory} is full: {num_tokens} tokens of {request.name} need {needed // self.per_block} blocks, "
                f"{self.free // self.per_block} of {self.pool.num_slots // self.per_block} are free, "
                f"{promised // self.per_block} are promised and {self._kept_back // self.per_block} kept back"
            )
        self._promises[request.name] = needed
        self._taken[request.name] = 0

    def promise(self, request: Request, num_tokens: int) -> None:
        """From now on the request was promised so much, where it was admitted for more."""
        self._promises[request.name] = self.slots(num_tokens)

    def _promised(self) -> int:
        """Slots that requests were promised and have not taken."""
        return sum(max(slots - self._taken[name], 0) for name, slots in self._promises.items())

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give the request blocks up to `num_tokens`. Raises TierTooSmall, taking nothing."""
        table = request.blocks
        have, need = self.held(request), self.engine.shape.num_blocks(num_tokens)
        if need > have:
            table.put_all(have, need, request.state.get("own blocks") or self.pool)
            self._took(request, need - have)
            request.state["held blocks"] = need

    def skip(self, request: Request, num_blocks: int) -> None:
        """Blocks below that are elsewhere: the request does not get them here."""
        request.state["held blocks"] = max(self.held(request), num_blocks)

    def held(self, request: Request) -> int:
        """The block after the last one that the request has been given."""
        held: int = request.state.get("held blocks", 0)
        return held

    def give(self, request: Request, first: int, last: int) -> None:
        """Return blocks [first, last): their rows are elsewhere."""
        request.blocks.give_all(first, last)
        self._took(request, first - last)

    def _took(self, request: Request, num_blocks: int) -> None:
        if request.name in self._taken:
            self._taken[request.name] += num_blocks * self.per_block

    async def swap_out(self, request: Request) -> None:
        """Copy the request's blocks to the host's memory and return them. Raises TierTooSmall, moving nothing."""
        table, host = request.blocks, self.engine.host
        where = np.flatnonzero(table.pool.reshape(-1) >= 0)
        nbytes = len(where) * self.pool.slot_nbytes
        region = self.engine.claim(host, max(nbytes, 1), f"blocks of {request.name}, swapped out")
        try:
            for done in self._copies(table.offset.reshape(-1)[where], region, out=True):
                await done
        except BaseException:
            self.engine.drop(region)
            raise
        request.state["swapped"] = _Swapped(region, where, table.length.copy())
        self._forget(request)
        table.give_all(0, table.pool.shape[3])
        table.length[:] = 0

    async def swap_in(self, request: Request) -> None:
        """Bring the blocks back. Raises TierTooSmall, and they stay where they are."""
        table, swapped = request.blocks, request.state["swapped"]
        if len(swapped.blocks) > self.free - self._promised() - self._kept_back:
            raise TierTooSmall(f"{self.memory} is full: {len(swapped.blocks)} blocks of {request.name} do not fit yet")
        offsets = self.pool.take(len(swapped.blocks))
        table.offset.reshape(-1)[swapped.blocks] = offsets
        table.pool.reshape(-1)[swapped.blocks] = table.number(self.pool)
        table.state.reshape(-1)[swapped.blocks] = OPEN
        table.length[:] = swapped.lengths
        table.version += 1
        for layer in range(len(table.length)):
            table.seal(layer)
        for done in self._copies(offsets, swapped.region, out=False):
            await done
        self.engine.drop(swapped.region)
        del request.state["swapped"]

    def release(self, request: Request) -> Pool | None:
        """Forget what the request was promised and had in the host's memory; its blocks go with its table.

        Returns its own pool, where it has one, to be dropped then.
        """
        own: Pool | None = request.state.get("own blocks")
        self._forget(request)
        swapped = request.state.pop("swapped", None)
        if swapped is not None:
            self.engine.drop(swapped.region)
        return own

    def _forget(self, request: Request) -> None:
        self._promises.pop(request.name, None)
        self._taken.pop(request.name, None)

    def _copies(self, offsets: Int64, region: Region, out: bool) -> list[Completion]:
        """Copy slots at `offsets` to the region, one after the other, or back: `_SLOTS` of them at a time."""
        done, size = [], self.pool.slot_nbytes
        for first in range(0, len(offsets), _SLOTS):
            mine = offsets[first : first + _SLOTS]
            here = Segment(self.pool.region, Spans.equal(mine, size))
            there = region.at(first * size, len(mine) * size)
            done.append(self.engine.copy(here, there) if out else self.engine.copy(there, here))
        return done


_SLOTS = 1 << 14
"""Slots in one command of a swap."""
