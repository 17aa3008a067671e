"""What answers SIGBUS for guard.py: machine code that runs inside the signal, in whichever thread has faulted.

It calls mmap, sigaction, sigpending and raise of the C library and nothing else; it takes no lock, allocates nothing
and needs no interpreter. errno is left as it was. The address is that of siginfo on 64-bit Linux. A grain is marked
before it is replaced, so that nobody sees zeros without a mark. A grain that is replaced divides a mapping, unless one
beside it was replaced, and a process may have 65,530 mappings: after MOST_PIECES of them, and where somebody else has
used them up, all of the next grain's range is replaced, which divides nothing.

A signal that is not ours is passed on to its previous owner. faulthandler reports, gives the signal back to whoever had
it before, and raises it again. That may be this code, which holds the signal back while it runs: if the signal waits
once the owner has returned, the process ends. An owner that only takes note (Python's) gets it as often as it comes.
"""

from __future__ import annotations

import mmap
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.drivers.guard import DEFAULT, FAULTED, MOST_PIECES, PENDING, PREVIOUS, SIG_DFL, SIG_IGN, WITH_INFO
from tierloop.devices.kernels.compiled import INT64, inline, load, load_int, pointer, store_int

_BUS_ADRERR, _BUS_MCEERR_AR, _BUS_MCEERR_AO = 2, 4, 5
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED | MAP_NORESERVE
_FLAGS_BEYOND_LIMITS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x10 | 0x4000
"""Shared memory does not count against RLIMIT_DATA."""
_int: Any = types.int32
_long: Any = types.int64
_libc_errno: Any = types.ExternalFunction("__errno_location", _long())
_libc_mmap: Any = types.ExternalFunction("mmap", _long(_long, _long, _int, _int, _int, _long))
_libc_sigaction: Any = types.ExternalFunction("sigaction", _int(_int, _long, _long))
_libc_raise: Any = types.ExternalFunction("raise", _int(_int))
_libc_sigpending: Any = types.ExternalFunction("sigpending", _int(_long))


@inline(types.int32, INT64)
def _load_word(builder: Any, address: Any) -> Any:
    """The int32 at an address."""
    return load(builder, address, ir.IntType(32))


@inline(types.int8, INT64)
def _marked(builder: Any, address: Any) -> Any:
    """The byte at an address."""
    return load(builder, address, ir.IntType(8))


@inline(types.void, INT64, types.int32)
def _store_word(builder: Any, address: Any, value: Any) -> None:
    """Put an int32 at an address."""
    builder.store(value, pointer(builder, address, value.type))


@inline(types.void, INT64)
def _mark(builder: Any, address: Any) -> None:
    """Put a byte of 1 at an address."""
    builder.store(ir.Constant(ir.IntType(8), 1), pointer(builder, address, ir.IntType(8)))


def _pass_on(kinds: list[Any]) -> Any:
    """A function (address, *arguments) that calls a signal's handler in C."""

    def emit(builder: Any, address: Any, number: Any, info: Any, where: Any) -> None:
        values = [number, info, where][: len(kinds)]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)

    return inline(types.void, INT64, types.int32, INT64, INT64)(emit)


_call_with_info = _pass_on([types.int32, INT64, INT64])
_call_plain = _pass_on([types.int32])


def compiled(the_table: NDArray[np.int64], the_state: NDArray[np.int64]) -> Any:
    """The answer for this table and this state; not kept on disk, because the addresses of this process are in it."""
    table, state, rows = the_table.ctypes.data, the_state.ctypes.data, len(the_table)
    row_nbytes, most_pieces = the_table.strides[0], MOST_PIECES
    sent = 0  # si_code is not above it where a process sent the signal

    @numba.njit(error_model="numpy")
    def pieces() -> int:
        found = 0
        for row in range(rows):
            if load_int(table + row * row_nbytes) != 0:
                found += load_int(table + row * row_nbytes + 32)
        return found

    @numba.njit(error_model="numpy")
    def beside_another(marks: int, grain: int, num: int) -> bool:
        before = grain > 0 and _marked(marks + grain - 1) != 0
        return before or (grain + 1 < num and _marked(marks + grain + 1) != 0)

    @numba.njit(error_model="numpy")
    def replaced(low: int, nbytes: int) -> bool:
        if _libc_mmap(low, nbytes, _PROTECTION, _FLAGS, -1, 0) == low:
            return True
        return bool(_libc_mmap(low, nbytes, _PROTECTION, _FLAGS_BEYOND_LIMITS, -1, 0) == low)

    @numba.njit(error_model="numpy")
    def ours(address: int) -> bool:
        for row in range(rows):
            at = table + row * row_nbytes
            start = load_int(at)
            if start != 0 and start <= address and address < load_int(at + 8):
                shift = load_int(at + 16)
                grain = (address - start) >> shift
                _mark(load_int(at + 24) + grain)
                store_int(state + 8 * FAULTED, 1)
                low, nbytes = start + (grain << shift), 1 << shift
                if not beside_another(load_int(at + 24), grain, (load_int(at + 8) - start) >> shift):
                    store_int(at + 32, load_int(at + 32) + 1)
                if pieces() <= most_pieces and replaced(low, nbytes):
                    return True
                low, nbytes = start, load_int(at + 8) - start
                for each in range(nbytes >> shift):
                    _mark(load_int(at + 24) + each)
                store_int(at + 32, 1)
                return replaced(low, nbytes)
        return False

    @numba.njit(error_model="numpy")
    def waits(number: int) -> bool:
        return bool(load_int(load_int(state + 8 * PENDING)) >> (number - 1) & 1)

    @numba.njit(error_model="numpy")
    def foreign(number: int, code: int, info: int, where: int) -> None:
        previous = load_int(state + 8 * PREVIOUS)
        if previous == SIG_IGN and code <= sent:
            return
        if previous in (SIG_DFL, SIG_IGN):
            _libc_sigaction(number, load_int(state + 8 * DEFAULT), 0)
            if code <= sent:
                _libc_raise(number)
            return
        if load_int(state + 8 * WITH_INFO) != 0:
            _call_with_info(previous, number, info, where)
        else:
            _call_plain(previous, number, info, where)
        if _libc_sigpending(load_int(state + 8 * PENDING)) == 0 and waits(number):
            # It was raised again, and would come here for ever: the process ends as soon as this returns.
            _libc_sigaction(number, load_int(state + 8 * DEFAULT), 0)

    @numba.cfunc(types.void(types.int32, INT64, INT64), error_model="numpy")
    def answer(number: int, info: int, where: int) -> None:
        place = _libc_errno()
        errno = _load_word(place)
        code = _load_word(info + 8)
        if code not in (_BUS_ADRERR, _BUS_MCEERR_AR, _BUS_MCEERR_AO) or not ours(load_int(info + 16)):
            foreign(number, code, info, where)
        _store_word(place, errno)

    return answer
