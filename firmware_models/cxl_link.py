"""The way of a line to a CXL card and back: credits, flits, the medium, and the load that the card tells of.

Lines are handed in one by one, in the order of their times, and each is told at once when its answer is there. Nothing
sets a rate: it comes of what is scarce.

- A read needs a request credit, a write a data credit; it waits for one, and gives it back with its answer.
- Each direction of the link carries one slot after the other (cxl_part.py says how many a line takes).
- The medium's channels, chosen by granules of 256 bytes, take a line each `channel_ns`.
- Answers leave in the order of the requests. What is not modelled: retries, packing that depends on what else is under
  way, and a write that waits for a read of the same line.

DevLoad is what the card says with every answer: light, optimal, moderate or severe overload, by the share of a class's
credits whose lines are in the card: in its queue, in the medium, or waiting for the way back. A card whose queue is
full is in severe overload.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from tierloop.firmware_models.cxl_part import HALF_SLOTS, CxlLinkPart

_GRANULE = 256
_FORGET = 4096


class DevLoad(IntEnum):
    """The load of a card, as in its answers."""

    LIGHT = 0
    OPTIMAL = 1
    MODERATE = 2
    SEVERE = 3


class Carried(NamedTuple):
    """When a line left the host and when its answer was there, in ps, and the load that it found in the card."""

    left_ps: int
    done_ps: int
    load: DevLoad


class CxlLink:
    """The link of one card and what is behind it, as time goes."""

    def __init__(self, part: CxlLinkPart) -> None:
        self.part = part
        self.reset()

    def reset(self) -> None:
        """Nothing is under way; time may begin again."""
        self._now_ps = 0
        self._free_ps = [0, 0]
        self._channel_ps = [0] * self.part.channels
        self._under_way: dict[bool, list[int]] = {False: [], True: []}
        self._came: dict[bool, list[int]] = {False: [], True: []}
        self._left: dict[bool, list[int]] = {False: [], True: []}

    def carry(self, at_ns: int, dpa: int, write: bool) -> Carried:
        """A line leaves a core at that time. Raises ValueError if an earlier one was handed in later."""
        at = at_ns * 1000
        if at < self._now_ps:
            raise ValueError(f"a line at {at_ns} ns after one at {self._now_ps // 1000} ns; they come in order")
        self._now_ps = at
        part, credits_ps = self.part, self._under_way[write]
        most = part.data_credits if write else part.request_credits
        while credits_ps and credits_ps[0] <= at:
            heappop(credits_ps)
        left = heappop(credits_ps) if len(credits_ps) == most else at
        down, up = map(part.slots_ps, HALF_SLOTS[write])
        left = max(left, self._free_ps[0])
        self._free_ps[0] = left + down
        came = self._free_ps[0] + 1000 * part.flight_ns
        channel = dpa // _GRANULE % part.channels
        taken = max(came, self._channel_ps[channel])
        self._channel_ps[channel] = taken + 1000 * part.channel_ns
        done = taken + 1000 * part.media_ns
        sent = max(done, self._free_ps[1])
        self._free_ps[1] = sent + up
        load = self._load(came)
        self._came[write].append(came)
        self._left[write].append(sent)
        answered = self._free_ps[1] + 1000 * part.flight_ns
        heappush(credits_ps, answered)
        return Carried(left, answered, load)

    def load_at(self, now_ns: int) -> DevLoad:
        """The load at a time that is not before that of the last line."""
        return self._load(now_ns * 1000)

    def _load(self, now: int) -> DevLoad:
        part = self.part
        eighths = 0
        for write, most in ((False, part.request_credits), (True, part.data_credits)):
            came, left = self._came[write], self._left[write]
            eighths = max(eighths, (bisect_right(came, now) - bisect_right(left, now)) * 8 // most)
            if len(left) > _FORGET and left[_FORGET // 2] <= self._now_ps:
                del came[: _FORGET // 2], left[: _FORGET // 2]
        if eighths >= part.severe:
            return DevLoad.SEVERE
        if eighths >= part.moderate:
            return DevLoad.MODERATE
        return DevLoad.OPTIMAL if eighths >= part.light else DevLoad.LIGHT
