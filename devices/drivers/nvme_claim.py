"""Claiming a namespace through its generic character device, which the kernel gives to anybody who may open it.

Opening /dev/ngXnY is exclusive to nobody: a mounted file system does not keep a command away. So the driver itself sees
to it that a namespace has one owner. What must hold before the first command that writes:

- The block device of the namespace is not mounted, swapped to or held, by what the kernel lists.
- It is opened O_EXCL and stays open: the kernel then refuses every mount and every other claim. Where it stands in
  sysfs but cannot be opened, the namespace is refused, because nobody can know.
- The node is locked, which keeps a second owner through the same node out.
- The drive's own tables make sense (nvme_identity.py), and one block was read.
"""

from __future__ import annotations

import errno
import os
import posixpath
import threading
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from tierloop.devices.drivers.claims import lock_alone, unopened
from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.engines import LARGEST_TRANSFER, Namespace, Target, controller_state, departed, room
from tierloop.devices.drivers.kernel_texts import names_in, number_in, text_in
from tierloop.devices.drivers.medium import PAGE, close_all
from tierloop.devices.drivers.nvme_commands import MOST_BLOCKS
from tierloop.devices.drivers.nvme_drive import Drive
from tierloop.devices.drivers.nvme_drives import (
    block_name,
    controllers_of,
    in_use,
    is_read_only,
    overwritten,
    place_of,
    state_advice,
    zones,
)
from tierloop.devices.drivers.nvme_identity import Identity
from tierloop.devices.drivers.nvme_namespace import NamespaceMedium
from tierloop.devices.drivers.passthrough import PERMISSION_HINT, IoctlEngine
from tierloop.devices.drivers.wish import Wish
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Gone,
    NoPermission,
    NotPresent,
    ProtocolError,
    Timeout,
    Unsupported,
)
from tierloop.devices.system import FileStatus, System, address_of, from_os, resolved

_MEMORY_GRID = 4
"""Bytes: what addresses of an NVMe transfer are multiples of. A kernel may want more, which the first read shows."""
_FEWEST_SEGMENTS = 127
"""Runs of memory per transfer where the kernel does not say how many it takes: what older ones allow."""


def open_namespace(device: str, wish: Wish, status: FileStatus, system: System, undo: ExitStack) -> NamespaceMedium:
    """Claim, open and question a namespace; `undo` gets what closes it again.

    Raises Unsupported (no NVMe namespace, a format that is not served), Busy (somebody uses it), NotPresent,
    NoPermission, ProtocolError (tables that cannot be), Gone, Timeout, ConfigurationError (capacity).
    """
    generic = _generic_name(status, system)
    if generic is None:
        raise Unsupported(
            device,
            "open",
            f"{wish.path} is a character device, but sysfs knows no NVMe namespace behind it (/dev/ngXnY)",
        )
    folder = f"/sys/class/nvme-generic/{generic}"
    controllers = tuple(name for name in controllers_of(system, folder) if controller_state(system, name))
    why: list[str] = []
    claims = _claim(device, generic, system, undo, why)
    fd = _open(device, wish, status, system, undo)
    target = Target(
        *(device, system, fd, PAGE, PAGE, wish.deadline_s, wish.retries, threading.Event()),
        direct=True,
        controllers=controllers,
    )
    for name in controllers:
        if advice := state_advice(name, controller_state(system, name)):
            why.append(advice)
    if departed(target):
        raise Gone(device, "open", "; ".join(why))
    drive = _questioned(target, wish.path)
    identity = drive.identity
    shift = identity.lba_nbytes.bit_length() - 1
    _agree(device, system, generic, identity)
    namespace = Namespace(identity.nsid, shift, identity.volatile_write_cache)
    largest = _largest(device, system, generic, identity)
    target = replace(target, grid=identity.lba_nbytes, memory_grid=_MEMORY_GRID, largest=largest, namespace=namespace)
    capacity = _capacity(device, wish, identity)
    target = _read_one(target, namespace)
    if not wish.direct:
        why.append("direct = false changes nothing: passthrough never goes through the page cache")
    if not identity.volatile_write_cache:
        why.append("a flush sends nothing: the drive says that it has no volatile write cache")
    if identity.thin:
        why.append("the namespace is thinly provisioned: what was allocated may still find no room when it is written")
    return NamespaceMedium(
        *(wish.path, claims, capacity, target, namespace, drive, why),
        *place_of(system, controllers),
        in_flight=number_in(system, f"/sys/block/{block_name(generic)}/queue/nr_requests"),
        read_only=is_read_only(system, f"/sys/block/{block_name(generic)}"),
    )


def _questioned(target: Target, path: str) -> Drive:
    device = target.device
    try:
        return Drive(target)
    except DeviceError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL):
            detail = f"{path} does not take NVMe requests for a namespace; /dev/ngXnY does"
            raise Unsupported(device, "open", detail, error.errno) from error
        raise _refused(device, path, error) from error


def _refused(device: str, path: str, error: OSError) -> DeviceError:
    made = from_os(device, "open", error, path)
    if isinstance(made, NoPermission):
        return NoPermission(device, "open", f"{made.detail}; {PERMISSION_HINT}", error.errno)
    return made


def _generic_name(status: FileStatus, system: System) -> str | None:
    """The node's name in the kernel (ngXnY), by its number: what it is called in /dev says nothing."""
    number = f"{os.major(status.device)}:{os.minor(status.device)}"
    try:
        name = posixpath.basename(resolved(system, f"/sys/dev/char/{number}"))
    except OSError:  # links that lead round in a circle
        return None
    return name if block_name(name) else None


def _claim(device: str, generic: str, system: System, undo: ExitStack, why: list[str]) -> set[int]:
    """Keep everybody else away from the namespace: descriptors of its block device. Raises Busy and the like."""
    block = block_name(generic)
    folder, node = f"/sys/block/{block}", f"/dev/{block}"
    listed = bool(names_in(system, folder))
    used = in_use(system, folder) if listed else ""
    if used:
        raise Busy(device, "open", f"{used}; its generic device must not be written to", errno.EBUSY)
    if zoned := zones(system, folder):
        raise Unsupported(device, "open", f"{generic}: {zoned}")
    try:
        fd = system.open(node, os.O_RDONLY | os.O_EXCL)
    except FileNotFoundError as error:
        if listed:
            detail = f"{node} is in sysfs and not in /dev: without it nobody can tell whether the namespace is in use"
            raise NotPresent(device, "open", detail, errno.ENOENT) from error
        why.append("no block device stands beside the node: the lock of the node is the only claim")
        return set()
    except OSError as error:
        if error.errno == errno.EBUSY:
            detail = (
                f"{node} is mounted, held or opened exclusively by somebody; its generic device must not be written to"
            )
            raise Busy(device, "open", detail, errno.EBUSY) from error
        raise _refused(device, f"{node}, to claim the namespace", error) from error
    undo.callback(close_all, system, {fd})
    lock_alone(device, node, system, fd)
    number = system.fstat(fd).device
    if listed and text_in(system, f"{folder}/dev") != f"{os.major(number)}:{os.minor(number)}":
        detail = f"{node} is not the block device of {generic}: nobody can tell whether the namespace is in use"
        raise NotPresent(device, "open", detail)
    why += overwritten(system, folder)
    return {fd}


def _open(device: str, wish: Wish, status: FileStatus, system: System, undo: ExitStack) -> int:
    try:
        fd = system.open(wish.path, os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise unopened(device, wish.path, error) from error
        raise _refused(device, wish.path, error) from error
    undo.callback(close_all, system, {fd})
    lock_alone(device, wish.path, system, fd)
    if system.fstat(fd) != status:
        raise Busy(device, "open", f"{wish.path} was replaced while it was being opened")
    return fd


def _agree(device: str, system: System, generic: str, identity: Identity) -> None:
    """The kernel and the drive must speak of the same blocks, or lengths would be wrong. Raises ProtocolError.

    Older kernels show a disk of 512-byte blocks without capacity where a drive's are larger than a page.
    """
    kernel = number_in(system, f"/sys/block/{block_name(generic)}/queue/logical_block_size")
    if kernel and kernel != identity.lba_nbytes <= PAGE:
        detail = f"blocks of {identity.lba_nbytes} bytes, and the kernel says {kernel}: was it formatted since?"
        raise ProtocolError(device, "identify", f"{detail} `nvme ns-rescan` makes the kernel look again")


def _largest(device: str, system: System, generic: str, identity: Identity) -> int:
    """The largest transfer in bytes: by the drive, by the 16 bits of a block count, by the kernel's limits."""
    queue = f"/sys/block/{block_name(generic)}/queue"
    segments = number_in(system, f"{queue}/max_segments") or _FEWEST_SEGMENTS
    limits = [LARGEST_TRANSFER, MOST_BLOCKS * identity.lba_nbytes]
    if identity.mdts_nbytes:
        limits.append(identity.mdts_nbytes)
    kernel = (number_in(system, f"{queue}/max_hw_sectors_kb") or 0) * 1024
    if kernel >= identity.lba_nbytes:
        limits.append(kernel)
    by_segments = (segments - 1) * PAGE
    if min(limits) > by_segments >= identity.lba_nbytes:
        limits.append(1 << (by_segments.bit_length() - 1))
    largest = min(limits) // identity.lba_nbytes * identity.lba_nbytes
    if not largest:
        detail = f"blocks of {identity.lba_nbytes} bytes are larger than the largest transfer, {min(limits)} bytes"
        raise Unsupported(device, "open", detail)
    return largest


def _capacity(device: str, wish: Wish, identity: Identity) -> int:
    grid = max(PAGE, identity.lba_nbytes)
    capacity = identity.capacity if wish.capacity is None else wish.capacity
    if capacity > identity.capacity:
        raise ConfigurationError(f"{device}: capacity {capacity}: {wish.path} holds {identity.capacity} bytes")
    if capacity < grid:
        raise ConfigurationError(f"{device}: {wish.path}: {capacity} bytes, less than one block of {grid}")
    return capacity // grid * grid


def _read_one(target: Target, namespace: Namespace) -> Target:
    """Read one block to an odd address and to an even one: the target with the memory grid that works."""
    memory = room(target, 2 * max(target.grid, PAGE))
    for grid in (_MEMORY_GRID, PAGE):
        tried = replace(target, memory_grid=grid)
        piece = np.array([[0, address_of(memory) + grid % PAGE, target.grid]], dtype=np.int64)
        try:
            IoctlEngine(tried, namespace).transfer(piece, write=False)
            return tried
        except Stuck as stuck:
            raise Timeout(target.device, "probe", str(stuck), errno.ETIMEDOUT) from stuck
        except DeviceError as error:
            if grid == PAGE or error.errno != errno.EINVAL:
                raise
    raise AssertionError("the second read returns or raises")
