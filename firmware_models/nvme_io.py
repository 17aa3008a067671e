"""Commands of the NVM command set: checked when they are fetched, carried out when their time on the medium is over.

`begin` either refuses a command or says what the medium has to do and what happens when that is done. Data moves only
then: a host that looks at its buffer before the completion, or changes it, sees or writes the wrong bytes.

Refused beside what the specification demands: fused commands (there are none), reserved bits of the command word, and
directives. Protection information is ignored, since no namespace has any.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierloop.firmware_models.media import MediaWork
from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_health import Health
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_transfers import HostMemory, Piece, gather, scatter, walk
from tierloop.firmware_models.nvme_wire import ALL_NAMESPACES, Entry, Io, Refused, Status

_FUA, _LIMITED_RETRY = 1 << 30, 1 << 31
_DIRECTIVE, _DEALLOCATE = 0xF << 20, 1 << 25
_RANGE = struct.Struct("<IIQ")
_IDLE = MediaWork(0, 1, 0)


class Work(NamedTuple):
    """What a command asks of the medium of namespace `nsid` (0: of none), and what happens at its end.

    `finish` returns the completion's first word, and raises Refused if the command fails after all.
    """

    op: str
    nsid: int
    lba: int
    blocks: int
    media: MediaWork
    finish: Callable[[], int]


class IoCommands:
    """The command set on the namespaces of one controller."""

    def __init__(
        self,
        figures: NvmeFigures,
        namespaces: Sequence[Namespace],
        memory: HostMemory,
        features: Features,
        health: Health,
    ) -> None:
        self._figures, self._namespaces, self._memory = figures, namespaces, memory
        self._features, self._health = features, health
        self._at_ns = 0
        self._begin: dict[int, Callable[[Entry, Namespace, int], Work]] = {
            Io.READ: self._read,
            Io.WRITE: self._write,
            Io.COMPARE: self._compare,
            Io.WRITE_ZEROES: self._write_zeroes,
            Io.WRITE_UNCORRECTABLE: self._write_uncorrectable,
            Io.DATASET_MANAGEMENT: self._dataset,
        }

    def begin(self, entry: Entry, page: int, at_ns: int) -> Work:
        """Check a command that reaches its medium at `at_ns`; `page` is the host's page size. Raises Refused."""
        self._at_ns = at_ns
        if entry.opcode not in self._begin and entry.opcode != Io.FLUSH:
            raise Refused(Status.INVALID_OPCODE, byte=0)
        if entry.flags & 0x3F:
            raise Refused(Status.INVALID_FIELD, byte=1)
        if entry.opcode == Io.FLUSH:
            return self._flush(entry)
        if not 1 <= entry.nsid <= len(self._namespaces):
            raise Refused(Status.INVALID_NAMESPACE, byte=4)
        return self._begin[entry.opcode](entry, self._namespaces[entry.nsid - 1], page)

    # with data

    def _read(self, entry: Entry, ns: Namespace, page: int) -> Work:
        count, pieces = self._data(entry, ns, page, to_host=True)
        media, refusal = self._sense(entry, ns, count)

        def finish() -> int:
            self._refuse(refusal)
            if entry.cdw[2] & _FUA:
                ns.commit(entry.lba, count)
            scatter(self._memory, pieces, ns.load(entry.lba, count))
            self._health.reads += 1
            self._health.read_units += count * (ns.lba_nbytes // 512)
            return 0

        return Work("read", entry.nsid, entry.lba, count, media, finish)

    def _compare(self, entry: Entry, ns: Namespace, page: int) -> Work:
        count, pieces = self._data(entry, ns, page, to_host=False)
        media, refusal = self._sense(entry, ns, count)

        def finish() -> int:
            self._refuse(refusal)
            self._health.reads += 1
            self._health.read_units += count * (ns.lba_nbytes // 512)
            if gather(self._memory, pieces) != ns.load(entry.lba, count):
                raise Refused(Status.COMPARE_FAILURE, lba=entry.lba)
            return 0

        return Work("read", entry.nsid, entry.lba, count, media, finish)

    def _write(self, entry: Entry, ns: Namespace, page: int) -> Work:
        if entry.cdw[2] & _DIRECTIVE:
            raise Refused(Status.INVALID_FIELD, byte=50)
        count, pieces = self._data(entry, ns, page, to_host=False)
        refusal = self._unwritable(entry, ns, count)
        media = ns.work("write", entry.lba, count, self._at_ns)
        if media.fault and refusal is None:
            refusal = Refused(Status.WRITE_FAULT, lba=entry.lba)

        def finish() -> int:
            self._refuse(refusal)
            ns.put(entry.lba, gather(self._memory, pieces), self._durable(entry))
            self._health.writes += 1
            self._health.written_units += count * (ns.lba_nbytes // 512)
            return 0

        return Work("write", entry.nsid, entry.lba, count, media, finish)

    def _dataset(self, entry: Entry, ns: Namespace, page: int) -> Work:
        ranges = (entry.cdw[0] & 0xFF) + 1
        pieces = walk(self._memory, entry, ranges * _RANGE.size, page, to_host=False, sgl=self._figures.sgl)
        raw = gather(self._memory, pieces)
        spans = [(lba, count) for _, count, lba in _RANGE.iter_unpack(raw)]
        for lba, count in spans:
            self._inside(ns, lba, count)
        if not entry.cdw[1] & 4:
            return Work("none", 0, 0, 0, _IDLE, lambda: 0)
        self._refuse(self._locked(spans[0][0], ns))
        at_ns = self._at_ns

        def finish() -> int:
            for lba, count in spans:
                ns.work("trim", lba, count, at_ns)
                ns.deallocate(lba, count, self._durable(entry, fua=False))
            return 0

        return Work("trim", entry.nsid, spans[0][0], sum(count for _, count in spans), _IDLE, finish)

    # without data

    def _flush(self, entry: Entry) -> Work:
        if entry.nsid == ALL_NAMESPACES:
            flushed = list(self._namespaces)
        elif 1 <= entry.nsid <= len(self._namespaces):
            flushed = [self._namespaces[entry.nsid - 1]]
        else:
            raise Refused(Status.INVALID_NAMESPACE, byte=4)
        dirty = any(ns.dirty_blocks for ns in flushed)

        def finish() -> int:
            for ns in flushed:
                ns.flush()
            return 0

        return Work("flush", 0, 0, 0, MediaWork(self._figures.flush_ns if dirty else 0, 1, 0), finish)

    def _write_zeroes(self, entry: Entry, ns: Namespace, page: int) -> Work:
        count = self._count(entry, ns)
        refusal, at_ns = self._unwritable(entry, ns, count), self._at_ns

        def finish() -> int:
            self._refuse(refusal)
            ns.work("trim", entry.lba, count, at_ns)
            clear = ns.deallocate if entry.cdw[2] & _DEALLOCATE else ns.zero
            clear(entry.lba, count, self._durable(entry))
            return 0

        return Work("zero", entry.nsid, entry.lba, count, _IDLE, finish)

    def _write_uncorrectable(self, entry: Entry, ns: Namespace, page: int) -> Work:
        count = self._count(entry, ns)
        self._refuse(self._locked(entry.lba, ns))

        def finish() -> int:
            ns.spoil(entry.lba, count)
            return 0

        return Work("spoil", entry.nsid, entry.lba, count, _IDLE, finish)

    # checks

    def _count(self, entry: Entry, ns: Namespace) -> int:
        count = (entry.cdw[2] & 0xFFFF) + 1
        self._inside(ns, entry.lba, count)
        return count

    def _inside(self, ns: Namespace, lba: int, count: int) -> None:
        if lba + count > ns.blocks:
            raise Refused(Status.LBA_OUT_OF_RANGE, byte=40, lba=lba)

    def _data(self, entry: Entry, ns: Namespace, page: int, to_host: bool) -> tuple[int, list[Piece]]:
        nbytes = ((entry.cdw[2] & 0xFFFF) + 1) * ns.lba_nbytes
        limit = self._figures.largest_transfer or 1 << 40
        if nbytes > limit:
            raise Refused(Status.INVALID_FIELD, byte=48)
        count = self._count(entry, ns)
        return count, walk(self._memory, entry, nbytes, page, to_host, self._figures.sgl)

    def _sense(self, entry: Entry, ns: Namespace, count: int) -> tuple[MediaWork, Refused | None]:
        """Read the medium: what it takes, and why it fails if it does."""
        media = ns.work("read", entry.lba, count, self._at_ns)
        bad = ns.bad_block(entry.lba, count, write=False)
        if bad is not None or media.fault:
            tries = 1 if entry.cdw[2] & _LIMITED_RETRY else self._figures.recovery
            media = media._replace(alone_ns=media.alone_ns * tries)
            return media, Refused(Status.UNRECOVERED_READ, lba=entry.lba if bad is None else bad)
        strict = self._features.value(Feature.ERROR_RECOVERY, entry.nsid) >> 16 & 1
        hole = ns.hole(entry.lba, count) if strict else None
        return media, None if hole is None else Refused(Status.DEALLOCATED, lba=hole)

    def _unwritable(self, entry: Entry, ns: Namespace, count: int) -> Refused | None:
        bad = ns.bad_block(entry.lba, count, write=True)
        return self._locked(entry.lba, ns) if bad is None else Refused(Status.WRITE_FAULT, lba=bad)

    def _locked(self, lba: int, ns: Namespace) -> Refused | None:
        """Why nothing of a namespace can be changed, if its medium takes no more writes."""
        return Refused(Status.WRITE_FAULT, lba=lba) if self._health.read_only or ns.worn_out else None

    def _refuse(self, refusal: Refused | None) -> None:
        if refusal is None:
            return
        if refusal.status & 0x7FF == Status.UNRECOVERED_READ:
            self._health.media_errors += 1
        raise refusal

    def _durable(self, entry: Entry, fua: bool = True) -> bool:
        cached = self._figures.volatile_cache and self._features.value(Feature.WRITE_CACHE)
        return not cached or bool(fua and entry.cdw[2] & _FUA)
