"""The fabric: what the emulated devices of one platform share. Media, links, jobs in flight, and the way to bytes.

There is one fabric per site, made by the first emulated device. It turns the provisional finishes of the timing
transition into calls on the platform's clock: a *job* is a command under way, made of flows that end independently; it
is due when the last of them has ended and its latency has passed. Time goes as in timing.py under both clocks; on the
wall clock a late wake-up does not move the model, because flows leave at the times at which they really end.

Links are metered: bytes when a job has ended, busy time until now as the union over both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Launch, verb
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform_file import Hop, LinkSpec, Topology
from tierloop.devices.regions import Region
from tierloop.devices.site import Occupancy, Site
from tierloop.emulators.loaded import WHOLE as WHOLE_READS
from tierloop.emulators.loaded import LoadedMedium
from tierloop.emulators.parts import MemoryProfile
from tierloop.emulators.store import Store
from tierloop.emulators.timing import FAR, NS, Flow, Flows, Route
from tierloop.firmware_models.media import WHOLE, Firmware, Timed

if TYPE_CHECKING:  # it compiles on import, and on the virtual clock nothing keeps a pace
    from tierloop.devices.kernels.pace import Pace
    from tierloop.emulators.interleave import InterleavedDevice


class Link:
    """A link's meter, and the resources of its two directions (the same one twice if it is half duplex)."""

    __slots__ = (
        "_busy_ns",
        "_clock",
        "_until",
        "back",
        "bytes_back",
        "bytes_forward",
        "forward",
        "latency_ns",
        "name",
        "spec",
    )

    def __init__(self, spec: LinkSpec, flows: Flows, clock: Clock) -> None:
        self._clock = clock
        self.name = spec.name
        self.spec = spec
        self.latency_ns = spec.latency_ns
        self.bytes_forward = 0
        self.bytes_back = 0
        self._busy_ns = 0  # with what is still to come of the flows that are on the link now
        self._until = 0
        if spec.duplex == "full":
            self.forward = (flows.add(spec.forward_bytes_per_s), 1)
            self.back = (flows.add(spec.back_bytes_per_s), 1)
        else:
            wire, forward, back = _two_rates(flows, spec.forward_bytes_per_s, spec.back_bytes_per_s)
            self.forward, self.back = (wire, forward), (wire, back)

    @property
    def busy_ns(self) -> int:
        """How long the link has been busy until now."""
        return self._busy_ns - max(self._until - self._clock.now(), 0)

    def extend(self, now: int, until: int) -> None:
        """A flow occupies the link from now on until (provisionally) `until`."""
        if now >= self._until:
            self._busy_ns += until - now
            self._until = until
        elif until > self._until:
            self._busy_ns += until - self._until
            self._until = until

    def revise(self, flows: Flows, now: int) -> None:
        """Finishes of flows on this link have moved: it is busy until the last of them."""
        users = flows.users[self.forward[0]] + flows.users[self.back[0]]
        until = max((flow.finish for flow in users), default=now)
        self._busy_ns += until - self._until
        self._until = until


Leg = tuple[Link, str]
"""A link and the direction in which data goes over it."""


class Medium:
    """A memory as the fabric sees it: its store, and the resource that its accesses share.

    A byte read costs `read_units` of the resource and a byte written `write_units`; both are 0 where firmware runs the
    medium and says how long it is busy, which is then work on `route`. `timed` is that firmware if it has to be told
    the time.
    """

    def __init__(
        self, name: str, profile: MemoryProfile, store: Store, firmware: Firmware | None, flows: Flows
    ) -> None:
        self.name = name
        self.profile = profile
        self.store = store
        self.firmware = firmware
        self.timed = firmware if isinstance(firmware, Timed) and firmware.timed else None
        self.loaded: LoadedMedium | None = None
        if profile.curves is not None:
            curves = profile.curves
            self.resource, *units = _two_rates(flows, curves.cap(WHOLE_READS), curves.cap(0))
            self.read_units, self.write_units = units
            self.loaded = LoadedMedium(curves, flows.capacity[self.resource], *units)
        elif firmware is None:
            self.resource, *units = _two_rates(flows, profile.read_bytes_per_s, profile.write_bytes_per_s)
            self.read_units, self.write_units = units
        else:
            self.resource = flows.add(WHOLE * NS)
            self.read_units = self.write_units = 0
        self.route = Route([(self.resource, 1)], flows.capacity)


class CommandProcessor:
    """What takes the commands of all queues of an executor, in the order of their coming, `issue_ns` each."""

    __slots__ = ("free_at", "issue_ns")

    def __init__(self, issue_ns: int) -> None:
        self.issue_ns = issue_ns
        self.free_at = 0

    def end(self, now: int) -> int:
        """When a command that comes now would be through."""
        return max(now, self.free_at) + self.issue_ns


Demand = tuple[Route, int, int, int]
"""One flow of a job: route, units of work, at most so many units/s, and the latency in ns once it has ended.

Work on a route with links is bytes. (A plain tuple: a named one costs 0.4 µs more, of the 10 that a command may cost.)
"""


class Job:
    """A command: what it costs, made by costs.py, and what becomes of it once `Fabric.begin` has begun it.

    `demands` are its flows, and `fixed_ns` comes after all of them. `flops` is what its kernel computes, `media_nbytes`
    what firmware-run media of the executor's device move, `fault` why it will fail ("" if it will not), `idle` that it
    has nothing to move or compute. It is `due` when the last flow has ended and its latency has passed, and `over` when
    its end was called. `future` and `outcome` are the device's: its work on a thread, and what came of it. `pace` is
    told when the end moves, if it keeps one; what its kernel has written may be kept `aside` until it is due. Its flows
    begin when it has passed its `processor`, which may be `slip_ns` late on the wall clock. Its end is called `lead_ns`
    before it is due, where ending it takes time.
    """

    __slots__ = (
        "aside",
        "completion",
        "demands",
        "due",
        "end",
        "event",
        "fault",
        "fixed_ns",
        "flops",
        "flows",
        "future",
        "idle",
        "lead_ns",
        "media_nbytes",
        "outcome",
        "over",
        "pace",
        "processor",
        "slip_ns",
    )

    completion: Completion
    end: Callable[[Job], None]
    due: int

    def __init__(self, demands: list[Demand], fixed_ns: int, flops: int = 0) -> None:
        self.demands = demands
        self.fixed_ns = fixed_ns
        self.flops = flops
        self.media_nbytes = 0
        self.fault = ""
        self.idle = False
        self.flows: list[Flow] = []
        self.event = FAR
        self.over = False
        self.future: Any = None
        self.outcome: Any = None
        self.pace: Pace | None = None
        self.aside: list[Any] = []
        self.processor: CommandProcessor | None = None
        self.slip_ns = 0
        self.lead_ns = 0

    def label(self) -> str:
        """What the trace calls it."""
        command = self.completion.command
        dense = isinstance(command, Launch) and isinstance(command.args, Dense)
        name = command.args.label if dense else verb(command)  # type: ignore[union-attr]
        return f"{self.completion.device} {name}"


class Regions(dict[Region, NDArray[np.uint8] | None]):
    """The bytes of live emulated regions (None: phantom); for others, the host's own mapping of them."""

    def __missing__(self, region: Region) -> NDArray[np.uint8] | None:
        return region.view


class Fabric:
    """Shared by all emulated devices of a site; get it with `Fabric.of(site)`.

    `media` holds the open memories by name, `sets` the interleave sets made of them, and `regions` the bytes of their
    live regions; each of `users` says whether a device has a command under way that names a region.
    """

    def __init__(self, site: Site, topology: Topology) -> None:
        self.site = site
        self.clock = site.clock
        self.topology = topology
        self.dilation = topology.dilation
        self.flows = Flows(topology.dilation)
        self.media: dict[str, Medium] = {}
        self.sets: dict[str, InterleavedDevice] = {}
        self.regions = Regions()
        self.links = {name: Link(spec, self.flows, site.clock) for name, spec in topology.links.items()}
        self.users: list[Callable[[Region], bool]] = []
        self.has_lost = False
        """Whether any device was closed: commands of others may name regions that it had."""
        self._passing: dict[Job, int] = {}  # in a command processor, and until when
        self._tick_at = FAR
        site.links.update(self.links)  # type: ignore[arg-type]  # busy_ns is worked out when it is asked for

    @classmethod
    def of(cls, site: Site) -> Fabric:
        """The site's fabric, made when it is first asked for."""
        if "fabric" not in site.shared:
            site.shared["fabric"] = cls(site, site.shared.get("topology", Topology()))
        fabric = site.shared["fabric"]
        assert isinstance(fabric, Fabric)
        return fabric

    def legs(self, route: tuple[Hop, ...], write: bool) -> tuple[Leg, ...]:
        """The links of a route with the direction in which data goes: along the route if it is written."""
        legs = []
        for name, direction in route:
            if name not in self.links:
                raise ConfigurationError(f"reaches: no link {name!r}; {nearest(name, list(self.links))}")
            back = "back" if direction == "forward" else "forward"
            legs.append((self.links[name], direction if write else back))
        return tuple(legs)

    def begin(self, job: Job, completion: Completion, end: Callable[[Job], None]) -> None:
        """Start a job's flows when its command has started; `end` is called on the clock's thread when it is due."""
        now = completion.started_ns
        job.completion = completion
        job.end = end
        processor = job.processor
        if processor is None:
            self._begin_flows(job, now)
            return
        job.due = self.predict(job, now) + job.fixed_ns
        processor.free_at = through = processor.end(now)
        self._passing[job] = through
        self.clock.call_at(through, self._passed, job, through)

    def _passed(self, job: Job, through: int) -> None:
        """A command has passed the command processor. If this comes late, flows that are alone began on time."""
        if job.over:
            return
        del self._passing[job]
        now = self.clock.now()
        alone = all(self.flows.free(demand[0], through) for demand in job.demands)
        begun = through if alone else now
        job.slip_ns = now - begun
        self._begin_flows(job, begun)
        if job.pace is not None:
            job.pace.end_in(job.due - now)

    def _begin_flows(self, job: Job, now: int) -> None:
        due = now
        flows = self.flows
        if flows.shared:
            flows.advance(now)
            self._follow(now)
        for route, work, cap, latency_ns in job.demands:
            flow = flows.arrive(now, work, route, cap, latency_ns, job)
            job.flows.append(flow)
            finish = flow.finish
            if finish + latency_ns > due:
                due = finish + latency_ns
            for link, _ in route.legs:
                link.extend(now, finish)
        if flows.moved:
            self._follow(now)
        else:
            job.due = due + job.fixed_ns
            job.event = job.due - job.lead_ns
            self.clock.call_at(job.event, self._fire, job)
        if flows.shared:
            self._watch()

    def predict(self, job: Job, now: int) -> int:
        """When the last flow of a job would end, latency included, if it began now and nothing else came."""
        flows, demands = self.flows, job.demands
        if job.processor is not None:
            now = job.processor.end(now)
        used = [resource for demand in demands for resource in demand[0].resources]
        if not self._passing and len(set(used)) == len(used) and all(flows.free(demand[0], now) for demand in demands):
            ends = [now + d[0].ns(d[1] * self.dilation, d[2]) + d[3] for d in demands]
            return max(ends, default=now)
        twin = flows.copy()
        started: list[Flow] = []
        for at, coming in sorted(
            [*((through, other) for other, through in self._passing.items()), (now, job)], key=_at
        ):
            twin.advance(at)
            for route, work, cap, latency_ns in coming.demands:
                flow = twin.arrive(at, work, route, cap, latency_ns)
                if coming is job:
                    started.append(flow)
        while any(flow in twin.shared for flow in started):
            twin.advance(twin.next_departure())
        return max((flow.finish + flow.latency_ns for flow in started), default=now)

    def abandon(self, job: Job) -> None:
        """The job's device was closed: its flows leave now, and `end` is not called any more."""
        now = self.clock.now()
        self.flows.advance(now)
        for flow in job.flows:
            if flow.finish > now:
                self.flows.leave(flow, now)
        job.over = True
        self._passing.pop(job, None)
        for flow in job.flows:
            for link, _ in flow.route.legs:
                link.revise(self.flows, now)
        self._follow(now)

    def settle(self, job: Job) -> None:
        """Count what an ended job has moved over links, and let go of it: a circle of references would live on."""
        observers = self.site.link_observers
        for flow in job.flows:
            flow.owner = None
            for link, direction in flow.route.legs:
                if direction == "forward":
                    link.bytes_forward += flow.work
                else:
                    link.bytes_back += flow.work
                if observers and flow.work:
                    label = job.label()
                    stretch = Occupancy(link.name, direction, flow.start, flow.finish, flow.work, label)
                    for observe in observers:
                        observe(stretch)

    def _fire(self, job: Job) -> None:
        now = self.clock.now()
        if job.over or now < job.event:
            return
        if job.due - job.lead_ns > now:
            job.event = job.due - job.lead_ns
            self.clock.call_at(job.event, self._fire, job)
            return
        job.over = True
        job.end(job)

    def _follow(self, now: int) -> None:
        """Bring jobs and meters up to date with the flows that have moved."""
        moved, self.flows.moved = self.flows.moved, []
        jobs: dict[Job, None] = {}
        links: dict[Link, None] = {}
        for flow in moved:
            if flow.owner is not None and not flow.owner.over:
                jobs[flow.owner] = None
        for job in jobs:
            job.due = max(flow.finish + flow.latency_ns for flow in job.flows) + job.fixed_ns
            if job.pace is not None:
                job.pace.end_in(job.due - now)
            if job.due - job.lead_ns < job.event:
                job.event = job.due - job.lead_ns
                self.clock.call_at(job.event, self._fire, job)
            for flow in job.flows:
                links.update((link, None) for link, _ in flow.route.legs)
        for link in links:
            link.revise(self.flows, now)

    def _watch(self) -> None:
        departure = self.flows.next_departure()
        if departure < self._tick_at:
            self._tick_at = departure
            self.clock.call_at(departure, self._tick, departure)

    def _tick(self, at: int) -> None:
        if at != self._tick_at:
            return
        self._tick_at = FAR
        self.flows.advance(at)
        self._follow(at)
        self._watch()


def _at(arrival: tuple[int, Job]) -> int:
    return arrival[0]


def _two_rates(flows: Flows, one: int, other: int) -> tuple[int, int, int]:
    """A resource that is shared at two rates: its number and what a byte costs of it at each, in whole units."""
    if one == other:
        return flows.add(one), 1, 1
    common = math.lcm(one, other)
    return flows.add(common), common // one, common // other
