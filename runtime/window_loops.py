"""The loops over a tier's entries, compiled (windows.py says what they must do).

Imported by whoever makes `Windows`, since importing compiles. State comes as arrays:

    slots     int32 (layers, heads, most): the slot of an entry, −1 where it is not held
    members   int32 (layers, heads, most): the evictable entries, the first `counts` of a row, in order of arrival
    last      int32 (layers, heads, most): the step in which a held entry was last used; −1 for one that is kept
    uses      int32 (layers, heads, most), or of no entries where nobody counts uses
    counts    int64 (layers, heads)
    seen      int64 (most,): `stamp` << 32 | rank of what a list names, so that nothing has to be cleared between lists

A loop that is given a wrong number says where, and has then changed nothing but `seen`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, kernel

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MOST_STEPS = 1 << 31
"""Steps and slots are kept as int32."""
_STATE = types.Array(types.int32, 3, "C")
_COUNTS = types.Array(INT64, 2, "C")
_ROW = types.Array(INT64, 1, "C")
_RANDOM = types.uint64
_STAMP_BITS = 32


@kernel(INT64, _STATE, INT64, TABLE, _ROW, INT64, _ROW)
def find_missing(slots: Int32, layer: int, chosen: Int64, seen: Int64, stamp: int, out: Int64) -> int:
    """Put head · most + entry of each chosen entry that is not held into `out`; returns how many there are.

    Uses the stamps from `stamp` on, one for each head. Returns −1 − i where number i of `chosen` is outside the entries
    or named a second time.
    """
    heads: int = chosen.shape[0]
    k: int = chosen.shape[1]
    most = slots.shape[2]
    found = 0
    for head in range(heads):
        mark = (stamp + head) << _STAMP_BITS
        for i in range(k):
            entry = chosen[head, i]
            if entry == -1:
                continue
            if entry < 0 or entry >= most or seen[entry] >= mark:
                return -1 - (head * k + i)
            seen[entry] = mark
            if slots[layer, head, entry] < 0:
                out[found] = head * most + entry
                found += 1
    return found


@kernel(INT64, _STATE, _STATE, _STATE, _STATE, _COUNTS, INT64, INTS, INTS, INTS, INT64)
def add(
    slots: Int32,
    members: Int32,
    last: Int32,
    uses: Int32,
    counts: Int64,
    layer: int,
    heads: Int64,
    entries: Int64,
    places: Int64,
    step: int,
) -> int:
    """Hold entries, last used in `step`; −1 keeps them. Returns their number, or that of the first that cannot be."""
    for i in range(len(entries)):
        head, entry, place = heads[i], entries[i], places[i]
        fits = 0 <= head < slots.shape[1] and 0 <= entry < slots.shape[2] and 0 <= place < MOST_STEPS
        if not fits or slots[layer, head, entry] >= 0:
            for j in range(i):
                slots[layer, heads[j], entries[j]] = -1
                if step >= 0:
                    counts[layer, heads[j]] -= 1
            return i
        slots[layer, head, entry] = place
        last[layer, head, entry] = step
        if step >= 0:
            members[layer, head, counts[layer, head]] = entry
            counts[layer, head] += 1
            if uses.shape[2]:
                uses[layer, head, entry] = 0
    return len(entries)


@kernel(types.void, _STATE, _STATE, _STATE, _STATE, _COUNTS, INT64, INT64, INT64, INT64)
def release(
    slots: Int32, members: Int32, last: Int32, uses: Int32, counts: Int64, layer: int, first: int, end: int, step: int
) -> None:
    """Make the kept ones of entries [first, end) of all heads evictable, last used in `step`."""
    for head in range(slots.shape[1]):
        for entry in range(first, end):
            if slots[layer, head, entry] >= 0 and last[layer, head, entry] < 0:
                last[layer, head, entry] = step
                members[layer, head, counts[layer, head]] = entry
                counts[layer, head] += 1
                if uses.shape[2]:
                    uses[layer, head, entry] = 0


@kernel(types.boolean, INT64, INT64, INT64, INT64)
def _before(rank: int, entry: int, other_rank: int, other_entry: int) -> bool:
    return rank < other_rank or (rank == other_rank and entry < other_entry)


@kernel(types.void, _ROW, _ROW, INT64, INT64)
def _least_first(ranks: Int64, entries: Int64, count: int, wanted: int) -> None:
    """Bring the `wanted` least of `count` different (rank, entry) to the front: quickselect, median of three."""
    low, high = 0, count - 1
    while low < high:
        a, b, c = low, (low + high) // 2, high
        if _before(ranks[b], entries[b], ranks[a], entries[a]):
            a, b = b, a
        if _before(ranks[c], entries[c], ranks[b], entries[b]):
            b = a if _before(ranks[c], entries[c], ranks[a], entries[a]) else c
        rank, entry = ranks[b], entries[b]
        i, j = low, high
        while i <= j:
            while _before(ranks[i], entries[i], rank, entry):
                i += 1
            while _before(rank, entry, ranks[j], entries[j]):
                j -= 1
            if i <= j:
                ranks[i], ranks[j] = ranks[j], ranks[i]
                entries[i], entries[j] = entries[j], entries[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            return


@kernel(_RANDOM, _RANDOM)
def mixed(x: Any) -> Any:
    """SplitMix64's output for state x (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel(types.void, _ROW, INT64, INT64, types.float64, _RANDOM)
def _err(entries: Int64, goes: int, count: int, noise: float, random: Any) -> None:
    """Put in the place of each of the first `goes` entries, with probability `noise`, one drawn from those behind."""
    start = goes
    for victim in range(goes):
        if start == count:
            return
        random = mixed(random)
        if (random >> np.uint64(11)) * 2.0**-53 < noise:
            random = mixed(random)
            drawn = start + np.int64(((random >> np.uint64(32)) * np.uint64(count - start)) >> np.uint64(32))
            spared = entries[victim]
            entries[victim] = entries[drawn]
            entries[drawn] = entries[start]
            entries[start] = spared
            start += 1


@kernel(
    INT64,
    *(_STATE, _STATE, _STATE, _STATE, _COUNTS, INT64, INTS),
    *(TABLE, INT64, INT64, INT64, _RANDOM, types.float64),
    *(_ROW, INT64, _ROW, _ROW, _ROW),
)
def remove(
    slots: Int32,
    members: Int32,
    last: Int32,
    uses: Int32,
    counts: Int64,
    layer: int,
    room: Int64,
    ranked: Int64,
    chosen: int,
    safe: int,
    step: int,
    random: Any,
    noise: float,
    seen: Int64,
    stamp: int,
    ranks: Int64,
    entries: Int64,
    out: Int64,
) -> int:
    """Note what was used, then drop what is beyond each head's `room`; the slots go to `out`. Returns their number.

    The first `chosen` of each ranking were used; the first `safe` (at least as many) go after all others, the worst
    first. `ranks` and `entries` are scratch for `most` entries. Uses the stamps from `stamp` on, two for each head.
    Returns −1 − i where number i of `ranked` is outside the entries or named a second time.
    """
    heads: int = ranked.shape[0]
    m: int = ranked.shape[1]
    most = slots.shape[2]
    for head in range(heads):
        mark = (stamp + head) << _STAMP_BITS
        for i in range(m):
            entry = ranked[head, i]
            if entry == -1:
                continue
            if entry < 0 or entry >= most or seen[entry] >= mark:
                return -1 - (head * m + i)
            seen[entry] = mark
    given = 0
    for head in range(heads):
        mark = (stamp + heads + head) << _STAMP_BITS
        for i in range(m):
            entry = ranked[head, i]
            if entry < 0:
                continue
            seen[entry] = mark | i
            if i < chosen and slots[layer, head, entry] >= 0 and last[layer, head, entry] >= 0:
                last[layer, head, entry] = step
                if uses.shape[2]:
                    uses[layer, head, entry] += 1
        held = counts[layer, head]
        goes = held - max(room[head], 0)
        if goes <= 0:
            continue
        n = 0
        for i in range(held):
            entry = np.int64(members[layer, head, i])
            rank = seen[entry] - mark
            if rank < 0 or rank >= safe:
                entries[n] = entry
                ranks[n] = last[layer, head, entry]
                if uses.shape[2]:
                    ranks[n] |= np.int64(uses[layer, head, entry]) << 32
                n += 1
        if goes < n:
            _least_first(ranks, entries, n, goes)
        i = min(safe, m) - 1
        while i >= 0 and (n < goes or (noise > 0 and i >= chosen)):
            entry = ranked[head, i]
            if entry >= 0 and slots[layer, head, entry] >= 0 and last[layer, head, entry] >= 0:
                entries[n] = entry
                n += 1
            i -= 1
        if noise > 0:
            _err(entries, goes, n, noise, mixed(random + np.uint64(head)))
        for i in range(goes):
            entry = entries[i]
            out[given] = slots[layer, head, entry]
            given += 1
            slots[layer, head, entry] = -1
        stay = 0
        for i in range(held):
            entry = np.int64(members[layer, head, i])
            if slots[layer, head, entry] >= 0:
                members[layer, head, stay] = entry
                stay += 1
        counts[layer, head] = stay
    return given
