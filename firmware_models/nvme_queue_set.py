"""The queues of an NVMe controller: which there are, and what may be made and deleted.

A queue lies in one piece, has as many entries as the controller allows at most and two at least, and an identifier
below the number of queues that the host was granted. A submission queue names its completion queue, which stays as long
as one does.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_queues import CompletionQueue, SubmissionQueue
from tierloop.firmware_models.nvme_wire import Entry, Refused, Status

_ENTRY_SHIFT, _COMPLETION_SHIFT = 6, 4
"""What CC.IOSQES and CC.IOCQES have to be: entries of 64 bytes, completions of 16."""


class QueueSet:
    """`sq` and `cq` by identifier; 0 is the admin pair. `shifts` are CC.IOSQES and CC.IOCQES."""

    def __init__(self, figures: NvmeFigures, features: Features) -> None:
        self._figures, self._features = figures, features
        self.sq: dict[int, SubmissionQueue] = {}
        self.cq: dict[int, CompletionQueue] = {}
        self.page = 4096
        self.shifts = (_ENTRY_SHIFT, _COMPLETION_SHIFT)

    @property
    def created(self) -> bool:
        """There are queues for input and output."""
        return len(self.sq) > 1 or len(self.cq) > 1

    def start(self, sq_at: int, sq_entries: int, cq_at: int, cq_entries: int) -> None:
        """The admin pair."""
        self.cq = {0: CompletionQueue(0, cq_at, cq_entries, users={0})}
        self.sq = {0: SubmissionQueue(0, sq_at, sq_entries, 0)}

    def clear(self) -> None:
        """No queue is left."""
        self.sq.clear()
        self.cq.clear()

    def create_cq(self, entry: Entry) -> int:
        """Create I/O Completion Queue. Raises Refused."""
        qid, size, flags = self._new_queue(entry, self.cq, submission=False)
        vector = entry.cdw[1] >> 16
        if vector >= self._figures.vectors:
            raise Refused(Status.INTERRUPT_VECTOR_INVALID, byte=46)
        self.cq[qid] = CompletionQueue(qid, entry.prp1, size, vector, bool(flags & 2))
        return 0

    def create_sq(self, entry: Entry) -> int:
        """Create I/O Submission Queue. Raises Refused."""
        qid, size, flags = self._new_queue(entry, self.sq, submission=True)
        cqid = entry.cdw[1] >> 16
        if not 1 <= cqid <= self._granted(submission=False):
            raise Refused(Status.QUEUE_ID_INVALID, byte=46)
        if cqid not in self.cq:
            raise Refused(Status.COMPLETION_QUEUE_INVALID, byte=46)
        self.sq[qid] = SubmissionQueue(qid, entry.prp1, size, cqid, flags >> 1 & 3)
        self.cq[cqid].users.add(qid)
        return 0

    def _new_queue(self, entry: Entry, queues: Mapping[int, object], submission: bool) -> tuple[int, int, int]:
        """Identifier, size and flags of a queue to create, checked."""
        qid, size, flags = entry.cdw[0] & 0xFFFF, (entry.cdw[0] >> 16) + 1, entry.cdw[1] & 0xFFFF
        if not 1 <= qid <= self._granted(submission) or qid in queues:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        good = self.shifts[0] == _ENTRY_SHIFT if submission else self.shifts[1] == _COMPLETION_SHIFT
        if not 2 <= size <= self._figures.queue_entries or not good:
            raise Refused(Status.QUEUE_SIZE_INVALID, byte=42)
        if not flags & 1:
            raise Refused(Status.INVALID_FIELD, byte=44)
        if entry.prp1 % self.page:
            raise Refused(Status.PRP_OFFSET_INVALID, byte=24)
        return qid, size, flags

    def _granted(self, submission: bool) -> int:
        word = self._features.value(Feature.NUMBER_OF_QUEUES)
        return (word & 0xFFFF if submission else word >> 16) + 1

    def delete_cq(self, entry: Entry) -> int:
        """Delete I/O Completion Queue. Raises Refused."""
        qid = entry.cdw[0] & 0xFFFF
        if not qid or qid not in self.cq:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        if self.cq[qid].users:
            raise Refused(Status.QUEUE_DELETION_INVALID, byte=40)
        del self.cq[qid]
        return 0

    def to_delete(self, entry: Entry) -> int:
        """Delete I/O Submission Queue: which one. Raises Refused."""
        qid = entry.cdw[0] & 0xFFFF
        if not qid or qid not in self.sq:
            raise Refused(Status.QUEUE_ID_INVALID, byte=40)
        return qid

    def remove(self, qid: int) -> None:
        """A submission queue is gone."""
        queue = self.sq.pop(qid)
        self.cq[queue.cqid].users.discard(qid)
