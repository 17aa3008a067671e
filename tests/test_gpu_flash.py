"""The fused kernels of CUDA, as far as a machine without a GPU goes: arguments against torch's own schema and its meta
tensors, and against a FlashInfer that computes on the host what its pages say."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fake_cuda import FakeTorch
from tierloop.devices.clocks import WallClock
from tierloop.devices.conformance import run
from tierloop.devices.device import Device
from tierloop.devices.drivers.gpu import GpuDevice, open_gpu
from tierloop.devices.drivers.gpu_flash import FlashInfer, TorchFlash
from tierloop.devices.drivers.gpu_runtime import CudaAccelerator
from tierloop.devices.errors import Unsupported
from tierloop.devices.site import Site

FIRST, LENGTHS = np.array([0, 3, 4]), np.array([3, 1, 2])


def uploads_to(device: str) -> Any:
    """As much of an accelerator as the kernels ask for."""
    return SimpleNamespace(
        upload=lambda array: torch.from_numpy(np.array(array)).to(device), device=torch.device(device)
    )


def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (3, 2, 64), keys and values (6, 64)."""
    random = torch.Generator().manual_seed(1)
    shapes = ((3, 2, 64), (6, 64), (6, 64))
    q, k, v = (torch.randn(shape, generator=random).half().to(device) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("gaps", [False, True])
def test_what_torch_is_given_fits_its_schema(gaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    operator = torch.ops.aten._flash_attention_forward
    kernel = TorchFlash(uploads_to("meta"), torch)

    def forward(**arguments: Any) -> Any:
        given.append(arguments)
        return operator(**arguments)

    kernel._forward = forward
    first = FIRST + np.array([2, 0, 5]) if gaps else FIRST
    q, k, v = operands("meta")
    output, lse = kernel.attend(q, torch.cat([k, k]), torch.cat([v, v]), first, LENGTHS, 0.125)
    assert (output.shape, output.dtype) == ((3, 2, 64), torch.float16)
    assert (lse.shape, lse.dtype) == ((3, 2), torch.float32)
    schema = {argument.name: argument for argument in operator.default._schema.arguments}
    assert given[0].keys() <= schema.keys()
    needed = {name for name, argument in schema.items() if not argument.has_default_value()}
    assert needed <= given[0].keys()
    assert (given[0]["seqused_k"] is not None) == gaps
    for name in ("cum_seq_q", "cum_seq_k"):
        assert given[0][name].shape == (4,)
        assert given[0][name].dtype == torch.int32
    assert (given[0]["max_q"], given[0]["max_k"]) == (2, 3)


def test_where_sequences_begin_and_end_is_said_in_rows() -> None:
    given: list[dict[str, Any]] = []
    kernel = TorchFlash(uploads_to("cpu"), torch)

    def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
        given.append(arguments)
        return torch.zeros(6, 1, 64), torch.zeros(1, 6)

    kernel._forward = forward
    kernel.attend(*operands("cpu"), FIRST, LENGTHS, 1.0)
    kernel.attend(*operands("cpu"), np.array([3, 5, 0]), LENGTHS, 1.0)
    one_after_another, anywhere = given
    assert one_after_another["cum_seq_q"].tolist() == [0, 2, 4, 6]
    assert one_after_another["cum_seq_k"].tolist() == [0, 3, 4, 6]
    assert anywhere["cum_seq_k"].tolist()[:3] == [3, 5, 0]
    assert anywhere["seqused_k"].tolist() == [3, 1, 2]


@pytest.mark.parametrize("shape", [(1, 6), (3, 1, 2)])
def test_both_shapes_that_builds_of_torch_answer_are_read(shape: tuple[int, ...]) -> None:
    kernel = TorchFlash(uploads_to("cpu"), torch)
    kernel._forward = lambda **_: (torch.zeros(6, 1, 64), torch.arange(6.0).view(shape), None)
    _, lse = kernel.attend(*operands("cpu"), FIRST, LENGTHS, 1.0)
    assert lse.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_torch_on_a_machine_without_gpus_is_refused_with_its_reason() -> None:
    accelerator = CudaAccelerator("cuda:0", FakeTorch())
    with pytest.raises(Unsupported, match=r"attention = 'flash': flash attention of torch .* does not run in float16"):
        open_gpu("gpu0", Site(clock=WallClock()), {"capacity": 1 << 20, "attention": "flash"}, accelerator=accelerator)


def test_without_flashinfer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    accelerator = CudaAccelerator("cuda:0", FakeTorch())
    options = {"capacity": 1 << 20, "attention": "flashinfer"}
    with pytest.raises(Unsupported, match=r"FlashInfer is not there .*install flashinfer-python"):
        open_gpu("gpu0", Site(clock=WallClock()), options, accelerator=accelerator)


class RaggedWrapper:
    """BatchPrefillWithRaggedKVCacheWrapper, computed on the host; a plan is for what runs behind it."""

    made = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("NHD", "fa2")
        RaggedWrapper.made += 1

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        causal: bool = False,
        sm_scale: float = 1.0,
        q_data_type: Any = torch.float16,
    ) -> None:
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "or planning waits for the GPU"
        assert (num_qo_heads, num_kv_heads, causal) == (1, 1, False)
        self._planned = (qo_indptr.tolist(), kv_indptr.tolist(), head_dim_qk, sm_scale, q_data_type)

    def run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> tuple[Tensor, Tensor]:
        queries, rows, dim, scale, dtype = self._planned
        assert return_lse
        assert q.shape == (queries[-1], 1, dim)
        assert (q.dtype, k.shape) == (dtype, v.shape and (len(k), 1, dim))
        outputs, sums = [], []
        for i in range(len(rows) - 1):
            mine, kv = slice(queries[i], queries[i + 1]), slice(rows[i], rows[i + 1])
            s = scale * q[mine, 0].float() @ k[kv, 0].float().T
            outputs.append((s.softmax(dim=-1) @ v[kv, 0].float()).to(dtype))
            sums.append(s.logsumexp(dim=-1) / math.log(2))
        return torch.cat(outputs)[:, None], torch.cat(sums)[:, None]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flashinfer")
    module.__dict__.update(BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper, __version__="0.9")
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(RaggedWrapper, "made", 0)
    return module


class Host:
    """As much of an accelerator as FlashInfer's kernel asks for; `through` is whether the GPU is through with all."""

    device = torch.device("cpu")
    through = True

    def record(self, stream: str) -> str:
        return stream

    def done(self, event: str) -> bool:
        assert event == "stream 0"
        return self.through


@pytest.fixture
def kernel(flashinfer: ModuleType) -> FlashInfer:
    fake = FakeTorch()
    fake.cuda.current = fake.cuda.Stream("cpu")
    return FlashInfer(Host(), fake)  # type: ignore[arg-type]  # all that it asks for


def test_flashinfer_gives_the_answer_to_base_2(kernel: FlashInfer) -> None:
    q, k, v = operands("cpu")
    output, lse = kernel.attend(q, k, v, FIRST, LENGTHS, 0.125)
    assert kernel.name == "FlashInfer 0.9"
    for i, (first, length) in enumerate(zip(FIRST, LENGTHS, strict=True)):
        s = 0.125 * q[i].double() @ k[first : first + length].double().T
        want = s.softmax(dim=-1) @ v[first : first + length].double()
        assert torch.allclose(lse[i].double() * math.log(kernel.base), s.logsumexp(dim=-1), atol=1e-5)
        assert torch.allclose(output[i].double(), want, atol=2e-3)


def test_a_wrapper_is_used_again_when_its_batch_is_done_and_not_before(
    kernel: FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done, made in ((False, 1), (False, 2), (False, 3), (True, 3), (True, 3)):
        monkeypatch.setattr(Host, "through", done)
        kernel.attend(*operands("cpu"), FIRST, LENGTHS, 0.125)
        assert RaggedWrapper.made == made


def test_the_driver_conforms_with_flashinfer_and_has_used_it(flashinfer: ModuleType) -> None:
    opened: list[GpuDevice] = []

    def opener(site: Site) -> Device:
        options = {"capacity": 1 << 20, "attention": "flashinfer"}
        opened.append(open_gpu("gpu0", site, options, accelerator=CudaAccelerator("cuda:0", FakeTorch())))
        return opened[-1]

    report = run(opener, only=["one_token_gives_its_value"])
    assert report.passed, str(report)
    assert "FlashInfer 0.9 where a launch fits" in opened[-1].info.notes["attention"]
    assert sum(device.fused_launches for device in opened) == 2
