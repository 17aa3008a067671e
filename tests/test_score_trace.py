"""Score traces: rankings that persist as the model says, and the two that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.locality import LocalityModel, find_locality
from tierloop.runtime.locality_selection import LocalitySelection
from tierloop.runtime.score_trace import LayerScores, ScoreTrace, ScoreTraceModel, ranked_steps
from tierloop.tools.fit_score_trace import MOVED_MB, RECOVERED, misses

Int64 = NDArray[np.int64]
STILL = LayerScores(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
MIXED = LayerScores(0.1, 1.0, 1.0, 1.0, 8.0, 0.5, 1.0, 64.0, 0.3)


def question(
    step: int, candidates: int, k: int, label: str = "select", requests: tuple[str, ...] = ("r",), **more: Any
) -> Question:
    heads = more.pop("heads", 2)
    lengths = np.full(heads * len(requests), candidates, dtype=np.int64)
    return replace(Question(label, 0, requests, step, lengths, np.zeros_like(lengths), 1, k), **more)


def trace(numbers: LayerScores, seed: int = 0, num_layers: int = 1) -> ScoreTrace:
    return ScoreTrace(ScoreTraceModel((numbers,)), num_layers, seed)


def overlap(one: Int64, other: Int64) -> float:
    """The share of each list's picks that the other has as well."""
    return mean(len(set(a) & set(b)) / len(a) for a, b in zip(one.tolist(), other.tolist(), strict=True))


# -- what the numbers mean ------------------------------------------------------------------------------------------


def test_static_scores_rank_alike_for_ever() -> None:
    scores = trace(STILL)
    first = scores.answer(question(10, 500, 50), None)
    assert np.array_equal(scores.answer(question(999, 500, 50), None), first)
    assert not np.array_equal(first[0], first[1]), "heads have scores of their own"


def test_white_scores_are_forgotten_at_once() -> None:
    scores = trace(replace(STILL, static=0.0, white=1.0))
    answers = [scores.answer(question(step, 4000, 400, heads=4), None) for step in range(6)]
    assert mean(overlap(a, b) for a, b in pairwise(answers)) == pytest.approx(0.1, abs=0.03)


def test_slow_scores_are_forgotten_slowly_and_a_longer_memory_keeps_them_longer() -> None:
    def kept(memory: float, gap: int) -> float:
        scores = trace(replace(STILL, static=0.0, slow=1.0, memory_steps=memory))
        first = scores.answer(question(0, 4000, 400, heads=4), None)
        return overlap(first, scores.answer(question(gap, 4000, 400, heads=4), None))

    assert kept(50, 1) > kept(50, 8) + 0.1 > kept(50, 400) + 0.3
    assert kept(50, 8) > kept(5, 8) + 0.1
    assert kept(50, 400) == pytest.approx(0.1, abs=0.05)


def test_steps_that_nobody_asked_about_pass_as_if_somebody_had() -> None:
    numbers = replace(STILL, static=0.5, slow=1.0, memory_steps=20.0, white=0.3)

    def kept(steps: range) -> float:
        scores = trace(numbers)
        answers = [scores.answer(question(step, 4000, 400, heads=8), None) for step in steps]
        return overlap(answers[0], answers[-1])

    assert kept(range(0, 13)) == pytest.approx(kept(range(0, 13, 12)), abs=0.04)


def test_popular_candidates_are_picked_first() -> None:
    scores = trace(LayerScores(0.1, 100.0, 0.0, 0.0, 1.0, 1.0))
    answers = [scores.answer(question(step, 2000, 100), None) for step in range(12)]
    ever = [len({c for answer in answers for c in answer[head].tolist()}) for head in range(2)]
    assert all(150 < n < 250 for n in ever), "a tenth of 2,000"


def test_the_newest_are_picked_first_where_only_recency_counts() -> None:
    scores = trace(replace(STILL, static=0.0, recency=1.0, recency_tokens=10.0))
    uneven = replace(question(0, 100, 4), lengths=np.array([100, 60]))
    assert scores.answer(uneven, None).tolist() == [[99, 98, 97, 96], [59, 58, 57, 56]]


def test_age_is_counted_in_tokens() -> None:
    numbers = replace(STILL, recency=3.0, recency_tokens=64.0)
    tokens, chunks = (trace(numbers).answer(question(0, 1000, 100, unit=unit), None) for unit in (1, 32))
    assert (tokens >= 900).mean() > 2 * (chunks >= 900).mean()


def test_heads_differ_by_spread_and_alike_in_all_requests() -> None:
    numbers = LayerScores(0.0, 0.0, 1.0, 0.0, 1.0, 0.5, spread=2.0)

    def kept(request: str) -> list[float]:
        scores = trace(numbers)
        first, second = (
            scores.answer(question(step, 4000, 400, requests=(request,), heads=6), None) for step in (0, 1)
        )
        return [overlap(first[head : head + 1], second[head : head + 1]) for head in range(6)]

    mine, other = kept("a"), kept("b")
    assert max(mine) - min(mine) > 0.3
    assert mine == pytest.approx(other, abs=0.1)


# -- questions ------------------------------------------------------------------------------------------------------


def test_questions_of_one_step_are_about_the_same_scores() -> None:
    scores = trace(MIXED)
    warm_up = scores.answer(question(300, 400, 400, "warm-up r"), None)
    assert np.array_equal(scores.answer(question(300, 400, 400), None), warm_up)
    assert np.array_equal(scores.answer(question(300, 400, 60), None), warm_up[:, :60])
    assert not np.array_equal(scores.answer(question(301, 400, 400), None), warm_up)


def test_a_request_has_the_same_scores_alone_and_in_a_batch() -> None:
    scores = trace(MIXED)
    alone = [scores.answer(question(50, 300, 30, f"warm-up {name}", (name,)), None) for name in "ab"]
    together = scores.answer(question(50, 300, 30, requests=("a", "b")), None)
    assert np.array_equal(together, np.concatenate(alone))
    assert not np.array_equal(alone[0], alone[1])


def test_one_step_passes_where_another_request_leads() -> None:
    numbers = replace(STILL, static=0.0, slow=1.0, memory_steps=50.0)
    scores = trace(numbers)
    first = scores.answer(question(90_000, 4000, 400, requests=("b",), heads=4), None)
    (_, second) = np.split(scores.answer(question(500, 4000, 400, requests=("a", "b"), heads=4), None), 2)
    assert 0.7 < overlap(first, second) < 1


def test_lists_that_grow_keep_the_order_of_what_was_there() -> None:
    scores = trace(replace(MIXED, recency=0.0))
    first = scores.answer(question(100, 200, 200), None)
    grown = scores.answer(question(100, 260, 260), None)
    assert np.array_equal(np.stack([row[row < 200] for row in grown]), first)
    assert np.array_equal(np.sort(grown, axis=1), np.tile(np.arange(260), (2, 1)))


def test_layers_and_seeds_have_scores_of_their_own_and_the_same_seed_the_same() -> None:
    def answers(seed: int) -> list[Int64]:
        scores = trace(MIXED, seed, 2)
        return [scores.answer(question(step, 300, 40, layer=layer), None) for step in (1, 2, 5) for layer in (0, 1)]

    first, again, other = (answers(seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[0], first[1])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    k=st.integers(0, 70),
    grow=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_an_answer_is_a_ranking_of_candidates_that_there_are(lengths: list[int], k: int, grow: int, seed: int) -> None:
    scores = trace(MIXED, seed)
    for step in range(3):
        now = np.array(lengths, dtype=np.int64) + step * grow
        answer = scores.answer(replace(question(step, 1, k), lengths=now, first=now * 0), None)
        assert answer.shape == (len(lengths), k)
        for row, length in zip(answer.tolist(), now.tolist(), strict=True):
            count = min(k, length)
            assert row[count:] == [-1] * (k - count)
            assert len(set(row[:count])) == count
            assert all(0 <= c < length for c in row[:count])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=60), k=st.integers(1, 60))
def test_candidates_are_ranked_by_score_and_equal_ones_by_number(values: list[float], k: int) -> None:
    scores = trace(STILL)
    scores.answer(question(0, len(values), 1, heads=1), None)
    (held,) = scores._scores.values()
    held.now = np.array([values], dtype=np.float32)
    answer = scores.answer(question(0, len(values), k, heads=1), None)[0]
    best = sorted(range(len(values)), key=lambda c: (-values[c], c))[:k]
    assert answer[: len(best)].tolist() == best


def test_a_plain_trace_ranks_step_after_step() -> None:
    model = ScoreTraceModel((STILL, MIXED))
    steps = list(ranked_steps(model, 4, 3, 50, 7, 5, seed=3))
    assert [ranked.shape for ranked in steps] == [(4, 3, 7)] * 5
    assert np.array_equal(steps[0][:2], steps[4][:2]), "the first half of the layers stands still"
    assert not np.array_equal(steps[0][2:], steps[4][2:])


def test_groups_are_those_of_a_locality_model() -> None:
    asked = Grouping("clusters r", 0, "r", 5, 2, 40, 6)
    labels = trace(MIXED).group(asked, None)
    assert labels.tolist() == [[j % 6 for j in range(40)]] * 2


def test_times_rest_on_a_trace_once_anything_was_asked() -> None:
    scores = ScoreTrace(ScoreTraceModel((MIXED,), ("a guess", "another")), 1)
    assert scores.beyond("any", 1) == []
    scores.answer(question(0, 10, 2), None)
    assert scores.beyond("any", 1) == ["the selection has scores that rest on a guess; another"]


# -- the ones that ship ---------------------------------------------------------------------------------------------


def test_kvdrive_draw_recovers_and_moves_what_was_published() -> None:
    """Rates of recovery of four layers within 4 points, the course of the bytes of all layers within 10."""
    model = load_selection_model(find_locality("kvdrive-draw"))
    assert isinstance(model, ScoreTraceModel)
    windows = list(MOVED_MB)
    missed = [misses(layer, windows, seed=100 + i, heads=4) for i, layer in enumerate(model.layers)]
    for layer, per_cent in RECOVERED.items():
        assert [100 * (1 - m) for m in missed[layer][:4]] == pytest.approx(per_cent, abs=4), layer
    total = np.mean(missed, axis=0)
    assert [100 * t / total[0] for t in total] == pytest.approx([100 * mb / 402 for mb in MOVED_MB.values()], abs=10)


def test_short_locality_says_that_it_is_assumed_and_persists_less() -> None:
    short, draw_ = (load_selection_model(find_locality(name)) for name in ("short-locality", "kvdrive-draw"))
    assert isinstance(short, ScoreTraceModel)
    assert isinstance(draw_, ScoreTraceModel)
    assert short.rests_on[0].startswith("assumed")
    (missed,) = misses(short.layers[0], (1,))
    assert missed > max(misses(draw_.layers[layer], (1,))[0] for layer in RECOVERED)


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_model_comes_back_from_its_file_and_draws_by_its_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model = ScoreTraceModel((STILL, MIXED), ("words",))
    path.write_text(model.to_json())
    loaded = load_selection_model(path)
    assert loaded == model
    assert isinstance(draw(loaded, 8, 1), ScoreTrace)
    assert isinstance(draw(LocalityModel.load(find_locality("smollm2-135m")), 8), LocalitySelection)
    assert [model.layer(i, 4) for i in range(4)] == [STILL, STILL, MIXED, MIXED]


def with_layer(**changes: Any) -> dict[str, Any]:
    return {"layers": [vars(STILL) | changes]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "does not say tierloop-score-trace, version 1"),
        ({"rests_on": "words"}, "rests_on must be a list of texts"),
        ({"rests_on": [1]}, "rests_on must be a list of texts"),
        ({"layers": []}, "layers must be a list of 1 to 4,096"),
        ({"layers": {}}, "layers must be a list of 1 to 4,096"),
        ({"layers": [3]}, "layer 0 must be a table of lift, memory_steps"),
        ({"layers": [{"lift": 1}]}, "layer 0 must be a table of"),
        (with_layer(more=1), "layer 0 must be a table of"),
        (with_layer(popular=1.5), "layer 0: popular is 1.5; it must be from 0 to 1"),
        (with_layer(memory_steps=0.5), "memory_steps is 0.5; it must be from 1"),
        (with_layer(static=-1), "static is -1; it must be from 0 to 1000"),
        (with_layer(white=float("nan")), "white is nan"),
        (with_layer(slow=True), "slow is True"),
        (with_layer(lift="x"), "lift is 'x'"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(json.loads(ScoreTraceModel((STILL,)).to_json()) | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_selection_model(path)
    assert str(caught.value).startswith(f"{path}: no score trace: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"format": 3}'])
def test_files_that_are_neither_are_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="no locality model: ") as caught:
        load_selection_model(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="no score trace: "):
        ScoreTraceModel.load(path)
    with pytest.raises(ConfigurationError, match="no score trace: No such file"):
        ScoreTraceModel.load(tmp_path / "nowhere.json")


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one layer"):
        ScoreTraceModel(())
