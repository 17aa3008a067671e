"""What reviewers asked of HybridGen, as tables: where time goes, where it wins and loses, what it is sensitive to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierloop.runtime.reproduction import Table
from tierloop.runtime.statistics import geometric_mean
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS
from tierloop.tools.reproducing_hybridgen_model import decoded
from tierloop.tools.reproducing_hybridgen_runs import (
    ALL_GPU,
    BASELINES,
    CPU_ATTENTION,
    STREAM,
    baseline,
    hybrid,
    load,
    provenance,
    reasons,
    regimes,
)

Row = dict[str, Any]


def stages(study: Study) -> Sequence[Table]:
    """Where a step's time goes: busy time by stage, who is alone at work, and who waits."""
    rows = []
    for model in (CONSTANTS.long_model, CONSTANTS.model):
        for name, rate in regimes().items():
            run = hybrid(study, model, CONSTANTS.question_context, cpu=rate)
            parts = [("busy", stage, ns) for stage, ns in run.result.stages.items()]
            parts += [("alone", who, ns) for who, ns in run.exposed.items()]
            parts += [("stall", device, use.stall_ns) for device, use in run.result.devices.items() if use.commands]
            for kind, what, ns in parts:
                row = {"model": model, "context": CONSTANTS.question_context, "cpu": name, "kind": kind, "what": what}
                rows.append(_row(row | {"ms": ns / 1e6, "of the step": ns / run.step_ns}, run))
    notes = (
        "busy: sums of commands, which overlap; alone: nobody else was at work, so it is on the critical path whole; "
        "stall: the head of a queue waited while its device was idle",
    )
    return [Table("stages", "where does a step's time go, and what is exposed?", tuple(rows), notes)]


def scaling(study: Study) -> Sequence[Table]:
    """1 Ki to 1 Mi tokens against the baselines that exist, and where each of them is faster."""
    curves: list[Row] = []
    losses: list[Row] = []
    for model, contexts in ((CONSTANTS.long_model, CONSTANTS.contexts), (CONSTANTS.model, CONSTANTS.shorter_contexts)):
        for name, rate in regimes().items():
            for scan in CONSTANTS.scans:
                if not _is_asked(model, rate, scan):
                    continue
                times: dict[str, list[float]] = {policy: [] for policy in ("hybridgen", *BASELINES)}
                runs = []
                for context in contexts:
                    ours = hybrid(study, model, context, cpu=rate, scan_tokens=scan)
                    theirs = {p: baseline(study, p, model, context, cpu=rate) for p in BASELINES}
                    runs += [ours, *theirs.values()]
                    found = {"hybridgen": ours.step_ns, **{p: run.step_ns for p, run in theirs.items()}}
                    for policy, ns in found.items():
                        times[policy].append(ns)
                    row = {
                        "model": model,
                        "context": context,
                        "cpu": name,
                        "scan": scan or "all",
                        "K": CONSTANTS.k(context),
                    }
                    row |= {f"{policy} ms": ns / 1e6 for policy, ns in found.items()}
                    curves.append(
                        _row(row | {"load": load(ours.result), "refused": _refused(theirs)}, ours, *theirs.values())
                    )
                for policy in BASELINES:
                    ranges = slower_ranges(contexts, times["hybridgen"], times[policy])
                    row = {
                        "model": model,
                        "cpu": name,
                        "scan": scan or "all",
                        "against": policy,
                        "loses from, to": ranges,
                    }
                    losses.append(_row(row, *runs))
    loses = "ends of ranges lie between measured lengths, in proportion of logarithms; a refused baseline does not win"
    return [
        Table("scaling", "how does a step grow from 1 Ki to 1 Mi tokens?", tuple(curves)),
        Table("losses", "at which context lengths is HybridGen slower than a baseline?", tuple(losses), (loses,)),
    ]


def sensitivity(study: Study) -> Sequence[Table]:
    """K, and the CPU's rate."""
    context, model = CONSTANTS.question_context, CONSTANTS.model
    ks, rates = [], []
    for name, rate in _ends(regimes()).items():
        for k in CONSTANTS.ks:
            run = hybrid(study, model, context, cpu=rate, k=k)
            row = {"model": model, "context": context, "cpu": name, "K": k, "ms": run.step_ns / 1e6}
            ks.append(_row(row | {"link MB": _link_mb(run)}, run))
    for rate in CONSTANTS.cpu_rates:
        stream = baseline(study, STREAM, model, context)
        cpu = baseline(study, CPU_ATTENTION, model, context, cpu=rate)
        for scan in CONSTANTS.scans:
            run = hybrid(study, model, context, cpu=rate, scan_tokens=scan)
            row = {
                "model": model,
                "context": context,
                "GFLOP/s": rate / 1e9,
                "scan": scan or "all",
                "ms": run.step_ns / 1e6,
            }
            row |= {f"{p} / ours": other.step_ns / run.step_ns for p, other in ((STREAM, stream), (CPU_ATTENTION, cpu))}
            rates.append(_row(row, run, stream, cpu))
    return [
        Table("k", "how sensitive is it to K?", tuple(ks)),
        Table("cpu-rate", "how sensitive is it to the CPU's rate?", tuple(rates)),
    ]


def prediction_error(study: Study) -> Sequence[Table]:
    """Wrong rows in place of a share of the right ones: what it costs in time, and of attention."""
    rows = []
    for error in CONSTANTS.errors:
        run = hybrid(study, CONSTANTS.long_model, CONSTANTS.question_context, noise=error)
        kept = decoded(study, 0, "fixed", noise=error) if error in CONSTANTS.errors_real else None
        row = {
            "error": error,
            "model of time": CONSTANTS.long_model,
            "ms": run.step_ns / 1e6,
            "model of recall": study.model,
        }
        row |= {"mass recall": None if kept is None else kept.mass_recall}
        rows.append(_row(row | {"output error": None if kept is None else kept.output_error}, run))
    notes = (f"recall at {CONSTANTS.prompt_tokens:,} tokens, K = {CONSTANTS.k_min} rows of each KV head",)
    return [Table("prediction-error", "what do wrong predictions cost, from 0 to 50 %?", tuple(rows), notes)]


def shared_pool(study: Study) -> Sequence[Table]:
    """The same CXL memory, with and without a second host's traffic."""
    rows = []
    for name, rate in _ends(regimes()).items():
        runs = [
            hybrid(study, CONSTANTS.model, CONSTANTS.question_context, cpu=rate, platform=platform)
            for platform in (CONSTANTS.platform, CONSTANTS.shared)
        ]
        for run, platform in zip(runs, (CONSTANTS.platform, CONSTANTS.shared), strict=True):
            row = {"model": CONSTANTS.model, "context": CONSTANTS.question_context, "cpu": name, "platform": platform}
            rows.append(_row(row | {"ms": run.step_ns / 1e6, "against alone": run.step_ns / runs[0].step_ns}, run))
    return [Table("shared-pool", "what does a second host on the CXL memory cost?", tuple(rows))]


def speed_up(study: Study) -> Sequence[Table]:
    """H5's ratios, against the baselines that exist: no pass and no failure."""
    rows = []
    model, context = CONSTANTS.model, CONSTANTS.ratio_context
    for platform in (CONSTANTS.platform, *CONSTANTS.others):
        for name, rate in (regimes if platform == CONSTANTS.platform else _outer)(platform).items():
            theirs = {p: baseline(study, p, model, context, cpu=rate, platform=platform) for p in BASELINES}
            for mapping, scan in (("semantic", CONSTANTS.scans[0]), ("semantic", CONSTANTS.scans[1]), ("dram", 0)):
                ours = hybrid(study, model, context, cpu=rate, platform=platform, mapping=mapping, scan_tokens=scan)
                ratios = {p: run.step_ns / ours.step_ns for p, run in theirs.items()}
                ran = [r for p, r in ratios.items() if math.isfinite(r) and p != ALL_GPU]
                row = {"platform": platform, "cpu": name, "CXL": mapping == "semantic", "scan": scan or "all"}
                row |= {"ms": ours.step_ns / 1e6, **{f"over {p}": ratio for p, ratio in ratios.items()}}
                rows.append(_row(row | {"geometric mean of offload": geometric_mean(ran)}, ours, *theirs.values()))
    low, high = CONSTANTS.speedup_claimed
    notes = (
        f"the paper's {low:g} to {high:g} is against other systems (H5), so nothing here passes or fails",
        "without CXL: the same machine with all host rows in DRAM. The mean leaves out all-gpu, which has no host rows",
    )
    return [
        Table("speed-up", f"how fast is it against what exists, {model} at {context:,} tokens?", tuple(rows), notes)
    ]


def slower_ranges(contexts: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> list[list[int]]:
    """Where theirs takes less time, as [from, to] in tokens; NaN (refused) takes less of nothing."""
    ranges: list[list[int]] = []
    for start, end in _losing(
        contexts, [math.log(a / b) if b == b else -math.inf for a, b in zip(ours, theirs, strict=True)]
    ):
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
    return ranges


def _losing(contexts: Sequence[int], gaps: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Stretches between lengths in which the gap, log(ours / theirs), is above 0."""
    if len(contexts) == 1 and gaps[0] > 0:
        yield contexts[0], contexts[0]
    for i in range(len(contexts) - 1):
        (n1, g1), (n2, g2) = (contexts[i], gaps[i]), (contexts[i + 1], gaps[i + 1])
        if g1 <= 0 and g2 <= 0:
            continue
        if g1 > 0 and g2 > 0:
            yield n1, n2
        else:
            share = 1.0 if math.isinf(g1) else 0.0 if math.isinf(g2) else g1 / (g1 - g2)
            border = round(math.exp(math.log(n1) + share * math.log(n2 / n1)))
            yield (n1, border) if g1 > 0 else (border, n2)


def _is_asked(model: str, rate: int, scan: int) -> bool:
    """The long model at all rates, and with the short scan at the ends; the other one at the ends, all rows scanned."""
    if model == CONSTANTS.long_model:
        return not scan or rate != CONSTANTS.cpu_flexgen
    return not scan and rate != CONSTANTS.cpu_flexgen


def _outer(platform: str) -> dict[str, int]:
    return _ends(regimes(platform))


def _ends(of: Mapping[str, int]) -> dict[str, int]:
    first, *_, last = of.items()
    return dict((first, last))


def _refused(runs: Mapping[str, Observed]) -> str:
    return ", ".join(policy for policy, run in runs.items() if run.result.refused is not None)


def _link_mb(run: Observed) -> float:
    link = run.result.links["pcie"]
    return (link.bytes_forward + link.bytes_back) / 1e6


def _row(values: Row, *runs: Observed) -> Row:
    return {**values, "provenance": provenance(*runs), "reason": reasons(*runs)}
