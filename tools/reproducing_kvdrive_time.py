"""K5 to K9 and K11: what is timed. Phantom runs of the system on the paper's servers.

Most runs have some of the model's layers, which are alike but for their scores; their times are scaled to all layers
where a share of the whole step is compared, and capacities are only looked at in runs of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, near, over
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS, LAUNCH, SSD
from tierloop.tools.reproducing_kvdrive_model import kept_by
from tierloop.tools.reproducing_kvdrive_runs import (
    ALL_GPU,
    DENSE,
    FETCH,
    baseline,
    from_ssd,
    hit_rate,
    kvdrive,
    provenance,
    reasons,
    stage_ns,
    whole_step_ns,
)


def breakdown(study: Study) -> Check:
    """K5: selection and fetching in a sequential system with little or no reuse."""
    c = CONSTANTS
    runs = {
        (window, budget, lookup): kvdrive(
            study, pipeline="sequential", window=window, budget=budget, lookup_ns=lookup, rank_depth=1.0
        )
        for window in c.sequential_windows
        for budget in (c.budget, c.budget_high)
        for lookup in (c.lookup_ns[0], c.lookup_ns[-1])
    }
    shares = {key: _select_and_fetch(run) for key, run in runs.items()}
    fast = {key[:2]: share for key, share in shares.items() if key[2] == c.lookup_ns[0]}
    got = sum(fast.values()) / len(fast)
    claims = (
        Claim("Fig. 4: selection and fetching take half of a decode step (± 10 points) in sequential systems",
              c.select_and_fetch, got, over(*shares.values()),
              "window ×0 or ×1, budget 1.56 or 6.25 %, 2 to 200 ns for each entry that is looked up"),
    )  # fmt: skip
    details = {f"window ×{w:g}, budget {b:.4g}, {n:g} ns": round(share, 4) for (w, b, n), share in shares.items()}
    return Check("K5", "where a step's time goes", claims, provenance(*runs.values()), study.seed,
                 reasons(*runs.values()), details)  # fmt: skip


def _select_and_fetch(run: Observed) -> float:
    layers = find_model(CONSTANTS.model).num_layers / CONSTANTS.layers
    return stage_ns(run, ("select", *FETCH)) * layers / whole_step_ns(run)


def window_by_batch(study: Study) -> Check:
    """K6: the window with the shortest step, at batch 1 and 4, over what looking up an entry may cost."""
    c = CONSTANTS
    runs = {
        (batch, lookup, window): kvdrive(study, batch=batch, layers=c.sweep_layers, window=window, lookup_ns=lookup)
        for batch in c.sweep_batches
        for lookup in c.sweep_lookup_ns
        for window in c.sweep_windows
    }
    best = {
        (batch, lookup): min(c.sweep_windows, key=lambda w, b=batch, n=lookup: runs[b, n, w].step_ns)  # type: ignore[misc]
        for batch in c.sweep_batches
        for lookup in c.sweep_lookup_ns
    }
    both = [
        n for n in c.sweep_lookup_ns if all(best[b, n] == w for b, w in zip(c.sweep_batches, c.sweep_best, strict=True))
    ]
    claims = (
        *(
            Claim(f"Fig. 16: the best window at batch {batch} is ×{wanted:g}", over(wanted),
                  best[batch, c.sweep_lookup_ns[0]], over(*(best[batch, n] for n in c.sweep_lookup_ns)),
                  "2 to 200 ns for each entry that is looked up")
            for batch, wanted in zip(c.sweep_batches, c.sweep_best, strict=True)
        ),
        Claim("Fig. 16: both at one cost of a lookup (number of costs that were tried)", at_least(1.0),
              float(len(both)), over(float(len(both)))),
    )  # fmt: skip
    details = {
        "best window": {f"batch {b}, {n:g} ns": w for (b, n), w in best.items()},
        "ms of a layer's attention": {
            f"batch {b}, {n:g} ns, ×{w:g}": round(_attention_ns(run) / c.sweep_layers / 1e6, 4)
            for (b, n, w), run in runs.items()
        },
    }
    costs = ", ".join(f"{n:g}" for n in both) or "none of those tried"
    reason = (
        f"both windows are best at these ns for a lookup: {costs}. A larger window costs lookups at either batch, and "
        "the CPU evaluates one micro-batch after the other: it is the longest stage at batch 4 before lookups matter "
        f"at batch 1; {reasons(*runs.values())}"
    )
    return Check("K6", "window and batch", claims, provenance(*runs.values()), study.seed, reason, details)


def _attention_ns(run: Observed) -> float:
    """What a step takes beside projections, MLP and head."""
    return run.step_ns - stage_ns(run, DENSE)


def index(study: Study) -> Check:
    """K7: chunk size, time of a lookup by number of centroids, and what few centroids lose on a real model."""
    c = CONSTANTS
    chunks = {
        (chunk, n): kvdrive(study, chunk_tokens=chunk, centroids=c.chunk_centroids, lookup_ns=n)
        for chunk in c.chunks
        for n in (c.lookup_ns[0], c.lookup_ns[-1])
    }
    best = [min(c.chunks, key=lambda chunk, n=n: chunks[chunk, n].step_ns) for n in (c.lookup_ns[0], c.lookup_ns[-1])]  # type: ignore[misc]
    by_centroids = [kvdrive(study, centroids=n) for n in c.centroid_sweep]
    graphs = [kvdrive(study, centroids=n, overrides={LAUNCH: 0}) for n in c.centroid_sweep]
    exponents = [
        _exponent(c.centroid_sweep, [stage_ns(r, ("select",)) for r in each]) for each in (by_centroids, graphs)
    ]
    batches = [kvdrive(study, batch=b) for b in c.lookup_batches]
    per_layer = [stage_ns(run, ("select",)) / c.layers / 1e6 for run in batches]
    kept = kept_by(study)
    lost = [many.mass_recall - few.mass_recall for few, many in kept.centroids]
    coarser = [four.mass_recall - eight.mass_recall for four, eight in kept.chunks]
    runs = [*chunks.values(), *by_centroids, *graphs, *batches]
    claims = (
        Claim("Fig. 17: chunks of 4 tokens are faster than 1 or 8", over(float(c.best_chunk)), float(best[0]),
              over(*map(float, best)), "2 to 200 ns for each entry that is looked up"),
        Claim("Fig. 18: a lookup takes 0.2 to 0.8 ms in a layer (8,192 centroids)", c.lookup_ms, per_layer[-1],
              over(*per_layer), f"batch {c.lookup_batches[0]} to {c.lookup_batches[-1]}"),
        Claim("Fig. 18: a lookup's time grows as the number of centroids (exponent)", c.proportional, exponents[0],
              over(*exponents), "a launch takes 0 (in a graph) to 5 µs"),
        Claim("Fig. 19: 4 times fewer centroids lose less than a point of attention's mass (SmolLM2)",
              at_most(c.recall_loss), sum(lost) / len(lost), over(*lost), f"{c.prompts} prompts"),
    )  # fmt: skip
    details = {
        "step ms by chunk": {f"{chunk}, {n:g} ns": run.step_ns / 1e6 for (chunk, n), run in chunks.items()},
        "select ms of a layer by centroids": {
            str(n): stage_ns(run, ("select",)) / c.layers / 1e6
            for n, run in zip(c.centroid_sweep, by_centroids, strict=True)
        },
        "mass recall": kept.details,
    }
    reason = (
        "in time larger chunks can only win where hits do not depend on them, and the score trace has the same hits "
        f"for all. On the real model chunks of 8 keep {sum(coarser) / len(coarser):.3f} less of attention's mass than "
        f"chunks of 4; {reasons(*runs)}"
    )
    return Check("K7", "the index", claims, provenance(*runs), study.seed, reason, details)


def _exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The exponent with which times grow from the first size to the last."""
    return math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0])


def on_ssd(study: Study) -> Check:
    """K8: throughput with an SSD under DRAM, over the drive's rate and what DRAM holds besides."""
    c = CONSTANTS
    alone = kvdrive(study)
    runs = {
        (rate, share): kvdrive(study, persistent="auto", dram_share=share, overrides={SSD: rate})
        for rate in c.ssd_rates
        for share in c.dram_shares
    }
    ratios = {key: whole_step_ns(alone) / whole_step_ns(run) for key, run in runs.items()}
    middle = ratios[c.ssd_rates[1], c.dram_shares[1]]
    claims = (
        Claim("Fig. 21: DRAM and SSD reach 0.60 (± 0.1) of DRAM alone",
              (c.ssd_share - c.ssd_tolerance, c.ssd_share + c.ssd_tolerance), middle, over(*ratios.values()),
              "drive of 3 to 7 GB/s; DRAM holds none to three quarters of the entries"),
    )  # fmt: skip
    details = {
        f"{rate / 1e9:g} GB/s, DRAM holds {share:g}": {
            "ratio": ratios[rate, share],
            "share of misses from the SSD": from_ssd(run),
            "hit rate": hit_rate(run),
            **_drive(run),
        }
        for (rate, share), run in runs.items()
    }
    every = [alone, *runs.values()]
    return Check("K8", "DRAM and SSD", claims, provenance(*every), study.seed, reasons(*every), details)


def _drive(run: Observed) -> dict[str, float]:
    """What the drive gave while it was read: useful and media bytes per ns, and the share that was useful."""
    useful, media = (sum(each[n] for each in run.result.details.values()) for n in ("useful_nbytes", "media_nbytes"))
    steps = len(run.result.step_ns) + CONSTANTS.warmup_steps
    busy = run.result.devices["emu:nvme"].busy_ns * steps / len(run.result.step_ns)
    return {
        "useful GB/s": useful / busy if busy else 0.0,
        "media GB/s": media / busy if busy else 0.0,
        "useful share": useful / media if media else 1.0,
    }


def small_gpu(study: Study) -> Check:
    """K9: an RTX 4090 with KVDrive against an H20 that holds everything."""
    c = CONSTANTS
    known = find_model(c.model)
    ratios: dict[int, float] = {}
    alone: dict[int, float] = {}
    rows, runs = {}, []
    for context, batch in c.llama_batches:
        ours = kvdrive(study, context, batch, platform=c.rtx4090, layers=0)
        most = largest_batch(context)
        full, one = (
            baseline(study, ALL_GPU, context, b, platform=c.h20, layers=0) if b else None for b in (most, min(most, 1))
        )
        runs += [run for run in (ours, full, one) if run is not None]
        rate = batch / ours.step_ns
        theirs = 0.0 if full is None else most / full.step_ns
        ratios[context] = rate / theirs if theirs else math.nan
        alone[context] = rate * one.step_ns if one is not None else math.nan
        rows[str(context)] = {
            "KVDrive, batch": batch, "tokens/s": rate * 1e9, "all-gpu, largest batch": most,
            "all-gpu tokens/s": theirs * 1e9, "refused": ours.result.refused or (full and full.result.refused) or "",
        }  # fmt: skip
    found = [r for r in (*ratios.values(), *alone.values()) if r == r]
    best = max((r for r in ratios.values() if r == r), default=math.nan)
    memory = c.gpu_nbytes[1] / c.gpu_nbytes[2]
    claims = (
        Claim("Fig. 23: up to 3 times (± 15 %) the throughput of an all-GPU H20",
              near(c.over_all_gpu, c.band_tolerance), best, over(best, *found),
              "all-GPU's batch: 1 to the largest that fits; 60K to 360K tokens"),
        Claim("Fig. 23: with 4 times less GPU memory", over(c.less_memory), memory, over(memory)),
    )  # fmt: skip
    details = {"by context": rows, "weights, bytes": known.weight_nbytes()}
    reason = (
        f"the all-GPU baseline reads its cache at what its memory gives; for {c.over_all_gpu:g} times it would have to "
        f"take {c.over_all_gpu / best:.1f} times as long. Batches are those of the paper; {reasons(*runs)}"
    )
    return Check("K9", "a small GPU against a large one", claims, provenance(*runs), study.seed, reason, details)


def largest_batch(context: int) -> int:
    """Requests of the model that fit an H20 beside the weights, some of it left for what a step needs."""
    known = find_model(CONSTANTS.model)
    room = int(CONSTANTS.all_gpu_share * CONSTANTS.gpu_nbytes[1]) - known.weight_nbytes()
    return room // ((context + 64) * known.kv_nbytes())


def pipelines(study: Study) -> Check:
    """K11: the three pipelines, and how close the disaggregated one comes to its longest stage."""
    c = CONSTANTS
    context, window = c.pipeline_context, c.pipeline_window
    ours = {b: kvdrive(study, context, b, window=window) for b in c.pipeline_batches}
    most = c.pipeline_batches[-1]
    sequential = kvdrive(study, context, most, window=window, pipeline="sequential")
    ahead = {p: kvdrive(study, context, most, window=window, pipeline="prefetch", predicted=p) for p in c.predicted}
    a, t_c = _attention_ns(sequential), _attention_ns(ours[most])
    b = {p: _attention_ns(run) for p, run in ahead.items()}
    over_longest = {n: _attention_ns(run) / max(_stages(run).values()) for n, run in ours.items()}
    runs = [*ours.values(), sequential, *ahead.values()]
    predicted = "a predicted query finds 80 to 100 % of the entries"
    claims = (
        Claim(f"Fig. 10: prefetching takes no longer than one after the other (T_b / T_a, batch {most})", at_most(1.0),
              b[1.0] / a, over(*(each / a for each in b.values())), predicted),
        Claim(f"Fig. 10: the disaggregated pipeline takes no longer than prefetching (T_c / T_b, batch {most})",
              at_most(1.0), t_c / b[1.0], over(*(t_c / each for each in b.values())), predicted),
        Claim(f"… and comes within 10 % of its longest stage ({most} micro-batches)", at_most(1 + c.longest_tolerance),
              over_longest[most], over(over_longest[most])),
    )  # fmt: skip
    details = {
        "T_c over its longest stage, by micro-batches": over_longest,
        "ms of a step's attention": {"sequential": a / 1e6, "disaggregated": t_c / 1e6,
                                     **{f"prefetch, {p:.0%} found": each / 1e6 for p, each in b.items()}},
        "busy ms of stages": {name: ns / 1e6 for name, ns in _stages(ours[most]).items()},
    }  # fmt: skip
    reason = f"a stage is what one resource does for all layers' attention: GPU, CPU, copy engine; {reasons(*runs)}"
    return Check("K11", "pipelines", claims, provenance(*runs), study.seed, reason, details)


def _stages(run: Observed) -> dict[str, float]:
    """Busy ns in a step of what each resource does for attention."""
    return {
        "GPU": stage_ns(run, ("append", "select", "attend")),
        "CPU": stage_ns(run, ("evaluate",)),
        "copies to the GPU": stage_ns(run, ("transfer",)),
    }
