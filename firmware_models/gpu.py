"""A GPU as its driver sees it work: two copy engines, cores that kernels share, and a memory of so many bytes.

Pure: a state and what happens give the next state. It has no clock, no threads and no bytes; it is told the time.

- Each direction has one copy engine. It carries out one copy at a time, first come, first served: `copy_ns`, then bytes
  at the rate of the link in that direction. The two directions do not disturb each other.
- A kernel costs `launch_ns`, and then the larger of bytes / bandwidth and FLOPs / rate (the roofline). Kernels run side
  by side: those that still move bytes share the bandwidth evenly, those that still compute share the FLOP rate evenly.
  The launches themselves overlap. Copies do not take from the memory's bandwidth, of which they are a few hundredths.
- Time is exact inside (fractions of ns) and rounded up where it comes out.

The bus face is `take`, `give`, `submit`, `advance` and `finishes`; the back door is `throttle` (slower cores), `poison`
(an error in memory that cannot be corrected: who reads it loses the GPU, as a context of a real one is lost), `fail`,
`hold` and `release` (nothing is reported meanwhile), `reset`. Whatever is not legal raises Refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

NS = 1_000_000_000
Direction = Literal["to", "from"]
Spans = tuple[tuple[int, int], ...]
"""Bytes of the memory that work reads: (offset, nbytes) each."""
_NONE = Fraction(0)


class Refused(ValueError):
    """Not legal now; the message says why."""


def arithmetic_ns(flops: int, flops_per_s: int) -> int:
    """How long the cores take for so many operations, alone: rounded up."""
    return -(-flops * NS // flops_per_s)


def transfer_ns(nbytes: int, bytes_per_s: int) -> int:
    """How long so many bytes take, alone: rounded up."""
    return -(-nbytes * NS // bytes_per_s)


@dataclass(frozen=True)
class GpuGeometry:
    """Sizes in bytes, rates per second, times in ns."""

    capacity: int
    memory_bytes_per_s: int
    flops_per_s: int
    to_bytes_per_s: int
    from_bytes_per_s: int
    launch_ns: int = 0
    copy_ns: int = 0

    def __post_init__(self) -> None:
        rates = (self.memory_bytes_per_s, self.flops_per_s, self.to_bytes_per_s, self.from_bytes_per_s, self.capacity)
        if min(rates) < 1 or min(self.launch_ns, self.copy_ns) < 0:
            raise Refused(f"a GPU needs rates and a capacity of at least 1 and times of at least 0: {self}")

    def roofline_ns(self, nbytes: int, flops: int) -> int:
        """What a kernel costs alone."""
        return self.launch_ns + max(
            transfer_ns(nbytes, self.memory_bytes_per_s), arithmetic_ns(flops, self.flops_per_s)
        )


@dataclass(frozen=True)
class Copy:
    """Bytes over the link: `to` the GPU or `from` it. `reads` are those of its memory that it reads."""

    direction: Direction
    nbytes: int
    reads: Spans = ()


@dataclass(frozen=True)
class Kernel:
    """Bytes that are read and written, operations, and which bytes of the memory are read."""

    nbytes: int
    flops: int = 0
    reads: Spans = ()


@dataclass(frozen=True)
class Finished:
    """Work that is over, by its ticket; `error` says what came of it instead."""

    ticket: int
    at_ns: int
    error: str = ""


@dataclass(frozen=True)
class _Job:
    """Work under way: what is left of its fixed time in ns, of its bytes and of its operations."""

    ticket: int
    work: Copy | Kernel
    fixed: Fraction
    nbytes: Fraction
    flops: Fraction

    @property
    def over(self) -> bool:
        return not (self.fixed or self.nbytes or self.flops)


@dataclass(frozen=True)
class GpuState:
    """A GPU at a point in time; made by `idle`, changed by the functions below only."""

    geometry: GpuGeometry
    now: Fraction = _NONE
    taken: int = 0
    tickets: int = 0
    kernels: tuple[_Job, ...] = ()
    to: tuple[_Job, ...] = ()
    from_: tuple[_Job, ...] = ()
    done: tuple[Finished, ...] = ()
    """What is over and has not been reported."""
    permille: int = 1000
    """The clock of the cores, of 1000."""
    poisoned: Spans = ()
    held: bool = False
    lost: str = ""
    """Why nothing works any more, or nothing."""
    moved: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes that finished work has moved: through `memory`, `to` the GPU and `from` it."""


def idle(geometry: GpuGeometry) -> GpuState:
    """A GPU that has just been switched on, at time 0."""
    return GpuState(geometry)


def take(state: GpuState, nbytes: int) -> GpuState:
    """Allocate. Refused beyond the capacity, and on a GPU that is lost."""
    _alive(state)
    if not 1 <= nbytes <= state.geometry.capacity - state.taken:
        raise Refused(f"{nbytes} bytes; {state.geometry.capacity - state.taken} of {state.geometry.capacity} are free")
    return replace(state, taken=state.taken + nbytes)


def give(state: GpuState, nbytes: int) -> GpuState:
    """Free. Refused for more than is taken."""
    if not 0 <= nbytes <= state.taken:
        raise Refused(f"{nbytes} bytes are given back; {state.taken} are taken")
    return replace(state, taken=state.taken - nbytes)


def submit(state: GpuState, work: Copy | Kernel, now: int) -> tuple[GpuState, int]:
    """Hand work in; returns its ticket. Refused for sizes below 0, reads outside the memory, and on a lost GPU."""
    state = _until(state, now)
    _alive(state)
    flops = work.flops if isinstance(work, Kernel) else 0
    if min(work.nbytes, flops) < 0:
        raise Refused(f"{work}: sizes are at least 0")
    for offset, nbytes in work.reads:
        if offset < 0 or nbytes < 0 or offset + nbytes > state.geometry.capacity:
            raise Refused(f"[{offset}, {offset + nbytes}) is outside {state.geometry.capacity} bytes")
    ticket, geometry = state.tickets, state.geometry
    fixed = geometry.launch_ns if isinstance(work, Kernel) else geometry.copy_ns
    job = _Job(ticket, work, Fraction(fixed), Fraction(work.nbytes), Fraction(flops))
    state = replace(state, tickets=ticket + 1)
    if isinstance(work, Kernel):
        return replace(state, kernels=(*state.kernels, job)), ticket
    if work.direction == "to":
        return replace(state, to=(*state.to, job)), ticket
    if work.direction == "from":
        return replace(state, from_=(*state.from_, job)), ticket
    raise Refused(f"direction {work.direction!r}; allowed: 'to', 'from'")


def advance(state: GpuState, now: int) -> tuple[GpuState, tuple[Finished, ...]]:
    """Let time pass until `now`; returns what is over since the last time, in the order in which it ended."""
    state = _until(state, now)
    if state.held:
        return state, ()
    return replace(state, done=()), state.done


def finishes(state: GpuState) -> tuple[Finished, ...]:
    """When everything under way would be over if nothing else came; provisional, and nothing while it is held."""
    while state.kernels or state.to or state.from_:
        state = _step(state, None)
    return () if state.held else state.done


def throttle(state: GpuState, permille: int, now: int) -> GpuState:
    """From now on the cores run at so many thousandths of their clock. The memory's rate stays."""
    if not 1 <= permille <= 1000:
        raise Refused(f"a clock of {permille} thousandths; allowed: 1 to 1000")
    return replace(_until(state, now), permille=permille)


def poison(state: GpuState, offset: int, nbytes: int) -> GpuState:
    """Bytes that can no longer be read; until `reset`."""
    if offset < 0 or nbytes < 1 or offset + nbytes > state.geometry.capacity:
        raise Refused(f"[{offset}, {offset + nbytes}) is outside {state.geometry.capacity} bytes")
    return replace(state, poisoned=(*state.poisoned, (offset, nbytes)))


def fail(state: GpuState, now: int, why: str = "fallen off the bus") -> GpuState:
    """The GPU is lost: everything under way is over, with that error."""
    state = _until(state, now)
    jobs = sorted((*state.kernels, *state.to, *state.from_), key=lambda job: job.ticket)
    ended = tuple(Finished(job.ticket, _up(state.now), why) for job in jobs)
    return replace(state, kernels=(), to=(), from_=(), done=state.done + ended, lost=state.lost or why)


def hold(state: GpuState) -> GpuState:
    """Work goes on, and nobody is told."""
    return replace(state, held=True)


def release(state: GpuState) -> GpuState:
    """Report again."""
    return replace(state, held=False)


def reset(state: GpuState, now: int) -> GpuState:
    """Everything that is under way is lost, and so is what memory held; the GPU works again, at its full clock."""
    state = fail(state, now, "reset")
    return replace(state, lost="", permille=1000, poisoned=(), held=False, taken=0)


def _alive(state: GpuState) -> None:
    if state.lost:
        raise Refused(f"the GPU is lost: {state.lost}")


def _until(state: GpuState, now: int) -> GpuState:
    if now < state.now:
        raise Refused(f"time {now} lies before {_up(state.now)}")
    while (state.kernels or state.to or state.from_) and state.now < now:
        state = _step(state, Fraction(now))
    return replace(state, now=max(state.now, Fraction(now)))


def _step(state: GpuState, limit: Fraction | None) -> GpuState:
    """To the next point at which something ends or begins, but not beyond the limit."""
    rates = dict(_rates(state))
    wait = min(_milestone(job, *rates[job.ticket]) for job in _moving(state))
    if limit is not None:
        wait = min(wait, limit - state.now)
    after = {job.ticket: _moved(job, wait, *rates[job.ticket]) for job in _moving(state)}
    lines = [tuple(after.get(job.ticket, job) for job in line) for line in (state.kernels, state.to, state.from_)]
    state = replace(state, now=state.now + wait)
    for job in sorted(after.values(), key=lambda job: job.ticket):
        if job.over and not state.lost:
            state = _ended(state, job)
    if state.lost:
        left = [job for line in lines for job in line if not any(d.ticket == job.ticket for d in state.done)]
        return fail(replace(state, kernels=tuple(left), to=(), from_=()), _up(state.now), state.lost)
    kernels, to, from_ = (tuple(job for job in line if not job.over) for line in lines)
    return replace(state, kernels=kernels, to=to, from_=from_)


def _moving(state: GpuState) -> Iterator[_Job]:
    """Every kernel, and the first copy of each direction."""
    yield from state.kernels
    yield from state.to[:1]
    yield from state.from_[:1]


def _rates(state: GpuState) -> Iterator[tuple[int, tuple[Fraction, Fraction]]]:
    """Bytes and operations per ns of whatever moves, by ticket."""
    geometry = state.geometry
    running = [job for job in state.kernels if not job.fixed]
    movers, workers = sum(1 for job in running if job.nbytes), sum(1 for job in running if job.flops)
    bandwidth = Fraction(geometry.memory_bytes_per_s, NS * max(movers, 1))
    power = Fraction(geometry.flops_per_s * state.permille, 1000 * NS * max(workers, 1))
    for job in state.kernels:
        yield job.ticket, (bandwidth, power)
    for line, rate in ((state.to, geometry.to_bytes_per_s), (state.from_, geometry.from_bytes_per_s)):
        for job in line[:1]:
            yield job.ticket, (Fraction(rate, NS), power)


def _milestone(job: _Job, bytes_per_ns: Fraction, flops_per_ns: Fraction) -> Fraction:
    """How long until something of a job is through; 0 where nothing is left of it."""
    if job.fixed:
        return job.fixed
    left = [amount / rate for amount, rate in ((job.nbytes, bytes_per_ns), (job.flops, flops_per_ns)) if amount]
    return min(left, default=_NONE)


def _moved(job: _Job, wait: Fraction, bytes_per_ns: Fraction, flops_per_ns: Fraction) -> _Job:
    if job.fixed:
        return replace(job, fixed=job.fixed - wait)
    return replace(
        job, nbytes=max(job.nbytes - wait * bytes_per_ns, _NONE), flops=max(job.flops - wait * flops_per_ns, _NONE)
    )


def _ended(state: GpuState, job: _Job) -> GpuState:
    work = job.work
    if any(_overlap(read, bad) for read in work.reads for bad in state.poisoned):
        why = "an error in memory that cannot be corrected"
        return replace(state, done=(*state.done, Finished(job.ticket, _up(state.now), why)), lost=why)
    place = "memory" if isinstance(work, Kernel) else work.direction
    moved = {**state.moved, place: state.moved.get(place, 0) + work.nbytes}
    return replace(state, done=(*state.done, Finished(job.ticket, _up(state.now))), moved=moved)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1] and a[1] > 0


def _up(time: Fraction) -> int:
    return -(-time.numerator // time.denominator)
