"""The memory of a near-memory processor as its two sides see it: the host's lines in the window, and the engines'.

Type-3 memory is coherent for the host alone. So bytes that the host wrote are its own until they are *added*, and what
the engines wrote is theirs until it is *shown*; the model keeps both, and `stale` counts bytes that an engine read
while the host had newer ones. Regions are contiguous, on the grid, and never overlap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy, Launch, Read, Write
from tierloop.devices.drivers.pnm_wire import Place, Status, checksum
from tierloop.devices.kernels.copying import copy_bytes
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

Bytes = NDArray[np.uint8]


class Refused(Exception):
    """A command that the device does not carry out: the status that it answers, and the reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CardMemory:
    """`lines` are the host's bytes of the whole memory, a part of the window; `seen` those of the engines."""

    def __init__(self, lines: Bytes, grid: int) -> None:
        self.lines = lines
        self.seen: Bytes = np.zeros(lines.nbytes, dtype=np.uint8)
        self.stale = 0
        self._grid = grid
        self._newer = np.zeros(lines.nbytes, dtype=np.bool_)
        self._any_newer = False
        self._lost = np.zeros(lines.nbytes, dtype=np.bool_)
        self._any_lost = False
        self._regions: dict[int, tuple[Place, Region]] = {}

    # -- regions -------------------------------------------------------------------------------------------------

    def add_region(self, place: Place) -> None:
        """Take a region in, zeroed for the engines. Raises Refused."""
        if place.ways != 1:
            raise Refused(
                Status.INTERLEAVED,
                f"region {place.region} is interleaved over {place.ways} ways in granules of {place.granule} bytes; "
                "allowed: contiguous, because a granule would tear a row",
            )
        if place.region in self._regions:
            raise Refused(Status.BAD_REGION, f"region {place.region} exists already")
        end = place.offset + place.nbytes
        if end > self.lines.nbytes:
            raise Refused(
                Status.NO_ROOM, f"region {place.region} would end at {end} of a memory of {self.lines.nbytes} bytes"
            )
        if place.offset % self._grid or place.nbytes % self._grid:
            raise Refused(
                Status.BAD_REGION,
                f"region {place.region}, {place.nbytes} bytes at {place.offset}, is off the grid of {self._grid} bytes",
            )
        for other, _ in self._regions.values():
            if place.offset < other.offset + other.nbytes and other.offset < end:
                raise Refused(Status.NO_ROOM, f"region {place.region} would lie over region {other.region}")
        self.seen[place.offset : end] = 0
        self._newer[place.offset : end] = False
        self._lost[place.offset : end] = False
        view = self.seen[place.offset : end]
        self._regions[place.region] = place, Region("pnm", "pnm", place.region, place.nbytes, view=view)

    def drop_region(self, number: int) -> None:
        """Forget a region. Raises Refused."""
        self.region(number)
        del self._regions[number]

    def drop_all(self) -> None:
        """Forget every region."""
        self._regions.clear()

    def region(self, number: int) -> Region:
        """The region of a number. Raises Refused."""
        if number not in self._regions:
            raise Refused(Status.BAD_REGION, f"there is no region {number}")
        return self._regions[number][1]

    @property
    def numbers(self) -> frozenset[int]:
        """The regions that there are."""
        return frozenset(self._regions)

    # -- both sides ----------------------------------------------------------------------------------------------

    def lose(self, number: int, offset: int, nbytes: int) -> None:
        """Bytes of a region cannot be read from now on, by engines or by the host, until they are written."""
        place = self._regions[number][0]
        self._lost[place.offset + offset : place.offset + offset + nbytes] = True
        self._any_lost = True

    def mend(self, segment: Segment) -> None:
        """The bytes of a segment are written: they can be read again."""
        if self._any_lost:
            for offset, nbytes in self._absolute(segment).array.tolist():
                self._lost[offset : offset + nbytes] = False
            self._any_lost = bool(self._lost.any())

    def readable(self, segment: Segment) -> None:
        """Raises Refused where a byte of the segment is lost."""
        if not self._any_lost:
            return
        for offset, nbytes in self._absolute(segment).array.tolist():
            lost = self._lost[offset : offset + nbytes]
            if lost.any():
                where = offset + int(lost.argmax())
                raise Refused(Status.MEDIA, f"byte {where} of the memory cannot be read ({segment.region})")

    def written(self, offset: int, nbytes: int) -> None:
        """The host has written to its lines."""
        self._newer[offset : offset + nbytes] = True
        self._any_newer = True

    def add(self, segment: Segment, said: int) -> int:
        """Let the engines see what the host wrote, if it has the checksum that was said. Raises Refused."""
        spans = self._absolute(segment)
        data = np.empty(spans.nbytes, dtype=np.uint8)
        lines, seen = _whole(self.lines), _whole(self.seen)
        copy_bytes(Read(Segment(lines, spans), data), _view)
        found = checksum(data.data)
        if found != said:
            raise Refused(
                Status.BAD_PAYLOAD,
                f"the {spans.nbytes} bytes have the checksum {found:#010x}, and the host said {said:#010x}",
            )
        copy_bytes(Write(Segment(seen, spans), data), _view)
        self._forget_newer(spans)
        self.mend(segment)
        return found

    def show(self, segment: Segment) -> int:
        """Let the host see what the engines see; returns the checksum of it. Raises Refused."""
        spans = self._absolute(segment)
        self.readable(segment)
        data = np.empty(spans.nbytes, dtype=np.uint8)
        lines, seen = _whole(self.lines), _whole(self.seen)
        copy_bytes(Read(Segment(seen, spans), data), _view)
        copy_bytes(Copy(Segment(seen, spans), Segment(lines, spans)), _view)
        self._forget_newer(spans)
        return checksum(data.data)

    def count_stale(self, launch: Launch) -> None:
        """An engine reads these operands: count bytes of which the host has newer ones."""
        if self._any_newer:
            for region, spans in [segment for operand in launch.reads for segment in operand]:
                base = self._regions[region.id][0].offset
                for offset, nbytes in spans.array.tolist():
                    self.stale += int(self._newer[base + offset : base + offset + nbytes].sum())

    def within(self, segment: Segment) -> None:
        """Raises Refused for spans that end outside their region."""
        region, spans = segment
        if spans.end > region.nbytes:
            raise Refused(Status.OUT_OF_RANGE, f"{spans!r} is outside the {region.nbytes} bytes of region {region.id}")

    def _absolute(self, segment: Segment) -> Spans:
        self.within(segment)
        return Spans(segment.spans.array + np.array([self._regions[segment.region.id][0].offset, 0]))

    def _forget_newer(self, spans: Spans) -> None:
        if self._any_newer:
            for offset, nbytes in spans.array.tolist():
                self._newer[offset : offset + nbytes] = False
            self._any_newer = bool(self._newer.any())


def _whole(array: Bytes) -> Region:
    return Region("pnm", "pnm", -1, array.nbytes, view=array)


def _view(region: Region) -> Bytes:
    assert region.view is not None, "regions of the model show their bytes"
    return region.view
