"""The nvme driver: a file, a block device or an NVMe namespace as a persistent block memory.

Files and block devices are reached with O_DIRECT through io_uring or pread and pwrite, the generic character device of
a namespace (/dev/ngXnY) with NVMe passthrough through io_uring or ioctl. docs/nvme.md says when to take which.

One memory, on a grid that was probed, and one executor of kind `dma` that reaches it and those memories whose regions
the host has mapped (option `reaches`); between two of those it is the queue's thread that copies. Every queue has a
thread of its own with its own ring.

What must hold beyond the device contract:

- Nothing is better than it says. How bytes travel stands in `info.notes`: `io` (io_uring, posix or ioctl), `direct`
  (true or false), `why` (each wish that was not granted, with the reason), and `cache` where the page cache may serve
  reads.
- `alloc` gives zeroed bytes whose space is reserved, so a full disk is an OutOfMemory of `alloc`, not of a write.
- When a `Flush` has completed, everything that had completed before it is durable.
- `media_nbytes` is what was asked of the medium and moved, repeated parts of resumed transfers included. Where the
  page cache stands in between, `counts.buffered_nbytes` says so, and `counts.cached_nbytes` what it served of reads.
- A namespace or disk that somebody has mounted or holds is never opened, and one whose media are read-only is never
  written to.
- No wait is longer than `deadline_s` without progress. If the kernel does not even give transfers back after that, the
  device is `Gone`, and their memory is kept for as long as the process lives.
- The medium has one owner, which is one process: in a process that it forks the device is Gone, because the threads
  behind its queues are not there. What `close` leaves behind is durable only as far as it was flushed.

Options: `path`; `capacity` in bytes (default: all); `create` makes or grows a sparse file; `io` = auto, io_uring,
posix or ioctl; `direct`; `register` host memory with io_uring; `depth` transfers in flight per queue; `queues`;
`reaches`, names of host-mapped memories; `deadline_s`; `retries` of what passes, per transfer; `latency_ns`,
`read_bytes_per_s`, `write_bytes_per_s` for estimates until something was measured; `folder` that a relative path starts
from (the registry sets it).

The first `capacity` bytes of an existing medium belong to the device: allocating overwrites them. `probe` says what
could be done with a path, without changing anything, and `nvme_drives` which drives there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from tierloop.devices.commands import Command, Flush, Traffic, read_segments, segments, verb, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check, check_alignment
from tierloop.devices.drivers.arena import Arena, whole
from tierloop.devices.drivers.crew import Crew
from tierloop.devices.drivers.engines import Counts, Stopped
from tierloop.devices.drivers.estimates import Costs
from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.medium import PAGE, Medium
from tierloop.devices.drivers.nvme_drive import condition
from tierloop.devices.drivers.nvme_drives import NvmeController, NvmeNamespace, nvme_drives
from tierloop.devices.drivers.nvme_identity import Health, Identity
from tierloop.devices.drivers.nvme_namespace import NamespaceMedium
from tierloop.devices.drivers.nvme_options import Options
from tierloop.devices.drivers.nvme_probe import Reason, probe
from tierloop.devices.drivers.opening import open_medium
from tierloop.devices.drivers.worker import Outcome
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Gone,
    OutOfRange,
    Timeout,
    Unsupported,
)
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.placement import Placements
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System

__all__ = [
    "Health",
    "Identity",
    "NvmeController",
    "NvmeDevice",
    "NvmeNamespace",
    "Reason",
    "nvme_drives",
    "open_nvme",
    "probe",
]

_COMMANDS_PER_QUEUE = 4096
_REGISTERED_NBYTES = 256 << 20
"""How much memory one queue pins at most where `register` is on."""


def open_nvme(name: str, site: Site, options: dict[str, Any], system: System = HOST) -> NvmeDevice:
    """Open a file, block device or namespace; `system` is the operating system to reach it through.

    Raises ConfigurationError (options, virtual clock), NotPresent, NoPermission, Unsupported (a directory, a format
    that is not served, what `io` demands and is not there), Busy (another owner, mounted), OutOfMemory, MediaError,
    ProtocolError (a drive whose tables cannot be), Gone, Timeout.
    """
    checked = Options.of(name, options)
    if site.clock.virtual:
        raise ConfigurationError(f"{name} is a real device and cannot run on the virtual clock; use the wall clock")
    with ExitStack() as undo:
        medium = open_medium(name, checked.wish(), system, undo)
        device = NvmeDevice(name, site, checked, medium)
        undo.pop_all()
        return device


open_nvme.takes_folder = True  # type: ignore[attr-defined]  # for the registry


class NvmeDevice:
    """An opened medium as a device; made by `open_nvme`."""

    def __init__(self, name: str, site: Site, options: Options, medium: Medium | NamespaceMedium) -> None:
        self._name = name
        self._clock = site.clock
        self._medium = medium
        self._extents = Extents(medium.capacity, max(PAGE, medium.target.grid))
        self._offsets: dict[Region, int] = {}
        self._costs = Costs(options.declared())
        self._outcomes: deque[Outcome] = deque()
        self._gone = ""
        self._closing = False
        self._useful_nbytes = 0
        self._placements = Placements.of(site)
        warnings, self._read_only = condition(medium.drive, medium.read_only)
        medium.why += warnings
        self._crew = Crew(
            medium.target,
            options.io,
            options.depth,
            options.queues,
            self._offsets.get,
            self._clock,
            self._report,
            _REGISTERED_NBYTES if options.register else 0,
            self._registered,
        )
        if medium.in_flight is not None and options.depth > medium.in_flight:
            medium.why.append(f"depth = {options.depth}: the kernel keeps {medium.in_flight} requests at this disk")
        if options.register and (self._crew.io != "io_uring" or medium.target.namespace is not None):
            medium.why.append("register = true registers nothing: only io_uring on files and block devices does")
        self._why = medium.why + self._crew.why
        self._info = _describe(name, options, medium, self._crew, self._extents.capacity)
        self._arena = Arena(name, self._info.memories[0], self._extents.grid, os.getpid())
        self._queues = QueueSet(name, options.queues, _COMMANDS_PER_QUEUE, site, self._start)

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do; `why` also says which memory could not be registered so far."""
        refused = self._crew.refusals()
        if not refused:
            return self._info
        return replace(self._info, notes={**self._info.notes, "why": "; ".join([*self._why, *refused])})

    @property
    def identity(self) -> Identity | None:
        """Who the drive says that it is; None for a file, and for a disk that is no NVMe drive or does not say."""
        return self._medium.drive.identity if self._medium.drive is not None else None

    def health(self) -> Health | None:
        """The drive's SMART log as it is now; None where there is no `identity`.

        Raises NoPermission (reading it needs CAP_SYS_ADMIN), Unsupported, Gone, Timeout.
        """
        self._alive("health")
        return self._medium.drive.health() if self._medium.drive is not None else None

    @property
    def counts(self) -> Counts:
        """What the engines of all queues have done so far: transfers, bytes, retries, bounced bytes."""
        made = self._crew.counts()
        made.useful_nbytes = self._useful_nbytes
        return made

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes with their space reserved: first fit, rounded up to whole pages.

        Raises OutOfMemory (the capacity or the disk is spent), OutOfRange, Unsupported (phantom), MediaError, Gone.
        """
        self._alive("alloc")
        self._writable("alloc")
        nbytes = whole(self._name, "alloc", nbytes)
        taken = self._arena.grant(nbytes, memory, phantom)
        offset = self._extents.take(nbytes)
        if offset is None:
            raise self._extents.refusal(self._name, nbytes)
        try:
            self._medium.zero(offset, taken)
        except Timeout:
            raise  # the system call is still out: the extent stays taken, or it might zero its next owner's bytes
        except DeviceError:
            self._medium.give_up_space(offset, taken)
            self._extents.give(offset, nbytes)
            raise
        return self._placed(nbytes, offset)

    def adopt(self, offset: int, nbytes: int) -> Region:
        """The region that an earlier owner of the medium had at `offset`, with its bytes as they are on the medium.

        For memories that outlive a process: nothing is zeroed. Raises OutOfRange, OutOfMemory, Busy (taken), Gone.
        """
        self._alive("adopt")
        offset, nbytes = whole(self._name, "adopt", offset), whole(self._name, "adopt", nbytes)
        if nbytes < 1 or offset < 0 or offset % self._extents.grid or offset + nbytes > self._extents.capacity:
            raise OutOfRange(
                self._name,
                "adopt",
                f"[{offset}, {offset + nbytes}) of {self._extents.capacity} bytes; it starts on a multiple of "
                f"{self._extents.grid}",
            )
        if not self._extents.take_at(offset, nbytes):
            raise Busy(self._name, "adopt", f"[{offset}, {offset + nbytes}) belongs to another region")
        return self._placed(nbytes, offset)

    def offset_of(self, region: Region) -> int:
        """Where a region lies on the medium, in bytes: what `adopt` takes. Raises OutOfRange."""
        return self._own(region, "offset_of")

    def disown(self, region: Region) -> None:
        """Let go of an adopted region; its bytes stay as they are. Raises OutOfRange, Busy, Gone."""
        self._alive("disown")
        self._arena.remove(region, self._queues.uses(region))
        self._extents.give(self._offsets.pop(region), region.nbytes)

    def free(self, region: Region) -> None:
        """Give a region's bytes back, to the file system as well; a medium that only reads keeps them.

        Raises OutOfRange, Busy, Gone, MediaError.
        """
        self._alive("free")
        self._arena.remove(region, self._queues.uses(region))
        offset = self._offsets.pop(region)
        try:
            if not self._read_only:
                self._medium.release(offset, self._extents.rounded(region.nbytes))
        except Timeout:
            raise  # as in alloc: the hole may yet be punched
        except DeviceError:
            self._extents.give(offset, region.nbytes)
            raise
        self._extents.give(offset, region.nbytes)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises OutOfRange, Misaligned, Unsupported, Busy or Gone."""
        return self._queues.submit(command, queue, after, self._check(command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the command would cost: measured where its kind was seen before, declared or assumed otherwise."""
        self._check(command, queue)
        return self._costs.estimate(_kind(command, self._name), _nbytes(command))

    def poll(self) -> None:
        """Settle what the workers have reported."""
        while self._outcomes:
            completion, error, media_nbytes, cached_nbytes, duration_ns, stuck = self._outcomes.popleft()
            completion.media_nbytes, completion.cached_nbytes = media_nbytes, cached_nbytes
            if isinstance(error, Stopped):
                continue  # closing the queues ends it, like those that never started
            if stuck or isinstance(error, Gone):
                self._gone = self._gone or str(error)
            if error is None:
                self._useful_nbytes += _nbytes(completion.command)
                self._costs.observe(_kind(completion.command, self._name), _nbytes(completion.command), duration_ns)
            self._queues.finish(completion, error)

    def close(self) -> None:
        """Cut running commands short and release the medium; raises the first error that nobody looked at.

        Waits for transfers in flight, `deadline_s` and a little at most; if they are still out then, the medium stays
        open and locked, because the kernel may still write to it. In a process that was forked, only its copies of
        the descriptors are closed.
        """
        if self._closing:
            return
        self._closing = True
        if self._arena.forked:
            self._medium.close()
            return
        released = self._crew.leave()
        self.poll()
        self._arena.close()
        try:
            self._queues.close()
        finally:
            if released:
                self._medium.close()

    def _start(self, completion: Completion) -> None:
        if self._gone:
            raise Gone(self._name, verb(completion.command), self._gone)
        if not self._closing:
            self._crew.hand(completion)

    def _report(self, outcome: Outcome) -> None:
        """Called by workers: queue the outcome and have the clock's thread settle it."""
        self._outcomes.append(outcome)
        self._clock.post(self.poll)

    def _alive(self, op: str) -> None:
        if self._closing:
            raise Gone(self._name, op, "the device is closed")
        self._arena.alive(op)
        if self._gone:
            raise Gone(self._name, op, self._gone)

    def _writable(self, op: str) -> None:
        if self._read_only:
            raise Unsupported(self._name, op, self._read_only)

    def _registered(self, region: Region) -> None:
        """Called by workers when a region's pages have been pinned, which may have moved them."""
        self._placements.registered(region)

    def _placed(self, nbytes: int, offset: int) -> Region:
        region = self._arena.add(nbytes)
        self._offsets[region] = offset
        return region

    def _own(self, region: Region, op: str) -> int:
        offset = self._offsets.get(region)
        if offset is None:
            raise OutOfRange(self._name, op, f"{region} is not allocated here")
        return offset

    def _check(self, command: Command, queue: int) -> Traffic:
        """What can be seen beforehand. Raises Gone, OutOfRange, Misaligned or Unsupported."""
        op = verb(command)
        self._alive(op)
        traffic = check(self._info, command, queue)
        check_alignment(self._info, command, self._name, self._medium.target.grid)
        for region, _ in segments(command):
            if region.memory == self._name:
                self._own(region, op)
            elif region.view is None or region.view.nbytes < region.nbytes or not region.view.flags.c_contiguous:
                raise Unsupported(self._name, op, f"{region} is not mapped by the host")
        for region, _ in write_segments(command):
            if region.memory == self._name:
                self._writable(op)
            if region.view is not None and not region.view.flags.writeable:
                raise OutOfRange(self._name, op, f"{region} is read-only")
        return traffic


def _nbytes(command: Command) -> int:
    """Bytes that a command moves, per side; 0 for a flush."""
    return sum(spans.nbytes for _, spans in read_segments(command) or write_segments(command))


def _kind(command: Command, memory: str) -> str:
    """What a command asks of the medium: read, write, copy (both), flush; `host` where it is not on it at all."""
    out = any(region.memory == memory for region, _ in read_segments(command))
    into = any(region.memory == memory for region, _ in write_segments(command))
    if out or into:
        return "copy" if out and into else "read" if out else "write"
    return "flush" if isinstance(command, Flush) else "host"


def _describe(name: str, options: Options, medium: Medium | NamespaceMedium, crew: Crew, capacity: int) -> DeviceInfo:
    notes = {
        "path": medium.path,
        "io": crew.io,
        "direct": "true" if medium.direct else "false",
        "why": "; ".join(medium.why + crew.why) or "everything that was asked for was granted",
        "largest_transfer": str(medium.target.largest),
    }
    if not medium.direct:
        counted = "counted" if medium.target.cache_known else "not known"
        notes["cache"] = f"buffered: reads may be served by the page cache; how many of their bytes were is {counted}"
        notes["media_bytes"] = "unknown: the page cache serves and extends reads and gathers writes"
    if medium.drive is not None:
        who = medium.drive.identity
        notes["drive"] = f"{who.model}, serial {who.serial}, firmware {who.firmware}, namespace {who.nsid}"
    own = Path(name, options.latency_ns, options.read_bytes_per_s, options.write_bytes_per_s, mlp=options.depth)
    executor = ExecutorInfo(
        name="dma",
        kind="dma",
        queues=tuple(range(options.queues)),
        verbs=frozenset({"read", "write", "copy", "flush"}),
        paths=(own, *(Path(memory, 0, 0, 0) for memory in options.reaches)),
        depth=_COMMANDS_PER_QUEUE,
    )
    memory = MemoryInfo(name, capacity, medium.target.grid, byte_addressable=False, persistent=True)
    return DeviceInfo(
        name=name,
        kind="nvme",
        provenance="real",
        memories=(memory,),
        executors=(executor,),
        numa_node=medium.numa_node,
        bus_address=medium.bus_address,
        model=medium.target.system.model,
        notes=notes,
    )
