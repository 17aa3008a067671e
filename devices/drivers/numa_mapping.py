"""Anonymous memory that a driver may place: mapped through the `System`, so that a model sees it come and go.

An array of mapped memory is zeroed and private (the kernel gives shared mappings no huge pages). The mapping ends with
the last array that shows it, so that a view which outlives its region stays harmless.

Huge pages are either transparent (the kernel makes them of small ones where it can, `advise`) or taken from a pool that
root has filled (`page` of 2 MiB or 1 GiB); `free_pages` says how many are left there, per node.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Iterable
from contextlib import suppress

import cffi
import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.kernel_numbers import number_of
from tierloop.devices.drivers.numa import PAGE, SYS_MADVISE
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.system import System, from_os

_NUMBERS = {"x86_64": (9, 11, 203), "aarch64": (222, 215, 122), "riscv64": (222, 215, 122)}
SYS_MMAP, SYS_MUNMAP, SYS_SCHED_SETAFFINITY = _NUMBERS.get(platform.machine(), (-1, -1, -1))
"""Numbers of raw system calls; -1 where unknown here."""

_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15

_MOST_CORES = 1 << 13

_ffi = cffi.FFI()


def mapped(system: System, device: str, nbytes: int, page: int = PAGE) -> NDArray[np.uint8]:
    """Zeroed private memory, uint8 (nbytes,); `nbytes` is a multiple of `page`. Raises OutOfMemory, DeviceError."""
    assert nbytes > 0
    assert nbytes % page == 0
    flags = _MAP_PRIVATE_ANONYMOUS
    if page != PAGE:
        flags |= _MAP_HUGETLB | (page.bit_length() - 1) << _MAP_HUGE_SHIFT
    try:
        address = system.syscall(SYS_MMAP, 0, nbytes, _PROT_READ_WRITE, flags, -1, 0)
    except OSError as error:
        if page != PAGE and error.errno in (errno.ENOMEM, errno.EINVAL):
            raise OutOfMemory(device, "alloc", f"{nbytes} bytes: {pool_advice(page, nbytes)}", error.errno) from error
        raise from_os(device, "alloc", error, f"{nbytes} bytes") from error

    def unmap(_: object) -> None:
        with suppress(OSError):
            system.syscall(SYS_MUNMAP, address, nbytes)

    pointer = _ffi.gc(_ffi.cast("char *", address), unmap)
    return np.frombuffer(_ffi.buffer(pointer, nbytes), dtype=np.uint8)


def advise(system: System, array: NDArray[np.uint8], huge: bool) -> None:
    """Ask for transparent huge pages in whole mapped memory, or for none; a kernel without them does neither."""
    with suppress(OSError):
        advice = MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE
        system.syscall(SYS_MADVISE, array.ctypes.data, array.nbytes, advice)


def free_pages(system: System, page: int, nodes: Iterable[int] | None = None) -> int:
    """Huge pages of the pool that are free, on these nodes or on the whole machine; 0 where there is no such pool."""
    kind = f"hugepages-{page // 1024}kB/free_hugepages"
    folders = ["/sys/kernel/mm/hugepages"]
    if nodes is not None:
        folders = [f"/sys/devices/system/node/node{node}/hugepages" for node in nodes]
    found = 0
    for folder in folders:
        with suppress(OSError, UnicodeDecodeError):
            found += number_of(system.read_text(f"{folder}/{kind}")) or 0
    return found


def has_pool(system: System, page: int) -> bool:
    """Whether the kernel has a pool of huge pages of this size at all."""
    with suppress(OSError):
        return f"hugepages-{page // 1024}kB" in system.listdir("/sys/kernel/mm/hugepages")
    return False


def pool_advice(page: int, nbytes: int, nodes: Iterable[int] = ()) -> str:
    """What to do about a pool of huge pages that is too small."""
    need, kind = -(-nbytes // page), f"hugepages-{page // 1024}kB/nr_hugepages"
    where = [f"/sys/devices/system/node/node{node}/hugepages/{kind}" for node in nodes]
    files = " and ".join(where or [f"/sys/kernel/mm/hugepages/{kind}"])
    return f"too few huge pages of {page >> 20} MiB are free; {need} more are needed: root raises {files}"


def run_on(system: System, cores: Iterable[int]) -> None:
    """Let the kernel run this thread on these cores only; none leaves it alone. Raises OSError."""
    wanted = sorted(cores)
    if not wanted:
        return
    if wanted[-1] >= _MOST_CORES:
        raise OSError(errno.EINVAL, f"no machine has a core {wanted[-1]}")
    bits = 8 * int(_ffi.sizeof("unsigned long"))
    words = [0] * (wanted[-1] // bits + 1)
    for core in wanted:
        words[core // bits] |= 1 << core % bits
    mask = _ffi.new("unsigned long[]", words)
    system.syscall(SYS_SCHED_SETAFFINITY, 0, int(_ffi.sizeof(mask)), int(_ffi.cast("uintptr_t", mask)))
