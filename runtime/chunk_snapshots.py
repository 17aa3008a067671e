"""An index as bytes, so that a persistent tier can keep it with the entries, and an index from such bytes.

A snapshot holds whole groups of one layer: the prompt's, or what was indexed since the last snapshot. So an archive
notes one for each group as it is made, and those of a layer, one after the other, are its index. Bytes: 11 int64
(`_HEADER`), then for each group 2 int64 (the entry after its last, clusters), then for each group its labels, int32
(heads, entries), then for each group its centroids, float32 (heads, clusters, head_dim); all little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.chunk_index import ChunkIndex, Group

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

_HEADER = (
    "format", "kv heads", "head_dim", "chunk_tokens", "first entry", "chunks of a cluster", "chunks of an update",
    "prompt_tokens", "entry before the first", "groups before the first", "groups",
)  # fmt: skip
_FORMAT = 0x31_58_44_49_4B_4E_48_43
"""'CHNKIDX1' in a little-endian int64."""


async def snapshot(index: ChunkIndex, layer: int, first_group: int = 0) -> Bytes:
    """Groups of a layer from number `first_group` on: uint8 (n,). Nothing may be under way (`settle` first).

    In a phantom run the centroids are zeros. Raises ValueError for a group that there is not.
    """
    groups = index.groups(layer)
    if not 0 <= first_group <= len(groups):
        raise ValueError(f"group {first_group} of layer {layer}: there are {len(groups)}")
    borders = [index.first, *(group.last for group in groups)]
    clusters = np.cumsum([0, *(group.clusters for group in groups)])
    labels, centroids = [], []
    engine = index.engine
    for number in range(first_group, len(groups)):
        first, count = int(clusters[number]), groups[number].clusters
        place = index.centroids(layer, first, count)
        into = np.zeros(place.spans.nbytes, dtype=np.uint8)
        await engine.read(place, into)
        centroids.append(into)
        labels.append(_labels(index, layer, borders[number], borders[number + 1], first))
    header = [*_expected(index, borders[first_group], first_group), len(groups) - first_group]
    numbers = [header, *groups[first_group:]]
    parts = [np.array(numbers_of, dtype="<i8").view(np.uint8) for numbers_of in numbers]
    return np.concatenate([*parts, *(x.astype("<i4").view(np.uint8).reshape(-1) for x in labels), *centroids])


async def restore(index: ChunkIndex, layer: int, snapshots: Sequence[Bytes]) -> None:
    """Take a layer's snapshots, oldest first, into an index that has nothing of the layer yet.

    The index was made for the same prompt (`prompt_tokens_of`) with the same `Chunking`. Raises ConfigurationError for
    bytes that are damaged or of another index; what was taken in before stays.
    """
    for stored in snapshots:
        await _restore(index, layer, np.ascontiguousarray(stored, dtype=np.uint8).reshape(-1))


def prompt_tokens_of(stored: Bytes) -> int:
    """The length of the prompt that an index was made for. Raises ConfigurationError for what is no snapshot."""
    return int(_header(stored, "a snapshot")[_HEADER.index("prompt_tokens")])


async def _restore(index: ChunkIndex, layer: int, stored: Bytes) -> None:
    engine, shape = index.engine, index.engine.shape
    heads, dim = shape.num_kv_heads, shape.head_dim
    what = f"snapshot of layer {layer} of {index.request_name}"
    header = _header(stored, what)
    groups_before = len(index.groups(layer))
    for name, held, want in zip(_HEADER, header, _expected(index, index.end(layer), groups_before), strict=False):
        if held != want:
            raise ConfigurationError(f"{what}: {name} is {held}; needed is {want}")
    count, rest = int(header[-1]), stored[8 * len(_HEADER) :]
    if not 0 <= count <= len(rest) // 16:
        raise ConfigurationError(f"{what}: {count} groups cannot be in {len(rest)} bytes")
    table = rest[: 16 * count].view("<i8").astype(np.int64).reshape(count, 2)
    rest = rest[16 * count :]
    last, clusters = table[:, 0], table[:, 1]
    begins = np.append(np.int64(index.end(layer)), last)[:-1]
    known, most = index.known(layer), index.cut.width
    in_range = (begins < last) & (last <= index.cut.most_chunks) & (clusters > 0) & (clusters <= most)
    if not in_range.all() or known + int(clusters.sum()) > most:
        raise ConfigurationError(f"{what}: its groups do not fit {index.cut.most_chunks} entries, {most} clusters")
    entries = last - begins
    labels_nbytes, centroids_nbytes = 4 * heads * int(entries.sum()), 4 * heads * dim * int(clusters.sum())
    if len(rest) != labels_nbytes + centroids_nbytes:
        raise ConfigurationError(
            f"{what} has {len(rest)} bytes of groups; needed is {labels_nbytes + centroids_nbytes}"
        )
    labels = np.split(rest[:labels_nbytes].view("<i4").astype(np.int64), heads * np.cumsum(entries)[:-1])
    centroids = rest[labels_nbytes:]
    for of_group, limit in zip(labels, clusters.tolist(), strict=True) if count else ():
        if not (0 <= of_group.min() <= of_group.max() < limit):
            raise ConfigurationError(f"{what}: a label is not from 0 to below {limit}")
    if not np.isfinite(centroids.view("<f4")).all():
        raise ConfigurationError(f"{what}: a centroid is not finite")
    for (end, number), of_group in zip(table.tolist(), labels, strict=True) if count else ():
        nbytes = 4 * heads * dim * number
        await engine.write(index.centroids(layer, index.known(layer), number), centroids[:nbytes])
        centroids = centroids[nbytes:]
        index.add(layer, Group(end, number), of_group.reshape(heads, -1))


def _header(stored: Bytes, what: str) -> list[int]:
    size = 8 * len(_HEADER)
    if len(stored) < size:
        raise ConfigurationError(f"{what} has {len(stored)} bytes; its header alone has {size}")
    header: list[int] = np.ascontiguousarray(stored[:size]).view("<i8").tolist()
    if header[0] != _FORMAT:
        raise ConfigurationError(f"{what} does not begin like one")
    return header


def _expected(index: ChunkIndex, end: int, groups: int) -> list[int]:
    shape, cut = index.engine.shape, index.cut
    of_cut = index.how.chunk_tokens, cut.first, cut.cluster_chunks, cut.update
    return [_FORMAT, shape.num_kv_heads, shape.head_dim, *of_cut, index.prompt_tokens, end, groups]


def _labels(index: ChunkIndex, layer: int, first: int, last: int, first_cluster: int) -> Int64:
    """Labels, from 0, of the entries [first, last) of a group whose clusters begin at `first_cluster`."""
    found = np.empty((len(index.members(layer)), last - first), dtype=np.int64)
    for head, members in enumerate(index.members(layer)):
        labels = np.repeat(np.arange(len(members.sizes)), members.sizes)
        mine = (members.positions >= first) & (members.positions < last)
        found[head, members.positions[mine] - first] = labels[mine] - first_cluster
    return found
