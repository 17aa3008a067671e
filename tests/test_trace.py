"""Traces are valid Chrome Trace Event JSON: every track named, every slice in its place, the same bytes every time."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timed_device import Bench
from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import MediaError
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.site import Occupancy
from tierloop.devices.waiting import wait
from tierloop.runtime.trace import TraceRecorder

Event = dict[str, Any]


def validated(text: str) -> list[Event]:
    """The events of a trace, after everything that Perfetto relies on was checked; times as exact decimals of µs."""
    trace = json.loads(text, parse_float=Decimal)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = trace["traceEvents"]
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    open_flows: dict[tuple[str, str], Event] = {}
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in {"M", "X", "s", "f"}
        assert event["name"]
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in threads
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "s":
            assert open_flows.setdefault((event["cat"], event["id"]), event) is event
        else:
            start = open_flows.pop((event["cat"], event["id"]))
            assert start["ts"] <= event["ts"]
            assert event["bp"] == "e"
    assert not open_flows
    for track in slices.values():
        _check_nesting(track)
    for event in events:
        if event["ph"] in "sf":
            on_track = slices[event["pid"], event["tid"]]
            assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in on_track), "a flow ends in a slice"
    return events


def _check_nesting(track: list[Event]) -> None:
    assert [e["ts"] for e in track] == sorted(e["ts"] for e in track)
    around: list[Decimal] = []
    for event in track:
        start, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], "slices of one track are disjoint or nested"
        around.append(end)


def track_names(events: list[Event]) -> list[str]:
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]


def slices(events: list[Event], kind: str) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["cat"] == kind]


def recorded(bench: Bench) -> TraceRecorder:
    recorder = TraceRecorder()
    recorder.begin(bench.platform, "test")
    return recorder


def carried(bench: Bench, *stretches: tuple[int, int]) -> None:
    for start, end in stretches:
        for observe in bench.site.link_observers:
            observe(Occupancy("wire", "forward", start, end, 10, "copy"))


def test_every_queue_and_link_has_a_named_track() -> None:
    bench = Bench()
    events = validated(recorded(bench).to_json())
    assert track_names(events) == [
        "near dma queue 0",
        "near dma queue 1",
        "far dma queue 0",
        "far dma queue 1",
        "link wire forward",
        "link wire back",
    ]


def test_a_command_is_a_slice_with_its_bytes() -> None:
    bench = Bench()
    recorder = recorded(bench)
    bench.site.clock.wait_until(1500)
    wait(bench.site.clock, bench.near.submit(bench.copy("far", "near", 2750)))
    (event,) = slices(validated(recorder.to_json()), "command")
    assert (event["name"], event["ts"], event["dur"]) == ("copy", Decimal("1.500"), Decimal("2.750"))
    assert event["args"]["read from far"] == event["args"]["written to near"] == 2750


def test_waiting_is_a_slice_and_a_flow_leads_from_what_was_waited_for() -> None:
    bench = Bench()
    recorder = recorded(bench)
    short = bench.far.submit(bench.copy("far", "far", 40), queue=0)
    long = bench.far.submit(bench.copy("far", "far", 100), queue=1)
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 30), after=[long, short]))
    events = validated(recorder.to_json())
    (waiting,) = slices(events, "wait")
    assert (waiting["ts"], waiting["dur"]) == (0, Decimal("0.100"))
    (flow,) = [e for e in events if e["ph"] == "s"]
    assert track_names(events)[flow["tid"] - 1] == "far dma queue 1"


def test_the_order_within_a_queue_needs_no_flow() -> None:
    bench = Bench()
    recorder = recorded(bench)
    first = bench.near.submit(bench.copy("near", "near", 10))
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10), after=[first]))
    assert not [e for e in validated(recorder.to_json()) if e["ph"] == "s"]


def test_a_dense_launch_is_named_after_its_stage() -> None:
    bench = Bench()
    recorder = recorded(bench)
    operand = (bench.segment("near", 5),)
    wait(bench.site.clock, bench.near.submit(Launch(Dense("mlp", 1, 1, 1), (operand,), ())))
    assert [e["name"] for e in slices(validated(recorder.to_json()), "command")] == ["mlp"]


def test_a_failed_command_says_why() -> None:
    bench = Bench()
    recorder = recorded(bench)
    bench.near.failing = True
    failed = bench.near.submit(bench.copy("near", "near", 10))
    follower = bench.far.submit(bench.copy("far", "far", 10), after=[failed])
    with pytest.raises(Exception, match="told to fail"):
        wait(bench.site.clock, follower)
    events = slices(validated(recorder.to_json()), "failed")
    assert [("told to fail" in e["args"]["error"], e["dur"]) for e in events] == [
        (True, Decimal("0.010")),
        (True, 0),
    ]
    assert isinstance(failed.error, MediaError)


def test_stretches_of_a_link_that_overlap_get_further_tracks() -> None:
    bench = Bench()
    recorder = recorded(bench)
    carried(bench, (0, 100), (50, 150), (60, 70), (100, 120))
    events = validated(recorder.to_json())
    names = track_names(events)
    assert [n for n in names if n.startswith("link wire forward")] == [
        "link wire forward",
        "link wire forward #2",
        "link wire forward #3",
    ]
    first = names.index("link wire forward") + 1
    assert [e["ts"] for e in slices(events, "link") if e["tid"] == first] == [0, Decimal("0.100")]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=25))
def test_any_stretches_of_a_link_stay_disjoint_and_none_is_lost(stretches: list[tuple[int, int]]) -> None:
    bench = Bench()
    recorder = recorded(bench)
    carried(bench, *((start, start + length) for start, length in stretches))
    found = slices(validated(recorder.to_json()), "link")
    wanted = sorted((start, start + length) for start, length in stretches)
    assert sorted((int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000)) for e in found) == wanted
    overlap = max((sum(s <= t < e for s, e in wanted) for t, _ in wanted), default=0)
    assert len({e["tid"] for e in found}) <= max(1, overlap + sum(s == e for s, e in wanted))


jobs = st.lists(
    st.tuples(st.booleans(), st.integers(0, 1), st.integers(1, 90), st.lists(st.integers(0, 20), max_size=3)),
    max_size=20,
)


def traced(batch: list[tuple[bool, int, int, list[int]]], dilation: int) -> str:
    bench = Bench(dilation=dilation)
    recorder = recorded(bench)
    completions: list[Completion] = []
    for near, queue, nbytes, after in batch:
        device = bench.near if near else bench.far
        earlier = [completions[i] for i in after if i < len(completions)]
        completions.append(device.submit(bench.copy("near", "far", nbytes), queue, earlier))
    bench.run_to_end(completions)
    return recorder.to_json()


@given(jobs, st.integers(1, 9))
def test_any_run_gives_a_valid_trace_and_the_same_bytes_again(
    batch: list[tuple[bool, int, int, list[int]]], dilation: int
) -> None:
    text = traced(batch, dilation)
    assert len(slices(validated(text), "command")) == len(batch)
    assert traced(batch, dilation) == text


def test_runs_are_processes_of_their_own() -> None:
    recorder = TraceRecorder()
    for title in ("split-all", "topk-blocks"):
        bench = Bench()
        recorder.begin(bench.platform, title)
        wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10)))
        recorder.end()
        wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10)))
    events = validated(recorder.to_json())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "bench: split-all", 2: "bench: topk-blocks"}
    assert sorted(e["pid"] for e in slices(events, "command")) == [1, 2]


def test_times_are_exact_nanoseconds_scaled_back_by_the_dilation() -> None:
    bench = Bench(dilation=4)
    recorder = recorded(bench)
    far_away = 4 * 123_456_789_012_345_679
    bench.site.clock.wait_until(far_away)
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 12)))
    text = recorder.to_json()
    assert re.search(r'"ts": 123456789012345\.679, "dur": 0\.003', text)
    assert "σ = 4" in text
    validated(text)


def test_spans_of_the_caller_lie_on_a_track_of_their_own() -> None:
    recorder = TraceRecorder()
    recorder.span("steps", "ignored before a run", 0, 1)
    recorder.begin(Bench().platform, "test")
    recorder.span("steps", "step 1", 0, 100)
    recorder.span("steps", "layer 0", 0, 40)
    recorder.span("steps", 'a "name"', 40, 100)
    events = validated(recorder.to_json())
    assert track_names(events)[0] == "steps"
    assert [e["name"] for e in slices(events, "phase")] == ["step 1", "layer 0", 'a "name"']


def test_a_full_recorder_says_how_much_is_missing() -> None:
    bench = Bench()
    recorder = TraceRecorder(limit=3)
    recorder.begin(bench.platform, "test")
    for _ in range(5):
        wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10)))
    text = recorder.to_json()
    assert len(slices(validated(text), "command")) == 3
    assert json.loads(text)["otherData"]["dropped"] == 2


def test_an_empty_trace_is_valid() -> None:
    assert validated(TraceRecorder().to_json()) == []
