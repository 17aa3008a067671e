"""KV element types on the host: float32 rows to stored bytes and back, in plain NumPy.

bfloat16 is not a NumPy type: it is the upper half of a float32, rounded to nearest even.

int8 and fp8_e4m3 are codes (devices/kernels/contract.py, **Codes**): keys are stored by a scale for each channel, which
lies apart from them, values by a scale for each row, which follows its codes. The bytes are those of the kernels
`append` and `quantize`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.contract import CODE_RANGE, ITEMSIZE, SCALE_NBYTES
from tierloop.devices.kernels.definition import FP8_NUMBERS

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]

_NUMBERS_FP8 = FP8_NUMBERS.astype(np.float32)


def to_bytes(rows: Float32, dtype: str) -> Bytes:
    """float32 (..., d) → uint8 (..., d · itemsize), to the nearest, ties to even: types that are no codes."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if dtype == "float32":
        return rows.view(np.uint8)
    if dtype == "float16":
        return rows.astype(np.float16).view(np.uint8)
    bits = rows.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    quiet = np.where(np.isnan(rows), ((bits >> 16) | 0x40).astype(np.uint16), rounded)
    return np.ascontiguousarray(quiet).view(np.uint8)


def keys_to_bytes(keys: Float32, dtype: str, scales: Float32 | None = None) -> Bytes:
    """K rows float32 (..., n, d) → uint8 (..., n, d · itemsize), to the nearest, ties to even.

    Codes need `scales`, float32 (..., d) > 0; what is beyond the largest code becomes that code.
    """
    if dtype not in CODE_RANGE:
        return to_bytes(keys, dtype)
    assert scales is not None, "keys are stored by the scales of their channels"
    return _codes(keys, scales[..., None, :], dtype)


def values_to_bytes(values: Float32, dtype: str) -> Bytes:
    """V rows float32 (..., d) → uint8 (..., value_nbytes(dtype, d)); each row of codes is followed by its scale."""
    if dtype not in CODE_RANGE:
        return to_bytes(values, dtype)
    scales = scales_of(np.abs(values).max(axis=-1, keepdims=True), dtype)
    return np.concatenate((_codes(values, scales, dtype), scales.view(np.uint8)), axis=-1)


def scales_of(largest: Float32, dtype: str) -> Float32:
    """What the largest magnitudes are divided by so that they become the largest code; 1 where that is 0 or no number.

    float32, a division of float32.
    """
    with np.errstate(under="ignore", invalid="ignore"):
        scales = largest / np.float32(CODE_RANGE[dtype])
    scales[~np.isfinite(scales) | (scales == 0)] = 1
    return scales


def from_bytes(stored: Bytes, dtype: str) -> Float32:
    """uint8 (..., d · itemsize) → float32 (..., d), exactly: the numbers; where they are codes, the codes."""
    stored = np.ascontiguousarray(stored)
    if dtype == "float32":
        return stored.view(np.float32)
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float32)
    if dtype == "int8":
        return stored.view(np.int8).astype(np.float32)
    if dtype == "fp8_e4m3":
        return _NUMBERS_FP8[stored]
    return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def exact_keys(stored: Bytes, dtype: str, scales: Float32 | None = None) -> Float64:
    """What stored K rows stand for, exactly: float64 (..., n, d)."""
    numbers = from_bytes(stored, dtype).astype(np.float64)
    return numbers if scales is None else numbers * scales[..., None, :].astype(np.float64)


def exact_values(stored: Bytes, dtype: str) -> Float64:
    """What stored V rows stand for, exactly: float64 (..., d)."""
    if dtype not in CODE_RANGE:
        return from_bytes(stored, dtype).astype(np.float64)
    codes, scales = stored[..., :-SCALE_NBYTES], np.ascontiguousarray(stored[..., -SCALE_NBYTES:])
    return from_bytes(codes, dtype).astype(np.float64) * scales.view(np.float32).astype(np.float64)


def itemsize(dtype: str) -> int:
    """Bytes per element. Raises ValueError for an unknown type."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(sorted(ITEMSIZE))}")
    return ITEMSIZE[dtype]


def _codes(rows: Float32, scales: Float32, dtype: str) -> Bytes:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        quotient = np.asarray(rows, dtype=np.float32) / scales
    if dtype == "int8":
        nearest = np.rint(np.clip(quotient, -127, 127))
        integers = np.where(np.isnan(nearest), np.float32(0), nearest).astype(np.int8)
        return np.asarray(integers.view(np.uint8))
    magnitude = np.minimum(np.abs(quotient), np.float32(CODE_RANGE[dtype]))
    # Normal numbers: drop 20 bits of the mantissa and change the bias of the exponent; below 2⁻⁶, steps of 2⁻⁹.
    bits = magnitude.view(np.uint32)
    normal = ((bits + (((bits >> 20) & 1) + np.uint32(0x7FFFF))) >> 20) - np.uint32(120 << 3)
    number = ~np.isnan(magnitude)
    small = np.rint(np.where(magnitude < 2.0**-6, magnitude, 0) * np.float32(512))
    codes = np.where(magnitude < 2.0**-6, small.astype(np.uint32), normal)
    codes = np.where(number, codes, np.uint32(0x7F)) | (np.signbit(rows).astype(np.uint32) << 7)
    return np.asarray(codes, dtype=np.uint8)
