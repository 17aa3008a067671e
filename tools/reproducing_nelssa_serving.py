"""N4 and N5: a mix of short and long requests, served by NELSSA and by paged attention on one and two GPUs.

The mix is that of the published code (500-word prompts with 50 tokens of output, 96,000-word prompts with 200), with
Poisson arrivals; a run differs from the next in the share of long requests alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival, Fixed, Lengths, Mixture, Uniform, poisson
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.locality import find_locality
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, over
from tierloop.runtime.served import ServingResult
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_phantom
from tierloop.runtime.study import Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_runs import NELSSA, PAGED, model

Row = dict[str, Any]
SHORT, LONG = "short", "long"
SYSTEMS: Mapping[str, tuple[str, str]] = {
    "1 GPU": (PAGED, CONSTANTS.one_gpu),
    "2 GPUs": (PAGED, CONSTANTS.two_gpus),
    "NELSSA": (NELSSA, CONSTANTS.platform),
}


def arrivals(
    study: Study, long_share: float, requests: int | None = None, long_prompt: int | None = None
) -> tuple[Arrival, ...]:
    """The mix; more requests leave the first ones as they are."""
    c = CONSTANTS
    short = Lengths(Uniform(*c.short_prompt), Fixed(c.short_output), SHORT)
    long = Lengths(Fixed(long_prompt or c.long_prompt), Fixed(c.long_output), LONG)
    mix = Mixture(((1 - long_share, short), (long_share, long)))
    return poisson(mix, per_s=c.requests_per_s, requests=requests or c.requests, seed=study.seed)


def serve(
    study: Study,
    system: str,
    long_share: float,
    *,
    workers: int | None = None,
    requests: int | None = None,
    preemption: str = "recompute",
    layers: int | None = None,
    long_prompt: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> ServingResult:
    """One system on one mix, made once. `workers` prefill prompts elsewhere; 0: where they are decoded."""
    workers = CONSTANTS.prefill_workers if workers is None else workers
    layers = CONSTANTS.layers if layers is None else layers
    name = (
        f"served {system} {long_share} {workers} {requests} {preemption} {layers} {long_prompt} {overrides} {options}"
    )

    def run() -> ServingResult:
        study.tell()
        policy, machine = SYSTEMS[system]
        rules = ServingRules(prefill_workers=workers, preemption=preemption)  # type: ignore[arg-type]  # checked there
        locality = load_selection_model(find_locality(CONSTANTS.locality))
        selection = draw(locality, layers or model().num_layers, study.seed)
        how = Serving(rules, CONSTANTS.kv_dtype, utilisation=CONSTANTS.utilisation, layers=layers)
        with open_platform(machine, clock="virtual", overrides=overrides or {}) as platform:
            coming = arrivals(study, long_share, requests, long_prompt)
            return serve_phantom(model(), platform, PolicyRequest(policy, options), coming, how, selection)

    return cast("ServingResult", study.once(name, run))


# -- N4 -----------------------------------------------------------------------------------------------------------


def short_requests(study: Study) -> Check:
    """N4: how long short requests wait for a token, on GPUs alone over near memory, by the share of long requests."""
    c = CONSTANTS
    rows = [_row(study, system, each) for each in c.long_shares for system in SYSTEMS]
    ratios = {(s, p): _ratio(study, s, p) for s in c.long_shares for p in ("p50", "p95", "p99")}
    most = c.long_shares[-1]
    # vLLM prefills where it decodes, the published code of NELSSA elsewhere: not alike, and what the paper compares.
    unlike = {p: _ratio(study, most, p, (0, c.prefill_workers)) for p in ("p95", "p99")}
    in_place = {p: _ratio(study, most, p, (0, 0), c.requests_in_place) for p in ("p95", "p99")}
    none = [ratios[c.long_shares[0], p] for p in ("p95", "p99")]
    where = f"share of long requests {most:.0%}; one GPU"

    def worse(paper: str, percentile: str, low: float) -> Claim:
        found = [ratios[s, percentile] for s in c.long_shares[1:]]
        return Claim(paper, at_least(low), max(found), over(max(found)))

    claims = (
        worse(f"P95 of short TPOT, one GPU over NELSSA, prompts prefilled elsewhere by both: ≥ {c.p95_claimed:g} at "
              "the worst share", "p95", c.p95_claimed),
        worse(f"… P99: ≥ {c.p99_claimed:g}", "p99", c.p99_claimed),
        Claim("no long requests: the same (P95 and P99)", c.without_long, none[0], over(*none)),
        Claim(f"P95, one GPU that prefills its own prompts over NELSSA with prefill workers: ≥ {c.p95_claimed:g}",
              at_least(c.p95_claimed), unlike["p95"], over(unlike["p95"]), where),
        Claim(f"… P99: ≥ {c.p99_claimed:g}", at_least(c.p99_claimed), unlike["p99"], over(unlike["p99"]), where),
    )  # fmt: skip
    details = {
        "rows": rows,
        "one GPU over NELSSA": [{"long": s, **{p: ratios[s, p] for p in ("p50", "p95", "p99")}} for s in c.long_shares],
        "both prefill where they decode": in_place,
        "one GPU prefills where it decodes, NELSSA elsewhere": unlike,
    }
    reason = (
        "with prompts prefilled elsewhere a step of one GPU reads at most what its memory holds, about 15 ms of KV, "
        "and short requests wait for admission instead; NELSSA has more long requests in a step, and short ones wait "
        "for all of them. What makes short requests wait for tokens on one GPU is the prefill of long prompts: against "
        f"prefill workers the ratio at P95 is {unlike['p95']:.2f}, where both prefill where they decode "
        f"{in_place['p95']:.2f}; "
        f"{_why(study)}"
    )
    return Check("N4", "short requests beside long ones", claims, "extrapolated", study.seed, reason, details)


def _ratio(
    study: Study,
    long_share: float,
    percentile: str,
    workers: tuple[int, int] = (CONSTANTS.prefill_workers,) * 2,
    requests: int | None = None,
) -> float:
    """TPOT of short requests on one GPU over NELSSA's; `workers` of each."""
    theirs, ours = (
        serve(study, system, long_share, workers=count, requests=requests).of(SHORT).tpot_ms[percentile]
        for system, count in zip(("1 GPU", "NELSSA"), workers, strict=True)
    )
    return math.nan if theirs is None or not ours else theirs / ours


def _row(study: Study, system: str, long_share: float, **options: Any) -> Row:
    run = serve(study, system, long_share, **options)
    short, long = run.of(SHORT), run.of(LONG)
    return {
        "long": long_share,
        "system": system,
        **{f"short TPOT {p}": short.tpot_ms[p] for p in ("p50", "p95", "p99")},
        "short TTFT p95": short.ttft_ms["p95"],
        "long TPOT p50": long.tpot_ms["p50"],
        "tokens/s": run.tokens_per_s,
        "running": run.running["mean"],
        "running while others wait": crowded(run),
        "waiting": run.waiting["mean"],
        "most waiting": run.waiting["max"],
        "preemptions": run.preemptions,
        "migrations": run.migrations,
        "failures": len(run.failures),
        "provenance": run.provenance,
        "reason": reason_of(run),
    }


def crowded(run: ServingResult) -> float | None:
    """Requests in the batch, over the time in which somebody waits; None where nobody does."""
    times = [sample.at_ns for sample in run.samples] + [run.elapsed_ns]
    waits = [(s.running, b - a) for s, (a, b) in zip(run.samples, pairwise(times), strict=True) if s.waiting]
    total = sum(ns for _, ns in waits)
    return sum(running * ns for running, ns in waits) / total if total else None


def reason_of(run: ServingResult) -> str:
    """Why its numbers are extrapolated, in one line."""
    return "; ".join((*run.notes, f"{len(run.guesses)} constants of {run.platform} are assumed or unknown"))


def _why(study: Study) -> str:
    return reason_of(serve(study, "NELSSA", CONSTANTS.long_shares[-1]))


# -- N5 -----------------------------------------------------------------------------------------------------------


def batches(study: Study) -> Check:
    """N5: requests that run, that wait and that are preempted, by the share of long requests."""
    c = CONSTANTS
    rows = [_row(study, system, each) for each in c.long_shares for system in SYSTEMS]
    most = c.long_shares[-1]
    of = {(row["long"], row["system"]): row for row in rows}
    one, ours = of[most, "1 GPU"], of[most, "NELSSA"]
    running = crowded_of(one)
    collapse = running / crowded_of(ours)
    longer = crowded_of(_row(study, "1 GPU", c.long_shares[-2], long_prompt=c.longer_prompt))
    claims = (
        Claim("one GPU: while others wait, the batch falls towards 1 (at most 2)", at_most(2.0), running,
              over(running)),
        Claim(f"… with prompts of {c.longer_prompt:,} tokens", at_most(2.0), longer, over(longer)),
        Claim(f"{c.long_prompt:,}: at most half of NELSSA's batch while others wait", at_most(0.5), collapse,
              over(collapse)),
        Claim("one GPU: more wait than with NELSSA (ratio of means)", at_least(1.0), one["waiting"] / ours["waiting"],
              over(one["waiting"] / ours["waiting"])),
        Claim("NELSSA: no preemptions at any share", at_most(0.0),
              float(max(r["preemptions"] for r in rows if r["system"] == "NELSSA")),
              over(*(float(r["preemptions"]) for r in rows if r["system"] == "NELSSA"))),
        Claim("one GPU: preemptions at the highest share", at_least(1.0), float(one["preemptions"]),
              over(float(one["preemptions"]))),
    )  # fmt: skip
    reason = (
        f"{c.long_prompt:,} tokens a long prompt, so three of them run on one GPU and seven on four prototypes. "
        "A prompt is admitted when it fits whole, and outputs are short: nobody outgrows the room or is preempted; "
        f"vLLM takes room chunk by chunk; {_why(study)}"
    )
    return Check("N5", "batch, queue and preemptions", claims, "extrapolated", study.seed, reason, {"rows": rows})


def crowded_of(row: Row) -> float:
    """The same from a row; NaN where nobody waited."""
    found = row["running while others wait"]
    return math.nan if found is None else float(found)
