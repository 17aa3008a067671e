"""Machines that ship for the named systems: that each is what it says, and what follows from it."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tierloop.devices.commands import Copy
from tierloop.devices.platform import Platform
from tierloop.devices.registry import list_platforms, open_platform
from tierloop.emulators.profile import FOLDER, find_profile, read_profile

KINDS = {
    "hybridgen-a100": ["gpu", "cpu", "cpu"],
    "hybridgen-a100-cxl": ["gpu", "cpu", "cpu", "cxl"],
    "hybridgen-a100-cxl-5gflops": ["gpu", "cpu", "cpu", "cxl"],
    "hybridgen-a100-cxl-12gflops": ["gpu", "cpu", "cpu", "cxl"],
    "hybridgen-a100-cxl-shared": ["gpu", "cpu", "cpu", "cxl"],
    "hybridgen-h100-cxl": ["gpu", "cpu", "cpu", "cxl"],
    "hybridgen-5090-cxl": ["gpu", "cpu", "cpu", "cxl"],
    "kvdrive-l20": ["gpu", "cpu", "nvme"],
    "kvdrive-h20": ["gpu", "cpu", "nvme"],
    "kvdrive-4090": ["gpu", "cpu", "nvme"],
    "nelssa-h100": ["gpu", "cpu"],
    "nelssa-h100x2": ["gpu", "cpu"],
}
GPUS = {
    "t4": (65.0, 16, 300),
    "rtx3090": (71.2, 24, 936),
    "rtx4090": (165.2, 24, 1008),
    "rtx5090": (209.5, 32, 1792),
    "a6000": (154.8, 48, 768),
    "l20": (119.5, 48, 864),
    "a100-40": (312.0, 40, 1555),
    "a100-80": (312.0, 80, 2039),
    "h100-sxm": (989.5, 80, 3350),
    "h100-sxm-x2": (1979.0, 160, 6700),
    "h100-pcie": (756.5, 80, 2000),
    "h20": (148.0, 96, 4000),
    "h200": (989.5, 141, 4800),
}
"""Dense 16-bit TFLOP/s with fp32 accumulation, GB, and GB/s: datasheets and whitepapers; x2 is two of them as one."""
CXL = {
    "cxl-ipdps-a": (24.1, 220),
    "cxl-ipdps-b": (75.0, 280),
    "cxl-ipdps-c": (197.3, 0),
    "cxl-melody-a": (24.0, 214),
    "cxl-melody-b": (22.0, 271),
    "cxl-melody-c": (18.0, 394),
    "cxl-melody-d": (52.0, 239),
    "cxl-cmm-b": (60.0, 600),
}
"""GB/s and ns of an access from the host (0: unknown)."""


@pytest.mark.parametrize("name", list(KINDS))
def test_a_machine_has_the_devices_of_its_paper(name: str) -> None:
    with open_platform(name) as platform:
        assert [device.info.kind for device in platform.devices.values()] == KINDS[name]
        assert platform.clock.virtual
        assert platform.provenance == "extrapolated", "the papers leave much open"
    assert any(shipped.name == name for shipped in list_platforms())


@pytest.mark.parametrize("name", list(GPUS))
def test_a_gpu_has_the_numbers_of_its_data_sheet(name: str) -> None:
    tflops, gigabytes, gb_per_s = GPUS[name]
    profile = read_profile(find_profile(name))
    assert profile.memory is not None
    assert profile.executors[0].flops_per_s == pytest.approx(tflops * 1e12)
    assert profile.memory.capacity == gigabytes * 10**9
    assert profile.memory.read_bytes_per_s == profile.memory.write_bytes_per_s == gb_per_s * 10**9


@pytest.mark.parametrize("name", list(CXL))
def test_a_cxl_card_has_the_latency_and_rate_of_its_study(name: str) -> None:
    gb_per_s, latency_ns = CXL[name]
    profile = read_profile(find_profile(name))
    assert profile.memory is not None
    assert profile.memory.read_bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.005)
    assert profile.memory.latency_ns == latency_ns
    assert any("latency_ns: unknown" in guess for guess in profile.guesses) == (latency_ns == 0)


def from_cxl_ns(platform: Platform) -> int:
    """What the GPU's engine takes for 128 MiB of the CXL card."""
    gpu = platform.devices["emu:gpu"]
    region = platform.memory_owner("emu:cxl").alloc(1 << 27, phantom=True)
    target = gpu.alloc(1 << 27, phantom=True)
    begun = platform.clock.now()
    done = gpu.submit(Copy(region.at(0, 1 << 27), target.at(0, 1 << 27)), gpu.info.executors[1].queues[0])
    assert platform.clock.run_until(lambda: done.done, 1 << 60)
    return platform.clock.now() - begun


def test_a_second_host_slows_the_shared_pool_down() -> None:
    with open_platform("hybridgen-a100-cxl") as alone, open_platform("hybridgen-a100-cxl-shared") as shared:
        quiet, busy = from_cxl_ns(alone), from_cxl_ns(shared)
        load = shared.site.loads["second-host"]
        assert load.bytes_read > load.bytes_written > 0
    assert 1.3 * quiet < busy < 2.2 * quiet


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("hybridgen-a100-cxl", 1e12),
        ("hybridgen-a100-cxl-12gflops", 12.3e9),
        ("hybridgen-a100-cxl-5gflops", 5e9),
    ],
)
def test_the_rates_of_the_cpu_are_platforms_of_their_own(name: str, rate: float) -> None:
    entry = tomllib.loads((FOLDER.parent / "platforms" / f"{name}.toml").read_text())
    constants: dict[str, Any] = entry["devices"]["dram"].get("constants", {})
    cores = read_profile(find_profile("ddr4-3200"), constants=constants).executors[0]
    assert cores.flops_per_s == rate
    with open_platform(name) as platform:
        changed = platform.devices["emu:dram"].info.notes["changed"]
    assert ("executors.cores.flops_per_s" in changed) == ("gflops" in name)
