"""The steps of the pnm driver's commands: what is sent to the device for each, in which order.

A command is a generator of requests: the driver sends each, and sends its ticket back in when it was answered well. A
`Write` puts bytes into the window and has them added; a `Read` has bytes shown and takes them out of the window; a
launch is one OP. Large transfers go part by part, so that nothing else has to wait long.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write, segments, verb
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.pnm_arguments import KERNELS, launch_nbytes, pack_launch, pack_segment, segment_nbytes
from tierloop.devices.drivers.pnm_session import Request, Session, Ticket
from tierloop.devices.drivers.pnm_wire import Limits, Opcode, checksum
from tierloop.devices.errors import ProtocolError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

PART_NBYTES = 1 << 20
"""What one step of a transfer moves: about 1 ms with its checksum, in which nothing else is looked at."""

Steps = Generator[Request, Ticket, None]


class Planner:
    """Plans commands for a session; `places` says where each region begins in the device's memory, `memory`."""

    def __init__(self, memory: str, session: Session, limits: Limits, places: Mapping[Region, int]) -> None:
        self._memory = memory
        self._session = session
        self._limits = limits
        self._places = places
        table = min(limits.largest_arguments, session.layout.arena_nbytes // 4)  # four transfers fit at a time
        each = segment_nbytes(1) - segment_nbytes(0)
        self._most_spans = max(1, min(limits.most_spans, (table - segment_nbytes(0)) // each))

    def plan(self, completion: Completion) -> tuple[Steps, frozenset[Region]]:
        """The steps of a command, and the regions whose lines in the window it must have to itself."""
        command = completion.command
        if isinstance(command, Launch):
            return self._launch(completion, command), frozenset()
        mine = frozenset(region for region, _ in segments(command) if region.memory == self._memory)
        if isinstance(command, Flush):
            return self._flush(command, bool(mine)), frozenset()
        if not mine:
            return _on_host(command), mine
        if isinstance(command, Read):
            return self._fetch(command.source, command.into), mine
        if isinstance(command, Write):
            return self._store(command.target, command.data), mine
        moved = Launch(Gather(), ((command.source,),), ((command.target,),))
        if self._gathers(command, moved):
            return self._launch(completion, moved), frozenset()
        return self._through_host(command), mine

    def _gathers(self, command: Copy, moved: Launch) -> bool:
        """Whether the device can do a copy by itself, as a gather."""
        limits = self._limits
        return (
            command.source.region.memory == command.target.region.memory
            and bool(limits.kernels >> KERNELS["gather"] & 1)
            and len(command.source.spans) + len(command.target.spans) <= limits.most_spans
            and launch_nbytes(moved) <= limits.largest_arguments
        )

    def _launch(self, completion: Completion, launch: Launch) -> Steps:
        written = sum([s.spans.nbytes for operand in launch.writes for s in operand])
        ticket = yield Request(Opcode.OP, verb(completion.command), pack_launch(launch, _number), nbytes=written)
        assert ticket.answer is not None, "a step goes on with an answer"
        completion.flops = ticket.answer.detail

    def _store(self, target: Segment, data: NDArray[np.uint8]) -> Steps:
        """Write through the window, and add: what the engines see is what they were told of."""
        at = 0
        for spans in self._parts(target.spans):
            part = data[at : at + spans.nbytes]
            at += spans.nbytes
            self._session.window.write(self._in_window(target.region, spans), part)
            yield _add("write", target.region, spans, checksum(part.data))

    def _fetch(self, source: Segment, into: NDArray[np.uint8]) -> Steps:
        """Have bytes shown, and read them through the window. Raises ProtocolError if they are others."""
        at = 0
        for spans in self._parts(source.spans):
            arguments = pack_segment(_number(source.region), spans)
            ticket = yield Request(Opcode.READ, "read", arguments, nbytes=spans.nbytes)
            part = into[at : at + spans.nbytes]
            at += spans.nbytes
            self._session.window.read(self._in_window(source.region, spans), part)
            assert ticket.answer is not None, "a step goes on with an answer"
            found, said = checksum(part.data), ticket.answer.payload_check
            if found != said:
                raise ProtocolError(
                    self._session.device,
                    "read",
                    f"{spans.nbytes} bytes have the checksum {found:#010x}; the device showed {said:#010x}",
                )

    def _through_host(self, command: Copy) -> Steps:
        """A copy with a buffer of the host between its two sides."""
        source, target = command.source, command.target
        held = np.empty(source.spans.nbytes, dtype=np.uint8)
        if source.region.memory == self._memory:
            yield from self._fetch(source, held)
        else:
            yield from _on_host(Read(source, held))
        if target.region.memory == self._memory:
            yield from self._store(target, held)
        else:
            yield from _on_host(Write(target, held))

    def _flush(self, command: Flush, mine: bool) -> Steps:
        """An ADD of nothing: it is answered when everything added before is visible. Host memory needs none."""
        if mine:
            yield _add("flush", command.target.region, Spans([]), checksum(b""))

    def _in_window(self, region: Region, spans: Spans) -> Spans:
        return Spans(spans.array + np.array([self._session.layout.memory_offset + self._places[region], 0]))

    def _parts(self, spans: Spans) -> Iterator[Spans]:
        """The spans in steps whose tables fit, of less than two `PART_NBYTES` each; one step of none."""
        if len(spans) <= self._most_spans and spans.nbytes <= PART_NBYTES:
            yield spans
            return
        rows: list[tuple[int, int]] = []
        held = 0
        for offset, nbytes in spans.array.tolist():
            for start in range(0, nbytes, PART_NBYTES):
                size = min(PART_NBYTES, nbytes - start)
                rows.append((offset + start, size))
                held += size
                if held >= PART_NBYTES or len(rows) == self._most_spans:
                    yield Spans(rows)
                    rows, held = [], 0
        if rows:
            yield Spans(rows)


def _add(op: str, region: Region, spans: Spans, payload_check: int) -> Request:
    arguments = pack_segment(_number(region), spans)
    return Request(Opcode.ADD, op, arguments, payload_check, spans.nbytes, checks_payload=True)


def _number(region: Region) -> int:
    """A region on the wire."""
    return region.id


def _on_host(command: Command) -> Steps:
    """Bytes that the device has no part in: a command of no requests."""
    from tierloop.devices.kernels.copying import copy_bytes  # compiles on import, so not before it is needed

    assert isinstance(command, (Read, Write, Copy)), "no kernel runs on the host's memory here"
    copy_bytes(command, _view)
    return
    yield


def _view(region: Region) -> NDArray[np.uint8]:
    view = region.view
    assert view is not None, "submit has seen a view, and a region in use is not freed"
    return view
