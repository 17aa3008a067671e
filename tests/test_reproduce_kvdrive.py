"""The reproduction of KVDrive: its constants, what is counted on traces, its runs, and its checks in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny import tiny_model, tiny_workload
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.prefill import generate_dense
from tierloop.runtime.reproduction import constants_hash
from tierloop.runtime.study import PhantomRun, Study, _Mistaken
from tierloop.tools import reproducing
from tierloop.tools import reproducing_hybridgen_model as hybridgen
from tierloop.tools import reproducing_kvdrive_constants as constants
from tierloop.tools import reproducing_kvdrive_model as model
from tierloop.tools import reproducing_kvdrive_questions as questions
from tierloop.tools import reproducing_kvdrive_runs as runs
from tierloop.tools import reproducing_kvdrive_time as time
from tierloop.tools import reproducing_kvdrive_traces as traces
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS, Constants, frozen
from tierloop.tools.reproducing_kvdrive_counts import capacity, machine, roofline

CLI = Callable[..., tuple[int, str, str]]
Int64 = NDArray[np.int64]
SMALL = replace(
    CONSTANTS,
    model="smollm2-135m",
    context=4096,
    batch=2,
    layers=2,
    sweep_layers=2,
    drive_layers=2,
    centroids=64,
    chunk_centroids=64,
    steps=1,
    warmup_steps=1,
    pipeline_context=4096,
    pipeline_batches=(1, 4),
    sweep_batches=(1, 2),
    draw_layers=2,
    trace_heads=2,
    trace_candidates=256,
    gain_layers=2,
    gain_steps=8,
    gain_warmup=2,
    sizing_spreads=(),
    contexts=(4096,),
    drive_rates=(1_000_000_000, 14_000_000_000),
    drives=(1, 2),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study of a small model, with constants in proportion."""
    for module in (constants, runs, time, traces, questions, model):
        monkeypatch.setattr(module, "CONSTANTS", SMALL)
    return Study(0, SMALL.locality, SMALL.kv_dtype, SMALL.table, model="tiny")


# -- the system ---------------------------------------------------------------------------------------------------


def test_kvdrive_has_its_twelve_checks_and_eight_questions_in_order() -> None:
    found = reproducing.find_system("kvdrive")
    assert list(found.checks) == [f"K{number}" for number in range(1, 13)]
    assert len(found.questions) == 8


def test_every_constant_and_each_trace_is_in_the_hash() -> None:
    before = constants_hash(frozen())
    assert {field.name for field in fields(Constants)} <= frozen().keys()
    assert {"localities/kvdrive-draw.json", "localities/short-locality.json"} <= frozen()["files"].keys()
    changes: tuple[dict[str, Any], ...] = (
        {"chunk": 8},
        {"gain": (0.0, 1.0)},
        {"short": "smollm2-135m"},
        {"l20": "demo"},
    )
    for changed in changes:
        assert constants_hash(frozen(replace(CONSTANTS, **changed))) != before


def test_the_command_skips_k4_with_the_baselines_and_finds_the_exact_number(run_cli: CLI) -> None:
    code, out, _ = run_cli("reproduce", "kvdrive", "--check", "K4", "--check", "K12", "--no-questions", "--json")
    skipped, exact = json.loads(out)["checks"]
    assert code == 0
    assert (skipped["passed"], exact["passed"]) == (None, True)
    assert all(
        name in skipped["reason"] for name in ("Quest", "ShadowKV", "PQCache", "MagicPIG", "RetroInfer", "FlexGen")
    )
    assert exact["got"] == 100_000 * 8 * 131_072 / 1e9


# -- what is counted ----------------------------------------------------------------------------------------------


def test_the_capacity_is_104_9_gb() -> None:
    (claim,) = capacity(Study(0, CONSTANTS.locality)).claims
    assert claim.got == pytest.approx(104.8576)
    assert claim.passed


def test_the_roofline_crosses_where_the_link_is_as_slow_as_the_host() -> None:
    check = roofline(Study(0, CONSTANTS.locality))
    fast = machine(CONSTANTS.cpu_flops[-1], CONSTANTS.pcie[0])
    assert check.claims[0].got == pytest.approx(1 - fast.link_bytes_per_s / fast.host_bytes_per_s)
    assert check.claims[0].interval[0] == 0, "FlexGen's CPU is slower than the link"


def test_entries_of_ranked_clusters_come_cluster_by_cluster() -> None:
    step = np.array([[[2, 0, 1]]], dtype=np.int64)
    assert traces._members(step, 8, 3)[0, 0].tolist() == [2, 5, 0, 3, 6, 1, 4, 7]


def test_another_text_has_other_scores_and_the_same_text_the_same() -> None:
    study = Study(0, CONSTANTS.locality)
    one, same, other = (traces.ranked(study, CONSTANTS.locality, 1, 64, 8, 2, text=text) for text in ("a", "a", "b"))
    assert np.array_equal(one[1], same[1])
    assert not np.array_equal(one[1], other[1])


def test_wider_windows_transfer_less_and_sizes_save_on_the_text_that_was_profiled(small: Study) -> None:
    first = traces.windows_and_transfer(small)
    volumes = list(first.details["MB per step by window"].values())
    assert volumes == sorted(volumes, reverse=True)
    assert volumes[0] == pytest.approx(65_536 * 2 * 30 * 3 * 64 * 2 * 0.0625 / 1e6), "×0 transfers every choice"
    third = traces.sizing(small)
    assert third.claims[1].passed
    assert third.claims[3].got == 0


def test_each_unit_has_its_cells_and_short_locality_has_lower_hit_rates(small: Study) -> None:
    cells = traces.evictions(small)
    assert len(cells) == 2 * len(SMALL.units) * len(SMALL.gain_windows)
    rates = {trace: np.mean([c["LA"] for c in cells if c["trace"] == trace]) for trace in (SMALL.locality, SMALL.short)}
    assert rates[SMALL.short] < rates[SMALL.locality]
    (table,) = questions.look_ahead(small)
    assert len(table.rows) == len(cells)


# -- phantom runs -------------------------------------------------------------------------------------------------


def test_a_run_of_some_layers_scales_to_all_but_for_the_head_where_layers_are_alike(small: Study) -> None:
    alike = Study(0, SMALL.short, SMALL.kv_dtype, SMALL.table)
    whole, part = (runs.kvdrive(alike, layers=layers) for layers in (0, 6))
    assert runs.whole_step_ns(whole, layers=0) == whole.step_ns
    assert runs.whole_step_ns(part, layers=6) == pytest.approx(whole.step_ns, rel=0.03)
    assert runs.stage_ns(part, ("head",)) == runs.stage_ns(whole, ("head",))


def test_windows_raise_the_hit_rate_and_requests_of_a_batch_share_a_step(small: Study) -> None:
    rates = [runs.hit_rate(runs.kvdrive(small, window=window)) for window in (0.0, 1.0, 2.0)]
    assert rates[0] == 0 < rates[1] < rates[2]
    assert len(runs.kvdrive(small, batch=3).result.details) == 3


def test_a_run_may_have_a_selection_of_its_own(small: Study) -> None:
    options = {"persistent": "none", "budget": 0.05}
    lasting, short = (
        small.run(PhantomRun(SMALL.model, SMALL.l20, "kvdrive", 4096, options, {}, 1, 2, 1, 2, locality=name))
        for name in ("", SMALL.short)
    )
    assert runs.hit_rate(short) < runs.hit_rate(lasting)


class _InOrder:
    """Decisions that rank candidates by number."""

    asked = False

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        return np.tile(np.arange(question.k, dtype=np.int64), (len(question.lengths), 1))

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        return np.zeros((grouping.lists, grouping.candidates), dtype=np.int64)

    def beyond(self, model: str | None, longest: int) -> list[str]:
        return []


def question(label: str, k: int = 50) -> Question:
    return Question(label, 1, ("r",), 3, np.full(4, 200, dtype=np.int64), np.zeros(4, dtype=np.int64), 4, k)


def test_only_predictions_are_wrong_and_as_often_as_is_said() -> None:
    mistaken = _Mistaken(_InOrder(), 0.8, 0)
    assert (mistaken.answer(question("select r"), None) == np.arange(50)).all()
    assert mistaken.beyond(None, 1) == ["predictions find 80% of what is best"]
    found = mistaken.answer(question("prefetch r"), None)
    assert np.array_equal(found, mistaken.answer(question("prefetch r"), None))
    assert all(len(set(row)) == 50 for row in found.tolist())
    right = (found == np.arange(50)).mean()
    assert 0.7 < right < 0.9
    assert (found[found >= 50] < 200).all()


def test_a_prediction_has_no_wrong_candidates_where_all_are_best() -> None:
    everything = _Mistaken(_InOrder(), 0.0, 0).answer(question("prefetch r", 200), None)
    assert (everything == np.arange(200)).all()


def test_predictions_that_err_make_prefetching_slower(small: Study) -> None:
    good, bad = (runs.kvdrive(small, pipeline="prefetch", window=1.0, predict_from=0, predicted=p) for p in (1.0, 0.2))
    assert bad.result.links["pcie"].bytes_forward > good.result.links["pcie"].bytes_forward


# -- checks and questions in small --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["breakdown", "window_by_batch", "on_ssd", "pipelines"])
def test_checks_of_time_have_claims_whose_value_is_in_their_interval(name: str, small: Study) -> None:
    check = getattr(time, name)(small)
    assert check.claims
    for claim in check.claims:
        assert claim.interval[0] <= claim.got <= claim.interval[1]
    assert check.provenance == "extrapolated"
    json.dumps(check.to_json(), allow_nan=False)


def test_an_ssd_costs_more_the_slower_it_is(small: Study) -> None:
    found = time.on_ssd(small).details
    ratios = [found[f"{rate / 1e9:g} GB/s, DRAM holds 0"]["ratio"] for rate in SMALL.ssd_rates]
    assert ratios == sorted(ratios)
    assert found["3 GB/s, DRAM holds 0"]["share of misses from the SSD"] == 1
    assert ratios[-1] < 1


def test_an_all_gpu_batch_fits_beside_the_weights() -> None:
    batch = time.largest_batch(122_880)
    each = (122_880 + 64) * 131_072
    assert 16_060_522_496 + batch * each <= 96e9 * 0.98 < 16_060_522_496 + (batch + 1) * each
    assert time.largest_batch(1_048_576) == 0


@pytest.mark.parametrize("name", ["stalls", "placement_error", "sparsity", "tiers", "drives", "contexts"])
def test_questions_have_rows_that_say_how_they_are_known(name: str, small: Study) -> None:
    for table in getattr(questions, name)(small):
        assert table.rows
        assert all(row["provenance"] == "extrapolated" and row["reason"] for row in table.rows)


def test_more_drives_are_faster_and_the_link_keeps_up() -> None:
    one, four = questions._drives(7_000_000_000, 1), questions._drives(7_000_000_000, 4)
    assert all(four[key] == 4 * value for key, value in one.items())
    slow = questions._drives(1_000_000_000, 1)
    assert slow[constants.SSD] == 1_000_000_000
    assert slow[constants.CHANNELS] == CONSTANTS.channels


# -- a real model's parts, on a tiny one --------------------------------------------------------------------------


def test_decoding_keeps_the_bound_and_evictions_change_hits_alone(
    small: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "CONSTANTS", replace(SMALL, real_layers=1, local=8, budget_high=0.1))
    prefill = generate_dense(tiny_model(), tiny_workload(300).token_ids, 1).prefill
    small.once("model", lambda: tiny_model(context=4096))
    small.once("prompt 0", lambda: hybridgen.Prompt(prefill, (5, 6, 7, 8), (6, 7, 8, 9), ()))
    la, lru = (model.decoded(small, 0, centroids=16, eviction=rule) for rule in ("la", "lru"))
    assert max(la.worst_ratio, lru.worst_ratio) <= 1
    assert (la.mass_recall, la.output_error) == (lru.mass_recall, lru.output_error)
    assert 0 < la.mass_recall < 1
