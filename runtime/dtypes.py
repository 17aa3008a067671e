"""KV element types on the host: float32 rows to stored bytes and back, in plain NumPy.

bfloat16 is not a NumPy type: it is the upper half of a float32, rounded to nearest even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.contract import ITEMSIZE


def to_bytes(rows: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """float32 (..., d) → uint8 (..., d · itemsize), round to nearest even."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if dtype == "float32":
        return rows.view(np.uint8)
    if dtype == "float16":
        return rows.astype(np.float16).view(np.uint8)
    bits = rows.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    quiet = np.where(np.isnan(rows), ((bits >> 16) | 0x40).astype(np.uint16), rounded)
    return np.ascontiguousarray(quiet).view(np.uint8)


def from_bytes(stored: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """uint8 (..., d · itemsize) → float32 (..., d), exactly."""
    stored = np.ascontiguousarray(stored)
    if dtype == "float32":
        return stored.view(np.float32)
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float32)
    return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def as_stored(rows: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The float32 values that remain after storing rows in `dtype`."""
    return from_bytes(to_bytes(rows, dtype), dtype)


def itemsize(dtype: str) -> int:
    """Bytes per element. Raises ValueError for an unknown type."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(sorted(ITEMSIZE))}")
    return ITEMSIZE[dtype]
