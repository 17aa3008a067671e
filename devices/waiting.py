"""Conveniences on top of the device contract: wait with a deadline, and blocking reads and writes of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.errors import DeviceError, Timeout
from tierloop.devices.regions import Segment

DEADLINE_NS = 60_000_000_000
"""How long a wait lasts when the caller does not say: 60 s of the platform's clock."""


def wait(clock: Clock, completions: Completion | Iterable[Completion], deadline_ns: int | None = None) -> None:
    """Wait until all have ended; raises the first error among them, or Timeout naming what is still open.

    `deadline_ns` is a time on the clock (default: now + 60 s). Unless it was a Timeout, all of them count as looked at.
    """
    pending = [completions] if isinstance(completions, Completion) else list(completions)
    if deadline_ns is None:
        deadline_ns = clock.now() + DEADLINE_NS
    still = pending[::-1]

    def done() -> bool:
        while still and still[-1].done:
            still.pop()
        return not still

    if not clock.run_until(done, deadline_ns):
        late = [c for c in pending if not c.done]
        raise Timeout(
            late[0].device, "wait", f"{len(late)} of {len(pending)} commands open at {deadline_ns} ns: {late[0]}"
        )
    errors: list[DeviceError] = []
    for completion in pending:
        try:
            completion.result()
        except DeviceError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def write_bytes(
    clock: Clock,
    device: Device,
    target: Segment,
    data: NDArray[np.uint8] | bytes,
    queue: int = 0,
    after: Sequence[Completion] = (),
) -> None:
    """Write bytes to a segment and wait for it."""
    array = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    wait(clock, device.submit(Write(target, array), queue, after))


def read_bytes(
    clock: Clock, device: Device, source: Segment, queue: int = 0, after: Sequence[Completion] = ()
) -> NDArray[np.uint8]:
    """Read a segment's bytes and wait for them: uint8 (n,)."""
    into = np.empty(source.spans.nbytes, dtype=np.uint8)
    wait(clock, device.submit(Read(source, into), queue, after))
    return into
