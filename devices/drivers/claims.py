"""Paths that one driver claims: opened, locked for one owner, and what it means that they cannot be.

A device has one owner, in this process or another; who comes second is told so at once.
"""

from __future__ import annotations

import errno

from tierloop.devices.errors import Busy, DeviceError, NotPresent, Unsupported
from tierloop.devices.system import System, from_os


def lock_alone(device: str, path: str, system: System, fd: int, owned: str = "a medium") -> None:
    """Lock an open file for this descriptor. Raises Busy where somebody has it, Unsupported where nobody can lock it.

    `owned` is what has one owner, for the message.
    """
    try:
        system.lock(fd)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            detail = f"{path} belongs to another owner, in this process or another; {owned} has one"
            raise Busy(device, "open", detail, error.errno) from error
        raise Unsupported(device, "open", f"{path} cannot be locked for one owner: {error}", error.errno) from error


def unopened(device: str, path: str, error: OSError) -> DeviceError:
    """The error for a path that cannot be opened: a node without a device behind it is not there."""
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return NotPresent(device, "open", f"{path}: no device stands behind it", error.errno)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return NotPresent(device, "open", f"{path[:200]}: {error.strerror}: nothing can stand there", error.errno)
    return from_os(device, "open", error, path)
