"""A place to test archives: a small machine whose drive keeps its bytes in a file, and what archives must hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.machines import write_machine
from tierloop.devices.regions import Segment
from tierloop.devices.registry import open_platform
from tierloop.runtime.archive import Archive
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape

T = TypeVar("T")
Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

DRIVE = "emu:nvme"
SHAPE = KVShape(num_layers=2, num_kv_heads=2, group=2, head_dim=8, head_dim_v=12)
ENTRIES = EntryShape(SHAPE, 2)
"""160 bytes each: 25.6 of them in a media block."""
MOST = 40
NOTES = 3_000


@contextmanager
def machine(folder: Path, keep: Path | None = None, phantom: bool = False, shape: KVShape = SHAPE) -> Iterator[Engine]:
    """An engine on a freshly opened machine, with the drive's bytes in a file if one is given."""
    folder.mkdir(exist_ok=True)
    path = write_machine(folder)
    overrides = {} if keep is None else {"devices.nvme.keep": str(keep)}
    with open_platform(path, overrides=overrides, check_hazards=True, only=("dram", "nvme")) as platform:
        engine = Engine(platform, shape, phantom=phantom)
        yield engine
        engine.close()


def order_of(seed: int, first: int, last: int, heads: int = SHAPE.num_kv_heads) -> Int64:
    """Entries [first, last) in an order of its own for each head."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(np.arange(first, last)) for _ in range(heads)])


@dataclass
class Content:
    """What an archive must hold, in plain dicts."""

    tokens: tuple[int, ...] = ()
    length: int = 0
    entries: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """By layer, head and entry."""
    notes: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def lay(self, layer: int, order: Int64, data: Bytes) -> None:
        """Entries (heads, n) with bytes (heads, n, nbytes)."""
        for head, numbers in enumerate(order.tolist()):
            for entry, rows in zip(numbers, data[head], strict=True):
                self.entries[layer, head, entry] = rows.tobytes()

    def copy(self) -> Content:
        """A copy that changes on its own."""
        return Content(self.tokens, self.length, dict(self.entries), dict(self.notes))


def new(engine: Engine, name: str = "r0", most: int = MOST, appends: int | None = 6) -> Archive:
    """An archive of the rig's shape."""
    return Archive(engine, DRIVE, name, "model", ENTRIES, most, NOTES, appends)


def run(engine: Engine, call: Callable[[], Awaitable[T]]) -> T:
    """Drive a coroutine to its end."""

    async def main() -> T:
        return await call()

    return engine.loop.run(main())


async def read_entries(engine: Engine, archive: Archive, layer: int, heads: Int64, entries: Int64) -> list[bytes]:
    """Entries as they are read by their media blocks."""
    media = archive.media(layer, heads, entries)
    into = np.zeros(media.spans.nbytes, dtype=np.uint8)
    if len(into):
        await engine.read(Segment(media.region, media.spans), into)
    size = archive.geometry.entries.nbytes
    return [into[at : at + size].tobytes() for at in media.offset.tolist()]


async def content_of(engine: Engine, archive: Archive) -> Content:
    """Everything that an archive holds, read from the medium."""
    found = Content(archive.tokens, archive.length)
    for layer in range(archive.geometry.layers):
        heads = np.repeat(np.arange(archive.geometry.heads), archive.count(layer))
        size, media = archive.geometry.entries.nbytes, archive.segment_of(layer)
        into = np.zeros(media.spans.nbytes, dtype=np.uint8)
        if len(into):
            await engine.read(Segment(media.region, media.spans), into)
        numbers = [np.flatnonzero(archive._layout._places[layer, h]) for h in range(archive.geometry.heads)]
        for head, entry, at in zip(heads, np.concatenate(numbers), media.offset, strict=True):
            found.entries[layer, int(head), int(entry)] = into[at : at + size].tobytes()
        for kind in archive.kinds(layer):
            found.notes[kind, layer] = (await archive.read_note(kind, layer)).tobytes()
    return found


async def adopted(engine: Engine, name: str = "r0", verify: bool = True) -> Content:
    """What `adopt` finds under a name."""
    archive = await Archive.adopt(engine, DRIVE, name, "model", verify)
    try:
        return await content_of(engine, archive)
    finally:
        archive.close(keep=True)
