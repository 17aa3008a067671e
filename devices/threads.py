"""Threads: starting one where the process may have no more of them, and the signal that each must let in."""

from __future__ import annotations

import signal
import threading


class NoThread(Exception):
    """No further thread may be started. Python says only that it could not."""

    def __init__(self) -> None:
        super().__init__(
            "no further thread can be started: `ulimit -u`, pids.max of the cgroup, or memory for its stack "
            "(`ulimit -v`) forbid it"
        )


def begin(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise NoThread from error


def let_in() -> None:
    """Let this thread have SIGBUS, also if whoever started it blocks all signals.

    A thread that touches memory which may be lost (drivers/guard.py) must: where the signal is blocked, Linux ends the
    process whoever would answer.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGBUS})
