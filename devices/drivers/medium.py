"""A medium: one file or block device that is open and locked, and what is asked of it beside transfers.

Its space is managed through `fallocate`: allocating reserves blocks that read as zeros, releasing gives them back.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tierloop.devices.drivers.deadlines import Stuck, within
from tierloop.devices.drivers.engines import LARGEST_TRANSFER, PosixEngine, Target, lost, room
from tierloop.devices.drivers.failures import threadless
from tierloop.devices.drivers.pieces import Pieces
from tierloop.devices.errors import DeviceError, Timeout
from tierloop.devices.system import PUNCH_HOLE, RESERVE, ZERO_RANGE, FileStatus, System, address_of, from_os
from tierloop.devices.threads import NoThread

if TYPE_CHECKING:  # a drive asks through `patiently`, which stands here
    from tierloop.devices.drivers.nvme_drive import Drive

PAGE = 4096
"""The grid of the page cache, and the smallest unit that regions are placed in."""
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass
class Medium:
    """An opened, locked medium of `capacity` usable bytes; `target` is for transfers, `control` holds the lock.

    `why` lists what was wished for and is not so. `bus_address` and `numa_node` come from sysfs, None if not there;
    `in_flight` is how many requests the kernel keeps at a disk; `drive` is there where the kernel passes commands to an
    NVMe drive on; `read_only` says why the kernel takes no writes (empty: it does).
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
    drive: Drive | None = None
    in_flight: int | None = None
    read_only: str = ""
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
            except DeviceError:
                raise
            except OSError as error:
                if error.errno in _NOT_OFFERED:
                    self._zeroing.remove(how)
                    continue
                raise lost(self.target, "alloc", error.errno or 0, offset, nbytes) from error
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
        except DeviceError:
            raise
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise lost(self.target, "free", error.errno or 0, offset, nbytes) from error

    def give_up_space(self, offset: int, nbytes: int) -> None:
        """Release what a failed `zero` may have reserved; the failure that led here is the one to report."""
        with suppress(DeviceError):
            self.release(offset, nbytes)

    def close(self) -> None:
        """Close both descriptors, which also unlocks. Raises MediaError if the system reports a loss only now."""
        close_all(self.target.system, {self.target.fd, self.control}, self.target.device)

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
        except DeviceError:
            raise
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise lost(self.target, "alloc", error.errno or 0, offset, nbytes) from error

    def _write_zeros(self, offset: int, nbytes: int) -> None:
        zeros = room(self.target, min(nbytes, LARGEST_TRANSFER))
        try:
            PosixEngine(self.target).transfer(from_zeros(zeros, offset, nbytes, len(zeros)), write=True)
        except Stuck as stuck:
            raise Timeout(self.target.device, "alloc", str(stuck), errno.ETIMEDOUT) from stuck


def from_zeros(zeros: mmap.mmap, offset: int, nbytes: int, largest: int) -> Pieces:
    """The pieces that write so many zeros from one small buffer."""
    starts = np.arange(0, nbytes, largest, dtype=np.int64)
    pieces = np.empty((len(starts), 3), dtype=np.int64)
    pieces[:, 0] = starts + offset
    pieces[:, 1] = address_of(zeros)
    pieces[:, 2] = np.minimum(nbytes - starts, largest)
    return pieces


def patiently(target: Target, op: str, call: Callable[[], None]) -> None:
    """Make a blocking call with the target's deadline. Raises what it raises, Timeout, or OutOfMemory (no thread)."""
    try:
        within(target.deadline_s, call)
    except NoThread as error:
        raise threadless(target.device, op, error) from error
    except Stuck as stuck:
        raise Timeout(target.device, op, str(stuck), errno.ETIMEDOUT) from stuck


def close_all(system: System, fds: set[int], device: str | None = None) -> None:
    """Close all; with a device named, raises MediaError or the like for the first failure."""
    failed: OSError | None = None
    for fd in fds:
        try:
            system.close(fd)
        except OSError as error:
            failed = failed or error
    if failed is not None and device is not None:
        raise from_os(device, "close", failed, "writes may be lost") from failed
