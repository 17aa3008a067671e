"""What each unit of a flash command does to the tables of flash.py, compiled: 5 to 50 ns a unit.

Imported by whoever makes a drive, since importing compiles. Every function takes the controller's state as arrays,
reads no clock and depends on nothing else.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierloop.devices.kernels.compiled import INT64, TABLE, inline, kernel
from tierloop.devices.kernels.lanes import prefetch
from tierloop.firmware_models.flash import (
    COLLECTED_UNITS,
    DIE,
    ERASED_BLOCKS,
    FILL,
    HOST_UNITS,
    STRIPE,
    WRITES,
    Int64,
    Layout,
    Tables,
)
from tierloop.firmware_models.media import Ranges

_INTS = types.Array(INT64, 1, "C")
_tuple_of: Any = types.UniTuple
_named: Any = types.NamedUniTuple
_LAYOUT = _named(INT64, len(Layout._fields), Layout)
_TABLES = _named(_INTS, len(Tables._fields), Tables)
_ASKED = _tuple_of(INT64, 6)
Asked = tuple[int, int, int, int, int, int]
"""ns of the busiest die and of all dies, units over the busiest bus and over all, whether a page was sensed, units."""


_AHEAD = 12
"""Places of the tables are asked for that many units before they are used: random accesses are up to twice as fast."""


@inline(types.void, INT64)
def _ask(builder: Any, address: Any) -> None:
    """Ask for the line at an address."""
    prefetch(builder, address)


@kernel(_LAYOUT, _INTS)
def layout_of(state: Int64) -> Layout:
    """The numbers that the state begins with."""
    s = state
    return Layout(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11])


@kernel(_TABLES, _INTS, _INTS, _INTS, _INTS)
def tables_of(state: Int64, slots: Int64, owner: Int64, tag: Int64) -> Tables:
    """The parts of the state by name. It comes as one array because each costs 0.2 µs at every call, a tuple more."""
    layout = layout_of(state)
    dies, blocks = layout.dies, layout.dies * layout.blocks_per_die
    counters = state[12 : 12 + 7]
    rest = state[19:]
    valid, closed, free = rest[:blocks], rest[blocks : 2 * blocks], rest[2 * blocks : 3 * blocks]
    rest = rest[3 * blocks :]
    free_count, open_block, next_stripe = rest[:dies], rest[dies : 2 * dies], rest[2 * dies : 3 * dies]
    die_ns, bus_units = rest[3 * dies : 4 * dies], rest[4 * dies :]
    return Tables(
        slots, owner, tag, valid, closed, free, free_count, open_block, next_stripe, counters, die_ns, bus_units
    )


@kernel(INT64, _LAYOUT, TABLE)
def _first_outside(layout: Layout, ranges: Ranges) -> int:
    """The first range that is negative or ends behind the last unit; -1 if all are inside."""
    most = layout.units * layout.unit_nbytes
    for i in range(ranges.shape[0]):
        start, nbytes = ranges[i, 0], ranges[i, 1]
        if start < 0 or nbytes < 0 or start > most or nbytes > most - start:
            return i
    return -1


@kernel(types.void, _INTS, _INTS, _INTS, _INTS, INT64, INT64)
def trim(state: Int64, slots: Int64, owner: Int64, tag: Int64, first: int, last: int) -> None:
    """Forget the units [first, last)."""
    layout, tables = layout_of(state), tables_of(state, slots, owner, tag)
    valid = tables.valid
    per_block = layout.slots * layout.stripes_per_block
    for unit in range(first, last):
        slot = slots[unit] - 1
        if slot >= 0:
            owner[slot] = 0
            valid[slot // per_block] -= 1
            slots[unit] = 0


@kernel(INT64, _LAYOUT, _TABLES, TABLE)
def _count_reads(layout: Layout, tables: Tables, ranges: Ranges) -> int:
    """Add what reading takes to `die_ns` and `bus_units`; returns how many units are read, negative if one is sensed.

    Pages are sensed once as long as units that follow each other lie in them.
    """
    slots, die_ns, bus_units = tables.map, tables.die_ns, tables.bus_units
    units = 0
    sensed = False
    last_page = die = channel = -1
    buffered = tables.counters[STRIPE]
    place = slots.ctypes.data
    for i in range(ranges.shape[0]):
        if i + _AHEAD < ranges.shape[0]:
            _ask(place + ranges[i + _AHEAD, 0] // layout.unit_nbytes * 8)
        first = ranges[i, 0] // layout.unit_nbytes
        count = ranges[i, 1] // layout.unit_nbytes
        units += count
        for unit in range(first, first + count):
            slot = slots[unit] - 1
            if slot < 0:
                stripe = unit // layout.slots
                turn = stripe // layout.dies
                block = (stripe - turn * layout.dies) * layout.blocks_per_die
                stripe = block * layout.stripes_per_block + turn % layout.stripes_per_block
                slot = stripe * layout.slots + unit % layout.slots
            page = slot // layout.page_units
            if page != last_page:
                last_page = page
                stripe = slot // layout.slots
                die = stripe // (layout.stripes_per_block * layout.blocks_per_die)
                channel = die // layout.dies_per_channel
                if stripe != buffered:
                    die_ns[die] += layout.read_ns
                    sensed = True
            bus_units[channel] += 1
    return -units if sensed else units


@kernel(types.boolean, _LAYOUT, _TABLES, INT64)
def _collect(layout: Layout, tables: Tables, die: int) -> bool:
    """Erase the closed block with the fewest valid units and write those again; False if that frees nothing."""
    slots, owners, tags, valid, closed = tables.map, tables.owner, tables.tag, tables.valid, tables.closed
    full = layout.slots * layout.stripes_per_block
    victim, fewest = -1, full + 1
    for block in range(die * layout.blocks_per_die, (die + 1) * layout.blocks_per_die):
        if closed[block] and valid[block] < fewest:
            victim, fewest = block, valid[block]
    if victim < 0:
        return False
    stripes = (fewest + layout.slots - 1) // layout.slots
    if stripes >= layout.stripes_per_block:
        return False
    target = victim * full
    pages = 0
    last_page = -1
    place = slots.ctypes.data
    for slot in range(victim * full, (victim + 1) * full):
        if slot + _AHEAD < (victim + 1) * full and owners[slot + _AHEAD] > 0:
            _ask(place + (owners[slot + _AHEAD] - 1) * 8)
        owner = owners[slot]
        if owner > 0:
            page = slot // layout.page_units
            pages += page != last_page
            last_page = page
            owners[slot] = 0
            owners[target] = owner
            tags[target] = tags[slot]
            slots[owner - 1] = target + 1
            target += 1
    closed[victim] = 0
    tables.open_block[die] = victim
    tables.next_stripe[die] = stripes
    tables.counters[ERASED_BLOCKS] += 1
    tables.counters[COLLECTED_UNITS] += fewest
    tables.die_ns[die] += pages * layout.read_ns + stripes * layout.program_ns + layout.erase_ns
    tables.bus_units[die // layout.dies_per_channel] += 2 * fewest
    return True


@kernel(types.boolean, _LAYOUT, _TABLES, INT64)
def _has_room(layout: Layout, tables: Tables, die: int) -> bool:
    """Whether a die has an erased stripe; collects garbage where that is needed."""
    if tables.open_block[die] >= 0:
        if tables.next_stripe[die] < layout.stripes_per_block:
            return True
        tables.closed[tables.open_block[die]] = 1
        tables.open_block[die] = -1
    if tables.free_count[die] == 0:
        return bool(_collect(layout, tables, die))
    tables.free_count[die] -= 1
    tables.open_block[die] = tables.free[die * layout.blocks_per_die + tables.free_count[die]]
    tables.next_stripe[die] = 0
    return True


@kernel(types.void, _LAYOUT, _TABLES)
def _open_stripe(layout: Layout, tables: Tables) -> None:
    """Find a die with an erased stripe, from the one whose turn it is."""
    counters = tables.counters
    for turn in range(layout.dies):
        die = (counters[DIE] + turn) % layout.dies
        if _has_room(layout, tables, die):
            counters[DIE] = die
            counters[STRIPE] = tables.open_block[die] * layout.stripes_per_block + tables.next_stripe[die]
            counters[FILL] = 0
            return
    raise AssertionError("the spare blocks always leave a stripe somewhere")


@kernel(INT64, _LAYOUT, _TABLES, TABLE)
def _write(layout: Layout, tables: Tables, ranges: Ranges) -> int:
    """Write units in the order of the ranges; returns how many."""
    slots, owner, tag, valid, counters = tables.map, tables.owner, tables.tag, tables.valid, tables.counters
    per_block = layout.slots * layout.stripes_per_block
    written = 0
    place, spare = slots.ctypes.data, owner.ctypes.data
    for i in range(ranges.shape[0]):
        if i + 2 * _AHEAD < ranges.shape[0]:
            _ask(place + ranges[i + 2 * _AHEAD, 0] // layout.unit_nbytes * 8)
            _ask(spare + slots[ranges[i + _AHEAD, 0] // layout.unit_nbytes] * 8)
        unit = ranges[i, 0] // layout.unit_nbytes
        last = unit + ranges[i, 1] // layout.unit_nbytes
        written += last - unit
        while unit < last:
            if counters[STRIPE] < 0:
                _open_stripe(layout, tables)
            die, stripe, fill, writes = counters[DIE], counters[STRIPE], counters[FILL], counters[WRITES]
            take = min(layout.slots - fill, last - unit)
            slot = stripe * layout.slots + fill
            for _ in range(take):
                old = slots[unit] - 1
                if old >= 0:
                    owner[old] = 0
                    valid[old // per_block] -= 1
                writes += 1
                slots[unit] = slot + 1
                owner[slot] = unit + 1
                tag[slot] = writes
                unit += 1
                slot += 1
            valid[stripe // layout.stripes_per_block] += take
            tables.bus_units[die // layout.dies_per_channel] += take
            counters[WRITES] = writes
            counters[FILL] = fill + take
            if fill + take == layout.slots:
                tables.die_ns[die] += layout.program_ns
                tables.next_stripe[die] += 1
                counters[DIE] = (die + 1) % layout.dies
                counters[STRIPE] = -1
                counters[FILL] = 0
    counters[HOST_UNITS] += written
    return written


@kernel(INT64, _LAYOUT, _TABLES, TABLE)
def _count_writes(layout: Layout, tables: Tables, ranges: Ranges) -> int:
    """What `_write` would take if no garbage had to be collected; returns how many units."""
    written = 0
    for i in range(ranges.shape[0]):
        written += ranges[i, 1] // layout.unit_nbytes
    die, fill, left = tables.counters[DIE], tables.counters[FILL], written
    while left > 0:
        take = min(layout.slots - fill, left)
        tables.bus_units[die // layout.dies_per_channel] += take
        left -= take
        fill += take
        if fill == layout.slots:
            tables.die_ns[die] += layout.program_ns
            die = (die + 1) % layout.dies
            fill = 0
    return written


@kernel(_ASKED, _TABLES, INT64, INT64)
def _asked(tables: Tables, read: int, more: int) -> Asked:
    """What dies and buses were asked for; `read` as `_count_reads` returns it, `more` the other units moved."""
    die_most = die_all = bus_most = bus_all = 0
    for busy_ns in tables.die_ns:
        die_most = max(die_most, busy_ns)
        die_all += busy_ns
    for units in tables.bus_units:
        bus_most = max(bus_most, units)
        bus_all += units
    return die_most, die_all, bus_most, bus_all, int(read < 0), abs(read) + more


@kernel(_ASKED, _INTS, _INTS, _INTS, _INTS, TABLE, TABLE, types.boolean)
def access(state: Int64, slots: Int64, owner: Int64, tag: Int64, reads: Ranges, writes: Ranges, planned: bool) -> Asked:
    """Read, then write; where it is only `planned`, nothing changes but what the command asks for.

    A range outside the drive gives (-1, 0 for reads or 1 for writes, which, 0, 0, 0), and nothing was done.
    """
    layout, tables = layout_of(state), tables_of(state, slots, owner, tag)
    wrong = _first_outside(layout, reads)
    if wrong >= 0:
        return -1, 0, wrong, 0, 0, 0
    wrong = _first_outside(layout, writes)
    if wrong >= 0:
        return -1, 1, wrong, 0, 0, 0
    tables.die_ns[:] = 0
    tables.bus_units[:] = 0
    read = _count_reads(layout, tables, reads)
    collected = tables.counters[COLLECTED_UNITS]
    written = _count_writes(layout, tables, writes) if planned else _write(layout, tables, writes)
    return _asked(tables, read, written + 2 * (tables.counters[COLLECTED_UNITS] - collected))
