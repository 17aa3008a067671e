"""cpu: this machine's own memory and cores, for real.

One memory, the host's DRAM: regions are page-aligned mappings, zeroed, with huge pages where the system gives them, and
`Region.view` is the mapping itself, which other drivers may read and write. One executor, `cores`: each queue has a
worker thread, and a launch is shared among up to `threads` cores. Its kernels are those of devices/kernels, with their
bits. Memories of other devices are reached (option `reaches`) as far as their regions have a view.

Real hardware has no virtual time: the driver refuses a virtual clock, and phantom regions.

Options: `capacity` in bytes (half of what the system and its control groups leave), `queues` (4), `cores` (numbers of
the cores to run on; all that the process may use), `threads` (as many as there are cores), `reaches` (names of
memories). Workers are bound to the cores, so that a page which a command writes first lies on their node.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
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
from tierloop.devices.drivers.cxl_flush import Flushes
from tierloop.devices.drivers.estimates import Costs
from tierloop.devices.drivers.failures import as_device_error
from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.drivers.options import integer, names, refuse_unknown
from tierloop.devices.errors import ConfigurationError, DeviceError, OutOfMemory, Timeout, Unsupported
from tierloop.devices.host_speed import host_speed
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels import MICROKERNEL, contract, copy_bytes, run, warm_up
from tierloop.devices.kernels.pool import bind
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site

PAGE = mmap.PAGESIZE
CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for commands that are running."""
_HAND_OVER_NS = 20_000
"""What it takes to wake a worker and to be woken by it."""


class Cpu:
    """The host as a device: DRAM and cores."""

    def __init__(
        self,
        name: str,
        site: Site,
        capacity: int,
        queues: int,
        threads: int,
        reaches: tuple[str, ...] = (),
        cores: frozenset[int] = frozenset(),
    ) -> None:
        memory = MemoryInfo(name, capacity)
        executor = ExecutorInfo(
            name="cores",
            kind="cores",
            queues=tuple(range(queues)),
            verbs=frozenset(VERBS.values()),
            kernels=contract.KERNELS,
            dtypes=contract.DTYPES,
            paths=tuple(Path(reached, 0, 0, 0) for reached in (name, *reaches)),
        )
        self._info = DeviceInfo(name, "cpu", "real", (memory,), (executor,), Arithmetic(MICROKERNEL))
        self._name = name
        self._clock = site.clock
        self._threads = threads
        self._cores = cores
        self._arena = Arena(name, memory, PAGE)
        self._costs = Costs({})
        self._flushes = Flushes.of(site)
        self._lines: list[SimpleQueue[Completion | None]] = [SimpleQueue() for _ in range(queues)]
        self._workers: dict[int, threading.Thread] = {}
        self._queues = QueueSet(name, queues, executor.depth, site, self._start)
        warm_up()

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Map zeroed pages. Raises OutOfMemory, OutOfRange, Unsupported, Gone."""
        if phantom:
            raise Unsupported(self._name, "alloc", "a real device has no phantom regions")
        taken = self._arena.reserve(nbytes, memory)
        try:
            # Private: the system gives shared mappings no huge pages.
            mapping = mmap.mmap(-1, taken, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(self._name, "alloc", f"{nbytes} bytes: {error}", error.errno) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: small ones do
                mapping.madvise(mmap.MADV_HUGEPAGE)
        # The mapping ends with the last array that shows it, so that a view kept past `free` stays harmless.
        return self._arena.add(nbytes, view=np.frombuffer(mapping, dtype=np.uint8, count=nbytes))

    def free(self, region: Region) -> None:
        self._arena.remove(region, self._queues.uses(region))
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
        try:
            self._queues.close()
        finally:
            if stuck:
                raise Timeout(self._name, "close", f"{', '.join(stuck)} still ran a command after {CLOSE_TIMEOUT_S} s")

    def _check(self, command: Command, queue: int) -> Traffic:
        self._arena.alive(verb(command))
        traffic = check(self._info, command, queue)
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
            self._workers[queue] = worker
            worker.start()
        self._lines[queue].put(completion)

    def _serve(self, line: SimpleQueue[Completion | None]) -> None:
        with suppress(OSError):  # the cores were taken away from the process since it was opened
            bind(self._cores)
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
            return run(command, _bytes_of, self._threads)
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


def open_cpu(name: str, site: Site, options: dict[str, Any]) -> Cpu:
    """The entry point `cpu`. Raises ConfigurationError for a virtual clock and for options that are wrong."""
    refuse_unknown(name, options, ["capacity", "queues", "cores", "threads", "reaches", "folder"])
    if site.clock.virtual:
        raise ConfigurationError(f"{name}: the cpu driver is real and cannot run on a virtual clock; use a wall clock")
    capacity = integer(name, options, "capacity", available_nbytes() // 2 // PAGE * PAGE, PAGE)
    cores = _cores(name, options.get("cores"))
    return Cpu(
        name,
        site,
        capacity,
        integer(name, options, "queues", 4, 1),
        integer(name, options, "threads", len(cores), 1),
        names(name, options, "reaches"),
        cores,
    )


def _cores(name: str, wanted: Any) -> frozenset[int]:
    """The cores to run on. Raises ConfigurationError for what is no list of cores that the process may use."""
    usable = frozenset(os.sched_getaffinity(0))
    if wanted is None:
        return usable
    if not isinstance(wanted, (list, tuple)) or not wanted or any(type(core) is not int for core in wanted):
        raise ConfigurationError(f"{name}: option 'cores' is {wanted!r}; allowed: a list of core numbers, not empty")
    missing = sorted(set(wanted) - usable)
    if missing:
        raise ConfigurationError(f"{name}: the process may not use core {missing[0]}; allowed: {sorted(usable)}")
    return frozenset(wanted)
