"""`tierloop reproduce`: what a paper says of a system, against what is found here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as Shown
from rich.text import Text

from tierloop.tools import options
from tierloop.tools.console import progress, results
from tierloop.tools.exits import end

if TYPE_CHECKING:  # what is reproduced takes a second to import, and `tierloop --help` needs none of it
    from tierloop.runtime.reproduction import Check, Table


def reproduce(
    system: Annotated[
        str, typer.Argument(help="Whose paper is reproduced: hybridgen, kvdrive or nelssa.", metavar="SYSTEM")
    ],
    check: Annotated[
        list[str] | None,
        typer.Option("--check", help="A check's id, as H3. Repeatable. Default: all of them.", metavar="ID"),
    ] = None,
    questions: Annotated[
        bool, typer.Option("--questions/--no-questions", help="Answer what reviewers asked, in tables.")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of selections, prompts and noise.")] = 0,
    model: options.ModelSource = "smollm2-135m",
    cache: options.Cache = None,
    as_json: options.AsJson = False,
) -> None:
    """Run the checks of a system, with constants that were frozen before any comparison.

    Exit codes: 0 good, 1 a check failed, 2 the input was wrong. A check that was skipped is no failure.
    """
    from tierloop.runtime.manifest import manifest
    from tierloop.runtime.reproduction import constants_hash
    from tierloop.runtime.study import Study
    from tierloop.tools.reproducing import find_system

    found = find_system(system)
    chosen = found.chosen(check or [])
    constants = {**found.constants, "text_model": model, "seed": seed}
    with results(as_json) as shown, progress() as told:
        study = Study(
            seed, constants["locality"], constants["kv_dtype"], constants["table"], model=model, cache=cache,
            progress=told,
        )  # fmt: skip
        checks: list[Check] = []
        tables: list[Table] = []
        for name in chosen:
            study.doing = name
            checks.append(found.checks[name](study))
        for name, ask in found.questions.items() if questions else ():
            study.doing = name
            tables += ask(study)
        hashed = constants_hash(constants)
        config = {"system": system, "checks": chosen, "questions": questions, "model": model}
        shown.json(
            {
                "system": system,
                "constants_hash": hashed,
                "checks": [each.to_json() for each in checks],
                "constants": constants,
                "questions": [asdict(table) for table in tables],
                "manifest": manifest(config, seed=seed),
            }
        )
        shown.show(_checks(system, hashed, checks), *_reasons(checks))
        for table in tables:
            shown.show(_table(table), *(Text(note) for note in table.notes))
    failures = []
    for each in checks:
        if each.passed is False:
            assert each.shown is not None, "a check that failed has claims"
            failures.append(f"{each.id}: {each.shown.paper}: {_number(each.shown.got)}")
    end(failures)


def _checks(system: str, hashed: str, checks: list[Check]) -> Shown:
    """One row for each claim."""
    title = f"{system}: what the paper says, against what is found here (constants {hashed[:12]})"
    shown = Shown(title=Text(title), title_justify="left", header_style="bold")
    for heading in ("check", "the paper", "found", "interval", "passed", "provenance"):
        shown.add_column(heading)
    for check in checks:
        if check.passed is None:
            shown.add_row(check.id, Text(check.title), "–", "–", "skipped", "", style="yellow")
        for number, claim in enumerate(check.claims):
            cells = (claim.paper, _number(claim.got), _ends(claim.interval), "yes" if claim.passed else "NO")
            first = check.id if not number else ""
            shown.add_row(first, *(Text(c) for c in cells), check.provenance, style="" if claim.passed else "red")
        shown.add_section()
    return shown


def _reasons(checks: list[Check]) -> list[Text]:
    return [Text(f"{check.id}: {check.reason}") for check in checks if check.reason]


def _table(table: Table) -> Shown:
    """A question's rows; the reasons, which are long, are left to the JSON."""
    shown = Shown(title=Text(table.question), title_justify="left", header_style="bold")
    headings = [heading for heading in table.rows[0] if heading != "reason"]
    for heading in headings:
        shown.add_column(Text(heading))
    for row in table.rows:
        shown.add_row(*(Text(_cell(row, heading)) for heading in headings))
    return shown


def _cell(row: Mapping[str, Any], heading: str) -> str:
    value = row[heading]
    if isinstance(value, list):
        return ", ".join(f"{low:,} … {high:,}" for low, high in value) or "nowhere"
    if isinstance(value, float):
        return _number(value)
    return (
        "–" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    )


def _number(value: float) -> str:
    if value != value:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _ends(interval: tuple[float, float]) -> str:
    low, high = interval
    return _number(low) if low == high else f"{_number(low)} … {_number(high)}"
