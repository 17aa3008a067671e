"""The trees of our models of a kernel beside those that a real one showed: the attributes that drivers ask for.

What the drivers ask of /sys is written down while they look at a captured machine and at a model of one. Each attribute
that they found in the one must be in the other, in the same format, or be listed here with the reason why not.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.drivers.nvme_drives import nvme_drives
from tierloop.devices.errors import DeviceError
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.site import Site
from tierloop.devices.system import System
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart
from tierloop.tools.guest.capturing import NAMES

TREES = Path(__file__).resolve().parent / "sysfs"
DEVICES = (
    r"nvme\d+c\d+n\d+|nvme\d+n\d+|ng\d+n\d+|nvme-subsys\d+|nvme\d+|decoder\d+\.\d+|endpoint\d+|root\d+|port\d+|mem\d+|"
    r"region\d+|dax_region\d+|dax\d+\.\d+|node\d+|memory\d+|memory_tier\d+"
)
LISTS = ("online", "possible", "cpulist", "nodelist", "distance", "target_list")
ONLY_THERE = {
    "/sys/bus/cxl/devices/pmemN": "the bridge from a memory to libnvdimm, which drivers pass over",
}
ONLY_HERE = {
    "/sys/dev/block/N:N": "captures leave these links out; the guest's own tests open drives through them",
    "/sys/dev/char/N:N": "the same",
    "/sys/fs/cgroup/system.slice/tierloop.service/cpuset.cpus.effective": "the guest has no control groups",
    "/sys/fs/cgroup/system.slice/tierloop.service/cpuset.mems.effective": "the same",
    "nvmeNnN/queue/nr_requests": "the guest's kernel has multipath on, where the path has it and the head has not",
}
OTHER_FORMAT = {
    "ngNnN/device": "multipath: a namespace belongs to the subsystem there, to the controller here",
    "nvmeNnN/device": "the same",
}

Shown = dict[str, set[str]]
"""Formats of attributes, by device and name without numbers."""


class Watched:
    """A system that writes down what it is asked to read below /sys."""

    def __init__(self, system: ModelKernel) -> None:
        self.asked: set[str] = set()
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def read_text(self, path: str) -> str:
        return self._system.read_text(self._noted(path))

    def read_bytes(self, path: str) -> bytes:
        return self._system.read_bytes(self._noted(path))

    def readlink(self, path: str) -> str:
        return self._system.readlink(self._noted(path))

    def _noted(self, path: str) -> str:
        folder, name = posixpath.split(path)
        if path.startswith("/sys/"):
            self.asked.add(f"{self._system.tree.real(folder)}/{name}")
        return path


def key_of(path: str) -> str:
    """A path from its last device on, without numbers; a decoder or node with what it belongs to."""
    path = re.sub(r"pci[0-9a-f]{4}:[0-9a-f]{2}", "bridge", path)
    path = re.sub(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", "function", path)
    parts = path.split("/")
    devices = [at for at, part in enumerate(parts[:-1]) if re.fullmatch(DEVICES, part)]
    if not devices:
        return re.sub(r"\d+", "N", path)
    kept = parts[devices[-1] :]
    above = re.sub(r"\d+$", "", parts[devices[-1] - 1])
    if kept[0].startswith("decoder") or above == "ndbus":
        kept.insert(0, above)
    return re.sub(r"\d+", "N", "/".join(kept))


def format_of(name: str, text: str) -> str:
    """How a value is written. One number is a list, too, and a node may be none."""
    if name in LISTS and re.fullmatch(r"(\d+(-\d+)?([, ]|$))*\n?", text):
        return "list of numbers"
    if name.endswith("_node") and re.fullmatch(r"-1|\d+\n?", text.removesuffix("\n")):
        return "node"
    formats = {
        "nothing": r"",
        "address of 64 bits": r"0x[0-9a-f]{16}",
        "hexadecimal": r"0x[0-9a-f]+",
        "number": r"\d+",
        "two numbers": r"\d+:\d+",
        "padded text": r"\S.* +",
        "name": r"[a-z_-]+\d+(\.\d+)?",
    }
    plain = text.removesuffix("\n")
    return next((name for name, form in formats.items() if re.fullmatch(form, plain)), "text")


def inventory(trees: Iterable[Tree]) -> Shown:
    """All attributes and links of trees."""
    found: Shown = {}
    for tree in trees:
        for path, data in tree.files.items():
            text = data.decode(errors="replace")
            whole = data.endswith(b"\n") or not text
            shown = format_of(posixpath.basename(path), text) if whole else "no newline"
            found.setdefault(key_of(path), set()).add("bytes" if path.endswith("/CDAT") else shown)
        for path, target in tree.links.items():
            found.setdefault(key_of(path), set()).add(f"link to {key_of(posixpath.normpath('/x/' + target) + '/')}")
    return found


def looked_at(system: System) -> None:
    """All discoveries of the drivers."""
    nvme_drives(system)
    cxl_topology(system)
    numa_topology(system)


def models() -> Iterator[ModelKernel]:
    """A drive, the nodes that models of NUMA memory stand on, and cards of both kinds in each state."""
    yield nvme_machine(numa_node=-1)
    for name in ("three-nodes", "two-sockets-cxl"):
        yield ModelKernel(Tree.read(TREES / f"{name}.tree"))
    cards = (CxlPart(serial=1), CxlPart(serial=2, volatile_nbytes=0, persistent_nbytes=2 * GRAIN))
    for mode in ("memdev", "devdax", "system-ram"):
        yield cxl_machine(cards, mode=mode)


@cache
def here() -> tuple[Shown, frozenset[str]]:
    """What the models show, and what drivers asked them for: discovery, and opening a device."""
    trees, asked = [], set[str]()
    for kernel in models():
        watched = Watched(kernel)
        looked_at(cast(System, watched))
        site = Site(clock=WallClock(), checker=HazardChecker())
        for opener, options in (
            (open_nvme, {"path": "/dev/ng0n1", "capacity": 1 << 20}),
            (open_nvme, {"path": "/dev/nvme0n1", "capacity": 1 << 20}),
            (open_cxl, {"path": "/dev/dax0.0", "capacity": 2 << 20}),
        ):
            try:
                opener("a", site, dict(options), cast(System, watched)).close()
            except DeviceError:
                continue  # this machine has none
        asked |= watched.asked
        trees.append(kernel.tree)
    return inventory(trees), frozenset(map(key_of, asked))


@cache
def there() -> tuple[Shown, frozenset[str]]:
    """What the guest's kernel showed, and what drivers asked for."""
    trees, asked = [Tree.read(TREES / f"{name}.tree") for name in NAMES], set[str]()
    for tree in trees:
        watched = Watched(ModelKernel(tree))
        looked_at(cast(System, watched))
        asked |= watched.asked
    return inventory(trees), frozenset(map(key_of, asked))


def asked() -> list[str]:
    """Every attribute that a driver asks for."""
    return sorted(here()[1] | there()[1])


def test_drivers_ask_for_something() -> None:
    assert len(asked()) > 60


def test_what_drivers_find_in_the_guest_is_in_the_models() -> None:
    missing = {key for key in asked() if key in there()[0] and key not in here()[0]}
    assert missing == ONLY_THERE.keys()


def test_what_drivers_find_in_the_models_is_in_the_guest() -> None:
    missing = {key for key in asked() if key in here()[0] and key not in there()[0]}
    assert missing == ONLY_HERE.keys()


def test_what_is_in_both_has_the_same_format() -> None:
    mine, other = here()[0], there()[0]
    different = {key: (mine[key], other[key]) for key in asked() if key in mine and key in other}
    assert {key for key, (a, b) in different.items() if not a <= b} == OTHER_FORMAT.keys()


@pytest.mark.parametrize("where", ["guest", "model"])
def test_a_node_of_cxl_memory_says_how_fast_it_is_and_for_whom_not(where: str) -> None:
    cards = (CxlPart(serial=1),)
    guest = ModelKernel(Tree.read(TREES / "guest-cxl-node.tree"))
    kernel: ModelKernel = guest if where == "guest" else cxl_machine(cards, mode="system-ram")
    [dax] = [dax for dax in cxl_topology(kernel).daxes if dax.mode == "system-ram"]
    assert dax.target_node is not None
    node = numa_topology(kernel).nodes[dax.target_node]
    assert [access.level for access in node.access] == [0, 1]
    for access in node.access:
        assert access.initiators == frozenset()
        assert access.read_latency_ns
        assert access.write_bytes_per_s


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/sys/devices/a/root0/port1/endpoint4/decoder4.0/mode", "endpoint/decoderN.N/mode"),
        ("/sys/devices/pci0000:10/0000:11:00.0/mem0/ram/size", "memN/ram/size"),
        ("/sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1/size", "nvmeNnN/size"),
        ("/sys/devices/system/node/node0/access0/initiators/read_latency", "nodeN/accessN/initiators/read_latency"),
    ],
)
def test_attributes_are_compared_by_device_and_name(path: str, key: str) -> None:
    assert key_of(path) == key
