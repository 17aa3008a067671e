"""The float64 oracle of a run: what attention should have given on the same stored rows, and how far off it may be.

It keeps the queries and outputs of every step and layer, and the K and V rows of each request as they are stored, apart
from any device. What codes stand for is code · scale, exactly; queries are those of the model, without scales. After
the run it recomputes attention in float64 over the rows that were attended, and over all rows, and compares with an
analytic bound of runtime/bounds.py, which needs no tuning. Where logits were taken with a predicted query, so are those
that the output is compared with; attention over all rows is always that of the true query.

From the same logits it measures what a choice of rows has kept of dense attention (`Recall`).

Products are einsums and not `@`: matrices this small gain nothing from a threaded BLAS, whose threads spin for each
other where the host is busy (a check of 15 steps of 2 layers at 4,096 rows: 0.28 s instead of 4.7 s of CPU time).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.platform import Platform
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.bounds import ROUNDED, output_bound, softmax
from tierloop.runtime.dtypes import exact_keys, exact_values, keys_to_bytes, values_to_bytes
from tierloop.runtime.policy import Predicted
from tierloop.runtime.stages import Prefill

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]
TOP_ROWS = 128
"""Rows of largest probability that `topk_recall` looks for, where at least as many were attended."""


@dataclass(frozen=True)
class Recall:
    """What the attended rows are of all rows: means over `checked` vectors, one for each (step, layer, q head).

    `mass_recall`: the share of dense attention's probability that lies on them. `topk_recall`: of the k rows of largest
    dense probability (ties: the lower position), k = min(128, rows attended), the share that was attended.
    `attended_share`: rows attended of rows visible. `output_error`: ‖output − dense‖ / ‖dense‖, Euclidean.
    Where all rows are attended, the first three are 1.
    """

    checked: int = 0
    mass_recall: float = 1.0
    topk_recall: float = 1.0
    attended_share: float = 1.0
    output_error: float = 0.0

    @staticmethod
    def mean(parts: Iterable[Recall]) -> Recall:
        """All of the vectors of several."""
        held = [part for part in parts if part.checked]
        if not held:
            return Recall()
        weights = np.array([part.checked for part in held], dtype=np.float64)
        shares = [(p.mass_recall, p.topk_recall, p.attended_share, p.output_error) for p in held]
        means = (weights[:, None] * np.array(shares)).sum(axis=0) / weights.sum()
        return Recall(int(weights.sum()), *means.tolist())


@dataclass(frozen=True)
class Verdict:
    """Over all outputs: the largest error, the bound at that element, the largest ratio of error to bound, and the
    largest difference to attention over all rows. `checked` counts output vectors; the next four are those of `Recall`,
    which `layers` has for each layer (those that were not recorded have `checked` 0)."""

    max_error: float = 0.0
    error_bound: float = 0.0
    worst_ratio: float = 0.0
    error_vs_dense: float = 0.0
    checked: int = 0
    mass_recall: float = 1.0
    topk_recall: float = 1.0
    attended_share: float = 1.0
    output_error: float = 0.0
    layers: tuple[Recall, ...] = ()


@dataclass
class _Step:
    position: int
    query: NDArray[np.float32]
    output: NDArray[np.float32]
    attended: list[Int64] | None
    unit: int
    predicted: Predicted | None


@dataclass
class _Rows:
    """Stored rows of each layer, uint8 (kv heads, tokens, row), and the scales of each layer's keys."""

    keys: list[list[Bytes]]
    values: list[list[Bytes]]
    scales: list[NDArray[np.float32] | None]
    steps: list[list[_Step]] = field(default_factory=list)


@dataclass
class _Head:
    """Rows of one layer and KV head in float64; `codes` are keys without their scales, for queries that hold them."""

    keys: Float64
    codes: Float64
    values: Float64


@dataclass(frozen=True)
class _Errors:
    max_error: float
    error_bound: float
    worst_ratio: float
    vs_dense: float


class Recorder:
    """Watches a decoder; asks it for nothing. One per run.

    `layers` names the layers that are recorded and checked, for runs whose rows do not fit twice; None: all. `rounded`
    is what `rounded_to` says of the platform.
    """

    def __init__(self, shape: KVShape, scale: float, layers: Collection[int] | None = None, rounded: str = "") -> None:
        self._shape = shape
        self._scale = scale
        self._rounded = rounded
        self._added = ROUNDED[rounded][1] if rounded else 0.0
        self._layers = range(shape.num_layers) if layers is None else frozenset(layers)
        self._requests: dict[str, _Rows] = {}

    def admitted(self, name: str, prefill: Prefill, scales: NDArray[np.float32] | None = None) -> None:
        """A request begins with these rows; `scales` are those of its keys: float32 [layer, kv head, channel]."""
        dtype = self._shape.dtype
        of_layer = [None] * len(prefill.keys) if scales is None else list(scales.copy())
        rows = _Rows([[] for _ in prefill.keys], [[] for _ in prefill.keys], of_layer, [[] for _ in prefill.keys])
        for layer in sorted(self._layers):
            rows.keys[layer].append(keys_to_bytes(prefill.keys[layer], dtype, of_layer[layer]))
            rows.values[layer].append(values_to_bytes(prefill.values[layer], dtype))
        self._requests[name] = rows

    def rows(self, name: str, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """New rows of one layer: float32 (kv heads, q_len, head_dim). A request that was resumed is not watched."""
        if layer not in self._layers or name not in self._requests:
            return
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

        Of each KV head the blocks, or the positions of the rows, that were attended; None: all of them. `predicted`
        says which of these rows have logits of another query.
        """
        if layer not in self._layers or name not in self._requests:
            return
        chosen, unit = (blocks, self._shape.block_tokens) if rows is None else (rows, 1)
        for position, query, output in zip(positions.tolist(), queries, outputs, strict=True):
            step = _Step(position, query.copy(), output.copy(), chosen, unit, predicted)
            self._requests[name].steps[layer].append(step)

    def verdict(self) -> Verdict:
        """Check everything that was recorded."""
        worst = _Errors(0.0, 0.0, 0.0, 0.0)
        recalled: list[list[Recall]] = [[] for _ in range(self._shape.num_layers)]
        for held in self._requests.values():
            for layer, steps in enumerate(held.steps):
                for head in range(self._shape.num_kv_heads if steps else 0):
                    rows = self._head(held, layer, head)
                    for step in steps:
                        errors, recall = self._check(step, head, rows)
                        worst = _worse(worst, errors)
                        recalled[layer].append(recall)
        layers = tuple(map(Recall.mean, recalled))
        mean = Recall.mean(layers)
        return Verdict(
            worst.max_error,
            worst.error_bound,
            worst.worst_ratio,
            worst.vs_dense,
            mean.checked,
            mean.mass_recall,
            mean.topk_recall,
            mean.attended_share,
            mean.output_error,
            layers,
        )

    def _head(self, held: _Rows, layer: int, head: int) -> _Head:
        dtype, scales = self._shape.dtype, held.scales[layer]
        stored = np.concatenate([keys[head] for keys in held.keys[layer]])
        codes = exact_keys(stored, dtype)
        keys = codes if scales is None else exact_keys(stored, dtype, scales[head])
        values = exact_values(np.concatenate([values[head] for values in held.values[layer]]), dtype)
        return _Head(keys, codes, values)

    def _check(self, step: _Step, head: int, rows: _Head) -> tuple[_Errors, Recall]:
        shape, visible = self._shape, step.position + 1
        group = slice(head * shape.group, (head + 1) * shape.group)
        query, output = step.query[group].astype(np.float64), step.output[group].astype(np.float64)
        keys, values = rows.keys[:visible], rows.values[:visible]
        logits = self._scale * np.einsum("gd,nd->gn", query, keys)
        weights = softmax(logits)
        dense = np.einsum("gn,nd->gd", weights, values)
        mass = topk = share = 1.0
        chosen = None
        taken, magnitudes = logits, np.einsum("gd,nd->gn", np.abs(query) + self._added, np.abs(keys))
        if step.attended is not None:
            chosen = _positions(step.attended[head], step.unit, visible)
            mass, share = float(weights[:, chosen].sum(axis=1).mean()), len(chosen) / visible
            topk = _topk_recall(logits, chosen)
        if step.predicted is not None:
            taken = self._with_predicted(taken, magnitudes, step.predicted, head, rows.codes)
        if chosen is None:
            expected = dense if taken is logits else np.einsum("gn,nd->gd", softmax(taken), values)
            chosen = np.arange(visible)
        else:
            taken, magnitudes, values = taken[:, chosen], magnitudes[:, chosen], values[chosen]
            expected = np.einsum("gn,nd->gd", softmax(taken), values)
        merges = len(np.unique(chosen // shape.split_tokens))
        bound = output_bound(
            magnitudes, taken, values, query.shape[1], self._scale, shape.split_tokens, merges, self._rounded
        )
        off = np.linalg.norm(output - dense, axis=1) / np.maximum(np.linalg.norm(dense, axis=1), np.finfo(float).tiny)
        recall = Recall(len(output), mass, topk, share, float(off.mean()))
        return _errors(output, expected, bound, float(np.abs(output - dense).max())), recall

    def _with_predicted(
        self, logits: Float64, magnitudes: Float64, predicted: Predicted, head: int, codes: Float64
    ) -> Float64:
        """The logits with those of the predicted query where it was used; `magnitudes` are changed likewise."""
        positions = predicted.positions[head]
        group = slice(head * self._shape.group, (head + 1) * self._shape.group)
        query, keys = predicted.queries[group].astype(np.float64), codes[positions]
        taken = logits.copy()
        taken[:, positions] = self._scale * np.einsum("gd,nd->gn", query, keys)
        magnitudes[:, positions] = np.einsum("gd,nd->gn", np.abs(query) + self._added, np.abs(keys))
        return taken


def rounded_to(platform: Platform, shape: KVShape) -> str:
    """The type that a device of the platform may round queries, weights and outputs to (`Arithmetic.fused`), or ""."""
    said = [device.info.arithmetic for device in platform.devices.values()]
    fused = any(arithmetic is not None and shape.dtype in arithmetic.fused for arithmetic in said)
    return shape.dtype if fused and shape.head_dim == shape.head_dim_v else ""


def _topk_recall(logits: Float64, chosen: Int64) -> float:
    """Of the k largest of each row, float64 (g, n), the share that is chosen; ties go to the lower index.

    Of logits, which softmax keeps in order: small probabilities are all 0.
    """
    k = min(TOP_ROWS, len(chosen))
    if not k:
        return 0.0
    attended = np.zeros(logits.shape[1], dtype=bool)
    attended[chosen] = True
    last = np.partition(logits, -k, axis=1)[:, -k, None]
    above, ties = logits > last, logits == last
    top = above | (ties & (np.cumsum(ties, axis=1) <= k - above.sum(axis=1, keepdims=True)))
    return float((top & attended).sum() / (k * len(logits)))


def _positions(chosen: Int64, unit: int, visible: int) -> Int64:
    positions = (chosen[:, None] * unit + np.arange(unit)).ravel()
    return np.asarray(positions[positions < visible], dtype=np.int64)


def _errors(output: Float64, expected: Float64, bound: Float64, vs_dense: float) -> _Errors:
    error = np.abs(output - expected)
    ratio = error / bound
    ratio[~np.isfinite(output)] = np.inf
    at = np.unravel_index(int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape)
    return _Errors(float(error[at]), float(bound[at]), float(ratio.max()), vs_dense)


def _worse(a: _Errors, b: _Errors) -> _Errors:
    larger = b if b.max_error > a.max_error else a
    return _Errors(larger.max_error, larger.error_bound, max(a.worst_ratio, b.worst_ratio), max(a.vs_dense, b.vs_dense))
