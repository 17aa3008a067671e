"""Options of the gpu driver, checked one by one before anything is touched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tierloop.devices.drivers.options import integer, names, refuse_unknown
from tierloop.devices.errors import ConfigurationError

KNOWN = [
    "device", "capacity", "reserve", "queues", "staging_nbytes", "staging_buffers", "register", "reaches",
    "attention", "deadline_s", "poll_ns", "folder",
]  # fmt: skip
GRID = 4096
"""Capacity and buffers hold a whole number of these bytes."""
ATTENTION = ("eager", "flash", "flashinfer")
"""What `attend` is carried out by: products of torch; its own flash attention; FlashInfer."""
_MOST_QUEUES = 128
"""Streams: more than any GPU runs beside each other."""
_MOST_POLL_NS = 10**9
_GPU = re.compile(r"(cuda|hip):(\d+)")


@dataclass(frozen=True)
class Options:
    """What may be said of a GPU; the names are those of the options. `capacity` 0 is all but `reserve`."""

    device: str = "cuda:0"
    capacity: int = 0
    reserve: int | None = None
    queues: int = 2
    staging_nbytes: int = 4 << 20
    staging_buffers: int = 8
    register: bool = True
    reaches: tuple[str, ...] = ()
    attention: str = "eager"
    deadline_s: float = 30.0
    poll_ns: int = 20_000

    @classmethod
    def of(cls, name: str, given: dict[str, Any]) -> Options:
        """Raises ConfigurationError that names the device, the option and what is allowed."""
        refuse_unknown(name, given, KNOWN)
        options = cls(
            device=_gpu(name, given.get("device", "cuda:0")),
            capacity=integer(name, given, "capacity", 0, GRID) if "capacity" in given else 0,
            reserve=integer(name, given, "reserve", 0) if "reserve" in given else None,
            queues=integer(name, given, "queues", 2, 1, _MOST_QUEUES),
            staging_nbytes=integer(name, given, "staging_nbytes", 4 << 20, GRID),
            staging_buffers=integer(name, given, "staging_buffers", 8, 2),
            register=_truth(name, given, "register", True),
            reaches=names(name, given, "reaches"),
            attention=_attention(name, given.get("attention", "eager")),
            deadline_s=_seconds(name, given.get("deadline_s", 30.0)),
            poll_ns=integer(name, given, "poll_ns", 20_000, 1_000, _MOST_POLL_NS),
        )
        if name in options.reaches:
            raise ConfigurationError(f"{name}: reaches names the device itself; allowed: names of other memories")
        return options

    @property
    def number(self) -> int:
        """The number of the GPU, as torch counts."""
        return int(self.device.rpartition(":")[2])


def _gpu(name: str, given: Any) -> str:
    """`cuda:0`; ROCm's torch calls its GPUs cuda as well, so hip:0 is another word for it."""
    found = _GPU.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigurationError(f"{name}: device = {given!r}; allowed: 'cuda:0', 'cuda:1', … (ROCm's too)")
    return f"cuda:{int(found[2])}"


def _attention(name: str, given: Any) -> str:
    if given not in ATTENTION:
        raise ConfigurationError(f"{name}: attention = {given!r}; allowed: {', '.join(ATTENTION)}")
    return str(given)


def _truth(name: str, options: dict[str, Any], key: str, default: bool) -> bool:
    given = options.get(key, default)
    if not isinstance(given, bool):
        raise ConfigurationError(f"{name}: {key} = {given!r}; allowed: true, false")
    return given


def _seconds(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 3600:
        raise ConfigurationError(f"{name}: deadline_s = {given!r}; allowed: a number above 0, at most 3600")
    return float(given)
