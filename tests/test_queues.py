"""Queues: order, dependencies, cancellation and unread errors, with exact times on the virtual clock."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.commands import Read, Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Busy, Cancelled, DeviceError, Gone, MediaError, OutOfRange, ProtocolError
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


class Timed:
    """Queues whose commands take as long as they are told to; 0 ends a command within its start."""

    def __init__(self, site: Site, name: str = "d", num_queues: int = 2, depth: int = 64) -> None:
        self.site = site
        self.name = name
        self.queues = QueueSet(name, num_queues, depth, site, self._start)
        self.region = Region(name, name, 1, 64)
        self.started: list[Completion] = []
        self._plans: dict[int, tuple[int, DeviceError | None]] = {}

    def submit(
        self, duration_ns: int = 0, queue: int = 0, after: tuple[Completion, ...] = (), error: DeviceError | None = None
    ) -> Completion:
        command = Read(self.region.all(), np.zeros(64, dtype=np.uint8))
        self._plans[id(command)] = (duration_ns, error)
        return self.queues.submit(command, queue, after, Traffic(command))

    def _start(self, completion: Completion) -> None:
        self.started.append(completion)
        duration_ns, error = self._plans.pop(id(completion.command))
        if duration_ns:
            clock = self.site.clock
            clock.call_at(clock.now() + duration_ns, self.queues.finish, completion, error)
        else:
            self.queues.finish(completion, error)


def broken(name: str = "d") -> MediaError:
    return MediaError(name, "read", "the medium is worn out")


def times(*completions: Completion) -> list[tuple[int, int, int]]:
    return [(c.submitted_ns, c.started_ns, c.ended_ns) for c in completions]


def test_commands_of_one_queue_run_one_after_the_other() -> None:
    site = Site()
    device = Timed(site)
    a, b, c = (device.submit(d) for d in (100, 50, 7))
    assert device.queues.pending == 3
    site.clock.wait_until(1_000)
    assert times(a, b, c) == [(0, 0, 100), (0, 100, 150), (0, 150, 157)]
    assert device.queues.pending == 0


def test_queues_do_not_order_each_other() -> None:
    site = Site()
    device = Timed(site)
    slow, fast = device.submit(100, queue=0), device.submit(10, queue=1)
    site.clock.wait_until(1_000)
    assert times(slow, fast) == [(0, 0, 100), (0, 0, 10)]


def test_after_orders_across_queues_and_devices() -> None:
    site = Site()
    here, there = Timed(site, "here"), Timed(site, "there")
    a = here.submit(100)
    b = there.submit(10, after=(a,))
    c = here.submit(5, queue=1, after=(a, b))
    site.clock.wait_until(1_000)
    assert times(a, b, c) == [(0, 0, 100), (0, 100, 110), (0, 110, 115)]


def test_a_command_that_waits_holds_back_its_queue() -> None:
    site = Site()
    here, there = Timed(site, "here"), Timed(site, "there")
    slow = there.submit(100)
    held, behind = here.submit(10, after=(slow,)), here.submit(10)
    site.clock.wait_until(1_000)
    assert times(held, behind) == [(0, 100, 110), (0, 110, 120)]


def test_after_something_that_has_ended_starts_at_once() -> None:
    site = Site()
    device = Timed(site)
    early = device.submit(10)
    site.clock.wait_until(50)
    assert times(device.submit(0, after=(early, early))) == [(50, 50, 50)]


def test_naming_one_completion_twice_waits_for_it_once() -> None:
    site = Site()
    device = Timed(site)
    a = device.submit(30)
    b = device.submit(0, queue=1, after=(a, a, a))
    site.clock.wait_until(30)
    assert times(b) == [(0, 30, 30)]


def test_submit_does_not_let_time_pass_and_starts_nothing_twice() -> None:
    site = Site()
    device = Timed(site)
    made = [device.submit(10, queue=i % 2) for i in range(8)]
    assert site.clock.now() == 0
    assert not any(c.done for c in made)
    site.clock.wait_until(1_000)
    assert sorted(map(id, device.started)) == sorted(map(id, made))


def test_a_failed_dependency_cancels_with_the_failure_as_the_cause() -> None:
    site = Site()
    here, there = Timed(site, "here"), Timed(site, "there")
    failure = broken("there")
    a = there.submit(10, error=failure)
    b = here.submit(10, after=(a,))
    c = here.submit(10, queue=1, after=(b,))
    free = here.submit(5)
    site.clock.wait_until(1_000)
    for completion in (b, c):
        assert isinstance(completion.error, Cancelled)
        assert completion.error.__cause__ is failure
        assert completion.error.device == "here"
        assert completion not in here.started
        assert completion.ended_ns == 10
    assert free.error is None
    assert times(free) == [(0, 10, 15)]


def test_coming_after_a_failure_that_has_ended_cancels_too() -> None:
    site = Site()
    device = Timed(site)
    a = device.submit(error=broken())
    with pytest.raises(MediaError):
        a.result()
    b = device.submit(10, after=(a,))
    assert isinstance(b.error, Cancelled)


@pytest.mark.parametrize("num_queues", [1, 3])
def test_a_chain_of_any_length_is_cancelled_without_recursion(num_queues: int) -> None:
    site = Site()
    devices = [Timed(site, name, num_queues, depth=5_000) for name in ("a", "b")]
    first = last = devices[0].submit(10, error=broken("a"))
    chain = []
    for i in range(4_000):
        last = devices[i % 2].submit(1, i % num_queues, (last,))
        chain.append(last)
    site.clock.wait_until(10)
    assert all(isinstance(c.error, Cancelled) and c.error.__cause__ is first.error for c in chain)
    assert len(str(chain[-1].error)) < 200


def test_a_queue_of_any_length_that_ends_at_once_does_so_without_recursion() -> None:
    site = Site()
    device = Timed(site, depth=5_000)
    gate = Timed(site, "gate")
    held = [device.submit(after=(gate.submit(10),))] + [device.submit() for _ in range(4_000)]
    last = device.submit(queue=1, after=tuple(held))
    site.clock.wait_until(10)
    assert last.done
    assert [c.ended_ns for c in held] == [10] * 4_001


def test_a_full_queue_is_busy_and_has_room_again_later() -> None:
    site = Site()
    device = Timed(site, depth=2)
    device.submit(10), device.submit(10)
    with pytest.raises(Busy, match="queue 0 holds 2"):
        device.submit(10)
    other = device.submit(10, queue=1)
    site.clock.wait_until(10)
    assert other.done
    assert device.submit(10).submitted_ns == 10


@pytest.mark.parametrize("queue", [-1, 2, 99])
def test_a_queue_that_does_not_exist_is_out_of_range(queue: int) -> None:
    with pytest.raises(OutOfRange, match=f"queue {queue}"):
        Timed(Site()).submit(queue=queue)


def test_an_error_that_nobody_looked_at_is_raised_at_close() -> None:
    site = Site()
    device = Timed(site)
    first, second = broken(), ProtocolError("d", "read", "later")
    device.submit(error=first)
    device.submit(error=second)
    with pytest.raises(MediaError) as caught:
        device.queues.close()
    assert caught.value is first
    device.queues.close()


def test_an_error_that_was_looked_at_is_not_raised_again() -> None:
    device = Timed(Site())
    completion = device.submit(error=broken())
    for _ in range(2):
        with pytest.raises(MediaError):
            completion.result()
    device.queues.close()


def test_a_failure_that_lives_on_in_a_follower_is_raised_once() -> None:
    site = Site()
    here, there = Timed(site, "here"), Timed(site, "there")
    there_failed = there.submit(error=broken("there"))
    follower = here.submit(after=(there_failed,))
    there.queues.close()
    with pytest.raises(Cancelled) as caught:
        here.queues.close()
    assert caught.value is follower.error


def test_a_device_error_of_start_ends_the_command() -> None:
    site = Site()

    def start(completion: Completion) -> None:
        raise Gone("d", "read", "unplugged")

    queues = QueueSet("d", 1, 8, site, start)
    region = Region("d", "d", 1, 8)
    command = Read(region.all(), np.zeros(8, dtype=np.uint8))
    completion = queues.submit(command, 0, (), Traffic(command))
    assert isinstance(completion.error, Gone)
    with pytest.raises(Gone, match="unplugged"):
        completion.result()
    assert queues.pending == 0


def test_closing_ends_everything_as_gone_and_starts_nothing() -> None:
    site = Site()
    here, there = Timed(site, "here"), Timed(site, "there")
    running = here.submit(100)
    behind = here.submit(100)
    released = here.submit(100, queue=1, after=(running,))
    next_in_line = here.submit(100, queue=1)
    elsewhere = there.submit(100, after=(running,))
    site.clock.wait_until(30)
    here.queues.close()
    for completion in (running, behind, released, next_in_line):
        assert completion.done
        assert isinstance(completion.error, Gone)
        assert completion.ended_ns == 30
    assert here.started == [running]
    assert isinstance(elsewhere.error, Cancelled)
    assert elsewhere.error.__cause__ is running.error
    assert here.queues.pending == 0


def test_what_a_device_finishes_after_close_is_ignored() -> None:
    site = Site()
    device = Timed(site)
    running = device.submit(100)
    device.queues.close()
    site.clock.wait_until(200)
    assert isinstance(running.error, Gone)
    assert running.ended_ns == 0


def test_a_closed_device_is_gone() -> None:
    device = Timed(Site())
    device.queues.close()
    with pytest.raises(Gone, match="closed"):
        device.submit()


@dataclass
class Seen:
    """What an observer and a callback noticed, in order."""

    lines: list[str] = field(default_factory=list)

    def note(self, what: str, completion: Completion) -> None:
        self.lines.append(f"{what} {completion.device} at {completion.ended_ns}, after {len(completion.after)}")


def test_observers_see_every_end_before_the_followers_do() -> None:
    seen = Seen()
    site = Site(observers=[partial(seen.note, "observer")])
    device = Timed(site)
    a = device.submit(10)
    b = device.submit(10, after=(a,))
    b.on_done(partial(seen.note, "follower"))
    device.submit(100, after=(b,))
    site.clock.wait_until(50)
    device.queues.close()
    assert seen.lines == [
        "observer d at 10, after 0",
        "observer d at 20, after 1",
        "follower d at 20, after 0",
        "observer d at 50, after 1",
    ]


def test_a_callback_may_submit_and_on_a_command_that_is_done_runs_at_once() -> None:
    site = Site()
    device = Timed(site)
    made: list[Completion] = []
    a = device.submit(10)
    a.on_done(lambda _: made.append(device.submit(5)))
    site.clock.wait_until(100)
    assert times(*made) == [(10, 10, 15)]
    a.on_done(lambda _: made.append(device.submit(5)))
    assert len(made) == 2


def test_a_callback_that_fails_does_not_stop_the_queue() -> None:
    site = Site()
    device = Timed(site)
    a = device.submit(10)
    heard: list[str] = []

    def fail(_: Completion) -> None:
        raise LookupError("a bug of the caller")

    a.on_done(fail)
    a.on_done(lambda _: heard.append("the next callback"))
    b = device.submit(10)
    with pytest.raises(LookupError):
        site.clock.wait_until(100)
    site.clock.wait_until(100)
    assert heard == ["the next callback"]
    assert times(b) == [(0, 10, 20)]


def test_a_result_is_there_when_the_command_is_done_and_not_before() -> None:
    site = Site()
    device = Timed(site)
    completion = device.submit(10)
    with pytest.raises(RuntimeError, match="wait for it first"):
        completion.result()
    assert repr(completion) == "<Read on d queue 0: running>"
    assert repr(device.submit(10)) == "<Read on d queue 0: queued>"
    site.clock.wait_until(10)
    assert completion.result() is completion
    assert repr(completion) == "<Read on d queue 0: done>"


def test_a_completion_can_be_awaited() -> None:
    site = Site()
    device = Timed(site)
    completion = device.submit(10)

    async def use() -> int:
        return (await completion).ended_ns

    coroutine = use()
    assert coroutine.send(None) is completion
    site.clock.wait_until(10)
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value == 10


def test_a_long_chain_does_not_keep_its_beginning_alive() -> None:
    site = Site()
    device = Timed(site)
    first = last = device.submit(1)
    buffer = weakref.ref(first.command.into)  # type: ignore[union-attr]  # a Read
    device.started.clear()
    for _ in range(5):
        last = device.submit(1, after=(last,))
    site.clock.wait_until(100)
    device.started.clear()
    del first
    gc.collect()
    assert buffer() is None
    assert last.done


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, int, list[int], bool]]:
    """Commands as (device, queue, duration, indices of earlier commands to come after, fails)."""
    program: list[tuple[int, int, int, list[int], bool]] = []
    for i in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        program.append(
            (draw(st.integers(0, 1)), draw(st.integers(0, 1)), draw(st.integers(0, 9)), after, draw(st.booleans()))
        )
    return program


@given(programs())
def test_any_program_runs_as_the_rules_say(program: list[tuple[int, int, int, list[int], bool]]) -> None:
    site = Site()
    devices = [Timed(site, "a"), Timed(site, "b")]
    made: list[Completion] = []
    for device, queue, duration, after, fails in program:
        error = broken() if fails else None
        made.append(devices[device].submit(duration, queue, tuple(made[i] for i in after), error))
    site.clock.wait_until(1_000)
    ends: list[int] = []
    failed: list[str] = []
    line: dict[tuple[int, int], int] = {}
    for device, queue, duration, after, fails in program:
        start = max([line.get((device, queue), 0), *(ends[i] for i in after)])
        cancelled = any(failed[i] for i in after)
        ends.append(start if cancelled else start + duration)
        failed.append("Cancelled" if cancelled else "MediaError" if fails else "")
        line[device, queue] = ends[-1]
    assert [c.ended_ns for c in made] == ends
    assert [type(c.error).__name__ if c.error else "" for c in made] == failed
    for c, (_, _, duration, _, _) in zip(made, program, strict=True):
        assert c.started_ns == c.ended_ns - (0 if isinstance(c.error, Cancelled) else duration)
