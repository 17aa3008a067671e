"""Filling the cache of compiled kernels: one process at a time.

Numba names the files of a cache without a lock, so two processes that fill it together could give one file to two
kernels. The lock is a file of this user and cache folder in the system's temporary folder; where there can be none, and
after five minutes, a process goes on without it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # no file locks on this system
    fcntl = None  # type: ignore[assignment]

_PAUSE_S, _TRIES = 0.05, 6000


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Hold the lock, if it can be had."""
    lock = _lock()
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)  # and with it the lock


def _lock() -> int | None:
    if fcntl is None:
        return None
    folder = os.environ.get("NUMBA_CACHE_DIR") or os.path.dirname(os.path.abspath(__file__))
    which = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    path = os.path.join(tempfile.gettempdir(), f"tierloop-kernels-{os.getuid()}-{which}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(_PAUSE_S)
    os.close(lock)
    return None
