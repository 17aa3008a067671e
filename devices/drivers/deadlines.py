"""A blocking system call with a deadline: the call runs in a thread of its own, the caller waits for so long only.

`pread`, `fallocate` and `fdatasync` of a hung device never return and cannot be interrupted. The thread that hangs in
one is a daemon: it is left behind, with everything that the kernel may still write to, and the caller goes on.

Where a limit allows no further thread, the call is not made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierloop.devices.threads import begin

_LOOKS = 8
"""How often progress is looked at within a deadline: what stops right after a look is noticed an eighth later."""


class Stuck(Exception):
    """The call did not come back in time. It may still move bytes: nothing it was given may be used again."""


def within(deadline_s: float, call: Callable[[], object], progress: Callable[[], int] = lambda: 0) -> None:
    """Run `call()` and wait for its end; raises what it raised.

    Raises NoThread, and Stuck if it neither ends nor makes `progress()` (a number that changes) for deadline_s seconds.
    Costs one thread, about 60 µs.
    """
    over = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            over.set()

    begin(threading.Thread(target=run, name="tierloop-call", daemon=True))
    before, still = progress(), 0
    while not over.wait(deadline_s / _LOOKS):
        now = progress()
        still = still + 1 if now == before else 0
        if still == _LOOKS:
            raise Stuck(f"no progress for {deadline_s:g} s")
        before = now
    if raised:
        raise raised[0]
