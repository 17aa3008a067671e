"""Prefill and the dense reference: one run of plain transformers `generate`, shared by every policy.

Prompt K and V come out of the framework's own cache, as float32 per layer. The same run gives the tokens that every
exact policy must reproduce. Greedy, float32, no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierloop.runtime.models import Model
from tierloop.runtime.modules import Modules
from tierloop.runtime.stages import LAST_QUERIES, Prefill
from tierloop.runtime.workloads import WorkloadError


@dataclass(frozen=True)
class Dense:
    """What plain `generate` produced after the prompt, the end-of-sequence token included."""

    tokens: tuple[int, ...]
    text: str
    prefill: Prefill


def generate_dense(
    model: Model, token_ids: Sequence[int], num_tokens: int, progress: Callable[[int], None] | None = None
) -> Dense:
    """Prefill and `num_tokens` greedy tokens with plain transformers. Raises WorkloadError if they do not fit.

    `progress` is called with the number of tokens so far, from 0.
    """
    if num_tokens < 1:
        raise WorkloadError(f"{num_tokens} new tokens were asked for; at least 1 is needed")
    if len(token_ids) < 1:
        raise WorkloadError("the prompt is empty")
    limit = model.shape.context_length
    if len(token_ids) + num_tokens > limit:
        raise WorkloadError(
            f"a prompt of {len(token_ids)} tokens and {num_tokens} new ones do not fit the model's context of {limit}"
        )
    modules = Modules(model.module)
    inputs: list[torch.Tensor] = []

    def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if len(inputs) < len(modules.layers):
            inputs.append(hidden[:, -LAST_QUERIES:].clone())

    hooks = [la.register_forward_pre_hook(keep_input, with_kwargs=True) for la in modules.layers]
    seen = [0]

    def count(_: Any, __: Any, ___: Any) -> None:
        if progress is not None:
            progress(seen[0])
        seen[0] += 1

    hooks.append(model.module.register_forward_hook(count))
    prompt = torch.tensor([list(token_ids)])
    try:
        with torch.inference_mode():
            run = model.module.generate(  # type: ignore[operator]  # transformers types `generate` as a tensor
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                use_cache=True,
            )
            queries = _last_queries(modules, inputs, len(token_ids))
    finally:
        for hook in hooks:
            hook.remove()
    generated = tuple(run.sequences[0, len(token_ids) :].tolist())
    layers = (run["cache"] if "cache" in run else run["past_key_values"]).layers
    keep = slice(0, len(token_ids))
    prefill = Prefill(
        tuple(token_ids),
        tuple(np.ascontiguousarray(la.keys[0, :, keep].float().numpy()) for la in layers),
        tuple(np.ascontiguousarray(la.values[0, :, keep].float().numpy()) for la in layers),
        queries,
        generated[0],
    )
    return Dense(generated, text_of(model, generated), prefill)


def text_of(model: Model, tokens: Sequence[int]) -> str:
    """Tokens as text, without special tokens."""
    text = model.tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str), "one sequence decodes to one string"
    return text


def end_tokens(model: Model) -> frozenset[int]:
    """Tokens that end a sequence, as `generate` uses them."""
    ends = model.module.generation_config.eos_token_id
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def _last_queries(modules: Modules, inputs: list[torch.Tensor], num_tokens: int) -> tuple[NDArray[np.float32], ...]:
    queries = []
    for number, hidden in enumerate(inputs):
        positions = torch.arange(num_tokens - hidden.shape[1], num_tokens)[None]
        rotated, _, _ = modules.project(number, hidden, modules.rotary(hidden, positions))
        queries.append(np.ascontiguousarray(rotated[0].transpose(0, 1).float().numpy()))
    return tuple(queries)
