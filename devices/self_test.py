"""The self-test of a platform: one block is written to and read from each memory, by everybody who moves bytes there.

Who calls this: `run`, `compare`, `ablate` and `serve-bench` when they have opened a platform for the first time
(`start_up_test`, real devices only), and `doctor --platform` for all devices. A driver, a kernel and a firmware that
do not fit together are found there, and not by a tier that stays empty. What must hold:

- Nothing that is stored is changed. Where bytes end with their owner, a region of a block is allocated and freed.
  A memory that outlives the process is never allocated from: near its end a block of zeros is looked for, and those
  zeros are put back, flushed and read again. Where there is none, and where the memory takes no writes, it is read and
  not written, and that is said.
- What comes back is compared with what was written: bytes drawn by memory and executor, so none that lay there before
  and none of another executor's.
- An error has the kind of what failed (MediaError where other bytes came back), and names memory, executor and place.
- It costs one block, four commands and one flush for each pair of executor and memory, and the opening of the platform.

A device that was told to fail now and then (`faulty`) is left out, and moves no bytes of others: what it would show was
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Flush
from tierloop.devices.device import Device
from tierloop.devices.errors import Busy, DeviceError, MediaError, Unsupported, restated
from tierloop.devices.info import ExecutorInfo, MemoryInfo
from tierloop.devices.persistent import Keeper, keeper
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.devices.wrappers.faulty import Faulty
from tierloop.devices.wrappers.recorded import Recorded

Bytes = NDArray[np.uint8]
_Wrapper = TypeVar("_Wrapper")
BLOCK = 4096
"""Bytes of a block, unless the memory's grid is coarser."""
_LOOKED_THROUGH = 64
"""Blocks at the end of a persistent memory among which one of zeros is looked for."""


@dataclass(frozen=True)
class Tested:
    """One executor on one memory. `wrote` says whether it was written; `remark` why not, or why it was left out."""

    memory: str
    by: str
    nbytes: int = 0
    wrote: bool = False
    duration_ns: int = 0
    remark: str = ""
    error: DeviceError | None = None

    @property
    def good(self) -> bool:
        """Whether bytes were moved and nothing was wrong with them."""
        return self.nbytes > 0 and self.error is None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "memory": self.memory,
            "by": self.by,
            "nbytes": self.nbytes,
            "wrote": self.wrote,
            "duration_ns": self.duration_ns,
            "remark": self.remark,
            "error": None if self.error is None else {"kind": self.error.kind, "message": str(self.error)},
        }


@dataclass(frozen=True)
class _Lane:
    """Whoever moves bytes between host buffers and a memory."""

    platform: Platform
    device: Device
    executor: ExecutorInfo

    @property
    def name(self) -> str:
        return f"{self.device.info.name} {self.executor.name}"

    def write(self, target: Segment, data: Bytes) -> None:
        write_bytes(self.platform.clock, self.device, target, data, self.executor.queues[0])

    def read(self, source: Segment) -> Bytes:
        return read_bytes(self.platform.clock, self.device, source, self.executor.queues[0])

    def flush(self, target: Segment) -> None:
        if "flush" in self.executor.verbs:
            wait(self.platform.clock, self.device.submit(Flush(target), self.executor.queues[0]))


@dataclass(frozen=True)
class _Place:
    """A block that nobody misses; `kept` says that it has to be zeros again. Without `may_write` it is only read."""

    segment: Segment
    name: str
    kept: bool = False
    may_write: bool = True


def self_test(platform: Platform, real_only: bool = False) -> list[Tested]:
    """Test every memory with every executor that reads and writes it; what is wrong stands in the results."""
    return [
        tested
        for device, memory in platform.memories()
        if not real_only or device.info.provenance == "real"
        for tested in _of_memory(platform, device, memory)
    ]


def start_up_test(platform: Platform) -> list[Tested]:
    """Test the real memories of a platform that was just opened. Raises the first error."""
    found = self_test(platform, real_only=True)
    for tested in found:
        if tested.error is not None:
            raise tested.error
    return found


def forget(platform: Platform) -> None:
    """Have `recorded` devices forget what was done so far: the platform was opened to be tried."""
    for device in platform.devices.values():
        recorded = _inside(device, Recorded)
        if recorded is not None:
            recorded.forget()


def _of_memory(platform: Platform, device: Device, memory: MemoryInfo) -> list[Tested]:
    if _fails_on_purpose(device):
        return [Tested(memory.name, "", remark="it was told to fail now and then")]
    lanes = [
        _Lane(platform, owner, executor)
        for owner, executor in platform.executors()
        if executor.verbs >= {"read", "write"} and executor.path(memory.name) and not _fails_on_purpose(owner)
    ]
    if not lanes:
        return [Tested(memory.name, "", remark="nobody reads and writes it from host memory")]
    found: list[Tested] = []
    try:
        with _place(device, memory, lanes[0]) as place:
            for lane in lanes:
                found.append(_through(lane, place))
    except DeviceError as error:
        if all(tested.error is None for tested in found):
            found.append(Tested(memory.name, lanes[0].name, error=_named(error, memory.name, lanes[0], "")))
    return found


def _fails_on_purpose(device: object) -> bool:
    return _inside(device, Faulty) is not None


def _inside(device: object, kind: type[_Wrapper]) -> _Wrapper | None:
    """The wrapper of that kind around a device, if it has one."""
    while device is not None and not isinstance(device, kind):
        device = getattr(device, "inner", None)
    return device


@contextmanager
def _place(device: Device, memory: MemoryInfo, lane: _Lane) -> Iterator[_Place]:
    block = -(-BLOCK // memory.alignment) * memory.alignment
    keep = keeper(device) if memory.persistent else None
    region = None if keep is None else _at_the_end(keep, memory, block)
    if keep is None or region is None:
        region = device.alloc(block, memory.name)
        with _given_back(device.free, region):
            yield _Place(region.all(), f"a new region of {block} bytes")
        return
    with _given_back(keep.disown, region):
        begin = keep.offset_of(region)
        empty = np.flatnonzero(~lane.read(region.all()).reshape(-1, block).any(axis=1))
        at = (int(empty[-1]) if len(empty) else region.nbytes // block - 1) * block
        name = f"bytes [{begin + at}, {begin + at + block}) of the medium"
        yield _Place(region.at(at, block), name, True, len(empty) > 0)


def _at_the_end(keep: Keeper, memory: MemoryInfo, block: int) -> Region | None:
    """The last blocks of a memory that keeps its bytes, as many as are free; None where it keeps nothing after all.

    Raises Busy where the very last one is taken, and whatever else `adopt` raises.
    """
    last = memory.capacity // block
    count = min(_LOOKED_THROUGH, last)
    while True:
        try:
            return keep.adopt((last - count) * block, count * block)
        except Unsupported:
            return None
        except Busy:
            if count <= 1:
                raise
            count //= 2


@contextmanager
def _given_back(give: Callable[[Region], None], region: Region) -> Iterator[None]:
    """Give a region back; if anything failed before, that is what is told."""
    try:
        yield
    except BaseException:
        with suppress(DeviceError):
            give(region)
        raise
    give(region)


def _through(lane: _Lane, place: _Place) -> Tested:
    """The test itself: one executor, one block."""
    clock, (region, spans) = lane.platform.clock, place.segment
    begun = clock.now()
    wrote, remark, error = place.may_write, "", None
    if not wrote:
        remark = f"only read: the last {region.nbytes} bytes of the medium have no block of zeros to write to"
    try:
        try:
            if wrote:
                _write_and_read(lane, place)
        except Unsupported as refused:
            if not place.kept:
                raise
            wrote, remark = False, f"only read: {refused.detail}"
        if not wrote:
            lane.read(place.segment)
    except DeviceError as failed:
        error = _named(failed, region.memory, lane, place.name)
    return Tested(region.memory, lane.name, spans.nbytes, wrote, clock.now() - begun, remark, error)


def _write_and_read(lane: _Lane, place: _Place) -> None:
    region, spans = place.segment
    written = _drawn(f"{region.memory} {lane.name}", spans.nbytes)
    try:
        lane.write(place.segment, written)
        _compare(lane, place, written)
    except BaseException:
        if place.kept:
            with suppress(DeviceError):
                _zero(lane, place)
        raise
    if place.kept:
        _zero(lane, place)


def _zero(lane: _Lane, place: _Place) -> None:
    """Put back what was there."""
    zeros = np.zeros(place.segment.spans.nbytes, dtype=np.uint8)
    lane.write(place.segment, zeros)
    lane.flush(place.segment)
    _compare(lane, place, zeros)


def _compare(lane: _Lane, place: _Place, written: Bytes) -> None:
    """Raises MediaError where other bytes come back."""
    got = lane.read(place.segment)
    wrong = np.flatnonzero(got != written)
    if len(wrong):
        first = int(wrong[0])
        raise MediaError(
            lane.device.info.name,
            "compare",
            f"{len(wrong)} of {len(written)} bytes are not those that were written, the first at {first}: "
            f"{got[first]:#04x} instead of {written[first]:#04x}",
        )


def _drawn(seed: str, nbytes: int) -> Bytes:
    """Bytes that are never 0, by the seed: uint8 (nbytes,)."""
    return np.random.default_rng(list(seed.encode())).integers(1, 256, nbytes, dtype=np.uint8)


def _named(error: DeviceError, memory: str, lane: _Lane, where: str) -> DeviceError:
    """The error as one of the self-test, of the same kind."""
    path = f"{lane.name} to {where}" if where else lane.name
    named = restated(error, memory, "self-test", f"{path}: {error.op}: {error.detail}")
    named.__cause__ = error
    return named
