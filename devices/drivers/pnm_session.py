"""A session of the pnm driver: commands go into one ring, answers come out of another, and every answer is judged.

Used by the driver on the clock's thread only. `offer` takes a request and gives a ticket; as soon as ring and arena
have room the request is written and the doorbell rung. `collect` looks at the completion ring and gives tickets their
answers; it calls nobody back. What must hold:

- A frame is an answer only if phase, checksum, session and nonce are right. Anything else in the next slot is not there
  yet, or belongs to an earlier session: it is passed over, and counted in `stale`.
- An answer that is one, but is out of turn, answers nothing that is open, or names another command, shows that the two
  sides have lost each other: every open ticket fails with a ProtocolError, and the session is *broken* for good.
- An answer whose length or checksum is not what its command was about fails that command alone, also with a
  ProtocolError. A refusal becomes the device error of its status, with the device's reason.
- A command that has no answer after `deadline_ns` breaks the session; its commands fail as Gone.
- Place in the arena belongs to a command until it is answered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.clocks import Clock
from tierloop.devices.drivers.extents import Extents
from tierloop.devices.drivers.pnm_transport import Window
from tierloop.devices.drivers.pnm_wire import (
    ENTRY_NBYTES,
    HELLO_BELL,
    LIMITS_NBYTES,
    TEXT_NBYTES,
    VERSION,
    Answer,
    Entry,
    Layout,
    Limits,
    Opcode,
    Status,
    WireError,
    checksum,
    pack_hello,
    phase_of,
    slot_of,
)
from tierloop.devices.errors import (
    DeviceError,
    Gone,
    MediaError,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Unsupported,
    restated,
)
from tierloop.devices.spans import Spans

_MOST_ROOM = (1 << 32) - ENTRY_NBYTES
"""An entry tells its room in 32 bits."""
_TORN_LOOKS = 8
"""How often a frame of the right phase may have a wrong checksum before it is wrong: it might be half written."""
_ALL_ONES = b"\xff" * ENTRY_NBYTES
_KINDS: dict[int, type[DeviceError]] = {
    Status.BAD_REGION: OutOfRange,
    Status.NO_ROOM: OutOfMemory,
    Status.INTERLEAVED: Unsupported,
    Status.OUT_OF_RANGE: OutOfRange,
    Status.TOO_LARGE: Unsupported,
    Status.UNSUPPORTED: Unsupported,
    Status.MEDIA: MediaError,
}
"""The error for each status; any other is the fault of the protocol."""


@dataclass(frozen=True)
class Request:
    """A command to send. `op` is its name in errors; `nbytes` and `payload_check` what a right answer says, or None."""

    opcode: Opcode
    op: str
    arguments: bytes
    payload_check: int = 0
    nbytes: int | None = None
    checks_payload: bool = False

    @property
    def room(self) -> int:
        """Bytes of the arena that it needs."""
        return -(-max(len(self.arguments), TEXT_NBYTES) // ENTRY_NBYTES) * ENTRY_NBYTES


@dataclass(eq=False)
class Ticket:
    """A request under way: `number` 0 until it is sent; `done` when `answer` or `error` is there."""

    request: Request
    number: int = 0
    op_id: int = 0
    sent_ns: int = 0
    place: int = 0
    answer: Answer | None = None
    body: bytes = b""
    error: DeviceError | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.answer is not None or self.error is not None


@dataclass
class Counts:
    """What a session has seen: commands sent, answers taken, frames of another session passed over."""

    sent: int = 0
    answered: int = 0
    stale: int = 0


@dataclass
class Session:
    """Both rings and the arena of a window; `identity` is the session's number and nonce, 32 bits each."""

    device: str
    window: Window
    layout: Layout
    clock: Clock
    deadline_ns: int
    identity: tuple[int, int]
    first_op_id: int = 1
    counts: Counts = field(default_factory=Counts)
    broken: DeviceError | None = None

    def __post_init__(self) -> None:
        self._arena = Extents(self.layout.arena_nbytes, ENTRY_NBYTES)
        self._waiting: deque[Ticket] = deque()
        self._open: dict[int, Ticket] = {}
        self._sent = 0
        self._seen = 0
        self._torn = 0
        self._last_stale = b""
        self._largest = min(self.layout.arena_nbytes, _MOST_ROOM)
        self._most_open = self.layout.submission_entries - 1  # one entry is kept for the GOODBYE

    # -- the life of a session -----------------------------------------------------------------------------------

    def hello(self) -> Limits:
        """Begin the session: clear the completion ring, send HELLO and check the device's limits.

        Raises ProtocolError, Unsupported (no version in common) or Gone.
        """
        if not self.layout.oldest <= VERSION <= self.layout.newest:
            raise Unsupported(
                self.device,
                "open",
                f"the device speaks versions {self.layout.oldest} to {self.layout.newest} of the protocol; the driver "
                f"speaks {VERSION}",
            )
        try:
            self._put(self.layout.completion_offset, bytes(self.layout.completion_entries * ENTRY_NBYTES))
        except OSError as error:
            raise Gone(self.device, "open", f"the window cannot be written: {error}", error.errno) from error
        answer = self.ask(Request(Opcode.HELLO, "open", pack_hello(VERSION, VERSION), nbytes=LIMITS_NBYTES))
        try:
            limits = Limits.unpack(answer.body, self.layout)
        except WireError as error:
            raise ProtocolError(self.device, "open", f"the answer to HELLO is wrong: {error}") from error
        self._largest = min(limits.largest_arguments, _MOST_ROOM)
        return limits

    def goodbye(self) -> None:
        """End the session; what has not been sent is not sent any more. Raises ProtocolError or Gone."""
        for ticket in self._waiting:
            ticket.error = Gone(self.device, ticket.request.op, "the device was closed first")
        self._waiting.clear()
        self._most_open = self.layout.submission_entries
        self.ask(Request(Opcode.GOODBYE, "close", b"", nbytes=0))

    # -- commands ------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises Unsupported for arguments that the device will never take."""
        if len(request.arguments) > self._largest or request.room > self._arena.capacity:
            most = min(self._largest, self._arena.capacity)
            raise Unsupported(
                self.device, request.op, f"its arguments take {len(request.arguments)} bytes; the device takes {most}"
            )

    def offer(self, request: Request) -> Ticket:
        """Take a request; it is sent when there is room. Raises Unsupported or what broke the session."""
        self.check(request)
        self._alive(request.op)
        ticket = Ticket(request)
        self._waiting.append(ticket)
        self._pump()
        return ticket

    def ask(self, request: Request) -> Ticket:
        """Send a request and wait for its answer while nobody is called back; `collect` sees to the deadline.

        Raises the request's error.
        """
        ticket = self.offer(request)
        while not ticket.done:
            self.collect()
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def collect(self) -> bool:
        """Take the answers that have come, and look at the deadline; returns whether any ticket has ended."""
        if self.broken is not None:
            return False
        before = self.counts.answered
        try:
            while self._open and self._take():
                pass
        except OSError as error:
            self._break(Gone(self.device, "poll", f"the window cannot be read: {error}"))
        if self.broken is None:
            self._look_at_the_time()
            self._pump()
        return self.counts.answered > before or self.broken is not None

    # -- sending -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what waits, in order, as far as ring and arena have room."""
        while self._waiting and self.broken is None:
            oldest = min(self._open, default=self._sent + 1)
            if self._sent + 1 - oldest >= self._most_open:
                return
            place = self._arena.take(self._waiting[0].request.room)
            if place is None:
                assert self._open, "a command that passed `check` fits an arena that is free"
                return
            ticket = self._waiting.popleft()
            ticket.place = place
            try:
                self._send(ticket)
            except OSError as error:
                self._open[self._sent] = ticket
                self._break(Gone(self.device, ticket.request.op, f"the window cannot be written: {error}"))

    def _send(self, ticket: Ticket) -> None:
        request, layout = ticket.request, self.layout
        self._sent += 1
        ticket.number, ticket.op_id, ticket.sent_ns = self._sent, self.first_op_id + self._sent, self.clock.now()
        self._open[ticket.number] = ticket
        slot, phase = slot_of(ticket.number, layout.submission_entries)
        session, nonce = self.identity
        entry = Entry(
            request.opcode, phase, session, request.room, ticket.number, ticket.op_id, ticket.place,
            len(request.arguments), checksum(request.arguments), request.payload_check, nonce,
        )  # fmt: skip
        if request.arguments:
            self._put(layout.arena_offset + ticket.place, request.arguments)
        self._put(layout.submission_offset + slot * ENTRY_NBYTES, entry.pack())
        is_hello = request.opcode is Opcode.HELLO
        self.window.ring(layout.doorbell_offset, HELLO_BELL | session if is_hello else ticket.number)
        self.counts.sent += 1

    # -- answers -------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Look at the next slot of the completion ring; True if an answer was there."""
        number = self._seen + 1
        slot, phase = slot_of(number, self.layout.completion_entries)
        frame = self._get(self.layout.completion_offset + slot * ENTRY_NBYTES, ENTRY_NBYTES)
        if frame == _ALL_ONES:
            self._break(Gone(self.device, "poll", "the window reads as ones: the device has left the bus"))
            return False
        if phase_of(frame) != phase:
            return False
        try:
            answer = Answer.unpack(frame)
        except WireError as error:
            self._torn += 1
            if self._torn > _TORN_LOOKS:
                self._lost(f"answer {number} is damaged: {error}")
            return False
        self._torn = 0
        if (answer.session, answer.nonce) != self.identity:
            self.counts.stale += frame != self._last_stale
            self._last_stale = frame
            return False
        ticket = self._open.get(answer.answers)
        if answer.number != number:
            self._lost(f"answer {number} was expected, and answer {answer.number} came")
        elif ticket is None:
            expected = ", ".join(map(str, sorted(self._open)))
            self._lost(f"answer {number} is to command {answer.answers}, which is not open; open: {expected}")
        elif (answer.op_id, answer.opcode) != (ticket.op_id, ticket.request.opcode) and not _unread(answer):
            self._lost(
                f"answer {number} to command {answer.answers} names operation {answer.op_id} with op code "
                f"{answer.opcode}; expected: {ticket.op_id} with {int(ticket.request.opcode)}"
            )
        else:
            self._seen = number
            self._give(ticket, answer)
        return self.broken is None

    def _give(self, ticket: Ticket, answer: Answer) -> None:
        """Judge an answer and end its ticket."""
        del self._open[ticket.number]
        self.counts.answered += 1
        request = ticket.request
        wrong = self._judge(ticket, answer)
        self._arena.give(ticket.place, request.room)
        if wrong is not None:
            ticket.error = wrong
        else:
            ticket.answer = answer
        if answer.status == Status.NO_SESSION:
            self._break(Gone(self.device, request.op, "the device has ended the session: it was reset, or taken over"))

    def _judge(self, ticket: Ticket, answer: Answer) -> DeviceError | None:
        """What is wrong with an answer to this command, or None; fetches the body that comes with it."""
        request = ticket.request
        has_body = answer.status != Status.OK or request.opcode is Opcode.HELLO
        if has_body:
            if answer.nbytes > request.room:
                return self._odd(request, f"the answer has {answer.nbytes} bytes; at most {request.room} have room")
            ticket.body = self._get(self.layout.arena_offset + ticket.place, answer.nbytes)
            if checksum(ticket.body) != answer.payload_check:
                return self._odd(request, f"the answer's {answer.nbytes} bytes have another checksum than it says")
        if answer.status != Status.OK:
            return self._refusal(request, answer.status, ticket.body)
        if request.nbytes is not None and answer.nbytes != request.nbytes:
            return self._odd(request, f"the answer is about {answer.nbytes} bytes; expected: {request.nbytes}")
        if request.checks_payload and answer.payload_check != request.payload_check:
            return self._odd(
                request,
                f"the answer's payload has the checksum {answer.payload_check:#010x}; expected: "
                f"{request.payload_check:#010x}",
            )
        return None

    def _refusal(self, request: Request, status: int, text: bytes) -> DeviceError:
        said = "".join(c if c.isprintable() else " " for c in text[:TEXT_NBYTES].decode("utf-8", "replace"))
        name = Status(status).name if status in list(Status) else f"status {status}"
        kind = _KINDS.get(status, ProtocolError)
        return kind(self.device, request.op, f"the device refused it ({name}): {said or 'it gave no reason'}")

    def _odd(self, request: Request, detail: str) -> DeviceError:
        return ProtocolError(self.device, request.op, detail)

    # -- when it goes wrong ----------------------------------------------------------------------------------------

    def _lost(self, detail: str) -> None:
        self._break(ProtocolError(self.device, "poll", detail))

    def _look_at_the_time(self) -> None:
        if self._open:
            ticket = self._open[min(self._open)]
            if self.clock.now() - ticket.sent_ns > self.deadline_ns:
                self._break(Gone(self.device, ticket.request.op, self._silence(ticket.request.op)))

    def _silence(self, op: str) -> str:
        return f"the device gave no answer to {op} within {self.deadline_ns / 1e6:g} ms; open it again"

    def _break(self, error: DeviceError) -> None:
        """End every ticket with the error, and take no more."""
        self.broken = self.broken or error
        for ticket in (*self._open.values(), *self._waiting):
            if not ticket.done:
                ticket.error = restated(error, self.device, ticket.request.op, error.detail)
        self._open.clear()
        self._waiting.clear()

    def _alive(self, op: str) -> None:
        if self.broken is not None:
            raise Gone(self.device, op, self.broken.detail)

    def _put(self, offset: int, data: bytes) -> None:
        self.window.write(Spans.one(offset, len(data)), np.frombuffer(data, dtype=np.uint8))

    def _get(self, offset: int, nbytes: int) -> bytes:
        into: NDArray[np.uint8] = np.empty(nbytes, dtype=np.uint8)
        self.window.read(Spans.one(offset, nbytes), into)
        return into.tobytes()


def _unread(answer: Answer) -> bool:
    """Whether the device says that it could not read the command, and so cannot know its names."""
    return answer.status == Status.BAD_ENTRY and answer.op_id == 0 and answer.opcode == 0
