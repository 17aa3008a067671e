"""KV blocks: where the rows of a request lie, and which operands a kernel needs for them.

A block is one layer's K *or* V of one KV head over `block_tokens` consecutive positions; its bytes are row-major
(block_tokens, head_dim), and where V rows are codes each is followed by its scale. K and V are placed separately, per
layer, head and block. A block is EMPTY, OPEN (rows are appended; readable below the request's length), SEALED (full,
immutable; only these move) or EVICTING (being copied elsewhere; the old place stays valid until the copy is committed).

A `Pool` is one region of one memory cut into equal slots, with an exact count of what is taken. A `BlockTable` belongs
to one request, and has the scales of its keys where those are codes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, OutOfMemory
from tierloop.devices.kernels.contract import CODE_RANGE, DType, value_nbytes
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.dtypes import itemsize
from tierloop.runtime.key_scales import KeyScales

Int64 = NDArray[np.int64]

EMPTY, OPEN, SEALED, EVICTING = 0, 1, 2, 3
K, V = 0, 1
_FEW = 64
"""Slots that are put on a heap one by one; more are sorted in, which is cheaper."""


class TierTooSmall(ConfigurationError):
    """A memory cannot hold what a policy wants to put there; the message says how much is missing."""


@dataclass(frozen=True)
class KVShape:
    """Shape and type of a model's KV cache.

    `split_tokens` divides `block_tokens`, so whatever is cut between blocks is cut at a split border.
    """

    num_layers: int
    num_kv_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    dtype: DType = "float32"
    block_tokens: int = 64
    split_tokens: int = 64

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if self.block_tokens < 1 or self.split_tokens < 1 or self.block_tokens % self.split_tokens:
            raise ConfigurationError(
                f"block_tokens {self.block_tokens} must be a positive multiple of split_tokens {self.split_tokens}"
            )

    def row_nbytes(self, side: int) -> int:
        """Bytes of one row of K (0) or V (1); a V row of codes ends with its scale."""
        return self.head_dim * itemsize(self.dtype) if side == K else value_nbytes(self.dtype, self.head_dim_v)

    @property
    def has_codes(self) -> bool:
        """Whether elements are codes, which have scales."""
        return self.dtype in CODE_RANGE

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block; K and V blocks share slots of the larger size."""
        return self.block_tokens * max(self.row_nbytes(K), self.row_nbytes(V))

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks per layer, side and head for that many tokens."""
        return -(-num_tokens // self.block_tokens)


class Pool:
    """Equal slots in one region of one memory. Capacity is a limit: `take` raises TierTooSmall beyond it."""

    def __init__(self, device: Device, memory: str, num_slots: int, slot_nbytes: int, phantom: bool = False) -> None:
        info = device.info.memory(memory)
        assert info is not None, f"{device.info.name} has no memory {memory}"
        self.grid = info.alignment
        """Bytes that the memory is read and written in multiples of."""
        self.slot_nbytes = -(-slot_nbytes // self.grid) * self.grid
        self.memory = memory
        self.device = device
        self.num_slots = num_slots
        try:
            self.region: Region = device.alloc(max(num_slots, 1) * self.slot_nbytes, memory, phantom)
        except OutOfMemory as error:
            raise TierTooSmall(
                f"{memory} is too small: {num_slots} blocks of {self.slot_nbytes} bytes are needed there "
                f"({num_slots * self.slot_nbytes / 2**20:.1f} MiB, capacity {info.capacity / 2**20:.1f} MiB)"
            ) from error
        self.taken = 0
        """Slots in use."""
        self.handed_out = 0
        """Slots that were ever taken."""
        self._held = np.zeros(num_slots, dtype=bool)
        self._fresh = 0
        """Slots from here on have not been taken since the pool was empty; those that came back are all below."""
        self._returned: list[int] = []
        """A heap."""

    def take(self, count: int) -> Int64:
        """Offsets of the `count` lowest free slots, ascending, int64 (count,).

        Raises TierTooSmall and takes nothing if there are fewer.
        """
        if count > self.num_slots - self.taken:
            raise TierTooSmall(
                f"{self.memory} is full: {count} blocks are needed, {self.num_slots - self.taken} of {self.num_slots} "
                "are free"
            )
        used = min(count, len(self._returned))
        again = np.array([heapq.heappop(self._returned) for _ in range(used)], dtype=np.int64)
        slots = np.concatenate((again, np.arange(self._fresh, self._fresh + count - used)))
        self._fresh += count - used
        self._held[slots] = True
        self.taken += count
        self.handed_out += count
        return slots * self.slot_nbytes

    def give(self, offsets: Int64) -> None:
        """Return slots; the lowest is handed out next."""
        slots = offsets // self.slot_nbytes
        again = slots[~self._held[slots]]
        assert not len(again), f"slot {again[0]} of {self.memory} was returned twice"
        self._held[slots] = False
        self.taken -= len(slots)
        if len(slots) > 1:
            left = int(np.count_nonzero(self._held))
            assert left == self.taken, f"a slot of {self.memory} was returned twice at once"
        if not self.taken:
            self._fresh = 0
            self._returned.clear()
        elif len(slots) < _FEW:
            for slot in slots.tolist():
                heapq.heappush(self._returned, slot)
        else:
            self._returned = sorted([*self._returned, *slots.tolist()])

    def close(self) -> None:
        """Give the region back to its device."""
        self.device.free(self.region)


class Rows(NamedTuple):
    """Rows of one layer as kernel operands: `runs` int64 (n, 3), and segments with one span per run for K and V."""

    runs: Int64
    keys: Operand
    values: Operand


class Places(NamedTuple):
    """Where n blocks lie: pool numbers int16 [side, n] and offsets int64 [side, n]."""

    pools: NDArray[np.int16]
    offsets: Int64


class BlockTable:
    """Places of all blocks of one request: arrays [layer, side, head, block] of pool number, offset and state.

    `scales` are those of its keys where they are codes; `Engine.table` makes both together.
    """

    def __init__(self, shape: KVShape, max_tokens: int, scales: KeyScales | None = None) -> None:
        self.shape = shape
        self.max_tokens = max_tokens
        self.scales = scales
        self.pools: list[Pool] = []
        places = (shape.num_layers, 2, shape.num_kv_heads, shape.num_blocks(max_tokens))
        self.pool = np.full(places, -1, dtype=np.int16)
        self.offset = np.zeros(places, dtype=np.int64)
        self.state = np.full(places, EMPTY, dtype=np.uint8)
        self.length = np.zeros(shape.num_layers, dtype=np.int64)
        self.version = 0
        """Counts changes of places; the same version means the same places."""

    def number(self, pool: Pool) -> int:
        """The number under which this table knows a pool."""
        if pool not in self.pools:
            self.pools.append(pool)
        return self.pools.index(pool)

    def put(self, layer: int, side: int, head: int, blocks: Int64, pool: Pool, state: int = OPEN) -> None:
        """Take slots for blocks (ascending, int64) that have no place yet."""
        assert (self.pool[layer, side, head, blocks] < 0).all(), "a block has one place"
        self.offset[layer, side, head, blocks] = pool.take(len(blocks))
        self.pool[layer, side, head, blocks] = self.number(pool)
        self.state[layer, side, head, blocks] = state
        self.version += 1

    def put_all(self, first: int, last: int, pool: Pool) -> None:
        """Take slots for blocks [first, last) of all layers, sides and heads, a head's as neighbours if it can be."""
        layers, sides, heads, _ = self.pool.shape
        assert (self.pool[:, :, :, first:last] < 0).all(), "a block has one place"
        offsets = pool.take(layers * sides * heads * (last - first))
        self.offset[:, :, :, first:last] = offsets.reshape(layers, sides, heads, last - first)
        self.pool[:, :, :, first:last] = self.number(pool)
        self.state[:, :, :, first:last] = OPEN
        self.version += 1

    def give_all(self, first: int, last: int) -> None:
        """Return the slots of blocks [first, last) of all layers, sides and heads, those that have one."""
        pools = self.pool[:, :, :, first:last]
        for number in np.unique(pools[pools >= 0]).tolist():
            self.pools[number].give(self.offset[:, :, :, first:last][pools == number])
        pools[:] = -1
        self.state[:, :, :, first:last] = EMPTY
        self.version += 1

    def move(self, layer: int, side: int, heads: Int64, block: int, pool: Pool, offsets: Int64) -> None:
        """Publish the new places of a block of some heads, slots of `pool` at `offsets`, and return the old ones."""
        where = (layer, side, heads, block)
        numbers, old = self.pool[where].copy(), self.offset[where].copy()
        self.pool[where], self.offset[where] = self.number(pool), offsets
        self.state[where] = SEALED
        for number in np.unique(numbers).tolist():
            self.pools[number].give(old[numbers == number])
        self.version += 1

    def folded(self, layer: int, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """Queries (..., q heads, head_dim) as kernels and policies take them: with the scales of the keys in them."""
        return queries if self.scales is None else self.scales.fold(layer, queries)

    def counted(self, layer: int, keys: NDArray[np.float32]) -> None:
        """New keys (kv heads, tokens, head_dim) are going to be stored: count what is beyond the range of codes."""
        if self.scales is not None:
            self.scales.count(layer, keys)

    def seal(self, layer: int) -> None:
        """Mark every full block of a layer as sealed."""
        full = int(self.length[layer]) // self.shape.block_tokens
        state = self.state[layer, :, :, :full]
        state[state == OPEN] = SEALED

    def num_blocks(self, layer: int) -> int:
        """Blocks in use in a layer."""
        return self.shape.num_blocks(int(self.length[layer]))

    def all_blocks(self, layer: int) -> tuple[Int64, Int64]:
        """(heads, blocks) of everything that the layer holds, sorted; both int64 (n,)."""
        count = self.num_blocks(layer)
        heads = np.repeat(np.arange(self.shape.num_kv_heads, dtype=np.int64), count)
        return heads, np.tile(np.arange(count, dtype=np.int64), self.shape.num_kv_heads)

    def rows(
        self,
        layer: int,
        heads: Int64,
        blocks: Int64,
        sequence: int = 0,
        places: Places | None = None,
        num_tokens: int = 0,
    ) -> Rows:
        """Operands for the given blocks, sorted by (head, block), rows below the layer's length (or `num_tokens`) only.

        Neighbouring blocks that are neighbours on the medium too become one run. `places` overrides where the blocks
        lie, for blocks that were staged elsewhere.
        """
        shape = self.shape
        position = blocks * shape.block_tokens
        count = np.minimum(shape.block_tokens, (num_tokens or int(self.length[layer])) - position)
        assert len(blocks) == 0 or int(count.min()) > 0, "a block without rows was asked for"
        return self._join(heads, position, count, places or self.places(layer, heads, blocks), sequence)

    def single_rows(
        self, layer: int, heads: Int64, positions: Int64, sequence: int = 0, places: Places | None = None
    ) -> Rows:
        """Operands for single rows, sorted by (head, position); neighbours on the medium too become one run.

        `places` overrides where the block of each row lies.
        """
        shape = self.shape
        assert len(positions) == 0 or int(positions.max()) < self.length[layer], "a row beyond the end was asked for"
        held = places or self.places(layer, heads, positions // shape.block_tokens)
        within = positions % shape.block_tokens
        offsets = held.offsets + np.stack([within * shape.row_nbytes(side) for side in (K, V)])
        return self._join(heads, positions, np.ones_like(positions), Places(held.pools, offsets), sequence)

    def _join(self, heads: Int64, position: Int64, count: Int64, places: Places, sequence: int) -> Rows:
        """Pieces of `count` rows from a position on, each at its place, as runs: neighbours become one."""
        shape, (pools, offsets) = self.shape, places
        new = np.ones(len(heads), dtype=bool)
        if len(heads) > 1:
            joined = (heads[1:] == heads[:-1]) & (position[1:] == position[:-1] + count[:-1])
            for side in (K, V):
                end = offsets[side, :-1] + count[:-1] * shape.row_nbytes(side)
                joined &= (pools[side, 1:] == pools[side, :-1]) & (offsets[side, 1:] == end)
            new[1:] = ~joined
        starts = np.flatnonzero(new)
        tokens = np.add.reduceat(count, starts) if len(starts) else count
        runs = np.empty((len(starts), 3), dtype=np.int64)
        runs[:, 0] = sequence
        runs[:, 1] = heads[starts]
        runs[:, 2] = position[starts]
        keys = self._segments(pools[K, starts], offsets[K, starts], tokens * shape.row_nbytes(K))
        values = self._segments(pools[V, starts], offsets[V, starts], tokens * shape.row_nbytes(V))
        return Rows(runs, keys, values)

    def places(self, layer: int, heads: Int64, blocks: Int64) -> Places:
        """Pool numbers and offsets of blocks, [side, n] each; copies that a caller may change."""
        at = heads * self.pool.shape[3] + blocks  # one index: a third of the time of two
        return Places(
            self.pool[layer].reshape(2, -1).take(at, axis=1), self.offset[layer].reshape(2, -1).take(at, axis=1)
        )

    def new_row(self, layer: int, position: int) -> tuple[Pool, Int64] | None:
        """The pool that a new row of all sides and heads goes to, and its offsets there, int64 [side, head].

        None where they go to several pools.
        """
        shape = self.shape
        block, within = divmod(position, shape.block_tokens)
        pools = self.pool[layer, :, :, block]
        number = int(pools[0, 0])
        if (pools != number).any():
            return None
        assert number >= 0, "rows were appended to a block without a place"
        offsets = self.offset[layer, :, :, block].copy()
        for side in (K, V):
            offsets[side] += within * shape.row_nbytes(side)
        return self.pools[number], offsets

    def row_segments(self, layer: int, side: int, first: int, count: int) -> Operand:
        """Places of `count` new rows from position `first` on, for all heads: head-major, one span per row."""
        shape = self.shape
        positions = np.arange(first, first + count, dtype=np.int64)
        heads = np.repeat(np.arange(shape.num_kv_heads), count)
        blocks = np.tile(positions // shape.block_tokens, shape.num_kv_heads)
        row = np.tile(positions % shape.block_tokens, shape.num_kv_heads) * shape.row_nbytes(side)
        pools = self.pool[layer, side][heads, blocks]
        offsets = self.offset[layer, side][heads, blocks] + row
        assert (pools >= 0).all(), "rows were appended to a block without a place"
        return self._segments(pools, offsets, np.full(len(offsets), shape.row_nbytes(side), dtype=np.int64))

    def release(self) -> None:
        """Return every slot to its pool."""
        self.give_all(0, self.pool.shape[3])
        self.length[:] = 0

    def nbytes_by_memory(self) -> dict[str, int]:
        """Accounted bytes per memory: slots taken × slot size."""
        used: dict[str, int] = {}
        for number, pool in enumerate(self.pools):
            count = int((self.pool == number).sum())
            used[pool.memory] = used.get(pool.memory, 0) + count * pool.slot_nbytes
        return {memory: nbytes for memory, nbytes in used.items() if nbytes}

    def _segments(self, pools: NDArray[np.int16], offsets: Int64, nbytes: Int64) -> Operand:
        if not len(pools):
            return ()
        borders = [0, *(np.flatnonzero(pools[1:] != pools[:-1]) + 1).tolist(), len(pools)]
        spans = np.stack((offsets, nbytes), axis=1)
        return tuple(Segment(self.pools[int(pools[a])].region, Spans(spans[a:b])) for a, b in pairwise(borders))


def join(parts: Iterable[Rows]) -> Rows:
    """Rows of several requests as one launch; the parts come in ascending order of their sequence."""
    held = list(parts)
    if len(held) == 1:
        return held[0]
    runs = np.concatenate([p.runs for p in held]) if held else np.empty((0, 3), dtype=np.int64)
    return Rows(runs, tuple(s for p in held for s in p.keys), tuple(s for p in held for s in p.values))
