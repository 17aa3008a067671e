"""What reviewers asked of NELSSA, as tables: what kind of number each one is, and what the results are sensitive to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierloop.devices.registry import find_platform
from tierloop.devices.tables import read_toml
from tierloop.emulators.profile import find_profile, read_profile
from tierloop.runtime.crossover import Pool
from tierloop.runtime.reproduction import Check, Table
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_model import recall_rows, text_rows
from tierloop.tools.reproducing_nelssa_runs import (
    DEVICES,
    baseline_rate,
    fitting,
    model,
    near,
    on_gpu,
    provenance,
    reasons,
    tokens_per_s,
    whole_ns,
)
from tierloop.tools.reproducing_nelssa_serving import LONG, SHORT, reason_of, serve
from tierloop.tools.reproducing_nelssa_time import measured_crossover, throughput_row, throughput_rows

Row = dict[str, Any]
Checks = Mapping[str, Callable[[Study], Check]]

OF_THE_PAPER = {
    "N1": "model", "N2": "measured up to 1M tokens in all, projected beyond", "N3": "measured, and model",
    "N4": "emulated: injected occupancy", "N5": "measured, and emulated", "N6": "measured", "N7": "measured",
    "N8": "model", "N9": "arithmetic", "N10": "measured at about 100K", "N11": "borrowed from RetroInfer",
}  # fmt: skip
"""What the paper's own numbers are, as its reviewers read it."""
ON_BYTES = {"N6": (4,), "N7": (0, 1, 2, 4), "N11": (0, 1)}
"""Claims that are decided by real keys and tokens, and by no time: they are measured, whatever clock ran."""


def classification(checks: Checks) -> Callable[[Study], Sequence[Table]]:
    """Every claim with what kind of number it is, there and here."""

    def ask(study: Study) -> Sequence[Table]:
        rows = []
        for name, run in checks.items():
            check = run(study)
            for number, claim in enumerate(check.claims):
                kind = "measured" if number in ON_BYTES.get(name, ()) else check.provenance
                row = {"check": name, "claim": claim.paper, "in the paper": OF_THE_PAPER[name], "here": kind}
                rows.append(row | {"passed": claim.passed, "provenance": kind, "reason": check.reason})
        notes = ("extrapolated: assumed constants of the platform, and few layers or one locality that stand for all",)
        return [Table("classification", "what kind of number is each?", tuple(rows), notes)]

    return ask


def throughput(study: Study) -> Sequence[Table]:
    """N2's grid, and one more of the inputs at a time."""
    c = CONSTANTS
    batch = c.batches[-1]
    shares = [
        {"S": s} | throughput_row(study, context, batch, None, budget=s) for context in c.contexts for s in c.budgets
    ]
    devices = [
        {"devices": n} | throughput_row(study, context, batch, None, devices=n)
        for context in c.contexts
        for n in c.devices
    ]
    x = "None: not one request fits (X). Fewer requests than the batch run where not all fit; the others wait"
    return [
        Table("throughput", "what comes of 100 to 200 GB/s, overheads scaled?", tuple(throughput_rows(study)), (x,)),
        Table("selection", "how sensitive is it to S from 1 to 8 %?", tuple(shares), (x,)),
        Table("devices", "what do one to eight devices give?", tuple(devices), (x,)),
    ]


def thresholds(study: Study) -> Sequence[Table]:
    """A threshold that is off: by length for one request, and served, with and without the closed loop."""
    c = CONSTANTS
    single, served = [], []
    for context in c.threshold_contexts:
        for scale in c.threshold_scales:
            run = near(study, context, threshold_tokens=0, threshold_scale=scale, index_share=c.index_share_of_mixes)
            where = "near" if run.result.details["requests"]["near"] else "GPU"
            row = {"context": context, "scale": scale, "where": where, "ms": whole_ns(run) / 1e6}
            single.append(_row(row, run))
    for prompt in c.threshold_prompts:
        for adaptive in (False, True):
            served += [_served_with(study, prompt, scale, adaptive) for scale in c.threshold_served]
    crossing = []
    for batch in c.crossover_batches:
        runs: list[Observed] = []
        tokens = measured_crossover(study, 4, runs, c.batch_contexts if batch > 1 else c.crossover_contexts, batch)
        crossing.append(_row({"batch": batch, "crossover of steps": tokens}, *runs))
    return [
        Table("threshold", "what does a wrong threshold cost one request?", tuple(single)),
        Table("threshold-served", "does a mis-set threshold degrade gracefully, and what does the loop gain?",
              tuple(served)),
        Table("crossover-batch", "where do the branches cross in a batch of equal requests?", tuple(crossing),
              ("Eq. 3 is of one request; communication is shared by those of a batch",)),
    ]  # fmt: skip


def _served_with(study: Study, prompt: int, scale: float, adaptive: bool) -> Row:
    c = CONSTANTS
    run = serve(
        study, "NELSSA", c.threshold_share, requests=c.requests_in_place, long_prompt=prompt, threshold_scale=scale,
        adaptive=adaptive,
    )  # fmt: skip
    return {
        "long prompt": prompt,
        "closed loop": adaptive,
        "scale": scale,
        "threshold at the end": run.details["threshold_tokens"],
        "tokens/s": run.tokens_per_s,
        "short TPOT p95": run.of(SHORT).tpot_ms["p95"],
        "long TPOT p50": run.of(LONG).tpot_ms["p50"],
        "migrations": run.migrations,
        "preemptions": run.preemptions,
        "refused or failed": len(run.failures) + (run.refused is not None),
        "provenance": run.provenance,
        "reason": reason_of(run),
    }


def contention(study: Study) -> Sequence[Table]:
    """The link that the GPU shares for all devices, as it gets slower; how many devices use it at a time."""
    c, rows = CONSTANTS, []
    for context, batch in (c.breakdown[1], (c.contexts[-1], c.batches[-1])):
        for rate in c.link_rates:
            for devices in c.devices[1:3]:
                run = near(study, context, batch, devices=devices, links={"links.pcie.bytes_per_s": rate})
                link = run.result.links["pcie"]
                row = {"context": context, "batch": batch, "link GB/s": rate / 1e9, "devices": devices}
                row |= {"tokens/s": tokens_per_s(run, batch), "link busy": link.busy_ns / run.result.elapsed_ns}
                rows.append(_row(row, run))
    return [Table("contention", "what if all devices contend for one link?", tuple(rows))]


def capacities(study: Study) -> Sequence[Table]:
    """Devices of 32 to 512 GiB: requests that run at a time, and throughput."""
    c, rows = CONSTANTS, []
    for context in c.contexts[::3]:
        for gib in c.capacities_gib:
            held = Pool(gib << 30, DEVICES).tokens(model().kv_nbytes()) // context
            batch = min(held, c.batches[-1])
            row: Row = {"context": context, "GiB": gib, "fit": held, "batch": batch}
            run = near(study, context, max(batch, 1), capacity=gib << 30)
            fits = batch and run.result.refused is None
            row |= {"tokens/s": tokens_per_s(run, batch) if fits else None}
            row |= {"2 GPUs": baseline_rate(study, context, c.batches[-1], 2) or None}
            rows.append(_row(row, run))
    notes = (f"batch: at most {c.batches[-1]}, of whole requests by arithmetic; None: they leave no working space",)
    return [Table("capacity", "what does more memory give?", tuple(rows), notes)]


def energy(study: Study) -> Sequence[Table]:
    """Joules and dollars per token, as far as profiles know what devices draw and cost."""
    c, rows = CONSTANTS, []
    machines = {"NELSSA": (c.platform, 0), "1 GPU": (c.one_gpu, 1), "2 GPUs": (c.two_gpus, 2)}
    batch = c.batches[-1]
    for context in c.contexts[:3]:
        joules_two = _known(c.two_gpus, "power_watts")[0] / baseline_rate(study, context, batch, 2)
        for name, (platform, gpus) in machines.items():
            if gpus:
                run = on_gpu(study, context, max(fitting(context, batch, gpus), 1), gpus=gpus)
                rate = baseline_rate(study, context, batch, gpus)
            else:
                run = near(study, context, batch)
                rate = tokens_per_s(run, batch)
            watts, unknown = _known(platform, "power_watts")
            _, prices = _known(platform, "price_usd")
            spare = (joules_two * rate - watts) / DEVICES if name == "NELSSA" else None
            row = {"context": context, "batch": batch, "machine": name, "tokens/s": rate or None}
            row |= {"known watts": watts, "J/token, known": watts / rate if rate else None}
            row |= {"power unknown of": ", ".join(unknown) or "none", "price unknown of": ", ".join(prices) or "none"}
            rows.append(_row(row | {"W per PNM to equal 2 GPUs": spare}, run))
    notes = (
        "watts are the most that a device draws by its datasheet; hosts are left out, since they are in all machines; "
        "no price is published, so dollars per token are unknown",
    )
    return [Table("energy", "what do energy and money per token come to?", tuple(rows), notes)]


def _known(platform: str, cost: str) -> tuple[int, list[str]]:
    """The sum over the devices of a platform, and the names of those that do not say."""
    total, unknown = 0, []
    path = find_platform(platform)
    devices: dict[str, Any] = {}
    for each in (*read_toml(path).get("include", []), None):
        source = path if each is None else find_platform(each)
        for name, values in read_toml(source).get("devices", {}).items():
            devices[name] = {**devices.get(name, {}), **values}
    for name, values in devices.items():
        if name == "dram":
            continue
        found = read_profile(find_profile(values["profile"], path.parent)).costs.get(cost)
        if found is None:
            unknown.append(name)
        else:
            total += found
    return total, unknown


def layer_sampling(study: Study) -> Sequence[Table]:
    """Two layers that stand for 32, against all of them."""
    c, rows = CONSTANTS, []
    for context, batch in ((c.contexts[0], 1), (c.contexts[0], 8), (c.contexts[-1], 1)):
        some, every = near(study, context, batch), near(study, context, batch, layers=0)
        row = {"what": f"step, {batch} × {context:,}", "2 layers": whole_ns(some) / 1e6}
        row |= {"all layers": every.step_ns / 1e6, "off": whole_ns(some) / every.step_ns - 1}
        rows.append(_row(row, some, every))
    few, full = (
        serve(study, "NELSSA", c.long_shares[-1], requests=c.sampling_requests, layers=layers) for layers in (2, 0)
    )
    for what, of in (("P50", "p50"), ("P95", "p95")):
        a, b = few.tpot_ms[of], full.tpot_ms[of]
        assert a is not None, "requests were served"
        assert b is not None, "requests were served"
        row = {"what": f"{what} of TPOT, {c.sampling_requests} requests served", "2 layers": a, "all layers": b}
        rows.append(row | {"off": a / b - 1, "provenance": few.provenance, "reason": reason_of(few)})
    return [Table("layer-sampling", "what is lost by 2 layers that stand for 32?", tuple(rows))]


def accuracy(study: Study) -> Sequence[Table]:
    """Scores of each task against dense attention, at each share of clusters."""
    c, rows = CONSTANTS, []
    found = {(study.model, c.text_context): text_rows(study, c.budgets, c.text_tasks)}
    found |= {("recall model", n): recall_rows(study, n, c.budgets) for n in c.recall_contexts}
    for (keys, context), of in found.items():
        for each in of:
            row = {"keys": keys, "context": context, "task": each.task, "S": each.budget, "cases": each.cases}
            row |= {"score": each.score, "dense": each.dense_score, "mass recall": each.mass_recall}
            rows.append(row | {"output error": each.output_error, "provenance": "measured", "reason": ""})
    return [Table("accuracy", "what do tasks lose against dense attention?", tuple(rows))]


def _row(values: Row, *runs: Observed) -> Row:
    return {**values, "provenance": provenance(*runs), "reason": reasons(*runs)}
