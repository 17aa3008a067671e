"""The mailbox through the kernel's node: a node of this test answers by the structure of the kernel's header."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.cxl_mailbox import SEND_COMMAND, Mailbox, Poisoned
from tierloop.devices.errors import (
    Busy,
    DeviceError,
    MediaError,
    NoPermission,
    NotPresent,
    ProtocolError,
    Timeout,
    Unsupported,
)
from tierloop.emulators.kernel import Absent, ModelKernel, failure

MIB = 1 << 20
Answer = Callable[[int, int, bytes], tuple[int, bytes]]


class MemNode(Absent):
    """/dev/cxl/mem0: `answer(id, opcode, payload)` gives the device's return code and its payload."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, bytes]] = []

    def ioctl(self, request: int, argument: bytearray) -> int:
        if request != SEND_COMMAND or len(argument) != 48:
            raise failure(errno.ENOTTY)
        number, flags, opcode, reserved = struct.unpack_from("<IIHH", argument)
        size, also, into = struct.unpack_from("<iIQ", argument, 16)
        room, too, out = struct.unpack_from("<iIQ", argument, 32)
        if flags or reserved or also or too or size < 0 or not 0 <= room <= 256:
            raise failure(errno.EINVAL)
        payload = ctypes.string_at(into, size) if size else b""
        self.asked.append((number, opcode, payload))
        returned, answer = self.answer(number, opcode, payload)
        answer = answer[: room + 1]  # a byte more is said than there is room for, and not written
        ctypes.memmove(out, answer, min(len(answer), room))
        struct.pack_into("<I", argument, 12, returned)
        struct.pack_into("<i", argument, 32, len(answer))
        return 0


def mailbox(answer: Answer) -> tuple[Mailbox, MemNode, ModelKernel]:
    node = MemNode(answer)
    kernel = ModelKernel(nodes={"/dev/cxl/mem0": node})
    return Mailbox("cxl0", "/dev/cxl/mem0", kernel), node, kernel


IDENTITY = (
    b"fw 1.2".ljust(16, b"\0")
    + struct.pack("<QQQQ", 4, 3, 1, 1)
    + struct.pack("<HHHHI", 8, 8, 8, 8, 4096)
    + (256).to_bytes(3, "little")
    + struct.pack("<HBB", 9, 2, 0)
)
HEALTH = struct.pack("<BBBBhIII", 0b101, 2, 0, 7, -3, 11, 12, 13)


def test_it_says_who_it_is() -> None:
    box, node, kernel = mailbox(lambda number, opcode, payload: (0, IDENTITY + b"\0\0"))
    identity = box.identity()
    assert (identity.firmware, identity.capacity) == ("fw 1.2", 1024 * MIB)
    assert (identity.volatile_nbytes, identity.persistent_nbytes) == (768 * MIB, 256 * MIB)
    assert (identity.label_nbytes, identity.poison_lines, identity.scans_media) == (4096, 256, True)
    assert node.asked == [(1, 0, b"")]
    assert kernel.open_fds == 0


def test_it_says_how_it_is() -> None:
    box, node, _ = mailbox(lambda *_: (0, HEALTH))
    health = box.health()
    assert (health.maintenance_needed, health.performance_degraded, health.replacement_needed) == (True, False, True)
    assert (health.media_status, health.life_used_percent, health.celsius) == ("persistency lost", 7, -3)
    assert (health.dirty_shutdowns, health.corrected_volatile_errors, health.corrected_persistent_errors) == (
        11,
        12,
        13,
    )
    assert node.asked == [(7, 0, b"")]


def test_what_it_does_not_say_is_none() -> None:
    box, _, _ = mailbox(lambda *_: (0, struct.pack("<BBBBhIII", 0, 200, 0, 255, 0x7FFF, 0, 0, 0)))
    health = box.health()
    assert (health.media_status, health.life_used_percent, health.celsius) == ("unknown status 200", None, None)


def test_poison_is_read_to_the_end_of_the_list() -> None:
    def answer(number: int, opcode: int, payload: bytes) -> tuple[int, bytes]:
        more = len(node.asked) < 3
        record = struct.pack("<QII", 0x1000 * len(node.asked) | 3, 2, 0)
        return 0, struct.pack("<BBQH20x", more, 0, 0, 1) + record

    box, node, _ = mailbox(answer)
    found = box.poison(0, 1 << 30)
    assert found.complete
    assert found.records == tuple(Poisoned(0x1000 * n, 128, "injected") for n in (1, 2, 3))
    assert node.asked == [(2, 0x4300, struct.pack("<QQ", 0, (1 << 30) // 64))] * 3


@pytest.mark.parametrize("flags", [2, 4])
def test_a_list_that_overflowed_or_is_being_made_is_not_complete(flags: int) -> None:
    box, _, _ = mailbox(lambda *_: (0, struct.pack("<BBQH20x", flags, 0, 0, 0)))
    assert not box.poison(0, 64).complete


@pytest.mark.parametrize(("dpa", "nbytes"), [(1, 64), (0, 63), (0, 0), (-64, 64), (1 << 63, 64)])
def test_poison_is_asked_for_in_whole_lines(dpa: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="whole lines of 64 bytes"):
        mailbox(lambda *_: (0, b""))[0].poison(dpa, nbytes)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [(2, ProtocolError), (3, Unsupported), (4, ProtocolError), (5, Timeout), (6, Busy), (7, MediaError)],
)
def test_what_the_device_refuses_is_named_by_its_return_code(returned: int, kind: type[DeviceError]) -> None:
    with pytest.raises(kind, match=f"cxl0: identify: /dev/cxl/mem0: the device answers {returned} "):
        mailbox(lambda *_: (returned, b""))[0].identity()


def test_raw_commands_need_a_permission_that_is_named() -> None:
    def refuse(*_: object) -> tuple[int, bytes]:
        raise failure(errno.EPERM)

    with pytest.raises(NoPermission, match=r"raw commands take CAP_SYS_RAWIO.*CONFIG_CXL_MEM_RAW_COMMANDS"):
        mailbox(refuse)[0].poison(0, 64)
    with pytest.raises(NoPermission, match="root, or a group"):
        mailbox(refuse)[0].health()


def test_a_node_that_is_not_there_and_a_kernel_that_lacks_the_command() -> None:
    with pytest.raises(NotPresent):
        Mailbox("cxl0", "/dev/cxl/mem1", ModelKernel()).identity()

    def lacking(*_: object) -> tuple[int, bytes]:
        raise failure(errno.ENOTTY)

    with pytest.raises(Unsupported, match="lacks it"):
        mailbox(lacking)[0].identity()


@given(answer=st.binary(max_size=5000), returned=st.integers(0, 30), more=st.booleans())
def test_any_answer_is_a_value_or_a_device_error(answer: bytes, returned: int, more: bool) -> None:
    box, _, kernel = mailbox(lambda *_: (returned if more else 0, answer))
    for ask in (box.identity, box.health, lambda: box.poison(0, 64)):
        with suppress(DeviceError):
            hash(ask())
    assert kernel.open_fds == 0
