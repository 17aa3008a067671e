"""An operating system in memory that misbehaves on request: the unmodified nvme driver runs on it.

It is at least as strict as the real one: direct transfers off the grid are EINVAL, a ring may be entered by the thread
that made it only, a wait without a timeout that could not end fails the test, a completion queue never overflows.
What is submitted to a ring at once is carried out in a shuffled order. Nothing is durable before it was synced.

The bus face is `System`; the back door is `add_*`, `inject`, `contents`, `crash`, `release`, `calls` and `texts`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap as mmap_module
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tierloop.devices.drivers import ring
from tierloop.devices.drivers.page_cache import SYS_CACHESTAT
from tierloop.devices.system import (
    PUNCH_HOLE,
    RESERVE,
    SYS_IO_URING_ENTER,
    SYS_IO_URING_SETUP,
    SYS_STATX,
    FileKind,
    FileStatus,
)
from tierloop.emulators.kernel_uring import ModelRing, Reply, Submission

PAGE = 4096
_FILESYSTEM = os.makedev(259, 1)


@dataclass
class Fault:
    """What shall go wrong with the next `times` calls of one kind, from `offset` on where that is given.

    `number` is an errno; `moves` makes a transfer stop after so many bytes; `hangs` keeps it from coming back until
    `FakeSystem.release`, and `cancellable` says whether the kernel would let go of it.
    """

    call: str
    number: int = 0
    moves: int | None = None
    hangs: bool = False
    cancellable: bool = True
    times: int = 1
    offset: int | None = None


@dataclass
class _File:
    status: FileStatus
    data: bytearray
    durable: bytearray
    blocks: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)
    owner: int | None = None


@dataclass
class _Open:
    file: _File
    direct: bool


class FakeSystem:
    """See the top of the file. `grid` is the alignment of direct transfers; `uring_errno` refuses io_uring."""

    def __init__(
        self,
        grid: int = 512,
        disk_nbytes: int = 1 << 30,
        direct: bool = True,
        zero_range: bool = True,
        punch_hole: bool = True,
        uring_errno: int = 0,
        features: int = ring.FEATURE_SINGLE_MMAP | ring.FEATURE_EXT_ARG,
        known_setup_flags: int = ring.SINGLE_ISSUER | ring.DEFER_TASKRUN,
        statx: tuple[int, int] | None = None,
        cachestat: bool = True,
        seed: int = 0,
    ) -> None:
        self.model = "an operating system in memory"
        self.grid, self.disk_nbytes, self.direct = grid, disk_nbytes, direct
        self.zero_range, self.punch_hole = zero_range, punch_hole
        self.uring_errno, self.features, self.known_setup_flags = uring_errno, features, known_setup_flags
        self.statx, self.cachestat = statx, cachestat
        self.texts: dict[str, str] = {"/sys/dev/block/259:1/queue/logical_block_size": "512"}
        self.calls: Counter[str] = Counter()
        self._names: dict[str, _File] = {}
        self._open: dict[int, _Open] = {}
        self._rings: dict[int, ModelRing] = {}
        self._faults: list[Fault] = []
        self._random = random.Random(seed)
        self._guard = threading.RLock()
        self._released = threading.Event()
        self._next = 3
        self._inode = 0
        self.add("/", "directory")

    # the back door

    def add(self, path: str, kind: FileKind, data: bytes = b"") -> None:
        """Put something at a path; its bytes are durable."""
        self._inode += 1
        number = os.makedev(259, self._inode) if "device" in kind else 0
        status = FileStatus(kind, _FILESYSTEM, self._inode, number)
        blocks = set(range(len(data) // PAGE + 1)) if data else set()
        self._names[path] = _File(status, bytearray(data), bytearray(data), blocks)

    def inject(self, call: str, number: int = 0, **more: object) -> None:
        """Let the next calls of that kind go wrong: stat, open, lock, resize, read, write, sync, … (see Fault)."""
        with self._guard:
            self._faults.append(Fault(call, number, **more))  # type: ignore[arg-type]  # the fields of Fault

    def heal(self) -> None:
        """Forget the faults that have not struck yet."""
        with self._guard:
            self._faults.clear()

    def contents(self, path: str) -> bytes:
        """The bytes of a file as a reader would see them."""
        return bytes(self._names[path].data)

    def durable(self, path: str) -> bytes:
        """The bytes of a file as they would be found after a power failure."""
        return bytes(self._names[path].durable)

    def crash(self) -> None:
        """Lose power: every descriptor is gone, and every byte that was not synced."""
        with self._guard:
            self._open.clear()
            for file in self._names.values():
                file.data, file.owner = bytearray(file.durable), None

    def truncate(self, path: str, nbytes: int) -> None:
        """Cut a file behind its owner's back."""
        del self._names[path].data[nbytes:]

    def drop_caches(self, path: str, pages: Iterable[int]) -> None:
        """Let pages of a file fall out of the page cache."""
        self._names[path].cached.difference_update(pages)

    def release(self) -> None:
        """Let everything that hangs go on."""
        self._released.set()

    def exists(self, path: str) -> bool:
        """Whether anything has that name."""
        return path in self._names

    @property
    def used_nbytes(self) -> int:
        """Bytes of the disk that hold blocks."""
        return PAGE * sum(len(f.blocks) for f in self._names.values())

    @property
    def open_fds(self) -> int:
        """Descriptors that were opened and not closed, rings included."""
        return len(self._open) + len(self._rings)

    # the bus face

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        with self._guard:
            self._fail("open")
            if path not in self._names:
                if not flags & os.O_CREAT:
                    raise _error(errno.ENOENT)
                self.add(path, "file")
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise _error(errno.EEXIST)
            if flags & os.O_DIRECT and not self.direct:
                raise _error(errno.EINVAL)
            self._next += 1
            self._open[self._next] = _Open(self._names[path], bool(flags & os.O_DIRECT))
            return self._next

    def close(self, fd: int) -> None:
        with self._guard:
            if self._rings.pop(fd, None) is None:
                opened = self._open.pop(fd, None)
                if opened is None:
                    raise _error(errno.EBADF)
                if opened.file.owner == fd:
                    opened.file.owner = None
            self._fail("close")

    def stat(self, path: str) -> FileStatus:
        self._fail("stat")
        if path not in self._names:
            raise _error(errno.ENOENT)
        return self._names[path].status

    def fstat(self, fd: int) -> FileStatus:
        return self._of(fd).file.status

    def size(self, fd: int) -> int:
        return len(self._of(fd).file.data)

    def resize(self, fd: int, nbytes: int) -> None:
        self._fail("resize")
        file = self._of(fd).file
        for content in (file.data, file.durable):
            del content[nbytes:]
            content.extend(bytes(nbytes - len(content)))

    def unlink(self, path: str) -> None:
        del self._names[path]

    def lock(self, fd: int) -> None:
        self._fail("lock")
        file = self._of(fd).file
        if file.owner not in (None, fd):
            raise _error(errno.EWOULDBLOCK)
        file.owner = fd

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return self._posix("read", fd, into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._posix("write", fd, data, offset)

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int) -> None:
        self._stall(self._fail("fallocate"))
        with self._guard:
            self.calls["fallocate"] += 1
            file = self._of(fd).file
            if (mode == PUNCH_HOLE and not self.punch_hole) or (
                mode not in (PUNCH_HOLE, RESERVE) and not self.zero_range
            ):
                raise _error(errno.EOPNOTSUPP)
            pages = set(range(offset // PAGE, -(-(offset + nbytes) // PAGE)))
            if mode == PUNCH_HOLE:
                file.blocks -= pages
            elif (len(pages - file.blocks)) * PAGE > self.disk_nbytes - self.used_nbytes:
                room = (self.disk_nbytes - self.used_nbytes) // PAGE
                file.blocks |= set(sorted(pages - file.blocks)[:room])  # as ext4 does: what was reserved stays
                raise _error(errno.ENOSPC)
            else:
                file.blocks |= pages
            if mode != RESERVE:
                file.data[offset : offset + nbytes] = bytes(nbytes)

    def fsync(self, fd: int) -> None:
        self.calls["fsync"] += 1
        self._sync(fd)

    def fdatasync(self, fd: int) -> None:
        self.calls["fdatasync"] += 1
        self._stall(self._fail("sync"))
        self._sync(fd)

    def mmap(self, fd: int, nbytes: int, offset: int = 0) -> mmap_module.mmap:
        self._fail("mmap")
        return self._rings[fd].mmap(nbytes, offset) if fd in self._rings else mmap_module.mmap(-1, nbytes)

    def syscall(self, number: int, *args: int) -> int:
        with self._guard:
            if number == SYS_IO_URING_SETUP:
                return self._uring_setup(*args)
            if number == SYS_IO_URING_ENTER:
                return self._uring_enter(*args)
            if number == SYS_STATX and self.statx is not None:
                answer = (ctypes.c_uint32 * 64).from_address(args[4])
                answer[0], answer[38], answer[39] = 0x2000, *self.statx
                return 0
            if number == SYS_CACHESTAT and self.cachestat:
                fd, asked, found, flags = args
                start, nbytes = (ctypes.c_uint64 * 2).from_address(asked)
                assert nbytes
                assert not flags
                pages = range(start // PAGE, -(-(start + nbytes) // PAGE))
                (ctypes.c_uint64 * 5).from_address(found)[0] = len(self._of(fd).file.cached.intersection(pages))
                return 0
        raise _error(errno.ENOSYS)

    def read_text(self, path: str) -> str:
        if path not in self.texts:
            raise _error(errno.ENOENT)
        return self.texts[path]

    def read_bytes(self, path: str) -> bytes:
        return self.read_text(path).encode()

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        self._of(fd)
        raise _error(errno.ENOTTY)

    def listdir(self, path: str) -> list[str]:
        raise _error(errno.ENOENT)

    def readlink(self, path: str) -> str:
        raise _error(errno.ENOENT)

    # inside

    def _fail(self, call: str, offset: int | None = None, nbytes: int = 0) -> Fault | None:
        """Use up a fault for this call: raises its errno, or returns one that is not an error."""
        with self._guard:
            for fault in self._faults:
                here = fault.offset is None or (offset is not None and offset <= fault.offset < offset + nbytes)
                if fault.call == call and here:
                    fault.times -= 1
                    if not fault.times:
                        self._faults.remove(fault)
                    if fault.number:
                        raise _error(fault.number)
                    return fault
        return None

    def _stall(self, fault: Fault | None) -> None:
        if fault is not None and fault.hangs:
            assert self._released.wait(60), "a test forgot to release what it made hang"

    def _of(self, fd: int) -> _Open:
        if fd not in self._open:
            raise _error(errno.EBADF)
        return self._open[fd]

    def _posix(self, op: str, fd: int, view: memoryview, offset: int) -> int:
        self.calls[f"p{op}"] += 1
        fault = self._fail(op, offset, len(view))
        self._stall(fault)
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return self._transfer(op, fd, address, offset, len(view), fault)

    def _transfer(self, op: str, fd: int, address: int, offset: int, nbytes: int, fault: Fault | None) -> int:
        with self._guard:
            opened = self._of(fd)
            file = opened.file
            if opened.direct and (address % self.grid or offset % self.grid or nbytes % self.grid):
                raise _error(errno.EINVAL)
            if fault is not None and fault.moves is not None:
                nbytes = min(nbytes, fault.moves)
            nbytes = max(min(nbytes, len(file.data) - offset), 0)
            if not opened.direct:
                file.cached.update(range(offset // PAGE, -(-(offset + nbytes) // PAGE)))
            if op == "read":
                ctypes.memmove(address, bytes(file.data[offset : offset + nbytes]), nbytes)
                return nbytes
            for page in range(offset // PAGE, -(-(offset + nbytes) // PAGE)):
                if page not in file.blocks and self.used_nbytes + PAGE > self.disk_nbytes:
                    nbytes = max(page * PAGE - offset, 0)
                    if not nbytes:
                        raise _error(errno.ENOSPC)
                    break
                file.blocks.add(page)
            file.data[offset : offset + nbytes] = ctypes.string_at(address, nbytes)
            return nbytes

    def _sync(self, fd: int) -> None:
        with self._guard:
            file = self._of(fd).file
            file.durable = bytearray(file.data)

    def _uring_setup(self, entries: int, address: int) -> int:
        self._fail("setup")
        if self.uring_errno:
            raise _error(self.uring_errno)
        params = (ctypes.c_uint32 * 30).from_address(address)
        if params[2] & ~self.known_setup_flags:
            raise _error(errno.EINVAL)
        self._next += 1
        self._rings[self._next] = ModelRing(entries, params, self.features, self._carry_out, self._random)
        return self._next

    def _uring_enter(self, fd: int, to_submit: int, min_complete: int, flags: int, argument: int, size: int) -> int:
        if fd not in self._rings:
            raise _error(errno.EBADF)
        self.calls["enter"] += 1
        self._fail("enter")
        ring = self._rings[fd]
        if self._released.is_set():
            ring.fail_hanging()
        return ring.enter(to_submit, min_complete, flags, argument, size)

    def _carry_out(self, entry: Submission, reply: Reply) -> Fault | None:
        """Answer one entry of a ring as the kernel does, with bytes moved or minus an errno; or let it hang."""
        op = {ring.READ: "read", ring.WRITE: "write", ring.FSYNC: "sync"}[entry.opcode]
        assert op != "sync" or entry.op_flags == ring.DATASYNC
        self.calls[f"uring {op}"] += 1
        try:
            fault = self._fail(op, entry.offset, entry.nbytes)
            if fault is not None and fault.hangs:
                return fault
            if op == "sync":
                self._sync(entry.fd)
                reply(0, 0)
            else:
                reply(self._transfer(op, entry.fd, entry.address, entry.offset, entry.nbytes, fault), 0)
        except OSError as error:
            reply(-(error.errno or errno.EIO), 0)
        return None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
