"""The accelerator of real GPUs, on a torch whose CUDA is a fake: which calls are made, and what errors become."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fake_cuda import FakeTorch
from tierloop.devices.clocks import WallClock
from tierloop.devices.conformance import run
from tierloop.devices.device import Device
from tierloop.devices.drivers import gpu_runtime
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.gpu_runtime import CudaAccelerator, fault_of, full_float32
from tierloop.devices.site import Site
from tierloop.emulators.host_accelerator import HostAccelerator


def test_the_driver_passes_on_it() -> None:
    def opener(site: Site) -> Device:
        return open_gpu("gpu0", site, {"capacity": 1 << 24}, accelerator=CudaAccelerator("cuda:0", FakeTorch()))

    report = run(opener, ["identity", "memory", "ordering"])
    assert not report.failed, str(report)
    kernels = run(opener, only=["chase_follows_the_lines", "gather_keeps_every_byte", "topk_breaks_ties_by_index"])
    assert kernels.passed, str(kernels)


def test_without_a_compiler_at_run_time_it_offers_no_chase_and_says_why() -> None:
    accelerator = CudaAccelerator("cuda:0", FakeTorch(compiles=False))
    device = open_gpu("gpu0", Site(clock=WallClock()), {"capacity": 1 << 20}, accelerator=accelerator)
    assert "chase" not in device.info.executors[0].kernels
    assert "compiles no kernels" in device.info.notes["no_chase"]
    assert device.info.model == ""
    device.close()


def test_host_memory_is_registered_in_pieces_that_are_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:  # C7
    monkeypatch.setattr(gpu_runtime, "LARGEST_REGISTRATION", 4096)
    fake = FakeTorch()
    accelerator, memory = CudaAccelerator("cuda:0", fake), np.zeros(10_000, dtype=np.uint8)
    accelerator.register(memory)
    runtime = fake.cuda.cudart()
    assert sorted(runtime.pinned.values()) == [1808, 4096, 4096]
    accelerator.unregister(memory)
    assert not runtime.pinned


def test_a_registration_that_fails_half_way_is_undone_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # C7, E1
    monkeypatch.setattr(gpu_runtime, "LARGEST_REGISTRATION", 4096)
    fake = FakeTorch()
    accelerator = CudaAccelerator("cuda:0", fake)
    runtime = fake.cuda.cudart()
    runtime.refuse_from = 1
    with pytest.raises(
        RuntimeError, match=r"4096 bytes at 0x\w+, after 4096 of 10000 bytes, answered 2 \(out of memory\) on cuda:0 "
    ):
        accelerator.register(np.zeros(10_000, dtype=np.uint8))
    assert not runtime.pinned
    assert not runtime.last_error, "the next launch would trip over it"


def test_memory_that_two_gpus_have_registered_stays_so_until_both_let_go() -> None:  # E7: counted registrations
    fake, memory = FakeTorch(), np.zeros(4096, dtype=np.uint8)
    first, second = CudaAccelerator("cuda:0", fake), CudaAccelerator("cuda:0", fake)
    runtime = fake.cuda.cudart()
    first.register(memory)
    second.register(memory)
    assert (len(runtime.pinned), runtime.last_error) == (1, 0)
    first.unregister(memory)
    assert len(runtime.pinned) == 1, "the other one copies from it"
    second.unregister(memory)
    assert not runtime.pinned


def test_errors_of_torch_are_told_apart() -> None:
    assert fault_of(torch.OutOfMemoryError("no room")) == "memory"
    assert fault_of(RuntimeError("CUDA error: an illegal memory access was encountered")) == "lost"
    assert fault_of(RuntimeError("HIP error: invalid device function")) == "lost"
    assert fault_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == ""
    assert fault_of(ValueError("CUDA error")) == ""


def test_products_are_full_float32_for_a_while_only() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    for allowed in (True, False):
        matmul.allow_tf32 = allowed
        try:
            with full_float32(torch):
                assert not matmul.allow_tf32
            assert matmul.allow_tf32 is allowed
        finally:
            matmul.allow_tf32 = before


def test_whoever_uses_the_newer_switch_of_tf32_finds_it_as_it_was() -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older switch only")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with full_float32(torch):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


def test_gpus_of_another_kind_are_not_reached() -> None:
    accelerator = CudaAccelerator("cuda:0", FakeTorch())
    assert accelerator.reaches(CudaAccelerator("cuda:1", FakeTorch()))
    assert not accelerator.reaches(HostAccelerator())
