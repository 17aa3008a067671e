"""The kernel's side of one io_uring, in memory: carries submissions out, and answers them, in a shuffled order.

Stricter than a test would notice otherwise: overrun queues, a ring that another thread enters, two transfers in flight
with one name and a wait without a timeout that nothing can end are failures of the test.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from tierloop.devices.drivers import ring


class Held(Protocol):
    """The answer for a transfer that does not come back yet."""

    cancellable: bool


CarryOut = Callable[[str, int, int, int, int], int | Held]
"""(op, fd, offset, address, nbytes) → bytes moved, minus an errno, or Held."""

_SQ_HEAD, _SQ_TAIL, _CQ_HEAD, _CQ_TAIL, _COMPLETIONS = 0, 4, 24, 28, 64


class FakeRing:
    """Made by io_uring_setup; the memory of its rings is what `mmap` was answered with."""

    def __init__(self, entries: int, params: ctypes.Array[ctypes.c_uint32], features: int) -> None:
        self.entries = 1 << (entries - 1).bit_length()
        self.maps: dict[int, mmap.mmap] = {}
        self._thread = threading.get_ident()
        self._hanging: dict[int, bool] = {}
        self._done: list[tuple[int, int]] = []
        self._late: list[tuple[int, int]] = []
        self._order = _COMPLETIONS + 2 * ring.COMPLETION.size * self.entries
        params[0], params[1], params[5] = self.entries, 2 * self.entries, features
        for i, at in enumerate((_SQ_HEAD, _SQ_TAIL, 8, 12, 16, 20, self._order)):
            params[10 + i] = at
        for i, at in enumerate((_CQ_HEAD, _CQ_TAIL, 32, 36, 40, _COMPLETIONS)):
            params[20 + i] = at

    def let_go(self) -> None:
        """Whatever hangs fails with EIO."""
        self._done += [(user_data, -errno.EIO) for user_data in self._hanging]
        self._hanging.clear()

    def enter(
        self,
        to_submit: int,
        min_complete: int,
        flags: int,
        argument: int,
        size: int,
        carry_out: CarryOut,
        shuffle: random.Random,
    ) -> int:
        """io_uring_enter. Never waits: if what is asked for is not there, the time is up at once."""
        if threading.get_ident() != self._thread:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        words = self.maps[ring.RINGS_OFFSET]
        head, ready = self._word(_SQ_HEAD), (self._word(_SQ_TAIL) - self._word(_SQ_HEAD)) & 0xFFFFFFFF
        assert ready <= self.entries, "the submission queue was overrun"
        taken = min(to_submit, ready)
        self._done += self._late
        self._late.clear()
        indices = [self._word(self._order + 4 * ((head + i) & (self.entries - 1))) for i in range(taken)]
        shuffle.shuffle(indices)
        for index in indices:
            at = index * ring.SUBMISSION.size
            self._take(ring.SUBMISSION.unpack_from(self.maps[ring.ENTRIES_OFFSET], at), carry_out)
        struct.pack_into("I", words, _SQ_HEAD, (head + taken) & 0xFFFFFFFF)
        shuffle.shuffle(self._done)
        for user_data, result in self._done:
            self._complete(user_data, result)
        self._done.clear()
        if (self._word(_CQ_TAIL) - self._word(_CQ_HEAD)) & 0xFFFFFFFF < min_complete:
            assert flags & ring.EXT_ARG, "this wait has no timeout and nothing can end it"
            assert size == 24
            assert ctypes.c_uint64.from_address(argument + 16).value, "this wait has no timeout and nothing can end it"
            if not taken:  # as in Linux: a timeout is not reported by a call that has submitted something
                raise OSError(errno.ETIME, os.strerror(errno.ETIME))
        return taken

    def _take(self, entry: tuple[int, ...], carry_out: CarryOut) -> None:
        opcode, _, _, fd, offset, address, nbytes, op_flags, user_data = entry
        if opcode == ring.ASYNC_CANCEL:
            if self._hanging.get(address):
                del self._hanging[address]
                self._done.append((address, -errno.ECANCELED))
                self._late.append((user_data, 0))  # a cancellation may be answered after what it has cancelled
            else:
                self._done.append((user_data, -errno.EALREADY if address in self._hanging else -errno.ENOENT))
            return
        op = {ring.READ: "read", ring.WRITE: "write", ring.FSYNC: "sync"}[opcode]
        assert op != "sync" or op_flags == ring.DATASYNC
        result = carry_out(op, fd, offset, address, nbytes)
        if isinstance(result, int):
            self._done.append((user_data, result))
        else:
            assert user_data not in self._hanging, "two transfers in flight with one name"
            self._hanging[user_data] = result.cancellable

    def _complete(self, user_data: int, result: int) -> None:
        tail = self._word(_CQ_TAIL)
        assert (tail - self._word(_CQ_HEAD)) & 0xFFFFFFFF < 2 * self.entries, "the completion queue overflows"
        at = _COMPLETIONS + ring.COMPLETION.size * (tail & (2 * self.entries - 1))
        ring.COMPLETION.pack_into(self.maps[ring.RINGS_OFFSET], at, user_data, result, 0)
        struct.pack_into("I", self.maps[ring.RINGS_OFFSET], _CQ_TAIL, (tail + 1) & 0xFFFFFFFF)

    def _word(self, offset: int) -> int:
        return int(struct.unpack_from("I", self.maps[ring.RINGS_OFFSET], offset)[0])
