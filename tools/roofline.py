"""What this machine can do at most, measured: the limits that kernels are held against.

A kernel that moves `nbytes` of memory and computes cannot take less than

    max(nbytes / read rate, flops / peak + conversions / conversion rate + exponentials / exponential rate)

Every rate is that of the loops of limit_kernels.py on the same threads in the same run. The read rate is sampled again
and again between the cases, and the median counts: a neighbour that slows one side for a while does not flatter the
other. Caches' sizes come from sysfs.
"""

from __future__ import annotations

import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import address_of
from tierloop.devices.kernels.lanes import CODES, ITEM, LANES
from tierloop.devices.kernels.pool import share
from tierloop.tools import limit_kernels

CACHES = Path("/sys/devices/system/cpu")
NO_CACHE_NBYTES = 32 << 20
"""The size of the last-level cache that is assumed where sysfs does not say."""
_PIECE = 4 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}


@dataclass(frozen=True)
class Work:
    """What a launch does: bytes of memory it must move, and what it computes."""

    nbytes: int
    flops: int = 0
    conversions: int = 0
    exponentials: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Limits:
    """Rates per second; `reads` are the samples of the read rate in the order in which they were taken."""

    threads: int
    reads: tuple[float, ...]
    peak_flops: float
    conversions: dict[str, float]
    exponentials: float

    @property
    def read(self) -> float:
        """Bytes/s, the median of all samples."""
        return statistics.median(self.reads)

    def shortest_s(self, work: Work) -> tuple[float, Literal["memory", "compute"]]:
        """The least time that the work takes here, and what it would be waiting for."""
        memory = work.nbytes / self.read
        compute = work.flops / self.peak_flops + work.exponentials / self.exponentials
        if work.dtype != "float32":
            compute += work.conversions / self.conversions[work.dtype]
        return max(memory, compute), "memory" if memory >= compute else "compute"


@dataclass
class Machine:
    """Measures the limits with `threads` threads, over a buffer of `nbytes` for reading."""

    threads: int
    nbytes: int = 512 << 20
    _reads: list[float] = field(default_factory=list)
    _computes: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nbytes = max(1, self.nbytes // _PIECE) * _PIECE
        self._buffer = huge_bytes(self.nbytes)
        self._buffer.view(np.uint32)[:] = 0x3F800000  # every page is there, and none is the page of zeros
        self._scratch = np.zeros(256, dtype=np.uint8)
        self._scratch[:8].view(np.float32)[:] = 0.75, 0.25
        random = np.random.default_rng(0)
        # Ordinary numbers in every type.
        self._small = random.integers(0x38, 0x40, limit_kernels.L1_NBYTES, dtype=np.uint8)
        self._negative = -10 * random.random(limit_kernels.L1_NBYTES // 4, dtype=np.float32)
        self._once_read()

    def sample_read(self, passes: int = 3) -> float:
        """Take a sample of the read rate: the median of some passes, bytes/s."""
        self._reads.append(self.nbytes / statistics.median(seconds(self._once_read) for _ in range(passes)))
        return self._reads[-1]

    def sample_compute(self, pieces: int = 64, tries: int = 3) -> None:
        """Take samples of everything that is no memory."""
        sink = address_of(self._scratch) + 64  # factor and summand lie before what the loops leave
        fma = limit_kernels.FMA_ROUNDS * limit_kernels.UNROLLED * LANES * 2
        for chains in limit_kernels.CHAINS:
            call = partial(limit_kernels.multiply_add_shared, pieces=pieces, chains=chains, sink=sink - 64)
            self._sample(f"fma {chains}", call, pieces * chains * fma, tries)
        small, nbytes = address_of(self._small), limit_kernels.L1_NBYTES * limit_kernels.PASSES * pieces
        for name, code in CODES.items():
            call = partial(limit_kernels.widen_shared, pieces=pieces, dtype=code, address=small, sink=sink)
            self._sample(name, call, nbytes // ITEM[code], tries)
        negative = address_of(self._negative.view(np.uint8))
        call = partial(limit_kernels.exponential_shared, pieces=pieces, address=negative, sink=sink)
        self._sample("exponentials", call, nbytes // 4, tries)

    @property
    def last_read(self) -> float:
        """The latest sample of the read rate, bytes/s."""
        return self._reads[-1]

    def limits(self) -> Limits:
        """Medians of the samples so far; there is one of everything."""
        rates = {name: statistics.median(samples) for name, samples in self._computes.items()}
        return Limits(
            self.threads,
            tuple(self._reads),
            max(rates[f"fma {chains}"] for chains in limit_kernels.CHAINS),
            {name: rates[name] for name in CODES},
            rates["exponentials"],
        )

    def _once_read(self) -> None:
        sink = address_of(self._scratch) + 64
        self.share(limit_kernels.read_shared, address_of(self._buffer), self.nbytes, _PIECE, sink)

    def _sample(self, name: str, call: Callable[..., None], amount: int, tries: int) -> None:
        self.share(call)
        self._computes.setdefault(name, []).extend(amount / seconds(partial(self.share, call)) for _ in range(tries))

    def share(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a loop of limit_kernels.py on all threads; its first argument is their counter."""
        counter = np.zeros(8, dtype=np.uint8)
        share(self.threads, partial(function, address_of(counter), *arguments))


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter_ns()
    call()
    return max(1, time.perf_counter_ns() - begun) / 1e9


def huge_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory in huge pages where the system has them, uint8 (nbytes,)."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def last_level_cache_nbytes(root: Path = CACHES) -> int:
    """Bytes of all last-level caches that this process's cores share; NO_CACHE_NBYTES where sysfs does not say."""
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        levels = []
        for index in (root / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level, size, sharers = (
                    (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            read = re.fullmatch(r"(\d{1,9})([KMG]?)", size)
            if read and level.isdecimal():
                levels.append((int(level), sharers, int(read[1]) * _UNITS[read[2]]))
        if levels:
            _, sharers, nbytes = max(levels)
            found[sharers] = nbytes
    return sum(found.values()) or NO_CACHE_NBYTES
