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
  small commands meet on one die is modelled by timed drives only.

A geometry may ask for more: a write buffer, a cache of blocks with one bit per cell, reads that suspend programs, wear
and bad blocks, reads that need retries. flash_geometry.py says what each of them does.

A *timed* drive (one with any of the first three) is told the time by `advance` before each command, and keeps what
every die and channel still has to do. Its answer contains the waiting: `alone_ns` is the time from now to the end of
the command, whatever else is under way, and the share is the smallest there is, so that nobody counts it twice. A
command that was told its end keeps it, also when reads that come later push its programs back. Whoever never tells the
time asks when the command before has ended.

Every slot carries the unit it holds and a tag (the sequence number of the write), as the spare area of a real page
does; the back door reads them. Capacity in units is fixed; physical space is `spare_percent` larger, plus two blocks
per die, the reserve and the cache.

What happens to each unit is compiled (flash_units.py) and works on the tables that are made here (flash_state.py).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from tierloop.firmware_models.flash_geometry import FlashGeometry
from tierloop.firmware_models.flash_health import CAUSES, KINDS, FlashHealth, Operation
from tierloop.firmware_models.flash_state import (
    BAD_BLOCKS,
    COLLECTED_UNITS,
    DRAW,
    ERASED_BLOCKS,
    ERASES,
    FILL,
    FOLDED_UNITS,
    HOST_UNITS,
    LAST,
    LEVELLED_UNITS,
    LOG_WIDTH,
    LOGGED,
    NOW,
    PADDED_UNITS,
    PROGRAMMED_UNITS,
    READ_ONLY,
    READ_UNITS,
    RETRIES,
    SENSED_PAGES,
    STRIPE,
    SUSPENDS,
    UNTIL,
    WRITES,
    Int64,
    blank_state,
)
from tierloop.firmware_models.media import NOTHING, MediaWork, Ranges, parallel

__all__ = ["FlashGeometry", "FlashHealth", "FlashModel", "Operation", "Slot"]

_AGE_UNITS = 1 << 20
_HUGE_NBYTES = 256 << 20
_UNLIMITED = 1 << 50
"""Bytes/s that nothing here limits."""


class Slot(NamedTuple):
    """Where a unit lies: `slot` is its physical number, `tag` the sequence number of the write that put it there."""

    slot: int
    die: int
    block: int
    tag: int


class FlashModel:
    """The controller and its media. `host_units`, `collected_units` and `erased_blocks` only grow.

    The latest `remembered` operations of the dies are kept for `history`.
    """

    def __init__(self, geometry: FlashGeometry, remembered: int = 0) -> None:
        from tierloop.firmware_models import flash_units  # compiles on import: now, and not while a command runs

        if remembered < 0:
            raise ValueError(f"remembered = {remembered} operations; allowed: 0 or more")
        self.geometry = geometry
        self.timed = geometry.timed
        self._units = flash_units
        self._unit_ns = geometry.unit_ns
        self._remembered = remembered
        self._faults: dict[int, int] = {}
        self._faulty: Int64 = np.empty(0, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Erase everything: no unit is mapped, every block is free and new, counters and the time are 0."""
        g = self.geometry
        slots = g.dies * g.blocks_per_die * g.stripes_per_block * g.slots
        state = blank_state(g, self._remembered)
        self._state = (state, _lazy_zeros(g.units), _lazy_zeros(slots), _lazy_zeros(slots))
        tables = self._tables = self._units.tables_of(*self._state)
        tables.counters[STRIPE] = -1
        tables.counters[DRAW] = g.seed
        blocks = np.arange(g.dies * g.blocks_per_die).reshape(g.dies, -1)
        tables.free.reshape(g.dies, -1)[:, : g.main_blocks] = blocks[:, : g.main_blocks][:, ::-1]
        tables.free_count[:] = g.main_blocks
        tables.open_block[:] = -1
        tables.reserve[:] = g.reserve_blocks
        self._map, self._owner, self._tag, self._valid = tables[:4]
        self._counters = tables.counters
        self._is_told = False
        self._faults.clear()
        self._sort_faults()

    @property
    def unit_nbytes(self) -> int:
        """The grid that ranges lie on."""
        return self.geometry.unit_nbytes

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
        """Units programmed, padding included, per unit that the host wrote; 1 before the first write."""
        return self.health.write_amplification

    @property
    def read_only(self) -> bool:
        """Whether the reserve is used up: writes fail from then on."""
        return bool(self._counters[READ_ONLY])

    @property
    def percentage_used(self) -> int:
        """Erasures of the main area in percent of the rated cycles, at most 255; 0 where those are not known."""
        g = self.geometry
        if not g.rated_cycles:
            return 0
        main = self._tables.erases.reshape(g.dies, -1)[:, : g.main_blocks]
        return min(int(main.sum()) * 100 // (main.size * g.rated_cycles), 255)

    @property
    def spare_percent(self) -> int:
        """What is left of the reserve, 100 where there never was one."""
        reserve = self.geometry.dies * self.geometry.reserve_blocks
        return int(self._tables.reserve.sum()) * 100 // reserve if reserve else 100

    @property
    def health(self) -> FlashHealth:
        """What the drive reports about itself."""
        g, count = self.geometry, self._counters.tolist()
        unit = g.unit_nbytes
        return FlashHealth(
            host_written=count[HOST_UNITS] * unit,
            host_read=count[READ_UNITS] * unit,
            programmed=count[PROGRAMMED_UNITS] * unit,
            sensed=count[SENSED_PAGES] * g.page_nbytes,
            collected=count[COLLECTED_UNITS] * unit,
            folded=count[FOLDED_UNITS] * unit,
            levelled=count[LEVELLED_UNITS] * unit,
            padded=count[PADDED_UNITS] * unit,
            buffered=count[FILL] * unit,
            erases=count[ERASES],
            bad_blocks=count[BAD_BLOCKS],
            suspends=count[SUSPENDS],
            retries=count[RETRIES],
            spare_percent=self.spare_percent,
            percentage_used=self.percentage_used,
            read_only=self.read_only,
        )

    # -- the bus face ---------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> None:
        """It is `now_ns`: the next command comes then. An earlier time than the last one changes nothing."""
        self._is_told = True
        self._units.pass_time(*self._state, now_ns)

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Read, then write. Ranges lie on the grid of units. Raises ValueError for one outside the capacity.

        A write to a drive that has become read-only does nothing and has a fault.
        """
        return self._serve(reads, writes, planned=False)

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """What the access costs if no garbage has to be collected. Raises ValueError as `access` does."""
        if not self.timed:
            return self._serve(reads, writes, planned=True)
        tables = self._tables
        parts = tables.counters, tables.queue, tables.buffer, tables.bus_free
        kept = [part.copy() for part in parts]
        try:
            return self._serve(reads, writes, planned=True)
        finally:
            for part, old in zip(parts, kept, strict=True):
                part[:] = old

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
        """The slower of all dies and all channels at work; a write buffer takes in what fits as fast as it comes."""
        g = self.geometry
        if write and g.buffer_nbytes:
            return _UNLIMITED
        program_ns = g.slc_program_ns if g.slc_percent else g.program_ns
        read_ns = min(g.read_ns, g.slc_read_ns) if g.slc_percent else g.read_ns
        die = g.page_nbytes * g.planes * 10**9 // program_ns if write else g.page_nbytes * 10**9 // read_ns
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

    def wear(self, cycles: int) -> None:
        """Count so many more erasures of every block of the main area and its reserve, as years of use do."""
        if cycles < 0:
            raise ValueError(f"{cycles} cycles; a block does not get younger")
        g = self.geometry
        self._tables.erases.reshape(g.dies, -1)[:, : g.main_blocks + g.reserve_blocks] += cycles

    @property
    def erases(self) -> list[int]:
        """How often each block was erased."""
        return [int(n) for n in self._tables.erases]

    @property
    def operations(self) -> int:
        """How many entries the history has had so far, where operations are remembered."""
        return int(self._counters[LOGGED])

    def history(self, latest: int | None = None) -> tuple[Operation, ...]:
        """The latest operations of the dies, the oldest first: so many, or all that are remembered."""
        rows = self._tables.log.reshape(-1, LOG_WIDTH)
        end = self.operations
        count = min(len(rows), end) if latest is None else min(latest, len(rows), end)
        found = (rows[i % len(rows)].tolist() for i in range(end - count, end))
        return tuple(Operation(KINDS[kind], CAUSES[cause], *rest) for kind, cause, *rest in found)

    def inject(self, unit: int, times: int = 1) -> None:
        """Let the next `times` reads that touch this unit fail."""
        self._faults[unit] = times
        self._sort_faults()

    # -- the controller -------------------------------------------------------------------------------------------

    def _serve(self, reads: Ranges, writes: Ranges, planned: bool) -> MediaWork:
        g, counters = self.geometry, self._counters
        reads, writes = np.ascontiguousarray(reads, np.int64), np.ascontiguousarray(writes, np.int64)
        refused = ""
        if len(writes) and counters[READ_ONLY]:
            writes, refused = NOTHING, "read-only: the last spare block is used up"
        if self.timed and not self._is_told:
            counters[NOW] = counters[LAST]
        drawn = counters[DRAW], counters[RETRIES]
        asked = self._units.access(*self._state, reads, writes, planned)
        die_most, die_all, bus_most, bus_all, sensed, moved = asked
        if die_most < 0:
            start, nbytes = (writes if die_all else reads)[bus_most].tolist()
            raise ValueError(f"[{start}, {start + nbytes}) is outside a drive of {g.capacity} bytes")
        if planned:
            counters[DRAW], counters[RETRIES] = drawn
        fault = self._fault(reads) if self._faults and not planned else ""
        fault = fault or refused
        if self.timed:
            return MediaWork(int(counters[UNTIL] - counters[NOW]), 1, moved * g.unit_nbytes, fault)
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
