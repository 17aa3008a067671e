"""Ordering and asynchrony: effects come at completion, in the order of a queue and of `after`, and failures travel on.

Held commands come after a gate: it belongs to another device and opens when the check says so. So no check depends on
how fast the device is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierloop.devices.commands import Copy, Flush, Launch, Read, Write, verb
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.launches import gather
from tierloop.devices.conformance.subject import Lane, Skip, Subject, copies, expect
from tierloop.devices.errors import Cancelled, MediaError
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region


def _filled(subject: Subject, memory: MemoryInfo, value: int, nbytes: int = 0) -> Region:
    region = subject.alloc(nbytes or subject.room(memory), memory)
    subject.write(region.all(), np.full(region.nbytes, value, dtype=np.uint8))
    return region


def _buffer(region: Region) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(region.nbytes, 0xA5, dtype=np.uint8)


def _pattern(region: Region, value: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(region.nbytes, value, dtype=np.uint8)


def _visible(lane: Lane, region: Region, written: Completion) -> Completion:
    """What a reader must come after: on a path without coherence, a flush behind the write."""
    path = lane.executor.path(region.memory)
    if path is not None and path.coherence == "none" and "flush" in lane.executor.verbs:
        return lane.submit(Flush(region.all()), after=[written])
    return written


def check_submit_takes_no_time(subject: Subject) -> None:
    """`submit` returns before the command has ended: an emulated one is still under way, and virtual time stands."""
    if subject.info.provenance != "emulated":
        raise Skip("a real device may be done at once")
    memory = subject.memory()
    region, lane = _filled(subject, memory, 1), subject.lane(memory.name)
    now = subject.clock.now()
    completion = lane.submit(Read(region.all(), _buffer(region)))
    expect(not completion.done, "an emulated command was done when submit returned")
    if subject.clock.virtual:
        expect(subject.clock.now() == now, "virtual time passed during submit")
    subject.wait(completion)
    subject.taken(lane, completion)


def check_effects_appear_at_completion(subject: Subject) -> None:
    """On an emulated device the buffer of a read is untouched until the read has ended, and full when it has."""
    if subject.info.provenance != "emulated":
        raise Skip("a real device may fill a buffer from the start of a command on")
    memory = subject.memory()
    lane = subject.lane(memory.name)
    region = _filled(subject, memory, 7)
    timed = subject.run(lane, Read(region.all(), _buffer(region)))
    buffer = _buffer(region)
    completion = lane.submit(Read(region.all(), buffer))
    expect(completion.done or (buffer == 0xA5).all(), "a read had filled its buffer when submit returned")
    subject.pass_time((timed.ended_ns - timed.started_ns) // 2)
    expect(completion.done or (buffer == 0xA5).all(), "a read had filled its buffer before it ended")
    subject.wait(completion)
    expect((buffer == 7).all(), "a read had ended and its buffer was not filled")


def check_commands_of_one_queue_take_effect_in_order(subject: Subject) -> None:
    """Each read sees the write before it and none of those behind it, and ends are in order."""
    memory = subject.memory()
    lane, region = subject.lane(memory.name), _filled(subject, memory, 0)
    made, buffers = [], []
    for value in range(1, 11):
        buffers.append(_buffer(region))
        made.append(lane.submit(Write(region.all(), _pattern(region, value))))
        made.append(lane.submit(Read(region.all(), buffers[-1])))
    subject.wait(*made)
    for value, buffer in enumerate(buffers, 1):
        expect((buffer == value).all(), f"read {value} of a queue saw {np.unique(buffer).tolist()}, not {value}")
    ends = [c.ended_ns for c in made]
    expect(ends == sorted(ends), f"commands of one queue ended at {ends}")


def check_a_held_command_has_no_effect(subject: Subject) -> None:
    """What comes after a command that has not ended does not start: nothing is read and nothing is written."""
    memory = subject.memory()
    lane, region = subject.lane(memory.name), _filled(subject, memory, 1)
    gate, buffer = subject.gate(), _buffer(region)
    held = lane.submit(Read(region.all(), buffer), after=[gate.completion])
    subject.pass_time()
    expect(not held.done and held.started_ns < 0, "a command started before the one that it comes after had ended")
    expect((buffer == 0xA5).all(), "a held read had filled its buffer")
    gate.open()
    subject.wait(held)
    subject.taken(lane, held)
    expect(held.started_ns >= gate.completion.ended_ns, "a command started before the one that it comes after ended")
    expect((buffer == 1).all(), "a released read did not fill its buffer")


def check_a_held_write_is_not_seen(subject: Subject) -> None:
    """A write that comes after something is not there before: another queue still reads the old bytes."""
    memory = subject.memory()
    writer, reader = subject.two_queues(memory.name)
    region = _filled(subject, memory, 1)
    gate, buffer = subject.gate(), _buffer(region)
    held = writer.submit(Write(region.all(), _pattern(region, 2)), after=[gate.completion])
    with subject.hazards_allowed():
        early = reader.submit(Read(region.all(), buffer))
        subject.wait(early)
    expect((buffer == 1).all(), "a held write was seen before it could start")
    gate.open()
    subject.wait(held)
    expect((subject.read(region.all(), writer) == 2).all(), "a released write is not there")


def check_a_held_queue_does_not_hold_the_others(subject: Subject) -> None:
    """Order holds within a queue only."""
    memory = subject.memory()
    one, other = subject.two_queues(memory.name)
    first, second = _filled(subject, memory, 1), _filled(subject, memory, 2)
    gate = subject.gate()
    held = one.submit(Read(first.all(), _buffer(first)), after=[gate.completion])
    subject.run(other, Read(second.all(), _buffer(second)))
    expect(not held.done, "a held command ended")
    gate.open()
    subject.wait(held)


def check_a_command_waits_for_everything_that_it_names(subject: Subject) -> None:
    """All of `after` must have ended, the same one named twice counting once."""
    memory = subject.memory()
    lane, region = subject.lane(memory.name), _filled(subject, memory, 1)
    gates = [subject.gate() for _ in range(3)]
    held = lane.submit(Read(region.all(), _buffer(region)), after=[gates[0].completion, *(g.completion for g in gates)])
    for gate in gates:
        subject.pass_time()
        expect(not held.done, "a command ended before all that it comes after")
        gate.open()
    subject.wait(held)


def check_after_orders_two_queues(subject: Subject) -> None:
    """A read on one queue that names a write on another one sees what it wrote, every time."""
    memory = subject.memory()
    lanes = subject.two_queues(memory.name)
    region = _filled(subject, memory, 0)
    last: Completion | None = None
    seen = []
    for value in range(1, 21):
        writer, reader = lanes if value % 2 else lanes[::-1]
        buffer = _buffer(region)
        written = writer.submit(Write(region.all(), _pattern(region, value)), after=[last] if last else [])
        last = reader.submit(Read(region.all(), buffer), after=[_visible(writer, region, written)])
        seen.append((value, buffer))
    assert last is not None
    subject.wait(last)
    for value, buffer in seen:
        expect((buffer == value).all(), f"a read after the write of {value} saw {np.unique(buffer).tolist()}")


def check_launches_are_ordered_like_transfers(subject: Subject) -> None:
    """A kernel sees the write that it comes after and none that is held, and has no effect before it starts."""
    lane = subject.kernel_lanes("gather")[0]
    memory = subject.operand_memories(lane)[0]
    lane = Lane(lane.device, lane.executor, lane.executor.queues[-1])
    writers = [
        w for w in subject.lanes(memory.name, "read", "write") if (w.device, w.queue) != (lane.device, lane.queue)
    ]
    if not writers:
        raise Skip(f"{lane.executor.name} and the only queue that writes {memory.name} are one")
    writer = writers[0]
    source, target, other = (_filled(subject, memory, value, 4096) for value in (1, 3, 3))
    gate = subject.gate()
    held = lane.submit(gather(source, target), after=[gate.completion])
    with subject.hazards_allowed():
        expect((subject.read(target.all(), writer) == 3).all(), "a held launch had an effect")
    gate.open()
    subject.wait(held)
    subject.taken(lane, held)
    gate = subject.gate()
    written = writer.submit(Write(source.all(), _pattern(source, 2)), after=[gate.completion])
    with subject.hazards_allowed():
        subject.run(lane, gather(source, target))
    late = lane.submit(gather(source, other), after=[_visible(writer, source, written)])
    subject.pass_time()
    expect(not late.done, "a launch ended before the write that it comes after")
    gate.open()
    subject.wait(written, late)
    for what, region, value in (("before a held write", target, 1), ("that came after it", other, 2)):
        seen = np.unique(subject.read(region.all(), writer)).tolist()
        expect(seen == [value], f"a launch {what} of 2 over 1 saw {seen}")


def check_copies_are_ordered_like_transfers(subject: Subject) -> None:
    """A copy has its place among the writes of its queue, and none that is held has an effect."""
    memory = subject.memory()
    lanes = [lane for lane in copies(subject, memory.name, memory.name) if lane.executor.verbs >= {"read", "write"}]
    if not lanes:
        raise Skip(f"no executor reads, writes and copies within {memory.name}")
    lane, source, target = lanes[0], _filled(subject, memory, 0), _filled(subject, memory, 0)
    small = source.at(source.nbytes - memory.alignment, memory.alignment)
    place = target.at(target.nbytes - memory.alignment, memory.alignment)
    made, buffers = [], []
    for value in range(1, 7):
        buffers.append(np.full(memory.alignment, 0xA5, dtype=np.uint8))
        made.append(lane.submit(Write(source.all(), _pattern(source, value))))
        made.append(lane.submit(Copy(small, place)))
        made.append(lane.submit(Read(place, buffers[-1])))
    subject.wait(*made)
    for value, buffer in enumerate(buffers, 1):
        expect((buffer == value).all(), f"a copy behind the write of {value} gave {np.unique(buffer).tolist()}")
    gate = subject.gate()
    held = lanes[-1].submit(Copy(source.all(), target.all()), after=[gate.completion])
    subject.pass_time()
    expect(not held.done, "a copy ended before what it comes after")
    with subject.hazards_allowed():
        before = [part for part in lanes if part.queue != held.queue][:1]
        early = [subject.read(target.at(0, memory.alignment), part) for part in before]
    expect(not any(part.any() for part in early), "a held copy had an effect")
    gate.open()
    subject.wait(held)
    expect((subject.read(target.all(), lanes[-1]) == 6).all(), "a released copy did not move its bytes")


def check_copies_and_launches_show_nothing_before_they_end(subject: Subject) -> None:
    """On an emulated device a read that ends before an unordered copy or kernel still sees the old bytes."""
    if subject.info.provenance != "emulated":
        raise Skip("a real device may show the bytes of an unordered command or not")
    memory = subject.memory()
    tried = False
    ways: list[tuple[Lane, Callable[[Region, Region], Copy | Launch]]] = []
    ways += [(lane, _copy) for lane in copies(subject, memory.name, memory.name)[:1]]
    if memory.alignment <= 4:
        gathering = [lane for lane in subject.lanes(memory.name) if "gather" in lane.executor.kernels]
        ways += [(lane, gather) for lane in gathering[:1]]
    for lane, command in ways:
        readers = [
            r for r in subject.lanes(memory.name, "read", "write") if (r.device, r.queue) != (lane.device, lane.queue)
        ]
        source, target = (_filled(subject, memory, value) for value in (1, 2))
        for reader in readers[:1]:
            buffer = np.zeros(memory.alignment, dtype=np.uint8)
            with subject.hazards_allowed():
                made = lane.submit(command(source, target))
                subject.wait(reader.submit(Read(target.at(0, memory.alignment), buffer)))
                still = not made.done
                subject.wait(made)
            if still:
                tried = True
                expect((buffer == 2).all(), f"a read saw the bytes of an unordered {verb(made.command)} before its end")
    if not tried:
        raise Skip("no copy or kernel was still under way when a short read beside it had ended")


def _copy(source: Region, target: Region) -> Copy:
    return Copy(source.all(), target.all())


def check_a_host_buffer_passes_bytes_on(subject: Subject) -> None:
    """A write reads its host buffer after it has started: bytes that an earlier read put there are what it writes."""
    memory = subject.memory()
    lanes = subject.lanes(memory.name, "read", "write")
    source, target = _filled(subject, memory, 9), _filled(subject, memory, 1)
    gate, buffer = subject.gate(), _buffer(source)
    read = lanes[0].submit(Read(source.all(), buffer), after=[gate.completion])
    written = lanes[-1].submit(Write(target.all(), buffer), after=[read])
    gate.open()
    subject.wait(read, written)
    expect(
        (subject.read(target.all(), lanes[-1]) == 9).all(),
        "a write took its host buffer before it started: a read that it came after had filled it meanwhile",
    )


def check_a_missing_dependency_is_visible(subject: Subject) -> None:
    """On an emulated device a read that ends before an unordered write has ended still sees the old bytes."""
    if subject.info.provenance != "emulated":
        raise Skip("a real device may show an unordered write or not")
    memory = subject.memory()
    writer, reader = subject.two_queues(memory.name)
    limits = [
        1 << 22,
        memory.capacity // 4,
        *([writer.executor.largest_transfer] if writer.executor.largest_transfer else []),
    ]
    nbytes = min(limits) // memory.alignment * memory.alignment
    region = subject.alloc(nbytes, memory)
    subject.write(region.all(), np.full(nbytes, 1, dtype=np.uint8), writer)
    buffer = np.zeros(memory.alignment, dtype=np.uint8)
    with subject.hazards_allowed():
        written = writer.submit(Write(region.all(), _pattern(region, 2)))
        early = reader.submit(Read(region.at(nbytes - memory.alignment, memory.alignment), buffer))
        subject.wait(early)
        still = not written.done
        subject.wait(written)
    if not still:
        raise Skip(f"a read of {memory.alignment} bytes did not end before a write of {nbytes}")
    expect((buffer == 1).all(), "an unordered read saw a write that had not ended")


def check_a_failure_cancels_what_comes_after(subject: Subject) -> None:
    """Followers of a failure, and theirs, end as cancelled, name the failure as the cause, and have no effect."""
    memory = subject.memory()
    lanes = subject.lanes(memory.name, "read", "write")
    region, other = _filled(subject, memory, 1), _filled(subject, memory, 3)
    gate, buffer = subject.gate(), _buffer(region)
    failure = MediaError("gate", "flush", "the check says so")
    first = lanes[0].submit(Write(region.all(), _pattern(region, 2)), after=[gate.completion])
    second = lanes[-1].submit(Read(region.all(), buffer), after=[first])
    unrelated = lanes[0].submit(Write(other.all(), _pattern(other, 4)))
    gate.open(failure)
    subject.wait(unrelated)
    _settled(subject, first, second)
    for what, completion in (("the follower", first), ("its follower", second)):
        error = completion.error
        expect(isinstance(error, Cancelled), f"{what} of a failure ended with {error!r}, not cancelled")
        assert error is not None
        expect(error.__cause__ is failure, f"the cause of {what} is {error.__cause__!r}, not the failure")
        expect(error.device == completion.device, f"the error of {what} names {error.device!r}")
        _looked(completion)
    expect((buffer == 0xA5).all(), "a cancelled read filled its buffer")
    expect((subject.read(region.all()) == 1).all(), "a cancelled write was carried out")
    expect(
        (subject.read(other.all()) == 4).all(), "a command that had nothing to do with a failure was not carried out"
    )
    subject.works()


def check_what_had_ended_before_counts_as_well(subject: Subject) -> None:
    """A command that comes after one that has failed already is cancelled; after one that ended well it is not."""
    memory = subject.memory()
    lane, region = subject.lane(memory.name), _filled(subject, memory, 1)
    good, bad = subject.gate(), subject.gate()
    failure = MediaError("gate", "flush", "the check says so")
    good.open()
    bad.open(failure)
    written = subject.run(lane, Write(region.all(), _pattern(region, 2)), after=[good.completion])
    buffer = _buffer(region)
    late = lane.submit(Read(region.all(), buffer), after=[written, bad.completion])
    _settled(subject, late)
    expect(isinstance(late.error, Cancelled), f"what came after an earlier failure ended with {late.error!r}")
    assert late.error is not None
    expect(late.error.__cause__ is failure, f"its cause is {late.error.__cause__!r}, not the failure")
    _looked(late)
    expect((buffer == 0xA5).all(), "a cancelled read filled its buffer")
    expect((subject.read(region.all(), lane) == 2).all(), "a write after what had ended well was not carried out")
    subject.works()


def check_a_long_chain_is_cancelled_whole(subject: Subject) -> None:
    """Hundreds of commands over all queues, each after the one before: all of them end."""
    memory = subject.memory()
    lanes = subject.lanes(memory.name, "read", "write")
    region = _filled(subject, memory, 1)
    gate = subject.gate()
    last, chain = gate.completion, []
    for i in range(min(500, min(lane.executor.depth for lane in lanes) * len(lanes))):
        last = lanes[i % len(lanes)].submit(Read(region.all(), _buffer(region)), after=[last])
        chain.append(last)
    gate.open(MediaError("gate", "flush", "the check says so"))
    _settled(subject, *chain)
    for completion in chain:
        expect(isinstance(completion.error, Cancelled), f"one of a cancelled chain ended with {completion.error!r}")
        _looked(completion)
    subject.works()


def _settled(subject: Subject, *completions: Completion) -> None:
    done = subject.clock.run_until(lambda: all(c.done for c in completions), subject.clock.now() + 10**10)
    expect(done, "commands that come after a failure had not ended 10 s later")


def _looked(completion: Completion) -> None:
    try:
        completion.result()
    except Cancelled:
        return
