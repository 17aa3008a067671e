"""Wrappers in platform files: the tables of `wrap`, checked when the file is read, and the wrappers made of them.

    [devices.dram]
    driver = "cpu"
    wrap = [
      { kind = "throttled", read_bytes_per_s = 8e9, write_bytes_per_s = 4e9 },   # or bytes_per_s for both
      { kind = "delayed", read_ns = 80_000, read_p99_ns = 500_000, write_ns = 20_000, seed = 1 },
      { kind = "recorded", file = "dram.jsonl", replace = true },
      { kind = "checked", block_nbytes = 4096 },
      { kind = "faulty", read_per_million = 100, write_per_million = 0, seed = 1 },
      { kind = "retried", attempts = 3, backoff_ns = 100_000 },
    ]

The first is the innermost. `delayed` takes `read_ns`, `write_ns`, `copy_ns`, `launch_ns`, `flush_ns`, each with a
`…_p99_ns`; a relative `file` lies beside the platform file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.site import Site
from tierloop.devices.tables import Table
from tierloop.devices.wrappers.around import Around
from tierloop.devices.wrappers.checked import BLOCKS, Checked
from tierloop.devices.wrappers.delayed import LATENCIES, Delayed, Latency
from tierloop.devices.wrappers.faulty import DEADLINES, MILLION, Faulty
from tierloop.devices.wrappers.recorded import Recorded
from tierloop.devices.wrappers.retried import ATTEMPTS, BACKOFFS, Retried
from tierloop.devices.wrappers.throttled import RATES, Throttled

KINDS: dict[str, type[Around]] = {
    "throttled": Throttled,
    "delayed": Delayed,
    "recorded": Recorded,
    "checked": Checked,
    "faulty": Faulty,
    "retried": Retried,
}


@dataclass(frozen=True)
class Layer:
    """One wrapper as a platform file has it: its kind, and the arguments that its class takes."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def around(self, folder: Path, device: Device, site: Site) -> Around:
        """The wrapper around a device; relative paths begin in `folder`. Raises ConfigurationError."""
        options = dict(self.options)
        if "path" in options:
            options["path"] = folder / options["path"]
        return KINDS[self.kind](device, site, **options)

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(f'{name} {value}' for name, value in self.options.items())})"


def read_layer(table: Table) -> Layer:
    """Check one table of `wrap`. Raises ConfigurationError naming file, key and what is allowed."""
    kind = table.text("kind", tuple(KINDS))
    options = _READERS[kind](table)
    table.finish()
    return Layer(kind, options)


def _throttled(table: Table) -> dict[str, Any]:
    if table.has("bytes_per_s"):
        return {"read_bytes_per_s": table.integer("bytes_per_s", *RATES)}
    return {key: table.integer(key, *RATES) for key in ("read_bytes_per_s", "write_bytes_per_s")}


def _delayed(table: Table) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("read", "write", "copy", "launch", "flush"):
        usual, rare = f"{name}_ns", f"{name}_p99_ns"
        if table.has(usual) or table.has(rare) or name in ("read", "write"):
            ns = table.integer(usual, *LATENCIES)
            try:
                options[name] = Latency(ns, table.integer(rare, *LATENCIES, default=ns))
            except ConfigurationError as error:
                raise table.error(rare, str(error)) from error
    if table.has("seed"):
        options["seed"] = table.integer("seed", 0, 2**63 - 1)
    return options


def _recorded(table: Table) -> dict[str, Any]:
    return {"path": Path(table.text("file")), "replace": table.flag("replace", default=False)}


def _checked(table: Table) -> dict[str, Any]:
    return {"block_nbytes": table.integer("block_nbytes", *BLOCKS, default=4096)}


def _faulty(table: Table) -> dict[str, Any]:
    options = {key: table.integer(key, 0, MILLION, default=0) for key in ("read_per_million", "write_per_million")}
    options["seed"] = table.integer("seed", 0, 2**63 - 1, default=0)
    if table.has("deadline_ns"):
        options["deadline_ns"] = table.integer("deadline_ns", *DEADLINES)
    return options


def _retried(table: Table) -> dict[str, Any]:
    options = {"attempts": table.integer("attempts", *ATTEMPTS)} if table.has("attempts") else {}
    for key in ("backoff_ns", "max_backoff_ns"):
        if table.has(key):
            options[key] = table.integer(key, *BACKOFFS)
    return options


_READERS = {
    "throttled": _throttled,
    "delayed": _delayed,
    "recorded": _recorded,
    "checked": _checked,
    "faulty": _faulty,
    "retried": _retried,
}
