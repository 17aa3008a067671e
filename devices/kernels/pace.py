"""Pace: kernels of a thread that take as long as somebody else's memory would, tile by tile.

A *pace* says when the work of one command begins and how long it takes. A kernel that keeps it waits before each tile
until the share of the time has passed that the tiles before it stand for. Deadlines are absolute: a wait that ended
late makes the next one shorter, so that errors do not add up. Who falls behind by more than `debt` is not allowed to
make up for all of it: a burst at the host's speed is nothing that the slower memory would do. What was dropped is
counted, and the command ends late.

Time is read from the processor's cycle counter where it counts evenly through all states (x86 with constant_tsc and
nonstop_tsc), elsewhere from the monotonic clock. Waits sleep until shortly before their deadline, then spin. A pace
that does not spin leaves the core to others and is rough: tiles begin up to 50 µs early or as late as the system wakes.

`with keeping(pace)` sets the pace of a thread's kernels; `new_counter` hands it on to them. Without a pace, nothing of
this costs more than one load for each tile.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, address_of, inline, kernel, load_int, store_int

START, LENGTH, PER_US, CYCLES, DEBT, SPINS, WORST, DROPPED, WAITS, NUM_PLACES = range(10)
"""Places of a pace, int64 each: ticks of its start and of its length, ticks per µs, whether ticks are cycles, the debt
that may be made up for, whether waits spin; then what is counted: the worst lateness, what was dropped of the debt, the
number of waits."""
PACE = 1
"""Where the address of a pace lies behind a counter, in int64 places."""
_SLEEP_US, _SPIN_US, _ROUGH_US = 500, 400, 50
"""Sleep if more than the first is left, to the second before the deadline: sleeping overshoots by 14 to 70 µs, and one
time in a hundred by more than 150 (waits of 1 ms, 99th percentile: 21 µs late with 150, 1 to 4 with 400). The third is
the least that is worth a sleep to a pace that does not spin."""

TILE_NBYTES = 1 << 16
"""Bytes between two looks at the time, where a kernel may choose: 100 looks/ms at 6.5 GB/s cost less than 1 %."""


@inline(INT64, INT64)
def _read_ticks(builder: Any, cycles: Any) -> Any:
    """The cycle counter, or the monotonic clock in ns."""
    i64, i32 = ir.IntType(64), ir.IntType(32)
    result = builder.alloca(i64)
    spec = builder.alloca(ir.ArrayType(i64, 2))
    with builder.if_else(builder.icmp_signed("!=", cycles, ir.Constant(i64, 0))) as (by_cycles, by_clock):
        with by_cycles:
            count = builder.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(i64, []))
            builder.store(builder.call(count, []), result)
        with by_clock:
            kind = ir.FunctionType(i32, [i32, spec.type])
            name = "clock_gettime"
            read = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            builder.call(read, [ir.Constant(i32, time.CLOCK_MONOTONIC), spec])
            zero = ir.Constant(i32, 0)
            seconds = builder.load(builder.gep(spec, [zero, zero]))
            ns = builder.load(builder.gep(spec, [zero, ir.Constant(i32, 1)]))
            builder.store(builder.add(builder.mul(seconds, ir.Constant(i64, 10**9)), ns), result)
    return builder.load(result)


@inline(types.void, INT64)
def _sleep_ns(builder: Any, ns: Any) -> None:
    """nanosleep of less than a second."""
    i64, i32 = ir.IntType(64), ir.IntType(32)
    spec = builder.alloca(ir.ArrayType(i64, 2))
    zero = ir.Constant(i32, 0)
    builder.store(ir.Constant(i64, 0), builder.gep(spec, [zero, zero]))
    builder.store(ns, builder.gep(spec, [zero, ir.Constant(i32, 1)]))
    kind = ir.FunctionType(i32, [spec.type, spec.type])
    sleep = builder.module.globals.get("nanosleep") or ir.Function(builder.module, kind, "nanosleep")
    builder.call(sleep, [spec, ir.Constant(spec.type, None)])


@kernel(INT64, INT64)
def ticks(cycles: int) -> int:
    """The present in ticks."""
    return _read_ticks(cycles)  # type: ignore[no-any-return]  # an inline function


@kernel(types.void, INT64, INT64, INT64)
def wait_for(pace: int, done: int, total: int) -> None:
    """Wait until the share done / total of a pace's time has passed; `pace` is an address that is not 0."""
    cycles, per_us, debt = load_int(pace + 8 * CYCLES), load_int(pace + 8 * PER_US), load_int(pace + 8 * DEBT)
    start = load_int(pace + 8 * START)
    due = start + np.int64(load_int(pace + 8 * LENGTH) * (done / total))
    spins = load_int(pace + 8 * SPINS)
    least, spared = (_SLEEP_US, _SPIN_US) if spins else (_ROUGH_US, 0)
    now = _read_ticks(cycles)
    while now < due:
        left = due - now
        if left <= least * per_us:
            if not spins:
                break
        else:
            # In pieces, because the end may be moved meanwhile: somebody else has come or gone.
            _sleep_ns(min(left // per_us - spared, 20_000) * 1000)
            due = start + np.int64(load_int(pace + 8 * LENGTH) * (done / total))
        now = _read_ticks(cycles)
    late = max(now - due, 0)
    if late > debt:
        store_int(pace + 8 * START, start + late - debt)
        store_int(pace + 8 * DROPPED, load_int(pace + 8 * DROPPED) + late - debt)
    if late > load_int(pace + 8 * WORST):
        store_int(pace + 8 * WORST, late)
    store_int(pace + 8 * WAITS, load_int(pace + 8 * WAITS) + 1)


@kernel(types.void, INT64, INT64, INT64)
def keep_pace(counter: int, done: int, total: int) -> None:
    """Before a tile: wait until done / total of the time has passed, if the kernel has a pace."""
    pace = load_int(counter + 8 * PACE)
    if pace:
        wait_for(pace, done, total)


class Pace:
    """The time of one command's work: `length_ns` from `start_in_ns` after now on, and what became of its waits.

    `end_in` may be called while the work is under way, by another thread.
    """

    def __init__(self, length_ns: int, debt_ns: int = 100_000, start_in_ns: int = 0, spins: bool = True) -> None:
        per_ns = ticks_per_ns()
        self.places: NDArray[np.int64] = np.zeros(NUM_PLACES, dtype=np.int64)
        self.places[CYCLES] = counts_cycles()
        self.places[PER_US] = max(round(1000 * per_ns), 1)
        self.places[DEBT] = round(debt_ns * per_ns)
        self.places[SPINS] = spins
        self.places[START] = ticks(counts_cycles()) + round(start_in_ns * per_ns)
        self.places[LENGTH] = round(length_ns * per_ns)
        self.lead_ns = 0
        """How much earlier than is said the pace ends."""
        self.is_late_start = False
        """Whether nothing is to be done before the end of the pace, and then all at once."""
        self.address = address_of(self.places.view(np.uint8))

    def end_in(self, ns: int) -> None:
        """The work is to end so long from now, earlier or later than was said before."""
        ns -= self.lead_ns
        now = ticks(counts_cycles())
        self.places[LENGTH] = max(now + round(ns * ticks_per_ns()) - int(self.places[START]), 0)

    def wait(self, done: int, total: int) -> None:
        """Wait until done / total of the time has passed."""
        wait_for(self.address, done, total)

    @property
    def worst_ns(self) -> int:
        """The worst lateness of a wait."""
        return round(int(self.places[WORST]) / ticks_per_ns())

    @property
    def dropped_ns(self) -> int:
        """By how much the work ends late because its debt was bounded."""
        return round(int(self.places[DROPPED]) / ticks_per_ns())

    @property
    def waits(self) -> int:
        """How many waits there were."""
        return int(self.places[WAITS])


_of_thread = threading.local()


@contextmanager
def keeping(pace: Pace | None) -> Iterator[None]:
    """Let the kernels of this thread keep a pace."""
    _of_thread.pace = pace
    try:
        yield
    finally:
        _of_thread.pace = None


def is_paced() -> bool:
    """Whether kernels of this thread have a pace to keep."""
    return getattr(_of_thread, "pace", None) is not None


def new_counter(room_nbytes: int = 0) -> NDArray[np.uint8]:
    """What the threads of one launch share: a counter at 0, the address of its pace (0: none), and `room_nbytes`."""
    counter = np.zeros(8 * (PACE + 1) + room_nbytes, dtype=np.uint8)
    pace = getattr(_of_thread, "pace", None)
    if pace is not None:
        counter[8 * PACE : 8 * (PACE + 1)].view(np.int64)[0] = pace.address
    return counter


@cache
def counts_cycles() -> int:
    """1 where the cycle counter can be trusted as a clock, otherwise 0."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 0
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").partition("flags")[2]
    except OSError:
        return 0
    words = flags.partition("\n")[0].split()
    return int("constant_tsc" in words and "nonstop_tsc" in words)


_CALIBRATION_NS = 50_000_000


@cache
def ticks_per_ns() -> float:
    """How many ticks pass in a ns, against the monotonic clock: measured once, in 50 ms, to some 10⁻⁵.

    The time between two readings of the clock around one of the counter bounds the error of either end.
    """
    if not counts_cycles():
        return 1.0
    first = _both()
    while time.perf_counter_ns() - first[0] < _CALIBRATION_NS:
        pass
    last = _both()
    return (last[1] - first[1]) / (last[0] - first[0])


def _both() -> tuple[int, int]:
    """A moment in ns and in ticks: of many pairs of readings the closest."""
    best = (1 << 62, 0, 0)
    for _ in range(50):
        before = time.perf_counter_ns()
        now = ticks(1)
        after = time.perf_counter_ns()
        best = min(best, (after - before, (before + after) // 2, now))
    return best[1], best[2]
