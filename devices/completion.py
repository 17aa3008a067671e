"""Completions: what became of a submitted command.

A completion only ever moves forward: submitted → started → done. It says done or not, the error, when it was
submitted, started and ended (ns of the platform's clock), by how much it overran its modelled end, and what was truly
moved and computed. Nothing settles behind the caller's back: completions change on the clock's thread only, while
somebody waits on or polls that clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from tierloop.devices.commands import Command, Traffic
from tierloop.devices.errors import DeviceError

if TYPE_CHECKING:
    from tierloop.devices.queues import QueueSet


class Completion:
    """The state of one command; made by a device's `submit` only.

    Times in ns; -1 means not yet. `flops` counts what the kernel truly computed; `media_nbytes` what the medium truly
    moved (a block device reads whole blocks), 0 where that equals the traffic; `cached_nbytes` of these were read from
    the operating system's page cache instead, as far as is known; `retries` how often it was begun again after a
    failure (wrappers/retried.py), of which the others tell nothing. `after` is empty once the command has
    ended and the site's observers have seen it: a chain of commands must not keep every command before it alive.
    """

    __slots__ = (
        "_followers",
        "_owner",
        "_waiting",
        "after",
        "cached_nbytes",
        "command",
        "device",
        "done",
        "ended_ns",
        "error",
        "flops",
        "held",
        "media_nbytes",
        "order",
        "overrun_ns",
        "queue",
        "retries",
        "started_ns",
        "submitted_ns",
        "traffic",
    )

    def __init__(
        self,
        owner: QueueSet,
        device: str,
        command: Command,
        queue: int,
        submitted_ns: int,
        traffic: Traffic,
        after: tuple[Completion, ...],
    ) -> None:
        self._owner = owner
        self._followers: list[Callable[[Completion], None]] = []
        self._waiting = 0
        self.device = device
        self.command = command
        self.queue = queue
        self.after = after
        self.traffic = traffic
        self.submitted_ns = submitted_ns
        self.started_ns = -1
        self.ended_ns = -1
        self.overrun_ns = 0
        self.flops = 0
        self.media_nbytes = 0
        self.cached_nbytes = 0
        self.retries = 0
        self.done = False
        self.error: DeviceError | None = None
        self.order: Any = None
        """The hazard checker's own mark; None where no checker is on."""
        self.held: Any = None
        """What the wrapper that took the command knows of it (wrappers/around.py); None where a device took it."""

    def result(self) -> Completion:
        """The completion itself once it is done; raises its error, or RuntimeError if it is not done yet.

        Looking at the result is what orders later commands of the host after this one.
        """
        if not self.done:
            raise RuntimeError(f"{self.device}: the command has not completed; wait for it first")
        self._owner.looked(self)
        if self.error is not None:
            raise self.error
        return self

    def on_done(self, call: Callable[[Completion], None]) -> None:
        """Call back on the clock's thread when done; at once if it is done already."""
        if self.done:
            call(self)
        else:
            self._followers.append(call)

    def __await__(self) -> Generator[Completion, None, Completion]:
        if not self.done:
            yield self
        return self.result()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "running" if self.started_ns >= 0 else "queued"
        return f"<{type(self.command).__name__} on {self.device} queue {self.queue}: {state}>"
