"""NELSSA: short requests on the GPU, long ones on near-memory processors (arXiv 2607.26633, MICRO 2026).

Requests shorter than a threshold are attended densely on the GPU, the others sparsely by processors next to the memory
that holds their KV cache. One global batch goes through projections and MLP; attention alone branches, and its results
are joined by states (near_attention.py). Long requests keep attention sinks, the newest rows and centroids on the GPU;
their other rows are clustered and lie in near memories, divided by KV head (near_partition.py).

The threshold is where Eq. 3 sees the two branches meet (crossover.py), applied when a request comes and in every step.
A request that approaches it is copied in the background, piece by piece, `migrate_tokens` tokens of all layers per
step, while it is decoded on the GPU as before; between two steps it is handed over, one way, and nothing is computed
again.
When the GPU runs out of blocks the longest of its requests are handed over, however short they are; when near memories
are full, requests stay on the GPU as long as it has room. With `budget` 1, and without near memories in use, every row
is attended and the result is that of dense attention.

Where the paper is silent, or this deviates:

- Sinks are rounded up to whole blocks, since placements are cut at the borders of splits only.
- Which device attends over which states of the merge tree is fixed by positions, so results do not depend on who has
  what; a device returns a state per node, 10 to 20 of them, and not one per head.
- A segment of the index ends at multiples of `segment_tokens`; the paper's code divides each prompt evenly. Keys are
  not centred on their mean before they are clustered. Centroids are scored by the softmax of the published code.
- Steps of several tokens (chunks of prompts, later turns) attend densely: a prompt that fits stays on the GPU until all
  of it is there; what is near already is attended there or streamed to the GPU.
- A migration begins when a request has come within an eighth of the threshold.
- The closed loop (`adaptive`) is this policy's own: the paper leaves it to future work.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, ClassVar

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, OutOfMemory
from tierloop.runtime.batch_parts import part_of
from tierloop.runtime.blocks import K, Pool, TierTooSmall, V
from tierloop.runtime.crossover import crossover
from tierloop.runtime.crossover_estimate import estimate_constants
from tierloop.runtime.decisions import Grouping
from tierloop.runtime.engine import Engine
from tierloop.runtime.in_place import InPlaceAttention
from tierloop.runtime.loop import Task, yield_to_others
from tierloop.runtime.near_attention import NearAttention
from tierloop.runtime.near_memories import NearMemories, near_devices
from tierloop.runtime.near_moves import NearMoves, near_of
from tierloop.runtime.near_partition import PARTITIONS
from tierloop.runtime.near_request import NearRequest, Piece, Pieces
from tierloop.runtime.near_writer import NearWriter, centroid_dtype
from tierloop.runtime.paged_blocks import PagedBlocks
from tierloop.runtime.policy import (
    Batch,
    Int64,
    Policy,
    Request,
    number,
    share_above_zero,
    switched_off,
    whole_numbers,
)
from tierloop.runtime.stages import Float32
from tierloop.runtime.threshold_loop import ThresholdLoop

TAIL_SEGMENTS = 2
"""Segments of rows that wait on the GPU to be written, at most; then chunks of the prompt wait."""


class Nelssa(Policy):
    """Attends requests of `threshold_tokens` and more near the memory, `budget` (0 to 1) of their clusters."""

    name: ClassVar[str] = "nelssa"
    exact: ClassVar[bool] = False
    serves: ClassVar[bool] = True
    mechanisms: ClassVar[tuple[str, ...]] = ("near", "migration", "sparsity", "partition", "overlap")

    def __init__(
        self,
        engine: Engine,
        budget: float = 0.04,
        threshold_tokens: int = 0,
        threshold_scale: float = 1.0,
        adaptive: bool = False,
        sink_tokens: int = 16,
        local_tokens: int = 64,
        cluster_tokens: int = 16,
        segment_tokens: int = 8192,
        update_tokens: int = 1024,
        iterations: int = 10,
        partition: str = "head",
        near: Sequence[str] = (),
        migrate_tokens: int = 1024,
        watermark: float = 0.05,
        index_share: float = 0.25,
        without: Sequence[str] = (),
    ) -> None:
        super().__init__(engine)
        self.without = off = switched_off(type(self), without)
        share_above_zero(self.name, budget)
        whole_numbers(
            self.name,
            {
                "threshold_tokens": (threshold_tokens, 0),
                "sink_tokens": (sink_tokens, 0),
                "local_tokens": (local_tokens, 1),
                "cluster_tokens": (cluster_tokens, 1),
                "segment_tokens": (segment_tokens, 1),
                "update_tokens": (update_tokens, 1),
                "iterations": (iterations, 0, 1000),
                "migrate_tokens": (migrate_tokens, 1),
            },
        )
        number("nelssa: threshold_scale", threshold_scale, 0.01, 100)
        number("nelssa: watermark", watermark, 0, 0.5)
        number("nelssa: index_share", index_share, 0, 0.9)
        if not isinstance(adaptive, bool):
            raise ConfigurationError(f"nelssa: adaptive is {adaptive!r}; it must be true or false")
        if partition not in PARTITIONS:
            raise ConfigurationError(f"nelssa: partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}")
        if segment_tokens < cluster_tokens or update_tokens < cluster_tokens:
            raise ConfigurationError(
                f"nelssa: segment_tokens is {segment_tokens} and update_tokens {update_tokens}; both must be at least "
                f"cluster_tokens, which is {cluster_tokens}"
            )
        self._pieces = Pieces.rounded(
            self.shape,
            int(sink_tokens),
            int(local_tokens),
            int(segment_tokens),
            int(update_tokens),
            int(cluster_tokens),
        )
        self._budget = 1.0 if "sparsity" in off else budget
        devices = [] if "near" in off else near_devices(engine, self.name, near)
        if "partition" in off:
            devices = devices[:1]
        self._memories = NearMemories(engine, devices, partition, self._pieces)
        self._overlap = "overlap" not in off
        self.blocks = PagedBlocks(engine)
        self.blocks.reserved = lambda: self._memories.index_nbytes(index_share)
        self._attention = InPlaceAttention(engine)
        self._attention.check([engine.dense.memory])
        self._near = NearAttention(engine, self._budget, self._pieces.segment_tokens)
        self._writer = NearWriter(engine, int(cluster_tokens), int(iterations))
        migrates = "migration" not in off
        self._moves = NearMoves(self._memories, self.blocks, self._writer, int(migrate_tokens), watermark, migrates)
        self._given = float(threshold_tokens)
        self._threshold_scale = threshold_scale
        self._threshold = math.nan
        self._crossover: dict[str, Any] = {}
        self._loop = ThresholdLoop() if adaptive else None
        self._branches: list[tuple[Completion, Completion, int, bool]] = []
        """What began and ended the attention of a layer, of how many rows, or requests where it was near."""
        self._requests: list[Request] = []
        self._counts = dict.fromkeys(("gpu", "near"), 0)

    # -- the threshold ------------------------------------------------------------------------------------------------

    def _find_threshold(self) -> None:
        """From the option, or from Eq. 3 with what the devices estimate; infinite where near memories never win."""
        tokens = self._given
        if not tokens:
            tokens = math.inf
            self._memories.look()
            if self._memories.devices:
                tokens = self._crossover_tokens()
        self._threshold = tokens * self._threshold_scale

    def _crossover_tokens(self) -> float:
        """What Eq. 3 says; where there is no room even to ask, there is none to use."""
        item = centroid_dtype(self.shape.dtype)
        try:
            constants = estimate_constants(
                self.engine, self._memories.devices, self._budget, self._pieces.cluster_tokens, item
            )
        except OutOfMemory as error:
            self._crossover = {"tokens": None, "reason": str(error)}
            return math.inf
        found = crossover(constants)
        self._crossover = {"constants": constants.as_dict(), "tokens": found.tokens, "reason": found.reason}
        return math.inf if found.tokens is None else found.tokens

    def _learn(self) -> None:
        """Tell the closed loop what the branches of the last step took."""
        if self._loop is not None:
            for began, ended, amount, is_near in self._branches:
                self._loop.learn(ended.ended_ns - began.ended_ns, amount, is_near)
            self._branches.clear()
            self._threshold = self._loop.next(self._threshold)

    # -- admission ----------------------------------------------------------------------------------------------------

    async def admit(self, request: Request) -> None:
        if math.isnan(self._threshold):
            self._find_threshold()
        tokens = len(request.tokens)
        is_long = bool(self._memories.devices) and self._threshold <= tokens
        refusals: list[TierTooSmall] = []
        for near in (True, False) if is_long else (False, True):
            try:
                if near:
                    await self._admit_near(request, tokens)
                else:
                    self.blocks.admit_whole(request)
                break
            except TierTooSmall as error:
                refusals.append(error)
        else:
            raise TierTooSmall("; and ".join(map(str, refusals)))
        self._counts["near" if near else "gpu"] += 1
        self._requests.append(request)

    async def _admit_near(self, request: Request, tokens: int) -> None:
        pieces = self._pieces
        if pieces.room(tokens) == pieces.first and self._threshold > tokens:
            raise TierTooSmall(f"{request.name} is too short to be clustered")
        near = self._memories.open(request, attends=True)
        try:
            if request.in_steps:
                near.at_once = True
                near.attends = not self._has_room(request, tokens)
            if not request.is_served:
                reach = pieces.reach(request.prompt_tokens, request.prompt_tokens)
                there = (reach - pieces.first) // pieces.block_tokens
                self.blocks.own(request, self.shape.num_blocks(request.max_tokens) - there)
            elif near.attends:
                here = self._kept_tokens() + request.in_steps * TAIL_SEGMENTS * pieces.segment_tokens
                self.blocks.admit(request, min(tokens, here, self.blocks.capacity_tokens))
        except BaseException:
            await self._memories.close(near)
            raise
        request.state["near"] = near

    def _kept_tokens(self) -> int:
        """Tokens of a request that lie on the GPU while it is attended near the memory, at most."""
        pieces = self._pieces
        return pieces.first + pieces.local_tokens + pieces.update_tokens + 2 * pieces.block_tokens

    def _has_room(self, request: Request, tokens: int) -> bool:
        """Whether a prompt can stay on the GPU until all of it is there: its rows need not come back for each chunk.

        Raises TierTooSmall where it could if it waited for those that are about to leave.
        """
        try:
            self.blocks.admit(request, tokens)
        except TierTooSmall:
            leaving = any(near is not None and not near.attends for near in map(near_of, self._requests))
            if leaving and self.blocks.could_hold(tokens):
                raise
            return False
        return True

    async def release(self, request: Request) -> None:
        if request in self._requests:
            self._requests.remove(request)
        near = request.state.get("near")
        try:
            if near is not None:
                await self._memories.close(near, request.failure)
        finally:
            own = self.blocks.release(request)
            await super().release(request)
            if own is not None:
                self.engine.drop_pool(own)

    # -- prompts ------------------------------------------------------------------------------------------------------

    async def place(self, request: Request, layer: int, keys: Float32, values: Float32) -> None:
        near, shape = near_of(request), self.shape
        if near is None:
            self.blocks.grow_whole(request)
            await super().place(request, layer, keys, values)
            return
        if layer == 0:
            end = near.pieces.reach(keys.shape[1], near.prompt_tokens)
            self.blocks.grow(request, min(near.pieces.first, request.max_tokens))
            self.blocks.skip(request, end // shape.block_tokens)
            self.blocks.grow_whole(request)
        await super().place(request, layer, keys, values)
        if layer == 0:
            self._moves.start_pieces(request, near)
        if not self.engine.phantom:
            of_keys, of_values = (self.stored_rows(request, layer, *side) for side in ((K, keys), (V, values)))
            for piece in near.under_way:
                low, high = piece.low, piece.high
                await self._writer.write_rows(near, piece, layer, of_keys[:, low:high], of_values[:, low:high])
        if layer + 1 == shape.num_layers:
            for piece in list(near.under_way):
                if self.engine.phantom:
                    self._pretend(near, piece)
                near.publish(piece)

    def _pretend(self, near: NearRequest, piece: Piece) -> None:
        """A prompt of a phantom run that is there from the beginning: nothing is written, and no time passes."""
        rows, heads = piece.high - piece.low, self.shape.num_kv_heads
        for layer in range(self.shape.num_layers):
            grouping = Grouping(f"clusters {near.name}", layer, near.name, piece.high, heads, rows, piece.clusters)
            piece.labels[layer] = self.engine.grouped(grouping)
        piece.waiting.clear()

    def grow(self, request: Request, num_tokens: int) -> None:
        self.blocks.grow(request, num_tokens)

    def is_ready(self, request: Request) -> bool:
        near = near_of(request)
        if near is None or not near.attends or request.table is None:
            return True
        waiting = int(request.table.length[0]) - near.end
        moving = bool(near.under_way) or self._moves.is_due(request, near)
        most = min(TAIL_SEGMENTS * near.pieces.segment_tokens, self.blocks.capacity_tokens // 2)
        return waiting <= most or not moving

    async def something_moved(self) -> None:
        await self.step_begins([])
        if any(near is not None and near.attends and near.under_way for near in map(near_of, self._requests)):
            await self._writer.written
            await self.step_begins([])

    async def prompt_is_stored(self, request: Request) -> None:
        near = near_of(request)
        if near is None or not (near.attends or near.at_once):
            return
        await self._moves.write_all(request, near)
        near.at_once = False
        self.blocks.promise(request, self._kept_tokens())

    def layout(self, request: Request, layer: int, side: int, head: int, blocks: Int64) -> list[tuple[Pool, Int64]]:
        return []  # they have their places since `grow`

    async def step_begins(self, requests: Sequence[Request]) -> None:
        self._learn()
        await self._moves.step_begins(self._requests, self._threshold)

    # -- attention ----------------------------------------------------------------------------------------------------

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        appended = self.append(layer, batch)
        nears = [near_of(r) for r in batch.requests]
        there = [i for i, n in enumerate(nears) if n is not None and n.attends]
        here = [i for i in range(len(nears)) if i not in there]
        mine = batch
        begun: Awaitable[list[Completion]] | None = None
        if there:
            mine, held = part_of(batch, there), [n for n in nears if n is not None and n.attends]
            branch = self._near.attend(layer, mine, appended, held)
            begun = await self._begin_search(branch) if self._overlap and here else branch
        done = self._attention.attend(layer, part_of(batch, here), appended) if here else []
        if here and self._loop is not None and batch.q_len == 1:
            rows = sum(int(batch.positions[i, -1]) + 1 for i in here)
            self._branches.append((batch.ready, done[-1], rows, False))
        if begun is not None:
            for completion in [] if self._overlap else done:
                await completion
            near = await begun
            if self._loop is not None and batch.q_len == 1:
                self._branches.append((batch.ready, near[-1], len(there), True))
            done = [*done, *near]
            for number, i in enumerate(there):
                batch.attended_rows[i] = mine.attended_rows[number]
                failure = batch.requests[i].failure
                if failure is not None:
                    self._memories.lost(failure)
        return done

    async def _begin_search(self, near: Coroutine[Any, Any, list[Completion]]) -> Task[list[Completion]]:
        """Let the near branch give the GPU its search before the dense branch does: devices work beside that one."""
        task = self.engine.loop.spawn(near)
        await yield_to_others(self.engine.loop)
        return task

    def could_hold(self, num_tokens: int) -> bool:
        near = self._memories.could_hold() + self._pieces.first + self._pieces.local_tokens
        return num_tokens <= max(self.blocks.capacity_tokens, near)

    def frees(self, request: Request) -> bool:
        near = near_of(request)
        return near is None or not near.attends

    def free_nbytes(self) -> dict[str, int]:
        here = {self.blocks.memory: self.blocks.free * self.blocks.pool.slot_nbytes}
        return here | self._memories.free_nbytes()

    def placement(self, request: Request) -> dict[str, int]:
        held = super().placement(request)
        near = near_of(request)
        for memory, nbytes in ({} if near is None else near.rows.nbytes()).items():
            held[memory] = held.get(memory, 0) + nbytes
        return held

    async def swap_out(self, request: Request) -> None:
        if near_of(request) is not None:
            raise TierTooSmall(f"{request.name} is on its way to near memories, and is not swapped")
        await self.blocks.swap_out(request)

    async def swap_in(self, request: Request) -> None:
        await self.blocks.swap_in(request)

    def report(self) -> dict[str, Any]:
        return {
            "threshold_tokens": self._threshold if math.isfinite(self._threshold) else None,
            "crossover": self._crossover,
            "selected_rows": self._near.selected,
            "requests": {
                **self._counts,
                "migrated": self._moves.migrated,
                "forced": self._moves.forced,
                "stayed": len(self._moves.stayed),
            },
            "devices": [device.memory for device in self._memories.devices],
        }
