"""The PNM's dispatcher: how a command lists its ranges changes nothing; what is asked for twice is moved twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_flash import BANKS, stretches
from tierloop.firmware_models.media import NOTHING, MediaWork, Ranges
from tierloop.firmware_models.pnm import PnmModel
from tierloop.firmware_models.pnm_requests import requests_of

ROW = 256
CLUSTER = 16 * ROW

ranges_lists = st.lists(
    st.tuples(st.integers(0, 200).map(lambda n: 32 * n), st.sampled_from([0, 1, 32, 64, 256, 1024, 4096, 70_000])),
    max_size=20,
)


def as_ranges(ranges: list[tuple[int, int]]) -> Ranges:
    return np.array(ranges, dtype=np.int64).reshape(-1, 2)


def counted(reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> tuple[MediaWork, int, int]:
    """What an access says, and what it counts."""
    model = PnmModel(BANKS)
    work = model.access(as_ranges(reads), as_ranges(writes))
    return work, model.requests, model.activations


@st.composite
def cut_and_shuffled(draw: st.DrawFn, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as other ranges: cut anywhere, in any order, with empty ones between them."""
    pieces = []
    for start, nbytes in ranges:
        cuts = sorted(draw(st.lists(st.integers(0, nbytes), max_size=3)))
        pieces += [(start + a, b - a) for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    return list(draw(st.permutations(pieces)))


@given(st.data(), ranges_lists, ranges_lists)
def test_neither_the_order_of_ranges_nor_how_they_are_cut_changes_anything(
    data: st.DataObject, reads: list[tuple[int, int]], writes: list[tuple[int, int]]
) -> None:
    others = data.draw(cut_and_shuffled(reads)), data.draw(cut_and_shuffled(writes))
    assert counted(*others) == counted(reads, writes)


@given(ranges_lists)
def test_requests_are_the_longest_stretches_in_order_and_what_is_asked_for_again(ranges: list[tuple[int, int]]) -> None:
    first, again = requests_of(as_ranges(ranges))
    want = stretches(ranges)
    assert [(a, a + n) for a, n in first.tolist()] == [(a, b) for n, a, b in want if n == 1]
    assert sorted((a, a + n) for a, n in again.tolist()) == sorted((a, b) for n, a, b in want if n > 1)


@given(ranges_lists)
def test_no_byte_that_is_asked_for_is_left_out(ranges: list[tuple[int, int]]) -> None:
    first, again = requests_of(as_ranges(ranges))
    assert first[:, 1].sum() + again[:, 1].sum() == sum(nbytes for _, nbytes in ranges)
    assert PnmModel(BANKS).plan(as_ranges(ranges), NOTHING).nbytes >= sum(nbytes for _, nbytes in ranges)


@pytest.mark.parametrize("order", [list(range(16)), list(range(15, -1, -1)), [*range(0, 16, 2), *range(1, 16, 2)]])
def test_rows_of_a_cluster_that_lie_together_are_one_request(order: list[int]) -> None:
    rows = [(CLUSTER + ROW * i, ROW) for i in order]
    assert counted(rows, []) == counted([(CLUSTER, CLUSTER)], [])
    assert counted(rows, [])[1] == 1


def test_rows_with_a_gap_between_them_are_requests_of_their_own() -> None:
    assert counted([(2 * ROW, ROW), (0, ROW)], [])[1] == 2


@pytest.mark.parametrize("times", [2, 3])
def test_a_row_that_several_lists_select_is_moved_for_each_and_opened_once(times: int) -> None:
    once, _, opened = counted([(CLUSTER, ROW)], [])
    work, requests, activations = counted([(CLUSTER, ROW)] * times, [])
    assert (work.nbytes, requests, activations) == (times * once.nbytes, times, opened)
    assert work.alone_ns > once.alone_ns or work.share > once.share


def test_what_lies_between_two_rows_of_one_list_does_not_part_them_for_the_other() -> None:
    # One list asks for a whole cluster, the other for its rows 3 and 4, each by rows.
    rows = [(ROW * i, ROW) for i in range(16)]
    assert counted([*rows, rows[4], rows[3]], []) == counted([(0, CLUSTER), (3 * ROW, 2 * ROW)], [])


def test_reads_and_writes_of_the_same_bytes_are_not_joined() -> None:
    work, requests, _ = counted([(0, ROW)], [(0, ROW)])
    assert (work.nbytes, requests) == (2 * ROW, 2)


@pytest.mark.parametrize("ranges", [np.array([[0, 64], [64, 64]]), np.array([[0, 64], [128, 64]])])
def test_arrays_that_are_not_contiguous_are_read_as_they_are(ranges: Any) -> None:
    wide = np.zeros((2, 4), dtype=np.int64)
    wide[:, ::2] = ranges
    assert PnmModel(BANKS).plan(wide[:, ::2], NOTHING) == PnmModel(BANKS).plan(ranges, NOTHING)
