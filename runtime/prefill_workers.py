"""Prompts that are prefilled elsewhere: by workers as fast as the device that decodes, sharing nothing with it.

What disaggregated serving does, for phantom runs. A worker takes one prompt at a time, first come first served; how
long it takes is what the decoding device estimates for all layers of the prompt at once, its attention among them. The
rows then come through the host's memory to wherever the policy has placed them, as traffic on the links like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierloop.devices.commands import Launch
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.regions import Region
from tierloop.runtime.engine import Engine
from tierloop.runtime.loop import Places, let_pass
from tierloop.runtime.stages import Stages

PIECE_NBYTES = 64 << 20
"""Bytes of one copy."""


class PrefillWorkers:
    """`count` workers for a model of which the engine has one layer in `whole`."""

    def __init__(self, engine: Engine, stages: Stages, count: int, whole: float = 1.0) -> None:
        assert engine.phantom, "prompts with numbers are prefilled where they are decoded"
        self._engine = engine
        self._stages = stages
        self._whole = whole
        self._workers = Places(count)
        self._space: dict[str, Region] = {}

    def prompt_ns(self, num_tokens: int) -> int:
        """What a worker takes for a prompt."""
        engine, shape = self._engine, self._engine.shape
        q_heads = shape.num_kv_heads * shape.group
        attention = q_heads * (shape.head_dim + shape.head_dim_v) * num_tokens * num_tokens  # 2 each, half of the pairs
        total = 0
        for stage, more in [(self._stages.projections, 0), (self._stages.finishes, attention)]:
            flops = stage[0].flops_per_token * num_tokens + more
            args = Dense("prompt", flops, stage[0].weight_nbytes, num_tokens * self._stages.hidden * 8)
            total += engine.dense.device.estimate(Launch(args, (), ()), engine.dense.queue).duration_ns
        return round(total * shape.num_layers * self._whole)

    async def prefill(self, num_tokens: int) -> None:
        """Wait for a worker, and until it has done the prompt."""
        worker = await self._workers.take()
        await let_pass(self._engine.loop, self.prompt_ns(num_tokens))
        self._workers.give(worker)

    async def bring(self, nbytes_by_memory: Mapping[str, int]) -> None:
        """Move so many bytes of each memory there, through the host's. Raises a DeviceError where one fails."""
        engine = self._engine
        source = self._region(engine.host, "from")
        for memory, nbytes in nbytes_by_memory.items():
            left = round(nbytes * self._whole)
            target = self._region(memory, "to")
            while left > 0:
                size = min(left, PIECE_NBYTES)
                await engine.copy(source.at(0, size), target.at(0, size))
                left -= size

    def _region(self, memory: str, use: str) -> Region:
        key = f"{use} {memory}"
        if key not in self._space:
            self._space[key] = self._engine.scratch(memory, PIECE_NBYTES)
        return self._space[key]
