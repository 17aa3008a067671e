"""What the serving loop's own code costs a step at batch 8, against the step's numerics.

The same eight requests are served twice: with a real model, and as shapes. The decoder's part of the second run is what
everything but numerics takes, so the difference of both decoders' parts is the numerics; the loop's own code is what is
left of the first run without the decoder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierloop.runtime.decoder import Part
    from tierloop.runtime.models import Model
    from tierloop.runtime.stages import Stages

PLATFORM = "hybridgen-a100-cxl"
BATCH, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 12
ROOM_NBYTES = 1 << 28
"""For the KV cache: what the host really has to hold."""
SHARE_LIMIT = 0.1


@dataclass(frozen=True)
class ServingCost:
    """ns of a step: the loop's own code, and the numerics."""

    own_ns: float
    numerics_ns: float


def serving_cost(model: Model) -> ServingCost:
    """Of the serving loop with a real model, policy `paged`."""
    from tierloop.runtime.model_shapes import ShapeStages
    from tierloop.runtime.modules import Modules

    modules = Modules(model.module)
    own_ns, real_ns = _serve(model, modules, phantom=False)
    _, shapes_ns = _serve(model, ShapeStages.of(modules), phantom=True)
    return ServingCost(own_ns, max(real_ns - shapes_ns, 1.0))


def _serve(model: Model, stages: Stages, *, phantom: bool) -> tuple[float, float]:
    """ns of a step outside the decoder and in it."""
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.arrivals import Arrival, Turn
    from tierloop.runtime.compare import find_policy, kv_shape
    from tierloop.runtime.decoder import Decoder
    from tierloop.runtime.engine import Engine
    from tierloop.runtime.policy import make
    from tierloop.runtime.serving import Server, ServingRules
    from tierloop.runtime.serving_run import random_prompts

    class Timed(Decoder):
        within_ns = 0

        async def advance(self, parts: Sequence[Part]) -> list[list[int]]:
            begun = time.perf_counter_ns()
            try:
                return await super().advance(parts)
            finally:
                self.within_ns += time.perf_counter_ns() - begun

    arrivals = [Arrival(f"request{i}", 0, (Turn(PROMPT_TOKENS, NEW_TOKENS),)) for i in range(BATCH)]
    with open_platform(PLATFORM, clock="virtual") as platform:
        engine = Engine(platform, kv_shape(model), phantom=phantom)
        engine.limit(engine.dense.memory, ROOM_NBYTES)
        policy: Any = make(find_policy("paged"), engine, {})
        rules = ServingRules(BATCH, BATCH * PROMPT_TOKENS)
        decoder = Timed(stages, engine, policy, rules.step_tokens)
        server = Server(decoder, engine, policy, rules, random_prompts(model.shape.vocab, 0))
        begun = time.perf_counter_ns()
        engine.loop.run(server.serve(arrivals))
        took = time.perf_counter_ns() - begun
        engine.close()
    return (took - decoder.within_ns) / server.steps, decoder.within_ns / server.steps
