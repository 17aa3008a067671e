"""What a GPU says of itself: one memory, cores and two copy engines, and what they reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tierloop.devices.drivers.gpu_options import Options
from tierloop.devices.drivers.gpu_probe import Slot
from tierloop.devices.drivers.gpu_runtime import Accelerator
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels import contract

if TYPE_CHECKING:
    from tierloop.devices.drivers.gpu_fused import Fused

MICROKERNEL = "torch-eager-1"
"""Name and revision of the kernels' arithmetic: float32 throughout, in the order that torch chooses for a launch."""
DEPTH = 4096
"""Commands that a queue holds."""


class Reached(NamedTuple):
    """What the option `reaches` comes to: other GPUs, memories that the host maps, and GPUs that it cannot reach."""

    peers: tuple[str, ...]
    hosts: tuple[str, ...]
    refused: tuple[str, ...]

    @classmethod
    def of(cls, reaches: tuple[str, ...], gpus: Mapping[str, Accelerator], accelerator: Accelerator) -> Reached:
        """`gpus` are those that are open; any other name is that of memory which the host maps."""
        there = [name for name in reaches if name in gpus]
        peers = tuple(name for name in there if accelerator.reaches(gpus[name]))
        return cls(peers, tuple(name for name in reaches if name not in gpus), tuple(set(there) - set(peers)))


def describe(
    name: str,
    options: Options,
    accelerator: Accelerator,
    capacity: int,
    reached: Reached,
    slot: Slot,
    fused: Fused | None = None,
) -> DeviceInfo:
    near = Path(name, 0, 0, 0)
    hosts, peers = (tuple(Path(memory, 0, 0, 0) for memory in side) for side in (reached.hosts, reached.peers))
    cores = ExecutorInfo(
        name="gpu",
        kind="gpu",
        queues=tuple(range(options.queues)),
        verbs=frozenset({"copy", "flush"}),
        kernels=contract.KERNELS if accelerator.chases else contract.KERNELS - {"chase"},
        dtypes=contract.DTYPES,
        paths=(near, *hosts),
        depth=DEPTH,
    )
    engines = tuple(
        ExecutorInfo(
            name=engine,
            kind="dma",
            queues=(queue,),
            verbs=frozenset({"read", "write", "copy", "flush"}),
            paths=(near, *hosts),
            depth=DEPTH,
        )
        for queue, engine in enumerate(("h2d", "d2h"), options.queues)
    )
    between = ExecutorInfo(
        name="peer",
        kind="dma",
        queues=(options.queues + len(engines),),
        verbs=frozenset({"copy"}),
        paths=(near, *peers),
        depth=DEPTH,
    )
    notes = {**accelerator.facts(), "device": accelerator.name, "attention": _attention(fused)}
    notes["staging"] = f"{options.staging_buffers} buffers of {options.staging_nbytes} bytes"
    notes["register"] = (
        "host memory is page-locked where copies touch it" if options.register else "no: option register"
    )
    if reached.refused:
        notes["why"] = f"no peer access to {', '.join(reached.refused)}: copies have to go through the host"
    return DeviceInfo(
        name=name,
        kind="gpu",
        provenance="real",
        memories=(MemoryInfo(name, capacity),),
        executors=(cores, *engines, *([between] if peers else [])),
        arithmetic=_arithmetic(options, fused),
        numa_node=slot.numa_node,
        bus_address=slot.bus_address,
        model=accelerator.model,
        notes=notes,
    )


def _arithmetic(options: Options, fused: Fused | None) -> Arithmetic:
    if fused is None:
        return Arithmetic(MICROKERNEL, cut_invariant=False)
    return Arithmetic(f"{MICROKERNEL}+{options.attention}", cut_invariant=False, fused=fused.dtypes)


def _attention(fused: Fused | None) -> str:
    if fused is None:
        return "eager"
    where = "rows in long stretches stay where they lie" if fused.anywhere else "rows in one piece stay where they lie"
    return f"{fused.kernel.name} where a launch fits, {where}; eager otherwise"
