"""What others take for the same bytes: torch's attention in two forms, NumPy, and plain loops.

Each answer is how many times as long the other one takes per row. Nothing is timed before it ran once. Where torch
would take too long, it gets fewer tokens of the same stored rows, which is never to its harm: rates are compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.contract import ITEMSIZE
from tierloop.tools import limit_kernels
from tierloop.tools.bench_cases import Parts
from tierloop.tools.bench_data import Bytes, Float32, Int64
from tierloop.tools.roofline import Machine, huge_bytes, seconds

FLOAT_TYPES = ("float32", "float16", "bfloat16")
_FIRST_TOKENS = 1024
_TRIES = 3
_SETTLE_S = 0.05
"""Threads of torch and of BLAS spin for a while after their work; others wait for that."""
_GATHER_PIECE = 1024


def median_s(call: Callable[[], object], budget_s: float = math.inf) -> float:
    """Of a few calls, after one that is not counted; of one where that took longer than the budget."""
    tries = _TRIES if seconds(call) <= budget_s else 1
    return statistics.median(seconds(call) for _ in range(tries))


def torch_row_s(parts: Parts, threads: int, budget_s: float) -> dict[str, float]:
    """Seconds per row of scaled_dot_product_attention: `gqa` with enable_gqa and q (1, heads, 1, d), `reshaped` with
    the group as query length, q (1, kv_heads, group, d); and `tokens`, how many of each head it got."""
    import torch

    kind: Any = getattr(torch, parts.dtype)
    keys, values = (_tensor(torch, parts, stored, kind) for stored in (parts.keys, parts.values))
    queries: Any = torch.from_numpy(parts.queries).to(kind)
    shaped = {
        "gqa": (queries.view(1, parts.heads * parts.group, 1, parts.head_dim), parts.group > 1),
        "reshaped": (queries.view(1, parts.heads, parts.group, parts.head_dim), False),
    }
    if parts.group == 1:
        del shaped["gqa"]  # the same call
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[str, float] = {}
    try:
        for name, (query, gqa) in shaped.items():

            def attend(tokens: int, query: Any = query, gqa: bool = gqa) -> None:
                torch.nn.functional.scaled_dot_product_attention(
                    query, keys[:, :, :tokens], values[:, :, :tokens], enable_gqa=gqa
                )

            first = min(_FIRST_TOKENS, parts.tokens)
            attend(first)
            rate = first / seconds(partial(attend, first))
            tokens = max(first, min(parts.tokens, int(rate * budget_s / (_TRIES + 1))))
            found[name] = median_s(partial(attend, tokens)) / (tokens * parts.heads)
            found["tokens"] = float(tokens)
    finally:
        torch.set_num_threads(before)
        time.sleep(_SETTLE_S)
    found.setdefault("gqa", found["reshaped"])
    return found


def _tensor(torch: Any, parts: Parts, stored: Bytes, kind: Any) -> Any:
    """Stored rows as (1, heads, tokens, head_dim), without a copy."""
    count = parts.heads * parts.tokens * parts.head_dim
    raw = stored[: count * ITEMSIZE[parts.dtype]]
    numbers = torch.from_numpy(raw.view(np.float32 if parts.dtype == "float32" else np.int16)).view(kind)
    return numbers.view(1, parts.heads, parts.tokens, parts.head_dim)


def numpy_row_s(parts: Parts, budget_s: float) -> float:
    """Seconds per row of attention in NumPy over float32 rows, with as many threads as its BLAS takes."""
    shape = (parts.heads, parts.tokens, parts.head_dim)
    count = int(np.prod(shape))
    keys, values = (stored[: 4 * count].view(np.float32).reshape(shape) for stored in (parts.keys, parts.values))
    queries = parts.queries.reshape(parts.heads, parts.group, parts.head_dim)

    def attend() -> Float32:
        logits = np.matmul(queries, keys.transpose(0, 2, 1)) * np.float32(parts.scale)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        output: Float32 = np.matmul(weights, values) / weights.sum(axis=-1, keepdims=True)
        return output

    result = median_s(attend, budget_s) / (parts.heads * parts.tokens)
    time.sleep(_SETTLE_S)
    return result


def gather_s(machine: Machine, stored: Bytes, offsets: Int64, row_nbytes: int) -> float:
    """Seconds of a plain compiled loop, without prefetch, that copies rows at `offsets` to a dense array."""
    target = huge_bytes(len(offsets) * row_nbytes)
    given = (address_of(target), address_of(stored), offsets, row_nbytes, _GATHER_PIECE)
    return median_s(partial(machine.share, limit_kernels.gather_shared, *given))


def numpy_topk_s(scores: Float32, k: int) -> float:
    """Seconds of np.argpartition and a sort of the k best."""

    def select() -> Int64:
        best = np.argpartition(-scores, k - 1)[:k]
        return np.asarray(best[np.lexsort((best, -scores[best]))], dtype=np.int64)

    return median_s(select)
