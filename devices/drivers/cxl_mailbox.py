"""The mailbox of a CXL memory device, through the kernel's /dev/cxl/memN: who it is, how it is, what it has lost.

`identity` and `health` are commands that the kernel passes on for whoever may open the node. The kernel keeps the list
of poisoned lines to itself (it writes it into its trace when asked through sysfs), so `poison` sends a raw command.
That takes a kernel with CONFIG_CXL_MEM_RAW_COMMANDS that is not locked down, CAP_SYS_RAWIO, and from Linux 6.4 on the
switch `raw_allow_all` in debugfs.

What a device answers is checked: an answer that is too short, or a record count that does not fit, is a ProtocolError.
Numbers are little-endian, capacities stand in units of 256 MiB and poison in units of 64 bytes (CXL 3.1, 8.2.10.9).
"""

from __future__ import annotations

import errno
import os
import posixpath
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tierloop.devices.drivers.cxl_steps import CXL
from tierloop.devices.drivers.cxl_sysfs import Folder
from tierloop.devices.errors import Busy, DeviceError, MediaError, NoPermission, ProtocolError, Timeout, Unsupported
from tierloop.devices.system import HOST, System, address_of, from_os

SEND_COMMAND = 0xC030CE02
"""_IOWR(0xCE, 2, struct cxl_send_command), a structure of 48 bytes."""
_SEND = struct.Struct("<IIHHIiIQiIQ")
_IDENTIFY, _RAW, _HEALTH = 1, 2, 7
_GET_POISON_LIST = 0x4300
_CAPACITY_UNIT, LINE = 256 << 20, 64
_LEAST_PAYLOAD, _LARGEST_PAYLOAD = 256, 1 << 20
_MOST_RECORDS = 1 << 16

_RAW_HINT = (
    "raw commands take CAP_SYS_RAWIO and a kernel with CONFIG_CXL_MEM_RAW_COMMANDS that is not locked down; this one "
    "also takes echo Y > /sys/kernel/debug/cxl/mbox/raw_allow_all"
)

_IDENTITY = struct.Struct("<16sQQQQHHHHI3sHBB")
_HEALTH_INFO = struct.Struct("<BBBBhIII")
_POISON_HEADER = struct.Struct("<BxQH20x")
_POISON_RECORD = struct.Struct("<QI4x")
_MORE, _OVERFLOW, _SCANNING = 1, 2, 4

MEDIA_STATUS = {0: "normal", 1: "not ready", 2: "persistency lost", 3: "all data lost"}
_LATER_STATUS = {4: "persistency lost at power loss", 5: "persistency lost at shutdown",
                 6: "persistency loss imminent", 7: "all data lost at power loss",
                 8: "all data lost at shutdown", 9: "all data loss imminent"}  # fmt: skip
POISON_SOURCES = {0: "unknown", 1: "external", 2: "internal", 3: "injected", 7: "vendor"}
_RETURNED = {
    1: "it goes on in the background",
    2: "invalid input",
    3: "unsupported",
    4: "internal error",
    5: "retry required",
    6: "busy",
    7: "media disabled",
    14: "invalid handle",
    15: "invalid physical address",
    16: "inject poison limit reached",
    17: "permanent media failure",
    18: "aborted",
    19: "invalid security state",
    20: "incorrect passphrase",
    21: "unsupported mailbox or command on this CCI",
    22: "invalid payload length",
    23: "invalid or unsupported log page",
    24: "interrupted",
}


@dataclass(frozen=True)
class Identity:
    """What the device is; sizes in bytes. `poison_lines` is the length of the longest poison list that it keeps."""

    firmware: str
    capacity: int
    volatile_nbytes: int
    persistent_nbytes: int
    partition_alignment: int
    label_nbytes: int
    poison_lines: int
    scans_media: bool


@dataclass(frozen=True)
class Health:
    """How the device is. `life_used_percent` and `celsius` are None where it does not say."""

    maintenance_needed: bool
    performance_degraded: bool
    replacement_needed: bool
    media_status: str
    life_used_percent: int | None
    celsius: int | None
    dirty_shutdowns: int
    corrected_volatile_errors: int
    corrected_persistent_errors: int


@dataclass(frozen=True)
class Poisoned:
    """A run of poisoned lines: device address and size in bytes, and who found it."""

    dpa: int
    nbytes: int
    source: str


@dataclass(frozen=True)
class PoisonList:
    """All poison that the device knows of; it is not `complete` where its list overflowed or it is still scanning."""

    records: tuple[Poisoned, ...]
    complete: bool


class Mailbox:
    """The mailbox of one memory device, opened for each command; `path` is its node, such as /dev/cxl/mem0."""

    def __init__(self, device: str, path: str, system: System = HOST) -> None:
        self._device = device
        self._path = path
        self._system = system

    def identity(self) -> Identity:
        """Identify Memory Device. Raises NotPresent, NoPermission, Unsupported, Busy, ProtocolError, MediaError."""
        answer = self._fields("identify", _IDENTIFY, _IDENTITY)
        firmware, capacity, volatile, persistent, alignment = answer[:5]
        label_nbytes, poison_lines, caps = answer[9], answer[10], answer[12]
        return Identity(
            firmware.split(b"\0")[0].decode("ascii", "replace").strip(),
            capacity * _CAPACITY_UNIT,
            volatile * _CAPACITY_UNIT,
            persistent * _CAPACITY_UNIT,
            alignment * _CAPACITY_UNIT,
            label_nbytes,
            int.from_bytes(poison_lines, "little"),
            bool(caps & 2),
        )

    def health(self) -> Health:
        """Get Health Info. Raises as `identity` does."""
        status, media, _, life, celsius, dirty, volatile, persistent = self._fields("health", _HEALTH, _HEALTH_INFO)
        return Health(
            bool(status & 1),
            bool(status & 2),
            bool(status & 4),
            (MEDIA_STATUS | _LATER_STATUS).get(media, f"unknown status {media}"),
            life if life <= 100 else None,
            celsius if celsius != 0x7FFF else None,
            dirty,
            volatile,
            persistent,
        )

    def poison(self, dpa: int, nbytes: int) -> PoisonList:
        """Get Poison List of a range of device addresses, in as many commands as it takes. Raw: see above.

        Raises as `identity` does, and ValueError for a range that is no whole number of lines.
        """
        if dpa < 0 or nbytes < LINE or dpa % LINE or nbytes % LINE or dpa + nbytes >= 1 << 63:
            raise ValueError(f"[{dpa}, {dpa + nbytes}): poison is asked for in whole lines of {LINE} bytes")
        asked = struct.pack("<QQ", dpa, nbytes // LINE)
        records: list[Poisoned] = []
        while True:
            answer = self._send("poison", _RAW, asked, _GET_POISON_LIST)
            if len(answer) < _POISON_HEADER.size:
                raise self._odd("poison", f"{len(answer)} bytes; the header has {_POISON_HEADER.size}")
            flags, _, count = _POISON_HEADER.unpack_from(answer)
            body = answer[_POISON_HEADER.size :]
            if count * _POISON_RECORD.size > len(body):
                raise self._odd("poison", f"{count} records in {len(body)} bytes")
            for place, lines in _POISON_RECORD.iter_unpack(body[: count * _POISON_RECORD.size]):
                source = POISON_SOURCES.get(place & 7, f"source {place & 7}")
                records.append(Poisoned(place & ~(LINE - 1), lines * LINE, source))
            if not flags & _MORE:
                return PoisonList(tuple(records), not flags & (_OVERFLOW | _SCANNING))
            if not count or len(records) > _MOST_RECORDS:
                raise self._odd("poison", f"the list goes on after {len(records)} records without end")

    def _fields(self, op: str, number: int, fields: struct.Struct) -> tuple[Any, ...]:
        answer = self._send(op, number)
        if len(answer) < fields.size:
            raise self._odd(op, f"{len(answer)} bytes; it has {fields.size}")
        return fields.unpack_from(answer)

    def _send(self, op: str, number: int, payload: bytes = b"", opcode: int = 0) -> bytes:
        into, given = bytearray(self._room()), bytearray(payload or b"\0")
        request = bytearray(
            _SEND.pack(
                number, 0, opcode, 0, 0, len(payload), 0, address_of(given) if payload else 0,
                len(into), 0, address_of(into),
            )
        )  # fmt: skip
        try:
            fd = self._system.open(self._path, os.O_RDWR)
            try:
                self._system.ioctl(fd, SEND_COMMAND, request)
            finally:
                with suppress(OSError):  # nothing was written that could be lost
                    self._system.close(fd)
        except OSError as error:
            raise self._refused(op, number, error) from error
        fields = _SEND.unpack(request)
        returned, nbytes = fields[4], fields[8]
        if returned:
            raise self._failed(op, returned)
        if not 0 <= nbytes <= len(into):
            raise self._odd(op, f"{nbytes} bytes; {len(into)} were offered")
        return bytes(into[:nbytes])

    def _room(self) -> int:
        """The largest answer: for raw commands the kernel refuses to be offered more room."""
        folder = Folder(self._system, f"{CXL}/{posixpath.basename(self._path)}", [])
        said = folder.number("payload_max") or _LEAST_PAYLOAD
        return min(max(said, _LEAST_PAYLOAD), _LARGEST_PAYLOAD)

    def _refused(self, op: str, number: int, error: OSError) -> DeviceError:
        if error.errno in (errno.EPERM, errno.EACCES):
            hint = _RAW_HINT if number == _RAW else "it takes root, or a group that may read and write it"
            return NoPermission(self._device, op, f"{self._path}: not allowed; {hint}", error.errno)
        if error.errno == errno.ENOTTY:
            return Unsupported(self._device, op, f"{self._path}: the kernel or the device lacks it", error.errno)
        return from_os(self._device, op, error, self._path)

    def _failed(self, op: str, returned: int) -> DeviceError:
        text = f"{self._path}: the device answers {returned} ({_RETURNED.get(returned, 'see CXL 3.1, 8.2.8.4.5.1')})"
        kinds: dict[int, type[DeviceError]] = {3: Unsupported, 5: Timeout, 6: Busy, 7: MediaError, 17: MediaError}
        return kinds.get(returned, ProtocolError)(self._device, op, text)

    def _odd(self, op: str, what: str) -> ProtocolError:
        return ProtocolError(self._device, op, f"{self._path}: an answer of {what}")
