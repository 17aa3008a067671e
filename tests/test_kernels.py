"""Each kernel on the host's cores: what it computes, the order of its sums, and what it refuses."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests import oracle
from tests.attention_case import Case, Float32, bytes_of, launch, region, same_bits, whole
from tierloop.devices.commands import Copy, Launch, Operand, Read, Write
from tierloop.devices.kernels import copy_bytes, run, warm_up
from tierloop.devices.kernels.contract import (
    CODE_RANGE,
    DTYPES,
    Append,
    Cluster,
    Dense,
    Gather,
    Merge,
    Score,
    Topk,
    check,
)
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans


def pieces(array: NDArray[np.generic], sizes: list[int], gap: int = 3) -> Operand:
    """The bytes of an array as spans of these sizes in two regions, with gaps, at odd addresses; −1 is the rest."""
    flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    cuts = np.cumsum([0, *sizes])
    if sizes[-1] == -1:
        cuts[-1] = flat.nbytes
    segments = []
    for first, last in ((0, len(sizes) // 2), (len(sizes) // 2, len(sizes))):
        spans, memory, offset = [], np.full(flat.nbytes + gap * (len(sizes) + 1), 0xEE, dtype=np.uint8), gap
        for low, high in zip(cuts[first:last], cuts[first + 1 : last + 1], strict=True):
            memory[offset : offset + high - low] = flat[low:high]
            spans.append((offset, int(high - low)))
            offset += int(high - low) + gap
        segments.append(Segment(region(memory), Spans(spans)))
    return tuple(segments)


def contents(operand: Operand) -> NDArray[np.uint8]:
    """The bytes of an operand, end to end."""
    parts = [bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)


# -- the order of sums ----------------------------------------------------------------------------------------------


def fused(a: Float32 | np.float32, b: Float32 | np.float32, c: Float32 | np.float32) -> Float32:
    """a · b + c rounded once: the product is exact in float64; the sum is rounded to odd there, which is harmless."""
    product = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = np.atleast_1d(total).view(np.int64)
    # Rounded to odd: where something was lost and the last bit is even, it moves by one towards what was lost.
    away = np.atleast_1d((lost > 0) == (total > 0))
    odd = np.where((np.atleast_1d(lost) != 0) & (bits % 2 == 0), bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32).reshape(total.shape)


def sum_of_lanes(query: Float32, key: Float32, lanes: int) -> np.float32:
    """q·k as lanes.py says: element i to lane i mod L, each product added in one rounding; then lanes by halving."""
    sums = np.zeros(lanes, dtype=np.float32)
    padded = np.zeros((2, -(-len(key) // 16) * 16), dtype=np.float32)
    padded[:, : len(key)] = query, key
    for q, k in zip(*padded.reshape(2, -1, lanes), strict=True):
        sums = fused(q, k, sums)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return np.float32(sums[0])


@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize(("group", "lanes"), [(1, [16]), (2, [8]), (3, [4]), (5, [4, 4, 4, 4, 16]), (6, [4] * 4 + [8])])
def test_a_logit_is_summed_over_the_lanes_of_its_tile(head_dim: int, group: int, lanes: list[int]) -> None:
    case = Case(group=group, head_dim=head_dim, tokens=9)
    each = (lanes * group)[:group] if len(lanes) == 1 else [*lanes, lanes[-1]][:group]
    keys = case.keys[0, 0].astype(np.float32)
    expected = np.array(
        [
            [sum_of_lanes(q, k, n) * np.float32(case.scale) for q, n in zip(case.queries[0, 0], each, strict=True)]
            for k in keys
        ],
        dtype=np.float32,
    )
    assert same_bits(case.logits(case.layout(case.all_rows()))[:, 0], expected)


def test_a_state_is_summed_row_after_row() -> None:
    case = Case(head_dim_v=21, tokens=40, split_tokens=64)
    place = case.layout(case.all_rows())
    logits = case.logits(place)
    state = case.states(place, case.roots_of(case.all_rows()))[0, 0, 0]
    m = logits.max()
    weights = weights_of((logits[:, 0, 0] - m).astype(np.float32))
    total, acc = np.float32(0), np.zeros(21, dtype=np.float32)
    for weight, value in zip(weights, case.values[0, 0].astype(np.float32), strict=True):
        total = total + weight
        acc = fused(weight, value, acc)
    assert same_bits(state, np.concatenate([[m, total], acc]).astype(np.float32))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_how_many_rows_the_registers_hold_changes_no_bit(group: int) -> None:
    from tierloop.devices.kernels.entries import DOTS, ENTRIES
    from tierloop.devices.kernels.products import make_dots

    keys = np.random.default_rng(0).normal(size=(37, 80)).astype(np.float32)
    packed = np.random.default_rng(1).normal(size=80 * group).astype(np.float32)
    rows = keys.ctypes.data + np.arange(37, dtype=np.int64) * keys.strides[0]
    kind = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 5, ctypes.c_float, *(ctypes.c_int64,) * 2)
    results = []
    for address in (int(ENTRIES[DOTS + group // 2]), *(make_dots(0, group, steps) for steps in (1, 8))):
        out = np.zeros((37, group), dtype=np.float32)
        kind(address)(packed.ctypes.data, rows.ctypes.data, 37, 80, out.ctypes.data, 0.5, rows.ctypes.data, 0)
        results.append(out)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def weights_of(x: Float32) -> Float32:
    """The kernels' exp of numbers ≤ 0: the weights of logits x beside a logit 0."""
    from tierloop.devices.kernels.entries import ENTRIES, SOFTMAX

    logits = np.zeros(len(x) + 32, dtype=np.float32)
    logits[1 : len(x) + 1] = x
    state = np.zeros(2, dtype=np.float32)
    softmax = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(int(ENTRIES[SOFTMAX]))
    softmax(logits.ctypes.data, len(x) + 1, state.ctypes.data)
    assert state[0] == 0
    return logits[1 : len(x) + 1]


def test_exp_is_within_one_ulp_and_monotone() -> None:
    bits = np.arange(0x30000000, np.float32(87.3).view(np.uint32), 997, dtype=np.uint32)
    x = -bits.view(np.float32)
    y = weights_of(x)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) <= np.spacing(exact.astype(np.float32))).all()
    assert (np.diff(y) <= 0).all()


@given(st.floats(-60, 60, width=32))
def test_the_cap_is_a_tangent_within_its_rounding(logit: float) -> None:
    case = Case(head_dim=1, tokens=1, masks=oracle.Masks(softcap=30.0))
    case.scale = 1.0
    case.queries[:], case.keys[:] = logit, 1
    found = case.logits(case.layout(case.all_rows())).item()
    exact = 30 * np.tanh(logit / 30)
    assert abs(found - exact) <= 8 * oracle.U * abs(exact) + oracle.TINY


@pytest.mark.parametrize(
    ("logit", "expected"), [(0.0, 0.0), (np.inf, 2.0), (-np.inf, -2.0), (3e38, 2.0), (1e-40, 1e-40)]
)
def test_the_cap_has_its_corners(logit: float, expected: float) -> None:
    case = Case(head_dim=1, tokens=1, masks=oracle.Masks(softcap=2.0))
    case.scale = 1.0
    case.queries[:], case.keys[:] = logit, 1
    found = case.logits(case.layout(case.all_rows())).item()
    assert found == pytest.approx(expected, abs=1e-44)
    assert np.signbit(found) == np.signbit(expected)


def test_exp_has_its_corners() -> None:
    x = np.array([0.0, -0.0, -np.inf, -87.4, -1e30, -1e-45], dtype=np.float32)
    assert weights_of(x).tolist() == [1, 1, 0, 0, 0, 1]


# -- attend and combine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_attend_takes_operands_in_any_number_of_pieces(dtype: Any) -> None:
    case = Case(dtype, num_sequences=2, group=2, head_dim=24, head_dim_v=10, tokens=20)
    rows = case.all_rows()
    place, roots = case.layout(rows, "paged"), case.roots_of(rows)
    args = case.attend_args(place.runs, roots)
    expected = case.states(place, roots)
    row = 4 * 12
    query_nbytes = case.queries[0, 0, 0].nbytes
    states = pieces(np.zeros_like(expected), [row, row, 2 * row])
    # The same runs, end to end in two regions, instead of shuffled in one.
    ((_, spans),) = place.keys
    keys = pieces(contents(place.keys), [nbytes for _, nbytes in spans.array.tolist()])
    assert len(spans) > 2
    assert (np.diff(spans.array[:, 0]) < 0).any()
    run(Launch(args, (pieces(case.queries, [query_nbytes, -1]), keys, place.values), (states,)), bytes_of)
    assert (contents(states) == expected.view(np.uint8).ravel()).all()


def test_states_come_in_the_order_of_the_roots() -> None:
    case = Case(num_kv_heads=2, tokens=64, split_tokens=8)
    place = case.layout(case.all_rows())
    roots = np.array([(0, h, 1, i) for h in range(2) for i in range(4)], dtype=np.int64)
    order = np.array([5, 0, 7, 2, 1, 6, 3, 4])
    assert same_bits(case.states(place, roots[order]), case.states(place, roots)[order])


def test_roots_without_rows_are_identities() -> None:
    case = Case(tokens=20, split_tokens=4)
    place = case.layout(case.all_rows())
    states = case.states(place, np.array([(0, 0, 3, 0), (0, 0, 3, 1), (0, 0, 50, 1)], dtype=np.int64))
    assert (states[1:, ..., 0] == -np.inf).all()
    assert (states[1:, ..., 1:] == 0).all()
    assert (states[0, ..., 1] >= 1).all()


def test_no_rows_at_all_give_identities() -> None:
    case = Case(num_kv_heads=2)
    none = case.all_rows()[:0]
    assert (case.attention(none) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": [(0, 0, 0), (0, 0, 5)]}, "run 1 is out of order or overlaps"),
        ({"runs": [(0, 1, 0), (0, 0, 10)]}, "run 1 is out of order or overlaps"),
        ({"runs": [(0, 0, 0), (1, 0, 10)]}, "run 1 names a sequence or KV head that does not exist"),
        ({"runs": [(0, -1, 0), (0, 0, 10)]}, "run 0 names a sequence or KV head that does not exist"),
        ({"runs": [(0, 0, -1), (0, 0, 10)]}, "run 0 has positions outside"),
        ({"runs": [(0, 0, 0), (0, 0, 1 << 60)]}, "run 1 has positions outside"),
        ({"roots": [(0, 0, 0, 0)]}, "the roots leave out rows, from row 4 on"),
        ({"roots": [(0, 0, 3, 0), (0, 0, 0, 1)]}, "root 1 covers rows that another root covers too"),
        ({"roots": [(0, 0, 63, 0)]}, "root 0 is no tree node"),
        ({"roots": [(0, 0, 2, -1)]}, "root 0 is no tree node"),
        ({"roots": [(0, 0, 62, 1)]}, "root 0 is no tree node"),
        ({"split_tokens": 0}, "split_tokens is 0"),
        ({"split_tokens": -16}, "split_tokens is -16"),
        ({"q_positions": [[1], [2]]}, "q_positions need shape"),
    ],
)
def test_attend_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    case = Case(num_kv_heads=2, head_dim=4, head_dim_v=4, tokens=20, split_tokens=4)
    rows = case.all_rows()[:20]
    place = case.layout(rows, "paged", page=10)
    given: dict[str, Any] = {
        "runs": place.runs, "roots": [(0, 0, 3, 0)], "split_tokens": 4, "q_positions": case.q_positions, **change,
    }  # fmt: skip
    case.q_positions = np.array(given["q_positions"], dtype=np.int64)
    case.split_tokens = given["split_tokens"]
    place = place._replace(runs=np.array(given["runs"], dtype=np.int64))
    with pytest.raises(ValueError, match=message):
        case.states(place, np.array(given["roots"], dtype=np.int64))


@pytest.mark.parametrize("sizes", [{"group": -1, "q_len": -1}, {"q_len": 0}, {"head_dim_v": 0}, {"head_dim": -4}])
def test_attend_refuses_sizes_below_one(sizes: dict[str, int]) -> None:
    case = Case(tokens=4)
    place, roots = case.layout(case.all_rows()), case.roots_of(case.all_rows())
    args = replace(case.attend_args(place.runs, roots), **sizes)  # type: ignore[arg-type]  # only sizes
    with pytest.raises(ValueError, match="allowed: at least 1"):
        launch(args, [whole(case.queries), place.keys, place.values], 4 * 66)


def test_attend_refuses_spans_that_are_no_whole_rows() -> None:
    case = Case(head_dim=4, head_dim_v=4, tokens=20)
    place = case.layout(case.all_rows(), "paged", page=10)
    (segment,) = place.keys
    bent = (Segment(segment.region, Spans([(0, 168), (168, 152)])),)
    with pytest.raises(ValueError, match="the span of run 0 is no whole number of rows"):
        case.states(place._replace(keys=bent), case.roots_of(case.all_rows()))


def test_attend_refuses_values_cut_differently_from_keys() -> None:
    case = Case(head_dim=4, head_dim_v=4, tokens=20)
    place = case.layout(case.all_rows(), "paged", page=10)
    (segment,) = place.values
    bent = (Segment(segment.region, Spans([(0, 144), (144, 176)])),)
    with pytest.raises(ValueError, match="run 0 has different numbers of rows"):
        case.states(place._replace(values=bent), case.roots_of(case.all_rows()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 0}, "head_dim is 0; allowed: a whole number from 1"),
        ({"group": -1}, "group is -1; allowed: a whole number from 1"),
        ({"window": 0.5}, "window is 0.5; allowed: a whole number from 0"),
        ({"window": 1 << 63}, "window is 9223372036854775808; allowed: a whole number from 0"),
        ({"sink_tokens": True}, "sink_tokens is True; allowed: a whole number"),
        ({"split_tokens": 0}, "split_tokens is 0; allowed"),
        ({"softcap": 1e-46}, "softcap is 1e-46; allowed: 0 .none., or a positive float32 number"),
        ({"softcap": -1.0}, "softcap is -1.0; allowed: 0"),
        ({"softcap": 1e39}, "softcap is 1e.39; allowed: a finite float32 number"),
        ({"scale": float("nan")}, "scale is nan; allowed: a finite float32 number"),
        ({"scale": "1"}, "scale is '1'; allowed: a finite float32 number"),
        ({"runs": np.zeros((1, 3))}, "runs is no array of integers"),
        ({"q_positions": [[1]]}, "q_positions is no array of integers"),
    ],
)
def test_arguments_that_are_no_such_numbers_are_refused_at_submit(change: dict[str, Any], message: str) -> None:
    case = Case(tokens=4)
    place, roots = case.layout(case.all_rows()), case.roots_of(case.all_rows())
    args = replace(case.attend_args(place.runs, roots), **change)
    sizes = [(1, 256), (1, 1024), (1, 1024)]
    assert check(case.attend_args(place.runs, roots), sizes, [(1, 264)]) is None
    assert re.search(message, check(args, sizes, [(1, 264)]) or "")


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_at_all_are_refused(threads: int) -> None:
    case = Case(tokens=4)
    with pytest.raises(ValueError, match="allowed: at least 1"):
        case.states(case.layout(case.all_rows()), case.roots_of(case.all_rows()), threads)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("split_tokens", [8, 16, 32])
def test_a_value_that_no_query_counts_never_matters(dtype: Any, split_tokens: int) -> None:
    # Row 15 lies between the sinks and the window, in the middle of a split or alone.
    case = Case(dtype, group=3, tokens=32, split_tokens=split_tokens, masks=oracle.Masks(8, 8))
    before = case.attention(case.all_rows())
    case.values[0, 0, 15] = np.frombuffer(b"\xff" * case.values.itemsize, dtype=case.values.dtype)[0]  # all are NaN
    assert same_bits(case.attention(case.all_rows()), before)
    assert np.isfinite(before).all()


def test_a_row_with_logit_minus_infinity_counts_for_the_other_queries_of_a_tile() -> None:
    # Row 0 has the logit −∞ with query 0 and 0 with query 1; its value is no number.
    queries = np.zeros((1, 1, 2, 4), dtype=np.float32)
    queries[0, 0, 0, 0], queries[0, 0, 1, 1] = 1e30, 1
    keys, values = np.zeros((3, 4), dtype=np.float32), np.ones((3, 4), dtype=np.float32)
    keys[0, 0], values[0] = -1e30, np.nan
    both = Case(group=2, head_dim=4, head_dim_v=4, tokens=3)
    both.queries, both.keys, both.values, both.scale = queries, keys[None, None], values[None, None], 1.0
    output = both.attention(both.all_rows())[0, 0, 0]
    assert output[0].tolist() == [1, 1, 1, 1]
    assert np.isnan(output[1]).all()
    alone = Case(head_dim=4, head_dim_v=4, tokens=3)
    alone.queries, alone.keys, alone.values, alone.scale = queries[:, :, :1], both.keys, both.values, 1.0
    assert same_bits(alone.attention(alone.all_rows())[0, 0, 0, 0], output[0])


def test_copies_refuse_spans_outside_their_region() -> None:
    small = region(np.zeros(8, dtype=np.uint8))
    for command in (
        Read(small.at(4, 8), np.zeros(8, dtype=np.uint8)),
        Write(Segment(small, Spans([(0, 4), (7, 4)])), np.zeros(8, dtype=np.uint8)),
        Copy(small.at(0, 4), small.at(7, 4)),
    ):
        with pytest.raises(ValueError, match="a span ends at byte"):
            copy_bytes(command, bytes_of)
    assert not bytes_of(small).any()


def test_kernels_refuse_spans_outside_their_region() -> None:
    case = Case(tokens=4)
    place = case.layout(case.all_rows())
    (segment,) = place.keys
    outside = (Segment(segment.region, Spans([(16, segment.spans.nbytes)])),)
    with pytest.raises(ValueError, match="a span ends at byte"):
        case.states(place._replace(keys=outside), case.roots_of(case.all_rows()))


def test_masked_logits_are_minus_infinity() -> None:
    case = Case(group=2, q_len=3, tokens=8)
    logits = case.logits(case.layout(case.all_rows()))
    masked = np.arange(8)[:, None] > case.q_positions[0]
    assert (np.isneginf(logits) == masked[:, :, None]).all()


def test_a_split_may_be_larger_than_any_sequence() -> None:
    case = Case(group=3, tokens=5000, split_tokens=1 << 40)
    expected, bound = case.expected(case.all_rows())
    assert (np.abs(case.attention(case.all_rows()) - expected) <= bound).all()


def test_more_query_rows_than_one_block_each_get_their_own() -> None:
    case = Case(group=9, q_len=7, head_dim=20, tokens=70)
    expected, bound = case.expected(case.all_rows())
    assert (np.abs(case.attention(case.all_rows(), threads=2) - expected) <= bound).all()


# -- merge ----------------------------------------------------------------------------------------------------------


def test_merge_refuses_nodes_inside_each_other() -> None:
    roots = np.array([(0, 0, 0, 0), (0, 0, 2, 0)], dtype=np.int64)
    with pytest.raises(ValueError, match="root 1 lies inside another, or holds one"):
        Case().output(np.zeros((2, 1, 1, 66), dtype=np.float32), roots)


def test_merge_refuses_the_same_node_twice() -> None:
    with pytest.raises(ValueError, match="lies inside another"):
        Case().output(np.zeros((2, 1, 1, 66), dtype=np.float32), np.array([(0, 0, 1, 3)] * 2, dtype=np.int64))


def test_merge_refuses_a_head_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="root 0 is no tree node of a sequence and KV head"):
        Case().output(np.zeros((1, 1, 1, 66), dtype=np.float32), np.array([(0, 1, 0, 0)], dtype=np.int64))


def test_merge_leaves_the_states_as_they_are() -> None:
    case = Case(tokens=64, split_tokens=8)
    roots = np.array([(0, 0, 1, i) for i in range(4)], dtype=np.int64)
    states = case.states(case.layout(case.all_rows()), roots)
    before = states.copy()
    case.output(states, roots)
    assert same_bits(states, before)


def test_a_sink_logit_is_a_state() -> None:
    # exp(2) of weight on nothing and exp(0) on a value of 3.
    states = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0]], dtype=np.float32).reshape(2, 1, 1, 3)
    case = Case(head_dim_v=1)
    output = case.output(states, np.array([(0, 0, 0, 0), (0, 0, 0, 1)], dtype=np.int64))
    assert output.item() == pytest.approx(3 / (1 + np.exp(2)), rel=1e-6)


@given(st.integers(1, 5), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_learned_sinks_are_states_merged_in_last(group: int, q_len: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    case = Case(num_kv_heads=2, group=group, q_len=q_len, tokens=40, split_tokens=8, seed=seed)
    rows, sinks = case.all_rows(), random.normal(size=(2, group)).astype(np.float32) * 4
    sinks[0, 0] = -np.inf
    roots = case.roots_of(rows)
    states = case.states(case.layout(rows), roots)
    args = Merge(1, 2, group, q_len, 64, roots, has_sinks=True)
    output = launch(args, [whole(states), whole(sinks)], 4 * q_len * 2 * group * 64).view(np.float32)
    # Without rows the state of a sink alone gives zeros; with them, it takes its share of the weight.
    without = case.output(states, roots)
    m, total = states[..., 0].astype(np.float64), states[..., 1].astype(np.float64)
    share = total / (total + np.exp(np.minimum(sinks[:, None] - m, 700)))
    expected = without * share.transpose(1, 0, 2)[None, ..., None]
    found = output.reshape(1, q_len, 2, group, 64)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(without).max()
    assert same_bits(found[:, :, 0, 0], without[:, :, 0, 0])


def test_a_learned_sink_without_rows_gives_zeros() -> None:
    states = np.zeros((1, 1, 1, 5), dtype=np.float32)
    states[..., 0] = -np.inf
    args = Merge(1, 1, 1, 1, 3, np.array([(0, 0, 0, 0)], dtype=np.int64), has_sinks=True)
    output = launch(args, [whole(states), whole(np.array([-50.0], dtype=np.float32))], 12).view(np.float32)
    assert output.tolist() == [0, 0, 0]


# -- score, topk ----------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["mean", "minmax"]),
    st.sampled_from(["max", "sum"]),
    st.integers(1, 18),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_score_is_within_the_bound_of_its_sum(summary: Any, reduce: Any, group: int, head_dim: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    blocks = [7, 0, 70]  # of the KV heads 0, 1 and 2
    queries = random.normal(size=(1, 1, 3 * group, head_dim)).astype(np.float32)
    parts = 2 if summary == "minmax" else 1
    summaries = np.sort(random.normal(size=(sum(blocks), parts, head_dim)), axis=1).astype(np.float32)
    runs = np.array([(0, h, 0) for h in range(3)], dtype=np.int64)
    sizes = np.array(blocks) * parts * head_dim * 4
    spans = Spans(np.stack([np.cumsum(sizes) - sizes, sizes], axis=1))
    args = Score(1, 3, group, head_dim, summary, reduce, runs)
    operand = (Segment(region(summaries), spans),)
    scores = launch(args, [whole(queries), operand], 4 * sum(blocks)).view(np.float32)
    q = queries.reshape(3, group, head_dim).astype(np.float64)[np.repeat(np.arange(3), blocks)]
    terms = (q[:, :, None] * summaries.astype(np.float64)[:, None]).max(axis=2)  # the minimum comes first: Quest
    each = terms.sum(axis=-1)
    expected = each.max(axis=1) if reduce == "max" else each.sum(axis=1)
    allowed = (head_dim + group + 1) * oracle.U * np.abs(terms).sum(axis=(1, 2))
    assert (np.abs(scores - expected) <= allowed + oracle.TINY).all()


def test_score_refuses_a_summary_that_it_does_not_know() -> None:
    args = Score(1, 1, 1, 4, "median", "max", np.zeros((0, 3), dtype=np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="median"):
        launch(args, [whole(np.zeros(4, dtype=np.float32)), ()], 0)


def best(scores: Float32, lengths: list[int], k: int) -> NDArray[np.int64]:
    args = Topk(k, np.array(lengths, dtype=np.int64))
    return launch(args, [whole(scores)], 8 * len(lengths) * k).view(np.int64).reshape(len(lengths), k)


@given(
    hnp.arrays(
        np.float32,
        st.integers(0, 60),
        elements=st.one_of(st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan]), st.floats(width=32)),
    ),
    st.integers(0, 12),
    st.integers(0, 60),
)
def test_topk_sorts_by_score_then_index_with_nan_last(scores: Float32, k: int, cut: int) -> None:
    cut = min(cut, len(scores))
    found = best(scores, [cut, len(scores) - cut], k)
    for row, one in zip(found, (scores[:cut], scores[cut:]), strict=True):
        order = np.lexsort((np.arange(len(one)), -one.astype(np.float64)))[:k]
        assert row.tolist() == order.tolist() + [-1] * (k - len(order))


def test_topk_of_equal_scores_takes_the_first() -> None:
    assert best(np.ones(100, dtype=np.float32), [100], 5).tolist() == [[0, 1, 2, 3, 4]]


def test_topk_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="lengths"):
        best(np.ones(4, dtype=np.float32), [-1, 5], 1)


# -- gather, append, dense, copies ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_gather_moves_bytes_end_to_end(source_sizes: list[int], target_sizes: list[int]) -> None:
    total = min(sum(source_sizes), sum(target_sizes))
    bytes_given = np.random.default_rng(total).integers(0, 255, total, dtype=np.uint8)

    def cut(sizes: list[int]) -> list[int]:
        ends = np.minimum(np.cumsum(sizes), total)
        return [int(n) for n in np.diff(np.concatenate([[0], ends]))]

    source, target = pieces(bytes_given, cut(source_sizes)), pieces(np.zeros_like(bytes_given), cut(target_sizes))
    around = [bytes_of(r).copy() for r, _ in target]
    run(Launch(Gather(), (source,), (target,)), bytes_of)
    assert (contents(target) == bytes_given).all()
    for (one, spans), before in zip(target, around, strict=True):
        inside = np.zeros(one.nbytes, dtype=bool)
        for offset, nbytes in spans.array.tolist():
            inside[offset : offset + nbytes] = True
        assert (bytes_of(one)[~inside] == before[~inside]).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES - CODE_RANGE.keys()))
def test_append_rounds_to_nearest_even(dtype: Any) -> None:
    random = np.random.default_rng(0)
    any_bits = random.integers(0, 2**32, 100_000, dtype=np.uint32)
    # Halfway cases and their neighbours: all patterns of the bits that float16 and bfloat16 drop, around ties.
    ties = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array([0, 0x7FFF, 0x8000, 0x8001, 0x1000])).ravel()
    numbers = np.concatenate([any_bits, ties.astype(np.uint32), ties.astype(np.uint32) >> 3]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    stored = oracle.encode(numbers, dtype)
    assert (launch(Append(dtype), [whole(numbers)], stored.nbytes) == stored.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES - CODE_RANGE.keys()))
def test_append_keeps_a_nan_a_nan(dtype: Any) -> None:
    nans = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], dtype=np.uint32)
    itemsize = 4 if dtype == "float32" else 2
    stored = launch(Append(dtype), [whole(nans)], 4 * itemsize)
    numbers: oracle.Stored = stored.view(np.float32) if itemsize == 4 else stored.view(np.uint16)
    assert np.isnan(oracle.decode(numbers, dtype)).all()


def test_append_stores_into_many_open_blocks() -> None:
    rows = np.arange(24, dtype=np.float32)
    target = pieces(np.zeros(24, dtype=np.uint16), [8, 16, 24])
    run(Launch(Append("bfloat16"), (pieces(rows, [40, -1]),), (target,)), bytes_of)
    assert (oracle.decode(contents(target).view(np.uint16), "bfloat16") == rows).all()


@pytest.mark.parametrize("cut", [3, 6, 41])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_append_takes_elements_end_to_end_whatever_the_spans(dtype: Any, cut: int) -> None:
    rows = np.random.default_rng(cut).normal(size=37).astype(np.float32)
    target = pieces(np.zeros(37, dtype=np.uint16), [cut, 0, 20, -1])
    run(Launch(Append(dtype), (pieces(rows, [100 - cut, -1]),), (target,)), bytes_of)
    assert (contents(target).view(np.uint16) == oracle.encode(rows, dtype)).all()


@pytest.mark.parametrize("dtype", sorted(CODE_RANGE))
def test_append_refuses_codes(dtype: Any) -> None:
    with pytest.raises(ValueError, match="use quantize"):
        launch(Append(dtype), [whole(np.zeros(4, dtype=np.float32))], 4)


def test_dense_calls_its_function_once_with_rows_end_to_end() -> None:
    calls = []

    def function(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        calls.append([a.tolist() for a in reads])
        writes[0][:] = reads[0][::-1]
        writes[1][:] = 7

    a, b = pieces(np.arange(4, dtype=np.uint8), [1, 3]), whole(np.array([9], dtype=np.uint8))
    first, second = pieces(np.zeros(4, dtype=np.uint8), [2, 2]), whole(np.zeros(2, dtype=np.uint8))
    flops = run(Launch(Dense("test", 11, 0, 0, function), (a, b), (first, second)), bytes_of)
    assert calls == [[[0, 1, 2, 3], [9]]]
    assert contents(first).tolist() == [3, 2, 1, 0]
    assert contents(second).tolist() == [7, 7]
    assert flops == 11


def test_dense_without_a_function_moves_nothing() -> None:
    target = whole(np.array([5], dtype=np.uint8))
    run(Launch(Dense("test", 1, 0, 0), (), (target,)), bytes_of)
    assert contents(target).tolist() == [5]


@pytest.mark.parametrize("num_spans", [1, 2, 5])
def test_copies_move_spans_end_to_end(num_spans: int) -> None:
    data = np.arange(40, dtype=np.uint8)
    source = Segment(region(data), Spans([(i * 40 // num_spans, 40 // num_spans - 1) for i in range(num_spans)]))
    into = np.zeros(source.spans.nbytes, dtype=np.uint8)
    copy_bytes(Read(source, into), bytes_of)
    assert (into == contents((source,))).all()
    target = Segment(region(np.zeros(100, dtype=np.uint8)), Spans([(50, 10), (5, into.nbytes - 10)]))
    copy_bytes(Copy(source, target), bytes_of)
    assert (contents((target,)) == into).all()
    copy_bytes(Write(source, into[::-1].copy()), bytes_of)
    assert (contents((source,)) == into[::-1]).all()


def test_a_copy_of_one_span_onto_itself_shifted_is_right() -> None:
    memory = region(np.arange(20, dtype=np.uint8))
    copy_bytes(Copy(memory.at(0, 10), memory.at(4, 10)), bytes_of)
    assert bytes_of(memory)[4:14].tolist() == list(range(10))


# -- threads --------------------------------------------------------------------------------------------------------


def test_a_root_is_cut_at_tree_nodes_when_more_threads_want_work() -> None:
    from tierloop.devices.kernels.plan import HIGH, LOW, SPLIT, Rows

    spans = np.array([[0, 5000]], dtype=np.int64)
    rows = Rows(np.array([[0, 0, 40]], dtype=np.int64), spans, 1, 1, 1)
    root = np.array([[0, 0, 10, 0]], dtype=np.int64)
    alone, partials = rows.pieces(root, 16, threads=1)
    assert (len(alone), partials) == (1, 0)
    pieces, partials = rows.pieces(root, 16, threads=2)
    assert partials == len(pieces) >= 4
    assert pieces[0, LOW] == 0
    assert pieces[-1, HIGH] == 5000
    assert (pieces[1:, LOW] == pieces[:-1, HIGH]).all()
    # The first row is at position 40; every cut is at the border of a split.
    assert ((pieces[1:, LOW] + 40) == pieces[1:, SPLIT] * 16).all()


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """More cores than this machine may have, so that threads are granted."""
    from tierloop.devices.kernels import pool

    monkeypatch.setattr(pool, "_CORES", 64)


@pytest.mark.usefixtures("many_cores")
def test_shared_work_runs_on_all_threads_and_errors_come_back() -> None:
    from tierloop.devices.kernels.pool import share

    together = threading.Barrier(3, timeout=30)
    share(3, together.wait)
    main = threading.get_ident()
    begun = threading.Barrier(2, timeout=30)

    def fails_elsewhere() -> None:
        begun.wait()
        if threading.get_ident() != main:
            raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        share(2, fails_elsewhere)


@pytest.mark.usefixtures("many_cores")
def test_shares_of_many_threads_at_once_all_end() -> None:
    from tierloop.devices.kernels.pool import share

    done: list[int] = []
    callers = [threading.Thread(target=share, args=(3, lambda: done.append(1))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert not any(caller.is_alive() for caller in callers)
    assert len(done) >= 8


def test_devices_that_compute_at_once_get_no_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.devices.kernels import pool

    monkeypatch.setattr(pool, "_CORES", 3)
    first, second, third = pool._grant(2), pool._grant(2), pool._grant(2)
    assert (first, second, third) == (2, 1, 1)
    for granted in (first, second, third):
        pool._give_back(granted)
    assert pool._grant(8) == 3
    pool._give_back(3)
    with pytest.raises(ZeroDivisionError):
        pool.share(1, lambda: 1 // 0)
    assert pool._working == 0


@pytest.mark.usefixtures("many_cores")
def test_threads_that_help_run_on_the_cores_of_their_caller() -> None:
    from tierloop.devices.kernels.pool import bind, cores_of_this_thread, share

    one = frozenset([min(cores_of_this_thread())])
    seen: list[frozenset[int]] = []

    def caller() -> None:
        bind(one)
        together = threading.Barrier(2, timeout=30)

        def work() -> None:
            together.wait()
            seen.append(cores_of_this_thread())

        share(2, work)

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join(30)
    assert seen == [one, one]


# -- other machines -------------------------------------------------------------------------------------------------


def digest() -> str:
    """The bits of some small cases, in every stored type: what must be the same on every machine."""
    # Not by `run`, which would compile all other kernels as well.
    from tierloop.devices.kernels.attend import attend
    from tierloop.devices.kernels.cluster import cluster

    total = hashlib.sha256()
    for dtype in sorted(DTYPES):
        case = Case(dtype, group=3, head_dim=40, head_dim_v=24, tokens=50)  # type: ignore[arg-type]
        if dtype == "float16":
            case.values[0, 0, 0, :7] = [0x8000, 1, 0x3FF, 0x400, 0x7BFF, 0x83FF, 0xFBFF]
        place, roots = case.layout(case.all_rows(), "paged"), case.roots_of(case.all_rows())
        states = whole(np.zeros((1, 3, 26), dtype=np.float32))
        reads = (whole(case.queries), place.keys, place.values)
        attend(case.attend_args(place.runs, roots), reads, (states,), bytes_of, threads=1)
        total.update(contents(states).tobytes())
        args = Cluster(dtype, 1, 1, 40, place.runs, cluster_tokens=2)  # type: ignore[arg-type]
        clusters = whole(np.zeros((25, 40), dtype=np.float32)), whole(np.zeros(50, dtype=np.int64))
        cluster(args, (place.keys,), clusters, bytes_of, threads=1)
        total.update(contents(clusters[0]).tobytes() + contents(clusters[1]).tobytes())
    return total.hexdigest()


def test_a_processor_without_vectors_beyond_the_baseline_gives_the_same_bits() -> None:
    root = Path(__file__).resolve().parent.parent
    code = "from tests.test_kernels import digest; print(digest())"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


def test_the_cores_of_the_process_are_not_those_of_the_thread_that_imports() -> None:
    code = (
        "import os, threading\n"
        "def first():\n"
        "    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "    import tierloop.devices.kernels.pool\n"
        "thread = threading.Thread(target=first); thread.start(); thread.join()\n"
        "from tierloop.devices.kernels import pool\n"
        "print(pool._CORES == len(os.sched_getaffinity(os.getpid())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "True"


def test_one_process_at_a_time_fills_the_cache(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tierloop.devices.kernels.filling import one_process_at_a_time\n"
        "with one_process_at_a_time():\n"
        "    print('inside', flush=True); sys.stdin.readline()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    start = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(start, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "inside\n"
        (lock,) = tmp_path.glob("tierloop-kernels-*.lock")
        with lock.open() as held, pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with subprocess.Popen(start, **pipes) as second:
            first.communicate("\n", timeout=300)
            assert second.communicate("\n", timeout=300)[0] == "inside\n"


def test_importing_the_package_compiles_nothing() -> None:
    code = "import sys, tierloop.devices.device, tierloop.devices.kernels; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"


def test_warming_up_twice_is_harmless() -> None:
    warm_up()
    warm_up()
    assert Merge.kernel == "merge"
