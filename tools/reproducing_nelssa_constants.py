"""What the reproduction of NELSSA rests on: chosen from sources before the first comparison, and never tuned.

The paper names its GPU, its near-memory device and one model. It does not say how many tokens a centroid stands for,
what communication costs, how requests of its mixes arrive, or against what its 5.5 times are; what stands in for
these is written here. `frozen` is all of it as plain data, with digests of the platforms, profiles and locality that
runs use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tierloop.devices.kernels.contract import DType
from tierloop.runtime.locality import find_locality
from tierloop.runtime.reproduction import digest
from tierloop.tools.reproducing import platform_digests

GB = 1_000_000_000


@dataclass(frozen=True)
class Constants:
    """Names, sizes and ranges of every run. Rates in bytes/s, contexts in tokens."""

    # -- machines -------------------------------------------------------------------------------------------------
    platform: str = "nelssa-h100-4pnm"
    eight: str = "nelssa-h100-8pnm"
    one_gpu: str = "nelssa-h100"
    two_gpus: str = "nelssa-h100x2"
    gpu_nbytes: int = 80 * GB
    utilisation: float = 0.9
    """The share of the GPU's memory for weights and KV: vLLM's default."""
    prototype_nbytes: int = 32 << 30
    projected_nbytes: int = 512 << 30
    capacities_gib: tuple[int, ...] = (32, 64, 128, 256, 512)
    channels: int = 4
    bandwidths: tuple[int, ...] = (100 * GB, 150 * GB, 200 * GB)
    """Of all channels of a device together; what sparse access leaves of it emerges."""
    device_ns: int = 20_000
    copy_ns: int = 2_000
    """Overheads of the device's profile, at its bandwidth; they grow as the bandwidth falls."""
    profile_bandwidth: int = 204_800_000_000

    # -- NELSSA's own ---------------------------------------------------------------------------------------------
    model: str = "llama-3-8b-1048k"
    budget: float = 0.04
    budgets: tuple[float, ...] = (0.01, 0.018, 0.04, 0.08)
    """S: 1 to 8 %, the published code's 1.8 % and the paper's 4 % among them."""
    cluster_tokens: int = 16
    index_share: float = 0.7
    """The share of the GPU's room that centroids may take where every request is near: 8 × 1M tokens need 34 GB."""
    index_share_of_mixes: float = 0.25
    """The policy's default, where short requests need room as well."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    layers: int = 2
    """Of 32: layers of a phantom run are alike, and the table `layer-sampling` says what that costs."""
    locality: str = "smollm2-135m"
    kv_dtype: DType = "float16"
    table: int = 512
    """Blocks per head that phantom runs aim at."""

    # -- N1 -------------------------------------------------------------------------------------------------------
    crossover_contexts: tuple[int, ...] = (32_000, 48_000, 64_000, 96_000, 128_000, 160_000, 192_000, 256_000)
    crossover_tolerance: float = 0.01
    never_bandwidth: int = 100 * GB
    never_contexts: tuple[int, ...] = (256_000, 512_000, 1_024_000)

    # -- N2, N3 ---------------------------------------------------------------------------------------------------
    contexts: tuple[int, ...] = (128_000, 256_000, 512_000, 1_024_000)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    measured_tokens: int = 1_048_576
    """What four prototypes hold of Llama-3-8B."""
    parity: tuple[float, float] = (0.8, 1.7)
    projected: tuple[float, float] = (2.0, 6.0)
    paper_speedup: float = 5.5
    threshold_scales: tuple[float, ...] = (0.1, 0.7, 1.0, 1.3, 10.0)
    threshold_contexts: tuple[int, ...] = (32_000, 64_000, 96_000, 128_000)
    breakdown: tuple[tuple[int, int], ...] = ((128_000, 1), (128_000, 8), (256_000, 4), (512_000, 2), (1_024_000, 1))
    breakdown_tolerance: float = 0.056

    # -- N4, N5: the mix of the published code -------------------------------------------------------------------
    short_prompt: tuple[int, int] = (500, 900)
    """500 words."""
    short_output: int = 50
    long_prompt: int = 128_000
    """96,000 words."""
    long_output: int = 200
    requests_per_s: float = 6.0
    requests: int = 60
    requests_in_place: int = 30
    """Where prompts are prefilled by the GPU that decodes, which takes longer to simulate."""
    long_shares: tuple[float, ...] = (0.0, 0.3, 0.6)
    longer_prompt: int = 400_000
    """One of these fills a GPU."""
    prefill_workers: int = 64
    """Prompts are prefilled elsewhere, as in the published code; so many that nobody waits for one."""
    p95_claimed: float = 3.0
    p99_claimed: float = 5.0
    without_long: tuple[float, float] = (0.9, 1.1)
    """What counts as "the same" where there are no long requests."""

    # -- N6 -------------------------------------------------------------------------------------------------------
    migrating_context: int = 60_000
    migrating_threshold: int = 60_090
    beside: tuple[int, ...] = (2_000,) * 7
    migrate_tokens: int = 1024
    """Copied per step, of all layers: the policy's default."""
    migration_steps: int = 110
    steady_steps: int = 16
    migrating_requests: int = 20
    jitter: float = 0.2
    real_prompt: int = 512
    real_tokens: int = 24

    # -- N7, N11: real and clustered keys -------------------------------------------------------------------------
    text_model: str = "smollm2-135m"
    text_context: int = 4096
    text_prompts: int = 1
    text_tasks: tuple[str, ...] = ("needle", "qa")
    recall_contexts: tuple[int, ...] = (16_384, 65_536)
    recall_prompts: int = 4
    plateau: float = 0.02
    """At 4 and 8 % the mass recall differs by no more, on clustered keys."""
    gap: float = 0.02
    update_tokens: int = 1024
    update_context: int = 128_000
    update_steps: int = 1100
    update_cost: float = 0.05

    # -- N8 -------------------------------------------------------------------------------------------------------
    skewed: tuple[int, ...] = (512_000, 256_000, 128_000, 128_000, 96_000, 96_000, 64_000, 64_000)
    imbalance: float = 0.01
    """A part of a per cent: how many of the rows lie in the chosen clusters differs by KV head."""

    # -- N9 -------------------------------------------------------------------------------------------------------
    capacity_claimed: tuple[tuple[str, int, float], ...] = (
        ("4 prototypes", 1_048_576, 0.0),
        ("1 × H100", 427_000, 0.005),
        ("2 × H100", 976_000, 0.005),
    )

    # -- N10 ------------------------------------------------------------------------------------------------------
    occupancy_contexts: tuple[int, ...] = (32_000, 64_000, 100_000, 128_000, 256_000, 512_000, 1_000_000)
    occupancy_beside: tuple[tuple[int, int], ...] = ((7, 2_000), (16, 8_000))
    """Short requests of a batch, and their length: little attention on the GPU, and as much as a long request's."""
    occupancy_at: int = 100_000
    occupancy_claimed: float = 0.0412

    # -- questions ------------------------------------------------------------------------------------------------
    link_rates: tuple[int, ...] = (50 * GB, 25 * GB, 10 * GB, 5 * GB)
    """Of the link between GPU and host, over which all devices are reached."""
    sampling_requests: int = 4
    threshold_served: tuple[float, ...] = (0.1, 1.0, 10.0)
    threshold_prompts: tuple[int, ...] = (60_000, 128_000)
    """Of long requests, on either side of the crossover."""
    threshold_share: float = 0.3
    crossover_batches: tuple[int, ...] = (1, 2, 4, 8)
    batch_contexts: tuple[int, ...] = (8_000, 16_000, 24_000, 32_000, 48_000)

    @property
    def platforms(self) -> tuple[str, ...]:
        """All platforms that are run."""
        return (self.platform, self.eight, self.one_gpu, self.two_gpus)


CONSTANTS = Constants()


def frozen(constants: Constants = CONSTANTS) -> dict[str, Any]:
    """All of it, with digests of the files that runs read."""
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(constants).items()},
        "files": platform_digests(constants.platforms) | digest([find_locality(constants.locality)]),
    }
