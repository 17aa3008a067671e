"""One scenario on two clocks: how far an emulated run on the wall clock is from what the virtual clock says.

The same decode (tiered_decode.py) runs once on the virtual clock and several times on the wall clock, dilated as the
platform file says. A wall-clock run counts only if no promise was broken and its *lateness* is at most
`LATENESS_PERCENT` of its makespan; other runs are invalid and listed with the reason, never averaged in. After an
invalid run the next one is stretched to twice the dilation: a host that is used by others as well may keep that.
Lateness is that of the worst chain: what each command overran its due time by, added up along what it came after and
along its queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tierloop.devices.completion import Completion
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.tools.tiered_decode import Size, TieredDecode

PLATFORM = "demo"
WHOLE = Size()
MOST_STRETCH = 8
"""How many times the dilation that this host should need is tried: a run takes some ten seconds then."""
LATENESS_PERCENT = 1.0
"""Runs that are later than this are invalid."""
TARGET_PERCENT = 5.0
"""What the makespans of a valid run may differ by."""

Progress = Callable[[str, int, int], None]


class ChainLateness:
    """An observer of completions: `worst_ns` is the largest sum of overruns along any chain of commands."""

    def __init__(self) -> None:
        self.worst_ns = 0
        self._of: dict[Completion, int] = {}
        self._lanes: dict[tuple[str, int], int] = {}

    def __call__(self, completion: Completion) -> None:
        lane = (completion.device, completion.queue)
        before = max([self._lanes.get(lane, 0), *(self._of.get(earlier, 0) for earlier in completion.after)])
        late = before + completion.overrun_ns
        self._of[completion] = self._lanes[lane] = late
        self.worst_ns = max(self.worst_ns, late)


@dataclass(frozen=True)
class ClockRun:
    """One run; times in ns, scaled back by σ. `invalid` says why its makespan must not be believed."""

    makespan_ns: int
    lateness_ns: int
    dilation: int
    digest: str
    invalid: tuple[str, ...]
    interference: float = 0.0
    """What the emulators' own traffic took of the host's bandwidth, from 0 to 1."""


@dataclass(frozen=True)
class TwoClocks:
    """What the virtual clock says, and every wall-clock run."""

    virtual: ClockRun
    wall: tuple[ClockRun, ...]

    @property
    def valid(self) -> list[ClockRun]:
        """The wall-clock runs that count."""
        return [run for run in self.wall if not run.invalid]

    @property
    def difference_pct(self) -> float | None:
        """Wall against virtual makespan: the median over valid runs of |wall − virtual| / virtual; None without any."""
        of = self.virtual.makespan_ns
        found = [abs(run.makespan_ns - of) * 100 / of for run in self.valid]
        return statistics.median(found) if found else None

    @property
    def same_output(self) -> bool:
        """Whether every run, valid or not, computed the same bits."""
        return all(run.digest == self.virtual.digest for run in self.wall)


def run_on(platform: Platform, size: Size = WHOLE) -> ClockRun:
    """Run the scenario on an open platform; placing the cache is not in the makespan."""
    scenario = TieredDecode(platform, size)
    loop, clock, sigma = scenario.engine.loop, platform.clock, platform.dilation
    loop.run(scenario.place())
    for restart in platform.site.restarts:
        restart()
    lateness = ChainLateness()
    platform.site.observers.append(lateness)
    begun = clock.now()
    try:
        loop.run(scenario.decode())
    finally:
        platform.site.observers.remove(lateness)
    makespan, late = clock.now() - begun, lateness.worst_ns
    invalid, interference = list(platform.site.invalid), platform.site.interference
    scenario.engine.close()
    if late * 100 > LATENESS_PERCENT * makespan:
        invalid.append(
            f"late by {late / 1e6:.2f} ms in {makespan / 1e6:.1f} ms at σ = {sigma}, more than {LATENESS_PERCENT:g} %: "
            "this host was busy with something else"
        )
    return ClockRun(-(-makespan // sigma), -(-late // sigma), sigma, scenario.digest(), tuple(invalid), interference)


def open_wall(stretch: int = 1) -> Platform:
    """The scenario's platform on the wall clock, at so many times the dilation that this host can honour."""
    platform = open_platform(PLATFORM, clock="wall")
    if stretch == 1:
        return platform
    dilation = platform.dilation * stretch
    platform.close()
    return open_platform(PLATFORM, clock="wall", dilation=dilation)


def compare_clocks(
    tries: int = 6,
    wanted: int = 3,
    open_wall: Callable[[int], Platform] = open_wall,
    progress: Progress | None = None,
    size: Size = WHOLE,
) -> TwoClocks:
    """Run on both clocks; on the wall clock until `wanted` runs were valid, at most `tries` times."""
    with open_platform(PLATFORM, clock="virtual") as platform:
        virtual = run_on(platform, size)
    runs: list[ClockRun] = []
    stretch = 1
    while len(runs) < tries and sum(not run.invalid for run in runs) < wanted:
        if progress is not None:
            progress("one scenario, two clocks", len(runs), tries)
        with open_wall(stretch) as platform:
            runs.append(run_on(platform, size))
        if runs[-1].invalid:
            stretch = min(2 * stretch, MOST_STRETCH)
    if progress is not None:
        progress("one scenario, two clocks", tries, tries)
    return TwoClocks(virtual, tuple(runs))
