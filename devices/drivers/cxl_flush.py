"""Making stores durable: whoever carries out a `Flush` of a memory that keeps its bytes asks here how.

A memory without executors cannot flush; the cores that stored to it do. Its driver says how (`Flushes.offer`), the
device whose queue holds the command does it (`Flushes.carry_out`), and for all other memories nothing is to be done:
host cores see each other's stores.

For memory that is mapped from a devdax there is nothing that the kernel could write back (msync is refused). Stores are
durable once their cache lines have been written back past the caches and that has been waited for: clwb where the
processor has it, else clflushopt, else clflush, and then sfence. Lines are found in whichever cache holds them. That
bytes which have left the processor survive is the platform's promise (ADR, and Global Persistent Flush on CXL).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Flush
from tierloop.devices.errors import Gone
from tierloop.devices.kernels.compiled import INT64, TABLE, address_of, inline
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site

LINE = 64
_INSTRUCTIONS = ("clwb", "clflushopt", "clflush")


class Flushes:
    """How to flush each memory that keeps its bytes; one per platform."""

    def __init__(self) -> None:
        self._ways: dict[str, Callable[[Segment], None]] = {}

    @classmethod
    def of(cls, site: Site) -> Flushes:
        """Those of a site; made at first use."""
        made: Flushes = site.shared.setdefault("flushes", cls())
        return made

    def offer(self, memory: str, way: Callable[[Segment], None] | None) -> None:
        """From now on, segments of this memory are flushed so, by any thread; None where it keeps nothing."""
        if way is None:
            self._ways.pop(memory, None)
        else:
            self._ways[memory] = way

    def withdraw(self, memory: str) -> None:
        """The memory is closed: a flush that comes later is an error, and not one that did nothing."""
        if memory in self._ways:
            self._ways[memory] = partial(_too_late, memory)

    def carry_out(self, command: Flush) -> None:
        """Returns when the bytes are durable, if their memory keeps any. Raises what its way does."""
        way = self._ways.get(command.target.region.memory)
        if way is not None:
            way(command.target)


def _too_late(memory: str, _: Segment) -> None:
    raise Gone(memory, "flush", "the memory was closed before its bytes were made durable")


def instruction() -> str | None:
    """The instruction that writes a cache line back on this processor; None where none is known here."""
    if platform.machine() != "x86_64":
        return None
    features = llvm.get_host_cpu_features()
    return next((name for name in _INSTRUCTIONS if features.get(name) or name == "clflush"), None)


def can_write_back() -> bool:
    """Whether `write_back` works here; afterwards it is compiled."""
    name = instruction()
    if name is not None:
        _loop(name)
    return name is not None


def write_back(segment: Segment) -> None:
    """Write the cache lines of a segment back to memory and wait for it; the region has a view, the spans fit."""
    name = instruction()
    assert name is not None, "a memory without a way to flush is not offered as persistent"
    view = segment.region.view
    assert view is not None, "submit has seen a view, and a region in use is not freed"
    _loop(name)(address_of(view), np.ascontiguousarray(segment.spans.array))


def _emitted(text: str) -> Any:
    """A function (address) that is one instruction."""

    def emit(builder: Any, address: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(ir.InlineAsm(kind, text, "r,~{memory}", side_effect=True), [address])

    return inline(types.void, INT64)(emit)


@cache
def _loop(name: str) -> Callable[[int, NDArray[np.int64]], None]:
    llvm.initialize_native_asmparser()
    line, fence = _emitted(f"{name} ($0)"), _emitted("sfence")

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
