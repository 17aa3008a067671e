"""The block device of the machine with an NVMe drive: transfers cut into commands, and an errno for each status."""

from __future__ import annotations

import errno

import pytest

from tests.kernel_nvme_rig import Host, a_host, refused
from tests.nvme_rig import MIB
from tests.seeded import bytes_of
from tierloop.devices.system import PUNCH_HOLE, ZERO_RANGE
from tierloop.firmware_models.nvme_wire import Io, Status

host = a_host


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
