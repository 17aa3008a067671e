"""Stages of a model: what the layer-stepping decoder needs of it, whoever computes it.

A layer is norm + projections, attention (somebody else's), and output projection + MLP; at the end stand norm and
logits. `Modules` runs those of a Hugging Face model, `ShapeStages` has costs only (a phantom run), a hand-made model
computes them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.blocks import KVShape

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class StageCost:
    """FLOPs per token and bytes of weights of one stage."""

    flops_per_token: int
    weight_nbytes: int


LAST_QUERIES = 64
"""Queries of the prompt's end that are kept for policies which rank rows by them (SnapKV and KVDrive use 16 to 64)."""


@dataclass(frozen=True)
class Prefill:
    """A prompt's cache: per layer keys and values float32 (kv heads, tokens, head_dim), and the last queries.

    `queries` are float32 (n, q heads, head_dim) per layer, n ≤ 64; `first_token` is the first generated token.
    """

    tokens: tuple[int, ...]
    keys: tuple[Float32, ...]
    values: tuple[Float32, ...]
    queries: tuple[Float32, ...]
    first_token: int


def phantom_prefill(shape: KVShape, tokens: int) -> Prefill:
    """A prompt of the right shape that takes no memory."""

    def rows(*sizes: int) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), sizes)

    heads, layers = shape.num_kv_heads, shape.num_layers
    return Prefill(
        (),
        (rows(heads, tokens, shape.head_dim),) * layers,
        (rows(heads, tokens, shape.head_dim_v),) * layers,
        (rows(min(tokens, LAST_QUERIES), heads * shape.group, shape.head_dim),) * layers,
        0,
    )


class Activations(Protocol):
    """The activations of one step of a batch of n requests; touched by one stage at a time."""

    def project(self, layer: int) -> tuple[Float32, Float32, Float32]:
        """What a layer makes of the current activations, rotated, in C order.

        Queries (n, q_len, q heads, head_dim); keys (n, kv heads, q_len, head_dim) and values (…, head_dim_v). Asked for
        the next layer before this one is finished, they are its prediction.
        """

    def queries(self, layer: int) -> Float32:
        """The queries of `project` alone."""

    def finish(self, layer: int, output: NDArray[np.uint8]) -> None:
        """Take the attention output, the bytes of float32 (n, q_len, q heads, head_dim_v), through the layer's rest."""

    def logits(self) -> Float32:
        """Logits of the last position, (n, vocabulary)."""


class Stages(Protocol):
    """A model as its stages: what each costs, and the numbers."""

    @property
    def hidden(self) -> int:
        """Elements of one token's activations."""

    @property
    def scale(self) -> float:
        """What q·k is multiplied by."""

    @property
    def projections(self) -> Sequence[StageCost]:
        """Norm, projections and rotary positions, per layer."""

    @property
    def queries(self) -> Sequence[StageCost]:
        """Norm and query projection alone, per layer."""

    @property
    def finishes(self) -> Sequence[StageCost]:
        """Output projection and MLP, per layer."""

    @property
    def head_cost(self) -> StageCost:
        """Last norm and logits."""

    def begin(self, tokens: Sequence[Sequence[int]], positions: Int64) -> Activations | None:
        """Start a step: q_len tokens of each request at `positions`, int64 (n, q_len). None: there are no numbers."""
