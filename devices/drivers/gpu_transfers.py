"""Transfers: what Read, Write and Copy do on a stream, step by step. A program is a generator that never blocks.

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

from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.drivers.gpu_operands import Int64, Place, spans_of
from tierloop.devices.drivers.gpu_runtime import Accelerator, Event, Stream
from tierloop.devices.drivers.gpu_staging import Registered, Staging
from tierloop.devices.kernels import copy_bytes
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


class Transfers:
    """Makes the programs of one GPU that move bytes. `peers` is asked by the name of a memory."""

    def __init__(
        self,
        accelerator: Accelerator,
        slab: Tensor,
        offset_of: Mapping[Region, int],
        staging: Staging,
        registered: Registered,
        peers: Callable[[str], Peer | None],
    ) -> None:
        self._accelerator = accelerator
        self._slab = slab
        self._offset_of = offset_of
        self._staging = staging
        self._registered = registered
        self._peers = peers

    def write(self, stream: Stream, command: Write) -> Program:
        """Host buffer → region; bytes that stay on the host are the host's to move."""
        data = command.data
        if command.target.region not in self._offset_of:
            copy_bytes(command, _bytes_of)
            return
        target = Place(spans_of((command.target,), self._offset_of))
        yield from self.send(stream, target, lambda low, high, buffer: _put(buffer, data[low:high]))

    def read(self, stream: Stream, command: Read) -> Program:
        """Region → host buffer, likewise."""
        into = command.into
        if command.source.region not in self._offset_of:
            copy_bytes(command, _bytes_of)
            return
        source = Place(spans_of((command.source,), self._offset_of))
        yield from self.fetch(stream, source, lambda low, high, buffer: _put(into[low:high], buffer))

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

    def send(self, stream: Stream, target: Place, fill: Callable[[int, int, NDArray[np.uint8]], None]) -> Program:
        """Bytes of the host → the target; `fill(low, high, buffer)` puts bytes [low, high) into a buffer."""
        event = None
        for low, high in _cuts(target.nbytes, self._staging.nbytes):
            buffer = self._staging.take()
            while buffer is None:
                yield None
                buffer = self._staging.take()
            part, filled = target.part(low, high), buffer[: high - low]
            try:
                fill(low, high, filled.numpy())
                self._accelerator.enqueue(stream, _storing(part, self._slab, filled, self._accelerator))
            finally:  # whatever has become of it, the buffer is free when the stream is through
                event = self._accelerator.record(stream)
                self._staging.give(buffer, event)
        yield Last(event or self._accelerator.record(stream))

    def fetch(self, stream: Stream, source: Place, empty: Callable[[int, int, NDArray[np.uint8]], None]) -> Program:
        """The source → bytes of the host; `empty(low, high, buffer)` takes bytes [low, high) out of a buffer."""
        flying: deque[tuple[Event, Tensor, int, int]] = deque()

        def landed() -> Program:
            event, buffer, low, high = flying[0]
            yield event
            empty(low, high, buffer[: high - low].numpy())
            self._staging.give(flying.popleft()[1])

        try:
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
                flying.append((None, buffer, low, high))
                self._accelerator.enqueue(stream, _loading(part, self._slab, filled, self._accelerator))
                flying[-1] = (self._accelerator.record(stream), buffer, low, high)
            while flying:
                yield from landed()
        except Exception:
            event = self._accelerator.record(stream)
            for _, buffer, _, _ in flying:
                self._staging.give(buffer, event)
            raise

    def _within(self, stream: Stream, source: Segment, target: Segment) -> Program:
        taken, put = (Place(spans_of((side,), self._offset_of)) for side in (source, target))
        step = max(taken.nbytes, 1) if taken.in_one_piece and put.in_one_piece else _CHUNK_NBYTES
        for low, high in _cuts(taken.nbytes, step):
            a, b = taken.part(low, high), put.part(low, high)

            def work(a: Place = a, b: Place = b) -> None:
                b.store(self._slab, a.load(self._slab, self._accelerator.upload), self._accelerator.upload)

            self._accelerator.enqueue(stream, work)
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

        self._accelerator.enqueue(stream, work, peer.stream)
        yield Last(self._accelerator.record(stream))

    def _from_host(self, stream: Stream, source: Segment, target: Segment) -> Program:
        if self._is_direct(source, target):
            yield from self._direct(stream, source, target, to_host=False)
            return

        yield from self.send(stream, Place(spans_of((target,), self._offset_of)), bytes_from(source))

    def _to_host(self, stream: Stream, source: Segment, target: Segment) -> Program:
        if self._is_direct(target, source):
            yield from self._direct(stream, target, source, to_host=True)
            return

        yield from self.fetch(stream, Place(spans_of((source,), self._offset_of)), bytes_to(target))

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

        self._accelerator.enqueue(stream, work)
        yield self._accelerator.record(stream)  # no `Last`: what follows must see, or may change, the host's bytes


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


def bytes_from(source: Segment) -> Callable[[int, int, NDArray[np.uint8]], None]:
    """Fills buffers from host memory: see `Transfers.send`."""
    return lambda low, high, buffer: copy_bytes(Read(_part(source, low, high), buffer), _bytes_of)


def bytes_to(target: Segment) -> Callable[[int, int, NDArray[np.uint8]], None]:
    """Empties buffers into host memory: see `Transfers.fetch`."""
    return lambda low, high, buffer: copy_bytes(Write(_part(target, low, high), buffer), _bytes_of)


def _cuts(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    for low in range(0, nbytes, step):
        yield low, min(low + step, nbytes)


def _part(segment: Segment, low: int, high: int) -> Segment:
    return Segment(segment.region, Spans(Place(segment.spans.array).part(low, high).spans))


def _put(into: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    into[:] = data


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
