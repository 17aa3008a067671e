"""Every status that a command of the driver may end with has a name, and the error that is to blame for it."""

from __future__ import annotations

import errno

import pytest

from tests.nvme_rig import on_drive, on_fake
from tests.seeded import bytes_of
from tierloop.devices.commands import Read
from tierloop.devices.drivers.nvme_status import error_of, name_of
from tierloop.devices.errors import Busy, DeviceError, Gone, MediaError, NoPermission, OutOfMemory, Timeout

RESERVED = {0x17}
GENERIC = [code for code in range(0x01, 0x25) if code not in RESERVED] + list(range(0x80, 0x85))
MEDIA = list(range(0x280, 0x289))
PATH = [0x300, 0x301, 0x302, 0x303, 0x360, 0x370, 0x371]


@pytest.mark.parametrize("status", GENERIC + MEDIA + PATH)
def test_a_status_of_the_specification_is_called_by_its_name(status: int) -> None:
    assert "unknown" not in name_of(status)


def test_no_two_statuses_have_one_name() -> None:
    names = [name_of(status).split(" (")[0] for status in GENERIC + MEDIA + PATH]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (0x015, NoPermission),
        (0x01B, Busy),
        (0x01C, MediaError),
        (0x023, NoPermission),
        (0x288, MediaError),
        (0x303, Busy),
        (0x371, Timeout),
    ],
)
def test_a_refusal_says_who_is_to_blame(status: int, kind: type[DeviceError]) -> None:
    assert type(error_of("nvme0", "write", status, "block 7")) is kind


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EMFILE, OutOfMemory), (errno.ENFILE, OutOfMemory), (errno.EBADE, Busy)]
)
def test_an_errno_that_is_no_mistake_of_the_driver_is_no_protocol_error(number: int, kind: type[DeviceError]) -> None:
    rig = on_fake()
    rig.fake.inject("open", number)
    with pytest.raises(kind, match=errno.errorcode[number]):
        rig.open()


@pytest.mark.parametrize(("status", "kind"), [(0x4303, Busy), (0x4371, Timeout)])
def test_a_path_that_will_come_back_is_not_the_end_of_a_device(status: int, kind: type[DeviceError]) -> None:
    rig = on_drive()
    region = rig.device.alloc(4096)
    with rig.machine.guard:
        rig.machine.controller.inject_status(2, status)
    assert type(rig.error_of(Read(region.all(), bytes_of(1, 4096)))) is kind
    assert not rig.read(region.all()).any()
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
@pytest.mark.parametrize("status", [0x4006, 0x4024, 0x4082, 0x4281])
def test_a_drive_whose_health_cannot_be_read_is_opened_with_a_note(path: str, status: int) -> None:
    rig = on_drive()
    rig.path = path
    rig.machine.controller.inject_status(2, status, admin=True)
    assert (
        f"the drive's health is not known (the drive refuses to say: {name_of(status)})" in rig.device.info.notes["why"]
    )
    rig.device.alloc(4096)
    assert rig.device.health() is not None
    rig.close()


@pytest.mark.parametrize(("status", "kind"), [(0x4300, Gone), (0x4007, Timeout)])
def test_a_drive_that_does_not_answer_for_its_health_is_not_opened(status: int, kind: type[DeviceError]) -> None:
    rig = on_drive()
    rig.machine.controller.inject_status(2, status, admin=True)
    with pytest.raises(kind):
        rig.open()
    rig.machine.controller.heal()
    rig.open()
    rig.close()
