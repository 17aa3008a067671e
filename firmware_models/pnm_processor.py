"""The command processor of a near-memory processor: takes entries out of a ring, and answers each in another.

It is told that the doorbell was rung (`ring`), works when it is told to (`advance`), and does nothing else. It is at
least as strict as the format (devices/drivers/pnm_wire.py): every number of an entry and of its arguments is checked
before it is used, what is wrong is answered with a status and a reason, and neither raises nor touches the bytes of
another region or session. What must hold:

- There is one session at a time. A HELLO ends the one before: its regions are gone, its operations are dropped, and
  nothing of it is answered any more.
- Commands are taken in order; operations end in any order; the answer of each is posted once.
- An entry that cannot be read is answered as BAD_ENTRY by its number alone; after that the next one is looked at.
- A doorbell that is out of range is ignored, and counted in `refused`; so is one for a HELLO that is none.

The back door for tests: `held`, `delayed`, `faults`, `posted` and `post`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch
from tierloop.devices.drivers.pnm_arguments import DTYPES, KERNELS, unpack_launch, unpack_segment
from tierloop.devices.drivers.pnm_wire import (
    ENTRY_NBYTES,
    HELLO_BELL,
    LIMITS_NBYTES,
    VERSION,
    Answer,
    Entry,
    Layout,
    Limits,
    Opcode,
    Place,
    Status,
    WireError,
    checksum,
    slot_of,
    unpack_drop,
    unpack_hello,
)
from tierloop.devices.kernels import contract
from tierloop.firmware_models.pnm_dispatcher import Dispatcher
from tierloop.firmware_models.pnm_memory import CardMemory, Refused

Fault = Literal["corrupt", "truncate", "lengthen", "misdirect", "repeat", "lose", "delay", "garble"]
"""What may go wrong with an answer: a damaged byte; a length that is one short or one too many, with a right checksum;
another operation's name; posted twice; never posted; posted when `release` is called; for READ, the checksum of other
bytes."""


@dataclass(eq=False)
class _Current:
    """The session that is open: its identity, the last command taken, the last answer posted."""

    session: int
    nonce: int
    taken: int = 0
    posted: int = 0


@dataclass
class Processor:
    """`window` is the whole window as the host sees it, uint8 (window_nbytes,)."""

    window: NDArray[np.uint8]
    layout: Layout
    limits: Limits
    memory: CardMemory
    dispatcher: Dispatcher
    refused: int = 0
    held: bool = False
    faults: deque[tuple[Opcode | None, Fault]] = field(default_factory=deque)
    posted: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current: _Current | None = None
        self._tail = 0
        self._hello = False
        self._waiting: list[tuple[_Current, Entry, Answer]] = []
        self._delayed: list[tuple[_Current, Entry, Answer]] = []

    # -- the bus face --------------------------------------------------------------------------------------------

    def ring(self, value: int) -> None:
        """The doorbell has been written."""
        if value & HELLO_BELL:
            self._hello = True
        elif self._current is not None and 0 <= value - self._current.taken <= self.layout.submission_entries:
            self._tail = value
        else:
            self.refused += 1

    def advance(self) -> None:
        """Take what was submitted, let the engines work, and post what has ended."""
        if self._hello:
            self._hello = False
            self._begin()
        while (current := self._current) is not None and current.taken < self._tail:
            current.taken += 1
            self._take(current, current.taken)
        self.dispatcher.advance()
        if not self.held:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                self._post(*answer)

    # -- the back door -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Lose power for a moment: no session, no region, nothing under way."""
        self._current = None
        self._drop()

    def release(self) -> None:
        """Post what was held or delayed."""
        self.held = False
        delayed, self._delayed = self._delayed, []
        for answer in delayed:
            self._post(*answer, may_fail=False)

    def post(self, frame: bytes) -> None:
        """Put any frame into the slot of the next answer, without counting it."""
        number = self._current.posted + 1 if self._current else 1
        self._put_frame(number, frame)

    # -- sessions ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Look at slot 0 for a HELLO."""
        try:
            entry = Entry.unpack(self._frame(1))
        except WireError:
            self.refused += 1
            return
        if (entry.opcode, entry.number, entry.phase) != (Opcode.HELLO, 1, 1):
            self.refused += 1
            return
        if self._current is not None and (self._current.session, self._current.nonce) == (entry.session, entry.nonce):
            return  # the doorbell still stood as an earlier host had left it, and this HELLO was found by that
        self.reset()
        current = self._current = _Current(entry.session, entry.nonce, taken=1)
        self._tail = 1
        try:
            oldest, newest = unpack_hello(self._arguments(entry))
            if entry.room < LIMITS_NBYTES:
                raise Refused(Status.BAD_ARGUMENTS, f"room for {entry.room} bytes; allowed: at least {LIMITS_NBYTES}")
            if not oldest <= VERSION <= newest:
                raise Refused(Status.UNSUPPORTED, f"versions {oldest} to {newest}; allowed: {VERSION}")
        except WireError as error:
            self._refuse(current, entry, Refused(Status.BAD_ARGUMENTS, str(error)))
        except Refused as refused:
            self._refuse(current, entry, refused)
        else:
            self._answer(current, entry, body=self.limits.pack())

    def _drop(self) -> None:
        """Forget the session's regions, operations and answers."""
        self.dispatcher.drop()
        self.memory.drop_all()
        self._waiting.clear()
        self._delayed.clear()
        self._tail = 0

    # -- commands ------------------------------------------------------------------------------------------------

    def _take(self, current: _Current, number: int) -> None:
        """Read and carry out command `number`, or answer what is wrong with it."""
        _, phase = slot_of(number, self.layout.submission_entries)
        try:
            entry = Entry.unpack(self._frame(number))
        except WireError:
            self._unread(current, number)
            return
        if (entry.session, entry.nonce) != (current.session, current.nonce):
            self._refuse(current, replace(entry, number=number, room=0), Refused(Status.NO_SESSION, ""))
            return
        carry_out = self._carriers().get(entry.opcode)
        if (entry.phase, entry.number) != (phase, number) or carry_out is None:
            self._unread(current, number)
            return
        try:
            carry_out(current, entry, self._arguments(entry))
        except WireError as error:
            self._refuse(current, entry, Refused(Status.BAD_ARGUMENTS, str(error)))
        except Refused as refused:
            self._refuse(current, entry, refused)

    def _carriers(self) -> dict[int, Callable[[_Current, Entry, bytes], None]]:
        return {
            Opcode.REGION_ADD: self._region_add,
            Opcode.REGION_DROP: self._region_drop,
            Opcode.ADD: self._add,
            Opcode.OP: self._op,
            Opcode.READ: self._read,
            Opcode.GOODBYE: self._goodbye,
        }

    def _region_add(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        self.memory.add_region(Place.unpack(arguments))
        self._answer(current, entry)

    def _region_drop(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        self.memory.drop_region(unpack_drop(arguments))
        self._answer(current, entry)

    def _add(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        segment = unpack_segment(arguments, self.memory.region)
        self._few(len(segment.spans))
        found = self.memory.add(segment, entry.payload_check)
        self._answer(current, entry, nbytes=segment.spans.nbytes, payload_check=found)

    def _read(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        segment = unpack_segment(arguments, self.memory.region)
        self._few(len(segment.spans))
        found = self.memory.show(segment)
        if self._strikes(entry.opcode, "garble"):
            found ^= 1
        self._answer(current, entry, nbytes=segment.spans.nbytes, payload_check=found)

    def _op(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        launch = unpack_launch(arguments, self.memory.region)
        self._check(launch)
        for segment in [segment for operand in launch.reads for segment in operand]:
            self.memory.readable(segment)
        for segment in [segment for operand in launch.writes for segment in operand]:
            self.memory.mend(segment)
        self.memory.count_stale(launch)
        written = sum([segment.spans.nbytes for operand in launch.writes for segment in operand])

        def ended(flops: int, wrong: Refused | None) -> None:
            if wrong is not None:
                self._refuse(current, entry, wrong)
            else:
                self._answer(current, entry, nbytes=written, detail=flops)

        self.dispatcher.begin(launch, ended)

    def _goodbye(self, current: _Current, entry: Entry, arguments: bytes) -> None:
        if arguments:
            raise WireError(f"GOODBYE has no arguments, got {len(arguments)} bytes")
        self._drop()
        self._current = None
        self._answer(current, entry)

    # -- checking ------------------------------------------------------------------------------------------------

    def _arguments(self, entry: Entry) -> bytes:
        """The bytes that an entry points to. Raises WireError."""
        end = entry.args_offset + entry.room
        if entry.args_nbytes > entry.room or end > self.layout.arena_nbytes or entry.args_offset % ENTRY_NBYTES:
            raise WireError(
                f"{entry.args_nbytes} bytes of arguments in a room of {entry.room} at {entry.args_offset}; the arena "
                f"has {self.layout.arena_nbytes}, on a grid of {ENTRY_NBYTES}"
            )
        if entry.args_nbytes > self.limits.largest_arguments:
            raise Refused(
                Status.TOO_LARGE,
                f"{entry.args_nbytes} bytes of arguments; allowed: {self.limits.largest_arguments}",
            )
        start = self.layout.arena_offset + entry.args_offset
        data = self.window[start : start + entry.args_nbytes].tobytes()
        if checksum(data) != entry.args_check:
            raise WireError(f"the arguments have the checksum {checksum(data):#010x}, not {entry.args_check:#010x}")
        return data

    def _check(self, launch: Launch) -> None:
        """Raises Refused for a launch that the device does not offer, or whose operands do not fit."""
        kernel, limits = launch.args.kernel, self.limits
        if not limits.kernels >> KERNELS[kernel] & 1:
            raise Refused(Status.UNSUPPORTED, f"kernel {kernel} is not offered")
        dtype = getattr(launch.args, "dtype", None)
        if dtype is not None and not limits.dtypes >> DTYPES[dtype] & 1:
            raise Refused(Status.UNSUPPORTED, f"dtype {dtype} is not offered")
        segments = [segment for operand in (*launch.reads, *launch.writes) for segment in operand]
        self._few(sum([len(spans) for _, spans in segments]))
        for segment in segments:
            self.memory.within(segment)
        sizes = [
            [(sum([len(s.spans) for s in operand]), sum([s.spans.nbytes for s in operand])) for operand in operands]
            for operands in (launch.reads, launch.writes)
        ]
        try:
            wrong = contract.check(launch.args, *sizes)
        except (IndexError, OverflowError) as error:  # fewer operands than the check looks at
            wrong = f"{kernel}: {error}"
        if wrong:
            raise Refused(Status.OUT_OF_RANGE, wrong)

    def _few(self, spans: int) -> None:
        if spans > self.limits.most_spans:
            raise Refused(Status.TOO_LARGE, f"{spans} spans; allowed: {self.limits.most_spans}")

    # -- answering -----------------------------------------------------------------------------------------------

    def _unread(self, current: _Current, number: int) -> None:
        """Answer a command of which nothing is known but its number."""
        entry = Entry(0, 0, current.session, 0, number, 0, 0, 0, 0, 0, current.nonce)
        self._refuse(current, entry, Refused(Status.BAD_ENTRY, ""))

    def _refuse(self, current: _Current, entry: Entry, refused: Refused) -> None:
        end = entry.args_offset + entry.room
        room = entry.room if end <= self.layout.arena_nbytes and not entry.args_offset % ENTRY_NBYTES else 0
        self._answer(current, entry, refused.status, body=refused.reason.encode()[: min(room, 256)])

    def _answer(
        self,
        current: _Current,
        entry: Entry,
        status: Status = Status.OK,
        nbytes: int = 0,
        payload_check: int = 0,
        detail: int = 0,
        body: bytes = b"",
    ) -> None:
        """Have an answer posted; a body goes over the command's arguments."""
        if body:
            start = self.layout.arena_offset + entry.args_offset
            self.window[start : start + len(body)] = np.frombuffer(body, dtype=np.uint8)
            nbytes, payload_check = len(body), checksum(body)
        answer = Answer(
            entry.opcode, 0, current.session, status, 0, entry.op_id, entry.number, nbytes, payload_check,
            current.nonce, detail,
        )  # fmt: skip
        self._waiting.append((current, entry, answer))

    def _post(self, current: _Current, entry: Entry, answer: Answer, may_fail: bool = True) -> None:
        fault = self._next_fault(entry.opcode) if may_fail else None
        if fault == "lose":
            return
        if fault == "delay":
            self._delayed.append((current, entry, answer))
            return
        if fault == "truncate":
            answer = replace(answer, nbytes=max(answer.nbytes - 1, 0))
        if fault == "lengthen":
            answer = replace(answer, nbytes=answer.nbytes + 1)
        if fault == "misdirect":
            answer = replace(answer, op_id=answer.op_id + 1)
        for _ in range(2 if fault == "repeat" else 1):
            current.posted += 1
            _, phase = slot_of(current.posted, self.layout.completion_entries)
            frame = bytearray(replace(answer, number=current.posted, phase=phase).pack())
            if fault == "corrupt":
                frame[40] ^= 0x10
            self._put_frame(current.posted, bytes(frame))

    def _next_fault(self, opcode: int) -> Fault | None:
        """The fault that strikes the next answer, which is for a command of this kind."""
        if self.faults and self.faults[0][0] in (None, opcode):
            return self.faults.popleft()[1]
        return None

    def _strikes(self, opcode: int, fault: Fault) -> bool:
        if self.faults and self.faults[0] in ((None, fault), (opcode, fault)):
            self.faults.popleft()
            return True
        return False

    # -- the rings -----------------------------------------------------------------------------------------------

    def _frame(self, number: int) -> bytes:
        slot, _ = slot_of(number, self.layout.submission_entries)
        start = self.layout.submission_offset + slot * ENTRY_NBYTES
        return self.window[start : start + ENTRY_NBYTES].tobytes()

    def _put_frame(self, number: int, frame: bytes) -> None:
        slot, _ = slot_of(number, self.layout.completion_entries)
        start = self.layout.completion_offset + slot * ENTRY_NBYTES
        self.window[start : start + ENTRY_NBYTES] = np.frombuffer(frame, dtype=np.uint8)
        self.posted.append(frame)
