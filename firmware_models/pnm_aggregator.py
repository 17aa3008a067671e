"""The output aggregator of a near-memory processor: states of tree nodes come in any order, states of roots go out.

Each job of the dispatcher gives the state of one node, a *leaf*, of the merge tree (kernels/contract.py). A node is
complete when all leaves below it have come; two complete siblings are merged at once, the lower one first, and a node
whose sibling has no leaves is its parent. So every merge is one of the tree, whatever the order, and the bits of a
root depend on nothing else. A root without leaves is the identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.entries import ENTRIES, MERGE
from tierloop.devices.kernels.merging import fold
from tierloop.devices.states import Node, identity

Float32 = NDArray[np.float32]
_NEIGHBOURS = np.arange(2, dtype=np.int64)


class Aggregator:
    """Collects the states of one launch: `roots` are its nodes in order, `leaves` the nodes below each that will come.

    A state is float32 (rows, 2 + head_dim_v). No leaf lies inside another, and each lies inside its root.
    """

    def __init__(self, roots: list[Node], leaves: Iterable[tuple[int, Node]], rows: int, head_dim_v: int) -> None:
        self._roots = roots
        self._rows, self._dim = rows, head_dim_v
        self._awaited: Counter[tuple[int, Node]] = Counter()
        self._held: dict[tuple[int, Node], Float32] = {}
        self._missing = 0
        for root, leaf in leaves:
            self._missing += 1
            self._awaited.update((root, node) for node in _up_to(leaf, roots[root]))

    @property
    def complete(self) -> bool:
        """Whether every leaf has come."""
        return not self._missing

    def arrived(self, root: int, leaf: Node, state: Float32) -> None:
        """Take the state of a leaf, which is the aggregator's from now on, and merge what is complete with it."""
        assert self._awaited[root, leaf] == 1, f"leaf {leaf} of root {root} is not awaited"
        self._missing -= 1
        self._awaited.subtract((root, node) for node in _up_to(leaf, self._roots[root]))
        node = leaf
        while node != self._roots[root]:
            sibling = (node[0], node[1] ^ 1)
            if self._awaited[root, sibling]:
                break
            other = self._held.pop((root, sibling), None)
            if other is not None:
                state = self._merged(other, state) if node[1] & 1 else self._merged(state, other)
            node = (node[0] + 1, node[1] >> 1)
        self._held[root, node] = state

    def results(self) -> Float32:
        """The states of all roots: float32 (roots, rows, 2 + head_dim_v)."""
        assert self.complete, f"{self._missing} leaves have not come"
        nothing = identity((self._rows,), self._dim)
        states = [self._held.get((i, root), nothing) for i, root in enumerate(self._roots)]
        return np.stack(states) if states else np.empty((0, self._rows, 2 + self._dim), dtype=np.float32)

    def _merged(self, first: Float32, second: Float32) -> Float32:
        """The state of two neighbours, in the place of the first."""
        addresses = np.array([first.ctypes.data, second.ctypes.data], dtype=np.int64)
        fold(int(ENTRIES[MERGE]), addresses, _NEIGHBOURS, 0, 2, self._rows, self._dim, 0)
        return first


def _up_to(leaf: Node, root: Node) -> list[Node]:
    """The nodes from a leaf up to its root, both included."""
    return [(level, leaf[1] >> (level - leaf[0])) for level in range(leaf[0], root[0] + 1)]
