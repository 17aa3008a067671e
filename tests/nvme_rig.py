"""A place to test the nvme driver: on a real file, on the operating system in memory, and on a modelled drive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fake_system import FakeSystem
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Flush
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.errors import DeviceError
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.system import HOST, System
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine

MIB = 1 << 20
SHORT_S = 0.5
"""The deadline in tests of what hangs: long enough for a loaded machine to start a thread, short enough to wait for."""


def host_memory(nbytes: int, name: str = "dram") -> Region:
    """A region of a host-mapped memory, as a cpu device would allocate it."""
    return Region(name, name, 0, nbytes, view=np.zeros(nbytes, dtype=np.uint8))


@dataclass
class Rig:
    """A site, the system beneath it, and one nvme device at a time."""

    path: str
    options: dict[str, Any]
    system: System = HOST
    site: Site = field(default_factory=lambda: Site(clock=WallClock(), checker=HazardChecker()))
    opened: list[NvmeDevice] = field(default_factory=list)

    def open(self, **options: Any) -> NvmeDevice:
        """Open the device with the rig's options and these."""
        merged = {"path": self.path, **self.options, **options}
        device = open_nvme("nvme0", self.site, merged, self.system)
        self.opened.append(device)
        return device

    @property
    def fake(self) -> FakeSystem:
        """The operating system in memory."""
        assert isinstance(self.system, FakeSystem)
        return self.system

    @property
    def machine(self) -> NvmeMachine:
        """The machine with a modelled drive."""
        assert isinstance(self.system, NvmeMachine)
        return self.system

    @property
    def device(self) -> NvmeDevice:
        """The device that was opened last; opened now if there is none."""
        return self.opened[-1] if self.opened else self.open()

    def write(self, target: Segment, data: NDArray[np.uint8]) -> None:
        """Write and wait."""
        write_bytes(self.site.clock, self.device, target, data)

    def read(self, source: Segment) -> NDArray[np.uint8]:
        """Read and wait."""
        return read_bytes(self.site.clock, self.device, source)

    def run(self, command: Command, queue: int = 0) -> Completion:
        """Submit, wait, and raise what went wrong."""
        completion = self.device.submit(command, queue)
        wait(self.site.clock, completion)
        return completion

    def error_of(self, command: Command) -> DeviceError:
        """Submit, wait for the end, and return the error, which must be there."""
        completion = self.device.submit(command)
        assert self.site.clock.run_until(lambda: completion.done, self.site.clock.now() + 60_000_000_000)
        assert completion.error is not None, f"{completion} ended well"
        try:
            completion.result()
        except DeviceError as error:
            return error
        raise AssertionError("result() did not raise")

    def flush(self, region: Region) -> Completion:
        """Make everything before durable."""
        return self.run(Flush(region.all()))

    def close(self) -> None:
        """Close whatever is open, and let go what hangs."""
        if isinstance(self.system, (FakeSystem, NvmeMachine)):
            self.system.release()
        for device in self.opened:
            device.close()


def on_file(tmp_path: Path, **options: Any) -> Rig:
    """A rig on a real sparse file."""
    return Rig(str(tmp_path / "medium"), {"capacity": 8 * MIB, "create": True, "queues": 2, **options})


def on_fake(system: FakeSystem | None = None, **options: Any) -> Rig:
    """A rig on a file of an operating system in memory."""
    defaults = {"capacity": 8 * MIB, "create": True, "queues": 2, "retries": 8}
    return Rig("/medium", {**defaults, **options}, system or FakeSystem())


def on_drive(machine: NvmeMachine | None = None, **options: Any) -> Rig:
    """A rig on the generic character device of a modelled drive."""
    return Rig("/dev/ng0n1", {"queues": 2, "retries": 8, **options}, machine or nvme_machine())


@pytest.fixture
def filled(rig: Rig) -> Region:
    """1 MiB of the test file's own `rig`: it holds bytes_of(1, 1 MiB)."""
    made = rig.device.alloc(1 * MIB)
    rig.write(made.all(), bytes_of(1, 1 * MIB))
    return made


def works(rig: Rig, region: Region) -> bool:
    """Whether the device still reads and writes."""
    rig.write(region.all(), bytes_of(9, region.nbytes))
    return bool(np.array_equal(rig.read(region.all()), bytes_of(9, region.nbytes)))


def spans(*pairs: tuple[int, int]) -> Spans:
    """Spans from (offset, nbytes) pairs."""
    return Spans(list(pairs))
