"""Planning a launch: check runs and roots against what was given, and cut the work into pieces.

Rows are numbered over all runs. The rows of a tree node are consecutive, so that a piece of work is a range of rows;
where more threads than roots want work, roots are halved at tree nodes, which leaves every bit as it is. Nothing that
arrives is trusted: a wrong run, span or root is a ValueError that names it, never a read outside.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, INTS, PAIR, TABLE, TRIPLE, kernel
from tierloop.devices.kernels.contract import MOST, Attend, Logits

Int64 = NDArray[np.int64]

_MUTABLE = types.Array(types.int64, 1, "C")
_MUTABLE_TABLE = types.Array(types.int64, 2, "C")

ROOT, SEQUENCE, KV_HEAD, LOW, HIGH, SPLIT, SLOT = range(7)
"""Columns of a piece: its root, whose rows [LOW, HIGH) it takes, its first split, and where its states go: the root's
place in the output, or −1 − i for the i-th partial result."""

_FAULTS = (
    "",
    "the span of run {0} is no whole number of rows",
    "run {0} has different numbers of rows in its two operands",
    "run {0} names a sequence or KV head that does not exist",
    "run {0} has positions outside 0 … 2**48 − 1",
    "run {0} is out of order or overlaps the one before",
    "root {0} is no tree node of a sequence and KV head",
    "the roots leave out rows, from row {0} on",
    "root {0} covers rows that another root covers too",
)


@kernel(INT64, INTS, INT64, INT64)
def how_many_up_to(sorted_numbers: Int64, n: int, x: int) -> int:
    """How many of the first n numbers, ascending, are at most x."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if sorted_numbers[middle] <= x:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(PAIR, TABLE, TABLE, INT64, TABLE, INT64, INT64, INT64, _MUTABLE)
def _number_rows(
    runs: Int64,
    spans: Int64,
    row_nbytes: int,
    more_spans: Int64,
    more_nbytes: int,
    num_sequences: int,
    num_kv_heads: int,
    first_row: Int64,
) -> tuple[int, int]:
    first_row[0] = 0
    for i in range(runs.shape[0]):
        rows = 1
        if spans[i, 1] != row_nbytes:  # a division takes longer than everything else here
            rows = spans[i, 1] // row_nbytes
            if rows * row_nbytes != spans[i, 1]:
                return 1, i
        if more_nbytes and rows * more_nbytes != more_spans[i, 1]:
            return 2, i
        if not (0 <= runs[i, 0] < num_sequences and 0 <= runs[i, 1] < num_kv_heads):
            return 3, i
        if not (0 <= runs[i, 2] < MOST and rows < MOST):
            return 4, i
        if i and (
            runs[i - 1, 0] > runs[i, 0]
            or (runs[i - 1, 0] == runs[i, 0] and runs[i - 1, 1] > runs[i, 1])
            or (
                runs[i - 1, 0] == runs[i, 0]
                and runs[i - 1, 1] == runs[i, 1]
                and runs[i - 1, 2] + (first_row[i] - first_row[i - 1]) > runs[i, 2]
            )
        ):
            return 5, i
        first_row[i + 1] = first_row[i] + rows
    return 0, 0


@kernel(INT64, TABLE, INTS, INT64, INT64, INT64)
def _rows_before(runs: Int64, first_row: Int64, sequence: int, kv_head: int, position: int) -> int:
    """The number of rows that sort before (sequence, kv_head, position)."""
    low, high = 0, runs.shape[0]
    while low < high:
        middle = (low + high) // 2
        if runs[middle, 0] != sequence:
            before = runs[middle, 0] < sequence
        elif runs[middle, 1] != kv_head:
            before = runs[middle, 1] < kv_head
        else:
            before = runs[middle, 2] < position
        if before:
            low = middle + 1
        else:
            high = middle
    before_all: int = first_row[low]
    if low and runs[low - 1, 0] == sequence and runs[low - 1, 1] == kv_head:
        before_all = min(before_all, first_row[low - 1] + position - runs[low - 1, 2])
    return before_all


@kernel(TRIPLE, TABLE, INTS, TABLE, INTS, INT64, INT64, INT64, INT64, _MUTABLE_TABLE)
def _cut(
    runs: Int64,
    first_row: Int64,
    roots: Int64,
    order: Int64,
    num_sequences: int,
    num_kv_heads: int,
    split_tokens: int,
    most_rows: int,
    pieces: Int64,
) -> tuple[int, int, int]:
    """Fill `pieces`, root by root in `order`; returns (0, number of pieces, partial results) or (fault, where, 0)."""
    count, partials, covered = 0, 0, 0
    last_split = MOST // split_tokens + 1
    pending = np.empty((64, 2), np.int64)
    for turn in range(order.shape[0]):
        root = order[turn]
        sequence, kv_head, level, index = roots[root, 0], roots[root, 1], roots[root, 2], roots[root, 3]
        if not (
            0 <= sequence < num_sequences
            and 0 <= kv_head < num_kv_heads
            and 0 <= level < 63
            and 0 <= index < (1 << (62 - level))
        ):
            return 6, root, 0
        begin = count
        pending[0, 0], pending[0, 1] = level, index
        depth = 1
        while depth:
            depth -= 1
            level, index = pending[depth, 0], pending[depth, 1]
            start = min(index << level, last_split)
            low = _rows_before(runs, first_row, sequence, kv_head, start * split_tokens)
            end = min((index + 1) << level, last_split)
            high = _rows_before(runs, first_row, sequence, kv_head, end * split_tokens)
            if high - low > most_rows and level and count + depth + order.shape[0] - turn + 2 < pieces.shape[0]:
                pending[depth, 0], pending[depth, 1] = level - 1, 2 * index + 1
                pending[depth + 1, 0], pending[depth + 1, 1] = level - 1, 2 * index
                depth += 2
                continue
            if high == low and (depth or count > begin):
                continue
            if high > low:
                if low < covered:
                    return 8, root, 0
                if low > covered:
                    return 7, covered, 0
                covered = high
            piece = pieces[count]
            piece[ROOT], piece[SEQUENCE], piece[KV_HEAD] = root, sequence, kv_head
            piece[LOW], piece[HIGH], piece[SPLIT], piece[SLOT] = low, high, start, root
            count += 1
        if count - begin > 1:
            for i in range(begin, count):
                partials += 1
                pieces[i, SLOT] = -partials
    if covered != first_row[-1]:
        return 7, covered, 0
    return 0, count, partials


class Rows:
    """The rows of a launch: int64 runs (n, 3), and `first_row` (n + 1,), the number of rows before each run.

    `spans` (n, 2) are those of the operand that holds the rows, each of `row_nbytes`; `more` is a second operand with
    the same runs, as (spans, row nbytes). Raises ValueError.
    """

    __slots__ = ("first_row", "num_kv_heads", "num_sequences", "runs", "total")

    def __init__(
        self,
        runs: Int64,
        spans: Int64,
        row_nbytes: int,
        num_sequences: int = MOST,
        num_kv_heads: int = MOST,
        more: tuple[Int64, int] | None = None,
    ) -> None:
        if runs.ndim != 2 or runs.shape[1] != 3 or len(runs) != len(spans):
            raise ValueError(f"runs need shape ({len(spans)}, 3), one for each span; got {runs.shape}")
        if row_nbytes <= 0:
            raise ValueError("rows need at least one element")
        self.runs = np.ascontiguousarray(runs, dtype=np.int64)
        self.first_row = np.empty(len(runs) + 1, dtype=np.int64)
        self.num_sequences, self.num_kv_heads = num_sequences, num_kv_heads
        more_spans, more_nbytes = more or (spans, 0)
        fault, where = _number_rows(
            self.runs, spans, row_nbytes, more_spans, more_nbytes, num_sequences, num_kv_heads, self.first_row
        )
        if fault:
            raise ValueError(_FAULTS[fault].format(where))
        self.total = int(self.first_row[-1])

    def pieces(self, roots: Int64, split_tokens: int, threads: int) -> tuple[Int64, int]:
        """The work of a launch that returns `roots` (r, 4), cut into enough pieces: int64 (n, 7); and how many of them
        are partial results. Raises ValueError."""
        if not 0 < split_tokens < MOST:
            raise ValueError(f"split_tokens is {split_tokens}; allowed: 1 … 2**48 − 1")
        if roots.ndim != 2 or roots.shape[1] != 4:
            raise ValueError(f"roots need shape (r, 4), got {roots.shape}")
        roots = np.ascontiguousarray(roots, dtype=np.int64)
        most_rows = MOST if threads == 1 else max(_FEWEST_ROWS, self.total // (_PIECES_PER_THREAD * threads))
        pieces = np.empty((len(roots) + (0 if threads == 1 else 64 * threads), 7), dtype=np.int64)
        order = np.arange(len(roots))
        for _ in range(2):
            fault, where, partials = _cut(
                self.runs,
                self.first_row,
                roots,
                order,
                self.num_sequences,
                self.num_kv_heads,
                split_tokens,
                most_rows,
                pieces,
            )
            if not fault:
                return pieces[:where], partials
            # The roots may come in any order; their rows may not.
            order = np.lexsort((roots[:, 3] << np.clip(roots[:, 2], 0, 62), roots[:, 1], roots[:, 0]))
        raise ValueError(_FAULTS[fault].format(where))


def check_sizes(**sizes: int) -> None:
    """Raises ValueError unless every size is at least 1 (the product of two negative ones would pass for a size)."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; allowed: at least 1")


def positions_of(args: Attend | Logits) -> Int64:
    """The launch's query positions, int64 (num_sequences, q_len). Raises ValueError for another shape."""
    if args.q_positions.shape != (args.num_sequences, args.q_len):
        raise ValueError(f"q_positions need shape {(args.num_sequences, args.q_len)}, got {args.q_positions.shape}")
    return np.ascontiguousarray(args.q_positions, dtype=np.int64)


_PIECES_PER_THREAD = 16
"""Enough that a thread which gets the processor late leaves little to wait for."""
_FEWEST_ROWS = 512
"""Fewer rows are not worth a piece of their own."""
