"""Turns: commands that touch the same blocks, and of which one writes, go one after the other.

First come, first served among those that are in each other's way; nobody else waits. A command takes all that it needs
at once and holds it until it has ended, so no two can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """Blocks `low` to `high` of something, to read or to write."""

    of: Any
    low: int
    high: int
    writes: bool


class Turns:
    """Who holds which blocks, and who waits."""

    def __init__(self) -> None:
        self._held: dict[Any, list[Need]] = {}
        self._waiting: dict[Any, tuple[list[Need], Callable[[], None]]] = {}

    def take(self, who: Any, needs: list[Need], go: Callable[[], None]) -> None:
        """Call `go` when nobody before is in the way, at once if nobody is."""
        before = [*self._held.values(), *(needs for needs, _ in self._waiting.values())]
        if any(_in_the_way(needs, other) for other in before):
            self._waiting[who] = needs, go
        else:
            self._held[who] = needs
            go()

    def give(self, who: Any) -> None:
        """It has ended, or waits no longer."""
        self._held.pop(who, None)
        self._waiting.pop(who, None)
        before: list[list[Need]] = list(self._held.values())
        ready = []
        for waiting, (needs, go) in list(self._waiting.items()):
            if not any(_in_the_way(needs, other) for other in before):
                del self._waiting[waiting]
                self._held[waiting] = needs
                ready.append(go)
            before.append(needs)
        for go in ready:
            go()


def _in_the_way(needs: list[Need], other: list[Need]) -> bool:
    return any(
        a.of is b.of and (a.writes or b.writes) and a.low <= b.high and b.low <= a.high for a in needs for b in other
    )
