"""How much and how many: long lists of spans, long transfers, long runs of commands, and a memory filled to its end.

What is right in small may end at a limit that nobody thought of: what a system call takes, a ring that goes round, a
counter of too few bits. The numbers here lie beyond those limits, as far as the device itself allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierloop.devices.commands import Command, Copy, Read, Write
from tierloop.devices.conformance.memory import FILL_NBYTES, same
from tierloop.devices.conformance.subject import Lane, Skip, Subject, copies
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

SPANS = 1_500
"""More than the 1,024 that one system call takes."""
LARGE_NBYTES = 4 << 20
COMMANDS = 1_600
"""A ring of up to 1,024 entries goes round."""
UNDER_WAY = 32


def check_a_command_takes_many_spans(subject: Subject) -> None:
    """A write, a read and a copy of 1,500 short spans, out of order."""
    for memory in subject.memories():
        lane, grid = subject.lane(memory.name), memory.alignment
        each = grid if grid > 1 else 8
        num = min(SPANS, _most(memory, lane) // each)
        region = subject.alloc(num * each, memory)
        spans = _shuffled(subject, num, each)
        data = subject.bytes(region.nbytes)
        subject.run(lane, Write(Segment(region, spans), data))
        want = np.empty_like(data).reshape(num, each)
        want[spans.array[:, 0] // each] = data.reshape(num, each)
        same(subject.read(region.all(), lane), want.reshape(-1), f"{memory.name}, written in {num} spans")
        other, into = _shuffled(subject, num, each), np.zeros(region.nbytes, dtype=np.uint8)
        subject.run(lane, Read(Segment(region, other), into))
        same(into, want[other.array[:, 0] // each].reshape(-1), f"{memory.name}, read in {num} spans")
        for copier in copies(subject, memory.name, memory.name)[:1]:
            target = subject.alloc(region.nbytes, memory)
            subject.run(copier, Copy(Segment(region, spans), Segment(target, other)))
            got = subject.read(Segment(target, other), lane)
            same(got, data, f"{memory.name}, copied in {num} spans by {copier}")


def check_a_large_transfer_arrives_whole(subject: Subject) -> None:
    """Megabytes in one write, one read and one copy: every byte of them, and small reads find the same."""
    for memory in subject.memories():
        lane = subject.lane(memory.name)
        region = subject.alloc(_most(memory, lane), memory)
        data = subject.bytes(region.nbytes)
        subject.run(lane, Write(region.all(), data))
        into = np.zeros(region.nbytes, dtype=np.uint8)
        subject.run(lane, Read(region.all(), into))
        same(into, data, f"{region.nbytes} bytes of {memory.name} in one command")
        units = region.nbytes // memory.alignment
        for unit in (0, units // 2, units - 1):
            at = unit * memory.alignment
            got = subject.read(region.at(at, memory.alignment), lane)
            same(
                got, data[at : at + memory.alignment], f"{memory.name}, [{at}, {at + memory.alignment}) of a long write"
            )
        for copier in copies(subject, memory.name, memory.name)[:1]:
            if copier.executor.largest_transfer and copier.executor.largest_transfer < region.nbytes:
                continue
            target = subject.alloc(region.nbytes, memory)
            subject.run(copier, Copy(region.all(), target.all()))
            same(subject.read(target.all(), lane), data, f"{region.nbytes} bytes of {memory.name} in one copy")


def check_every_region_has_bytes_of_its_own(subject: Subject) -> None:
    """A memory that is full to its end holds, at both ends of each region, what was written there."""
    tried = False
    for memory in subject.memories():
        if memory.capacity > FILL_NBYTES:
            continue
        tried = True
        lane, grid = subject.lane(memory.name), memory.alignment
        held = _filled(subject, memory)
        ends = [(region, at) for region in held for at in (0, region.nbytes - grid)]
        contents = [subject.bytes(grid) for _ in ends]
        for i, content in enumerate(contents):
            number = np.frombuffer(i.to_bytes(8, "little"), dtype=np.uint8)[:grid]
            content[: number.size] = number
            subject.write(ends[i][0].at(ends[i][1], grid), content, lane)
        for (region, at), content in zip(ends, contents, strict=True):
            same(subject.read(region.at(at, grid), lane), content, f"{region}, byte {at}, when {memory.name} is full")
        for region in held:
            subject.platform.free(region)
    if not tried:
        raise Skip(f"the device's memories are larger than {FILL_NBYTES >> 20} MiB, too much to fill here")
    subject.works()


def check_thousands_of_commands_are_all_carried_out(subject: Subject) -> None:
    """Writes and reads over all queues, many under way at once: none is lost, and none gets what is another's."""
    memory = subject.memory()
    lanes, grid = subject.lanes(memory.name, "read", "write"), memory.alignment
    each = grid if grid > 1 else 64
    under_way = min(UNDER_WAY, min(lane.executor.depth for lane in lanes))
    num = min(UNDER_WAY, max(memory.capacity // 4 // each, 1))
    region = subject.alloc(num * each, memory)
    slots = [region.at(i * each, each) for i in range(num)]
    for turn in range(COMMANDS // 3 // num):
        lane, data = lanes[turn % len(lanes)], subject.bytes(region.nbytes).reshape(num, each)
        what = f"{memory.name}, round {turn} of {num} writes and reads on {lane}"
        into = np.zeros((2, num, each), dtype=np.uint8)
        pairs = [command for i, slot in enumerate(slots) for command in (Write(slot, data[i]), Read(slot, into[0, i]))]
        _run_all(subject, lane, pairs, under_way)
        same(into[0].reshape(-1), data.reshape(-1), what)
        _run_all(subject, lane, [Read(slot, into[1, i]) for i, slot in enumerate(slots)], under_way)
        same(into[1].reshape(-1), data.reshape(-1), f"{what}, read again")


def _run_all(subject: Subject, lane: Lane, commands: Sequence[Command], under_way: int) -> None:
    """Carry out commands of one queue, so many at a time."""
    for first in range(0, len(commands), under_way):
        subject.wait(*[lane.submit(command) for command in commands[first : first + under_way]])


def _most(memory: MemoryInfo, lane: Lane) -> int:
    """Bytes of a long transfer: 4 MiB, a quarter of the memory, or what one command may carry."""
    most = min(LARGE_NBYTES, memory.capacity // 4, lane.executor.largest_transfer or LARGE_NBYTES)
    return max(most // memory.alignment, 1) * memory.alignment


def _shuffled(subject: Subject, num: int, each: int) -> Spans:
    """All of [0, num · each) in spans of one size, out of order and so that no two neighbours are one."""
    starts = subject.rng.permutation(num).astype(np.int64) * each
    return Spans(np.stack([starts, np.full(num, each, dtype=np.int64)], axis=1))


def _filled(subject: Subject, memory: MemoryInfo) -> list[Region]:
    held: list[Region] = []
    nbytes = max(memory.capacity // 8 // memory.alignment * memory.alignment, memory.alignment)
    while nbytes * len(held) < memory.capacity:
        try:
            held.append(subject.device.alloc(nbytes, memory.name))
        except OutOfMemory:
            break
    return held
