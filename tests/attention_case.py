"""Attention cases: stored keys and values, laid out dense, paged or row by row, and launches on them.

A case holds the same rows however they lie. `layout` puts the rows of a selection into two byte arrays and says where:
"dense" in ascending order with the longest runs, "paged" in shuffled blocks, "rows" every row somewhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests import oracle
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.kernels import run
from tierloop.devices.kernels.contract import (
    CODE_RANGE,
    ITEMSIZE,
    Attend,
    Combine,
    DType,
    KernelArgs,
    Logits,
    Merge,
    value_nbytes,
)
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.states import cover, top_node

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def region(array: NDArray[np.generic]) -> Region:
    """A region whose bytes are those of a C-contiguous array."""
    flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return Region("test", "test", id(flat), flat.nbytes, view=flat)


def bytes_of(one: Region) -> Bytes:
    """What kernels are given as the bytes of a region."""
    assert one.view is not None
    return one.view


def whole(array: NDArray[np.generic]) -> Operand:
    """An operand that is all of an array."""
    return (region(array).all(),)


def launch(args: KernelArgs, reads: list[Operand], nbytes: int, threads: int = 1) -> Bytes:
    """The bytes that a kernel writes, `nbytes` of them, into an operand in one piece."""
    target = region(np.full(nbytes, 0xEE, dtype=np.uint8))
    run(Launch(args, tuple(reads), ((target.all(),),)), bytes_of, threads)
    return bytes_of(target)


class Layout(NamedTuple):
    """Where selected rows lie: runs (n, 3), and an operand each for keys and values with a span for each run."""

    runs: Int64
    keys: Operand
    values: Operand


@dataclass
class Case:
    """Queries float32 (sequences, q_len, heads, head_dim), stored K and V (sequences, kv_heads, tokens, dim).

    Where keys are codes, the queries are those that a kernel is given: the channel scales are in them already.
    """

    dtype: DType = "float32"
    num_sequences: int = 1
    num_kv_heads: int = 1
    group: int = 1
    q_len: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    tokens: int = 100
    split_tokens: int = 16
    seed: int = 0
    spread: float = 1.0
    masks: oracle.Masks = oracle.NO_MASKS
    queries: Float32 = field(init=False)
    keys: oracle.Stored = field(init=False)
    values: oracle.Stored = field(init=False)
    q_positions: Int64 = field(init=False)
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        heads = (self.num_sequences, self.q_len, self.num_kv_heads * self.group, self.head_dim)
        self.queries = (random.normal(size=heads) * self.spread).astype(np.float32)
        rows = (self.num_sequences, self.num_kv_heads, self.tokens)
        unit = CODE_RANGE[self.dtype] / 4 if self.dtype in CODE_RANGE else 1.0
        self.queries /= np.float32(unit)
        self.keys = oracle.encode(random.normal(size=(*rows, self.head_dim)) * unit, self.dtype)
        self.values = oracle.encode_values(random.normal(size=(*rows, self.head_dim_v)), self.dtype)
        # Consecutive queries, the last at the last token, as in a decode step or a prefill chunk.
        ends = np.arange(self.tokens - self.q_len, self.tokens, dtype=np.int64)
        self.q_positions = np.tile(ends, (self.num_sequences, 1))
        self.scale = float(np.float32(self.head_dim**-0.5))

    # -- rows ------------------------------------------------------------------------------------------------------

    def all_rows(self) -> Int64:
        """Every row as (sequence, kv_head, position), int64 (rows, 3), sorted."""
        shape = (self.num_sequences, self.num_kv_heads, self.tokens)
        return np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=1).astype(np.int64)

    def layout(self, rows: Int64, kind: str = "dense", page: int = 8) -> Layout:
        """Put sorted rows somewhere."""
        random = np.random.default_rng(self.seed + 1)
        starts = np.ones(len(rows), dtype=bool)
        if kind != "rows" and len(rows):
            follows = (rows[1:, :2] == rows[:-1, :2]).all(axis=1) & (rows[1:, 2] == rows[:-1, 2] + 1)
            starts[1:] = ~follows if kind == "dense" else ~follows | (rows[1:, 2] % page == 0)
        first = np.flatnonzero(starts)
        counts = np.diff(np.append(first, len(rows)))
        order = np.arange(len(first)) if kind == "dense" else random.permutation(len(first))
        operands = []
        key_nbytes = self.head_dim * ITEMSIZE[self.dtype]
        for stored, nbytes in ((self.keys, key_nbytes), (self.values, value_nbytes(self.dtype, self.head_dim_v))):
            offsets = np.empty(len(first), dtype=np.int64)
            offsets[order] = np.cumsum(counts[order]) - counts[order]
            memory = np.full((len(rows), nbytes), 0xEE, dtype=np.uint8)
            for run_index, offset in enumerate(offsets):
                mine = rows[first[run_index] : first[run_index] + counts[run_index]]
                picked = np.ascontiguousarray(stored[mine[:, 0], mine[:, 1], mine[:, 2]])
                memory[offset : offset + len(mine)] = picked.view(np.uint8).reshape(len(mine), nbytes)
            spans = Spans(np.stack([offsets * nbytes, counts * nbytes], axis=1))
            operands.append((region(memory), spans))
        key, value = operands
        return Layout(rows[first], (Segment(*key),), (Segment(*value),))

    def roots_of(self, rows: Int64, others: Int64 | None = None) -> Int64:
        """The fewest tree nodes that hold these rows and none of `others`, int64 (r, 4)."""
        roots = []
        for sequence in range(self.num_sequences):
            for head in range(self.num_kv_heads):
                mine = self._splits(rows, sequence, head)
                theirs = self._splits(others, sequence, head) if others is not None else []
                nodes = cover(mine, theirs) if others is not None or mine else [top_node(1)]
                roots += [(sequence, head, *node) for node in nodes]
        return np.array(roots, dtype=np.int64).reshape(-1, 4)

    def _splits(self, rows: Int64, sequence: int, head: int) -> list[int]:
        mine = rows[(rows[:, 0] == sequence) & (rows[:, 1] == head), 2]
        return [int(split) for split in np.unique(mine // self.split_tokens)]

    # -- kernels ---------------------------------------------------------------------------------------------------

    def attend_args(self, runs: Int64, roots: Int64) -> Attend:
        """The arguments of `attend`."""
        return Attend(
            self.dtype, self.num_sequences, self.num_kv_heads, self.group, self.q_len, self.head_dim, self.head_dim_v,
            self.scale, self.split_tokens, runs, self.q_positions, roots, *self.masks,
        )  # fmt: skip

    def states(self, place: Layout, roots: Int64, threads: int = 1) -> Float32:
        """States of the roots: float32 (r, q_len, group, 2 + head_dim_v)."""
        shape = (len(roots), self.q_len, self.group, 2 + self.head_dim_v)
        reads = [whole(self.queries), place.keys, place.values]
        result = launch(self.attend_args(place.runs, roots), reads, 4 * int(np.prod(shape)), threads)
        return result.view(np.float32).reshape(shape)

    def logits(self, place: Layout, threads: int = 1) -> Float32:
        """Logits float32 (rows, q_len, group)."""
        args = Logits(
            self.dtype, self.num_sequences, self.num_kv_heads, self.group, self.q_len, self.head_dim, self.scale,
            place.runs, self.q_positions, *self.masks,
        )  # fmt: skip
        rows = place.keys[0].spans.nbytes // (self.head_dim * ITEMSIZE[self.dtype])
        shape = (rows, self.q_len, self.group)
        result = launch(args, [whole(self.queries), place.keys], 4 * int(np.prod(shape)), threads)
        return result.view(np.float32).reshape(shape)

    def combine(self, logits: Float32, place: Layout, roots: Int64, threads: int = 1) -> Float32:
        """States from logits."""
        args = Combine(self.dtype, self.group, self.q_len, self.head_dim_v, self.split_tokens, place.runs, roots)
        shape = (len(roots), self.q_len, self.group, 2 + self.head_dim_v)
        result = launch(args, [whole(logits), place.values], 4 * int(np.prod(shape)), threads)
        return result.view(np.float32).reshape(shape)

    def output(self, states: Float32, roots: Int64) -> Float32:
        """Merged output (sequences, q_len, kv_heads, group, head_dim_v)."""
        args = Merge(self.num_sequences, self.num_kv_heads, self.group, self.q_len, self.head_dim_v, roots)
        shape = (self.num_sequences, self.q_len, self.num_kv_heads, self.group, self.head_dim_v)
        return launch(args, [whole(states)], 4 * int(np.prod(shape))).view(np.float32).reshape(shape)

    def attention(self, rows: Int64, kind: str = "dense", threads: int = 1) -> Float32:
        """The output over a selection of rows, by one launch and a merge."""
        roots = self.roots_of(rows)
        return self.output(self.states(self.layout(rows, kind), roots, threads), roots)

    # -- what should come out --------------------------------------------------------------------------------------

    def expected(self, rows: Int64) -> tuple[oracle.Float64, oracle.Float64]:
        """The float64 output and the bound on the error, each shaped like `output`."""
        shape = (self.num_sequences, self.q_len, self.num_kv_heads, self.group, self.head_dim_v)
        exact, bound = np.zeros(shape), np.zeros(shape)
        keys, values = oracle.decode(self.keys, self.dtype), oracle.decode_values(self.values, self.dtype)
        for s in range(self.num_sequences):
            for h in range(self.num_kv_heads):
                position = rows[(rows[:, 0] == s) & (rows[:, 1] == h), 2]
                q = self.queries[s].reshape(self.q_len, self.num_kv_heads, self.group, self.head_dim)[:, h]
                given = (q, keys[s, h, position], values[s, h, position], self.scale, self.q_positions[s], position)
                exact[s, :, h] = oracle.attention(*given, masks=self.masks)
                bound[s, :, h] = oracle.bound(*given, split_tokens=self.split_tokens, masks=self.masks)
        return exact, bound


def same_bits(a: Float32, b: Float32) -> bool:
    """Whether two float32 arrays are equal to the bit."""
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())
