"""`tierloop window-sizes`: a size for each window of a policy, found offline from a recorded selection."""

from __future__ import annotations

import inspect
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.comparing import escaped
from tierloop.tools.console import results

if TYPE_CHECKING:
    from tierloop.runtime.selection import Origin


def window_sizes(
    selection: Annotated[
        Path, typer.Option("--selection", help="A selection that `run --record-selection` has written.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the sizes are written, as JSON.")],
    window: Annotated[
        float, typer.Option("--window", min=0, max=1000, help="As much memory as windows of so many times K take.")
    ] = 2.0,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Entries that are chosen in a step. [as the recorded run]")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="best, optimum, greedy or uniform.")] = "best",
    as_json: options.AsJson = False,
) -> None:
    """Divide the memory of equal windows among layers and heads, so that they hold more of what was chosen.

    Exit codes: 0 good, 2 the input was wrong.
    """
    from tierloop.runtime.manifest import manifest
    from tierloop.runtime.recorded_trace import recorded_trace
    from tierloop.runtime.selection import SelectionRecord
    from tierloop.runtime.window_sizes import METHODS, SIZES, SizeProfile, WindowSizes, chosen_sizes

    if method not in METHODS:
        raise ConfigurationError(f"--method {method!r}: it must be one of {', '.join(METHODS)}")
    if out.exists() and not out.is_file():
        raise ConfigurationError(f"{out} is not a file")
    record = SelectionRecord.load(selection)
    trace = recorded_trace(record)
    layers, heads, _ = trace[0].shape
    if layers != record.origin.shape.num_layers:
        raise ConfigurationError(f"{selection}: {layers} of {record.origin.shape.num_layers} layers were asked about")
    chosen = k or recorded_k(record.origin)
    sizes = tuple(sorted({*SIZES, window}))
    profile = SizeProfile.measured(trace, chosen, sizes)
    uniform = WindowSizes.uniform(layers, heads, window)
    budget = int(uniform.capacity(chosen).sum())
    found = chosen_sizes(profile, budget, method, [selection.name])
    asked = int(profile.chosen.sum())
    hits, before = profile.hits_of(found), profile.hits_of(uniform)
    with results(as_json) as shown:
        try:
            found.save(out)
        except OSError as error:
            raise ConfigurationError(f"{out}: {error.strerror or error}") from error
        moved = (asked - hits) / (asked - before) if asked > before else 1.0
        config = {"selection": selection.name, "window": window, "k": chosen, "method": method}
        numbers = {
            "entries": budget, "steps": len(trace), "hit_rate": hits / asked, "uniform_hit_rate": before / asked,
            "moved": moved,
        }  # fmt: skip
        shown.json({**config, **numbers, "multiples": found.multiples, "manifest": manifest(config)})
        shown.show(
            escaped(
                f"{out}: {layers} × {heads} windows of {min(map(min, found.multiples)):g} to "
                f"{max(map(max, found.multiples)):g} × {chosen} entries, {budget:,} in all\n"
                f"hit rate {hits / asked:.1%} instead of {before / asked:.1%} with {window:g} × {chosen} everywhere: "
                f"{moved:.1%} of the bytes are moved ({len(trace)} recorded steps)"
            )
        )


def recorded_k(origin: Origin) -> int:
    """K of a recorded run, by its options. Raises ConfigurationError for a policy that has no budget and chunks."""
    from tierloop.runtime.compare import find_policy

    parameters = inspect.signature(find_policy(origin.policy).__init__).parameters
    try:
        budget, chunk = (origin.options.get(name, parameters[name].default) for name in ("budget", "chunk_tokens"))
    except KeyError as error:
        raise ConfigurationError(f"policy {origin.policy} has no option {error}: --k is needed") from error
    tokens = max(origin.prompt_tokens, default=0) + origin.steps + 1
    return max(ceil(float(budget) * tokens / int(chunk)), 1)
