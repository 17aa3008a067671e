"""The machine that a guest is, as a file describes it: memory nodes, paths between them, drives, CXL memories.

What must hold, and is checked here so that no guest is started for nothing:

- Node ids are 0, 1, 2 …; at least one node has processors. A node without processors is memory only.
- A distance or a path names nodes, or bridges of CXL memories (a bridge is called as its memory
  is where nothing else is said); a path begins at a node that has processors.
- A CXL memory is a multiple of 256 MiB, because that is what its capacity is counted in.
- Serial numbers differ: tests look a device up by its serial number, since its number changes from boot to boot.

CXL memories on one `bridge` share a fixed window, so that a region can be interleaved over them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierloop.devices.drivers.options import integer, refuse_unknown
from tierloop.devices.errors import ConfigurationError, nearest

MACHINES = Path(__file__).resolve().parent / "machines"
DEFAULT = "three-nodes"
CXL_UNIT_MIB = 256
_FAR, _NEAR, _OTHER = 254, 10, 20
_MOST_NODES, _MOST_BRIDGES, _MOST_MIB = 16, 8, 1 << 20


@dataclass(frozen=True)
class Node:
    """A NUMA node: memory, and processors or none."""

    id: int
    mib: int
    cpus: int


@dataclass(frozen=True)
class Way:
    """What HMAT says of one way from processors to memory; its rates stand in MB/s."""

    source: int
    target: int
    latency_ns: int
    mb_per_s: int


@dataclass(frozen=True)
class Drive:
    """An NVMe drive; limits of 0 are none. Reads of a sector in `error_sectors` (512 B each) fail for ever."""

    serial: str
    mib: int
    mib_per_s: int
    iops: int
    hotplug: bool
    error_sectors: tuple[int, ...]


@dataclass(frozen=True)
class Cxl:
    """A CXL type-3 memory. Paths and distances name its `bridge`; `port_node` is the node number that stands for the
    bridge in the firmware's tables before there is memory behind it."""

    name: str
    serial: int
    persistent: bool
    mib: int
    bridge: str
    port_node: int


@dataclass(frozen=True)
class Machine:
    """All of it. `distances` holds every pair once, smaller number first; `origin` is what `load` takes for it."""

    name: str
    origin: str
    about: str
    nodes: tuple[Node, ...]
    distances: tuple[tuple[int, int, int], ...]
    paths: tuple[Way, ...]
    drives: tuple[Drive, ...]
    cxl: tuple[Cxl, ...]
    rdma: bool

    @property
    def mib(self) -> int:
        """The most host memory that it can take."""
        return sum(node.mib for node in self.nodes) + sum(memory.mib for memory in self.cxl)

    @property
    def bridges(self) -> dict[str, tuple[Cxl, ...]]:
        """CXL memories by the bridge that they sit on."""
        names = dict.fromkeys(memory.bridge for memory in self.cxl)
        return {name: tuple(memory for memory in self.cxl if memory.bridge == name) for name in names}

    def initiator(self, node: Node) -> int:
        """The node whose processors reach it best: itself if it has some, else the path with the least latency."""
        if node.cpus:
            return node.id
        ways = [path for path in self.paths if path.target == node.id]
        return min(ways, key=lambda path: path.latency_ns).source if ways else self.first_with_cpus

    @property
    def first_with_cpus(self) -> int:
        """The first node that has processors."""
        return next(node.id for node in self.nodes if node.cpus)


def load(name: str) -> Machine:
    """A machine by the name of one that ships, or by the path of a file. Raises ConfigurationError."""
    shipped = {path.stem: path for path in sorted(MACHINES.glob("*.toml"))}
    path = shipped.get(name, Path(name))
    if path.suffix != ".toml":
        raise ConfigurationError(
            f"guest machine {name!r}: {nearest(name, list(shipped))}; allowed: {', '.join(shipped)}, or a .toml file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"guest machine {path}: {error}") from error
    return parse(text, path.stem, str(path.absolute()))


def parse(text: str, name: str, origin: str = "") -> Machine:
    """The machine that a text describes. Raises ConfigurationError naming the entry that is wrong."""
    where = f"guest machine {name}"
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where}: is no TOML: {error}") from error
    refuse_unknown(where, told, ["about", "rdma", "node", "distance", "path", "drive", "cxl"])
    about, rdma = told.get("about", ""), told.get("rdma", True)
    if not isinstance(about, str) or not isinstance(rdma, bool):
        raise ConfigurationError(f"{where}: about is a text and rdma true or false; found {about!r}, {rdma!r}")
    nodes = _nodes(where, _tables(where, told, "node"))
    cxl = _memories(where, _tables(where, told, "cxl"), len(nodes))
    numbers: dict[int | str, int] = {node.id: node.id for node in nodes} | {one.bridge: one.port_node for one in cxl}
    return Machine(
        name=name,
        origin=origin,
        about=about,
        nodes=nodes,
        distances=_distances(where, _tables(where, told, "distance"), numbers),
        paths=_paths(where, _tables(where, told, "path"), numbers, nodes),
        drives=_drives(where, _tables(where, told, "drive")),
        cxl=cxl,
        rdma=rdma,
    )


def _tables(where: str, told: dict[str, Any], key: str) -> list[dict[str, Any]]:
    given = told.get(key, [])
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ConfigurationError(f"{where}: {key} is written as [[{key}]] tables; found {given!r}")
    return given


def _nodes(where: str, tables: list[dict[str, Any]]) -> tuple[Node, ...]:
    nodes = []
    for at, table in enumerate(tables):
        name = f"{where}: node {at}"
        refuse_unknown(name, table, ["id", "mib", "cpus"])
        node = Node(integer(name, table, "id", -1), _mib(name, table), integer(name, table, "cpus", 0))
        if node.id != at:
            raise ConfigurationError(f"{name}: id = {node.id}; nodes are numbered 0, 1, 2 … in the order of the file")
        nodes.append(node)
    if not any(node.cpus for node in nodes) or len(nodes) > _MOST_NODES:
        raise ConfigurationError(f"{where}: {len(nodes)} nodes; allowed: 1 to {_MOST_NODES}, one of them with cpus")
    if not nodes[0].cpus:
        raise ConfigurationError(f"{where}: node 0 has no cpus; a machine boots from node 0")
    return tuple(nodes)


def _memories(where: str, tables: list[dict[str, Any]], first_node: int) -> tuple[Cxl, ...]:
    memories: list[Cxl] = []
    bridges: dict[str, int] = {}
    for at, table in enumerate(tables):
        name = f"{where}: cxl {at}"
        refuse_unknown(name, table, ["name", "serial", "persistent", "mib", "bridge"])
        mib = _mib(name, table)
        if mib % CXL_UNIT_MIB:
            raise ConfigurationError(f"{name}: mib = {mib}; allowed: multiples of {CXL_UNIT_MIB}")
        called = _word(name, table, "name", f"cxl{at}")
        persistent = table.get("persistent", False)
        if not isinstance(persistent, bool):
            raise ConfigurationError(f"{name}: persistent = {persistent!r}; allowed: true, false")
        serial = integer(name, table, "serial", 0, least=1)
        if serial >= 1 << 64:
            raise ConfigurationError(f"{name}: serial = {serial:#x}; allowed: 64 bits")
        bridge = _word(name, table, "bridge", called)
        port_node = first_node + bridges.setdefault(bridge, len(bridges))
        memories.append(Cxl(called, serial, persistent, mib, bridge, port_node))
    if len(bridges) > _MOST_BRIDGES:
        raise ConfigurationError(f"{where}: {len(bridges)} bridges of CXL memories; allowed: up to {_MOST_BRIDGES}")
    _different(where, "names of cxl memories", [memory.name for memory in memories])
    _different(where, "serials of cxl memories", [memory.serial for memory in memories])
    for memory in memories:
        kin = [other for other in memories if other.bridge == memory.bridge]
        if len({other.persistent for other in kin}) > 1:
            raise ConfigurationError(
                f"{where}: bridge {memory.bridge!r} has volatile and persistent memories; keep apart"
            )
        if len(kin) not in (1, 2, 4):
            raise ConfigurationError(f"{where}: bridge {memory.bridge!r} has {len(kin)} memories; allowed: 1, 2, 4")
    return tuple(memories)


def _distances(
    where: str, tables: list[dict[str, Any]], numbers: dict[int | str, int]
) -> tuple[tuple[int, int, int], ...]:
    """Every pair: what the file says, and 20 for the rest (what Linux takes for another node)."""
    told: dict[tuple[int, int], int] = {}
    for at, table in enumerate(tables):
        name = f"{where}: distance {at}"
        refuse_unknown(name, table, ["from", "to", "value"])
        pair = sorted((_number(name, table, "from", numbers), _number(name, table, "to", numbers)))
        value = integer(name, table, "value", 0, least=_NEAR + 1)
        if pair[0] == pair[1] or value > _FAR:
            raise ConfigurationError(f"{name}: {value} from {pair[0]} to {pair[1]}; allowed: 11 to {_FAR}, two nodes")
        if told.setdefault((pair[0], pair[1]), value) != value:
            raise ConfigurationError(f"{name}: from {pair[0]} to {pair[1]} was {told[pair[0], pair[1]]} before")
    every = sorted(numbers.values())
    return tuple((a, b, told.get((a, b), _OTHER)) for a in every for b in every if a < b)


def _paths(
    where: str, tables: list[dict[str, Any]], numbers: dict[int | str, int], nodes: tuple[Node, ...]
) -> tuple[Way, ...]:
    paths: dict[tuple[int, int], Way] = {}
    for at, table in enumerate(tables):
        name = f"{where}: path {at}"
        refuse_unknown(name, table, ["from", "to", "latency_ns", "mb_per_s"])
        source, target = _number(name, table, "from", numbers), _number(name, table, "to", numbers)
        if source >= len(nodes) or not nodes[source].cpus:
            raise ConfigurationError(f"{name}: begins at {table['from']!r}, which has no cpus")
        if (source, target) in paths:
            raise ConfigurationError(f"{name}: from {source} to {target} was described before")
        paths[source, target] = Way(
            source,
            target,
            integer(name, table, "latency_ns", 0, least=1),
            integer(name, table, "mb_per_s", 0, least=1),
        )
    return tuple(paths.values())


def _drives(where: str, tables: list[dict[str, Any]]) -> tuple[Drive, ...]:
    drives = []
    for at, table in enumerate(tables):
        name = f"{where}: drive {at}"
        refuse_unknown(name, table, ["serial", "mib", "mib_per_s", "iops", "hotplug", "error_sectors"])
        mib, hotplug = _mib(name, table), table.get("hotplug", False)
        sectors = table.get("error_sectors", [])
        if not isinstance(hotplug, bool):
            raise ConfigurationError(f"{name}: hotplug = {hotplug!r}; allowed: true, false")
        if not isinstance(sectors, list) or any(type(one) is not int or not 0 <= one < mib << 11 for one in sectors):
            raise ConfigurationError(f"{name}: error_sectors = {sectors!r}; allowed: sectors in [0, {mib << 11})")
        limits = (integer(name, table, "mib_per_s", 0), integer(name, table, "iops", 0))
        drives.append(Drive(_word(name, table, "serial", ""), mib, *limits, hotplug, tuple(sectors)))
    _different(where, "serials of drives", [drive.serial for drive in drives])
    return tuple(drives)


def _mib(name: str, table: dict[str, Any]) -> int:
    mib = integer(name, table, "mib", 0, least=1)
    if mib > _MOST_MIB:
        raise ConfigurationError(f"{name}: mib = {mib}; allowed: up to {_MOST_MIB}")
    return mib


def _word(name: str, table: dict[str, Any], key: str, default: str) -> str:
    """A word that QEMU's option syntax passes on untouched."""
    given = table.get(key, default)
    if not isinstance(given, str) or not 0 < len(given) <= 20 or not given.replace("-", "").isalnum():
        raise ConfigurationError(f"{name}: {key} = {given!r}; allowed: 1 to 20 letters, digits and -")
    if not given.isascii() or given.startswith("-"):
        raise ConfigurationError(f"{name}: {key} = {given!r}; allowed: ASCII, beginning with a letter or digit")
    return given


def _number(name: str, table: dict[str, Any], key: str, numbers: dict[int | str, int]) -> int:
    given = table.get(key)
    if isinstance(given, bool) or not isinstance(given, (int, str)) or given not in numbers:
        raise ConfigurationError(
            f"{name}: {key} = {given!r} is no node; allowed: {', '.join(str(one) for one in numbers)}"
        )
    return numbers[given]


def _different(where: str, what: str, values: Iterable[Any]) -> None:
    seen = list(values)
    for value in seen:
        if seen.count(value) > 1:
            raise ConfigurationError(f"{where}: {what} differ; {value!r} comes twice")
