"""Opening the nvme driver: what is refused and why, what it falls back to and says so, and what `probe` finds."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_system import FakeSystem
from tests.nvme_rig import MIB, SHORT_S, Rig, on_drive, on_fake, on_file
from tests.seeded import bytes_of
from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Read
from tierloop.devices.drivers.nvme import nvme_drives, open_nvme, probe
from tierloop.devices.drivers.ring import FEATURE_SINGLE_MMAP
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    MediaError,
    NoPermission,
    NotPresent,
    OutOfMemory,
    Timeout,
    Unsupported,
)
from tierloop.devices.site import Site
from tierloop.devices.system import FileStatus
from tierloop.emulators.kernel_nvme import nvme_machine


@pytest.fixture
def system() -> Iterator[FakeSystem]:
    """An operating system in memory; whatever a refused opening left open fails the test."""
    made = FakeSystem()
    yield made
    assert made.open_fds == 0


def works(rig: Rig) -> bool:
    """Whether the device reads what it wrote."""
    region = rig.device.alloc(1 * MIB)
    rig.write(region.all(), bytes_of(1, 1 * MIB))
    return bool(np.array_equal(rig.read(region.all()), bytes_of(1, 1 * MIB)))


# What is refused, before anything is created


def test_a_directory_is_unsupported(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path), {"capacity": 1 * MIB, "create": True})
    with pytest.raises(Unsupported, match="is a directory"):
        rig.open()
    assert list(tmp_path.iterdir()) == []


def test_a_character_device_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="/dev/null is a character device"):
        Rig("/dev/null", {"capacity": 1 * MIB, "create": True}).open()


def test_a_pipe_is_unsupported_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unsupported, match="is a pipe"):
        Rig(str(tmp_path / "pipe"), {}).open()


def test_a_missing_path_is_not_present_and_not_created(tmp_path: Path) -> None:  # B18
    with pytest.raises(NotPresent, match="create = true"):
        Rig(str(tmp_path / "missing"), {"capacity": 1 * MIB}).open()
    with pytest.raises(NotPresent):
        Rig(str(tmp_path / "folder" / "file"), {"capacity": 1 * MIB, "create": True}).open()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_a_folder_is_not_present(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotPresent):
        Rig(str(tmp_path / "file" / "below"), {"capacity": 1 * MIB, "create": True}).open()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["stat", "open"])
def test_a_path_that_may_not_be_opened_is_no_permission(system: FakeSystem, call: str, number: int) -> None:
    system.add("/medium", "file", bytes(1 * MIB))
    system.inject(call, number)
    with pytest.raises(NoPermission, match="/medium") as caught:
        Rig("/medium", {}, system).open()
    assert caught.value.errno == number


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ENODEV])
def test_a_node_without_a_device_behind_it_is_not_present(system: FakeSystem, number: int) -> None:
    system.add("/dev/nvme9n1", "block device", bytes(1 * MIB))
    system.inject("open", number)
    with pytest.raises(NotPresent, match="no device stands behind it"):
        Rig("/dev/nvme9n1", {}, system).open()


def test_a_mounted_block_device_is_busy(system: FakeSystem) -> None:
    system.add("/dev/nvme0n1", "block device", bytes(1 * MIB))
    system.inject("open", errno.EBUSY)
    with pytest.raises(Busy):
        Rig("/dev/nvme0n1", {}, system).open()


def test_a_file_system_without_locks_is_unsupported(system: FakeSystem) -> None:
    system.add("/medium", "file", bytes(1 * MIB))
    system.inject("lock", errno.ENOLCK)
    with pytest.raises(Unsupported, match="cannot be locked"):
        Rig("/medium", {}, system).open()


class Swapping(FakeSystem):
    """Puts another file in the place of the medium right after it was looked at, or opened for the first time."""

    moment = ""

    def stat(self, path: str) -> FileStatus:
        status = super().stat(path)
        if self.moment == "looked at":
            self.add(path, "file", bytes(1 * MIB))
        return status

    def lock(self, fd: int) -> None:
        super().lock(fd)
        if self.moment == "opened":
            self.add("/medium", "file", bytes(1 * MIB))


@pytest.mark.parametrize("moment", ["looked at", "opened"])
def test_a_path_that_changes_while_it_is_opened_is_refused(moment: str) -> None:
    system = Swapping()
    system.add("/medium", "file", bytes(1 * MIB))
    system.moment = moment
    with pytest.raises(Busy, match="was replaced while"):
        Rig("/medium", {}, system).open()
    assert system.open_fds == 0


def test_the_virtual_clock_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="virtual clock"):
        open_nvme("nvme0", Site(clock=VirtualClock()), {"path": str(tmp_path / "x"), "capacity": 4096, "create": True})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pth": "/x"}, "did you mean 'path'"),
        ({}, "'path' is missing"),
        ({"path": ""}, "not empty"),
        ({"path": 3}, "not empty"),
        ({"path": "a\0b"}, "not empty"),
        ({"capacity": "4 GiB"}, "a whole number from 4096"),
        ({"capacity": -4096}, "from 4096"),
        ({"capacity": 0}, "from 4096"),
        ({"capacity": 5000}, "a multiple of 4096"),
        ({"capacity": 4096.0}, "a whole number"),
        ({"capacity": True}, "a whole number"),
        ({"create": 1}, "true or false"),
        ({"direct": "yes"}, "true or false"),
        ({"io": "libaio"}, "one of auto, io_uring, posix, ioctl"),
        ({"register": 1}, "true or false"),
        ({"depth": 0}, "from 1 to 4096"),
        ({"depth": 5000}, "from 1 to 4096"),
        ({"queues": 0}, "from 1 to 64"),
        ({"deadline_s": 0}, "a number from 0.001"),
        ({"deadline_s": float("nan")}, "a number from 0.001"),
        ({"deadline_s": float("inf")}, "a number from 0.001"),
        ({"retries": -1}, "from 0"),
        ({"latency_ns": 1.5}, "a whole number"),
        ({"read_bytes_per_s": -1}, "from 0"),
        ({"reaches": "dram"}, "a list of names"),
        ({"reaches": 5}, "a list of names"),
        ({"reaches": [1]}, "a list of names"),
        ({"reaches": ["nvme0"]}, "other memories"),
        ({"reaches": ["dram", "dram"]}, "each once"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    good = {"path": str(tmp_path / "medium"), "capacity": 1 * MIB, "create": True}
    merged = options if not options or "pth" in options else {**good, **options}
    with pytest.raises(ConfigurationError, match=text) as caught:
        open_nvme("nvme0", on_file(tmp_path).site, merged)
    assert "nvme0" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_routes_and_a_folder_come_from_the_registry(tmp_path: Path) -> None:
    rig = on_file(tmp_path, folder=str(tmp_path), reaches={"dram": [["pcie", "forward"]]})
    device = rig.open(path="relative.bin")
    assert (tmp_path / "relative.bin").stat().st_size == 8 * MIB
    assert [p.memory for p in device.info.executors[0].paths] == ["nvme0", "dram"]
    rig.close()


# Capacity


def test_all_of_a_file_is_used_unless_a_capacity_is_given(system: FakeSystem) -> None:
    system.add("/medium", "file", bytes(1 * MIB + 100))
    for capacity, expected in ((None, 1 * MIB), (64 * 1024, 64 * 1024)):
        rig = Rig("/medium", {} if capacity is None else {"capacity": capacity}, system)
        assert rig.device.info.memories[0].capacity == expected
        rig.close()
    assert len(system.contents("/medium")) == 1 * MIB + 100


def test_bytes_behind_the_capacity_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "medium"
    path.write_bytes(b"\xaa" * 3 * MIB)
    rig = Rig(str(path), {"capacity": 1 * MIB})
    rig.write(rig.device.alloc(1 * MIB).all(), bytes_of(2, 1 * MIB))
    rig.close()
    assert path.read_bytes() == bytes_of(2, 1 * MIB).tobytes() + b"\xaa" * 2 * MIB


def test_a_file_grows_only_if_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "medium"
    path.write_bytes(bytes(64 * 1024))
    with pytest.raises(ConfigurationError, match="holds 65536 bytes; `create = true` grows it"):
        Rig(str(path), {"capacity": 1 * MIB}).open()
    rig = Rig(str(path), {"capacity": 1 * MIB, "create": True})
    assert rig.device.info.memories[0].capacity == path.stat().st_size == 1 * MIB
    rig.close()


def test_a_block_device_does_not_grow(system: FakeSystem) -> None:
    system.add("/dev/nvme0n1", "block device", bytes(1 * MIB))
    with pytest.raises(ConfigurationError, match="holds 1048576 bytes"):
        Rig("/dev/nvme0n1", {"capacity": 2 * MIB, "create": True}, system).open()


def test_a_file_to_create_needs_a_capacity(tmp_path: Path) -> None:  # B9
    with pytest.raises(ConfigurationError, match="needs a capacity"):
        Rig(str(tmp_path / "medium"), {"create": True}).open()


def test_a_file_smaller_than_a_block_is_refused(system: FakeSystem) -> None:
    system.add("/medium", "file", bytes(100))
    with pytest.raises(ConfigurationError, match="holds 100 bytes"):
        Rig("/medium", {}, system).open()


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [("resize", errno.ENOSPC, OutOfMemory), ("resize", errno.EFBIG, OutOfMemory), ("read", errno.EIO, MediaError)],
)
def test_a_file_that_was_created_is_removed_if_the_rest_fails(
    system: FakeSystem, call: str, number: int, kind: type[DeviceError]
) -> None:
    system.inject(call, number)
    with pytest.raises(kind):
        on_fake(system).open()
    assert not system.exists("/medium")


def test_a_file_that_stood_there_stays_as_it_was_if_opening_fails(system: FakeSystem) -> None:
    system.add("/medium", "file", b"\x11" * 8192)
    system.uring_errno = errno.ENOSYS
    with pytest.raises(Unsupported):
        on_fake(system, io="io_uring").open()
    assert system.contents("/medium") == b"\x11" * 8192


def test_a_created_file_is_durable_with_its_name() -> None:
    rig = on_fake()
    assert rig.device.info.name == "nvme0"
    assert rig.fake.calls["fsync"] == 2
    rig.close()


def test_a_first_read_that_hangs_times_out(system: FakeSystem) -> None:
    system.inject("read", hangs=True)
    with pytest.raises(Timeout):
        on_fake(system, deadline_s=SHORT_S).open()
    system.release()


# What it falls back to, and says


def test_a_real_file_is_reached_as_its_file_system_allows(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    notes, reasons = rig.device.info.notes, rig.device.info.notes["why"]
    try:
        os.close(os.open(rig.path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        assert (notes["direct"], "O_DIRECT" in reasons) == ("false", True)
    if notes["direct"] == "false":
        assert notes["cache"].startswith("buffered: reads may be served by the page cache")
    assert notes["io"] == "io_uring" or "io_uring is refused" in reasons
    assert works(rig)
    rig.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSYS, "no io_uring"),
        (errno.EPERM, "security policy"),
        (errno.ENOMEM, "locked memory is 65536 bytes"),
    ],
)
def test_without_io_uring_pread_and_pwrite_remain_and_the_notes_say_why(number: int, text: str) -> None:
    system = FakeSystem(uring_errno=number)
    system.texts["/proc/self/limits"] = "Max locked memory         65536                65536                bytes"
    rig = on_fake(system)
    notes = rig.device.info.notes
    assert (notes["io"], notes["direct"]) == ("posix", "true")
    assert errno.errorcode[number] in notes["why"]
    assert text in notes["why"]
    assert works(rig)
    assert system.calls["pread"] > 0
    rig.close()


def test_a_disabled_io_uring_is_said_to_be_disabled() -> None:
    system = FakeSystem(uring_errno=errno.EPERM)
    system.texts["/proc/sys/kernel/io_uring_disabled"] = "2"
    rig = on_fake(system)
    assert "kernel.io_uring_disabled is 2" in rig.device.info.notes["why"]
    rig.close()


def test_a_kernel_whose_waits_have_no_timeout_is_not_used() -> None:
    rig = on_fake(FakeSystem(features=FEATURE_SINGLE_MMAP))
    assert rig.device.info.notes["io"] == "posix"
    assert "cannot wait with a timeout" in rig.device.info.notes["why"]
    assert works(rig)
    rig.close()


def test_a_ring_that_cannot_read_this_file_is_not_used() -> None:  # B4: each way is tried with a real read
    system = FakeSystem()
    rig = on_fake(system)
    system.add("/medium", "file", bytes(8 * MIB))
    system.inject("enter", errno.EINVAL)
    assert rig.device.info.notes["io"] == "posix"
    assert "a first read failed" in rig.device.info.notes["why"]
    assert works(rig)
    rig.close()


def test_one_queue_without_a_ring_moves_all_queues_to_posix() -> None:
    system = FakeSystem()
    rig = on_fake(system, queues=3)
    system.inject("setup", 0)
    system.inject("setup", errno.ENOMEM)
    assert rig.device.info.notes["io"] == "posix"
    assert works(rig)
    rig.close()
    assert system.open_fds == 0


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSYS, Unsupported), (errno.EPERM, NoPermission)])
def test_io_uring_that_was_demanded_is_not_replaced(system: FakeSystem, number: int, kind: type[DeviceError]) -> None:
    system.uring_errno = number
    with pytest.raises(kind, match="io_uring is refused"):
        on_fake(system, io="io_uring").open()
    assert not system.exists("/medium")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: FakeSystem(direct=False), "refuses to open with O_DIRECT"),
        (lambda: FakeSystem(statx=(0, 0)), "does not take direct transfers"),
        (lambda: FakeSystem(grid=1 << 20), "no direct read from 512 to 65536 bytes works"),
    ],
)
def test_without_o_direct_the_page_cache_is_used_and_reported(made: Any, text: str) -> None:  # B1
    rig = on_fake(made())
    notes = rig.device.info.notes
    assert (notes["io"], notes["direct"]) == ("io_uring", "false")
    assert text in notes["why"]
    assert notes["cache"].startswith("buffered: reads may be served by the page cache")
    assert rig.device.info.memories[0].alignment == 4096
    assert works(rig)
    rig.close()
    assert rig.fake.open_fds == 0


def test_a_file_system_without_a_disk_beneath_is_noted() -> None:  # B15
    system = FakeSystem()
    system.texts.clear()
    rig = on_fake(system)
    assert rig.device.info.notes["direct"] == "true"
    assert "memory may serve it" in rig.device.info.notes["why"]
    rig.close()


@pytest.mark.parametrize("grid", [512, 1024, 4096])
def test_the_grid_is_found_by_reading(grid: int) -> None:
    rig = on_fake(FakeSystem(grid=grid))
    assert rig.device.info.memories[0].alignment == grid
    rig.close()


def test_the_grid_is_never_finer_than_the_disk_says() -> None:
    system = FakeSystem(grid=512)
    system.texts["/sys/dev/block/259:1/queue/logical_block_size"] = "4096"
    rig = on_fake(system)
    assert rig.device.info.memories[0].alignment == 4096
    rig.close()


def test_a_partition_is_described_by_its_disk() -> None:
    system = FakeSystem(grid=512)
    system.texts = {
        "/sys/dev/block/259:1/../queue/logical_block_size": "4096",
        "/sys/dev/block/259:1/../device/address": "0000:01:00.0",
        "/sys/dev/block/259:1/../device/numa_node": "1",
    }
    rig = on_fake(system)
    info = rig.device.info
    assert (info.memories[0].alignment, info.bus_address, info.numa_node) == (4096, "0000:01:00.0", 1)
    rig.close()


@pytest.mark.parametrize("said", ["-1", "", "none", "²"])
def test_a_numa_node_that_is_not_known_is_none(said: str) -> None:
    system = FakeSystem()
    system.texts["/sys/dev/block/259:1/device/numa_node"] = said
    system.texts["/sys/dev/block/259:1/queue/logical_block_size"] = said
    rig = on_fake(system)
    assert rig.device.info.numa_node is None
    assert rig.device.info.memories[0].alignment == 512
    rig.close()


def test_addresses_that_the_kernel_takes_are_not_bounced() -> None:
    rig = on_fake(FakeSystem(grid=4, statx=(4, 512)))
    region = rig.device.alloc(64 * 1024)
    room = np.zeros(64 * 1024 + 8192, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % 4096 + 4
    rig.run(Read(region.all(), room[start : start + 64 * 1024]))
    assert rig.device.counts.bounced_nbytes == 0
    rig.run(Read(region.all(), room[start + 1 : start + 1 + 64 * 1024]))
    assert rig.device.counts.bounced_nbytes == 64 * 1024
    rig.close()


def test_a_block_device_works_like_a_file() -> None:
    system = FakeSystem()
    system.add("/dev/nvme0n1", "block device", b"\x55" * 4 * MIB)
    rig = Rig("/dev/nvme0n1", {"retries": 8}, system)
    region = rig.device.alloc(1 * MIB)
    assert not rig.read(region.all()).any()
    rig.device.free(region)
    assert works(rig)
    assert rig.device.info.memories[0].capacity == 4 * MIB
    rig.close()


# probe


def test_nothing_stands_in_the_way_of_a_good_file() -> None:
    system = FakeSystem()
    system.add("/medium", "file", b"\x77" * 1 * MIB)
    assert probe("/medium", system) == []
    assert system.contents("/medium") == b"\x77" * 1 * MIB
    assert system.open_fds == 0


def test_probing_a_real_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "medium"
    path.write_bytes(b"\x77" * 1 * MIB)
    assert not any(reason.fatal for reason in probe(str(path)))
    assert path.read_bytes() == b"\x77" * 1 * MIB


def test_every_refusal_is_a_reason(system: FakeSystem) -> None:
    system.add("/medium", "file", bytes(1 * MIB))
    system.uring_errno, system.direct = errno.ENOSYS, False
    reasons = probe("/medium", system)
    assert [reason.fatal for reason in reasons] == [False, False]
    assert "O_DIRECT" in reasons[0]
    assert "io_uring is refused (ENOSYS)" in reasons[1]


def test_a_path_that_cannot_be_opened_is_a_fatal_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for path, text in ((tmp_path, "directory"), (tmp_path / "no", "does not exist"), (tmp_path / "empty", "0 bytes")):
        (reason,) = probe(str(path))
        assert reason.fatal
        assert text in reason


def test_an_opened_device_is_reported_as_busy(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    assert rig.device.info.name == "nvme0"
    (reason,) = probe(rig.path)
    assert reason.fatal
    assert "another owner" in reason
    rig.close()


@pytest.mark.parametrize("call", ["read", "enter"])
def test_a_medium_that_fails_its_first_read_is_a_fatal_reason(call: str) -> None:
    system = FakeSystem(direct=call == "read")
    system.add("/medium", "file", bytes(1 * MIB))
    if call == "read":
        system.inject("read", errno.EIO, times=10)
    else:
        system.inject("read", hangs=True, cancellable=False)
    reasons = probe("/medium", system, deadline_s=SHORT_S)
    assert reasons[-1].fatal


@pytest.mark.parametrize("path", ["", "/tmp/a\0b", "/tmp/" + "a" * 5000])
def test_a_path_that_cannot_be_is_a_reason_and_no_crash(path: str) -> None:
    (reason,) = probe(path)
    assert reason.fatal
    assert len(str(reason)) < 400


def test_links_that_lead_round_are_no_place_for_a_medium(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    rig = Rig(str(tmp_path / "a"), {})
    with pytest.raises(NotPresent, match="nothing can stand there"):
        rig.open()


@pytest.mark.parametrize("link", ["/sys/class/nvme-generic/ng0n1", "/sys/block/nvme0n1", "/sys/dev/block/259:1"])
@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_links_of_sysfs_that_lead_round_in_a_circle_are_no_crash(link: str, path: str) -> None:
    machine = nvme_machine(1 << 20)
    machine.tree.link(link, link)
    probe(path, machine)
    nvme_drives(machine)


def test_a_generic_device_whose_sysfs_leads_round_in_a_circle_is_refused() -> None:
    rig = on_drive(io="ioctl")
    rig.machine.tree.link("/sys/dev/char/241:0", "/sys/dev/char/241:0")
    with pytest.raises(Unsupported, match="sysfs knows no NVMe namespace"):
        rig.open()
