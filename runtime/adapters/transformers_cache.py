"""The separate door: plain `model.generate` with its KV cache on a platform's devices.

`TieredCache` is a transformers cache whose layers keep K and V rows on devices by a policy; the attention function
`tierloop` computes decode attention there. Prefill attention stays with the framework; its rows are stored as they
pass. The layer-stepping decoder does more (it overlaps layers and charges the dense work); this door is for code that
already calls `generate`.

    model.set_attn_implementation("tierloop")
    with TieredCache(model, platform, policy="split-all", max_tokens=4200) as cache:
        model.generate(ids, **cache.generate_arguments(), max_new_tokens=32)

Batches of equal length work with policies that serve several requests; multi-turn prompts over a filled cache work.
What cannot be done is refused by name with `AdapterRefusal`: padding masks, beam search, crop and assisted decoding,
sliding windows, soft-capping, attention dropout, attention weights. transformers 5.16 to 5.24 by feature detection.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tierloop.devices.kernels.contract import DType
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region
from tierloop.devices.registry import entry
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decoder import folded
from tierloop.runtime.engine import Engine
from tierloop.runtime.policy import Batch, Policy, Request, make
from tierloop.runtime.stages import LAST_QUERIES

Float = NDArray[np.float32]
NAME = "tierloop"


class AdapterRefusal(ValueError):
    """`generate` asked for something that this door cannot do exactly; the message names it."""


class TieredCache(Cache):
    """A cache for one `generate` call or a conversation: `max_tokens` bounds prompt and generated tokens together.

    `model` is the transformers module. Options are the policy's. Raises ConfigurationError for an unknown policy or
    option; TierTooSmall, at the first forward, if the rows do not fit the platform's memories.
    """

    def __init__(
        self,
        model: Any,
        platform: Platform,
        policy: str = "split-all",
        max_tokens: int = 4096,
        kv_dtype: DType = "float32",
        **options: Any,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        for option in ("sliding_window", "attn_logit_softcapping"):
            if getattr(config, option, None) and getattr(config, f"use_{option}", True):
                raise AdapterRefusal(f"the model uses {option}; this door computes plain causal attention")
        self.session = _Session(
            platform,
            KVShape(config.num_hidden_layers, kv_heads, heads // kv_heads, head_dim, head_dim, kv_dtype),
            policy,
            options,
            max_tokens,
        )
        super().__init__(layers=[_TieredLayer(self.session, i) for i in range(config.num_hidden_layers)])
        parameters = inspect.signature(type(model).forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"

    def generate_arguments(self) -> dict[str, Any]:
        """The keyword under which this version of transformers takes a cache."""
        return {self._argument: self}

    def reset(self) -> None:
        """Forget every row and give the space back; the next forward begins a new request."""
        self.session.reset()

    def close(self) -> None:
        """Give back everything that was taken on the platform; the platform stays open."""
        self.session.close()

    def reorder_cache(self, beam_idx: Any) -> None:
        raise AdapterRefusal("beam search reorders the cache; use greedy decoding or sampling")

    def crop(self, *_: Any, **__: Any) -> None:
        raise AdapterRefusal("assisted decoding crops the cache; it is not supported")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise AdapterRefusal("several returned sequences repeat the cache; pass a larger batch instead")

    def batch_select_indices(self, indices: Any) -> None:
        raise AdapterRefusal("selecting rows of the batch is not supported")

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class _TieredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is partly typed
    """One layer: passes new rows on and remembers how many there are."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, session: _Session, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers is partly typed
        self._session = session
        self._layer = layer

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The same rows, marked with where their history lies: the attention function reads the mark."""
        self.is_initialized = True
        key_states = key_states.view(key_states.shape)
        key_states._tierloop = (self._session, self._layer)  # type: ignore[attr-defined]  # our mark on our own view
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._session.length(self._layer)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        return self._session.max_tokens

    get_max_cache_shape = get_max_length


class _Session:
    """Requests of one cache and the policy that serves them."""

    def __init__(
        self, platform: Platform, shape: KVShape, policy: str, options: dict[str, Any], max_tokens: int
    ) -> None:
        if max_tokens < 1:
            raise AdapterRefusal(f"max_tokens is {max_tokens}; at least 1 is needed")
        kind = entry("policies", policy)
        self.max_tokens = max_tokens
        self._engine = Engine(platform, shape)
        try:
            self._policy: Policy = make(kind, self._engine, options)
        except BaseException:
            self._engine.close()
            raise
        self._shape = shape
        self._requests: list[Request] = []
        self._stage: Region | None = None

    def length(self, layer: int) -> int:
        """Rows that a layer holds."""
        return int(self._requests[0].blocks.length[layer]) if self._requests else 0

    def prefill(self, layer: int, queries: Float, keys: Float, values: Float) -> None:
        """Store the prompt's rows: (n, heads, tokens, head_dim) each."""
        count = keys.shape[2]
        if layer == 0 and not self._requests:
            self._check(count)
            self._engine.loop.run(self._admit(keys.shape[0], count))

        async def place() -> None:
            for i, request in enumerate(self._requests):
                await self._policy.place(request, layer, keys[i], values[i])
                last = np.ascontiguousarray(queries[i, :, -LAST_QUERIES:].transpose(1, 0, 2))
                await self._policy.prefilled(request, layer, request.blocks.folded(layer, last))

        self._engine.loop.run(place())

    def attend(self, layer: int, queries: Float, keys: Float, values: Float, scale: float) -> Float:
        """Append new rows and attend: rows (n, kv heads, q_len, d); queries and output (n, q_len, q heads, d)."""
        n, q_len = queries.shape[:2]
        if n != len(self._requests):
            raise AdapterRefusal(f"a batch of {n} over a cache of {len(self._requests)} sequences")
        held = self.length(layer)
        self._check(held + q_len)
        output = np.empty((n, q_len, queries.shape[2], self._shape.head_dim_v), dtype=np.float32)

        async def run() -> None:
            for request, mine in zip(self._requests, keys, strict=True):
                request.blocks.counted(layer, mine)
            given = folded(layer, self._requests, queries), keys, values
            parts = [np.ascontiguousarray(a).view(np.uint8).reshape(-1) for a in given]
            segments, offset = [], 0
            stage = self._staging(layer, sum(p.nbytes for p in parts) + output.nbytes)
            for nbytes in (*(p.nbytes for p in parts), output.nbytes):
                segments.append(stage.at(offset, nbytes))
                offset += nbytes
            q, k, v, out = segments
            written = [self._engine.write(s, p) for s, p in zip((q, k, v), parts, strict=True)]
            positions = np.tile(np.arange(held, held + q_len, dtype=np.int64), (n, 1))
            for completion in written:
                await completion
            batch = Batch(self._requests, positions, q, k, v, out, written[-1], scale, [None] * n)
            await self._policy.layer_input(layer, batch)
            after = await self._policy.attend(layer, batch)
            await self._engine.read(out, output.view(np.uint8).reshape(-1), after)
            for completion in after:
                await completion

        self._engine.loop.run(run())
        return output

    def reset(self) -> None:
        """Release every request."""

        async def release() -> None:
            for request in self._requests:
                await self._policy.release(request)

        requests, loop = self._requests, self._engine.loop
        if requests:
            loop.run(release())
        self._requests = []

    def close(self) -> None:
        self.reset()
        self._engine.close()

    async def _admit(self, count: int, tokens: int) -> None:
        try:
            for i in range(count):
                request = Request(f"row {i}", [0] * tokens, self.max_tokens)
                request.table = self._engine.table(self.max_tokens)
                self._requests.append(request)
                await self._policy.admit(request)
        except BaseException:
            for request in self._requests:
                await self._policy.release(request)
            self._requests = []
            raise

    def _check(self, tokens: int) -> None:
        if tokens > self.max_tokens:
            raise AdapterRefusal(f"{tokens} tokens do not fit a cache made for max_tokens={self.max_tokens}")

    def _staging(self, layer: int, nbytes: int) -> Region:
        """One staging area, used by one layer at a time: each `attend` ends before the next begins."""
        if self._stage is None or self._stage.nbytes < nbytes:
            if self._stage is not None:
                self._engine.drop(self._stage)
            self._stage = self._engine.scratch(self._engine.dense.memory, nbytes)
        return self._stage


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function `tierloop`: query (n, q heads, q_len, d); key, value: the new rows (n, kv heads, q_len, d).

    Returns (n, q_len, q heads, d) and no weights.
    """
    mark = getattr(key, "_tierloop", None)
    if mark is None:
        raise AdapterRefusal(
            'attention "tierloop" needs a TieredCache: pass one to generate, or set another implementation'
        )
    for name in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise AdapterRefusal(f"{name} is set; this door computes plain causal attention")
    if dropout:
        raise AdapterRefusal("attention dropout is set; put the model in evaluation mode")
    if kwargs.get("output_attentions"):
        raise AdapterRefusal("attention weights are not kept")
    session, layer = mark
    held = session.length(layer)
    _check_mask(attention_mask, held, query.shape[2])
    if held == 0:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, is_causal=is_causal, **kwargs
        )
        session.prefill(layer, _float(query), _float(key), _float(value))
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = session.attend(layer, _float(query.transpose(1, 2)), _float(key), _float(value), scale)
    return torch.from_numpy(attended).to(query.dtype), None


def _check_mask(mask: torch.Tensor | None, held: int, q_len: int) -> None:
    """Only the causal mask is allowed."""
    if mask is None:
        return
    visible = mask if mask.dtype == torch.bool else mask == 0
    causal = torch.arange(held + q_len)[None, :] <= torch.arange(held, held + q_len)[:, None]
    if visible.shape[-2:] != causal.shape or not bool((visible == causal).all()):
        raise AdapterRefusal(
            "the attention mask hides tokens (padding?); pass prompts of equal length, without padding"
        )


def _float(tensor: torch.Tensor) -> Float:
    array: Float = tensor.detach().float().contiguous().numpy()
    return array


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
