"""What fails on a modelled drive behind NVMe passthrough: by which error it comes, and who works on."""

from __future__ import annotations

import errno
import gc
import weakref

import numpy as np
import pytest

from tests.nvme_namespace_rig import both_ways, buffer
from tests.nvme_rig import MIB, SHORT_S, Rig, filled, on_drive, works
from tests.seeded import bytes_of
from tierloop.devices.commands import Flush, Read, Write
from tierloop.devices.drivers.nvme_commands import GET_LOG, READ, WRITE
from tierloop.devices.errors import (
    Busy,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Timeout,
)
from tierloop.devices.regions import Region

rig = both_ways
region = filled


def test_a_media_error_names_the_block_and_leaves_the_others(rig: Rig, region: Region) -> None:
    bad = rig.device.offset_of(region) // 512 + 300
    with rig.machine.guard:
        rig.machine.controller.inject_read_error(1, bad)
    error = rig.error_of(Read(region.all(), buffer()))
    assert isinstance(error, MediaError)
    assert f"LBA {bad} " in str(error)
    assert "Unrecovered Read Error" in str(error)
    assert np.array_equal(rig.read(region.at(0, 300 * 512)), bytes_of(1, 1 * MIB)[: 300 * 512])
    assert np.array_equal(rig.read(region.at(301 * 512, 4096)), bytes_of(1, 1 * MIB)[301 * 512 :][:4096])


def test_without_the_error_log_the_block_is_found_by_reading_again(rig: Rig, region: Region) -> None:
    bad = rig.device.offset_of(region) // 512 + 300
    with rig.machine.guard:
        rig.machine.controller.inject_read_error(1, bad)
        rig.machine.controller.inject_status(GET_LOG, 0x4002, times=100, admin=True)
    assert f"LBA {bad} " in str(rig.error_of(Read(region.all(), buffer())))


def test_an_error_that_does_not_come_again_names_the_blocks_it_may_have_been(rig: Rig, region: Region) -> None:
    first = rig.device.offset_of(region) // 512
    with rig.machine.guard:
        rig.machine.controller.inject_status(READ, 0x4281)
        rig.machine.controller.inject_status(GET_LOG, 0x4002, times=100, admin=True)
    error = rig.error_of(Read(region.at(0, 4096), buffer(4096)))
    assert f"one LBA of blocks {first} to {first + 7}" in str(error)


def test_a_write_fault_is_a_media_error_and_the_device_works(rig: Rig, region: Region) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_write_fault(1, rig.device.offset_of(region) // 512)
    error = rig.error_of(Write(region.all(), buffer()))
    assert isinstance(error, MediaError)
    assert "Write Fault" in str(error)
    with rig.machine.guard:
        rig.machine.controller.heal()
    assert works(rig, region)


@pytest.mark.parametrize("status", [0x007, 0x022, 0x082])
def test_a_refusal_that_passes_is_tried_again_and_counted(rig: Rig, region: Region, status: int) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_status(READ, status, times=3)
    assert np.array_equal(rig.read(region.all()), bytes_of(1, 1 * MIB))
    assert rig.device.counts.retried == 3


def test_a_refusal_that_never_passes_is_busy_and_the_device_works(rig: Rig, region: Region) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_status(READ, 0x082, times=1000)
    error = rig.error_of(Read(region.at(0, 4096), buffer(4096)))
    assert isinstance(error, Busy)
    assert "Namespace Not Ready" in str(error)
    with rig.machine.guard:
        rig.machine.controller.heal()
    assert works(rig, region)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (0x4082, Busy),
        (0x4080, OutOfRange),
        (0x4081, OutOfMemory),
        (0x4002, ProtocolError),
        (0x4286, NoPermission),
        (0x47C0, ProtocolError),
    ],
)
def test_a_final_status_is_not_tried_again(rig: Rig, region: Region, status: int, kind: type[DeviceError]) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_status(WRITE, status)
    assert isinstance(rig.error_of(Write(region.at(0, 4096), buffer(4096))), kind)
    assert rig.device.counts.retried == 0
    assert works(rig, region)


def test_a_path_that_fails_is_gone_for_good(rig: Rig, region: Region) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_status(READ, 0x4302)
    assert isinstance(rig.error_of(Read(region.at(0, 4096), buffer(4096))), Gone)
    with pytest.raises(Gone):
        rig.device.submit(Read(region.at(0, 4096), buffer(4096)))


def test_a_failed_flush_says_that_writes_may_be_lost(rig: Rig, region: Region) -> None:
    with rig.machine.guard:
        rig.machine.controller.inject_status(0, 0x4006)
    error = rig.error_of(Flush(region.all()))
    assert isinstance(error, MediaError)
    assert "write them again" in str(error)


def test_a_drive_that_is_pulled_out_is_gone_and_closes(rig: Rig, region: Region) -> None:
    rig.flush(region)
    rig.machine.unplug()
    assert isinstance(rig.error_of(Read(region.all(), buffer())), Gone)
    with pytest.raises(Gone):
        rig.device.alloc(4096)
    rig.device.close()
    rig.opened.clear()
    assert rig.machine.open_fds == 0
    assert rig.machine.controller.peek(1, 0, 2048) == bytes_of(1, 1 * MIB).tobytes()


def test_a_command_that_is_held_times_out_in_a_ring_and_its_memory_is_kept() -> None:
    rig = on_drive(io="io_uring", deadline_s=SHORT_S)
    region = rig.device.alloc(4096)
    rig.write(region.all(), bytes_of(1, 4096))
    rig.machine.hold()
    room = buffer(4096)
    memory = weakref.ref(room.base)
    assert isinstance(rig.error_of(Read(region.all(), room)), Timeout)
    with pytest.raises(Gone):
        rig.device.submit(Read(region.all(), room))
    rig.site.checker = None
    rig.device.close()
    rig.opened.clear()
    del room
    gc.collect()
    kept = memory()
    assert kept is not None
    assert rig.machine.open_fds > 0
    rig.close()


def test_a_command_that_the_kernel_gives_up_is_a_timeout_after_a_few_tries() -> None:
    rig = on_drive(io="ioctl")
    region = rig.device.alloc(4096)
    rig.machine.hold()
    error = rig.error_of(Read(region.all(), buffer(4096)))
    assert isinstance(error, Timeout)
    assert "Command Abort Requested" in str(error)
    assert rig.device.counts.retried == 3
    rig.machine.release()
    assert works(rig, region)
    rig.close()


def test_a_controller_that_keeps_being_reset_is_a_timeout_after_a_few_tries() -> None:
    rig = on_drive(io="ioctl")
    region = rig.device.alloc(4096)
    for _ in range(4):
        rig.machine.fail_next("ioctl", errno.EINTR)
    error = rig.error_of(Read(region.all(), buffer(4096)))
    assert isinstance(error, Timeout)
    assert "the kernel gave the command up" in str(error)
    assert works(rig, region)
    rig.close()


@pytest.mark.parametrize(
    ("io", "call", "number"),
    [
        ("ioctl", "ioctl", errno.EAGAIN),
        ("ioctl", "ioctl", errno.EINTR),
        ("io_uring", "syscall", errno.EAGAIN),
        ("io_uring", "syscall", errno.EINTR),
        ("io_uring", "syscall", errno.EBUSY),
    ],
)
def test_a_call_that_is_put_off_is_made_again(io: str, call: str, number: int) -> None:
    rig = on_drive(io=io)
    region = rig.device.alloc(4096)
    for _ in range(3):
        rig.machine.fail_next(call, number)
    assert not rig.read(region.all()).any()
    assert rig.device.counts.retried == 3
    rig.close()


@pytest.mark.parametrize("number", [0, errno.EIO, errno.ENODEV, errno.ENODATA, errno.ENOSPC])
def test_a_block_device_that_is_pulled_out_is_gone_whatever_the_errno(number: int) -> None:
    rig = on_drive(path="/dev/nvme0n1", io="posix" if number else "io_uring")
    region = rig.device.alloc(4096)
    rig.machine.tree.remove("/sys/class/nvme/nvme0")
    if number:
        rig.machine.fail_next("pread", number)
    else:
        rig.machine.controller.inject_status(READ, 0x4281)
    assert isinstance(rig.error_of(Read(region.all(), buffer(4096))), Gone)
    rig.close()


@pytest.mark.parametrize(("io", "call", "number"), [("io_uring", "syscall", 0), ("ioctl", "ioctl", errno.EAGAIN)])
def test_a_drive_whose_controllers_have_vanished_is_gone_whatever_the_errno(io: str, call: str, number: int) -> None:
    rig = on_drive(io=io)
    region = rig.device.alloc(4096)
    rig.machine.tree.remove("/sys/class/nvme/nvme0")
    if number:
        rig.machine.fail_next(call, number)
    else:
        rig.machine.unplug()
    error = rig.error_of(Read(region.all(), buffer(4096)))
    assert isinstance(error, Gone)
    rig.close()


@pytest.mark.parametrize("call", ["fallocate", "fdatasync"])
def test_a_disk_whose_drive_has_vanished_is_gone_whatever_the_call(call: str) -> None:
    rig = on_drive(io="posix")
    rig.path = "/dev/nvme0n1"
    region = rig.device.alloc(4096)
    rig.machine.tree.remove("/sys/class/nvme/nvme0")
    rig.machine.fail_next(call, errno.EIO)
    with pytest.raises(Gone, match="nvme0 is not there any more"):
        rig.device.alloc(4096) if call == "fallocate" else rig.flush(region)
    rig.close()


def test_a_ring_without_a_live_path_is_tried_again() -> None:
    rig = on_drive(io="ioctl")
    region = rig.device.alloc(4096)
    state = "/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/state"
    rig.machine.tree.put(state, "resetting")
    rig.machine.fail_next("ioctl", errno.EINVAL)
    assert not rig.read(region.all()).any()
    assert rig.device.counts.retried == 1
    rig.machine.tree.put(state, "live")
    for _ in range(4):
        rig.machine.fail_next("ioctl", errno.EINVAL)
    assert isinstance(rig.error_of(Read(region.all(), buffer(4096))), ProtocolError)
    rig.close()
