"""The status of an NVMe completion: its name, whether trying again may help, and the device error that it is.

A status is the number that Linux gives: the code in bits 0 to 7, its type in bits 8 to 10, and 0x4000 for *do not
retry*. What must hold: a medium's failure is a MediaError and a path's is Gone; a refusal that will pass is tried again
only if the drive does not forbid it; an unknown number is shown as it came and never taken for success.
"""

from __future__ import annotations

from tierloop.devices.errors import (
    Busy,
    DeviceError,
    Gone,
    MediaError,
    NoPermission,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Timeout,
    Unsupported,
)

DO_NOT_RETRY = 0x4000
INVALID_OPCODE, INVALID_FIELD = 0x001, 0x002
_CODE = 0x7FF

_NAMES = {
    0x001: "Invalid Command Opcode",
    0x002: "Invalid Field in Command",
    0x003: "Command ID Conflict",
    0x004: "Data Transfer Error",
    0x005: "Aborted due to Power Loss Notification",
    0x006: "Internal Error",
    0x007: "Command Abort Requested",
    0x008: "Aborted due to Submission Queue Deletion",
    0x009: "Aborted due to Failed Fused Command",
    0x00A: "Aborted due to Missing Fused Command",
    0x00B: "Invalid Namespace or Format",
    0x00C: "Command Sequence Error",
    0x00D: "Invalid SGL Segment Descriptor",
    0x00E: "Invalid Number of SGL Descriptors",
    0x00F: "Data SGL Length Invalid",
    0x010: "Metadata SGL Length Invalid",
    0x011: "SGL Descriptor Type Invalid",
    0x012: "Invalid Use of Controller Memory Buffer",
    0x013: "Invalid PRP Offset",
    0x014: "Atomic Write Unit Exceeded",
    0x015: "Operation Denied",
    0x016: "SGL Offset Invalid",
    0x018: "Host Identifier Inconsistent Format",
    0x019: "Keep Alive Timer Expired",
    0x01A: "Keep Alive Timeout Invalid",
    0x01B: "Aborted due to Preempt and Abort",
    0x01C: "Sanitize Failed",
    0x01D: "Sanitize In Progress",
    0x01E: "SGL Data Block Granularity Invalid",
    0x01F: "Command Not Supported for Queue in CMB",
    0x020: "Namespace is Write Protected",
    0x021: "Command Interrupted",
    0x022: "Transient Transport Error",
    0x023: "Command Prohibited by Command and Feature Lockdown",
    0x024: "Admin Command Media Not Ready",
    0x080: "LBA Out of Range",
    0x081: "Capacity Exceeded",
    0x082: "Namespace Not Ready",
    0x083: "Reservation Conflict",
    0x084: "Format In Progress",
    0x109: "Invalid Log Page",
    0x180: "Conflicting Attributes",
    0x181: "Invalid Protection Information",
    0x182: "Attempted Write to Read Only Range",
    0x183: "Command Size Limit Exceeded",
    0x280: "Write Fault",
    0x281: "Unrecovered Read Error",
    0x282: "End-to-end Guard Check Error",
    0x283: "End-to-end Application Tag Check Error",
    0x284: "End-to-end Reference Tag Check Error",
    0x285: "Compare Failure",
    0x286: "Access Denied",
    0x287: "Deallocated or Unwritten Logical Block",
    0x288: "End-to-end Storage Tag Check Error",
    0x300: "Internal Path Error",
    0x301: "Asymmetric Access Persistent Loss",
    0x302: "Asymmetric Access Inaccessible",
    0x303: "Asymmetric Access Transition",
    0x360: "Controller Pathing Error",
    0x370: "Host Pathing Error",
    0x371: "Command Aborted by Host",
}
_PASSING = frozenset({0x005, 0x006, 0x007, 0x008, 0x021, 0x022, 0x024, 0x082, 0x084, 0x303, 0x371})
_KINDS: dict[int, type[DeviceError]] = {
    0x005: Busy,
    0x006: MediaError,
    0x007: Timeout,
    0x008: Busy,
    0x00B: Gone,
    0x015: NoPermission,
    0x01B: Busy,
    0x01C: MediaError,
    0x01D: Busy,
    0x020: MediaError,
    0x021: Busy,
    0x022: Busy,
    0x023: NoPermission,
    0x024: Busy,
    0x080: OutOfRange,
    0x081: OutOfMemory,
    0x082: Busy,
    0x083: Busy,
    0x084: Busy,
    0x182: MediaError,
    0x286: NoPermission,
    0x303: Busy,
    0x371: Timeout,
}
_KIND_OF_TYPE: dict[int, type[DeviceError]] = {2: MediaError, 3: Gone}


def name_of(status: int) -> str:
    """A status in words, with type and code."""
    said = _NAMES.get(status & _CODE, "unknown status")
    final = ", do not retry" if status & DO_NOT_RETRY else ""
    return f"{said} (NVMe status type {status >> 8 & 7} code {status & 0xFF:02x}h{final})"


def passes(status: int) -> bool:
    """Whether the same command may well succeed if it is tried again."""
    return status & _CODE in _PASSING and not status & DO_NOT_RETRY


def gave_up(status: int) -> bool:
    """Whether somebody ended the command before its time: an abort, or a reset of the controller."""
    return status & _CODE in (0x007, 0x371)


def is_media(status: int) -> bool:
    """Whether the status tells of blocks that could not be read or written."""
    return status >> 8 & 7 == 2


def refused(status: int) -> bool:
    """Whether the drive does not know the command, or not this form of it."""
    return status & _CODE in (INVALID_OPCODE, INVALID_FIELD, 0x180, 0x183)


def error_of(device: str, op: str, status: int, detail: str, optional: bool = False) -> DeviceError:
    """The device error for a status; a refused `optional` command is Unsupported, any other a ProtocolError."""
    code = status & _CODE
    kind = _KINDS.get(code) or _KIND_OF_TYPE.get(code >> 8, ProtocolError)
    if optional and refused(status):
        kind = Unsupported
    return kind(device, op, f"{detail}: {name_of(status)}")
