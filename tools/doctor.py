"""`tierloop doctor`: what is here, real or emulated, why something is not usable, and what this machine can promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.system import HOST
from tierloop.tools import options
from tierloop.tools.console import Results, results, say
from tierloop.tools.exits import end
from tierloop.tools.output import OutputError, prepare_file, write_files
from tierloop.tools.table import amount

if TYPE_CHECKING:
    from tierloop.devices.self_test import Tested
    from tierloop.tools.found import Found

WALL_PLATFORM = "demo-wall"


def doctor(
    path: Annotated[
        list[Path] | None, typer.Option("--path", help="A file or block device to probe as a drive. Repeatable.")
    ] = None,
    write_platform: Annotated[
        Path | None,
        typer.Option("--write-platform", help="Write what was found as a platform file; it must not exist."),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            "--platform", help="Open this platform and write and read one block through each tier, where nothing lies."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the measurements out.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Say what is here, real or emulated, why something is not usable, and what this machine's clock can promise.

    Writes to no device, but for --platform. Exit codes: 0 good, 1 a tier failed its test, 2 a path that was given
    cannot be used.
    """
    from tierloop.devices.registry import list_platforms
    from tierloop.tools.inventory import inventory
    from tierloop.tools.machine_platform import platform_text
    from tierloop.tools.timing_floor import measure

    if write_platform is not None:
        if write_platform.exists():
            raise OutputError(f"{write_platform}: exists; name a new file")
        if write_platform.suffix != ".toml":
            raise OutputError(f"{write_platform}: a platform file ends in .toml, or --platform does not take it")
        prepare_file(write_platform)
    with results(as_json) as shown:
        say("looking at devices")
        found = inventory(path or ())
        platforms = list_platforms()
        if not quick:
            say("measuring this machine; close other programs for the best it can do")
        floor = None if quick else measure()
        dilation = None if quick else smallest_dilations()
        tested = [] if platform is None else _tested(platform)
        shown.json(
            {
                "devices": [device.to_json() for device in found],
                "platforms": [
                    {"name": p.name, "clock": p.clock, "usable": not p.reasons, "reasons": list(p.reasons)}
                    for p in platforms
                ],
                "timing_floor": floor.to_json() if floor is not None else {},
                "dilation": dilation or {},
                "self_test": [each.to_json() for each in tested],
            }
        )
        devices = [(d.name, d.kind, d.provenance, _mark(d.usable), _remarks(d)) for d in found]
        shown.show(_table("devices", ("name", "kind", "provenance", "usable", "remarks"), devices))
        machines = [(p.name, p.clock, _mark(not p.reasons), p.description or "; ".join(p.reasons)) for p in platforms]
        shown.show(_table("platforms", ("name", "clock", "usable", "about"), machines))
        if floor is not None and dilation is not None:
            _show_floor(shown, floor.to_json(), dilation)
        if platform is not None:
            shown.show(_table(f"self-test of {platform}", ("memory", "by", "tested", "remarks"), _rows(tested)))
    if write_platform is not None:
        gpus = [device.name for device in found if device.driver == "gpu" and device.usable]
        write_files({write_platform: platform_text(HOST, gpus)})
        say(f"{write_platform}: written; `tierloop run --platform {write_platform}` uses it")
    end(each.error for each in tested if each.error is not None)
    refused = [device for device in found if path and device.name in map(str, path) and not device.usable]
    if refused:
        raise ConfigurationError("; ".join(f"{device.name}: {'; '.join(device.reasons)}" for device in refused))


def _tested(name: str) -> list[Tested]:
    """The self-test of all tiers of a platform. Raises what opening it raises."""
    from tierloop.devices.registry import open_platform
    from tierloop.devices.self_test import self_test

    say(f"testing the tiers of {name}")
    with open_platform(name) as opened:
        return self_test(opened)


def _rows(tested: list[Tested]) -> list[tuple[str, ...]]:
    return [
        (each.memory, each.by, _mark(each.good), str(each.error) if each.error is not None else each.remark)
        for each in tested
    ]


def smallest_dilations() -> dict[str, Any]:
    """The smallest σ at which this host can stand for the devices of `demo-wall`, and the σ that `auto` takes."""
    from tierloop.devices.host_speed import automatic_dilation, host_speed, smallest_dilation
    from tierloop.devices.registry import open_platform

    with open_platform(WALL_PLATFORM, clock="virtual") as platform:
        infos = [d.info for d in platform.devices.values() if d.info.provenance == "emulated"]
        smallest = smallest_dilation(infos, host_speed())
    automatic = automatic_dilation(smallest, host_speed())
    return {"platform": WALL_PLATFORM, "smallest": smallest, "auto": automatic}


def _show_floor(shown: Results, floor: dict[str, int], dilation: dict[str, Any]) -> None:
    smallest = floor["smallest_latency_ns"]
    lateness = " / ".join(f"{floor[f'lateness_{which}_ns'] / 1000:,.1f}" for which in ("p50", "p99", "worst"))
    shown.show(
        _table(
            "timing floor of this machine",
            ("what", "value"),
            [
                ("lateness of the wall clock: median / 99th percentile / worst", f"{lateness} µs"),
                (
                    "smallest latency that holds",
                    f"{smallest / 1000:,.0f} µs" if smallest else "none up to 10 ms: the machine is busy",
                ),
                (
                    "smallest latency that holds inside kernels",
                    f"{floor['smallest_paced_latency_ns']:,} ns"
                    if floor["smallest_paced_latency_ns"]
                    else "none up to 10 µs: the machine is busy",
                ),
                ("copy by one thread", f"{amount(floor['copy_bytes_per_s'])}/s"),
                (
                    "highest rate that holds",
                    f"{amount(floor['highest_rate_bytes_per_s'])}/s"
                    if floor["highest_rate_bytes_per_s"]
                    else "none: the machine is busy",
                ),
                ("events of the clock", f"{floor['events_per_s']:,}/s"),
                (
                    f"smallest honest σ for {dilation['platform']}",
                    f"{dilation['smallest']} (auto takes {dilation['auto']})",
                ),
            ],
        )
    )


def _remarks(device: Found) -> str:
    guesses = len(device.guesses)
    assumed = [f"{guesses} of its constants {'are' if guesses > 1 else 'is'} assumed"] if guesses else []
    return "; ".join([*device.reasons, *assumed])


def _mark(usable: bool) -> str:
    return "yes" if usable else "no"


def _table(title: str, headings: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
