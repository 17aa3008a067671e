"""States on a GPU: from logits and values of tiles, or from what a fused kernel answers, and merged below their roots.

All float32, natural logarithm.

A weight of 0 does not make a value harmless (0 · NaN is NaN), and what does not count must not matter. So the product
with the values leaves out what is not finite, and a second one counts, for each channel, the rows that count and have
+inf, −inf or NaN there: three counts below 2**8 in one float32, which is exact for tiles of up to 128 rows.

Tiles of a root are merged pairwise, level by level; the identity stands in where there is no partner.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_operands import Upload

Int64 = NDArray[np.int64]
_INFINITY = float("inf")
_MINUS, _NAN = 1 << 8, 1 << 16
"""What −inf and NaN count as; +inf is 1."""


def states_of(s: Tensor, v: Tensor, always_finite: bool) -> Tensor:
    """Logits (tiles, queries, size), −inf where a row does not count, and values (tiles, size, d) → states.

    float32 (tiles, queries, 2 + d). `always_finite` says that values cannot be anything else.
    """
    m = s.amax(dim=-1)
    p = torch.exp(s - torch.where(m == -_INFINITY, 0.0, m)[..., None])
    total = p.sum(dim=-1)
    if always_finite:
        acc = torch.bmm(p, v)
    else:
        finite = torch.isfinite(v)
        acc = _spoilt(torch.bmm(p, torch.where(finite, v, 0.0)), s, p, v)
    return torch.cat([m[..., None], total[..., None], acc + 0.0], dim=-1)


def normalised(output: Tensor, lse: Tensor) -> Tensor:
    """Attention output (n, queries, d) and its log-sum-exp (n, queries), natural → the states (lse, 1, output).

    A query that no row counts for has nothing to normalise by, and kernels then answer zeros with −inf or, as flash
    attention does, +inf: either is the identity. What else is not a number or infinite has met a NaN or a logit of
    +inf, and is NaN throughout.
    """
    empty = (lse == -_INFINITY) | ((lse == _INFINITY) & (output == 0).all(dim=-1))
    spoilt = torch.isnan(lse) | (lse == _INFINITY)
    m = torch.where(empty, -_INFINITY, lse)[..., None]
    total = torch.where(empty, 0.0, torch.where(spoilt, torch.nan, 1.0))[..., None]
    acc = torch.where((empty | ~spoilt)[..., None], output.float() + 0.0, torch.nan)
    return torch.cat([m, total, acc], dim=-1)


def _spoilt(acc: Tensor, s: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Add to sums of finite values what is not: 0 · inf is NaN, and so is inf − inf."""
    queries = s.shape[1]
    counts = s != -_INFINITY
    weights = torch.cat([counts & (p > 0), counts & (p == 0)], dim=1).float()
    kinds = (v == _INFINITY).float() + _MINUS * (v == -_INFINITY).float() + _NAN * torch.isnan(v).float()
    hits = torch.bmm(weights, kinds)
    weighed, underflown = hits[:, :queries].int(), hits[:, queries:]
    plus, minus, nan = weighed & 255 != 0, weighed >> 8 & 255 != 0, weighed >> 16 != 0
    acc = torch.where(plus, _INFINITY, torch.where(minus, -_INFINITY, acc))
    return torch.where(nan | (plus & minus) | (underflown != 0), torch.nan, acc)


def identity(num: int, queries: int, dim: int, device: torch.device) -> Tensor:
    """States (num, queries, 2 + dim) that change nothing."""
    states = torch.zeros((num, queries, 2 + dim), dtype=torch.float32, device=device)
    states[..., 0] = -_INFINITY
    return states


def merge(a: Tensor, b: Tensor) -> Tensor:
    """The states of the unions of disjoint rows, (n, queries, 2 + d) each; an identity leaves the other as it is."""
    m = torch.maximum(a[..., :1], b[..., :1])
    merged = a * torch.exp(a[..., :1] - m) + b * torch.exp(b[..., :1] - m)
    merged[..., :1] = m
    merged = torch.where(b[..., :1] == -_INFINITY, a, merged)
    return torch.where(a[..., :1] == -_INFINITY, b, merged)


def merge_groups(states: Tensor, counts: Int64, upload: Upload) -> Tensor:
    """States (n, …), those of a group side by side, `counts` (groups,) of them each → one per group."""
    identities = identity(1, states.shape[1], states.shape[2] - 2, states.device)
    states = torch.cat([states, identities])
    while counts.size and counts.max() > 1:
        left, right, counts = _pairs(counts)
        pairs = upload(np.stack([left, right]))
        states = torch.cat([merge(states[pairs[0]], states[pairs[1]]), identities])
    if (counts == 1).all():
        return states[:-1]
    places = np.where(counts > 0, np.cumsum(counts) - 1, len(states) - 1)
    return states[upload(places)]


def _pairs(counts: Int64) -> tuple[Int64, Int64, Int64]:
    """Which states are merged with which, and how many are left of each group; one without a partner meets the last."""
    fewer = (counts + 1) // 2
    group = np.repeat(np.arange(len(counts)), fewer)
    nth = 2 * (np.arange(len(group)) - np.repeat(np.cumsum(fewer) - fewer, fewer))
    left = (np.cumsum(counts) - counts)[group] + nth
    right = np.where(nth + 1 < counts[group], left + 1, int(counts.sum()))
    return left, right, fewer
