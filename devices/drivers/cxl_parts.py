"""The parts that CXL hardware consists of, as frozen data; cxl_topology.py reads them and says what they mean.

Sizes are in bytes. What could not be read is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """Why something is not usable, and the command that would change it ("" where none would)."""

    subject: str
    reason: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}" + (f"; to change it: {self.command}" if self.command else "")


@dataclass(frozen=True)
class Memdev:
    """A memory device. `dynamic` are its dynamic capacity partitions: (name, size); `bridge` the host bridge it is
    behind."""

    name: str
    serial: int | None
    ram_nbytes: int
    pmem_nbytes: int
    numa_node: int | None
    firmware: str
    payload_nbytes: int | None
    label_nbytes: int | None
    enabled: bool
    bus_address: str | None
    endpoint: str | None = None
    dynamic: tuple[tuple[str, int], ...] = ()
    bridge: str | None = None

    @property
    def state(self) -> Literal["enabled", "disabled"]:
        return "enabled" if self.enabled else "disabled"


@dataclass(frozen=True)
class Decoder:
    """An HDM decoder of a root (a fixed window of the platform), a switch or an endpoint.

    `mode` and `dpa…` are an endpoint's; `takes` (ram, pmem, …) a root's; `targets` those below it, in order.
    """

    name: str
    port: str
    kind: Literal["root", "switch", "endpoint"]
    start: int | None
    nbytes: int | None
    ways: int | None
    granule_nbytes: int | None
    target_type: str
    locked: bool
    region: str | None
    mode: str = ""
    dpa: int | None = None
    dpa_nbytes: int | None = None
    targets: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Port:
    """A root, a switch or an endpoint, with its decoders. `device` is what it belongs to: for an endpoint, a memdev.

    `below` are its downstream ports: what targets of decoders call each, and the device that it is.
    """

    name: str
    kind: Literal["root", "switch", "endpoint"]
    device: str | None
    enabled: bool
    decoders: tuple[Decoder, ...]
    below: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Region:
    """A region and its interleave set: `targets` are the endpoint decoders in order, `memdevs` whose they are."""

    name: str
    uuid: str
    nbytes: int
    resource: int | None
    ways: int | None
    granule_nbytes: int | None
    mode: str
    committed: bool
    enabled: bool
    targets: tuple[str, ...]
    memdevs: tuple[str, ...]

    @property
    def state(self) -> Literal["enabled", "committed", "reset"]:
        return "enabled" if self.enabled else "committed" if self.committed else "reset"

    @property
    def interleave(self) -> str:
        """The set in words."""
        if self.ways == 1:
            return f"1 way on {', '.join(self.memdevs)}"
        return f"{self.ways or '?'} ways of {self.granule_nbytes or '?'} B over {', '.join(self.memdevs) or 'nothing'}"


@dataclass(frozen=True)
class Dax:
    """A dax device. `region` is the CXL region below it, None where it is none or cannot be told."""

    name: str
    nbytes: int | None
    align: int | None
    target_node: int | None
    numa_node: int | None
    resource: int | None
    driver: str | None
    region: str | None
    persistent: bool

    @property
    def mode(self) -> str:
        """Devdax, system-ram, disabled, or the name of another driver."""
        return {"device_dax": "devdax", "kmem": "system-ram", None: "disabled"}.get(self.driver, str(self.driver))

    @property
    def path(self) -> str:
        return f"/dev/{self.name}"


@dataclass(frozen=True)
class Node:
    """A NUMA node that dax devices became: its memory blocks. Kernels move pinned pages out of movable ones."""

    number: int
    daxes: tuple[str, ...]
    online: int
    offline: int
    movable: int
    block_nbytes: int | None

    @property
    def state(self) -> Literal["online", "partly online", "offline"]:
        return "offline" if not self.online else "partly online" if self.offline else "online"


@dataclass(frozen=True)
class Topology:
    """Everything that was found; see the top of the file."""

    memdevs: tuple[Memdev, ...] = ()
    ports: tuple[Port, ...] = ()
    regions: tuple[Region, ...] = ()
    daxes: tuple[Dax, ...] = ()
    nodes: tuple[Node, ...] = ()
    auto_online: str = ""
    problems: tuple[Problem, ...] = ()
    complaints: tuple[str, ...] = ()

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        return tuple(decoder for port in self.ports for decoder in port.decoders)

    def dax(self, name: str) -> Dax | None:
        return next((dax for dax in self.daxes if dax.name == name), None)

    def region(self, name: str | None) -> Region | None:
        return next((region for region in self.regions if region.name == name), None)

    def decoder(self, name: str) -> Decoder | None:
        return next((decoder for decoder in self.decoders if decoder.name == name), None)

    def memdev(self, name: str) -> Memdev | None:
        return next((memdev for memdev in self.memdevs if memdev.name == name), None)

    def node(self, number: int | None) -> Node | None:
        return next((node for node in self.nodes if node.number == number), None)

    def dax_of_node(self, number: int) -> Dax | None:
        """A dax device that became, or would become, that node; one in mode system-ram first."""
        there = [dax for dax in self.daxes if dax.target_node == number]
        return next((dax for dax in there if dax.mode == "system-ram"), there[0] if there else None)

    def windows(self, memdev: Memdev, kind: str) -> tuple[Decoder, ...]:
        """The platform's windows in which a region of one memdev can lie, ram or pmem; those for it alone come first.

        Where sysfs does not say what a window leads to, it may be any.
        """
        found = []
        for port in self.ports:
            mine = {number for number, device in port.below if device == memdev.bridge}
            for decoder in port.decoders:
                leads = not mine or not decoder.targets or bool(mine & set(decoder.targets))
                if decoder.kind == "root" and kind in decoder.takes and leads:
                    found.append(decoder)
        return tuple(sorted(found, key=lambda decoder: len(decoder.targets)))

    def why(self, *subjects: str | None) -> str:
        """What is known to be wrong with these, in one line; "" if nothing."""
        return "; ".join(str(problem) for problem in self.problems if problem.subject in subjects)

    def chain(self, dax: Dax) -> tuple[str, ...]:
        """The names of what a dax device rests on: itself, its region, decoders and memdevs."""
        region = self.region(dax.region)
        return (dax.name, *(() if region is None else (region.name, *region.targets, *region.memdevs)))
