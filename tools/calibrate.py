"""`tierloop calibrate`: measure a device, real or emulated, and write the profile that lets everyone emulate it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import Results, progress, results, say
from tierloop.tools.exits import INVALID, end
from tierloop.tools.output import prepare_file, write_files
from tierloop.tools.scratch import Scratch

if TYPE_CHECKING:
    from tierloop.tools.calibration import Calibration


def calibrate(
    device: Annotated[
        str, typer.Argument(help="cpu, nvme:FILE, nvme:FOLDER/ (a temporary file there), or PLATFORM:DEVICE.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write (.toml).")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points and passes: about a minute.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted calibration stopped.")] = False,
    scratch: Scratch = False,
    passes: Annotated[int | None, typer.Option("--passes", min=1, max=1000, help="Passes over all points.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For the order of points and the random places.")] = 0,
    clock: options.ClockKind = None,
    dilation: options.Dilation = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a device through the device contract, fit its profile, and say how sure the constants are.

    Takes about two minutes; close other programs first. `tierloop verify` says how well the profile stands for it.

    Exit codes: 0 good, 1 the device failed or the model is off by more than 10 % in the mean, 2 the input was wrong,
    3 too few points could be measured.
    """
    from tierloop.tools.calibration import run_calibration
    from tierloop.tools.measuring_subjects import input_files, refuse_inputs

    if output.suffix != ".toml":
        raise ConfigurationError(f"--output {output}: a profile's name ends in .toml")
    refuse_inputs("--output", [output, output.with_name(f"{output.name}.journal")], input_files(device))
    place = prepare_file(output)
    journal = place.with_name(f"{place.name}.journal")
    refuse_inputs("--output", [journal], input_files(device))
    with results(as_json) as shown, progress() as advance:
        found = run_calibration(
            device,
            journal=journal,
            quick=quick,
            resume=resume,
            scratch=scratch,
            passes=passes,
            seed=seed,
            clock=options.clock_kind(clock),
            dilation=dilation,
            machine=machine(),
            date=time.strftime("%Y-%m-%d"),
            advance=advance,
        )
        write_files({place: found.text})
        found.journal.remove()
        say(f"wrote {output}")
        shown.json(found.to_json(str(output)))
        _show(shown, found)
    if not found.enough:
        raise typer.Exit(INVALID)
    if not found.described:
        end([f"the model is off by {found.fit.mean_error:.0%} in the mean: no such profile describes {device}"])


def machine() -> str:
    """The name of this machine's processor, and how many of its cores the process may use."""
    from tierloop.runtime.manifest import cpu_model
    from tierloop.tools.measuring import usable_cores

    return f"{cpu_model()}, {usable_cores()} cores"


def _show(shown: Results, found: Calibration) -> None:
    table = Table(title=f"constants of {found.device}", title_justify="left", header_style="bold")
    for heading in ("constant", "value", "95 % confidence interval"):
        table.add_column(heading, justify="left" if heading == "constant" else "right")
    for name, value, interval in found.rows():
        table.add_row(Text(name), Text(value), Text(interval))
    shown.show(table)
    for line in found.remarks():
        shown.show(Text(line))
