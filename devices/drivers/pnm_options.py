"""Options of the pnm driver: checked before anything is opened, each mistake named with what is allowed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tierloop.devices.drivers.options import A_PATH, integer, is_path, names, refuse_unknown
from tierloop.devices.errors import ConfigurationError

_KNOWN = ["path", "window_nbytes", "caches", "queues", "reaches", "deadline_ms", "folder"]
Caches = Literal["auto", "flush", "coherent"]
"""Who sees to the host's caches: the driver writes lines back and drops them, or the device looks into them."""
_MOST_QUEUES = 64
_MOST_DEADLINE_MS = 86_400_000


@dataclass(frozen=True)
class Options:
    """What the driver may be told; the meaning of each is in pnm.py."""

    path: str
    window_nbytes: int | None = None
    queues: int = 2
    reaches: tuple[str, ...] = ()
    deadline_ms: int = 30_000
    caches: Caches = "auto"

    @classmethod
    def of(cls, device: str, options: dict[str, Any], needs_path: bool) -> Options:
        """Read and check the options of a platform file. Raises ConfigurationError."""
        refuse_unknown(device, options, _KNOWN)
        reaches = names(device, options, "reaches")
        if device in reaches or len(set(reaches)) < len(reaches):
            raise ConfigurationError(f"{device}: reaches = {list(reaches)}: other memories, each once")
        return cls(
            _path(device, options, needs_path),
            integer(device, options, "window_nbytes", 0, 1) if "window_nbytes" in options else None,
            integer(device, options, "queues", 2, 1, _MOST_QUEUES),
            reaches,
            integer(device, options, "deadline_ms", 30_000, 1, _MOST_DEADLINE_MS),
            _caches(device, options, needs_path),
        )


def _caches(device: str, options: dict[str, Any], mapped: bool) -> Caches:
    given = options.get("caches", "auto")
    if given not in get_args(Caches) or (not mapped and "caches" in options):
        allowed = ", ".join(get_args(Caches)) if mapped else "none, for a window that was handed in"
        raise ConfigurationError(f"{device}: caches = {given!r}; allowed: {allowed}")
    return given  # type: ignore[no-any-return]  # one of them


def _path(device: str, options: dict[str, Any], needed: bool) -> str:
    if not needed:
        if "path" in options:
            raise ConfigurationError(
                f"{device}: option 'path' beside a window that was handed in; allowed: one of them"
            )
        return ""
    if "path" not in options:
        raise ConfigurationError(f"{device}: option 'path' is missing: the file or character device of a window")
    parts = [options.get("folder", "."), options["path"]]
    for part in parts:
        if not is_path(part):
            raise ConfigurationError(f"{device}: path = {part!r}: {A_PATH}")
    return os.path.join(str(parts[0]), str(parts[1]))
