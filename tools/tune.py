"""`tierloop tune`: index, window, micro-batch and waves of a policy for a model and machine, by short phantom runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import DTYPES, DType
from tierloop.tools import options
from tierloop.tools.console import progress, results

if TYPE_CHECKING:
    from tierloop.runtime.tuning import Measured, Trial, Tuned


TUNED = ("centroids", "window", "micro_batch", "waves")
"""Options that are chosen."""


def tune(
    policy: Annotated[str, typer.Argument(help="A policy with an index, windows and micro-batches: kvdrive.")],
    platform: options.PlatformName = "kvdrive-l20",
    model: Annotated[str, typer.Option("--model", help="A model's name, as of `phantom`.")] = "llama-3-8b-1048k",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the prompt of each request.")] = 122_880,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests that are decoded together.")] = 4,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps of a run that count.")] = 4,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=0, help="Steps before them that do not.")] = 4,
    centroids: Annotated[
        list[int] | None, typer.Option("--centroids", min=1, help="A size to try; repeatable. [2048, 4096, 8192]")
    ] = None,
    window: Annotated[
        list[float] | None,
        typer.Option("--window", min=0, max=1000, help="A window to try, in multiples of K; repeatable. [1 to 8]"),
    ] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option("--micro-batch", min=1, help="One to try; repeatable. [powers of two up to the batch]"),
    ] = None,
    waves: Annotated[
        list[int] | None, typer.Option("--waves", min=1, help="A number of waves to try; repeatable. [1, 2]")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the policy: budget=0.1. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    locality: Annotated[
        str, typer.Option("--locality", help="What selections are drawn from: a name or a .json file.")
    ] = "kvdrive-draw",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Type of stored rows.")] = "bfloat16",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the selections.")] = 0,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """Choose index, window, micro-batch and waves of a policy by short runs without bytes.

    Exit codes: 0 good, 2 the input was wrong, or nothing fits.
    """
    from tierloop.runtime.compare import find_policy
    from tierloop.runtime.manifest import manifest
    from tierloop.runtime.policy import check_options
    from tierloop.runtime.tuning import Candidates
    from tierloop.runtime.tuning import tune as choose

    if kv_dtype not in DTYPES:
        raise ConfigurationError(f"--kv-dtype {kv_dtype!r}: {nearest(kv_dtype, sorted(DTYPES))}")
    given = options.assignments(option, "--option")
    kind = find_policy(policy)
    check_options(kind, given)
    if missing := [name for name in TUNED if name not in inspect.signature(kind.__init__).parameters]:
        raise ConfigurationError(f"policy {policy} cannot be tuned: it has no {', no '.join(missing)}")
    powers = [1 << n for n in range(batch.bit_length())]
    usual = Candidates()
    candidates = Candidates(
        centroids or usual.centroids,
        window or usual.windows,
        micro_batch or powers,
        waves or list(range(1, min(batch, 2) + 1)),
    )
    config: dict[str, Any] = {
        "policy": policy, "platform": platform, "model": model, "context": context, "batch": batch, "steps": steps,
        "warmup_steps": warmup_steps, "given": given, "candidates": asdict(candidates), "locality": locality,
        "kv_dtype": kv_dtype, "overrides": options.assignments(overrides, "--set"),
    }  # fmt: skip
    with results(as_json) as shown, progress() as told:
        notes: list[str] = []
        tuned = choose(_measure(config, seed, notes, told), candidates, given)
        shown.json({**config, **asdict(tuned), "gain": tuned.gain, "notes": notes, "manifest": manifest(config)})
        shown.show(table(tuned, config), *(Text(line) for line in remarks(tuned, notes)))


def _measure(
    config: dict[str, Any], seed: int, notes: list[str], told: Callable[[str, int, int], None]
) -> Callable[[dict[str, Any]], Measured]:
    """Runs the policy with some options, every time on a machine of its own; fills `notes`."""
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.drawn_selection import draw, load_selection_model
    from tierloop.runtime.dtypes import itemsize
    from tierloop.runtime.locality import find_locality
    from tierloop.runtime.model_shapes import ShapeStages, block_tokens_for, cache_shape, find_model
    from tierloop.runtime.phantom import run_phantom
    from tierloop.runtime.tuning import Measured

    known, drawn = find_model(config["model"]), load_selection_model(find_locality(config["locality"]))
    dtype: DType = config["kv_dtype"]
    shape = cache_shape(known, dtype, block_tokens_for(config["context"]))
    weights = itemsize("bfloat16")
    most = 1 + sum(len(values) for values in config["candidates"].values())
    runs = 0

    def measure(chosen: dict[str, Any]) -> Measured:
        nonlocal runs
        told("runs, at most", runs, most)
        runs += 1
        with open_platform(config["platform"], clock="virtual", overrides=config["overrides"]) as opened:
            try:
                result = run_phantom(
                    ShapeStages.of_shape(known, weights), shape, opened, PolicyRequest(config["policy"], chosen),
                    context=config["context"], batch=config["batch"], steps=config["steps"],
                    warmup_steps=config["warmup_steps"], decisions=draw(drawn, known.num_layers, seed),
                    model=known.name, context_limit=known.context_length, weight_nbytes=known.weight_nbytes(weights),
                )  # fmt: skip
            except ConfigurationError as error:
                return Measured(refused=str(error))
        if result.refused is not None:
            return Measured(refused=result.refused)
        notes[:] = result.notes
        steps = len(result.step_ns)
        stages = {stage: ns // steps for stage, ns in result.stages.items()}
        return Measured(result.elapsed_ns / (steps * config["batch"]), stages, result.provenance)

    return measure


def table(tuned: Tuned, config: dict[str, Any]) -> Table:
    """One row for each run, in the order in which they were made."""
    from tierloop.runtime.tuning import evaluating_ns, fetching_ns

    shown = Table(
        title=Text(
            f"{config['policy']} on {config['platform']}: {config['model']}, {config['batch']} × "
            f"{config['context']:,} prompt tokens (virtual clock)"
        ),
        title_justify="left",
        header_style="bold",
    )
    headings = "tried", "centroids", "window", "micro_batch", "waves", "ms per token", "evaluate", "fetch", "provenance"
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in ("tried", "provenance") else "right")
    for trial in tuned.trials:
        measured = trial.measured
        cells = [trial.purpose, *(_option(trial, name) for name in TUNED)]
        if measured.refused is not None:
            shown.add_row(*map(Text, cells), "–", "–", "–", Text(f"refused: {measured.refused}"), style="yellow")
            continue
        times = measured.ns_per_token, evaluating_ns(measured.stages), fetching_ns(measured.stages)
        best = trial.options == tuned.options
        cells += [*(f"{ns / 1e6:,.3f}" for ns in times), measured.provenance]
        shown.add_row(*map(Text, cells), style="bold" if best else None)
    return shown


def remarks(tuned: Tuned, notes: Sequence[str]) -> list[str]:
    """What was chosen and why, and what a reader must know beside the numbers."""
    chosen = " ".join(f"{name}={value}" for name, value in tuned.options.items())
    gain = "" if tuned.gain is None else f" ({tuned.gain:.3f} × as fast as the given options)"
    lines = [f"chosen: {chosen or 'the defaults'}{gain}", *tuned.reasons]
    return [*lines, "evaluate and fetch: ms in which the busiest of their stages is, per step", *notes]


def _option(trial: Trial, name: str) -> str:
    value = trial.options.get(name)
    return "default" if value is None else f"{value:g}"
