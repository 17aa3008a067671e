"""cluster: K rows → clusters, by spherical k-means within segments (contract.py).

A segment's rows are widened once, into float32 scratch. A round meets every row with every centroid (meeting.py), then
sums rows in ascending order, in float64; a centroid is that sum over the number of rows, rounded to float32, and its
norm a float64 sum in ascending order of the channel. A round that changes no label is the last: those after it would
change nothing.

Threads take whole segments. Of the segments that are left over, each is shared: rows are met in chunks and summed by
columns, so that the order of every sum, and with it every bit, stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.blocks import padded
from tierloop.devices.kernels.compiled import (
    FLOAT,
    INT64,
    INTS,
    TABLE,
    address_of,
    kernel,
    load_float,
    move_bytes,
    store_float,
    store_int,
    take_next,
)
from tierloop.devices.kernels.contract import ITEMSIZE, Cluster, cut_into_segments, num_clusters
from tierloop.devices.kernels.lanes import CODES, LANES
from tierloop.devices.kernels.meeting import (
    ADD_ROW,
    BEST,
    MEET,
    TILE_ROWS,
    WIDEN,
    call_add_row,
    call_best,
    call_meet,
    call_widen,
    forget,
)
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile

Int64 = NDArray[np.int64]

_CHUNK = 32 * TILE_ROWS
"""Rows that meet all centroids before the next ones do: 96 KiB of head_dim 128, which stays in the second cache."""

_FLOATS = types.Array(types.float32, 2, "C")
_DOUBLES = types.Array(types.float64, 2, "C")
_LABELS = types.Array(types.int64, 1, "C")


@kernel(types.void, INT64, INT64, TABLE, INTS, *(INT64,) * 4, INTS, INT64)
def _widen_rows(
    base: int, row: int, spans: Int64, first_row: Int64, n: int, dtype: int, head_dim: int, item: int,
    widen: Int64, target: int,
) -> None:  # fmt: skip
    """Rows [row, row + n) of a launch as float32 (n, padded head_dim)."""
    run = how_many_up_to(first_row, first_row.shape[0], row) - 1
    nbytes = head_dim * item
    for i in range(n):
        while first_row[run + 1] <= row + i:
            run += 1
        source = base + spans[run, 0] + (row + i - first_row[run]) * nbytes
        call_widen(widen[dtype], source, head_dim, target + i * 4 * padded(head_dim))


@kernel(types.void, _FLOATS, INT64, INT64, _FLOATS)
def _begin(rows: NDArray[np.float32], n: int, c: int, centroids: NDArray[np.float32]) -> None:
    """Centroid i begins as row floor(i · n / c)."""
    for i in range(c):
        centroids[i] = rows[i * n // c]


@kernel(types.void, _FLOATS, INT64, INT64, INT64)
def _pack(centroids: NDArray[np.float32], c: int, dim: int, packed: int) -> None:
    """Normalised centroids (blocks of 16, dim, 16 lanes); NaN, which never wins, in lanes without one."""
    for lane in range((c + LANES - 1) // LANES * LANES):
        place = packed + 4 * (lane // LANES * dim * LANES + lane % LANES)
        square = 0.0
        if lane < c:
            for k in range(dim):
                x = np.float64(centroids[lane, k])
                square += x * x
        norm = np.sqrt(square)
        for k in range(dim):
            x = np.float64(centroids[lane, k]) / norm if lane < c else np.nan
            store_float(place + 4 * LANES * k, np.float32(x))


@kernel(types.void, INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT64)
def _assign(
    counter: int, rows: int, stride: int, n: int, packed: int, c: int, dim: int, meet: int, best: int, labels: int
) -> None:
    """Take chunks of the n rows until none is left: each row's label."""
    values, indices = np.empty((_CHUNK, LANES), np.float32), np.empty((_CHUNK, LANES), np.int32)
    while True:
        low = take_next(counter) * _CHUNK
        if low >= n:
            break
        count = min(_CHUNK, n - low)
        tiles = (count + TILE_ROWS - 1) // TILE_ROWS
        forget(values.ctypes.data, indices.ctypes.data, tiles * TILE_ROWS)
        for block in range((c + LANES - 1) // LANES - 1, -1, -1):
            call_meet(
                meet, rows + low * stride, stride, tiles, packed + block * dim * LANES * 4, dim, block * LANES,
                values.ctypes.data, indices.ctypes.data,
            )  # fmt: skip
        call_best(best, values.ctypes.data, indices.ctypes.data, count, labels + 8 * low)


@kernel(types.void, INT64, INT64, _FLOATS, _LABELS, INTS, _DOUBLES, _FLOATS, INT64, INT64)
def _average(
    counter: int, share_columns: int, rows: NDArray[np.float32], labels: Int64, sizes: Int64,
    sums: NDArray[np.float64], centroids: NDArray[np.float32], stays: int, add_row: int,
) -> None:  # fmt: skip
    """Take shares of the columns until none is left: centroids become means; those without rows stay, or become 0."""
    width, c = rows.shape[1], sizes.shape[0]
    while True:
        first = take_next(counter) * share_columns
        if first >= width:
            break
        count = min(share_columns, width - first)
        for i in range(c):
            for k in range(first, first + count):
                sums[i, k] = 0.0
        for row in range(labels.shape[0]):
            call_add_row(
                add_row, rows.ctypes.data + 4 * (row * width + first), count,
                sums.ctypes.data + 8 * (labels[row] * width + first),
            )  # fmt: skip
        for i in range(c):
            if sizes[i]:
                for k in range(first, first + count):
                    centroids[i, k] = sums[i, k] / np.float64(sizes[i])
            elif not stays:
                for k in range(first, first + count):
                    centroids[i, k] = 0.0


@kernel(INT64, _LABELS, _LABELS, _LABELS)
def _count(labels: Int64, before: Int64, sizes: Int64) -> int:
    """The rows of each cluster into `sizes`; whether any label is not what it was before."""
    sizes[:] = 0
    changed = 0
    for row in range(labels.shape[0]):
        changed |= labels[row] != before[row]
        sizes[labels[row]] += 1
    return changed


@kernel(types.void, _FLOATS, INT64, INT64, _LABELS, INT64, INT64, INT64)
def _deliver(
    centroids: NDArray[np.float32], c: int, dim: int, labels: Int64, first: int, out: int, out_labels: int
) -> None:
    """A segment's results, its first centroid being the `first` of the launch."""
    for i in range(c):
        move_bytes(out + 4 * i * dim, centroids.ctypes.data + 4 * i * centroids.shape[1], 4 * dim)
    for row in range(labels.shape[0]):
        store_int(out_labels + 8 * row, labels[row] + first)


class _Launch:
    """One launch: its rows, its segments, and where its results go."""

    def __init__(self, args: Cluster, operands: Operands, reads: tuple[Operand, ...]) -> None:
        self.args = args
        self.dtype = CODES[args.dtype]
        self.item = ITEMSIZE[args.dtype]
        self.base, self.spans = operands.rows(reads[0])
        self.rows = Rows(args.runs, self.spans, args.head_dim * self.item, args.num_sequences, args.num_kv_heads)
        self.segments = _segments(args, self.rows)
        self.num_clusters = int(self.segments[:, 2].sum())
        self.first_cluster = np.cumsum(self.segments[:, 2]) - self.segments[:, 2]
        self.centroids = self.labels = 0

    def cluster(self, which: int, threads: int) -> None:
        """Cluster one segment."""
        first, n, c = self.segments[which].tolist()
        dim = self.args.head_dim
        width = padded(dim)
        rows = np.zeros((-(-n // TILE_ROWS) * TILE_ROWS, width), dtype=np.float32)
        centroids, sums = np.empty((c, width), dtype=np.float32), np.empty((c, width), dtype=np.float64)
        packed = np.empty(-(-c // LANES) * LANES * dim, dtype=np.float32)
        labels, before = np.empty(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        sizes = np.empty(c, dtype=np.int64)
        _widen_rows(
            self.base, first, self.spans, self.rows.first_row, n, self.dtype, dim, self.item, WIDEN, rows.ctypes.data
        )
        _begin(rows, n, c, centroids)

        def assign() -> bool:
            nonlocal labels, before
            labels, before = before, labels
            _pack(centroids, c, dim, packed.ctypes.data)
            rows_at, packed_at, labels_at = rows.ctypes.data, packed.ctypes.data, labels.ctypes.data
            _together(
                threads,
                lambda counter: _assign(
                    counter, rows_at, 4 * width, n, packed_at, c, dim, MEET, BEST, labels_at
                ),
            )
            return bool(_count(labels, before, sizes))

        def average(stays: bool) -> None:
            columns = -(-width // (threads * LANES)) * LANES
            _together(
                threads,
                lambda counter: _average(counter, columns, rows, labels, sizes, sums, centroids, stays, ADD_ROW),
            )

        labels, before = before, labels
        for _ in range(self.args.iterations):
            if not assign():
                break
            average(stays=True)
        else:
            assign()
        average(stays=False)
        at = int(self.first_cluster[which])
        _deliver(centroids, c, dim, labels, at, self.centroids + 4 * at * dim, self.labels + 8 * first)


def _together(threads: int, work: Callable[[int], None]) -> None:
    """Call `work` with the address of a shared counter, on several threads."""
    counter = np.zeros(8, dtype=np.uint8)
    share(threads, lambda: work(address_of(counter)))


def _segments(args: Cluster, rows: Rows) -> Int64:
    """Of every segment of a launch: its first row, rows, and clusters: int64 (segments, 3)."""
    runs, first_row = rows.runs, rows.first_row
    new = np.ones(len(runs), dtype=bool)
    new[1:] = (runs[1:, :2] != runs[:-1, :2]).any(axis=1)
    borders = np.append(first_row[:-1][new], first_row[-1]).tolist()
    found = []
    for low, high in zip(borders[:-1], borders[1:], strict=True):
        for n in cut_into_segments(high - low, args.segment_tokens):
            found.append((low, n, num_clusters(n, n, args.cluster_tokens)))
            low += n
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def cluster(
    args: Cluster, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError for sizes, runs or results that do not fit each other."""
    check_sizes(head_dim=args.head_dim, segment_tokens=args.segment_tokens, cluster_tokens=args.cluster_tokens)
    if args.iterations < 0:
        raise ValueError(f"iterations is {args.iterations}; allowed: at least 0")
    operands = Operands(bytes_of)
    launch = _Launch(args, operands, reads)
    for what, operand, want in (
        ("centroids", writes[0], launch.num_clusters * args.head_dim * 4),
        ("labels", writes[1], launch.rows.total * 8),
    ):
        got = sum(segment.spans.nbytes for segment in operand)
        if got != want:
            raise ValueError(f"{what} have {got} bytes; {launch.num_clusters} clusters, {launch.rows.total} rows: {want}")
    launch.centroids, launch.labels = operands.target(writes[0]), operands.target(writes[1])
    count = len(launch.segments)
    threads = worthwhile(threads, launch.rows.total * args.head_dim * 4)
    alone = count // threads * threads

    def work(counter: int) -> None:
        for _ in range(count):
            which = int(_take(counter))
            if which >= alone:
                break
            launch.cluster(which, 1)

    _together(threads, work)
    for which in range(alone, count):
        launch.cluster(which, threads)
    operands.finish()


@kernel(INT64, INT64)
def _take(counter: int) -> int:
    taken: int = take_next(counter)
    return taken
