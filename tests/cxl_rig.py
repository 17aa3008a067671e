"""What the tests of the cxl driver share: files in its place, recorded machines, and a dax device of theirs."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.clocks import WallClock
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import CxlDevice, open_cxl
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System
from tierloop.emulators.kernel import Absent, ModelKernel, Tree, failure

PAGE = mmap.PAGESIZE
MIB = 1 << 20
TREES = Path(__file__).resolve().parent / "sysfs"


def tree(name: str) -> Tree:
    """The tree of a recorded CXL machine."""
    return Tree.read(TREES / f"cxl-{name}.tree")


class DaxNode(Absent):
    """/dev/daxX.Y: `nbytes` of shared memory that is mapped in multiples of `align`, and nothing else."""

    def __init__(self, nbytes: int, align: int) -> None:
        self.nbytes, self.align = nbytes, align
        self.fd = os.memfd_create("dax")
        os.ftruncate(self.fd, nbytes)

    def mmap(self, nbytes: int, offset: int) -> mmap.mmap:
        if nbytes % self.align or offset % self.align:
            raise failure(errno.EINVAL)
        # What is asked for beyond the alignment puts the mapping on it.
        return mmap.mmap(self.fd, nbytes, offset=offset)

    def lose(self, offset: int) -> None:
        """Everything from this offset on is lost, as for a file that is cut."""
        os.ftruncate(self.fd, offset)


def devdax(name: str = "volatile-devdax", dax: str = "dax0.0", **changed: Any) -> tuple[ModelKernel, DaxNode]:
    """A recorded machine whose dax device is there; attributes of it in sysfs may be changed (align=4096, …).

    It is aligned to pages: what a mapping of a file can promise.
    """
    texts = tree(name)
    kernel = ModelKernel(texts, model="a model of CXL memory")
    folder = texts.real(f"/sys/bus/dax/devices/{dax}")
    for key, value in {"align": PAGE, "size": 8 * MIB, **changed}.items():
        texts.put(f"{folder}/{key}", str(value))
    node = DaxNode(int(kernel.read_text(f"{folder}/size")), PAGE)
    kernel.add(f"/dev/{dax}", node)
    return kernel, node


def file_of(folder: Path, nbytes: int = 8 * MIB, fill: int = 0xAB) -> Path:
    """A new file with bytes of an earlier owner."""
    fd, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(fd, "wb") as file:
        file.write(bytes([fill]) * nbytes)
    return Path(path)


@pytest.fixture
def a_site() -> Site:
    """A site on the wall clock."""
    return Site(WallClock())


@pytest.fixture
def pair_with_file(site: Site, tmp_path: Path) -> Iterator[Platform]:
    """A cpu device and a file in place of CXL memory, on the test file's own `site`."""
    platform = pair(site, {"path": str(file_of(tmp_path))})
    yield platform
    platform.close()


def pair(site: Site, options: dict[str, Any], system: System = HOST, capacity: int = 64 * MIB) -> Platform:
    """A platform of a cpu device that reaches a cxl device."""
    memory = open_cxl("cxl0", site, options, system)
    cpu = open_cpu("cpu0", site, {"capacity": capacity, "queues": 2, "threads": 2, "reaches": ["cxl0"]})
    return Platform("pair", site, {"cpu0": cpu, "cxl0": memory}, "cpu0")


def both(platform: Platform) -> tuple[Device, Device]:
    """The two devices of a pair."""
    return platform.device("cpu0"), platform.device("cxl0")


def opened(options: dict[str, Any], system: System = HOST) -> CxlDevice:
    """A cxl device alone."""
    return open_cxl("cxl0", Site(WallClock()), options, system)
