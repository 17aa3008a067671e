"""`tierloop ablate`: a system with each of its mechanisms on and off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.tools import options
from tierloop.tools.comparing import Asked, escaped
from tierloop.tools.console import progress, results, say
from tierloop.tools.exits import end

if TYPE_CHECKING:  # torch takes seconds to import, and `tierloop --help` needs none of it
    from tierloop.devices.platform import Platform
    from tierloop.runtime.ablation import Ablation, Combination, Interval
    from tierloop.runtime.compare import PolicyRequest


def ablate(
    system: Annotated[str, typer.Argument(help="A policy with mechanisms: hybridgen, kvdrive.", metavar="SYSTEM")],
    platform: options.PlatformName = "demo",
    model: options.ModelSource = "smollm2-135m",
    context: Annotated[int, typer.Option("--context", min=1, help="Length of the needle prompts, in tokens.")] = 2048,
    tokens: options.NewTokens = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Prompts: one needle each, with seeds in turn.")] = 3,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the system: budget=0.1. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option("--mechanism", help="One to switch; the others stay on. Repeatable. [all of the system]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first prompt; the others have the next ones.")] = 0,
    overrides: options.Overrides = None,
    kv_dtype: options.KvDtype = "float32",
    cache: options.Cache = None,
    self_test: options.SelfTest = True,
    as_json: options.AsJson = False,
) -> None:
    """Run a system in all 2ⁿ combinations of its mechanisms, and say what each of them does.

    Exit codes: 0 good, 1 a check failed, 2 the input was wrong, 3 the run was invalid.
    """
    given = options.assignments(option, "--option")
    asked = Asked(
        model=model,
        platform=platform,
        overrides=options.assignments(overrides, "--set"),
        prompt_tokens=context,
        seed=seed,
        tokens=tokens,
        kv_dtype=kv_dtype,
        cache=cache,
        self_test=self_test,
    )
    with results(as_json) as shown:
        found = _ablate(system, asked, repeats, given, mechanism or ())
        shown.json(found.to_json())
        shown.show(table(found), effects_table(found), *(escaped(line) for line in remarks(found)))
    end(found.failures, found.invalid)


def _ablate(system: str, asked: Asked, repeats: int, given: dict[str, object], mechanisms: Sequence[str]) -> Ablation:
    from tierloop.runtime.ablation import ablate, chosen_mechanisms, find_system
    from tierloop.runtime.manifest import manifest
    from tierloop.runtime.models import load_model
    from tierloop.runtime.policy import check_options
    from tierloop.runtime.workloads import needle_prompt

    kind = find_system(system)
    check_options(kind, given)
    switched = chosen_mechanisms(kind, mechanisms)
    asked.check()
    asked.try_out()  # a wrong platform is known before the model is loaded
    say(f"loading {asked.model}")
    model = load_model(asked.model, asked.cache)
    workloads = [
        needle_prompt(model, asked.prompt_tokens, depth=asked.depth, seed=asked.seed + i, new_tokens=asked.tokens)
        for i in range(repeats)
    ]
    opened: list[Platform] = []

    def fresh(_: PolicyRequest) -> Platform:
        opened.append(asked.open())
        return opened[-1]

    with progress() as told:
        found = ablate(
            system, model, workloads, fresh, num_tokens=asked.tokens, options=given, kv_dtype=asked.kv_dtype,
            progress=told, mechanisms=switched,
        )  # fmt: skip
    config = {
        "system": system, "model": asked.model, "platform": asked.platform, "overrides": asked.overrides,
        "context": asked.prompt_tokens, "depth": asked.depth, "tokens": asked.tokens, "repeats": repeats,
        "options": given, "mechanisms": switched, "kv_dtype": asked.kv_dtype,
    }  # fmt: skip
    return replace(found, manifest=manifest(config, opened[-1] if opened else None, asked.seed))


def table(found: Ablation) -> Table:
    """One row for each combination: what is on, speed, answers, and how much of the attention's mass was found."""
    told = ", ".join(str(n) for n in sorted(set(found.prompt_tokens)))
    shown = Table(
        title=Text(
            f"{found.system} on {found.platform} ({found.clock} clock, {found.provenance}): {found.model}, "
            f"{len(found.prompt_tokens)} prompts of {told} tokens, {found.num_tokens} decoded"
        ),
        title_justify="left",
        header_style="bold",
    )
    for mechanism in found.mechanisms:
        shown.add_column(Text(mechanism), justify="center")
    for heading in ("tokens/s (95 %)", "answered", "mass recall", "top-k recall", "= dense"):
        shown.add_column(heading, justify="right")
    for row in found.rows:
        marks = [Text("on" if m in row.enabled else "–") for m in found.mechanisms]
        if row.refused is not None:
            shown.add_row(*marks, Text(f"refused: {row.refused}"), style="yellow")
        else:
            shown.add_row(*marks, *(Text(cell) for cell in _cells(row, len(found.prompt_tokens))))
    return shown


def _cells(row: Combination, repeats: int) -> list[str]:
    return [
        _with_interval(row.tokens_per_s, row.ci95),
        "–" if row.accuracy is None else f"{row.accuracy:.0%}",
        f"{row.mass_recall:.4f}",
        f"{row.topk_recall:.4f}",
        f"{row.equal_to_dense} of {repeats}",
    ]


def effects_table(found: Ablation) -> Table:
    """What each mechanism does, and what two of them do to each other."""
    shown = Table(title="effects: with over without; × of a pair: over what they do alone", title_justify="left")
    for heading in ("mechanism", "tokens/s ×", "mass recall +"):
        shown.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for effect in found.effects:
        shown.add_row(
            Text(" × ".join(effect.mechanisms)),
            Text(_with_interval(effect.speed, effect.speed_ci95)),
            Text(_with_interval(effect.mass_recall, effect.mass_recall_ci95, sign="+")),
        )
    return shown


def remarks(found: Ablation) -> list[str]:
    """What a reader must know beside the tables."""
    lines = []
    if found.dense_accuracy is not None:
        lines.append(f"dense attention answers {found.dense_accuracy:.0%} of the prompts")
    if not found.effects:
        lines.append("no effects: a combination was refused, or decoded nothing")
    elif len(found.prompt_tokens) == 1:
        lines.append("one prompt: nothing is known of how far others would lie; --repeats gives intervals")
    if found.guesses:
        lines.append(f"times rest on constants that are assumed or unknown: {len(found.guesses)}; the JSON names them")
    return lines


def _with_interval(value: float | None, interval: Interval | None, sign: str = "") -> str:
    assert value is not None, "a combination that ran has numbers"
    text = f"{value:{sign}.4g}"
    return text if interval is None else f"{text} ({interval[0]:{sign}.4g} … {interval[1]:{sign}.4g})"
