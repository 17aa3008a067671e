"""Errors: every mistake is raised where it is made, nothing is queued by it, and the device works on or is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write
from tierloop.devices.conformance.subject import Lane, Skip, Subject, copies, expect, refused
from tierloop.devices.errors import Busy, Cancelled, DeviceError, Gone, MediaError, Misaligned, OutOfRange, Unsupported
from tierloop.devices.info import MemoryInfo
from tierloop.devices.kernels.contract import Append, Dense, Gather, KernelArgs, Topk
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans


def check_queues_that_do_not_exist_are_refused(subject: Subject) -> None:
    """Below 0 and beyond the last."""
    memory = subject.memory()
    lane = subject.lane(memory.name)
    region = subject.alloc(subject.room(memory), memory)
    number = sum(len(e.queues) for e in lane.device.info.executors)
    for queue in (-1, number, number + 1_000):
        with refused(f"queue {queue} of a device with {number}", OutOfRange):
            lane.device.submit(Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)), queue)
    subject.works()


def check_host_buffers_of_the_wrong_kind_are_refused(subject: Subject) -> None:
    """Wrong size, dtype, number of dimensions or strides, and reading into what is read-only."""
    memory = subject.memory()
    lane = subject.lane(memory.name)
    nbytes = subject.room(memory)
    region = subject.alloc(nbytes, memory)
    frozen = np.zeros(nbytes, dtype=np.uint8)
    frozen.setflags(write=False)
    bad: dict[str, Any] = {
        "one byte short": np.zeros(nbytes - 1, dtype=np.uint8),
        "one byte long": np.zeros(nbytes + 1, dtype=np.uint8),
        "empty": np.zeros(0, dtype=np.uint8),
        "of another dtype": np.zeros(nbytes, dtype=np.int8),
        "of wider elements": np.zeros(nbytes // 4, dtype=np.float32),
        "of two dimensions": np.zeros((1, nbytes), dtype=np.uint8),
        "strided": np.zeros(2 * nbytes, dtype=np.uint8)[::2],
        "a bytearray": bytearray(nbytes),
    }
    for what, buffer in bad.items():
        with refused(f"reading into a buffer that is {what}", OutOfRange):
            lane.submit(Read(region.all(), buffer))
        with refused(f"writing from a buffer that is {what}", OutOfRange):
            lane.submit(Write(region.all(), buffer))
    with refused("reading into a read-only buffer", OutOfRange):
        lane.submit(Read(region.all(), frozen))
    subject.write(region.all(), frozen)
    subject.works()


def check_verbs_and_kernels_that_are_not_offered_are_refused(subject: Subject) -> None:
    """What `info` does not name is unsupported."""
    memory = subject.memory()
    region = subject.alloc(subject.room(memory), memory)
    tried = 0
    for executor in subject.info.executors:
        for command in _one_of_each(region, memory):
            lane = Lane(subject.device, executor, executor.queues[0])
            offered = executor.kernels if isinstance(command, Launch) else executor.verbs
            name = command.args.kernel if isinstance(command, Launch) else type(command).__name__.lower()
            if name not in offered:
                with refused(f"{name} on {executor.name}, which does not offer it", Unsupported):
                    lane.submit(command)
                tried += 1
    if not tried:
        raise Skip("every executor offers every verb and kernel, or there is none")
    subject.works()


def check_memories_that_are_not_reached_are_refused(subject: Subject) -> None:
    """A region on a memory without a path is unsupported: the caller has to stage."""
    if not subject.info.executors:
        raise Skip("the device has no executor")
    for executor in subject.info.executors:
        reached = {p.memory for p in executor.paths}
        far = [(owner, m) for owner, m in subject.platform.memories() if m.name not in reached]
        regions = [owner.alloc(subject.room(m), m.name) for owner, m in far]
        regions.append(Region("another device", "another memory", 1, 4096))
        lane = Lane(subject.device, executor, executor.queues[0])
        for region in regions:
            for command in (Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)), Flush(region.all())):
                with refused(
                    f"{type(command).__name__} of {region.memory} on {executor.name}", Unsupported, OutOfRange
                ):
                    lane.submit(command)
    if subject.info.memories:
        subject.works()


def check_copies_of_different_sizes_are_refused(subject: Subject) -> None:
    """Both sides of a copy hold the same number of bytes."""
    memory = subject.memory()
    lanes = copies(subject, memory.name, memory.name)
    if not lanes:
        raise Skip(f"no executor copies within {memory.name}")
    grid = memory.alignment
    source, target = (subject.alloc(subject.room(memory), memory) for _ in range(2))
    for a, b in ((grid, 2 * grid), (2 * grid, grid), (grid, 0), (0, grid)):
        with refused(f"a copy of {a} bytes to {b} bytes", OutOfRange):
            lanes[0].submit(Copy(source.at(0, a), target.at(0, b)))
    subject.works()


def check_transfers_that_are_too_large_are_refused(subject: Subject) -> None:
    """One command carries at most the executor's `largest_transfer`."""
    memory = subject.memory()
    limited = [lane for lane in subject.lanes(memory.name, "read", "write") if lane.executor.largest_transfer]
    if not limited:
        raise Skip("no executor limits the size of a transfer")
    lane, grid = limited[0], memory.alignment
    largest = lane.executor.largest_transfer // grid * grid
    region = subject.alloc(grid, memory)
    fits = Spans(np.tile(np.array([[0, grid]]), (largest // grid, 1)))
    over = Spans(np.tile(np.array([[0, grid]]), (largest // grid + 1, 1)))
    with refused(f"a read of {over.nbytes} bytes; at most {largest}", OutOfRange):
        lane.submit(Read(Segment(region, over), np.empty(over.nbytes, dtype=np.uint8)))
    subject.run(lane, Read(Segment(region, fits), np.empty(fits.nbytes, dtype=np.uint8)))


def check_launches_that_do_not_add_up_are_refused(subject: Subject) -> None:
    """Operands that are missing, too many, or of other sizes than the arguments need."""
    kernels = {k for e in subject.info.executors for k in e.kernels}
    if not kernels:
        raise Skip("the device offers no kernel")
    for executor in subject.info.executors:
        if not executor.kernels:
            continue
        lane = Lane(subject.device, executor, executor.queues[0])
        memory = subject.operand_memories(lane)[0]
        region = subject.alloc(4096, memory)
        for what, command in _bad_launches(region, executor.kernels):
            with refused(f"{command.args.kernel} with {what}", OutOfRange, Unsupported):
                lane.submit(command)
    if subject.info.memories:
        subject.works()


def check_a_full_queue_is_busy(subject: Subject) -> None:
    """A queue holds `depth` commands; one more is refused, and taken once there is room."""
    memory = subject.memory()
    lane = subject.lane(memory.name)
    depth = lane.executor.depth
    if depth > 10_000:
        raise Skip(f"its queues hold {depth} commands, too many to fill here")
    region = subject.alloc(subject.room(memory), memory)
    small, buffer = region.at(0, memory.alignment), np.empty(memory.alignment, dtype=np.uint8)
    gate = subject.gate()
    with subject.hazards_allowed():  # there are none, and the checker compares every two commands under way
        made = [lane.submit(Read(small, buffer), after=[gate.completion]) for _ in range(depth)]
        with refused(f"command {depth + 1} of a queue that holds {depth}", Busy):
            lane.submit(Read(small, buffer))
        gate.open()
        subject.wait(*made)
    subject.works()


def check_a_refused_command_was_not_queued(subject: Subject) -> None:
    """After refusals the device has carried out exactly what it accepted."""
    memory = subject.memory()
    lane, grid = subject.lane(memory.name), memory.alignment
    region = subject.alloc(subject.room(memory), memory)
    data = subject.bytes(region.nbytes)
    subject.write(region.all(), data)
    for _ in range(3):
        with refused("a write that ends beyond its region", OutOfRange):
            lane.submit(Write(Segment(region, Spans([(0, grid), (region.nbytes, grid)])), subject.bytes(2 * grid)))
    expect(np.array_equal(subject.read(region.all(), lane), data), "a refused write was carried out in part")


def check_estimates_refuse_what_submit_refuses(subject: Subject) -> None:
    """There is no estimate for a command that the device would not take."""
    memory = subject.memory()
    lane, grid = subject.lane(memory.name), memory.alignment
    region = subject.alloc(subject.room(memory), memory)
    number = sum(len(e.queues) for e in lane.device.info.executors)
    beyond = region.at(region.nbytes, grid)
    with refused("an estimate for a read beyond a region", OutOfRange):
        lane.device.estimate(Read(beyond, np.empty(grid, dtype=np.uint8)), lane.queue)
    with refused("an estimate for a buffer of the wrong size", OutOfRange):
        lane.device.estimate(Write(region.at(0, grid), np.empty(grid + 1, dtype=np.uint8)), lane.queue)
    with refused(f"an estimate on queue {number} of a device with {number}", OutOfRange):
        lane.device.estimate(Read(region.at(0, grid), np.empty(grid, dtype=np.uint8)), number)
    if grid > 1:
        with refused("an estimate for a read off the grid", Misaligned):
            lane.device.estimate(Read(region.at(1, grid), np.empty(grid, dtype=np.uint8)), lane.queue)
    subject.platform.free(region)
    with refused("an estimate for a region that was freed", OutOfRange, Unsupported):
        lane.device.estimate(Read(region.at(0, grid), np.empty(grid, dtype=np.uint8)), lane.queue)
    subject.works()


def check_an_error_that_nobody_saw_is_raised_at_close(subject: Subject) -> None:
    """`close` raises the first error that was not looked at; the device is closed all the same."""
    lane, held = _cancelled(subject)
    with refused("closing a device with an error that nobody looked at", Cancelled):
        lane.device.close()
    expect(isinstance(held, Cancelled), "the command was not cancelled")
    with refused("allocating on the closed device", Gone):
        lane.device.alloc(4096)
    lane.device.close()


def check_an_error_that_was_seen_is_not_raised_again(subject: Subject) -> None:
    """Whoever looks at a result has seen its error."""
    memory = subject.memory()
    lane, gate = subject.lane(memory.name), subject.gate()
    region = subject.alloc(subject.room(memory), memory)
    held = lane.submit(Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)), after=[gate.completion])
    gate.open(MediaError("gate", "flush", "the check says so"))
    with refused("the result of a cancelled command", Cancelled):
        subject.wait(held)
    lane.device.close()


def check_a_closed_device_is_gone(subject: Subject) -> None:
    """Nothing works after `close` and it says so; closing again is harmless."""
    memory = subject.memory()
    lane = subject.lane(memory.name)
    region = subject.alloc(subject.room(memory), memory)
    subject.write(region.all(), subject.bytes(region.nbytes))
    subject.device.close()
    with refused("reading on a closed device, or a region of one", Gone, OutOfRange):
        lane.submit(Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)))
    with refused("allocating on a closed device", Gone):
        subject.device.alloc(memory.alignment)
    with suppress(DeviceError):  # or not: nothing is left to be freed
        subject.device.free(region)
    subject.device.close()


def check_closing_ends_what_is_under_way(subject: Subject) -> None:
    """Held and running commands have ended when `close` returns, and their buffers are the host's again."""
    memory = subject.memory()
    lanes = subject.lanes(memory.name, "read", "write")
    device = lanes[0].device
    lanes = [lane for lane in lanes if lane.device is device]
    region = subject.alloc(subject.room(memory), memory)
    subject.write(region.all(), subject.bytes(region.nbytes))
    gate = subject.gate()
    buffers = [np.zeros(region.nbytes, dtype=np.uint8) for _ in range(6)]
    running = [lanes[-1].submit(Read(region.all(), b)) for b in buffers[:3]]
    held = [lanes[0].submit(Read(region.all(), b), after=[gate.completion]) for b in buffers[3:]]
    device.close()
    for completion in (*running, *held):
        expect(completion.done, "a command had not ended when close returned")
        expect(
            completion.error is None or isinstance(completion.error, (Gone, Cancelled)),
            f"a command that close ended has the error {completion.error!r}",
        )
    for buffer in buffers:
        buffer[:] = 0x5A
    gate.open()
    subject.pass_time(10_000_000)
    expect(all((b == 0x5A).all() for b in buffers), "a host buffer was written after close had returned")


def _cancelled(subject: Subject) -> tuple[Lane, DeviceError | None]:
    memory = subject.memory()
    lane, gate = subject.lane(memory.name), subject.gate()
    region = subject.alloc(subject.room(memory), memory)
    held = lane.submit(Read(region.all(), np.empty(region.nbytes, dtype=np.uint8)), after=[gate.completion])
    gate.open(MediaError("gate", "flush", "the check says so"))
    subject.clock.run_until(lambda: held.done, subject.clock.now() + 10**10)
    return lane, held.error


def _one_of_each(region: Region, memory: MemoryInfo) -> Iterator[Command]:
    grid = memory.alignment
    near, far = region.at(0, grid), region.at(grid, grid)
    yield Read(near, np.empty(grid, dtype=np.uint8))
    yield Write(near, np.empty(grid, dtype=np.uint8))
    yield Copy(near, far)
    yield Flush(near)
    yield Launch(Gather(), ((near,),), ((far,),))
    yield Launch(Dense("nothing", 0, 0, 0), (), ())
    yield Launch(Topk(1, np.zeros(0, dtype=np.int64)), ((),), ((),))


def _bad_launches(region: Region, kernels: frozenset[str]) -> Iterator[tuple[str, Launch]]:
    a, b = (region.at(0, 64),), (region.at(1024, 64),)
    short = (region.at(1024, 60),)
    outside = (region.at(region.nbytes - 4, 64),)
    args: dict[str, KernelArgs] = {
        "gather": Gather(),
        "append": Append("float32"),
        "topk": Topk(8, np.array([16], dtype=np.int64)),
    }
    for kernel, each in args.items():
        if kernel in kernels:
            yield "no operands", Launch(each, (), ())
            yield "one operand too many", Launch(each, (a, a), (b,))
            yield "no result", Launch(each, (a,), ())
            yield "a result that is too short", Launch(each, (a,), (short,))
            yield "an operand outside its region", Launch(each, (outside,), (b,))
    if "append" in kernels:
        yield "a dtype that does not exist", Launch(Append("int3"), (a,), (b,))  # type: ignore[arg-type]  # on purpose
