"""The record of a commit: what an archive holds, as it is written, and how much of what is read back is believed.

A commit is a sealed page in one of two places that says where its *table* lies. The table (JSON, in blocks) has the
sizes of the archive, the length of the request, and where tokens, orders and notes lie, each with its checksum. An
*order* tells of the appends since the commit before: int64 count, then (layer, n) of each; uint32 checksums of the n
entries of each head; int32 entry numbers, head by head, in the order in which they lie.

A table comes from outside: names, types, ranges and sizes are checked before anything is allocated for them.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.tables import Table
from tierloop.runtime.archive_geometry import Geometry
from tierloop.runtime.archive_pages import Bytes, Stored, runs_of
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.entries import EntryShape

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MAGIC = b"tl-done\0"
"""Of the sealed page of a commit."""
LARGEST = 1 << 48
"""Bytes that anything may have."""
LONGEST_KIND = 64
"""Characters of the kind of a note."""

NoteKey = tuple[str, int]
"""Kind and layer."""


class Append(NamedTuple):
    """Entries that were laid down side by side in each segment of a layer.

    `order` int32 (heads, n) are their numbers as they lie, `checksums` uint32 (heads,) those of their bytes.
    """

    layer: int
    order: Int32
    checksums: NDArray[np.uint32]


@dataclass(frozen=True)
class Commit:
    """What a table says."""

    name: str
    fingerprint: str
    geometry: Geometry
    length: int
    tokens: Stored
    orders: tuple[Stored, ...]
    notes: dict[NoteKey, Stored]


def checksum(data: Bytes) -> int:
    """CRC-32 of bytes."""
    return zlib.crc32(np.ascontiguousarray(data).data)


def pack_appends(appends: list[Append]) -> Bytes:
    """The bytes of an order."""
    head = np.array([len(appends), *(v for a in appends for v in (a.layer, a.order.shape[1]))], dtype=np.int64)
    parts = [head, *(a.checksums for a in appends), *(a.order for a in appends)]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def unpack_appends(raw: Bytes, geometry: Geometry) -> list[Append]:
    """What an order says. Raises ValueError for what cannot be one."""
    heads = geometry.heads
    if len(raw) < 8:
        raise ValueError("an order without a head")
    count = int(raw[:8].view(np.int64)[0])
    at = 8 + 16 * count
    if not 0 <= count <= len(raw) // 16 or at > len(raw):
        raise ValueError(f"an order of {count} appends in {len(raw)} bytes")
    table = raw[8:at].view(np.int64).reshape(count, 2)
    layers, sizes = table[:, 0].tolist(), table[:, 1].tolist()
    if any(not 0 <= layer < geometry.layers for layer in layers) or any(
        not 1 <= n <= geometry.most_entries for n in sizes
    ):
        raise ValueError("an order names a layer or a count that the archive does not have")
    if at + 4 * heads * (count + sum(sizes)) != len(raw):
        raise ValueError(f"an order of {len(raw)} bytes that should have {at + 4 * heads * (count + sum(sizes))}")
    sums = raw[at : at + 4 * heads * count].view(np.uint32).reshape(count, heads)
    at += 4 * heads * count
    made = []
    for layer, n, sums_of in zip(layers, sizes, sums, strict=True):
        made.append(Append(layer, raw[at : at + 4 * heads * n].view(np.int32).reshape(heads, n), sums_of))
        at += 4 * heads * n
    return made


def place_of(stored: Stored) -> list[Any]:
    """Where something lies, as a table says it; equally long whatever the checksum is."""
    return [stored.nbytes, f"{stored.checksum:08x}", runs_of(stored.blocks)]


def pack_table(commit: Commit) -> Bytes:
    """The bytes of a table."""
    geometry, shape = commit.geometry, commit.geometry.entries.shape
    content = {
        "name": commit.name,
        "fingerprint": commit.fingerprint,
        "layers": shape.num_layers,
        "heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v,
        "dtype": shape.dtype,
        "tokens_per_entry": geometry.entries.tokens,
        "most_entries": geometry.most_entries,
        "notes_nbytes": geometry.notes_nbytes,
        "appends": geometry.appends,
        "grid": geometry.grid,
        "length": commit.length,
        "tokens": place_of(commit.tokens),
        "orders": [place_of(order) for order in commit.orders],
        "notes": [[kind, layer, *place_of(note)] for (kind, layer), note in commit.notes.items()],
    }
    return np.frombuffer(json.dumps(content, separators=(",", ":")).encode(), dtype=np.uint8)


def unpack_table(raw: Bytes, place: str, region_nbytes: int) -> Commit:
    """What a table says; `region_nbytes` is what the archive's region has. Raises ConfigurationError naming `place`."""
    try:
        content = json.loads(raw.tobytes())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is damaged: its table is no table") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{place} is damaged: its table is no table")
    table = Table(content, place)
    layers, heads = (table.integer(key, 1, 1 << 16) for key in ("layers", "heads"))
    width, width_v = (table.integer(key, 1, 1 << 20) for key in ("head_dim", "head_dim_v"))
    dtype, tokens = table.text("dtype"), table.integer("tokens_per_entry", 1, 1 << 20)
    most_entries, appends = (table.integer(key, 1, 1 << 31) for key in ("most_entries", "appends"))
    notes_nbytes, grid = table.integer("notes_nbytes", 0, LARGEST), table.integer("grid", 1, 1 << 30)
    try:
        shape = KVShape(layers, heads, 1, width, width_v, dtype)  # type: ignore[arg-type]  # KVShape checks it
        geometry = Geometry(EntryShape(shape, tokens), most_entries, notes_nbytes, appends, grid)
    except ConfigurationError as error:
        raise table.error("", f"damaged: {error}") from error
    if geometry.nbytes != region_nbytes:
        raise table.error("", f"damaged: its sizes need {geometry.nbytes} bytes, and it has {region_nbytes}")
    rows = table.get("notes")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 5 for row in rows):
        raise table.error("notes", "damaged: a list of kind, layer, size, checksum and place was expected")
    notes: dict[NoteKey, Stored] = {}
    for kind, layer, *where in rows:
        if not isinstance(kind, str) or not 0 < len(kind) <= LONGEST_KIND:
            raise table.error("notes", f"damaged: {kind!r} is no kind of notes")
        key = kind, table.check_integer("notes", layer, 0, geometry.layers - 1)
        if key in notes:
            raise table.error("notes", f"damaged: {kind} of layer {layer} is there twice")
        notes[key] = stored_at(where, geometry.block, geometry.blocks, table, "notes")
    orders = table.get("orders")
    if not isinstance(orders, list):
        raise table.error("orders", "damaged: a list was expected")
    commit = Commit(
        name=table.text("name"),
        fingerprint=table.text("fingerprint"),
        geometry=geometry,
        length=table.integer("length", 0, geometry.most_tokens),
        tokens=stored_at(table.get("tokens"), geometry.block, geometry.blocks, table, "tokens"),
        orders=tuple(stored_at(order, geometry.block, geometry.blocks, table, "orders") for order in orders),
        notes=notes,
    )
    table.finish()
    return commit


def stored_at(where: Any, block: int, end: int, table: Table, key: str) -> Stored:
    """What `place_of` said, with every number checked: blocks below `end`, as many as the bytes need."""
    if not isinstance(where, list) or len(where) != 3 or not isinstance(where[1], str) or len(where[1]) != 8:
        raise table.error(key, "damaged: size, checksum and place were expected")
    nbytes = table.check_integer(key, where[0], 0, LARGEST)
    try:
        summed = int(where[1], 16)
    except ValueError as error:
        raise table.error(key, f"damaged: {where[1]!r} is no checksum") from error
    if not isinstance(where[2], list):
        raise table.error(key, "damaged: a list of places was expected")
    parts: list[Int64] = []
    total = 0
    for run in where[2]:
        if not isinstance(run, list) or len(run) != 2:
            raise table.error(key, "damaged: a place is a first block and a count")
        first = table.check_integer(key, run[0], 0, end - 1)
        count = table.check_integer(key, run[1], 1, end - first)
        total += count
        if total > end:
            raise table.error(key, "damaged: more blocks than there are")
        parts.append(np.arange(first, first + count, dtype=np.int64))
    if total != -(-nbytes // block):
        raise table.error(key, f"damaged: {total} blocks for {nbytes} bytes")
    return Stored(nbytes, summed, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))
