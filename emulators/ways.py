"""The ways of one executor: to each memory, between two of them, and by accesses that wait.

Routes are made when they are first asked for. Who reaches all members of an interleave set reaches the set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.info import Path
from tierloop.devices.kernels.contract import LINE_NBYTES
from tierloop.devices.platform_file import Hop
from tierloop.devices.regions import Segment
from tierloop.emulators.fabric import Fabric, Job, Leg
from tierloop.emulators.parts import ExecutorProfile, lines_of
from tierloop.emulators.reach import Engine, Reach
from tierloop.emulators.spread import SetReach
from tierloop.emulators.timing import NS, WINDOW, Mix, Route
from tierloop.firmware_models.media import NOTHING, Ranges

Way = tuple[str, str]
"""Source and target of a transfer: names of memories, "" for host buffers on a platform without host memory."""


class Ways:
    """The ways of an executor's queues that have the same weight.

    `reach` has the memories that it reaches, `sets` the interleave sets, `transfers` by way the route, its latency and
    whether firmware runs a medium on it; `media` are those of the site, `own` is the device's memory ("": it has none).
    """

    def __init__(
        self,
        fabric: Fabric,
        profile: ExecutorProfile,
        own: str,
        reaches: dict[str, tuple[Hop, ...]],
        engine: Engine,
        weight: int,
    ) -> None:
        self.media = fabric.media
        self._capacity = fabric.flows.capacity
        self.profile = profile
        self.own = own
        self._sigma = fabric.dilation
        self._clock = fabric.clock
        self.weight = weight
        self._copies = engine.copies
        self.reach: dict[str, Reach] = {}
        own_reach: dict[str, tuple[Hop, ...]] = {own: ()} if own else {}
        for memory, hops in (own_reach | reaches).items():
            medium = self.media.get(memory)
            if medium is None and memory.startswith("emu:"):
                raise ConfigurationError(f"executor {profile.name} reaches {memory}, which is not open on this site")
            self.reach[memory] = Reach(memory, medium, fabric, hops, weight)
        self.sets = {
            name: SetReach(members, [self.reach[member] for member in members.members])
            for name, members in fabric.sets.items()
            if self.reach.keys() >= set(members.members)
        }
        host = fabric.topology.host
        if {"read", "write"} & profile.verbs and host and not {host} & (self.reach.keys() | self.sets):
            raise ConfigurationError(
                f"executor {profile.name} reads and writes host buffers, so it has to reach the host memory "
                f"{host}; it reaches {sorted(self.reach)}"
            )
        self.transfers: dict[Way, tuple[Route, int, bool]] = {}
        self._windows: dict[tuple[str, bool, int], Route] = {}

    def paths(self) -> tuple[Path, ...]:
        """What the executor's paths are worth to a scheduler, in the platform's clock (dilated)."""
        return tuple(
            Path(
                memory,
                reach.latency_ns,
                self._ceiling(reach, False) // self._sigma,
                self._ceiling(reach, True) // self._sigma,
                max(round(self.profile.mlp_lines[0][1] / WINDOW), 1) if self.profile.mlp_lines else 1,
                self.profile.coherence,
            )
            for memory, reach in (self.reach | self.sets).items()
        )

    def transfer(self, source: str, target: str) -> tuple[Route, int, bool]:
        """Route and latency of a transfer, and whether firmware runs a medium on it.

        "" stands for host buffers on a platform without host memory.
        """
        demands = list(self._copies)
        legs: tuple[Leg, ...] = ()
        moved: dict[str, list[int]] = {}
        latency_ns = 0
        on_firmware = False
        for memory, is_write in ((source, False), (target, True)):
            if not memory:
                continue
            reach = self.reach[memory]
            demands += reach.write if is_write else reach.read
            legs += reach.write_legs if is_write else reach.read_legs
            moved.setdefault(memory, [0, 0])[is_write] += 1
            latency_ns += reach.latency_ns
            on_firmware = on_firmware or reach.firmware is not None
        mixes = tuple(
            mix for memory, (read, written) in moved.items() for mix in self.reach[memory].mixes(read, written)
        )
        route = Route(demands, self._capacity, self.weight, legs, mixes)
        self.transfers[source, target] = (route, latency_ns, on_firmware)
        return self.transfers[source, target]

    def dependent(
        self,
        demands: Sequence[tuple[int, int]],
        legs: tuple[Leg, ...],
        mixes: tuple[Mix, ...],
        window: int,
        reaches: Sequence[Reach],
    ) -> Route:
        """A route on which accesses wait for the latency of these memories, with a window."""
        away_ns = sum(reach.away_ns for reach in reaches)
        waits = tuple({reach.resource: None for reach in reaches if reach.loaded is not None})
        return Route(demands, self._capacity, self.weight, legs, mixes, window, away_ns, waits)

    def window(self, nbytes: int, spans: int) -> int:
        """Bytes under way, in thousandths: lines by the size of a span, never more than there are."""
        lines = lines_of(self.profile.mlp_lines, nbytes // spans)
        return min(lines * LINE_NBYTES, nbytes * WINDOW)

    def small(self, memory: str, is_write: bool, window: int) -> Route:
        """The route of accesses that wait for the latency of a memory."""
        place = (memory, is_write, window)
        route = self._windows.get(place)
        if route is None:
            reach = self.reach[memory]
            plain = reach.write_route if is_write else reach.read_route
            route = self.dependent(plain.demands, plain.legs, plain.mixes, window, [reach])
            self._windows[place] = route
        return route

    def access(self, job: Job, memory: str, reads: Ranges, writes: Ranges, latency_ns: int, commit: bool) -> None:
        medium = self.media[memory]
        firmware = medium.firmware
        assert firmware is not None
        if medium.timed is not None:
            medium.timed.advance(self._clock.now() // self._sigma)
        work = firmware.access(reads, writes) if commit else firmware.plan(reads, writes)
        if work.alone_ns:
            job.demands.append((medium.route, work.alone_ns * work.share, work.share * NS, latency_ns))
        if memory == self.own:
            job.media_nbytes += work.nbytes
        job.fault = job.fault or work.fault

    def ranges(self, segments: Sequence[Segment]) -> Ranges:
        if not segments:
            return NOTHING
        media = self.media
        parts = [media[region.memory].store.ranges(region, spans) for region, spans in segments]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ceiling(self, reach: Reach | SetReach, write: bool) -> int:
        if isinstance(reach, SetReach):
            return reach.ceiling(self._capacity, write)
        demands = reach.write if write else reach.read
        rates = [self._capacity[r] // units for r, units in demands]
        if reach.firmware is not None:
            rates.append(reach.firmware.ceiling(write))
        if not self.profile.kernels and self.profile.bytes_per_s:
            rates.append(self.profile.bytes_per_s)
        return min(rates, default=0)
