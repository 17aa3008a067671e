"""One scenario on two clocks: what is compared, and which runs count. No run here is timed by the host's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.timed_device import Bench
from tierloop.devices.completion import Completion
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.tools.tiered_decode import Size
from tierloop.tools.two_clocks import PLATFORM, ChainLateness, ClockRun, TwoClocks, compare_clocks, run_on

SMALL = Size(num_layers=1, num_steps=2, shrink=8)


def host(*late_ns: int) -> Callable[[int], Platform]:
    """Opens platforms whose host ends every command so late, a platform for each number; their clock is virtual."""
    left = list(late_ns)

    def open_late(_: int) -> Platform:
        platform, late = open_platform(PLATFORM, clock="virtual"), left.pop(0)

        def overrun(completion: Completion) -> None:
            completion.overrun_ns = late

        platform.site.observers.append(overrun)
        return platform

    return open_late


def test_a_host_that_is_never_late_agrees_with_the_virtual_clock() -> None:
    found = compare_clocks(wanted=2, open_wall=host(0, 0), size=SMALL)
    assert found.difference_pct == 0
    assert [run.makespan_ns for run in found.wall] == [found.virtual.makespan_ns] * 2
    assert found.virtual.makespan_ns > 0
    assert found.same_output


def test_a_late_run_is_invalid_and_tried_again() -> None:
    found = compare_clocks(tries=5, wanted=2, open_wall=host(0, 50_000, 0), size=SMALL)
    assert [bool(run.invalid) for run in found.wall] == [False, True, False]
    assert len(found.valid) == 2
    assert "late by" in found.wall[1].invalid[0]
    assert found.wall[1].lateness_ns > found.virtual.makespan_ns // 100


def test_after_an_invalid_run_the_next_is_stretched() -> None:
    asked: list[int] = []
    hosts = host(50_000, 50_000, 0, 0)

    def opened(stretch: int) -> Platform:
        asked.append(stretch)
        return hosts(stretch)

    compare_clocks(tries=4, wanted=2, open_wall=opened, size=SMALL)
    assert asked == [1, 2, 4, 4]


def test_a_slow_host_gives_no_number_at_all() -> None:
    found = compare_clocks(tries=3, open_wall=host(50_000, 50_000, 50_000), size=SMALL)
    assert found.difference_pct is None
    assert len(found.wall) == 3


def test_a_broken_promise_makes_a_run_invalid_however_small_its_lateness() -> None:
    def broken(_: int) -> Platform:
        platform = open_platform(PLATFORM, clock="virtual")
        platform.site.invalid.append("the host could not keep a promise")
        return platform

    found = compare_clocks(tries=1, open_wall=broken, size=SMALL)
    assert found.wall[0].invalid == ("the host could not keep a promise",)
    assert found.difference_pct is None


def test_the_difference_is_the_median_over_valid_runs_only() -> None:
    def run(makespan_ns: int, *invalid: str) -> ClockRun:
        return ClockRun(makespan_ns, 0, 1, "bits", invalid)

    found = TwoClocks(run(1000), (run(1010), run(5000, "late"), run(980), run(1030)))
    assert found.difference_pct == pytest.approx(2)


def test_other_bits_are_noticed_in_invalid_runs_too() -> None:
    same = ClockRun(1, 0, 1, "bits", ())
    assert TwoClocks(same, (same,)).same_output
    assert not TwoClocks(same, (same, ClockRun(1, 0, 1, "other bits", ("late",)))).same_output


def test_the_scenario_uses_every_tier_and_is_the_same_every_time() -> None:
    moved: dict[str, int] = {}

    def run() -> ClockRun:
        with open_platform(PLATFORM, clock="virtual", check_hazards=True) as platform:

            def count(completion: Completion) -> None:
                for memory, nbytes in completion.traffic.read.items():
                    moved[memory] = moved.get(memory, 0) + nbytes

            platform.site.observers.append(count)
            return run_on(platform, size=SMALL)

    assert run() == run()
    assert all(moved[f"emu:{name}"] > 2 * 512 * 8 for name in ("gpu", "dram", "cxl", "pnm", "nvme"))


# -- lateness -----------------------------------------------------------------------------------------------------


def chain(late_ns: Sequence[int], after: Sequence[Sequence[int]], queues: Sequence[int]) -> int:
    """The lateness of commands on a device: each late by so much, after these of the others, on these queues."""
    bench = Bench()
    planned: dict[Completion, int] = {}
    bench.site.observers.append(lambda completion: setattr(completion, "overrun_ns", planned[completion]))
    lateness = ChainLateness()
    bench.site.observers.append(lateness)
    completions: list[Completion] = []
    for late, earlier, queue in zip(late_ns, after, queues, strict=True):
        completion = bench.near.submit(bench.copy("near", "near", 10), queue, [completions[i] for i in earlier])
        planned[completion] = late
        completions.append(completion)
    bench.run_to_end(completions)
    return lateness.worst_ns


def test_lateness_adds_up_along_dependencies() -> None:
    assert chain([5, 7, 11], [[], [0], [1]], [0, 1, 0]) == 23


def test_lateness_of_commands_that_do_not_wait_for_each_other_does_not_add_up() -> None:
    assert chain([5, 7], [[], []], [0, 1]) == 7


def test_commands_of_one_queue_wait_for_each_other() -> None:
    assert chain([5, 7], [[], []], [0, 0]) == 12


def test_the_worst_of_several_dependencies_counts() -> None:
    assert chain([5, 70, 1], [[], [], [0, 1]], [0, 1, 0]) == 71
