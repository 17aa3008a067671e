"""Where the bytes are moved and the kernels run that an emulated command stands for.

On the virtual clock that happens when the command ends, on the clock's thread: results appear at completion, and a
command that forgot a dependency reads what was there before. On the wall clock it begins when the command starts, on a
thread of a small pool shared by the site's devices (the kernels release the GIL), and the completion is held until
both the work is done and the time has come; small transfers are done when their time has come, since handing them over
would take longer. What cores do (load and store) is paced: it goes tile by tile over the whole of its time, on a thread
of its own, because it would occupy a core that long. Engines compute as fast as they can. Order is safe either way:
nothing that comes after a command starts before it has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tierloop.devices.clocks import set_timer_slack
from tierloop.devices.commands import Command, Copy, Launch, Read, Write, verb
from tierloop.devices.errors import DeviceError, OutOfRange, ProtocolError, Timeout
from tierloop.emulators.fabric import Fabric

if TYPE_CHECKING:
    from tierloop.devices.kernels.pace import Pace

SMALL_NBYTES = 32 << 10
SWITCH_S = 50e-6
"""How long a thread may keep the interpreter from another. Python's 5 ms would let the runtime, while it submits the
next commands, hold up the workers that the time of the present ones is running for."""
CLOSE_TIMEOUT_S = 60

MOST_PACED = 256
"""Commands that keep a pace at the same time, each on a thread that mostly sleeps."""

Outcome = tuple[int, DeviceError | None]
"""Floating-point operations done, and why it failed."""


class Numerics:
    """Runs commands against the bytes of the fabric's memories; shared by the devices of a site."""

    def __init__(self, fabric: Fabric) -> None:
        self._bytes_of = fabric.regions.__getitem__
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        self._kernels: tuple[Callable[..., int], Callable[..., None]] | None = None
        if not fabric.clock.virtual:
            self._load()  # a kernel that compiles while its time runs would break the promise
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
        return isinstance(command, (Read, Write, Copy)) and _nbytes(command) <= SMALL_NBYTES

    def begin(
        self, device: str, command: Command, done: Callable[[Outcome], None], pace: Pace | None = None
    ) -> Future[None]:
        """Carry a command out on a thread, at a pace if there is one; `done` is called there."""
        paced = pace is not None
        if paced not in self._pools:
            threads = MOST_PACED if paced else self._cores
            self._pools[paced] = ThreadPoolExecutor(threads, "paced" if paced else "emulator", set_timer_slack)
        return self._pools[paced].submit(lambda: done(self._at_pace(device, command, pace)))

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

    def _at_pace(self, device: str, command: Command, pace: Pace | None) -> Outcome:
        if pace is None:
            return self._carry_out(device, command, 1)
        from tierloop.devices.kernels.pace import keeping

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


def _nbytes(command: Read | Write | Copy) -> int:
    return (command.target if isinstance(command, Write) else command.source).spans.nbytes
