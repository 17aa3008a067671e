"""Which NUMA nodes this machine has, what they hold, how far apart they are, and which of them this process may use.

Read from /sys and /proc, nothing is measured. Nodes are a *set* of numbers with gaps: a node may have cores and no
memory, memory and no cores (CXL brought online as system RAM), both, or neither. What a kernel does not show is unknown
and left out; a file that makes no sense counts as one that is not there.

Latencies and rates come from the firmware's table (HMAT), as the kernel shows it: for each node with memory the best
initiators and what *they* see. Of any other pair of cores and memory nothing is known.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tierloop.devices.drivers.kernel_texts import names_in, number_of, text_in
from tierloop.devices.info import Path
from tierloop.devices.system import System

NODES = "/sys/devices/system/node"
TIERS = "/sys/devices/virtual/memory_tiering"
_MOST = 1 << 16
"""No list of cores or nodes is longer: a kernel that says so is not believed."""
_MB = 1_000_000
"""What the kernel calls the unit. Firmware may mean 2²⁰ (QEMU does); the smaller one promises nothing too much."""
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Access:
    """What the firmware says about a node's memory as seen from its best initiators; 0 is unknown.

    `level` 0 counts every initiator, 1 those with cores only. Of memory behind CXL that became a node, Linux tells the
    numbers and no initiator.
    """

    level: int
    initiators: frozenset[int]
    read_latency_ns: int = 0
    write_latency_ns: int = 0
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0


@dataclass(frozen=True)
class Node:
    """A node. `distances` is what the firmware says, 10 for the node itself; `tier` the kernel's memory tier ("").

    `free_nbytes` counts pages of files that the kernel can drop, of those in active use one half; `movable_nbytes` is
    memory in a zone whose pages leave when they are pinned.
    """

    id: int
    cpus: frozenset[int] = frozenset()
    nbytes: int = 0
    free_nbytes: int = 0
    movable_nbytes: int = 0
    distances: Mapping[int, int] = field(default_factory=dict, hash=False)
    access: tuple[Access, ...] = ()
    tier: str = ""

    @property
    def has_cpu(self) -> bool:
        return bool(self.cpus)

    @property
    def has_memory(self) -> bool:
        return self.nbytes > 0


@dataclass(frozen=True)
class NumaTopology:
    """The nodes by number, and what this process may use of them; empty where the kernel shows no nodes."""

    nodes: Mapping[int, Node] = field(hash=False)
    allowed_cpus: frozenset[int]
    allowed_nodes: frozenset[int]

    @property
    def with_memory(self) -> tuple[int, ...]:
        """Nodes with memory that this process may use, in order."""
        return tuple(n for n, node in sorted(self.nodes.items()) if node.has_memory and n in self.allowed_nodes)

    @property
    def with_cpus(self) -> tuple[int, ...]:
        """Nodes with cores that this process may use, in order."""
        return tuple(n for n, node in sorted(self.nodes.items()) if node.cpus & self.allowed_cpus)

    def cpus_near(self, nodes: Iterable[int]) -> frozenset[int]:
        """The cores that this process may use on these nodes, or on the nearest ones where these have none."""
        wanted = list(nodes)
        here = frozenset[int]().union(*(self.nodes[node].cpus for node in wanted)) & self.allowed_cpus
        if here or not wanted or not self.with_cpus:
            return here or self.allowed_cpus
        by_distance = {n: min(self._distance(n, node) for node in wanted) for n in self.with_cpus}
        nearest = min(by_distance.values())
        chosen = (self.nodes[n].cpus for n, distance in by_distance.items() if distance == nearest)
        return frozenset[int]().union(*chosen) & self.allowed_cpus

    def nodes_of_cpus(self, cpus: Iterable[int]) -> frozenset[int]:
        """The nodes that these cores belong to."""
        wanted = frozenset(cpus)
        return frozenset(n for n, node in self.nodes.items() if node.cpus & wanted)

    def path(self, cpus: Iterable[int], memory: str, node: int | None) -> Path:
        """How cores reach a memory on a node, as far as the firmware says: only its best initiators are known."""
        initiators = self.nodes_of_cpus(cpus)
        reached = None if node is None else self.nodes.get(node)
        for access in reached.access if reached is not None else ():
            if initiators and initiators <= access.initiators:
                return Path(memory, access.read_latency_ns, access.read_bytes_per_s, access.write_bytes_per_s)
        return Path(memory, 0, 0, 0)

    def _distance(self, cores: int, memory: int) -> int:
        best = any(cores in access.initiators for access in self.nodes[memory].access)
        told = self.nodes[cores].distances.get(memory, self.nodes[memory].distances.get(cores, 255))
        return 0 if best else told


def numa_topology(system: System) -> NumaTopology:
    """What the kernel shows now. Raises nothing: what cannot be read is not there."""
    ids = sorted(int(name[4:]) for name in names_in(system, NODES) if re.fullmatch(r"node\d{1,4}", name))
    online = _numbers(system, f"{NODES}/online")
    distances_to = sorted(online) if online else ids
    tiers, movable = _tiers(system), _movable(system)
    nodes = {
        n: Node(
            n,
            cpus=_numbers(system, f"{NODES}/node{n}/cpulist"),
            distances=_distances(system, n, distances_to),
            movable_nbytes=movable.get(n, 0),
            access=tuple(one for level in (0, 1) if (one := _access(system, n, level)) is not None),
            tier=tiers.get(n, ""),
            **_memory(system, n),
        )
        for n in ids
    }
    everywhere = frozenset[int]().union(*(node.cpus for node in nodes.values()))
    allowed_cpus = _allowed(system, "Cpus_allowed_list", "cpus")
    allowed_nodes = _allowed(system, "Mems_allowed_list", "mems")
    return NumaTopology(nodes, everywhere if allowed_cpus is None else allowed_cpus,
                        frozenset(nodes) if allowed_nodes is None else allowed_nodes)  # fmt: skip


def free_nbytes(system: System, node: int) -> int:
    """What is free on a node now, pages of files that can be dropped included; 0 where the kernel does not say."""
    return _memory(system, node)["free_nbytes"]


def numbers_of(text: str) -> frozenset[int]:
    """A list as the kernel writes it, "0-2,7". Raises ValueError for what is none, or is absurdly long."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < _MOST:
            raise ValueError(f"{part!r} is no range of numbers below {_MOST}")
        found |= set(range(low, high + 1))
    return frozenset(found)


def shown(numbers: Iterable[int]) -> str:
    """Numbers as the kernel writes them, "0-2,7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _allowed(system: System, key: str, what: str) -> frozenset[int] | None:
    """What the kernel lets this thread use, by its status and its control group; None where neither says."""
    found: frozenset[int] | None = None
    for path in ("/proc/thread-self/status", "/proc/self/status"):
        for line in text_in(system, path).splitlines():
            name, _, value = line.partition(":")
            if name == key and found is None:
                found = _read_numbers(value) or None
    for line in text_in(system, "/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers or "cpuset" in controllers.split(","):
            root, file = ("/sys/fs/cgroup", f"cpuset.{what}.effective")
            if controllers:  # version 1 has a folder for each controller, and names of its own
                root, file = (f"{root}/cpuset", f"cpuset.effective_{what}")
            here = _numbers(system, str(PurePosixPath(root + group) / file))
            if here:
                found = here if found is None else found & here
    return found


def _memory(system: System, node: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in text_in(system, f"{NODES}/node{node}/meminfo").splitlines():
        match = re.fullmatch(r"Node \d+ ([A-Za-z_()]+):\s+(\d+) kB", line.strip())
        if match:
            found[match[1]] = (number_of(match[2]) or 0) * 1024
    free = found.get("MemFree", 0) + found.get("Inactive(file)", 0) + found.get("Active(file)", 0) // 2
    return {"nbytes": found.get("MemTotal", 0), "free_nbytes": min(free, found.get("MemTotal", 0))}


def _distances(system: System, node: int, to: list[int]) -> dict[int, int]:
    values = [number_of(text) for text in text_in(system, f"{NODES}/node{node}/distance").split()]
    told = [value for value in values if value is not None]
    return dict(zip(to, told, strict=True)) if len(told) == len(values) == len(to) else {}


def _access(system: System, node: int, level: int) -> Access | None:
    folder = f"{NODES}/node{node}/access{level}/initiators"
    names = names_in(system, folder)
    initiators = frozenset(int(name[4:]) for name in names if re.fullmatch(r"node\d{1,4}", name))
    value = {name: _integer(system, f"{folder}/{name}") for name in names if name.endswith(("_latency", "_bandwidth"))}
    if not initiators and not any(value.values()):
        return None
    return Access(
        level,
        initiators,
        value.get("read_latency", 0),
        value.get("write_latency", 0),
        value.get("read_bandwidth", 0) * _MB,
        value.get("write_bandwidth", 0) * _MB,
    )


def _tiers(system: System) -> dict[int, str]:
    names = [name for name in names_in(system, TIERS) if re.fullmatch(r"memory_tier\d+", name)]
    return {node: name for name in names for node in _numbers(system, f"{TIERS}/{name}/nodelist")}


def _movable(system: System) -> dict[int, int]:
    """Bytes in each node's movable zone."""
    found: dict[int, int] = {}
    node, zone = -1, ""
    for line in text_in(system, "/proc/zoneinfo").splitlines():
        head = re.fullmatch(r"Node (\d{1,4}), zone\s+(\w+)", line)
        if head:
            node, zone = int(head[1]), head[2]
        managed = re.fullmatch(r"\s+managed\s+(\d+)", line)
        if managed and zone == "Movable":
            found[node] = found.get(node, 0) + (number_of(managed[1]) or 0) * _PAGE
    return found


def _numbers(system: System, path: str) -> frozenset[int]:
    return _read_numbers(text_in(system, path))


def _read_numbers(text: str) -> frozenset[int]:
    try:
        return numbers_of(text)
    except ValueError:
        return frozenset()


def _integer(system: System, path: str) -> int:
    return number_of(text_in(system, path)) or 0
