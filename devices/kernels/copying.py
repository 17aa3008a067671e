"""Read, Write and Copy, for every device whose bytes lie in arrays of this process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans


def copy_bytes(command: Read | Write | Copy, bytes_of: BytesOf) -> None:
    """Move the bytes of a command: spans end to end on both sides, which may be cut differently.

    Where source and target of a `Copy` overlap, bytes that one span moves are right, others may have been written
    before they are read. Raises ValueError for spans outside their region or of different size.
    """
    if isinstance(command, Copy):
        region, spans = command.source
        target, target_spans = command.target
        if len(spans) == len(target_spans) == 1:
            bytes_of(target)[target_spans.end - target_spans.nbytes : target_spans.end] = bytes_of(region)[
                spans.end - spans.nbytes : spans.end
            ]
            return
        operands = Operands(bytes_of)
        move_spans(*operands.rows((command.target,)), *operands.rows((command.source,)))
        return
    if isinstance(command, Read):
        region, spans = command.source
        if len(spans) == 1:
            command.into[:] = bytes_of(region)[spans.end - spans.nbytes : spans.end]
            return
        move_spans(*_buffer(command.into), *Operands(bytes_of).rows((command.source,)))
        return
    region, spans = command.target
    if len(spans) == 1:
        bytes_of(region)[spans.end - spans.nbytes : spans.end] = command.data
        return
    move_spans(*Operands(bytes_of).rows((command.target,)), *_buffer(command.data))


def _buffer(array: NDArray[np.uint8]) -> tuple[int, NDArray[np.int64]]:
    return address_of(array), np.array([[0, array.nbytes]])
