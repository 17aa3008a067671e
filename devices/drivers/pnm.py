"""The pnm driver: a near-memory processor behind a shared window, driven over a command ring (docs/pnm.md).

One memory, the device's own, in which regions are contiguous; and two executors. `engines` launches the kernels that
the device offers, on operands in that memory. `dma` reads, writes, copies and flushes; it reaches the memory through
the window, and memories whose regions the host has mapped (option `reaches`).

What must hold beyond the device contract:

- A model never stands in: the driver opens the window at `path`, or is handed one by code.
- Bytes that were written are visible to the engines when the `Write` has completed: every write is followed by an ADD,
  whose checksum the device compares with what it sees. What a `Read` gives is what the device says that it showed.
- Only one transfer at a time uses the window's lines of a region: a device that is not coherent must not show a result
  over bytes that the host is writing.
- No wait is longer than `deadline_ms`. After that the device is `Gone`, and so are its commands.
- Whatever the device answers is checked first (pnm_session.py). What does not fit is refused with the limit: arguments,
  the engines' SRAM, the capacity.
- There is no thread: the driver looks at the completion ring when it is polled, and has itself polled while commands
  are open.

Options: `path`; `window_nbytes` (a file's size where that is left out; a character device needs it); `queues` of each
executor (2); `reaches`, names of host-mapped memories; `deadline_ms` (30,000); `folder` that a relative path starts
from.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tierloop.devices.commands import (
    VERBS,
    Command,
    Launch,
    Traffic,
    segments,
    verb,
    write_segments,
)
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.estimates import Costs
from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.failures import as_device_error
from tierloop.devices.drivers.pnm_arguments import (
    DTYPES,
    KERNELS,
    launch_nbytes,
    names_of,
    sram_nbytes,
)
from tierloop.devices.drivers.pnm_options import Options
from tierloop.devices.drivers.pnm_session import Counts, Request, Session, Ticket
from tierloop.devices.drivers.pnm_steps import Planner, Steps
from tierloop.devices.drivers.pnm_transport import Window, open_window
from tierloop.devices.drivers.pnm_wire import (
    LAYOUT_NBYTES,
    Layout,
    Limits,
    Opcode,
    Place,
    WireError,
    pack_drop,
)
from tierloop.devices.errors import (
    ConfigurationError,
    DeviceError,
    Gone,
    NotPresent,
    OutOfRange,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels import MICROKERNEL
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.system import HOST, System, from_os

_COMMANDS_PER_QUEUE = 4096
_SOONEST_NS, _LATEST_NS = 5_000, 500_000
"""The time between two looks at the completion ring; it doubles while nothing comes."""


def open_pnm(
    name: str,
    site: Site,
    options: dict[str, Any],
    system: System = HOST,
    window: Window | None = None,
    identity: tuple[int, int] | None = None,
) -> PnmDevice:
    """Open a window and begin a session; `system` maps the window at `path`, `window` is used instead of one.

    Raises ConfigurationError (options, virtual clock), NotPresent (nothing there, or no window of a near-memory
    processor), NoPermission, Busy (another owner), Misaligned, Unsupported (no version in common), ProtocolError or
    Gone (it does not answer). `identity` is the session's number and nonce, random where left out.
    """
    checked = Options.of(name, options, needs_path=window is None)
    if site.clock.virtual:
        raise ConfigurationError(f"{name} is a real device and cannot run on the virtual clock; use the wall clock")
    with ExitStack() as undo:
        if window is None:
            window = open_window(name, checked.path, checked.window_nbytes, system, checked.caches)
        undo.callback(window.close)
        layout = _layout(name, window)
        identity = identity or (secrets.randbits(32), secrets.randbits(32))
        session = Session(name, window, layout, site.clock, checked.deadline_ms * 1_000_000, identity)
        device = PnmDevice(name, site, checked, session, session.hello(), window.model)
        undo.pop_all()
        return device


open_pnm.takes_folder = True  # type: ignore[attr-defined]  # for the registry


@dataclass(eq=False)
class _Job:
    """A command under way: its steps, the regions whose lines it uses alone, and the request that it waits for."""

    completion: Completion
    steps: Steps
    claims: frozenset[Region]
    begun: bool = False
    over: bool = False
    ticket: Ticket | None = None


class PnmDevice:
    """A near-memory processor with an open session; made by `open_pnm`."""

    def __init__(
        self, name: str, site: Site, options: Options, session: Session, limits: Limits, model: str = ""
    ) -> None:
        self._name = name
        self._clock = site.clock
        self._session = session
        self._limits = limits
        self._info = _describe(name, options, limits, model)
        self._extents = Extents(limits.capacity, limits.grid)
        self._arena = Arena(name, self._info.memories[0], limits.grid, os.getpid())
        self._places: dict[Region, int] = {}
        self._costs = Costs({})
        self._jobs: list[_Job] = []
        self._claimed: set[Region] = set()
        self._pause_ns = _SOONEST_NS
        self._due_ns: int | None = None
        self._closing = False
        self._planner = Planner(name, session, limits, self._places)
        self._queues = QueueSet(name, 2 * options.queues, _COMMANDS_PER_QUEUE, site, self._start)

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do, as it said when the session began."""
        return self._info

    @property
    def counts(self) -> Counts:
        """What the session has sent, taken and passed over."""
        return self._session.counts

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed, contiguous bytes: first fit, rounded up to the device's grid.

        Raises OutOfMemory, OutOfRange, Unsupported (phantom), Gone or ProtocolError.
        """
        self._alive("alloc")
        self._arena.grant(nbytes, memory, phantom)
        offset = self._extents.take(nbytes)
        if offset is None:
            raise self._extents.refusal(self._name, nbytes)
        region = self._arena.add(nbytes)
        self._places[region] = offset
        try:
            place = Place(region.id, offset, self._extents.rounded(nbytes))
            self._session.ask(Request(Opcode.REGION_ADD, "alloc", place.pack(), nbytes=0))
        except DeviceError as error:
            self._arena.remove(region, False)
            del self._places[region]
            if not isinstance(error, ProtocolError) or self._gives_back(region):
                self._extents.give(offset, nbytes)
            raise
        return region

    def free(self, region: Region) -> None:
        """Give a region's bytes back. Raises OutOfRange, Busy, Gone or ProtocolError."""
        self._alive("free")
        self._arena.remove(region, self._queues.uses(region))
        offset = self._places.pop(region)
        try:
            self._session.ask(_drop(region))
        except ProtocolError:
            if self._gives_back(region):
                self._extents.give(offset, region.nbytes)
            raise
        self._extents.give(offset, region.nbytes)

    def _gives_back(self, region: Region) -> bool:
        """Whether a region that the device may have is its no more: only then another one may lie in its place."""
        try:
            self._session.ask(_drop(region))
        except OutOfRange:  # it does not have it
            return True
        except DeviceError:
            return False
        return True

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises OutOfRange, Unsupported, Busy or Gone."""
        return self._queues.submit(command, queue, after, self._check(command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the command would cost: measured where its kind was seen before, assumed otherwise."""
        self._check(command, queue)
        return self._costs.estimate(verb(command), _nbytes(command))

    def poll(self) -> None:
        """Take the answers that have come, and go on with the commands that they belong to."""
        if self._closing:
            return
        ended = self._session.collect()
        for job in list(self._jobs):
            self._go_on(job)
        self._pause_ns = _SOONEST_NS if ended else min(2 * self._pause_ns, _LATEST_NS)

    def close(self) -> None:
        """Cut running commands short, end the session and let the window go; raises the first error nobody looked at.

        Raises Gone where the device does not answer the GOODBYE within `deadline_ms`. In a process that was forked only
        its view of the window goes: the session is that of the process that began it.
        """
        if self._closing:
            return
        self._closing = True
        if self._arena.forked:
            self._session.window.close()
            return
        self._jobs.clear()
        self._arena.close()
        try:
            if self._session.broken is None:
                self._session.goodbye()
        finally:
            self._session.window.close()
            self._queues.close()

    # -- checking ------------------------------------------------------------------------------------------------

    def _alive(self, op: str) -> None:
        if self._closing:
            raise Gone(self._name, op, "the device is closed")
        self._arena.alive(op)
        if self._session.broken is not None:
            raise Gone(self._name, op, self._session.broken.detail)

    def _check(self, command: Command, queue: int) -> Traffic:
        """What can be seen beforehand. Raises Gone, OutOfRange or Unsupported."""
        op = verb(command)
        self._alive(op)
        traffic = check(self._info, command, queue)
        for region, _ in segments(command):
            if region.memory == self._name:
                if region not in self._places:
                    raise OutOfRange(self._name, op, f"{region} is not allocated here")
            elif region.view is None:
                raise Unsupported(self._name, op, f"{region} is not mapped by the host")
        for region, _ in write_segments(command):
            if region.view is not None and not region.view.flags.writeable:
                raise OutOfRange(self._name, op, f"{region} is read-only")
        if isinstance(command, Launch):
            self._check_limits(command)
        return traffic

    def _check_limits(self, launch: Launch) -> None:
        """Raises Unsupported for a launch that the device could never take."""
        op, limits = verb(launch), self._limits
        needed = sram_nbytes(launch.args)
        if needed > limits.sram_nbytes:
            detail = f"a job of it takes {needed} bytes; the SRAM of an engine has {limits.sram_nbytes}"
            raise Unsupported(self._name, op, detail)
        spans = sum([len(s.spans) for operand in (*launch.reads, *launch.writes) for s in operand])
        if spans > limits.most_spans:
            raise Unsupported(self._name, op, f"{spans} spans; the device takes {limits.most_spans} in one command")
        nbytes = launch_nbytes(launch)
        if nbytes > limits.largest_arguments:
            detail = f"its arguments take {nbytes} bytes; the device takes {limits.largest_arguments}"
            raise Unsupported(self._name, op, detail)

    # -- carrying out --------------------------------------------------------------------------------------------

    def _start(self, completion: Completion) -> None:
        if self._session.broken is not None:
            raise Gone(self._name, verb(completion.command), self._session.broken.detail)
        if not self._closing:
            steps, claims = self._planner.plan(completion)
            self._jobs.append(_Job(completion, steps, claims))
            self._pause_ns = _SOONEST_NS
            self._look_again(0)

    def _go_on(self, job: _Job) -> None:
        """Take a job's next step if it can; ends its command when there is none."""
        ticket, op = job.ticket, verb(job.completion.command)
        if job.over:  # what another job's end set off has polled as well
            return
        if not job.begun:
            if job.claims & self._claimed:
                return
            self._claimed |= job.claims
            job.begun = True
        elif ticket is None or not ticket.done:
            return
        error: DeviceError | None = None
        try:
            if ticket is not None and ticket.error is not None:
                raise ticket.error
            request = next(job.steps) if ticket is None else job.steps.send(ticket)
            job.ticket = self._session.offer(request)
            return
        except StopIteration:
            error = guard.loss(self._name, job.completion.command)
        except WireError as wrong:
            error = OutOfRange(self._name, op, str(wrong))
        except Exception as wrong:
            error = as_device_error(self._name, op, wrong)
        self._end(job, error)

    def _end(self, job: _Job, error: DeviceError | None) -> None:
        job.over = True
        self._jobs.remove(job)
        self._claimed -= job.claims
        completion = job.completion
        self._queues.finish(completion, error)
        if error is None:
            duration_ns = completion.ended_ns - completion.started_ns
            self._costs.observe(verb(completion.command), _nbytes(completion.command), duration_ns)

    def _look_again(self, pause_ns: int) -> None:
        """Have the device polled after a pause, unless that happens sooner anyway."""
        due_ns = self._clock.now() + pause_ns
        if self._due_ns is None or due_ns < self._due_ns:
            self._due_ns = due_ns
            self._clock.call_at(due_ns, self._tick, due_ns)

    def _tick(self, due_ns: int) -> None:
        if due_ns != self._due_ns:  # a sooner one has taken its place
            return
        self._due_ns = None
        try:
            self.poll()
        finally:  # whatever a follower raised: the others still wait for their answers
            if self._jobs and not self._closing:
                self._look_again(self._pause_ns)


def _drop(region: Region) -> Request:
    return Request(Opcode.REGION_DROP, "free", pack_drop(region.id), nbytes=0)


def _nbytes(command: Command) -> int:
    """What a command's cost grows with: the bytes that it moves, on both sides."""
    traffic = Traffic(command)
    return sum(traffic.read.values()) + sum(traffic.written.values())


def _layout(name: str, window: Window) -> Layout:
    """What stands at the start of a window. Raises NotPresent, Gone or ProtocolError."""
    first = np.empty(LAYOUT_NBYTES, dtype=np.uint8)
    if window.nbytes < LAYOUT_NBYTES:
        raise NotPresent(name, "open", f"a window of {window.nbytes} bytes; its layout alone has {LAYOUT_NBYTES}")
    try:
        window.read(Spans.one(0, LAYOUT_NBYTES), first)
    except OSError as error:
        raise from_os(name, "open", error, "the window cannot be read") from error
    if (first == 0xFF).all():
        raise Gone(name, "open", "the window reads as ones: the device has left the bus")
    try:
        layout = Layout.unpack(first.tobytes())
    except WireError as error:
        raise NotPresent(name, "open", f"no near-memory processor is there: {error}") from error
    if layout.window_nbytes > window.nbytes:
        raise ProtocolError(
            name, "open", f"the device lays out {layout.window_nbytes} bytes, and the window has {window.nbytes}"
        )
    return layout


def _describe(name: str, options: Options, limits: Limits, model: str) -> DeviceInfo:
    own = partial(Path, latency_ns=0, read_bytes_per_s=0, write_bytes_per_s=0, coherence="host-only")
    engines = ExecutorInfo(
        name="engines",
        kind="pnm",
        queues=tuple(range(options.queues)),
        verbs=frozenset(),
        kernels=names_of(KERNELS, limits.kernels),
        dtypes=names_of(DTYPES, limits.dtypes),
        paths=(own(name),),
        depth=_COMMANDS_PER_QUEUE,
    )
    dma = ExecutorInfo(
        name="dma",
        kind="dma",
        queues=tuple(range(options.queues, 2 * options.queues)),
        verbs=frozenset(VERBS.values()),
        paths=(own(name), *(Path(memory, 0, 0, 0) for memory in options.reaches)),
        depth=_COMMANDS_PER_QUEUE,
    )
    notes = {
        "path": options.path or "a window that was handed in",
        "protocol": str(limits.version),
        "engines": str(limits.engines),
        "sram_nbytes": str(limits.sram_nbytes),
    }
    memory = MemoryInfo(name, limits.capacity // limits.grid * limits.grid)
    ours = limits.arithmetic.microkernel == MICROKERNEL  # of another one nobody knows the order of sums
    arithmetic = replace(limits.arithmetic, cut_invariant=ours)
    return DeviceInfo(name, "pnm", "real", (memory,), (engines, dma), arithmetic=arithmetic, model=model, notes=notes)
