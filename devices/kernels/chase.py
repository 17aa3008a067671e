"""chase: dependent reads, to measure the latency of a memory (contract.py)."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, PAIR, TABLE, address_of, kernel, load_int, store_int
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.pace import keep_pace, new_counter


@kernel(PAIR, INT64, INT64, TABLE)
def _follow(counter: int, base: int, spans: NDArray[np.int64]) -> tuple[int, int]:
    """Read as many lines as there are; returns how many, and the number that the last of them holds."""
    line, n = 0, spans.shape[0]
    for i in range(n):
        keep_pace(counter, i, n)
        line = load_int(base + spans[line, 0])
        if line < 0 or line >= n:
            return i + 1, line
    keep_pace(counter, n, n)
    return n, line


def chase(
    args: object, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel, on one thread. Raises ValueError for a line that names none."""
    operands = Operands(bytes_of)
    base, spans = operands.rows(reads[0])
    last = operands.target(writes[0])
    counter = new_counter()
    count, line = _follow(address_of(counter), base, spans)
    if not 0 <= line < len(spans):
        raise ValueError(f"chase: line {line} is named by the one that was read as number {count - 1}, of {len(spans)}")
    _put(last, line)
    operands.finish()


@kernel(types.void, INT64, INT64)
def _put(address: int, line: int) -> None:
    """Put the result where it belongs."""
    store_int(address, line)
