"""quantize, dequantize: float32 rows → codes with scales, and back (contract.py). Threads share the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.codes import (
    LARGEST_FP8,
    LARGEST_INT8,
    PER_CHANNEL,
    PER_ROW,
    dequantize_row,
    largest_bits,
    quantize_row,
)
from tierloop.devices.kernels.compiled import (
    FLOAT,
    INT64,
    INTS,
    TABLE,
    address_of,
    inline,
    kernel,
    store_float,
    take_next,
)
from tierloop.devices.kernels.contract import Dequantize, Quantize, value_nbytes
from tierloop.devices.kernels.lanes import CODES, FP8, INT8
from tierloop.devices.kernels.lanes import FLOAT as REAL
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import check_sizes
from tierloop.devices.kernels.pool import share, worthwhile

_INFINITY = 0x7F800000
_MUTABLE = types.Array(types.int64, 1, "C")


@inline(FLOAT, types.int32)
def _number(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, REAL)


@kernel(FLOAT, INT64, INT64, FLOAT)
def _scale_of_row(source: int, dim: int, largest_code: float) -> float:
    bits = largest_bits(source, dim)
    scale = _number(bits) / largest_code
    return 1.0 if bits >= _INFINITY or scale == 0 else scale


@kernel(types.void, INT64, INT64, INT64, INT64, INT64, INTS, INT64, INTS, INTS)
def _quantize_rows(
    counter: int,
    share_rows: int,
    dtype: int,
    axis: int,
    dim: int,
    sources: NDArray[np.int64],
    scales: int,
    which: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> None:
    """Take shares of the rows, whose addresses are `sources`, until none is left."""
    while True:
        first = take_next(counter) * share_rows
        if first >= sources.shape[0]:
            break
        for row in range(first, min(first + share_rows, sources.shape[0])):
            source, target = sources[row], targets[row]
            if axis == PER_CHANNEL:
                place = scales + which[row] * dim * 4
                if dtype == INT8:
                    quantize_row(INT8, PER_CHANNEL, source, place, dim, target)
                else:
                    quantize_row(FP8, PER_CHANNEL, source, place, dim, target)
            else:
                place = target + dim
                if dtype == INT8:
                    store_float(place, _scale_of_row(source, dim, LARGEST_INT8))
                    quantize_row(INT8, PER_ROW, source, place, dim, target)
                else:
                    store_float(place, _scale_of_row(source, dim, LARGEST_FP8))
                    quantize_row(FP8, PER_ROW, source, place, dim, target)


@kernel(types.void, INT64, INT64, INT64, INT64, INT64, INTS, INT64, INTS, INTS)
def _dequantize_rows(
    counter: int,
    share_rows: int,
    dtype: int,
    axis: int,
    dim: int,
    sources: NDArray[np.int64],
    scales: int,
    which: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> None:
    """Take shares of the rows, whose addresses are `sources`, until none is left."""
    while True:
        first = take_next(counter) * share_rows
        if first >= sources.shape[0]:
            break
        for row in range(first, min(first + share_rows, sources.shape[0])):
            source, target = sources[row], targets[row]
            if axis == PER_CHANNEL:
                place = scales + which[row] * dim * 4
                if dtype == INT8:
                    dequantize_row(INT8, PER_CHANNEL, source, place, dim, target)
                else:
                    dequantize_row(FP8, PER_CHANNEL, source, place, dim, target)
            elif dtype == INT8:
                dequantize_row(INT8, PER_ROW, source, source + dim, dim, target)
            else:
                dequantize_row(FP8, PER_ROW, source, source + dim, dim, target)


@kernel(INT64, INT64, TABLE, INT64, _MUTABLE)
def _put_rows(base: int, spans: NDArray[np.int64], row_nbytes: int, addresses: NDArray[np.int64]) -> int:
    """The address of every row of an operand; returns −1, or the first span that is no whole number of rows."""
    row = 0
    for i in range(spans.shape[0]):
        count = spans[i, 1] // row_nbytes
        if count * row_nbytes != spans[i, 1]:
            return i
        for j in range(min(count, addresses.shape[0] - row)):
            addresses[row] = base + spans[i, 0] + j * row_nbytes
            row += 1
    return -1


def _rows(operands: Operands, operand: Operand, what: str, row_nbytes: int) -> NDArray[np.int64]:
    base, spans = operands.rows(operand)
    addresses = np.empty(int(spans[:, 1].sum()) // row_nbytes, dtype=np.int64)
    bad = _put_rows(base, spans, row_nbytes, addresses)
    if bad >= 0:
        raise ValueError(f"span {bad} of the {what} is {spans[bad, 1]} bytes: no whole number of rows of {row_nbytes}")
    return addresses


def _carry_out(
    work: Any,
    args: Quantize | Dequantize,
    reads: tuple[Operand, ...],
    writes: tuple[Operand, ...],
    bytes_of: BytesOf,
    threads: int,
) -> None:
    check_sizes(dim=args.dim)
    per_channel = args.axis == "channel"
    code_nbytes = args.dim if per_channel else value_nbytes(args.dtype, args.dim)
    sizes = (4 * args.dim, code_nbytes) if isinstance(args, Quantize) else (code_nbytes, 4 * args.dim)
    operands = Operands(bytes_of)
    sources = _rows(operands, reads[0], "rows to read", sizes[0])
    targets = _rows(operands, writes[0], "rows to write", sizes[1])
    if len(targets) != len(sources):
        raise ValueError(f"{args.kernel}: {len(sources)} rows to read, room for {len(targets)}")
    which, scales = np.ascontiguousarray(args.which, dtype=np.int64), 0
    if per_channel:
        num_scales = sum(segment.spans.nbytes for segment in reads[1]) // (4 * args.dim)
        if which.shape != sources.shape:
            raise ValueError(f"{args.kernel}: `which` has shape {which.shape}, ({len(sources)},) is needed")
        bad = np.flatnonzero((which < 0) | (which >= num_scales))
        if bad.size:
            raise ValueError(
                f"{args.kernel}: which[{bad[0]}] is {which[bad[0]]}; there are {num_scales} rows of scales"
            )
        scales = operands.source(reads[1])
    threads = worthwhile(threads, len(sources) * sum(sizes))
    share_rows = max(1, len(sources) // (4 * threads) if threads > 1 else len(sources))
    counter = np.zeros(8, dtype=np.uint8)
    given = (CODES[args.dtype], PER_CHANNEL if per_channel else PER_ROW, args.dim, sources, scales, which, targets)
    share(threads, partial(work, address_of(counter), share_rows, *given))


def quantize(
    args: Quantize, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel; threads share the rows. Raises ValueError for spans that cut a row, or a wrong `which`."""
    _carry_out(_quantize_rows, args, reads, writes, bytes_of, threads)


def dequantize(
    args: Dequantize, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel; as `quantize`."""
    _carry_out(_dequantize_rows, args, reads, writes, bytes_of, threads)
