"""A place to test the gpu driver: the unmodified driver on a stand-in for a GPU, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Command, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.gpu import GpuDevice
from tierloop.devices.drivers.gpu_options import Options
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.waiting import wait
from tierloop.emulators.host_accelerator import HostAccelerator

MIB = 1 << 20
SMALL: dict[str, Any] = {
    "capacity": 4 * MIB,
    "staging_nbytes": 8192,
    "staging_buffers": 2,
    "deadline_s": 1.0,
}
"""Options under which a few KiB fill every buffer, and what hangs does so for one second of virtual time."""


def host_region(nbytes: int, number: int = 0, fill: int = 0) -> Region:
    """A region of a host-mapped memory called dram, as a cpu device would allocate it."""
    return Region("dram", "dram", number, nbytes, view=np.full(nbytes, fill, dtype=np.uint8))


@dataclass
class Rig:
    """A GPU that has two queues for kernels (0, 1) and one for each copy engine (2, 3)."""

    accelerator: HostAccelerator = field(default_factory=HostAccelerator)
    options: dict[str, Any] = field(default_factory=dict)
    site: Site = field(default_factory=lambda: Site(clock=VirtualClock(), checker=HazardChecker()))

    def __post_init__(self) -> None:
        options = Options.of("gpu0", {**SMALL, "reaches": ["dram"], **self.options})
        self.device = GpuDevice("gpu0", self.site, options, self.accelerator)
        self.to, self.back = 2, 3

    def filled(self, data: NDArray[np.uint8]) -> Region:
        """A region that holds these bytes."""
        region = self.device.alloc(data.nbytes)
        self.do(Write(region.all(), data), self.to)
        return region

    def bytes(self, source: Segment) -> NDArray[np.uint8]:
        """What a segment holds."""
        into = np.full(source.spans.nbytes, 0xA5, dtype=np.uint8)
        self.do(Read(source, into), self.back)
        return into

    def do(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Submit and wait."""
        completion = self.device.submit(command, queue, after)
        self.wait(completion)
        return completion

    def wait(self, *completions: Completion) -> None:
        """Wait for all; raises the first error."""
        wait(self.site.clock, completions, self.site.clock.now() + 10**11)

    def settle(self, *completions: Completion) -> None:
        """Wait for all, whatever becomes of them."""
        assert self.site.clock.run_until(lambda: all(c.done for c in completions), self.site.clock.now() + 10**11)
