"""dense: a projection, an MLP, sampling or a prefill chunk, by the function that the launch brings (contract.py)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans


def dense(
    args: Dense, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Call the function once with copies of the operands, then store what it wrote; nothing is moved without one."""
    if args.function is None:
        return
    operands = Operands(bytes_of)
    arrays: list[NDArray[np.uint8]] = []
    for operand in (*reads, *writes):
        array = np.zeros(sum(segment.spans.nbytes for segment in operand), dtype=np.uint8)
        if len(arrays) < len(reads):
            move_spans(address_of(array), np.array([[0, array.nbytes]]), *operands.rows(operand))
        arrays.append(array)
    args.function(arrays[: len(reads)], arrays[len(reads) :])
    for operand, array in zip(writes, arrays[len(reads) :], strict=True):
        move_spans(*operands.rows(operand), address_of(array), np.array([[0, array.nbytes]]))
