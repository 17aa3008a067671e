"""The kernels: what each one means, for every device that offers it.

Shapes are C order. *Rows* of an operand are its spans, end to end over all its segments; a span holds a whole number
of rows, so a *run* (one span) is a number of consecutive rows. K and V rows hold `head_dim` and `head_dim_v` elements
of `dtype`: float32; float16 or bfloat16, as their bits; int8 or fp8_e4m3, as codes. All else is float32 or int64.

**Codes.** An int8 code is an integer in −127 … 127, an fp8_e4m3 code the OCP 8-bit float of that name (largest 448,
0x7F and 0xFF are NaN). What a code stands for is code · scale. Keys have a scale for each channel, which is part of the
queries that a kernel is given: q·(s∘code) = (q∘s)·code. Values have a scale for each row: a V row of codes is followed
by its scale, one float32 (`value_nbytes`).

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
Where the arithmetic of a device is `fused`, m may be any number from the largest logit to the log-sum-exp, with l and
acc to match: then l = 1 and acc is the output, if m is the log-sum-exp. Whoever reads states relies on exp(m)·l and
exp(m)·acc, and on an l from 1 to the number of rows, and not on what m is by itself.

**Queries** are float32 (num_sequences, q_len, num_kv_heads * group, head_dim); q head h uses KV head h // group.
`q_positions`, int64 (num_sequences, q_len), masks: a row at position p counts for a query at position t if p ≤ t and,
where `window` is not 0, if t − p < window or p < sink_tokens. What lies in rows that do not count never matters.

**Logits** are scale · q·k, and, where `softcap` c is not 0, c · tanh(that / c).

**NaN and infinity.** Whatever counts takes part by the rules of IEEE 754: a NaN in a key, or a logit of +inf, makes the
output of its query NaN; in a value, that of its channel (also where its weight has underflown to 0). A row whose logit
is −inf does not count. Nothing else is spoilt: no other query, head or sequence. Sums are float32: a product q·k beyond
its range is infinite before it is scaled. Where arithmetic is `fused`, a query beyond the range of the rows' type is
infinite, too, and what is not finite in a value spoils its channel even if the logit of its row is −inf. Quantities
that are selected by (`score`, `topk`) sort NaN last. Summaries of `score` must be finite, scales of codes finite and
above 0; what others give has no meaning.

Devices with the same `Arithmetic.microkernel` give the same bits for the same rows, however those are divided into
runs, segments, launches or threads, as long as the cuts are at split borders. One whose arithmetic is not
`cut_invariant` keeps the bound only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
DType = Literal["float32", "float16", "bfloat16", "int8", "fp8_e4m3"]
Codes = Literal["int8", "fp8_e4m3"]
ITEMSIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
DTYPES = frozenset(ITEMSIZE)
CODE_RANGE: dict[str, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
"""Types whose elements are codes, and the largest code of each."""
SCALE_NBYTES = 4
"""Bytes of the scale that follows the codes of a V row."""


def value_nbytes(dtype: str, head_dim_v: int) -> int:
    """Bytes of one V row: its elements, and its scale where they are codes."""
    return head_dim_v * ITEMSIZE[dtype] + (SCALE_NBYTES if dtype in CODE_RANGE else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """queries × K rows × V rows → states.

    reads = (queries, keys, values); writes = (states,): float32 (r, q_len, group, 2 + head_dim_v), in the order of
    `roots`. Keys and values have the same runs, each with its own segments.
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
    window: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0


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
    window: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0


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
    merged state. A query that no row counts for gives zeros. Where `has_sinks`, a second read operand holds a learned
    sink logit s for each q head, float32 (num_kv_heads * group,): the state (s, 1, 0) is merged in last.
    """

    kernel: ClassVar[str] = "merge"
    num_sequences: int
    num_kv_heads: int
    group: int
    q_len: int
    head_dim_v: int
    roots: Int64
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """queries × block summaries → one score per block.

    reads = (queries, summaries); runs as for keys, one row per block. `mean` rows are (head_dim) elements of `dtype`
    (float32, float16 or bfloat16), the mean key of a block or the centroid of a cluster: q·mean. `minmax` rows are
    float32 (2, head_dim), the minimum and maximum of each channel: Σ_c min(q_c, 0)·min_c + max(q_c, 0)·max_c, Quest's
    upper bound. writes = (scores,): float32 (rows,), reduced over the query group by `reduce`. q_len is 1.

    **reduce "max", "sum"**: of these products; `scale` is 1.

    **reduce "softmax"**: the rows of one sequence and KV head, over all their runs, are a *list*; each q head of the
    group shares a weight of 1 out among the rows of its list, and the score of a row is what it gets of all of them.
    - s = scale · product, with the bits of `Logits`; m = the largest s of the list that is a number; w = exp(s − m), in
      float32, at most 1 ulp off and 0 below 2**−126.
    - l = Σ w in float64, over 16 lanes: the weight of row i of the list goes to lane i mod 16, in ascending i; lane j
      and lane j + 8 are added, then j + 4, j + 2, j + 1; l is rounded to float32 once.
    - share = w / l, a division of float32; the score is the sum of the shares in float32, q heads in ascending order.
    A q head whose s are all −inf, or a row whose s is −inf, gives the share 0. A NaN or +inf among the s of a q head
    makes every share of that q head NaN, and so every score of that list; no other list sees it. A list without rows
    writes nothing. A list is not cut over launches: each launch shares out what its own rows are.

    Any executor that offers `score` takes float32 summaries; other types must be among its `dtypes`.
    """

    kernel: ClassVar[str] = "score"
    num_sequences: int
    num_kv_heads: int
    group: int
    head_dim: int
    summary: Literal["mean", "minmax"]
    reduce: Literal["max", "sum", "softmax"]
    runs: Int64
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    scale: float = 1.0


def summary_nbytes(args: Score) -> int:
    """Bytes of one row of summaries."""
    return args.head_dim * ITEMSIZE[args.dtype] * (2 if args.summary == "minmax" else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Topk:
    """The k best of each list: score descending, then index ascending.

    reads = (scores,): float32 (Σ lengths, group), the lists end to end, `lengths` int64 (n,) entries long: at q_len 1,
    what `Logits` writes for the rows of a KV head is such a list. `reduce` makes one score of each entry: the largest
    of its group, NaN if one of them is NaN, or their sum in float32, in ascending order. writes = (indices,): int64
    (n, k), index within the list, −1 where the list is shorter than k. NaN scores sort last.
    """

    kernel: ClassVar[str] = "topk"
    k: int
    lengths: Int64
    group: int = 1
    reduce: Literal["max", "sum"] = "max"


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Scattered rows → one dense run. reads = (rows,); writes = (dense,), the same number of bytes."""

    kernel: ClassVar[str] = "gather"


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """New K or V rows → the open blocks, converted to `dtype` (round to nearest even): float types of 16 or 32 bits.

    reads = (rows,): float32; writes = (targets,): the same number of elements in `dtype`.
    """

    kernel: ClassVar[str] = "append"
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Quantize:
    """float32 rows of `dim` elements → codes.

    axis "row" (values): reads = (rows,); writes = (targets,), each row its codes and then its scale, which is the
    largest magnitude of the row / CODE_RANGE, a division of float32, or 1 where that would be 0 or not finite (a NaN
    in a row is its largest magnitude).
    axis "channel" (keys): reads = (rows, scales), scales float32 (s, dim) > 0; writes = (targets,), codes only; row r
    uses scales[which[r]], `which` int64 (rows,).
    code = x / scale, a division of float32, then rounded to the nearest code, ties to even; magnitudes beyond the
    largest code become that code. NaN becomes code 0 in int8; in fp8_e4m3 it becomes NaN, and every code, NaN and
    zero among them, has the sign of x. A span holds a whole number of rows.
    """

    kernel: ClassVar[str] = "quantize"
    dtype: Codes
    dim: int
    axis: Literal["row", "channel"]
    which: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Dequantize:
    """Codes → float32 rows: the inverse of `Quantize`, operands likewise; x = code · scale, rounded once.

    axis "row": reads = (rows with their scales,); axis "channel": reads = (codes, scales). writes = (rows,): float32.
    """

    kernel: ClassVar[str] = "dequantize"
    dtype: Codes
    dim: int
    axis: Literal["row", "channel"]
    which: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """K rows → clusters: spherical k-means within segments.

    reads = (keys,), runs as for keys. The rows of each (sequence, kv_head) are cut into segments of `segment_tokens`
    rows, in their order; a last segment of less than half of that joins the one before. A segment of n rows has
    c = max(1, n // cluster_tokens) clusters; its centroids begin as rows floor(i · n / c), i < c. Each of `iterations`
    rounds assigns every row to the centroid with the largest q·c / |c| (dot product with the normalised centroid; the
    lowest index wins a tie; NaN never wins, and a row that nothing wins goes to the segment's first centroid), then
    makes each centroid the mean of its rows; one without rows stays.
    A last assignment follows. writes = (centroids, labels): centroids float32 (clusters, head_dim) in the order of
    segments, the means of the rows that the last assignment gives them, zeros for one without rows; labels int64
    (rows,), the centroid of each row, counted over the whole launch.
    """

    kernel: ClassVar[str] = "cluster"
    dtype: DType
    num_sequences: int
    num_kv_heads: int
    head_dim: int
    runs: Int64
    segment_tokens: int = 8192
    cluster_tokens: int = 16
    iterations: int = 10


def cut_into_segments(rows: int, segment_tokens: int) -> list[int]:
    """The rows of each segment of `rows` rows of one sequence and KV head, as `Cluster` cuts them."""
    full, rest = divmod(rows, segment_tokens)
    sizes = [segment_tokens] * full
    if rest and full and 2 * rest < segment_tokens:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes


def num_clusters(rows: int, segment_tokens: int = 8192, cluster_tokens: int = 16) -> int:
    """How many centroids `Cluster` makes of `rows` rows of one sequence and KV head; those of a launch are the sum."""
    full, rest = divmod(rows, segment_tokens)
    last = 0
    if rest and full and 2 * rest < segment_tokens:
        full, last = full - 1, segment_tokens + rest
    elif rest:
        last = rest
    return full * max(1, segment_tokens // cluster_tokens) + (max(1, last // cluster_tokens) if last else 0)


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


@dataclass(frozen=True, eq=False)
class Chase:
    """Dependent reads, to measure the latency of a memory.

    reads = (lines,): n ≥ 1 spans of LINE_NBYTES each; the first int64 of a line is the number, 0 … n − 1, of the next.
    Line 0 is read first, and n lines in all, each only when the one before has said which. writes = (last,): the int64
    that the last of them holds; 0 where the lines form one circle.
    """

    kernel: ClassVar[str] = "chase"


LINE_NBYTES = 64
"""A cache line: what one access moves."""

KernelArgs = (
    Attend | Logits | Combine | Merge | Score | Topk | Gather | Append | Quantize | Dequantize | Cluster | Dense | Chase
)
KERNELS: frozenset[str] = frozenset(
    {"attend", "logits", "combine", "merge", "score", "topk", "gather", "append", "quantize", "dequantize", "cluster"}
    | {"dense", "chase"}
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
        rows = read_nbytes[1] // value_nbytes(args.dtype, args.head_dim_v)
        return 2 * rows * args.group * args.q_len * args.head_dim_v
    if isinstance(args, Cluster):
        # Every round, and the last assignment, meets rows with the centroids of their segment; heads count as equal.
        rows = read_nbytes[0] // (args.head_dim * ITEMSIZE[args.dtype])
        heads = args.runs[:, :2]
        num_heads = 1 + int((heads[1:] != heads[:-1]).any(axis=1).sum())
        per_segment = max(1, min(args.segment_tokens, rows // num_heads) // args.cluster_tokens)
        return 2 * rows * per_segment * args.head_dim * (args.iterations + 1)
    if isinstance(args, Merge):
        return read_nbytes[0] // 4
    if isinstance(args, Score):
        return read_nbytes[1] // ITEMSIZE[args.dtype] * 2 * args.group
    if isinstance(args, Topk) and args.reduce == "sum":
        return read_nbytes[0] // (4 * args.group) * (args.group - 1)
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
    "quantize": 1,
    "dequantize": 1,
    "cluster": 1,
    "dense": -1,
    "chase": 1,
}


def reads_of(args: KernelArgs) -> int:
    """How many read operands the kernel takes; Dense takes any number (-1)."""
    more = (isinstance(args, Merge) and args.has_sinks) or (
        isinstance(args, (Quantize, Dequantize)) and args.axis == "channel"
    )
    return _READS[args.kernel] + more


def writes_of(args: KernelArgs) -> int:
    """How many write operands the kernel takes; Dense takes any number (-1)."""
    return -1 if isinstance(args, Dense) else 2 if isinstance(args, Cluster) else 1


def check(args: KernelArgs, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> str | None:
    """What is wrong with a launch, or None: `reads` and `writes` hold (number of spans, bytes) of each operand.

    Cheap enough for every submit: sizes and counts only, not the order of the runs.
    """
    wrong = _wrong_numbers(args)
    if wrong is not None:
        return wrong
    need = reads_of(args)
    if need >= 0 and len(reads) != need:
        return f"{args.kernel} takes {need} read operands, got {len(reads)}"
    if need >= 0 and len(writes) != writes_of(args):
        return f"{args.kernel} takes {writes_of(args)} write operands, got {len(writes)}"
    if isinstance(args, (Attend, Logits, Combine, Append, Cluster)) and args.dtype not in ITEMSIZE:
        return f"dtype {args.dtype!r} is not one of {', '.join(sorted(ITEMSIZE))}"
    if isinstance(args, Append) and args.dtype in CODE_RANGE:
        return f"append: {args.dtype} has scales; use quantize"
    if isinstance(args, (Quantize, Dequantize)):
        wrong = _wrong_codes(args)
        if wrong is not None:
            return wrong
    if isinstance(args, Score):
        wrong = wrong_score(args)
        if wrong is not None:
            return wrong
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
            expect.append(("value bytes", reads[2][1], rows * value_nbytes(args.dtype, args.head_dim_v)))
            expect.append(("state bytes", writes[0][1], state_nbytes(args)))
        else:
            expect.append(("logit bytes", writes[0][1], rows * args.q_len * args.group * 4))
    elif isinstance(args, Combine):
        rows = reads[0][1] // (args.q_len * args.group * 4)
        expect.append(("value spans", reads[1][0], len(args.runs)))
        expect.append(("value bytes", reads[1][1], rows * value_nbytes(args.dtype, args.head_dim_v)))
        expect.append(("state bytes", writes[0][1], state_nbytes(args)))
    elif isinstance(args, Merge):
        expect.append(("state bytes", reads[0][1], state_nbytes(args)))
        output = args.num_sequences * args.q_len * args.num_kv_heads * args.group * args.head_dim_v * 4
        expect.append(("output bytes", writes[0][1], output))
        if args.has_sinks:
            expect.append(("sink bytes", reads[1][1], args.num_kv_heads * args.group * 4))
    elif isinstance(args, Score):
        row = summary_nbytes(args)
        expect.append(("queries", reads[0][1], args.num_sequences * args.num_kv_heads * args.group * args.head_dim * 4))
        expect.append(("summary spans", reads[1][0], len(args.runs)))
        expect.append(("score bytes", writes[0][1], reads[1][1] // row * 4))
    elif isinstance(args, Topk):
        expect.append(("score bytes", reads[0][1], int(args.lengths.sum()) * args.group * 4))
        expect.append(("index bytes", writes[0][1], len(args.lengths) * args.k * 8))
    elif isinstance(args, Gather):
        expect.append(("dense bytes", writes[0][1], reads[0][1]))
    elif isinstance(args, Append):
        expect.append(("target bytes", writes[0][1], reads[0][1] // 4 * ITEMSIZE[args.dtype]))
    elif isinstance(args, (Quantize, Dequantize)):
        into = isinstance(args, Quantize)
        floats, codes = (reads[0][1], writes[0][1]) if into else (writes[0][1], reads[0][1])
        rows = floats // (4 * args.dim)
        expect.append(("float32 bytes", floats, rows * args.dim * 4))
        row = args.dim if args.axis == "channel" else value_nbytes(args.dtype, args.dim)
        expect.append(("code bytes", codes, rows * row))
        if args.axis == "channel":
            expect.append(("rows with a scale", len(args.which), rows))
            expect.append(("scale bytes", reads[1][1], reads[1][1] // (4 * args.dim) * 4 * args.dim))
    elif isinstance(args, Cluster):
        rows = reads[0][1] // (args.head_dim * ITEMSIZE[args.dtype])
        expect.append(("key spans", reads[0][0], len(args.runs)))
        expect.append(("key bytes", reads[0][1], rows * args.head_dim * ITEMSIZE[args.dtype]))
        expect.append(("centroid bytes", writes[0][1], writes[0][1] // (4 * args.head_dim) * 4 * args.head_dim))
        expect.append(("label bytes", writes[1][1], rows * 8))
    elif isinstance(args, Chase):
        expect.append(("line bytes", reads[0][1], max(reads[0][0], 1) * LINE_NBYTES))
        expect.append(("bytes of the last number", writes[0][1], 8))
    for what, got, want in expect:
        if got != want:
            return f"{args.kernel}: {what}: {got} given, {want} needed by the arguments"
    return None


def _wrong_codes(args: Quantize | Dequantize) -> str | None:
    if args.dtype not in CODE_RANGE:
        return f"{args.kernel}: dtype {args.dtype!r} is not one of {', '.join(sorted(CODE_RANGE))}"
    if args.axis not in ("row", "channel"):
        return f"{args.kernel}: axis {args.axis!r} is not one of row, channel"
    return None


def wrong_score(args: Score) -> str | None:
    """What is wrong with how a `Score` reads and reduces its summaries, or None."""
    if args.summary not in ("mean", "minmax") or args.reduce not in ("max", "sum", "softmax"):
        return f"score: summary {args.summary!r}, reduce {args.reduce!r}; allowed: mean, minmax and max, sum, softmax"
    allowed = ("float32",) if args.summary == "minmax" else ("float32", "float16", "bfloat16")
    if args.dtype not in allowed:
        return f"score: dtype {args.dtype!r} of {args.summary} summaries is not one of {', '.join(allowed)}"
    wrong = _no_float32("score", "scale", args.scale)
    if wrong is None and args.reduce != "softmax" and args.scale != 1:
        return f"score: scale is {args.scale} where reduce is {args.reduce!r}; allowed: 1, and any with 'softmax'"
    return wrong


def _no_float32(kernel: str, name: str, number: object) -> str | None:
    real = isinstance(number, (int, float, np.floating, np.integer)) and not isinstance(number, bool)
    if not real or not -_BEYOND_FLOAT32 < number < _BEYOND_FLOAT32:  # type: ignore[operator]  # a number by now
        return f"{kernel}: {name} is {number!r}; allowed: a finite float32 number"
    return None


_AT_LEAST_ONE = frozenset(
    {"num_kv_heads", "group", "q_len", "head_dim", "head_dim_v", "dim", "split_tokens"}
    | {"segment_tokens", "cluster_tokens"}
)
_AT_LEAST_ZERO = frozenset({"num_sequences", "window", "sink_tokens", "k", "iterations"})
_INTEGERS = frozenset({"runs", "roots", "q_positions", "lengths", "which"})
MOST = 1 << 48
"""Positions, window and split sizes lie below this, so that no product of them overflows."""
_KINDS: tuple[type[KernelArgs], ...] = get_args(KernelArgs)
_ARRAYS = {kind: [f.name for f in fields(kind) if f.name in _INTEGERS] for kind in _KINDS}
_NUMBERS = {
    kind: [(f.name, int(f.name in _AT_LEAST_ONE)) for f in fields(kind) if f.name in _AT_LEAST_ONE | _AT_LEAST_ZERO]
    for kind in _KINDS
}
"""What is checked of the arguments of each kernel at every submit: the fields, looked up once."""


def _wrong_numbers(args: KernelArgs) -> str | None:
    """A number of the arguments that is none, or outside its range; arrays that do not hold integers."""
    for name in _ARRAYS[type(args)]:
        value = getattr(args, name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            return f"{args.kernel}: {name} is no array of integers"
    for name, least in _NUMBERS[type(args)]:
        value = getattr(args, name)
        if not (type(value) is int or isinstance(value, np.integer)) or not least <= value < MOST:
            return f"{args.kernel}: {name} is {value!r}; allowed: a whole number from {least} to 2**48 − 1"
    if isinstance(args, Merge) and not isinstance(args.has_sinks, bool):
        return f"merge: has_sinks is {args.has_sinks!r}; allowed: True, False"
    if isinstance(args, Topk) and args.reduce not in ("max", "sum"):
        return f"topk: reduce is {args.reduce!r}; allowed: 'max', 'sum'"
    if isinstance(args, (Attend, Logits)):
        for name, number in (("scale", args.scale), ("softcap", args.softcap)):
            wrong = _no_float32(args.kernel, name, number)
            if wrong is not None:
                return wrong
        if args.softcap != 0 and not args.softcap > _NOTHING_IN_FLOAT32:
            return f"{args.kernel}: softcap is {args.softcap}; allowed: 0 (none), or a positive float32 number"
    return None


_BEYOND_FLOAT32 = 2.0**128 - 2.0**103
"""Halfway between the largest float32 and the next power of two: this and more rounds to infinity."""
_NOTHING_IN_FLOAT32 = 2.0**-150
"""Half the smallest float32: this and less rounds to 0."""


def state_nbytes(args: Attend | Combine | Merge) -> int:
    """Bytes of the states of all roots: float32 (r, q_len, group, 2 + head_dim_v)."""
    return len(args.roots) * args.q_len * args.group * (2 + args.head_dim_v) * 4
