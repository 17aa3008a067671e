"""null: every command takes the same time and does nothing. For tests of schedulers, on either clock.

It has a memory and an executor that offers everything. Bytes are neither kept nor moved: a Read leaves its buffer as it
is, a launch computes nothing (its completion says 0 flops). Regions may be phantoms. What is real is everything that a
scheduler sees: capacity, order, dependencies, checks, and time.

Options: `duration_ns` (1000), `capacity` in bytes (2⁴⁰), `queues` (4), `reaches` (names of other memories).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierloop.devices.commands import VERBS, Command, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.options import integer, names, refuse_unknown
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels.contract import DTYPES, KERNELS
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


class Null:
    """A device that lets `duration_ns` pass for each command."""

    def __init__(
        self, name: str, site: Site, duration_ns: int, capacity: int, queues: int, reaches: tuple[str, ...]
    ) -> None:
        memory = MemoryInfo(name, capacity)
        executor = ExecutorInfo(
            name="null",
            kind="none",
            queues=tuple(range(queues)),
            verbs=frozenset(VERBS.values()),
            kernels=KERNELS,
            dtypes=DTYPES,
            paths=tuple(Path(memory, duration_ns, 0, 0) for memory in (name, *reaches)),
        )
        self._info = DeviceInfo(name, "null", "emulated", (memory,), (executor,))
        self._duration_ns = duration_ns
        self._clock = site.clock
        self._arena = Arena(name, memory)
        self._queues = QueueSet(name, queues, executor.depth, site, self._start)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        self._arena.reserve(nbytes, memory)
        return self._arena.add(nbytes, phantom)

    def free(self, region: Region) -> None:
        self._arena.remove(region, self._queues.uses(region))

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        self._arena.alive(verb(command))
        return self._queues.submit(command, queue, after, check(self._info, command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        check(self._info, command, queue)
        return Estimate(self._duration_ns, 0, "the option duration_ns")

    def poll(self) -> None:
        """Nothing to collect: the clock ends every command."""

    def close(self) -> None:
        self._arena.close()
        self._queues.close()

    def _start(self, completion: Completion) -> None:
        self._clock.call_at(self._clock.now() + self._duration_ns, self._queues.finish, completion)


def open_null(name: str, site: Site, options: dict[str, Any]) -> Null:
    """The entry point `null`. Raises ConfigurationError for options that are wrong."""
    refuse_unknown(name, options, ["duration_ns", "capacity", "queues", "reaches", "folder"])
    return Null(
        name,
        site,
        integer(name, options, "duration_ns", 1000),
        integer(name, options, "capacity", 1 << 40, 1),
        integer(name, options, "queues", 4, 1, 1 << 16),
        names(name, options, "reaches"),
    )


open_null.emulated = True  # type: ignore[attr-defined]  # by which the registry names it
