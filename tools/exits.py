"""How a command ends: its exit code, and the last lines on stderr, which say why it is not 0."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from tierloop.tools.console import say

GOOD, FAILED, WRONG_INPUT, INVALID = 0, 1, 2, 3
"""Exit codes: a check failed or there is a bug; the input was wrong; the host could not keep the promises of a run."""


def end(failures: Iterable[object], invalid: Iterable[object] = ()) -> None:
    """End with exit code 1 where something failed, else with 3 where a run was invalid. Raises typer.Exit."""
    for word, code, reasons in (("FAILED", FAILED, failures), ("INVALID", INVALID, invalid)):
        lines = [f"{word}: {reason}" for reason in reasons]
        for line in lines:
            say(line)
        if lines:
            raise typer.Exit(code)
