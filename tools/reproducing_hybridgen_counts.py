"""H1, H2 and H8: what is counted and not timed. FLOPs of a block, the size of the cache, and bytes over the link."""

from __future__ import annotations

import math

from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.reproduction import Check, Claim, near, over
from tierloop.runtime.study import Observed, Study
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS
from tierloop.tools.reproducing_hybridgen_runs import CPU_ATTENTION, STREAM, baseline, hybrid, provenance

ATTENTION = ("attend", "logits", "combine")


def flops(study: Study) -> Check:
    """H1: FLOPs of a transformer block without its FFN, counted from the commands of a step over all rows."""
    known, context = find_model(CONSTANTS.model), CONSTANTS.flops_context
    run = hybrid(study, known.name, context - 1, k=None, budget=1.0)
    layers = known.num_layers
    attention = run.flops(*ATTENTION) / layers
    projections = run.flops("qkv") / layers + 2 * known.num_q_heads * known.head_dim * known.hidden
    counted = attention + projections
    on_cpu = sum(w.flops for (device, kernel), w in run.work.items() if kernel in ATTENTION and device != "emu:gpu")
    closed = 4 * context * known.hidden + 8 * known.hidden**2
    claims = (
        Claim(
            f"Fig. 5: {CONSTANTS.flops_claimed:.4g} FLOPs in a block of OPT-13B at 64 Ki tokens, FFN left out",
            near(CONSTANTS.flops_claimed, CONSTANTS.flops_tolerance),
            counted,
            over(counted),
        ),
        Claim("4·L·D + 8·D², in closed form", over(closed), counted, over(counted)),
    )
    details = {
        "attention": attention,
        "projections": projections,
        "closed_form": closed,
        "shape_says": known.block_flops(context),
        "attention_on_cpu": on_cpu / layers,
        "share_on_cpu": on_cpu / layers / counted,
    }
    return Check("H1", "FLOPs of a block", claims, "simulated", study.seed, details=details)


def crossover(study: Study) -> Check:
    """H2: the number of tokens at which the cache is as large as the weights."""
    known = find_model(CONSTANTS.model)
    tokens = known.weight_nbytes() / known.kv_nbytes()
    # Biases are no part of the shape: of a layer 9·D (4 projections, 4·D and D of the MLP) and 2·D of its norms.
    biases = (known.num_layers * 11 + 1) * known.hidden * 2
    with_biases = (known.weight_nbytes() + biases) / known.kv_nbytes()
    claims = (
        Claim(
            f"Fig. 1: KV of OPT-13B is as large as its weights at {CONSTANTS.crossover_claimed:,.0f} tokens (± 1 %)",
            near(CONSTANTS.crossover_claimed, CONSTANTS.crossover_tolerance),
            tokens,
            over(tokens, with_biases),
            "biases counted or not",
        ),
    )
    details = {"weight_nbytes": known.weight_nbytes(), "kv_nbytes_per_token": known.kv_nbytes()}
    return Check("H2", "where the cache outgrows the weights", claims, "simulated", study.seed, details=details)


def traffic(study: Study) -> Check:
    """H8: bytes over the link per step: in proportion to L, to K, or to neither."""
    short, long = CONSTANTS.traffic_contexts
    few, many = CONSTANTS.traffic_ks
    model, off = CONSTANTS.model, CONSTANTS.traffic_tolerance
    aog = [baseline(study, STREAM, model, n) for n in (short, long)]
    aoc = [baseline(study, CPU_ATTENTION, model, n) for n in (short, long)]
    ours = {(n, k): hybrid(study, model, n, k=k) for n in (short, long) for k in (few, many)}
    in_l, constant = _slope(aog, short, long), _slope(aoc, short, long)
    in_k = [_slope([ours[n, few], ours[n, many]], few, many) for n in (short, long)]
    ours_in_l = [_slope([ours[short, k], ours[long, k]], short, long) for k in (few, many)]

    def claim(paper: str, exponent: float, found: list[float]) -> Claim:
        return Claim(paper, (exponent - off, exponent + off), found[0], over(*found), "" if len(found) == 1 else "L, K")

    claims = (
        claim("Fig. 4: AoG's traffic grows as L (exponent 1)", 1, [in_l]),
        claim("Fig. 4: AoC's traffic does not depend on L (exponent 0)", 0, [constant]),
        claim("Fig. 4: HybridGen's traffic grows as K (exponent 1)", 1, in_k),
        claim("Fig. 4: HybridGen's traffic does not depend on L (exponent 0)", 0, ours_in_l),
    )
    known = find_model(model)
    width, layers = known.num_kv_heads * known.head_dim, known.num_layers
    details = {
        "per layer and step, bytes": {
            f"AoG at {long}": _link(aog[1]) / layers,
            f"AoG at {long}, 4·L·D": 4 * long * width,
            f"AoC at {long}": _link(aoc[1]) / layers,
            "AoC, 4·D": 4 * width,
            f"HybridGen, K = {many}": _link(ours[long, many]) / layers,
            f"HybridGen, K = {many}, 2·K·D + 2·K·H": 2 * many * (width + known.num_q_heads),
        }
    }
    reason = "queries, logits and states cross the link as float32; the paper's formulas have 2 bytes for each"
    return Check(
        "H8", "traffic over the link", claims, provenance(*aog, *aoc, *ours.values()), study.seed, reason, details
    )


def _link(run: Observed) -> int:
    link = run.result.links["pcie"]
    return link.bytes_forward + link.bytes_back


def _slope(runs: list[Observed], low: int, high: int) -> float:
    """The exponent with which bytes grow from one number to another."""
    return math.log(_link(runs[1]) / _link(runs[0])) / math.log(high / low)
