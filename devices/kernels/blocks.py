"""Blocks of query rows: collected once, then multiplied with key rows in tiles.

A query row is one of the q_len · group queries of a KV head; a block is up to 16 of them, and one pass over the keys
serves them all.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import FLOAT as REAL
from tierloop.devices.kernels.compiled import INT64, INTS, kernel, move_bytes
from tierloop.devices.kernels.lanes import LANES
from tierloop.devices.kernels.products import TILE, call_bounds, call_dots

BLOCK = 16
"""Query rows that one pass over the keys serves."""
_NEAR = 32
"""Key rows that all tiles of a block read before they go on: they stay in the nearest cache."""


@kernel(INT64, INT64)
def padded(n: int) -> int:
    """n rounded up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@kernel(INT64, INT64)
def tile_size(left: int) -> int:
    """Query rows of the next tile: 4, or 3 where 4 would leave a single one."""
    if left >= TILE and left != TILE + 1:
        return TILE
    return min(left, TILE - 1)


@kernel(types.void, *(INT64,) * 8, types.Array(types.float32, 2, "C"))
def collect_queries(
    queries: int,
    sequence: int,
    kv_head: int,
    first: int,
    num_kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    rows: NDArray[np.float32],
) -> None:
    """Copy query rows `first` … of one KV head into the zero-filled rows (block, padded head_dim)."""
    for i in range(min(rows.shape[0], q_len * group - first)):
        query, member = (first + i) // group, (first + i) % group
        row = ((sequence * q_len + query) * num_kv_heads + kv_head) * group + member
        move_bytes(rows.ctypes.data + i * rows.shape[1] * 4, queries + row * 4 * head_dim, 4 * head_dim)


@kernel(types.void, INTS, *(INT64,) * 7, REAL, *(INT64,) * 6)
def dots_of_block(
    dots: NDArray[np.int64],
    dtype: int,
    queries: int,
    query_stride: int,
    num_queries: int,
    keys: int,
    n: int,
    head_dim: int,
    scale: float,
    logits: int,
    logit_stride: int,
    ahead: int,
    ahead_nbytes: int,
    later: int,
    num_later: int,
) -> None:
    """Logits (num_queries, n) of a block with n key rows, whose addresses are at `keys`; the rest as in `call_dots`."""
    near = n if num_queries <= TILE else _NEAR
    for start in range(0, n, near):
        q = 0
        while q < num_queries:
            size = tile_size(num_queries - q)
            call_dots(
                dots[dtype * TILE + size - 1],
                queries + q * query_stride,
                query_stride,
                keys + 8 * start,
                min(near, n - start),
                head_dim,
                logits + q * logit_stride + 4 * start,
                logit_stride,
                scale,
                ahead + 8 * start,
                ahead_nbytes if q == 0 else 0,
                later + 8 * start,
                num_later - start if q == 0 else 0,
            )
            q += size


@kernel(types.void, INTS, *(INT64,) * 8)
def bounds_of_block(
    bounds: NDArray[np.int64],
    queries: int,
    query_stride: int,
    num_queries: int,
    rows: int,
    n: int,
    head_dim: int,
    out: int,
    out_stride: int,
) -> None:
    """Upper bounds (num_queries, n) of a block with n minimum-maximum summaries, whose addresses are at `rows`."""
    q = 0
    while q < num_queries:
        size = tile_size(num_queries - q)
        call_bounds(
            bounds[size - 1],
            queries + q * query_stride,
            query_stride,
            rows,
            n,
            head_dim,
            out + q * out_stride,
            out_stride,
        )
        q += size
