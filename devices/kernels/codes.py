"""Codes: vectors of float32 to int8 or fp8_e4m3 with scales, and back, row by row.

A quotient is one division, so that its code is the same on every machine; it is brought into the range of the codes
before it is rounded, so that no number is too large to convert. Rounding to the nearest, ties to even, is what adding a
power of two does, whose neighbours are as far away as those of the codes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tierloop.devices.kernels.compiled import INT64, inline, load, store
from tierloop.devices.kernels.contract import CODE_RANGE
from tierloop.devices.kernels.lanes import FLOAT as REAL
from tierloop.devices.kernels.lanes import (
    INT8,
    INT32,
    LANES,
    alloca_once,
    at,
    counting,
    floats,
    int64,
    ints,
    load_lanes,
    shuffle,
    spread,
    whole,
)

_INTEGERS = 12582912.0
"""1.5 · 2²³: the distance of its neighbours is 1, and its last byte is 0."""
LARGEST_INT8, LARGEST_FP8 = CODE_RANGE["int8"], CODE_RANGE["fp8_e4m3"]
_SUBNORMAL_FP8 = 2.0**14
"""The distance of its neighbours is 2⁻⁹, as is that of fp8_e4m3 codes below 2⁻⁶."""
PER_ROW, PER_CHANNEL = 0, 1
"""Axes: one scale for a row, or one for each of its elements."""


def _encode(builder: Any, dtype: int, x: Any, scale: Any) -> Any:
    """The codes of a vector of numbers: bytes."""
    n = int(x.type.count)
    words = ir.VectorType(INT32, n)
    if dtype == INT8:
        q = builder.fdiv(x, scale)
        q = builder.select(builder.fcmp_ordered(">", q, floats(LARGEST_INT8, n)), floats(LARGEST_INT8, n), q)
        q = builder.select(builder.fcmp_ordered("<", q, floats(-LARGEST_INT8, n)), floats(-LARGEST_INT8, n), q)
        q = builder.select(builder.fcmp_unordered("uno", q, q), floats(0.0, n), q)
        code = builder.bitcast(builder.fadd(q, floats(_INTEGERS, n)), words)
    else:
        bits = builder.bitcast(x, words)
        sign = builder.lshr(builder.and_(bits, ints(0x80000000, n)), ints(24, n))
        q = builder.fdiv(builder.bitcast(builder.and_(bits, ints(0x7FFFFFFF, n)), x.type), scale)
        q = builder.select(builder.fcmp_ordered(">", q, floats(LARGEST_FP8, n)), floats(LARGEST_FP8, n), q)
        # Drop 20 bits of the mantissa: add just under half, one more if that would leave an odd one; change the bias.
        bits = builder.bitcast(q, words)
        odd = builder.and_(builder.lshr(bits, ints(20, n)), ints(1, n))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ints(0x7FFFF, n))), ints(20, n))
        normal = builder.sub(rounded, ints(120 << 3, n))
        base = floats(_SUBNORMAL_FP8, n)
        small = builder.sub(builder.bitcast(builder.fadd(q, base), words), builder.bitcast(base, words))
        code = builder.select(builder.fcmp_ordered("<", q, floats(2.0**-6, n)), small, normal)
        code = builder.select(builder.fcmp_unordered("uno", q, q), ints(0x7F, n), code)
        code = builder.or_(code, sign)
    return builder.trunc(code, ir.VectorType(ir.IntType(8), n))


def _in_vectors(builder: Any, dim: Any, step: Any) -> None:
    """Call `step(i, count)` for the elements 0 … dim: 16 at a time, then one at a time."""
    steady = whole(builder, dim, LANES)
    with counting(builder, int64(0), steady, LANES) as i:
        step(i, LANES)
    with counting(builder, steady, dim) as i:
        step(i, 1)


def _scale(builder: Any, axis: int, scales: Any, i: Any, n: int) -> Any:
    if axis == PER_CHANNEL:
        return load(builder, at(builder, scales, i, 4), ir.VectorType(REAL, n))
    return spread(builder, load(builder, scales, REAL), n)


_ROW = (INT64, INT64, INT64, INT64)


@inline(types.void, *_ROW, literals=2)
def quantize_row(builder: Any, dtype: int, axis: int, source: Any, scales: Any, dim: Any, target: Any) -> None:
    """Floats at `source` → codes at `target`, with the scale at `scales`, or with one for each channel."""

    def step(i: Any, n: int) -> None:
        x = load(builder, at(builder, source, i, 4), ir.VectorType(REAL, n))
        store(builder, _encode(builder, dtype, x, _scale(builder, axis, scales, i, n)), builder.add(target, i))

    _in_vectors(builder, dim, step)


@inline(types.void, *_ROW, literals=2)
def dequantize_row(
    context: Any, builder: Any, dtype: int, axis: int, source: Any, scales: Any, dim: Any, target: Any
) -> None:
    """Codes at `source` → floats at `target`; scales as above."""

    def step(i: Any, n: int) -> None:
        codes = load_lanes(context, builder, dtype, builder.add(source, i), n)
        store(builder, builder.fmul(codes, _scale(builder, axis, scales, i, n)), at(builder, target, i, 4))

    _in_vectors(builder, dim, step)


@inline(types.int32, INT64, INT64)
def largest_bits(builder: Any, source: Any, dim: Any) -> Any:
    """The bits of the largest magnitude of a row; those of a NaN if there is one, which as a number are larger."""

    def magnitudes(i: Any, n: int) -> Any:
        return builder.and_(load(builder, at(builder, source, i, 4), ir.VectorType(INT32, n)), ints(0x7FFFFFFF, n))

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    places = {n: alloca_once(builder, ir.VectorType(INT32, n)) for n in (LANES, 1)}
    for n, place in places.items():
        builder.store(ints(0, n), place)

    def step(i: Any, n: int) -> None:
        builder.store(larger(builder.load(places[n]), magnitudes(i, n)), places[n])

    _in_vectors(builder, dim, step)
    lanes = builder.load(places[LANES])
    while lanes.type.count > 1:
        half = lanes.type.count // 2
        low, high = (shuffle(builder, lanes, lanes, list(range(first, first + half))) for first in (0, half))
        lanes = larger(low, high)
    return builder.extract_element(larger(lanes, builder.load(places[1])), ir.Constant(INT32, 0))
