"""What needs bytes: N7's recall of a share of the clusters, N11's clusters of pieces, and tokens after a migration.

Keys are those of the study's text model, and those of the recall model, whose keys share bits within a topic: clusters
by construction, at lengths that the text model does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.accuracy import Asked, Row, measure
from tierloop.runtime.compare import PolicyRequest, compare
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, near, over
from tierloop.runtime.results import PolicyResult
from tierloop.runtime.study import Study
from tierloop.runtime.subjects import RecallSubject, Subject, TextSubject
from tierloop.runtime.workloads import needle_prompt
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_runs import NELSSA, head_ns, memories, of_whole, pnm_ns, provenance, tokens_per_s
from tierloop.tools.reproducing_nelssa_runs import near as near_run

SMALL = {"devices.gpu.capacity": 4 << 30, **{f"devices.pnm{number}.capacity": 1 << 30 for number in range(4)}}
"""Memories as small as these contexts need: their bytes are real here."""


def _platform() -> Platform:
    return open_platform(CONSTANTS.platform, clock="virtual", overrides=SMALL)


def text_subject(study: Study) -> TextSubject:
    """The study's model. Raises ModelError."""
    from tierloop.runtime.models import load_model

    return cast("TextSubject", study.once("text subject", lambda: TextSubject(
        study.once("model", lambda: load_model(study.model, study.cache)))))  # fmt: skip


def measured(
    study: Study, subject: Subject, tasks: tuple[str, ...], context: int, prompts: int, devices: int,
    budgets: tuple[float, ...], **options: Any,
) -> tuple[Row, ...]:  # fmt: skip
    """NELSSA against dense attention, with every request near; made once."""
    name = f"measured {subject.name} {tasks} {context} {prompts} {budgets} {options}"

    def run() -> tuple[Row, ...]:
        study.tell()
        wanted = {"threshold_tokens": 1, "near": memories(devices), **options}
        asked = Asked((NELSSA,), budgets, (context,), tasks, prompts, study.seed, options={NELSSA: wanted})
        return measure(subject, asked, _platform).rows

    return cast("tuple[Row, ...]", study.once(name, run))


def text_rows(study: Study, budgets: tuple[float, ...], tasks: tuple[str, ...], **options: Any) -> tuple[Row, ...]:
    """On real keys, near three devices: SmolLM2 has three KV heads."""
    c, subject = CONSTANTS, text_subject(study)
    return measured(study, subject, tasks, c.text_context, c.text_prompts, 3, budgets, **options)


def recall_rows(study: Study, context: int, budgets: tuple[float, ...], **options: Any) -> tuple[Row, ...]:
    """On clustered keys."""
    return measured(study, RecallSubject(), ("recall",), context, CONSTANTS.recall_prompts, 2, budgets, **options)


# -- N7 -----------------------------------------------------------------------------------------------------------


def selection_ratio(study: Study) -> Check:
    """N7: what a share of the clusters keeps of attention, and what it costs."""
    c = CONSTANTS
    rows = {f"{study.model}, {c.text_context:,} tokens": text_rows(study, c.budgets, c.text_tasks)}
    rows |= {f"clustered keys, {n:,} tokens": recall_rows(study, n, c.budgets) for n in c.recall_contexts}
    masses = {
        name: {b: _mean([r.mass_recall for r in of if r.budget == b]) for b in c.budgets} for name, of in rows.items()
    }
    text, *clustered = masses.values()
    gains = [of[c.budgets[-1]] - of[c.budget] for of in clustered]
    kept = [min(of[b] for b in c.budgets if b >= 0.02) for of in clustered]
    long, batch = c.contexts[-1], c.batches[-1]
    runs = {b: near_run(study, long, batch, budget=b) for b in c.budgets}
    ratio = np.log(c.budgets[-1] / c.budgets[-2])
    overhead = c.device_ns * c.layers
    busy = [max(pnm_ns(runs[b])) - overhead for b in c.budgets[-2:]]
    rates = [tokens_per_s(runs[b], batch) for b in c.budgets]
    attention, whole = float(np.log(busy[1] / busy[0]) / ratio), float(np.log(rates[-2] / rates[-1]) / ratio)
    scores = [(name, r.task, r.budget, r.score, r.dense_score) for name, of in rows.items() for r in of]
    lost = max(dense - ours for _, _, budget, ours, dense in scores if budget is not None and budget >= c.budget)
    claims = (
        Claim(f"Fig. 13: from 4 to 8 % attention's mass grows by at most {c.plateau:.0%}, on clustered keys",
              at_most(c.plateau), max(gains), over(max(gains))),
        Claim("… and from 2 % on at least 0.9 of it is kept", at_least(0.9), min(kept), over(min(kept))),
        Claim(f"the same plateau on {study.model}'s keys", at_most(c.plateau), text[c.budgets[-1]] - text[c.budget],
              over(text[c.budgets[-1]] - text[c.budget])),
        Claim(f"near attention takes S times as long, {long:,} tokens, batch {batch} (exponent 1 ± 5 %)", near(1, 0.05),
              attention, over(attention)),
        Claim("at 4 % and above the answers are dense attention's (largest loss)", at_most(0.0), lost, over(lost)),
    )  # fmt: skip
    details = {
        "mass recall by S": {name: {f"{b:g}": mass for b, mass in of.items()} for name, of in masses.items()},
        "scores": [dict(zip(("keys", "task", "S", "score", "dense"), each, strict=True)) for each in scores],
        "tokens/s by S": dict(zip(map(str, c.budgets), rates, strict=True)),
        "exponent of a step's time from 4 to 8 %": whole,
    }
    reason = (
        f"recall is measured on {study.model} at {c.text_context:,} tokens and on keys that are clusters by "
        f"construction; the paper's model and its lengths are not here. A step has more parts than near "
        f"attention, so throughput goes as S to the power of -{whole:.2f}"
    )
    return Check("N7", "the share of clusters", claims, "extrapolated", study.seed, reason, details)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


# -- N11 ----------------------------------------------------------------------------------------------------------


def incremental(study: Study) -> Check:
    """N11: rows that are clustered 1,024 at a time against all at once, in what is kept and in what a step costs."""
    c = CONSTANTS
    pieces = {"segment_tokens": c.update_tokens, "update_tokens": c.update_tokens}
    task, short = c.text_tasks[:1], c.recall_contexts[0]
    at_once = [r for r in text_rows(study, c.budgets, c.text_tasks) if r.task in task and r.budget == c.budget]
    clustered = [r for r in recall_rows(study, short, c.budgets) if r.budget == c.budget]
    found = {
        f"{study.model}, {c.text_context:,} tokens": [at_once, text_rows(study, (c.budget,), task, **pieces)],
        f"clustered keys, {short:,} tokens": [clustered, recall_rows(study, short, (c.budget,), **pieces)],
    }
    masses = {name: [_mean([r.mass_recall for r in rows]) for rows in both] for name, both in found.items()}
    gaps = {name: whole - by_piece for name, (whole, by_piece) in masses.items()}
    run = near_run(study, c.update_context, steps=c.update_steps)
    still = near_run(study, c.update_context, steps=64, update_tokens=8192)
    ours, theirs = ([of_whole(ns, head_ns(each), c.layers) for ns in each.result.step_ns] for each in (run, still))
    cost = _mean(ours) / _mean(theirs) - 1
    claims = (
        *(Claim(f"attention's mass at S = 4 %, all at once less by pieces: at most {c.gap:.0%}; {name}", at_most(c.gap),
                gap, over(gap)) for name, gap in gaps.items()),
        Claim(f"clustering what is decoded costs at most {c.update_cost:.0%} of a step", at_most(c.update_cost), cost,
              over(cost)),
    )  # fmt: skip
    details = {
        "mass recall: at once, by pieces": masses,
        "step, ms": {"with updates": _mean(ours) / 1e6, "without": _mean(theirs) / 1e6, "longest": max(ours) / 1e6},
        "steps": c.update_steps,
    }
    reason = (
        "every piece of the prompt is clustered as an update would be: pieces of a request that grew are the same; "
        f"one request of {c.update_context:,} tokens for the cost. Recall is measured on {study.model}"
    )
    return Check("N11", "incremental clustering", claims, provenance(run, still), study.seed, reason, details)


# -- N6 -----------------------------------------------------------------------------------------------------------


def migrated_tokens(study: Study) -> tuple[int, int]:
    """Tokens after a migration in mid-decode that differ from dense ones, and how many rows near devices attended."""
    return cast("tuple[int, int]", study.once("migrated tokens", lambda: _migrated(study)))


def _migrated(study: Study) -> tuple[int, int]:
    c, model = CONSTANTS, cast("Any", text_subject(study))._model
    study.tell()
    workload = needle_prompt(model, c.real_prompt, seed=study.seed)
    options = {
        "budget": 1.0, "threshold_tokens": workload.num_tokens + c.real_tokens // 3, "near": memories(3),
        "local_tokens": 16, "segment_tokens": 256, "update_tokens": 64, "migrate_tokens": 256,
    }  # fmt: skip
    found = compare(
        model, workload, lambda _: _platform(), [PolicyRequest(NELSSA, options)], num_tokens=c.real_tokens, oracle=False
    )
    (result,) = found.policies
    return sum(a != b for a, b in zip(result.tokens, found.dense_tokens, strict=True)), _near_flops(result)


def _near_flops(result: PolicyResult) -> int:
    return sum(use.flops for name, use in result.devices.items() if "pnm" in name)
