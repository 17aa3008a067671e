"""The second guest of a pair: one end of an RDMA connection that does what the first guest's tests ask over TCP.

`python -m tests.guest.rdma_peer ADDRESS PORT DEVICE` serves one client after the other, each with a queue pair and
memory of its own. A request is a line of JSON with the key `do`, an answer a line of JSON; bytes are hexadecimal.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import IO, Any

from tests.guest.rdma import Address, End

NBYTES = 1 << 16


class Peer:
    """What one client may ask."""

    def __init__(self, device: str, ipv4: str) -> None:
        self._end = End(device, ipv4)
        self._memory = self._end.memory(NBYTES)

    def connect(self, number: int, gid: str) -> dict[str, Any]:
        """Join the client's queue pair; returns what it has to know of this one and its memory."""
        self._end.connect(Address(number, gid))
        mine = self._end.address
        place = {"remote": int(self._memory.buf), "key": int(self._memory.rkey), "nbytes": NBYTES}
        return {"number": mine.number, "gid": mine.gid, **place}

    def put(self, data: str) -> dict[str, Any]:
        """Bytes into the memory, by the processor."""
        raw = bytes.fromhex(data)
        self._memory.write(raw, len(raw))
        return {}

    def get(self, nbytes: int) -> dict[str, Any]:
        """What lies in the memory."""
        return {"data": self._memory.read(nbytes, 0).hex()}

    def receive(self, nbytes: int) -> dict[str, Any]:
        """Have the next message land in the memory."""
        self._end.post_receive(self._memory, nbytes)
        return {}

    def received(self) -> dict[str, Any]:
        """Wait for it."""
        return {"statuses": self._end.statuses()}

    def withdraw(self) -> dict[str, Any]:
        """Take the registration of the memory back: its key is good for nothing from then on."""
        self._memory.close()
        return {}


def serve(stream: IO[str], peer: Peer) -> None:
    """Answer until the client leaves."""
    for line in stream:
        told = json.loads(line)
        answer = getattr(peer, told.pop("do"))(**told)
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def main(ipv4: str, port: str, device: str) -> None:
    """Serve clients, one after the other, for ever."""
    sys.path.insert(0, os.environ["TIERLOOP_GUEST_PYVERBS"])
    with socket.create_server((ipv4, int(port))) as listener:
        print(f"peer: serves on {ipv4}:{port}", flush=True)
        while True:
            client, _ = listener.accept()
            with client, client.makefile("rw") as stream:
                serve(stream, Peer(device, ipv4))


if __name__ == "__main__":
    main(*sys.argv[1:])
