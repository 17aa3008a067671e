"""The reproduction of NELSSA: its constants, runs and their sums, and its checks and questions in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError
from tierloop.emulators.profile import find_profile, read_profile
from tierloop.runtime.crossover import crossover
from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.reproduction import Check, Claim, at_least, constants_hash, over
from tierloop.runtime.served import Sample, ServingResult
from tierloop.runtime.study import PhantomRun, Study
from tierloop.tools import reproducing
from tierloop.tools import reproducing_nelssa_constants as constants
from tierloop.tools import reproducing_nelssa_counts as counts
from tierloop.tools import reproducing_nelssa_migration as migration
from tierloop.tools import reproducing_nelssa_model as model
from tierloop.tools import reproducing_nelssa_questions as questions
from tierloop.tools import reproducing_nelssa_runs as runs
from tierloop.tools import reproducing_nelssa_serving as serving
from tierloop.tools import reproducing_nelssa_time as time
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS, Constants, frozen

CLI = Callable[..., tuple[int, str, str]]
SMALL = replace(
    CONSTANTS,
    contexts=(128_000, 256_000),
    batches=(1, 8),
    bandwidths=(100_000_000_000, 200_000_000_000),
    budgets=(0.02, 0.04, 0.08),
    devices=(1, 2),
    capacities_gib=(32, 64),
    requests=12,
    requests_in_place=8,
    long_shares=(0.0, 0.3, 0.6),
    migrating_requests=8,
    occupancy_contexts=(32_000, 100_000),
    threshold_contexts=(32_000, 128_000),
    threshold_scales=(0.1, 10.0),
    threshold_served=(0.1, 10.0),
    threshold_prompts=(128_000,),
    crossover_batches=(1, 8),
    sampling_requests=2,
    link_rates=(50_000_000_000, 5_000_000_000),
)


def study() -> Study:
    return Study(0, CONSTANTS.locality, CONSTANTS.kv_dtype, CONSTANTS.table, model="tiny")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study with fewer and smaller runs."""
    for module in (constants, runs, time, counts, serving, migration, model, questions):
        monkeypatch.setattr(module, "CONSTANTS", SMALL)
    return study()


# -- the system ---------------------------------------------------------------------------------------------------


def test_nelssa_has_its_eleven_checks_and_eight_questions_in_order() -> None:
    found = reproducing.find_system("nelssa")
    assert list(found.checks) == [f"N{number}" for number in range(1, 12)]
    assert len(found.questions) == 8


def test_every_constant_and_each_profile_is_in_the_hash() -> None:
    before = constants_hash(frozen())
    assert {field.name for field in fields(Constants)} <= frozen().keys()
    assert {"profiles/nelssa-prototype.toml", "platforms/nelssa-h100-8pnm.toml"} <= frozen()["files"].keys()
    for changed in ({"budget": 0.02}, {"long_shares": (0.0,)}, {"one_gpu": "demo"}):
        assert constants_hash(frozen(replace(CONSTANTS, **changed))) != before


def test_the_command_finds_what_each_machine_holds(run_cli: CLI) -> None:
    code, out, _ = run_cli("reproduce", "nelssa", "--check", "N9", "--no-questions", "--json")
    (check,) = json.loads(out)["checks"]
    assert code == 0
    assert [claim["got"] for claim in check["claims"]] == [4 * (32 << 30) // 131_072, 426_784, 976_100]


# -- runs and what is read from them ------------------------------------------------------------------------------


def test_few_layers_have_the_room_that_all_of_them_have() -> None:
    whole, some = (runs.gpu_room(layers)["devices.gpu.capacity"] for layers in (0, 2))
    cache = whole - runs.model().weight_nbytes()
    assert (some - runs.model(2).weight_nbytes()) / cache == pytest.approx(2 / 32, rel=1e-6)
    assert runs.pnm_room(2, 32 << 30, 2) == {"devices.pnm0.capacity": 2 << 30, "devices.pnm1.capacity": 2 << 30}


def test_as_many_requests_run_as_fit_beside_the_weights() -> None:
    assert [runs.fitting(128_000, 8, gpus) for gpus in (1, 2)] == [3, 7]
    assert runs.fitting(1_024_000, 8, 2) == 0
    assert runs.baseline_rate(study(), 1_024_000, 8, 2) == 0.0


def test_a_gpu_run_reads_the_cache_once_at_the_rate_of_its_memory() -> None:
    ours = study()
    (_, slope) = runs.fit((32_000, 64_000), [runs.on_gpu(ours, n).step_ns for n in (32_000, 64_000)])
    assert slope == pytest.approx(2 * 4096 / 3350, rel=1e-3)


def test_overheads_grow_as_the_bandwidth_falls() -> None:
    halved = runs.slower(1, CONSTANTS.profile_bandwidth // 2)
    assert halved["devices.pnm0.constants.memory.pnm.channel_bytes_per_s"] * 4 == CONSTANTS.profile_bandwidth // 2
    assert halved["devices.pnm0.constants.executors.pnm.overhead_ns"] == 2 * CONSTANTS.device_ns
    assert runs.slower(4, None) == {}


def test_the_equations_found_by_the_policy_are_those_of_the_model_and_devices() -> None:
    found = time.found_equations(study(), 4)
    assert found.kv_nbytes == find_model(CONSTANTS.model).kv_nbytes() * 2 // 32
    assert (found.selection_ratio, found.num_devices) == (0.04, 4)
    assert found.gpu_bytes_per_s == pytest.approx(3.35e12, rel=1e-3)
    assert found.pnm_bytes_per_s <= 204.8e9


def test_each_device_adds_the_same_communication_since_copies_come_one_after_another() -> None:
    ours = study()
    one, two, four = (time.found_equations(ours, n).comm_ns for n in (1, 2, 4))
    assert two > one
    assert four - two == pytest.approx(2 * (two - one), rel=0.1)


def test_a_batch_of_different_lengths_has_each_of_them() -> None:
    lengths = (128_000, 4_096)
    run = runs.near(study(), 128_000, 2, contexts=lengths, threshold_tokens=100_000)
    assert run.result.details["requests"]["near"] == 1
    assert run.result.details["requests"]["gpu"] == 1


def test_runs_of_other_lengths_are_other_runs() -> None:
    of = [PhantomRun("m", "p", "q", 8, contexts=lengths) for lengths in ((), (8,), (8, 8))]
    assert len({run.key for run in of}) == 3


# -- checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (time, "crossovers"),
        (time, "throughput"),
        (time, "breakdown"),
        (counts, "partitions"),
        (serving, "batches"),
        (migration, "occupancy"),
    ],
)
def test_checks_have_claims_whose_value_is_in_their_interval(module: Any, name: str, small: Study) -> None:
    check = getattr(module, name)(small)
    assert check.claims
    for claim in check.claims:
        assert claim.interval[0] <= claim.got <= claim.interval[1]
    assert check.provenance == "extrapolated"
    json.dumps(check.to_json(), allow_nan=False)


def test_steps_cross_where_the_equation_with_all_copies_says(small: Study) -> None:
    for devices in SMALL.devices:
        says = crossover(time.found_equations(small, devices)).tokens
        assert time.measured_crossover(small, devices, []) == pytest.approx(says, rel=0.01)


def test_one_slow_device_never_wins_and_two_do(small: Study) -> None:
    slow = {n: time.found_equations(small, n, bandwidth=SMALL.never_bandwidth) for n in (1, 2)}
    assert crossover(slow[1]).tokens is None
    assert crossover(slow[2]).tokens is not None


def test_rows_within_the_prototypes_capacity_are_told_from_projected_ones(small: Study) -> None:
    rows = {(row["context"], row["batch"]): row for row in time.throughput_rows(small)}
    assert {key for key, row in rows.items() if row["range"] == "measured"} == {
        (128_000, 1),
        (128_000, 8),
        (256_000, 1),
    }
    assert rows[128_000, 8]["running on 2 GPUs"] == 7


def test_by_head_all_devices_are_as_busy_and_by_request_they_are_not(small: Study) -> None:
    excess = counts.partitions(small).details["excess of the busiest device"]
    assert excess["head"] == 0
    assert excess["request"] > 0.1


def test_the_largest_request_is_admitted_and_the_next_is_not(small: Study) -> None:
    def run(tokens: int) -> PhantomRun:
        room = runs.gpu_room(0, 1)
        return PhantomRun(SMALL.model, SMALL.one_gpu, runs.ALL_GPU, tokens, {}, room)

    largest = counts._largest(small, 426_784, run)
    assert small.run(run(largest)).result.refused is None
    assert small.run(run(largest + counts.STEP)).result.refused is not None
    assert largest <= 426_784


def test_near_memories_are_filled_up_to_the_working_space_of_a_step(small: Study) -> None:
    """The largest request is decoded, and the next one is refused: none runs out of memory in the middle."""

    def run(tokens: int) -> PhantomRun:
        room = {**runs.gpu_room(0), **runs.pnm_room(4, SMALL.prototype_nbytes, 0)}
        options = {"threshold_tokens": 1, "near": runs.memories(4)}
        return PhantomRun(SMALL.model, SMALL.platform, runs.NELSSA, tokens, options, room)

    largest = counts._largest(small, SMALL.measured_tokens, run)
    assert small.run(run(largest)).result.refused is None
    assert "too small" in str(small.run(run(largest + counts.STEP)).result.refused)
    assert largest == pytest.approx(SMALL.measured_tokens, rel=0.02)


def test_without_long_requests_nelssa_is_one_gpu(small: Study) -> None:
    ours, theirs = (serving.serve(small, system, 0.0) for system in ("NELSSA", "1 GPU"))
    assert ours.of(serving.SHORT).tpot_ms == theirs.of(serving.SHORT).tpot_ms
    assert ours.migrations == 0


def test_the_mix_has_the_shares_that_are_asked_for_and_the_same_times() -> None:
    none, half = (serving.arrivals(study(), share, 40) for share in (0.0, 0.5))
    assert [a.at_ns for a in none] == [a.at_ns for a in half]
    assert all(a.kind == serving.SHORT for a in none)
    assert 10 < sum(a.kind == serving.LONG for a in half) < 30


def test_a_crowded_batch_is_weighted_by_time_in_which_somebody_waits() -> None:
    samples = tuple(Sample(at, running, waiting, {}) for at, running, waiting in ((0, 9, 0), (10, 1, 2), (40, 4, 1)))
    assert serving.crowded(ServingResult("p", samples=samples, elapsed_ns=50)) == (1 * 30 + 4 * 10) / 40
    assert serving.crowded(ServingResult("p", samples=samples[:1], elapsed_ns=10)) is None


def test_copies_beside_a_step_make_it_longer_and_the_request_is_handed_over(small: Study) -> None:
    lengths = (SMALL.migrating_context, 2_000)
    moving = migration._batch(small, lengths, SMALL.migrating_context + 4, 64, layers=2)
    staying = migration._batch(small, lengths, migration.NEVER, 64, layers=2)
    assert moving.result.details["requests"]["migrated"] == 1
    assert staying.result.details["requests"]["migrated"] == 0
    assert moving.result.step_ns[0] >= staying.result.step_ns[0]
    assert max(moving.result.step_ns) > max(staying.result.step_ns)


def test_injection_adds_what_overlaps_and_busy_time_misses_what_the_batch_waits_for(small: Study) -> None:
    few, many = (migration._injected(small, 100_000, beside, []) for beside in SMALL.occupancy_beside)
    assert 0 < few["branch, off"] < many["branch, off"]
    assert few["busy time, off"] < 0


def test_near_devices_work_beside_dense_attention(small: Study) -> None:
    lengths = (128_000, *(8_000,) * 16)
    both, one_by_one = (
        runs.near(small, 128_000, 17, contexts=lengths, threshold_tokens=100_000, index_share=0.25, without=off)
        for off in ((), ("overlap",))
    )
    dense = both.work["emu:gpu", "attend"].ns
    assert max(runs.pnm_ns(both)) < one_by_one.step_ns - both.step_ns < dense


def test_a_long_prompt_that_was_prefilled_elsewhere_is_near_from_its_first_step(small: Study) -> None:
    served = serving.serve(small, "NELSSA", 0.6)
    assert served.failures == {}
    assert served.details["requests"]["near"] > 0
    assert any(use.flops for name, use in served.devices.items() if "pnm" in name)


# -- questions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["throughput", "contention", "capacities", "energy", "thresholds", "layer_sampling"])
def test_questions_have_rows_that_say_how_they_are_known(name: str, small: Study) -> None:
    for table in getattr(questions, name)(small):
        assert table.rows
        assert all(row["provenance"] != "extrapolated" or row["reason"] for row in table.rows)
        json.dumps([dict(row) for row in table.rows], allow_nan=False)


def test_a_wrong_threshold_refuses_nobody(small: Study) -> None:
    served = questions.thresholds(small)[1]
    assert served.id == "threshold-served"
    assert [row["refused or failed"] for row in served.rows] == [0] * len(served.rows)


def test_each_claim_is_classified_and_those_on_bytes_are_measured(small: Study) -> None:
    claim = Claim("a number", at_least(0.0), 1.0, over(1.0))
    check = Check("N11", "t", (claim,) * 3, "extrapolated", 0, "guessed")
    (table,) = questions.classification({"N11": lambda _: check})(small)
    assert [row["here"] for row in table.rows] == ["measured", "measured", "extrapolated"]


def test_power_of_a_machine_is_the_sum_of_what_is_known() -> None:
    assert questions._known(CONSTANTS.platform, "power_watts") == (700, ["pnm0", "pnm1", "pnm2", "pnm3"])
    assert questions._known(CONSTANTS.two_gpus, "power_watts") == (1400, [])
    assert questions._known(CONSTANTS.one_gpu, "price_usd") == (0, ["gpu"])


# -- what a device draws and costs --------------------------------------------------------------------------------


def test_a_profile_may_say_what_a_device_draws_and_no_result_rests_on_it() -> None:
    profile = read_profile(find_profile("h100-sxm"))
    assert profile.costs == {"power_watts": 700, "price_usd": None}
    assert not any("power" in guess or "price" in guess for guess in profile.guesses)
    assert read_profile(find_profile("demo-gpu")).costs == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('power_watts = { value = 0, source = "x" }', "power_watts.value"),
        ('power_watts = { value = 700, source = " " }', "source"),
        ('price_usd = { value = "cheap", source = "x" }', "price_usd.value"),
        ("price_usd = 3", "price_usd"),
    ],
)
def test_a_cost_that_makes_no_sense_is_refused(line: str, says: str, tmp_path: Path) -> None:
    text = find_profile("demo-gpu").read_text()
    changed = tmp_path / "device.toml"
    changed.write_text(text.replace("\n[memory]", f"\n{line}\n\n[memory]", 1))
    with pytest.raises(ConfigurationError, match=says):
        read_profile(changed)
