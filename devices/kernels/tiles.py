"""Tiles of queries: packed once, then multiplied with key rows.

A query row is one of the q_len · group queries of a KV head. A tile is up to 4 query heads of one position, so that a
group of 6 at two positions has the tiles 4, 2, 4, 2; all queries of a tile see the same rows. A *block* is a number of
neighbouring tiles; one pass over the keys serves them all.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64, INTS, kernel, load_float, move_bytes, store_float
from tierloop.devices.kernels.entries import DOTS, WIDEN
from tierloop.devices.kernels.lanes import FLOAT32, LANES, fill_table
from tierloop.devices.kernels.products import NUMBER_OF_WIDTH, TILE, WIDTH_OF, call_dots, call_widen

Int64 = NDArray[np.int64]

BLOCK = 8
"""Tiles that one pass over the keys serves."""
NEAR = 16
"""Key rows that all tiles of a block read before they go on: widened, they stay in the nearest cache."""

_QUERIES = types.Array(types.float32, 2, "C")


@kernel(INT64, INT64)
def padded(n: int) -> int:
    """n rounded up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@kernel(INT64, INT64)
def tiles_of(group: int) -> int:
    """Tiles of each position."""
    return (group + TILE - 1) // TILE


@kernel(INT64, INT64, INT64)
def size_of(tile: int, group: int) -> int:
    """Queries of a tile."""
    return min(TILE, group - tile % tiles_of(group) * TILE)


@kernel(INT64, INT64, INT64)
def first_of(tile: int, group: int) -> int:
    """The query row that a tile begins with; of the tile after the last: the number of query rows."""
    each = tiles_of(group)
    return tile // each * group + tile % each * TILE


@kernel(types.void, *(INT64,) * 10, _QUERIES)
def pack_queries(
    queries: int,
    sequence: int,
    kv_head: int,
    first_tile: int,
    num_tiles: int,
    num_kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    is_minmax: int,
    packed: NDArray[np.float32],
) -> None:
    """Pack the tiles of one KV head from `first_tile` on into the rows of `packed` (tiles, 4 · padded head_dim).

    With `is_minmax`, a query q counts as its negative and then its positive part, 2 · head_dim elements: its product
    with (minimum, maximum) is Quest's bound.
    """
    for t in range(num_tiles):
        tile = first_tile + t
        size, row = size_of(tile, group), first_of(tile, group)
        width = WIDTH_OF[size]
        lanes = LANES // width
        for i in range(packed.shape[1]):
            packed[t, i] = 0.0
        for g in range(size):
            query, member = (row + g) // group, (row + g) % group
            source = queries + (((sequence * q_len + query) * num_kv_heads + kv_head) * group + member) * 4 * head_dim
            target = packed.ctypes.data + t * 4 * packed.shape[1] + g * lanes * 4
            if is_minmax:
                for i in range(head_dim):
                    x, k = load_float(source + 4 * i), i + head_dim
                    store_float(target + 4 * (i // lanes * LANES + i % lanes), min(x, np.float32(0)))
                    store_float(target + 4 * (k // lanes * LANES + k % lanes), max(x, np.float32(0)))
            else:
                for i in range(0, head_dim, lanes):
                    move_bytes(target + 4 * width * i, source + 4 * i, 4 * min(lanes, head_dim - i))


@kernel(types.void, INTS, *(INT64,) * 11, REAL, *(INT64,) * 4)
def dots_of_tiles(
    entries: Int64,
    dtype: int,
    group: int,
    first_tile: int,
    num_tiles: int,
    keys: int,
    n: int,
    packed: int,
    dim: int,
    logits: int,
    logit_stride: int,
    skipped: int,
    scale: float,
    ahead: int,
    ahead_nbytes: int,
    wide: int,
    wide_table: int,
) -> None:
    """Logits of each tile, float32 (n, width), at `logits` + tile · `logit_stride`, from row `skipped` on.

    `keys` is the address of a table of n rows of `dim` elements; `ahead` of one of n other rows, as in `call_dots`.
    `packed` is where the tiles are, `wide` has room for NEAR rows of `padded(dim)` floats, and `wide_table` for their
    addresses.
    """
    whole_dim = padded(dim)
    stride = 4 * whole_dim
    # Sub-vector tails always go through widened rows; so do small types that several queries share a vector for.
    must_widen = whole_dim != dim
    may_widen = dtype != FLOAT32 and group > 2
    if must_widen or may_widen:
        fill_table(wide_table, wide, stride, NEAR)
    near = NEAR if must_widen or may_widen or num_tiles > 1 else n
    for start in range(0, n, near):
        count = min(near, n - start)
        if must_widen or may_widen:
            call_widen(entries[WIDEN + dtype], keys + 8 * start, count, dim, wide, stride)
        for t in range(num_tiles):
            width_number = NUMBER_OF_WIDTH[size_of(first_tile + t, group)]
            is_wide = must_widen or (dtype != FLOAT32 and width_number == 2)
            out = logits + t * logit_stride + 4 * (skipped + start) * (1 << width_number)
            call_dots(
                entries[DOTS + (FLOAT32 if is_wide else dtype) * 3 + width_number],
                packed + t * TILE * stride,
                wide_table if is_wide else keys + 8 * start,
                count,
                whole_dim,
                out,
                scale,
                ahead + 8 * start,
                ahead_nbytes if t == 0 else 0,
            )


@kernel(INT64, INT64)
def wide_nbytes(dim: int) -> int:
    """Bytes of the room that `dots_of_tiles` widens rows in."""
    return NEAR * 4 * padded(dim)
