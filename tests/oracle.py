"""The float64 oracle: what attention should give, in obvious NumPy that shares no code with the package.

Everything is about one KV head: queries (q_len, group, head_dim), keys (n, head_dim), values (n, head_dim_v),
positions int64 (n,), q_positions int64 (q_len,). A row counts for a query whose position is not below the row's.
Inputs are the stored numbers themselves (`decode` the 16-bit ones first), so quantisation is no error here.

`bound` is how far a float32 kernel may be from `attention`, element by element: an a-priori rounding analysis with no
tuned constants. With u = 2⁻²⁴, the logit of row j carries an error of at most

    ds_j = (d + 2)·u·scale·Σ|q||k_j| + 2u|s_j| + 2u|s_max − s_j|

(products and sums, scaling, the exponential's argument), and the output

    |ô − o| ≤ (2·max_j ds_j + (2·split_tokens + 8·partials + 16)·u) · Σ_j p_j|v_j|.

To this it adds what underflow may take: weights below the smallest normal number may be lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Stored = NDArray[np.float32] | NDArray[np.uint16]
"""Numbers as a KV cache holds them: float32, or the bits of 16-bit floats."""
U = 2.0**-24
"""Unit roundoff of float32."""
TINY = 2.0**-126
"""The smallest normal float32."""


def encode(numbers: ArrayLike, dtype: str) -> Stored:
    """Numbers as they are stored: float32, or the bits of float16 or bfloat16 as uint16 (nearest, ties to even)."""
    exact = np.asarray(numbers, dtype=np.float32)
    if dtype == "float32":
        return exact
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return exact.astype(np.float16).view(np.uint16)
    down = exact.view(np.uint32) >> 16
    up = down + 1
    low, high = (decode(c.astype(np.uint16), "bfloat16") for c in (down, up))
    # The number past the largest finite one counts as 2¹²⁸ when the nearer neighbour is chosen.
    low, high = (np.where(np.isinf(c), np.copysign(2.0**128, c), c) for c in (low, high))
    wide = decode(exact, "float32")
    wide = np.where(np.isinf(wide), np.copysign(2.0**128, wide), wide)
    below, above = np.abs(wide - low), np.abs(high - wide)
    bits = np.where((above < below) | ((above == below) & (down % 2 == 1)), up, down)
    bits = np.where(np.isnan(exact), (exact.view(np.uint32) >> 16) | 0x40, bits)
    return bits.astype(np.uint16)


def decode(stored: Stored, dtype: str) -> Float64:
    """The stored numbers, exactly, in float64."""
    narrow: NDArray[np.floating[Any]]
    if dtype == "float32":
        narrow = stored.view(np.float32)
    elif dtype == "float16":
        narrow = stored.view(np.float16)
    else:
        narrow = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN stays a NaN
        return narrow.astype(np.float64)


def logits(queries: ArrayLike, keys: ArrayLike, scale: float, q_positions: ArrayLike, positions: ArrayLike) -> Float64:
    """scale · q·k with −inf where masked: (q_len, group, n)."""
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    s = scale * np.einsum("qgd,nd->qgn", q, k)
    counts = np.asarray(positions)[None, :] <= np.asarray(q_positions)[:, None]
    return np.where(counts[:, None, :], s, -np.inf)


def state(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    q_positions: ArrayLike,
    positions: ArrayLike,
) -> Float64:
    """(m, l, acc…) of all rows: (q_len, group, 2 + head_dim_v); (−inf, 0, 0) where no row counts."""
    s = logits(queries, keys, scale, q_positions, positions)
    v = np.asarray(values, dtype=np.float64)
    m = s.max(axis=-1, initial=-np.inf, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    return np.concatenate([m, p.sum(axis=-1, keepdims=True), p @ v], axis=-1)


def attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    q_positions: ArrayLike,
    positions: ArrayLike,
) -> Float64:
    """Attention output (q_len, group, head_dim_v); zeros where no row counts."""
    whole = state(queries, keys, values, scale, q_positions, positions)
    total = whole[..., 1:2]
    return np.divide(whole[..., 2:], total, out=np.zeros_like(whole[..., 2:]), where=total != 0)


def bound(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    q_positions: ArrayLike,
    positions: ArrayLike,
    split_tokens: int,
    partials: int | None = None,
    u: float = U,
) -> Float64:
    """The largest |kernel − attention| that rounding in float32 explains: (q_len, group, head_dim_v).

    `partials` is the number of states that were merged (default: the splits that hold rows); `u` the unit roundoff of
    the kernel's sums. For an output stored in less than float32 add half an ulp of that type.
    """
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (queries, keys, values))
    rows = np.asarray(positions)
    if not rows.size:
        return np.zeros((*q.shape[:2], v.shape[1]))
    if partials is None:
        partials = len(np.unique(rows // split_tokens))
    s = logits(q, k, scale, q_positions, rows)
    counts = np.isfinite(s)
    top = np.where(counts, s, -np.inf).max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    s = np.where(counts, s, top)
    magnitude = abs(scale) * np.einsum("qgd,nd->qgn", np.abs(q), np.abs(k))
    ds = (q.shape[-1] + 2) * u * magnitude + 2 * u * np.abs(s) + 2 * u * (top - s)
    ds += TINY * (q.shape[-1] * abs(scale) + 1)
    worst = np.where(counts, ds, 0.0).max(axis=-1, keepdims=True)
    p = np.where(counts, np.exp(s - top), 0.0)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1.0)
    relative = 2 * worst + (2 * split_tokens + 8 * partials + 16) * u
    lost = TINY * (partials + 2) * rows.size * (1.0 + np.abs(v).max(initial=0.0))
    return np.asarray(relative * (p @ np.abs(v)) + lost)
