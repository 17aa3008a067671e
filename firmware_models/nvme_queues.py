"""Queue pairs of an NVMe controller, and the arbitration that says whose command is fetched next.

A submission queue is a ring in host memory that the host fills and the controller empties; a completion queue is the
reverse. A ring of n entries holds n - 1: tail one before head is full. The phase bit of a completion turns over with
each round of its queue, so that the host sees what is new without asking.

Round robin: every queue with something in it gives up to a burst of commands, the admin queue among them. Weighted
round robin with urgent class: the admin queue goes before all, urgent queues before the rest, and then the classes
high, medium and low get as many commands in turn as their weights say, each burst from one queue of the class.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tierloop.firmware_models.nvme_wire import COMPLETION_NBYTES, ENTRY_NBYTES, Answer

URGENT, HIGH, MEDIUM, LOW = range(4)


@dataclass
class CompletionQueue:
    """Filled by the controller. `waiting` are completions for which there is no room yet.

    With each goes the queue of its command, and whether the command's identifier was its own.
    """

    qid: int
    base: int
    entries: int
    vector: int = 0
    interrupts: bool = True
    head: int = 0
    tail: int = 0
    phase: int = 1
    users: set[int] = field(default_factory=set)
    waiting: deque[tuple[Answer, SubmissionQueue, bool]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        """There is no room for another completion."""
        return (self.tail + 1) % self.entries == self.head

    @property
    def posted(self) -> int:
        """Completions that the host has not taken yet."""
        return (self.tail - self.head) % self.entries

    def next_address(self) -> int:
        """Where the next completion goes."""
        return self.base + self.tail * COMPLETION_NBYTES

    def step(self) -> None:
        """One completion was posted."""
        self.tail += 1
        if self.tail == self.entries:
            self.tail, self.phase = 0, self.phase ^ 1

    def take(self, head: int) -> bool:
        """The host's doorbell: it has taken all before `head`. Returns whether that can be."""
        if head >= self.entries or not 0 < (head - self.head) % self.entries <= self.posted:
            return False
        self.head = head
        return True


@dataclass
class SubmissionQueue:
    """Filled by the host. `flying` are identifiers of commands whose completions are not posted."""

    qid: int
    base: int
    entries: int
    cqid: int
    priority: int = MEDIUM
    head: int = 0
    tail: int = 0
    flying: set[int] = field(default_factory=set)

    @property
    def ready(self) -> int:
        """Entries that wait to be fetched."""
        return (self.tail - self.head) % self.entries

    def ring(self, tail: int) -> bool:
        """The host's doorbell: entries before `tail` are there. Returns whether that can be."""
        room = self.entries - 1 - self.ready
        if tail >= self.entries or not 0 < (tail - self.tail) % self.entries <= room:
            return False
        self.tail = tail
        return True

    def next_address(self) -> int:
        """Where the entry to fetch lies."""
        return self.base + self.head * ENTRY_NBYTES

    def step(self) -> None:
        """One entry was fetched."""
        self.head = (self.head + 1) % self.entries


class Arbiter:
    """Chooses the submission queue to fetch from. Weights and burst come from the Arbitration feature."""

    def __init__(self, weighted: bool) -> None:
        self._weighted = weighted
        self._last: dict[int, int] = {}
        self._burst_of: SubmissionQueue | None = None
        self._burst_left = 0
        self._credit = {HIGH: 0, MEDIUM: 0, LOW: 0}

    def choose(self, queues: dict[int, SubmissionQueue], arbitration: int) -> SubmissionQueue | None:
        """The queue whose head is fetched next, None if all are empty. `arbitration` is the feature's word."""
        ready = [queue for queue in queues.values() if queue.ready]
        if not ready:
            return None
        if not self._weighted:
            return self._in_turn(-1, ready, arbitration)
        if ready[0].qid == 0:
            return ready[0]
        urgent = [queue for queue in ready if queue.priority == URGENT]
        if urgent:
            return self._in_turn(URGENT, urgent, arbitration)
        return self._by_weight(ready, arbitration)

    def _by_weight(self, ready: list[SubmissionQueue], arbitration: int) -> SubmissionQueue:
        weights = {HIGH: arbitration >> 24 & 255, MEDIUM: arbitration >> 16 & 255, LOW: arbitration >> 8 & 255}
        classes = [kind for kind in weights if any(queue.priority == kind for queue in ready)]
        if not any(self._credit[kind] > 0 for kind in classes):
            self._credit = {kind: weight + 1 for kind, weight in weights.items()}
        kind = next(kind for kind in classes if self._credit[kind] > 0)
        self._credit[kind] -= 1
        return self._in_turn(kind, [queue for queue in ready if queue.priority == kind], arbitration)

    def _in_turn(self, kind: int, ready: list[SubmissionQueue], arbitration: int) -> SubmissionQueue:
        if self._burst_left and any(queue is self._burst_of for queue in ready):
            assert self._burst_of is not None
            self._burst_left -= 1
            return self._burst_of
        last = self._last.get(kind, -1)
        chosen = min(ready, key=lambda queue: (queue.qid <= last, queue.qid))
        self._last[kind] = chosen.qid
        burst = arbitration & 7
        self._burst_of, self._burst_left = chosen, (1 << 62 if burst == 7 else (1 << burst) - 1)
        return chosen
