"""What the dies of a flash drive have to do, operation by operation: statistics, the log, and a queue on each die.

Compiled, on the tables of flash_state.py. A die that is not timed only adds up. A timed one has a queue of runs of
equal operations. Programs and erasures begin when everything before them on the die has ended. A read that arrives
meanwhile waits as well, or it goes first where `suspends` allows that: before an operation that has not begun, or in
the middle of one after `suspend_ns`; reads that come while it stands still follow without that. What lies behind moves
back by what went first, and so do the times at which places of the write buffer are programmed. Nobody goes before an
operation on the block that he wants to read. Where a die's queue holds more runs than it has places, the last ones
become one that cannot be told apart.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierloop.devices.kernels.compiled import INT64
from tierloop.firmware_models.flash_compiled import kernel
from tierloop.firmware_models.flash_state import (
    AT,
    BUSY_UNTIL,
    DIE_WIDTH,
    DRAW,
    ENTRIES,
    ENTRY,
    ENTRY_WIDTH,
    ERASE,
    ERASES,
    HEAD,
    HOST,
    LOG_WIDTH,
    LOGGED,
    NOW,
    OVERTAKEN,
    OVERTAKEN_END,
    PADDED_UNITS,
    PROGRAM,
    PROGRAMMED_UNITS,
    QUEUED,
    READ,
    READS_UNTIL,
    RETRIES,
    SENSED_PAGES,
    SUSPENDS,
    UNTIL,
    Layout,
    Tables,
)

INTS = types.Array(INT64, 1, "C")
_named: Any = types.NamedUniTuple
LAYOUT = _named(INT64, len(Layout._fields), Layout)
TABLES = _named(INTS, len(Tables._fields), Tables)


@kernel(INT64, INT64)
def drawn(state: int) -> int:
    """The state after this one of a generator of numbers, whose upper half is as good as random."""
    return state * 6364136223846793005 + 1442695040888963407


@kernel(types.boolean, LAYOUT, INT64)
def is_cache(layout: Layout, block: int) -> bool:
    """Whether a block is programmed with one bit per cell."""
    return block % layout.blocks_per_die >= layout.main_blocks + layout.reserve_blocks


@kernel(INT64, LAYOUT, INT64, INT64)
def operation_ns(layout: Layout, kind: int, block: int) -> int:
    """How long one operation takes on that block."""
    cached = is_cache(layout, block)
    ns: int = layout.erase_ns
    if kind == READ:
        ns = layout.slc_read_ns if cached else layout.read_ns
    elif kind == PROGRAM:
        ns = layout.slc_program_ns if cached else layout.program_ns
    return ns


@kernel(types.void, TABLES, INT64, INT64, INT64, INT64, INT64, INT64, INT64)
def note(tables: Tables, kind: int, cause: int, die: int, block: int, first: int, count: int, units: int) -> None:
    """Remember an operation in place of the oldest one."""
    log, counters = tables.log, tables.counters
    if log.shape[0] == 0:
        return
    place = counters[LOGGED] * LOG_WIDTH % log.shape[0]
    log[place], log[place + 1], log[place + 2], log[place + 3] = kind, cause, die, block
    log[place + 4], log[place + 5], log[place + 6] = first, count, units
    counters[LOGGED] += 1


@kernel(INT64, TABLES, INT64, INT64, INT64, INT64)
def append(tables: Tables, die: int, each_ns: int, count: int, block: int) -> int:
    """Put a run of operations on a block at the end of a die's queue; returns when it ends."""
    q, row = tables.queue, die * DIE_WIDTH
    now = tables.counters[NOW]
    while q[row + QUEUED] > 0:
        entry = row + ENTRY + q[row + HEAD] * ENTRY_WIDTH
        if q[entry] + q[entry + 1] * q[entry + 2] > now:
            break
        q[row + HEAD] = (q[row + HEAD] + 1) % ENTRIES
        q[row + QUEUED] -= 1
    start = max(tables.counters[AT], q[row + BUSY_UNTIL], q[row + READS_UNTIL])
    end: int = start + each_ns * count
    q[row + BUSY_UNTIL] = end
    queued = q[row + QUEUED]
    if queued > 0:
        entry = row + ENTRY + (q[row + HEAD] + queued - 1) % ENTRIES * ENTRY_WIDTH
        last_end = q[entry] + q[entry + 1] * q[entry + 2]
        if last_end == start and q[entry + 1] == each_ns and q[entry + 3] == block:
            q[entry + 2] += count
            return end
        if queued == ENTRIES:
            q[entry + 1], q[entry + 2], q[entry + 3] = end - q[entry], 1, -1
            return end
    entry = row + ENTRY + (q[row + HEAD] + queued) % ENTRIES * ENTRY_WIDTH
    q[entry], q[entry + 1], q[entry + 2], q[entry + 3] = start, each_ns, count, block
    q[row + QUEUED] += 1
    return end


@kernel(INT64, LAYOUT, TABLES, INT64, INT64, INT64, INT64, INT64, INT64, INT64)
def operate(
    layout: Layout, tables: Tables, kind: int, cause: int, die: int, block: int, first: int, count: int, units: int
) -> int:
    """`count` operations on a block, the first one on stripe (or page) `first`, for `units` units in all.

    Returns when a timed die has done them.
    """
    counters = tables.counters
    each_ns = operation_ns(layout, kind, block)
    tables.die_ns[die] += each_ns * count
    if kind == READ:
        counters[SENSED_PAGES] += count
    elif kind == PROGRAM:
        counters[PROGRAMMED_UNITS] += count * layout.slots
        if cause != HOST:
            counters[PADDED_UNITS] += count * layout.slots - units
        if first == 0:
            tables.since[block] = counters[AT]
    elif kind == ERASE:
        tables.erases[block] += count
        counters[ERASES] += count
    if count == 0:
        return 0
    note(tables, kind, cause, die, block, first, count, units)
    if not layout.timed:
        return 0
    end = append(tables, die, each_ns, count, block)
    if layout.buffer_stripes == 0:
        counters[UNTIL] = max(counters[UNTIL], end + layout.unit_ns)
    return end


@kernel(types.void, TABLES, INT64, INT64, INT64, INT64)
def _push_back(tables: Tables, die: int, number: int, after_ns: int, by_ns: int) -> None:
    """Move entry `number` of a die's queue, and what has to follow it, back by what ended a read after `after_ns`."""
    q, row, buffer = tables.queue, die * DIE_WIDTH, tables.buffer
    ends = 0
    for i in range(number, q[row + QUEUED]):
        entry = row + ENTRY + (q[row + HEAD] + i) % ENTRIES * ENTRY_WIDTH
        start = q[entry]
        if i > number:
            by_ns = ends - start
            if by_ns <= 0:
                return
        old_end = start + q[entry + 1] * q[entry + 2]
        for place in range(0, buffer.shape[0], 3):
            at = buffer[place]
            if buffer[place + 1] == die and max(start, after_ns) < at <= old_end:
                buffer[place] = at + by_ns
        q[entry] = start + by_ns
        ends = old_end + by_ns
    q[row + BUSY_UNTIL] = ends


@kernel(INT64, LAYOUT, TABLES, INT64, INT64, INT64)
def sense(layout: Layout, tables: Tables, die: int, block: int, ns: int) -> int:
    """Let a timed die read for `ns`, as early as it may; returns when that ends."""
    q, row, counters = tables.queue, die * DIE_WIDTH, tables.counters
    start = max(counters[NOW], q[row + READS_UNTIL])
    if layout.suspends == 0:
        ends: int = max(start, q[row + BUSY_UNTIL]) + ns
        q[row + READS_UNTIL] = ends
        return ends
    stands_still = q[row + READS_UNTIL] > counters[NOW]
    for i in range(q[row + QUEUED]):
        entry = row + ENTRY + (q[row + HEAD] + i) % ENTRIES * ENTRY_WIDTH
        end = q[entry] + q[entry + 1] * q[entry + 2]
        if end > start and (q[entry + 3] == block or q[entry + 3] < 0):
            start = end
            stands_still = False
    i = 0
    while i < q[row + QUEUED]:
        entry = row + ENTRY + (q[row + HEAD] + i) % ENTRIES * ENTRY_WIDTH
        first, each = q[entry], q[entry + 1]
        if first + each * q[entry + 2] <= start:
            i += 1
            continue
        begins = first + max(start - first, 0) // each * each
        if begins >= start + ns:
            break
        taken = q[row + OVERTAKEN] if q[row + OVERTAKEN_END] == begins + each else 0
        if taken >= layout.suspends:
            start = begins + each
            stands_still = False
            continue
        extra = 0
        by_ns = start + ns - begins
        if begins < start:
            if not stands_still:
                extra = layout.suspend_ns
                counters[SUSPENDS] += 1
            by_ns = extra + ns
        _push_back(tables, die, i, start, by_ns)
        q[row + OVERTAKEN] = taken + 1
        q[row + OVERTAKEN_END] = begins + each + by_ns
        start += extra
        break
    ends = start + ns
    q[row + READS_UNTIL] = ends
    return ends


@kernel(INT64, LAYOUT, TABLES, INT64)
def extra_rounds(layout: Layout, tables: Tables, block: int) -> int:
    """How many more sensing rounds a page of that block needs this time: by its wear, its age, and the draw."""
    if is_cache(layout, block):
        return 0
    counters = tables.counters
    stress = tables.erases[block] * 1000 // layout.rated_cycles
    if layout.retention_ns > 0:
        stress += max(counters[NOW] - tables.since[block], 0) // max(layout.retention_ns // 1000, 1)
    chance = min(min(stress, 1_000_000) * layout.retry_ppm // 1000, 1_000_000)
    rounds = 0
    while rounds < layout.retries:
        counters[DRAW] = drawn(counters[DRAW])
        if (counters[DRAW] >> 33 & 0x7FFFFFFF) % 1_000_000 >= chance:
            break
        rounds += 1
    counters[RETRIES] += rounds
    return rounds


@kernel(types.boolean, TABLES, INT64)
def is_buffered(tables: Tables, stripe: int) -> bool:
    """Whether a full stripe still lies in the write buffer, and its place is not promised to a later one."""
    buffer, now = tables.buffer, tables.counters[NOW]
    found = False
    for place in range(0, buffer.shape[0], 3):
        found = found or (buffer[place + 2] == stripe + 1 and buffer[place] > now)
    return found


@kernel(types.void, LAYOUT, TABLES, INT64, types.boolean)
def settle(layout: Layout, tables: Tables, sensing_ns: int, ends: bool) -> None:
    """Give the channels of a timed drive what the command has asked for; `ends` says that the command waits for it."""
    counters, free = tables.counters, tables.bus_free
    for channel in range(layout.channels):
        units = tables.bus_units[channel]
        if units > 0:
            free[channel] = max(free[channel], counters[NOW]) + units * layout.unit_ns
            if ends:
                counters[UNTIL] = max(counters[UNTIL], free[channel] + sensing_ns)
