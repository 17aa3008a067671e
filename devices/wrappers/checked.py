"""Checked: a device whose bytes are compared with a checksum per block, of what was written through it.

It covers the regions that are allocated through it; bytes of other devices pass unchecked, and so do phantom regions.
What must hold:

- A fresh region is zeros, and is checked as such.
- Read: every block that is touched is verified; blocks that are read in part are read as a whole first, and what is
  delivered has to be what was verified.
- Copy and Launch: the blocks of their sources are read and verified before the command begins.
- Write, and Copy from a region of its own: the checksum is that of the bytes which were handed in, not of what a read
  then returns; a block that is written in part is read and verified first.
- Launch, and Copy from elsewhere: the blocks that were written are read when the command has ended; bytes of them
  beside the spans must be what they were.
- A block that differs ends the command with a MediaError naming region, block, and both checksums; what would have been
  carried out after the comparison is not. The block stays wrong until it is written as a whole; the device works on.
- After a command that failed, the blocks that it was to write are unknown: whatever is read next is taken for right.
- So are blocks that a command of another device writes, from its submit to its end and then until the next read: those
  commands do not pass through here. A host that writes through `Region.view` does so behind everybody's back, and is
  found.

The comparisons are Reads of the device inside, before or after the command and on its queue, or where that does not
read, on the first one that does. Commands of different queues that share a block, and of which one writes, are carried
out one after the other. On the host all of it happens on the clock's thread: this is a wrapper for tests and for
finding out who damages what, not for speed. An executor whose device cannot read the memory at all is not checked.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from tierloop.devices.commands import (
    Command,
    Copy,
    Operand,
    Read,
    Traffic,
    Write,
    read_segments,
    verb,
    write_segments,
)
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device, Estimate
from tierloop.devices.errors import ConfigurationError, DeviceError, MediaError
from tierloop.devices.info import DeviceInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.wrappers.around import Held, look
from tierloop.devices.wrappers.checksums import (
    Blocks,
    Bytes,
    Damage,
    Numbers,
    Pieces,
    collect,
    differs,
    overlapping,
    overlay,
)
from tierloop.devices.wrappers.deferred import Deferred
from tierloop.devices.wrappers.turns import Need, Turns

BLOCKS = (64, 1 << 24)
"""Allowed sizes of a block in bytes."""


class _Part(NamedTuple):
    """A segment of a region that is checked, in blocks."""

    blocks: Blocks
    pieces: Pieces


_Seen = dict[Blocks, dict[int, Bytes]]
_Step = tuple[Command, int, tuple[Completion, ...]]
_Steps = Generator[_Step, Completion, DeviceError | None]
"""What is handed to the device inside, one command after the other, and in the end what the whole came to."""


class Checked(Deferred):
    """Verifies what is read against what was written, in blocks of `block_nbytes`, a multiple of the memory's grid."""

    def __init__(self, device: Device, site: Site, block_nbytes: int = 4096) -> None:
        super().__init__(device, site)
        whole = isinstance(block_nbytes, int) and not isinstance(block_nbytes, bool)
        if not whole or not BLOCKS[0] <= block_nbytes <= BLOCKS[1]:
            raise ConfigurationError(f"checked: block_nbytes {block_nbytes!r}; allowed: %d to %d" % BLOCKS)
        self._block_nbytes = block_nbytes
        self._regions: dict[Region, Blocks] = {}
        self._turns = Turns()
        self._peers: dict[Completion, list[tuple[Blocks, Numbers]]] = {}
        self._platform = site.outside or site
        self._platform.arrivals.append(self._peer_began)
        self._platform.observers.append(self._peer_ended)
        self.what = f"checked in blocks of {block_nbytes} bytes"

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate on the device inside; the bytes count as zeros."""
        grids = self._grids if self._info is not None else {m.name: m.alignment for m in self.info.memories}
        region = self.inner.alloc(nbytes, memory, phantom)
        if not phantom:
            self._regions[region] = Blocks(region, self._block_nbytes, grids[region.memory], zeroed=True)
        return region

    def free(self, region: Region) -> None:
        """Free on the device inside. Raises what that raises, or Busy while a command here names the region."""
        super().free(region)
        self._regions.pop(region, None)

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """The command, and the reads before and after it."""
        main = self.inner.estimate(command, queue)
        info, duration, margin = self.info, main.duration_ns, main.margin_ns
        if not Traffic(command).phantom:
            reads, writes = self._parts(read_segments(command)), self._parts(write_segments(command))
            looks = self._before(command, reads, writes)
            if not self._foreseen(command, reads, writes):
                looks += [(blocks, numbers) for blocks, numbers, _ in _by_region(writes)]
            for blocks, numbers in looks:
                for spans in self._chunks(blocks, numbers):
                    reader = self._reader(blocks.region.memory, queue)
                    assert reader is not None, f"{info.name} was found to read what it checks"
                    one = self.inner.estimate(_read(blocks.region, spans), reader)
                    duration, margin = duration + one.duration_ns, margin + one.margin_ns
        return Estimate(duration, margin, f"{main.source}; {self.what}")

    def close(self) -> None:
        """Close the device inside; nothing is compared any more."""
        if not self._closed:
            self._platform.arrivals.remove(self._peer_began)
            self._platform.observers.remove(self._peer_ended)
        super().close()

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        for memory in inner.memories:
            if self._block_nbytes % memory.alignment:
                raise ConfigurationError(
                    f"checked: block_nbytes {self._block_nbytes}; allowed: multiples of {memory.alignment}, the grid "
                    f"of {memory.name}"
                )
        for executor in inner.executors:
            if 0 < executor.largest_transfer < self._block_nbytes:
                raise ConfigurationError(
                    f"checked: block_nbytes {self._block_nbytes}; allowed: at most {executor.largest_transfer}, what "
                    f"{executor.name} of {inner.name} moves in one command"
                )
        self._readers = {
            memory.name: [e for e in inner.executors if "read" in e.verbs and e.path(memory.name) is not None]
            for memory in inner.memories
        }
        unread = [name for name, readers in self._readers.items() if not readers]
        if unread:
            self.what += f"; not {', '.join(unread)}, which it does not read"
        return super()._describe(inner)

    # -- the way of a command -----------------------------------------------------------------------------------

    def _begin(self, held: Held) -> None:
        assert held.completion is not None
        command = held.completion.command
        reads: list[_Part] = []
        writes: list[_Part] = []
        if not held.traffic.phantom:
            reads, writes = self._parts(read_segments(command)), self._parts(write_segments(command))
        needs = [
            Need(blocks, int(pieces.block.min()), int(pieces.block.max()), parts is writes)
            for parts in (reads, writes)
            for blocks, pieces in parts
            if len(pieces.block)
        ]
        self._turns.take(held, needs, lambda: self._go(held, reads, writes))

    def _go(self, held: Held, reads: list[_Part], writes: list[_Part]) -> None:
        completion = held.completion
        if completion is not None:
            after, held.note = held.note, None
            command, queue = completion.command, completion.queue
            self._advance(held, self._carry_out(held, command, queue, self._below(after), reads, writes), None)

    def _advance(self, held: Held, steps: _Steps, ended: Completion | None) -> None:
        """Hand the next command to the device inside; at the end of the steps, end the command."""
        if ended is not None:
            look(ended)
        if held.completion is None or self._closed:
            steps.close()
            return
        if ended is not None:
            held.completion.retries += ended.retries
        try:
            command, queue, after = next(steps) if ended is None else steps.send(ended)
            inner = self.inner.submit(command, queue, after)
        except StopIteration as stop:
            self._conclude(held, stop.value)
        except DeviceError as error:
            steps.close()
            self._conclude(held, error)
        else:
            inner.on_done(lambda inner: self._advance(held, steps, inner))

    def _ended(self, held: Held, completion: Completion) -> None:
        held.note = None
        self._turns.give(held)

    # -- what is read, carried out and compared --------------------------------------------------------------------

    def _carry_out(
        self,
        held: Held,
        command: Command,
        queue: int,
        after: tuple[Completion, ...],
        reads: list[_Part],
        writes: list[_Part],
    ) -> _Steps:
        seen: _Seen = {}
        for blocks, numbers in self._before(command, reads, writes):
            error = yield from self._look(command, blocks, numbers, queue, seen)
            if error is not None:
                return error
        data = self._foresee(command, reads, writes, seen)
        held.inner = inner = yield command, queue, after
        if inner.error is not None:
            for part in writes:
                part.blocks.forget(part.pieces.block)
            return inner.error
        if isinstance(command, Read):
            return self._delivered(command, reads, seen)
        if data is not None:
            _record(writes, seen, data)
            return None
        for blocks, numbers, pieces in _by_region(writes):
            before = seen.pop(blocks, {})
            blocks.forget(numbers)
            error = yield from self._look(command, blocks, numbers, queue, seen)
            if error is not None:
                return error
            for number in blocks.partial(pieces).tolist():
                if number in before and number in seen.get(blocks, {}) and not blocks.flux[number]:
                    error = self._beside(command, blocks, number, pieces, before[number], seen[blocks][number])
                    if error is not None:
                        return error
        return None

    def _before(self, command: Command, reads: list[_Part], writes: list[_Part]) -> list[tuple[Blocks, Numbers]]:
        """The blocks to read before the command begins, ascending, by region."""
        wanted: dict[Blocks, list[Numbers]] = {}
        for blocks, pieces in reads:
            whole = not isinstance(command, Read)
            wanted.setdefault(blocks, []).append(pieces.block if whole else blocks.partial(pieces))
        for blocks, _, pieces in _by_region(writes):
            wanted.setdefault(blocks, []).append(blocks.partial(pieces))
        union = [(blocks, np.unique(np.concatenate(numbers))) for blocks, numbers in wanted.items()]
        return [(blocks, numbers) for blocks, numbers in union if len(numbers)]

    def _look(self, command: Command, blocks: Blocks, numbers: Numbers, queue: int, seen: _Seen) -> _Steps:
        """Read whole blocks and verify them."""
        reader = self._reader(blocks.region.memory, queue)
        assert reader is not None, "memories that nobody here reads are not checked"
        for spans in self._chunks(blocks, numbers):
            read = _read(blocks.region, spans)
            inner = yield read, reader, ()
            if inner.error is not None:
                return inner.error
            at = 0
            for offset, nbytes in spans.array.tolist():
                for low in range(offset, offset + nbytes, blocks.block_nbytes):
                    number = low // blocks.block_nbytes
                    data = read.into[at : at + blocks.size(number)]
                    at += len(data)
                    damage = blocks.verify(number, data)
                    if damage is not None:
                        return self._error(command, blocks, damage)
                    seen.setdefault(blocks, {})[number] = data
        return None

    def _delivered(self, command: Read, reads: list[_Part], seen: _Seen) -> DeviceError | None:
        """Verify what a read has put into the host's buffer."""
        for blocks, pieces in reads:
            whole = blocks.whole(pieces)
            for number, nbytes, at in zip(
                pieces.block[whole].tolist(), pieces.nbytes[whole].tolist(), pieces.at[whole].tolist(), strict=True
            ):
                damage = blocks.verify(number, command.into[at : at + nbytes])
                if damage is not None:
                    return self._error(command, blocks, damage)
            still = {number: data for number, data in seen.get(blocks, {}).items() if not blocks.flux[number]}
            wrong = differs(pieces, still, command.into)
            if wrong is not None:
                problem = f"{_place(blocks, wrong)}: other bytes were delivered than lie there"
                return MediaError(self._name, verb(command), problem)
        return None

    def _foreseen(self, command: Command, reads: list[_Part], writes: list[_Part]) -> bool:
        """Whether it is known beforehand which bytes the command will have written."""
        if not writes:
            return True
        if not isinstance(command, (Write, Copy)) or overlapping(command.target.spans):
            return False
        if isinstance(command, Write):
            return True
        if not reads:
            return False
        source, target = reads[0], writes[0]
        if source.blocks.flux[source.pieces.block].any():
            return False
        return source.blocks is not target.blocks or not np.isin(source.pieces.block, target.pieces.block).any()

    def _foresee(self, command: Command, reads: list[_Part], writes: list[_Part], seen: _Seen) -> Bytes | None:
        """The bytes that the command will have written, or None."""
        if not self._foreseen(command, reads, writes):
            return None
        if isinstance(command, Write):
            return command.data
        data = np.empty(sum(int(part.pieces.nbytes.sum()) for part in reads), dtype=np.uint8)
        if isinstance(command, Copy) and writes:
            collect(reads[0].pieces, seen.get(reads[0].blocks, {}), data)
        return data

    def _beside(
        self, command: Command, blocks: Blocks, number: int, pieces: Pieces, before: Bytes, after: Bytes
    ) -> DeviceError | None:
        """Bytes of a block that the command was not to write have to be what they were."""
        expected = before.copy()
        here = Pieces(*(column[pieces.block == number] for column in pieces))
        for offset, nbytes in zip(here.offset.tolist(), here.nbytes.tolist(), strict=True):
            expected[offset : offset + nbytes] = after[offset : offset + nbytes]
        if np.array_equal(expected, after):
            return None
        blocks.record(number, expected)
        damage = blocks.verify(number, after)
        assert damage is not None
        return self._error(command, blocks, damage)

    def _error(self, command: Command, blocks: Blocks, damage: Damage) -> MediaError:
        problem = f"{_place(blocks, damage.block)}: checksum {damage.got:08x}, expected {damage.expected:08x}"
        return MediaError(self._name, verb(command), problem)

    def _parts(self, segments: Operand) -> list[_Part]:
        """The segments of regions that are checked."""
        parts = []
        for region, spans in segments:
            if region.phantom or not self._readers.get(region.memory):
                continue
            blocks = self._regions.get(region)
            if blocks is None:  # it was there before
                grid = self._grids[region.memory]
                blocks = self._regions[region] = Blocks(region, self._block_nbytes, grid, zeroed=False)
            parts.append(_Part(blocks, blocks.pieces(spans)))
        return parts

    def _reader(self, memory: str, queue: int) -> int | None:
        """The queue to read a memory on: the command's own where that reads."""
        readers = self._readers.get(memory, [])
        if any(queue in executor.queues for executor in readers):
            return queue
        return readers[0].queues[0] if readers else None

    def _chunks(self, blocks: Blocks, numbers: Numbers) -> list[Spans]:
        """The blocks in as many reads as the smallest largest transfer asks for."""
        limits = [e.largest_transfer for e in self._readers[blocks.region.memory] if e.largest_transfer]
        most = min(limits, default=len(numbers) * self._block_nbytes) // self._block_nbytes
        return [blocks.spans(numbers[i : i + most]) for i in range(0, len(numbers), most)]

    # -- commands of other devices ------------------------------------------------------------------------------

    def _peer_began(self, completion: Completion) -> None:
        """A command of another device may write here from now on."""
        touched = self._touched(completion)
        for blocks, numbers in touched:
            blocks.flux[numbers] += 1
            blocks.forget(numbers)
        if touched:
            self._peers[completion] = touched

    def _peer_ended(self, completion: Completion) -> None:
        begun = self._peers.pop(completion, None)
        for blocks, numbers in begun or ():
            blocks.flux[numbers] -= 1
        if begun is None:  # its device has queues of its own making, which tell nobody of arrivals
            for blocks, numbers in self._touched(completion):
                blocks.forget(numbers)

    def _touched(self, completion: Completion) -> list[tuple[Blocks, Numbers]]:
        """The blocks here that a command of another device writes; none for those that pass through."""
        if self._info is None or completion.device == self._name:
            return []
        return [
            (self._regions[region], np.unique(self._regions[region].pieces(spans).block))
            for region, spans in write_segments(completion.command)
            if region in self._regions
        ]


def _by_region(parts: list[_Part]) -> list[tuple[Blocks, Numbers, Pieces]]:
    """Segments of one region put together: its blocks that are touched, ascending, and all pieces."""
    together: dict[Blocks, list[Pieces]] = {}
    for blocks, pieces in parts:
        together.setdefault(blocks, []).append(pieces)
    made = []
    for blocks, several in together.items():
        pieces = Pieces(*(np.concatenate(columns) for columns in zip(*several, strict=True)))
        if len(pieces.block):
            made.append((blocks, np.unique(pieces.block), pieces))
    return made


def _record(writes: list[_Part], seen: _Seen, data: Bytes) -> None:
    """Note what a Write or Copy has written: its bytes, and in blocks that it wrote in part, around them what was."""
    for blocks, pieces in writes:
        whole = blocks.whole(pieces)
        for number, nbytes, at in zip(
            pieces.block[whole].tolist(), pieces.nbytes[whole].tolist(), pieces.at[whole].tolist(), strict=True
        ):
            blocks.record(number, data[at : at + nbytes])
        partial = set(blocks.partial(pieces).tolist())
        around = {number: old for number, old in seen.get(blocks, {}).items() if number in partial}
        overlay(pieces, around, data)
        for number, new in around.items():
            blocks.record(number, new)


def _read(region: Region, spans: Spans) -> Read:
    return Read(Segment(region, spans), np.empty(spans.nbytes, dtype=np.uint8))


def _place(blocks: Blocks, number: int) -> str:
    low = number * blocks.block_nbytes
    return f"block {number} ([{low}, {low + blocks.size(number)})) of {blocks.region}"
