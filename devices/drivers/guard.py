"""The guard: a load from a page that is lost ends a command with an error, and not the process.

Memory behind CXL may lose bytes: a poisoned line is a machine check, a file may be cut short while it is mapped. The
kernel's answer to a load or store there is SIGBUS, which by default ends the process. `guarded` makes the array that
shows a mapping, and as long as that array or a view of it lives, a SIGBUS inside it is answered by this module: the
grain that was touched is marked as lost and becomes a piece of zeroed memory of the process, so the kernel or memcpy
that touched it runs on. What it computed is worth nothing, and `check` says so. What must hold:

- Every worker calls `check` when it has carried a command out. It raises MediaError for a command that names a lost
  byte, also long after the loss. Where nothing was ever lost, it costs one look at one number.
- A grain is marked before it is replaced, so nobody sees zeros without a mark. Several threads may fault at once.
- Lost grains in more than MOST_PIECES places would use up the mappings that a process may have: from then on, and where
  a process has none left anyway, the whole mapping in which one more is touched counts as lost.
- A lost grain stays lost until its mapping is gone: drivers never allocate it again (`lost` says where they are).
- `grain` is what the kernel can replace: a page, or the alignment of a devdax, whose mappings cannot be cut finer.
- A SIGBUS that is not ours goes to whoever had the signal before: faulthandler, or the default that ends the process.
  It is installed once, over what was there; who takes the signal away later finds it taken back at the next `guarded`.
- The answer is machine code (guard_signal.py) that needs no interpreter, no lock and no allocation.
- Threads that touch guarded memory let the signal in: where it is blocked, Linux ends the process whoever answers. The
  thread that calls `guarded` does so there, every worker of a driver as it begins, and whoever zeroes (threads.py).

A system call that is handed a lost page (read, write, io_uring) gets EFAULT or EIO from the kernel, and no signal.
Linux with 64 bits only: where siginfo keeps its address.
"""

from __future__ import annotations

import mmap
import signal
import sys
import threading
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Read, Write, segments, verb
from tierloop.devices.errors import ConfigurationError, MediaError, Misaligned, OutOfMemory, Unsupported
from tierloop.devices.threads import let_in

PAGE = mmap.PAGESIZE
RANGES = 1024
"""Guarded mappings at once."""

MOST_PIECES = 1 << 14
"""Each divides a mapping twice, and Linux lets a process have 65,530 (vm.max_map_count)."""

START, END, SHIFT, MARKS, PIECES = range(5)
"""A row of the table: the first address, the one after the last, log2 of the grain, the address of a byte per grain, in
how many places grains were lost."""
FAULTED, PREVIOUS, WITH_INFO, PENDING, DEFAULT = range(5)
"""Cells of the state: something was lost; the signal's previous owner and whether he takes three arguments; where the
signals that wait are written; the address of the action that ends the process."""
SIG_DFL, SIG_IGN = 0, 1

_table = np.zeros((RANGES, 5), dtype=np.int64)
_state = np.zeros(5, dtype=np.int64)
_marks: dict[int, NDArray[np.uint8]] = {}
"""Per row of the table in use: which grains are lost."""
_lock = threading.RLock()
"""Guards the table; an array may die, and so take its row away, while a thread holds it."""

_ffi = FFI()
_ffi.cdef(
    """
    struct sigaction { uintptr_t handler; uint64_t mask[16]; int flags; uintptr_t restorer; };
    int sigaction(int number, const struct sigaction *action, struct sigaction *before);
    """
)
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000
_kept: list[Any] = []
"""The machine code and the libc that it is installed through; they stay for as long as the process lives."""


def guarded(device: str, memory: NDArray[np.uint8], grain: int = PAGE) -> NDArray[np.uint8]:
    """The same bytes as an array whose lost grains are answered for; see the top of the file.

    `memory` is all of one writable mapping, which lives as long as what is returned and its views. Raises
    ConfigurationError for a grain that is no power of two from a page on, Misaligned for memory that is not whole
    grains, OutOfMemory where RANGES mappings are guarded already, Unsupported on other systems.
    """
    if grain < PAGE or grain & (grain - 1):
        raise ConfigurationError(f"{device}: a grain of {grain} bytes; allowed: a power of two from {PAGE} on")
    address = memory.ctypes.data
    if address % grain or memory.nbytes % grain or not memory.nbytes:
        what = f"{memory.nbytes} bytes at {address:#x}"
        raise Misaligned(device, "open", f"{what} were mapped; allowed: whole pieces of {grain} bytes")
    _install(device)
    return np.asarray(_Guarded(device, memory, grain))


def lost(array: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which bytes of a contiguous array are lost, as int64 (n, 2) pairs of offset and size; those of a page adjoin."""
    if not _state[FAULTED]:
        return np.empty((0, 2), dtype=np.int64)
    found = _lost_grains(array) - array.ctypes.data
    np.clip(found, 0, array.nbytes, out=found)
    found[:, 1] -= found[:, 0]
    return found


def check(device: str, command: Command) -> None:
    """Raises MediaError if any byte that the command names is lost: in its regions, or in its host buffer."""
    error = loss(device, command)
    if error is not None:
        raise error


def loss(device: str, command: Command) -> MediaError | None:
    """The error that `check` raises."""
    if not _state[FAULTED]:
        return None
    for region, spans in segments(command):
        if region.view is not None and (where := _first_lost(region.view, spans.array)) is not None:
            address = region.view.ctypes.data + where
            return MediaError(device, verb(command), f"{region}: byte {where} is lost: no memory behind {address:#x}")
    buffer = command.into if isinstance(command, Read) else command.data if isinstance(command, Write) else None
    if buffer is not None and len(gone := lost(buffer)):
        return MediaError(device, verb(command), f"byte {gone[0, 0]} of the host buffer is lost")
    return None


class _Guarded:
    """Owns mapped memory and its row of the table; NumPy arrays that show it keep it alive."""

    def __init__(self, device: str, memory: NDArray[np.uint8], grain: int) -> None:
        address, nbytes = memory.ctypes.data, memory.nbytes
        self._row: int | None = None
        self._memory = memory
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        with _lock:
            free = np.flatnonzero(_table[:, START] == 0)
            if not len(free):
                raise OutOfMemory(device, "open", f"{RANGES} mappings are guarded already")
            row = int(free[0])
            marks = np.zeros(nbytes // grain, dtype=np.uint8)
            _marks[row] = marks
            _table[row, END:] = address + nbytes, grain.bit_length() - 1, marks.ctypes.data, 0
            _table[row, START] = address
            self._row = row

    def __del__(self, lock: Any = _lock, table: Any = _table, marks: Any = _marks) -> None:
        if self._row is not None:  # what it needs is bound above: at the end of the process globals go first
            with lock:
                table[self._row, 0] = 0
                del marks[self._row]


def _lost_grains(array: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The lost grains that the array touches, by address: int64 (n, 2), the first one and the one after the last."""
    base, end = array.ctypes.data, array.ctypes.data + array.nbytes
    found = [np.empty(0, dtype=np.int64)]
    sizes = [found[0]]
    with _lock:
        for row, marks in list(_marks.items()):  # an array may die at any moment, and its row with it
            start, stop, shift = _table[row, :MARKS].tolist()
            if start and base < stop and start < end:
                first = max(base - start, 0) >> shift
                last = (min(end, stop) - 1 - start) >> shift
                found.append(start + ((np.flatnonzero(marks[first : last + 1]) + first) << shift))
                sizes.append(np.full(len(found[-1]), 1 << shift, dtype=np.int64))
    low, nbytes = np.concatenate(found), np.concatenate(sizes)
    order = np.argsort(low, kind="stable")
    return np.stack([low[order], low[order] + nbytes[order]], axis=1)


def _first_lost(view: NDArray[np.uint8], spans: NDArray[np.int64]) -> int | None:
    """The lowest lost offset of a view that lies in one of the spans."""
    gone = lost(view)
    if not len(gone):
        return None
    low, high = gone[:, 0], gone.sum(axis=1)
    offsets, ends = spans[:, 0], spans.sum(axis=1)
    which = np.searchsorted(high, offsets, side="right")  # the first lost piece that ends behind the span's beginning
    first = np.maximum(np.append(low, view.nbytes)[which], offsets)
    hit = (first < ends) & (ends > offsets)
    return int(first[hit].min()) if hit.any() else None


def _install(device: str) -> None:
    """Take SIGBUS, unless it is ours already."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise Unsupported(device, "open", "lost pages can be guarded on 64-bit Linux only")
    let_in()
    with _lock:
        _prepare()
        libc, code = _kept[0], _kept[1]
        before = _ffi.new("struct sigaction *")
        libc.sigaction(signal.SIGBUS, _ffi.NULL, before)
        if before.handler == code.address:
            return
        _state[PREVIOUS] = before.handler
        _state[WITH_INFO] = before.flags & _SA_SIGINFO
        mine = _ffi.new("struct sigaction *", {"handler": code.address, "flags": _SA_SIGINFO | _SA_ONSTACK})
        if libc.sigaction(signal.SIGBUS, mine, _ffi.NULL) != 0:
            raise Unsupported(device, "open", "the system does not let SIGBUS be answered")


def _prepare() -> None:
    """Compile the answer, which takes a third of a second, if that was not done yet."""
    if not _kept:
        from tierloop.devices.drivers.guard_signal import compiled  # kernels are compiled on import

        ending, waiting = _ffi.new("struct sigaction *"), _ffi.new("uint64_t[16]")
        _state[DEFAULT] = int(_ffi.cast("uintptr_t", ending))
        _state[PENDING] = int(_ffi.cast("uintptr_t", waiting))
        _kept.extend((_ffi.dlopen(None), compiled(_table, _state), ending, waiting))
