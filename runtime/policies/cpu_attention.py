"""CPU attention: the whole KV cache in host memory, attention on the cores; only queries and outputs cross the link.

What HybridGen calls AoC and NEO and FastDecode build on. The rest of the model stays where the dense layers run.
"""

from __future__ import annotations

from typing import ClassVar

from tierloop.devices.completion import Completion
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import InPlaceAttention
from tierloop.runtime.placed import Placed
from tierloop.runtime.policy import Batch


class CpuAttention(Placed):
    """Every row in host memory, every row attended by the cores."""

    name: ClassVar[str] = "cpu-attention"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, {engine.host: 1.0}, engine.host)
        self._attention = InPlaceAttention(engine)
        self._attention.check([engine.host])

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        return self._attention.attend(layer, batch, self.append(layer, batch))
