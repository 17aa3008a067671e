"""More devices that are wrong in one way each: faults that a small or tidy test does not meet.

Each is the example of the suite with one line of a plausible driver gone wrong: a limit of a ring or of an iovec, a
second operand that is not looked at, an end that comes before its bytes. `PLANTED` says which check must notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.broken_devices import states_of
from tierloop.devices.commands import Command, Copy, Flush, Launch, Operand, Read, Write, segments
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.example import Bytes, Example, Kernel
from tierloop.devices.conformance.runner import MACHINE
from tierloop.devices.device import Estimate
from tierloop.devices.errors import Cancelled, DeviceError, Misaligned, OutOfRange
from tierloop.devices.kernels.contract import Attend, KernelArgs
from tierloop.devices.kernels.definition import Given, define
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans


class DoneBeforeTheBytes(Example):
    """Reports the end of a read first, and fills its buffer 5 µs later."""

    def _end(self, completion: Completion) -> None:
        command = completion.command
        if not isinstance(command, Read) or completion.done:
            super()._end(completion)
            return
        found = self._load((command.source,))
        self._queues.finish(completion)
        self._site.clock.call_at(self._site.clock.now() + 5_000, command.into.__setitem__, slice(None), found)


class WritesBehind(Example):
    """Reports the end of a write, and stores it 5 µs later."""

    def _end(self, completion: Completion) -> None:
        command = completion.command
        if not isinstance(command, Write) or completion.done:
            super()._end(completion)
            return
        kept = command.data.copy()
        self._queues.finish(completion)
        self._site.clock.call_at(self._site.clock.now() + 5_000, self._late, command.target, kept)

    def _late(self, target: Segment, data: Bytes) -> None:
        if target.region.id in self._bytes:
            self._store((target,), data)


class LosesTheLastByte(Example):
    """A length that is one short."""

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        kept = self._load(tuple(operand))
        super()._store(operand, np.concatenate([data[:-1], kept[-1:]]))


class IovecOf1024(Example):
    """Spans beyond the 1,024th are dropped, as by one call with more than a system takes."""

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        for region, spans in operand:
            first = Spans(spans.array[:1024])
            super()._store((Segment(region, first),), data[: first.nbytes])
            data = data[spans.nbytes :]


class ReadsOfAnIovec(Example):
    """Likewise, of reads."""

    def _load(self, operand: Operand) -> Bytes:
        found = super()._load(operand)
        kept = sum(Spans(spans.array[:1024]).nbytes for _, spans in operand)
        return np.concatenate([found[:kept], np.zeros(len(found) - kept, dtype=np.uint8)])


class OneMebibyte(Example):
    """A transfer ends after 1 MiB, and says that it did not."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **{"capacity": 16 << 20, **parts})

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        kept = self._load(tuple(operand))
        super()._store(operand, np.concatenate([data[: 1 << 20], kept[1 << 20 :]]))


class OffsetsOf17Bits(Example):
    """Offsets in a region wrap at 128 KiB."""

    def _wrapped(self, operand: Sequence[Segment]) -> Operand:
        return tuple(
            Segment(r, Spans(np.stack([s.array[:, 0] % (1 << 17), s.array[:, 1]], axis=1))) for r, s in operand
        )

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        super()._store(self._wrapped(operand), data)

    def _load(self, operand: Operand) -> Bytes:
        return super()._load(self._wrapped(operand))


class UpperHalfIsTheLower(Example):
    """An address line that is not connected: the upper half of the memory is the lower one."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        used = sum(r.nbytes for r in self._regions.values())
        region = super().alloc(nbytes, memory, phantom)
        half = self._info.memories[0].capacity // 2
        if used >= half:
            for other in self._regions.values():
                if other is not region and other.nbytes == nbytes:
                    self._bytes[region.id] = self._bytes[other.id]
                    break
        return region


class DropsTheSixHundredth(Example):
    """A ring that goes round loses a command: it ends, and nothing was done."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **parts)
        self._number = 0

    def _end(self, completion: Completion) -> None:
        self._number += 1
        if self._number % 600 == 0 and not completion.done:
            self._queues.finish(completion)
            return
        super()._end(completion)


class ReordersAQueue(Example):
    """Short commands overtake long ones that are before them in their queue."""

    def _start(self, completion: Completion) -> None:
        self._queues.handed(completion)
        super()._start(completion)

    def _end(self, completion: Completion) -> None:
        line = self._queues._queues[completion.queue]
        if completion.done:
            return
        if line[0] is not completion:
            line.remove(completion)
            line.appendleft(completion)
        super()._end(completion)


class CopiesFirst(Example):
    """Copies are done by an engine of their own, which knows nothing of the queue."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        if isinstance(command, Copy) and not after:
            self._store((command.target,), self._load((command.source,)))
        return completion

    def _end(self, completion: Completion) -> None:
        if isinstance(completion.command, Copy) and not completion.done:
            self._queues.finish(completion)
            return
        super()._end(completion)


class CopiesAtStart(Example):
    """Copies have their effect when they start."""

    def _start(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Copy):
            self._store((command.target,), self._load((command.source,)))
        super()._start(completion)


class LaunchesAtStart(Example):
    """Kernels run when they start, and are held until their time."""

    def _start(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch):
            found = self._load(command.reads[0])
            if command.args.kernel == "gather":
                self._store(command.writes[0], found)
        super()._start(completion)


class CopiesDoNotWait(Example):
    """A copy looks at no dependency."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return super().submit(command, queue, () if isinstance(command, Copy) else after)


class SwapsTwoSpansOfACopy(Example):
    """The first two spans of a copy's target change places."""

    def _end(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Copy) and not completion.done and len(command.target.spans) > 1:
            array = command.target.spans.array.copy()
            array[[0, 1]] = array[[1, 0]]
            self._store((Segment(command.target.region, Spans(array)),), self._load((command.source,)))
            self._queues.finish(completion)
            return
        super()._end(completion)


class SharedQueues(QueueSet):
    """Ends cancelled commands well."""

    def finish(self, completion: Completion, error: DeviceError | None = None) -> None:
        super().finish(completion, None if isinstance(error, Cancelled) else error)


class CancelledIsDone(Example):
    """Followers of a failure end as if they had been carried out."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **parts)
        self._queues = SharedQueues(self._info.name, 2, 64, site, self._start)


class ForgetsOldFailures(Example):
    """What has failed before a command comes is no failure that it comes after."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return super().submit(command, queue, [c for c in after if not c.done])


class LooksAtTheSourceOnly(Example):
    """Does not check where a copy ends."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        try:
            return super().submit(command, queue, after)
        except OutOfRange:
            if not isinstance(command, Copy) or command.source.spans.nbytes != command.target.spans.nbytes:
                raise
            return super().submit(Copy(command.source, command.source), queue, after)


class LaunchesWhatIsFreed(Example):
    """Does not look at the regions of a launch."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        try:
            return super().submit(command, queue, after)
        except OutOfRange:
            if isinstance(command, Launch) and any(r.freed for r, _ in segments(command)):
                some = next(iter(self._regions.values()))
                return super().submit(Flush(some.at(0, 0)), queue, after)
            raise


class CopiesOffTheGrid(Example):
    """Takes copies wherever they begin."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, alignment=512, **parts)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        try:
            return super().submit(command, queue, after)
        except Misaligned:
            if not isinstance(command, Copy):
                raise
            some = command.source.region
            return super().submit(Flush(some.at(0, 0)), queue, after)


class FreesTheTargetOfACopy(Example):
    """Keeps what a command reads, and not what it writes."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        if isinstance(command, Copy):
            self._in_use[command.target.region.id] -= 1
            completion.on_done(lambda _: self._back(command.target.region.id))
        return completion

    def _back(self, number: int) -> None:
        self._in_use[number] = self._in_use.get(number, 0) + 1

    def _end(self, completion: Completion) -> None:
        if isinstance(completion.command, Copy) and completion.command.target.region.id not in self._bytes:
            self._queues.finish(completion)
            return
        super()._end(completion)


class FreesOperands(Example):
    """Does not know which regions a launch names."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        if isinstance(command, Launch):
            for number in {region.id for region, _ in segments(command)}:
                self._in_use[number] -= 1
            completion.on_done(self._back)
        return completion

    def _back(self, completion: Completion) -> None:
        for number in {region.id for region, _ in segments(completion.command)}:
            self._in_use[number] += 1


class HalvesOfBytes(Example):
    """Takes any number for a size."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        return super().alloc(int(nbytes) if isinstance(nbytes, float) and nbytes > 0 else nbytes, memory, phantom)


class EstimatesAnything(Example):
    """Has an estimate for commands that it would refuse."""

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        return Estimate(self._delay_ns + 1, 0, "a fixed delay and 1 ns per byte")


class CopiesForNothing(Example):
    """Estimates that copies take no time."""

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        if isinstance(command, Copy):
            return Estimate(1, 0, "copies cost nothing")
        return super().estimate(command, queue)


class LaunchesForNothing(Example):
    """Estimates that kernels take no time."""

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        if isinstance(command, Launch):
            return Estimate(1, 0, "kernels cost nothing")
        return super().estimate(command, queue)


class TellsTwice(Example):
    """Tells the site's observers of every end twice."""

    def _end(self, completion: Completion) -> None:
        was = completion.done
        super()._end(completion)
        if completion.done and not was:
            for observe in self._site.observers:
                observe(completion)


class CountsFlopsTwice(Example):
    """Says that its kernels computed twice as much."""

    def _end(self, completion: Completion) -> None:
        completion.on_done(self._double)
        super()._end(completion)

    def _double(self, completion: Completion) -> None:
        completion.flops *= 2


class MixesReads(Example):
    """With more than two reads under way the buffers of two are changed for each other."""

    def _end(self, completion: Completion) -> None:
        line = self._queues._queues[completion.queue]
        command = completion.command
        if isinstance(command, Read) and not completion.done and len(line) > 2:
            other = line[1].command
            if isinstance(other, Read) and other.into.nbytes == command.into.nbytes:
                other.into[:] = self._load((command.source,))
                command.into[:] = self._load((other.source,))
                self._queues.finish(completion)
                return
        super()._end(completion)


class FreshFromBefore(Example):
    """Zeroes only what was never used: memory that was freed comes back as it was, where its size is another."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **parts)
        self._old: list[Bytes] = []

    def free(self, region: Region) -> None:
        kept = self._bytes.get(region.id)
        super().free(region)
        if kept is not None:
            self._old.append(kept)

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        region = super().alloc(nbytes, memory, phantom)
        for old in self._old:
            if 0 < nbytes < len(old):
                self._bytes[region.id][:] = old[:nbytes]
        return region


class AllMemoryMinusOne(Example):
    """Refuses the last byte of its capacity."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        used = sum(r.nbytes for r in self._regions.values())
        if used + nbytes == self._info.memories[0].capacity:
            nbytes += 1
        return super().alloc(nbytes, memory, phantom)


class DropsWritesAfterAnError(Example):
    """After a command that failed every write ends well, and is not carried out."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **parts)
        self._poisoned = False

    def _end(self, completion: Completion) -> None:
        if self._poisoned and isinstance(completion.command, Write) and not completion.done:
            self._queues.finish(completion)
            return
        super()._end(completion)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        completion.on_done(self._look)
        return completion

    def _look(self, completion: Completion) -> None:
        self._poisoned |= completion.error is not None


PLANTED: list[tuple[type[Example], str]] = [
    (DoneBeforeTheBytes, "every_byte_comes_back"),
    (WritesBehind, "thousands_of_commands_are_all_carried_out"),
    (WritesBehind, MACHINE),
    (LosesTheLastByte, "every_byte_comes_back"),
    (LosesTheLastByte, MACHINE),
    (IovecOf1024, "a_command_takes_many_spans"),
    (ReadsOfAnIovec, "a_command_takes_many_spans"),
    (OneMebibyte, "a_large_transfer_arrives_whole"),
    (OffsetsOf17Bits, "a_large_transfer_arrives_whole"),
    (UpperHalfIsTheLower, "every_region_has_bytes_of_its_own"),
    (HalvesOfBytes, "nonsense_is_not_allocated"),
    (AllMemoryMinusOne, "nothing_is_used_up_by_use"),
    (FreshFromBefore, "fresh_memory_is_zero"),
    (DropsTheSixHundredth, "thousands_of_commands_are_all_carried_out"),
    (MixesReads, "thousands_of_commands_are_all_carried_out"),
    (ReordersAQueue, "a_later_write_wins"),
    (ReordersAQueue, "copies_are_ordered_like_transfers"),
    (CopiesFirst, "copies_are_ordered_like_transfers"),
    (CopiesDoNotWait, "copies_are_ordered_like_transfers"),
    (CopiesAtStart, "copies_and_launches_show_nothing_before_they_end"),
    (LaunchesAtStart, "copies_and_launches_show_nothing_before_they_end"),
    (SwapsTwoSpansOfACopy, "copies_move_the_same_bytes"),
    (CancelledIsDone, "a_failure_cancels_what_comes_after"),
    (ForgetsOldFailures, "what_had_ended_before_counts_as_well"),
    (DropsWritesAfterAnError, "a_failure_cancels_what_comes_after"),
    (LooksAtTheSourceOnly, "spans_outside_a_region_are_refused"),
    (CopiesOffTheGrid, "spans_off_the_grid_are_refused"),
    (LaunchesWhatIsFreed, "operands_that_nobody_has_are_refused"),
    (FreesTheTargetOfACopy, "a_region_in_use_is_not_freed"),
    (FreesOperands, "operands_in_use_are_not_freed"),
    (EstimatesAnything, "estimates_refuse_what_submit_refuses"),
    (CopiesForNothing, "an_idle_device_takes_what_it_estimates"),
    (LaunchesForNothing, "an_idle_device_takes_what_it_estimates"),
    (TellsTwice, "every_byte_comes_back"),
    (CountsFlopsTwice, "work_is_counted"),
]


def _at_the_last_root(column: slice, factor: float) -> Kernel:
    """A kernel whose last state is wrong in some columns."""

    def wrong(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
        (result,) = define(args, reads, nbytes)
        assert isinstance(args, Attend)
        states_of(args, result)[-1, ..., column] *= np.float32(factor)
        return [result]

    return wrong


def heads_changed(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The first two query heads of a group change places, under one root."""
    (result,) = define(args, reads, nbytes)
    assert isinstance(args, Attend)
    states = states_of(args, result)
    states[0, :, [0, args.group - 1]] = states[0, :, [args.group - 1, 0]]
    return [result]


def without(**changes: Any) -> Kernel:
    """A kernel that knows nothing of some mask."""

    def wrong(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
        return define(replace(args, **changes), reads, nbytes)

    return wrong


def no_end(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Beyond the end of a list: index 0 instead of −1."""
    (result,) = define(args, reads, nbytes)
    return [np.maximum(result.view(np.int64), 0).view(np.uint8)]


def by_size(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Scores are compared without their sign."""
    return define(args, [Given(np.abs(reads[0].bytes.view(np.float32)).view(np.uint8), reads[0].sizes)], nbytes)


def last_span_lost(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """What the last span of an operand holds does not arrive."""
    (result,) = define(args, reads, nbytes)
    if len(reads[0].sizes) > 1:
        result[len(result) - int(reads[0].sizes[-1]) :] = 0
    return [result]


PLANTED_KERNELS: list[tuple[str, Kernel, str]] = [
    ("attend", _at_the_last_root(slice(0, 1), 1.0001), "attend_is_attention"),
    ("attend", _at_the_last_root(slice(1, 2), 1.0001), "attend_is_attention"),
    ("attend", _at_the_last_root(slice(2, 3), 1.001), "attend_is_attention"),
    ("attend", _at_the_last_root(slice(-1, None), 0.0), "attend_is_attention"),
    ("attend", heads_changed, "attend_is_attention"),
    ("attend", without(window=0), "attend_is_attention"),
    ("attend", without(sink_tokens=0), "attend_is_attention"),
    ("attend", without(softcap=0.0), "attend_is_attention"),
    ("logits", without(window=0), "logits_are_scaled_products"),
    ("logits", without(softcap=0.0), "logits_are_scaled_products"),
    ("score", without(scale=1.0), "score_shares_a_weight_out_among_each_list"),
    ("topk", no_end, "topk_breaks_ties_by_index"),
    ("topk", by_size, "topk_breaks_ties_by_index"),
    ("gather", last_span_lost, "gather_keeps_every_byte"),
]
