"""What a cpu device is opened with: which cores, which nodes, how much memory in which pages; checked before anything.

A node that is not there, has no memory, or may not be used by this process is refused with those that are allowed. The
cores are those of the nodes, as far as the process may use them, or the nearest ones for a node without (CXL). Affinity
and cpusets are the kernel's to say: a core outside of them is refused, never taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.drivers.numa import PAGE, Mode, check_policy
from tierloop.devices.drivers.numa_mapping import free_pages, has_pool, pool_advice
from tierloop.devices.drivers.numa_topology import NumaTopology, numa_topology, shown
from tierloop.devices.drivers.options import integer, names, refuse_unknown
from tierloop.devices.errors import ConfigurationError, OutOfMemory, Unsupported
from tierloop.devices.system import System

OPTIONS = [
    "capacity",
    "queues",
    "cores",
    "threads",
    "reaches",
    "folder",
    "node",
    "nodes",
    "placement",
    "weights",
    "huge_pages",
]
MOST_QUEUES = 1024
"""A thread serves each."""
HUGE_PAGES = {"transparent": PAGE, "none": PAGE, "2MiB": 2 << 20, "1GiB": 1 << 30}
"""What `huge_pages` may say, and the size of the pages that memory is taken in then."""


@dataclass(frozen=True)
class CpuOptions:
    """Checked options. No `nodes`: memory lies where the kernel puts it, as that of any process."""

    capacity: int
    queues: int
    threads: int
    reaches: tuple[str, ...]
    cores: frozenset[int]
    nodes: tuple[int, ...]
    placement: Mode
    weights: tuple[int, ...] | None
    huge_pages: str
    topology: NumaTopology

    @property
    def page(self) -> int:
        """The size of the pages that memory is taken in, in bytes."""
        return HUGE_PAGES[self.huge_pages]

    @property
    def pooled(self) -> bool:
        """Whether pages come from a pool of huge ones."""
        return self.page != PAGE


def read_options(name: str, options: dict[str, Any], system: System) -> CpuOptions:
    """Raises ConfigurationError, and OutOfMemory where the pool of huge pages is empty."""
    refuse_unknown(name, options, OPTIONS)
    topology = numa_topology(system)
    nodes = _nodes(name, options, topology)
    placement, weights = _placement(name, options, nodes)
    huge_pages = _huge_pages(name, options)
    cores = _cores(name, options.get("cores"), topology, nodes)
    return CpuOptions(
        _capacity(name, options, system, topology, nodes, placement, HUGE_PAGES[huge_pages]),
        integer(name, options, "queues", 4, 1, MOST_QUEUES),
        integer(name, options, "threads", len(cores), 1),
        names(name, options, "reaches"),
        cores,
        nodes,
        placement,
        weights,
        huge_pages,
        topology,
    )


def _nodes(name: str, options: dict[str, Any], topology: NumaTopology) -> tuple[int, ...]:
    if "node" in options and "nodes" in options:
        raise ConfigurationError(f"{name}: node and nodes are both given; allowed: one of them")
    if "node" in options:
        wanted: Any = [options["node"]]
    elif "nodes" in options:
        wanted = options["nodes"]
    else:
        return ()
    if not isinstance(wanted, (list, tuple)):
        raise ConfigurationError(f"{name}: nodes = {wanted!r}; allowed: a list of numbers of nodes")
    check_policy(name, "bind", wanted, None)
    allowed = shown(topology.with_memory) or "none: this kernel shows no node with memory"
    for node in wanted:
        if node not in topology.nodes:
            raise ConfigurationError(f"{name}: node {node} is not there; allowed: {allowed}")
        if not topology.nodes[node].has_memory:
            raise ConfigurationError(f"{name}: node {node} has no memory; allowed: {allowed}")
        if node not in topology.allowed_nodes:
            raise ConfigurationError(
                f"{name}: this process may use no memory of node {node} (its cpuset); allowed: {allowed}"
            )
    return tuple(wanted)


def _placement(name: str, options: dict[str, Any], nodes: tuple[int, ...]) -> tuple[Mode, tuple[int, ...] | None]:
    for key in ("placement", "weights"):
        if key in options and not nodes:
            raise ConfigurationError(f"{name}: {key} needs node or nodes")
    placement, weights = options.get("placement", "bind"), options.get("weights")
    if weights is not None and (isinstance(weights, str) or not isinstance(weights, Sequence)):
        raise ConfigurationError(f"{name}: weights = {weights!r}; allowed: a list of integers, one for each node")
    if placement == "weighted-interleave" and weights is None:
        raise ConfigurationError(f"{name}: placement = 'weighted-interleave' needs weights, one for each node")
    if nodes:
        check_policy(name, placement, nodes, weights)
    return placement, None if weights is None else tuple(weights)


def _huge_pages(name: str, options: dict[str, Any]) -> str:
    given = options.get("huge_pages", "transparent")
    if not isinstance(given, str) or given not in HUGE_PAGES:
        raise ConfigurationError(f"{name}: huge_pages = {given!r}; allowed: {', '.join(HUGE_PAGES)}")
    return given


def _cores(name: str, wanted: Any, topology: NumaTopology, nodes: tuple[int, ...]) -> frozenset[int]:
    """The cores to run on. Raises ConfigurationError for what is no list of cores that the process may use."""
    usable = topology.allowed_cpus or frozenset(os.sched_getaffinity(0))
    if wanted is None:
        return topology.cpus_near(nodes) or usable
    if not isinstance(wanted, (list, tuple)) or not wanted or any(type(core) is not int for core in wanted):
        raise ConfigurationError(f"{name}: option 'cores' is {wanted!r}; allowed: a list of core numbers, not empty")
    missing = sorted(set(wanted) - usable)
    if missing:
        raise ConfigurationError(f"{name}: the process may not use core {missing[0]}; allowed: {sorted(usable)}")
    return frozenset(wanted)


def _capacity(
    name: str,
    options: dict[str, Any],
    system: System,
    topology: NumaTopology,
    nodes: tuple[int, ...],
    placement: Mode,
    page: int,
) -> int:
    if page == PAGE:
        default = _half_of_what_is_free(system, topology, nodes)
    else:
        default = free_pages(system, page, nodes or None) * page
        if default == 0 and not has_pool(system, page):
            size = f"{page >> 20} MiB"
            raise Unsupported(name, "open", f"this kernel has no huge pages of {size}: no pool of them below /sys")
        if default == 0:
            raise OutOfMemory(name, "open", pool_advice(page, options.get("capacity", page), nodes))
    capacity = integer(name, options, "capacity", default, page)
    there = sum(topology.nodes[node].nbytes for node in nodes)
    if nodes and placement != "preferred" and capacity > there:
        raise ConfigurationError(f"{name}: capacity = {capacity}; nodes {shown(nodes)} have {there} bytes in all")
    return capacity


def _half_of_what_is_free(system: System, topology: NumaTopology, nodes: tuple[int, ...]) -> int:
    """Half of what the machine, its control groups and the nodes leave, in whole pages."""
    left = available_nbytes(system)
    within = nodes or topology.with_memory
    if within and (nodes or len(within) < sum(node.has_memory for node in topology.nodes.values())):
        left = min(left, sum(topology.nodes[node].free_nbytes for node in within))
    return left // 2 // PAGE * PAGE
