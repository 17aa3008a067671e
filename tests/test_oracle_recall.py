"""What the oracle says of attended rows: recall against dense attention, predicted queries, and chosen layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.runtime.blocks import KVShape
from tierloop.runtime.oracle import Recall, Recorder, Verdict
from tierloop.runtime.policy import Predicted
from tierloop.runtime.stages import Prefill

from . import oracle

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
SHAPE = KVShape(2, 2, 2, 8, 8, "float32", 4, 4)
SCALE = 8**-0.5
NUM_ROWS = 300


def normal(seed: int, *shape: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Watched:
    """One request of random rows in a recorder; its steps are at the last row, which is the prompt's."""

    def __init__(self, seed: int = 0, layers: list[int] | None = None) -> None:
        self.keys = normal(seed, 2, 2, NUM_ROWS, 8)
        self.values = normal(seed + 1, 2, 2, NUM_ROWS, 8)
        self.queries = 2 * normal(seed + 2, 4, 8)
        self.recorder = Recorder(SHAPE, SCALE, layers)
        tokens = tuple(range(NUM_ROWS))
        self.recorder.admitted("r", Prefill(tokens, tuple(self.keys), tuple(self.values), (), 0))

    def logits(self, layer: int, head: int, queries: Float32 | None = None) -> NDArray[np.float64]:
        """float64 (group, rows)."""
        asked = (self.queries if queries is None else queries)[2 * head : 2 * head + 2]
        return np.asarray(SCALE * asked.astype(np.float64) @ self.keys[layer, head].astype(np.float64).T)

    def answer(self, layer: int, rows: list[Int64], predicted: Predicted | None = None) -> Float32:
        """What a policy returns that attends these rows of each KV head: (q heads, d_v)."""
        outputs = []
        for head in range(2):
            logits = self.logits(layer, head)
            if predicted is not None:
                at = predicted.positions[head]
                logits[:, at] = self.logits(layer, head, predicted.queries)[:, at]
            weights = softmax(logits[:, rows[head]])
            outputs.append(weights @ self.values[layer, head, rows[head]].astype(np.float64))
        return np.concatenate(outputs).astype(np.float32)

    def attended(
        self, layer: int, rows: list[Int64] | None, output: Float32, predicted: Predicted | None = None
    ) -> None:
        positions = np.array([NUM_ROWS - 1])
        self.recorder.attended("r", layer, positions, self.queries[None], output[None], None, rows, predicted)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


EVERY = [np.arange(NUM_ROWS)] * 2


def test_an_exact_policy_has_recall_one() -> None:
    watched = Watched()
    watched.attended(0, None, watched.answer(0, EVERY))
    verdict = watched.recorder.verdict()
    assert (verdict.mass_recall, verdict.topk_recall, verdict.attended_share) == (1, 1, 1)
    assert verdict.output_error < 1e-6
    assert verdict.checked == 4
    assert verdict.worst_ratio <= 1


@given(seed=st.integers(0, 1000), count=st.integers(1, NUM_ROWS))
def test_recall_is_what_its_definition_says(seed: int, count: int) -> None:
    watched = Watched(seed)
    chance = np.random.default_rng(seed)
    rows = [np.sort(chance.permutation(NUM_ROWS)[:count]) for _ in range(2)]
    watched.attended(1, rows, watched.answer(1, rows))
    verdict = watched.recorder.verdict()
    mass, topk, error = [], [], []
    for head in range(2):
        chosen = set(rows[head].tolist())
        answer = watched.answer(1, rows)[2 * head : 2 * head + 2]
        for logits, output in zip(watched.logits(1, head), answer, strict=True):
            weights = softmax(logits)
            mass.append(sum(weights[list(chosen)]))
            best = sorted(range(NUM_ROWS), key=lambda row: (-logits[row], row))[: min(128, count)]
            topk.append(len(chosen & set(best)) / len(best))
            dense = weights @ watched.values[1, head].astype(np.float64)
            error.append(np.linalg.norm(output - dense) / np.linalg.norm(dense))
    assert verdict.mass_recall == pytest.approx(np.mean(mass), rel=1e-9)
    assert verdict.topk_recall == pytest.approx(np.mean(topk), rel=1e-9)
    assert verdict.attended_share == pytest.approx(count / NUM_ROWS, rel=1e-9)
    assert verdict.output_error == pytest.approx(np.mean(error), rel=1e-6)
    assert verdict.worst_ratio <= 1


def test_among_equal_rows_those_of_lower_position_are_the_top() -> None:
    watched = Watched()
    watched.recorder.admitted(
        "r", Prefill((0,) * NUM_ROWS, tuple(np.zeros_like(watched.keys)), tuple(watched.values), (), 0)
    )
    first = [np.arange(10), np.arange(5, 15)]
    watched.attended(0, first, np.zeros((4, 8), dtype=np.float32))
    assert watched.recorder.verdict().topk_recall == pytest.approx((1 + 0.5) / 2)


def test_rows_of_no_probability_still_have_an_order() -> None:
    watched = Watched()
    watched.queries *= 1e4
    best = [np.sort(np.argsort(-watched.logits(0, head)[0], kind="stable")[:50]) for head in range(2)]
    watched.attended(0, best, watched.answer(0, best))
    recall = watched.recorder.verdict()
    assert 0.5 <= recall.topk_recall < 1  # all of the first query of each group, some of the second
    watched.queries[1::2] = watched.queries[::2]
    watched.recorder = Recorder(SHAPE, SCALE)
    watched.recorder.admitted("r", Prefill((0,) * NUM_ROWS, tuple(watched.keys), tuple(watched.values), (), 0))
    watched.attended(0, best, watched.answer(0, best))
    assert watched.recorder.verdict().topk_recall == 1


def test_blocks_count_as_their_visible_rows() -> None:
    watched = Watched()
    blocks = [np.array([0, 74])] * 2  # of 4 tokens; the prompt ends with block 74
    rows = [np.array([0, 1, 2, 3, 296, 297, 298, 299])] * 2
    output = watched.answer(0, rows)[None]
    watched.recorder.attended("r", 0, np.array([NUM_ROWS - 1]), watched.queries[None], output, blocks)
    verdict = watched.recorder.verdict()
    assert verdict.attended_share == pytest.approx(8 / NUM_ROWS)
    assert verdict.worst_ratio <= 1
    shorter = Watched()
    shorter.recorder.attended("r", 0, np.array([297]), shorter.queries[None], output, blocks)
    assert shorter.recorder.verdict().attended_share == pytest.approx(6 / 298)


def test_layers_are_told_apart() -> None:
    watched = Watched()
    watched.attended(0, None, watched.answer(0, EVERY))
    half = [np.arange(NUM_ROWS // 2)] * 2
    watched.attended(1, half, watched.answer(1, half))
    verdict = watched.recorder.verdict()
    assert [layer.attended_share for layer in verdict.layers] == [1, 0.5]
    assert verdict.layers[0].mass_recall == 1 > verdict.layers[1].mass_recall
    assert verdict.mass_recall == pytest.approx((1 + verdict.layers[1].mass_recall) / 2)


def test_layers_that_are_not_recorded_are_not_checked() -> None:
    watched = Watched(layers=[1])
    wrong = np.full((4, 8), np.inf, dtype=np.float32)
    watched.recorder.rows("r", 0, normal(9, 2, 1, 8), normal(9, 2, 1, 8))
    watched.attended(0, None, wrong)
    watched.attended(1, None, watched.answer(1, EVERY))
    verdict = watched.recorder.verdict()
    assert verdict.worst_ratio <= 1
    assert [layer.checked for layer in verdict.layers] == [0, 4]
    watched.attended(1, None, wrong)
    assert watched.recorder.verdict().worst_ratio == math.inf


def test_nothing_recorded_is_nothing_wrong() -> None:
    assert Recorder(SHAPE, SCALE).verdict() == Verdict(layers=(Recall(), Recall()))


# ---- predicted queries


def predictions(watched: Watched) -> Predicted:
    return Predicted([np.arange(20, 60), np.arange(100, 104)], watched.queries + normal(77, 4, 8))


@pytest.mark.parametrize("chosen", [EVERY, [np.arange(0, 200, 2), np.arange(90, 120)]])
def test_rows_of_a_predicted_query_are_judged_by_that_query(chosen: list[Int64]) -> None:
    watched = Watched()
    predicted = predictions(watched)
    output = watched.answer(0, chosen, predicted)
    watched.attended(0, chosen, output, predicted)
    judged = watched.recorder.verdict()
    assert judged.worst_ratio <= 1
    assert judged.error_vs_dense == pytest.approx(np.abs(output - watched.answer(0, EVERY)).max(), rel=1e-4)
    told_otherwise = Watched()
    told_otherwise.attended(0, chosen, output)
    assert told_otherwise.recorder.verdict().worst_ratio > 1000
    assert told_otherwise.recorder.verdict().mass_recall == judged.mass_recall


def test_a_prediction_that_was_not_used_is_an_error() -> None:
    watched = Watched()
    watched.attended(0, EVERY, watched.answer(0, EVERY), predictions(watched))
    assert watched.recorder.verdict().worst_ratio > 1000


def test_every_row_may_be_predicted_without_a_choice_of_rows() -> None:
    watched = Watched()
    predicted = predictions(watched)
    watched.attended(0, None, watched.answer(0, EVERY, predicted), predicted)
    verdict = watched.recorder.verdict()
    assert verdict.worst_ratio <= 1
    assert (verdict.mass_recall, verdict.attended_share) == (1, 1)
    assert verdict.output_error > 0.01


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_a_predicted_query_of_codes_has_their_scales_in_it(dtype: str) -> None:
    shape = KVShape(2, 2, 2, 8, 8, dtype, 4, 4)  # type: ignore[arg-type]
    watched = Watched()
    watched.recorder = Recorder(shape, SCALE)
    scales = np.abs(watched.keys).max(axis=2) / np.float32(120)  # [layer, kv head, channel]
    prefill = Prefill((0,) * NUM_ROWS, tuple(watched.keys), tuple(watched.values), (), 0)
    watched.recorder.admitted("r", prefill, scales)
    predicted = predictions(watched)
    folded = predicted.queries * np.repeat(scales[0], 2, axis=0)
    outputs = []
    for head in range(2):
        codes = oracle.decode(oracle.encode(watched.keys[0, head] / scales[0, head], dtype), dtype)
        values = oracle.decode_values(oracle.encode_values(watched.values[0, head], dtype), dtype)
        mine = slice(2 * head, 2 * head + 2)
        logits = SCALE * (watched.queries[mine].astype(np.float64) * scales[0, head]) @ codes.T
        at = predicted.positions[head]
        logits[:, at] = SCALE * folded[mine].astype(np.float64) @ codes[at].T
        outputs.append(softmax(logits) @ values)
    output = np.concatenate(outputs).astype(np.float32)
    watched.attended(0, None, output, Predicted(predicted.positions, folded))
    assert watched.recorder.verdict().worst_ratio <= 1
