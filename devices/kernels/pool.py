"""Threads for one launch: the caller works too, and others help if they come in time.

`share` returns when every thread that began has ended; helpers that did not begin by the time the caller is through
are not waited for, so launches from several threads at once cannot block each other. Where several devices compute at
once, helpers are given out only while fewer threads work than the process has cores: who comes later gets fewer.

Helpers run on the cores that the caller may use, so that a thread which is bound to a socket keeps its work there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from tierloop.devices.threads import NoThread, begin, let_in


class _Job:
    """One piece of shared work: who has begun, who has ended, and what went wrong; `cores` are those of its caller."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.cores = cores_of_this_thread()
        self.errors: list[BaseException] = []
        self._state = threading.Condition()
        self._running = 0
        self._over = False

    def help(self) -> None:
        """Take part, unless the work is over."""
        with self._state:
            if self._over:
                return
            self._running += 1
        try:
            self.work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def end(self) -> None:
        """Let nobody begin any more, and wait for those who have."""
        with self._state:
            self._over = True
            while self._running:
                self._state.wait()


_jobs: SimpleQueue[_Job] = SimpleQueue()
_workers: list[threading.Thread] = []
_growing = threading.Lock()
_working = 0
"""Threads that callers have been given, themselves included; changed under `_growing`."""


def _forget() -> None:
    """Threads do not survive a fork."""
    global _jobs, _growing, _working
    _jobs, _growing, _working = SimpleQueue(), threading.Lock(), 0
    _workers.clear()


os.register_at_fork(after_in_child=_forget)


def cores_of_this_thread() -> frozenset[int]:
    """The cores that the system may run this thread on; empty where it does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def bind(cores: frozenset[int]) -> None:
    """Let the system run this thread on these cores only; an empty set leaves it alone.

    Raises OSError for cores that do not exist or that the process may not use.
    """
    if cores and cores != cores_of_this_thread():
        os.sched_setaffinity(0, cores)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    let_in()
    while True:
        job = jobs.get()
        with suppress(OSError):  # the cores were taken away from the process meanwhile: then it works where it is
            bind(job.cores)
        job.help()
        del job  # an idle thread keeps nothing alive


def _grant(threads: int) -> int:
    """Take part of the machine's cores for one caller: how many of `threads` it gets, at least itself."""
    global _working
    with _growing:
        granted = max(1, min(threads, _CORES - _working))
        _working += granted
        while len(_workers) < granted - 1:
            worker = threading.Thread(
                target=_serve, args=(_jobs,), name=f"tierloop-kernel-{len(_workers)}", daemon=True
            )
            try:
                begin(worker)
            except NoThread:  # who is there does the work
                _working -= granted - 1 - len(_workers)
                return 1 + len(_workers)
            _workers.append(worker)
    return granted


def _give_back(granted: int) -> None:
    global _working
    with _growing:
        _working -= granted


def share(threads: int, work: Callable[[], object]) -> None:
    """Call `work` on up to `threads` threads at once, the caller's among them; raises the first error of any."""
    granted = _grant(threads)
    try:
        if granted == 1:
            work()
            return
        job = _Job(work)
        for _ in range(granted - 1):
            _jobs.put(job)
        try:
            work()
        finally:
            job.end()
        if job.errors:
            raise job.errors[0]
    finally:
        _give_back(granted)


_LITTLE = 1 << 20


def worthwhile(threads: int, nbytes: int) -> int:
    """`threads`, or 1 for so few bytes that waking another thread (50 to 100 µs) costs more than it gains."""
    return min(threads, _CORES) if nbytes >= _LITTLE else 1


_CORES = len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Cores of the process, whatever thread imports this first."""
