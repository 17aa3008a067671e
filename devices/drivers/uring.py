"""The engine that keeps many transfers in flight from one thread, on an io_uring (ring.py).

Each piece has a slot until all of it is moved: what comes back short or with EAGAIN is handed in again before the next
wait. When nothing comes back within the deadline, the transfers are withdrawn or cancelled; if the kernel does not let
go of them, the engine is kept for ever, because its memory may still be written to.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections import deque
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
from tierloop.devices.drivers.ring import ASYNC_CANCEL, DATASYNC, FSYNC, READ, WRITE, Ring
from tierloop.devices.errors import DeviceError, NoPermission, ProtocolError, Timeout, Unsupported
from tierloop.devices.system import address_of, from_os

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
        bounced = bool(np.bitwise_or.reduce(pieces[:, 1]) & (target.memory_grid - 1))
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
