"""Delayed: a device whose commands all take longer by a latency, and some by a longer one.

Each kind of command has a `Latency`: usually `ns`, and for one command in a hundred `p99_ns` instead. Which ones is
drawn from the seed, in the order in which commands begin. The latency passes before the device inside is let in, so
effects appear at the end. It occupies nothing: commands of different queues wait at the same time, those of one queue
one after the other, as always. Under σ, latencies are multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write
from tierloop.devices.device import Device, Estimate
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.info import DeviceInfo, Path
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import Around, Held
from tierloop.devices.wrappers.limits import check_whole

LATENCIES = (0, 10**10)
"""Allowed latencies in ns: up to 10 s."""
_ONE_IN = 100


@dataclass(frozen=True)
class Latency:
    """`ns` for most commands, `p99_ns` (left out: the same) for one in a hundred. Raises ConfigurationError."""

    ns: int = 0
    p99_ns: int | None = None

    def __post_init__(self) -> None:
        for number in (self.ns, self.tail_ns):
            check_whole("latency", number, *LATENCIES, unit=" ns")
        if self.tail_ns < self.ns:
            raise ConfigurationError(f"latency: p99_ns {self.p99_ns} is below ns {self.ns}")

    @property
    def tail_ns(self) -> int:
        """What one command in a hundred takes."""
        return self.ns if self.p99_ns is None else self.p99_ns

    def __str__(self) -> str:
        return f"{self.ns} ns" if self.tail_ns == self.ns else f"{self.ns} ns (p99 {self.tail_ns} ns)"


def slower(one: Latency, other: Latency) -> Latency:
    """The larger of each."""
    return Latency(max(one.ns, other.ns), max(one.tail_ns, other.tail_ns))


class Delayed(Around):
    """Latency by kind of command. Left out: copy and launch the slower of read and write, flush that of write."""

    def __init__(
        self,
        device: Device,
        site: Site,
        read: Latency,
        write: Latency,
        copy: Latency | None = None,
        launch: Latency | None = None,
        flush: Latency | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(device, site)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigurationError(f"delayed: seed {seed!r}; allowed: a whole number from 0")
        both = slower(read, write)
        self._latencies: dict[type, Latency] = {
            Read: read,
            Write: write,
            Copy: both if copy is None else copy,
            Launch: both if launch is None else launch,
            Flush: write if flush is None else flush,
        }
        self._random = np.random.Generator(np.random.PCG64(seed))
        self.what = "delayed by " + ", ".join(
            f"{kind.__name__.lower()} {latency}" for kind, latency in self._latencies.items()
        )

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """With the usual latency; the margin covers the longer one, and around another wrapper what waits there."""
        inner = self.inner.estimate(command, queue)
        latency, sigma = self._latencies[type(command)], self.info.dilation
        margin = inner.margin_ns + (latency.tail_ns - latency.ns) * sigma
        duration = inner.duration_ns + latency.ns * sigma
        margin = max(margin, duration) if isinstance(self.inner, Around) else margin
        return Estimate(duration, margin, f"{inner.source}; {self.what}")

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        info = super()._describe(inner)
        executors = tuple(
            replace(e, paths=tuple(self._slowed(path, info.dilation) for path in e.paths)) for e in info.executors
        )
        return replace(info, executors=executors, slowed=(*info.slowed, self.what))

    def _slowed(self, path: Path, sigma: int) -> Path:
        return replace(path, latency_ns=path.latency_ns + self._latencies[Read].ns * sigma)

    def _begin(self, held: Held) -> None:
        assert held.inner is not None
        latency = self._latencies[type(held.inner.command)]
        rare = self._random.integers(_ONE_IN) == 0  # drawn for every command: a changed latency moves no other draw
        wait_ns = (latency.tail_ns if rare else latency.ns) * self.info.dilation
        if wait_ns:
            self._clock.call_at(self._clock.now() + wait_ns, self._release, held)
        else:
            self._release(held)
