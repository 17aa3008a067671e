"""The part of Linux's nvme driver that talks to a controller: queue pairs in memory, entries, doorbells, completions.

A request is an entry with the memory that belongs to it. It gets a command identifier and PRPs when there is room in a
queue, and ends with the controller's status; `done` is called then. A request that is not answered within its timeout
is aborted, and if that does not end it the controller is reset, which cancels everything in flight, as Linux does in
the end. A controller that was pulled out cancels everything, too.

Time is `Time`: by default a counter that jumps to what is due when somebody waits, so that nothing ever sleeps.
"""

from __future__ import annotations

import errno
import mmap
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tierloop.devices.system import address_of
from tierloop.emulators.kernel import failure
from tierloop.emulators.kernel_memory import PAGE, DeviceMemory, ProcessMemory
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_controller import NvmeController
from tierloop.firmware_models.nvme_wire import COMPLETION_NBYTES, ENTRY_NBYTES, Admin, Answer, Entry, pointers

ADMIN_TIMEOUT_NS, IO_TIMEOUT_NS = 60_000_000_000, 30_000_000_000
HOST_ABORTED = 0x371
"""The status that Linux makes up for a request that it gave up."""
_TICK_NS = 200
_STILL = 1000
_NEVER_NS = 1 << 62


class Time:
    """Now, and waiting. `now_ns` is a clock of somebody else; without one a counter takes its place."""

    def __init__(self, now_ns: Callable[[], int] | None = None) -> None:
        self._given = now_ns
        self._counter = 0

    def now(self) -> int:
        """The time; the counter ticks whenever it is looked at, so that who polls gets on."""
        if self._given is not None:
            return self._given()
        self._counter += _TICK_NS
        return self._counter

    def wait_until(self, due_ns: int) -> int:
        """Let time pass until then; returns the time, which is earlier only if a given clock stands still."""
        if self._given is None:
            self._counter = max(self._counter, due_ns)
            return self._counter
        seen, still = self._given(), 0
        while seen < due_ns and still < _STILL:
            now = self._given()
            still = still + 1 if now == seen else 0
            seen = now
        return seen


@dataclass(eq=False)
class Request:
    """A command in the driver's hands. `status` is None until it has ended; `cancelled` ones were given up.

    `owner` is whose memory it uses.
    """

    entry: Entry
    address: int = 0
    nbytes: int = 0
    timeout_ns: int = IO_TIMEOUT_NS
    done: Callable[[Request], None] = field(default=lambda request: None)
    owner: object = None
    status: int | None = None
    result: int = 0
    cancelled: bool = False
    deadline_ns: int = 0
    mapped: bool = False
    lists: mmap.mmap | None = None

    @property
    def to_host(self) -> bool:
        """The controller writes the request's memory (bit 0 of an opcode says that the host's data goes out)."""
        return not self.entry.opcode & 1


class _Pair:
    """A submission queue and its completion queue, in memory of the kernel."""

    def __init__(self, qid: int, entries: int, memory: DeviceMemory) -> None:
        self.qid, self.entries = qid, entries
        self.sq = mmap.mmap(-1, -(-entries * ENTRY_NBYTES // PAGE) * PAGE)
        self.cq = mmap.mmap(-1, -(-entries * COMPLETION_NBYTES // PAGE) * PAGE)
        self.sq_at, self.cq_at = address_of(self.sq), address_of(self.cq)
        memory.map(self.sq_at, len(self.sq), writable=False)
        memory.map(self.cq_at, len(self.cq), writable=True)
        self.flying: dict[int, Request] = {}
        self.backlog: deque[Request] = deque()
        self.clear()

    def clear(self) -> None:
        """As new."""
        self.sq[:], self.cq[:] = bytes(len(self.sq)), bytes(len(self.cq))
        self.tail = self.head = 0
        self.phase = 1
        self.free = deque(range(self.entries - 1))

    def push(self, entry: Entry) -> None:
        """Write an entry behind the last."""
        self.sq[self.tail * ENTRY_NBYTES : (self.tail + 1) * ENTRY_NBYTES] = entry.pack()
        self.tail = (self.tail + 1) % self.entries

    def pop(self) -> Answer | None:
        """The next completion, if there is one."""
        at = self.head * COMPLETION_NBYTES
        answer = Answer.unpack(self.cq[at : at + COMPLETION_NBYTES])
        if answer.phase != self.phase:
            return None
        self.head += 1
        if self.head == self.entries:
            self.head, self.phase = 0, self.phase ^ 1
        return answer


class NvmeHost:
    """Drives one controller; see the top of the file. `queues` pairs for input and output take requests in turn, or as
    many as the controller grants.

    `owner` is whoever starts requests at present (a ring); `disown` takes the memory of its requests away.
    """

    def __init__(
        self,
        controller: NvmeController,
        memory: ProcessMemory,
        reachable: DeviceMemory,
        time: Time,
        queues: int = 2,
        depth: int = 128,
    ) -> None:
        self.controller, self.memory, self.time = controller, memory, time
        self._reachable = reachable
        depth = min(depth, controller.figures.queue_entries)
        self._pairs = [_Pair(qid, 32 if qid == 0 else depth, reachable) for qid in range(1 + queues)]
        self.owner: object = None
        self._turn = self._resets = 0
        self._granted = queues
        self._start()

    @property
    def resets(self) -> int:
        """How often the controller had to be reset because it did not answer."""
        return self._resets

    @property
    def gone(self) -> bool:
        """The controller does not answer its registers."""
        return self.controller.read(regs.CSTS, 4) == 0xFFFFFFFF

    def start(self, request: Request, admin: bool) -> None:
        """Hand a request to the controller, now or when there is room. Raises OSError: EFAULT, ENODEV."""
        if self.gone:
            raise failure(errno.ENODEV)
        self.memory.check(request.address, request.nbytes)
        if admin:
            pair = self._pairs[0]
        else:
            self._turn = self._turn % self._granted + 1
            pair = self._pairs[self._turn]
        self.catch_up()
        pair.backlog.append(request)
        self._send(pair)

    def catch_up(self) -> None:
        """Let what is due by now happen, and take what has come back."""
        self._advance(self.time.now())

    def wait(self, request: Request) -> None:
        """Let time pass until the request has ended; it ends at the latest by its timeout."""
        while request.status is None:
            self.wait_some()

    def disown(self, owner: object) -> None:
        """The memory of an owner's requests must not be touched any more: what is in flight fails to move data."""
        for pair in self._pairs:
            for request in pair.flying.values():
                if request.owner is owner:
                    request.cancelled = True
                    self._release(request)
            pair.backlog = deque(request for request in pair.backlog if request.owner is not owner)

    def wait_some(self) -> None:
        """Let time pass until something happens."""
        if not self.pass_time(_NEVER_NS):
            self._give_up()

    def reset(self) -> None:
        """Reset the controller; what is in flight is cancelled."""
        if self.gone:
            raise failure(errno.ENODEV)
        self._give_up()

    def restart(self) -> None:
        """Enable the controller again after its power came back."""
        self._start()

    def pass_time(self, most_ns: int) -> bool:
        """Let time pass until something happens, at most so long; returns whether something did."""
        now = self.controller.now_ns
        dues = [request.deadline_ns for pair in self._pairs for request in pair.flying.values()]
        if self.controller.next_due_ns is not None:
            dues.append(self.controller.next_due_ns)
        if self.gone:
            dues.append(now)
        if not dues or min(dues) > now + most_ns:
            self._advance(self.time.wait_until(now + most_ns) if most_ns < 1 << 60 else now)
            return False
        reached = self.time.wait_until(min(dues))
        self._advance(reached)
        return reached >= min(dues)

    # inside

    def _advance(self, now_ns: int) -> None:
        controller = self.controller
        controller.advance(max(now_ns, controller.now_ns))
        for pair in self._pairs:
            self._reap(pair)
        if self.gone:
            self._cancel_all()
        elif any(request.deadline_ns <= now_ns for pair in self._pairs for request in pair.flying.values()):
            self._overdue(now_ns)

    def _start(self) -> None:
        """Enable the controller and make the queues, as on probing and after a reset."""
        c, admin = self.controller, self._pairs[0]
        c.write(regs.CC, 4, 0)
        for pair in self._pairs:
            pair.clear()
        c.write(regs.AQA, 4, (admin.entries - 1) * 0x10001)
        c.write(regs.ASQ, 8, admin.sq_at)
        c.write(regs.ACQ, 8, admin.cq_at)
        c.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20)
        self._settle(lambda: bool(c.read(regs.CSTS, 4) & regs.READY))
        queues = len(self._pairs) - 1
        granted = self._admin(Entry(Admin.SET_FEATURES, cdw=(7, (queues - 1) * 0x10001, 0, 0, 0, 0)))
        self._granted = min(queues, (granted & 0xFFFF) + 1, (granted >> 16) + 1)
        for pair in self._pairs[1 : 1 + self._granted]:
            size = (pair.entries - 1) << 16 | pair.qid
            vector = min(pair.qid, c.figures.vectors - 1)
            self._admin(Entry(Admin.CREATE_CQ, data=pointers(pair.cq_at), cdw=(size, vector << 16 | 3, 0, 0, 0, 0)))
            self._admin(Entry(Admin.CREATE_SQ, data=pointers(pair.sq_at), cdw=(size, pair.qid << 16 | 1, 0, 0, 0, 0)))

    def _admin(self, entry: Entry) -> int:
        """A command of the driver's own, which must succeed; its result. It passes the requests that wait."""
        request = Request(entry, timeout_ns=_NEVER_NS)
        self._pairs[0].backlog.appendleft(request)
        self._send(self._pairs[0])
        self._settle(lambda: request.status is not None)
        if request.status:
            raise failure(errno.EIO)
        return request.result

    def _settle(self, done: Callable[[], bool]) -> None:
        """Let the controller get there without a look at timeouts; ENODEV if it never does."""
        while not done():
            due = self.controller.next_due_ns
            if due is None or self.gone:
                raise failure(errno.ENODEV)
            self.controller.advance(max(self.time.wait_until(due), due))
            self._reap(self._pairs[0])

    def _send(self, pair: _Pair) -> None:
        rung = False
        while pair.backlog and pair.free:
            request = pair.backlog.popleft()
            cid = pair.free.popleft()
            pair.flying[cid] = request
            request.deadline_ns = self.controller.now_ns + request.timeout_ns
            pair.push(request.entry._replace(cid=cid, data=self._described(request)))
            rung = True
        if rung:
            self._ring(2 * pair.qid, pair.tail)

    def _ring(self, number: int, value: int) -> None:
        stride = 4 << self.controller.figures.doorbell_stride
        self.controller.write(regs.DOORBELLS + number * stride, 4, value)

    def _described(self, request: Request) -> bytes:
        """Map the request's memory for the controller and describe it with PRPs."""
        address, nbytes = request.address, request.nbytes
        if not nbytes:
            return request.entry.data
        self._reachable.map(address, nbytes, request.to_host)
        request.mapped = True
        pages = list(range(address // PAGE * PAGE + PAGE, address + nbytes, PAGE))
        if len(pages) <= 1:
            return pointers(address, pages[0] if pages else 0)
        room = PAGE // 8
        made: list[list[int]] = [[]]
        for i, page in enumerate(pages):
            if len(made[-1]) == room - 1 and i < len(pages) - 1:
                made.append([])
            made[-1].append(page)
        request.lists = mmap.mmap(-1, len(made) * PAGE)
        at = address_of(request.lists)
        for i, places in enumerate(made):
            chain = [at + (i + 1) * PAGE] if i + 1 < len(made) else []
            struct.pack_into(f"<{len(places) + len(chain)}Q", request.lists, i * PAGE, *places, *chain)
        self._reachable.map(at, len(request.lists), writable=False)
        return pointers(address, at)

    def _release(self, request: Request) -> None:
        if request.mapped:
            self._reachable.unmap(request.address, request.nbytes, request.to_host)
            request.mapped = False
        if request.lists is not None:
            self._reachable.unmap(address_of(request.lists), len(request.lists), writable=False)
            request.lists = None

    def _reap(self, pair: _Pair) -> None:
        ended = []
        while (answer := pair.pop()) is not None:
            ended.append(answer)
        if not ended:
            return
        self._ring(2 * pair.qid + 1, pair.head)
        for answer in ended:
            request = pair.flying.pop(answer.cid, None)
            if request is None:
                raise AssertionError(f"the controller completed command {answer.cid} of queue {pair.qid} twice")
            pair.free.append(answer.cid)
            self._end(request, answer.status, answer.result)
        self._send(pair)

    def _end(self, request: Request, status: int, result: int = 0) -> None:
        self._release(request)
        request.status, request.result = status, result
        request.done(request)

    def _overdue(self, now_ns: int) -> None:
        """Abort what is late; if that does not end it, reset."""
        for pair in self._pairs:
            for cid, request in list(pair.flying.items()):
                if request.deadline_ns <= now_ns and request.status is None and pair.qid:
                    self._admin(Entry(Admin.ABORT, cdw=(pair.qid | cid << 16, 0, 0, 0, 0, 0)))
            self._reap(pair)
        if any(request.deadline_ns <= now_ns for pair in self._pairs for request in pair.flying.values()):
            self._give_up()

    def _give_up(self) -> None:
        self._resets += 1
        flying = self._taken()
        self._start()
        for request in flying:
            request.cancelled = True
            self._end(request, HOST_ABORTED)
        for pair in self._pairs:
            self._send(pair)

    def _cancel_all(self) -> None:
        for request in self._taken():
            request.cancelled = True
            self._end(request, HOST_ABORTED)

    def _taken(self) -> list[Request]:
        """All that is in flight, out of the queues; what waits stays unless the controller is gone."""
        taken: list[Request] = []
        for pair in self._pairs:
            taken += pair.flying.values()
            pair.flying.clear()
            if self.gone:
                taken += pair.backlog
                pair.backlog.clear()
        return taken
