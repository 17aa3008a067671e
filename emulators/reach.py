"""What an executor gets at memories with: the way to each of them, and what its queues share."""

from __future__ import annotations

from tierloop.devices.platform_file import Hop
from tierloop.emulators.fabric import CommandProcessor, Fabric, Medium
from tierloop.emulators.parts import ExecutorProfile
from tierloop.emulators.timing import NS, Mix, Route


class Reach:
    """How an executor gets at one memory: the resources that a byte occupies, the links, the latency.

    `away_ns` is the latency without that of a memory with curves, undilated: what an access takes on the way to it.
    """

    def __init__(self, memory: str, medium: Medium | None, fabric: Fabric, hops: tuple[Hop, ...], weight: int) -> None:
        self.memory = memory
        self.hops = hops
        self.read_legs = fabric.legs(hops, write=False)
        self.write_legs = fabric.legs(hops, write=True)
        links_ns = sum(link.latency_ns for link, _ in self.read_legs)
        idle_ns = medium.profile.latency_ns if medium is not None else 0
        self.latency_ns = (links_ns + idle_ns) * fabric.dilation
        self.read = [link.forward if way == "forward" else link.back for link, way in self.read_legs]
        self.write = [link.forward if way == "forward" else link.back for link, way in self.write_legs]
        self.loaded = medium.loaded if medium is not None else None
        self.resource = medium.resource if medium is not None else -1
        self.away_ns = links_ns + (0 if self.loaded is not None else idle_ns)
        if medium is not None and medium.firmware is None:
            self.read.append((medium.resource, medium.read_units))
            self.write.append((medium.resource, medium.write_units))
        self.firmware = medium.firmware if medium is not None else None
        self.one_flow = not hops and self.read == self.write and self.loaded is None
        capacity = fabric.flows.capacity
        self.read_route = Route(self.read, capacity, weight, self.read_legs, self.mixes(1, 0))
        self.write_route = Route(self.write, capacity, weight, self.write_legs, self.mixes(0, 1))

    def mixes(self, read: int, written: int) -> tuple[Mix, ...]:
        """What so many bytes read and written per unit of work mean to the memory's curves, if it has any."""
        return ((self.resource, self.loaded, read, written),) if self.loaded is not None else ()


class Engine:
    """What all queues of one executor share: its arithmetic, its copy engine, its command processor."""

    def __init__(self, fabric: Fabric, profile: ExecutorProfile) -> None:
        flows = fabric.flows
        self.arithmetic = flows.add(NS)
        self.copies = [(flows.add(profile.bytes_per_s), 1)] if profile.bytes_per_s else []
        self.processor = CommandProcessor(profile.issue_ns * fabric.dilation) if profile.issue_ns else None
