"""Opening an NVMe namespace: which way its commands take, and whose it is."""

from __future__ import annotations

import errno

import pytest

from tests.nvme_rig import on_drive, on_fake, works
from tierloop.devices.drivers.nvme import nvme_drives, probe
from tierloop.devices.errors import Busy, Gone, NoPermission, NotPresent, Unsupported
from tierloop.emulators import kernel_uring

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
