"""The job dispatcher of a near-memory processor: launches become jobs, and engines with private SRAM take them.

An `attend` is cut into jobs by sequence, KV head and subtree of the merge tree: a root with more than its share of rows
is halved at tree nodes. A job loads the queries of its sequence and head into its engine's SRAM, attends over its rows
where they lie, and leaves the state of its node in the SRAM, from where the aggregator takes it. Any other kernel is
one job. Jobs are dealt to engines in turn; engines work independently, and in which order they finish does not matter
to any bit (`order` shuffles it).

Nothing here is timed. `advance` lets engines work until none has anything to do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch, Operand, Write
from tierloop.devices.drivers.pnm_arguments import sram_nbytes
from tierloop.devices.drivers.pnm_wire import Status
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import ITEMSIZE, LINE_NBYTES, MOST, Attend, Chase, value_nbytes
from tierloop.devices.kernels.copying import copy_bytes
from tierloop.devices.kernels.launching import run
from tierloop.devices.kernels.plan import HIGH, LOW, ROOT, Rows, check_sizes, positions_of
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.states import Node
from tierloop.firmware_models.pnm_aggregator import Aggregator
from tierloop.firmware_models.pnm_memory import Refused

Int64 = NDArray[np.int64]
JOBS_PER_ENGINE = 4
"""How many jobs a launch is cut into for each engine, where it has so many subtrees: the last to finish is then late by
a quarter of its share at most."""


class Engine:
    """A core beside the memory: an SRAM, and the jobs that it was dealt."""

    def __init__(self, nbytes: int) -> None:
        self.sram = Region("pnm", "sram", 0, nbytes, view=np.zeros(nbytes, dtype=np.uint8))
        self.jobs: deque[Job] = deque()
        self.jobs_done = 0


class Part(NamedTuple):
    """Rows [low, high) of a launch, which are all that the tree's `node` has below its root number `root`."""

    root: int
    node: Node
    low: int
    high: int


@dataclass(eq=False)
class Operation:
    """A launch that the device has taken: `ended` is called once, with floating-point operations or what went wrong."""

    launch: Launch
    ended: Callable[[int, Refused | None], None]
    aggregator: Aggregator | None = None
    waiting: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Job:
    """A piece of an operation for one engine; `work` returns nothing, and raises Refused or ValueError."""

    operation: Operation
    work: Callable[[Engine], None] = field(repr=False)


class Dispatcher:
    """Engines and what they still have to do."""

    def __init__(self, engines: int, nbytes: int) -> None:
        self.engines = [Engine(nbytes) for _ in range(engines)]
        self.order: random.Random | None = None
        self.stalled = False
        self._next = 0
        self._open: list[Operation] = []

    def begin(self, launch: Launch, ended: Callable[[int, Refused | None], None]) -> None:
        """Cut a launch into jobs and deal them out. Raises Refused for a launch that cannot be."""
        needed, room = sram_nbytes(launch.args), self.engines[0].sram.nbytes
        if needed > room:
            raise Refused(Status.TOO_LARGE, f"a job takes {needed} bytes; the SRAM of an engine has {room}")
        operation = Operation(launch, ended)
        works = self._attend(operation) if isinstance(launch.args, Attend) else [_whole(launch)]
        operation.waiting = len(works)
        self._open.append(operation)
        for work in works:
            self.engines[self._next].jobs.append(Job(operation, work))
            self._next = (self._next + 1) % len(self.engines)
        if not works:
            self._end(operation, None)

    def advance(self) -> None:
        """Let the engines work until none has a job, unless they are stalled."""
        while not self.stalled and (busy := [engine for engine in self.engines if engine.jobs]):
            engine = self.order.choice(busy) if self.order else busy[0]
            if self.order:
                engine.jobs.rotate(self.order.randrange(len(engine.jobs)))
            self._work(engine, engine.jobs.popleft())

    def drop(self) -> None:
        """Forget everything that is under way."""
        for operation in self._open:
            operation.dropped = True
        self._open.clear()
        for engine in self.engines:
            engine.jobs.clear()

    def _work(self, engine: Engine, job: Job) -> None:
        operation = job.operation
        if operation.dropped:
            return
        wrong: Refused | None = None
        try:
            job.work(engine)
        except Refused as refused:
            wrong = refused
        except (ValueError, OverflowError) as error:  # what kernels find wrong in a launch
            wrong = Refused(Status.OUT_OF_RANGE, str(error))
        except Exception as error:
            wrong = Refused(Status.FAILED, f"{type(error).__name__}: {error}")
        engine.jobs_done += 1
        operation.waiting -= 1
        if wrong is not None or not operation.waiting:
            self._end(operation, wrong)

    def _end(self, operation: Operation, wrong: Refused | None) -> None:
        operation.dropped = True
        self._open.remove(operation)
        launch = operation.launch
        if wrong is None and operation.aggregator is not None:
            _store(launch.writes[0], operation.aggregator.results().reshape(-1).view(np.uint8))
        sizes = [sum([segment.spans.nbytes for segment in operand]) for operand in launch.reads]
        operation.ended(0 if wrong else contract.flops(launch.args, sizes), wrong)

    def _attend(self, operation: Operation) -> list[Callable[[Engine], None]]:
        """The jobs of an `attend`. Raises Refused."""
        launch = operation.launch
        args = launch.args
        assert isinstance(args, Attend)
        try:
            check_sizes(group=args.group, q_len=args.q_len, head_dim=args.head_dim, head_dim_v=args.head_dim_v)
            held = _Held(args, launch)
            parts = held.parts(JOBS_PER_ENGINE * len(self.engines))
        except (ValueError, OverflowError) as error:
            raise Refused(Status.OUT_OF_RANGE, str(error)) from error
        roots = [(level, index) for level, index in args.roots[:, 2:].tolist()]
        leaves = [(part.root, part.node) for part in parts]
        operation.aggregator = Aggregator(roots, leaves, args.q_len * args.group, args.head_dim_v)
        return [_attend_part(operation.aggregator, held, part) for part in parts]


class _Held:
    """What the jobs of an `attend` share: its rows, and addresses of keys, values and queries as spans of regions."""

    def __init__(self, args: Attend, launch: Launch) -> None:
        self.args, self.launch = args, launch
        self.key_nbytes = args.head_dim * ITEMSIZE[args.dtype]
        self.value_nbytes = value_nbytes(args.dtype, args.head_dim_v)
        self.keys, self.values = _table(launch.reads[1]), _table(launch.reads[2])
        self.positions = positions_of(args)
        self.rows = Rows(
            args.runs, self.keys[1], self.key_nbytes, args.num_sequences, args.num_kv_heads,
            (self.values[1], self.value_nbytes),
        )  # fmt: skip

    def parts(self, wanted: int) -> list[Part]:
        """The rows of every root, cut at tree nodes into about so many parts. Raises ValueError."""
        args, share = self.args, max(1, self.rows.total // wanted)
        pieces, _ = self.rows.pieces(args.roots, args.split_tokens, 1)
        parts: list[Part] = []
        for piece in pieces.tolist():
            root, low, high = piece[ROOT], piece[LOW], piece[HIGH]
            level, index = args.roots[root, 2:].tolist()
            pending = [Part(root, (level, index), low, high)] if high > low else []
            while pending:
                part = pending.pop()
                level, index = part.node
                if part.high - part.low <= share or not level:
                    parts.append(part)
                    continue
                border = min(((2 * index + 1) << (level - 1)) * args.split_tokens, MOST)
                middle = self._rows_before(part.low, part.high, border)
                halves = (
                    Part(root, (level - 1, 2 * index + 1), middle, part.high),
                    Part(root, (level - 1, 2 * index), part.low, middle),
                )
                pending += [half for half in halves if half.high > half.low]
        return parts

    def _rows_before(self, low: int, high: int, position: int) -> int:
        """The first of the rows [low, high), which are of one sequence and head, at a position or behind it."""
        first, last = self._runs(low, high)
        starts, first_row = self.rows.runs[first:last, 2], self.rows.first_row
        behind = first + int(np.searchsorted(starts, position))
        row = int(first_row[behind])
        if behind > first:
            row = min(row, int(first_row[behind - 1]) + position - int(starts[behind - 1 - first]))
        return min(max(row, low), high)

    def _runs(self, low: int, high: int) -> tuple[int, int]:
        """The runs that hold the rows [low, high): from the first up to, not including, the second."""
        first_row = self.rows.first_row
        first = int(np.searchsorted(first_row, low, side="right")) - 1
        return first, int(np.searchsorted(first_row, high, side="left"))

    def cut(self, part: Part) -> tuple[Int64, Operand, Operand]:
        """Runs, keys and values of a part, as of sequence 0 and KV head 0."""
        first, last = self._runs(part.low, part.high)
        first_row = self.rows.first_row[first : last + 1]
        starts, ends = np.maximum(first_row[:-1], part.low), np.minimum(first_row[1:], part.high)
        skipped, counts = starts - first_row[:-1], ends - starts
        runs = np.zeros((last - first, 3), dtype=np.int64)
        runs[:, 2] = self.rows.runs[first:last, 2] + skipped
        return (
            runs,
            _cut(self.keys, first, last, skipped, counts, self.key_nbytes),
            _cut(self.values, first, last, skipped, counts, self.value_nbytes),
        )

    def load_queries(self, sequence: int, kv_head: int, sram: Region) -> Segment:
        """Copy the queries of a sequence and head, float32 (q_len, group, head_dim), to the start of the SRAM."""
        args = self.args
        each = 4 * args.group * args.head_dim
        firsts = (sequence * args.q_len + np.arange(args.q_len)) * args.num_kv_heads + kv_head
        whole = np.concatenate([_load(self.launch.reads[0], int(first) * each, each) for first in firsts.tolist()])
        target = sram.at(0, whole.nbytes)
        copy_bytes(Write(target, whole), _view)
        return target


def _attend_part(aggregator: Aggregator, held: _Held, part: Part) -> Callable[[Engine], None]:
    def work(engine: Engine) -> None:
        args = held.args
        sequence, kv_head = args.roots[part.root, :2].tolist()
        runs, keys, values = held.cut(part)
        queries = held.load_queries(sequence, kv_head, engine.sram)
        nbytes = 4 * args.q_len * args.group * (2 + args.head_dim_v)
        state = engine.sram.at(queries.spans.end, nbytes)
        small = replace(
            args, num_sequences=1, num_kv_heads=1, runs=runs, q_positions=held.positions[sequence : sequence + 1],
            roots=np.array([[0, 0, *part.node]], dtype=np.int64),
        )  # fmt: skip
        run(Launch(small, ((queries,), keys, values), ((state,),)), _view)
        left = _view(engine.sram)[queries.spans.end : state.spans.end]
        aggregator.arrived(part.root, part.node, left.view(np.float32).reshape(-1, 2 + args.head_dim_v).copy())

    return work


def _whole(launch: Launch) -> Callable[[Engine], None]:
    """The only job of a launch that is not cut."""

    def work(engine: Engine) -> None:
        if isinstance(launch.args, Chase):
            for _, spans in launch.reads[0]:
                if (spans.array[:, 1] != LINE_NBYTES).any():
                    raise Refused(Status.OUT_OF_RANGE, f"chase: every span has {LINE_NBYTES} bytes")
        run(launch, _view)

    return work


def _table(operand: Operand) -> tuple[list[Region], Int64, Int64]:
    """The regions of an operand, its spans (n, 2) end to end, and the region of each span (n,)."""
    regions = [region for region, _ in operand]
    tables = [spans.array for _, spans in operand] or [np.empty((0, 2), dtype=np.int64)]
    which = np.repeat(np.arange(len(regions)), np.array([len(spans) for _, spans in operand], dtype=np.int64))
    return regions, np.concatenate(tables), which


def _cut(
    table: tuple[list[Region], Int64, Int64], first: int, last: int, skipped: Int64, counts: Int64, nbytes: int
) -> Operand:
    """Spans [first, last) of an operand without the rows before and behind, region by region."""
    regions, spans, which = table
    rows = np.stack([spans[first:last, 0] + skipped * nbytes, counts * nbytes], axis=1)
    mine = which[first:last]
    borders = np.flatnonzero(np.diff(mine)) + 1
    return tuple(
        Segment(regions[int(mine[start])], Spans(rows[start:end]))
        for start, end in zip([0, *borders.tolist()], [*borders.tolist(), len(mine)], strict=True)
    )


def _load(operand: Operand, start: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes [start, start + nbytes) of an operand, end to end over all its spans."""
    pieces = []
    for region, spans in operand:
        for offset, size in spans.array.tolist():
            low, high = max(start, 0), min(start + nbytes, size)
            if high > low:
                pieces.append(_view(region)[offset + low : offset + high])
            start -= size
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


def _store(operand: Operand, data: NDArray[np.uint8]) -> None:
    at = 0
    for segment in operand:
        copy_bytes(Write(segment, data[at : at + segment.spans.nbytes]), _view)
        at += segment.spans.nbytes


def _view(region: Region) -> NDArray[np.uint8]:
    assert region.view is not None, "regions of the model show their bytes"
    return region.view
