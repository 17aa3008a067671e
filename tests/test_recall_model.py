"""The model made by hand: its margin, its rows, which queries can be predicted, and that dense attention is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tierloop.runtime.recall_model import (
    MAX_PAIRS,
    SHARPNESS,
    TOPIC_BITS,
    TOPIC_TOKENS,
    CodeActivations,
    RecallModel,
)
from tierloop.runtime.subjects import RecallSubject, attend_densely

PAIRS = 300
TASKS = sorted(RecallModel.hops_of)


def wrong_mass(model: RecallModel, entity: int) -> float:
    """The largest share of softmax, over KV heads, that lies on rows other than the entity's own; in float64."""
    codes = model.codes(np.arange(model.num_pairs)).astype(np.float64)
    logits = SHARPNESS * np.einsum("nhd,hd->hn", codes, codes[entity])
    weights = np.exp(logits - logits[:, [entity]])
    weights[:, entity] = 0
    return float(weights.sum(axis=1).max())


def test_the_mean_mass_of_wrong_rows_is_what_the_docstring_says() -> None:
    def weight(bits: int) -> float:
        return ((1 + math.exp(-2 * SHARPNESS)) / 2) ** bits

    bits = RecallModel.head_dim
    mean = MAX_PAIRS * weight(bits) + (TOPIC_TOKENS - 1) * weight(bits - TOPIC_BITS)
    assert mean == pytest.approx(2.5e-14, rel=0.01)
    assert 1e-6 / mean == pytest.approx(4e7, rel=0.01)


@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_rows_have_next_to_no_mass_in_the_longest_prompt(seed: int) -> None:
    model = RecallModel("recall", MAX_PAIRS, seed)
    assert wrong_mass(model, 77_777) < 1e-6


def test_neighbours_share_a_topic() -> None:
    codes = RecallModel("recall", 128).codes(np.arange(128))
    topics = codes[:, :, :TOPIC_BITS]
    assert (topics[:64] == topics[0]).all()
    assert (topics[64:] == topics[64]).all()
    assert (topics[0] != topics[64]).any()
    assert len({code.tobytes() for code in codes}) == 128


@pytest.mark.parametrize("task", TASKS)
def test_dense_attention_answers_every_question(task: str) -> None:
    cell = RecallSubject().cell(task, 300, 20, seed=4)
    (case,) = cell.cases
    said = [int(logits.argmax()) for logits in attend_densely(cell, cell.prefill(case), case)]
    assert said == [turn.expected[0] for turn in case.turns]


def test_the_answer_is_as_many_pairs_away_as_there_are_hops() -> None:
    for task in TASKS:
        model = RecallModel(task, PAIRS)
        after = {pair // PAIRS - 1: pair % PAIRS for pair in model.prompt()}
        assert len(after) == PAIRS
        for entity in range(PAIRS):
            expected = entity
            for _ in model.hops:
                expected = after[expected]
            assert model.answer(entity) == expected != entity


@pytest.mark.parametrize("task", TASKS)
def test_the_prefill_is_what_the_stages_make_of_the_prompt(task: str) -> None:
    model = RecallModel(task, PAIRS)
    prefill = model.prefill(5)
    assert prefill.tokens == model.prompt()
    assert prefill.first_token == 5
    activations = model.begin([model.prompt()], np.arange(PAIRS)[None])
    queries, keys, values = activations.project(0)
    assert (queries[0, -64:] == prefill.queries[0]).all()
    for layer in range(model.num_layers):
        assert (keys[0] == prefill.keys[layer]).all()
        assert (values[0] == prefill.values[layer]).all()
    assert len(prefill.keys) == len(prefill.values) == len(prefill.queries) == model.num_layers


def test_the_rows_of_a_question_are_zero() -> None:
    activations = RecallModel("recall", PAIRS).begin([[7], [9]], np.full((2, 1), PAIRS))
    _, keys, values = activations.project(3)
    assert keys.shape == values.shape == (2, 2, 1, 64)
    assert not keys.any()
    assert not values.any()


def attended(model: RecallModel, activations: CodeActivations, layer: int) -> None:
    """Bring the rows of the code at hand, exactly, and finish the layer."""
    asked = activations.queries(layer)[0, 0]  # (q heads, d)
    codes = model.codes(np.arange(model.num_pairs))
    entity = int(np.einsum("nhd,hd->n", codes, asked[:: model.group]).argmax())
    following = model.prompt()[entity] % model.num_pairs
    brought = np.repeat(model.codes(np.array([following]))[0], model.group, axis=0)
    activations.finish(layer, np.ascontiguousarray(brought).view(np.uint8).reshape(-1))


@pytest.mark.parametrize(("task", "wrong"), [("recall", [7]), ("chain", [5, 6, 7])])
def test_a_query_predicted_one_layer_ahead_is_wrong_right_after_a_hop_only(task: str, wrong: list[int]) -> None:
    model = RecallModel(task, PAIRS)
    activations = model.begin([[11]], np.array([[PAIRS]]))
    differs = []
    for layer in range(model.num_layers - 1):
        predicted = activations.queries(layer + 1)
        attended(model, activations, layer)
        if (predicted != activations.queries(layer + 1)).any():
            differs.append(layer + 1)
    assert differs == wrong
    assert set(differs) & set(model.hops) == ({5, 6} if task == "chain" else set())
    assert int(activations.logits().argmax()) == model.answer(11)


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    first, again, other = (RecallModel("recall", PAIRS, seed) for seed in (3, 3, 4))
    assert first.prompt() == again.prompt() != other.prompt()
    assert (first.prefill(0).keys[0] == again.prefill(0).keys[0]).all()


@pytest.mark.parametrize("pairs", [0, 1, MAX_PAIRS + 1])
def test_a_number_of_pairs_without_a_margin_is_refused(pairs: int) -> None:
    with pytest.raises(ValueError, match=rf"{pairs} pairs were asked for; from 2 to 131,072 can be recalled"):
        RecallModel("recall", pairs)


def test_an_unknown_task_and_a_wrong_token_are_refused() -> None:
    with pytest.raises(ValueError, match="task 'hop' is not one of recall, chain"):
        RecallModel("hop", 10)
    model = RecallModel("recall", 10)
    for token in (-1, 110):
        with pytest.raises(ValueError, match=r"outside \[0, 110\)"):
            model.begin([[token]], np.array([[10]]))
