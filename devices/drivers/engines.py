"""Engines: how bytes get between a block device and host memory, three ways behind one protocol.

`uring.UringEngine` keeps many transfers in flight from one thread; `PosixEngine`, here, does them one after the other
with pread and pwrite and is what remains where the kernel or a container refuses io_uring; `passthrough.IoctlEngine` is
the same for NVMe commands. What must hold for all:

- `transfer` returns when every byte has been moved, or raises the device error of the first piece that failed after
  everything in flight has come back. A short transfer is continued where it stopped, never taken for a whole one.
- EINTR and EAGAIN are tried again, `retries` times per piece without progress at most, and counted.
- No wait is longer than `deadline_s` without progress. A transfer that does not even come back after that raises
  `Stuck`: the kernel may still write to its memory, so its owner keeps all of it and gives the device up.
- Host addresses off `memory_grid` go through an aligned bounce buffer, and their bytes are counted.
- Setting `stop` makes a running transfer end early with an error.

An engine belongs to one thread, which also makes it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from tierloop.devices.drivers.deadlines import Stuck, within
from tierloop.devices.drivers.failures import threadless
from tierloop.devices.drivers.kernel_texts import text_in
from tierloop.devices.drivers.pieces import Pieces
from tierloop.devices.errors import DeviceError, Gone, ProtocolError
from tierloop.devices.regions import Region
from tierloop.devices.system import System, from_os
from tierloop.devices.threads import NoThread

LARGEST_TRANSFER = 512 * 1024
"""Bytes per transfer. Larger vectored reads were seen to fail with EAGAIN after a part was moved (liburing #766)."""

DEAD = ("dead", "deleting", "deleting (no IO)")
"""States of a controller that nothing leads out of."""
UNCLEAR = (errno.EIO, errno.EINVAL, errno.EAGAIN, errno.EINTR, errno.ENODATA, errno.ENOSPC)
"""Answers that may mean that the drive is gone."""

_BACKOFF_S = (0.0, 0.0, 1e-5, 1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""How long to wait before try 1, 2, …, 10 and later ones, where nothing else is in flight to wait for: 64 tries take
6 s, and the reset of a controller most of a second."""


@dataclass
class Counts:
    """What an engine has done since it was made; read by other threads, written by its own.

    `read_nbytes` and `written_nbytes` were asked of the medium and moved. Of these, `direct_nbytes` went past the page
    cache and `buffered_nbytes` through it; `cached_nbytes` lay in it when they were about to be read, where the kernel
    says so (`Target.cache_known`). `useful_nbytes` are those of commands that ended well, each byte once. `fixed`
    transfers used registered buffers; `unregistered` counts registrations that the kernel refused.
    """

    transfers: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    direct_nbytes: int = 0
    buffered_nbytes: int = 0
    cached_nbytes: int = 0
    useful_nbytes: int = 0
    bounced_nbytes: int = 0
    retried: int = 0
    resumed: int = 0
    timeouts: int = 0
    fixed: int = 0
    unregistered: int = 0

    def moved(self, write: bool, nbytes: int, direct: bool) -> None:
        """Count one transfer."""
        self.transfers += 1
        if write:
            self.written_nbytes += nbytes
        else:
            self.read_nbytes += nbytes
        if direct:
            self.direct_nbytes += nbytes
        else:
            self.buffered_nbytes += nbytes


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of several engines' counts."""
    made = Counts()
    for each in counts:
        for one in fields(Counts):
            setattr(made, one.name, getattr(made, one.name) + getattr(each, one.name))
    return made


class Namespace(NamedTuple):
    """What commands to a namespace need: its number, its block size as a power of two, and whether to flush.

    `flushes` is False where the drive has no volatile write cache.
    """

    nsid: int
    shift: int
    flushes: bool


@dataclass(frozen=True)
class Target:
    """What an engine works on: descriptor, grids in bytes (powers of two), and whom errors name.

    `largest` is the largest single transfer, `direct` says that the page cache has no part in it, and `namespace` that
    the descriptor is one of NVMe passthrough. `cache_known` says that the kernel tells what of it lies in the page
    cache. `controllers` are those of an NVMe drive whose state sysfs shows.
    """

    device: str
    system: System
    fd: int
    grid: int
    memory_grid: int
    deadline_s: float
    retries: int
    stop: threading.Event
    largest: int = LARGEST_TRANSFER
    direct: bool = False
    cache_known: bool = False
    namespace: Namespace | None = None
    controllers: tuple[str, ...] = ()


class Engine(Protocol):
    """Moves pieces; see the top of the file."""

    counts: Counts

    @property
    def refusals(self) -> list[str]:
        """Why memory could not be registered."""

    def expect(self, region: Region) -> None:
        """The next transfer is to or from this region of the host's memory: a chance to register it."""

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        """Move all pieces, none larger than the target's `largest`; one after the other if `ordered`.

        Raises MediaError, OutOfMemory, Busy, Timeout, Gone, ProtocolError or Stuck.
        """

    def sync(self) -> None:
        """Make every finished write durable (fdatasync)."""

    def close(self) -> None:
        """Release what the engine holds; nothing is in flight any more."""


def host_bytes(address: int, nbytes: int) -> memoryview:
    """The bytes of host memory at an address, without a copy; whoever passed the address keeps them alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def controller_state(system: System, controller: str) -> str:
    """What the kernel says of an NVMe controller: live, resetting, connecting, deleting, dead; empty if it has none."""
    return text_in(system, f"/sys/class/nvme/{controller}/state")


def departed(target: Target) -> str:
    """Why nothing will reach the drive any more, if that is what sysfs shows; empty otherwise.

    The kernel answers a transfer to a drive that was pulled out with EIO or ENODEV at first. Then a block device has no
    bytes (reads end at once, writes are ENOSPC), and passthrough finds no path (EINVAL in a ring, EAGAIN by ioctl).
    """
    states = [controller_state(target.system, each) for each in target.controllers]
    if not states or any(state not in ("", *DEAD) for state in states):
        return ""
    return f"{target.controllers[0]} is {states[0] or 'not there any more'}"


def lost(target: Target, op: str, number: int, offset: int, nbytes: int) -> DeviceError:
    """The error for a transfer that the system refused with this errno."""
    return failed(target, op, number, f"{nbytes} bytes at offset {offset} of the medium")


def failed(target: Target, op: str, number: int, detail: str) -> DeviceError:
    """The error for a system call on the medium that ended with this errno: Gone if the drive has departed."""
    if number in UNCLEAR and (why := departed(target)):
        return Gone(target.device, op, f"{detail}: {why}", number)
    return from_os(target.device, op, OSError(number, ""), detail)


def ran_dry(target: Target, op: str, offset: int, left: int) -> DeviceError:
    """The error for a transfer that stopped short and moved nothing when continued.

    Linux makes the disk of a drive that was pulled out end before its first byte: reads then move nothing.
    """
    if why := departed(target):
        return Gone(target.device, op, f"{left} bytes at offset {offset} of the medium: {why}")
    if op == "read":
        return lost(target, op, errno.ENODATA, offset, left)
    return ProtocolError(target.device, op, f"{left} bytes at offset {offset} were not taken, without an error")


class Stopped(Gone):
    """A transfer was cut short because its device is being closed."""


def stopped(target: Target, op: str) -> DeviceError:
    """The error for a transfer that finds `stop` set."""
    return Stopped(target.device, op, "the device was closed while the command ran")


def back_off(target: Target, tries: int) -> None:
    """Wait before trying again with nothing else in flight; wakes at once when the device is closed."""
    pause = _BACKOFF_S[min(tries, len(_BACKOFF_S)) - 1]
    if pause:
        target.stop.wait(pause)


def left_behind(target: Target, counts: Counts, op: str, call: Callable[[], None]) -> None:
    """Make blocking calls in a thread that is left behind where they make no progress in time.

    Raises Stuck, or OutOfMemory where there is no thread to be had.
    """
    try:
        within(target.deadline_s, call, lambda: counts.transfers + counts.retried)
    except NoThread as error:
        raise threadless(target.device, op, error) from error
    except Stuck as stuck:
        counts.timeouts += 1
        raise Stuck(f"{op}: {stuck}") from None


class PosixEngine:
    """pread and pwrite, one at a time, in a thread that may be left behind (deadlines.py)."""

    def __init__(self, target: Target) -> None:
        self.counts = Counts()
        self._target = target
        self._bounce: mmap.mmap | None = None

    @property
    def refusals(self) -> list[str]:
        """Nothing is registered for pread and pwrite."""
        return []

    def expect(self, region: Region) -> None:
        """Nothing is registered for pread and pwrite."""

    def transfer(self, pieces: Pieces, write: bool, ordered: bool = False) -> None:
        left_behind(self._target, self.counts, "write" if write else "read", lambda: self._all(pieces, write))

    def sync(self) -> None:
        left_behind(self._target, self.counts, "flush", self._sync)

    def close(self) -> None:
        self._bounce = None

    def _all(self, pieces: Pieces, write: bool) -> None:
        for offset, address, nbytes in pieces.tolist():
            self._one(offset, address, nbytes, write)

    def _one(self, offset: int, address: int, nbytes: int, write: bool) -> None:
        target, counts = self._target, self.counts
        op = "write" if write else "read"
        call = target.system.pwrite if write else target.system.pread
        bounced = address % target.memory_grid != 0
        view = self._room(nbytes) if bounced else host_bytes(address, nbytes)
        if bounced and write:
            view[:] = host_bytes(address, nbytes)
        done = tries = 0
        while done < nbytes:
            if target.stop.is_set():
                raise stopped(target, op)
            try:
                moved = call(target.fd, view[done:], offset + done)
            except (BlockingIOError, InterruptedError) as error:
                tries += 1
                counts.retried += 1
                if tries > target.retries:
                    raise from_os(
                        target.device, op, error, f"refused {tries} times at offset {offset + done}"
                    ) from None
                back_off(target, tries)
                continue
            except OSError as error:
                raise lost(target, op, error.errno or 0, offset + done, nbytes - done) from error
            counts.moved(write, moved, target.direct)
            step = moved if done + moved >= nbytes else moved // target.grid * target.grid
            if done + moved < nbytes:
                counts.resumed += 1
                tries = 0 if step else tries + 1
                if not step and (moved == 0 or tries > target.retries):
                    raise ran_dry(target, op, offset + done, nbytes - done)
            done += step
        if bounced:
            counts.bounced_nbytes += nbytes
            if not write:
                host_bytes(address, nbytes)[:] = view

    def _sync(self) -> None:
        target = self._target
        for tries in range(1, target.retries + 2):
            try:
                target.system.fdatasync(target.fd)
            except (BlockingIOError, InterruptedError):
                self.counts.retried += 1
                back_off(target, tries)
            except OSError as error:
                raise unsynced(target, error.errno or 0) from error
            else:
                return
        raise unsynced(target, errno.EAGAIN)

    def _room(self, nbytes: int) -> memoryview:
        if self._bounce is None:
            self._bounce = room(self._target, LARGEST_TRANSFER)
        return memoryview(self._bounce)[:nbytes]


def unsynced(target: Target, number: int) -> DeviceError:
    """The error for a failed fdatasync; the kernel may report such a loss only once."""
    return failed(target, "flush", number, "writes since the last good flush may be lost, write them again")


def room(target: Target, nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned memory that the kernel may transfer to. Raises OutOfMemory."""
    try:
        return target.system.mmap(-1, nbytes)
    except OSError as error:
        raise from_os(target.device, "bounce", error, f"{nbytes} bytes of aligned host memory") from error
