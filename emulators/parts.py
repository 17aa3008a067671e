"""What a device is made of, as read from a profile (profile.py): its memory, its executors, and sources."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

from tierloop.devices.info import Coherence
from tierloop.emulators.loaded import Curves
from tierloop.firmware_models.flash import FlashGeometry
from tierloop.firmware_models.pnm import PnmGeometry


@dataclass(frozen=True)
class MemoryProfile:
    """Sizes in bytes, rates in bytes/s, latency in ns. Rates are 0 where they follow from `flash` or `pnm`.

    With `curves`, the rates are their caps for reads and for writes alone, and the latency that of an idle memory.
    """

    capacity: int
    alignment: int
    byte_addressable: bool
    persistent: bool
    latency_ns: int
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    flash: FlashGeometry | None = None
    pnm: PnmGeometry | None = None
    curves: Curves | None = None


Lines = tuple[tuple[int, int], ...]
"""Memory-level parallelism: by the size of a span in bytes, ascending, thousandths of 64-byte lines under way."""


@dataclass(frozen=True)
class ExecutorProfile:
    """An executor. Times in ns, rates per second; 0 for what is not limited.

    Every command costs `overhead_ns`, and `span_ns` for each span that it moves, so that a transfer in pieces of n
    bytes has the efficiency n / (n + rate · span_ns). Before anything else it passes the command processor, which all
    queues share and which takes `issue_ns` for each, one after the other. `bytes_per_s` caps all transfers at once and
    `command_bytes_per_s` one of them. Random accesses of a command have `mlp_lines` lines under way (empty: no limit),
    so they move lines · 64 B / latency. `weights` holds the share of each queue in what it competes for.
    """

    name: str
    kind: Literal["cores", "gpu", "pnm", "dma"]
    queues: int
    depth: int
    verbs: frozenset[str]
    kernels: frozenset[str]
    dtypes: frozenset[str]
    coherence: Coherence
    weights: tuple[int, ...]
    largest_transfer: int
    overhead_ns: int
    span_ns: int = 0
    flops_per_s: int = 0
    dense_flops_per_s: int = 0
    mlp_lines: Lines = ()
    bytes_per_s: int = 0
    command_bytes_per_s: int = 0
    issue_ns: int = 0


@dataclass(frozen=True)
class Profile:
    """A device as read from its file, with the changes of the platform. `sources` maps each constant to its source."""

    name: str
    kind: Literal["gpu", "cpu", "cxl", "nvme", "pnm"]
    summary: str
    memory: MemoryProfile | None
    executors: tuple[ExecutorProfile, ...]
    guesses: tuple[str, ...]
    sources: dict[str, str]
    costs: dict[str, int | None] = field(default_factory=dict)
    """What it draws in watts and costs in dollars, where the file says so; None is unknown."""


def lines_of(lines: Lines, span_nbytes: int) -> int:
    """Thousandths of lines under way for random spans of that size: linear between the points, constant outside."""
    place = bisect_right(lines, span_nbytes, key=lambda point: point[0])
    if place == 0:
        return lines[0][1]
    if place == len(lines):
        return lines[-1][1]
    (low, below), (high, above) = lines[place - 1], lines[place]
    return below + (above - below) * (span_nbytes - low) // (high - low)
