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
from typing import NoReturn

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
from tierloop.devices.errors import DeviceError, NoPermission, ProtocolError, Timeout, Unsupported
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
CANCELLATION = np.uint64(1 << 63)
"""Set in the user_data of a cancellation, so that its own completion is told from a transfer's."""


class Ring:
    """The two rings of one io_uring instance; used by the thread that made it only."""

    def __init__(self, system: System, entries: int) -> None:
        """Raises OSError: ENOSYS (no io_uring), EPERM (disabled), ENOMEM (locked memory), EOPNOTSUPP (too old)."""
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
        user_data: NDArray[np.int64] | NDArray[np.uint64],
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
        self._system.syscall(SYS_IO_URING_ENTER, self._fd, ready, wait_for, flags, int(self._timeout[2]) - 24, 24)

    def reap(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Take all completions that are there: (user_data, results), both of length n."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        n = (tail - head) & 0xFFFFFFFF
        at = np.arange(head, head + n) & (len(self._completions) - 1)
        taken = self._completions[at]
        self._cq_head[0] = tail
        return taken["user_data"], taken["result"]

    def withdraw(self) -> list[int]:
        """Take back what was pushed and the kernel has not taken yet: its user_data."""
        head, tail = int(self._sq_head[0]), int(self._sq_tail[0])
        at = np.arange(head, head + ((tail - head) & 0xFFFFFFFF)) & (self.entries - 1)
        self._sq_tail[0] = head
        return [int(i) for i in self._submissions["user_data"][at]]

    def close(self) -> None:
        """Close the ring and unmap it (a mapping holds a descriptor of its own)."""
        self._system.close(self._fd)
        vars(self).clear()


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


OFFSET, ADDRESS, LEFT, HOST, WHOLE, TRIES = range(6)
"""Columns of a slot: what the kernel is asked for next; the caller's address, bytes in all; tries without progress."""

_AGAIN = (0, errno.EINTR, errno.EAGAIN, errno.EBUSY)
"""Answers of io_uring_enter after which it is simply entered again."""

_ABANDONED: list[UringEngine] = []
"""Engines with transfers that the kernel did not give back: their memory must outlive the process's use of it."""

_BOUNCE_SLOTS = 16
"""Transfers in flight through the bounce buffer: 16 × 512 KiB = 8 MiB per queue, made when first needed."""


class UringEngine:
    """Keeps up to `depth` transfers in flight; every slot carries one piece until all of it is moved."""

    def __init__(self, target: Target, depth: int) -> None:
        """Raises OSError if there is no ring or it cannot read, DeviceError or Stuck if the medium fails a read."""
        self.counts = Counts()
        self._target = target
        self._ring = Ring(target.system, depth)
        self._depth = min(depth, self._ring.entries)
        self._bounce: mmap.mmap | None = None
        self._bounce_at = 0
        self._slots = np.zeros((self._depth, 6), dtype=np.int64)
        self._flying: set[int] = set()
        try:
            self._self_test()
        except (OSError, DeviceError):
            self._ring.close()
            raise

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        target = self._target
        op, opcode = ("write", WRITE) if write else ("read", READ)
        bounced = bool((pieces[:, 1] % target.memory_grid).any())
        if bounced and self._bounce is None:
            self._bounce = room(target, _BOUNCE_SLOTS * LARGEST_TRANSFER)
            self._bounce_at = address_of(self._bounce)
        depth = 1 if ordered else min(self._depth, _BOUNCE_SLOTS) if bounced else self._depth
        free, again = list(range(depth)), list[int]()
        taken = 0
        failed: DeviceError | None = None
        while True:
            if failed is None and target.stop.is_set():
                failed = stopped(target, op)
            if failed is None and free and taken < len(pieces):
                mine = np.array(free[: len(pieces) - taken])
                del free[: len(mine)]
                self._fill(mine, pieces[taken : taken + len(mine)], bounced, write)
                taken += len(mine)
                self._push(opcode, mine)
            if failed is None and again:
                self._push(opcode, np.array(again))
            again.clear()
            if not self._flying:
                break
            ids, results = self._wait(op, max(1, len(self._flying) // 4))
            whole = results == self._slots[ids, LEFT]
            good = ids[whole]
            if len(good):
                self._done(good, bounced, write)
                free.extend(good.tolist())
            for slot, result in zip(ids[~whole].tolist(), results[~whole].tolist(), strict=True):
                error = self._continue(slot, result, op)
                if error is None:
                    again.append(slot)
                else:
                    failed = failed or error
            if again and not self._flying and failed is None:
                back_off(target, int(self._slots[again, TRIES].max()))
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
        self._block = self._target.system.mmap(-1, max(self._target.grid, mmap.PAGESIZE))
        piece = np.array([[0, address_of(self._block), self._target.grid]], dtype=np.int64)
        try:
            self.transfer(piece, write=False)
        except (ProtocolError, Unsupported, NoPermission) as error:
            raise OSError(error.errno or errno.EOPNOTSUPP, f"a first read failed: {error.detail}") from error
        self.counts = Counts()

    def _fill(self, ids: NDArray[np.int64], pieces: Pieces, bounced: bool, write: bool) -> None:
        slots = self._slots
        slots[ids] = pieces[:, (0, 1, 2, 1, 2, 0)]
        slots[ids, TRIES] = 0
        if bounced:
            slots[ids, ADDRESS] = self._bounce_at + ids * LARGEST_TRANSFER
            if write:
                for _, bounce, _, host, nbytes, _ in slots[ids].tolist():
                    ctypes.memmove(bounce, host, nbytes)

    def _done(self, ids: NDArray[np.int64], bounced: bool, write: bool) -> None:
        self._count(write, len(ids), int(self._slots[ids, LEFT].sum()))
        if bounced:
            self.counts.bounced_nbytes += int(self._slots[ids, WHOLE].sum())
            if not write:
                for slot, (_, _, _, host, nbytes, _) in zip(ids.tolist(), self._slots[ids].tolist(), strict=True):
                    ctypes.memmove(host, self._bounce_at + slot * LARGEST_TRANSFER, nbytes)

    def _count(self, write: bool, transfers: int, nbytes: int) -> None:
        self.counts.transfers += transfers
        if write:
            self.counts.written_nbytes += nbytes
        else:
            self.counts.read_nbytes += nbytes

    def _push(self, opcode: int, ids: NDArray[np.int64]) -> None:
        rows = self._slots[ids]
        self._ring.push(opcode, self._target.fd, rows[:, OFFSET], rows[:, ADDRESS], rows[:, LEFT], ids)
        self._flying.update(ids.tolist())

    def _continue(self, slot: int, result: int, op: str) -> DeviceError | None:
        """A transfer that failed or stopped short: set its slot up for what is left, or say why not."""
        target, row = self._target, self._slots[slot]
        offset, left = int(row[OFFSET]), int(row[LEFT])
        if result > left:
            return ProtocolError(target.device, op, f"{result} bytes moved where {left} were asked for")
        if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            return lost(target, op, -result, offset, left)
        if result == 0:
            return ran_dry(target, op, offset, left)
        step = max(result, 0) // target.grid * target.grid
        if result > 0:
            self._count(op == "write", 1, result)
            self.counts.resumed += 1
        else:
            self.counts.retried += 1
        row[TRIES] = 0 if step else row[TRIES] + 1
        if row[TRIES] > target.retries:
            return ran_dry(target, op, offset, left) if result > 0 else lost(target, op, -result, offset, left)
        row[OFFSET], row[ADDRESS], row[LEFT] = offset + step, int(row[ADDRESS]) + step, left - step
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
            ids, results = self._reap()
            if len(ids):
                return ids, results
            tries += 1
            if number not in _AGAIN or tries > self._target.retries:
                self._give_up(op, number)
            self.counts.retried += 1
            back_off(self._target, tries)

    def _reap(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        user_data, results = self._ring.reap()
        ours = user_data < CANCELLATION
        ids = user_data[ours].astype(np.int64)
        self._flying.difference_update(ids.tolist())
        return ids, results[ours].astype(np.int64)

    def _give_up(self, op: str, number: int) -> NoReturn:
        """Nothing came back: take the transfers out of the kernel's hands, then raise; Stuck if it does not let go."""
        target, count = self._target, len(self._flying)
        self.counts.timeouts += 1
        self._flying.difference_update(self._ring.withdraw())
        if self._flying:
            ids = np.array(sorted(self._flying), dtype=np.int64)
            self._ring.push(ASYNC_CANCEL, -1, 0, ids, 0, CANCELLATION | ids.astype(np.uint64))
        for _ in range(2 * count):
            if not self._flying:
                break
            try:
                self._ring.enter(1, min(target.deadline_s, 1.0))
            except OSError as error:
                if error.errno not in _AGAIN:
                    break
            self._reap()
        if self._flying:
            _ABANDONED.append(self)
            raise Stuck(f"{op}: {len(self._flying)} of {count} transfers neither came back nor could be cancelled")
        if number in (errno.ETIME, *_AGAIN):
            detail = f"none of {count} transfers came back within {target.deadline_s:g} s"
            raise Timeout(target.device, op, detail, number or errno.ETIME)
        raise from_os(target.device, op, OSError(number, ""), f"io_uring_enter with {count} transfers")


def refusal(system: System, error: OSError) -> str:
    """Why there is no ring, in words that say what would change it."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    if error.errno == errno.ENOSYS:
        advice = "this kernel or container has no io_uring"
    elif error.errno in (errno.EPERM, errno.EACCES):
        disabled = _read(system, "/proc/sys/kernel/io_uring_disabled")
        if disabled in ("1", "2"):
            advice = f"kernel.io_uring_disabled is {disabled}; `sysctl kernel.io_uring_disabled=0` allows it"
        else:
            advice = "a security policy forbids it (often the seccomp filter of a container)"
    elif error.errno == errno.ENOMEM:
        lines = (_read(system, "/proc/self/limits") or "").splitlines()
        limit = next((line.split()[3] for line in lines if line.startswith("Max locked memory")), "unknown")
        advice = f"no memory for the rings; the limit on locked memory is {limit} bytes (`ulimit -l`)"
    else:
        advice = str(error)
    return f"io_uring is refused ({name}): {advice}"


def _read(system: System, path: str) -> str | None:
    try:
        return system.read_text(path)
    except OSError:
        return None
