"""Spans: one immutable value for any number of pieces."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.spans import Spans

PAIRS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=30)


@given(PAIRS)
def test_spans_are_what_was_given(pairs: list[tuple[int, int]]) -> None:
    spans = Spans(pairs)
    assert [tuple(row) for row in spans.array.tolist()] == pairs
    assert len(spans) == len(pairs)
    assert spans.nbytes == sum(n for _, n in pairs)
    assert spans.end == max((o + n for o, n in pairs), default=0)
    assert spans.array.dtype == np.int64
    assert spans.array.shape == (len(pairs), 2)


@given(PAIRS)
def test_every_way_to_make_them_gives_the_same_value(pairs: list[tuple[int, int]]) -> None:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    same = [Spans(pairs), Spans(iter(pairs)), Spans(array), Spans(np.asfortranarray(array)), Spans(array[::-1][::-1])]
    assert len(set(same)) == 1
    assert pickle.loads(pickle.dumps(same[0])) == same[0]
    assert len({s.nbytes for s in same}) == len({s.end for s in same}) == 1


@given(st.integers(0, 1 << 61), st.integers(0, 1 << 60))
def test_one_span_is_a_list_of_one(offset: int, nbytes: int) -> None:
    assert Spans.one(offset, nbytes) == Spans([(offset, nbytes)])
    assert (Spans.one(offset, nbytes).nbytes, Spans.one(offset, nbytes).end) == (nbytes, offset + nbytes)


@given(st.lists(st.integers(0, 1 << 30), max_size=20), st.integers(0, 1 << 20))
def test_spans_of_one_size_are_the_same_spans(offsets: list[int], nbytes: int) -> None:
    assert Spans.equal(np.array(offsets, dtype=np.int64), nbytes) == Spans([(o, nbytes) for o in offsets])


@given(PAIRS, PAIRS)
def test_spans_are_equal_when_their_rows_are(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert (Spans(a) == Spans(b)) == (a == b)
    assert Spans(a) != a


def test_the_order_of_the_rows_matters() -> None:
    assert Spans([(0, 1), (4, 2)]) != Spans([(4, 2), (0, 1)])


def test_spans_do_not_change_with_the_array_they_were_made_from() -> None:
    array = np.array([[0, 8]], dtype=np.int64)
    offsets = np.array([16], dtype=np.int64)
    spans, equal = Spans(array), Spans.equal(offsets, 8)
    array[0, 0] = offsets[0] = 99
    assert spans == Spans.one(0, 8)
    assert equal == Spans.one(16, 8)
    for made in (spans, equal, Spans.one(0, 8), Spans([])):
        with pytest.raises(ValueError, match="read-only"):
            made.array[...] = 1


@pytest.mark.parametrize(
    "bad",
    [
        [(1, 2, 3), (4, 5, 6)],
        [(1, 2), (3,)],
        [1, 2],
        [(0.5, 1.0)],
        [(True, False)],
        [("0", "1")],
        [(0, -1)],
        [(-1, 1), (0, 5)],
        [(1 << 70, 1)],
        [(1 << 61, 1 << 61)],
        [((1 << 63) - 1, 10), (0, 1)],
        [(0, 1 << 61), (0, 1 << 61)],
        np.zeros((2, 3), dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.array([[0.0, 1.0]]),
        np.array([[(1 << 63) + 5, 1]], dtype=np.uint64),
        np.array([[(1 << 63) - 1, 10], [0, 1]], dtype=np.int64),
    ],
)
def test_what_is_no_list_of_spans_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"span|shape|sequence"):
        Spans(bad)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (1 << 62, 0), (1 << 64, 1), (1 << 61, 1 << 61)])
def test_one_span_out_of_all_range_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="span"):
        Spans.one(offset, nbytes)


def test_fractions_are_never_rounded() -> None:
    with pytest.raises(TypeError):
        Spans.one(0.5, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Spans.equal(np.array([0]), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="integers"):
        Spans.equal(np.array([0.5]), 1)


def test_a_sum_that_would_overflow_is_refused_and_a_large_one_is_exact() -> None:
    big = (1 << 62) // 3
    assert Spans([(0, big), (0, big), (5, big)]).nbytes == 3 * big
    with pytest.raises(ValueError, match="below"):
        Spans([(0, big)] * 4)


def test_spans_print_their_first_rows() -> None:
    assert repr(Spans([(0, 4), (8, 2)])) == "Spans([0, 4), [8, 10))"
    assert repr(Spans.equal(np.arange(6), 1)) == "Spans([0, 1), [1, 2), [2, 3), [3, 4), … 2 more)"
    assert repr(Spans([])) == "Spans()"
