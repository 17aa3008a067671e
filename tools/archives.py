"""`tierloop archives`: what a persistent memory keeps of requests, whether it is intact, and taking it away."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.tools import options
from tierloop.tools.comparing import escaped
from tierloop.tools.console import results, say
from tierloop.tools.exits import FAILED

if TYPE_CHECKING:
    from tierloop.devices.platform import Platform
    from tierloop.runtime.archive_check import Found


def archives(
    platform: options.PlatformName,
    memory: Annotated[
        str, typer.Option("--memory", help="A persistent memory of the platform. [the first one there is]")
    ] = "",
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Take the archives of this name away; repeatable.")
    ] = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """List what a persistent memory keeps of requests, read whole and compared with its checksums.

    What was never committed is given back. Exit codes: 0 good, 1 something is damaged, 2 the input was wrong.
    """
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.archive_check import discard, fsck
    from tierloop.runtime.blocks import KVShape
    from tierloop.runtime.engine import Engine

    with (
        results(as_json) as shown,
        open_platform(platform, overrides=options.assignments(overrides, "--set")) as opened,
    ):
        name = _memory(opened, memory)
        engine = Engine(opened, KVShape(1, 1, 1, 64, 64))
        try:
            found = engine.loop.run(fsck(engine, name))
            wanted = dict.fromkeys(remove or ())
            for each in wanted:
                if each not in {archive.name for archive in found}:
                    raise ConfigurationError(
                        f"{name} has no archive {each!r}; {nearest(each, sorted(a.name for a in found))}"
                    )
            gone = [archive for archive in found if archive.name in wanted]
            for archive in gone:
                engine.loop.run(discard(engine, name, archive.name, archive.fingerprint))
        finally:
            engine.close()
        left = [archive for archive in found if archive not in gone]
        shown.json({"memory": name, "archives": list(map(asdict, left)), "removed": list(map(asdict, gone))})
        shown.show(_table(name, left), *(escaped(f"removed: {archive.name}") for archive in gone))
    damaged = [archive.problem for archive in left if archive.intact is False]
    for problem in damaged:
        say(f"DAMAGED: {problem}")
    if damaged:
        raise typer.Exit(FAILED)


def _memory(platform: Platform, wanted: str) -> str:
    known = [memory.name for _, memory in platform.memories() if memory.persistent]
    if not known:
        raise ConfigurationError(f"platform {platform.name} has no persistent memory")
    if wanted and wanted not in known:
        raise ConfigurationError(f"--memory {wanted!r}: {nearest(wanted, known)}")
    return wanted or known[0]


def _table(memory: str, found: list[Found]) -> Table:
    table = Table(title=Text(memory), title_justify="left", header_style="bold")
    for heading in ("name", "of", "tokens", "rows", "entries", "MB", "state"):
        table.add_column(heading, justify="right" if heading in ("tokens", "rows", "entries", "MB") else "left")
    states = {True: "intact", False: "damaged", None: "in use"}
    for archive in found:
        numbers = (f"{archive.tokens:,}", f"{archive.length:,}", f"{archive.entries:,}", f"{archive.nbytes / 1e6:,.1f}")
        table.add_row(*map(Text, (archive.name, archive.fingerprint, *numbers, states[archive.intact])))
    return table
