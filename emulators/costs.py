"""What a command costs on an emulated executor: the flows that it is made of, and what comes on top.

- A transfer is one flow through everything on its way: the source's medium, links, the executor's own limit, the
  target's medium. Host buffers lie in the platform's host memory.
- A kernel is a flow per memory and direction (one for both where no link is between), and one that occupies the engine
  for flops / rate: cost = overhead + max(flops / rate, bytes per memory over their paths).
- `dense` moves weight_nbytes + activation_nbytes through the executor's own memory.
- Where firmware runs the medium, it says how long the medium is busy, and with which share; the last unit still has to
  cross the links after that.

Each flow has the latency of its path after it; the command's overhead and that of its spans come after everything.
All times are already multiplied by the dilation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Traffic, Write
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.info import Path
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform_file import Hop
from tierloop.devices.regions import Segment
from tierloop.emulators.fabric import Demand, Fabric, Job, Leg, Medium
from tierloop.emulators.profile import ExecutorProfile
from tierloop.emulators.timing import FAR, NS, Route
from tierloop.firmware_models.media import NOTHING, Ranges

LINE_NBYTES = 64
_MOVERS = frozenset({"gather", "append", "topk", "quantize", "dequantize", "chase"})
"""Kernels without floating-point operations to count."""


class Reach:
    """How an executor gets at one memory: the resources that a byte occupies, the links, the latency."""

    def __init__(self, medium: Medium | None, fabric: Fabric, hops: tuple[Hop, ...], lines: int, weight: int) -> None:
        self.hops = hops
        self.read_legs = fabric.legs(hops, write=False)
        self.write_legs = fabric.legs(hops, write=True)
        latency_ns = sum(link.latency_ns for link, _ in self.read_legs) + (medium.profile.latency_ns if medium else 0)
        self.latency_ns = latency_ns * fabric.dilation
        self.read = [link.forward if way == "forward" else link.back for link, way in self.read_legs]
        self.write = [link.forward if way == "forward" else link.back for link, way in self.write_legs]
        if medium is not None and medium.firmware is None:
            self.read.append((medium.resource, medium.read_units))
            self.write.append((medium.resource, medium.write_units))
        rate = lines * LINE_NBYTES * NS // latency_ns if lines and latency_ns else FAR
        capacity = fabric.flows.capacity
        if rate < max((capacity[r] // units for r, units in self.read[-1:] + self.write[-1:]), default=0):
            port = (fabric.flows.add(rate), 1)
            self.read.append(port)
            self.write.append(port)
        self.firmware = medium.firmware if medium is not None else None
        self.one_flow = not hops and self.read == self.write
        self.read_route = Route(self.read, capacity, weight, self.read_legs)
        self.write_route = Route(self.write, capacity, weight, self.write_legs)


class Costs:
    """The costs of one executor of the device `device`, whose memory is `own` ("" if it has none)."""

    def __init__(
        self,
        fabric: Fabric,
        profile: ExecutorProfile,
        own: str,
        reaches: dict[str, tuple[Hop, ...]],
    ) -> None:
        self._fabric = fabric
        self._profile = profile
        self._own = own
        self._sigma = fabric.dilation
        self._engine = Route([(fabric.flows.add(NS), 1)], fabric.flows.capacity, profile.weight)
        self._copies = [(fabric.flows.add(profile.bytes_per_s), 1)] if profile.bytes_per_s else []
        self._reach: dict[str, Reach] = {}
        own_reach: dict[str, tuple[Hop, ...]] = {own: ()} if own else {}
        for memory, hops in (own_reach | reaches).items():
            medium = fabric.media.get(memory)
            if medium is None and memory.startswith("emu:"):
                raise ConfigurationError(f"executor {profile.name} reaches {memory}, which is not open on this site")
            self._reach[memory] = Reach(medium, fabric, hops, profile.mlp_lines, profile.weight)
        self._host = fabric.topology.host
        if {"read", "write"} & profile.verbs and self._host and self._host not in self._reach:
            raise ConfigurationError(
                f"executor {profile.name} reads and writes host buffers, so it has to reach the host memory "
                f"{self._host}; it reaches {sorted(self._reach)}"
            )
        self._overhead_ns = profile.overhead_ns * self._sigma
        self._span_ns = profile.span_ns * self._sigma
        self._transfers: dict[tuple[str, str], tuple[Route, int, bool]] = {}

    def paths(self) -> tuple[Path, ...]:
        """What the executor's paths are worth to a scheduler, in the platform's clock (dilated)."""
        return tuple(
            Path(
                memory,
                reach.latency_ns,
                self._ceiling(reach, False) // self._sigma,
                self._ceiling(reach, True) // self._sigma,
                self._profile.mlp_lines or 1,
                self._profile.coherence,
            )
            for memory, reach in self._reach.items()
        )

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
            job = Job([], self._overhead_ns + self._reach[command.target.region.memory].latency_ns)
            job.idle = True
            return job
        transfer = self._transfers.get(key) or self._transfer(*key)
        route, latency_ns, on_firmware = transfer
        job = Job([(route, nbytes, FAR, latency_ns)] if nbytes else [], self._overhead_ns)
        if self._span_ns:
            job.fixed_ns += self._span_ns * len(spans)
        if on_firmware:
            if source is not None:
                self._transfer_media(job, source, False, route, latency_ns, commit)
            if target is not None:
                self._transfer_media(job, target, True, route, latency_ns, commit)
        return job

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
            demands.append((self._engine, -(-flops * NS // rate), FAR, 0))
        if isinstance(args, Dense):
            job.idle = args.function is None
            nbytes = args.weight_nbytes + args.activation_nbytes
            if self._own and nbytes:
                reach = self._reach[self._own]
                demands.append((reach.read_route, nbytes, FAR, reach.latency_ns))
        for memory in traffic.read | traffic.written:
            if dense and memory == self._own:
                continue
            reach = self._reach[memory]
            read, written = traffic.read.get(memory, 0), traffic.written.get(memory, 0)
            if reach.firmware is not None:
                self._kernel_media(job, command, memory, commit)
                if not reach.hops:
                    continue
            if reach.one_flow:
                read, written = read + written, 0
            if read:
                demands.append((reach.read_route, read, FAR, reach.latency_ns))
            if written:
                demands.append((reach.write_route, written, FAR, reach.latency_ns))
        return job

    def _kernel_media(self, job: Job, command: Launch, memory: str, commit: bool) -> None:
        reads = [s for operand in command.reads for s in operand if s.region.memory == memory]
        writes = [s for operand in command.writes for s in operand if s.region.memory == memory]
        latency_ns = self._reach[memory].latency_ns
        self._media(job, memory, self._ranges(reads), self._ranges(writes), latency_ns, commit)

    def _transfer_media(
        self, job: Job, segment: Segment, is_write: bool, route: Route, latency_ns: int, commit: bool
    ) -> None:
        memory = segment.region.memory
        if self._reach[memory].firmware is None:
            return
        ranges = self._ranges((segment,))
        unit = min(self._fabric.media[memory].profile.alignment, segment.spans.nbytes)
        if unit > 1:
            latency_ns += route.ns(unit * self._sigma)
        reads, writes = (NOTHING, ranges) if is_write else (ranges, NOTHING)
        self._media(job, memory, reads, writes, latency_ns, commit)

    def _media(self, job: Job, memory: str, reads: Ranges, writes: Ranges, latency_ns: int, commit: bool) -> None:
        medium = self._fabric.media[memory]
        firmware = medium.firmware
        assert firmware is not None
        work = firmware.access(reads, writes) if commit else firmware.plan(reads, writes)
        if work.alone_ns:
            job.demands.append((medium.route, work.alone_ns * work.share, work.share * NS, latency_ns))
        if memory == self._own:
            job.media_nbytes += work.nbytes
        job.fault = job.fault or work.fault

    def _ranges(self, segments: Sequence[Segment]) -> Ranges:
        if not segments:
            return NOTHING
        parts = []
        for region, spans in segments:
            address = self._fabric.media[region.memory].store.address(region)
            part = spans.array
            if address:
                part = part.copy()
                part[:, 0] += address
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _transfer(self, source: str, target: str) -> tuple[Route, int, bool]:
        """Route and latency of a transfer, and whether firmware runs a medium on it.

        "" stands for host buffers on a platform without host memory.
        """
        demands = list(self._copies)
        legs: tuple[Leg, ...] = ()
        latency_ns = 0
        on_firmware = False
        if source:
            demands += self._reach[source].read
            legs += self._reach[source].read_legs
            latency_ns += self._reach[source].latency_ns
            on_firmware = self._reach[source].firmware is not None
        if target:
            demands += self._reach[target].write
            legs += self._reach[target].write_legs
            latency_ns += self._reach[target].latency_ns
            on_firmware = on_firmware or self._reach[target].firmware is not None
        route = Route(demands, self._fabric.flows.capacity, self._profile.weight, legs)
        self._transfers[source, target] = (route, latency_ns, on_firmware)
        return self._transfers[source, target]

    def _ceiling(self, reach: Reach, write: bool) -> int:
        demands = reach.write if write else reach.read
        rates = [self._fabric.flows.capacity[r] // units for r, units in demands]
        if reach.firmware is not None:
            rates.append(reach.firmware.ceiling(write))
        if not self._profile.kernels and self._profile.bytes_per_s:
            rates.append(self._profile.bytes_per_s)
        return min(rates, default=0)
