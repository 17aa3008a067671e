"""Windows against a slow reference: what is held, what goes, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from tierloop.runtime.windows import EVICTIONS, Eviction, Windows

Int64 = NDArray[np.int64]
LAYERS, HEADS, MOST = 2, 3, 12


def ints(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def table(rows: list[list[int]]) -> Int64:
    """Rows of any lengths, padded with −1."""
    width = max(map(len, rows), default=0)
    return np.array([row + [-1] * (width - len(row)) for row in rows], dtype=np.int64).reshape(len(rows), width)


def windows(capacity: int, eviction: Eviction = "la", most: int = MOST, **options: Any) -> Windows:
    """One layer and one head."""
    return Windows(1, 1, most, np.full((1, 1), capacity, dtype=np.int64), eviction, **options)


def admit(held: Windows, entries: list[int], step: int) -> None:
    held.admit(0, np.zeros(len(entries), dtype=np.int64), ints(*entries), ints(*entries) + 100, step)


def evict(held: Windows, ranked: list[int], k: int, step: int) -> list[int]:
    """Entries that went: each lies in the slot of its number plus 100."""
    return sorted((held.evict(0, table([ranked]), k, step) - 100).tolist())


# -- the rules, one by one ----------------------------------------------------------------------------------------


def test_lookahead_drops_the_worst_ranked() -> None:
    held = windows(2)
    admit(held, [3, 5, 7, 9], 1)
    assert evict(held, [9, 3, 7, 5], 1, 1) == [5, 7]
    assert held.entries(0, 0).tolist() == [3, 9]


def test_lookahead_drops_what_has_no_rank_first_and_the_least_recently_used_of_it_first() -> None:
    held = windows(10)
    admit(held, [6, 4], 1)
    admit(held, [2], 2)
    admit(held, [8, 1], 3)
    held.capacity[0, 0] = 3
    assert evict(held, [8, 1], 1, 3) == [4, 6]
    held.capacity[0, 0] = 1
    assert evict(held, [8, 1], 1, 3) == [1, 2]


def test_least_recently_used_looks_at_no_rank_beyond_the_chosen() -> None:
    held = windows(10, "lru")
    admit(held, [1, 2, 3], 1)
    assert evict(held, [2, 3, 1], 1, 2) == []
    held.capacity[0, 0] = 1
    assert evict(held, [3, 1, 2], 0, 3) == [1, 3]


def test_least_frequently_used_counts_the_steps_that_chose_an_entry() -> None:
    held = windows(10, "lfu")
    admit(held, [1, 2, 3], 1)
    evict(held, [1, 3], 2, 1)
    evict(held, [1], 1, 2)
    evict(held, [2], 1, 3)
    held.capacity[0, 0] = 2
    assert evict(held, [], 0, 4) == [3]  # once, as 2, but longer ago


def test_uses_are_counted_from_the_last_admission() -> None:
    held = windows(10, "lfu")
    admit(held, [1], 1)
    for step in (1, 2, 3):
        evict(held, [1], 1, step)
    before, held.capacity[0, 0] = held.capacity[0, 0], 0
    held.evict(0, table([[]]), 0, 4)
    held.capacity[0, 0] = before
    admit(held, [2], 5)
    evict(held, [2], 1, 5)
    admit(held, [1], 6)
    held.capacity[0, 0] = 1
    assert evict(held, [], 0, 6) == [1]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_chosen_entries_go_last_and_the_worst_of_them_first(eviction: Eviction) -> None:
    held = windows(1, eviction)
    admit(held, [1, 2], 1)
    admit(held, [3, 4], 9)
    assert evict(held, [2, 1], 2, 9) == [1, 3, 4]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_window_without_capacity_keeps_nothing_between_steps(eviction: Eviction) -> None:
    held = windows(0, eviction)
    admit(held, [1, 2, 3], 1)
    assert evict(held, [1, 2, 3], 3, 1) == [1, 2, 3]
    assert held.held(0).tolist() == [0]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_nothing_goes_while_there_is_room(eviction: Eviction) -> None:
    held = windows(3, eviction)
    admit(held, [1, 2, 3], 1)
    assert evict(held, [7, 8, 9], 3, 1) == []


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_kept_entries_never_go_and_take_no_capacity(eviction: Eviction) -> None:
    held = windows(0, eviction)
    held.keep(0, ints(0, 0), ints(0, 1), ints(100, 101))
    admit(held, [2], 1)
    assert evict(held, [0, 1, 2], 2, 1) == [2]
    assert held.held(0).tolist() == [0]
    assert [m.tolist() for m in held.missing(0, table([[0, 1, 2]]))] == [[0], [2]]


def test_loosened_entries_may_go() -> None:
    held = windows(1)
    held.keep(0, ints(0, 0, 0), ints(0, 1, 4), ints(100, 101, 104))
    held.loosen(0, 1, 5, 1)
    assert held.entries(0, 0).tolist() == [1, 4]
    assert evict(held, [0, 4, 1], 2, 1) == [1]
    held.loosen(0, 0, MOST, 2)
    assert held.entries(0, 0).tolist() == [0, 4]


def test_a_capacity_may_change_between_steps() -> None:
    held = windows(3)
    admit(held, [1, 2, 3, 4], 1)
    assert len(held.evict(0, table([[1, 2, 3, 4]]), 4, 1)) == 1
    held.capacity[0, 0] = 2
    assert evict(held, [1, 2, 3, 4], 4, 1) == [3]


def test_missing_entries_are_sorted_by_head_and_entry() -> None:
    held = Windows(1, 2, MOST, np.full((1, 2), 5, dtype=np.int64), "la")
    held.admit(0, ints(0, 1), ints(3, 8), ints(0, 1), 1)
    heads, entries = held.missing(0, table([[9, 3, 5], [8, 3]]))
    assert list(zip(heads.tolist(), entries.tolist(), strict=True)) == [(0, 5), (0, 9), (1, 3)]
    assert heads.dtype == entries.dtype == np.int64


# -- injected error -----------------------------------------------------------------------------------------------


def with_noise(noise: float, seed: int = 0, eviction: Eviction = "la", steps: int = 60) -> list[list[int]]:
    """What goes, step after step: 16 of 64 are held, 8 chosen, 4 of them new."""
    held = windows(16, eviction, 64, noise=noise, seed=seed)
    random = np.random.default_rng(5)
    gone = []
    for step in range(steps):
        ranked = random.permutation(64)
        _, entries = held.missing(0, ranked[None, :8])
        admit(held, entries.tolist(), step)
        gone.append(evict(held, ranked.tolist(), 8, step))
        assert held.slots[0, 0, ranked[:8]].min() >= 0
        assert held.held(0)[0] <= 16
    return gone


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_an_injected_error_is_drawn_from_its_seed(eviction: Eviction) -> None:
    assert with_noise(0.5, 1, eviction) == with_noise(0.5, 1, eviction)
    assert with_noise(0.5, 1, eviction) != with_noise(0.5, 2, eviction)
    assert with_noise(0.0, 1, eviction) == with_noise(0.0, 2, eviction)


@pytest.mark.parametrize("noise", [0.25, 0.5, 1.0])
def test_an_injected_error_replaces_that_share_of_what_goes(noise: float) -> None:
    """Each time 10 of 40 entries go: the 10 worst but for the error."""
    replaced = 0
    for seed in range(60):
        held = windows(30, most=40, noise=noise, seed=seed)
        admit(held, list(range(40)), 0)
        gone = evict(held, list(range(40)), 5, 0)
        assert len(gone) == 10
        assert min(gone) >= 5
        replaced += sum(entry < 30 for entry in gone)
    assert replaced / 600 == pytest.approx(noise, abs=0.06)


def test_an_injected_error_hits_every_entry_that_would_have_stayed_alike() -> None:
    hits = np.zeros(40)
    for seed in range(400):
        held = windows(30, most=40, noise=1.0, seed=seed)
        admit(held, list(range(40)), 0)
        hits[evict(held, list(range(40)), 5, 0)] += 1
    assert hits[:5].sum() == hits[30:].sum() == 0
    assert hits[5:30].min() > 110  # 160 are expected, with a deviation of 10
    assert hits[5:30].max() < 210


def test_no_error_can_be_put_in_where_all_others_are_chosen() -> None:
    held = windows(3, noise=1.0)
    admit(held, [1, 2, 3, 4, 5], 1)
    assert evict(held, [1, 2, 3, 4, 5], 3, 1) == [4, 5]


def test_layers_and_heads_err_differently() -> None:
    held = Windows(2, 2, 64, np.full((2, 2), 48, dtype=np.int64), "la", noise=1.0)
    every = np.tile(np.arange(64), (2, 1))
    gone = []
    for layer in range(2):
        held.admit(layer, np.repeat(np.arange(2), 64), every.reshape(-1), every.reshape(-1), 0)
        held.evict(layer, every, 4, 0)
        gone += [tuple(held.entries(layer, head)) for head in range(2)]
    assert len(set(gone)) == 4


# -- any history --------------------------------------------------------------------------------------------------


@dataclass
class Held:
    slot: int
    last: int
    uses: int = 0
    kept: bool = False


def victims(held: dict[int, Held], room: int, ranked: list[int], k: int, eviction: Eviction) -> list[int]:
    """Entries that go, by sorting all of them."""
    rank = {entry: i for i, entry in enumerate(ranked)}

    def goes_first(entry: int) -> tuple[Any, ...]:
        of = held[entry]
        if rank.get(entry, k) < k:
            return (2, -rank[entry])
        if eviction == "la":
            return (1, -rank[entry]) if entry in rank else (0, of.last, entry)
        return (0, of.last, entry) if eviction == "lru" else (0, of.uses, of.last, entry)

    loose = sorted((e for e, of in held.items() if not of.kept), key=goes_first)
    return loose[: max(len(loose) - room, 0)]


rankings = st.lists(st.lists(st.integers(0, MOST - 1), unique=True, max_size=MOST), min_size=HEADS, max_size=HEADS)
layers = st.integers(0, LAYERS - 1)


class WindowsAgainstDictionaries(RuleBasedStateMachine):
    """`slots` must be unique here only so that an answer can be told apart."""

    @initialize(
        eviction=st.sampled_from(EVICTIONS),
        capacity=st.lists(st.integers(0, MOST), min_size=LAYERS * HEADS, max_size=LAYERS * HEADS),
    )
    def begin(self, eviction: Eviction, capacity: list[int]) -> None:
        self.eviction = eviction
        self.capacity = np.array(capacity, dtype=np.int64).reshape(LAYERS, HEADS)
        self.windows = Windows(LAYERS, HEADS, MOST, self.capacity, eviction)
        self.held: list[list[dict[int, Held]]] = [[{} for _ in range(HEADS)] for _ in range(LAYERS)]
        self.step = 0
        self.next_slot = 0

    def _new(self, layer: int, heads: Int64, entries: Int64, kept: bool) -> Int64:
        slots = np.arange(self.next_slot, self.next_slot + len(heads), dtype=np.int64)
        self.next_slot += len(heads)
        for head, entry, slot in zip(heads.tolist(), entries.tolist(), slots.tolist(), strict=True):
            self.held[layer][head][entry] = Held(slot, self.step, kept=kept)
        return slots

    @rule(layer=layers, ranked=rankings, k=st.integers(0, 5), fetched=st.booleans())
    def decode(self, layer: int, ranked: list[list[int]], k: int, fetched: bool) -> None:
        self.step += 1
        chosen = [row[:k] for row in ranked]
        heads, entries = self.windows.missing(layer, table(chosen))
        missing = [(h, e) for h in range(HEADS) for e in sorted(chosen[h]) if e not in self.held[layer][h]]
        assert list(zip(heads.tolist(), entries.tolist(), strict=True)) == missing
        if fetched:
            self.windows.admit(layer, heads, entries, self._new(layer, heads, entries, False), self.step)
        self._evict(layer, ranked, k)

    @rule(layer=layers, ranked=rankings, most=st.integers(0, 4))
    def shrink(self, layer: int, ranked: list[list[int]], most: int) -> None:
        before = self.windows.capacity[layer].copy()
        self.windows.capacity[layer] = most
        self._evict(layer, ranked, 1)
        self.windows.capacity[layer] = before

    def _evict(self, layer: int, ranked: list[list[int]], k: int) -> None:
        room = self.windows.capacity[layer]
        expected: list[list[int]] = []
        for head, row in enumerate(ranked):
            held = self.held[layer][head]
            for entry in row[:k]:
                if entry in held:
                    held[entry].last = self.step
                    held[entry].uses += 1
            gone = victims(held, int(room[head]), row, k, self.eviction)
            expected.append(sorted(held.pop(entry).slot for entry in gone))
        given = self.windows.evict(layer, table(ranked), k, self.step).tolist()
        for slots in expected:
            assert sorted(given[: len(slots)]) == slots
            del given[: len(slots)]
        assert not given

    @rule(layer=layers, head=st.integers(0, HEADS - 1), first=st.integers(0, MOST), count=st.integers(0, 4))
    def keep(self, layer: int, head: int, first: int, count: int) -> None:
        entries = [e for e in range(first, min(first + count, MOST)) if e not in self.held[layer][head]]
        heads = np.full(len(entries), head, dtype=np.int64)
        self.windows.keep(layer, heads, ints(*entries), self._new(layer, heads, ints(*entries), True))

    @rule(layer=layers, first=st.integers(0, MOST), count=st.integers(0, 6))
    def loosen(self, layer: int, first: int, count: int) -> None:
        last = min(first + count, MOST)
        self.windows.loosen(layer, first, last, self.step)
        for held in self.held[layer]:
            for entry in range(first, last):
                if entry in held and held[entry].kept:
                    held[entry] = Held(held[entry].slot, self.step)

    @invariant()
    def what_is_held_agrees(self) -> None:
        for layer in range(LAYERS):
            loose = [[e for e, of in held.items() if not of.kept] for held in self.held[layer]]
            assert self.windows.held(layer).tolist() == [len(entries) for entries in loose]
            for head in range(HEADS):
                held = self.held[layer][head]
                assert self.windows.entries(layer, head).tolist() == sorted(loose[head])
                assert self.windows.slots[layer, head].tolist() == [
                    held[entry].slot if entry in held else -1 for entry in range(MOST)
                ]


TestWindowsAgainstDictionaries = WindowsAgainstDictionaries.TestCase
TestWindowsAgainstDictionaries.settings = settings(max_examples=60, stateful_step_count=25)


@settings(max_examples=25)
@given(st.sampled_from(EVICTIONS), st.integers(0, 2**31 - 1))
def test_large_windows_drop_what_sorting_finds(eviction: Eviction, seed: int) -> None:
    """Many entries with few different ages: what a selection without sorting could get wrong."""
    random = np.random.default_rng(seed)
    most, k = 400, int(random.integers(0, 60))
    capacity = int(random.integers(0, 300))
    held = windows(10**6, eviction, most)
    expected: dict[int, Held] = {}
    for step in range(4):
        entries = random.permutation(np.flatnonzero(held.slots[0, 0] < 0))[: int(random.integers(0, 120))]
        admit(held, entries.tolist(), step)
        expected |= {e: Held(e + 100, step) for e in entries.tolist()}
        for entry in evict_and_use(held, expected, random.permutation(most)[: 2 * k].tolist(), k, step):
            raise AssertionError(f"{entry} went although there was room")
    held.capacity[0, 0] = capacity
    ranked = random.permutation(most)[: int(random.integers(0, most))].tolist()
    gone = evict_and_use(held, expected, ranked, k, 9)
    assert gone == sorted(victims(expected, capacity, ranked, k, eviction))


def evict_and_use(held: Windows, expected: dict[int, Held], ranked: list[int], k: int, step: int) -> list[int]:
    for entry in ranked[:k]:
        if entry in expected:
            expected[entry].last = step
            expected[entry].uses += 1
    return evict(held, ranked, k, step)


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda w: w.missing(2, table([[1], [1]])), "layer 2; there are 2"),
        (lambda w: w.missing(-1, table([[1], [1]])), "layer -1"),
        (lambda w: w.missing(0, table([[1]])), r"chosen has shape \(1, 1\); it must be \(2, any\)"),
        (lambda w: w.missing(0, ints(1, 2)), "chosen is int64 of 1 dimensions; it must be int64 of 2"),
        (lambda w: w.missing(0, table([[1], [8]])), "layer 0, head 1: 8 is none of 8 entries"),
        (lambda w: w.missing(0, table([[1], [-2]])), "head 1: -2 is none of 8 entries"),
        (lambda w: w.missing(0, table([[1, 2, 1], [3]])), "head 0: 1 is named twice"),
        (lambda w: w.missing(0, table([[1], [2]]).astype(np.int32)), "chosen is int32"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, 5), ints(3, 4), 2), "head 1: the entry is held already"),
        (lambda w: w.admit(0, ints(0, 0), ints(1, 1), ints(3, 4), 2), "slot 4 .*named twice"),
        (lambda w: w.admit(0, ints(0, 2), ints(1, 1), ints(3, 4), 2), "there are 2 heads and 8 entries"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, 8), ints(3, 4), 2), "there are 2 heads and 8 entries"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, -1), ints(3, 4), 2), "there are 2 heads and 8 entries"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, 2), ints(3, -1), 2), "a slot is at least 0"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, 2), ints(3, 1 << 31), 2), "slot 2147483648"),
        (lambda w: w.admit(0, ints(0, 1), ints(1, 2), ints(3), 2), "slots has shape"),
        (lambda w: w.admit(0, ints(0), ints(1), ints(3), -1), "step -1; it must be from 0"),
        (lambda w: w.admit(0, ints(0), ints(1), ints(3), 1 << 31), "step 2147483648"),
        (lambda w: w.keep(0, ints(0, 1), ints(1, 5), ints(3, 4)), "head 1: the entry is held already"),
        (lambda w: w.loosen(0, 3, 9, 2), r"entries \[3, 9\) are to be loosened; there are 8"),
        (lambda w: w.loosen(0, 4, 3, 2), r"entries \[4, 3\)"),
        (lambda w: w.evict(0, table([[5, 6], [8]]), 1, 2), "ranked of layer 0, head 1: 8 is none of 8 entries"),
        (lambda w: w.evict(0, table([[5, 6], [7, 5, 7]]), 1, 2), "head 1: 7 is named twice"),
        (lambda w: w.evict(0, table([[5], [6]]), -1, 2), "k -1; it must be at least 0"),
        (lambda w: w.evict(0, table([[5], [6]]), 1, -2), "step -2"),
        (lambda w: w.entries(0, 2), "head 2; there are 2"),
        (lambda w: w.held(5), "layer 5; there are 2"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(act: Callable[[Windows], Any], message: str) -> None:
    held = Windows(2, 2, 8, np.zeros((2, 2), dtype=np.int64), "lru")
    held.admit(0, ints(0, 1, 1), ints(5, 5, 6), ints(0, 1, 2), 1)
    before = held.slots.copy()
    with pytest.raises(ValueError, match=message):
        act(held)
    assert (held.slots == before).all()
    assert held.held(0).tolist() == [1, 2]
    assert held.entries(0, 1).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 4, np.zeros((0, 1), dtype=np.int64), "la"), "at least one of each"),
        ((1, 1, 1 << 31, ints(1).reshape(1, 1), "la"), "fewer than 2,147,483,648 entries"),
        ((1, 1, 4, ints(1), "la"), "capacity is int64 of 1 dimensions"),
        ((1, 1, 4, ints(-1).reshape(1, 1), "la"), "capacity -1; it must be at least 0"),
        ((1, 1, 4, ints(1).reshape(1, 1), "fifo"), "'fifo'; it must be one of la, lru, lfu"),
        ((1, 1, 4, ints(1).reshape(1, 1), "la", 1.5), "noise 1.5; it must be from 0 to 1"),
        ((1, 1, 4, ints(1).reshape(1, 1), "la", float("nan")), "noise nan"),
    ],
)
def test_windows_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(*arguments)
