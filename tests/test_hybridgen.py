"""HybridGen: the full budget is dense attention, keys stay off the link, and what it chooses is what it says."""

from __future__ import annotations

from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.compare import PolicyRequest, compare, find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.kv_mapping import turns
from tierloop.runtime.modules import Modules
from tierloop.runtime.policies.hybridgen import HybridGen
from tierloop.runtime.policy import Request, make
from tierloop.runtime.workspace import Workspace

from .decoding import SMALL, Decoded, decode, dense_of
from .tiny import tiny_model, tiny_workload

MODEL = tiny_model(num_layers=6)
SHAPE = MODEL.shape
SLOW_GPU = SMALL.parent / "slow-gpu.toml"
PROMPT = tiny_workload(205).token_ids
OTHER = tiny_workload(150, seed=3).token_ids
LONG = tiny_workload(700)
FIXED: dict[str, Any] = {"scheduler": "fixed", "k": 20, "k_min": 8}
TOKENS = 8
"""Decoded in every test here: the prompt ends three rows before a block of 16, so blocks are demoted on the way."""


def hybrid(prompts: list[list[int]] | None = None, **options: Any) -> Decoded:
    changes = {name: options.pop(name) for name in ("dtype", "platform", "overrides") if name in options}
    return decode(MODEL, prompts or [PROMPT], "hybridgen", num_tokens=TOKENS, **changes, **options)


@cache
def fixed(timing: str) -> bytes:
    """The outputs with K fixed and everything else as by default."""
    return hybrid(**FIXED, timing=timing).outputs.tobytes()


@pytest.fixture(scope="module")
def dense() -> Decoded:
    return decode(MODEL, [PROMPT], "all-gpu", num_tokens=TOKENS)


# -- the full budget ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timing": "current", "mapping": "interleave"},
        {"timing": "prev-select", "mapping": "weighted", "weights": {"emu:dram": 2, "emu:numa": 1, "emu:cxl": 1}},
        {"mapping": "dram", "values": "direct", "gpu_share": 0.5},
        {"scan_tokens": 32, "gpu_share": 0.0},
        {"without": ["logit_parallelism", "mapping", "scheduler"]},
    ],
)
def test_with_the_full_budget_it_is_dense_attention_bit_for_bit(dense: Decoded, options: dict[str, Any]) -> None:
    decoded = hybrid(budget=1.0, **options)
    assert decoded.tokens == dense.tokens
    assert decoded.outputs.tobytes() == dense.outputs.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "fp8_e4m3"])
def test_the_full_budget_has_the_bits_of_dense_attention_in_every_type(dtype: str) -> None:
    expected = decode(MODEL, [PROMPT], "all-gpu", num_tokens=TOKENS, dtype=dtype)
    assert hybrid(budget=1.0, dtype=dtype).outputs.tobytes() == expected.outputs.tobytes()


def test_k_that_covers_every_host_row_is_dense_attention_too(dense: Decoded) -> None:
    assert hybrid(k=208, k_min=8, scheduler="fixed").outputs.tobytes() == dense.outputs.tobytes()


def test_requests_of_different_length_share_a_batch() -> None:
    expected = decode(MODEL, [PROMPT, OTHER, PROMPT[:20]], "all-gpu", num_tokens=TOKENS)
    assert hybrid([PROMPT, OTHER, PROMPT[:20]], budget=1.0).outputs.tobytes() == expected.outputs.tobytes()


def test_a_long_and_a_short_request_choose_as_many_rows_as_each_wants() -> None:
    share = {"scheduler": "fixed", "k_min": 1, "budget": 0.2, "timing": "current"}
    together = hybrid([PROMPT, PROMPT[:50], PROMPT], **share)
    alone = [hybrid([prompt], **share) for prompt in (PROMPT, PROMPT[:50])]
    assert together.tokens == [decoded.tokens[0] for decoded in (*alone, alone[0])]
    assert together.verdict.worst_ratio <= 1


@pytest.mark.parametrize("timing", ["prev", "prev-select", "current"])
def test_a_batch_gives_each_request_what_it_gets_alone(timing: str) -> None:
    together = hybrid([PROMPT, OTHER], **FIXED, timing=timing)
    alone = [hybrid([prompt], **FIXED, timing=timing) for prompt in (PROMPT, OTHER)]
    assert together.tokens == [decoded.tokens[0] for decoded in alone]


def test_nothing_is_predicted_where_every_row_is_wanted_anyway() -> None:
    """K_min covers a short prompt. The hazard checker sees commands that nobody waits for, given enough layers."""
    model = tiny_model(num_layers=12)
    short = PROMPT[:60]
    expected = decode(model, [short], "all-gpu", num_tokens=TOKENS)
    decoded = decode(model, [short], "hybridgen", num_tokens=TOKENS, k_min=64, gpu_share=0.3)
    assert decoded.outputs.tobytes() == expected.outputs.tobytes()


def test_a_prompt_that_fits_the_gpu_is_demoted_as_it_grows() -> None:
    expected = decode(MODEL, [PROMPT[:31]], "all-gpu", num_tokens=TOKENS)
    decoded = hybrid([PROMPT[:31]], budget=1.0, gpu_share=1.0)
    assert decoded.outputs.tobytes() == expected.outputs.tobytes()
    assert decoded.devices["emu:cxl"].bytes_written > 0, "no block was demoted"


# -- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", ["prev-select", "current"])
def test_with_true_logits_the_error_is_within_the_bound_on_the_chosen_rows(timing: str) -> None:
    decoded = hybrid(**FIXED, timing=timing)
    assert decoded.verdict.checked == (TOKENS - 1) * SHAPE.num_layers * SHAPE.num_q_heads
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.verdict.error_vs_dense > decoded.verdict.max_error, "no row was left out"


def test_keys_that_cross_the_link_change_nothing_but_the_traffic() -> None:
    ours = hybrid(**FIXED, timing="current")
    crossing = hybrid(**FIXED, timing="current", without=["logit_parallelism"])
    assert crossing.outputs.tobytes() == ours.outputs.tobytes()
    assert crossing.links["pcie"].bytes_forward > ours.links["pcie"].bytes_forward


@pytest.mark.parametrize(
    "options",
    [
        {"mapping": "interleave"},
        {"mapping": "weighted"},
        {"mapping": "dram"},
        {"values": "direct"},
        {"scan_tokens": 10_000},
        {"without": ["mapping"]},
    ],
)
@pytest.mark.parametrize("timing", ["prev", "current"])
def test_placement_and_the_way_of_values_change_no_bit(timing: str, options: dict[str, Any]) -> None:
    assert hybrid(**FIXED, timing=timing, **options).outputs.tobytes() == fixed(timing)


def test_k_rows_of_each_head_are_attended_beside_those_on_the_gpu() -> None:
    seen: list[tuple[int, int]] = []

    class Counts(HybridGen):
        def _account(self, batch: Any, scans: Any, chosen: Any) -> None:
            super()._account(batch, scans, chosen)
            for positions in batch.attended_rows[0]:
                seen.append((len(positions), int(batch.positions[0, -1]) + 1 - scans[0].last * 16))
                assert (np.diff(positions) > 0).all()

    decode(MODEL, [PROMPT], lambda engine: Counts(engine, **FIXED), num_tokens=TOKENS)
    assert len(seen) == (TOKENS - 1) * SHAPE.num_layers * SHAPE.num_kv_heads
    assert {attended - on_gpu for attended, on_gpu in seen} == {20}


def test_rows_are_scanned_only_as_far_back_as_asked() -> None:
    oldest: list[int] = []

    class Looks(HybridGen):
        def _account(self, batch: Any, scans: Any, chosen: Any) -> None:
            super()._account(batch, scans, chosen)
            oldest.append(min(int(p[0]) for p in chosen.positions) - scans[0].last * 16 + 48)

    decode(MODEL, [PROMPT], lambda engine: Looks(engine, **FIXED, scan_tokens=48), num_tokens=TOKENS)
    assert oldest
    assert min(oldest) >= 0


@pytest.mark.parametrize("timing", ["prev-select", "current"])
def test_rows_beyond_the_scan_are_left_out_even_where_all_that_is_scanned_is_wanted(timing: str) -> None:
    decoded = hybrid(scheduler="fixed", k=32, k_min=8, scan_tokens=32, timing=timing)
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.verdict.error_vs_dense > decoded.verdict.max_error, "no row was left out"


def test_the_cores_work_on_the_next_layer_while_the_gpu_attends() -> None:
    """Two layers are under way at once, so a step is much shorter where latency counts for most."""

    def elapsed_ns(timing: str) -> int:
        wanted = PolicyRequest("hybridgen", {**FIXED, "timing": timing, "predict_from": 0})
        changed = {"links.pcie.latency_ns": 200_000}
        compared = compare(
            MODEL, LONG, lambda _: open_platform(SMALL, overrides=changed), [wanted], num_tokens=4, oracle=False
        )
        return compared.policies[0].elapsed_ns

    assert elapsed_ns("prev") < 0.8 * elapsed_ns("current")


def test_layers_whose_input_is_unlike_the_next_are_not_predicted_from() -> None:
    predicted: set[int] = set()

    class Looks(HybridGen):
        async def attend(self, layer: int, batch: Any) -> Any:
            done = await super().attend(layer, batch)
            if batch.predicted[0] is not None:
                predicted.add(layer)
            return done

    decode(MODEL, [PROMPT], lambda engine: Looks(engine, **FIXED), num_tokens=4)
    assert predicted == {4, 5}
    predicted.clear()
    decode(MODEL, [PROMPT], lambda engine: Looks(engine, **FIXED, predict_from=1), num_tokens=4)
    assert predicted == {2, 3, 4, 5}


def test_wrong_predictions_lose_attention_mass() -> None:
    spoilt = hybrid(**FIXED, timing="current", noise=0.5)
    assert spoilt.verdict.worst_ratio <= 1
    assert spoilt.verdict.error_vs_dense > hybrid(**FIXED, timing="current").verdict.error_vs_dense


# -- the scheduler --------------------------------------------------------------------------------------------------


def run_long(platform: Path = SMALL, latency_ns: int = 600, **options: Any) -> dict[str, list[Any]]:
    """K, timing and load of 30 steps over 700 tokens, on the virtual clock; `latency_ns` is that of the GPU's link."""
    wanted = PolicyRequest("hybridgen", {"k_min": 8, "k": 32, "every": 1, "smoothing": 1.0, **options})
    changed = {"links.pcie.latency_ns": latency_ns}
    compared = compare(
        MODEL, LONG, lambda _: open_platform(platform, overrides=changed), [wanted], num_tokens=31, oracle=False
    )
    result = compared.policies[0]
    steps: dict[str, list[Any]] = result.details["request"]
    return steps


def test_a_fixed_k_stays_and_the_budget_is_a_share_of_the_host_rows() -> None:
    assert set(run_long(scheduler="fixed")["k"]) == {32}
    assert run_long(scheduler="fixed", k=None, budget=0.05)["k"][0] == ceil(0.05 * 576)


def test_k_is_lowered_where_the_host_is_slower_than_the_gpu_and_never_below_k_min() -> None:
    steps = run_long(scheduler="adaptive", k=200, latency_ns=100_000)
    assert steps["load"][1] > 1.1
    assert steps["k"] == sorted(steps["k"], reverse=True)
    assert steps["k"][-1] == 8


def test_k_grows_while_the_host_has_slack_up_to_k_max() -> None:
    steps = run_long(SLOW_GPU, scheduler="adaptive", k=8, k_max=20)
    assert steps["load"][1] < 1
    assert steps["k"] == sorted(steps["k"])
    assert steps["k"][-1] == 20


def test_the_full_scheduler_gives_up_true_queries_before_it_gives_up_rows() -> None:
    steps = run_long(scheduler="full", k=200, timing="current", latency_ns=100_000)
    first = steps["timing"].index("prev")
    assert set(steps["k"][: first + 1]) == {200}
    assert steps["k"][-1] < 200


def test_the_full_scheduler_takes_true_queries_before_it_takes_more_rows() -> None:
    steps = run_long(SLOW_GPU, scheduler="full", k=8, k_max=20)
    first = steps["timing"].index("current")
    assert set(steps["k"][: first + 1]) == {8}
    assert steps["k"][-1] == 20


def test_the_ports_rule_swings() -> None:
    steps = run_long(scheduler="port", k=64)
    moves = np.sign(np.diff(steps["k"]))
    assert {-1, 1} <= set(moves.tolist())


def test_switched_off_the_scheduler_leaves_k_alone() -> None:
    assert set(run_long(scheduler="full", k=200, without=["scheduler"])["k"]) == {200}


def test_state_goes_with_the_request() -> None:
    """The second of two equal requests, one after the other, meets nothing of the first."""
    with open_platform(SMALL, check_hazards=True) as platform:
        engine = Engine(platform, kv_shape(MODEL, block_tokens=16, split_tokens=16))
        policy = make(HybridGen, engine, {"k": 64, "k_min": 8, "every": 1})
        decoder = Decoder(Modules(MODEL.module), engine, policy)
        prefill = dense_of(MODEL, tuple(PROMPT), TOKENS).prefill
        runs = []
        for _ in range(2):
            request = Request("same", [*PROMPT, prefill.first_token], len(PROMPT) + TOKENS, len(PROMPT))
            engine.loop.run(decoder.adopt(request, prefill))
            begun = platform.clock.now()
            for _ in range(TOKENS - 1):
                engine.loop.run(decoder.step([request]))
            runs.append((request.tokens, policy.report(), platform.clock.now() - begun))
            engine.loop.run(policy.release(request))
        engine.close()
    assert runs[0] == runs[1]


def test_a_step_without_end_leads_to_k_max() -> None:
    assert run_long(SLOW_GPU, scheduler="adaptive", k=8, k_max=20, step=1e18)["k"][-1] == 20


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert set(run_long(scheduler="fixed", k=32.0, k_max=64.0, k_min=8.0)["k"]) == {32}


def test_a_mapping_that_is_switched_off_takes_its_weights_with_it() -> None:
    weights = {"emu:dram": 1, "emu:cxl": 3}
    decoded = hybrid(**FIXED, mapping="weighted", weights=weights, without=["mapping"])
    assert decoded.placement == hybrid(**FIXED, mapping="interleave").placement


# -- traffic --------------------------------------------------------------------------------------------------------


def test_logits_and_values_of_the_chosen_rows_cross_the_link_and_no_key_does() -> None:
    decoded = hybrid(**FIXED, timing="current")
    steps = TOKENS - 1
    rows = 20 * SHAPE.num_kv_heads * SHAPE.num_layers * steps
    logits_and_values = rows * (SHAPE.num_q_heads // SHAPE.num_kv_heads + SHAPE.head_dim) * 4
    assert decoded.links["pcie"].bytes_forward == logits_and_values


def test_keys_are_in_local_memory_and_values_in_cxl_memory() -> None:
    decoded = hybrid(**FIXED)
    assert decoded.placement["emu:dram"] == decoded.placement["emu:cxl"] > decoded.placement["emu:gpu"] > 0
    plain = hybrid(**FIXED, mapping="dram")
    assert set(plain.placement) == {"emu:dram", "emu:gpu"}


def test_the_gpu_keeps_its_share_and_no_more() -> None:
    held: list[int] = []

    class Watches(HybridGen):
        async def attend(self, layer: int, batch: Any) -> Any:
            done = await super().attend(layer, batch)
            table = batch.requests[0].blocks
            number = table.pools.index(batch.requests[0].state["pools"]["gpu"])
            held.append(int((table.pool[layer, 0, 0] == number).sum()))
            return done

    decode(MODEL, [PROMPT], lambda engine: Watches(engine, **FIXED, gpu_share=0.2), num_tokens=8)
    assert set(held) == {3, 4}, "41 rows are three blocks; one more is on its way for a step"
    assert held[-1] == 3


# -- bad input, and what does not fit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget is 0; it must be above 0"),
        ({"budget": 1.5}, "budget is 1.5; it must be above 0 and at most 1"),
        ({"budget": "many"}, "budget is 'many'; it must be a number"),
        ({"k": 10}, "k is 10, below k_min, which is 64"),
        ({"k_max": 10}, "k_max is 10, below k_min"),
        ({"k": 2.5, "k_min": 1}, "k is 2.5; it must be a whole number"),
        ({"k": 1000}, "k is 1000, more than the context of r0, which is 213"),
        ({"gpu_share": 2}, "gpu_share is 2; it must be from 0 to 1"),
        ({"scheduler": "ful"}, "scheduler 'ful': .*full"),
        ({"timing": 1}, "timing 1"),
        ({"mapping": "page"}, "mapping 'page'"),
        ({"values": "dma"}, "values 'dma'"),
        ({"weights": {"emu:dram": 1}}, "weights belong to mapping"),
        ({"mapping": "weighted", "weights": {"emu:dram": 0.5}}, "weight of emu:dram is 0.5; it must be a whole"),
        ({"mapping": "weighted", "weights": {"emu:ram": 1}}, "no memory 'emu:ram'"),
        ({"mapping": "weighted", "weights": {"emu:dram": 0}}, "all weights are 0"),
        ({"mapping": "weighted", "weights": 3}, "are a table of memories"),
        ({"mapping": "weighted", "weights": {"emu:nvme": 1}}, "does not reach emu:nvme"),
        ({"without": "scheduler"}, "must be a list of mechanisms"),
        ({"without": ["cache"]}, "without 'cache'"),
        ({"noise": 2}, "noise is 2; it must be from 0 to 1"),
        ({"k_max": 10**400}, "it must be from 1 to"),
        ({"epsilon": "much"}, "epsilon is 'much'; it must be a number"),
        ({"smoothing": 0}, "smoothing 0"),
        ({"every": 0}, "every is 0"),
        ({"step": float("nan")}, "step is nan"),
        ({"predict_from": -1}, "predict_from is -1"),
    ],
)
def test_bad_options_are_named_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hybrid(**options)


def test_a_platform_without_cxl_memory_is_refused_where_it_was_asked_for() -> None:
    with open_platform("laptop", clock="virtual") as laptop:
        engine = Engine(laptop, kv_shape(MODEL))
        with pytest.raises(ConfigurationError, match='reaches none; mapping = "dram" keeps'):
            make(HybridGen, engine, {"mapping": "semantic"})
        assert isinstance(make(HybridGen, engine, {}), HybridGen)


def test_a_platform_whose_host_has_no_cores_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "coreless.toml"
    place.write_text(
        'description = "A GPU beside memory"\nclock = "virtual"\nhost = "cxl"\n'
        '[devices.gpu]\ndriver = "emulated"\nprofile = "demo-gpu"\nreaches.cxl = ["bus"]\n'
        '[devices.cxl]\ndriver = "emulated"\nprofile = "demo-cxl"\n'
        '[links.bus]\nends = ["cxl", "gpu"]\nbytes_per_s = 1e10\nlatency_ns = 100\nsource = "defined"\n'
    )
    with open_platform(place) as platform, pytest.raises(ConfigurationError, match="no CPU executor of platform"):
        make(HybridGen, Engine(platform, kv_shape(MODEL)), {})


def test_a_request_that_does_not_fit_is_refused_alone() -> None:
    with open_platform(SMALL, overrides={"devices.cxl.capacity": 240_000}) as platform:
        engine = Engine(platform, kv_shape(MODEL, block_tokens=16, split_tokens=16))
        policy = make(find_policy("hybridgen"), engine, {"budget": 1.0})
        decoder = Decoder(Modules(MODEL.module), engine, policy)
        prefill = dense_of(MODEL, tuple(PROMPT), TOKENS).prefill
        first = Request("first", [*PROMPT, prefill.first_token], len(PROMPT) + TOKENS, len(PROMPT))
        second = Request("second", [*PROMPT, prefill.first_token], len(PROMPT) + TOKENS, len(PROMPT))
        engine.loop.run(decoder.adopt(first, prefill))
        with pytest.raises(TierTooSmall, match="emu:cxl is too small"):
            engine.loop.run(decoder.adopt(second, prefill))
        for _ in range(TOKENS - 1):
            engine.loop.run(decoder.step([first]))
        assert tuple(first.tokens[len(PROMPT) :]) == dense_of(MODEL, tuple(PROMPT), TOKENS).tokens
        engine.loop.run(policy.release(first))
        engine.close()


@pytest.mark.parametrize("chunk", [5, 40])
def test_several_tokens_at_once_attend_over_everything(chunk: int) -> None:
    """A second turn of a conversation: the tokens come in one append, over rows on the host."""
    whole = [*PROMPT, *OTHER[:chunk]]
    expected = dense_of(MODEL, tuple(whole), 4).tokens
    prefill = dense_of(MODEL, tuple(PROMPT), TOKENS).prefill
    with open_platform(SMALL, check_hazards=True) as platform:
        engine = Engine(platform, kv_shape(MODEL, block_tokens=16, split_tokens=16))
        policy = make(find_policy("hybridgen"), engine, {**FIXED, "gpu_share": 0.3})
        decoder = Decoder(Modules(MODEL.module), engine, policy, max_rows=chunk)
        request = Request("talk", list(whole), len(whole) + 4, len(PROMPT))
        engine.loop.run(decoder.adopt(request, prefill))
        assert engine.loop.run(decoder.step([request], chunk)) == [expected[0]]
        engine.loop.run(policy.release(request))
        engine.close()


def test_more_tokens_at_once_than_the_gpu_keeps_are_refused() -> None:
    prefill = dense_of(MODEL, tuple(PROMPT), TOKENS).prefill
    with open_platform(SMALL) as platform:
        engine = Engine(platform, kv_shape(MODEL, block_tokens=16, split_tokens=16))
        policy = make(find_policy("hybridgen"), engine, {**FIXED, "gpu_share": 0.0})
        decoder = Decoder(Modules(MODEL.module), engine, policy, max_rows=80)
        request = Request("talk", [*PROMPT, *OTHER[:80]], len(PROMPT) + 90, len(PROMPT))
        engine.loop.run(decoder.adopt(request, prefill))
        with pytest.raises(TierTooSmall, match="raise gpu_share or append fewer at once"):
            engine.loop.run(decoder.step([request], 80))


# -- parts ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1))
def test_turns_hold_to_their_weights_and_never_stray_by_more_than_a_turn(weights: dict[str, int]) -> None:
    if not any(weights.values()):
        return
    turn = turns(weights, list("abcd"), "weights")
    total = sum(weights.values())
    for memory, weight in weights.items():
        assert turn.count(memory) * total == weight * len(turn)
        for end in range(1, len(turn) + 1):
            assert abs(turn[:end].count(memory) - end * weight / total) < 2


def test_working_space_is_as_large_as_the_admitted_requests_want_together() -> None:
    with open_platform(SMALL) as platform:
        engine = Engine(platform, kv_shape(MODEL))
        work = Workspace(engine, 2)
        work.reserve({"rows": ("emu:dram", 1000)})
        work.reserve({"rows": ("emu:dram", 500)})
        assert work.at("rows", 0, 1500).region is work.at("rows", 1, 1500).region
        assert work.at("rows", 0, 8).spans.array[0, 0] == work.at("rows", 2, 8).spans.array[0, 0]
        assert work.at("rows", 1, 8).spans.array[0, 0] >= 1500
        with pytest.raises(TierTooSmall, match=r"emu:gpu is too small: .* bytes are needed there for states"):
            work.reserve({"rows": ("emu:dram", 5000), "states": ("emu:gpu", 1 << 40)})
        with pytest.raises(AssertionError, match="were not reserved"):
            work.at("rows", 0, 5000)
        work.give_back({"rows": ("emu:dram", 1500)})
        engine.close()
