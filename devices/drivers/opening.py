"""Opening a medium: for one owner, with everything that is known about how it may be reached.

`open_medium` looks before it touches: a directory, a missing path, a mounted disk or a missing permission is refused
before anything is created, and a file that it did create is removed again if the rest fails. The generic character
device of an NVMe namespace is opened by nvme_claim.py; the rest here is for files and block devices. What must hold:

- One owner. The file is locked (flock), a block device is also opened O_EXCL, so a mounted one is refused as busy.
- The *grid* is what offsets and sizes of direct transfers must be multiples of. It starts from what the kernel says
  (statx, the logical block size in sysfs) and is confirmed by a real read, because a hole in a file accepts anything.
- Where O_DIRECT is refused, the medium is opened without it and `why` says so. Nothing falls back in silence.
- A file that was created or grown is durable with its name before it is used.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from tierloop.devices.drivers.claims import lock_alone, unopened
from tierloop.devices.drivers.engines import Target, controller_state, failed
from tierloop.devices.drivers.kernel_texts import number_in, number_of
from tierloop.devices.drivers.medium import PAGE, Medium, close_all, patiently
from tierloop.devices.drivers.nvme_claim import open_namespace
from tierloop.devices.drivers.nvme_drive import Drive
from tierloop.devices.drivers.nvme_drives import (
    controllers_of,
    file_in_use,
    in_use,
    is_read_only,
    overwritten,
    place_of,
    zones,
)
from tierloop.devices.drivers.nvme_namespace import NamespaceMedium
from tierloop.devices.drivers.page_cache import why_not_known
from tierloop.devices.drivers.wish import Wish
from tierloop.devices.errors import Busy, ConfigurationError, DeviceError, NotPresent, Unsupported
from tierloop.devices.system import SYS_STATX, FileStatus, System, address_of, from_os

_LARGEST_GRID = 65536
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def open_medium(device: str, wish: Wish, system: System, undo: ExitStack) -> Medium | NamespaceMedium:
    """Open, lock and measure a medium; `undo` gets what closes it again and removes a file that was created.

    Raises NotPresent, NoPermission, Unsupported (no medium), Busy (another owner, mounted), ConfigurationError
    (capacity), OutOfMemory (no room for the file), MediaError, ProtocolError or Timeout (the first questions and read).
    """
    found = _look(device, wish, system)
    if found is not None and found.kind == "character device":
        return open_namespace(device, wish, found, system, undo)
    return _open_file(device, wish, found, system, undo)


def _open_file(device: str, wish: Wish, found: FileStatus | None, system: System, undo: ExitStack) -> Medium:
    control, status = _claim(device, wish, found, system, undo)
    capacity = _measure(device, wish, system, control, status, undo)
    target = Target(device, system, control, PAGE, 1, wish.deadline_s, wish.retries, threading.Event())
    medium = Medium(wish.path, status, control, capacity, target, False, [])
    medium.bus_address, medium.numa_node = _place(system, status)
    if status.kind == "block device":
        _question(medium, system)
        medium.why += overwritten(system, _queue_folder(status)[0])
        medium.read_only = is_read_only(system, _queue_folder(status)[0])
        medium.in_flight = number_in(system, f"{_queue_folder(status)[0]}/queue/nr_requests")
        largest = (number_in(system, f"{_queue_folder(status)[0]}/queue/max_hw_sectors_kb") or 0) * 1024
        if PAGE <= largest < target.largest:
            medium.target = replace(medium.target, largest=largest // PAGE * PAGE)
    refused = _go_direct(medium, undo) if wish.direct else "O_DIRECT was not asked for"
    if refused is not None:
        medium.why.append(refused)
        _ask_for_the_cache(medium)
    elif _fact(system, status, "queue/logical_block_size") is None:
        medium.why.append("O_DIRECT is taken, but no disk is known under this file system: memory may serve it")
    return medium


def _claim(
    device: str, wish: Wish, status: FileStatus | None, system: System, undo: ExitStack
) -> tuple[int, FileStatus]:
    """Open the path, or create it, and lock it: (descriptor, status)."""
    flags = os.O_RDWR
    if status is None:
        flags |= os.O_CREAT | os.O_EXCL
    else:
        block = status.kind == "block device"
        used = in_use(system, _queue_folder(status)[0]) if block else file_in_use(system, status)
        if used:
            raise Busy(device, "open", f"{wish.path}: {used}", errno.EBUSY)
        if block and (zoned := zones(system, _queue_folder(status)[0])):
            raise Unsupported(device, "open", f"{wish.path}: {zoned}")
        flags |= os.O_EXCL if block else 0
    try:
        control = system.open(wish.path, flags)
    except FileExistsError as error:
        detail = f"{wish.path}: there is a link that leads nowhere, or somebody else has just created a file"
        raise Busy(device, "open", detail, errno.EEXIST) from error
    except OSError as error:
        raise unopened(device, wish.path, error) from error
    undo.callback(close_all, system, {control})
    lock_alone(device, wish.path, system, control)
    if status is None:
        undo.callback(_quietly, system.unlink, wish.path)
    opened = system.fstat(control)
    if status is not None and opened != status:
        raise Busy(device, "open", f"{wish.path} was replaced while it was being opened")
    return control, opened


def _look(device: str, wish: Wish, system: System) -> FileStatus | None:
    """What stands at the path; None if nothing does and it shall be created."""
    try:
        status = system.stat(wish.path)
    except FileNotFoundError as error:
        if not wish.create:
            detail = f"{wish.path} does not exist; `create = true` with a capacity makes a file"
            raise NotPresent(device, "open", detail, errno.ENOENT) from error
        if wish.capacity is None:
            raise ConfigurationError(
                f"{device}: {wish.path} does not exist, and to create it needs a capacity"
            ) from error
        return None
    except OSError as error:
        raise unopened(device, wish.path, error) from error
    if status.kind not in ("file", "block device", "character device"):
        raise Unsupported(
            device, "open", f"{wish.path} is a {status.kind}; a file, a block device or /dev/ngXnY (NVMe) is needed"
        )
    return status


def _question(medium: Medium, system: System) -> None:
    """Ask the NVMe drive behind a block device who it is, if there is one; it works without."""
    controllers = controllers_of(system, _queue_folder(medium.status)[0])
    medium.target = replace(
        medium.target, controllers=tuple(name for name in controllers if controller_state(system, name))
    )
    try:
        medium.drive = Drive(replace(medium.target, fd=medium.control))
    except DeviceError as error:
        medium.why.append(f"the drive does not say who it is ({error})")
    except OSError:
        return  # no NVMe drive
    address, node = place_of(system, medium.target.controllers)
    medium.bus_address = medium.bus_address or address
    medium.numa_node = node if medium.numa_node is None else medium.numa_node


def _measure(device: str, wish: Wish, system: System, control: int, status: FileStatus, undo: ExitStack) -> int:
    """The usable capacity in bytes, a multiple of PAGE; grows a file where that was asked for."""
    try:
        size = system.size(control)
        capacity = size // PAGE * PAGE if wish.capacity is None else wish.capacity
        if capacity > size:
            if status.kind != "file" or not wish.create:
                advice = "; `create = true` grows it" if status.kind == "file" else ""
                raise ConfigurationError(f"{device}: capacity {capacity}: {wish.path} holds {size} bytes{advice}")
            undo.callback(_quietly, system.resize, control, size)
            system.resize(control, capacity)
            system.fsync(control)
            folder = system.open(os.path.dirname(wish.path) or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                system.fsync(folder)
            finally:
                system.close(folder)
    except OSError as error:
        raise from_os(device, "open", error, wish.path) from error
    if capacity < PAGE:
        raise ConfigurationError(f"{device}: {wish.path} holds {size} bytes, less than one block of {PAGE}")
    return capacity


def _ask_for_the_cache(medium: Medium) -> None:
    """Find out whether the kernel says what its page cache holds, now that transfers go through it."""
    target = medium.target
    unknown = why_not_known(target.system, target.fd)
    if unknown:
        medium.why.append(f"what the page cache serves is not known ({unknown})")
    medium.target = replace(target, cache_known=not unknown)


def _go_direct(medium: Medium, undo: ExitStack) -> str | None:
    """Switch the medium to O_DIRECT with grids that were tried out; the reason if that is refused."""
    system, device = medium.target.system, medium.target.device
    try:
        fd = system.open(medium.path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise unopened(device, medium.path, error) from error
        return "the file system refuses to open with O_DIRECT (EINVAL)"
    with ExitStack() as opened:
        opened.callback(close_all, system, {fd})
        if system.fstat(fd) != medium.status:
            raise Busy(device, "open", f"{medium.path} was replaced while it was being opened")
        target = replace(medium.target, fd=fd)
        found = _grids(target, medium.status, medium.capacity)
        if isinstance(found, str):
            return found
        undo.push(opened.pop_all())
    grid, memory_grid = found
    medium.target = replace(target, grid=grid, memory_grid=memory_grid, direct=True)
    medium.direct = True
    medium.capacity -= medium.capacity % max(grid, PAGE)
    return None


def _grids(target: Target, status: FileStatus, capacity: int) -> tuple[int, int] | str:
    """The finest grids that direct reads keep to, of offsets and of host addresses; the reason if there are none."""
    said = _kernel_says(target.system, target.fd)
    if said == (0, 0):
        return "the kernel says that this file does not take direct transfers (statx)"
    memory_grid, floor = said or (_LARGEST_GRID, 512)
    floor = max(floor, 512, _logical_block(target.system, status))
    try:
        buffer = target.system.mmap(-1, 2 * _LARGEST_GRID)
    except OSError as error:
        raise from_os(target.device, "probe", error, "memory for a first read") from error
    grid = floor
    while not _readable(target, buffer, 0, grid):
        grid *= 2
        if grid > min(_LARGEST_GRID, capacity):
            return f"no direct read from {floor} to {grid // 2} bytes works (EINVAL)"
    if memory_grid >= grid or not _readable(target, buffer, memory_grid, grid):
        memory_grid = grid
    return grid, memory_grid


def _readable(target: Target, buffer: mmap.mmap, skew: int, nbytes: int) -> bool:
    """Whether a direct read of the first nbytes into memory `skew` bytes off a page works."""
    moved: list[int] = []

    def read() -> None:
        for _ in range(target.retries + 1):
            try:
                moved.append(target.system.pread(target.fd, memoryview(buffer)[skew : skew + nbytes], 0))
            except (InterruptedError, BlockingIOError):
                continue
            return

    try:
        patiently(target, "probe", read)
    except DeviceError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise failed(target, "probe", error.errno or 0, f"a direct read of the first {nbytes} bytes") from error
    return moved == [nbytes]


def _kernel_says(system: System, fd: int) -> tuple[int, int] | None:
    """(memory grid, offset grid) of direct transfers by statx (Linux 6.1), (0, 0) for none at all, None if unsaid."""
    answer, empty = bytearray(256), bytearray(1)
    if SYS_STATX < 0:
        return None
    try:
        system.syscall(SYS_STATX, fd, address_of(empty), _AT_EMPTY_PATH, _STATX_DIOALIGN, address_of(answer))
    except OSError:
        return None
    words = np.frombuffer(answer, dtype=np.uint32)
    said = int(words[38]), int(words[39])
    return said if words[0] & _STATX_DIOALIGN and all(n & (n - 1) == 0 for n in said) else None


def _queue_folder(status: FileStatus) -> list[str]:
    """Where sysfs describes the disk under a medium; a partition's disk is one folder up."""
    number = status.device if status.kind == "block device" else status.filesystem
    folder = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    return [folder, f"{folder}/.."]


def _fact(system: System, status: FileStatus, name: str) -> str | None:
    for folder in _queue_folder(status):
        try:
            return system.read_text(f"{folder}/{name}")
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _logical_block(system: System, status: FileStatus) -> int:
    said = _fact(system, status, "queue/logical_block_size") or ""
    nbytes = number_of(said) or 0
    return nbytes if nbytes & (nbytes - 1) == 0 and nbytes <= _LARGEST_GRID else 0


def _place(system: System, status: FileStatus) -> tuple[str | None, int | None]:
    """(bus address, NUMA node) of the controller under the medium."""
    node = _fact(system, status, "device/numa_node") or ""
    return _fact(system, status, "device/address"), number_of(node)


def _quietly(call: Callable[..., None], *args: object) -> None:
    """Undo a step of an opening that failed for another reason, which is the one to report."""
    with suppress(OSError):
        call(*args)
