"""topk: the k best of each list, score descending, then index ascending, NaN last (contract.py).

A score has a *rank*, a uint32 that is smaller for a better score; the key of an entry is its rank above its index, so
that there are no ties. Few scores ever become keys: 64 at a time are compared with a bound, and what is not below it
goes into a buffer. When the buffer is full it is sorted and cut to the k best, and the bound becomes what is better
than the k-th: later entries lose every tie. The first bound comes from a sample, so that the buffer is rarely full; if
the sample was not like the list and fewer than k entries are left, the list is gone through again without one.

Entries of a group are reduced to one score each first, a list at a time.

Sorting is by radix and stable, on the bytes in which the ranks in the buffer differ. All of it is linear in the length
of a list, whatever the scores: a buffer takes at least twice k new entries before it is sorted again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import (
    FLOAT,
    INT64,
    INTS,
    address_of,
    inline,
    kernel,
    load,
    load_float,
    move_bytes,
    store_int,
    take_next,
)
from tierloop.devices.kernels.contract import MOST, Topk
from tierloop.devices.kernels.lanes import FLOAT as REAL
from tierloop.devices.kernels.lanes import INT32, at, int64, spread
from tierloop.devices.kernels.lanes import INT64 as WORD
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.pool import share, worthwhile

_KEYS = types.Array(types.uint64, 1, "C")
_INDEX_BITS = 32
_STEP = 64
"""Scores that are compared with the bound together."""
_SAMPLES = 1024
_LONG = 512
"""Scores from which on a sample costs less than it saves."""
_SPARE = 1024
"""Room in the buffer beyond 3k, so that it is not sorted all the time for a small k."""
_NAN_RANK = 0xFFFFFFFF
_LOWEST_RANK = 0xFF800000
"""The rank of −inf, the last but NaN's."""


@inline(types.uint32, FLOAT)
def _bits(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, INT32)


@inline(FLOAT, types.uint32)
def _number(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, REAL)


@inline(INT64, INT64, FLOAT)
def _not_below(builder: Any, scores: Any, bound: Any) -> Any:
    """Bit i: whether score i of the 64 at an address is at least the bound; never for a NaN."""
    bounds, mask = spread(builder, bound), int64(0)
    for i in range(0, _STEP, 16):
        given = load(builder, at(builder, scores, int64(4 * i)), ir.VectorType(REAL, 16))
        bits = builder.bitcast(builder.fcmp_ordered(">=", given, bounds), ir.IntType(16))
        mask = builder.or_(mask, builder.shl(builder.zext(bits, WORD), int64(i)))
    return mask


@inline(INT64, INT64)
def _lowest_bit(builder: Any, mask: Any) -> Any:
    return builder.cttz(mask, ir.Constant(ir.IntType(1), 1))


@kernel(types.uint64, FLOAT, INT64)
def _key(score: float, index: int) -> np.uint64:
    """The place of a score in the order: smaller is better. Both zeros are one score, and all NaNs are."""
    bits = np.int64(_bits(score + np.float32(0)))
    rank = np.int64(_NAN_RANK) if score != score else bits if bits >> 31 else 0x7FFFFFFF - bits
    return np.uint64((rank << _INDEX_BITS) | index)


@kernel(INT64, types.uint64)
def _rank(key: np.uint64) -> int:
    return key >> np.uint64(_INDEX_BITS)  # type: ignore[return-value]  # compiled: an int64


@kernel(FLOAT, INT64)
def _worst_of_rank(rank: int) -> float:
    """The least score whose rank is at most `rank`; a NaN, which nothing reaches, where there is none."""
    rank = min(rank, _LOWEST_RANK)
    return _number(np.uint32(rank if rank >> 31 else 0x7FFFFFFF - rank))  # type: ignore[no-any-return]


@kernel(types.void, _KEYS, _KEYS, INT64)
def _sort(keys: NDArray[np.uint64], spare: NDArray[np.uint64], count: int) -> None:
    """Sort the first `count` keys, whose indices are in ascending order among equal ranks; `spare` is as long."""
    best, worst = keys[0], keys[0]
    for i in range(count):
        best, worst = min(best, keys[i]), max(worst, keys[i])
    lowest, mask = best >> np.uint64(_INDEX_BITS), np.uint64(255)
    differ = (worst >> np.uint64(_INDEX_BITS)) - lowest
    lowest <<= np.uint64(_INDEX_BITS)
    places = np.zeros((4, 256), np.int64)
    for i in range(count):
        rank = (keys[i] - lowest) >> np.uint64(_INDEX_BITS)
        places[0, rank & mask] += 1
        places[1, (rank >> np.uint64(8)) & mask] += 1
        places[2, (rank >> np.uint64(16)) & mask] += 1
        places[3, rank >> np.uint64(24)] += 1
    source, target = keys, spare
    digit = 0
    while differ >> np.uint64(8 * digit):
        shift = np.uint64(_INDEX_BITS + 8 * digit)
        total = 0
        for value in range(256):
            before = total
            total += places[digit, value]
            places[digit, value] = before
        for i in range(count):
            here = np.int64(((source[i] - lowest) >> shift) & mask)
            target[places[digit, here]] = source[i]
            places[digit, here] += 1
        source, target = target, source
        digit += 1
        if digit == 4:
            break
    if digit % 2:
        move_bytes(keys.ctypes.data, spare.ctypes.data, 8 * count)


@kernel(INT64, INT64, INT64, INT64, _KEYS, _KEYS)
def _bound_of_sample(scores: int, length: int, k: int, keys: NDArray[np.uint64], spare: NDArray[np.uint64]) -> int:
    """A rank that somewhat more than k of the scores probably reach, by a sample of them."""
    count = min(_SAMPLES, length // 16)
    stride = length // count
    for i in range(count):
        keys[i] = _key(load_float(scores + 4 * i * stride), i)
    _sort(keys, spare, count)
    expected = count * k / length
    # Four standard deviations more than expected: one list in 30,000 is gone through twice.
    place = int(expected + 4 * np.sqrt(expected)) + 2
    return _rank(keys[min(place, count - 1)])


@kernel(INT64, INT64, INT64, INT64, INT64, _KEYS, _KEYS)
def _collect(
    scores: int, length: int, k: int, bound_rank: int, keys: NDArray[np.uint64], spare: NDArray[np.uint64]
) -> int:
    """Sort the best of the scores whose rank is at most `bound_rank` into `keys`; returns how many there are, ≤ k."""
    size = keys.shape[0] - _STEP
    count, i = 0, 0
    if bound_rank >= _NAN_RANK:
        count = i = min(length, size)
        for j in range(count):
            keys[j] = _key(load_float(scores + 4 * j), j)
    bound = _worst_of_rank(bound_rank)
    while True:
        if count >= size or i == length:
            _sort(keys, spare, count)
            if count >= k:
                count = k
                bound = _worst_of_rank(_rank(keys[k - 1]) - 1)
            if i == length:
                return count
        steady = length - _STEP
        while i <= steady and count < size:
            mask = _not_below(scores + 4 * i, bound)
            while mask:
                j = i + _lowest_bit(mask)
                keys[count] = _key(load_float(scores + 4 * j), j)
                count += 1
                mask &= mask - 1
            i += _STEP
        if i > steady:
            while i < length and count < size:
                score = load_float(scores + 4 * i)
                if score >= bound:
                    keys[count] = _key(score, i)
                    count += 1
                i += 1


@kernel(types.void, INT64, INT64, INT64, INT64, types.Array(types.float32, 1, "C"))
def _reduce(scores: int, length: int, group: int, takes_sum: int, out: NDArray[np.float32]) -> None:
    """The score of every entry of a list: of float32 (length, group) at an address the largest, or the sum."""
    for i in range(length):
        place = scores + 4 * group * i
        best = load_float(place)
        if takes_sum:
            for j in range(1, group):
                best += load_float(place + 4 * j)
        else:
            for j in range(1, group):
                score = load_float(place + 4 * j)
                best = best if best > score or best != best else score
        out[i] = best


@kernel(INT64, INTS, types.Array(types.int64, 1, "C"))
def _put_starts(lengths: NDArray[np.int64], starts: NDArray[np.int64]) -> int:
    """Where each list starts, in scores; returns their number, or −1 for a length that cannot be."""
    total = 0
    for i in range(lengths.shape[0]):
        if not 0 <= lengths[i] < 1 << _INDEX_BITS:
            return -1
        starts[i] = total
        total += lengths[i]
    return total


@kernel(types.void, INT64, INT64, INTS, INTS, INT64, INT64, INT64, INT64)
def _select(
    counter: int,
    scores: int,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    k: int,
    group: int,
    takes_sum: int,
    out: int,
) -> None:
    """Take lists until none is left: indices int64 (n, k) of the best of each, lists from entries `starts` on."""
    most = 0
    for length in lengths:
        most = max(most, length)
    room = min(most, 3 * min(k, most) + _SPARE) + _STEP
    keys, spare = np.empty(room, np.uint64), np.empty(room, np.uint64)
    reduced = np.empty(most if group > 1 else 0, np.float32)
    while True:
        which = take_next(counter)
        if which >= lengths.shape[0]:
            break
        length, place = lengths[which], scores + 4 * group * starts[which]
        if group > 1:
            _reduce(place, length, group, takes_sum, reduced)
            place = reduced.ctypes.data
        wanted, found = min(k, length), 0
        if wanted and 2 * k < length and length >= _LONG:
            bound = _bound_of_sample(place, length, k, keys, spare)
            found = _collect(place, length, k, bound, keys, spare)
        if found < wanted:
            found = _collect(place, length, wanted, _NAN_RANK, keys, spare)
        row = out + which * k * 8
        for i in range(found):
            store_int(row + 8 * i, np.int64(keys[i] & np.uint64((1 << _INDEX_BITS) - 1)))
        for i in range(found, k):
            store_int(row + 8 * i, -1)


def topk(args: Topk, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int) -> None:
    """Carry out the kernel; threads share the lists. Raises ValueError for lengths, a k or a group that cannot be."""
    lengths = np.ascontiguousarray(args.lengths, dtype=np.int64)
    starts = np.empty(lengths.size, dtype=np.int64)
    total = _put_starts(lengths, starts) if lengths.ndim == 1 and args.k >= 0 else -1
    if total < 0:
        raise ValueError(f"k = {args.k} and lengths of shape {lengths.shape}: k ≥ 0, lengths (n,) in 0 … 2**32 needed")
    group = args.group
    if not 1 <= group < MOST or args.reduce not in ("max", "sum"):
        raise ValueError(f"group {group}, reduce {args.reduce!r}: a group of at least 1, and max or sum are needed")
    nbytes = [sum(segment.spans.nbytes for segment in operand) for operand in (reads[0], writes[0])]
    if nbytes != [4 * group * total, 8 * args.k * len(lengths)]:
        raise ValueError(
            f"{nbytes[0]} bytes of scores and {nbytes[1]} of indices: {4 * group * total} are needed for {total} "
            f"entries of {group}, and {8 * args.k * len(lengths)} for {len(lengths)} lists of {args.k}"
        )
    operands = Operands(bytes_of)
    counter = np.zeros(8, dtype=np.uint8)
    scores, out = operands.source(reads[0]), operands.target(writes[0])
    threads = min(worthwhile(threads, 4 * group * total), len(lengths))
    takes_sum = args.reduce == "sum"
    share(threads, partial(_select, address_of(counter), scores, starts, lengths, args.k, group, takes_sum, out))
    operands.finish()
