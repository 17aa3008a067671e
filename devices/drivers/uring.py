"""The engine that keeps many transfers in flight from one thread, on an io_uring (ring.py).

What differs between files and NVMe passthrough stands in `Entries`: `FileEntries` here, `passthrough.CommandEntries`.

Each piece has a slot until all of it is moved: what comes back short or with EAGAIN is handed in again before the next
wait. When nothing comes back within the deadline, the transfers are withdrawn or cancelled; if the kernel does not let
go of them, the engine is kept for ever, because its memory may still be written to.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from tierloop.devices.clocks import WallClock
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
from tierloop.devices.drivers.registered import Registrations
from tierloop.devices.drivers.ring import (
    ASYNC_CANCEL,
    DATASYNC,
    FSYNC,
    READ,
    READ_FIXED,
    WRITE,
    WRITE_FIXED,
    Ring,
)
from tierloop.devices.errors import DeviceError, NoPermission, ProtocolError, Timeout, Unsupported
from tierloop.devices.regions import Region
from tierloop.devices.system import address_of, from_os

_AGAIN = (0, errno.EINTR, errno.EAGAIN, errno.EBUSY)
"""Answers of io_uring_enter after which it is simply entered again."""

_BOUNCE_SLOTS = 16
"""Transfers in flight through the bounce buffer: 16 × 512 KiB = 8 MiB per queue, made when first needed."""

_ABANDONED: list[UringEngine] = []
"""Engines with transfers that the kernel did not give back: their memory is kept until the process ends."""

_NO_BUFFER = -1

_LEAST_S = 1e-6
"""A rest of a deadline that is shorter is over."""


@dataclass(slots=True)
class Flight:
    """A piece in flight: what the kernel is asked for next, and `host`, `whole`: the caller's address and size."""

    offset: int
    address: int
    left: int
    host: int
    whole: int
    tries: int = 0


class Entries(Protocol):
    """How the transfers of one kind of descriptor stand in a ring, and what their results mean.

    `wide`: the ring needs entries of 128 bytes. `counts_bytes`: a result that is not negative is the number of bytes
    moved; otherwise 0 stands for all of them, and any other number is an error.
    """

    wide: bool
    counts_bytes: bool

    def transfer(self, ring: Ring, write: bool, flight: Flight, slot: int, buffer: int) -> None:
        """Push one transfer; `buffer` is the index of the registered buffer that its memory lies in, or negative."""

    def sync(self, ring: Ring) -> bool:
        """Push, as user data 0, what makes finished writes durable; False if nothing is needed for that."""

    def refusal(self, op: str, result: int, offset: int, nbytes: int, tries: int) -> tuple[DeviceError, bool]:
        """The error that a result stands for, and whether the same transfer may be tried again after so many tries."""

    def unsynced(self, result: int, tries: int) -> tuple[DeviceError, bool]:
        """The same for `sync`."""


class FileEntries:
    """Files and block devices: READ and WRITE, FSYNC with DATASYNC."""

    wide = False
    counts_bytes = True

    def __init__(self, target: Target) -> None:
        self._target = target

    def transfer(self, ring: Ring, write: bool, flight: Flight, slot: int, buffer: int) -> None:
        fd, offset, address, left = self._target.fd, flight.offset, flight.address, flight.left
        if buffer < 0:
            ring.push(WRITE if write else READ, fd, offset, address, left, slot)
        else:
            ring.push_fixed(WRITE_FIXED if write else READ_FIXED, fd, offset, address, left, slot, buffer)

    def sync(self, ring: Ring) -> bool:
        ring.push(FSYNC, self._target.fd, 0, 0, 0, 0, op_flags=DATASYNC)
        return True

    def refusal(self, op: str, result: int, offset: int, nbytes: int, tries: int) -> tuple[DeviceError, bool]:
        return lost(self._target, op, -result, offset, nbytes), -result in (errno.EAGAIN, errno.EINTR)

    def unsynced(self, result: int, tries: int) -> tuple[DeviceError, bool]:
        return unsynced(self._target, -result), -result in (errno.EAGAIN, errno.EINTR)


class UringEngine:
    """Keeps up to `depth` pieces in flight; each has a slot until all of it is moved."""

    def __init__(
        self,
        target: Target,
        depth: int,
        entries: Entries | None = None,
        register_nbytes: int = 0,
        registered: Callable[[Region], None] | None = None,
    ) -> None:
        """`register_nbytes` of memory are registered with the ring at most, and `registered` hears of each region.

        Raises OSError if there is no ring or it cannot read, DeviceError or Stuck if the medium fails a read.
        """
        self.counts = Counts()
        self._target = target
        self._entries = entries or FileEntries(target)
        self._ring = Ring(target.system, depth, self._entries.wide)
        self._buffers = Registrations(target, self._ring, register_nbytes, registered) if register_nbytes else None
        self._buffer = _NO_BUFFER
        self._depth = min(depth, self._ring.entries)
        self._bounce: mmap.mmap | None = None
        self._bounce_at = 0
        self._flying: dict[int, Flight] = {}
        self._clock = WallClock()  # deadlines that the kernel is given pass on this one, whatever the site has
        try:
            self._self_test()
        except (OSError, DeviceError):
            self._ring.close()
            raise

    @property
    def refusals(self) -> list[str]:
        """Why memory could not be registered."""
        return self._buffers.refusals if self._buffers else []

    def expect(self, region: Region) -> None:
        if self._buffers is not None:
            self._buffer = self._buffers.of(region)

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        buffer, self._buffer = self._buffer, _NO_BUFFER
        try:
            self._transfer(pieces, write, ordered, buffer)
        finally:
            if self._buffers is not None:
                self.counts.unregistered = self._buffers.refused

    def _transfer(self, pieces: Pieces, write: bool, ordered: bool, buffer: int) -> None:
        target, flying, entries, ring = self._target, self._flying, self._entries, self._ring
        op = "write" if write else "read"
        by_bytes = entries.counts_bytes
        bounced = bool(np.bitwise_or.reduce(pieces[:, 1]) & (target.memory_grid - 1))
        if bounced and self._bounce is None:
            self._bounce = room(target, _BOUNCE_SLOTS * LARGEST_TRANSFER)
            self._bounce_at = address_of(self._bounce)
        if bounced and self._buffers is not None:
            buffer = self._buffers.bounce(self._bounce_at, _BOUNCE_SLOTS * LARGEST_TRANSFER)
        elif buffer >= 0 and np.bitwise_or.reduce(pieces[:, 1]) & (target.grid - 1):
            buffer = _NO_BUFFER  # Linux wants every page's share of registered memory to be whole blocks
        depth = 1 if ordered else min(self._depth, _BOUNCE_SLOTS) if bounced else self._depth
        free = list(range(depth))
        waiting = deque(pieces.tolist())
        again: list[tuple[int, Flight]] = []
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
                    entries.transfer(ring, write, flight, slot, buffer)
            again.clear()
            if not flying:
                break
            for slot, flight, result in self._wait(op, len(flying) // 4 or 1):
                if result == (flight.left if by_bytes else 0):
                    self._land(slot, flight, bounced, write)
                    self.counts.fixed += buffer >= 0
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
            if not self._entries.sync(self._ring):
                return
            self._flying[0] = Flight(0, 0, 0, 0, 0)
            ((_, _, result),) = self._wait("flush", 1)
            if result == 0 or (result > 0 and self._entries.counts_bytes):
                return
            error, again = self._entries.unsynced(result, tries - 1)
            if not again or tries > self._target.retries:
                raise error
            self.counts.retried += 1
            back_off(self._target, tries)

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

    def _take_off(self, slot: int, piece: list[int], bounced: bool, write: bool) -> Flight:
        offset, host, nbytes = piece
        if not bounced:
            return Flight(offset, host, nbytes, host, nbytes)
        address = self._bounce_at + slot * LARGEST_TRANSFER
        if write:
            ctypes.memmove(address, host, nbytes)
        return Flight(offset, address, nbytes, host, nbytes)

    def _land(self, slot: int, flight: Flight, bounced: bool, write: bool) -> None:
        self.counts.moved(write, flight.left, self._target.direct)
        if bounced:
            self.counts.bounced_nbytes += flight.whole
            if not write:
                ctypes.memmove(flight.host, self._bounce_at + slot * LARGEST_TRANSFER, flight.whole)

    def _continue(self, flight: Flight, result: int, op: str) -> DeviceError | None:
        """A transfer that failed or stopped short: set it up for what is left, or say why not."""
        target, offset, left = self._target, flight.offset, flight.left
        if result < 0 or not self._entries.counts_bytes:
            error, again = self._entries.refusal(op, result, offset, left, flight.tries)
            if not again or flight.tries >= target.retries:
                return error
            self.counts.retried += 1
            flight.tries += 1
            return None
        if result > left:
            return ProtocolError(target.device, op, f"{result} bytes moved where {left} were asked for")
        if result == 0:
            return ran_dry(target, op, offset, left)
        self.counts.moved(op == "write", result, target.direct)
        self.counts.resumed += 1
        step = result // target.grid * target.grid
        flight.tries = 0 if step else flight.tries + 1
        if flight.tries > target.retries:
            return ran_dry(target, op, offset, left)
        flight.offset, flight.address, flight.left = offset + step, flight.address + step, left - step
        return None

    def _wait(self, op: str, wait_for: int) -> list[tuple[int, Flight, int]]:
        """Enter until at least one transfer has come back: (slot, flight, result). Raises Timeout or Stuck.

        However often it is entered, the deadline of the whole wait is one.
        """
        tries, began, left_s = 0, self._clock.now(), self._target.deadline_s
        while True:
            number = 0
            try:
                self._ring.enter(wait_for, left_s)
            except OSError as error:
                number = error.errno or 0
            back = self._reap()
            if back:
                return back
            tries += 1
            # a call that has submitted something does not say that its time was up
            left_s = self._target.deadline_s - (self._clock.now() - began) / 1e9
            if number not in _AGAIN or left_s < _LEAST_S or tries > self._target.retries:
                self._give_up(op, number, tries if left_s >= _LEAST_S else 0)
            self.counts.retried += 1
            back_off(self._target, tries)

    def _reap(self) -> list[tuple[int, Flight, int]]:
        back = []
        for user_data, result in self._ring.reap():
            flight = self._flying.pop(user_data, None)
            if flight is not None:  # None: the completion of a cancellation
                back.append((user_data, flight, result))
        return back

    def _give_up(self, op: str, number: int, tries: int) -> NoReturn:
        """Nothing came back: take the transfers out of the kernel's hands, then raise; Stuck if it does not let go.

        `tries` is how often the ring was entered in vain where that, and not the time, was at its end.
        """
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
            if tries and number not in (0, errno.ETIME):
                name = errno.errorcode[number]
                detail = f"none of {count} transfers came back: io_uring_enter was put off {tries} times ({name})"
            raise Timeout(target.device, op, detail, number or errno.ETIME)
        raise from_os(target.device, op, OSError(number, ""), f"io_uring_enter with {count} transfers")
