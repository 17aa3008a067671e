"""Soft RDMA of a real kernel: registration, write, read and send over a loop, and a key that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guest.rdma import REMOTE_ACCESS_ERROR, End

pytestmark = pytest.mark.usefixtures("pyverbs")

DEVICE, ADDRESS = "rxe0", "127.0.0.1"


class Loop:
    """Two connected queue pairs on one device, and registered memory of each."""

    def __init__(self) -> None:
        self.near, self.far = End(DEVICE, ADDRESS), End(DEVICE, ADDRESS)
        for mine, other in ((self.near, self.far), (self.far, self.near)):
            mine.connect(other.address)
        self.e = self.near.e

    def memories(self, nbytes: int) -> tuple[Any, Any]:
        """Memory of the near end and of the far end."""
        return self.near.memory(nbytes), self.far.memory(nbytes)


@pytest.fixture
def loop() -> Loop:
    """A loop of its own: a queue pair that failed takes nothing more."""
    return Loop()


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_write_arrives(loop: Loop, nbytes: int) -> None:
    near, far = loop.memories(nbytes)
    near.write("w" * nbytes, nbytes)
    loop.near.post(loop.e.IBV_WR_RDMA_WRITE, near, nbytes, far.buf, far.rkey)
    assert loop.near.statuses() == [0]
    assert far.read(nbytes, 0) == b"w" * nbytes


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_read_brings_the_bytes(loop: Loop, nbytes: int) -> None:
    near, far = loop.memories(nbytes)
    far.write("r" * nbytes, nbytes)
    loop.near.post(loop.e.IBV_WR_RDMA_READ, near, nbytes, far.buf, far.rkey)
    assert loop.near.statuses() == [0]
    assert near.read(nbytes, 0) == b"r" * nbytes


def test_a_message_is_received(loop: Loop) -> None:
    near, far = loop.memories(4096)
    near.write("s" * 4096, 4096)
    loop.far.post_receive(far, 4096)
    loop.near.post(loop.e.IBV_WR_SEND, near, 4096)
    assert loop.near.statuses() == [0]
    assert loop.far.statuses() == [0]
    assert far.read(4096, 0) == b"s" * 4096


def test_a_wrong_key_is_refused(loop: Loop) -> None:
    near, far = loop.memories(4096)
    loop.near.post(loop.e.IBV_WR_RDMA_WRITE, near, 4096, far.buf, far.rkey ^ 0xFF)
    assert loop.near.statuses() == [REMOTE_ACCESS_ERROR]
    assert far.read(4096, 0) == bytes(4096)
