"""The gpu driver: a GPU's memory, its cores and its copy engines, by torch (CUDA, and ROCm through the same code).

One memory: a slab that is taken once, in which the driver finds room itself, so that torch's allocator never moves or
hoards what regions lie in. Executors: `gpu` runs kernels and copies within the memory (`queues` streams), `h2d` and
`d2h` are the copy engines, one stream each; both read, write and copy, and each is meant for its own direction. With
other GPUs in reach there is a fourth, `peer`, that copies between their memories and this one.

What must hold beyond the device contract:

- A queue is a stream. A command that comes after commands of this GPU is enqueued when those are with the hardware, and
  an event orders it; one that comes after another device's, or after what the host has still to finish, is held back.
- Whatever torch is told to do, it does on the stream of a queue. What work allocates belongs to that stream; buffers
  that are page-locked belong to a command until the event behind it; a region is freed when no command names it.
- Memory that a kernel needs besides its operands comes from what `reserve` leaves. If that is not enough, the command
  ends as OutOfMemory, and the GPU works on.
- An error of the hardware that stays (an illegal access, a bus that is gone) makes the device `Gone`: torch cannot use
  the GPU in this process any more. So does a command that is not done `deadline_s` after the last one was: it ends as
  Timeout, and what the GPU may still write to is kept for as long as the process lives.
- `dense` runs its function on the host: operands come and results go over the link. Other kernels may have operands
  in host-mapped memory, too: these are copied into the GPU's memory first, or back from it, for as long as it takes.
- Kernels round in float32, in an order that depends on the launch: results keep the bound, not the bits (docs/gpu.md).

Options: `device` ("cuda:0"); `capacity` in bytes (what is free, less `reserve`); `reserve` (an eighth of what is free,
at least 512 MiB); `queues` (2); `staging_buffers` (8) of `staging_nbytes` (4 MiB) each; `register` (true), whether host
memory may be page-locked where it lies; `reaches`, names of host-mapped memories and of other GPUs that were opened
before; `attention` ("eager"), or "flash" and "flashinfer", fused kernels that are used where they fit (gpu_fused.py);
`deadline_s` (30); `poll_ns` (20,000), how often it looks for what has ended; `folder` (set by the registry).

torch is imported when a GPU is opened, and not before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Traffic, Write, segments, verb, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.drivers.arena import Arena
from tierloop.devices.drivers.estimates import Costs
from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.gpu_info import DEPTH, Reached, describe
from tierloop.devices.drivers.gpu_lines import LEFT_BEHIND, Lines, size_of, wait_until
from tierloop.devices.drivers.gpu_options import GRID, Options
from tierloop.devices.drivers.gpu_probe import Slot, refuse_where_there_is_none, slot_of
from tierloop.devices.drivers.gpu_runtime import Accelerator, CudaAccelerator, Stream, fault_of
from tierloop.devices.drivers.uses import Uses
from tierloop.devices.errors import ConfigurationError, DeviceError, Gone, OutOfMemory, OutOfRange, Timeout, Unsupported
from tierloop.devices.info import DeviceInfo
from tierloop.devices.kernels import contract
from tierloop.devices.placement import Placements
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, System

if TYPE_CHECKING:
    from torch import Tensor

    from tierloop.devices.drivers.gpu_transfers import Peer, Program

_ALIGNMENT = 256
"""Regions begin on such a grid, so that rows of up to 256 bytes are moved as one unit each."""
_LEAST_RESERVE = 512 << 20
_LEAST_ROOM, _MOST_ROOM = 16 << 20, 2 << 30
"""What kernels plan with: less is many small pieces, and more makes none faster."""
_SHARED = "gpus"
"""Where the GPUs of a site find each other: {memory: device}."""


def open_gpu(
    name: str,
    site: Site,
    options: dict[str, Any],
    system: System = HOST,
    accelerator: Accelerator | None = None,
) -> GpuDevice:
    """The entry point `gpu`; `accelerator` is what to drive instead of the GPU that the options name.

    Raises ConfigurationError (options, virtual clock), NotPresent, NoPermission, Unsupported, OutOfMemory, Gone.
    """
    checked = Options.of(name, options)
    if site.clock.virtual:
        raise ConfigurationError(f"{name} is a real device and cannot run on the virtual clock; use the wall clock")
    slot = Slot()
    if accelerator is None:
        refuse_where_there_is_none(name, checked.number, system)
        slot = slot_of(checked.number, system)
        try:
            accelerator = CudaAccelerator(checked.device)
        except (RuntimeError, OSError) as error:
            raise Unsupported(name, "open", f"{checked.device} does not start: {error}") from error
    try:
        return GpuDevice(name, site, checked, accelerator, slot)
    except RuntimeError as error:
        if isinstance(error, DeviceError):
            raise
        kind = {"memory": OutOfMemory, "lost": Gone}.get(fault_of(error), Unsupported)
        raise kind(name, "open", f"{checked.device}: {error}") from error


class GpuDevice:
    """A GPU as a device; made by `open_gpu`."""

    def __init__(
        self, name: str, site: Site, options: Options, accelerator: Accelerator, slot: Slot | None = None
    ) -> None:
        from tierloop.devices.drivers.gpu_fused import verified
        from tierloop.devices.drivers.gpu_launches import Launches
        from tierloop.devices.drivers.gpu_staging import Registered, Scratch, Staging
        from tierloop.devices.drivers.gpu_transfers import Transfers

        self._name = name
        self._options = options
        self._accelerator = accelerator
        self._gpus: dict[str, GpuDevice] = site.shared.setdefault(_SHARED, {})
        gpus = self._gpus
        reached = Reached.of(options.reaches, {other: gpu._accelerator for other, gpu in gpus.items()}, accelerator)
        self._peers = {other: gpus[other] for other in reached.peers}
        self._fused = (
            verified(
                name, accelerator, options.attention,
                lambda done: wait_until(site.clock, done, options.deadline_s, options.poll_ns),
            )
            if options.attention != "eager"
            else None
        )  # fmt: skip
        self._slab = _slab(name, options, accelerator)
        self._extents = Extents(self._slab.numel(), _ALIGNMENT)
        self._offsets: dict[Region, int] = {}
        self._costs = Costs({})
        self._uses = Uses.of(site)
        self._closing = False
        self._staging = Staging(accelerator, options.staging_buffers, options.staging_nbytes)
        self._registered = Registered(accelerator, options.register, Placements.of(site).registered)
        self._scratch = Scratch(accelerator, self._extents)
        held = (accelerator, self._slab, self._offsets, self._staging)
        self._transfers = Transfers(*held, self._registered, self._peer)
        self._launches = Launches(*held, self._scratch, self._transfers, _room(options, accelerator), self._fused)
        num = options.queues + 2 + bool(reached.peers)
        self._lines = Lines(
            name, site.clock, accelerator, num, options.deadline_s, options.poll_ns, self._program, self._ended
        )
        self._zeroing = accelerator.stream()
        self._beside = accelerator.stream()
        self._info = describe(name, options, accelerator, self._extents.capacity, reached, slot or Slot(), self._fused)
        self._arena = Arena(name, self._info.memories[0], _ALIGNMENT, os.getpid())
        self._queues = QueueSet(name, num, DEPTH, site, self._lines.start)
        self._lines.attach(self._queues)
        gpus[name] = self

    @property
    def info(self) -> DeviceInfo:
        """What the device is and can do."""
        return self._info

    @property
    def why_not_registered(self) -> str:
        """Why copies of host memory go through buffers, the last time that it could not be registered."""
        return self._registered.why

    @property
    def fused_launches(self) -> int:
        """How many times the fused attention kernel ran; a command may take several."""
        return self._fused.launches if self._fused is not None else 0

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes: first fit, on a grid of 256. Raises OutOfMemory, OutOfRange, Unsupported, Gone."""
        self._alive("alloc")
        self._arena.grant(nbytes, memory, phantom)
        offset = self._extents.take(nbytes)
        if offset is None:
            self._collect()
            offset = self._extents.take(nbytes)
        if offset is None:
            raise self._extents.refusal(self._name, nbytes)
        try:
            self._zero(offset, self._extents.rounded(nbytes))
        except RuntimeError as error:
            self._extents.give(offset, nbytes)
            raise self._lines.failure("alloc", error, nbytes) from error
        region = self._arena.add(nbytes)
        self._offsets[region] = offset
        return region

    def free(self, region: Region) -> None:
        """Give a region's bytes back. Raises OutOfRange, Busy, Gone."""
        self._alive("free")
        self._arena.remove(region, self._uses.named(region) or self._queues.uses(region))
        self._extents.give(self._offsets.pop(region), region.nbytes)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises OutOfRange, Unsupported, Busy or Gone."""
        return self._queues.submit(command, queue, after, self._check(command, queue))

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the command would cost: measured where its kind was seen before, assumed otherwise."""
        traffic = self._check(command, queue)
        return self._costs.estimate(self._kind(command), size_of(command, traffic))

    def poll(self) -> None:
        """Go on with every command whose event is done, and end those that are through."""
        self._lines.poll()

    def close(self) -> None:
        """Wait for what is in flight, `deadline_s` at most, and give everything back; raises the first unread error.

        What does not come back in time is left behind: it is kept for as long as the process lives. Raises Timeout.
        """
        if self._closing:
            return
        self._closing = True
        quiet = self._lines.stop(self._zeroing, self._beside)
        self._arena.close()
        try:
            self._queues.close()
        finally:
            self._give_back(kept=not quiet or bool(self._lines.gone))
            if not quiet:
                raise Timeout(self._name, "close", f"work was still out after {self._options.deadline_s:g} s")

    def _check(self, command: Command, queue: int) -> Traffic:
        """What can be seen beforehand. Raises Gone, OutOfRange or Unsupported."""
        op = verb(command)
        self._alive(op)
        traffic = check(self._info, command, queue)
        measures = isinstance(command, Launch) and isinstance(command.args, contract.Chase)
        for region, _ in segments(command):
            owner = self if region.memory == self._name else self._peers.get(region.memory)
            if owner is not None:
                if region not in owner._offsets:
                    raise OutOfRange(self._name, op, f"{region} is not allocated there")
            elif measures:
                raise Unsupported(self._name, op, f"{region}: it measures the memory of the GPU")
            elif region.view is None or region.view.nbytes < region.nbytes or not region.view.flags.c_contiguous:
                raise Unsupported(self._name, op, f"{region} is not mapped by the host")
        for region, _ in write_segments(command):
            if region.view is not None and not region.view.flags.writeable:
                raise OutOfRange(self._name, op, f"{region} is read-only")
        return traffic

    def _program(self, command: Command, stream: Stream) -> Program:
        if isinstance(command, Write):
            return self._transfers.write(stream, command)
        if isinstance(command, Read):
            return self._transfers.read(stream, command)
        if isinstance(command, Copy):
            return self._transfers.copy(stream, command)
        if isinstance(command, Launch):
            return self._launches.launch(stream, command)
        assert isinstance(command, Flush)
        return self._launches.flush(stream)

    def _zero(self, offset: int, nbytes: int) -> None:
        """Everything that is enqueued from now on comes after the zeros."""
        accelerator, zeroed = self._accelerator, self._slab[offset : offset + nbytes]

        def work() -> None:
            zeroed.zero_()

        accelerator.enqueue(self._zeroing, work)
        event = accelerator.record(self._zeroing)
        for stream in (*self._lines.streams, self._beside):
            accelerator.wait(stream, event)

    def _collect(self) -> None:
        """Take back what commands have borrowed of the slab and are through with."""
        try:
            self._scratch.collect()
        except RuntimeError as error:
            raise self._lines.failure("alloc", error, 0) from error

    def _ended(self, completion: Completion, duration_ns: int) -> None:
        kind, size = self._kind(completion.command), size_of(completion.command, completion.traffic)
        self._costs.observe(kind, size, duration_ns)

    def _give_back(self, kept: bool) -> None:
        """What the GPU may still reach is kept; otherwise nothing is."""
        if kept:
            LEFT_BEHIND.append((self._slab, self._staging, self._registered, self._lines))
        else:
            self._registered.close()
            self._lines.forget()
        self._gpus.pop(self._name, None)
        del self._transfers, self._launches, self._staging, self._registered, self._slab
        if not kept:
            self._accelerator.close()

    def _peer(self, memory: str) -> Peer | None:
        """Another GPU as programs see it, None for any other memory."""
        from tierloop.devices.drivers.gpu_transfers import Peer

        other = self._peers.get(memory)
        if other is None:
            return None
        other._alive("copy")
        return Peer(other._slab, other._offsets, other._beside)

    def _alive(self, op: str) -> None:
        if self._closing:
            raise Gone(self._name, op, "the device is closed")
        self._arena.alive(op)
        if self._lines.gone:
            raise Gone(self._name, op, self._lines.gone)

    def _kind(self, command: Command) -> str:
        if isinstance(command, Launch) and isinstance(command.args, contract.Dense):
            return f"dense {command.args.label}"
        if isinstance(command, Copy):
            near = [side.region.memory == self._name for side in (command.source, command.target)]
            return "copy within" if all(near) else "copy out" if near[0] else "copy in"
        return verb(command)


def _room(options: Options, accelerator: Accelerator) -> int:
    """What one kernel may need besides its operands: a share of what the slab has left, as all streams may be busy."""
    return min(max(accelerator.memory()[0] // (4 * options.queues), _LEAST_ROOM), _MOST_ROOM)


def _slab(name: str, options: Options, accelerator: Accelerator) -> Tensor:
    """The device's memory, as much as the options say. Raises OutOfMemory."""
    free, total = accelerator.memory()
    reserve = max(_LEAST_RESERVE, free // 8) if options.reserve is None else options.reserve
    capacity = (options.capacity or free - reserve) // GRID * GRID
    if capacity < GRID or capacity > free:
        asked = options.capacity or f"all but a reserve of {reserve}"
        raise OutOfMemory(name, "open", f"{asked} bytes of {accelerator.name}: {free} of {total} are free")
    try:
        return accelerator.slab(capacity)
    except RuntimeError as error:
        raise OutOfMemory(
            name, "open", f"{capacity} bytes of {accelerator.name} in one piece, {free} of {total} are free: {error}"
        ) from error
