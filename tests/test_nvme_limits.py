"""Limits of a process that a container sets: threads above all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from tests.nvme_rig import MIB, on_drive, on_fake
from tests.seeded import bytes_of
from tierloop.devices.commands import Read, Write
from tierloop.devices.drivers.nvme import probe
from tierloop.devices.errors import MediaError, OutOfMemory, Timeout
from tierloop.emulators.kernel_nvme import nvme_machine


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more threads may be started: a number to set. What Python raises then is a RuntimeError."""
    left, start = [1 << 30], threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if left[0] < 1:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    yield left
    left[0] = 1 << 30


@pytest.mark.parametrize("most", range(4))
def test_too_few_threads_to_open_are_out_of_memory_and_leave_nothing_open(allowed: list[int], most: int) -> None:
    rig = on_fake()
    allowed[0] = most
    with pytest.raises(OutOfMemory, match=r"no further thread can be started: .*ulimit -u.*pids\.max"):
        rig.open(queues=64)
    assert rig.fake.open_fds == 0
    assert not rig.fake.exists("/medium")
    (reason,) = probe("/medium", on_fake().fake) if most else [None]
    assert reason is None or reason.fatal


def test_without_a_thread_a_drive_is_not_opened_either(allowed: list[int]) -> None:
    allowed[0] = 0
    (reason,) = probe("/dev/ng0n1", nvme_machine())
    assert reason.fatal
    assert "no further thread" in reason


def test_a_command_that_finds_no_thread_is_out_of_memory_and_the_device_works(allowed: list[int]) -> None:
    rig = on_fake(io="posix")
    region = rig.device.alloc(MIB)
    allowed[0] = 0
    error = rig.error_of(Write(region.all(), bytes_of(1, MIB)))
    assert isinstance(error, OutOfMemory)
    assert error.errno == errno.EAGAIN
    with pytest.raises(OutOfMemory, match="no further thread"):
        rig.device.alloc(4096)
    allowed[0] = 1 << 30
    rig.write(region.all(), bytes_of(1, MIB))
    assert (rig.read(region.all()) == bytes_of(1, MIB)).all()
    rig.close()


def test_a_media_error_is_one_also_where_nobody_may_look_for_its_block(allowed: list[int]) -> None:
    machine = nvme_machine()
    rig = on_drive(machine, io="io_uring")
    region = rig.device.alloc(4096)
    machine.controller.inject_read_error(1, 3)
    allowed[0] = 0
    error = rig.error_of(Read(region.all(), bytes_of(1, 4096)))
    assert isinstance(error, MediaError)
    assert "one LBA of blocks 0 to 7" in str(error)
    rig.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EBUSY])
def test_a_ring_that_is_put_off_too_often_says_that_and_not_that_time_was_up(number: int) -> None:
    rig = on_fake(io="io_uring", retries=2)
    region = rig.device.alloc(MIB)
    rig.fake.inject("enter", number, times=100)
    error = rig.error_of(Read(region.all(), bytes_of(1, MIB)))
    assert isinstance(error, Timeout)
    assert f"io_uring_enter was put off 3 times ({errno.errorcode[number]})" in str(error)
    assert "30 s" not in str(error)
    rig.fake.heal()
    rig.close()
