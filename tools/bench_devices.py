"""`tierloop bench devices`: real drivers of this machine against what others reach with the same bytes, in one run.

The nvme driver on a file against fio, its Python cost per transfer, and copies of the cpu driver against memcpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import Results, results, say
from tierloop.tools.exits import FAILED, INVALID

if TYPE_CHECKING:
    from tierloop.tools.bench_devices_measure import DeviceFigure

MIB = 1 << 20


def devices(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where the drive's file is made: on the disk that is measured.")
    ] = None,
    file_mib: Annotated[int, typer.Option("--file-mib", min=16, max=1 << 20, help="Size of that file.")] = 512,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Of each pair, one after the other.")] = 5,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 if a target is missed, 3 if one could not be measured.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Real drivers against fio and memcpy on this machine. Takes a minute; close other programs first.

    Exit codes: 0 good, 1 a target was missed (with --strict), 2 the input was wrong, 3 one was not measured (likewise).
    """
    from tierloop.tools.bench_devices_measure import copy_figures, drive_figures

    where = folder or Path.cwd()
    if not where.is_dir():
        raise ConfigurationError(f"--folder {where}: no folder")
    with results(as_json) as shown:
        say("cpu driver and memcpy")
        figures = copy_figures(rounds)
        say("nvme driver and fio")
        figures += drive_figures(where, file_mib * MIB, rounds)
        shown.json({"figures": [figure.to_json() for figure in figures]})
        _show(shown, figures)
    raise_for(figures, strict)


def raise_for(figures: list[DeviceFigure], strict: bool) -> None:
    """End with the exit code that the figures stand for. Raises typer.Exit where that is not 0."""
    verdicts = [figure.met for figure in figures]
    if strict and False in verdicts:
        raise typer.Exit(FAILED)
    if strict and None in verdicts:
        raise typer.Exit(INVALID)


def _show(shown: Results, figures: list[DeviceFigure]) -> None:
    table = Table(header_style="bold")
    for heading in ("what", "ours", "peer", "ratio", "target", ""):
        table.add_column(heading)
    for figure in figures:
        marks = {True: "", False: "MISSED", None: "not measured"}
        cells = (
            figure.name,
            "" if figure.value is None else f"{figure.value:,.3g} {figure.unit}",
            "" if figure.peer_value is None else f"{figure.peer}: {figure.peer_value:,.3g} {figure.unit}",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            figure.target,
            " ".join(part for part in (marks[figure.met], figure.note) if part),
        )
        table.add_row(*map(Text, cells))
    shown.show(table)
