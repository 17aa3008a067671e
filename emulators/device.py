"""An emulated device: a store, a firmware model, timing and kernels, put together from a profile.

Opened by the registry (entry point `emulated` of the group tierloop.devices) or by hand. A slower card is another
profile, not another class. Options:

    profile      name of a profile, or a path ending in .toml (relative to `folder`)
    capacity     bytes of the memory, instead of the profile's
    executors    names of the profile's executors to make (default: all that are not optional)
    constants    numbers of the profile to change, as a table of its shape
    reaches      {memory: route}: other memories that the executors reach; set by the registry
    backing      a folder for sparse files that hold the bytes, instead of the host's memory
    keep         a file that holds the bytes of a persistent memory from one opening to the next (kept.py)
    numa_node    what DeviceInfo reports
    folder       where relative paths begin; set by the registry

Queues are numbered in the order of the profile's executors: a GPU has compute on 0 and 1, the engine that copies to it
on 2 and the one that copies from it on 3; `info` says so for each device. A queue carries out one command at a time.
Commands of an emulated device may name regions of emulated memories, and of real ones whose regions the host can map.

Devices find each other on the site (fabric.py), and `info` is settled when it is first asked for, so devices may be
opened in any order; everything that a device reaches must be open by then. `firmware` is the back door.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierloop.devices.clocks import spin_until
from tierloop.devices.commands import Command, Copy, Launch, Read, Write, segments, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check, check_alignment
from tierloop.devices.errors import Busy, ConfigurationError, Gone, MediaError, OutOfRange, Unsupported
from tierloop.devices.info import Arithmetic, DeviceInfo, ExecutorInfo, MemoryInfo
from tierloop.devices.kernels import MICROKERNEL
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.tables import Table
from tierloop.emulators.costs import Costs
from tierloop.emulators.fabric import Fabric, Job, Medium
from tierloop.emulators.kept import KeptFile
from tierloop.emulators.loads import Load, start_loads
from tierloop.emulators.numerics import Numerics, Outcome
from tierloop.emulators.pacing import late_start, pace_of
from tierloop.emulators.parts import Profile
from tierloop.emulators.profile import CHANGED, find_profile, read_profile
from tierloop.emulators.promises import LIMIT_PERCENT, Promises
from tierloop.emulators.reach import Engine
from tierloop.emulators.store import Store
from tierloop.emulators.timing import ARBITRATION
from tierloop.emulators.ways import Ways
from tierloop.firmware_models.flash import FlashModel
from tierloop.firmware_models.media import Firmware
from tierloop.firmware_models.passthrough import Passthrough
from tierloop.firmware_models.pnm import PnmModel


def open_emulated(name: str, site: Site, options: dict[str, Any]) -> EmulatedDevice:
    """Open an emulated device; `name` carries the prefix `emu:`. Raises ConfigurationError."""
    if not name.startswith("emu:"):
        raise ConfigurationError(f"{name}: the name of an emulated device begins with 'emu:'")
    table = Table(options, name)
    folder = Path(table.text("folder", default="."))
    reaches = dict(table.table("reaches").values)
    capacity = table.get("capacity", None)
    executors = table.names("executors", ()) if table.has("executors") else None
    constants = table.table("constants").values
    backing = folder / table.text("backing") if table.has("backing") else None
    keep = folder / table.text("keep") if table.has("keep") else None
    numa_node = table.integer("numa_node", 0, 1023) if table.has("numa_node") else None
    path = find_profile(table.text("profile"), folder)
    table.finish()
    if backing is not None and not backing.is_dir():
        raise table.error("backing", f"{backing} is not a folder")
    profile = read_profile(path, capacity, executors, constants)
    if keep is not None and (profile.memory is None or not profile.memory.persistent):
        raise table.error("keep", f"profile {profile.name} has no persistent memory: it forgets its bytes")
    if keep is not None and backing is not None:
        raise table.error("keep", "given with `backing`; allowed: one of them")
    return EmulatedDevice(name, site, profile, reaches, backing, numa_node, keep)


HANDLING_NS = 20_000
"""What ending a command costs on the wall clock before it has ended, without the bytes that are moved then."""

open_emulated.emulated = True  # type: ignore[attr-defined]  # what the registry looks at before it opens anything


class EmulatedDevice:
    """An opened emulated device; made by `open_emulated`."""

    def __init__(
        self,
        name: str,
        site: Site,
        profile: Profile,
        reaches: dict[str, Any],
        backing: Path | None = None,
        numa_node: int | None = None,
        keep: Path | None = None,
    ) -> None:
        self._name = name
        self._profile = profile
        self._reaches = reaches
        self._numa_node = numa_node
        self._fabric = Fabric.of(site)
        self._numerics = Numerics.of(self._fabric)
        self._clock = site.clock
        self._site = site
        self._promises: Promises | None = None
        if not site.clock.virtual:
            if "promises" not in site.shared:
                site.shared["promises"] = Promises(site.outside or site)
            self._promises = site.shared["promises"]
        self._store: Store | None = None
        self._loads: list[Load] = []
        self.firmware: Firmware | None = None
        if profile.memory is not None:
            self._open_memory(backing, keep)
        self._info: DeviceInfo | None = None
        self._costs: list[Costs] = []
        self._occupies_core = [e.kind == "cores" for e in profile.executors for _ in range(e.queues)]
        self._grids: dict[str, int] = {}
        self._strict = isinstance(self.firmware, PnmModel) and self.firmware.geometry.sram_nbytes > 0
        self._jobs: dict[Completion, Job] = {}
        self._closed = False
        depth = max((e.depth for e in profile.executors), default=1)
        self._queues = QueueSet(name, sum(e.queues for e in profile.executors), depth, site, self._start)
        self._fabric.users.append(self._queues.uses)

    def _open_memory(self, backing: Path | None, keep: Path | None) -> None:
        memory = self._profile.memory
        assert memory is not None
        if self._name in self._fabric.media:
            raise ConfigurationError(f"{self._name}: the site has a memory of that name already")
        on_media: Firmware | None = None
        if memory.flash is not None:
            on_media = FlashModel(memory.flash)
        elif memory.pnm is not None:
            on_media = PnmModel(memory.pnm)
        self.firmware = on_media or Passthrough(memory.read_bytes_per_s, memory.write_bytes_per_s)
        addressed = on_media is not None
        kept = None if keep is None else KeptFile(self._name, keep)
        regions = self._fabric.regions
        self._store = Store(self._name, memory.capacity, memory.alignment, addressed, backing, regions, kept)
        medium = Medium(self._name, memory, self._store, on_media, self._fabric.flows)
        self._loads = start_loads(self._fabric, medium)
        self._fabric.media[self._name] = medium

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do. Raises ConfigurationError if it reaches a memory that is not there."""
        if self._info is None:
            self._info = self._describe()
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes. Raises OutOfMemory, OutOfRange, Unsupported, Gone."""
        self._alive("alloc")
        if self._store is None:
            raise Unsupported(self._name, "alloc", "the device has no memory")
        if memory not in (None, self._name):
            raise OutOfRange(self._name, "alloc", f"there is no memory {memory!r} here, only {self._name!r}")
        return self._store.alloc(nbytes, phantom)

    def adopt(self, offset: int, nbytes: int) -> Region:
        """The region that was at `offset` of the file that `keep` names (devices/persistent.py).

        Raises Unsupported where no file is named, OutOfRange, OutOfMemory, Busy, Gone.
        """
        self._alive("adopt")
        if self._store is None:
            raise Unsupported(self._name, "adopt", "the device has no memory")
        return self._store.adopt(offset, nbytes)

    def offset_of(self, region: Region) -> int:
        """Where a region lies on the medium: what `adopt` takes. Raises OutOfRange."""
        if self._store is None:
            raise OutOfRange(self._name, "offset_of", "the device has no memory")
        return self._store.offset_of(region)

    def disown(self, region: Region) -> None:
        """Let go of an adopted region; its bytes stay in the file as they are. Raises OutOfRange, Busy, Gone."""
        self._unused(region, "disown").disown(region)

    def free(self, region: Region) -> None:
        """Give the bytes back. Raises OutOfRange, Busy, Gone."""
        address = self._unused(region, "free").free(region)
        if self.firmware is not None:
            self.firmware.trim(address, region.nbytes)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises OutOfRange, Misaligned, Unsupported, Busy or Gone."""
        if self._closed:
            raise Gone(self._name, verb(command), "the device is closed")
        traffic = check(self._info or self.info, command, queue, self._fabric.regions)
        if self._strict:
            self._check_media(command)
        return self._queues.submit(command, queue, after, traffic)

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """The cost from now on if nothing else arrived: the same transition on a copy of the state.

        Commands that are queued before it are not counted; what other commands that are under way take is. Under the
        virtual clock the margin is 0, on the wall clock it is what a valid run may overrun.
        """
        traffic = check(self.info, command, queue, self._fabric.regions)
        self._check_media(command)
        cost = self._costs[queue].of(command, traffic, commit=False)
        now = self._clock.now()
        duration = self._fabric.predict(cost, now) + cost.fixed_ns - now
        margin = 0 if self._clock.virtual else -(-duration * LIMIT_PERCENT // 100)
        return Estimate(duration, margin, f"timing model of profile {self._profile.name}")

    def poll(self) -> None:
        """Nothing to collect: completions come by the clock."""

    def close(self) -> None:
        """Release everything; raises the first error that nobody looked at."""
        if self._closed:
            return
        self._closed = True
        try:
            running = [job.future for job in self._jobs.values() if job.future is not None]
            self._numerics.leave(self._name, running)
        finally:
            for job in self._jobs.values():
                self._fabric.abandon(job)
            self._jobs.clear()
            for load in self._loads:
                load.stop()
            self._fabric.users.remove(self._queues.uses)
            self._fabric.has_lost = True
            if not self._fabric.users:
                self._numerics.close()
            try:
                self._queues.close()
            finally:
                if self._store is not None:
                    self._store.close()

    def _check_media(self, command: Command) -> None:
        """What `check` does not know of: the grids of memories, and the SRAM of a PNM's engines."""
        for memory, grid in self._grids.items():
            check_alignment(self.info, command, memory, grid)
        if isinstance(command, Launch) and isinstance(self.firmware, PnmModel):
            queries = sum(s.spans.nbytes for s in command.reads[0]) if len(command.reads) > 1 else 0
            wrong = self.firmware.too_large(queries, sum(s.spans.nbytes for o in command.writes for s in o))
            if wrong:
                raise Unsupported(self._name, verb(command), wrong)

    # -- carrying out -------------------------------------------------------------------------------------------

    def _start(self, completion: Completion) -> None:
        gone = self._fabric.has_lost and _gone_region(completion.command)
        if gone:
            raise Gone(self._name, verb(completion.command), gone)
        job = self._costs[completion.queue].of(completion.command, completion.traffic, True)
        if job.idle or job.fault or completion.traffic.phantom:
            job.outcome = (job.flops, None)
        self._jobs[completion] = job
        is_small = False
        if self._promises is not None and job.outcome is None:
            is_small = self._numerics.is_small(completion.command)
            job.lead_ns = HANDLING_NS
            if is_small:
                job.lead_ns += self._numerics.copy_ns(completion.command)
        self._fabric.begin(job, completion, self._due)
        if self._promises is None or job.outcome is not None or is_small:
            return
        command, length_ns = completion.command, job.due - completion.started_ns
        if self._occupies_core[completion.queue]:
            job.pace = pace_of(length_ns, command, self._fabric.dilation)
        elif isinstance(command, (Read, Write, Copy)):
            job.pace = late_start(length_ns, self._numerics.lead_ns(command))
        job.future = self._numerics.begin(
            self._name,
            command,
            job.aside,
            lambda outcome: self._clock.post(self._computed, job, outcome),
            job.pace,
        )

    def _due(self, job: Job) -> None:
        """The job's time has come; on the wall clock its work may still be on a thread, and `_computed` goes on."""
        completion = job.completion
        if job.outcome is None:
            if job.future is not None:
                return
            job.outcome = self._numerics.now(self._name, completion.command)
        gone = self._fabric.has_lost and _gone_region(completion.command)
        if gone:
            job.outcome = 0, Gone(self._name, verb(completion.command), gone)
        if job.aside:
            job.outcome = self._numerics.settle(self._name, completion.command, job.aside, job.outcome)
        del self._jobs[completion]
        completion.flops, error = job.outcome
        if job.fault:
            error = MediaError(self._name, verb(completion.command), job.fault)
        if job.media_nbytes:
            own = completion.traffic.read.get(self._name, 0) + completion.traffic.written.get(self._name, 0)
            completion.media_nbytes = job.media_nbytes if job.media_nbytes != own else 0
        self._fabric.settle(job)
        if self._promises is None:
            self._queues.finish(completion, error)
            return
        spin_until(self._clock, job.due)
        completion.overrun_ns = max(self._clock.now() - job.due, 0) + job.slip_ns
        self._queues.finish(completion, error)
        self._promises.ended(completion, completion.ended_ns)

    def _computed(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        if job.over and job.completion in self._jobs:
            self._due(job)

    def _alive(self, op: str) -> None:
        if self._closed:
            raise Gone(self._name, op, "the device is closed")

    def _unused(self, region: Region, op: str) -> Store:
        """The store of a region that no command names. Raises OutOfRange, Busy, Gone."""
        self._alive(op)
        if self._store is None or region.memory != self._name:
            raise OutOfRange(self._name, op, f"{region} is not a region of this device")
        if any(uses(region) for uses in self._fabric.users):
            raise Busy(self._name, op, f"{region} is named by a command that has not ended")
        return self._store

    # -- what it is ---------------------------------------------------------------------------------------------

    def _describe(self) -> DeviceInfo:
        profile = self._profile
        own = self._name if profile.memory is not None else ""
        executors: list[ExecutorInfo] = []
        layout: list[str] = []
        of_queue: list[Costs] = []
        for executor in profile.executors:
            engine = Engine(self._fabric, executor)
            ways = {
                weight: Ways(self._fabric, executor, own, self._reaches, engine, weight)
                for weight in dict.fromkeys(executor.weights)
            }
            costs = {weight: Costs(self._fabric, engine, its) for weight, its in ways.items()}
            queues = tuple(range(len(of_queue), len(of_queue) + executor.queues))
            of_queue += [costs[weight] for weight in executor.weights]
            layout.append(f"{executor.name}: {', '.join(map(str, queues))}")
            executors.append(
                ExecutorInfo(
                    name=executor.name,
                    kind=executor.kind,
                    queues=queues,
                    verbs=executor.verbs,
                    kernels=executor.kernels,
                    dtypes=executor.dtypes,
                    paths=ways[executor.weights[0]].paths(),
                    depth=executor.depth,
                    largest_transfer=executor.largest_transfer,
                )
            )
        self._costs = of_queue
        for memory in {own, *self._reaches}:
            medium = self._fabric.media.get(memory)
            if medium is not None and medium.profile.alignment > 1:
                self._grids[memory] = medium.profile.alignment
                self._strict = True
        memories: tuple[MemoryInfo, ...] = ()
        if profile.memory is not None:
            memory_profile = profile.memory
            memories = (
                MemoryInfo(
                    own,
                    memory_profile.capacity,
                    memory_profile.alignment,
                    memory_profile.byte_addressable,
                    memory_profile.persistent,
                ),
            )
        links = {hop[0]: self._fabric.links[hop[0]].spec for route in self._reaches.values() for hop in route}
        guesses = tuple(f"links.{name}: {spec.source}" for name, spec in links.items() if "assumed" in spec.source)
        changed = [key for key, source in profile.sources.items() if source == CHANGED]
        kernels = any(e.kernels for e in profile.executors)
        return DeviceInfo(
            name=self._name,
            kind=profile.kind,
            provenance="emulated",
            memories=memories,
            executors=tuple(executors),
            arithmetic=Arithmetic(MICROKERNEL) if kernels else None,
            numa_node=self._numa_node,
            dilation=self._fabric.dilation,
            guesses=profile.guesses + guesses,
            notes={
                "profile": profile.name,
                "summary": profile.summary,
                "queues": "; ".join(layout) or "none",
                "arbitration": ARBITRATION,
                "changed": ", ".join(changed) or "nothing",
            },
        )


def _gone_region(command: Command) -> str:
    """Why a command cannot go on whose regions were all there when it was submitted; "" where it can.

    Nobody frees what a command names, so what is freed lay on a device that was closed meanwhile.
    """
    freed = [segment.region for segment in segments(command) if segment.region.freed]
    return f"{freed[0]} lay on {freed[0].device}, which was closed" if freed else ""
