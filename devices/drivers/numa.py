"""Where pages lie: binding ranges of this process's memory to NUMA nodes, and asking where they are.

The three system calls are made through a `System`, so that a model may answer them. What must hold:

- Only ranges of addresses are bound (mbind). The policy of the process and its threads is never touched: a process
  whose stack and code lie on a slow memory suffers for it everywhere.
- Addresses are whole pages; nodes are a set of numbers with gaps. The kernel is told one bit more than the highest node
  needs, since it counts one less than it is told.
- A policy rules pages that are touched later. Where pages are is asked for (`nodes_of`), never concluded.
- Whether a process may bind is found out by the call that binds (`refusal`): in containers it is the one that is
  forbidden, while asking is allowed.

Weighted interleaving: the kernel's own (Linux 6.9) has one set of weights for the whole machine, which root sets. It is
used where those weights are the ones that are asked for. Everywhere else the range is cut into runs, each bound to one
node, in turn and as long as the weights say: on every kernel, without root, and with shares that are exact but for a
last turn that is cut short. A run is a whole number of pages (of huge ones, where the range is long enough), and a
range has at most `MOST_RUNS`, for the kernel allows a process 65,530 mappings by default and each run becomes one.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
from collections.abc import Sequence
from math import gcd
from typing import Final, Literal, get_args

import cffi
import numpy as np
from numpy.typing import NDArray

from tierloop.devices.drivers.kernel_texts import number_of
from tierloop.devices.drivers.numa_topology import numa_topology, shown
from tierloop.devices.errors import ConfigurationError, Misaligned, NoPermission
from tierloop.devices.system import System, from_os

Mode = Literal["bind", "preferred", "interleave", "weighted-interleave"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

PAGE = mmap.PAGESIZE
HUGE_NBYTES = 2 << 20
HIGHEST_NODE = 1023
"""Linux is built for at most 1,024 nodes."""
MOST_RUNS = 128

_NUMBERS = {
    "x86_64": (237, 239, 279, 28),
    "aarch64": (235, 236, 239, 233),
    "riscv64": (235, 236, 239, 233),
}
SYS_MBIND, SYS_GET_MEMPOLICY, SYS_MOVE_PAGES, SYS_MADVISE = _NUMBERS.get(platform.machine(), (-1, -1, -1, -1))
"""Numbers of raw system calls; -1 where unknown here, which every kernel answers with ENOSYS."""

MPOL_DEFAULT = 0
MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
MPOL_PREFERRED_MANY = 5
"""Linux 5.15; `preferred` of one node needs none of it."""
MPOL_WEIGHTED_INTERLEAVE = 6
MPOL_MODE_FLAGS = 0xE000
"""The bits of a mode that are flags."""
MPOL_F_ADDR = 2
MPOL_MF_MOVE = 2
MADV_POPULATE_WRITE = 23
"""Linux 5.14: touch every page of a range; a page that cannot be had is an error, not a signal."""

_WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
_PAGES_PER_CALL = 1 << 16

_ffi = cffi.FFI()


def bind(
    system: System,
    device: str,
    address: int,
    nbytes: int,
    mode: Mode,
    nodes: Sequence[int],
    weights: Sequence[int] | None = None,
    page: int = PAGE,
) -> None:
    """Say on which nodes the pages of a range shall lie when they are touched; pages that lie somewhere stay there.

    `page` is the size of the range's pages, if they come from a pool of huge ones.
    Raises ConfigurationError for a mode, nodes or weights that make no sense, Misaligned for a range that is not whole
    pages, and what the kernel says: ProtocolError (EINVAL) for a node that is not there or has no memory, NoPermission
    where the process may not bind or the nodes are outside its cpuset, OutOfMemory where it has too many mappings.
    """
    check_policy(device, mode, nodes, weights)
    _whole_pages(device, "bind", address, nbytes)
    if mode != "weighted-interleave":
        _mbind(system, device, address, nbytes, _kernel_mode(mode, nodes), nodes)
        return
    shares = _shares(nodes, weights)
    if kernel_weights(system, nodes) == tuple(shares):
        _mbind(system, device, address, nbytes, MPOL_WEIGHTED_INTERLEAVE, nodes)
        return
    for offset, length, node in runs(nbytes, nodes, shares, page):
        _mbind(system, device, address + offset, length, MPOL_BIND, [node])


def check_policy(device: str, mode: str, nodes: Sequence[int], weights: Sequence[int] | None) -> None:
    """Raises ConfigurationError for what no kernel could carry out."""
    if mode not in MODES:
        raise ConfigurationError(f"{device}: placement = {mode!r}; allowed: {', '.join(MODES)}")
    if not nodes or any(type(node) is not int or not 0 <= node <= HIGHEST_NODE for node in nodes):
        raise ConfigurationError(
            f"{device}: nodes = {list(nodes)}; allowed: numbers of nodes from 0 to {HIGHEST_NODE}, at least one"
        )
    if len(set(nodes)) != len(nodes):
        raise ConfigurationError(f"{device}: nodes = {list(nodes)}; a node is named twice")
    if weights is None:
        return
    if mode != "weighted-interleave":
        raise ConfigurationError(f"{device}: weights are for placement = 'weighted-interleave', not for {mode!r}")
    if len(weights) != len(nodes) or any(type(weight) is not int or not 1 <= weight <= 255 for weight in weights):
        raise ConfigurationError(
            f"{device}: weights = {list(weights)}; allowed: one integer from 1 to 255 for each of {len(nodes)} nodes"
        )


def runs(nbytes: int, nodes: Sequence[int], weights: Sequence[int], page: int = PAGE) -> list[tuple[int, int, int]]:
    """A range cut into runs (offset, length, node) by weights: whole pages each.

    There are at most `MOST_RUNS`, or one for each node. With two nodes and the weights 3 and 1, three grains lie on the
    first, one on the second, and so on.
    """
    period = sum(weights)
    grain = max(page, HUGE_NBYTES if nbytes >= HUGE_NBYTES * period else PAGE)
    while (turns := -(-nbytes // (grain * period))) > 1 and turns * len(nodes) > MOST_RUNS:
        grain *= 2
    cut, offset = [], 0
    while offset < nbytes:
        for node, weight in zip(nodes, weights, strict=True):
            length = min(grain * weight, nbytes - offset)
            if length > 0:
                cut.append((offset, length, node))
                offset += length
    return cut


def kernel_weights(system: System, nodes: Sequence[int]) -> tuple[int, ...]:
    """The machine's weights of these nodes for the kernel's own weighted interleaving, made as small as they go.

    Empty where the kernel has no such policy.
    """
    try:
        weights = [number_of(system.read_text(f"{_WEIGHTS}/node{node}")) or 0 for node in nodes]
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(_reduced(weights)) if all(weights) else ()


def nodes_of(system: System, address: int, nbytes: int) -> NDArray[np.int64]:
    """The node of each page of a range, int64 (pages,). A negative number is a page's errno, as the kernel gives it.

    -ENOENT is a page that was never touched or is swapped out; -EFAULT one that is not mapped, or that was read and
    never written. Raises OSError where asking itself is refused, ValueError for a range that is not whole pages.
    """
    return _move_pages(system, address, nbytes, None)


def move(system: System, address: int, nbytes: int, node: int) -> NDArray[np.int64]:
    """Move the pages of a range to a node; returns where each is then, or its errno, like `nodes_of`.

    A page that is pinned or in use elsewhere stays and says -EBUSY; where the node is full, what is left says -ENOMEM
    or stays: look at the answer. Raises OSError, e.g. ENODEV for a node that is not there, EACCES for one that the
    process may not use, ValueError for a range that is not whole pages.
    """
    return _move_pages(system, address, nbytes, node)


def policy_of(system: System, address: int) -> tuple[int, frozenset[int]]:
    """The policy that rules one address: its MPOL_ number without flags, and its nodes. Raises OSError."""
    mode = _ffi.new("int *")
    mask = _ffi.new("unsigned long[]", (HIGHEST_NODE + 1) // _bits())
    system.syscall(SYS_GET_MEMPOLICY, _at(mode), _at(mask), HIGHEST_NODE + 2, address, MPOL_F_ADDR)
    return int(mode[0]) & ~MPOL_MODE_FLAGS, frozenset(nodes_in(list(mask)))


def refusal(system: System) -> str:
    """Why this process may not bind memory, in a sentence; "" where it may.

    A scratch page is given the policy that it has anyway, so nothing changes and no node needs to be known.
    """
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as scratch:
        buffer = _ffi.from_buffer(scratch, require_writable=True)
        try:
            system.syscall(SYS_MBIND, _at(buffer), PAGE, MPOL_DEFAULT, 0, 0, 0)
        except OSError as error:
            return _why(error)
        finally:
            _ffi.release(buffer)
    return ""


def trial(system: System, device: str, mode: Mode, nodes: Sequence[int], weights: Sequence[int] | None = None) -> None:
    """Bind a scratch page and let it go: raises what `bind` would raise for these nodes."""
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as scratch:
        buffer = _ffi.from_buffer(scratch, require_writable=True)
        try:
            bind(system, device, _at(buffer), PAGE, mode, nodes, weights)
        finally:
            _ffi.release(buffer)


def touch(system: System, device: str, address: int, nbytes: int) -> bool:
    """Let the kernel put every page of a range where its policy says; False where it has no such call (before 5.14).

    Raises OutOfMemory where pages run out, ProtocolError for the rest.
    """
    _whole_pages(device, "alloc", address, nbytes)
    while True:
        try:
            system.syscall(SYS_MADVISE, address, nbytes, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN):
                continue
            if error.errno in (errno.EINVAL, errno.ENOSYS):
                return False
            if error.errno == errno.EFAULT:  # what a page that cannot be had is where the policy leaves no other
                error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            raise from_os(device, "alloc", error, f"{nbytes} bytes cannot all be had on the nodes asked for") from error
        return True


def mask_of(nodes: Sequence[int]) -> list[int]:
    """Nodes as the words of the kernel's mask."""
    words = [0] * (max(nodes) // _bits() + 1)
    for node in nodes:
        words[node // _bits()] |= 1 << node % _bits()
    return words


def nodes_in(words: Sequence[int]) -> list[int]:
    """The nodes of a mask, in order."""
    return [word * _bits() + bit for word, value in enumerate(words) for bit in range(_bits()) if value >> bit & 1]


def _mbind(system: System, device: str, address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> None:
    mask = _ffi.new("unsigned long[]", mask_of(nodes))
    try:
        system.syscall(SYS_MBIND, address, nbytes, mode, _at(mask), max(nodes) + 2, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            _refuse_what_is_not_ours(system, device, nodes, error)
        where = f"{nbytes} bytes to nodes {sorted(nodes)}"
        why = f": {_why(error)}" if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS) else ""
        raise from_os(device, "bind", error, f"{where}{why}") from error


def _refuse_what_is_not_ours(system: System, device: str, nodes: Sequence[int], error: OSError) -> None:
    """Raises NoPermission where all the nodes are outside the process's cpuset, which may change at run time."""
    now = numa_topology(system)
    if all(node in now.nodes and node not in now.allowed_nodes for node in nodes):
        detail = f"nodes {shown(nodes)} are outside the process's cpuset now; allowed: {shown(now.with_memory)}"
        raise NoPermission(device, "bind", detail, error.errno) from error


def _move_pages(system: System, address: int, nbytes: int, node: int | None) -> NDArray[np.int64]:
    if address % PAGE or nbytes % PAGE or nbytes < 0:
        raise ValueError(f"{nbytes} bytes at {address:#x} are not whole pages of {PAGE} bytes")
    found = np.empty(nbytes // PAGE, dtype=np.int64)
    for first in range(0, len(found), _PAGES_PER_CALL):
        count = min(_PAGES_PER_CALL, len(found) - first)
        pages = address + (first + np.arange(count, dtype=np.uint64)) * np.uint64(PAGE)
        status = np.full(count, -errno.ENOENT, dtype=np.int32)  # what a call that ends early leaves out
        wanted = None if node is None else np.full(count, node, dtype=np.int32)
        system.syscall(
            SYS_MOVE_PAGES,
            0,
            count,
            _array(pages),
            0 if wanted is None else _array(wanted),
            _array(status),
            0 if wanted is None else MPOL_MF_MOVE,
        )
        found[first : first + count] = status
    return found


def _kernel_mode(mode: Mode, nodes: Sequence[int]) -> int:
    if mode == "preferred":
        return MPOL_PREFERRED if len(nodes) == 1 else MPOL_PREFERRED_MANY
    return MPOL_BIND if mode == "bind" else MPOL_INTERLEAVE


def _shares(nodes: Sequence[int], weights: Sequence[int] | None) -> list[int]:
    return _reduced(list(weights)) if weights else [1] * len(nodes)


def _reduced(weights: list[int]) -> list[int]:
    return [weight // gcd(*weights) for weight in weights]


def _whole_pages(device: str, op: str, address: int, nbytes: int) -> None:
    if address % PAGE or nbytes % PAGE or nbytes < PAGE:
        raise Misaligned(device, op, f"{nbytes} bytes at {address:#x}; allowed: whole pages of {PAGE} bytes")


def _why(error: OSError) -> str:
    number = error.errno or 0
    if number in (errno.EPERM, errno.EACCES):
        return (
            "the process may not call mbind (a container's seccomp profile forbids it unless it has CAP_SYS_NICE: "
            "docker run --cap-add SYS_NICE, or in Kubernetes securityContext.capabilities.add)"
        )
    if number == errno.ENOSYS:
        return "this kernel has no mbind (CONFIG_NUMA is off)"
    return f"mbind on a page of its own: {os.strerror(number)} ({errno.errorcode.get(number, number)})"


def _bits() -> int:
    return 8 * int(_ffi.sizeof("unsigned long"))


def _at(pointer: object) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


def _array(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)
