"""The loop: order, errors, deadlines; all on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
import pytest

from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Write
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.null import open_null
from tierloop.devices.errors import Timeout
from tierloop.devices.site import Site
from tierloop.runtime.loop import Loop, Task, all_of


class Sleep:
    """Awaitable: until a time of the clock."""

    def __init__(self, clock: VirtualClock, t_ns: int) -> None:
        self._done = False
        self._calls: list[Callable[[Sleep], None]] = []
        clock.call_at(t_ns, self._end)

    def _end(self) -> None:
        self._done = True
        for call in self._calls:
            call(self)

    def on_done(self, call: Callable[[Sleep], None]) -> None:
        self._calls.append(call)

    def __await__(self) -> Generator[Sleep, None, None]:
        if not self._done:
            yield self


def test_a_value_comes_back() -> None:
    async def main() -> int:
        return 7

    assert Loop(VirtualClock()).run(main()) == 7


def test_tasks_resume_in_the_order_in_which_their_events_come() -> None:
    clock, seen = VirtualClock(), []

    async def wait(name: str, t_ns: int) -> None:
        await Sleep(clock, t_ns)
        seen.append((name, clock.now()))

    async def main() -> None:
        tasks = [loop.spawn(wait("late", 30)), loop.spawn(wait("early", 10)), loop.spawn(wait("middle", 20))]
        await all_of(tasks)

    loop = Loop(clock)
    loop.run(main())
    assert seen == [("early", 10), ("middle", 20), ("late", 30)]


def test_a_run_lasts_until_its_last_task() -> None:
    clock, seen = VirtualClock(), []

    async def background() -> None:
        await Sleep(clock, 100)
        seen.append(clock.now())

    async def main() -> None:
        loop.spawn(background())

    loop = Loop(clock)
    loop.run(main())
    assert seen == [100]


def test_an_error_that_is_awaited_goes_to_who_awaits_it() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def main() -> str:
        try:
            await loop.spawn(fail())
        except KeyError:
            return "caught"
        return "missed"

    loop = Loop(VirtualClock())
    assert loop.run(main()) == "caught"


def test_an_error_that_nobody_awaits_ends_the_run() -> None:
    clock = VirtualClock()

    async def fail() -> None:
        await Sleep(clock, 5)
        raise KeyError("x")

    async def main() -> None:
        loop.spawn(fail())
        await Sleep(clock, 1000)

    loop = Loop(clock)
    with pytest.raises(KeyError):
        loop.run(main())
    assert clock.now() == 5


def test_a_run_that_waits_for_ever_times_out_with_the_number_of_tasks() -> None:
    clock = VirtualClock()

    async def main() -> None:
        await Sleep(clock, 1 << 60)

    with pytest.raises(Timeout, match="1 tasks still wait at 1000 ns"):
        Loop(clock).run(main(), 1000)


def test_a_task_awaits_a_devices_completion() -> None:
    site = Site()
    device = open_null("null", site, {"duration_ns": 250})
    region = device.alloc(16)

    async def main() -> Completion:
        return await device.submit(Write(region.all(), np.zeros(16, dtype=np.uint8)))

    assert Loop(site.clock).run(main()).ended_ns == 250
    device.close()


def test_the_result_of_a_task_that_has_not_ended_is_an_error() -> None:
    async def main() -> None: ...

    task = Task(main())
    with pytest.raises(RuntimeError, match="has not ended"):
        task.result()
    task.abandon()
