"""The device under test, opened afresh for each check, within the platform that it stands in.

Everything that the checks do to a device goes through here, and here the suite makes sure that the path was taken: a
transfer counts only if the device that was named reports that it ended, to the caller and to the site's observers, and
says that it moved the bytes that the command names.

A device that is memory only is reached by the executors of other devices, so an opener may return a whole platform.
"""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Command, Read, Traffic, Write, verb
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.gate import Gate
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, DeviceError, Unsupported, nearest
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait

Opener = Callable[[Site], Device | Platform]
"""Opens the device on a site, or builds a platform (which may have its own site) that the device is in."""

Bytes = NDArray[np.uint8]
DEADLINE_NS = 20_000_000_000
"""How long a check waits for a command: a dead device should not take a minute for each of 80 checks."""


class Failure(AssertionError):
    """The device broke the contract; the message says what was asked, what was needed and what it did."""


class Skip(unittest.SkipTest):
    """The device says that it cannot do what the check needs; pytest and unittest report it as skipped."""


def expect(holds: object, what: str) -> None:
    """Fail unless it holds. Not an assert statement: a suite must not pass under `python -O`."""
    if not holds:
        raise Failure(what)


@contextmanager
def refused(what: str, *kinds: type[DeviceError]) -> Iterator[None]:
    """Expect one of these errors; anything else, and silence, is a failure that says what was tried."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds as error:
        expect(error.device, f"{what}: the {type(error).__name__} does not say which device it is from")
        return
    except Exception as error:
        raise Failure(f"{what}: needs {names}, got {type(error).__name__}: {error}") from error
    raise Failure(f"{what}: needs {names}, and nothing was raised")


@dataclass(frozen=True)
class Lane:
    """A queue of a device, and the executor behind it."""

    device: Device
    executor: ExecutorInfo
    queue: int

    def submit(self, command: Command, after: Sequence[Completion] = ()) -> Completion:
        """Submit to this queue."""
        return self.device.submit(command, self.queue, after)

    def __str__(self) -> str:
        return f"{self.device.info.name} {self.executor.name} queue {self.queue}"


class Subject:
    """Opens on construction; the device, its info, its platform's clock and site, and a seeded generator.

    `virtual` picks the clock of the site that the opener gets; `device` names the device where the opener returns a
    platform of several.
    """

    def __init__(self, opener: Opener, virtual: bool = False, device: str | None = None, seed: int = 0) -> None:
        site = Site(clock=VirtualClock() if virtual else WallClock(), checker=HazardChecker())
        opened = opener(site)
        if isinstance(opened, Platform):
            self.platform = opened
            self.device = _picked(opened, device)
        else:
            self.platform = Platform("conformance", site, {_info(opened).name: opened})
            self.device = opened
        self.site = self.platform.site
        if self.site.checker is None:
            self.site.checker = HazardChecker()
        self.clock = self.site.clock
        self.info = _info(self.device)
        self.rng = np.random.default_rng(seed)
        self._arguments = (opener, virtual, device, seed)
        self._ended: Counter[Completion] = Counter()
        self.site.observers.append(self._note)

    def close(self) -> None:
        """Close the platform; raises what the device does."""
        self.platform.close()

    def opened_again(self) -> Subject:
        """The same device on another site; what it raises if it can only be opened once is for the caller."""
        return Subject(*self._arguments)

    def abandon(self) -> None:
        """Close after a check that did not pass: what that raises is a consequence, not a finding."""
        with suppress(Exception):
            self.platform.close()

    def _note(self, completion: Completion) -> None:
        self._ended[completion] += 1

    # Where things can go

    def lanes(self, memory: str, *verbs: str) -> list[Lane]:
        """Every queue that carries these verbs and reaches the memory; the device's own first."""
        found = [
            Lane(device, executor, queue)
            for device, executor in self.platform.executors()
            if executor.verbs.issuperset(verbs) and executor.path(memory) is not None
            for queue in executor.queues
        ]
        return sorted(found, key=lambda lane: lane.device is not self.device)

    def lane(self, memory: str, *verbs: str) -> Lane:
        """The first of `lanes`; skips the check if there is none."""
        found = self.lanes(memory, *(verbs or ("read", "write")))
        if not found:
            raise Skip(f"no executor of the platform can {' and '.join(verbs or ('read', 'write'))} {memory}")
        return found[0]

    def memories(self) -> list[MemoryInfo]:
        """The device's memories that somebody can read and write; skips the check if there is none."""
        if not self.info.memories:
            raise Skip("the device has no memory")
        for memory in self.info.memories:
            self.lane(memory.name)
        return list(self.info.memories)

    def memory(self) -> MemoryInfo:
        """The first of `memories`, else of the memories that the device's executors reach."""
        if self.info.memories:
            return self.memories()[0]
        for _, memory in self.platform.memories():
            if any(lane.device is self.device for lane in self.lanes(memory.name, "read", "write")):
                return memory
        raise Skip("the device has no memory and can read and write no other")

    def two_queues(self, memory: str) -> tuple[Lane, Lane]:
        """Two different queues that read and write the memory; skips the check if there is one only."""
        found = self.lanes(memory, "read", "write")
        if len(found) < 2:
            raise Skip(f"only one queue reads and writes {memory}")
        return found[0], found[1]

    def kernel_lanes(self, kernel: str) -> list[Lane]:
        """One queue of each executor of the device that offers the kernel; skips the check if there is none.

        A device that is memory only is tested by the first executor of the platform that computes on it in place.
        """
        found = [Lane(self.device, e, e.queues[0]) for e in self.info.executors if kernel in e.kernels]
        if not self.info.executors:
            own = {memory.name for memory in self.info.memories}
            found = [
                Lane(device, executor, executor.queues[0])
                for device, executor in self.platform.executors()
                if kernel in executor.kernels and own & executor.reached
            ][:1]
        if not found:
            raise Skip(f"no executor of {self.info.name} offers {kernel}")
        return found

    def operand_memories(self, lane: Lane) -> list[MemoryInfo]:
        """Byte-addressable memories that the executor reaches and the suite can fill; the device's own first."""
        found = [
            (device is not self.device, memory)
            for device, memory in self.platform.memories()
            if lane.executor.path(memory.name) and memory.alignment <= 4 and self.lanes(memory.name, "read", "write")
        ]
        if not found:
            raise Skip(f"{lane.executor.name} reaches no memory with a grid of at most 4 bytes that can be filled")
        return [memory for _, memory in sorted(found, key=lambda pair: pair[0])]

    def room(self, memory: MemoryInfo) -> int:
        """A size in bytes for the regions of checks: on the grid, small, and at most one command's."""
        limits = [64 * 1024, memory.capacity // 8] if memory.alignment < 4096 else [32 * memory.alignment]
        limits += [lane.executor.largest_transfer for lane in self.lanes(memory.name) if lane.executor.largest_transfer]
        return max(min(limits) // memory.alignment, 1) * memory.alignment

    # What can be done

    def alloc(self, nbytes: int, memory: MemoryInfo) -> Region:
        """A region on a memory of the platform."""
        return self.platform.memory_owner(memory.name).alloc(nbytes, memory.name)

    def wait(self, *completions: Completion) -> None:
        """Wait for all, at most 20 s of the clock."""
        wait(self.clock, completions, self.clock.now() + DEADLINE_NS)

    def run(self, lane: Lane, command: Command, after: Sequence[Completion] = ()) -> Completion:
        """Submit, wait, and make sure that the path was taken."""
        completion = lane.submit(command, after)
        self.wait(completion)
        self.taken(lane, completion)
        return completion

    def taken(self, lane: Lane, completion: Completion) -> None:
        """The lane's device carried the command out, said so to the observers, and moved the bytes that it names."""
        name, what = lane.device.info.name, f"{verb(completion.command)} on {lane}"
        expect(completion.device == name, f"{what}: the completion is of {completion.device}, not of {name}")
        expect(completion.queue == lane.queue, f"{what}: the completion is of queue {completion.queue}")
        told = self._ended[completion]
        expect(told, f"{what}: the site's observers were not told that it ended")
        expect(told == 1, f"{what}: the site's observers were told {told} times that it ended")
        moved, named = completion.traffic, Traffic(completion.command)
        expect(
            (moved.read, moved.written) == (named.read, named.written),
            f"{what}: it says {moved.read} read and {moved.written} written; the command names "
            f"{named.read} and {named.written}",
        )
        expect(
            0 <= completion.submitted_ns <= completion.started_ns <= completion.ended_ns <= self.clock.now(),
            f"{what}: submitted {completion.submitted_ns}, started {completion.started_ns}, "
            f"ended {completion.ended_ns} ns",
        )

    def write(self, target: Segment, data: Bytes | bytes, lane: Lane | None = None) -> None:
        """Write and wait; in as many commands as the largest transfer asks for."""
        array = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
        lane = lane or self.lane(target.region.memory)
        at = 0
        for part in _parts(target, lane.executor.largest_transfer):
            self.run(lane, Write(part, array[at : at + part.spans.nbytes]))
            at += part.spans.nbytes

    def read(self, source: Segment, lane: Lane | None = None) -> Bytes:
        """Read and wait: uint8 (n,)."""
        lane = lane or self.lane(source.region.memory)
        into = np.full(source.spans.nbytes, 0xA5, dtype=np.uint8)
        at = 0
        for part in _parts(source, lane.executor.largest_transfer):
            self.run(lane, Read(part, into[at : at + part.spans.nbytes]))
            at += part.spans.nbytes
        return into

    def bytes(self, nbytes: int) -> Bytes:
        """Random bytes, none of them 0, so that they differ from fresh memory everywhere."""
        return self.rng.integers(1, 256, nbytes, dtype=np.uint8)

    def cut(self, nbytes: int, grid: int, pieces: int = 13) -> Spans:
        """All of [0, nbytes) in odd pieces on the grid, out of order."""
        units = nbytes // grid
        inner = np.sort(self.rng.permutation(np.arange(1, units))[: pieces - 1])
        edges = np.concatenate([[0], inner, [units]]).astype(np.int64) * grid
        rows = np.stack([edges[:-1], np.diff(edges)], axis=1)
        return Spans(self.rng.permutation(rows))

    def works(self) -> None:
        """The device still carries a command out; called after everything that it had to refuse."""
        memory = self.memory()
        region = self.alloc(self.room(memory), memory)
        data = self.bytes(region.nbytes)
        self.write(region.all(), data)
        expect(
            np.array_equal(self.read(region.all()), data), "after an error the device no longer keeps what is written"
        )
        self.platform.free(region)

    def gate(self) -> Gate:
        """A command of another device that ends when told."""
        return Gate(self.site)

    def pass_time(self, ns: int = 1_000_000) -> None:
        """Let the clock run."""
        self.clock.wait_until(self.clock.now() + ns)

    @contextmanager
    def hazards_allowed(self) -> Iterator[None]:
        """For checks of what an unordered command may see: the happens-before checker looks away."""
        checker, self.site.checker = self.site.checker, None
        try:
            yield
        finally:
            self.site.checker = checker

    def phantom_or_none(self, nbytes: int, memory: MemoryInfo) -> Region | None:
        """A phantom region, or None where the device does not make any."""
        try:
            return self.device.alloc(nbytes, memory.name, phantom=True)
        except Unsupported:
            return None


def _info(device: Device) -> DeviceInfo:
    """What the device says of itself. Raises ConfigurationError where it cannot be asked at all."""
    try:
        info = device.info
    except DeviceError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the opener gave {device!r}, whose `info` raises {type(error).__name__}: {error}; allowed: a device, or a "
            "platform that holds it"
        ) from error
    if not isinstance(info, DeviceInfo):
        raise ConfigurationError(f"the opener gave {device!r}, whose `info` is a {type(info).__name__}, no DeviceInfo")
    return info


def _picked(platform: Platform, name: str | None) -> Device:
    if name is not None:
        return platform.device(name)
    if len(platform.devices) == 1:
        return next(iter(platform.devices.values()))
    raise ConfigurationError(
        f"platform {platform.name} has several devices; say which one to test: {nearest('', list(platform.devices))}"
    )


def _parts(segment: Segment, largest: int) -> Iterator[Segment]:
    """The segment in pieces of at most `largest` bytes, cut between spans where that is enough."""
    if not largest or segment.spans.nbytes <= largest:
        yield segment
        return
    for offset, nbytes in segment.spans.array.tolist():
        for start in range(0, nbytes, largest):
            yield segment.region.at(offset + start, min(largest, nbytes - start))


def copies(subject: Subject, source: str, target: str) -> list[Lane]:
    """Queues that copy from one memory to the other."""
    reach = {(lane.device.info.name, lane.queue) for lane in subject.lanes(target, "copy")}
    return [lane for lane in subject.lanes(source, "copy") if (lane.device.info.name, lane.queue) in reach]
