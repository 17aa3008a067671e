"""A stand-in for a GPU below the gpu driver: tensors of this host, and streams that run late and in any legal order.

It is an `Accelerator` (devices/drivers/gpu_runtime.py), so the unmodified driver runs on it. What is enqueued is only
noted down. Whenever somebody asks whether an event is done, some of what has been noted is carried out: from streams
that a seeded generator picks, in the order of each stream, and not before the events that a stream waits for. So work
that nothing orders runs in every order in turn, and a wait that the driver forgets shows as wrong bytes, a buffer that
it gives back too early likewise. What is enqueued may also stay undone although it could run: an event takes several
questions.

`fail_next` makes the next work or the next question fail as torch would; `refuse_registration` makes registering fail;
`hold` keeps events from being done. What is enqueued `beside` another GPU's stream comes after all that this stream has
so far, and what comes there later comes after it, as in CUDA. Memory is finite: `capacity` bytes, of which slabs take
theirs. New slabs are full of a pattern, not of zeros. Stand-ins of one `Board` reach each other's memory.

Fused attention is the flash attention that torch has for the host's cores, whose queries, weights and outputs have 16
bits as on a GPU. `bases` has, for each kernel that is there, the base of the log-sum-exp that it returns, which may be
another than it says. `anywhere` says what becomes of sequences with gaps between them: they work (True), are refused
(False), or are taken as if there were none (None).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_runtime import Accelerator, FusedKernel

_PATTERN = 0xC7
_NS_PER_WORK = 1_000
_BASES = {"flash": math.e, "flashinfer": 2.0}
"""What the kernels on GPUs have."""


@dataclass(eq=False)
class Stream:
    """What has been enqueued and not been carried out: work, events to reach, events to wait for.

    `events` of them were recorded so far; the first `done` of these have been said to be done.
    """

    line: deque[Callable[[], None] | Event | tuple[Event]] = field(default_factory=deque)
    events: int = 0
    done: int = 0


@dataclass(eq=False)
class Event:
    """A place in a stream, the `number`-th; `at_ns` is the stand-in's own time when it was reached, −1 before."""

    stream: Stream
    number: int
    at_ns: int = -1
    questions: int = 0


class HostFlash:
    """Flash attention on the host's cores, sequence by sequence, as a GPU would answer."""

    head_dims = frozenset(range(8, 257, 8))

    def __init__(self, kernel: str, base: float, anywhere: bool | None) -> None:
        self.name = f"{kernel} on the host's cores"
        self.base = _BASES[kernel]
        self.anywhere = kernel == "flash"
        self.launches = 0
        self._true_base, self._works_anywhere = base, anywhere

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, first: NDArray[np.int64], lengths: NDArray[np.int64], scale: float
    ) -> tuple[Tensor, Tensor]:
        if first[0] != 0 or (first[1:] != (first + lengths)[:-1]).any():
            if not self.anywhere or self._works_anywhere is False:
                raise RuntimeError("sequences with gaps between them are refused, as the test asked for")
            if self._works_anywhere is None:
                first = np.cumsum(lengths) - lengths
        assert len({q.dtype, k.dtype, v.dtype}) == 1, "one type for all"
        assert not any(x.data_ptr() % 16 for x in (k, v)), "rows are loaded by 16 bytes"
        assert lengths.min() > 0, "a sequence without rows ends the process"
        self.launches += 1
        parts = [
            self._one(q[i], k[a : a + n], v[a : a + n], scale)
            for i, (a, n) in enumerate(zip(first, lengths, strict=True))
        ]
        output, lse = (torch.stack(part) for part in zip(*parts, strict=True))
        return output, lse / math.log(self._true_base)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = flash(q[None, None], k[None, None], v[None, None], scale=scale)
        # Where no row counts, the kernel for cores answers 0, which may be a number; that for GPUs answers +inf.
        nothing = (q.float() @ k.float().T * scale == -torch.inf).all(dim=1)
        return output[0, 0], torch.where(nothing, torch.inf, lse[0, 0])


@dataclass
class Board:
    """GPUs that reach each other."""

    members: list[HostAccelerator] = field(default_factory=list)


class HostAccelerator:
    """See the module. `eager` carries everything out at once, which is legal too."""

    chases = True

    def __init__(
        self,
        seed: int = 0,
        capacity: int = 1 << 28,
        board: Board | None = None,
        name: str = "host:0",
        eager: bool = False,
        questions: int = 3,
        bases: Mapping[str, float] = _BASES,
        anywhere: bool | None = True,
    ) -> None:
        self.name = name
        self.device = torch.device("cpu")
        self.model = f"tensors of this host in place of a GPU, streams in the order of seed {seed}"
        self._random = Random(seed)
        self._capacity = capacity
        self._taken = 0
        self._eager = eager
        self._questions = questions
        self._kernels = {kernel: HostFlash(kernel, base, anywhere) for kernel, base in bases.items()}
        self._streams: list[Stream] = []
        self._now_ns = 0
        self._failures: deque[Literal["memory", "lost"]] = deque()
        self._refusals = 0
        self._held = False
        self._lost = False
        self.registered: dict[int, int] = {}
        """Address → bytes of host memory that is registered now."""
        self.carried_out = 0
        self.closed = False
        self._board = board
        if board is not None:
            board.members.append(self)

    # The back door

    def fail_next(self, fault: Literal["memory", "lost"]) -> None:
        """The next work that is enqueued fails: there is no memory for it, or the GPU is lost with it."""
        self._failures.append(fault)

    def forgive(self) -> None:
        """What `fail_next` has asked for and has not happened yet does not happen."""
        self._failures.clear()

    def refuse_registration(self, times: int = 1) -> None:
        """The next attempts to register host memory fail."""
        self._refusals = times

    def hold(self, held: bool = True) -> None:
        """While held, nothing is carried out and no event is done."""
        self._held = held

    def lose(self) -> None:
        """The GPU is gone: every call fails from now on."""
        self._lost = True

    # What the driver calls

    def facts(self) -> dict[str, str]:
        return {"gpu": self.model, "torch": str(torch.__version__)}

    def memory(self) -> tuple[int, int]:
        self._alive()
        return self._capacity - self._taken, self._capacity

    def slab(self, nbytes: int) -> Tensor:
        self._alive()
        if nbytes > self._capacity - self._taken:
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate {nbytes} bytes on {self.name}")
        self._taken += nbytes
        return torch.full((nbytes,), _PATTERN, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> Tensor:
        self._alive()
        return torch.full((nbytes,), _PATTERN, dtype=torch.uint8)

    def stream(self) -> Stream:
        self._alive()
        self._streams.append(Stream())
        return self._streams[-1]

    def enqueue(self, stream: Stream, work: Callable[[], None], beside: Stream | None = None) -> None:
        self._alive()
        if self._failures:
            if self._failures.popleft() == "memory":
                raise torch.OutOfMemoryError(f"out of memory: tried to allocate a tensor on {self.name}")
            self._lost = True
            self._alive()
        if beside is None:
            stream.line.append(work)
            return
        for earlier, later in ((beside, stream), (stream, beside)):  # before the work, and behind it
            earlier.events += 1
            event = Event(earlier, earlier.events)
            earlier.line.append(event)
            later.line.append((event,))
            if later is stream:
                stream.line.append(work)

    def record(self, stream: Stream) -> Event:
        self._alive()
        stream.events += 1
        event = Event(stream, stream.events)
        stream.line.append(event)
        if self._eager and not self._held:
            self._run_all()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._alive()
        stream.line.append((event,))

    def done(self, event: Event) -> bool:
        self._alive()
        if self._held:
            return False
        for _ in range(self._random.randrange(1, 4)):
            ready = [
                (member, stream)
                for member in (self._board.members if self._board is not None else [self])
                if not member._held and not member._lost
                for stream in member._streams
                if member._can_step(stream)
            ]
            if ready:
                member, stream = self._random.choice(ready)
                member._step(stream)
        if event.at_ns >= 0:
            event.questions += 1
            if self._eager or event.questions >= self._random.randrange(1, self._questions + 1):
                event.stream.done = max(event.stream.done, event.number)
        return event.number <= event.stream.done

    def elapsed_ns(self, first: Event, last: Event) -> int:
        assert min(first.at_ns, last.at_ns) >= 0, "both events are done"
        return last.at_ns - first.at_ns

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        assert array.dtype == np.int64
        return torch.from_numpy(np.array(array))

    def chase(self, words: Tensor, lines: Tensor, result: Tensor) -> None:
        line = at = 0
        while at < len(lines) and 0 <= line < len(lines):
            line = int(words[lines[line]])
            at += 1
        result[0] = line
        result[1] = at < len(lines) or not 0 <= line < len(lines)

    def fused(self, kernel: str) -> FusedKernel:
        if kernel not in self._kernels:
            raise RuntimeError(f"this stand-in has no {kernel}, as the test asked for")
        return self._kernels[kernel]

    def register(self, array: NDArray[np.uint8]) -> None:
        self._alive()
        if self._refusals:
            self._refusals -= 1
            raise RuntimeError(f"registering {array.nbytes} bytes was refused, as the test asked for")
        address = array.ctypes.data
        if address in self.registered:
            raise RuntimeError(f"{address:#x} is registered already")
        self.registered[address] = array.nbytes

    def unregister(self, array: NDArray[np.uint8]) -> None:
        del self.registered[array.ctypes.data]

    def reaches(self, other: Accelerator) -> bool:
        return self._board is not None and any(member is other for member in self._board.members)

    def close(self) -> None:
        self.closed = True

    def _alive(self) -> None:
        if self._lost:
            raise RuntimeError("CUDA error: the stand-in was lost, as the test asked for")

    def _can_step(self, stream: Stream) -> bool:
        if not stream.line:
            return False
        head = stream.line[0]
        return not isinstance(head, tuple) or head[0].at_ns >= 0

    def _step(self, stream: Stream) -> None:
        head = stream.line.popleft()
        if isinstance(head, Event):
            head.at_ns = self._now_ns
        elif not isinstance(head, tuple):
            self._now_ns += _NS_PER_WORK
            self.carried_out += 1
            with torch.no_grad():
                head()

    def _run_all(self) -> None:
        while ready := [stream for stream in self._streams if self._can_step(stream)]:
            self._step(ready[0])
