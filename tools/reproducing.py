"""Which systems `tierloop reproduce` knows, and what their constants have in common: digests of platforms and profiles.

A system is one module with a function `system`, and one line here; docs/reproduction.md says what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.registry import find_platform
from tierloop.devices.tables import read_toml
from tierloop.emulators.profile import find_profile
from tierloop.runtime.reproduction import System, digest

SYSTEMS = {
    "hybridgen": "tierloop.tools.reproducing_hybridgen",
    "kvdrive": "tierloop.tools.reproducing_kvdrive",
    "nelssa": "tierloop.tools.reproducing_nelssa",
}
"""By name the module whose function `system` gives what is reproduced; modules are loaded when they are asked for."""


def find_system(name: str) -> System:
    """The system of that name. Raises ConfigurationError with the near names."""
    if name not in SYSTEMS:
        raise ConfigurationError(f"no reproduction of {name!r}; {nearest(name, list(SYSTEMS))}")
    found = import_module(SYSTEMS[name]).system()
    assert isinstance(found, System), f"{SYSTEMS[name]}.system gives a System"
    return found


def platform_digests(names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files that these platforms are made of: their own, included ones, and profiles."""
    files: set[Path] = set()
    for name in names:
        _collect(find_platform(name), files)
    return digest(sorted(files))


def _collect(path: Path, files: set[Path]) -> None:
    files.add(path)
    values = read_toml(path)
    for included in values.get("include", []):
        _collect(path.parent / included if included.endswith(".toml") else find_platform(included), files)
    for device in values.get("devices", {}).values():
        if "profile" in device:
            files.add(find_profile(device["profile"], path.parent))
