"""The float64 oracle: what attention should give, in obvious NumPy that shares no code with the package.

Everything is about one KV head: queries (q_len, group, head_dim), keys (n, head_dim), values (n, head_dim_v),
positions int64 (n,), q_positions int64 (q_len,). A row counts for a query whose position is not below the row's.
Inputs are the stored numbers themselves (`decode` the others first), so quantisation is no error here. Masks and the
soft-cap are keyword arguments (`Masks`).

`bound` is how far a float32 kernel may be from `attention`, element by element: an a-priori rounding analysis with no
tuned constants. With u = 2⁻²⁴, the logit of row j carries an error of at most

    ds_j = (d + 2)·u·scale·Σ|q||k_j| + 2u|s_j| + 2u|s_max − s_j|

(products and sums, scaling, the exponential's argument; with a soft-cap, 8u|s_j| more for the division, the tanh, which
is right to 2 ulp and whose slope is at most 1, and the product), and the output

    |ô − o| ≤ (2·max_j ds_j + (2·split_tokens + 8·partials + 18)·u) · Σ_j p_j|v_j|

(one rounding more for the scale of a row of codes). To this it adds what underflow may take: weights below the smallest
normal number may be lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Stored = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]
"""Numbers as a KV cache holds them: float32, the bits of 16-bit floats, or codes."""
CODES = ("int8", "fp8_e4m3")
U = 2.0**-24
"""Unit roundoff of float32."""
TINY = 2.0**-126
"""The smallest normal float32."""


class Masks(NamedTuple):
    """What counts for a query besides causality, and the cap of logits; 0 is none."""

    window: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0


NO_MASKS = Masks()


def fp8(code: int) -> float:
    """What an e4m3 code stands for, from the text of the format: sign, 4 bits of exponent, 3 of mantissa."""
    sign = -1.0 if code >= 128 else 1.0
    exponent, mantissa = (code // 8) % 16, code % 8
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


FP8 = np.array([fp8(code) for code in range(256)])
"""Of each e4m3 code its number."""


def encode(numbers: ArrayLike, dtype: str) -> Stored:
    """Numbers as they are stored: float32, or the bits of smaller types (nearest, ties to even); without a scale."""
    exact = np.asarray(numbers, dtype=np.float32)
    if dtype == "int8":
        return np.clip(np.rint(exact), -127, 127).astype(np.int8).view(np.uint8)
    if dtype == "fp8_e4m3":
        positive = FP8[:127]
        size = np.minimum(np.abs(exact.astype(np.float64)), 448.0)
        above = np.minimum(np.searchsorted(positive, size), 126)
        below = np.maximum(above - 1, 0)
        down, up = size - positive[below], positive[above] - size
        code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below).astype(np.uint8)
        return np.where(np.isnan(exact), 0x7F, code | np.where(np.signbit(exact), 0x80, 0).astype(np.uint8))
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
    narrow: NDArray[np.floating[Any]] | NDArray[np.int8]
    if dtype == "fp8_e4m3":
        return FP8[stored]
    if dtype == "int8":
        narrow = stored.view(np.int8)
    elif dtype == "float32":
        narrow = stored.view(np.float32)
    elif dtype == "float16":
        narrow = stored.view(np.float16)
    else:
        narrow = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN stays a NaN
        return narrow.astype(np.float64)


def encode_values(numbers: ArrayLike, dtype: str) -> Stored:
    """V rows as they are stored: codes are followed by their scale, so that a row is uint8 (head_dim_v + 4,)."""
    exact = np.asarray(numbers, dtype=np.float32)
    if dtype not in CODES:
        return encode(exact, dtype)
    top = np.float32(127 if dtype == "int8" else 448)
    scales = np.abs(exact).max(axis=-1, keepdims=True) / top
    scales = np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
    codes = encode(exact / scales, dtype)
    return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=-1)


def decode_values(stored: Stored, dtype: str) -> Float64:
    """The numbers of V rows, exactly."""
    if dtype not in CODES:
        return decode(stored, dtype)
    scales = np.ascontiguousarray(stored[..., -4:]).view(np.float32).astype(np.float64)
    codes: NDArray[np.uint8] = np.ascontiguousarray(stored[..., :-4]).view(np.uint8)
    return decode(codes, dtype) * scales


def logits(
    queries: ArrayLike,
    keys: ArrayLike,
    scale: float,
    q_positions: ArrayLike,
    positions: ArrayLike,
    masks: Masks = NO_MASKS,
) -> Float64:
    """scale · q·k, capped, with −inf where masked: (q_len, group, n)."""
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    s = scale * np.einsum("qgd,nd->qgn", q, k)
    if masks.softcap:
        s = masks.softcap * np.tanh(s / masks.softcap)
    row, query = np.asarray(positions)[None, :], np.asarray(q_positions)[:, None]
    counts = row <= query
    if masks.window:
        counts &= (row > query - masks.window) | (row < masks.sink_tokens)
    return np.where(counts[:, None, :], s, -np.inf)


def state(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    q_positions: ArrayLike,
    positions: ArrayLike,
    masks: Masks = NO_MASKS,
) -> Float64:
    """(m, l, acc…) of all rows: (q_len, group, 2 + head_dim_v); (−inf, 0, 0) where no row counts."""
    s = logits(queries, keys, scale, q_positions, positions, masks)
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
    masks: Masks = NO_MASKS,
) -> Float64:
    """Attention output (q_len, group, head_dim_v); zeros where no row counts."""
    whole = state(queries, keys, values, scale, q_positions, positions, masks)
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
    masks: Masks = NO_MASKS,
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
    s = logits(q, k, scale, q_positions, rows, masks)
    counts = np.isfinite(s)
    top = np.where(counts, s, -np.inf).max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    s = np.where(counts, s, top)
    magnitude = abs(scale) * np.einsum("qgd,nd->qgn", np.abs(q), np.abs(k))
    ds = (q.shape[-1] + 2) * u * magnitude + 2 * u * np.abs(s) + 2 * u * (top - s)
    if masks.softcap:
        ds += 8 * u * np.abs(s)
    ds += TINY * (q.shape[-1] * abs(scale) + 1)
    worst = np.where(counts, ds, 0.0).max(axis=-1, keepdims=True)
    p = np.where(counts, np.exp(s - top), 0.0)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1.0)
    relative = 2 * worst + (2 * split_tokens + 8 * partials + 18) * u
    lost = TINY * (partials + 2) * rows.size * (1.0 + np.abs(v).max(initial=0.0))
    return np.asarray(relative * (p @ np.abs(v)) + lost)
