"""How well this host keeps a pace: rates by tile size, latencies inside kernels and at the clock.

A measurement is *valid* only where the host could have kept its promise: it reads at least `HEADROOM` times as fast as
the target, and no wait of the run ended later than the debt that a pace may make up for, nor, for latencies, than a
hundredth of the run (a core that was taken away is seen there). An invalid run is tried again, and counted; figures are
medians over valid runs, and None without any.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.host_speed import HEADROOM
from tierloop.emulators.pacing import DEBT_NS, measure_latency, measure_rate
from tierloop.tools.timing_floor import lateness
from tierloop.tools.two_clocks import LATENESS_PERCENT

RATES = (100_000_000, 1_000_000_000, 4_000_000_000, 8_000_000_000)
"""Targets in bytes/s."""
TILES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
LATENCIES_NS = (200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000)
CLOCK_LATENCIES_NS = (10_000, 100_000, 1_000_000)
_RATE_NS, _LATENCY_NS = 5_000_000, 2_000_000
"""Runs are short, so that some are valid on a host that others use as well, and are tried all the more often."""
_LEAST_TILES = 4
_WAITS = (50, 1000)
_LEAST_ERRORS = 1000
"""Latencies that a percentile is taken of, at least: of 50, the 99th percentile would be the worst."""
_SHORT = 4
"""Tries of a short run for each that is allowed of others."""
_ANY_RATE = 10**15

T = TypeVar("T")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Effort:
    """How many valid runs are wanted of each measurement, and how many are tried for that."""

    wanted: int = 5
    tries: int = 15

    def short(self) -> Effort:
        """For runs of a few milliseconds."""
        return Effort(self.wanted, _SHORT * self.tries)

    def at_least(self, wanted: int) -> Effort:
        """For figures that need so many runs."""
        return self if wanted <= self.wanted else Effort(wanted, -(-self.tries * wanted // self.wanted))


@dataclass(frozen=True)
class Tried(Generic[T]):
    """What valid runs gave, and how many runs were invalid."""

    values: list[T]
    invalid: int


def attempt(run: Callable[[], T | None], effort: Effort) -> Tried[T]:
    """Run until enough runs were valid; one that returns None was not."""
    values: list[T] = []
    invalid = 0
    while len(values) < effort.wanted and len(values) + invalid < effort.tries:
        value = run()
        if value is None:
            invalid += 1
        else:
            values.append(value)
    return Tried(values, invalid)


@dataclass(frozen=True)
class RateFigure:
    """Commanded against achieved rate, |achieved / target − 1| in %."""

    target_bytes_per_s: int
    tile_nbytes: int
    host_bytes_per_s: int
    error_pct: float | None
    invalid_runs: int

    @property
    def possible(self) -> bool:
        """Whether the host has the headroom that is needed to try."""
        return self.host_bytes_per_s >= HEADROOM * self.target_bytes_per_s


@dataclass(frozen=True)
class LatencyFigure:
    """By how much an injected latency differs from its target, in ns, as magnitudes, over all valid runs together."""

    target_ns: int
    p50_error_ns: float | None
    p99_error_ns: float | None
    invalid_runs: int


def rate_figures(effort: Effort, tiles: tuple[int, ...] = TILES, progress: Progress | None = None) -> list[RateFigure]:
    """Every target at every size of tile."""
    buffer = np.ones(1 << 26, dtype=np.uint8)
    figures: list[RateFigure] = []
    for tile in tiles:
        host = max(int(measure_rate(1 << 27, tile, _ANY_RATE, buffer)[0]) for _ in range(5))
        for target in RATES:
            if progress is not None:
                progress("rates", len(figures), len(RATES) * len(tiles))
            figures.append(_rate(target, tile, host, buffer, effort))
    if progress is not None:
        progress("rates", len(figures), len(figures))
    return figures


def _rate(
    target: int, tile: int, host: int, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]], effort: Effort
) -> RateFigure:
    impossible = RateFigure(target, tile, host, None, 0)
    if not impossible.possible:
        return impossible
    nbytes = -(-max(target * _RATE_NS // 10**9, _LEAST_TILES * tile) // tile) * tile

    def run() -> float | None:
        achieved, worst_ns = measure_rate(nbytes, tile, target, buffer)
        return abs(achieved / target - 1) * 100 if worst_ns <= DEBT_NS else None

    tried = attempt(run, effort.short())
    return RateFigure(target, tile, host, statistics.median(tried.values) if tried.values else None, tried.invalid)


def latency_figures(effort: Effort, progress: Progress | None = None) -> list[LatencyFigure]:
    """Latencies that are injected inside kernels."""
    return _latencies("latencies in kernels", LATENCIES_NS, measure_latency, effort, progress)


def clock_figures(effort: Effort, progress: Progress | None = None) -> list[LatencyFigure]:
    """Latencies that are held at the clock, as completions are."""
    clock = WallClock()

    def measured(target_ns: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return lateness(clock, target_ns, count)

    return _latencies("latencies at the clock", CLOCK_LATENCIES_NS, measured, effort, progress)


def _latencies(
    stage: str,
    targets_ns: tuple[int, ...],
    measure: Callable[[int, int], np.ndarray[tuple[int], np.dtype[np.int64]]],
    effort: Effort,
    progress: Progress | None,
) -> list[LatencyFigure]:
    figures = []
    for number, target in enumerate(targets_ns):
        if progress is not None:
            progress(stage, number, len(targets_ns))
        count = min(max(_LATENCY_NS // target, _WAITS[0]), _WAITS[1])

        def run(target: int = target, count: int = count) -> list[int] | None:
            errors = np.abs(measure(target, count))
            late = errors.max() > min(DEBT_NS, count * target * LATENESS_PERCENT / 100)
            return None if late else errors.tolist()

        tried = attempt(run, effort.short().at_least(-(-_LEAST_ERRORS // count)))
        errors = [error for one in tried.values for error in one]
        p50, p99 = np.percentile(errors, (50, 99)).tolist() if errors else (None, None)
        figures.append(LatencyFigure(target, p50, p99, tried.invalid))
    if progress is not None:
        progress(stage, len(targets_ns), len(targets_ns))
    return figures
