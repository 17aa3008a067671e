"""The device contract: seven members, kept small for ever.

Called by the runtime, by wrappers and by the conformance suite. A device has memories, executors, or both; commands go
to the queue of an executor and may name regions on any memory that this executor reaches. What must hold:

- `submit` returns at once; a mistake that can be seen beforehand is raised by it, and nothing was queued.
- Commands of one queue take effect in order. Anything else is ordered by `after`, which may name completions of any
  device of the same platform; what is not ordered may be reordered, and an emulator will.
- Effects are there when the command has completed, not before. Operands are read between start and end.
- After an error the device still works, or says `Gone`.
- Nothing is allocated beyond a memory's capacity, and nothing blocks without a deadline.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import (
    VERBS,
    Command,
    Copy,
    Launch,
    Operand,
    Read,
    Traffic,
    Write,
    segments,
    verb,
)
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError, Misaligned, OutOfRange, Unsupported
from tierloop.devices.info import DeviceInfo, ExecutorInfo
from tierloop.devices.kernels import contract
from tierloop.devices.regions import Region, Segment

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a command would cost if nothing else arrived: duration ± margin in ns, and how the device knows."""

    duration_ns: int
    margin_ns: int
    source: str


class Device(Protocol):
    """A memory, an executor, or both; real or emulated, and nobody above can tell."""

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do; never changes while it is open."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes in a memory (default: the first). Raises OutOfMemory, OutOfRange, Unsupported."""

    def free(self, region: Region) -> None:
        """Give the bytes back. Raises OutOfRange if the region is not this device's or is freed, Busy if in use."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command; it starts after everything in `after` has ended and after the queue's earlier commands.

        Raises OutOfRange, Misaligned, Unsupported, Busy or Gone.
        """

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the command would cost now if nothing else arrived. Raises what `submit` raises, but for Busy."""

    def poll(self) -> None:
        """Collect what the hardware has finished; may be called at any time, never blocks, waits for nothing.

        Waiting on the clock calls nothing but what is registered there: a device whose hardware does not report by
        itself has itself polled while commands are open, by `clock.call_at(clock.now() + interval, self.poll)`, or by
        `clock.post(self.poll)` from a thread that waits for the hardware.
        """

    def close(self) -> None:
        """Release everything. Raises the first error that nobody looked at."""


def check(info: DeviceInfo, command: Command, queue: int, live: Container[Region] | None = None) -> Traffic:
    """Check a command against what a device says of itself; the first thing that every `submit` does.

    With `live`, every region has to be one of these, or mapped by the host (`Region.view`). Returns the command's
    traffic. Raises OutOfRange, Misaligned or Unsupported.
    """
    executor = info.executor_of(queue)
    launch = isinstance(command, Launch)
    op = command.args.kernel if launch else VERBS[type(command)]  # type: ignore[union-attr]  # `launch` says so
    if executor is None:
        queues = sorted(q for e in info.executors for q in e.queues)
        raise OutOfRange(info.name, op, f"queue {queue} does not exist; queues: {queues}")
    if op not in (executor.kernels if launch else executor.verbs):
        raise Unsupported(info.name, op, f"executor {executor.name} offers {sorted(executor.verbs | executor.kernels)}")
    traffic = Traffic()
    try:
        if isinstance(command, Launch):
            reads = [_check_operand(executor, operand, traffic, traffic.read, live) for operand in command.reads]
            writes = [_check_operand(executor, operand, traffic, traffic.written, live) for operand in command.writes]
            wrong = contract.check(command.args, reads, writes)
            if wrong:
                raise OutOfRange(info.name, op, wrong)
            _check_dtype(info, executor, command, op)
            return traffic
        if isinstance(command, Copy):
            nbytes = _check_segment(executor, command.source, traffic, traffic.read, live)
            room = _check_segment(executor, command.target, traffic, traffic.written, live)
            if nbytes != room:
                raise OutOfRange(info.name, op, f"{nbytes} bytes do not fit {room} bytes")
        elif isinstance(command, Read):
            nbytes = _check_segment(executor, command.source, traffic, traffic.read, live)
            _check_buffer(info, command.into, nbytes, op)
            if not command.into.flags.writeable:
                raise OutOfRange(info.name, op, "the buffer to read into is read-only")
        elif isinstance(command, Write):
            nbytes = _check_segment(executor, command.target, traffic, traffic.written, live)
            _check_buffer(info, command.data, nbytes, op)
        else:
            _check_segment(executor, command.target, Traffic(), {}, live)
            return traffic
    except _Wrong as wrong_segment:
        raise _explain(info, executor, op, wrong_segment.segment) from None
    if executor.largest_transfer and nbytes > executor.largest_transfer:
        raise OutOfRange(info.name, op, f"{nbytes} bytes in one command; at most {executor.largest_transfer}")
    return traffic


class _Wrong(Exception):
    """A segment that the command may not name; `_explain` finds out why, so that right ones cost less."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment


def _check_operand(
    executor: ExecutorInfo, operand: Operand, traffic: Traffic, count: dict[str, int], live: Container[Region] | None
) -> tuple[int, int]:
    """Check the segments of an operand; returns its number of spans and of bytes."""
    num_spans = nbytes = 0
    for segment in operand:
        nbytes += _check_segment(executor, segment, traffic, count, live)
        num_spans += len(segment.spans)
    return num_spans, nbytes


def _check_segment(
    executor: ExecutorInfo, segment: Segment, traffic: Traffic, count: dict[str, int], live: Container[Region] | None
) -> int:
    """Check a segment and add its bytes to `count`, by memory; returns them. Raises _Wrong."""
    region, spans = segment
    memory, nbytes = region.memory, spans.nbytes
    if memory in count:
        count[memory] += nbytes
    elif memory in executor.reached:
        count[memory] = nbytes
    else:
        raise _Wrong(segment)
    if region.freed or spans.end > region.nbytes or (live is not None and region not in live and region.view is None):
        raise _Wrong(segment)
    if region.phantom:
        traffic.phantom = True
    return nbytes


def _explain(info: DeviceInfo, executor: ExecutorInfo, op: str, segment: Segment) -> DeviceError:
    """What is wrong with a segment that did not pass."""
    region, spans = segment
    if region.freed:
        return OutOfRange(info.name, op, f"{region} was used after it was freed")
    if spans.end > region.nbytes:
        return OutOfRange(info.name, op, f"{spans!r} is outside the {region.nbytes} bytes of {region}")
    if executor.path(region.memory) is None:
        reach = sorted(path.memory for path in executor.paths)
        problem = f"executor {executor.name} does not reach {region.memory}; it has {reach}"
        return Unsupported(info.name, op, problem)
    return OutOfRange(info.name, op, f"{region} is none that {region.memory} has now, and not mapped by the host")


def check_alignment(info: DeviceInfo, command: Command, memory: str, alignment: int) -> None:
    """Every span on `memory` must start and end on the grid. Raises Misaligned."""
    if alignment == 1:
        return
    for region, spans in segments(command):
        if region.memory == memory and _off_grid(spans.array, alignment):
            row = int((spans.array % alignment).any(axis=1).argmax())
            offset, nbytes = spans.array[row].tolist()
            raise Misaligned(
                info.name, verb(command), f"span [{offset}, {offset + nbytes}) is off the {alignment}-byte grid"
            )


def _off_grid(array: NDArray[np.int64], alignment: int) -> bool:
    if alignment & (alignment - 1) == 0:  # 3 µs instead of 26 at 4,096 spans
        return bool(np.bitwise_or.reduce(array, axis=None) & (alignment - 1))
    return bool((array % alignment).any())


def _check_dtype(info: DeviceInfo, executor: ExecutorInfo, command: Launch, op: str) -> None:
    dtype = getattr(command.args, "dtype", None)
    if dtype == "float32" and command.args.kernel == "score":  # whoever offers it takes these (contract.Score)
        return
    if dtype is not None and dtype not in executor.dtypes:
        raise Unsupported(info.name, op, f"dtype {dtype}; executor {executor.name} has {sorted(executor.dtypes)}")


def _check_buffer(info: DeviceInfo, buffer: NDArray[np.uint8], nbytes: int, op: str) -> None:
    if not isinstance(buffer, np.ndarray):
        raise OutOfRange(info.name, op, f"host buffers are NumPy arrays, got {type(buffer).__name__}")
    if buffer.dtype != _UINT8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise OutOfRange(
            info.name,
            op,
            f"host buffers are C-contiguous uint8 (n,), got {buffer.dtype} {buffer.shape} {buffer.strides}",
        )
    if buffer.nbytes != nbytes:
        raise OutOfRange(info.name, op, f"a buffer of {buffer.nbytes} bytes for spans of {nbytes} bytes")
