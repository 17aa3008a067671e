"""Attention states: what devices exchange, and the fixed tree in which they are merged.

A state is (m, l, acc) in float32, un-normalised, one row of 2 + head_dim_v numbers per query head (the layout is in
kernels/contract.py). Here are the definitions in plain NumPy and the arithmetic of the tree over split ids; the fast
merge is the `merge` kernel. Merging un-normalised triples loses 20 times less than merging (out, lse) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Node = tuple[int, int]
"""(level, index): the splits [index << level, (index + 1) << level)."""


def identity(shape: tuple[int, ...], head_dim_v: int) -> NDArray[np.float32]:
    """States (*shape, 2 + head_dim_v) that change nothing when merged: (−inf, 0, 0)."""
    state = np.zeros((*shape, 2 + head_dim_v), dtype=np.float32)
    state[..., 0] = -np.inf
    return state


def merge(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """The state of the union of two disjoint sets of rows; both float32 (..., 2 + head_dim_v).

    m = max(mₐ, m_b), l = l_a·exp(mₐ − m) + l_b·exp(m_b − m), acc likewise. An identity leaves the other side as it is;
    otherwise merge(a, b) and merge(b, a) are the same bits.
    """
    m = np.maximum(a[..., 0], b[..., 0]) + np.float32(0)  # the maximum of 0 and -0 is either: adding 0 makes it 0
    with np.errstate(invalid="ignore"):
        scale_a = np.exp(a[..., 0] - m)[..., None]
        scale_b = np.exp(b[..., 0] - m)[..., None]
        merged = a * scale_a + b * scale_b
    merged[..., 0] = m
    empty_a = np.isneginf(a[..., 0])[..., None]
    empty_b = np.isneginf(b[..., 0])[..., None]
    return np.where(empty_a, b, np.where(empty_b, a, merged)).astype(np.float32)


def output(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """Attention output acc / l, float32 (..., head_dim_v); zeros where no row counted."""
    total = state[..., 1:2]
    return np.divide(state[..., 2:], total, out=np.zeros_like(state[..., 2:]), where=total != 0)


def lse(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-sum-exp m + ln l (natural logarithm), float32 (...); −inf for the identity."""
    with np.errstate(divide="ignore"):
        return np.asarray(state[..., 0] + np.log(state[..., 1]), dtype=np.float32)


def top_node(num_splits: int) -> Node:
    """The smallest node from split 0 that covers `num_splits` splits."""
    return (max(num_splits - 1, 0).bit_length(), 0)


def cover(mine: Sequence[int], others: Sequence[int]) -> list[Node]:
    """The fewest nodes that hold all splits of `mine` and none of `others`: the roots to ask of one device.

    Both are sorted split ids of one sequence and KV head that hold rows. Splits in neither are empty, hence identities,
    so a device that holds everything returns one node. Raises ValueError if a split is in both.
    """
    ours, theirs = np.asarray(mine, dtype=np.int64), np.asarray(others, dtype=np.int64)
    if not ours.size:
        return []
    last = max(int(ours[-1]), int(theirs[-1]) if theirs.size else 0)
    level = np.full(ours.size, top_node(last + 1)[0], dtype=np.int64)
    if theirs.size:
        # Splits s and t share the nodes from level bit_length(s ^ t) on, and none of the others shares a lower one with
        # s than its neighbours in the order. frexp gives the bit length: it is exact for the integers below 2**53.
        above = np.searchsorted(theirs, ours)
        for near in (theirs[np.maximum(above - 1, 0)], theirs[np.minimum(above, theirs.size - 1)]):
            level = np.minimum(level, np.frexp((ours ^ near).astype(np.float64))[1] - 1)
        if level.min() < 0:
            raise ValueError(f"split {int(ours[level.argmin()])} is held twice")
    roots = np.stack([level, ours >> level], axis=1)
    first = np.concatenate([[True], (roots[1:] != roots[:-1]).any(axis=1)])
    return [(level, index) for level, index in roots[first].tolist()]


def merge_tree(states: NDArray[np.float32], nodes: Sequence[Node]) -> NDArray[np.float32]:
    """The merged state of nodes that do not lie inside each other: float32 (n, ...) → (...), the living definition.

    Raises ValueError if one node lies inside another.
    """
    held: dict[Node, NDArray[np.float32]] = {}
    for node, state in zip(nodes, states, strict=True):
        if node in held:
            raise ValueError(f"node {node} is given twice")
        held[node] = state
    while len(held) > 1:
        level = min(node[0] for node in held)
        for node in sorted(n for n in held if n[0] == level):
            if node not in held:
                continue
            state = held.pop(node)
            sibling = held.pop((level, node[1] ^ 1), None)
            if sibling is not None:
                state = merge(state, sibling) if node[1] % 2 == 0 else merge(sibling, state)
            parent = (level + 1, node[1] >> 1)
            if parent in held:
                raise ValueError(f"node {node} lies inside {parent}")
            held[parent] = state
    if not held:
        raise ValueError("no states to merge")
    return next(iter(held.values()))
