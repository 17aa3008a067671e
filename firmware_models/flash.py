"""A page-mapped flash translation layer: logical units on pages of dies behind channels.

Geometry: `channels` buses with `dies_per_channel` dies each. A die senses one page in `read_ns` and programs one
*stripe* (the pages of all its planes) in `program_ns`; a block of `stripes_per_block` stripes is erased as a whole in
`erase_ns`. The host sees *units* of `unit_nbytes` (the logical block size); a stripe holds `slots` of them.

- Writes go out of place: units are collected in a stripe buffer (protected against power loss, so a write is durable
  when its command ends) and the full stripe is programmed; stripes are dealt to the dies in turn. A write that does not
  fill a stripe costs bus time only; the one that fills it waits for the program.
- A die without an erased block collects garbage before it takes more: the block with the fewest valid units is read,
  erased, and its valid units are programmed again. That time belongs to the write that needed the room.
- Reading a unit that was never written costs what a written one costs, on the die where a fresh sequential fill would
  have put it: a drive that answers such reads from its table alone looks faster than the drive.
- A command on an idle drive takes the larger of its busiest die (plus the transfer of a page) and its busiest channel
  (plus the sensing of a page). Commands that overlap share the dies by the part that they use (media.py); that two
  small commands meet on one die is not modelled.

Every slot carries the unit it holds and a tag (the sequence number of the write), as the spare area of a real page
does; the back door reads them. Capacity in units is fixed; physical space is `spare_percent` larger, plus two blocks
per die.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.firmware_models.media import MediaWork, Ranges, parallel

Int64 = NDArray[np.int64]
_TRIM_UNITS = 1 << 20


@dataclass(frozen=True)
class FlashGeometry:
    """Sizes in bytes, times in ns, `channel_bytes_per_s` per channel."""

    capacity: int
    unit_nbytes: int
    page_nbytes: int
    planes: int
    channels: int
    dies_per_channel: int
    stripes_per_block: int
    read_ns: int
    program_ns: int
    erase_ns: int
    channel_bytes_per_s: int
    spare_percent: int

    def __post_init__(self) -> None:
        if min(getattr(self, f) for f in self.__dataclass_fields__) < 1:
            raise ValueError(f"every number of a flash geometry is at least 1: {self}")
        if self.page_nbytes % self.unit_nbytes:
            raise ValueError(f"a page of {self.page_nbytes} B holds no whole number of {self.unit_nbytes} B units")
        if self.spare_percent * (self.stripes_per_block - 1) < 100:
            raise ValueError(
                f"spare_percent {self.spare_percent} is less than the stripe per block that collecting garbage can "
                f"lose: 100 / (stripes_per_block - 1), stripes_per_block = {self.stripes_per_block}"
            )

    @property
    def dies(self) -> int:
        """Dies of the whole drive."""
        return self.channels * self.dies_per_channel

    @property
    def slots(self) -> int:
        """Units in a stripe."""
        return self.page_nbytes // self.unit_nbytes * self.planes

    @property
    def units(self) -> int:
        """Units that the host sees."""
        return self.capacity // self.unit_nbytes

    @property
    def blocks_per_die(self) -> int:
        """Blocks of a die, spare ones included."""
        per_block = self.dies * self.slots * self.stripes_per_block
        return -(-self.units * (100 + self.spare_percent) // (100 * per_block)) + 2


class Slot(NamedTuple):
    """Where a unit lies: `slot` is its physical number, `tag` the sequence number of the write that put it there."""

    slot: int
    die: int
    block: int
    tag: int


class _Busy:
    """What one command asks of each die and channel."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self.die_ns = np.zeros(geometry.dies, dtype=np.int64)
        self.bus_units = np.zeros(geometry.channels, dtype=np.int64)
        self.sensed = False


class FlashModel:
    """The controller and its media. `host_units`, `collected_units` (written again) and `erased_blocks` only grow."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self.geometry = geometry
        self._unit_ns = -(-geometry.unit_nbytes * 1_000_000_000 // geometry.channel_bytes_per_s)
        self._faults: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Erase everything: no unit is mapped, every block is free, counters are 0."""
        g = self.geometry
        blocks = g.dies * g.blocks_per_die
        slots = blocks * g.stripes_per_block * g.slots
        self._map: NDArray[Any] = _lazy_zeros(g.units)
        self._owner: NDArray[Any] = _lazy_zeros(slots)
        self._tag: NDArray[Any] = _lazy_zeros(slots)
        self._valid = np.zeros(blocks, dtype=np.int64)
        self._closed = np.zeros(blocks, dtype=bool)
        self._free = [list(range((d + 1) * g.blocks_per_die - 1, d * g.blocks_per_die - 1, -1)) for d in range(g.dies)]
        self._open_block = [-1] * g.dies
        self._next_stripe = [0] * g.dies
        self._die = 0
        self._stripe = -1
        self._fill = 0
        self._writes = 0
        self.host_units = 0
        self.collected_units = 0
        self.erased_blocks = 0
        self._faults.clear()

    @property
    def write_amplification(self) -> float:
        """Units programmed per unit that the host wrote; 1 before the first write."""
        return 1 + self.collected_units / self.host_units if self.host_units else 1.0

    # -- the bus face ---------------------------------------------------------------------------------------------

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Read, then write. Ranges lie on the grid of units and inside the capacity."""
        read, written = self._units_of(reads), self._units_of(writes)
        busy = _Busy(self.geometry)
        fault = self._fault(read)
        self._count_reads(read, busy)
        collected = self.collected_units
        self._write(written, busy)
        return self._work(busy, len(read) + len(written) + 2 * (self.collected_units - collected), fault)

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """What the access costs if no garbage has to be collected."""
        g = self.geometry
        read, written = self._units_of(reads), self._units_of(writes)
        busy = _Busy(g)
        self._count_reads(read, busy)
        end = self._fill + len(written)
        stripes = np.full(-(-end // g.slots), g.slots)
        dies = (self._die + np.arange(len(stripes))) % g.dies
        full = dies[: end // g.slots]
        busy.die_ns += np.bincount(full, minlength=g.dies) * g.program_ns
        if len(written):
            stripes[0] -= self._fill
            stripes[-1] -= len(stripes) * g.slots - end
            np.add.at(busy.bus_units, dies // g.dies_per_channel, stripes)
        return self._work(busy, len(read) + len(written), "")

    def trim(self, address: int, nbytes: int) -> None:
        """Forget the units that lie wholly inside; reading them gives zeros from then on."""
        if not self._writes:
            return
        unit = self.geometry.unit_nbytes
        last = (address + nbytes) // unit
        for first in range(-(-address // unit), last, _TRIM_UNITS):
            part = self._map[first : min(first + _TRIM_UNITS, last)]
            if part.any():
                self._invalidate(part)
                part[:] = 0

    def ceiling(self, write: bool) -> int:
        """The slower of all dies and all channels at work."""
        g = self.geometry
        die = g.page_nbytes * g.planes * 1_000_000_000 // g.program_ns if write else g.page_nbytes * 10**9 // g.read_ns
        return min(die * g.dies, g.channel_bytes_per_s * g.channels)

    # -- the back door --------------------------------------------------------------------------------------------

    def peek(self, unit: int) -> Slot | None:
        """Where a unit lies and what its spare area says; None if it was never written."""
        g = self.geometry
        slot = int(self._map[unit]) - 1
        if slot < 0:
            return None
        assert int(self._owner[slot]) == unit + 1, "the map and the spare area agree"
        block = slot // (g.slots * g.stripes_per_block)
        return Slot(slot, block // g.blocks_per_die, block, int(self._tag[slot]))

    def age(self, rounds: int = 1, seed: int = 0) -> None:
        """Write every unit `rounds` times in random order: the steady state of a drive that has been in use."""
        order = np.random.default_rng(seed)
        for _ in range(rounds):
            self._write(order.permutation(self.geometry.units).astype(np.int64), _Busy(self.geometry))

    def inject(self, unit: int, times: int = 1) -> None:
        """Let the next `times` reads that touch this unit fail."""
        self._faults[unit] = times

    # -- the controller -------------------------------------------------------------------------------------------

    def _units_of(self, ranges: Ranges) -> Int64:
        unit = self.geometry.unit_nbytes
        counts = ranges[:, 1] // unit
        if len(ranges) == 1:
            first = int(ranges[0, 0]) // unit
            return np.arange(first, first + int(counts[0]))
        starts = np.repeat(ranges[:, 0] // unit, counts)
        ends = np.cumsum(counts)
        return np.asarray(starts + np.arange(len(starts)) - np.repeat(ends - counts, counts), dtype=np.int64)

    def _fault(self, units: Int64) -> str:
        for unit in [u for u in self._faults if (units == u).any()] if self._faults else []:
            self._faults[unit] -= 1
            if self._faults[unit] <= 0:
                del self._faults[unit]
            return f"unit {unit} (byte {unit * self.geometry.unit_nbytes}) cannot be corrected"
        return ""

    def _count_reads(self, units: Int64, busy: _Busy) -> None:
        if not len(units):
            return
        g = self.geometry
        slots = self._map[units].astype(np.int64) - 1
        fresh = slots < 0
        if fresh.any():
            stripe = units[fresh] // g.slots
            block = stripe % g.dies * g.blocks_per_die
            slots[fresh] = (block * g.stripes_per_block + stripe // g.dies % g.stripes_per_block) * g.slots
            slots[fresh] += units[fresh] % g.slots
        dies = slots // (g.slots * g.stripes_per_block * g.blocks_per_die)
        busy.bus_units += np.bincount(dies // g.dies_per_channel, minlength=g.channels)
        buffered = slots // g.slots == self._stripe
        pages = slots // (g.page_nbytes // g.unit_nbytes)
        sensed = np.ones(len(units), dtype=bool)
        sensed[1:] = pages[1:] != pages[:-1]
        sensed &= ~buffered
        busy.die_ns += np.bincount(dies[sensed], minlength=g.dies) * g.read_ns
        busy.sensed = bool(sensed.any())

    def _write(self, units: Int64, busy: _Busy) -> None:
        g = self.geometry
        self.host_units += len(units)
        done = 0
        while done < len(units):
            if self._stripe < 0:
                self._open_stripe(busy)
            take = min(g.slots - self._fill, len(units) - done)
            self._append(units[done : done + take])
            busy.bus_units[self._die // g.dies_per_channel] += take
            done += take
            if self._fill == g.slots:
                self._program(busy)

    def _append(self, units: Int64) -> None:
        """Put units into the open stripe; where one comes twice, the last wins."""
        first = self._stripe * self.geometry.slots + self._fill
        slots = np.arange(first, first + len(units))
        self._invalidate(self._map[units])
        self._map[units] = slots + 1
        live = self._map[units] == slots + 1
        self._owner[slots] = np.where(live, units + 1, 0)
        self._tag[slots] = self._writes + 1 + np.arange(len(units))
        self._valid[self._stripe // self.geometry.stripes_per_block] += int(live.sum())
        self._writes += len(units)
        self._fill += len(units)

    def _invalidate(self, mapped: NDArray[Any]) -> None:
        """Mark slots (as the map holds them, plus one) as garbage."""
        dead = mapped[mapped > 0].astype(np.int64) - 1
        if len(dead):
            dead = np.unique(dead)
            self._owner[dead] = 0
            blocks, counts = np.unique(
                dead // (self.geometry.slots * self.geometry.stripes_per_block), return_counts=True
            )
            self._valid[blocks] -= counts

    def _open_stripe(self, busy: _Busy) -> None:
        """Find a die with an erased stripe, from the one whose turn it is; collect garbage where that is needed."""
        g = self.geometry
        for turn in range(g.dies):
            die = (self._die + turn) % g.dies
            if self._has_room(die, busy):
                self._die = die
                self._stripe = self._open_block[die] * g.stripes_per_block + self._next_stripe[die]
                self._fill = 0
                return
        raise AssertionError("the spare blocks always leave a stripe somewhere")

    def _has_room(self, die: int, busy: _Busy) -> bool:
        g = self.geometry
        if self._open_block[die] >= 0 and self._next_stripe[die] < g.stripes_per_block:
            return True
        self._close(die)
        if not self._free[die] and not self._collect(die, busy):
            return False
        if self._open_block[die] < 0:
            self._open_block[die] = self._free[die].pop()
            self._next_stripe[die] = 0
        return True

    def _close(self, die: int) -> None:
        if self._open_block[die] >= 0:
            self._closed[self._open_block[die]] = True
            self._open_block[die] = -1

    def _collect(self, die: int, busy: _Busy) -> bool:
        """Erase the closed block with the fewest valid units and write those again; False if that frees nothing."""
        g = self.geometry
        blocks = slice(die * g.blocks_per_die, (die + 1) * g.blocks_per_die)
        full = g.slots * g.stripes_per_block
        candidates = np.where(self._closed[blocks], self._valid[blocks], full + 1)
        victim = int(candidates.argmin()) + blocks.start
        stripes = -(-int(self._valid[victim]) // g.slots)
        if stripes >= g.stripes_per_block or not self._closed[victim]:
            return False
        slots = np.arange(victim * full, (victim + 1) * full)
        held = slots[self._owner[slots] > 0]
        units, tags = self._owner[held].astype(np.int64) - 1, self._tag[held].copy()
        pages = len(np.unique(held // (g.page_nbytes // g.unit_nbytes)))
        self._owner[slots] = 0
        new = slots[: len(held)]
        self._owner[new] = units + 1
        self._tag[new] = tags
        self._map[units] = new + 1
        self._closed[victim] = False
        self._open_block[die] = victim
        self._next_stripe[die] = stripes
        self.erased_blocks += 1
        self.collected_units += len(held)
        busy.die_ns[die] += pages * g.read_ns + stripes * g.program_ns + g.erase_ns
        busy.bus_units[die // g.dies_per_channel] += 2 * len(held)
        return True

    def _program(self, busy: _Busy) -> None:
        g = self.geometry
        busy.die_ns[self._die] += g.program_ns
        self._next_stripe[self._die] += 1
        self._die = (self._die + 1) % g.dies
        self._stripe = -1
        self._fill = 0

    def _work(self, busy: _Busy, moved_units: int, fault: str) -> MediaWork:
        g = self.geometry
        bus_ns = busy.bus_units * self._unit_ns
        die, bus = int(busy.die_ns.max()), int(bus_ns.max())
        alone = max(die + (self._unit_ns if die and bus else 0), bus + (g.read_ns if busy.sensed else 0))
        share = max(parallel(int(busy.die_ns.sum()), g.dies, alone), parallel(int(bus_ns.sum()), g.channels, alone))
        return MediaWork(alone, share, moved_units * g.unit_nbytes, fault)


def _lazy_zeros(n: int) -> NDArray[Any]:
    """int64 zeros (n,) that take memory only where they are touched: the tables of a 4 TB drive span tens of GB."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, max(n, 1) * 8, flags=flags), dtype=np.int64)[:n]
