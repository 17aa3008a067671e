"""What a command costs on an emulated executor: the flows that it is made of, and what comes on top.

- A transfer is one flow through everything on its way: the source's medium, links, the executor's own limit, the
  target's medium. Host buffers lie in the platform's host memory.
- A kernel is a flow per memory and direction (one for both where no link is between), and one that occupies the engine
  for flops / rate: cost = overhead + max(flops / rate, bytes per memory over their paths). It is the roofline of
  firmware_models/gpu.py, with flows that other executors share.
- Random accesses by cores (spans below a page on average) wait for latency: bytes under way / latency is their rate,
  with the loaded latency where the memory has curves, and nothing comes after it. `chase` waits at every line.
- One transfer command moves at most `command_bytes_per_s`; every command occupies the executor's command processor for
  `issue_ns`, one after the other, before anything else begins.
- `dense` moves weight_nbytes + activation_nbytes through the executor's own memory.
- Where firmware runs the medium, it says how long the medium is busy, and with which share; the last unit still has to
  cross the links after that.

Every other flow has the latency of its path after it; the command's overhead and that of its spans come after
everything. All times are already multiplied by the dilation.
"""

from __future__ import annotations

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Traffic, Write
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import LINE_NBYTES, Chase, Dense
from tierloop.devices.regions import Segment
from tierloop.emulators.fabric import Demand, Fabric, Job
from tierloop.emulators.reach import Engine, Reach
from tierloop.emulators.spread import Part, deal
from tierloop.emulators.timing import FAR, WINDOW, Route
from tierloop.emulators.ways import Way, Ways
from tierloop.firmware_models.gpu import arithmetic_ns
from tierloop.firmware_models.media import NOTHING

RANDOM_NBYTES = 4096
"""Spans smaller than this on average are a random pattern: a processor prefetches within a page, not beyond it."""
_MOVERS = frozenset({"gather", "append", "quantize", "dequantize", "chase"})
"""Kernels without floating-point operations to count."""


class Costs:
    """The costs of commands on the queues that have these ways."""

    def __init__(self, fabric: Fabric, engine: Engine, ways: Ways) -> None:
        self._ways = ways
        self._reach, self._sets, self._transfers = ways.reach, ways.sets, ways.transfers
        profile = self._profile = ways.profile
        self._own = ways.own
        self._host = fabric.topology.host
        sigma = self._sigma = fabric.dilation
        self._engine = Route([(engine.arithmetic, 1)], fabric.flows.capacity, ways.weight)
        self._processor = engine.processor
        self._most = profile.command_bytes_per_s or FAR
        self._overhead_ns = profile.overhead_ns * sigma
        self._span_ns = profile.span_ns * sigma
        self._random: dict[tuple[Way, bool, bool, int], Route] = {}

    def of(self, command: Command, traffic: Traffic, commit: bool) -> Job:
        """The cost of a command; `commit` says that it is carried out, so the firmware's state changes."""
        kind = type(command)
        source = target = None
        if kind is Copy:
            source, target = command.source, command.target  # type: ignore[union-attr]  # `kind` says so, 3 × cheaper
            nbytes, spans = source.spans.nbytes, source.spans
            key = (source.region.memory, target.region.memory)
        elif kind is Read:
            source = command.source  # type: ignore[union-attr]  # likewise
            nbytes, spans = source.spans.nbytes, source.spans
            key = (source.region.memory, self._host)
        elif kind is Write:
            target = command.target  # type: ignore[union-attr]  # likewise
            nbytes, spans = target.spans.nbytes, target.spans
            key = (self._host, target.region.memory)
        elif isinstance(command, Launch):
            return self._launch(command, traffic, commit)
        else:
            assert isinstance(command, Flush)
            memory = command.target.region.memory
            job = Job([], self._overhead_ns + (self._reach.get(memory) or self._sets[memory]).latency_ns)
            job.idle = True
            return job
        transfer = self._transfers.get(key)
        if transfer is None:
            if key[0] in self._sets or key[1] in self._sets:
                return self._spread(key, source, target, nbytes, commit)
            transfer = self._ways.transfer(*key)
        route, latency_ns, on_firmware = transfer
        job = Job([(route, nbytes, self._most, latency_ns)] if nbytes else [], self._overhead_ns)
        if self._span_ns:
            job.fixed_ns += self._span_ns * len(spans)
        job.processor = self._processor
        if self._profile.mlp_lines and nbytes:
            self._scatter(job, key, source, target, nbytes)
        if on_firmware:
            if source is not None:
                self._transfer_media(job, source, False, route, latency_ns, commit)
            if target is not None:
                self._transfer_media(job, target, True, route, latency_ns, commit)
        return job

    def _scatter(self, job: Job, key: Way, source: Segment | None, target: Segment | None, nbytes: int) -> None:
        """Where one side of a transfer consists of small spans, latency limits it: put that route in its place."""
        sides = [side is not None and _is_random(nbytes, len(side.spans)) for side in (source, target)]
        if not any(sides):
            return
        spans = max(
            len(side.spans) for side, small in zip((source, target), sides, strict=True) if small and side is not None
        )
        window = self._ways.window(nbytes, spans)
        place = (key, sides[0], sides[1], window)
        route = self._random.get(place)
        if route is None:
            reaches = [self._reach[memory] for memory, small in zip(key, sides, strict=True) if small]
            plain = self._transfers[key][0]
            route = self._random[place] = self._ways.dependent(plain.demands, plain.legs, plain.mixes, window, reaches)
        job.demands[0] = (route, nbytes, self._most, 0)

    def _launch(self, command: Launch, traffic: Traffic, commit: bool) -> Job:
        args = command.args
        flops = 0
        if args.kernel not in _MOVERS:
            flops = contract.flops(args, [sum([s.nbytes for _, s in operand]) for operand in command.reads])
        demands: list[Demand] = []
        job = Job(demands, self._overhead_ns, flops)
        dense = isinstance(args, Dense)
        rate = self._profile.dense_flops_per_s if dense else self._profile.flops_per_s
        if flops and rate:
            demands.append((self._engine, arithmetic_ns(flops, rate), FAR, 0))
        job.processor = self._processor
        if isinstance(args, Dense):
            job.idle = args.function is None
            nbytes = args.weight_nbytes + args.activation_nbytes
            if self._own and nbytes:
                reach = self._reach[self._own]
                demands.append((reach.read_route, nbytes, FAR, reach.latency_ns))
        for memory in traffic.read | traffic.written:
            if dense and memory == self._own:
                continue
            if memory in self._sets:
                self._spread_kernel(demands, command, memory, commit)
                continue
            reach = self._reach[memory]
            read, written = traffic.read.get(memory, 0), traffic.written.get(memory, 0)
            if reach.firmware is not None:
                self._kernel_media(job, command, memory, commit)
                if not reach.hops and type(args) is not Chase:
                    continue
            if type(args) is Chase and read:
                demands.append((self._ways.small(memory, False, WINDOW * LINE_NBYTES), read, FAR, 0))
                read = 0
            elif self._profile.mlp_lines and (read or written):
                read, written = self._scattered(demands, command, memory, read, written)
            if reach.one_flow:
                read, written = read + written, 0
            if read:
                demands.append((reach.read_route, read, FAR, reach.latency_ns))
            if written:
                demands.append((reach.write_route, written, FAR, reach.latency_ns))
        return job

    def _scattered(
        self, demands: list[Demand], command: Launch, memory: str, read: int, written: int
    ) -> tuple[int, int]:
        """Demands for what a kernel reads and writes in small spans; returns the bytes that are left."""
        left = []
        for is_write, nbytes, operands in ((False, read, command.reads), (True, written, command.writes)):
            spans = sum([len(s.spans) for operand in operands for s in operand if s.region.memory == memory])
            if nbytes and _is_random(nbytes, spans):
                demands.append((self._ways.small(memory, is_write, self._ways.window(nbytes, spans)), nbytes, FAR, 0))
                nbytes = 0
            left.append(nbytes)
        return left[0], left[1]

    def _kernel_media(self, job: Job, command: Launch, memory: str, commit: bool) -> None:
        reads = [s for operand in command.reads for s in operand if s.region.memory == memory]
        writes = [s for operand in command.writes for s in operand if s.region.memory == memory]
        latency_ns = self._reach[memory].latency_ns
        self._ways.access(job, memory, self._ways.ranges(reads), self._ways.ranges(writes), latency_ns, commit)

    def _transfer_media(
        self, job: Job, segment: Segment, is_write: bool, route: Route, latency_ns: int, commit: bool
    ) -> None:
        memory = segment.region.memory
        if self._reach[memory].firmware is None:
            return
        ranges = self._ways.ranges((segment,))
        unit = min(self._ways.media[memory].profile.alignment, segment.spans.nbytes)
        if unit > 1:
            latency_ns += route.ns(unit * self._sigma)
        reads, writes = (NOTHING, ranges) if is_write else (ranges, NOTHING)
        self._ways.access(job, memory, reads, writes, latency_ns, commit)

    def _spread(self, key: Way, source: Segment | None, target: Segment | None, nbytes: int, commit: bool) -> Job:
        """The cost of a transfer from or to an interleave set: a flow for every member that holds some of it.

        Between two sets what is read and what is written are flows of their own.
        """
        ends = ((key[0], source, False), (key[1], target, True))
        side = source if source is not None else target
        assert side is not None
        job = Job([], self._overhead_ns + self._span_ns * len(side.spans))
        job.processor = self._processor
        if not nbytes:
            return job
        small = [
            memory
            for memory, end, _ in ends
            if self._profile.mlp_lines and end is not None and _is_random(nbytes, len(end.spans))
        ]
        parts: list[Part] = []
        both = key[0] in self._sets and key[1] in self._sets
        for memory, end, is_write in ends:
            if memory not in self._sets:
                continue
            other = "" if both else key[not is_write]
            waits = [self._reach[other]] if other and other in small else []
            for reach, count in self._sets[memory].spread([end] if end is not None else [], nbytes, commit):
                if both and is_write:
                    route, latency_ns = reach.write_route, reach.latency_ns
                else:
                    way = (other, reach.memory) if is_write else (reach.memory, other)
                    route, latency_ns, _ = self._transfers.get(way) or self._ways.transfer(*way)
                parts.append((route, count, latency_ns, [reach, *waits] if memory in small else waits))
        spans = max(len(end.spans) for _, end, _ in ends if end is not None)
        window = self._ways.window(nbytes, spans) if small else 0
        job.demands += deal(parts, window, self._most, self._ways.dependent)
        for memory, end, is_write in ends:
            if end is not None and memory not in self._sets:
                self._transfer_media(job, end, is_write, parts[0][0], parts[0][2], commit)
        return job

    def _spread_kernel(self, demands: list[Demand], command: Launch, memory: str, commit: bool) -> None:
        """Demands for what a kernel reads and writes on an interleave set, member by member."""
        together: dict[Reach, int] = {}
        for operands, is_write in ((command.reads, False), (command.writes, True)):
            segments = [s for operand in operands for s in operand if s.region.memory == memory]
            nbytes = sum([s.spans.nbytes for s in segments])
            if not nbytes:
                continue
            spans = sum([len(s.spans) for s in segments])
            window = 0
            if type(command.args) is Chase and not is_write:
                window = WINDOW * LINE_NBYTES
            elif self._profile.mlp_lines and _is_random(nbytes, spans):
                window = self._ways.window(nbytes, spans)
            parts: list[Part] = []
            for reach, count in self._sets[memory].spread(segments, nbytes, commit):
                if reach.one_flow and not window:
                    together[reach] = together.get(reach, 0) + count
                    continue
                route = reach.write_route if is_write else reach.read_route
                parts.append((route, count, reach.latency_ns, [reach] if window else []))
            demands += deal(parts, window, FAR, self._ways.dependent)
        demands += [(reach.read_route, count, FAR, reach.latency_ns) for reach, count in together.items()]


def _is_random(nbytes: int, spans: int) -> bool:
    """Whether so many bytes in so many spans are a random pattern; a single span is none, whatever its size."""
    return spans > 1 and nbytes < RANDOM_NBYTES * spans
