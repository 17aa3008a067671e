"""What `bench emulation` measured: run it all, hold it against the targets, and put it into JSON."""

from __future__ import annotations

import os
import platform as machine
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.tools import bench_emulation_links as links
from tierloop.tools.bench_emulation_pace import (
    TILES,
    Effort,
    LatencyFigure,
    RateFigure,
    clock_figures,
    latency_figures,
    rate_figures,
)
from tierloop.tools.bench_emulation_speed import (
    PhantomFigures,
    commands_per_s,
    events_per_s,
    media_operations_per_s,
    phantom_figures,
)
from tierloop.tools.two_clocks import PLATFORM, TARGET_PERCENT, TwoClocks, compare_clocks, open_wall

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Target:
    """A figure against what it has to reach; `met` is None where there was no valid run."""

    name: str
    shown: str
    limit: str
    met: bool | None


@dataclass(frozen=True)
class Contended:
    """A figure of a link under both clocks; `wall` is the median over valid runs."""

    virtual: float | None
    wall: float | None
    invalid: tuple[str, ...]


@dataclass(frozen=True)
class EmulationReport:
    """Everything that was measured."""

    rates: list[RateFigure]
    latencies: list[LatencyFigure]
    clock_latencies: list[LatencyFigure]
    fair_share: Contended
    route: Contended
    small_delay_quanta: float | None
    clocks: TwoClocks
    events_per_s: float
    media_operations_per_s: dict[str, float]
    commands_per_s: float
    contended_per_s: float
    phantom: PhantomFigures

    @property
    def same_output(self) -> bool:
        """Whether the decode gave the same bits under both clocks."""
        return self.clocks.same_output

    @property
    def dilation(self) -> int:
        """σ of the decodes on the wall clock, of those that counted if any did."""
        return (self.clocks.valid or self.clocks.wall)[-1].dilation

    @property
    def anything_valid(self) -> bool:
        """Whether any run on the wall clock was."""
        figures = [rate.error_pct for rate in self.rates] + [x.p50_error_ns for x in self.latencies]
        figures += [self.fair_share.wall, self.route.wall, self.clocks.difference_pct]
        return any(figure is not None for figure in figures)

    @property
    def interference(self) -> float | None:
        """What the emulators' own traffic took of the host's bandwidth in the two-clock runs that counted, 0 to 1."""
        return max((run.interference for run in self.clocks.valid), default=None)

    def targets(self) -> list[Target]:
        """Every figure that has a target."""
        possible = [rate for rate in self.rates if rate.possible]
        errors = [rate.error_pct for rate in possible]
        short = [x.p50_error_ns for x in self.latencies if x.target_ns <= 5_000]
        long = [x.p99_error_ns for x in self.latencies if x.target_ns >= 10_000]
        slowest = min(self.media_operations_per_s.values())
        return [
            _most("rate error, worst of what this host has headroom for", _worst(errors), 0.1, "%"),
            _most("latency error of 200 ns to 5 µs, p50, worst", _worst(short), 50, "ns"),
            _most("latency error of 10 µs and more, p99, worst", _worst(long), 1_000, "ns"),
            _most("share of a link against a fair one, wall clock", self.fair_share.wall, 1, "%"),
            _most("share of a link against a fair one, virtual clock", self.fair_share.virtual, 1, "%"),
            _most("time over two links against the closed form, wall clock", self.route.wall, 1, "%"),
            _most("time over two links against the closed form, virtual clock", self.route.virtual, 1, "%"),
            _most("4 KiB beside 64 MiB: delay in quanta of 4 KiB", self.small_delay_quanta, 2, ""),
            _most("one decode on two clocks: makespans differ by", self.clocks.difference_pct, TARGET_PERCENT, "%"),
            _least("media operations inside a command, slowest pattern", slowest / 1e6, 20, "M/s"),
            _least("commands end to end", self.commands_per_s, 100_000, "/s"),
            _most("decode step of Llama-3-8B shapes, 1M tokens × 8", self.phantom.step_s * 1e3, 20, "ms"),
        ]

    def notes(self) -> list[str]:
        """What a reader has to know."""
        media = ", ".join(f"{name} {rate / 1e6:.0f} M/s" for name, rate in self.media_operations_per_s.items())
        phantom = self.phantom
        lines = [
            f"wall clock: σ = {self.dilation}; {len(self.clocks.valid)} of {len(self.clocks.wall)} decodes were valid",
            f"virtual clock: {self.events_per_s / 1e6:.2f} M events/s; {phantom.simulated_s_per_s:.0f} simulated "
            f"seconds per second: a step of {phantom.simulated_s:.3f} s, {phantom.commands} commands, all rows",
            f"commands of which three at a time share a memory: {self.contended_per_s:,.0f}/s",
            f"media operations: {media}",
            f"trace hash of the step: {phantom.trace_hash}",
        ]
        if self.interference is not None:
            lines.append(f"the emulators' own traffic: {self.interference:.0%} of what this host's memory can do")
        return lines + [f"invalid: {reason}" for reason in self.invalid_reasons()]

    def invalid_reasons(self) -> list[str]:
        """Why runs were invalid, each reason once."""
        reasons = [*self.fair_share.invalid, *self.route.invalid]
        reasons += [reason for run in self.clocks.wall for reason in run.invalid]
        return list(dict.fromkeys(reasons))

    @property
    def invalid_runs(self) -> int:
        """How many runs were invalid, in all."""
        figures: list[RateFigure | LatencyFigure] = [*self.rates, *self.latencies, *self.clock_latencies]
        contended = len(self.fair_share.invalid) + len(self.route.invalid)
        late = len(self.clocks.wall) - len(self.clocks.valid)
        return sum(figure.invalid_runs for figure in figures) + contended + late

    def to_json(self) -> dict[str, Any]:
        """Plain data; what docs/command_line.md describes."""
        return {
            "rate": [
                {
                    "target_gb_s": rate.target_bytes_per_s / 1e9,
                    "tile_bytes": rate.tile_nbytes,
                    "error_pct": rate.error_pct,
                    "valid": rate.error_pct is not None,
                }
                for rate in self.rates
            ],
            "latency": [_latency(figure) for figure in self.latencies],
            "fair_share_error_pct": self.fair_share.wall,
            "route_error_pct": self.route.wall,
            "events_per_s": self.events_per_s,
            "commands_per_s": self.commands_per_s,
            "phantom_step_s": self.phantom.step_s,
            "wall_vs_virtual_pct": self.clocks.difference_pct,
            "dilation": self.dilation,
            "trace_hash": self.phantom.trace_hash,
            "commands_contended_per_s": self.contended_per_s,
            "clock_latency": [_latency(figure) for figure in self.clock_latencies],
            "fair_share_error_virtual_pct": self.fair_share.virtual,
            "route_error_virtual_pct": self.route.virtual,
            "small_delay_quanta": self.small_delay_quanta,
            "media_operations_per_s": self.media_operations_per_s,
            "simulated_s_per_s": self.phantom.simulated_s_per_s,
            "phantom_step_simulated_s": self.phantom.simulated_s,
            "phantom_step_commands": self.phantom.commands,
            "interference": self.interference,
            "invalid_runs": self.invalid_runs,
            "invalid": self.invalid_reasons(),
            "targets": [{"name": t.name, "value": t.shown, "target": t.limit, "met": t.met} for t in self.targets()],
            "machine": f"{machine.machine()}, {os.cpu_count()} cores, Python {machine.python_version()}",
        }


def measure(quick: bool, progress: Progress) -> EmulationReport:
    """Measure everything: two minutes on two cores, a quarter of that if `quick`."""
    effort = Effort(3, 9) if quick else Effort()
    tries = 10 if quick else 40
    rates = rate_figures(effort, (TILES[0], TILES[3], TILES[-1]) if quick else TILES, progress)
    latencies = latency_figures(effort, progress)
    at_clock = clock_figures(effort, progress)
    fair, route = (
        _contended(figure, effort, name, progress)
        for name, figure in (("fair shares", links.fair_share_error_pct), ("routes", links.route_error_pct))
    )
    with open_platform(PLATFORM, clock="virtual") as platform:
        small, _ = links.small_delay_quanta(platform)
    clocks = compare_clocks(effort.tries, 3, progress=progress)
    stages = ("events", "media", "commands", "phantom step")

    def stage(done: int) -> None:
        progress(f"speed: {stages[min(done, len(stages) - 1)]}", done, len(stages))

    stage(0)
    events = events_per_s(tries // 2)
    stage(1)
    media = media_operations_per_s(tries)
    stage(2)
    commands, contended = commands_per_s(tries * 2), commands_per_s(tries, contended=True)
    stage(3)
    phantom = phantom_figures(tries * 2)
    stage(4)
    return EmulationReport(
        rates, latencies, at_clock, fair, route, small, clocks, events, media, commands, contended, phantom
    )


def _contended(figure: Callable[[Platform], links.Judged], effort: Effort, name: str, progress: Progress) -> Contended:
    with open_platform(PLATFORM, clock="virtual") as platform:
        virtual, _ = figure(platform)
    values: list[float] = []
    invalid: list[str] = []
    with open_wall() as platform:
        while len(values) < effort.wanted and len(values) + len(invalid) < effort.tries:
            progress(name, len(values) + len(invalid), effort.tries)
            value, why = figure(platform)
            if value is None:
                invalid.append("; ".join(why))
            else:
                values.append(value)
    progress(name, effort.tries, effort.tries)
    return Contended(virtual, statistics.median(values) if values else None, tuple(invalid))


def _latency(figure: LatencyFigure) -> dict[str, Any]:
    return {
        "target_ns": figure.target_ns,
        "p50_error_ns": figure.p50_error_ns,
        "p99_error_ns": figure.p99_error_ns,
        "valid": figure.p50_error_ns is not None,
    }


def _worst(values: list[float | None]) -> float | None:
    """The largest; None where any is missing, or there are none."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _most(name: str, value: float | None, limit: float, unit: str) -> Target:
    return Target(name, _number(value, unit), f"≤ {limit:g} {unit}".strip(), None if value is None else value <= limit)


def _least(name: str, value: float, limit: float, unit: str) -> Target:
    return Target(name, _number(value, unit), f"≥ {limit:,g} {unit}", value >= limit)


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:,.4g} {unit}".strip()
