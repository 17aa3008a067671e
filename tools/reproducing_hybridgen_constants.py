"""What the reproduction of HybridGen rests on: chosen from sources before the first comparison, and never tuned.

Where the paper gives an input it is taken; where it is silent, the input has a range, and the reason for its ends
stands beside it. `frozen` is all of it as plain data, with digests of the platforms, profiles and locality that runs
use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tierloop.devices.kernels.contract import DType
from tierloop.devices.registry import find_platform
from tierloop.devices.tables import read_toml
from tierloop.emulators.profile import find_profile
from tierloop.runtime.locality import find_locality
from tierloop.runtime.reproduction import digest
from tierloop.tools.reproducing import platform_digests

CORES = "devices.dram.constants.executors.cores.flops_per_s"
LINK = "links.pcie.bytes_per_s"


@dataclass(frozen=True)
class Constants:
    """Names, sizes and ranges of every run. Rates in FLOP/s and bytes/s, contexts in tokens."""

    # -- machines: the paper names A100, H100 and RTX 5090, and no host -------------------------------------------
    platform: str = "hybridgen-a100-cxl"
    without_cxl: str = "hybridgen-a100"
    shared: str = "hybridgen-a100-cxl-shared"
    others: tuple[str, ...] = ("hybridgen-h100-cxl", "hybridgen-5090-cxl")
    cpu_implied: int = 5_000_000_000
    """What the paper's figure of AoG and AoC implies: 6.71 GFLOP in at most 1.5 s, and at least 4 times AoG."""
    cpu_flexgen: int = 12_300_000_000
    """`cpu_flops` of FlexGen's cost model. A vectorised kernel has the rate of the host's profile."""
    cpu_rates: tuple[int, ...] = (
        5_000_000_000, 12_300_000_000, 50_000_000_000, 100_000_000_000, 200_000_000_000, 1_000_000_000_000,
    )  # fmt: skip
    pcie: tuple[int, int] = (25_600_000_000, 30_000_000_000)
    """PCIe 4.0 x16: 80 % of its peak; the most that a paper has measured (Bidaw)."""

    # -- HybridGen's own: K, selector and share are not known -----------------------------------------------------
    budget: float = 0.1
    """K as a share of the host's rows (InfiniGen takes up to 0.2, a third-party port 0.05) …"""
    k_most: int = 2048
    """… and at most so many rows: the port's cap on what its CPU looks at."""
    k_min: int = 64
    gpu_share: float = 0.1
    """The share of the prompt that stays on the GPU: that of the port's tests."""
    scans: tuple[int, int] = (0, 2048)
    """Host rows that the selector looks at: all of them; the port's cap. The paper's selector is not known."""
    locality: str = "smollm2-135m"
    kv_dtype: DType = "float16"
    table: int = 512
    """Blocks per head that phantom runs aim at."""

    # -- H1, H2: exact --------------------------------------------------------------------------------------------
    model: str = "opt-13b"
    flops_context: int = 65_536
    flops_claimed: float = 1.552e9
    flops_tolerance: float = 0.0005
    """Four digits are given."""
    crossover_claimed: float = 31_400
    crossover_tolerance: float = 0.01

    # -- H3 -------------------------------------------------------------------------------------------------------
    latency_contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    aoc_over_aog: float = 4.0
    aoc_most_s: float = 1.5
    """The end of the figure's axis."""
    aog_s: tuple[float, float] = (0.26, 0.30)
    """Of the reference: what PCIe 4.0 makes of 6.71 GB."""

    # -- H4, H7: the real model -----------------------------------------------------------------------------------
    text_model: str = "smollm2-135m"
    prompts: int = 2
    prompt_tokens: int = 2048
    cosine_claimed: float = 0.9
    first_predicted: int = 2
    """Layers from this one on count for H4."""
    predict_from: int = 3
    """Inputs of layers before this one are not predicted from: the policy's default."""
    cosine_queries: int = 64
    recall_k: int = 128
    real_platform: str = "demo"
    """Here the host has slack at 2,048 tokens (load 0.5 with K_min): the paper's premise for short contexts."""
    real_steps: int = 20
    real_layers: int = 3
    """Every third layer is checked by the oracle."""
    fixed_large: int = 512
    """The larger of two fixed K, for comparison."""
    noisy_seeds: int = 20
    noisy_calls: int = 1200
    noisy_settled: int = 800
    """From this call on K has to stay within one step."""
    noise_of_times: float = 0.1

    # -- H5 -------------------------------------------------------------------------------------------------------
    ratio_context: int = 8192
    speedup_claimed: tuple[float, float] = (1.41, 3.2)
    missing_baselines: tuple[str, ...] = ("FlexGen", "InfiniGen", "H2O", "KVPR", "FlashGen's prefetching", "LIA")

    # -- H6 -------------------------------------------------------------------------------------------------------
    mapping_models: tuple[str, ...] = ("opt-1.3b", "opt-6.7b")
    """Two of the paper's four."""
    mapping_context: int = 2048
    """The longest that OPT takes; the paper's is not known."""
    mapping_longer: int = 8192
    mapping_longer_model: str = "opt-1.3b"
    mapping_claimed: tuple[float, float] = (1.0, 1.1)
    scan_rates: tuple[int, int] = (200_000_000_000, 30_000_000_000)
    scan_claimed: float = 3.3
    scan_tolerance: float = 0.1

    # -- H8 -------------------------------------------------------------------------------------------------------
    traffic_contexts: tuple[int, int] = (4080, 8176)
    """No step of these runs moves a block between GPU and host."""
    traffic_ks: tuple[int, int] = (256, 512)
    traffic_tolerance: float = 0.02

    # -- H9 and scaling -------------------------------------------------------------------------------------------
    long_model: str = "llama-3-8b-1048k"
    contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
    scheduler_contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 1_048_576)
    scheduler_steps: int = 14
    """Steps until the scheduler is read: twelve of × 1.5 lead from K_min to `k_cap`, two through the timings."""
    scheduler_step: float = 0.5
    k_cap: int = 8192

    # -- questions ------------------------------------------------------------------------------------------------
    ks: tuple[int, ...] = (64, 256, 1024, 2048)
    errors: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    errors_real: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Those that are tried on the real model as well."""
    question_context: int = 8192
    shorter_contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 262_144)
    """Of OPT-13B: a million of its tokens is 859 GB, more than the host has."""

    @property
    def platforms(self) -> tuple[str, ...]:
        """All platforms that are run."""
        return (self.platform, self.without_cxl, self.shared, *self.others, self.real_platform)

    def vectorised(self, platform: str) -> int:
        """The CPU rate of a platform's own profile."""
        path = find_platform(platform)
        values = read_toml(path)
        while "devices" not in values:
            values = read_toml(find_platform(values["include"][0]))
        profile = read_toml(find_profile(values["devices"]["dram"]["profile"], path.parent))
        return int(profile["executors"]["cores"]["flops_per_s"]["value"])

    def k(self, context: int) -> int:
        """K at a context length: the budget of its host rows, between K_min and the cap."""
        return max(self.k_min, min(self.k_most, int(self.budget * (1 - self.gpu_share) * context)))


CONSTANTS = Constants()


def frozen(constants: Constants = CONSTANTS) -> dict[str, Any]:
    """All of it, with digests of the files that runs read."""
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(constants).items()},
        "cpu_vectorised": {p: constants.vectorised(p) for p in (constants.platform, *constants.others)},
        "files": platform_digests(constants.platforms) | digest([find_locality(constants.locality)]),
    }
