"""Queues: order, dependencies, cancellation and unread errors, once for every device.

A device owns a `QueueSet`, gives it a `start` function and calls `finish`. The set starts the head of a queue when
everything that it comes after has ended, one command at a time per queue; queues do not order each other. If a
dependency failed, the command ends as `Cancelled` with that cause and never starts. All of it happens on the clock's
thread: a driver's worker hands its result over with `clock.post`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tierloop.devices.commands import Command, Traffic, verb
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Busy, Cancelled, DeviceError, Gone, OutOfRange

if TYPE_CHECKING:
    from tierloop.devices.site import Site


class QueueSet:
    """The queues of one device. `start(completion)` must not block; the device calls `finish` when it is over."""

    def __init__(
        self, device: str, num_queues: int, depth: int, site: Site, start: Callable[[Completion], None]
    ) -> None:
        self._device = device
        self._depth = depth
        self._site = site
        self._clock = site.clock
        self._start = start
        self._queues: list[deque[Completion]] = [deque() for _ in range(num_queues)]
        self._unread: list[Completion] = []
        self._closed = False

    def submit(self, command: Command, queue: int, after: Sequence[Completion], traffic: Traffic) -> Completion:
        """Queue a command that the device has already checked; start it if nothing stands before it."""
        if self._closed:
            raise Gone(self._device, verb(command), "the device is closed")
        if not 0 <= queue < len(self._queues):
            raise OutOfRange(self._device, verb(command), f"queue {queue}: there are {len(self._queues)}, from 0")
        line = self._queues[queue]
        if len(line) >= self._depth:
            raise Busy(self._device, verb(command), f"queue {queue} holds {self._depth} commands already")
        completion = Completion(self, self._device, command, queue, self._clock.now(), traffic, tuple(after))
        if self._site.checker is not None:
            self._site.checker.submitted(completion)
        for earlier in completion.after:
            if not earlier.done:
                completion._waiting += 1
                earlier._followers.append(partial(self._released, completion))
        line.append(completion)
        if len(line) == 1 and completion._waiting == 0:
            self._begin(completion)
        return completion

    def finish(self, completion: Completion, error: DeviceError | None = None) -> None:
        """End a started command; starts the next of its queue and whatever came after it."""
        completion.ended_ns = self._clock.now()
        completion.error = error
        completion.done = True
        if error is not None:
            self._unread.append(completion)
        line = self._queues[completion.queue]
        assert line[0] is completion, "commands of one queue end in order"
        line.popleft()
        for observe in self._site.observers:
            observe(completion)
        followers, completion._followers = completion._followers, []
        for call in followers:
            call(completion)
        if line and line[0]._waiting == 0 and line[0].started_ns < 0 and not line[0].done:
            self._begin(line[0])

    def looked(self, completion: Completion) -> None:
        """The host has seen how this command ended."""
        if completion.error is not None and completion in self._unread:
            self._unread.remove(completion)
        if self._site.checker is not None:
            self._site.checker.looked(completion)

    @property
    def pending(self) -> int:
        """Commands that have not ended."""
        return sum(len(line) for line in self._queues)

    def close(self) -> None:
        """Refuse new work and end what never started; raises the first error that nobody looked at."""
        if self._closed:
            return
        self._closed = True
        for line in self._queues:
            for completion in list(line):
                completion.error = Gone(self._device, verb(completion.command), "the device was closed first")
                completion.done = True
                completion.ended_ns = self._clock.now()
                followers, completion._followers = completion._followers, []
                for call in followers:
                    call(completion)
            line.clear()
        if self._unread:
            error = self._unread[0].error
            assert error is not None
            self._unread.clear()
            raise error

    def _released(self, completion: Completion, _: Completion) -> None:
        completion._waiting -= 1
        if completion._waiting == 0 and not completion.done and self._queues[completion.queue][0] is completion:
            self._begin(completion)

    def _begin(self, completion: Completion) -> None:
        completion.started_ns = self._clock.now()
        for earlier in completion.after:
            if earlier.error is not None:
                error = Cancelled(
                    self._device, verb(completion.command), f"it came after a command that failed: {earlier.error}"
                )
                error.__cause__ = earlier.error
                earlier._looked = True
                earlier._owner.looked_by_follower(earlier)
                self.finish(completion, error)
                return
        self._start(completion)

    def looked_by_follower(self, completion: Completion) -> None:
        """The failure lives on as the cause of a follower's: it need not be raised at close as well."""
        if completion in self._unread:
            self._unread.remove(completion)
