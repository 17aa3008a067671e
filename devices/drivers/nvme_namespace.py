"""A namespace behind its generic character device, /dev/ngXnY: opened by nvme_claim.py, used through NVMe passthrough.

The same face as `Medium`, made of NVMe commands: `zero` is Write Zeroes where the drive offers it and writes otherwise,
`release` is Dataset Management (deallocate). What must hold: after `zero` the bytes read as zeros, whatever the drive
refused on the way; a refused `release` is no error, because giving back is a wish.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass

from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.engines import Namespace, Target, room
from tierloop.devices.drivers.medium import close_all, from_zeros
from tierloop.devices.drivers.nvme_commands import (
    DATASET,
    DATASET_DEALLOCATE,
    DEALLOCATE,
    MOST_BLOCKS,
    RANGE,
    WRITE_ZEROES,
    NvmeCommand,
    on_blocks,
)
from tierloop.devices.drivers.nvme_drive import Drive
from tierloop.devices.drivers.nvme_identity import Identity
from tierloop.devices.drivers.nvme_status import error_of, refused
from tierloop.devices.drivers.passthrough import IoctlEngine, Judge, tried
from tierloop.devices.errors import DeviceError, NoPermission, Timeout
from tierloop.devices.system import address_of


@dataclass
class NamespaceMedium:
    """An opened, claimed namespace of `capacity` usable bytes; `claims` are the descriptors that keep others out."""

    path: str
    claims: set[int]
    capacity: int
    target: Target
    namespace: Namespace
    drive: Drive
    why: list[str]
    bus_address: str | None = None
    numa_node: int | None = None
    direct: bool = True
    in_flight: int | None = None
    read_only: str = ""

    def __post_init__(self) -> None:
        self._judge = Judge(self.target, self.namespace)
        self._zeroing = self._forms(self.drive.identity)
        self._deallocates = self.drive.identity.deallocate

    def zero(self, offset: int, nbytes: int) -> None:
        """Make the bytes read as zeros: by Write Zeroes, or by writing zeros where the drive refuses that.

        Raises MediaError, OutOfRange (the capacity is exceeded), NoPermission, Gone, Timeout.
        """
        while self._zeroing:
            flags, largest = self._zeroing[0]
            if self._write_zeroes(offset, nbytes, flags, largest):
                return
            self._zeroing.pop(0)
        zeros = room(self.target, min(nbytes, self.target.largest))
        try:
            IoctlEngine(self.target, self.namespace).transfer(from_zeros(zeros, offset, nbytes, len(zeros)), write=True)
        except Stuck as stuck:
            raise Timeout(self.target.device, "alloc", str(stuck), errno.ETIMEDOUT) from stuck

    def release(self, offset: int, nbytes: int) -> None:
        """Tell the drive that the blocks are not needed, where it listens. Raises MediaError, Gone, Timeout."""
        if not self._deallocates:
            return
        shift = self.namespace.shift
        memory = room(self.target, RANGE.size)
        most = 0xFFFFFFFF
        first, left = offset >> shift, nbytes >> shift
        while left:
            blocks = min(left, most)
            RANGE.pack_into(memory, 0, 0, blocks, first)
            words = (0, DATASET_DEALLOCATE, 0, 0, 0, 0)
            command = NvmeCommand(DATASET, self.namespace.nsid, address_of(memory), RANGE.size, words)
            try:
                status = tried(self.target, self._judge, "free", command, memory)
            except NoPermission:
                self._deallocates = False
                return
            if status and refused(status):
                self._deallocates = False
                return
            if status:
                raise error_of(self.target.device, "free", status, f"{nbytes} bytes at offset {offset}")
            first, left = first + blocks, left - blocks

    def give_up_space(self, offset: int, nbytes: int) -> None:
        """Release what a failed `zero` may have taken; the failure that led here is the one to report."""
        with suppress(DeviceError):
            self.release(offset, nbytes)

    def close(self) -> None:
        """Close the node and give up the claims. Raises MediaError and the like if the system reports a loss."""
        close_all(self.target.system, {self.target.fd, *self.claims}, self.target.device)

    def _forms(self, identity: Identity) -> list[tuple[int, int]]:
        """Forms of Write Zeroes to try in turn: (flags, largest in bytes).

        How much one command may zero stands in a table of its own that few drives have, so the most that its count can
        say is tried first, then what a transfer may have. Blocks of a thin namespace are not given back by it, because
        they would have to be found again when they are written.
        """
        if not identity.write_zeroes:
            return []
        most = MOST_BLOCKS << self.namespace.shift
        flags = [0]
        if identity.zeroes_may_deallocate and identity.deallocated_reads_zeros and not identity.thin:
            flags.insert(0, DEALLOCATE)
        return [(flag, size) for flag in flags for size in sorted({most, self.target.largest}, reverse=True)]

    def _write_zeroes(self, offset: int, nbytes: int, flags: int, largest: int) -> bool:
        """Zero in steps; False if the drive refuses this form."""
        shift = self.namespace.shift
        for start in range(offset, offset + nbytes, largest):
            step = min(largest, offset + nbytes - start)
            command = on_blocks(WRITE_ZEROES, self.namespace.nsid, start >> shift, step >> shift)
            low, high, count, *_ = command.words
            command = command._replace(words=(low, high, count | flags, 0, 0, 0))
            try:
                status = tried(self.target, self._judge, "alloc", command)
            except NoPermission:
                return False
            if status and refused(status):
                return False
            if status:
                raise self._judge.refusal("alloc", status, start, step)[0]
        return True
