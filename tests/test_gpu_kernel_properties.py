"""The kernels in torch against the living definition, over shapes, masks, sparse rows and numbers of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention_case import Case, region, whole
from tests.gpu_rig import Rig
from tests.launches import room
from tests.test_gpu_kernels import alike, defined, on_the_gpu
from tests.test_kernel_properties import selections
from tierloop.devices.commands import Launch
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import ITEMSIZE
from tierloop.devices.kernels.definition import encode
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans

NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, 65520.0, 448.0, 464.0, -449.0, 2.5]),
    st.floats(width=32),
)
SCALES = np.array([1e-45, 0.1, 1, 3e38, np.inf, np.nan, 0], dtype=np.float32)


def near(launch: Launch) -> None:
    """Both give the same, within what sums in float32 allow."""
    with np.errstate(all="ignore"):
        want = defined(launch)
    for got, wanted in zip(on_the_gpu(Rig(options={"capacity": 16 << 20}), launch), want, strict=True):
        alike(got, wanted, 1e-3)


def exact(launch: Launch) -> None:
    """Both give the same numbers, whatever NaN looks like."""
    with np.errstate(all="ignore"):
        (want,) = defined(launch)
    (got,) = on_the_gpu(Rig(), launch)
    if launch.args.kernel == "dequantize":
        assert np.array_equal(got.view(np.float32), want.view(np.float32), equal_nan=True)
    else:
        assert got.tobytes() == want.tobytes()


@given(selections(), st.sampled_from(["dense", "paged", "rows"]), st.booleans())
def test_attention_in_one_launch_and_in_three(selection: tuple[Case, Any], kind: str, has_sinks: bool) -> None:
    case, rows = selection
    place, roots = case.layout(rows, kind), case.roots_of(rows)
    queries, each = whole(case.queries), case.q_len * case.group
    into = room(4 * len(roots) * each * (2 + case.head_dim_v))
    near(Launch(case.attend_args(place.runs, roots), (queries, place.keys, place.values), (into,)))
    shape = (case.dtype, case.num_sequences, case.num_kv_heads, case.group, case.q_len, case.head_dim)
    args = contract.Logits(*shape, case.scale, place.runs, case.q_positions, *case.masks)
    near(Launch(args, (queries, place.keys), (room(4 * len(rows) * each),)))
    split = (case.dtype, case.group, case.q_len, case.head_dim_v, case.split_tokens)
    near(Launch(contract.Combine(*split, place.runs, roots), (whole(case.logits(place)), place.values), (into,)))
    heads = (case.num_sequences, case.num_kv_heads, case.group, case.q_len, case.head_dim_v)
    sinks = np.random.default_rng(case.seed).choice([-np.inf, 0.5, 3.0], case.num_kv_heads * case.group)
    reads = [whole(case.states(place, roots)), whole(sinks.astype(np.float32))][: 1 + has_sinks]
    near(Launch(contract.Merge(*heads, roots, has_sinks), tuple(reads), (room(4 * int(np.prod(heads))),)))


@given(st.integers(1, 9), st.lists(NUMBERS, min_size=9, max_size=60), st.sampled_from(["int8", "fp8_e4m3"]))
def test_codes_of_any_number_are_the_nearest_and_come_back(dim: int, numbers: list[float], dtype: Any) -> None:
    count = len(numbers) // dim
    x = np.array(numbers[: count * dim], dtype=np.float32).reshape(count, dim)
    random = np.random.default_rng(dim)
    exact(Launch(contract.Quantize(dtype, dim, "row"), (whole(x),), (room(count * (dim + 4)),)))
    which, scales = random.integers(0, 3, count), random.choice(SCALES[:4], (3, dim))
    channel = contract.Quantize(dtype, dim, "channel", which)
    exact(Launch(channel, (whole(x), whole(scales)), (room(count * dim),)))
    codes = random.integers(0, 256, (count, dim + 4), dtype=np.uint8)
    codes[:, dim:] = random.choice(SCALES, count).view(np.uint8).reshape(count, 4)
    exact(Launch(contract.Dequantize(dtype, dim, "row"), (whole(codes),), (room(4 * count * dim),)))
    stored = whole(np.ascontiguousarray(codes[:, :dim]))
    back = contract.Dequantize(dtype, dim, "channel", which)
    exact(Launch(back, (stored, whole(scales)), (room(4 * count * dim),)))


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_a_single_row_of_codes_is_read_whatever_its_length(dim: int) -> None:
    codes = np.append(np.arange(dim, dtype=np.uint8), np.array([0.5], dtype=np.float32).view(np.uint8))
    exact(Launch(contract.Dequantize("int8", dim, "row"), (whole(codes),), (room(4 * dim),)))


@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 7, 16])),
    st.sampled_from(["mean", "minmax"]),
    st.sampled_from(["max", "sum", "softmax"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 40),
    st.sampled_from([0.0, np.nan, np.inf]),
    st.integers(0, 2**32 - 1),
)
def test_scores_of_blocks_in_lists_of_any_length(
    shape: tuple[int, int, int, int], summary: Any, reduce: Any, dtype: Any, count: int, wrong: float, seed: int
) -> None:
    num_sequences, num_kv_heads, group, head_dim = shape
    dtype, random = "float32" if summary == "minmax" else dtype, np.random.default_rng(seed)
    owner = np.sort(random.integers(0, num_sequences * num_kv_heads, count))
    position = np.arange(count) - np.searchsorted(owner, owner)
    runs = np.stack([owner // num_kv_heads, owner % num_kv_heads, position], axis=1).astype(np.int64)
    width = head_dim * (2 if summary == "minmax" else 1)
    summaries: NDArray[np.float64] = random.normal(size=(count, width))
    if wrong:
        summaries[random.integers(count), random.integers(width)] = wrong
    nbytes = width * ITEMSIZE[dtype]
    stored = region(np.frombuffer(encode(summaries, dtype).tobytes(), dtype=np.uint8))
    queries = random.normal(size=(num_sequences, 1, num_kv_heads * group, head_dim)).astype(np.float32)
    scale = 0.25 if reduce == "softmax" else 1.0
    args = contract.Score(*shape, summary, reduce, runs, dtype, scale)
    blocks = Segment(stored, Spans([(i * nbytes, nbytes) for i in range(count)]))
    near(Launch(args, (whole(queries), (blocks,)), (room(4 * count),)))
