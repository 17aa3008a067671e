"""Phantom runs: that they take exactly as long as the run with bytes, and what they say about themselves."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.phantom_runs import STAGES, record, replay
from tests.tiny import tiny_workload
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.locality import LayerLocality, LocalityModel, find_locality, fit_locality
from tierloop.runtime.locality_selection import LocalitySelection
from tierloop.runtime.model_shapes import ShapeStages, block_tokens_for, cache_shape, find_model
from tierloop.runtime.phantom import run_phantom
from tierloop.runtime.selection import ReplayedSelection, SelectionRecord

PROMPT = tiny_workload(210).token_ids
SPARSE: dict[str, Any] = {
    "budget": 0.35,
    "dense_layers": 0,
    "shares": {"emu:dram": 1.0, "emu:cxl": 1.0, "emu:pnm": 1.0, "emu:numa": 1.0},
}
ENTRIES: dict[str, Any] = {
    "persistent": "none",
    "budget": 0.2,
    "local_tokens": 8,
    "update_tokens": 8,
    "centroids": 12,
    "warm_up_queries": 16,
}
CLUSTERED: dict[str, Any] = {
    "budget": 0.3,
    "recent_tokens": 16,
    "cluster_tokens": 4,
    "segment_tokens": 64,
    "shares": {"emu:dram": 1.0, "emu:cxl": 1.0, "emu:nvme": 1.0, "emu:pnm": 1.0},
}


@pytest.mark.parametrize(
    ("policy", "prompts", "dtype", "options"),
    [
        ("all-gpu", [PROMPT], "float32", {}),
        ("cpu-attention", [PROMPT], "bfloat16", {}),
        ("stream-offload", [PROMPT], "float32", {}),
        ("split-all", [PROMPT], "float32", {}),
        ("split-all", [PROMPT[:90], PROMPT], "int8", {}),
        ("topk-blocks", [PROMPT], "float32", {"budget": 0.4, "dense_layers": 1}),
        ("topk-blocks", [PROMPT, PROMPT[:100]], "float32", SPARSE),
        ("cluster-topk", [PROMPT], "float32", {"budget": 0.3, "recent_tokens": 16, "update_tokens": 16}),
        ("cluster-topk", [PROMPT, PROMPT[:150]], "bfloat16", CLUSTERED),
        ("kvdrive", [PROMPT, PROMPT[:150]], "float32", ENTRIES),
        ("hybridgen", [PROMPT], "float32", {"budget": 0.3, "k_min": 8}),
        ("hybridgen", [PROMPT, PROMPT[:150]], "bfloat16", {"budget": 0.2, "k_min": 8, "scheduler": "full"}),
    ],
)
def test_a_replayed_phantom_takes_exactly_as_long_as_the_run_with_bytes(
    policy: str, prompts: list[list[int]], dtype: str, options: dict[str, Any]
) -> None:
    recorded = record(policy, prompts, dtype=dtype, **options)
    phantom = replay(recorded, ReplayedSelection(recorded.selection))
    assert bool(recorded.selection.answers) == (policy in ("topk-blocks", "cluster-topk", "kvdrive", "hybridgen"))
    assert bool(recorded.selection.groups) == (policy in ("cluster-topk", "kvdrive"))
    assert phantom.step_ns == recorded.step_ns
    assert phantom.links == recorded.links
    assert phantom.devices == recorded.devices
    assert phantom.stages == recorded.stages
    assert phantom.refused is None


def test_rows_that_join_the_clusters_later_are_replayed_from_a_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 0.3, "recent_tokens": 16, "update_tokens": 16, "cluster_tokens": 4}
    recorded = record("cluster-topk", [PROMPT[:100], PROMPT], steps=40, **options)
    assert len({step for step, *_ in recorded.selection.groups}) > 2, "prompts, and rows that came later"
    path = tmp_path / "run.npz"
    recorded.selection.save(path)
    assert replay(recorded, ReplayedSelection(SelectionRecord.load(path))).step_ns == recorded.step_ns


@pytest.mark.parametrize("locality", ["smollm2-135m", "kvdrive-draw"])
def test_clusters_that_nobody_has_made_are_attended_in_about_the_same_time(locality: str) -> None:
    recorded = record("cluster-topk", [PROMPT], 6, **CLUSTERED)
    drawn = draw(load_selection_model(find_locality(locality)), 3)
    phantom = replay(recorded, drawn, steps=6)
    assert drawn.asked
    assert mean(phantom.step_ns) == pytest.approx(mean(recorded.step_ns), rel=0.1)
    read = {device: use.bytes_read for device, use in recorded.devices.items()}
    for device in ("emu:dram", "emu:pnm"):
        assert phantom.devices[device].bytes_read == pytest.approx(read[device], rel=0.5)


def test_clusters_of_long_contexts_read_about_what_the_budget_says() -> None:
    model = find_model("smollm2-135m")
    shape = cache_shape(model, "bfloat16", block_tokens_for(1 << 18))
    with open_platform("hybridgen-h100-cxl", clock="virtual") as platform:
        result = run_phantom(
            ShapeStages.of_shape(model),
            shape,
            platform,
            PolicyRequest("cluster-topk", {"budget": 0.018}),
            context=1 << 18,
            decisions=draw(load_selection_model(find_locality("kvdrive-draw")), model.num_layers),
        )
        assert_nothing_is_left(platform)
    assert result.refused is None
    dense = (1 << 18) * model.kv_nbytes()
    assert 0.01 < sum(result.devices[d].bytes_read for d in ("emu:dram", "emu:numa", "emu:cxl")) / dense < 0.05


def test_a_locality_model_predicts_the_step_time_of_prompts_that_it_has_not_seen() -> None:
    slow = {"links.cxl.bytes_per_s": 100_000_000}
    options: dict[str, Any] = {"budget": 0.35, "dense_layers": 0, "shares": {"emu:cxl": 1.0, "emu:dram": 1.0}}
    prompts = [tiny_workload(400, seed).token_ids for seed in (1, 2, 3, 4)]
    first, second, *unseen = (record("topk-blocks", [prompt], 6, overrides=slow, **options) for prompt in prompts)
    fitted = fit_locality([first.selection, second.selection])
    measured = mean(mean(run.step_ns) for run in unseen)

    def predicted(model: LocalityModel) -> float:
        runs = [replay(first, LocalitySelection(model, 3, seed), steps=6, overrides=slow) for seed in range(3)]
        return mean(mean(run.step_ns) for run in runs)

    assert predicted(fitted) == pytest.approx(measured, rel=0.1)
    newest = LocalityModel((LayerLocality(0.5, 16.0, (*(0.0,) * 16, *(1 / 16,) * 16)),), 16)
    assert predicted(newest) < 0.8 * measured, "here it matters which half is picked"


def test_the_same_seed_takes_the_same_time_and_another_one_another() -> None:
    recorded = record("topk-blocks", [PROMPT], **SPARSE)
    model = fit_locality([recorded.selection])
    first, again, other = (replay(recorded, LocalitySelection(model, 3, seed), steps=6) for seed in (1, 1, 2))
    assert first.step_ns == again.step_ns
    assert first.step_ns != other.step_ns


def test_steps_before_the_report_are_not_in_it() -> None:
    recorded = record("topk-blocks", [PROMPT], 6, **SPARSE)
    whole = replay(recorded, ReplayedSelection(recorded.selection))
    later = replay(recorded, ReplayedSelection(recorded.selection), steps=4, warmup_steps=2)
    assert later.step_ns == whole.step_ns[2:]
    assert later.elapsed_ns == sum(later.step_ns)
    assert later.links["pcie"].bytes_back < whole.links["pcie"].bytes_back


def assert_nothing_is_left(platform: Platform) -> None:
    """Every memory gives all of its bytes again."""
    for device, memory in platform.memories():
        device.free(device.alloc(memory.capacity // memory.alignment * memory.alignment, memory.name, phantom=True))


def test_nothing_is_left_on_the_platform_and_no_byte_is_touched() -> None:
    model = find_model("llama-3-8b")
    shape = cache_shape(model, "bfloat16", block_tokens_for(1 << 20))
    with open_platform("hybridgen-a100-cxl") as platform:
        observers = list(platform.site.observers)
        result = run_phantom(
            ShapeStages.of_shape(model), shape, platform, PolicyRequest("cpu-attention"), context=1 << 20
        )
        assert platform.site.observers == observers
        assert_nothing_is_left(platform)
    assert result.refused is None
    assert sum(result.placement.values()) >= (1 << 20) * model.kv_nbytes()
    assert result.devices["emu:dram"].bytes_read >= (1 << 20) * model.kv_nbytes()
    assert result.step_ns[0] * 163.84 >= (1 << 20) * model.kv_nbytes(), "no step is faster than its bytes"


def test_several_requests_share_the_weights_of_a_step() -> None:
    model = find_model("opt-1.3b")
    shape = cache_shape(model)
    results = []
    with open_platform("hybridgen-a100-cxl") as platform:
        for batch in (1, 8):
            stages, wanted = ShapeStages.of_shape(model), PolicyRequest("all-gpu")
            results.append(run_phantom(stages, shape, platform, wanted, context=2000, batch=batch, steps=2))
    one, eight = results
    assert one.step_ns[0] < eight.step_ns[0] < 8 * one.step_ns[0]
    assert eight.tokens_per_s == pytest.approx(8e9 / mean(eight.step_ns))


def test_a_cache_that_does_not_fit_is_refused_and_says_how_much_is_missing() -> None:
    model = find_model("opt-13b")
    shape = cache_shape(model, block_tokens=block_tokens_for(1 << 20))
    with open_platform("hybridgen-a100-cxl") as platform:
        result = run_phantom(ShapeStages.of_shape(model), shape, platform, PolicyRequest("all-gpu"), context=1 << 20)
        assert_nothing_is_left(platform)
    assert result.refused is not None
    assert "emu:gpu is too small" in result.refused
    assert (result.step_ns, result.provenance) == ((), "")


def test_weights_take_their_room_where_the_modules_run() -> None:
    """The cache alone would fit a card of 24 GB."""
    model = find_model("llama-3-8b")
    shape = cache_shape(model, "bfloat16", block_tokens_for(100_000))

    def held(weight_nbytes: int) -> str | None:
        with open_platform("kvdrive-4090", clock="virtual") as platform:
            return run_phantom(
                *(ShapeStages.of_shape(model), shape, platform, PolicyRequest("all-gpu")),
                context=100_000,
                weight_nbytes=weight_nbytes,
            ).refused

    assert held(0) is None
    assert "emu:gpu is too small" in (held(model.weight_nbytes()) or "")
    assert "bytes of weights are needed there" in (held(1 << 40) or "")


def test_a_context_beyond_the_model_and_a_borrowed_locality_are_called_extrapolated() -> None:
    model = find_model("smollm2-135m")
    stages, shape = ShapeStages.of_shape(model), cache_shape(model)
    locality = LocalityModel.load(find_locality("smollm2-135m"))
    runs = []
    with open_platform("demo") as platform:
        for context, name in ((512, "smollm2-135m"), (9000, "other")):
            decisions = LocalitySelection(locality, 30)
            wanted = PolicyRequest("topk-blocks", {"shares": {"emu:dram": 1.0}})
            runs.append(
                run_phantom(
                    stages,
                    shape,
                    platform,
                    wanted,
                    context=context,
                    decisions=decisions,
                    model=name,
                    context_limit=model.context_length,
                )
            )
    inside, beyond = runs
    assert (inside.provenance, inside.notes) == ("simulated", ())
    assert beyond.provenance == "extrapolated"
    assert any("9,002 tokens are more than the 8,192" in note for note in beyond.notes)
    assert any("the selection has the locality of smollm2-135m" in note for note in beyond.notes)
    assert any("at most 2,049 tokens" in note for note in beyond.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "the context is 0; it must be from 1 to 16,777,216"),
        ({"context": 1 << 25}, "the context is 33554432; it must be from 1"),
        ({"context": 100, "batch": 0}, "the batch is 0; it must be from 1"),
        ({"steps": 0}, "steps are 0 and warm-up steps 0"),
        ({"warmup_steps": -1}, "warm-up steps -1; they must be at least 1 and 0"),
        ({"policy": "topk-block"}, "unknown policy 'topk-block'; did you mean 'topk-blocks'"),
        ({"policy_options": {"bugdet": 1}}, "no option 'bugdet'"),
        ({"policy_options": {"budget": 0}}, "budget is 0"),
    ],
)
def test_wrong_input_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    recorded = record("topk-blocks", [PROMPT[:40]], 1)
    with pytest.raises(ConfigurationError, match=message):
        replay(recorded, None, **changes)


def test_a_wall_clock_is_refused() -> None:
    shape = cache_shape(find_model("smollm2-135m"))
    with (
        open_platform("demo-wall") as platform,
        pytest.raises(ConfigurationError, match="a phantom run takes virtual time"),
    ):
        run_phantom(STAGES, shape, platform, PolicyRequest("all-gpu"), context=10)
