"""Pacing on the wall clock: who keeps a pace, and how well this host can.

Only what occupies a core in reality is paced: the commands of executors of the kind `cores`, whose loads and stores go
to memory, to that of another socket, or to a CXL card. Asynchronous engines compute at once, and their completion is
held until its time.

`measure_rate` and `measure_latency` try the same waits on this host, inside compiled code, against the same counter:
what they achieve is what an emulated memory can promise here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Launch
from tierloop.devices.kernels.contract import Chase

if TYPE_CHECKING:
    from tierloop.devices.kernels.pace import Pace

DEBT_NS = 100_000
"""What a command that fell behind may make up for at the host's speed, in emulated time: more would be a burst."""


def pace_of(length_ns: int, command: Command, dilation: int) -> Pace:
    """The pace of a command that takes so long, of which nothing has passed. Accesses that wait for each other are
    timed one by one; for others it is enough that tiles are spread, since the completion is held to its time."""
    from tierloop.devices.kernels.pace import Pace  # compiles on import

    waits = isinstance(command, Launch) and isinstance(command.args, Chase)
    return Pace(length_ns, DEBT_NS * dilation, spins=waits)


def late_start(length_ns: int, lead_ns: int) -> Pace:
    """The pace of a command that is to do nothing until `lead_ns` before its end."""
    from tierloop.devices.kernels.pace import Pace  # compiles on import

    pace = Pace(max(length_ns - lead_ns, 0), debt_ns=1 << 50, spins=False)
    pace.lead_ns, pace.is_late_start = lead_ns, True
    return pace


def measure_rate(
    nbytes: int, tile_nbytes: int, bytes_per_s: int, buffer: NDArray[Any] | None = None
) -> tuple[float, int]:
    """Read `nbytes` in tiles at a rate: the achieved rate in bytes/s, and the worst lateness of a tile in ns.

    `buffer` is what is read, over and over (default: 64 MiB of its own).
    """
    from tierloop.devices.kernels.pace import Pace, ticks_per_ns
    from tierloop.devices.kernels.pace_loops import read_in_tiles

    if buffer is None:
        buffer = np.ones(1 << 26, dtype=np.uint8)
    data = buffer.view(np.uint8)
    pace = Pace(nbytes * 1_000_000_000 // bytes_per_s, DEBT_NS)
    took, _ = read_in_tiles(data, nbytes, tile_nbytes, pace.address)
    return nbytes * ticks_per_ns() * 1e9 / took, pace.worst_ns


def measure_latency(target_ns: int, count: int) -> NDArray[np.int64]:
    """Inject a latency `count` times in a row: how long after its time each ended, in ns, int64 (count,)."""
    from tierloop.devices.kernels.pace import Pace, ticks_per_ns
    from tierloop.devices.kernels.pace_loops import wait_again_and_again

    pace = Pace(count * target_ns, DEBT_NS)
    late = np.empty(count, dtype=np.int64)
    wait_again_and_again(late, pace.address)
    return np.rint(late / ticks_per_ns()).astype(np.int64)
