"""io_uring by raw system calls: a ring of submissions, a ring of completions, and an engine on top of them.

The kernel and the process share two rings (io_uring(7)). The driver writes 64-byte submission entries, moves the tail,
and enters the kernel, which takes them and answers with 16-byte completion entries. Entries are packed with `struct`,
3 µs per transfer in all: completions come back a few at a time, and NumPy records cost 60 µs per batch.

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
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

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

SUBMISSION = struct.Struct("=BBHiQQIIQ24x")
"""opcode, flags, ioprio, fd, offset, address, nbytes, op_flags, user_data."""
COMPLETION = struct.Struct("=QiI")
"""user_data, result, flags."""
SETUP = struct.Struct("=7I3I10I10I")
"""sq_entries, cq_entries, flags, cpu, idle, features, wq_fd, 3 reserved; then the offsets of the two rings, each as
head, tail, mask, entries, flags, dropped, array (the second: overflow, completions, flags), 3 reserved."""
EXTENDED_WAIT = struct.Struct("=QIIQqq")
"""sigmask, its size, padding, address of the timeout; then the timeout in seconds and ns."""
assert (SUBMISSION.size, COMPLETION.size, SETUP.size, EXTENDED_WAIT.size) == (64, 16, 120, 40)

FSYNC, ASYNC_CANCEL, READ, WRITE = 3, 14, 22, 23
DATASYNC = 1
SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13
GETEVENTS, EXT_ARG = 1 << 0, 1 << 3
FEATURE_SINGLE_MMAP, FEATURE_EXT_ARG = 1 << 0, 1 << 8
RINGS_OFFSET, ENTRIES_OFFSET = 0, 0x10000000


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
            self.entries, self._cq_entries = params[0], params[1]
            sq, cq = params[10:20], params[20:30]
            nbytes = max(sq[6] + 4 * self.entries, cq[5] + COMPLETION.size * self._cq_entries)
            maps.append(system.mmap(self._fd, nbytes, RINGS_OFFSET))
            maps.append(system.mmap(self._fd, SUBMISSION.size * self.entries, ENTRIES_OFFSET))
        except OSError:
            for mapped in maps:
                mapped.close()
            system.close(self._fd)
            raise
        self._rings, self._submissions = maps
        self._words = memoryview(self._rings)[: nbytes // 4 * 4].cast("I")
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (at // 4 for at in (sq[0], sq[1], cq[0], cq[1]))
        self._cq_at = cq[5]
        for i in range(self.entries):
            self._words[sq[6] // 4 + i] = i
        self._wait = bytearray(EXTENDED_WAIT.size)
        self._wait_at = address_of(self._wait)

    def push(
        self, opcode: int, fd: int, offset: int, address: int, nbytes: int, user_data: int, op_flags: int = 0
    ) -> None:
        """Write one submission; there must be room (`entries`, less those pushed and not yet taken by the kernel)."""
        tail = self._words[self._sq_tail]
        at = (tail & (self.entries - 1)) * SUBMISSION.size
        SUBMISSION.pack_into(self._submissions, at, opcode, 0, 0, fd, offset, address, nbytes, op_flags, user_data)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def enter(self, wait_for: int, timeout_s: float) -> None:
        """Hand everything pushed to the kernel and wait for `wait_for` completions, at most timeout_s.

        Raises OSError: ETIME (time is up), EINTR, EAGAIN, EBUSY (try again), EBADF and the like.
        """
        EXTENDED_WAIT.pack_into(
            self._wait, 0, 0, 0, 0, self._wait_at + 24, int(timeout_s), int(timeout_s % 1 * 1_000_000_000)
        )
        ready = (self._words[self._sq_tail] - self._words[self._sq_head]) & 0xFFFFFFFF
        self._system.syscall(SYS_IO_URING_ENTER, self._fd, ready, wait_for, GETEVENTS | EXT_ARG, self._wait_at, 24)

    def reap(self) -> list[tuple[int, int]]:
        """Take all completions that are there: (user_data, result) each."""
        words, mask, at = self._words, self._cq_entries - 1, self._cq_at
        head, tail = words[self._cq_head], words[self._cq_tail]
        taken = []
        while head != tail:
            user_data, result, _ = COMPLETION.unpack_from(self._rings, at + (head & mask) * COMPLETION.size)
            taken.append((user_data, result))
            head = (head + 1) & 0xFFFFFFFF
        words[self._cq_head] = head
        return taken

    def withdraw(self) -> list[int]:
        """Take back what was pushed and the kernel has not taken yet: its user_data."""
        head, tail = self._words[self._sq_head], self._words[self._sq_tail]
        back = []
        while head != tail:
            tail = (tail - 1) & 0xFFFFFFFF
            entry = SUBMISSION.unpack_from(self._submissions, (tail & (self.entries - 1)) * SUBMISSION.size)
            back.append(entry[8])
        self._words[self._sq_tail] = tail
        return back

    def close(self) -> None:
        """Close the ring and unmap it (a mapping holds a descriptor of its own)."""
        with suppress(OSError):  # nothing is in flight, so nothing can be lost
            self._system.close(self._fd)
        self._words.release()
        self._rings.close()
        self._submissions.close()


def _setup(system: System, entries: int) -> tuple[int, tuple[int, ...]]:
    for flags in (SINGLE_ISSUER | DEFER_TASKRUN, 0):
        if flags == 0 and platform.machine() not in ("x86_64", "AMD64"):
            break
        buffer = bytearray(SETUP.size)
        SETUP.pack_into(buffer, 0, 0, 0, flags, *(0,) * 27)
        try:
            fd = system.syscall(SYS_IO_URING_SETUP, entries, address_of(buffer))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return fd, SETUP.unpack(buffer)
    raise OSError(errno.EOPNOTSUPP, "this machine needs Linux 6.1 to use io_uring without memory barriers")


_AGAIN = (0, errno.EINTR, errno.EAGAIN, errno.EBUSY)
"""Answers of io_uring_enter after which it is simply entered again."""

_BOUNCE_SLOTS = 16
"""Transfers in flight through the bounce buffer: 16 × 512 KiB = 8 MiB per queue, made when first needed."""

_ABANDONED: list[UringEngine] = []
"""Engines with transfers that the kernel did not give back: their memory is kept until the process ends."""


@dataclass(slots=True)
class _Flight:
    """A piece in flight: what the kernel is asked for next, and `host`, `whole`: the caller's address and size."""

    offset: int
    address: int
    left: int
    host: int
    whole: int
    tries: int = 0


class UringEngine:
    """Keeps up to `depth` pieces in flight; each has a slot until all of it is moved."""

    def __init__(self, target: Target, depth: int) -> None:
        """Raises OSError if there is no ring or it cannot read, DeviceError or Stuck if the medium fails a read."""
        self.counts = Counts()
        self._target = target
        self._ring = Ring(target.system, depth)
        self._depth = min(depth, self._ring.entries)
        self._bounce: mmap.mmap | None = None
        self._bounce_at = 0
        self._flying: dict[int, _Flight] = {}
        try:
            self._self_test()
        except (OSError, DeviceError):
            self._ring.close()
            raise

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        target, flying = self._target, self._flying
        op, opcode = ("write", WRITE) if write else ("read", READ)
        bounced = bool((pieces[:, 1] % target.memory_grid).any())
        if bounced and self._bounce is None:
            self._bounce = room(target, _BOUNCE_SLOTS * LARGEST_TRANSFER)
            self._bounce_at = address_of(self._bounce)
        depth = 1 if ordered else min(self._depth, _BOUNCE_SLOTS) if bounced else self._depth
        free = list(range(depth))
        waiting = deque(pieces.tolist())
        again: list[tuple[int, _Flight]] = []
        failed: DeviceError | None = None
        while True:
            if failed is None and target.stop.is_set():
                failed = stopped(target, op)
            if failed is None:
                while free and waiting:
                    slot = free.pop()
                    again.append((slot, self._take_off(slot, waiting.popleft(), bounced, write)))
                for slot, flight in again:
                    flying[slot] = flight
                    self._ring.push(opcode, target.fd, flight.offset, flight.address, flight.left, slot)
            again.clear()
            if not flying:
                break
            for slot, flight, result in self._wait(op, len(flying) // 4 or 1):
                if result == flight.left:
                    self._land(slot, flight, bounced, write)
                    free.append(slot)
                    continue
                error = self._continue(flight, result, op)
                if error is None:
                    again.append((slot, flight))
                else:
                    failed = failed or error
            if again and not flying and failed is None:
                back_off(target, max(flight.tries for _, flight in again))
        if failed is not None:
            raise failed

    def sync(self) -> None:
        for tries in range(1, self._target.retries + 2):
            self._flying[0] = _Flight(0, 0, 0, 0, 0)
            self._ring.push(FSYNC, self._target.fd, 0, 0, 0, 0, op_flags=DATASYNC)
            ((_, _, result),) = self._wait("flush", 1)
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

    def _take_off(self, slot: int, piece: list[int], bounced: bool, write: bool) -> _Flight:
        offset, host, nbytes = piece
        if not bounced:
            return _Flight(offset, host, nbytes, host, nbytes)
        address = self._bounce_at + slot * LARGEST_TRANSFER
        if write:
            ctypes.memmove(address, host, nbytes)
        return _Flight(offset, address, nbytes, host, nbytes)

    def _land(self, slot: int, flight: _Flight, bounced: bool, write: bool) -> None:
        self._count(write, flight.left)
        if bounced:
            self.counts.bounced_nbytes += flight.whole
            if not write:
                ctypes.memmove(flight.host, self._bounce_at + slot * LARGEST_TRANSFER, flight.whole)

    def _count(self, write: bool, nbytes: int) -> None:
        counts = self.counts
        counts.transfers += 1
        if write:
            counts.written_nbytes += nbytes
        else:
            counts.read_nbytes += nbytes

    def _continue(self, flight: _Flight, result: int, op: str) -> DeviceError | None:
        """A transfer that failed or stopped short: set it up for what is left, or say why not."""
        target, offset, left = self._target, flight.offset, flight.left
        if result > left:
            return ProtocolError(target.device, op, f"{result} bytes moved where {left} were asked for")
        if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
            return lost(target, op, -result, offset, left)
        if result == 0:
            return ran_dry(target, op, offset, left)
        step = 0
        if result > 0:
            self._count(op == "write", result)
            self.counts.resumed += 1
            step = result // target.grid * target.grid
        else:
            self.counts.retried += 1
        flight.tries = 0 if step else flight.tries + 1
        if flight.tries > target.retries:
            return ran_dry(target, op, offset, left) if result > 0 else lost(target, op, -result, offset, left)
        flight.offset, flight.address, flight.left = offset + step, flight.address + step, left - step
        return None

    def _wait(self, op: str, wait_for: int) -> list[tuple[int, _Flight, int]]:
        """Enter until at least one transfer has come back: (slot, flight, result). Raises Timeout or Stuck."""
        tries = 0
        while True:
            number = 0
            try:
                self._ring.enter(wait_for, self._target.deadline_s)
            except OSError as error:
                number = error.errno or 0
            back = self._reap()
            if back:
                return back
            tries += 1
            if number not in _AGAIN or tries > self._target.retries:
                self._give_up(op, number)
            self.counts.retried += 1
            back_off(self._target, tries)

    def _reap(self) -> list[tuple[int, _Flight, int]]:
        back = []
        for user_data, result in self._ring.reap():
            flight = self._flying.pop(user_data, None)
            if flight is not None:  # None: the completion of a cancellation
                back.append((user_data, flight, result))
        return back

    def _give_up(self, op: str, number: int) -> NoReturn:
        """Nothing came back: take the transfers out of the kernel's hands, then raise; Stuck if it does not let go."""
        target, count = self._target, len(self._flying)
        self.counts.timeouts += 1
        for slot in self._ring.withdraw():
            self._flying.pop(slot, None)
        for slot in self._flying:
            self._ring.push(ASYNC_CANCEL, -1, 0, slot, 0, self._depth + slot)
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
