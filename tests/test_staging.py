"""Staged copies: bytes, closed forms, failures in the middle, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import FAR, PROFILES, duration, finish, open_machine
from tests.nvme_rig import MIB
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import Cancelled, MediaError, Misaligned
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.staging import Stage, StagedCopy, cut, staged_copy
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.runtime.loop import Loop

KB = 1_000
H2D = 2
"""The queue of the test GPU's engine that copies to it."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Platform]:
    with open_machine(tmp_path) as platform:
        yield platform


def alloc(platform: Platform, name: str, nbytes: int, phantom: bool = True) -> Region:
    return platform.devices[f"emu:{name}"].alloc(nbytes, phantom=phantom)


def from_card(platform: Platform, bounce: Region, slots: int = 2) -> list[Stage]:
    """cxl → dram (by the cores) → gpu (by its copy engine)."""
    return [Stage(platform.devices["emu:dram"], 0, bounce, slots), Stage(platform.devices["emu:gpu"], H2D)]


def from_drive(platform: Platform, bounce: Region, slots: int = 2) -> list[Stage]:
    """nvme → dram (by the drive's DMA) → gpu (by its copy engine)."""
    return [Stage(platform.devices["emu:nvme"], 0, bounce, slots), Stage(platform.devices["emu:gpu"], H2D)]


def elapsed(platform: Platform, copy: StagedCopy, start: int) -> int:
    return max(finish(platform, *copy.completions)) - start


# -- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_the_first_chunk_and_then_the_slowest_stage_for_each_other(machine: Platform, slots: int) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    copy = staged_copy(source.at(0, 800 * KB), target.at(0, 800 * KB), from_card(machine, bounce, slots), 100 * KB)
    # the cores read the card at 4 bytes/ns, 440 ns away, 1,000 ns of their own; then pcie at 5 bytes/ns, 800 ns
    one, other = 100 * KB // 4 + 1_440, 100 * KB // 5 + 800
    assert elapsed(machine, copy, 0) == one + 7 * one + other
    assert machine.clock.now() == 8 * one + other


def test_the_slower_stage_may_be_the_last(tmp_path: Path) -> None:
    slow = PROFILES["gpu"].replace("20000000000", "1000000000")
    with open_machine(tmp_path, profiles={"gpu": slow}) as machine:
        source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
        copy = staged_copy(source.at(0, 800 * KB), target.at(0, 800 * KB), from_card(machine, bounce), 100 * KB)
        one, other = 100 * KB // 4 + 1_440, 100 * KB + 800
        assert elapsed(machine, copy, 0) == one + 8 * other


def test_with_one_slot_the_stages_take_turns(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    stages = from_card(machine, bounce, slots=1)
    copy = staged_copy(source.at(0, 800 * KB), target.at(0, 800 * KB), stages, 100 * KB)
    assert elapsed(machine, copy, 0) == 8 * (100 * KB // 4 + 1_440 + 100 * KB // 5 + 800)


def test_three_stages_with_a_smaller_last_chunk(machine: Platform) -> None:
    """The middle stage is the slowest; the last chunk is shorter at every stage, and ends the whole."""
    source, target = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB)
    near, far = alloc(machine, "dram", MIB), alloc(machine, "cxl", MIB)
    cores, gpu = machine.devices["emu:dram"], machine.devices["emu:gpu"]
    stages = [Stage(cores, 0, near), Stage(cores, 1, far), Stage(gpu, H2D)]
    copy = staged_copy(source.at(0, 250 * KB), target.at(0, 250 * KB), stages, 1 * KB)
    assert copy.chunk_nbytes == KB
    assert len(copy.completions) == 3 * 250
    finish(machine, *copy.completions)
    last = copy.completions[-3:]
    assert last[0].ended_ns <= last[1].started_ns
    assert last[1].ended_ns <= last[2].started_ns


def test_a_drive_to_a_gpu_within_a_percent_of_the_slower_stage(machine: Platform) -> None:
    source, target, bounce = (
        alloc(machine, "nvme", 4 * MIB),
        alloc(machine, "gpu", 4 * MIB),
        alloc(machine, "dram", MIB),
    )
    stages = from_drive(machine, bounce)
    chunk = 128 << 10
    # a chunk by itself at each stage, as measured on the idle machine
    one = duration(machine, stages[0].device, Copy(source.at(0, chunk), bounce.at(0, chunk)), 0)
    other = duration(machine, stages[1].device, Copy(bounce.at(0, chunk), target.at(0, chunk)), H2D)
    start = machine.clock.now()
    copy = staged_copy(source.all(), target.all(), stages, chunk)
    took = elapsed(machine, copy, start)
    closed_form = one + 31 * max(one, other) + other
    assert abs(took - closed_form) * 100 <= closed_form
    assert took >= 4 * MIB / 5  # both links carry 5 bytes/ns


def test_smaller_chunks_are_faster_until_overheads_dominate(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", 2 * MIB)
    took = {}
    for chunk in [MIB >> i for i in range(10)]:
        start = machine.clock.now()
        took[chunk] = elapsed(
            machine, staged_copy(source.all(), target.all(), from_card(machine, bounce), chunk), start
        )
        count = MIB // chunk
        one, other = -(-chunk // 4) + 1_440, -(-chunk // 5) + 800
        assert took[chunk] == count * one + other
    best = min(took, key=lambda chunk: took[chunk])
    chunks = sorted(took)
    assert chunks[0] < best < chunks[-1]
    falling = [took[chunk] for chunk in chunks if chunk <= best]
    rising = [took[chunk] for chunk in chunks if chunk >= best]
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    assert staged_copy(source.all(), target.all(), from_card(machine, bounce)).chunk_nbytes == best


def test_the_default_chunk_is_within_the_bounce_slots(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", 10 * KB)
    copy = staged_copy(source.all(), target.all(), from_card(machine, bounce))
    assert copy.chunk_nbytes == 5 * KB


def test_stages_on_one_queue_take_turns_and_do_not_block_each_other(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "cxl", MIB), alloc(machine, "dram", MIB)
    cores = machine.devices["emu:dram"]
    copy = staged_copy(source.all(), target.all(), [Stage(cores, 0, bounce), Stage(cores, 0)], MIB // 8)
    # the card is read at 4 and written at 2 bytes/ns, both times 440 + 1,000 ns away
    assert elapsed(machine, copy, 0) == 8 * (MIB // 8 // 4 + MIB // 8 // 2 + 2 * 1_440)


def test_it_starts_after_what_it_is_told_to(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    first = machine.devices["emu:dram"].submit(Copy(source.at(0, MIB // 2), source.at(MIB // 2, MIB // 2)), 1)
    copy = staged_copy(source.all(), target.all(), from_card(machine, bounce), MIB // 2, after=[first])
    finish(machine, first, *copy.completions)
    assert copy.completions[0].started_ns == first.ended_ns


# -- bytes --------------------------------------------------------------------------------------------------------


def spans_of(sizes: list[int], gap: int) -> Spans:
    offsets = np.cumsum([0, *(size + gap for size in sizes[:-1])])
    return Spans(np.stack([offsets, sizes], axis=1).astype(np.int64))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.integers(1, 600), st.integers(0, 50))
def test_a_cut_list_holds_the_same_bytes_in_the_same_order(sizes: list[int], chunk: int, gap: int) -> None:
    spans = spans_of(sizes, gap)
    runs = list(cut(spans, chunk))
    assert [run.nbytes for run in runs[:-1]] == [chunk] * (len(runs) - 1)

    def positions(parts: list[Spans]) -> list[int]:
        return [at for part in parts for offset, nbytes in part.array.tolist() for at in range(offset, offset + nbytes)]

    assert positions(runs) == positions([spans])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


@given(st.integers(1, 2_000), st.integers(1, 12), st.integers(2, 4))
def test_equal_chunks_take_the_closed_form(folder: Path, twenties: int, count: int, slots: int) -> None:
    chunk = 20 * twenties
    with open_machine(folder) as machine:
        source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
        whole = count * chunk
        copy = staged_copy(source.at(0, whole), target.at(0, whole), from_card(machine, bounce, slots), chunk)
        one, other = chunk // 4 + 1_440, chunk // 5 + 800
        assert elapsed(machine, copy, 0) == one + (count - 1) * max(one, other) + other


@given(
    st.lists(st.integers(0, 9_000), min_size=1, max_size=6),
    st.integers(900, 7_000),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_every_byte_arrives_where_it_belongs(folder: Path, sizes: list[int], chunk: int, slots: int, gap: int) -> None:
    with open_machine(folder) as machine:
        source, target = alloc(machine, "cxl", 1 << 18, phantom=False), alloc(machine, "gpu", 1 << 18, phantom=False)
        bounce = alloc(machine, "dram", slots * chunk, phantom=False)
        data = bytes_of(len(sizes), 1 << 18)
        write_bytes(machine.clock, machine.devices["emu:dram"], source.all(), data)
        take = spans_of(sizes, gap)
        put = Spans.one(17, take.nbytes)
        stages = from_card(machine, bounce, slots)
        copy = staged_copy(Segment(source, take), Segment(target, put), stages, chunk if take.nbytes else None)
        wait(machine.clock, copy.completions)
        assert copy.done
        got = read_bytes(machine.clock, machine.devices["emu:gpu"], target.at(17, take.nbytes), H2D)
        assert np.array_equal(got, np.concatenate([data[offset : offset + n] for offset, n in take.array.tolist()]))


def test_nothing_to_copy_is_done_at_once(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    copy = staged_copy(source.at(5, 0), target.at(9, 0), from_card(machine, bounce))
    assert copy.completions == ()
    assert copy.done


def test_a_coroutine_can_await_it(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)

    async def fetch() -> int:
        copy = await staged_copy(source.all(), target.all(), from_card(machine, bounce), MIB // 8)
        assert copy.done
        return machine.clock.now()

    assert Loop(machine.clock).run(fetch()) == 8 * (MIB // 32 + 1_440) + -(-MIB // 40) + 800


def test_real_devices_stage_as_well(tmp_path: Path) -> None:
    site = Site(clock=WallClock(), checker=HazardChecker())
    cpu = open_cpu("cpu0", site, {"capacity": 32 * MIB})
    options: dict[str, Any] = {"capacity": 8 * MIB, "create": True, "reaches": ["cpu0"]}
    one = open_nvme("nvme0", site, options | {"path": str(tmp_path / "one.img")})
    other = open_nvme("nvme1", site, options | {"path": str(tmp_path / "other.img")})
    with Platform("real", site, {"cpu0": cpu, "nvme0": one, "nvme1": other}, "cpu0"):
        source, target, bounce = one.alloc(4 * MIB), other.alloc(4 * MIB), cpu.alloc(2 * MIB)
        data = bytes_of(1, 4 * MIB)
        write_bytes(site.clock, one, source.all(), data)
        copy = staged_copy(source.all(), target.all(), [Stage(one, 0, bounce), Stage(other, 0)])
        wait(site.clock, copy.completions)
        assert np.array_equal(read_bytes(site.clock, other, target.all()), data)


# -- failures -----------------------------------------------------------------------------------------------------


def fail_in_the_middle(machine: Platform) -> tuple[StagedCopy, Region]:
    """Eight chunks of 64 KiB from the drive, of which the fourth cannot be read."""
    source, target, bounce = alloc(machine, "nvme", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", 128 << 10)
    machine.devices["emu:nvme"].firmware.inject(3 * 16)  # type: ignore[attr-defined]  # the back door of an emulator
    half = MIB // 2
    return staged_copy(source.at(0, half), target.at(0, half), from_drive(machine, bounce), 64 << 10), bounce


def test_a_failure_in_the_middle_cancels_what_comes_after_it_and_nothing_before(machine: Platform) -> None:
    copy, _ = fail_in_the_middle(machine)
    with pytest.raises(MediaError):
        wait(machine.clock, copy.completions)
    assert copy.done
    errors = [type(completion.error) for completion in copy.completions]
    assert errors[:6] == [type(None)] * 6
    assert errors[6] is MediaError
    assert errors[7:] == [Cancelled] * 9
    assert all(c.error.__cause__ is copy.completions[6].error for c in copy.completions[7:] if c.error is not None)


def test_after_a_failure_the_bounce_buffer_is_free_again_and_the_next_copy_works(machine: Platform) -> None:
    copy, bounce = fail_in_the_middle(machine)
    with pytest.raises(MediaError):
        wait(machine.clock, copy.completions)
    source, target = alloc(machine, "nvme", MIB // 2), alloc(machine, "gpu", MIB // 2)
    again = staged_copy(source.all(), target.all(), from_drive(machine, bounce), 64 << 10)
    wait(machine.clock, again.completions)
    machine.free(bounce)


def test_an_awaited_failure_is_the_first_one_and_leaves_no_error_unread(tmp_path: Path) -> None:
    async def fetch(copy: StagedCopy) -> None:
        with pytest.raises(MediaError):
            await copy

    machine = open_machine(tmp_path)
    Loop(machine.clock).run(fetch(fail_in_the_middle(machine)[0]))
    machine.close()  # raises what nobody looked at


def test_if_what_it_comes_after_fails_nothing_is_copied(machine: Platform) -> None:
    drive = machine.devices["emu:nvme"]
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    stored = alloc(machine, "nvme", 4096)
    near = alloc(machine, "dram", 4096)
    drive.firmware.inject(0)  # type: ignore[attr-defined]  # the back door of an emulator
    failing: Completion = drive.submit(Copy(stored.all(), near.all()))
    copy = staged_copy(source.all(), target.all(), from_card(machine, bounce), MIB // 4, after=[failing])
    machine.clock.run_until(lambda: copy.done, FAR)
    assert [type(completion.error) for completion in copy.completions] == [Cancelled] * 8
    with pytest.raises(Cancelled):
        wait(machine.clock, copy.completions)
    with pytest.raises(MediaError):
        failing.result()


# -- what is refused ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_together_is_refused_before_anything_is_queued(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    stages = from_card(machine, bounce)
    cores, engine = stages
    half = MIB // 2
    wrong: list[tuple[Segment, Segment, list[Stage], Any, str]] = [
        (source.at(0, 5), target.at(0, 6), stages, None, "5 bytes do not fit 6 bytes"),
        (source.at(1, MIB), target.all(), stages, None, "is not inside"),
        (source.all(), target.all(), [], None, "at least one stage"),
        (source.all(), target.all(), [cores], None, "the last stage has a bounce buffer"),
        (source.all(), target.all(), [engine, engine], None, "stage 0 of 2 has no bounce buffer"),
        (source.all(), target.all(), [cores, cores, engine], None, "bounce buffer of stage 1 is used"),
        (
            source.all(),
            target.all(),
            [Stage(cores.device, 0, source), engine],
            None,
            "bounce buffer of stage 0 is used",
        ),
        (source.all(), target.all(), [Stage(cores.device, 0, bounce, 0), engine], None, "0 slots of stage 0"),
        (source.all(), target.all(), [Stage(cores.device, 9, bounce), engine], None, "emu:dram has no queue 9"),
        (source.all(), target.all(), stages, 0, f"a chunk of 0 bytes; allowed: 256 to {half}, in multiples of 1"),
        (source.all(), target.all(), stages, half + 1, f"a chunk of {half + 1} bytes; allowed: 256 to {half}"),
        (source.all(), target.all(), stages, 4096.0, "a chunk of 4096.0 bytes; allowed: a whole number"),
        (source.all(), target.all(), stages, "4096", "a chunk of '4096' bytes; allowed: a whole number"),
        (source.all(), target.all(), stages, 255, "a chunk of 255 bytes; allowed: 256"),
    ]
    for take, put, way, chunk, message in wrong:
        with pytest.raises(ValueError, match=message):
            staged_copy(take, put, way, chunk)
    tiny = alloc(machine, "dram", 100)
    with pytest.raises(ValueError, match="allow chunks of 50 bytes, the depth of the queues and alignment 256"):
        staged_copy(source.all(), target.all(), from_card(machine, tiny))
    assert machine.clock.run_until(lambda: False, FAR) is False
    assert machine.devices["emu:dram"]._queues.pending == 0  # type: ignore[attr-defined]  # nothing was queued


def test_chunks_keep_to_the_grid_of_a_drive(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "nvme", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", 20_000)
    stages = from_drive(machine, bounce)
    copy = staged_copy(source.all(), target.all(), stages)
    assert copy.chunk_nbytes == 8192
    wait(machine.clock, copy.completions)
    with pytest.raises(ValueError, match="in multiples of 4096"):
        staged_copy(source.all(), target.all(), stages, 5_000)
    with pytest.raises(Misaligned):
        staged_copy(source.at(100, 4096), target.at(0, 4096), stages)


def test_a_chunk_larger_than_all_is_one_chunk(machine: Platform) -> None:
    source, target, bounce = alloc(machine, "cxl", MIB), alloc(machine, "gpu", MIB), alloc(machine, "dram", MIB)
    copy = staged_copy(source.at(0, 1000), target.at(0, 1000), from_card(machine, bounce), 4_000)
    assert elapsed(machine, copy, 0) == 250 + 1_440 + 200 + 800
