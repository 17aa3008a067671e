"""Soft RDMA between two guests on a wire: what one guest's queue pair does to the memory of the other."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guest.rdma import REMOTE_ACCESS_ERROR, Address, End

pytestmark = pytest.mark.usefixtures("pyverbs")

DEVICE = os.environ.get("TIERLOOP_GUEST_RDMA", "rxe1")
APPEARS_S = 120.0


class Far:
    """The other guest: a connection over which it is asked."""

    def __init__(self, where: str) -> None:
        address, _, port = where.rpartition(":")
        self._socket = _connected(address, int(port))
        self._stream = self._socket.makefile("rw")

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """What it answers."""
        self._stream.write(json.dumps({"do": do, **more}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        assert line, f"the other guest left at {do}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + APPEARS_S
    while True:
        try:
            return socket.create_connection((address, port), 30.0)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Pair:
    """A connected queue pair here and there."""

    def __init__(self, near: End, far: Far) -> None:
        self.near, self.far = near, far
        mine = near.address
        told = far.ask("connect", number=mine.number, gid=mine.gid)
        self.remote, self.key, self.nbytes = told["remote"], told["key"], told["nbytes"]
        near.connect(Address(told["number"], told["gid"]))


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A pair of its own: a queue pair that failed takes nothing more."""
    where = os.environ.get("TIERLOOP_GUEST_PEER")
    if not where:
        pytest.skip("no second guest is on a wire with this one (TIERLOOP_GUEST_PEER)")
    far = Far(where)
    yield Pair(End(DEVICE, os.environ["TIERLOOP_GUEST_WIRE"]), far)
    far.close()


def bytes_of(seed: int, nbytes: int) -> bytes:
    """Seeded random bytes."""
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_write_arrives_in_the_other_guest(pair: Pair, nbytes: int) -> None:
    data, local = bytes_of(nbytes, nbytes), pair.near.memory(nbytes)
    local.write(data, nbytes)
    pair.near.post(pair.near.e.IBV_WR_RDMA_WRITE, local, nbytes, pair.remote, pair.key)
    assert pair.near.statuses() == [0]
    assert pair.far.ask("get", nbytes=nbytes)["data"] == data.hex()


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_read_brings_the_bytes_of_the_other_guest(pair: Pair, nbytes: int) -> None:
    data, local = bytes_of(nbytes + 1, nbytes), pair.near.memory(nbytes)
    pair.far.ask("put", data=data.hex())
    pair.near.post(pair.near.e.IBV_WR_RDMA_READ, local, nbytes, pair.remote, pair.key)
    assert pair.near.statuses() == [0]
    assert local.read(nbytes, 0) == data


def test_a_message_is_received_by_the_other_guest(pair: Pair) -> None:
    data, local = bytes_of(3, 4096), pair.near.memory(4096)
    local.write(data, 4096)
    pair.far.ask("receive", nbytes=4096)
    pair.near.post(pair.near.e.IBV_WR_SEND, local, 4096)
    assert pair.near.statuses() == [0]
    assert pair.far.ask("received")["statuses"] == [0]
    assert pair.far.ask("get", nbytes=4096)["data"] == data.hex()


def test_a_key_that_the_other_guest_did_not_give_is_refused(pair: Pair) -> None:
    before = pair.far.ask("get", nbytes=4096)["data"]
    local = pair.near.memory(4096)
    local.write(b"w" * 4096, 4096)
    pair.near.post(pair.near.e.IBV_WR_RDMA_WRITE, local, 4096, pair.remote, pair.key ^ 0xFF)
    assert pair.near.statuses() == [REMOTE_ACCESS_ERROR]
    assert pair.far.ask("get", nbytes=4096)["data"] == before


def test_memory_that_the_other_guest_withdrew_cannot_be_read(pair: Pair) -> None:
    local = pair.near.memory(4096)
    pair.far.ask("withdraw")
    pair.near.post(pair.near.e.IBV_WR_RDMA_READ, local, 4096, pair.remote, pair.key)
    assert pair.near.statuses() == [REMOTE_ACCESS_ERROR]


def test_a_write_past_the_end_of_the_other_guests_memory_is_refused(pair: Pair) -> None:
    local = pair.near.memory(4096)
    pair.near.post(pair.near.e.IBV_WR_RDMA_WRITE, local, 4096, pair.remote + pair.nbytes - 4095, pair.key)
    assert pair.near.statuses() == [REMOTE_ACCESS_ERROR]
