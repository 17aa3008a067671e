"""`tierloop serve-bench`: requests that arrive over time, served under one or several policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.served import Limits, ServingResult
from tierloop.runtime.tier_writes import unreached
from tierloop.tools import options
from tierloop.tools.comparing import escaped, prepare_files, try_out
from tierloop.tools.console import progress, results, say
from tierloop.tools.exits import end
from tierloop.tools.output import write_files
from tierloop.tools.serving_table import serving_remarks, serving_tables
from tierloop.tools.serving_workload import PHANTOM, REAL, Traffic, described

if TYPE_CHECKING:  # what they import takes seconds, and `tierloop --help` needs none of it
    from tierloop.devices.platform import Platform
    from tierloop.runtime.arrivals import Arrival
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.serving_run import Serving

POLICY = "paged"
MODEL, PLATFORM, DTYPE, BLOCK, STEP, UTILISATION = "llama-3-8b-1048k", "nelssa-h100-4pnm", "float16", 256, 2048, 0.9
REAL_MODEL, REAL_PLATFORM, REAL_DTYPE, REAL_BLOCK, REAL_STEP, REAL_UTILISATION = (
    "smollm2-135m",
    "demo",
    "float32",
    64,
    32,
    0.4,
)
"""Where no option says otherwise, without `--real` and with it: the demo's GPU of 50 MB needs much of it to work in."""

Count = Annotated[
    int | None, typer.Option("--requests", min=1, help="Requests that come, without those of --long-every.")
]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second on average (Poisson). [2]")]
Bursts = Annotated[
    float | None, typer.Option("--bursts", help="Instead of --rate: seconds from one burst to the next.")
]
BurstSize = Annotated[int | None, typer.Option("--burst-size", min=1, help="Requests of a burst. [1]")]
Short = Annotated[
    str | None,
    typer.Option("--short", metavar="PROMPT:OUTPUT", help="Tokens of a short request: 500, 200-800 or 500~0.6 each."),
]
Long = Annotated[str | None, typer.Option("--long", metavar="PROMPT:OUTPUT", help="The same of a long one.")]
LongShare = Annotated[float | None, typer.Option("--long-share", help="The share of requests that are long, 0 to 1.")]
LongEvery = Annotated[
    float | None, typer.Option("--long-every", help="Long ones come in a stream of their own, one in so many seconds.")
]
LongRequests = Annotated[int | None, typer.Option("--long-requests", min=1, help="Requests of that stream. [3]")]
Turns = Annotated[int | None, typer.Option("--turns", min=1, help="Turns of a request. [1]")]
Think = Annotated[float | None, typer.Option("--think", help="Seconds from an answer to the next turn. [0]")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Requests of a recorded trace: Mooncake, CSV or our own.")]
TraceScale = Annotated[
    float | None, typer.Option("--trace-scale", help="Times of the trace times this: 0.5 is faster.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="The first so many requests of the trace.")]
SaveTrace = Annotated[Path | None, typer.Option("--save-trace", help="Write the requests to this file, for --trace.")]
MaxBatch = Annotated[int | None, typer.Option("--max-batch", min=1, help="Requests that hold space at a time. [256]")]
StepTokens = Annotated[
    int | None, typer.Option("--step-tokens", min=1, help=f"New tokens of a step, at most. [{STEP}; {REAL_STEP}]")
]
Preemption = Annotated[str, typer.Option("--preemption", help="recompute or swap.")]
Utilisation = Annotated[
    float | None,
    typer.Option(
        "--utilisation",
        help=f"Share of the GPU's memory for weights and KV cache, 0 to 1. [{UTILISATION}; {REAL_UTILISATION}]",
    ),
]


def serve_bench(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"A policy that serves; repeatable. [{POLICY}]")
    ] = None,
    platform: Annotated[
        str | None, typer.Option("--platform", help=f"A platform's name or .toml file. [{PLATFORM}; {REAL_PLATFORM}]")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help=f"A known shape, or with --real a model. [{MODEL}; {REAL_MODEL}]")
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="A real model and real bytes, instead of shapes.")] = False,
    requests: Count = None,
    rate: Rate = None,
    bursts: Bursts = None,
    burst_size: BurstSize = None,
    short: Short = None,
    long: Long = None,
    long_share: LongShare = None,
    long_every: LongEvery = None,
    long_requests: LongRequests = None,
    turns: Turns = None,
    think: Think = None,
    trace: Trace = None,
    trace_scale: TraceScale = None,
    limit: Limit = None,
    sort: Annotated[bool, typer.Option("--sort", help="Sort the requests of the trace by time.")] = False,
    save_trace: SaveTrace = None,
    max_batch: MaxBatch = None,
    step_tokens: StepTokens = None,
    preemption: Preemption = "recompute",
    prefill_workers: Annotated[
        int,
        typer.Option("--prefill-workers", min=0, help="Prompts of shapes come from so many machines of their own."),
    ] = 0,
    recomputes: Annotated[
        int, typer.Option("--recomputes", min=0, help="How often a request that loses its rows is computed again.")
    ] = 1,
    utilisation: Utilisation = None,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", min=64, help=f"Tokens per block. [{BLOCK}; {REAL_BLOCK}]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", help=f"Type of stored rows. [{DTYPE}; {REAL_DTYPE}]")
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option("--weight-dtype", help="Type of a shape's weights: what a stage reads of them.")
    ] = "bfloat16",
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="Layers of a shape that stand for all of them; 0: all.")
    ] = 2,
    locality: Annotated[
        str, typer.Option("--locality", help="What selections of a shape are drawn from, as of `phantom`.")
    ] = "smollm2-135m",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, prompts and drawn selections.")] = 0,
    ttft_limit_ms: Annotated[
        float | None, typer.Option("--ttft-limit-ms", help="Count requests whose first tokens come within this.")
    ] = None,
    tpot_limit_ms: Annotated[
        float | None, typer.Option("--tpot-limit-ms", help="Count requests whose tokens follow within this on average.")
    ] = None,
    kinds: Annotated[bool, typer.Option("--kinds/--no-kinds", help="A table by kind of request as well.")] = True,
    clock: options.ClockKind = None,
    dilation: options.Dilation = None,
    overrides: options.Overrides = None,
    option: options.PolicyOptions = None,
    cache: options.Cache = None,
    self_test: options.SelfTest = True,
    as_json: options.AsJson = False,
) -> None:
    """Serve requests that arrive over time: continuous batching, under one or several policies.

    Without --real these are shapes of any model on the virtual clock; with it a model on real bytes.
    Exit codes: 0 good, 1 a request failed or nothing reached a tier, 2 the input was wrong or no policy fits, 3 the run
    was invalid.
    """
    from tierloop.runtime.arrival_trace import text_of
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.serving import ServingRules
    from tierloop.runtime.serving_run import Serving

    traffic = Traffic(
        requests,
        rate,
        bursts,
        burst_size,
        short,
        long,
        long_share,
        long_every,
        long_requests,
        turns,
        think,
        trace,
        trace_scale,
        limit,
        sort,
    )
    if not real and (clock not in (None, "virtual") or dilation is not None):
        raise ConfigurationError("--clock and --dilation: shapes take virtual time; give --real")
    step = step_tokens or (REAL_STEP if real else STEP)
    rules = ServingRules(max_batch or min(256, step), step, preemption, prefill_workers, recomputes)  # type: ignore[arg-type]  # it checks that
    how = Serving(
        rules,
        kv_dtype or (REAL_DTYPE if real else DTYPE),  # type: ignore[arg-type]  # it checks that, too
        block_tokens or (REAL_BLOCK if real else BLOCK),
        utilisation=(REAL_UTILISATION if real else UTILISATION) if utilisation is None else utilisation,
        layers=layers,
        weight_dtype=weight_dtype,  # type: ignore[arg-type]  # and that
    )
    limits = None if ttft_limit_ms is None and tpot_limit_ms is None else Limits(ttft_limit_ms, tpot_limit_ms)
    chosen = list(dict.fromkeys(policy)) if policy else [POLICY]
    given = options.policy_options(option, chosen)
    wanted = [PolicyRequest(name, given[name]) for name in chosen]
    arrivals = traffic.arrivals(REAL if real else PHANTOM, seed)
    asked = _Asked(
        model or (REAL_MODEL if real else MODEL),
        platform or (REAL_PLATFORM if real else PLATFORM),
        real,
        clock if real else "virtual",
        dilation,
        options.assignments(overrides, "--set"),
        locality,
        seed,
        cache,
        self_test,
    )
    asked.check(wanted)
    prepare_files(save_trace)
    if save_trace is not None:
        write_files({save_trace: text_of(arrivals)})
        say(f"wrote {save_trace}")
    with results(as_json) as shown:
        served, manifest = _served(asked, wanted, arrivals, how, traffic)
        if all(result.refused is not None for result in served):
            why = "; ".join(f"{result.policy}: {result.refused}" for result in served)
            raise ConfigurationError(f"no policy serves on platform {asked.platform}: {why}")
        tables = [result.as_dict(limits) for result in served]
        top = tables[0] if len(tables) == 1 else {"results": tables}
        shown.json({**top, "model": asked.model, "workload": described(arrivals), "manifest": manifest})
        shown.show(*serving_tables(asked.title(arrivals), served, limits, kinds))
        shown.show(*(escaped(line) for line in serving_remarks(served)))
    _verdict(served)


@dataclass(frozen=True)
class _Asked:
    """Whom to serve with what."""

    model: str
    platform: str
    real: bool
    clock: str | None
    dilation: int | None
    overrides: dict[str, Any]
    locality: str
    seed: int
    cache: Path | None
    self_test: bool

    def check(self, policies: list[PolicyRequest]) -> None:
        """What can be seen to be wrong before anything slow begins. Raises ConfigurationError."""
        from tierloop.runtime.compare import find_policy
        from tierloop.runtime.policy import check_options

        for policy in policies:
            kind = find_policy(policy.name)
            check_options(kind, policy.options)
            if not kind.serves:
                raise ConfigurationError(f"policy {kind.name} cannot serve: it takes no prompts in steps of tokens")
        try_out(self.open(), self.self_test)

    def open(self) -> Platform:
        """A fresh platform. Raises ConfigurationError or a DeviceError."""
        from tierloop.devices.registry import open_platform

        kind = options.clock_kind(self.clock)
        return open_platform(self.platform, clock=kind, dilation=self.dilation, overrides=self.overrides)

    def title(self, arrivals: tuple[Arrival, ...]) -> str:
        """One line that says who was served on what."""
        what = described(arrivals)
        return (
            f"{self.model}{'' if self.real else ' (shapes)'} on {self.platform}: {what['requests']:,} requests, "
            f"{what['prompt_tokens']:,} prompt and {what['output_tokens']:,} output tokens, "
            f"the last comes at {what['last_arrival_ns'] / 1e9:,.3g} s"
        )


def _served(
    asked: _Asked, policies: list[PolicyRequest], arrivals: tuple[Arrival, ...], how: Serving, traffic: Traffic
) -> tuple[list[ServingResult], dict[str, Any]]:
    """Each policy on a fresh platform, with progress on stderr; what one has no room for at all is refused."""
    from tierloop.runtime.manifest import manifest

    serve = _real(asked, arrivals, how) if asked.real else _phantom(asked, arrivals, how)
    found: list[ServingResult] = []
    record: dict[str, Any] = {}
    with progress() as bars:
        for policy in policies:
            title = policy.title

            def tell(done: int, total: int, title: str = title) -> None:
                bars(title, done, total)

            with asked.open() as platform:
                try:
                    found.append(serve(platform, policy, tell))
                except ConfigurationError as error:
                    found.append(ServingResult(title, platform.name, refused=str(error)))
                if not record:
                    config = {
                        **{name: value for name, value in asdict(asked).items() if name != "cache"},
                        "policies": [asdict(each) for each in policies],
                        "serving": asdict(how),
                        "traffic": traffic.as_dict(),
                    }
                    record = manifest(config, platform, asked.seed)
    return found, record


def _phantom(
    asked: _Asked, arrivals: tuple[Arrival, ...], how: Serving
) -> Callable[[Platform, PolicyRequest, Callable[[int, int], None]], ServingResult]:
    """Serves shapes."""
    from tierloop.runtime.drawn_selection import draw, load_selection_model
    from tierloop.runtime.locality import find_locality
    from tierloop.runtime.model_shapes import find_model
    from tierloop.runtime.serving_run import serve_phantom

    known = find_model(asked.model)
    fitted = load_selection_model(find_locality(asked.locality))

    def serve(platform: Platform, policy: PolicyRequest, tell: Callable[[int, int], None]) -> ServingResult:
        decisions = draw(fitted, min(how.layers, known.num_layers) or known.num_layers, asked.seed)
        return serve_phantom(known, platform, policy, arrivals, how, decisions, progress=tell)

    return serve


def _real(
    asked: _Asked, arrivals: tuple[Arrival, ...], how: Serving
) -> Callable[[Platform, PolicyRequest, Callable[[int, int], None]], ServingResult]:
    """Serves with a model."""
    from tierloop.runtime.models import load_model
    from tierloop.runtime.serving_run import serve_model

    say(f"loading {asked.model}")
    model = load_model(asked.model, asked.cache)

    def serve(platform: Platform, policy: PolicyRequest, tell: Callable[[int, int], None]) -> ServingResult:
        return serve_model(model, platform, policy, arrivals, how, seed=asked.seed, progress=tell)

    return serve


def _verdict(served: list[ServingResult]) -> None:
    """End with exit code 1 if a request failed or nothing reached a tier, 3 if a run was invalid. Raises typer.Exit."""
    failures = [
        f"{result.policy}: {len(result.failures)} of {len(result.requests)} requests were not served"
        for result in served
        if result.failures
    ]
    failures += [f"{result.policy}: {each}" for result in served for each in unreached(result.tiers)]
    end(failures, [f"{result.policy}: {result.invalid[0]}" for result in served if result.invalid])
