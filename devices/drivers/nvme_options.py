"""Options of the nvme driver: checked before anything is opened, each mistake named with what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from tierloop.devices.drivers.medium import PAGE, Wish
from tierloop.devices.errors import ConfigurationError, nearest

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
_CHOICES = ("auto", "io_uring", "posix")


@dataclass(frozen=True)
class Options:
    """What the driver may be told; the meaning of each is in nvme.py. Sizes in bytes, rates in bytes/s, 0 = unknown."""

    path: str
    capacity: int | None = None
    create: bool = False
    io: Literal["auto", "io_uring", "posix"] = "auto"
    direct: bool = True
    depth: int = 32
    queues: int = 4
    reaches: tuple[str, ...] = ()
    deadline_s: float = 30.0
    retries: int = 64
    latency_ns: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0

    @classmethod
    def of(cls, device: str, options: dict[str, Any]) -> Options:
        """Read and check the options of a platform file. Raises ConfigurationError."""
        known = [f.name for f in fields(cls)]
        for key in options:
            if key not in known:
                raise ConfigurationError(
                    f"{device}: unknown option {key!r}: {nearest(key, known)} (allowed: {', '.join(known)})"
                )
        if "path" not in options:
            raise ConfigurationError(f"{device}: option 'path' is missing: a file or a block device")
        for key, value in options.items():
            wrong = _wrong(device, key, value)
            if wrong:
                raise ConfigurationError(f"{device}: {key} = {value!r}: {wrong}")
        return cls(**{**options, "reaches": tuple(options.get("reaches", ()))})

    def wish(self) -> Wish:
        """What is asked of the medium."""
        return Wish(self.path, self.capacity, self.create, self.direct, self.deadline_s, self.retries)

    def declared(self) -> dict[str, tuple[int, int]]:
        """Latency and rate per direction, where a rate was given."""
        rates = {"read": self.read_bytes_per_s, "write": self.write_bytes_per_s}
        return {op: (self.latency_ns, rate) for op, rate in rates.items() if rate}


def _wrong(device: str, key: str, value: Any) -> str | None:
    if key == "path":
        return (
            None if isinstance(value, str) and value and "\0" not in value else "a path is a string that is not empty"
        )
    if key == "io":
        return None if value in _CHOICES else f"one of {', '.join(_CHOICES)}"
    if key in ("create", "direct"):
        return None if isinstance(value, bool) else "true or false"
    if key == "reaches":
        return _wrong_names(device, value)
    low, high = _RANGES[key]
    number = isinstance(value, int) or (key == "deadline_s" and isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not number or not low <= value <= high:
        kind = "a number" if key == "deadline_s" else "a whole number"
        return f"{kind} from {low:g} to {high:g}"
    if key == "capacity" and value % PAGE:
        return f"a multiple of {PAGE} bytes"
    return None


def _wrong_names(device: str, value: Any) -> str | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        return "a list of names of memories"
    if device in value:
        return "the device's own memory is always reached"
    return "each memory once" if len(set(value)) != len(value) else None
