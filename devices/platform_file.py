"""Platform files: a machine as TOML, read and checked. Which driver makes a device is for the registry.

    include = ["laptop"]          # platforms whose tables this file builds on: a name, or a path beside this file
    description = "…"
    clock = "virtual"             # or "wall"
    dilation = "auto"             # or a whole number; times are that many times as long (default: auto, 1 if virtual)
    host = "dram"                 # the device in whose memory host buffers live

    [devices.gpu]
    driver = "emulated"           # an entry point of the group tierloop.devices
    reaches.dram = ["pcie"]       # its executors reach the memory of `dram` over these links; [] for a real device
    wrap = [{ kind = "throttled", bytes_per_s = 1e9 }]   # wrappers around it, innermost first (docs/wrappers.md)
    profile = "h100-sxm"          # this and all other keys are options of the driver

    [links.pcie]
    ends = ["dram", "gpu"]        # forward is from the first to the second
    bytes_per_s = 55e9            # or forward_bytes_per_s and back_bytes_per_s
    latency_ns = 500
    duplex = "full"               # or "half": both directions share the wire
    source = "…"                  # where the numbers come from

    [loads.others]                # traffic of other hosts, which this platform only feels (emulators/loads.py)
    memory = "pool"               # an emulated device with a memory
    over = ["switch"]             # links that it crosses, the last one ending at the memory (default: none of ours)
    bytes_per_s = 8e9             # on average, reads and writes together; 0 is no load
    read_fraction = 0.75          # the share of bursts that read (default: 1)
    burst_nbytes = 65536          # bytes per burst (the default), at least 100 ns apart
    arrivals = "poisson"          # of bursts (the default); or "regular", or "on-off"
    seed = 0                      # of its own random numbers (default: 0)

Tables of the including file win, key by key, over those of the included one; a `[devices.NAME]` with a `driver` key
replaces that device as a whole, since options belong to a driver. `overrides` (dotted keys) win over both and can only
change what the file has. Everything is checked here but the drivers' own options: unknown keys and names, types,
ranges, includes that go in a circle, routes whose links do not exist or do not join up. All errors are
ConfigurationError and name the file (the included one, if the key is from there), the key and what is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.tables import Table, read_toml
from tierloop.devices.wrappers.layers import Layer, read_layer

RATES = (1_000, 10**15)
"""Allowed rates in bytes/s: 1 kB/s to 1 PB/s."""
LATENCIES = (0, 10**9)
"""Allowed latencies in ns: up to 1 s."""
DILATIONS = (1, 1_000_000)
_BURSTS = (64, 1 << 30)
_SHORTEST_NS = 100
"""Bursts of a load come no closer on average: each is an event of the platform's clock."""
_ARRIVALS = ("poisson", "regular", "on-off")

Hop = tuple[str, Literal["forward", "back"]]
"""A link and the direction in which it is travelled when going from the executor to the memory."""


@dataclass(frozen=True)
class LinkSpec:
    """A link between two devices. Rates in bytes/s per direction, latency in ns per access.

    A half-duplex link carries one direction at a time; its arbitration is that of all links (emulators/timing.py).
    """

    name: str
    ends: tuple[str, str]
    forward_bytes_per_s: int
    back_bytes_per_s: int
    latency_ns: int
    duplex: Literal["full", "half"] = "full"
    source: str = ""


@dataclass(frozen=True)
class DeviceEntry:
    """A device as the file has it: `reaches` maps names of devices with memory to routes, `wrap` is innermost first."""

    name: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)
    reaches: dict[str, tuple[Hop, ...]] = field(default_factory=dict)
    wrap: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class LoadSpec:
    """Background traffic on a memory: `bytes_per_s` on average in bursts, of which `reads_per_1000` read.

    `over` goes from where the traffic comes from to the memory. In a `Topology` the memory has its full name.
    """

    name: str
    memory: str
    over: tuple[Hop, ...]
    bytes_per_s: int
    reads_per_1000: int
    burst_nbytes: int
    arrivals: Literal["poisson", "regular", "on-off"]
    seed: int


@dataclass(frozen=True)
class Topology:
    """What the devices of one site have in common; the registry puts it into `site.shared["topology"]`.

    `host` is the full name of the memory that host buffers live in. Times of emulated devices are `dilation` times as
    long as profiles and links say. `loads` is what other hosts do to the site's memories.
    """

    links: dict[str, LinkSpec] = field(default_factory=dict)
    host: str = ""
    dilation: int = 1
    loads: tuple[LoadSpec, ...] = ()


@dataclass(frozen=True)
class PlatformFile:
    """A checked platform file. `folder` is where files that its options name are looked for."""

    name: str
    folder: Path
    description: str
    clock: Literal["virtual", "wall"]
    dilation: int | Literal["auto"]
    host: str
    devices: dict[str, DeviceEntry]
    links: dict[str, LinkSpec]
    changed: tuple[str, ...] = ()
    """Overrides that were given, as text."""
    loads: dict[str, LoadSpec] = field(default_factory=dict)


Find = Callable[[str], Path]


def read_platform(path: Path, find: Find, overrides: Mapping[str, Any] | None = None) -> PlatformFile:
    """Read and check a platform file; `find` turns the name of another platform into its path.

    Raises ConfigurationError.
    """
    origins: dict[str, str] = {}
    values = _merged(path, find, (), origins)
    for key, value in (overrides or {}).items():
        _override(values, str(path), key, value)
        origins[key] = f"{path} with the override {key}"
    changed = tuple(f"{key} = {value!r}" for key, value in (overrides or {}).items())
    return _checked(Table(values, str(path), origins=origins), path, changed)


def _merged(path: Path, find: Find, trail: tuple[Path, ...], origins: dict[str, str]) -> dict[str, Any]:
    """The tables of a file on top of those that it includes; `origins` notes which file set a key last."""
    path = path.resolve()
    if path in trail:
        circle = " → ".join(p.name for p in (*trail[trail.index(path) :], path))
        raise ConfigurationError(f"{trail[-1]}: include: a circle: {circle}")
    values = read_toml(path)
    base: dict[str, Any] = {}
    for name in Table(values, str(path)).names("include", ()):
        beside = path.parent / (name if name.endswith(".toml") else f"{name}.toml")
        try:
            included = beside if beside.exists() else find(name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: include: {error}") from error
        _merge(base, _merged(included, find, (*trail, path), origins), "", {})
    values.pop("include", None)
    _merge(base, values, str(path), origins)
    return base


def _merge(
    base: dict[str, Any], over: Mapping[str, Any], place: str, origins: dict[str, str], depth: tuple[str, ...] = ()
) -> None:
    for key, value in over.items():
        mine = base.get(key)
        replaced = depth == ("devices",) and isinstance(value, Mapping) and "driver" in value
        if isinstance(mine, dict) and isinstance(value, Mapping) and not replaced:
            _merge(mine, value, place, origins, (*depth, key))
        else:
            base[key] = copy.deepcopy(value)
            _note(origins, ".".join((*depth, key)), value, place)


def _note(origins: dict[str, str], key: str, value: Any, place: str) -> None:
    origins[key] = place
    for inner in value if isinstance(value, Mapping) else ():
        _note(origins, f"{key}.{inner}", value[inner], place)


def _override(values: dict[str, Any], place: str, key: str, value: Any) -> None:
    parts = key.split(".")
    table = values
    for depth, part in enumerate(parts[:-1]):
        inner = table.get(part)
        if inner is None and depth >= 2:
            inner = table[part] = {}
        if not isinstance(inner, dict):
            known = [k for k, v in table.items() if isinstance(v, dict)]
            where = ".".join(parts[: depth + 1])
            raise ConfigurationError(f"{place}: override {key}: there is no {where}; {nearest(part, known)}")
        table = inner
    table[parts[-1]] = value


def _checked(table: Table, path: Path, changed: tuple[str, ...]) -> PlatformFile:
    description = table.text("description", default="")
    clock = table.text("clock", ("virtual", "wall"))
    dilation: int | Literal["auto"] = "auto"
    if table.get("dilation", "auto") != "auto":
        if isinstance(table.values["dilation"], str):
            raise table.error("dilation", f"{table.values['dilation']!r} given; allowed: 'auto' or a whole number")
        dilation = table.integer("dilation", *DILATIONS)
    entries = table.tables("devices")
    if not entries:
        raise table.error("devices", "a platform needs at least one [devices.NAME]")
    links = {name: _link(name, link, entries) for name, link in table.tables("links").items()}
    devices = {name: _device(name, device, links, entries) for name, device in entries.items()}
    loads = {name: _load(name, load, links, devices) for name, load in table.tables("loads").items()}
    host = table.text("host")
    if host not in devices:
        raise table.error("host", f"no device {host!r}; {nearest(host, list(devices))}")
    table.finish()
    return PlatformFile(
        path.stem,
        path.parent.resolve(),
        description,
        "virtual" if clock == "virtual" else "wall",
        dilation,
        host,
        devices,
        links,
        changed,
        loads,
    )


def _link(name: str, table: Table, devices: Mapping[str, Any]) -> LinkSpec:
    ends = table.names("ends")
    if len(ends) != 2:
        raise table.error("ends", f"{list(ends)} given; a link has two ends, both devices")
    for end in ends:
        if end not in devices:
            raise table.error("ends", f"no device {end!r}; {nearest(end, list(devices))}")
    if table.has("bytes_per_s"):
        forward = back = table.integer("bytes_per_s", *RATES)
    else:
        forward = table.integer("forward_bytes_per_s", *RATES)
        back = table.integer("back_bytes_per_s", *RATES)
    latency_ns = table.integer("latency_ns", *LATENCIES)
    duplex = table.text("duplex", ("full", "half"), default="full")
    source = table.text("source")
    table.finish()
    return LinkSpec(name, (ends[0], ends[1]), forward, back, latency_ns, "half" if duplex == "half" else "full", source)


def _device(name: str, table: Table, links: dict[str, LinkSpec], devices: Mapping[str, Any]) -> DeviceEntry:
    driver = table.text("driver")
    reach = table.table("reaches")
    direct = driver != "emulated"
    reaches = {target: _route(name, target, reach, links, devices, direct) for target in reach.values}
    wrap = tuple(read_layer(row) for row in table.rows("wrap"))
    options = {key: copy.deepcopy(v) for key, v in table.values.items() if key not in ("driver", "reaches", "wrap")}
    return DeviceEntry(name, driver, options, reaches, wrap)


def _load(name: str, table: Table, links: dict[str, LinkSpec], devices: Mapping[str, Any]) -> LoadSpec:
    memory = table.text("memory")
    if memory not in devices:
        raise table.error("memory", f"no device {memory!r}; {nearest(memory, list(devices))}")
    rate = table.integer("bytes_per_s", 0, RATES[1])
    burst_nbytes = table.integer("burst_nbytes", *_BURSTS, default=1 << 16)
    if rate * _SHORTEST_NS > burst_nbytes * 10**9:
        least = -(-rate * _SHORTEST_NS // 10**9)
        raise table.error("burst_nbytes", f"{burst_nbytes} given; allowed at {rate} bytes/s: {least} or more")
    fraction = table.get("read_fraction", 1)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise table.error("read_fraction", f"{fraction!r} given; allowed: 0 to 1")
    arrivals = table.text("arrivals", _ARRIVALS, default="poisson")
    seed = table.integer("seed", 0, (1 << 63) - 1, default=0)
    hops: list[Hop] = []
    at = memory
    for link in reversed(table.names("over", ())):
        if link not in links:
            raise table.error("over", f"no link {link!r}; {nearest(link, list(links))}")
        ends = links[link].ends
        if at not in ends:
            raise table.error("over", f"link {link} joins {ends[0]} and {ends[1]}, and does not lead to {at}")
        hops.insert(0, (link, "forward" if at == ends[1] else "back"))
        at = ends[0] if at == ends[1] else ends[1]
    table.finish()
    return LoadSpec(
        name,
        memory,
        tuple(hops),
        rate,
        round(fraction * 1000),
        burst_nbytes,
        arrivals,  # type: ignore[arg-type]  # checked
        seed,
    )


def _route(
    name: str, target: str, reach: Table, links: dict[str, LinkSpec], devices: Mapping[str, Any], direct: bool
) -> tuple[Hop, ...]:
    """The links from a device to a memory; a real device may reach it `direct`ly, over none that the file has."""
    if target not in devices:
        raise reach.error(target, f"no device {target!r}; {nearest(target, list(devices))}")
    if target == name:
        raise reach.error(target, "a device reaches its own memory anyway")
    at = name
    hops: list[Hop] = []
    for link in reach.names(target):
        if link not in links:
            raise reach.error(target, f"no link {link!r}; {nearest(link, list(links))}")
        ends = links[link].ends
        if at not in ends:
            raise reach.error(target, f"link {link} joins {ends[0]} and {ends[1]}, but the route has come to {at}")
        hops.append((link, "forward" if at == ends[0] else "back"))
        at = ends[1] if at == ends[0] else ends[0]
    if at != target and (hops or not direct):
        raise reach.error(target, f"the route ends at {at}, not at {target}; a link is missing")
    return tuple(hops)
