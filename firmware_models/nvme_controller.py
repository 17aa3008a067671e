"""An NVMe 2.0 controller as its host sees it: registers, doorbells, and queues in host memory.

It has no clock: `advance` tells it the time, and register accesses happen at the time it was told last. A command is
fetched when the host rings the doorbell of its queue and the controller has room for it (`window`); which queue comes
first, the arbitration says. It reaches the medium `command_ns` later, waits there until the part of the medium that it
needs is free, first come first served, and ends when the medium is done. Its data moves then, and then its completion
is posted: an early look at the buffer sees nothing. Commands may end in another order than they were fetched.

A doorbell that does not exist or is rung with a value that cannot be is ignored and reported as an asynchronous event.
A queue in memory that cannot be reached, or a configuration that is not supported, is fatal (CSTS.CFS): nothing moves
until the host resets the controller.

The back door: `poke` and `peek`, `inject_status`, `hold`, `release` and `drop`, `age`, `warn`, `set_temperature`,
`power_off`, `power_on`, `reset`, `remove`, and `history`, what the medium did.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.media import WHOLE
from tierloop.firmware_models.nvme_admin import AdminCommands
from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_health import (
    BAD_DOORBELL_REGISTER,
    BAD_DOORBELL_VALUE,
    HOT,
    SPARE,
    SPARE_LOW,
    TEMPERATURE,
    WORN,
    Event,
    Events,
    Health,
)
from tierloop.firmware_models.nvme_identify import PAGE, NvmeFigures
from tierloop.firmware_models.nvme_io import IoCommands, Work
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_queues import Arbiter, CompletionQueue, SubmissionQueue
from tierloop.firmware_models.nvme_transfers import HostMemory, fetch
from tierloop.firmware_models.nvme_wire import ENTRY_NBYTES, MORE, Admin, Answer, Entry, Refused, Status

_HISTORY = 1 << 16
_ADMIN = frozenset(int(opcode) for opcode in Admin)


class MediaOperation(NamedTuple):
    """What the medium of a namespace did for one command, and when. `op` is read, write, trim, zero, spoil or flush."""

    op: str
    nsid: int
    lba: int
    blocks: int
    started_ns: int
    ended_ns: int


@dataclass(eq=False)
class _Flight:
    """A command that was fetched. `slot`: it takes part of the window; `named`: its identifier is its own."""

    sq: SubmissionQueue
    entry: Entry
    slot: bool = True
    named: bool = True
    ended: bool = False


class NvmeController:
    """See the top of the file."""

    def __init__(self, figures: NvmeFigures, namespaces: Sequence[Namespace], memory: HostMemory) -> None:
        if not namespaces:
            raise ValueError("a controller has at least one namespace")
        self.figures, self.namespaces = figures, tuple(namespaces)
        self.health, self.history = Health(), deque[MediaOperation](maxlen=_HISTORY)
        self.now_ns = 0
        self.bad_accesses = 0
        self._memory = memory
        defaults: dict[int, int] = {
            Feature.ARBITRATION: 3,
            Feature.TEMPERATURE_THRESHOLD: figures.warning_k,
            Feature.WRITE_CACHE: int(figures.volatile_cache),
            Feature.NUMBER_OF_QUEUES: (figures.io_queues - 1) * 0x10001,
        }
        self._features = Features(
            defaults, len(self.namespaces), figures.vectors, figures.power_states, figures.volatile_cache
        )
        self._events = Events()
        self._admin = AdminCommands(figures, namespaces, memory, self._features, self.health, self._events)
        self._io = IoCommands(figures, namespaces, memory, self._features, self.health)
        self._powered = True
        self._removed = False
        self._holding = False
        self._held: list[tuple[_Flight, Callable[[], int | None]]] = []
        self._drops = 0
        self._injected: list[tuple[bool, int, int]] = []
        self._sequence = 0
        self._registers = regs.Registers(figures)
        self._clear()

    # the bus face

    def read(self, offset: int, nbytes: int) -> int:
        """A register of four or eight bytes; all ones where there is no controller or no such register access."""
        if self._removed or not self._powered:
            return (1 << 8 * max(nbytes, 1)) - 1
        if offset >= regs.DOORBELLS and nbytes == 4 and not offset & 3:
            return 0
        if nbytes not in (4, 8) or offset % nbytes:
            self.bad_accesses += 1
        return self._registers.read(offset, nbytes)

    def write(self, offset: int, nbytes: int, value: int) -> None:
        """Write a register of four or eight bytes; nothing happens where a host must not write."""
        if self._removed or not self._powered:
            return
        if nbytes not in (4, 8) or offset < 0 or offset & 3 or not 0 <= value < 1 << 8 * nbytes:
            self.bad_accesses += 1
        elif offset >= regs.DOORBELLS:
            self._ring(offset, nbytes, value)
        elif offset == regs.CC and nbytes == 4:
            self._configure(value)
        else:
            self._registers.write(offset, nbytes, value)

    def advance(self, now_ns: int) -> None:
        """Let everything happen that is due by then. Raises ValueError if time goes back."""
        if now_ns < self.now_ns:
            raise ValueError(f"time goes back from {self.now_ns} to {now_ns} ns")
        while self._due and self._due[0][0] <= now_ns:
            due, _, happen = heapq.heappop(self._due)
            self._pass_to(due)
            happen()
            self._fetch()
        self._pass_to(now_ns)

    @property
    def next_due_ns(self) -> int | None:
        """When something happens next by itself; None if nothing does."""
        return self._due[0][0] if self._due else None

    def interrupts(self) -> frozenset[int]:
        """Vectors whose completion queues hold something, unless they are masked."""
        if self._removed:
            return frozenset()
        vectors = {queue.vector for queue in self._cqs.values() if queue.posted and queue.interrupts}
        return frozenset(vector for vector in vectors if vector > 31 or not self._registers.mask >> vector & 1)

    # the back door

    def peek(self, nsid: int, lba: int, count: int = 1) -> bytes:
        """The bytes of some blocks, as a reader would see them."""
        self._check(nsid, lba, count)
        return self.namespaces[nsid - 1].load(lba, count)

    def poke(self, nsid: int, lba: int, data: bytes) -> None:
        """Put whole blocks on the medium, durably."""
        namespace = self.namespaces[nsid - 1]
        if len(data) % namespace.lba_nbytes:
            raise ValueError(f"{len(data)} bytes are no whole number of {namespace.lba_nbytes}-byte blocks")
        self._check(nsid, lba, len(data) // namespace.lba_nbytes)
        namespace.put(lba, data, durable=True)

    def inject_read_error(self, nsid: int, lba: int, count: int = 1) -> None:
        """Reads of these blocks end with Unrecovered Read Error until they are written."""
        self._check(nsid, lba, count)
        self.namespaces[nsid - 1].spoil(lba, count)

    def inject_write_fault(self, nsid: int, lba: int, count: int = 1) -> None:
        """Writes of these blocks end with Write Fault until `heal`."""
        self._check(nsid, lba, count)
        self.namespaces[nsid - 1].wear_out(lba, count)

    def heal(self) -> None:
        """Every block can be read and written again, and no status is injected any more."""
        self._injected.clear()
        for namespace in self.namespaces:
            namespace.heal()

    def inject_status(self, opcode: int, status: int, times: int = 1, admin: bool = False) -> None:
        """The next commands of that opcode end with these 15 bits of status, and do nothing else."""
        if not 0 < status < 1 << 15:
            raise ValueError(f"status {status:#x} is not 1 … 0x7fff")
        self._injected += [(admin, opcode, status)] * times

    def hold(self) -> None:
        """Commands for input and output do not end from now on, until `release`."""
        self._holding = True

    def release(self) -> None:
        """What was held ends now."""
        self._holding = False
        held, self._held = self._held, []
        for flight, finish in held:
            self._finish(flight, finish)
        self._fetch()

    def drop(self, times: int = 1) -> None:
        """The next commands for input and output are carried out, and their completions are lost."""
        self._drops += times

    def age(self, used_percent: int, spare_percent: int = 100) -> None:
        """The medium is worn; a spare below its threshold is a critical warning."""
        if used_percent < 0 or not 0 <= spare_percent <= 100:
            raise ValueError(f"used {used_percent} %, spare {spare_percent} %: at least 0, and 0 … 100")
        self.health.used_percent, self.health.spare_percent = used_percent, spare_percent
        self._watch()

    def set_temperature(self, kelvin: int) -> None:
        """The composite temperature; beyond a threshold it is a critical warning."""
        if not 0 <= kelvin <= 0xFFFF:
            raise ValueError(f"{kelvin} K is not 0 … 65535")
        self.health.temperature_k = kelvin
        self._watch()

    def warn(self, warnings: int) -> None:
        """Critical warning bits that hold whatever spare and temperature say; read-only makes writes fail."""
        if not 0 <= warnings <= 0x1F:
            raise ValueError(f"critical warnings {warnings:#x} are not 0 … 0x1f")
        self.health.forced_warnings = warnings
        self._watch()

    def power_off(self, unsafe: bool = True) -> None:
        """Lose power; with `unsafe` at once, otherwise after an orderly shutdown.

        What the cache holds is lost unless a shutdown was completed.
        """
        if not unsafe:
            self._shut_down(flush=True)
        if regs.bits(self._registers.csts, 3, 2) != regs.SHUTDOWN_COMPLETE:
            self.health.unsafe_shutdowns += 1
        for namespace in self.namespaces:
            namespace.lose_power()
        self._powered = False
        self._registers = regs.Registers(self.figures)
        self._clear()

    def power_on(self) -> None:
        """Power comes back; the controller is disabled."""
        if not self._powered:
            self._powered = True
            self.health.power_cycles += 1

    def reset(self) -> None:
        """A controller-level reset that the host did not ask for: disabled, queues gone, the write cache kept."""
        admin = self._registers
        self._registers = regs.Registers(self.figures)
        self._registers.aqa, self._registers.asq, self._registers.acq = admin.aqa, admin.asq, admin.acq
        self._clear()

    def remove(self) -> None:
        """Pull it out: registers read as all ones and nothing happens any more."""
        self._removed = True
        self._clear()

    # states

    def _clear(self) -> None:
        """Forget queues, commands and what was not saved."""
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._sqs: dict[int, SubmissionQueue] = {}
        self._cqs: dict[int, CompletionQueue] = {}
        self._flights: list[_Flight] = []
        self._listeners: deque[_Flight] = deque()
        self._busy = [0] * len(self.namespaces)
        self._queued: list[deque[tuple[_Flight, Work]]] = [deque() for _ in self.namespaces]
        self._held.clear()
        self._arbiter = Arbiter(weighted=False)
        self._page = PAGE
        self._features.reset()
        self._events.clear()
        self._warned = 0

    def _configure(self, value: int) -> None:
        r = self._registers
        was, r.cc = r.cc, value & 0x00FFFFF1
        if was & regs.ENABLE and not value & regs.ENABLE:
            self._registers.csts = 0
            self._clear()
        elif value & regs.ENABLE and not was & regs.ENABLE:
            r.csts = 0
            self._at(self.figures.ready_ns, self._become_ready)
        if regs.bits(value, 15, 14) and not regs.bits(was, 15, 14) and not regs.bits(r.csts, 3, 2):
            r.csts |= regs.SHUTDOWN_OCCURRING << 2
            flush = regs.bits(value, 15, 14) == regs.SHUTDOWN_NORMAL
            self._at(self.figures.shutdown_ns, lambda: self._shut_down(flush))

    def _become_ready(self) -> None:
        r = self._registers
        shift, ams = regs.bits(r.cc, 10, 7), regs.bits(r.cc, 13, 11)
        self._page = PAGE << shift
        sq, cq = (r.aqa & 0xFFF) + 1, (r.aqa >> 16) + 1
        aligned = not r.asq % self._page and not r.acq % self._page
        known = regs.bits(r.cc, 6, 4) == 0 and ams <= 1 and shift <= regs.LARGEST_PAGE_SHIFT
        if not known or not aligned or sq < 2 or cq < 2:
            self._fatal()
            return
        self._arbiter = Arbiter(weighted=ams == 1)
        self._cqs[0] = CompletionQueue(0, r.acq, cq, users={0})
        self._sqs[0] = SubmissionQueue(0, r.asq, sq, 0)
        r.csts |= regs.READY

    def _shut_down(self, flush: bool) -> None:
        if flush:
            for namespace in self.namespaces:
                namespace.flush()
        self._registers.csts = self._registers.csts & ~0xC | regs.SHUTDOWN_COMPLETE << 2

    def _fatal(self) -> None:
        self._clear()
        self._registers.csts |= regs.FATAL

    @property
    def _working(self) -> bool:
        return self._registers.csts & 0xF == regs.READY and self._powered and not self._removed

    # doorbells and fetching

    def _ring(self, offset: int, nbytes: int, value: int) -> None:
        if not self._working:
            return
        number, odd = divmod(offset - regs.DOORBELLS, 4 << self.figures.doorbell_stride)
        qid = number >> 1
        queue = (self._cqs if number & 1 else self._sqs).get(qid)
        if nbytes != 4 or odd or queue is None:
            self._report(BAD_DOORBELL_REGISTER)
        elif isinstance(queue, SubmissionQueue):
            if not queue.ring(value):
                self._report(BAD_DOORBELL_VALUE)
            self._fetch()
        elif not queue.take(value):
            self._report(BAD_DOORBELL_VALUE)
        else:
            self._drain(queue)

    def _fetch(self) -> None:
        while self._working and sum(flight.slot for flight in self._flights) < self.figures.window:
            sq = self._arbiter.choose(self._sqs, self._features.value(Feature.ARBITRATION))
            if sq is None:
                return
            try:
                entry = Entry.unpack(fetch(self._memory, sq.next_address(), ENTRY_NBYTES))
            except Refused:
                self._fatal()
                return
            sq.step()
            self._begin(_Flight(sq, entry, named=entry.cid not in sq.flying))

    def _begin(self, flight: _Flight) -> None:
        sq, entry = flight.sq, flight.entry
        self._flights.append(flight)
        if not flight.named:
            self._later(flight, self.figures.command_ns, _refusing(Refused(Status.ID_CONFLICT)))
            return
        sq.flying.add(entry.cid)
        status = self._injected_for(flight)
        if status:
            self._later(flight, self.figures.command_ns, _refusing(_injected(status)))
        elif sq.qid == 0:
            self._later(flight, self.figures.admin_ns, lambda: self._carry_out(flight))
        else:
            self._begin_io(flight)

    def _injected_for(self, flight: _Flight) -> int:
        for fault in self._injected:
            if fault[:2] == (flight.sq.qid == 0, flight.entry.opcode):
                self._injected.remove(fault)
                return fault[2]
        return 0

    # input and output

    def _begin_io(self, flight: _Flight) -> None:
        try:
            work = self._io.begin(flight.entry, self._page)
        except Refused as refused:
            self._later(flight, self.figures.command_ns, _refusing(refused))
            return
        if not work.nsid:
            self._later(flight, self.figures.command_ns + work.media.alone_ns, self._noted(work, work.finish))
            return
        self._at(self.figures.command_ns, lambda: self._queue(flight, work))

    def _queue(self, flight: _Flight, work: Work) -> None:
        if not flight.ended:
            self._queued[work.nsid - 1].append((flight, work))
            self._admit(work.nsid - 1)

    def _admit(self, medium: int) -> None:
        """Start what waits for the medium, in order, as long as the part of it that the next one needs is free."""
        queued = self._queued[medium]
        while queued:
            flight, work = queued[0]
            share = min(work.media.share, WHOLE)
            if flight.ended:
                queued.popleft()
                continue
            if self._busy[medium] and self._busy[medium] + share > WHOLE:
                return
            queued.popleft()
            self._busy[medium] += share
            self._at(work.media.alone_ns, self._leaving(flight, work, medium, share))

    def _leaving(self, flight: _Flight, work: Work, medium: int, share: int) -> Callable[[], None]:
        finish = self._noted(work, work.finish)

        def leave() -> None:
            self._busy[medium] -= share
            self._finish(flight, finish)
            self._admit(medium)

        return leave

    def _noted(self, work: Work, finish: Callable[[], int]) -> Callable[[], int]:
        """What finishes a command, with an entry in the history; it is made when the medium begins."""
        started = self.now_ns

        def noted() -> int:
            if work.op != "none":
                self.history.append(MediaOperation(work.op, work.nsid, work.lba, work.blocks, started, self.now_ns))
            return finish()

        return noted

    # ends

    def _later(self, flight: _Flight, delay_ns: int, finish: Callable[[], int | None]) -> None:
        self._at(delay_ns, lambda: self._finish(flight, finish))

    def _finish(self, flight: _Flight, finish: Callable[[], int | None]) -> None:
        """Carry a command out and end it; None says that it stays."""
        if flight.ended:
            return
        if self._holding and flight.sq.qid:
            self._held.append((flight, finish))
            return
        try:
            result = finish()
        except Refused as refused:
            self._end(flight, 0, self._failed(flight, refused))
        else:
            if result is not None:
                self._end(flight, result, Status.SUCCESS)

    def _failed(self, flight: _Flight, refused: Refused) -> int:
        entry = flight.entry
        status = refused.status | MORE
        self.health.fail(
            self.figures.error_entries, flight.sq.qid, entry.cid, status, refused.byte, refused.lba, entry.nsid
        )
        return status

    def _end(self, flight: _Flight, result: int, status: int) -> None:
        if flight.ended:
            return
        flight.ended = True
        self._flights.remove(flight)
        sq = flight.sq
        if flight.named:
            sq.flying.discard(flight.entry.cid)
        if sq.qid and self._drops:
            self._drops -= 1
            return
        queue = self._cqs[sq.cqid]
        queue.waiting.append(Answer(result, 0, sq.head, sq.qid, flight.entry.cid, 0, status))
        self._drain(queue)

    def _drain(self, queue: CompletionQueue) -> None:
        """Post what there is room for."""
        while queue.waiting and not queue.full:
            answer = queue.waiting.popleft()._replace(phase=queue.phase)
            try:
                self._memory.write(queue.next_address(), answer.pack())
            except (OSError, ValueError, OverflowError):
                self._fatal()
                return
            queue.step()

    # admin commands

    def _carry_out(self, flight: _Flight) -> int | None:
        entry = flight.entry
        if entry.opcode not in _ADMIN:
            raise Refused(Status.INVALID_OPCODE, byte=0)
        if entry.flags:
            raise Refused(Status.INVALID_FIELD, byte=1)
        opcode = Admin(entry.opcode)
        if opcode is Admin.ASYNC_EVENT:
            self._listen(flight)
            return None
        created = len(self._sqs) > 1 or len(self._cqs) > 1
        result: int = {
            Admin.IDENTIFY: lambda: self._admin.identify(entry, self._page),
            Admin.GET_LOG_PAGE: lambda: self._admin.log(entry, self._page),
            Admin.GET_FEATURES: lambda: self._features.get(entry),
            Admin.SET_FEATURES: lambda: self._admin.set_features(entry, created),
            Admin.CREATE_CQ: lambda: self._create_cq(entry),
            Admin.CREATE_SQ: lambda: self._create_sq(entry),
            Admin.DELETE_CQ: lambda: self._delete_cq(entry),
            Admin.DELETE_SQ: lambda: self._delete_sq(entry),
            Admin.ABORT: lambda: self._abort(entry),
        }[opcode]()
        self._watch()
        self._tell()
        return result

    def _listen(self, flight: _Flight) -> None:
        """Asynchronous Event Request: it stays until there is an event."""
        if len(self._listeners) >= self.figures.event_requests:
            raise Refused(Status.ASYNC_EVENT_LIMIT)
        flight.slot = False
        self._listeners.append(flight)
        self._tell()

    def _create_cq(self, entry: Entry) -> int:
        qid, size, flags = self._new_queue(entry, self._cqs, submission=False)
        vector = entry.cdw[1] >> 16
        if vector >= self.figures.vectors:
            raise Refused(Status.INTERRUPT_VECTOR_INVALID, byte=46)
        self._cqs[qid] = CompletionQueue(qid, entry.prp1, size, vector, bool(flags & 2))
        return 0

    def _create_sq(self, entry: Entry) -> int:
        qid, size, flags = self._new_queue(entry, self._sqs, submission=True)
        cqid = entry.cdw[1] >> 16
        if not 1 <= cqid <= self._granted(submission=False):
            raise Refused(Status.QUEUE_ID_INVALID, byte=46)
        if cqid not in self._cqs:
            raise Refused(Status.COMPLETION_QUEUE_INVALID, byte=46)
        self._sqs[qid] = SubmissionQueue(qid, entry.prp1, size, cqid, flags >> 1 & 3)
        self._cqs[cqid].users.add(qid)
        return 0

    def _new_queue(self, entry: Entry, queues: Mapping[int, object], submission: bool) -> tuple[int, int, int]:
        """Identifier, size and flags of a queue to create, checked."""
        qid, size, flags = entry.cdw[0] & 0xFFFF, (entry.cdw[0] >> 16) + 1, entry.cdw[1] & 0xFFFF
        if not 1 <= qid <= self._granted(submission) or qid in queues:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        width = regs.bits(self._registers.cc, 19, 16) if submission else regs.bits(self._registers.cc, 23, 20)
        if not 2 <= size <= self.figures.queue_entries or width != (6 if submission else 4):
            raise Refused(Status.QUEUE_SIZE_INVALID, byte=42)
        if not flags & 1:
            raise Refused(Status.INVALID_FIELD, byte=44)
        if entry.prp1 % self._page:
            raise Refused(Status.PRP_OFFSET_INVALID, byte=24)
        return qid, size, flags

    def _granted(self, submission: bool) -> int:
        word = self._features.value(Feature.NUMBER_OF_QUEUES)
        return (word & 0xFFFF if submission else word >> 16) + 1

    def _delete_cq(self, entry: Entry) -> int:
        qid = entry.cdw[0] & 0xFFFF
        if not qid or qid not in self._cqs:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        if self._cqs[qid].users:
            raise Refused(Status.QUEUE_DELETION_INVALID, byte=40)
        del self._cqs[qid]
        return 0

    def _delete_sq(self, entry: Entry) -> int:
        qid = entry.cdw[0] & 0xFFFF
        if not qid or qid not in self._sqs:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        for flight in [flight for flight in self._flights if flight.sq.qid == qid]:
            self._end(flight, 0, Status.QUEUE_DELETED)
        queue = self._sqs.pop(qid)
        self._cqs[queue.cqid].users.discard(qid)
        return 0

    def _abort(self, entry: Entry) -> int:
        """Bit 0 of the answer says that nothing was aborted."""
        qid, cid = entry.cdw[0] & 0xFFFF, entry.cdw[0] >> 16
        for flight in self._flights:
            if (flight.sq.qid, flight.entry.cid) == (qid, cid) and flight.entry is not entry:
                if flight in self._listeners:
                    self._listeners.remove(flight)
                self._end(flight, 0, Status.ABORT_REQUESTED)
                return 0
        return 1

    # events

    def _watch(self) -> None:
        """Report critical warnings that are new and that the host wants to hear of."""
        bits = self._admin.warnings()
        new, self._warned = bits & ~self._warned, bits
        wanted = self._features.value(Feature.ASYNC_EVENTS)
        for bit in range(5):
            if new & wanted & 1 << bit:
                self._report({SPARE: SPARE_LOW, TEMPERATURE: HOT}.get(1 << bit, WORN))

    def _report(self, event: Event) -> None:
        self._events.add(event)
        self._tell()

    def _tell(self) -> None:
        while self._listeners:
            event = self._events.take()
            if event is None:
                return
            self._end(self._listeners.popleft(), event.word, Status.SUCCESS)

    # time

    def _at(self, delay_ns: int, happen: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (self.now_ns + delay_ns, self._sequence, happen))

    def _pass_to(self, now_ns: int) -> None:
        passed = now_ns - self.now_ns
        if self._powered:
            self.health.on_ns += passed
            if any(flight.slot for flight in self._flights):
                self.health.busy_ns += passed
        self.now_ns = now_ns

    def _check(self, nsid: int, lba: int, count: int) -> None:
        if not 1 <= nsid <= len(self.namespaces):
            raise ValueError(f"namespace {nsid} is not 1 … {len(self.namespaces)}")
        blocks = self.namespaces[nsid - 1].blocks
        if lba < 0 or count < 0 or lba + count > blocks:
            raise ValueError(f"blocks [{lba}, {lba + count}) are outside a namespace of {blocks}")


def _refusing(refused: Refused) -> Callable[[], int]:
    def refuse() -> int:
        raise refused

    return refuse


def _injected(status: int) -> Refused:
    refused = Refused(status)
    refused.status = status
    return refused
