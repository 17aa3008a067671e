"""Making stores durable: whoever carries out a `Flush` of a memory that keeps its bytes asks here how.

A memory without executors cannot flush; the cores that stored to it do. Its driver says how (`Flushes.offer`), the
device whose queue holds the command does it (`Flushes.carry_out`), and for all other memories nothing is to be done:
host cores see each other's stores.

For memory that is mapped from a devdax there is nothing that the kernel could write back (msync is refused). Stores are
durable once their cache lines have been written back past the caches and that has been waited for (cache_lines.py),
whichever cache holds them. That bytes which have left the processor survive is the platform's promise (ADR, and Global
Persistent Flush on CXL).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tierloop.devices.commands import Flush
from tierloop.devices.drivers import cache_lines
from tierloop.devices.errors import Gone
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site


class Flushes:
    """How to flush each memory that keeps its bytes; one per platform."""

    def __init__(self) -> None:
        self._ways: dict[str, Callable[[Segment], None]] = {}

    @classmethod
    def of(cls, site: Site) -> Flushes:
        """Those of a site; made at first use."""
        made: Flushes = site.shared.setdefault("flushes", cls())
        return made

    def offer(self, memory: str, way: Callable[[Segment], None] | None) -> None:
        """From now on, segments of this memory are flushed so, by any thread; None where it keeps nothing."""
        if way is None:
            self._ways.pop(memory, None)
        else:
            self._ways[memory] = way

    def withdraw(self, memory: str) -> None:
        """The memory is closed: a flush that comes later is an error, and not one that did nothing."""
        if memory in self._ways:
            self._ways[memory] = partial(_too_late, memory)

    def carry_out(self, command: Flush) -> None:
        """Returns when the bytes are durable, if their memory keeps any. Raises what its way does."""
        way = self._ways.get(command.target.region.memory)
        if way is not None:
            way(command.target)


def _too_late(memory: str, _: Segment) -> None:
    raise Gone(memory, "flush", "the memory was closed before its bytes were made durable")


def can_write_back() -> bool:
    """Whether `write_back` works here; afterwards it is compiled."""
    return cache_lines.known()


def write_back(segment: Segment) -> None:
    """Write the cache lines of a segment back to memory and wait for it; the region has a view, the spans fit."""
    view = segment.region.view
    assert view is not None, "submit has seen a view, and a region in use is not freed"
    cache_lines.write_back(view, segment.spans)
