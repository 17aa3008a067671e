"""Phantom serving: as long as the real run takes, with few layers for all, of models larger than this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decoding import SMALL, assert_nothing_is_left
from tests.serving_rig import EXACT, GPU_NBYTES, TINY, US, crowd, open_real, room_for, serve, talk
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival, Fixed, Lengths, Lognormal, Mixture, Uniform, bursts, poisson
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.served import ServingResult
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_phantom


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", EXACT)
def test_a_phantom_run_takes_as_long_as_the_real_one(policy: str, preemption: str) -> None:
    arrivals = [*crowd(5, output_tokens=40), replace(talk("talk", 70, 30), at_ns=200 * US)]
    blocks = 16
    real = serve(arrivals, policy, blocks=blocks, preemption=preemption)
    weights = TINY.weight_nbytes(4) / GPU_NBYTES
    how = Serving(
        ServingRules(max_batch=8, step_tokens=64, preemption=preemption),  # type: ignore[arg-type]  # one of both
        "float32",
        16,
        16,
        room_for(blocks) + weights,
        layers=0,
        weight_dtype="float32",
    )
    with open_platform(SMALL, check_hazards=True) as platform:
        phantom = serve_phantom(TINY, platform, PolicyRequest(policy), arrivals, how)
        assert_nothing_is_left(platform)
    assert phantom.requests == tuple(replace(each, tokens=(0,) * len(each.tokens)) for each in real.requests)
    assert (phantom.samples, phantom.steps, phantom.elapsed_ns) == (real.samples, real.steps, real.elapsed_ns)
    assert (phantom.devices, phantom.links) == (real.devices, real.links)
    assert (real.provenance, phantom.provenance) == ("simulated", "simulated")
    assert (real.preemptions > 0) == (policy == "paged")


LLAMA = find_model("llama-3-8b-1048k")
MIXED = Mixture(
    (
        (0.9, Lengths(Lognormal(500, 0.6, 50, 4000), Uniform(5, 40), "short")),
        (0.1, Lengths(Fixed(48_000), Fixed(40), "long")),
    )
)


def phantom(
    layers: int, policy: str = "paged", arrivals: Sequence[Arrival] = (), utilisation: float = 0.9, **rules: Any
) -> ServingResult:
    arrivals = arrivals or poisson(MIXED, per_s=8, requests=16, seed=5)
    with open_platform("nelssa-h100-4pnm") as platform:
        how = Serving(ServingRules(**rules), layers=layers, utilisation=utilisation)
        result = serve_phantom(LLAMA, platform, PolicyRequest(policy), arrivals, how)
        assert_all_is_free(platform)
    return result


def assert_all_is_free(platform: Platform) -> None:
    """As `assert_nothing_is_left`, of memories that are larger than this host's."""
    for device, memory in platform.memories():
        device.free(device.alloc(memory.capacity // memory.alignment * memory.alignment, memory.name, phantom=True))


def test_two_layers_stand_for_all() -> None:
    """The largest error of any metric against all 32 layers."""
    some, every = phantom(2), phantom(0)
    assert "2 layers stand for 32" in some.notes
    assert not any("stand for" in note for note in every.notes)
    assert largest_error(some, every) < 1e-4
    assert some.steps == every.steps


@pytest.mark.slow
def test_two_layers_stand_for_all_when_requests_are_swapped() -> None:
    """A pool of 30 thousand tokens for ten requests that come to have 31 thousand."""
    arrivals = bursts(Lengths(Uniform(2600, 2800), Fixed(300)), every_ns=0, bursts=1, size=10)
    some, every = (phantom(n, arrivals=arrivals, utilisation=0.251, preemption="swap") for n in (2, 0))
    assert some.preemptions > 0
    assert some.preemptions == every.preemptions
    assert largest_error(some, every) < 1e-3


def largest_error(some: ServingResult, every: ServingResult) -> float:
    """Of percentiles of TTFT, TPOT and latency, relative."""
    pairs = [
        (getattr(some, metric)[name], getattr(every, metric)[name])
        for metric in ("ttft_ms", "tpot_ms", "latency_ms")
        for name in ("p50", "p95", "p99", "mean", "max")
    ]
    return float(max(abs(ours / theirs - 1) for ours, theirs in pairs))


def test_two_hundred_requests_are_served_and_the_same_ones_give_the_same_times() -> None:
    arrivals = poisson(Lengths(Uniform(100, 600), Fixed(5)), per_s=20, requests=200, seed=1)
    result, again = phantom(2, arrivals=arrivals), phantom(2, arrivals=arrivals)
    assert not result.failures
    assert len(result.requests) == 200
    assert (result.requests, result.samples) == (again.requests, again.samples)


def test_long_prompts_wait_for_the_room_that_a_gpu_has() -> None:
    """80 GB × 0.9 − 16 GB of weights hold 427 thousand tokens: four requests of 100 thousand, and a fifth waits."""
    arrivals = bursts(Lengths(Fixed(100_000), Fixed(300)), every_ns=0, bursts=1, size=5)
    result = phantom(2, arrivals=arrivals)
    assert result.running["max"] == 4
    first = sorted(each.turns[0].first_ns for each in result.requests)
    assert first[4] > min(each.turns[0].ended_ns for each in result.requests)


def test_two_gpus_hold_twice_as_many_and_more() -> None:
    """The weights are stored once: 976 thousand tokens, nine requests of 100 thousand."""
    arrivals = bursts(Lengths(Fixed(100_000), Fixed(600)), every_ns=0, bursts=1, size=11)
    with open_platform("nelssa-h100x2") as platform:
        result = serve_phantom(LLAMA, platform, PolicyRequest("paged"), arrivals, Serving())
    assert result.running["max"] == 9
    assert not result.failures


def test_a_policy_that_has_no_room_at_all_is_refused() -> None:
    with open_platform("nelssa-h100", overrides={"devices.gpu.capacity": 17_000_000_000}) as platform:
        arrivals = bursts(Lengths(Fixed(100), Fixed(4)), every_ns=0, bursts=1)
        with pytest.raises(ConfigurationError, match="0 bytes for the KV cache"):
            serve_phantom(LLAMA, platform, PolicyRequest("paged"), arrivals, Serving())
        assert_all_is_free(platform)


def test_a_wall_clock_is_no_place_for_phantoms(tmp_path: Path) -> None:
    with open_real(tmp_path) as platform, pytest.raises(ConfigurationError, match="a phantom run takes virtual time"):
        serve_phantom(TINY, platform, PolicyRequest("paged"), crowd(1), Serving())
