"""Codes, of the level compute: `quantize` and `dequantize` on rows that are hard to round.

Codes and scales are exact: the quotient is one float32 division, and the nearest code is found by looking at all of
them, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.conformance.launches import Bench, as_bytes
from tierloop.devices.conformance.oracle import NUMBERS, Int64
from tierloop.devices.conformance.subject import Bytes, Lane, Skip, Subject, expect
from tierloop.devices.kernels.contract import CODE_RANGE, Codes, Dequantize, Quantize

Float32 = NDArray[np.float32]
_NUM_SCALES = 3


def check_quantize_gives_the_nearest_codes(subject: Subject) -> None:
    """Ties, saturation, zero rows, NaN and infinities, with a scale for each row and with scales for each channel."""
    for lane in subject.kernel_lanes("quantize"):
        bench = Bench(subject, lane)
        for dtype in _code_dtypes(lane):
            for dim in (64, 20):
                given = make_rows(dtype, dim, subject.rng)
                for axis, want in (("row", given.by_row), ("channel", given.by_channel)):
                    reads = [bench.scattered(as_bytes(given.rows), np.full(len(given.rows), 4 * dim))]
                    if axis == "channel":
                        reads.append(bench.whole(as_bytes(given.scales)))
                    args = Quantize(dtype, dim, axis, given.which)  # type: ignore[arg-type]  # literals above
                    got = bench.launch(args, tuple(reads), bench.target(want.nbytes)).reshape(len(given.rows), -1)
                    wrong = np.argwhere(got != want.reshape(got.shape))
                    if wrong.size:
                        i, j = wrong[0].tolist()
                        what = f"byte {j} of row {i} is {got[i, j]:#x}, not {want.reshape(got.shape)[i, j]:#x}"
                        expect(False, f"quantize, {dtype}, axis {axis}, dim {dim}: {what}")
                    bench.free()


def check_dequantize_rounds_once(subject: Subject) -> None:
    """Every code times its scale, and NaN for the codes that are NaN."""
    for lane in subject.kernel_lanes("dequantize"):
        bench = Bench(subject, lane)
        for dtype in _code_dtypes(lane):
            for dim in (64, 20):
                stored = np.resize(subject.rng.permutation(256).astype(np.uint8), (29, dim))
                scales = subject.rng.uniform(1e-3, 9, size=(4, dim)).astype(np.float32)
                which = subject.rng.integers(0, 4, len(stored))
                own = scales[which, :1]
                with_scales = np.concatenate([stored, np.ascontiguousarray(own).view(np.uint8)], axis=1)
                for axis, rows, factors in (("row", with_scales, own), ("channel", stored, scales[which])):
                    reads = [bench.scattered(rows.reshape(-1), np.full(len(rows), rows.shape[1]))]
                    if axis == "channel":
                        reads.append(bench.whole(as_bytes(scales)))
                    args = Dequantize(dtype, dim, axis, which)  # type: ignore[arg-type]  # literals above
                    got = bench.launch(args, tuple(reads), bench.target(stored.size * 4)).view(np.float32)
                    want = numbers_of(stored, factors, dtype)
                    got = got.reshape(want.shape)
                    wrong = np.argwhere((got != want) & ~(np.isnan(got) & np.isnan(want)))
                    if wrong.size:
                        i, j = wrong[0].tolist()
                        what = f"code {stored[i, j]:#x} of row {i} became {got[i, j]!r}, not {want[i, j]!r}"
                        expect(False, f"dequantize, {dtype}, axis {axis}, dim {dim}: {what}")
                    bench.free()


@dataclass(frozen=True)
class Quantized:
    """float32 rows (n, dim), scales (s, dim) and which of them each row has; the codes, and with each row's scale."""

    rows: Float32
    scales: Float32
    which: Int64
    by_channel: Bytes
    by_row: Bytes


def make_rows(dtype: Codes, dim: int, rng: np.random.Generator) -> Quantized:
    """Random rows of very different sizes, all codes and the halves between them, zeros, NaN and infinities."""
    random = rng.normal(size=(24, dim)) * 10.0 ** rng.integers(-12, 12, size=(24, 1))
    finite = np.sort(NUMBERS[dtype][np.isfinite(NUMBERS[dtype])])
    finite = finite[finite >= -finite[-1]]
    ties = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [-0.0, finite[-1] * 1.02, finite[-1] * -1.5]])
    # The largest code in each row makes its scale 1, so that ties stay ties.
    padded = np.full((-(-len(ties) // (dim - 1)), dim), finite[-1])
    padded[:, 1:].reshape(-1)[: len(ties)] = 0
    for i, row in enumerate(padded):
        part = ties[i * (dim - 1) : (i + 1) * (dim - 1)]
        row[1 : 1 + len(part)] = part
    wrong = rng.normal(size=(4, dim))
    wrong[0, 3], wrong[1, 0], wrong[2, dim - 1] = np.nan, np.inf, -np.inf
    rows = np.concatenate([random, padded, wrong, np.zeros((1, dim)), np.full((1, dim), 1e-45)]).astype(np.float32)
    scales = np.exp2(rng.integers(-3, 3, size=(_NUM_SCALES, dim))).astype(np.float32)
    scales[1], scales[2] = 1, rng.uniform(0.01, 2, dim)
    which = rng.integers(0, _NUM_SCALES, len(rows))
    which[len(random) : len(random) + len(padded)] = 1
    own = row_scales(rows, dtype)
    codes = nearest_codes(rows, own, dtype)
    return Quantized(
        rows, scales, which, nearest_codes(rows, scales[which], dtype).reshape(-1),
        np.concatenate([codes, own.view(np.uint8)], axis=1).reshape(-1),
    )  # fmt: skip


def row_scales(rows: Float32, dtype: Codes) -> Float32:
    """The scale of every row by itself: (n, 1)."""
    scales = np.ones((len(rows), 1), dtype=np.float32)
    for scale, row in zip(scales, rows, strict=True):
        largest = np.abs(row).max() / np.float32(127 if dtype == "int8" else 448)
        if np.isfinite(largest) and largest:
            scale[0] = largest
    return scales


def nearest_codes(rows: Float32, scales: Float32, dtype: Codes) -> Bytes:
    """The code of every element: (n, dim)."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        quotients = (rows / scales).astype(np.float64)
    codes = np.zeros(rows.shape, dtype=np.uint8)
    allowed = np.array([c for c in range(256) if not np.isnan(NUMBERS[dtype][c]) and (dtype, c) != ("int8", 128)])
    even_first = allowed[np.argsort(allowed & 1, kind="stable")]  # of two that are as near, argmin takes the first
    of_sign = {sign: even_first if dtype == "int8" else even_first[even_first & 128 == sign] for sign in (0, 128)}
    known = {sign: NUMBERS[dtype][candidates] for sign, candidates in of_sign.items()}
    for at, q in np.ndenumerate(quotients):
        if np.isnan(q):
            codes[at] = 0 if dtype == "int8" else 0x7F | np.signbit(rows[at]) << 7
            continue
        q = np.clip(q, -1000, 1000)
        sign = int(np.signbit(rows[at])) << 7
        codes[at] = of_sign[sign][np.abs(known[sign] - q).argmin()]
    return codes


def numbers_of(codes: Bytes, scales: Float32, dtype: Codes) -> Float32:
    """code · scale, rounded once: codes (n, dim), scales (n, dim) or (n, 1)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (NUMBERS[dtype][codes] * scales.astype(np.float64)).astype(np.float32)


def _code_dtypes(lane: Lane) -> list[Codes]:
    offered = sorted(lane.executor.dtypes & CODE_RANGE.keys())
    if not offered:
        raise Skip(f"{lane.executor.name} offers no dtype of codes")
    return offered  # type: ignore[return-value]  # words of the contract
