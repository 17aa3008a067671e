"""Requests that are preempted, and conversations that pause: who gives up room, and what is recomputed or swapped."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.decoding import SMALL
from tests.serving_rig import (
    ALL,
    BLOCK_NBYTES,
    GPU_NBYTES,
    MODEL,
    MS,
    US,
    Processed,
    assert_everybody_is_served,
    named,
    request,
    serve,
    talk,
)
from tests.tiny import tiny_workload
from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival, Turn
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_model


@dataclass
class Copied:
    """Bytes that `Copy` commands have moved."""

    nbytes: int = 0

    def __call__(self, completion: Completion) -> None:
        if isinstance(completion.command, Copy):
            self.nbytes += completion.command.source.spans.nbytes


# -- preemption ------------------------------------------------------------------------------------------------------


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


# -- several turns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_a_conversation_equals_one_long_prompt_and_keeps_its_rows(policy: str) -> None:
    arrivals = [talk("talk", 70, 6, turns=4), request("other", 90, 30, 100, 3)]
    processed = Processed()
    result = serve(arrivals, policy, watch=processed)
    assert_everybody_is_served(result, arrivals)
    assert result.recomputed_tokens == 0
    assert sum(processed.tokens) == 3 * sum(a.total_tokens - 1 for a in arrivals), (
        "every token went through the model once"
    )
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


def test_a_turn_that_is_asked_while_its_conversation_is_swapped_out_is_answered() -> None:
    prompts = [tuple(tiny_workload(length, seed=length).token_ids) for length in (60, 61, 62)]
    arrivals = [
        Arrival("r0", 0, (Turn(60, 1), Turn(5, 3)), prompts[0]),
        Arrival("r1", 1, (Turn(61, 4),), prompts[1]),
        Arrival("r2", 2, (Turn(62, 4),), prompts[2]),
    ]
    for blocks in (9, 10, 12):
        with open_platform(SMALL) as platform:
            how = Serving(ServingRules(2, 64, "swap"), "float32", 16, 16, blocks * BLOCK_NBYTES / GPU_NBYTES)
            result = serve_model(MODEL, platform, PolicyRequest("paged"), arrivals, how)
            assert not result.failures
            assert [len(turn.token_ns) for turn in result.requests[0].turns] == [1, 3]
