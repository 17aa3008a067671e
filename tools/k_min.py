"""`tierloop k-min`: the smallest K with which a policy is as good as dense attention, found offline."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.platform import Platform
from tierloop.runtime.manifest import manifest
from tierloop.tools import options
from tierloop.tools.accuracy import PLATFORM, Cases, SubjectName, Tasks, subject_of
from tierloop.tools.comparing import escaped
from tierloop.tools.console import progress, results
from tierloop.tools.exits import end


def k_min(
    policy: Annotated[str, typer.Argument(help="A policy with the options k, k_min and scheduler.")] = "hybridgen",
    low: Annotated[int, typer.Option("--low", min=1, help="The smallest K that is tried.")] = 8,
    high: Annotated[int, typer.Option("--high", min=1, help="The largest K that is tried.")] = 512,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How far below dense attention the mean score may be.")
    ] = 0.02,
    context: Annotated[int, typer.Option("--context", help="Tokens, answer included.")] = 1024,
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
    """Search the smallest K whose mean score over the tasks that count is within a tolerance of dense attention.

    Exit codes: 0 good, 1 not even the largest K is within the tolerance, 2 the input was wrong.
    """
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.accuracy import Asked
    from tierloop.runtime.least_k import search_k_min

    of_policy = options.policy_options(option, [policy])
    tasks = tuple(dict.fromkeys(task or ()))
    asked = Asked((policy,), (0.5,), (context,), tasks, prompts, seed, kv_dtype, of_policy)
    asked.check()
    with results(as_json) as shown:
        opened = open_platform(platform)  # a wrong platform is known before the model is loaded
        opened.close()

        def fresh() -> Platform:
            return open_platform(platform)

        with progress() as report:
            found = search_k_min(subject_of(model, cache), asked, fresh, low, high, tolerance, report)
        config = {**asdict(asked), "model": model, "platform": platform, "low": low, "high": high}
        shown.json({"policy": policy, "model": model, **asdict(found), "manifest": manifest(config, opened, seed)})
        table = Table(title=Text(f"{policy}, {model}, {context:,} tokens"), title_justify="left", header_style="bold")
        for heading in ("K", "score", "mass recall"):
            table.add_column(heading, justify="right")
        for tried in found.tried:
            table.add_row(f"{tried.k:,}", f"{tried.score:.3f}", f"{tried.mass_recall:.3f}")
        least = "none" if found.k_min is None else f"{found.k_min:,}"
        shown.show(table, escaped(f"K_min {least}: within {tolerance:g} of dense attention, {found.dense_score:.3f}"))
    if found.k_min is None:
        end([found.reason])
