"""What the reproduction of KVDrive rests on: chosen from sources before the first comparison, and never tuned.

Where the paper gives an input it is taken; where it is silent, the input has a range, and the reason for its ends
stands beside it. `frozen` is all of it as plain data, with digests of the platforms, profiles and score traces that
runs use. Sections (§) are those of the reference that the project was written from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tierloop.devices.kernels.contract import DType
from tierloop.runtime.locality import find_locality
from tierloop.runtime.reproduction import digest
from tierloop.tools.reproducing import platform_digests

LINK = "links.pcie.bytes_per_s"
SSD_LINK = "links.nvme.bytes_per_s"
SSD = "devices.nvme.constants.executors.dma.bytes_per_s"
LAUNCH = "devices.gpu.constants.executors.gpu.overhead_ns"
CHANNELS = "devices.nvme.constants.memory.flash.channels"


@dataclass(frozen=True)
class Constants:
    """Names, sizes and ranges of every run. Rates in bytes/s, contexts in tokens, shares from 0 to 1."""

    # -- machines and models: those of the paper (§1.2.10); the SSD is not named there --------------------------------
    l20: str = "kvdrive-l20"
    h20: str = "kvdrive-h20"
    rtx4090: str = "kvdrive-4090"
    dram_nbytes: tuple[int, int, int] = (100_000_000_000, 200_000_000_000, 120_000_000_000)
    """Of the three servers, in this order."""
    model: str = "llama-3-8b-1048k"
    models: tuple[str, ...] = ("llama-3-8b-1048k", "qwen3-8b", "phi-4-mini")
    """Those of the paper that have throughput bands (§1.2.11)."""
    context: int = 122_880
    batch: int = 4
    """Of offline decoding: 120K, 4 at once."""
    layers: int = 8
    """Layers of the model in runs whose question is one of a layer's: all layers are alike but for their scores."""
    steps: int = 2
    warmup_steps: int = 2
    locality: str = "kvdrive-draw"
    """Scores fitted to what the first author published of windows (KVDrive-Draw), and to nothing that is compared."""
    short: str = "short-locality"
    """Scores that persist little: assumed, after what is said of Phi-4-mini."""
    kv_dtype: DType = "float16"
    table: int = 512

    # -- the policy: §1.2.7 to §1.2.11 --------------------------------------------------------------------------------
    budget: float = 0.0156
    budget_high: float = 0.0625
    chunk: int = 4
    window: float = 2.0
    centroids: int = 8192
    """At 120K tokens."""
    sink: int = 4
    local: int = 64
    lookup_ns: tuple[float, ...] = (2.0, 20.0, 200.0)
    """The CPU's time for one entry that is looked up: not given. A compiled loop takes 2 ns (this project's windows),
    an array library some 20, an interpreter 100 to 200."""

    # -- K1: Fig. 3, and the curve that the trace was fitted to --------------------------------------------------------
    fig3_context: int = 65_536
    fig3_windows: tuple[int, ...] = (0, 1, 2, 3)
    fig3_least_ratio: float = 40.0
    """From more than 500 MB to less than 12.5 MB."""
    fig3_most_mb: float = 500.0
    draw_windows: tuple[int, ...] = (1, 5, 10, 20, 40)
    draw_falls: tuple[float, ...] = (0.59, 0.77, 0.91, 0.94)
    draw_tolerance: float = 0.10
    draw_layers: int = 32
    trace_heads: int = 8
    trace_candidates: int = 2048
    """Scores of candidates are independent of each other, so shares do not depend on their number."""
    trace_steps: int = 56
    """40 steps that the widest window looks back at, and 16 that are counted."""

    # -- K2: Table 3 --------------------------------------------------------------------------------------------------
    gain: tuple[float, float] = (0.009, 0.039)
    hit_rates: tuple[float, float] = (0.70, 0.91)
    units: tuple[tuple[str, int, bool], ...] = (
        ("Quest", 16, True), ("ShadowKV", 8, True), ("RetroInfer", 16, False), ("KVDrive", 4, False),
    )  # fmt: skip
    """Tokens that are moved together, and whether they are neighbours (pages, chunks) or alike (clusters)."""
    gain_windows: tuple[float, ...] = (2.0, 3.0, 4.0)
    """Those of the paper's sweep; which one Table 3 has is not known."""
    gain_layers: int = 4
    gain_steps: int = 16
    gain_warmup: int = 6

    # -- K3: Fig. 15 --------------------------------------------------------------------------------------------------
    saved: tuple[float, float] = (0.15, 0.30)
    sizing_window: float = 2.0
    sizing_steps: int = 16
    sizing_spreads: tuple[float, ...] = (0.8, 1.2)
    """How heads differ, beside the 0.4 of the trace: for the details, not for a claim."""
    small_items: int = 8
    """Layer-heads of the instances that are solved exactly as well."""

    # -- K4 -----------------------------------------------------------------------------------------------------------
    missing_baselines: tuple[str, ...] = (
        "Quest with offload", "ShadowKV", "PQCache", "MagicPIG", "RetroInfer", "FlexGen",
    )  # fmt: skip

    # -- K5: Fig. 4 ---------------------------------------------------------------------------------------------------
    select_and_fetch: tuple[float, float] = (0.40, 0.60)
    sequential_windows: tuple[float, ...] = (0.0, 1.0)
    """×0: Quest and RetroInfer; ×1: ShadowKV and PQCache."""

    # -- K6: Fig. 16 --------------------------------------------------------------------------------------------------
    sweep_windows: tuple[float, ...] = (2.0, 3.0, 4.0)
    sweep_layers: int = 4
    sweep_batches: tuple[int, int] = (1, 4)
    sweep_best: tuple[float, float] = (2.0, 4.0)
    sweep_lookup_ns: tuple[float, ...] = (2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 200.0)
    """Points of the range of `lookup_ns`."""

    # -- K7: Fig. 17 to 19 --------------------------------------------------------------------------------------------
    chunks: tuple[int, ...] = (1, 4, 8)
    best_chunk: int = 4
    chunk_centroids: int = 4096
    """For all sizes of chunks; with more, chunks of 8 would have no two of them to a centroid."""
    centroid_sweep: tuple[int, ...] = (2048, 4096, 8192)
    proportional: tuple[float, float] = (0.8, 1.2)
    lookup_batches: tuple[int, ...] = (1, 4, 8)
    lookup_ms: tuple[float, float] = (0.2, 0.8)
    """Of a layer: the scale of the axis."""
    recall_loss: float = 0.01
    text_model: str = "smollm2-135m"
    real_platform: str = "demo"
    prompts: int = 2
    prompt_tokens: int = 2048
    real_steps: int = 8
    real_layers: int = 3
    """Every third layer is checked by the oracle."""
    real_centroids: tuple[int, int] = (32, 128)
    """Of 512 chunks: 16 and 4 to a centroid, as 2,048 and 8,192 at 120K tokens."""

    # -- K8: Fig. 21 --------------------------------------------------------------------------------------------------
    ssd_share: float = 0.60
    ssd_tolerance: float = 0.10
    ssd_rates: tuple[int, ...] = (3_000_000_000, 5_000_000_000, 7_000_000_000)
    """The drive is not known. Specification of PCIe 4.0 drives: up to 7; sparse reads get less."""
    dram_shares: tuple[float, ...] = (0.0, 0.5, 0.75)
    """Share of entries that DRAM holds besides: from none to three quarters."""

    # -- K9: Fig. 23 --------------------------------------------------------------------------------------------------
    llama_batches: tuple[tuple[int, int], ...] = ((61_440, 8), (122_880, 4), (245_760, 2), (368_640, 2))
    """The contexts that the paper has of Llama."""
    over_all_gpu: float = 3.0
    less_memory: float = 4.0
    band_tolerance: float = 0.15
    all_gpu_share: float = 0.98
    """Of the GPU's memory is for weights and KV, some of it left for what a step needs: assumed."""

    # -- K10: Fig. 11 -------------------------------------------------------------------------------------------------
    roofline_platform: str = "hybridgen-a100"
    cpu_flops: tuple[float, float] = (12_300_000_000, 2_000_000_000_000)
    """FlexGen's calibration; a vectorised kernel, which the memory limits."""
    pcie: tuple[float, float] = (25_600_000_000, 30_000_000_000)
    crossing: tuple[float, float] = (0.70, 0.90)
    """80 %, read off a schematic figure."""

    # -- K11: Fig. 10 -------------------------------------------------------------------------------------------------
    pipeline_context: int = 61_440
    pipeline_window: float = 1.0
    pipeline_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    longest_tolerance: float = 0.10
    predicted: tuple[float, float] = (0.8, 1.0)
    """Share of entries that a query predicted a layer ahead finds: SmolLM2's rows (docs/reproduction.md, H4); all."""

    # -- K12 ----------------------------------------------------------------------------------------------------------
    exact_tokens: int = 100_000
    exact_batch: int = 8
    exact_gb: float = 104.9
    exact_tolerance: float = 0.0005
    """Four digits are given."""

    # -- questions ----------------------------------------------------------------------------------------------------
    noises: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    windows: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0)
    budgets: tuple[float, ...] = (0.005, 0.0156, 0.03125, 0.0625, 0.125)
    drive_rates: tuple[int, ...] = (1_000_000_000, 3_500_000_000, 7_000_000_000, 14_500_000_000, 29_000_000_000)
    """29 GB/s: two PS1010 (§3.5)."""
    drives: tuple[int, ...] = (1, 2, 4)
    drive_layers: int = 4
    ssd_link: int = 7_880_000_000
    channels: int = 16
    drive_rate: int = 7_000_000_000
    """Of the platforms' link and drive."""
    contexts: tuple[int, ...] = (30_720, 122_880, 245_760, 491_520)
    dram_for_kv: float = 0.9
    """Of a server's DRAM: the rest is for everything else. Assumed."""
    gpu_nbytes: tuple[int, int, int] = (48_000_000_000, 96_000_000_000, 24_000_000_000)

    @property
    def platforms(self) -> tuple[str, ...]:
        """All platforms that are run."""
        return (self.l20, self.h20, self.rtx4090, self.roofline_platform, self.real_platform)


CONSTANTS = Constants()


def frozen(constants: Constants = CONSTANTS) -> dict[str, Any]:
    """All of it, with digests of the files that runs read."""
    traces = [find_locality(name) for name in (constants.locality, constants.short)]
    return {**_plain(asdict(constants)), "files": platform_digests(constants.platforms) | digest(traces)}


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
