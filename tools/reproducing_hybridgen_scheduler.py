"""H7: the feedback scheduler. What it keeps on the real model, how K falls with the context, and that it settles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tierloop.runtime.feedback import FeedbackScheduler, Times
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, over
from tierloop.runtime.study import Study
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS
from tierloop.tools.reproducing_hybridgen_model import decoded
from tierloop.tools.reproducing_hybridgen_runs import provenance, reasons
from tierloop.tools.reproducing_hybridgen_time import scheduled

STEP = 0.2
"""How far K moves in a decision of the noisy simulation: the policy's default."""


def feedback(study: Study) -> Check:
    """H7: order of accuracy, K over the context, K_min, and rest under noise."""
    everywhere = range(CONSTANTS.prompts)
    kept = {kind: [decoded(study, prompt, kind) for prompt in everywhere] for kind in KINDS}
    large = [decoded(study, prompt, "fixed", k=CONSTANTS.fixed_large) for prompt in everywhere[:1]]
    recalls = {kind: [each.mass_recall for each in found] for kind, found in kept.items()}
    errors = {kind: [each.output_error for each in found] for kind, found in kept.items()}
    runs = [scheduled(study, n) for n in CONSTANTS.scheduler_contexts]
    ks = [run.result.details["request0"]["k"][-1] for run in runs]
    rises = sum(later > earlier for earlier, later in pairwise(ks[ks.index(max(ks)) :]))
    least = min(k for run in runs for k in run.result.details["request0"]["k"])
    spans = settled(study.seed)
    inside = sum(span <= 1 + STEP + 1e-9 for span in spans) / len(spans)
    claims = (
        _at_least_0("Fig. 22: the full scheduler keeps at least the mass recall of adaptive K (difference)",
                    recalls["full"], recalls["adaptive"]),
        _at_least_0("Fig. 22: adaptive K keeps at least the mass recall of fixed K = K_min (difference)",
                    recalls["adaptive"], recalls["fixed"]),
        _at_least_0("Fig. 22, by output error: adaptive K is off by at least what the full scheduler is (difference)",
                    errors["adaptive"], errors["full"]),
        _at_least_0("Fig. 22, by output error: fixed K = K_min is off by at least what adaptive K is (difference)",
                    errors["fixed"], errors["adaptive"]),
        Claim("K falls as L grows: K at 1 Mi tokens of the largest", at_most(0.999), ks[-1] / max(ks),
              over(ks[-1] / max(ks))),
        Claim("… and beyond its largest never rises (rises)", at_most(0.0), float(rises), over(float(rises))),
        Claim(f"K is never below K_min = {CONSTANTS.k_min}", at_least(CONSTANTS.k_min), float(least),
              over(float(least))),
        Claim("K settles within one step under noise of ± 10 % (share of simulations)", (1.0, 1.0), inside,
              over(inside), f"{CONSTANTS.noisy_seeds} seeds"),
    )  # fmt: skip
    details = {
        "mass recall by prompt": recalls,
        "output error by prompt": errors,
        f"fixed, K = {CONSTANTS.fixed_large}: mass recall": [each.mass_recall for each in large],
        f"fixed, K = {CONSTANTS.fixed_large}: output error": [each.output_error for each in large],
        "largest error / bound of the oracle": max(each.worst_ratio for found in kept.values() for each in found),
        "K and timing at the end": {kind: [list(each.ended) for each in found] for kind, found in kept.items()},
        "K by context": dict(zip(map(str, CONSTANTS.scheduler_contexts), ks, strict=True)),
        "largest K / smallest K once settled": spans,
    }
    reason = (
        f"measured on {study.model} at {CONSTANTS.prompt_tokens:,} tokens on {CONSTANTS.real_platform}, where the host "
        "has slack; the paper's tasks and models are not here. Mass recall sees which rows were attended and not "
        "whether their logits are true: the full scheduler spends slack on timing before it spends it on K, so it can "
        "attend fewer rows than adaptive K does, with true logits: its output error says so. K over L is that of the "
        f"vectorised CPU; {reasons(*runs)}"
    )
    return Check("H7", "the feedback scheduler", claims, provenance(*runs), study.seed, reason, details)


def _at_least_0(paper: str, ours: Sequence[float], theirs: Sequence[float]) -> Claim:
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return Claim(paper, at_least(0.0), float(np.mean(differences)), over(*differences), f"{len(ours)} prompts")


KINDS = ("fixed", "adaptive", "full")


def settled(seed: int) -> list[float]:
    """Of each simulation, largest K / smallest K from the call on at which it has to have settled.

    Host time a + b·K, and a choice of rows, against a constant GPU time; all with noise. Nothing of a device is in it.
    """
    spans = []
    for number in range(CONSTANTS.noisy_seeds):
        chance = np.random.default_rng((seed, number))
        fixed, select, balance = chance.uniform(0, 0.3), chance.uniform(0, 0.2), int(chance.integers(100, 4000))
        scheduler = FeedbackScheduler(CONSTANTS.k_min, 1 << 14, kind="full", step=STEP)
        seen = []
        for _ in range(CONSTANTS.noisy_calls):
            noise = chance.uniform(1 - CONSTANTS.noise_of_times, 1 + CONSTANTS.noise_of_times, 4)
            k = scheduler.setting.k
            host = fixed + (1 - fixed) * k / balance
            gpu, cpu, tx, choice = (1e6 * np.array((1.0, 0.8 * host, 0.2 * host, select)) * noise).tolist()
            seen.append(scheduler.decide(Times(gpu, cpu, tx, choice)).k)
        late = seen[CONSTANTS.noisy_settled :]
        spans.append(max(late) / min(late))
    return spans
