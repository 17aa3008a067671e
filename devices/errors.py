"""Errors of devices: every one says which device, which operation, what was asked and what was allowed.

    DeviceError                       base; `kind` is for programs, the message is for people
    ├── NotPresent     not_present    also FileNotFoundError   no such device, node or file
    ├── NoPermission   no_permission  also PermissionError     EACCES and EPERM alike
    ├── OutOfMemory    out_of_memory  also MemoryError         the memory's capacity is spent
    ├── Misaligned     misaligned     also ValueError          offset, size or address off the device's grid
    ├── OutOfRange     out_of_range   also ValueError          a span outside its region, a freed region, a bad queue
    ├── Busy           busy           also BlockingIOError     the queue is full
    ├── Timeout        timeout        also TimeoutError        a deadline passed
    ├── Cancelled      cancelled                               a command that this one came after has failed
    ├── MediaError     media          also OSError             the medium could not be read or written
    ├── ProtocolError  protocol       also RuntimeError        the other side broke its own rules
    ├── Unsupported    unsupported    also NotImplementedError the device says beforehand that it cannot
    └── Gone           gone           also ConnectionError     unplugged, closed or dead; nothing works from here on

A mistake that can be seen when a command is handed in is raised by `submit`, and nothing was queued. What fails while
a command runs ends its completion with the error. After any error but `Gone` the device still works.
"""

from __future__ import annotations


class DeviceError(Exception):
    """Base of all device errors; `device` and `op` say where, `errno` keeps the operating system's number."""

    kind = "device"

    def __init__(self, device: str, op: str, detail: str, errno: int | None = None) -> None:
        message = f"{device}: {op}: {detail}"
        super().__init__(message)
        self.device = device
        self.op = op
        self.detail = detail
        self.errno = errno
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type[DeviceError], tuple[str, str, str, int | None]]:
        return type(self), (self.device, self.op, self.detail, self.errno)


def restated(error: DeviceError, device: str, op: str, detail: str) -> DeviceError:
    """An error of the same kind and errno in other words; of a class of somebody's own, the kind here that it is."""
    kind: type[DeviceError] = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind(device, op, detail, error.errno)


class NotPresent(DeviceError, FileNotFoundError):
    """The device, node or file is not there."""

    kind = "not_present"


class NoPermission(DeviceError, PermissionError):
    """The operating system refused access."""

    kind = "no_permission"


class OutOfMemory(DeviceError, MemoryError):
    """The memory cannot hold what was asked for."""

    kind = "out_of_memory"


class Misaligned(DeviceError, ValueError):
    """An offset, a size or an address is off the device's grid."""

    kind = "misaligned"


class OutOfRange(DeviceError, ValueError):
    """A span lies outside its region, the region is freed, or a queue does not exist."""

    kind = "out_of_range"


class Busy(DeviceError, BlockingIOError):
    """The queue is full; wait for a completion and try again."""

    kind = "busy"


class Timeout(DeviceError, TimeoutError):
    """A deadline passed before the work was done."""

    kind = "timeout"


class Cancelled(DeviceError):
    """A command named in `after` failed, so this one never ran; the failure at the head of the chain is the cause."""

    kind = "cancelled"


class MediaError(DeviceError, OSError):
    """The medium could not be read or written."""

    kind = "media"


class ProtocolError(DeviceError, RuntimeError):
    """The device or its transport answered against its own rules."""

    kind = "protocol"


class Unsupported(DeviceError, NotImplementedError):
    """The device cannot do this, and its info says so."""

    kind = "unsupported"


class Gone(DeviceError, ConnectionError):
    """The device is closed, unplugged or dead."""

    kind = "gone"


class ConfigurationError(ValueError):
    """A platform, profile or option is wrong; the message names the file, the key and what is allowed."""


def nearest(name: str, known: list[str]) -> str:
    """A phrase for an unknown name: the close names if there are any, otherwise all of them."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + (", ".join(sorted(known)) or "none")
