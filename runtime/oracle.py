"""The float64 oracle of a run: what attention should have given on the same stored rows, and how far off it may be.

It keeps the queries and outputs of every step and layer, and the K and V rows of each request as they are stored, apart
from any device. What codes stand for is code · scale, exactly; queries are those of the model, without scales. After
the run it recomputes attention in float64 over the rows that were attended, and over all rows, and compares with an
analytic bound of runtime/bounds.py, which needs no tuning.

Products are einsums and not `@`: matrices this small gain nothing from a threaded BLAS, whose threads spin for each
other where the host is busy (a check of 15 steps of 2 layers at 4,096 rows: 0.28 s instead of 4.7 s of CPU time).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.blocks import KVShape
from tierloop.runtime.bounds import rounding_bound, softmax
from tierloop.runtime.dtypes import exact_keys, exact_values, keys_to_bytes, values_to_bytes
from tierloop.runtime.policy import Predicted
from tierloop.runtime.stages import Prefill

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Verdict:
    """Over all outputs: the largest error, the bound at that element, the largest ratio of error to bound, and the
    largest difference to attention over all rows. `checked` counts output vectors."""

    max_error: float = 0.0
    error_bound: float = 0.0
    worst_ratio: float = 0.0
    error_vs_dense: float = 0.0
    checked: int = 0


@dataclass
class _Step:
    position: int
    query: NDArray[np.float32]
    output: NDArray[np.float32]
    attended: list[Int64] | None
    unit: int


@dataclass
class _Rows:
    """Stored rows of each layer, uint8 (kv heads, tokens, row), and the scales of each layer's keys."""

    keys: list[list[Bytes]]
    values: list[list[Bytes]]
    scales: list[NDArray[np.float32] | None]
    steps: list[list[_Step]] = field(default_factory=list)


class Recorder:
    """Watches a decoder; asks it for nothing. One per run."""

    def __init__(self, shape: KVShape, scale: float) -> None:
        self._shape = shape
        self._scale = scale
        self._requests: dict[str, _Rows] = {}

    def admitted(self, name: str, prefill: Prefill, scales: NDArray[np.float32] | None = None) -> None:
        """A request begins with these rows; `scales` are those of its keys: float32 [layer, kv head, channel]."""
        dtype = self._shape.dtype
        of_layer = [None] * len(prefill.keys) if scales is None else list(scales.copy())
        self._requests[name] = _Rows(
            [[keys_to_bytes(k, dtype, s)] for k, s in zip(prefill.keys, of_layer, strict=True)],
            [[values_to_bytes(v, dtype)] for v in prefill.values],
            of_layer,
            [[] for _ in prefill.keys],
        )

    def rows(self, name: str, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """New rows of one layer: float32 (kv heads, q_len, head_dim)."""
        held, dtype = self._requests[name], self._shape.dtype
        held.keys[layer].append(keys_to_bytes(keys.copy(), dtype, held.scales[layer]))
        held.values[layer].append(values_to_bytes(values.copy(), dtype))

    def attended(
        self,
        name: str,
        layer: int,
        positions: Int64,
        queries: NDArray[np.float32],
        outputs: NDArray[np.float32],
        blocks: list[Int64] | None,
        rows: list[Int64] | None = None,
        predicted: Predicted | None = None,
    ) -> None:
        """One step of one layer: float32 (q_len, q heads, d) and (q_len, q heads, d_v).

        Of each KV head the blocks, or the positions of the rows, that were attended; None: all of them.
        """
        chosen, unit = (blocks, self._shape.block_tokens) if rows is None else (rows, 1)
        for position, query, output in zip(positions.tolist(), queries, outputs, strict=True):
            self._requests[name].steps[layer].append(_Step(position, query.copy(), output.copy(), chosen, unit))

    def verdict(self) -> Verdict:
        """Check everything that was recorded."""
        worst = Verdict()
        for held in self._requests.values():
            for layer, steps in enumerate(held.steps):
                dtype = self._shape.dtype
                keys = exact_keys(np.concatenate(held.keys[layer], axis=1), dtype, held.scales[layer])
                values = exact_values(np.concatenate(held.values[layer], axis=1), dtype)
                for step in steps:
                    for head in range(self._shape.num_kv_heads):
                        worst = _worse(worst, self._check(step, head, keys[head], values[head]))
        return worst

    def _check(self, step: _Step, head: int, keys: Float64, values: Float64) -> Verdict:
        shape, visible = self._shape, step.position + 1
        group = slice(head * shape.group, (head + 1) * shape.group)
        query, output = step.query[group].astype(np.float64), step.output[group].astype(np.float64)
        keys, values = keys[:visible], values[:visible]
        logits = self._scale * np.einsum("gd,nd->gn", query, keys)
        dense = np.einsum("gn,nd->gd", softmax(logits), values)
        if step.attended is None:
            expected = dense
            bound = self._bound(query, logits, keys, values, np.arange(visible))
        else:
            chosen = _positions(step.attended[head], step.unit, visible)
            expected = np.einsum("gn,nd->gd", softmax(logits[:, chosen]), values[chosen])
            bound = self._bound(query, logits[:, chosen], keys[chosen], values[chosen], chosen)
        error = np.abs(output - expected)
        ratio = error / bound
        ratio[~np.isfinite(output)] = np.inf
        at = np.unravel_index(int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape)
        return Verdict(
            float(error[at]), float(bound[at]), float(ratio.max()), float(np.abs(output - dense).max()), len(output)
        )

    def _bound(self, query: Float64, logits: Float64, keys: Float64, values: Float64, rows: Int64) -> Float64:
        split_tokens = self._shape.split_tokens
        merges = len(np.unique(rows // split_tokens))
        return rounding_bound(query, logits, keys, values, self._scale, split_tokens, merges)


def _positions(chosen: Int64, unit: int, visible: int) -> Int64:
    positions = (chosen[:, None] * unit + np.arange(unit)).ravel()
    return np.asarray(positions[positions < visible], dtype=np.int64)


def _worse(a: Verdict, b: Verdict) -> Verdict:
    larger = b if b.max_error > a.max_error else a
    return Verdict(
        larger.max_error,
        larger.error_bound,
        max(a.worst_ratio, b.worst_ratio),
        max(a.error_vs_dense, b.error_vs_dense),
        a.checked + b.checked,
    )
