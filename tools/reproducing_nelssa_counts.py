"""N8 and N9: how evenly a cache is divided over devices, and how many tokens each machine holds."""

from __future__ import annotations

from collections.abc import Callable

from tierloop.runtime.crossover import Pool, capacities
from tierloop.runtime.near_partition import PARTITIONS
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, near, over
from tierloop.runtime.study import Observed, PhantomRun, Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS
from tierloop.tools.reproducing_nelssa_runs import (
    ALL_GPU,
    NELSSA,
    gpu_room,
    memories,
    model,
    pnm_ns,
    pnm_room,
    provenance,
    reasons,
    whole_ns,
)
from tierloop.tools.reproducing_nelssa_runs import near as near_run

STEP = 2048
"""Tokens to which the largest request is found."""


def partitions(study: Study) -> Check:
    """N8: the busiest of the devices over their mean, and how long a step takes, over requests of skewed lengths."""
    lengths = CONSTANTS.skewed
    runs = {kind: near_run(study, max(lengths), len(lengths), contexts=lengths, partition=kind) for kind in PARTITIONS}
    uneven = near_run(study, max(lengths), len(lengths), contexts=lengths, devices=3)
    spread = {kind: _imbalance(run) for kind, run in runs.items()}
    steps = {kind: whole_ns(run) / 1e6 for kind, run in runs.items()}
    others = min(ms for kind, ms in steps.items() if kind != "head") / steps["head"]
    heads = model().num_kv_heads
    ceil = -(-heads // 3) * 3 / heads - 1
    claims = (
        Claim("Fig. 7: by head, 8 KV heads over 4 devices, the busiest is as busy as the mean (excess)",
              at_most(CONSTANTS.imbalance), spread["head"], over(spread["head"])),
        Claim("Fig. 7: by head a step takes the least time (the next best over it)", at_least(1.0), others,
              over(others)),
        Claim("3 devices: the excess is what ceil and floor of heads make, less what every launch costs",
              (0.0, ceil), _imbalance(uneven), over(_imbalance(uneven))),
    )  # fmt: skip
    details = {
        "excess of the busiest device": spread,
        "step, ms": steps,
        "busy, ms": {kind: [ns / 1e6 for ns in pnm_ns(run)] for kind, run in runs.items()},
        "3 devices": {"excess": _imbalance(uneven), "step, ms": whole_ns(uneven) / 1e6, "ceil/floor": ceil},
    }
    every = [*runs.values(), uneven]
    reason = f"8 requests of {min(lengths):,} to {max(lengths):,} tokens; {reasons(*every)}"
    return Check("N8", "dividing a cache over devices", claims, provenance(*every), study.seed, reason, details)


def _imbalance(run: Observed) -> float:
    busy = pnm_ns(run)
    return max(busy) * len(busy) / sum(busy) - 1


def capacity(study: Study) -> Check:
    """N9: tokens that each machine holds, by arithmetic and as policies admit them."""
    c, weights = CONSTANTS, model().weight_nbytes()
    pools = {
        "4 prototypes": Pool(c.prototype_nbytes, 4),
        "1 × H100": Pool(c.gpu_nbytes, 1, c.utilisation, weights),
        "2 × H100": Pool(c.gpu_nbytes, 2, c.utilisation, weights),
        "4 devices of 512 GiB": Pool(c.projected_nbytes, 4),
    }
    found = capacities(model().kv_nbytes(), pools)
    prototypes = {**gpu_room(0), **pnm_room(4, c.prototype_nbytes, 0)}
    options = {"threshold_tokens": 1, "near": memories(4)}
    admitted = {
        "4 prototypes": _largest(study, found["4 prototypes"], lambda n: PhantomRun(
            c.model, c.platform, NELSSA, n, options, prototypes)),
        "1 × H100": _largest(study, found["1 × H100"], lambda n: PhantomRun(
            c.model, c.one_gpu, ALL_GPU, n, {}, gpu_room(0, 1))),
        "2 × H100": _largest(study, found["2 × H100"], lambda n: PhantomRun(
            c.model, c.two_gpus, ALL_GPU, n, {}, gpu_room(0, 2))),
    }  # fmt: skip
    index = {s: _million(study, s) for s in (0.25, CONSTANTS.index_share)}
    claims = tuple(
        Claim(f"{name}: {tokens:,} tokens", near(tokens, share), float(found[name]), over(float(found[name])))
        for name, tokens, share in c.capacity_claimed
    )
    details = {
        "by arithmetic": found,
        "the largest request that is admitted": admitted,
        "requests of 1,024,000 tokens on 512 GiB devices, by the GPU's share for centroids": {
            str(s): count for s, count in index.items()
        },
        "centroids, bytes per token": model().kv_nbytes() // 2 // c.cluster_tokens,
    }
    reason = (
        f"admitted: {', '.join(f'{name} {n:,}' for name, n in admitted.items())}, to {STEP:,} tokens; sinks and newest "
        "rows of a near request lie on the GPU, working space of a step on every device. Four devices of 512 GiB hold "
        f"{found['4 devices of 512 GiB']:,} tokens, and the GPU's memory does not hold their centroids"
    )
    return Check("N9", "capacities", claims, "simulated", study.seed, reason, details)


def _largest(study: Study, about: int, run: Callable[[int], PhantomRun]) -> int:
    """The longest single request that is not refused, a multiple of `STEP`."""
    low, high = int(about * 0.9) // STEP, int(about * 1.05) // STEP
    while low + 1 < high:
        middle = (low + high) // 2
        if study.run(run(middle * STEP)).result.refused is None:
            low = middle
        else:
            high = middle
    return low * STEP


def _million(study: Study, index_share: float) -> int:
    """How many requests of a million tokens are taken in at a time on the projected devices."""
    batch = 1
    while batch < 16 and near_run(
        study, CONSTANTS.contexts[-1], batch + 1, index_share=index_share
    ).result.refused is None:  # fmt: skip
        batch += 1
    return batch
