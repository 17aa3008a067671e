"""How far attention in float32 may be from float64 on the same stored rows: the analytic bound, without tuning.

With u = 2⁻²⁴, the unit roundoff of float32, and d = head_dim, the logit of row j is off by at most

    ds_j ≤ (d + 3)·u·scale·Σ|q_k||K_jk| + 2u|s_j| + 2u|s_max − s_j|

and the output, of which B states of `split_tokens` rows were merged, by

    |ô − o| ≤ [2·max_j ds_j + (2·split_tokens + 8·B + 18)·u] · Σ_j p_j |V_j|,

one rounding more in each than plain numbers need, for rows of codes: a row's scale, and the keys' scales in queries.

First-order rounding analysis of the un-normalised states, each merge adding a constant number of roundings.

Where a device may attend by a fused kernel (`Arithmetic.fused`), queries, weights and outputs are rounded to the type
of the rows, with unit roundoff h and smallest normal number τ, and sums of n rows may be truncated:

    ds_j ≤ (h + 2(d + 3)·u)·scale·Σ(|q_k| + τ)|K_jk| + 2u|s_j| + 2u|s_max − s_j|
    |ô − o| ≤ [(exp(2·max_j ds_j) + (4n + 8·B + 18)·u)·(1 + h)² − 1] · Σ_j p_j|V_j| + h·τ·(1 + Σ_j |V_j|).

These roundings are not small enough for the first order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
U = 2.0**-24
ROUNDED = {"float16": (2.0**-11, 2.0**-14), "bfloat16": (2.0**-8, 2.0**-126)}
"""Types that fused kernels round to: unit roundoff and smallest normal number."""


def rounding_bound(
    query: Float64, logits: Float64, keys: Float64, values: Float64, scale: float, split_tokens: int, merges: int
) -> Float64:
    """The bound on |ô − o|, (g, d_v), of one KV head: queries (g, d), logits (g, n), keys (n, d), values (n, d_v)."""
    magnitudes = np.einsum("gd,nd->gn", np.abs(query), np.abs(keys))
    return output_bound(magnitudes, logits, values, query.shape[1], scale, split_tokens, merges)


def output_bound(
    magnitudes: Float64,
    logits: Float64,
    values: Float64,
    head_dim: int,
    scale: float,
    split_tokens: int,
    merges: int,
    rounded: str = "",
) -> Float64:
    """The same bound from Σ|q_k||K_jk|, (g, n): each row's may be that of another query.

    `rounded` is the type that a fused kernel may have rounded to; then magnitudes are Σ(|q_k| + τ)|K_jk|.
    """
    if rounded:
        return _rounded_bound(magnitudes, logits, values, head_dim, scale, merges, *ROUNDED[rounded])
    top = logits.max(axis=1, keepdims=True)
    ds = (head_dim + 3) * U * scale * magnitudes
    ds = ds + 2 * U * np.abs(logits) + 2 * U * (top - logits)
    factor = 2 * ds.max(axis=1, keepdims=True) + (2 * split_tokens + 8 * merges + 18) * U
    bound: Float64 = factor * np.einsum("gn,nd->gd", softmax(logits), np.abs(values))
    return np.maximum(bound, np.finfo(np.float32).tiny)


def _rounded_bound(
    magnitudes: Float64,
    logits: Float64,
    values: Float64,
    head_dim: int,
    scale: float,
    merges: int,
    h: float,
    smallest: float,
) -> Float64:
    top = logits.max(axis=1, keepdims=True)
    ds = (h + 2 * (head_dim + 3) * U) * scale * magnitudes + 2 * U * np.abs(logits) + 2 * U * (top - logits)
    weights = np.exp(np.minimum(2 * ds.max(axis=1, keepdims=True), 300.0))
    factor = (weights + (4 * logits.shape[1] + 8 * merges + 18) * U) * (1 + h) ** 2 - 1
    sizes = np.abs(values)
    bound: Float64 = factor * np.einsum("gn,nd->gd", softmax(logits), sizes) + h * smallest * (1 + sizes.sum(axis=0))
    return bound


def log_probabilities(logits: NDArray[np.float32], tokens: Sequence[int]) -> Float64:
    """Natural-log probability of a token under each row of logits, float32 (n, vocabulary) → float64 (n,)."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1)
    lse = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return np.asarray(wide[np.arange(len(tokens)), list(tokens)] - lse)


def softmax(logits: Float64) -> Float64:
    """Over the last axis, float64 (g, n)."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    normalised: Float64 = p / p.sum(axis=1, keepdims=True)
    return normalised
