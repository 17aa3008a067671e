"""Options of the cxl driver: checked before anything is opened, each mistake named with what is allowed."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from tierloop.devices.drivers.guard import PAGE
from tierloop.devices.drivers.numa import HIGHEST_NODE
from tierloop.devices.drivers.options import A_PATH, integer, is_path, refuse_unknown
from tierloop.devices.errors import ConfigurationError

_MOST = 1 << 62
_LARGEST = {"node": HIGHEST_NODE, "serial": (1 << 64) - 1}
_RATES = ("read_latency_ns", "write_latency_ns", "read_bytes_per_s", "write_bytes_per_s")


@dataclass(frozen=True)
class Options:
    """What the driver may be told; the meaning of each is in cxl.py. Sizes in bytes, rates in bytes/s, 0 = unknown.

    Exactly one of `path`, `node` and `serial` is given.
    """

    path: str | None = None
    node: int | None = None
    serial: int | None = None
    capacity: int | None = None
    read_latency_ns: int = 0
    write_latency_ns: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    folder: str = "."

    @property
    def says_rates(self) -> bool:
        """Whether any latency or rate is given."""
        return any((self.read_latency_ns, self.write_latency_ns, self.read_bytes_per_s, self.write_bytes_per_s))

    @classmethod
    def of(cls, device: str, options: dict[str, Any]) -> Options:
        """Read and check the options of a platform file. Raises ConfigurationError."""
        refuse_unknown(device, options, [f.name for f in fields(cls)])
        given = [key for key in ("path", "node", "serial") if key in options]
        if len(given) != 1:
            raise ConfigurationError(
                f"{device}: {' and '.join(given) or 'nothing'} given; allowed: one of path (a devdax such as "
                "/dev/dax0.0, or a file), node (a NUMA node) and serial (of a memory device)"
            )
        for key in ("path", "folder"):
            value = options.get(key, ".")
            if not is_path(value):
                raise ConfigurationError(f"{device}: {key} = {value!r}: {A_PATH}")
        for key in ("node", "serial", "capacity", *_RATES):
            if key in options:
                integer(device, options, key, 0, PAGE if key == "capacity" else 0, _LARGEST.get(key, _MOST))
        if options.get("capacity", 0) % PAGE:
            raise ConfigurationError(f"{device}: capacity = {options['capacity']}; allowed: a multiple of {PAGE}")
        made = cls(**options)
        if made.path is not None:
            return cls(**{**options, "path": os.path.join(made.folder, made.path)})
        return made
