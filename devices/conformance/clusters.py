"""What the check of `cluster` needs: keys that are easy to tell apart, keys that are not, and judgement of results.

Labels jump where two products are nearly equal. So they must be the expected ones where rows lie around orthogonal
directions; on other rows, with no round of training, the centroid of each row must be the best within the rounding
bound of a product, (d + 4)·u·Σ|q||ĉ|, the centroids being rows. Always, centroids are the means of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.conformance import oracle
from tierloop.devices.conformance.judging import judge
from tierloop.devices.conformance.launches import Bench
from tierloop.devices.conformance.oracle import Float64, Int64
from tierloop.devices.conformance.subject import Bytes, expect
from tierloop.devices.kernels.contract import Cluster, DType

SEGMENT, TOKENS = 32, 8
_HEADS = ((0, 0, 70), (0, 1, 1), (1, 1, 45), (2, 0, 7))
"""Sequence, KV head and rows: segments of 32 + 38, 1, 45 and 7 rows."""
_SEGMENTS = ((32, 4), (38, 4), (1, 1), (45, 5), (7, 1))
"""Rows and clusters of each segment, counted by hand."""


@dataclass(frozen=True)
class Keys:
    """Stored keys, the numbers that they are (rows, dim), and where rows lie: runs (n, 3) and their lengths."""

    dtype: DType
    stored: Bytes
    numbers: Float64
    runs: Int64
    lengths: Int64
    labels: Int64
    """The direction that each row was made from, counted over the launch."""


def make_keys(dtype: DType, dim: int, spread: float, rng: np.random.Generator) -> Keys:
    """Rows around one direction for each centroid, whose first row is one of it; `spread` 1 is easy to tell apart."""
    rows, labels, known = [], [], 0
    for n, c in _SEGMENTS:
        directions = np.linalg.qr(rng.normal(size=(dim, dim)))[0][:c] * 60
        mine = rng.integers(0, c, n)
        mine[np.arange(c) * n // c] = np.arange(c)
        rows.append(directions[mine] + rng.normal(size=(n, dim)) * spread)
        labels.append(mine + known)
        known += c
    stored = oracle.encode(np.concatenate(rows).astype(np.float32), dtype)
    runs = [(s, h, 5 + at) for s, h, n in _HEADS for at in range(0, n, 9)]
    lengths = [min(9, n - at) for _, _, n in _HEADS for at in range(0, n, 9)]
    return Keys(
        dtype, stored, oracle.decode(stored, dtype).reshape(-1, dim), np.array(runs, dtype=np.int64),
        np.array(lengths, dtype=np.int64), np.concatenate(labels),
    )  # fmt: skip


def run_cluster(bench: Bench, keys: Keys, iterations: int) -> tuple[Float64, Int64]:
    """Centroids and labels as the device gives them."""
    dim = keys.numbers.shape[1]
    args = Cluster(keys.dtype, 3, 2, dim, keys.runs, SEGMENT, TOKENS, iterations)
    row_nbytes = keys.stored.size // len(keys.numbers)
    clusters = sum(c for _, c in _SEGMENTS)
    targets = bench.target(clusters * dim * 4), bench.target(len(keys.numbers) * 8)
    reads = (bench.scattered(keys.stored, keys.lengths * row_nbytes),)
    bench.subject.run(bench.lane, Launch(args, reads, targets))
    centroids, labels = (bench.subject.read(operand[0]) for operand in targets)
    return centroids.view(np.float32).reshape(-1, dim).astype(np.float64), labels.view(np.int64)


def judge_labels(labels: Int64, want: Int64, what: str) -> None:
    """Exactly these."""
    wrong = np.flatnonzero(labels != want)
    if wrong.size:
        i = int(wrong[0])
        expect(
            False, f"{what}: row {i} is in cluster {labels[i]}, not {want[i]}; {len(wrong)} of {len(want)} are wrong"
        )


def judge_means(bench: Bench, keys: Keys, centroids: Float64, labels: Int64, what: str) -> None:
    """Each centroid is the mean of its rows, zeros where it has none."""
    u = oracle.ROUNDOFF[bench.arithmetic.accumulator]
    want, error = np.zeros_like(centroids), np.zeros_like(centroids)
    for i in range(len(centroids)):
        mine = keys.numbers[labels == i]
        if len(mine):
            want[i] = mine.mean(axis=0)
            size = np.abs(mine).mean(axis=0)
            error[i] = (len(mine) + 1) * u * size + oracle.RESULT * size + oracle.TINY
    judge(centroids, want, error, f"{what}: centroids")


def judge_nearest(bench: Bench, keys: Keys, labels: Int64, what: str) -> None:
    """Without a round of training: the centroid of each row, a row itself, is the best of its segment or nearly."""
    u = max(oracle.ROUNDOFF[bench.arithmetic.accumulator], oracle.RESULT)
    low, known = 0, 0
    for n, c in _SEGMENTS:
        x, mine = keys.numbers[low : low + n], labels[low : low + n] - known
        expect(bool(((mine >= 0) & (mine < c)).all()), f"{what}: a label lies outside its segment's clusters")
        unit = x[np.arange(c) * n // c]
        unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
        products, error = x @ unit.T, (x.shape[1] + 4) * u * (np.abs(x) @ np.abs(unit).T)
        short = (products - error).max(axis=1) - (products + error)[np.arange(n), mine]
        if (short > 0).any():
            expect(False, f"{what}: row {low + int(short.argmax())} has a centroid that is better by {short.max():.3g}")
        low, known = low + n, known + c
