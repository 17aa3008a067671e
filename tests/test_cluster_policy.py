"""cluster-topk: rows chosen by their centroids, attended wherever they lie; and the index of clusters behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Attend, Cluster
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.centroids import Members
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import ChosenRows
from tierloop.runtime.policies.clusters import ClusterTopk
from tierloop.runtime.policy import Batch, Policy

from .decoding import SMALL, Decoded, decode, dense_of
from .tiny import tiny_model, tiny_workload

MODEL = tiny_model()
PROMPT = tiny_workload(330).token_ids
MEMORIES = ("emu:gpu", "emu:dram", "emu:numa", "emu:cxl", "emu:nvme", "emu:pnm")
ROW = 2 * MODEL.shape.head_dim * 4
"""Bytes of a row of K and of V."""


class Watch:
    """Counts launches by kernel and device, and the KV rows that are attended; keeps the cluster launches."""

    def __init__(self) -> None:
        self.launches: Counter[tuple[str, str]] = Counter()
        self.rows: Counter[str] = Counter()
        self.clusterings: list[tuple[Cluster, int]] = []

    def __call__(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch):
            self.launches[completion.device, command.args.kernel] += 1
            if isinstance(command.args, Attend):
                self.rows[completion.device] += sum(s.nbytes for _, s in command.reads[1]) * 2 // ROW
            if isinstance(command.args, Cluster):
                rows = sum(s.nbytes for _, s in command.reads[0]) * 2 // ROW
                self.clusterings.append((command.args, rows))


def watched(policy: str | Callable[[Engine], Policy] = "cluster-topk", **more: Any) -> tuple[Decoded, Watch]:
    """Decode the prompt on a platform whose launches are counted."""
    platform: Platform = open_platform(SMALL, overrides=more.pop("overrides", {}), check_hazards=True)
    watch = Watch()
    platform.site.observers.append(watch)
    return decode(MODEL, more.pop("prompts", [PROMPT]), policy, platform=platform, **more), watch


class Selected(ClusterTopk):
    """Keeps what was chosen."""

    def __init__(self, engine: Engine, kept: list[list[ChosenRows]], **options: Any) -> None:
        super().__init__(engine, **options)
        self.kept = kept

    async def _select(self, layer: int, batch: Batch) -> list[ChosenRows]:
        chosen = await super()._select(layer, batch)
        for rows, request in zip(chosen, batch.requests, strict=True):
            length = int(request.blocks.length[layer])
            for head in range(self.shape.num_kv_heads):
                mine = rows.positions[rows.heads == head]
                assert (np.diff(mine) > 0).all(), "sorted, and each row once"
                assert set(range(4)) | set(range(length - self._how.recent_tokens, length)) <= set(mine.tolist())
        self.kept.append(chosen)
        return chosen


@pytest.fixture(scope="module")
def reference() -> Decoded:
    return decode(MODEL, [PROMPT], "all-gpu")


# -- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_full_budget_is_dense_attention_to_the_bit(dtype: str) -> None:
    expected = decode(MODEL, [PROMPT], "all-gpu", dtype=dtype)
    decoded, watch = watched(budget=1.0, dtype=dtype)
    assert decoded.tokens == expected.tokens
    assert decoded.outputs.tobytes() == expected.outputs.tobytes()
    assert not watch.clusterings


def test_a_budget_that_all_rows_fit_into_is_dense_attention_to_the_bit(reference: Decoded) -> None:
    decoded, watch = watched(budget=0.999999, recent_tokens=16)
    assert decoded.outputs.tobytes() == reference.outputs.tobytes()
    assert watch.launches["emu:gpu", "score"] == watch.launches["emu:gpu", "topk"] == 5 * 3


def test_a_small_budget_attends_its_rows_where_they_lie() -> None:
    kept: list[list[ChosenRows]] = []
    full, all_rows = watched(budget=1.0)
    part, watch = watched(lambda engine: Selected(engine, kept, budget=0.3, recent_tokens=32))
    assert part.verdict.worst_ratio <= 1
    assert part.verdict.checked == full.verdict.checked
    assert part.verdict.error_vs_dense > part.verdict.error_bound, "rows that are left out must leave a trace"
    assert [rows for _, rows in watch.clusterings] == [2 * (288 - 4)] * 3
    for kernel in ("score", "topk"):
        assert watch.launches["emu:gpu", kernel] == 5 * 3
    # What was chosen is what was attended, to the row, and it is the budget but for a part of a cluster.
    assert sum(watch.rows.values()) == sum(len(c.positions) for step in kept for c in step)
    shares = [len(c.positions) / (2 * (331 + i // 3)) for i, step in enumerate(kept) for c in step]
    assert all(0.3 <= share < 0.5 for share in shares), shares
    assert watch.rows["emu:gpu"] > 0, "the recent rows"
    for device in ("emu:dram", "emu:pnm"):
        assert 0 < watch.rows[device] < 0.7 * all_rows.rows[device]
    for memory in ("emu:dram", "emu:numa", "emu:cxl", "emu:pnm"):
        assert 0 < part.devices[memory].bytes_read < 0.8 * full.devices[memory].bytes_read


def test_the_oracle_checks_the_rows_that_were_named() -> None:
    class NamesOthers(ClusterTopk):
        async def attend(self, layer: int, batch: Batch) -> list[Completion]:
            done = await super().attend(layer, batch)
            (rows,) = batch.attended_rows
            assert rows is not None
            batch.attended_rows = [[head[1:] for head in rows]]
            return done

    assert decode(MODEL, [PROMPT], lambda engine: NamesOthers(engine, budget=0.3)).verdict.worst_ratio > 1


def test_the_chosen_clusters_are_those_with_the_best_centroids() -> None:
    checked = 0

    class Checks(ClusterTopk):
        async def _select(self, layer: int, batch: Batch) -> list[ChosenRows]:
            nonlocal checked
            (request,) = batch.requests
            index = request.state["clusters"]
            (chosen,) = await super()._select(layer, batch)
            where = index.centroids(layer)
            raw = np.empty(where.spans.nbytes, dtype=np.uint8)
            await self.engine.read(where, raw)
            centroids = raw.view(np.float32).reshape(2, index.known(layer), -1).astype(np.float64)
            raw = np.empty(batch.queries.spans.nbytes, dtype=np.uint8)
            await self.engine.read(batch.queries, raw, [batch.ready])
            queries = raw.view(np.float32).reshape(2, 3, -1).astype(np.float64)
            scores = np.einsum("hgd,hcd->hgc", queries, centroids).max(axis=1)
            for head, members in enumerate(index.members(layer)):
                mine = set(chosen.positions[chosen.heads == head].tolist())
                ends = np.append(members.starts, len(members.positions))
                parts = [set(members.positions[a:b].tolist()) for a, b in pairwise(ends)]
                sizes = np.array([len(part) for part in parts])
                assert sum(sizes) == index.end(layer) - 4
                inside = np.array([bool(part) and part <= mine for part in parts])
                outside = np.array([bool(part) and not part & mine for part in parts])
                assert (inside | outside | (sizes == 0)).all(), "clusters are attended whole or not at all"
                assert scores[head][inside].min() >= scores[head][outside].max() - 1e-4
                checked += 1
            return [chosen]

    decode(MODEL, [PROMPT], lambda engine: Checks(engine, budget=0.4, recent_tokens=16))
    assert checked == 5 * 3 * 2


def test_selected_rows_give_the_same_bits_wherever_they_lie() -> None:
    spread, watch = watched(budget=0.3, shares=dict.fromkeys(MEMORIES, 1.0))
    together, _ = watched(budget=0.3, shares={"emu:gpu": 1.0})
    assert spread.outputs.tobytes() == together.outputs.tobytes()
    assert spread.tokens == together.tokens
    assert {device for device, rows in watch.rows.items() if rows} >= {"emu:gpu", "emu:dram", "emu:pnm"}
    assert spread.devices["emu:nvme"].bytes_read > 0


def test_rows_on_a_drive_are_staged_by_block() -> None:
    shares = {"emu:nvme": 1.0, "emu:dram": 1.0}
    half, _ = watched(budget=0.1, recent_tokens=16, shares=shares, cluster_tokens=4)
    full, _ = watched(budget=1.0, shares=shares)
    assert half.devices["emu:nvme"].bytes_read % 4096 == 0
    assert 0 < half.devices["emu:nvme"].bytes_read <= full.devices["emu:nvme"].bytes_read
    assert half.verdict.worst_ratio <= 1


def test_requests_of_different_lengths_keep_their_own_clusters() -> None:
    prompts = [PROMPT[:40], PROMPT[:300], PROMPT[50:190]]
    options: dict[str, Any] = {"budget": 0.4, "recent_tokens": 32, "cluster_tokens": 8}
    together, watch = watched(prompts=prompts, **options)
    assert [rows for _, rows in watch.clusterings] == [2 * (256 - 4)] * 3 + [2 * (96 - 4)] * 3
    alone = [watched(prompts=[prompt], **options)[0] for prompt in prompts]
    assert together.verdict.worst_ratio <= 1
    assert together.tokens == [one.tokens[0] for one in alone]
    assert together.tokens[0] == list(dense_of(MODEL, tuple(prompts[0]), 6).tokens), "too short to leave rows out"


def test_rows_that_come_later_are_clustered_on_their_own() -> None:
    kept: list[list[ChosenRows]] = []
    options: dict[str, Any] = {"budget": 0.3, "recent_tokens": 16, "update_tokens": 32, "dense_layers": 1}
    decoded, watch = watched(lambda engine: Selected(engine, kept, **options), num_tokens=90)
    # Prompt: up to the last block border 16 rows from its end; then 32 rows of each of 2 heads at a time, 2 layers.
    first, later = 2 * (304 - 4), 2 * 32
    assert [rows for _, rows in watch.clusterings] == [first] * 2 + [later] * 2 * 3
    assert [args.runs[0, 2] for args, _ in watch.clusterings[2:]] == [304, 304, 336, 336, 368, 368]
    assert decoded.verdict.worst_ratio <= 1
    # Rows of later clusters are left out like others: fewer are attended than the tail alone would be without them.
    last = kept[-1][0]
    generated = [(last.positions[last.heads == head] >= 320).sum() for head in range(2)]
    assert all(n < 420 - 320 for n in generated), generated


def test_the_time_of_a_run_is_the_same_every_time() -> None:
    (first, watch), (second, again) = (watched(budget=0.3, num_tokens=40, update_tokens=16) for _ in range(2))
    assert first.elapsed_ns == second.elapsed_ns > 0
    assert (first.devices, first.links) == (second.devices, second.links)
    assert first.outputs.tobytes() == second.outputs.tobytes()
    assert watch.launches == again.launches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "cluster-topk: budget is 0; it must be above 0"),
        ({"budget": 1.5}, "budget is 1.5; it must be above 0 and at most 1"),
        ({"budget": "x"}, "budget is 'x'; it must be a number"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be at least 0"),
        ({"recent_tokens": 0}, "recent_tokens is 0; it must be at least 1"),
        ({"cluster_tokens": 1.5}, "cluster_tokens is 1.5; it must be a whole number"),
        ({"segment_tokens": 8}, "segment_tokens is 8; it must be at least cluster_tokens, which is 16"),
        ({"iterations": True}, "iterations is True; it must be a number"),
        ({"update_tokens": 0}, "update_tokens is 0; it must be at least 1"),
        ({"dense_layers": -1}, "dense_layers is -1; it must be at least 0"),
        ({"bugdet": 0.5}, "no option 'bugdet': did you mean 'budget'"),
        ({"shares": {"emu:cxi": 1.0}}, "no memory 'emu:cxi': did you mean 'emu:cxl'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decode(MODEL, [PROMPT[:40]], "cluster-topk", **options)


def test_a_device_without_room_for_the_index_refuses_the_request() -> None:
    with pytest.raises(TierTooSmall, match="emu:gpu is too small"):
        watched(cluster_tokens=1, overrides={"devices.gpu.capacity": 120_000}, shares={"emu:dram": 1.0})
    watched(cluster_tokens=16, overrides={"devices.gpu.capacity": 120_000}, shares={"emu:dram": 1.0})


def test_a_device_that_cannot_cluster_is_refused_unless_everything_is_attended() -> None:
    def without(budget: float) -> Callable[[Engine], Policy]:
        def build(engine: Engine) -> Policy:
            executor = engine.dense.executor
            fewer = replace(executor, kernels=executor.kernels - {"cluster"})
            engine.dense = replace(engine.dense, executor=fewer)
            return ClusterTopk(engine, budget=budget)

        return build

    with pytest.raises(
        ConfigurationError, match=r"emu:gpu runs the modules.*does not offer cluster for keys of float32"
    ):
        decode(MODEL, [PROMPT[:40]], without(0.5))
    assert decode(MODEL, [PROMPT[:40]], without(1.0)).verdict.checked > 0


# -- members --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 3), max_size=20), st.integers(0, 80), st.randoms()
)
def test_clusters_are_taken_in_order_until_there_are_enough_rows(
    first: list[int], later: list[int], wanted: int, random: Any
) -> None:
    members = Members()
    members.add(np.array(first, dtype=np.int64), 10, 6)
    members.add(np.array(later, dtype=np.int64), 10 + len(first), 4)
    owner = [*first, *(label + 6 for label in later)]
    assert members.sizes.tolist() == [owner.count(i) for i in range(10)]
    order = list(range(10))
    random.shuffle(order)
    enough = members.surely(min(wanted, len(owner)))
    taken: list[int] = []
    rows: list[int] = []
    for i in order:
        if len(rows) >= min(wanted, len(owner)):
            break
        taken.append(i)
        rows += [10 + at for at, label in enumerate(owner) if label == i]
    assert len(taken) <= enough, "as many of the smallest clusters hold that many rows"
    picked = members.pick(np.array(order[:enough], dtype=np.int64), min(wanted, len(owner)))
    assert picked.tolist() == sorted(rows)
