"""What there is on this machine: which devices could be opened, and if not, why not and what to do. For `doctor`.

Nothing is written to any device. A block device is only touched if its path was given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.numa_tiering import tiering
from tierloop.devices.drivers.numa_topology import NumaTopology, numa_topology, shown
from tierloop.devices.drivers.nvme_probe import probe
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.registry import Discovered, entry, list_devices
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System
from tierloop.emulators.profile import FOLDER, profile_names, read_profile

PROBE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Found:
    """A device that a platform file can name. `reasons` says why it is not usable, or not as good as it might be.

    `guesses` are constants of an emulated one that are assumed or unknown: results that rest on them are extrapolated.
    """

    name: str
    kind: str
    provenance: str
    usable: bool
    reasons: tuple[str, ...] = ()
    driver: str = ""
    guesses: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "reasons": list(self.reasons), "guesses": list(self.guesses)}


@dataclass(frozen=True)
class KnownProfile:
    """A profile that ships; `guesses` are its constants that are assumed or unknown."""

    name: str
    kind: str
    summary: str
    guesses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def profiles() -> list[KnownProfile]:
    """Every profile by name, read and checked."""
    known = []
    for name in profile_names():
        try:
            profile = read_profile(FOLDER / f"{name}.toml")
            known.append(KnownProfile(name, profile.kind, profile.summary, tuple(profile.guesses)))
        except ConfigurationError as error:
            known.append(KnownProfile(name, "", "", reasons=(str(error),)))
    return known


def inventory(
    paths: Iterable[Path] = (), block_devices: Path = Path("/sys/block"), system: System = HOST
) -> list[Found]:
    """Every device that a platform file could name here, real ones first; `paths` are drives to probe."""
    found: list[Found] = []
    for driver in list_devices():
        if not driver.usable:
            found.append(Found(driver.name, "", "", False, driver.reasons, driver.name))
        elif driver.name == "nvme":
            found += _drives(list(paths), block_devices)
        elif driver.name == "emulated":
            found += [
                Found(f"emu:{p.name}", p.kind, "emulated", not p.reasons, p.reasons, "emulated", p.guesses)
                for p in profiles()
            ]
        else:
            found.append(_opened(driver))
            if driver.name == "cpu":
                found += cpus_on_nodes(system)
    return sorted(found, key=lambda device: device.provenance == "emulated")


def cpus_on_nodes(system: System) -> list[Found]:
    """The cpu device on each node with memory: whether it opens there, and what a report about it should not hide."""
    topology = numa_topology(system)
    behind = [f"the kernel may move its pages: {one}" for one in tiering(system)]
    found = []
    for number, node in sorted(topology.nodes.items()):
        name = f"cpu with node = {number}"
        if not node.has_memory:
            found.append(Found(name, "cpu", "real", False, ("the node has no memory",), "cpu"))
            continue
        try:
            open_cpu(name, Site(clock=WallClock()), {"node": number}, system).close()
        except (ConfigurationError, DeviceError) as error:
            found.append(Found(name, "cpu", "real", False, (str(error),), "cpu"))
            continue
        found.append(Found(name, "cpu", "real", True, (*_of_node(topology, number), *behind), "cpu"))
    return found


def _of_node(topology: NumaTopology, number: int) -> list[str]:
    node = topology.nodes[number]
    remarks = []
    cores = topology.cpus_near([number])
    if not node.has_cpu:
        remarks.append(f"it has no cores; those of the nearest node do the work ({shown(cores)})")
    elif cores != node.cpus:
        remarks.append(f"this process may use cores {shown(cores)} of {shown(node.cpus)}")
    if node.movable_nbytes:
        remarks.append("its memory is movable: pages that are pinned for DMA leave it")
    path = topology.path(cores, "cpu", number)
    if path.latency_ns:
        remarks.append(f"the firmware says {path.latency_ns} ns and {path.read_bytes_per_s / 1e9:,.0f} GB/s for reads")
    else:
        remarks.append("the firmware says nothing of its latency and rates (no HMAT)")
    return remarks


def _opened(driver: Discovered) -> Found:
    """Open a driver that needs no options, and close it again."""
    factory = entry("devices", driver.name)
    emulated = bool(getattr(factory, "emulated", False))
    name = f"emu:{driver.name}" if emulated else driver.name
    provenance = "emulated" if emulated else "real"
    try:
        device = factory(name, Site(clock=WallClock()), {})
    except (ConfigurationError, DeviceError) as error:
        return Found(name, "", provenance, False, (str(error),), driver.name)
    info = device.info
    device.close()
    return Found(info.name, info.kind, info.provenance, True, (), driver.name)


def _drives(paths: list[Path], block_devices: Path) -> list[Found]:
    found = [_probed(str(path), str(path)) for path in paths]
    if not paths:
        try:
            with tempfile.NamedTemporaryFile(prefix="tierloop-probe-") as file:
                file.truncate(PROBE_NBYTES)
                found.append(_probed(file.name, f"a file in {Path(file.name).parent}"))
        except OSError as error:
            found.append(Found("a temporary file", "nvme", "real", False, (f"cannot be made: {error}",), "nvme"))
    asked = {str(path) for path in paths}
    for node in sorted(block_devices.glob("nvme*n*")) if block_devices.is_dir() else []:
        path = f"/dev/{node.name}"
        if path not in asked:
            why = f"not probed unasked; `tierloop doctor --path {path}` reads its first block and writes nothing"
            found.append(Found(path, "nvme", "real", False, (why,), "nvme"))
    return found


def _probed(path: str, name: str) -> Found:
    reasons = probe(path)
    usable = not any(reason.fatal for reason in reasons)
    return Found(name, "nvme", "real", usable, tuple(str(reason) for reason in reasons), "nvme")
