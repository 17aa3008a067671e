"""The status of an NVMe completion becomes the error that says who is to blame, and whether to try again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.nvme_status import DO_NOT_RETRY, error_of, is_media, name_of, passes
from tierloop.devices.errors import (
    Busy,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Unsupported,
)


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (0x001, ProtocolError, "Invalid Command Opcode"),
        (0x002, ProtocolError, "Invalid Field"),
        (0x4002, ProtocolError, "do not retry"),
        (0x006, MediaError, "Internal Error"),
        (0x00B, Gone, "Invalid Namespace"),
        (0x080, OutOfRange, "LBA Out of Range"),
        (0x081, OutOfMemory, "Capacity Exceeded"),
        (0x082, Busy, "Namespace Not Ready"),
        (0x182, MediaError, "Read Only"),
        (0x280, MediaError, "Write Fault"),
        (0x281, MediaError, "Unrecovered Read Error"),
        (0x286, NoPermission, "Access Denied"),
        (0x2FF, MediaError, "type 2 code ffh"),
        (0x302, Gone, "Asymmetric Access Inaccessible"),
        (0x3FF, Gone, "type 3 code ffh"),
        (0x7C0, ProtocolError, "unknown status"),
    ],
)
def test_a_status_has_a_kind_and_a_name(status: int, kind: type[DeviceError], text: str) -> None:
    error = error_of("nvme0", "read", status, "block 7")
    assert type(error) is kind
    assert text in str(error)
    assert str(error).startswith("nvme0: read: block 7: ")


def test_a_refused_optional_command_is_unsupported() -> None:
    assert isinstance(error_of("nvme0", "health", 0x4001, "the log", optional=True), Unsupported)
    assert isinstance(error_of("nvme0", "health", 0x281, "the log", optional=True), MediaError)


@pytest.mark.parametrize("status", [0x007, 0x008, 0x021, 0x022, 0x082, 0x303, 0x371])
def test_what_passes_is_tried_again_unless_the_drive_forbids_it(status: int) -> None:
    assert passes(status)
    assert not passes(status | DO_NOT_RETRY)


@given(st.integers(1, 0x7FFF))
def test_every_status_is_an_error_and_medium_errors_are_never_tried_again(status: int) -> None:
    assert isinstance(error_of("nvme0", "read", status, "block 7"), DeviceError)
    assert name_of(status)
    assert not (is_media(status) and passes(status))
