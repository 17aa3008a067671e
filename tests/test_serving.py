"""The serving loop: whoever is chunked, late or refused, every request has the tokens that it would have alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding import SMALL
from tests.serving_rig import ALL, MS, US, Processed, alone, assert_everybody_is_served, crowd, named, request, serve
from tests.tiny import tiny_model
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_model

# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [8, 23, 1000])
@pytest.mark.parametrize("policy", ALL)
def test_tokens_are_those_of_dense_attention_however_prompts_are_cut(policy: str, step_tokens: int) -> None:
    arrivals = crowd()
    result = serve(arrivals, policy, step_tokens=step_tokens)
    assert_everybody_is_served(result, arrivals)
    assert result.preemptions == 0


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


# -- order and limits ------------------------------------------------------------------------------------------------


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
    processed = Processed()
    arrivals = crowd()
    serve(arrivals, watch=processed, step_tokens=20)
    assert max(processed.tokens) == 20
    expected = sum(a.total_tokens - 1 for a in arrivals)  # the last token of an answer is never run through the model
    assert sum(processed.tokens) == 3 * expected


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


# -- what cannot be served -------------------------------------------------------------------------------------------


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
