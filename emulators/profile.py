"""Profiles: a device as data. Its memory, its executors, and a source for every constant.

A profile is a TOML file of the folder `profiles`, or one that a platform file names by path. Numbers that describe the
device are tables `{ value = …, source = "…" }`:

- a source that begins with `assumed:` says that the value was chosen here, and why;
- a source that begins with `defined:` belongs to a made-up machine: there is nothing that it could be wrong about;
- the value "unknown" is allowed where leaving the effect out makes sense: such a latency or overhead counts 0, such a
  rate or limit does not limit.

A memory whose latency under load is known has `[[memory.curves]]` instead of rates and a latency: for each
`read_fraction` the `points` [bytes/s, ns] and their `source` (loaded.py). A profile that was calibrated also holds what
was measured, in the table `calibration`; it is read by `tierloop verify` and ignored here.

`power_watts` and `price_usd` may say what a device draws under load and what it is sold for; no time rests on them.

Constants that are used and assumed or unknown are listed in `guesses`, and a result that rests on one is reported as
`extrapolated`. What is structure (kernels, verbs, queues, alignment) is written plainly. A platform may set constants
(`constants`), leave executors out or put optional ones in (`executors`), and change the `capacity`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import DTYPES, KERNELS
from tierloop.devices.platform_file import LATENCIES, RATES
from tierloop.devices.tables import Table, read_toml
from tierloop.emulators.loaded import WHOLE, Curves, Point
from tierloop.emulators.parts import ExecutorProfile, Lines, MemoryProfile, Profile
from tierloop.emulators.timing import WINDOW
from tierloop.firmware_models.flash import FlashGeometry
from tierloop.firmware_models.pnm import PnmGeometry

FOLDER = Path(__file__).parent / "profiles"
CHANGED = "set by the platform"
"""The source of a constant that the platform file gives."""
SIZES = (1, 1 << 50)
"""Allowed sizes in bytes: up to 1 PiB."""
FLOPS = (10**6, 10**18)
_COUNTS = (1, 1 << 20)
_FLASH_OPTIONS = {
    "buffer_nbytes": (0, 1 << 40),
    "slc_percent": (0, 100),
    "slc_program_ns": LATENCIES,
    "slc_read_ns": LATENCIES,
    "idle_ns": (0, 10**12),
    "suspends": (0, 1 << 20),
    "suspend_ns": LATENCIES,
    "rated_cycles": (0, 10**7),
    "life_spread_percent": (0, 1000),
    "reserve_blocks": (0, 1 << 20),
    "wear_spread": (0, 10**7),
    "retry_ppm": (0, 1_000_000),
    "retries": (0, 1000),
    "retention_ns": (0, 1 << 60),
    "seed": (0, 1 << 31),
}
"""What a flash drive may have beyond its geometry (flash_geometry.py); a profile that is silent has none of it."""
_VERBS = frozenset({"read", "write", "copy", "flush"})
COSTS = ("power_watts", "price_usd")
_COST = (1, 10**9)
KINDS = ("gpu", "cpu", "cxl", "nvme", "pnm")
_COHERENCES = ("host-only", "snooping", "none")


def profile_names() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_profile(name: str, folder: Path | None = None) -> Path:
    """The file of a profile: a name, or a path ending in .toml, relative to `folder`. Raises ConfigurationError."""
    if name.endswith(".toml"):
        path = (folder or Path()) / name
        if not path.is_file():
            raise ConfigurationError(f"profile: there is no file {path}")
        return path
    path = FOLDER / f"{name}.toml"
    if name not in profile_names():
        raise ConfigurationError(f"profile: unknown profile {name!r}; {nearest(name, profile_names())}")
    return path


def read_profile(
    path: Path,
    capacity: int | None = None,
    executors: tuple[str, ...] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Profile:
    """Read and check a profile, with what a platform changes in it.

    `executors` names those to make (default: all that are not optional); `constants` is a table shaped like the
    profile, with plain numbers. Raises ConfigurationError naming file, key and what is allowed.
    """
    values = read_toml(path)
    _set_constants(values, constants or {}, str(path), "")
    table = Table(values, str(path))
    reader = _Reader(table)
    kind = table.text("kind", KINDS)
    summary = table.text("summary")
    costs = _costs(table)
    memory = reader.memory(table.table("memory"), capacity) if table.has("memory") else None
    if memory is None and capacity is not None:
        raise table.error("memory", "capacity was given, but the device has no memory")
    made = reader.executors(table.tables("executors"), executors)
    table.has("calibration")
    table.finish()
    if memory is None and not made:
        raise table.error("", "a device has a memory, executors, or both")
    if len({executor.depth for executor in made}) > 1:
        raise table.error("executors", "the queues of one device all have the same depth")
    return Profile(
        path.stem, kind, summary, memory, made, tuple(reader.guesses), reader.sources, costs,  # type: ignore[arg-type]  # checked
    )  # fmt: skip


def _costs(table: Table) -> dict[str, int | None]:
    """What the profile says of COSTS, None where it does not know. No guess: no time depends on it."""
    found: dict[str, int | None] = {}
    for key in COSTS:
        if table.has(key):
            inner = table.table(key)
            found[key] = None if inner.get("value") == "unknown" else inner.integer("value", *_COST)
            if not inner.text("source").strip():
                raise inner.error("source", "empty; say where the number comes from")
            inner.finish()
    return found


class _Reader:
    """Reads constants and remembers where they come from."""

    def __init__(self, table: Table) -> None:
        self.place = table.place
        self.guesses: list[str] = []
        self.sources: dict[str, str] = {}

    def constant(
        self, table: Table, key: str, low: int, high: int, unknown: int | None = None, absent: int | None = None
    ) -> int:
        """A sourced number; `unknown` is what counts where the profile does not know, `absent` where it is silent."""
        if absent is not None and not table.has(key):
            return absent
        if not isinstance(table.get(key), Mapping):
            raise table.error(key, f'{table.get(key)!r} given; allowed: {{ value = …, source = "…" }}')
        inner = table.table(key)
        full = f"{table.prefix}.{key}"
        given = inner.get("value")
        if given == "unknown":
            if unknown is None:
                raise inner.error("value", f"unknown is not allowed here; allowed: a whole number from {low} to {high}")
            value = unknown
            self.guesses.append(f"{full}: unknown, {'not counted' if unknown == 0 else unknown}")
            self._source(inner, full)
        else:
            value = inner.integer("value", low, high)
            self._source(inner, full, str(value))
        inner.finish()
        return value

    def _source(self, table: Table, full: str, value: str | None = None) -> None:
        """Note where a constant comes from, and that it is a guess if its value was assumed."""
        source = table.text("source")
        if not source.strip():
            raise table.error("source", "empty; say where the number comes from")
        if value is not None and source.startswith("assumed"):
            self.guesses.append(f"{full} = {value}: {source}")
        self.sources[full] = source

    def lines(self, table: Table) -> Lines:
        """`mlp_lines`: a number, or a list of [span bytes, lines], where lines need not be whole."""
        key = "mlp_lines"
        inner = table.table(key) if isinstance(table.get(key, None), Mapping) else None
        if inner is None or not isinstance(inner.get("value", None), list):
            lines = self.constant(table, key, *_COUNTS, unknown=0, absent=0)
            return ((1, lines * WINDOW),) if lines else ()
        points: list[tuple[int, int]] = []
        for point in inner.get("value"):
            if not isinstance(point, list) or len(point) != 2:
                raise inner.error("value", f"{point!r} given; allowed: [span in bytes, lines]")
            span, lines = inner.check_integer("value", point[0], *SIZES), point[1]
            if isinstance(lines, bool) or not isinstance(lines, (int, float)) or not 0.001 <= lines <= _COUNTS[1]:
                raise inner.error("value", f"{lines!r} lines given; allowed: 0.001 to {_COUNTS[1]}")
            if points and span <= points[-1][0]:
                raise inner.error("value", f"spans have to ascend: {span} comes after {points[-1][0]}")
            points.append((span, round(lines * WINDOW)))
        if not points:
            raise inner.error("value", "an empty list; allowed: at least one [span in bytes, lines]")
        self._source(inner, f"{table.prefix}.{key}", f"{len(points)} points")
        inner.finish()
        return tuple(points)

    def memory(self, table: Table, capacity: int | None) -> MemoryProfile:
        firmware = table.text("firmware", ("passthrough", "flash", "pnm"), default="passthrough")
        alignment = table.integer("alignment", 1, 1 << 20, default=1)
        if capacity is None:
            capacity = self.constant(table, "capacity", alignment, SIZES[1])
        else:
            table.has("capacity")
            capacity = table.check_integer("capacity", capacity, alignment, SIZES[1])
        capacity -= capacity % alignment
        byte_addressable = table.flag("byte_addressable", default=True)
        persistent = table.flag("persistent", default=False)
        read = write = 0
        flash = pnm = curves = None
        if table.has("curves"):
            curves = self._curves(table, firmware)
            read, write, latency_ns = curves.cap(WHOLE), curves.cap(0), curves.idle_ns
        else:
            latency_ns = self.constant(table, "latency_ns", *LATENCIES, unknown=0)
        try:
            if firmware == "flash":
                flash = self._flash(table.table("flash"), capacity, alignment)
            elif firmware == "pnm":
                pnm = self._pnm(table.table("pnm"))
            elif curves is None:
                read = self.constant(table, "read_bytes_per_s", *RATES)
                write = self.constant(table, "write_bytes_per_s", *RATES)
        except ConfigurationError:
            raise
        except ValueError as error:
            raise table.error(firmware, str(error)) from error
        table.finish()
        return MemoryProfile(
            capacity, alignment, byte_addressable, persistent, latency_ns, read, write, flash, pnm, curves
        )

    def _curves(self, table: Table, firmware: str) -> Curves:
        if firmware != "passthrough":
            raise table.error("curves", f"the rates of a memory with firmware {firmware!r} follow from its geometry")
        given = table.get("curves")
        if not isinstance(given, list) or not all(isinstance(curve, Mapping) for curve in given):
            raise table.error("curves", "allowed: tables [[memory.curves]] with read_fraction, points and source")
        curves: list[tuple[int, tuple[Point, ...]]] = []
        for number, values in enumerate(given):
            curve = Table(values, table.place, f"{table.prefix}.curves[{number}]")
            fraction = curve.get("read_fraction")
            if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
                raise curve.error("read_fraction", f"{fraction!r} given; allowed: 0 to 1")
            points = curve.get("points")
            if not isinstance(points, list) or not all(isinstance(p, list) and len(p) == 2 for p in points):
                raise curve.error("points", f"{points!r} given; allowed: a list of [bytes/s, ns]")
            checked = tuple(
                (curve.check_integer("points", rate, *RATES), curve.check_integer("points", latency, *LATENCIES))
                for rate, latency in points
            )
            self._source(curve, f"{table.prefix}.curves[{number}]", f"{len(points)} points")
            curve.finish()
            curves.append((round(fraction * WHOLE), checked))
        try:
            return Curves(tuple(curves))
        except ValueError as error:
            raise table.error("curves", str(error)) from error

    def _flash(self, table: Table, capacity: int, unit_nbytes: int) -> FlashGeometry:
        count = {
            key: self.constant(table, key, *_COUNTS)
            for key in ("page_nbytes", "planes", "channels", "dies_per_channel", "stripes_per_block", "spare_percent")
        }
        times = {key: self.constant(table, key, 1, LATENCIES[1]) for key in ("read_ns", "program_ns", "erase_ns")}
        rate = self.constant(table, "channel_bytes_per_s", *RATES)
        more = {
            key: self.constant(table, key, low, high, unknown=0, absent=0)
            for key, (low, high) in _FLASH_OPTIONS.items()
        }
        bits = self.constant(table, "bits_per_cell", 2, 5, absent=3)
        table.finish()
        return FlashGeometry(
            capacity=capacity, unit_nbytes=unit_nbytes, channel_bytes_per_s=rate, bits_per_cell=bits,
            **count, **times, **more,
        )  # fmt: skip

    def _pnm(self, table: Table) -> PnmGeometry:
        sizes = ("channels", "banks", "row_nbytes", "granule_nbytes", "burst_nbytes", "tile_nbytes", "engines")
        count = {key: self.constant(table, key, *_COUNTS) for key in sizes}
        rates = {key: self.constant(table, key, *RATES) for key in ("channel_bytes_per_s", "engine_bytes_per_s")}
        times = {key: self.constant(table, key, *LATENCIES, unknown=0) for key in ("row_cycle_ns", "request_ns")}
        sram = self.constant(table, "sram_nbytes", *SIZES, unknown=0, absent=0)
        table.finish()
        return PnmGeometry(sram_nbytes=sram, **count, **rates, **times)

    def executors(self, tables: dict[str, Table], wanted: tuple[str, ...] | None) -> tuple[ExecutorProfile, ...]:
        for name in wanted or ():
            if name not in tables:
                raise ConfigurationError(
                    f"{self.place}: executors: no executor {name!r}; {nearest(name, list(tables))}"
                )
        made = []
        for name, table in tables.items():
            guesses, sources = list(self.guesses), dict(self.sources)
            optional = table.flag("optional", default=False)
            executor = self._executor(name, table)
            if name in wanted if wanted is not None else not optional:
                made.append(executor)
            else:
                self.guesses, self.sources = guesses, sources
        return tuple(made)

    def _executor(self, name: str, table: Table) -> ExecutorProfile:
        kernels = self._subset(table, "kernels", KERNELS)
        verbs = self._subset(table, "verbs", _VERBS)
        if not kernels and not verbs:
            raise table.error("", "an executor has kernels, verbs, or both")
        flops = self.constant(table, "flops_per_s", *FLOPS, unknown=0) if kernels else 0
        dense = self.constant(table, "dense_flops_per_s", *FLOPS, unknown=0, absent=flops) if kernels else 0
        queues = table.integer("queues", 1, 256, default=1)
        executor = ExecutorProfile(
            name=name,
            kind=table.text("kind", ("cores", "gpu", "pnm", "dma")),  # type: ignore[arg-type]  # checked
            queues=queues,
            depth=table.integer("depth", 1, 1 << 16, default=4096),
            verbs=verbs,
            kernels=kernels,
            dtypes=self._subset(table, "dtypes", DTYPES),
            coherence=table.text("coherence", _COHERENCES, default="snooping"),  # type: ignore[arg-type]  # checked
            weights=_weights(table, queues),
            largest_transfer=table.integer("largest_transfer", 0, SIZES[1], default=0),
            overhead_ns=self.constant(table, "overhead_ns", *LATENCIES, unknown=0),
            span_ns=self.constant(table, "span_ns", *LATENCIES, unknown=0, absent=0),
            flops_per_s=flops,
            dense_flops_per_s=dense,
            mlp_lines=self.lines(table),
            bytes_per_s=self.constant(table, "bytes_per_s", *RATES, unknown=0, absent=0),
            command_bytes_per_s=self.constant(table, "command_bytes_per_s", *RATES, unknown=0, absent=0),
            issue_ns=self.constant(table, "issue_ns", *LATENCIES, unknown=0, absent=0),
        )
        table.finish()
        return executor

    def _subset(self, table: Table, key: str, allowed: frozenset[str]) -> frozenset[str]:
        for name in table.names(key, ()):
            if name not in allowed:
                raise table.error(key, f"unknown name {name!r}; {nearest(name, sorted(allowed))}")
        return frozenset(table.names(key, ()))


def _weights(table: Table, queues: int) -> tuple[int, ...]:
    """One weight for all queues (`weight`), or a list with one for each (`weights`)."""
    if not table.has("weights"):
        return (table.integer("weight", 1, 1024, default=1),) * queues
    given = table.get("weights")
    if table.has("weight") or not isinstance(given, list) or len(given) != queues:
        raise table.error("weights", f"{given!r} given; allowed: {queues} numbers, one for each queue, and no `weight`")
    return tuple(table.check_integer("weights", weight, 1, 1024) for weight in given)


def _set_constants(values: dict[str, Any], constants: Mapping[str, Any], place: str, prefix: str) -> None:
    """Put a platform's numbers in the place of a profile's; a key that the profile does not have is refused."""
    for key, value in constants.items():
        full = f"{prefix}{key}"
        if key not in values or not isinstance(values[key], dict):
            tables = [k for k, v in values.items() if isinstance(v, dict)]
            raise ConfigurationError(f"{place}: constants.{full}: no such constant; {nearest(key, tables)}")
        if isinstance(value, Mapping):
            _set_constants(values[key], value, place, f"{full}.")
        elif "value" not in values[key] and "source" not in values[key]:
            raise ConfigurationError(f"{place}: constants.{full}: {value!r} given; this is a table of constants")
        else:
            values[key] = {"value": copy.deepcopy(value), "source": CHANGED}
