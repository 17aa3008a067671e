"""`tierloop compare`: one workload under several policies."""

from __future__ import annotations

from typing import Annotated

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.trace import TraceRecorder
from tierloop.tools import options
from tierloop.tools.comparing import Asked, compare_policies, leave_files, prepare_files, show, verdict
from tierloop.tools.console import results


def compare(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A policy's name; repeatable. Default: every policy there is.")
    ] = None,
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
    as_json: options.AsJson = False,
) -> None:
    """Run one workload under several policies and compare text, error, speed, bytes and time.

    A policy that does not fit the platform is reported as refused; if none fits, that is exit code 2.
    Exit codes: 0 good, 1 a check failed, 2 the input was wrong, 3 the run was invalid.
    """
    from tierloop.devices.registry import discover
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
    chosen = list(dict.fromkeys(policy)) if policy else [found.name for found in discover("policies")]
    given = options.policy_options(option, chosen)
    prepare_files(trace, report)
    recorder = TraceRecorder() if trace is not None else None
    with results(as_json) as shown:
        comparison = compare_policies(asked, [PolicyRequest(name, given[name]) for name in chosen], recorder)
        if all(result.refused is not None for result in comparison.policies):
            why = "; ".join(f"{result.policy}: {result.refused}" for result in comparison.policies)
            raise ConfigurationError(f"no policy fits platform {platform}: {why}")
        leave_files(comparison, recorder, trace, report)
        shown.json(comparison.to_json())
        show(shown, comparison)
    verdict(comparison.failures, [comparison])
