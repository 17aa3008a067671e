"""Extents: which bytes of a medium are taken; first fit, and freed neighbours grow together.

All offsets and sizes lie on a grid; sizes are rounded up to it. The accounted bytes are exactly the taken extents:
`free_nbytes` plus everything taken is the capacity after every call.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from tierloop.devices.errors import OutOfMemory


class Extents:
    """Free space of `capacity` bytes in units of `grid` bytes (the capacity is rounded down to it)."""

    def __init__(self, capacity: int, grid: int) -> None:
        self.grid = grid
        self.capacity = capacity // grid * grid
        self._holes: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not taken."""
        return sum(nbytes for _, nbytes in self._holes)

    @property
    def largest_hole(self) -> int:
        """The largest extent that could be taken now."""
        return max((nbytes for _, nbytes in self._holes), default=0)

    def refusal(self, device: str, nbytes: int, besides: str = "") -> OutOfMemory:
        """The error for an extent that could not be taken; `besides` says what else there is to know."""
        why = f"{nbytes} bytes; the largest piece that is free has {self.largest_hole}{besides}"
        return OutOfMemory(device, "alloc", why)

    def rounded(self, nbytes: int) -> int:
        """What an extent of so many bytes truly takes."""
        return -(-nbytes // self.grid) * self.grid

    def take(self, nbytes: int) -> int | None:
        """The offset of the first hole that holds nbytes, now taken; None if there is none."""
        size = self.rounded(nbytes)
        for i, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take a given extent; False if any of it is taken already or lies outside. `offset` is on the grid."""
        size = self.rounded(nbytes)
        i = bisect_right(self._holes, (offset, self.capacity + 1)) - 1
        if i < 0:
            return False
        start, room = self._holes[i]
        if offset + size > start + room:
            return False
        left = [(start, offset - start)] if offset > start else []
        right = [(offset + size, start + room - offset - size)] if start + room > offset + size else []
        self._holes[i : i + 1] = left + right
        return True

    def give(self, offset: int, nbytes: int) -> None:
        """Give a taken extent back and join it with the holes beside it."""
        size = self.rounded(nbytes)
        insort(self._holes, (offset, size))
        i = bisect_right(self._holes, (offset, size)) - 1
        if i + 1 < len(self._holes) and self._holes[i + 1][0] == offset + size:
            size += self._holes.pop(i + 1)[1]
            self._holes[i] = (offset, size)
        if i and sum(self._holes[i - 1]) == offset:
            start, room = self._holes[i - 1]
            self._holes[i - 1 : i + 1] = [(start, room + size)]
