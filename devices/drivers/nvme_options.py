"""Options of the nvme driver: checked before anything is opened, each mistake named with what is allowed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any, Literal

from tierloop.devices.drivers.medium import PAGE
from tierloop.devices.drivers.options import A_PATH, is_path, names, refuse_unknown
from tierloop.devices.drivers.wish import Wish
from tierloop.devices.errors import ConfigurationError

_RANGES: dict[str, tuple[float, float]] = {
    "capacity": (PAGE, 1 << 62),
    "depth": (1, 4096),
    "queues": (1, 64),
    "deadline_s": (0.001, 86_400),
    "retries": (0, 1_000_000),
    "latency_ns": (0, 1 << 62),
    "read_bytes_per_s": (0, 1 << 62),
    "write_bytes_per_s": (0, 1 << 62),
}
_CHOICES = ("auto", "io_uring", "posix", "ioctl")


@dataclass(frozen=True)
class Options:
    """What the driver may be told; the meaning of each is in nvme.py. Sizes in bytes, rates in bytes/s, 0 = unknown."""

    path: str
    capacity: int | None = None
    create: bool = False
    io: Literal["auto", "io_uring", "posix", "ioctl"] = "auto"
    direct: bool = True
    register: bool = False
    depth: int = 32
    queues: int = 4
    reaches: tuple[str, ...] = ()
    deadline_s: float = 30.0
    retries: int = 64
    latency_ns: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    folder: str = "."

    @classmethod
    def of(cls, device: str, options: dict[str, Any]) -> Options:
        """Read and check the options of a platform file. Raises ConfigurationError."""
        known = [f.name for f in fields(cls)]
        refuse_unknown(device, options, known)
        if "path" not in options:
            raise ConfigurationError(f"{device}: option 'path' is missing: a file, a block device or /dev/ngXnY")
        for key, value in options.items():
            wrong = _wrong(key, value)
            if wrong:
                raise ConfigurationError(f"{device}: {key} = {value!r}: {wrong}")
        reaches = names(device, options, "reaches")
        if device in reaches or len(set(reaches)) < len(reaches):
            raise ConfigurationError(f"{device}: reaches = {list(reaches)}: other memories, each once")
        path = os.path.join(options.get("folder", "."), options["path"])
        return cls(**{**options, "path": path, "reaches": reaches})

    def wish(self) -> Wish:
        """What is asked of the medium."""
        return Wish(self.path, self.capacity, self.create, self.direct, self.deadline_s, self.retries)

    def declared(self) -> dict[str, tuple[int, int]]:
        """Latency and rate per direction, where a rate was given."""
        rates = {"read": self.read_bytes_per_s, "write": self.write_bytes_per_s}
        return {op: (self.latency_ns, rate) for op, rate in rates.items() if rate}


def _wrong(key: str, value: Any) -> str | None:
    if key in ("path", "folder"):
        return None if is_path(value) else A_PATH
    if key == "io":
        return None if value in _CHOICES else f"one of {', '.join(_CHOICES)}"
    if key in ("create", "direct", "register"):
        return None if isinstance(value, bool) else "true or false"
    if key == "reaches":
        return None if isinstance(value, (list, tuple, dict)) else "a list of names"
    low, high = _RANGES[key]
    number = isinstance(value, int) or (key == "deadline_s" and isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not number or not low <= value <= high:
        kind = "a number" if key == "deadline_s" else "a whole number"
        return f"{kind} from {low:g} to {high:g}"
    if key == "capacity" and value % PAGE:
        return f"a multiple of {PAGE} bytes"
    return None
