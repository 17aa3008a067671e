"""Cases of the attention bench: attend in every type and layout, logits, combine.

A case is one launch that is timed, the work that it does, and a check of the same kernel on a smaller slice of the same
stored bytes against float64. `bench_more_cases.py` holds the kernels that select, move and convert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch, Operand
from tierloop.devices.kernels.contract import ITEMSIZE, Attend, Combine, DType, Logits, flops, value_nbytes
from tierloop.devices.kernels.definition import numbers, value_rows
from tierloop.runtime.bounds import U, rounding_bound, softmax
from tierloop.tools.bench_data import (
    KV_HEADS,
    SPLIT_TOKENS,
    Bytes,
    Float32,
    Int64,
    Place,
    Sizes,
    Stored,
    bytes_of,
    place,
    roots,
    whole,
)
from tierloop.tools.roofline import Work

Run = Callable[[Launch], object]
"""Carries a launch out."""
Float64 = NDArray[np.float64]

DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16", "int8", "fp8_e4m3")
GROUPS = (1, 4, 8)
HEAD_DIMS = (64, 128)
PAGE_TOKENS = 16
ROW_NBYTES = 256
WRONG = 1e300
"""Error over bound of a result that is no number, or no result."""


@dataclass
class Case:
    """One row of the table. `launches` are timed in turn; `check(run)` is the largest error over its bound, where 0
    to 1 is right; `work` None: no roofline; `rows` for ns per row; `parts` is what comparisons need."""

    kernel: str
    dtype: str | None
    group: int | None
    head_dim: int | None
    tokens: int
    launches: tuple[Launch, ...]
    nbytes: int
    work: Work | None
    rows: int
    check: Callable[[Run], float]
    parts: Parts | None = None


class Parts(NamedTuple):
    """Operands of attention: queries float32 (1, 1, heads · group, head_dim), K and V bytes, and where rows lie."""

    dtype: DType
    heads: int
    group: int
    head_dim: int
    tokens: int
    queries: Float32
    keys: Bytes
    values: Bytes
    where: Place

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(self.head_dim**-0.5)

    def key_operand(self) -> Operand:
        """The K rows."""
        return self.where.operand(self.keys, self.head_dim * ITEMSIZE[self.dtype])

    def value_operand(self) -> Operand:
        """The V rows."""
        return self.where.operand(self.values, value_nbytes(self.dtype, self.head_dim))

    def slice(self, rows: int) -> Parts:
        """One head with at most `rows` of its rows, from the start of the same stored bytes."""
        tokens = min(rows, self.tokens)
        block = self.where.rows if self.where.rows < self.tokens else 0
        tokens -= tokens % (block or 1)
        queries = np.ascontiguousarray(self.queries[:, :, : self.group])
        return self._replace(heads=1, tokens=tokens, queries=queries, where=place(1, tokens, block))


def parts_of(store: Stored, values: Bytes, group: int, head_dim: int, block: int = 0) -> Parts:
    """All of a store as K and V of KV_HEADS heads."""
    tokens = len(store.keys) // (KV_HEADS * head_dim * ITEMSIZE[store.dtype])
    tokens -= tokens % max(block, SPLIT_TOKENS)
    queries = np.random.default_rng(4).standard_normal((1, 1, KV_HEADS * group, head_dim), dtype=np.float32)
    queries *= np.float32(store.key_scale)
    dtype: DType = store.dtype  # type: ignore[assignment]  # one of DTYPES
    return Parts(dtype, KV_HEADS, group, head_dim, tokens, queries, store.keys, values, place(KV_HEADS, tokens, block))


def attend_launch(parts: Parts) -> Launch:
    """`attend` over everything, into new states."""
    args = Attend(
        parts.dtype, 1, parts.heads, parts.group, 1, parts.head_dim, parts.head_dim, parts.scale, SPLIT_TOKENS,
        parts.where.runs, np.array([[parts.tokens - 1]], dtype=np.int64), roots(parts.heads, parts.tokens),
    )  # fmt: skip
    states = np.zeros((parts.heads, parts.group, 2 + parts.head_dim), dtype=np.float32)
    reads = (whole(parts.queries), parts.key_operand(), parts.value_operand())
    return Launch(args, reads, (whole(states),))


def logits_launch(parts: Parts) -> Launch:
    """`logits` of everything, into new ones: float32 (rows, group)."""
    args = Logits(
        parts.dtype, 1, parts.heads, parts.group, 1, parts.head_dim, parts.scale, parts.where.runs,
        np.array([[parts.tokens - 1]], dtype=np.int64),
    )  # fmt: skip
    logits = np.zeros((parts.heads * parts.tokens, parts.group), dtype=np.float32)
    return Launch(args, (whole(parts.queries), parts.key_operand()), (whole(logits),))


def combine_launch(parts: Parts, logits: Operand) -> Launch:
    """`combine` of logits with the V rows, into new states."""
    args = Combine(
        parts.dtype, parts.group, 1, parts.head_dim, SPLIT_TOKENS, parts.where.runs, roots(parts.heads, parts.tokens)
    )
    states = np.zeros((parts.heads, parts.group, 2 + parts.head_dim), dtype=np.float32)
    return Launch(args, (logits, parts.value_operand()), (whole(states),))


def attention_cases(store: Stored, sizes: Sizes) -> Iterator[Case]:
    """Every case of one stored type: attend dense, paged and row by row, logits and combine."""
    item = ITEMSIZE[store.dtype]
    for head_dim in HEAD_DIMS:
        values = store.values(head_dim)
        for group in GROUPS:
            yield attend_case("attend", parts_of(store, values, group, head_dim), sizes)
        if head_dim == HEAD_DIMS[-1]:
            yield attend_case("attend paged", parts_of(store, values, 4, head_dim, PAGE_TOKENS), sizes)
            yield from _halves(parts_of(store, values, 4, head_dim), sizes)
        if head_dim * item == ROW_NBYTES:
            yield attend_case("attend rows", parts_of(store, values, 4, head_dim, 1), sizes)


def attend_case(kernel: str, parts: Parts, sizes: Sizes) -> Case:
    """`attend` over all of the parts, checked on a slice."""
    launch = attend_launch(parts)
    rows = parts.heads * parts.tokens
    sliced = parts.slice(sizes.check_rows)

    def check(run: Run) -> float:
        small = attend_launch(sliced)
        run(small)
        return _states_error(sliced, written(small))

    return Case(
        kernel, parts.dtype, parts.group, parts.head_dim, parts.tokens, (launch,), launch_nbytes(launch),
        work_of(launch, 2 * rows * parts.head_dim, rows * parts.group, parts.dtype), rows, check, parts,
    )  # fmt: skip


def _halves(parts: Parts, sizes: Sizes) -> Iterator[Case]:
    """`logits`, and `combine` of random ones."""
    rows, sliced = parts.heads * parts.tokens, parts.slice(sizes.check_rows)
    launch = logits_launch(parts)
    given = np.random.default_rng(5).standard_normal((rows, parts.group), dtype=np.float32)

    def check_logits(run: Run) -> float:
        small = logits_launch(sliced)
        run(small)
        query, keys, _ = _exact(sliced)
        expected = sliced.scale * np.einsum("gd,nd->ng", query, keys)
        magnitude = sliced.scale * np.einsum("gd,nd->ng", np.abs(query), np.abs(keys))
        bound = (sliced.head_dim + 2) * U * magnitude + 2 * U * np.abs(expected)
        return error_over(written(small).reshape(expected.shape), expected, bound)

    def check_combine(run: Run) -> float:
        small = combine_launch(sliced, whole(given[: sliced.tokens]))
        run(small)
        return _states_error(sliced, written(small), given[: sliced.tokens])

    described = (parts.dtype, parts.group, parts.head_dim, parts.tokens)
    yield Case(
        "logits", *described, (launch,), launch_nbytes(launch), work_of(launch, rows * parts.head_dim, 0, parts.dtype),
        rows, check_logits,
    )  # fmt: skip
    launch = combine_launch(parts, whole(given))
    yield Case(
        "combine", *described, (launch,), launch_nbytes(launch),
        work_of(launch, rows * parts.head_dim, rows * parts.group, parts.dtype), rows, check_combine,
    )  # fmt: skip


def launch_nbytes(launch: Launch) -> int:
    """Bytes of all operands: each is read or written once."""
    return sum(segment.spans.nbytes for operand in (*launch.reads, *launch.writes) for segment in operand)


def work_of(launch: Launch, conversions: int = 0, exponentials: int = 0, dtype: str = "float32") -> Work:
    """What a launch moves and computes."""
    sizes = [sum(segment.spans.nbytes for segment in operand) for operand in launch.reads]
    return Work(launch_nbytes(launch), flops(launch.args, sizes), conversions, exponentials, dtype)


def written(launch: Launch, index: int = 0) -> Float32:
    """What a launch wrote, as float32."""
    return bytes_of(launch.writes[index][0].region).view(np.float32)


def _exact(parts: Parts) -> tuple[Float64, Float64, Float64]:
    """Queries, keys and values of a slice of one head, rows in the order of positions: (g, d), (n, d), (n, d)."""
    at: Int64 = parts.where.storage_rows()
    item = ITEMSIZE[parts.dtype]
    key_row, value_row = parts.head_dim * item, value_nbytes(parts.dtype, parts.head_dim)
    keys = parts.keys[: parts.tokens * key_row].reshape(-1, key_row)[at]
    values = parts.values[: parts.tokens * value_row].reshape(-1, value_row)[at]
    query = parts.queries.reshape(parts.group, parts.head_dim).astype(np.float64)
    return (
        query,
        numbers(keys.reshape(-1), parts.dtype).reshape(-1, parts.head_dim),
        value_rows(values.reshape(-1), parts.dtype, parts.head_dim),
    )


def _states_error(parts: Parts, states: Float32, given: Float32 | None = None) -> float:
    """The state of one head against float64, over the bounds of m, l and the output acc / l; `given` logits are exact.

    l is compared with Σ exp(logit − m) for the m that was found: its relative bound is that of the output for V = 1.
    """
    query, keys, values = _exact(parts)
    if given is None:
        logits = parts.scale * np.einsum("gd,nd->gn", query, keys)
    else:
        query, logits = np.zeros_like(query), given.T.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = states.reshape(parts.group, 2 + parts.head_dim).astype(np.float64)
    top = logits.max(axis=1)
    magnitude = parts.scale * np.einsum("gd,nd->gn", np.abs(query), np.abs(keys)).max(axis=1)
    of_max = error_over(found[:, 0], top, (parts.head_dim + 2) * U * magnitude + 2 * U * np.abs(top))
    exact, merged = (query, logits, keys), -(-len(keys) // SPLIT_TOKENS)
    with np.errstate(all="ignore"):
        total = np.exp(logits - found[:, :1]).sum(axis=1, keepdims=True)
        of_one = rounding_bound(*exact, np.ones((len(keys), 1)), parts.scale, SPLIT_TOKENS, merged)
        of_sum = error_over(found[:, 1:2], total, of_one * total)
        expected = np.einsum("gn,nd->gd", softmax(logits), values)
        bound = rounding_bound(*exact, values, parts.scale, SPLIT_TOKENS, merged)
        return max(of_max, of_sum, error_over(found[:, 2:] / found[:, 1:2], expected, bound))


def error_if(wrong: bool) -> float:
    """Error over bound of a kernel that has no bound: a result is right to the bit, or wrong."""
    return WRONG if wrong else 0.0


def error_over(found: NDArray[np.floating], expected: Float64, bound: Float64) -> float:
    """The largest |found − expected| / bound; WRONG where something is no number."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        ratio = np.abs(found - expected) / np.maximum(bound, np.finfo(np.float32).tiny)
    worst = float(np.max(ratio, initial=0.0))
    return worst if worst < WRONG else WRONG
