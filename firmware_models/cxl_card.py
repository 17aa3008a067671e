"""A CXL type 3 memory card: registers, mailbox, decoders, memory, and a back door.

The bus face is what a host can do to it: read and write registers of two blocks (`device` and `component`, laid out as
CXL 3.x has them, 8.2.8 and 8.2.4), load and store lines by host address, read the table of attributes, take the power
away. What must hold:

- No access of a host makes the card fail: what it cannot do is answered as hardware does, by a return code, by ones, or
  by nothing at all.
- Registers are read and written 4 or 8 bytes at a time, aligned; another read gives ones, another write does nothing.
- A command begins when the doorbell rings and takes `mailbox_ns`. Until then its registers and its payload cannot be
  written, and what is read there is old.
- A load of a poisoned line says so, and its neighbours are untouched. A load of what is not decoded gives ones, a store
  there is dropped.
- A partial store to a poisoned line leaves it poisoned; a store of the whole line makes it good.
- Volatile bytes are gone when the power is; persistent ones, labels, poison in persistent memory and the shutdown count
  stay. Registers, decoders, event logs and the time are as after a reset.

The card is told the time with `advance`; it has no threads. The back door: `state` (health, alerts, cells, events),
`peek`, `poke`, `poison`, `event`, `answer_next`, `hold_background`, `remove`, and `history`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tierloop.firmware_models.cxl_cdat import cdat
from tierloop.firmware_models.cxl_codes import Code
from tierloop.firmware_models.cxl_commands import carried_out
from tierloop.firmware_models.cxl_events import DRAM, FAILURE, GENERAL_MEDIA, MEMORY_MODULE, Event
from tierloop.firmware_models.cxl_events import dram as dram_detail
from tierloop.firmware_models.cxl_events import general_media as general_media_detail
from tierloop.firmware_models.cxl_events import memory_module as memory_module_detail
from tierloop.firmware_models.cxl_link import Carried, CxlLink
from tierloop.firmware_models.cxl_part import LINE, CxlPart
from tierloop.firmware_models.cxl_state import CxlState

STATUS, MEMORY_STATUS, MAILBOX = 0x80, 0x90, 0x100
"""Where the register groups of the device block are."""
CAPABILITIES, CONTROL, COMMAND, ANSWER, BACKGROUND, PAYLOAD = 0x00, 0x04, 0x08, 0x10, 0x18, 0x20
"""Where the registers of the mailbox are, from MAILBOX on."""
DOORBELL = 1
_ONES = bytes([255]) * LINE
_REMEMBERED = 1 << 14
INTERNAL = 2
"""The source of poison that the card itself found."""


class Commanded(NamedTuple):
    """A command and what was answered."""

    opcode: int
    nbytes: int
    code: Code


class Loaded(NamedTuple):
    """A line, and whether it is poisoned; `carried` says when, if the card was told when the load came."""

    data: bytes
    poisoned: bool
    carried: Carried | None = None


class CxlCard:
    """One card; see the top of the file."""

    def __init__(self, part: CxlPart | None = None) -> None:
        self.part = part or CxlPart()
        self.state = CxlState(self.part)
        self.link = CxlLink(self.part.link)
        self.history: deque[Commanded] = deque(maxlen=_REMEMBERED)
        self.removed = False
        self.changes = 0
        """Grows with everything that a host may see changed without having done it to this card's memory."""
        self._next_code: Code | None = None
        self._due: int | None = None
        self._mailbox_reset()

    # the bus face: registers

    def read_device(self, offset: int, width: int = 4) -> int:
        """Read a register of the device block."""
        if self.removed or not _aligned(offset, width):
            return (1 << 8 * width) - 1
        return int.from_bytes(self._device_bytes(offset, width), "little")

    def write_device(self, offset: int, value: int, width: int = 4) -> None:
        """Write a register of the device block."""
        if self.removed or not _aligned(offset, width) or self._due is not None:
            return
        data = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
        place = offset - MAILBOX
        if place >= PAYLOAD and place + width <= PAYLOAD + self.part.payload_nbytes:
            self._payload[place - PAYLOAD : place - PAYLOAD + width] = data
        elif place >= COMMAND and place + width <= COMMAND + 8:
            self._command[place - COMMAND : place - COMMAND + width] = data
        elif place == CONTROL and data[0] & DOORBELL:
            self._due = self.state.now_ns + self.part.mailbox_ns
            self.advance(self.state.now_ns)

    def read_component(self, offset: int) -> int:
        """Read a register of the component block."""
        return 0xFFFFFFFF if self.removed else self.state.decoders.read(offset)

    def write_component(self, offset: int, value: int) -> None:
        """Write a register of the component block."""
        if not self.removed:
            self.state.decoders.write(offset, value)
            self.changes += 1

    def advance(self, now_ns: int) -> None:
        """It is that late: carry out what is due."""
        busy = self.state.background
        self.state.advance(now_ns)
        if self._due is not None and self.state.now_ns >= self._due:
            self._run()
        if busy is not self.state.background:
            self.changes += 1

    # the bus face: memory

    def load(self, hpa: int, at_ns: int | None = None) -> Loaded:
        """Load the line at a host address, at a time if its time matters. Raises ValueError for what is no line."""
        dpa = self._translated(hpa)
        if dpa is None:
            return Loaded(_ONES, False)
        carried = None if at_ns is None else self.link.carry(at_ns, dpa, False)
        if self.state.erasing:
            return Loaded(_ONES, True, carried)
        self.state.cells.note("read", dpa, LINE)
        if dpa in self.state.cells.poisoned:
            self.media_event(dpa)
            return Loaded(_ONES, True, carried)
        return Loaded(self.state.cells.read(dpa, LINE), False, carried)

    def store(self, hpa: int, data: bytes, first: int = 0, at_ns: int | None = None) -> Carried | None:
        """Store bytes of the line at a host address, from its byte `first` on. Raises ValueError."""
        if not data or first < 0 or first + len(data) > LINE:
            raise ValueError(f"{len(data)} bytes from byte {first} of a line on; allowed: 1 to {LINE} within it")
        dpa = self._translated(hpa)
        carried = None if at_ns is None or dpa is None else self.link.carry(at_ns, dpa, True)
        if dpa is None or self.state.erasing:
            return carried
        self.state.cells.note("write", dpa, LINE)
        if len(data) == LINE:
            self.state.cells.heal(dpa, data)
        else:
            self.state.cells.write(dpa + first, data)
        if dpa >= self.state.volatile_nbytes:
            self.state.dirty = True
        return carried

    def cdat(self) -> bytes:
        """The table of attributes, as a read over the data object exchange gives it."""
        return b"" if self.removed else cdat(self.state.ranges, self.part.link, self.state.tables)

    # the bus face: power

    def reset(self) -> None:
        """A conventional reset: registers as new, the next partition becomes the present one."""
        state = self.state
        state.decoders.reset()
        if state.next_volatile is not None:
            state.partition(state.next_volatile)
        state.background = state.finished = None
        state.event_interrupts = bytes(4)
        state.epoch_ns = None
        state.events.reset()
        state.poison_seen = ((-1, -1), 0)
        self._next_code = None
        self._mailbox_reset()
        self.changes += 1

    def power_off(self) -> None:
        """Power goes and comes back: volatile bytes are gone. A shutdown that was not announced is counted."""
        if self.state.dirty:
            self.state.health.dirty_shutdowns += 1
        self.state.dirty = False
        self.state.cells.erase(0, self.state.volatile_nbytes)
        self.state.cells.note("lost", 0, self.state.volatile_nbytes)
        self.reset()

    # the back door

    def peek(self, dpa: int, nbytes: int) -> bytes:
        """Bytes by device address, poison or not. Raises ValueError."""
        self._inside(dpa, nbytes)
        return self.state.cells.read(dpa, nbytes)

    def poke(self, dpa: int, data: bytes) -> None:
        """Change bytes without the card's knowing. Raises ValueError."""
        self._inside(dpa, len(data))
        self.state.cells.write(dpa, data)

    def poison(self, dpa: int, source: int = INTERNAL) -> None:
        """Lose the line at a device address, without a limit. Raises ValueError."""
        self._inside(dpa, LINE)
        if dpa % LINE or source not in (0, 1, 2, 3, 7):
            raise ValueError(f"poison of source {source} at {dpa:#x}; allowed: a multiple of {LINE}, sources 0-3 and 7")
        self.state.cells.poison(dpa, source)
        if len(self.state.cells.poisoned) > self.part.poison_limit and self.state.poison_overflow_ns is None:
            self.state.poison_overflow_ns = self.state.timestamp

    def media_event(self, dpa: int, descriptor: int = 1, log: int = FAILURE) -> None:
        """Something happened to the medium."""
        detail = general_media_detail(self.state.event_address(dpa), descriptor)
        self.state.events.add(log, Event(GENERAL_MEDIA, self.state.timestamp, detail))
        self.changes += 1

    def dram_event(self, dpa: int, bank: int, row: int, column: int, log: int = FAILURE) -> None:
        """Something happened to a bank of the DRAM."""
        detail = dram_detail(self.state.event_address(dpa), 0, bank, row, column)
        self.state.events.add(log, Event(DRAM, self.state.timestamp, detail))
        self.changes += 1

    def module_event(self, what: int, log: int = FAILURE) -> None:
        """The card's health changed, or that of its media, its life or its temperature."""
        detail = memory_module_detail(what, self.state.health.packed(self.state.alerts))
        self.state.events.add(log, Event(MEMORY_MODULE, self.state.timestamp, detail))
        self.changes += 1

    def answer_next(self, code: Code) -> None:
        """Let the next command be answered with this code, undone."""
        self._next_code = code

    def hold_background(self, hold: bool = True) -> None:
        """Let work in the background never end, until this is taken back."""
        self.state.hold_background = hold

    def remove(self) -> None:
        """Pull it out: everything reads as ones from now on."""
        self.removed = True
        self.changes += 1
        for watcher in list(self.state.cells.watchers):
            watcher(0, self.part.capacity)

    # inside

    def _mailbox_reset(self) -> None:
        self._payload = bytearray(self.part.payload_nbytes)
        self._command = bytearray(8)
        self._code = Code.SUCCESS
        self._due = None

    def _device_bytes(self, offset: int, width: int) -> bytes:
        inside = offset - MAILBOX - PAYLOAD
        if inside >= 0 and inside + width <= self.part.payload_nbytes:
            return bytes(self._payload[inside : inside + width])
        whole = self._word(offset & ~7).to_bytes(8, "little")
        return whole[offset % 8 : offset % 8 + width]

    def _word(self, offset: int) -> int:
        """The eight bytes of registers at an offset."""
        state = self.state
        sizes = 0x20 + self.part.payload_nbytes
        words = {
            0x00: 1 << 16 | 3 << 32,
            0x10: 1 | 1 << 16 | STATUS << 32,
            0x18: 8,
            0x20: 2 | 1 << 16 | MAILBOX << 32,
            0x28: sizes,
            0x30: 0x4000 | 1 << 16 | MEMORY_STATUS << 32,
            0x38: 8,
            STATUS: state.events.status,
            MEMORY_STATUS: (3 if state.erasing else 1) << 2 | 1 << 4,
            MAILBOX: self.part.payload_nbytes.bit_length() - 1 | (self._due is not None) << 32,
            MAILBOX + COMMAND: int.from_bytes(self._command, "little"),
            MAILBOX + ANSWER: (state.background is not None) | self._code << 32,
        }
        if offset == MAILBOX + BACKGROUND:
            work = state.background
            op, code = (work.op, Code.SUCCESS) if work is not None else state.finished or (0, Code.SUCCESS)
            return op | state.percent << 16 | code << 32
        return words.get(offset, 0)

    def _run(self) -> None:
        """Carry out the command in the registers."""
        self._due = None
        word = int.from_bytes(self._command, "little")
        opcode, nbytes = word & 0xFFFF, word >> 16 & (1 << 21) - 1
        answer = b""
        if self._next_code is not None:
            code, self._next_code = self._next_code, None
        elif nbytes > self.part.payload_nbytes:
            code = Code.INVALID_LENGTH
        else:
            code, answer = carried_out(self.state, opcode, bytes(self._payload[:nbytes]))
        self._payload[: len(answer)] = answer
        self._command = bytearray((opcode | len(answer) << 16).to_bytes(8, "little"))
        self._code = code
        self.history.append(Commanded(opcode, nbytes, code))
        self.changes += 1

    def _translated(self, hpa: int) -> int | None:
        if hpa % LINE or hpa < 0:
            raise ValueError(f"host address {hpa:#x}; allowed: multiples of {LINE}")
        return None if self.removed else self.state.decoders.translate(hpa)

    def _inside(self, dpa: int, nbytes: int) -> None:
        if dpa < 0 or nbytes < 0 or dpa + nbytes > self.part.capacity:
            raise ValueError(f"device addresses [{dpa:#x}, {dpa + nbytes:#x}) of a card of {self.part.capacity} bytes")


def _aligned(offset: int, width: int) -> bool:
    return width in (4, 8) and offset >= 0 and offset % width == 0
