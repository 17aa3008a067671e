"""The nvme driver passes the suite of every device: in memory, on a modelled drive, and beside a real cpu device.

test_conformance.py runs it on a real file.
"""

from __future__ import annotations

from typing import ClassVar

from tests.fake_system import FakeSystem
from tests.nvme_rig import MIB
from tierloop.devices.conformance import Suite
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.emulators.kernel_nvme import nvme_machine


class TestInMemory(Suite):
    """The operating system in memory, on a grid of 4 KiB, without io_uring."""

    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors", "stateful")
    examples: ClassVar[int] = 10

    def open(self, site: Site) -> Device:
        options = {"path": "/medium", "capacity": 8 * MIB, "create": True, "queues": 2, "io": "posix"}
        return open_nvme("nvme0", site, options, FakeSystem(grid=4096))


class TestNamespace(Suite):
    """The generic character device of a modelled drive, through a ring."""

    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors", "stateful")
    examples: ClassVar[int] = 10
    io: ClassVar[str] = "io_uring"

    def open(self, site: Site) -> Device:
        options = {"path": "/dev/ng0n1", "capacity": 8 * MIB, "queues": 2, "io": self.io}
        return open_nvme("nvme0", site, options, nvme_machine())


class TestNamespaceByIoctl(TestNamespace):
    """The same, one command at a time."""

    io = "ioctl"


class TestBesideACpu(Suite):
    """A platform whose host memory the drive copies to and from."""

    device: ClassVar[str] = "nvme0"
    levels: ClassVar[tuple[str, ...]] = ("identity", "memory")

    def open(self, site: Site) -> Platform:
        options = {"path": "/medium", "capacity": 8 * MIB, "create": True, "queues": 2, "reaches": ["cpu0"]}
        drive = open_nvme("nvme0", site, options, FakeSystem())
        return Platform("pair", site, {"cpu0": open_cpu("cpu0", site, {"capacity": 64 * MIB}), "nvme0": drive}, "cpu0")
