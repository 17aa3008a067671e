"""The nvme driver does what a device must: on a real file and on the operating system in memory, the same code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fake_system import FakeSystem
from tests.nvme_rig import MIB, Rig, host_memory, on_fake, on_file, spans
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy, Flush, Launch, Read, Write
from tierloop.devices.drivers import worker
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    Gone,
    Misaligned,
    OutOfMemory,
    OutOfRange,
    Unsupported,
)
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait


def least() -> FakeSystem:
    """4 KiB blocks, an old kernel, a file system without fallocate."""
    return FakeSystem(grid=4096, known_setup_flags=0, zero_range=False, punch_hole=False)


WAYS: dict[str, Callable[[Path], Rig]] = {
    "file, best way": lambda tmp_path: on_file(tmp_path),
    "file, posix": lambda tmp_path: on_file(tmp_path, io="posix"),
    "file, buffered": lambda tmp_path: on_file(tmp_path, direct=False),
    "memory, io_uring": lambda _: on_fake(),
    "memory, posix": lambda _: on_fake(io="posix"),
    "memory, the least that can be": lambda _: on_fake(least(), depth=1),
}


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Every way in which bytes can travel."""
    made = WAYS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def fake() -> Iterator[Rig]:
    """The operating system in memory, with io_uring."""
    made = on_fake()
    yield made
    made.close()


def test_scattered_bytes_come_back_as_written(rig: Rig) -> None:
    region = rig.device.alloc(2 * MIB)
    here = Segment(region, spans((4096, 8192), (1 * MIB, 700 * 1024), (0, 4096), (16384, 0), (12288, 4096)))
    data = bytes_of(1, here.spans.nbytes)
    rig.write(here, data)
    assert np.array_equal(rig.read(here), data)
    expected = np.zeros(2 * MIB, dtype=np.uint8)
    at = 0
    for offset, nbytes in here.spans.array.tolist():
        expected[offset : offset + nbytes] = data[at : at + nbytes]
        at += nbytes
    assert np.array_equal(rig.read(region.all()), expected)


@pytest.mark.parametrize("skew", [0, 1, 16, 511])
def test_host_buffers_may_lie_anywhere(rig: Rig, skew: int) -> None:
    region = rig.device.alloc(1 * MIB)
    data = np.empty(1 * MIB + 4096, dtype=np.uint8)
    start = -data.__array_interface__["data"][0] % 4096 + skew
    buffer = data[start : start + 1 * MIB - 4096]
    buffer[:] = bytes_of(2, len(buffer))
    kept = buffer.copy()
    rig.write(region.at(0, len(buffer)), buffer)
    buffer[:] = 0
    rig.run(Read(region.at(0, len(buffer)), buffer))
    assert np.array_equal(buffer, kept)


def test_a_buffer_off_the_grid_is_bounced_and_counted(fake: Rig) -> None:  # B6
    region = fake.device.alloc(64 * 1024)
    room = np.zeros(64 * 1024 + 8192, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % 4096
    fake.run(Read(region.all(), room[start : start + 64 * 1024]))
    assert fake.device.counts.bounced_nbytes == 0
    fake.run(Read(region.all(), room[start + 16 : start + 16 + 64 * 1024]))
    assert fake.device.counts.bounced_nbytes == 64 * 1024


def test_a_new_region_is_zeroed_where_other_bytes_lay(rig: Rig) -> None:
    first = rig.device.alloc(64 * 1024)
    where = rig.device.offset_of(first)
    rig.write(first.all(), bytes_of(3, 64 * 1024))
    rig.device.free(first)
    second = rig.device.alloc(64 * 1024)
    assert rig.device.offset_of(second) == where
    assert not rig.read(second.all()).any()


def test_a_later_span_of_one_write_wins(rig: Rig) -> None:
    region = rig.device.alloc(1 * MIB)
    here = Segment(region, Spans([(0, 65536), (32768, 65536), (4096, 4096)] * 4))
    data = bytes_of(4, here.spans.nbytes)
    rig.write(here, data)
    expected = np.zeros(98304, dtype=np.uint8)
    at = 0
    for offset, nbytes in here.spans.array.tolist():
        expected[offset : offset + nbytes] = data[at : at + nbytes]
        at += nbytes
    assert np.array_equal(rig.read(region.at(0, 98304)), expected)


def test_copies_reach_host_mapped_memory_in_both_directions(rig: Rig) -> None:
    device = rig.open(reaches=["dram"])
    region, dram = device.alloc(256 * 1024), host_memory(512 * 1024)
    assert dram.view is not None
    dram.view[:] = bytes_of(5, 512 * 1024)
    before = dram.view.copy()
    out = rig.run(Copy(dram.at(4096, 131072), region.at(65536, 131072)))
    assert np.array_equal(rig.read(region.at(65536, 131072)), before[4096 : 4096 + 131072])
    back = rig.run(Copy(region.at(65536, 131072), dram.at(300_000, 131072)))
    assert np.array_equal(dram.view[300_000 : 300_000 + 131072], before[4096 : 4096 + 131072])
    assert out.media_nbytes == back.media_nbytes == 131072
    assert out.traffic.read == {"dram": 131072}
    assert out.traffic.written == {"nvme0": 131072}


def test_host_spans_of_a_copy_may_end_inside_a_block(rig: Rig) -> None:
    device = rig.open(reaches=["dram"])
    region, dram = device.alloc(256 * 1024), host_memory(300_000)
    assert dram.view is not None
    dram.view[:] = bytes_of(6, 300_000)
    ragged = Segment(dram, spans((7, 1000), (100_001, 3000), (5000, 96), (60_000, 4096)))
    blocks = Segment(region, spans((8192, 4096), (131072, 4096)))
    rig.run(Copy(ragged, blocks))
    expected = np.concatenate([dram.view[o : o + n] for o, n in ragged.spans.array.tolist()])
    assert np.array_equal(rig.read(blocks), expected)
    elsewhere = Segment(dram, spans((200_003, 5000), (210_000, 3192)))
    rig.run(Copy(blocks, elsewhere))
    assert np.array_equal(dram.view[200_003:205_003], expected[:5000])
    assert np.array_equal(dram.view[210_000:213_192], expected[5000:])


def test_host_mapped_memory_is_read_and_written_without_the_medium(rig: Rig) -> None:
    device, dram = rig.open(reaches=["dram"]), host_memory(8192)
    here, data = Segment(dram, spans((4096, 1000), (7, 64))), bytes_of(18, 1064)
    assert rig.run(Write(here, data)).media_nbytes == 0
    rig.run(Copy(dram.at(4096, 1000), dram.at(100, 1000)))
    rig.run(Flush(dram.all()))
    into = np.empty(1064, dtype=np.uint8)
    rig.run(Read(Segment(dram, spans((100, 1000), (7, 64))), into))
    assert np.array_equal(into, data)
    assert device.counts.transfers == 0


def test_host_memory_that_its_owner_frees_before_a_copy_begins_is_an_error(fake: Rig) -> None:
    device, dram = fake.open(reaches=["dram"]), host_memory(1 * MIB)
    region = device.alloc(1 * MIB)
    first = device.submit(Read(region.all(), np.empty(1 * MIB, dtype=np.uint8)))
    late = device.submit(Copy(region.all(), dram.all()))
    dram.view = None
    with pytest.raises(OutOfRange, match="was freed before"):
        wait(fake.site.clock, [first, late])


def test_a_copy_within_the_device_counts_both_directions(rig: Rig) -> None:
    a, b = rig.device.alloc(1 * MIB), rig.device.alloc(1 * MIB)
    data = bytes_of(7, 1 * MIB)
    rig.write(a.all(), data)
    done = rig.run(Copy(a.all(), b.all()))
    assert np.array_equal(rig.read(b.all()), data)
    assert done.media_nbytes == 2 * MIB


def test_a_copy_passes_through_several_windows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WINDOW", 64 * 1024)
    device, dram = rig.open(reaches=["dram"]), host_memory(700_000)
    assert dram.view is not None
    dram.view[:] = bytes_of(19, 700_000)
    region = device.alloc(1 * MIB)
    here = Segment(region, spans((512 * 1024, 200 * 1024), (0, 200 * 1024)))
    rig.run(Copy(Segment(dram, spans((3, 300_001), (300_007, 109_599))), here))
    expected = np.concatenate([dram.view[3:300_004], dram.view[300_007:409_606]])
    assert np.array_equal(rig.read(here), expected)
    rig.run(Copy(here, region.at(256 * 1024, 400 * 1024)))
    assert np.array_equal(rig.read(region.at(256 * 1024, 400 * 1024)), expected)


def test_a_copy_onto_itself_reads_everything_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WINDOW", 64 * 1024)
    region = rig.device.alloc(1 * MIB)
    data = bytes_of(8, 1 * MIB)
    rig.write(region.all(), data)
    rig.run(Copy(region.at(0, 768 * 1024), region.at(256 * 1024, 768 * 1024)))
    assert np.array_equal(rig.read(region.at(256 * 1024, 768 * 1024)), data[: 768 * 1024])


def test_commands_without_bytes_end_well(rig: Rig) -> None:
    device = rig.open(reaches=["dram"])
    region, dram = device.alloc(4096), host_memory(4096)
    nothing = np.empty(0, dtype=np.uint8)
    for command in (
        Read(Segment(region, spans()), nothing),
        Write(Segment(region, spans((0, 0))), nothing),
        Copy(Segment(region, spans()), Segment(dram, spans())),
        Copy(Segment(region, spans()), Segment(region, spans((4096, 0)))),
        Flush(Segment(region, spans())),
    ):
        assert rig.run(command).media_nbytes == 0


def test_flushed_data_survives_closing_and_is_adopted(rig: Rig) -> None:
    region = rig.device.alloc(128 * 1024)
    data = bytes_of(9, 128 * 1024)
    rig.write(region.all(), data)
    rig.flush(region)
    where = rig.device.offset_of(region)
    rig.device.close()
    again = rig.open().adopt(where, 128 * 1024)
    assert np.array_equal(rig.read(again.all()), data)


def test_the_bytes_lie_in_the_file_where_the_device_says(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    rig.device.alloc(4096)
    region = rig.device.alloc(64 * 1024)
    data = bytes_of(10, 64 * 1024)
    rig.write(region.all(), data)
    rig.flush(region)
    where = rig.device.offset_of(region)
    rig.close()
    assert Path(rig.path).read_bytes()[where : where + 64 * 1024] == data.tobytes()


@pytest.mark.parametrize("io", ["io_uring", "posix"])
def test_a_flush_makes_durable_what_was_written_before_it(io: str) -> None:
    rig = on_fake(io=io)
    region = rig.device.alloc(8192)
    where = rig.device.offset_of(region)
    kept, lost = bytes_of(11, 8192), bytes_of(12, 8192)
    rig.write(region.all(), kept)
    rig.flush(region)
    rig.write(region.all(), lost)
    rig.fake.crash()
    rig.opened.clear()
    again = rig.open().adopt(where, 8192)
    assert np.array_equal(rig.read(again.all()), kept)
    assert rig.fake.calls["uring sync" if io == "io_uring" else "fdatasync"] == 1
    rig.close()


def test_bytes_travel_the_way_that_the_notes_name(rig: Rig) -> None:
    region = rig.device.alloc(64 * 1024)
    rig.write(region.all(), bytes_of(13, 64 * 1024))
    done = rig.run(Read(region.all(), np.empty(64 * 1024, dtype=np.uint8)))
    counts = rig.device.counts
    assert done.media_nbytes == 64 * 1024
    assert counts.read_nbytes == counts.written_nbytes == 64 * 1024
    assert counts.transfers >= 2
    if isinstance(rig.system, FakeSystem):
        calls, io = rig.fake.calls, rig.device.info.notes["io"]
        assert (calls["uring write"] > 0) == (io == "io_uring")
        assert (calls["pwrite"] > 0) == (io == "posix" or not rig.fake.zero_range)


def test_a_large_span_is_split_and_small_neighbours_are_joined(fake: Rig) -> None:
    region = fake.device.alloc(2 * MIB)
    fake.fake.calls.clear()
    fake.write(region.all(), bytes_of(14, 2 * MIB))
    assert fake.fake.calls["uring write"] == 4
    fake.fake.calls.clear()
    fake.read(Segment(region, Spans.equal(np.arange(0, 131072, 4096), 4096)))
    assert fake.fake.calls["uring read"] == 1


def test_many_transfers_are_in_flight_at_once(fake: Rig) -> None:
    region = fake.device.alloc(2 * MIB)
    fake.fake.calls.clear()
    fake.read(Segment(region, Spans.equal(np.arange(0, 2 * MIB, 8192), 4096)))
    assert fake.fake.calls["uring read"] == 256
    assert fake.fake.calls["enter"] <= 64


def test_commands_of_one_queue_take_effect_in_order(rig: Rig) -> None:
    region = rig.device.alloc(64 * 1024)
    writes = [rig.device.submit(Write(region.all(), np.full(64 * 1024, i, dtype=np.uint8))) for i in range(20)]
    wait(rig.site.clock, writes)
    assert set(rig.read(region.all()).tolist()) == {19}
    ends = [w.ended_ns for w in writes]
    assert ends == sorted(ends)


def test_another_queue_waits_for_what_it_comes_after(rig: Rig) -> None:
    a, b = rig.device.alloc(256 * 1024), rig.device.alloc(256 * 1024)
    data, into = bytes_of(15, 256 * 1024), np.empty(256 * 1024, dtype=np.uint8)
    write = rig.device.submit(Write(a.all(), data), queue=0)
    copy = rig.device.submit(Copy(a.all(), b.all()), queue=1, after=[write])
    read = rig.device.submit(Read(b.all(), into), queue=0, after=[copy])
    wait(rig.site.clock, read)
    assert np.array_equal(into, data)
    assert write.ended_ns <= copy.started_ns
    wait(rig.site.clock, [write, copy])


def test_nothing_settles_before_the_clock_runs(rig: Rig) -> None:
    region = rig.device.alloc(4096)
    completion = rig.device.submit(Read(region.all(), np.empty(4096, dtype=np.uint8)))
    assert not completion.done
    with pytest.raises(Busy, match="used by a command"):
        rig.device.free(region)
    wait(rig.site.clock, completion)
    rig.device.free(region)


def test_polling_settles_what_is_over(rig: Rig) -> None:
    region = rig.device.alloc(4096)
    completion = rig.device.submit(Read(region.all(), np.empty(4096, dtype=np.uint8)))
    deadline = rig.site.clock.now() + 60_000_000_000
    while not completion.done and rig.site.clock.now() < deadline:
        rig.device.poll()
    assert completion.result().media_nbytes == 4096


@pytest.mark.parametrize("span", [(1, 512), (512, 1), (100, 4096), (0, 4095)])
def test_a_span_off_the_grid_is_refused(rig: Rig, span: tuple[int, int]) -> None:
    region = rig.device.alloc(8192)
    with pytest.raises(Misaligned, match="grid"):
        rig.device.submit(Read(region.at(*span), np.empty(span[1], dtype=np.uint8)))
    assert rig.run(Read(region.all(), np.empty(8192, dtype=np.uint8))).error is None


def test_a_span_outside_its_region_is_refused(rig: Rig) -> None:
    region = rig.device.alloc(8192)
    for command in (
        Read(region.at(4096, 8192), np.empty(8192, dtype=np.uint8)),
        Write(region.at(8192, 4096), np.empty(4096, dtype=np.uint8)),
        Copy(region.at(0, 4096), region.at(8192, 4096)),
        Flush(region.at(0, 8193)),
    ):
        with pytest.raises(OutOfRange, match="outside"):
            rig.device.submit(command)


def test_a_region_that_is_freed_or_foreign_is_refused(fake: Rig) -> None:
    region = fake.device.alloc(4096)
    fake.device.free(region)
    buffer = np.empty(4096, dtype=np.uint8)
    for command in (Read(region.all(), buffer), Flush(region.all())):
        with pytest.raises(OutOfRange, match="freed"):
            fake.device.submit(command)
    with pytest.raises(OutOfRange, match="not allocated here"):
        fake.device.free(region)
    fake.device.alloc(4096)
    forged = Region("nvme0", "nvme0", 1, 1 * MIB)
    with pytest.raises(OutOfRange, match="not allocated here"):
        fake.device.submit(Read(forged.at(0, 4096), buffer))
    with pytest.raises(OutOfRange, match="not allocated here"):
        fake.device.offset_of(forged)


def test_what_the_engine_cannot_do_is_refused_beforehand(fake: Rig) -> None:
    device = fake.open(reaches=["dram"])
    region, dram = device.alloc(4096), host_memory(8192)
    buffer = np.empty(4096, dtype=np.uint8)
    unmapped = Region("gpu0", "dram", 0, 4096)
    sealed = host_memory(4096)
    assert sealed.view is not None
    sealed.view.setflags(write=False)
    refused: list[tuple[object, type[Exception], str]] = [
        (Copy(region.all(), unmapped.all()), Unsupported, "not mapped"),
        (Copy(region.all(), host_memory(4096, "cxl").all()), Unsupported, "does not reach cxl"),
        (Copy(region.all(), sealed.all()), OutOfRange, "read-only"),
        (Copy(region.all(), dram.at(0, 512)), OutOfRange, "do not fit"),
        (Write(sealed.all(), buffer), OutOfRange, "read-only"),
        (Launch(Gather(), ((region.all(),),), ((region.all(),),)), Unsupported, "offers"),
    ]
    for command, kind, text in refused:
        with pytest.raises(kind, match=text):
            device.submit(command)  # type: ignore[arg-type]  # a list of different commands
    with pytest.raises(OutOfRange, match="queue 7"):
        device.submit(Read(region.all(), buffer), queue=7)
    with pytest.raises(Unsupported, match="phantom"):
        device.alloc(4096, phantom=True)
    with pytest.raises(OutOfRange, match="no memory 'hbm'"):
        device.alloc(4096, memory="hbm")
    for nbytes in (0, -1):
        with pytest.raises(OutOfRange, match="a region has at least 1"):
            device.alloc(nbytes)


def test_a_capacity_is_a_limit_and_freed_bytes_are_found_again(rig: Rig) -> None:  # B7
    regions = [rig.device.alloc(1 * MIB) for _ in range(8)]
    with pytest.raises(OutOfMemory, match="0 of 8388608 are free in nvme0"):
        rig.device.alloc(4096)
    for region in (regions[2], regions[4], regions[3], regions[7]):
        rig.device.free(region)
    with pytest.raises(OutOfMemory, match="the largest piece that is free has 3145728"):
        rig.device.alloc(3 * MIB + 4096)
    grown = rig.device.alloc(3 * MIB)
    assert rig.device.offset_of(grown) == rig.device.offset_of(regions[1]) + 1 * MIB


@pytest.mark.parametrize("zero_range", [True, False])
def test_allocated_space_is_reserved_and_given_back(
    zero_range: bool,
) -> None:  # B6: with or without the calls of fallocate
    rig = on_fake(FakeSystem(zero_range=zero_range))
    region = rig.device.alloc(1 * MIB)
    assert rig.fake.used_nbytes == 1 * MIB
    rig.device.free(region)
    assert rig.fake.used_nbytes == 0
    rig.close()


def test_adopting_takes_only_what_is_free_and_inside(rig: Rig) -> None:
    region = rig.device.alloc(8192)
    where = rig.device.offset_of(region)
    with pytest.raises(Busy, match="another region"):
        rig.device.adopt(where + 4096, 4096)
    for offset, nbytes in ((-4096, 4096), (8 * MIB, 4096), (8 * MIB - 4096, 4097), (100, 4096), (8192, 0)):
        with pytest.raises(OutOfRange, match="adopt"):
            rig.device.adopt(offset, nbytes)


def test_a_second_owner_is_refused(rig: Rig) -> None:  # B10
    assert rig.device.info.kind == "nvme"
    with pytest.raises(Busy, match="another owner"):
        rig.open()
    rig.opened[0].close()
    assert rig.open().info.name == "nvme0"


def test_a_closed_device_says_gone(rig: Rig) -> None:
    region = rig.device.alloc(4096)
    rig.device.close()
    rig.device.close()
    with pytest.raises(Gone, match="closed"):
        rig.device.submit(Read(region.all(), np.empty(4096, dtype=np.uint8)))
    with pytest.raises(Gone, match="closed"):
        rig.device.alloc(4096)
    with pytest.raises(Gone, match="closed"):
        rig.device.free(region)


def test_closing_ends_everything_that_is_open(rig: Rig) -> None:
    region = rig.device.alloc(4 * MIB)
    into = np.empty(4 * MIB, dtype=np.uint8)
    completions = [rig.device.submit(Read(region.all(), into)) for _ in range(5)]
    rig.device.close()
    assert all(c.done for c in completions)
    for completion in completions[1:]:
        with pytest.raises((Gone, Cancelled)):
            completion.result()
    if isinstance(rig.system, FakeSystem):
        assert rig.fake.open_fds == 0


def test_closing_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rig = on_file(tmp_path)
    rig.write(rig.device.alloc(4096).all(), bytes_of(16, 4096))
    rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


HOLDER = """
import sys
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Flush, Write
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.site import Site
from tierloop.devices.waiting import wait, write_bytes
site = Site(clock=WallClock())
device = open_nvme("nvme0", site, {"path": sys.argv[1], "capacity": 1 << 20, "create": True})
region = device.alloc(65536)
write_bytes(site.clock, device, region.all(), b"k" * 65536)
wait(site.clock, device.submit(Flush(region.all())))
print(device.offset_of(region), flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_flushed_bytes_and_no_lock(tmp_path: Path) -> None:
    rig = on_file(tmp_path, capacity=1 * MIB)
    command = [sys.executable, "-c", HOLDER, rig.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        where = int(holder.stdout.readline())
        with pytest.raises(Busy, match="another owner"):
            rig.open()
        holder.kill()
    region = rig.open().adopt(where, 65536)
    assert rig.read(region.all()).tobytes() == b"k" * 65536
    rig.close()


def test_a_program_may_end_without_closing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path / "medium")], input=b"", timeout=300, check=False
    )
    assert ended.returncode == 0


def test_info_describes_a_persistent_block_memory(rig: Rig) -> None:
    info = rig.open(reaches=["dram", "cxl0"]).info
    (memory,), (executor,) = info.memories, info.executors
    assert (memory.name, memory.capacity, memory.persistent, memory.byte_addressable) == ("nvme0", 8 * MIB, True, False)
    assert memory.alignment in (512, 1024, 2048, 4096)
    assert (executor.kind, executor.queues, executor.kernels) == ("dma", (0, 1), frozenset())
    assert executor.verbs == {"read", "write", "copy", "flush"}
    assert [p.memory for p in executor.paths] == ["nvme0", "dram", "cxl0"]
    assert info.provenance == "real"
    assert info.notes["io"] in ("io_uring", "posix")
    assert info.notes["direct"] in ("true", "false")


def test_estimates_say_how_they_are_known(fake: Rig) -> None:
    device = fake.open(latency_ns=80_000, read_bytes_per_s=2_000_000_000)
    region = device.alloc(1 * MIB)
    read = Read(region.all(), np.empty(1 * MIB, dtype=np.uint8))
    write = Write(region.all(), np.empty(1 * MIB, dtype=np.uint8))
    declared, assumed = device.estimate(read), device.estimate(write)
    assert (declared.duration_ns, declared.source.split(":")[0]) == (80_000 + 524_288, "options")
    assert (assumed.margin_ns, assumed.source.split(":")[0]) == (assumed.duration_ns, "assumed")
    fake.run(read)
    assert device.estimate(read).source == "measured: a line through 1 completions of read"
    assert device.estimate(write) == assumed


def test_a_device_opens_on_its_own_site_without_a_checker(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    rig.site = Site(clock=WallClock())
    region = rig.device.alloc(4096)
    rig.write(region.all(), bytes_of(17, 4096))
    rig.close()


def test_what_the_page_cache_may_have_served_is_counted_apart() -> None:  # B15
    rig = on_fake(FakeSystem(direct=False))
    region = rig.device.alloc(1 * MIB)
    rig.write(region.all(), bytes_of(1, 1 * MIB))
    rig.read(region.at(0, 4096))
    counts = rig.device.counts
    assert (counts.direct_nbytes, counts.buffered_nbytes) == (0, 1 * MIB + 4096)
    assert rig.device.info.notes["media_bytes"].startswith("unknown")
    rig.close()


def test_useful_bytes_are_those_of_commands_that_ended_well() -> None:
    rig = on_fake()
    region = rig.device.alloc(1 * MIB)
    rig.write(region.all(), bytes_of(1, 1 * MIB))
    rig.fake.inject("read", errno.EIO, offset=rig.device.offset_of(region))
    rig.error_of(Read(region.all(), np.zeros(1 * MIB, dtype=np.uint8)))
    counts = rig.device.counts
    assert counts.useful_nbytes == 1 * MIB
    assert counts.direct_nbytes == counts.read_nbytes + counts.written_nbytes >= 1 * MIB
    rig.close()
