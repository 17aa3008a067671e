"""The gpu driver: streams, buffers, registered memory, options, and what becomes of faults."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.gpu_rig import MIB, Rig, host_region
from tests.seeded import bytes_of
from tests.test_docs import ROOT, run_blocks
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.launches import gather
from tierloop.devices.drivers import gpu_lines
from tierloop.devices.drivers.gpu import GpuDevice, open_gpu
from tierloop.devices.drivers.gpu_options import Options
from tierloop.devices.drivers.gpu_transfers import DIRECT_NBYTES, common_pieces
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    ConfigurationError,
    DeviceError,
    Gone,
    OutOfMemory,
    OutOfRange,
    Timeout,
    Unsupported,
)
from tierloop.devices.kernels.contract import Chase, Dense, Gather, Topk
from tierloop.devices.placement import Placements
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait
from tierloop.emulators.host_accelerator import Board, HostAccelerator


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """What a lost GPU may still write to is kept for ever; not from one test to the next."""
    yield
    gpu_lines.LEFT_BEHIND.clear()


# Streams


def test_a_chain_over_queues_is_enqueued_at_once_and_needs_the_host_only_at_its_end() -> None:
    rig = Rig()
    a, b, c = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096), rig.device.alloc(4096)
    rig.accelerator.hold()
    first = rig.device.submit(gather(a, b), 0)
    second = rig.device.submit(gather(b, c), 1, [first])
    into = np.zeros(4096, dtype=np.uint8)
    read = rig.device.submit(Read(c.all(), into), rig.back, [second])
    assert [x.started_ns >= 0 for x in (first, second, read)] == [True] * 3
    assert not first.done
    rig.accelerator.hold(False)
    rig.wait(first, second, read)
    assert np.array_equal(into, bytes_of(1, 4096))
    assert first.ended_ns <= second.ended_ns <= read.ended_ns


def test_what_follows_a_read_is_held_until_its_buffer_is_full() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    buffer = np.zeros(4096, dtype=np.uint8)
    rig.accelerator.hold()
    read = rig.device.submit(Read(a.all(), buffer), rig.back)
    write = rig.device.submit(Write(b.all(), buffer), rig.to, [read])
    assert write.started_ns < 0
    rig.accelerator.hold(False)
    rig.wait(read, write)
    assert np.array_equal(rig.bytes(b.all()), bytes_of(1, 4096))


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=14))
def test_any_chain_of_copies_gives_the_same_bytes_whatever_runs_when(seed: int, steps: list[tuple[int, int]]) -> None:
    rig = Rig(HostAccelerator(seed))
    held = [bytes_of(i, 3000) for i in range(4)]
    regions = [rig.filled(data) for data in held]
    done: list[Completion] = []
    for i, (source, target) in enumerate(steps):
        if source == target:
            continue
        command = (
            gather(regions[source], regions[target]) if i % 2 else Copy(regions[source].all(), regions[target].all())
        )
        done.append(rig.device.submit(command, (i * 7) % 2, done[-1:]))
        held[target] = held[source]
    rig.wait(*done)
    for region, data in zip(regions, held, strict=True):
        assert np.array_equal(rig.bytes(region.all()), data)
    rig.device.close()


def test_times_come_from_the_gpu_and_lie_within_those_of_the_host() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    done = rig.do(gather(a, b))
    assert done.submitted_ns <= done.started_ns <= done.ended_ns
    assert done.ended_ns - done.started_ns < rig.site.clock.now()


def test_a_region_is_not_freed_while_a_stream_may_use_it() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.hold()
    done = rig.device.submit(gather(a, b))
    with pytest.raises(DeviceError, match="has not ended"):
        rig.device.free(a)
    rig.accelerator.hold(False)
    rig.wait(done)
    rig.device.free(a)


# Bytes


@given(st.data())
def test_scattered_spans_of_any_size_and_offset_come_back(data: st.DataObject) -> None:
    rig = Rig(HostAccelerator(data.draw(st.integers(0, 1000))))
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 24, 256]))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(sizes))))
    offsets, at = [0] * len(sizes), data.draw(st.integers(0, 3)) * unit
    for i in order:
        offsets[i] = at
        at += (sizes[i] + data.draw(st.integers(0, 2))) * unit
    region = rig.device.alloc(max(at, 1))
    segment = Segment(region, Spans([(o, s * unit) for o, s in zip(offsets, sizes, strict=True)]))
    sent = bytes_of(3, segment.spans.nbytes)
    rig.do(Write(segment, sent), rig.to)
    assert np.array_equal(rig.bytes(segment), sent)
    whole = np.zeros(region.nbytes, dtype=np.uint8)
    taken = 0
    for offset, nbytes in segment.spans.array.tolist():
        whole[offset : offset + nbytes] = sent[taken : taken + nbytes]
        taken += nbytes
    assert np.array_equal(rig.bytes(region.all()), whole), "bytes beside the spans have changed"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 100))
def test_common_pieces_of_two_lists_cover_both(sizes: list[int], seed: int) -> None:
    total = sum(sizes)
    cuts = np.sort(np.random.default_rng(seed).integers(0, total + 1, 3))
    others = np.diff([0, *cuts, total])
    a = np.stack([np.cumsum(sizes) * 2, sizes], axis=1).astype(np.int64)
    b = np.stack([1000 - np.cumsum(others), others], axis=1).astype(np.int64)
    pieces = common_pieces(a, b)
    for column, spans in ((0, a), (1, b)):
        want = [o + i for o, n in spans.tolist() for i in range(n)]
        assert [p[column] + i for p in pieces.tolist() for i in range(p[2])] == want


@pytest.mark.parametrize("register", [True, False])
def test_host_memory_is_copied_both_ways(register: bool) -> None:
    rig = Rig(options={"register": register})
    nbytes = 2 * DIRECT_NBYTES
    host, back, region = host_region(nbytes), host_region(nbytes, 1), rig.device.alloc(nbytes)
    assert host.view is not None
    assert back.view is not None
    host.view[:] = bytes_of(5, nbytes)
    there = rig.device.submit(Copy(host.all(), region.all()), rig.to)
    done = rig.device.submit(Copy(region.all(), back.all()), rig.back, [there])
    rig.wait(there, done)
    assert np.array_equal(back.view, bytes_of(5, nbytes))
    assert len(rig.accelerator.registered) == (2 if register else 0)
    rig.device.close()
    assert not rig.accelerator.registered


def test_small_pieces_of_host_memory_go_through_buffers() -> None:
    rig = Rig()
    host, region = host_region(65536), rig.device.alloc(4096)
    assert host.view is not None
    host.view[:] = bytes_of(6, 65536)
    spans = Spans([(i * 1024, 64) for i in range(64)])
    rig.do(Copy(Segment(host, spans), region.all()), rig.to)
    want = np.concatenate([host.view[o : o + n] for o, n in spans.array.tolist()])
    assert np.array_equal(rig.bytes(region.all()), want)
    assert not rig.accelerator.registered


def test_memory_that_cannot_be_registered_is_copied_all_the_same_and_the_reason_is_kept() -> None:
    rig = Rig()
    rig.accelerator.refuse_registration()
    host, region = host_region(DIRECT_NBYTES, fill=7), rig.device.alloc(DIRECT_NBYTES)
    rig.do(Copy(host.all(), region.all()), rig.to)
    assert (rig.bytes(region.all()) == 7).all()
    assert "refused" in rig.device.why_not_registered
    rig.do(Copy(host.all(), region.all()), rig.to)
    assert not rig.accelerator.registered, "what was refused once is not asked for again"


def test_memory_that_was_freed_is_unregistered_at_the_next_copy() -> None:
    rig = Rig()
    host, other, region = host_region(DIRECT_NBYTES), host_region(DIRECT_NBYTES, 1), rig.device.alloc(DIRECT_NBYTES)
    rig.do(Copy(host.all(), region.all()), rig.to)
    host.freed, host.view = True, None
    rig.do(Copy(other.all(), region.all()), rig.to)
    assert len(rig.accelerator.registered) == 1


def test_where_memory_lies_is_looked_at_after_it_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Region] = []
    monkeypatch.setattr(Placements, "registered", lambda self, region: looked.append(region))
    rig = Rig()
    host, region = host_region(DIRECT_NBYTES), rig.device.alloc(DIRECT_NBYTES)
    for _ in range(2):
        rig.do(Copy(host.all(), region.all()), rig.to)
    assert looked == [host]


def test_copies_between_gpus_need_access_that_both_have() -> None:
    board, site = Board(), Site(clock=VirtualClock())
    options = Options.of("gpu0", {"capacity": MIB, "deadline_s": 1.0})
    first = GpuDevice("gpu0", site, options, HostAccelerator(1, board=board))
    second = GpuDevice("gpu1", site, Options(capacity=MIB, reaches=("gpu0",)), HostAccelerator(2, board=board))
    far = GpuDevice("gpu2", site, Options(capacity=MIB, reaches=("gpu0",)), HostAccelerator(3))
    a, b, c = first.alloc(4096), second.alloc(4096), far.alloc(4096)
    data, into = bytes_of(1, 4096), np.zeros(4096, dtype=np.uint8)
    spans = Spans([(2048, 1000), (0, 1048)])
    written = first.submit(Write(a.all(), data), 2)
    pulled = second.submit(Copy(Segment(a, spans), b.at(100, 2048)), 4, [written])
    pushed = second.submit(Copy(b.at(100, 2048), a.at(0, 2048)), 4, [pulled])
    read = first.submit(Read(a.at(0, 2048), into[:2048]), 3, [pushed])
    assert site.clock.run_until(lambda: read.done, 10**10)
    read.result()
    assert np.array_equal(into[:2048], np.concatenate([data[2048:3048], data[:1048]]))
    with pytest.raises(Unsupported, match="does not reach gpu0"):
        far.submit(Copy(a.all(), c.all()), 2)
    assert "no peer access to gpu0" in far.info.notes["why"]


def two_gpus(seed: int = 1) -> tuple[Site, GpuDevice, GpuDevice, tuple[HostAccelerator, HostAccelerator]]:
    """Two GPUs that reach each other; the second one's queue 4 copies between them."""
    board, site = Board(), Site(clock=VirtualClock())
    near, far = HostAccelerator(seed, board=board), HostAccelerator(seed + 1, board=board)
    first = GpuDevice("gpu0", site, Options(capacity=MIB), near)
    return site, first, GpuDevice("gpu1", site, Options(capacity=MIB, reaches=("gpu0",)), far), (near, far)


@pytest.mark.parametrize("seed", [1, 202, 227, 252, 259])  # in most of these orders a missing wait shows
def test_what_another_gpu_copies_into_a_new_region_comes_after_its_zeros(seed: int) -> None:
    site, first, second, _ = two_gpus(seed)
    data, into = bytes_of(seed, 4096), np.zeros(4096, dtype=np.uint8)
    held = second.alloc(4096)
    written = second.submit(Write(held.all(), data), 2)
    wait(site.clock, written)
    made = first.alloc(4096)
    pushed = second.submit(Copy(held.all(), made.all()), 4)
    wait(site.clock, first.submit(Read(made.all(), into), 3, [pushed]))
    assert np.array_equal(into, data)


def test_a_region_that_another_gpu_copies_is_not_freed() -> None:
    site, first, second, accelerators = two_gpus()
    a, b = first.alloc(4096), second.alloc(4096)
    wait(site.clock, first.submit(Write(a.all(), np.full(4096, 7, dtype=np.uint8)), 2))
    for accelerator in accelerators:
        accelerator.hold()
    pulled = second.submit(Copy(a.all(), b.all()), 4)
    with pytest.raises(Busy, match=r"gpu0: free: <region .*> is used by a command that has not ended"):
        first.free(a)
    for accelerator in accelerators:
        accelerator.hold(False)
    wait(site.clock, pulled, 10**10)
    first.free(a)


def test_a_copy_from_a_gpu_that_was_closed_before_it_began_is_gone() -> None:
    site, first, second, (_, far) = two_gpus()
    a, b, c = first.alloc(4096), second.alloc(4096), second.alloc(4096)
    far.hold()
    before = second.submit(Read(c.all(), np.zeros(4096, dtype=np.uint8)), 3)
    pulled = second.submit(Copy(a.all(), b.all()), 4, [before])
    far.hold(False)
    first.close()
    with pytest.raises(Gone, match="gpu0: copy: the device is closed"):
        wait(site.clock, pulled, 10**10)


def test_a_gpu_that_is_lost_already_cannot_be_opened_and_the_error_names_it() -> None:
    accelerator = HostAccelerator()
    accelerator.lose()
    with pytest.raises(Gone, match=r"gpu0: open: cuda:0: .*lost"):
        open_gpu("gpu0", Site(clock=WallClock()), {"capacity": MIB}, accelerator=accelerator)


# Launches


def test_what_a_function_of_the_host_raises_ends_its_command_only() -> None:
    rig = Rig()
    region = rig.device.alloc(64)

    def broken(reads: list[Any], writes: list[Any]) -> None:
        raise RuntimeError("no such layer")

    launch = Launch(Dense("broken", 1, 0, 0, broken), ((region.all(),),), ((region.all(),),))
    done = rig.device.submit(launch)
    follower = rig.device.submit(Flush(region.all()), 1, [done])
    rig.settle(done, follower)
    assert "no such layer" in str(done.error)
    assert follower.error is not None
    assert follower.error.__cause__ is done.error
    for completion in (done, follower):
        with pytest.raises(DeviceError):
            completion.result()
    assert (rig.bytes(region.all()) == 0).all()
    rig.device.close()


def test_operands_on_the_host_need_room_in_the_gpu_and_give_it_back() -> None:
    rig = Rig(options={"capacity": 65536})
    source, target = host_region(20_000), host_region(20_000, 1)
    assert source.view is not None
    assert target.view is not None
    source.view[:] = bytes_of(8, 20_000)
    spans = Spans([(5_000, 10_000), (0, 5_000)])
    launch = Launch(Gather(), ((Segment(source, spans), source.at(15_000, 5_000)),), ((target.all(),),))
    for _ in range(5):
        target.view[:] = 0
        rig.do(launch)
        want = np.concatenate([source.view[5_000:15_000], source.view[:5_000], source.view[15_000:]])
        assert np.array_equal(target.view, want)
    whole = rig.device.alloc(30_000)
    with pytest.raises(OutOfMemory, match="operands that lie on the host"):
        rig.do(launch)
    rig.device.free(whole)
    rig.do(launch)


def test_a_function_of_the_host_may_read_the_host_and_write_the_gpu() -> None:
    rig = Rig()
    source, near, target = host_region(100, fill=3), rig.filled(np.full(50, 4, dtype=np.uint8)), rig.device.alloc(150)

    def function(reads: list[Any], writes: list[Any]) -> None:
        writes[0][:] = reads[0] * 2

    operand = (source.at(0, 60), near.all(), source.at(60, 40))
    rig.do(Launch(Dense("double", 1, 0, 0, function), (operand,), ((target.all(),),)))
    assert rig.bytes(target.all()).tolist() == [6] * 60 + [8] * 50 + [6] * 40


def test_a_chase_that_leads_outside_is_an_error_and_stops_there() -> None:
    rig = Rig()
    numbers = np.zeros((4, 8), dtype=np.int64)
    numbers[:, 0] = [1, 2, 9, 0]
    lines, last = rig.filled(numbers.view(np.uint8).ravel()), rig.device.alloc(8)
    spans = Spans([(64 * i, 64) for i in range(4)])
    with pytest.raises(OutOfRange, match="line 9, of 4"):
        rig.do(Launch(Chase(), ((Segment(lines, spans),),), ((last.all(),),)))
    numbers[2, 0] = 3
    rig.do(Write(lines.all(), numbers.view(np.uint8).ravel()), rig.to)
    rig.do(Launch(Chase(), ((Segment(lines, spans),),), ((last.all(),),)))
    assert rig.bytes(last.all()).view(np.int64).tolist() == [0]
    with pytest.raises(Unsupported, match="memory of the GPU"):
        rig.device.submit(Launch(Chase(), ((Segment(host_region(256), spans),),), ((last.all(),),)))


def test_a_launch_that_does_not_fit_names_the_launch_and_leaves_the_gpu_alone() -> None:
    rig = Rig()
    scores, chosen = rig.device.alloc(64), rig.device.alloc(64)
    launch = Launch(Topk(2, np.array([20, -4], dtype=np.int64)), ((scores.all(),),), ((chosen.at(0, 32),),))
    with pytest.raises(OutOfRange, match=r"gpu0: topk: .*lengths"):
        rig.do(launch)
    assert rig.bytes(chosen.all()).any() == np.False_


# Faults


def test_a_kernel_without_room_is_out_of_memory_and_the_gpu_works_on() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.fail_next("memory")
    with pytest.raises(OutOfMemory, match=r"gpu0: gather: .*8192 bytes"):
        rig.do(gather(a, b))
    rig.do(gather(a, b))
    assert np.array_equal(rig.bytes(b.all()), bytes_of(1, 4096))


def test_a_lost_gpu_ends_everything_as_gone_and_says_where() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.hold()
    early = rig.device.submit(gather(a, b), 0)
    late = rig.device.submit(Read(b.all(), np.zeros(4096, dtype=np.uint8)), rig.back, [early])
    held = rig.device.submit(Write(a.all(), bytes_of(2, 4096)), rig.to, [late])
    rig.accelerator.lose()
    rig.settle(early, late, held)
    assert isinstance(early.error, Gone)
    assert "gather" in str(early.error)
    assert "8192 bytes on host:0" in str(early.error)
    assert isinstance(late.error, Gone)
    assert isinstance(held.error, Cancelled)
    for refused in (lambda: rig.device.alloc(16), lambda: rig.device.free(a), lambda: rig.device.submit(gather(a, b))):
        with pytest.raises(Gone, match="CUDA error"):
            refused()
    for completion in (early, late, held):
        with pytest.raises(DeviceError):
            completion.result()
    rig.device.close()


@given(st.data())
def test_commands_that_find_no_room_leave_nothing_behind(data: st.DataObject) -> None:
    """Whatever fails for lack of memory fails alone: bytes elsewhere stay, and buffers and borrowed room come back."""
    rig = Rig(HostAccelerator(data.draw(st.integers(0, 1000))), {"capacity": 65536})
    near, host = [rig.device.alloc(10_000) for _ in range(3)], host_region(10_000, fill=1)
    model: list[NDArray[np.uint8] | None] = [np.zeros(10_000, dtype=np.uint8) for _ in near]
    for step in range(data.draw(st.integers(1, 12))):
        a, b = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        for _ in range(data.draw(st.integers(0, 2))):
            rig.accelerator.fail_next("memory")
        new, into = bytes_of(step, 10_000), np.zeros(10_000, dtype=np.uint8)
        kind = data.draw(st.sampled_from(["write", "read", "copy in", "copy out", "gather", "gather to the host"]))
        cases: dict[str, tuple[Command, int, NDArray[np.uint8] | None]] = {
            "write": (Write(near[a].all(), new), rig.to, new),
            "read": (Read(near[a].all(), into), rig.back, model[a]),
            "copy in": (Copy(host.all(), near[a].all()), rig.to, np.ones(10_000, dtype=np.uint8)),
            "copy out": (Copy(near[a].all(), host_region(10_000, 1).all()), rig.back, model[a]),
            "gather": (gather(near[b], near[a]), 0, model[b]),
            "gather to the host": (gather(near[a], host_region(10_000, 2)), 1, model[a]),
        }
        command, queue, changes = cases[kind]
        completion = rig.device.submit(command, queue)
        rig.settle(completion)
        try:
            completion.result()
        except OutOfMemory:
            model[a] = None if kind in ("write", "copy in", "gather") else model[a]
        else:
            model[a] = changes
            if kind == "read" and changes is not None:
                assert np.array_equal(into, changes)
        rig.accelerator.forgive()
    for region, want in zip(near, model, strict=True):
        got = rig.bytes(region.all())
        assert want is None or np.array_equal(got, want)
        rig.device.free(region)
    whole = rig.device.alloc(65536)
    rig.do(Write(whole.all(), bytes_of(99, 65536)), rig.to)
    assert np.array_equal(rig.bytes(whole.all()), bytes_of(99, 65536))


def test_a_gpu_that_is_lost_with_a_launch_ends_that_as_gone() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.fail_next("lost")
    done = rig.device.submit(Write(b.all(), bytes_of(2, 4096)), rig.to)
    rig.settle(done)
    assert isinstance(done.error, Gone)
    assert "write" in str(done.error)
    with pytest.raises(Gone):
        rig.device.submit(gather(a, b))


def test_a_command_that_never_ends_times_out_and_the_gpu_is_gone() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.hold()
    start = rig.site.clock.now()
    stuck = rig.device.submit(gather(a, b), 0)
    behind = rig.device.submit(gather(b, a), 0)
    rig.settle(stuck, behind)
    assert isinstance(stuck.error, Timeout)
    assert "gather" in str(stuck.error)
    assert isinstance(behind.error, Gone)
    assert 10**9 <= rig.site.clock.now() - start < 2 * 10**9
    assert gpu_lines.LEFT_BEHIND, "what the GPU may still write to is kept"
    with pytest.raises(Gone, match="nothing has ended"):
        rig.device.submit(gather(a, b))
    with pytest.raises(Timeout):
        rig.device.close()


def test_a_long_queue_is_not_a_hanging_one() -> None:
    rig = Rig(HostAccelerator(1, questions=12), {"deadline_s": 0.002})
    a, b = rig.filled(bytes_of(1, 64)), rig.device.alloc(64)
    done = [rig.device.submit(gather(*((a, b) if i % 2 else (b, a))), 0) for i in range(200)]
    start = rig.site.clock.now()
    rig.wait(*done)
    assert rig.site.clock.now() - start > 2_000_000, "the queue took longer than the deadline, as it should here"


def test_closing_over_work_that_does_not_end_says_so_and_keeps_what_it_may_touch() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.accelerator.hold()
    rig.device.submit(gather(a, b))
    with pytest.raises(Timeout, match="gpu0: close"):
        rig.device.close()
    assert not rig.accelerator.closed
    assert gpu_lines.LEFT_BEHIND


def test_closing_gives_the_memory_back() -> None:
    class Watched(HostAccelerator):
        def slab(self, nbytes: int) -> Any:
            made = super().slab(nbytes)
            self.seen = weakref.ref(made)
            return made

    accelerator = Watched()
    rig = Rig(accelerator)
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    rig.device.submit(gather(a, b))
    rig.device.close()
    gc.collect()
    assert accelerator.seen() is None
    assert accelerator.closed


def test_a_gpu_that_is_lost_while_it_is_closed_is_closed() -> None:
    rig = Rig()
    a, b = rig.filled(bytes_of(1, 4096)), rig.device.alloc(4096)
    done = rig.device.submit(gather(a, b))
    rig.accelerator.lose()
    rig.device.close()
    assert isinstance(done.error, Gone)


# Opening


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "gpu:0"}, "device = 'gpu:0'"),
        ({"device": 0}, "device = 0"),
        ({"capacity": 100}, "capacity = 100"),
        ({"queues": 0}, "queues = 0"),
        ({"queues": 10**7}, "queues = 10000000; allowed: an integer from 1 to 128"),
        ({"poll_ns": 10**10}, "poll_ns = 10000000000; allowed: an integer from 1000 to 1000000000"),
        ({"staging_buffers": 1}, "staging_buffers = 1"),
        ({"register": "yes"}, "register = 'yes'"),
        ({"deadline_s": 0}, "deadline_s = 0"),
        ({"reaches": "dram"}, "reaches = 'dram'"),
        ({"reaches": None}, "reaches = None"),
        ({"reaches": ["gpu0"]}, "the device itself"),
        ({"stream": 3}, "'stream' is unknown"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match="gpu0: .*" + named.replace("(", r"\(")):
        open_gpu("gpu0", Site(clock=WallClock()), options, accelerator=HostAccelerator())


def test_a_virtual_clock_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="virtual clock"):
        open_gpu("gpu0", Site(clock=VirtualClock()), {}, accelerator=HostAccelerator())


def test_more_memory_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(OutOfMemory, match="8388608 bytes of host:0: 4194304 of 4194304"):
        open_gpu("gpu0", Site(clock=WallClock()), {"capacity": 8 * MIB}, accelerator=HostAccelerator(capacity=4 * MIB))


def test_the_reserve_is_left_free() -> None:
    accelerator = HostAccelerator(capacity=16 * MIB)
    device = open_gpu("gpu0", Site(clock=WallClock()), {"reserve": 4 * MIB}, accelerator=accelerator)
    assert device.info.memories[0].capacity == 12 * MIB
    assert accelerator.memory()[0] == 4 * MIB


def test_it_says_what_it_stands_on() -> None:
    info = Rig().device.info
    assert info.provenance == "real"
    assert "in place of a GPU" in info.model
    assert info.arithmetic is not None
    assert not info.arithmetic.cut_invariant


def test_importing_the_driver_does_not_import_torch() -> None:
    code = "import sys, tierloop.devices.drivers.gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_examples_of_the_page_run() -> None:
    assert run_blocks(ROOT / "docs" / "gpu.md")["over"]


def test_gathering_from_two_regions_into_a_third_one() -> None:
    rig = Rig()
    a, b, c = rig.filled(bytes_of(1, 300)), rig.filled(bytes_of(2, 300)), rig.device.alloc(600)
    rig.do(Launch(Gather(), ((b.at(3, 297), a.all()),), ((c.at(1, 597),),)))
    want = np.concatenate([bytes_of(2, 300)[3:], bytes_of(1, 300)])
    assert np.array_equal(rig.bytes(c.at(1, 597)), want)
