"""A KV cache of 8-bit codes, end to end: what is stored, by which scales, and that every policy attends over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import CODE_RANGE, Quantize
from tierloop.devices.kernels.definition import Given, define, numbers
from tierloop.devices.registry import open_platform
from tierloop.runtime import key_scales
from tierloop.runtime.adapters.transformers_cache import TieredCache
from tierloop.runtime.blocks import K, KVShape, TierTooSmall, V
from tierloop.runtime.compare import PolicyRequest, compare, find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.dtypes import exact_keys, exact_values, keys_to_bytes, values_to_bytes
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import Chosen
from tierloop.runtime.models import load_model
from tierloop.runtime.modules import Modules
from tierloop.runtime.oracle import Recorder
from tierloop.runtime.policies.all_gpu import AllGpu
from tierloop.runtime.policies.topk_blocks import TopkBlocks
from tierloop.runtime.policy import Batch, Request
from tierloop.runtime.workloads import needle_prompt

from .attention_case import launch, whole
from .decoding import SMALL, Decoded, decode, dense_of
from .machines import PROFILES, open_machine
from .tiny import tiny_model, tiny_workload

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MODEL = tiny_model()
PROMPT = tiny_workload(210).token_ids
CODES = sorted(CODE_RANGE)
POLICIES = ("all-gpu", "cpu-attention", "split-all", "stream-offload", "topk-blocks", "cluster-topk")
MEMORIES = ("emu:gpu", "emu:dram", "emu:numa", "emu:cxl", "emu:nvme", "emu:pnm")
FEW: dict[str, dict[str, Any]] = {
    "topk-blocks": {"budget": 0.5, "dense_layers": 0},
    "cluster-topk": {"budget": 0.3, "recent_tokens": 16},
}
ALL: dict[str, dict[str, Any]] = {name: {"budget": 1.0} for name in FEW}
MODEL_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"


class Kept(AllGpu):
    """All-GPU that keeps the float32 rows that it was given, and reads back what was stored of them."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.given: dict[tuple[str, int, int], list[Float32]] = {}
        self.stored: dict[tuple[str, int, int], Bytes] = {}
        self.scales: dict[str, Float32] = {}
        self.clipped: dict[str, int] = {}

    async def place(self, request: Request, layer: int, keys: Float32, values: Float32) -> None:
        await super().place(request, layer, keys, values)
        for side, rows in ((K, keys), (V, values)):
            self.given[request.name, layer, side] = [rows.copy()]

    async def attend(self, layer: int, batch: Batch) -> list[Any]:
        for side, segment in ((K, batch.new_keys), (V, batch.new_values)):
            raw = np.empty(segment.spans.nbytes, dtype=np.uint8)
            await self.engine.read(segment, raw, [batch.ready])
            rows = raw.view(np.float32).reshape(len(batch.requests), self.shape.num_kv_heads, batch.q_len, -1)
            for request, mine in zip(batch.requests, rows, strict=True):
                self.given[request.name, layer, side].append(mine)
        return await super().attend(layer, batch)

    async def release(self, request: Request) -> None:
        if request.table is not None and request.table.scales is not None:
            self.scales[request.name] = request.table.scales.values.copy()
            self.clipped[request.name] = request.table.scales.clipped
            for layer, length in enumerate(request.table.length.tolist()):
                for side in (K, V):
                    (segment,) = request.table.row_segments(layer, side, 0, length)
                    raw = np.empty(segment.spans.nbytes, dtype=np.uint8)
                    await self.engine.read(segment, raw)
                    self.stored[request.name, layer, side] = raw
        await super().release(request)

    def rows(self, name: str, layer: int, side: int) -> Float32:
        """Everything that the request was given, (kv heads, tokens, d)."""
        return np.concatenate(self.given[name, layer, side], axis=1)


def kept(prompts: list[list[int]], dtype: str, **options: Any) -> tuple[Kept, Decoded]:
    made: list[Kept] = []

    def make(engine: Engine) -> Kept:
        made.append(Kept(engine))
        return made[-1]

    decoded = decode(MODEL, prompts, make, dtype=dtype, **options)
    return made[0], decoded


def defined(rows: Float32, dtype: Any, scales: Float32 | None = None) -> Bytes:
    """Rows (heads, n, d) as the definition of `quantize` stores them; scales (heads, d)."""
    heads, n, dim = rows.shape
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    operands = [Given(flat, np.array([flat.nbytes]))]
    args = Quantize(dtype, dim, "row")
    if scales is not None:
        of_head = np.ascontiguousarray(scales).view(np.uint8).reshape(-1)
        operands.append(Given(of_head, np.array([of_head.nbytes])))
        args = Quantize(dtype, dim, "channel", np.repeat(np.arange(heads, dtype=np.int64), n))
    return define(args, operands, [0])[0]


# -- what is stored -------------------------------------------------------------------------------------------------

ANY = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, 127.5, -127.5, 464.0, 2.0**-9, 2.0**-10, 3e38])


@given(hnp.arrays(np.float32, (2, 3, 20), elements=ANY), st.integers(0, 2**32 - 1), st.sampled_from(CODES))
def test_rows_that_the_host_stores_have_the_bits_of_the_kernel(rows: Float32, seed: int, dtype: Any) -> None:
    scales = np.exp(np.random.default_rng(seed).uniform(-4, 4, (2, 20))).astype(np.float32)
    scales[0, :10] = 1
    args = Quantize(dtype, 20, "channel", np.repeat(np.arange(2, dtype=np.int64), 3))
    keys = launch(args, [whole(rows), whole(scales)], rows.size)
    assert keys_to_bytes(rows, dtype, scales).tobytes() == keys.tobytes()
    values = launch(Quantize(dtype, 20, "row"), [whole(rows)], rows.size + 4 * 6)
    assert values_to_bytes(rows, dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", CODES)
def test_every_code_comes_back_from_what_it_stands_for(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[np.isfinite(numbers(codes, dtype)) & (codes != 0x80)]  # not −128 and not −0, which are never stored
    scales = np.linspace(0.5, 3, len(codes), dtype=np.float32)
    exact = exact_keys(codes[None], dtype, scales)
    assert (exact == numbers(codes, dtype) * scales.astype(np.float64)).all()
    assert (keys_to_bytes(exact.astype(np.float32), dtype, scales) == codes).all()
    row = np.concatenate((codes, np.array([0.25], dtype=np.float32).view(np.uint8)))
    assert (exact_values(row, dtype) == numbers(codes, dtype) / 4).all()


@pytest.mark.parametrize("dtype", CODES)
def test_prompt_rows_and_appended_rows_are_stored_by_the_same_definition(dtype: str) -> None:
    policy, decoded = kept([PROMPT], dtype, num_tokens=20)
    for layer in range(MODEL.shape.num_layers):
        keys, values = policy.rows("r0", layer, K), policy.rows("r0", layer, V)
        assert keys.shape[1] == len(PROMPT) + 19
        expected = defined(keys, dtype, policy.scales["r0"][layer])
        assert policy.stored["r0", layer, K].tobytes() == expected.tobytes()
        assert policy.stored["r0", layer, V].tobytes() == defined(values, dtype).tobytes()
    assert decoded.verdict.worst_ratio <= 1


@pytest.mark.parametrize("dtype", CODES)
def test_the_largest_key_of_a_channel_with_its_margin_is_the_largest_code(dtype: str) -> None:
    policy, _ = kept([PROMPT[:40]], dtype, num_tokens=2)
    for layer, scales in enumerate(policy.scales["r0"]):
        largest = np.abs(policy.given["r0", layer, K][0]).max(axis=1).astype(np.float64)
        np.testing.assert_allclose(scales * CODE_RANGE[dtype], largest * key_scales.MARGIN, rtol=1e-6)


def test_a_channel_that_is_zero_or_not_a_number_has_the_scale_1() -> None:
    with open_platform(SMALL) as platform:
        engine = Engine(platform, KVShape(1, 1, 1, 4, 4, "int8"))
        scales = engine.table(8).scales
        assert scales is not None
        scales.measure(0, np.array([[[0, 1e-45, np.nan, np.inf], [0, 0, 1, 2]]], dtype=np.float32))
        assert scales.values.tolist() == [[[1, 1, 1, 1]]]


# -- policies -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> dict[str, Decoded]:
    return {dtype: decode(MODEL, [PROMPT], "all-gpu", dtype=dtype) for dtype in CODES}


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_within_the_bound_on_what_is_stored(policy: str, dtype: str) -> None:
    decoded = decode(MODEL, [PROMPT], policy, dtype=dtype, num_tokens=20, **FEW.get(policy, {}))
    assert decoded.verdict.checked == 19 * 3 * 6
    assert 0 < decoded.verdict.max_error <= decoded.verdict.error_bound
    assert decoded.verdict.worst_ratio <= 1
    if policy in FEW:
        assert decoded.verdict.error_vs_dense > decoded.verdict.error_bound, "rows were left out"


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_attention_over_all_rows_gives_the_same_bits_wherever_they_lie(
    policy: str, dtype: str, reference: dict[str, Decoded]
) -> None:
    options = ALL.get(policy, {}) | ({"shares": dict.fromkeys(MEMORIES, 1.0)} if policy == "split-all" else {})
    decoded = decode(MODEL, [PROMPT], policy, dtype=dtype, **options)
    assert decoded.tokens == reference[dtype].tokens
    assert decoded.outputs.tobytes() == reference[dtype].outputs.tobytes()
    if policy == "split-all":
        assert set(decoded.placement) == set(MEMORIES)
        assert all(decoded.devices[memory].bytes_read >= decoded.placement[memory] for memory in MEMORIES)
    assert decoded.devices["emu:dram"].bytes_read > 0


@pytest.mark.parametrize("dtype", CODES)
def test_attention_over_codes_is_near_attention_over_what_they_were_made_of(
    dtype: str, reference: dict[str, Decoded]
) -> None:
    first = slice(0, 6 * 16)  # the first layer of the first step, whose queries are the same in every type
    plain = decode(MODEL, [PROMPT], "all-gpu").outputs[first]
    coded = reference[dtype].outputs[first]
    assert 0 < np.linalg.norm(coded - plain) < 0.1 * np.linalg.norm(plain)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("policy", ["all-gpu", "cpu-attention", "split-all", "topk-blocks", "cluster-topk"])
def test_requests_in_one_batch_have_their_own_scales(policy: str, dtype: str) -> None:
    prompts = [PROMPT[:40], PROMPT[:200], PROMPT[50:120]]
    together = decode(MODEL, prompts, policy, dtype=dtype, **ALL.get(policy, {}))
    alone = [decode(MODEL, [prompt], policy, dtype=dtype, **ALL.get(policy, {})) for prompt in prompts]
    assert together.verdict.worst_ratio <= 1
    assert together.tokens == [one.tokens[0] for one in alone]


@pytest.mark.parametrize("dtype", CODES)
def test_rows_of_a_batch_are_stored_by_the_scales_of_their_request(dtype: str) -> None:
    policy, _ = kept([PROMPT[:40], PROMPT[60:90]], dtype)
    assert (policy.scales["r0"] != policy.scales["r1"]).mean() > 0.9
    for name, scales in policy.scales.items():
        for layer in range(MODEL.shape.num_layers):
            expected = defined(policy.rows(name, layer, K), dtype, scales[layer])
            assert policy.stored[name, layer, K].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("policy", ["split-all", "stream-offload", "topk-blocks"])
def test_a_step_of_several_tokens_is_within_the_bound(policy: str, dtype: str) -> None:
    with open_platform(SMALL, check_hazards=True) as platform:
        engine = Engine(platform, kv_shape(MODEL, dtype, 16, 16))
        modules = Modules(MODEL.module)
        recorder = Recorder(engine.shape, modules.scale)
        made = find_policy(policy)(engine)
        decoder = Decoder(modules, engine, made, 5, recorder)
        request = Request("r0", [*PROMPT[:90]], 120)
        engine.loop.run(decoder.adopt(request, dense_of(MODEL, tuple(PROMPT[:90]), 6).prefill))
        for turn in (PROMPT[90:95], PROMPT[95:100]):
            request.tokens.extend(turn)

            async def step() -> None:
                (token,) = await decoder.step([request], q_len=5)
                assert request.tokens.pop() == token

            engine.loop.run(step())
        verdict = recorder.verdict()
        engine.loop.run(made.release(request))
        engine.close()
    assert verdict.checked == 10 * 3 * 6
    assert verdict.worst_ratio <= 1


@pytest.mark.parametrize("dtype", CODES)
def test_top_k_picks_the_blocks_whose_mean_key_scores_highest(dtype: str) -> None:
    checked = 0

    class Checks(TopkBlocks):
        async def place(self, request: Request, layer: int, keys: Float32, values: Float32) -> None:
            await super().place(request, layer, keys, values)
            request.state[f"keys {layer}"] = keys.copy()

        async def _select(self, layer: int, batch: Batch) -> list[Chosen]:
            nonlocal checked
            (chosen,) = await super()._select(layer, batch)
            (request,) = batch.requests
            scales, keys = request.blocks.scales, request.state[f"keys {layer}"]
            assert scales is not None
            raw = np.empty(batch.queries.spans.nbytes, dtype=np.uint8)
            await self.engine.read(batch.queries, raw, [batch.ready])
            queries = raw.view(np.float32).reshape(2, 3, -1) / scales.values[layer][:, None].astype(np.float64)
            stored = numbers(defined(keys, dtype, scales.values[layer]), dtype).reshape(keys.shape)
            stored = stored * scales.values[layer][:, None]
            first, last, k = self.candidates(request, layer)
            assert 0 < k < last - first
            means = stored[:, : last * 16].reshape(2, last, 16, -1).mean(axis=2)
            scores = np.einsum("hgd,hbd->hgb", queries, means).max(axis=1)
            for head in range(2):
                mine = np.isin(np.arange(first, last), chosen[1][chosen[0] == head])
                assert mine.sum() == k
                assert scores[head][first:][mine].min() >= scores[head][first:][~mine].max() - 1e-4
                checked += 1
            return [chosen]

    decode(MODEL, [PROMPT], lambda engine: Checks(engine, **FEW["topk-blocks"]), dtype=dtype)
    assert checked == 5 * 3 * 2


@pytest.mark.parametrize("dtype", ["float32", *CODES])
def test_predicted_queries_have_the_scales_that_queries_have(dtype: str) -> None:
    checked = 0

    class Predicts(AllGpu):
        async def layer_input(self, layer: int, batch: Batch) -> None:
            nonlocal checked
            assert batch.predict is not None
            raw, predicted = np.empty((2, batch.queries.spans.nbytes), dtype=np.uint8)
            there = self.engine.scratch(self.engine.dense.memory, len(raw)).at(0, len(raw))
            await self.engine.read(batch.queries, raw, [batch.ready])
            prediction = batch.predict(layer, there)
            await self.engine.read(there, predicted, [prediction.ready])
            assert prediction.queries is not None
            assert prediction.queries.tobytes() == predicted.tobytes() == raw.tobytes()
            checked += 1

    decode(MODEL, [PROMPT[:40], PROMPT[40:80]], Predicts, dtype=dtype)
    assert checked == 5 * 3


@pytest.mark.parametrize("dtype", CODES)
def test_the_last_queries_of_the_prompt_have_the_scales_too(dtype: str) -> None:
    prefill = dense_of(MODEL, tuple(PROMPT[:40]), 6).prefill

    class Sees(AllGpu):
        async def prefilled(self, request: Request, layer: int, queries: Float32) -> None:
            scales = request.blocks.scales
            assert scales is not None
            expected = prefill.queries[layer] * np.repeat(scales.values[layer], 3, axis=0)
            assert (queries == expected).all()
            assert (queries != prefill.queries[layer]).any()

    decode(MODEL, [PROMPT[:40]], Sees, dtype=dtype)


# -- keys beyond the codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "beyond"), [("int8", 127.5), ("fp8_e4m3", 464.0)])
def test_keys_beyond_the_largest_code_are_counted(dtype: str, beyond: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_scales, "MARGIN", 0.9)
    policy, decoded = kept([PROMPT[:40], PROMPT[50:120]], dtype, num_tokens=20)
    for name, scales in policy.scales.items():
        expected, new = 0, 0
        for layer in range(MODEL.shape.num_layers):
            keys = np.abs(policy.rows(name, layer, K)).astype(np.float64)
            over = keys > scales[layer][:, None] * beyond * (1 + 1e-7)
            expected += int(over.sum())
            new += int(over[:, -19:].sum())
        assert policy.clipped[name] == expected > new > 0
    assert decoded.verdict.worst_ratio <= 1, "the oracle knows what became of them"


def test_results_say_how_many_elements_of_keys_were_beyond_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def clipped(dtype: str) -> int:
        comparison = compare(
            MODEL,
            tiny_workload(60),
            lambda _: open_platform(SMALL),
            [PolicyRequest("all-gpu")],
            num_tokens=4,
            kv_dtype=dtype,
        )
        assert comparison.failures == []
        return int(comparison.to_json()["policies"][0]["clipped_keys"])

    monkeypatch.setattr(key_scales, "MARGIN", 0.9)
    assert clipped("int8") > 0
    assert clipped("float32") == 0


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(CODES))
def test_what_is_not_counted_is_stored_within_half_a_step(seed: int, dtype: str) -> None:
    random = np.random.default_rng(seed)
    with open_platform(SMALL) as platform:
        table = Engine(platform, KVShape(1, 1, 1, 8, 8, dtype)).table(8)  # type: ignore[arg-type]  # one of CODES
        assert table.scales is not None
        table.scales.measure(0, random.normal(size=(1, 4, 8)).astype(np.float32))
        later = (random.normal(size=(1, 1, 8)) * 3).astype(np.float32)
        before = table.scales.clipped
        table.counted(0, later)
        scales = table.scales.values[0]
        stored = exact_keys(keys_to_bytes(later, dtype, scales), dtype, scales)
        step = (
            1.0
            if dtype == "int8"
            else np.maximum(2.0 ** (np.floor(np.log2(np.abs(stored / scales) + 1e-9)) - 3), 2.0**-9)
        )
        far = np.abs(stored - later) > scales * step * (0.5 + 1e-4)
        assert table.scales.clipped - before == int(far.sum())


# -- machines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
def test_rows_take_a_byte_for_each_element_and_a_scale_for_each_row_of_values(dtype: Any) -> None:
    shape = KVShape(3, 2, 3, 64, 48, dtype, 16, 16)
    assert (shape.row_nbytes(K), shape.row_nbytes(V)) == (64, 52)
    assert shape.block_nbytes == 16 * 64
    assert KVShape(3, 2, 3, 64, 64, dtype, 16, 16).block_nbytes == 16 * 68


@pytest.mark.parametrize("dtype", CODES)
def test_codes_take_less_memory_and_less_of_the_links(dtype: str, reference: dict[str, Decoded]) -> None:
    plain = decode(MODEL, [PROMPT], "all-gpu")
    blocks = 3 * 2 * 2 * 14
    assert plain.placement == {"emu:gpu": blocks * 16 * 16 * 4}
    assert reference[dtype].placement == {"emu:gpu": blocks * 16 * (16 + 4)}
    percent = {"emu:dram": 1.0}
    wide, narrow = (decode(MODEL, [PROMPT], "stream-offload", dtype=t, percent=percent) for t in ("float32", dtype))
    elements = 5 * 3 * 2 * len(PROMPT) * 16  # K of every step, layer, head
    assert wide.links["pcie"].bytes_forward >= elements * 8
    assert elements * 2 <= narrow.links["pcie"].bytes_forward < 0.4 * wide.links["pcie"].bytes_forward


def test_rows_on_a_device_that_does_not_know_the_type_are_attended_by_the_host(reference: dict[str, Decoded]) -> None:
    shares = {"emu:pnm": 1.0}
    known = decode(MODEL, [PROMPT], "split-all", shares=shares)
    unknown = decode(MODEL, [PROMPT], "split-all", dtype="int8", shares=shares)
    assert known.devices["emu:pnm"].flops > 0
    assert unknown.devices["emu:pnm"].flops == 0
    assert unknown.devices["emu:dram"].flops > 0
    assert unknown.links["pnm"].bytes_forward + unknown.links["pnm"].bytes_back >= 5 * unknown.placement["emu:pnm"]
    assert unknown.outputs.tobytes() == reference["int8"].outputs.tobytes()


@pytest.mark.parametrize("missing", ['"quantize", ', ', "int8"'])
def test_a_device_that_cannot_store_codes_is_refused_by_name(missing: str, tmp_path: Path) -> None:
    poorer = PROFILES["gpu"].replace(missing, "")
    with open_machine(tmp_path, profiles={"gpu": poorer}) as platform:
        with pytest.raises(ConfigurationError, match=r"emu:gpu runs the modules .* does not quantize to int8"):
            Engine(platform, kv_shape(MODEL, "int8"))
        Engine(platform, kv_shape(MODEL, "float32")).close()


def test_cores_that_do_not_know_the_type_are_refused_before_anything_is_placed(tmp_path: Path) -> None:
    poorer = PROFILES["dram"].replace(', "int8"', "")
    with (
        open_machine(tmp_path, profiles={"dram": poorer}) as platform,
        pytest.raises(ConfigurationError, match="nobody attends over int8 rows on emu:dram"),
    ):
        decode(MODEL, [PROMPT], "cpu-attention", dtype="int8", platform=platform)


def test_a_gpu_without_room_for_the_scales_refuses_the_request() -> None:
    with open_platform(SMALL, overrides={"devices.gpu.capacity": 4096}) as platform:
        engine = Engine(platform, KVShape(30, 3, 3, 64, 64, "int8"))
        with pytest.raises(TierTooSmall, match=r"emu:gpu is too small: 23,040 bytes .* scales of keys"):
            engine.table(100)


@pytest.mark.parametrize("dtype", CODES)
def test_a_conversation_through_generate_stores_codes_too(dtype: Any) -> None:
    model = tiny_model()
    plain = torch.tensor([PROMPT])
    more = torch.tensor([tiny_workload(30, seed=5).token_ids])

    def converse(**given: Any) -> list[int]:
        model.module.set_attn_implementation("tierloop")
        with (
            open_platform(SMALL, check_hazards=True) as platform,
            TieredCache(model.module, platform, max_tokens=300, **given) as cache,
        ):
            tokens = plain
            for turn in (plain[:, :0], more):
                tokens = torch.cat((tokens, turn), dim=1)
                mask = torch.ones_like(tokens)
                tokens = model.module.generate(  # type: ignore[operator]  # transformers types it as a tensor
                    tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, **cache.generate_arguments()
                )
            return [int(t) for t in tokens[0, len(PROMPT) :]]

    apart, together = converse(policy="split-all", kv_dtype=dtype), converse(policy="all-gpu", kv_dtype=dtype)
    assert apart == together
    (decoded,) = decode(MODEL, [PROMPT], "all-gpu", dtype=dtype).tokens
    assert apart[:6] == decoded


@pytest.mark.model
@pytest.mark.parametrize("dtype", CODES)
def test_smollm2_finds_the_needle_in_codes(dtype: str) -> None:
    model = load_model(cache=MODEL_CACHE)
    comparison = compare(
        model,
        needle_prompt(model, 1024, new_tokens=4),
        lambda _: open_platform("demo"),
        [PolicyRequest("split-all")],
        num_tokens=4,
        kv_dtype=dtype,
    )
    (result,) = comparison.policies
    assert result.answered
    assert comparison.failures == []
    assert sum(result.placement.values()) < 0.5 * 30 * 2 * 3 * 64 * 4 * 1024
