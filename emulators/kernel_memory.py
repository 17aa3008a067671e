"""The memory that a modelled device reaches: that of this process, and of it only what was mapped for the device.

Addresses that the device sees are those of the process, as with an IOMMU that maps one to one. `mapped` says for what
time which bytes may be read or written, to the byte; everything else is refused with EFAULT. Bytes move by system calls
that check the address, so that an address that leads nowhere is an error and no crash.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

from tierloop.devices.system import address_of
from tierloop.emulators.kernel import failure

PAGE = 4096
_LARGEST_VECTOR = 1024


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


class ProcessMemory:
    """Memory of this process by address. Every method raises OSError: EFAULT."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._read = _call(libc.process_vm_readv)
        self._write = _call(libc.process_vm_writev)
        self._pid = os.getpid()

    def read(self, address: int, nbytes: int) -> bytes:
        """Exactly nbytes bytes from an address."""
        made = bytearray(nbytes)
        if nbytes:
            self._move(self._read, address, address_of(made), nbytes)
        return bytes(made)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at an address."""
        if data:
            held = bytearray(data)
            self._move(self._write, address, address_of(held), len(held))

    def check(self, address: int, nbytes: int) -> None:
        """Whether all of it can be read: looks at a byte of each page."""
        if nbytes <= 0:
            return
        _plausible(address, nbytes)
        places = [address, *range(address // PAGE * PAGE + PAGE, address + nbytes, PAGE)]
        for first in range(0, len(places), _LARGEST_VECTOR):
            part = places[first : first + _LARGEST_VECTOR]
            into = bytearray(len(part))
            local = (_Vector * 1)(_Vector(address_of(into), len(into)))
            remote = (_Vector * len(part))(*(_Vector(place, 1) for place in part))
            _whole(self._read(self._pid, local, 1, remote, len(part), 0), len(part))

    def _move(self, call: Callable[..., int], address: int, own: int, nbytes: int) -> None:
        _plausible(address, nbytes)
        local, remote = (_Vector * 1)(_Vector(own, nbytes)), (_Vector * 1)(_Vector(address, nbytes))
        _whole(call(self._pid, local, 1, remote, 1, 0), nbytes)


class DeviceMemory:
    """What a device reaches of the process's memory: what is mapped for it at the time."""

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory
        self._pages: dict[int, list[tuple[int, int, bool]]] = {}

    def map(self, address: int, nbytes: int, writable: bool) -> None:
        """Let the device read these bytes, and write them if they are writable."""
        piece = (address, address + nbytes, writable)
        for page in range(address // PAGE, -(-(address + nbytes) // PAGE)):
            self._pages.setdefault(page, []).append(piece)

    def unmap(self, address: int, nbytes: int, writable: bool) -> None:
        """Take back what `map` gave with the same arguments."""
        piece = (address, address + nbytes, writable)
        for page in range(address // PAGE, -(-(address + nbytes) // PAGE)):
            self._pages[page].remove(piece)
            if not self._pages[page]:
                del self._pages[page]

    def read(self, address: int, nbytes: int) -> bytes:
        """The device reads."""
        self._reach(address, nbytes, write=False)
        return self._memory.read(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """The device writes."""
        self._reach(address, len(data), write=True)
        self._memory.write(address, data)

    def _reach(self, address: int, nbytes: int, write: bool) -> None:
        at, end = address, address + nbytes
        while at < end:
            ends = [last for first, last, writable in self._pages.get(at // PAGE, ()) if first <= at < last
                    and (writable or not write)]  # fmt: skip
            if not ends:
                raise failure(errno.EFAULT)
            at = max(ends)


def _call(function: ctypes._NamedFuncPointer) -> Callable[..., int]:
    function.restype = ctypes.c_ssize_t
    vector = ctypes.POINTER(_Vector)
    function.argtypes = [ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong]
    return function


def _whole(moved: int, nbytes: int) -> None:
    """Less than all is EFAULT; a system that forbids these calls says so with its own errno."""
    if moved != nbytes:
        raise failure(ctypes.get_errno() if moved < 0 else errno.EFAULT)


def _plausible(address: int, nbytes: int) -> None:
    if address <= 0 or address + nbytes > 1 << 63:
        raise failure(errno.EFAULT)
