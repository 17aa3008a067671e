"""Every status that a command of the driver may end with has a name, and the error that is to blame for it."""

from __future__ import annotations

import errno

import pytest

from tests.nvme_rig import bytes_of, on_drive, on_fake
from tierloop.devices.commands import Write
from tierloop.devices.drivers.nvme_status import error_of, name_of
from tierloop.devices.errors import Busy, DeviceError, MediaError, NoPermission, OutOfMemory
from tierloop.emulators.kernel_nvme import nvme_machine

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
    [(0x015, NoPermission), (0x01B, Busy), (0x01C, MediaError), (0x023, NoPermission), (0x288, MediaError)],
)
def test_a_refusal_says_who_is_to_blame(status: int, kind: type[DeviceError]) -> None:
    assert type(error_of("nvme0", "write", status, "block 7")) is kind


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_thin_namespace_whose_room_is_spent_is_out_of_memory_by_both_nodes(path: str) -> None:
    machine = nvme_machine()
    rig = on_drive(machine)
    rig.path = path
    region = rig.device.alloc(4096)
    machine.controller.inject_status(1, 0x4081)
    assert isinstance(rig.error_of(Write(region.all(), bytes_of(1, 4096))), OutOfMemory)
    rig.write(region.all(), bytes_of(2, 4096))
    rig.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EMFILE, OutOfMemory), (errno.ENFILE, OutOfMemory), (errno.EBADE, Busy)]
)
def test_an_errno_that_is_no_mistake_of_the_driver_is_no_protocol_error(number: int, kind: type[DeviceError]) -> None:
    rig = on_fake()
    rig.fake.inject("open", number)
    with pytest.raises(kind, match=errno.errorcode[number]):
        rig.open()
