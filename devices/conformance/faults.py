"""Faults: what a device does when its hardware fails. The vendor offers a back door that makes it fail.

The back door is a `FaultyHost` (devices/faulty_host.py). What it cannot do stands outside its `abilities`, and the
checks for it are skipped.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from tierloop.devices import faulty_host
from tierloop.devices.commands import Copy, Read
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.subject import Lane, Skip, Subject, expect, refused
from tierloop.devices.errors import Cancelled, DeviceError, Gone, MediaError, Timeout
from tierloop.devices.faulty_host import Ability, FaultyHost
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region

ROUNDS = 200
"""How often the soak allocates, writes, reads and frees."""


def check_an_unreadable_span_is_a_media_error_and_its_neighbours_are_not(subject: Subject) -> None:
    """A read over it fails as media, and says so; reads beside it give what was written."""
    host = _host(subject, "unreadable")
    for memory in subject.memories():
        lane, grid = subject.lane(memory.name), max(memory.alignment, host.grain_nbytes, 4096)
        region = subject.alloc(5 * grid, memory)  # wherever it lies on the grain, its first and last part are beside
        data = subject.bytes(region.nbytes)
        subject.write(region.all(), data, lane)
        host.unreadable(region, 2 * grid, grid)
        with refused(f"reading bytes of {memory.name} that are lost", MediaError):
            _read(subject, lane, region, 0, region.nbytes)
        got = _read(subject, lane, region, 0, grid)
        expect(np.array_equal(got, data[:grid]), "what lies before lost bytes no longer reads as it was written")
        got = _read(subject, lane, region, 4 * grid, grid)
        expect(np.array_equal(got, data[4 * grid :]), "what lies behind lost bytes no longer reads as it was written")
    subject.works()


def check_what_comes_after_a_media_error_is_cancelled_with_its_cause(subject: Subject) -> None:
    """A copy that starts from lost bytes fails, and a read that comes after it is cancelled and keeps the cause."""
    host = _host(subject, "unreadable")
    memory = subject.memories()[0]
    lane, grid = subject.lane(memory.name, "read", "write", "copy"), max(memory.alignment, 4096)
    source, target = subject.alloc(grid, memory), subject.alloc(grid, memory)
    subject.write(source.all(), subject.bytes(grid), lane)
    host.unreadable(source, 0, grid)
    copied = lane.submit(Copy(source.all(), target.all()))
    after = lane.submit(Read(target.all(), np.zeros(grid, dtype=np.uint8)), after=[copied])
    _ends(subject, [copied, after])
    with refused("a copy from lost bytes", MediaError):
        copied.result()
    with refused("what comes after it", Cancelled):
        after.result()
    expect(isinstance(after.error.__cause__, MediaError), f"{after.error} does not keep its cause")  # type: ignore[union-attr]  # refused has seen it
    subject.works()


def check_a_command_that_does_not_come_back_ends_at_its_deadline(subject: Subject) -> None:
    """It ends as a timeout, or the device says that it is gone; what was in its way ends, too, and closing does."""
    host = _host(subject, "hang")
    memory = subject.memories()[0]
    lane, region = subject.lane(memory.name), subject.alloc(subject.room(memory), memory)
    subject.write(region.all(), subject.bytes(region.nbytes), lane)
    host.hang()
    into = [np.zeros(region.nbytes, dtype=np.uint8) for _ in range(3)]
    under_way = [lane.submit(Read(region.all(), buffer)) for buffer in into]
    _ends(subject, under_way)
    with refused("a command that does not come back", Timeout, Gone):
        under_way[0].result()
    _failed_with(under_way, Timeout, Gone, Cancelled)


def check_a_device_that_is_pulled_out_is_gone(subject: Subject) -> None:
    """Commands under way end, new ones are refused or end as gone, and closing works.

    Cores that reach a memory by loads and stores see of one that is gone that its bytes are lost: a media error.
    """
    host = _host(subject, "unplug")
    memory = subject.memories()[0]
    lane, region = subject.lane(memory.name), subject.alloc(subject.room(memory), memory)
    data = subject.bytes(region.nbytes)
    subject.write(region.all(), data, lane)
    buffers = [np.zeros(region.nbytes, dtype=np.uint8) for _ in range(3)]
    under_way = [lane.submit(Read(region.all(), buffer)) for buffer in buffers]
    gone: tuple[type[DeviceError], ...] = (Gone, Cancelled)
    if lane.device is not subject.device and lane.executor.kind == "cores":
        gone = (*gone, MediaError)
    host.unplug()
    _ends(subject, under_way)
    for completion, buffer in zip(under_way, buffers, strict=True):
        if completion.error is None:
            expect(np.array_equal(buffer, data), "a read of a device that was pulled out ended well with other bytes")
    _failed_with(under_way, *gone)
    with refused("a read of a device that was pulled out", *gone):
        _read(subject, lane, region, 0, region.nbytes)
    with refused("a write to a device that was pulled out", *gone):
        subject.write(region.all(), data, lane)


def check_nothing_is_used_up_by_use(subject: Subject) -> None:
    """Allocating, writing, reading and freeing, over and over, leaves as much room as there was."""
    for memory in subject.memories():
        lane, nbytes = subject.lane(memory.name), subject.room(memory)
        for round_ in range(ROUNDS):
            region = subject.alloc(nbytes, memory)
            if round_ % 20 == 0:
                expect(not subject.read(region.all(), lane).any(), f"fresh memory of {memory.name} is not zero")
                data = subject.bytes(nbytes)
                subject.write(region.all(), data, lane)
                expect(np.array_equal(subject.read(region.all(), lane), data), f"{memory.name} lost bytes")
            subject.platform.free(region)
        if memory.capacity <= 64 << 20:
            subject.platform.free(subject.alloc(_whole(memory), memory))


def _host(subject: Subject, ability: Ability) -> FaultyHost:
    host = faulty_host.of(subject.site, subject.info.name)
    if host is None:
        raise Skip("no back door was offered that makes the device fail")
    if ability not in host.abilities:
        raise Skip(f"the back door cannot do this: {ability}; it can {', '.join(sorted(host.abilities)) or 'nothing'}")
    return host


def _read(
    subject: Subject, lane: Lane, region: Region, offset: int, nbytes: int
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    into = np.full(nbytes, 0xA5, dtype=np.uint8)
    completion = lane.submit(Read(region.at(offset, nbytes), into))
    _ends(subject, [completion])
    completion.result()
    return into


def _failed_with(completions: list[Completion], *kinds: type[DeviceError]) -> None:
    """Each ended well or with one of these errors; all are looked at, so that closing raises none of them."""
    for completion in completions:
        with suppress(*kinds):
            completion.result()


def _ends(subject: Subject, completions: list[Completion]) -> None:
    deadline = subject.clock.now() + 60_000_000_000
    done = subject.clock.run_until(lambda: all(c.done for c in completions), deadline)
    expect(done, f"{[c for c in completions if not c.done]} had not ended after 60 s")


def _whole(memory: MemoryInfo) -> int:
    return memory.capacity // memory.alignment * memory.alignment
