"""Pieces: a command's spans as the transfers that a block device makes of them.

A piece is (offset on the medium, address in host memory, nbytes); pieces are one int64 array of shape (n, 3), so ten
thousand spans cost a few array operations. The bytes of a span list are its spans end to end: the *stream* of the
command. Both sides of a transfer are span lists of one stream, and a piece is a stretch in which neither side jumps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pieces = NDArray[np.int64]
"""int64 (n, 3) with the columns (offset, address, nbytes), all in bytes."""
SpanArray = NDArray[np.int64]
"""int64 (n, 2) with the columns (offset, nbytes), as in `Spans.array`."""


def contiguous(spans: SpanArray, base: int, address: int) -> Pieces:
    """Spans that start at `base` on the medium × one run of host memory from `address` on. Empty spans vanish."""
    if len(spans) == 1:  # a tenth of the time of the general way
        offset, nbytes = spans.tolist()[0]
        return np.array([[offset + base, address, nbytes]] if nbytes else np.empty((0, 3)), dtype=np.int64)
    spans = spans[spans[:, 1] > 0]
    pieces = np.empty((len(spans), 3), dtype=np.int64)
    pieces[:, 0] = spans[:, 0] + base
    pieces[:, 2] = spans[:, 1]
    pieces[:, 1] = np.cumsum(spans[:, 1]) - spans[:, 1] + address
    return pieces


def paired(spans: SpanArray, base: int, host_spans: SpanArray, address: int) -> Pieces:
    """Spans on the medium × spans in host memory that start at `address`; both hold the same number of bytes."""
    a, b = spans[spans[:, 1] > 0], host_spans[host_spans[:, 1] > 0]
    if not len(a):
        return np.empty((0, 3), dtype=np.int64)
    ends_a, ends_b = np.cumsum(a[:, 1]), np.cumsum(b[:, 1])
    ends = np.union1d(ends_a, ends_b)
    starts = np.concatenate(([0], ends[:-1]))
    in_a = np.searchsorted(ends_a, starts, side="right")
    in_b = np.searchsorted(ends_b, starts, side="right")
    offsets = base + a[in_a, 0] + starts - (ends_a[in_a] - a[in_a, 1])
    addresses = address + b[in_b, 0] + starts - (ends_b[in_b] - b[in_b, 1])
    return np.stack((offsets, addresses, ends - starts), axis=1)


def joined(pieces: Pieces) -> Pieces:
    """The same transfers with neighbours that touch on both sides made one."""
    if len(pieces) < 2:
        return pieces
    ends = pieces[:-1, :2] + pieces[:-1, 2:]
    jumps = np.flatnonzero((ends != pieces[1:, :2]).any(axis=1)) + 1
    if len(jumps) == len(pieces) - 1:
        return pieces
    first = np.concatenate(([0], jumps))
    made = pieces[first].copy()
    made[:, 2] = np.add.reduceat(pieces[:, 2], first)
    return made


def split(pieces: Pieces, largest: int) -> Pieces:
    """The same transfers, none larger than `largest` bytes."""
    if not len(pieces) or (pieces[0, 2] <= largest and (len(pieces) == 1 or pieces[:, 2].max() <= largest)):
        return pieces
    counts = -(-pieces[:, 2] // largest)
    owner = np.repeat(np.arange(len(pieces)), counts)
    skip = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * largest
    made = pieces[owner]
    made[:, 0] += skip
    made[:, 1] += skip
    made[:, 2] = np.minimum(made[:, 2] - skip, largest)
    return made


def on_grid(pieces: Pieces, grid: int) -> bool:
    """Whether every piece starts and ends on the medium's grid."""
    return not (pieces[:, (0, 2)] % grid).any()


def overlapping(spans: SpanArray) -> bool:
    """Whether a byte lies in two of the spans: then their order matters."""
    if len(spans) < 2:
        return False
    starts, ends = spans[:, 0], spans[:, 0] + spans[:, 1]
    if (starts[1:] >= ends[:-1]).all():
        return False
    full = spans[:, 1] > 0
    order = np.argsort(starts[full], kind="stable")
    return bool((starts[full][order][1:] < ends[full][order][:-1]).any())


def meeting(a: SpanArray, b: SpanArray) -> bool:
    """Whether a byte lies in both span lists (coarse: compares the ranges that hold them)."""
    if not len(a) or not len(b):
        return False
    return bool(a[:, 0].min() < (b[:, 0] + b[:, 1]).max() and b[:, 0].min() < (a[:, 0] + a[:, 1]).max())
