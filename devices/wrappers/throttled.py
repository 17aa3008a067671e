"""Throttled: a device whose commands together move no more bytes/s than it is told.

One resource stands for the whole device. Bytes that a command reads cost it 1 / read_bytes_per_s each, bytes that it
writes 1 / write_bytes_per_s, whatever memory they lie in and whatever command moves them; a copy does both, and a
`dense` launch reads weight_nbytes + activation_nbytes from its own memory, as it does on emulated devices. Commands
get the resource in the order in which their turns come, and a command ends when it has had its share, or when the
device inside has ended it, whichever is later.

The end is an absolute time, exact to the rounding of one: shares follow one another without a gap as long as there is
work, and time in which nothing was asked for is not saved for a burst. Where the host woke up late, the next command of
the queue begins at the time that was meant, so that lateness does not add up; it catches up by CATCH_UP_NS at most.

Under σ, rates are divided by it. An emulated device is let in so late that it ends when its share does, because its
effects have to appear at the end; a real one is let in as soon as the share begins.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tierloop.devices.commands import Command, Launch, Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device, Estimate
from tierloop.devices.errors import DeviceError
from tierloop.devices.info import DeviceInfo, Path
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import Around, Held
from tierloop.devices.wrappers.limits import check_whole

RATES = (1_000, 10**15)
"""Allowed rates in bytes/s: as for links, 1 kB/s to 1 PB/s."""
CATCH_UP_NS = 2_000_000
"""Debts of the host beyond 2 ms are forgotten: a device that has to catch up with more is not throttled any more."""
_NS = 1_000_000_000


class Throttled(Around):
    """At most `read_bytes_per_s` and `write_bytes_per_s` (the same if left out), shared by all queues."""

    def __init__(self, device: Device, site: Site, read_bytes_per_s: int, write_bytes_per_s: int | None = None) -> None:
        super().__init__(device, site)
        self._rates = (read_bytes_per_s, read_bytes_per_s if write_bytes_per_s is None else write_bytes_per_s)
        for rate in self._rates:
            check_whole("throttled:", rate, *RATES, unit=" bytes/s")
        self._unit = math.lcm(*self._rates)
        """Time is kept in 1/_unit ns, so that no share is rounded."""
        self._free = 0
        self._meant: dict[int, int] = {}
        """By queue: when its last command was meant to end."""
        self.what = f"throttled to {_gb(self._rates[0])} read and {_gb(self._rates[1])} written"

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """When the share would end, or the device inside if that is later.

        Exact under the virtual clock around a device. Around another wrapper, what waits in one of the two is not known
        to the other: the margin is all of it then.
        """
        inner = self.inner.estimate(command, queue)
        self.info  # noqa: B018  # settles dilation and names
        now = self._clock.now()
        begin, end = self._share(command, Traffic(command), now)
        duration = max(self._ns(end), self._ns(begin) + inner.duration_ns) - now
        margin = max(inner.margin_ns, duration) if isinstance(self.inner, Around) else inner.margin_ns
        return Estimate(duration, margin, f"{inner.source}; {self.what}")

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        info = super()._describe(inner)
        self._sigma = info.dilation
        self._emulated = info.provenance == "emulated"
        self._own = frozenset(memory.name for memory in info.memories)
        executors = tuple(replace(e, paths=tuple(self._slowed(path) for path in e.paths)) for e in info.executors)
        return replace(info, executors=executors, slowed=(*info.slowed, self.what))

    def _slowed(self, path: Path) -> Path:
        read, write = (rate // self._sigma for rate in self._rates)
        return replace(
            path,
            read_bytes_per_s=min(path.read_bytes_per_s or read, read),
            write_bytes_per_s=min(path.write_bytes_per_s or write, write),
        )

    def _begin(self, held: Held) -> None:
        assert held.inner is not None
        assert held.completion is not None
        command, now = held.inner.command, self._clock.now()
        begin, end = self._share(command, held.traffic, self._turn(held.completion, now))
        if end > begin:
            self._free = end
        held.due = self._ns(end)
        start = self._ns(begin)
        if self._emulated:
            start = max(start, held.due - self._alone_ns(command, held.inner.queue))
        if start > now:
            held.number = start
            self._clock.call_at(start, self._release, held)
        else:
            self._release(held)

    def _settle(self, held: Held) -> None:
        if held.due > self._clock.now():
            self._clock.call_at(held.due, self._finish, held)
        else:
            self._finish(held)

    def _release(self, held: Held) -> None:
        if held.number >= 0:
            held.number = self._clock.now() - held.number
        super()._release(held)

    def _finish(self, held: Held) -> None:
        if held.inner is not None and held.completion is not None:
            now = self._clock.now()
            late_by_host = max(held.number, 0) + held.inner.overrun_ns
            punctual = held.inner.ended_ns <= held.due or now - held.due <= late_by_host
            self._meant[held.inner.queue] = held.due if punctual else now
            held.note = True
        super()._finish(held)

    def _ended(self, held: Held, completion: Completion) -> None:
        if not held.note:  # it was cancelled, at a time that has nothing to do with the command before it
            self._meant.pop(completion.queue, None)

    def _turn(self, completion: Completion, now: int) -> int:
        """When the command's turn came: now, or if it stood behind one that the host ended late, when that was due."""
        meant = self._meant.get(completion.queue, now)
        if completion.submitted_ns > meant or now - meant > CATCH_UP_NS:
            return now
        return max(meant, *(earlier.ended_ns for earlier in completion.after), completion.submitted_ns)

    def _alone_ns(self, command: Command, queue: int) -> int:
        try:
            return self.inner.estimate(command, queue).duration_ns
        except DeviceError:  # it will say so itself when it is let in
            return 0

    def _share(self, command: Command, traffic: Traffic, now: int) -> tuple[int, int]:
        """From when to when the command has the resource, in 1/_unit ns; without bytes it does not wait for it."""
        read, written = sum(traffic.read.values()), sum(traffic.written.values())
        if isinstance(command, Launch) and isinstance(command.args, Dense):
            for memory in self._own:
                read -= traffic.read.get(memory, 0)
                written -= traffic.written.get(memory, 0)
            read += command.args.weight_nbytes + command.args.activation_nbytes
        need = _NS * self._sigma * (read * (self._unit // self._rates[0]) + written * (self._unit // self._rates[1]))
        busy = now <= self._ns(self._free)  # what begins when the one before ended, rounded up, begins at its true end
        begin = self._free if need and busy else now * self._unit
        return begin, begin + need

    def _ns(self, units: int) -> int:
        return -(-units // self._unit)


def _gb(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
