"""Cases of the attention bench beside attention itself: score, topk, gather, append, merge, quantize, dequantize.

Kernels that only choose or move, or round once, are right to the bit or wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.kernels.contract import (
    CODE_RANGE,
    ITEMSIZE,
    Append,
    Codes,
    Dequantize,
    DType,
    Gather,
    Merge,
    Quantize,
    Score,
    Topk,
    value_nbytes,
)
from tierloop.devices.kernels.definition import encode, numbers
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.bounds import U
from tierloop.tools.bench_cases import (
    ROW_NBYTES,
    Case,
    Float64,
    Run,
    error_if,
    error_over,
    launch_nbytes,
    work_of,
    written,
)
from tierloop.tools.bench_data import KV_HEADS, Bytes, Float32, Sizes, Stored, bytes_of, region, repeat_into, whole
from tierloop.tools.roofline import Work, huge_bytes

HEAD_DIM = 128
GROUP = 4
STATES_PER_HEAD = 16
CODES: tuple[Codes, ...] = ("int8", "fp8_e4m3")


def more_cases(store: Stored, sizes: Sizes) -> Iterator[Case]:
    """Every case on float32 numbers."""
    assert store.dtype == "float32"
    yield from (score_case(store, summary, sizes) for summary in ("mean", "minmax"))
    yield topk_case(store, sizes)
    yield gather_case(store)
    yield from (append_case(store, dtype, sizes) for dtype in ("float32", "float16", "bfloat16"))
    yield merge_case(store, sizes)
    for dtype in CODES:
        for axis in ("row", "channel"):
            yield quantize_case(store, dtype, axis, sizes)
            yield dequantize_case(store, dtype, axis, sizes)


def score_case(store: Stored, summary: Literal["mean", "minmax"], sizes: Sizes) -> Case:
    """All of the store as summaries of the blocks of KV_HEADS heads."""
    parts = 2 if summary == "minmax" else 1
    row = parts * HEAD_DIM * 4
    blocks = len(store.whole) // (KV_HEADS * row)
    summaries = store.whole[: KV_HEADS * blocks * row].view(np.float32).reshape(KV_HEADS, blocks, parts, HEAD_DIM)
    if summary == "minmax":
        ordered = huge_bytes(summaries.nbytes).view(np.float32).reshape(summaries.shape)
        np.minimum(summaries[:, :, 0], summaries[:, :, 1], out=ordered[:, :, 0])
        np.maximum(summaries[:, :, 0], summaries[:, :, 1], out=ordered[:, :, 1])
        summaries = ordered
    queries = np.random.default_rng(6).standard_normal((KV_HEADS, GROUP, HEAD_DIM), dtype=np.float32)

    def launch_of(heads: int, count: int) -> Launch:
        args = Score(
            1, heads, GROUP, HEAD_DIM, summary, "max", np.array([[0, head, 0] for head in range(heads)], dtype=np.int64)
        )
        spans = Spans.equal(np.arange(heads, dtype=np.int64) * blocks * row, count * row)
        scores = np.zeros(heads * count, dtype=np.float32)
        return Launch(args, (whole(queries[:heads]), (Segment(region(summaries), spans),)), (whole(scores),))

    def check(run: Run) -> float:
        count = min(blocks, sizes.check_rows)
        small = launch_of(1, count)
        run(small)
        query, given = queries[0].astype(np.float64), summaries[0, :count].astype(np.float64)
        low, high = (np.minimum(query, 0), np.maximum(query, 0)) if parts == 2 else (query, query)
        each = [np.einsum("gd,nd->ng", q, given[:, i]) for i, q in enumerate((low, high)[:parts])]
        size = [np.einsum("gd,nd->ng", np.abs(q), np.abs(given[:, i])) for i, q in enumerate((low, high)[:parts])]
        bound = (parts * HEAD_DIM + 2) * U * np.sum(size, axis=0).max(axis=1)
        return error_over(written(small), np.sum(each, axis=0).max(axis=1), bound)

    launch = launch_of(KV_HEADS, blocks)
    rows = KV_HEADS * blocks
    return Case(
        f"score {summary}", "float32", GROUP, HEAD_DIM, blocks, (launch,), launch_nbytes(launch),
        work_of(launch), rows, check,
    )  # fmt: skip


def topk_case(store: Stored, sizes: Sizes) -> Case:
    """The best of several lists in turn, so that no branch is learnt by heart."""
    k, length = sizes.topk
    lists = [np.random.default_rng(7 + i).standard_normal(length, dtype=np.float32) for i in range(8)]
    args = Topk(k, np.array([length], dtype=np.int64))
    launches = tuple(Launch(args, (whole(one),), (whole(np.zeros(k, dtype=np.int64)),)) for one in lists)

    def check(run: Run) -> float:
        wrong = False
        for one, launch in zip(lists, launches, strict=True):
            run(launch)
            expected = np.lexsort((np.arange(length), -one))[:k]
            wrong = wrong or bool((bytes_of(launch.writes[0][0].region).view(np.int64) != expected).any())
        return error_if(wrong)

    return Case("topk", "float32", None, None, length, launches, 4 * length + 8 * k, None, length, check)


def gather_case(store: Stored) -> Case:
    """Rows of ROW_NBYTES of half the store, all of them in random order."""
    count = len(store.keys) // ROW_NBYTES
    offsets = np.random.default_rng(8).permutation(count) * ROW_NBYTES
    target = huge_bytes(count * ROW_NBYTES)
    rows = (Segment(region(store.keys), Spans.equal(offsets, ROW_NBYTES)),)
    launch = Launch(Gather(), (rows,), (whole(target),))

    def check(run: Run) -> float:
        run(launch)
        expected = store.keys[: count * ROW_NBYTES].reshape(count, ROW_NBYTES)[offsets // ROW_NBYTES]
        return error_if(bool((target.reshape(count, ROW_NBYTES) != expected).any()))

    nbytes = launch_nbytes(launch)
    return Case("gather", None, None, None, count, (launch,), nbytes, Work(nbytes), count, check)


def append_case(store: Stored, dtype: DType, sizes: Sizes) -> Case:
    """Rows of HEAD_DIM numbers, half the store, converted."""

    def launch_of(rows: Bytes) -> Launch:
        target = huge_bytes(len(rows) // 4 * ITEMSIZE[dtype])
        return Launch(Append(dtype), (whole(rows),), (whole(target),))

    def check(run: Run) -> float:
        rows = store.keys[: sizes.check_rows * HEAD_DIM * 4]
        small = launch_of(rows)
        run(small)
        return error_if(bool((written_bytes(small) != encode(numbers(rows, "float32"), dtype)).any()))

    launch = launch_of(store.keys)
    rows, nbytes = len(store.keys) // (HEAD_DIM * 4), launch_nbytes(launch)
    return Case("append", dtype, None, HEAD_DIM, rows, (launch,), nbytes, Work(nbytes), rows, check)


def merge_case(store: Stored, sizes: Sizes) -> Case:
    """States of STATES_PER_HEAD splits of each head of many sequences, as large as the store."""
    row = (2 + HEAD_DIM) * 4
    per_sequence = KV_HEADS * STATES_PER_HEAD * GROUP * row
    sequences = max(1, len(store.whole) // per_sequence)
    states = huge_bytes(sequences * per_sequence)
    repeat_into(states, store.keys[: len(store.keys) // row * row])
    table = states.view(np.float32).reshape(-1, 2 + HEAD_DIM)
    table[:, 1] = 1 + np.abs(table[:, 1])  # sums of exponentials: the largest logit counts 1

    def launch_of(sequences: int, heads: int) -> Launch:
        shape = (sequences, heads, STATES_PER_HEAD)
        sequence, head, split = np.unravel_index(np.arange(np.prod(shape)), shape)
        roots = np.stack([sequence, head, np.zeros_like(split), split], axis=1).astype(np.int64)
        output = np.zeros((sequences, heads * GROUP, HEAD_DIM), dtype=np.float32)
        given = states[: len(roots) * GROUP * row]
        return Launch(Merge(sequences, heads, GROUP, 1, HEAD_DIM, roots), (whole(given),), (whole(output),))

    def check(run: Run) -> float:
        small = launch_of(1, 1)
        run(small)
        given = table[: STATES_PER_HEAD * GROUP].reshape(STATES_PER_HEAD, GROUP, -1).astype(np.float64)
        m, total, acc = given[..., 0], given[..., 1], given[..., 2:]
        below = m.max(axis=0) - m
        weight = np.exp(-below) / (np.exp(-below) * total).sum(axis=0)
        # Each merge rounds an exponential, whose argument is off by 2u, and a few products and sums.
        factor = (2 * 2 * below.max(axis=0) + 8 * STATES_PER_HEAD + 16) * U
        bound = factor[:, None] * np.einsum("rg,rgd->gd", weight, np.abs(acc))
        return error_over(written(small).reshape(GROUP, -1), np.einsum("rg,rgd->gd", weight, acc), bound)

    launch = launch_of(sequences, KV_HEADS)
    rows = sequences * KV_HEADS * STATES_PER_HEAD
    nbytes = launch_nbytes(launch)
    return Case("merge", "float32", GROUP, HEAD_DIM, rows, (launch,), nbytes, Work(nbytes), rows, check)


Axis = Literal["row", "channel"]


def _scales(dtype: Codes) -> Float32:
    """Scales per channel of KV_HEADS heads: float32 (KV_HEADS, HEAD_DIM)."""
    random = np.random.default_rng(9).uniform(0.7, 1.4, (KV_HEADS, HEAD_DIM))
    return (random * 5 / CODE_RANGE[dtype]).astype(np.float32)


def _which(rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The scales of each row: rows of one head lie together."""
    return np.arange(rows, dtype=np.int64) * KV_HEADS // rows


def quantize_case(store: Stored, dtype: Codes, axis: Axis, sizes: Sizes) -> Case:
    """Half the store as rows of HEAD_DIM numbers → codes."""
    row = HEAD_DIM if axis == "channel" else value_nbytes(dtype, HEAD_DIM)
    scales = _scales(dtype)

    def launch_of(count: int) -> Launch:
        reads = [whole(store.keys[: count * HEAD_DIM * 4])]
        which = np.empty(0, dtype=np.int64)
        if axis == "channel":
            reads.append(whole(scales))
            which = _which(count)
        return Launch(Quantize(dtype, HEAD_DIM, axis, which), tuple(reads), (whole(huge_bytes(count * row)),))

    def check(run: Run) -> float:
        count = min(sizes.check_rows, len(store.keys) // (HEAD_DIM * 4))
        small = launch_of(count)
        run(small)
        found = written_bytes(small).reshape(count, row)
        given = numbers(store.keys[: count * HEAD_DIM * 4], "float32").reshape(count, HEAD_DIM)
        scale, worst = scales[_which(count)].astype(np.float64), 0.0
        if axis == "row":
            scale = np.ascontiguousarray(found[:, HEAD_DIM:]).view(np.float32).astype(np.float64)
            wanted = np.abs(given).max(axis=1, keepdims=True) / CODE_RANGE[dtype]
            worst = error_over(scale, wanted, 2 * U * wanted)
        largest = CODE_RANGE[dtype]
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.clip(given / scale, -largest, largest)
        codes = numbers(np.ascontiguousarray(found[:, :HEAD_DIM]).reshape(-1), dtype).reshape(exact.shape)
        return max(worst, error_over(codes, exact, half_step(exact, dtype) + 4 * U * np.abs(exact)))

    count = len(store.keys) // (HEAD_DIM * 4)
    launch = launch_of(count)
    nbytes = launch_nbytes(launch)
    return Case(f"quantize {axis}", dtype, None, HEAD_DIM, count, (launch,), nbytes, Work(nbytes), count, check)


def half_step(x: Float64, dtype: Codes) -> Float64:
    """Half the distance of the codes around x."""
    if dtype == "int8":
        return np.full_like(x, 0.5)
    _, exponent = np.frexp(x)  # x = m · 2^exponent, ½ ≤ |m| < 1; three bits of mantissa, exponents from −6
    return np.asarray(np.ldexp(0.5, np.maximum(exponent - 1, -6) - 3), dtype=np.float64)


def dequantize_case(store: Stored, dtype: Codes, axis: Axis, sizes: Sizes) -> Case:
    """Codes of as many rows → float32 rows."""
    row = HEAD_DIM if axis == "channel" else value_nbytes(dtype, HEAD_DIM)
    count = len(store.keys) // (HEAD_DIM * 4)
    codes = Stored(dtype, 2 * count * HEAD_DIM)
    stored = codes.keys if axis == "channel" else codes.values(HEAD_DIM)
    scales = _scales(dtype)

    def launch_of(count: int) -> Launch:
        reads = [whole(stored[: count * row])]
        which = np.empty(0, dtype=np.int64)
        if axis == "channel":
            reads.append(whole(scales))
            which = _which(count)
        target = huge_bytes(count * HEAD_DIM * 4)
        return Launch(Dequantize(dtype, HEAD_DIM, axis, which), tuple(reads), (whole(target),))

    def check(run: Run) -> float:
        few = min(sizes.check_rows, count)
        small = launch_of(few)
        run(small)
        given = stored[: few * row].reshape(few, row)
        scale = scales[_which(few)].astype(np.float64)
        if axis == "row":
            scale = np.ascontiguousarray(given[:, HEAD_DIM:]).view(np.float32).astype(np.float64)
        exact = numbers(np.ascontiguousarray(given[:, :HEAD_DIM]).reshape(-1), dtype).reshape(few, HEAD_DIM) * scale
        return error_if(bool((written(small).reshape(exact.shape) != exact.astype(np.float32)).any()))

    launch = launch_of(count)
    nbytes = launch_nbytes(launch)
    return Case(f"dequantize {axis}", dtype, None, HEAD_DIM, count, (launch,), nbytes, Work(nbytes), count, check)


def written_bytes(launch: Launch) -> Bytes:
    """What a launch wrote."""
    return bytes_of(launch.writes[0][0].region)
