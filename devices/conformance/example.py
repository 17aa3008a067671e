"""The smallest device that passes the suite: bytes in a dict, and queues from `QueueSet`.

Start from a copy of it for a device of your own; the suite's tests break it in many ways to see that the suite notices.
One memory, one executor. A command takes `delay_ns` and 1 ns per byte. Its effects are there when it has ended, not
before. Kernels are parts: functions from the operands of a launch to the bytes of its results; those that define what
the kernels mean (kernels/definition.py) do for a start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Copy, Launch, Operand, Read, Traffic, Write, segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check, check_alignment
from tierloop.devices.errors import Busy, Gone, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels.contract import DTYPES, KernelArgs, flops
from tierloop.devices.kernels.definition import Given
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site

Bytes = NDArray[np.uint8]
Kernel = Callable[[KernelArgs, list[Given], list[int]], list[Bytes]]
"""Arguments, the read operands, and the bytes of each write operand → the bytes to write."""


class Example:
    """An emulated device of `capacity` bytes; sizes and offsets are multiples of `alignment`."""

    def __init__(
        self,
        site: Site,
        name: str = "emu:example",
        capacity: int = 1 << 20,
        alignment: int = 1,
        delay_ns: int = 1_000,
        depth: int = 64,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        self._kernels = dict(kernels or {})
        self._info = DeviceInfo(
            name=name,
            kind="cxl",
            provenance="emulated",
            memories=(MemoryInfo(name, capacity, alignment, byte_addressable=alignment == 1),),
            executors=(
                ExecutorInfo(
                    name="engine",
                    kind="dma",
                    queues=(0, 1),
                    verbs=frozenset({"read", "write", "copy", "flush"}),
                    kernels=frozenset(self._kernels),
                    dtypes=DTYPES if self._kernels else frozenset(),
                    paths=(Path(name, delay_ns, 10**9, 10**9),),
                    depth=depth,
                ),
            ),
            arithmetic=Arithmetic("numpy", accumulator="float64", exp="float64") if self._kernels else None,
        )
        self._site = site
        self._delay_ns = delay_ns
        self._queues = QueueSet(name, 2, depth, site, self._start)
        self._bytes: dict[int, Bytes] = {}
        self._regions: dict[int, Region] = {}
        self._made = 0
        self._in_use: dict[int, int] = {}
        self._closed = False

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        self._open("alloc")
        name, mine = self._info.name, self._info.memories[0]
        if memory not in (None, mine.name):
            raise OutOfRange(name, "alloc", f"there is no memory {memory!r}; there is {mine.name!r}")
        if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 0:
            raise OutOfRange(name, "alloc", f"{nbytes!r} bytes")
        if phantom:
            raise Unsupported(name, "alloc", "phantom regions")
        free = mine.capacity - sum(r.nbytes for r in self._regions.values())
        if nbytes > free:
            raise OutOfMemory(name, "alloc", f"{nbytes} bytes of {free} that are free of {mine.capacity}")
        self._made += 1
        region = Region(name, mine.name, self._made, nbytes)
        self._regions[region.id] = region
        self._bytes[region.id] = np.zeros(nbytes, dtype=np.uint8)
        return region

    def free(self, region: Region) -> None:
        self._open("free")
        self._mine("free", region)
        if self._in_use.get(region.id):
            raise Busy(self._info.name, "free", f"{region} is used by {self._in_use[region.id]} commands")
        del self._regions[region.id], self._bytes[region.id]
        region.freed = True

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        traffic = self._checked("submit", command, queue)
        named = {region.id for region, _ in segments(command)}
        completion = self._queues.submit(command, queue, after, traffic)
        for each in named:
            self._in_use[each] = self._in_use.get(each, 0) + 1
        completion.on_done(lambda _: self._release(named))
        return completion

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        self._checked("estimate", command, queue)
        return Estimate(self._duration_ns(command), 0, "a fixed delay and 1 ns per byte")

    def poll(self) -> None:
        """Nothing to collect: the clock reports by itself."""

    def close(self) -> None:
        self._closed = True
        self._queues.close()

    def _checked(self, op: str, command: Command, queue: int) -> Traffic:
        """What can be seen beforehand; raises what is wrong with it."""
        self._open(op)
        traffic = check(self._info, command, queue)
        memory = self._info.memories[0]
        check_alignment(self._info, command, memory.name, memory.alignment)
        for region, _ in segments(command):
            self._mine(op, region)
        return traffic

    def _start(self, completion: Completion) -> None:
        clock = self._site.clock
        clock.call_at(clock.now() + self._duration_ns(completion.command), self._end, completion)

    def _end(self, completion: Completion) -> None:
        if completion.done:  # closed meanwhile: the host has its buffers back
            return
        command = completion.command
        if isinstance(command, Read):
            command.into[:] = self._load((command.source,))
        elif isinstance(command, Write):
            self._store((command.target,), command.data)
        elif isinstance(command, Copy):
            self._store((command.target,), self._load((command.source,)))
        elif isinstance(command, Launch):
            reads = [Given(self._load(operand), _sizes(operand)) for operand in command.reads]
            nbytes = [int(_sizes(operand).sum()) for operand in command.writes]
            results = self._kernels[command.args.kernel](command.args, reads, nbytes)
            for operand, data in zip(command.writes, results, strict=True):
                self._store(operand, data)
            completion.flops = flops(command.args, [read.bytes.nbytes for read in reads])
        self._queues.finish(completion)

    def _load(self, operand: Operand) -> Bytes:
        pieces = [self._bytes[r.id][o : o + n] for r, spans in operand for o, n in spans.array.tolist()]
        return np.concatenate([*pieces, np.empty(0, dtype=np.uint8)])

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        at = 0
        for region, spans in operand:
            for offset, nbytes in spans.array.tolist():
                self._bytes[region.id][offset : offset + nbytes] = data[at : at + nbytes]
                at += nbytes

    def _duration_ns(self, command: Command) -> int:
        return self._delay_ns + sum(spans.nbytes for _, spans in segments(command))

    def _release(self, named: set[int]) -> None:
        for each in named:
            self._in_use[each] -= 1

    def _mine(self, op: str, region: Region) -> Region:
        if self._regions.get(region.id) is not region:
            raise OutOfRange(self._info.name, op, f"{region} was not allocated here, or is freed")
        return region

    def _open(self, op: str) -> None:
        if self._closed:
            raise Gone(self._info.name, op, "the device is closed")


def _sizes(operand: Operand) -> NDArray[np.int64]:
    """Bytes of each span of an operand, in order."""
    return np.concatenate([*(spans.array[:, 1] for _, spans in operand), np.empty(0, dtype=np.int64)])
