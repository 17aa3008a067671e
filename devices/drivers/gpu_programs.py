"""Programs: what a command does on a stream, step by step. A program is a generator that never blocks.

It enqueues work and yields what it waits for: an event (go on when that is done), None (go on at the next chance: no
buffer was free), or a `Last` event, behind which the host has nothing left to do. What comes after a command that is at
its last event may be enqueued at once, because streams order it; so whatever the host does at the end of a command (a
read puts bytes into its buffer) comes before the end of the generator, and not behind a `Last`.

Bytes between host and GPU go through page-locked buffers, a chunk per buffer: while the engine moves one, the host
fills or empties another. Copies of large pieces go straight from or to host memory that is registered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.commands import Copy, Launch, Operand, Read, Write
from tierloop.devices.drivers.gpu_kernels import prepared
from tierloop.devices.drivers.gpu_operands import Int64, Place, spans_of
from tierloop.devices.drivers.gpu_runtime import Accelerator, Event, Stream
from tierloop.devices.drivers.gpu_staging import Registered, Scratch, Staging
from tierloop.devices.kernels import copy_bytes
from tierloop.devices.kernels.contract import LINE_NBYTES, Chase, Dense
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

DIRECT_NBYTES = 64 << 10
"""Registered memory is copied piece by piece from so many bytes per piece on; smaller ones are collected first."""
_CHUNK_NBYTES = 64 << 20
"""What a copy within the GPU collects at once, where it is scattered."""


class Last(NamedTuple):
    """The last thing that a command waits for."""

    event: Event


Program = Generator[Event | Last | None, None, None]


class Peer(NamedTuple):
    """Another GPU whose memory is reached: its slab, where its regions lie, and the stream that copies use there."""

    slab: Tensor
    offset_of: Mapping[Region, int]
    stream: Stream


class Programs:
    """Makes the programs of one GPU. `peers` is asked by the name of a memory."""

    def __init__(
        self,
        accelerator: Accelerator,
        slab: Tensor,
        offset_of: Mapping[Region, int],
        staging: Staging,
        scratch: Scratch,
        registered: Registered,
        peers: Callable[[str], Peer | None],
    ) -> None:
        self._accelerator = accelerator
        self._slab = slab
        self._offset_of = offset_of
        self._staging = staging
        self._scratch = scratch
        self._registered = registered
        self._peers = peers

    def write(self, stream: Stream, command: Write) -> Program:
        """Host buffer → region; bytes that stay on the host are the host's to move."""
        data = command.data
        if command.target.region not in self._offset_of:
            copy_bytes(command, _bytes_of)
            return
        target = Place(spans_of((command.target,), self._offset_of))
        yield from self._send(stream, target, lambda low, high, buffer: _put(buffer, data[low:high]))

    def read(self, stream: Stream, command: Read) -> Program:
        """Region → host buffer, likewise."""
        into = command.into
        if command.source.region not in self._offset_of:
            copy_bytes(command, _bytes_of)
            return
        source = Place(spans_of((command.source,), self._offset_of))
        yield from self._fetch(stream, source, lambda low, high, buffer: _put(into[low:high], buffer))

    def copy(self, stream: Stream, command: Copy) -> Program:
        """Region → region: within the GPU, between two of them, or from or to memory that the host has mapped."""
        source, target = command.source, command.target
        near = [side.region in self._offset_of for side in (source, target)]
        far = [self._peers(side.region.memory) for side in (source, target)]
        if all(near):
            yield from self._within(stream, source, target)
        elif far[0] is not None or far[1] is not None:
            yield from self._between(stream, source, target, far[0], far[1])
        elif near[1]:
            yield from self._from_host(stream, source, target)
        elif near[0]:
            yield from self._to_host(stream, source, target)
        else:
            copy_bytes(command, _bytes_of)

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

    def _enqueue(self, stream: Stream, work: Callable[[], None], beside: Stream = None) -> None:
        self._accelerator.enqueue(stream, work, beside)

    def _send(self, stream: Stream, target: Place, fill: Callable[[int, int, NDArray[np.uint8]], None]) -> Program:
        """Bytes of the host → the target; `fill(low, high, buffer)` puts bytes [low, high) into a buffer."""
        event = None
        for low, high in _cuts(target.nbytes, self._staging.nbytes):
            buffer = self._staging.take()
            while buffer is None:
                yield None
                buffer = self._staging.take()
            part, filled = target.part(low, high), buffer[: high - low]
            fill(low, high, filled.numpy())
            self._enqueue(stream, _storing(part, self._slab, filled, self._accelerator))
            event = self._accelerator.record(stream)
            self._staging.give(buffer, event)
        yield Last(event or self._accelerator.record(stream))

    def _fetch(self, stream: Stream, source: Place, empty: Callable[[int, int, NDArray[np.uint8]], None]) -> Program:
        """The source → bytes of the host; `empty(low, high, buffer)` takes bytes [low, high) out of a buffer."""
        flying: deque[tuple[Event, Tensor, int, int]] = deque()

        def landed() -> Program:
            event, buffer, low, high = flying[0]
            yield event
            flying.popleft()
            empty(low, high, buffer[: high - low].numpy())
            self._staging.give(buffer)

        for low, high in _cuts(source.nbytes, self._staging.nbytes):
            if len(flying) == 2:
                yield from landed()
            buffer = self._staging.take()
            while buffer is None:
                if flying:
                    yield from landed()
                else:
                    yield None
                buffer = self._staging.take()
            part, filled = source.part(low, high), buffer[: high - low]
            self._enqueue(stream, _loading(part, self._slab, filled, self._accelerator))
            flying.append((self._accelerator.record(stream), buffer, low, high))
        while flying:
            yield from landed()

    def _within(self, stream: Stream, source: Segment, target: Segment) -> Program:
        taken, put = (Place(spans_of((side,), self._offset_of)) for side in (source, target))
        step = max(taken.nbytes, 1) if taken.in_one_piece and put.in_one_piece else _CHUNK_NBYTES
        for low, high in _cuts(taken.nbytes, step):
            a, b = taken.part(low, high), put.part(low, high)

            def work(a: Place = a, b: Place = b) -> None:
                b.store(self._slab, a.load(self._slab, self._accelerator.upload), self._accelerator.upload)

            self._enqueue(stream, work)
        yield Last(self._accelerator.record(stream))

    def _between(
        self, stream: Stream, source: Segment, target: Segment, from_: Peer | None, to: Peer | None
    ) -> Program:
        """Piece by piece: an index of one GPU is of no use on another."""
        sides = []
        for side, peer in ((source, from_), (target, to)):
            offset_of = self._offset_of if peer is None else peer.offset_of
            sides.append((self._slab if peer is None else peer.slab, spans_of((side,), offset_of)))
        (taken, source_spans), (put, target_spans) = sides
        peer = from_ or to
        assert peer is not None
        pieces = common_pieces(source_spans, target_spans).tolist()

        def work() -> None:
            for a, b, nbytes in pieces:
                put[b : b + nbytes].copy_(taken[a : a + nbytes], non_blocking=True)

        self._enqueue(stream, work, peer.stream)
        yield Last(self._accelerator.record(stream))

    def _from_host(self, stream: Stream, source: Segment, target: Segment) -> Program:
        if self._is_direct(source, target):
            yield from self._direct(stream, source, target, to_host=False)
            return

        yield from self._send(stream, Place(spans_of((target,), self._offset_of)), _from_host(source))

    def _to_host(self, stream: Stream, source: Segment, target: Segment) -> Program:
        if self._is_direct(target, source):
            yield from self._direct(stream, target, source, to_host=True)
            return

        yield from self._fetch(stream, Place(spans_of((source,), self._offset_of)), _to_host(target))

    def _is_direct(self, host: Segment, near: Segment) -> bool:
        pieces = max(len(host.spans), len(near.spans), 1)
        large = host.spans.nbytes >= DIRECT_NBYTES * pieces
        return large and _bytes_of(host.region).flags.writeable and self._registered.has(host.region)

    def _direct(self, stream: Stream, host: Segment, near: Segment, to_host: bool) -> Program:
        view = torch.from_numpy(_bytes_of(host.region))
        pieces = common_pieces(host.spans.array, spans_of((near,), self._offset_of)).tolist()

        def work() -> None:
            for a, b, nbytes in pieces:
                there, here = view[a : a + nbytes], self._slab[b : b + nbytes]
                if to_host:
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)

        self._enqueue(stream, work)
        yield self._accelerator.record(stream)  # no `Last`: what follows must see, or may change, the host's bytes

    def _is_near(self, operand: Operand) -> bool:
        return all(region in self._offset_of for region, _ in operand)

    def _run(self, stream: Stream, command: Launch, reads: list[Int64], writes: list[Int64]) -> None:
        work = prepared(command, reads, writes)
        self._enqueue(stream, lambda: work(self._slab, self._accelerator.upload))

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
                    yield from _without_last(self._send(stream, place, _from_host(segment)))
            for operand in command.writes:
                spans, far = self._nearby(operand, taken)
                writes.append(spans)
                returned += far
            self._run(stream, command, reads, writes)
            for segment, place in returned:
                yield from self._fetch(stream, place, _to_host(segment))
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
            yield from self.read(stream, Read(segment, bytes_))
        writes = [np.zeros(_nbytes(operand), dtype=np.uint8) for operand in command.writes]
        args.function(reads, writes)
        for segment, bytes_ in _segments(command.writes, writes):
            yield from _without_last(self.write(stream, Write(segment, bytes_)))
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

        self._enqueue(stream, work)
        yield self._accelerator.record(stream)
        last, fault = pair.view(torch.int64).tolist()
        self._staging.give(verdict)
        if fault:
            raise ValueError(f"a line names line {last}, of {len(spans)}")


def common_pieces(a: Int64, b: Int64) -> Int64:
    """Two lists of spans of as many bytes, cut where either is: int64 (n, 3), offset in each and bytes."""
    ends = [np.cumsum(spans[:, 1]) for spans in (a, b)]
    cuts = np.union1d(*ends)
    cuts = cuts[cuts > 0]
    low = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if len(cuts) else cuts
    columns = []
    for spans, end in zip((a, b), ends, strict=True):
        which = np.searchsorted(end, low, side="right")
        columns.append(spans[which, 0] + low - (end[which] - spans[which, 1]))
    return np.stack([*columns, cuts - low], axis=1)


def _cuts(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    for low in range(0, nbytes, step):
        yield low, min(low + step, nbytes)


def _part(segment: Segment, low: int, high: int) -> Segment:
    return Segment(segment.region, Spans(Place(segment.spans.array).part(low, high).spans))


def _put(into: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    into[:] = data


def _from_host(source: Segment) -> Callable[[int, int, NDArray[np.uint8]], None]:
    return lambda low, high, buffer: copy_bytes(Read(_part(source, low, high), buffer), _bytes_of)


def _to_host(target: Segment) -> Callable[[int, int, NDArray[np.uint8]], None]:
    return lambda low, high, buffer: copy_bytes(Write(_part(target, low, high), buffer), _bytes_of)


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


def _storing(place: Place, slab: Tensor, filled: Tensor, accelerator: Accelerator) -> Callable[[], None]:
    return lambda: place.store(slab, filled, accelerator.upload)


def _loading(place: Place, slab: Tensor, filled: Tensor, accelerator: Accelerator) -> Callable[[], None]:
    def work() -> None:
        filled.copy_(place.load(slab, accelerator.upload), non_blocking=True)

    return work


def _bytes_of(region: Region) -> NDArray[np.uint8]:
    view = region.view
    assert view is not None, "submit has seen a view, and a region in use is not freed"
    return view
