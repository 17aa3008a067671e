"""Contention on links against closed forms, under both clocks: fair shares, a small read beside a large copy, routes.

On the virtual clock the answers are exact, or the model is wrong. On the wall clock they hold as well as this host
keeps its promises; a run that broke one, or was later than a hundredth of its time, is invalid and counts for nothing.
"""

from __future__ import annotations

from tierloop.devices.commands import Copy
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait
from tierloop.emulators.parts import Profile
from tierloop.emulators.profile import find_profile, read_profile
from tierloop.tools.two_clocks import LATENESS_PERCENT, ChainLateness

LINK = "pcie"
"""Of the platform `demo`: from host memory to the GPU; its two copy engines and its kernels share it."""
SHARE_NBYTES = 16 << 20
LARGE_NBYTES = 64 << 20
SMALL_NBYTES = 4096
ROUTE_NBYTES = 8 << 20
_ROOM_NBYTES = 32 << 20
_ROUTES = {"emu:dram": ("pcie",), "emu:cxl": ("cxl", "pcie")}
_KERNELS, _ENGINE = 0, 2
"""Queues of the GPU: one of its kernels' (which copy, too), and that of the engine that copies to it."""
_DEADLINE_NS = 10**12

Judged = tuple[float | None, tuple[str, ...]]
"""A figure of an open platform like `demo`, None where the run was invalid, and why it was."""


def fair_share_error_pct(platform: Platform) -> Judged:
    """Two copies of equal size begin at once on one direction of a link: each should have half of its rate."""
    with _Way(platform, "emu:dram", 2 * SHARE_NBYTES) as way:
        took, invalid = way.run((_ENGINE, 0, SHARE_NBYTES), (_KERNELS, SHARE_NBYTES, SHARE_NBYTES))
        if invalid:
            return None, invalid
        passed = [ns - way.fixed_ns(queue) for ns, queue in zip(took, (_ENGINE, _KERNELS), strict=True)]
        return max(abs(SHARE_NBYTES * 10**9 / ns / (way.link_rate / 2) - 1) for ns in passed) * 100, ()


def small_delay_quanta(platform: Platform) -> Judged:
    """What a 4 KiB copy loses beside one of 64 MiB, in the time that 4 KiB take alone; nothing is moved but time."""
    with _Way(platform, "emu:dram", LARGE_NBYTES + SMALL_NBYTES, phantom=True) as way:
        small = (_KERNELS, LARGE_NBYTES, SMALL_NBYTES)
        (alone,), why_alone = way.run(small)
        (_, beside), why = way.run((_ENGINE, 0, LARGE_NBYTES), small)
        if why_alone or why:
            return None, (*why_alone, *why)
        return (beside - alone) * way.link_rate / (SMALL_NBYTES * 10**9), ()


def route_error_pct(platform: Platform) -> Judged:
    """A copy over two links against bytes / slowest rate + all latencies + overhead."""
    with _Way(platform, "emu:cxl", ROUTE_NBYTES) as way:
        (took,), invalid = way.run((_ENGINE, 0, ROUTE_NBYTES))
        if invalid:
            return None, invalid
        expected = ROUTE_NBYTES * 10**9 / way.slowest + way.fixed_ns(_ENGINE)
        return abs(took / expected - 1) * 100, ()


class _Way:
    """From a memory to the GPU, and what the files say of it: rates and times, dilated as the platform is."""

    def __init__(self, platform: Platform, source: str, nbytes: int, phantom: bool = False) -> None:
        self._platform = platform
        self._gpu = platform.device("emu:gpu")
        self._region = platform.memory_owner(source).alloc(nbytes, source, phantom)
        self._target = self._gpu.alloc(min(nbytes, _ROOM_NBYTES), phantom=phantom)
        sigma = platform.dilation
        links = platform.site.shared["topology"].links
        route = [links[name] for name in _ROUTES[source]]
        ends = [_profile(platform, name) for name in (source, "emu:gpu")]
        memories = [profile.memory for profile in ends if profile.memory is not None]
        self.link_rate = links[LINK].forward_bytes_per_s / sigma
        rates = [memories[0].read_bytes_per_s, memories[1].write_bytes_per_s]
        rates += [link.forward_bytes_per_s if link.name == LINK else link.back_bytes_per_s for link in route]
        self.slowest = min(rates) / sigma
        self._latency_ns = sigma * (sum(m.latency_ns for m in memories) + sum(link.latency_ns for link in route))
        executors = (e for e in ends[1].executors for _ in range(e.queues))
        self._overheads_ns = [sigma * (executor.overhead_ns + executor.span_ns) for executor in executors]

    def fixed_ns(self, queue: int) -> int:
        """What a copy of one span takes beside its bytes."""
        return int(self._latency_ns + self._overheads_ns[queue])

    def run(self, *copies: tuple[int, int, int]) -> tuple[list[int], tuple[str, ...]]:
        """Copies (queue, offset, nbytes) that begin at once: how long each took, and why that must not be believed."""
        platform = self._platform
        for restart in platform.site.restarts:
            restart()
        lateness = ChainLateness()
        platform.site.observers.append(lateness)
        try:
            started = [self._gpu.submit(self._copy(offset, nbytes), queue) for queue, offset, nbytes in copies]
            wait(platform.clock, started, platform.clock.now() + _DEADLINE_NS)
        finally:
            platform.site.observers.remove(lateness)
        took = [c.ended_ns - c.started_ns for c in started]
        invalid = list(platform.site.invalid)
        if lateness.worst_ns * 100 > LATENESS_PERCENT * max(took):
            invalid.append(f"late by {lateness.worst_ns / 1e6:.2f} ms in {max(took) / 1e6:.1f} ms")
        return took, tuple(invalid)

    def _copy(self, offset: int, nbytes: int) -> Copy:
        """Where it goes does not matter for its time: what is larger than the target goes there in several pieces."""
        pieces = [min(_ROOM_NBYTES, nbytes - done) for done in range(0, nbytes, _ROOM_NBYTES)]
        return Copy(self._region.at(offset, nbytes), Segment(self._target, Spans([(0, piece) for piece in pieces])))

    def __enter__(self) -> _Way:
        return self

    def __exit__(self, *_: object) -> None:
        for region in (self._region, self._target):
            self._platform.free(region)


def _profile(platform: Platform, device: str) -> Profile:
    return read_profile(find_profile(platform.device(device).info.notes["profile"]))
