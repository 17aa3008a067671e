"""The operating system as drivers see it: some twenty calls that a test may answer instead.

A driver for real hardware never imports `os` to reach its device; it is handed a `System`. Production hands it
`HostSystem`; a test hands it an object that misbehaves on purpose (short transfers, EAGAIN, a full disk, a kernel
without io_uring), and the driver that runs on both is the same code. What must hold for every implementation:

- A call either does what it says or raises OSError with the errno of the operating system; it never returns -1.
- `pread` and `pwrite` may move fewer bytes than asked for, and say how many.
- `syscall` and `ioctl` take addresses of memory that the caller keeps alive until the kernel is done with it.
- Paths below /sys and /proc are read as they stand there, links included; nothing is written to them.
- Every method may be called from any thread.

`from_os` turns an OSError into the device error that says who is to blame.
"""

from __future__ import annotations

import ctypes
import errno as codes
import fcntl
import mmap as mmap_module
import os
import platform
import posixpath
import stat as stat_module
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from tierloop.devices.errors import (
    Busy,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    NotPresent,
    OutOfMemory,
    ProtocolError,
    Timeout,
    Unsupported,
)

FileKind = Literal["file", "block device", "directory", "character device", "pipe", "socket", "other"]

PUNCH_HOLE = 0x02 | 0x01
"""fallocate: give the blocks back, the size stays (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE); reads give zeros."""
ZERO_RANGE = 0x10
"""fallocate: reads give zeros and the blocks are reserved (FALLOC_FL_ZERO_RANGE); moves no data on ext4 and xfs."""
RESERVE = 0
"""fallocate: reserve blocks; holes among them read as zeros, other bytes stay."""


class FileStatus(NamedTuple):
    """What stands at a path: its kind, its identity (file system, inode) and, for a device, its own number."""

    kind: FileKind
    filesystem: int
    inode: int
    device: int


class System(Protocol):
    """The calls that drivers make. Offsets and sizes in bytes; every method raises OSError.

    `model` says what stands here instead of a machine; it is empty for the real one. Drivers pass it on in their
    `DeviceInfo`, so that no number of a model is taken for a measurement.
    """

    @property
    def model(self) -> str:
        """What answers in place of hardware; "" where it is the hardware."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a path with the O_ flags; the descriptor is not inherited by children."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def stat(self, path: str) -> FileStatus:
        """What a path leads to; links are followed."""

    def fstat(self, fd: int) -> FileStatus:
        """What a descriptor stands for."""

    def size(self, fd: int) -> int:
        """Bytes of a file or a block device."""

    def resize(self, fd: int, nbytes: int) -> None:
        """Set a file's size; what is added is a hole that reads as zeros."""

    def unlink(self, path: str) -> None:
        """Remove a file's name."""

    def lock(self, fd: int) -> None:
        """Lock the open file for this descriptor alone, without waiting; EWOULDBLOCK if somebody holds it."""

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read up to len(into) bytes; returns how many, 0 at the end of the file."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write up to len(data) bytes; returns how many."""

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int) -> None:
        """One of PUNCH_HOLE, ZERO_RANGE, RESERVE; EOPNOTSUPP where the file system does not offer it."""

    def fsync(self, fd: int) -> None:
        """Make data and metadata durable; also for a directory."""

    def fdatasync(self, fd: int) -> None:
        """Make data durable, and the metadata that is needed to read it again."""

    def mmap(self, fd: int, nbytes: int, offset: int = 0) -> mmap_module.mmap:
        """Map a descriptor shared, or zeroed anonymous memory for fd -1; page-aligned. Unmap with its `close`."""

    def syscall(self, number: int, *args: int) -> int:
        """A raw system call with up to six integers or addresses; returns its result if that is not negative."""

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        """Control a device: `argument` is the request's structure, which the kernel reads and writes in place."""

    def read_text(self, path: str) -> str:
        """A small text file below /sys or /proc, without the newline at its end."""

    def read_bytes(self, path: str) -> bytes:
        """A small binary file below /sys or /proc: a table of the firmware."""

    def listdir(self, path: str) -> list[str]:
        """The names in a folder below /sys, /proc or /dev, sorted."""

    def readlink(self, path: str) -> str:
        """What a link below /sys says, as it stands there (mostly relative); EINVAL for what is no link."""


class HostSystem:
    """The real operating system (Linux). `root` stands before /sys and /proc, to read a recorded tree instead."""

    model = ""

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._raw = self._libc.syscall
        self._raw.restype = ctypes.c_long
        self._raw.argtypes = [ctypes.c_long] * 7
        self._fallocate = self._libc.fallocate64 if hasattr(self._libc, "fallocate64") else self._libc.fallocate
        self._fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, path: str) -> FileStatus:
        return _status(os.stat(path))

    def fstat(self, fd: int) -> FileStatus:
        return _status(os.fstat(fd))

    def size(self, fd: int) -> int:
        return os.lseek(fd, 0, os.SEEK_END)

    def resize(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def lock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwritev(fd, [data], offset)

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int) -> None:
        if self._fallocate(fd, mode, offset, nbytes) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def mmap(self, fd: int, nbytes: int, offset: int = 0) -> mmap_module.mmap:
        try:
            return mmap_module.mmap(fd, nbytes, offset=offset)
        except (ValueError, OverflowError) as error:  # Python looks first: at a file's size, and at its own integers
            raise OSError(codes.EINVAL, str(error)) from error

    def syscall(self, number: int, *args: int) -> int:
        result: int = self._raw(number, *args, *(0,) * (6 - len(args)))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def read_text(self, path: str) -> str:
        return self._under(path).read_text().rstrip("\n")

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        result: int = fcntl.ioctl(fd, request, argument, True)
        return result

    def read_bytes(self, path: str) -> bytes:
        return self._under(path).read_bytes()

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._under(path)))

    def readlink(self, path: str) -> str:
        return os.readlink(self._under(path))

    def _under(self, path: str) -> Path:
        return self._root / path.lstrip("/")


HOST = HostSystem()
"""The system that drivers run on unless they are handed another."""

SYS_IO_URING_SETUP = 425
SYS_IO_URING_ENTER = 426
SYS_STATX = {"x86_64": 332, "aarch64": 291, "riscv64": 291, "ppc64le": 383, "s390x": 379}.get(platform.machine(), -1)
"""Numbers of raw system calls (the first two are the same on every machine); -1 where unknown here."""


def followed(path: str, link_at: Callable[[str], str | None], most: int = 40) -> str:
    """Where a path leads, links followed; `link_at` says what a link holds, None for what is none.

    Raises OSError (ELOOP) after `most` links.
    """
    walked, left = "/", [part for part in path.split("/") if part]
    for _ in range(most):
        while left:
            step = posixpath.normpath(posixpath.join(walked, left.pop(0)))
            target = link_at(step)
            if target is not None:
                whole = posixpath.normpath(posixpath.join(walked, target, *left))
                walked, left = "/", [part for part in whole.split("/") if part]
                break
            walked = step
        else:
            return walked
    raise OSError(codes.ELOOP, os.strerror(codes.ELOOP), path)


def resolved(system: System, path: str) -> str:
    """The path below /sys that a path leads to: where a device stands among its parents.

    What is no link, or is not there, counts as it stands. Raises OSError (ELOOP) after 40 links.
    """

    def link_at(step: str) -> str | None:
        try:
            return system.readlink(step)
        except OSError:
            return None

    return followed(path, link_at)


def address_of(buffer: mmap_module.mmap | bytearray) -> int:
    """The address of a writable buffer, for `syscall`; the buffer must be kept alive by the caller."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


_KINDS: dict[int, FileKind] = {
    stat_module.S_IFREG: "file",
    stat_module.S_IFBLK: "block device",
    stat_module.S_IFDIR: "directory",
    stat_module.S_IFCHR: "character device",
    stat_module.S_IFIFO: "pipe",
    stat_module.S_IFSOCK: "socket",
}


def _status(result: os.stat_result) -> FileStatus:
    kind = _KINDS.get(stat_module.S_IFMT(result.st_mode), "other")
    return FileStatus(kind, result.st_dev, result.st_ino, result.st_rdev)


_EHWPOISON = 133
"""A page whose memory is broken; `errno` has no name for it before Python 3.14."""
_BLAME: dict[type[DeviceError], tuple[int, ...]] = {
    NotPresent: (codes.ENOENT, codes.ENOTDIR),
    NoPermission: (codes.EACCES, codes.EPERM, codes.EROFS),
    OutOfMemory: (codes.ENOSPC, codes.EDQUOT, codes.EFBIG, codes.ENOMEM, codes.EMFILE, codes.ENFILE),
    Busy: (codes.EBUSY, codes.EAGAIN, codes.EEXIST, codes.ETXTBSY, codes.EBADE),
    Timeout: (codes.ETIMEDOUT, codes.ETIME),
    MediaError: (codes.EIO, codes.ENODATA, codes.EBADMSG, codes.EILSEQ, codes.EREMOTEIO, codes.EUCLEAN, _EHWPOISON),
    Unsupported: (codes.EOPNOTSUPP, codes.ENOSYS, codes.EISDIR),
    Gone: (codes.ENODEV, codes.ENXIO, codes.ESHUTDOWN, codes.ENOTCONN, codes.ENOLINK),
}
_KIND_OF: dict[int, type[DeviceError]] = {number: kind for kind, numbers in _BLAME.items() for number in numbers}


def from_os(device: str, op: str, error: OSError, detail: str) -> DeviceError:
    """The device error for an OSError, with errno and cause kept.

    EACCES and EPERM are one kind; ENODATA is what the kernel makes of an unrecoverable read error of an NVMe drive, and
    EBADE of a reservation that somebody else holds. EMFILE and ENFILE: there is no room for another descriptor. An
    errno that no kind fits (EINVAL, EFAULT, EBADF) is a ProtocolError: the call was checked before it was made.
    """
    number = error.errno or 0
    kind = _KIND_OF.get(number, ProtocolError)
    made = kind(device, op, f"{detail}: {os.strerror(number)} ({codes.errorcode.get(number, number)})", number)
    made.__cause__ = error
    return made
