"""The crew of a device: one worker per queue, all with the same kind of engine, io_uring where there is any.

Files and block devices have pread and pwrite beside it, NVMe passthrough has ioctl.

The kind is settled for all queues when the device is opened, so that what `info.notes` says of it holds for every
command. A refusal is kept in words; with io = auto it leads to the other way, otherwise to an error.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from tierloop.devices.clocks import Clock
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.engines import Counts, Engine, PosixEngine, Target, total
from tierloop.devices.drivers.passthrough import CommandEntries, IoctlEngine
from tierloop.devices.drivers.ring import refusal
from tierloop.devices.drivers.uring import UringEngine
from tierloop.devices.drivers.worker import Outcome, Worker
from tierloop.devices.errors import DeviceError, NoPermission, Timeout, Unsupported
from tierloop.devices.regions import Region

_GRACE_S = 2.0
"""How much longer than the deadline of one wait leaving may take: a cancellation is waited for 1 s."""


class Crew:
    """Workers by queue; `io` says which engine they have, `why` what was refused on the way."""

    def __init__(
        self,
        target: Target,
        io: str,
        depth: int,
        queues: int,
        place: Callable[[Region], int | None],
        clock: Clock,
        report: Callable[[Outcome], None],
        register_nbytes: int = 0,
        registered: Callable[[Region], None] | None = None,
    ) -> None:
        """`io` is auto, io_uring, posix (files and block devices) or ioctl (NVMe passthrough).

        Raises Unsupported or NoPermission where what was demanded is refused.
        """
        self.why: list[str] = []
        self._target = target
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._present = 0
        self._stuck = False
        self._nobody = threading.Event()
        ways = _ways(target, depth, register_nbytes, registered)
        if io not in ("auto", *ways):
            what = "a file or block device" if target.namespace is None else "NVMe passthrough"
            raise Unsupported(target.device, "open", f"io = {io} is not for {what}; {' or '.join(ways)} is")
        for way in ways if io == "auto" else (io,):
            self.io = way
            try:
                for _ in range(queues):
                    self._hire(Worker(target, ways[way], place, clock, report, self._left))
                return
            except DeviceError:
                self._dismiss()
                raise
            except OSError as error:
                self._dismiss()
                self.why.append(refusal(target.system, error))
                if io != "auto":
                    kind = NoPermission if error.errno in (errno.EPERM, errno.EACCES) else Unsupported
                    raise kind(target.device, "open", self.why[0], error.errno) from error
            except Stuck as stuck:
                self._dismiss()
                raise Timeout(target.device, "open", str(stuck), errno.ETIMEDOUT) from stuck

    def hand(self, completion: Completion) -> None:
        """Hand a command to the worker of its queue."""
        self._workers[completion.queue].hand(completion)

    def counts(self) -> Counts:
        """What all engines have done."""
        return total(w.engine.counts for w in self._workers if w.engine is not None)

    def refusals(self) -> list[str]:
        """Why memory could not be registered, so far."""
        return [why for w in self._workers if w.engine is not None for why in w.engine.refusals]

    def leave(self) -> bool:
        """Cut running commands short and end all threads; False if transfers are still out after the deadline."""
        self._target.stop.set()
        for worker in self._workers:
            worker.leave()
        gone = self._nobody.wait(self._target.deadline_s + _GRACE_S)
        return gone and not self._stuck

    def _hire(self, worker: Worker) -> None:
        worker.start()
        self._workers.append(worker)
        self._present += 1

    def _dismiss(self) -> None:
        """Send the idle workers of an attempt that failed away, so that the next can start."""
        for worker in self._workers:
            worker.leave()
        if self._workers:
            self._nobody.wait(self._target.deadline_s)
        self._workers.clear()
        self._nobody.clear()

    def _left(self, stuck: bool) -> None:
        """Called by each worker as its last deed."""
        with self._lock:
            self._present -= 1
            self._stuck = self._stuck or stuck
            if not self._present:
                self._nobody.set()


def _ways(
    target: Target, depth: int, register_nbytes: int, registered: Callable[[Region], None] | None
) -> dict[str, Callable[[], Engine]]:
    """The engines that this kind of medium has, best first."""
    namespace = target.namespace
    if namespace is None:
        return {
            "io_uring": lambda: UringEngine(target, depth, None, register_nbytes, registered),
            "posix": lambda: PosixEngine(target),
        }
    return {
        "io_uring": lambda: UringEngine(target, depth, CommandEntries(target, namespace)),
        "ioctl": lambda: IoctlEngine(target, namespace),
    }
