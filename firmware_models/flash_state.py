"""The state of a flash controller as the compiled parts see it: the geometry in numbers, and tables of int64.

Made by flash.py, changed by flash_units.py and flash_dies.py. Everything but the three large tables lies in one array,
because each array costs 0.2 µs at every call: first the layout, then the counters, then what belongs to blocks, to dies
and to channels, the stripes in the write buffer and the operations that are remembered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.firmware_models.flash_geometry import FlashGeometry

Int64 = NDArray[np.int64]


class Layout(NamedTuple):
    """The geometry at the beginning of the state: counts, times in ns, bytes; flash_geometry.py says what they mean."""

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
    main_blocks: int
    reserve_blocks: int
    slc_blocks: int
    slc_stripes: int
    slc_program_ns: int
    slc_read_ns: int
    idle_ns: int
    timed: int
    unit_ns: int
    buffer_stripes: int
    suspends: int
    suspend_ns: int
    rated_cycles: int
    life_spread_percent: int
    wear_spread: int
    retry_ppm: int
    retries: int
    retention_ns: int
    seed: int
    remembered: int


class Tables(NamedTuple):
    """The controller's state, all int64: `map` (units,) holds the slot of each unit plus one, 0 if it has none.

    `owner` and `tag` (slots,) are the spare areas: the unit plus one, 0 for garbage, and the number of the write.
    `valid` and `closed` (blocks,) count units that are not garbage and mark blocks that are full (and BAD ones);
    `erases` and `since` (blocks,) are how often a block was erased and the time of its first program after that; `free`
    (blocks,) holds a stack of erased blocks for each die, `free_count`, `open_block` and `next_stripe` (dies,) go with
    it. `reserve` (dies,) counts the blocks left to stand in for bad ones; `cache` (dies · 3) is the ring of blocks with
    one bit per cell: the oldest, how many are full, and the next stripe of the one after those. `counters` is indexed
    by the names below. `die_ns` (dies,) and `bus_units` (channels,) are what the present command asks for.

    Of timed drives: `queue` (dies · DIE_WIDTH) is what each die has to do (flash_dies.py), `buffer` (stripes · 3) when,
    on which die and as which stripe each place of the write buffer is programmed, `bus_free` (channels,) when a channel
    has moved all that it was given. `log` (remembered · LOG_WIDTH) holds the latest operations.
    """

    map: Int64
    owner: Int64
    tag: Int64
    valid: Int64
    closed: Int64
    erases: Int64
    since: Int64
    free: Int64
    free_count: Int64
    open_block: Int64
    next_stripe: Int64
    reserve: Int64
    cache: Int64
    counters: Int64
    die_ns: Int64
    bus_units: Int64
    queue: Int64
    buffer: Int64
    bus_free: Int64
    log: Int64


BAD = 2
"""`Tables.closed` of a block that could not be erased any more."""

DIE, STRIPE, FILL, WRITES, HOST_UNITS, COLLECTED_UNITS, ERASED_BLOCKS = range(7)
"""`Tables.counters`: whose turn it is, the open stripe (-1: none) and its units, writes so far, and the statistics."""
FOLDED_UNITS, LEVELLED_UNITS, PADDED_UNITS, PROGRAMMED_UNITS, READ_UNITS, SENSED_PAGES, ERASES = range(7, 14)
"""More statistics, of units but for pages and blocks; `ERASED_BLOCKS` counts those erased to make room."""
SUSPENDS, RETRIES, BAD_BLOCKS, READ_ONLY, DRAW, LOGGED = range(14, 20)
"""Of reads that went first, extra sensing rounds, failed blocks, the end; what was drawn last, operations so far."""
NOW, AT, UNTIL, LAST, STRIPES, ROOM = range(20, 26)
"""Times of a timed drive: now, when the operations of a write may begin, when the command ends, when the last one
ended; the stripes that the host has filled, and when the buffer had room for the latest of them."""
COUNTERS = 26

READ, PROGRAM, ERASE, RETIRE = range(4)
HOST, COLLECT, FOLD, LEVEL = range(4)
LOG_WIDTH = 7
"""Of an operation: its kind and its cause (above), die, block, the first page or stripe, how many, and units."""

READS_UNTIL, BUSY_UNTIL, HEAD, QUEUED, OVERTAKEN, OVERTAKEN_END, ENTRY = range(7)
"""A die's row of `queue`: when its reads are through, and all else; its first entry and their number; how many reads
have gone before its present operation, and when that ends; then the entries."""
ENTRIES = 16
ENTRY_WIDTH = 4
DIE_WIDTH = ENTRY + ENTRIES * ENTRY_WIDTH
"""An entry is a run of equal operations on one block: start, ns of each, how many, and the block (-1: several)."""


def layout_numbers(g: FlashGeometry, remembered: int) -> Layout:
    """The geometry in numbers."""
    return Layout(
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
        main_blocks=g.main_blocks,
        reserve_blocks=g.reserve_blocks,
        slc_blocks=g.slc_blocks,
        slc_stripes=g.slc_stripes,
        slc_program_ns=g.slc_program_ns,
        slc_read_ns=g.slc_read_ns,
        idle_ns=g.idle_ns,
        timed=int(g.timed),
        unit_ns=g.unit_ns,
        buffer_stripes=g.buffer_nbytes // (g.page_nbytes * g.planes),
        suspends=g.suspends,
        suspend_ns=g.suspend_ns,
        rated_cycles=g.rated_cycles,
        life_spread_percent=g.life_spread_percent,
        wear_spread=g.wear_spread,
        retry_ppm=g.retry_ppm,
        retries=g.retries,
        retention_ns=g.retention_ns,
        seed=g.seed,
        remembered=remembered,
    )


def blank_state(g: FlashGeometry, remembered: int) -> Int64:
    """The state of a drive from the factory: every block erased, every counter 0."""
    layout = layout_numbers(g, remembered)
    blocks = g.dies * g.blocks_per_die
    timed = g.dies * DIE_WIDTH + 3 * layout.buffer_stripes + g.channels if layout.timed else 0
    rest = 5 * blocks + 8 * g.dies + g.channels + timed + remembered * LOG_WIDTH
    state = np.zeros(len(layout) + COUNTERS + rest, dtype=np.int64)
    state[: len(layout)] = layout
    return state
