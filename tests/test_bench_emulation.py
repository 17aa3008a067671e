"""`bench emulation`: which runs count, what the report says and how the command ends. Nothing here is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import typer

from tierloop.devices.registry import open_platform
from tierloop.emulators.pacing import DEBT_NS
from tierloop.tools import bench_emulation, bench_emulation_links, bench_emulation_pace, bench_emulation_report, cli
from tierloop.tools.bench_emulation_pace import Effort, LatencyFigure, RateFigure, attempt
from tierloop.tools.bench_emulation_report import Contended, EmulationReport
from tierloop.tools.bench_emulation_speed import PhantomFigures
from tierloop.tools.two_clocks import PLATFORM, ClockRun, TwoClocks

CONTRACT = {
    "rate",
    "latency",
    "fair_share_error_pct",
    "route_error_pct",
    "events_per_s",
    "commands_per_s",
    "phantom_step_s",
    "wall_vs_virtual_pct",
    "dilation",
    "trace_hash",
}
RUN = ClockRun(1_000_000, 0, 40, "bits", ())
GOOD = EmulationReport(
    rates=[RateFigure(10**9, 4096, 8 * 10**9, 0.001, 2), RateFigure(8 * 10**9, 4096, 8 * 10**9, None, 0)],
    latencies=[LatencyFigure(200, 9.0, 5_000.0, 0), LatencyFigure(10_000, 700.0, 800.0, 1)],
    clock_latencies=[LatencyFigure(10_000, 5_000.0, 9_000.0, 0)],
    fair_share=Contended(0.0, 0.4, ()),
    route=Contended(0.0, 0.2, ("late",)),
    small_delay_quanta=1.0,
    clocks=TwoClocks(replace(RUN, dilation=1), (RUN, replace(RUN, invalid=("late by a lot",)))),
    events_per_s=1e6,
    media_operations_per_s={"random reads": 3e7, "random writes": 2e7},
    commands_per_s=120_000.0,
    contended_per_s=50_000.0,
    phantom=PhantomFigures(0.015, 1.5, 609, "00" * 32),
)
NOTHING_VALID = replace(
    GOOD,
    rates=[RateFigure(10**9, 4096, 8 * 10**9, None, 9)],
    latencies=[LatencyFigure(200, None, None, 9)],
    fair_share=Contended(0.0, None, ("late",)),
    route=Contended(0.0, None, ("late",)),
    clocks=TwoClocks(RUN, (replace(RUN, invalid=("late by a lot",)),)),
)


def code_of(report: EmulationReport, strict: bool) -> int:
    try:
        bench_emulation.raise_for(report, strict)
    except typer.Exit as end:
        return end.exit_code
    return 0


# -- which runs count ---------------------------------------------------------------------------------------------


def test_invalid_runs_are_tried_again_and_counted() -> None:
    runs = iter([1.0, None, None, 2.0, 3.0, 4.0])
    tried = attempt(lambda: next(runs), Effort(wanted=3, tries=10))
    assert (tried.values, tried.invalid) == ([1.0, 2.0, 3.0], 2)


def test_trying_ends_although_nothing_is_valid() -> None:
    runs: Iterator[float | None] = repeat(None)
    tried = attempt(lambda: next(runs), Effort(wanted=3, tries=7))
    assert (tried.values, tried.invalid) == ([], 7)


def rates(monkeypatch: pytest.MonkeyPatch, host: float, achieved: float, worst_ns: int) -> dict[int, RateFigure]:
    """Figures of a host that can do `host` bytes/s and keeps a rate to within a factor."""

    def measure(nbytes: int, tile: int, rate: int, _: Any) -> tuple[float, int]:
        assert nbytes % tile == 0
        return (host, 0) if rate > 10**12 else (rate * achieved, worst_ns)

    monkeypatch.setattr(bench_emulation_pace, "measure_rate", measure)
    figures = bench_emulation_pace.rate_figures(Effort(2, 4), (4096,))
    return {figure.target_bytes_per_s: figure for figure in figures}


def test_a_rate_counts_only_where_the_host_has_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rates(monkeypatch, 6e9, 1.01, 10)
    assert [figure.error_pct is None for figure in figures.values()] == [False, False, False, True]
    assert figures[4_000_000_000].error_pct == pytest.approx(1)
    assert not figures[8_000_000_000].possible


def test_a_rate_whose_waits_ended_late_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rates(monkeypatch, 1e11, 1.0, DEBT_NS + 1)
    assert {(figure.error_pct, figure.invalid_runs) for figure in figures.values()} == {(None, 16)}


def test_percentiles_of_latencies_are_over_all_valid_runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([10, 2_001, -30, 20])

    def measure(_: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.full(count, next(runs))

    monkeypatch.setattr(bench_emulation_pace, "measure_latency", measure)
    monkeypatch.setattr(bench_emulation_pace, "LATENCIES_NS", (200,))
    (figure,) = bench_emulation_pace.latency_figures(Effort(3, 9))
    assert figure == LatencyFigure(200, 20, 30, 1)


# -- links --------------------------------------------------------------------------------------------------------


def test_on_the_virtual_clock_links_do_what_the_closed_forms_say() -> None:
    with open_platform(PLATFORM, clock="virtual") as platform:
        for figure in (bench_emulation_links.fair_share_error_pct, bench_emulation_links.route_error_pct):
            error, invalid = figure(platform)
            assert invalid == ()
            assert error is not None
            assert error < 1e-3  # what rounding up to whole ns makes
        delay, invalid = bench_emulation_links.small_delay_quanta(platform)
        assert (delay, invalid) == (pytest.approx(1, abs=0.01), ())  # type: ignore[comparison-overlap]  # approx
        assert not [c for c in platform.site.observers if "Lateness" in type(c).__name__]


def test_a_broken_promise_leaves_no_figure() -> None:
    with open_platform(PLATFORM, clock="virtual") as platform:
        platform.site.invalid.append("slow host")
        assert bench_emulation_links.route_error_pct(platform) == (None, ("slow host",))


# -- the report ---------------------------------------------------------------------------------------------------


def test_the_json_keeps_the_contract() -> None:
    found = json.loads(json.dumps(GOOD.to_json()))
    assert set(found) >= CONTRACT
    assert found["rate"] == [
        {"target_gb_s": 1.0, "tile_bytes": 4096, "error_pct": 0.001, "valid": True},
        {"target_gb_s": 8.0, "tile_bytes": 4096, "error_pct": None, "valid": False},
    ]
    assert found["latency"][0] == {"target_ns": 200, "p50_error_ns": 9.0, "p99_error_ns": 5000.0, "valid": True}
    assert (found["fair_share_error_pct"], found["route_error_pct"], found["dilation"]) == (0.4, 0.2, 40)
    assert found["simulated_s_per_s"] == pytest.approx(100)
    assert found["invalid_runs"] == 2 + 1 + 1 + 1
    assert "late by a lot" in found["invalid"]


def test_every_target_is_met_by_a_good_report() -> None:
    assert [target.met for target in GOOD.targets()] == [True] * len(GOOD.targets())
    assert code_of(GOOD, strict=True) == code_of(GOOD, strict=False) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rates": [RateFigure(10**9, 4096, 8 * 10**9, 0.11, 0)]},
        {"latencies": [LatencyFigure(200, 51.0, 60.0, 0)]},
        {"latencies": [LatencyFigure(10_000, 1.0, 1_001.0, 0)]},
        {"fair_share": Contended(0.0, 1.1, ())},
        {"route": Contended(1.1, 0.0, ())},
        {"small_delay_quanta": 2.1},
        {"clocks": TwoClocks(RUN, (replace(RUN, makespan_ns=1_060_000),))},
        {"media_operations_per_s": {"random reads": 3e7, "random writes": 1.9e7}},
        {"commands_per_s": 99_000.0},
        {"phantom": PhantomFigures(0.021, 1.5, 609, "00" * 32)},
    ],
)
def test_a_target_that_is_missed_ends_a_strict_run_with_1(change: dict[str, Any]) -> None:
    missed = replace(GOOD, **change)
    assert [target.met for target in missed.targets()].count(False) == 1
    assert (code_of(missed, strict=True), code_of(missed, strict=False)) == (1, 0)


def test_nothing_valid_ends_with_3() -> None:
    assert code_of(NOTHING_VALID, strict=False) == code_of(NOTHING_VALID, strict=True) == 3
    found = NOTHING_VALID.to_json()
    assert found["wall_vs_virtual_pct"] is found["fair_share_error_pct"] is None


def test_a_target_without_a_valid_run_ends_a_strict_run_with_3() -> None:
    unknown = replace(GOOD, clocks=NOTHING_VALID.clocks)
    assert (code_of(unknown, strict=True), code_of(unknown, strict=False)) == (3, 0)


def test_other_bits_on_the_wall_clock_are_a_failure() -> None:
    wrong = replace(GOOD, clocks=TwoClocks(RUN, (replace(RUN, digest="other"),)))
    assert code_of(wrong, strict=False) == 1


@pytest.mark.parametrize(("report", "code"), [(GOOD, 0), (NOTHING_VALID, 3)])
def test_the_command_prints_json_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: EmulationReport, code: int
) -> None:
    monkeypatch.setattr(bench_emulation_report, "measure", lambda _quick, _advance: report)
    assert cli.main(["bench", "emulation", "--json"]) == code
    assert set(json.loads(capsys.readouterr().out)) >= CONTRACT


def test_the_command_shows_what_was_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(GOOD, commands_per_s=1_000.0)
    monkeypatch.setattr(bench_emulation_report, "measure", lambda _quick, _advance: slow)
    assert cli.main(["bench", "emulation", "--strict"]) == 1
    shown = capsys.readouterr().out
    assert "MISSED" in shown
    assert "late by a lot" in shown
