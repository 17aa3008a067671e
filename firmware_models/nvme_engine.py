"""The part of an NVMe controller that works: it fetches commands, gives them to the medium, and posts their ends.

A command is fetched when its queue was rung and there is room for it (`window`; administrative commands always find
some). It reaches the medium `command_ns`
later, waits there until the part of the medium that it needs is free, first come first served, and ends when the medium
is done. Its data moves then, and then its completion is posted, or waits for room in its queue. What belongs to
registers is in nvme_controller.py, which starts and stops the engine.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierloop.firmware_models.media import WHOLE, Wearing
from tierloop.firmware_models.nvme_admin import AdminCommands
from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_health import HOT, SPARE, SPARE_LOW, TEMPERATURE, WORN, Event, Events, Health
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_io import IoCommands, Work
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_queue_set import QueueSet
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
    slot: bool
    named: bool = True
    ended: bool = False


class Engine:
    """`running` says whether commands are fetched; `broken` is called when a queue cannot be reached."""

    def __init__(
        self,
        figures: NvmeFigures,
        namespaces: Sequence[Namespace],
        memory: HostMemory,
        features: Features,
        running: Callable[[], bool],
        broken: Callable[[], None],
    ) -> None:
        self.figures, self.features = figures, features
        media = tuple({id(ns.media): ns.media for ns in namespaces}.values())
        self.health = Health(tuple(medium for medium in media if isinstance(medium, Wearing)))
        self.history = deque[MediaOperation](maxlen=_HISTORY)
        self.now_ns = 0
        self.queues = QueueSet(figures, features)
        self._memory, self._running, self._broken = memory, running, broken
        self._media = len(namespaces)
        self._events = Events()
        self._admin = AdminCommands(figures, namespaces, memory, features, self.health, self._events)
        self._io = IoCommands(figures, namespaces, memory, features, self.health)
        self._holding = False
        self._drops = 0
        self._injected: list[tuple[bool, int, int]] = []
        self._sequence = 0
        self.clear()

    def clear(self) -> None:
        """Forget queues, commands and what was not saved."""
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self.queues.clear()
        self._flights: list[_Flight] = []
        self._listeners: deque[_Flight] = deque()
        self._busy = [0] * self._media
        self._queued: list[deque[tuple[_Flight, Work]]] = [deque() for _ in range(self._media)]
        self._held: list[tuple[_Flight, Callable[[], int | None]]] = []
        self._arbiter = Arbiter(weighted=False)
        self.features.reset()
        self._events.clear()
        self._warned = 0

    def start(self, weighted: bool) -> None:
        """The queues are there; from now on commands are fetched."""
        self._arbiter = Arbiter(weighted)

    # time

    @property
    def next_due_ns(self) -> int | None:
        """When something happens next by itself; None if nothing does."""
        return self._due[0][0] if self._due else None

    def advance(self, now_ns: int, powered: bool) -> None:
        """Let everything happen that is due by then. Raises ValueError if time goes back."""
        if now_ns < self.now_ns:
            raise ValueError(f"time goes back from {self.now_ns} to {now_ns} ns")
        while self._due and self._due[0][0] <= now_ns:
            due, _, happen = heapq.heappop(self._due)
            self._pass_to(due, powered)
            happen()
            self.fetch()
        self._pass_to(now_ns, powered)

    def at(self, delay_ns: int, happen: Callable[[], None]) -> None:
        """Let something happen so many ns from now."""
        self._sequence += 1
        heapq.heappush(self._due, (self.now_ns + delay_ns, self._sequence, happen))

    def _pass_to(self, now_ns: int, powered: bool) -> None:
        passed = now_ns - self.now_ns
        if powered:
            self.health.on_ns += passed
            if any(flight.slot for flight in self._flights):
                self.health.busy_ns += passed
        self.now_ns = now_ns

    # the back door

    def hold(self) -> None:
        """Commands for input and output do not end from now on."""
        self._holding = True

    def release(self) -> None:
        """What was held ends now."""
        self._holding = False
        held, self._held = self._held, []
        for flight, finish in held:
            self._finish(flight, finish)
        self.fetch()

    def drop(self, times: int) -> None:
        """The next completions for input and output are lost."""
        self._drops += times

    def inject(self, opcode: int, status: int, times: int, admin: bool) -> None:
        """The next commands of an opcode end with a status."""
        self._injected += [(admin, opcode, status)] * times

    def forget_injected(self) -> None:
        """No status is injected any more."""
        self._injected.clear()

    # doorbells and fetching

    def ring(self, queue: SubmissionQueue, tail: int) -> bool:
        """The doorbell of a submission queue; False if that value cannot be."""
        good = queue.ring(tail)
        self.fetch()
        return good

    def take(self, queue: CompletionQueue, head: int) -> bool:
        """The doorbell of a completion queue; False if that value cannot be."""
        good = queue.take(head)
        self._drain(queue)
        return good

    def fetch(self) -> None:
        """Fetch what there is room for."""
        while self._running():
            full = sum(flight.slot for flight in self._flights) >= self.figures.window
            queues = {0: self.queues.sq[0]} if full else self.queues.sq
            sq = self._arbiter.choose(queues, self.features.value(Feature.ARBITRATION))
            if sq is None:
                return
            try:
                entry = Entry.unpack(fetch(self._memory, sq.next_address(), ENTRY_NBYTES))
            except Refused:
                self._broken()
                return
            sq.step()
            self._begin(_Flight(sq, entry, slot=bool(sq.qid), named=entry.cid not in sq.flying))

    def _begin(self, flight: _Flight) -> None:
        sq, entry = flight.sq, flight.entry
        self._flights.append(flight)
        if not flight.named:
            self._later(flight, self.figures.command_ns, _refusing(Refused(Status.ID_CONFLICT)))
            return
        sq.flying.add(entry.cid)
        status = self._injected_for(flight)
        if sq.qid == 0 and self._aborts() > self.figures.aborts:
            self._later(flight, self.figures.command_ns, _refusing(Refused(Status.ABORT_LIMIT)))
        elif status:
            self._later(flight, self.figures.command_ns, _refusing(_injected(status)))
        elif sq.qid == 0:
            self._later(flight, self.figures.admin_ns, lambda: self._carry_out(flight))
        else:
            self._begin_io(flight)

    def _aborts(self) -> int:
        return sum(flight.sq.qid == 0 and flight.entry.opcode == Admin.ABORT for flight in self._flights)

    def _injected_for(self, flight: _Flight) -> int:
        for fault in self._injected:
            if fault[:2] == (flight.sq.qid == 0, flight.entry.opcode):
                self._injected.remove(fault)
                return fault[2]
        return 0

    # input and output

    def _begin_io(self, flight: _Flight) -> None:
        try:
            work = self._io.begin(flight.entry, self.queues.page, self.now_ns + self.figures.command_ns)
        except Refused as refused:
            self._later(flight, self.figures.command_ns, _refusing(refused))
            return
        if work.nsid:
            self.at(self.figures.command_ns, lambda: self._queue(flight, work))
        else:
            self.at(
                self.figures.command_ns,
                lambda: self._later(flight, work.media.alone_ns, self._noted(work, work.finish)),
            )

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
            self.at(work.media.alone_ns, self._leaving(flight, work, medium, share))

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
            if work.op == "write" and self.health.media:
                self.watch()  # it may have taken the last spare block
            if work.op != "none":
                self.history.append(MediaOperation(work.op, work.nsid, work.lba, work.blocks, started, self.now_ns))
            return finish()

        return noted

    # ends

    def _later(self, flight: _Flight, delay_ns: int, finish: Callable[[], int | None]) -> None:
        self.at(delay_ns, lambda: self._finish(flight, finish))

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
        if sq.qid and self._drops:
            self._drops -= 1
            if flight.named:
                sq.flying.discard(flight.entry.cid)
            return
        queue = self.queues.cq[sq.cqid]
        queue.waiting.append((Answer(result, 0, 0, sq.qid, flight.entry.cid, 0, status), sq, flight.named))
        self._drain(queue)

    def _drain(self, queue: CompletionQueue) -> None:
        """Post what there is room for. The identifier of a command is free once its completion is posted."""
        while queue.waiting and not queue.full:
            answer, sq, named = queue.waiting.popleft()
            answer = answer._replace(phase=queue.phase, sq_head=sq.head)
            if named:
                sq.flying.discard(answer.cid)
            try:
                self._memory.write(queue.next_address(), answer.pack())
            except (OSError, ValueError, OverflowError):
                self._broken()
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
        result: int = {
            Admin.IDENTIFY: lambda: self._admin.identify(entry, self.queues.page),
            Admin.GET_LOG_PAGE: lambda: self._admin.log(entry, self.queues.page),
            Admin.GET_FEATURES: lambda: self.features.get(entry),
            Admin.SET_FEATURES: lambda: self._admin.set_features(entry, self.queues.created),
            Admin.CREATE_CQ: lambda: self.queues.create_cq(entry),
            Admin.CREATE_SQ: lambda: self.queues.create_sq(entry),
            Admin.DELETE_CQ: lambda: self.queues.delete_cq(entry),
            Admin.DELETE_SQ: lambda: self._delete_sq(entry),
            Admin.ABORT: lambda: self._abort(entry),
        }[opcode]()
        self.watch()
        self._tell()
        return result

    def _listen(self, flight: _Flight) -> None:
        """Asynchronous Event Request: it stays until there is an event."""
        if len(self._listeners) >= self.figures.event_requests:
            raise Refused(Status.ASYNC_EVENT_LIMIT)
        self._listeners.append(flight)
        self._tell()

    def _delete_sq(self, entry: Entry) -> int:
        qid = self.queues.to_delete(entry)
        for flight in [flight for flight in self._flights if flight.sq.qid == qid]:
            self._end(flight, 0, Status.QUEUE_DELETED)
        self.queues.remove(qid)
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

    def watch(self) -> None:
        """Report critical warnings that are new and that the host wants to hear of."""
        bits = self._admin.warnings()
        new, self._warned = bits & ~self._warned, bits
        wanted = self.features.value(Feature.ASYNC_EVENTS)
        for bit in range(5):
            if new & wanted & 1 << bit:
                self.report({SPARE: SPARE_LOW, TEMPERATURE: HOT}.get(1 << bit, WORN))

    def report(self, event: Event) -> None:
        """Something happened that the host did not ask for."""
        self._events.add(event)
        self._tell()

    def _tell(self) -> None:
        while self._listeners:
            event = self._events.take()
            if event is None:
                return
            self._end(self._listeners.popleft(), event.word, Status.SUCCESS)


def _refusing(refused: Refused) -> Callable[[], int]:
    def refuse() -> int:
        raise refused

    return refuse


def _injected(status: int) -> Refused:
    refused = Refused(status)
    refused.status = status
    return refused
