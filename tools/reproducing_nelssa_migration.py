"""N6 and N10: a step while a request migrates, and GPU-only serving into which recorded occupancy is injected."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierloop.runtime.reproduction import Check, Claim, at_most, over
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_model import migrated_tokens
from tierloop.tools.reproducing_nelssa_runs import (
    near,
    on_gpu,
    provenance,
    reasons,
    share,
    whole_ns,
)
from tierloop.tools.reproducing_nelssa_serving import LONG, SHORT, serve

NEVER = 1 << 30
"""A threshold that no request reaches."""


def migration(study: Study) -> Check:
    """N6: the time between tokens while a request is copied, handed over, and after; for it and those beside it."""
    c = CONSTANTS
    lengths = (c.migrating_context, *c.beside)
    # All layers: a step copies four layers of a segment, so with two layers only one step in four would copy anything.
    run = _batch(study, lengths, c.migrating_threshold, c.migration_steps, layers=0)
    steady = _batch(study, lengths, NEVER, c.steady_steps, layers=0)
    ours, mean = run.result.step_ns, steady.step_ns
    copied = -(-c.migrating_context // c.migrate_tokens)
    during = ours[: copied + 1]
    slow = sum(during) / len(during) / mean - 1
    worst = max(during) / mean - 1
    served = {name: serve(study, "NELSSA", 0.3, requests=c.migrating_requests, long_prompt=c.migrating_context,
                          threshold_tokens=threshold) for name, threshold in
              (("migrating", c.migrating_threshold), ("staying", NEVER))}  # fmt: skip
    kinds = {
        kind: [served[name].of(kind).tpot_ms["p95"] for name in ("migrating", "staying")] for kind in (SHORT, LONG)
    }
    moved = served["migrating"]
    tpots = [a / b - 1 for a, b in kinds.values() if a and b]
    equal, migrations = migrated_tokens(study)
    claims = (
        Claim(f"Fig. 19: while a request is copied steps take at most {c.jitter:.0%} longer (mean)", at_most(c.jitter),
              slow, over(slow)),
        Claim(f"… the longest of them at most {c.jitter:.0%} longer", at_most(c.jitter), worst, over(worst)),
        Claim(f"served: P95 of TPOT of those that migrate and those beside them, at most {c.jitter:.0%} longer",
              at_most(c.jitter), max(tpots), over(max(tpots))),
        Claim("served: tokens that are computed again", at_most(0.0), float(moved.recomputed_tokens),
              over(float(moved.recomputed_tokens))),
        Claim(f"{study.model}, all clusters attended: tokens after a migration that differ from dense",
              at_most(0.0), float(equal), over(float(equal))),
    )  # fmt: skip
    details = {
        "steady, ms": mean / 1e6,
        "while copied, ms": {"mean": sum(during) / len(during) / 1e6, "longest": max(during) / 1e6},
        "of each step, ms": [ns / 1e6 for ns in ours],
        "handed over, ms": ours[-1] / 1e6,
        "migrations of the run": run.result.details["requests"]["migrated"],
        "migrations served": moved.migrations,
        "P95 of TPOT served, ms: migrating, staying": kinds,
        "migrations on the real model": migrations,
    }
    reason = (
        f"{c.migrating_context:,} tokens beside {len(c.beside)} of {c.beside[0]:,}; {c.migrate_tokens:,} tokens of all "
        f"layers are copied per step; {reasons(run)}"
    )
    return Check("N6", "migration while decoding", claims, provenance(run), study.seed, reason, details)


def _batch(
    study: Study,
    lengths: tuple[int, ...],
    threshold: int,
    steps: int = 1,
    layers: int | None = None,
    **options: Any,
) -> Observed:
    return near(
        study, max(lengths), len(lengths), contexts=lengths, threshold_tokens=threshold, steps=steps, layers=layers,
        index_share=CONSTANTS.index_share_of_mixes, **options,
    )  # fmt: skip


# -- N10 ----------------------------------------------------------------------------------------------------------


def occupancy(study: Study) -> Check:
    """N10: steps of short requests with a long one, simulated whole, and on a GPU alone with recorded occupancy.

    The trace is recorded in a run of the long request alone: what its attention adds to a step. It is replayed into a
    run of the short requests on the GPU alone, which then knows nothing of near memories.
    """
    c, runs = CONSTANTS, list[Observed]()
    rows = [
        _injected(study, context, beside, runs) for beside in c.occupancy_beside for context in c.occupancy_contexts
    ]
    off = {name: [abs(row[f"{name}, off"]) for row in rows if row["context"] == c.occupancy_at]
           for name in ("branch", "busy time", "serial")}  # fmt: skip
    worst = float(np.max([abs(row["branch, off"]) for row in rows]))
    few, many = (f"{count} × {length:,}" for count, length in c.occupancy_beside)
    claims = (
        Claim(f"at {c.occupancy_at:,} tokens injected occupancy is off by at most {c.occupancy_claimed:.2%}",
              at_most(c.occupancy_claimed), off["branch"][0], over(*off["branch"]), f"short requests: {few} to {many}"),
        Claim("… at every length from 32K to 1M, and with either batch of short requests", at_most(c.occupancy_claimed),
              worst, over(worst)),
    )  # fmt: skip
    reason = (
        "the paper does not say what its trace holds, nor how much the short requests attend. With the time of the "
        f"whole near branch injection is {off['branch'][0]:.1%} too slow at {c.occupancy_at:,} tokens beside {few} and "
        f"{off['branch'][1]:.1%} beside {many}: it adds up what in truth overlaps. With the branches one after another "
        f"it is {off['serial'][1]:.2%} off. With the time in which the GPU itself works for long requests it is "
        f"{off['busy time'][0]:.1%} too fast, since the batch waits for near memory; {reasons(*runs)}"
    )
    return Check("N10", "injected occupancy against simulation", claims, provenance(*runs), study.seed, reason,
                 {"rows": rows})  # fmt: skip


def _injected(study: Study, context: int, beside: tuple[int, int], runs: list[Observed]) -> dict[str, Any]:
    """One long request beside some short ones: the step that is simulated, and those with injected occupancy."""
    count, length = beside
    whole = _batch(study, (context, *(length,) * count), length + 4096)
    serial = _batch(study, (context, *(length,) * count), length + 4096, without=("overlap",))
    alone, short, bare = near(study, context), on_gpu(study, length, count), on_gpu(study, length)
    runs += [whole, alone, short, bare]
    layers = share(CONSTANTS.layers)
    one_row = sum(bare.work["emu:gpu", kernel].ns for kernel in ("attend", "merge")) / layers
    branch = whole_ns(alone) - (whole_ns(bare) - one_row)
    busy = sum(w.ns for (device, k), w in alone.work.items() if device == "emu:gpu" and k in GPU_SIDE) / layers
    truth, plain = whole_ns(whole), whole_ns(short)
    return {
        "context": context,
        "beside": f"{count} × {length}",
        "simulated ms": truth / 1e6,
        "branch injected ms": (plain + branch) / 1e6,
        "busy time injected ms": (plain + busy) / 1e6,
        "branch, off": (plain + branch) / truth - 1,
        "busy time, off": (plain + busy) / truth - 1,
        "serial, off": (plain + branch) / whole_ns(serial) - 1,
    }


GPU_SIDE = ("score", "topk", "attend", "merge")
