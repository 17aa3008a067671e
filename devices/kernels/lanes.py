"""Sixteen lanes: the vector arithmetic that fixes the order of every sum, written as LLVM instructions.

Why by hand: the bits of a result must not depend on the compiler's taste, so there is no fast-math, no contraction by
the compiler and no vectoriser in the way. Where a product is added to a sum, `fused` says so: it rounds once on every
machine, in one instruction where there is one and in software (slowly) where there is none. LLVM cuts a <16 x float>
into whatever registers there are (one zmm, two ymm, four xmm) without changing a bit.

The order of a sum over n elements in L lanes: element i goes to lane i mod L, in ascending i; lanes are then added by
halving, lane j and lane j + L / 2, then L / 4, … A last partial vector is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tierloop.devices.kernels.compiled import inline, load, store

LANES = 16
alloca_once: Any = cgutils.alloca_once
"""A place on the stack, made in the function's first block, whatever block is being written."""
FLOAT = ir.FloatType()
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT32, FLOAT16, BFLOAT16, INT8, FP8 = range(5)
"""Numbers of the stored types."""
CODES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8, "fp8_e4m3": FP8}
NUM_TYPES = len(CODES)
ITEM = (4, 2, 2, 1, 1)
"""Bytes of an element, by number."""


_STORED = (FLOAT, INT16, INT16, ir.IntType(8), ir.IntType(8))


def int64(n: int) -> Any:
    """An int64 constant."""
    return ir.Constant(INT64, n)


def floats(x: float, count: int = LANES) -> Any:
    """A vector constant with x in every lane."""
    return ir.Constant(ir.VectorType(FLOAT, count), [x] * count)


def ints(x: int, count: int = LANES) -> Any:
    """A vector of int32 constants."""
    return ir.Constant(ir.VectorType(INT32, count), [x] * count)


def at(builder: Any, address: Any, index: Any, item: int = 1) -> Any:
    """address + index · item."""
    return builder.add(address, builder.mul(index, int64(item)) if item != 1 else index)


def has_feature(context: Any, feature: str) -> bool:
    """Whether the target that code is made for has an instruction-set feature."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


def widen(context: Any, builder: Any, dtype: int, raw: Any) -> Any:
    """Stored elements, as loaded (float32, or the bits of smaller types), as float32: exact; of codes, the codes."""
    if dtype == FLOAT32:
        return raw
    vector = isinstance(raw.type, ir.VectorType)

    def like(scalar: Any) -> Any:
        return ir.VectorType(scalar, raw.type.count) if vector else scalar

    def constant(scalar: Any, x: Any) -> Any:
        return ir.Constant(like(scalar), [x] * raw.type.count if vector else x)

    if dtype == INT8:
        return builder.sitofp(builder.sext(raw, like(INT32)), like(FLOAT))
    if dtype == FP8 and has_feature(context, "f16c"):
        # As float16 the same bits are 2^8 too small.
        small = builder.zext(raw, like(INT16))
        magnitude = builder.and_(small, constant(INT16, 0x7F))
        nan = builder.icmp_unsigned("==", magnitude, constant(INT16, 0x7F))
        magnitude = builder.or_(magnitude, builder.and_(builder.sext(nan, like(INT16)), constant(INT16, 0xFC)))
        sign = builder.shl(builder.and_(small, constant(INT16, 0x80)), constant(INT16, 8))
        half = builder.or_(builder.shl(magnitude, constant(INT16, 7)), sign)
        single = builder.fpext(builder.bitcast(half, like(ir.HalfType())), like(FLOAT))
        return builder.fmul(single, constant(FLOAT, 256.0))
    if dtype == FP8:
        # 2^(e − 7) · 1.m; where e is 0 there is no leading 1, and 2^−7 · 1.m is taken twice, less 2^−6.
        bits = builder.zext(raw, like(INT32))
        magnitude = builder.and_(bits, constant(INT32, 0x7F))
        shifted = builder.add(builder.shl(magnitude, constant(INT32, 20)), constant(INT32, 120 << 23))
        normal = builder.bitcast(shifted, like(FLOAT))
        small = builder.fsub(builder.fadd(normal, normal), constant(FLOAT, 2.0**-6))
        number = builder.select(builder.icmp_unsigned("<", magnitude, constant(INT32, 8)), small, normal)
        nan = constant(FLOAT, float("nan"))
        number = builder.select(builder.icmp_unsigned("==", magnitude, constant(INT32, 0x7F)), nan, number)
        sign = builder.shl(builder.and_(bits, constant(INT32, 0x80)), constant(INT32, 24))
        return builder.bitcast(builder.or_(builder.bitcast(number, like(INT32)), sign), like(FLOAT))
    if dtype == FLOAT16 and (has_feature(context, "f16c") or not _is_x86(context)):
        return builder.fpext(builder.bitcast(raw, like(ir.HalfType())), like(FLOAT))
    bits = builder.zext(raw, like(INT32))
    if dtype == BFLOAT16:
        return builder.bitcast(builder.shl(bits, constant(INT32, 16)), like(FLOAT))
    # float16 without the instruction: move exponent and mantissa over and multiply the biases' difference away, which
    # makes subnormals right as well; infinities and NaNs get the largest exponent by hand.
    shifted = builder.shl(builder.and_(bits, constant(INT32, 0x7FFF)), constant(INT32, 13))
    small = builder.fmul(builder.bitcast(shifted, like(FLOAT)), constant(FLOAT, 2.0**112))
    special = builder.icmp_unsigned(">=", shifted, constant(INT32, 0x7C00 << 13))
    forced = builder.or_(shifted, constant(INT32, 0x7F800000))
    magnitude = builder.select(special, forced, builder.bitcast(small, like(INT32)))
    sign = builder.shl(builder.and_(bits, constant(INT32, 0x8000)), constant(INT32, 16))
    return builder.bitcast(builder.or_(magnitude, sign), like(FLOAT))


def _is_x86(context: Any) -> bool:
    return str(context.codegen().magic_tuple()[0]).startswith(("x86", "i386", "i686"))


def load_lanes(context: Any, builder: Any, dtype: int, address: Any, count: int = LANES) -> Any:
    """`count` stored elements from an address, as float32."""
    kind = ir.VectorType(_STORED[dtype], count)
    return widen(context, builder, dtype, load(builder, address, kind))


def load_one(context: Any, builder: Any, dtype: int, address: Any) -> Any:
    """One stored element as float32."""
    return widen(context, builder, dtype, load(builder, address, _STORED[dtype]))


def spread(builder: Any, x: Any, count: int = LANES) -> Any:
    """A scalar in every lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(x.type, count), ir.Undefined), x, ir.Constant(INT32, 0))
    return shuffle(builder, one, one, [0] * count)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Pick lanes of the two vectors end to end."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


@contextmanager
def counting(builder: Any, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
    """A loop: start, start + step, … below stop."""
    with cgutils.for_range_slice(builder, start, stop, int64(step), INT64) as (i, _):
        yield i


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once: vectors or scalars of float32."""
    kind = a.type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    name = f"llvm.fma.{suffix}"
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def whole(builder: Any, n: Any, step: int) -> Any:
    """The largest multiple of `step` that is at most n; step is a power of two."""
    return builder.and_(n, int64(-step))


def sum_groups(builder: Any, vectors: list[Any], lanes: int) -> Any:
    """The sums over each group of `lanes` neighbouring lanes of each vector, as one vector; see `halve_groups`."""
    return halve_groups(vectors, lanes, builder, builder.fadd)


def halve_groups(vectors: list[Any], lanes: int, builder: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine each group of `lanes` neighbouring lanes of each vector, by halving, to one lane of one vector.

    The number of vectors is a power of two, at most `lanes`; results come in the order of vectors, then groups. Two
    vectors share one operation; the order within each result stays the same.
    """
    while lanes > 1:
        half = lanes // 2
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], None)]
        halved = []
        for a, b in pairs:
            held = (int(a.type.count) // lanes) * (1 if b is None else 2)
            low = [i * lanes + j for i in range(held) for j in range(half)]
            other = a if b is None else b
            lows, highs = shuffle(builder, a, other, low), shuffle(builder, a, other, [i + half for i in low])
            halved.append(combine(lows, highs))
        vectors, lanes = halved, half
    assert len(vectors) == 1, "the number of vectors is a power of two, at most their lanes"
    return vectors[0]


LINE = 64
"""Bytes that come from memory together."""


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a line that will be needed soon; any address is fine."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    builder.call(ask, [builder.inttoptr(address, byte), *(ir.Constant(INT32, x) for x in (0, 3, 1))])


def prefetch_row(builder: Any, row: Any, nbytes: Any) -> None:
    """Ask for all lines of a row."""
    with counting(builder, int64(0), nbytes, LINE) as i:
        prefetch(builder, builder.add(row, i))


@inline(types.void, types.int64, types.int64, types.int64, types.int64)
def fill_table(builder: Any, table: Any, first: Any, step: Any, n: Any) -> None:
    """Put first, first + step, … into an int64 table of n places."""
    four = ir.VectorType(INT64, 4)
    counts = builder.mul(spread(builder, step, 4), ir.Constant(four, [0, 1, 2, 3]))
    places = builder.add(spread(builder, first, 4), counts)
    end = whole(builder, n, 4)
    with counting(builder, int64(0), end, 4) as i:
        offset = spread(builder, builder.mul(i, step), 4)
        store(builder, builder.add(places, offset), at(builder, table, i, 8))
    with counting(builder, end, n) as i:
        store(builder, builder.add(first, builder.mul(i, step)), at(builder, table, i, 8))


def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger one, lane by lane; NaN if either is."""
    larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, b), builder.fadd(a, b), larger)


_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375
"""355/512: n · this is exact for every n that occurs."""
_LN2_LOW = -2.12194440e-4
_ROUND = 12582912.0
"""1.5 · 2²³: adding and subtracting it rounds to the nearest integer, and leaves that integer in the low bits."""
_SMALLEST = -87.33654
"""exp of this is the smallest normal float32; below it the result is 0."""
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Minimax coefficients of (eʳ − 1 − r) / r² on |r| ≤ ln 2 / 2, highest power first (Cephes expf)."""


def exponential(builder: Any, x: Any) -> Any:
    """e**x for x ≤ 0, a vector: within 1 ulp, monotone, exp(0) = 1, exp(−∞) = 0, NaN for NaN.

    Results below 2⁻¹²⁶ are 0: subnormal weights change nothing that float32 can show and are slow to multiply.
    """
    count = int(x.type.count)
    rounded = fused(builder, x, floats(_LOG2_E, count), floats(_ROUND, count))
    n = builder.fsub(rounded, floats(_ROUND, count))
    r = fused(builder, n, floats(-_LN2_HIGH, count), x)
    r = fused(builder, n, floats(-_LN2_LOW, count), r)
    p = floats(_EXP[0], count)
    for coefficient in _EXP[1:]:
        p = fused(builder, p, r, floats(coefficient, count))
    y = fused(builder, p, builder.fmul(r, r), r)
    y = builder.fadd(y, floats(1.0, count))
    bits = builder.bitcast(rounded, ir.VectorType(INT32, count))
    power = builder.shl(builder.add(bits, ints(127, count)), ints(23, count))
    y = builder.fmul(y, builder.bitcast(power, x.type))
    return builder.select(builder.fcmp_ordered("<", x, floats(_SMALLEST, count)), floats(0.0, count), y)


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Coefficients of (tanh x / x − 1) / x² in x² for |x| < 0.625, highest power first (Cephes tanhf)."""


def hyperbolic_tangent(builder: Any, x: Any) -> Any:
    """tanh of a vector: within 2 ulp, odd, ±1 at ±∞, NaN for NaN."""
    count = int(x.type.count)
    kind = ir.VectorType(INT32, count)
    bits = builder.bitcast(x, kind)
    sign = builder.and_(bits, ints(-(1 << 31), count))
    size = builder.bitcast(builder.and_(bits, ints(0x7FFFFFFF, count)), x.type)
    square = builder.fmul(x, x)
    p = floats(_TANH[0], count)
    for coefficient in _TANH[1:]:
        p = fused(builder, p, square, floats(coefficient, count))
    near = fused(builder, builder.fmul(p, square), size, size)
    # 1 − 2 / (e^2x + 1) with e^−2x, which cannot overflow.
    small = exponential(builder, builder.fmul(size, floats(-2.0, count)))
    far = builder.fdiv(builder.fsub(floats(1.0, count), small), builder.fadd(floats(1.0, count), small))
    result = builder.select(builder.fcmp_ordered("<", size, floats(0.625, count)), near, far)
    return builder.bitcast(builder.or_(builder.bitcast(result, kind), sign), x.type)
