"""A seeded random Llama of a few thousand weights: every path of the runtime in milliseconds."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tierloop.runtime.models import Model, ModelShape
from tierloop.runtime.workloads import Workload


class Letters:
    """A tokenizer that shows tokens as numbers."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


def tiny_config(
    vocab: int,
    num_layers: int = 2,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    context: int = 1024,
) -> LlamaConfig:
    """Of a model whose weights are large enough that its greedy tokens depend on its whole context."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def tiny_model(
    num_layers: int = 3, num_q_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 16, context: int = 2048
) -> Model:
    """A model whose greedy tokens depend on its whole context, float32, the same weights every time."""
    torch.manual_seed(7)
    config = tiny_config(211, num_layers, num_q_heads, num_kv_heads, head_dim, context)
    config._attn_implementation = "sdpa"
    module = LlamaForCausalLM(config).train(False)
    module.generation_config.pad_token_id = 0
    shape = ModelShape(
        num_layers=num_layers,
        hidden=48,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn=96,
        vocab=211,
        context_length=context,
    )
    return Model("tiny", module, cast(Any, Letters()), shape, "0" * 64)


def tiny_workload(num_tokens: int = 300, seed: int = 0) -> Workload:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 211, (num_tokens,), generator=generator).tolist()
    return Workload("random", tokens)
