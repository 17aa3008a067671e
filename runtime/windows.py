"""Windows: which entries of a cache one tier holds, and which of them go first when there is no room.

A window belongs to one layer and KV head of one request. It holds *kept* entries (attention sinks, the newest tokens),
which never go, and *evictable* ones, of which it holds `capacity` between two steps. During a step it may hold more:

    missing = windows.missing(layer, chosen)     what must be fetched before this step's attention
    windows.admit(layer, *missing, slots, step)  the fetched ones are held now
    windows.evict(layer, ranked, k, step)        after the attention: back to the capacity

The rules, by name:

    la    look-ahead: this step's ranking foretells what the next one chooses, so the worst-ranked goes first. Ranks
          beyond K are known for free, since all candidates were scored. What has no rank is worse than what has one;
          of those the least recently used goes first, then the lowest number.
    lru   the least recently used goes first, then the lowest number
    lfu   the one of the fewest uses since it was admitted goes first, then as in lru

Under every rule the entries chosen in this step go last, the worst-ranked first. So a capacity of 0 holds nothing
between steps, one of K about this step's choice, and one of w · K what the last w steps chose, if they differ. An entry
is used in the step that admits it and in each step that chooses it while it is held.

The rules are KVDrive's (reference: systems.md §1.2.2; LA against LRU is its Table 3). Not in the paper: LFU, the order
among entries without a rank, and `noise`, an error of the prediction that is put in on purpose to see what depends on
it. An answer of attention never depends on any of this, only on what was chosen.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.window_loops import MOST_STEPS, add, find_missing, mixed, release, remove

Int64 = NDArray[np.int64]

Eviction = Literal["la", "lru", "lfu"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


class Windows:
    """Which entries of each layer and KV head one tier holds, for one request.

    `most_entries` is one more than the largest number of an entry. `capacity` int64 (layers, heads) counts evictable
    entries. With `noise` from 0 to 1, each entry that has to go is spared with this probability, and another one goes
    in its place: one of those that would have stayed and were not chosen in this step, drawn by seed, layer, head and
    step.

    Every method checks what it is given before it changes anything and raises ValueError. Arrays are int64.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        most_entries: int,
        capacity: Int64,
        eviction: Eviction,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        if min(num_layers, num_heads, most_entries) < 1 or most_entries >= MOST_STEPS:
            raise ValueError(
                f"windows of {num_layers} layers, {num_heads} heads and {most_entries} entries; at least one of each "
                f"is needed, and fewer than {MOST_STEPS:,} entries"
            )
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction {eviction!r}; it must be one of {', '.join(EVICTIONS)}")
        if not (math.isfinite(noise) and 0 <= noise <= 1):
            raise ValueError(f"noise {noise}; it must be from 0 to 1")
        shape = (num_layers, num_heads, most_entries)
        self.slots: NDArray[np.int32] = np.full(shape, -1, dtype=np.int32)
        """int32 (layers, heads, most_entries): slots of entries, −1 where the tier does not hold them. For reading."""
        self.capacity: Int64 = _int64("capacity", capacity, shape[:2]).copy()
        """int64 (layers, heads): evictable entries that may stay."""
        if (self.capacity < 0).any():
            raise ValueError(f"capacity {int(self.capacity.min())}; it must be at least 0")
        self.eviction = eviction
        self.noise = float(noise)
        self.num_layers, self.num_heads, self.most_entries = shape
        self._seed = np.uint64(seed & (1 << 64) - 1)
        # Only pages that are written to become memory: a list is as long as what it holds.
        self._members = np.empty(shape, dtype=np.int32)
        self._last = np.empty(shape, dtype=np.int32)
        self._uses = np.empty(shape if eviction == "lfu" else (num_layers, num_heads, 0), dtype=np.int32)
        self._counts = np.zeros(shape[:2], dtype=np.int64)
        self._state = (self.slots, self._members, self._last, self._uses, self._counts)
        self._seen = np.zeros(most_entries, dtype=np.int64)
        self._stamp = 1
        self._ranks, self._entries = np.empty(most_entries, dtype=np.int64), np.empty(most_entries, dtype=np.int64)
        self._given = np.empty(num_heads * most_entries, dtype=np.int64)

    def missing(self, layer: int, chosen: Int64) -> tuple[Int64, Int64]:
        """Heads and numbers of the chosen entries that are not held, by head, then entry: int64 (n,) both.

        `chosen` is int64 (heads, k), −1 where a head has fewer.
        """
        self._check_layer(layer)
        chosen = _int64("chosen", chosen, (self.num_heads, None))
        found = np.empty(chosen.size, dtype=np.int64)
        stamp, self._stamp = self._stamp, self._stamp + self.num_heads
        count = find_missing(self.slots, layer, chosen, self._seen, stamp, found)
        if count < 0:
            self._refuse("chosen", layer, chosen, -1 - count)
        found = found[:count]
        found.sort()
        heads, entries = np.divmod(found, self.most_entries)
        return heads, entries

    def keep(self, layer: int, heads: Int64, entries: Int64, slots: Int64) -> None:
        """Hold entries for good, or until they are loosened. int64 (n,) each; none of them may be held."""
        self._add(layer, heads, entries, slots, -1)

    def admit(self, layer: int, heads: Int64, entries: Int64, slots: Int64, step: int) -> None:
        """Hold entries that may be evicted again. int64 (n,) each; none of them may be held."""
        self._add(layer, heads, entries, slots, _step(step))

    def loosen(self, layer: int, first: int, last: int, step: int) -> None:
        """Let the kept ones of entries [first, last) of all heads be evicted from now on; they count as used now."""
        self._check_layer(layer)
        if not 0 <= first <= last <= self.most_entries:
            raise ValueError(f"entries [{first}, {last}) are to be loosened; there are {self.most_entries}")
        release(*self._state, layer, first, last, _step(step))

    def evict(self, layer: int, ranked: Int64, k: int, step: int) -> Int64:
        """Note that ranked[:, :k] were used in this step, and drop what is beyond the capacity.

        `ranked` is int64 (heads, m), this step's entries from the best on, −1 where a head has fewer. Returns the slots
        that are free now, int64 (n,), by head.
        """
        self._check_layer(layer)
        ranked = _int64("ranked", ranked, (self.num_heads, None))
        if k < 0:
            raise ValueError(f"k {k}; it must be at least 0")
        k = min(k, ranked.shape[1])
        step = _step(step)
        random = np.uint64(0)
        if self.noise:
            random = np.uint64(mixed(np.uint64(mixed(self._seed)) ^ np.uint64(layer << 32 | step)))
        stamp, self._stamp = self._stamp, self._stamp + 2 * self.num_heads
        safe = ranked.shape[1] if self.eviction == "la" else k
        noise, seen, scratch = self.noise, self._seen, (self._ranks, self._entries, self._given)
        count = remove(
            *self._state, layer, self.capacity[layer], ranked, k, safe, step, random, noise, seen, stamp, *scratch
        )
        if count < 0:
            self._refuse("ranked", layer, ranked, -1 - count)
        return self._given[:count].copy()

    def held(self, layer: int) -> Int64:
        """Evictable entries held, int64 (heads,)."""
        self._check_layer(layer)
        held: Int64 = self._counts[layer].copy()
        return held

    def entries(self, layer: int, head: int) -> Int64:
        """Numbers of the evictable entries held, ascending, int64 (n,)."""
        self._check_layer(layer)
        if not 0 <= head < self.num_heads:
            raise ValueError(f"head {head}; there are {self.num_heads}")
        return np.sort(self._members[layer, head, : self._counts[layer, head]]).astype(np.int64)

    def _add(self, layer: int, heads: Int64, entries: Int64, slots: Int64, step: int) -> None:
        self._check_layer(layer)
        heads = _int64("heads", heads, (None,))
        entries = _int64("entries", entries, (len(heads),))
        slots = _int64("slots", slots, (len(heads),))
        count = add(*self._state, layer, heads, entries, slots, step)
        if count < len(heads):
            head, entry, slot = int(heads[count]), int(entries[count]), int(slots[count])
            where = f"slot {slot} for entry {entry} of layer {layer}, head {head}"
            if 0 <= head < self.num_heads and 0 <= entry < self.most_entries and 0 <= slot < MOST_STEPS:
                raise ValueError(f"{where}: the entry is held already, or is named twice")
            raise ValueError(
                f"{where}: there are {self.num_heads} heads and {self.most_entries} entries, and a slot is at least 0"
            )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer}; there are {self.num_layers}")

    def _refuse(self, name: str, layer: int, entries: Int64, index: int) -> None:
        head, i = divmod(index, entries.shape[1])
        entry = int(entries[head, i])
        wrong = "is named twice" if 0 <= entry < self.most_entries else f"is none of {self.most_entries} entries"
        raise ValueError(f"{name} of layer {layer}, head {head}: {entry} {wrong}; −1 stands for no entry")


def _step(step: int) -> int:
    if not 0 <= step < MOST_STEPS:
        raise ValueError(f"step {step}; it must be from 0 to {MOST_STEPS - 1:,}")
    return step


def _int64(name: str, array: Int64, shape: tuple[int | None, ...]) -> Int64:
    """The array as compiled loops take it; None in `shape` is any length."""
    if array.dtype != np.int64 or len(shape) != array.ndim:
        raise ValueError(f"{name} is {array.dtype} of {array.ndim} dimensions; it must be int64 of {len(shape)}")
    if any(wanted not in (None, length) for wanted, length in zip(shape, array.shape, strict=True)):
        wanted_shape = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} has shape {array.shape}; it must be ({wanted_shape})")
    return np.ascontiguousarray(array)
