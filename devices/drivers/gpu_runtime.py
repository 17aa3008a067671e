"""The accelerator: everything of a GPU that the gpu driver touches, and nothing else (CUDA and ROCm alike, by torch).

The driver is handed an `Accelerator`. Production hands it `CudaAccelerator`; tests hand it a stand-in whose streams run
late and out of order (emulators/host_accelerator.py), and the driver on both is the same code. What must hold:

- Work is a function without arguments. It is enqueued on a stream, and whatever torch does in it is done on that
  stream: there is no implicit one. It may be carried out at any time after that, and by itself it orders nothing.
- Work of one stream is done in order. Streams are ordered by `wait` only, which names an event that was recorded.
- Tensors that work makes belong to its stream and are used nowhere else; what outlives work (the slab, page-locked
  buffers) is kept by the driver until an event behind the last work that names it is done.
- `done` never blocks. Every method may raise what torch raises; `fault_of` says what that means.

float32 products are full float32 while work runs: TF32, a switch of the whole process, is put back behind it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Fault = Literal["memory", "lost", ""]
Stream = Any
Event = Any
LARGEST_REGISTRATION = 1 << 32
"""Bytes: larger pieces at once have failed in the field."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context, not for one."""

_CHASES: dict[tuple[Any, str], tuple[Any, str]] = {}
"""By torch and GPU: the kernel `chase`, or None and why there is none. It is compiled once in a process."""
_REGISTERED: dict[tuple[Any, int, int], int] = {}
"""By torch, address and size: how many GPUs have this host memory registered. The system takes it only once."""

_CHASE = """
extern "C" __global__ void chase(const long long* words, const long long* lines, int n, long long* result) {
    long long line = 0;
    int at = 0;
    for (; at < n && line >= 0 && line < n; ++at) line = words[lines[line]];
    result[0] = line;
    result[1] = at < n || line < 0 || line >= n;
}
"""


class FusedKernel(Protocol):
    """Attention by one kernel, which rounds queries, weights and outputs to the type of the rows (gpu_fused.py).

    `base` is that of the logarithm in what it returns, `head_dims` are those that it takes. `anywhere` says that it has
    an argument for sequences with gaps between them; whether it works is tried.
    """

    name: str
    base: float
    head_dims: frozenset[int]
    anywhere: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, first: NDArray[np.int64], lengths: NDArray[np.int64], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Within work: q (n, queries, d), k and v (rows, d); sequence i is lengths[i] > 0 rows, from first[i] on.

        Unless it takes them anywhere, sequences follow each other without gaps, from row 0 on. Returns the output
        (n, queries, d) and its log-sum-exp (n, queries). Raises RuntimeError for what it does not take.
        """


class Accelerator(Protocol):
    """A GPU, or what stands in for one: then `model` says so, and it is passed on in `DeviceInfo`."""

    name: str
    model: str
    device: torch.device
    chases: bool
    """Whether `chase` measures the memory, and not the launches of single accesses."""

    def facts(self) -> dict[str, str]:
        """What is known of it: name, compute capability, versions of driver and runtime."""

    def memory(self) -> tuple[int, int]:
        """Bytes of its memory that are free, and all."""

    def slab(self, nbytes: int) -> Tensor:
        """So much of its memory in one piece, uint8; nothing is said of what is in it."""

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory that its copy engines reach, uint8."""

    def stream(self) -> Stream:
        """A new stream."""

    def enqueue(self, stream: Stream, work: Callable[[], None], beside: Stream = None) -> None:
        """Have work done on the stream; `beside` is the stream of another GPU that the work reaches."""

    def record(self, stream: Stream) -> Event:
        """An event behind everything that was enqueued so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on the stream from now on comes after the event."""

    def done(self, event: Event) -> bool:
        """Whether everything before the event has been done."""

    def elapsed_ns(self, first: Event, last: Event) -> int:
        """Time between two events that are done, by the GPU's own clock."""

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        """Within work: an int64 array, which nobody changes any more, as a tensor of the GPU."""

    def chase(self, words: Tensor, lines: Tensor, result: Tensor) -> None:
        """Within work: follow the numbers in `words` at `lines`; result int64 (2,): the last one, and 1 for a fault."""

    def fused(self, kernel: str) -> FusedKernel:
        """The fused attention kernel "flash" or "flashinfer". Raises RuntimeError with the reason why there is none."""

    def register(self, array: NDArray[np.uint8]) -> None:
        """Page-lock host memory where it lies. Raises RuntimeError with the reason; the GPU works on."""

    def unregister(self, array: NDArray[np.uint8]) -> None:
        """Undo one `register`, the last of all GPUs for good; what goes wrong is of no use to anybody."""

    def reaches(self, other: Accelerator) -> bool:
        """Whether its copy engines reach the memory of the other one."""

    def close(self) -> None:
        """Give back what it holds by itself."""


def fault_of(error: BaseException) -> Fault:
    """What an exception of torch means: out of memory, the GPU is lost to this process, or something else."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "memory"
    lost = isinstance(error, getattr(torch, "AcceleratorError", ())) or (
        isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "HIP error" in str(error))
    )
    return "lost" if lost else ""


class CudaAccelerator:
    """A GPU of this machine, by torch.cuda; ROCm's torch answers to the same names. `name` is "cuda:0" or the like.

    `torch` is imported if it is not given.
    """

    model = ""

    def __init__(self, name: str, torch: Any = None) -> None:
        if torch is None:
            import torch
        self._torch: Any = torch
        self._cuda: Any = torch.cuda  # most of it has no types
        self.name = name
        self.device = torch.device(name)
        with self._cuda.device(self.device):
            self._cuda.init()
        if (torch, name) not in _CHASES:
            _CHASES[torch, name] = self._compiled()
        self._chase, self._why_no_chase = _CHASES[torch, name]
        self.chases = self._chase is not None

    def facts(self) -> dict[str, str]:
        torch = self._torch
        seen = self._cuda.get_device_properties(self.device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        facts = {
            "gpu": seen.name,
            "compute_capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": str(seen.multi_processor_count),
            "runtime": runtime,
            "torch": str(torch.__version__),
        }
        if self._why_no_chase:
            facts["no_chase"] = self._why_no_chase
        return facts

    def memory(self) -> tuple[int, int]:
        free, total = self._cuda.mem_get_info(self.device)
        return int(free), int(total)

    def slab(self, nbytes: int) -> Tensor:
        slab: Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)
        return slab

    def pinned(self, nbytes: int) -> Tensor:
        with self._cuda.device(self.device):  # or a context on the first GPU is made for it
            buffer: Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return buffer

    def stream(self) -> Stream:
        return self._cuda.Stream(self.device)

    def enqueue(self, stream: Stream, work: Callable[[], None], beside: Stream = None) -> None:
        with full_float32(self._torch), self._cuda.stream(beside), self._cuda.stream(stream), self._torch.no_grad():
            work()

    def record(self, stream: Stream) -> Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        return bool(event.query())

    def elapsed_ns(self, first: Event, last: Event) -> int:
        return max(0, round(float(first.elapsed_time(last)) * 1e6))

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        # The caching allocator of page-locked memory reuses the copy only when the stream is done with it.
        mine = array if array.flags.writeable else array.copy()
        uploaded: Tensor = self._torch.from_numpy(mine).pin_memory().to(self.device, non_blocking=True)
        return uploaded

    def chase(self, words: Tensor, lines: Tensor, result: Tensor) -> None:
        self._chase(grid=(1, 1, 1), block=(1, 1, 1), args=(words, lines, len(lines), result))

    def fused(self, kernel: str) -> FusedKernel:
        from tierloop.devices.drivers.gpu_flash import FlashInfer, TorchFlash

        made: FusedKernel = (FlashInfer if kernel == "flashinfer" else TorchFlash)(self, self._torch)
        return made

    def register(self, array: NDArray[np.uint8]) -> None:
        key = self._torch, array.ctypes.data, array.nbytes
        if key not in _REGISTERED:
            self._register(array)
            _REGISTERED[key] = 0
        _REGISTERED[key] += 1

    def _register(self, array: NDArray[np.uint8]) -> None:
        cudart = self._cuda.cudart()
        address, done = array.ctypes.data, 0
        while done < array.nbytes:
            nbytes = min(LARGEST_REGISTRATION, array.nbytes - done)
            with self._cuda.device(self.device):
                status = int(cudart.cudaHostRegister(address + done, nbytes, _PORTABLE))
            if status:
                self._absorb()
                if done:
                    self._unregister(address, done)
                raise RuntimeError(
                    f"cudaHostRegister of {nbytes} bytes at {address + done:#x}, after {done} of {array.nbytes} bytes, "
                    f"answered {status} ({_status_name(cudart, status)}) on {self.name} with flags {_PORTABLE}; "
                    f"RLIMIT_MEMLOCK is {_memlock_limit()}"
                )
            done += nbytes

    def unregister(self, array: NDArray[np.uint8]) -> None:
        key = self._torch, array.ctypes.data, array.nbytes
        _REGISTERED[key] -= 1
        if not _REGISTERED[key]:
            del _REGISTERED[key]
            self._unregister(array.ctypes.data, array.nbytes)

    def reaches(self, other: Accelerator) -> bool:
        if not isinstance(other, CudaAccelerator):
            return False
        return other.device == self.device or bool(self._cuda.can_device_access_peer(self.device, other.device))

    def close(self) -> None:
        self._cuda.empty_cache()

    def _unregister(self, address: int, nbytes: int) -> None:
        cudart = self._cuda.cudart()
        for at in range(address, address + nbytes, LARGEST_REGISTRATION):
            if int(cudart.cudaHostUnregister(at)):
                self._absorb()

    def _absorb(self) -> None:
        """A call that was refused leaves its error for the next launch to trip over: let a launch of ours do so."""
        try:
            self._torch.zeros(1, device=self.device)
        except RuntimeError as error:
            if fault_of(error) != "lost":
                raise

    def _compiled(self) -> tuple[Any, str]:
        compile_kernel = getattr(self._cuda, "_compile_kernel", None)
        if compile_kernel is None:
            return None, "this torch compiles no kernels from source"
        try:
            with self._cuda.device(self.device):
                made = compile_kernel(_CHASE, "chase")
            self._chase = made
            if self._chased() != [0, 0]:
                return None, "chase was compiled and does not follow three lines"
        except Exception as error:  # whatever the compiler at run time is missing, all else works without it
            return None, f"chase was not compiled: {type(error).__name__}: {error}"
        return made, ""

    def _chased(self) -> list[int]:
        """Where three lines lead that form a circle, and the fault."""
        torch = self._torch
        found: list[list[int]] = []

        def work() -> None:
            words, lines = (self.upload(np.array(numbers)) for numbers in ([2, 0, 1], [0, 1, 2]))
            result = torch.zeros(2, dtype=torch.int64, device=self.device)
            self.chase(words, lines, result)
            found.append(result.cpu().tolist())

        self.enqueue(self.stream(), work)
        return found[0]


@contextmanager
def full_float32(torch: Any) -> Iterator[None]:
    """Products of float32 without TF32, for a while; what the process had set is put back."""
    matmul = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    try:
        older = matmul.allow_tf32
    except RuntimeError:  # the process uses the newer switch, and says so to whoever asks for the older one
        older = None
    matmul.allow_tf32 = False  # this one sets both; where they differ, products are refused
    try:
        yield
    finally:
        if older is not None:
            matmul.allow_tf32 = older
        if newer is not None and matmul.fp32_precision != newer:
            matmul.fp32_precision = newer


def _memlock_limit() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _status_name(cudart: Any, status: int) -> str:
    try:
        return str(cudart.cudaGetErrorString(cudart.cudaError(status)))
    except (AttributeError, TypeError, ValueError):
        return "no text"
