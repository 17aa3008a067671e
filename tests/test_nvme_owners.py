"""Who else may have a medium: a loop device, swap, a kernel that only reads, zones, and a process that was forked."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from tests.fake_system import FakeSystem
from tests.nvme_rig import MIB, on_drive, on_fake, on_file
from tests.seeded import bytes_of
from tierloop.devices.commands import Read, Write
from tierloop.devices.drivers.deadlines import Stuck, within
from tierloop.devices.drivers.engines import Target
from tierloop.devices.drivers.nvme import nvme_drives, open_nvme, probe
from tierloop.devices.drivers.ring import refusal
from tierloop.devices.drivers.uring import UringEngine
from tierloop.devices.errors import Busy, DeviceError, Gone, Timeout, Unsupported
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, SYS_IO_URING_ENTER, HostSystem
from tierloop.emulators.kernel_nvme import nvme_machine

DISK = "/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1"


class WithBlocks(FakeSystem):
    """An operating system in memory whose /sys/block has names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = list(names)

    def listdir(self, path: str) -> list[str]:
        return self.names if path == "/sys/block" else super().listdir(path)


def a_file(*blocks: str) -> WithBlocks:
    """A system with a file of 8 MiB that another file has for a neighbour."""
    system = WithBlocks(*blocks)
    system.add("/medium", "file", bytes(8 * MIB))
    system.add("/other", "file", bytes(MIB))
    return system


def test_a_file_that_a_loop_device_is_made_of_is_refused() -> None:
    system = a_file("loop0", "loop1")
    system.texts["/sys/block/loop0/loop/backing_file"] = "/other"
    system.texts["/sys/block/loop1/loop/backing_file"] = "/medium"
    with pytest.raises(Busy, match="/medium: loop1 is a disk made of this file"):
        on_fake(system, create=False, capacity=MIB).open()
    (reason,) = probe("/medium", system)
    assert reason.fatal
    assert system.open_fds == 0


def test_the_mount_of_such_a_loop_device_is_named() -> None:
    system = a_file("loop0")
    system.texts["/sys/block/loop0/loop/backing_file"] = "/medium"
    system.texts["/sys/block/loop0/dev"] = "7:0"
    system.texts["/proc/self/mountinfo"] = "36 1 7:0 / /data rw - ext4 /dev/loop0 rw"
    with pytest.raises(Busy, match="loop0 is mounted at /data"):
        on_fake(system, create=False, capacity=MIB).open()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_disk_that_a_loop_device_is_made_of_is_refused_by_both_nodes(path: str) -> None:
    machine = nvme_machine(namespaces=2)
    machine.tree.put("/sys/devices/virtual/block/loop3/loop/backing_file", "/dev/nvme0n1")
    machine.tree.link("/sys/block/loop3", "../devices/virtual/block/loop3")
    with pytest.raises(Busy, match="nvme0n1 is what loop3 is made of"):
        open_nvme("nvme0", on_drive().site, {"path": path}, machine)
    open_nvme("nvme0", on_drive().site, {"path": path.replace("n1", "n2")}, machine).close()
    free, used = (namespace.in_use for drive in nvme_drives(machine) for namespace in drive.namespaces[::-1])
    assert (free, used) == ("", "nvme0n1 is what loop3 is made of")


def test_loop_devices_of_other_files_do_not_count() -> None:
    system = a_file("loop0", "loop1", "vda")
    system.texts["/sys/block/loop0/loop/backing_file"] = "/other"
    system.texts["/sys/block/loop1/loop/backing_file"] = "/medium (deleted)"
    rig = on_fake(system, create=False)
    rig.open()
    rig.close()


def test_a_file_that_is_swapped_to_is_refused_whatever_its_name() -> None:
    system = a_file()
    system.add("/a swap\tfile", "file", bytes(MIB))
    system.texts["/proc/swaps"] = "Filename\tType\tSize\tUsed\tPriority\n/a\\040swap\\011file file 16380 0 -2"
    rig = on_fake(system, create=False)
    rig.path = "/a swap\tfile"
    with pytest.raises(Busy, match="this file is swapped to"):
        rig.open(capacity=MIB)
    rig.path = "/medium"
    rig.open()
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_disk_that_the_kernel_has_read_only_is_read_and_never_written(path: str) -> None:
    machine = nvme_machine()
    data = bytes_of(1, 8192)
    machine.controller.poke(1, 0, data.tobytes())
    machine.tree.put(f"{DISK}/ro", "1")
    rig = on_drive(machine)
    rig.path = path
    assert "nvme0n1 set to read-only; `blockdev --setrw /dev/nvme0n1`" in rig.device.info.notes["why"]
    with pytest.raises(Unsupported, match="set to read-only"):
        rig.device.alloc(8192)
    region = rig.device.adopt(0, 8192)
    assert (rig.read(region.all()) == data).all()
    with pytest.raises(Unsupported, match="set to read-only"):
        rig.device.submit(Write(region.all(), data))
    rig.device.free(region)
    rig.close()
    assert {operation.op for operation in machine.controller.history} == {"read"}
    assert any("set to read-only" in reason for reason in probe(path, machine))


def test_a_medium_that_only_reads_keeps_the_bytes_of_a_freed_region() -> None:
    machine = nvme_machine()
    machine.controller.warn(1 << 3)
    rig = on_drive(machine)
    rig.device.free(rig.device.adopt(0, 8192))
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_partitions_that_nobody_uses_are_noted_by_both_nodes(path: str) -> None:
    machine = nvme_machine()
    for part in (1, 2):
        machine.tree.put(f"{DISK}/nvme0n1p{part}/partition", str(part))
    rig = on_drive(machine)
    rig.path = path
    assert "nvme0n1 has partitions (nvme0n1p1, nvme0n1p2), and allocating" in rig.device.info.notes["why"]
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_disk_of_zones_is_unsupported(path: str) -> None:
    machine = nvme_machine()
    machine.tree.put(f"{DISK}/queue/zoned", "host-managed")
    with pytest.raises(Unsupported, match="zoned = host-managed"):
        open_nvme("nvme0", on_drive().site, {"path": path}, machine)
    machine.tree.put(f"{DISK}/queue/zoned", "none")
    open_nvme("nvme0", on_drive().site, {"path": path}, machine).close()


# processes


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_in_a_process_that_was_forked_a_device_is_gone_at_once(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    region = rig.device.alloc(8192)
    rig.write(region.all(), bytes_of(2, 8192))
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = []
            read = Read(region.all(), bytes_of(0, 8192))
            for call in (lambda: rig.device.alloc(4096), lambda: rig.device.submit(read)):
                try:
                    call()
                except DeviceError as error:
                    said.append(f"{type(error).__name__} {error}")
            rig.device.close()
            os.write(theirs, "\n".join(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(mine) as answers:
        said = answers.read().splitlines()
    os.waitpid(child, 0)
    assert [line.split(" ", 1)[0] for line in said] == [Gone.__name__] * 2
    assert f"process {os.getpid()} opened it, and" in said[0]
    assert (rig.read(region.all()) == bytes_of(2, 8192)).all()
    with pytest.raises(Busy, match="another owner"):
        open_nvme("nvme1", Site(clock=rig.site.clock), {"path": rig.path})
    rig.close()


# waits


class Listening(HostSystem):
    """The real system, which remembers how long each wait of a ring was asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def syscall(self, number: int, *args: int) -> int:
        if number == SYS_IO_URING_ENTER:
            seconds, ns = (ctypes.c_int64 * 2).from_address(args[4] + 24)
            self.waits_s.append(seconds + ns / 1e9)
        return super().syscall(number, *args)


def test_a_wait_that_also_submits_is_no_longer_than_the_deadline() -> None:
    system = Listening()
    empty, full = os.pipe()
    target = Target("nvme0", system, empty, 512, 1, deadline_s=0.2, retries=8, stop=threading.Event())
    try:
        with pytest.raises(Timeout):
            UringEngine(target, 4)  # whose first read waits for a byte that nobody writes
    except OSError as error:
        pytest.skip(refusal(HOST, error))
    finally:
        os.close(empty)
        os.close(full)
    wait, cancelling = system.waits_s
    assert wait == cancelling == pytest.approx(0.2)


def test_what_stops_after_a_look_is_noticed_soon_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s, wait, never = [], threading.Event.wait, threading.Event()

    def listening(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None:
            waits_s.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", listening)
    looks = iter([0, 1, *[2] * 100])
    with pytest.raises(Stuck, match=r"no progress for 0\.08 s"):
        within(0.08, lambda: wait(never), lambda: next(looks))
    never.set()
    assert 0.08 <= sum(waits_s[2:]) <= 0.09  # the first two looks saw progress


def test_a_link_that_leads_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "medium").symlink_to(tmp_path / "nothing")
    with pytest.raises(Busy, match="a link that leads nowhere"):
        on_file(tmp_path).open()
    assert not (tmp_path / "nothing").exists()
