"""What an archive of an earlier process says, read from the medium and checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region
from tierloop.devices.tables import Table
from tierloop.runtime.archive_catalogue import Key
from tierloop.runtime.archive_layout import Layout
from tierloop.runtime.archive_notes import Notebook
from tierloop.runtime.archive_pages import Stored, block_nbytes
from tierloop.runtime.archive_record import MAGIC, Append, Commit, checksum, stored_at, unpack_table
from tierloop.runtime.archive_twin import Twin
from tierloop.runtime.engine import Engine


async def read_commit(engine: Engine, key: Key, region: Region) -> tuple[Twin, Commit, Stored]:
    """The last commit in a region that is listed: its record, what it says, and where its table lies.

    Raises ConfigurationError that calls it damaged.
    """
    what = f"{region.memory}: archive {key[0]!r}"
    info = engine.platform.memory_owner(region.memory).info.memory(region.memory)
    assert info is not None
    block = block_nbytes(info.alignment)
    twin = Twin(engine, region, block, info.alignment, MAGIC)
    if region.nbytes < twin.nbytes:
        raise ConfigurationError(f"{what} is damaged: {region.nbytes} bytes are no archive")
    raw = np.zeros(twin.nbytes, dtype=np.uint8)
    await engine.read(region.at(0, twin.nbytes), raw)
    content = twin.read(raw)
    if content is None:
        raise ConfigurationError(f"{what} is damaged: there is no commit that is whole")
    end = region.nbytes // block
    said = Table(content if isinstance(content, dict) else {}, what)
    table = stored_at(said.get("table"), block, end, said, "table")
    text = await Notebook(engine, region, end, block, what).load(table, "its table")
    commit = unpack_table(text, what, region.nbytes)
    if (commit.name, commit.fingerprint) != key or commit.geometry.grid != info.alignment:
        raise ConfigurationError(f"{what} is damaged: what lies there is {commit.name!r} of {commit.fingerprint!r}")
    return twin, commit, table


async def verify_entries(engine: Engine, layout: Layout, appends: Sequence[Append], what: str) -> None:
    """Read all entries, segment by segment, and compare them with their checksums. Raises ConfigurationError."""
    geometry = layout.geometry
    for layer in range(geometry.layers):
        used, mine = int(layout.used[layer]), [append for append in appends if append.layer == layer]
        for head in range(geometry.heads if used else 0):
            raw = np.zeros(used, dtype=np.uint8)
            await engine.read(layout.region.at(int(layout.begin[layer, head]), used), raw)
            at = 0
            for append in mine:
                n = append.order.shape[1]
                if checksum(raw[at : at + n * geometry.entries.nbytes]) != append.checksums[head]:
                    raise ConfigurationError(f"{what} is damaged: entries of layer {layer}, head {head}")
                at += layout.stride(n)
