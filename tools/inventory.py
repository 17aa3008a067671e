"""What there is on this machine: which devices could be opened, and if not, why not and what to do. For `doctor`.

Nothing is written to any device. A block device is only touched if its path was given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.nvme_probe import probe
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.registry import Discovered, entry, list_devices, open_device
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System
from tierloop.emulators.profile import FOLDER, profile_names, read_profile
from tierloop.tools.found import Found
from tierloop.tools.inventory_hardware import cpus_on_nodes, cxl_parts, drives, gpus_seen

PROBE_NBYTES = 1 << 20


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


def inventory(paths: Iterable[Path] = (), system: System = HOST) -> list[Found]:
    """Every device that a platform file could name here, real ones first; `paths` are drives to probe."""
    found: list[Found] = []
    for driver in list_devices():
        if not driver.usable:
            found.append(Found(driver.name, "", "", False, driver.reasons, driver.name))
        elif driver.name == "nvme":
            found += _drives(list(paths), system)
        elif driver.name == "cxl":
            found += cxl_parts(system)
        elif driver.name == "gpu":
            found += gpus_seen()
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


def _opened(driver: Discovered) -> Found:
    """Open a driver that needs no options, and close it again."""
    factory = entry("devices", driver.name)
    emulated = bool(getattr(factory, "emulated", False))
    name = f"emu:{driver.name}" if emulated else driver.name
    provenance = "emulated" if emulated else "real"
    try:
        device = open_device(driver.name, name, Site(clock=WallClock()), {})
        info = device.info
        device.close()
        found = Found(info.name, info.kind, info.provenance, True, (), driver.name)
    except (ConfigurationError, DeviceError) as error:
        return Found(name, "", provenance, False, (f"not looked for: a platform file names it ({error})",), driver.name)
    except (Exception, SystemExit) as error:  # one driver that is faulty says nothing of the others
        wrong = f"driver {driver.name!r} of {driver.distribution} is faulty: {type(error).__name__}: {error}"
        return Found(name, "", provenance, False, (wrong,), driver.name)
    return found


def _drives(paths: list[Path], system: System) -> list[Found]:
    found = [_probed(str(path), str(path)) for path in paths]
    if not paths:
        try:
            with tempfile.NamedTemporaryFile(prefix="tierloop-probe-") as file:
                file.truncate(PROBE_NBYTES)
                found.append(_probed(file.name, f"a file in {Path(file.name).parent}"))
        except OSError as error:
            found.append(Found("a temporary file", "nvme", "real", False, (f"cannot be made: {error}",), "nvme"))
    asked = {str(path) for path in paths}
    return found + [drive for drive in drives(system) if drive.name not in asked]


def _probed(path: str, name: str) -> Found:
    reasons = probe(path)
    usable = not any(reason.fatal for reason in reasons)
    return Found(name, "nvme", "real", usable, tuple(str(reason) for reason in reasons), "nvme")
