"""Spans into transfers, and where regions lie: checked byte by byte against the obvious."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.pieces import (
    Pieces,
    SpanArray,
    contiguous,
    joined,
    meeting,
    on_grid,
    overlapping,
    paired,
    split,
)

BASE, ADDRESS = 10_000, 500_000


def array(spans: list[tuple[int, int]]) -> SpanArray:
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


span_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8).map(array)


def stream(spans: SpanArray, start: int) -> list[int]:
    return [start + byte for offset, nbytes in spans.tolist() for byte in range(offset, offset + nbytes)]


def moved(pieces: Pieces) -> list[tuple[int, int]]:
    """(byte on the medium, byte in host memory), in order."""
    return [(o + i, a + i) for o, a, n in pieces.tolist() for i in range(n)]


@given(span_lists)
def test_spans_meet_a_run_of_host_memory_byte_by_byte(spans: SpanArray) -> None:
    total = int(spans[:, 1].sum())
    expected = list(zip(stream(spans, BASE), range(ADDRESS, ADDRESS + total), strict=True))
    assert moved(contiguous(spans, BASE, ADDRESS)) == expected


@given(span_lists, st.data())
def test_spans_meet_spans_byte_by_byte(spans: SpanArray, data: st.DataObject) -> None:
    left, host = int(spans[:, 1].sum()), []
    while left:
        nbytes = data.draw(st.integers(1, left))
        host.append((data.draw(st.integers(0, 60)), nbytes))
        left -= nbytes
    pieces = paired(spans, BASE, array(host), ADDRESS)
    assert moved(pieces) == list(zip(stream(spans, BASE), stream(array(host), ADDRESS), strict=True))
    assert (pieces[:, 2] > 0).all()


@given(span_lists, st.integers(1, 7))
def test_joining_and_splitting_move_the_same_bytes(spans: SpanArray, largest: int) -> None:
    pieces = contiguous(spans, BASE, ADDRESS)
    together = joined(pieces)
    assert moved(together) == moved(pieces) == moved(split(together, largest))
    assert (split(pieces, largest)[:, 2] <= largest).all()
    assert all(a[0] + a[2] != b[0] for a, b in zip(together.tolist(), together.tolist()[1:], strict=False))


@given(span_lists)
def test_overlap_is_found_exactly(spans: SpanArray) -> None:
    touched = stream(spans, 0)
    assert overlapping(spans) == (len(set(touched)) < len(touched))


@given(span_lists, span_lists)
def test_spans_that_share_a_byte_meet(a: SpanArray, b: SpanArray) -> None:
    if set(stream(a, 0)) & set(stream(b, 0)):
        assert meeting(a, b)


def test_a_piece_off_the_grid_is_seen_wherever_its_address_lies() -> None:
    assert on_grid(np.array([[512, 7, 1024]]), 512)
    assert not on_grid(np.array([[512, 0, 1000]]), 512)
    assert not on_grid(np.array([[100, 0, 512]]), 512)


class ExtentsMachine(RuleBasedStateMachine):
    """Extents against a set of taken units."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(40 * 8 + 5, 8)
        self.taken: dict[int, int] = {}

    def units(self) -> set[int]:
        return {u for offset, n in self.taken.items() for u in range(offset // 8, offset // 8 + -(-n // 8))}

    @rule(nbytes=st.integers(1, 120))
    def take(self, nbytes: int) -> None:
        size, used = -(-nbytes // 8), self.units()
        fits = [u for u in range(41 - size) if not used & set(range(u, u + size))]
        assert self.extents.take(nbytes) == (fits[0] * 8 if fits else None)
        if fits:
            self.taken[fits[0] * 8] = nbytes

    @rule(unit=st.integers(0, 45), nbytes=st.integers(1, 120))
    def take_at(self, unit: int, nbytes: int) -> None:
        wanted = set(range(unit, unit + -(-nbytes // 8)))
        free = not wanted & self.units() and max(wanted) < 40
        assert self.extents.take_at(unit * 8, nbytes) == free
        if free:
            self.taken[unit * 8] = nbytes

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.give(offset, self.taken.pop(offset))

    @invariant()
    def accounted_bytes_are_the_taken_ones(self) -> None:
        assert self.extents.free_nbytes == 8 * (40 - len(self.units()))

    @invariant()
    def neighbours_have_grown_together(self) -> None:
        if not self.taken:
            assert self.extents.largest_hole == 320


TestExtents = ExtentsMachine.TestCase
