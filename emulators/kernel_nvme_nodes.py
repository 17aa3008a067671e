"""The nodes of an NVMe drive below /dev: what Linux answers there, carried out as commands of the controller.

Passthrough requests are checked as Linux does before they become commands, and transfers of the block device are cut
into what a command takes. What must hold stands in kernel_nvme.py.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tierloop.devices.system import PUNCH_HOLE, ZERO_RANGE, FileKind, address_of
from tierloop.emulators.kernel import Absent, failure
from tierloop.emulators.kernel_nvme_host import ADMIN_TIMEOUT_NS, IO_TIMEOUT_NS, NvmeHost, Request
from tierloop.firmware_models.nvme_wire import DO_NOT_RETRY, Entry, Io

ID, ADMIN_CMD, IO_CMD = 0x4E40, 0xC0484E41, 0xC0484E43
ADMIN64_CMD, IO64_CMD = 0xC0504E47, 0xC0504E48
RESET = 0x4E44
COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd: opcode, flags, reserved, nsid, cdw2, cdw3, metadata, address, metadata length, data length,
cdw10 … cdw15, timeout in ms, result."""
COMMAND64 = struct.Struct("=BBHIIIQQIIIIIIIIIIQ")
"""struct nvme_passthru_cmd64: the same with a reserved word and a result of 64 bits."""
assert (COMMAND.size, COMMAND64.size) == (72, 80)
_TRIES = 6
LARGEST = 8 << 20
BLOCK_MAJOR, GENERIC_MAJOR, ADMIN_MAJOR = 259, 241, 242

_ERRNO: dict[int, int] = {
    0x001: errno.EOPNOTSUPP,
    0x002: errno.EOPNOTSUPP,
    0x00B: errno.EOPNOTSUPP,
    0x021: errno.EREMOTEIO,
    0x080: errno.EREMOTEIO,
    0x081: errno.ENOSPC,
    0x082: errno.EREMOTEIO,
    0x083: errno.EBADE,
    0x180: errno.EOPNOTSUPP,
    0x181: errno.EILSEQ,
    0x182: errno.ENODATA,
    0x280: errno.ENODATA,
    0x281: errno.ENODATA,
    0x282: errno.EILSEQ,
    0x283: errno.EILSEQ,
    0x284: errno.EILSEQ,
    0x285: errno.ENODATA,
    0x286: errno.ENODATA,
    0x287: errno.ENODATA,
    0x370: errno.ENOLINK,
}
"""What the block layer makes of a status; EIO of all others."""


class Asked(NamedTuple):
    """A passthrough command as a program hands it in."""

    opcode: int
    flags: int
    nsid: int
    cdw2: int
    cdw3: int
    metadata: int
    address: int
    metadata_nbytes: int
    nbytes: int
    cdw: tuple[int, int, int, int, int, int]
    timeout_ms: int

    @classmethod
    def of(cls, raw: bytes | bytearray) -> Asked:
        """From the first 68 bytes of any of the structures, which begin alike."""
        fields = COMMAND.unpack_from(bytes(raw[:68]).ljust(72, b"\0"))
        opcode, flags, _, nsid, cdw2, cdw3, metadata, address, metadata_nbytes, nbytes, a, b, c, d, e, f, ms, _ = fields
        words = (a, b, c, d, e, f)
        return cls(opcode, flags, nsid, cdw2, cdw3, metadata, address, metadata_nbytes, nbytes, words, ms)


Ended = Callable[[int, int], None]
"""Called with a result (a status, a count, minus an errno) and the completion's first word."""


class Commands:
    """Commands of programs for one controller: checked as Linux does, bounced where need be."""

    def __init__(self, host: NvmeHost) -> None:
        self._host = host
        self.largest = min(host.controller.figures.largest_transfer or LARGEST, LARGEST)

    def start(self, asked: Asked, admin: bool, ended: Ended) -> Request:
        """Begin; `ended` gets the status or -EINTR. Raises OSError: EINVAL, EFAULT, ENODEV."""
        if asked.flags or asked.metadata_nbytes or asked.nbytes > self.largest:
            raise failure(errno.EINVAL)
        address, nbytes = (asked.address, asked.nbytes) if asked.address else (0, 0)
        memory, bounce = self._host.memory, None
        if nbytes and (address | nbytes) & 3:
            memory.check(address, nbytes)
            bounce = bytearray(nbytes + 8)
            at = -(-address_of(bounce) // 4) * 4
            if asked.opcode & 1:
                memory.write(at, memory.read(address, nbytes))
        entry = Entry(asked.opcode, 0, 0, asked.nsid, asked.cdw2, asked.cdw3, 0, bytes(16), asked.cdw)

        def done(request: Request) -> None:
            if bounce is not None and request.to_host and request.status == 0:
                memory.write(address, memory.read(request.address, nbytes))
            ended(-errno.EINTR if request.cancelled else request.status or 0, request.result)

        timeout = asked.timeout_ms * 1_000_000 or (ADMIN_TIMEOUT_NS if admin else IO_TIMEOUT_NS)
        request = Request(
            entry, address if bounce is None else at, -(-nbytes // 4) * 4, timeout, done, self._host.owner
        )
        self._host.start(request, admin)
        return request

    def carry_out(self, request: int, argument: bytearray, admin: bool) -> int:
        """An ioctl: begin, wait, and put the result into the structure."""
        form = COMMAND64 if request in (ADMIN64_CMD, IO64_CMD) else COMMAND
        if len(argument) < form.size:
            raise failure(errno.EFAULT)
        answer: list[tuple[int, int]] = []
        self._host.wait(self.start(Asked.of(argument), admin, lambda status, word: answer.append((status, word))))
        status, word = answer[0]
        if status < 0:
            raise failure(-status)
        if form is COMMAND64:
            struct.pack_into("=Q", argument, 72, word)
        else:
            struct.pack_into("=I", argument, 68, word)
        return status


class AdminNode(Absent):
    """/dev/nvme0."""

    number = os.makedev(ADMIN_MAJOR, 0)

    def __init__(self, host: NvmeHost, commands: Commands) -> None:
        self.host, self.commands = host, commands

    def ioctl(self, request: int, argument: bytearray) -> int:
        """Admin commands; commands of the only namespace, if there is but one; a reset."""
        if request in (ADMIN_CMD, ADMIN64_CMD):
            return self.commands.carry_out(request, argument, admin=True)
        if request == IO_CMD:
            if len(self.host.controller.namespaces) != 1:
                raise failure(errno.EINVAL)
            _only(Asked.of(argument), 1)
            return self.commands.carry_out(request, argument, admin=False)
        if request == RESET:
            self.host.reset()
            return 0
        raise failure(errno.ENOTTY)


class GenericNode(Absent):
    """/dev/ng0n1."""

    def __init__(self, host: NvmeHost, commands: Commands, nsid: int) -> None:
        self.host, self.commands, self.nsid = host, commands, nsid
        self.number = os.makedev(GENERIC_MAJOR, nsid - 1)

    def ioctl(self, request: int, argument: bytearray) -> int:
        """Commands of this namespace, admin commands, and its identifier."""
        if request == ID:
            return self.nsid
        if request in (ADMIN_CMD, ADMIN64_CMD):
            return self.commands.carry_out(request, argument, admin=True)
        if request in (IO_CMD, IO64_CMD):
            _only(Asked.of(argument), self.nsid)
            return self.commands.carry_out(request, argument, admin=False)
        raise failure(errno.ENOTTY)


class BlockNode(GenericNode):
    """/dev/nvme0n1: the same requests, and the namespace as one run of bytes."""

    kind: FileKind = "block device"

    def __init__(self, host: NvmeHost, commands: Commands, nsid: int) -> None:
        super().__init__(host, commands, nsid)
        self.number = os.makedev(BLOCK_MAJOR, nsid)
        self._namespace = host.controller.namespaces[nsid - 1]

    def size(self) -> int:
        return self._namespace.capacity

    def pread(self, into: memoryview, offset: int) -> int:
        return self._wait("read", offset, *_place(into))

    def pwrite(self, data: memoryview, offset: int) -> int:
        return self._wait("write", offset, *_place(data))

    def sync(self) -> None:
        self._wait("sync", 0, 0, 0)

    def fallocate(self, mode: int, offset: int, nbytes: int) -> None:
        """Punch a hole or write zeros, both by Write Zeroes."""
        grid = self._namespace.lba_nbytes
        if mode not in (PUNCH_HOLE, ZERO_RANGE, ZERO_RANGE | 1):
            raise failure(errno.EOPNOTSUPP)
        if offset < 0 or nbytes <= 0 or (offset | nbytes) % grid or offset + nbytes > self.size():
            raise failure(errno.EINVAL)
        self._wait("punch" if mode == PUNCH_HOLE else "zero", offset, 0, nbytes)

    def start(self, op: str, offset: int, address: int, nbytes: int, ended: Callable[[int], None]) -> None:
        """Begin a transfer (read, write, sync, zero, punch); `ended` gets bytes moved or minus an errno.

        Raises OSError: EINVAL off the grid, ENOSPC for a write behind the end, EFAULT, ENODEV.
        """
        grid = self._namespace.lba_nbytes
        moves = op in ("read", "write")
        if offset < 0 or (offset | nbytes) % grid or (moves and address & 3):
            raise failure(errno.EINVAL)
        left = min(nbytes, max(self.size() - offset, 0))
        if op == "write" and nbytes and not left:
            raise failure(errno.ENOSPC)
        if moves:
            self.host.memory.check(address, left)
        step = self.commands.largest if moves else 0x10000 * grid
        parts = [(at, min(step, left - at)) for at in range(0, left, step)]
        if op == "sync":
            parts = [(0, 0)] if self.host.controller.figures.volatile_cache else []
        if not parts:
            ended(left)
            return
        whole = _Whole(len(parts), left, ended)
        for at, size in parts:
            self._part(op, offset + at, address + at if moves else 0, size, whole)

    def _part(self, op: str, offset: int, address: int, nbytes: int, whole: _Whole) -> None:
        """One command of a transfer; begun again while that makes sense."""
        tries = 0
        grid, opcode = self._namespace.lba_nbytes, _OPCODES[op]
        lba, count = offset // grid, nbytes // grid
        deallocate = 1 << 25 if op == "punch" else 0
        last = (count - 1 | deallocate) if count else 0
        entry = Entry(opcode, nsid=self.nsid, cdw=(lba & 0xFFFFFFFF, lba >> 32, last, 0, 0, 0))

        def done(request: Request) -> None:
            nonlocal tries
            tries += 1
            status = request.status or 0
            if not status or status & DO_NOT_RETRY or request.cancelled or tries >= _TRIES:
                whole.end(-_ERRNO.get(status & 0x7FF, errno.EIO) if status else 0)
                return
            begin()

        moved, owner = nbytes if address else 0, self.host.owner

        def begin() -> None:
            request = Request(entry, address if moved else 0, moved, IO_TIMEOUT_NS, done, owner)
            try:
                self.host.start(request, admin=False)
            except OSError as error:
                whole.end(-(error.errno or errno.EIO))

        begin()

    def _wait(self, op: str, offset: int, address: int, nbytes: int) -> int:
        results: list[int] = []
        self.start(op, offset, address, nbytes, results.append)
        while not results:
            self.host.wait_some()
        if results[0] < 0:
            raise failure(-results[0])
        return results[0]


class _Whole:
    """A transfer of several commands: it has ended when all have, and fails if one has."""

    def __init__(self, parts: int, nbytes: int, ended: Callable[[int], None]) -> None:
        self._left, self._nbytes, self._ended = parts, nbytes, ended
        self._failure = 0

    def end(self, failed: int) -> None:
        self._left -= 1
        self._failure = self._failure or failed
        if not self._left:
            self._ended(self._failure or self._nbytes)


_OPCODES = {
    "read": Io.READ,
    "write": Io.WRITE,
    "sync": Io.FLUSH,
    "zero": Io.WRITE_ZEROES,
    "punch": Io.WRITE_ZEROES,
}


def _only(asked: Asked, nsid: int) -> None:
    if asked.nsid != nsid:
        raise failure(errno.EINVAL)


def _place(view: memoryview) -> tuple[int, int]:
    """Address and size of a buffer, which may be one that only reads."""
    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.__array_interface__["data"][0]), len(array)
