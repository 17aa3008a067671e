"""Loads: the traffic of other hosts on a memory that is shared, as seeded bursts on the platform's clock.

`[loads.NAME]` of a platform file says how much. A load is a queue of bursts, each a flow like any other: it shares
medium and links with the commands of the platform by max-min fairness, one burst at a time, so a load counts as one
user of the medium, however far behind it is. Of bursts that cannot begin at once `BACKLOG` wait; further ones do not
come, as hosts whose requests are not answered send no more.

- *regular* bursts come every burst_nbytes / bytes_per_s from the start on, *poisson* ones after gaps of that mean,
  exponentially distributed;
- *on-off* traffic comes at twice the rate half of the time: 1 to 31 regular bursts, then silence for as long as 1 to 31
  of them, both drawn evenly.

Reads and writes take turns as `read_fraction` says, evenly spread. Random numbers come from a stream of its own (seed
and name), and are compared and added only: the same bursts come on every machine, whatever else is opened.

A load begins when its memory is opened and ends when that is closed. What it has moved is in `site.loads`; no device's
account has it, links that it crosses count it with the rest that they carry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform_file import LoadSpec
from tierloop.emulators.fabric import Fabric, Job, Medium
from tierloop.emulators.reach import Reach
from tierloop.emulators.timing import FAR, NS, Route

if TYPE_CHECKING:
    from tierloop.devices.completion import Completion

BACKLOG = 16
"""Bursts that wait."""
_PHASE = 31
"""The longest phase of on-off traffic, in bursts."""
_ONE = 1 << 53
"""The mean gap in the integers that exponential gaps are drawn in."""


class Burst(Job):
    """One burst under way. It stands for its own completion: the fabric asks only when it started."""

    __slots__ = ("is_read", "load", "started_ns")

    def __init__(self, load: Load, route: Route, nbytes: int, is_read: bool, now: int) -> None:
        super().__init__([(route, nbytes, FAR, 0)], 0)
        self.load = load
        self.is_read = is_read
        self.started_ns = now

    def label(self) -> str:
        """What the trace calls it."""
        return f"load {self.load.name}"


class Load:
    """One load on an open memory, and its meter: whole bursts that were read and written, and those that came."""

    def __init__(self, spec: LoadSpec, fabric: Fabric, medium: Medium) -> None:
        if medium.firmware is not None:
            raise ConfigurationError(
                f"loads.{spec.name}: firmware runs the medium of {spec.memory}; a load needs one with rates of its own"
            )
        self.name = spec.name
        self.memory = spec.memory
        self.bytes_read = 0
        self.bytes_written = 0
        self.busy_ns = 0
        self.offered_nbytes = 0
        reach = Reach(spec.memory, medium, fabric, spec.over, 1)
        self._routes = (reach.write_route, reach.read_route)
        self._spec = spec
        self._fabric = fabric
        self._clock = fabric.clock
        self._gaps = gaps(spec, fabric.dilation)
        self._at = fabric.clock.now()
        self._waiting = 0
        self._turn = 0
        self._burst: Burst | None = None
        self._stopped = False
        self._next()

    def stop(self) -> None:
        """The memory is closed: what is under way ends here, and nothing comes any more."""
        if not self._stopped:
            self._stopped = True
            self._waiting = 0
            if self._burst is not None:
                self._fabric.abandon(self._burst)

    def _next(self) -> None:
        self._at += next(self._gaps)
        self._clock.call_at(self._at, self._arrive)

    def _arrive(self) -> None:
        if self._stopped:
            return
        self.offered_nbytes += self._spec.burst_nbytes
        if self._burst is None:
            self._begin()
        elif self._waiting < BACKLOG:
            self._waiting += 1
        self._next()

    def _begin(self) -> None:
        self._turn += self._spec.reads_per_1000
        is_read = self._turn >= 1000
        if is_read:
            self._turn -= 1000
        burst = Burst(self, self._routes[is_read], self._spec.burst_nbytes, is_read, self._clock.now())
        self._burst = burst
        itself: Completion = burst  # type: ignore[assignment]  # see there
        self._fabric.begin(burst, itself, self._ended)

    def _ended(self, burst: Job) -> None:
        assert isinstance(burst, Burst)
        self.busy_ns += sum(flow.finish - flow.start for flow in burst.flows)
        self._fabric.settle(burst)
        if burst.is_read:
            self.bytes_read += self._spec.burst_nbytes
        else:
            self.bytes_written += self._spec.burst_nbytes
        self._burst = None
        if self._waiting:
            self._waiting -= 1
            self._begin()


def start_loads(fabric: Fabric, medium: Medium) -> list[Load]:
    """Begin the loads of a memory that is being opened. Raises ConfigurationError where it cannot have any."""
    loads = [
        Load(spec, fabric, medium) for spec in fabric.topology.loads if spec.memory == medium.name and spec.bytes_per_s
    ]
    fabric.site.loads.update((load.name, load) for load in loads)
    return loads


def gaps(spec: LoadSpec, dilation: int = 1) -> Iterator[int]:
    """The time from each burst to the next in ns, the first from the start on; rounded down, without losing time."""
    digest = hashlib.sha256(spec.name.encode()).digest()
    random = np.random.default_rng([spec.seed, int.from_bytes(digest[:8], "little")])
    mean = spec.burst_nbytes * NS * dilation
    draw, parts = {"regular": (_regular, 1), "poisson": (_exponential, _ONE), "on-off": (_phases, 2)}[spec.arrivals]
    per = spec.bytes_per_s * parts
    left = 0
    for units in draw(random):
        gap, left = divmod(left + units * mean, per)
        yield gap


def _regular(_: np.random.Generator) -> Iterator[int]:
    yield 0
    while True:
        yield 1


def _phases(random: np.random.Generator) -> Iterator[int]:
    """In halves of the mean gap."""
    silence = 0
    while True:
        bursts, quiet = random.integers(1, _PHASE, 2, endpoint=True).tolist()
        yield silence
        yield from [1] * (bursts - 1)
        silence = 1 + quiet


def _exponential(random: np.random.Generator) -> Iterator[int]:
    """In 2⁻⁵³ of the mean gap, by von Neumann's method: comparisons of uniform numbers, no logarithm of any machine's.

    A first number and a run of ever smaller ones after it: if the run with the first has an odd length, it is the
    fraction; each run of even length before that counts one.
    """
    while True:
        whole = 0
        while True:
            first = last = random.random()
            length = 1
            while (number := random.random()) < last:
                last = number
                length += 1
            if length % 2:
                break
            whole += 1
        yield whole * _ONE + int(first * _ONE)  # a whole number: the generator's floats are multiples of 2⁻⁵³
