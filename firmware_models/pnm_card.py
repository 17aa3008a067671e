"""A near-memory processor as firmware: what stands behind the window of the pnm driver, and a back door for tests.

`PnmCard.bus()` is the face that a driver sees: a window of bytes and a doorbell, nothing else. The card works when the
host looks at its completion ring, at no other time; so what a driver submits is not done before it polls. The card
itself is the back door: `peek` and `poke` what the engines see, `poison` it, `reset`, `hold` and `release` answers,
`stall` and `shuffle` the engines, let an answer `fail`, `lose` the card, `stale_nbytes`.

The parts: pnm_processor.py (sessions and commands), pnm_dispatcher.py (jobs over engines), pnm_aggregator.py (roots out
of states), pnm_memory.py (who sees which bytes). There is no clock and no thread; pnm.py is the model of its speed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.pnm_arguments import DTYPE_NUMBERS, DTYPES, KERNELS, bits_of
from tierloop.devices.drivers.pnm_transport import WindowBytes
from tierloop.devices.drivers.pnm_wire import ENTRY_NBYTES, VERSION, Layout, Limits, Opcode
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels import MICROKERNEL
from tierloop.devices.spans import Spans
from tierloop.firmware_models.pnm_dispatcher import Dispatcher
from tierloop.firmware_models.pnm_memory import CardMemory
from tierloop.firmware_models.pnm_processor import Fault, Processor

_PAGE = 4096


@dataclass(frozen=True)
class PnmParts:
    """What a card is made of: sizes in bytes, rings in entries."""

    engines: int = 4
    sram_nbytes: int = 256 << 10
    capacity: int = 16 << 20
    grid: int = ENTRY_NBYTES
    entries: int = 32
    arena_nbytes: int = 1 << 20
    largest_arguments: int = 1 << 20
    most_spans: int = 1 << 16
    kernels: frozenset[str] = frozenset(KERNELS)
    dtypes: frozenset[str] = frozenset(DTYPE_NUMBERS)
    arithmetic: Arithmetic = field(default_factory=lambda: Arithmetic(MICROKERNEL))

    def layout(self) -> Layout:
        """The window of such a card: each part on pages of its own."""
        ring = _pages(self.entries * ENTRY_NBYTES)
        submission = 2 * _PAGE
        arena = submission + 2 * ring
        memory = arena + _pages(self.arena_nbytes)
        return Layout(
            oldest=VERSION,
            newest=VERSION,
            window_nbytes=memory + _pages(self.capacity),
            doorbell_offset=_PAGE,
            submission_offset=submission,
            submission_entries=self.entries,
            completion_offset=submission + ring,
            completion_entries=self.entries,
            arena_offset=arena,
            arena_nbytes=self.arena_nbytes,
            memory_offset=memory,
            memory_nbytes=self.capacity,
        )

    def limits(self) -> Limits:
        """What such a card answers to HELLO."""
        return Limits(
            version=VERSION,
            engines=self.engines,
            sram_nbytes=self.sram_nbytes,
            capacity=self.capacity,
            grid=self.grid,
            largest_arguments=self.largest_arguments,
            most_spans=self.most_spans,
            kernels=bits_of(KERNELS, self.kernels),
            dtypes=bits_of(DTYPES, self.dtypes),
            arithmetic=self.arithmetic,
        )


class PnmCard:
    """A card with its memory; see the top of the file. `window` is where it shall lie, uint8 of the layout's size."""

    def __init__(self, parts: PnmParts | None = None, window: NDArray[np.uint8] | None = None) -> None:
        self.parts = parts or PnmParts()
        self.layout = self.parts.layout()
        self.window = np.zeros(self.layout.window_nbytes, dtype=np.uint8) if window is None else window
        packed = self.layout.pack()
        self.window[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        start = self.layout.memory_offset
        self.memory = CardMemory(self.window[start : start + self.layout.memory_nbytes], self.parts.grid)
        self.dispatcher = Dispatcher(self.parts.engines, self.parts.sram_nbytes)
        self.processor = Processor(self.window, self.layout, self.parts.limits(), self.memory, self.dispatcher)
        self.lost = False

    def bus(self) -> Bus:
        """What a driver sees."""
        return Bus(self)

    # -- the back door -------------------------------------------------------------------------------------------

    @property
    def stale_nbytes(self) -> int:
        """Bytes that engines read while the host had newer ones that it had not added."""
        return self.memory.stale

    def peek(self, region: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a region as the engines see them."""
        view = self.memory.region(region).view
        assert view is not None, "regions of the model show their bytes"
        return view[offset : offset + nbytes].tobytes()

    def poke(self, region: int, offset: int, data: bytes) -> None:
        """Change what the engines see."""
        view = self.memory.region(region).view
        assert view is not None, "regions of the model show their bytes"
        view[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def poison(self, region: int, offset: int, nbytes: int) -> None:
        """Bytes that can no longer be read, until they are written: the answer to whoever names them is MEDIA."""
        self.memory.lose(region, offset, nbytes)

    def reset(self) -> None:
        """Lose power for a moment: the session and its regions are gone."""
        self.processor.reset()

    def hold(self) -> None:
        """Post no answers until `release`."""
        self.processor.held = True

    def stall(self) -> None:
        """Let the engines do nothing until `release`."""
        self.dispatcher.stalled = True

    def release(self) -> None:
        """Post what was held or delayed, and let the engines work."""
        self.dispatcher.stalled = False
        self.processor.release()

    def shuffle(self, seed: int) -> None:
        """Let engines finish in an order of chance."""
        self.dispatcher.order = random.Random(seed)

    def fail(self, fault: Fault, opcode: Opcode | None = None) -> None:
        """Let the next answer, or the next one for a kind of command, go wrong."""
        self.processor.faults.append((opcode, fault))

    def lose(self) -> None:
        """Leave the bus: every byte of the window reads as ones, and nothing that is written arrives."""
        self.lost = True


class Bus:
    """The window of a card."""

    def __init__(self, card: PnmCard) -> None:
        self._card = card
        self._bytes = WindowBytes(card.window)
        self.model = "the firmware model of a near-memory processor"
        self.closed = False

    @property
    def nbytes(self) -> int:
        return self._card.window.nbytes

    def read(self, spans: Spans, into: NDArray[np.uint8]) -> None:
        card = self._card
        if card.lost:
            into[:] = 0xFF
            return
        ring = card.layout.completion_offset
        if _overlap(spans, ring, ring + card.layout.completion_entries * ENTRY_NBYTES):
            card.processor.advance()
        self._bytes.read(spans, into)

    def write(self, spans: Spans, data: NDArray[np.uint8]) -> None:
        card = self._card
        if card.lost:
            return
        self._bytes.write(spans, data)
        start = card.layout.memory_offset
        if spans.end > start:
            for offset, nbytes in spans.array.tolist():
                if offset >= start:
                    card.memory.written(offset - start, nbytes)

    def ring(self, offset: int, value: int) -> None:
        card = self._card
        if offset == card.layout.doorbell_offset and not card.lost:
            card.processor.ring(value)

    def close(self) -> None:
        self.closed = True


def _overlap(spans: Spans, start: int, end: int) -> bool:
    array = spans.array
    return bool(((array[:, 0] < end) & (array[:, 0] + array[:, 1] > start)).any())


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
