"""All-GPU: the whole KV cache in GPU memory, dense attention there. The oracle of speed, limited by capacity.

What the papers call "Original" or "GPU only". Refuses a request that does not fit: nothing is offloaded.
"""

from __future__ import annotations

from typing import ClassVar

from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import InPlace


class AllGpu(InPlace):
    """Every row on the GPU, every row attended there."""

    name: ClassVar[str] = "all-gpu"
    serves: ClassVar[bool] = True

    def __init__(self, engine: Engine) -> None:
        gpu = engine.memory("gpu")
        super().__init__(engine, {gpu: 1.0}, gpu)
