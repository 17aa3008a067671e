"""A host for the NVMe controller model: memory that is a bytearray, queue pairs by hand, and time that a test gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.media import Firmware
from tierloop.firmware_models.nvme_controller import NvmeController
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_wire import Admin, Answer, Entry, Io, pointers
from tierloop.firmware_models.passthrough import Passthrough

MIB = 1 << 20
DATA = 0x100000
"""Where tests put data: behind the queues."""
RATE = 1_000_000_000
"""Bytes/s of the plain medium: a byte takes a nanosecond."""


class Memory:
    """Host memory of a bytearray; addresses outside are errors."""

    def __init__(self, nbytes: int = 4 * MIB) -> None:
        self.bytes = bytearray(nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        if not 0 <= address <= address + nbytes <= len(self.bytes):
            raise ValueError(f"{address:#x} is not in memory")
        return bytes(self.bytes[address : address + nbytes])

    def write(self, address: int, data: bytes) -> None:
        if not 0 <= address <= address + len(data) <= len(self.bytes):
            raise ValueError(f"{address:#x} is not in memory")
        self.bytes[address : address + len(data)] = data


@dataclass
class Pair:
    """A queue pair as the host sees it; `answers` are the completions taken so far."""

    qid: int
    entries: int
    sq: int
    cq: int
    tail: int = 0
    head: int = 0
    phase: int = 1
    answers: list[Answer] = field(default_factory=list)


class Bus:
    """A controller and its host."""

    def __init__(
        self,
        figures: NvmeFigures | None = None,
        namespaces: int = 1,
        media: Firmware | None = None,
        capacity: int = MIB,
        lba_nbytes: int = 512,
        unit_nbytes: int | None = None,
    ) -> None:
        self.memory = Memory()
        self.figures = figures or NvmeFigures(command_ns=0, admin_ns=0)
        medium = media or Passthrough(RATE, RATE)
        made = [Namespace(capacity, medium, lba_nbytes, unit_nbytes) for _ in range(namespaces)]
        self.controller = NvmeController(self.figures, made, self.memory)
        self.pairs: dict[int, Pair] = {}
        self.cid = 0

    # registers

    def register(self, offset: int, nbytes: int = 4) -> int:
        return self.controller.read(offset, nbytes)

    def enable(self, cc: int = 0, entries: int = 16) -> Bus:
        """Admin queues of 16 entries, enabled and ready."""
        c = self.controller
        self.pairs = {0: Pair(0, entries, 0x1000, 0x2000)}
        self.memory.bytes[0x1000:0x3000] = bytes(0x2000)
        c.write(regs.AQA, 4, (entries - 1) * 0x10001)
        c.write(regs.ASQ, 8, 0x1000)
        c.write(regs.ACQ, 8, 0x2000)
        c.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20 | cc)
        self.settle()
        return self

    def with_queue(self, qid: int = 1, entries: int = 64, priority: int = 0) -> Bus:
        """A queue pair for input and output."""
        pair = Pair(qid, entries, 0x10000 * qid, 0x10000 * qid + 0x8000)
        self.memory.bytes[pair.sq : pair.sq + 0x10000] = bytes(0x10000)
        size = (entries - 1) << 16 | qid
        assert self.admin(Admin.CREATE_CQ, pair.cq, cdw=(size, qid << 16 | 3)).status == 0
        assert self.admin(Admin.CREATE_SQ, pair.sq, cdw=(size, qid << 16 | priority << 1 | 1)).status == 0
        self.pairs[qid] = pair
        return self

    # commands

    def push(self, entry: Entry, qid: int = 0) -> int:
        """Write an entry without ringing; returns its identifier."""
        pair = self.pairs[qid]
        self.cid = self.cid % 0xFFFE + 1
        self.memory.write(pair.sq + 64 * pair.tail, entry._replace(cid=self.cid).pack())
        pair.tail = (pair.tail + 1) % pair.entries
        return self.cid

    def ring(self, qid: int = 0) -> None:
        self.doorbell(2 * qid, self.pairs[qid].tail)

    def doorbell(self, number: int, value: int) -> None:
        self.controller.write(regs.DOORBELLS + number * (4 << self.figures.doorbell_stride), 4, value)

    def start(self, entry: Entry, qid: int = 0) -> int:
        cid = self.push(entry, qid)
        self.ring(qid)
        return cid

    def reap(self, qid: int = 0) -> list[Answer]:
        """Take the completions that are there and tell the controller."""
        pair, new = self.pairs[qid], []
        while True:
            answer = Answer.unpack(self.memory.read(pair.cq + 16 * pair.head, 16))
            if answer.phase != pair.phase:
                break
            new.append(answer)
            pair.head += 1
            if pair.head == pair.entries:
                pair.head, pair.phase = 0, pair.phase ^ 1
        if new:
            self.doorbell(2 * qid + 1, pair.head)
        pair.answers += new
        return new

    def settle(self) -> None:
        """Let everything happen that is due by itself."""
        while (due := self.controller.next_due_ns) is not None:
            self.controller.advance(due)

    def run(self, entry: Entry, qid: int = 0) -> Answer:
        """One command, to its end."""
        cid = self.start(entry, qid)
        self.settle()
        (answer,) = self.reap(qid)
        assert (answer.cid, answer.sq_id) == (cid, qid)
        return answer

    def admin(self, opcode: int, prp1: int = 0, nsid: int = 0, cdw: Iterable[int] = (), prp2: int = 0) -> Answer:
        return self.run(Entry(opcode, nsid=nsid, data=pointers(prp1, prp2), cdw=words(cdw)))

    def io(self, opcode: int, lba: int = 0, blocks: int = 1, prp1: int = DATA, prp2: int = 0, **more: int) -> Answer:
        return self.run(io_entry(opcode, lba, blocks, prp1, prp2, **more), 1)

    def put(self, data: bytes, address: int = DATA) -> None:
        self.memory.write(address, data)

    def got(self, nbytes: int, address: int = DATA) -> bytes:
        return self.memory.read(address, nbytes)

    def log(self, page: int, nbytes: int = 512, offset: int = 0, keep_event: bool = False) -> bytes:
        """A log page, read to its end."""
        number = nbytes // 4 - 1
        cdw = (page | keep_event << 15 | (number & 0xFFFF) << 16, number >> 16, offset)
        assert self.admin(Admin.GET_LOG_PAGE, DATA, 0xFFFFFFFF, cdw).status == 0
        return self.got(nbytes)


def words(cdw: Iterable[int]) -> tuple[int, int, int, int, int, int]:
    """Six words; those that are not given are 0."""
    a, b, c, d, e, f = (*cdw, 0, 0, 0, 0, 0, 0)[:6]
    return a, b, c, d, e, f


def code(status: int) -> int:
    """Type and code of a status, without its flags."""
    return status & 0x7FF


def io_entry(
    opcode: int,
    lba: int = 0,
    blocks: int = 1,
    prp1: int = DATA,
    prp2: int = 0,
    nsid: int = 1,
    flags: int = 0,
    fua: int = 0,
) -> Entry:
    """An entry of the NVM command set."""
    cdw = (lba & 0xFFFFFFFF, lba >> 32, (blocks - 1) | fua << 30, 0, 0, 0)
    return Entry(opcode, flags, nsid=nsid, data=pointers(prp1, prp2), cdw=cdw)


def ready(
    figures: NvmeFigures | None = None,
    namespaces: int = 1,
    media: Firmware | None = None,
    capacity: int = MIB,
    lba_nbytes: int = 512,
    unit_nbytes: int | None = None,
) -> Bus:
    """A bus with one pair of queues for input and output."""
    return Bus(figures, namespaces, media, capacity, lba_nbytes, unit_nbytes).enable().with_queue()


READ, WRITE, FLUSH = Io.READ, Io.WRITE, Io.FLUSH
