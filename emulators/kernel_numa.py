"""The system calls of NUMA memory for `ModelKernel`: policies of ranges, pages on nodes, and memory that is mapped.

The bytes are real memory of this process; what is made up is on which node each page lies. It answers the system calls
that devices/drivers/numa.py and numa_mapping.py make: mbind, get_mempolicy, move_pages, mmap and munmap of anonymous
memory, madvise, and sched_setaffinity. What must hold, as on Linux:

- An address that is not on a page's boundary is EINVAL. Nodes of a mask that are not there, have no memory or are not
  the process's are dropped silently, and if none is left it is EINVAL; move_pages says ENODEV and EACCES. A mask is cut
  to one bit less than it is said to have. Memory that is not mapped is EFAULT. What the container forbids is EPERM,
  checked before anything else.
- Pages lie where numa_pages.py says, and pinned pages do not move (EBUSY).

Touching is seen where the kernel does it (MADV_POPULATE_WRITE). Stores of the process are not seen: with
`populates=False` there is no such call, as before Linux 5.14, and pages count as touched, from the node `home`, when
they are first asked for.

The back door: what numa_pages.py has, `forbid` and `permit`, `bound_to` (the affinity that threads asked for).
"""

from __future__ import annotations

import ctypes
import errno
import mmap as mmap_module
from collections.abc import Iterable, Mapping
from contextlib import suppress

from tierloop.devices.drivers import numa, numa_mapping
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.emulators.kernel import ModelKernel, failure
from tierloop.emulators.numa_pages import DEFAULT, MPOL_LOCAL, PAGE, Memory, NumaPages, Policy

_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_MOST_BITS = PAGE * 8
_MODES = {
    numa.MPOL_DEFAULT,
    MPOL_LOCAL,
    numa.MPOL_PREFERRED,
    numa.MPOL_BIND,
    numa.MPOL_INTERLEAVE,
    numa.MPOL_PREFERRED_MANY,
    numa.MPOL_WEIGHTED_INTERLEAVE,
}
_HUGETLB = 0x40000
_WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
_ADVICE_ALLOWED = {numa_mapping.MADV_HUGEPAGE, numa_mapping.MADV_NOHUGEPAGE}
_DONTNEED = 4
"""madvise: pages go, and read as zeros when they are touched again (MADV_DONTNEED)."""
_NODES_BELOW = 64
_STATIC_NODES = 0x8000
_MOVE_MASK = 0b110
_LOOK_NBYTES = 1 << 30
_seen = (ctypes.c_ubyte * (_LOOK_NBYTES // PAGE))()
"""Where the kernel writes which pages are there; nobody reads it, so that all may share it."""


class NumaMemory(NumaPages):
    """See the top of the file."""

    def __init__(
        self,
        nodes: Mapping[int, Memory],
        home: int = 0,
        populates: bool = True,
        distances: Mapping[int, Mapping[int, int]] | None = None,
    ) -> None:
        super().__init__(nodes, home, distances)
        self.bound_to: list[frozenset[int]] = []
        self._populates = populates
        self._forbidden: dict[str, int] = {}
        self._mappings: dict[int, tuple[mmap_module.mmap, int, int]] = {}
        self._kernel: ModelKernel | None = None

    @classmethod
    def of(cls, kernel: ModelKernel, populates: bool = True) -> NumaMemory:
        """The memory that the kernel's tree shows, attached to it."""
        shown = numa_topology(kernel)
        nodes = {
            n: Memory(node.free_nbytes, node.movable_nbytes > 0, n in shown.allowed_nodes)
            for n, node in shown.nodes.items()
        }
        distances = {n: node.distances for n, node in shown.nodes.items()}
        made = cls(nodes, min(shown.with_cpus, default=0), populates, distances)
        for n in nodes:
            with suppress(OSError):
                made.weights[n] = int(kernel.read_text(f"{_WEIGHTS}/node{n}"))
        made.attach(kernel)
        return made

    def attach(self, kernel: ModelKernel) -> None:
        """Answer this kernel's system calls."""
        self._kernel = kernel
        kernel.answer(numa.SYS_MBIND, self._mbind)
        kernel.answer(numa.SYS_GET_MEMPOLICY, self._get_mempolicy)
        kernel.answer(numa.SYS_MOVE_PAGES, self._move_pages)
        kernel.answer(numa.SYS_MADVISE, self._madvise)
        kernel.answer(numa_mapping.SYS_MMAP, self._mmap)
        kernel.answer(numa_mapping.SYS_MUNMAP, self._munmap)
        kernel.answer(numa_mapping.SYS_SCHED_SETAFFINITY, self._setaffinity)

    # the back door

    def forbid(self, call: str, number: int = errno.EPERM) -> None:
        """Let every mbind, get_mempolicy, move_pages or madvise fail from now on, as in a container."""
        self._forbidden[call] = number

    def permit(self, call: str) -> None:
        """Let a call work again."""
        self._forbidden.pop(call, None)

    # system calls

    def _mbind(self, address: int, nbytes: int, mode: int, mask: int, maxnode: int, flags: int) -> int:
        self._permitted("mbind")
        policy, length = mode & ~numa.MPOL_MODE_FLAGS, -(-nbytes // PAGE) * PAGE
        if policy not in _MODES or mode & numa.MPOL_MODE_FLAGS & ~_STATIC_NODES:
            raise failure(errno.EINVAL)
        nodes = self._read_mask(mask, maxnode)
        if address % PAGE or flags & ~0b111 or length < 0:
            raise failure(errno.EINVAL)
        if length == 0:  # before it looks at the nodes
            return 0
        made = self._policy_of(policy, nodes)
        self._mapped(address, length)
        self.rule(address, length, made)
        return 0

    def _policy_of(self, mode: int, nodes: list[int]) -> Policy:
        if mode == numa.MPOL_PREFERRED and not nodes:
            return Policy(MPOL_LOCAL, ())
        usable = self._usable(nodes)
        if mode in (numa.MPOL_DEFAULT, MPOL_LOCAL):
            if nodes:
                raise failure(errno.EINVAL)
        elif not usable:
            raise failure(errno.EINVAL)
        return Policy(mode, usable[:1] if mode == numa.MPOL_PREFERRED else usable)

    def _get_mempolicy(self, mode: int, mask: int, maxnode: int, address: int, flags: int, *_: int) -> int:
        self._permitted("get_mempolicy")
        if flags & ~0b111 or (mask and not _NODES_BELOW <= maxnode <= _MOST_BITS):
            raise failure(errno.EINVAL)
        if not flags & numa.MPOL_F_ADDR:
            if address:
                raise failure(errno.EINVAL)
            found = DEFAULT
        else:
            self._mapped(address // PAGE * PAGE, PAGE)
            found = self.policy(address // PAGE)
        if mode:
            self._mapped(mode, 4)
            ctypes.c_int.from_address(mode).value = found.mode
        if mask:
            self._mapped(mask, -(-(maxnode - 1) // _WORD) * _WORD // 8)
            _write_mask(mask, maxnode, found.nodes)
        return 0

    def _move_pages(self, pid: int, count: int, pages: int, nodes: int, status: int, flags: int) -> int:
        self._permitted("move_pages")
        if flags & ~_MOVE_MASK or count < 0:
            raise failure(errno.EINVAL)
        if pid:
            raise failure(errno.EPERM)
        for pointer, size in ((pages, 8), (status, 4), (nodes or status, 4)):
            self._mapped(pointer, size * count)
        addresses = (ctypes.c_uint64 * count).from_address(pages)
        answers = (ctypes.c_int32 * count).from_address(status)
        wanted = list((ctypes.c_int32 * count).from_address(nodes)) if nodes else None
        for node in wanted or ():
            if node not in self.nodes or not self._has_memory(node):
                raise failure(errno.ENODEV)
            if not self.nodes[node].allowed:
                raise failure(errno.EACCES)
        for index, address in enumerate(addresses):
            answers[index] = self._moved(address, wanted[index] if wanted else None)
        return 0

    def _madvise(self, address: int, nbytes: int, advice: int, *_: int) -> int:
        self._permitted("madvise")
        if address % PAGE or nbytes < 0 or (advice == numa.MADV_POPULATE_WRITE and not self._populates):
            raise failure(errno.EINVAL)
        if advice == numa.MADV_POPULATE_WRITE:
            self._mapped(address, nbytes, errno.ENOMEM)
            self.touch(address, nbytes)
        elif advice == _DONTNEED:
            self._mapped(address, nbytes, errno.ENOMEM)
            self.drop(address, nbytes)
            if _give_back(address, nbytes, advice) != 0:
                raise failure(ctypes.get_errno())
        elif advice not in _ADVICE_ALLOWED:
            raise failure(errno.EINVAL)
        return 0

    def _mmap(self, address: int, nbytes: int, _: int, flags: int, fd: int, offset: int) -> int:
        page = 1 << (flags >> 26 & 0x3F) if flags & _HUGETLB else PAGE
        if address or nbytes <= 0 or offset or fd != -1 or nbytes % page:
            raise failure(errno.EINVAL)
        if page != PAGE:
            self._take_huge(page, nbytes // page)
        elif nbytes > sum(memory.nbytes for memory in self.nodes.values()):
            raise failure(errno.ENOMEM)
        mapping = mmap_module.mmap(
            -1, nbytes + page, flags=mmap_module.MAP_PRIVATE | mmap_module.MAP_ANONYMOUS
        )  # a page more: huge ones lie on their own grid
        start = -(-ctypes.addressof(ctypes.c_char.from_buffer(mapping)) // page) * page
        self._mappings[start] = (mapping, nbytes, page)
        self.rule(start, nbytes, DEFAULT)
        return start

    def _munmap(self, address: int, nbytes: int, *_: int) -> int:
        if address not in self._mappings or self._mappings[address][1] != nbytes:
            raise failure(errno.EINVAL)
        page_nbytes = self._mappings.pop(address)[2]
        self.forget(address, nbytes)
        if page_nbytes != PAGE:
            self._take_huge(page_nbytes, -(nbytes // page_nbytes))
        return 0

    def _setaffinity(self, pid: int, nbytes: int, mask: int, *_: int) -> int:
        if pid or not 0 < nbytes <= PAGE:
            raise failure(errno.EINVAL)
        self._mapped(mask, nbytes)
        cores = frozenset(_bits_at(mask, nbytes * 8))
        shown = numa_topology(self._kernel) if self._kernel is not None else None
        if shown is not None and not cores & shown.allowed_cpus:
            raise failure(errno.EINVAL)
        self.bound_to.append(cores)
        return 0

    # inside

    def _permitted(self, call: str) -> None:
        if call in self._forbidden:
            raise failure(self._forbidden[call])

    def _read_mask(self, address: int, maxnode: int) -> list[int]:
        """The nodes of a mask as Linux reads it: one bit less than it is told."""
        bits = maxnode - 1
        if not address or bits <= 0:
            return []
        if bits > _MOST_BITS:
            raise failure(errno.EINVAL)
        self._mapped(address, -(-bits // _WORD) * _WORD // 8)
        return _bits_at(address, bits)

    def _has_memory(self, node: int) -> bool:
        return node in self.nodes and self.nodes[node].nbytes > 0

    def _usable(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Linux drops the nodes of a mask that have no memory, or that the process may not use, and says nothing."""
        return tuple(node for node in nodes if self._has_memory(node) and self.nodes[node].allowed)

    def _mapped(self, address: int, nbytes: int, number: int = errno.EFAULT) -> None:
        """Raises OSError for what is not memory of this process; the kernel itself is asked."""
        if address < 0 or nbytes < 0 or address + nbytes >= 1 << 63:
            raise failure(number)
        for start, (_, length, _) in list(self._mappings.items()):
            if start <= address and address + nbytes <= start + length:
                return
        first = address // PAGE * PAGE
        for piece in range(first, address + nbytes, _LOOK_NBYTES):
            length = min(_LOOK_NBYTES, address + nbytes - piece)
            if _mincore(piece, length, ctypes.addressof(_seen)) != 0:
                raise failure(number)

    def _moved(self, address: int, node: int | None) -> int:
        page = address // PAGE
        try:
            self._mapped(page * PAGE, PAGE)
        except OSError:
            return -errno.EFAULT
        if page not in self.where:
            if self._populates:
                return -errno.ENOENT
            self.touch(page * PAGE, PAGE)
        if node is not None and node != self.where[page]:
            if page in self.pinned:
                return -errno.EBUSY
            if not self.has_room(node):
                return -errno.ENOMEM
            self.put(page, node)
        return self.where[page]

    def _take_huge(self, page: int, count: int) -> None:
        """Take pages out of the machine's pool, or give them back. Raises OSError: ENOMEM."""
        path = f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/free_hugepages"
        if self._kernel is None or path not in self._kernel.tree.files:
            raise failure(errno.EINVAL)
        left = int(self._kernel.tree.files[path]) - count
        if left < 0:
            raise failure(errno.ENOMEM)
        self._kernel.tree.put(path, str(left))


def _bits_at(address: int, bits: int) -> list[int]:
    words = (ctypes.c_ulong * (-(-bits // _WORD))).from_address(address)
    return [bit for bit in range(bits) if words[bit // _WORD] >> bit % _WORD & 1]


def _write_mask(address: int, maxnode: int, nodes: Iterable[int]) -> None:
    words = (ctypes.c_ulong * (-(-(maxnode - 1) // _WORD))).from_address(address)
    for index in range(len(words)):
        words[index] = 0
    for node in nodes:
        words[node // _WORD] |= 1 << node % _WORD


_give_back = ctypes.CDLL(None, use_errno=True).madvise
_give_back.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_give_back.restype = ctypes.c_int
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
_mincore.restype = ctypes.c_int
