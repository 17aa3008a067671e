"""/dev/cxl/memN: the mailbox of a card as Linux lets programs use it.

Two requests: which commands there are, and send one. As in Linux 6.12:

- Commands are named by their place in a list, not by opcode. A raw opcode is EPERM unless the kernel was built for it,
  and then those for poison, partitions, labels and erasing still are, unless a switch for debugging lets all through.
- What concerns poison, and a partition that changes at once, is not for programs: ENOTTY, EBUSY. What the kernel uses
  for itself on a persistent card (labels, partitions, shutdown state) is EBUSY.
- Lengths are checked before the card is asked: ENOMEM for a payload of another length than the command's. An address
  that is not mapped is EFAULT.
- What the card refuses is no error of the request: its return code is in `retval`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Literal, NamedTuple

from tierloop.emulators.kernel import Absent, failure
from tierloop.firmware_models.cxl_card import ANSWER, COMMAND, CONTROL, DOORBELL, MAILBOX, PAYLOAD, CxlCard
from tierloop.firmware_models.cxl_codes import Code, Op

QUERY = 2 << 30 | 8 << 16 | 0xCE << 8 | 1
SEND = 3 << 30 | 48 << 16 | 0xCE << 8 | 2
ANY = 0xFFFFFFFF
"""A length that may vary."""
RAW = 2
_SEND = struct.Struct("<IIIIIIQIIQ")
_POLL_NS = 1_000_000


class KnownCommand(NamedTuple):
    """A command that the kernel knows: opcode, lengths in and out, whether the kernel keeps it on persistent cards."""

    op: Op
    size_in: int
    size_out: int
    kept: bool = False


COMMANDS = {
    1: KnownCommand(Op.IDENTIFY, 0, 0x43),
    3: KnownCommand(Op.GET_SUPPORTED_LOGS, 0, ANY),
    4: KnownCommand(Op.GET_FIRMWARE, 0, 0x50),
    5: KnownCommand(Op.GET_PARTITIONS, 0, 0x20),
    6: KnownCommand(Op.GET_LSA, 8, ANY),
    7: KnownCommand(Op.GET_HEALTH, 0, 0x12),
    8: KnownCommand(Op.GET_LOG, 0x18, ANY),
    9: KnownCommand(Op.SET_PARTITIONS, 0x0A, 0, True),
    10: KnownCommand(Op.SET_LSA, ANY, 0, True),
    11: KnownCommand(Op.GET_ALERTS, 0, 0x10),
    12: KnownCommand(Op.SET_ALERTS, 0x0C, 0),
    13: KnownCommand(Op.GET_SHUTDOWN, 0, 1),
    14: KnownCommand(Op.SET_SHUTDOWN, 1, 0, True),
    18: KnownCommand(Op.GET_SCAN_CAPABILITIES, 0x10, 4),
    21: KnownCommand(Op.GET_TIMESTAMP, 0, 8),
}
"""By number. What is missing from 15 to 20 are commands for poison that programs are not given any more."""
_NOT_RAW = (
    Op.SET_PARTITIONS,
    Op.SET_LSA,
    Op.SET_SHUTDOWN,
    Op.GET_POISON,
    Op.INJECT_POISON,
    Op.CLEAR_POISON,
)


Raw = Literal["refused", "checked", "all"]
"""Raw commands: of a kernel without them, of one that has them, and of that with its switch for debugging."""


class Mailbox:
    """The kernel's end of a card's mailbox: writes the registers, waits, reads the answer."""

    def __init__(self, card: CxlCard) -> None:
        self.card = card

    def ask(self, opcode: int, payload: bytes = b"") -> tuple[Code | int, bytes]:
        """Send a command: return code and output payload. Raises OSError: ENXIO if the card is gone, ETIMEDOUT."""
        card = self.card
        if card.removed:
            raise failure(errno.ENXIO)
        for at in range(0, len(payload), 8):
            piece = payload[at : at + 8].ljust(8, b"\0")
            card.write_device(MAILBOX + PAYLOAD + at, int.from_bytes(piece, "little"), 8)
        card.write_device(MAILBOX + COMMAND, opcode | len(payload) << 16, 8)
        card.write_device(MAILBOX + CONTROL, DOORBELL)
        for _ in range(2000):
            if not card.read_device(MAILBOX + CONTROL) & DOORBELL:
                break
            card.advance(card.state.now_ns + _POLL_NS)
        else:
            raise failure(errno.ETIMEDOUT)
        length = card.read_device(MAILBOX + COMMAND, 8) >> 16 & (1 << 21) - 1
        words = [card.read_device(MAILBOX + PAYLOAD + at, 8) for at in range(0, length, 8)]
        data = b"".join(word.to_bytes(8, "little") for word in words)[:length]
        return card.read_device(MAILBOX + ANSWER + 4) & 0xFFFF, data


class MemdevNode(Absent):
    """The character device of one card."""

    def __init__(self, card: CxlCard, raw: Raw = "refused") -> None:
        self._mailbox = Mailbox(card)
        self._raw = raw
        self._enabled = self._probed()

    def _probed(self) -> dict[int, KnownCommand]:
        """The commands that both have, from the card's command effects log."""
        code, log = self._mailbox.ask(Op.GET_SUPPORTED_LOGS)
        size = struct.unpack_from("<I", log, 24)[0] if code == Code.SUCCESS else 0
        uuid = log[8:24]
        have = set()
        for at in range(0, size, 256):
            length = min(256, size - at)
            code, piece = self._mailbox.ask(Op.GET_LOG, uuid + struct.pack("<II", at, length))
            have |= {struct.unpack_from("<H", piece, i)[0] for i in range(0, len(piece), 4)}
        return {number: known for number, known in COMMANDS.items() if known.op in have}

    @property
    def _persistent(self) -> bool:
        return self._mailbox.card.state.partitions[1] > 0

    def ioctl(self, request: int, argument: bytearray) -> int:
        """QUERY and SEND."""
        if request == QUERY:
            return self._query(argument)
        if request == SEND:
            return self._send(argument)
        raise failure(errno.ENOTTY)

    def _query(self, argument: bytearray) -> int:
        if len(argument) < 8:
            raise failure(errno.EFAULT)
        wanted = struct.unpack_from("<I", argument)[0]
        if wanted == 0:
            struct.pack_into("<I", argument, 0, len(COMMANDS))
            return 0
        listed = list(COMMANDS.items())[:wanted]
        if len(argument) < 8 + 16 * len(listed):
            raise failure(errno.EFAULT)
        for place, (number, known) in enumerate(listed):
            flags = (number in self._enabled) | (known.kept and self._persistent) << 1
            struct.pack_into("<4I", argument, 8 + 16 * place, number, flags, known.size_in, known.size_out)
        struct.pack_into("<I", argument, 0, len(listed))
        return 0

    def _send(self, argument: bytearray) -> int:
        if len(argument) != _SEND.size:
            raise failure(errno.EFAULT)
        number, flags, raw, _, size_in, rsvd_in, at_in, size_out, rsvd_out, at_out = _SEND.unpack(argument)
        limit = self._mailbox.card.part.payload_nbytes
        if number == 0 or number > max(COMMANDS):
            raise failure(errno.ENOTTY)
        if size_in > limit:
            raise failure(errno.EINVAL)
        if number == RAW:
            opcode = self._raw_opcode(raw, size_out, limit)
        else:
            opcode = self._opcode(number, flags | raw | rsvd_in | rsvd_out, size_in, size_out)
        payload = _from_user(at_in, size_in)
        if opcode == Op.SET_PARTITIONS and len(payload) > 8 and payload[8] & 1:
            raise failure(errno.EBUSY)
        code, answer = self._mailbox.ask(opcode, payload)
        answer = answer[:size_out] if code in (Code.SUCCESS, Code.BACKGROUND) else b""
        _to_user(at_out, answer)
        struct.pack_into("<I", argument, 12, code)
        struct.pack_into("<I", argument, 32, len(answer))
        return 0

    def _opcode(self, number: int, reserved: int, size_in: int, size_out: int) -> int:
        """The opcode of a listed command. Raises OSError."""
        if reserved:
            raise failure(errno.EINVAL)
        known = self._enabled.get(number)
        if known is None:
            raise failure(errno.ENOTTY)
        if known.kept and self._persistent:
            raise failure(errno.EBUSY)
        if known.size_in not in (ANY, size_in) or (known.size_out != ANY and size_out < known.size_out):
            raise failure(errno.ENOMEM)
        return known.op

    def _raw_opcode(self, raw: int, size_out: int, limit: int) -> int:
        opcode = raw & 0xFFFF
        if raw >> 16 or size_out > limit:
            raise failure(errno.EINVAL)
        kept = opcode in _NOT_RAW or opcode >> 8 in (0x44, 0x45, 0x46)
        if self._raw == "refused" or (kept and self._raw != "all"):
            raise failure(errno.EPERM)
        return opcode


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def _from_user(address: int, nbytes: int) -> bytes:
    """Bytes of this process at an address that may be wrong. Raises OSError: EFAULT."""
    kept = ctypes.create_string_buffer(max(1, nbytes))
    _across(_libc.process_vm_readv, kept, address, nbytes)
    return kept.raw[:nbytes]


def _to_user(address: int, data: bytes) -> None:
    kept = ctypes.create_string_buffer(data, max(1, len(data)))
    _across(_libc.process_vm_writev, kept, address, len(data))


def _across(call: ctypes._NamedFuncPointer, kept: ctypes.Array[ctypes.c_char], address: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    here, there = _Range(ctypes.addressof(kept), nbytes), _Range(address, nbytes)
    moved = call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if moved != nbytes:
        raise failure(errno.EFAULT)
