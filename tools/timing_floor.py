"""The timing floor of this machine: what a wall-clock emulation can promise here. Reads real time, takes about 2 s.

- Lateness: how long after its time an event of the wall clock runs, while nothing else is asked of it.
- The smallest latency that holds: the shortest delay of which 99 of 100 run at most a tenth late.
- The smallest latency inside kernels: the shortest that can be injected into an access with an error of 50 ns or a
  tenth at most, in the median.
- The highest rate: the highest of `RATES_GB_PER_S` at which a paced read was 0.1 % off at most, in the median, but no
  more than what one core copies divided by 1.5, the margin that other work on the host needs.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.host_speed import HEADROOM
from tierloop.emulators.pacing import measure_latency, measure_rate

DELAYS_NS = (*(m * 10**e for e in (3, 4, 5, 6) for m in (1, 2, 5)), 10_000_000)
"""Delays that are tried, shortest first: 1 µs to 10 ms."""

LATENCIES_NS = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
"""Latencies that are tried inside kernels, shortest first."""
LATENCY_ERROR_NS = 50
RATES_GB_PER_S = (32, 24, 16, 12, 8, 6, 4, 2, 1, 0.5, 0.1)
"""Rates that are tried, highest first."""
RATE_ERROR = 1e-3
_TRIES = 5
_PACED_NS = 10_000_000
_TILE_NBYTES = 1 << 16

_BUDGET_NS = 100_000_000
_COPY_NBYTES = 64 << 20


@dataclass(frozen=True)
class TimingFloor:
    """Measured on this machine, just now. Latencies and rates are 0 if not even the easiest that was tried holds."""

    lateness_p50_ns: int
    lateness_p99_ns: int
    lateness_worst_ns: int
    smallest_latency_ns: int
    smallest_paced_latency_ns: int
    copy_bytes_per_s: int
    highest_rate_bytes_per_s: int
    events_per_s: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure() -> TimingFloor:
    """Measure everything."""
    clock = WallClock()
    quiet = np.sort(lateness(clock, 200_000, 500))
    copied = copy_rate()
    return TimingFloor(
        lateness_p50_ns=int(quiet[len(quiet) // 2]),
        lateness_p99_ns=int(quiet[len(quiet) * 99 // 100]),
        lateness_worst_ns=int(quiet[-1]),
        smallest_latency_ns=smallest_latency(clock),
        smallest_paced_latency_ns=smallest_paced_latency(),
        copy_bytes_per_s=copied,
        highest_rate_bytes_per_s=highest_rate(int(copied / HEADROOM)),
        events_per_s=event_rate(clock),
    )


def lateness(clock: WallClock, delay_ns: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How late each of `count` events ran, one at a time, each `delay_ns` ahead: int64 (count,), ns."""
    late: list[int] = []
    for number in range(count):
        due = clock.now() + delay_ns
        clock.call_at(due, lambda due: late.append(clock.now() - due), due)
        clock.run_until(lambda number=number: len(late) > number, due + 10**10)  # type: ignore[misc]  # bound at once
    return np.array(late, dtype=np.int64)


def smallest_latency(clock: WallClock) -> int:
    """The first of `DELAYS_NS` that holds, 0 if none does."""
    for delay in DELAYS_NS:
        late = np.sort(lateness(clock, delay, min(200, max(20, _BUDGET_NS // delay))))
        if late[len(late) * 99 // 100] * 10 <= delay:
            return delay
    return 0


def smallest_paced_latency() -> int:
    """The first of `LATENCIES_NS` that holds inside kernels, 0 if none does."""
    for target in LATENCIES_NS:
        errors = np.abs(np.concatenate([measure_latency(target, 1000) for _ in range(_TRIES)]))
        if np.median(errors) <= min(LATENCY_ERROR_NS, target / 10):
            return target
    return 0


def highest_rate(ceiling: int) -> int:
    """The first of `RATES_GB_PER_S` up to `ceiling` bytes/s that holds, in bytes/s; 0 if none does."""
    buffer = np.ones(_COPY_NBYTES, dtype=np.uint8)
    for rate in [round(wanted * 1e9) for wanted in RATES_GB_PER_S]:
        if rate > ceiling:
            continue
        nbytes = rate * _PACED_NS // 1_000_000_000
        achieved = [measure_rate(nbytes, _TILE_NBYTES, rate, buffer)[0] for _ in range(_TRIES)]
        if abs(float(np.median(achieved)) / rate - 1) <= RATE_ERROR:
            return rate
    return 0


def copy_rate() -> int:
    """Bytes/s of the best of seven copies of 64 MiB by one thread."""
    source = np.ones(_COPY_NBYTES, dtype=np.uint8)
    target = np.empty_like(source)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(7))
    return int(_COPY_NBYTES * 1e9 / best)


def event_rate(clock: WallClock) -> int:
    """Events/s that the clock runs when all are due at once: the ceiling of commands per second."""
    count, seen = 20_000, [0]

    def event() -> None:
        seen[0] += 1

    def run() -> None:
        now = clock.now()
        for _ in range(count):
            clock.call_at(now, event)
        clock.run_until(lambda: seen[0] == count, now + 10**10)

    return int(count * 1e9 / _timed(run))


def _timed(call: Any) -> int:
    begun = time.perf_counter_ns()
    call()
    return max(1, time.perf_counter_ns() - begun)
