"""The modules of a Hugging Face causal LM, one stage at a time.

A decoder layer is norm + projections (`project`), attention (somebody else's), and output projection + MLP (`finish`).
Weights, rotary positions and architecture come from the model itself. What is supported is named by structure: pre-norm
decoder layers with separate q/k/v projections (Llama, Mistral, SmolLM2, Qwen2, Qwen3, Phi-4-mini's unfused relatives);
anything with another structure is refused by name rather than computed wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierloop.runtime.stages import Float32, Int64, StageCost

Tensor = torch.Tensor


class UnsupportedModel(ValueError):
    """The architecture has a part that the layer-stepping decoder does not know; the message names it."""


class Modules:
    """Stages of a causal LM in evaluation mode. Raises UnsupportedModel."""

    def __init__(self, module: Any) -> None:
        core: Any = getattr(module, "model", None)
        for part in ("layers", "embed_tokens", "norm", "rotary_emb"):
            if not hasattr(core, part):
                raise UnsupportedModel(f"{type(module).__name__} has no model.{part}; Llama-like models have")
        self.core = core
        self.head: Any = module.lm_head
        self.layers: list[Any] = list(self.core.layers)
        for number, layer in enumerate(self.layers):
            _check_layer(type(module).__name__, number, layer)
        config = module.config
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise UnsupportedModel(f"{type(module).__name__} uses sliding-window attention")
        for option in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, option, None):
                raise UnsupportedModel(f"{type(module).__name__} uses {option}")
        attention = self.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.scale: float = float(attention.scaling)
        self._rotate = vars(sys.modules[type(attention).__module__])["apply_rotary_pos_emb"]
        self.hidden: int = config.hidden_size
        self.queries = [_cost(la.self_attn.q_proj, la.input_layernorm) for la in self.layers]
        self.projections = [
            _cost(la.self_attn.q_proj, la.self_attn.k_proj, la.self_attn.v_proj, la.input_layernorm)
            for la in self.layers
        ]
        self.finishes = [_cost(la.self_attn.o_proj, la.mlp, la.post_attention_layernorm) for la in self.layers]
        self.head_cost = _cost(self.head, self.core.norm)

    def begin(self, tokens: Sequence[Sequence[int]], positions: Int64) -> TensorActivations:
        """Start a step of the decoder (stages.py)."""
        return TensorActivations(self, tokens, positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 (n, q_len) → (n, q_len, hidden)."""
        embedded: Tensor = self.core.embed_tokens(tokens)
        return embedded

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (n, q_len, rotary dim) of int64 positions (n, q_len)."""
        cos, sin = self.core.rotary_emb(hidden, position_ids=positions)
        return cos, sin

    def project(self, number: int, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer from its input: (n, heads, q_len, head_dim) each, rotated."""
        layer = self.layers[number]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (*normed.shape[:-1], -1, self.head_dim)
        queries, keys = attention.q_proj(normed).view(shape), attention.k_proj(normed).view(shape)
        values = attention.v_proj(normed).view(shape).transpose(1, 2)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys = self._rotate(queries.transpose(1, 2), keys.transpose(1, 2), *rotary)
        return queries, keys, values

    def project_queries(self, number: int, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The queries of `project` alone: (n, heads, q_len, head_dim)."""
        layer = self.layers[number]
        normed = layer.input_layernorm(hidden)
        queries = layer.self_attn.q_proj(normed).view(*normed.shape[:-1], -1, self.head_dim)
        if hasattr(layer.self_attn, "q_norm"):
            queries = layer.self_attn.q_norm(queries)
        queries = queries.transpose(1, 2)
        rotated: Tensor = self._rotate(queries, queries, *rotary)[0]
        return rotated

    def finish(self, number: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and the attention output (n, q_len, q heads · head_dim)."""
        layer = self.layers[number]
        hidden = hidden + layer.self_attn.o_proj(attended)
        done: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return done

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, q_len, hidden) → logits of the last position, (n, vocab)."""
        logits: Tensor = self.head(self.core.norm(hidden[:, -1]))
        return logits


class TensorActivations:
    """The activations of one step, in the framework's tensors."""

    def __init__(self, modules: Modules, tokens: Sequence[Sequence[int]], positions: Int64) -> None:
        self._modules = modules
        with torch.inference_mode():
            self._hidden = modules.embed(torch.tensor([list(mine) for mine in tokens]))
            self._rotary = modules.rotary(self._hidden, torch.from_numpy(positions))

    @property
    def hidden(self) -> Float32:
        """What the next layer begins with: (n, q_len, hidden)."""
        hidden: Float32 = self._hidden.float().numpy()
        return hidden

    def project(self, layer: int) -> tuple[Float32, Float32, Float32]:
        """Queries, keys and values of a layer."""
        with torch.inference_mode():
            queries, keys, values = self._modules.project(layer, self._hidden, self._rotary)
            return _array(queries.transpose(1, 2)), _array(keys), _array(values)

    def queries(self, layer: int) -> Float32:
        """The queries alone."""
        with torch.inference_mode():
            return _array(self._modules.project_queries(layer, self._hidden, self._rotary).transpose(1, 2))

    def finish(self, layer: int, output: NDArray[np.uint8]) -> None:
        """Take the attention output through the rest of the layer."""
        with torch.inference_mode():
            attended = torch.from_numpy(output.view(np.float32).copy()).view(*self._hidden.shape[:2], -1)
            self._hidden = self._modules.finish(layer, self._hidden, attended.to(self._hidden.dtype))

    def logits(self) -> Float32:
        """Logits of the last position."""
        with torch.inference_mode():
            return _array(self._modules.logits(self._hidden))


def _array(tensor: Tensor) -> Float32:
    array: Float32 = tensor.float().contiguous().numpy()
    return array


def _check_layer(model: str, number: int, layer: Any) -> None:
    where = f"{model} layer {number}"
    for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
        if not hasattr(layer, part):
            raise UnsupportedModel(f"{where} has no {part}; pre-norm decoder layers have")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "scaling"):
        if not hasattr(layer.self_attn, part):
            raise UnsupportedModel(f"{where}: its attention has no {part}; only separate q/k/v projections are known")
    for part in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        if hasattr(layer, part):
            raise UnsupportedModel(f"{where} has a {part}, which this decoder does not run")


def _cost(*modules: Any) -> StageCost:
    """2 FLOPs per weight and token; every weight is read once per launch."""
    parameters = [p for m in modules for p in m.parameters()]
    return StageCost(
        sum(2 * p.numel() for p in parameters if p.ndim > 1), sum(p.numel() * p.element_size() for p in parameters)
    )
