"""What a flash drive reports about itself, and what its dies have done: frozen data, bytes where not said otherwise.

What was programmed is accounted for to the byte:

    programmed = host_written + collected + folded + levelled + padded − buffered

`buffered` is what lies in the stripe that is not full yet; where nothing does, `write_amplification` is at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["read", "program", "erase", "retire"]
Cause = Literal["host", "collect", "fold", "level"]
KINDS: tuple[Kind, ...] = ("read", "program", "erase", "retire")
CAUSES: tuple[Cause, ...] = ("host", "collect", "fold", "level")


class Operation(NamedTuple):
    """What a die did on a block of it, `times` times in a row, for `units` units in all.

    `first` is the first stripe of a program and the page, within its block, of a read for the host. Other reads touch
    `times` pages anywhere in the block. `retire` is an erasure that failed.
    """

    kind: Kind
    cause: Cause
    die: int
    block: int
    first: int
    times: int
    units: int


@dataclass(frozen=True)
class FlashHealth:
    """Counters since the drive left the factory. `erases` are of blocks, `suspends` of operations, `retries` rounds.

    `percentage_used` is the mean of the main area's erasures in percent of the rated cycles, at most 255, and 0 where
    those are not known; `spare_percent` is what is left of the reserve, 100 where there never was one.
    """

    host_written: int
    host_read: int
    programmed: int
    sensed: int
    collected: int
    folded: int
    levelled: int
    padded: int
    buffered: int
    erases: int
    bad_blocks: int
    suspends: int
    retries: int
    spare_percent: int
    percentage_used: int
    read_only: bool

    @property
    def write_amplification(self) -> float:
        """Bytes programmed, or about to be, per byte that the host wrote; 1 before the first write."""
        return (self.programmed + self.buffered) / self.host_written if self.host_written else 1.0
