"""What checks of a reproduction are made of: phantom runs that are shared and watched, and the sums made with them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.feedback import FeedbackScheduler
from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.prefill import generate_dense
from tierloop.runtime.study import COPIES, CPU, GPU, NOBODY, Study, _exposed
from tierloop.tools import reproducing_hybridgen_model as on_model
from tierloop.tools import reproducing_hybridgen_scheduler as scheduler
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS
from tierloop.tools.reproducing_hybridgen_counts import ATTENTION, crossover
from tierloop.tools.reproducing_hybridgen_questions import shared_pool, slower_ranges
from tierloop.tools.reproducing_hybridgen_runs import ALL_GPU, STREAM, baseline, hybrid, load, regimes
from tierloop.tools.reproducing_hybridgen_time import sign_change

SMALL = "opt-125m"


def study(seed: int = 0) -> Study:
    return Study(seed, CONSTANTS.locality, CONSTANTS.kv_dtype, CONSTANTS.table, model="tiny")


# -- phantom runs -------------------------------------------------------------------------------------------------


def test_flops_of_a_step_over_all_rows_are_those_of_the_closed_form() -> None:
    run = hybrid(study(), SMALL, 1023, k=None, budget=1.0)
    layers, hidden = 12, 768
    assert run.flops(*ATTENTION) == layers * 4 * 1024 * hidden
    assert run.flops("qkv") == layers * 6 * hidden**2
    assert {device for device, kernel in run.work if kernel == "logits"} == {"emu:gpu", "emu:dram"}


def test_the_crossover_is_weights_over_kv_bytes_of_a_token() -> None:
    (claim,) = crossover(study()).claims
    assert claim.got == pytest.approx(25.7e9 / 819_200, rel=1e-3)
    assert claim.passed


def test_equal_runs_are_made_once_and_the_same_seed_gives_the_same_numbers() -> None:
    ours = study()
    first, again = hybrid(ours, SMALL, 2048), hybrid(ours, SMALL, 2048)
    assert first is again
    fresh = hybrid(study(), SMALL, 2048)
    assert replace(fresh.result, wall_s=0) == replace(first.result, wall_s=0)
    assert dict(fresh.work) == dict(first.work)
    assert fresh.exposed == first.exposed


def test_runs_that_share_a_drawn_selection_take_the_time_of_runs_that_draw_their_own() -> None:
    ours = study()
    hybrid(ours, SMALL, 2048, cpu=CONSTANTS.cpu_implied)
    assert hybrid(ours, SMALL, 2048).step_ns == hybrid(study(), SMALL, 2048).step_ns


def test_a_slower_cpu_makes_the_load_larger_and_the_step_longer() -> None:
    ours = study()
    loads, steps = [], []
    for rate in regimes().values():
        run = hybrid(ours, SMALL, 2048, cpu=rate)
        loads.append(load(run.result))
        steps.append(run.step_ns)
    assert loads == sorted(loads, reverse=True)
    assert steps == sorted(steps, reverse=True)
    assert loads[0] > 1


def test_weights_take_their_room_on_the_gpu() -> None:
    fits = baseline(study(), ALL_GPU, "opt-13b", 8192)
    refused = baseline(study(), ALL_GPU, "opt-13b", 8192, platform="hybridgen-5090-cxl")
    assert fits.result.refused is None
    assert math.isnan(refused.step_ns)
    assert find_model("opt-13b").kv_nbytes() * 8200 < 32e9, "the cache alone would fit"


def test_the_parts_of_a_step_are_no_more_than_the_step() -> None:
    run = hybrid(study(), SMALL, 2048)
    assert 0 < sum(run.exposed.values()) <= run.result.elapsed_ns
    assert run.result.provenance == "extrapolated"
    assert "assumed or unknown" in run.reason
    streamed = baseline(study(), STREAM, SMALL, 2048)
    assert streamed.exposed[CPU] == 0
    assert streamed.exposed[COPIES] > 0


def test_time_in_which_one_alone_is_at_work_is_counted_as_its_own() -> None:
    ended = [
        ("g", "attend", 0, 10, 30),
        ("c", "logits", 0, 20, 50),
        ("g", "", 0, 60, 70),
        ("c", "", 0, 70, 75),
    ]
    found = _exposed(ended, {"g": "gpu", "c": "cpu"}, 0, 100)
    assert found == {GPU: 10, CPU: 20 + 5, COPIES: 10, NOBODY: 10 + 10 + 25}


def test_rows_of_a_question_say_how_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.tools import reproducing_hybridgen_questions as questions

    monkeypatch.setattr(questions, "CONSTANTS", replace(CONSTANTS, model=SMALL, question_context=1024))
    (table,) = shared_pool(study())
    assert len(table.rows) == 4
    assert all(row["provenance"] == "extrapolated" and row["reason"] for row in table.rows)
    assert all(row["against alone"] >= 1 for row in table.rows)


# -- sums ---------------------------------------------------------------------------------------------------------


def test_the_load_changes_its_side_where_its_logarithm_is_0() -> None:
    assert sign_change([1024, 4096], [0.5, 2.0]) == pytest.approx(2048)
    assert sign_change([1024, 4096], [1.5, 2.0]) == 0
    assert sign_change([1024, 4096], [0.5, 0.9]) == math.inf


def test_ranges_in_which_ours_is_slower_end_between_lengths_and_a_refused_run_wins_nowhere() -> None:
    contexts = [1024, 4096, 16_384]
    assert slower_ranges(contexts, [2, 2, 2], [1, 4, 4]) == [[1024, 2048]]
    assert slower_ranges(contexts, [2, 2, 2], [1, 1, 1]) == [[1024, 16_384]]
    assert slower_ranges(contexts, [2, 2, 2], [4, 4, 4]) == []
    assert slower_ranges(contexts, [2, 2, 2], [1, 1, math.nan]) == [[1024, 4096]]
    assert slower_ranges(contexts, [2, 2, 2], [math.nan, 1, 1]) == [[4096, 16_384]]


def test_simulated_settling_is_the_same_every_time_and_sees_a_scheduler_that_swings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "CONSTANTS", replace(CONSTANTS, noisy_seeds=3))
    assert scheduler.settled(0) == scheduler.settled(0)
    assert max(scheduler.settled(0)) <= 1.2 + 1e-9

    def port(*args: object, **options: object) -> FeedbackScheduler:
        return FeedbackScheduler(CONSTANTS.k_min, 1 << 14, kind="port")

    monkeypatch.setattr(scheduler, "FeedbackScheduler", port)
    assert max(scheduler.settled(0)) > 1.2


# -- the real model's parts, on a tiny one ------------------------------------------------------------------------


def test_rows_of_the_true_query_are_all_found_and_those_of_another_are_not() -> None:
    chance = np.random.default_rng(0)
    keys = chance.standard_normal((2, 1000, 16)).astype(np.float32)
    true = chance.standard_normal((6, 5, 16)).astype(np.float32)
    recall, mass, most = on_model._kept(true, true, keys, 0.25)
    assert recall == 1
    assert mass == pytest.approx(most, rel=1e-6)
    recall, mass, again = on_model._kept(true, -true, keys, 0.25)
    assert recall < 0.3
    assert mass < most == again
    rows, group = 900, 3
    logits = 0.25 * np.einsum("gnd,td->gnt", true[:group].astype(np.float64), keys[0, :rows].astype(np.float64))
    weights = np.exp(logits)
    best = np.argsort(-logits.max(axis=0), axis=1)[:, : CONSTANTS.recall_k]
    expected = [weights[:, n, best[n]].sum(axis=1) / weights[:, n].sum(axis=1) for n in range(5)]
    assert on_model._kept(true[:group], true[:group], keys[:1], 0.25)[2] == pytest.approx(np.mean(expected), rel=1e-5)


def test_decoding_keeps_more_of_dense_attention_with_more_rows_and_less_with_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(CONSTANTS, real_platform="hybridgen-a100-cxl", k_min=8, prompt_tokens=300, real_layers=1)
    monkeypatch.setattr(on_model, "CONSTANTS", small)
    ours, model = study(), tiny_model()
    prefill = generate_dense(model, tiny_workload(300).token_ids, 1).prefill
    ours.once("model", lambda: model)
    ours.once("prompt 0", lambda: on_model.Prompt(prefill, (5, 6, 7), (6, 7, 8), ()))
    few, many, wrong = (
        on_model.decoded(ours, 0, "fixed", k=k, noise=noise) for k, noise in ((8, 0.0), (128, 0.0), (8, 0.5))
    )
    assert wrong.mass_recall < few.mass_recall < many.mass_recall < 1
    assert max(few.worst_ratio, many.worst_ratio, wrong.worst_ratio) <= 1
    assert many.ended[0] == 128


def test_a_model_that_is_too_short_is_refused_before_any_prompt() -> None:
    ours = study()
    ours.once("model", lambda: SimpleNamespace(name="tiny", shape=SimpleNamespace(context_length=256)))
    with pytest.raises(ConfigurationError, match="tiny takes 256 tokens; 2112 are needed"):
        on_model.text_model(ours)
