"""append: new K or V rows → the open blocks, converted to the stored type (contract.py).

Rounded to nearest, ties to even. A NaN stays a NaN: its upper bits are kept and it becomes quiet. Written in integer
arithmetic, so that it does not depend on an instruction that a machine may lack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, address_of, inline, kernel, load, store
from tierloop.devices.kernels.contract import ITEMSIZE, Append
from tierloop.devices.kernels.lanes import BFLOAT16, CODES, FLOAT32, INT32
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans


@inline(types.uint32, INT64)
def _load_bits(builder: Any, address: Any) -> Any:
    return load(builder, address, INT32)


@inline(types.void, INT64, types.uint16)
def _store_bits(builder: Any, address: Any, bits: Any) -> None:
    store(builder, bits, address)


@kernel(types.uint32, types.uint32)
def _to_bfloat16(bits: np.uint32) -> np.uint32:
    """The nearest bfloat16 of a float32, both as bits: add just under half, one more if that would leave an odd one."""
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return (bits >> np.uint32(16)) | np.uint32(0x40)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@kernel(types.uint32, types.uint32)
def _to_float16(bits: np.uint32) -> np.uint32:
    """The nearest float16 of a float32, both as bits."""
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        return sign | np.uint32(0x7E00) | ((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
    if magnitude >= np.uint32(0x477FF000):  # 65520, half way from the largest float16 to the next, and all above
        return sign | np.uint32(0x7C00)
    if magnitude >= np.uint32(0x38800000):  # 2⁻¹⁴, the smallest normal float16: change the bias, drop 13 bits
        rebased = magnitude - np.uint32(0x38000000)
        kept, dropped = rebased >> np.uint32(13), rebased & np.uint32(0x1FFF)
        half = np.uint32(0x1000)
    elif magnitude >= np.uint32(0x33000000):  # 2⁻²⁵, half the smallest subnormal: multiples of 2⁻²⁴
        shift = np.uint32(126) - (magnitude >> np.uint32(23))
        mantissa = (magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
        kept, dropped = mantissa >> shift, mantissa & ((np.uint32(1) << shift) - np.uint32(1))
        half = np.uint32(1) << (shift - np.uint32(1))
    else:
        return sign
    if dropped > half or (dropped == half and kept & np.uint32(1)):
        kept += np.uint32(1)
    return sign | kept


@kernel(types.void, INT64, INT64, INT64, INT64)
def _convert(source: int, count: int, dtype: int, target: int) -> None:
    """`count` float32 to 16-bit floats, between addresses."""
    if dtype == BFLOAT16:
        for i in range(count):
            _store_bits(target + 2 * i, np.uint16(_to_bfloat16(_load_bits(source + 4 * i))))
    else:
        for i in range(count):
            _store_bits(target + 2 * i, np.uint16(_to_float16(_load_bits(source + 4 * i))))


def append(
    args: Append, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel; the elements of both operands are taken end to end, whatever the spans."""
    operands = Operands(bytes_of)
    target = operands.rows(writes[0])
    if CODES[args.dtype] == FLOAT32:
        move_spans(*target, *operands.rows(reads[0]))
        return
    count = sum(segment.spans.nbytes for segment in reads[0]) // 4
    converted: NDArray[np.uint8] = np.empty(count * ITEMSIZE[args.dtype], dtype=np.uint8)
    _convert(operands.source(reads[0]), count, CODES[args.dtype], address_of(converted))
    move_spans(*target, address_of(converted), np.array([[0, converted.nbytes]]))
