"""How fast the virtual clock is: events, media operations, commands of a policy, and a decode step as shapes only.

Seconds are those of the thread's processor time, best of several runs: a simulation is one thread that never waits, and
what other programs take is not its own. What is timed is all of it: the coroutine of the policy, the checks of every
command, queues, costs, contention, the clock. No garbage of earlier runs is collected meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Copy
from tierloop.devices.completion import Completion
from tierloop.devices.registry import open_platform
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING, Ranges
from tierloop.runtime.loop import Loop
from tierloop.runtime.trace_hash import TraceHash
from tierloop.tools.phantom_decode import LLAMA_3_8B, DecodeShape, open_phantom

DRIVE = FlashGeometry(
    capacity=1 << 32,
    unit_nbytes=4096,
    page_nbytes=16_384,
    planes=2,
    channels=8,
    dies_per_channel=4,
    stripes_per_block=256,
    read_ns=50_000,
    program_ns=400_000,
    erase_ns=2_000_000,
    channel_bytes_per_s=1_200_000_000,
    spare_percent=10,
)
"""4 GiB in units of 4 KiB over 32 dies: 27 MB of tables, more than most caches hold."""
COMMAND_UNITS = 65_536
_EVENTS = 5_000
_ROUNDS, _BATCH = 40, 24


@dataclass(frozen=True)
class PhantomFigures:
    """A decode step: seconds of the best run, what it stood for, its commands and the hash of its trace."""

    step_s: float
    simulated_s: float
    commands: int
    trace_hash: str

    @property
    def simulated_s_per_s(self) -> float:
        """Simulated seconds per second of this host."""
        return self.simulated_s / self.step_s


def events_per_s(tries: int) -> float:
    """Events that a virtual clock runs, each at its own time, in a random order of registration."""
    times = np.random.default_rng(0).permutation(_EVENTS).tolist()

    def run() -> None:
        clock = VirtualClock()
        seen: list[int] = []
        for time_ns in times:
            clock.call_at(time_ns, seen.append, time_ns)
        clock.wait_until(_EVENTS)
        assert len(seen) == _EVENTS

    return _EVENTS / _best(run, tries)


def media_operations_per_s(tries: int) -> dict[str, float]:
    """Units that the flash model reads and writes inside one command of 65,536 units, on a drive that has been in use.

    Units that are collected as garbage count: each is read and written again.
    """
    model, order = FlashModel(DRIVE), np.random.default_rng(0)
    everything = np.array([[0, DRIVE.units * DRIVE.unit_nbytes]], dtype=np.int64)
    model.access(NOTHING, everything)
    model.age()

    def ranges(sequential: bool) -> Ranges:
        if sequential:
            first = int(order.integers(DRIVE.units - COMMAND_UNITS))
            return np.array([[first, COMMAND_UNITS]], dtype=np.int64) * DRIVE.unit_nbytes
        units = order.integers(0, DRIVE.units, COMMAND_UNITS)
        return np.stack([units, np.ones_like(units)], axis=1) * DRIVE.unit_nbytes

    figures: dict[str, float] = {}
    for _ in range(tries):
        for write in (False, True):
            for sequential in (False, True):
                mine = ranges(sequential)
                begun = time.thread_time()
                work = model.access(NOTHING, mine) if write else model.access(mine, NOTHING)
                spent = time.thread_time() - begun
                name = f"{'sequential' if sequential else 'random'} {'writes' if write else 'reads'}"
                rate = work.nbytes / DRIVE.unit_nbytes / spent
                figures[name] = max(figures.get(name, 0.0), rate)
    return figures


def commands_per_s(tries: int, contended: bool = False) -> float:
    """Commands of a policy on the platform `demo`: batches of copies to the GPU and back, each after the one before.

    If `contended`, each comes after the one before on its own queue, and a third queue copies from the CXL card: then
    three at a time share host memory, and every arrival and departure moves the ends of the others.
    """
    with open_platform("demo", clock="virtual") as platform:
        gpu, dram = platform.device("emu:gpu"), platform.device("emu:dram")
        near, far, card = (
            platform.memory_owner(name).alloc(1 << 20, name, phantom=True).at(0, 4096)
            for name in ("emu:dram", "emu:gpu", "emu:cxl")
        )
        moves = [(gpu, 2, Copy(near, far)), (gpu, 3, Copy(far, near))]
        if contended:
            moves.append((dram, 0, Copy(card, near)))
        loop = Loop(platform.clock)

        async def policy() -> None:
            last: list[list[Completion]] = [[] for _ in moves]
            for _ in range(_ROUNDS):
                for _ in range(_BATCH // len(moves)):
                    for number, (device, queue, command) in enumerate(moves):
                        before = last[number if contended else number - 1]
                        last[number] = [device.submit(command, queue, before)]
                for completions in last:
                    await completions[0]

        return _ROUNDS * _BATCH / _best(lambda: loop.run(policy()), tries)


def phantom_figures(tries: int, shape: DecodeShape = LLAMA_3_8B) -> PhantomFigures:
    """A decode step of Llama-3-8B shapes, 2²⁰ tokens × batch 8, over a GPU and four PNM devices."""
    with open_phantom(shape) as scenario:
        trace = TraceHash(scenario.platform)
        simulated_ns, commands = scenario.run()
        digest = trace.end()
        step_s = _best(scenario.run, tries)
        return PhantomFigures(step_s, simulated_ns / 1e9, commands, digest)


def _best(run: Callable[[], object], tries: int) -> float:
    """Seconds of the best of several runs, after one that is not timed."""
    run()
    with _no_old_garbage():
        best = float("inf")
        for _ in range(tries):
            begun = time.thread_time()
            run()
            best = min(best, time.thread_time() - begun)
    return best


@contextmanager
def _no_old_garbage() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
