"""Clocks: integer nanoseconds, events in the order (time, sequence), and waits that end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.clocks import VirtualClock, WallClock

CLOCKS = [VirtualClock, WallClock]


def never() -> bool:
    return False


@given(st.lists(st.integers(0, 50), max_size=40))
def test_events_run_in_the_order_of_time_then_registration(times: list[int]) -> None:
    clock = VirtualClock()
    ran: list[tuple[int, int]] = []
    for i, t in enumerate(times):
        clock.call_at(t, lambda t=t, i=i: ran.append((clock.now(), i)))
    clock.wait_until(50)
    assert ran == sorted((t, i) for i, t in enumerate(times))
    assert clock.events == len(times)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20), st.integers(0, 70))
def test_virtual_time_stops_where_the_wait_ends(chains: list[tuple[int, int]], until: int) -> None:
    clock = VirtualClock()
    ran: list[int] = []
    for first, then in chains:
        clock.call_at(first, lambda d=then: clock.call_at(clock.now() + d, lambda: ran.append(clock.now())))
    clock.wait_until(until)
    assert clock.now() == until
    assert sorted(ran) == ran == sorted(a + b for a, b in chains if a + b <= until)


def test_a_virtual_wait_ends_at_the_event_that_it_waits_for() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    for t in (10, 20, 30):
        clock.call_at(t, seen.append, t)
    assert clock.run_until(lambda: 20 in seen, 1_000)
    assert (clock.now(), seen) == (20, [10, 20])


def test_a_virtual_wait_that_fails_ends_at_its_deadline() -> None:
    clock = VirtualClock()
    clock.call_at(101, lambda: None)
    assert not clock.run_until(never, 100)
    assert (clock.now(), clock.events) == (100, 0)


@pytest.mark.parametrize("make", CLOCKS)
def test_a_wait_for_what_is_done_takes_no_time(make: Callable[[], VirtualClock | WallClock]) -> None:
    clock = make()
    assert clock.run_until(lambda: True, 0)
    assert clock.run_until(lambda: True, -5)
    assert not clock.run_until(never, -5)


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.wait_until(100)
    ran: list[int] = []
    clock.call_at(5, lambda: ran.append(clock.now()))
    clock.wait_until(50)
    assert (clock.now(), ran) == (100, [])
    clock.wait_until(100)
    assert ran == [100]


def test_an_event_may_itself_wait() -> None:
    clock = VirtualClock()
    order: list[tuple[str, int]] = []

    def outer() -> None:
        clock.wait_until(40)
        order.append(("outer", clock.now()))

    clock.call_at(10, outer)
    clock.call_at(20, lambda: order.append(("inner", clock.now())))
    clock.call_at(50, lambda: order.append(("later", clock.now())))
    clock.wait_until(60)
    assert order == [("inner", 20), ("outer", 40), ("later", 50)]


@pytest.mark.parametrize("make", CLOCKS)
def test_an_error_of_an_event_reaches_the_waiter_and_the_clock_goes_on(
    make: Callable[[], VirtualClock | WallClock],
) -> None:
    clock = make()
    ran: list[str] = []

    def fail() -> None:
        raise LookupError("an event")

    clock.call_at(0, fail)
    clock.call_at(0, ran.append, "next")
    with pytest.raises(LookupError):
        clock.run_until(lambda: bool(ran), clock.now() + 10_000_000_000)
    assert clock.run_until(lambda: bool(ran), clock.now() + 10_000_000_000)


def test_a_virtual_clock_refuses_threads() -> None:
    with pytest.raises(RuntimeError, match="wall clock"):
        VirtualClock().post(lambda: None)


def test_wall_time_starts_at_zero_and_only_grows() -> None:
    clock = WallClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_wall_wait_is_never_early() -> None:
    clock = WallClock()
    ran: list[int] = []
    for delay in (300_000, 100_000, 0):
        clock.call_at(delay, lambda d=delay: ran.append(clock.now() - d))
    clock.wait_until(400_000)
    assert clock.now() >= 400_000
    assert len(ran) == 3
    assert min(ran) >= 0


def test_a_wall_wait_has_run_everything_that_was_due_by_its_deadline() -> None:
    clock = WallClock()
    ran: list[int] = []
    for t in range(0, 200_000, 1_000):
        clock.call_at(t, ran.append, t)
    clock.wait_until(200_000)
    assert ran == list(range(0, 200_000, 1_000))


def test_events_that_add_events_do_not_outlive_the_deadline() -> None:
    clock = WallClock()
    count = [0]

    def again() -> None:
        count[0] += 1
        clock.call_at(0, again)

    clock.call_at(0, again)
    clock.wait_until(2_000_000)
    assert count[0] > 0


def test_a_thread_that_posts_forever_does_not_keep_a_wait_from_ending() -> None:
    clock = WallClock()

    def again() -> None:
        clock.post(again)

    clock.post(again)
    clock.wait_until(2_000_000)
    assert clock.now() >= 2_000_000


def test_a_post_from_a_thread_wakes_a_wait_and_runs_on_its_thread() -> None:
    clock = WallClock()
    ran_on: list[int] = []
    thread = threading.Thread(target=clock.post, args=(lambda: ran_on.append(threading.get_ident()),))
    thread.start()
    assert clock.run_until(lambda: bool(ran_on), 60_000_000_000)
    thread.join()
    assert ran_on == [threading.get_ident()]


def test_posts_of_many_threads_all_arrive() -> None:
    clock = WallClock()
    got: list[int] = []

    def post_a_hundred(first: int) -> None:
        for i in range(first, first + 100):
            clock.post(got.append, i)

    threads = [threading.Thread(target=post_a_hundred, args=(k * 100,)) for k in range(4)]
    for thread in threads:
        thread.start()
    assert clock.run_until(lambda: len(got) == 400, 60_000_000_000)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(400))
    for k in range(4):
        assert [g for g in got if g // 100 == k] == list(range(k * 100, k * 100 + 100))


def test_the_lateness_histogram_counts_every_event() -> None:
    clock = WallClock()
    for t in (0, 0, 50_000):
        clock.call_at(t, lambda: None)
    clock.wait_until(60_000)
    assert sum(clock.lateness) == clock.events == 3
    assert clock.worst_ns < 1 << (max(k for k, n in enumerate(clock.lateness) if n))
    assert clock.worst_ns <= clock.late_total_ns
