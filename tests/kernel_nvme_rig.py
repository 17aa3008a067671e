"""A program on the machine with an NVMe drive: passthrough commands by ioctl, and rings written entry by entry."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest

from tests.nvme_rig import MIB
from tierloop.devices.drivers import ring as uring
from tierloop.devices.system import SYS_IO_URING_ENTER, SYS_IO_URING_SETUP, address_of
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine
from tierloop.emulators.kernel_nvme_nodes import ADMIN64_CMD, COMMAND, COMMAND64, IO64_CMD, IO_CMD
from tierloop.emulators.kernel_uring import CQE32, SQE128, SYS_IO_URING_REGISTER, URING_CMD
from tierloop.firmware_models.nvme_wire import Io


@dataclass
class Host:
    """A program on the machine: descriptors, a buffer, and passthrough commands by ioctl."""

    machine: NvmeMachine = field(default_factory=nvme_machine)

    def __post_init__(self) -> None:
        self.buffer = mmap.mmap(-1, 4 * MIB)
        self.at = address_of(self.buffer)
        self.admin_fd = self.machine.open("/dev/nvme0", os.O_RDWR)
        self.generic_fd = self.machine.open("/dev/ng0n1", os.O_RDWR)
        self.block_fd = self.machine.open("/dev/nvme0n1", os.O_RDWR | os.O_DIRECT)

    def ioctl(
        self,
        fd: int,
        request: int,
        opcode: int,
        nbytes: int = 0,
        *cdw: int,
        nsid: int = 1,
        address: int | None = None,
        flags: int = 0,
        metadata_nbytes: int = 0,
        timeout_ms: int = 0,
    ) -> tuple[int, int]:
        """Status and result of a passthrough command."""
        wide = request in (ADMIN64_CMD, IO64_CMD)
        words = (*cdw, 0, 0, 0, 0, 0, 0)[:6]
        at = self.at if address is None else address
        head = (opcode, flags, 0, nsid, 0, 0, 0, at, metadata_nbytes, nbytes, *words, timeout_ms)
        raw = bytearray(COMMAND64.pack(*head, 0, 0) if wide else COMMAND.pack(*head, 0))
        status = self.machine.ioctl(fd, request, raw)
        return status, struct.unpack_from("=Q" if wide else "=I", raw, 72 if wide else 68)[0]

    def io(self, opcode: int, lba: int = 0, blocks: int = 1, **more: int) -> int:
        """The status of a command for input or output on the generic node."""
        moves = 0 if opcode in (Io.FLUSH, Io.WRITE_ZEROES) else 512 * blocks
        nbytes = more.pop("nbytes", moves)
        return self.ioctl(self.generic_fd, IO_CMD, opcode, nbytes, lba & 0xFFFFFFFF, lba >> 32, blocks - 1, **more)[0]


@pytest.fixture
def a_host() -> Host:
    """A program on a machine of its own."""
    return Host()


class Ring:
    """A ring of a program, with narrow or wide entries, that lets a test write entries by hand."""

    def __init__(self, machine: NvmeMachine, entries: int = 8, flags: int = 0) -> None:
        self.machine = machine
        setup = bytearray(uring.SETUP.size)
        uring.SETUP.pack_into(setup, 0, 0, 0, flags, *(0,) * 27)
        self.fd = machine.syscall(SYS_IO_URING_SETUP, entries, address_of(setup))
        params = uring.SETUP.unpack(setup)
        self.entries = params[0]
        self.sq, self.cq = params[10:20], params[20:30]
        self.wide = bool(flags & CQE32)
        self.size = 128 if flags & SQE128 else 64
        self.rings = machine.mmap(self.fd, self.sq[6] + 4 * self.entries, uring.RINGS_OFFSET)
        self.table = machine.mmap(self.fd, self.size * self.entries, uring.ENTRIES_OFFSET)
        for i in range(self.entries):
            struct.pack_into("I", self.rings, self.sq[6] + 4 * i, i)

    def word(self, at: int) -> int:
        return int(struct.unpack_from("I", self.rings, at)[0])

    def put(
        self, opcode: int, fd: int, name: int, offset: int = 0, address: int = 0, nbytes: int = 0, **more: int
    ) -> None:
        """Write an entry."""
        tail = self.word(self.sq[1])
        raw = struct.pack(
            "=BBHiQQIIQH", opcode, more.get("flags", 0), 0, fd, offset, address, nbytes, more.get("op_flags", 0), name,
            more.get("buffer", 0),
        )  # fmt: skip
        self._write(tail, raw)

    def command(
        self, fd: int, name: int, kind: int, opcode: int, nsid: int, address: int, nbytes: int, *cdw: int
    ) -> None:
        """Write a passthrough command."""
        words = (*cdw, 0, 0, 0, 0, 0, 0)[:6]
        raw = struct.pack("=BBHiQQIIQH6x", URING_CMD, 0, 0, fd, kind, 0, 0, 0, name, 0)
        command = COMMAND.pack(opcode, 0, 0, nsid, 0, 0, 0, address, 0, nbytes, *words, 0, 0)
        self._write(self.word(self.sq[1]), raw + command)

    def _write(self, tail: int, raw: bytes) -> None:
        at = (tail & (self.entries - 1)) * self.size
        self.table[at : at + self.size] = raw.ljust(self.size, b"\0")[: self.size]
        struct.pack_into("I", self.rings, self.sq[1], tail + 1)

    def enter(self, wait_for: int, timeout_s: float = 1.0) -> None:
        wait = bytearray(uring.EXTENDED_WAIT.size)
        at = address_of(wait)
        uring.EXTENDED_WAIT.pack_into(wait, 0, 0, 0, 0, at + 24, int(timeout_s), int(timeout_s % 1 * 1e9))
        ready = self.word(self.sq[1]) - self.word(self.sq[0])
        flags = uring.GETEVENTS | uring.EXT_ARG
        self.machine.syscall(SYS_IO_URING_ENTER, self.fd, ready, wait_for, flags, at, 24)

    def taken(self) -> dict[int, tuple[int, int]]:
        """Result and second word of what has come back, by name."""
        found = {}
        head, tail = self.word(self.cq[0]), self.word(self.cq[1])
        size = 32 if self.wide else 16
        for i in range(head, tail):
            at = self.cq[5] + size * (i & (2 * self.entries - 1))
            name, result, _ = uring.COMPLETION.unpack_from(self.rings, at)
            found[name] = result, struct.unpack_from("=Q", self.rings, at + 16)[0] if self.wide else 0
        struct.pack_into("I", self.rings, self.cq[0], tail)
        return found

    def one(self, **wait: float) -> int:
        """Enter, and the result of the only completion."""
        self.enter(1, **wait)
        ((result, _),) = self.taken().values()
        return result

    def register(self, *buffers: tuple[int, int]) -> None:
        raw = bytearray(b"".join(struct.pack("=QQ", *buffer) for buffer in buffers))
        self.machine.syscall(SYS_IO_URING_REGISTER, self.fd, 0, address_of(raw), len(buffers))


def refused(number: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=os.strerror(number))
