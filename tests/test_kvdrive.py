"""KVDrive: an answer depends on what is chosen alone, the full budget is dense attention, and every path is taken."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from tierloop.devices.errors import ConfigurationError, MediaError, Timeout
from tierloop.devices.registry import open_platform
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.compare import find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.modules import Modules
from tierloop.runtime.policy import Policy, Request, make

from .decoding import SMALL, Decoded, assert_nothing_is_left, decode, dense_of
from .tiny import tiny_model, tiny_workload

MODEL = tiny_model(num_layers=6)
PROMPT = tiny_workload(205).token_ids
OTHER = tiny_workload(150, seed=3).token_ids
TOKENS = 12
SMALL_ZONES: dict[str, Any] = {
    "budget": 0.2, "local_tokens": 8, "update_tokens": 8, "centroids": 12, "predict_from": 0, "warm_up_queries": 16,
}  # fmt: skip
"""Decoding passes several updates of the index with these."""


class Seen:
    """What a policy has told after a run."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def making(self, **options: Any) -> Any:
        def build(engine: Engine) -> Policy:
            made = make(find_policy("kvdrive"), engine, options)
            release = made.release

            async def told(request: Request) -> None:
                self.report.update(made.report())
                await release(request)

            made.release = told  # type: ignore[method-assign]  # to look before the request goes
            return made

        return build


def kvdrive(prompts: list[list[int]] | None = None, seen: Seen | None = None, **options: Any) -> Decoded:
    changes = {name: options.pop(name) for name in ("dtype", "platform", "overrides") if name in options}
    policy = (seen or Seen()).making(**{**SMALL_ZONES, **options})
    return decode(MODEL, prompts or [PROMPT], policy, num_tokens=TOKENS, **changes)


@cache
def usual() -> bytes:
    """The outputs with everything as in SMALL_ZONES."""
    return kvdrive().outputs.tobytes()


@pytest.fixture(scope="module")
def dense() -> Decoded:
    return decode(MODEL, [PROMPT], "all-gpu", num_tokens=TOKENS)


# -- what an answer depends on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 1},
        {"chunk_tokens": 8, "pipeline": "sequential"},
        {"pipeline": "prefetch", "dram_share": 0.3},
        {"persistent": "none"},
        {"window": 0.0, "dram_share": 0.1, "synchronisation": "naive"},
        {"without": ["window", "lookahead", "sizing", "pipeline", "warm_up", "packing", "synchronisation"]},
    ],
)
def test_with_the_full_budget_it_is_dense_attention_bit_for_bit(dense: Decoded, options: dict[str, Any]) -> None:
    decoded = kvdrive(**options, budget=1.0)
    assert decoded.tokens == dense.tokens
    assert decoded.outputs.tobytes() == dense.outputs.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "fp8_e4m3"])
def test_the_full_budget_has_the_bits_of_dense_attention_in_every_type(dtype: str) -> None:
    expected = decode(MODEL, [PROMPT], "all-gpu", num_tokens=TOKENS, dtype=dtype)
    assert kvdrive(budget=1.0, dtype=dtype).outputs.tobytes() == expected.outputs.tobytes()


def test_the_usual_run_attends_less_than_everything() -> None:
    decoded = kvdrive()
    assert decoded.verdict.attended_share < 0.7
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.outputs.tobytes() == usual(), "the same run gives the same bits"


@pytest.mark.parametrize("window", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("eviction", ["la", "lru", "lfu"])
def test_windows_and_their_eviction_do_not_change_a_bit(window: float, eviction: str) -> None:
    assert kvdrive(window=window, eviction=eviction).outputs.tobytes() == usual()


@pytest.mark.parametrize("pipeline", ["sequential", "prefetch", "disaggregated"])
@pytest.mark.parametrize("dram_share", [0.0, 0.2, 1.0])
def test_pipelines_and_tiers_do_not_change_a_bit(pipeline: str, dram_share: float) -> None:
    assert kvdrive(pipeline=pipeline, dram_share=dram_share).outputs.tobytes() == usual()


@pytest.mark.parametrize("synchronisation", ["naive", "block-sparse", "hierarchical", "balanced"])
@pytest.mark.parametrize("pinned_share", [0.0, 0.5, 1.0])
def test_ways_from_the_ssd_do_not_change_a_bit(synchronisation: str, pinned_share: float) -> None:
    seen = Seen()
    options: dict[str, Any] = {
        "synchronisation": synchronisation,
        "pinned_share": pinned_share,
        "dram_share": 0.1,
        "window": 0.5,
    }
    decoded = kvdrive(seen=seen, **options)
    assert decoded.outputs.tobytes() == usual()
    counts = seen.report["r0"]
    assert counts["from_ssd"] > 0, "the drive was not asked"
    assert counts["media_nbytes"] >= counts["useful_nbytes"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"persistent": "none"},
        {"noise": 0.5},
        {"rank_depth": 1.0},
        {"rank_depth": 8.0},
        {"without": ["warm_up"]},
        {"without": ["packing"], "dram_share": 0.0},
        {"lookup_ns": 5000.0},
    ],
)
def test_nor_do_other_things_that_only_cost_time(options: dict[str, Any]) -> None:
    assert kvdrive(**options).outputs.tobytes() == usual()


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_batch_gives_each_request_what_it_gets_alone(micro_batch: int) -> None:
    prompts = [PROMPT, OTHER, PROMPT[:60]]
    together = kvdrive(prompts, micro_batch=micro_batch, dram_share=0.2)
    alone = [kvdrive([prompt], dram_share=0.2) for prompt in prompts]
    assert together.tokens == [decoded.tokens[0] for decoded in alone]
    assert together.verdict.worst_ratio <= 1


@pytest.mark.parametrize("waves", [2, 3, 5])
def test_waves_give_each_request_what_it_gets_alone(waves: int) -> None:
    prompts = [PROMPT, OTHER, PROMPT[:60]]
    together = kvdrive(prompts, waves=waves, dram_share=0.2)
    alone = [kvdrive([prompt], dram_share=0.2) for prompt in prompts]
    assert together.tokens == [decoded.tokens[0] for decoded in alone]
    assert together.verdict.worst_ratio <= 1


def test_a_prompt_that_is_shorter_than_the_zones_is_dense() -> None:
    expected = decode(MODEL, [PROMPT[:7]], "all-gpu", num_tokens=TOKENS)
    assert kvdrive([PROMPT[:7]], centroids=0, budget=1.0).outputs.tobytes() == expected.outputs.tobytes()


# -- what it does ---------------------------------------------------------------------------------------------------


def test_windows_spare_what_they_promise() -> None:
    found: dict[float, int] = {}
    for window in (0.0, 1.0, 2.0, 3.0):
        seen = Seen()
        kvdrive(seen=seen, window=window)
        counts = seen.report["r0"]
        found[window] = counts["from_dram"] + counts["from_ssd"]
        assert len(counts["hit_rate"]) == TOKENS - 1
    assert found[0.0] > found[1.0] > found[2.0] >= found[3.0]


def test_without_a_window_every_chosen_entry_is_fetched() -> None:
    seen = Seen()
    kvdrive(seen=seen, window=0.0, update_tokens=64)
    assert seen.report["r0"]["hits"] == 0
    assert seen.report["r0"]["from_dram"] > 0


def test_new_entries_are_persisted_and_chosen() -> None:
    seen = Seen()
    decoded = kvdrive(seen=seen, dram_share=0.0)
    assert decoded.devices["emu:nvme"].bytes_written > 0, "entries that decoding has filled go to the drive"


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": "fifo"}, "eviction 'fifo'"),
        ({"pipeline": "parallel"}, "pipeline 'parallel'"),
        ({"synchronisation": "all"}, "synchronisation 'all'"),
        ({"window": -1}, "window is -1"),
        ({"rank_depth": 0.5}, "rank_depth is 0.5; it must be from 1 to 1000"),
        ({"budget": 0}, "budget is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"chunk_tokens": 2.5}, "whole number"),
        ({"dram_share": 0.5, "persistent": "none"}, "without an SSD"),
        ({"persistent": "emu:dram"}, "persistent 'emu:dram'"),
        ({"without": ["windows"]}, "without 'windows'"),
        ({"sizes": "there-is-none.json"}, "there-is-none.json"),
        ({"chunk_tokens": 512}, "512"),
        ({"centroids": 5000}, "5000|5,000"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kvdrive(**options)


def test_a_window_that_does_not_fit_says_how_much_would() -> None:
    with pytest.raises(TierTooSmall, match=r"emu:gpu is too small.*windows of \d+\.\d+ × \d+ entries would fit"):
        kvdrive(window=4.0, overrides={"devices.gpu.capacity": 300_000})


def test_a_drive_that_is_too_small_is_refused_with_what_it_needs() -> None:
    with pytest.raises(TierTooSmall, match="emu:nvme"):
        kvdrive(overrides={"devices.nvme.capacity": 1 << 17})


def test_several_tokens_in_one_step_are_refused_by_name() -> None:
    prefill = dense_of(MODEL, tuple(PROMPT), 3).prefill
    with open_platform(SMALL) as platform:
        engine = Engine(platform, kv_shape(MODEL, "float32", 16, 16))
        modules = Modules(MODEL.module)
        decoder = Decoder(modules, engine, make(find_policy("kvdrive"), engine, SMALL_ZONES), 2)
        request = Request("r", [*PROMPT, prefill.first_token, prefill.first_token], len(PROMPT) + 4, len(PROMPT))
        engine.loop.run(decoder.adopt(request, prefill))
        with pytest.raises(Exception, match="2 tokens of a request in one step"):
            engine.loop.run(decoder.step([request], q_len=2))


def test_answers_are_those_of_an_index_made_by_hand() -> None:
    """With one chunk per cluster and as many centroids as chunks, the choice is the top of all mean keys."""
    everything = np.frombuffer(usual(), dtype=np.float32)
    other = np.frombuffer(kvdrive(centroids=40).outputs.tobytes(), dtype=np.float32)
    assert everything.shape == other.shape
    assert not np.array_equal(everything, other), "the index decides what is attended"


# -- what fails in the middle of a step -----------------------------------------------------------------------------


def test_a_request_whose_entries_come_too_late_ends_alone() -> None:
    """The short prompt needs no fetch: it goes on as if it were alone."""
    short = PROMPT[:11]
    alone = kvdrive([short], centroids=0, update_tokens=64)
    with open_platform(SMALL, check_hazards=True) as platform:
        engine = Engine(platform, kv_shape(MODEL, "float32", 16, 16))
        options = {**SMALL_ZONES, "centroids": 0, "update_tokens": 64, "window": 0.0, "deadline_ms": 0.001}
        policy = make(find_policy("kvdrive"), engine, options)
        decoder = Decoder(Modules(MODEL.module), engine, policy, 2)
        requests = []
        for name, prompt in (("long", PROMPT), ("short", short)):
            prefill = dense_of(MODEL, tuple(prompt), TOKENS).prefill
            request = Request(name, [*prompt, prefill.first_token], len(prompt) + TOKENS, len(prompt))
            engine.loop.run(decoder.adopt(request, prefill))
            requests.append(request)
        engine.loop.run(decoder.step(requests))
        late, other = requests
        assert isinstance(late.failure, Timeout)
        assert "0.001 ms" in str(late.failure)
        assert late.tokens == [*PROMPT, dense_of(MODEL, tuple(PROMPT), TOKENS).prefill.first_token]
        engine.loop.run(policy.release(late))
        for _ in range(TOKENS - 2):
            engine.loop.run(decoder.step([other]))
        assert other.tokens[len(short) :] == alone.tokens[0]
        engine.loop.run(policy.release(other))
        engine.close()
        assert_nothing_is_left(platform)


def test_a_failure_is_raised_where_no_other_request_is_left() -> None:
    with pytest.raises(Timeout, match=r"0\.001 ms"):
        kvdrive(window=0.0, deadline_ms=0.001)


def test_a_deadline_that_is_kept_changes_nothing() -> None:
    assert kvdrive(deadline_ms=1000.0).outputs.tobytes() == usual()


@pytest.mark.parametrize("synchronisation", ["naive", "block-sparse", "hierarchical", "balanced"])
def test_a_medium_error_ends_the_request_that_reads_it_and_no_other(synchronisation: str) -> None:
    prompts = [PROMPT, OTHER]
    options = {**SMALL_ZONES, "dram_share": 0.0, "window": 0.0, "synchronisation": synchronisation}
    alone = kvdrive([OTHER], **options)
    with open_platform(SMALL, check_hazards=True) as platform:
        engine = Engine(platform, kv_shape(MODEL, "float32", 16, 16))
        policy = make(find_policy("kvdrive"), engine, options)
        decoder = Decoder(Modules(MODEL.module), engine, policy, 2)
        requests = []
        for name, prompt in zip(("bad", "good"), prompts, strict=True):
            prefill = dense_of(MODEL, tuple(prompt), TOKENS).prefill
            request = Request(name, [*prompt, prefill.first_token], len(prompt) + TOKENS, len(prompt))
            engine.loop.run(decoder.adopt(request, prefill))
            requests.append(request)
        engine.loop.run(decoder.step(requests))
        bad, good = requests
        archive = bad.state["held"].tiers.archive
        media = archive.segment_of(3)
        drive: Any = platform.memory_owner("emu:nvme")
        begin = drive.offset_of(archive.region)
        for offset, nbytes in media.spans.array.tolist():
            for block in range((begin + offset) // 4096, (begin + offset + nbytes) // 4096):
                drive.firmware.inject(block)
        before = list(bad.tokens)
        engine.loop.run(decoder.step(requests))
        assert isinstance(bad.failure, MediaError)
        assert bad.tokens == before
        engine.loop.run(policy.release(bad))
        for _ in range(TOKENS - 3):
            engine.loop.run(decoder.step([good]))
        assert good.tokens[len(OTHER) :] == alone.tokens[0]
        engine.loop.run(policy.release(good))
        engine.close()
        assert_nothing_is_left(platform)


@pytest.mark.parametrize("capacity", [160_000, 200_000, 240_000, 280_000])
@pytest.mark.parametrize("pipeline", ["sequential", "prefetch"])
def test_the_window_that_would_fit_does(capacity: int, pipeline: str) -> None:
    options: dict[str, Any] = {"pipeline": pipeline, "overrides": {"devices.gpu.capacity": capacity}}
    with pytest.raises(TierTooSmall) as refused:
        kvdrive(window=6.0, **options)
    said = re.search(r"windows of (\d+\.\d+) × \d+ entries would fit", str(refused.value))
    assert said is not None
    assert kvdrive(window=float(said[1]), **options).outputs.tobytes() == usual()


def test_a_gpu_that_is_too_small_for_any_window_says_so() -> None:
    with pytest.raises(TierTooSmall, match="not even a window of 0 fits"):
        kvdrive(window=6.0, overrides={"devices.gpu.capacity": 100_000})
