"""How a die of a flash drive comes to an erased stripe, compiled: collecting garbage, levelling wear, folding.

Imported by flash_units.py; the state is that of flash_state.py, and what a die does for it goes through flash_dies.py.
"""

from __future__ import annotations

from numba import types

from tierloop.devices.kernels.compiled import INT64
from tierloop.firmware_models.flash_compiled import AHEAD, ask, kernel
from tierloop.firmware_models.flash_dies import (
    LAYOUT,
    TABLES,
    drawn,
    operate,
)
from tierloop.firmware_models.flash_state import (
    BAD,
    BAD_BLOCKS,
    COLLECT,
    COLLECTED_UNITS,
    ERASE,
    ERASED_BLOCKS,
    FOLD,
    FOLDED_UNITS,
    LEVEL,
    LEVELLED_UNITS,
    PROGRAM,
    READ,
    READ_ONLY,
    RETIRE,
    Layout,
    Tables,
)


@kernel(INT64, LAYOUT, TABLES, INT64)
def _valid_pages(layout: Layout, tables: Tables, block: int) -> int:
    """How many pages of a block hold a unit that is not garbage."""
    full = layout.slots * layout.stripes_per_block
    pages = 0
    last_page = -1
    for slot in range(block * full, (block + 1) * full):
        if tables.owner[slot] > 0:
            page = slot // layout.page_units
            pages += page != last_page
            last_page = page
    return pages


@kernel(INT64, LAYOUT, TABLES, INT64, INT64)
def _compact(layout: Layout, tables: Tables, source: int, target: int) -> int:
    """Put the units of a block at the beginning of one that holds none, or of itself; returns in how many pages they
    were."""
    slots, owners, tags = tables.map, tables.owner, tables.tag
    full = layout.slots * layout.stripes_per_block
    to = target * full
    pages = 0
    last_page = -1
    place = slots.ctypes.data
    for slot in range(source * full, (source + 1) * full):
        if slot + AHEAD < (source + 1) * full and owners[slot + AHEAD] > 0:
            ask(place + (owners[slot + AHEAD] - 1) * 8)
        owner = owners[slot]
        if owner > 0:
            page = slot // layout.page_units
            pages += page != last_page
            last_page = page
            owners[slot] = 0
            owners[to] = owner
            tags[to] = tags[slot]
            slots[owner - 1] = to + 1
            to += 1
    if source != target:
        tables.valid[target] = tables.valid[source]
        tables.valid[source] = 0
    return pages


@kernel(INT64, LAYOUT, INT64)
def _lasts(layout: Layout, block: int) -> int:
    """How many erasures a block lasts."""
    luck = drawn(drawn(layout.seed * 1_000_003 + block)) >> 33 & 0x7FFFFFFF
    return layout.rated_cycles + luck % (layout.rated_cycles * layout.life_spread_percent // 100 + 1)


@kernel(INT64, LAYOUT, TABLES, INT64)
def _stand_in(layout: Layout, tables: Tables, die: int) -> int:
    """Take a block of the reserve, of this die if it has one; taking the last one makes the drive read-only."""
    left = 0
    taken = -1
    for turn in range(layout.dies):
        other = (die + turn) % layout.dies
        if taken < 0 and tables.reserve[other] > 0:
            tables.reserve[other] -= 1
            taken = other * layout.blocks_per_die + layout.main_blocks + tables.reserve[other]
        left += tables.reserve[other]
    if left == 0:
        tables.counters[READ_ONLY] = 1
    return taken


@kernel(types.void, LAYOUT, TABLES, INT64)
def _retire(layout: Layout, tables: Tables, victim: int) -> None:
    """The erasure of a closed block fails: its units move into a block of the reserve."""
    counters, valid = tables.counters, tables.valid
    die = victim // layout.blocks_per_die
    block = _stand_in(layout, tables, die)
    home = block // layout.blocks_per_die
    units = valid[victim]
    stripes = (units + layout.slots - 1) // layout.slots
    pages = _compact(layout, tables, victim, block)
    operate(layout, tables, READ, COLLECT, die, victim, 0, pages, units)
    operate(layout, tables, RETIRE, COLLECT, die, victim, 0, 1, 0)
    operate(layout, tables, PROGRAM, COLLECT, home, block, 0, stripes, units)
    tables.closed[victim] = BAD
    counters[BAD_BLOCKS] += 1
    counters[COLLECTED_UNITS] += units
    tables.bus_units[die // layout.dies_per_channel] += units
    tables.bus_units[home // layout.dies_per_channel] += units
    if home == die:
        tables.open_block[die] = block
        tables.next_stripe[die] = stripes
    elif units > 0:
        tables.closed[block] = 1
    else:
        tables.free[home * layout.blocks_per_die + tables.free_count[home]] = block
        tables.free_count[home] += 1


@kernel(INT64, LAYOUT, TABLES, INT64)
def _coldest(layout: Layout, tables: Tables, victim: int) -> int:
    """The closed block of the victim's die with the fewest erasures, if the victim would have too many more; or -1.

    A block without valid units is no cold one: it will be erased soon.
    """
    first = victim // layout.blocks_per_die * layout.blocks_per_die
    coldest = victim
    for block in range(first, first + layout.main_blocks + layout.reserve_blocks):
        if tables.closed[block] == 1 and tables.valid[block] > 0 and tables.erases[block] < tables.erases[coldest]:
            coldest = block
    return coldest if tables.erases[victim] + 1 - tables.erases[coldest] > layout.wear_spread else -1


@kernel(types.void, LAYOUT, TABLES, INT64, INT64)
def _exchange(layout: Layout, tables: Tables, victim: int, cold: int) -> None:
    """Two closed blocks of a die are read and erased; the cold units go into the worn block, which stays closed, the
    victim's into the fresh one, which is open."""
    owners, tags, valid = tables.owner, tables.tag, tables.valid
    die = victim // layout.blocks_per_die
    full = layout.slots * layout.stripes_per_block
    units, cold_units = valid[victim], valid[cold]
    stripes, cold_stripes = (units + layout.slots - 1) // layout.slots, (cold_units + layout.slots - 1) // layout.slots
    pages = _valid_pages(layout, tables, victim)
    kept_owner, kept_tag = (
        owners[victim * full : (victim + 1) * full].copy(),
        tags[victim * full : (victim + 1) * full].copy(),
    )
    owners[victim * full : (victim + 1) * full] = 0
    cold_pages = _compact(layout, tables, cold, victim)
    to = cold * full
    for i in range(full):
        if kept_owner[i] > 0:
            owners[to] = kept_owner[i]
            tags[to] = kept_tag[i]
            tables.map[kept_owner[i] - 1] = to + 1
            to += 1
    valid[cold] = units
    operate(layout, tables, READ, COLLECT, die, victim, 0, pages, units)
    operate(layout, tables, READ, LEVEL, die, cold, 0, cold_pages, cold_units)
    operate(layout, tables, ERASE, COLLECT, die, victim, 0, 1, 0)
    operate(layout, tables, ERASE, LEVEL, die, cold, 0, 1, 0)
    operate(layout, tables, PROGRAM, LEVEL, die, victim, 0, cold_stripes, cold_units)
    operate(layout, tables, PROGRAM, COLLECT, die, cold, 0, stripes, units)
    tables.closed[cold] = 0
    tables.open_block[die] = cold
    tables.next_stripe[die] = stripes
    tables.counters[COLLECTED_UNITS] += units
    tables.counters[LEVELLED_UNITS] += cold_units
    tables.bus_units[die // layout.dies_per_channel] += 2 * (units + cold_units)


@kernel(types.boolean, LAYOUT, TABLES, INT64)
def _collect(layout: Layout, tables: Tables, die: int) -> bool:
    """Erase the closed block with the fewest valid units and write those again; False if that frees nothing here.

    Of equal blocks the first one goes, or where wear is levelled the one with the fewest erasures.
    """
    valid, closed = tables.valid, tables.closed
    first = die * layout.blocks_per_die
    victim, fewest = -1, layout.slots * layout.stripes_per_block + 1
    for block in range(first, first + layout.main_blocks + layout.reserve_blocks):
        if closed[block] != 1:
            continue
        fresher = layout.wear_spread and valid[block] == fewest and tables.erases[block] < tables.erases[victim]
        if valid[block] < fewest or fresher:
            victim, fewest = block, valid[block]
    if victim < 0:
        return False
    stripes = (fewest + layout.slots - 1) // layout.slots
    if stripes >= layout.stripes_per_block:
        return False
    counters = tables.counters
    if layout.reserve_blocks and not counters[READ_ONLY] and tables.erases[victim] >= _lasts(layout, victim):
        _retire(layout, tables, victim)
        return bool(tables.open_block[die] >= 0)
    counters[ERASED_BLOCKS] += 1
    cold = _coldest(layout, tables, victim) if layout.wear_spread else -1
    if cold >= 0:
        _exchange(layout, tables, victim, cold)
        return True
    pages = _compact(layout, tables, victim, victim)
    closed[victim] = 0
    tables.open_block[die] = victim
    tables.next_stripe[die] = stripes
    counters[COLLECTED_UNITS] += fewest
    operate(layout, tables, READ, COLLECT, die, victim, 0, pages, fewest)
    operate(layout, tables, ERASE, COLLECT, die, victim, 0, 1, 0)
    operate(layout, tables, PROGRAM, COLLECT, die, victim, 0, stripes, fewest)
    tables.bus_units[die // layout.dies_per_channel] += 2 * fewest
    return True


@kernel(types.boolean, LAYOUT, TABLES, INT64)
def has_room(layout: Layout, tables: Tables, die: int) -> bool:
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


@kernel(INT64, LAYOUT, TABLES, INT64)
def with_room(layout: Layout, tables: Tables, first: int) -> int:
    """A die with an erased stripe in the main area, from the first one on."""
    for turn in range(layout.dies * (2 + layout.reserve_blocks)):
        die = (first + turn) % layout.dies
        if has_room(layout, tables, die):
            return die
    raise AssertionError("the spare blocks always leave a stripe somewhere")


@kernel(types.void, LAYOUT, TABLES, INT64)
def fold(layout: Layout, tables: Tables, die: int) -> None:
    """Move the units of the oldest full block of a die's cache into the main area and erase it."""
    slots, owners, tags, valid, cache = tables.map, tables.owner, tables.tag, tables.valid, tables.cache
    counters, bus = tables.counters, tables.bus_units
    block = die * layout.blocks_per_die + layout.main_blocks + layout.reserve_blocks + cache[3 * die]
    units = valid[block]
    operate(layout, tables, READ, FOLD, die, block, 0, _valid_pages(layout, tables, block), units)
    bus[die // layout.dies_per_channel] += units
    full = layout.slots * layout.stripes_per_block
    slot = block * full
    left = units
    while left > 0:
        home = with_room(layout, tables, die)
        target, stripe = tables.open_block[home], tables.next_stripe[home]
        tables.next_stripe[home] += 1
        count = min(left, layout.slots)
        to = target * full + stripe * layout.slots
        left -= count
        for _ in range(count):
            while owners[slot] == 0:
                slot += 1
            owner = owners[slot]
            owners[slot] = 0
            owners[to] = owner
            tags[to] = tags[slot]
            slots[owner - 1] = to + 1
            to += 1
        valid[target] += count
        bus[home // layout.dies_per_channel] += count
        operate(layout, tables, PROGRAM, FOLD, home, target, stripe, 1, count)
    valid[block] = 0
    counters[FOLDED_UNITS] += units
    operate(layout, tables, ERASE, FOLD, die, block, 0, 1, 0)
    cache[3 * die] = (cache[3 * die] + 1) % layout.slc_blocks
    cache[3 * die + 1] -= 1
