"""Exact attention split over all devices at once: each row is computed by an executor that reaches it.

GPU rows on the GPU, rows in local, remote and CXL memory by the cores, PNM rows in the PNM module; rows on a drive are
staged one layer ahead in host memory. The states of all are merged on the GPU. The oldest rows go to the slowest
memories, the open block stays on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import InPlace
from tierloop.runtime.policy import Batch

WEIGHTS: dict[str, float] = {"nvme": 1.0, "pnm": 3.0, "cxl": 2.0, "cpu": 2.0, "gpu": 1.5}
"""Default weights by kind of device, slowest first: a demonstration of every path, not a tuned placement."""


class SplitAll(InPlace):
    """Rows on every memory of the platform; `shares` maps memory names to weights (default: by kind of device)."""

    name: ClassVar[str] = "split-all"

    def __init__(self, engine: Engine, shares: Mapping[str, float] | None = None) -> None:
        if shares is None:
            order = list(WEIGHTS)
            kinds = {m.name: d.info.kind for d, m in engine.platform.memories() if d.info.kind in WEIGHTS}
            shares = {m: WEIGHTS[kinds[m]] for m in sorted(kinds, key=lambda m: order.index(kinds[m]))}
        tail = engine.dense.memory
        super().__init__(engine, shares, tail)

    async def layer_input(self, layer: int, batch: Batch) -> None:
        for ahead in (layer, layer + 1):
            if ahead < self.shape.num_layers:
                for request in batch.requests:
                    self._attention.stage(request, ahead)
