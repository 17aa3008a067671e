"""Workers: the thread behind each queue, and how a command becomes transfers of its engine.

A worker carries out one command at a time, in the order in which they are handed over, and never touches a completion:
what became of a command is reported as an `Outcome`, and the device settles it on the clock's thread. The worker makes
its engine in its own thread, because an io_uring belongs to the thread that set it up.

Three ways lead to the engine. Reads and writes join a run of host memory with spans of the medium. A copy to or from
host-mapped memory does the same with spans on both sides, as long as every piece keeps to the medium's grid. Otherwise
(spans of the host that end inside a block, or a copy within the medium) the bytes pass through a window of host memory.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Command, Copy, Flush, Read, Write, verb
from tierloop.devices.completion import Completion
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.engines import LARGEST_TRANSFER, Engine, Target, room
from tierloop.devices.drivers.failures import as_device_error, start_thread
from tierloop.devices.drivers.page_cache import PageCache
from tierloop.devices.drivers.pieces import (
    Pieces,
    contiguous,
    joined,
    meeting,
    on_grid,
    overlapping,
    paired,
    split,
)
from tierloop.devices.errors import DeviceError, OutOfRange, Timeout
from tierloop.devices.regions import Region, Segment
from tierloop.devices.system import address_of
from tierloop.devices.threads import let_in

WINDOW = 16 * LARGEST_TRANSFER
"""Host memory that a copy through a window takes at most, unless its two sides overlap."""


_AGAIN = "its claim on the medium stands until this process ends: end it to open the medium again"


class Outcome(NamedTuple):
    """What became of a command.

    `cached_nbytes` lay in the page cache when they were about to be read; `stuck` says that transfers are still out and
    the device must be given up.
    """

    completion: Completion
    error: DeviceError | None
    media_nbytes: int
    cached_nbytes: int
    duration_ns: int
    stuck: bool = False


class Worker:
    """One thread with one engine. `place(region)`: where it starts on the medium, None if it is not on it."""

    def __init__(
        self,
        target: Target,
        make_engine: Callable[[], Engine],
        place: Callable[[Region], int | None],
        clock: Clock,
        report: Callable[[Outcome], None],
        left: Callable[[bool], None],
    ) -> None:
        self.engine: Engine | None = None
        self._target = target
        self._make_engine = make_engine
        self._place = place
        self._clock = clock
        self._report = report
        self._left = left
        self._inbox: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._cache = PageCache(target.system, target.fd) if target.cache_known else None
        self._thread = threading.Thread(target=self._live, name=f"tierloop-{target.device}", daemon=True)

    def start(self) -> None:
        """Start the thread and wait for its engine. Raises what making the engine raised, OutOfMemory (no thread)."""
        start_thread(self._target.device, "open", self._thread)
        failed = self._opened.get()
        if failed is not None:
            raise failed

    def hand(self, completion: Completion) -> None:
        """Hand a command over."""
        self._inbox.put(completion)

    def leave(self) -> None:
        """End the thread after what was handed over before; set the target's `stop` to cut that short."""
        self._inbox.put(None)

    def _live(self) -> None:
        let_in()
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._opened.put(error)
            return
        self.engine = engine
        self._opened.put(None)
        while (completion := self._inbox.get()) is not None:
            outcome = self._carry_out(engine, completion)
            if outcome.stuck:
                self._report(outcome)
                self._left(True)
                return
            self._report(outcome)
            del completion, outcome
        try:
            engine.close()
        finally:
            self._left(False)

    def _carry_out(self, engine: Engine, completion: Completion) -> Outcome:
        command, started = completion.command, self._clock.now()
        counts = engine.counts
        before, cached = counts.read_nbytes + counts.written_nbytes, counts.cached_nbytes
        error: DeviceError | None = None
        stuck = False
        try:
            self._move(engine, command)
            guard.check(self._target.device, command)
        except DeviceError as failed:
            error = failed
        except Stuck as failed:
            stuck = True
            _ABANDONED.append((engine, completion, failed))
            detail = f"{failed}; the device is given up, because the kernel may still move those bytes; {_AGAIN}"
            error = Timeout(self._target.device, verb(command), detail)
        except Exception as failed:
            error = as_device_error(self._target.device, verb(command), failed)
        moved, cached = counts.read_nbytes + counts.written_nbytes - before, counts.cached_nbytes - cached
        return Outcome(completion, error, moved, cached, self._clock.now() - started, stuck)

    def _move(self, engine: Engine, command: Command) -> None:
        if isinstance(command, Flush):
            if self._place(command.target.region) is not None:
                engine.sync()
        elif isinstance(command, Read):
            self._transfer(engine, command.source, _address(command.into), write=False)
        elif isinstance(command, Write):
            self._transfer(engine, command.target, _address(command.data), write=True)
        elif isinstance(command, Copy):
            self._copy(engine, command)

    def _transfer(self, engine: Engine, segment: Segment, address: int, write: bool) -> None:
        side, spans = self._side(segment), segment.spans.array
        pieces = joined(contiguous(spans, side.base, address))
        if side.medium:
            self._engage(engine, pieces, write, ordered=write and overlapping(spans))
        else:
            _move_within_host(pieces, to_address=not write)

    def _engage(self, engine: Engine, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        if self._cache is not None and not write:
            engine.counts.cached_nbytes += self._cache.of(pieces)
        engine.transfer(split(pieces, self._target.largest), write, ordered)

    def _copy(self, engine: Engine, command: Copy) -> None:
        source, target = self._side(command.source), self._side(command.target)
        if source.medium != target.medium:
            own, host = (source, target) if source.medium else (target, source)
            pieces = joined(paired(own.segment.spans.array, own.base, host.segment.spans.array, host.base))
            if on_grid(pieces, self._target.grid):
                engine.expect(host.segment.region)
                self._engage(engine, pieces, write=target.medium)
                return
        elif not source.medium:
            spans, others = source.segment.spans.array, target.segment.spans.array
            _move_within_host(paired(spans, source.base, others, target.base), to_address=True)
            return
        self._through_windows(engine, source, target)

    def _side(self, segment: Segment) -> _Side:
        base, view = self._place(segment.region), segment.region.view
        if base is not None:
            return _Side(segment, base, True)
        if view is None:
            raise OutOfRange(self._target.device, "move", f"{segment.region} was freed before its bytes were moved")
        return _Side(segment, _address(view), False, view)

    def _through_windows(self, engine: Engine, source: _Side, target: _Side) -> None:
        total = source.segment.spans.nbytes
        if not total:
            return
        same = source.segment.region is target.segment.region
        whole = same and meeting(source.segment.spans.array, target.segment.spans.array)
        nbytes = total if whole else min(total, WINDOW)
        window = room(self._target, nbytes)
        address = address_of(window)
        starts = np.arange(0, total, nbytes, dtype=np.int64)
        cuts = np.stack((starts, np.minimum(total - starts, nbytes)), axis=1)
        sides = [(side, paired(side.segment.spans.array, side.base, cuts, 0)) for side in (source, target)]
        for start in starts.tolist():
            for (side, pieces), into_window in zip(sides, (True, False), strict=True):
                low, high = np.searchsorted(pieces[:, 1], (start, start + nbytes))
                mine = pieces[low:high].copy()
                mine[:, 1] += address - start
                if side.medium:
                    self._engage(engine, joined(mine), write=not into_window)
                else:
                    _move_within_host(mine, to_address=into_window)


class _Side(NamedTuple):
    """One side of a copy; `view` keeps host memory mapped while bytes move, should its owner free it."""

    segment: Segment
    base: int
    medium: bool
    view: NDArray[np.uint8] | None = None


_ABANDONED: list[tuple[Engine, Completion, Stuck]] = []
"""What a stuck transfer may still touch, kept until the process ends; the traceback holds windows and views."""


def _move_within_host(pieces: Pieces, to_address: bool) -> None:
    """Pieces whose first column is an address as well; bytes move to the second column, or from it."""
    for first, second, nbytes in pieces.tolist():
        ctypes.memmove(*((second, first) if to_address else (first, second)), nbytes)


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
