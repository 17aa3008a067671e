"""The ledger counts bytes where they lie, and time as unions that never exceed what has passed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timed_device import Bench
from tierloop.devices.commands import Flush, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError, MediaError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait
from tierloop.runtime.ledger import Intervals


def test_bytes_count_where_they_lie() -> None:
    bench = Bench()
    wait(bench.site.clock, bench.near.submit(bench.copy("far", "near", 70)))
    devices = bench.ledger.snapshot()[0]
    assert (devices["far"].bytes_read, devices["far"].bytes_written) == (70, 0)
    assert (devices["near"].bytes_read, devices["near"].bytes_written) == (0, 70)
    assert (devices["near"].commands, devices["far"].commands) == (1, 0)


def test_a_memory_is_busy_while_another_device_uses_it() -> None:
    bench = Bench()
    wait(bench.site.clock, bench.near.submit(bench.copy("far", "near", 70)))
    devices = bench.ledger.snapshot()[0]
    assert devices["far"].busy_ns == 70
    assert devices["near"].busy_ns == 70


def test_overlapping_commands_are_busy_once() -> None:
    bench = Bench()
    first = bench.near.submit(bench.copy("near", "near", 100), queue=0)
    second = bench.near.submit(bench.copy("near", "near", 60), queue=1)
    wait(bench.site.clock, [first, second])
    assert bench.ledger.snapshot()[0]["near"].busy_ns == 100


def test_waiting_for_another_device_is_stall() -> None:
    bench = Bench()
    slow = bench.far.submit(bench.copy("far", "far", 100))
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 30), after=[slow]))
    use = bench.ledger.snapshot()[0]["near"]
    assert (use.stall_ns, use.busy_ns) == (100, 30)


def test_waiting_while_another_queue_is_busy_is_no_stall() -> None:
    bench = Bench()
    slow = bench.far.submit(bench.copy("far", "far", 100))
    bench.near.submit(bench.copy("near", "near", 40), queue=1)
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 30), queue=0, after=[slow]))
    use = bench.ledger.snapshot()[0]["near"]
    assert (use.stall_ns, use.busy_ns) == (60, 70)


def test_a_command_behind_another_in_its_queue_waits_from_the_end_of_that_one() -> None:
    bench = Bench()
    slow = bench.far.submit(bench.copy("far", "far", 100))
    bench.near.submit(bench.copy("near", "near", 40))
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 30), after=[slow]))
    assert bench.ledger.snapshot()[0]["near"].stall_ns == 60


def test_a_command_that_comes_after_nothing_never_stalls() -> None:
    bench = Bench()
    for _ in range(3):
        wait(bench.site.clock, bench.near.submit(bench.copy("near", "far", 10)))
    assert [use.stall_ns for use in bench.ledger.snapshot()[0].values()] == [0, 0]


def test_reset_begins_a_new_account() -> None:
    bench = Bench()
    wait(bench.site.clock, bench.near.submit(bench.copy("far", "near", 70)))
    bench.ledger.reset()
    assert bench.ledger.elapsed_ns == 0
    assert all(use.commands == use.bytes_read == use.busy_ns == 0 for use in bench.ledger.snapshot()[0].values())


def test_a_command_under_way_at_reset_counts_its_time_from_there() -> None:
    bench = Bench()
    running = bench.near.submit(bench.copy("near", "near", 100))
    bench.site.clock.wait_until(30)
    bench.ledger.reset()
    wait(bench.site.clock, running)
    use = bench.ledger.snapshot()[0]["near"]
    assert use.busy_ns == bench.ledger.elapsed_ns == 70
    assert use.bytes_read == 100


def test_a_failed_command_moves_no_counted_bytes() -> None:
    bench = Bench()
    bench.near.failing = True
    failed = bench.near.submit(bench.copy("far", "near", 50))
    with pytest.raises(MediaError):
        wait(bench.site.clock, failed)
    use = bench.ledger.snapshot()[0]["near"]
    assert (use.commands, use.bytes_written, use.busy_ns) == (1, 0, 50)


def test_a_cancelled_command_is_not_counted() -> None:
    bench = Bench()
    bench.near.failing = True
    failed = bench.near.submit(bench.copy("far", "near", 50))
    follower = bench.far.submit(bench.copy("far", "far", 50), after=[failed])
    with pytest.raises(DeviceError):
        wait(bench.site.clock, follower)
    assert bench.ledger.snapshot()[0]["far"].commands == 0


def test_a_block_device_reports_what_its_medium_moved() -> None:
    bench = Bench()
    bench.near.media_nbytes = 4096
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "far", 256)))
    devices = bench.ledger.snapshot()[0]
    assert (devices["near"].bytes_read, devices["near"].media_bytes) == (256, 4096)
    assert devices["far"].media_bytes == 256


def test_what_came_from_the_page_cache_is_reported_beside_it() -> None:
    bench = Bench()
    bench.near.media_nbytes, bench.near.cached_nbytes = 8192, 4096
    for _ in range(2):
        wait(bench.site.clock, bench.near.submit(bench.copy("near", "far", 8192)))
    devices = bench.ledger.snapshot()[0]
    assert (devices["near"].media_bytes, devices["near"].cached_bytes) == (16384, 8192)
    assert devices["far"].cached_bytes == 0


def test_links_count_from_the_reset() -> None:
    bench = Bench()
    meter = bench.site.links["wire"]
    meter.bytes_forward, meter.busy_ns = 1000, 500
    bench.ledger.reset()
    meter.bytes_forward, meter.bytes_back, meter.busy_ns = 1800, 7, 900
    use = bench.ledger.snapshot()[1]["wire"]
    assert (use.bytes_forward, use.bytes_back, use.busy_ns) == (800, 7, 400)


def test_times_are_scaled_back_by_the_dilation() -> None:
    bench = Bench(dilation=10)
    slow = bench.far.submit(bench.copy("far", "far", 100))
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 31), after=[slow]))
    devices, _ = bench.ledger.snapshot()
    assert (devices["near"].stall_ns, devices["far"].busy_ns, bench.ledger.elapsed_ns) == (10, 10, 14)


def test_a_command_that_its_closed_device_never_began_is_not_counted() -> None:
    bench = Bench()
    slow = bench.far.submit(bench.copy("far", "far", 100))
    bench.near.submit(bench.copy("near", "near", 5), after=[slow])
    bench.near.close()
    assert bench.ledger.snapshot()[0]["near"].commands == 0


def test_host_buffers_are_counted_on_one_side_only() -> None:
    bench = Bench()
    wait(bench.site.clock, bench.near.submit(Write(bench.segment("near", 8), np.zeros(8, dtype=np.uint8))))
    wait(bench.site.clock, bench.near.submit(Read(bench.segment("near", 8), np.zeros(8, dtype=np.uint8))))
    wait(bench.site.clock, bench.near.submit(Flush(Segment(Region("near", "near", 0, 8), Spans.one(0, 0)))))
    devices = bench.ledger.snapshot()[0]
    assert (devices["near"].bytes_written, devices["near"].bytes_read, devices["near"].commands) == (8, 8, 3)
    assert devices["far"].bytes_written == 0


stretches = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=30)


@given(stretches, stretches)
def test_a_union_has_the_length_of_its_set_of_points(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    sets = []
    for pairs in (ours, theirs):
        intervals = Intervals()
        for start, end in pairs:
            intervals.add(start, end)
            intervals.merged()
        sets.append((intervals, {t for start, end in pairs for t in range(start, end)}))
    (a, points), (b, others) = sets
    assert a.total_ns() == len(points)
    assert a.total_with_ns(b) == len(points | others)


jobs = st.lists(
    st.tuples(
        st.sampled_from(["near", "far"]),
        st.integers(0, 1),
        st.sampled_from(["near", "far"]),
        st.sampled_from(["near", "far"]),
        st.integers(1, 200),
        st.lists(st.integers(0, 30), max_size=3),
    ),
    max_size=30,
)


@given(jobs, st.integers(1, 7), st.integers(0, 500))
def test_busy_and_stall_stay_within_the_makespan_and_bytes_are_conserved(
    batch: list[tuple[str, int, str, str, int, list[int]]], dilation: int, reset_at: int
) -> None:
    bench = Bench(dilation=dilation)
    completions: list[Completion] = []
    for device, queue, source, target, nbytes, after in batch:
        earlier = [completions[i] for i in after if i < len(completions)]
        on = bench.near if device == "near" else bench.far
        completions.append(on.submit(bench.copy(source, target, nbytes), queue, earlier))
    bench.site.clock.wait_until(reset_at)
    before, elapsed_before = bench.ledger.snapshot()[0], bench.ledger.elapsed_ns
    bench.ledger.reset()
    bench.run_to_end(completions)
    since, elapsed_since = bench.ledger.snapshot()[0], bench.ledger.elapsed_ns
    for devices, elapsed_ns in ((before, elapsed_before), (since, elapsed_since)):
        for use in devices.values():
            assert use.stall_ns >= 0
            assert use.busy_ns + use.stall_ns <= elapsed_ns
    both = [(before[name], since[name]) for name in ("near", "far")]
    total = sum(job[4] for job in batch)
    assert sum(a.bytes_read + b.bytes_read for a, b in both) == total
    assert sum(a.bytes_written + b.bytes_written for a, b in both) == total
    assert sum(a.commands + b.commands for a, b in both) == len(batch)


@given(st.integers(0, 3))
def test_folding_in_between_changes_nothing(folds: int) -> None:
    usages = []
    for every in (10_000, folds + 1):
        bench = Bench()
        for i in range(12):
            slow = bench.far.submit(bench.copy("far", "near", 10 + i))
            wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 3 * i + 1), i % 2, [slow]))
            if i % every == 0:
                bench.ledger.snapshot()
        usages.append(bench.ledger.snapshot())
    assert usages[0] == usages[1]
