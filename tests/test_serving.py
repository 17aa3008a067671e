"""The serving loop: whoever is preempted, chunked or refused, every request has the tokens that it would have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding import SMALL, assert_nothing_is_left, dense_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.commands import Copy, Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, Gone, Timeout
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.registry import discover, open_platform
from tierloop.runtime.arrivals import Arrival, Fixed, Lengths, Lognormal, Mixture, Turn, Uniform, bursts, poisson
from tierloop.runtime.compare import PolicyRequest, find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.model_shapes import KnownShape, find_model
from tierloop.runtime.modules import Modules
from tierloop.runtime.policies.paged import Paged
from tierloop.runtime.policy import Batch, Request
from tierloop.runtime.served import UNFINISHED, Served, ServingResult
from tierloop.runtime.serving import Server, ServingRules
from tierloop.runtime.serving_run import Serving, random_prompts, serve_model, serve_phantom

MODEL = tiny_model()
GPU_NBYTES = 50_331_648
BLOCK_NBYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Of 16 tokens: layers, sides, heads, tokens, elements, bytes."""
SERVING = [p.name for p in discover("policies") if p.distribution == "tierloop" and find_policy(p.name).serves]
EXACT = [name for name in SERVING if find_policy(name).exact]
NEAR = {"budget": 1.0, "threshold_tokens": 90, "segment_tokens": 64, "update_tokens": 32, "local_tokens": 16}
"""NELSSA with every row attended, and requests of more than 90 tokens near the memory."""
ALL: dict[str, dict[str, Any]] = {name: {} for name in EXACT} | {"nelssa": NEAR}
US, MS = 10**3, 10**6


def request(name: str, prompt_tokens: int, output_tokens: int, at_us: int = 0, seed: int = 0) -> Arrival:
    tokens = tuple(tiny_workload(prompt_tokens, seed=seed).token_ids)
    return Arrival(name, at_us * US, (Turn(prompt_tokens, output_tokens),), tokens)


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


@dataclass
class Copied:
    """Bytes that `Copy` commands have moved."""

    nbytes: int = 0

    def __call__(self, completion: Completion) -> None:
        if isinstance(completion.command, Copy):
            self.nbytes += completion.command.source.spans.nbytes


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [8, 23, 1000])
@pytest.mark.parametrize("policy", ALL)
def test_tokens_are_those_of_dense_attention_however_prompts_are_cut(policy: str, step_tokens: int) -> None:
    arrivals = crowd()
    result = serve(arrivals, policy, step_tokens=step_tokens)
    assert_everybody_is_served(result, arrivals)
    assert result.preemptions == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_tokens_are_the_same_when_requests_are_preempted(preemption: str) -> None:
    arrivals = [request(f"r{i}", 20 + 7 * i, 60, i, i) for i in range(6)]
    copied = Copied()
    result = serve(arrivals, blocks=14, watch=copied, preemption=preemption)
    assert_everybody_is_served(result, arrivals)
    assert result.preemptions > 2
    if preemption == "swap":
        assert result.recomputed_tokens == 0
        assert copied.nbytes >= 2 * result.preemptions * BLOCK_NBYTES, "out and in again, a block at least"
    else:
        assert result.recomputed_tokens > 0
        assert copied.nbytes == 0


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20), st.integers(0, 400)), min_size=1, max_size=6),
    blocks=st.integers(8, 20),
    step_tokens=st.integers(6, 100),
    max_batch=st.integers(1, 6),
    preemption=st.sampled_from(["recompute", "swap"]),
)
def test_whatever_arrives_is_served_as_if_it_were_alone(
    lengths: list[tuple[int, int, int]], blocks: int, step_tokens: int, max_batch: int, preemption: str
) -> None:
    arrivals = [
        request(f"r{i}", prompt, output, at_us, prompt)
        for i, (prompt, output, at_us) in enumerate(sorted(lengths, key=lambda each: each[2]))
    ]
    result = serve(arrivals, blocks=blocks, step_tokens=step_tokens, max_batch=max_batch, preemption=preemption)
    assert_everybody_is_served(result, arrivals)


def test_a_model_that_ends_its_answer_is_not_asked_further() -> None:
    arrival = request("r0", 50, 20)
    said = alone(arrival)
    model = tiny_model()
    model.module.generation_config.eos_token_id = said[4]
    with open_platform(SMALL) as platform:
        how = Serving(ServingRules(max_batch=2, step_tokens=32), "float32", 16, 16)
        result = serve_model(model, platform, PolicyRequest("paged"), [arrival], how, stop_at_end=True)
    assert result.requests[0].tokens == said[: said.index(said[4]) + 1]


# -- preemption -----------------------------------------------------------------------------------------------------


def test_the_request_that_came_last_is_preempted() -> None:
    arrivals = [request("first", 60, 80, 0, 1), request("second", 60, 80, 1, 2)]
    result = serve(arrivals, blocks=12)
    assert_everybody_is_served(result, arrivals)
    assert named(result, "first").preemptions == 0
    assert named(result, "second").preemptions > 0


def test_a_swapped_request_goes_on_when_nobody_else_is_left() -> None:
    """It decodes in the very step in which it comes back: nothing else would ring for it."""
    arrivals = [request("first", 60, 60, 0, 1), request("second", 60, 90, 1, 2)]
    result = serve(arrivals, blocks=12, preemption="swap")
    assert_everybody_is_served(result, arrivals)
    assert named(result, "second").preemptions > 0


def test_a_request_is_recomputed_where_the_host_has_no_room_to_swap_it_to() -> None:
    arrivals = [request("first", 60, 80, 0, 1), request("second", 60, 80, 1, 2)]
    room = {"devices.dram.capacity": 4 * BLOCK_NBYTES}
    result = serve(arrivals, blocks=12, preemption="swap", overrides=room)
    assert_everybody_is_served(result, arrivals)
    assert named(result, "second").recomputed_tokens > 0


def test_a_policy_that_does_not_swap_recomputes() -> None:
    """all-gpu takes the space of a request's whole life at once, and gives up idle ones for those who wait."""
    arrivals = [replace(talk("idle", 80, 6, after_us=10_000), at_ns=0), request("next", 150, 10, 3_000, 5)]
    result = serve(arrivals, "all-gpu", blocks=16, preemption="swap")
    assert_everybody_is_served(result, arrivals)
    assert named(result, "idle").recomputed_tokens > 0


# -- order and limits -----------------------------------------------------------------------------------------------


def test_who_comes_first_is_served_first() -> None:
    arrivals = [request(f"r{i}", 30 + 7 * (5 - i), 4, 0, i) for i in range(5)]
    result = serve(arrivals, step_tokens=16)
    first = [each.turns[0].first_ns for each in result.requests]
    assert first == sorted(first)


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    arrivals = [request("running", 100, 60, 0, 1), request("large", 120, 4, 10, 2), request("small", 10, 4, 11, 3)]
    result = serve(arrivals, blocks=13)
    assert_everybody_is_served(result, arrivals)
    assert named(result, "large").turns[0].first_ns > named(result, "running").turns[0].ended_ns
    assert named(result, "small").turns[0].first_ns >= named(result, "large").turns[0].first_ns


@pytest.mark.parametrize("max_batch", [1, 3])
def test_no_more_requests_run_than_a_batch_may_have(max_batch: int) -> None:
    result = serve(crowd(apart_us=1), max_batch=max_batch)
    assert result.running["max"] == max_batch
    assert (result.waiting["max"] or 0) > 0


def test_a_step_has_no_more_tokens_than_it_may_have() -> None:
    per_token = Modules(MODEL.module).projections[0].flops_per_token
    steps: list[int] = []

    def watch(completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.label == "qkv":
            steps.append(command.args.flops // per_token)

    arrivals = crowd()
    serve(arrivals, watch=watch, step_tokens=20)
    assert max(steps) == 20
    processed = sum(a.total_tokens - 1 for a in arrivals)  # the last token of an answer is never run through the model
    assert sum(steps) == 3 * processed


def test_the_first_token_counts_from_when_the_request_came() -> None:
    arrivals = [request("first", 60, 30, 0, 1), request("second", 60, 30, 5, 2)]
    result = serve(arrivals, max_batch=1)
    first, second = (each.turns[0] for each in result.requests)
    assert second.asked_ns == 5 * US
    assert second.first_ns > first.ended_ns
    assert second.ttft_ms == (second.first_ns - 5 * US) / 1e6


def test_a_request_that_comes_to_an_idle_machine_begins_at_once() -> None:
    arrivals = [request("first", 60, 4, 0, 1), request("much later", 60, 4, 900_000, 1)]
    result = serve(arrivals)
    first, later = (each.turns[0] for each in result.requests)
    assert first.ttft_ms == later.ttft_ms
    assert later.asked_ns == 900 * MS


# -- several turns --------------------------------------------------------------------------------------------------


def talk(name: str, prompt_tokens: int, output_tokens: int, turns: int = 2, after_us: int = 200) -> Arrival:
    later = Turn(prompt_tokens // 2, output_tokens, after_us * US)
    return Arrival(name, 0, (Turn(prompt_tokens, output_tokens), *[later] * (turns - 1)))


@pytest.mark.parametrize("policy", ALL)
def test_a_conversation_equals_one_long_prompt_and_keeps_its_rows(policy: str) -> None:
    arrivals = [talk("talk", 70, 6, turns=4), request("other", 90, 30, 100, 3)]
    steps: list[int] = []
    per_token = Modules(MODEL.module).projections[0].flops_per_token

    def watch(completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.label == "qkv":
            steps.append(command.args.flops // per_token)

    result = serve(arrivals, policy, watch=watch)
    assert_everybody_is_served(result, arrivals)
    assert result.recomputed_tokens == 0
    assert sum(steps) == 3 * sum(a.total_tokens - 1 for a in arrivals), "every token went through the model once"
    asked, ended = [t.asked_ns for t in result.requests[0].turns], [t.ended_ns for t in result.requests[0].turns]
    assert [a - b for a, b in zip(asked[1:], ended, strict=False)] == [200 * US] * 3


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_conversation_that_pauses_is_preempted_before_anybody_who_runs(preemption: str) -> None:
    arrivals = [talk("pauses", 80, 6, after_us=30_000), request("first", 60, 70, 1, 4), request("last", 60, 70, 2, 5)]
    result = serve(arrivals, blocks=17, preemption=preemption)
    assert_everybody_is_served(result, arrivals)
    assert [named(result, name).preemptions for name in ("pauses", "first", "last")] == [1, 0, 0]
    assert (named(result, "pauses").recomputed_tokens > 0) == (preemption == "recompute")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nobody_waits_for_the_end_of_a_pause(preemption: str) -> None:
    """There is nothing to do but to take the room of whoever pauses, and that is done at once."""
    arrivals = [talk("pauses", 80, 6, after_us=900_000), request("waits", 120, 4, 20_000, 4)]
    result = serve(arrivals, blocks=10, preemption=preemption)
    assert_everybody_is_served(result, arrivals)
    assert named(result, "waits").turns[0].ended_ns < 100 * MS
    assert named(result, "pauses").preemptions == 1


# -- what cannot be served ------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_fails_alone_with_its_reason() -> None:
    others = crowd(4)
    arrivals = [*others[:2], replace(request("giant", 700, 4, 0, 9), at_ns=others[1].at_ns), *others[2:]]
    result = serve(arrivals, blocks=24)
    assert list(result.failures) == ["giant"]
    assert "700 tokens of giant need 44 blocks" in result.failures["giant"]
    assert not named(result, "giant").tokens
    for arrival in others:
        assert named(result, arrival.name).tokens == alone(arrival)


def test_nobody_waits_behind_a_request_that_never_fits() -> None:
    others = [request("running", 60, 200, 0, 1), request("behind", 60, 4, 30, 2)]
    arrivals = [others[0], request("giant", 700, 4, 20, 9), others[1]]
    result = serve(arrivals, blocks=30)
    assert list(result.failures) == ["giant"]
    assert named(result, "behind").turns[0].ended_ns < named(result, "running").turns[0].ended_ns


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_that_outgrows_the_pool_fails_with_what_it_has_said(preemption: str) -> None:
    arrivals = [request("small", 60, 20, 0, 1), request("grows", 60, 300, 1, 2)]
    result = serve(arrivals, blocks=12, preemption=preemption)
    assert list(result.failures) == ["grows"]
    said = named(result, "grows").tokens
    assert 100 < len(said) < 300
    assert said == alone(arrivals[1])[: len(said)]
    assert named(result, "small").tokens == alone(arrivals[0])


def test_arrivals_that_are_wrong_are_refused() -> None:
    early, late = request("a", 10, 2, 0), request("b", 10, 2, 50)
    for arrivals, message in (
        ([], "there are 0 requests"),
        ([late, early], "arrivals must be in the order of their times"),
        ([replace(early, at_ns=-1)], "the arrival of a is -1 ns"),
        ([early, early], "two requests are named 'a'"),
        ([request("long", 2040, 20)], "2,060 tokens does not fit tiny's context of 2,048"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            serve(arrivals)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"step_tokens": 2.5}, "step_tokens is 2.5"),
        ({"max_batch": 9, "step_tokens": 8}, "step_tokens is 8; it must be at least max_batch, which is 9"),
        ({"preemption": "kill"}, "preemption is 'kill'; it must be one of recompute, swap"),
        ({"prefill_workers": -1}, "prefill_workers is -1; it must be a whole number from 0 to"),
        ({"recomputes": -1}, "recomputes is -1; it must be a whole number from 0 to 1,000"),
        ({"recomputes": True}, "recomputes is True"),
    ],
)
def test_rules_that_are_wrong_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ServingRules(**rules)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"utilisation": 0.0}, "utilisation is 0.0"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4'"),
        ({"weight_dtype": "float8"}, "weight_dtype 'float8'"),
        ({"layers": -1}, "layers are -1"),
    ],
)
def test_a_way_of_serving_that_is_wrong_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Serving(**how)


def test_a_policy_that_takes_no_prompts_in_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="policy stream-offload cannot serve"):
        serve([request("a", 10, 2)], "stream-offload")


# -- devices that are lost ------------------------------------------------------------------------------------------


@dataclass
class Loses:
    """A paged policy that loses the rows of one request, as if they lay on a device of their own, so many times."""

    times: int
    after: int = 12
    name: str = "r1"
    calls: int = field(default=0, init=False)

    def __call__(self, engine: Engine) -> Paged:
        loses = self

        class Losing(Paged):
            async def attend(self, layer: int, batch: Batch) -> list[Completion]:
                done = await super().attend(layer, batch)
                loses.lose(batch.requests)
                return done

        return Losing(engine)

    def lose(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self.calls += each.name == self.name
            if each.name == self.name and self.times and self.calls >= self.after:
                self.times, self.calls = self.times - 1, 0
                each.fail(Gone("emu:pnm", "launch", "unplugged"))


@dataclass
class Bench:
    """A server of the tiny model on a platform of one's own, for what `serve_model` does not show."""

    platform: Platform
    policy: Callable[[Engine], Paged] = Paged
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.platform, kv_shape(MODEL, "float32", 16, 16))
        rules = ServingRules(max_batch=8, step_tokens=64)
        made = self.policy(self.engine)
        decoder = Decoder(Modules(MODEL.module), self.engine, made, rules.step_tokens)
        self.server = Server(decoder, self.engine, made, rules, random_prompts(MODEL.shape.vocab, 0))

    def serve(self, arrivals: Sequence[Arrival], deadline_ns: int = 1 << 60) -> tuple[Served, ...]:
        self.engine.loop.run(self.server.serve(arrivals), deadline_ns)
        self.engine.close()
        assert_nothing_is_left(self.platform)
        return self.server.log.served()


def test_a_request_whose_device_is_lost_is_recomputed_once() -> None:
    arrivals = crowd()
    with open_platform(SMALL, check_hazards=True) as platform:
        served = Bench(platform, Loses(1)).serve(arrivals)
    assert [each.tokens for each in served] == [alone(each) for each in arrivals]
    assert [each.preemptions for each in served] == [0, 1, 0, 0, 0, 0]
    assert served[1].recomputed_tokens > 0


def test_a_request_whose_device_is_lost_again_fails_alone() -> None:
    arrivals = crowd()
    with open_platform(SMALL, check_hazards=True) as platform:
        served = Bench(platform, Loses(2)).serve(arrivals)
    assert [each.name for each in served if each.failure] == ["r1"]
    assert "emu:pnm" in served[1].failure
    assert "unplugged" in served[1].failure
    assert [each.tokens for each in served if not each.failure] == [alone(a) for a in arrivals if a.name != "r1"]


@pytest.mark.parametrize("left", [0, 5, 60])
def test_a_device_that_everybody_needs_ends_the_run_with_its_error(left: int) -> None:
    with open_platform(SMALL, check_hazards=True) as platform:
        gpu: Any = platform.devices["emu:gpu"]
        submit, count = gpu.submit, iter(range(10**6))

        def failing(*arguments: Any, **options: Any) -> Any:
            if next(count) >= left:
                raise Gone("emu:gpu", "submit", "unplugged")
            return submit(*arguments, **options)

        gpu.submit = failing
        with pytest.raises(Gone, match="unplugged"):
            serve_model(MODEL, platform, PolicyRequest("paged"), crowd(), Serving(ServingRules(step_tokens=256)))
        gpu.submit = submit
        platform.close()


def test_a_run_that_is_cut_off_says_who_was_not_finished() -> None:
    arrivals = crowd(3, output_tokens=200)
    with open_platform(SMALL, check_hazards=True) as platform:
        bench = Bench(platform)
        with pytest.raises(Timeout):
            bench.serve(arrivals, deadline_ns=3 * MS)
        assert platform.clock.now() == 3 * MS
        served = bench.server.log.served()
    assert {each.failure for each in served} == {UNFINISHED}
    for each, arrival in zip(served, arrivals, strict=True):
        assert 0 < len(each.tokens) < 200
        assert each.tokens == alone(arrival)[: len(each.tokens)]


# -- phantom runs ---------------------------------------------------------------------------------------------------

TINY = KnownShape(3, 48, 6, 2, 16, 96, 211, 2048, "tiny", gated=True, tied=False)


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


# -- real devices ---------------------------------------------------------------------------------------------------


def open_real(folder: Path) -> Platform:
    """This host's memory and cores, and nothing else."""
    file = folder / "real.toml"
    file.write_text(
        'description = "this host"\nclock = "wall"\nhost = "dram"\n'
        '[devices.dram]\ndriver = "cpu"\ncapacity = 67_108_864\n'
    )
    return open_platform(file)


def test_this_hosts_cores_serve_and_their_times_are_measured(tmp_path: Path) -> None:
    arrivals = crowd(4, output_tokens=5, apart_us=2_000)
    with open_real(tmp_path) as platform:
        how = Serving(ServingRules(max_batch=8, step_tokens=64), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("cpu-attention"), arrivals, how)
    assert_everybody_is_served(result, arrivals)
    assert (result.provenance, result.clock, result.dilation) == ("measured", "wall", 1)
    for each, arrival in zip(result.requests, arrivals, strict=True):
        assert each.arrived_ns == arrival.at_ns
        assert np.all(np.diff(each.turns[0].token_ns) > 0)


def test_a_dilated_machine_serves_the_same_tokens_in_times_that_are_scaled_back() -> None:
    arrivals = crowd(3, output_tokens=4, apart_us=2_000)
    with open_platform(SMALL, clock="wall", dilation=400) as platform:
        how = Serving(ServingRules(max_batch=8, step_tokens=64), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("paged"), arrivals, how)
    assert_everybody_is_served(result, arrivals)
    assert result.dilation == 400
    assert [each.arrived_ns for each in result.requests] == [each.at_ns for each in arrivals]


def test_a_turn_that_is_asked_while_its_conversation_is_swapped_out_is_answered() -> None:
    prompts = [tuple(tiny_workload(length, seed=length).token_ids) for length in (60, 61, 62)]
    arrivals = [
        Arrival("r0", 0, (Turn(60, 1), Turn(5, 3)), prompts[0]),
        Arrival("r1", 1, (Turn(61, 4),), prompts[1]),
        Arrival("r2", 2, (Turn(62, 4),), prompts[2]),
    ]
    for blocks in (9, 10, 12):
        with open_platform(SMALL) as platform:
            block = 3 * 2 * 2 * 16 * 16 * 4
            how = Serving(ServingRules(2, 64, "swap"), "float32", 16, 16, blocks * block / 50_331_648)
            result = serve_model(MODEL, platform, PolicyRequest("paged"), arrivals, how)
            assert not result.failures
            assert [len(turn.token_ns) for turn in result.requests[0].turns] == [1, 3]
