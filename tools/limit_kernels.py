"""Loops that do one thing as fast as a core can: read, multiply-add, widen stored elements, exponentials.

What `tierloop bench attention` holds kernels against. Each loop has enough independent accumulators that no instruction
waits for the one before it, and leaves what it accumulated at `sink` (64 bytes), so that nothing can be left out.
Threads share the work out among themselves through a counter, as kernels do; importing this module compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import INT64, inline, kernel, load, move_bytes, store, take_next
from tierloop.devices.kernels.lanes import (
    CODES,
    FLOAT,
    INT32,
    ITEM,
    LANES,
    alloca_once,
    at,
    counting,
    exponential,
    floats,
    fused,
    int64,
    load_lanes,
    spread,
)

CHAINS = (6, 12)
"""Multiply-adds in flight, each of 16 lanes. Two per cycle of 4 cycles each need 8 registers' worth: 6 chains are 12 of
the 16 AVX2 registers, 12 chains 12 of the 32 of AVX-512. The faster one counts."""
UNROLLED = 4
"""Multiply-adds of each chain in one turn of the loop."""
FMA_ROUNDS = 1 << 15
"""Turns of the loop in one piece of shared work, about 0.1 ms."""
L1_NBYTES = 16 << 10
"""Bytes that the loops of `widen_shared` and `exponential_shared` read over and over: half of a small L1 cache."""
PASSES = 64
"""How often one piece of shared work reads them."""

_ACCUMULATORS = 8
_READ = ir.VectorType(INT32, 8)


def _slots(builder: Any, kind: Any, count: int) -> list[Any]:
    """Accumulators that begin at zero."""
    slots = [alloca_once(builder, kind) for _ in range(count)]
    for slot in slots:
        builder.store(ir.Constant(kind, None), slot)
    return slots


def _leave(builder: Any, slots: list[Any], combine: Callable[[Any, Any], Any], sink: Any) -> None:
    """Put all accumulators, combined, at `sink`."""
    total = builder.load(slots[0])
    for slot in slots[1:]:
        total = combine(total, builder.load(slot))
    store(builder, total, sink)


@inline(types.void, INT64, INT64, INT64)
def _read(builder: Any, address: Any, nbytes: Any, sink: Any) -> None:
    slots = _slots(builder, _READ, _ACCUMULATORS)
    with counting(builder, int64(0), nbytes, 32 * _ACCUMULATORS) as offset:
        for i, slot in enumerate(slots):
            read = load(builder, at(builder, address, builder.add(offset, int64(32 * i))), _READ)
            builder.store(builder.or_(builder.load(slot), read), slot)
    _leave(builder, slots, builder.or_, sink)


@inline(types.void, INT64, INT64, INT64, literals=1)
def _multiply_add(builder: Any, chains: int, rounds: Any, sink: Any) -> None:
    # Factor and summand come from memory, so that nothing can be computed beforehand.
    factor, summand = (spread(builder, load(builder, at(builder, sink, int64(4 * i)), FLOAT)) for i in range(2))
    slots = _slots(builder, factor.type, chains)
    for i, slot in enumerate(slots):  # chains that begin alike would be one
        builder.store(floats(float(i)), slot)
    with counting(builder, int64(0), rounds):
        for _ in range(UNROLLED):
            for slot in slots:
                builder.store(fused(builder, builder.load(slot), factor, summand), slot)
    _leave(builder, slots, builder.fadd, builder.add(sink, int64(64)))


def _over_floats(context: Any, builder: Any, dtype: int, address: Any, sink: Any, after: Callable[[Any], Any]) -> None:
    """Load every element of `L1_NBYTES`, and sum up `after(16 of them)`: an OR could be moved before a conversion."""
    slots = _slots(builder, ir.VectorType(FLOAT, LANES), 4)
    step = LANES * ITEM[dtype]
    with counting(builder, int64(0), int64(L1_NBYTES), 4 * step) as offset:
        for i, slot in enumerate(slots):
            x = load_lanes(context, builder, dtype, at(builder, address, builder.add(offset, int64(step * i))))
            builder.store(builder.fadd(builder.load(slot), after(x)), slot)
    _leave(builder, slots, builder.fadd, sink)


@inline(types.void, INT64, INT64, INT64, literals=1)
def _widen(context: Any, builder: Any, dtype: int, address: Any, sink: Any) -> None:
    _over_floats(context, builder, dtype, address, sink, lambda x: x)


@inline(types.void, INT64, INT64)
def _exponentials(context: Any, builder: Any, address: Any, sink: Any) -> None:
    _over_floats(context, builder, CODES["float32"], address, sink, lambda x: exponential(builder, x))


@kernel(types.void, INT64, INT64, INT64, INT64, INT64)
def read_shared(counter: int, address: int, nbytes: int, piece: int, sink: int) -> None:
    """Read `nbytes`, a multiple of `piece`, which is a multiple of 256."""
    start = take_next(counter) * piece
    while start < nbytes:
        _read(address + start, piece, sink)
        start = take_next(counter) * piece


@kernel(types.void, INT64, INT64, INT64, INT64)
def multiply_add_shared(counter: int, pieces: int, chains: int, sink: int) -> None:
    """`pieces` times FMA_ROUNDS · UNROLLED · chains · 16 multiply-adds; factor and summand, float32, at `sink`."""
    while take_next(counter) < pieces:
        if chains == 6:
            _multiply_add(6, FMA_ROUNDS, sink)
        else:
            _multiply_add(12, FMA_ROUNDS, sink)


@kernel(types.void, INT64, INT64, INT64, INT64, INT64)
def widen_shared(counter: int, pieces: int, dtype: int, address: int, sink: int) -> None:
    """`pieces` times PASSES times: the elements in L1_NBYTES, as float32; `dtype` as in lanes.CODES."""
    while take_next(counter) < pieces:
        for _ in range(PASSES):
            if dtype == 0:
                _widen(0, address, sink)
            elif dtype == 1:
                _widen(1, address, sink)
            elif dtype == 2:
                _widen(2, address, sink)
            elif dtype == 3:
                _widen(3, address, sink)
            else:
                _widen(4, address, sink)


@kernel(types.void, INT64, INT64, INT64, INT64)
def exponential_shared(counter: int, pieces: int, address: int, sink: int) -> None:
    """`pieces` times PASSES times: the exponentials of the float32, at most 0, in L1_NBYTES."""
    while take_next(counter) < pieces:
        for _ in range(PASSES):
            _exponentials(address, sink)


@kernel(types.void, INT64, INT64, INT64, types.Array(INT64, 1, "C", readonly=True), INT64, INT64)
def gather_shared(counter: int, target: int, source: int, offsets: Any, nbytes: int, piece: int) -> None:
    """The loop that anybody would write: rows of `nbytes` at `offsets`, one after the other, to a dense target."""
    start = take_next(counter) * piece
    while start < offsets.shape[0]:
        for i in range(start, min(start + piece, offsets.shape[0])):
            move_bytes(target + i * nbytes, source + offsets[i], nbytes)
        start = take_next(counter) * piece
