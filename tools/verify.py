"""`tierloop verify`: emulate a profile, measure it again, and print expected, got and error for every point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import Results, progress, results, say
from tierloop.tools.exits import end
from tierloop.tools.output import prepare_file, write_files
from tierloop.tools.scratch import Scratch

if TYPE_CHECKING:
    from tierloop.tools.verifying import Compared, Verification


def verify(
    profile: Annotated[str, typer.Argument(help="A profile's name, or the path of a .toml file.")],
    device: Annotated[
        str | None,
        typer.Option("--device", help="Measure the real device again as well: cpu, nvme:FOLDER/, PLATFORM:DEVICE."),
    ] = None,
    scratch: Scratch = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer passes.")] = False,
    clock: options.ClockKind = None,
    dilation: options.Dilation = None,
    bound: Annotated[
        float | None, typer.Option("--bound", min=0.0, help="Mean error in % that is still good; the worst may be 5/3.")
    ] = None,
    report: options.ReportFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Emulate a profile, measure at the consumer's interface, and compare with what was measured on the real device.

    On the wall clock by default, dilated as this host needs; a device that is slower than the host is not dilated.

    Exit codes: 0 good, 1 an error above its bound, 2 the input was wrong, 3 fewer than 80 % of the points count.
    """
    from tierloop.emulators.profile import find_profile
    from tierloop.tools.measuring_subjects import input_files, refuse_inputs
    from tierloop.tools.verifying import COVERAGE, Bounds
    from tierloop.tools.verifying import verify as run

    kind = options.clock_kind(clock) or "wall"
    if kind == "virtual" and dilation not in (None, 1):
        raise ConfigurationError(f"--dilation {dilation}: the virtual clock needs none; use --clock wall, or 1")
    path = find_profile(profile)
    if report is not None:
        refuse_inputs("--report", [report], [path, *input_files(device)])
    place = prepare_file(report) if report is not None else None
    bounds = None if bound is None else Bounds(bound / 100, bound / 60, bound / 60)
    with results(as_json) as shown:
        with progress() as advance:
            found = run(path, kind, dilation, device, scratch, quick, bounds, advance=advance)
        if place is not None:
            from tierloop.tools.verifying_report import html

            write_files({place: html(found)})
            say(f"wrote {report}")
        shown.json(found.to_json())
        _show(shown, found)
    if found.coverage < COVERAGE:
        end((), [f"{found.coverage:.0%} of the points count; at least {COVERAGE:.0%} have to"])
    end(found.failures)


def _show(shown: Results, found: Verification) -> None:
    from tierloop.tools.verifying import COVERAGE

    sigma = f", σ = {found.dilation}" if found.clock == "wall" else ""
    table = Table(
        title=Text(f"{found.profile} ({found.clock} clock{sigma})"), title_justify="left", header_style="bold"
    )
    for number, heading in enumerate(("point", "expected", "± CI", "model", "got", "error", "")):
        table.add_column(heading, justify="left" if number in (0, 6) else "right")
    for one in found.points:
        table.add_row(*map(Text, cells(one)), style="yellow" if one.reason else "")
    shown.show(table)
    good = "" if found.coverage >= COVERAGE else " (too few: INVALID)"
    shown.show(
        Text(
            f"mean error {found.mean_error:.2%} (bound {found.bounds.mean:.0%}), worst {found.max_error:.2%}, "
            f"coverage {found.coverage:.0%}{good}{sigma}"
        )
    )
    for note in found.notes:
        shown.show(Text(note))


def cells(one: Compared) -> tuple[str, ...]:
    """A point as the table and the report show it."""
    unit = one.expected.point.unit
    return (
        str(one.expected.point),
        quantity(one.expected.value, unit),
        f"{one.expected.spread:.1%}",
        quantity(one.model, unit),
        quantity(one.got, unit),
        f"{one.error:+.2%}" if one.got else "–",
        one.reason,
    )


def quantity(value: float, unit: str) -> str:
    """A value with its unit."""
    if not value:
        return "–"
    if unit == "latency_ns":
        return f"{value / 1000:,.1f} µs" if value >= 10_000 else f"{value:,.1f} ns"
    return f"{value / 1e9:,.3f} GB/s"
