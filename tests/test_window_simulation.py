"""Windows played on traces: what is counted, in which units, and traces that real runs have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.phantom_runs import record
from tests.tiny import tiny_workload
from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.recorded_trace import recorded_trace
from tierloop.runtime.score_trace import LayerScores, ScoreTraceModel, ranked_steps
from tierloop.runtime.selection import Origin, RecordedSelection, SelectionRecord
from tierloop.runtime.window_simulation import Simulated, in_units, missed_by_union, simulate
from tierloop.runtime.window_sizes import WindowSizes
from tierloop.runtime.windows import EVICTIONS, Eviction

Int64 = NDArray[np.int64]
K = 6


def drifting(steps: int = 14, ranks: int = 40, seed: int = 0) -> list[Int64]:
    """Two layers of three heads, 40 entries of which the best `ranks` are ranked."""
    return list(ranked_steps(ScoreTraceModel((LayerScores(0, 0, 1, 1, 4, 0.3),)), 2, 3, 40, ranks, steps, seed))


def lru_by_hand(trace: list[Int64], capacity: int, warm_up: int) -> Int64:
    """Misses of windows that keep what was used last, lowest numbers going first among equals."""
    layers, heads, _ = trace[0].shape
    missed = np.zeros((layers, heads), dtype=np.int64)
    for layer, head in np.ndindex(layers, heads):
        used: dict[int, int] = {}
        for step, ranked in enumerate(trace):
            chosen = ranked[layer, head, :K].tolist()
            missed[layer, head] += sum(c not in used for c in chosen) * (step >= warm_up)
            used.update(dict.fromkeys(chosen, step))
            rank = {entry: i for i, entry in enumerate(chosen)}
            kept = sorted(used, key=lambda e: (used[e], -rank[e] if e in rank else 0, e))
            used = {entry: used[entry] for entry in kept[max(len(kept) - capacity, 0) :]}
    return missed


@pytest.mark.parametrize("window", [1.0, 2.0, 3.0])
def test_misses_are_those_of_windows_kept_by_hand(window: float) -> None:
    trace = drifting()
    played = simulate(trace, K, window, "lru", warm_up=3, entry_nbytes=100)
    assert np.array_equal(played.misses, lru_by_hand(trace, int(window * K), 3))
    assert (played.hits + played.misses == K * 11).all()
    assert played.moved_nbytes == 100 * played.misses.sum()
    assert played.hit_rate == played.hits.sum() / (K * 11 * 6)
    assert played.steps == 11


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_window_of_nothing_moves_everything_and_one_of_all_moves_each_entry_once(eviction: Eviction) -> None:
    trace = drifting()
    nothing, everything = (simulate(trace, K, window, eviction, warm_up=0) for window in (0.0, 40 / K))
    assert (nothing.hits == 0).all()
    assert nothing.hit_rate == 0
    ever = [[len(np.unique([s[layer, head, :K] for s in trace])) for head in range(3)] for layer in range(2)]
    assert everything.misses.tolist() == ever


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_larger_window_misses_no_more(eviction: Eviction) -> None:
    trace = drifting(30)
    missed = [simulate(trace, K, window, eviction).misses.sum() for window in (0, 1, 2, 4)]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > missed[1] > missed[3]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_window_of_one_choice_is_the_union_of_one_step(eviction: Eviction) -> None:
    trace = drifting()
    (missed,) = missed_by_union(trace, K, [1], 2)
    assert np.array_equal(simulate(trace, K, 1, eviction, warm_up=2).misses, missed)


def test_a_union_holds_what_the_last_steps_chose() -> None:
    trace = drifting()
    trace[5][0, 0, 3:] = -1
    missed = missed_by_union(trace, K, (0, 1, 2, 5), 5)
    for i, window in enumerate((0, 1, 2, 5)):
        for layer, head in np.ndindex(2, 3):
            expected = 0
            for step in range(5, len(trace)):
                before: set[int] = set()
                for earlier in trace[step - window : step]:
                    before |= set(earlier[layer, head, :K].tolist())
                expected += len(set(trace[step][layer, head, :K].tolist()) - before - {-1})
            assert missed[i, layer, head] == expected


def test_heads_with_windows_of_their_own_size_miss_as_if_alone() -> None:
    trace = drifting()
    sizes = WindowSizes(((0.0, 1.0, 2.0), (3.0, 1.0, 0.0)))
    mixed = simulate(trace, K, sizes, "la")
    for layer, head in np.ndindex(2, 3):
        alone = simulate(trace, K, sizes.multiples[layer][head], "la")
        assert mixed.misses[layer, head] == alone.misses[layer, head]


def test_an_error_of_prediction_costs_hits() -> None:
    trace = drifting(30)
    rates = [simulate(trace, K, 2, noise=noise, seed=1).hit_rate for noise in (0.0, 0.5)]
    assert rates[0] > rates[1] + 0.02


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True), min_size=1, max_size=4),
    unit=st.integers(1, 9),
)
def test_a_unit_is_ranked_where_its_best_entry_is(rows: list[list[int]], unit: int) -> None:
    longest = max(map(len, rows))
    ranked = np.array([[row + [-1] * (longest - len(row)) for row in rows]], dtype=np.int64).reshape(1, len(rows), -1)
    units = in_units(ranked, unit)
    for row, mine in zip(rows, units[0].tolist(), strict=True):
        expected = list(dict.fromkeys(entry // unit for entry in row))
        assert mine == expected + [-1] * (len(mine) - len(expected))


def test_units_move_whole_and_keep_the_sizes_in_entries() -> None:
    trace = drifting()
    played = simulate(trace, K, 2, "lru", unit=3, entry_nbytes=10)
    by_hand = simulate([in_units(step, 3) for step in trace], K // 3, 2, "lru", entry_nbytes=30)
    assert isinstance(played, Simulated)
    assert np.array_equal(played.misses, by_hand.misses)
    assert played.moved_nbytes == by_hand.moved_nbytes > 0
    assert (played.k, played.unit) == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace": []}, "at least one step"),
        ({"trace": [np.zeros((2, 3), dtype=np.int64)]}, "each step of a trace must be int64"),
        ({"trace": [np.zeros((2, 3, 4))]}, "each step of a trace must be int64"),
        ({"trace": [np.zeros((2, 3, 4), dtype=np.int64), np.zeros((2, 2, 4), dtype=np.int64)]}, "each step of a trace"),
        ({"trace": [np.zeros((2, 3, 4), dtype=np.int64)] * 2}, "the trace cannot be played: .* named twice"),
        ({"k": 0}, "K 0, unit 1"),
        ({"unit": 0}, "unit 0"),
        ({"entry_nbytes": -1}, "entries of -1 bytes"),
        ({"warm_up": 14}, "14 of 14 steps not counted"),
        ({"window": -1.0}, "a window of -1"),
        ({"window": WindowSizes(((1.0,),))}, "the model has 2 and 3"),
        ({"eviction": "fifo"}, "the trace cannot be played: eviction 'fifo'; it must be one of la, lru, lfu"),
        ({"noise": 2.0}, "the trace cannot be played: noise 2"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {"trace": drifting(), "k": K, "window": 2.0} | change
    with pytest.raises(ConfigurationError, match=message):
        simulate(**given_)


def test_a_union_of_a_wrong_trace_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one step"):
        missed_by_union([], K, [1], 0)
    with pytest.raises(ConfigurationError, match="14 of 14 steps not counted"):
        missed_by_union(drifting(), K, [1], 14)


# -- traces of real runs --------------------------------------------------------------------------------------------

ORIGIN = Origin("m", "f", KVShape(2, 2, 1, 8, 8), "kvdrive")


def kept(steps: int = 3) -> SelectionRecord:
    """Two layers, two heads; 3 clusters of 5 entries, and 2 more of 4 that come before the last step."""
    selection = RecordedSelection(ORIGIN)
    for layer in (0, 1):
        labels = np.array([[0, 1, 2, 1, 0], [2, 2, 1, 1, 0]])
        selection.group(Grouping("clusters r", layer, "r", 9, 2, 5, 3), labels)
    for step in range(steps):
        known = 5 if step == steps - 1 else 3
        for layer in (0, 1):
            if known == 5:
                labels = np.array([[0, 1, 1, 0], [1, 1, 1, 1]])
                selection.group(Grouping("clusters r", layer, "r", 20, 2, 4, 2), labels)
            lengths = np.array([known, known])
            answer = np.array([[known - 1, 1], [1, known - 1]])
            asked = Question("select r", layer, ("r",), 10 + step, lengths, lengths * 0, 8, 2)
            selection.answer(asked, answer)
    return selection.record


def test_clusters_that_were_chosen_are_ranked_as_their_entries() -> None:
    trace = recorded_trace(kept())
    assert [step.shape for step in trace] == [(2, 2, 4), (2, 2, 4), (2, 2, 6)]
    for layer in (0, 1):
        assert trace[0][layer].tolist() == [[2, 1, 3, -1], [2, 3, 0, 1]]
        assert trace[2][layer].tolist() == [[6, 7, 1, 3, -1, -1], [2, 3, 5, 6, 7, 8]]


def test_candidates_that_are_no_clusters_stand_for_themselves() -> None:
    assert recorded_trace(kept(), clusters=None)[0].tolist() == [[[2, 1], [1, 2]]] * 2


def without_step(record: SelectionRecord) -> SelectionRecord:
    answers = dict(record.answers)
    del answers[10, 1, "select 0", 0]
    return replace(record, answers=answers)


@pytest.mark.parametrize(
    ("record", "label", "clusters", "message"),
    [
        (kept, "select 1", "clusters 0", "has 0 questions 'select 1'"),
        (lambda: without_step(kept()), "select 0", None, "has 5 questions 'select 0' about 2 layers in 3 steps"),
        (kept, "select 0", "clusters 1", "select 0 of step 10, layer 0: nobody has made 3 clusters"),
        (
            lambda: replace(kept(), origin=replace(ORIGIN, shape=KVShape(2, 4, 1, 8, 8))),
            "select 0",
            None,
            "is about 2 lists; heads are 4",
        ),
        (
            lambda: replace(kept(), origin=replace(ORIGIN, shape=KVShape(2, 1, 1, 8, 8))),
            "select 0",
            "clusters 0",
            "clusters 0 of layer 0 are of 2 lists; heads are 1",
        ),
    ],
)
def test_records_that_are_no_trace_are_refused(
    record: Callable[[], SelectionRecord], label: str, clusters: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        recorded_trace(record(), label, clusters)


def test_a_run_on_real_bytes_leaves_a_trace_that_windows_can_be_played_on() -> None:
    recorded = record("cluster-topk", [tiny_workload(210).token_ids], 8, budget=0.3, recent_tokens=16, cluster_tokens=4)
    trace = recorded_trace(recorded.selection, "select", "clusters 0")
    assert [step.shape[:2] for step in trace] == [(3, 2)] * 8
    k = min(int((step >= 0).sum(axis=2).min()) for step in trace)
    rates = [simulate(trace, k, window).hit_rate for window in (0, 1, 3)]
    assert 0 == rates[0] < rates[1] <= rates[2] <= 1
