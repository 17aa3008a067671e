"""Memory: bytes come back as they were written, capacity ends, and what is not there is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierloop.devices.commands import Command, Copy, Flush, Read, Write
from tierloop.devices.conformance.subject import Bytes, Lane, Skip, Subject, copies, expect, refused
from tierloop.devices.errors import Busy, Misaligned, OutOfMemory, OutOfRange, Unsupported
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

FILL_NBYTES = 64 << 20
"""Memories up to 64 MiB are filled with real regions; larger ones with phantom regions, where the device makes them."""


def same(got: Bytes, want: Bytes, what: str) -> None:
    """Fail unless the bytes are the same; says how many are not, and the first of them."""
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        at = int(wrong[0])
        expect(False, f"{what}: {wrong.size} of {want.size} bytes differ, first at {at}: {got[at]}, not {want[at]}")


def check_fresh_memory_is_zero(subject: Subject) -> None:
    """`alloc` gives zeroed bytes, also where freed bytes lay, of the same size or of another."""
    for memory in subject.memories():
        room = subject.room(memory)
        half = max(room // 2 // memory.alignment, 1) * memory.alignment
        for round_number, nbytes in enumerate((room, room, half, half, room)):
            region = subject.alloc(nbytes, memory)
            same(
                subject.read(region.all()), np.zeros(region.nbytes, np.uint8), f"region {round_number} of {memory.name}"
            )
            subject.write(region.all(), subject.bytes(region.nbytes))
            subject.platform.free(region)


def check_a_region_is_what_was_asked_for(subject: Subject) -> None:
    """A region knows its size, its memory and its device, and every region is another one."""
    for memory in subject.memories():
        nbytes = subject.room(memory)
        first, second = subject.alloc(nbytes, memory), subject.device.alloc(nbytes, memory.name)
        for region in (first, second):
            said = (region.nbytes, region.memory, region.device, region.freed, region.phantom)
            expect(said == (nbytes, memory.name, subject.info.name, False, False), f"a region says of itself: {said}")
        expect(first.id != second.id, f"two regions of {memory.name} have the number {first.id}")
    default = subject.device.alloc(subject.room(subject.info.memories[0]))
    expect(default.memory == subject.info.memories[0].name, f"alloc without a memory took {default.memory}")


def check_every_byte_comes_back(subject: Subject) -> None:
    """Written in many odd pieces out of order, read in other odd pieces, and as a whole."""
    for memory in subject.memories():
        region = subject.alloc(subject.room(memory), memory)
        for pieces in (1, 2, 7, 30):
            data = subject.bytes(region.nbytes)
            spans = subject.cut(region.nbytes, memory.alignment, pieces)
            subject.write(Segment(region, spans), data)
            want = np.zeros(region.nbytes, np.uint8)
            at = 0
            for offset, nbytes in spans.array.tolist():
                want[offset : offset + nbytes] = data[at : at + nbytes]
                at += nbytes
            same(subject.read(region.all()), want, f"{memory.name}, written in {len(spans)} spans")
            other = subject.cut(region.nbytes, memory.alignment, pieces + 3)
            cut = np.concatenate([want[o : o + n] for o, n in other.array.tolist()])
            same(subject.read(Segment(region, other)), cut, f"{memory.name}, read in {len(other)} spans")


def check_a_write_touches_nothing_else(subject: Subject) -> None:
    """The bytes around a span, and the regions beside it, keep what they had."""
    for memory in subject.memories():
        grid = memory.alignment
        regions = [subject.alloc(subject.room(memory), memory) for _ in range(3)]
        contents = [subject.bytes(r.nbytes) for r in regions]
        for region, data in zip(regions, contents, strict=True):
            subject.write(region.all(), data)
        units = regions[1].nbytes // grid
        spans = [(u * grid, grid) for u in range(1, units - 1, 2)][:32]
        new = subject.bytes(grid * len(spans))
        subject.write(Segment(regions[1], Spans(spans)), new)
        for i, (offset, nbytes) in enumerate(spans):
            contents[1][offset : offset + nbytes] = new[i * grid : (i + 1) * grid]
        for i, (region, data) in enumerate(zip(regions, contents, strict=True)):
            same(subject.read(region.all()), data, f"region {i} of {memory.name} after a write to parts of region 1")


def check_a_later_write_wins(subject: Subject) -> None:
    """Overlapping writes of one queue take effect in their order."""
    for memory in subject.memories():
        lane = subject.lane(memory.name)
        region = subject.alloc(subject.room(memory), memory)
        units = region.nbytes // memory.alignment
        want = np.zeros(region.nbytes, np.uint8)
        made = []
        for _ in range(20):
            first = int(subject.rng.integers(0, units))
            start, end = first * memory.alignment, int(subject.rng.integers(first, units + 1)) * memory.alignment
            data = subject.bytes(end - start)
            want[start:end] = data
            made.append(lane.submit(Write(region.at(start, end - start), data)))
        subject.wait(*made)
        same(subject.read(region.all(), lane), want, f"{memory.name} after 20 overlapping writes")


def check_reads_may_overlap(subject: Subject) -> None:
    """A read may name the same bytes several times, and gets them several times."""
    for memory in subject.memories():
        region = subject.alloc(subject.room(memory), memory)
        data = subject.bytes(region.nbytes)
        subject.write(region.all(), data)
        nbytes = region.nbytes // memory.alignment // 4 * memory.alignment
        half = nbytes // memory.alignment // 2 * memory.alignment
        spans = Spans([(0, nbytes), (0, nbytes), (half, nbytes)])
        want = np.concatenate([data[o : o + n] for o, n in spans.array.tolist()])
        same(subject.read(Segment(region, spans)), want, f"{memory.name}, overlapping spans")


def check_spans_may_be_empty(subject: Subject) -> None:
    """No spans, and spans of no bytes, are legal and change nothing."""
    for memory in subject.memories():
        lane = subject.lane(memory.name)
        region = subject.alloc(subject.room(memory), memory)
        data = subject.bytes(region.nbytes)
        subject.write(region.all(), data)
        nothing = np.empty(0, dtype=np.uint8)
        for spans in (Spans([]), Spans([(0, 0)]), Spans([(region.nbytes, 0), (0, 0)])):
            subject.run(lane, Write(Segment(region, spans), nothing))
            subject.run(lane, Read(Segment(region, spans), np.empty(0, dtype=np.uint8)))
        grid = memory.alignment
        mixed = Spans([(grid, 0), (0, grid), (grid, 0), (2 * grid, grid), (0, 0)])
        want = np.concatenate([data[:grid], data[2 * grid : 3 * grid]])
        same(subject.read(Segment(region, mixed)), want, f"{memory.name}, empty spans between others")
        same(subject.read(region.all()), data, f"{memory.name} after commands without bytes")


def check_copies_move_the_same_bytes(subject: Subject) -> None:
    """Within a memory, from one cut to another."""
    done = False
    for memory in subject.memories():
        for lane in copies(subject, memory.name, memory.name):
            source, target = (subject.alloc(subject.room(memory), memory) for _ in range(2))
            _copy(subject, memory, memory, source, target, lane)
            done = True
    if not done:
        raise Skip("no executor copies within a memory of the device")


def check_copies_reach_other_memories(subject: Subject) -> None:
    """Between a memory of the device and every other one that an executor joins it to, both ways."""
    done = False
    for mine in subject.memories():
        for _, other in subject.platform.memories():
            if other.name == mine.name or not subject.lanes(other.name, "read", "write"):
                continue
            for source, target in ((mine, other), (other, mine)):
                for lane in copies(subject, source.name, target.name)[:1]:
                    nbytes = _shared_room(subject, mine, other)
                    regions = subject.alloc(nbytes, source), subject.alloc(nbytes, target)
                    _copy(subject, source, target, *regions, lane)
                    done = True
    if not done:
        raise Skip("no executor copies between a memory of the device and another one")


def check_every_executor_sees_the_same_bytes(subject: Subject) -> None:
    """What one executor writes, every other one that reaches the memory reads."""
    done = False
    for memory in subject.memories():
        lanes = subject.lanes(memory.name, "read", "write")
        firsts = [lane for lane in lanes if lane.queue == lane.executor.queues[0]]
        nbytes = min(subject.room(memory), *(each.executor.largest_transfer or 1 << 62 for each in firsts))
        region = subject.alloc(nbytes // memory.alignment * memory.alignment, memory)
        for writer in firsts:
            for reader in firsts:
                if writer is reader:
                    continue
                data = subject.bytes(region.nbytes)
                subject.write(region.all(), data, writer)
                if "flush" in writer.executor.verbs:
                    subject.run(writer, Flush(region.all()))
                same(subject.read(region.all(), reader), data, f"{memory.name}: written by {writer}, read by {reader}")
                done = True
    if not done:
        raise Skip("one executor only reads and writes each memory of the device")


def check_a_flush_changes_nothing(subject: Subject) -> None:
    """A flush completes and leaves every byte as it is."""
    done = False
    for memory in subject.memories():
        for lane in subject.lanes(memory.name, "flush", "write", "read")[:1]:
            region = subject.alloc(subject.room(memory), memory)
            data = subject.bytes(region.nbytes)
            subject.write(region.all(), data, lane)
            for spans in (Spans.one(0, region.nbytes), Spans([]), subject.cut(region.nbytes, memory.alignment)):
                subject.run(lane, Flush(Segment(region, spans)))
            same(subject.read(region.all(), lane), data, f"{memory.name} after a flush")
            done = True
    if not done:
        raise Skip("no executor flushes a memory of the device")


def check_capacity_is_a_limit_and_comes_back(subject: Subject) -> None:
    """No more than the capacity can be allocated; what is freed can be allocated again."""
    for memory in subject.memories():
        grid, capacity = memory.alignment, memory.capacity
        with refused(f"{capacity + grid} bytes of the {capacity} of {memory.name}", OutOfMemory):
            subject.device.alloc((capacity // grid + 1) * grid, memory.name)
        chunk = max(capacity // 8 // grid * grid, grid)
        phantom = capacity > FILL_NBYTES
        if phantom:
            probe = subject.phantom_or_none(chunk, memory)
            if probe is None:
                continue
            subject.device.free(probe)
        numbers = []
        for _ in range(2):
            held = _fill(subject, memory, chunk, phantom)
            numbers.append(len(held))
            for region in held:
                subject.device.free(region)
        expect(
            numbers[0] == numbers[1],
            f"{memory.name} held {numbers[0]} regions of {chunk} bytes, and {numbers[1]} after they were freed",
        )
        expect(numbers[0] > 0, f"{memory.name} of {capacity} bytes holds no region of {chunk} bytes")
    subject.works()


def check_nonsense_is_not_allocated(subject: Subject) -> None:
    """Negative sizes, what is no whole number, and memories that the device does not have are out of range."""
    nbytes = subject.room(subject.memories()[0])
    bad: list[Any] = [-1, nbytes + 0.5, float(nbytes), float("nan"), str(nbytes), None, True]
    for size in bad:
        with refused(f"a region of {size!r} bytes", OutOfRange):
            subject.device.alloc(size)
    with refused("a region on a memory that does not exist", OutOfRange):
        subject.device.alloc(subject.info.memories[0].alignment, "no such memory")
    subject.works()


def check_a_freed_region_is_refused(subject: Subject) -> None:
    """Freeing twice, and using a region after it was freed, is out of range."""
    for memory in subject.memories():
        lane = subject.lane(memory.name)
        region = subject.alloc(subject.room(memory), memory)
        subject.write(region.all(), subject.bytes(region.nbytes))
        subject.platform.free(region)
        expect(region.freed, "a freed region does not say so")
        with refused("freeing a region twice", OutOfRange):
            subject.device.free(region)
        for command in _commands(region, memory):
            with refused(f"{type(command).__name__} of a freed region", OutOfRange, Unsupported):
                lane.submit(command)
        other = subject.alloc(region.nbytes, memory)
        with refused("reading a freed region whose bytes may be another's", OutOfRange):
            lane.submit(Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)))
        subject.platform.free(other)
    subject.works()


def check_a_foreign_region_is_refused(subject: Subject) -> None:
    """A region that somebody else made, also under the same name and number, is out of range."""
    for memory in subject.memories():
        nbytes = subject.room(memory)
        mine = subject.alloc(nbytes, memory)
        data = subject.bytes(nbytes)
        subject.write(mine.all(), data)
        _refuse(subject, memory, Region("another device", "another memory", mine.id, nbytes), "another device's region")
        _refuse(subject, memory, Region(mine.device, mine.memory, mine.id, nbytes), "a region that nobody allocated")
        same(subject.read(mine.all()), data, f"{memory.name} after foreign regions were refused")
    subject.works()


def check_a_region_of_an_earlier_life_is_refused(subject: Subject) -> None:
    """A region from before the device was closed and opened again is out of range, whatever its number is now."""
    earlier = [subject.alloc(subject.room(memory), memory) for memory in subject.memories()]
    subject.close()
    again = subject.opened_again()
    try:
        for memory, stale in zip(again.memories(), earlier, strict=True):
            mine = again.alloc(stale.nbytes, memory)
            data = again.bytes(mine.nbytes)
            again.write(mine.all(), data)
            _refuse(again, memory, stale, "a region of an earlier life")
            same(again.read(mine.all()), data, f"{memory.name} after a region of an earlier life was refused")
    except BaseException:
        again.abandon()
        raise
    again.close()


def check_spans_outside_a_region_are_refused(subject: Subject) -> None:
    """One byte too far, far too far, and one bad span among many good ones."""
    for memory in subject.memories():
        lane, grid = subject.lane(memory.name), memory.alignment
        region = subject.alloc(subject.room(memory), memory)
        neighbour = subject.alloc(region.nbytes, memory)
        data = subject.bytes(region.nbytes)
        subject.write(neighbour.all(), data)
        units = region.nbytes // grid
        good = [(u * grid, grid) for u in range(min(units, 9))]
        for what, spans in (
            ("one unit beyond the end", Spans.one(region.nbytes - grid, 2 * grid)),
            ("wholly beyond the end", Spans.one(region.nbytes, grid)),
            ("far beyond the end", Spans.one((1 << 60) // grid * grid, grid)),
            ("one bad span among good ones", Spans([*good, (region.nbytes, grid), *good])),
        ):
            with refused(f"reading {what} of a region of {memory.name}", OutOfRange):
                lane.submit(Read(Segment(region, spans), np.empty(spans.nbytes, dtype=np.uint8)))
            with refused(f"writing {what} of a region of {memory.name}", OutOfRange):
                lane.submit(Write(Segment(region, spans), subject.bytes(spans.nbytes)))
            room = Segment(neighbour, Spans(np.tile(np.array([[0, grid]]), (spans.nbytes // grid, 1))))
            for copier in copies(subject, memory.name, memory.name)[:1]:
                with refused(f"copying {what} of a region of {memory.name}", OutOfRange):
                    copier.submit(Copy(Segment(region, spans), room))
                with refused(f"copying to {what} of a region of {memory.name}", OutOfRange):
                    copier.submit(Copy(room, Segment(region, spans)))
            for flusher in subject.lanes(memory.name, "flush")[:1]:
                with refused(f"flushing {what} of a region of {memory.name}", OutOfRange):
                    flusher.submit(Flush(Segment(region, spans)))
        same(subject.read(neighbour.all()), data, f"the region beside it on {memory.name}")
        expect(not subject.read(region.all()).any(), f"refused writes changed a region of {memory.name}")
    subject.works()


def check_spans_off_the_grid_are_refused(subject: Subject) -> None:
    """Where a memory has an alignment, offsets and sizes that are not multiples of it are misaligned."""
    gridded = [m for m in subject.memories() if m.alignment > 1]
    if not gridded:
        raise Skip("every memory of the device takes any offset and size")
    for memory in gridded:
        lane, grid = subject.lane(memory.name), memory.alignment
        region = subject.alloc(subject.room(memory), memory)
        for offset, nbytes in ((1, grid), (0, grid - 1), (0, 1), (grid // 2 or 1, grid)):
            with refused(f"reading [{offset}, {offset + nbytes}) of {memory.name}", Misaligned):
                lane.submit(Read(region.at(offset, nbytes), np.empty(nbytes, dtype=np.uint8)))
            with refused(f"writing [{offset}, {offset + nbytes}) of {memory.name}", Misaligned):
                lane.submit(Write(region.at(offset, nbytes), subject.bytes(nbytes)))
            for copier in copies(subject, memory.name, memory.name)[:1]:
                off, on = region.at(offset, nbytes), region.at(2 * grid, nbytes)
                for source, target in ((off, on), (on, off)):
                    with refused(f"copying [{offset}, {offset + nbytes}) of {memory.name}", Misaligned):
                        copier.submit(Copy(source, target))
        many = Spans([(0, grid), (grid, grid), (0, grid - 1)])
        with refused("one span off the grid among others", Misaligned):
            lane.submit(Read(Segment(region, many), np.empty(many.nbytes, dtype=np.uint8)))
    subject.works()


def check_a_region_in_use_is_not_freed(subject: Subject) -> None:
    """Freeing what a command still names is refused as busy, and possible afterwards."""
    for memory in subject.memories():
        lane = subject.lane(memory.name)
        region = subject.alloc(subject.room(memory), memory)
        data = subject.bytes(region.nbytes)
        gate = subject.gate()
        held = lane.submit(Write(region.all(), data), after=[gate.completion])
        with refused(f"freeing a region of {memory.name} that a command will write", Busy):
            subject.platform.free(region)
        gate.open()
        subject.wait(held)
        same(subject.read(region.all()), data, f"{memory.name} after a refused free")
        for copier in copies(subject, memory.name, memory.name)[:1]:
            target, gate = subject.alloc(region.nbytes, memory), subject.gate()
            held = copier.submit(Copy(region.all(), target.all()), after=[gate.completion])
            for what, named in (("read", region), ("write", target)):
                with refused(f"freeing a region of {memory.name} that a copy will {what}", Busy):
                    subject.platform.free(named)
            gate.open()
            subject.wait(held)
            same(subject.read(target.all()), data, f"{memory.name}: a copy whose regions were not freed")
            subject.platform.free(target)
        subject.platform.free(region)


def check_phantom_regions_take_time_and_move_nothing(subject: Subject) -> None:
    """Real devices refuse them; on emulated ones a read leaves the host buffer as it was."""
    for memory in subject.memories():
        lane, nbytes = subject.lane(memory.name), subject.room(memory)
        if subject.info.provenance == "real":
            with refused("a phantom region on a real device", Unsupported):
                subject.device.alloc(nbytes, memory.name, phantom=True)
            continue
        region = subject.phantom_or_none(nbytes, memory)
        if region is None:
            raise Skip("the device makes no phantom regions")
        expect(region.phantom, "a phantom region does not say so")
        buffer = subject.bytes(nbytes)
        kept = buffer.copy()
        written = subject.run(lane, Write(region.all(), subject.bytes(nbytes)))
        read = subject.run(lane, Read(region.all(), buffer))
        same(buffer, kept, "the host buffer that a phantom region was read into")
        for completion in (written, read):
            expect(completion.traffic.phantom, "traffic of a phantom region does not say so")
            if subject.clock.virtual:
                expect(completion.ended_ns > completion.started_ns, "a command on a phantom region took no time")


def check_only_host_memory_has_a_view(subject: Subject) -> None:
    """Emulated memory is out of the host's reach; where there is a view, it is the region's own bytes."""
    for memory in subject.memories():
        region = subject.alloc(subject.room(memory), memory)
        if region.view is None:
            continue
        expect(subject.info.provenance == "real", f"the host can reach the bytes of {memory.name} behind its back")
        data = subject.bytes(region.nbytes)
        subject.write(region.all(), data)
        expect(region.view.shape == (region.nbytes,), f"the view has shape {region.view.shape}")
        same(region.view, data, f"the view of a region of {memory.name}")


def _refuse(subject: Subject, memory: MemoryInfo, region: Region, what: str) -> None:
    with refused(f"freeing {what}", OutOfRange):
        subject.device.free(region)
    for command in _commands(region, memory)[:2]:
        with refused(f"{type(command).__name__} of {what}", OutOfRange, Unsupported):
            subject.lane(memory.name).submit(command)


def _commands(region: Region, memory: MemoryInfo) -> list[Command]:
    nbytes = memory.alignment
    return [
        Read(region.at(0, nbytes), np.empty(nbytes, dtype=np.uint8)),
        Write(region.at(0, nbytes), np.empty(nbytes, dtype=np.uint8)),
        Copy(region.at(0, nbytes), region.at(nbytes, nbytes)),
        Flush(region.at(0, nbytes)),
    ]


def _shared_room(subject: Subject, a: MemoryInfo, b: MemoryInfo) -> int:
    grid = int(np.lcm(a.alignment, b.alignment))
    return max(min(subject.room(a), subject.room(b)) // grid, 1) * grid


def _copy(subject: Subject, a: MemoryInfo, b: MemoryInfo, source: Region, target: Region, lane: Lane) -> None:
    data = subject.bytes(source.nbytes)
    subject.write(source.all(), data)
    cuts = subject.cut(source.nbytes, a.alignment), subject.cut(target.nbytes, b.alignment, 5)
    subject.run(lane, Copy(Segment(source, cuts[0]), Segment(target, cuts[1])))
    moved = np.concatenate([data[o : o + n] for o, n in cuts[0].array.tolist()])
    same(subject.read(Segment(target, cuts[1])), moved, f"copied from {a.name} to {b.name} by {lane}")
    same(subject.read(source.all()), data, f"the source of a copy on {a.name}")


def _fill(subject: Subject, memory: MemoryInfo, chunk: int, phantom: bool) -> list[Region]:
    held: list[Region] = []
    while True:
        try:
            held.append(subject.device.alloc(chunk, memory.name, phantom))
        except OutOfMemory:
            return held
        total = chunk * len(held)
        expect(total <= memory.capacity, f"{memory.name} gave {total} bytes of its {memory.capacity}")
