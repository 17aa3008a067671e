"""Operands of launches: every region that a kernel would read or write is looked at, whichever operand it is in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierloop.devices.conformance.launches import gather
from tierloop.devices.conformance.subject import Lane, Subject, expect, refused
from tierloop.devices.errors import Busy, OutOfRange, Unsupported
from tierloop.devices.info import MemoryInfo
from tierloop.devices.regions import Region

_NBYTES = 256


def check_operands_that_nobody_has_are_refused(subject: Subject) -> None:
    """A launch that reads or writes a freed region, or one that somebody else made."""
    for lane, memory in _gathering(subject):
        mine, freed = subject.alloc(_NBYTES, memory), subject.alloc(_NBYTES, memory)
        subject.write(mine.all(), np.full(_NBYTES, 7, dtype=np.uint8))
        subject.platform.free(freed)
        foreign = Region(mine.device, mine.memory, mine.id, _NBYTES)
        for what, other in (("was freed", freed), ("nobody allocated", foreign)):
            with refused(f"gather on {lane} from a region that {what}", OutOfRange, Unsupported):
                lane.submit(gather(other, mine))
            with refused(f"gather on {lane} to a region that {what}", OutOfRange, Unsupported):
                lane.submit(gather(mine, other))
        expect((subject.read(mine.all()) == 7).all(), f"a refused launch changed a region of {memory.name}")
    if subject.info.memories:
        subject.works()


def check_operands_in_use_are_not_freed(subject: Subject) -> None:
    """What a launch will read or write is busy until it has ended."""
    for lane, memory in _gathering(subject):
        source, target = subject.alloc(_NBYTES, memory), subject.alloc(_NBYTES, memory)
        subject.write(source.all(), np.full(_NBYTES, 7, dtype=np.uint8))
        gate = subject.gate()
        held = lane.submit(gather(source, target), after=[gate.completion])
        for what, region in (("read", source), ("write", target)):
            with refused(f"freeing a region of {memory.name} that a launch will {what}", Busy):
                subject.platform.free(region)
        gate.open()
        subject.wait(held)
        expect((subject.read(target.all()) == 7).all(), f"a launch on {lane} whose operands were not freed")
        for region in (source, target):
            subject.platform.free(region)


def _gathering(subject: Subject) -> Iterator[tuple[Lane, MemoryInfo]]:
    """Each executor that gathers, with a memory for its operands; skips the check if there is none."""
    for lane in subject.kernel_lanes("gather"):
        yield lane, subject.operand_memories(lane)[0]
