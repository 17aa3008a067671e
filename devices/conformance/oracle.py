"""What kernels should give, in float64 NumPy that shares no code with them, and how far their arithmetic may be off.

Written from the kernels' contract (kernels/contract.py). Inputs are the stored numbers themselves, so quantisation is
no error here. With u the unit roundoff of a device's sums and exponentials, the logit s_j = scale · q·k_j has an error
of at most

    ds_j = (d + 2)·u·scale·Σ|q||k_j| + 2u|s_j| + 2u|s_max − s_j|

(products and sums, scaling, the argument of the exponential), and weights and sums over them a relative error of

    β = exp(2·max_j ds_j) − 1 + (2·split_tokens + 8·partials + 18)·u

of Σ p_j and Σ p_j|v_j|. It is an a-priori rounding analysis without tuned constants; what float32 kernels really do is
within 6 % of it. To this comes the rounding of the result to float32 or, for states, to the wire. Below the smallest
normal number of float32 anything may be flushed to zero.

**Fused attention** (`Arithmetic.fused`) rounds queries, weights and outputs to the type of the rows, with unit roundoff
h and smallest normal number τ. Products are of numbers of 16 bits, hence exact, and sums of them may be truncated, as
matrix units do it, which counts as 2u. Then

    ds_j = (h + 2·(d + 2)·u)·scale·Σ|q||k_j| + h·τ·scale·Σ|k_j| + 2u|s_j| + 2u|s_max − s_j|

where the second term is the rounding of queries below τ. Sums go over all n rows of a root, in any order; rescaling
them as the maximum grows costs a rounding and an exponential each time, at most once a row, hence

    β = (1 + exp(2·max_j ds_j) − 1 + (4·n + 8·partials + 18)·u) · (1 + h)² − 1

with a factor for the weights and one for the output. A weight is at most 1 and loses up to h·τ if it is below τ, which
adds h·τ·Σ|v_j|; an output below τ likewise, which adds h·τ·Σp_j. m lies anywhere from the largest logit to the
log-sum-exp, whose logarithm and rounding add 4u of both terms of it; l and acc are judged after rescaling, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.info import Arithmetic

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
RESULT = ROUNDOFF["float32"]
TINY = 2.0**-126


def _fp8_number(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 128 else magnitude


NUMBERS = {
    "int8": np.arange(256).astype(np.int8).astype(np.float64),
    "fp8_e4m3": np.array([_fp8_number(code) for code in range(256)]),
}
"""What every code stands for, float64 (256,), for the types whose elements are codes."""


def encode(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """float32 numbers as the bytes of `dtype`, rounded to nearest, ties to even; NaN stays NaN. Codes have scale 1."""
    if dtype in NUMBERS:
        known = np.nan_to_num(NUMBERS[dtype], nan=np.inf)
        if dtype == "int8":
            known[128] = np.inf  # −128 is no code
        return np.asarray(np.abs(numbers.reshape(-1, 1) - known).argmin(axis=1), dtype=np.uint8)
    flat = np.ascontiguousarray(numbers, dtype=np.float32).reshape(-1)
    if dtype == "float32":
        return flat.view(np.uint8)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return flat.astype(np.float16).view(np.uint8)
    bits = flat.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(flat), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16).view(np.uint8)


def decode(stored: NDArray[np.uint8], dtype: str) -> Float64:
    """Bytes of `dtype` as the numbers that they are; of codes, the codes."""
    if dtype in NUMBERS:
        return NUMBERS[dtype][stored]
    if dtype == "bfloat16":
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return stored.view(np.float32 if dtype == "float32" else np.float16).astype(np.float64)


def encode_values(rows: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """V rows (n, dim) as stored, end to end: codes are followed by the row's scale."""
    if dtype not in NUMBERS:
        return encode(rows, dtype)
    scales = (np.abs(rows).max(axis=1, keepdims=True) / np.nanmax(NUMBERS[dtype])).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    codes = encode((rows / scales).astype(np.float32), dtype).reshape(rows.shape)
    return np.concatenate([codes, scales.view(np.uint8)], axis=1).reshape(-1)


def decode_values(stored: NDArray[np.uint8], dtype: str, dim: int) -> Float64:
    """The numbers of V rows: (n, dim)."""
    if dtype not in NUMBERS:
        return decode(stored, dtype).reshape(-1, dim)
    rows = stored.reshape(-1, dim + 4)
    scales = np.ascontiguousarray(rows[:, dim:]).view(np.float32).astype(np.float64)
    return decode(np.ascontiguousarray(rows[:, :dim]), dtype) * scales


@dataclass(frozen=True)
class Masks:
    """What counts for a query besides causality, and the cap of logits; 0 is none."""

    window: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0


NO_MASKS = Masks()


@dataclass(frozen=True)
class Rows:
    """Where each row of an operand belongs: int64 (rows,) each."""

    sequence: Int64
    kv_head: Int64
    position: Int64

    @staticmethod
    def of(runs: Int64, lengths: Int64) -> Rows:
        """Runs int64 (n, 3) and their numbers of rows (n,)."""
        within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        each = np.repeat(runs, lengths, axis=0)
        return Rows(each[:, 0], each[:, 1], each[:, 2] + within)


@dataclass(frozen=True)
class Expected:
    """Numbers, and by how much each may be off."""

    value: Float64
    error: Float64


@dataclass(frozen=True)
class States:
    """Attention states of r roots: m and total (the l of a state) are (r, q_len, group), acc has head_dim_v besides.

    `m_error` bounds the error of m; `relative` that of the total, and that of acc as a share of `weight` = Σ p|v|, both
    after rescaling to the same m. m may lie `above` the value by so much, where arithmetic is fused.
    """

    m: Float64
    total: Float64
    acc: Float64
    m_error: Float64
    relative: Float64
    weight: Float64
    above: Float64


def logits(
    queries: Float64,
    keys: Float64,
    rows: Rows,
    q_positions: Int64,
    group: int,
    scale: float,
    arithmetic: Arithmetic,
    masks: Masks = NO_MASKS,
    rounded: str = "",
) -> Expected:
    """queries (S, q_len, H·group, d) × keys (rows, d) → (rows, q_len, group); masked entries are −inf.

    `rounded` is the type that a fused kernel rounds queries to.
    """
    u = _unit(arithmetic)
    n, q_len, d = len(keys), queries.shape[1], queries.shape[3]
    value = np.full((n, q_len, group), -np.inf)
    error = np.zeros((n, q_len, group))
    for j in range(n):
        sequence, head = int(rows.sequence[j]), int(rows.kv_head[j])
        q = queries[sequence, :, head * group : (head + 1) * group]
        far = q_positions[sequence] - rows.position[j]
        counts = far >= 0
        if masks.window and rows.position[j] >= masks.sink_tokens:
            counts &= far < masks.window
        value[j, counts] = scale * (q[counts] @ keys[j])
        error[j, counts] = (d + 2) * u * abs(scale) * (np.abs(q[counts]) @ np.abs(keys[j]))
        if rounded:
            h = ROUNDOFF[rounded]
            error[j, counts] *= 2 + h / ((d + 2) * u)
            error[j, counts] += h * SMALLEST_NORMAL[rounded] * abs(scale) * np.abs(keys[j]).sum()
        if masks.softcap:
            # The slope of c·tanh(x / c) is at most 1; the division, the tanh and the product round as well.
            value[j, counts] = masks.softcap * np.tanh(value[j, counts] / masks.softcap)
            error[j, counts] += 8 * u * np.abs(value[j, counts])
        error[j, counts] += (2 * u + RESULT) * np.abs(value[j, counts]) + TINY
    return Expected(value, error)


def states(
    s: Expected,
    values: Float64,
    rows: Rows,
    roots: Int64,
    split_tokens: int,
    arithmetic: Arithmetic,
    rounded: str = "",
) -> States:
    """Logits (rows, q_len, group) × values (rows, d_v) → the states of the roots, int64 (r, 4).

    `rounded` is the type that a fused kernel rounds weights and outputs to.
    """
    u = _unit(arithmetic)
    _, q_len, group = s.value.shape
    r, d_v = len(roots), values.shape[1]
    made = States(
        np.full((r, q_len, group), -np.inf),
        np.zeros((r, q_len, group)),
        np.zeros((r, q_len, group, d_v)),
        np.zeros((r, q_len, group)),
        np.zeros((r, q_len, group)),
        np.zeros((r, q_len, group, d_v)),
        np.zeros((r, q_len, group)),
    )
    for i, (sequence, head, level, index) in enumerate(roots.tolist()):
        split = rows.position // split_tokens
        mine = (rows.sequence == sequence) & (rows.kv_head == head) & (split >> level == index)
        partials = len(np.unique(split[mine]))
        for t in range(q_len):
            for g in range(group):
                logit, off = s.value[mine, t, g], s.error[mine, t, g]
                some = ~np.isneginf(logit)
                if not some.any():
                    continue
                logit, off, v = logit[some], off[some], values[mine][some]
                m = logit.max()
                p = np.exp(logit - m)
                made.m[i, t, g], made.total[i, t, g], made.acc[i, t, g] = m, p.sum(), p @ v
                made.m_error[i, t, g] = off.max() + (4 * u + ROUNDOFF[arithmetic.wire]) * abs(m)
                ds = float((off + 2 * u * (m - logit)).max())
                steps = (2 * split_tokens + 8 * partials + 18) * u
                made.relative[i, t, g] = np.expm1(2 * min(ds, 300.0)) + steps + ROUNDOFF[arithmetic.wire] * (1 + abs(m))
                made.weight[i, t, g] = p @ np.abs(v) + TINY * (1 + np.abs(v).sum(axis=0)) / u
                if rounded:
                    above, h = float(np.log(p.sum())), ROUNDOFF[rounded]
                    made.above[i, t, g] = above
                    made.m_error[i, t, g] += ds - off.max() + (4 * len(p) + 8 * partials + 18 + 4 * above) * u
                    more = (4 * len(p) - 2 * split_tokens) * u + 4 * u * (abs(m) + above)
                    made.relative[i, t, g] = (1 + made.relative[i, t, g] + max(more, 0.0)) * (1 + h) ** 2 - 1
                    lost = h * SMALLEST_NORMAL[rounded] * (np.abs(v).sum(axis=0) + p.sum())
                    made.weight[i, t, g] += lost / made.relative[i, t, g]
    return made


def merged(given: Float64, roots: Int64, shape: tuple[int, int, int, int, int], arithmetic: Arithmetic) -> Expected:
    """States (r, q_len, group, 2 + d_v) → output (S, q_len, H·group, d_v); `shape` is S, q_len, H, group, d_v."""
    u = _unit(arithmetic)
    num_sequences, q_len, num_kv_heads, group, d_v = shape
    value = np.zeros((num_sequences, q_len, num_kv_heads * group, d_v))
    error = np.zeros_like(value)
    for sequence in range(num_sequences):
        for head in range(num_kv_heads):
            mine = given[(roots[:, 0] == sequence) & (roots[:, 1] == head)]
            for t in range(q_len):
                for g in range(group):
                    state = mine[:, t, g]
                    state = state[~np.isneginf(state[:, 0])]
                    if not len(state):
                        continue
                    far = state[:, 0].max() - state[:, 0]
                    weight = np.exp(-far)
                    total = weight @ state[:, 1]
                    at = (sequence, t, head * group + g)
                    value[at] = weight @ state[:, 2:] / total
                    share = np.expm1(min(4 * u * float(far.max()), 300.0)) + (8 * len(state) + 16) * u
                    error[at] = share * (weight @ np.abs(state[:, 2:])) / total + RESULT * np.abs(value[at]) + TINY
    return Expected(value, error)


def scores(
    queries: Float64, summaries: Float64, rows: Rows, group: int, summary: str, reduce: str, arithmetic: Arithmetic
) -> Expected:
    """queries (S, 1, H·group, d) × summaries (rows, d) or (rows, 2, d) → (rows,)."""
    u = _unit(arithmetic)
    n, d = len(rows.position), queries.shape[3]
    value, error = np.zeros(n), np.zeros(n)
    for j in range(n):
        head = int(rows.kv_head[j])
        q = queries[int(rows.sequence[j]), 0, head * group : (head + 1) * group]
        bounds = summaries[j] if summary == "minmax" else [summaries[j]]
        products = np.max([q * bound for bound in bounds], axis=0)  # the minimum is below the maximum: Quest's bound
        each, size = products.sum(axis=1), np.abs(products).sum(axis=1)
        value[j] = each.max() if reduce == "max" else each.sum()
        error[j] = (d + 2) * u * size.max() if reduce == "max" else (d + group + 2) * u * size.sum()
        error[j] += RESULT * abs(value[j]) + TINY
    return Expected(value, error)


def shares(
    queries: Float64, summaries: Float64, rows: Rows, group: int, summary: str, scale: float, arithmetic: Arithmetic
) -> Expected:
    """The same operands; each row's share of the softmax over its sequence and KV head, summed over the group."""
    u = _unit(arithmetic)
    n, d = len(rows.position), queries.shape[3]
    value, error = np.zeros(n), np.zeros(n)
    for sequence, head in {(int(s), int(h)) for s, h in zip(rows.sequence, rows.kv_head, strict=True)}:
        mine = np.flatnonzero((rows.sequence == sequence) & (rows.kv_head == head))
        for q in queries[sequence, 0, head * group : (head + 1) * group]:
            bounds = [summaries[mine, 0], summaries[mine, 1]] if summary == "minmax" else [summaries[mine]]
            products = np.max([q * bound for bound in bounds], axis=0)
            s = scale * products.sum(axis=1)
            off = (d + 2) * u * abs(scale) * np.abs(products).sum(axis=1) + 2 * u * np.abs(s) + 2 * u * (s.max() - s)
            p = np.exp(s - s.max())
            p /= p.sum()
            value[mine] += p
            relative = np.expm1(2 * min(float(off.max()), 300.0)) + (len(mine) + group + 16) * u + RESULT
            error[mine] += relative * p + 2 * TINY
    return Expected(value, error)


def topk(given: NDArray[np.float32], lengths: Int64, k: int, reduce: str = "max") -> Int64:
    """Score descending, then index ascending; NaN last; −1 where the list is shorter than k: int64 (n, k).

    `given` is (Σ lengths, group), or (Σ lengths,).
    """
    chosen = np.full((len(lengths), k), -1, dtype=np.int64)
    entries = given.reshape(len(given), -1) if given.size else np.empty((0, 1), np.float32)
    at = 0
    for i, length in enumerate(lengths.tolist()):
        listed = [_of_group(members, reduce) for members in entries[at : at + length]]
        at += length
        best = sorted(
            range(length), key=lambda j: (listed[j] != listed[j], 0.0 if listed[j] != listed[j] else -listed[j], j)
        )
        chosen[i, : min(k, length)] = best[:k]
    return chosen


def _of_group(members: NDArray[np.float32], reduce: str) -> float:
    if reduce == "max":
        return float("nan") if any(x != x for x in members.tolist()) else max(members.tolist())
    total = members[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for x in members[1:]:
            total = np.float32(total + x)
    return float(total)


def _unit(arithmetic: Arithmetic) -> float:
    return max(ROUNDOFF[arithmetic.accumulator], ROUNDOFF[arithmetic.exp])
