"""What must hold for attention on a host's cores: bits whatever the layout, the bound whatever the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.attention_case import Case, Int64, same_bits
from tierloop.devices.kernels.contract import DTYPES

pytestmark = pytest.mark.usefixtures("threads_for_little_work")

FLOATS = sorted(set(DTYPES) - set(oracle.CODES))
GROUPS = (1, 2, 3, 4, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)
LAYOUTS = ("dense", "paged", "rows")


@st.composite
def masks(draw: st.DrawFn) -> oracle.Masks:
    """Windows with and without sinks, soft-caps, or nothing."""
    window = draw(st.sampled_from([0, 0, 1, 5, 20]))
    return oracle.Masks(window, draw(st.sampled_from([0, 1, 4, 18])), draw(st.sampled_from([0.0, 0.0, 1.5, 50.0])))


@st.composite
def cases(draw: st.DrawFn, masked: bool = True, dtypes: Sequence[str] = sorted(DTYPES)) -> Case:
    """Small cases of every shape, odd dimensions among them."""
    q_len = draw(st.integers(1, 3))
    return Case(
        dtype=draw(st.sampled_from(list(dtypes))),
        num_sequences=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 6)),
        q_len=q_len,
        head_dim=draw(st.sampled_from([1, 7, 16, 24, 64])),
        head_dim_v=draw(st.sampled_from([1, 5, 16, 40, 64])),
        tokens=draw(st.integers(q_len, 70)),
        split_tokens=draw(st.sampled_from([1, 3, 8, 16, 64, 4096])),
        seed=draw(st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from([0.0, 1.0, 8.0])),
        masks=draw(masks()) if masked else oracle.NO_MASKS,
    )


def some_rows(draw: st.DrawFn, case: Case) -> Int64:
    """A selection of the case's rows: a few, most, or all."""
    share = draw(st.sampled_from([0.1, 0.6, 1.0]))
    rows = case.all_rows()
    return rows[np.random.default_rng(case.seed).random(len(rows)) < share]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Case, Int64]:
    case = draw(cases())
    return case, some_rows(draw, case)


@given(selections(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_split_aligned_partition_gives_the_same_bits(
    selection: tuple[Case, Int64], num_parts: int, random: Any
) -> None:
    case, rows = selection
    # Every split goes to one part, as if the parts were devices.
    split = rows[:, 2] // case.split_tokens
    owner = np.array([hash((int(s), int(h), int(x), case.seed)) % num_parts for (s, h, _), x in zip(rows, split)])  # noqa: B905
    states, roots = [], []
    for part in range(num_parts):
        mine, others = rows[owner == part], rows[owner != part]
        nodes = case.roots_of(mine, others)
        place = case.layout(mine, random.choice(LAYOUTS))
        states += list(case.states(place, nodes, threads=random.choice([1, 2])))
        roots += [tuple(node) for node in nodes.tolist()]
    order = list(range(len(roots)))
    random.shuffle(order)
    shape = (len(roots), case.q_len, case.group, 2 + case.head_dim_v)
    shuffled = np.array([states[i] for i in order], dtype=np.float32).reshape(shape)
    merged = case.output(shuffled, np.array([roots[i] for i in order], dtype=np.int64).reshape(-1, 4))
    assert same_bits(merged, case.attention(rows))


@given(selections())
def test_dense_paged_and_sparse_rows_give_the_same_bits(selection: tuple[Case, Int64]) -> None:
    case, rows = selection
    first = case.attention(rows, "dense")
    assert same_bits(first, case.attention(rows, "paged"))
    assert same_bits(first, case.attention(rows, "rows"))


@given(selections())
def test_combine_of_logits_has_the_bits_of_attend(selection: tuple[Case, Int64]) -> None:
    case, rows = selection
    place, roots = case.layout(rows, "paged"), case.roots_of(rows)
    assert same_bits(case.combine(case.logits(place), place, roots), case.states(place, roots))


@given(selections())
def test_states_of_finer_roots_merge_to_the_coarser_one(selection: tuple[Case, Int64]) -> None:
    case, rows = selection
    place = case.layout(rows)
    coarse = case.roots_of(rows)
    fine = np.array(
        [(s, h, 0, x) for s, h, x in sorted({(int(s), int(h), int(p) // case.split_tokens) for s, h, p in rows})],
        dtype=np.int64,
    ).reshape(-1, 4)
    assert same_bits(case.output(case.states(place, fine), fine), case.output(case.states(place, coarse), coarse))


@given(selections())
def test_every_result_is_within_the_bound(selection: tuple[Case, Int64]) -> None:
    case, rows = selection
    expected, bound = case.expected(rows)
    assert (np.abs(case.attention(rows) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_of_a_model_is_within_the_bound(dtype: Any, group: int, head_dim: int) -> None:
    case = Case(
        dtype,
        num_kv_heads=2,
        group=group,
        head_dim=head_dim,
        head_dim_v=head_dim,
        tokens=150,
        split_tokens=64,
        spread=2.0,
    )
    rows = case.all_rows()
    expected, bound = case.expected(rows)
    assert (np.abs(case.attention(rows) - expected) <= bound).all()
    assert same_bits(case.attention(rows), case.attention(rows, "paged", threads=2))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_number_of_threads_changes_no_bit(dtype: Any) -> None:
    case = Case(dtype, num_kv_heads=3, group=3, tokens=2000, split_tokens=32)
    place, roots = case.layout(case.all_rows()), case.roots_of(case.all_rows())
    alone = case.states(place, roots)
    for threads in (2, 3, 8):
        assert same_bits(case.states(place, roots, threads), alone)
    assert same_bits(case.logits(place, threads=3), case.logits(place))


@given(cases(masked=False))
def test_one_row_gives_its_value_exactly(case: Case) -> None:
    rows = case.all_rows()[:1]
    output = case.attention(rows)
    value = oracle.decode_values(case.values[0, 0, 0], case.dtype).astype(np.float32)
    assert (output[0, :, 0] == value).all()
    assert (output[0, :, 1:] == 0).all()


@given(cases(masked=False))
def test_equal_logits_give_the_mean_of_the_values(case: Case) -> None:
    case.queries[:] = 0
    rows = case.all_rows()
    states = case.states(case.layout(rows), case.roots_of(rows))
    # Query i of q_len sees all rows but the last q_len − 1 − i; each counts with weight exp(0) = 1.
    seen = case.tokens - (case.q_len - 1) + np.arange(case.q_len)
    assert (states[..., 0] == 0).all()
    assert (states[..., 1] == seen[None, :, None]).all()


@given(cases(masked=False, dtypes=FLOATS), st.sampled_from([1.0, 0.125, -2.0]))
def test_values_that_are_all_one_power_of_two_come_out_exactly(case: Case, value: float) -> None:
    case.values[:] = oracle.encode(value, case.dtype)
    assert (case.attention(case.all_rows()) == value).all()


@given(cases(masked=False))
def test_identical_values_come_out_within_the_rounding_of_their_sum(case: Case) -> None:
    case.values[:] = case.values[:1, :1, :1]
    value = oracle.decode_values(case.values[0, 0, 0], case.dtype)
    rows = case.all_rows()
    # One product and one sum per row, the quotient, and the scale of a row of codes.
    allowed = (case.tokens + 4) * oracle.U * np.abs(value)
    assert (np.abs(case.attention(rows) - value) <= allowed).all()


@given(cases(dtypes=FLOATS), st.integers(-10, 10))
def test_scaling_values_by_a_power_of_two_scales_the_output_exactly(case: Case, power: int) -> None:
    rows = case.all_rows()
    factor = np.float32(2.0**power)
    before = case.attention(rows)
    exact = oracle.decode(case.values, case.dtype)
    case.values = oracle.encode(exact * float(factor), case.dtype)
    if not (oracle.decode(case.values, case.dtype) == exact * float(factor)).all():
        return  # float16 could not hold it
    assert same_bits(case.attention(rows), before * factor)


@given(cases(), st.sampled_from([1e4, -1e4]))
def test_huge_logits_stay_within_the_bound(case: Case, size: float) -> None:
    norm = np.linalg.norm(case.queries, axis=-1, keepdims=True)
    case.queries[:] = np.where(norm > 0, size * case.queries / np.maximum(norm, 1e-30), 0)
    rows = case.all_rows()
    expected, bound = case.expected(rows)
    output = case.attention(rows)
    assert np.isfinite(output).all()
    assert (np.abs(output - expected) <= bound).all()


@given(cases(masked=False), st.data())
def test_rows_with_logit_minus_infinity_do_not_count(case: Case, data: st.DataObject) -> None:
    rows = case.all_rows()
    place, roots = case.layout(rows), case.roots_of(rows)
    random = np.random.default_rng(case.seed)
    dropped = random.random(len(rows)) < data.draw(st.sampled_from([0.1, 0.9, 1.0]))
    logits = case.logits(place)
    logits[dropped] = -np.inf
    output = case.output(case.combine(logits, place, roots), roots)
    expected, bound = case.expected(rows[~dropped])
    assert np.isfinite(output).all()
    # Rows that do not count shift the others between lanes, so bits may differ; the bound of all rows holds.
    assert (np.abs(output - expected) <= bound + case.expected(rows)[1]).all()


@settings(max_examples=20)
@given(cases(masked=False, dtypes=FLOATS))
def test_what_lies_in_masked_rows_is_never_touched(case: Case) -> None:
    rows = case.all_rows()
    case.q_positions[:] = case.tokens // 2
    before = case.attention(rows)
    nan = oracle.encode(np.nan, case.dtype)
    case.keys[:, :, case.tokens // 2 + 1 :] = nan
    case.values[:, :, case.tokens // 2 + 1 :] = nan
    assert same_bits(case.attention(rows), before)
    assert np.isfinite(before).all()


@settings(max_examples=20)
@given(cases(masked=False, dtypes=FLOATS), st.integers(1, 40))
def test_what_lies_before_the_window_is_never_touched(case: Case, window: int) -> None:
    case.masks = oracle.Masks(window)
    case.q_positions[:] = case.tokens - 1
    before = case.attention(case.all_rows())
    nan, outside = oracle.encode(np.nan, case.dtype), max(case.tokens - window, 0)
    case.keys[:, :, :outside] = nan
    case.values[:, :, :outside] = nan
    assert same_bits(case.attention(case.all_rows()), before)
    assert np.isfinite(before).all()


@given(cases(masked=False), st.integers(1, 40), st.integers(0, 20))
def test_a_window_with_sinks_is_attention_over_the_rows_in_them(case: Case, window: int, sinks: int) -> None:
    case.q_positions[:] = case.tokens - 1
    rows = case.all_rows()
    case.masks = oracle.Masks(window, sinks)
    masked = case.attention(rows)
    case.masks = oracle.NO_MASKS
    inside = (rows[:, 2] > case.tokens - 1 - window) | (rows[:, 2] < sinks)
    assert same_bits(masked, case.attention(rows[inside]))


@settings(max_examples=20)
@given(cases(masked=False))
def test_a_query_before_all_rows_gives_the_identity(case: Case) -> None:
    case.q_positions[:] = -1
    rows = case.all_rows()
    states = case.states(case.layout(rows), case.roots_of(rows))
    assert (states[..., 0] == -np.inf).all()
    assert (states[..., 1:] == 0).all()
    assert (case.attention(rows) == 0).all()


@settings(max_examples=20)
@given(cases(masked=False), st.sampled_from([np.nan, np.inf]))
def test_a_logit_that_is_not_a_number_is_not_hidden(case: Case, wrong: float) -> None:
    rows = case.all_rows()
    place, roots = case.layout(rows), case.roots_of(rows)
    logits = case.logits(place)
    logits[0] = wrong
    output = case.output(case.combine(logits, place, roots), roots)
    assert np.isnan(output[0, :, 0]).all()
