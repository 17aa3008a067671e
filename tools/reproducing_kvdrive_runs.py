"""The runs that KVDrive's checks share: the system, what it replaces, and the baselines that exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.study import Observed, PhantomRun, Study
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS

KVDRIVE, STREAM, ALL_GPU = "kvdrive", "stream-offload", "all-gpu"
DENSE = ("qkv", "mlp", "head")
"""Stages that are no part of attention."""
FETCH = ("decide", "evaluate", "ssd", "gather", "transfer", "unpack")


def kvdrive(
    study: Study,
    context: int | None = None,
    batch: int | None = None,
    *,
    platform: str = CONSTANTS.l20,
    model: str | None = None,
    layers: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    predicted: float = 1.0,
    **options: Any,
) -> Observed:
    """KVDrive over DRAM alone, as the constants say, unless other things are said; `layers` 0 is the whole model."""
    c = CONSTANTS
    context, batch = context or c.context, batch or c.batch
    layers = c.layers if layers is None else layers
    wanted = {
        "persistent": "none",
        "budget": c.budget,
        "chunk_tokens": c.chunk,
        "centroids": min(c.centroids, c.centroids * context // c.context),
        "sink_tokens": c.sink,
        "local_tokens": c.local,
        "window": c.window,
        "lookup_ns": c.lookup_ns[0],
        "seed": study.seed,
        **options,
    }
    run = PhantomRun(
        model or c.model, platform, KVDRIVE, context, wanted, overrides or {}, c.steps, c.warmup_steps, batch, layers,
        predicted=predicted,
    )  # fmt: skip
    return study.run(run)


def baseline(
    study: Study,
    policy: str,
    context: int,
    batch: int = 1,
    *,
    platform: str,
    model: str | None = None,
    layers: int | None = None,
    **options: Any,
) -> Observed:
    """A step of a baseline; it attends everything, so steps do not differ."""
    layers = CONSTANTS.layers if layers is None else layers
    return study.run(PhantomRun(model or CONSTANTS.model, platform, policy, context, options, {}, 1, 0, batch, layers))


def whole_step_ns(run: Observed, model: str | None = None, layers: int | None = None) -> float:
    """A step of the whole model, from a run of some of its layers: those take their time again, the head does not."""
    head = run.result.stages.get("head", 0) / max(len(run.result.step_ns), 1)
    layers = CONSTANTS.layers if layers is None else layers
    return head + (run.step_ns - head) * (find_model(model or CONSTANTS.model).num_layers / layers if layers else 1)


def stage_ns(run: Observed, names: Iterable[str]) -> float:
    """Busy time of these stages in a step."""
    return sum(run.result.stages.get(name, 0) for name in names) / max(len(run.result.step_ns), 1)


def hit_rate(run: Observed) -> float:
    """The share of chosen entries that windows held in the reported steps, over all requests."""
    rates: list[float] = [rate for each in run.result.details.values() for rate in each["hit_rate"][-CONSTANTS.steps :]]
    return sum(rates) / len(rates)


def from_ssd(run: Observed) -> float:
    """The share of misses that came from the SSD, over all steps and requests."""
    far, near = (sum(int(each[name]) for each in run.result.details.values()) for name in ("from_ssd", "from_dram"))
    return far / (far + near) if far + near else 0.0


def provenance(*runs: Observed) -> str:
    """The weakest of several runs."""
    found = {run.result.provenance for run in runs if run.result.refused is None}
    return "extrapolated" if "extrapolated" in found else "simulated"


def reasons(*runs: Observed) -> str:
    """Why numbers of these runs are extrapolated, each reason once."""
    return "; ".join(dict.fromkeys(part for run in runs for part in run.reason.split("; ") if part))
