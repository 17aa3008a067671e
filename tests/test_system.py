"""The operating-system seam: what the real one does, and which device error each errno becomes."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
from pathlib import Path

import pytest

from tests.fake_system import FakeSystem
from tierloop.devices.drivers.deadlines import Stuck, within
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
from tierloop.devices.system import HOST, PUNCH_HOLE, HostSystem, System, address_of, from_os


@pytest.fixture(params=["host", "fake"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[System, str]:
    """A system and a path on it where a file of 8192 bytes stands."""
    if request.param == "host":
        path = tmp_path / "file"
        path.write_bytes(bytes(range(256)) * 32)
        return HostSystem(), str(path)
    fake = FakeSystem()
    fake.add("/file", "file", bytes(range(256)) * 32)
    return fake, "/file"


def test_bytes_are_written_and_read_where_they_belong(opened: tuple[System, str]) -> None:
    system, path = opened
    fd = system.open(path, os.O_RDWR)
    assert system.pwrite(fd, memoryview(b"tier"), 100) == 4
    into = bytearray(6)
    assert system.pread(fd, memoryview(into), 99) == 6
    assert bytes(into) == b"\x63tier\x68"
    system.close(fd)


def test_a_read_at_the_end_moves_what_is_there(opened: tuple[System, str]) -> None:
    system, path = opened
    fd = system.open(path, os.O_RDWR)
    assert system.pread(fd, memoryview(bytearray(100)), 8190) == 2
    assert system.pread(fd, memoryview(bytearray(100)), 8192) == 0
    system.close(fd)


def test_a_second_descriptor_cannot_lock_the_file_until_the_first_is_closed(opened: tuple[System, str]) -> None:
    system, path = opened
    first, second = system.open(path, os.O_RDWR), system.open(path, os.O_RDWR)
    system.lock(first)
    with pytest.raises(BlockingIOError):
        system.lock(second)
    system.close(first)
    system.lock(second)
    system.close(second)


def test_a_resized_file_reads_as_zeros_where_it_grew(opened: tuple[System, str]) -> None:
    system, path = opened
    fd = system.open(path, os.O_RDWR)
    system.resize(fd, 16384)
    into = bytearray(b"x" * 10)
    assert system.size(fd) == 16384
    assert system.pread(fd, memoryview(into), 10000) == 10
    assert bytes(into) == bytes(10)
    system.close(fd)


def test_a_punched_hole_reads_as_zeros_and_keeps_the_size(opened: tuple[System, str]) -> None:
    system, path = opened
    fd = system.open(path, os.O_RDWR)
    try:
        system.fallocate(fd, PUNCH_HOLE, 4096, 4096)
    except OSError:
        pytest.skip("this file system punches no holes")
    into = bytearray(8192)
    assert system.pread(fd, memoryview(into), 0) == 8192
    assert bytes(into) == bytes(range(256)) * 16 + bytes(4096)
    system.close(fd)


def test_the_status_of_a_path_and_of_its_descriptor_are_one(opened: tuple[System, str]) -> None:
    system, path = opened
    fd = system.open(path, os.O_RDWR)
    assert system.stat(path) == system.fstat(fd)
    assert system.stat(path).kind == "file"
    system.close(fd)


@pytest.mark.parametrize("call", ["open", "stat"])
def test_a_missing_path_is_enoent(opened: tuple[System, str], call: str) -> None:
    system, path = opened
    with pytest.raises(FileNotFoundError):
        system.open(path + ".not", os.O_RDWR) if call == "open" else system.stat(path + ".not")


def test_a_raw_system_call_returns_its_result() -> None:
    getpid = {"x86_64": 39}.get(os.uname().machine, 172)
    assert HOST.syscall(getpid) == os.getpid()


def test_a_raw_system_call_that_fails_raises_its_errno() -> None:
    with pytest.raises(OSError, match=r"\w") as caught:
        HOST.syscall(425, 0, 0)  # io_uring_setup without entries or parameters
    assert caught.value.errno in (errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def test_a_recorded_tree_is_read_instead_of_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "sys" / "block" / "nvme0n1" / "queue"
    folder.mkdir(parents=True)
    (folder / "logical_block_size").write_text("4096\n")
    assert HostSystem(tmp_path).read_text("/sys/block/nvme0n1/queue/logical_block_size") == "4096"


def test_anonymous_memory_is_zeroed_aligned_and_addressable() -> None:
    mapped = HOST.mmap(-1, 8192)
    address = address_of(mapped)
    assert address % 4096 == 0
    assert ctypes.string_at(address, 8192) == bytes(8192)
    mapped.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotPresent),
        (errno.EACCES, NoPermission),
        (errno.EPERM, NoPermission),
        (errno.EROFS, NoPermission),
        (errno.ENOSPC, OutOfMemory),
        (errno.EDQUOT, OutOfMemory),
        (errno.ENOMEM, OutOfMemory),
        (errno.EBUSY, Busy),
        (errno.EAGAIN, Busy),
        (errno.ETIME, Timeout),
        (errno.ETIMEDOUT, Timeout),
        (errno.EIO, MediaError),
        (errno.ENODATA, MediaError),
        (errno.EBADMSG, MediaError),
        (errno.EOPNOTSUPP, Unsupported),
        (errno.ENOSYS, Unsupported),
        (errno.ENODEV, Gone),
        (errno.ENXIO, Gone),
        (errno.EINVAL, ProtocolError),
        (errno.EBADF, ProtocolError),
    ],
)
def test_each_errno_becomes_the_error_that_says_who_is_to_blame(number: int, kind: type[DeviceError]) -> None:
    error = from_os("nvme0", "read", OSError(number, "x"), "4096 bytes at offset 0")
    assert type(error) is kind
    assert error.errno == number
    assert "nvme0: read: 4096 bytes at offset 0" in str(error)
    assert errno.errorcode[number] in str(error)
    assert isinstance(error.__cause__, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_call_within_its_deadline_gives_what_it_raised() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        within(60, fail)


def test_a_call_that_hangs_is_left_behind() -> None:
    fake = FakeSystem()
    fake.add("/file", "file", bytes(4096))
    fake.inject("read", hangs=True)
    fd = fake.open("/file", os.O_RDWR)
    with pytest.raises(Stuck, match="no progress"):
        within(0.02, lambda: fake.pread(fd, memoryview(bytearray(512)), 0))
    fake.release()


def test_a_call_that_makes_progress_is_waited_for() -> None:
    fake = FakeSystem()
    seen = iter(range(10))
    turns: list[int] = []

    def progress() -> int:
        turns.append(next(seen))
        if len(turns) == 4:
            fake.release()
        return turns[-1]

    fake.add("/file", "file", bytes(4096))
    fake.inject("read", hangs=True)
    fd = fake.open("/file", os.O_RDWR)
    within(0.01, lambda: fake.pread(fd, memoryview(bytearray(512)), 0), progress)
    assert len(turns) >= 4
