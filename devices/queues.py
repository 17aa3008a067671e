"""Queues: order, dependencies, cancellation and unread errors, once for every device.

A device owns a `QueueSet`, gives it a `start` function and calls `finish`. The set starts the head of a queue when
everything that it comes after has ended, one command at a time per queue; queues do not order each other. If a
dependency failed, the command ends as `Cancelled` with that cause and never starts. All of it happens on the clock's
thread: a driver's worker hands its result over with `clock.post`.

A device whose hardware orders commands by itself says so with `handed`: what comes after such a command on the same
device is then begun before it has ended, and the device takes care of the order. Ends are in order all the same.

Ends are settled one after the other over the whole site, never one inside the other: a chain of any length, over any
number of devices, may be cancelled or end at once without deep recursion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tierloop.devices.commands import Command, Traffic, segments, verb
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Busy, Cancelled, DeviceError, Gone, OutOfRange

if TYPE_CHECKING:
    from tierloop.devices.regions import Region
    from tierloop.devices.site import Site


class QueueSet:
    """The queues of one device. `start(completion)` must not block; the device calls `finish` when it is over.

    A DeviceError that `start` raises ends the command.
    """

    def __init__(
        self, device: str, num_queues: int, depth: int, site: Site, start: Callable[[Completion], None]
    ) -> None:
        self._device = device
        self._depth = depth
        self._site = site
        self._clock = site.clock
        self._start = start
        self._queues: list[deque[Completion]] = [deque() for _ in range(num_queues)]
        self._unread: dict[Completion, DeviceError] = {}
        self._handed: set[Completion] = set()
        self._num_handed = [0] * num_queues  # those are always the first of their queue
        self._closed = False

    def submit(self, command: Command, queue: int, after: Sequence[Completion], traffic: Traffic) -> Completion:
        """Queue a command that the device has already checked; start it if nothing stands before it."""
        if self._closed:
            raise Gone(self._device, verb(command), "the device is closed")
        if not 0 <= queue < len(self._queues):
            raise OutOfRange(self._device, verb(command), f"queue {queue}: there are {len(self._queues)}, from 0")
        line = self._queues[queue]
        ahead = len(line)
        if ahead >= self._depth:
            raise Busy(self._device, verb(command), f"queue {queue} holds {self._depth} commands already")
        completion = Completion(self, self._device, command, queue, self._clock.now(), traffic, tuple(after))
        if self._site.checker is not None:
            self._site.checker.submitted(completion)
        waiting = 0
        for earlier in completion.after:
            if not earlier.done and earlier not in self._handed:
                waiting += 1
                earlier._followers.append(partial(self._released, completion))
        completion._waiting = waiting
        line.append(completion)
        for observe in self._site.arrivals:
            observe(completion)
        if not waiting and (not ahead or self._may_begin(completion)):
            self._begin(completion)
        return completion

    def handed(self, completion: Completion) -> None:
        """The hardware has all of a started command and orders what comes after it: begin that, on this device.

        Nothing may go wrong with the command any more but the loss of the whole device.
        """
        if self._closed or completion.done:
            return
        self._handed.add(completion)
        self._num_handed[completion.queue] += 1
        mine = [call for call in completion._followers if getattr(call, "func", None) == self._released]
        if mine:
            completion._followers = [call for call in completion._followers if call not in mine]
        for call in (*mine, self._next):
            self._site.followers.append((call, completion))
        if not self._site.settling:
            self._settle()

    def finish(self, completion: Completion, error: DeviceError | None = None) -> None:
        """End a started command; starts the next of its queue and whatever came after it.

        After `close` it does nothing: closing has ended the command already.
        """
        if self._closed:
            return
        line = self._queues[completion.queue]
        assert line[0] is completion, "commands of one queue end in order"
        line.popleft()
        if completion in self._handed:
            self._handed.remove(completion)
            self._num_handed[completion.queue] -= 1
        if error is not None:
            self._unread[completion] = error
        self._end(completion, error)
        site = self._site
        if line and not line[0]._waiting:
            site.followers.append((self._next, completion))
        if site.followers and not site.settling:
            self._settle()

    def looked(self, completion: Completion) -> None:
        """The host has seen how this command ended."""
        self._unread.pop(completion, None)
        if self._site.checker is not None:
            self._site.checker.looked(completion)

    @property
    def pending(self) -> int:
        """Commands that have not ended."""
        return sum(len(line) for line in self._queues)

    def uses(self, region: Region) -> bool:
        """Whether a command that has not ended names the region."""
        return any(r is region for line in self._queues for c in line for r, _ in segments(c.command))

    def close(self) -> None:
        """Refuse new work and end what has not ended as Gone; raises the first error that nobody looked at."""
        if self._closed:
            return
        self._closed = True
        still = [completion for line in self._queues for completion in line]
        self._handed.clear()
        self._num_handed = [0] * len(self._queues)
        for line in self._queues:
            line.clear()
        for completion in still:  # all of them before anybody is told, so that none is begun as a follower
            completion.done = True
        for completion in still:
            self._end(completion, Gone(self._device, verb(completion.command), "the device was closed first"))
        self._settle()
        unread, self._unread = list(self._unread.values()), {}
        if unread:
            raise unread[0]

    def _end(self, completion: Completion, error: DeviceError | None) -> None:
        completion.ended_ns = now = self._clock.now()
        if completion.started_ns < 0:
            completion.started_ns = now
        completion.error = error
        completion.done = True
        site = self._site
        for observe in site.observers:
            observe(completion)
        completion.after = ()
        calls = completion._followers
        if calls:
            for call in calls:
                site.followers.append((call, completion))
            calls.clear()

    def _settle(self) -> None:
        """Tell whoever waits for what has ended, unless a call further out is at it; raises the first of its errors."""
        site = self._site
        if site.settling or not site.followers:
            return
        site.settling = True
        failures: list[Exception] = []
        try:
            while site.followers:
                call, completion = site.followers.popleft()
                try:
                    call(completion)
                except Exception as failure:
                    failures.append(failure)
        finally:
            site.settling = False
        if failures:
            raise failures[0]

    def _next(self, ended: Completion) -> None:
        line, first = self._queues[ended.queue], self._num_handed[ended.queue]
        if len(line) > first:
            completion = line[first]
            if completion.started_ns < 0 and completion._waiting == 0 and self._may_begin(completion):
                self._begin(completion)

    def _may_begin(self, completion: Completion) -> bool:
        """Whether all that stand before it in its queue are with the hardware; what is to be cancelled comes first."""
        first = self._num_handed[completion.queue]
        if self._queues[completion.queue][first] is not completion:
            return False
        return first == 0 or all(earlier.error is None for earlier in completion.after)

    def _released(self, completion: Completion, _: Completion) -> None:
        completion._waiting -= 1
        if completion._waiting == 0 and not completion.done and self._may_begin(completion):
            self._begin(completion)

    def _begin(self, completion: Completion) -> None:
        completion.started_ns = self._clock.now()
        for earlier in completion.after:
            if earlier.error is not None:
                cause = earlier.error
                if isinstance(cause, Cancelled) and isinstance(cause.__cause__, DeviceError):
                    cause = cause.__cause__  # the failure at the head: not a message that grows along a chain
                error = Cancelled(
                    self._device, verb(completion.command), f"it came after a command that failed: {cause}"
                )
                error.__cause__ = cause
                earlier._owner.looked_by_follower(earlier)
                self.finish(completion, error)
                return
        try:
            self._start(completion)
        except DeviceError as error:
            self.finish(completion, error)

    def looked_by_follower(self, completion: Completion) -> None:
        """The failure lives on as the cause of a follower's: it need not be raised at close as well."""
        self._unread.pop(completion, None)
