"""An NVMe 2.0 controller as its host sees it: registers, doorbells, and queues in host memory.

It has no clock: `advance` tells it the time, and register accesses happen at the time it was told last. A command is
fetched when the host rings the doorbell of its queue and the controller has room for it (`window`); which queue comes
first, the arbitration says. Its data moves when its time on the medium is over (nvme_engine.py), and its completion is
posted after that: an early look at the buffer sees nothing. Commands may end in another order than they were fetched.

A doorbell that does not exist or is rung with a value that cannot be is ignored and reported as an asynchronous event.
A queue in memory that cannot be reached, or a configuration that is not supported, is fatal (CSTS.CFS): nothing moves
until the host resets the controller.

The back door: `poke` and `peek`, `inject_status`, `hold`, `release` and `drop`, `age`, `warn`, `set_temperature`,
`power_off`, `power_on`, `reset`, `remove`, and `history`, what the medium did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_engine import Engine, MediaOperation
from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_health import BAD_DOORBELL_REGISTER, BAD_DOORBELL_VALUE, Health
from tierloop.firmware_models.nvme_identify import PAGE, NvmeFigures
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_queues import SubmissionQueue
from tierloop.firmware_models.nvme_transfers import HostMemory


class NvmeController:
    """See the top of the file."""

    def __init__(self, figures: NvmeFigures, namespaces: Sequence[Namespace], memory: HostMemory) -> None:
        if not namespaces:
            raise ValueError("a controller has at least one namespace")
        self.figures, self.namespaces = figures, tuple(namespaces)
        self.bad_accesses = 0
        defaults: dict[int, int] = {
            Feature.ARBITRATION: 3,
            Feature.TEMPERATURE_THRESHOLD: figures.warning_k,
            Feature.WRITE_CACHE: int(figures.volatile_cache),
            Feature.NUMBER_OF_QUEUES: (figures.io_queues - 1) * 0x10001,
        }
        features = Features(
            defaults, len(self.namespaces), figures.vectors, figures.power_states, figures.volatile_cache
        )
        self._powered = True
        self._removed = self._shut = False
        self._registers = regs.Registers(figures)
        self._engine = Engine(figures, namespaces, memory, features, self._running, self._fatal)

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
        self._engine.advance(now_ns, self._powered)

    @property
    def now_ns(self) -> int:
        """The time that it was told last."""
        return self._engine.now_ns

    @property
    def next_due_ns(self) -> int | None:
        """When something happens next by itself; None if nothing does."""
        return self._engine.next_due_ns

    def interrupts(self) -> frozenset[int]:
        """Vectors whose completion queues hold something, unless they are masked."""
        if self._removed:
            return frozenset()
        vectors = {queue.vector for queue in self._engine.queues.cq.values() if queue.posted and queue.interrupts}
        return frozenset(vector for vector in vectors if vector > 31 or not self._registers.mask >> vector & 1)

    # the back door

    @property
    def health(self) -> Health:
        """The counters, and the error log."""
        return self._engine.health

    @property
    def history(self) -> deque[MediaOperation]:
        """What the media did, the newest 65,536 operations."""
        return self._engine.history

    def peek(self, nsid: int, lba: int, count: int = 1) -> bytes:
        """The bytes of some blocks, as a reader would see them."""
        self._check(nsid, lba, count)
        return self.namespaces[nsid - 1].load(lba, count)

    def poke(self, nsid: int, lba: int, data: bytes) -> None:
        """Put whole blocks on the medium, durably."""
        self._check(nsid, lba, 0)
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
        self._engine.forget_injected()
        for namespace in self.namespaces:
            namespace.heal()

    def inject_status(self, opcode: int, status: int, times: int = 1, admin: bool = False) -> None:
        """The next commands of that opcode end with these 15 bits of status, and do nothing else."""
        if not 0 < status < 1 << 15:
            raise ValueError(f"status {status:#x} is not 1 … 0x7fff")
        self._engine.inject(opcode, status, times, admin)

    def hold(self) -> None:
        """Commands for input and output do not end from now on, until `release`."""
        self._engine.hold()

    def release(self) -> None:
        """What was held ends now."""
        self._engine.release()

    def drop(self, times: int = 1) -> None:
        """The next commands for input and output are carried out, and their completions are lost."""
        self._engine.drop(times)

    def age(self, used_percent: int, spare_percent: int = 100) -> None:
        """The drive is worn at least so far, whatever its media say; a spare below its threshold is a warning."""
        if used_percent < 0 or not 0 <= spare_percent <= 100:
            raise ValueError(f"used {used_percent} %, spare {spare_percent} %: at least 0, and 0 … 100")
        self.health.aged_percent, self.health.aged_spare_percent = used_percent, spare_percent
        self._engine.watch()

    def set_temperature(self, kelvin: int) -> None:
        """The composite temperature; beyond a threshold it is a critical warning."""
        if not 0 <= kelvin <= 0xFFFF:
            raise ValueError(f"{kelvin} K is not 0 … 65535")
        self.health.temperature_k = kelvin
        self._engine.watch()

    def warn(self, warnings: int) -> None:
        """Critical warning bits that hold whatever spare and temperature say; read-only makes writes fail."""
        if not 0 <= warnings <= 0x1F:
            raise ValueError(f"critical warnings {warnings:#x} are not 0 … 0x1f")
        self.health.forced_warnings = warnings
        self._engine.watch()

    def power_off(self, unsafe: bool = True) -> None:
        """Lose power; with `unsafe` at once, otherwise after an orderly shutdown. Without power nothing happens.

        What the cache holds is lost unless a shutdown was completed.
        """
        if not self._powered:
            return
        if not unsafe:
            self._shut_down(flush=True)
        if not self._shut:
            self.health.unsafe_shutdowns += 1
        for namespace in self.namespaces:
            namespace.lose_power()
        self._powered = self._shut = False
        self._registers = regs.Registers(self.figures)
        self._engine.clear()

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
        self._engine.clear()

    def remove(self) -> None:
        """Pull it out: registers read as all ones and nothing happens any more."""
        self._removed = True
        self._engine.clear()

    # states

    def _configure(self, value: int) -> None:
        r = self._registers
        was, r.cc = r.cc, value & 0x00FFFFF1
        self._engine.queues.shifts = (regs.bits(r.cc, 19, 16), regs.bits(r.cc, 23, 20))
        if was & regs.ENABLE and not value & regs.ENABLE:
            self._registers.csts = 0
            self._engine.clear()
        elif value & regs.ENABLE and not was & regs.ENABLE:
            r.csts, self._shut = 0, False
            self._engine.at(self.figures.ready_ns, self._become_ready)
        if regs.bits(value, 15, 14) and not regs.bits(was, 15, 14) and not regs.bits(r.csts, 3, 2):
            r.csts |= regs.SHUTDOWN_OCCURRING << 2
            flush = regs.bits(value, 15, 14) == regs.SHUTDOWN_NORMAL
            self._engine.at(self.figures.shutdown_ns, lambda: self._shut_down(flush))

    def _become_ready(self) -> None:
        r = self._registers
        shift, ams = regs.bits(r.cc, 10, 7), regs.bits(r.cc, 13, 11)
        sq, cq, page = (r.aqa & 0xFFF) + 1, (r.aqa >> 16) + 1, PAGE << shift
        aligned = not r.asq % page and not r.acq % page
        known = regs.bits(r.cc, 6, 4) == 0 and ams <= 1 and shift <= regs.LARGEST_PAGE_SHIFT
        if not known or not aligned or sq < 2 or cq < 2:
            self._fatal()
            return
        queues = self._engine.queues
        queues.page = page
        queues.start(r.asq, sq, r.acq, cq)
        self._engine.start(weighted=ams == 1)
        r.csts |= regs.READY

    def _shut_down(self, flush: bool) -> None:
        if flush:
            for namespace in self.namespaces:
                namespace.flush()
        self._shut = True
        self._registers.csts = self._registers.csts & ~0xC | regs.SHUTDOWN_COMPLETE << 2

    def _fatal(self) -> None:
        self._engine.clear()
        self._registers.csts |= regs.FATAL

    def _running(self) -> bool:
        return self._registers.csts & 0xF == regs.READY and self._powered and not self._removed

    def _ring(self, offset: int, nbytes: int, value: int) -> None:
        """A doorbell."""
        if not self._running():
            return
        number, odd = divmod(offset - regs.DOORBELLS, 4 << self.figures.doorbell_stride)
        queues = self._engine.queues
        queue = (queues.cq if number & 1 else queues.sq).get(number >> 1)
        if nbytes != 4 or odd or queue is None:
            self._engine.report(BAD_DOORBELL_REGISTER)
            return
        ring = (
            self._engine.ring(queue, value) if isinstance(queue, SubmissionQueue) else self._engine.take(queue, value)
        )
        if not ring:
            self._engine.report(BAD_DOORBELL_VALUE)

    def _check(self, nsid: int, lba: int, count: int) -> None:
        if not 1 <= nsid <= len(self.namespaces):
            raise ValueError(f"namespace {nsid} is not 1 … {len(self.namespaces)}")
        blocks = self.namespaces[nsid - 1].blocks
        if lba < 0 or count < 0 or lba + count > blocks:
            raise ValueError(f"blocks [{lba}, {lba + count}) are outside a namespace of {blocks}")
