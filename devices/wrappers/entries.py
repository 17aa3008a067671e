"""What a recording holds, as values: the header, and an entry for each line. recording.py says what the fields mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierloop.devices.spans import Spans


@dataclass(frozen=True)
class Header:
    """What was recorded; `memories` (name, capacity), `queues` (executor, numbers of its queues)."""

    version: int
    device: str
    kind: str
    provenance: Literal["real", "emulated"]
    info: str
    clock: Literal["virtual", "wall"]
    dilation: int
    memories: tuple[tuple[str, int], ...]
    queues: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Alloc:
    """A region was allocated."""

    seq: int
    at_ns: int
    memory: str
    region: int
    nbytes: int
    phantom: bool


@dataclass(frozen=True)
class Free:
    """A region was freed."""

    seq: int
    at_ns: int
    memory: str
    region: int


@dataclass(frozen=True)
class ManySpans:
    """Spans of which only the digest was kept: how many, their bytes, and the first byte that none reaches."""

    count: int
    nbytes: int
    end: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """A segment: spans of a region."""

    memory: str
    region: int
    spans: Spans | ManySpans


@dataclass(frozen=True)
class Array:
    """An array among a launch's arguments, by its digest."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Function:
    """A function among a launch's arguments, by its name."""

    name: str


Argument = bool | int | float | str | Array | Function | None


@dataclass(frozen=True)
class Ended:
    """A command that has ended; see recording.py. `args` holds (name, value)."""

    seq: int
    verb: str
    queue: int
    submitted_ns: int
    started_ns: int
    ended_ns: int
    reads: tuple[tuple[Place, ...], ...]
    writes: tuple[tuple[Place, ...], ...]
    after: tuple[int, ...]
    foreign: tuple[tuple[str, int], ...]
    args: tuple[tuple[str, Argument], ...]
    status: str
    error: str
    errno: int | None
    read: tuple[tuple[str, int], ...]
    written: tuple[tuple[str, int], ...]
    media_nbytes: int
    flops: int


Entry = Alloc | Free | Ended


@dataclass(frozen=True)
class Recording:
    """A whole recording, entries in the order of the file; `truncated` says that it ends within a line."""

    header: Header
    entries: tuple[Entry, ...]
    truncated: bool = False

    def in_order(self) -> list[Entry]:
        """The entries in the order in which they were asked for."""
        return sorted(self.entries, key=lambda entry: entry.seq)
