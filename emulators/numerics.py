"""Where the bytes are moved and the kernels run that an emulated command stands for.

On the virtual clock that happens when the command ends, on the clock's thread: results appear at completion, and a
command that forgot a dependency reads what was there before. The wall clock comes as close to that as it can:

- Kernels begin when the command starts, on a thread of a small pool (they release the GIL), and the completion is held
  until both the work is done and the time has come. What they write is kept aside and put in its place then, if it is
  `ASIDE_NBYTES` at most.
- Transfers of that size are done when their time has come. Larger ones of engines begin on a thread as late as the
  host's copy rate allows.
- What cores do (load and store) is paced: it goes tile by tile over the whole of its time, on a thread of its own,
  because it would occupy a core that long. A large transfer can be seen coming, as it could in reality.

Order is safe either way: nothing that comes after a command starts before it has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import set_timer_slack
from tierloop.devices.commands import Command, Copy, Launch, Operand, Read, Write, verb
from tierloop.devices.errors import DeviceError, OutOfRange, ProtocolError, Timeout
from tierloop.devices.host_speed import host_speed
from tierloop.devices.regions import Region
from tierloop.emulators.fabric import Fabric

if TYPE_CHECKING:
    from tierloop.devices.kernels.pace import Pace

ASIDE_NBYTES = 256 << 10
"""Copying so much when a command should end takes 25 to 50 µs, as much as a hand-over to a thread."""
COPY_MARGIN = 3
"""A large transfer begins this many times earlier than an idle host needs for it, and `COPY_EARLY_NS` more."""
COPY_EARLY_NS = 500_000
SWITCH_S = 50e-6
"""How long a thread may keep the interpreter from another. Python's 5 ms would let the runtime, while it submits the
next commands, hold up the workers that the time of the present ones is running for."""
CLOSE_TIMEOUT_S = 60

MOST_PACED = 256
"""Commands that keep a pace at the same time, each on a thread that mostly sleeps."""

Outcome = tuple[int, DeviceError | None]
"""Floating-point operations done, and why it failed."""

Aside = list[tuple[Operand, NDArray[np.uint8]]]
"""What a kernel has written, and where it belongs."""


class Numerics:
    """Runs commands against the bytes of the fabric's memories; shared by the devices of a site."""

    def __init__(self, fabric: Fabric) -> None:
        self._bytes_of = fabric.regions.__getitem__
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        self._kernels: tuple[Callable[..., int], Callable[..., None]] | None = None
        if not fabric.clock.virtual:
            self._load()  # a kernel that compiles while its time runs would break the promise
            self._learn_host(fabric)
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))

    @classmethod
    def of(cls, fabric: Fabric) -> Numerics:
        """The site's numerics."""
        shared = fabric.site.shared
        if "numerics" not in shared:
            shared["numerics"] = cls(fabric)
        numerics = shared["numerics"]
        assert isinstance(numerics, Numerics)
        return numerics

    def now(self, device: str, command: Command) -> Outcome:
        """Carry a command out on this thread."""
        return self._carry_out(device, command, self._cores)

    def is_small(self, command: Command) -> bool:
        """Whether a command is done when its time has come, since a thread is not worth its while."""
        return isinstance(command, (Read, Write, Copy)) and _nbytes(command) <= ASIDE_NBYTES

    def begin(
        self, device: str, command: Command, aside: Aside, done: Callable[[Outcome], None], pace: Pace | None = None
    ) -> Future[None]:
        """Carry a command out on a thread; `done` is called there.

        Where there is a pace, kernels and the transfers of cores keep it, and those of engines begin at its end. What
        goes to `aside` has to be put in its place with `settle`.
        """
        paced = pace is not None
        if paced not in self._pools:
            threads = MOST_PACED if paced else self._cores
            self._pools[paced] = ThreadPoolExecutor(threads, "paced" if paced else "emulator", set_timer_slack)
        if isinstance(command, Launch):
            command = _kept_aside(command, aside)
        return self._pools[paced].submit(lambda: done(self._at_pace(device, command, pace)))

    def copy_ns(self, command: Command) -> int:
        """How long a transfer takes on this host when it is idle. On the wall clock only."""
        assert isinstance(command, (Read, Write, Copy))
        return self._host_ns(_nbytes(command))

    def lead_ns(self, command: Command) -> int:
        """How long before its end a large transfer begins. On the wall clock only."""
        assert isinstance(command, (Read, Write, Copy))
        return COPY_EARLY_NS + self._host_ns(COPY_MARGIN * _nbytes(command))

    def _host_ns(self, nbytes: int) -> int:
        """How long this host takes to read and write so many bytes."""
        return 2 * nbytes * 1_000_000_000 // self._host_bytes_per_s

    def settle(self, device: str, command: Command, aside: Aside, outcome: Outcome) -> Outcome:
        """Put what was kept aside in its place; returns the outcome, with an error if that failed."""
        if outcome[1] is not None:
            return outcome
        for operand, written in aside:
            at = 0
            for segment in operand:
                part = written[at : at + segment.spans.nbytes]
                at += part.nbytes
                error = self._carry_out(device, Write(segment, part), 1)[1]
                if error is not None:
                    return outcome[0], error
        return outcome

    def leave(self, device: str, running: list[Future[None]]) -> None:
        """Wait for a device's running work, so that no buffer is touched after it was closed. Raises Timeout."""
        for future in running:
            future.cancel()  # what has not begun need not
        if wait(running, CLOSE_TIMEOUT_S).not_done:
            raise Timeout(device, "close", f"a kernel was still running after {CLOSE_TIMEOUT_S} s")

    def close(self) -> None:
        """End the threads; they are made again when they are needed."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        self._pools.clear()

    def _load(self) -> tuple[Callable[..., int], Callable[..., None]]:
        """The kernels; they compile when they are first needed, and importing them at each command would cost 2 µs."""
        from tierloop.devices.kernels.copying import copy_bytes
        from tierloop.devices.kernels.launching import run

        self._kernels = (run, copy_bytes)
        return self._kernels

    def _learn_host(self, fabric: Fabric) -> None:
        """Measure cycle counter and memory now: at the first command they would take 50 and 300 ms of its time."""
        from tierloop.devices.kernels.pace import ticks_per_ns

        ticks_per_ns()
        self._host_bytes_per_s = fabric.site.shared["host_bytes_per_s"] = host_speed().traffic_bytes_per_s

    def _at_pace(self, device: str, command: Command, pace: Pace | None) -> Outcome:
        if pace is None:
            return self._carry_out(device, command, 1)
        from tierloop.devices.kernels.pace import keeping

        if pace.is_late_start:
            pace.wait(1, 1)
            return self._carry_out(device, command, 1)
        with keeping(pace):
            return self._carry_out(device, command, 1)

    def _carry_out(self, device: str, command: Command, threads: int) -> Outcome:
        run, copy_bytes = self._kernels or self._load()
        try:
            if isinstance(command, Launch):
                return run(command, self._bytes_of, threads), None
            copy_bytes(command, self._bytes_of)
            return 0, None
        except DeviceError as error:
            return 0, error
        except Exception as error:
            op = verb(command)
            if isinstance(error, ValueError) and op != "dense":  # what kernels find wrong in a launch
                failure: DeviceError = OutOfRange(device, op, str(error))
            else:
                failure = ProtocolError(device, op, f"it failed while it ran: {error!r}")
            failure.__cause__ = error
            return 0, failure


def _kept_aside(command: Launch, aside: Aside) -> Launch:
    """The launch with operands of its own to write to, where they are small."""
    if sum([segment.spans.nbytes for operand in command.writes for segment in operand]) > ASIDE_NBYTES:
        return command
    writes = []
    for operand in command.writes:
        nbytes = sum([segment.spans.nbytes for segment in operand])
        if nbytes:
            written = np.zeros(nbytes, dtype=np.uint8)
            aside.append((operand, written))
            operand = (Region("aside", "aside", len(aside), nbytes, view=written).all(),)
        writes.append(operand)
    return Launch(command.args, command.reads, tuple(writes))


def _nbytes(command: Read | Write | Copy) -> int:
    return (command.target if isinstance(command, Write) else command.source).spans.nbytes
