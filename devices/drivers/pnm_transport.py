"""The transport of the pnm driver: a window of bytes that host and device share, and a doorbell.

The driver reaches its device through a `Window` and nothing else. Production maps a file, a character device or a
devdax; a test hands in the bus face of a firmware model. What must hold for every implementation:

- What `write` wrote has left the host's caches when a later `ring` returns, or the device looks into them: it may read
  those bytes from then on. A mapped window writes lines back and drops them before it reads (cache_lines.py), unless
  the device is coherent, as a process behind a file is. Lines that did not get there have another checksum.
- `read` gives what the device last wrote, not what the host's caches remember.
- `ring` is one aligned store of 8 bytes, after every write before it.
- A device that has left the bus reads as bytes of 0xFF; calls may also raise OSError.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import ExitStack, suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Read, Write
from tierloop.devices.drivers import cache_lines
from tierloop.devices.drivers.pnm_options import Caches
from tierloop.devices.drivers.pnm_wire import LAYOUT_NBYTES
from tierloop.devices.errors import Busy, ConfigurationError, DeviceError, Misaligned, NotPresent, Unsupported
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.system import System, from_os

PAGE = mmap.PAGESIZE
LEAST_NBYTES = 4 * PAGE
"""A window has room for its layout, two rings and an arena."""


class Window(Protocol):
    """Bytes shared with a device; see the top of the file."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    @property
    def model(self) -> str:
        """Which model of a device is behind it; "" where it is a device."""

    def read(self, spans: Spans, into: NDArray[np.uint8]) -> None:
        """Copy spans of the window, end to end, into a buffer of their size."""

    def write(self, spans: Spans, data: NDArray[np.uint8]) -> None:
        """Copy a buffer into spans of the window, end to end."""

    def ring(self, offset: int, value: int) -> None:
        """Store a number of 64 bits at an offset, after everything that was written before."""

    def close(self) -> None:
        """Let go of the window; nothing may be called afterwards."""


class WindowBytes:
    """Copies between spans of one array and buffers: what every window of mapped memory does."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        from tierloop.devices.kernels.copying import copy_bytes  # compiles on import, so not before it is needed

        self._region = Region("window", "window", 0, array.nbytes, view=array)
        self._copy = copy_bytes
        self._array = array

    def read(self, spans: Spans, into: NDArray[np.uint8]) -> None:
        """See `Window.read`. Raises ValueError for spans outside."""
        self._copy(Read(Segment(self._region, spans), into), lambda _: self._array)

    def write(self, spans: Spans, data: NDArray[np.uint8]) -> None:
        """See `Window.write`. Raises ValueError for spans outside."""
        self._copy(Write(Segment(self._region, spans), data), lambda _: self._array)


class MappedWindow:
    """A window that is mapped from a path; made by `open_window`."""

    def __init__(self, system: System, fd: int, mapping: mmap.mmap, nbytes: int, flushes: bool = False) -> None:
        self._flushes = flushes
        self._system, self._fd, self._mapping = system, fd, mapping
        self._array: NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        self._words: NDArray[np.uint64] | None = self._array[: nbytes // 8 * 8].view("<u8")
        self._bytes: WindowBytes | None = WindowBytes(self._array)
        self._nbytes = nbytes
        self.model = system.model

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, spans: Spans, into: NDArray[np.uint8]) -> None:
        there = self._there
        if self._flushes and self._array is not None:
            cache_lines.drop(self._array, spans)
        there.read(spans, into)

    def write(self, spans: Spans, data: NDArray[np.uint8]) -> None:
        self._there.write(spans, data)
        if self._flushes and self._array is not None:
            cache_lines.write_back(self._array, spans)

    def ring(self, offset: int, value: int) -> None:
        words = self._words
        if words is None:
            raise OSError(errno.EBADF, "the window is closed")
        words[offset // 8] = value
        if self._flushes and self._array is not None:
            cache_lines.write_back(self._array, Spans([(offset, 8)]))

    def close(self) -> None:
        self._array = self._words = self._bytes = None
        with suppress(BufferError):  # somebody still looks at it: it goes when they stop
            self._mapping.close()
        self._system.close(self._fd)

    @property
    def _there(self) -> WindowBytes:
        if self._bytes is None:
            raise OSError(errno.EBADF, "the window is closed")
        return self._bytes


def open_window(device: str, path: str, nbytes: int | None, system: System, caches: Caches = "auto") -> MappedWindow:
    """Map a window for one owner; `nbytes` may be left out for a file, whose other side is coherent with this one.

    Raises NotPresent, NoPermission, Busy (another owner), Unsupported (a directory, a block device), ConfigurationError
    or Misaligned (a size that is missing, too small, or no whole number of pages), and what mapping it raises.
    """
    with ExitStack() as undo:
        try:
            kind = system.stat(path).kind
            if kind not in ("file", "character device"):
                raise Unsupported(
                    device, "open", f"{path} is a {kind}; a window is a file or a character device (devdax)"
                )
            fd = system.open(path, os.O_RDWR)
            undo.callback(_quietly_close, system, fd)
            _lock(device, path, system, fd)
            size = _size(device, path, kind, nbytes, system, fd)
            mapping = system.mmap(fd, size)
        except OSError as error:
            if isinstance(error, DeviceError):
                raise
            if error.errno in (errno.ENXIO, errno.ENODEV):
                raise NotPresent(device, "open", f"{path}: no device stands behind it", error.errno) from error
            raise from_os(device, "open", error, path) from error
        flushes = caches == "flush" or (caches == "auto" and kind != "file")
        if flushes and not cache_lines.known():
            advice = "map the window uncached, or say caches = 'coherent' if the device looks into the host's caches"
            raise Unsupported(device, "open", f"{path}: this processor's caches cannot be flushed here; {advice}")
        undo.pop_all()
        return MappedWindow(system, fd, mapping, size, flushes)


def _lock(device: str, path: str, system: System, fd: int) -> None:
    try:
        system.lock(fd)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            detail = f"{path} belongs to another owner, in this process or another; a window has one"
            raise Busy(device, "open", detail, error.errno) from error
        raise


def _size(device: str, path: str, kind: str, wanted: int | None, system: System, fd: int) -> int:
    if kind == "file":
        there = system.size(fd)
        size = there if wanted is None else wanted
        if size > there:
            raise ConfigurationError(f"{device}: window_nbytes = {size}: {path} holds {there} bytes")
    elif wanted is None:
        raise ConfigurationError(f"{device}: option 'window_nbytes' is missing: {path} does not say how large it is")
    else:
        size = wanted
    if size < max(LEAST_NBYTES, LAYOUT_NBYTES):
        raise ConfigurationError(f"{device}: {path}: a window of {size} bytes; allowed: at least {LEAST_NBYTES}")
    if size % PAGE:
        raise Misaligned(device, "open", f"{path}: a window of {size} bytes; allowed: whole pages of {PAGE}")
    return size


def _quietly_close(system: System, fd: int) -> None:
    """Undo an opening that failed for another reason, which is the one to report."""
    with suppress(OSError):
        system.close(fd)
