"""What crosses the bus between a host and an NVMe 2.0 controller: entries, completions, opcodes and status codes.

A submission entry has 64 bytes, sixteen little-endian words: command word (opcode, fuse, data pointer kind, command
identifier), namespace, two words that most commands ignore, metadata pointer, data pointer (16 bytes), and six words
whose meaning the opcode gives. A completion has 16 bytes: result, a reserved word, the submission queue's head and
number, the command identifier, the phase bit and 15 bits of status: code (8), type (3), retry delay (2), more, do not
retry. `Status` holds type and code as one number, type · 256 + code, as Linux prints it.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

ENTRY = struct.Struct("<BBHIIIQ16s6I")
COMPLETION = struct.Struct("<IIHHHH")
ENTRY_NBYTES, COMPLETION_NBYTES = 64, 16
assert (ENTRY.size, COMPLETION.size) == (ENTRY_NBYTES, COMPLETION_NBYTES)

MORE, DO_NOT_RETRY = 0x2000, 0x4000
ALL_NAMESPACES = 0xFFFFFFFF


class Admin(enum.IntEnum):
    """Opcodes of the admin queue."""

    DELETE_SQ = 0x00
    CREATE_SQ = 0x01
    GET_LOG_PAGE = 0x02
    DELETE_CQ = 0x04
    CREATE_CQ = 0x05
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C


class Io(enum.IntEnum):
    """Opcodes of the NVM command set."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_UNCORRECTABLE = 0x04
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09


class Status(enum.IntEnum):
    """Status type · 256 + status code."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    ABORT_REQUESTED = 0x007
    QUEUE_DELETED = 0x008
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    SGL_SEGMENT_INVALID = 0x00D
    SGL_COUNT_INVALID = 0x00E
    SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    PRP_OFFSET_INVALID = 0x013
    LBA_OUT_OF_RANGE = 0x080
    COMPLETION_QUEUE_INVALID = 0x100
    QUEUE_ID_INVALID = 0x101
    QUEUE_SIZE_INVALID = 0x102
    ABORT_LIMIT = 0x103
    ASYNC_EVENT_LIMIT = 0x105
    INTERRUPT_VECTOR_INVALID = 0x108
    LOG_PAGE_INVALID = 0x109
    QUEUE_DELETION_INVALID = 0x10C
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    FEATURE_NOT_PER_NAMESPACE = 0x10F
    CONFLICTING_ATTRIBUTES = 0x180
    WRITE_FAULT = 0x280
    UNRECOVERED_READ = 0x281
    COMPARE_FAILURE = 0x285
    DEALLOCATED = 0x287


class Refused(Exception):
    """A command ends with this status. `byte` is where in the entry the mistake is; 0xFFFF says nowhere there."""

    def __init__(self, status: int, retry: bool = False, byte: int = 0xFFFF, lba: int = 0) -> None:
        super().__init__(f"status {status:#05x}")
        self.status = status | (0 if retry else DO_NOT_RETRY)
        self.byte = byte
        self.lba = lba


class Entry(NamedTuple):
    """A submission entry; cdw10 … cdw15 are `cdw[0]` … `cdw[5]`."""

    opcode: int
    flags: int = 0
    cid: int = 0
    nsid: int = 0
    cdw2: int = 0
    cdw3: int = 0
    metadata: int = 0
    data: bytes = bytes(16)
    cdw: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)

    @property
    def prp1(self) -> int:
        """The first half of the data pointer."""
        return int.from_bytes(self.data[:8], "little")

    @property
    def prp2(self) -> int:
        """The second half of the data pointer."""
        return int.from_bytes(self.data[8:], "little")

    @property
    def lba(self) -> int:
        """cdw10 and cdw11 of an input or output command."""
        return self.cdw[0] | self.cdw[1] << 32

    def pack(self) -> bytes:
        """The 64 bytes."""
        return ENTRY.pack(*self[:8], *self.cdw)

    @classmethod
    def unpack(cls, raw: bytes) -> Entry:
        """The entry in 64 bytes."""
        fields = ENTRY.unpack(raw)
        opcode, flags, cid, nsid, cdw2, cdw3, metadata, data, *cdw = fields
        a, b, c, d, e, f = cdw
        return cls(opcode, flags, cid, nsid, cdw2, cdw3, metadata, data, (a, b, c, d, e, f))


class Answer(NamedTuple):
    """A completion entry; `status` has the 15 bits without the phase."""

    result: int
    reserved: int
    sq_head: int
    sq_id: int
    cid: int
    phase: int
    status: int

    def pack(self) -> bytes:
        """The 16 bytes."""
        last = self.phase | self.status << 1
        return COMPLETION.pack(self.result, self.reserved, self.sq_head, self.sq_id, self.cid, last)

    @classmethod
    def unpack(cls, raw: bytes) -> Answer:
        """The completion in 16 bytes."""
        result, reserved, sq_head, sq_id, cid, last = COMPLETION.unpack(raw)
        return cls(result, reserved, sq_head, sq_id, cid, last & 1, last >> 1)


def pointers(prp1: int, prp2: int = 0) -> bytes:
    """The data pointer of an entry that describes its memory with PRPs."""
    return struct.pack("<QQ", prp1, prp2)
