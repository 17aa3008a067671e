"""`cluster` in the attention bench: its speed, its check, and its share of the prefill whose keys it clusters."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.kernels.contract import Cluster
from tierloop.devices.kernels.definition import numbers
from tierloop.runtime.bounds import U
from tierloop.tools.bench_cases import Case, Float64, Run, error_if, error_over, work_of, written
from tierloop.tools.bench_data import KV_HEADS, Int64, Sizes, Stored, bytes_of, place, whole
from tierloop.tools.roofline import seconds

HEAD_DIM = 128
NUM_LAYERS = 32
LONG_TOKENS = 32_768
"""The prompt for which attention's own products are added to the prefill."""
CHECK_ROWS, CHECK_SEGMENT = 1024, 512
CLUSTER_TOKENS, ITERATIONS = 16, 10


def cluster_case(store: Stored, sizes: Sizes) -> Case:
    """One segment of keys of each head, float32."""
    heads, tokens = sizes.cluster_heads, sizes.segment_tokens
    launch = _launch(store, heads, tokens, tokens)

    def check(run: Run) -> float:
        small = _launch(store, 1, CHECK_ROWS, CHECK_SEGMENT)
        run(small)
        rows = numbers(store.keys[: CHECK_ROWS * HEAD_DIM * 4], "float32").reshape(-1, CHECK_SEGMENT, HEAD_DIM)
        labels = bytes_of(small.writes[1][0].region).view(np.int64).reshape(len(rows), CHECK_SEGMENT)
        worst = 0.0
        for segment, (given, found) in enumerate(zip(rows, labels, strict=True)):
            clusters = CHECK_SEGMENT // CLUSTER_TOKENS
            expected = _labels(given)
            worst = max(worst, error_if(bool((found - segment * clusters != expected).any())))
            sums, size, count = _sums(given, expected, clusters)
            centroids = written(small).reshape(len(rows), clusters, HEAD_DIM)[segment]
            bound = (count + 2) * U * size / np.maximum(count, 1)
            worst = max(worst, error_over(centroids, sums / np.maximum(count, 1), bound))
        return worst

    rows = heads * tokens
    return Case("cluster", "float32", None, HEAD_DIM, tokens, (launch,), 0, work_of(launch), rows, check)


def _launch(store: Stored, heads: int, tokens: int, segment: int) -> Launch:
    where = place(heads, tokens)
    args = Cluster("float32", 1, heads, HEAD_DIM, where.runs, segment, CLUSTER_TOKENS, ITERATIONS)
    clusters = heads * tokens // CLUSTER_TOKENS
    centroids = np.zeros((clusters, HEAD_DIM), dtype=np.float32)
    labels = np.zeros(heads * tokens, dtype=np.int64)
    return Launch(args, (where.operand(store.keys, HEAD_DIM * 4),), (whole(centroids), whole(labels)))


def _labels(rows: Float64) -> Int64:
    """The last assignment of spherical k-means in float64: int64 (n,)."""
    count = len(rows) // CLUSTER_TOKENS
    centroids = rows[np.arange(count) * len(rows) // count]
    for _ in range(ITERATIONS):
        sums, _, size = _sums(rows, _nearest(rows, centroids), count)
        centroids = np.where(size > 0, sums / np.maximum(size, 1), centroids)
    return _nearest(rows, centroids)


def _nearest(rows: Float64, centroids: Float64) -> Int64:
    length = np.maximum(np.sqrt((centroids**2).sum(axis=1)), np.finfo(np.float32).tiny)
    return np.asarray((np.einsum("nd,cd->nc", rows, centroids) / length).argmax(axis=1), dtype=np.int64)


def _sums(rows: Float64, labels: Int64, count: int) -> tuple[Float64, Float64, Float64]:
    """Of each cluster: the sum of its rows, of their magnitudes, and how many there are (clusters, 1)."""
    member = (labels == np.arange(count)[:, None]).astype(np.float64)
    return member @ rows, member @ np.abs(rows), member.sum(axis=1, keepdims=True)


def prefill_shares(cluster_s: float, sizes: Sizes, threads: int) -> dict[str, float]:
    """Clustering the keys of a prompt, over the prefill of the prompt, in a model of NUM_LAYERS such layers.

    `prefill_share` counts the projections and the MLP of a layer, measured as float32 matmuls of torch over a chunk of
    tokens; `prefill_share_long` adds causal attention over LONG_TOKENS at the same FLOP/s. Both sides grow with layers
    and tokens alike, so the share of one layer is that of the model.
    """
    clustered = cluster_s / (sizes.segment_tokens * sizes.cluster_heads) * KV_HEADS
    layer_s, flops = layer_matmuls(sizes, threads)
    per_token = layer_s / sizes.prefill_tokens
    attention = 4 * sizes.hidden[0] * LONG_TOKENS / 2 * layer_s / flops
    return {"prefill_share": clustered / per_token, "prefill_share_long": clustered / (per_token + attention)}


def layer_matmuls(sizes: Sizes, threads: int) -> tuple[float, float]:
    """Seconds and FLOPs of the matmuls of one layer over `prefill_tokens`: q, o, k, v, gate, up, down."""
    import torch

    width, kv, mlp = sizes.hidden
    torch.manual_seed(0)
    weights: Any = torch.empty(width * max(width, mlp)).uniform_(-0.02, 0.02)
    total, flops = 0.0, 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ins, outs, times in ((width, width, 2), (width, kv, 2), (width, mlp, 2), (mlp, width, 1)):
            given: Any = torch.randn(sizes.prefill_tokens, ins)
            weight = weights[: ins * outs].view(outs, ins)
            torch.nn.functional.linear(given, weight)
            total += times * sorted(seconds(lambda: torch.nn.functional.linear(given, weight)) for _ in range(3))[1]  # noqa: B023  # called at once
            flops += times * 2.0 * sizes.prefill_tokens * ins * outs
    finally:
        torch.set_num_threads(before)
    return total, flops
