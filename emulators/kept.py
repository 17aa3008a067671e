"""The bytes of an emulated persistent memory in a file, from one opening to the next.

The file is sparse, as long as its last region needs, and belongs to one device at a time; the space of a region is
reserved when it is allocated. What a command has written is in the file when it has ended, so it survives the end of
the process, however that comes; against a power cut of the host it is safe after `close` only. The state of a firmware
model (which page lies on which die) is not kept.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import Busy, DeviceError
from tierloop.devices.system import HOST, PUNCH_HOLE, RESERVE, System, from_os

PAGE = mmap.ALLOCATIONGRANULARITY
"""Regions begin on this grid."""


class KeptFile:
    """An open file that holds a memory. Raises NotPresent (the folder), NoPermission, Busy (another owner)."""

    def __init__(self, name: str, path: Path, system: System = HOST) -> None:
        self._name = name
        self._system = system
        try:
            self._fd = system.open(str(path), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise from_os(name, "open", error, str(path)) from error
        try:
            if system.fstat(self._fd).kind != "file":
                raise Busy(name, "open", f"{path} is no file")
            system.lock(self._fd)
            self._size = system.size(self._fd)
        except OSError as error:
            system.close(self._fd)
            raise from_os(name, "open", error, f"{path} keeps the bytes of one device at a time") from error
        except DeviceError:
            system.close(self._fd)
            raise

    def map(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, uint8 (nbytes,); `offset` is a multiple of `PAGE`. Raises OSError."""
        if offset + nbytes > self._size:
            self._system.resize(self._fd, offset + nbytes)
            self._size = offset + nbytes
        return np.frombuffer(self._system.mmap(self._fd, nbytes, offset), dtype=np.uint8)

    def renew(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`map`, with bytes that read as zeros and space that is reserved. Raises OSError."""
        self.clear(offset, nbytes)
        try:
            self._system.fallocate(self._fd, RESERVE, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        self._size = max(self._size, self._system.size(self._fd))
        return self.map(offset, nbytes)

    def clear(self, offset: int, nbytes: int) -> None:
        """Make bytes read as zeros and give their space back; at the end the file gets shorter. Raises OSError."""
        if offset < self._size <= offset + nbytes:
            self._system.resize(self._fd, offset)
            self._size = offset
        elif offset < self._size:
            self._system.fallocate(self._fd, PUNCH_HOLE, offset, nbytes)

    def close(self) -> None:
        """Make everything durable, and let go of the file. Raises MediaError."""
        try:
            self._system.fsync(self._fd)
        except OSError as error:
            raise from_os(self._name, "close", error, "writes may be lost") from error
        finally:
            self._system.close(self._fd)
