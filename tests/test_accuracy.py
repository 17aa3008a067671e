"""The accuracy harness: what a row says, what is shared, what counts, and what is refused before any work."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.accuracy import Accuracy, Asked, Row, measure
from tierloop.runtime.models import load_model
from tierloop.runtime.modules import Modules
from tierloop.runtime.prefill import generate_dense
from tierloop.runtime.stages import Prefill
from tierloop.runtime.subjects import Cell, RecallSubject, TextSubject, attend_densely
from tierloop.runtime.tasks import Case, Turn
from tierloop.tools.accuracy import accuracy

from .decoding import SMALL
from .test_docs import ROOT, run_blocks
from .tiny import tiny_model, tiny_workload

CACHE = ROOT / ".cache" / "models"
MODEL = tiny_model()
PROMPT = tuple(tiny_workload(200).token_ids)
GPU_IS_LARGE = {"devices.gpu.capacity": 1 << 30}


def small(**overrides: Any) -> Callable[[], Platform]:
    return lambda: open_platform(SMALL, overrides={**GPU_IS_LARGE, **overrides})


@dataclasses.dataclass
class TinySubject:
    """A tiny model: "say" expects what dense attention says, "other" something else, "text" scores random tokens."""

    name: str = "tiny"
    tasks: tuple[str, ...] = ("say", "other", "text")
    longest: int = 2048
    prefilled: int = 0

    def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
        cases = tuple(self.case(task, context, number) for number in range(prompts))
        return Cell(task, context, task == "text", Modules(MODEL.module), MODEL.shape, cases, self.prefill)

    def case(self, task: str, context: int, number: int) -> Case:
        *prompt, last = tiny_workload(context, seed=number).token_ids
        said = generate_dense(MODEL, [*prompt, last], 3).tokens
        wrong = tuple(token % 210 + 1 for token in said)
        return Case(tuple(prompt), (Turn(last, said if task == "say" else wrong),))

    def prefill(self, case: Case) -> Prefill:
        self.prefilled += 1
        prefill = generate_dense(MODEL, case.prompt, 1).prefill
        return dataclasses.replace(prefill, first_token=case.turns[0].token)


@pytest.fixture(scope="module")
def measured() -> tuple[Accuracy, TinySubject]:
    subject = TinySubject()
    asked = Asked(("all-gpu", "topk-blocks"), (0.2, 0.6, 1.0), (330,), prompts=2)
    return measure(subject, asked, small()), subject


def test_each_case_is_prefilled_once_for_all_policies_and_budgets(measured: tuple[Accuracy, TinySubject]) -> None:
    assert measured[1].prefilled == 3 * 2


def test_there_is_a_row_for_each_budget_and_one_for_an_exact_policy(measured: tuple[Accuracy, TinySubject]) -> None:
    rows = [(row.policy, row.budget) for row in measured[0].rows if row.task == "say"]
    assert rows == [("all-gpu", 1), ("topk-blocks", 0.2), ("topk-blocks", 0.6), ("topk-blocks", 1)]
    assert {(row.context, row.cases, row.refused) for row in measured[0].rows} == {(330, 2, None)}


@pytest.mark.parametrize("which", [0, 3])
def test_all_rows_give_the_answers_of_dense_attention(which: int, measured: tuple[Accuracy, TinySubject]) -> None:
    say, other, text = (measured[0].rows[first + which] for first in (0, 4, 8))
    assert (say.score, say.dense_score, say.counts) == (1, 1, True)
    assert (other.score, other.dense_score, other.counts) == (0, 0, False)
    assert text.score == pytest.approx(1, rel=1e-4)
    assert (text.dense_score, text.counts) == (1, True)
    for row in (say, other, text):
        assert (row.mass_recall, row.topk_recall, row.attended_share) == (1, 1, 1)
        assert row.output_error < 1e-5
        assert row.worst_ratio <= 1


def test_fewer_rows_recall_less_and_err_more(measured: tuple[Accuracy, TinySubject]) -> None:
    for first in (0, 4, 8):
        little, much = measured[0].rows[first + 1 : first + 3]
        assert 0 < little.mass_recall < much.mass_recall < 1
        assert 0 < little.topk_recall < 1
        assert little.attended_share < much.attended_share < 1
        assert little.output_error > much.output_error > 1e-5
        assert little.worst_ratio <= 1
        assert little.error_vs_dense > 0


def test_layers_are_reported_one_by_one(measured: tuple[Accuracy, TinySubject]) -> None:
    row = measured[0].rows[1]
    assert sorted(row.layers) == [0, 1, 2]
    assert [row.layers[layer].mass_recall for layer in (0, 1)] == [1, 1]  # dense in topk-blocks
    assert row.layers[2].mass_recall < 1
    assert row.mass_recall == pytest.approx(sum(layer.mass_recall for layer in row.layers.values()) / 3)
    assert row.checked == sum(layer.checked for layer in row.layers.values()) == 2 * 3 * 3 * 6


def test_the_perplexity_of_dense_attention_is_that_of_the_framework(measured: tuple[Accuracy, TinySubject]) -> None:
    row = measured[0].rows[8]
    scores = []
    for number in range(2):
        case = TinySubject().case("text", 330, number)
        (turn,) = case.turns
        with torch.inference_mode():
            logits = MODEL.module(torch.tensor([[*case.prompt, *turn.fed]])).logits[0].double()
        found = torch.log_softmax(logits[-len(turn.fed) :], dim=-1)
        scores += [float(found[i, token]) for i, token in enumerate(turn.expected)]
    assert row.dense_ppl == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)
    assert row.ppl == pytest.approx(row.dense_ppl, rel=1e-4)


def test_a_better_score_is_a_lower_perplexity(measured: tuple[Accuracy, TinySubject]) -> None:
    for row in measured[0].rows[8:]:
        assert row.ppl is not None
        assert row.dense_ppl is not None
        assert row.ci95[0] <= row.score <= row.ci95[1]
        assert (row.score > 1.01) <= (row.ppl < row.dense_ppl * 1.1)


def test_a_task_that_dense_attention_fails_is_left_out_of_averages(measured: tuple[Accuracy, TinySubject]) -> None:
    averages = measured[0].averages
    assert {tuple(mean["tasks"]) for mean in averages} == {("say", "text")}
    say, text = measured[0].rows[1], measured[0].rows[9]
    assert averages[1]["score"] == pytest.approx((say.score + text.score) / 2)


def test_a_good_measurement_has_no_failures(measured: tuple[Accuracy, TinySubject]) -> None:
    assert measured[0].failures == []


def test_errors_beyond_the_bound_and_wrong_answers_of_exact_policies_are_failures() -> None:
    good = Row("all-gpu", 1, 100, "say", score=1, dense_score=1, worst_ratio=0.5, exact=True)
    bad = [
        dataclasses.replace(good, worst_ratio=1.5),
        dataclasses.replace(good, worst_ratio=math.nan),
        dataclasses.replace(good, score=0.5),
    ]
    failures = Accuracy("m", "float32", "p", (good, *bad)).failures
    assert len(failures) == 3
    assert "1.5 times its bound" in failures[0]
    assert "an exact policy scores 0.5, dense attention 1" in failures[2]
    assert len(Accuracy("m", "int8", "p", (good, *bad)).failures) == 2


def test_a_policy_that_does_not_fit_is_refused_and_the_others_run() -> None:
    asked = Asked(("all-gpu", "cpu-attention"), (0.5,), (200,), ("say",), 2)
    refused, ran = measure(TinySubject(), asked, small(**{"devices.gpu.capacity": 200_000})).rows
    assert "emu:gpu: alloc" in str(refused.refused)
    assert ran.refused is None
    assert ran.score == 1


def test_dense_attention_is_that_of_the_framework() -> None:
    case = TinySubject().case("say", 200, 0)
    cell = TinySubject().cell("say", 200, 1, 0)
    said = [int(logits.argmax()) for logits in attend_densely(cell, cell.prefill(case), case)]
    assert said == list(case.turns[0].expected)


# ---- the recall model


def test_what_a_policy_misses_shows_in_its_answers() -> None:
    asked = Asked(("topk-blocks",), (0.02, 1.0), (1024,), prompts=6)
    rows = measure(RecallSubject(), asked, small()).rows
    assert [(row.task, row.dense_score, row.cases) for row in rows] == [("recall", 1, 6)] * 2 + [("chain", 1, 6)] * 2
    for narrow, wide in (rows[:2], rows[2:]):
        assert narrow.score < 1 == wide.score
        assert narrow.mass_recall < 1 == wide.mass_recall
        assert narrow.worst_ratio <= 1


def test_of_long_contexts_the_layers_of_hops_are_recorded() -> None:
    subject = RecallSubject()
    assert subject.cell("chain", 16_384, 2, 0).layers is None
    assert subject.cell("chain", 16_385, 2, 0).layers == (4, 5, 6)


def test_the_example_of_the_page_runs() -> None:
    assert run_blocks(ROOT / "docs" / "accuracy.md")["narrow"].counts


# ---- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "no policy was named"),
        ({"policies": ("topk-block",)}, "topk-blocks"),
        ({"budgets": (0.0,)}, r"--budget 0.0: it must be above 0 and at most 1"),
        ({"budgets": (0.5, 1.5)}, r"--budget 1.5: it must be above 0 and at most 1"),
        ({"budgets": (math.nan,)}, r"--budget nan: it must be above 0"),
        ({"budgets": ()}, "no budget was named"),
        ({"prompts": 0}, "--prompts 0: at least 1 is needed"),
        ({"contexts": ()}, "no context length was named"),
        ({"kv_dtype": "float23"}, "--kv-dtype 'float23'.*float32"),
        ({"contexts": (2049,)}, "--context 2049: tiny takes from 1 to 2048 tokens; --model recall takes up to 131072"),
        ({"contexts": (0,)}, "--context 0: tiny takes from 1 to 2048 tokens$"),
        ({"contexts": (131_073,)}, "--context 131073: tiny takes from 1 to 2048 tokens$"),
        ({"tasks": ("says",)}, "--task 'says': tiny has no such task.*say"),
        ({"options": {"topk-blocks": {"budget": 0.3}}}, "--option topk-blocks.budget: name budgets by --budget"),
        ({"options": {"topk-blocks": {"sink": 1}}}, "topk-blocks has no option 'sink'"),
    ],
)
def test_wrong_input_is_refused_before_any_work(change: dict[str, Any], message: str) -> None:
    class Idle(TinySubject):
        def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
            raise AssertionError("work was begun")

    with pytest.raises(ConfigurationError, match=message):
        measure(Idle(), dataclasses.replace(Asked(("topk-blocks",)), **change), small())


def test_more_questions_than_a_context_has_room_for_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a context of 20 tokens is too short for 8 questions"):
        RecallSubject().cell("recall", 20, 8, 0)


# ---- the command


def test_the_command_prints_the_rows_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy(
        policy=["topk-blocks", "cpu-attention"],
        budget=[0.5],
        context=[300],
        task=["recall"],
        prompts=4,
        model="recall",
        platform=str(SMALL),
        as_json=True,
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == "recall"
    assert [(row["policy"], row["budget"]) for row in shown["rows"]] == [("topk-blocks", 0.5), ("cpu-attention", 1)]
    for row in shown["rows"]:
        assert {"context", "task", "score", "ci95", "dense_score", "topk_recall", "mass_recall"} < set(row)
        assert row["output_error"] >= 0
        low, high = row["ci95"]
        assert 0 <= low <= row["score"] <= high <= 1
    assert shown["manifest"]["seed"] == 0


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy(policy=["cpu-attention"], context=[200], prompts=4, model="recall", platform=str(SMALL))
    shown = capsys.readouterr().out
    assert "mean of recall, chain at 200: cpu-attention 1: 1.000" in shown
    assert "1.000 (0.51 to 1.00)" in shown


def test_the_command_ends_as_wrong_input_where_nothing_fits() -> None:
    with pytest.raises(ConfigurationError, match=r"no policy fits .*emu:gpu is too small"):
        accuracy(policy=["all-gpu"], context=[40_000], task=["recall"], prompts=1, model="recall", platform="demo")


@pytest.mark.model
def test_smollm2_is_asked_and_scored_through_an_exact_policy() -> None:
    subject = TextSubject(load_model(cache=CACHE))
    asked = Asked(("all-gpu",), (0.5,), (256,), ("needle",), 1)
    (row,) = measure(subject, asked, lambda: open_platform("laptop")).rows
    assert (row.score, row.dense_score) == (1, 1)
    assert row.worst_ratio <= 1
    assert sorted(row.layers) == list(range(30))
