"""quantize and dequantize: what every code means, how numbers become codes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.attention_case import Bytes, Float32, bytes_of, launch, region, whole
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.kernels import contract, run
from tierloop.devices.kernels.contract import CODE_RANGE, Dequantize, Quantize
from tierloop.devices.kernels.definition import Given, define
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans

pytestmark = pytest.mark.usefixtures("threads_for_little_work")

CODES = sorted(CODE_RANGE)


def by_channel(numbers: Float32, dtype: Any, scales: Float32 | None = None, which: Any = None) -> Bytes:
    """Codes (rows, dim) of numbers (rows, dim); the one scale of each channel is 1 unless given."""
    rows, dim = numbers.shape
    table = np.ones((1, dim), dtype=np.float32) if scales is None else scales
    which = np.zeros(rows, dtype=np.int64) if which is None else np.array(which, dtype=np.int64)
    args = Quantize(dtype, dim, "channel", which)
    return launch(args, [whole(numbers), whole(table)], rows * dim).reshape(rows, dim)


def by_row(numbers: Float32, dtype: Any, threads: int = 1) -> tuple[Bytes, Float32]:
    """Codes (rows, dim) and scales (rows,)."""
    rows, dim = numbers.shape
    stored = launch(Quantize(dtype, dim, "row"), [whole(numbers)], rows * (dim + 4), threads).reshape(rows, dim + 4)
    return stored[:, :dim], np.ascontiguousarray(stored[:, dim:]).view(np.float32).ravel()


def back(stored: Bytes, dtype: Any, dim: int) -> Float32:
    """Numbers (rows, dim) of codes and scales, or of codes (rows, dim) with the scale 1."""
    rows = len(stored)
    if stored.shape[1] > dim:
        args, reads = Dequantize(dtype, dim, "row"), [whole(stored)]
    else:
        args = Dequantize(dtype, dim, "channel", np.zeros(rows, dtype=np.int64))
        reads = [whole(stored), whole(np.ones((1, dim), dtype=np.float32))]
    return launch(args, reads, rows * dim * 4).view(np.float32).reshape(rows, dim)


def beside(numbers: Float32, towards: float) -> Float32:
    """The next float32 of each."""
    return np.nextafter(numbers, np.float32(towards)).astype(np.float32)


def defined(args: Quantize | Dequantize, *operands: NDArray[np.generic]) -> Bytes:
    flat = [np.ascontiguousarray(one).view(np.uint8).reshape(-1) for one in operands]
    return define(args, [Given(one, np.array([one.nbytes])) for one in flat], [0])[0]


# -- what codes mean ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("dim", [1, 256])
def test_every_code_comes_back_as_itself(dtype: str, dim: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    if dtype == "int8":
        codes = codes[codes != 128]  # −128 is no code
    codes = codes[: len(codes) // dim * dim].reshape(-1, dim) if dim == 1 else np.resize(codes, (1, 256))
    numbers = back(codes, dtype, dim)
    assert (by_channel(numbers, dtype) == codes).all()


def test_fp8_codes_are_the_format_s_numbers() -> None:
    numbers = back(np.arange(256, dtype=np.uint8).reshape(-1, 16), "fp8_e4m3", 16).ravel()
    assert numbers[[0x00, 0x01, 0x07, 0x08, 0x38, 0x39, 0x7E]].tolist() == [
        0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 1, 1.125, 448
    ]  # fmt: skip
    assert np.flatnonzero(np.isnan(numbers)).tolist() == [0x7F, 0xFF]
    finite = ~np.isnan(numbers[:128])
    assert (numbers[128:][finite] == -numbers[:128][finite]).all()
    assert np.signbit(numbers[0x80])
    assert (np.diff(numbers[:127]) > 0).all()


# -- how numbers become codes ---------------------------------------------------------------------------------------


def test_int8_ties_go_to_the_even_code() -> None:
    halves = (np.arange(-127, 127)[None] + 0.5).astype(np.float32)
    codes = by_channel(halves, "int8").view(np.int8)[0]
    assert (codes % 2 == 0).all()
    assert (np.abs(codes - halves[0]) == 0.5).all()


@pytest.mark.parametrize("towards", [-np.inf, np.inf])
def test_next_to_a_tie_the_nearer_int8_code_is_taken(towards: float) -> None:
    halves = (np.arange(-126, 126)[None] + 0.5).astype(np.float32)
    codes = by_channel(beside(halves, towards), "int8").view(np.int8)[0]
    assert (codes == halves[0] + (0.5 if towards > 0 else -0.5)).all()


def test_fp8_ties_go_to_the_even_code_and_their_neighbours_to_the_nearer_one() -> None:
    codes = np.arange(127, dtype=np.uint8)[None]
    numbers = back(codes, "fp8_e4m3", 127)
    middle = ((numbers[:, 1:] + numbers[:, :-1]) / 2).astype(np.float32)
    below, above = codes[:, :-1], codes[:, 1:]
    assert (by_channel(middle, "fp8_e4m3") == np.where(below % 2 == 0, below, above)).all()
    assert (by_channel(beside(middle, 0), "fp8_e4m3") == below).all()
    assert (by_channel(beside(middle, 999), "fp8_e4m3") == above).all()
    assert (by_channel(-middle, "fp8_e4m3") == by_channel(middle, "fp8_e4m3") | 0x80).all()


def test_what_is_too_large_becomes_the_largest_code() -> None:
    large = np.array([[127.4, 127.5, 128, 1e9, 3.4e38, np.inf]], dtype=np.float32)
    assert (by_channel(large, "int8").view(np.int8) == 127).all()
    assert (by_channel(-large, "int8").view(np.int8) == -127).all()
    large = np.array([[448, 463.9, 464, 465, 1e9, 3.4e38, np.inf]], dtype=np.float32)
    assert (by_channel(large, "fp8_e4m3") == 0x7E).all()
    assert (by_channel(-large, "fp8_e4m3") == 0xFE).all()


def test_nan_is_zero_in_int8_and_nan_in_fp8() -> None:
    nan = np.array([[np.nan, -np.nan, 1]], dtype=np.float32)
    nan[0, 1] = np.copysign(np.float32(np.nan), np.float32(-1))
    assert by_channel(nan, "int8").tolist() == [[0, 0, 1]]
    assert by_channel(nan, "fp8_e4m3").tolist() == [[0x7F, 0xFF, 0x38]]


# -- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
def test_the_scale_of_a_row_is_its_largest_magnitude_over_the_largest_code(dtype: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(50, 21)).astype(np.float32)
    codes, scales = by_row(numbers, dtype)
    assert (scales == np.abs(numbers).max(axis=1) / np.float32(CODE_RANGE[dtype])).all()
    largest = 127 if dtype == "int8" else 0x7E
    at = np.abs(numbers).argmax(axis=1)
    magnitude = np.abs(codes.view(np.int8).astype(np.int64)) if dtype == "int8" else codes & 0x7F
    assert (magnitude[np.arange(50), at] == largest).all()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("wrong", [0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 15, 16, 18])
def test_a_row_whose_scale_would_be_zero_or_not_finite_has_the_scale_one(dtype: str, wrong: float, place: int) -> None:
    numbers = np.zeros((3, 19), dtype=np.float32)
    numbers[1, place] = wrong
    numbers[2] = 3
    codes, scales = by_row(numbers, dtype)
    assert scales.tolist() == [1, 1, np.float32(3) / np.float32(CODE_RANGE[dtype])]
    assert (codes[0] == 0).all()


@pytest.mark.parametrize("dtype", CODES)
def test_each_row_uses_the_scales_that_which_names(dtype: Any) -> None:
    random = np.random.default_rng(0)
    scales = random.uniform(0.5, 3, size=(3, 18)).astype(np.float32)
    which = np.array([2, 0, 0, 1, 2])
    numbers = random.normal(size=(5, 18)).astype(np.float32)
    together = by_channel(numbers, dtype, scales, which)
    for row in range(5):
        alone = by_channel(numbers[row : row + 1], dtype, scales[which[row]][None])
        assert (together[row] == alone[0]).all()
    args = Dequantize(dtype, 18, "channel", which)
    numbers = launch(args, [whole(together), whole(scales)], 5 * 18 * 4).view(np.float32).reshape(5, 18)
    exact = back(together, dtype, 18).astype(np.float64) * scales[which]
    assert (numbers == exact.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", CODES)
def test_a_number_comes_back_within_half_the_distance_of_codes(dtype: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    codes, scales = by_row(numbers, dtype)
    stored = np.concatenate([codes, scales[:, None].view(np.uint8)], axis=1)
    off = np.abs(back(stored, dtype, 64) - numbers)
    # fp8_e4m3 has three bits of mantissa, and 2⁻⁹ between its smallest codes.
    step = scales[:, None] if dtype == "int8" else np.maximum(np.abs(numbers) / 8, scales[:, None] * 2.0**-9)
    assert (off <= step / 2 * 1.00001).all()


# -- the definition, layouts and threads ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(CODES),
    st.sampled_from(["row", "channel"]),
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 3), st.sampled_from([1, 5, 16, 37])),
        elements=st.one_of(st.floats(width=32), st.integers(-300, 300).map(lambda n: n / 2)),
    ),
    st.integers(0, 2**32 - 1),
)
def test_codes_and_numbers_are_those_of_the_definition(dtype: Any, axis: Any, numbers: Float32, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, dim = numbers.shape
    scales = random.choice([1, 0.5, 0.37, 1e-30, 3e38], size=(2, dim)).astype(np.float32)
    more = [scales] if axis == "channel" else []
    args = Quantize(dtype, dim, axis, random.integers(0, 2, (rows,)))
    want = defined(args, numbers, *more)
    codes = launch(args, [whole(numbers), *(whole(one) for one in more)], want.nbytes)
    assert (codes == want).all()
    codes = random.integers(0, 256, want.nbytes, dtype=np.uint8)
    inverse = Dequantize(dtype, dim, axis, args.which)
    expected = defined(inverse, codes, *more).view(np.float32)
    got = launch(inverse, [whole(codes), *(whole(one) for one in more)], expected.nbytes).view(np.float32)
    assert ((got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))).all()


def in_blocks(array: NDArray[np.generic], rows: int) -> Operand:
    """The rows of an array in blocks of `rows`, the last shorter, from the end of a region to its front."""
    flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    block = rows * flat.nbytes // len(array)
    starts = np.arange(0, flat.nbytes, block)
    memory, spans = np.full(flat.nbytes + 3 * len(starts), 0xEE, dtype=np.uint8), []
    place = memory.nbytes
    for start in starts.tolist():
        part = flat[start : start + block]
        place -= part.nbytes + 3
        memory[place : place + part.nbytes] = part
        spans.append((place, part.nbytes))
    return (Segment(region(memory), Spans(spans)),)


def contents(operand: Operand) -> Bytes:
    return np.concatenate([bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_and_threads_change_nothing(dtype: Any, threads: int) -> None:
    numbers = np.random.default_rng(0).normal(size=(2001, 40)).astype(np.float32)
    codes, scales = by_row(numbers, dtype)
    stored = np.concatenate([codes, scales[:, None].view(np.uint8)], axis=1)
    target = in_blocks(np.zeros_like(stored), 7)
    run(Launch(Quantize(dtype, 40, "row"), (in_blocks(numbers, 16),), (target,)), bytes_of, threads)
    assert (contents(target) == stored.ravel()).all()
    into = in_blocks(np.zeros_like(numbers), 100)
    run(Launch(Dequantize(dtype, 40, "row"), (target,), (into,)), bytes_of, threads)
    assert (contents(into).view(np.float32) == back(stored, dtype, 40).ravel()).all()


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Quantize, Dequantize])
@pytest.mark.parametrize("bad", [-1, 2, 1 << 40])
def test_a_scale_that_does_not_exist_is_refused_before_anything_is_written(kind: Any, bad: int) -> None:
    args = kind("int8", 4, "channel", np.array([0, bad, 1]))
    rows, codes, scales = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.uint8), np.ones((2, 4), np.float32)
    given, target = (rows, whole(codes + 7)) if kind is Quantize else (codes, whole(rows + 7))
    before = contents(target).copy()
    with pytest.raises(ValueError, match=rf"which\[1\] is {bad}; there are 2"):
        run(Launch(args, (whole(given), whole(scales)), (target,)), bytes_of)
    assert (contents(target) == before).all()
    with pytest.raises(ValueError, match="which"):
        defined(args, given, scales)


def test_a_span_that_cuts_a_row_is_refused() -> None:
    rows = region(np.zeros(96, dtype=np.uint8))
    cut = (Segment(rows, Spans([(0, 32), (32, 40), (72, 24)])),)
    with pytest.raises(ValueError, match="span 1 of the rows to read is 40 bytes: no whole number of rows of 32"):
        run(Launch(Quantize("int8", 8, "row"), (cut,), (whole(np.zeros(36, dtype=np.uint8)),)), bytes_of)
    with pytest.raises(ValueError, match="span 1 is no whole number of rows of 32"):
        define(Quantize("int8", 8, "row"), [Given(np.zeros(96, np.uint8), np.array([32, 40, 24]))], [36])


@pytest.mark.parametrize(
    ("args", "reads", "nbytes", "message"),
    [
        (Quantize("float16", 8, "row"), [64], 24, "dtype 'float16' is not one of fp8_e4m3, int8"),  # type: ignore[arg-type]
        (Quantize("int8", 8, "column"), [64], 24, "axis 'column' is not one of row, channel"),  # type: ignore[arg-type]
        (Quantize("int8", 0, "row"), [64], 24, "dim is 0"),
        (Quantize("int8", 8, "row"), [60], 12, "float32 bytes: 60 given"),
        (Quantize("int8", 8, "row"), [64], 16, "code bytes: 16 given, 24 needed"),
        (Dequantize("int8", 8, "row"), [23], 64, "code bytes: 23 given, 24 needed"),
        (Quantize("int8", 8, "channel", np.zeros(1, np.int64)), [64, 32], 16, "rows with a scale: 1 given, 2 needed"),
        (Quantize("int8", 8, "channel", np.zeros(2, np.int64)), [64, 30], 16, "scale bytes: 30 given"),
        (Quantize("int8", 8, "channel", np.zeros(2, np.int64)), [64], 16, "takes 2 read operands, got 1"),
        (Quantize("int8", 8, "row"), [64, 32], 24, "takes 1 read operands, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(args: Any, reads: list[int], nbytes: int, message: str) -> None:
    wrong = contract.check(args, [(1, n) for n in reads], [(1, nbytes)])
    assert wrong is not None
    assert message in wrong
