"""Requests for the serving loop, served with the tiny model, and what plain transformers would answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.decoding import SMALL, assert_nothing_is_left, dense_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.registry import discover, open_platform
from tierloop.runtime.arrivals import Arrival, Turn
from tierloop.runtime.compare import PolicyRequest, find_policy
from tierloop.runtime.model_shapes import KnownShape
from tierloop.runtime.modules import Modules
from tierloop.runtime.served import Served, ServingResult
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, random_prompts, serve_model

MODEL = tiny_model()
TINY = KnownShape(3, 48, 6, 2, 16, 96, 211, 2048, "tiny", gated=True, tied=False)
"""The shape of the tiny model, for phantom runs."""
GPU_NBYTES = 50_331_648
BLOCK_NBYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Of 16 tokens: layers, sides, heads, tokens, elements, bytes."""
SERVING = [p.name for p in discover("policies") if p.distribution == "tierloop" and find_policy(p.name).serves]
EXACT = [name for name in SERVING if find_policy(name).exact]
NEAR = {"budget": 1.0, "threshold_tokens": 90, "segment_tokens": 64, "update_tokens": 32, "local_tokens": 16}
"""NELSSA with every row attended, and requests of more than 90 tokens near the memory."""
ALL: dict[str, dict[str, Any]] = {name: {} for name in EXACT} | {"nelssa": NEAR}
US, MS = 10**3, 10**6


@dataclass
class Processed:
    """How many tokens each step put through each layer of the model, as its `qkv` launches say."""

    tokens: list[int] = field(default_factory=list)

    def __call__(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.label == "qkv":
            self.tokens.append(command.args.flops // Modules(MODEL.module).projections[0].flops_per_token)


def request(name: str, prompt_tokens: int, output_tokens: int, at_us: int = 0, seed: int = 0) -> Arrival:
    tokens = tuple(tiny_workload(prompt_tokens, seed=seed).token_ids)
    return Arrival(name, at_us * US, (Turn(prompt_tokens, output_tokens),), tokens)


def talk(name: str, prompt_tokens: int, output_tokens: int, turns: int = 2, after_us: int = 200) -> Arrival:
    later = Turn(prompt_tokens // 2, output_tokens, after_us * US)
    return Arrival(name, 0, (Turn(prompt_tokens, output_tokens), *[later] * (turns - 1)))


def crowd(count: int = 6, output_tokens: int = 12, apart_us: int = 40) -> list[Arrival]:
    """Requests of different lengths, close together."""
    return [request(f"r{i}", 40 + (37 * i) % 120, output_tokens, i * apart_us, i) for i in range(count)]


def room_for(blocks: int) -> float:
    """The utilisation that leaves a pool of so many blocks."""
    return (blocks + 0.5) * BLOCK_NBYTES / GPU_NBYTES


def serve(
    arrivals: Sequence[Arrival],
    policy: str = "paged",
    blocks: int = 400,
    watch: Callable[[Completion], None] | None = None,
    overrides: dict[str, Any] | None = None,
    **rules: Any,
) -> ServingResult:
    """With the tiny model and real bytes, hazards checked, and nothing left behind."""
    how = Serving(ServingRules(**{"max_batch": 8, "step_tokens": 64} | rules), "float32", 16, 16, room_for(blocks))
    with open_platform(SMALL, check_hazards=True, overrides=overrides or {}) as platform:
        if watch is not None:
            platform.site.observers.append(watch)
        result = serve_model(MODEL, platform, PolicyRequest(policy, ALL.get(policy, {})), arrivals, how)
        assert result.refused is None
        assert_nothing_is_left(platform)
    return result


def alone(arrival: Arrival) -> tuple[int, ...]:
    """What plain transformers say: each turn's prompt after everything before it, computed anew."""
    prompt_of = random_prompts(MODEL.shape.vocab, 0)
    told: list[int] = []
    said: list[int] = []
    for number, turn in enumerate(arrival.turns):
        told += prompt_of(arrival, number)
        answer = dense_of(MODEL, tuple(told), turn.output_tokens).tokens[: turn.output_tokens]
        told += answer
        said += answer
    return tuple(said)


def assert_everybody_is_served(result: ServingResult, arrivals: Sequence[Arrival]) -> None:
    assert not result.failures
    assert [each.name for each in result.requests] == [each.name for each in arrivals]
    for served, arrival in zip(result.requests, arrivals, strict=True):
        assert served.tokens == alone(arrival), served.name


def named(result: ServingResult, name: str) -> Served:
    (served,) = (each for each in result.requests if each.name == name)
    return served


def open_real(folder: Path) -> Platform:
    """This host's memory and cores, and nothing else."""
    file = folder / "real.toml"
    file.write_text(
        'description = "this host"\nclock = "wall"\nhost = "dram"\n'
        '[devices.dram]\ndriver = "cpu"\ncapacity = 67_108_864\n'
    )
    return open_platform(file)
