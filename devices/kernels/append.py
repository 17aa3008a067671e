"""append: new K or V rows → the open blocks, converted to the stored type (contract.py).

Rounded to nearest, ties to even. A NaN stays a NaN: its upper bits are kept and it becomes quiet. Sixteen numbers at a
time, in integer arithmetic (and one addition), so that it does not depend on an instruction that a machine may lack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, TABLE, address_of, inline, kernel, load, store
from tierloop.devices.kernels.contract import CODE_RANGE, ITEMSIZE, Append
from tierloop.devices.kernels.lanes import (
    BFLOAT16,
    CODES,
    FLOAT16,
    FLOAT32,
    INT16,
    INT32,
    LANES,
    at,
    counting,
    floats,
    int64,
    ints,
    whole,
)
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans


def _to_bfloat16(builder: Any, bits: Any) -> Any:
    """The nearest bfloat16 of float32, as bits: add just under half, one more if that would leave an odd one."""
    n = int(bits.type.count)
    upper = builder.lshr(bits, ints(16, n))
    odd = builder.and_(upper, ints(1, n))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, ints(0x7FFF, n))), ints(16, n))
    magnitude = builder.and_(bits, ints(0x7FFFFFFF, n))
    nan = builder.icmp_signed(">", magnitude, ints(0x7F800000, n))
    return builder.select(nan, builder.or_(upper, ints(0x40, n)), rounded)


def _to_float16(builder: Any, bits: Any) -> Any:
    """The nearest float16 of float32, as bits: as above with another bias; multiples of 2⁻²⁴ below its normal ones."""
    n = int(bits.type.count)
    sign = builder.and_(builder.lshr(bits, ints(16, n)), ints(0x8000, n))
    magnitude = builder.and_(bits, ints(0x7FFFFFFF, n))
    kept = builder.lshr(magnitude, ints(13, n))
    odd = builder.and_(kept, ints(1, n))
    rounded = builder.lshr(builder.add(magnitude, builder.add(odd, ints(0xFFF, n))), ints(13, n))
    result = builder.sub(rounded, ints(112 << 10, n))
    # The neighbours of a half are 2⁻²⁴ away: adding it rounds, and leaves the multiple in the low bits.
    half = floats(0.5, n)
    small = builder.bitcast(builder.fadd(builder.bitcast(magnitude, half.type), half), bits.type)
    small = builder.sub(small, builder.bitcast(half, bits.type))
    result = builder.select(builder.icmp_signed("<", magnitude, ints(0x38800000, n)), small, result)
    # 65520 is half way from the largest float16 to the next.
    too_large = builder.icmp_signed(">=", magnitude, ints(0x477FF000, n))
    result = builder.select(too_large, ints(0x7C00, n), result)
    nan = builder.icmp_signed(">", magnitude, ints(0x7F800000, n))
    quiet = builder.or_(builder.and_(kept, ints(0x3FF, n)), ints(0x7E00, n))
    return builder.or_(builder.select(nan, quiet, result), sign)


@inline(types.void, INT64, INT64, INT64, literals=1)
def _convert(builder: Any, dtype: int, source: Any, count: Any, target: Any) -> None:
    """`count` float32 to 16-bit floats, between addresses."""
    convert = _to_bfloat16 if dtype == BFLOAT16 else _to_float16
    steady = whole(builder, count, LANES)
    for first, last, n in ((int64(0), steady, LANES), (steady, count, 1)):
        with counting(builder, first, last, n) as i:
            bits = load(builder, at(builder, source, i, 4), ir.VectorType(INT32, n))
            store(builder, builder.trunc(convert(builder, bits), ir.VectorType(INT16, n)), at(builder, target, i, 2))


@kernel(types.void, INT64, INT64, TABLE, INT64, TABLE)
def _convert_spans(
    dtype: int, target_base: int, target_spans: NDArray[np.int64], source_base: int, source_spans: NDArray[np.int64]
) -> None:
    """Convert float32 spans to 16-bit ones that may be cut differently, but never within a number."""
    i, j = 0, 0
    written, taken = 0, 0
    while i < target_spans.shape[0] and j < source_spans.shape[0]:
        room, left = (target_spans[i, 1] - written) // 2, (source_spans[j, 1] - taken) // 4
        count = min(room, left)
        source, target = source_base + source_spans[j, 0] + taken, target_base + target_spans[i, 0] + written
        if dtype == BFLOAT16:
            _convert(BFLOAT16, source, count, target)
        else:
            _convert(FLOAT16, source, count, target)
        written += 2 * count
        taken += 4 * count
        if count == room:
            i, written = i + 1, 0
        if count == left:
            j, taken = j + 1, 0


@kernel(types.boolean, TABLE, INT64)
def _hold_whole_numbers(spans: NDArray[np.int64], itemsize: int) -> bool:
    cut = 0
    for i in range(spans.shape[0]):
        cut |= spans[i, 1]
    return cut & (itemsize - 1) == 0


def append(
    args: Append, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel; the elements of both operands are taken end to end, whatever the spans.

    Raises ValueError for a dtype whose elements are codes.
    """
    if args.dtype in CODE_RANGE:
        raise ValueError(f"append: {args.dtype} has scales; use quantize")
    operands = Operands(bytes_of)
    target, source = operands.rows(writes[0]), operands.rows(reads[0])
    if CODES[args.dtype] == FLOAT32:
        move_spans(*target, *source)
    elif _hold_whole_numbers(target[1], 2) and _hold_whole_numbers(source[1], 4):
        _convert_spans(CODES[args.dtype], *target, *source)
    else:
        count = sum(segment.spans.nbytes for segment in reads[0]) // 4
        converted: NDArray[np.uint8] = np.empty(count * ITEMSIZE[args.dtype], dtype=np.uint8)
        collected, into = np.array([[0, 4 * count]]), np.array([[0, converted.nbytes]])
        _convert_spans(CODES[args.dtype], address_of(converted), into, operands.source(reads[0]), collected)
        move_spans(*target, address_of(converted), into)
