"""Two devices that take as long as a command has bytes, for tests of what observes completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierloop.devices.commands import Command, Copy, Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate
from tierloop.devices.errors import MediaError
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.platform import Platform
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.runtime.ledger import Ledger

FAR = 1 << 60
"""A deadline that no test reaches, in ns."""


class TimedDevice:
    """Takes as many ns as a command has bytes, holds no bytes, and fails the commands that it is told to fail."""

    def __init__(self, name: str, site: Site, reaches: Sequence[str], dilation: int = 1) -> None:
        paths = tuple(Path(memory, 0, 1, 1) for memory in reaches)
        executor = ExecutorInfo("dma", "dma", (0, 1), frozenset({"read", "write", "copy", "flush"}), paths=paths)
        self.info = DeviceInfo(name, "null", "emulated", (MemoryInfo(name, 1 << 40),), (executor,), dilation=dilation)
        self.failing = False
        self.media_nbytes = self.cached_nbytes = 0
        self._site = site
        self._queues = QueueSet(name, 2, 4096, site, self._start)

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        return Region(self.info.name, self.info.name, 0, nbytes, phantom)

    def free(self, region: Region) -> None:
        region.freed = True

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return self._queues.submit(command, queue, after, Traffic(command))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        return Estimate(1, 0, "test")

    def poll(self) -> None:
        return

    def close(self) -> None:
        self._queues.close()

    def _start(self, completion: Completion) -> None:
        traffic = completion.traffic
        nbytes = max([0, *traffic.read.values(), *traffic.written.values()])
        completion.media_nbytes, completion.cached_nbytes = self.media_nbytes, self.cached_nbytes
        error = MediaError(self.info.name, "copy", "told to fail") if self.failing else None
        self._site.clock.call_at(self._site.clock.now() + nbytes, self._queues.finish, completion, error)


@dataclass
class Meter:
    name: str = "wire"
    bytes_forward: int = 0
    bytes_back: int = 0
    busy_ns: int = 0


@dataclass
class Bench:
    """Two devices, `near` and `far`; both reach both memories."""

    dilation: int = 1
    site: Site = field(default_factory=Site)

    def __post_init__(self) -> None:
        self.near, self.far = (TimedDevice(n, self.site, ("near", "far"), self.dilation) for n in ("near", "far"))
        self.platform = Platform(
            "bench", self.site, {"near": self.near, "far": self.far}, host="near", dilation=self.dilation
        )
        self.site.links["wire"] = Meter()
        self.ledger = Ledger(self.platform)
        self.site.observers.append(self.ledger)

    def segment(self, device: str, nbytes: int) -> Segment:
        return Region(device, device, 0, nbytes).all()

    def copy(self, source: str, target: str, nbytes: int) -> Copy:
        return Copy(self.segment(source, nbytes), self.segment(target, nbytes))

    def run_to_end(self, completions: list[Completion]) -> None:
        assert self.site.clock.run_until(lambda: all(c.done for c in completions), FAR)
