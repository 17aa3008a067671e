"""Decode a model under a policy and keep every attention output, for comparisons bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.models import Model
from tierloop.runtime.modules import Modules
from tierloop.runtime.oracle import Recorder, Verdict, rounded_to
from tierloop.runtime.policy import Policy, Request, make
from tierloop.runtime.prefill import Dense, generate_dense
from tierloop.runtime.results import DeviceUse, LinkUse

SMALL = Path(__file__).parent / "platforms" / "small.toml"


@dataclass
class Decoded:
    """Tokens, all attention outputs in order, the oracle's verdict, and what devices and links did."""

    tokens: list[list[int]]
    outputs: NDArray[np.float32]
    verdict: Verdict
    devices: dict[str, DeviceUse]
    links: dict[str, LinkUse]
    placement: dict[str, int]
    elapsed_ns: int


class Outputs(Recorder):
    """A recorder that also keeps the outputs in the order in which they came."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[NDArray[np.float32]] = []

    def attended(self, *args: Any) -> None:
        super().attended(*args)
        self.kept.append(args[4].copy())


@cache
def dense_of(model: Model, prompt: tuple[int, ...], num_tokens: int) -> Dense:
    """Plain generate, once per prompt."""
    return generate_dense(model, prompt, num_tokens)


def decode(
    model: Model,
    prompts: Sequence[Sequence[int]],
    policy: str | Callable[[Engine], Policy],
    num_tokens: int = 6,
    platform: str | Path | Platform = SMALL,
    dtype: str = "float32",
    block_tokens: int = 16,
    split_tokens: int = 16,
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> Decoded:
    """Decode each prompt for `num_tokens`, all in one batch; the hazard checker is on."""
    opened = (
        platform
        if isinstance(platform, Platform)
        else open_platform(platform, overrides=overrides or {}, check_hazards=True)
    )
    with opened:
        engine = Engine(opened, kv_shape(model, dtype, block_tokens, split_tokens))
        made = make(find_policy(policy), engine, options) if isinstance(policy, str) else policy(engine)
        modules = Modules(model.module)
        recorder = Outputs(engine.shape, modules.scale, None, rounded_to(opened, engine.shape))
        decoder = Decoder(modules, engine, made, len(prompts), recorder)
        ledger = Ledger(opened)
        opened.site.observers.append(ledger)
        requests = []
        for i, prompt in enumerate(prompts):
            prefill = dense_of(model, tuple(prompt), num_tokens).prefill
            request = Request(f"r{i}", [*prompt, prefill.first_token], len(prompt) + num_tokens)
            request.prompt_tokens = len(prompt)
            engine.loop.run(decoder.adopt(request, prefill))
            requests.append(request)
        placement: dict[str, int] = {}
        for request in requests:
            for memory, nbytes in made.placement(request).items():
                placement[memory] = placement.get(memory, 0) + nbytes
        ledger.reset()

        async def steps() -> None:
            for _ in range(num_tokens - 1):
                await decoder.step(requests)

        engine.loop.run(steps())
        devices, links = ledger.snapshot()
        elapsed = ledger.elapsed_ns

        async def release() -> None:
            for request in requests:
                await made.release(request)

        engine.loop.run(release())
        engine.close()
        assert_nothing_is_left(opened)
        return Decoded(
            [r.tokens[r.prompt_tokens :] for r in requests],
            np.concatenate([o.reshape(-1) for o in recorder.kept]),
            recorder.verdict(),
            devices,
            links,
            placement,
            elapsed,
        )


def assert_nothing_is_left(platform: Platform) -> None:
    """Every memory gives all of its bytes again: nothing was leaked."""
    for device, memory in platform.memories():
        if device.info.provenance == "emulated":
            device.free(device.alloc(memory.capacity // memory.alignment * memory.alignment, memory.name, True))
