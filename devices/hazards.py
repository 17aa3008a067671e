"""The happens-before checker: finds two commands that touch the same bytes and are not ordered.

An emulator may reorder whatever is not ordered, so a missing `after` is a bug even where it happens to work. Order
comes from three things only: the same queue, `after`, and the host having looked at a completion before it submitted
the next command. Each queue counts its commands; a completion carries a vector clock {queue: count} of everything that
is known to have ended before it starts. Two commands conflict if their bytes overlap and at least one of them writes.

A flush counts as a read: it must come after the writes that it is meant for.

On in all tests. Costs memory per command in flight; accesses that the host has seen the end of are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Flush, Read, Write, read_segments, verb, write_segments

if TYPE_CHECKING:
    from tierloop.devices.completion import Completion
    from tierloop.devices.spans import Spans

_Lane = tuple[str, int]
_Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First byte and byte after the last of pieces that are not empty, by first byte."""


class HazardError(AssertionError):
    """Two unordered commands touch the same bytes; the message names both and the kind of hazard."""


@dataclass(slots=True)
class _Access:
    """Pieces (offset, nbytes) that one command touches in one place.

    `buffer` keeps a host buffer alive: while this is remembered, no other one can come to lie at its address.
    """

    lane: _Lane
    count: int
    pieces: NDArray[np.int64]
    writes: bool
    label: str
    buffer: object = None
    sorted: _Bounds | None = None

    def bounds(self) -> _Bounds:
        """Those of the pieces; made when needed."""
        if self.sorted is None:
            self.sorted = _bounds(self.pieces)
        return self.sorted


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
        label = f"{verb(completion.command)} on {lane[0]} queue {lane[1]}"
        for place, pieces, writes, buffer in _touched(completion):
            access = _Access(lane, count, pieces, writes, label, buffer)
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
        if kept:
            self._accesses[place] = kept
        else:
            del self._accesses[place]
        for other in kept:
            if not (access.writes or other.writes) or other.count <= known.get(other.lane, 0):
                continue
            at = _first_common(access.bounds(), other.bounds())
            if at is not None:
                kinds = ("write" if other.writes else "read", "write" if access.writes else "read")
                raise HazardError(
                    f"{kinds[1]}-after-{kinds[0]} hazard at byte {at} of {place}: {access.label} is not ordered "
                    f"after {other.label}; name its completion in `after`, or wait for it first"
                )


def meet(a: Spans, b: Spans) -> bool:
    """Whether a byte lies in both."""
    return _first_common(_bounds(a.array), _bounds(b.array)) is not None


def _touched(completion: Completion) -> Iterator[tuple[object, NDArray[np.int64], bool, object]]:
    command = completion.command
    reads = (command.target,) if isinstance(command, Flush) else read_segments(command)
    for segments, writes in ((reads, False), (write_segments(command), True)):
        for region, spans in segments:
            if spans.nbytes:
                yield (region.memory, region.id), spans.array, writes, None
    if isinstance(command, (Read, Write)):
        buffer = command.into if isinstance(command, Read) else command.data
        if buffer.nbytes:
            address = buffer.__array_interface__["data"][0]
            pieces = np.array([[address, buffer.nbytes]], dtype=np.int64)
            yield "host buffers", pieces, isinstance(command, Read), buffer


def _bounds(pieces: NDArray[np.int64]) -> _Bounds:
    low, nbytes = pieces[:, 0], pieces[:, 1]
    order = np.argsort(low, kind="stable")
    order = order[nbytes[order] > 0]
    return low[order], (low + nbytes)[order]


def _first_common(a: _Bounds, b: _Bounds) -> int | None:
    """The first byte that lies in both, or None. Sorted sweep: O(n log m) instead of n·m."""
    if len(a[0]) > len(b[0]):
        a, b = b, a
    (a_low, a_high), (b_low, b_high) = a, b
    last = np.searchsorted(b_low, a_high, side="left") - 1
    hit = (last >= 0) & (np.maximum.accumulate(b_high)[last] > a_low)
    if not hit.any():
        return None
    i = int(hit.argmax())
    inside = (b_low < a_high[i]) & (b_high > a_low[i])
    return int(max(a_low[i], b_low[inside].min()))
