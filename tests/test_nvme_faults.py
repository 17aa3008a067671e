"""What can go wrong beneath the nvme driver, one thing at a time: the unmodified driver on a misbehaving system."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.fake_system import FakeSystem
from tests.nvme_rig import MIB, SHORT_S, Rig, filled, on_fake, works
from tests.seeded import bytes_of
from tierloop.devices.commands import Command, Copy, Flush, Read, Write
from tierloop.devices.drivers.engines import LARGEST_TRANSFER, Engine, PosixEngine, Target
from tierloop.devices.drivers.pieces import contiguous
from tierloop.devices.drivers.ring import refusal
from tierloop.devices.drivers.uring import UringEngine
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    OutOfMemory,
    ProtocolError,
    Timeout,
)
from tierloop.devices.regions import Region
from tierloop.devices.system import HOST
from tierloop.devices.waiting import wait

READ_CALL = {"io_uring": "uring read", "posix": "pread"}


@pytest.fixture(params=["io_uring", "posix"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """An operating system in memory, under both engines."""
    made = on_fake(io=request.param)
    yield made
    made.close()


@pytest.fixture(params=["io_uring", "posix"])
def hasty(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The same with a short deadline."""
    made = on_fake(io=request.param, deadline_s=SHORT_S)
    yield made
    made.close()


region = filled


def buffer(nbytes: int = 1 * MIB) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(nbytes, dtype=np.uint8)


def command(call: str, region: Region) -> Command:
    """A command that makes this call of the system."""
    if call == "sync":
        return Flush(region.all())
    return Read(region.all(), buffer()) if call == "read" else Write(region.all(), buffer())


@pytest.mark.parametrize("moves", [512, 4096, 300_032])
def test_a_short_read_is_continued_where_it_stopped(rig: Rig, region: Region, moves: int) -> None:
    rig.fake.inject("read", moves=moves)
    into = buffer()
    done = rig.run(Read(region.all(), into))
    assert np.array_equal(into, bytes_of(1, 1 * MIB))
    assert rig.device.counts.resumed == 1
    assert done.media_nbytes == 1 * MIB


def test_a_short_write_is_continued_where_it_stopped(rig: Rig, region: Region) -> None:
    rig.fake.inject("write", moves=8192, times=3)
    rig.write(region.all(), bytes_of(2, 1 * MIB))
    assert np.array_equal(rig.read(region.all()), bytes_of(2, 1 * MIB))
    assert rig.device.counts.resumed == 3


def test_a_transfer_that_stops_inside_a_block_moves_that_block_again(rig: Rig, region: Region) -> None:
    rig.fake.inject("read", moves=1000)
    into = buffer()
    done = rig.run(Read(region.all(), into))
    assert np.array_equal(into, bytes_of(1, 1 * MIB))
    assert done.media_nbytes == 1 * MIB + 1000 - 512


def test_a_transfer_that_never_gets_past_a_block_is_an_error(rig: Rig, region: Region) -> None:
    rig.fake.inject("write", moves=100, times=1000)
    error = rig.error_of(Write(region.all(), buffer()))
    assert isinstance(error, ProtocolError)
    assert "were not taken" in str(error)


def test_a_medium_that_ends_too_early_is_a_media_error(rig: Rig, region: Region) -> None:
    rig.fake.truncate("/medium", rig.device.offset_of(region) + 700_000)
    error = rig.error_of(Read(region.all(), buffer()))
    assert isinstance(error, MediaError)
    assert error.errno == errno.ENODATA


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_a_call_that_is_put_off_is_made_again_and_counted(rig: Rig, region: Region, call: str, number: int) -> None:
    rig.fake.inject(call, number, times=3)
    assert rig.run(command(call, region)).error is None
    assert rig.device.counts.retried == 3


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_a_storm_of_eagain_ends_as_busy_and_the_device_works(rig: Rig, region: Region, call: str) -> None:
    rig.fake.inject(call, errno.EAGAIN, times=100_000)
    error = rig.error_of(command(call, region))
    assert isinstance(error, Busy)
    assert error.errno == errno.EAGAIN
    assert rig.device.counts.retried >= 8
    rig.fake.heal()
    assert works(rig, region)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EBUSY])
def test_a_ring_that_cannot_be_entered_now_is_entered_again(number: int) -> None:
    rig = on_fake(io="io_uring")
    region = rig.device.alloc(1 * MIB)
    rig.fake.inject("enter", number, times=4)
    rig.write(region.all(), bytes_of(3, 1 * MIB))
    assert rig.device.counts.retried == 4
    rig.fake.inject("enter", number, times=100_000)
    assert isinstance(rig.error_of(Read(region.all(), buffer())), Timeout)
    rig.fake.heal()
    assert works(rig, region)
    rig.close()


def test_a_ring_that_breaks_is_a_protocol_error() -> None:
    rig = on_fake(io="io_uring")
    region = rig.device.alloc(1 * MIB)
    rig.fake.inject("enter", errno.EBADF)
    error = rig.error_of(Read(region.all(), buffer()))
    assert isinstance(error, ProtocolError)
    assert "io_uring_enter" in str(error)
    assert works(rig, region)
    rig.close()


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("read", errno.EIO, MediaError),
        ("read", errno.ENODATA, MediaError),
        ("read", errno.EBADMSG, MediaError),
        ("read", errno.EINVAL, ProtocolError),
        ("read", errno.EFAULT, ProtocolError),
        ("read", errno.ETIMEDOUT, Timeout),
        ("write", errno.EIO, MediaError),
        ("write", errno.ENOSPC, OutOfMemory),
        ("write", errno.EDQUOT, OutOfMemory),
        ("write", errno.EPERM, NoPermission),
        ("write", errno.EROFS, NoPermission),
        ("sync", errno.EIO, MediaError),
        ("sync", errno.ENOSPC, OutOfMemory),
    ],
)
def test_an_error_of_the_system_keeps_errno_and_place_and_the_device_works(
    rig: Rig, region: Region, call: str, number: int, kind: type[DeviceError]
) -> None:
    at = rig.device.offset_of(region) + LARGEST_TRANSFER
    rig.fake.inject(call, number, offset=None if call == "sync" else at)
    error = rig.error_of(command(call, region))
    assert type(error) is kind
    assert error.errno == number
    assert error.device == "nvme0"
    if call == "sync":
        assert "write them again" in str(error)
    else:
        assert f"offset {at}" in str(error)
    assert works(rig, region)


def test_what_moved_before_an_error_is_counted(rig: Rig, region: Region) -> None:
    rig.fake.inject("read", errno.EIO, offset=rig.device.offset_of(region) + LARGEST_TRANSFER)
    completion = rig.device.submit(Read(region.all(), buffer()))
    rig.site.clock.run_until(lambda: completion.done, rig.site.clock.now() + 60_000_000_000)
    assert completion.media_nbytes == LARGEST_TRANSFER
    with pytest.raises(MediaError):
        completion.result()


def test_an_error_inside_a_window_of_a_copy_is_reported(rig: Rig, region: Region) -> None:
    other = rig.device.alloc(1 * MIB)
    rig.fake.inject("write", errno.EIO)
    assert isinstance(rig.error_of(Copy(region.all(), other.all())), MediaError)
    assert works(rig, other)


def test_no_memory_for_bouncing_is_out_of_memory(rig: Rig) -> None:
    region = rig.device.alloc(1 * MIB)
    rig.fake.inject("mmap", errno.ENOMEM)
    skewed = np.zeros(2 * MIB, dtype=np.uint8)
    start = -skewed.__array_interface__["data"][0] % 4096 + 16
    assert isinstance(rig.error_of(Write(region.all(), skewed[start : start + 1 * MIB])), OutOfMemory)
    assert works(rig, region)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO])
def test_a_device_that_is_unplugged_is_gone(rig: Rig, region: Region, number: int) -> None:
    rig.fake.inject("read", number, times=1000)
    into = [buffer() for _ in range(3)]
    completions = [rig.device.submit(Read(region.all(), each)) for each in into]
    rig.site.clock.run_until(lambda: all(c.done for c in completions), rig.site.clock.now() + 60_000_000_000)
    for completion in completions:
        with pytest.raises(Gone):
            completion.result()
    with pytest.raises(Gone):
        rig.device.submit(Read(region.all(), into[0]))
    with pytest.raises(Gone):
        rig.device.alloc(4096)
    rig.device.close()
    assert rig.fake.open_fds == 0


def test_a_long_queue_ends_when_the_device_is_unplugged(rig: Rig, region: Region) -> None:
    rig.fake.inject("write", errno.ENODEV, times=10)
    data = buffer(4096)
    completions = [rig.device.submit(Write(region.at(0, 4096), data)) for _ in range(1500)]
    rig.site.clock.run_until(lambda: all(c.done for c in completions), rig.site.clock.now() + 60_000_000_000)
    assert all(isinstance(c.error, Gone) for c in completions)
    with pytest.raises(Gone):
        rig.device.close()


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_a_transfer_that_is_overdue_is_taken_back_and_the_device_works(call: str) -> None:
    rig = on_fake(io="io_uring", deadline_s=SHORT_S)
    region = rig.device.alloc(1 * MIB)
    rig.fake.inject(call, hangs=True, times=2)
    error = rig.error_of(command(call, region))
    assert isinstance(error, Timeout)
    assert "0.5 s" in str(error)
    assert rig.device.counts.timeouts == 1
    rig.fake.heal()
    assert works(rig, region)
    rig.close()


def test_a_real_ring_takes_back_what_is_overdue() -> None:
    empty, _ = pipe = os.pipe()
    target = Target("nvme0", HOST, empty, 512, 1, deadline_s=0.02, retries=8, stop=threading.Event())
    try:
        with pytest.raises(Timeout, match=r"none of 1 transfers came back within 0\.02 s"):
            UringEngine(target, 4)  # whose first read waits for a byte that nobody writes
    except OSError as error:
        pytest.skip(refusal(HOST, error))
    finally:
        for fd in pipe:
            os.close(fd)


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_a_device_that_keeps_transfers_is_given_up_and_closing_returns(hasty: Rig, call: str) -> None:
    region = hasty.device.alloc(1 * MIB)
    hasty.fake.inject(call, hangs=True, cancellable=False, times=4)
    stuck = hasty.device.submit(command(call, region))
    behind = hasty.device.submit(Read(region.all(), buffer()))
    after = hasty.device.submit(Flush(region.all()), queue=1, after=[stuck])
    hasty.site.clock.run_until(lambda: behind.done and after.done, hasty.site.clock.now() + 60_000_000_000)
    assert [type(c.error) for c in (stuck, behind, after)] == [Timeout, Gone, Cancelled]
    with pytest.raises(Gone, match=r"given up, .*until this process ends: end it to open the medium again"):
        hasty.device.alloc(4096)
    for completion in (stuck, behind, after):
        with pytest.raises(DeviceError):
            completion.result()
    hasty.device.close()
    with pytest.raises(Busy, match="another owner"):
        hasty.open()


def test_closing_does_not_wait_for_a_device_that_hangs(hasty: Rig) -> None:
    region = hasty.device.alloc(1 * MIB)
    hasty.fake.inject("read", hangs=True, cancellable=False, times=4)
    hasty.fake.calls.clear()
    completion = hasty.device.submit(Read(region.all(), buffer()))
    call, deadline = READ_CALL[hasty.device.info.notes["io"]], hasty.site.clock.now() + 60_000_000_000
    while not hasty.fake.calls[call] and hasty.site.clock.now() < deadline:
        pass  # until it hangs
    with pytest.raises(Timeout):
        hasty.device.close()
    assert completion.done


@pytest.mark.parametrize("io", ["io_uring", "posix"])
def test_a_transfer_that_is_told_to_stop_moves_nothing_more(io: str) -> None:
    system = FakeSystem()
    system.add("/medium", "file", bytes(1 * MIB))
    fd, stop = system.open("/medium", os.O_RDWR), threading.Event()
    target = Target("nvme0", system, fd, 512, 1, deadline_s=60, retries=8, stop=stop)
    engine: Engine = UringEngine(target, 4) if io == "io_uring" else PosixEngine(target)
    stop.set()
    system.calls.clear()
    into = buffer()
    pieces = contiguous(np.array([[0, 4096], [8192, 4096]]), 0, into.__array_interface__["data"][0])
    with pytest.raises(Gone, match="closed while the command ran"):
        engine.transfer(pieces, write=False)
    assert system.calls[READ_CALL[io]] == 0
    engine.close()


def test_a_hanging_allocation_times_out_and_its_bytes_are_not_given_to_another(hasty: Rig) -> None:
    free = hasty.device.alloc(4096)
    hasty.fake.inject("fallocate", hangs=True)
    with pytest.raises(Timeout):
        hasty.device.alloc(1 * MIB)
    later = hasty.device.alloc(4096)
    assert hasty.device.offset_of(later) >= hasty.device.offset_of(free) + 4096 + 1 * MIB
    hasty.write(later.all(), bytes_of(4, 4096))
    hasty.fake.release()
    assert np.array_equal(hasty.read(later.all()), bytes_of(4, 4096))


def test_a_full_disk_is_out_of_memory_when_allocating() -> None:
    rig = on_fake(FakeSystem(disk_nbytes=2 * MIB))
    kept = rig.device.alloc(1 * MIB)
    with pytest.raises(OutOfMemory, match="ENOSPC"):
        rig.device.alloc(2 * MIB)
    assert rig.fake.used_nbytes == 1 * MIB
    assert works(rig, kept)
    assert rig.device.alloc(1 * MIB).nbytes == 1 * MIB
    rig.close()


@pytest.mark.parametrize("io", ["io_uring", "posix"])
def test_a_disk_that_fills_up_under_a_write_is_out_of_memory_not_done(io: str) -> None:
    rig = on_fake(FakeSystem(disk_nbytes=2 * MIB, zero_range=False), io=io)
    rig.fake.inject("fallocate", errno.EOPNOTSUPP, times=3)
    with pytest.raises(OutOfMemory):
        rig.device.alloc(3 * MIB)
    rig.close()
    sparse = on_fake(FakeSystem(disk_nbytes=2 * MIB), io=io)
    region = sparse.device.adopt(0, 3 * MIB)
    error = sparse.error_of(Write(region.all(), buffer(3 * MIB)))
    assert isinstance(error, OutOfMemory)
    assert error.errno == errno.ENOSPC
    sparse.close()


def test_a_failed_allocation_gives_everything_back(rig: Rig) -> None:
    rig.fake.inject("fallocate", errno.EIO)
    with pytest.raises(MediaError):
        rig.device.alloc(8 * MIB)
    assert rig.device.alloc(8 * MIB).nbytes == 8 * MIB


def test_a_failed_release_frees_the_region_all_the_same(rig: Rig) -> None:
    region = rig.device.alloc(8 * MIB)
    rig.fake.inject("fallocate", errno.EIO)
    with pytest.raises(MediaError):
        rig.device.free(region)
    assert region.freed
    assert rig.device.alloc(8 * MIB).nbytes == 8 * MIB


def test_a_loss_that_shows_only_at_closing_is_raised(rig: Rig) -> None:
    rig.device.alloc(4096)
    rig.fake.inject("close", errno.EIO, times=4)
    with pytest.raises(MediaError, match="writes may be lost"):
        rig.device.close()


def test_an_error_that_nobody_looked_at_is_raised_when_closing(rig: Rig, region: Region) -> None:
    rig.fake.inject("read", errno.EIO)
    completion = rig.device.submit(Read(region.all(), buffer()))
    rig.site.clock.run_until(lambda: completion.done, rig.site.clock.now() + 60_000_000_000)
    with pytest.raises(MediaError):
        rig.device.close()


def test_followers_of_a_failed_command_are_cancelled_with_its_cause(rig: Rig, region: Region) -> None:
    rig.fake.inject("read", errno.EIO)
    first = rig.device.submit(Read(region.all(), buffer()))
    second = rig.device.submit(Flush(region.all()), queue=1, after=[first])
    with pytest.raises(Cancelled) as caught:
        wait(rig.site.clock, second)
    assert isinstance(caught.value.__cause__, MediaError)
    assert rig.fake.calls["uring sync"] + rig.fake.calls["fdatasync"] == 0
