"""What needs a real model: what KVDrive keeps of dense attention by index, and what windows hold (K2, K7).

Text, prompts and forced tokens are those of HybridGen's reproduction; every output is checked by the float64 oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tierloop.devices.registry import open_platform
from tierloop.runtime.study import Study
from tierloop.tools.reproducing_hybridgen_model import prompt_of, text_model
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS


@dataclass(frozen=True)
class Decoded:
    """What a setting kept of dense attention, and the share of chosen entries that its windows held."""

    mass_recall: float
    topk_recall: float
    output_error: float
    worst_ratio: float
    """Error against the oracle's bound: at most 1."""
    hit_rate: float


@dataclass(frozen=True)
class Kept:
    """Few and many centroids of each prompt, chunks of 4 and of 8 of the first one; and all means, as plain data."""

    centroids: Sequence[tuple[Decoded, Decoded]]
    chunks: Sequence[tuple[Decoded, Decoded]]
    details: dict[str, float]


def kept_by(study: Study) -> Kept:
    """What is kept of attention by number of centroids and size of chunks."""
    c = CONSTANTS
    few, many = ([decoded(study, p, centroids=n) for p in range(c.prompts)] for n in c.real_centroids)
    chunks = {n: [decoded(study, 0, chunk=n)] for n in c.chunks}
    named = {f"{n} centroids": each for n, each in zip(c.real_centroids, (few, many), strict=True)}
    named |= {f"chunks of {n}": each for n, each in chunks.items()}
    details = {name: sum(d.mass_recall for d in each) / len(each) for name, each in named.items()}
    first, *_, last = c.chunks[1:]
    return Kept(list(zip(few, many, strict=True)), list(zip(chunks[first], chunks[last], strict=True)), details)


def decoded(
    study: Study, prompt: int, chunk: int = CONSTANTS.chunk, centroids: int = CONSTANTS.real_centroids[-1],
    eviction: str = "la",
) -> Decoded:  # fmt: skip
    """A prompt's text, decoded under one setting."""
    name = f"kvdrive {prompt} {chunk} {centroids} {eviction}"
    options = {"chunk_tokens": chunk, "centroids": centroids, "eviction": eviction}
    return cast("Decoded", study.once(name, lambda: _decode(study, prompt, options)))


def _decode(study: Study, prompt: int, options: dict[str, Any]) -> Decoded:
    from tierloop.runtime.compare import find_policy, kv_shape
    from tierloop.runtime.decoder import Decoder
    from tierloop.runtime.engine import Engine
    from tierloop.runtime.modules import Modules
    from tierloop.runtime.oracle import Recorder
    from tierloop.runtime.policy import Request, make

    c = CONSTANTS
    held = prompt_of(study, prompt)
    model = text_model(study)
    study.tell()
    shape = kv_shape(model)
    modules = study.once("modules", lambda: Modules(model.module))
    fixed = {
        "persistent": "none", "budget": c.budget_high, "sink_tokens": c.sink, "local_tokens": c.local,
        "window": c.window, "seed": study.seed,
    }  # fmt: skip
    with open_platform(c.real_platform, clock="virtual") as platform:
        engine = Engine(platform, shape)
        policy = make(find_policy("kvdrive"), engine, {**fixed, **options})
        platform.site.observers.append(policy.observe)
        recorder = Recorder(shape, modules.scale, range(0, shape.num_layers, c.real_layers))
        decoder = Decoder(modules, engine, policy, recorder=recorder)
        count, steps = len(held.prefill.tokens), min(c.real_steps, len(held.fed))
        request = Request("request0", [*held.prefill.tokens, held.fed[0]], count + steps + 1)
        request.prompt_tokens = count
        engine.loop.run(decoder.adopt(request, held.prefill))

        async def decode() -> None:
            for target in held.expected[:steps]:
                await decoder.score([request], [target])

        engine.loop.run(decode())
        engine.loop.run(policy.release(request))
        report = policy.report()["request0"]
        engine.close()
    found = recorder.verdict()
    hits, misses = report["hits"], report["from_dram"] + report["from_ssd"]
    return Decoded(
        found.mass_recall, found.topk_recall, found.output_error, found.worst_ratio, hits / max(hits + misses, 1)
    )
