"""The site that a device is built into: its clock, who watches completions, and what devices share.

One platform has one site. Observers are called with every completion as it ends (ledger, trace); links are registered
by whoever models them; `shared` lets the devices of one family find what they have in common (the emulators' fabric).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tierloop.devices.clocks import Clock, VirtualClock
from tierloop.devices.completion import Completion
from tierloop.devices.hazards import HazardChecker


class LinkMeter(Protocol):
    """What a link has carried: bytes per direction and ns during which it was busy (union over both directions)."""

    name: str
    bytes_forward: int
    bytes_back: int
    busy_ns: int


class LoadMeter(Protocol):
    """What the traffic of other hosts has moved on one memory, whole bursts only: in no device's account.

    `offered_nbytes` is what it would have moved on a memory that is fast enough.
    """

    name: str
    memory: str
    bytes_read: int
    bytes_written: int
    busy_ns: int
    offered_nbytes: int


class Occupancy(NamedTuple):
    """A stretch of time in which a link carried one command's bytes; times in ns, `direction` forward or back."""

    link: str
    direction: str
    start_ns: int
    end_ns: int
    nbytes: int
    label: str


@dataclass
class Site:
    """Shared by all devices of one platform.

    `invalid` collects reasons why numbers of this run must not be believed (a promise of the emulator that was broken).
    `followers` and `settling` belong to queues.py: the calls that are due because a command has ended.
    """

    clock: Clock = field(default_factory=VirtualClock)
    observers: list[Callable[[Completion], None]] = field(default_factory=list)
    arrivals: list[Callable[[Completion], None]] = field(default_factory=list)
    """Called with every completion when its command has been queued."""
    link_observers: list[Callable[[Occupancy], None]] = field(default_factory=list)
    checker: HazardChecker | None = None
    links: dict[str, LinkMeter] = field(default_factory=dict)
    loads: dict[str, LoadMeter] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    lateness: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Per device and queue of emulated work on the wall clock: how many commands ended at most 2**k ns late."""
    interference: float = 0.0
    """What the emulators' own traffic takes of the bandwidth of the host's memory, from 0 to 1, on the wall clock."""
    restarts: list[Callable[[], None]] = field(default_factory=list)
    """Called when a new account begins: what was promised is judged from then on."""
    followers: deque[tuple[Callable[[Completion], None], Completion]] = field(default_factory=deque, repr=False)
    settling: bool = field(default=False, repr=False)
    outside: Site | None = field(default=None, repr=False)
    """For the site of a device that stands inside a wrapper: the platform's."""

    def late_ns(self, share: float) -> int:
        """What that share of all commands on emulated queues was at most late by, rounded up to a power of two."""
        counts = [sum(column) for column in zip(*self.lateness.values(), strict=True)]
        wanted, seen = share * sum(counts), 0
        for bucket, count in enumerate(counts):
            seen += count
            if seen >= wanted:
                return 1 << bucket
        return 0

    def inside(self) -> Site:
        """The site on which to open a device that a wrapper will stand around.

        Clock, links, what devices share and what makes a run invalid are those of this site, but nobody watches its
        completions and no checker sees them: the wrapper has completions of its own for the same commands.
        """
        if self.outside is not None:
            return self
        return Site(
            clock=self.clock,
            link_observers=self.link_observers,
            links=self.links,
            loads=self.loads,
            shared=self.shared,
            invalid=self.invalid,
            lateness=self.lateness,
            restarts=self.restarts,
            outside=self,
        )
