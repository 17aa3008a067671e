"""A place to test the pnm driver: the unmodified driver on the bus face of a firmware model."""

from __future__ import annotations

import heapq
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.attention_case import bytes_of
from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Command, Launch, Operand
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.pnm import PnmDevice, open_pnm
from tierloop.devices.errors import DeviceError
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.firmware_models.pnm_card import PnmCard, PnmParts

MIB = 1 << 20
LAUNCHES, TRANSFERS = 0, 2
"""The first queue of each executor, with two queues each."""


class SteppingClock(VirtualClock):
    """A clock for real devices on which each look takes 1 µs: what waits for a device comes to its deadline at once."""

    virtual = False

    def now(self) -> int:
        self._now += 1_000
        return self._now

    def run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        while not done():
            if not self._heap or self._heap[0][0] > deadline_ns:
                self._now = max(self._now, deadline_ns)
                return False
            due_ns, _, call, args = heapq.heappop(self._heap)
            self._now = max(self._now, due_ns)
            call(*args)
        return True


@dataclass
class Rig:
    """A site, a card, and the devices that were opened on it, one after another."""

    card: PnmCard = field(default_factory=PnmCard)
    site: Site = field(default_factory=lambda: Site(clock=SteppingClock(), checker=HazardChecker()))
    options: dict[str, Any] = field(default_factory=lambda: {"deadline_ms": 50})
    opened: list[PnmDevice] = field(default_factory=list)
    tries: int = 0
    """Every try to open has a session number of its own, as it has by chance elsewhere."""

    def open(self, **options: Any) -> PnmDevice:
        """Begin a session on the card."""
        number = self.tries = self.tries + 1
        device = open_pnm(
            f"pnm{number}", self.site, {**self.options, **options}, window=self.card.bus(), identity=(number, 77)
        )
        self.opened.append(device)
        return device

    @property
    def device(self) -> PnmDevice:
        """The device that was opened last; opened now if there is none."""
        return self.opened[-1] if self.opened else self.open()

    def region(self, data: NDArray[Any] | bytes) -> Region:
        """A region with these bytes."""
        flat = np.frombuffer(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes(), dtype=np.uint8)
        region = self.device.alloc(flat.nbytes)
        write_bytes(self.site.clock, self.device, region.all(), flat, TRANSFERS)
        return region

    def moved(self, launch: Launch) -> Launch:
        """The launch with its operands on the device: regions of the test become regions there, with their bytes."""
        there: dict[int, Region] = {}

        def moved(operand: Operand) -> Operand:
            for one, _ in operand:
                if one.id not in there:
                    there[one.id] = self.region(bytes_of(one).tobytes() or b"\0")
            return tuple(Segment(there[one.id], spans) for one, spans in operand)

        reads, writes = (tuple(map(moved, operands)) for operands in (launch.reads, launch.writes))
        return Launch(launch.args, reads, writes)

    def result(self, launch: Launch) -> NDArray[np.uint8]:
        """What a launch wrote, all operands end to end."""
        parts = [
            read_bytes(self.site.clock, self.device, segment, TRANSFERS)
            for operand in launch.writes
            for segment in operand
        ]
        return np.concatenate(parts)

    def read(self, region: Region) -> NDArray[np.uint8]:
        """All bytes of a region."""
        return read_bytes(self.site.clock, self.device, region.all(), TRANSFERS)

    def submit(self, command: Command, queue: int | None = None, **more: Any) -> Completion:
        """Submit to the first queue that carries such a command."""
        default = LAUNCHES if isinstance(command, Launch) else TRANSFERS
        return self.device.submit(command, default if queue is None else queue, **more)

    def run(self, command: Command, queue: int | None = None) -> Completion:
        """Submit, wait, and raise what went wrong."""
        completion = self.submit(command, queue)
        wait(self.site.clock, completion)
        return completion

    def error_of(self, *completions: Completion) -> list[DeviceError]:
        """Wait for commands that must fail; returns their errors."""
        clock = self.site.clock
        assert clock.run_until(lambda: all(c.done for c in completions), clock.now() + 10**12), f"{completions} hang"
        errors = []
        for completion in completions:
            assert completion.error is not None, f"{completion} ended well"
            errors.append(completion.error)
            try:
                completion.result()
            except DeviceError:
                continue
        return errors

    def close(self) -> None:
        """Close whatever is open."""
        for device in self.opened:
            device.close()


def card_of(**parts: Any) -> PnmCard:
    """A card made of other parts."""
    return PnmCard(PnmParts(**parts))


@contextmanager
def served(path: Path, parts: PnmParts) -> Iterator[PnmCard]:
    """Firmware that looks at the doorbell in a mapping of its own, on a thread of its own."""
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    window = np.frombuffer(mapping, dtype=np.uint8)
    card, stop = PnmCard(parts, window), threading.Event()
    layout = card.layout
    bell = window[layout.doorbell_offset : layout.doorbell_offset + 8].view("<u8")

    def serve() -> None:
        last = 0
        while not stop.wait(0.0002):
            value = int(bell[0])
            if value != last:
                last = value
                card.memory.written(0, layout.memory_nbytes)
                card.processor.ring(value)
            card.processor.advance()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield card
    finally:
        stop.set()
        thread.join()
