"""Records of a serving run: what the log makes of events, and the metrics, against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.results import DeviceUse, LinkUse
from tierloop.runtime.served import NEVER, UNFINISHED, Limits, Sample, Served, ServedTurn, ServingResult
from tierloop.runtime.serving_log import Log
from tierloop.runtime.spread import nothing

MS = 10**6


def turn(asked_ms: int, *token_ms: int, complete: bool = True) -> ServedTurn:
    token_ns = np.array(token_ms, dtype=np.int64) * MS
    first_ns, ended_ns = (int(token_ns[0]), int(token_ns[-1])) if token_ms else (NEVER, asked_ms * MS)
    return ServedTurn(asked_ms * MS, first_ns, ended_ns, len(token_ms), token_ns, complete)


def request(name: str, *turns: ServedTurn, **more: Any) -> Served:
    return Served(name, turns[0].asked_ns, turns, 10, **more)


TWO = ServingResult(
    "all-gpu",
    requests=(
        request("a", turn(0, 10, 12, 20), turn(100, 104, 106), kind="short", preemptions=2, recomputed_tokens=30),
        request("b", turn(0, 30), kind="long", migrations=1, preemptions=1, recomputed_tokens=5),
    ),
    elapsed_ns=200 * MS,
)


# -- metrics --------------------------------------------------------------------------------------------------------


def test_ttft_is_from_when_each_turn_was_asked() -> None:
    assert TWO.ttft_ms == {"p50": 10, "p95": pytest.approx(28), "p99": pytest.approx(29.6), "mean": 44 / 3, "max": 30}


def test_tpot_is_the_mean_gap_of_each_turn_and_pauses_between_turns_are_none_of_it() -> None:
    # (20 − 10) / 2 and (106 − 104) / 1; the turn of one token has none
    assert TWO.tpot_ms == {"p50": 3.5, "p95": pytest.approx(4.85), "p99": pytest.approx(4.97), "mean": 3.5, "max": 5}


def test_itl_is_every_gap_between_tokens_of_a_turn() -> None:
    # 2, 8 and 2
    assert TWO.itl_ms == {"p50": 2, "p95": pytest.approx(7.4), "p99": pytest.approx(7.88), "mean": 4, "max": 8}


def test_latency_is_from_when_a_turn_was_asked_to_its_end() -> None:
    assert (TWO.latency_ms["p50"], TWO.latency_ms["max"]) == (20, 30)


def test_throughput_is_all_tokens_over_the_whole_run() -> None:
    assert (TWO.num_tokens, TWO.tokens_per_s) == (6, 30)


def test_counts_are_sums_over_requests() -> None:
    assert (TWO.preemptions, TWO.recomputed_tokens, TWO.migrations, TWO.failures) == (3, 35, 1, {})


def test_metrics_of_a_kind_are_of_its_requests_alone() -> None:
    assert TWO.kinds == ("short", "long")
    assert TWO.of("long").ttft_ms["p50"] == 30
    assert TWO.of("short").ttft_ms["max"] == 10
    assert TWO.of("short").tokens_per_s == 25
    assert TWO.of("medium").ttft_ms == nothing()


def test_a_turn_that_was_cut_off_has_tokens_and_no_latency() -> None:
    failed = request("c", turn(0, 1, 2), turn(50, 190, complete=False), failure="the device is gone")
    result = replace(TWO, requests=(failed,))
    assert (result.ttft_ms["max"], result.tpot_ms["max"], result.latency_ms["max"]) == (1, 1, 2)
    assert (result.num_tokens, result.failures) == (3, {"c": "the device is gone"})


def test_a_run_in_which_nothing_happened_has_no_numbers_and_is_still_json() -> None:
    empty = ServingResult("all-gpu", refused="too small")
    table = empty.as_dict(Limits(1, 1))
    assert table["ttft_ms"] == table["tpot_ms"] == table["itl_ms"] == table["waiting"] == nothing()
    assert table["goodput"]["share"] is table["goodput"]["requests_per_s"] is None
    assert table["tokens_per_s"] == 0
    json.dumps(table, allow_nan=False)


def test_queue_and_batch_are_weighted_by_the_time_that_each_sample_holds() -> None:
    samples = (Sample(10, 1, 4, {"hbm": 50}), Sample(20, 2, 0, {"hbm": 20, "dram": 9}), Sample(90, 0, 0, {"hbm": 60}))
    result = ServingResult("all-gpu", samples=samples, elapsed_ns=110)
    # waiting: 10 ns of 4, 90 ns of 0; running: 10 ns of 1, 70 ns of 2, 20 ns of 0
    assert result.waiting == {"p50": 0, "p95": 4, "p99": 4, "mean": 0.4, "max": 4}
    assert result.running == {"p50": 2, "p95": 2, "p99": 2, "mean": 1.5, "max": 2}
    assert result.least_free_nbytes == {"hbm": 20, "dram": 9}


# -- goodput --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), 2),
        (Limits(ttft_ms=30), 2),
        (Limits(ttft_ms=29), 1),
        (Limits(ttft_ms=9), 0),
        (Limits(tpot_ms=5), 2),
        (Limits(tpot_ms=4.9), 1),
        (Limits(ttft_ms=29, tpot_ms=4.9), 0),
    ],
)
def test_goodput_counts_requests_of_which_every_turn_keeps_both_limits(limits: Limits, good: int) -> None:
    found = TWO.goodput(limits)
    assert (found["requests"], found["share"], found["requests_per_s"]) == (good, good / 2, good * 5)


def test_a_request_that_failed_is_not_good_however_fast() -> None:
    failed = request("c", turn(0, 1), failure="gone")
    assert replace(TWO, requests=(failed,)).goodput(Limits())["requests"] == 0


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="the limit of tpot_ms is"):
        Limits(tpot_ms=limit)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(1, 10))
def test_wider_limits_never_make_fewer_requests_good(ttft_ms: float, tpot_ms: float, wider: float) -> None:
    def good(limits: Limits) -> set[str]:
        return {request.name for request in TWO.requests if limits.kept_by(request)}

    assert good(Limits(ttft_ms, tpot_ms)) <= good(Limits(ttft_ms * wider, tpot_ms)) <= good(Limits(ttft_ms * wider))


# -- JSON -----------------------------------------------------------------------------------------------------------


def test_the_json_has_the_fields_that_were_promised() -> None:
    result = replace(
        TWO, provenance="simulated", devices={"gpu": DeviceUse(bytes_read=5)}, links={"pcie": LinkUse(busy_ns=3)}
    )
    table = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert {key: table[key] for key in ("policy", "requests", "tokens_per_s", "preemptions", "migrations")} == {
        "policy": "all-gpu", "requests": 2, "tokens_per_s": 30, "preemptions": 3, "migrations": 1
    }  # fmt: skip
    assert table["provenance"] == "simulated"
    assert table["ttft_ms"]["p50"] == 10
    assert table["tpot_ms"]["p95"] == pytest.approx(4.85)
    assert "goodput" not in table
    assert (table["devices"]["gpu"]["bytes_read"], table["links"]["pcie"]["busy_ns"]) == (5, 3)


def test_the_json_has_metrics_by_kind_where_requests_have_kinds() -> None:
    table = TWO.as_dict(Limits(ttft_ms=29))
    assert {kind: numbers["goodput"]["requests"] for kind, numbers in table["kinds"].items()} == {"short": 1, "long": 0}
    plain = replace(TWO, requests=tuple(replace(r, kind="") for r in TWO.requests))
    assert "kinds" not in plain.as_dict()


def test_the_json_says_what_happened_to_each_request() -> None:
    (served, _) = TWO.as_dict()["served"]
    assert (served["name"], served["kind"], served["preemptions"], served["failure"]) == ("a", "short", 2, "")
    assert served["turns"][1] == {
        "asked_ns": 100 * MS, "first_ns": 104 * MS, "ended_ns": 106 * MS, "num_tokens": 2, "ttft_ms": 4.0,
        "tpot_ms": 2.0, "complete": True,
    }  # fmt: skip


# -- the log --------------------------------------------------------------------------------------------------------


def test_the_log_tells_the_story_of_a_request_with_two_turns() -> None:
    log = Log()
    log.arrived("a", 5, "short", prompt_tokens=7)
    log.token("a", 9, 100)
    log.preempted("a", 8)
    log.token("a", 30, 101)
    log.migrated("a")
    log.turn_asked("a", 40)
    log.token("a", 44, 102)
    log.ended("a", 45)
    first = ServedTurn(5, 9, 30, 2, np.array([9, 30]))
    second = ServedTurn(40, 44, 45, 1, np.array([44]))
    assert log.served() == (Served("a", 5, (first, second), 7, 1, 8, 1, "short", "", (100, 101, 102)),)


def test_times_are_from_the_start_of_the_run_and_scaled_back_rounded_up() -> None:
    log = Log(start_ns=1000, dilation=4)
    log.arrived("a", 1000)
    log.token("a", 1041)
    log.ended("a", 1044)
    log.sample(1002, 1, 0, {})
    (served,) = log.served()
    assert served.turns == (ServedTurn(0, 11, 11, 1, np.array([11])),)
    assert log.samples == (Sample(1, 1, 0, {}),)


def test_a_failure_ends_the_turn_that_was_under_way() -> None:
    log = Log()
    log.arrived("a", 0)
    log.token("a", 3)
    log.turn_asked("a", 10)
    log.failed("a", "gpu: gone", 15)
    (served,) = log.served()
    assert served.failure == "gpu: gone"
    assert served.turns == (
        ServedTurn(0, 3, 3, 1, np.array([3])),
        ServedTurn(10, NEVER, 15, 0, np.array([]), complete=False),
    )


def test_a_failure_without_a_time_is_when_the_request_was_last_heard_of() -> None:
    log = Log()
    log.arrived("a", 2)
    log.token("a", 3)
    log.failed("a", "gone")
    assert log.served()[0].turns == (ServedTurn(2, 3, 3, 1, np.array([3]), complete=False),)


def test_a_request_that_nobody_ended_says_so_and_the_log_goes_on() -> None:
    log = Log()
    log.arrived("a", 0)
    assert (log.served()[0].failure, log.served()[0].turns[0].complete) == (UNFINISHED, False)
    log.token("a", 1)
    log.ended("a", 1)
    assert (log.served()[0].failure, log.served()[0].turns[0].complete) == ("", True)


def test_samples_are_copies() -> None:
    log, free = Log(), {"hbm": 5}
    log.sample(0, 0, 0, free)
    free["hbm"] = 4
    assert log.samples[0].free_nbytes == {"hbm": 5}


@pytest.mark.parametrize("ending", ["ended", "failed"])
def test_nothing_is_said_of_a_request_after_its_end(ending: str) -> None:
    log = Log()
    log.arrived("a", 0)
    log.token("a", 1)
    log.ended("a", 2) if ending == "ended" else log.failed("a", "gone", 2)
    mores: list[Callable[[], None]] = [
        lambda: log.token("a", 3),
        lambda: log.ended("a", 3),
        lambda: log.preempted("a"),
    ]
    for more in mores:
        with pytest.raises(AssertionError, match="a has ended"):
            more()


def test_time_does_not_run_backwards_in_the_log() -> None:
    log = Log()
    log.arrived("a", 5)
    with pytest.raises(AssertionError, match="4 ns is before 5 ns"):
        log.token("a", 4)


@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=6), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(1, 7),
)
def test_what_the_log_holds_is_what_was_said_whatever_start_and_dilation(
    gaps: list[list[int]], start_ns: int, sigma: int
) -> None:
    log, now = Log(start_ns, sigma), start_ns
    said: list[list[int]] = []
    for i, (asked_after, *token_after) in enumerate(gaps):
        now += asked_after
        log.turn_asked("a", now) if i else log.arrived("a", now)
        said.append([now])
        for after in token_after:
            now += after
            log.token("a", now)
            said[-1].append(now)
    log.ended("a", now)
    (served,) = log.served()
    scaled = [[ceil((at - start_ns) / sigma) for at in times] for times in said]
    assert [[t.asked_ns, *t.token_ns.tolist()] for t in served.turns] == scaled
    assert [t.num_tokens for t in served.turns] == [len(times) - 1 for times in said]
    assert all(a.ended_ns <= b.asked_ns for a, b in pairwise(served.turns))
    result = ServingResult("p", requests=(served,), elapsed_ns=scaled[-1][-1])
    worst_gap = max((b - a for _, *times in scaled for a, b in pairwise(times)), default=None)
    assert result.itl_ms["max"] == (None if worst_gap is None else worst_gap / MS)
    assert (result.tpot_ms["max"] or 0) <= (result.itl_ms["max"] or 0)


def test_turns_with_other_times_differ() -> None:
    one = turn(0, 1, 2, 4)
    assert one == turn(0, 1, 2, 4)
    assert one != turn(0, 1, 3, 4)
    assert hash(one) == hash(turn(0, 1, 2, 4))
