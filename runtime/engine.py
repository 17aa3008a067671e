"""The engine: finds executors and moves bytes for policies, on whatever devices are present.

It knows devices by their info alone. A policy asks for roles (who runs the modules, who can attend over a memory, who
can copy from here to there); the engine answers with a `Lane`: a device and one of its queues. Preferences: a memory's
own device first, then copy engines, then cores, then the order of the platform file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Copy, Launch, Operand, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, Gone, OutOfMemory, Unsupported
from tierloop.devices.info import ExecutorInfo, MemoryInfo
from tierloop.devices.kernels.contract import Attend, KernelArgs, Merge
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.states import Node, cover
from tierloop.runtime.blocks import BlockTable, KVShape, Pool, Rows, TierTooSmall
from tierloop.runtime.decisions import AsRead, Decisions, Grouping, Question
from tierloop.runtime.key_scales import KeyScales
from tierloop.runtime.loop import Loop
from tierloop.runtime.stage_times import StageTimes

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lane:
    """A queue of an executor: where commands are submitted. The engine has one lane per executor; compare with `is`."""

    device: Device
    executor: ExecutorInfo
    queue: int

    def submit(self, command: Command, after: Sequence[Completion] = ()) -> Completion:
        """Submit to this lane."""
        return self.device.submit(command, self.queue, after)

    def reaches(self, memory: str) -> bool:
        """Whether the executor has a path to a memory."""
        return self.executor.path(memory) is not None

    @property
    def memory(self) -> str:
        """The memory of the lane's own device, where its scratch lies. Raises Unsupported where there is none."""
        if not self.device.info.memories:
            raise Unsupported(self.device.info.name, "scratch", "the executor's device has no memory of its own")
        return self.device.info.memories[0].name


@dataclass
class _Relay:
    """Host memory on the way between two regions, and the copy that reads it last."""

    region: Region
    readers: list[Completion] = field(default_factory=list)


class Engine:
    """What a policy works with: the platform, the loop, the cache's shape, and the roles of executors.

    In a `phantom` run regions have no bytes: commands take their time, nothing is computed, and `decisions` say what
    the devices would have chosen. Raises ConfigurationError where nobody runs the dense layers, or who does cannot
    store rows of the cache's type.
    """

    def __init__(
        self, platform: Platform, shape: KVShape, *, phantom: bool = False, decisions: Decisions | None = None
    ) -> None:
        self.platform = platform
        self.shape = shape
        self.phantom = phantom
        self._decisions = decisions or AsRead()
        self.stages = StageTimes()
        self.loop = Loop(platform.clock)
        self._all_lanes = [Lane(d, e, e.queues[0]) for d, e in platform.executors()]
        self.dense = self._dense_lane()
        self._check_storing()
        platform.site.observers.append(self.stages)
        self._regions: list[Region] = []
        self._movers: dict[tuple[str, str], Lane | None] = {}
        self._roots: dict[tuple[bytes, bytes], list[Node]] = {}
        self._pools: list[Pool] = []
        self._placed: Counter[str] = Counter()
        """Blocks of pools that are gone."""
        self._claims: list[Region] = []
        self._limits: dict[str, int] = {}
        self._relays: dict[tuple[str, int, str, int], _Relay] = {}

    # -- memories -------------------------------------------------------------------------------------------------

    def memories(self, *kinds: str) -> list[MemoryInfo]:
        """Memories of devices of these kinds, in the platform's order."""
        return [m for d, m in self.platform.memories() if not kinds or d.info.kind in kinds]

    def memory(self, *kinds: str) -> str:
        """The first memory of such a device. Raises ConfigurationError if the platform has none."""
        found = self.memories(*kinds)
        if not found:
            raise ConfigurationError(f"platform {self.platform.name} has no {' or '.join(kinds)} memory")
        return found[0].name

    @property
    def host(self) -> str:
        """The memory that host buffers live in: the platform's `host`, else the first of kind cpu."""
        return self.platform.host or self.memory("cpu")

    def info(self, memory: str) -> MemoryInfo:
        """What a memory is."""
        info = self.platform.memory_owner(memory).info.memory(memory)
        assert info is not None, "memories are asked for by name"
        return info

    def limit(self, memory: str, nbytes: int) -> None:
        """Let pools and claims on a memory take no more than so many bytes together; the rest is others'."""
        self._limits[memory] = nbytes

    def is_limited(self, memory: str) -> bool:
        """Whether `limit` was called for the memory."""
        return memory in self._limits

    def room(self, memory: str) -> int:
        """Bytes that pools and claims may still take of a memory, as far as the engine knows who else has some.

        Of what a limit leaves, half stays free for working space that grows.
        """
        pools = sum(pool.region.nbytes for pool in self._pools if pool.memory == memory)
        info = self.info(memory)
        room = info.capacity - pools - sum(r.nbytes for r in self._regions if r.memory == memory)
        if memory in self._limits:
            limit = self._limits[memory]
            claims = sum(r.nbytes for r in self._claims if r.memory == memory)
            room = min(room - max(info.capacity - limit, 0) // 2, limit - pools - claims)
        return room

    def pool(self, memory: str, num_slots: int, slot_nbytes: int = 0) -> Pool:
        """Cut `num_slots` slots (default: of a block's size) out of a memory. Raises TierTooSmall."""
        slot_nbytes = slot_nbytes or self.shape.block_nbytes
        self._check_limit(memory, num_slots * slot_nbytes, f"{num_slots} blocks of {slot_nbytes} bytes")
        pool = Pool(self.platform.memory_owner(memory), memory, num_slots, slot_nbytes, self.phantom)
        self._pools.append(pool)
        return pool

    def _check_limit(self, memory: str, nbytes: int, what: str) -> None:
        if memory in self._limits and nbytes > self.room(memory):
            raise TierTooSmall(
                f"{memory} is too small: {nbytes:,} bytes are needed there for {what}, "
                f"{max(self.room(memory), 0):,} of {self._limits[memory]:,} are left"
            )

    def drop_pool(self, pool: Pool) -> None:
        """Give a pool back before the engine closes."""
        self._pools.remove(pool)
        self.count_placed(pool.memory, pool.handed_out)
        pool.close()

    def count_placed(self, memory: str, count: int) -> None:
        """Room was taken for that many blocks of a memory, elsewhere than in a pool that stands."""
        self._placed[memory] += count

    @property
    def blocks_placed(self) -> dict[str, int]:
        """Blocks (of kvdrive: entries) that room was taken for so far, by each memory that any lie on."""
        placed = self._placed.copy()
        for pool in self._pools:
            placed[pool.memory] += pool.handed_out
        return dict(placed)

    def scratch(self, memory: str, nbytes: int) -> Region:
        """Working space on a memory, freed with the engine."""
        device = self.platform.memory_owner(memory)
        info = device.info.memory(memory)
        grid = info.alignment if info else 1
        region = device.alloc(max(-(-nbytes // grid) * grid, grid), memory, self.phantom)
        self._regions.append(region)
        return region

    def claim(self, memory: str, nbytes: int, what: str) -> Region:
        """Like `scratch`. Raises TierTooSmall that says what was to come there."""
        self._check_limit(memory, nbytes, what)
        try:
            region = self.scratch(memory, nbytes)
        except OutOfMemory as error:
            why = error.detail.partition(": ")[2] or error.detail
            raise TierTooSmall(
                f"{memory} is too small: {nbytes:,} bytes are needed there for {what} ({why})"
            ) from error
        self._claims.append(region)
        return region

    def table(self, max_tokens: int) -> BlockTable:
        """A block table for one request, with room for the scales of its keys where they are codes.

        `Policy.release` gives it back. Raises TierTooSmall.
        """
        shape = self.shape
        if not shape.has_codes:
            return BlockTable(shape, max_tokens)
        size = shape.num_layers, shape.num_kv_heads, shape.head_dim
        region = self.claim(self.dense.memory, KeyScales.nbytes(*size), "scales of keys")
        return BlockTable(shape, max_tokens, KeyScales(*size, shape.dtype, region))

    def drop(self, region: Region) -> None:
        """Give scratch back before the engine closes; what lay on a device that is gone has gone with it."""
        self._regions.remove(region)
        if region in self._claims:
            self._claims.remove(region)
        with suppress(Gone):
            self.platform.free(region)

    def close(self) -> None:
        """Free scratch and pools; the platform stays open."""
        if self.stages in self.platform.site.observers:
            self.platform.site.observers.remove(self.stages)
        for pool in self._pools:
            with suppress(Gone):
                pool.close()
        for region in self._regions:
            with suppress(Gone):
                self.platform.free(region)
        self._pools.clear()
        self._regions.clear()
        self._claims.clear()

    # -- roles ----------------------------------------------------------------------------------------------------

    def _dense_lane(self) -> Lane:
        lanes = self._lanes(kernel="dense")
        if not lanes:
            raise ConfigurationError(f"platform {self.platform.name}: no executor runs the model's dense layers")
        return min(lanes, key=lambda lane: lane.executor.kind != "gpu")

    def _check_storing(self) -> None:
        executor, dtype = self.dense.executor, self.shape.dtype
        if self.shape.has_codes and ("quantize" not in executor.kernels or dtype not in executor.dtypes):
            raise ConfigurationError(
                f"{self.dense.device.info.name} runs the modules and stores new rows, but does not quantize to "
                f"{dtype}; its types are {', '.join(sorted(executor.dtypes)) or 'none'}"
            )

    def _lanes(self, kernel: str = "", verb: str = "") -> list[Lane]:
        return [
            lane
            for lane in self._all_lanes
            if (not kernel or kernel in lane.executor.kernels) and (not verb or verb in lane.executor.verbs)
        ]

    def runner(self, kernel: str, memory: str) -> Lane | None:
        """Who can run a kernel on rows of a memory, or None: the memory's own device, else cores that reach it."""
        lanes = [
            lane
            for lane in self._lanes(kernel=kernel)
            if lane.reaches(memory) and (not lane.executor.dtypes or self.shape.dtype in lane.executor.dtypes)
        ]
        owner = self.platform.memory_owner(memory)
        return min(
            (lane for lane in lanes if lane.device is owner or lane.executor.kind == "cores"),
            key=lambda lane: lane.device is not owner,
            default=None,
        )

    def mover(self, source: str, target: str) -> Lane | None:
        """Who copies from one memory to another in one command, or None."""
        key = (source, target)
        if key not in self._movers:
            lanes = [lane for lane in self._lanes(verb="copy") if lane.reaches(source) and lane.reaches(target)]
            ends = [self.platform.memory_owner(source), self.platform.memory_owner(target)]

            def preference(lane: Lane) -> tuple[bool, bool, bool]:
                wrong_way = lane.executor.name.endswith("d2h" if lane.device is ends[1] else "h2d")
                return (lane.executor.kind != "dma", lane.device not in ends, wrong_way)

            self._movers[key] = min(lanes, key=preference, default=None)
        return self._movers[key]

    def port(self, verb: str, memory: str) -> Lane:
        """Who reads or writes a memory from a host buffer. Raises ConfigurationError."""
        lanes = [lane for lane in self._lanes(verb=verb) if lane.reaches(memory)]
        owner = self.platform.memory_owner(memory)

        def preference(lane: Lane) -> tuple[bool, bool, bool]:
            wrong_way = lane.executor.name.endswith("h2d" if verb == "read" else "d2h")
            return (lane.device is not owner, lane.executor.kind != "dma", wrong_way)

        if not lanes:
            raise ConfigurationError(f"platform {self.platform.name}: nobody can {verb} {memory} from the host")
        return min(lanes, key=preference)

    # -- moving ---------------------------------------------------------------------------------------------------

    def write(self, target: Segment, data: NDArray[np.uint8], after: Sequence[Completion] = ()) -> Completion:
        """Host buffer → segment."""
        return self.port("write", target.region.memory).submit(Write(target, data), after)

    def read(self, source: Segment, into: NDArray[np.uint8], after: Sequence[Completion] = ()) -> Completion:
        """Segment → host buffer."""
        return self.port("read", source.region.memory).submit(Read(source, into), after)

    async def decide(self, indices: Segment, question: Question, after: Sequence[Completion] = ()) -> Int64:
        """What the devices chose, read from `indices`, int64 (lists, k): the one way in which values steer a policy."""
        into = np.zeros(indices.spans.nbytes, dtype=np.uint8)
        await self.stages.mark(self.read(indices, into, after), "decide")
        shape = len(question.lengths), question.k
        read = None if self.phantom else into.view(np.int64).reshape(shape)
        answer = self._decisions.answer(question, read)
        assert answer.shape == shape, "an answer has k entries for every list"
        return answer

    async def decide_each(
        self, asked: Sequence[tuple[Segment, Question]], after: Sequence[Completion] = ()
    ) -> list[Int64]:
        """`decide` for several questions whose indices lie in one region, with one read for all of them."""
        places = [place for place, _ in asked]
        joined = Segment(places[0].region, Spans(np.concatenate([place.spans.array for place in places])))
        into = np.zeros(joined.spans.nbytes, dtype=np.uint8)
        await self.stages.mark(self.read(joined, into, after), "decide")
        answers, start = [], 0
        for place, question in asked:
            shape, end = (len(question.lengths), question.k), start + place.spans.nbytes
            read = None if self.phantom else into[start:end].view(np.int64).reshape(shape)
            answers.append(self._decisions.answer(question, read))
            assert answers[-1].shape == shape, "an answer has k entries for every list"
            start = end
        return answers

    def grouped(self, grouping: Grouping) -> Int64:
        """How candidates would have been grouped, in a phantom run that does not spend time on it."""
        assert self.phantom, "with numbers, the devices group"
        return self._decisions.group(grouping, None)

    async def group(self, labels: Segment, grouping: Grouping, after: Sequence[Completion] = ()) -> Int64:
        """How the devices have grouped candidates, read from `labels`, int64 (lists, candidates)."""
        into = np.zeros(labels.spans.nbytes, dtype=np.uint8)
        await self.stages.mark(self.read(labels, into, after), "decide")
        shape = grouping.lists, grouping.candidates
        answer = self._decisions.group(grouping, None if self.phantom else into.view(np.int64).reshape(shape))
        assert answer.shape == shape, "every candidate of every list has a label"
        return answer

    def copy(self, source: Segment, target: Segment, after: Sequence[Completion] = ()) -> Completion:
        """Segment → segment: one command where an executor reaches both, otherwise two through the host's memory.

        Raises ConfigurationError where the host's memory is reached by only one side.
        """
        lane = self.mover(source.region.memory, target.region.memory)
        if lane is not None:
            return lane.submit(Copy(source, target), after)
        first, second = self.mover(source.region.memory, self.host), self.mover(self.host, target.region.memory)
        if first is None or second is None:
            raise ConfigurationError(
                f"platform {self.platform.name}: nobody copies from {source.region.memory} to {target.region.memory}, "
                f"nor through {self.host}"
            )
        relay = self._relay(source, target)
        half_way = relay.region.at(0, source.spans.nbytes)
        arrived = first.submit(Copy(source, half_way), [*after, *relay.readers])
        done = second.submit(Copy(half_way, target), [arrived])
        relay.readers = [done]
        return done

    def _relay(self, source: Segment, target: Segment) -> _Relay:
        key = (source.region.memory, source.region.id, target.region.memory, target.region.id)
        relay = self._relays.get(key)
        if relay is None or relay.region.nbytes < source.spans.nbytes:
            relay = self._relays[key] = _Relay(self.scratch(self.host, 2 * source.spans.nbytes))
        return relay

    def launch(
        self,
        lane: Lane,
        args: KernelArgs,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        after: Sequence[Completion] = (),
    ) -> Completion:
        """Run a kernel on a lane."""
        return lane.submit(Launch(args, tuple(reads), tuple(writes)), after)

    # -- attention ------------------------------------------------------------------------------------------------

    def roots(self, mine: dict[tuple[int, int], Int64], others: dict[tuple[int, int], Int64]) -> Int64:
        """Tree nodes that one device returns: int64 (r, 4) of (sequence, kv_head, level, index).

        Both map (sequence, kv_head) to the sorted split ids that this device and all other devices attend.
        """
        table: list[tuple[int, int, int, int]] = []
        empty = np.empty(0, dtype=np.int64)
        for (sequence, head), splits in sorted(mine.items()):
            theirs = others.get((sequence, head), empty)
            key = (splits.tobytes(), theirs.tobytes())
            if key not in self._roots:
                if len(self._roots) > 4096:
                    self._roots.clear()
                self._roots[key] = cover(splits.tolist(), theirs.tolist())
            table.extend((sequence, head, level, index) for level, index in self._roots[key])
        return np.array(table, dtype=np.int64).reshape(-1, 4)

    def roots_of_all(self, positions: Int64) -> Int64:
        """For one device that attends everything: of each request and KV head the node above all of its splits.

        `positions` int64 (n, q_len); int64 (n · heads, 4).
        """
        splits = (positions[:, -1] // self.shape.split_tokens).tolist()
        heads = range(self.shape.num_kv_heads)
        return np.array([(i, h, s.bit_length(), 0) for i, s in enumerate(splits) for h in heads], dtype=np.int64)

    def attend(
        self,
        lane: Lane,
        queries: Segment,
        rows: Rows,
        q_positions: Int64,
        scale: float,
        roots: Int64,
        states: Segment,
        after: Sequence[Completion] = (),
    ) -> Completion:
        """Launch `attend` on a lane: states of `roots` → `states`, float32 (r, q_len, group, 2 + head_dim_v)."""
        shape = self.shape
        args = Attend(
            shape.dtype,
            q_positions.shape[0],
            shape.num_kv_heads,
            shape.group,
            q_positions.shape[1],
            shape.head_dim,
            shape.head_dim_v,
            scale,
            shape.split_tokens,
            rows.runs,
            q_positions,
            roots,
        )
        return self.launch(lane, args, ((queries,), rows.keys, rows.values), ((states,),), after)

    def merge(
        self,
        states: Sequence[Segment],
        roots: Int64,
        q_positions: Int64,
        output: Segment,
        after: Sequence[Completion] = (),
    ) -> Completion:
        """Merge states where the modules run: → `output`, float32 (sequences, q_len, q heads, head_dim_v)."""
        shape = self.shape
        args = Merge(
            q_positions.shape[0], shape.num_kv_heads, shape.group, q_positions.shape[1], shape.head_dim_v, roots
        )
        return self.launch(self.dense, args, (tuple(states),), ((output,),), after)

    def state_nbytes(self, num_roots: int, q_len: int = 1) -> int:
        """Bytes of the states of that many roots."""
        return num_roots * q_len * self.shape.group * (2 + self.shape.head_dim_v) * 4
