"""The machine with an NVMe drive: its nodes answer as Linux does, through real entries of the controller model."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel_nvme_rig import Host, Ring, a_host, refused
from tests.nvme_rig import MIB, Rig
from tests.seeded import bytes_of
from tierloop.devices.conformance import Suite
from tierloop.devices.device import Device
from tierloop.devices.drivers import ring as uring
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import Gone, MediaError
from tierloop.devices.site import Site
from tierloop.devices.system import resolved
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.emulators.kernel_nvme_nodes import ADMIN64_CMD, ADMIN_CMD, ID, IO64_CMD, IO_CMD, RESET
from tierloop.emulators.kernel_nvme_rings import URING_IO
from tierloop.emulators.kernel_uring import CQE32, SQE128
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Io, Status

IDENTIFY_CONTROLLER = 1
host = a_host


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


def test_a_machine_may_be_made_with_completions_held() -> None:
    host = Host(nvme_machine(held=True))
    assert host.ioctl(host.admin_fd, ADMIN_CMD, Admin.IDENTIFY, 4096, 1)[0] == 0
    assert host.io(Io.READ) & 0x7FF == Status.ABORT_REQUESTED


def test_a_clock_that_is_given_is_the_only_one() -> None:
    time = iter(range(0, 1 << 62, 1_000))
    host = Host(nvme_machine(now_ns=lambda: next(time)))
    before = host.machine.controller.now_ns
    assert host.io(Io.READ) == 0
    assert host.machine.controller.now_ns > before
    assert host.machine.controller.now_ns % 1_000 == 0


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
