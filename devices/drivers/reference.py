"""reference: what every command means, carried out at once and as plainly as possible.

The living definition of the device contract: bytes live in NumPy arrays, a command's spans are taken end to end, and
kernels are the float64 definitions of kernels/definition.py. Read it before you write a driver; compare with it after.

A command takes effect in one instant, `duration_ns` after it started, on either clock. Phantom regions are allowed;
a command that touches one takes its time and moves nothing.

Options: `duration_ns` (1), `capacity` in bytes (2³⁰), `queues` (4), `reaches` (names of other memories: of reference
devices of the same platform, or host memory, whose regions have a view).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import VERBS, Command, Copy, Launch, Operand, Read, Traffic, Write, segments, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.failures import as_device_error
from tierloop.devices.drivers.options import integer, names, refuse_unknown
from tierloop.devices.errors import DeviceError, Unsupported
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.definition import Given, define
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


class Reference:
    """A memory and an executor that do what the contract says."""

    def __init__(
        self, name: str, site: Site, duration_ns: int, capacity: int, queues: int, reaches: tuple[str, ...]
    ) -> None:
        memory = MemoryInfo(name, capacity)
        executor = ExecutorInfo(
            name="reference",
            kind="cores",
            queues=tuple(range(queues)),
            verbs=frozenset(VERBS.values()),
            kernels=contract.KERNELS,
            dtypes=contract.DTYPES,
            paths=tuple(Path(memory, duration_ns, 0, 0) for memory in (name, *reaches)),
        )
        arithmetic = Arithmetic("reference-numpy", accumulator="float64", exp="float64")
        self._info = DeviceInfo(name, "reference", "emulated", (memory,), (executor,), arithmetic)
        self._duration_ns = duration_ns
        self._clock = site.clock
        self._arena = Arena(name, memory)
        self._bytes: dict[Region, NDArray[np.uint8]] = site.shared.setdefault("reference bytes", {})
        self._queues = QueueSet(name, queues, executor.depth, site, self._start)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        self._arena.reserve(nbytes, memory)
        region = self._arena.add(nbytes, phantom)
        if not phantom:
            self._bytes[region] = np.zeros(nbytes, dtype=np.uint8)
        return region

    def free(self, region: Region) -> None:
        self._arena.remove(region, self._queues.uses(region))
        self._bytes.pop(region, None)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return self._queues.submit(command, queue, after, self._check(command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        self._check(command, queue)
        return Estimate(self._duration_ns, 0, "the option duration_ns")

    def poll(self) -> None:
        """Nothing to collect: the clock ends every command."""

    def close(self) -> None:
        self._arena.close()
        for region in [region for region in self._bytes if region.memory == self._info.name]:
            del self._bytes[region]
        self._queues.close()

    def _check(self, command: Command, queue: int) -> Traffic:
        self._arena.alive(verb(command))
        traffic = check(self._info, command, queue)
        for region, _ in segments(command):
            if not region.phantom:
                self._array(region)
        return traffic

    def _start(self, completion: Completion) -> None:
        self._clock.call_at(self._clock.now() + self._duration_ns, self._end, completion)

    def _end(self, completion: Completion) -> None:
        if completion.done:  # the device was closed meanwhile
            return
        error: DeviceError | None = None
        if not completion.traffic.phantom:
            try:
                completion.flops = self._carry_out(completion.command)
            except Exception as wrong:
                error = as_device_error(self._info.name, verb(completion.command), wrong)
        self._queues.finish(completion, error)

    def _carry_out(self, command: Command) -> int:
        """Do it; returns the floating-point operations. A Flush has nothing to do: writes are visible at once."""
        if isinstance(command, Read):
            command.into[:] = self._load((command.source,))
        elif isinstance(command, Write):
            self._store((command.target,), command.data)
        elif isinstance(command, Copy):
            self._store((command.target,), self._load((command.source,)))
        elif isinstance(command, Launch):
            reads = [Given(self._load(operand), _sizes(operand)) for operand in command.reads]
            nbytes = [int(_sizes(operand).sum()) for operand in command.writes]
            for operand, result in zip(command.writes, define(command.args, reads, nbytes), strict=True):
                self._store(operand, result)
            return contract.flops(command.args, [read.bytes.nbytes for read in reads])
        return 0

    def _array(self, region: Region) -> NDArray[np.uint8]:
        """The bytes of a region: of a reference device on this site, or the host's own. Raises Unsupported."""
        array = self._bytes.get(region, region.view)
        if array is None:
            raise Unsupported(self._info.name, "access", f"{region} is neither a reference device's nor host memory")
        return array

    def _load(self, operand: Operand) -> NDArray[np.uint8]:
        """A copy of the operand's bytes, end to end."""
        pieces = [
            self._array(region)[offset : offset + nbytes]
            for region, spans in operand
            for offset, nbytes in spans.array.tolist()
        ]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint8)

    def _store(self, operand: Operand, result: NDArray[np.uint8]) -> None:
        """Put bytes into the operand's spans, in order."""
        start = 0
        for region, spans in operand:
            for offset, nbytes in spans.array.tolist():
                self._array(region)[offset : offset + nbytes] = result[start : start + nbytes]
                start += nbytes


def _sizes(operand: Operand) -> NDArray[np.int64]:
    """The sizes of all spans of an operand, in bytes."""
    return np.concatenate([spans.array[:, 1] for _, spans in operand] or [np.zeros(0, dtype=np.int64)])


def open_reference(name: str, site: Site, options: dict[str, Any]) -> Reference:
    """The entry point `reference`. Raises ConfigurationError for options that are wrong."""
    refuse_unknown(name, options, ["duration_ns", "capacity", "queues", "reaches", "folder"])
    return Reference(
        name,
        site,
        integer(name, options, "duration_ns", 1),
        integer(name, options, "capacity", 1 << 30, 1),
        integer(name, options, "queues", 4, 1, 1 << 16),
        names(name, options, "reaches"),
    )


open_reference.emulated = True  # type: ignore[attr-defined]  # by which the registry names it
