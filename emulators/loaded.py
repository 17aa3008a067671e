"""Loaded latency: what a memory's latency becomes as its bandwidth is used up, as curves that were measured.

A curve belongs to a *read fraction*, the share of reads in the bytes that the memory serves, and runs from an idle
memory to its highest rate, the *cap*. It holds all queueing there is, and is used once:

- streams (many accesses under way) take the cap for their present mix of reads and writes, and the latency of an idle
  memory after it;
- accesses that wait for each other take a latency from the curve. They move window · NS / latency(rate) bytes/s, where
  the window is what they have under way, and the rate that of everybody: a fixed point, which timing.py finds.

Between two read fractions caps, and latencies at the same share of the cap, are interpolated linearly; outside of all
that were measured the nearest curve counts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

WHOLE = 1000
"""Read fractions are whole numbers of thousandths."""

Point = tuple[int, int]
"""Rate in bytes/s and latency in ns."""


@dataclass(frozen=True)
class Curves:
    """Curves by read fraction, in thousandths, ascending; points with rates that rise and latencies that do not fall.

    Raises ValueError for anything else.
    """

    curves: tuple[tuple[int, tuple[Point, ...]], ...]
    _mixes: dict[int, _Mix] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fractions = [fraction for fraction, _ in self.curves]
        if not fractions or not fractions[0] >= 0 or fractions[-1] > WHOLE:
            raise ValueError("curves need at least one read fraction, between 0 and 1")
        if any(later <= earlier for earlier, later in pairwise(fractions)):
            raise ValueError("read fractions have to ascend, each once")
        for fraction, points in self.curves:
            where = f"read fraction {fraction / WHOLE:g}"
            if not points:
                raise ValueError(f"{where}: a curve needs at least one point [bytes/s, ns]")
            for (rate, latency), (next_rate, next_latency) in pairwise(points):
                if next_rate <= rate:
                    raise ValueError(f"{where}: rates have to rise: {next_rate} bytes/s comes after {rate}")
                if next_latency < latency:
                    raise ValueError(
                        f"{where}: latencies may not fall: {next_latency} ns at {next_rate} bytes/s comes after "
                        f"{latency} ns"
                    )

    def cap(self, fraction: int) -> int:
        """The highest rate at that read fraction, in bytes/s."""
        return self._mix(fraction).cap

    def latency_ns(self, rate: int, fraction: int) -> int:
        """The latency while the memory moves `rate` bytes/s, at most the cap, with that read fraction."""
        mix = self._mix(fraction)
        low = _at(mix.below, rate * mix.below_cap // mix.cap)
        if not mix.weight:
            return low
        return low + (_at(mix.above, rate * mix.above_cap // mix.cap) - low) * mix.weight // mix.whole

    @property
    def idle_ns(self) -> int:
        """The latency of an idle memory for reads."""
        return self.latency_ns(0, WHOLE)

    def _mix(self, fraction: int) -> _Mix:
        """What is known of a read fraction, found once."""
        mix = self._mixes.get(fraction)
        if mix is None:
            place = bisect_right(self.curves, fraction, key=lambda curve: curve[0])
            (low, below) = self.curves[max(place - 1, 0)]
            (high, above) = self.curves[min(place, len(self.curves) - 1)]
            mix = self._mixes[fraction] = _Mix(below, above, max(fraction - low, 0), max(high - low, 1))
        return mix


class _Mix:
    """A read fraction between two curves: at weight / whole from the one below to the one above."""

    __slots__ = ("above", "above_cap", "below", "below_cap", "cap", "weight", "whole")

    def __init__(self, below: tuple[Point, ...], above: tuple[Point, ...], weight: int, whole: int) -> None:
        self.below, self.above = ([p[0] for p in below], below), ([p[0] for p in above], above)
        self.below_cap, self.above_cap = below[-1][0], above[-1][0]
        self.weight, self.whole = weight if below is not above else 0, whole
        self.cap = self.below_cap + (self.above_cap - self.below_cap) * self.weight // whole


def _at(curve: tuple[list[int], tuple[Point, ...]], rate: int) -> int:
    """The latency on one curve, given as its rates and its points."""
    rates, points = curve
    place = bisect_right(rates, rate)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (low, below), (high, above) = points[place - 1], points[place]
    return below + (above - below) * (rate - low) // (high - low)


class LoadedMedium:
    """A medium with curves, as the resource of timing.py: `capacity` units/s, of which a byte costs `read_units` or
    `write_units` where only such bytes are moved."""

    __slots__ = ("capacity", "curves", "read_units", "write_units")

    def __init__(self, curves: Curves, capacity: int, read_units: int, write_units: int) -> None:
        self.curves = curves
        self.capacity = capacity
        self.read_units = read_units
        self.write_units = write_units

    def shared(self, read: int, written: int) -> int:
        """The units/s that there are for a mix of so many parts of reads and of writes.

        Each byte still costs its units; what the mix does to the rate is in the capacity.
        """
        if not read or not written:
            return self.capacity
        units = read * self.read_units + written * self.write_units
        return self.curves.cap(fraction_of(read, written)) * units // (read + written)


def fraction_of(read: int, written: int) -> int:
    """The read fraction in thousandths, of at least one byte."""
    return (read * WHOLE + (read + written) // 2) // (read + written)
