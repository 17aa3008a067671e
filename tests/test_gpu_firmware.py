"""The firmware model of a GPU: what is legal, in which order work ends, and how latency grows with load."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.commands import Launch
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.registry import open_platform
from tierloop.devices.waiting import wait
from tierloop.firmware_models.gpu import (
    Copy,
    Finished,
    GpuGeometry,
    GpuState,
    Kernel,
    Refused,
    advance,
    fail,
    finishes,
    give,
    hold,
    idle,
    poison,
    release,
    reset,
    submit,
    take,
    throttle,
)

# One byte per ns through memory, two operations per ns, links of a quarter and an eighth of a byte per ns.
SMALL = GpuGeometry(1000, 10**9, 2 * 10**9, 250 * 10**6, 125 * 10**6, launch_ns=5, copy_ns=10)
FAR = 10**9


def given_works(*works: Copy | Kernel, at: int = 0) -> GpuState:
    state = idle(SMALL)
    for work in works:
        state, _ = submit(state, work, at)
    return state


def ends(state: GpuState) -> dict[int, int]:
    return {done.ticket: done.at_ns for done in finishes(state)}


# Legality


def test_memory_is_finite_and_comes_back() -> None:
    state = take(idle(SMALL), 900)
    with pytest.raises(Refused, match="100 of 1000 are free"):
        take(state, 101)
    assert take(give(state, 300), 400).taken == 1000
    with pytest.raises(Refused, match="900 are taken"):
        give(state, 901)


@pytest.mark.parametrize(
    "work", [Kernel(-1), Kernel(0, -1), Copy("to", -5), Kernel(8, 0, ((996, 8),)), Copy("from", 8, ((-1, 4),))]
)
def test_sizes_and_reads_that_cannot_be_are_refused(work: Copy | Kernel) -> None:
    with pytest.raises(Refused):
        submit(idle(SMALL), work, 0)


def test_time_does_not_run_back() -> None:
    state, _ = advance(idle(SMALL), 50)
    with pytest.raises(Refused, match="time 49"):
        submit(state, Kernel(1), 49)


def test_a_lost_gpu_takes_no_work_until_it_is_reset() -> None:
    state = fail(given_works(Kernel(100)), 20)
    with pytest.raises(Refused, match="fallen off the bus"):
        submit(state, Kernel(1), 30)
    state, ticket = submit(reset(state, 40), Kernel(10), 40)
    assert ends(state)[ticket] == 40 + 5 + 10


def test_what_reads_poisoned_bytes_loses_the_gpu_and_all_that_runs_beside_it() -> None:
    state = poison(given_works(Kernel(10, 0, ((100, 10),)), Copy("to", 1000)), 105, 1)
    state, done = advance(state, FAR)
    assert [(d.ticket, d.at_ns, d.error) for d in done] == [
        (0, 15, "an error in memory that cannot be corrected"),
        (1, 15, "an error in memory that cannot be corrected"),
    ]
    assert state.lost


def test_bytes_beside_the_poisoned_ones_can_be_read() -> None:
    state, done = advance(poison(given_works(Kernel(10, 0, ((100, 10),))), 110, 50), FAR)
    assert done == (Finished(0, 15),)
    assert not state.lost


# History


def test_an_engine_copies_one_after_the_other_and_the_directions_do_not_meet() -> None:
    state = given_works(Copy("to", 100), Copy("to", 50), Copy("from", 100))
    assert ends(state) == {0: 10 + 400, 1: 10 + 400 + 10 + 200, 2: 10 + 800}


def test_while_it_is_held_nothing_is_reported_and_everything_goes_on() -> None:
    state, done = advance(hold(given_works(Kernel(10), Kernel(0, 100))), FAR)
    assert done == ()
    assert finishes(state) == ()
    state, done = advance(release(state), FAR)
    assert [(d.ticket, d.at_ns) for d in done] == [(0, 15), (1, 55)]


def test_a_reset_ends_what_is_under_way_as_lost() -> None:
    state = reset(given_works(Kernel(100), Copy("to", 100)), 20)
    _, done = advance(state, 20)
    assert done == (Finished(0, 20, "reset"), Finished(1, 20, "reset"))


def test_what_has_been_reported_is_not_reported_again() -> None:
    state, first = advance(given_works(Kernel(10)), 100)
    assert len(first) == 1
    assert advance(state, 200)[1] == ()


# Curves


@pytest.mark.parametrize(("nbytes", "flops"), [(0, 0), (1, 0), (1000, 10), (10, 1000), (999, 1998)])
def test_a_kernel_alone_costs_its_roofline(nbytes: int, flops: int) -> None:
    assert ends(given_works(Kernel(nbytes, flops)))[0] == SMALL.roofline_ns(nbytes, flops)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_kernels_of_one_kind_share_and_take_so_many_times_as_long(n: int) -> None:
    assert set(ends(given_works(*[Kernel(100)] * n)).values()) == {5 + 100 * n}
    assert set(ends(given_works(*[Kernel(0, 100)] * n)).values()) == {5 + 50 * n}


def test_one_that_moves_bytes_and_one_that_computes_do_not_disturb_each_other() -> None:
    assert ends(given_works(Kernel(100, 0), Kernel(0, 200))) == {0: 105, 1: 105}


def test_a_later_kernel_moves_the_end_of_an_earlier_one() -> None:
    state = given_works(Kernel(100))
    assert ends(state) == {0: 105}
    state, _ = submit(state, Kernel(20), 50)
    # From 55 on they share: the second ends after 20 bytes at half the rate, the first has lost 20 ns.
    assert ends(state) == {1: 95, 0: 125}


def test_slower_cores_slow_operations_down_and_not_bytes() -> None:
    state = throttle(given_works(Kernel(100, 0), Kernel(0, 100)), 500, 0)
    assert ends(state) == {0: 105, 1: 5 + 100}


def test_the_emulated_gpu_costs_what_the_model_says() -> None:
    with open_platform("demo") as platform:
        gpu = platform.device("emu:gpu")
        memory, cores = gpu.info.memories[0], gpu.info.executors[0]
        path = cores.path(memory.name)
        assert path is not None
        nbytes = 1 << 24
        a, b = gpu.alloc(nbytes, memory.name), gpu.alloc(nbytes, memory.name)
        done = gpu.submit(Launch(Gather(), ((a.all(),),), ((b.all(),),)))
        wait(platform.site.clock, [done], 10**12)
        overhead = gpu.estimate(Launch(Gather(), ((a.at(0, 0),),), ((b.at(0, 0),),))).duration_ns
        geometry = GpuGeometry(memory.capacity, path.read_bytes_per_s, 1, 1, 1, launch_ns=overhead)
        assert abs(done.ended_ns - done.started_ns - geometry.roofline_ns(2 * nbytes, 0)) <= path.latency_ns + 1
        platform.free(a)
        platform.free(b)


# Anything


@st.composite
def works(draw: st.DrawFn) -> Copy | Kernel:
    nbytes = draw(st.integers(-1, 2000))
    reads = tuple(draw(st.lists(st.tuples(st.integers(-2, 1000), st.integers(0, 40)), max_size=2)))
    if draw(st.booleans()):
        return Kernel(nbytes, draw(st.integers(-1, 2000)), reads)
    return Copy(draw(st.sampled_from(["to", "from"])), nbytes, reads)


@given(st.data())
def test_no_event_breaks_it_and_nothing_is_faster_than_its_rates(data: st.DataObject) -> None:
    state, now = idle(SMALL), 0
    submitted: set[int] = set()
    reported: list[Finished] = []
    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.integers(-3, 400))
        try:
            match data.draw(st.sampled_from(["work", "work", "work", "advance", "throttle", "hold", "rare"])):
                case "work":
                    state, ticket = submit(state, data.draw(works()), now)
                    submitted.add(ticket)
                case "advance":
                    state, done = advance(state, now)
                    reported += done
                case "throttle":
                    state = throttle(state, data.draw(st.integers(0, 1001)), now)
                case "hold":
                    state = hold(state) if data.draw(st.booleans()) else release(state)
                case _:
                    rare = data.draw(st.sampled_from(["poison", "fail", "reset", "take", "give"]))
                    size = data.draw(st.integers(-1, 1001))
                    if rare == "poison":
                        state = poison(state, size, 4)
                    elif rare == "fail":
                        state = fail(state, now)
                    elif rare == "reset":
                        state = reset(state, now)
                    else:
                        state = (take if rare == "take" else give)(state, size)
        except Refused:
            continue
        assert 0 <= state.taken <= SMALL.capacity
        for place, rate in (("memory", 10**9), ("to", 250 * 10**6), ("from", 125 * 10**6)):
            assert state.moved.get(place, 0) <= state.now * Fraction(rate, 10**9)
    _, done = advance(release(state), max(now, int(state.now) + 1) + 10**7)
    reported += done
    assert sorted(d.ticket for d in reported) == sorted(submitted), "every ticket ends once"
    assert [d.at_ns for d in reported] == sorted(d.at_ns for d in reported)
