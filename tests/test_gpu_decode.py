"""A model decodes on a platform with the gpu driver: the tokens of the host, attention within the bound."""

from __future__ import annotations

import pytest

from tests import decoding
from tests.decoding import Decoded, decode
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.gpu import GpuDevice, open_gpu
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.emulators.host_accelerator import HostAccelerator

MIB = 1 << 20
MODEL = tiny_model()
PROMPTS = [tiny_workload(150).token_ids, tiny_workload(97, seed=1).token_ids]


def platform_of(seed: int | None, attention: str = "eager") -> Platform:
    """A real cpu device, and the gpu driver on a stand-in if there is a seed for it."""
    site = Site(clock=WallClock(), checker=HazardChecker())
    devices = {"dram": open_cpu("dram", site, {"capacity": 256 * MIB})}
    if seed is None:
        return Platform("host alone", site, {**devices}, "dram")
    options = {"reaches": ["dram"], "capacity": 64 * MIB, "attention": attention}
    gpu = open_gpu("gpu", site, options, accelerator=HostAccelerator(seed, 64 * MIB))
    return Platform("host and gpu", site, {**devices, "gpu": gpu}, "dram")


@pytest.fixture(scope="module")
def on_the_host() -> Decoded:
    return decode(MODEL, PROMPTS, "cpu-attention", platform=platform_of(None))


@pytest.mark.parametrize("policy", ["all-gpu", "split-all", "stream-offload", "cpu-attention", "hybridgen"])
def test_policies_have_the_tokens_of_the_host(on_the_host: Decoded, policy: str) -> None:
    prompts = PROMPTS[:1] if policy == "stream-offload" else PROMPTS  # which serves one request at a time
    decoded = decode(MODEL, prompts, policy, platform=platform_of(3))
    assert decoded.tokens == on_the_host.tokens[: len(prompts)]
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.devices["gpu"].bytes_read > 0, "the GPU had nothing to do"


@pytest.mark.parametrize("policy", ["all-gpu", "split-all"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_attention_stays_within_its_wider_bound_also_when_merged_with_states_of_the_host(
    policy: str, dtype: str
) -> None:
    platform = platform_of(4, "flash")
    decoded = decode(MODEL, PROMPTS, policy, platform=platform, dtype=dtype)
    assert decoded.verdict.checked
    assert decoded.verdict.worst_ratio <= 1
    gpu = platform.devices["gpu"]
    assert isinstance(gpu, GpuDevice)
    assert gpu.fused_launches > 0
    if policy == "split-all":
        assert decoded.devices["dram"].bytes_read > 0, "the host had nothing to do"


def test_fused_attention_is_not_within_the_bound_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "rounded_to", lambda platform, shape: "")
    decoded = decode(MODEL, PROMPTS, "all-gpu", platform=platform_of(4, "flash"), dtype="bfloat16")
    assert decoded.verdict.worst_ratio > 1
