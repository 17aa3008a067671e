"""Attention states: the definition of merging, and the tree that makes results independent of where rows lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.states import Node, cover, identity, lse, merge, merge_tree, output, top_node

DIM = 3
SEEDS = st.integers(0, 2**32 - 1)


def some_states(seed: int, num: int, empty_share: float = 0.3) -> NDArray[np.float32]:
    """States (num, 2 heads, 2 + DIM) with logits of many sizes; about `empty_share` of them are identities."""
    rng = np.random.default_rng(seed)
    states = np.empty((num, 2, 2 + DIM), dtype=np.float32)
    states[..., 0] = rng.normal(size=(num, 2)) * rng.choice([0.0, 1.0, 30.0, 1e4], size=(num, 2))
    states[..., 1] = rng.uniform(1, 200, size=(num, 2))
    states[..., 2:] = rng.normal(size=(num, 2, DIM)) * states[..., 1:2]
    states[rng.random((num, 2)) < empty_share] = identity((), DIM)
    return states


def splits_of(node: Node) -> range:
    level, index = node
    return range(index << level, (index + 1) << level)


def fewest_nodes(node: Node, mine: set[int], others: set[int]) -> int:
    """By the definition: a node that holds none of the others does for all of mine in it."""
    inside = set(splits_of(node))
    if not mine & inside:
        return 0
    if not others & inside:
        return 1
    level, index = node
    return sum(fewest_nodes((level - 1, child), mine, others) for child in (2 * index, 2 * index + 1))


def test_the_identity_is_minus_infinity_and_zeros() -> None:
    state = identity((4, 2), DIM)
    assert state.shape == (4, 2, 2 + DIM)
    assert state.dtype == np.float32
    assert np.isneginf(state[..., 0]).all()
    assert not state[..., 1:].any()


@given(SEEDS)
def test_merging_with_the_identity_leaves_the_bits_alone(seed: int) -> None:
    states = some_states(seed, 8)
    nothing = identity((8, 2), DIM)
    assert merge(states, nothing).tobytes() == states.tobytes()
    assert merge(nothing, states).tobytes() == states.tobytes()


@given(SEEDS)
def test_merging_is_commutative_bit_for_bit(seed: int) -> None:
    a, b = some_states(seed, 16), some_states(seed + 1, 16)
    assert merge(a, b).tobytes() == merge(b, a).tobytes()


def test_zeros_of_either_sign_merge_to_the_same_bits() -> None:
    plus = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    minus = np.array([-0.0, 1.0, 2.0], dtype=np.float32)
    assert merge(plus, minus).tobytes() == merge(minus, plus).tobytes()


@given(SEEDS, st.integers(1, 20))
def test_a_merge_is_the_attention_over_both_sets_of_rows(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    logits, values = rng.normal(size=2 * num) * 5, rng.normal(size=(2 * num, DIM))

    def state(rows: slice) -> NDArray[np.float32]:
        m = logits[rows].max()
        weights = np.exp(logits[rows] - m)
        return np.concatenate([[m, weights.sum()], weights @ values[rows]]).astype(np.float32)

    merged = merge(state(slice(0, num)), state(slice(num, 2 * num)))
    weights = np.exp(logits - logits.max())
    np.testing.assert_allclose(output(merged), weights @ values / weights.sum(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse(merged), np.log(np.exp(logits).sum()), rtol=1e-5, atol=1e-6)


def test_logits_far_apart_do_not_overflow() -> None:
    far = np.array([[1e4, 1.0, 3.0], [-1e4, 1.0, 5.0]], dtype=np.float32)
    assert merge(far[0], far[1]).tolist() == [1e4, 1.0, 3.0]


def test_the_output_of_nothing_is_zero_and_its_lse_minus_infinity() -> None:
    assert output(identity((2,), DIM)).tolist() == [[0.0] * DIM] * 2
    assert np.isneginf(lse(identity((2,), DIM))).all()


def test_what_is_not_a_number_stays_visible() -> None:
    broken = np.array([np.nan, np.nan, np.nan], dtype=np.float32)
    fine = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    assert np.isnan(output(broken)).all()
    assert np.isnan(output(merge(broken, fine))).all()
    assert np.isnan(output(merge(fine, broken))).all()


def test_a_sink_logit_is_a_state_without_a_value() -> None:
    sink = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    row = np.array([2.0, 1.0, 8.0], dtype=np.float32)
    assert output(merge(sink, row)).tolist() == [4.0]


@pytest.mark.parametrize(
    ("num_splits", "node"),
    [(0, (0, 0)), (1, (0, 0)), (2, (1, 0)), (3, (2, 0)), (4, (2, 0)), (5, (3, 0)), (1024, (10, 0))],
)
def test_the_top_node_is_the_smallest_that_covers_all(num_splits: int, node: Node) -> None:
    assert top_node(num_splits) == node


@given(st.lists(st.sampled_from(["mine", "others", "empty"]), min_size=1, max_size=40))
def test_a_cover_holds_exactly_mine_with_the_fewest_nodes(owners: list[str]) -> None:
    mine = [i for i, owner in enumerate(owners) if owner == "mine"]
    others = [i for i, owner in enumerate(owners) if owner == "others"]
    roots = cover(mine, others)
    held = [i for root in roots for i in splits_of(root)]
    assert len(held) == len(set(held))
    assert set(mine) <= set(held)
    assert not set(others) & set(held)
    assert all(set(splits_of(root)) & set(mine) for root in roots)
    assert len(roots) == fewest_nodes(top_node(len(owners)), set(mine), set(others))
    assert held == sorted(held)


@given(st.sets(st.integers(0, 1 << 40), min_size=1, max_size=12), st.sets(st.integers(0, 1 << 40), max_size=12))
def test_a_cover_of_far_apart_splits_holds_exactly_mine(mine: set[int], others: set[int]) -> None:
    others -= mine
    roots = cover(sorted(mine), sorted(others))
    for split in mine:
        assert sum(split >> level == index for level, index in roots) == 1
    for split in others:
        assert not any(split >> level == index for level, index in roots)
    for level, index in roots:
        parent = [s for s in others if s >> (level + 1) == index >> 1]
        assert parent or (level, index) == top_node(max(mine | others) + 1)


def test_whoever_holds_everything_returns_one_node() -> None:
    assert cover([0, 1, 2, 3, 4], []) == [(3, 0)]
    assert cover([5], []) == [(3, 0)]
    assert cover([], [0, 1]) == []
    assert cover([], []) == []


def test_a_cover_takes_arrays_as_well() -> None:
    roots = cover(np.array([0, 1, 4]), np.array([2, 3]))  # type: ignore[arg-type]
    assert roots == [(1, 0), (2, 1)]
    assert all(type(number) is int for root in roots for number in root)


@pytest.mark.parametrize(("mine", "others"), [([0], [0]), ([1, 3, 5], [0, 5]), ([2], [0, 2, 9])])
def test_a_split_that_two_hold_is_refused(mine: list[int], others: list[int]) -> None:
    with pytest.raises(ValueError, match=f"split {(set(mine) & set(others)).pop()} is held twice"):
        cover(mine, others)


@given(SEEDS, st.integers(1, 24), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_partition_in_any_order_gives_the_same_bits(seed: int, num: int, holders: int, random: object) -> None:
    rng = np.random.default_rng(seed)
    leaves = some_states(seed, num)
    whole = merge_tree(leaves, [(0, i) for i in range(num)])
    owner = rng.integers(0, holders, size=num)
    gathered: list[tuple[Node, NDArray[np.float32]]] = []
    for holder in range(holders):
        mine = [i for i in range(num) if owner[i] == holder]
        for root in cover(mine, [i for i in range(num) if owner[i] != holder]):
            inside = [i for i in mine if i in splits_of(root)]
            gathered.append((root, merge_tree(leaves[inside], [(0, i) for i in inside])))
    random.shuffle(gathered)  # type: ignore[attr-defined]
    states = np.stack([state for _, state in gathered])
    assert merge_tree(states, [root for root, _ in gathered]).tobytes() == whole.tobytes()


@given(SEEDS, st.integers(1, 24))
def test_splits_without_rows_change_nothing(seed: int, num: int) -> None:
    leaves = some_states(seed, num, empty_share=0.0)
    keep = [i for i in range(num) if np.random.default_rng(seed + i).random() < 0.5] or [0]
    sparse = identity((num, 2), DIM)
    sparse[keep] = leaves[keep]
    without = merge_tree(leaves[keep], [(0, i) for i in keep])
    assert merge_tree(sparse, [(0, i) for i in range(num)]).tobytes() == without.tobytes()


def test_the_tree_merges_neighbours_first() -> None:
    a, b, c = some_states(7, 3, empty_share=0.0)
    assert merge_tree(np.stack([a, b, c]), [(0, 0), (0, 1), (0, 2)]).tobytes() == merge(merge(a, b), c).tobytes()
    assert merge_tree(np.stack([a, b, c]), [(0, 1), (0, 2), (0, 3)]).tobytes() == merge(a, merge(b, c)).tobytes()


@pytest.mark.parametrize("nodes", [[(0, 0), (1, 0)], [(2, 0), (0, 3)], [(1, 1), (0, 0), (3, 0)]])
def test_a_node_inside_another_is_refused(nodes: list[Node]) -> None:
    with pytest.raises(ValueError, match="lies inside"):
        merge_tree(some_states(0, len(nodes)), nodes)


def test_a_node_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="given twice"):
        merge_tree(some_states(0, 2), [(1, 4), (1, 4)])


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="no states"):
        merge_tree(some_states(0, 0), [])
