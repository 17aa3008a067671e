"""A medium: one file or block device, opened for one owner, with what is known about how it may be reached.

`open_medium` looks before it touches: a directory, a character device, a missing path or a missing permission is
refused before anything is created, and a file that it did create is removed again if the rest fails. What must hold:

- One owner. The file is locked (flock), a block device is also opened O_EXCL, so a mounted one is refused as busy.
- The *grid* is what offsets and sizes of direct transfers must be multiples of. It starts from what the kernel says
  (statx, the logical block size in sysfs) and is confirmed by a real read, because a hole in a file accepts anything.
- Where O_DIRECT is refused, the medium is opened without it and `why` says so. Nothing falls back in silence.
- A file that was created or grown is durable with its name before it is used.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierloop.devices.drivers.deadlines import Stuck, within
from tierloop.devices.drivers.engines import LARGEST_TRANSFER, PosixEngine, Target, room
from tierloop.devices.errors import Busy, ConfigurationError, DeviceError, NotPresent, Timeout, Unsupported
from tierloop.devices.system import (
    PUNCH_HOLE,
    RESERVE,
    SYS_STATX,
    ZERO_RANGE,
    FileStatus,
    System,
    address_of,
    from_os,
)

PAGE = 4096
"""The grid of the page cache, and the smallest unit that regions are placed in."""
_LARGEST_GRID = 65536
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Wish:
    """What the owner asks of a medium: `capacity` in bytes (None: all of it), waits of at most deadline_s."""

    path: str
    capacity: int | None = None
    create: bool = False
    direct: bool = True
    deadline_s: float = 30.0
    retries: int = 64


@dataclass
class Medium:
    """An opened, locked medium of `capacity` usable bytes; `target` is for transfers, `control` holds the lock.

    `why` lists what was wished for and is not so. `bus_address` and `numa_node` come from sysfs, None if not there.
    """

    path: str
    status: FileStatus
    control: int
    capacity: int
    target: Target
    direct: bool
    why: list[str]
    bus_address: str | None = None
    numa_node: int | None = None
    _zeroing: list[int] = field(default_factory=lambda: [ZERO_RANGE, PUNCH_HOLE])

    def zero(self, offset: int, nbytes: int) -> None:
        """Make the bytes read as zeros and reserve their space, so that a full disk shows here and not at a write.

        ZERO_RANGE moves no data where it is offered; next comes a hole that is then reserved; last, zeros are written.
        Raises OutOfMemory when the disk is full, MediaError, Timeout.
        """
        while self._zeroing:
            how = self._zeroing[0]
            try:
                self._allocate(how, offset, nbytes)
            except OSError as error:
                if error.errno in _NOT_OFFERED:
                    self._zeroing.remove(how)
                    continue
                raise from_os(self.target.device, "alloc", error, f"{nbytes} bytes at offset {offset}") from error
            if how == PUNCH_HOLE:
                self._reserve(offset, nbytes)
            return
        self._write_zeros(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Give the blocks of a file back to the file system, where it can take them. Raises MediaError, Timeout."""
        if self.status.kind != "file":
            return
        try:
            self._allocate(PUNCH_HOLE, offset, nbytes)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise from_os(self.target.device, "free", error, f"{nbytes} bytes at offset {offset}") from error

    def close(self) -> None:
        """Close both descriptors, which also unlocks. Raises MediaError if the system reports a loss only now."""
        _close(self.target.system, {self.target.fd, self.control}, self.target.device)

    def _allocate(self, how: int, offset: int, nbytes: int) -> None:
        def call() -> None:
            for _ in range(self.target.retries + 1):
                try:
                    self.target.system.fallocate(self.control, how, offset, nbytes)
                except InterruptedError:
                    continue
                return
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))

        patiently(self.target, "alloc", call)

    def _reserve(self, offset: int, nbytes: int) -> None:
        try:
            self._allocate(RESERVE, offset, nbytes)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise from_os(self.target.device, "alloc", error, f"{nbytes} bytes at offset {offset}") from error

    def _write_zeros(self, offset: int, nbytes: int) -> None:
        zeros = room(self.target, min(nbytes, LARGEST_TRANSFER))
        starts = np.arange(0, nbytes, LARGEST_TRANSFER, dtype=np.int64)
        pieces = np.empty((len(starts), 3), dtype=np.int64)
        pieces[:, 0] = starts + offset
        pieces[:, 1] = address_of(zeros)
        pieces[:, 2] = np.minimum(nbytes - starts, LARGEST_TRANSFER)
        try:
            PosixEngine(self.target).transfer(pieces, write=True)
        except Stuck as stuck:
            raise Timeout(self.target.device, "alloc", str(stuck), errno.ETIMEDOUT) from stuck


def patiently(target: Target, op: str, call: Callable[[], None]) -> None:
    """Make a blocking call with the target's deadline. Raises what it raises, or Timeout."""
    try:
        within(target.deadline_s, call)
    except Stuck as stuck:
        raise Timeout(target.device, op, str(stuck), errno.ETIMEDOUT) from stuck


def open_medium(device: str, wish: Wish, system: System) -> Medium:
    """Open, lock and measure a medium.

    Raises NotPresent, NoPermission, Unsupported (not a file or block device), Busy (another owner), ConfigurationError
    (capacity), OutOfMemory (no room for the file), MediaError or Timeout (the probing read).
    """
    status = _look(device, wish, system)
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if status is None else 0)
    if status is not None and status.kind == "block device":
        flags |= os.O_EXCL
    try:
        control = system.open(wish.path, flags)
    except OSError as error:
        raise from_os(device, "open", error, wish.path) from error
    fds = {control}
    try:
        status = _claim(device, wish, system, control, status)
        capacity, why = _measure(device, wish, system, control, status)
        medium = _reach(device, wish, system, control, status, capacity, fds)
        medium.why[:0] = why
        return medium
    except Timeout:
        raise
    except BaseException:
        _close(system, fds, None)
        raise
