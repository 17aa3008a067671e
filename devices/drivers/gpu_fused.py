"""attend by a fused kernel: one launch for all roots, whose outputs become states (the option `attention`).

A fused kernel returns the normalised output and its log-sum-exp, and (lse, 1, output) is a state of the same value as
(m, l, acc). It rounds to 16 bits what is float32 elsewhere: queries, weights and the output, to the type of the rows;
`Arithmetic.fused` says so. A launch fits if

- rows are float16 or bfloat16, with one head_dim for K and V that the kernel takes;
- it has no window, no soft-cap, and a scale above 0;
- every query of a sequence counts every row that is given of it: a step of decoding, or questions about what is stored.

Whatever does not fit is carried out as ever (gpu_attention.py).

The rows of a root are cut into *sequences* of the kernel, enough of them to fill a GPU where one root is long, and
merged as tiles are: the kernel takes a sequence by one block of threads for each KV head, and a sequence here is of one
KV head, with the queries of its group. Keys and values are used where they lie if their rows are in one piece, or, with
a kernel that takes sequences anywhere, in long stretches that lie in the same order for both; otherwise they are
gathered first, as much at once as there is room for.

`verified` has the kernel answer a case that is known before it is used. The base of the logarithm matters most: kernels
differ in it, nothing fails where it is wrong, and merged outputs are merely off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_attention import Returned, Work, by_head
from tierloop.devices.drivers.gpu_operands import Int64, Place, Upload
from tierloop.devices.drivers.gpu_runtime import Accelerator, FusedKernel, fault_of
from tierloop.devices.drivers.gpu_states import normalised
from tierloop.devices.errors import ProtocolError, Timeout, Unsupported
from tierloop.devices.kernels.contract import Attend
from tierloop.devices.kernels.plan import Rows, positions_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Rows that fused kernels take."""
SEQUENCES = 512
"""As many as fill the largest GPU some times over: roots are cut until there are so many, and not below `_FEWEST`."""
_FEWEST = 256
"""Rows of a sequence: fewer are not worth a block of threads."""
_LONG_STRETCH = 64
"""Rows that lie side by side, on average: fewer are gathered, because sequences would become too short."""
_GRID = 16
"""Bytes: what kernels load at once."""
_NBYTES = 2
_MOST_ROWS = 1 << 31
_MOST_SEQUENCES = 65_535
"""A launch on a GPU has no more blocks of threads in the direction in which kernels count sequences."""
Answer = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Output and log-sum-exp."""


@dataclass
class Fused:
    """A kernel that was verified. `anywhere`: its sequences of keys may have gaps between them, and any order."""

    kernel: FusedKernel
    anywhere: bool
    dtypes = frozenset(DTYPES)
    """Types of rows."""
    launches: int = 0
    """How many times it ran for commands."""

    def states(self, q: Tensor, k: Tensor, v: Tensor, first: Int64, lengths: Int64, scale: float) -> Tensor:
        """The states of sequences: float32 (n, queries, 2 + d). Within work."""
        output, lse = self.kernel.attend(q, k, v, first, lengths, scale)
        return normalised(output, lse.float() * math.log(self.kernel.base))


def attend(args: Attend, reads: list[Int64], writes: list[Int64], room: int, fused: Fused) -> Work | None:
    """queries × keys × values → states, or None where the launch does not fit. Raises ValueError."""
    if not _is_of_a_kind(args, fused.kernel):
        return None
    nbytes = args.head_dim * _NBYTES
    rows = Rows(args.runs, reads[1], nbytes, args.num_sequences, args.num_kv_heads, (reads[2], nbytes))
    if not rows.total or rows.total >= _MOST_ROWS or not _all_count(rows, positions_of(args)):
        return None
    lying = _where_they_lie(rows, reads[1], reads[2], nbytes, fused.anywhere)
    size = max(_FEWEST, 1 << (rows.total // SEQUENCES).bit_length())
    returned = Returned(args, rows, writes[0], size, lying.borders)
    queries, dtype, per_query = Place(reads[0]), DTYPES[args.dtype], 16 * args.head_dim * args.q_len * args.group
    per_sequence = per_query + (0 if lying.bases else 8 * nbytes * returned.tiles.size)
    per_sequence = max(per_sequence, room // _MOST_SEQUENCES + 1)

    def work(slab: Tensor, upload: Upload) -> None:
        q = by_head(args, queries.load(slab, upload)).to(dtype)
        low, lengths = returned.tiles.table[2], returned.tiles.table[3] - returned.tiles.table[2]
        sequence, kv_head = upload(returned.tiles.table[:2])
        states = []
        for a, b in returned.tiles.chunks(per_sequence, room):
            parts, first = lying.operands(slab, upload, low[a:b], lengths[a:b])
            k, v = (part.view(dtype).view(-1, args.head_dim) for part in parts)
            asked = q[sequence[a:b], kv_head[a:b]]
            states.append(fused.states(asked, k, v, first, lengths[a:b], args.scale))
            fused.launches += 1
        returned.store(slab, states, upload)

    return work


def verified(name: str, accelerator: Accelerator, kernel: str, wait: Callable[[Callable[[], bool]], bool]) -> Fused:
    """The accelerator's fused kernel of that name, once it has answered a known case in both types.

    `wait` lets time pass until something holds, False where it does not in time. Raises Unsupported, ProtocolError,
    Timeout.
    """
    try:
        found = accelerator.fused(kernel)
    except RuntimeError as error:
        if fault_of(error):
            raise
        raise Unsupported(name, "open", f"attention = {kernel!r}: {error}") from error
    stream = accelerator.stream()

    def answer(case: _Case, dtype: str) -> Answer:
        answers: list[Answer] = []
        failures: list[RuntimeError] = []

        def work() -> None:
            q, k, v = (torch.tensor(x, dtype=DTYPES[dtype], device=accelerator.device) for x in case.operands)
            try:
                output, lse = found.attend(q, k, v, case.first, case.lengths, case.scale)
                answers.append((output.double().cpu().numpy(), lse.double().cpu().numpy()))
            except RuntimeError as error:  # it may be refused by its arguments alone, and the GPU works on
                failures.append(error)

        accelerator.enqueue(stream, work)
        event = accelerator.record(stream)
        if not wait(lambda: accelerator.done(event)):
            raise Timeout(name, "open", f"attention = {kernel!r}: {found.name} has not answered six rows")
        if failures:
            raise failures[0]
        return answers[0]

    for dtype in DTYPES:
        case = _case(found.head_dims, gaps=False)
        try:
            wrong = case.wrong(*answer(case, dtype), found.base)
        except RuntimeError as error:
            if fault_of(error):
                raise
            raise Unsupported(
                name, "open", f"attention = {kernel!r}: {found.name} does not run in {dtype}: {error}"
            ) from error
        if wrong:
            raise ProtocolError(name, "open", f"attention = {kernel!r}: {found.name}, {dtype}: {wrong}")
    return Fused(found, found.anywhere and _takes_gaps(answer, found))


def _takes_gaps(answer: Callable[[_Case, str], Answer], of: FusedKernel) -> bool:
    """Whether sequences may lie anywhere: some builds have the argument and refuse it. Without, rows are gathered."""
    case = _case(of.head_dims, gaps=True)
    try:
        return not any(case.wrong(*answer(case, dtype), of.base) for dtype in DTYPES)
    except RuntimeError as error:
        if fault_of(error):
            raise
        return False


class _Case(NamedTuple):
    """Three sequences of 3, 1 and 2 rows and two queries each: small whole numbers, and the answer in float64."""

    operands: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
    first: Int64
    lengths: Int64
    scale: float
    output: NDArray[np.float64]
    lse: NDArray[np.float64]

    def wrong(self, output: NDArray[np.float64], lse: NDArray[np.float64], base: float) -> str:
        """What is wrong with an answer, or nothing. Weights and outputs have 8 bits at least, logits are exact."""
        if output.shape != self.output.shape or lse.shape != self.lse.shape:
            return f"it answers {output.shape} and {lse.shape} where {self.output.shape} and {self.lse.shape} are due"
        if not np.abs(output - self.output).max() <= 2.0**-5:
            return f"its output of a known case is off by {np.abs(output - self.output).max():.3g}"
        if np.abs(lse * math.log(base) - self.lse).max() <= 2.0**-8:
            return ""
        for other in (math.e, 2.0, 10.0):
            if np.abs(lse * math.log(other) - self.lse).max() <= 2.0**-8:
                return f"its log-sum-exp has base {other:.4g}, where base {base:.4g} was expected"
        return f"its log-sum-exp of a known case is off by {np.abs(lse * math.log(base) - self.lse).max():.3g}"


def _case(head_dims: frozenset[int], gaps: bool) -> _Case:
    dim = 64 if 64 in head_dims else min(head_dims)
    lengths = np.array([3, 1, 2])
    first = np.array([5, 0, 2]) if gaps else np.array([0, 3, 4])
    total, scale = int((first + lengths).max()), 0.5
    q, k, v = np.zeros((3, 2, dim)), np.zeros((total, dim)), np.zeros((total, dim))
    q[:, 0, 0], q[:, 1, 0] = 2, -4
    k[:, 0] = np.arange(total) % 3 - 0.5
    v[:] = (np.arange(total)[:, None] + np.arange(dim)) % 4 / 2 - 1
    output, lse = np.empty((3, 2, dim)), np.empty((3, 2))
    for i in range(3):
        mine = slice(first[i], first[i] + lengths[i])
        weights = np.exp(scale * (q[i] @ k[mine].T))
        lse[i] = np.log(weights.sum(axis=1))
        output[i] = weights @ v[mine] / weights.sum(axis=1)[:, None]
    return _Case((q, k, v), first, lengths, scale, output, lse)


def _is_of_a_kind(args: Attend, kernel: FusedKernel) -> bool:
    plain = not args.window and not args.softcap and args.scale > 0
    return plain and args.dtype in DTYPES and args.head_dim == args.head_dim_v and args.head_dim in kernel.head_dims


def _all_count(rows: Rows, q_positions: Int64) -> bool:
    """Whether no row lies behind a query of its sequence."""
    last = rows.runs[:, 2] + np.diff(rows.first_row) - 1
    return bool((last <= q_positions.min(axis=1)[rows.runs[:, 0]]).all())


class _Lying:
    """Where a kernel finds keys and values: in the slab from `bases` on, or, without these, in copies.

    `borders` are rows at which a new stretch begins, and `starts` their places, counted in rows from the bases.
    """

    def __init__(self, places: tuple[Place, Place], nbytes: int) -> None:
        self.borders = self.starts = np.zeros(1, dtype=np.int64)
        self.bases: tuple[int, int] | None = None
        self._places, self._nbytes, self._most = places, nbytes, 0

    def stay(self, borders: Int64, starts: Int64, most: int, bases: tuple[int, int]) -> None:
        """They are used where they lie; all places are below `most`."""
        self.borders, self.starts, self._most, self.bases = borders, starts, most, bases

    def operands(self, slab: Tensor, upload: Upload, low: Int64, lengths: Int64) -> tuple[list[Tensor], Int64]:
        """Keys and values as bytes, and at which of their rows the sequences begin that hold rows from `low` on."""
        if self.bases is None:
            nbytes, first, end = self._nbytes, int(low[0]), int(low[-1] + lengths[-1])
            parts = [place.part(first * nbytes, end * nbytes).load(slab, upload) for place in self._places]
            return [_aligned(part) for part in parts], low - first
        stretch = np.searchsorted(self.borders, low, side="right") - 1
        places = self.starts[stretch] + low - self.borders[stretch]
        first, end = int(places.min()) * self._nbytes, self._most * self._nbytes
        return [slab[base + first : base + end] for base in self.bases], places - places.min()


def _where_they_lie(rows: Rows, keys: Int64, values: Int64, nbytes: int, anywhere: bool) -> _Lying:
    lying = _Lying((Place(keys), Place(values)), nbytes)
    held = np.flatnonzero(keys[:, 1])
    (k, size), v = keys[held].T, values[held, 0]
    bases = int(k.min()), int(v.min())
    breaks = np.append(0, 1 + np.flatnonzero((k[1:] != k[:-1] + size[:-1]) | (v[1:] != v[:-1] + size[:-1])))
    starts, off = np.divmod(k - bases[0], nbytes)
    alike = not off.any() and bool((k - bases[0] == v - bases[1]).all()) and not any(base % _GRID for base in bases)
    most = int((starts + size // nbytes).max())
    long = len(breaks) == 1 or (anywhere and len(breaks) * _LONG_STRETCH <= rows.total)
    if alike and long and most < _MOST_ROWS:
        lying.stay(rows.first_row[held[breaks]], starts[breaks], most, bases)
    return lying


def _aligned(rows: Tensor) -> Tensor:
    return rows if rows.data_ptr() % _GRID == 0 else rows.clone()
