"""K4, K10 and K12: what is skipped, what a roofline says, and what is counted."""

from __future__ import annotations

from tierloop.devices.registry import find_platform
from tierloop.devices.tables import read_toml
from tierloop.emulators.profile import find_profile
from tierloop.runtime.link_roofline import Rates, crossing, intensity, over_link, threshold
from tierloop.runtime.model_shapes import cache_shape, find_model
from tierloop.runtime.reproduction import Check, Claim, near, over
from tierloop.runtime.study import Study
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS


def throughput(study: Study) -> Check:
    """K4: throughput against six baselines that are not here."""
    missing = ", ".join(CONSTANTS.missing_baselines)
    reason = f"missing baselines: {missing}. The table `throughput` has what exists, and passes nothing"
    return Check("K4", "throughput against six baselines", (), "", study.seed, reason)


def roofline(study: Study) -> Check:
    """K10: the hit rate from which on attention belongs on the GPU."""
    c = CONSTANTS
    oi = intensity(cache_shape(find_model(c.model), c.kv_dtype))
    machines = [machine(cpu, link) for cpu in (c.cpu_flops[-1], *c.cpu_flops) for link in c.pcie]
    found = [crossing(each, oi) for each in machines]
    crossings = [1.0 if each is None else each for each in found]
    claims = (
        Claim("Fig. 11: from a hit rate of about 80 % on, attention is faster on the GPU (Llama-3-8B, A100)",
              c.crossing, crossings[0], over(*crossings),
              "CPU from 12.3 GFLOP/s to bound by its memory; PCIe from 25.6 to 30 GB/s"),
        Claim("a hit rate of 80 % makes the intensity over the link 5 times as large", over(5.0),
              round(over_link(oi, 0.8) / oi, 9), over(round(over_link(oi, 0.8) / oi, 9))),
    )  # fmt: skip
    details = {
        "intensity, FLOP/byte": oi,
        "P, FLOP/byte over the link": threshold(machines[0], oi),
        "host bytes/s": machines[0].host_bytes_per_s,
    }
    reason = "the host of the figure is an A100's, its memory and CPU are not given: those of the platform are assumed"
    return Check("K10", "roofline over the link", claims, "extrapolated", study.seed, reason, details)


def machine(cpu_flops_per_s: float, link_bytes_per_s: float) -> Rates:
    """The host of the roofline's platform, with a CPU and a link of these rates."""
    path = find_platform(CONSTANTS.roofline_platform)
    values = read_toml(path)
    dram, gpu = (read_toml(find_profile(values["devices"][name]["profile"], path.parent)) for name in ("dram", "gpu"))
    return Rates(
        link_bytes_per_s,
        dram["memory"]["read_bytes_per_s"]["value"],
        cpu_flops_per_s,
        gpu["memory"]["read_bytes_per_s"]["value"],
        gpu["executors"]["gpu"]["flops_per_s"]["value"],
    )


def capacity(study: Study) -> Check:
    """K12: the cache of eight requests of 100,000 tokens."""
    c = CONSTANTS
    gb = find_model(c.model).kv_nbytes() * c.exact_tokens * c.exact_batch / 1e9
    claims = (
        Claim(f"8 × 100K tokens of Llama-3-8B are {c.exact_gb} GB", near(c.exact_gb, c.exact_tolerance), gb, over(gb)),
    )
    return Check("K12", "size of the cache", claims, "simulated", study.seed)
