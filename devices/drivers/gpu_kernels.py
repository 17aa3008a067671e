"""The kernels of a GPU: which function prepares which launch. Imported when a GPU is opened, because it needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tierloop.devices.commands import Launch
from tierloop.devices.drivers import gpu_attention, gpu_codes, gpu_fused, gpu_selection
from tierloop.devices.drivers.gpu_fused import Fused
from tierloop.devices.drivers.gpu_operands import Int64, Upload
from tierloop.devices.kernels import contract

_PREPARED: dict[type, Callable[..., Callable[[Tensor, Upload], None]]] = {
    contract.Attend: gpu_attention.attend,
    contract.Logits: gpu_attention.logits,
    contract.Combine: gpu_attention.combine,
    contract.Merge: gpu_attention.merge,
    contract.Score: gpu_attention.score,
    contract.Topk: gpu_selection.topk,
    contract.Gather: gpu_selection.gather,
    contract.Append: gpu_codes.append,
    contract.Quantize: gpu_codes.quantize,
    contract.Dequantize: gpu_codes.dequantize,
    contract.Cluster: gpu_selection.cluster,
}


def prepared(
    launch: Launch, reads: list[Int64], writes: list[Int64], room: int, fused: Fused | None = None
) -> Callable[[Tensor, Upload], None]:
    """The work of a launch, given the slab; `reads` and `writes` are the spans of its operands there.

    `room` is what it may need besides, in bytes, roughly: more means fewer and larger pieces of work. `attend` is
    carried out by a fused kernel where there is one and the launch fits it.
    Raises ValueError, naming run or root, for what does not fit.
    """
    args: Any = launch.args
    if fused is not None and isinstance(args, contract.Attend):
        work = gpu_fused.attend(args, reads, writes, room, fused)
        if work is not None:
            return work
    return _PREPARED[type(args)](args, reads, writes, room)
