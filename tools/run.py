"""`tierloop run`: decode one prompt under one policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.trace import TraceRecorder
from tierloop.tools import options
from tierloop.tools.comparing import Asked, compare_policies, escaped, leave_files, prepare_files, show, verdict
from tierloop.tools.console import results, say
from tierloop.tools.output import OutputError

if TYPE_CHECKING:  # what it imports takes seconds, and `tierloop --help` needs none of it
    from tierloop.runtime.selection import SelectionRecord


def run(
    policy: Annotated[str, typer.Option("--policy", help="A policy's name; see `tierloop list`.")] = "split-all",
    platform: options.PlatformName = "demo",
    model: options.ModelSource = "smollm2-135m",
    prompt_file: options.PromptFile = None,
    prompt_tokens: options.PromptTokens = 4096,
    depth: options.Depth = 0.5,
    seed: options.Seed = 0,
    tokens: options.NewTokens = 16,
    clock: options.ClockKind = None,
    dilation: options.Dilation = None,
    overrides: options.Overrides = None,
    option: options.PolicyOptions = None,
    kv_dtype: options.KvDtype = "float32",
    oracle: options.Oracle = True,
    cache: options.Cache = None,
    self_test: options.SelfTest = True,
    trace: options.TraceFile = None,
    report: options.ReportFile = None,
    record_selection: Annotated[
        Path | None,
        typer.Option("--record-selection", help="Write what the policy chose, for `tierloop phantom --selection`."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode one prompt under one policy and check it against plain transformers and the float64 oracle.

    Exit codes: 0 good, 1 a check failed, 2 the input was wrong, 3 the run was invalid.
    """
    from tierloop.runtime.compare import PolicyRequest

    asked = Asked(
        model,
        platform,
        clock,
        dilation,
        options.assignments(overrides, "--set"),
        prompt_file,
        prompt_tokens,
        depth,
        seed,
        tokens,
        kv_dtype,
        oracle,
        cache,
        self_test,
    )
    wanted = PolicyRequest(policy, options.policy_options(option, [policy])[policy])
    prepare_files(trace, report, record_selection)
    recorder = TraceRecorder() if trace is not None else None
    with results(as_json) as shown:
        selections: list[SelectionRecord] | None = [] if record_selection is not None else None
        comparison = compare_policies(asked, [wanted], recorder, selections)
        (result,) = comparison.policies
        if result.refused is not None:
            raise ConfigurationError(f"{policy} on {platform}: {result.refused}")
        leave_files(comparison, recorder, trace, report)
        for selection in selections or []:
            assert record_selection is not None, "selections are recorded where a file was named"
            try:
                selection.save(record_selection)
            except OSError as error:
                raise OutputError(f"{record_selection}: cannot be written: {error.strerror}") from error
            say(f"wrote {record_selection}")
        shown.json(comparison.to_json())
        shown.show(escaped(result.text.strip()))
        show(shown, comparison)
    verdict(comparison.failures, [comparison])
