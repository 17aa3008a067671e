"""Launches: what kernels and flushes do on a stream, step by step; programs as in gpu_transfers.py.

A kernel is one piece of work behind which the host has nothing to do, so that a chain of kernels needs no host. Four
cases need it: operands in host memory (copied into the slab for as long as it takes, and back), `dense`, whose function
is the host's, `chase`, whose lines may lead outside, and a launch that does not fit, which is never enqueued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.commands import Launch, Operand, Read, Write
from tierloop.devices.drivers.gpu_fused import Fused
from tierloop.devices.drivers.gpu_kernels import prepared
from tierloop.devices.drivers.gpu_operands import Int64, Place, spans_of
from tierloop.devices.drivers.gpu_runtime import Accelerator, Event, Stream
from tierloop.devices.drivers.gpu_staging import Scratch, Staging
from tierloop.devices.drivers.gpu_transfers import Last, Program, Transfers, bytes_from, bytes_to
from tierloop.devices.kernels.contract import LINE_NBYTES, Chase, Dense
from tierloop.devices.regions import Region, Segment


class Launches:
    """Makes the programs of one GPU that compute. `room` is what one kernel may need besides its operands, in bytes;
    `fused` is the kernel that `attend` uses where it fits."""

    def __init__(
        self,
        accelerator: Accelerator,
        slab: Tensor,
        offset_of: Mapping[Region, int],
        staging: Staging,
        scratch: Scratch,
        transfers: Transfers,
        room: int,
        fused: Fused | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._slab = slab
        self._offset_of = offset_of
        self._staging = staging
        self._scratch = scratch
        self._transfers = transfers
        self._room = room
        self._fused = fused

    def launch(self, stream: Stream, command: Launch) -> Program:
        """A kernel."""
        if isinstance(command.args, Dense):
            yield from self._dense(stream, command, command.args)
        elif isinstance(command.args, Chase):
            yield from self._chase(stream, command)
        elif all(self._is_near(operand) for operand in command.reads + command.writes):
            self._run(stream, command, *([spans_of(o, self._offset_of) for o in os] for os in _operands(command)))
            yield Last(self._accelerator.record(stream))
        else:
            yield from self._with_copies(stream, command)

    def flush(self, stream: Stream) -> Program:
        """Streams are in order, and so are their writes: nothing to do but to come after them."""
        yield Last(self._accelerator.record(stream))

    def _is_near(self, operand: Operand) -> bool:
        return all(region in self._offset_of for region, _ in operand)

    def _run(self, stream: Stream, command: Launch, reads: list[Int64], writes: list[Int64]) -> None:
        work = prepared(command, reads, writes, self._room, self._fused)
        self._accelerator.enqueue(stream, lambda: work(self._slab, self._accelerator.upload))

    def _with_copies(self, stream: Stream, command: Launch) -> Program:
        """A kernel with operands on the host: those that it reads come first, those that it writes go back."""
        taken: list[tuple[int, int]] = []
        returned: list[tuple[Segment, Place]] = []
        try:
            reads, writes = [], []
            for operand in command.reads:
                spans, far = self._nearby(operand, taken)
                reads.append(spans)
                for segment, place in far:
                    yield from _without_last(self._transfers.send(stream, place, bytes_from(segment)))
            for operand in command.writes:
                spans, far = self._nearby(operand, taken)
                writes.append(spans)
                returned += far
            self._run(stream, command, reads, writes)
            for segment, place in returned:
                yield from self._transfers.fetch(stream, place, bytes_to(segment))
        except Exception:
            self._give_back(stream, taken)
            raise
        yield self._give_back(stream, taken)

    def _give_back(self, stream: Stream, taken: list[tuple[int, int]]) -> Event:
        """What was borrowed is free when everything that was enqueued is done."""
        event = self._accelerator.record(stream)
        for offset, nbytes in taken:
            self._scratch.give(offset, nbytes, event)
        return event

    def _nearby(self, operand: Operand, taken: list[tuple[int, int]]) -> tuple[Int64, list[tuple[Segment, Place]]]:
        """The operand's spans in the slab, with room for what lies on the host; and the places of that."""
        tables: list[Int64] = [np.empty((0, 2), dtype=np.int64)]
        far = []
        for segment in operand:
            if segment.region in self._offset_of:
                tables.append(spans_of((segment,), self._offset_of))
                continue
            nbytes, sizes = segment.spans.nbytes, segment.spans.array[:, 1]
            offset = self._scratch.take(nbytes)
            taken.append((offset, nbytes))
            table = np.stack([offset + np.cumsum(sizes) - sizes, sizes], axis=1)
            tables.append(table)
            far.append((segment, Place(table)))
        return np.concatenate(tables), far

    def _dense(self, stream: Stream, command: Launch, args: Dense) -> Program:
        """The function is the host's: operands come to it, and what it wrote goes back."""
        if args.function is None:
            yield from self.flush(stream)
            return
        reads = [np.empty(_nbytes(operand), dtype=np.uint8) for operand in command.reads]
        for segment, bytes_ in _segments(command.reads, reads):
            yield from self._transfers.read(stream, Read(segment, bytes_))
        writes = [np.zeros(_nbytes(operand), dtype=np.uint8) for operand in command.writes]
        args.function(reads, writes)
        for segment, bytes_ in _segments(command.writes, writes):
            yield from _without_last(self._transfers.write(stream, Write(segment, bytes_)))
        yield self._accelerator.record(stream)

    def _chase(self, stream: Stream, command: Launch) -> Program:
        spans = spans_of(command.reads[0], self._offset_of)
        wrong = spans[:, 1] != LINE_NBYTES
        if wrong.any():
            raise ValueError(f"span {int(wrong.argmax())} is no line of {LINE_NBYTES} bytes")
        lines, scattered = np.ascontiguousarray(spans[:, 0]), None
        if (lines % 8).any():  # numbers off their own grid are read from a copy of all lines
            lines, scattered = np.arange(len(spans)) * LINE_NBYTES, Place(spans)
        target = Place(spans_of(command.writes[0], self._offset_of))
        verdict = self._staging.take()
        while verdict is None:
            yield None
            verdict = self._staging.take()
        pair = verdict[:16]

        def work() -> None:
            accelerator = self._accelerator
            result = torch.zeros(2, dtype=torch.int64, device=self._slab.device)
            held = self._slab if scattered is None else scattered.load(self._slab, accelerator.upload)
            accelerator.chase(held.view(torch.int64), accelerator.upload(lines // 8), result)
            target.store(self._slab, result[:1], accelerator.upload)
            pair.copy_(result.view(torch.uint8), non_blocking=True)

        try:
            self._accelerator.enqueue(stream, work)
            yield self._accelerator.record(stream)
            last, fault = pair.view(torch.int64).tolist()
        except Exception:
            self._staging.give(verdict, self._accelerator.record(stream))
            raise
        self._staging.give(verdict)
        if fault:
            raise ValueError(f"a line names line {last}, of {len(spans)}")


def _without_last(program: Program) -> Program:
    """A part of a program, whose end the stream orders already."""
    for step in program:
        if not isinstance(step, Last):
            yield step


def _operands(command: Launch) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    return command.reads, command.writes


def _nbytes(operand: Operand) -> int:
    return sum([spans.nbytes for _, spans in operand])


def _segments(
    operands: tuple[Operand, ...], arrays: list[NDArray[np.uint8]]
) -> Iterator[tuple[Segment, NDArray[np.uint8]]]:
    """Every segment of the operands, with its bytes of the operand's array."""
    for operand, array in zip(operands, arrays, strict=True):
        low = 0
        for segment in operand:
            yield segment, array[low : low + segment.spans.nbytes]
            low += segment.spans.nbytes
