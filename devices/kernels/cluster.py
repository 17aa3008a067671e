"""cluster: K rows → clusters, by spherical k-means within segments (contract.py).

A segment's rows are widened once, into float32 scratch. A round meets rows with centroids (meeting.py), then sums rows
in ascending order, in float64; a centroid is that sum over the number of rows, rounded to float32, and its norm a
float64 sum in ascending order of the channel.

What cannot change is not computed again. A centroid that no row joined or left keeps its bits, and so does its product
with every row; so a row whose centroid stayed meets only those that moved, and when no label changes, the remaining
rounds would change nothing. Keys of a 4,096-token prompt (SmolLM2): about half of all products in 10 rounds.

Threads take whole segments. Of the segments that are left over, each is shared: rows are met in chunks and summed by
columns, so that the order of every sum, and with it every bit, stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import (
    INT64,
    INTS,
    TABLE,
    address_of,
    kernel,
    move_bytes,
    store_float,
    store_int,
    take_next,
)
from tierloop.devices.kernels.contract import ITEMSIZE, Cluster, cut_into_segments, num_clusters
from tierloop.devices.kernels.entries import ENTRIES, WIDEN
from tierloop.devices.kernels.lanes import CODES, LANES
from tierloop.devices.kernels.meeting import (
    ADD_ROW,
    BEST,
    MEET,
    NOBODY,
    TILE_ROWS,
    call_add_row,
    call_best,
    call_meet,
)
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes, how_many_up_to
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.products import call_widen
from tierloop.devices.kernels.tiles import padded

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_CHUNK = 32 * TILE_ROWS
"""Rows that meet all centroids before the next ones do: 96 KiB of head_dim 128, which stays in the second cache."""

_FLOATS = types.Array(types.float32, 2, "C")
_DOUBLES = types.Array(types.float64, 2, "C")
_PLACES = types.Array(types.int64, 1, "C")
_NAMES = types.Array(types.int32, 1, "C")
_ROW = types.Array(types.float32, 1, "C")


@kernel(types.void, INT64, INT64, TABLE, INTS, *(INT64,) * 4, INTS, _PLACES, INT64)
def _widen_rows(
    base: int, row: int, spans: Int64, first_row: Int64, n: int, dtype: int, head_dim: int, item: int,
    entries: Int64, sources: Int64, target: int,
) -> None:  # fmt: skip
    """Rows [row, row + n) of a launch as float32 (n, padded head_dim); `sources` has room for their addresses."""
    run = how_many_up_to(first_row, first_row.shape[0], row) - 1
    nbytes = head_dim * item
    for i in range(n):
        while first_row[run + 1] <= row + i:
            run += 1
        sources[i] = base + spans[run, 0] + (row + i - first_row[run]) * nbytes
    call_widen(entries[WIDEN + dtype], sources.ctypes.data, n, head_dim, target, 4 * padded(head_dim))


@kernel(types.void, _FLOATS, _FLOATS)
def _begin(rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> None:
    """Centroid i begins as row floor(i · n / c)."""
    for i in range(centroids.shape[0]):
        centroids[i] = rows[i * rows.shape[0] // centroids.shape[0]]


@kernel(types.void, _FLOATS, _NAMES, INT64, _FLOATS)
def _normalise(centroids: NDArray[np.float32], moved: Int32, dim: int, normalised: NDArray[np.float32]) -> None:
    """c / |c| of the centroids that moved; NaN for zeros."""
    for i in range(centroids.shape[0]):
        if moved[i]:
            square = 0.0
            for k in range(dim):
                x = np.float64(centroids[i, k])
                square += x * x
            norm = np.sqrt(square)
            for k in range(dim):
                normalised[i, k] = np.float32(np.float64(centroids[i, k]) / norm)


@kernel(INT64, _FLOATS, _NAMES, INT64, INT64, _NAMES)
def _pack(normalised: NDArray[np.float32], moved: Int32, dim: int, packed: int, names: Int32) -> int:
    """Pack the centroids that moved, then the others, each kind into blocks of its own; returns how many moved blocks.

    `packed` float32 (blocks, dim, 16 lanes), `names` int32 (blocks · 16,); NaN and NOBODY in lanes that are left over.
    """
    lane, first = 0, 0
    for kind in range(2):
        for i in range(normalised.shape[0]):
            if (moved[i] == 0) == kind:
                place = packed + 4 * (lane // LANES * dim * LANES + lane % LANES)
                for k in range(dim):
                    store_float(place + 4 * LANES * k, normalised[i, k])
                names[lane] = i
                lane += 1
        while lane % LANES:
            place = packed + 4 * (lane // LANES * dim * LANES + lane % LANES)
            for k in range(dim):
                store_float(place + 4 * LANES * k, np.float32(np.nan))
            names[lane] = NOBODY
            lane += 1
        if kind == 0:
            first = lane // LANES
    names[lane:] = NOBODY
    return first


@kernel(INT64, _NAMES, _NAMES, _PLACES)
def _sort_rows(labels: Int32, moved: Int32, order: Int64) -> int:
    """Rows whose centroid moved (or that have none yet), then the others; returns how many of the first there are."""
    full = 0
    for row in range(labels.shape[0]):
        if labels[row] < 0 or moved[labels[row]]:
            order[full] = row
            full += 1
    place = full
    for row in range(labels.shape[0]):
        if labels[row] >= 0 and not moved[labels[row]]:
            order[place] = row
            place += 1
    return full


@kernel(types.void, INT64, INT64, INT64, _PLACES, INT64, INT64, INT64, INT64, _NAMES, INT64, INT64, _NAMES, _ROW)
def _assign(
    counter: int, rows: int, stride: int, order: Int64, num_full: int, packed: int, num_moved: int, dim: int,
    names: Int32, meet: int, best: int, labels: Int32, products: NDArray[np.float32],
) -> None:  # fmt: skip
    """Take chunks of the rows until none is left: the label and the best product of each.

    The first `num_full` rows of `order` meet every block, the others, which know their best so far, the `num_moved`
    first. The product of a row that nothing won is NaN and its label 0.
    """
    values, indices = np.empty((_CHUNK, LANES), np.float32), np.empty((_CHUNK, LANES), np.int32)
    found, winners = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.int32)
    places = np.empty(_CHUNK, np.int64)
    full_chunks = (num_full + _CHUNK - 1) // _CHUNK
    used = 0
    while used * LANES < names.shape[0] and names[used * LANES] != NOBODY:
        used += 1
    while True:
        chunk = take_next(counter)
        if chunk < full_chunks:
            low, high, blocks = chunk * _CHUNK, num_full, used
        else:
            low, high, blocks = num_full + (chunk - full_chunks) * _CHUNK, order.shape[0], num_moved
        if low >= high:
            break
        count = min(_CHUNK, high - low)
        tiles = (count + TILE_ROWS - 1) // TILE_ROWS
        values[:] = -np.inf
        indices[:] = NOBODY
        for j in range(tiles * TILE_ROWS):
            row = order[low + min(j, count - 1)]
            places[j] = rows + row * stride
            if chunk >= full_chunks and products[row] == products[row]:
                values[j, 0], indices[j, 0] = products[row], labels[row]
        for block in range(blocks):
            call_meet(
                meet, places.ctypes.data, tiles, packed + block * dim * LANES * 4, dim,
                names.ctypes.data + 4 * block * LANES, values.ctypes.data, indices.ctypes.data,
            )  # fmt: skip
        call_best(best, values.ctypes.data, indices.ctypes.data, count, found.ctypes.data, winners.ctypes.data)
        for j in range(count):
            row, won = order[low + j], winners[j] != NOBODY
            labels[row] = winners[j] if won else 0
            products[row] = found[j] if won else np.float32(np.nan)


@kernel(INT64, _NAMES, _NAMES, _PLACES, _NAMES)
def _count(labels: Int32, before: Int32, sizes: Int64, moved: Int32) -> int:
    """The rows of each cluster, and which clusters a row has joined or left; whether there is one."""
    sizes[:] = 0
    moved[:] = 0
    changed = 0
    for row in range(labels.shape[0]):
        sizes[labels[row]] += 1
        if labels[row] != before[row]:
            changed = 1
            moved[labels[row]] = 1
            if before[row] >= 0:
                moved[before[row]] = 1
    return changed


@kernel(types.void, INT64, INT64, _FLOATS, _NAMES, _PLACES, _NAMES, _DOUBLES, _FLOATS, INT64)
def _average(
    counter: int, share_columns: int, rows: NDArray[np.float32], labels: Int32, sizes: Int64, moved: Int32,
    sums: NDArray[np.float64], centroids: NDArray[np.float32], add_row: int,
) -> None:  # fmt: skip
    """Take shares of the columns until none is left: the mean of its rows for each centroid that moved and has rows."""
    width, c = rows.shape[1], sizes.shape[0]
    while True:
        first = take_next(counter) * share_columns
        if first >= width:
            break
        end = min(first + share_columns, width)
        for i in range(c):
            if moved[i]:
                for k in range(first, end):
                    sums[i, k] = 0.0
        for row in range(labels.shape[0]):
            if moved[labels[row]]:
                call_add_row(
                    add_row, rows.ctypes.data + 4 * (row * width + first), end - first,
                    sums.ctypes.data + 8 * (labels[row] * width + first),
                )  # fmt: skip
        for i in range(c):
            if moved[i] and sizes[i]:
                for k in range(first, end):
                    centroids[i, k] = np.float32(sums[i, k] / np.float64(sizes[i]))


@kernel(types.void, _FLOATS, _PLACES, INT64, _NAMES, INT64, INT64, INT64)
def _deliver(
    centroids: NDArray[np.float32], sizes: Int64, dim: int, labels: Int32, first: int, out: int, out_labels: int
) -> None:
    """A segment's results, its first centroid being the `first` of the launch; zeros for one without rows."""
    for i in range(sizes.shape[0]):
        if not sizes[i]:
            centroids[i] = 0
        move_bytes(out + 4 * i * dim, centroids.ctypes.data + 4 * i * centroids.shape[1], 4 * dim)
    for row in range(labels.shape[0]):
        store_int(out_labels + 8 * row, labels[row] + first)


class _Segment:
    """Scratch and state of one segment of n rows and c clusters."""

    def __init__(self, n: int, c: int, dim: int, threads: int) -> None:
        width = padded(dim)
        self.n, self.dim, self.threads = n, dim, threads
        self.rows = np.empty((n, width), dtype=np.float32)
        self.centroids, self.normalised = np.empty((2, c, width), dtype=np.float32)
        self.sums = np.empty((c, width), dtype=np.float64)
        blocks = -(-c // LANES) + 1
        self.packed = np.empty((blocks, dim, LANES), dtype=np.float32)
        self.names = np.empty(blocks * LANES, dtype=np.int32)
        self.labels, self.before = np.full((2, n), -1, dtype=np.int32)
        self.products = np.full(n, np.nan, dtype=np.float32)
        self.order = np.empty(n, dtype=np.int64)
        self.sizes = np.zeros(c, dtype=np.int64)
        self.moved = np.ones(c, dtype=np.int32)

    def cluster(self, iterations: int) -> None:
        """From the rows to labels and centroids."""
        _begin(self.rows, self.centroids)
        for _ in range(iterations):
            if not self._assign():
                return
            self._average()
        if self._assign():
            self._average()

    def _assign(self) -> bool:
        """Give every row its centroid; whether any label changed."""
        _normalise(self.centroids, self.moved, self.dim, self.normalised)
        packed = self.packed.ctypes.data
        num_moved = _pack(self.normalised, self.moved, self.dim, packed, self.names)
        num_full = _sort_rows(self.labels, self.moved, self.order)
        self.before[:] = self.labels
        rows, stride = self.rows.ctypes.data, 4 * self.rows.shape[1]
        _together(
            self.threads,
            lambda counter: _assign(
                counter,
                rows,
                stride,
                self.order,
                num_full,
                packed,
                num_moved,
                self.dim,
                self.names,
                MEET,
                BEST,
                self.labels,
                self.products,
            ),
        )
        return bool(_count(self.labels, self.before, self.sizes, self.moved))

    def _average(self) -> None:
        """Make every centroid that a row joined or left the mean of its rows."""
        columns = -(-self.rows.shape[1] // (self.threads * LANES)) * LANES
        _together(
            self.threads,
            lambda counter: _average(
                counter, columns, self.rows, self.labels, self.sizes, self.moved, self.sums, self.centroids, ADD_ROW
            ),
        )


class _Launch:
    """One launch: its rows, its segments, and where its results go."""

    def __init__(self, args: Cluster, operands: Operands, reads: tuple[Operand, ...]) -> None:
        self.args = args
        self.base, self.spans = operands.rows(reads[0])
        row_nbytes = args.head_dim * ITEMSIZE[args.dtype]
        self.rows = Rows(args.runs, self.spans, row_nbytes, args.num_sequences, args.num_kv_heads)
        self.segments = _segments(args, self.rows)
        self.num_clusters = int(self.segments[:, 2].sum())
        self.first_cluster = np.cumsum(self.segments[:, 2]) - self.segments[:, 2]
        self.centroids = self.labels = 0

    def cluster(self, which: int, threads: int) -> None:
        """Cluster one segment and store what came out."""
        args = self.args
        first, n, c = self.segments[which].tolist()
        segment = _Segment(n, c, args.head_dim, threads)
        _widen_rows(
            self.base, first, self.spans, self.rows.first_row, n, CODES[args.dtype], args.head_dim,
            ITEMSIZE[args.dtype], ENTRIES, np.empty(n, dtype=np.int64), segment.rows.ctypes.data,
        )  # fmt: skip
        segment.cluster(args.iterations)
        before = int(self.first_cluster[which])
        _deliver(
            segment.centroids, segment.sizes, args.head_dim, segment.labels, before,
            self.centroids + 4 * before * args.head_dim, self.labels + 8 * first,
        )  # fmt: skip


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
    for low, high in pairwise(borders):
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
            raise ValueError(
                f"{what} have {got} bytes; {launch.num_clusters} clusters, {launch.rows.total} rows: {want}"
            )
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
