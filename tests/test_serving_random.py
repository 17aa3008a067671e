"""Any requests, served under any options in any memory, with devices lost on the way: everybody gets the right tokens.

Whoever fails has said nothing wrong before; nothing is left allocated, and every run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.decoding import SMALL, assert_nothing_is_left, dense_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.clocks import VirtualClock
from tierloop.devices.errors import ConfigurationError, Gone
from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival, Turn
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, random_prompts, serve_model

NEAR = SMALL.parent / "near.toml"
GPU_NBYTES = 50_331_648
MODEL = tiny_model(num_layers=1, num_q_heads=16, num_kv_heads=8, context=1024)
LENGTHS = st.one_of(st.integers(1, 200), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 193]))


@dataclass(frozen=True)
class Case:
    """A serving run; devices are closed at the times of `lost`."""

    arrivals: list[Arrival]
    rules: ServingRules
    policy: str
    options: dict[str, Any]
    utilisation: float
    overrides: dict[str, Any]
    lost: list[tuple[int, str]] = field(default_factory=list)


@st.composite
def arrivals_of(draw: st.DrawFn) -> list[Arrival]:
    at, found = 0, []
    for number in range(draw(st.integers(1, 4))):
        at += draw(st.sampled_from([0, 1, 1000, 50_000, 300_000, 3_000_000]))
        length = draw(LENGTHS)
        turns = [Turn(length, draw(st.sampled_from([1, 2, 8, 20])))]
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            pause = draw(st.sampled_from([0, 1, 100_000, 5_000_000]))
            turns.append(Turn(draw(st.sampled_from([1, 16, 60])), draw(st.sampled_from([1, 5])), pause))
        prompt = tuple(tiny_workload(length, seed=draw(st.integers(0, 7))).token_ids)
        found.append(Arrival(f"r{number}", at, tuple(turns), prompt))
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    some = st.sampled_from
    batch = draw(some([1, 2, 4]))
    preemption: Literal["recompute", "swap"] = draw(some(["recompute", "swap"]))
    rules = ServingRules(batch, max(batch, draw(some([2, 16, 64, 256]))), preemption)
    megabytes = draw(some([0.3, 0.7, 1.0, 2.0, 5.0, 45.0]))
    policy, options, overrides, lost = draw(some(["nelssa", "nelssa", "nelssa", "paged"])), {}, {}, []
    if policy == "nelssa":
        devices = draw(some([1, 2, 3, 8]))
        near = [f"emu:pnm{number}" for number in range(devices)]
        options = {
            "near": near,
            "budget": 1.0,
            "segment_tokens": draw(some([16, 64, 128])),
            "update_tokens": draw(some([16, 32])),
            "cluster_tokens": draw(some([1, 4, 16])),
            "local_tokens": draw(some([1, 16, 32])),
            "sink_tokens": draw(some([0, 1, 40])),
            "iterations": 1,
            "partition": draw(some(["head", "token", "request", "sequence"])),
            "threshold_tokens": draw(some([0, 1, 16, 100, 128, 200, 100_000])),
            "adaptive": draw(st.booleans()),
            "migrate_tokens": draw(some([1, 16, 1024])),
            "watermark": draw(some([0, 0.05, 0.5])),
            "index_share": draw(some([0, 0.25, 0.9])),
            "without": draw(st.lists(some(["near", "migration", "partition", "overlap"]), max_size=1)),
        }
        for number in range(devices):
            if draw(some([False, False, True])):
                overrides[f"devices.pnm{number}.capacity"] = draw(some([4096, 40_960, 131_072, 524_288]))
        if draw(some([False, False, True])):
            lost = [(draw(st.integers(1, 20_000_000)), draw(some(near)))]
    return Case(draw(arrivals_of()), rules, policy, options, megabytes * 1e6 / GPU_NBYTES, overrides, lost)


def wanted(arrival: Arrival) -> list[int]:
    """What plain generation says to all turns of a conversation."""
    tokens, said = list(arrival.tokens or ()), list[int]()
    for number, turn in enumerate(arrival.turns):
        if number:
            tokens += random_prompts(MODEL.shape.vocab, 0)(arrival, number)
        answer = dense_of(MODEL, tuple(tokens), turn.output_tokens).tokens
        said += answer
        tokens += answer
    return said


@given(case=cases())
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25)
def test_everybody_gets_the_right_tokens_whatever_happens(case: Case) -> None:
    with open_platform(NEAR, overrides=case.overrides) as platform:
        assert isinstance(platform.clock, VirtualClock)
        for at_ns, memory in case.lost:
            platform.clock.call_at(at_ns, platform.memory_owner(memory).close)
        how = Serving(case.rules, "float32", 16, 16, case.utilisation)
        try:
            result = serve_model(MODEL, platform, PolicyRequest(case.policy, case.options), case.arrivals, how)
        except ConfigurationError as error:
            assert "bytes for the KV cache; a block of 16 tokens has" in str(error)  # noqa: PT017  # one of two ends
            return
        if not case.lost:
            assert_nothing_is_left(platform)
    if result.refused:
        return
    for arrival, served in zip(case.arrivals, result.requests, strict=True):
        right = wanted(arrival)
        assert list(served.tokens) == (right[: len(served.tokens)] if served.failure else right)
        assert all(turn.first_ns >= turn.asked_ns for turn in served.turns if turn.num_tokens)


def test_the_random_tester_really_loses_devices() -> None:
    arrivals = [Arrival("r0", 0, (Turn(200, 20),), tuple(tiny_workload(200).token_ids))]
    with open_platform(NEAR) as platform:
        platform.memory_owner("emu:pnm0").close()
        try:
            platform.memory_owner("emu:pnm0").alloc(64)
        except Gone:
            pass
        else:
            raise AssertionError("a closed device still gives memory")
        options = {"near": ["emu:pnm0"], "threshold_tokens": 1, "segment_tokens": 64, "update_tokens": 16}
        how = Serving(ServingRules(1, 64), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("nelssa", options), arrivals, how)
    assert list(result.requests[0].tokens) == wanted(arrivals[0])
