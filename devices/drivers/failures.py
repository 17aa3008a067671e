"""Failures: what went wrong while a command ran, as the error that its completion ends with."""

from __future__ import annotations

import errno
import threading

from tierloop.devices.errors import DeviceError, OutOfMemory, OutOfRange, ProtocolError
from tierloop.devices.system import from_os
from tierloop.devices.threads import NoThread, begin


def as_device_error(device: str, op: str, error: BaseException) -> DeviceError:
    """The device error for an exception, which becomes its cause.

    What kernels find wrong in a launch is a ValueError, so OutOfRange; a MemoryError is OutOfMemory, an OSError has a
    kind of its own. Anything else, and whatever the function of a `dense` launch raises, is a ProtocolError.
    """
    if isinstance(error, DeviceError):
        return error
    if isinstance(error, OSError) and op != "dense":
        return from_os(device, op, error, str(error))
    kind: type[DeviceError] = ProtocolError
    if isinstance(error, MemoryError):
        kind = OutOfMemory
    elif isinstance(error, (ValueError, IndexError)) and op != "dense":
        kind = OutOfRange
    result = kind(device, op, f"it failed while it ran: {type(error).__name__}: {error}")
    result.__cause__ = error
    return result


def threadless(device: str, op: str, error: NoThread) -> DeviceError:
    """The error for work that needs a thread where none may be started."""
    return OutOfMemory(device, op, str(error), errno.EAGAIN)


def start_thread(device: str, op: str, thread: threading.Thread) -> None:
    """Start a thread. Raises OutOfMemory where the process may have no more of them, or no memory for a stack."""
    try:
        begin(thread)
    except NoThread as error:
        raise threadless(device, op, error) from error
