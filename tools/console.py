"""What a command says: results on stdout, everything else on stderr, and nothing but JSON on stdout under `--json`.

`results` is the one way to print a result. Under `--json` whatever else writes to stdout meanwhile (a library's
banner) is sent to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierloop.tools.output import OutputError, to_json

WIDTH = 160
"""Columns of output that no terminal limits (a pipe, a file)."""


def stdout() -> Console:
    """A console on the present stdout."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def stderr() -> Console:
    """A console on the present stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH, highlight=False)


def say(text: str) -> None:
    """One line for people, on stderr."""
    stderr().print(escape(text), soft_wrap=True)


class Results:
    """Collects what a command has to show, until the work is over."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._shown: list[RenderableType] = []
        self._json: Any = None

    def show(self, *parts: RenderableType) -> None:
        """For people; ignored under `--json`."""
        self._shown.extend(parts)

    def json(self, value: Any) -> None:
        """For programs; ignored without `--json`."""
        self._json = value


@contextmanager
def results(as_json: bool) -> Iterator[Results]:
    """Print what was collected when the body ends well; nothing if it raises."""
    collected = Results(as_json)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield collected
    try:
        if as_json:
            sys.stdout.write(to_json(collected._json))
        else:
            console = stdout()
            for part in collected._shown:
                console.print(part)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"standard output: cannot be written: {error.strerror or error}") from error


class ProgressLines:
    """Progress where stderr is no terminal: a line when a stage begins, every 10 s within it, and when it is over."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._stage = ""
        self._said = 0.0
        self._over = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or now - self._said >= self.EVERY_S or (done == total and not self._over):
            self._stage, self._said, self._over = stage, now, done == total
            print(f"{now - self._begun:5.0f} s  {stage}: {done}/{total}", file=sys.stderr, flush=True)


class ProgressBar:
    """Progress on a terminal: one bar per stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._stage = ""
        self._task: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            if self._task is not None:
                finished = self._bars.tasks[-1].total
                self._bars.update(self._task, completed=finished)
            self._stage, self._task = stage, self._bars.add_task(escape(stage), total=total)
        self._bars.update(self._task, completed=done, total=total)


@contextmanager
def progress() -> Iterator[ProgressLines | ProgressBar]:
    """`progress(stage, done, total)` on stderr."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=False) as bars:
        yield ProgressBar(bars)
