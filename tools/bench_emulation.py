"""`tierloop bench emulation`: how true and how fast emulated time is on this machine, each figure against its target.

Figures are medians over valid runs, speeds the best of several. A run that the host could not keep is invalid: it is
tried again, counted, and in no figure (docs/command_line.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.tools import options
from tierloop.tools.console import Results, progress, results, say
from tierloop.tools.exits import FAILED, INVALID

if TYPE_CHECKING:
    from tierloop.tools.bench_emulation_report import EmulationReport


def emulation(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tile sizes and tries: half a minute.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 if a target is missed, 3 if one could not be measured.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """How true and how fast emulated time is on this machine. Takes two minutes; close other programs first.

    Exit codes: 0 good, 1 a target was missed (with --strict) or a result was wrong, 3 nothing was valid (with
    --strict: something that has a target was not).
    """
    from tierloop.tools.bench_emulation_report import measure

    with results(as_json) as shown:
        with progress() as advance:
            report = measure(quick, advance)
        shown.json(report.to_json())
        _show(shown, report)
    raise_for(report, strict)


def raise_for(report: EmulationReport, strict: bool) -> None:
    """End with the exit code that a report stands for. Raises typer.Exit where that is not 0."""
    if not report.same_output:
        say("WRONG: the same decode gave other bits on the wall clock than on the virtual clock")
        raise typer.Exit(FAILED)
    if not report.anything_valid:
        say("nothing was valid: this host did not keep one promise; close other programs")
        raise typer.Exit(INVALID)
    verdicts = [target.met for target in report.targets()]
    if strict and False in verdicts:
        raise typer.Exit(FAILED)
    if strict and None in verdicts:
        raise typer.Exit(INVALID)


def _show(shown: Results, report: EmulationReport) -> None:
    targets = _table("emulated time", "what", "value", "target", "")
    for target in report.targets():
        mark = "not measured: no valid run" if target.met is None else "met" if target.met else "MISSED"
        targets.add_row(target.name, target.shown, target.limit, mark, style="red" if target.met is False else "")
    rates = _table("commanded against achieved rate", "target GB/s", "tile KiB", "host GB/s", "error %", "invalid runs")
    for rate in report.rates:
        rates.add_row(
            f"{rate.target_bytes_per_s / 1e9:g}",
            f"{rate.tile_nbytes >> 10}",
            f"{rate.host_bytes_per_s / 1e9:.1f}",
            "–" if rate.error_pct is None else f"{rate.error_pct:.4f}",
            str(rate.invalid_runs),
        )
    latencies = _table("latency, by how much it is missed", "where", "target ns", "p50 ns", "p99 ns", "invalid runs")
    for where, figures in (("in kernels", report.latencies), ("at the clock", report.clock_latencies)):
        for figure in figures:
            ends = ("–" if x is None else f"{x:,.0f}" for x in (figure.p50_error_ns, figure.p99_error_ns))
            latencies.add_row(where, f"{figure.target_ns:,}", *ends, str(figure.invalid_runs))
    shown.show(targets, rates, latencies, *(Text(note) for note in report.notes()))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or not heading else "right")
    return table
