"""HybridGen's feedback scheduler: bounds, the right direction, rest under noise; and the search for the least K."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierloop.runtime.feedback import KINDS, TIMINGS, FeedbackScheduler, Kind, Setting, Times, Timing, find_k_min

GPU_NS = 1_000_000.0


class Machine:
    """host = fixed + per_row · K on a GPU stage of 1 ms, every time off by up to `noise`."""

    def __init__(self, per_row: float, fixed: float = 0.0, select: float = 0.0, noise: float = 0.0, seed: int = 0):
        self.per_row, self.fixed, self.select, self.noise = per_row, fixed, select, noise
        self._random = random.Random(seed)

    def times(self, k: int) -> Times:
        def off() -> float:
            return 1 + self._random.uniform(-self.noise, self.noise)

        host = self.fixed + self.per_row * k
        return Times(GPU_NS * off(), 0.7 * host * off(), 0.3 * host * off(), self.select * off())

    def run(self, scheduler: FeedbackScheduler, calls: int) -> list[Setting]:
        found = []
        for _ in range(calls):
            found.append(scheduler.decide(self.times(scheduler.setting.k)))
        return found


def turns(ks: list[int]) -> int:
    """How often a sequence changes its direction."""
    moves = [b > a for a, b in pairwise(ks) if a != b]
    return sum(a != b for a, b in pairwise(moves))


times = st.floats(0, 1e9)
any_times = st.builds(Times, times, times, times, times)


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 300),
    st.integers(0, 300),
    st.sampled_from([0.2, 0.05, 3.0, 1, 50]),
    st.sampled_from(TIMINGS),
    st.integers(0, 40),
    st.lists(st.tuples(any_times, st.integers(0, 2000)), max_size=12),
)
def test_k_never_leaves_its_bounds_whatever_is_measured(
    kind: Kind,
    k_min: int,
    more: int,
    step: float,
    timing: Timing,
    scan: int,
    measured: list[tuple[Times, int]],
) -> None:
    scheduler = FeedbackScheduler(k_min, 500, k_min + more, timing, kind=kind, step=step, every=1, scan=scan)
    for one, k_max in measured:
        found = scheduler.decide(one, k_max)
        assert min(k_min, k_max) <= found.k <= k_max
        assert found.scan == 0 or found.k <= found.scan < k_max
        assert found == scheduler.setting


@settings(max_examples=60)
@given(
    st.sampled_from(["adaptive", "full", "port"]),
    st.lists(any_times, max_size=12),
    any_times,
    st.floats(1, 100),
)
def test_a_slower_host_never_gets_more_work(kind: Kind, before: list[Times], now: Times, slower: float) -> None:
    fast = FeedbackScheduler(64, 10_000, 512, "prev-select", kind=kind, every=1)
    for one in before:
        fast.decide(one)
    slow = copy.deepcopy(fast)
    quick = fast.decide(now)
    late = slow.decide(Times(now.t_gpu_ns, now.t_cpu_ns * slower, now.t_tx_ns * slower, now.t_select_ns))
    assert TIMINGS.index(late.timing) <= TIMINGS.index(quick.timing)
    assert late.timing != quick.timing or late.k <= quick.k


@settings(max_examples=25)
@given(
    st.sampled_from(["adaptive", "full"]),
    st.sampled_from([0.2, 0.5, 256]),
    st.integers(200, 4000),
    st.floats(0, 0.5),
    st.floats(0, 1),
    st.sampled_from([64, 1000, 8000]),
    st.integers(0, 2**32 - 1),
)
def test_under_noise_k_comes_to_rest_within_one_step(
    kind: Kind, step: float, fitting: int, fixed: float, select: float, k: int, seed: int
) -> None:
    select *= 0.5 - fixed  # a larger part that does not depend on K makes it creep: see the module
    machine = Machine((1 - fixed) * GPU_NS / fitting, fixed * GPU_NS, select * GPU_NS, 0.1, seed)
    scheduler = FeedbackScheduler(64, 100_000, k, kind=kind, step=step)
    rest = [s.k for s in machine.run(scheduler, 1200)[800:]]
    assert max(rest) <= (min(rest) + step if isinstance(step, int) else min(rest) * (1 + step) + 1)
    assert turns(rest) <= 1


@settings(max_examples=25)
@given(st.sampled_from([0.05, 0.2]), st.integers(150, 4000), st.integers(0, 2**32 - 1))
def test_k_rests_where_the_host_takes_about_as_long_as_the_gpu(step: float, fitting: int, seed: int) -> None:
    machine = Machine(GPU_NS / fitting, noise=0.1, seed=seed)
    k = machine.run(FeedbackScheduler(64, 100_000, kind="adaptive", step=step), 1500)[-1].k
    assert fitting / (1 + step) * 0.8 <= k <= fitting * 1.2


def test_without_noise_k_goes_up_to_what_fits_and_no_further() -> None:
    found = Machine(GPU_NS / 1000).run(FeedbackScheduler(64, 100_000, kind="adaptive", every=1), 200)
    ks = [s.k for s in found]
    assert ks == sorted(ks)
    assert 1000 / 1.2 - 1 <= ks[-1] <= 1000


def test_k_falls_when_the_context_grows() -> None:
    scheduler = FeedbackScheduler(64, 4096, kind="adaptive")
    short = Machine(GPU_NS / 2000, noise=0.05).run(scheduler, 400)[-1].k
    longer = Machine(GPU_NS / 2000, fixed=0.6 * GPU_NS, noise=0.05).run(scheduler, 400)[-1].k
    longest = Machine(GPU_NS / 2000, fixed=5 * GPU_NS, noise=0.05).run(scheduler, 400)[-1].k
    assert short > longer > longest == 64


def test_k_follows_the_rows_that_there_are() -> None:
    scheduler = FeedbackScheduler(64, 100, kind="adaptive", every=1)
    idle = Times(GPU_NS, 1.0, 1.0, 0.0)
    assert [scheduler.decide(idle, k_max).k for k_max in (100, 100, 100, 90, 150, 1000, 40)] == [
        77, 92, 100, 90, 120, 144, 40,
    ]  # fmt: skip


def test_the_timing_goes_up_before_k_and_down_before_k() -> None:
    scheduler = FeedbackScheduler(64, 10_000, 1000, kind="full", every=1, smoothing=1.0)
    easy, hard = Times(GPU_NS, 4e5, 0, 1e5), Times(GPU_NS, 2e6, 0, 1e5)
    climbing = [scheduler.decide(easy) for _ in range(3)]
    assert climbing == [Setting(1000, "prev-select"), Setting(1000, "current"), Setting(1200, "current")]
    falling = [scheduler.decide(hard) for _ in range(4)]
    assert falling == [
        Setting(1200, "prev-select"), Setting(1200, "prev"), Setting(1000, "prev"), Setting(833, "prev"),
    ]  # fmt: skip


def test_the_choice_is_made_with_the_true_input_only_where_it_fits() -> None:
    scheduler = FeedbackScheduler(64, 10_000, 1000, kind="full", every=1)
    slow_choice = Times(GPU_NS, 4e5, 0, 7e5)
    assert {scheduler.decide(slow_choice).timing for _ in range(50)} == {"prev-select"}


def test_the_strategy_goes_from_current_to_prev_as_the_host_takes_longer() -> None:
    scheduler = FeedbackScheduler(64, 64, 64, kind="full", timings=("prev", "current"))
    seen = [Machine(0.0, fixed=x * GPU_NS, select=0.2 * GPU_NS, noise=0.05).run(scheduler, 200)[-1] for x in (0.3, 2)]
    assert [s.timing for s in seen] == ["current", "prev"]


def test_an_upgrade_that_costs_more_than_predicted_is_undone_once_and_not_tried_again() -> None:
    scheduler = FeedbackScheduler(64, 64, 64, kind="full", every=1)
    found = []
    for _ in range(300):
        exposed = 3.0 if scheduler.setting.timing == "current" else 1.0  # what the GPU does meanwhile is less there
        found.append(scheduler.decide(Times(GPU_NS / exposed, 5e5, 0, 1e5)).timing)
    assert "current" in found[:10]
    assert set(found[50:]) == {"prev-select"}
    for _ in range(300):
        exposed = 3.0 if scheduler.setting.timing == "current" else 1.0
        found.append(scheduler.decide(Times(5 * GPU_NS / exposed, 5e5, 0, 1e5)).timing)
    assert set(found[-100:]) == {"current"}


def test_a_step_that_does_not_hold_is_not_taken_again_and_again() -> None:
    class Cliff(Machine):
        """Beyond 500 rows the host takes twice as long as predicted: a cache that is full."""

        def times(self, k: int) -> Times:
            one = super().times(k)
            return one if k <= 500 else Times(one.t_gpu_ns, 2 * one.t_cpu_ns, 2 * one.t_tx_ns, 0)

    ks = [s.k for s in Cliff(GPU_NS / 1000, noise=0.03).run(FeedbackScheduler(64, 9000, kind="adaptive"), 1000)]
    assert max(ks) > 500
    assert set(ks[300:]) == {ks[-1]}
    assert 400 < ks[-1] <= 500


def test_fixed_never_changes() -> None:
    scheduler = FeedbackScheduler(64, 5000, 500, "current", kind="fixed", every=1)
    for host in (0.0, 1e3, 1e9):
        assert scheduler.decide(Times(GPU_NS, host, host, host)) == Setting(500, "current")


def test_adaptive_moves_k_and_never_the_timing() -> None:
    scheduler = FeedbackScheduler(64, 5000, 500, "prev-select", kind="adaptive", every=1)
    found = [scheduler.decide(Times(GPU_NS, host, 0, 0)) for host in (0.0, 0.0, 1e9, 1e9, 1e9)]
    assert {s.timing for s in found} == {"prev-select"}
    assert len({s.k for s in found}) > 2


def test_the_rule_of_the_port_multiplies_share_and_scan() -> None:
    scheduler = FeedbackScheduler(10, 1000, 100, kind="port", every=1, smoothing=1.0, scan=500)
    idle, late = Times(GPU_NS, 0, 0, 0), Times(GPU_NS, 2e6, 0, 0)
    found = [scheduler.decide(one) for one in (idle, idle, idle, idle, late, late)]
    assert [s.k for s in found] == [120, 144, 173, 208, 166, 133]
    assert [s.scan for s in found] == [600, 720, 864, 0, 500, 250]
    for _ in range(20):
        scheduler.decide(late)
    assert scheduler.setting == Setting(10, "prev", 32)
    for _ in range(40):
        scheduler.decide(idle)
    assert scheduler.setting == Setting(500, "prev", 0)


def test_the_rule_of_the_port_never_rests() -> None:
    ks = [s.k for s in Machine(GPU_NS / 200).run(FeedbackScheduler(10, 1000, 50, kind="port"), 400)]
    assert turns(ks[200:]) > 5


def test_decisions_come_only_so_often() -> None:
    scheduler = FeedbackScheduler(64, 10_000, kind="adaptive", every=5)
    ks = [scheduler.decide(Times(GPU_NS, 1.0, 0, 0)).k for _ in range(11)]
    assert ks == [64] * 4 + [77] * 5 + [92] * 2


def test_nothing_measured_changes_nothing() -> None:
    scheduler = FeedbackScheduler(64, 1000, 100, every=1)
    assert {scheduler.decide(Times(0, 0, 0, 0)) for _ in range(5)} == {Setting(100, "prev")}


def test_the_same_times_give_the_same_settings() -> None:
    runs = [Machine(900, 2e5, 1e5, 0.1, 7).run(FeedbackScheduler(64, 9000), 300) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"k_min": 0}, "k_min is 0"),
        ({"k_max": -1}, "k_max is -1"),
        ({"k": 63}, "k is 63; allowed: a whole number of at least 64"),
        ({"k": 70.5}, "k is 70.5"),
        ({"kind": "greedy"}, "kind is 'greedy'; allowed: fixed, adaptive, full, port"),
        ({"timing": "next"}, "timing 'next'"),
        ({"timing": "prev", "timings": ("current",)}, "timing 'prev'"),
        ({"timing": "prev", "timings": ("current", "prev")}, "in this order"),
        ({"step": 0.0}, "step is 0.0"),
        ({"step": math.nan}, "step is nan"),
        ({"epsilon": 1.0}, "epsilon 1.0"),
        ({"smoothing": 0.0}, "smoothing 0.0"),
        ({"every": 0}, "every is 0"),
        ({"scan": -1}, "scan is -1"),
        ({"scan_min": 0}, "scan_min is 0"),
        ({"port_shares": (0.5, 0.1)}, "port_shares"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.replace("(", r"\(")):
        FeedbackScheduler(**{"k_min": 64, "k_max": 1000, **changed})


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused_and_change_nothing(wrong: float) -> None:
    scheduler = FeedbackScheduler(64, 1000, every=1)
    with pytest.raises(ValueError, match="at least 0 and finite"):
        scheduler.decide(Times(GPU_NS, 1.0, wrong, 1.0))
    assert scheduler.load == 1


# The least K


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_of_ascending_scores_the_least_k_is_found_in_few_calls(one: int, other: int, wanted: int) -> None:
    low, high = min(one, other), max(one, other)
    wanted = min(max(wanted, low), high)
    asked: list[int] = []

    def score(k: int) -> float:
        asked.append(k)
        return 0.9 if k >= wanted else 0.5

    assert find_k_min(score, 0.92, 0.02001, low, high) == wanted
    assert len(asked) == len(set(asked)) <= math.log2(high - low + 1) + 5


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 20))
def test_where_scores_are_not_ascending_all_that_was_tried_above_is_good(good: list[bool], low: int) -> None:
    asked: list[int] = []

    def score(k: int) -> float:
        asked.append(k)
        return float(good[k - low])

    if not good[-1]:
        with pytest.raises(LookupError, match="rows score 0"):
            find_k_min(score, 1.0, 0.0, low, low + len(good) - 1)
        return
    found = find_k_min(score, 1.0, 0.0, low, low + len(good) - 1)
    assert all(good[k - low] for k in asked if k >= found)
    assert found == low or not good[found - 1 - low]
    assert min(found + 1, low + len(good) - 1) in asked


def test_a_lucky_k_among_bad_ones_is_not_taken() -> None:
    bad = {*range(1, 50), *range(51, 80)}
    assert find_k_min(lambda k: float(k not in bad), 1.0, 0.1, 1, 99) == 80


def test_a_score_that_is_no_number_is_out_of_tolerance() -> None:
    assert find_k_min(lambda k: math.nan if k < 7 else 1.0, 1.0, 0.1, 1, 32) == 7


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "wrong"),
    [(0, 5, 0.1, "low is 0"), (5, 4, 0.1, "high is 4"), (1, 5, -0.1, "tolerance is -0.1"), (1, 5, math.nan, "nan")],
)
def test_a_search_that_cannot_be_is_refused(low: int, high: int, tolerance: float, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        find_k_min(lambda k: 1.0, 1.0, tolerance, low, high)
