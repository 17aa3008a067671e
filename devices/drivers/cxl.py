"""The cxl driver: memory behind CXL as a memory that host cores reach by loads and stores.

One memory and no executors. `Region.view` is the mapping itself, so a cpu device that names this one in its option
`reaches` runs every kernel on the regions where they lie: nothing is staged. What must hold beyond the device contract:

- It is what it says. `info.notes` has the mode, what the memory rests on (dax device, region, interleave set, decoders,
  serials), and under `why` what is not as it might be. A file or this host's own memory is never called CXL memory.
- `alloc` gives zeroed bytes: a devdax keeps what its last owner wrote, so zeros are really written. On a node the pages
  are touched, and looked at afterwards: one that lies elsewhere is an error, and counted (`Placements`).
- A lost page (poison, a file that was cut) ends the command that names it with a MediaError (guard.py). Its bytes are
  never allocated again while the device is open.
- Rates are the device's own or what the options say, never measured here: `rates`, with `notes["rates"]` saying whence.
- Where `persistent`, what was there when the device is opened is kept, `adopt` finds it, and a `Flush` that a cpu
  device carries out makes stores durable (cxl_flush.py).

Options: one of `path` (a devdax such as /dev/dax0.0, or a file), `node` (a NUMA node that CXL memory became) and
`serial` (of a memory device: whichever of the two it is now); `capacity` in bytes (all; of a node, most of what is
free); `read_latency_ns`, `write_latency_ns`, `read_bytes_per_s`, `write_bytes_per_s` instead of what the device says;
`folder` that a relative path starts from (the registry sets it).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Command, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate
from tierloop.devices.drivers import guard, numa
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.cxl_cdat import Rates
from tierloop.devices.drivers.cxl_flush import Flushes
from tierloop.devices.drivers.cxl_opening import Backing, open_backing
from tierloop.devices.drivers.cxl_options import Options
from tierloop.devices.drivers.cxl_rates import rates_of, stated_paths
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.guard import PAGE
from tierloop.devices.drivers.host_memory import require_room
from tierloop.devices.drivers.uses import Uses
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    MediaError,
    OutOfRange,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.info import DeviceInfo, MemoryInfo, Path
from tierloop.devices.placement import Placement, Placements, memory_nodes
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System, from_os
from tierloop.devices.threads import let_in

_MADV_DONTNEED = 4

__all__ = ["CxlDevice", "cxl_topology", "open_cxl"]


def open_cxl(name: str, site: Site, options: dict[str, Any], system: System = HOST) -> CxlDevice:
    """The entry point `cxl`; `system` is the operating system to reach the memory through.

    Raises ConfigurationError (options, virtual clock), and what `open_backing` does: for memory that is there but not
    ready, the error names its state and the command that would change it.
    """
    checked = Options.of(name, options)
    if site.clock.virtual:
        raise ConfigurationError(f"{name} is a real device and cannot run on the virtual clock; use the wall clock")
    with ExitStack() as undo:
        device = CxlDevice(name, site, checked, open_backing(name, checked, system, undo))
        undo.pop_all()
        return device


open_cxl.takes_folder = True  # type: ignore[attr-defined]  # for the registry


class CxlDevice:
    """Opened memory behind CXL; made by `open_cxl`. `rates` are the latencies and rates that it is said to have."""

    def __init__(self, name: str, site: Site, options: Options, backing: Backing) -> None:
        self._name = name
        self._site = site
        self._backing = backing
        self._extents = Extents(backing.array.nbytes, PAGE)
        self._offsets: dict[Region, int] = {}
        self._lost_nbytes = 0
        self._stale = False
        self.rates, source = rates_of(name, options, backing)
        persistent = backing.flush is not None
        memory = MemoryInfo(name, self._extents.capacity, persistent=persistent)
        self._info = _describe(name, backing, memory, self.rates, source)
        self._arena = Arena(name, memory, PAGE, os.getpid())
        self._closed = False
        self._uses = Uses.of(site)
        if any(self.rates) and (backing.node is None or options.says_rates):
            slowest = max(self.rates.read_latency_ns, self.rates.write_latency_ns)
            stated_paths(site)[name] = Path(name, slowest, self.rates.read_bytes_per_s, self.rates.write_bytes_per_s)
        Flushes.of(site).offer(name, backing.flush)
        if backing.node is not None:
            Placements.of(site).offer(name, self._look)
            memory_nodes(site)[name] = backing.node

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do."""
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes: first fit, whole pages, none of them lost.

        Raises OutOfMemory, OutOfRange, Unsupported (phantom), ProtocolError (pages lie on another node), Gone.
        """
        taken = self._arena.grant(nbytes, memory, phantom)
        while True:
            offset = self._extents.take(taken)
            if offset is None:
                lost = f", {self._lost_nbytes} are lost" if self._lost_nbytes else ""
                raise self._extents.refusal(self._name, nbytes, lost)
            piece = self._backing.array[offset : offset + taken]
            if not len(guard.lost(piece)):
                self._zero(offset, piece)
            if not len(guard.lost(piece)):
                return self._placed(nbytes, offset)
            self._set_aside(offset, piece)

    def adopt(self, offset: int, nbytes: int) -> Region:
        """The region that an earlier owner had at `offset`, with its bytes as they are.

        For memories that outlive a process: nothing is zeroed. Raises Unsupported for one that does not, OutOfRange,
        Busy (taken), MediaError (some of it is known to be lost), Gone.
        """
        self._arena.alive("adopt")
        if not self._info.memories[0].persistent:
            raise Unsupported(self._name, "adopt", "its bytes end with their owner; nothing can be found again")
        if nbytes < 1 or offset < 0 or offset % PAGE or offset + nbytes > self._extents.capacity:
            raise OutOfRange(
                self._name,
                "adopt",
                f"[{offset}, {offset + nbytes}) of {self._extents.capacity} bytes; it starts on a multiple of {PAGE}",
            )
        if len(guard.lost(self._backing.array[offset : offset + nbytes])):
            raise MediaError(self._name, "adopt", f"[{offset}, {offset + nbytes}) has lost bytes")
        if not self._extents.take_at(offset, nbytes):
            raise Busy(self._name, "adopt", f"[{offset}, {offset + nbytes}) belongs to another region")
        return self._placed(nbytes, offset)

    def offset_of(self, region: Region) -> int:
        """Where a region lies in the memory, in bytes: what `adopt` takes. Raises OutOfRange."""
        offset = self._offsets.get(region)
        if offset is None:
            raise OutOfRange(self._name, "offset_of", f"{region} is not allocated here")
        return offset

    def disown(self, region: Region) -> None:
        """Let go of an adopted region; freeing leaves the bytes of such a memory as they are, too. Raises as `free`."""
        self.free(region)

    def free(self, region: Region) -> None:
        """Give a region's bytes back. Raises OutOfRange, Busy (a command of any device still names it), Gone."""
        self._arena.remove(region, self._uses.named(region))
        offset, nbytes = self._offsets.pop(region), self._extents.rounded(region.nbytes)
        region.view = None
        if self._backing.node is not None:
            self._give_back(self._backing.array[offset : offset + nbytes])
            Placements.of(self._site).freed(region)
        self._extents.give(offset, nbytes)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """It has no queues. Raises OutOfRange or Gone."""
        self._refuse(command, queue)

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """It has no queues. Raises OutOfRange or Gone."""
        self._refuse(command, queue)

    def poll(self) -> None:
        """Nothing to collect."""

    def close(self) -> None:
        """Let go of the memory and of its lock; what still shows a region keeps the mapping until it is gone."""
        if self._closed:
            return
        self._closed = True
        Flushes.of(self._site).withdraw(self._name)
        Placements.of(self._site).withdraw(self._name)
        self._arena.close()
        for region in self._offsets:
            if not self._uses.named(region):
                region.view = None
        self._offsets.clear()
        self._backing.array = np.empty(0, dtype=np.uint8)
        try:
            self._backing.close()
        except OSError as error:
            raise from_os(self._name, "close", error, "the memory's descriptor") from error

    def _refuse(self, command: Command, queue: int) -> NoReturn:
        self._arena.alive(verb(command))
        what = f"queue {queue} does not exist: this memory has no executors; a cpu device whose `reaches` names it has"
        raise OutOfRange(self._name, verb(command), what)

    def _zero(self, offset: int, piece: NDArray[np.uint8]) -> None:
        address, backing = piece.ctypes.data, self._backing
        let_in()  # it may be any thread of the caller's
        zeroed = False
        if backing.node is not None:
            try:
                require_room(backing.system, self._name, piece.nbytes, [backing.node])
                zeroed = numa.touch(backing.system, self._name, address, piece.nbytes) and not self._stale
            except DeviceError:
                self._extents.give(offset, piece.nbytes)
                raise
        if not zeroed:
            ctypes.memset(address, 0, piece.nbytes)

    def _give_back(self, piece: NDArray[np.uint8]) -> None:
        """Let the node have its pages again; what is touched next reads as zeros."""
        try:
            self._backing.system.syscall(numa.SYS_MADVISE, piece.ctypes.data, piece.nbytes, _MADV_DONTNEED)
        except OSError:  # they stay here, with what was written
            self._stale = True

    def _set_aside(self, offset: int, piece: NDArray[np.uint8]) -> None:
        """Keep the lost pages of an extent taken for good, and give the others back."""
        bad = np.zeros(piece.nbytes // PAGE, dtype=bool)
        for at, nbytes in guard.lost(piece).tolist():
            bad[at // PAGE : -(-(at + nbytes) // PAGE)] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[True], bad, [True]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():
            self._extents.give(offset + first * PAGE, (last - first) * PAGE)
        self._lost_nbytes += int(bad.sum()) * PAGE

    def _placed(self, nbytes: int, offset: int) -> Region:
        region = self._arena.add(nbytes, view=self._backing.array[offset : offset + nbytes])
        self._offsets[region] = offset
        if self._backing.node is not None:
            placement = Placements.of(self._site).allocated(region)
            if placement is not None and placement.elsewhere:
                self.free(region)
                found = ", ".join(f"{pages} on node {node}" for node, pages in sorted(placement.found.items()))
                raise ProtocolError(
                    self._name, "alloc", f"{nbytes} bytes bound to node {self._backing.node} lie elsewhere: {found}"
                )
        return region

    def _look(self, region: Region) -> Placement:
        """Where the pages of a region lie now."""
        backing = self._backing
        wanted = frozenset() if backing.node is None else frozenset({backing.node})
        offset = self._offsets.get(region)
        if offset is None:
            return Placement(region, wanted, unknown="it is not allocated any more")
        piece = backing.array[offset : offset + self._extents.rounded(region.nbytes)]
        try:
            nodes = numa.nodes_of(backing.system, piece.ctypes.data, piece.nbytes)
        except OSError as error:
            return Placement(region, wanted, unknown=str(from_os(self._name, "look", error, "move_pages")))
        there, pages = np.unique(nodes[nodes >= 0], return_counts=True)
        found = dict(zip(there.tolist(), pages.tolist(), strict=True))
        return Placement(region, wanted, found, int((nodes < 0).sum()), PAGE)


def _describe(name: str, backing: Backing, memory: MemoryInfo, rates: Rates, source: str) -> DeviceInfo:
    topology, dax = backing.topology, backing.dax
    notes = {"mode": backing.mode, "grain": str(backing.grain), "rates": source}
    if any(rates):
        notes |= {key: str(value) for key, value in rates._asdict().items()}
    bus_address, numa_node = None, backing.node
    if dax is not None:
        notes["dax"] = f"{dax.name}, mode {dax.mode}, aligned to {dax.align}, target node {dax.target_node}"
        numa_node = dax.numa_node if backing.node is None else backing.node
        if (region := topology.region(dax.region)) is not None:
            decoders = [topology.decoder(target) for target in region.targets]
            memdevs = [topology.memdev(memdev) for memdev in region.memdevs]
            notes["region"] = f"{region.name}, {region.state}, {region.mode}, {region.nbytes} bytes"
            notes["interleave"] = region.interleave
            notes["decoders"] = "; ".join(
                f"{d.name} ({d.mode or d.kind}, {d.target_type}{', locked' if d.locked else ''})" for d in decoders if d
            )
            notes["serials"] = ", ".join(hex(m.serial) for m in memdevs if m and m.serial is not None)
            bus_address = next((m.bus_address for m in memdevs if m and m.bus_address), None)
        backing.why += [str(p) for p in topology.problems if p.subject in (*topology.chain(dax), f"node{backing.node}")]
    if backing.flush is not None:
        notes["durable"] = (
            "after a Flush: fdatasync of the file"
            if backing.mode == "file"
            else "after a Flush: cache lines are written back, then a fence; beyond the processor the platform vouches"
        )
    notes["why"] = "; ".join(backing.why) or "it is as it should be"
    return DeviceInfo(
        name=name,
        kind="cxl",
        provenance="real",
        memories=(memory,),
        numa_node=numa_node,
        bus_address=bus_address,
        model=backing.model,
        notes=notes,
    )
