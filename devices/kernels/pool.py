"""Threads for one launch: the caller works too, and others help if they come in time.

`share` returns when every thread that began has ended; helpers that did not begin by the time the caller is through
are not waited for, so launches from several threads at once cannot block each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class _Job:
    """One piece of shared work: who has begun, who has ended, and what went wrong."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
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


def _forget() -> None:
    """Threads do not survive a fork."""
    global _jobs, _growing
    _jobs, _growing = SimpleQueue(), threading.Lock()
    _workers.clear()


os.register_at_fork(after_in_child=_forget)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


def share(threads: int, work: Callable[[], object]) -> None:
    """Call `work` on up to `threads` threads at once, the caller's among them; raises the first error of any."""
    if threads <= 1:
        work()
        return
    with _growing:
        while len(_workers) < threads - 1:
            worker = threading.Thread(
                target=_serve, args=(_jobs,), name=f"tierloop-kernel-{len(_workers)}", daemon=True
            )
            worker.start()
            _workers.append(worker)
    job = _Job(work)
    for _ in range(threads - 1):
        _jobs.put(job)
    try:
        work()
    finally:
        job.end()
    if job.errors:
        raise job.errors[0]


_LITTLE = 1 << 18


def worthwhile(threads: int, nbytes: int) -> int:
    """`threads`, or 1 for so few bytes that waking another thread (about 20 µs) costs more than it gains."""
    return threads if nbytes >= _LITTLE else 1
