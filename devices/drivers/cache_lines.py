"""Cache lines: writing them back past the processor's caches, and dropping them so that the next load asks the memory.

Needed where the other side of a memory does not look into these caches: durability of stores to mapped memory
(cxl_flush.py), and windows that are shared with a device which is coherent for nobody (pnm_transport.py). clwb writes a
line back and may keep it; clflushopt and clflush also drop it. sfence waits for what was written back.

On x86-64; elsewhere no instruction is known here that a process may use.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, TABLE, address_of, inline
from tierloop.devices.spans import Spans

LINE = 64
_WRITING_BACK = ("clwb", "clflushopt", "clflush")
_DROPPING = ("clflushopt", "clflush")


def instruction(dropping: bool = False) -> str | None:
    """The instruction that writes a cache line back on this processor, or that drops it; None where none is known."""
    if platform.machine() != "x86_64":
        return None
    features = llvm.get_host_cpu_features()
    names = _DROPPING if dropping else _WRITING_BACK
    return next((name for name in names if features.get(name) or name == "clflush"), None)


def known() -> bool:
    """Whether `write_back` and `drop` work here; afterwards they are compiled."""
    names = {instruction(), instruction(dropping=True)}
    for name in names - {None}:
        loop(name)
    return None not in names


def write_back(array: NDArray[np.uint8], spans: Spans) -> None:
    """Write the lines of spans of an array back to memory and wait for it; `known` was asked. Raises ValueError."""
    _run(instruction(), array, spans)


def drop(array: NDArray[np.uint8], spans: Spans) -> None:
    """Write the lines back and forget them: what is loaded next comes from the memory. Raises ValueError."""
    _run(instruction(dropping=True), array, spans)


def _run(name: str | None, array: NDArray[np.uint8], spans: Spans) -> None:
    assert name is not None, "whoever maps memory has asked whether lines can be written back"
    if spans.end > array.nbytes:
        raise ValueError(f"{spans!r} is outside an array of {array.nbytes} bytes")
    loop(name)(address_of(array), np.ascontiguousarray(spans.array))


def _emitted(text: str) -> Any:
    """A function (address) that is one instruction."""

    def emit(builder: Any, address: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(ir.InlineAsm(kind, text, "r,~{memory}", side_effect=True), [address])

    return inline(types.void, INT64)(emit)


@cache
def loop(name: str) -> Callable[[int, NDArray[np.int64]], None]:
    """The compiled loop over the lines of spans, by the instruction that it uses."""
    llvm.initialize_native_asmparser()
    line, fence = _emitted(f"{name} ($0)"), _emitted("mfence" if name != "clwb" else "sfence")

    @numba.njit(types.void(INT64, TABLE), nogil=True, error_model="numpy")
    def write_lines_back(base: int, spans: NDArray[np.int64]) -> None:
        for row in range(spans.shape[0]):
            at = (base + spans[row, 0]) // LINE * LINE
            end = base + spans[row, 0] + spans[row, 1]
            while at < end:
                line(at)
                at += LINE
        fence(0)

    compiled: Callable[[int, NDArray[np.int64]], None] = write_lines_back
    return compiled
