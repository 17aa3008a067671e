"""io_uring by raw system calls: a ring of submissions, a ring of completions.

The kernel and the process share two rings (io_uring(7)). The driver writes 64-byte submission entries, moves the tail,
and enters the kernel, which takes them and answers with 16-byte completion entries. Entries are packed with `struct`,
3 µs per transfer in all: completions come back a few at a time, and NumPy records cost 60 µs per batch.

Memory order. The submission tail is read by the kernel in our own system call, so program order is enough. With
SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1) completions are also written in our own system call. Older kernels may write
them from another core; then reading the tail before the entries needs the strong load order of x86-64, and elsewhere
the ring is refused.

A *wide* ring has entries of 128 bytes and completions of 32 (Linux 5.19): requests of a device's own, such as an NVMe
command, travel in the second half. Buffers that were registered are named by an index, and the kernel need not look
their pages up again for every transfer.

Every wait carries a timeout (EXT_ARG, Linux 5.11); a kernel without it is refused as well, because a wait that nobody
can end has no place here. liburing is not needed.
"""

from __future__ import annotations

import errno
import mmap
import platform
import struct
from contextlib import suppress

from tierloop.devices.drivers.kernel_texts import text_in
from tierloop.devices.drivers.nvme_commands import PAYLOAD
from tierloop.devices.system import SYS_IO_URING_ENTER, SYS_IO_URING_SETUP, System, address_of

SUBMISSION = struct.Struct("=BBHiQQIIQ24x")
"""opcode, flags, ioprio, fd, offset, address, nbytes, op_flags, user_data."""
FIXED = struct.Struct("=BBHiQQIIQH22x")
"""The same with the index of a registered buffer."""
REQUEST = struct.Struct(f"=BBHiIIQIIQHHI{PAYLOAD.size}s8x")
"""opcode, flags, ioprio, fd, request, padding, address, nbytes, request flags, user_data, buffer index, personality,
file index; then what the device is told, here an NVMe command."""
COMPLETION = struct.Struct("=QiI")
"""user_data, result, flags."""
SETUP = struct.Struct("=7I3I10I10I")
"""sq_entries, cq_entries, flags, cpu, idle, features, wq_fd, 3 reserved; then the offsets of the two rings, each as
head, tail, mask, entries, flags, dropped, array (the second: overflow, completions, flags), 3 reserved."""
EXTENDED_WAIT = struct.Struct("=QIIQqq")
"""sigmask, its size, padding, address of the timeout; then the timeout in seconds and ns."""
assert (SUBMISSION.size, COMPLETION.size, SETUP.size, EXTENDED_WAIT.size) == (64, 16, 120, 40)
assert (FIXED.size, REQUEST.size) == (64, 128)

FSYNC, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, READ, WRITE, DEVICE_REQUEST = 3, 4, 5, 14, 22, 23, 46
DATASYNC = 1
SYS_IO_URING_REGISTER = 427
REGISTER_BUFFERS, UNREGISTER_BUFFERS = 0, 1
WIDE_ENTRIES, WIDE_COMPLETIONS = 1 << 10, 1 << 11
SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13
GETEVENTS, EXT_ARG = 1 << 0, 1 << 3
FEATURE_SINGLE_MMAP, FEATURE_EXT_ARG = 1 << 0, 1 << 8
RINGS_OFFSET, ENTRIES_OFFSET = 0, 0x10000000


class Ring:
    """The two rings of one io_uring instance; used by the thread that made it only."""

    def __init__(self, system: System, entries: int, wide: bool = False) -> None:
        """Raises OSError: ENOSYS (no io_uring), EPERM (disabled), ENOMEM (locked memory), EOPNOTSUPP (too old)."""
        self._system = system
        self._entry, self._answer = (128, 32) if wide else (SUBMISSION.size, COMPLETION.size)
        self._fd, params = _setup(system, entries, wide)
        maps: list[mmap.mmap] = []
        try:
            if not params[5] & FEATURE_SINGLE_MMAP or not params[5] & FEATURE_EXT_ARG:
                raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring cannot wait with a timeout (Linux 5.11 can)")
            self.entries, self._cq_entries = params[0], params[1]
            sq, cq = params[10:20], params[20:30]
            nbytes = max(sq[6] + 4 * self.entries, cq[5] + self._answer * self._cq_entries)
            maps.append(system.mmap(self._fd, nbytes, RINGS_OFFSET))
            maps.append(system.mmap(self._fd, self._entry * self.entries, ENTRIES_OFFSET))
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
        self._registered = False
        self._wait = bytearray(EXTENDED_WAIT.size)
        self._wait_at = address_of(self._wait)

    def push(
        self, opcode: int, fd: int, offset: int, address: int, nbytes: int, user_data: int, op_flags: int = 0
    ) -> None:
        """Write one submission; there must be room (`entries`, less those pushed and not yet taken by the kernel)."""
        tail = self._words[self._sq_tail]
        at = (tail & (self.entries - 1)) * self._entry
        SUBMISSION.pack_into(self._submissions, at, opcode, 0, 0, fd, offset, address, nbytes, op_flags, user_data)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def push_fixed(
        self, opcode: int, fd: int, offset: int, address: int, nbytes: int, user_data: int, index: int
    ) -> None:
        """As `push`, for memory inside the registered buffer of that index."""
        tail = self._words[self._sq_tail]
        at = (tail & (self.entries - 1)) * self._entry
        FIXED.pack_into(self._submissions, at, opcode, 0, 0, fd, offset, address, nbytes, 0, user_data, index)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def push_request(self, fd: int, request: int, user_data: int, payload: bytes) -> None:
        """As `push`, for a request of the device behind fd; the ring is wide."""
        tail = self._words[self._sq_tail]
        at = (tail & (self.entries - 1)) * self._entry
        head = (DEVICE_REQUEST, 0, 0, fd, request, 0, 0, 0, 0, user_data, 0, 0, 0)
        REQUEST.pack_into(self._submissions, at, *head, payload)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def register(self, buffers: list[tuple[int, int]]) -> None:
        """Put (address, nbytes) each in the place of what was registered; nothing is in flight.

        Raises OSError: ENOMEM (RLIMIT_MEMLOCK), EFAULT, EINVAL, EOPNOTSUPP (memory that cannot be pinned); then nothing
        is registered any more.
        """
        if self._registered:
            self._registered = False
            self._system.syscall(SYS_IO_URING_REGISTER, self._fd, UNREGISTER_BUFFERS, 0, 0)
        if buffers:
            vectors = bytearray(struct.pack(f"={2 * len(buffers)}Q", *(word for pair in buffers for word in pair)))
            call = (self._fd, REGISTER_BUFFERS, address_of(vectors), len(buffers))
            self._system.syscall(SYS_IO_URING_REGISTER, *call)
            self._registered = True

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
        words, mask, at, answer = self._words, self._cq_entries - 1, self._cq_at, self._answer
        head, tail = words[self._cq_head], words[self._cq_tail]
        taken = []
        while head != tail:
            user_data, result, _ = COMPLETION.unpack_from(self._rings, at + (head & mask) * answer)
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
            entry = SUBMISSION.unpack_from(self._submissions, (tail & (self.entries - 1)) * self._entry)
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


def _setup(system: System, entries: int, wide: bool) -> tuple[int, tuple[int, ...]]:
    width = WIDE_ENTRIES | WIDE_COMPLETIONS if wide else 0
    for flags in (SINGLE_ISSUER | DEFER_TASKRUN, 0):
        if flags == 0 and platform.machine() not in ("x86_64", "AMD64"):
            break
        buffer = bytearray(SETUP.size)
        SETUP.pack_into(buffer, 0, 0, 0, flags | width, *(0,) * 27)
        try:
            fd = system.syscall(SYS_IO_URING_SETUP, entries, address_of(buffer))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return fd, SETUP.unpack(buffer)
    if wide:
        raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring has no wide entries (Linux 5.19; off x86-64 6.1)")
    raise OSError(errno.EOPNOTSUPP, "this machine needs Linux 6.1 to use io_uring without memory barriers")


def refusal(system: System, error: OSError) -> str:
    """Why there is no ring, in words that say what would change it."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    if error.errno == errno.ENOSYS:
        advice = "this kernel or container has no io_uring"
    elif error.errno in (errno.EPERM, errno.EACCES):
        disabled = text_in(system, "/proc/sys/kernel/io_uring_disabled")
        if disabled in ("1", "2"):
            advice = f"kernel.io_uring_disabled is {disabled}; `sysctl kernel.io_uring_disabled=0` allows it"
        else:
            advice = "a security policy forbids it (often the seccomp filter of a container)"
    elif error.errno == errno.ENOMEM:
        advice = f"no memory for the rings; the limit on locked memory is {locked_limit(system)} bytes (`ulimit -l`)"
    else:
        advice = str(error)
    return f"io_uring is refused ({name}): {advice}"


def locked_limit(system: System) -> str:
    """How many bytes this process may lock (RLIMIT_MEMLOCK), as the kernel says it."""
    for line in text_in(system, "/proc/self/limits").splitlines():
        words = line.split()
        if line.startswith("Max locked memory") and len(words) > 3:
            return words[3]
    return "unknown"
