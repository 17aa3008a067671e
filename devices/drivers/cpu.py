"""cpu: this machine's own memory and cores, for real.

One memory, the host's DRAM or what of it lies on the NUMA nodes that are named: regions are page-aligned mappings,
zeroed, and `Region.view` is the mapping itself, which other drivers may read and write. One executor, `cores`: each
queue has a worker thread, and a launch is shared among up to `threads` cores. Its kernels are those of devices/kernels,
with their bits. Memories of other devices are reached (option `reaches`) as far as their regions have a view.

Real hardware has no virtual time: the driver refuses a virtual clock, and phantom regions.

With `node` or `nodes`, every allocation is bound, touched and then looked at page by page (cpu_pages.py); where pages
were found stands in the platform's placements. Only regions are bound, never the process, and only worker threads get
an affinity. Latencies and rates of paths are what the firmware's table says of these cores and the memory's node; 0
where it says nothing. They are looked up when `info` is asked for first, so that devices may be opened in any order.

Options: `capacity` in bytes (half of what the system, its control groups and the nodes leave), `queues` (4), `cores`
(numbers of the cores to run on; those of the nodes, or the nearest, that the process may use), `threads` (as many as
there are cores), `reaches` (names of memories), `node` or `nodes` (numbers), `placement` ("bind", "preferred",
"interleave", "weighted-interleave" with `weights`), `huge_pages` ("transparent", "none", "2MiB", "1GiB"). Workers are
bound to the cores, so that without nodes a page which a command writes first lies on their node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import (
    VERBS,
    Command,
    Copy,
    Flush,
    Launch,
    Read,
    Traffic,
    Write,
    read_segments,
    verb,
    write_segments,
)
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.cpu_options import CpuOptions, read_options
from tierloop.devices.drivers.cpu_pages import Pages
from tierloop.devices.drivers.cxl_flush import Flushes
from tierloop.devices.drivers.cxl_rates import stated_paths
from tierloop.devices.drivers.estimates import Costs
from tierloop.devices.drivers.failures import as_device_error, start_thread
from tierloop.devices.drivers.numa_mapping import run_on
from tierloop.devices.drivers.numa_tiering import tiering
from tierloop.devices.drivers.numa_topology import shown
from tierloop.devices.drivers.uses import Uses
from tierloop.devices.errors import ConfigurationError, DeviceError, Timeout, Unsupported
from tierloop.devices.host_speed import host_speed
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels import MICROKERNEL, contract, copy_bytes, run, warm_up
from tierloop.devices.placement import Placements, memory_nodes
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System
from tierloop.devices.threads import let_in

DEPTH = 4096
"""Commands that one queue holds."""
CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for commands that are running."""
_HAND_OVER_NS = 20_000
"""What it takes to wake a worker and to be woken by it."""


class Cpu:
    """The host as a device: DRAM and cores."""

    def __init__(self, name: str, site: Site, options: CpuOptions, system: System = HOST) -> None:
        self._pages = Pages(name, system, options)
        self._name = name
        self._site = site
        self._options = options
        self._system = system
        self._notes = _notes(system, options, self._pages)
        self._clock = site.clock
        self._memory = MemoryInfo(name, options.capacity)
        self._arena = Arena(name, self._memory, options.page, os.getpid())
        self._placements = Placements.of(site)
        self._costs = Costs({})
        self._flushes = Flushes.of(site)
        self._uses = Uses.of(site)
        self._lines: list[SimpleQueue[Completion | None]] = [SimpleQueue() for _ in range(options.queues)]
        self._workers: dict[int, threading.Thread] = {}
        self._queues = QueueSet(name, options.queues, DEPTH, site, self._start)
        if options.nodes:
            self._placements.offer(name, self._pages.look)
        self._node = _only_node(options)
        if self._node is not None:
            memory_nodes(site)[name] = self._node
        warm_up()

    @cached_property
    def info(self) -> DeviceInfo:
        """Made when it is asked for first: the other memories of the platform are known by then."""
        options = self._options
        executor = ExecutorInfo(
            name="cores",
            kind="cores",
            queues=tuple(range(options.queues)),
            verbs=frozenset(VERBS.values()),
            kernels=contract.KERNELS,
            dtypes=contract.DTYPES,
            paths=tuple(self._path(reached) for reached in dict.fromkeys((self._name, *options.reaches))),
            depth=DEPTH,
        )
        return DeviceInfo(
            self._name,
            "cpu",
            "real",
            (self._memory,),
            (executor,),
            Arithmetic(MICROKERNEL),
            numa_node=self._node,
            model=self._system.model,
            notes=self._notes,
        )

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Zeroed pages where they were wanted.

        Raises OutOfMemory, OutOfRange, ProtocolError, NotPresent, NoPermission, Unsupported, Gone.
        """
        taken = self._arena.grant(nbytes, memory, phantom)
        region = self._arena.add(nbytes, view=self._pages.make(taken)[:nbytes])
        placement = self._placements.allocated(region)
        if placement is not None:
            try:
                self._pages.judge(placement)
            except DeviceError:
                self._placements.refused(region)
                self.free(region)
                raise
        return region

    def free(self, region: Region) -> None:
        self._arena.remove(region, self._uses.named(region) or self._queues.uses(region))
        self._placements.freed(region)
        region.view = None

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return self._queues.submit(command, queue, after, self._check(command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """From earlier commands of the kind; before there are any, from how fast this host reads and copies."""
        kind, size = _kind_and_size(command, self._check(command, queue))
        if kind in self._costs.lines:
            return self._costs.estimate(kind, size)
        speed = host_speed()
        rate = speed.attend_bytes_per_s if isinstance(command, Launch) else speed.copy_bytes_per_s
        duration = _HAND_OVER_NS + size * 1_000_000_000 // rate
        return Estimate(duration, duration, "the host's attention and copy rates, measured once")

    def poll(self) -> None:
        """Nothing to collect: workers report to the clock."""

    def close(self) -> None:
        """End the workers, then the commands that they did not begin. Raises Timeout if one does not come back."""
        for line in self._lines:
            line.put(None)
        deadline = self._clock.now() + round(CLOSE_TIMEOUT_S * 1e9)
        for worker in self._workers.values():
            worker.join(max(0.0, (deadline - self._clock.now()) / 1e9))
        stuck = [worker.name for worker in self._workers.values() if worker.is_alive()]
        self._workers.clear()
        self._arena.close()
        self._placements.withdraw(self._name)
        try:
            self._queues.close()
        finally:
            if stuck:
                raise Timeout(self._name, "close", f"{', '.join(stuck)} still ran a command after {CLOSE_TIMEOUT_S} s")

    def _path(self, memory: str) -> Path:
        """How the cores reach a memory: as the firmware says of its node, else as its own driver says."""
        options = self._options
        known = options.topology.path(options.cores, memory, memory_nodes(self._site).get(memory))
        return known if known != Path(memory, 0, 0, 0) else stated_paths(self._site).get(memory, known)

    def _check(self, command: Command, queue: int) -> Traffic:
        self._arena.alive(verb(command))
        traffic = check(self.info, command, queue)
        for region, _ in read_segments(command) + write_segments(command):
            if region.view is None:
                raise Unsupported(self._name, verb(command), f"the host has no view of {region}")
        return traffic

    def _start(self, completion: Completion) -> None:
        queue = completion.queue
        if queue not in self._workers:
            worker = threading.Thread(
                target=self._serve, args=(self._lines[queue],), name=f"{self._name}-queue-{queue}", daemon=True
            )
            start_thread(self._name, verb(completion.command), worker)
            self._workers[queue] = worker
        self._lines[queue].put(completion)

    def _serve(self, line: SimpleQueue[Completion | None]) -> None:
        let_in()
        with suppress(OSError):  # the cores were taken away from the process since it was opened
            run_on(self._system, self._options.cores)
        while True:
            completion = line.get()
            if completion is None:
                return
            flops, error = 0, None
            try:
                flops = self._carry_out(completion.command)
                guard.check(self._name, completion.command)
            except BaseException as wrong:
                error = as_device_error(self._name, verb(completion.command), wrong)
            self._clock.post(self._ended, completion, flops, error)

    def _carry_out(self, command: Command) -> int:
        """On a worker thread: do it; returns the floating-point operations."""
        if isinstance(command, Launch):
            return run(command, _bytes_of, self._options.threads)
        if isinstance(command, (Read, Write, Copy)):
            copy_bytes(command, _bytes_of)
        elif isinstance(command, Flush):
            self._flushes.carry_out(command)
        return 0

    def _ended(self, completion: Completion, flops: int, error: DeviceError | None) -> None:
        completion.flops = flops
        self._queues.finish(completion, error)
        if error is None:
            kind, size = _kind_and_size(completion.command, completion.traffic)
            self._costs.observe(kind, size, completion.ended_ns - completion.started_ns)


def _bytes_of(region: Region) -> NDArray[np.uint8]:
    view = region.view
    assert view is not None, "submit has seen a view, and a region in use is not freed"
    return view


def _kind_and_size(command: Command, traffic: Traffic) -> tuple[str, int]:
    """What a command's cost grows with: bytes moved; for `dense`, whose stages differ, arithmetic and bytes."""
    if isinstance(command, Launch) and isinstance(command.args, contract.Dense):
        args = command.args
        return f"dense {args.label}", args.flops + args.weight_nbytes + args.activation_nbytes
    return verb(command), sum(traffic.read.values()) + sum(traffic.written.values())


def open_cpu(name: str, site: Site, options: dict[str, Any], system: System = HOST) -> Cpu:
    """The entry point `cpu`. Raises ConfigurationError for a virtual clock and for options that are wrong.

    Raises NoPermission where the process may not bind memory, OutOfMemory where the pool of huge pages is empty.
    """
    checked = read_options(name, options, system)
    if site.clock.virtual:
        raise ConfigurationError(f"{name}: the cpu driver is real and cannot run on a virtual clock; use a wall clock")
    return Cpu(name, site, checked, system)


def _only_node(options: CpuOptions) -> int | None:
    """The node that the memory lies on, where that is one node."""
    nodes = options.nodes or options.topology.with_memory
    promised = options.placement == "bind" or not options.nodes
    return nodes[0] if len(nodes) == 1 and promised else None


def _notes(system: System, options: CpuOptions, pages: Pages) -> dict[str, str]:
    """What a report should say about where this device's memory lies and who may move it."""
    notes = {"cores": shown(options.cores), "huge pages": options.huge_pages}
    if options.nodes:
        weights = f" by {':'.join(map(str, options.weights))}" if options.weights else ""
        notes["placement"] = f"{options.placement} on nodes {shown(options.nodes)}{weights}, looked at after allocation"
        movable = [node for node in options.nodes if options.topology.nodes[node].movable_nbytes]
        if movable:
            notes["movable"] = f"nodes {shown(movable)} are movable: pages that are pinned for DMA leave them"
    if pages.unbound:
        notes["not bound"] = f"pages are placed by who touches them first: {pages.unbound}"
    found = tiering(system)
    if found:
        notes["tiering"] = "; ".join(map(str, found))
    return notes
