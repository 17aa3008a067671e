"""Paged all-GPU serving: KV blocks are taken as requests grow, and requests are preempted when none is left.

What vLLM does, as far as memory and time are concerned: one pool of blocks on the GPU, dense attention there, admission
when the prompt fits. Which request is preempted, and whether it is recomputed or swapped to the host's memory, is
decided by the serving loop (runtime/serving.py), this policy moves the blocks. Two GPUs that serve one model together
(tensor parallelism) are one device of the platform, with the memory and the rates of both.

Outside of the serving loop a request takes the space of its whole life at admission.
"""

from __future__ import annotations

from typing import ClassVar

from tierloop.devices.completion import Completion
from tierloop.runtime.blocks import Pool
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import InPlaceAttention
from tierloop.runtime.paged_blocks import PagedBlocks
from tierloop.runtime.policy import Batch, Int64, Policy, Request, number
from tierloop.runtime.stages import Float32


class Paged(Policy):
    """Every row on the GPU, in blocks that are taken when they are needed."""

    name: ClassVar[str] = "paged"
    serves: ClassVar[bool] = True

    def __init__(self, engine: Engine, watermark: float = 0.01) -> None:
        super().__init__(engine)
        number("paged: watermark", watermark, 0, 0.5)
        self._attention = InPlaceAttention(engine)
        self._attention.check([engine.dense.memory])
        self.blocks = PagedBlocks(engine, watermark)

    async def admit(self, request: Request) -> None:
        self.blocks.admit_whole(request)

    async def place(self, request: Request, layer: int, keys: Float32, values: Float32) -> None:
        self.blocks.grow_whole(request)
        await super().place(request, layer, keys, values)

    def grow(self, request: Request, num_tokens: int) -> None:
        self.blocks.grow(request, num_tokens)

    def layout(self, request: Request, layer: int, side: int, head: int, blocks: Int64) -> list[tuple[Pool, Int64]]:
        return []  # they have their places since `grow`

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        return self._attention.attend(layer, batch, self.append(layer, batch))

    def could_hold(self, num_tokens: int) -> bool:
        return self.blocks.could_hold(num_tokens)

    async def swap_out(self, request: Request) -> None:
        await self.blocks.swap_out(request)

    async def swap_in(self, request: Request) -> None:
        await self.blocks.swap_in(request)

    async def release(self, request: Request) -> None:
        own = self.blocks.release(request)
        await super().release(request)
        if own is not None:
            self.engine.drop_pool(own)
