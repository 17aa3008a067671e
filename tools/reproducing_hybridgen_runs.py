"""The runs that HybridGen's checks share: the system and the three baselines that exist, in each regime of the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierloop.runtime.policies.hybridgen import times_of
from tierloop.runtime.results import PolicyResult
from tierloop.runtime.study import Observed, PhantomRun, Study
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS, CORES

HYBRID, STREAM, CPU_ATTENTION, ALL_GPU = "hybridgen", "stream-offload", "cpu-attention", "all-gpu"
BASELINES = (ALL_GPU, STREAM, CPU_ATTENTION)
Overrides = Mapping[str, Any]


def hybrid(
    study: Study,
    model: str,
    context: int,
    cpu: int | None = None,
    platform: str = CONSTANTS.platform,
    overrides: Overrides | None = None,
    steps: int = 1,
    warmup_steps: int = 0,
    **options: Any,
) -> Observed:
    """HybridGen: K by the constants, fixed, and one layer ahead, unless `options` say otherwise; `cpu` in FLOP/s."""
    wanted = {
        "k": CONSTANTS.k(context),
        "k_min": CONSTANTS.k_min,
        "gpu_share": CONSTANTS.gpu_share,
        "scheduler": "fixed",
        "timing": "prev",
        "seed": study.seed,
        **options,
    }
    changed = {**_cores(cpu), **(overrides or {})}
    return study.run(PhantomRun(model, platform, HYBRID, context, wanted, changed, steps, warmup_steps))


def baseline(
    study: Study,
    policy: str,
    model: str,
    context: int,
    cpu: int | None = None,
    platform: str = CONSTANTS.platform,
    overrides: Overrides | None = None,
) -> Observed:
    """A baseline: streaming from host DRAM alone, the CPU at `cpu` FLOP/s where it has anything to compute."""
    options = {"percent": {"emu:dram": 100}} if policy == STREAM else {}
    changed = {**(_cores(cpu) if policy == CPU_ATTENTION else {}), **(overrides or {})}
    return study.run(PhantomRun(model, platform, policy, context, options, changed))


def regimes(platform: str = CONSTANTS.platform) -> dict[str, int]:
    """CPU rates in FLOP/s by name, the slowest first."""
    return {
        "5 GFLOP/s": CONSTANTS.cpu_implied,
        "12.3 GFLOP/s": CONSTANTS.cpu_flexgen,
        "vectorised": CONSTANTS.vectorised(platform),
    }


def load(result: PolicyResult) -> float:
    """What HybridGen's scheduler looks at: (T_cpu + T_tx) / T_gpu; below 1 the host has slack."""
    times = times_of(result.stages)
    return (times.t_cpu_ns + times.t_tx_ns) / times.t_gpu_ns


def provenance(*runs: Observed) -> str:
    """The weakest of several runs."""
    found = {run.result.provenance for run in runs if run.result.refused is None}
    return "extrapolated" if "extrapolated" in found else "simulated"


def reasons(*runs: Observed) -> str:
    """Why numbers of these runs are extrapolated, each reason once."""
    return "; ".join(dict.fromkeys(part for run in runs for part in run.reason.split("; ") if part))


def _cores(cpu: int | None) -> dict[str, int]:
    return {} if cpu is None else {CORES: cpu}
