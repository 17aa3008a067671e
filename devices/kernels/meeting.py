"""Rows meet centroids: the inner loops of `cluster`.

- meet: tiles of rows × one packed block of 16 centroids → the best product of every row so far, lane by lane
- best: the best lane of every row
- add_row: one float32 row is added to a float64 sum

Centroids are packed (blocks of 16, dim, 16 lanes), so that a product q·c is one chain of fused additions in a lane, in
ascending order of the channel: its bits depend on neither tile, threads nor instruction set. A tile of rows shares
each packed vector that is loaded. Of equal products that with the lower index wins, in whatever order blocks come; a
NaN wins against nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import INT64 as WORD
from tierloop.devices.kernels.compiled import caller, entry, has_wide_registers, inline, load, store
from tierloop.devices.kernels.lanes import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    alloca_once,
    at,
    counting,
    floats,
    fused,
    int64,
    shuffle,
    spread,
)

TILE_ROWS = 12 if has_wide_registers() else 6
"""Rows of a tile: what the registers hold beside the packed vector and a spread element. With 16 registers of 8 floats
6 rows × 2 registers; 4 rows would be too few to keep two multipliers busy for the 4 cycles that an addition takes."""
NOBODY = (1 << 31) - 1
"""The index in lanes that nothing has won, and in those of a packed block that hold no centroid (but NaN)."""

_VECTOR = ir.VectorType(FLOAT, LANES)
_INDICES = ir.VectorType(INT32, LANES)
_LANES_NBYTES = LANES * 4

_MEET = (WORD,) * 7
_BEST = (WORD,) * 5
_ADD = (WORD, WORD, WORD)


@inline(types.void, *_MEET)
def _meet(builder: Any, rows: Any, num_tiles: Any, block: Any, dim: Any, names: Any, values: Any, indices: Any) -> None:
    sums = [alloca_once(builder, _VECTOR) for _ in range(TILE_ROWS)]
    mine = load(builder, names, _INDICES)
    with counting(builder, int64(0), num_tiles) as tile:
        low = builder.mul(tile, int64(TILE_ROWS))
        which = [builder.add(low, int64(r)) for r in range(TILE_ROWS)]
        places = [load(builder, at(builder, rows, r, 8), INT64) for r in which]
        for place in sums:
            builder.store(floats(0.0), place)
        with counting(builder, int64(0), dim) as k:
            centroids = load(builder, at(builder, block, k, _LANES_NBYTES), _VECTOR)
            for place, row in zip(sums, places, strict=True):
                x = spread(builder, load(builder, at(builder, row, k, 4), FLOAT))
                builder.store(fused(builder, x, centroids, builder.load(place)), place)
        for r, place in zip(which, sums, strict=True):
            value, index = at(builder, values, r, _LANES_NBYTES), at(builder, indices, r, _LANES_NBYTES)
            new, old, held = builder.load(place), load(builder, value, _VECTOR), load(builder, index, _INDICES)
            wins = _wins(builder, new, mine, old, held)
            store(builder, builder.select(wins, new, old), value)
            store(builder, builder.select(wins, mine, held), index)


def _wins(builder: Any, new: Any, mine: Any, old: Any, held: Any) -> Any:
    """Whether products `new` of centroids `mine` are better than `old` of `held`: a vector of bits."""
    tie = builder.and_(builder.fcmp_ordered("==", new, old), builder.icmp_signed("<", mine, held))
    return builder.or_(builder.fcmp_ordered(">", new, old), tie)


@inline(types.void, *_BEST)
def _best(builder: Any, values: Any, indices: Any, n: Any, best: Any, winners: Any) -> None:
    with counting(builder, int64(0), n) as row:
        value = load(builder, at(builder, values, row, _LANES_NBYTES), _VECTOR)
        index = load(builder, at(builder, indices, row, _LANES_NBYTES), _INDICES)
        width = LANES
        while width > 1:
            half = width // 2
            lower, upper = list(range(half)), list(range(half, width))
            a, b = shuffle(builder, value, value, lower), shuffle(builder, value, value, upper)
            i, j = shuffle(builder, index, index, lower), shuffle(builder, index, index, upper)
            wins = _wins(builder, b, j, a, i)
            value, index, width = builder.select(wins, b, a), builder.select(wins, j, i), half
        first = ir.Constant(INT32, 0)
        store(builder, builder.extract_element(value, first), at(builder, best, row, 4))
        store(builder, builder.extract_element(index, first), at(builder, winners, row, 4))


@inline(types.void, *_ADD)
def _add_row(builder: Any, row: Any, dim: Any, sums: Any) -> None:
    doubles = ir.VectorType(ir.DoubleType(), LANES)
    with counting(builder, int64(0), dim, LANES) as i:
        wide = builder.fpext(load(builder, at(builder, row, i, 4), _VECTOR), doubles)
        place = at(builder, sums, i, 8)
        store(builder, builder.fadd(load(builder, place, doubles), wide), place)


@entry(*_MEET)
def _compiled_meet(rows: int, num_tiles: int, block: int, dim: int, names: int, values: int, indices: int) -> None:
    _meet(rows, num_tiles, block, dim, names, values, indices)


@entry(*_BEST)
def _compiled_best(values: int, indices: int, n: int, best: int, winners: int) -> None:
    _best(values, indices, n, best, winners)


@entry(*_ADD)
def _compiled_add_row(row: int, dim: int, sums: int) -> None:
    _add_row(row, dim, sums)


call_meet = caller(*_MEET)
"""(address, rows, tiles, block, dim, names, values, indices): addresses of the rows at `rows`, whole tiles of them; the
index of each lane's centroid int32 (16,) at `names`; the best so far at values float32 and indices int32 (rows, 16)."""
call_best = caller(*_BEST)
"""(address, values, indices, n, best, winners): the best product float32 (n,) and whose it is int32 (n,)."""
call_add_row = caller(*_ADD)
"""(address, row, dim, sums): `dim` a multiple of 16."""

MEET: int = _compiled_meet
BEST: int = _compiled_best
ADD_ROW: int = _compiled_add_row
