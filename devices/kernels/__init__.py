"""Kernels: what a device computes (contract.py), and the code that computes it on a host's cores.

Used by the `cpu` driver and by every emulated device alike, so that their results have the same bits. Importing this
package compiles nothing; the first call does, or `warm_up`, which a device calls when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tierloop.devices.commands import Copy, Launch, Read, Write
    from tierloop.devices.regions import Region

MICROKERNEL = "tierloop-2/16"
"""Name and revision of the inner loops / lanes of their sums. Same name and instruction set, same bits: any change
that can move a bit of a result counts the revision up."""


_run: Any = None
_copy_bytes: Any = None


def warm_up() -> None:
    """Compile every kernel, or load it from the cache; afterwards nothing compiles."""
    global _run, _copy_bytes
    from tierloop.devices.kernels.filling import one_process_at_a_time

    with one_process_at_a_time():
        from tierloop.devices.kernels import copying, launching

        _run, _copy_bytes = launching.run, copying.copy_bytes


def run(launch: Launch, bytes_of: Callable[[Region], NDArray[np.uint8]], threads: int = 1) -> int:
    """Carry out a launch on arrays of this process; returns its floating-point operations.

    `bytes_of` gives the whole array of a region, C-contiguous uint8 (nbytes,). The launch has passed `device.check`;
    whatever that leaves open is checked here: raises ValueError, naming run or root, before anything is written.
    `threads` is how many cores may work on it at once; it never changes a bit.
    """
    if _run is None:
        warm_up()
    flops: int = _run(launch, bytes_of, threads)
    return flops


def copy_bytes(command: Read | Write | Copy, bytes_of: Callable[[Region], NDArray[np.uint8]]) -> None:
    """Move the bytes of a command between arrays of this process: spans end to end, whatever their cuts.

    Where source and target of a `Copy` overlap, bytes that one span moves are right; others may have been written
    before they are read. Raises ValueError for spans outside their region.
    """
    if _copy_bytes is None:
        warm_up()
    _copy_bytes(command, bytes_of)
