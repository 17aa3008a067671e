"""`tierloop phantom`: decode steps of a model that is too large to be here, as shapes on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import DTYPES, DType
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decisions import Decisions
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.dtypes import itemsize
from tierloop.runtime.locality import find_locality
from tierloop.runtime.model_shapes import (
    MODELS,
    KnownShape,
    ShapeStages,
    block_tokens_for,
    cache_shape,
    find_model,
)
from tierloop.runtime.results import PolicyResult
from tierloop.runtime.score_trace import ScoreTraceModel
from tierloop.runtime.selection import ReplayedSelection, SelectionRecord
from tierloop.runtime.stages import Stages
from tierloop.tools import options
from tierloop.tools.console import results
from tierloop.tools.table import USE, rate, share, use_remarks, use_rows

MODEL, POLICY, CONTEXT, STEPS, DTYPE = "llama-3-8b", "split-all", 131_072, 4, "bfloat16"
LOCALITY = "smollm2-135m"
"""What is run where neither an option nor a recorded selection says otherwise."""

ShapeName = Annotated[
    str | None, typer.Option("--model", help=f"A model's name; an unknown one is answered with the list. [{MODEL}]")
]
PolicyName = Annotated[str | None, typer.Option("--policy", help=f"A policy's name; see `tierloop list`. [{POLICY}]")]
Context = Annotated[
    int | None, typer.Option("--context", min=1, help=f"Tokens of the prompt of each request. [{CONTEXT}]")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Requests that are decoded together. [1]")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help=f"Decode steps that are reported. [{STEPS}]")]
Warmup = Annotated[int, typer.Option("--warmup-steps", min=0, help="Steps before them that are not reported.")]
SelectionFile = Annotated[
    Path | None, typer.Option("--selection", help="Replay what `tierloop run --record-selection` has recorded.")
]
LocalityFile = Annotated[
    str | None,
    typer.Option(
        "--locality", help="Draw selections from a locality model or score trace: a name or .json file. [smollm2-135m]"
    ),
]
Dtype = Annotated[str | None, typer.Option("--kv-dtype", help=f"Type of stored rows, as of `run`. [{DTYPE}]")]
WeightDtype = Annotated[str, typer.Option("--weight-dtype", help="Type of the weights: what a stage reads of them.")]
BlockTokens = Annotated[
    int | None,
    typer.Option("--block-tokens", min=64, help="Tokens per block, a multiple of 64. [at most 1,024 blocks a head]"),
]


def phantom(
    model: ShapeName = None,
    platform: options.PlatformName = "hybridgen-a100-cxl",
    policy: PolicyName = None,
    context: Context = None,
    batch: Batch = None,
    steps: Steps = None,
    warmup_steps: Warmup = 0,
    selection: SelectionFile = None,
    locality: LocalityFile = None,
    overrides: options.Overrides = None,
    option: options.PolicyOptions = None,
    kv_dtype: Dtype = None,
    weight_dtype: WeightDtype = "bfloat16",
    block_tokens: BlockTokens = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what selections are drawn from.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Decode steps of a model at any context length as shapes: the same policy code, no bytes, virtual time.

    Exit codes: 0 good, 2 the input was wrong or a memory is too small.
    """
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.manifest import manifest
    from tierloop.runtime.phantom import run_phantom

    if selection is not None and locality is not None:
        raise ConfigurationError("--selection and --locality: a selection comes from one of them")
    for name, dtype in (("--kv-dtype", kv_dtype), ("--weight-dtype", weight_dtype)):
        if dtype is not None and dtype not in DTYPES:
            raise ConfigurationError(f"{name} {dtype!r}: {nearest(dtype, sorted(DTYPES))}")
    changes = options.assignments(overrides, "--set")
    if selection is not None:
        plan = _replayed(selection, kv_dtype, block_tokens)
        if context is None and batch is None:
            lengths = plan.prompt_tokens
        else:
            lengths = [context or plan.prompt_tokens[0]] * (batch or len(plan.prompt_tokens))
    else:
        lengths = [context or CONTEXT] * (batch or 1)
        known = find_model(model or MODEL)
        plan = _shaped(known, lengths[0], kv_dtype, weight_dtype, block_tokens, locality, seed)
    wanted = policy or plan.policy
    recorded = plan.options if wanted == plan.policy else {}
    chosen = options.policy_options(option, [wanted])[wanted] if option else recorded
    with open_platform(platform, clock="virtual", overrides=changes) as opened, results(as_json) as shown:
        result = run_phantom(
            plan.stages,
            plan.shape,
            opened,
            PolicyRequest(wanted, chosen),
            context=lengths,
            steps=steps or max(plan.steps - warmup_steps, 1),
            decisions=plan.decisions,
            warmup_steps=warmup_steps,
            model=model or plan.model,
            context_limit=plan.limit,
            weight_nbytes=plan.weight_nbytes,
        )
        if result.refused is not None:
            raise ConfigurationError(f"{wanted} on {platform}: {result.refused}")
        config = {
            "model": model or plan.model,
            "platform": platform,
            "policy": wanted,
            "options": chosen,
            "prompt_tokens": lengths,
            "steps": len(result.step_ns),
            "warmup_steps": warmup_steps,
            "kv_shape": asdict(plan.shape),
            "weight_dtype": weight_dtype if selection is None else "as recorded",
            "selection": plan.source,
            "overrides": changes,
        }
        shown.json({**config, "result": asdict(result), "manifest": manifest(config, opened, seed)})
        shown.show(*_tables(config, result))


@dataclass(frozen=True)
class _Plan:
    """What is run where no option says otherwise."""

    model: str
    stages: Stages
    shape: KVShape
    decisions: Decisions
    source: str
    limit: int | None
    weight_nbytes: int = 0
    """Room that weights take; a recorded run had none for them."""
    policy: str = POLICY
    options: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    steps: int = STEPS


def _replayed(file: Path, kv_dtype: str | None, block_tokens: int | None) -> _Plan:
    """The run that was recorded. What options change in it is seen, and refused, when the record is compared."""
    record = SelectionRecord.load(file)
    origin = record.origin
    if origin.stages is None or not origin.prompt_tokens:
        raise ConfigurationError(f"{file}: the record does not say what the model's stages cost, or has no prompt")
    changed: dict[str, Any] = {"dtype": kv_dtype, "block_tokens": block_tokens}
    shape = replace(origin.shape, **{name: value for name, value in changed.items() if value is not None})
    known = MODELS.get(origin.model)
    return _Plan(
        origin.model,
        origin.stages,
        shape,
        ReplayedSelection(record),
        f"recorded in {file.name}",
        known.context_length if known is not None else None,
        0,
        origin.policy,
        dict(origin.options),
        list(origin.prompt_tokens),
        origin.steps,
    )


def _shaped(
    known: KnownShape,
    context: int,
    kv_dtype: str | None,
    weight_dtype: str,
    block_tokens: int | None,
    locality: str | None,
    seed: int,
) -> _Plan:
    """A known shape, with drawn selections."""
    dtype: DType = kv_dtype or DTYPE  # type: ignore[assignment]  # one of DTYPES
    fitted = load_selection_model(find_locality(locality or LOCALITY))
    return _Plan(
        known.name,
        ShapeStages.of_shape(known, itemsize(weight_dtype)),
        cache_shape(known, dtype, block_tokens or block_tokens_for(context)),
        draw(fitted, known.num_layers, seed),
        f"{'score trace' if isinstance(fitted, ScoreTraceModel) else 'locality'} {locality or LOCALITY}",
        known.context_length,
        known.weight_nbytes(itemsize(weight_dtype)),
    )


def _tables(config: dict[str, Any], result: PolicyResult) -> Sequence[Table | Text]:
    """The steps, where their time went, and what a reader must know beside the numbers."""
    lengths = config["prompt_tokens"]
    prompts = f"{len(lengths)} × {lengths[0]:,}" if len(set(lengths)) == 1 else ", ".join(f"{n:,}" for n in lengths)
    title = f"{config['model']}, {prompts} prompt tokens, {config['policy']} on {config['platform']} (virtual clock)"
    steps = Table(title=Text(title), title_justify="left", header_style="bold")
    for heading in ("steps", "ms per step", "fastest", "slowest", "tokens/s", "provenance"):
        steps.add_column(heading, justify="left" if heading == "provenance" else "right")
    shown = [f"{ns / 1e6:,.3f}" for ns in (result.elapsed_ns / len(result.step_ns), *_ends(result.step_ns))]
    steps.add_row(f"{len(result.step_ns)}", *shown, rate(result), result.provenance)
    stages = Table(title="busy by stage", title_justify="left", header_style="bold")
    for heading in ("stage", "ms per step", "of the step"):
        stages.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, ns in result.stages.items():
        stages.add_row(Text(stage), f"{ns / 1e6 / len(result.step_ns):,.3f}", share(ns, result.elapsed_ns))
    use = Table(title="decode: bytes, busy and stall", title_justify="left", header_style="bold")
    for heading in USE:
        use.add_column(heading, justify="left" if heading == USE[0] else "right")
    for row in use_rows(result):
        use.add_row(*(Text(cell) for cell in row))
    notes = [Text(note) for note in (*result.notes, *use_remarks(result.devices))]
    if result.guesses:
        notes.append(Text(f"constants that are assumed or unknown: {len(result.guesses)}; the JSON names them"))
    return [steps, stages, use, Text(f"selection: {config['selection']}"), *notes]


def _ends(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)
