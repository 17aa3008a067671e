"""Every status that a command of the driver may end with has a name, and the error that is to blame for it."""

from __future__ import annotations

import errno

import pytest

from tests.nvme_rig import on_fake
from tierloop.devices.drivers.nvme_status import error_of, name_of
from tierloop.devices.errors import Busy, DeviceError, MediaError, NoPermission, OutOfMemory

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


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EMFILE, OutOfMemory), (errno.ENFILE, OutOfMemory), (errno.EBADE, Busy)]
)
def test_an_errno_that_is_no_mistake_of_the_driver_is_no_protocol_error(number: int, kind: type[DeviceError]) -> None:
    rig = on_fake()
    rig.fake.inject("open", number)
    with pytest.raises(kind, match=errno.errorcode[number]):
        rig.open()
