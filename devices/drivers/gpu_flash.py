"""Fused attention kernels of CUDA: the flash attention that torch brings along, and FlashInfer's where it is installed.

Both are driven as `FusedKernel` (gpu_runtime.py). Sequences are a batch of variable length, with one head for queries
and one for keys: a sequence here is one KV head, and its group of queries are rows.

**torch** has flash attention in its builds for CUDA (compute capability 8.0 and up) and, by another implementation, for
ROCm. Its log-sum-exp is natural, (1, n · queries) or (n, 1, queries); +inf stands for a query without any row. The
argument for lengths besides offsets (`seqused_k`) lets sequences lie anywhere; ROCm's builds refuse it.

**FlashInfer** has a log-sum-exp to base 2. Its wrapper plans a batch on the host and copies the plan from page-locked
memory that it uses again for the next one: a wrapper is not used again before the GPU is through with the last batch.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from tierloop.devices.drivers.gpu_runtime import CudaAccelerator

Int64 = NDArray[np.int64]
WORKSPACE_NBYTES = 128 << 20
"""What FlashInfer's pages advise for a wrapper's partial results."""


class TorchFlash:
    """torch.ops.aten._flash_attention_forward."""

    base = math.e
    head_dims = frozenset(range(8, 257, 8))
    anywhere = True

    def __init__(self, accelerator: CudaAccelerator, torch: Any) -> None:
        self._accelerator, self._torch = accelerator, torch
        self._forward: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
        if self._forward is None:
            raise RuntimeError(f"torch {torch.__version__} has no flash attention")
        self.name = f"flash attention of torch {torch.__version__}"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, first: Int64, lengths: Int64, scale: float
    ) -> tuple[Tensor, Tensor]:
        torch, (n, queries, dim) = self._torch, q.shape
        ends, used = first + lengths, None
        if (first[1:] != ends[:-1]).any():
            used = self._int32(lengths)
        output, lse, *_ = self._forward(
            query=q.reshape(n * queries, 1, dim),
            key=k[:, None],
            value=v[:, None],
            cum_seq_q=torch.arange(0, (n + 1) * queries, queries, dtype=torch.int32, device=q.device),
            cum_seq_k=self._int32(np.append(first, ends[-1])),
            max_q=queries,
            max_k=int(lengths.max()),
            dropout_p=0.0,
            is_causal=False,
            return_debug_mask=False,
            scale=scale,
            seqused_k=used,
        )
        return output.view(n, queries, dim), lse.reshape(n, queries)

    def _int32(self, numbers: Int64) -> Tensor:
        return self._accelerator.upload(numbers).int()


class FlashInfer:
    """flashinfer.BatchPrefillWithRaggedKVCacheWrapper, with no row hidden from any query."""

    base = 2.0
    head_dims = frozenset({64, 128, 256})
    anywhere = False

    def __init__(self, accelerator: CudaAccelerator, torch: Any) -> None:
        self._accelerator, self._torch = accelerator, torch
        try:
            self._flashinfer: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise RuntimeError(f"FlashInfer is not there ({error}); install flashinfer-python") from error
        self.name = f"FlashInfer {getattr(self._flashinfer, '__version__', 'of an unknown version')}"
        self._used: list[tuple[Any, Any]] = []
        """Wrappers, and events behind the batch that each one had last."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, first: Int64, lengths: Int64, scale: float
    ) -> tuple[Tensor, Tensor]:
        torch, (n, queries, dim) = self._torch, q.shape
        wrapper = self._wrapper()
        wrapper.plan(
            torch.arange(n + 1, dtype=torch.int32) * queries,
            torch.tensor(np.append(first, first[-1] + lengths[-1]), dtype=torch.int32),
            num_qo_heads=1,
            num_kv_heads=1,
            head_dim_qk=dim,
            causal=False,
            sm_scale=scale,
            q_data_type=q.dtype,
        )
        output, lse = wrapper.run(q.reshape(n * queries, 1, dim), k[:, None], v[:, None], return_lse=True)
        now_on = torch.cuda.current_stream(self._accelerator.device)
        self._used.append((wrapper, self._accelerator.record(now_on)))
        return output.view(n, queries, dim), lse.reshape(n, queries)

    def _wrapper(self) -> Any:
        """One whose last batch is done, or a new one: there are as many as batches that are out at once."""
        for i, (wrapper, event) in enumerate(self._used):
            if self._accelerator.done(event):
                del self._used[i]
                return wrapper
        workspace = self._torch.empty(WORKSPACE_NBYTES, dtype=self._torch.uint8, device=self._accelerator.device)
        return self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
