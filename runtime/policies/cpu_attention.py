"""CPU attention: the whole KV cache in host memory, attention on the cores; only queries and outputs cross the link.

What HybridGen calls AoC and NEO and FastDecode build on. The rest of the model stays where the dense layers run.
"""

from __future__ import annotations

from typing import ClassVar

from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import InPlace


class CpuAttention(InPlace):
    """Every row in host memory, every row attended by the cores."""

    name: ClassVar[str] = "cpu-attention"
    serves: ClassVar[bool] = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, {engine.host: 1.0}, engine.host)
