"""The living definition of every kernel: slow, obvious NumPy in float64, read beside contract.py.

No tiles, no splits, no order of sums: what a kernel *means*. The `reference` driver runs it, and every other device is
compared with it within the rounding bound. Operands come and go as bytes end to end. Raises ValueError for arguments
that do not fit each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.contract import (
    CODE_RANGE,
    ITEMSIZE,
    LINE_NBYTES,
    Append,
    Attend,
    Chase,
    Cluster,
    Combine,
    Dense,
    Dequantize,
    Gather,
    KernelArgs,
    Logits,
    Merge,
    Quantize,
    Score,
    Topk,
    cut_into_segments,
    summary_nbytes,
    value_nbytes,
    wrong_score,
)

Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class Given(NamedTuple):
    """A read operand: its bytes end to end, and the sizes of its spans in bytes."""

    bytes: Bytes
    sizes: NDArray[np.int64]


def define(args: KernelArgs, reads: list[Given], write_nbytes: list[int]) -> list[Bytes]:
    """The bytes that the kernel writes, one array for each write operand of `write_nbytes` bytes."""
    if isinstance(args, Dense):
        writes = [np.zeros(nbytes, np.uint8) for nbytes in write_nbytes]
        if args.function is not None:
            args.function([read.bytes for read in reads], writes)
        return writes
    if isinstance(args, Attend):
        result = attend(args, *reads)
    elif isinstance(args, Logits):
        result = logits(args, *reads)
    elif isinstance(args, Combine):
        result = combine(args, *reads)
    elif isinstance(args, Merge):
        result = merge(args, *reads)
    elif isinstance(args, Score):
        result = score(args, *reads)
    elif isinstance(args, Topk):
        return [topk(args, *reads).view(np.uint8).ravel()]
    elif isinstance(args, Quantize):
        return [quantize(args, *reads)]
    elif isinstance(args, Dequantize):
        result = dequantize(args, *reads)
    elif isinstance(args, Chase):
        return [chase(*reads).view(np.uint8)]
    elif isinstance(args, Cluster):
        centroids, labels = cluster(args, *reads)
        results = [encode(centroids.reshape(-1), "float32"), labels.view(np.uint8)]
        for what, given, wanted in zip(("centroids", "labels"), write_nbytes, results, strict=True):
            if given != wanted.size:
                raise ValueError(f"cluster: {what} have {given} bytes, {wanted.size} needed")
        return results
    elif isinstance(args, Append):
        return [encode(numbers(reads[0].bytes, "float32"), args.dtype)]
    else:
        assert isinstance(args, Gather)
        return [reads[0].bytes]
    with np.errstate(over="ignore"):
        return [result.astype(np.float32).view(np.uint8).ravel()]


def numbers(stored: Bytes, dtype: str) -> Float64:
    """Stored numbers, exactly: (bytes / item size,)."""
    with np.errstate(invalid="ignore"):
        if dtype == "float32":
            return stored.view(np.float32).astype(np.float64)
        if dtype == "float16":
            return stored.view(np.float16).astype(np.float64)
        if dtype == "int8":
            return stored.view(np.int8).astype(np.float64)
        if dtype == "fp8_e4m3":
            return FP8_NUMBERS[stored]
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _fp8_numbers() -> Float64:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    number = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    number[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -number, number)


FP8_NUMBERS = _fp8_numbers()
"""What each of the 256 fp8_e4m3 codes stands for: float64 (256,)."""


def value_rows(stored: Bytes, dtype: str, head_dim_v: int) -> Float64:
    """V rows as numbers: float64 (rows, head_dim_v); codes times the scale that follows them."""
    if dtype not in CODE_RANGE:
        return numbers(stored, dtype).reshape(-1, head_dim_v)
    rows = stored.reshape(-1, value_nbytes(dtype, head_dim_v))
    scales = np.ascontiguousarray(rows[:, head_dim_v:]).view(np.float32).astype(np.float64)
    return numbers(np.ascontiguousarray(rows[:, :head_dim_v]), dtype).reshape(-1, head_dim_v) * scales


def encode(exact: Float64, dtype: str) -> Bytes:
    """The nearest stored numbers, ties to even, of numbers that are float32 already."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = exact.astype(np.float32)
        if dtype == "float32":
            return single.view(np.uint8)
        if dtype == "float16":
            return single.astype(np.float16).view(np.uint8)
    bits = single.view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = (bits + 0x7FFF + odd) >> 16
    return np.where(np.isnan(single), (bits >> 16) | 0x40, rounded).astype(np.uint16).view(np.uint8)


class Rows(NamedTuple):
    """Of every row: sequence, KV head and position, int64 (rows,)."""

    sequence: NDArray[np.int64]
    kv_head: NDArray[np.int64]
    position: NDArray[np.int64]


def rows_of(runs: NDArray[np.int64], sizes: NDArray[np.int64], row_nbytes: int) -> Rows:
    """The rows of runs (n, 3) whose spans have `sizes` bytes; in order, and each one once."""
    counts, rest = np.divmod(sizes, row_nbytes)
    if rest.any():
        raise ValueError(f"the span of run {int(rest.argmax())} is no whole number of rows")
    which = np.repeat(np.arange(len(runs)), counts)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = Rows(runs[which, 0], runs[which, 1], runs[which, 2] + offset)
    order = np.lexsort((rows.position, rows.kv_head, rows.sequence))
    table = np.stack(rows, axis=1)
    if (order != np.arange(len(order))).any() or (len(table) > 1 and (table[1:] == table[:-1]).all(axis=1).any()):
        raise ValueError("the runs are out of order or overlap")
    if (runs < 0).any():
        raise ValueError("a run names a negative sequence, KV head or position")
    return rows


def query_rows(args: Attend | Logits | Score, stored: Bytes) -> Float64:
    """Queries as (num_sequences, q_len, num_kv_heads, group, head_dim)."""
    q_len = 1 if isinstance(args, Score) else args.q_len
    return numbers(stored, "float32").reshape(args.num_sequences, q_len, args.num_kv_heads, args.group, args.head_dim)


def masked_logits(args: Attend | Logits, queries: Given, keys: Given) -> tuple[Rows, Float64]:
    """scale · q·k of every row with the queries of its KV head, −∞ where masked: (rows, q_len, group)."""
    row_nbytes = args.head_dim * ITEMSIZE[args.dtype]
    rows = rows_of(args.runs, keys.sizes, row_nbytes)
    if (rows.sequence >= args.num_sequences).any() or (rows.kv_head >= args.num_kv_heads).any():
        raise ValueError("a run names a sequence or KV head that does not exist")
    k = numbers(keys.bytes, args.dtype).reshape(-1, args.head_dim)
    q = query_rows(args, queries.bytes)[rows.sequence, :, rows.kv_head]
    s = args.scale * np.einsum("rqgd,rd->rqg", q, k)
    if args.softcap:
        s = args.softcap * np.tanh(s / args.softcap)
    query, row = args.q_positions[rows.sequence], rows.position[:, None]
    counts = row <= query
    if args.window:
        counts &= (query - row < args.window) | (row < args.sink_tokens)
    return rows, np.where(counts[:, :, None], s, -np.inf)


def states(args: Attend | Combine, rows: Rows, s: Float64, v: Float64) -> Float64:
    """The states of the roots from logits (rows, q_len, group) and values (rows, head_dim_v)."""
    result = np.zeros((len(args.roots), args.q_len, args.group, 2 + args.head_dim_v))
    times_covered = np.zeros(len(v), dtype=np.int64)
    for root, (sequence, kv_head, level, index) in enumerate(args.roots.tolist()):
        first, end = index << level, (index + 1) << level
        split = rows.position // args.split_tokens
        mine = (rows.sequence == sequence) & (rows.kv_head == kv_head) & (first <= split) & (split < end)
        times_covered += mine
        result[root] = state(s[mine], v[mine])
    if (times_covered != 1).any():
        raise ValueError(f"row {int((times_covered != 1).argmax())} is not covered by exactly one root")
    return result


def state(s: Float64, v: Float64) -> Float64:
    """(m, l, acc…) of some rows: logits (rows, q_len, group), values (rows, head_dim_v) → (q_len, group, 2 + dim)."""
    # The maximum travels as float32, so the exponentials are taken against that number and no other.
    m = s.max(axis=0, initial=-np.inf).astype(np.float32).astype(np.float64)
    p = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    # What does not count is left out, and not multiplied by 0: its value may be no number.
    terms = np.where(np.isneginf(s)[..., None], 0.0, p[..., None] * v[:, None, None, :])
    return np.concatenate([m[..., None], p.sum(axis=0)[..., None], terms.sum(axis=0)], axis=-1)


def attend(args: Attend, queries: Given, keys: Given, values: Given) -> Float64:
    """softmax(scale · q·K)·V, left un-normalised, for each root."""
    rows, s = masked_logits(args, queries, keys)
    key_nbytes = args.head_dim * ITEMSIZE[args.dtype]
    if not np.array_equal(keys.sizes // key_nbytes * value_nbytes(args.dtype, args.head_dim_v), values.sizes):
        raise ValueError("keys and values have different runs")
    return states(args, rows, s, value_rows(values.bytes, args.dtype, args.head_dim_v))


def logits(args: Logits, queries: Given, keys: Given) -> Float64:
    """The logits of every row, in the order of the runs."""
    return masked_logits(args, queries, keys)[1]


def combine(args: Combine, given: Given, values: Given) -> Float64:
    """The states of logits that were computed elsewhere."""
    rows = rows_of(args.runs, values.sizes, value_nbytes(args.dtype, args.head_dim_v))
    s = numbers(given.bytes, "float32").reshape(-1, args.q_len, args.group)
    return states(args, rows, s, value_rows(values.bytes, args.dtype, args.head_dim_v))


def merge(args: Merge, given: Given, sinks: Given | None = None) -> Float64:
    """The output acc / l of all states of a sequence and KV head: (num_sequences, q_len, heads, head_dim_v)."""
    sink = np.full((args.num_kv_heads, args.group), -np.inf)
    if sinks is not None:
        sink = numbers(sinks.bytes, "float32").reshape(sink.shape)
    parts = numbers(given.bytes, "float32").reshape(len(args.roots), args.q_len, args.group, 2 + args.head_dim_v)
    ranges = [(s, h, index << level, (index + 1) << level) for s, h, level, index in args.roots.tolist()]
    for (s, h, _, end), (next_s, next_h, start, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
        if (s, h) == (next_s, next_h) and start < end:
            raise ValueError(f"two roots of sequence {s}, KV head {h} overlap")
    output = np.zeros((args.num_sequences, args.q_len, args.num_kv_heads, args.group, args.head_dim_v))
    for sequence in range(args.num_sequences):
        for kv_head in range(args.num_kv_heads):
            mine = parts[(args.roots[:, 0] == sequence) & (args.roots[:, 1] == kv_head)]
            m = np.maximum(mine[..., 0].max(axis=0, initial=-np.inf), sink[kv_head])
            shift = np.where(np.isneginf(m), 0.0, m)
            weight = np.exp(mine[..., 0] - shift)[..., None]
            total = (weight * mine[..., 1:]).sum(axis=0)
            total[..., 0] += np.exp(sink[kv_head] - shift)
            output[sequence, :, kv_head] = np.divide(
                total[..., 1:], total[..., :1], out=np.zeros_like(total[..., 1:]), where=total[..., :1] != 0
            )
    return output


def score(args: Score, queries: Given, summaries: Given) -> Float64:
    """One score per block: q · mean, or Σ_c min(q_c, 0)·min_c + max(q_c, 0)·max_c; the best or sum over the group, or
    the sum of each q head's softmax over the rows of a sequence and KV head."""
    wrong = wrong_score(args)
    if wrong is not None:
        raise ValueError(wrong)
    parts = 2 if args.summary == "minmax" else 1
    rows = rows_of(args.runs, summaries.sizes, summary_nbytes(args))
    if (rows.sequence >= args.num_sequences).any() or (rows.kv_head >= args.num_kv_heads).any():
        raise ValueError("a run names a sequence or KV head that does not exist")
    q = query_rows(args, queries.bytes)[rows.sequence, 0, rows.kv_head]
    summary = numbers(summaries.bytes, args.dtype).reshape(-1, parts, 1, args.head_dim)
    if parts == 1:
        each = (q * summary[:, 0]).sum(axis=-1)
    else:
        each = (np.minimum(q, 0) * summary[:, 0] + np.maximum(q, 0) * summary[:, 1]).sum(axis=-1)
    if args.reduce == "softmax":
        shares = np.zeros_like(each)
        for sequence, kv_head in {(s, h) for s, h, _ in args.runs.tolist()}:
            mine = (rows.sequence == sequence) & (rows.kv_head == kv_head)
            shares[mine] = softmax(args.scale * each[mine])
        return np.asarray(shares.sum(axis=1))
    return np.asarray(each.max(axis=1) if args.reduce == "max" else each.sum(axis=1))


def softmax(s: Float64) -> Float64:
    """The shares of n rows in a weight of 1, for each member of the group: (n, group); 0 where all logits are −∞."""
    m = s.max(axis=0, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    total = weights.sum(axis=0)
    return weights / np.where(total == 0, 1.0, total)


def topk(args: Topk, scores: Given) -> NDArray[np.int64]:
    """Indices (n, k) of the best of each list, −1 where there are not so many; the best or sum over the group."""
    if args.group < 1 or args.reduce not in ("max", "sum"):
        raise ValueError(f"topk: group {args.group}, reduce {args.reduce!r}: a group of at least 1, max or sum")
    best = np.full((len(args.lengths), args.k), -1, dtype=np.int64)
    members = whole_rows(scores, 4 * args.group).view(np.float32).T
    with np.errstate(over="ignore", invalid="ignore"):
        each = members.max(axis=0) if args.reduce == "max" else sum(members[1:], start=members[0])
    lists = np.split(each.astype(np.float64), np.cumsum(args.lengths)[:-1]) if len(args.lengths) else []
    for row, one in zip(best, lists, strict=True):
        order = np.lexsort((np.arange(len(one)), -one))[: args.k]
        row[: len(order)] = order
    return best


def quantize(args: Quantize, rows: Given, scales: Given | None = None) -> Bytes:
    """Codes of float32 rows by their scales; per row, each row's scale after its codes."""
    x = whole_rows(rows, 4 * args.dim).view(np.float32)
    with np.errstate(all="ignore"):
        if scales is None:
            scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(CODE_RANGE[args.dtype])
            scale[~np.isfinite(scale) | (scale == 0)] = 1
        else:
            scale = scales_of_rows(args, scales, len(x))
        codes = nearest_codes((x / scale).astype(np.float64), np.signbit(x), args.dtype)
    if scales is None:
        codes = np.concatenate([codes, scale.view(np.uint8)], axis=1)
    return codes.ravel()


def nearest_codes(exact: Float64, negative: NDArray[np.bool_], dtype: str) -> Bytes:
    """The nearest codes, ties to even: bytes, shaped like `exact`; of fp8_e4m3 codes the signs are given."""
    if dtype == "int8":
        return np.where(np.isnan(exact), 0, np.rint(np.clip(exact, -127, 127))).astype(np.int8).view(np.uint8)
    between = (FP8_NUMBERS[:0x7E] + FP8_NUMBERS[1:0x7F]) / 2
    code = np.searchsorted(between, np.abs(exact))
    odd_tie = (between[np.minimum(code, 0x7D)] == np.abs(exact)) & (code % 2 == 1)
    code = np.where(np.isnan(exact), 0x7F, code + odd_tie)
    return np.where(negative, code | 0x80, code).astype(np.uint8)


def dequantize(args: Dequantize, rows: Given, scales: Given | None = None) -> Float64:
    """code · scale: (rows, dim)."""
    with np.errstate(invalid="ignore"):  # a scale may be anything, infinity times 0 among it
        if scales is None:
            whole_rows(rows, value_nbytes(args.dtype, args.dim))
            return value_rows(rows.bytes, args.dtype, args.dim)
        codes = whole_rows(rows, args.dim)
        return numbers(codes, args.dtype).reshape(-1, args.dim) * scales_of_rows(args, scales, len(codes))


def chase(lines: Given) -> NDArray[np.int64]:
    """The number that the last line holds: (1,)."""
    numbers = whole_rows(lines, LINE_NBYTES)[:, :8].copy().view(np.int64).ravel()
    line = 0
    for _ in numbers:
        line = int(numbers[line])
        if not 0 <= line < len(numbers):
            raise ValueError(f"chase: a line names line {line}, of {len(numbers)}")
    return np.array([line])


def whole_rows(given: Given, nbytes: int) -> Bytes:
    """The rows of an operand: (rows, nbytes)."""
    cut = given.sizes % nbytes != 0
    if cut.any():
        raise ValueError(f"span {int(cut.argmax())} is no whole number of rows of {nbytes} bytes")
    return given.bytes.reshape(-1, nbytes)


def scales_of_rows(args: Quantize | Dequantize, scales: Given, num_rows: int) -> NDArray[np.float32]:
    """The scales of every row: (rows, dim)."""
    table = scales.bytes.view(np.float32).reshape(-1, args.dim)
    if args.which.shape != (num_rows,) or ((args.which < 0) | (args.which >= len(table))).any():
        raise ValueError(f"which: {num_rows} numbers from 0 to {len(table) - 1} are needed")
    return table[args.which]


def cluster(args: Cluster, keys: Given) -> tuple[Float64, NDArray[np.int64]]:
    """Centroids (clusters, head_dim) and the label of every row, by spherical k-means within segments."""
    if min(args.head_dim, args.segment_tokens, args.cluster_tokens) < 1 or args.iterations < 0:
        raise ValueError("cluster: sizes are at least 1, iterations at least 0")
    rows = rows_of(args.runs, keys.sizes, args.head_dim * ITEMSIZE[args.dtype])
    if (rows.sequence >= args.num_sequences).any() or (rows.kv_head >= args.num_kv_heads).any():
        raise ValueError("a run names a sequence or KV head that does not exist")
    k = numbers(keys.bytes, args.dtype).reshape(-1, args.head_dim)
    centroids, labels = [np.empty((0, args.head_dim))], np.empty(len(k), dtype=np.int64)
    known = 0
    for sequence, kv_head in np.unique(np.stack((rows.sequence, rows.kv_head), axis=1), axis=0).tolist():
        mine = np.flatnonzero((rows.sequence == sequence) & (rows.kv_head == kv_head))
        for segment in np.split(mine, np.cumsum(cut_into_segments(len(mine), args.segment_tokens))[:-1]):
            found, nearest = k_means(k[segment], args.cluster_tokens, args.iterations)
            labels[segment] = nearest + known
            known += len(found)
            centroids.append(found)
    return np.concatenate(centroids), labels


def k_means(x: Float64, cluster_tokens: int, iterations: int) -> tuple[Float64, NDArray[np.int64]]:
    """One segment: the means (c, dim) of the rows x (n, dim) that the last assignment gives them, and each row's."""
    n, c = len(x), max(1, len(x) // cluster_tokens)
    centroids = x[np.arange(c) * n // c]
    for _ in range(iterations):
        labels = nearest_of(x, centroids)
        for i in np.unique(labels):
            centroids[i] = x[labels == i].mean(axis=0)
    labels = nearest_of(x, centroids)
    means = np.zeros_like(centroids)
    for i in np.unique(labels):
        means[i] = x[labels == i].mean(axis=0)
    return means, labels


def nearest_of(x: Float64, centroids: Float64) -> NDArray[np.int64]:
    """The centroid with the largest product q·c / |c| of each row; the first of equals, NaN never."""
    with np.errstate(invalid="ignore", divide="ignore"):
        products = x @ (centroids / np.linalg.norm(centroids, axis=1, keepdims=True)).T
    # A NaN loses against −∞ too: rows are sorted by whether there is a number, then by the number, then by index.
    order = np.lexsort((-np.nan_to_num(products, nan=0.0, posinf=np.inf, neginf=-np.inf), np.isnan(products)), axis=1)
    return np.asarray(order[:, 0], dtype=np.int64)
