"""`tierloop conformance`: the suite that every device has to pass, on a driver, a model, or a platform's devices."""

from __future__ import annotations

import importlib.util
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import results, say
from tierloop.tools.exits import FAILED
from tierloop.tools.scratch import Scratch
from tierloop.tools.table import amount

if TYPE_CHECKING:
    from tierloop.devices.conformance import Comparison, Report, Result


def conformance(
    subject: Annotated[
        str,
        typer.Argument(
            help="A driver (cpu, nvme, …), cpu:NODE, gpu:NUMBER, nvme:file=PATH, KIND:model (a real driver on a "
            "model of hardware), emu:PROFILE, or a platform: its name or the path of a .toml file.",
            metavar="DEVICE",
        ),
    ],
    device: Annotated[
        list[str] | None, typer.Option("--device", help="Of a platform, only this device. Repeatable.")
    ] = None,
    level: Annotated[
        list[str] | None, typer.Option("--level", help="Only this level: a name, or L0 to L6. Repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="An option of the driver: path=disk.img.", metavar="KEY=VALUE")
    ] = None,
    clock: options.ClockKind = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For the data that the checks make up.")] = 0,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Sequences that the stateful machine tries.")] = 50,
    scratch: Scratch = False,
    as_json: options.AsJson = False,
) -> None:
    """Run the conformance suite. The nvme and cxl drivers overwrite the medium that they are given.

    Exit codes: 0 every device passed, 1 a check failed, 2 the input was wrong.
    """
    from tierloop.devices.conformance import LEVELS, named, run
    from tierloop.devices.kernels import warm_up
    from tierloop.tools.conformance_subjects import targets

    try:
        levels = named(level or LEVELS)
    except ValueError as error:
        raise ConfigurationError(f"--level: {error}") from error
    given = options.assignments(option, "--option")
    with (
        results(as_json) as shown,
        _nothing_left_behind(),
        targets(subject, device or [], given, options.clock_kind(clock), scratch) as found,
    ):
        reports = []
        say("kernels (compiled at first use)")
        warm_up()
        for name, opener, virtual in found:
            say(f"{name or subject}: {', '.join(levels)}")
            report = run(
                opener, levels, virtual=virtual, device=name, seed=seed, examples=examples, progress=_say_failure
            )
            reports.append(replace(report, device=subject) if ":" in subject else report)
        data = [report.to_dict() for report in reports]
        shown.json(data[0] if len(data) == 1 else {"devices": data})
        shown.show(_summary(reports, levels))
        if compared := [(report, seen) for report in reports for seen in report.comparisons]:
            shown.show(_comparisons(compared))
        for report in reports:
            shown.show(*(Text(f"{report.device}: {line}") for line in _remarks(report)))
    if not all(report.passed for report in reports):
        raise typer.Exit(FAILED)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Hypothesis keeps a folder of notes where it is run; those of this command end with it."""
    if importlib.util.find_spec("hypothesis") is None:
        yield
        return
    from hypothesis.configuration import set_hypothesis_home_dir

    with tempfile.TemporaryDirectory(prefix="tierloop-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def _summary(reports: list[Report], levels: list[str]) -> Table:
    table = Table(header_style="bold")
    for heading in ("device", "kind", "provenance", *levels, "verdict"):
        table.add_column(heading)
    for report in reports:
        cells = [_counts([r for r in report.results if r.level == level]) for level in levels]
        verdict = "passed" if report.passed else "FAILED"
        table.add_row(*map(Text, (report.device, report.kind, report.provenance, *cells, verdict)))
    return table


def _comparisons(compared: list[tuple[Report, Comparison]]) -> Table:
    table = Table(title="declared and measured", title_justify="left", header_style="bold")
    for heading in ("executor", "memory", "what", "declared", "measured"):
        table.add_column(heading)
    for _, seen in compared:
        shown = [
            _quantity(seen.quantity, value) if value else "not declared" for value in (seen.declared, seen.measured)
        ]
        table.add_row(*map(Text, (seen.executor, seen.memory, seen.quantity.replace("_", " "), *shown)))
    return table


def _quantity(name: str, value: int) -> str:
    return f"{amount(value)}/s" if name.endswith("per_s") else f"{value:,} ns"


def _counts(results: list[Result]) -> str:
    passed = sum(result.outcome == "passed" for result in results)
    skipped = sum(result.outcome == "skipped" for result in results)
    return f"{passed} of {len(results) - skipped}" + (f", {skipped} skipped" if skipped else "")


def _remarks(report: Report) -> list[str]:
    """Every failure, and every reason for skipping with how many checks it kept from running."""
    skipped = Counter((r.level, r.reason) for r in report.results if r.outcome == "skipped")
    lines = [_failure(result) for result in report.failed]
    return lines + [f"skipped {count} of {level}: {reason}" for (level, reason), count in skipped.items()]


def _failure(result: Result) -> str:
    return f"FAILED: {result.level}: {result.check.replace('_', ' ')}: {result.reason}"


def _say_failure(result: Result) -> None:
    if result.outcome == "failed":
        say(_failure(result))
