"""Launches: which function carries out which kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierloop.devices.commands import Launch
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.append import append
from tierloop.devices.kernels.attend import attend
from tierloop.devices.kernels.chase import chase
from tierloop.devices.kernels.cluster import cluster
from tierloop.devices.kernels.combine import combine
from tierloop.devices.kernels.dense import dense
from tierloop.devices.kernels.gather import gather
from tierloop.devices.kernels.logits import logits
from tierloop.devices.kernels.merge import merge
from tierloop.devices.kernels.operands import BytesOf
from tierloop.devices.kernels.quantize import dequantize, quantize
from tierloop.devices.kernels.score import score
from tierloop.devices.kernels.topk import topk

_FUNCTIONS: dict[type, Callable[..., None]] = {
    contract.Attend: attend,
    contract.Logits: logits,
    contract.Combine: combine,
    contract.Merge: merge,
    contract.Score: score,
    contract.Topk: topk,
    contract.Gather: gather,
    contract.Append: append,
    contract.Quantize: quantize,
    contract.Dequantize: dequantize,
    contract.Cluster: cluster,
    contract.Dense: dense,
    contract.Chase: chase,
}


def run(launch: Launch, bytes_of: BytesOf, threads: int = 1) -> int:
    """See the package's `run`."""
    if threads < 1:
        raise ValueError(f"threads is {threads}; allowed: at least 1")
    args: Any = launch.args
    _FUNCTIONS[type(args)](args, launch.reads, launch.writes, bytes_of, threads)
    sizes = [sum([segment.spans.nbytes for segment in operand]) for operand in launch.reads]
    return contract.flops(args, sizes)
