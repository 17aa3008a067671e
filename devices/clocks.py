"""Clocks: integer nanoseconds, one clock for a whole platform.

Three things are asked of a clock: `now`, `call_at` and `wait_until`. `run_until` is `wait_until` with a condition,
for waiting on completions; `post` brings the result of a worker thread to the clock's thread. Whatever was registered
runs on the thread that waits, in the order (time, sequence number).

`VirtualClock` jumps from event to event and never sleeps. `WallClock` sleeps until shortly before the next event, then
spins, and keeps a histogram of how late it was. This module alone reads the operating system's time.
"""

from __future__ import annotations

import ctypes
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_FAR = 1 << 62
_SPIN_NS = 150_000
"""time.sleep overshoots by 68 µs in the median with the default timer slack: sleep to 150 µs before, then spin."""


class Clock(Protocol):
    """The time of a platform. All times are ns since the clock was made."""

    virtual: bool

    def now(self) -> int:
        """The present, in ns."""

    def call_at(self, t_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` when the clock reaches t_ns (at once on the next wait if that has passed)."""

    def wait_until(self, t_ns: int) -> None:
        """Let time pass until t_ns, running what falls due."""

    def run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        """Let time pass until `done()`; False when the deadline came first."""

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Hand a call over to the clock's thread; the only method that another thread may use besides `now`."""


class VirtualClock:
    """Time that jumps: deterministic, never sleeps, never reads the host's clock.

    Work that truly runs beside the clock (a driver's thread) has no place in virtual time: `post` raises, so that such
    a driver fails loudly instead of hanging.
    """

    virtual = True

    def __init__(self) -> None:
        self._now = 0
        self._sequence = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.events = 0

    def now(self) -> int:
        return self._now

    def call_at(self, t_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (t_ns if t_ns > self._now else self._now, self._sequence, call, args))

    def wait_until(self, t_ns: int) -> None:
        self.run_until(lambda: False, t_ns)

    def run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        heap, pop = self._heap, heapq.heappop
        while not done():
            if not heap or heap[0][0] > deadline_ns:
                self._now = max(self._now, deadline_ns)
                return False
            self._now, _, call, args = pop(heap)
            self.events += 1
            call(*args)
        return True

    def post(self, call: Callable[..., None], *args: Any) -> None:
        raise RuntimeError("a virtual clock cannot wait for a thread: use a wall clock with real devices")


class WallClock:
    """The host's monotonic time, from 0 at construction.

    `lateness` counts events by how late they ran: bucket k holds those at most 2**k ns late. `worst_ns` is the latest.
    """

    virtual = False

    def __init__(self) -> None:
        self._zero = time.perf_counter_ns()
        self._sequence = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._bell = threading.Condition()
        self.lateness = [0] * 40
        self.worst_ns = 0
        self.late_total_ns = 0
        self.events = 0
        set_timer_slack()

    def now(self) -> int:
        return time.perf_counter_ns() - self._zero

    def call_at(self, t_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(t_ns, self.now()), self._sequence, t_ns, call, args))

    def post(self, call: Callable[..., None], *args: Any) -> None:
        with self._bell:
            self._inbox.append((call, args))
            self._bell.notify()

    def wait_until(self, t_ns: int) -> None:
        self.run_until(lambda: False, t_ns)

    def run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        while True:
            now = self.now()
            self._settle(now)
            if done():
                return True
            if now >= deadline_ns:
                return False
            due = min(self._heap[0][0] if self._heap else _FAR, deadline_ns)
            now = self.now()
            if due - now > _SPIN_NS:
                with self._bell:
                    if not self._inbox:
                        self._bell.wait((due - now - _SPIN_NS) / 1e9)

    def _settle(self, until_ns: int) -> None:
        """Run what is posted and what fell due up to a time; not what that adds, or a deadline might never be seen."""
        for _ in range(len(self._inbox)):
            if self._inbox:
                call, args = self._inbox.popleft()
                call(*args)
        while self._heap and self._heap[0][0] <= until_ns:
            _, _, due, call, args = heapq.heappop(self._heap)
            late = max(self.now() - due, 0)
            self.lateness[min(late.bit_length(), len(self.lateness) - 1)] += 1
            self.worst_ns = max(self.worst_ns, late)
            self.late_total_ns += late
            self.events += 1
            call(*args)


def spin_until(clock: Clock, t_ns: int) -> None:
    """Let time pass until t_ns on a wall clock, running nothing: for the last µs before something is due."""
    while clock.now() < t_ns:
        pass


def set_timer_slack() -> None:
    """Ask for 1 ns timer slack on this thread (PR_SET_TIMERSLACK = 29); harmless where it is not offered.

    With it, a sleep overshoots by 14 µs in the median instead of 68.
    """
    try:
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return
