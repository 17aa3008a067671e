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
from tierloop.devices.drivers.gpu_probe import gpus
from tierloop.devices.drivers.nvme_probe import probe
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.registry import Discovered, entry, list_devices
from tierloop.devices.site import Site
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


def inventory(paths: Iterable[Path] = (), block_devices: Path = Path("/sys/block")) -> list[Found]:
    """Every device that a platform file could name here, real ones first; `paths` are drives to probe."""
    found: list[Found] = []
    for driver in list_devices():
        if not driver.usable:
            found.append(Found(driver.name, "", "", False, driver.reasons, driver.name))
        elif driver.name == "nvme":
            found += _drives(list(paths), block_devices)
        elif driver.name == "gpu":
            found += _gpus()
        elif driver.name == "emulated":
            found += [
                Found(f"emu:{p.name}", p.kind, "emulated", not p.reasons, p.reasons, "emulated", p.guesses)
                for p in profiles()
            ]
        else:
            found.append(_opened(driver))
    return sorted(found, key=lambda device: device.provenance == "emulated")


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


def _gpus() -> list[Found]:
    """Every GPU that torch sees, or one line that says why it sees none; nothing is opened."""
    try:
        seen = gpus()
    except ImportError as error:
        return [Found("gpu", "gpu", "real", False, (str(error),), "gpu")]
    on = ", ".join(part for part in (seen.runtime, seen.driver) if part)
    found = []
    for gpu in seen.found:
        where = f"PCI {gpu.slot.bus_address or 'unknown'}, NUMA node {gpu.slot.numa_node}"
        what = f"{gpu.name}, {gpu.total_nbytes} bytes, compute capability {gpu.compute_capability}, {where}; {on}"
        found.append(Found(gpu.device, "gpu", "real", True, (what, *seen.reasons), "gpu"))
    return found or [Found("gpu", "gpu", "real", False, seen.reasons, "gpu")]


def _probed(path: str, name: str) -> Found:
    reasons = probe(path)
    usable = not any(reason.fatal for reason in reasons)
    return Found(name, "nvme", "real", usable, tuple(str(reason) for reason in reasons), "nvme")
