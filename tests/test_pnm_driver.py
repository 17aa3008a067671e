"""The pnm driver on the firmware model: what it sends, what it takes for an answer, and what it refuses beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.attention_case import Case, region, whole
from tests.launches import room
from tests.pnm_rig import LAUNCHES, MIB, TRANSFERS, Rig, card_of
from tierloop.devices import conformance
from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write
from tierloop.devices.conformance.launches import gather
from tierloop.devices.drivers import pnm
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.drivers.pnm_steps import Planner, Steps
from tierloop.devices.drivers.pnm_wire import Place
from tierloop.devices.errors import Busy, Gone, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import Gather, Topk
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def noise(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_it_is_what_the_device_says(rig: Rig) -> None:
    rig.card = card_of(
        engines=3, sram_nbytes=8192, capacity=MIB, kernels=frozenset({"attend"}), dtypes=frozenset({"float16"})
    )
    info = rig.open(reaches=["dram"]).info
    engines, dma = info.executors
    assert (info.kind, info.provenance, info.notes["engines"], info.notes["sram_nbytes"]) == (
        "pnm",
        "real",
        "3",
        "8192",
    )
    assert (engines.kind, engines.kernels, engines.dtypes, engines.verbs) == (
        "pnm", frozenset({"attend"}), frozenset({"float16"}), frozenset(),
    )  # fmt: skip
    assert (dma.kind, dma.kernels, dma.reached) == ("dma", frozenset(), frozenset({"pnm1", "dram"}))
    assert info.memories[0].capacity == MIB


def test_a_card_of_another_microkernel_is_held_to_the_bound_of_its_arithmetic() -> None:
    rig = Rig(card_of(arithmetic=Arithmetic("a-vendors-3", "float16", "float16", "float16")))
    said = rig.device.info.arithmetic
    assert said == Arithmetic("a-vendors-3", "float16", "float16", "float16", cut_invariant=False)
    rig.close()


def test_every_write_is_added(rig: Rig) -> None:
    data = noise(3000)
    source = rig.region(data)
    assert rig.card.peek(source.id, 0, 3000) == data.tobytes()
    target = rig.device.alloc(3000)
    rig.run(gather(source, target))
    assert rig.read(target).tobytes() == data.tobytes()
    assert rig.card.stale_nbytes == 0


def test_a_driver_that_forgot_to_add_would_be_seen(rig: Rig) -> None:
    """What the engines see changes by the ADD, not by the host's store."""
    source = rig.region(noise(64))
    before = rig.card.peek(source.id, 0, 64)
    completion = rig.submit(Write(source.all(), noise(64, seed=1)))
    rig.card.hold()
    rig.device.poll()
    assert rig.card.peek(source.id, 0, 64) == before
    rig.card.release()
    wait(rig.site.clock, completion)
    assert rig.card.peek(source.id, 0, 64) == noise(64, seed=1).tobytes()


class Forgetful(Planner):
    """Stores into the window, and adds nothing."""

    def _store(self, target: Segment, data: NDArray[np.uint8]) -> Steps:
        self._session.window.write(self._in_window(target.region, target.spans), data)
        yield from ()


@pytest.mark.parametrize("planner", [Planner, Forgetful])
def test_engines_read_old_bytes_where_a_driver_did_not_add_its_own(
    planner: type[Planner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pnm, "Planner", planner)
    rig = Rig()
    data = noise(64)
    source, target = rig.region(data), rig.device.alloc(64)
    rig.run(gather(source, target))
    forgot = planner is Forgetful
    assert rig.read(target).tobytes() == (bytes(64) if forgot else data.tobytes())
    assert rig.card.stale_nbytes == (64 if forgot else 0)
    report = conformance.run(lambda site: Rig(site=site).open(deadline_ms=20_000), only=["every_byte_comes_back"])
    assert report.passed != forgot, str(report)
    rig.close()


def test_a_read_gives_what_the_engines_wrote_last(rig: Rig) -> None:
    one = rig.region(noise(4096))
    rig.card.poke(one.id, 100, b"engines")
    assert rig.read(one)[100:107].tobytes() == b"engines"


def test_large_transfers_go_part_by_part(rig: Rig) -> None:
    data = noise(5 * MIB + 13)
    one = rig.region(data)
    before = rig.device.counts.sent
    assert rig.read(one).tobytes() == data.tobytes()
    assert rig.device.counts.sent - before == 6


def test_tables_that_are_longer_than_the_device_takes_go_part_by_part() -> None:
    rig = Rig(card_of(most_spans=50))
    one = rig.device.alloc(64 * 400)
    spans = Spans([(64 * i, 1 + i % 64) for i in reversed(range(400))])
    data = noise(spans.nbytes)
    rig.run(Write(Segment(one, spans), data))
    into = np.zeros(spans.nbytes, dtype=np.uint8)
    rig.run(Read(Segment(one, spans), into))
    assert into.tobytes() == data.tobytes()
    rig.close()


def test_more_commands_than_the_ring_has_entries_wait_for_room() -> None:
    rig = Rig(card_of(entries=2), options={"deadline_ms": 50, "queues": 8})
    regions = [rig.device.alloc(64) for _ in range(8)]
    under_way = [rig.device.submit(Write(one.all(), noise(64, seed=i)), 8 + i) for i, one in enumerate(regions)]
    wait(rig.site.clock, under_way)
    for i, one in enumerate(regions):
        into = np.zeros(64, dtype=np.uint8)
        wait(rig.site.clock, rig.device.submit(Read(one.all(), into), 8))
        assert into.tobytes() == noise(64, seed=i).tobytes()
    rig.close()


def test_an_arena_of_two_commands_serves_any_number() -> None:
    rig = Rig(card_of(arena_nbytes=512, largest_arguments=512), options={"deadline_ms": 50, "queues": 4})
    one = rig.device.alloc(64 * 40)
    under_way = [rig.device.submit(Write(one.at(64 * i, 64), noise(64, seed=i)), 4 + i % 4) for i in range(40)]
    wait(rig.site.clock, under_way)
    assert rig.card.peek(one.id, 0, 64 * 40) == b"".join(noise(64, seed=i).tobytes() for i in range(40))
    rig.close()


def test_a_copy_within_the_memory_is_done_by_the_engines(rig: Rig) -> None:
    source, target = rig.region(noise(1000)), rig.device.alloc(1000)
    rig.run(Copy(source.all(), target.all()))
    assert rig.card.peek(target.id, 0, 1000) == noise(1000).tobytes()
    assert sum(engine.jobs_done for engine in rig.card.dispatcher.engines) == 1


def test_a_copy_on_a_device_without_gather_goes_through_the_host() -> None:
    rig = Rig(card_of(kernels=frozenset({"attend"})))
    source, target = rig.region(noise(1000)), rig.device.alloc(1000)
    rig.run(Copy(source.at(10, 900), target.at(50, 900)))
    assert rig.card.peek(target.id, 50, 900) == noise(1000)[10:910].tobytes()
    rig.close()


def test_host_mapped_memories_are_copied_to_and_from(rig: Rig) -> None:
    rig.open(reaches=["dram"])
    host = Region("dram", "dram", 0, 500, view=noise(500).copy())
    one = rig.device.alloc(500)
    rig.run(Copy(host.all(), one.all()))
    assert rig.card.peek(one.id, 0, 500) == noise(500).tobytes()
    rig.card.poke(one.id, 0, bytes(500))
    rig.run(Copy(one.all(), host.all()))
    assert host.view is not None
    assert not host.view.any()


def test_a_host_memory_without_a_view_is_refused(rig: Rig) -> None:
    rig.open(reaches=["far"])
    one, far = rig.device.alloc(64), Region("far", "far", 0, 64)
    with pytest.raises(Unsupported, match="not mapped by the host"):
        rig.submit(Copy(far.all(), one.all()))


@pytest.mark.parametrize("write_first", [False, True])
def test_transfers_that_race_on_a_region_end_well(rig: Rig, write_first: bool) -> None:
    """Which of them is first is open; that one shows its bytes over those that the other has just put there is not."""
    one = rig.region(bytes(256))
    rig.site.checker = None
    into = np.zeros(256, dtype=np.uint8)
    both: list[Command] = [Read(one.all(), into), Write(one.all(), np.full(256, 7, dtype=np.uint8))]
    wait(rig.site.clock, [rig.submit(c, TRANSFERS + i) for i, c in enumerate(both[::-1] if write_first else both)])
    assert into.tobytes() in (bytes(256), bytes([7]) * 256)
    assert rig.read(one).tobytes() == bytes([7]) * 256


def test_a_flush_waits_for_what_was_added_before(rig: Rig) -> None:
    one = rig.region(noise(64))
    rig.card.hold()
    completion = rig.submit(Flush(one.all()))
    rig.device.poll()
    rig.device.poll()
    assert not completion.done
    rig.card.release()
    wait(rig.site.clock, completion)


def test_nothing_is_done_by_submit_itself(rig: Rig) -> None:
    source, target = rig.region(noise(64)), rig.device.alloc(64)
    completion = rig.submit(gather(source, target))
    assert rig.card.peek(target.id, 0, 64) == bytes(64)
    assert not completion.done
    wait(rig.site.clock, completion)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_launch_beyond_the_sram_is_refused_with_the_limit() -> None:
    rig = Rig(card_of(sram_nbytes=1024))
    case = Case("float32", group=4, head_dim=64, head_dim_v=64, tokens=8)
    place, rows = case.layout(case.all_rows()), case.all_rows()
    args = case.attend_args(place.runs, case.roots_of(rows))
    moved = rig.moved(Launch(args, (whole(case.queries), place.keys, place.values), (room(4 * 4 * 66),)))
    with pytest.raises(Unsupported, match="a job of it takes 2080 bytes; the SRAM of an engine has 1024"):
        rig.submit(moved)
    rig.close()


def test_arguments_beyond_the_limit_are_refused_with_the_limit() -> None:
    rig = Rig(card_of(largest_arguments=1024))
    lengths = np.zeros(200, dtype=np.int64)
    one = rig.device.alloc(64)
    with pytest.raises(Unsupported, match=r"its arguments take \d+ bytes; the device takes 1024"):
        rig.submit(Launch(Topk(0, lengths), ((one.at(0, 0),),), ((one.at(0, 0),),)))
    rig.close()


def test_more_spans_than_the_device_takes_in_a_launch_are_refused_with_the_limit() -> None:
    rig = Rig(card_of(most_spans=10))
    one = rig.device.alloc(64)
    spans = Spans([(i, 1) for i in range(10)])
    with pytest.raises(Unsupported, match="11 spans; the device takes 10 in one command"):
        rig.submit(Launch(Gather(), ((Segment(one, spans),),), ((one.at(32, 10),),)))
    rig.close()


def test_a_memory_that_is_full_says_what_is_free(rig: Rig) -> None:
    rig.card = card_of(capacity=MIB)
    device = rig.open()
    regions = [device.alloc(MIB // 4) for _ in range(4)]
    with pytest.raises(OutOfMemory, match=f"0 of {MIB} are free"):
        device.alloc(1)
    device.free(regions[0])
    device.free(regions[2])
    with pytest.raises(OutOfMemory, match=f"the largest piece that is free has {MIB // 4}"):
        device.alloc(MIB // 2)
    assert device.alloc(MIB // 4).nbytes == MIB // 4


def test_a_region_that_the_device_refuses_is_not_kept(rig: Rig) -> None:
    device = rig.device
    rig.card.memory.add_region(Place(900, 0, 128))
    with pytest.raises(OutOfMemory, match="would lie over region 900"):
        device.alloc(64)
    rig.card.memory.drop_region(900)
    again = device.alloc(device.info.memories[0].capacity)
    assert rig.card.memory.numbers == {again.id}


def test_a_region_in_use_is_not_freed(rig: Rig) -> None:
    one = rig.region(noise(64))
    completion = rig.submit(Read(one.all(), np.zeros(64, dtype=np.uint8)))
    with pytest.raises(Busy):
        rig.device.free(one)
    wait(rig.site.clock, completion)
    rig.device.free(one)
    assert not rig.card.memory.numbers


def test_runs_that_only_the_device_can_judge_end_the_command_with_its_reason(rig: Rig) -> None:
    case = Case("float32", tokens=30)
    place = case.layout(case.all_rows(), "paged")
    wrong = case.attend_args(place.runs[::-1].copy(), case.roots_of(case.all_rows()))
    moved = rig.moved(Launch(wrong, (whole(case.queries), place.keys, place.values), (room(4 * 66),)))
    (error,) = rig.error_of(rig.submit(moved))
    assert isinstance(error, OutOfRange)
    assert "out of order" in str(error)
    assert rig.read(rig.region(noise(10))).tobytes() == noise(10).tobytes()


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_closing_ends_the_session_on_the_device(rig: Rig) -> None:
    rig.region(noise(64))
    assert rig.card.memory.numbers
    rig.device.close()
    assert not rig.card.memory.numbers
    with pytest.raises(Gone, match="closed"):
        rig.device.alloc(64)


def test_a_driver_that_died_is_replaced_by_a_new_session(rig: Rig) -> None:
    old = rig.region(noise(64))
    rig.card.hold()
    lost = rig.submit(gather(old, old))
    rig.device.poll()
    frames = list(rig.card.processor.posted)
    first = rig.device
    rig.card.processor.held = False
    second = rig.open()
    for frame in frames:
        rig.card.processor.post(frame)
        second.poll()
    one = rig.region(noise(100, seed=3))
    assert rig.read(one).tobytes() == noise(100, seed=3).tobytes()
    (error,) = rig.error_of(lost)
    assert isinstance(error, Gone)
    with pytest.raises(Gone):
        first.alloc(64)


def test_answers_of_an_earlier_session_in_the_ring_are_passed_over(rig: Rig) -> None:
    rig.region(noise(64))
    old = rig.card.processor.posted[-1]
    rig.device.close()
    device = rig.open()
    one = device.alloc(64)
    rig.card.hold()
    completion = rig.submit(Write(one.all(), noise(64)))
    device.poll()
    rig.card.processor.post(old)
    for _ in range(3):
        device.poll()
    assert not completion.done
    assert device.counts.stale == 1
    rig.card.release()
    wait(rig.site.clock, completion)


def test_the_card_forgets_a_session_when_it_is_reset(rig: Rig) -> None:
    one = rig.region(noise(64))
    rig.card.reset()
    (error,) = rig.error_of(rig.submit(gather(one, one)))
    assert isinstance(error, Gone)
    assert "within 50 ms" in str(error)
    assert rig.open().alloc(64).nbytes == 64


def test_queues_of_both_executors_are_numbered_one_after_the_other(rig: Rig) -> None:
    one = rig.region(noise(64))
    for queue in (LAUNCHES, LAUNCHES + 1):
        rig.run(gather(one, one), queue)
    for queue in (TRANSFERS, TRANSFERS + 1):
        rig.run(Read(one.all(), np.zeros(64, dtype=np.uint8)), queue)
    with pytest.raises(Unsupported):
        rig.submit(gather(one, one), TRANSFERS)


def test_estimates_learn_from_what_was_measured(rig: Rig) -> None:
    one = rig.region(noise(64))
    command = Read(one.all(), np.zeros(64, dtype=np.uint8))
    assert "assumed" in rig.device.estimate(command, TRANSFERS).source
    completion = rig.run(command)
    learned = rig.device.estimate(command, TRANSFERS)
    assert "measured" in learned.source
    assert learned.duration_ns == completion.ended_ns - completion.started_ns


def test_a_window_that_was_handed_in_needs_no_path(rig: Rig) -> None:
    device = open_pnm("card", rig.site, {}, window=rig.card.bus())
    assert device.info.notes["path"] == "a window that was handed in"
    device.close()


def test_regions_of_the_test_are_host_memory() -> None:
    """The rig itself: a launch is moved with its bytes."""
    rig = Rig()
    one = region(noise(32))
    moved = rig.moved(Launch(Gather(), ((one.all(),),), (room(32),)))
    assert rig.card.peek(moved.reads[0][0].region.id, 0, 32) == noise(32).tobytes()
    rig.close()
