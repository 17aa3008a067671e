"""What a device is and can do: frozen data, numbers and sets, never strings to parse.

A *memory* holds regions; an *executor* runs kernels and moves bytes. A device has memories, executors, or both. Each
pair of executor and memory that can reach each other has a `Path`; a pair without one cannot, and `submit` answers
`Unsupported`. Names of memories are unique in a platform: the device's name where it has one memory, `device/name`
where it has several. Queues are numbered over the whole device; each belongs to one executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Provenance = Literal["real", "emulated"]
Coherence = Literal["host-only", "snooping", "none"]


@dataclass(frozen=True)
class Path:
    """How an executor reaches a memory. Rates in bytes/s, latency in ns; 0 as a rate means unknown.

    `mlp` is the number of outstanding dependent-free line accesses (memory-level parallelism).
    """

    memory: str
    latency_ns: int
    read_bytes_per_s: int
    write_bytes_per_s: int
    mlp: int = 1
    coherence: Coherence = "snooping"


@dataclass(frozen=True)
class MemoryInfo:
    """A memory. `alignment` holds for offsets and sizes of spans, in bytes (1 for byte-addressable memory)."""

    name: str
    capacity: int
    alignment: int = 1
    byte_addressable: bool = True
    persistent: bool = False


@dataclass(frozen=True)
class ExecutorInfo:
    """An executor: its queues, what each may carry, and the memories that it reaches.

    `verbs` is a subset of {"read", "write", "copy", "flush"}; `kernels` names kernels; `largest_transfer` is in bytes
    per command (0: no limit); `depth` is the number of commands that one queue holds.
    """

    name: str
    kind: Literal["cores", "gpu", "pnm", "dma", "none"]
    queues: tuple[int, ...]
    verbs: frozenset[str]
    kernels: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    paths: tuple[Path, ...] = ()
    depth: int = 4096
    largest_transfer: int = 0

    def path(self, memory: str) -> Path | None:
        """The path to a memory, or None where it cannot be reached."""
        return self._by_memory.get(memory)

    @cached_property
    def reached(self) -> frozenset[str]:
        """The memories that have a path."""
        return frozenset(self._by_memory)

    @cached_property
    def _by_memory(self) -> dict[str, Path]:
        return {path.memory: path for path in reversed(self.paths)}  # every submit asks; the first of a name counts


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a device's kernels: what the error bound is computed from.

    `microkernel` names the code and lane order: devices with the same name, on one instruction set, give the same
    bits. `accumulator` and `exp` name the float type of sums and of the exponential; `wire` that of states.
    Without `cut_invariant` the order of sums depends on the launch: its results keep the bound, and not the bits, when
    rows are cut into other runs, roots or launches.
    `fused` names types of rows for which `attend` may be carried out by a kernel that rounds queries, weights and
    outputs to that type, wherever head_dim and head_dim_v are equal and there is no window and no soft-cap. Its states
    have the value of others and another m (kernels/contract.py).
    """

    microkernel: str
    accumulator: Literal["float16", "float32", "float64"] = "float32"
    exp: Literal["float16", "float32", "float64"] = "float32"
    wire: Literal["float16", "float32"] = "float32"
    cut_invariant: bool = True
    fused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DeviceInfo:
    """Everything that schedulers and reports may know about a device.

    `dilation` is σ: rates are divided and latencies multiplied by it. `guesses` lists constants that are unknown or
    assumed; a result that rests on one is `extrapolated`. `slowed` says what holds commands back that the device itself
    would have ended sooner: numbers of a real device are then not `measured`.
    Nor are they where `model` is not empty: it says which model of hardware answers a real driver (`System.model`).
    """

    name: str
    kind: Literal["gpu", "cpu", "cxl", "nvme", "pnm", "null", "reference"]
    provenance: Provenance
    memories: tuple[MemoryInfo, ...]
    executors: tuple[ExecutorInfo, ...] = ()
    arithmetic: Arithmetic | None = None
    numa_node: int | None = None
    bus_address: str | None = None
    dilation: int = 1
    guesses: tuple[str, ...] = ()
    slowed: tuple[str, ...] = ()
    model: str = ""
    notes: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def executor_of(self, queue: int) -> ExecutorInfo | None:
        """The executor that a queue belongs to."""
        return self._by_queue.get(queue)

    @cached_property
    def _by_queue(self) -> dict[int, ExecutorInfo]:
        return {queue: executor for executor in reversed(self.executors) for queue in executor.queues}

    def memory(self, name: str) -> MemoryInfo | None:
        """The memory with that full name."""
        return next((m for m in self.memories if m.name == name), None)
