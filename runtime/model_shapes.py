"""Models as shapes: what a phantom run needs of a model that nobody has to load.

Layers, widths, heads and vocabularies are those of the models' published configurations. Of the parameters only
matrices and the gains of the two norms of a layer and of the last one count: biases (OPT: everywhere; Qwen2.5: q, k and
v) and the norms of single heads (Qwen3) are ignored, less than 0.1 % of the weights. `tied` models have one matrix for
embedding and head. Learned positions (OPT: 2,048 and 2 more) count as stored weights; no step reads more than rows of
them.

A stage costs 2 FLOPs per element of its matrices and token and reads its weights once, as `Modules` counts them, so a
phantom run of a Llama-like model charges what the real one does. Attention itself is charged where it is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import DType
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.models import ModelShape
from tierloop.runtime.stages import Activations, StageCost, Stages

LARGEST_TABLE = 1024
"""Blocks per head that `block_tokens_for` aims at: tables stay small, and so does what is done for each block."""


@dataclass(frozen=True)
class KnownShape(ModelShape):
    """A model's shape and what its weights are made of; `context_length` is its own limit, in tokens."""

    name: str
    gated: bool
    tied: bool
    learned_positions: int = 0

    @property
    def projection_elements(self) -> int:
        """Elements of the q, k and v matrices of a layer."""
        return self.hidden * (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def finish_elements(self) -> int:
        """Elements of the output projection and the MLP of a layer: 3 matrices if gated, else 2."""
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        return self.num_q_heads * self.head_dim * self.hidden + mlp

    @property
    def num_weights(self) -> int:
        """All weights that are stored, embeddings included."""
        layer = self.projection_elements + self.finish_elements + 2 * self.hidden
        tables = self.vocab * (1 if self.tied else 2) + self.learned_positions + 1
        return self.num_layers * layer + tables * self.hidden

    def weight_nbytes(self, weight_item: int = 2) -> int:
        """Bytes of all weights, `weight_item` bytes each."""
        return self.num_weights * weight_item

    def kv_nbytes(self, item: int = 2) -> int:
        """K and V of one token over all layers, `item` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item

    def attention_flops(self, context: int) -> int:
        """FLOPs of one token's attention over `context` rows in one layer: q·k and p·v, 2 each per element."""
        return 4 * context * self.num_q_heads * self.head_dim

    def block_flops(self, context: int) -> int:
        """FLOPs of one token in one layer without its MLP: attention and the four projections."""
        output = self.num_q_heads * self.head_dim * self.hidden
        return self.attention_flops(context) + 2 * (self.projection_elements + output)


def _opt(name: str, num_layers: int, hidden: int, heads: int) -> KnownShape:
    return KnownShape(
        num_layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50_272, 2048, name, False, True, 2050
    )


def _gated(
    name: str,
    num_layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    ffn: int,
    vocab: int,
    context: int,
    tied: bool = False,
) -> KnownShape:
    """`heads` are q heads, KV heads, and the width of one."""
    return KnownShape(num_layers, hidden, *heads, ffn, vocab, context, name, True, tied)


MODELS: dict[str, KnownShape] = {
    shape.name: shape
    for shape in (
        _opt("opt-125m", 12, 768, 12),
        _opt("opt-1.3b", 24, 2048, 32),
        _opt("opt-2.7b", 32, 2560, 32),
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-30b", 48, 7168, 56),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        _gated("llama-2-7b", 32, 4096, (32, 32, 128), 11008, 32_000, 4096),
        _gated("llama-2-13b", 40, 5120, (40, 40, 128), 13824, 32_000, 4096),
        _gated("llama-2-70b", 80, 8192, (64, 8, 128), 28672, 32_000, 4096),
        _gated("llama-3-8b", 32, 4096, (32, 8, 128), 14336, 128_256, 8192),
        _gated("llama-3-8b-1048k", 32, 4096, (32, 8, 128), 14336, 128_256, 1_048_576),
        _gated("llama-3-70b", 80, 8192, (64, 8, 128), 28672, 128_256, 8192),
        _gated("llama-3.1-8b", 32, 4096, (32, 8, 128), 14336, 128_256, 131_072),
        _gated("llama-3.1-70b", 80, 8192, (64, 8, 128), 28672, 128_256, 131_072),
        _gated("llama-3.1-405b", 126, 16384, (128, 8, 128), 53248, 128_256, 131_072),
        _gated("llama-3.2-1b", 16, 2048, (32, 8, 64), 8192, 128_256, 131_072, tied=True),
        _gated("llama-3.2-3b", 28, 3072, (24, 8, 128), 8192, 128_256, 131_072, tied=True),
        _gated("qwen2.5-0.5b", 24, 896, (14, 2, 64), 4864, 151_936, 32_768, tied=True),
        _gated("qwen2.5-1.5b", 28, 1536, (12, 2, 128), 8960, 151_936, 32_768, tied=True),
        _gated("qwen2.5-3b", 36, 2048, (16, 2, 128), 11008, 151_936, 32_768, tied=True),
        _gated("qwen2.5-7b", 28, 3584, (28, 4, 128), 18944, 152_064, 32_768),
        _gated("qwen2.5-14b", 48, 5120, (40, 8, 128), 13824, 152_064, 32_768),
        _gated("qwen2.5-32b", 64, 5120, (40, 8, 128), 27648, 152_064, 32_768),
        _gated("qwen2.5-72b", 80, 8192, (64, 8, 128), 29568, 152_064, 32_768),
        _gated("qwen3-0.6b", 28, 1024, (16, 8, 128), 3072, 151_936, 40_960, tied=True),
        _gated("qwen3-1.7b", 28, 2048, (16, 8, 128), 6144, 151_936, 40_960, tied=True),
        _gated("qwen3-4b", 36, 2560, (32, 8, 128), 9728, 151_936, 40_960, tied=True),
        _gated("qwen3-8b", 36, 4096, (32, 8, 128), 12288, 151_936, 40_960),
        _gated("qwen3-14b", 40, 5120, (40, 8, 128), 17408, 151_936, 40_960),
        _gated("qwen3-32b", 64, 5120, (64, 8, 128), 25600, 151_936, 40_960),
        _gated("mistral-7b", 32, 4096, (32, 8, 128), 14336, 32_768, 32_768),
        _gated("phi-4-mini", 32, 3072, (24, 8, 128), 8192, 200_064, 131_072, tied=True),
        _gated("phi-3-mini", 32, 3072, (32, 32, 96), 8192, 32_064, 4096),
        _gated("smollm2-135m", 30, 576, (9, 3, 64), 1536, 49_152, 8192, tied=True),
    )
}
"""By name. mistral-7b is v0.3; the vocabularies of Qwen3, Phi-3-mini and SmolLM2 are those of their configurations."""


def find_model(name: str) -> KnownShape:
    """The model of that name. Raises ConfigurationError with the near names."""
    if name not in MODELS:
        raise ConfigurationError(f"model {name!r}: no shape of that name is known; {nearest(name, list(MODELS))}")
    return MODELS[name]


def block_tokens_for(context: int, split_tokens: int = 64) -> int:
    """Tokens per block so that a head has at most 1,024 blocks: the splits of a block are a power of two."""
    splits = -(-context // split_tokens)
    return split_tokens << max(-(-splits // LARGEST_TABLE) - 1, 0).bit_length()


def cache_shape(
    model: ModelShape, dtype: DType = "bfloat16", block_tokens: int = 64, split_tokens: int = 64
) -> KVShape:
    """The KV cache of a model. Raises ConfigurationError for an unknown dtype or blocks that splits do not divide."""
    group = model.num_q_heads // model.num_kv_heads
    width = model.head_dim
    return KVShape(model.num_layers, model.num_kv_heads, group, width, width, dtype, block_tokens, split_tokens)


@dataclass(frozen=True)
class ShapeStages:
    """Stages that cost what a model's do and compute nothing: `begin` answers None."""

    hidden: int
    scale: float
    head_cost: StageCost
    projections: Sequence[StageCost]
    queries: Sequence[StageCost]
    finishes: Sequence[StageCost]

    @classmethod
    def of_shape(cls, model: KnownShape, weight_item: int = 2) -> ShapeStages:
        """The costs of a known shape whose weights have `weight_item` bytes each."""

        def cost(matrices: int) -> StageCost:
            """A stage of these matrices and the norm before it."""
            return StageCost(2 * matrices, (matrices + model.hidden) * weight_item)

        layers = model.num_layers
        return cls(
            model.hidden,
            model.head_dim**-0.5,
            cost(model.vocab * model.hidden),
            [cost(model.projection_elements)] * layers,
            [cost(model.hidden * model.num_q_heads * model.head_dim)] * layers,
            [cost(model.finish_elements)] * layers,
        )

    @classmethod
    def of(cls, stages: Stages) -> ShapeStages:
        """The costs of real stages, so that a phantom run charges what the real one does."""
        return cls(
            stages.hidden,
            stages.scale,
            stages.head_cost,
            list(stages.projections),
            list(stages.queries),
            list(stages.finishes),
        )

    def begin(self, tokens: Sequence[Sequence[int]], positions: NDArray[np.int64]) -> Activations | None:
        """Shapes only: there is nothing to compute."""
        return None
