"""The kernels: what each one means, for every device that offers it.

Shapes are C order. *Rows* of an operand are its spans, end to end over all its segments; a span holds a whole number
of rows, so a *run* (one span) is a number of consecutive rows. K and V rows hold `head_dim` and `head_dim_v` elements
of `dtype` (float32, float16, or bfloat16, the 16-bit ones as their bits). Everything else is float32 or int64.

**Runs.** `runs` is int64 (n, 3) with the columns (sequence, kv_head, position): span i holds consecutive positions of
one KV head of one sequence, from `position` on. Runs are sorted by all three columns and do not overlap. Dense, paged
and sparse rows are the same thing: long runs, block-sized runs, runs of one row.

**Splits and the merge tree.** A split is `split_tokens` consecutive positions: position p belongs to split
p // split_tokens. Attention states (m, l, acc) are made per split, over its rows in ascending position, and merged in
a fixed binary tree: node (level, index) covers the splits [index << level, (index + 1) << level) and is the merge of
(level - 1, 2 index) and (level - 1, 2 index + 1); an empty split is the identity, and merging with an identity leaves
the other side's bits alone. `roots`, int64 (r, 4) with the columns (sequence, kv_head, level, index), names the nodes
that a launch returns. Roots cover every given row exactly once. The state of a root is `group * q_len` state rows.

**State rows** are float32 (2 + head_dim_v): m, l, acc. m = max logit, l = Σ exp(logit − m), acc = Σ exp(logit − m)·v,
natural logarithm. The identity is (−inf, 0, 0). A row whose logits are all −inf gives the identity.

**Queries** are float32 (num_sequences, q_len, num_kv_heads * group, head_dim); q head h uses KV head h // group.
`q_positions`, int64 (num_sequences, q_len), masks: a row at position p counts for a query at position ≥ p only.

Devices with the same `Arithmetic.microkernel` give the same bits for the same rows, however those are divided into
runs, segments, launches or threads, as long as the cuts are at split borders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
DType = Literal["float32", "float16", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = frozenset(ITEMSIZE)


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """queries × K rows × V rows → states.

    reads = (queries, keys, values); writes = (states,): float32 (r, q_len, group, 2 + head_dim_v), in the order of
    `roots`. Keys and values have the same runs, each with its own segments. logit = scale · q·k.
    """

    kernel: ClassVar[str] = "attend"
    dtype: DType
    num_sequences: int
    num_kv_heads: int
    group: int
    q_len: int
    head_dim: int
    head_dim_v: int
    scale: float
    split_tokens: int
    runs: Int64
    q_positions: Int64
    roots: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """queries × K rows → logits, for a softmax that somebody else does.

    reads = (queries, keys); writes = (logits,): float32 (rows, q_len, group), rows in the order of the runs. Masked
    entries are −inf.
    """

    kernel: ClassVar[str] = "logits"
    dtype: DType
    num_sequences: int
    num_kv_heads: int
    group: int
    q_len: int
    head_dim: int
    scale: float
    runs: Int64
    q_positions: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Combine:
    """logits + V rows → states: the second half of `Attend` for logits that were computed elsewhere.

    reads = (logits, values), logits float32 (rows, q_len, group) in the order of the runs; writes = (states,) as in
    `Attend`. `Combine` of `Logits` has the bits of `Attend`.
    """

    kernel: ClassVar[str] = "combine"
    dtype: DType
    group: int
    q_len: int
    head_dim_v: int
    split_tokens: int
    runs: Int64
    roots: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """states → attention output, by the fixed tree.

    reads = (states,): float32 (r, q_len, group, 2 + head_dim_v) with `roots` int64 (r, 4) in any order, no node inside
    another; writes = (output,): float32 (num_sequences, q_len, num_kv_heads * group, head_dim_v), acc / l of the
    merged state. A query that no row counts for gives zeros.
    """

    kernel: ClassVar[str] = "merge"
    num_sequences: int
    num_kv_heads: int
    group: int
    q_len: int
    head_dim_v: int
    roots: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """queries × block summaries → one score per block.

    reads = (queries, summaries); runs as for keys, one row per block: `mean` rows are float32 (head_dim), the mean key;
    `minmax` rows are float32 (2, head_dim), the channel-wise minimum and maximum (Quest's upper bound:
    Σ_c max(q_c·min_c, q_c·max_c)). writes = (scores,): float32 (rows,), reduced over the query group by `reduce`.
    q_len is 1.
    """

    kernel: ClassVar[str] = "score"
    num_sequences: int
    num_kv_heads: int
    group: int
    head_dim: int
    summary: Literal["mean", "minmax"]
    reduce: Literal["max", "sum"]
    runs: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Topk:
    """The k best of each list: score descending, then index ascending.

    reads = (scores,): float32, the lists end to end, `lengths` int64 (n,) long; writes = (indices,): int64 (n, k),
    index within the list, −1 where the list is shorter than k. NaN scores sort last.
    """

    kernel: ClassVar[str] = "topk"
    k: int
    lengths: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Scattered rows → one dense run. reads = (rows,); writes = (dense,), the same number of bytes."""

    kernel: ClassVar[str] = "gather"


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """New K or V rows → the open blocks, converted to `dtype` (round to nearest even).

    reads = (rows,): float32; writes = (targets,): the same number of elements in `dtype`.
    """

    kernel: ClassVar[str] = "append"
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A projection, an MLP, sampling or a prefill chunk: the cost, and the function that produces the numbers.

    `function(reads, writes)` is called once, with one uint8 array per operand (its rows end to end; for writes an
    array that is stored after the call). Cost on a device: the larger of flops / rate and nbytes / bandwidth, where
    nbytes = weight_nbytes + activation_nbytes; `label` names the stage in traces.
    """

    kernel: ClassVar[str] = "dense"
    label: str
    flops: int
    weight_nbytes: int
    activation_nbytes: int
    function: Callable[[list[NDArray[np.uint8]], list[NDArray[np.uint8]]], None] | None = None


KernelArgs = Attend | Logits | Combine | Merge | Score | Topk | Gather | Append | Dense
KERNELS: frozenset[str] = frozenset(
    {"attend", "logits", "combine", "merge", "score", "topk", "gather", "append", "dense"}
)


def flops(args: KernelArgs, read_nbytes: list[int]) -> int:
    """Floating-point operations of a launch; `read_nbytes` is the bytes of each read operand.

    attend: 2·d per logit and 2·d_v per weighted value row, per query; other kernels likewise. exp and comparisons are
    not counted, as is usual.
    """
    if isinstance(args, Attend):
        rows = read_nbytes[1] // (args.head_dim * ITEMSIZE[args.dtype])
        return 2 * rows * args.group * args.q_len * (args.head_dim + args.head_dim_v)
    if isinstance(args, Logits):
        rows = read_nbytes[1] // (args.head_dim * ITEMSIZE[args.dtype])
        return 2 * rows * args.group * args.q_len * args.head_dim
    if isinstance(args, Combine):
        rows = read_nbytes[1] // (args.head_dim_v * ITEMSIZE[args.dtype])
        return 2 * rows * args.group * args.q_len * args.head_dim_v
    if isinstance(args, Merge):
        return read_nbytes[0] // 4
    if isinstance(args, Score):
        return read_nbytes[1] // 4 * 2 * args.group
    if isinstance(args, Dense):
        return args.flops
    return 0


_READS = {
    "attend": 3,
    "logits": 2,
    "combine": 2,
    "merge": 1,
    "score": 2,
    "topk": 1,
    "gather": 1,
    "append": 1,
    "dense": -1,
}


def reads_of(args: KernelArgs) -> int:
    """How many read operands the kernel takes; Dense takes any number (-1)."""
    return _READS[args.kernel]


def check(args: KernelArgs, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> str | None:
    """What is wrong with a launch, or None: `reads` and `writes` hold (number of spans, bytes) of each operand.

    Cheap enough for every submit: sizes and counts only, not the order of the runs.
    """
    need = reads_of(args)
    if need >= 0 and len(reads) != need:
        return f"{args.kernel} takes {need} read operands, got {len(reads)}"
    if need >= 0 and len(writes) != 1:
        return f"{args.kernel} takes 1 write operand, got {len(writes)}"
    if isinstance(args, (Attend, Logits, Combine, Append)) and args.dtype not in ITEMSIZE:
        return f"dtype {args.dtype!r} is not one of {', '.join(sorted(ITEMSIZE))}"
    expect: list[tuple[str, int, int]] = []
    if isinstance(args, (Attend, Logits)):
        item = ITEMSIZE[args.dtype]
        queries = args.num_sequences * args.q_len * args.num_kv_heads * args.group * args.head_dim * 4
        expect.append(("queries", reads[0][1], queries))
        expect.append(("key spans", reads[1][0], len(args.runs)))
        rows = reads[1][1] // (args.head_dim * item)
        expect.append(("key bytes", reads[1][1], rows * args.head_dim * item))
        if isinstance(args, Attend):
            expect.append(("value spans", reads[2][0], len(args.runs)))
            expect.append(("value bytes", reads[2][1], rows * args.head_dim_v * item))
            expect.append(("state bytes", writes[0][1], state_nbytes(args)))
        else:
            expect.append(("logit bytes", writes[0][1], rows * args.q_len * args.group * 4))
    elif isinstance(args, Combine):
        rows = reads[0][1] // (args.q_len * args.group * 4)
        expect.append(("value spans", reads[1][0], len(args.runs)))
        expect.append(("value bytes", reads[1][1], rows * args.head_dim_v * ITEMSIZE[args.dtype]))
        expect.append(("state bytes", writes[0][1], state_nbytes(args)))
    elif isinstance(args, Merge):
        expect.append(("state bytes", reads[0][1], state_nbytes(args)))
        output = args.num_sequences * args.q_len * args.num_kv_heads * args.group * args.head_dim_v * 4
        expect.append(("output bytes", writes[0][1], output))
    elif isinstance(args, Score):
        row = args.head_dim * 4 * (2 if args.summary == "minmax" else 1)
        expect.append(("queries", reads[0][1], args.num_sequences * args.num_kv_heads * args.group * args.head_dim * 4))
        expect.append(("summary spans", reads[1][0], len(args.runs)))
        expect.append(("score bytes", writes[0][1], reads[1][1] // row * 4))
    elif isinstance(args, Topk):
        expect.append(("score bytes", reads[0][1], int(args.lengths.sum()) * 4))
        expect.append(("index bytes", writes[0][1], len(args.lengths) * args.k * 8))
    elif isinstance(args, Gather):
        expect.append(("dense bytes", writes[0][1], reads[0][1]))
    elif isinstance(args, Append):
        expect.append(("target bytes", writes[0][1], reads[0][1] // 4 * ITEMSIZE[args.dtype]))
    for what, got, want in expect:
        if got != want:
            return f"{args.kernel}: {what}: {got} given, {want} needed by the arguments"
    return None


def state_nbytes(args: Attend | Combine | Merge) -> int:
    """Bytes of the states of all roots: float32 (r, q_len, group, 2 + head_dim_v)."""
    return len(args.roots) * args.q_len * args.group * (2 + args.head_dim_v) * 4
