"""The loop: policies are coroutines on the platform's clock, and awaiting a completion is the only way to wait.

Single-threaded and deterministic: a task runs until it awaits something that has not ended, tasks become ready in the
order in which what they await ends, and nothing runs at the same time except devices. A task that fails while nobody
awaits it ends the run with its error.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

from tierloop.devices.clocks import Clock
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Timeout

T = TypeVar("T")
STEP_DEADLINE_NS = 600_000_000_000
"""How long one `run` may take on the platform's clock before it is an error: 10 minutes."""


class Task(Generic[T]):
    """A coroutine that the loop drives; await it for its result."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._followers: list[Callable[[Task[T]], None]] = []
        self._value: T | None = None
        self.error: BaseException | None = None
        self.done = False
        self.looked = False

    def result(self) -> T:
        """The value once done; raises the task's error, or RuntimeError if it is not done."""
        if not self.done:
            raise RuntimeError("the task has not ended; await it")
        self.looked = True
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]  # None is a value of T when T is None

    def on_done(self, call: Callable[[Task[T]], None]) -> None:
        """Call back when the task ends; at once if it has."""
        if self.done:
            call(self)
        else:
            self._followers.append(call)

    def __await__(self) -> Generator[Task[T], None, T]:
        if not self.done:
            yield self
        return self.result()

    def advance(self) -> Completion | Task[Any] | Alarm | None:
        """Run until the next await; returns what it waits for, None when it has ended."""
        try:
            waiting: Completion | Task[Any] | Alarm = self._coroutine.send(None)
            return waiting
        except StopIteration as stop:
            self._value = stop.value
        except BaseException as error:
            self.error = error
        self.done = True
        followers, self._followers = self._followers, []
        for call in followers:
            call(self)
        return None

    def abandon(self) -> None:
        """Close the coroutine of a run that is over."""
        if not self.done:
            self._coroutine.close()
            self.done = True


class Alarm:
    """Something to await that somebody rings; ringing again does nothing."""

    def __init__(self) -> None:
        self._rung = False
        self._followers: list[Callable[[Alarm], None]] = []

    def ring(self) -> None:
        """Wake whoever waits."""
        self._rung = True
        followers, self._followers = self._followers, []
        for call in followers:
            call(self)

    def on_done(self, call: Callable[[Alarm], None]) -> None:
        """Call back when it rings; at once if it has."""
        if self._rung:
            call(self)
        else:
            self._followers.append(call)

    def __await__(self) -> Generator[Alarm, None, None]:
        if not self._rung:
            yield self


class Loop:
    """Drives tasks on one clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._ready: deque[Task[Any]] = deque()
        self._tasks: list[Task[Any]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        """Start a task beside the others; it may outlive the one that starts it, not the run."""
        task = Task(coroutine)
        self._tasks.append(task)
        self._ready.append(task)
        return task

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_ns: int | None = None) -> T:
        """Drive until the coroutine and every task that was spawned have ended; returns its value.

        Raises the first task's error, or Timeout when the clock reaches the deadline (default: now + 10 minutes).
        """
        if deadline_ns is None:
            deadline_ns = self.clock.now() + STEP_DEADLINE_NS
        main = self.spawn(coroutine)
        try:
            if not self.clock.run_until(self._pump, deadline_ns):
                still = [t for t in self._tasks if not t.done]
                raise Timeout("loop", "run", f"{len(still)} tasks still wait at {deadline_ns} ns of the clock")
            return main.result()
        finally:
            for task in self._tasks:
                task.abandon()
            self._tasks.clear()
            self._ready.clear()

    def _pump(self) -> bool:
        ready, ended = self._ready, False
        while ready:
            task = ready.popleft()
            waiting = task.advance()
            if waiting is not None:
                waiting.on_done(lambda _, t=task: ready.append(t))  # type: ignore[misc]  # t is bound at once
            else:
                ended = True
        if ended:
            failed = [t for t in self._tasks if t.done and t.error is not None and not t.looked]
            if failed:
                failed[0].looked = True
                raise failed[0].error  # type: ignore[misc]  # not None by the line above
            self._tasks = [t for t in self._tasks if not t.done]
        return not self._tasks


async def all_of(waiting: Iterable[Awaitable[Any]]) -> None:
    """Wait for all, whatever becomes of each; raises the first error in the order given."""
    failed: Exception | None = None
    for each in waiting:
        try:
            await each
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


class Places:
    """Numbered places that tasks take and give back; who finds none waits, first come first served. The lowest goes."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._queue: deque[Alarm] = deque()

    async def take(self) -> int:
        """A place, as soon as there is one."""
        while not self._free:
            turn = Alarm()
            self._queue.append(turn)
            await turn
        return heapq.heappop(self._free)

    def give(self, place: int) -> None:
        """The place is free again."""
        heapq.heappush(self._free, place)
        if self._queue:
            self._queue.popleft().ring()


async def let_pass(loop: Loop, ns: int) -> None:
    """Wait for so long on the loop's clock."""
    if ns:
        alarm = Alarm()
        loop.clock.call_at(loop.clock.now() + ns, alarm.ring)
        await alarm


async def yield_to_others(loop: Loop) -> None:
    """Let every task that is ready run until it waits, before whoever awaits this goes on."""
    await loop.spawn(_nothing())


async def _nothing() -> None:
    """Over when the tasks that were ready before have had their turn."""
