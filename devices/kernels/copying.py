"""Read, Write and Copy, for every device whose bytes lie in arrays of this process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.gather import move_in_tiles
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans
from tierloop.devices.kernels.pace import is_paced
from tierloop.devices.regions import Segment


def copy_bytes(command: Read | Write | Copy, bytes_of: BytesOf) -> None:
    """See the package's `copy_bytes`. One span on each side is a plain NumPy assignment, which costs a third."""
    if is_paced():
        _copy_in_tiles(command, bytes_of)
    elif isinstance(command, Read):
        if len(command.source.spans) == 1:
            command.into[:] = _slice(command.source, bytes_of)
        else:
            move_spans(*_buffer(command.into), *Operands(bytes_of).rows((command.source,)))
    elif isinstance(command, Write):
        if len(command.target.spans) == 1:
            _slice(command.target, bytes_of)[:] = command.data
        else:
            move_spans(*Operands(bytes_of).rows((command.target,)), *_buffer(command.data))
    elif len(command.source.spans) == len(command.target.spans) == 1:
        _slice(command.target, bytes_of)[:] = _slice(command.source, bytes_of)
    else:
        operands = Operands(bytes_of)
        move_spans(*operands.rows((command.target,)), *operands.rows((command.source,)))


def _copy_in_tiles(command: Read | Write | Copy, bytes_of: BytesOf) -> None:
    operands = Operands(bytes_of)
    source = _buffer(command.data) if isinstance(command, Write) else operands.rows((command.source,))
    target = _buffer(command.into) if isinstance(command, Read) else operands.rows((command.target,))
    move_in_tiles(*target, *source)


def _slice(segment: Segment, bytes_of: BytesOf) -> NDArray[np.uint8]:
    """The bytes of a segment of one span."""
    region, spans = segment
    array, end = bytes_of(region), spans.end
    if end > array.nbytes:
        raise ValueError(f"a span ends at byte {end} of {region}, which has {array.nbytes}")
    return array[end - spans.nbytes : end]


def _buffer(array: NDArray[np.uint8]) -> tuple[int, NDArray[np.int64]]:
    return address_of(array), np.array([[0, array.nbytes]])
