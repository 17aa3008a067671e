"""`tierloop conformance`: the suite that every device has to pass, on a driver or on the devices of a platform."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.tools import options
from tierloop.tools.comparing import FAILED
from tierloop.tools.console import results, say

if TYPE_CHECKING:
    from tierloop.devices.conformance import Opener, Report, Result
    from tierloop.devices.device import Device


def conformance(
    subject: Annotated[
        str, typer.Argument(help="A driver (cpu, nvme, …) or a platform: its name or the path of a .toml file.")
    ],
    device: Annotated[
        list[str] | None, typer.Option("--device", help="Of a platform, only this device. Repeatable.")
    ] = None,
    level: Annotated[list[str] | None, typer.Option("--level", help="Only this level. Repeatable.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="An option of the driver: path=disk.img.", metavar="KEY=VALUE")
    ] = None,
    clock: options.ClockKind = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For the data that the checks make up.")] = 0,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Sequences that the stateful machine tries.")] = 50,
    as_json: options.AsJson = False,
) -> None:
    """Run the conformance suite. The nvme driver overwrites the medium that it is given.

    Exit codes: 0 every device passed, 1 a check failed, 2 the input was wrong.
    """
    from tierloop.devices.conformance import LEVELS, run
    from tierloop.devices.kernels import warm_up

    levels = level or list(LEVELS)
    for one in levels:
        if one not in LEVELS:
            raise ConfigurationError(f"--level {one!r}: {nearest(one, list(LEVELS))}")
    with results(as_json) as shown:
        reports = []
        say("kernels (compiled at first use)")
        warm_up()
        for name, opener, virtual in subjects(subject, device or [], options.assignments(option, "--option"), clock):
            say(f"{name or subject}: {', '.join(levels)}")
            reports.append(
                run(opener, levels, virtual=virtual, device=name, seed=seed, examples=examples, progress=_say_failure)
            )
        shown.json({"devices": [report.to_dict() for report in reports]})
        shown.show(_summary(reports, levels))
        for report in reports:
            shown.show(*(Text(f"{report.device}: {line}") for line in _remarks(report)))
    if not all(report.passed for report in reports):
        raise typer.Exit(FAILED)


def subjects(
    subject: str, chosen: list[str], given: dict[str, Any], clock: str | None
) -> list[tuple[str | None, Opener, bool]]:
    """(device name or None, opener, virtual clock) of everything that is to be tested. Raises ConfigurationError."""
    from tierloop.devices.registry import entry, find_platform, list_devices, list_platforms, open_platform

    kind = options.clock_kind(clock)
    drivers = [driver.name for driver in list_devices()]
    if subject in drivers:
        if chosen:
            raise ConfigurationError(f"--device: {subject} is a driver; only a platform has several devices")
        factory = entry("devices", subject)
        emulated = bool(getattr(factory, "emulated", False))

        def open_device(site: Site) -> Device:
            opened: Device = factory(f"emu:{subject}" if emulated else subject, site, dict(given))
            return opened

        return [(None, open_device, emulated if kind is None else kind == "virtual")]
    if given:
        raise ConfigurationError("--option: a platform's file has the options of its devices")
    platforms = [platform.name for platform in list_platforms()]
    if subject not in platforms and not subject.endswith(".toml"):
        raise ConfigurationError(f"{subject!r} is no driver and no platform; {nearest(subject, drivers + platforms)}")
    path = find_platform(subject)

    def open_machine(_: Site) -> Platform:
        return open_platform(path, clock=kind)

    with open_platform(path, clock=clock) as platform:  # type: ignore[arg-type]  # checked above
        names = {name.removeprefix("emu:"): name for name in platform.devices}
        wanted = [name.removeprefix("emu:") for name in chosen] or list(names)
        for name in wanted:
            if name not in names:
                raise ConfigurationError(f"--device {name!r}: {nearest(name, list(names))}")
        return [(names[name], open_machine, platform.clock.virtual) for name in wanted]


def _summary(reports: list[Report], levels: list[str]) -> Table:
    table = Table(header_style="bold")
    for heading in ("device", "kind", "provenance", *levels, "verdict"):
        table.add_column(heading)
    for report in reports:
        cells = [_counts([r for r in report.results if r.level == level]) for level in levels]
        verdict = "passed" if report.passed else "FAILED"
        table.add_row(*map(Text, (report.device, report.kind, report.provenance, *cells, verdict)))
    return table


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
