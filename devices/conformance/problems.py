"""Attention problems of many shapes for the compute checks, and the same rows cut in other ways."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.conformance import oracle
from tierloop.devices.conformance.subject import Bytes
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import CODE_RANGE, Attend, DType
from tierloop.devices.states import cover, top_node

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """The sizes of a problem. `layout` is how rows are divided into runs; `spread` scales the queries."""

    dtype: DType
    group: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    num_sequences: int = 2
    num_kv_heads: int = 2
    q_len: int = 1
    tokens: int = 90
    split_tokens: int = 32
    layout: str = "paged"
    spread: float = 1.0
    masks: oracle.Masks = oracle.NO_MASKS


SHAPES = (
    Shape("float32", group=1, head_dim=64, layout="dense"),
    Shape("float32", group=2, head_dim=80, layout="sparse"),
    Shape("float32", group=3, head_dim=96, q_len=3),
    Shape("float32", group=4, head_dim=128, head_dim_v=64, num_sequences=1, layout="sparse"),
    Shape("float32", group=7, head_dim=64, head_dim_v=96, num_kv_heads=1),
    Shape("float32", group=8, head_dim=256, head_dim_v=256, num_sequences=1, num_kv_heads=1, layout="dense"),
    Shape("float32", group=16, head_dim=128, head_dim_v=128, num_sequences=1, num_kv_heads=1, q_len=2),
    Shape("float32", group=2, q_len=3, masks=oracle.Masks(window=40, sink_tokens=4)),
    Shape("float32", group=5, layout="sparse", masks=oracle.Masks(window=7)),
    Shape("float32", group=3, spread=4.0, masks=oracle.Masks(softcap=3.0)),
)
"""Each dtype is tried with all of these."""


def shapes(dtypes: frozenset[str]) -> list[Shape]:
    """Every shape in every dtype."""
    return [replace(shape, dtype=dtype) for dtype in sorted(dtypes) for shape in SHAPES]  # type: ignore[arg-type]


@dataclass
class Problem:
    """Queries, rows and where they belong; keys and values are bytes of `dtype`, row after row in the order of runs.

    queries float32 (S, q_len, H·group, d); runs int64 (n, 3), lengths int64 (n,); q_positions int64 (S, q_len).
    """

    shape: Shape
    queries: NDArray[np.float32]
    keys: Bytes
    values: Bytes
    runs: Int64
    lengths: Int64
    q_positions: Int64

    @property
    def scale(self) -> float:
        """The usual 1 / √head_dim, as a float32 number, so that no device has to round it."""
        return float(np.float32(self.shape.head_dim**-0.5))

    @property
    def rows(self) -> oracle.Rows:
        """Sequence, head and position of each row."""
        return oracle.Rows.of(self.runs, self.lengths)

    def decoded_keys(self) -> oracle.Float64:
        """(rows, head_dim)."""
        return oracle.decode(self.keys, self.shape.dtype).reshape(-1, self.shape.head_dim)

    def decoded_values(self) -> oracle.Float64:
        """(rows, head_dim_v)."""
        return oracle.decode_values(self.values, self.shape.dtype, self.shape.head_dim_v)

    def top_roots(self) -> Int64:
        """One root per sequence and head, int64 (S·H, 4)."""
        top = top_node(-(-self.shape.tokens // self.shape.split_tokens))
        return self._roots([top])

    def split_roots(self) -> Int64:
        """One root per split, the empty ones too."""
        return self._roots([(0, i) for i in range(-(-self.shape.tokens // self.shape.split_tokens))])

    def mixed_roots(self) -> Int64:
        """The first two splits as one node, all others alone, in another order than the rows."""
        splits = -(-self.shape.tokens // self.shape.split_tokens)
        return self._roots([(0, i) for i in range(splits - 1, 1, -1)] + [(1, 0)])

    def attend(self, roots: Int64) -> Attend:
        """The launch's arguments."""
        s = self.shape
        return Attend(
            s.dtype, s.num_sequences, s.num_kv_heads, s.group, s.q_len, s.head_dim, s.head_dim_v, self.scale,
            s.split_tokens, self.runs, self.q_positions, roots, *astuple(s.masks),
        )  # fmt: skip

    def expected_logits(self, arithmetic: Arithmetic, rounded: str = "") -> oracle.Expected:
        """By the oracle."""
        return oracle.logits(
            self.queries.astype(np.float64),
            self.decoded_keys(),
            self.rows,
            self.q_positions,
            self.shape.group,
            self.scale,
            arithmetic,
            self.shape.masks,
            rounded,
        )

    def expected_states(self, roots: Int64, arithmetic: Arithmetic) -> oracle.States:
        """By the oracle; where a fused kernel may have been used, what that may give."""
        s = self.shape
        may = s.dtype in arithmetic.fused and s.head_dim == s.head_dim_v and s.masks == oracle.NO_MASKS
        rounded = s.dtype if may else ""
        return oracle.states(
            self.expected_logits(arithmetic, rounded),
            self.decoded_values(),
            self.rows,
            roots,
            self.shape.split_tokens,
            arithmetic,
            rounded,
        )

    def _roots(self, nodes: list[tuple[int, int]]) -> Int64:
        s = self.shape
        pairs = [(q, h) for q in range(s.num_sequences) for h in range(s.num_kv_heads)]
        return np.array([(*pair, *node) for pair in pairs for node in nodes], dtype=np.int64).reshape(-1, 4)


def problem(shape: Shape, rng: np.random.Generator) -> Problem:
    """A problem of that shape; sequence s holds 7·s tokens less than the first, and of `sparse` rows about a third."""
    runs: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for sequence in range(shape.num_sequences):
        tokens = max(shape.tokens - 7 * sequence, 1)
        for head in range(shape.num_kv_heads):
            if shape.layout == "dense":
                pieces = [(0, tokens)]
            elif shape.layout == "paged":
                pieces = [(p, min(16, tokens - p)) for p in range(0, tokens, 16)]
            else:
                pieces = [(p, 1) for p in np.flatnonzero(rng.random(tokens) < 0.35).tolist()]
            runs += [(sequence, head, p) for p, _ in pieces]
            lengths += [n for _, n in pieces]
    num = sum(lengths)
    s = shape
    last = np.array([[max(s.tokens - 7 * q, 1) - s.q_len + t for t in range(s.q_len)] for q in range(s.num_sequences)])
    # Codes are used to a quarter of their range; the queries bring their products back to the size of numbers.
    unit = CODE_RANGE[s.dtype] / 4 if s.dtype in CODE_RANGE else 1.0
    queries = rng.normal(size=(s.num_sequences, s.q_len, s.num_kv_heads * s.group, s.head_dim)) * s.spread / unit
    return Problem(
        shape,
        queries.astype(np.float32),
        oracle.encode((rng.normal(size=(num, s.head_dim)) * unit).astype(np.float32), s.dtype),
        oracle.encode_values(rng.normal(size=(num, s.head_dim_v)).astype(np.float32), s.dtype),
        np.array(runs, dtype=np.int64).reshape(-1, 3),
        np.array(lengths, dtype=np.int64),
        last.astype(np.int64),
    )


def in_runs_of(given: Problem, rows: int) -> Problem:
    """The same rows, in runs of at most so many."""
    pieces = [
        (sequence, head, position + at, min(rows, length - at))
        for (sequence, head, position), length in zip(given.runs.tolist(), given.lengths.tolist(), strict=True)
        for at in range(0, length, rows)
    ]
    table = np.array(pieces, dtype=np.int64)
    return replace(given, runs=table[:, :3], lengths=table[:, 3])


def by_split(given: Problem, parity: int) -> tuple[Problem, Int64]:
    """The runs in even or odd splits, and the fewest roots that hold them; no run may cross a split's border."""
    shape = given.shape
    split = given.runs[:, 2] // shape.split_tokens
    mine = split % 2 == parity
    rows = np.repeat(mine, given.lengths)
    keys = given.keys.reshape(len(rows), -1)[rows].reshape(-1)
    values = given.values.reshape(len(rows), -1)[rows].reshape(-1)
    roots = []
    for sequence in range(shape.num_sequences):
        for head in range(shape.num_kv_heads):
            here = (given.runs[:, 0] == sequence) & (given.runs[:, 1] == head)
            held, rest = (np.unique(split[here & side]).tolist() for side in (mine, ~mine))
            roots += [(sequence, head, *node) for node in cover(held, rest)]
    part = replace(given, runs=given.runs[mine], lengths=given.lengths[mine], keys=keys, values=values)
    return part, np.array(roots, dtype=np.int64)
