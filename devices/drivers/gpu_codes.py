"""Stored numbers on a GPU: rows of every dtype as float32; append, quantize and dequantize (kernels/contract.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_operands import Place, Upload
from tierloop.devices.kernels.contract import CODE_RANGE, SCALE_NBYTES, Append, Dequantize, Quantize, value_nbytes

Int64 = NDArray[np.int64]
_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_FP8_NAN, _SIGN = 0x7F, 0x80


def as_float32(rows: Tensor, dtype: str) -> Tensor:
    """Rows as bytes, (…, nbytes), as the numbers that they are: float32 (…, elements)."""
    return rows.view(_TYPES[dtype]).to(torch.float32)


def value_rows(rows: Tensor, dtype: str, dim: int) -> Tensor:
    """V rows, (…, nbytes), as numbers: codes are multiplied by the scale behind them."""
    if dtype not in CODE_RANGE:
        return as_float32(rows, dtype)
    # Copied even if it lies in one piece, as that of a single row does: there it is off the grid of float32.
    scale = rows[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return as_float32(rows[..., :dim].contiguous(), dtype) * scale


def append(args: Append, reads: list[Int64], writes: list[Int64], room: int) -> Callable[[Tensor, Upload], None]:
    """float32 → dtype, to nearest even."""
    source, target = Place(reads[0]), Place(writes[0])

    def work(slab: Tensor, upload: Upload) -> None:
        target.store(slab, source.load(slab, upload).view(torch.float32).to(_TYPES[args.dtype]), upload)

    return work


def quantize(args: Quantize, reads: list[Int64], writes: list[Int64], room: int) -> Callable[[Tensor, Upload], None]:
    """float32 rows → codes, each row followed by its own scale, or with given ones for each channel."""
    _whole_rows(reads[0], 4 * args.dim)
    source, target = Place(reads[0]), Place(writes[0])
    _whole_rows(writes[0], value_nbytes(args.dtype, args.dim) if args.axis == "row" else args.dim)
    scales = _Scales(args, reads, source.nbytes // (4 * args.dim))

    def work(slab: Tensor, upload: Upload) -> None:
        x = source.load(slab, upload).view(torch.float32).view(-1, args.dim)
        if args.axis == "channel":
            target.store(slab, _codes(x, scales.of_rows(slab, upload), args.dtype), upload)
            return
        scale = x.abs().amax(dim=1, keepdim=True) / CODE_RANGE[args.dtype]
        scale = torch.where(torch.isfinite(scale) & (scale != 0), scale, 1.0)
        rows = torch.cat([_codes(x, scale, args.dtype), scale.view(torch.uint8).view(-1, SCALE_NBYTES)], dim=1)
        target.store(slab, rows, upload)

    return work


def dequantize(
    args: Dequantize, reads: list[Int64], writes: list[Int64], room: int
) -> Callable[[Tensor, Upload], None]:
    """Codes → float32 rows."""
    row_nbytes = value_nbytes(args.dtype, args.dim) if args.axis == "row" else args.dim
    _whole_rows(reads[0], row_nbytes)
    _whole_rows(writes[0], 4 * args.dim)
    source, target = Place(reads[0]), Place(writes[0])
    scales = _Scales(args, reads, source.nbytes // row_nbytes)

    def work(slab: Tensor, upload: Upload) -> None:
        rows = source.load(slab, upload).view(-1, row_nbytes)
        if args.axis == "row":
            numbers = value_rows(rows, args.dtype, args.dim)
        else:
            numbers = as_float32(rows, args.dtype) * scales.of_rows(slab, upload)
        target.store(slab, numbers, upload)

    return work


class _Scales:
    """The scales of channels, and which of them each row has. Raises ValueError for numbers that name none."""

    def __init__(self, args: Quantize | Dequantize, reads: list[Int64], num_rows: int) -> None:
        if args.axis == "row":
            return
        self._table, self._dim = Place(reads[1]), args.dim
        self._which = np.ascontiguousarray(args.which, dtype=np.int64)
        num = self._table.nbytes // (4 * args.dim)
        if self._which.shape != (num_rows,) or ((self._which < 0) | (self._which >= num)).any():
            raise ValueError(f"which: {num_rows} numbers from 0 to {num - 1} are needed")

    def of_rows(self, slab: Tensor, upload: Upload) -> Tensor:
        """(rows, dim)."""
        return self._table.load(slab, upload).view(torch.float32).view(-1, self._dim)[upload(self._which)]


def _codes(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """The nearest codes, ties to even: uint8, shaped like x. fp8 codes have the sign of x, NaN and zero among them."""
    quotient = x / scale
    most = CODE_RANGE[dtype]
    if dtype == "int8":
        return torch.nan_to_num(quotient, nan=0.0).clamp(-most, most).round().to(torch.int8).view(torch.uint8)
    nearest = quotient.abs().clamp(max=most).to(torch.float8_e4m3fn).view(torch.uint8)
    magnitude = torch.where(torch.isnan(quotient), _FP8_NAN, nearest & ~_SIGN & 0xFF)
    return torch.where(torch.signbit(x), magnitude | _SIGN, magnitude).to(torch.uint8)


def _whole_rows(spans: Int64, row_nbytes: int) -> None:
    """Raises ValueError for a span that is no whole number of rows."""
    cut = spans[:, 1] % row_nbytes != 0
    if cut.any():
        raise ValueError(f"span {int(cut.argmax())} is no whole number of rows of {row_nbytes} bytes")
