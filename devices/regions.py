"""Regions: allocated bytes in one memory of one device.

A region is a handle. Host code cannot reach its bytes through it, except where the memory really is the host's:
then `view` is the host's own mapping. Everything else goes through commands. A *phantom* region has a size and no
bytes: commands on it take their modelled time and move nothing; real devices refuse to make one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.spans import Spans


class Region:
    """`nbytes` allocated bytes in `memory` (a memory's full name) of `device`; made by `Device.alloc` only."""

    __slots__ = ("device", "freed", "id", "memory", "nbytes", "phantom", "view")

    def __init__(
        self,
        device: str,
        memory: str,
        region_id: int,
        nbytes: int,
        phantom: bool = False,
        view: NDArray[np.uint8] | None = None,
    ) -> None:
        self.device = device
        self.memory = memory
        self.id = region_id
        self.nbytes = nbytes
        self.phantom = phantom
        self.view = view
        self.freed = False

    def all(self) -> Segment:
        """The whole region as one segment."""
        return Segment(self, Spans.one(0, self.nbytes))

    def at(self, offset: int, nbytes: int) -> Segment:
        """One span of the region as a segment."""
        return Segment(self, Spans.one(offset, nbytes))

    def __repr__(self) -> str:
        state = " phantom" if self.phantom else ""
        return f"<region {self.id} of {self.nbytes} B on {self.memory}{state}{' freed' if self.freed else ''}>"


class Segment(NamedTuple):
    """Spans of one region: the operand of a command."""

    region: Region
    spans: Spans
