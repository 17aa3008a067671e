"""The kernel's side of io_uring, in memory: rings that take entries, hand them on, and answer them in a shuffled order.

`ModelRing` is one ring; `Rings` answers the three system calls of a `ModelKernel` with rings. What carries entries out
is handed in: it answers each once, at once or later, and says of one that hangs whether it may be cancelled.

Stricter than a driver would notice otherwise: an overrun queue, two entries in flight with one name, and a wait without
a timeout that nothing can end are an AssertionError; a ring that another thread enters is EEXIST, as with SINGLE_ISSUER
in Linux; and with DEFER_TASKRUN nothing comes back unless events are asked for. What is submitted at once is carried
out in a shuffled order, and what is ready at once comes back in one. A ring never waits in real time: `pass_time` lets
the time of what lies beneath pass, and where nothing will happen in time, the time is up at once (ETIME).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tierloop.devices.drivers import ring
from tierloop.devices.system import SYS_IO_URING_ENTER, SYS_IO_URING_SETUP
from tierloop.emulators.kernel import Absent, ModelKernel, failure

SYS_IO_URING_REGISTER = 427
READ_FIXED, WRITE_FIXED, URING_CMD = 4, 5, 46
CQ_SIZE, CLAMP, SUBMIT_ALL, COOP_TASKRUN, SQE128, CQE32 = 1 << 3, 1 << 4, 1 << 7, 1 << 8, 1 << 10, 1 << 11
KNOWN_SETUP = CLAMP | SUBMIT_ALL | COOP_TASKRUN | SQE128 | CQE32 | ring.SINGLE_ISSUER | ring.DEFER_TASKRUN
FEATURES = ring.FEATURE_SINGLE_MMAP | 1 << 1 | ring.FEATURE_EXT_ARG
"""One mapping for both rings, nothing is dropped, waits take a timeout."""
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_MOST_ENTRIES, _MOST_BUFFERS, _LARGEST_BUFFER = 32768, 16384, 1 << 30
_SQ_HEAD, _SQ_TAIL, _CQ_HEAD, _CQ_TAIL, _COMPLETIONS = 0, 4, 24, 28, 64
_ENTRY = struct.Struct("=BBHiQQIIQH")
_PAYLOAD = 48
_FOREVER_NS = 1 << 61


class Held(Protocol):
    """An entry that does not come back yet."""

    @property
    def cancellable(self) -> bool:
        """Whether the kernel would let go of it."""


class Submission(NamedTuple):
    """An entry of the submission ring. `payload` is what follows the first 48 bytes: 16 bytes, or 80 with SQE128."""

    opcode: int
    flags: int
    priority: int
    fd: int
    offset: int
    address: int
    nbytes: int
    op_flags: int
    user_data: int
    buffer: int
    payload: bytes


Reply = Callable[[int, int], None]
"""Called once with the result (minus an errno if it failed) and the second word of a wide completion."""
CarryOut = Callable[[Submission, Reply], Held | None]
PassTime = Callable[[int], int | None]
"""Lets at most so many ns pass until something happens; returns how many did, None if nothing will happen by then."""


class ModelRing(Absent):
    """Made by io_uring_setup. `params` is its structure, which is filled in; `flags` are those of the setup."""

    def __init__(
        self,
        entries: int,
        params: ctypes.Array[ctypes.c_uint32],
        features: int,
        carry_out: CarryOut,
        shuffle: random.Random,
        pass_time: PassTime = lambda most_ns: None,
        let_go: Callable[[ModelRing], None] = lambda closed: None,
    ) -> None:
        self.entries = 1 << (entries - 1).bit_length()
        self.flags = int(params[2])
        self.maps: dict[int, mmap.mmap] = {}
        self.buffers: list[tuple[int, int]] | None = None
        self._carry_out, self._shuffle, self._pass_time, self._let_go = carry_out, shuffle, pass_time, let_go
        self._thread = threading.get_ident()
        self._hanging: dict[int, tuple[object, bool]] = {}
        self._done: list[tuple[int, int, int]] = []
        self._late: list[tuple[int, int, int]] = []
        self._entry_nbytes = 128 if self.flags & SQE128 else 64
        self._completion_nbytes = 32 if self.flags & CQE32 else 16
        self._order = _COMPLETIONS + 2 * self._completion_nbytes * self.entries
        params[0], params[1], params[5] = self.entries, 2 * self.entries, features
        for i, at in enumerate((_SQ_HEAD, _SQ_TAIL, 8, 12, 16, 20, self._order)):
            params[10 + i] = at
        for i, at in enumerate((_CQ_HEAD, _CQ_TAIL, 32, 36, 40, _COMPLETIONS)):
            params[20 + i] = at

    def mmap(self, nbytes: int, offset: int) -> mmap.mmap:
        """The memory of the rings, or of the entries."""
        room = {
            ring.RINGS_OFFSET: self._order + 4 * self.entries,
            ring.ENTRIES_OFFSET: self._entry_nbytes * self.entries,
        }
        if offset not in room or nbytes > -(-room[offset] // mmap.PAGESIZE) * mmap.PAGESIZE:
            raise failure(errno.EINVAL)
        self.maps[offset] = mmap.mmap(-1, nbytes)
        return self.maps[offset]

    def closed(self) -> None:
        """Whoever carries out its entries must not touch their memory any more."""
        self._hanging.clear()
        self._let_go(self)

    def fail_hanging(self) -> None:
        """Whatever hangs fails with EIO."""
        self._done += [(user_data, -errno.EIO, 0) for user_data in self._hanging]
        self._hanging.clear()

    def enter(self, to_submit: int, min_complete: int, flags: int, argument: int, size: int) -> int:
        """io_uring_enter: take entries, let time pass until enough has come back, answer."""
        if threading.get_ident() != self._thread:
            raise failure(errno.EEXIST)
        if flags & ~(ring.GETEVENTS | ring.EXT_ARG):
            raise failure(errno.EINVAL)
        taken = self._submit(to_submit)
        if not flags & ring.GETEVENTS:
            if not self.flags & ring.DEFER_TASKRUN:
                self._deliver()
            return taken
        timeout_ns = _timeout(flags, argument, size)
        left_ns = _FOREVER_NS if timeout_ns is None else timeout_ns
        self._deliver()
        while self._ready < min_complete:
            passed = self._pass_time(left_ns)
            self._deliver()
            if passed is None:
                break
            left_ns = max(left_ns - passed, 0)
        if self._ready < min_complete:
            assert timeout_ns, "this wait has no timeout and nothing can end it"
            if (
                not taken and not self._ready
            ):  # as in Linux: a timeout is not reported by a call that has submitted something
                raise failure(errno.ETIME)
        return taken

    def register(self, opcode: int, buffers: list[tuple[int, int]]) -> int:
        """io_uring_register, for buffers: (address, bytes) each, which can be reached."""
        if opcode == _UNREGISTER_BUFFERS:
            if self.buffers is None:
                raise failure(errno.ENXIO)
            self.buffers = None
        else:
            if self.buffers is not None:
                raise failure(errno.EBUSY)
            self.buffers = buffers
        return 0

    def inside_buffer(self, submission: Submission, address: int, nbytes: int) -> bool:
        """Whether bytes lie in the registered buffer that an entry names."""
        if self.buffers is None or submission.buffer >= len(self.buffers):
            return False
        start, room = self.buffers[submission.buffer]
        return start <= address and address + nbytes <= start + room

    # inside

    def _submit(self, to_submit: int) -> int:
        head, ready = self._word(_SQ_HEAD), (self._word(_SQ_TAIL) - self._word(_SQ_HEAD)) & 0xFFFFFFFF
        assert ready <= self.entries, "the submission queue was overrun"
        taken = min(to_submit, ready)
        self._done += self._late
        self._late.clear()
        indices = [self._word(self._order + 4 * ((head + i) & (self.entries - 1))) for i in range(taken)]
        self._shuffle.shuffle(indices)
        for index in indices:
            assert index < self.entries, f"entry {index} of a ring of {self.entries}"
            raw = bytes(self.maps[ring.ENTRIES_OFFSET][index * self._entry_nbytes : (index + 1) * self._entry_nbytes])
            self._take(Submission._make((*_ENTRY.unpack_from(raw), raw[_PAYLOAD:])))
        struct.pack_into("I", self.maps[ring.RINGS_OFFSET], _SQ_HEAD, (head + taken) & 0xFFFFFFFF)
        return taken

    def _take(self, submission: Submission) -> None:
        name = submission.user_data
        if submission.opcode == ring.ASYNC_CANCEL:
            self._cancel(name, submission.address)
            return
        assert name not in self._hanging, "two entries in flight with one name"
        token = object()
        self._hanging[name] = token, False

        def reply(result: int, word: int = 0) -> None:
            if self._hanging.get(name, (None, False))[0] is token:
                del self._hanging[name]
                self._done.append((name, result, word))

        held = self._carry_out(submission, reply)
        if held is not None:
            self._hanging[name] = token, held.cancellable

    def _cancel(self, name: int, target: int) -> None:
        if target not in self._hanging:
            self._done.append((name, -errno.ENOENT, 0))
        elif not self._hanging[target][1]:
            self._done.append((name, -errno.EALREADY, 0))
        else:
            del self._hanging[target]
            self._done.append((target, -errno.ECANCELED, 0))
            self._late.append((name, 0, 0))  # a cancellation may be answered after what it has cancelled

    def _deliver(self) -> None:
        self._shuffle.shuffle(self._done)
        for user_data, result, word in self._done:
            tail = self._word(_CQ_TAIL)
            assert self._ready < 2 * self.entries, "the completion queue overflows"
            at = _COMPLETIONS + self._completion_nbytes * (tail & (2 * self.entries - 1))
            words = self.maps[ring.RINGS_OFFSET]
            ring.COMPLETION.pack_into(words, at, user_data, result, 0)
            if self._completion_nbytes == 32:
                struct.pack_into("=QQ", words, at + 16, word, 0)
            struct.pack_into("I", words, _CQ_TAIL, (tail + 1) & 0xFFFFFFFF)
        self._done.clear()

    @property
    def _ready(self) -> int:
        return (self._word(_CQ_TAIL) - self._word(_CQ_HEAD)) & 0xFFFFFFFF

    def _word(self, offset: int) -> int:
        return int(struct.unpack_from("I", self.maps[ring.RINGS_OFFSET], offset)[0])


class Rings:
    """The io_uring of a kernel. `carry_out` is told the ring, too; `check` raises OSError for memory that is not there.

    `let_go` is called when a ring is closed.
    """

    def __init__(
        self,
        kernel: ModelKernel,
        carry_out: Callable[[ModelRing, Submission, Reply], Held | None],
        pass_time: PassTime,
        check: Callable[[int, int], None],
        let_go: Callable[[ModelRing], None],
        seed: int = 0,
    ) -> None:
        self._kernel, self._carry_out, self._pass_time = kernel, carry_out, pass_time
        self._check, self._let_go = check, let_go
        self._shuffle = random.Random(seed)
        self.pin: Callable[[int, int], None] = lambda address, nbytes: None
        self.unpin: Callable[[int, int], None] = lambda address, nbytes: None
        """What happens to memory when it is registered, and when it is not any more; `pin` may refuse: OSError."""
        kernel.answer(SYS_IO_URING_SETUP, self._setup)
        kernel.answer(SYS_IO_URING_ENTER, self._enter)
        kernel.answer(SYS_IO_URING_REGISTER, self._register)

    def _setup(self, entries: int, address: int) -> int:
        self._check(address, ring.SETUP.size)
        params = (ctypes.c_uint32 * 30).from_address(address)
        flags = int(params[2])
        if flags & ~KNOWN_SETUP or (flags & ring.DEFER_TASKRUN and not flags & ring.SINGLE_ISSUER):
            raise failure(errno.EINVAL)
        if entries > _MOST_ENTRIES and flags & CLAMP:
            entries = _MOST_ENTRIES
        if not 0 < entries <= _MOST_ENTRIES:
            raise failure(errno.EINVAL)
        made: ModelRing

        def carry_out(submission: Submission, reply: Reply) -> Held | None:
            return self._carry_out(made, submission, reply)

        made = ModelRing(entries, params, FEATURES, carry_out, self._shuffle, self._pass_time, self._closed)
        return self._kernel.install("anon_inode:[io_uring]", made)

    def _enter(self, fd: int, to_submit: int, min_complete: int, flags: int, argument: int = 0, size: int = 0) -> int:
        if flags & ring.EXT_ARG:
            if size != 24:
                raise failure(errno.EINVAL)
            self._check(argument, size)
        return self._ring(fd).enter(to_submit, min_complete, flags, argument, size)

    def _register(self, fd: int, opcode: int, argument: int, count: int) -> int:
        made, buffers = self._ring(fd), []
        if opcode not in (_REGISTER_BUFFERS, _UNREGISTER_BUFFERS):
            raise failure(errno.EINVAL)
        if opcode == _REGISTER_BUFFERS:
            if not 0 < count <= _MOST_BUFFERS:
                raise failure(errno.EINVAL)
            self._check(argument, 16 * count)
            words = (ctypes.c_uint64 * (2 * count)).from_address(argument)
            buffers = [(int(words[2 * i]), int(words[2 * i + 1])) for i in range(count)]
            for address, nbytes in buffers:
                if not address or not 0 < nbytes <= _LARGEST_BUFFER:
                    raise failure(errno.EFAULT)
                self._check(address, nbytes)
        before = made.buffers or []
        result = made.register(opcode, buffers)
        for buffer in before:
            self.unpin(*buffer)
        try:
            for buffer in buffers:
                self.pin(*buffer)
        except OSError:
            self._let_pins_go(made)
            raise
        return result

    def _closed(self, closed: ModelRing) -> None:
        self._let_pins_go(closed)
        self._let_go(closed)

    def _let_pins_go(self, made: ModelRing) -> None:
        for buffer in made.buffers or []:
            self.unpin(*buffer)
        made.buffers = None

    def _ring(self, fd: int) -> ModelRing:
        node = self._kernel.node_of(fd)
        if not isinstance(node, ModelRing):
            raise failure(errno.EOPNOTSUPP)
        return node


def _timeout(flags: int, argument: int, size: int) -> int | None:
    """The timeout of a wait in ns; None if it has none."""
    if not flags & ring.EXT_ARG:
        return None
    if size != 24:
        raise failure(errno.EINVAL)
    at = ctypes.c_uint64.from_address(argument + 16).value
    if not at:
        return None
    seconds, ns = (ctypes.c_int64 * 2).from_address(at)
    if seconds < 0 or not 0 <= ns < 1_000_000_000:
        raise failure(errno.EINVAL)
    return int(min(seconds * 1_000_000_000 + ns, _FOREVER_NS))
