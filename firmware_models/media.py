"""What a firmware model says about an access: how long its medium takes, and how much of the medium it needs.

A firmware model is the controller logic of a device: it turns byte ranges into operations of the medium and keeps the
controller's state. It has no clock and no threads, and it does not know what else is going on. An emulated device
gives it the ranges of a command and hands the answer to the timing fabric, where commands that overlap in time share
the medium: one that needs an eighth of the dies leaves seven eighths to the others.

Firmware that is *timed* does its own queueing: it is told the time before each access, and its answer contains the
waiting. Its share is 1, so that the fabric does not count the waiting again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

WHOLE = 1024
"""`MediaWork.share` of a command that keeps the whole medium busy."""

Ranges = NDArray[np.int64]
"""Byte ranges on the medium: int64 (n, 2) with the columns (address, nbytes), in the order of the command."""

NOTHING: Ranges = np.empty((0, 2), dtype=np.int64)


class MediaWork(NamedTuple):
    """`alone_ns` is how long an idle medium takes, `share` the part of it that is kept busy meanwhile (1 … WHOLE).

    `nbytes` is what the medium moves inside, `fault` why the command fails after that time ("" if it does not).
    """

    alone_ns: int
    share: int
    nbytes: int
    fault: str = ""


class Firmware(Protocol):
    """A controller behind a doorbell, as far as time and media are concerned."""

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Carry out an access: reads first, then writes; the controller's state changes."""

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """What `access` would say now, without doing it. Housekeeping that writes may set off is left out."""

    def trim(self, address: int, nbytes: int) -> None:
        """The bytes are no longer needed."""

    def ceiling(self, write: bool) -> int:
        """The highest rate in bytes/s that any pattern of reads (or writes) can reach."""

    def reset(self) -> None:
        """Back to the state in which the device left the factory."""


@runtime_checkable
class Timed(Firmware, Protocol):
    """Firmware that wants to be told the time, if it is `timed`; otherwise nobody has to."""

    timed: bool

    def advance(self, now_ns: int) -> None:
        """It is `now_ns`: what comes next comes then. Called before `access` and `plan`; time does not run back."""


@runtime_checkable
class Wearing(Protocol):
    """Firmware whose medium wears out and that says how far it is."""

    @property
    def percentage_used(self) -> int:
        """How much of its rated life the medium has had, in percent, at most 255."""

    @property
    def spare_percent(self) -> int:
        """What is left of the reserve for blocks that fail."""

    @property
    def read_only(self) -> bool:
        """Whether the medium takes no more writes."""


def parallel(busy_ns: int, units: int, alone_ns: int) -> int:
    """The share of `units` equal parts that are busy for `busy_ns` in all while `alone_ns` pass, rounded up."""
    if alone_ns <= 0:
        return 1
    share = -(-busy_ns * WHOLE // (units * alone_ns))
    return 1 if share < 1 else WHOLE if share > WHOLE else share
