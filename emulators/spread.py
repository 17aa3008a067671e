"""How an executor gets at an interleave set: at each of its members as if it were alone, with that member's bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierloop.devices.regions import Segment
from tierloop.emulators.fabric import Demand
from tierloop.emulators.reach import Reach
from tierloop.emulators.timing import FAR, Route

if TYPE_CHECKING:
    from tierloop.emulators.interleave import InterleavedDevice


class SetReach:
    """The reaches of a set's members, in order; the latency is that of the farthest."""

    def __init__(self, members: InterleavedDevice, reaches: Sequence[Reach]) -> None:
        self.set = members
        self.reaches = tuple(reaches)
        self.latency_ns = max(reach.latency_ns for reach in reaches)

    def spread(self, segments: Sequence[Segment], nbytes: int, commit: bool) -> list[tuple[Reach, int]]:
        """The members on which a command's bytes lie, and how many; without segments those of host buffers."""
        counts = self.set.spread(segments) if segments else self.set.typical(nbytes)
        if commit:
            self.set.count(counts)
        return [(reach, count) for reach, count in zip(self.reaches, counts, strict=True) if count]

    def ceiling(self, capacity: list[int], is_write: bool) -> int:
        """Bytes/s of a long stream: all members in proportion, over whatever they share."""
        demands: list[tuple[int, int]] = []
        for reach, weight in zip(self.reaches, self.set.weights, strict=True):
            demands += [(r, units * weight) for r, units in (reach.write if is_write else reach.read) if weight]
        route = Route(demands, capacity)
        return route.alone * sum(self.set.weights) // route.alone_s


Part = tuple[Route, int, int, list[Reach]]
"""What a command does on one member: route, bytes, latency, and the memories whose latency its accesses wait for."""


def deal(parts: Sequence[Part], window: int, most: int, dependent: Callable[..., Route]) -> list[Demand]:
    """The flows of a command that moves at most `most` bytes/s and has `window` under way, both in all.

    The limit is dealt by bytes. What is under way is where accesses wait, so it is dealt by bytes times latency; a
    `dependent` route (costs.py) is made for it.
    """
    if not parts:
        return []
    caps = [FAR] * len(parts) if most == FAR else _shares(most, [part[1] for part in parts])
    waiting = [part[1] * max(sum(reach.latency_ns for reach in part[3]), 1) for part in parts]
    demands: list[Demand] = []
    for (route, nbytes, latency_ns, waits), cap, lines in zip(parts, caps, _shares(window, waiting), strict=True):
        if window and waits:
            route, latency_ns = dependent(route.demands, route.legs, route.mixes, lines, waits), 0
        demands.append((route, nbytes, cap, latency_ns))
    return demands


def _shares(total: int, parts: Sequence[int]) -> list[int]:
    """A whole number dealt in proportion, rounded down, but at least 1 each."""
    whole = sum(parts)
    return [max(total * part // whole, 1) for part in parts]
