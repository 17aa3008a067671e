"""NVMe passthrough: how pieces become commands to a namespace, in a ring's wide entries or through ioctl.

There is no file system, no block layer and no page cache in between: a transfer is one Read or Write command, all of
it or none. What must hold beyond what engines.py says:

- A status is judged, not only counted: what passes (a namespace that is not ready, an aborted command) is tried again
  unless the drive forbids it; a media error names the block, from the drive's error log or by reading again.
- A flush is the drive's own Flush, and nothing at all where the drive says that it has no volatile write cache.
- A path that fails, and a drive whose controllers are dead or not there any more, are Gone. While none of them is live
  the kernel answers EINVAL (a ring) or EAGAIN (ioctl) under multipath, and a command is tried again.
- Every command has the kernel's own timeout, after which it resets the controller; the engine's deadline only says how
  long somebody waits.
"""

from __future__ import annotations

import errno
import mmap
import struct
from collections.abc import Callable
from functools import partial

from tierloop.devices.drivers.deadlines import Stuck, within
from tierloop.devices.drivers.engines import (
    LARGEST_TRANSFER,
    UNCLEAR,
    Counts,
    Namespace,
    Target,
    back_off,
    controller_state,
    departed,
    host_bytes,
    left_behind,
    room,
    stopped,
)
from tierloop.devices.drivers.medium import patiently
from tierloop.devices.drivers.nvme_commands import (
    FLUSH,
    LOG_ERRORS,
    PAYLOAD,
    READ,
    URING_IO,
    WRITE,
    NvmeCommand,
    get_log,
    issue,
    on_blocks,
)
from tierloop.devices.drivers.nvme_status import error_of, gave_up, is_media, passes
from tierloop.devices.drivers.pieces import Pieces
from tierloop.devices.drivers.ring import Ring
from tierloop.devices.drivers.uring import Flight
from tierloop.devices.errors import Busy, DeviceError, Gone, NoPermission, Timeout
from tierloop.devices.regions import Region
from tierloop.devices.system import address_of, from_os
from tierloop.devices.threads import NoThread

_MOST_CANCELLED = 3
"""Tries of a command that the kernel gave up: each may have taken its whole timeout, 30 s unless it was set."""
_ERROR_ENTRY = struct.Struct("<QHHHHQI36x")
"""One entry of the error log: count, queue, command, status, parameter, block, namespace."""
_ERROR_ENTRIES = 16
_SEARCH_S = 2.0
"""How long to look for the block that failed: a drive may try for seconds before it gives one up."""
PERMISSION_HINT = (
    "NVMe passthrough needs read and write permission on the node (a udev rule or the disk's group) and, for commands "
    "that the kernel does not pass for everybody, CAP_SYS_ADMIN"
)


class Judge:
    """What the kernel's answers to commands of one namespace mean."""

    def __init__(self, target: Target, namespace: Namespace) -> None:
        self._target = target
        self._namespace = namespace

    def refusal(self, op: str, result: int, offset: int, nbytes: int, tries: int = 0) -> tuple[DeviceError, bool]:
        """The error that a result stands for (a status, or minus an errno), and whether to try once more."""
        if result < 0:
            return self.unheard(op, -result, f"{nbytes} bytes at offset {offset} of the medium", tries)
        target, shift = self._target, self._namespace.shift
        first, last = offset >> shift, (offset + nbytes - 1) >> shift
        where = f"blocks {first} to {last}" if last > first else f"block {first}"
        if is_media(result):
            bad = first if first == last else self._failed_block(op, result, first, last)
            if bad is not None:
                where = f"LBA {bad}" + (f" (of {where})" if last > first else "")
            else:
                where = f"one LBA of {where}"
        return error_of(target.device, op, result, where), _again(result, tries)

    def unsynced(self, result: int, tries: int = 0) -> tuple[DeviceError, bool]:
        """The same for a flush."""
        detail = "writes since the last good flush may be lost, write them again"
        if result < 0:
            return self.unheard("flush", -result, detail, tries)
        return error_of(self._target.device, "flush", result, detail), _again(result, tries)

    def unheard(self, op: str, number: int, detail: str, tries: int = 0) -> tuple[DeviceError, bool]:
        """The error for a command that the drive never answered, and whether to try once more."""
        target = self._target
        if number in UNCLEAR and (why := departed(target)):
            return Gone(target.device, op, f"{detail}: {why}", number), False
        if number == errno.EINVAL and target.controllers:
            states = [controller_state(target.system, each) for each in target.controllers]
            if "live" not in states:
                return Busy(target.device, op, f"{detail}: {target.controllers[0]} is {states[0]}", number), True
            # a controller may have come back between the answer and this look
            return from_os(target.device, op, OSError(number, ""), detail), tries < _MOST_CANCELLED
        if number == errno.EINTR:
            detail = f"{detail}: the kernel gave the command up: its time was over, or the controller was reset"
            return Timeout(target.device, op, detail, number), tries < _MOST_CANCELLED
        made = from_os(target.device, op, OSError(number, ""), detail)
        if isinstance(made, NoPermission):
            made = NoPermission(target.device, op, f"{made.detail}; {PERMISSION_HINT}", number)
        return made, number == errno.EAGAIN

    def _failed_block(self, op: str, status: int, first: int, last: int) -> int | None:
        """The block that failed: by the drive's error log, else for a read by reading again, each half in turn."""
        target, found = self._target, list[int]()
        memory = room(target, max((last - first + 1) << self._namespace.shift, _ERROR_ENTRY.size * _ERROR_ENTRIES))

        def look() -> None:
            found.extend(self._logged(memory, status, first, last))
            if op == "read" and not found:
                found.extend(self._searched(memory, first, last))

        try:
            within(min(target.deadline_s, _SEARCH_S), look)
        except (OSError, NoThread, Stuck):
            return None
        return found[0] if found else None

    def _logged(self, memory: mmap.mmap, status: int, first: int, last: int) -> list[int]:
        """The blocks that fitting entries of the error log name, newest first."""
        nbytes = _ERROR_ENTRY.size * _ERROR_ENTRIES
        try:
            if issue(self._target.system, self._target.fd, get_log(LOG_ERRORS, nbytes, address_of(memory)), admin=True):
                return []
        except OSError:
            return []
        return [
            block
            for _, _, _, said, _, block, nsid in _ERROR_ENTRY.iter_unpack(memory[:nbytes])
            if nsid == self._namespace.nsid and said >> 1 & 0x7FF == status & 0x7FF and first <= block <= last
        ]

    def _searched(self, memory: mmap.mmap, first: int, last: int) -> list[int]:
        """The first block that cannot be read; none if all can now. Raises OSError."""
        target, nsid, shift = self._target, self._namespace.nsid, self._namespace.shift

        def bad(start: int, end: int) -> bool:
            blocks = end - start + 1
            command = on_blocks(READ, nsid, start, blocks, address_of(memory), blocks << shift)
            return is_media(issue(target.system, target.fd, command))

        while first < last:
            middle = (first + last) // 2
            first, last = (first, middle) if bad(first, middle) else (middle + 1, last)
        return [first] if bad(first, first) else []


class CommandEntries(Judge):
    """Commands in a wide ring; a result is the status, and 0 says that everything was moved."""

    wide = True
    counts_bytes = False

    def transfer(self, ring: Ring, write: bool, flight: Flight, slot: int, buffer: int) -> None:
        """Push one Read or Write; passthrough registers nothing."""
        nsid, shift = self._namespace.nsid, self._namespace.shift
        first, blocks = flight.offset >> shift, flight.left >> shift
        payload = PAYLOAD.pack(
            *(WRITE if write else READ, 0, 0, nsid, 0, 0, 0, flight.address, 0, flight.left),
            *(first & 0xFFFFFFFF, first >> 32, blocks - 1, 0, 0, 0, 0, 0),
        )
        ring.push_request(self._target.fd, URING_IO, slot, payload)

    def sync(self, ring: Ring) -> bool:
        """Push a Flush, if the drive has anything to flush."""
        if not self._namespace.flushes:
            return False
        ring.push_request(
            self._target.fd, URING_IO, 0, PAYLOAD.pack(*NvmeCommand(FLUSH, self._namespace.nsid).fields())
        )
        return True


_Judged = Callable[[int, int], tuple[DeviceError, bool]]
"""(result, tries before) → the error, and whether to try once more."""


class IoctlEngine:
    """Commands through ioctl, one at a time, in a thread that may be left behind (deadlines.py)."""

    def __init__(self, target: Target, namespace: Namespace) -> None:
        self.counts = Counts()
        self._target = target
        self._namespace = namespace
        self._judge = Judge(target, namespace)
        self._bounce = room(target, LARGEST_TRANSFER)

    @property
    def refusals(self) -> list[str]:
        """Nothing is registered for ioctl."""
        return []

    def expect(self, region: Region) -> None:
        """Nothing is registered for ioctl."""

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        left_behind(self._target, self.counts, "write" if write else "read", lambda: self._all(pieces, write))

    def sync(self) -> None:
        if self._namespace.flushes:
            left_behind(self._target, self.counts, "flush", self._flush)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _all(self, pieces: Pieces, write: bool) -> None:
        target, shift, nsid = self._target, self._namespace.shift, self._namespace.nsid
        op, opcode = ("write", WRITE) if write else ("read", READ)
        for offset, host, nbytes in pieces.tolist():
            bounced = host % target.memory_grid != 0
            address = address_of(self._bounce) if bounced else host
            if bounced and write:
                host_bytes(address, nbytes)[:] = host_bytes(host, nbytes)
            command = on_blocks(opcode, nsid, offset >> shift, nbytes >> shift, address, nbytes)
            self._one(op, command, partial(self._judged, op, offset, nbytes))
            self.counts.moved(write, nbytes, target.direct)
            if bounced:
                self.counts.bounced_nbytes += nbytes
                if not write:
                    host_bytes(host, nbytes)[:] = host_bytes(address, nbytes)

    def _judged(self, op: str, offset: int, nbytes: int, result: int, tries: int) -> tuple[DeviceError, bool]:
        return self._judge.refusal(op, result, offset, nbytes, tries)

    def _flush(self) -> None:
        self._one("flush", NvmeCommand(FLUSH, self._namespace.nsid), self._judge.unsynced)

    def _one(self, op: str, command: NvmeCommand, judged: _Judged) -> None:
        target = self._target
        tries = 0
        while True:
            if target.stop.is_set():
                raise stopped(target, op)
            try:
                result = issue(target.system, target.fd, command)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            if not result:
                return
            made, again = judged(result, tries)
            tries += 1
            if not again or tries > target.retries:
                raise made
            self.counts.retried += 1
            back_off(target, tries)


def _again(status: int, tries: int) -> bool:
    return passes(status) and (tries < _MOST_CANCELLED or not gave_up(status))


def tried(
    target: Target, judge: Judge, op: str, command: NvmeCommand, memory: mmap.mmap | None = None, admin: bool = False
) -> int:
    """Issue a command with the target's deadline and tries: 0, or a status that is not worth another try.

    `memory` is what the command's address lies in. Raises NoPermission, Gone and the like if it does not reach the
    drive, Timeout if it does not come back; then `memory` is kept for as long as it is out.
    """
    answer: list[int] = []

    def call(kept: mmap.mmap | None = memory) -> None:
        tries = 0
        while True:
            try:
                result = issue(target.system, target.fd, command, admin)
            except OSError as error:
                made, again = judge.unheard(op, error.errno or errno.EIO, name_of_command(command, admin), tries)
                if not again or tries >= target.retries:
                    raise made from error
            else:
                if not _again(result, tries) or tries >= target.retries:
                    answer.append(result)
                    return
            tries += 1
            back_off(target, tries)

    patiently(target, op, call)
    return answer[0]


def name_of_command(command: NvmeCommand, admin: bool) -> str:
    """What errors call a command."""
    kind = "administrative command" if admin else "command"
    return f"{kind} {command.opcode:02x}h to namespace {command.nsid:#x}"
