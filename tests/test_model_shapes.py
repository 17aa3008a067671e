"""Shapes of models: the table of their caches, their weights, and what their stages cost."""

from __future__ import annotations

import pytest

from tests.tiny import tiny_model
from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.blocks import K, V
from tierloop.runtime.model_shapes import MODELS, KnownShape, ShapeStages, block_tokens_for, cache_shape, find_model
from tierloop.runtime.modules import Modules

KV_NBYTES = {
    "opt-125m": 36_864,
    "opt-1.3b": 196_608,
    "opt-2.7b": 327_680,
    "opt-6.7b": 524_288,
    "opt-13b": 819_200,
    "opt-30b": 1_376_256,
    "opt-66b": 2_359_296,
    "opt-175b": 4_718_592,
    "llama-2-7b": 524_288,
    "llama-2-13b": 819_200,
    "llama-2-70b": 327_680,
    "llama-3-8b": 131_072,
    "llama-3-8b-1048k": 131_072,
    "llama-3-70b": 327_680,
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096,
    "llama-3.2-1b": 32_768,
    "llama-3.2-3b": 114_688,
    "qwen2.5-0.5b": 12_288,
    "qwen2.5-1.5b": 28_672,
    "qwen2.5-3b": 36_864,
    "qwen2.5-7b": 57_344,
    "qwen2.5-14b": 196_608,
    "qwen2.5-32b": 262_144,
    "qwen2.5-72b": 327_680,
    "qwen3-0.6b": 114_688,
    "qwen3-1.7b": 114_688,
    "qwen3-4b": 147_456,
    "qwen3-8b": 147_456,
    "qwen3-14b": 163_840,
    "qwen3-32b": 262_144,
    "mistral-7b": 131_072,
    "phi-4-mini": 131_072,
    "phi-3-mini": 393_216,
    "smollm2-135m": 23_040,
}
"""Bytes of K and V per token over all layers, in 16 bits: published configurations, counted by hand."""

WEIGHTS_GB = {
    "opt-6.7b": 13.3,
    "opt-13b": 25.7,
    "opt-30b": 59.9,
    "llama-3-8b": 16.06,
    "qwen3-8b": 16.4,
    "qwen3-14b": 29.5,
    "phi-4-mini": 7.7,
    "qwen2.5-7b": 15.2,
    "smollm2-135m": 0.269,
}
"""GB of weights in 16 bits, as their publishers give them."""


@pytest.mark.parametrize("name", list(MODELS))
def test_the_cache_of_every_model_has_the_published_size(name: str) -> None:
    model = find_model(name)
    assert model.kv_nbytes() == KV_NBYTES[name]
    shape = cache_shape(model, "float16")
    rows = shape.row_nbytes(K) + shape.row_nbytes(V)
    assert shape.num_layers * shape.num_kv_heads * rows == KV_NBYTES[name]
    assert shape.num_kv_heads * shape.group == model.num_q_heads


@pytest.mark.parametrize("name", list(WEIGHTS_GB))
def test_weights_have_the_published_size_within_a_percent(name: str) -> None:
    assert find_model(name).weight_nbytes(2) / 1e9 == pytest.approx(WEIGHTS_GB[name], rel=0.01)


def test_a_block_of_opt_13b_takes_the_flops_of_hybridgens_figure_at_64_ki_tokens() -> None:
    model = find_model("opt-13b")
    assert model.block_flops(65_536) == 4 * 65_536 * 5_120 + 8 * 5_120**2 == 1_551_892_480


def test_the_cache_of_opt_13b_outgrows_its_weights_at_31_400_tokens() -> None:
    model = find_model("opt-13b")
    assert model.weight_nbytes() / model.kv_nbytes() == pytest.approx(31_400, rel=0.01)


def test_stages_of_a_shape_cost_what_those_of_the_real_model_do() -> None:
    real = Modules(tiny_model().module)
    known = KnownShape(3, 48, 6, 2, 16, 96, 211, 2048, "tiny", True, False)
    assert ShapeStages.of_shape(known, 4) == ShapeStages.of(real)
    assert known.num_weights == sum(p.numel() for p in tiny_model().module.parameters())


def test_stages_of_a_shape_compute_nothing() -> None:
    stages = ShapeStages.of_shape(find_model("llama-3-8b"))
    assert stages.begin([[1]], None) is None  # type: ignore[arg-type]  # it looks at neither
    weights = sum(c.weight_nbytes for costs in (stages.projections, stages.finishes) for c in costs)
    assert weights + stages.head_cost.weight_nbytes == find_model("llama-3-8b").weight_nbytes() - 2 * 128_256 * 4096


def test_a_plain_mlp_has_two_matrices_and_a_gated_one_three() -> None:
    plain, gated = find_model("opt-6.7b"), find_model("llama-2-7b")
    assert plain.finish_elements == 4096 * 4096 + 2 * 4096 * 16384
    assert gated.finish_elements == 4096 * 4096 + 3 * 4096 * 11008


@pytest.mark.parametrize(
    ("context", "expected"), [(1, 64), (4096, 64), (65_536, 64), (65_537, 128), (131_072, 128), (1 << 20, 1024)]
)
def test_blocks_grow_so_that_a_head_has_about_a_thousand(context: int, expected: int) -> None:
    tokens = block_tokens_for(context)
    assert tokens == expected
    assert -(-context // tokens) <= 1024


def test_an_unknown_model_is_answered_with_the_near_names() -> None:
    with pytest.raises(ConfigurationError, match=r"'llama-3-8'.*did you mean 'llama-3-8b'"):
        find_model("llama-3-8")
