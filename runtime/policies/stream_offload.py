"""Streaming offload: the KV cache lies in host memory, CXL and a drive by percentage, and streams to the GPU each step.

FlexGen's decode with its cache offloaded: attention runs on the GPU over a buffer that holds two layers, and while one
layer is computed the next one is fetched. Rows on the drive go through host memory. New rows stay in host memory and
are put straight into the buffer as well. Deviations from FlexGen: no CPU attention, percentages are given rather than
found by a linear program, and they hold for the prompt only. FlexGen compresses the cache to 4 bits by groups and
decompresses it on the GPU before attention; here 8-bit rows cross the links as codes and are attended as codes, which
saves the decompressed copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K, Rows, V, join
from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import Placed
from tierloop.runtime.policy import Batch, Int64, Request

PERCENT: dict[str, float] = {"cpu": 50.0, "cxl": 30.0, "nvme": 20.0}
"""Default percentages by kind of device, for the kinds that the platform has."""


class StreamOffload(Placed):
    """`percent` maps memory names to percentages (default: 50 host, 30 CXL, 20 drive, rescaled to what is there)."""

    name: ClassVar[str] = "stream-offload"

    def __init__(self, engine: Engine, percent: Mapping[str, float] | None = None) -> None:
        host = engine.host
        if percent is None:
            percent = {host: PERCENT["cpu"]}
            for kind in ("cxl", "nvme"):
                percent |= {m.name: PERCENT[kind] for m in engine.memories(kind)[:1]}
        if not isinstance(percent, Mapping):
            raise ConfigurationError(f"stream-offload: percent is a table of memories and percentages, not {percent!r}")
        order = sorted(percent, key=lambda m: m == host)
        super().__init__(engine, {m: percent[m] for m in order}, host)
        self._gpu = engine.dense
        if not self._gpu.reaches(host):
            raise ConfigurationError(f"stream-offload: {self._gpu.device.info.name} does not reach {host}")
        for memory in order:
            if engine.mover(memory, self._gpu.memory) is None and engine.mover(memory, host) is None:
                raise ConfigurationError(f"stream-offload: nobody copies from {memory} to {host}")
        self._serving: Request | None = None
        self._readers: list[list[Completion]] = [[], []]
        """Who still reads each half of the buffer."""
        self._bounces: list[list[Completion]] = [[], []]
        """Who still reads each half of the host staging buffer."""

    async def admit(self, request: Request) -> None:
        if self._serving is not None:
            raise ConfigurationError("stream-offload serves one request at a time; its buffer holds two layers of one")
        await super().admit(request)
        shape = self.shape
        width = shape.num_blocks(request.max_tokens)
        half = 2 * shape.num_kv_heads * width * shape.block_nbytes
        request.state["width"] = width
        request.state["half"] = half
        request.state["fetched"] = {}
        request.state["appended"] = {}
        request.state["buffer"] = self.engine.scratch(self._gpu.memory, 2 * half)
        far = [p for m, p in request.state["pools"].items() if self.engine.mover(m, self._gpu.memory) is None]
        slots = 4 * shape.num_kv_heads * width
        request.state["bounce"] = (
            self.engine.scratch(self.engine.host, slots * max(p.slot_nbytes for p in far)) if far else None
        )
        self._serving = request

    async def layer_input(self, layer: int, batch: Batch) -> None:
        request = batch.requests[0]
        self._fetch(request, layer)
        if layer + 1 < self.shape.num_layers:
            self._fetch(request, layer + 1)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        (request,) = batch.requests
        fetched = request.state["fetched"].pop(layer)
        self.open_blocks(layer, batch)
        appended = self.append(layer, batch)
        keys, values = self._new_rows(request, layer, batch)
        stored = self.store_rows(layer, batch, (keys,), (values,), fetched)
        heads, blocks = request.blocks.all_blocks(layer)
        rows = self._buffered(request, layer)
        length = int(request.blocks.length[layer])
        mine = {(0, head): self.splits(blocks[heads == head], length) for head in range(self.shape.num_kv_heads)}
        roots = self.engine.roots(mine, {})
        states = self._states(request, layer, self.engine.state_nbytes(len(roots), batch.q_len))
        done = self.engine.attend(
            self._gpu, batch.queries, join([rows]), batch.positions, batch.scale, roots, states, [*fetched, stored]
        )
        self._readers[layer % 2] = [done]
        return [self.engine.merge([states], roots, batch.positions, batch.output, [done]), appended]

    async def release(self, request: Request) -> None:
        for completions in request.state.get("fetched", {}).values():
            for completion in completions:
                await completion
        kept = [request.state.get(name) for name in ("buffer", "bounce", "states")]
        await super().release(request)
        if self._serving is request:
            self._serving = None
        for region in kept:
            if region is not None:
                self.engine.drop(region)

    def _fetch(self, request: Request, layer: int) -> None:
        """Start copying a layer's stored rows into its half of the buffer, one copy per memory and hop."""
        fetched: dict[int, list[Completion]] = request.state["fetched"]
        if layer in fetched:
            return
        shape, table = self.shape, request.blocks
        heads, blocks = table.all_blocks(layer)
        half = layer % 2
        rows = np.minimum(shape.block_tokens, int(table.length[layer]) - blocks * shape.block_tokens)
        done: list[Completion] = []
        bounced: list[Completion] = []
        for side in (K, V):
            nbytes = rows * shape.row_nbytes(side)
            pools = table.pool[layer, side, heads, blocks]
            offsets = table.offset[layer, side, heads, blocks]
            targets = self._place(request, half, side, heads, blocks)
            for number in np.unique(pools).tolist():
                pool, mine = table.pools[number], pools == number
                source = Segment(pool.region, _spans(offsets[mine], nbytes[mine]))
                target = Segment(request.state["buffer"], _spans(targets[mine], nbytes[mine]))
                lane = self.engine.mover(pool.memory, self._gpu.memory)
                if lane is not None:
                    done.append(lane.submit(Copy(source, target), self._readers[half]))
                    continue
                bounce = self._bounce(request, half, side, heads[mine], blocks[mine], pool.slot_nbytes)
                whole = Segment(pool.region, Spans.equal(offsets[mine], pool.slot_nbytes))
                staged = Segment(request.state["bounce"], Spans.equal(bounce, pool.slot_nbytes))
                first = self.engine.copy(whole, staged, self._bounces[half])
                staged = Segment(request.state["bounce"], _spans(bounce, nbytes[mine]))
                done.append(self.engine.copy(staged, target, [first, *self._readers[half]]))
                bounced.append(done[-1])
        if bounced:
            self._bounces[half] = bounced
        fetched[layer] = done

    def _place(self, request: Request, half: int, side: int, heads: Int64, blocks: Int64) -> Int64:
        """Offsets of blocks in the buffer: [half, side, head, block]."""
        width = request.state["width"]
        start = ((half * 2 + side) * self.shape.num_kv_heads + heads) * width * self.shape.block_nbytes
        return np.asarray(start + blocks * self.shape.block_tokens * self.shape.row_nbytes(side), dtype=np.int64)

    def _bounce(self, request: Request, half: int, side: int, heads: Int64, blocks: Int64, nbytes: int) -> Int64:
        """Offsets of blocks in the host's staging buffer, whose slots have the drive's size."""
        slot = ((half * 2 + side) * self.shape.num_kv_heads + heads) * request.state["width"] + blocks
        return np.asarray(slot * nbytes, dtype=np.int64)

    def _buffered(self, request: Request, layer: int) -> Rows:
        """The whole layer as rows of the buffer: one run per KV head."""
        shape, buffer = self.shape, request.state["buffer"]
        heads = np.arange(shape.num_kv_heads, dtype=np.int64)
        runs = np.zeros((len(heads), 3), dtype=np.int64)
        runs[:, 1] = heads
        length = int(request.blocks.length[layer])
        operands = []
        for side in (K, V):
            starts = self._place(request, layer % 2, side, heads, np.zeros_like(heads))
            operands.append((Segment(buffer, Spans.equal(starts, length * shape.row_nbytes(side))),))
        return Rows(runs, operands[0], operands[1])

    def _new_rows(self, request: Request, layer: int, batch: Batch) -> tuple[Segment, ...]:
        """Where the buffer takes the new K rows, then the new V rows: head-major, one span per row."""
        positions = np.tile(batch.positions[0], self.shape.num_kv_heads)
        heads = np.repeat(np.arange(self.shape.num_kv_heads, dtype=np.int64), batch.q_len)
        blocks = positions // self.shape.block_tokens
        segments = []
        for side in (K, V):
            nbytes = self.shape.row_nbytes(side)
            offsets = (
                self._place(request, layer % 2, side, heads, blocks) + positions % self.shape.block_tokens * nbytes
            )
            segments.append(Segment(request.state["buffer"], Spans.equal(offsets, nbytes)))
        return tuple(segments)

    def _states(self, request: Request, layer: int, nbytes: int) -> Segment:
        per_layer = -(-nbytes // 64) * 64
        region: Region | None = request.state.get("states")
        if region is None or region.nbytes < per_layer * self.shape.num_layers:
            if region is not None:
                self.engine.drop(region)
            region = self.engine.scratch(self._gpu.memory, per_layer * self.shape.num_layers)
            request.state["states"] = region
        return region.at(layer * per_layer, nbytes)


def _spans(offsets: Int64, nbytes: Int64) -> Spans:
    return Spans(np.stack((offsets, nbytes), axis=1))
