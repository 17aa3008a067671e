"""Where the bytes of a cpu device's regions come from, and whether they lie where they were wanted.

Without nodes it is memory as any process gets it, touched by whoever writes it first. With nodes each allocation is
mapped, bound, touched and looked at, page by page, before anybody sees it:

- `bind` and the interleavings are promises. A page that is elsewhere, or nowhere, is an error with the counts, and the
  memory is given back.
- `preferred` is a wish: what is elsewhere stands in the report (devices/placement.py).
- Where the process may not look (a container), placements say so, and nothing is claimed.

Before anything is touched, the machine, the process's control groups and the nodes of a promise are asked whether they
have room: a kernel that finds none while pages are touched may end the process.

Where the process may not bind, promises are refused when the device is opened. A wish is then carried out the old way:
a thread on the node's own cores touches the pages first, and the kernel puts them beside it.

Pages of a pool of huge pages are always touched at once: a page that is missing later is a signal and no error.
"""

from __future__ import annotations

import errno
import mmap
import threading
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu_options import CpuOptions
from tierloop.devices.drivers.failures import start_thread
from tierloop.devices.drivers.host_memory import require_room
from tierloop.devices.drivers.numa import PAGE
from tierloop.devices.drivers.numa_mapping import advise, free_pages, mapped, pool_advice, run_on
from tierloop.devices.drivers.numa_topology import numa_topology, shown
from tierloop.devices.errors import NoPermission, NotPresent, OutOfMemory, ProtocolError, Unsupported
from tierloop.devices.placement import Placement
from tierloop.devices.regions import Region
from tierloop.devices.system import System


class Pages:
    """The memory of one cpu device. Raises what `numa.bind` raises where its nodes cannot be bound to."""

    def __init__(self, device: str, system: System, options: CpuOptions) -> None:
        self._device = device
        self._system = system
        self._options = options
        self.unbound = ""
        """Why a preference is carried out by touching only."""
        if options.nodes:
            try:
                numa.trial(system, device, options.placement, options.nodes, options.weights)
            except (NoPermission, Unsupported) as error:
                if options.placement != "preferred":
                    raise
                self.unbound = error.detail

    def make(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory of whole pages. Raises OutOfMemory, DeviceError; then nothing is held."""
        options = self._options
        if not options.nodes and not options.pooled:
            return self._anywhere(nbytes)
        self._room(nbytes)
        memory = mapped(self._system, self._device, nbytes, options.page)
        if not options.pooled:
            advise(self._system, memory, options.huge_pages == "transparent")
        try:
            touched = self._place(memory.ctypes.data, nbytes)
        except BaseException:
            del memory  # or whoever keeps the error, and with it this frame, would keep the memory
            raise
        if not touched:
            self._touch_here(memory)
        return memory

    def look(self, region: Region) -> Placement:
        """Where a region's pages are now; raises nothing."""
        options = self._options
        wanted, strict = frozenset(options.nodes), options.placement != "preferred"
        view = region.view
        if view is None:
            return Placement(region, wanted, strict=strict, unknown="the region is freed")
        try:
            found = numa.nodes_of(self._system, view.ctypes.data, -(-region.nbytes // PAGE) * PAGE)
        except OSError as error:
            return Placement(region, wanted, strict=strict, unknown=f"move_pages: {error.strerror}")
        nodes, counts = np.unique(found[found >= 0], return_counts=True)
        return Placement(
            region,
            wanted,
            dict(zip(nodes.tolist(), counts.tolist(), strict=True)),
            int((found < 0).sum()),
            PAGE,
            strict,
        )

    def judge(self, placement: Placement) -> None:
        """Raises ProtocolError for pages that were promised elsewhere, OutOfMemory for pages that are nowhere."""
        if placement.unknown or not placement.strict or not placement.elsewhere + placement.absent:
            return
        found = ", ".join(f"{pages} on node {node}" for node, pages in sorted(placement.found.items()))
        message = (
            f"{placement.region.nbytes} bytes with placement = {self._options.placement!r} on nodes "
            f"{shown(placement.wanted)}: of its pages of {PAGE} bytes lie {found or 'none anywhere'}"
            + (f", {placement.absent} nowhere" if placement.absent else "")
        )
        full = placement.absent or "interleave" in self._options.placement  # a full node sends its turn elsewhere
        raise (OutOfMemory if full else ProtocolError)(self._device, "alloc", message)

    def _anywhere(self, nbytes: int) -> NDArray[np.uint8]:
        try:
            # Private: the system gives shared mappings no huge pages.
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOMEM
            raise OutOfMemory(self._device, "alloc", f"{nbytes} bytes: {error}", number) from error
        advice = "MADV_HUGEPAGE" if self._options.huge_pages == "transparent" else "MADV_NOHUGEPAGE"
        with suppress(OSError, AttributeError):  # a kernel without huge pages: small ones do
            mapping.madvise(getattr(mmap, advice))
        # The mapping ends with the last array that shows it, so that a view kept past `free` stays harmless.
        return np.frombuffer(mapping, dtype=np.uint8)

    def _room(self, nbytes: int) -> None:
        """Raises OutOfMemory for what cannot be touched: a kernel that finds out later ends the process."""
        options = self._options
        if options.pooled:
            free = free_pages(self._system, options.page, options.nodes or None) * options.page
            if nbytes > free and options.placement != "preferred":
                advice = pool_advice(options.page, nbytes - free, options.nodes)
                raise OutOfMemory(self._device, "alloc", f"{nbytes} bytes: {advice}")
            return
        promised = options.nodes if options.placement in ("bind", "weighted-interleave") else ()
        require_room(self._system, self._device, nbytes, promised)

    def _place(self, address: int, nbytes: int) -> bool:
        """Bind, and touch; False where the kernel cannot be asked to touch."""
        options = self._options
        if options.nodes and not self.unbound:
            self._bind(address, nbytes)
        elif not options.pooled:
            return False
        touched = numa.touch(self._system, self._device, address, nbytes)
        if options.pooled and not touched:
            raise Unsupported(self._device, "alloc", f"huge_pages = {options.huge_pages!r} needs Linux 5.14")
        return touched

    def _bind(self, address: int, nbytes: int) -> None:
        """Bind to the nodes, all of them: one that has lost its memory is dropped by a kernel without a word."""
        options, system = self._options, self._system
        mode, nodes = options.placement, options.nodes
        try:
            numa.bind(system, self._device, address, nbytes, mode, nodes, options.weights, options.page)
        except ProtocolError as error:
            self._refuse_lost_nodes(error)
            raise
        held = frozenset(nodes)
        if mode in ("bind", "interleave"):
            with suppress(OSError):  # a container that forbids asking
                held = numa.policy_of(system, address)[1]
        if held != frozenset(nodes):
            self._refuse_lost_nodes()
            detail = f"the kernel bound memory to nodes {shown(held)} instead of {shown(nodes)}"
            raise ProtocolError(self._device, "alloc", detail)

    def _refuse_lost_nodes(self, cause: Exception | None = None) -> None:
        """Raises NotPresent where nodes that were there at opening have no memory for this process any more."""
        usable = numa_topology(self._system).with_memory
        lost = set(self._options.nodes).difference(usable)
        if lost:
            detail = f"nodes {shown(lost)} have no memory any more that this process may use; allowed: {shown(usable)}"
            raise NotPresent(self._device, "alloc", detail) from cause

    def _touch_here(self, memory: NDArray[np.uint8]) -> None:
        """Write one byte of each page on a thread that runs on the device's cores."""

        def write() -> None:
            with suppress(OSError):  # a model's cores, or cores that were taken away: pages are looked at anyway
                run_on(self._system, self._options.cores)
            memory[::PAGE] = 0

        thread = threading.Thread(target=write, name=f"{self._device}-touch")
        start_thread(self._device, "alloc", thread)
        thread.join()
