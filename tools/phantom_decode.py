"""A decode step as shapes only: what a GPU and near-memory processors would do, on the virtual clock.

The default is Llama-3-8B at 2²⁰ tokens for each of 8 sequences, bfloat16: 1.1 TB of KV that no host has to hold. KV
heads are divided over the PNM devices of the platform, as NELSSA does; every device attends over *all* rows of its
heads (no selection). Per layer: qkv on the GPU, queries and new rows to each PNM in one copy, attend there, states
back, merge, out and MLP.

It is written as a policy is: a coroutine on the runtime's loop, commands with `after`, roles from the engine. Tables of
spans and roots are made beforehand: those of old rows do not change from step to step, so a policy has them as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Attend, Dense
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import KVShape, Rows
from tierloop.runtime.engine import Engine, Lane

Int64 = NDArray[np.int64]
PLATFORM = "nelssa-h100-4pnm"
PNM_PROFILE = "nelssa-512"
"""The projected device of 512 GiB: the prototype's 32 GB do not hold this cache."""


@dataclass(frozen=True)
class DecodeShape:
    """A model's shape and the work of one step. Sizes in elements; KV and weights have 2 bytes each."""

    num_layers: int = 32
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocabulary: int = 128_256
    batch: int = 8
    context: int = 1 << 20
    split_tokens: int = 64

    @property
    def group(self) -> int:
        """Q heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def qkv_weights(self) -> int:
        """Elements of the projections of a layer."""
        return self.hidden * (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def finish_weights(self) -> int:
        """Elements of the output projection and the gated MLP of a layer."""
        return self.hidden * (self.num_q_heads * self.head_dim + 3 * self.ffn)


ITEM = 2
LLAMA_3_8B = DecodeShape()


def open_phantom(shape: DecodeShape = LLAMA_3_8B, check_hazards: bool = False) -> PhantomDecode:
    """The scenario on its platform, ready to run; close it."""
    overrides = {f"devices.pnm{i}.profile": PNM_PROFILE for i in range(4)}
    platform = open_platform(PLATFORM, clock="virtual", overrides=overrides, check_hazards=check_hazards)
    try:
        return PhantomDecode(platform, shape)
    except BaseException:
        platform.close()
        raise


@dataclass
class _Share:
    """What one PNM does in every layer: its lane, the operands, and where the GPU keeps its side of them."""

    lane: Lane
    states: Segment
    roots: Int64
    local_roots: Int64
    rows: list[Rows]
    queries: list[Segment]
    arriving: list[Segment]
    """Per layer where queries and new rows come to lie, in the order of `leaving` on the GPU."""
    leaving: Segment
    gpu_states: Segment = field(init=False)


class PhantomDecode:
    """Regions and tables of the scenario on an open platform, which it owns.

    Raises ConfigurationError where the KV heads do not divide by the number of PNM devices, OutOfMemory where they are
    too small.
    """

    def __init__(self, platform: Platform, shape: DecodeShape) -> None:
        self.platform = platform
        self.shape = shape
        kv = KVShape(
            shape.num_layers,
            shape.num_kv_heads,
            shape.group,
            shape.head_dim,
            shape.head_dim,
            "bfloat16",
            shape.split_tokens,
            shape.split_tokens,
        )
        self.engine = Engine(platform, kv)
        self._commands = 0
        platform.site.observers.append(self._count)
        memories = sorted(memory.name for memory in self.engine.memories("pnm"))
        if not memories or shape.num_kv_heads % len(memories):
            raise ConfigurationError(f"{shape.num_kv_heads} KV heads do not divide by {len(memories)} PNM devices")
        gpu = self.engine.dense.memory
        queries_nbytes = shape.batch * shape.num_q_heads * shape.head_dim * 4
        projected = self._region(gpu, queries_nbytes + 2 * shape.batch * shape.num_kv_heads * shape.head_dim * ITEM)
        self._projected = ((projected.all(),),)
        self._shares = [self._share(i, len(memories), memory, projected) for i, memory in enumerate(memories)]
        self._roots = np.concatenate([share.roots for share in self._shares])
        each = self.engine.state_nbytes(len(self._shares[0].roots))
        states = self._region(gpu, each * len(self._shares))
        for i, share in enumerate(self._shares):
            share.gpu_states = states.at(i * each, each)
        self._states = [share.gpu_states for share in self._shares]
        self._output = self._region(gpu, queries_nbytes).all()
        self._positions = np.full((shape.batch, 1), shape.context - 1, dtype=np.int64)
        self._qkv = self._dense("qkv", shape.qkv_weights)
        self._finish = self._dense("out + mlp", shape.finish_weights)
        self._head = self._dense("head", shape.hidden * shape.vocabulary)

    # -- what a policy has beforehand -----------------------------------------------------------------------------

    def _region(self, memory: str, nbytes: int) -> Region:
        return self.platform.memory_owner(memory).alloc(nbytes, memory, phantom=True)

    def _dense(self, label: str, weights: int) -> Dense:
        shape = self.shape
        return Dense(label, 2 * shape.batch * weights, ITEM * weights, ITEM * 2 * shape.batch * shape.hidden)

    def _share(self, number: int, of: int, memory: str, projected: Region) -> _Share:
        """KV heads [number · h, (number + 1) · h) of all sequences, h = num_kv_heads / of."""
        shape, engine = self.shape, self.engine
        lane = engine.runner("attend", memory)
        if lane is None:
            raise ConfigurationError(f"nobody attends over bfloat16 rows on {memory}")
        heads = shape.num_kv_heads // of
        row = shape.head_dim * ITEM
        sequence, head = (a.reshape(-1) for a in np.meshgrid(np.arange(shape.batch), np.arange(heads), indexing="ij"))
        runs = np.stack([sequence, head, np.zeros_like(head)], axis=1)
        level = (-(-shape.context // shape.split_tokens) - 1).bit_length()
        local = np.stack([sequence, head, np.full_like(head, level), np.zeros_like(head)], axis=1)
        place = np.arange(len(runs)) * shape.context * row
        old = Spans.equal(place, shape.context * row)
        last = place + (shape.context - 1) * row
        half = len(runs) * shape.context * row
        values = Spans.equal(place + half, shape.context * row)
        mine = heads * shape.group * shape.head_dim * 4  # bytes of the queries of one sequence
        queries = 2 * half + np.arange(shape.batch) * mine
        regions = [self._region(memory, 2 * half + shape.batch * mine) for _ in range(shape.num_layers)]
        from_queries = np.arange(shape.batch) * of * mine + number * mine
        from_rows = np.arange(2 * shape.batch)[:, None] * shape.num_kv_heads * row + number * heads * row
        from_rows = shape.batch * of * mine + (from_rows + np.arange(heads) * row).reshape(-1)
        sizes = np.repeat([mine, row], [shape.batch, len(from_rows)])
        leaving = np.stack([np.concatenate([from_queries, from_rows]), sizes], axis=1)
        arriving = Spans(np.stack([np.concatenate([queries, last, last + half]), sizes], axis=1))
        return _Share(
            lane,
            self._region(memory, engine.state_nbytes(len(local))).all(),
            local + np.array([0, number * heads, 0, 0]),
            local,
            [Rows(runs, (Segment(r, old),), (Segment(r, values),)) for r in regions],
            [r.at(2 * half, shape.batch * mine) for r in regions],
            [Segment(r, arriving) for r in regions],
            Segment(projected, Spans(leaving)),
        )

    # -- the step -------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """Decode one token of every sequence."""
        after: list[Completion] = []
        for layer in range(self.shape.num_layers):
            after = [await self._layer(layer, after)]
        await self._launch(self._head, (), after)

    async def _layer(self, layer: int, after: Sequence[Completion]) -> Completion:
        engine = self.engine
        projected = [self._launch(self._qkv, self._projected, after)]
        returned = []
        for share in self._shares:
            arrived = engine.copy(share.leaving, share.arriving[layer], projected)
            attended = self._attend(share, layer, [arrived])
            returned.append(engine.copy(share.states, share.gpu_states, [attended]))
        merged = engine.merge(self._states, self._roots, self._positions, self._output, returned)
        await merged
        return self._launch(self._finish, (), [merged])

    def _attend(self, share: _Share, layer: int, after: Sequence[Completion]) -> Completion:
        """The device knows its own heads only, from 0; the roots that are merged name those of the model."""
        rows, shape = share.rows[layer], self.shape
        args = Attend(
            "bfloat16",
            shape.batch,
            len(rows.runs) // shape.batch,
            shape.group,
            1,
            shape.head_dim,
            shape.head_dim,
            shape.head_dim**-0.5,
            shape.split_tokens,
            rows.runs,
            self._positions,
            share.local_roots,
        )
        reads = (share.queries[layer],), rows.keys, rows.values
        return self.engine.launch(share.lane, args, reads, ((share.states,),), after)

    def _launch(self, args: Dense, writes: Sequence[tuple[Segment, ...]], after: Sequence[Completion]) -> Completion:
        return self.engine.launch(self.engine.dense, args, (), writes, after)

    def run(self) -> tuple[int, int]:
        """Run one step; returns ns of the virtual clock and the number of commands."""
        clock = self.platform.clock
        begun, commands = clock.now(), self._commands
        self.engine.loop.run(self.step())
        return clock.now() - begun, self._commands - commands

    def _count(self, _: Completion) -> None:
        self._commands += 1

    def close(self) -> None:
        """Close the platform."""
        self.engine.close()
        self.platform.close()

    def __enter__(self) -> PhantomDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
