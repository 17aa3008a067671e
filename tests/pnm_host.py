"""A host that speaks the wire format without the driver, and may say anything at all: for tests of firmware."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tierloop.devices.drivers.pnm_arguments import pack_segment
from tierloop.devices.drivers.pnm_wire import (
    ENTRY_NBYTES,
    HELLO_BELL,
    TEXT_NBYTES,
    VERSION,
    Answer,
    Entry,
    Opcode,
    Place,
    checksum,
    pack_hello,
    slot_of,
)
from tierloop.devices.spans import Spans
from tierloop.firmware_models.pnm_card import PnmCard


@dataclass
class Host:
    """One session on a card: `send` writes a command and rings, `answers` takes what has come."""

    card: PnmCard
    session: int = 1
    nonce: int = 5
    sent: int = 0
    seen: int = 0

    def __post_init__(self) -> None:
        self._bus = self.card.bus()
        self._layout = self.card.layout

    def hello(self) -> Answer:
        """Begin the session."""
        self.sent = self.seen = 0
        self.put(self._layout.completion_offset, bytes(self._layout.completion_entries * ENTRY_NBYTES))
        self.send(Opcode.HELLO, pack_hello(VERSION, VERSION))
        return self.answers()[-1]

    def entry(self, opcode: int, arguments: bytes, payload_check: int = 0) -> Entry:
        """The next command, with its arguments written to the start of the arena."""
        _, phase = slot_of(self.sent + 1, self._layout.submission_entries)
        self.put(self._layout.arena_offset, arguments)
        room = max(len(arguments), TEXT_NBYTES)
        return Entry(
            opcode, phase, self.session, room, self.sent + 1, 900 + self.sent, 0, len(arguments), checksum(arguments),
            payload_check, self.nonce,
        )  # fmt: skip

    def send(self, opcode: int, arguments: bytes = b"", payload_check: int = 0, /, **changes: int) -> None:
        """Write the next command, with some fields changed, and ring."""
        entry = replace(self.entry(opcode, arguments, payload_check), **changes)
        self.send_frame(entry.pack(), opcode == Opcode.HELLO)

    def send_frame(self, frame: bytes, is_hello: bool = False) -> None:
        """Write any 64 bytes as the next command, and ring."""
        self.sent += 1
        slot, _ = slot_of(self.sent, self._layout.submission_entries)
        self.put(self._layout.submission_offset + slot * ENTRY_NBYTES, frame)
        self.ring(HELLO_BELL | self.session if is_hello else self.sent)

    def ask(self, opcode: int, arguments: bytes = b"", payload_check: int = 0, /, **changes: int) -> Answer:
        """Send a command, and return its answer, which must be the only one."""
        self.send(opcode, arguments, payload_check, **changes)
        (answer,) = self.answers()
        return answer

    def answers(self) -> list[Answer]:
        """The answers that have come since."""
        found: list[Answer] = []
        while True:
            slot, phase = slot_of(self.seen + 1, self._layout.completion_entries)
            frame = self.get(self._layout.completion_offset + slot * ENTRY_NBYTES, ENTRY_NBYTES)
            if not any(frame):
                return found
            answer = Answer.unpack(frame)
            if answer.phase != phase or answer.number != self.seen + 1:
                return found
            self.seen += 1
            found.append(answer)

    def reason(self, answer: Answer) -> str:
        """What the device said beside the status of the last command."""
        return self.get(self._layout.arena_offset, answer.nbytes).decode()

    def region(self, number: int, offset: int, data: bytes) -> None:
        """A region with these bytes, on a grid of 64."""
        nbytes = -(-len(data) // 64) * 64
        assert self.ask(Opcode.REGION_ADD, Place(number, offset, nbytes).pack()).status == 0
        self.put(self._layout.memory_offset + offset, data)
        spans = Spans.one(0, len(data))
        assert self.ask(Opcode.ADD, pack_segment(number, spans), checksum(data)).status == 0

    def put(self, offset: int, data: bytes) -> None:
        """Write to the window."""
        self._bus.write(Spans.one(offset, len(data)), np.frombuffer(data, dtype=np.uint8))

    def get(self, offset: int, nbytes: int) -> bytes:
        """Read from the window."""
        into = np.empty(nbytes, dtype=np.uint8)
        self._bus.read(Spans.one(offset, nbytes), into)
        return into.tobytes()

    def ring(self, value: int) -> None:
        """Ring the doorbell."""
        self._bus.ring(self._layout.doorbell_offset, value)
