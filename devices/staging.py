"""Staged copies: through bounce buffers where no engine joins two memories, or where several are faster than one.

A drive's DMA reaches host memory, a GPU's copy engine takes it from there: two *stages*. The bytes are cut into chunks,
and every stage but the last puts its chunk into one of the slots of a bounce buffer (two slots: double buffering), so
all stages work at the same time, each on another chunk. A convenience on top of the contract: `Copy` commands of any
devices, real or emulated, all handed in at once, in an order that `after` alone keeps:

- a chunk's stage comes after the stage before it (which has filled the slot),
- a stage that fills a slot comes after the one that emptied it, `slots` chunks earlier,
- and every stage comes after itself on the chunk before, so that a failure cancels all later chunks.

With enough slots, n equal chunks take Σ stage + (n − 1) · slowest stage, each for one chunk with its latency. Smaller
chunks bring that nearer to the bytes over the slowest rate, until the fixed cost of a command counts for more: the
default chunk is the one for which the devices' own estimates promise the earliest end.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device, check_alignment
from tierloop.devices.errors import DeviceError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

SLOTS = 2
SMALLEST_CHUNK = 4096
"""Default chunks are not smaller than this: no engine is at its best below it."""


@dataclass(frozen=True)
class Stage:
    """One leg of the way: `queue` of `device` copies. `bounce` is where its bytes land, None for the last stage.

    The bounce buffer holds `slots` chunks; it is the caller's, belongs to the copy until that has ended, also where it
    failed, and is the caller's again then.
    """

    device: Device
    queue: int
    bounce: Region | None = None
    slots: int = SLOTS


class StagedCopy:
    """A staged copy under way: wait for `completions` (`waiting.wait`), or await it.

    `completions` holds those of all stages of the first chunk, then of the second, and so on; so the first that failed
    is the one that the others were cancelled for.
    """

    def __init__(self, completions: Sequence[Completion], chunk_nbytes: int) -> None:
        self.completions = tuple(completions)
        self.chunk_nbytes = chunk_nbytes

    @property
    def done(self) -> bool:
        """Whether every command has ended, well or not."""
        return all(completion.done for completion in self.completions)

    def __await__(self) -> Generator[Completion, None, StagedCopy]:
        errors: list[DeviceError] = []
        for completion in self.completions:  # all of them: the bounce buffers are in use until the last has ended
            try:
                yield from completion.__await__()
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return self


def staged_copy(
    source: Segment,
    target: Segment,
    stages: Sequence[Stage],
    chunk_nbytes: int | None = None,
    after: Sequence[Completion] = (),
) -> StagedCopy:
    """Copy `source` to `target` over the stages, in chunks of `chunk_nbytes` (default: what estimates say is best).

    The last chunk may be smaller. Nothing starts before everything in `after` has ended. Raises ValueError for stages,
    sizes and chunks that do not fit each other, and what `submit` raises for a command; a queue that is full of other
    work raises Busy, and what was queued until then still runs.
    """
    _check_stages(source, target, stages)
    grid = _grid(source, target, stages)
    nbytes = source.spans.nbytes
    if not nbytes:
        return StagedCopy((), 0)
    if chunk_nbytes is not None and (isinstance(chunk_nbytes, bool) or not isinstance(chunk_nbytes, int)):
        raise ValueError(f"a chunk of {chunk_nbytes!r} bytes; allowed: a whole number")
    largest, smallest = _limits(nbytes, stages, grid, chunk_nbytes or 0)
    if chunk_nbytes is None:
        chunk_nbytes = _best_chunk(source, target, stages, grid, smallest, largest)
    elif not smallest <= chunk_nbytes <= largest or chunk_nbytes % grid:
        raise ValueError(
            f"a chunk of {chunk_nbytes} bytes; allowed: {smallest} to {largest}, in multiples of {grid} "
            "(bounce slots, largest transfers, depth of queues and alignment)"
        )
    else:
        _duration(source, target, stages, chunk_nbytes)  # finds what no device would take, before anything is queued
    made: list[list[Completion]] = []
    runs = zip(cut(source.spans, chunk_nbytes), cut(target.spans, chunk_nbytes), strict=True)
    for number, (take, put) in enumerate(runs):
        chunk: list[Completion] = []
        at = Segment(source.region, take)
        for place, stage in enumerate(stages):
            before = [chunk[-1]] if chunk else list(after)
            if number:
                before.append(made[-1][place])
            to = Segment(target.region, put)
            if stage.bounce is not None:
                to = stage.bounce.at(number % stage.slots * chunk_nbytes, take.nbytes)
                if number >= stage.slots:
                    before.append(made[number - stage.slots][place + 1])
            chunk.append(stage.device.submit(Copy(at, to), stage.queue, before))
            at = to
        made.append(chunk)
    return StagedCopy([completion for chunk in made for completion in chunk], chunk_nbytes)


def cut(spans: Spans, chunk_nbytes: int) -> Iterator[Spans]:
    """The bytes of a span list, end to end, in runs of `chunk_nbytes` (the last may be smaller); no run is empty."""
    array: NDArray[np.int64] = spans.array[spans.array[:, 1] > 0]
    ends = np.cumsum(array[:, 1])
    for low in range(0, spans.nbytes, chunk_nbytes):
        high = min(low + chunk_nbytes, spans.nbytes)
        first = int(np.searchsorted(ends, low, side="right"))
        last = int(np.searchsorted(ends, high, side="left"))
        run = array[first : last + 1].copy()
        skipped = low - int(ends[first] - array[first, 1])
        run[0, 0] += skipped
        run[0, 1] -= skipped
        run[-1, 1] -= int(ends[last]) - high
        yield Spans(run)


def _check_stages(source: Segment, target: Segment, stages: Sequence[Stage]) -> None:
    if source.spans.nbytes != target.spans.nbytes:
        raise ValueError(f"{source.spans.nbytes} bytes do not fit {target.spans.nbytes} bytes")
    for region, spans in (source, target):
        if region.freed or spans.end > region.nbytes:
            raise ValueError(f"{spans!r} is not inside {region}")
    if not stages:
        raise ValueError("a staged copy needs at least one stage")
    if stages[-1].bounce is not None:
        raise ValueError("the last stage has a bounce buffer, but its bytes land in the target")
    bounces = [stage.bounce for stage in stages[:-1]]
    for number, bounce in enumerate(bounces):
        if bounce is None:
            raise ValueError(f"stage {number} of {len(stages)} has no bounce buffer; only the last has none")
        if bounce in bounces[:number] or bounce in (source.region, target.region):
            raise ValueError(f"the bounce buffer of stage {number} is used for something else as well")
    for number, stage in enumerate(stages):
        if isinstance(stage.slots, bool) or not isinstance(stage.slots, int) or stage.slots < 1:
            raise ValueError(f"{stage.slots!r} slots of stage {number}; allowed: at least 1")
        if stage.device.info.executor_of(stage.queue) is None:
            raise ValueError(f"stage {number}: {stage.device.info.name} has no queue {stage.queue!r}")


def _grid(source: Segment, target: Segment, stages: Sequence[Stage]) -> int:
    """What a chunk has to be a multiple of: the alignments of all memories on the way. Raises Misaligned."""
    names = {source.region.memory, target.region.memory} | {s.bounce.memory for s in stages if s.bounce is not None}
    grid = 1
    for info in [stage.device.info for stage in stages]:
        for memory in info.memories:
            if memory.name in names:
                check_alignment(info, Copy(source, target), memory.name, memory.alignment)
                grid = math.lcm(grid, memory.alignment)
    return grid


def _limits(nbytes: int, stages: Sequence[Stage], grid: int, asked: int) -> tuple[int, int]:
    """(largest, smallest) chunk: slots, largest transfers and the depth of the queues allow it."""
    largest, smallest = max(-(-nbytes // grid) * grid, asked), grid
    load: dict[tuple[int, int], int] = {}
    for stage in stages:
        executor = stage.device.info.executor_of(stage.queue)
        assert executor is not None
        if stage.bounce is not None:
            largest = min(largest, stage.bounce.nbytes // stage.slots)
        if executor.largest_transfer:
            largest = min(largest, executor.largest_transfer)
        lane = (id(stage.device), stage.queue)
        load[lane] = load.get(lane, 0) + 1
        most = max(executor.depth // load[lane], 1) * grid
        smallest = max(smallest, grid * -(-nbytes // most))
    largest -= largest % grid
    if largest < smallest:
        raise ValueError(
            f"{nbytes} bytes: bounce slots and largest transfers allow chunks of {largest} bytes, the depth of the "
            f"queues and alignment {smallest} or more; give the stages larger buffers, or copy in parts"
        )
    return largest, smallest


def _best_chunk(
    source: Segment, target: Segment, stages: Sequence[Stage], grid: int, smallest: int, largest: int
) -> int:
    """The chunk with the earliest end, by the estimates; the larger one where two are equal."""
    chosen = largest
    soonest = _duration(source, target, stages, largest)
    size = grid * (1 << (largest // grid).bit_length() - 1)
    while size >= max(smallest, min(SMALLEST_CHUNK, largest)):
        if size < largest:
            duration = _duration(source, target, stages, size)
            if duration < soonest:
                chosen, soonest = size, duration
        size = grid * (size // grid // 2)
    return chosen


def _duration(source: Segment, target: Segment, stages: Sequence[Stage], chunk_nbytes: int) -> int:
    """How long it takes in chunks of that size: the first one, and the slowest step for every other.

    A step is what one queue does for a chunk; and where there is one slot, to fill it and to empty it.
    """
    at = Segment(source.region, next(cut(source.spans, chunk_nbytes)))
    last = Segment(target.region, next(cut(target.spans, chunk_nbytes)))
    total = slowest = before = 0
    lanes: dict[tuple[int, int], int] = {}
    for number, stage in enumerate(stages):
        to = last if stage.bounce is None else stage.bounce.at(0, at.spans.nbytes)
        time = stage.device.estimate(Copy(at, to), stage.queue).duration_ns
        lane = (id(stage.device), stage.queue)
        lanes[lane] = lanes.get(lane, 0) + time
        slowest = max(slowest, lanes[lane])
        if number and stages[number - 1].slots == 1:
            slowest = max(slowest, before + time)
        total += time
        at, before = to, time
    return total + (-(-source.spans.nbytes // chunk_nbytes) - 1) * slowest
