"""`tierloop accuracy`: what policies lose against dense attention, by task, context length and budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.runtime.manifest import manifest
from tierloop.tools import options
from tierloop.tools.comparing import escaped
from tierloop.tools.console import progress, results, say
from tierloop.tools.exits import end

if TYPE_CHECKING:  # torch takes seconds to import, and `tierloop --help` needs none of it
    from tierloop.runtime.accuracy import Accuracy, Row
    from tierloop.runtime.subjects import Subject

PLATFORM = "hybridgen-a100-cxl"
"""A virtual platform with a GPU, two sockets and CXL memory, which all of the contexts fit."""


Tasks = Annotated[
    list[str] | None, typer.Option("--task", help="A task; repeatable. Default: every task that the model has.")
]
Cases = Annotated[int, typer.Option("--prompts", help="Cases of each task and context length.")]
SubjectName = Annotated[
    str, typer.Option("--model", help="recall (made by hand, up to 131072 tokens), or what `compare` takes.")
]


def accuracy(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A policy's name; repeatable. Default: every policy there is.")
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            "--budget", help="Share of the rows, above 0 and at most 1; repeatable. Default: 0.05, 0.1, 0.25."
        ),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", help="Tokens, answer included; repeatable. Default: 1024.")
    ] = None,
    task: Tasks = None,
    prompts: Cases = 8,
    seed: options.Seed = 0,
    model: SubjectName = "smollm2-135m",
    platform: options.PlatformName = PLATFORM,
    option: options.PolicyOptions = None,
    kv_dtype: options.KvDtype = "float32",
    cache: options.Cache = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what policies lose against dense attention: answers, perplexity, recall and output error.

    A task counts where dense attention itself scores at least 0.8.
    Exit codes: 0 good, 1 a check failed, 2 the input was wrong.
    """
    from tierloop.devices.registry import discover, open_platform
    from tierloop.runtime.accuracy import Asked, measure

    chosen = tuple(dict.fromkeys(policy)) if policy else tuple(found.name for found in discover("policies"))
    asked = Asked(
        chosen,
        tuple(dict.fromkeys(budget or (0.05, 0.1, 0.25))),
        tuple(dict.fromkeys(context or (1024,))),
        tuple(dict.fromkeys(task or ())),
        prompts,
        seed,
        kv_dtype,
        options.policy_options(option, list(chosen)),
    )
    asked.check()
    with results(as_json) as shown:
        opened = open_platform(platform)  # a wrong platform is known before the model is loaded
        opened.close()
        subject = subject_of(model, cache)

        def fresh() -> Platform:
            return open_platform(platform)

        with progress() as report:
            measured = measure(subject, asked, fresh, report)
        if all(row.refused is not None for row in measured.rows):
            why = "; ".join(dict.fromkeys(f"{row.policy}: {row.refused}" for row in measured.rows))
            raise ConfigurationError(f"no policy fits platform {platform}: {why}")
        config = {**asdict(asked), "model": model, "platform": platform}
        shown.json({**measured.to_json(), "manifest": manifest(config, opened, seed)})
        shown.show(_table(measured), *(escaped(line) for line in _remarks(measured)))
    end(measured.failures)


def subject_of(model: str, cache: options.Cache) -> Subject:
    """What `--model` names, loaded. Raises ModelError."""
    from tierloop.runtime.subjects import RecallSubject, TextSubject

    if model == RecallSubject.name:
        return RecallSubject()
    from tierloop.runtime.models import load_model

    say(f"loading {model}")
    return TextSubject(load_model(model, cache))


def _table(measured: Accuracy) -> Table:
    title = f"{measured.model}, KV in {measured.kv_dtype}, platform {measured.platform}"
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for heading in ("task", "context", "policy"):
        table.add_column(heading)
    for heading in (
        "budget",
        "score (95 %)",
        "dense",
        "attended",
        "mass recall",
        "top-k recall",
        "output error",
        "n",
    ):
        table.add_column(heading, justify="right")
    cell = None
    for row in measured.rows:
        if cell not in (None, (row.task, row.context)):
            table.add_section()
        cell = (row.task, row.context)
        style = "" if row.counts else "dim"
        table.add_row(*(Text(text) for text in _cells(row)), style="yellow" if row.refused is not None else style)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    first = (row.task, f"{row.context:,}", row.policy, "–" if row.budget is None else f"{row.budget:g}")
    if row.refused is not None:
        return (*first, f"refused: {row.refused}")
    low, high = row.ci95
    return (
        *first,
        f"{row.score:.3f} ({low:.2f} to {high:.2f})",
        f"{row.dense_score:.2f}" + ("" if row.counts else " (does not count)"),
        f"{row.attended_share:.3f}",
        f"{row.mass_recall:.3f}",
        f"{row.topk_recall:.3f}",
        f"{row.output_error:.3f}",
        f"{row.cases}",
    )


def _remarks(measured: Accuracy) -> list[str]:
    lines = [
        f"mean of {', '.join(mean['tasks'])} at {mean['context']:,}: {mean['policy']}"
        + ("" if mean["budget"] is None else f" {mean['budget']:g}")
        + f": {mean['score']:.3f}"
        for mean in measured.averages
        if len(mean["tasks"]) > 1
    ]
    left_out = dict.fromkeys(
        f"{row.task} at {row.context:,} does not count: dense attention itself scores {row.dense_score:.2f}"
        for row in measured.rows
        if not row.counts and row.refused is None
    )
    return [*lines, *left_out, *(f"FAILED: {failure}" for failure in measured.failures)]
