"""The happens-before checker: finds two commands that touch the same bytes and are not ordered.

An emulator may reorder whatever is not ordered, so a missing `after` is a bug even where it happens to work. Order
comes from three things only: the same queue, `after`, and the host having looked at a completion before it submitted
the next command. Each queue counts its commands; a completion carries a vector clock {queue: count} of everything that
is known to have ended before it starts. Two commands conflict if their bytes overlap and at least one of them writes.

On in all tests. Costs memory per command in flight; accesses that the host has seen the end of are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Read, Write, read_segments, verb, write_segments

if TYPE_CHECKING:
    from tierloop.devices.completion import Completion

_Lane = tuple[str, int]


class HazardError(AssertionError):
    """Two unordered commands touch the same bytes; the message names both and the kind of hazard."""


@dataclass(slots=True)
class _Access:
    lane: _Lane
    count: int
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    writes: bool
    label: str


class HazardChecker:
    """Watches every submit of a platform; raises HazardError at the submit that is not ordered."""

    def __init__(self) -> None:
        self._host: dict[_Lane, int] = {}
        self._last: dict[_Lane, dict[_Lane, int]] = {}
        self._accesses: dict[object, list[_Access]] = {}
        self.checked = 0

    def submitted(self, completion: Completion) -> None:
        """Check a new command against everything that may still be running. Raises HazardError."""
        lane = (completion.device, completion.queue)
        known = dict(self._host)
        for source in (self._last.get(lane, {}), *(c.order for c in completion.after if c.order)):
            for key, count in source.items():
                if count > known.get(key, 0):
                    known[key] = count
        count = self._last.get(lane, {}).get(lane, 0) + 1
        mine: list[tuple[object, _Access]] = []
        for place, low, high, writes in _touched(completion):
            access = _Access(lane, count, low, high, writes, f"{verb(completion.command)} on {lane[0]} queue {lane[1]}")
            self._compare(place, access, known)
            mine.append((place, access))
        for place, access in mine:
            self._accesses.setdefault(place, []).append(access)
        order = {**known, lane: count}
        completion.order = order
        self._last[lane] = order
        self.checked += 1

    def looked(self, completion: Completion) -> None:
        """The host has seen that this command ended: whatever it submits from now on comes after it."""
        for key, count in (completion.order or {}).items():
            if count > self._host.get(key, 0):
                self._host[key] = count

    def _compare(self, place: object, access: _Access, known: dict[_Lane, int]) -> None:
        earlier = self._accesses.get(place)
        if not earlier:
            return
        kept = [a for a in earlier if a.count > self._host.get(a.lane, 0)]
        self._accesses[place] = kept
        for other in kept:
            if not (access.writes or other.writes) or other.count <= known.get(other.lane, 0):
                continue
            at = _overlap(access, other)
            if at is not None:
                kinds = ("write" if other.writes else "read", "write" if access.writes else "read")
                raise HazardError(
                    f"{kinds[1]}-after-{kinds[0]} hazard at byte {at} of {place}: {access.label} is not ordered "
                    f"after {other.label}; name its completion in `after`, or wait for it first"
                )


def _touched(completion: Completion) -> Iterator[tuple[object, NDArray[np.int64], NDArray[np.int64], bool]]:
    command = completion.command
    for segments, writes in ((read_segments(command), False), (write_segments(command), True)):
        for region, spans in segments:
            if len(spans):
                low = spans.array[:, 0]
                yield (region.memory, region.id), low, low + spans.array[:, 1], writes
    if isinstance(command, (Read, Write)):
        buffer = command.into if isinstance(command, Read) else command.data
        start = np.array([buffer.__array_interface__["data"][0]], dtype=np.int64)
        yield "host buffers", start, start + buffer.nbytes, isinstance(command, Read)


def _overlap(a: _Access, b: _Access) -> int | None:
    """A byte that both touch, or None. Sorted sweep: O((n + m) log) instead of n·m."""
    if a.low.size > b.low.size:
        a, b = b, a
    order = np.argsort(b.low, kind="stable")
    low, high = b.low[order], np.maximum.accumulate(b.high[order])
    last = np.searchsorted(low, a.high, side="left") - 1
    hit = (last >= 0) & (high[last] > a.low) & (a.high > a.low)
    if not hit.any():
        return None
    i = int(hit.argmax())
    inside = (b.low < a.high[i]) & (b.high > a.low[i])
    return int(max(a.low[i], b.low[inside].min())) if inside.any() else None
