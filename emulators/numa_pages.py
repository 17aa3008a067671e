"""On which NUMA node each page of a process lies: policies of ranges, nodes that fill up, and pages that are pinned.

- A page lies nowhere until it is touched, then where the policy of its address says: in turn (interleave, by the page's
  number), or on the nearest of the named nodes that has room (bind, preferred). If those are full, it lies on the
  nearest node that has room, but not under bind: that is EFAULT from the call that touches; Linux may kill the process.
- Pinning moves a page out of a movable node (`pin`).

The back door: `touch`, `pin`, `unpin`, `relocate` (the kernel moves pages behind us), `used`, `pages_at`.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tierloop.devices.drivers import numa
from tierloop.emulators.kernel import failure

PAGE = numa.PAGE
MPOL_LOCAL = 4
"""What `preferred` without nodes becomes: the node of the core that touches."""


class Policy(NamedTuple):
    """A range's policy: an MPOL_ number and its nodes, in order."""

    mode: int
    nodes: tuple[int, ...]


DEFAULT = Policy(numa.MPOL_DEFAULT, ())


@dataclass(frozen=True)
class Memory:
    """One node's memory: what it holds, whether pins make pages leave, whether the process may use it."""

    nbytes: int
    movable: bool = False
    allowed: bool = True


class NumaPages:
    """See the top of the file. `home` is the node of the cores that this process runs on; without `distances` all other
    nodes are equally far.
    """

    def __init__(
        self, nodes: Mapping[int, Memory], home: int = 0, distances: Mapping[int, Mapping[int, int]] | None = None
    ) -> None:
        self.nodes = dict(nodes)
        self.home = home
        self._distances = {node: dict(row) for node, row in (distances or {}).items()}
        self.used = dict.fromkeys(self.nodes, 0)
        """Bytes that lie on each node."""
        self.weights = dict.fromkeys(self.nodes, 1)
        self.where: dict[int, int] = {}
        """The node of every page that was touched."""
        self.pinned: set[int] = set()
        self._starts: list[int] = [0]
        self._policies: list[Policy] = [DEFAULT]

    def touch(self, address: int, nbytes: int, home: int | None = None) -> None:
        """Touch pages that were not touched, from a core of the node `home`. Raises OSError: EFAULT without room."""
        for page in _pages(address, nbytes):
            if page not in self.where:
                self.put(page, self._choose(page, self.home if home is None else home))

    def pin(self, address: int, nbytes: int) -> None:
        """Pin pages for DMA: they are touched, and leave movable nodes. Raises OSError: ENOMEM if nothing has room."""
        self.touch(address, nbytes)
        for page in _pages(address, nbytes):
            if self.nodes[self.where[page]].movable:
                fixed = [node for node in self._nearest(self.home) if not self.nodes[node].movable]
                self.put(page, self._first_with_room(fixed, errno.ENOMEM))
            self.pinned.add(page)

    def unpin(self, address: int, nbytes: int) -> None:
        """Let pages go; they stay where they are."""
        self.pinned.difference_update(_pages(address, nbytes))

    def relocate(self, address: int, nbytes: int, node: int) -> None:
        """Move touched pages to a node, asked by nobody: demotion, or NUMA balancing."""
        for page in _pages(address, nbytes):
            if page in self.where and page not in self.pinned:
                self.put(page, node)

    def pages_at(self, address: int, nbytes: int) -> list[int | None]:
        """The node of each page of a range, None where it lies nowhere."""
        return [self.where.get(page) for page in _pages(address, nbytes)]

    def drop(self, address: int, nbytes: int) -> None:
        """The pages lie nowhere any more, until they are touched again."""
        for page in _pages(address, nbytes):
            node = self.where.pop(page, None)
            self.pinned.discard(page)
            if node is not None:
                self.used[node] -= PAGE

    def forget(self, address: int, nbytes: int) -> None:
        """The range is unmapped: its pages lie nowhere, and it has no policy."""
        self.drop(address, nbytes)
        self.rule(address, nbytes, DEFAULT)

    def rule(self, address: int, nbytes: int, policy: Policy) -> None:
        """Give whole pages a policy: those that are not touched yet will lie where it says."""
        first, last = address // PAGE, (address + nbytes) // PAGE
        after = self.policy(last)
        low = bisect_right(self._starts, first - 1)
        high = bisect_right(self._starts, last)
        self._starts[low:high] = [first, last]
        self._policies[low:high] = [policy, after]

    def policy(self, page: int) -> Policy:
        """The policy of a page."""
        return self._policies[bisect_right(self._starts, page) - 1]

    def _choose(self, page: int, home: int) -> int:
        mode, nodes = self.policy(page)
        if mode in (numa.MPOL_BIND, numa.MPOL_PREFERRED_MANY):
            named = [node for node in self._nearest(home) if node in nodes]
            return self._first_with_room(named if mode == numa.MPOL_BIND else [*named, *self._nearest(home)])
        if mode == numa.MPOL_PREFERRED:
            return self._first_with_room(self._nearest(nodes[0]))
        if mode in (numa.MPOL_INTERLEAVE, numa.MPOL_WEIGHTED_INTERLEAVE):
            even = mode == numa.MPOL_INTERLEAVE
            turns = [node for node in nodes for _ in range(1 if even else self.weights[node])]
            return self._first_with_room(self._nearest(turns[page % len(turns)]))
        return self._first_with_room(self._nearest(home))

    def _nearest(self, home: int) -> list[int]:
        row = self._distances.get(home, {})
        usable = (node for node in self.nodes if self.nodes[node].allowed)
        return sorted(usable, key=lambda node: (node != home, row.get(node, 255), node))

    def _first_with_room(self, nodes: Iterable[int], number: int = errno.EFAULT) -> int:
        for node in nodes:
            if self.has_room(node):
                return node
        raise failure(number)

    def has_room(self, node: int) -> bool:
        """Whether one more page fits on a node."""
        return self.used[node] + PAGE <= self.nodes[node].nbytes

    def put(self, page: int, node: int) -> None:
        """Let a page lie on a node, wherever it lay before."""
        before = self.where.get(page)
        if before is not None:
            self.used[before] -= PAGE
        self.where[page] = node
        self.used[node] += PAGE


def _pages(address: int, nbytes: int) -> range:
    return range(address // PAGE, -(-(address + nbytes) // PAGE))
