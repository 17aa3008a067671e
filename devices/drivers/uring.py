"""io_uring by raw system calls: a ring of submissions, a ring of completions, and an engine on top of them.

The kernel and the process share two rings (io_uring(7)). The driver writes 64-byte submission entries, moves the tail,
and enters the kernel, which takes them and answers with 16-byte completion entries {user_data, result, flags}. Entries
are written and read as NumPy records, so a batch costs a few array operations.

Memory order. The submission tail is read by the kernel in our own system call, so program order is enough. With
SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1) completions are also written in our own system call. Older kernels may write
them from another core; then reading the tail before the entries needs the strong load order of x86-64, and elsewhere
the ring is refused.

Every wait carries a timeout (EXT_ARG, Linux 5.11); a kernel without it is refused as well, because a wait that nobody
can end has no place here. liburing is not needed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.engines import (
    LARGEST_TRANSFER,
    Counts,
    Target,
    back_off,
    lost,
    ran_dry,
    room,
    stopped,
    unsynced,
)
from tierloop.devices.drivers.pieces import Pieces
from tierloop.devices.errors import DeviceError, Timeout
from tierloop.devices.system import SYS_IO_URING_ENTER, SYS_IO_URING_SETUP, System, address_of, from_os

SUBMISSION = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "u2"),
        ("fd", "i4"),
        ("offset", "u8"),
        ("address", "u8"),
        ("nbytes", "u4"),
        ("op_flags", "u4"),
        ("user_data", "u8"),
        ("rest", "V24"),
    ]
)
COMPLETION = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])
assert SUBMISSION.itemsize == 64
assert COMPLETION.itemsize == 16

FSYNC, ASYNC_CANCEL, READ, WRITE = 3, 14, 22, 23
DATASYNC = 1
SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13
GETEVENTS, EXT_ARG = 1 << 0, 1 << 3
FEATURE_SINGLE_MMAP, FEATURE_EXT_ARG = 1 << 0, 1 << 8
RINGS_OFFSET, ENTRIES_OFFSET = 0, 0x10000000
CANCELLED_BY_US = 1 << 63
"""user_data of a cancellation, so that its own completion is told from a transfer's."""


class Ring:
    """The two rings of one io_uring instance; used by the thread that made it only."""

    def __init__(self, system: System, entries: int) -> None:
        """Raises OSError: ENOSYS (no io_uring), EPERM (disabled), ENOMEM (locked memory), EOPNOTSUPP (kernel too old)."""
        self._system = system
        self._fd, params = _setup(system, entries)
        maps: list[mmap.mmap] = []
        try:
            if not params[5] & FEATURE_SINGLE_MMAP or not params[5] & FEATURE_EXT_ARG:
                raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring cannot wait with a timeout (Linux 5.11 can)")
            self.entries, cq_entries = int(params[0]), int(params[1])
            sq, cq = params[10:20], params[20:30]
            nbytes = max(int(sq[6]) + 4 * self.entries, int(cq[5]) + COMPLETION.itemsize * cq_entries)
            maps.append(system.mmap(self._fd, nbytes, RINGS_OFFSET))
            maps.append(system.mmap(self._fd, SUBMISSION.itemsize * self.entries, ENTRIES_OFFSET))
        except OSError:
            for mapped in maps:
                mapped.close()
            system.close(self._fd)
            raise
        rings = np.frombuffer(maps[0], dtype=np.uint8)
        self._sq_head, self._sq_tail = _word(rings, sq[0]), _word(rings, sq[1])
        self._cq_head, self._cq_tail = _word(rings, cq[0]), _word(rings, cq[1])
        self._submissions = np.frombuffer(maps[1], dtype=SUBMISSION)
        at = int(cq[5])
        self._completions = rings[at : at + COMPLETION.itemsize * cq_entries].view(COMPLETION)
        order = rings[int(sq[6]) : int(sq[6]) + 4 * self.entries].view(np.uint32)
        order[:] = np.arange(self.entries, dtype=np.uint32)
        self._wait = bytearray(40)
        self._timeout = np.frombuffer(self._wait, dtype=np.int64)
        self._timeout[2] = address_of(self._wait) + 24

    def push(
        self,
        opcode: int,
        fd: int,
        offsets: NDArray[np.int64] | int,
        addresses: NDArray[np.int64] | int,
        sizes: NDArray[np.int64] | int,
        user_data: NDArray[np.int64],
        op_flags: int = 0,
    ) -> None:
        """Write one submission per element of `user_data`; there must be room (`entries` less what is not entered)."""
        n, tail = len(user_data), int(self._sq_tail[0])
        at = np.arange(tail, tail + n) & (self.entries - 1)
        made = np.zeros(n, dtype=SUBMISSION)
        made["opcode"] = opcode
        made["fd"] = fd
        made["offset"] = offsets
        made["address"] = addresses
        made["nbytes"] = sizes
        made["op_flags"] = op_flags
        made["user_data"] = user_data
        self._submissions[at] = made
        self._sq_tail[0] = (tail + n) & 0xFFFFFFFF

    def enter(self, wait_for: int, timeout_s: float) -> None:
        """Hand everything pushed to the kernel and wait for `wait_for` completions, at most timeout_s.

        Raises OSError: ETIME (time is up), EINTR, EAGAIN, EBUSY (try again), EBADF and the like.
        """
        self._timeout[3], self._timeout[4] = int(timeout_s), int(timeout_s % 1 * 1e9)
        ready = (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF
        flags = GETEVENTS | EXT_ARG
        self._system.syscall(
            SYS_IO_URING_ENTER, self._fd, ready, wait_for, flags, int(self._timeout[2]) - 24, 24
        )

    def reap(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Take all completions that are there: (user_data, results), both of length n."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        n = (tail - head) & 0xFFFFFFFF
        at = np.arange(head, head + n) & (len(self._completions) - 1)
        taken = self._completions[at]
        self._cq_head[0] = tail
        return taken["user_data"], taken["result"]

    def close(self) -> None:
        """Close the ring; its mappings go with the last array that looks into them."""
        self._system.close(self._fd)


def _setup(system: System, entries: int) -> tuple[int, NDArray[np.uint32]]:
    buffer = bytearray(120)
    params = np.frombuffer(buffer, dtype=np.uint32)
    params[2] = SINGLE_ISSUER | DEFER_TASKRUN
    try:
        return system.syscall(SYS_IO_URING_SETUP, entries, address_of(buffer)), params
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(errno.EOPNOTSUPP, "Linux 6.1 is needed for io_uring without memory barriers on this machine")
    params[:] = 0
    return system.syscall(SYS_IO_URING_SETUP, entries, address_of(buffer)), params


def _word(rings: NDArray[np.uint8], offset: np.uint32) -> NDArray[np.uint32]:
    return rings[int(offset) : int(offset) + 4].view(np.uint32)


_BOUNCE_SLOTS = 16
"""Transfers in flight through the bounce buffer: 16 × 512 KiB = 8 MiB per queue, made when first needed."""


class UringEngine:
    """Keeps up to `depth` transfers in flight; every slot carries one piece until all of it is moved."""

    def __init__(self, target: Target, depth: int) -> None:
        """Raises OSError if there is no ring, or if reading the medium's first block through it does not work."""
        self.counts = Counts()
        self._target = target
        self._ring = Ring(target.system, depth)
        self._depth = min(depth, self._ring.entries)
        self._bounce: mmap.mmap | None = None
        self._bounce_at = 0
        # per slot: offset, address the kernel uses, bytes left, caller's address, bytes in all, tries without progress
        self._slots = np.zeros((self._depth, 6), dtype=np.int64)
        self._flying: set[int] = set()
        try:
            self._self_test()
        except BaseException:
            self._ring.close()
            raise

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        target, slots = self._target, self._slots
        op, opcode = ("write", WRITE) if write else ("read", READ)
        bounced = bool((pieces[:, 1] % target.memory_grid).any())
        if bounced and self._bounce is None:
            self._bounce = room(target, _BOUNCE_SLOTS * LARGEST_TRANSFER)
            self._bounce_at = address_of(self._bounce)
        depth = 1 if ordered else min(self._depth, _BOUNCE_SLOTS) if bounced else self._depth
        free, again = list(range(depth)), list[int]()
        taken, failed = 0, None
        while True:
            if failed is None and target.stop.is_set():
                failed = stopped(target, op)
            if failed is not None:
                again.clear()
            elif free and taken < len(pieces):
                mine = np.array(free[: len(pieces) - taken])
                del free[: len(mine)]
                batch = pieces[taken : taken + len(mine)]
                taken += len(mine)
                slots[mine] = batch[:, (0, 1, 2, 1, 2, 2)]
                slots[mine, 5] = 0
                if bounced:
                    slots[mine, 1] = self._bounce_at + mine * LARGEST_TRANSFER
                    if write:
                        self._copy(mine, 1, 3)
                self._push(opcode, mine)
            if again:
                self._push(opcode, np.array(again))
                again.clear()
            if not self._flying:
                break
            ids, results = self._wait(op, max(1, len(self._flying) // 4))
            whole = results == slots[ids, 2]
            good = ids[whole]
            if len(good):
                self._count(write, slots[good, 2], bounced)
                if bounced and not write:
                    self._copy(good, 3, 1)
                free.extend(good.tolist())
            for slot, result in zip(ids[~whole].tolist(), results[~whole].tolist(), strict=True):
                error = self._continue(slot, result, op)
                if error is None:
                    again.append(slot)
                else:
                    failed = failed or error
                    free.append(slot)
        if failed is not None:
            raise failed

    def sync(self) -> None:
        for tries in range(1, self._target.retries + 2):
            self._ring.push(FSYNC, self._target.fd, 0, 0, 0, np.zeros(1, np.int64), op_flags=DATASYNC)
            self._flying.add(0)
            _, results = self._wait("flush", 1)
            result = int(results[0])
            if result >= 0:
                return
            if -result not in (errno.EAGAIN, errno.EINTR):
                raise unsynced(self._target, -result)
            self.counts.retried += 1
            back_off(self._target, tries)
        raise unsynced(self._target, errno.EAGAIN)

    def close(self) -> None:
        self._ring.close()

    def _self_test(self) -> None:
        """Read the first block through the ring: what it cannot do is known before anything is promised."""
        block = self._target.system.mmap(-1, max(self._target.grid, mmap.PAGESIZE))
        piece = np.array([[0, address_of(block), self._target.grid]], dtype=np.int64)
        try:
            self.transfer(piece, write=False)
        except DeviceError as error:
            raise OSError(error.errno or errno.EIO, f"a read through io_uring failed: {error.detail}") from error
        self.counts = Counts()

    def _push(self, opcode: int, ids: NDArray[np.int64]) -> None:
        rows = self._slots[ids]
        self._ring.push(opcode, self._target.fd, rows[:, 0], rows[:, 1], rows[:, 2], ids)
        self._flying.update(ids.tolist())

    def _copy(self, ids: NDArray[np.int64], to: int, source: int) -> None:
        """Between bounce buffer and caller: columns 1 and 3 of a slot; the whole piece, wherever a short one resumed."""
        for slot in ids.tolist():
            row = self._slots[slot].tolist()
            start = self._bounce_at + slot * LARGEST_TRANSFER
            place = {1: start, 3: row[3]}
            ctypes.memmove(place[to], place[source], row[4])

    def _count(self, write: bool, moved: NDArray[np.int64], bounced: bool) -> None:
        counts, nbytes = self.counts, int(moved.sum())
        counts.transfers += len(moved)
        if write:
            counts.written_nbytes += nbytes
        else:
            counts.read_nbytes += nbytes
        if bounced:
            counts.bounced_nbytes += nbytes

    def _continue(self, slot: int, result: int, op: str) -> DeviceError | None:
        """A transfer that failed or stopped short: set its slot up for what is left, or say why not."""
        target, row = self._target, self._slots[slot]
        offset, left = int(row[0]), int(row[2])
        if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            return lost(target, op, -result, offset, left)
        step = max(result, 0) // target.grid * target.grid
        if result >= 0:
            self._count(op == "write", np.array([result]), False)
            self.counts.resumed += 1
        else:
            self.counts.retried += 1
        row[5] = 0 if step else row[5] + 1
        if result > left or result == 0 or (result > 0 and row[5] > target.retries):
            return ran_dry(target, op, offset, left)
        if row[5] > target.retries:
            return lost(target, op, -result, offset, left)
        row[0], row[1], row[2] = offset + step, int(row[1]) + step, left - step
        if not step and not self._flying:
            back_off(target, int(row[5]))
        return None

    def _wait(self, op: str, wait_for: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Enter until at least one transfer has come back: (slots, results). Raises Timeout or Stuck."""
        tries = 0
        while True:
            number = 0
            try:
                self._ring.enter(wait_for, self._target.deadline_s)
            except OSError as error:
                number = error.errno or 0
            ids, results = self._ring.reap()
            if len(ids):
                self._flying.difference_update(ids.tolist())
                return ids.astype(np.int64), results.astype(np.int64)
            if number in (errno.EINTR, errno.EAGAIN, errno.EBUSY, 0):
                tries += 1
                self.counts.retried += 1
                if tries <= self._target.retries:
                    back_off(self._target, tries)
                    continue
            self._give_up(op, number)

    def _give_up(self, op: str, number: int) -> None:
        """Nothing came back: take the transfers out of the kernel's hands, then raise; Stuck if it does not let go."""
        self.counts.timeouts += 1
        count, seconds = len(self._flying), self._target.deadline_s
        ids = np.array(sorted(self._flying), dtype=np.int64)
        self._ring.push(ASYNC_CANCEL, -1, 0, ids, 0, np.full(len(ids), CANCELLED_BY_US, dtype=np.uint64).view(np.int64))
        for _ in range(4 * len(ids)):
            try:
                self._ring.enter(1, min(seconds, 1.0))
            except OSError as error:
                if error.errno != errno.EINTR:
                    break
            back, _ = self._ring.reap()
            self._flying.difference_update(int(i) for i in back if not int(i) & CANCELLED_BY_US)
            if not self._flying:
                break
        if self._flying:
            raise Stuck(f"{len(self._flying)} transfers did not come back within {seconds:g} s and cannot be cancelled")
        if number not in (0, errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise from_os(self._target.device, op, OSError(number, ""), f"io_uring_enter with {count} transfers")
        raise Timeout(self._target.device, op, f"none of {count} transfers came back within {seconds:g} s", errno.ETIME)
