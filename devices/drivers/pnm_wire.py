"""The wire format between a host and a near-memory processor: what lies where in a shared window, byte by byte.

Both sides use this file, and each checks everything that it takes in: a frame that is wrong is a WireError that says
what was found and what is allowed. Numbers are little-endian, checksums CRC-32. docs/pnm.md shows the tables.

- The window begins with the `Layout`, which the device writes. Behind it lie a doorbell, a submission ring, a
  completion ring, an arena for arguments, and the device's memory.
- Command number n (from 1 in each session) is an `Entry` in slot (n − 1) % entries of the submission ring; answer
  number n is an `Answer` in the completion ring likewise. The *phase* of a slot is 1 in the first lap of a session, 0
  in the second, and so on: by it a reader knows a new frame from an old one.
- Every frame carries its session and that session's nonce, so that what belongs to an earlier one is recognised, and a
  checksum over all of its other bytes, so that a frame that is half there is not taken for a whole one.
- Arguments lie in the arena, where an entry points; `room` bytes from there on are the command's until it is answered.
  What an answer has to say beyond its numbers (a HELLO's limits, the reason of a refusal) lies there as well.
- The doorbell takes the number of the last command that was written. With its highest bit set it says that a HELLO in
  slot 0 begins a session, whose number the lower bits repeat: so it always changes, for firmware that looks at it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Literal, TypeVar, cast

from tierloop.devices.info import Arithmetic

VERSION = 1
"""What this file describes. A device names the oldest and the newest version that it speaks."""
MAGIC = b"TLPNMWIN"
ENTRY_NBYTES = 64
"""Bytes of a frame in either ring, which is also the grid that everything in the window lies on."""
HELLO_BELL = 1 << 63
"""What a doorbell has set for a HELLO."""
TEXT_NBYTES = 256
"""Room that every command gives at least, for the reason of a refusal."""
_MOST_ENTRIES = 1 << 16
_MOST_NBYTES = 1 << 62


class WireError(ValueError):
    """Bytes that the format does not allow."""


class Opcode(IntEnum):
    """What a command asks for."""

    HELLO = 1
    REGION_ADD = 2
    REGION_DROP = 3
    ADD = 4
    OP = 5
    READ = 6
    GOODBYE = 7


class Status(IntEnum):
    """How a command ended."""

    OK = 0
    BAD_ENTRY = 1
    """The entry could not be read: checksum, phase, number, op code."""
    NO_SESSION = 2
    """Its session is not the one that is open."""
    BAD_ARGUMENTS = 3
    """Arguments outside the arena, with another checksum, or that cannot be read."""
    BAD_REGION = 4
    """A region that does not exist, or exists already."""
    NO_ROOM = 5
    """A region outside the memory, or over another one."""
    INTERLEAVED = 6
    """A region that is not contiguous: rows would be torn."""
    OUT_OF_RANGE = 7
    """Spans outside their region, or a launch whose operands do not fit its arguments."""
    TOO_LARGE = 8
    """More than an engine's SRAM, or than a limit of HELLO."""
    UNSUPPORTED = 9
    """A version, kernel or dtype that the device does not offer."""
    BAD_PAYLOAD = 10
    """The bytes that were added are not those that the host wrote."""
    MEDIA = 11
    """The memory could not be read or written."""
    FAILED = 12
    """The device failed while it worked."""


def checksum(data: bytes | memoryview) -> int:
    """CRC-32 of bytes."""
    return zlib.crc32(data)


def slot_of(number: int, entries: int) -> tuple[int, int]:
    """(slot, phase) of command or answer `number` ≥ 1 in a ring."""
    return (number - 1) % entries, ((number - 1) // entries + 1) & 1


_Frame = TypeVar("_Frame", "Entry", "Answer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A command. `args_offset` counts from the start of the arena; `room` ≥ args_nbytes."""

    opcode: int
    phase: int
    session: int
    room: int
    number: int
    op_id: int
    args_offset: int
    args_nbytes: int
    args_check: int
    payload_check: int
    nonce: int

    def pack(self) -> bytes:
        """The frame, with its checksum."""
        return _sealed(_ENTRY.pack(*astuple(self)))

    @classmethod
    def unpack(cls, frame: bytes) -> Entry:
        """Read a frame. Raises WireError."""
        return _unsealed(cls, _ENTRY, frame)


@dataclass(frozen=True, slots=True)
class Answer:
    """How command `answers` ended; `number` counts answers. `nbytes` and `payload_check` mean, for each op code:

    HELLO: the limits, which lie at the command's arguments. ADD, READ: the bytes that were taken in, or shown. OP: the
    bytes that were written; `detail` is the floating-point operations. A status other than OK: the reason, in UTF-8 at
    the command's arguments.
    """

    opcode: int
    phase: int
    session: int
    status: int
    number: int
    op_id: int
    answers: int
    nbytes: int
    payload_check: int
    nonce: int
    detail: int

    def pack(self) -> bytes:
        """The frame, with its checksum."""
        return _sealed(_ANSWER.pack(*astuple(self)))

    @classmethod
    def unpack(cls, frame: bytes) -> Answer:
        """Read a frame. Raises WireError."""
        return _unsealed(cls, _ANSWER, frame)


_ENTRY = struct.Struct("<HHIIQQQQIII")
_ANSWER = struct.Struct("<HHIIQQQQIIQ")
_CHECK = struct.Struct("<I")
_PHASE = struct.Struct("<6xH")


def phase_of(frame: bytes) -> int:
    """The phase of a frame in a ring, whatever else it holds."""
    phase: int = _PHASE.unpack_from(frame)[0]
    return phase


def _sealed(body: bytes) -> bytes:
    body = body.ljust(ENTRY_NBYTES - _CHECK.size, b"\0")
    return _CHECK.pack(checksum(body)) + body


def _unsealed(kind: type[_Frame], form: struct.Struct, frame: bytes) -> _Frame:
    if len(frame) != ENTRY_NBYTES:
        raise WireError(f"a frame has {ENTRY_NBYTES} bytes, got {len(frame)}")
    said, found = _CHECK.unpack_from(frame)[0], checksum(memoryview(frame)[_CHECK.size :])
    if said != found:
        raise WireError(f"the frame's checksum is {found:#010x}, and it says {said:#010x}")
    if any(frame[_CHECK.size + form.size :]):
        raise WireError("the reserved bytes of the frame are not 0")
    return kind(*form.unpack_from(frame, _CHECK.size))


_LAYOUT = struct.Struct("<8sHHI10Q")
LAYOUT_NBYTES = _LAYOUT.size + _CHECK.size


@dataclass(frozen=True)
class Layout:
    """What lies where: offsets from the start of the window and sizes in bytes, rings in entries."""

    oldest: int
    newest: int
    window_nbytes: int
    doorbell_offset: int
    submission_offset: int
    submission_entries: int
    completion_offset: int
    completion_entries: int
    arena_offset: int
    arena_nbytes: int
    memory_offset: int
    memory_nbytes: int

    def pack(self) -> bytes:
        """As it stands at the start of the window."""
        numbers = astuple(self)
        body = _LAYOUT.pack(MAGIC, *numbers[:2], 0, *numbers[2:])
        return body + _CHECK.pack(checksum(body))

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        """Read and check the start of a window. Raises WireError."""
        if len(data) < LAYOUT_NBYTES:
            raise WireError(f"a window begins with {LAYOUT_NBYTES} bytes that describe it, got {len(data)}")
        magic, oldest, newest, zero, *numbers = _LAYOUT.unpack_from(data)
        if magic != MAGIC:
            raise WireError(f"the window begins with {magic!r}, that of a near-memory processor with {MAGIC!r}")
        said, found = _CHECK.unpack_from(data, _LAYOUT.size)[0], checksum(data[: _LAYOUT.size])
        if said != found:
            raise WireError(f"the layout's checksum is {found:#010x}, and it says {said:#010x}")
        if zero:
            raise WireError("the reserved bytes of the layout are not 0")
        layout = cls(oldest, newest, *numbers)
        layout._check()
        return layout

    def _check(self) -> None:
        for name in ("submission_entries", "completion_entries"):
            entries = getattr(self, name)
            if not 2 <= entries <= _MOST_ENTRIES or entries & (entries - 1):
                raise WireError(f"{name} is {entries}; allowed: a power of two from 2 to {_MOST_ENTRIES}")
        if self.completion_entries < self.submission_entries:
            raise WireError(
                f"{self.completion_entries} completion entries for {self.submission_entries} commands; "
                "allowed: at least as many"
            )
        parts = sorted(
            [
                (0, LAYOUT_NBYTES, "layout"),
                (self.doorbell_offset, 8, "doorbell"),
                (self.submission_offset, self.submission_entries * ENTRY_NBYTES, "submission ring"),
                (self.completion_offset, self.completion_entries * ENTRY_NBYTES, "completion ring"),
                (self.arena_offset, self.arena_nbytes, "arena"),
                (self.memory_offset, self.memory_nbytes, "memory"),
            ]
        )
        end, before = 0, "start"
        for offset, nbytes, name in parts:
            if offset % ENTRY_NBYTES or (name in ("arena", "memory") and nbytes % ENTRY_NBYTES):
                raise WireError(f"the {name}, {nbytes} bytes from {offset}, is off the grid of {ENTRY_NBYTES} bytes")
            if nbytes < 1 or nbytes > _MOST_NBYTES:
                raise WireError(f"the {name} has {nbytes} bytes")
            if offset < end:
                raise WireError(f"the {name} begins at {offset}, inside the {before}")
            end, before = offset + nbytes, name
        if end > self.window_nbytes:
            raise WireError(f"the {before} ends at {end}, outside the window of {self.window_nbytes} bytes")
        if self.arena_nbytes < 2 * TEXT_NBYTES:
            raise WireError(f"the arena has {self.arena_nbytes} bytes; allowed: at least {2 * TEXT_NBYTES}")


_HELLO = struct.Struct("<HH4x")
_LIMITS = struct.Struct("<HHIQQQQQQQBBBB4x32s")
LIMITS_NBYTES = _LIMITS.size

Precision = Literal["float16", "float32", "float64"]
_PRECISIONS: tuple[Precision, ...] = ("float16", "float32", "float64")


def pack_hello(oldest: int, newest: int) -> bytes:
    """Arguments of HELLO: the versions that the host speaks."""
    return _HELLO.pack(oldest, newest)


def unpack_hello(data: bytes) -> tuple[int, int]:
    """(oldest, newest). Raises WireError."""
    if len(data) != _HELLO.size:
        raise WireError(f"the arguments of HELLO have {_HELLO.size} bytes, got {len(data)}")
    oldest, newest = _HELLO.unpack(data)
    if not 1 <= oldest <= newest:
        raise WireError(f"versions {oldest} to {newest}; allowed: from 1 up, the oldest first")
    return oldest, newest


@dataclass(frozen=True)
class Limits:
    """What a device answers to HELLO: sizes in bytes.

    `capacity` of its memory; `grid` that regions begin and end on; `largest_arguments` and `most_spans` of one command;
    `kernels` and `dtypes` are sets of bits, by the numbers in pnm_arguments.py; `engines` with `sram_nbytes` each.
    """

    version: int
    engines: int
    sram_nbytes: int
    capacity: int
    grid: int
    largest_arguments: int
    most_spans: int
    kernels: int
    dtypes: int
    arithmetic: Arithmetic

    def pack(self) -> bytes:
        """As it stands at the arguments of the HELLO."""
        a = self.arithmetic
        precisions = [_PRECISIONS.index(p) for p in (a.accumulator, a.exp, a.wire)]
        name = a.microkernel.encode()[:32].ljust(32, b"\0")
        return _LIMITS.pack(
            self.version, 0, self.engines, self.sram_nbytes, self.capacity, self.grid, self.largest_arguments,
            self.most_spans, self.kernels, self.dtypes, *precisions, 0, name,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes, layout: Layout) -> Limits:
        """Read and check what a device said. Raises WireError."""
        if len(data) != LIMITS_NBYTES:
            raise WireError(f"the answer to HELLO has {LIMITS_NBYTES} bytes, got {len(data)}")
        version, _, engines, sram, capacity, grid, largest, spans, kernels, dtypes, *rest = _LIMITS.unpack(data)
        precisions, name = rest[:3], rest[4]
        if version != VERSION:
            raise WireError(f"version {version}; allowed: {VERSION}")
        for what, number, most in (
            ("engines", engines, 1 << 20),
            ("sram_nbytes", sram, _MOST_NBYTES),
            ("capacity", capacity, layout.memory_nbytes),
            ("largest_arguments", largest, layout.arena_nbytes),
            ("most_spans", spans, 1 << 40),
        ):
            if not 1 <= number <= most:
                raise WireError(f"{what} is {number}; allowed: 1 to {most}")
        if grid < 1 or grid & (grid - 1) or grid > capacity:
            raise WireError(f"the grid of regions is {grid} bytes; allowed: a power of two up to {capacity}")
        if max(precisions) >= len(_PRECISIONS) or _PRECISIONS[precisions[2]] == "float64":
            raise WireError(f"the arithmetic is {precisions}; allowed: 0 to 2 for {', '.join(_PRECISIONS)}")
        try:
            microkernel = name.rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise WireError(f"the name of the microkernel is no UTF-8: {name!r}") from error
        accumulator, exp, wire = (_PRECISIONS[p] for p in precisions)
        arithmetic = Arithmetic(microkernel, accumulator, exp, cast(Literal["float16", "float32"], wire))
        return cls(version, engines, sram, capacity, grid, largest, spans, kernels, dtypes, arithmetic)


_REGION = struct.Struct("<QQQII")
_DROP = struct.Struct("<Q")


@dataclass(frozen=True)
class Place:
    """Arguments of REGION_ADD: where in the memory a region lies, and over how many ways in what granules."""

    region: int
    offset: int
    nbytes: int
    ways: int = 1
    granule: int = 0

    def pack(self) -> bytes:
        """As arguments."""
        return _REGION.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Place:
        """Read arguments. Raises WireError."""
        if len(data) != _REGION.size:
            raise WireError(f"the arguments of REGION_ADD have {_REGION.size} bytes, got {len(data)}")
        place = cls(*_REGION.unpack(data))
        if place.nbytes < 1 or place.offset > _MOST_NBYTES or place.nbytes > _MOST_NBYTES:
            raise WireError(f"a region of {place.nbytes} bytes at {place.offset}")
        return place


def pack_drop(region: int) -> bytes:
    """Arguments of REGION_DROP."""
    return _DROP.pack(region)


def unpack_drop(data: bytes) -> int:
    """The region. Raises WireError."""
    if len(data) != _DROP.size:
        raise WireError(f"the arguments of REGION_DROP have {_DROP.size} bytes, got {len(data)}")
    region: int = _DROP.unpack(data)[0]
    return region
