"""Faulty: a device that fails on request, or now and then from a seed.

On request it is the back door of the conformance suite's fault level (devices/faulty_host.py), for devices that have
none of their own: `unreadable` bytes end whatever reads them with a MediaError until they are freed, `hang` keeps the
next command from coming back until its deadline, after which the device is Gone as a real one would be, and `unplug`
takes the device away.

Now and then: so many of a million commands that read, or that write, end with an error that is *recoverable*. Nothing
was carried out, the device works on, and the same spans are not failed again before a command on them has gone through:
whoever tries once more succeeds. Which ones is drawn from the seed in the order in which commands begin. Nobody has to
try again; a run that ends well has the same bits as one without failures, and any other ends with this error.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tierloop.devices.commands import Command, read_segments, verb, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.errors import Cancelled, DeviceError, Gone, MediaError, Timeout
from tierloop.devices.faulty_host import ABILITIES, Ability, offer
from tierloop.devices.info import DeviceInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import Around, Held
from tierloop.devices.wrappers.limits import check_whole

MILLION = 1_000_000
DEADLINES = (1, 10**12)
"""Allowed deadlines in ns."""


class Faulty(Around):
    """`read_per_million`, `write_per_million` commands fail once; `deadline_ns` is when one that hangs is given up."""

    abilities: frozenset[Ability] = frozenset(ABILITIES)
    grain_nbytes = 1

    def __init__(
        self,
        device: Device,
        site: Site,
        read_per_million: int = 0,
        write_per_million: int = 0,
        seed: int = 0,
        deadline_ns: int = 1_000_000_000,
    ) -> None:
        super().__init__(device, site)
        for name, number, most in (
            ("read_per_million", read_per_million, MILLION),
            ("write_per_million", write_per_million, MILLION),
            ("seed", seed, 2**63 - 1),
        ):
            check_whole(f"faulty: {name}", number, 0, most)
        check_whole("faulty: deadline_ns", deadline_ns, *DEADLINES)
        self._shares = {"read": read_per_million, "write": write_per_million}
        self._deadline_ns = deadline_ns
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._lost: dict[Region, list[tuple[int, int]]] = defaultdict(list)
        self._failed_before: set[tuple[Region, int, int]] = set()
        self._hanging = False
        self._gone = ""
        self.failed = 0
        """Commands that were failed by the seed so far."""
        self.what = f"failing once {read_per_million} reads and {write_per_million} writes of a million"

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        offer(self._site, inner.name, self)
        return super()._describe(inner)

    # -- the back door -----------------------------------------------------------------------------------------------

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        """Whatever reads one of these bytes fails from now on, until the region is freed."""
        self._lost[region].append((offset, offset + nbytes))

    def hang(self) -> None:
        """The next command does not come back."""
        self._hanging = True

    def unplug(self) -> None:
        """From now on everything is gone; what is under way inside is not waited for."""
        self._gone = "it was pulled out"

    # -- the way of a command -----------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate on the device inside. Raises Gone as well."""
        self._there("alloc")
        return self.inner.alloc(nbytes, memory, phantom)

    def free(self, region: Region) -> None:
        """Free on the device inside, with what was unreadable of it. Raises Gone as well."""
        self._there("free")
        self.inner.free(region)
        self._lost.pop(region, None)
        self._failed_before = {key for key in self._failed_before if key[0] is not region}

    def _accept(self, command: Command, queue: int, after: tuple[Completion, ...]) -> Held:  # type: ignore[override]  # a sequence of them
        self._there(verb(command))
        return super()._accept(command, queue, after)

    def _begin(self, held: Held) -> None:
        assert held.inner is not None
        command = held.inner.command
        if self._hanging:
            self._hanging = False
            self._clock.call_at(self._clock.now() + self._deadline_ns, self._given_up, held)
            return
        error = self._fault(command)
        if error is not None:
            self._end(held, error)
        else:
            self._release(held)

    def _settle(self, held: Held) -> None:
        assert held.inner is not None
        if held.note is not None:  # it was not let through
            self._end(held, held.note)
        elif self._gone:
            self._end(held, Gone(self._name, verb(held.inner.command), self._gone))
        else:
            self._finish(held)

    def _given_up(self, held: Held) -> None:
        if held.completion is not None and held.inner is not None:
            self._gone = self._gone or "a command did not come back"
            detail = f"no answer within {self._deadline_ns} ns"
            self._end(held, Timeout(self._name, verb(held.inner.command), detail))

    def _fault(self, command: Command) -> DeviceError | None:
        """What goes wrong with a command whose turn has come."""
        op = verb(command)
        if self._gone:
            return Gone(self._name, op, self._gone)
        reads, writes = read_segments(command), write_segments(command)
        for segment in reads:
            lost = self._lost_in(segment)
            if lost is not None:
                return MediaError(self._name, op, f"[{lost[0]}, {lost[1]}) of {segment.region} cannot be read")
        draws = self._random.integers(MILLION, size=2)  # for every command: a changed share moves no other draw
        for kind, segments, draw in (("read", reads, draws[0]), ("write", writes, draws[1])):
            named = [(s.region, o, n) for s in segments for o, n in s.spans.array.tolist()]
            keys = set(named)
            if keys & self._failed_before:
                self._failed_before -= keys
            elif draw < self._shares[kind] and keys:
                self._failed_before |= keys
                self.failed += 1
                region, first, nbytes = named[0]
                where = f"[{first}, {first + nbytes}) of {region}" + (
                    f" and {len(named) - 1} more" if named[1:] else ""
                )
                return MediaError(
                    self._name, op, f"a {kind} of {where} failed; nothing was carried out, and the next try succeeds"
                )
        return None

    def _lost_in(self, segment: Segment) -> tuple[int, int] | None:
        for first, end in self._lost.get(segment.region, ()):
            spans = segment.spans.array
            if ((spans[:, 0] < end) & (spans[:, 0] + spans[:, 1] > first) & (spans[:, 1] > 0)).any():
                return first, end
        return None

    def _end(self, held: Held, error: DeviceError) -> None:
        """End a command that is not let through, or whose answer does not count."""
        completion = held.completion
        if completion is None or completion.done:  # its observers may be told only later
            return
        held.note = error
        if held.gate is not None and not held.gate.done:  # what is cancelled inside may settle, and so end, at once
            held.gate.open(self._clock.now(), Cancelled(self._name, error.op, "it was not let through"))
        if not completion.done:
            self._queues.finish(completion, error)

    def _there(self, op: str) -> None:
        if self._gone:
            raise Gone(self.info.name, op, self._gone)
