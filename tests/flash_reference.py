"""The flash translation layer unit by unit, in lists and dicts: what the compiled one has to agree with.

`SlowFlash` is a plain drive, `Chip` the dies by the rules of a datasheet, `SlowDie` what one die does when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tierloop.firmware_models.flash import FlashGeometry, Operation
from tierloop.firmware_models.media import WHOLE, MediaWork, Ranges


class Block:
    """Slots in the order in which they are programmed: (unit, tag), or None for garbage and for what is erased."""

    def __init__(self, slots: int) -> None:
        self.slots: list[tuple[int, int] | None] = [None] * slots
        self.closed = False

    @property
    def valid(self) -> int:
        return sum(slot is not None for slot in self.slots)


class SlowFlash:
    """As firmware_models/flash.py says, as slowly as one likes."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self.g = geometry
        self.per_block = geometry.slots * geometry.stripes_per_block
        self.blocks = [Block(self.per_block) for _ in range(geometry.dies * geometry.blocks_per_die)]
        self.erased = [[self.number(die, k) for k in range(geometry.blocks_per_die)] for die in range(geometry.dies)]
        self.open: dict[int, tuple[int, int]] = {}
        """Of each die that has one: its open block and the next stripe in it."""
        self.stripe: tuple[int, int] | None = None
        """The block and the number of the stripe that is being filled."""
        self.fill = 0
        self.die = 0
        self.where: dict[int, int] = {}
        self.writes = self.host_units = self.collected_units = self.erased_blocks = 0
        self.faults: dict[int, int] = {}

    def number(self, die: int, block: int) -> int:
        return die * self.g.blocks_per_die + block

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        g = self.g
        self.die_ns, self.bus_units = [0] * g.dies, [0] * g.channels
        read = [u for a, n in reads.tolist() for u in range(a // g.unit_nbytes, (a + n) // g.unit_nbytes)]
        fault = next((u for u in self.faults if u in read), None)
        if fault is not None:
            self.faults[fault] -= 1
            if not self.faults[fault]:
                del self.faults[fault]
        sensed = self.read(read)
        collected = self.collected_units
        written = [u for a, n in writes.tolist() for u in range(a // g.unit_nbytes, (a + n) // g.unit_nbytes)]
        for unit in written:
            self.write(unit)
        moved = len(read) + len(written) + 2 * (self.collected_units - collected)
        text = "" if fault is None else f"unit {fault} (byte {fault * g.unit_nbytes}) cannot be corrected"
        return self.work(sensed, moved, text)

    def work(self, sensed: bool, moved: int, fault: str) -> MediaWork:
        g = self.g
        unit_ns = -(-g.unit_nbytes * 10**9 // g.channel_bytes_per_s)
        bus_ns = [units * unit_ns for units in self.bus_units]
        die, bus = max(self.die_ns), max(bus_ns)
        alone = max(die + (unit_ns if die and bus else 0), bus + (g.read_ns if sensed else 0))
        share = 1
        for busy in (self.die_ns, bus_ns):
            if alone:
                share = max(share, min(-(-sum(busy) * WHOLE // (len(busy) * alone)), WHOLE))
        return MediaWork(alone, share, moved * g.unit_nbytes, fault)

    def read(self, units: list[int]) -> bool:
        g, last_page, sensed = self.g, -1, False
        for unit in units:
            slot = self.where.get(unit)
            if slot is None:  # where a fresh sequential fill would have put it
                stripe = unit // g.slots
                block = self.number(stripe % g.dies, 0)
                slot = block * self.per_block + stripe // g.dies % g.stripes_per_block * g.slots + unit % g.slots
            die = slot // self.per_block // g.blocks_per_die
            page = slot // (g.page_nbytes // g.unit_nbytes)
            block, within = divmod(slot, self.per_block)
            if page != last_page and (block, within // g.slots) != self.stripe:
                self.die_ns[die] += g.read_ns
                sensed = True
            last_page = page
            self.bus_units[die // g.dies_per_channel] += 1
        return sensed

    def write(self, unit: int) -> None:
        g = self.g
        if self.stripe is None:
            self.die = next(d % g.dies for d in range(self.die, self.die + g.dies) if self.has_room(d % g.dies))
            self.stripe, self.fill = self.open[self.die], 0
        self.forget(unit)
        self.writes += 1
        self.host_units += 1
        block, stripe = self.stripe
        within = stripe * g.slots + self.fill
        self.blocks[block].slots[within] = (unit, self.writes)
        self.where[unit] = block * self.per_block + within
        self.bus_units[self.die // g.dies_per_channel] += 1
        self.fill += 1
        if self.fill == g.slots:
            self.die_ns[self.die] += g.program_ns
            self.open[self.die] = (block, stripe + 1)
            self.die = (self.die + 1) % g.dies
            self.stripe = None

    def forget(self, unit: int) -> None:
        slot = self.where.pop(unit, None)
        if slot is not None:
            self.blocks[slot // self.per_block].slots[slot % self.per_block] = None

    def has_room(self, die: int) -> bool:
        block, stripe = self.open.get(die, (-1, self.g.stripes_per_block))
        if stripe < self.g.stripes_per_block:
            return True
        if block >= 0:
            self.blocks[block].closed = True
            del self.open[die]
        if self.erased[die]:
            self.open[die] = (self.erased[die].pop(0), 0)
            return True
        return self.collect(die)

    def collect(self, die: int) -> bool:
        g = self.g
        closed = [n for n in range(self.number(die, 0), self.number(die + 1, 0)) if self.blocks[n].closed]
        if not closed:
            return False
        victim = min(closed, key=lambda n: (self.blocks[n].valid, n))
        held = [(i, slot) for i, slot in enumerate(self.blocks[victim].slots) if slot is not None]
        stripes = -(-len(held) // g.slots)
        if stripes >= g.stripes_per_block:
            return False
        pages = len({i // (g.page_nbytes // g.unit_nbytes) for i, _ in held})
        fresh = self.blocks[victim] = Block(self.per_block)
        for i, (_, slot) in enumerate(held):
            fresh.slots[i] = slot
            self.where[slot[0]] = victim * self.per_block + i
        self.open[die] = (victim, stripes)
        self.erased_blocks += 1
        self.collected_units += len(held)
        self.die_ns[die] += pages * g.read_ns + stripes * g.program_ns + g.erase_ns
        self.bus_units[die // g.dies_per_channel] += 2 * len(held)
        return True


class Chip:
    """The dies as a datasheet has them: carries out operations and refuses what real ones would spoil data with."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self.g = geometry
        blocks = geometry.dies * geometry.blocks_per_die
        self.programmed = [0] * blocks
        """Stripes that are programmed, from the first one on."""
        self.erases = [0] * blocks
        self.bad: set[int] = set()
        self.read_units: Counter[str] = Counter()
        self.programmed_units: Counter[str] = Counter()
        self.stripes = self.pages = 0

    def is_cache(self, block: int) -> bool:
        return block % self.g.blocks_per_die >= self.g.main_blocks + self.g.reserve_blocks

    def stripes_of(self, block: int) -> int:
        return self.g.slc_stripes if self.is_cache(block) else self.g.stripes_per_block

    def carry_out(self, operations: Iterable[Operation]) -> None:
        for op in operations:
            assert op.block // self.g.blocks_per_die == op.die, f"{op}: the block is on another die"
            assert op.times > 0, f"{op}: nothing to do"
            if op.kind == "program":
                self.program(op)
            elif op.kind == "read":
                self.read(op)
            else:
                self.erase(op)

    def program(self, op: Operation) -> None:
        assert op.block not in self.bad, f"{op}: the block is bad"
        assert op.first == self.programmed[op.block], f"{op}: stripes of a block are programmed in order, each once"
        assert op.first + op.times <= self.stripes_of(op.block), f"{op}: the block ends before"
        assert 0 < op.units <= op.times * self.g.slots, f"{op}: so many units do not fit"
        assert op.units == op.times * self.g.slots or op.cause != "host", f"{op}: the host's stripes are full"
        self.programmed[op.block] += op.times
        self.programmed_units[op.cause] += op.units
        self.stripes += op.times

    def read(self, op: Operation) -> None:
        self.pages += op.times
        if op.cause != "host":
            assert self.programmed[op.block], f"{op}: nothing was programmed there"
            self.read_units[op.cause] += op.units

    def erase(self, op: Operation) -> None:
        assert op.block not in self.bad, f"{op}: the block is bad"
        assert self.programmed[op.block], f"{op}: the block is erased already"
        self.programmed[op.block] = 0
        if op.kind == "retire":
            self.bad.add(op.block)
        else:
            self.erases[op.block] += 1

    def settled(self) -> None:
        """Between commands, whatever was read to be moved has been programmed again."""
        for cause in ("collect", "fold", "level"):
            assert self.read_units[cause] == self.programmed_units[cause], f"{cause}: units were lost on the way"


@dataclass
class Slowly:
    """One operation that a die has to do."""

    start: int
    end: int
    block: int
    overtaken: int = 0


class SlowDie:
    """The queue of a single die, operation by operation: what flash_dies.py does with runs of them."""

    def __init__(self, suspends: int, suspend_ns: int) -> None:
        self.suspends, self.suspend_ns = suspends, suspend_ns
        self.operations: list[Slowly] = []
        self.reads_until = 0
        self.suspended = 0

    def program(self, at: int, ns: int, block: int) -> Slowly:
        start = max([at, self.reads_until] + [op.end for op in self.operations])
        self.operations.append(Slowly(start, start + ns, block))
        return self.operations[-1]

    def read(self, now: int, ns: int, block: int) -> int:
        start, stands_still = max(now, self.reads_until), self.reads_until > now
        for op in self.operations:
            if op.end > start and (op.block == block or self.suspends == 0):
                start, stands_still = op.end, False
        for number, op in enumerate(self.operations):
            if op.end <= start:
                continue
            if op.start >= start + ns:
                break
            if op.overtaken == self.suspends:
                start, stands_still = op.end, False
                continue
            op.overtaken += 1
            if op.start < start:
                if not stands_still:
                    self.suspended += 1
                    start += self.suspend_ns
                    op.end += self.suspend_ns
                op.end += ns
            else:
                op.start, op.end = start + ns, start + ns + op.end - op.start
            for before, after in pairwise(self.operations[number:]):
                late = max(before.end - after.start, 0)
                after.start, after.end = after.start + late, after.end + late
            break
        self.reads_until = start + ns
        return self.reads_until
