"""Commands: values that say what a device should do. A device carries them out; nothing else moves a byte.

`Read` and `Write` move between a host buffer and a region, `Copy` between two regions by the engine that moves the
bytes, `Launch` runs a kernel, `Flush` makes writes visible to a non-coherent engine or durable on a persistent memory.
Every command takes spans, so a batch is a longer list. The bytes of a segment are its spans end to end, in order.

The caller must keep a host buffer alive and unchanged until the command completes. Operands are read at some time
between start and end; results are there when the command has ended, not before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.contract import KernelArgs
from tierloop.devices.regions import Segment

Operand = tuple[Segment, ...]
"""The segments of one operand: their spans, end to end over all segments, are its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Region → host buffer. `into` is C-contiguous uint8 (n,), n = bytes of the source's spans."""

    source: Segment
    into: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Host buffer → region. `data` is C-contiguous uint8 (n,), n = bytes of the target's spans."""

    target: Segment
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copy:
    """Region → region, by the executor that the command is handed to; both sides hold the same number of bytes.

    What lies on both sides, or twice in the target, ends with bytes of either: devices move spans in any order.
    """

    source: Segment
    target: Segment


@dataclass(frozen=True, slots=True)
class Launch:
    """Run the kernel that `args` belongs to; what each operand means is the kernel's written contract."""

    args: KernelArgs
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Make earlier writes to the target visible to every engine, and durable where the memory is persistent."""

    target: Segment


Command = Read | Write | Copy | Launch | Flush

VERBS: dict[type, str] = {Read: "read", Write: "write", Copy: "copy", Flush: "flush"}
"""What executors may offer besides kernels; a launch goes by the name of its kernel."""


def verb(command: Command) -> str:
    """The command's name as capabilities spell it; a launch is named after its kernel."""
    return command.args.kernel if isinstance(command, Launch) else VERBS[type(command)]


def read_segments(command: Command) -> Operand:
    """Segments whose bytes the command reads."""
    if isinstance(command, (Read, Copy)):
        return (command.source,)
    if isinstance(command, Launch):
        return tuple([s for operand in command.reads for s in operand])
    return ()


def write_segments(command: Command) -> Operand:
    """Segments whose bytes the command writes."""
    if isinstance(command, (Write, Copy)):
        return (command.target,)
    if isinstance(command, Launch):
        return tuple([s for operand in command.writes for s in operand])
    return ()


def segments(command: Command) -> Operand:
    """Every segment that the command names."""
    return (command.target,) if isinstance(command, Flush) else read_segments(command) + write_segments(command)


class Traffic:
    """Bytes that a command takes out of and puts into each memory, counted where they lie.

    `device.check` counts while it checks; without a command there is nothing yet.
    """

    __slots__ = ("phantom", "read", "written")

    def __init__(self, command: Command | None = None) -> None:
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.phantom = False
        if command is not None:
            for region, spans in read_segments(command):
                self.read[region.memory] = self.read.get(region.memory, 0) + spans.nbytes
                self.phantom = self.phantom or region.phantom
            for region, spans in write_segments(command):
                self.written[region.memory] = self.written.get(region.memory, 0) + spans.nbytes
                self.phantom = self.phantom or region.phantom
