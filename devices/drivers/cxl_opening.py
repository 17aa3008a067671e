"""Opening memory behind CXL in one of its three forms: a devdax that is mapped, a NUMA node that is bound, or a file.

`open_backing` looks before it touches: what sysfs says about the dax device or the node decides, and where it is not
ready the refusal names the state and the command that would change it. What must hold:

- One owner. The devdax or file is locked (flock) for as long as its mapping lives.
- The size and alignment of a devdax come from sysfs: a character device has none. The kernel chooses the address.
- Everything is one mapping of `capacity` bytes, guarded against lost pages (guard.py).
- Numbers of a file, or of a node that is this host's own memory, are never those of CXL memory: `model` says so.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers import cxl_flush, numa
from tierloop.devices.drivers.claims import lock_alone, unopened
from tierloop.devices.drivers.cxl_options import Options
from tierloop.devices.drivers.cxl_parts import Dax, Topology
from tierloop.devices.drivers.cxl_problems import to_devdax, to_system_ram
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.guard import PAGE, guarded
from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.drivers.numa_mapping import advise, mapped
from tierloop.devices.drivers.numa_topology import numa_topology, shown
from tierloop.devices.errors import (
    ConfigurationError,
    DeviceError,
    Gone,
    NoPermission,
    NotPresent,
    OutOfMemory,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.regions import Segment
from tierloop.devices.system import FileStatus, System, from_os, resolved

_DAX = re.compile(r"dax\d+\.\d+")
_EIGHTHS_OF_A_NODE = 7
"""What is taken of the memory that is free on a node if no capacity is given: page tables and others need some, too."""


@dataclass
class Backing:
    """Opened memory: `array` is all of it. `flush` makes a segment durable, None where the memory keeps nothing.

    `grain` is what a lost page costs at least. `fd` is open, and locked, in the modes devdax and file. `why`
    lists what is not as it might be; `model` is as in `DeviceInfo`.
    """

    mode: Literal["devdax", "node", "file"]
    system: System
    array: NDArray[np.uint8]
    grain: int
    model: str
    fd: int = -1
    node: int | None = None
    dax: Dax | None = None
    topology: Topology = field(default_factory=Topology)
    flush: Callable[[Segment], None] | None = None
    why: list[str] = field(default_factory=list)
    using_fd: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever uses `fd` on another thread: a number that is closed may be another file's at once."""

    def close(self) -> None:
        """Let go of the descriptor; the mapping, and with it the lock, goes with the last array that shows it."""
        with self.using_fd:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                self.system.close(fd)


def open_backing(device: str, options: Options, system: System, undo: ExitStack) -> Backing:
    """Open what the options name; `undo` gets what closes it again.

    Raises NotPresent, NoPermission, Busy (another owner), Unsupported (it is not in the mode that was asked for),
    ConfigurationError (capacity), Misaligned, OutOfMemory, ProtocolError (sysfs does not make sense).
    """
    topology = cxl_topology(system)
    if options.serial is not None:
        options = _found(device, options, options.serial, topology)
    if options.node is not None:
        return _node(device, options, options.node, topology, system)
    assert options.path is not None
    try:
        name = posixpath.basename(resolved(system, options.path))
    except OSError as error:
        raise from_os(device, "open", error, options.path) from error
    if _DAX.fullmatch(name) and (name in [dax.name for dax in topology.daxes] or _below_dev(options.path)):
        return _devdax(device, options, options.path, name, topology, system, undo)
    return _file(device, options, options.path, topology, system, undo)


def _found(device: str, options: Options, serial: int, topology: Topology) -> Options:
    """The options with the path or node of the memory device with that serial."""
    memdev = next((memdev for memdev in topology.memdevs if memdev.serial == serial), None)
    if memdev is None:
        known = ", ".join(hex(memdev.serial) for memdev in topology.memdevs if memdev.serial is not None)
        raise NotPresent(device, "open", f"no memory device has the serial {serial:#x}; there are: {known or 'none'}")
    daxes = [dax for dax in topology.daxes if memdev.name in topology.chain(dax)]
    if len(daxes) > 1:
        paths = ", ".join(dax.path for dax in daxes)
        raise ConfigurationError(f"{device}: serial = {serial:#x} is below {paths}; give one of them as path")
    if not daxes:
        regions = [region.name for region in topology.regions if memdev.name in region.memdevs]
        why = topology.why(memdev.name, *regions) or "no dax device shows its memory"
        raise NotPresent(device, "open", f"{memdev.name} has the serial {serial:#x}, but: {why}")
    dax = daxes[0]
    if dax.mode == "system-ram":
        if dax.target_node is None:
            detail = f"{memdev.name} has the serial {serial:#x}, but: {topology.why(*topology.chain(dax))}"
            raise ProtocolError(device, "open", detail)
        return replace(options, serial=None, node=dax.target_node)
    return replace(options, serial=None, path=dax.path)


def _devdax(
    device: str, options: Options, path: str, name: str, topology: Topology, system: System, undo: ExitStack
) -> Backing:
    dax = topology.dax(name)
    if dax is None:
        here = ", ".join(dax.name for dax in topology.daxes) or "none"
        why = "; ".join(map(str, topology.problems))
        raise NotPresent(
            device, "open", f"{path}: no such dax device; there are: {here}{'; ' if why else ''}{why}", errno.ENOENT
        )
    if dax.mode == "system-ram":
        command = to_devdax(dax)
        what = f"it is node {dax.target_node} now; option node = {dax.target_node} uses it, or {command} changes it"
        raise Unsupported(device, "open", f"{path} is in mode system-ram: {what}")
    if dax.mode != "devdax":
        raise Unsupported(device, "open", f"{path} is in mode {dax.mode}: {topology.why(*topology.chain(dax))}")
    if not dax.nbytes or not dax.align or dax.align < PAGE or dax.align & (dax.align - 1):
        raise ProtocolError(
            device, "open", f"{path}: sysfs gives the size {dax.nbytes} and the alignment {dax.align}; it needs both"
        )
    size = dax.nbytes // dax.align * dax.align
    if options.capacity is not None and (options.capacity % dax.align or options.capacity > size):
        raise ConfigurationError(
            f"{device}: capacity = {options.capacity}; allowed: a multiple of {dax.align} up to {size}, the size of "
            f"{path}"
        )
    fd, status = _claimed(device, path, system, undo)
    if status.kind != "character device":
        raise Unsupported(device, "open", f"{path} is a {status.kind}; a dax device is a character device")
    array = _mapped(device, path, system, fd, options.capacity or size, dax.align)
    backing = Backing("devdax", system, array, dax.align, system.model, fd, dax=dax, topology=topology)
    if dax.persistent and cxl_flush.can_write_back():
        backing.flush = cxl_flush.write_back
    elif dax.persistent:
        backing.why.append(
            "its medium keeps bytes, but how to write cache lines back is not known on this processor, so it is "
            "offered as memory that does not"
        )
    return backing


def _file(device: str, options: Options, path: str, topology: Topology, system: System, undo: ExitStack) -> Backing:
    fd, status = _claimed(device, path, system, undo)
    if status.kind != "file":
        raise Unsupported(device, "open", f"{path} is a {status.kind}; a dax device or a file is needed")
    try:
        there = system.size(fd)
    except OSError as error:
        raise from_os(device, "open", error, path) from error
    capacity = there // PAGE * PAGE if options.capacity is None else options.capacity
    if not PAGE <= capacity <= there:
        raise ConfigurationError(f"{device}: capacity = {capacity}; allowed: {PAGE} to {there}, the size of {path}")
    array = _mapped(device, path, system, fd, capacity, PAGE)
    backing = Backing("file", system, array, PAGE, _in_place(system, "a file"), fd, topology=topology)
    backing.why.append("a file stands in place of CXL memory: its bytes lie in the page cache")

    def flush(segment: Segment) -> None:
        with backing.using_fd:
            if backing.fd < 0:
                raise Gone(device, "flush", f"{path} was closed before its bytes were made durable")
            system.fdatasync(backing.fd)

    backing.flush = flush
    return backing


def _node(device: str, options: Options, number: int, topology: Topology, system: System) -> Backing:
    dax = topology.dax_of_node(number)
    machine = numa_topology(system)
    node = machine.nodes.get(number)
    if node is None or not node.has_memory:
        if dax is not None and dax.mode == "devdax":
            what = f"{dax.name} is in mode devdax and would become it: {to_system_ram(dax)}"
        else:
            what = topology.why(f"node{number}", *(topology.chain(dax) if dax else ())) or "no dax device has it"
        raise NotPresent(device, "open", f"node {number} has no memory; {what}")
    if number not in machine.with_memory:
        raise NoPermission(
            device, "open", f"the process may not use node {number}; its cpuset allows {shown(machine.allowed_nodes)}"
        )
    if refusal := numa.refusal(system):
        raise NoPermission(device, "open", f"node {number} cannot be bound to: {refusal}")
    within = min(node.free_nbytes * _EIGHTHS_OF_A_NODE // 8, available_nbytes(system) or node.free_nbytes)
    capacity = within // PAGE * PAGE if options.capacity is None else options.capacity
    if not PAGE <= capacity <= node.free_nbytes:
        raise OutOfMemory(device, "open", f"{capacity} bytes of node {number}, which has {node.free_nbytes} free")
    memory = mapped(system, device, capacity)
    advise(system, memory, huge=True)
    array = guarded(device, memory)
    numa.bind(system, device, array.ctypes.data, capacity, "bind", [number])
    backing = Backing("node", system, array, PAGE, system.model, node=number, dax=dax, topology=topology)
    if dax is None and node.has_cpu:
        backing.model = _in_place(system, f"this host's own memory (node {number})")
        backing.why.append(f"node {number} has cores and comes from no dax device: it is no CXL memory")
    elif dax is None:
        backing.why.append(f"node {number} has no cores, and no dax device says that it is CXL memory")
    return backing


def _in_place(system: System, what: str) -> str:
    return system.model or f"{what} in place of CXL memory"


def _claimed(device: str, path: str, system: System, undo: ExitStack) -> tuple[int, FileStatus]:
    """Open a path and lock it for one owner."""
    try:
        kind = system.stat(path).kind
        if kind not in ("file", "character device"):
            raise Unsupported(device, "open", f"{path} is a {kind}; a dax device or a file is needed")
        fd = system.open(path, os.O_RDWR)
        undo.callback(_quietly_close, system, fd)
        lock_alone(device, path, system, fd, "memory")
        return fd, system.fstat(fd)
    except OSError as error:
        if isinstance(error, DeviceError):
            raise
        raise unopened(device, path, error) from error


def _mapped(device: str, path: str, system: System, fd: int, nbytes: int, grain: int) -> NDArray[np.uint8]:
    try:
        mapping = system.mmap(fd, nbytes)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise Unsupported(device, "open", f"{path} is nothing that can be mapped", error.errno) from error
        raise from_os(device, "open", error, f"mapping {nbytes} bytes of {path}") from error
    return guarded(device, np.frombuffer(mapping, dtype=np.uint8), grain)


def _below_dev(path: str) -> bool:
    return posixpath.dirname(posixpath.normpath(path)) == "/dev"


def _quietly_close(system: System, fd: int) -> None:
    """Undo an opening that failed for another reason, which is the one to report."""
    with suppress(OSError):
        system.close(fd)
