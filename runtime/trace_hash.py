"""The hash of a virtual run's trace: one SHA-256 for everything that happened and when.

Under the virtual clock the same seed gives the same hash on any machine, with any number of threads, in any order in
which devices were registered, for runs whose selection does not depend on computed values. A hash that has changed says
that the model (or a profile) says something else than before, and a machine that gives another one is wrong.

What is hashed is text, one line per event, in ASCII; the lines are sorted, so it does not matter in which order events
of one nanosecond were noticed. Times are ns since the hash began. Bytes are by memory, memories by name.

    command DEVICE QUEUE VERB SUBMITTED STARTED ENDED FLOPS ERROR read MEMORY=NBYTES … written MEMORY=NBYTES …
    link NAME DIRECTION START END NBYTES
"""

from __future__ import annotations

import hashlib

from tierloop.devices.commands import Launch, verb
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.site import Occupancy


class TraceHash:
    """Watches a platform from its construction until `end`."""

    def __init__(self, platform: Platform) -> None:
        self._site = platform.site
        self._since = platform.clock.now()
        self._lines: list[str] = []
        self._site.observers.append(self._completed)
        self._site.link_observers.append(self._carried)

    def end(self) -> str:
        """Stop watching; returns the hash, 64 hexadecimal digits. Commands that have not ended are not in it."""
        if self._completed in self._site.observers:
            self._site.observers.remove(self._completed)
            self._site.link_observers.remove(self._carried)
        return hashlib.sha256("".join(sorted(self._lines)).encode("ascii", "backslashreplace")).hexdigest()

    def _completed(self, completion: Completion) -> None:
        command, since, traffic = completion.command, self._since, completion.traffic
        dense = isinstance(command, Launch) and isinstance(command.args, Dense)
        name = command.args.label if dense else verb(command)  # type: ignore[union-attr]
        error = "-" if completion.error is None else type(completion.error).__name__
        read, written = (
            " ".join(f"{memory}={nbytes}" for memory, nbytes in sorted(side.items()))
            for side in (traffic.read, traffic.written)
        )
        self._lines.append(
            f"command {completion.device} {completion.queue} {name!r} {completion.submitted_ns - since} "
            f"{completion.started_ns - since} {completion.ended_ns - since} {completion.flops} {error} "
            f"read {read} written {written}\n"
        )

    def _carried(self, stretch: Occupancy) -> None:
        start, end = stretch.start_ns - self._since, stretch.end_ns - self._since
        self._lines.append(f"link {stretch.link} {stretch.direction} {start} {end} {stretch.nbytes}\n")
