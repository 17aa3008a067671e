"""topk: the k best of each list, score descending, then index ascending, NaN last (contract.py).

A score and its index become one 64-bit key whose ascending order is the order wanted, so that there are no ties. A heap
of the k best so far, worst on top, keeps the cost at n · log k whatever the input; most scores only meet its top.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import FLOAT, INT64, INTS, inline, kernel, load_float, store_int
from tierloop.devices.kernels.contract import Topk
from tierloop.devices.kernels.lanes import INT32
from tierloop.devices.kernels.operands import BytesOf, Operands

_KEYS = types.Array(types.uint64, 1, "C")
_INDEX_BITS = 32


@inline(types.uint32, FLOAT)
def _bits(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, INT32)


@kernel(types.uint64, FLOAT, INT64)
def _key(score: float, index: int) -> np.uint64:
    """The place of a score in the order: smaller is better. Both zeros are one score, and all NaNs are."""
    if score != score:
        rank = np.uint64(0xFFFFFFFF)
    else:
        bits = _bits(score + np.float32(0))
        rank = np.uint64(bits) if bits >> 31 else np.uint64(0x7FFFFFFF - bits)
    return (rank << np.uint64(_INDEX_BITS)) | np.uint64(index)


@kernel(types.void, _KEYS, INT64, INT64)
def _sink(heap: NDArray[np.uint64], node: int, size: int) -> None:
    """Let the key at `node` sink until none below it is larger."""
    key = heap[node]
    while 2 * node + 1 < size:
        child = 2 * node + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= key:
            break
        heap[node] = heap[child]
        node = child
    heap[node] = key


@kernel(types.void, INT64, INTS, INT64, INT64)
def _select(scores: int, lengths: NDArray[np.int64], k: int, out: int) -> None:
    """Indices int64 (n, k) of the best of each list, lists end to end at `scores`."""
    most = 0
    for length in lengths:
        most = max(most, length)
    heap = np.empty(min(k, most), np.uint64)
    start = 0
    for which in range(lengths.shape[0]):
        length = lengths[which]
        size = min(k, length)
        for i in range(size):
            heap[i] = _key(load_float(scores + 4 * (start + i)), i)
        for node in range(size // 2 - 1, -1, -1):
            _sink(heap, node, size)
        if size:
            for i in range(size, length):
                key = _key(load_float(scores + 4 * (start + i)), i)
                if key < heap[0]:
                    heap[0] = key
                    _sink(heap, 0, size)
        row = out + which * k * 8
        for i in range(k):
            store_int(row + 8 * i, -1)
        for last in range(size - 1, -1, -1):
            store_int(row + 8 * last, np.int64(heap[0] & np.uint64((1 << _INDEX_BITS) - 1)))
            heap[0] = heap[last]
            _sink(heap, 0, last)
        start += length


def topk(args: Topk, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int) -> None:
    """Carry out the kernel. Raises ValueError for lengths or a k that cannot be."""
    lengths = np.ascontiguousarray(args.lengths, dtype=np.int64)
    if args.k < 0 or lengths.ndim != 1 or (lengths.size and not 0 <= lengths.min() <= lengths.max() < 1 << _INDEX_BITS):
        raise ValueError(f"k = {args.k} and lengths of shape {lengths.shape}: k ≥ 0, lengths (n,) in 0 … 2**32 needed")
    operands = Operands(bytes_of)
    _select(operands.source(reads[0]), lengths, args.k, operands.target(writes[0]))
    operands.finish()
