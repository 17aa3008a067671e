"""Soft RDMA of a real kernel: registration, write, read and send over a loop, and a key that is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("pyverbs")

NAME = "rxe0"
IPV4_GID = 1
POLL_S = 10.0
REMOTE_ACCESS_ERROR = 10


class Loop:
    """Two connected queue pairs on one device, a completion queue, and registered memory."""

    def __init__(self) -> None:
        import pyverbs.enums as e
        from pyverbs.addr import AHAttr, GlobalRoute
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.e: Any = e
        self.device = Context(name=NAME)
        self.domain = PD(self.device)
        self.queue = CQ(self.device, 64)
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        room = QPCap(16, 16, 1, 1)
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=room)
        self.near, self.far = QP(self.domain, wanted, QPAttr()), QP(self.domain, wanted, QPAttr())
        gid = self.device.query_gid(1, IPV4_GID)
        for mine, other in ((self.near, self.far), (self.far, self.near)):
            attributes = QPAttr(port_num=1)
            attributes.qp_access_flags = self.access
            mine.to_init(attributes)
            attributes.dest_qp_num = other.qp_num
            attributes.path_mtu = e.IBV_MTU_1024
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
            attributes.min_rnr_timer = 12
            route = GlobalRoute(dgid=gid, sgid_index=IPV4_GID)
            attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
            mine.to_rtr(attributes)
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 7, 7
            mine.to_rts(attributes)

    def memory(self, nbytes: int) -> Any:
        """Registered memory."""
        from pyverbs.mr import MR

        return MR(self.domain, nbytes, self.access)

    def post(self, opcode: int, local: Any, nbytes: int, remote: Any = None, key: int | None = None) -> None:
        """Post a request from the near end."""
        from pyverbs.wr import SGE, SendWR

        request = SendWR(
            opcode=opcode,
            num_sge=1,
            sg=[SGE(local.buf, nbytes, local.lkey)],
            send_flags=self.e.IBV_SEND_SIGNALED,
        )
        if remote is not None:
            request.set_wr_rdma(remote.rkey if key is None else key, remote.buf)
        self.near.post_send(request)

    def statuses(self, count: int = 1) -> list[int]:
        """The statuses of that many completions."""
        found: list[int] = []
        deadline = time.monotonic() + POLL_S
        while len(found) < count and time.monotonic() < deadline:
            _, completions = self.queue.poll(1)
            found += [int(one.status) for one in completions]
        return found


@pytest.fixture
def loop() -> Loop:
    """A loop of its own: a queue pair that failed takes nothing more."""
    return Loop()


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_write_arrives(loop: Loop, nbytes: int) -> None:
    near, far = loop.memory(nbytes), loop.memory(nbytes)
    near.write("w" * nbytes, nbytes)
    loop.post(loop.e.IBV_WR_RDMA_WRITE, near, nbytes, far)
    assert loop.statuses() == [0]
    assert far.read(nbytes, 0) == b"w" * nbytes


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_read_brings_the_bytes(loop: Loop, nbytes: int) -> None:
    near, far = loop.memory(nbytes), loop.memory(nbytes)
    far.write("r" * nbytes, nbytes)
    loop.post(loop.e.IBV_WR_RDMA_READ, near, nbytes, far)
    assert loop.statuses() == [0]
    assert near.read(nbytes, 0) == b"r" * nbytes


def test_a_message_is_received(loop: Loop) -> None:
    from pyverbs.wr import SGE, RecvWR

    near, far = loop.memory(4096), loop.memory(4096)
    near.write("s" * 4096, 4096)
    loop.far.post_recv(RecvWR(num_sge=1, sg=[SGE(far.buf, 4096, far.lkey)]))
    loop.post(loop.e.IBV_WR_SEND, near, 4096)
    assert loop.statuses(2) == [0, 0]
    assert far.read(4096, 0) == b"s" * 4096


def test_a_wrong_key_is_refused(loop: Loop) -> None:
    near, far = loop.memory(4096), loop.memory(4096)
    loop.post(loop.e.IBV_WR_RDMA_WRITE, near, 4096, far, key=far.rkey ^ 0xFF)
    assert loop.statuses() == [REMOTE_ACCESS_ERROR]
    assert far.read(4096, 0) == bytes(4096)
