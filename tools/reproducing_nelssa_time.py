"""N1 to N3: where the two branches cross, throughput over length, batch and bandwidth, and what a step is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tierloop.runtime.crossover import Constants as Equations
from tierloop.runtime.crossover import crossover, gpu_ns, pnm_time
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, over
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_runs import (
    baseline_rate,
    equations,
    fit,
    fitting,
    head_ns,
    near,
    of_whole,
    on_gpu,
    pnm_ns,
    provenance,
    reasons,
    share,
    tokens_per_s,
    whole_ns,
)

Row = dict[str, Any]

# -- N1 -----------------------------------------------------------------------------------------------------------


def crossovers(study: Study) -> Check:
    """N1: the length from which on the near branch is faster, by Eq. 3 and as steps of both branches cross."""
    counts, runs = CONSTANTS.devices, list[Observed]()
    found = {n: measured_crossover(study, n, runs) for n in counts}
    counted = {n: found_equations(study, n) for n in counts}
    # Eq. 1 to 3 in closed form: communication does not know how many devices there are.
    closed = {n: counted[counts[0]].on(n) for n in counts}
    plain, full = ({n: crossover(each).tokens or math.inf for n, each in of.items()} for of in (closed, counted))
    falls = [max(b / a for a, b in pairwise(of.values())) for of in (plain, found)]
    off = {name: [found[n] / of[n] - 1 for n in counts] for name, of in (("plain", plain), ("counted", full))}
    worst = {name: max(map(abs, each)) for name, each in off.items()}
    never, rising = _never(study)
    small = CONSTANTS.crossover_tolerance
    claims = (
        Claim("Eq. 3: the crossover falls with every device (largest ratio of neighbours)", (0.0, 1 - 1e-9),
              falls[0], over(falls[0])),
        Claim("… and so does the crossover of steps that were run", (0.0, 1 - 1e-9), falls[1], over(falls[1])),
        Claim(f"Eq. 3, communication as of one device: off the run by at most {small:.0%}", at_most(small),
              worst["plain"], over(worst["plain"])),
        Claim(f"Eq. 3, with the copies to and from each device: off by at most {small:.0%}", at_most(small),
              worst["counted"], over(worst["counted"])),
        Claim("S = 4 %, one device at 100 GB/s never wins: Eq. 3 says so (1)", (1.0, 1.0), float(never),
              over(float(never))),
        Claim("… and in runs the near branch falls behind further with every token (ns per token)", at_least(0.0),
              rising, over(rising)),
    )  # fmt: skip
    details = {
        "crossover, tokens": [
            {"devices": n, "Eq. 3, T_comm of one device": plain[n], "Eq. 3, T_comm(N)": full[n], "run": found[n]}
            for n in counts
        ],
        "off": off,
        "constants by devices": {str(n): counted[n].as_dict() for n in counts},
    }
    extra = [counted[n].comm_ns - counted[counts[0]].comm_ns for n in counts]
    reason = (
        "what the closed form leaves out is T_comm's dependence on N: the GPU copies queries to each device and states "
        "from each, one after another, which adds "
        + ", ".join(f"{ns / 1e6 / share(CONSTANTS.layers):.2f} ms" for ns in extra)
        + f" to a step of the whole model with {', '.join(map(str, counts))} devices. More than two devices move the "
        f"crossover up again; {reasons(*runs)}"
    )
    return Check("N1", "where near memory begins to win", claims, provenance(*runs), study.seed, reason, details)


def found_equations(study: Study, devices: int, **options: Any) -> Equations:
    """The constants that the devices estimate, as the policy finds them."""
    return equations(near(study, CONSTANTS.crossover_contexts[0], devices=devices, threshold_tokens=0, **options))


def measured_crossover(
    study: Study,
    devices: int,
    runs: list[Observed],
    contexts: Sequence[int] = CONSTANTS.crossover_contexts,
    batch: int = 1,
) -> float:
    """Where the steps of both branches take as long: of lines through their times, as clusters are drawn."""
    ours = [near(study, n, batch, devices=devices) for n in contexts]
    theirs = [on_gpu(study, n, batch) for n in contexts]
    runs += [*ours, *theirs]
    (a, slope), (b, steeper) = (fit(contexts, [run.step_ns for run in of]) for of in (ours, theirs))
    return (a - b) / (steeper - slope) if steeper > slope else math.inf


def _never(study: Study) -> tuple[bool, float]:
    rate, contexts = CONSTANTS.never_bandwidth, CONSTANTS.never_contexts
    says = crossover(found_equations(study, 1, bandwidth=rate)).tokens is None
    near_slope = fit(contexts, [near(study, n, devices=1, bandwidth=rate).step_ns for n in contexts])[1]
    return says, near_slope - _dense_slope(study)


# -- N2 -----------------------------------------------------------------------------------------------------------


def throughput(study: Study) -> Check:
    """N2: tokens/s over length, batch and bandwidth, against one and two GPUs."""
    rows = throughput_rows(study)
    rates = CONSTANTS.bandwidths
    of = {(r["context"], r["batch"], r["GB/s"]): r for r in rows}
    fastest = rates[-1] // 10**9

    def ratios(measured: bool, rate: int) -> list[float]:
        return [r["over 2 GPUs"] for r in rows
                if r["GB/s"] == rate and (r["range"] == "measured") == measured and r["over 2 GPUs"]]  # fmt: skip

    by_length = [of[n, CONSTANTS.batches[-1], fastest]["over 2 GPUs"] for n in CONSTANTS.contexts]
    by_length = [each for each in by_length if each]
    by_batch = [of[CONSTANTS.contexts[1], b, fastest]["over 2 GPUs"] for b in CONSTANTS.batches]
    falls = sum(b <= a for of_one in (by_length, by_batch) for a, b in pairwise(of_one))
    low, high = CONSTANTS.parity
    every = [rate // 10**9 for rate in rates]
    least, most, best = ([f(ratios(m, rate)) for rate in every] for f, m in ((min, True), (max, True), (max, False)))
    either = "100 to 200 GB/s, overheads scaled"
    claims = (
        Claim("Fig. 10: the gain over two GPUs grows with length and with batch (falls)", at_most(0.0),
              float(falls), over(float(falls))),
        Claim(f"within the prototype's capacity: at least {low:g} times two GPUs, everywhere", at_least(low),
              least[-1], over(*least), either),
        Claim(f"within the prototype's capacity: at most {high:g} times two GPUs, everywhere", at_most(high),
              max(most), over(max(most)), either),
        Claim("beyond it, with 512 GB: 2 to 6 times two GPUs at best", CONSTANTS.projected,
              best[-1], over(*best), either),
    )  # fmt: skip
    reason = (
        f"where not one request fits two GPUs (1,024,000 tokens) there is no ratio: X. The paper's "
        f"{CONSTANTS.paper_speedup:g} times is at 1M tokens, batch 8, over a baseline that it does not name and that "
        f"is not vLLM on one or two GPUs. One request: {of[CONSTANTS.contexts[0], 1, fastest]['over 2 GPUs']:.2f} "
        f"times two GPUs at {CONSTANTS.contexts[0]:,} tokens; {rows[0]['reason']}"
    )
    weakest = "extrapolated" if any(r["provenance"] == "extrapolated" for r in rows) else "simulated"
    return Check("N2", "throughput over length and batch", claims, weakest, study.seed, reason, {"rows": rows})


def throughput_rows(study: Study) -> list[Row]:
    """Every length, batch and bandwidth, with four devices and the paper's share of clusters."""
    return [
        throughput_row(study, n, batch, rate)
        for n in CONSTANTS.contexts
        for batch in CONSTANTS.batches
        for rate in CONSTANTS.bandwidths
    ]


def throughput_row(study: Study, context: int, batch: int, rate: int | None, **options: Any) -> Row:
    """One point: tokens/s near memory, on one and two GPUs (None: no request fits), and what kind of number it is."""
    run = near(study, context, batch, bandwidth=rate, **options)
    gpus = [baseline_rate(study, context, batch, count) for count in (1, 2)]
    ours = tokens_per_s(run, batch) if run.result.refused is None else None
    return {
        "context": context,
        "batch": batch,
        "GB/s": None if rate is None else rate // 10**9,
        "tokens/s": ours,
        **{f"{count} GPU": each or None for count, each in zip((1, 2), gpus, strict=True)},
        "running on 2 GPUs": fitting(context, batch, 2),
        "over 1 GPU": ours / gpus[0] if ours and gpus[0] else None,
        "over 2 GPUs": ours / gpus[1] if ours and gpus[1] else None,
        "range": "measured" if context * batch <= CONSTANTS.measured_tokens else "projected",
        "provenance": provenance(run),
        "reason": reasons(run),
    }


# -- N3 -----------------------------------------------------------------------------------------------------------


def breakdown(study: Study) -> Check:
    """N3: what a step is made of, and what Eq. 2 says of it."""
    rows, runs = [], []
    counted = found_equations(study, 4)
    plain = replace(counted, comm_ns=found_equations(study, 1).comm_ns)
    for context, batch in CONSTANTS.breakdown:
        run = near(study, context, batch)
        runs.append(run)
        rows.append(_parts(study, run, context, batch, plain, counted))
    off = {name: [row[name] / row["step ms"] - 1 for row in rows] for name in ("Eq. 2 ms", "Eq. 2, T_comm(N) ms")}
    worst = [max(map(abs, each)) for each in off.values()]
    most = CONSTANTS.breakdown_tolerance
    claims = (
        Claim(f"Fig. 11: Eq. 2 with communication as of one device is off a step by at most {most:.1%}", at_most(most),
              worst[0], over(worst[0])),
        Claim(f"… with the copies to and from each device: at most {most:.1%}", at_most(most),
              worst[1], over(worst[1])),
    )  # fmt: skip
    details = {"rows": rows, "off": off}
    reason = (
        "a step is that of the whole model, projections and MLP as in the run on the GPU alone; Eq. 2 has the search "
        "and the devices' attention once for each request, communication once. What is left at batch 8 is "
        "communication that grows with the batch "
        f"(queries, states and cluster numbers of each request), which Eq. 2 does not have; {reasons(*runs)}"
    )
    return Check("N3", "what a step is made of", claims, provenance(*runs), study.seed, reason, details)


def _parts(study: Study, run: Observed, context: int, batch: int, plain: Equations, counted: Equations) -> Row:
    layers, times = CONSTANTS.layers, share(CONSTANTS.layers)
    launches = max(w.launches for (d, k), w in run.work.items() if "pnm" in d and k == "attend")
    overhead = launches * CONSTANTS.device_ns
    busy, step = max(pnm_ns(run)), whole_ns(run)
    transfer = sum(run.result.stages.get(name, 0) for name in ("queries", "states", "decide"))
    short = CONSTANTS.crossover_contexts[0]
    alone = on_gpu(study, short)
    others = alone.step_ns - gpu_ns(counted, short) + (batch - 1) * _per_request(study)

    def modelled(equations: Equations) -> float:
        parts = pnm_time(equations, context)
        return others + batch * (parts.search_ns + parts.attention_ns) + parts.comm_ns

    return {
        "context": context,
        "batch": batch,
        "step ms": step / 1e6,
        "near attention ms": (busy - overhead) / times / 1e6,
        "near overhead ms": overhead / times / 1e6,
        "transfers ms": transfer / times / 1e6,
        "others ms": (step - (busy + transfer) / times) / 1e6,
        "Eq. 2 ms": of_whole(modelled(plain), head_ns(run), layers) / 1e6,
        "Eq. 2, T_comm(N) ms": of_whole(modelled(counted), head_ns(run), layers) / 1e6,
    }


def _per_request(study: Study) -> float:
    """What a further request costs beside attention: activations of the modules."""
    c = CONSTANTS
    one, two = (on_gpu(study, c.crossover_contexts[0], batch) for batch in (1, 2))
    return two.step_ns - one.step_ns - (c.crossover_contexts[0] * _dense_slope(study))


def _dense_slope(study: Study) -> float:
    contexts: Sequence[int] = CONSTANTS.crossover_contexts[-2:]
    return fit(contexts, [on_gpu(study, n).step_ns for n in contexts])[1]
