"""The tiny model decoded on real bytes with its selection recorded, and as a phantom run: for comparisons to the ns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.decoding import SMALL, dense_of
from tests.tiny import tiny_model
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import PolicyRequest, find_policy, kv_shape
from tierloop.runtime.decisions import Decisions
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.model_shapes import ShapeStages
from tierloop.runtime.modules import Modules
from tierloop.runtime.phantom import run_phantom
from tierloop.runtime.policy import Request, make
from tierloop.runtime.results import DeviceUse, LinkUse, PolicyResult
from tierloop.runtime.selection import Origin, RecordedSelection, SelectionRecord

MODEL = tiny_model()
STAGES = ShapeStages.of(Modules(MODEL.module))


@dataclass(frozen=True)
class Recorded:
    """What a run on real bytes took, and what it decided."""

    step_ns: tuple[int, ...]
    devices: dict[str, DeviceUse]
    links: dict[str, LinkUse]
    stages: dict[str, int]
    selection: SelectionRecord


def record(
    policy: str,
    prompts: Sequence[Sequence[int]],
    steps: int = 5,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recorded:
    """Decode `steps` tokens of each prompt, all in one batch, in blocks of 16 tokens, on a machine with `overrides`."""
    shape = kv_shape(MODEL, dtype, 16, 16)
    origin = Origin(
        MODEL.name, MODEL.fingerprint, shape, policy, options, tuple(len(p) for p in prompts), steps, 0, STAGES
    )
    selection = RecordedSelection(origin)
    modules = Modules(MODEL.module)
    with open_platform(SMALL, overrides=overrides or {}, check_hazards=True) as platform:
        engine = Engine(platform, shape, decisions=selection)
        made = make(find_policy(policy), engine, options)
        platform.site.observers.append(made.observe)
        decoder = Decoder(modules, engine, made, len(prompts))
        ledger = Ledger(platform)
        platform.site.observers.append(ledger)
        requests = []
        for number, prompt in enumerate(prompts):
            prefill = dense_of(MODEL, tuple(prompt), steps + 1).prefill
            tokens = [*prompt, prefill.first_token]
            request = Request(f"r{number}", tokens, len(prompt) + steps + 1, len(prompt))
            engine.loop.run(decoder.adopt(request, prefill))
            requests.append(request)
        ledger.reset()
        engine.stages.reset()
        step_ns = []

        async def decode() -> None:
            for _ in range(steps):
                begun = platform.clock.now()
                await decoder.step(requests)
                step_ns.append(platform.clock.now() - begun)

        engine.loop.run(decode())
        devices, links = ledger.snapshot()
        stages = dict(sorted(engine.stages.ns.items()))
        for request in requests:
            engine.loop.run(made.release(request))
        engine.close()
    return Recorded(tuple(step_ns), devices, links, stages, selection.record)


def replay(recorded: Recorded, decisions: Decisions | None, **changes: Any) -> PolicyResult:
    """The same run as a phantom; `changes`: arguments of run_phantom, or `policy_options`, `shape`, `overrides`."""
    origin = recorded.selection.origin
    shape = changes.pop("shape", origin.shape)
    policy = changes.pop("policy", origin.policy)
    wanted = PolicyRequest(policy, changes.pop("policy_options", dict(origin.options)))
    arguments: dict[str, Any] = {
        "context": origin.prompt_tokens,
        "steps": origin.steps,
        "decisions": decisions,
        "model": origin.model,
    }
    overrides = changes.pop("overrides", {})
    with open_platform(SMALL, overrides=overrides, check_hazards=True) as platform:
        return run_phantom(STAGES, shape, platform, wanted, **(arguments | changes))
