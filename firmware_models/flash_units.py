"""What each unit of a flash command does to the tables of flash_state.py, compiled: 5 to 50 ns a unit.

Imported by whoever makes a drive, since importing compiles. Every function takes the controller's state as arrays,
reads no clock and depends on nothing else. What a die does for it goes through flash_dies.py.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierloop.devices.kernels.compiled import INT64, TABLE
from tierloop.firmware_models.flash_compiled import AHEAD, ask, kernel
from tierloop.firmware_models.flash_dies import (
    INTS,
    LAYOUT,
    TABLES,
    append,
    extra_rounds,
    is_buffered,
    note,
    operate,
    operation_ns,
    sense,
    settle,
)
from tierloop.firmware_models.flash_room import fold, with_room
from tierloop.firmware_models.flash_state import (
    AT,
    BUSY_UNTIL,
    COLLECTED_UNITS,
    COUNTERS,
    DIE,
    DIE_WIDTH,
    FILL,
    FOLDED_UNITS,
    HOST,
    HOST_UNITS,
    LAST,
    LEVELLED_UNITS,
    LOG_WIDTH,
    NOW,
    PROGRAM,
    PROGRAMMED_UNITS,
    READ,
    READ_ONLY,
    READ_UNITS,
    READS_UNTIL,
    ROOM,
    SENSED_PAGES,
    STRIPE,
    STRIPES,
    UNTIL,
    WRITES,
    Int64,
    Layout,
    Tables,
)
from tierloop.firmware_models.media import Ranges

_tuple_of: Any = types.UniTuple
_ASKED = _tuple_of(INT64, 6)
Asked = tuple[int, int, int, int, int, int]
"""ns of the busiest die and of all dies, units over the busiest bus and over all, whether a page was sensed, units."""


@kernel(LAYOUT, INTS)
def layout_of(state: Int64) -> Layout:
    """The numbers that the state begins with."""
    s = state
    return Layout(
        s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14], s[15], s[16],
        s[17], s[18], s[19], s[20], s[21], s[22], s[23], s[24], s[25], s[26], s[27], s[28], s[29], s[30], s[31],
    )  # fmt: skip


_LAYOUT_NUMBERS = len(Layout._fields)


@kernel(TABLES, INTS, INTS, INTS, INTS)
def tables_of(state: Int64, slots: Int64, owner: Int64, tag: Int64) -> Tables:
    """The parts of the state by name. It comes as one array because each costs 0.2 µs at every call, a tuple more."""
    layout = layout_of(state)
    dies, blocks = layout.dies, layout.dies * layout.blocks_per_die
    counters = state[_LAYOUT_NUMBERS : _LAYOUT_NUMBERS + COUNTERS]
    rest = state[_LAYOUT_NUMBERS + COUNTERS :]
    valid, closed, erases, since = (
        rest[:blocks],
        rest[blocks : 2 * blocks],
        rest[2 * blocks : 3 * blocks],
        rest[3 * blocks : 4 * blocks],
    )
    free = rest[4 * blocks : 5 * blocks]
    rest = rest[5 * blocks :]
    free_count, open_block, next_stripe = rest[:dies], rest[dies : 2 * dies], rest[2 * dies : 3 * dies]
    reserve, cache = rest[3 * dies : 4 * dies], rest[4 * dies : 7 * dies]
    die_ns = rest[7 * dies : 8 * dies]
    rest = rest[8 * dies :]
    bus_units = rest[: layout.channels]
    rest = rest[layout.channels :]
    queued, places, channels = dies * DIE_WIDTH, 3 * layout.buffer_stripes, layout.channels
    if not layout.timed:
        queued = places = channels = 0
    queue, buffer = rest[:queued], rest[queued : queued + places]
    rest = rest[queued + places :]
    bus_free, log = rest[:channels], rest[channels : channels + layout.remembered * LOG_WIDTH]
    return Tables(
        slots, owner, tag, valid, closed, erases, since, free, free_count, open_block, next_stripe, reserve, cache,
        counters, die_ns, bus_units, queue, buffer, bus_free, log,
    )  # fmt: skip


@kernel(types.boolean, LAYOUT)
def _is_plain(layout: Layout) -> bool:
    """Whether the host's operations only add up: nobody asks when, on what, or how often."""
    return not layout.timed and layout.retry_ppm == 0 and layout.remembered == 0


@kernel(INT64, LAYOUT, TABLE)
def _first_outside(layout: Layout, ranges: Ranges) -> int:
    """The first range that is negative or ends behind the last unit; -1 if all are inside."""
    most = layout.units * layout.unit_nbytes
    for i in range(ranges.shape[0]):
        start, nbytes = ranges[i, 0], ranges[i, 1]
        if start < 0 or nbytes < 0 or start > most or nbytes > most - start:
            return i
    return -1


@kernel(types.void, INTS, INTS, INTS, INTS, INT64, INT64)
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


@kernel(INT64, LAYOUT, TABLES, INT64, INT64, types.boolean)
def _sense_page(layout: Layout, tables: Tables, die: int, page: int, planned: bool) -> int:
    """Read a page for the host; returns 1, or 0 if it still lies in the write buffer."""
    per_stripe = layout.slots // layout.page_units
    stripe = page // per_stripe
    if layout.timed and is_buffered(tables, stripe):
        return 0
    block = stripe // layout.stripes_per_block
    ns = operation_ns(layout, READ, block)
    if layout.retry_ppm > 0:
        ns *= 1 + extra_rounds(layout, tables, block)
    tables.die_ns[die] += ns
    if layout.timed:
        end = sense(layout, tables, die, block, ns)
        tables.counters[UNTIL] = max(tables.counters[UNTIL], end + layout.unit_ns)
    if not planned:
        note(tables, READ, HOST, die, block, page - block * layout.stripes_per_block * per_stripe, 1, 0)
    return 1


@kernel(INT64, LAYOUT, TABLES, TABLE, types.boolean)
def _count_reads(layout: Layout, tables: Tables, ranges: Ranges, planned: bool) -> int:
    """Add what reading takes to `die_ns` and `bus_units`; returns how many units are read, negative if one is sensed.

    Pages are sensed once as long as units that follow each other lie in them.
    """
    slots, die_ns, bus_units, counters = tables.map, tables.die_ns, tables.bus_units, tables.counters
    units = pages = 0
    last_page = die = channel = -1
    open_stripe = counters[STRIPE]
    plain = _is_plain(layout)
    place = slots.ctypes.data
    for i in range(ranges.shape[0]):
        if i + AHEAD < ranges.shape[0]:
            ask(place + ranges[i + AHEAD, 0] // layout.unit_nbytes * 8)
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
                if stripe != open_stripe:
                    if plain:
                        die_ns[die] += layout.read_ns
                        pages += 1
                    else:
                        pages += _sense_page(layout, tables, die, page, planned)
            bus_units[channel] += 1
    if not planned:
        counters[READ_UNITS] += units
        counters[SENSED_PAGES] += pages
    return -units if pages else units


@kernel(types.void, INTS, INTS, INTS, INTS, INT64)
def pass_time(state: Int64, slots: Int64, owner: Int64, tag: Int64, now: int) -> None:
    """It is `now`; a drive that was idle for long enough has begun to fold what it had time for."""
    layout, tables = layout_of(state), tables_of(state, slots, owner, tag)
    counters, q = tables.counters, tables.queue
    counters[NOW] = max(counters[NOW], now)
    if layout.slc_blocks == 0 or counters[READ_ONLY]:
        return
    tables.bus_units[:] = 0
    from_ns = counters[LAST] + layout.idle_ns
    more = from_ns < now
    while more:
        more = False
        for die in range(layout.dies):
            row = die * DIE_WIDTH
            begin = max(from_ns, q[row + BUSY_UNTIL], q[row + READS_UNTIL])
            if tables.cache[3 * die + 1] > 0 and begin < now and not counters[READ_ONLY]:
                counters[AT] = begin
                fold(layout, tables, die)
                more = True


@kernel(types.void, LAYOUT, TABLES)
def _enter(layout: Layout, tables: Tables) -> None:
    """When the write buffer has room for the next stripe: operations for it may begin then."""
    counters = tables.counters
    if layout.buffer_stripes and counters[STRIPES] >= layout.buffer_stripes:
        counters[ROOM] = max(counters[ROOM], tables.buffer[3 * (counters[STRIPES] % layout.buffer_stripes)])
    counters[AT] = max(counters[NOW], counters[ROOM])


@kernel(types.void, LAYOUT, TABLES, INT64, INT64, INT64)
def _leave(layout: Layout, tables: Tables, die: int, stripe: int, end: int) -> None:
    """The buffer's place of a full stripe is free when it has been programmed."""
    counters, buffer = tables.counters, tables.buffer
    if layout.buffer_stripes:
        place = 3 * (counters[STRIPES] % layout.buffer_stripes)
        buffer[place], buffer[place + 1], buffer[place + 2] = end, die, stripe + 1
    counters[STRIPES] += 1


@kernel(types.void, LAYOUT, TABLES)
def _open_stripe(layout: Layout, tables: Tables) -> None:
    """Find a die with an erased stripe, from the one whose turn it is; in its cache if it has one."""
    counters = tables.counters
    _enter(layout, tables)
    counters[FILL] = 0
    die = counters[DIE]
    if layout.slc_blocks:
        if tables.cache[3 * die + 1] == layout.slc_blocks:
            fold(layout, tables, die)
        number = (tables.cache[3 * die] + tables.cache[3 * die + 1]) % layout.slc_blocks
        block = die * layout.blocks_per_die + layout.main_blocks + layout.reserve_blocks + number
        counters[STRIPE] = block * layout.stripes_per_block + tables.cache[3 * die + 2]
        return
    die = with_room(layout, tables, die)
    counters[DIE] = die
    counters[STRIPE] = tables.open_block[die] * layout.stripes_per_block + tables.next_stripe[die]


@kernel(types.void, LAYOUT, TABLES)
def _program_stripe(layout: Layout, tables: Tables) -> None:
    """The open stripe is full: program it."""
    counters, cache = tables.counters, tables.cache
    die, stripe = counters[DIE], counters[STRIPE]
    block = stripe // layout.stripes_per_block
    number = stripe - block * layout.stripes_per_block
    end = operate(layout, tables, PROGRAM, HOST, die, block, number, 1, layout.slots)
    _leave(layout, tables, die, stripe, end)
    if layout.slc_blocks:
        cache[3 * die + 2] += 1
        if cache[3 * die + 2] == layout.slc_stripes:
            cache[3 * die + 2] = 0
            cache[3 * die + 1] += 1
    else:
        tables.next_stripe[die] += 1


@kernel(INT64, LAYOUT, TABLES, TABLE)
def _write(layout: Layout, tables: Tables, ranges: Ranges) -> int:
    """Write units in the order of the ranges; returns how many.

    A plain drive finds and programs most stripes right here: handing the tables to another kernel takes 0.2 µs, and
    going through all of them for every stripe made writes three times slower.
    """
    slots, owner, tag, valid, counters = tables.map, tables.owner, tables.tag, tables.valid, tables.counters
    per_block = layout.slots * layout.stripes_per_block
    plain = _is_plain(layout)
    written = 0
    place, spare = slots.ctypes.data, owner.ctypes.data
    for i in range(ranges.shape[0]):
        if i + 2 * AHEAD < ranges.shape[0]:
            ask(place + ranges[i + 2 * AHEAD, 0] // layout.unit_nbytes * 8)
            ask(spare + slots[ranges[i + AHEAD, 0] // layout.unit_nbytes] * 8)
        unit = ranges[i, 0] // layout.unit_nbytes
        last = unit + ranges[i, 1] // layout.unit_nbytes
        written += last - unit
        while unit < last:
            if counters[STRIPE] < 0:
                die = counters[DIE]
                if plain and tables.open_block[die] >= 0 and tables.next_stripe[die] < layout.stripes_per_block:
                    counters[STRIPE] = tables.open_block[die] * layout.stripes_per_block + tables.next_stripe[die]
                else:
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
            counters[UNTIL] = max(counters[UNTIL], counters[AT])
            if fill + take == layout.slots:
                if plain:
                    tables.die_ns[die] += layout.program_ns
                    tables.next_stripe[die] += 1
                    counters[PROGRAMMED_UNITS] += layout.slots
                else:
                    _program_stripe(layout, tables)
                counters[DIE] = (die + 1) % layout.dies
                counters[STRIPE] = -1
                counters[FILL] = 0
    counters[HOST_UNITS] += written
    return written


@kernel(INT64, LAYOUT, TABLES, TABLE)
def _count_writes(layout: Layout, tables: Tables, ranges: Ranges) -> int:
    """What `_write` would take if no garbage had to be collected; returns how many units.

    Of the tables it changes only what belongs to the time of a timed drive.
    """
    counters = tables.counters
    written = 0
    for i in range(ranges.shape[0]):
        written += ranges[i, 1] // layout.unit_nbytes
    die, fill, left = counters[DIE], counters[FILL], written
    cache_block = layout.blocks_per_die - 1 if layout.slc_blocks else 0
    each_ns = operation_ns(layout, PROGRAM, cache_block)
    opened = counters[STRIPE] >= 0
    while left > 0:
        if not opened:
            _enter(layout, tables)
        take = min(layout.slots - fill, left)
        tables.bus_units[die // layout.dies_per_channel] += take
        counters[UNTIL] = max(counters[UNTIL], counters[AT])
        left -= take
        fill += take
        opened = fill < layout.slots
        if not opened:
            tables.die_ns[die] += each_ns
            if layout.timed:
                end = append(tables, die, each_ns, 1, -1)
                _leave(layout, tables, die, -1, end)
                if layout.buffer_stripes == 0:
                    counters[UNTIL] = max(counters[UNTIL], end + layout.unit_ns)
            die = (die + 1) % layout.dies
            fill = 0
    return written


@kernel(_ASKED, TABLES, INT64, INT64)
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


@kernel(INT64, LAYOUT, INT64)
def _sensing_ns(layout: Layout, read: int) -> int:
    """The shortest time before a page is on its channel, if one was sensed: `read` is what `_count_reads` returned."""
    if read >= 0:
        return 0
    return min(layout.read_ns, layout.slc_read_ns) if layout.slc_blocks else layout.read_ns


@kernel(_ASKED, INTS, INTS, INTS, INTS, TABLE, TABLE, types.boolean)
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
    counters = tables.counters
    tables.die_ns[:] = 0
    tables.bus_units[:] = 0
    counters[UNTIL] = counters[NOW]
    counters[AT] = max(counters[NOW], counters[ROOM])
    read = written = 0
    if reads.shape[0]:  # handing over the tables for nothing costs 0.2 µs
        read = _count_reads(layout, tables, reads, planned)
    if layout.timed:
        settle(layout, tables, _sensing_ns(layout, read), True)
        tables.bus_units[:] = 0
    moved = counters[COLLECTED_UNITS] + counters[FOLDED_UNITS] + counters[LEVELLED_UNITS]
    if writes.shape[0]:
        written = _count_writes(layout, tables, writes) if planned else _write(layout, tables, writes)
    if layout.timed:
        settle(layout, tables, _sensing_ns(layout, read), layout.buffer_stripes == 0)
        counters[LAST] = max(counters[LAST], counters[UNTIL])
    moved = counters[COLLECTED_UNITS] + counters[FOLDED_UNITS] + counters[LEVELLED_UNITS] - moved
    return _asked(tables, read, written + 2 * moved)
