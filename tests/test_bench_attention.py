"""The attention bench: what it prints, what it refuses, and that a wrong result of any kernel is seen."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from numpy.typing import NDArray

from tierloop.devices import kernels
from tierloop.devices.commands import Launch
from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.contract import KERNELS
from tierloop.devices.regions import Region
from tierloop.tools.bench_attention import bench_attention
from tierloop.tools.bench_cases import DTYPES, WRONG, Case, attention_cases, error_over
from tierloop.tools.bench_cluster import cluster_case
from tierloop.tools.bench_data import Sizes, Stored, bytes_of, place
from tierloop.tools.bench_more_cases import more_cases
from tierloop.tools.bench_targets import Target, targets
from tierloop.tools.cli import main
from tierloop.tools.roofline import (
    NO_CACHE_NBYTES,
    Limits,
    Machine,
    Work,
    cores,
    huge_bytes,
    last_level_cache_nbytes,
)

TINY = Sizes(
    working=1 << 20, read=4 << 20, check_rows=128, tries=1, case_s=0.0, rival_s=0.001, rival_dims=(64, 128),
    topk=(8, 256), segment_tokens=512, cluster_heads=1, prefill_tokens=4, hidden=(64, 32, 96),
)  # fmt: skip
CONTRACT = {"kernel", "dtype", "group", "head_dim", "tokens", "gb_s", "roofline_fraction", "read_fraction",
            "ratio_torch_sdpa_gqa", "ratio_torch_sdpa_reshaped", "max_error_over_bound"}  # fmt: skip
BytesOf = Callable[[Region], NDArray[np.uint8]]


def run_once(launch: Launch) -> int:
    return kernels.run(launch, bytes_of)


def spoilt(launch: Launch, bytes_of: BytesOf, threads: int = 1, operand: int = 0) -> int:
    """Carry a launch out, and flip a high bit of one element in the middle of a write operand."""
    flops = kernels.run(launch, bytes_of, threads)
    written = bytes_of(launch.writes[operand][0].region)
    written[written.nbytes // 2 | 3] ^= 0x40
    return flops


def every_case() -> Iterator[Case]:
    for dtype in DTYPES:
        store = Stored(dtype, TINY.working)
        yield from attention_cases(store, TINY)
        if dtype == "float32":
            yield from more_cases(store, TINY)
            yield cluster_case(store, TINY)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `bench attention --quick --json` prints, at a tiny size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "quick", classmethod(lambda cls, nbytes: TINY))
        with redirect_stdout(io.StringIO()) as printed:
            assert main(["bench", "attention", "--quick", "--json", "--threads", "1"]) == 0
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


def test_the_json_has_the_limits_and_a_row_for_every_case(found: dict[str, Any]) -> None:
    assert found["threads"] == 1
    assert found["wrong"] == []
    for limit in ("read_gb_s", "read_gb_s_start", "read_gb_s_end", "peak_gflop_s", "exponentials_g_s"):
        assert 0 < found[limit] < math.inf
    assert all(set(row) >= CONTRACT for row in found["cases"])
    described = [(row["kernel"], row["dtype"], row["group"], row["head_dim"]) for row in found["cases"]]
    assert len(set(described)) == len(described)
    dense = {(dtype, group, dim) for name, dtype, group, dim in described if name == "attend"}
    assert dense == {(dtype, group, dim) for dtype in DTYPES for group in (1, 4, 8) for dim in (64, 128)}
    assert {name.split()[0] for name, *_ in described} == KERNELS - {"dense", "chase"}


def test_fractions_and_ratios_are_finite_and_positive(found: dict[str, Any]) -> None:
    for row in found["cases"]:
        for column, value in row.items():
            if column.endswith(("_fraction", "_s", "_us", "_share")) or column.startswith(("ratio_", "ns_")):
                assert value is None or 0 < value < math.inf, (row["kernel"], column)
        assert 0 <= row["max_error_over_bound"] <= 1
    attended = [row for row in found["cases"] if row["kernel"] == "attend"]
    assert all(row["roofline_fraction"] and row["read_fraction"] and row["gb_s"] for row in attended)
    compared = [row for row in attended if row["dtype"] in ("float32", "float16", "bfloat16")]
    assert all(row["ratio_torch_sdpa_gqa"] and row["ratio_torch_sdpa_reshaped"] for row in compared)


def test_a_missed_target_is_named_in_its_row(found: dict[str, Any]) -> None:
    for row in found["cases"]:
        assert row["met"] is (None if row["target"] is None else not row["missed"])
        assert all(missed in row["target"] for missed in row["missed"])


@pytest.mark.parametrize("threads", [0, -1, cores() + 1])
def test_threads_that_there_are_not_are_refused_with_what_is_allowed(
    threads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attention", "--threads", str(threads)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--threads {threads}: allowed: 1 to {cores()}" in err


def test_options_of_bench_are_refused_before_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "attention"]) == 2
    assert "--json" in capsys.readouterr().err


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("--quick", "--threads", "--json", "Exit codes"))


def test_a_wrong_result_ends_with_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    def one_is_wrong(launch: Launch, bytes_of: BytesOf, threads: int) -> int:
        run = spoilt if launch.args.kernel == "logits" else kernels.run
        return run(launch, bytes_of, threads)

    with pytest.raises(typer.Exit) as end:
        bench_attention(TINY, 1, False, one_is_wrong)
    assert end.value.exit_code == 1
    out, err = capsys.readouterr()
    wrong = [line for line in err.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == len(DTYPES)
    assert all("logits" in line for line in wrong)
    assert "attention kernels" in out


def test_every_case_is_right_and_sees_one_wrong_element() -> None:
    for case in every_case():
        name = f"{case.kernel} {case.dtype} group {case.group} head_dim {case.head_dim}"
        assert case.check(run_once) <= 1, name
        for operand in range(len(case.launches[0].writes)):
            assert case.check(partial(spoilt, bytes_of=bytes_of, operand=operand)) > 1, name


def test_a_result_that_is_no_number_is_wrong() -> None:
    one = np.ones(1)
    assert error_over(np.array([np.nan]), one, one) == WRONG
    assert error_over(np.array([np.inf]), one, one) == WRONG


def test_stored_numbers_are_spread_and_fill_the_pool() -> None:
    for dtype in DTYPES:
        store = Stored(dtype, 1 << 16)
        for stored in (store.keys, store.values(64)):
            assert len(np.unique(stored)) > 100
            assert len(np.unique(stored[-256:])) > 16


def test_blocks_in_random_order_hold_every_row_once() -> None:
    where = place(2, 64, 16)
    assert sorted(where.storage_rows()) == list(range(128))
    assert list(where.storage_rows()) != list(range(128))
    assert [tuple(run) for run in where.runs] == [(0, h, p) for h in range(2) for p in (0, 16, 32, 48)]


def test_the_roofline_is_the_longer_of_moving_and_computing() -> None:
    limits = Limits(1, (10.0, 20.0, 90.0), 100.0, {"int8": 50.0}, 5.0)
    assert limits.read == 20
    assert limits.shortest_s(Work(40, 100)) == (2.0, "memory")
    assert limits.shortest_s(Work(40, 100, 50, 5, "int8")) == (3.0, "compute")
    assert limits.shortest_s(Work(40, 100, 50, 5)) == (2.0, "memory")


def test_targets_compare_in_their_direction() -> None:
    assert Target("x", 2).met({"x": 2.0})
    assert not Target("x", 2).met({"x": 1.9})
    assert Target("x", 2, at_most=True).met({"x": 1.9})
    assert not Target("x", 2).met({"x": None})
    assert [str(target) for target in targets("topk", "float32", None)] == ["time_us ≤ 80"]
    assert targets("merge", "float32", 4) == []


def test_the_plain_gather_loop_copies_the_rows_in_their_order() -> None:
    from tierloop.tools import limit_kernels  # compiles when it is imported

    source = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    target, offsets = huge_bytes(96), np.array([64, 0, 992], dtype=np.int64)
    Machine(1, 1).share(limit_kernels.gather_shared, address_of(target), address_of(source), offsets, 32, 2)
    assert (target.reshape(3, 32) == np.stack([source[o : o + 32] for o in offsets])).all()


def test_the_last_level_cache_is_counted_once_for_the_cores_that_share_it(tmp_path: Path) -> None:
    assert last_level_cache_nbytes(tmp_path) == NO_CACHE_NBYTES
    for cpu in os.sched_getaffinity(0):
        for level, size in (("1", "32K"), ("3", "8192K"), ("2", "nonsense")):
            index = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            index.mkdir(parents=True)
            (index / "level").write_text(f"{level}\n")
            (index / "size").write_text(f"{size}\n")
            (index / "shared_cpu_list").write_text("0-99\n")
    assert last_level_cache_nbytes(tmp_path) == 8 << 20
