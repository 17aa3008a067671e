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

What happens to each unit is compiled (flash_units.py) and works on the tables that are made here.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.firmware_models.media import NOTHING, MediaWork, Ranges, parallel

Int64 = NDArray[np.int64]
_AGE_UNITS = 1 << 20
_HUGE_NBYTES = 256 << 20


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


class Layout(NamedTuple):
    """The geometry as the compiled part has it, at the beginning of its state: counts, times in ns, bytes."""

    units: int
    unit_nbytes: int
    page_units: int
    slots: int
    stripes_per_block: int
    blocks_per_die: int
    dies: int
    channels: int
    dies_per_channel: int
    read_ns: int
    program_ns: int
    erase_ns: int


class Tables(NamedTuple):
    """The controller's state, all int64: `map` (units,) holds the slot of each unit plus one, 0 if it has none.

    `owner` and `tag` (slots,) are the spare areas: the unit plus one, 0 for garbage, and the number of the write.
    `valid` and `closed` (blocks,) count units that are not garbage and mark blocks that are full; `free` (blocks,)
    holds a stack of erased blocks for each die, `free_count`, `open_block` and `next_stripe` (dies,) go with it.
    `counters` is indexed by the names below. `die_ns` (dies,) and `bus_units` (channels,) are what the present command
    asks for.
    """

    map: Int64
    owner: Int64
    tag: Int64
    valid: Int64
    closed: Int64
    free: Int64
    free_count: Int64
    open_block: Int64
    next_stripe: Int64
    counters: Int64
    die_ns: Int64
    bus_units: Int64


DIE, STRIPE, FILL, WRITES, HOST_UNITS, COLLECTED_UNITS, ERASED_BLOCKS = range(7)
"""`Tables.counters`: whose turn it is, the open stripe (-1: none) and its units, writes so far, and the statistics."""
_COUNTERS = 7


class FlashModel:
    """The controller and its media. `host_units`, `collected_units` and `erased_blocks` only grow."""

    def __init__(self, geometry: FlashGeometry) -> None:
        from tierloop.firmware_models import flash_units  # compiles on import: now, and not while a command runs

        g = self.geometry = geometry
        self._units = flash_units
        self._unit_ns = -(-g.unit_nbytes * 1_000_000_000 // g.channel_bytes_per_s)
        self._faults: dict[int, int] = {}
        self._faulty: Int64 = np.empty(0, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Erase everything: no unit is mapped, every block is free, counters are 0."""
        g = self.geometry
        layout = Layout(
            units=g.units,
            unit_nbytes=g.unit_nbytes,
            page_units=g.page_nbytes // g.unit_nbytes,
            slots=g.slots,
            stripes_per_block=g.stripes_per_block,
            blocks_per_die=g.blocks_per_die,
            dies=g.dies,
            channels=g.channels,
            dies_per_channel=g.dies_per_channel,
            read_ns=g.read_ns,
            program_ns=g.program_ns,
            erase_ns=g.erase_ns,
        )
        blocks = g.dies * g.blocks_per_die
        slots = blocks * g.stripes_per_block * g.slots
        state = np.zeros(len(layout) + _COUNTERS + 3 * blocks + 4 * g.dies + g.channels, dtype=np.int64)
        state[: len(layout)] = layout
        self._state = (state, _lazy_zeros(g.units), _lazy_zeros(slots), _lazy_zeros(slots))
        tables: Tables = self._units.tables_of(*self._state)
        tables.counters[STRIPE] = -1
        tables.free[:] = np.arange(blocks).reshape(g.dies, -1)[:, ::-1].reshape(-1)
        tables.free_count[:] = g.blocks_per_die
        tables.open_block[:] = -1
        self._map, self._owner, self._tag, self._valid = tables[:4]
        self._counters = tables.counters
        self._faults.clear()
        self._sort_faults()

    @property
    def host_units(self) -> int:
        """Units that the host wrote."""
        return int(self._counters[HOST_UNITS])

    @property
    def collected_units(self) -> int:
        """Units that were written again to make room."""
        return int(self._counters[COLLECTED_UNITS])

    @property
    def erased_blocks(self) -> int:
        """Blocks that were erased to make room."""
        return int(self._counters[ERASED_BLOCKS])

    @property
    def write_amplification(self) -> float:
        """Units programmed per unit that the host wrote; 1 before the first write."""
        return 1 + self.collected_units / self.host_units if self.host_units else 1.0

    # -- the bus face ---------------------------------------------------------------------------------------------

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Read, then write. Ranges lie on the grid of units. Raises ValueError for one outside the capacity."""
        return self._serve(reads, writes, planned=False)

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """What the access costs if no garbage has to be collected. Raises ValueError as `access` does."""
        return self._serve(reads, writes, planned=True)

    def trim(self, address: int, nbytes: int) -> None:
        """Forget the units that lie wholly inside; reading them gives zeros from then on."""
        if not self._counters[WRITES]:
            return
        unit = self.geometry.unit_nbytes
        first, last = -(-address // unit), (address + nbytes) // unit
        if first < 0 or last > self.geometry.units:
            raise ValueError(f"trim of [{address}, {address + nbytes}) on a drive of {self.geometry.capacity} bytes")
        self._units.trim(*self._state, first, last)

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
        order, unit = np.random.default_rng(seed), self.geometry.unit_nbytes
        for _ in range(rounds):
            units = order.permutation(self.geometry.units)
            for first in range(0, len(units), _AGE_UNITS):
                part = units[first : first + _AGE_UNITS]
                self.access(NOTHING, np.stack([part * unit, np.full(len(part), unit)], axis=1))

    def inject(self, unit: int, times: int = 1) -> None:
        """Let the next `times` reads that touch this unit fail."""
        self._faults[unit] = times
        self._sort_faults()

    # -- the controller -------------------------------------------------------------------------------------------

    def _serve(self, reads: Ranges, writes: Ranges, planned: bool) -> MediaWork:
        g = self.geometry
        reads, writes = np.ascontiguousarray(reads, np.int64), np.ascontiguousarray(writes, np.int64)
        asked = self._units.access(*self._state, reads, writes, planned)
        die_most, die_all, bus_most, bus_all, sensed, moved = asked
        if die_most < 0:
            start, nbytes = (writes if die_all else reads)[bus_most].tolist()
            raise ValueError(f"[{start}, {start + nbytes}) is outside a drive of {g.capacity} bytes")
        fault = self._fault(reads) if self._faults and not planned else ""
        bus, bus_all = bus_most * self._unit_ns, bus_all * self._unit_ns
        alone = max(die_most + (self._unit_ns if die_most and bus else 0), bus + (g.read_ns if sensed else 0))
        share = max(parallel(die_all, g.dies, alone), parallel(bus_all, g.channels, alone))
        return MediaWork(alone, share, moved * g.unit_nbytes, fault)

    def _fault(self, reads: Ranges) -> str:
        """Why a read fails: of the injected units that it touches, the one that was injected first."""
        unit = self.geometry.unit_nbytes
        first = reads[:, 0] // unit
        low = np.searchsorted(self._faulty, first)
        high = np.searchsorted(self._faulty, first + reads[:, 1] // unit)
        touched = high > low
        if not touched.any():
            return ""
        hit = {u for a, b in zip(low[touched], high[touched], strict=True) for u in self._faulty[a:b].tolist()}
        faulty = next(u for u in self._faults if u in hit)
        self._faults[faulty] -= 1
        if self._faults[faulty] <= 0:
            del self._faults[faulty]
            self._sort_faults()
        return f"unit {faulty} (byte {faulty * unit}) cannot be corrected"

    def _sort_faults(self) -> None:
        self._faulty = np.sort(np.fromiter(self._faults, dtype=np.int64, count=len(self._faults)))


def _lazy_zeros(n: int) -> Int64:
    """int64 zeros (n,) that take memory only where they are touched: the tables of a 4 TB drive span tens of GB.

    Those of a small drive lie in huge pages where there are any: with small ones most of a random access is the search
    for the page.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    table = mmap.mmap(-1, max(n, 1) * 8, flags=flags)
    if n * 8 <= _HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            table.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(table, dtype=np.int64)[:n]
