"""Policies on emulated devices: the same bits wherever the rows lie, and proof that the path was taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.blocks import BlockTable, TierTooSmall
from tierloop.runtime.compare import compare, kv_shape
from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import InPlace
from tierloop.runtime.policies.stream_offload import StreamOffload
from tierloop.runtime.policy import Request

from .decoding import SMALL, Decoded, decode, dense_of
from .tiny import tiny_model, tiny_workload

MODEL = tiny_model()
PROMPT = tiny_workload(210).token_ids
EXACT = ("all-gpu", "cpu-attention", "split-all", "stream-offload")
MEMORIES = ("emu:gpu", "emu:dram", "emu:numa", "emu:cxl", "emu:nvme", "emu:pnm")


@pytest.fixture(scope="module")
def reference() -> Decoded:
    return decode(MODEL, [PROMPT], "all-gpu")


@pytest.mark.parametrize("policy", EXACT)
def test_an_exact_policy_gives_the_tokens_of_plain_generate(policy: str) -> None:
    decoded = decode(MODEL, [PROMPT], policy)
    assert decoded.tokens == [list(dense_of(MODEL, tuple(PROMPT), 6).tokens)]
    assert decoded.verdict.checked > 0
    assert decoded.verdict.worst_ratio <= 1


@pytest.mark.parametrize("policy", EXACT[1:])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_policies_agree_bit_for_bit(policy: str, dtype: str) -> None:
    expected = decode(MODEL, [PROMPT], "all-gpu", dtype=dtype)
    decoded = decode(MODEL, [PROMPT], policy, dtype=dtype)
    assert decoded.tokens == expected.tokens
    assert decoded.outputs.tobytes() == expected.outputs.tobytes()
    assert decoded.verdict.worst_ratio <= 1


def test_every_memory_that_holds_rows_is_read_and_every_device_works(reference: Decoded) -> None:
    decoded = decode(MODEL, [PROMPT], "split-all", shares=dict.fromkeys(MEMORIES, 1.0))
    assert set(decoded.placement) == set(MEMORIES)
    for memory in MEMORIES:
        assert decoded.devices[memory].bytes_read >= decoded.placement[memory], f"{memory} was not read in every step"
    for device in ("emu:gpu", "emu:dram", "emu:nvme", "emu:pnm"):
        assert decoded.devices[device].commands > 0
    assert decoded.outputs.tobytes() == reference.outputs.tobytes()


def test_streaming_moves_the_whole_cache_to_the_gpu_in_every_step() -> None:
    decoded = decode(MODEL, [PROMPT], "stream-offload")
    moved = decoded.links["pcie"].bytes_forward
    rows = len(PROMPT) * 2 * MODEL.shape.num_kv_heads * MODEL.shape.head_dim * 4 * MODEL.shape.num_layers
    assert moved >= 5 * rows
    assert decoded.devices["emu:nvme"].bytes_read > 0


def test_cpu_attention_keeps_keys_and_values_off_the_link() -> None:
    decoded = decode(MODEL, [PROMPT], "cpu-attention")
    rows = len(PROMPT) * 2 * MODEL.shape.num_kv_heads * MODEL.shape.head_dim * 4 * MODEL.shape.num_layers
    assert decoded.links["pcie"].bytes_forward < rows / 4
    assert decoded.devices["emu:dram"].bytes_read >= 5 * rows


def test_the_gpu_that_is_too_small_refuses_and_says_by_how_much() -> None:
    with pytest.raises(TierTooSmall, match=r"emu:gpu is too small: \d+ blocks"):
        decode(MODEL, [PROMPT], "all-gpu", overrides={"devices.gpu.capacity": 150_000})


@pytest.mark.parametrize("split", [8, 16])
def test_blocks_larger_than_splits_change_nothing(split: int) -> None:
    plain = decode(MODEL, [PROMPT], "all-gpu", block_tokens=split, split_tokens=split)
    larger = decode(MODEL, [PROMPT], "split-all", block_tokens=2 * split, split_tokens=split)
    assert larger.outputs.tobytes() == plain.outputs.tobytes()


class Scattered(InPlace):
    """Every block on a memory of its own choosing: any split-aligned partition over devices."""

    name = "scattered"

    def __init__(self, engine: Engine, homes: list[str], tail: str) -> None:
        super().__init__(engine, {tail: 1.0}, tail)
        self._homes = homes

    def homes(self, request: Request) -> list[str]:
        default = super().homes(request)
        return self._homes[: request.prompt_tokens // self.shape.block_tokens] + default[len(self._homes) :]


@settings(max_examples=12)
@given(
    homes=st.lists(st.sampled_from(MEMORIES), min_size=13, max_size=13),
    tail=st.sampled_from(["emu:gpu", "emu:dram", "emu:cxl"]),
    latency=st.sampled_from([0, 600, 90_000]),
    rate=st.sampled_from([10**8, 10**10]),
)
def test_any_partition_over_devices_in_any_order_of_completion_gives_the_same_bits(
    reference: Decoded, homes: list[str], tail: str, latency: int, rate: int
) -> None:
    overrides = {"links.pcie.latency_ns": latency, "links.pnm.bytes_per_s": rate, "links.cxl.latency_ns": latency // 3}
    decoded = decode(MODEL, [PROMPT], lambda engine: Scattered(engine, homes, tail), overrides=overrides)
    assert decoded.outputs.tobytes() == reference.outputs.tobytes()
    for memory in set(homes):
        assert decoded.devices[memory].bytes_read > 0


def test_top_k_with_the_full_budget_is_dense(reference: Decoded) -> None:
    decoded = decode(MODEL, [PROMPT], "topk-blocks", budget=1.0)
    assert decoded.tokens == reference.tokens
    assert decoded.outputs.tobytes() == reference.outputs.tobytes()


def test_top_k_attends_its_budget_and_stays_within_the_bound_on_what_it_attends() -> None:
    full = decode(MODEL, [PROMPT], "topk-blocks", budget=1.0, dense_layers=0)
    half = decode(MODEL, [PROMPT], "topk-blocks", budget=0.5, dense_layers=0)
    assert half.verdict.worst_ratio <= 1
    assert half.verdict.error_vs_dense > half.verdict.error_bound, "half of the blocks must leave a trace"

    def read(decoded: Decoded) -> int:
        return sum(decoded.devices[m].bytes_read for m in ("emu:dram", "emu:numa", "emu:cxl", "emu:pnm"))

    assert read(half) < 0.7 * read(full)


def test_blocks_that_fill_up_during_decode_are_summarised_and_found_again() -> None:
    long = decode(MODEL, [PROMPT], "topk-blocks", num_tokens=60, budget=0.5)
    assert long.verdict.worst_ratio <= 1
    full = decode(MODEL, [PROMPT], "topk-blocks", num_tokens=60, budget=1.0)
    assert full.tokens == [list(dense_of(MODEL, tuple(PROMPT), 60).tokens)]


@pytest.mark.parametrize("policy", ["all-gpu", "cpu-attention", "split-all", "topk-blocks"])
def test_requests_of_different_lengths_in_one_batch_keep_their_own_tokens(policy: str) -> None:
    prompts = [PROMPT[:40], PROMPT[:200], PROMPT[50:120]]
    options: dict[str, Any] = {"budget": 1.0} if policy == "topk-blocks" else {}
    decoded = decode(MODEL, prompts, policy, **options)
    assert decoded.tokens == [list(dense_of(MODEL, tuple(p), 6).tokens) for p in prompts]
    assert decoded.verdict.worst_ratio <= 1


def test_streaming_refuses_a_second_request_while_it_serves_one() -> None:
    with pytest.raises(ConfigurationError, match="one request at a time"):
        decode(MODEL, [PROMPT[:40], PROMPT[:60]], "stream-offload")


def test_a_refused_second_request_leaves_the_first_one_served() -> None:
    with open_platform(SMALL) as platform:
        engine = Engine(platform, kv_shape(MODEL))
        policy = StreamOffload(engine)
        first, second, third = (Request(name, [1] * 40, 50) for name in ("first", "second", "third"))

        async def admit(request: Request) -> None:
            request.table = BlockTable(engine.shape, request.max_tokens)
            try:
                await policy.admit(request)
            except ConfigurationError:
                await policy.release(request)
                raise

        engine.loop.run(admit(first))
        for request in (second, third):
            with pytest.raises(ConfigurationError, match="one request at a time"):
                engine.loop.run(admit(request))
        engine.loop.run(policy.release(first))
        engine.loop.run(admit(third))
        engine.loop.run(policy.release(third))
        engine.close()


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("topk-blocks", {"budget": 0.0}, "budget is 0; it must be above 0"),
        ("topk-blocks", {"budget": 1.5}, "budget is 1.5; it must be above 0 and at most 1"),
        ("topk-blocks", {"budget": "x"}, "budget is 'x'; it must be a number"),
        ("topk-blocks", {"budget": float("nan")}, "budget is nan"),
        ("topk-blocks", {"recent_blocks": 0}, "recent_blocks is 0; it must be at least 1"),
        ("topk-blocks", {"sink_blocks": 1.5}, "sink_blocks is 1.5; it must be a whole number"),
        ("topk-blocks", {"bugdet": 0.5}, "no option 'bugdet': did you mean 'budget'"),
        ("split-all", {"shares": {"emu:cxi": 1.0}}, "no memory 'emu:cxi': did you mean 'emu:cxl'"),
        ("split-all", {"shares": {"emu:cxl": -1.0}}, "share of emu:cxl is -1.0; it must be from 0"),
        ("split-all", {"shares": {"emu:cxl": 0.0}}, "shares of all memories are 0"),
        ("split-all", {"shares": {"emu:cxl": float("inf")}}, "share of emu:cxl is inf"),
        ("split-all", {"shares": {"emu:cxl": 1e308, "emu:dram": 1e308}}, "must be from 0 to 1e\\+12"),
        ("split-all", {"shares": {"emu:cxl": None}}, "share of emu:cxl is None; it must be a number"),
        ("split-all", {"shares": {"emu:cxl": True}}, "is True; it must be a number"),
        ("split-all", {"shares": 3}, "shares are a table of memories and weights, not 3"),
        ("stream-offload", {"percent": {"emu:dram": float("nan")}}, "share of emu:dram is nan"),
        ("stream-offload", {"percent": [50]}, "percent is a table"),
    ],
)
def test_options_that_make_no_sense_are_refused(policy: str, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decode(MODEL, [PROMPT[:40]], policy, **options)


def test_a_comparison_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no policy was named"):
        compare(MODEL, tiny_workload(40), lambda _: open_platform(SMALL), [], num_tokens=1)


def test_an_unknown_policy_is_answered_with_the_near_names() -> None:
    with pytest.raises(ConfigurationError, match="split-all"):
        decode(MODEL, [PROMPT[:40]], "splitall")


@pytest.mark.parametrize("policy", [*EXACT, "topk-blocks"])
def test_no_report_is_above_physics(policy: str) -> None:
    decoded = decode(MODEL, [PROMPT], policy)
    rates = {"pcie": 12.8e9, "upi": 20e9, "cxl": 16e9, "nvme": 4e9, "pnm": 16e9}
    for name, use in decoded.devices.items():
        assert 0 <= use.busy_ns <= decoded.elapsed_ns, name
        assert use.busy_ns + use.stall_ns <= decoded.elapsed_ns, name
    assert set(decoded.links) == set(rates)
    for name, link in decoded.links.items():
        assert link.busy_ns <= decoded.elapsed_ns
        for nbytes in (link.bytes_forward, link.bytes_back):
            assert nbytes * 1e9 <= rates[name] * link.busy_ns, name


def test_a_run_that_fails_leaves_other_platforms_alone_and_can_be_repeated() -> None:
    for _ in range(2):
        with pytest.raises(TierTooSmall):
            decode(MODEL, [PROMPT], "all-gpu", overrides={"devices.gpu.capacity": 150_000})
    assert decode(MODEL, [PROMPT], "all-gpu").tokens == [list(dense_of(MODEL, tuple(PROMPT), 6).tokens)]


def test_the_time_of_a_run_is_the_same_every_time() -> None:
    first, second = (decode(MODEL, [PROMPT], "split-all") for _ in range(2))
    assert first.elapsed_ns == second.elapsed_ns > 0
    assert first.devices == second.devices
    assert first.links == second.links


def test_a_request_that_does_not_fit_is_refused_and_nothing_of_it_is_kept() -> None:
    with open_platform(SMALL, overrides={"devices.cxl.capacity": 1 << 20}) as platform:
        before = platform.devices["emu:cxl"].alloc(1 << 20)
        platform.devices["emu:cxl"].free(before)
        with pytest.raises(TierTooSmall):
            decode(MODEL, [PROMPT * 9], "split-all", platform=platform, shares={"emu:cxl": 1.0})


def test_outputs_are_finite_and_not_constant(reference: Decoded) -> None:
    assert np.isfinite(reference.outputs).all()
    assert reference.outputs.std() > 0


@pytest.mark.parametrize("policy", ["all-gpu", "cpu-attention"])
def test_whole_blocks_of_a_prompt_are_written_from_where_the_framework_left_them(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[NDArray[np.uint8]] = []
    original = Engine.write

    def write(self: Engine, target: Any, data: NDArray[np.uint8], after: Any = ()) -> Any:
        written.append(data)
        return original(self, target, data, after)

    monkeypatch.setattr(Engine, "write", write)
    prefill = dense_of(MODEL, tuple(PROMPT), 6).prefill
    decode(MODEL, [PROMPT], policy)
    rows = [*prefill.keys, *prefill.values]
    direct = sum(data.nbytes for data in written if any(np.shares_memory(data, one) for one in rows))
    whole = len(PROMPT) // 16 * 16  # blocks of tests/decoding.py
    # These memories take any number of bytes, so that nothing but the open blocks is padded.
    assert direct == sum(one[:, :whole].nbytes for one in rows)
