"""A small decode over five tiers with real bytes and kernels: the scenario that is run on two clocks (two_clocks.py).

Synthetic tensors instead of a model. Every layer's KV lies on a drive, near-memory, CXL, host and GPU memory, in this
order of positions; the newest rows are appended on the GPU. Per layer: qkv on the GPU, queries to whoever attends, the
drive's rows staged in host memory, attention where the rows are, states back, merge, MLP. Seeded; needs a platform with
one memory of each kind and little else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import KVShape, Rows
from tierloop.runtime.engine import Engine, Lane

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]
BATCH, KV_HEADS, GROUP, HEAD_DIM, SPLIT = 2, 2, 4, 64, 64
ROW = HEAD_DIM * 4
TOKENS = {"nvme": 512, "pnm": 4096, "cxl": 2048, "cpu": 8192, "gpu": 4096}
"""Tokens of each sequence per kind of memory, oldest first: about as long for each tier of the platform `demo`."""
_WEIGHTS_NBYTES = 4 << 20
_MOST_ROOTS = 32
"""Of one sequence and head on one tier: a run of n splits is covered by fewer than 2 · log2(n) nodes."""


@dataclass(frozen=True)
class Size:
    """How much of it: layers, steps, and by how much every tier holds fewer tokens (a power of two up to 8)."""

    num_layers: int = 2
    num_steps: int = 3
    shrink: int = 1


@dataclass
class _Tier:
    """Rows [first, first + tokens) of each sequence and head; room for `room` of them, per layer and side."""

    kind: str
    first: int
    tokens: int
    room: int
    regions: list[tuple[Region, Region]]
    lane: Lane
    queries: Segment
    states: Region
    staged: tuple[Region, Region] | None = None
    reader: list[Completion] = field(default_factory=list)
    """Who reads the staged rows last."""

    def runs(self) -> Int64:
        """int64 (n, 3): one run for each sequence and head."""
        return np.array([(s, h, self.first) for s in range(BATCH) for h in range(KV_HEADS)], dtype=np.int64)

    def spans(self) -> Spans:
        """Where the rows lie in a region of the tier: one span per run."""
        return Spans.equal(np.arange(BATCH * KV_HEADS) * self.room * ROW, self.tokens * ROW)


class TieredDecode:
    """The scenario on an open platform. Raises ConfigurationError where a kind of memory is missing."""

    def __init__(self, platform: Platform, size: Size, seed: int = 0) -> None:
        self.platform = platform
        self._layers, self._steps = size.num_layers, size.num_steps
        self._noise = np.random.default_rng(seed)
        self._seed = seed
        self._digest = hashlib.sha256()
        self.engine = Engine(
            platform, KVShape(size.num_layers, KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM, "float32", SPLIT, SPLIT)
        )
        gpu = self.engine.dense.memory
        self._queries = self.engine.scratch(gpu, BATCH * KV_HEADS * GROUP * HEAD_DIM * 4)
        self._output = self.engine.scratch(gpu, self._queries.nbytes)
        first = 0
        self._tiers = []
        for kind, tokens in TOKENS.items():
            self._tiers.append(self._tier(kind, first, tokens // size.shrink))
            first += tokens // size.shrink
        self._states = self.engine.scratch(gpu, len(self._tiers) * self._tiers[0].states.nbytes)

    def _tier(self, kind: str, first: int, tokens: int) -> _Tier:
        engine = self.engine
        memory = engine.memory(kind)
        nbytes = BATCH * KV_HEADS * (tokens + (self._steps if kind == "gpu" else 0)) * ROW
        regions = [(engine.scratch(memory, nbytes), engine.scratch(memory, nbytes)) for _ in range(self._layers)]
        staged = None
        lane = engine.runner("attend", memory)
        if kind == "nvme":
            staged = (engine.scratch(engine.host, nbytes), engine.scratch(engine.host, nbytes))
            lane = engine.runner("attend", engine.host)
        if lane is None:
            raise ConfigurationError(f"platform {self.platform.name}: nobody attends over {memory}")
        others = [tier for tier in self._tiers if tier.lane.device is lane.device]
        queues = lane.executor.queues
        lane = replace(lane, queue=queues[len(others) % len(queues)])
        if lane.device is engine.dense.device:
            queries = self._queries.all()
        else:
            queries = others[0].queries if others else engine.scratch(lane.memory, self._queries.nbytes).all()
        states = engine.scratch(lane.memory, engine.state_nbytes(BATCH * KV_HEADS * _MOST_ROOTS))
        return _Tier(kind, first, tokens, nbytes // (BATCH * KV_HEADS * ROW), regions, lane, queries, states, staged)

    async def place(self) -> None:
        """Write the cache: standard normal keys and values."""
        for tier in self._tiers:
            for region in (region for pair in tier.regions for region in pair):
                values = self._noise.standard_normal(region.nbytes // 4, dtype=np.float32)
                await self.engine.write(region.all(), values.view(np.uint8))

    async def decode(self) -> None:
        """All steps, one token of each sequence at a time."""
        after: list[Completion] = []
        for step in range(self._steps):
            for tier in self._tiers:
                tier.tokens += tier.kind == "gpu"
            for layer in range(self._layers):
                after = [await self._layer(step, layer, after)]
        await after[0]

    async def _layer(self, step: int, layer: int, after: list[Completion]) -> Completion:
        engine, gpu = self.engine, self._tiers[-1]
        new = Spans.equal((np.arange(BATCH * KV_HEADS) * gpu.room + gpu.tokens - 1) * ROW, ROW)
        writes = [(self._queries.all(),), *((Segment(region, new),) for region in gpu.regions[layer])]

        def project(_: list[Bytes], into: list[Bytes]) -> None:
            noise = np.random.default_rng((self._seed, step, layer))
            for array in into:
                array[:] = noise.standard_normal(len(array) // 4, dtype=np.float32).view(np.uint8)

        def finish(reads: list[Bytes], _: list[Bytes]) -> None:
            self._digest.update(reads[0].tobytes())

        ready = engine.launch(engine.dense, Dense("qkv", 0, _WEIGHTS_NBYTES, 0, project), (), writes, after)
        asked = {id(gpu.queries.region): ready}
        positions = np.full((BATCH, 1), gpu.first + gpu.tokens - 1, dtype=np.int64)
        roots, states, returned = [], [], []
        offset = 0
        for tier in self._tiers:
            region = tier.queries.region
            if id(region) not in asked:
                asked[id(region)] = engine.copy(self._queries.all(), tier.queries, [ready])
            mine = self._roots(tier)
            nbytes = engine.state_nbytes(len(mine))
            done = self._attend(tier, layer, positions, mine, [asked[id(region)]])
            home = self._states.at(offset, nbytes)
            roots.append(mine)
            states.append(home)
            returned.append(engine.copy(tier.states.at(0, nbytes), home, [done]))
            offset += nbytes
        merged = engine.merge(states, np.concatenate(roots), positions, self._output.all(), returned)
        await merged
        cost = Dense("mlp", 0, _WEIGHTS_NBYTES, 0, finish)
        return engine.launch(engine.dense, cost, ((self._output.all(),),), (), [merged])

    def _attend(self, tier: _Tier, layer: int, positions: Int64, roots: Int64, after: list[Completion]) -> Completion:
        engine, regions, spans = self.engine, tier.regions[layer], tier.spans()
        if tier.staged is not None:
            regions = tier.staged
            pairs = zip(tier.regions[layer], tier.staged, strict=True)
            after = [*after, *[engine.copy(far.all(), near.all(), tier.reader) for far, near in pairs]]
        keys, values = (Segment(region, spans) for region in regions)
        rows = Rows(tier.runs(), (keys,), (values,))
        states = tier.states.at(0, engine.state_nbytes(len(roots)))
        done = engine.attend(tier.lane, tier.queries, rows, positions, HEAD_DIM**-0.5, roots, states, after)
        tier.reader = [done]
        return done

    def _roots(self, tier: _Tier) -> Int64:
        """The nodes that the tier returns for each sequence and head."""

        def splits(of: _Tier) -> Int64:
            return np.arange(of.first // SPLIT, -(-(of.first + of.tokens) // SPLIT))

        mine = splits(tier)
        others = np.concatenate([splits(other) for other in self._tiers if other is not tier])
        pairs = [(s, h) for s in range(BATCH) for h in range(KV_HEADS)]
        return self.engine.roots(dict.fromkeys(pairs, mine), dict.fromkeys(pairs, others))

    def digest(self) -> str:
        """SHA-256 of every attention output so far, in order."""
        return self._digest.hexdigest()
