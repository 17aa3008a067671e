"""The machine with an NVMe drive: its nodes answer as Linux does, through real entries of the controller model."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nvme_rig import Rig, bytes_of
from tierloop.devices.conformance import Suite
from tierloop.devices.device import Device
from tierloop.devices.drivers import ring as uring
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import Gone, MediaError
from tierloop.devices.site import Site
from tierloop.devices.system import PUNCH_HOLE, SYS_IO_URING_ENTER, SYS_IO_URING_SETUP, ZERO_RANGE, address_of, resolved
from tierloop.emulators.kernel_memory import DeviceMemory, ProcessMemory
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine
from tierloop.emulators.kernel_nvme_nodes import (
    ADMIN64_CMD,
    ADMIN_CMD,
    COMMAND,
    COMMAND64,
    ID,
    IO64_CMD,
    IO_CMD,
    RESET,
)
from tierloop.emulators.kernel_nvme_rings import URING_ADMIN, URING_IO
from tierloop.emulators.kernel_uring import CQE32, READ_FIXED, SQE128, SYS_IO_URING_REGISTER, URING_CMD, WRITE_FIXED
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Io, Status

MIB = 1 << 20
IDENTIFY_CONTROLLER = 1


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
def host() -> Host:
    return Host()


def refused(number: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=os.strerror(number))


# nodes and the tree


def test_the_tree_leads_from_a_node_to_its_drive(host: Host) -> None:
    machine = host.machine
    status = machine.fstat(host.block_fd)
    folder = f"/sys/dev/block/{os.major(status.device)}:{os.minor(status.device)}"
    assert status.kind == "block device"
    assert machine.read_text(f"{folder}/queue/logical_block_size") == "512"
    assert machine.read_text(f"{folder}/queue/max_hw_sectors_kb") == "128"
    assert machine.read_text(f"{folder}/device/address") == "0000:00:04.0"
    assert machine.read_text(f"{folder}/size") == str(64 * MIB // 512)
    assert resolved(machine, "/sys/block/nvme0n1") == resolved(machine, folder)
    for fd, name in ((host.generic_fd, "ng0n1"), (host.admin_fd, "nvme0")):
        number = machine.fstat(fd).device
        found = resolved(machine, f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")
        assert found.endswith(f"/{name}")
        assert machine.read_text(f"{found}/dev") == f"{os.major(number)}:{os.minor(number)}"
    assert machine.read_text("/sys/class/nvme/nvme0/model").strip() == "tierloop NVMe model"
    assert machine.read_text("/sys/class/nvme/nvme0/state") == "live"
    assert resolved(machine, "/sys/class/nvme-generic/ng0n1").endswith("nvme/nvme0/ng0n1")


def test_every_namespace_has_its_nodes() -> None:
    machine = nvme_machine(capacity=MIB, namespaces=2)
    fd = machine.open("/dev/ng0n2", os.O_RDWR)
    assert machine.ioctl(fd, ID, bytearray()) == 2
    assert machine.read_text("/sys/block/nvme0n2/nsid") == "2"
    assert machine.listdir("/dev") == ["ng0n1", "ng0n2", "nvme0", "nvme0n1", "nvme0n2"]


# passthrough by ioctl


def test_identify_answers_through_every_node(host: Host) -> None:
    for fd in (host.admin_fd, host.generic_fd, host.block_fd):
        for request in (ADMIN_CMD, ADMIN64_CMD):
            host.buffer[:4096] = bytes(4096)
            assert host.ioctl(fd, request, Admin.IDENTIFY, 4096, IDENTIFY_CONTROLLER) == (0, 0)
            assert host.buffer[4:24] == b"TL0000000001".ljust(20)


def test_a_status_comes_back_as_a_positive_number_with_its_flags(host: Host) -> None:
    status, _ = host.ioctl(host.admin_fd, ADMIN_CMD, Admin.IDENTIFY, 4096, 0x55)
    assert status == Status.INVALID_FIELD | 0x4000 | 0x2000
    assert host.io(Io.READ, 1 << 40) & 0x7FF == Status.LBA_OUT_OF_RANGE


def test_the_result_of_a_command_comes_back(host: Host) -> None:
    assert host.ioctl(host.admin_fd, ADMIN_CMD, Admin.GET_FEATURES, 0, 1, nsid=0) == (0, 3)
    assert host.ioctl(host.admin_fd, ADMIN64_CMD, Admin.GET_FEATURES, 0, 1, nsid=0) == (0, 3)


@pytest.mark.parametrize("request_number", [IO_CMD, IO64_CMD])
@pytest.mark.parametrize("blocks", [1, 8, 9, 255, 256])
@pytest.mark.parametrize("skew", [0, 4, 512, 4092, 1])
def test_what_was_written_is_read_wherever_the_memory_lies(
    host: Host, request_number: int, blocks: int, skew: int
) -> None:
    nbytes = 512 * blocks
    data = bytes_of(blocks + skew, nbytes).tobytes()
    at = host.at + skew
    host.buffer[skew : skew + nbytes] = data
    fd = host.generic_fd
    assert host.ioctl(fd, request_number, Io.WRITE, nbytes, 7, 0, blocks - 1, address=at) == (0, 0)
    assert host.machine.controller.peek(1, 7, blocks) == data
    host.buffer[:MIB] = bytes(MIB)
    assert host.ioctl(fd, request_number, Io.READ, nbytes, 7, 0, blocks - 1, address=at) == (0, 0)
    assert host.buffer[skew : skew + nbytes] == data
    assert not any(host.buffer[:skew])
    assert not any(host.buffer[skew + nbytes : MIB])


def test_lists_of_pages_chain_where_one_page_does_not_hold_them() -> None:
    host = Host(nvme_machine(capacity=8 * MIB, figures=NvmeFigures(mdts=10)))
    data = bytes_of(1, 3 * MIB).tobytes()
    host.buffer[4 : 4 + len(data)] = data
    assert host.io(Io.WRITE, 0, 3 * MIB // 512, address=host.at + 4) == 0
    assert host.machine.controller.peek(1, 0, 3 * MIB // 512) == data


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ({"nsid": 2}, errno.EINVAL),
        ({"nsid": 0}, errno.EINVAL),
        ({"blocks": 257}, errno.EINVAL),
        ({"flags": 1}, errno.EINVAL),
        ({"metadata_nbytes": 8}, errno.EINVAL),
        ({"address": 8}, errno.EFAULT),
        ({"address": (1 << 47) - 4096}, errno.EFAULT),
        ({"address": (1 << 64) - 4096}, errno.EFAULT),
    ],
)
def test_what_linux_refuses_never_becomes_a_command(host: Host, more: dict[str, int], number: int) -> None:
    reads = host.machine.controller.health.reads
    with refused(number):
        host.io(Io.READ, **more)
    assert host.machine.controller.health.reads == reads


def test_requests_that_a_node_does_not_know_are_enotty(host: Host) -> None:
    for fd, request in ((host.admin_fd, ID), (host.admin_fd, IO64_CMD), (host.generic_fd, RESET), (host.block_fd, 7)):
        with refused(errno.ENOTTY):
            host.machine.ioctl(fd, request, bytearray(80))


def test_the_controller_cannot_write_behind_the_memory_of_a_command(host: Host) -> None:
    host.buffer[:8192] = b"x" * 8192
    assert host.io(Io.READ, 0, 2, nbytes=512) & 0x7FF == Status.DATA_TRANSFER_ERROR
    assert host.buffer[512:8192] == b"x" * (8192 - 512)


def test_memory_that_only_reads_is_not_written(host: Host) -> None:
    whole = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    at = np.frombuffer(whole, dtype=np.uint8).__array_interface__["data"][0]
    assert host.io(Io.READ, address=at) & 0x7FF == Status.DATA_TRANSFER_ERROR


def test_a_command_that_is_held_is_aborted_after_its_timeout(host: Host) -> None:
    host.machine.hold()
    before = host.machine.controller.now_ns
    assert host.io(Io.READ, timeout_ms=70) & 0x7FF == Status.ABORT_REQUESTED
    assert 70_000_000 <= host.machine.controller.now_ns - before < 72_000_000
    host.machine.release()
    assert host.io(Io.READ) == 0
    assert host.machine.host.resets == 0


def test_a_command_that_is_lost_ends_with_a_reset(host: Host) -> None:
    host.machine.controller.drop()
    with refused(errno.EINTR):
        host.io(Io.READ)
    assert host.machine.host.resets == 1
    assert host.io(Io.READ) == 0


def test_a_reset_leaves_a_drive_that_works(host: Host) -> None:
    host.machine.ioctl(host.admin_fd, RESET, bytearray())
    assert host.io(Io.READ) == 0
    assert host.machine.host.resets == 1


def test_a_drive_that_was_pulled_out_is_gone(host: Host) -> None:
    host.machine.unplug()
    with refused(errno.ENODEV):
        host.io(Io.READ)
    with refused(errno.ENODEV):
        host.machine.pread(host.block_fd, memoryview(host.buffer)[:512], 0)
    with refused(errno.ENOENT):
        host.machine.open("/dev/nvme0n1", os.O_RDWR)
    with refused(errno.ENOENT):
        host.machine.read_text("/sys/class/nvme/nvme0/model")
    for folder in ("/dev", "/sys/class/nvme", "/sys/block", "/sys/dev/block", "/sys/class/nvme-generic"):
        assert host.machine.listdir(folder) == []


# the block device


def test_transfers_of_the_block_device_are_cut_into_commands(host: Host) -> None:
    data = bytes_of(3, 2 * MIB).tobytes()
    host.buffer[: 2 * MIB] = data
    assert host.machine.pwrite(host.block_fd, memoryview(host.buffer)[: 2 * MIB], 4096) == 2 * MIB
    assert host.machine.controller.health.writes == 16
    assert host.machine.controller.peek(1, 8, 2 * MIB // 512) == data
    host.buffer[: 2 * MIB] = bytes(2 * MIB)
    assert host.machine.pread(host.block_fd, memoryview(host.buffer)[: 2 * MIB], 4096) == 2 * MIB
    assert host.buffer[: 2 * MIB] == data


@pytest.mark.parametrize(("skew", "nbytes", "offset"), [(1, 512, 0), (0, 100, 0), (0, 512, 8)])
def test_transfers_off_the_grid_are_refused(host: Host, skew: int, nbytes: int, offset: int) -> None:
    with refused(errno.EINVAL):
        host.machine.pread(host.block_fd, memoryview(host.buffer)[skew : skew + nbytes], offset)


def test_transfers_stop_at_the_end(host: Host) -> None:
    end = host.machine.size(host.block_fd)
    view = memoryview(host.buffer)[:4096]
    assert host.machine.pread(host.block_fd, view, end - 512) == 512
    assert host.machine.pread(host.block_fd, view, end) == 0
    assert host.machine.pwrite(host.block_fd, view, end - 1024) == 1024
    with refused(errno.ENOSPC):
        host.machine.pwrite(host.block_fd, view, end)


def test_fallocate_zeroes_and_gives_blocks_back(host: Host) -> None:
    host.machine.controller.poke(1, 0, b"x" * 8192)
    host.machine.fallocate(host.block_fd, ZERO_RANGE, 512, 1024)
    host.machine.fallocate(host.block_fd, PUNCH_HOLE, 2048, 512)
    assert host.machine.controller.peek(1, 0, 6) == b"x" * 512 + bytes(1024) + b"x" * 512 + bytes(512) + b"x" * 512
    assert host.machine.controller.namespaces[0].used_blocks == 15
    for mode, offset, number in ((0, 0, errno.EOPNOTSUPP), (PUNCH_HOLE, 100, errno.EINVAL)):
        with refused(number):
            host.machine.fallocate(host.block_fd, mode, offset, 512)


def test_a_sync_makes_writes_survive_a_power_failure(host: Host) -> None:
    host.buffer[:1024] = b"a" * 1024
    view = memoryview(host.buffer)[:512]
    host.machine.pwrite(host.block_fd, view, 0)
    host.machine.fdatasync(host.block_fd)
    host.machine.pwrite(host.block_fd, view, 512)
    host.machine.lose_power()
    host.buffer[:1024] = b"b" * 1024
    assert host.machine.pread(host.block_fd, memoryview(host.buffer)[:1024], 0) == 1024
    assert host.buffer[:1024] == b"a" * 512 + bytes(512)


@pytest.mark.parametrize(
    ("status", "number", "tries"),
    [
        (Status.UNRECOVERED_READ | 0x4000, errno.ENODATA, 1),
        (Status.INTERNAL_ERROR | 0x4000, errno.EIO, 1),
        (Status.INTERNAL_ERROR, errno.EIO, 6),
        (Status.INVALID_FIELD | 0x4000, errno.EOPNOTSUPP, 1),
        (Status.LBA_OUT_OF_RANGE | 0x4000, errno.EREMOTEIO, 1),
    ],
)
def test_the_block_layer_makes_an_errno_of_a_status(host: Host, status: int, number: int, tries: int) -> None:
    host.machine.controller.inject_status(Io.READ, status, times=6)
    with refused(number):
        host.machine.pread(host.block_fd, memoryview(host.buffer)[:512], 0)
    assert host.machine.controller.health.failures == tries


def test_an_error_that_may_go_away_is_tried_again(host: Host) -> None:
    host.machine.controller.inject_status(Io.READ, Status.INTERNAL_ERROR, times=5)
    assert host.machine.pread(host.block_fd, memoryview(host.buffer)[:512], 0) == 512


# io_uring


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


@pytest.fixture
def ring(host: Host) -> Ring:
    return Ring(host.machine)


@pytest.fixture
def wide(host: Host) -> Iterator[Ring]:
    made = Ring(host.machine, flags=SQE128 | CQE32)
    yield made
    host.machine.close(made.fd)


def test_a_ring_reads_and_writes_the_block_device(host: Host, ring: Ring) -> None:
    data = bytes_of(5, MIB).tobytes()
    host.buffer[:MIB] = data
    ring.put(uring.WRITE, host.block_fd, 1, 0, host.at, MIB)
    assert ring.one() == MIB
    ring.put(uring.FSYNC, host.block_fd, 2, op_flags=uring.DATASYNC)
    assert ring.one() == 0
    ring.put(uring.READ, host.block_fd, 3, 0, host.at + 2 * MIB, MIB)
    assert ring.one() == MIB
    assert host.buffer[2 * MIB : 3 * MIB] == data


@pytest.mark.parametrize(
    ("entry", "result"),
    [
        ({"address": 1}, -errno.EINVAL),
        ({"nbytes": 100}, -errno.EINVAL),
        ({"offset": 1}, -errno.EINVAL),
        ({"flags": 4}, -errno.EINVAL),
        ({"opcode": 99}, -errno.EINVAL),
        ({"opcode": READ_FIXED}, -errno.EFAULT),
        ({"opcode": URING_CMD}, -errno.EOPNOTSUPP),
        ({"fd": 99}, -errno.EBADF),
    ],
)
def test_an_entry_that_cannot_be_is_answered_with_its_errno(
    host: Host, ring: Ring, entry: dict[str, int], result: int
) -> None:
    fields = {"opcode": uring.READ, "fd": host.block_fd, "offset": 0, "address": 0, "nbytes": 512, **entry}
    fields["address"] += host.at
    ring.put(name=7, **fields)
    assert ring.one() == result


def test_a_bad_block_is_enodata_through_a_ring(host: Host, ring: Ring) -> None:
    host.machine.controller.inject_read_error(1, 3)
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 4096)
    assert ring.one() == -errno.ENODATA


def test_registered_buffers_bound_what_an_entry_may_name(host: Host, ring: Ring) -> None:
    ring.register((host.at, 4096), (host.at + 8192, 512))
    host.buffer[8192:8704] = b"z" * 512
    for name, opcode, buffer, address, nbytes in (
        (1, WRITE_FIXED, 1, host.at + 8192, 512),
        (2, READ_FIXED, 0, host.at + 3584, 512),
        (3, READ_FIXED, 0, host.at + 3584, 1024),
        (4, READ_FIXED, 1, host.at, 512),
        (5, READ_FIXED, 2, host.at, 512),
    ):
        ring.put(opcode, host.block_fd, name, 0, address, nbytes, buffer=buffer)
        assert ring.one() == (nbytes if name < 3 else -errno.EFAULT)
    assert host.machine.controller.peek(1, 0) == b"z" * 512
    with refused(errno.EBUSY):
        ring.register((host.at, 4096))
    host.machine.syscall(SYS_IO_URING_REGISTER, ring.fd, 1, 0, 0)
    with refused(errno.ENXIO):
        host.machine.syscall(SYS_IO_URING_REGISTER, ring.fd, 1, 0, 0)
    with refused(errno.EFAULT):
        ring.register((8, 4096))


def test_a_passthrough_command_gives_its_status_and_its_result(host: Host, wide: Ring) -> None:
    host.machine.controller.poke(1, 9, b"q" * 512)
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512, 9)
    wide.command(host.generic_fd, 2, URING_IO, Io.READ, 1, host.at + 4096, 512, 1 << 31, 1)
    wide.command(host.admin_fd, 3, URING_ADMIN, Admin.GET_FEATURES, 0, 0, 0, 1)
    wide.enter(3)
    answers = wide.taken()
    assert answers[1] == (0, 0)
    assert answers[2][0] & 0x7FF == Status.LBA_OUT_OF_RANGE
    assert answers[3] == (0, 3)
    assert host.buffer[:512] == b"q" * 512


@pytest.mark.parametrize(
    ("node", "kind", "nsid", "result"),
    [
        ("generic_fd", URING_IO, 2, -errno.EINVAL),
        ("generic_fd", URING_ADMIN, 1, -errno.ENOTTY),
        ("admin_fd", URING_IO, 1, -errno.ENOTTY),
        ("block_fd", URING_IO, 1, -errno.EOPNOTSUPP),
    ],
)
def test_a_command_that_a_node_does_not_take_is_refused(
    host: Host, wide: Ring, node: str, kind: int, nsid: int, result: int
) -> None:
    wide.command(getattr(host, node), 1, kind, Io.READ, nsid, host.at, 512)
    assert wide.one() == result


@pytest.mark.parametrize("flags", [0, SQE128, CQE32])
def test_commands_need_wide_entries_and_wide_completions(host: Host, flags: int) -> None:
    ring = Ring(host.machine, flags=flags)
    ring.command(host.generic_fd, 1, URING_IO, Io.FLUSH, 1, 0, 0)
    assert ring.one() == -errno.EOPNOTSUPP


def test_what_is_held_is_a_timeout_and_comes_back_when_released(host: Host, wide: Ring) -> None:
    host.machine.hold()
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512)
    wide.enter(1)
    with refused(errno.ETIME):
        wide.enter(1)
    wide.put(uring.ASYNC_CANCEL, -1, 2, address=1)
    wide.enter(1)
    assert wide.taken() == {2: (-errno.EALREADY, 0)}
    host.machine.release()
    wide.enter(1)
    assert wide.taken() == {1: (0, 0)}


def test_a_machine_may_be_made_with_completions_held() -> None:
    host = Host(nvme_machine(held=True))
    assert host.ioctl(host.admin_fd, ADMIN_CMD, Admin.IDENTIFY, 4096, 1)[0] == 0
    assert host.io(Io.READ) & 0x7FF == Status.ABORT_REQUESTED


def test_completions_come_back_in_a_shuffled_order_that_the_seed_gives() -> None:
    def order(seed: int) -> list[int]:
        host = Host(nvme_machine(seed=seed))
        ring = Ring(host.machine, entries=16)
        for name in range(12):
            ring.put(uring.READ, host.block_fd, name, 4096 * name, host.at + 4096 * name, 4096)
        ring.enter(12)
        return list(ring.taken())

    assert order(1) == order(1)
    assert sorted(order(1)) == list(range(12))
    assert len({tuple(order(seed)) for seed in range(4)}) > 1


def test_a_closed_ring_lets_nobody_write_into_its_memory(host: Host) -> None:
    ring = Ring(host.machine)
    host.machine.controller.poke(1, 0, b"w" * 512)
    host.machine.hold()
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 512)
    ring.enter(0)
    host.machine.close(ring.fd)
    host.machine.release()
    for _ in range(8):
        assert host.io(Io.FLUSH) == 0
    assert host.buffer[:512] == bytes(512)
    assert host.machine.controller.health.reads == 0


def test_more_entries_than_the_queues_hold_wait_for_room() -> None:
    host = Host(nvme_machine(figures=NvmeFigures(queue_entries=4)))
    ring = Ring(host.machine, entries=32)
    host.machine.hold()
    for name in range(32):
        ring.put(uring.READ, host.block_fd, name, 512 * name, host.at + 512 * name, 512)
    ring.enter(1)
    host.machine.release()
    ring.enter(32)
    assert {result for result, _ in ring.taken().values()} == {512}


def test_entries_that_wait_for_room_are_aborted_in_their_turn() -> None:
    host = Host(nvme_machine(figures=NvmeFigures(queue_entries=2, io_queues=2)))
    ring = Ring(host.machine, flags=SQE128 | CQE32)
    host.machine.hold()
    for name in range(6):
        ring.command(host.generic_fd, name, URING_IO, Io.READ, 1, host.at, 512)
    ring.enter(6, timeout_s=1000.0)
    assert {status & 0x7FF for status, _ in ring.taken().values()} == {Status.ABORT_REQUESTED}


def test_a_drive_that_is_pulled_out_cancels_what_is_in_flight(host: Host, wide: Ring) -> None:
    host.machine.hold()
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512)
    wide.put(uring.READ, host.block_fd, 2, 0, host.at, 512)
    wide.enter(0)
    host.machine.unplug()
    wide.enter(2)
    assert wide.taken() == {1: (-errno.EINTR, 0), 2: (-errno.EIO, 0)}


def test_a_wait_takes_the_time_of_the_medium(host: Host, ring: Ring) -> None:
    before = host.machine.controller.now_ns
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 4096)
    ring.enter(1)
    took = host.machine.controller.now_ns - before
    assert 3_000 + 4096 // 3 <= took < 3_000 + 4096 // 3 + 2_000


def test_a_clock_that_is_given_is_the_only_one() -> None:
    time = iter(range(0, 1 << 62, 1_000))
    host = Host(nvme_machine(now_ns=lambda: next(time)))
    before = host.machine.controller.now_ns
    assert host.io(Io.READ) == 0
    assert host.machine.controller.now_ns > before
    assert host.machine.controller.now_ns % 1_000 == 0


# memory


def test_process_memory_moves_bytes_and_refuses_bad_addresses() -> None:
    memory = ProcessMemory()
    buffer = bytearray(b"0123456789")
    at = address_of(buffer)
    assert memory.read(at + 2, 3) == b"234"
    memory.write(at, b"ab")
    assert buffer[:3] == b"ab2"
    calls: list[Callable[[], object]] = [
        lambda: memory.read(16, 4),
        lambda: memory.write(16, b"x"),
        lambda: memory.check(16, 1 << 20),
        lambda: memory.check(-5, 8),
        lambda: memory.read(1 << 70, 1),
    ]
    for call in calls:
        with refused(errno.EFAULT):
            call()


def test_a_device_reaches_what_is_mapped_and_as_it_is_mapped() -> None:
    reachable = DeviceMemory(ProcessMemory())
    buffer = mmap.mmap(-1, 4 * 4096)
    at = address_of(buffer)
    reachable.map(at + 100, 5000, writable=False)
    reachable.map(at + 5100, 50, writable=True)
    assert reachable.read(at + 100, 5050) == bytes(5050)
    reachable.write(at + 5100, b"x" * 50)
    calls: list[Callable[[], object]] = [
        lambda: reachable.write(at + 5099, b"xx"),
        lambda: reachable.write(at + 5149, b"xx"),
        lambda: reachable.read(at + 99, 2),
        lambda: reachable.read(at + 5149, 2),
    ]
    for call in calls:
        with refused(errno.EFAULT):
            call()
    reachable.unmap(at + 5100, 50, writable=True)
    with refused(errno.EFAULT):
        reachable.read(at + 5100, 1)
    assert buffer[5000:5200] == bytes(100) + b"x" * 50 + bytes(50)


# random input

places = st.one_of(st.integers(-8, 2 * MIB), st.sampled_from([-(1 << 46), 1 << 46, 0]))
"""Offsets from the buffer's address: inside it, or where there is no memory."""
numbers = st.one_of(st.integers(0, 300), st.integers(0, 0xFFFFFFFF))
opcodes = st.one_of(st.sampled_from(sorted({*Io, *Admin})), st.integers(0, 255))


@given(st.lists(st.tuples(st.booleans(), opcodes, places, numbers, numbers, numbers, numbers), max_size=12))
def test_random_commands_leave_memory_of_others_alone(script: list[tuple[bool, int, int, int, int, int, int]]) -> None:
    host = Host(nvme_machine(capacity=MIB))
    wide = Ring(host.machine, entries=16, flags=SQE128 | CQE32)
    host.buffer[2 * MIB :] = b"." * (2 * MIB)
    started = 0
    for by_ring, opcode, place, nbytes, cdw10, cdw12, nsid in script:
        if place == 2 * MIB or (place >= 0 and place + nbytes > 2 * MIB):
            place = 0
        nbytes = min(nbytes, MIB)
        words = (cdw10, 0, cdw12, 0)
        if by_ring:
            wide.command(host.generic_fd, started, URING_IO, opcode, nsid % 3, max(host.at + place, 0), nbytes, *words)
            started += 1
            continue
        with suppress(OSError):
            host.ioctl(host.generic_fd, IO_CMD, opcode, nbytes, *words, nsid=nsid % 3, address=max(host.at + place, 0))
    wide.enter(started)
    assert sorted(wide.taken()) == list(range(started))
    assert host.buffer[2 * MIB :] == b"." * (2 * MIB)
    assert host.io(Io.FLUSH) == 0


@given(st.lists(st.binary(min_size=64, max_size=64), max_size=8))
def test_random_entries_of_a_ring_are_answered_once_each(script: list[bytes]) -> None:
    host = Host(nvme_machine(capacity=MIB))
    ring = Ring(host.machine)
    for name, raw in enumerate(script):
        opcode = raw[0] if raw[0] != uring.ASYNC_CANCEL else 0
        ring.put(
            opcode, host.block_fd if raw[1] & 1 else raw[2], name, raw[3] * 256, host.at + 2 * raw[4], raw[5] * 256
        )
    ring.enter(len(script))
    assert sorted(ring.taken()) == list(range(len(script)))


# the driver that people run


@pytest.mark.parametrize("io", ["posix", "io_uring"])
def test_the_nvme_driver_runs_on_the_machine(io: str) -> None:
    machine = nvme_machine(capacity=16 * MIB)
    rig = Rig("/dev/nvme0n1", {"io": io, "queues": 1}, machine)
    region = rig.open().alloc(4 * MIB)
    assert rig.device.info.model == machine.model
    data = bytes_of(9, 4 * MIB)
    rig.write(region.all(), data)
    assert np.array_equal(rig.read(region.all()), data)
    rig.flush(region)
    assert machine.controller.namespaces[0].dirty_blocks == 0
    machine.controller.inject_read_error(1, rig.device.offset_of(region) // 512)
    with pytest.raises(MediaError, match="ENODATA"):
        rig.read(region.all())
    with machine.guard:
        machine.unplug()
    with pytest.raises(Gone):
        rig.read(region.all())
    rig.close()
    assert machine.open_fds == 0


class TestConformance(Suite):
    """The nvme driver on the machine passes the suite of every device."""

    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors")
    examples: ClassVar[int] = 5

    def open(self, site: Site) -> Device:
        machine = nvme_machine(capacity=8 * MIB, lba_nbytes=4096)
        return open_nvme("nvme0", site, {"path": "/dev/nvme0n1", "queues": 2}, machine)
