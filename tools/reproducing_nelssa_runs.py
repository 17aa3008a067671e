"""The runs that NELSSA's checks share: near memory and its baselines, with memories as small as a few layers need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierloop.runtime.crossover import Constants as Equations
from tierloop.runtime.crossover import Pool
from tierloop.runtime.model_shapes import KnownShape, find_model
from tierloop.runtime.study import Observed, PhantomRun, Study
from tierloop.tools.reproducing_nelssa_constants import CONSTANTS

NELSSA, PAGED, ALL_GPU = "nelssa", "paged", "all-gpu"
DEVICES = 4
"""PNM devices of NELSSA's machine."""
Overrides = Mapping[str, Any]


def near(
    study: Study,
    context: int,
    batch: int = 1,
    *,
    devices: int = DEVICES,
    bandwidth: int | None = None,
    capacity: int = CONSTANTS.projected_nbytes,
    layers: int | None = None,
    steps: int = 1,
    contexts: tuple[int, ...] = (),
    links: Overrides | None = None,
    **options: Any,
) -> Observed:
    """NELSSA with so many PNM devices; every request is near unless `threshold_tokens` says otherwise."""
    layers = CONSTANTS.layers if layers is None else layers
    wanted = {
        "budget": CONSTANTS.budget,
        "threshold_tokens": 1,
        "near": memories(devices),
        "index_share": CONSTANTS.index_share,
        **options,
    }
    changed = {**gpu_room(layers), **pnm_room(devices, capacity, layers), **slower(devices, bandwidth), **(links or {})}
    platform = CONSTANTS.platform if devices <= DEVICES else CONSTANTS.eight
    return study.run(
        PhantomRun(
            CONSTANTS.model, platform, NELSSA, context, wanted, changed, steps, 0, batch, layers, contexts=contexts
        )
    )


def on_gpu(study: Study, context: int, batch: int = 1, *, gpus: int = 1, layers: int | None = None) -> Observed:
    """Dense attention on one or two GPUs, for exactly this batch."""
    layers = CONSTANTS.layers if layers is None else layers
    platform = CONSTANTS.one_gpu if gpus == 1 else CONSTANTS.two_gpus
    return study.run(
        PhantomRun(CONSTANTS.model, platform, ALL_GPU, context, {}, gpu_room(layers, gpus), 1, 0, batch, layers)
    )


def memories(devices: int) -> list[str]:
    """The first so many PNM memories."""
    return [f"emu:pnm{number}" for number in range(devices)]


def equations(run: Observed) -> Equations:
    """The constants of Eq. 1 to 3 that a run of NELSSA found with `threshold_tokens` 0."""
    known = run.result.details["crossover"]["constants"]
    return Equations(**{name: each["value"] for name, each in known.items()})


# -- memories -----------------------------------------------------------------------------------------------------


def model(layers: int = 0) -> KnownShape:
    """The model, or some of its layers."""
    known = find_model(CONSTANTS.model)
    return replace(known, num_layers=layers) if layers else known


def share(layers: int) -> float:
    """How much of the model's layers a run has."""
    return layers / model().num_layers if layers else 1.0


def gpu_room(layers: int, gpus: int = 1) -> dict[str, int]:
    """What leaves `layers` of the cache the room that all of them have: utilisation, less the weights."""
    usable = int(CONSTANTS.utilisation * gpus * CONSTANTS.gpu_nbytes) - model().weight_nbytes()
    return {"devices.gpu.capacity": model(layers).weight_nbytes() + int(usable * share(layers))}


def pnm_room(devices: int, nbytes: int, layers: int) -> dict[str, int]:
    """The same for each PNM device."""
    return {f"devices.pnm{number}.capacity": int(nbytes * share(layers)) for number in range(devices)}


def slower(devices: int, bandwidth: int | None) -> dict[str, int]:
    """Channels that together have `bandwidth`, and overheads that are as much longer."""
    if bandwidth is None:
        return {}
    c, changed = CONSTANTS, {}
    for number in range(devices):
        at = f"devices.pnm{number}.constants"
        changed[f"{at}.memory.pnm.channel_bytes_per_s"] = bandwidth // c.channels
        for executor, ns in (("pnm", c.device_ns), ("copy", c.copy_ns)):
            changed[f"{at}.executors.{executor}.overhead_ns"] = ns * c.profile_bandwidth // bandwidth
    return changed


def fitting(context: int, batch: int, gpus: int) -> int:
    """How many requests of a batch run at a time on so many GPUs: as many as there is room for."""
    pool = Pool(CONSTANTS.gpu_nbytes, gpus, CONSTANTS.utilisation, model().weight_nbytes())
    return min(batch, pool.tokens(model().kv_nbytes()) // context)


# -- what is read from runs ---------------------------------------------------------------------------------------


def whole_ns(run: Observed, layers: int | None = None) -> float:
    """A step of the whole model, from a run of some of its layers: those take their time again, the head does not."""
    layers = CONSTANTS.layers if layers is None else layers
    return of_whole(run.step_ns, head_ns(run), layers)


def of_whole(step_ns: float, head: float, layers: int) -> float:
    """The same of one step's time."""
    return head + (step_ns - head) / share(layers)


def head_ns(run: Observed) -> float:
    """What the head takes in a step."""
    return run.result.stages.get("head", 0) / max(len(run.result.step_ns), 1)


def tokens_per_s(run: Observed, batch: int) -> float:
    """Of the whole model; NaN where the run was refused."""
    return batch * 1e9 / whole_ns(run)


def baseline_rate(study: Study, context: int, batch: int, gpus: int) -> float:
    """Tokens/s of as many of the requests as fit, 0 where none does (X): the others wait."""
    running = fitting(context, batch, gpus)
    return tokens_per_s(on_gpu(study, context, running, gpus=gpus), running) if running else 0.0


def pnm_ns(run: Observed) -> list[int]:
    """Busy time of attention on each PNM device."""
    return [work.ns for (device, kernel), work in sorted(run.work.items()) if "pnm" in device and kernel == "attend"]


def provenance(*runs: Observed) -> str:
    """The weakest of several runs; where only some layers were run, they stand for all."""
    found = {run.result.provenance for run in runs if run.result.refused is None}
    return "extrapolated" if "extrapolated" in found else "simulated"


def reasons(*runs: Observed) -> str:
    """Why numbers of these runs are extrapolated, each reason once."""
    return "; ".join(dict.fromkeys(part for run in runs for part in run.reason.split("; ") if part))


def fit(contexts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Least squares: (ns at no tokens, ns per token)."""
    slope, start = np.polyfit(np.array(contexts, dtype=float), np.array(times), 1).tolist()
    return start, slope
