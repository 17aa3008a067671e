"""Retried: a device that carries a command out once more where it has failed in a way that passes.

Whoever handed the command in sees it once, and sees that it took longer: what stands behind it in its queue, or comes
`after` it, waits for the try that counts. A command is begun again `attempts` times at most, `backoff_ns` after it
failed, then after twice as long each time, up to `max_backoff_ns` (left out: 100 times `backoff_ns`, 10 s at most).
Under σ these are multiplied by it. If no try goes through, the command ends with the last error, and its message says
how many tries there were.

What is tried again:

- after a `MediaError`, a `Busy`, and a `Timeout`, if the device works on (where it does not, the Timeout stands);
- of the commands, Read, Write, Copy and Launch, if they read nothing that they write: whatever a try has done before it
  failed, the next one does over again. Any command that the device inside did not take because it was `Busy` is handed
  in again.

What is not:

- A `Flush`. It is about what was written earlier: an operating system that could not write that out may forget it and
  call the next flush good. Whoever flushes has to write again.
- A copy or a kernel in place (spans of one region that it reads and writes, a host buffer in the region's own memory):
  half carried out, it would read its own results.
- A `dense` launch whose function has been called. The function is the host's and may do anything; it is called once.
  Until then nothing can have been written, so such a launch may be in place.
- What `submit` of the device inside raises, but for Busy: a recording that lost a line says so there, and once.
- Anything else: Gone, Unsupported, OutOfRange and Misaligned say the same at every try, Cancelled is about another
  command, and after a ProtocolError nobody knows what was carried out.

A write that failed may have changed the bytes that it names. Nobody may look at them before the command has ended, so
nobody is deceived; what another device does to them meanwhile is the hazard checker's business, as always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

import numpy as np

from tierloop.devices.commands import Command, Flush, Launch, Read, Write, read_segments, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device, Estimate
from tierloop.devices.errors import Busy, ConfigurationError, DeviceError, Gone, MediaError, Timeout, restated
from tierloop.devices.hazards import meet
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import Held
from tierloop.devices.wrappers.deferred import Deferred
from tierloop.devices.wrappers.limits import check_whole

ATTEMPTS = (1, 100)
"""Allowed numbers of further attempts."""
BACKOFFS = (0, 10**10)
"""Allowed pauses in ns: up to 10 s."""
PASSES = (MediaError, Busy, Timeout)
"""Errors that may be gone at the next try."""


class Retried(Deferred):
    """Tries again `attempts` times at most, `backoff_ns` to `max_backoff_ns` after a failure."""

    def __init__(
        self,
        device: Device,
        site: Site,
        attempts: int = 3,
        backoff_ns: int = 100_000,
        max_backoff_ns: int | None = None,
    ) -> None:
        super().__init__(device, site)
        given = {"attempts": attempts, "backoff_ns": backoff_ns}
        if max_backoff_ns is not None:
            given["max_backoff_ns"] = max_backoff_ns
        for name, number in given.items():
            low, high = ATTEMPTS if name == "attempts" else BACKOFFS
            check_whole(f"retried: {name}", number, low, high)
        most = min(100 * backoff_ns, BACKOFFS[1]) if max_backoff_ns is None else max_backoff_ns
        if most < backoff_ns:
            raise ConfigurationError(f"retried: max_backoff_ns {most} is below backoff_ns {backoff_ns}")
        self._attempts = attempts
        self._pauses_ns = [min(backoff_ns << min(tries, 64), most) for tries in range(attempts)]
        self.retries = 0
        """How often a command was begun again so far."""
        self.recovered = 0
        """Commands that ended well after that so far."""
        self.what = f"tried again {attempts} times at most, after {backoff_ns} to {self._pauses_ns[-1]} ns"

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the device inside would need if nothing fails; the margin covers every further attempt."""
        inner = self.inner.estimate(command, queue)
        once = inner.duration_ns + inner.margin_ns
        again = self._attempts * once + sum(self._pauses_ns) * self.info.dilation
        return Estimate(inner.duration_ns, inner.margin_ns + again, f"{inner.source}; {self.what}")

    # -- the way of a command -----------------------------------------------------------------------------------------

    def _begin(self, held: Held) -> None:
        completion = held.completion
        assert completion is not None
        after = self._below(held.note)
        held.note = _Tries(_watched(completion.command), after)
        self._try(held)

    def _try(self, held: Held) -> None:
        """Hand the command to the device inside, unless it is over."""
        completion, tries = held.completion, held.note
        if completion is None or self._closed:
            return
        try:
            inner = self.inner.submit(tries.command, completion.queue, tries.after)
        except DeviceError as error:
            self._failed(held, error, isinstance(error, Busy))
        else:
            held.inner = inner
            inner.on_done(partial(self._returned, held))

    def _settle(self, held: Held) -> None:
        completion, inner = held.completion, held.inner
        assert completion is not None
        assert inner is not None
        completion.retries += inner.retries
        if inner.error is not None:
            passes = isinstance(inner.error, PASSES) and _may_repeat(held.note.command)
            self._failed(held, inner.error, passes)
            return
        if held.note.number:
            self.recovered += 1
        self._conclude(held, None)

    def _failed(self, held: Held, error: DeviceError, passes: bool) -> None:
        """A try came to nothing; `passes` if the next one may go through."""
        completion, tries = held.completion, held.note
        assert completion is not None
        if passes and tries.number < self._attempts:
            pause_ns = self._pauses_ns[tries.number] * self.info.dilation
            tries.number += 1
            tries.error = error
            completion.retries += 1
            self.retries += 1
            self._clock.call_at(self._clock.now() + pause_ns, self._try, held)
            return
        if isinstance(error, Gone) and isinstance(tries.error, Timeout):
            error = tries.error  # the device was lost then, and not by trying again
        self._conclude(held, _told(error, tries.number))

    def _ended(self, held: Held, completion: Completion) -> None:
        held.note = None


@dataclass(slots=True)
class _Tries:
    """A command that is carried out: how often it was begun again, and how the last try but this one failed."""

    command: Command
    after: tuple[Completion, ...]
    number: int = 0
    error: DeviceError | None = None


class _Watched:
    """A function of the host that notes that it was called."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.called = False
        update_wrapper(self, function)

    def __call__(self, *operands: Any) -> None:
        self.called = True
        self._function(*operands)


def _watched(command: Command) -> Command:
    """The command, with a function that knows whether it was called."""
    if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.function is not None:
        return replace(command, args=replace(command.args, function=_Watched(command.args.function)))
    return command


def _may_repeat(command: Command) -> bool:
    """Whether the command may be carried out after it was begun, and perhaps half carried out, before."""
    if isinstance(command, Flush):
        return False
    if isinstance(command, Launch) and isinstance(command.args, Dense):
        function = command.args.function
        return not (isinstance(function, _Watched) and function.called)
    reads, writes = read_segments(command), write_segments(command)
    if isinstance(command, (Read, Write)):
        buffer = command.into if isinstance(command, Read) else command.data
        return not any(r.view is not None and np.may_share_memory(buffer, r.view) for r, _ in (*reads, *writes))
    return not any(a.region is b.region and meet(a.spans, b.spans) for a in reads for b in writes)


def _told(error: DeviceError, number: int) -> DeviceError:
    """The error with the number of attempts in its message."""
    if not number:
        return error
    told = restated(error, error.device, error.op, f"{error.detail}; tried {number + 1} times")
    told.__cause__ = error.__cause__
    return told
