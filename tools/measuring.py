"""One benchmark for every device, real or emulated: it knows the device contract, a clock, and nothing else.

`calibrate` measures a device with it, `verify` the device's emulation, and the fit the timing model on the virtual
clock: what is compared was measured in the same way.

- A *transfer* point keeps `depth` commands in flight over the executor's queues; whatever ends is replaced. It counts
  whole rounds, from the moment at which the first round has ended, so neither the start nor the end is in it.
- A *chase* point reads lines of which each says where the next one is, a short and a long walk in turn: the difference
  of their times over the difference of their lengths is the time of one access, without what a command costs.
- A *loaded* point does the same while other queues stream, each busy for a share `duty` of its time.

Everything is cold: regions and host buffers are walked through in pools several times as large as the last cache, and
a walk never meets a line that it has read not long ago. Values are those of the device, scaled back by its dilation.

What the benchmark itself takes between the end of a command and the next one belongs to the consumer, not to the
device. It is measured on a real device (`host_ns`) and repeated on an emulated one: with all times stretched by σ, so
is that one, and on the virtual clock, where nothing else takes time, it is waited for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Command, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.errors import Timeout
from tierloop.devices.info import ExecutorInfo, MemoryInfo
from tierloop.devices.kernels import contract
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait, write_bytes

LINE_NBYTES = 64
SHORT_WALK = 64
"""Lines of the short walk of a chase; the long one has `nbytes` / 64."""
ROW_NBYTES = 1024
"""Bytes of a row that `score` reads: 4 bytes in 1,024 are written, so that it is all but a pure read."""
DEADLINE_NS = 120_000_000_000
"""How long one window may last, in ns of the platform's clock."""
_PAGE_NBYTES = 4096
_PREPARED, _PREPARED_PHANTOM = 2048, 4
_FALLBACK_CACHE_NBYTES = 32 << 20

Pattern = Literal["idle", "loaded", "sequential", "random"]
Verb = Literal["transfer", "chase", "score", "gather"]


@dataclass(frozen=True)
class Point:
    """What is measured once: sizes in bytes.

    A command moves `nbytes` in spans of `span_nbytes`; `depth` commands are in flight (of a loaded point: streams
    beside the chase). `read_fraction` is the share of Read commands in a mix of Read and Write. `load` says what the
    streams of a loaded point do, and `duty` for which share of their time.
    """

    pattern: Pattern
    verb: Verb
    span_nbytes: int
    nbytes: int
    depth: int
    read_fraction: float = 1.0
    load: str = ""
    duty: float = 1.0

    @property
    def unit(self) -> Literal["latency_ns", "bytes_per_s"]:
        """What its value means: ns of one access or of one smallest command, or bytes per second."""
        return "latency_ns" if self.pattern in ("idle", "loaded") else "bytes_per_s"

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what says nothing."""
        found = asdict(self)
        if self.pattern != "loaded":
            del found["load"], found["duty"]
        return found

    def __str__(self) -> str:
        what = f"{self.pattern} {self.verb}" + (f" beside {self.load} at {self.duty:.0%}" if self.load else "")
        size = size_text(self.nbytes)
        if self.span_nbytes != self.nbytes:
            size += f" in {size_text(self.span_nbytes)}"
        reads = f", {self.read_fraction:.0%} reads" if self.verb == "transfer" else ""
        return f"{what}, {size}, depth {self.depth}{reads}"


def size_text(nbytes: int) -> str:
    """A size with a binary unit: 64 B, 4 KiB, 16 MiB."""
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= step and nbytes % step == 0:
            return f"{nbytes // step} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class Reading:
    """One window: the value in the point's unit, and for loaded points the bytes/s that the streams moved meanwhile.

    `late` is which part of the time passed because the host was late: commands of an emulated device that overran, and
    what the benchmark took for itself beyond `host_ns`; 0 for a real device. `host_ns` is what it took on a real one.
    """

    value: float
    load_bytes_per_s: float = 0.0
    late: float = 0.0
    host_ns: int = 0


def last_cache_nbytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of this machine's largest cache, from sysfs; 32 MiB where that says nothing."""
    largest = 0
    for file in cpu.glob("index*/size"):
        try:
            text = file.read_text().strip()
            largest = max(largest, int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
        except (OSError, ValueError):
            continue
    return largest or _FALLBACK_CACHE_NBYTES


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Subject:
    """A memory and the executors through which it is measured, on one site.

    `owner` allocates in `memory`; commands go to `engine`: transfers to `mover`, kernels to `kernels` where there is
    one. `dilation` is the σ by which the clock's times are too long. `apart` says that host buffers lie in another
    memory, so that a Read is a read here and nothing else.
    """

    site: Site
    owner: Device
    memory: MemoryInfo
    engine: Device
    mover: ExecutorInfo
    kernels: ExecutorInfo | None = None
    dilation: int = 1
    apart: bool = False

    @property
    def clock(self) -> Clock:
        """The clock of the site."""
        return self.site.clock

    @property
    def promises(self) -> bool:
        """Whether its times are promised and may be broken: an emulated device on the wall clock."""
        return self.engine.info.provenance == "emulated" and not self.clock.virtual

    def offers(self, kernel: str) -> bool:
        """Whether the kernel can be measured on this memory."""
        return self.kernels is not None and kernel in self.kernels.kernels


class Rig:
    """A subject with its pools, ready to measure points; `close` frees them.

    `pool_nbytes` is the size of each pool. On the virtual clock regions are phantom: the time is the model's, and
    nothing is moved. Raises OutOfMemory if the pools do not fit.
    """

    def __init__(self, subject: Subject, pool_nbytes: int, seed: int = 0) -> None:
        self.subject = subject
        self.clock = subject.clock
        self._phantom = subject.clock.virtual
        self._pool_nbytes = pool_nbytes
        self._random = np.random.default_rng(seed)
        self._regions: list[Region] = []
        self._cursor = 0
        self._walks: dict[int, _Walk] = {}
        self._sink: Region | None = None
        self._small: Region | None = None
        self._permutation: tuple[int, NDArray[np.int64]] = (0, np.empty(0, dtype=np.int64))
        self._permuted = 0
        self._pool = self._alloc(pool_nbytes)
        self._host = _host_pool(pool_nbytes)
        if not self._phantom:
            self._host.view(np.float32)[:] = 1.0
            self._fill(self._pool)

    def measure(self, point: Point, window_ns: int, rounds: int = 1, host_ns: int = 0) -> Reading:
        """Measure a point for about `window_ns` ns of the device's own time, and at least so many rounds.

        `host_ns` is what the benchmark takes for itself after each command, repeated for emulated devices. Raises what
        the device raises.
        """
        window_ns *= self.subject.dilation
        host_ns *= self.subject.dilation if self.subject.engine.info.provenance == "emulated" else 0
        if point.verb == "chase":
            return self._chase(point, window_ns)
        commands = self._commands(point)
        executor = self.subject.kernels if point.verb in ("score", "gather") else self.subject.mover
        assert executor is not None
        loop = _Loop(self.subject.engine, self.clock, commands, executor.queues, point.depth, host_ns)
        loop.run(window_ns, rounds, _period(point.read_fraction) if point.verb == "transfer" else 1)
        sigma = self.subject.dilation
        late, gap_ns = 0.0, 0
        if self.subject.promises:
            # With several in flight, one that is late is hidden behind the others, or shows as an error of the rate.
            late = loop.late_ns / loop.taken_ns if point.depth == 1 else 0.0
        elif not self._phantom:
            gap_ns = round(float(np.median(loop.gaps)))
        if point.unit == "latency_ns":
            return Reading(loop.spent_ns / loop.counted / sigma, 0.0, late, gap_ns)
        return Reading(loop.counted * point.nbytes * 1e9 * sigma / loop.taken_ns, 0.0, late, gap_ns)

    def close(self) -> None:
        """Free the pools."""
        for region in self._regions:
            self.subject.owner.free(region)
        self._regions.clear()

    # -- what lies where ----------------------------------------------------------------------------------------

    def _alloc(self, nbytes: int) -> Region:
        region = self.subject.owner.alloc(nbytes, self.subject.memory.name, self._phantom)
        self._regions.append(region)
        return region

    def _fill(self, region: Region) -> None:
        """Write all of a region once: pages and blocks that were never written are not really there."""
        piece = min(region.nbytes, 4 << 20)
        for offset in range(0, region.nbytes, piece):
            count = min(piece, region.nbytes - offset)
            self._write(region.at(offset, count), self._host[:count])

    def _write(self, target: Segment, data: NDArray[np.uint8]) -> None:
        write_bytes(self.clock, self.subject.engine, target, data, self.subject.mover.queues[0])

    def _commands(self, point: Point) -> list[Command]:
        """Commands of a point over parts of the pools that were not touched for longest."""
        count = max(1, min(self._pool_nbytes // point.nbytes, _PREPARED_PHANTOM if self._phantom else _PREPARED))
        if point.verb == "score":
            return [self._score(self._next(point.nbytes), point.nbytes) for _ in range(count)]
        if point.verb == "gather":
            if self._sink is None:
                self._sink = self._alloc(self._pool_nbytes)
            return [
                Launch(contract.Gather(), ((self._spans(point),),), ((self._sink.at(offset, point.nbytes),),))
                for offset in (self._next(point.nbytes) for _ in range(count))
            ]
        period = _period(point.read_fraction)
        reads = round(point.read_fraction * period)
        commands: list[Command] = []
        for number in range(count):
            offset = self._next(point.nbytes)
            segment = self._spans(point) if point.pattern == "random" else self._run(offset, point)
            far = self._pool_nbytes - point.nbytes - offset
            buffer = self._host[far : far + point.nbytes]
            # Spread evenly: with 3 of 4, reads are commands 0, 1, 2, 4, …
            is_read = (number + 1) * reads // period > number * reads // period
            commands.append(Read(segment, buffer) if is_read else Write(segment, buffer))
        return commands

    def _next(self, nbytes: int) -> int:
        """Where the next command works: through the pool from front to back, again and again."""
        if self._cursor + nbytes > self._pool_nbytes:
            self._cursor = 0
        self._cursor += nbytes
        return self._cursor - nbytes

    def _spans(self, point: Point) -> Segment:
        """Spans at random places of the pool, each place once before any comes again."""
        places = self._pool_nbytes // point.span_nbytes
        if self._permutation[0] != point.span_nbytes:
            self._permutation, self._permuted = (point.span_nbytes, self._places(places, point.span_nbytes)), 0
        count = point.nbytes // point.span_nbytes
        if self._permuted + count > places:
            self._permuted = 0
        self._permuted += count
        return Segment(
            self._pool,
            Spans.equal(self._permutation[1][self._permuted - count : self._permuted], point.span_nbytes),
        )

    def _places(self, count: int, nbytes: int) -> NDArray[np.int64]:
        """Offsets (count,) of all places of `nbytes` bytes, in random order; in order where nothing is read."""
        if self._phantom:
            return np.arange(0, count * nbytes, nbytes, dtype=np.int64)
        return self._random.permutation(count).astype(np.int64) * nbytes

    def _run(self, offset: int, point: Point) -> Segment:
        """Spans that follow each other."""
        if point.span_nbytes == point.nbytes:
            return self._pool.at(offset, point.nbytes)
        starts = np.arange(offset, offset + point.nbytes, point.span_nbytes, dtype=np.int64)
        return Segment(self._pool, Spans.equal(starts, point.span_nbytes))

    def _score(self, offset: int, nbytes: int) -> Launch:
        rows = nbytes // ROW_NBYTES
        if self._small is None:
            self._small = self._alloc(ROW_NBYTES + self._pool_nbytes // ROW_NBYTES * 4)
            if not self._phantom:
                self._write(self._small.at(0, ROW_NBYTES), self._host[:ROW_NBYTES])
        runs = np.zeros((1, 3), dtype=np.int64)
        args = contract.Score(1, 1, 1, ROW_NBYTES // 4, "mean", "max", runs)
        reads = ((self._small.at(0, ROW_NBYTES),), (self._pool.at(offset, rows * ROW_NBYTES),))
        return Launch(args, reads, ((self._small.at(ROW_NBYTES, rows * 4),),))

    # -- dependent accesses -------------------------------------------------------------------------------------

    def _chase(self, point: Point, window_ns: int) -> Reading:
        kernels = self.subject.kernels
        assert kernels is not None
        streams = _Streams(self, point, window_ns) if point.pattern == "loaded" else None
        queue = kernels.queues[0]
        lines = point.nbytes // LINE_NBYTES
        times: dict[int, list[int]] = {lines: [], SHORT_WALK: []}
        late = 0
        begun = self.clock.now()
        while not times[SHORT_WALK] or self.clock.now() - begun < window_ns:
            for count, taken in times.items():
                ns, late_ns = self._timed(self._walk_lines(count), queue)
                taken.append(ns)
                late += late_ns
        load = streams.stop() if streams is not None else 0.0
        difference = max(float(np.median(times[lines]) - np.median(times[SHORT_WALK])), 1.0)
        value = difference / (lines - SHORT_WALK) / self.subject.dilation
        late_part = late / sum(times[lines]) if self.subject.promises else 0.0
        return Reading(value, load * self.subject.dilation, late_part)

    def _timed(self, command: Command, queue: int) -> tuple[int, int]:
        """How long a command took from its start on, and by how much that was too long."""
        completion = self.subject.engine.submit(command, queue)
        wait(self.clock, completion, self.clock.now() + DEADLINE_NS)
        return completion.ended_ns - completion.started_ns, completion.overrun_ns

    def _walk_lines(self, count: int) -> Command:
        """A chase over `count` lines that were not read for longest."""
        if count not in self._walks:
            self._walks[count] = self._make_walk(count)
        walk = self._walks[count]
        if walk.again is not None:
            return walk.again
        offsets = walk.offsets[walk.taken : walk.taken + count]
        walk.taken = (walk.taken + count) % len(walk.offsets)
        spans = Spans.equal(offsets, LINE_NBYTES)
        command = Launch(contract.Chase(), ((Segment(walk.region, spans),),), ((walk.region.at(walk.end, 8),),))
        if self._phantom:
            walk.again = command
        return command

    def _make_walk(self, count: int) -> _Walk:
        """A region whose lines, in random order, are walks of `count` lines end to end: each says which comes next."""
        lines = (self._pool_nbytes if count > SHORT_WALK else self._pool_nbytes // 4) // LINE_NBYTES
        lines -= lines % count
        region = self._alloc((lines + 1) * LINE_NBYTES)
        offsets = self._places(lines, LINE_NBYTES)
        if not self._phantom:
            table = np.zeros((lines, LINE_NBYTES // 8), dtype=np.int64)
            table[offsets // LINE_NBYTES, 0] = (np.arange(lines) + 1) % count
            data = table.reshape(-1).view(np.uint8)
            piece = 4 << 20
            for offset in range(0, len(data), piece):
                part = data[offset : offset + piece]
                self._write(region.at(offset, len(part)), part)
        return _Walk(region, offsets, lines * LINE_NBYTES)


def _host_pool(nbytes: int) -> NDArray[np.uint8]:
    """Host memory that begins half a page after a page: regions begin at a page.

    Zen 3 copies at a quarter of its speed where a target lies less than a line behind its source modulo 4 KiB, and a
    large NumPy array begins 16 bytes after a page: 2.5 GB/s for reads in spans of 4 to 256 KiB instead of 9.
    """
    room = np.zeros(nbytes + 2 * _PAGE_NBYTES, dtype=np.uint8)
    begin = (_PAGE_NBYTES // 2 - room.ctypes.data) % _PAGE_NBYTES
    return room[begin : begin + nbytes]


@dataclass
class _Walk:
    """Lines of a region in the order in which they are read, `taken` of them already; its result lies at `end`.

    Where nothing is read, one command serves for all walks: `again`.
    """

    region: Region
    offsets: NDArray[np.int64]
    end: int
    taken: int = 0
    again: Command | None = None


class _Loop:
    """Keeps a number of commands in flight, over the queues in turn.

    After `run`: `counted` commands ended in `taken_ns`; `spent_ns` is the sum of what each took from its submission on,
    `late_ns` of what the host was late for each, and `gaps` holds the ns between an end and the next command.
    """

    def __init__(
        self,
        engine: Device,
        clock: Clock,
        commands: list[Command],
        queues: tuple[int, ...],
        depth: int,
        host_ns: int,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._commands = commands
        self._queues = queues
        self._depth = depth
        self._host_ns = host_ns
        self._submitted = self._open = self._waiting = self._ended = 0
        self._base_ns = self._stop_ns = self._spent_ns = self._late_ns = 0
        self._period = self._least = 1
        self._stopped = False
        self._error: Exception | None = None
        self.counted = 0
        self.taken_ns = 1
        self.spent_ns = self.late_ns = 0
        self.gaps: list[int] = []

    def run(self, window_ns: int, rounds: int, period: int) -> None:
        """Count whole rounds of depth × `period` commands, after a first round; raises the first error."""
        self._period = math.lcm(self._depth, period)
        self._least = rounds * self._period
        self._stop_ns = self._clock.now() + window_ns
        for number in range(self._depth):
            self._submit(self._queues[number % len(self._queues)])
        if not self._clock.run_until(lambda: not self._open and not self._waiting, self._stop_ns + DEADLINE_NS):
            raise Timeout(self._engine.info.name, "measure", f"{self._open} commands are open after {DEADLINE_NS} ns")
        if self._error is not None:
            raise self._error

    def _submit(self, queue: int) -> Completion:
        command = self._commands[self._submitted % len(self._commands)]
        self._submitted += 1
        self._open += 1
        completion = self._engine.submit(command, queue)
        completion.on_done(self._end)
        return completion

    def _end(self, completion: Completion) -> None:
        self._open -= 1
        self._ended += 1
        try:
            completion.result()
        except Exception as error:
            self._error = self._error or error
            self._stopped = True
        if self._stopped:
            return
        if self._ended > self._depth:
            self._spent_ns += completion.ended_ns - completion.submitted_ns
            self._late_ns += completion.overrun_ns
            counted = self._ended - self._depth
            if counted % self._period == 0:
                self.counted, self.taken_ns = counted, max(completion.ended_ns - self._base_ns, 1)
                self.spent_ns, self.late_ns = self._spent_ns, self._late_ns
                if completion.ended_ns >= self._stop_ns and counted >= self._least:
                    self._stopped = True
                    return
        elif self._ended == self._depth:
            self._base_ns = completion.ended_ns
        due = completion.ended_ns + self._host_ns
        if self._host_ns and self._clock.now() < due:
            self._waiting += 1
            self._clock.call_at(due, self._follow, completion.queue, completion.ended_ns)
        else:
            self._follow(completion.queue, completion.ended_ns)

    def _follow(self, queue: int, ended_ns: int) -> None:
        self._waiting = max(self._waiting - 1, 0)
        if self._stopped:
            return
        gap = self._submit(queue).submitted_ns - ended_ns
        self.gaps.append(gap)
        if self._depth <= len(self._queues):  # else other commands of the queue run meanwhile
            self._late_ns += max(gap - self._host_ns, 0)


class _Streams:
    """Streams beside a chase: each on a queue of its own, busy for a share of its time; running once it is made."""

    def __init__(self, rig: Rig, point: Point, window_ns: int) -> None:
        subject = rig.subject
        kernels = subject.kernels
        assert kernels is not None
        kind: Verb = "score" if point.load == "score" else "transfer"
        executor = kernels if kind == "score" else subject.mover
        nbytes = min(STREAM_NBYTES[kind], rig._pool_nbytes // 4)
        stream = Point("sequential", kind, nbytes, nbytes, point.depth, point.read_fraction)
        self._commands = rig._commands(stream)
        self._nbytes = nbytes
        self._duty = point.duty
        self._engine = subject.engine
        self._clock = rig.clock
        self._submitted = self._open = self._done = self._last_ns = 0
        self._stopped = False
        self._error: Exception | None = None
        queues = [queue for queue in executor.queues if queue != kernels.queues[0]][: point.depth]
        for queue in queues:
            self._submit(queue)
        reached = self._clock.run_until(
            lambda: self._done >= len(queues) or self._error is not None, self._clock.now() + DEADLINE_NS
        )
        if not reached:
            raise Timeout(self._engine.info.name, "measure", f"no stream has moved anything after {DEADLINE_NS} ns")
        self._begun_ns, self._begun = self._last_ns, self._done

    def stop(self) -> float:
        """Let them end; returns bytes per second of the clock. Raises the first error of a stream."""
        if self._done == self._begun:  # the walk was shorter than a command: one more of them tells the rate
            self._clock.run_until(lambda: self._done > self._begun or self._stopped, self._clock.now() + DEADLINE_NS)
        moved, taken = (self._done - self._begun) * self._nbytes, self._last_ns - self._begun_ns
        self._stopped = True
        self._clock.run_until(lambda: not self._open, self._clock.now() + DEADLINE_NS)
        if self._error is not None:
            raise self._error
        return moved * 1e9 / max(taken, 1)

    def _submit(self, queue: int) -> None:
        if self._stopped:
            return
        command = self._commands[self._submitted % len(self._commands)]
        self._submitted += 1
        self._open += 1
        self._engine.submit(command, queue).on_done(self._end)

    def _end(self, completion: Completion) -> None:
        self._open -= 1
        self._done += 1
        self._last_ns = completion.ended_ns
        try:
            completion.result()
        except Exception as error:
            self._error = self._error or error
            self._stopped = True
            return
        pause: Callable[[int], None] = self._submit
        busy = completion.ended_ns - completion.submitted_ns
        self._clock.call_at(self._clock.now() + round(busy * (1 / self._duty - 1)), pause, completion.queue)


STREAM_NBYTES: dict[Verb, int] = {"transfer": 4 << 20, "score": 960 << 10}
"""Bytes of one command of a stream. `score` stays below the mebibyte from which real kernels take every core."""


def _period(read_fraction: float) -> int:
    """After how many commands a mix of reads and writes repeats itself."""
    return next(n for n in (1, 2, 4, 8, 100) if n == 100 or abs(read_fraction * n - round(read_fraction * n)) < 1e-9)
