"""What the block layer makes of a drive's statuses, and what the driver makes of that."""

from __future__ import annotations

import errno

import pytest

from tests.nvme_rig import on_drive
from tests.seeded import bytes_of
from tierloop.devices.commands import Read
from tierloop.devices.errors import Busy, DeviceError, Gone, MediaError, OutOfMemory, Unsupported


@pytest.mark.parametrize("io", ["io_uring", "posix"])
@pytest.mark.parametrize(
    ("status", "number", "kind"),
    [
        (0x4002, errno.EOPNOTSUPP, Unsupported),
        (0x4080, errno.EREMOTEIO, MediaError),
        (0x4081, errno.ENOSPC, OutOfMemory),
        (0x4083, errno.EBADE, Busy),
        (0x4181, errno.EILSEQ, MediaError),
        (0x4281, errno.ENODATA, MediaError),
        (0x4282, errno.EILSEQ, MediaError),
        (0x4370, errno.ENOLINK, Gone),
        (0x4006, errno.EIO, MediaError),
    ],
)
def test_a_status_that_went_through_the_block_layer_is_to_blame_for_the_same(
    io: str, status: int, number: int, kind: type[DeviceError]
) -> None:
    rig = on_drive(io=io)
    rig.path = "/dev/nvme0n1"
    region = rig.device.alloc(4096)
    with rig.machine.guard:
        rig.machine.controller.inject_status(2, status)
    error = rig.error_of(Read(region.all(), bytes_of(1, 4096)))
    assert (type(error), error.errno) == (kind, number)
    rig.close()
