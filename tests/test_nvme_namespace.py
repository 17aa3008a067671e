"""The nvme driver on the generic character device of a modelled drive: NVMe passthrough, through a ring and ioctl."""

from __future__ import annotations

import ctypes
import errno
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from tests.nvme_rig import MIB, SHORT_S, Rig, bytes_of, host_memory, on_drive, on_fake
from tests.nvme_tables import controller_table, namespace_table
from tierloop.devices.commands import Copy, Flush, Read, Write
from tierloop.devices.drivers.nvme import nvme_drives, probe
from tierloop.devices.drivers.nvme_commands import (
    ADMIN_COMMAND,
    DATASET,
    GET_LOG,
    IDENTIFY,
    IO_COMMAND,
    PAYLOAD,
    READ,
    WRITE,
    WRITE_ZEROES,
)
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    NotPresent,
    OutOfRange,
    ProtocolError,
    Timeout,
    Unsupported,
)
from tierloop.devices.regions import Region
from tierloop.emulators import kernel_uring
from tierloop.emulators.kernel import Absent
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.emulators.kernel_nvme_nodes import GenericNode
from tierloop.firmware_models.nvme_identify import NvmeFigures

KIB = 1024
WAYS = ("io_uring", "ioctl")
READ_ONLY = 1 << 3


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A drive with blocks of 512 bytes and transfers of 128 KiB, both ways."""
    made = on_drive(io=request.param, reaches=["dram"])
    yield made
    made.close()


@pytest.fixture
def region(rig: Rig) -> Region:
    """1 MiB that holds bytes_of(1, 1 MiB)."""
    made = rig.device.alloc(1 * MIB)
    rig.write(made.all(), bytes_of(1, 1 * MIB))
    return made


def buffer(nbytes: int = 1 * MIB, skew: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros that begin `skew` bytes behind a page."""
    room = np.zeros(nbytes + 8192, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % 4096 + skew
    return room[start : start + nbytes]


def operations(rig: Rig, kind: str) -> list[tuple[int, int]]:
    """(first block, blocks) of all media operations of one kind."""
    with rig.machine.guard:
        return [(each.lba, each.blocks) for each in rig.machine.controller.history if each.op == kind]


def works(rig: Rig, region: Region) -> bool:
    """Whether the device still reads and writes."""
    rig.write(region.all(), bytes_of(9, region.nbytes))
    return bool(np.array_equal(rig.read(region.all()), bytes_of(9, region.nbytes)))


# Bytes


def test_bytes_come_back_as_written_and_lie_on_the_drive(rig: Rig, region: Region) -> None:
    first = rig.device.offset_of(region) // 512
    assert np.array_equal(rig.read(region.all()), bytes_of(1, 1 * MIB))
    with rig.machine.guard:
        assert rig.machine.controller.peek(1, first, 2048) == bytes_of(1, 1 * MIB).tobytes()


def test_transfers_are_no_larger_than_the_drive_takes(rig: Rig, region: Region) -> None:
    before = len(operations(rig, "read"))
    rig.read(region.all())
    first = rig.device.offset_of(region) // 512
    assert sorted(operations(rig, "read")[before:]) == [(first + 256 * i, 256) for i in range(8)]
    assert rig.device.info.notes["largest_transfer"] == str(128 * KIB)


@pytest.mark.parametrize("figures", [NvmeFigures(mdts=0), NvmeFigures(mdts=1), NvmeFigures(mdts=16)])
@pytest.mark.parametrize("way", WAYS)
def test_a_drive_of_any_transfer_size_is_served(way: str, figures: NvmeFigures) -> None:
    rig = on_drive(nvme_machine(figures=figures), io=way)
    region = rig.device.alloc(1 * MIB)
    assert works(rig, region)
    largest = max(blocks for _, blocks in operations(rig, "write"))
    assert largest == min(figures.largest_transfer or 256 * KIB, 256 * KIB) // 512
    rig.close()


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_4096_bytes_are_the_grid(way: str) -> None:
    rig = on_drive(nvme_machine(lba_nbytes=4096), io=way)
    region = rig.device.alloc(64 * KIB)
    assert rig.device.info.memories[0].alignment == 4096
    assert works(rig, region)
    rig.close()


@pytest.mark.parametrize(("skew", "bounced"), [(0, 0), (4, 0), (512, 0), (1, 1 * MIB), (2, 1 * MIB)])
def test_host_addresses_off_four_bytes_are_bounced(rig: Rig, region: Region, skew: int, bounced: int) -> None:
    into = buffer(skew=skew)
    rig.run(Read(region.all(), into))
    before = rig.device.counts.bounced_nbytes
    rig.run(Read(region.all(), into))
    assert rig.device.counts.bounced_nbytes - before == bounced
    assert np.array_equal(into, bytes_of(1, 1 * MIB))


def test_copies_reach_host_mapped_memory_with_ragged_spans(rig: Rig, region: Region) -> None:
    dram = host_memory(1 * MIB)
    assert dram.view is not None
    rig.run(Copy(region.at(512, 8192), dram.at(3, 8192)))
    assert np.array_equal(dram.view[3 : 3 + 8192], bytes_of(1, 1 * MIB)[512 : 512 + 8192])
    rig.run(Copy(dram.at(3, 8192), region.at(65536, 8192)))
    assert np.array_equal(rig.read(region.at(65536, 8192)), bytes_of(1, 1 * MIB)[512 : 512 + 8192])


def test_all_bytes_are_counted_as_direct_and_useful(rig: Rig, region: Region) -> None:
    rig.read(region.all())
    counts = rig.device.counts
    assert counts.direct_nbytes == counts.useful_nbytes == 2 * MIB
    assert counts.buffered_nbytes == 0


# Space


def test_a_new_region_is_zeroed_by_the_drive(rig: Rig, region: Region) -> None:
    rig.device.free(region)
    before = len(operations(rig, "zero"))
    again = rig.device.alloc(1 * MIB)
    assert operations(rig, "zero")[before:] == [(0, 2048)]
    assert not rig.read(again.all()).any()


@pytest.mark.parametrize("status", [0x4001, 0x4002])
def test_a_drive_that_refuses_to_zero_gets_zeros_written(rig: Rig, region: Region, status: int) -> None:
    rig.device.free(region)
    with rig.machine.guard:
        rig.machine.controller.inject_status(WRITE_ZEROES, status, times=100)
    before = len(operations(rig, "write"))
    again = rig.device.alloc(1 * MIB)
    assert sum(blocks for _, blocks in operations(rig, "write")[before:]) == 2048
    assert not rig.read(again.all()).any()


def test_freed_blocks_are_given_back_to_the_drive(rig: Rig, region: Region) -> None:
    rig.device.free(region)
    assert operations(rig, "trim") == [(0, 2048)]


def test_a_drive_that_refuses_to_take_blocks_back_is_not_asked_again(rig: Rig, region: Region) -> None:
    other = rig.device.alloc(4096)
    with rig.machine.guard:
        rig.machine.controller.inject_status(DATASET, 0x4001)
    rig.device.free(region)
    rig.device.free(other)
    assert operations(rig, "trim") == []


def test_the_capacity_is_the_namespace_unless_less_is_asked_for(rig: Rig) -> None:
    assert rig.device.info.memories[0].capacity == 64 * MIB
    assert on_drive(capacity=1 * MIB).open().info.memories[0].capacity == 1 * MIB
    with pytest.raises(ConfigurationError, match=f"holds {64 * MIB} bytes"):
        on_drive(capacity=128 * MIB).open()


# Durability


@pytest.mark.parametrize("way", WAYS)
def test_what_was_flushed_outlives_a_power_failure_and_the_rest_does_not_have_to(way: str) -> None:
    machine = nvme_machine()
    rig = on_drive(machine, io=way)
    region = rig.device.alloc(256 * KIB)
    rig.write(region.all(), bytes_of(1, 256 * KIB))
    rig.flush(region)
    rig.write(region.at(0, 4096), bytes_of(2, 4096))
    place = rig.device.offset_of(region)
    with machine.guard:
        machine.controller.power_off()
        machine.controller.power_on()
        machine.host.reset()
    rig.device.close()
    rig.opened.clear()
    kept = rig.read(rig.open().adopt(place, 256 * KIB).all())
    assert np.array_equal(kept[4096:], bytes_of(1, 256 * KIB)[4096:])
    assert np.array_equal(kept[:4096], bytes_of(1, 256 * KIB)[:4096])
    rig.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_drive_without_a_write_cache_is_sent_no_flush_and_the_notes_say_why(way: str) -> None:
    rig = on_drive(nvme_machine(figures=NvmeFigures(volatile_cache=False)), io=way)
    region = rig.device.alloc(4096)
    rig.flush(region)
    assert operations(rig, "flush") == []
    assert "no volatile write cache" in rig.device.info.notes["why"]
    rig.close()


# Failures


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
        (0x4081, OutOfRange),
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


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_an_ioctl_that_is_put_off_is_made_again(number: int) -> None:
    rig = on_drive(io="ioctl")
    region = rig.device.alloc(4096)
    for _ in range(3):
        rig.machine.fail_next("ioctl", number)
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


def test_blocks_of_another_size_than_the_kernel_says_are_refused() -> None:
    rig = on_drive(nvme_machine(lba_nbytes=4096), io="ioctl")
    rig.machine.tree.put("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/queue/logical_block_size", "512")
    with pytest.raises(ProtocolError, match="blocks of 4096 bytes, and the kernel says 512"):
        rig.open()


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


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EBUSY])
def test_a_ring_that_cannot_be_entered_now_is_entered_again(number: int) -> None:
    rig = on_drive(io="io_uring")
    region = rig.device.alloc(4096)
    for _ in range(3):
        rig.machine.fail_next("syscall", number)
    assert not rig.read(region.all()).any()
    assert rig.device.counts.retried == 3
    rig.close()


# Which way


def test_a_kernel_without_wide_entries_leaves_ioctl_and_the_notes_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_uring, "KNOWN_SETUP", kernel_uring.KNOWN_SETUP & ~kernel_uring.SQE128)
    rig = on_drive()
    assert rig.device.info.notes["io"] == "ioctl"
    assert "no wide entries (Linux 5.19" in rig.device.info.notes["why"]
    assert works(rig, rig.device.alloc(4096))
    rig.close()
    assert any("ioctl remains" in reason and not reason.fatal for reason in probe("/dev/ng0n1", rig.machine))
    with pytest.raises(Unsupported, match="no wide entries"):
        on_drive(rig.machine, io="io_uring").open()
    assert rig.machine.open_fds == 0


def test_a_ring_is_the_first_choice() -> None:
    rig = on_drive()
    assert rig.device.info.notes["io"] == "io_uring"
    rig.close()


# Who may open it


@pytest.mark.parametrize(
    "mount", ["36 35 259:1 / /data rw - ext4 /dev/nvme0n1 rw", "36 35 0:9 / /data rw - btrfs /dev/nvme0n1 rw"]
)
def test_a_mounted_namespace_is_refused(mount: str) -> None:
    rig = on_drive()
    rig.machine.tree.put("/proc/self/mountinfo", mount)
    with pytest.raises(Busy, match="nvme0n1 is mounted at /data"):
        rig.open()
    assert rig.machine.open_fds == 0
    ((namespace,),) = [drive.namespaces for drive in nvme_drives(rig.machine)]
    assert namespace.in_use == "nvme0n1 is mounted at /data"


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_namespace_that_is_held_is_refused_through_both_nodes(path: str) -> None:
    rig = on_drive()
    rig.machine.tree.link("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/holders/dm-0", "x")
    with pytest.raises(Busy, match="held by dm-0"):
        rig.open(path=path)


def test_a_namespace_whose_block_device_was_claimed_is_refused() -> None:
    rig = on_drive()
    rig.machine.fail_next("open", errno.EBUSY)
    with pytest.raises(Busy, match="mounted, held or opened exclusively"):
        rig.open()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_namespace_has_one_owner_whichever_node_it_comes_by(path: str) -> None:  # B10
    rig = on_drive()
    rig.open()
    with pytest.raises(Busy, match="belongs to another owner"):
        rig.open(path=path)
    rig.close()
    assert rig.machine.open_fds == 0
    rig.opened.clear()
    rig.open(path=path)
    rig.close()


def test_a_namespace_whose_block_device_cannot_be_looked_at_is_refused() -> None:
    rig = on_drive()
    rig.machine.remove("/dev/nvme0n1")
    with pytest.raises(NotPresent, match="nobody can tell whether the namespace is in use"):
        rig.open()


def test_a_block_device_of_another_namespace_is_no_claim() -> None:
    rig = on_drive()
    rig.machine.tree.put("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/dev", "259:77")
    with pytest.raises(NotPresent, match="not the block device of ng0n1"):
        rig.open()


def test_a_node_is_known_by_its_number_and_not_by_its_name() -> None:
    rig = on_drive()
    rig.machine.tree.remove("/sys/dev/char/241:0")
    with pytest.raises(Unsupported, match="sysfs knows no NVMe namespace behind it"):
        rig.open()


def test_a_namespace_without_a_block_device_is_claimed_by_its_lock() -> None:
    rig = on_drive()
    rig.machine.remove("/dev/nvme0n1")
    rig.machine.tree.remove("/sys/block/nvme0n1")
    assert "the lock of the node is the only claim" in rig.open().info.notes["why"]
    with pytest.raises(Busy):
        rig.open()
    rig.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("call", ["open", "open the node", "ioctl"])
def test_a_missing_permission_comes_with_what_would_give_it(call: str, number: int) -> None:
    rig = on_drive()
    if call == "open the node":
        call = "open"
        rig.machine.tree.remove("/sys/block/nvme0n1")
        rig.machine.remove("/dev/nvme0n1")
        rig.machine.fail_next("open", errno.ENOENT)
    rig.machine.fail_next(call, number)
    with pytest.raises(NoPermission, match="CAP_SYS_ADMIN"):
        rig.open()


def test_more_depth_than_the_kernel_keeps_is_noted() -> None:
    rig = on_drive(depth=4000)
    assert "depth = 4000: the kernel keeps 127 requests" in rig.device.info.notes["why"]
    rig.close()


def test_the_node_of_a_controller_is_no_medium() -> None:
    with pytest.raises(Unsupported, match="/dev/ngXnY"):
        on_drive(path="/dev/nvme0").open()


def test_a_way_that_a_medium_does_not_have_is_refused() -> None:
    with pytest.raises(Unsupported, match="io = posix is not for NVMe passthrough; io_uring or ioctl is"):
        on_drive(io="posix").open()
    with pytest.raises(Unsupported, match="io = ioctl is not for a file or block device"):
        on_fake(io="ioctl").open()


@pytest.mark.parametrize("state", ["dead", "deleting"])
def test_a_controller_that_is_dead_or_going_is_gone(state: str) -> None:
    rig = on_drive()
    rig.machine.tree.put("/sys/class/nvme/nvme0/state", state)
    rig.machine.tree.put("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/state", state)
    with pytest.raises(Gone, match=f"nvme0 is {state}"):
        rig.open()
    (reason,) = probe("/dev/ng0n1", rig.machine)
    assert reason.fatal


# What the drive says


class Lying(Absent):
    """A node whose drive answers Identify with other tables."""

    def __init__(self, node: GenericNode, controller: bytes, namespace: bytes) -> None:
        self.number = node.number
        self._node = node
        self._tables = {1: controller, 0: namespace}
        self.zeroed: list[int] = []

    def ioctl(self, request: int, argument: bytearray) -> int:
        fields = PAYLOAD.unpack_from(argument) if len(argument) >= PAYLOAD.size else ()
        if request == IO_COMMAND and fields[0] == WRITE_ZEROES:
            self.zeroed.append(fields[12])
        status = self._node.ioctl(request, argument)
        if request == ADMIN_COMMAND:
            opcode, address, what = fields[0], fields[7], fields[10]
            if opcode == IDENTIFY:
                ctypes.memmove(address, self._tables[what], 4096)
        return status


@pytest.mark.parametrize(
    ("tables", "kind", "text"),
    [
        ((controller_table(), namespace_table(blocks=0)), ProtocolError, "0 blocks"),
        ((controller_table(), namespace_table(shift=3)), ProtocolError, r"2\^3 bytes"),
        ((controller_table(), namespace_table(shift=20)), Unsupported, r"2\^20 bytes"),
        ((controller_table(), namespace_table(metadata=8)), Unsupported, "metadata"),
        ((controller_table(mdts=99), namespace_table()), ProtocolError, "MDTS"),
        ((controller_table(), namespace_table(blocks=1 << 63)), ProtocolError, r"2\^62"),
        ((controller_table(), namespace_table(blocks=1)), ConfigurationError, "less than one block of 4096"),
        ((controller_table(mdts=1), namespace_table(shift=16)), Unsupported, "larger than the largest transfer"),
    ],
)
def test_a_drive_whose_tables_cannot_be_is_refused(
    tables: tuple[bytes, bytes], kind: type[Exception], text: str
) -> None:
    rig = lying(on_drive(), *tables)
    with pytest.raises(kind, match=text):
        rig.open()
    assert rig.machine.open_fds == 0


def lying(rig: Rig, controller: bytes, namespace: bytes) -> Rig:
    """The rig with other tables on the generic device."""
    node = rig.machine.nodes["/dev/ng0n1"]
    assert isinstance(node, GenericNode)
    rig.machine.nodes["/dev/ng0n1"] = Lying(node, controller, namespace)
    return rig


def test_a_drive_that_offers_nothing_is_zeroed_by_writing_and_never_trimmed() -> None:
    rig = lying(on_drive(io="ioctl"), controller_table(), namespace_table(blocks=2048))
    region = rig.device.alloc(1 * MIB)
    rig.flush(region)
    rig.device.free(region)
    assert {op for op in ("zero", "trim", "flush") if operations(rig, op)} == set()
    assert sum(blocks for _, blocks in operations(rig, "write")) == 2048
    rig.close()


@pytest.mark.parametrize(("features", "flags"), [(0, 1 << 25), (1, 0)])
def test_zeroing_gives_blocks_back_unless_they_would_have_to_be_found_again(features: int, flags: int) -> None:
    tables = controller_table(optional=1 << 3), namespace_table(blocks=2048, features=features, deallocated=1 | 1 << 3)
    rig = lying(on_drive(io="ioctl"), *tables)
    node = rig.machine.nodes["/dev/ng0n1"]
    assert isinstance(node, Lying)
    rig.device.alloc(4096)
    assert node.zeroed == [flags | 7]
    rig.close()


def test_a_write_protected_namespace_is_read_and_never_written() -> None:
    rig = lying(on_drive(io="ioctl"), controller_table(), namespace_table(blocks=2048, protected=True))
    region = rig.device.adopt(0, 4096)
    assert not rig.read(region.all()).any()
    assert "write protected" in rig.device.info.notes["why"]
    with pytest.raises(Unsupported, match="write protected"):
        rig.device.submit(Write(region.all(), buffer(4096)))
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_identity_and_health_are_the_drives_own(path: str) -> None:
    rig = on_drive(path=path)
    who, before = rig.device.identity, rig.device.health()
    assert who is not None
    assert before is not None
    assert (who.model, who.serial, who.nsid) == ("tierloop NVMe model", "TL0000000001", 1)
    assert (who.lba_nbytes, who.capacity, who.mdts_nbytes) == (512, 64 * MIB, 128 * KIB)
    assert (rig.device.info.bus_address, rig.device.info.numa_node) == ("0000:00:04.0", 0)
    region = rig.device.alloc(8 * MIB)
    rig.write(region.all(), bytes_of(1, 8 * MIB))
    after = rig.device.health()
    assert after is not None
    assert 8 * MIB - 512_000 <= after.written_nbytes - before.written_nbytes <= 8 * MIB + 512_000
    rig.close()


def test_a_file_has_neither_identity_nor_health() -> None:
    rig = on_fake()
    assert rig.device.identity is None
    assert rig.device.health() is None
    rig.close()


def test_a_warning_of_the_drive_stands_in_the_notes_and_is_a_reason() -> None:
    rig = on_drive()
    with rig.machine.guard:
        rig.machine.controller.warn(0b101)
    assert "the spare capacity has fallen below its threshold" in rig.device.info.notes["why"]
    assert "the reliability is degraded" in rig.device.info.notes["why"]
    rig.close()
    assert any("reliability" in reason and not reason.fatal for reason in probe("/dev/ng0n1", rig.machine))


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_drive_that_takes_no_writes_is_read_and_never_written(path: str) -> None:
    rig = on_drive(path=path)
    with rig.machine.guard:
        rig.machine.controller.poke(1, 0, bytes_of(4, 4096).tobytes())
        rig.machine.controller.warn(READ_ONLY)
    region = rig.device.adopt(0, 4096)
    assert np.array_equal(rig.read(region.all()), bytes_of(4, 4096))
    with pytest.raises(Unsupported, match="media are read-only"):
        rig.device.submit(Write(region.all(), buffer(4096)))
    with pytest.raises(Unsupported, match="media are read-only"):
        rig.device.alloc(4096)
    assert operations(rig, "write") == []
    rig.close()


def test_a_health_that_may_not_be_read_is_noted_and_no_error() -> None:
    rig = on_drive()
    with rig.machine.guard:
        rig.machine.controller.inject_status(2, 0x4001, admin=True)
    assert "the drive's health is not known" in rig.device.info.notes["why"]
    rig.close()


def test_probing_a_namespace_changes_nothing() -> None:
    rig = on_drive()
    assert not any(reason.fatal for reason in probe("/dev/ng0n1", rig.machine))
    assert rig.machine.open_fds == 0
    with rig.machine.guard:
        assert {each.op for each in rig.machine.controller.history} == {"read"}
