"""torch as it is on a machine with GPUs, as far as the gpu driver asks; tensors lie on the host, and all is at once.

Page-locked memory is a ledger. Streams are names: `torch.cuda.stream` says which one is current, and work that is done
on none is an error, because the driver must never use the default one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class FakeEvent:
    """Done as soon as it is recorded."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        self._cuda, self._timed = cuda, enable_timing
        self.at = -1

    def record(self, stream: str) -> None:
        assert stream in self._cuda.streams
        self._cuda.ticks += 1
        self.at = self._cuda.ticks

    def query(self) -> bool:
        if self._cuda.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.at >= 0

    def elapsed_time(self, last: FakeEvent) -> float:
        assert self._timed, "an event that was made without timing has no time"
        return (last.at - self.at) * 1e-3


class FakeStream(str):
    """A stream by its name."""

    def wait_event(self, event: FakeEvent) -> None:
        assert event.at >= 0, "a wait for an event that was never recorded does nothing"


class FakeCudart:
    """Registering host memory: refuses what overlaps, more than 4 GiB at once, and whatever `refuse` says."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.largest = 0
        self.refuse_from = 1 << 62
        """The call, counted from 0, from which on none is granted."""
        self.calls = 0
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 1, "page-locked for every context"
        self.calls += 1
        self.largest = max(self.largest, nbytes)
        taken = any(address < a + n and a < address + nbytes for a, n in self.pinned.items())
        if taken or self.calls > self.refuse_from:
            self.last_error = 712 if taken else 2
            return self.last_error
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        if self.pinned.pop(address, None) is None:
            self.last_error = 713
            return 713
        return 0

    def cudaError(self, status: int) -> int:  # noqa: N802  # CUDA's name
        return status

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802  # CUDA's name
        return {2: "out of memory", 712: "already registered", 713: "not registered"}[status]


class FakeCuda:
    """torch.cuda of a machine with `count` GPUs."""

    def __init__(self, count: int, compiles: bool) -> None:
        self.count = count
        self.streams: set[str] = set()
        self.current = ""
        self.ticks = 0
        self.lost = False
        self.runtime = FakeCudart()
        if compiles:
            self._compile_kernel = self._compiled

    def init(self) -> None:
        """Nothing to start."""

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, device: Any) -> Any:
        number = device if isinstance(device, int) else 0
        return SimpleNamespace(
            name="Example GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
            pci_domain_id=0, pci_bus_id=0x41 + number, pci_device_id=0,
        )  # fmt: skip

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def can_device_access_peer(self, one: Any, other: Any) -> bool:
        return True

    def empty_cache(self) -> None:
        """Nothing is hoarded."""

    def cudart(self) -> FakeCudart:
        return self.runtime

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802  # torch's name
        made = FakeStream(f"stream {len(self.streams)}")
        self.streams.add(made)
        return made

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802  # torch's name
        return FakeEvent(self, enable_timing)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def current_stream(self, device: Any) -> FakeStream:
        assert self.current, "work on the default stream"
        return FakeStream(self.current)

    @contextmanager
    def stream(self, stream: str | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def _compiled(self, source: str, name: str) -> Any:
        assert 'extern "C"' in source
        assert name in source

        def chase(grid: Any, block: Any, args: tuple[Any, ...]) -> None:
            words, lines, n, result = args
            line = at = 0
            while at < n and 0 <= line < n:
                line = int(words[lines[line]])
                at += 1
            result[0], result[1] = line, at < n or not 0 <= line < n

        return chase


class FakeTorch:
    """The module: everything else is the real one's."""

    def __init__(self, count: int = 1, compiles: bool = True) -> None:
        self.cuda = FakeCuda(count, compiles)
        self.version = SimpleNamespace(cuda="12.8", hip=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def empty(self, *size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return torch.empty(*size, **more)

    def zeros(self, *size: Any, **more: Any) -> torch.Tensor:
        """The launch that an error of an earlier call surfaces at."""
        error, self.cuda.runtime.last_error = self.cuda.runtime.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {self.cuda.runtime.cudaGetErrorString(error)}")
        return torch.zeros(*size, **more)

    def from_numpy(self, array: Any) -> Any:
        assert self.cuda.current, "work on the default stream"
        tensor = torch.from_numpy(array)
        return SimpleNamespace(pin_memory=lambda: tensor.clone())
