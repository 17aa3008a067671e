"""KVDrive in time: what overlaps, which way from the SSD moves what, and that nothing is faster than physics."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.locality import find_locality
from tierloop.runtime.model_shapes import ShapeStages, cache_shape, find_model
from tierloop.runtime.phantom import run_phantom
from tierloop.runtime.results import PolicyResult

from .phantom_runs import record, replay
from .tiny import tiny_workload

MODEL = find_model("llama-3.2-1b")
SHAPE = cache_shape(MODEL, "float16", 512)
CONTEXT, BATCH, STEPS = 16_384, 8, 2
LONG = 65_536
"""Here launches and latencies are small against what is moved."""
PCIE, NVME = 26_000_000_000, 7_880_000_000
"""Bytes per second of the links of kvdrive-l20."""


@cache
def phantom(**options: Any) -> PolicyResult:
    batch, context = options.pop("batch", BATCH), options.pop("context", CONTEXT)
    with open_platform("kvdrive-l20", clock="virtual") as platform:
        result = run_phantom(
            ShapeStages.of_shape(MODEL),
            SHAPE,
            platform,
            PolicyRequest("kvdrive", {"budget": 0.05, "update_tokens": 1024, **options}),
            context=context,
            batch=batch,
            steps=STEPS,
            warmup_steps=1,
            decisions=draw(load_selection_model(find_locality("kvdrive-draw")), MODEL.num_layers, 0),
        )
    assert result.refused is None
    return result


def mean_ns(result: PolicyResult) -> float:
    return sum(result.step_ns) / len(result.step_ns)


def sent(result: PolicyResult, link: str = "pcie") -> int:
    use = result.links[link]
    return use.bytes_forward + use.bytes_back


FETCHING = {"persistent": "none", "window": 0.0}
"""Everything that is chosen is fetched: the link is the longest stage."""


def test_stages_of_micro_batches_overlap() -> None:
    one_by_one, apart = phantom(**FETCHING, pipeline="sequential"), phantom(**FETCHING, pipeline="disaggregated")
    assert sent(one_by_one) == sent(apart), "the same bytes"
    assert mean_ns(apart) < 0.97 * mean_ns(one_by_one)
    busy = sum(apart.stages[stage] for stage in ("select", "evaluate", "transfer", "attend"))
    alone = sum(one_by_one.stages[stage] for stage in ("select", "evaluate", "transfer", "attend"))
    outside = STEPS * mean_ns(apart) - sum(apart.stages[stage] for stage in ("qkv", "mlp", "head", "append"))
    assert busy >= alone, "smaller launches are no cheaper"
    assert outside < 0.95 * busy, "less time than the stages take one after the other"


def test_smaller_micro_batches_come_nearer_to_the_longest_stage() -> None:
    """What is left beside qkv, MLP and head, against the time in which the link is busy."""
    ratios = []
    for size in (8, 4, 2, 1):
        run = phantom(**FETCHING, micro_batch=size, context=LONG)
        between = run.elapsed_ns - sum(run.stages[stage] for stage in ("qkv", "mlp", "head", "append"))
        ratios.append(between / run.links["pcie"].busy_ns)
    assert ratios == sorted(ratios, reverse=True)
    assert 1 <= ratios[-1] <= 1.1


def test_waves_hide_fetching_behind_the_mlp() -> None:
    """Two waves: what the GPU computes or what the link carries, whichever takes longer, within a tenth."""
    run = phantom(**FETCHING, waves=2, micro_batch=4, context=LONG)
    computing = sum(
        ns for stage, ns in run.stages.items() if stage in ("qkv", "append", "select", "attend", "mlp", "head")
    )
    longest = max(computing, run.links["pcie"].busy_ns)
    assert longest <= run.elapsed_ns <= 1.1 * longest
    assert mean_ns(run) < mean_ns(phantom(**FETCHING, micro_batch=4, context=LONG))


def test_a_window_takes_load_off_the_link() -> None:
    carried = [sent(phantom(persistent="none", window=window)) for window in (0.0, 1.0, 2.0, 4.0)]
    assert carried == sorted(carried, reverse=True)
    assert carried[2] < 0.5 * carried[0]


@pytest.fixture(scope="module")
def ways() -> dict[str, PolicyResult]:
    names = ("naive", "block-sparse", "hierarchical", "balanced")
    return {n: phantom(batch=1, dram_share=0.0, window=1.0, synchronisation=n) for n in names}


def test_each_way_from_the_ssd_moves_what_it_says(ways: dict[str, PolicyResult]) -> None:
    from_ssd = {name: run.devices["emu:nvme"].bytes_read for name, run in ways.items()}
    over_link = {name: sent(run) for name, run in ways.items()}
    assert from_ssd["naive"] > 5 * from_ssd["block-sparse"], "the whole layer"
    assert from_ssd["block-sparse"] == from_ssd["hierarchical"] <= from_ssd["balanced"]
    assert over_link["naive"] > 5 * over_link["block-sparse"]
    assert over_link["hierarchical"] < over_link["block-sparse"], "entries, and no blocks around them"
    assert over_link["balanced"] == over_link["hierarchical"]
    assert "unpack" in ways["block-sparse"].stages
    assert "unpack" not in ways["hierarchical"].stages
    assert ways["balanced"].stages["gather"] < ways["hierarchical"].stages["gather"], "pinned buffers spare the cores"


def test_each_way_is_faster_than_the_one_before(ways: dict[str, PolicyResult]) -> None:
    naive, sparse, hierarchical, balanced = (mean_ns(run) for run in ways.values())
    assert naive > 2 * sparse
    assert sparse > hierarchical > balanced


def test_entries_of_a_cluster_side_by_side_are_read_in_fewer_bytes() -> None:
    packed, scattered = (
        phantom(batch=1, dram_share=0.0, window=1.0, without=without) for without in ((), ("packing",))
    )
    of = [run.details["request0"] for run in (packed, scattered)]
    assert of[0]["useful_nbytes"] == of[1]["useful_nbytes"]
    assert of[0]["useful_nbytes"] <= of[0]["media_nbytes"] < 0.8 * of[1]["media_nbytes"]


def test_nothing_is_faster_than_its_links(ways: dict[str, PolicyResult]) -> None:
    for run in (*ways.values(), phantom(**FETCHING), phantom(**FETCHING, waves=2, micro_batch=4)):
        for name, rate in (("pcie", PCIE), ("nvme", NVME)):
            use = run.links[name]
            assert max(use.bytes_forward, use.bytes_back) <= rate * run.elapsed_ns / 1e9 * 1.0001
            assert use.busy_ns <= run.elapsed_ns


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": "sequential"},
        {"pipeline": "prefetch", "predict_from": 0, "dram_share": 0.2},
        {"waves": 2, "dram_share": 0.0},
        {"synchronisation": "naive", "dram_share": 0.0},
        {"synchronisation": "hierarchical", "dram_share": 0.1},
        {"synchronisation": "balanced", "dram_share": 0.1, "pinned_share": 0.5},
    ],
)
def test_a_replay_without_bytes_takes_as_long_to_the_ns(options: dict[str, Any]) -> None:
    from tierloop.runtime.selection import ReplayedSelection

    zones: dict[str, Any] = {"budget": 0.2, "local_tokens": 8, "update_tokens": 8, "centroids": 10}
    prompts = [tiny_workload(150).token_ids, tiny_workload(120, seed=3).token_ids]
    recorded = record("kvdrive", prompts, steps=12, **zones, **options)
    again = replay(recorded, ReplayedSelection(recorded.selection))
    assert again.step_ns == recorded.step_ns
    assert again.stages == recorded.stages
    assert again.links == recorded.links
